//! What programs around a model have in common: where it is, how they start, and a server that listens before the model is loaded. Both examples use it.
#![forbid(unsafe_code)]

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use gpu_await::Device;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tracing_appender::non_blocking::NonBlockingBuilder;
use tracing_subscriber::EnvFilter;

use crate::connections::{Routes, serve};
use crate::weights::{Folder, ModelConfig};

/// What ends a program.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;

/// The model, and what computes it.
#[derive(Clone, clap::Args, Serialize, Deserialize)]
pub struct Place {
    /// The folder with config.json and model.safetensors
    #[arg(long, global = true, value_name = "DIR", default_value = ".")]
    pub model: PathBuf,
    /// What the model computes in; sums are in f32
    #[arg(long, global = true, value_enum, default_value = "f16")]
    pub dtype: Dtype,
    /// cuda:N, host, or auto
    #[arg(long, global = true, default_value = "auto")]
    pub device: String,
}

/// An element type.
#[derive(Clone, Copy, clap::ValueEnum, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F16,
    F32,
}

impl Place {
    /// Opens both off the executor, and says which device it is.
    ///
    /// # Errors
    /// There is no such device; the folder is not one of such a model; the system refuses a thread.
    pub async fn open<C: ModelConfig + Send + 'static>(
        &self,
    ) -> Result<(Device, Arc<Folder<C>>), Failed> {
        let Place { model, device, .. } = self.clone();
        let open =
            move || Ok::<_, Failed>((Folder::open(&model)?, Device::builder().named(&device)?));
        let (folder, device) = off_executor(open).await??;
        tracing::info!("device {device}");
        Ok((device, Arc::new(folder)))
    }
}

/// Does work that may block for ever, such as reading from a mount that hangs: its thread keeps neither the executor nor the end of the program.
///
/// # Errors
/// The system refuses a thread; the work panicked.
pub async fn off_executor<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> io::Result<R> {
    let (sender, result) = oneshot::channel();
    let refused = |error| io::Error::other(format!("the system refuses a thread: {error}"));
    thread::Builder::new().spawn(move || sender.send(work()).ok()).map_err(refused)?;
    result.await.map_err(|_| io::Error::other("it panicked"))
}

/// Parses numbers from 1 on.
#[must_use]
pub fn up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Runs a program on a runtime of its own, and logs what ended it. The log goes to stderr, as `RUST_LOG` says; whoever reads it and stalls, or is gone,
/// stalls and ends nothing: lines are lost then.
pub fn run(name: &str, program: impl Future<Output = Result<(), Failed>>) -> ExitCode {
    // Refused a thread, it panics, and says so itself.
    let log = catch_unwind(|| NonBlockingBuilder::default().finish(io::stderr()));
    let Ok((log, flush)) = log else { return ExitCode::FAILURE };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(log)
        .with_ansi(io::stderr().is_terminal())
        .log_internal_errors(false)
        .init();
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    // Refused a thread or a descriptor, tokio panics.
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Runtime::new()?;
        let ended = runtime.block_on(program);
        runtime.shutdown_background();
        ended
    }));
    let ended = ended.unwrap_or_else(|_| Err("it panicked".into()));
    if let Err(error) = &ended {
        tracing::error!("{name}: {error}");
    }
    // Where nobody reads the log it gives up after a second, and complains on stdout: which panics if that is closed.
    // Refused a thread, it is dropped here.
    thread::Builder::new().spawn(|| drop(flush)).map(|thread| thread.join().ok()).ok();
    ended.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

/// Listens at once, so that an orchestrator sees a server that is loading: it answers 503 until `model` has set the routes. Ends with a signal, or with
/// `model`.
///
/// # Errors
/// The address is taken; what `model` says.
pub async fn listen(
    address: SocketAddr,
    patience: Duration,
    model: impl AsyncFnOnce(&Routes) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|error| format!("{address}: {error}"))?;
    // Whoever wants to know reads it.
    writeln!(io::stdout(), "listening on http://{}", listener.local_addr()?).ok();
    let routes = Routes::default();
    serve(listener, routes.clone(), patience, model(&routes)).await
}

/// Milliseconds.
#[must_use]
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
