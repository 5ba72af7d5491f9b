//! `serve --isolate`: the model in a worker's process, which a GPU fault, an abort or an endless kernel ends alone.
//!
//! The front has the connections, and makes no call of CUDA. Each text is a call of the worker, by which a text that ends processes is found, and batches are
//! made in its process. The weights stay on the device: only the first process uploads them. All processes have the config that the front has read.
//!
//! | the process | a text that may be why | other texts | `/healthz` |
//! |---|---|---|---|
//! | starts | – | wait, up to their own time limit | 503 |
//! | serves | – | are answered | 200 |
//! | is stopped (`SIGSTOP`, a debugger) | is killed with it behind `--gpu-limit-ms` | wait | 503: it is left alone, also beside a standby |
//! | dies, or is killed: a text was computed for longer than `--gpu-limit-ms` | runs again, alone; if the process dies again: 500, for a minute | run again, or wait | 503, with the cause |
//! | died 11 times in a row while it had nothing to do, or in its first start | – | 503 | the server ends |
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use gpu_await::ErrorKind;
use gpu_await::half::f16;
use gpu_await_worker::{self as worker, Blame, Error, Gpu, Guilt, Host, Payloads, Restart, Worker};

use crate::kernels::Launches;
use crate::load;
use crate::model::Model;
use crate::program::{Dtype, Place};
use crate::serve::{Batchers, Failure, Serving, Text, is_refusal};
use crate::weights::{Config, Folder};

/// What runs in the worker's process.
pub struct Process(Batchers);

/// What it starts with: the model, the tokens of a batch, how it is served.
type Start = (Place, Config, usize, Serving);

impl worker::Service for Process {
    type Config = Start;
    type Request = Text;
    /// The error: there is too much to do, or the system refuses a thread, which is `true`.
    type Response = Result<Vec<f32>, (String, bool)>;

    async fn start(of: Start, host: &Host) -> Result<Self, worker::Failure> {
        Ok(Process(match of.0.dtype {
            Dtype::F16 => start::<f16>(of, host).await?,
            Dtype::F32 => start::<f32>(of, host).await?,
        }))
    }

    async fn call(&self, text: Text, of: &mut Payloads) -> Result<Self::Response, worker::Failure> {
        // The wait for a batch says nothing about the text.
        match self.0.embed(text, Some(of.pause_limit())).await {
            Err(error) if matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::TimedOut) => {
                Ok(Err((error.to_string(), is_refusal(&error))))
            }
            embedded => Ok(Ok(embedded?)),
        }
    }
}

async fn start<T: Launches>(of: Start, host: &Host) -> Result<Batchers, worker::Failure> {
    let (place, config, max_tokens, serving) = of;
    let folder = Arc::new(Folder::with(&place.model, config)?);
    let model = Model::<T>::with(host.device(), &folder, load::kept(host, &folder)).await?;
    Ok(Batchers::new(&model, max_tokens, &serving).await?)
}

pub(crate) fn begin(
    place: &Place,
    gpu: Option<Gpu>,
    config: &Config,
    max_tokens: usize,
    serving: &Serving,
) -> worker::Result<Worker<Process>> {
    // Whoever waits for the next process waits no longer than for an answer.
    let restart = Restart::default();
    let most_delay = restart.most_delay.min(Duration::from_millis(serving.patience));
    let start = (place.clone(), config.clone(), max_tokens, serving.clone());
    let builder = Worker::builder(start).blame(Blame::default()).standby(serving.standby);
    let builder = builder.restart(Restart { most_delay, ..restart });
    // Five bytes an id at most.
    let longest = config.max_position_embeddings.min(max_tokens).saturating_mul(5);
    let builder = builder.most_message_bytes(longest.clamp(1 << 16, 1 << 22) as u32);
    match gpu {
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
