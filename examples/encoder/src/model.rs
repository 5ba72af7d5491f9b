//! The model: weights on a device, and the forward pass over packed texts.
//!
//! | item | what it is |
//! |---|---|
//! | [`Model`] | kernels, weights, the library for products: shared by all lanes |
//! | [`Lane`] | a stream with its own memory, which embeds one batch at a time |
//! | [`Shape`] | extents of a batch, rounded up; a lane has a graph for each |
//!
//! A batch is one launch of its shape's graph, which reads packed tokens from the host's memory and writes embeddings there. A lane passes the same
//! arguments each time, so that the closure which wrote the graph does not run again, and a launch is one call of the driver.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use gpu_await::{
    Device, DeviceBuffer, DeviceKind, Frozen, Graph, In, InOut, Mapped, Out, Queue, Result, Stream,
    View, ViewMut,
};
use gpu_await_libs::{Blas, Gemm};

use crate::kernels::{Kernels, Launches, TILE};
use crate::load;
use crate::weights::{Config, Folder, LoadError};

/// Of a product. In a graph each product keeps as much, so that the default, 32 MiB, would be gigabytes for all shapes.
const WORKSPACE_BYTES: usize = 1 << 20;

/// Weights and code on one device. Cheap to clone; nothing in it changes.
#[derive(Clone)]
pub struct Model<T: Launches>(Arc<Core<T>>);

struct Core<T: Launches> {
    config: Config,
    device: Device,
    kernels: Kernels<T>,
    weights: Weights<Frozen<T>>,
    blas: Blas,
}

/// `P` is a part of the weights.
pub(crate) struct Weights<P> {
    words: P,
    /// Of positions, each with the first token type added: texts have one segment.
    places: P,
    norm: Affine<P>,
    layers: Vec<Layer<P>>,
}

/// A weight and a bias, of a product or of a norm.
#[expect(missing_docs, reason = "the names say it")]
pub struct Affine<P> {
    pub weight: P,
    pub bias: P,
}

struct Layer<P> {
    /// Queries, keys and values in one product.
    qkv: Affine<P>,
    project: Affine<P>,
    middle: Affine<P>,
    up: Affine<P>,
    down: Affine<P>,
    norm: Affine<P>,
}

impl<P> Weights<P> {
    /// Takes all parts in their order. `take` gets the names of tensors that are one behind the other, and the shape of each.
    pub(crate) fn of<E>(
        config: &Config,
        mut take: impl FnMut(&[String], &[usize]) -> Result<P, E>,
    ) -> Result<Self, E> {
        let Config { hidden_size: hidden, intermediate_size: wide, .. } = *config;
        let mut table =
            |name, rows| take(&[format!("embeddings.{name}_embeddings.weight")], &[rows, hidden]);
        let words = table("word", config.vocab_size)?;
        let places = table("position", config.max_position_embeddings)?;
        let mut affine = |of: String, names: &[&str], shape: &[usize]| {
            let named =
                |what| names.iter().map(|name| format!("{of}.{name}.{what}")).collect::<Vec<_>>();
            Ok(Affine {
                weight: take(&named("weight"), shape)?,
                bias: take(&named("bias"), &shape[..1])?,
            })
        };
        let norm = affine("embeddings".into(), &["LayerNorm"], &[hidden])?;
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let mut affine = |names: &[&str], shape: &[usize]| {
                affine(format!("encoder.layer.{layer}"), names, shape)
            };
            Ok(Layer {
                qkv: affine(
                    &["attention.self.query", "attention.self.key", "attention.self.value"],
                    &[hidden, hidden],
                )?,
                project: affine(&["attention.output.dense"], &[hidden, hidden])?,
                middle: affine(&["attention.output.LayerNorm"], &[hidden])?,
                up: affine(&["intermediate.dense"], &[wide, hidden])?,
                down: affine(&["output.dense"], &[hidden, wide])?,
                norm: affine(&["output.LayerNorm"], &[hidden])?,
            })
        });
        Ok(Weights { words, places, norm, layers: layers.collect::<Result<_, E>>()? })
    }
}

/// The products of a layer, for one number of tokens.
struct Plans<T> {
    qkv: Gemm<T>,
    project: Gemm<T>,
    up: Gemm<T>,
    down: Gemm<T>,
}

/// Extents of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    tokens: usize,
    texts: usize,
}

