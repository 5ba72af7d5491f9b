//! What `config.json` says, checked.
#![forbid(unsafe_code)]

use encoder::{LoadError, ModelConfig};
use serde::Deserialize;

use crate::kernels::{BLOCK, HEAD_WIDTHS};

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
        let within = |field, found: usize, step: usize, most: usize| {
            let is_good = found != 0 && found.is_multiple_of(step) && found <= most;
            (field, found.to_string(), is_good, format!("multiples of {step} up to {most}"))
        };
        let is = |field, found: String, expected: &str| {
            let is_good = found == expected;
            (field, found, is_good, expected.into())
        };
        // So that no number of elements overflows, and those of a block of the cache fit a `u32`.
        let most = u32::MAX as usize / hidden.saturating_mul(4 * BLOCK).max(1);
        let has_width = HEAD_WIDTHS.iter().any(|width| heads.checked_mul(*width) == Some(hidden));
        let eps = config.layer_norm_epsilon;
        let checks = [
            (
                "layer_norm_epsilon",
                eps.to_string(),
                eps.is_finite() && eps > 0.0,
                "positive numbers".to_owned(),
            ),
            is("activation_function", config.activation_function.clone(), "gelu_new"),
            is("scale_attn_weights", config.scale_attn_weights.to_string(), "true"),
            is("tie_word_embeddings", config.tie_word_embeddings.to_string(), "true"),
            is(
                "scale_attn_by_inverse_layer_idx",
                config.scale_attn_by_inverse_layer_idx.to_string(),
                "false",
            ),
            within("n_embd", hidden, 64, 1024),
            ("n_head", heads.to_string(), has_width, format!("heads of {HEAD_WIDTHS:?}")),
            within("n_inner", config.n_inner.unwrap_or(16), 16, most),
            within("vocab_size", config.vocab_size, 1, most),
            within("n_layer", config.n_layer, 1, most),
            // At least 64, as the rows that pad the vocabulary are those of positions.
            within("n_positions", config.n_positions, 64, most),
        ];
        if let Some((field, found, _, supported)) = checks.into_iter().find(|check| !check.2) {
            return Err(LoadError::Config { field, found, supported });
        }
        Ok(config)
    }
}
