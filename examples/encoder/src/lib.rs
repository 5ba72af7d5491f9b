//! A transformer encoder, as search and retrieval use it: BERT's shape, from the files that `transformers` writes.
//!
//! `README.md` says what is in which file, and how to run it.

mod connections;
mod isolated;
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
pub use isolated::Process;
pub use kernels::{
    HEAD_WIDTHS, Kernels, LANES, Launches, MAX_HIDDEN, Precision, attend, norm, put,
};
pub use load::{Piece, frozen};
pub use metrics::{METRICS, Metrics, Watched, log_failure, with_metrics};
pub use model::{Affine, Lane, Model, Shape};
pub use program::{Dtype, Failed, Place, listen, ms, off_executor, run, up_to};
pub use serve::{Failure, MOST_TEXTS, NOT_FINITE, Service, Serving, check, is_embedding, router};
pub use weights::{Check, Config, Folder, LoadError, ModelConfig, Tensor};