impl Shape {
    /// The smallest that holds so many tokens and texts. Tokens: 16, 32, multiples of 64 up to 1,024, then eight an octave. Texts: powers of 8.
    #[must_use]
    pub fn holding(tokens: usize, texts: usize) -> Shape {
        let octave = tokens.next_power_of_two();
        let step = if octave <= 64 { octave.max(16) } else { (octave / 16).max(64) };
        let texts = (0..).map(|power| 8usize.pow(power)).find(|most| *most >= texts);
        Shape { tokens: tokens.max(1).next_multiple_of(step), texts: texts.unwrap_or(usize::MAX) }
    }

    /// All that hold batches of at most so many tokens and texts.
    #[must_use]
    pub fn all(tokens: usize, texts: usize) -> Vec<Shape> {
        let mut shapes = Vec::new();
        let (mut least, mut next) = (1, 1);
        while least <= texts {
            let shape = Shape::holding(next, least);
            shapes.push(shape);
            next = shape.tokens + 1;
            if next > tokens {
                least = shape.texts + 1;
                next = least;
            }
        }
        shapes
    }

    /// The lengths of texts that fill it.
    #[must_use]
    pub fn filling(&self) -> Vec<usize> {
        let mut lengths = vec![1; self.texts.min(self.tokens)];
        lengths[0] += self.tokens - lengths.len();
        lengths
    }

    /// Tiles of queries: each text has one for 64 of its tokens, and one for the rest.
    fn tiles(&self) -> usize {
        self.tokens / TILE + self.texts
    }

    /// Integers of a packed batch: ids, positions, starts, and two for each tile.
    fn packed_len(&self) -> usize {
        2 * self.tokens + self.texts + 1 + 2 * self.tiles()
    }

    fn scratch_len(&self, config: &Config) -> usize {
        self.tokens * (6 * config.hidden_size + config.intermediate_size)
    }

    /// Packs texts. What is left of the tokens belongs to no text, and what is left of the texts has no tokens.
    fn pack(&self, texts: &[&[u32]], to: &mut [u32]) {
        to.fill(0);
        let (ids, rest) = to.split_at_mut(self.tokens);
        let (positions, rest) = rest.split_at_mut(self.tokens);
        let (starts, tiles) = rest.split_at_mut(self.texts + 1);
        tiles.fill(u32::MAX);
        let mut each_tile = tiles.chunks_exact_mut(2);
        let mut start = 0;
        for (number, text) in texts.iter().enumerate() {
            ids[start..start + text.len()].copy_from_slice(text);
            positions[start..start + text.len()].iter_mut().zip(0..).for_each(|(to, at)| *to = at);
            for (first, tile) in (0..text.len()).step_by(TILE).zip(&mut each_tile) {
                tile.copy_from_slice(&[number as u32, first as u32]);
            }
            start += text.len();
            starts[number + 1] = start as u32;
        }
        starts[texts.len() + 1..].fill(start as u32);
    }
}

impl<T: Launches> Affine<Frozen<T>> {
    /// Puts the product on the queue: `to = x * weight^T + bias`, of a weight with a row for each output.
    fn put(
        &self,
        q: &Queue<'_>,
        plan: &Gemm<T>,
        x: &View<'_, T>,
        to: &mut ViewMut<'_, T>,
    ) -> Result<()> {
        plan.launch_with_bias(q, 1.0, x, &self.weight, &self.bias, 0.0, to)
    }
}

impl<T: Launches> Model<T> {
    /// Loads kernels and weights. Before serving: on a GPU loading waits for everything that runs.
    ///
    /// # Errors
    /// A tensor is missing or has a wrong shape or type ([`LoadError`]); cuBLASLt is not found; device memory is short.
    pub async fn load(device: &Device, folder: &Arc<Folder>) -> Result<Model<T>, LoadError> {
        Self::with(device, folder, load::frozen(device, folder, load::pieces)).await
    }

    /// With weights that come from elsewhere.
    pub(crate) async fn with<E: From<LoadError> + From<gpu_await::Error>>(
        device: &Device,
        folder: &Folder,
        weights: impl Future<Output = Result<Frozen<T>, E>>,
    ) -> Result<Model<T>, E> {
        let kernels = async { Ok(T::load(device).await?) };
        let blas = async { Ok(Blas::load(device).await?) };
        let (weights, kernels, blas) = tokio::try_join!(weights, kernels, blas)?;
        let mut next = 0;
        let weights = Weights::of(&folder.config, |names, shape| {
            let start = next;
            next += names.len() * shape.iter().product::<usize>();
            weights.part(start..next)
        })?;
        let (config, device) = (folder.config.clone(), device.clone());
        Ok(Model(Arc::new(Core { config, device, kernels, weights, blas })))
    }

    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Where it is.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Makes a lane on a stream, for batches of at most so many tokens and texts.
    ///
    /// # Errors
    /// Out of device memory; the device is lost or closed.
    pub async fn lane(&self, stream: Stream, tokens: usize, texts: usize) -> Result<Lane<T>> {
        let device = &self.0.device;
        let most = Shape::holding(tokens, texts);
        let embeddings_len = most.texts * self.0.config.hidden_size;
        // Zeros: rows of no text are computed as well, and need a value.
        Ok(Lane {
            core: self.0.clone(),
            packed: device.pinned_async(most.packed_len()).await?.into_mapped(),
            embeddings: device.pinned_async(embeddings_len).await?.into_mapped(),
            scratch: stream.zeros(most.scratch_len(&self.0.config)).queued()?,
            stream,
            graphs: Some(HashMap::new()),
        })
    }
}

