//! `--isolate`: the engine in a worker's process, which a GPU fault, an abort or an endless kernel ends alone.
//!
//! The front, which is the server's own process, has the connections and makes no call of CUDA. Each request is a call of the worker: its
//! numbers go by shared memory in both directions, and its limits are counted by the front.
//!
//! | the process | a request that may be why | other requests | `/healthz`, `/readyz` |
//! |---|---|---|---|
//! | starts | – | wait, up to their own time limit | 200 `starting`, 503 |
//! | serves | – | are answered | 200 `serving`, 200 |
//! | dies, or is killed: a request had the device for longer than `--gpu-limit-ms` | runs again, alone; if the process dies again: 500 `guilty`, and the same request is refused for a minute | run again, or wait | 200 `restarting` with the cause, 503 |
//! | died 11 times in a row in its start, or while it had nothing to do; or its first start failed | – | 503 `given_up` | 503, 503; and the server ends, as with a lost device |
//!
//! A request runs up to three times, which is right for models: they have no side effects. The device is `GPU_AWAIT_DEVICE`'s.
#![forbid(unsafe_code)]

use std::time::Duration;

use ::metrics::histogram;
use gpu_await::ErrorKind;
use gpu_await_worker::{
    Blame, Error, Failure as Failed, Guilt, Host, Payloads, Restart, Service, Worker, WorkerLost,
    gpu_named,
};
use serde::{Deserialize, Serialize};

use crate::budget::Reserved;
use crate::drill::{Drill, Fails};
use crate::engine::{Engine, Figure, State};
use crate::failure::Failure;
use crate::model::Times;
use crate::options::Options;
use crate::wire::{self, Input, Matmul};

// ---- the worker's process ----------------------------------------------------------------------

/// What runs there.
pub(crate) struct Process {
    engine: Engine,
    drill: Option<Drill>,
}

/// What a request asks for. The numbers of matrices are its payload, `a` and `b` one behind the other.
#[derive(Serialize, Deserialize)]
pub(crate) enum Ask {
    Matmul([usize; 3]),
    Embed(Vec<u32>),
}

/// There was too much to do.
#[derive(Serialize, Deserialize)]
pub(crate) enum Refused {
    Overloaded,
    TimedOut,
    OutOfMemory,
}

impl Service for Process {
    type Config = Options;
    type Request = Ask;
    /// The numbers of the result are its payload.
    type Response = Result<Times, Refused>;

    async fn start(options: Options, host: &Host) -> Result<Self, Failed> {
        let device = host.device();
        let drill = match options.isolate.drill {
            true => Some(Drill::load(device).await?),
            false => None,
        };
        Ok(Process { engine: Engine::start(device.clone(), &options).await?, drill })
    }

    async fn call(&self, ask: Ask, payloads: &mut Payloads) -> Result<Self::Response, Failed> {
        // The wait for a stream does not count: it says nothing about the request.
        let mut waits = Some(payloads.pause_limit());
        let (c, embedding);
        let (values, times): (&[f32], Times) = match ask {
            Ask::Matmul(shape) => {
                let sent = payloads.request().ok_or_else(|| Failed::new("no numbers"))?;
                let fill =
                    move |inputs: &mut [f32]| inputs.copy_from_slice(bytemuck::cast_slice(&sent));
                match self.engine.multiply(shape, waits, fill).await {
                    Ok((found, times)) => {
                        c = found;
                        (&c, times)
                    }
                    Err(error) => return refused(error),
                }
            }
            Ask::Embed(tokens) => {
                if let Some((drill, fails)) = self.drill.as_ref().zip(Fails::of(&tokens)) {
                    let stream = self.engine.pool.acquire().await?;
                    waits = None;
                    drill.run(&stream, fails).await?;
                }
                match self.engine.look_up(tokens, Box::new(waits)).await {
                    Ok((found, times)) => {
                        embedding = found;
                        (&embedding, times)
                    }
                    Err(error) => return refused(error),
                }
            }
        };
        let mut numbers = payloads.respond(size_of_val(values)).await?;
        numbers.copy_from_slice(bytemuck::cast_slice(values));
        payloads.attach(numbers);
        Ok(Ok(times))
    }
}

