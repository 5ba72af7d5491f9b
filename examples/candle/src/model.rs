//! A small transformer encoder with made-up weights, the same each time: tokens in, the mean of their vectors out.
//! Plain candle; nothing here knows where it runs.
#![forbid(unsafe_code)]

use candle_core::{D, Device, Result, Tensor};
use candle_nn::{LayerNorm, Linear, Module, ops};

/// Tokens that there are.
pub(crate) const VOCABULARY: u32 = 4096;
/// Tokens of one request.
pub(crate) const MAX_TOKENS: usize = 512;
/// Numbers of an embedding.
pub(crate) const WIDTH: usize = 512;
const HEADS: usize = 8;
const BLOCKS: usize = 8;

/// Weights on one candle device.
pub(crate) struct Model {
    tokens: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

struct Block {
    attention_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    project: Linear,
    mlp_norm: LayerNorm,
    widen: Linear,
    narrow: Linear,
}

impl Model {
    pub(crate) fn new(device: &Device) -> Result<Model> {
        let mut weights = Weights { device, state: 1 };
        let tokens = weights.tensor(&[VOCABULARY as usize, WIDTH], 1.0)?;
        let positions = weights.tensor(&[MAX_TOKENS, WIDTH], 0.2)?;
        let blocks = (0..BLOCKS).map(|_| Block::new(&mut weights)).collect::<Result<_>>()?;
        Ok(Model { tokens, positions, blocks, norm: weights.norm()? })
    }

    pub(crate) fn device(&self) -> &Device {
        self.tokens.device()
    }

    /// `embedding[WIDTH]` of `tokens[n]`.
    pub(crate) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.positions.narrow(0, 0, tokens.dim(0)?)?;
        let mut x = (self.tokens.index_select(tokens, 0)? + positions)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.norm.forward(&x)?.mean(0)
    }
}

impl Block {
    fn new(weights: &mut Weights<'_>) -> Result<Block> {
        Ok(Block {
            attention_norm: weights.norm()?,
            query: weights.linear(WIDTH, WIDTH)?,
            key: weights.linear(WIDTH, WIDTH)?,
            value: weights.linear(WIDTH, WIDTH)?,
            project: weights.linear(WIDTH, WIDTH)?,
            mlp_norm: weights.norm()?,
            widen: weights.linear(WIDTH, 4 * WIDTH)?,
            narrow: weights.linear(4 * WIDTH, WIDTH)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&self.attention_norm.forward(x)?)?)?;
        let wide = self.widen.forward(&self.mlp_norm.forward(&x)?)?.gelu()?;
        x + self.narrow.forward(&wide)?
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let n = x.dim(0)?;
        // [n, WIDTH] to [HEADS, n, WIDTH / HEADS].
        let heads = |layer: &Linear| {
            layer.forward(x)?.reshape((n, HEADS, WIDTH / HEADS))?.transpose(0, 1)?.contiguous()
        };
        let (query, key, value) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        let scale = ((WIDTH / HEADS) as f64).sqrt().recip();
        let scores = (query.matmul(&key.transpose(D::Minus2, D::Minus1)?)? * scale)?;
        let mixed = ops::softmax_last_dim(&scores)?.matmul(&value)?;
        self.project.forward(&mixed.transpose(0, 1)?.contiguous()?.reshape((n, WIDTH))?)
    }
}

/// Weights from a linear congruential generator.
struct Weights<'d> {
    device: &'d Device,
    state: u64,
}

impl Weights<'_> {
    /// Uniform numbers of that standard deviation.
    fn tensor(&mut self, shape: &[usize], deviation: f32) -> Result<Tensor> {
        let range = deviation * 12.0f32.sqrt();
        let mut uniform = || {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((self.state >> 40) as f32 / (1 << 24) as f32 - 0.5) * range
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| uniform()).collect();
        Tensor::from_vec(values, shape, self.device)
    }

    fn linear(&mut self, from: usize, to: usize) -> Result<Linear> {
        let weight = self.tensor(&[to, from], (from as f32).sqrt().recip())?;
        Ok(Linear::new(weight, Some(self.tensor(&[to], 0.02)?)))
    }

    fn norm(&mut self) -> Result<LayerNorm> {
        let weight = (self.tensor(&[WIDTH], 0.1)? + 1.0)?;
        Ok(LayerNorm::new(weight, self.tensor(&[WIDTH], 0.1)?, 1e-5))
    }
}