impl<T: Launches> Core<T> {
    /// The library keeps those of its last shapes, and searches for none of them twice.
    async fn plans(&self, tokens: usize) -> Result<Plans<T>> {
        let (hidden, wide) = (self.config.hidden_size, self.config.intermediate_size);
        let plan = |outputs, inputs| {
            let plan = self.blas.gemm::<T>(tokens, outputs, inputs).transposed_b().bias();
            plan.workspace_bytes(WORKSPACE_BYTES).plan()
        };
        Ok(Plans {
            qkv: plan(3 * hidden, hidden).await?,
            project: plan(hidden, hidden).await?,
            up: plan(wide, hidden).await?,
            down: plan(hidden, wide).await?,
        })
    }

    /// Writes the forward pass to a queue. `each` gets the hidden states: of the embedding first, then of each layer.
    fn forward(
        &self,
        q: &Queue<'_>,
        (shape, plans): (Shape, &Plans<T>),
        packed: &View<'_, u32>,
        scratch: ViewMut<'_, T>,
        embeddings: &mut ViewMut<'_, f32>,
        each: &mut dyn FnMut(&View<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let Config { hidden_size: hidden, layer_norm_eps: eps, .. } = self.config;
        let Shape { tokens, texts } = shape;
        let (ids, positions) = (packed.slice(..tokens)?, packed.slice(tokens..2 * tokens)?);
        // Each layer reads these, so they come over the bus once, beside the first kernel.
        let mut ends = q.empty(packed.len() - 2 * tokens)?;
        q.copy(&packed.slice(2 * tokens..)?, &mut ends)?;
        let (starts, tiles) = (ends.slice(..texts + 1)?, ends.slice(texts + 1..)?);
        let (mut x, rest) = scratch.split_at_mut(tokens * hidden)?;
        let (mut y, rest) = rest.split_at_mut(tokens * hidden)?;
        let (mut z, rest) = rest.split_at_mut(tokens * hidden)?;
        let (mut qkv, mut wide) = rest.split_at_mut(3 * tokens * hidden)?;

        let (k, hidden_u32, heads) =
            (&self.kernels, hidden as u32, self.config.num_attention_heads as u32);
        let Weights { words, places, norm, layers } = &self.weights;
        T::embed_norm(
            k,
            q,
            &ids,
            &positions,
            words,
            places,
            &norm.weight,
            &norm.bias,
            &mut x,
            eps,
        )?;
        each(&x.view())?;
        for Layer { qkv: wqkv, project, middle, up, down, norm } in layers {
            wqkv.put(q, &plans.qkv, &x.view(), &mut qkv)?;
            T::attention(k, q, &qkv.view(), &starts, &tiles, &mut z, hidden_u32, heads)?;
            project.put(q, &plans.project, &z.view(), &mut y)?;
            T::add_norm(k, q, &y.view(), &x.view(), &middle.weight, &middle.bias, &mut z, eps)?;
            up.put(q, &plans.up, &z.view(), &mut wide)?;
            T::gelu(k, q, &mut wide)?;
            down.put(q, &plans.down, &wide.view(), &mut y)?;
            T::add_norm(k, q, &y.view(), &z.view(), &norm.weight, &norm.bias, &mut x, eps)?;
            each(&x.view())?;
        }
        T::pool(k, q, &x.view(), &starts, embeddings, hidden_u32)
    }
}

/// A stream with memory for one batch at a time.
pub struct Lane<T: Launches> {
    core: Arc<Core<T>>,
    stream: Stream,
    /// In host memory, which kernels use in place: a batch is one launch, without copies around it.
    packed: Mapped<u32>,
    embeddings: Mapped<f32>,
    scratch: DeviceBuffer<T>,
    /// None where each batch launches kernel after kernel.
    graphs: Option<HashMap<Shape, Graph<Slots<T>>>>,
}

/// The packed batch, scratch memory, the embeddings.
type Slots<T> = (In<u32>, InOut<T>, Out<f32>);

impl<T: Launches> Lane<T> {
    /// Embeds texts, a row for each. At least one text, each with at least one token; ids beyond the vocabulary count as its last. Resolves
    /// when the embeddings are on the host. Dropped, it leaves the device working, for which the next batch waits.
    ///
    /// # Errors
    /// More tokens or texts than the lane was made for; out of memory; the device is lost or closed.
    pub async fn embed(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        let shape = self.pack(texts).await?;
        self.prepare(shape).await?;
        let Lane { core, stream, packed, scratch, embeddings, graphs } = self;
        let hidden = core.config.hidden_size;
        let packed = packed.slice(..shape.packed_len())?;
        let mut scratch = scratch.slice_mut(..shape.scratch_len(&core.config))?;
        let mut rows = embeddings.view_mut();
        let mut rows = rows.slice_mut(..shape.texts * hidden)?;
        if let Some(graphs) = graphs {
            graphs[&shape].launch(stream, (&packed, &mut scratch, &mut rows)).await?;
        } else {
            let plans = core.plans(shape.tokens).await?;
            let forward = |q: &Queue<'_>| {
                core.forward(q, (shape, &plans), &packed, scratch, &mut rows, &mut |_| Ok(()))
            };
            stream.batch(forward).await?;
        }
        Ok(&embeddings.host().await?[..texts.len() * hidden])
    }

