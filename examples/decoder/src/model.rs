//! The model: weights on a device, and the forward pass of a step.
//!
//! | a step | its tokens | keys and values |
//! |---|---|---|
//! | of prompts | all of some prompts, one behind the other | of the prompts, written to the cache |
//! | of next tokens | one of each sequence, chosen by the step before | in the cache, those of these tokens too |
//!
//! Either ends with a token for each sequence, which stays on the device for the next step.
#![forbid(unsafe_code)]

use std::sync::Arc;

use encoder::{Affine, Folder, LoadError, Piece, frozen};
use gpu_await::{Device, Frozen, Queue, Result, View, ViewMut};
use gpu_await_libs::{Activation, Blas, Gemm};

use crate::config::Config;
use crate::kernels::{BLOCK, Cached, FEW, Kernels, Launches, Product, SEQUENCE, choose};
use crate::steps::Shape;

/// Of a product, at most. In a graph each keeps what its algorithm needs, and there are many shapes of prompts.
const WORKSPACE_BYTES: [usize; 2] = [4 << 20, 1 << 20];

/// Weights and code on one device. Cheap to clone; nothing in it changes.
#[derive(Clone)]
pub struct Model<T: Launches>(pub(crate) Arc<Core<T>>);

pub(crate) struct Core<T: Launches> {
    pub(crate) config: Config,
    pub(crate) device: Device,
    kernels: Kernels<T>,
    choose: choose,
    weights: Weights<Frozen<T>>,
    /// The embeddings once more, with what lies behind them: rows of logits are aligned with some that mean nothing.
    head: Frozen<T>,
    blas: Blas,
}

/// `P` is a part of the weights.
struct Weights<P> {
    words: P,
    places: P,
    layers: Vec<Layer<P>>,
    norm: Affine<P>,
}

struct Layer<P> {
    before: Affine<P>,
    /// Queries, keys and values in one product.
    qkv: Affine<P>,
    project: Affine<P>,
    middle: Affine<P>,
    up: Affine<P>,
    down: Affine<P>,
}

impl<P> Weights<P> {
    /// Takes all parts in their order.
    fn of<E>(
        config: &Config,
        mut take: impl FnMut(&str, &[usize]) -> Result<P, E>,
    ) -> Result<Self, E> {
        let (hidden, wide) = (config.n_embd, config.inner());
        let words = take("wte.weight", &[config.vocab_size, hidden])?;
        let places = take("wpe.weight", &[config.n_positions, hidden])?;
        let mut affine = |name: &str, shape: &[usize]| {
            Ok(Affine {
                weight: take(&format!("{name}.weight"), shape)?,
                bias: take(&format!("{name}.bias"), &shape[shape.len() - 1..])?,
            })
        };
        let layers = (0..config.n_layer).map(|layer| {
            let mut affine =
                |name: &str, shape: &[usize]| affine(&format!("h.{layer}.{name}"), shape);
            Ok(Layer {
                before: affine("ln_1", &[hidden])?,
                qkv: affine("attn.c_attn", &[hidden, 3 * hidden])?,
                project: affine("attn.c_proj", &[hidden, hidden])?,
                middle: affine("ln_2", &[hidden])?,
                up: affine("mlp.c_fc", &[hidden, wide])?,
                down: affine("mlp.c_proj", &[wide, hidden])?,
            })
        });
        let layers = layers.collect::<Result<_, E>>()?;
        Ok(Weights { words, places, layers, norm: affine("ln_f", &[hidden])? })
    }
}

/// The products of a step.
pub(crate) struct Plans<T> {
    qkv: Gemm<T>,
    project: Gemm<T>,
    up: Gemm<T>,
    down: Gemm<T>,
    head: Gemm<T, f32>,
}

/// What a step works on.
pub(crate) struct Memory<'a, T> {
    pub(crate) input: View<'a, u32>,
    pub(crate) slab: ViewMut<'a, T>,
    pub(crate) scratch: ViewMut<'a, T>,
    pub(crate) logits: ViewMut<'a, f32>,
    /// By slot, the token that was chosen last.
    pub(crate) chosen: ViewMut<'a, u32>,
    pub(crate) out: ViewMut<'a, u32>,
}

