//! A transformer encoder, as search and retrieval use it: BERT's shape, from the files that `transformers` writes.
//!
//! | module | decides |
//! |---|---|
//! | `weights` | what is in a model's folder, and whether it is whole |
//! | `load` | how weights get to the device |
//! | `kernels`, `encoder.cu`, `encoder.ptx` | kernels with their twins; element types |
//! | `model` | the forward pass; lanes, each with a graph for every shape of batch |
//! | `serve` | requests gathered into batches, over HTTP |
//! | `text` | texts to ids; feature `tokenizers` |
//!
//! `README.md` says how to run it.

mod kernels;
mod load;
mod model;
mod serve;
#[cfg(feature = "tokenizers")]
mod text;
mod weights;

pub use kernels::{Kernels, Precision};
pub use load::{Piece, upload};
pub use model::{Lane, Model, Shape};
pub use serve::{Service, Serving, TextToIds, router};
#[cfg(feature = "tokenizers")]
pub use text::tokenizer;
pub use weights::{Config, Folder, LoadError, ModelConfig, Tensor};