/// What the front is to know of an error by itself; of others it logs the text.
fn refused(error: gpu_await::Error) -> Result<Result<Times, Refused>, Failed> {
    Ok(Err(match error.kind() {
        ErrorKind::Overloaded => Refused::Overloaded,
        ErrorKind::TimedOut => Refused::TimedOut,
        ErrorKind::OutOfMemory => Refused::OutOfMemory,
        _ => return Err(error.into()),
    }))
}

// ---- the front ---------------------------------------------------------------------------------

/// The engine, here or in a worker.
pub(crate) enum Compute {
    Here(Box<Engine>),
    Isolated(Isolated),
}

pub(crate) struct Isolated {
    worker: Worker<Process>,
    gpu: Option<String>,
    /// Of a request, from its body to its result.
    deadline: Duration,
    gpu_limit: Duration,
}

impl Isolated {
    /// Starts the worker, and waits for nothing.
    ///
    /// # Errors
    /// No such device; a system that lacks what workers need.
    pub(crate) fn begin(options: &Options) -> crate::Result<Isolated> {
        let gpu = gpu()?;
        // As many bytes as may be in memory: a request waits for its part, as it does for that of its body.
        let bytes = (options.buffer_budget_mib as u64) << 19;
        let mut builder = Worker::<Process>::builder(options.clone())
            .payload_bytes(bytes, bytes)
            .most_calls((4096 + 2 * options.max_waiting).min(1 << 20))
            // Beside the calls: copies of large matrices.
            .threads(2)
            .restart(Restart { most_delay: Duration::from_secs(1), ..Restart::default() })
            .blame(Blame::default());
        if let Some(gpu) = &gpu {
            builder = builder.gpu(gpu);
        }
        let (deadline, gpu_limit) = (options.request_timeout_ms, options.isolate.gpu_limit_ms);
        Ok(Isolated { worker: builder.begin()?, gpu, deadline, gpu_limit })
    }

    async fn compute<T>(
        &self,
        input: Input,
        reserved: Reserved,
        encode: impl FnOnce(&[f32]) -> T,
    ) -> Result<(T, Times), Failure> {
        let (ask, numbers, route) = match input {
            Input::Matmul(Matmul { shape, a, b }) => {
                let (a, b): (&[u8], &[u8]) = (bytemuck::cast_slice(&a), bytemuck::cast_slice(&b));
                let mut numbers = self.worker.lease(a.len() + b.len()).await?;
                wire::compute(numbers.len(), || {
                    numbers[..a.len()].copy_from_slice(a);
                    numbers[a.len()..].copy_from_slice(b);
                });
                (Ask::Matmul(shape), Some(numbers), "/matmul")
            }
            Input::Embed(tokens) => (Ask::Embed(tokens), None, "/embed"),
        };
        drop(reserved);
        let mut call = self.worker.call(ask).idempotent();
        if let Some(numbers) = numbers {
            call = call.lease(numbers);
        }
        let call = call.deadline(self.deadline).within(self.gpu_limit).send();
        let (answer, payload) = call.with_payload().await?;
        let times = answer.map_err(|refused| match refused {
            Refused::Overloaded => Failure::overloaded(),
            Refused::TimedOut => Failure::timed_out(),
            Refused::OutOfMemory => Failure::out_of_memory(),
        })?;
        histogram!("server_queue_seconds").record(times.queue);
        histogram!("server_gpu_seconds", "route" => route).record(times.gpu);
        let payload = payload.ok_or_else(|| Failure::internal(&"an answer without its numbers"))?;
        let mut values = vec![0.0f32; payload.len() / size_of::<f32>()];
        wire::compute(payload.len(), || payload.copy_to(bytemuck::cast_slice_mut(&mut values)));
        drop(payload);
        Ok((encode(&values), times))
    }
}

