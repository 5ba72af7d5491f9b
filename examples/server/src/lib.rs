//! The service behind the program `server`: all of it but the command line, so that tests can use it as well.
//! `main.rs` says what is where.

mod app;
mod connections;
mod drill;
mod embed_mean;
mod embedder;
mod failure;
mod metrics;
mod model;
mod observe;
mod options;
mod status;
mod window;
mod wire;

use std::io::Write as _;
use std::time::Duration;

use gpu_await::Device;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::App;
use crate::drill::Drill;
pub use crate::options::{Options, USAGE};

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
///
/// # Errors
/// It could not start, or the device was not idle some time after the last answer.
pub async fn run(options: Options) -> Result<Stop> {
    let (device, drill) = match options.lose_device_after {
        None => (Device::from_env()?, None),
        Some(answers) => {
            let (device, drill) = Drill::open(answers)?;
            (device, Some(drill))
        }
    };
    // From here on a signal is an orderly end.
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);

    let limits = connections::Limits {
        connections: options.max_connections,
        head: options.body_limit,
        drain: options.drain_limit,
    };
    let address = options.listen;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("cannot listen on {address}: {error}"))?;
    let app = App::start(device.clone(), drill, metrics::install()?, options).await?;
    tracing::info!(%device, "ready");
    writeln!(std::io::stdout(), "listening on http://{}", listener.local_addr()?)?;

    let stop = async {
        let stop = tokio::select! {
            _ = terminate.recv() => Stop::Asked,
            _ = interrupt.recv() => Stop::Asked,
            error = device.lost() => Stop::Lost(error),
        };
        app.stop(match stop {
            Stop::Asked => "shutting down",
            Stop::Lost(_) => "the device is lost",
        });
        tracing::info!(why = app.stopping(), "stopping: no new connections");
        stop
    };
    let stop = connections::serve(listener, app.router(), limits, stop).await;
    if let Stop::Asked = stop {
        app.pool.close();
        // Requests that were given up may still be on the device.
        match device.close(CLOSE_LIMIT).await {
            Err(error) if error.is_device_lost() => return Ok(Stop::Lost(error)),
            closed => closed?,
        }
    }
    Ok(stop)
}
