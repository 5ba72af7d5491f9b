//! An inference service on one GPU: what to copy when you build your own.
//!
//! ```text
//! cargo run --release --example server
//! curl http://127.0.0.1:8080/matmul -H 'content-type: application/json' -d '{"a": [[1, 2]], "b": [[3], [4]]}'
//! ```
//!
//! `http://127.0.0.1:8080/` shows what it is doing. Prints `listening on http://ADDR:PORT` when it is ready;
//! the log goes to stderr.
//!
//! | file | what it is |
//! |---|---|
//! | `main.rs` | starts, waits for a reason to stop, stops |
//! | `app.rs` | the state, the routes, and what they do: read this first |
//! | `model.rs`, `embed_mean.rs` | the GPU work: plain functions that queue and never wait; a kernel |
//! | `embedder.rs` | requests gathered into micro-batches |
//! | `wire.rs`, `failure.rs` | from bytes to checked requests and back; errors as answers |
//! | `connections.rs` | the loop that accepts connections, with limits |
//! | `observe.rs`, `metrics.rs` | ids, the log, what Prometheus is told |
//! | `status.rs`, `window.rs`, `page.html` | the page, and the last minute that it draws |
//! | `options.rs`, `drill.rs` | the command line; losing the device on purpose |
//!
//! | it ends with | when |
//! |---|---|
//! | 0 | SIGTERM or ctrl-c, after the requests in flight were answered, and those of connections that wait to be accepted |
//! | 1 | it could not start, or the device was not idle 10 s after the last answer |
//! | 2 | unknown arguments |
//! | 3 | the device is lost: a process cannot get it back, so whoever runs this starts another one |

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

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use gpu_await::Device;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::app::App;
use crate::drill::Drill;
use crate::options::{Options, USAGE};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// How long the device may be at work behind the last answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Why it stops.
enum Stop {
    Asked,
    Lost(gpu_await::Error),
}

#[tokio::main]
async fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--help") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let options = match Options::from_args(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("server: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .init();
    match run(options).await {
        Ok(Stop::Asked) => ExitCode::SUCCESS,
        Ok(Stop::Lost(error)) => {
            eprintln!("server: the device is lost: {error}");
            ExitCode::from(3)
        }
        Err(error) => {
            eprintln!("server: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<Stop> {
    let (device, drill) = match options.lose_device_after {
        None => (Device::from_env()?, None),
        Some(answers) => {
            let (device, drill) = Drill::open(answers);
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
