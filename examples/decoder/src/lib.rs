//! A transformer decoder: GPT-2's shape, from the files that `transformers` writes, to tokens as they come.
//!
//! | module | decides |
//! |---|---|
//! | `config` | which models it has |
//! | `kernels`, `decoder.cu`, `decoder.ptx` | kernels with their twins |
//! | `model` | weights, and the forward pass of a step |
//! | `steps` | a step packed; a graph for every shape; two steps under way at once |
//! | `schedule` | which sequences are in the next step; who has which blocks of the cache |
//! | `service` | requests of many clients, in the steps of one worker |
//! | `serve` | the same over HTTP |
//!
//! `README.md` says how to run it. The files' format and the upload are the encoder's.

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
