//! `serve --isolate`: the model in a worker's process, which a GPU fault, an abort or an endless kernel ends alone.
//!
//! The front has the connections, and makes no call of CUDA. Each text is a call of the worker, by which a text that ends processes is found, and batches are
//! made in its process. The weights stay on the device: only the first process uploads them.
//!
//! | the process | a text that may be why | other texts | `/healthz` |
//! |---|---|---|---|
//! | starts | – | wait, up to their own time limit | 503 |
//! | serves | – | are answered | 200 |
//! | dies, or is killed: a text was computed for longer than `--gpu-limit-ms` | runs again, alone; if the process dies again: 500, for a minute | run again, or wait | 503, with the cause |
//! | died 11 times in a row while it had nothing to do, or in its first start | – | 503 | the server ends |
#![forbid(unsafe_code)]

use std::sync::Arc;

use axum::http::StatusCode;
use gpu_await::ErrorKind;
use gpu_await::half::f16;
use gpu_await_worker::{self as worker, Blame, Error, Guilt, Host, Payloads, Worker, gpu_named};

use crate::kernels::Launches;
use crate::load;
use crate::model::Model;
use crate::program::{Dtype, Place};
use crate::serve::{Batchers, Failure, Serving, Text};
use crate::weights::Folder;

/// What runs in the worker's process.
pub struct Process(Batchers);

/// What it starts with: the model, the tokens of a batch, how it is served.
type Config = (Place, usize, Serving);

impl worker::Service for Process {
    type Config = Config;
    type Request = Text;
    /// The error: there is too much to do.
    type Response = Result<Vec<f32>, String>;

    async fn start(config: Config, host: &Host) -> Result<Self, worker::Failure> {
        Ok(Process(match config.0.dtype {
            Dtype::F16 => start::<f16>(config, host).await?,
            Dtype::F32 => start::<f32>(config, host).await?,
        }))
    }

    async fn call(&self, text: Text, of: &mut Payloads) -> Result<Self::Response, worker::Failure> {
        // The wait for a batch says nothing about the text.
        match self.0.embed(text, Some(of.pause_limit())).await {
            Err(error) if matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::TimedOut) => {
                Ok(Err(error.to_string()))
            }
            embedded => Ok(Ok(embedded?)),
        }
    }
}

async fn start<T: Launches>(config: Config, host: &Host) -> Result<Batchers, worker::Failure> {
    let (place, max_tokens, serving) = config;
    let folder = Arc::new(Folder::open(&place.model)?);
    let model = Model::<T>::with(host.device(), &folder, load::kept(host, &folder)).await?;
    Ok(Batchers::new(&model, max_tokens, &serving).await?)
}

pub(crate) fn begin(
    place: &Place,
    max_tokens: usize,
    serving: &Serving,
) -> worker::Result<Worker<Process>> {
    let config = (place.clone(), max_tokens, serving.clone());
    let builder = Worker::builder(config).blame(Blame::default()).standby(serving.standby);
    match gpu_named(&place.device)? {
        Some(gpu) => builder.gpu(gpu.uuid).begin(),
        None => builder.begin(),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match &error {
            Error::Lost(lost) if lost.guilt == Guilt::Alone => StatusCode::INTERNAL_SERVER_ERROR,
            Error::Overloaded { .. }
            | Error::Deadline
            | Error::Lost(_)
            | Error::GivenUp { .. }
            | Error::Closed => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Failure(status, error.to_string())
    }
}
