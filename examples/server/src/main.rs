//! An inference service on one GPU: what to copy when you build your own.
//!
//! ```text
//! cargo run --release --bin server
//! curl http://127.0.0.1:8080/matmul -H 'content-type: application/json' -d '{"a": [[1, 2]], "b": [[3], [4]]}'
//! ```
//!
//! `http://127.0.0.1:8080/` shows what it is doing, `--help` lists the options. Prints `listening on http://ADDR:PORT`
//! when it is ready, then `health on http://ADDR:PORT` if that has a listener of its own; the log goes to stderr. Neither is
//! waited for: a pipe that nobody reads, a full disk, or a stream that is closed costs lines and nothing else.
//!
//! | file | what it is |
//! |---|---|
//! | `main.rs` | the log, exit codes |
//! | `lib.rs` | starts, waits for a reason to stop, stops |
//! | `app.rs` | the state, the routes, and what they do: read this first |
//! | `model.rs`, `embed_mean.rs`, `.cu`, `.ptx` | the GPU work: plain functions that queue and never wait; a kernel |
//! | `embedder.rs` | requests gathered into micro-batches |
//! | `wire.rs`, `json.rs`, `failure.rs` | from bytes to checked requests and back; errors as answers |
//! | `open_inference.rs` | the Open Inference Protocol, for clients of KServe and Triton |
//! | `budget.rs` | how many bytes of bodies and answers are in memory |
//! | `connections.rs`, `exchanges.rs`, `descriptors.rs` | the loop that accepts connections; their timeouts; how many there can be |
//! | `health.rs` | whether the device still works |
//! | `observe.rs`, `metrics.rs` | ids, the log, what Prometheus is told |
//! | `export.rs` | spans to a collector of OpenTelemetry |
//! | `status.rs`, `window.rs`, `page.html` | the page, and the last minute that it draws |
//! | `../dashboard.json` | the metrics, for Grafana: import it and choose a Prometheus |
//! | `options.rs`, `drill.rs` | the command line; failures on purpose (feature `drill`) |
//!
//! | it ends with | when |
//! |---|---|
//! | 0 | SIGTERM or ctrl-c: not ready for the lame duck period, then no new connections; requests in flight were answered within `--drain-timeout-ms`, and those of connections that waited to be accepted; before the handlers are installed, in the first milliseconds, the signal itself ends it |
//! | 1 | it could not start, or the device was not idle 10 s after the last answer, or a second signal ended it at once |
//! | 2 | options that make no sense |
//! | 3 | the device is lost: a process cannot get it back, so whoever runs this starts another one |
//!
//! With `--otlp-endpoint` the end may take up to 2 s more, for the last spans, whatever the collector does.

#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use clap::Parser as _;
use opentelemetry::trace::TracerProvider as _;
use service::export::FLUSH_LIMIT;
use service::{Options, Stop};
use tracing_appender::non_blocking::NonBlockingBuilder;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Lines that wait for whoever reads stderr. Further ones are dropped, and counted.
const LOG_LINES: usize = 4096;
/// For what is logged last to be read.
const LOG_LIMIT: Duration = Duration::from_millis(1500);

fn main() -> ExitCode {
    let options = Options::parse();
    // A reader of stderr that stalls must not stall a request.
    let (mut log, flush) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(LOG_LINES)
        .finish(std::io::stderr());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(log.clone())
        .with_ansi(std::io::stderr().is_terminal());
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&mut log, &error),
    };
    // Spans have trace ids, whether they are exported or not.
    let provider = match service::export::provider(&options, runtime.handle()) {
        Ok(provider) => provider,
        Err(error) => return failed(&mut log, &*error),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("server"));
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(spans.with_filter(EnvFilter::new(service::export::spans(&options))))
        .init();
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));

    let ended = runtime.block_on(service::run(options, log.error_counter()));
    // What is left has this long; the service has answered everybody.
    provider.shutdown_with_timeout(FLUSH_LIMIT).ok();
    // Does not wait for what a request left on the blocking pool.
    runtime.shutdown_background();
    let code = match ended {
        Ok(Stop::Asked) => ExitCode::SUCCESS,
        Ok(Stop::Lost(error)) => {
            writeln!(log, "server: the device is lost: {error}").ok();
            ExitCode::from(3)
        }
        Err(error) => failed(&mut log, &*error),
    };
    // Where nobody reads the log it gives up after a second, and complains on stdout: which may block, or panic.
    let (flushed, end) = mpsc::channel::<()>();
    let waits = std::thread::Builder::new().spawn(move || {
        drop(flush);
        drop(flushed);
    });
    if waits.is_ok() {
        end.recv_timeout(LOG_LIMIT).ok();
    }
    code
}

fn failed(mut log: impl std::io::Write, error: &dyn std::fmt::Display) -> ExitCode {
    writeln!(log, "server: {error}").ok();
    ExitCode::FAILURE
}
