//! Texts to ids, by the `tokenizer.json` that `transformers` writes beside a model.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use tokenizers::{Tokenizer, TruncationParams};

use crate::serve::TextToIds;

/// Reads a folder's tokenizer. Texts are cut to `max_len` tokens, with those that the model wants at their ends.
///
/// # Errors
/// No `tokenizer.json`, or one that is none: what the library says.
pub fn tokenizer(folder: &Path, max_len: usize) -> Result<TextToIds, tokenizers::Error> {
    let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
    tokenizer.with_padding(None);
    let truncation = TruncationParams { max_length: max_len, ..TruncationParams::default() };
    tokenizer.with_truncation(Some(truncation))?;
    Ok(Arc::new(move |text| {
        let encoding = tokenizer.encode_fast(text, true).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }))
}
