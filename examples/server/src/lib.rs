//! The service behind the program `server`: all of it but the log and the exit codes, so that tests can use it as well.
//! `main.rs` says what is where.

mod app;
mod budget;
mod connections;
#[cfg(target_os = "linux")]
mod drill;
mod embed_mean;
mod embedder;
mod engine;
mod failure;
mod health;
#[cfg(target_os = "linux")]
mod isolated;
mod metrics;
mod model;
mod observe;
mod open_inference;
mod options;
mod routes;
mod wire;

use std::convert::Infallible;
use std::future::pending;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use gpu_await::Device;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing_appender::non_blocking::ErrorCounter;

use crate::app::App;
use crate::engine::Engine;
#[cfg(not(target_os = "linux"))]
use crate::engine::Engine as Compute;
#[cfg(target_os = "linux")]
use crate::isolated::{Compute, Isolated};
pub use crate::options::Options;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Error> = std::result::Result<T, E>;

/// How long the device may be at work behind the last answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// Signals within it are one: `timeout(1)` and shells send them to a process and to its group.
const TOGETHER: Duration = Duration::from_millis(200);

/// Why it stops.
#[derive(Debug)]
pub enum Stop {
    /// It was told to, by a signal.
    Asked,
    /// The device is lost, which a process cannot mend, or its worker is given up.
    Lost(Error),
}

/// The first statement of `main`: in a worker's process it serves, and does not return.
pub fn init() {
    #[cfg(target_os = "linux")]
    gpu_await_worker::init::<isolated::Process>();
}

/// What the process ends with.
#[must_use]
pub fn exit_code(ended: &Result<Stop>) -> u8 {
    match ended {
        Ok(Stop::Asked) => 0,
        Err(_) => 1,
        Ok(Stop::Lost(_)) => 3,
    }
}

/// Opens the device and serves until a signal or the loss of the device, and answers what is in flight then.
/// `dropped` counts lines of the log that nobody read in time.
///
/// # Errors
/// It could not start; a second signal; the device was not idle some time after the last answer.
pub async fn run(
    options: Options,
    open: impl FnOnce() -> gpu_await::Result<Device> + Send + 'static,
    dropped: ErrorCounter,
) -> Result<Stop> {
    // From here on a signal is an orderly end.
    let mut signals = Signals::new()?;
    let start = async {
        let compute = compute(&options, open).await?;
        Ok::<_, Error>(App::new(compute, metrics::install()?, dropped, options))
    };
    let app = tokio::select! {
        app = start => app?,
        () = signals.next() => return Ok(Stop::Asked),
    };
    let asked = CancellationToken::new();
    let told_twice = async {
        signals.next().await;
        asked.cancel();
        sleep(TOGETHER).await;
        while signals.next().now_or_never().is_some() {}
        signals.next().await;
    };
    tokio::select! {
        stop = serve(&app, &asked) => stop,
        () = told_twice => Err("a second signal: ended at once".into()),
    }
}

async fn compute(
    options: &Options,
    open: impl FnOnce() -> gpu_await::Result<Device> + Send + 'static,
) -> Result<Compute> {
    #[cfg(target_os = "linux")]
    if options.isolate.isolate {
        return Ok(Compute::Isolated(Isolated::begin(options)?));
    }
    // The first use of a driver takes seconds, and blocks.
    let device = tokio::task::spawn_blocking(open).await??;
    let engine = Engine::start(device, options).await?.watched(options.health_timeout_ms)?;
    #[cfg(target_os = "linux")]
    let engine = Compute::Here(Box::new(engine));
    Ok(engine)
}

async fn serve(app: &Arc<App>, asked: &CancellationToken) -> Result<Stop> {
    let options = &app.options;
    let listen = |address| {
        connections::listen(address).map_err(|error| format!("cannot listen on {address}: {error}"))
    };
    let listener = listen(options.listen)?;
    let health = options.health_listen.map(listen).transpose()?;
    tracing::info!(device = app.compute.name(), "ready");
    let mut lines = format!("listening on http://{}\n", listener.local_addr()?);
    if let Some(health) = &health {
        lines += &format!("health on http://{}\n", health.local_addr()?);
    }
    // That nobody reads it is no reason to end.
    std::io::stdout().write_all(lines.as_bytes()).ok();

    let stop = async {
        let stop = tokio::select! {
            () = asked.cancelled() => Stop::Asked,
            error = app.compute.lost() => Stop::Lost(error),
        };
        let why = match stop {
            Stop::Asked => "shutting down",
            Stop::Lost(_) => "the device is lost, or its worker given up",
        };
        app.stopping.get_or_init(|| why);
        tracing::info!(why, "not ready any more");
        sleep(options.lame_duck_ms).await;
        tracing::info!("stopping: no new connections");
        stop
    };
    let stop = match health {
        None => {
            let all = routes::serve(app, routes::work().merge(routes::about()));
            connections::serve(listener, all, options, stop).await
        }
        // Connections of its own, so that nothing that clients do keeps a probe out; it ends behind the service.
        Some(health) => tokio::select! {
            stop = connections::serve(listener, routes::serve(app, routes::work()), options, stop) => stop,
            never = connections::serve(health, routes::serve(app, routes::about()), options, pending::<Infallible>()) => match never {},
        },
    };
    if let Stop::Lost(_) = stop {
        return Ok(stop);
    }
    match app.compute.close(CLOSE_LIMIT).await {
        Err(error) if error.is_device_lost() => Ok(Stop::Lost(error.into())),
        closed => Ok(closed.map(|()| stop)?),
    }
}

/// The signals that ask for the end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Signals { terminate: signal(terminate)?, interrupt: signal(interrupt)? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