/// The UUID of the GPU that `GPU_AWAIT_DEVICE` names; none for the host device.
fn gpu() -> crate::Result<Option<String>> {
    let name = std::env::var("GPU_AWAIT_DEVICE").unwrap_or_default();
    let gpu = gpu_named(&name).map_err(|error| {
        format!(
            "GPU_AWAIT_DEVICE is `{name}`, and may be `cuda:N`, `cuda`, `host` or `auto`: {error}"
        )
    })?;
    Ok(gpu.map(|gpu| gpu.uuid))
}

impl Compute {
    pub(crate) async fn compute<T>(
        &self,
        input: Input,
        reserved: Reserved,
        encode: impl FnOnce(&[f32]) -> T,
    ) -> Result<(T, Times), Failure> {
        match self {
            Compute::Here(engine) => engine.compute(input, reserved, encode).await,
            Compute::Isolated(isolated) => isolated.compute(input, reserved, encode).await,
        }
    }

    pub(crate) fn state(&self) -> State {
        match self {
            Compute::Here(engine) => engine.state(),
            Compute::Isolated(Isolated { worker, .. }) => {
                let health = worker.health();
                let (is_live, is_ready) = (!health.has_ended(), health.is_serving());
                State { is_live, is_ready, text: health.to_string() }
            }
        }
    }

    /// Waits until nothing is computed any more, and says why.
    pub(crate) async fn lost(&self) -> crate::Error {
        match self {
            Compute::Here(engine) => engine.lost().await,
            Compute::Isolated(Isolated { worker, .. }) => worker.ended().await.into(),
        }
    }

    /// Ends it, behind what it computes.
    ///
    /// # Errors
    /// In this process: that takes longer than `limit`; the device is lost. A worker's is killed then.
    pub(crate) async fn close(&self, limit: Duration) -> gpu_await::Result<()> {
        match self {
            Compute::Here(engine) => engine.close(limit).await,
            Compute::Isolated(Isolated { worker, .. }) => {
                worker.clone().close(limit).await;
                Ok(())
            }
        }
    }

    /// What it computes on.
    pub(crate) fn name(&self) -> String {
        match self {
            Compute::Here(engine) => engine.name(),
            Compute::Isolated(Isolated { gpu, .. }) => {
                format!("a worker on {}", gpu.as_deref().unwrap_or("the host device"))
            }
        }
    }

    pub(crate) fn gauges(&self) -> Vec<Figure> {
        let worker = match self {
            Compute::Here(engine) => return engine.gauges(),
            Compute::Isolated(Isolated { worker, .. }) => worker.stats(),
        };
        vec![
            ("server_worker_calls", worker.calls as u64, "requests that the worker has"),
            ("server_worker_suspects", worker.suspects as u64, "requests that wait to run alone"),
            ("server_worker_pid", worker.process.unwrap_or(0).into(), "of its process; 0: none"),
        ]
    }

    pub(crate) fn counters(&self) -> Vec<Figure> {
        let worker = match self {
            Compute::Here(engine) => return engine.counters(),
            Compute::Isolated(Isolated { worker, .. }) => worker.stats(),
        };
        vec![
            ("server_worker_deaths_total", worker.deaths, "processes that died"),
            ("server_worker_retries_total", worker.retries, "requests that were sent again"),
            ("server_worker_lost_total", worker.lost_calls, "requests that ended with a process"),
            (
                "server_worker_refused_total",
                worker.refused,
                "requests that killed a process before",
            ),
        ]
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match &error {
            Error::Overloaded { .. } => Failure::overloaded(),
            Error::Deadline => Failure::timed_out(),
            Error::TooLarge { .. } => Failure::new(413, "too_large", error.to_string()),
            Error::Lost(WorkerLost { guilt: Guilt::Alone, .. }) | Error::Refused { .. } => {
                Failure::new(500, "guilty", error.to_string())
            }
            Error::Lost(_) => Failure::new(503, "lost", error.to_string()),
            Error::GivenUp { .. } => Failure::new(503, "given_up", "the worker is given up"),
            Error::Closed => Failure::new(503, "shutting_down", "the server is shutting down"),
            _ => Failure::internal(&error),
        }
    }
}
