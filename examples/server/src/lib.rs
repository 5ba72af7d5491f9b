//! The service behind the program `server`: all of it but the log and the exit codes, so that tests can use it as well.
//! `main.rs` says what is where.

mod app;
mod budget;
mod connections;
mod descriptors;
mod drill;
mod embed_mean;
mod embedder;
mod exchanges;
pub mod export;
mod failure;
mod health;
mod json;
mod metrics;
mod model;
mod observe;
mod open_inference;
mod options;
mod status;
mod window;
mod wire;

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use gpu_await::Device;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tracing_appender::non_blocking::ErrorCounter;

use crate::app::App;
use crate::connections::Limits;
use crate::drill::Drill;
pub use crate::options::Options;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// How long the device may be at work behind the last answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Why it stops.
pub enum Stop {
    /// It was told to, by a signal.
    Asked,
    /// The device is lost, which a process cannot mend.
    Lost(gpu_await::Error),
}

/// Serves until a signal or the loss of the device, and answers what is in flight then.
/// `dropped` counts lines of the log that nobody read in time.
///
/// # Errors
/// It could not start; a second signal; the device was not idle some time after the last answer.
pub async fn run(options: Options, dropped: ErrorCounter) -> Result<Stop> {
    let (device, drill) = match Drill::open(&options)? {
        None => (Device::from_env()?, None),
        Some((device, drill)) => (device, Some(drill)),
    };
    // From here on a signal is an orderly end.
    let mut signals = signals()?;
    let listener = listen(options.listen)?;
    let health = match options.health_listen {
        None => None,
        Some(address) => Some(listen(address)?),
    };
    let app = App::start(device, drill, metrics::install()?, dropped, options).await?;
    let address = listener.local_addr()?;
    tracing::info!(device = %app.device, %address, "ready");
    let mut lines = format!("listening on http://{address}\n");
    if let Some(health) = &health {
        lines += &format!("health on http://{}\n", health.local_addr()?);
    }
    announce(lines);
    let mut told_twice = signals.clone();
    tokio::select! {
        stop = serve(&app, listener, health, &mut signals) => stop,
        _ = told_twice.wait_for(|signals| *signals > 1) => Err("a second signal: ended at once".into()),
    }
}

async fn serve(
    app: &App,
    listener: TcpListener,
    health: Option<TcpListener>,
    signals: &mut watch::Receiver<u32>,
) -> Result<Stop> {
    let options = &app.options;
    let (asked, sockets) = (options.max_connections, descriptors::for_clients());
    if asked > sockets {
        let why = "file descriptors are limited: see `ulimit -n`";
        tracing::warn!(asked, connections = sockets, why, "fewer connections than asked for");
    }
    let limits = Limits {
        connections: asked.min(sockets),
        sockets,
        head: options.head_timeout_ms,
        // Longer than an honest request takes: both waits for memory, its body, its result, its answer's next part.
        exchange: options.body_timeout_ms
            + 2 * options.request_timeout_ms
            + options.write_timeout_ms,
        keep_alive: options.keep_alive_timeout_ms,
        write: options.write_timeout_ms,
        drain: options.drain_timeout_ms,
    };
    let stop = async {
        let stop = tokio::select! {
            _ = signals.wait_for(|signals| *signals > 0) => Stop::Asked,
            error = app.device.lost() => Stop::Lost(error),
        };
        app.stop(match stop {
            Stop::Asked => "shutting down",
            Stop::Lost(_) => "the device is lost",
        });
        tracing::info!(why = app.stopping(), "not ready any more");
        if let Stop::Asked = stop {
            tokio::select! {
                () = tokio::time::sleep(options.lame_duck_ms) => {}
                error = app.device.lost() => return Stop::Lost(error),
            }
        }
        tracing::info!("stopping: no new connections");
        stop
    };
    let stop = match health {
        None => {
            let all = app.serve(app.work().merge(app.about()));
            connections::serve(listener, all, limits, stop).await
        }
        Some(health) => {
            // Its own limits, so that nothing that clients do keeps a probe out; it ends behind the service.
            let few = Limits {
                connections: descriptors::HEALTH,
                sockets: descriptors::HEALTH,
                drain: Duration::from_secs(1),
                ..limits
            };
            let (ended, end) = oneshot::channel();
            let service = async {
                let stop = connections::serve(listener, app.serve(app.work()), limits, stop).await;
                ended.send(()).ok();
                stop
            };
            let about = connections::serve(health, app.serve(app.about()), few, end);
            tokio::join!(service, about).0
        }
    };
    if let Stop::Asked = stop {
        app.pool.close();
        // Requests that were given up may still be on the device.
        match app.device.close(CLOSE_LIMIT).await {
            Err(error) if error.is_device_lost() => return Ok(Stop::Lost(error)),
            closed => closed?,
        }
    }
    Ok(stop)
}

/// Writes to stdout, on a thread of its own: a pipe that nobody reads would block, and that it is closed or its disk full is no
/// reason to end.
fn announce(lines: String) {
    let write = move || {
        if let Err(error) = std::io::stdout().write_all(lines.as_bytes()) {
            tracing::warn!(%error, "cannot write to stdout");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("stdout".to_owned()).spawn(write) {
        tracing::warn!(%error, "cannot write to stdout");
    }
}

/// How many signals have come that ask for the end.
fn signals() -> Result<watch::Receiver<u32>> {
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok(counted)
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    connections::listen(address)
        .map_err(|error| format!("cannot listen on {address}: {error}").into())
}
