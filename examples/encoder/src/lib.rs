//! A transformer encoder, as search and retrieval use it: BERT's shape, from the files that `transformers` writes.
//!
//! | module | decides |
//! |---|---|
//! | `weights` | what is in a model's folder, and whether it is whole |
//! | `load` | how weights get to the device |
//! | `kernels`, `encoder.cu`, `encoder.ptx` | kernels with their twins; element types |
//! | `model` | the forward pass; lanes, each with a graph for every shape of batch |
//! | `connections` | how long clients may take |
//! | `serve` | requests gathered into batches, over HTTP |
//! | `text` | texts to ids; feature `tokenizers` |
//!
//! `README.md` says how to run it.

mod connections;
mod kernels;
mod load;
mod model;
mod serve;
#[cfg(feature = "tokenizers")]
mod text;
mod weights;

pub use connections::serve;
pub use kernels::{Kernels, Precision};
pub use load::{Piece, upload};
pub use model::{Lane, Model, Shape};
pub use serve::{Failure, NOT_FINITE, Service, Serving, TextToIds, is_embedding, router, up_to};
#[cfg(feature = "tokenizers")]
pub use text::tokenizer;
pub use weights::{Config, Folder, LoadError, ModelConfig, Tensor};
