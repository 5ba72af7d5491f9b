//! Texts to ids, by the `tokenizer.json` that `transformers` writes beside a model.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use tokenizers::{Error, Tokenizer, TruncationParams};

use crate::serve::Service;

impl Service {
    /// Takes texts as well as ids, if the folder has a `tokenizer.json`. They are cut to what the model takes, with the tokens that it wants at their ends.
    ///
    /// # Errors
    /// A file that is none: what the library says.
    pub fn with_tokenizer(mut self, folder: &Path) -> Result<Service, Error> {
        let file = folder.join("tokenizer.json");
        if file.exists() {
            let mut tokenizer = Tokenizer::from_file(file)?;
            tokenizer.with_padding(None);
            let max_length = self.max_len;
            let truncation = TruncationParams { max_length, ..TruncationParams::default() };
            tokenizer.with_truncation(Some(truncation))?;
            self.tokenizer = Some(Arc::new(move |text| {
                let encoding =
                    tokenizer.encode_fast(text, true).map_err(|error| error.to_string())?;
                Ok(encoding.get_ids().to_vec())
            }));
        }
        Ok(self)
    }
}