/// How a product ends.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Stores,
    /// With GELU.
    Activates,
    /// To what is there.
    Adds,
}

impl<T: Launches> Model<T> {
    /// Loads kernels and weights. Before serving: on a GPU loading waits for everything that runs.
    ///
    /// # Errors
    /// A tensor is missing or has a wrong shape or type ([`LoadError`]); cuBLASLt is not found; device memory is short.
    pub async fn load(
        device: &Device,
        folder: &Arc<Folder<Config>>,
    ) -> Result<Model<T>, LoadError> {
        let weights = frozen::<_, T>(device, folder, |folder| {
            let mut pieces = Vec::new();
            Weights::of(&folder.config, |name, shape| {
                let (tensor, len) = (folder.tensor(name, shape)?, shape.iter().product());
                pieces.push(Piece { tensor, len, row: None });
                Ok::<_, LoadError>(())
            })?;
            Ok(pieces)
        });
        let kernels =
            async { Ok::<_, LoadError>((T::load(device).await?, choose::load(device).await?)) };
        let blas = async { Ok(Blas::load(device).await?) };
        let (all, (kernels, choose), blas) = tokio::try_join!(weights, kernels, blas)?;
        let (config, mut next) = (folder.config.clone(), 0);
        let weights = Weights::of(&config, |_, shape| {
            let start = next;
            next += shape.iter().product::<usize>();
            all.part(start..next)
        })?;
        let head = all.part(..config.padded_vocabulary() * config.n_embd)?;
        let device = device.clone();
        Ok(Model(Arc::new(Core { config, device, kernels, choose, weights, head, blas })))
    }

    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }
}

impl<T: Launches> Core<T> {
    /// Elements of a block of the cache: of each layer, keys and values.
    pub(crate) fn block_len(&self) -> usize {
        self.config.n_layer * 2 * BLOCK * self.config.n_embd
    }

    /// Words of a sequence in a step's input.
    pub(crate) fn row_len(&self) -> usize {
        SEQUENCE + self.config.n_positions / BLOCK
    }

    fn cached(&self, layer: usize) -> Cached {
        Cached {
            row_len: self.row_len() as u32,
            block_len: self.block_len() as u32,
            hidden: self.config.n_embd as u32,
            heads: self.config.n_head as u32,
            layer: layer as u32,
        }
    }

    pub(crate) fn scratch_len(&self, shape: Shape) -> usize {
        shape.tokens * (6 * self.config.n_embd + self.config.inner())
            + shape.rows * self.config.n_embd
    }

    pub(crate) fn logits_len(&self, shape: Shape) -> usize {
        shape.rows * self.config.padded_vocabulary()
    }

    pub(crate) async fn plans(&self, shape: Shape) -> Result<Plans<T>> {
        let (hidden, wide) = (self.config.n_embd, self.config.inner());
        let workspace = WORKSPACE_BYTES[usize::from(shape.tiles > 0)];
        let plan = async |inputs, outputs, activation| {
            let gemm = self.blas.gemm::<T>(shape.tokens, outputs, inputs).bias();
            gemm.activation(activation).workspace_bytes(workspace).plan().await
        };
        let head = self.blas.gemm::<T>(shape.rows, self.config.padded_vocabulary(), hidden);
        Ok(Plans {
            qkv: plan(hidden, 3 * hidden, Activation::None).await?,
            project: plan(hidden, hidden, Activation::None).await?,
            up: plan(hidden, wide, Activation::Gelu).await?,
            down: plan(wide, hidden, Activation::None).await?,
            head: head.transposed_b().wide_output().workspace_bytes(workspace).plan().await?,
        })
    }