    /// Launches kernel after kernel from now on.
    #[must_use]
    pub fn without_graphs(self) -> Lane<T> {
        Lane { graphs: None, ..self }
    }

    /// Makes the graph for batches of a shape, if there is none. Before serving: plans and graphs take milliseconds.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    pub async fn prepare(&mut self, shape: Shape) -> Result<()> {
        let Some(graphs) = self.graphs.as_mut().filter(|graphs| !graphs.contains_key(&shape))
        else {
            return Ok(());
        };
        let state = (self.core.clone(), self.core.plans(shape.tokens).await?, shape);
        let graph = self.core.device.graph(
            state,
            |q, (core, plans, shape), (packed, scratch, mut embeddings)| {
                let each = &mut |_: &View<'_, T>| Ok(());
                core.forward(q, (*shape, plans), &packed, scratch, &mut embeddings, each)
            },
        );
        graphs.insert(shape, graph);
        Ok(())
    }

    /// [`prepare`](Self::prepare), and on a GPU a launch, which compiles the graph.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    pub async fn warm(&mut self, shape: Shape) -> Result<()> {
        self.prepare(shape).await?;
        if self.core.device.kind() == DeviceKind::Host {
            return Ok(());
        }
        let texts: Vec<_> = shape.filling().into_iter().map(|len| vec![0; len]).collect();
        let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
        self.embed(&texts).await.map(drop)
    }

    /// The hidden states of texts, as `f32`: for each layer, the embedding first, a row for each token, one text behind the other.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    pub async fn hidden_states(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let shape = self.pack(texts).await?;
        let plans = self.core.plans(shape.tokens).await?;
        let Lane { core, stream, packed, scratch, embeddings, .. } = self;
        let hidden = core.config.hidden_size;
        let len = texts.iter().map(|text| text.len()).sum::<usize>() * hidden;
        let packed = packed.slice(..shape.packed_len())?;
        let scratch = scratch.slice_mut(..shape.scratch_len(&core.config))?;
        let mut rows = embeddings.view_mut();
        let mut rows = rows.slice_mut(..shape.texts * hidden)?;
        let op = stream.batch(|q| {
            let mut states = Vec::new();
            let mut each = |state: &View<'_, T>| {
                states.push(q.download(&state.slice(..len)?)?);
                Ok(())
            };
            core.forward(q, (shape, &plans), &packed, scratch, &mut rows, &mut each)?;
            Ok(states)
        });
        let states = op.await?;
        Ok(states.iter().map(|state| state.iter().map(|x| x.to_f32()).collect()).collect())
    }

    /// Packs texts behind the lane's last batch.
    async fn pack(&mut self, texts: &[&[u32]]) -> Result<Shape> {
        let shape = Shape::holding(texts.iter().map(|text| text.len()).sum(), texts.len());
        // Whether there is room, before the slice below.
        self.packed.slice(..shape.packed_len())?;
        shape.pack(texts, &mut self.packed.host().await?[..shape.packed_len()]);
        Ok(shape)
    }
}
