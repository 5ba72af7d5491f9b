//! A transformer encoder, as search and retrieval use it: BERT's shape, from the files that `transformers` writes.
//!
//! | module | decides |
//! |---|---|
//! | `weights` | what is in a model's folder, and whether it is whole |
//! | `load` | how weights get to the device |
//! | `kernels`, `encoder.cu`, `encoder.ptx` | kernels with their twins; element types |
//! | `model` | the forward pass; lanes, each with a graph for every shape of batch |
//! | `program` | how programs start, and that a server listens before there is a model |
//! | `connections` | how long clients may take |
//! | `metrics` | what Prometheus is told |
//! | `serve` | requests gathered into batches, over HTTP |
//! | `text` | texts to ids; feature `tokenizers` |
//!
//! `README.md` says how to run it.

mod connections;
mod kernels;
mod load;
mod metrics;
mod model;
mod program;
mod serve;
#[cfg(feature = "tokenizers")]
mod text;
mod weights;

pub use connections::{Routes, serve};
pub use kernels::{
    HEAD_WIDTHS, Kernels, LANES, Launches, MAX_HIDDEN, Precision, attend, norm, put,
};
pub use load::{Piece, frozen};
pub use metrics::{METRICS, Metrics, Watched, with_metrics};
pub use model::{Affine, Lane, Model, Shape};
pub use program::{Dtype, Failed, Place, listen, ms, run, up_to};
pub use serve::{Failure, NOT_FINITE, Service, Serving, TextToIds, is_embedding, router};
#[cfg(feature = "tokenizers")]
pub use text::tokenizer;
pub use weights::{Check, Config, Folder, LoadError, ModelConfig, Tensor};