    /// Puts `to = x * weight + bias` on the queue. With a norm, `x` is normed first, by way of `y`.
    fn put(
        &self,
        q: &Queue<'_>,
        (of, plan): (&Affine<Frozen<T>>, &Gemm<T>),
        x: &View<'_, T>,
        norm: Option<(&Affine<Frozen<T>>, &mut ViewMut<'_, T>)>,
        end: End,
        to: &mut ViewMut<'_, T>,
    ) -> Result<()> {
        let (k, eps, outputs) = (&self.kernels, self.config.layer_norm_epsilon, of.bias.len());
        let rows = to.len() / outputs;
        if FEW.contains(&(rows as i128)) {
            let p = Product {
                inputs: (x.len() / rows) as u32,
                outputs: outputs as u32,
                norms: norm.is_some().into(),
                gelu: (end == End::Activates).into(),
                adds: (end == End::Adds).into(),
                eps,
            };
            // Of none, whichever.
            let norm = norm.map_or(&self.weights.norm, |(norm, _)| norm);
            return T::product(k, q, x, &norm.weight, &norm.bias, &of.weight, &of.bias, to, p);
        }
        let beta = if end == End::Adds { 1.0 } else { 0.0 };
        let Some((norm, y)) = norm else {
            return plan.launch_with_bias(q, 1.0, x, &of.weight, &of.bias, beta, to);
        };
        T::norm(k, q, x, &norm.weight, &norm.bias, y, eps)?;
        plan.launch_with_bias(q, 1.0, &y.view(), &of.weight, &of.bias, beta, to)
    }

    /// Writes the forward pass of a step to a queue.
    pub(crate) fn forward(
        &self,
        q: &Queue<'_>,
        (shape, plans): (Shape, &Plans<T>),
        memory: Memory<'_, T>,
    ) -> Result<()> {
        let Memory { input, mut slab, scratch, mut logits, mut chosen, mut out } = memory;
        let Config { n_embd: hidden, layer_norm_epsilon: eps, .. } = self.config;
        let (row_len, vocabulary) = (self.row_len() as u32, self.config.vocab_size as u32);
        let Shape { tokens, rows, .. } = shape;
        // Each layer reads these, so they come over the bus once, beside the first kernel.
        let mut ends = q.empty(input.len() - 3 * tokens)?;
        q.copy(&input.slice(3 * tokens..)?, &mut ends)?;
        let sequences = ends.slice(..rows * row_len as usize)?;
        let tiles = ends.slice(rows * row_len as usize..)?;
        let (mut x, rest) = scratch.split_at_mut(tokens * hidden)?;
        let (mut y, rest) = rest.split_at_mut(tokens * hidden)?;
        let (mut z, rest) = rest.split_at_mut(tokens * hidden)?;
        let (mut qkv, rest) = rest.split_at_mut(3 * tokens * hidden)?;
        let (mut wide, mut last) = rest.split_at_mut(tokens * self.config.inner())?;

        let k = &self.kernels;
        let Weights { words, places, layers, norm } = &self.weights;
        let (input, chosen_last) = (input.slice(..3 * tokens)?, chosen.view());
        T::embed(k, q, &input, &chosen_last, words, places, &mut x, hidden as u32)?;
        for (number, layer) in layers.iter().enumerate() {
            let Layer { before, qkv: wqkv, project, middle, up, down } = layer;
            let before = Some((before, &mut y));
            self.put(q, (wqkv, &plans.qkv), &x.view(), before, End::Stores, &mut qkv)?;
            let (qkv, cached) = (qkv.view(), self.cached(number));
            if shape.tiles > 0 {
                T::prompt(k, q, &qkv, &sequences, &tiles, &mut slab, &mut z, cached)?;
            } else {
                T::next(k, q, &qkv, &sequences, &mut slab, &mut z, cached)?;
            }
            self.put(q, (project, &plans.project), &z.view(), None, End::Adds, &mut x)?;
            let middle = Some((middle, &mut y));
            self.put(q, (up, &plans.up), &x.view(), middle, End::Activates, &mut wide)?;
            self.put(q, (down, &plans.down), &wide.view(), None, End::Adds, &mut x)?;
        }
        T::norm_last(
            k,
            q,
            &x.view(),
            &sequences,
            &norm.weight,
            &norm.bias,
            &mut last,
            row_len,
            eps,
        )?;
        plans.head.launch(q, 1.0, &last.view(), &self.head, 0.0, &mut logits)?;
        self.choose.launch(
            q,
            &logits.view(),
            &sequences,
            &mut chosen,
            &mut out,
            row_len,
            vocabulary,
        )
    }
}
