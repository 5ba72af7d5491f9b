//! What `config.json` says, checked.
#![forbid(unsafe_code)]

use encoder::{Check, LANES, LoadError, MAX_HIDDEN, ModelConfig};
use serde::Deserialize;

use crate::kernels::BLOCK;

/// What `config.json` says.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the names are those of `transformers`")]
pub struct Config {
    pub vocab_size: usize,
    pub n_embd: usize,
    pub n_layer: usize,
    pub n_head: usize,
    pub n_positions: usize,
    pub n_inner: Option<usize>,
    pub layer_norm_epsilon: f32,
    pub activation_function: String,
    #[serde(default = "yes")]
    pub scale_attn_weights: bool,
    #[serde(default)]
    pub scale_attn_by_inverse_layer_idx: bool,
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
}

fn yes() -> bool {
    true
}

impl Config {
    /// The width between the products of the feed-forward part.
    #[must_use]
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    /// Columns of the logits, of which the last ones mean nothing: cuBLASLt is fast where rows are aligned.
    pub(crate) fn padded_vocabulary(&self) -> usize {
        self.vocab_size.next_multiple_of(64)
    }
}

impl ModelConfig for Config {
    const PREFIX: &'static str = "transformer.";

    fn parse(json: &[u8]) -> Result<Config, LoadError> {
        let config: Config = serde_json::from_slice(json)?;
        let (hidden, heads) = (config.n_embd, config.n_head);
        // So that no number of elements overflows, and those of a block of the cache fit a `u32`.
        let most = u32::MAX as usize / hidden.saturating_mul(4 * BLOCK).max(1);
        Check::all([
            Check::positive("layer_norm_epsilon", config.layer_norm_epsilon),
            Check::is("activation_function", &config.activation_function, "gelu_new"),
            Check::is("scale_attn_weights", config.scale_attn_weights, "true"),
            Check::is("tie_word_embeddings", config.tie_word_embeddings, "true"),
            Check::is(
                "scale_attn_by_inverse_layer_idx",
                config.scale_attn_by_inverse_layer_idx,
                "false",
            ),
            Check::within("n_embd", hidden, LANES, MAX_HIDDEN),
            Check::heads("n_head", heads, hidden),
            Check::within("n_inner", config.n_inner.unwrap_or(16), 16, most),
            Check::within("vocab_size", config.vocab_size, 1, most),
            Check::within("n_layer", config.n_layer, 1, most),
            // At least 64, as the rows that pad the vocabulary are those of positions.
            Check::within("n_positions", config.n_positions, 64, most),
        ])?;
        Ok(config)
    }
}
