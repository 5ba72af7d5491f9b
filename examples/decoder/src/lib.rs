//! A transformer decoder: GPT-2's shape, from the files that `transformers` writes, to tokens as they come.
//!
//! `README.md` says what is in which file, and how to run it. The files' format and the upload are the encoder's.

mod config;
mod kernels;
mod model;
mod schedule;
mod serve;
mod service;
mod steps;

pub use config::Config;
pub use encoder::{Folder, LoadError, ModelConfig};
pub use kernels::{Kernels, Launches};
pub use model::Model;
pub use schedule::{Broken, Request};
pub use serve::router;
pub use service::{Decoder, Refused, Tokens};
pub use steps::{Limits, Row, Sampling, Step, Steps};
