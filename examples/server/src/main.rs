//! An inference service on one GPU: what to copy when you build your own.
//!
//! ```text
//! cargo run --release --bin server
//! curl http://127.0.0.1:8080/matmul -H 'content-type: application/json' -d '{"a": [[1, 2]], "b": [[3], [4]]}'
//! ```
//!
//! `--help` lists the options. Prints `listening on http://ADDR:PORT` when it is ready, then `health on http://ADDR:PORT` if that has a
//! listener of its own; the log goes to stderr, and a pipe that nobody reads costs its lines and nothing else.
//!
//! | file | what it is |
//! |---|---|
//! | `main.rs` | the log, exit codes |
//! | `lib.rs` | starts, waits for a reason to stop, stops |
//! | `app.rs` | the state, and what the routes do: read this first |
//! | `engine.rs` | what computes: admission, micro-batches and the model on one device |
//! | `isolated.rs`, `drill.rs` | `--isolate`: the engine in another process, which a GPU fault ends alone; requests that end it, for tests |
//! | `model.rs`, `embed_mean.rs`, `.cu`, `.ptx` | the GPU work: plain functions that queue and never wait; a kernel |
//! | `embedder.rs` | requests gathered into micro-batches |
//! | `wire.rs`, `failure.rs` | from bytes to checked requests and back; errors as answers |
//! | `open_inference.rs` | the Open Inference Protocol, for clients of KServe and Triton |
//! | `budget.rs` | how many bytes of bodies and answers are in memory |
//! | `connections.rs` | the loop that accepts connections, and their timeouts |
//! | `health.rs` | whether the device still works |
//! | `observe.rs`, `metrics.rs` | ids, the log, what Prometheus is told |
//! | `options.rs` | the command line |
//! | `../dashboard.json` | the metrics, for Grafana: import it and choose a Prometheus |
//!
//! | it ends with | when |
//! |---|---|
//! | 0 | SIGTERM or ctrl-c: not ready for the lame duck period, then no new connections, and requests in flight were answered within `--drain-timeout-ms`; a signal while it starts ends it at once |
//! | 1 | it could not start, or the device was not idle 10 s after the last answer, or a second signal ended it at once (within 200 ms two are one) |
//! | 2 | options that make no sense |
//! | 3 | the device is lost: a process cannot get it back, so whoever runs this starts another one; with `--isolate`: the worker is given up |

#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use gpu_await::Device;
use service::{Options, Stop};
use tracing_appender::non_blocking::NonBlockingBuilder;
use tracing_subscriber::EnvFilter;

/// Lines that wait for whoever reads stderr. Further ones are dropped, and counted.
const LOG_LINES: usize = 4096;

fn main() -> ExitCode {
    service::init();
    let options = Options::parse();
    // A reader of stderr that stalls must not stall a request.
    let (mut log, flush) =
        NonBlockingBuilder::default().buffered_lines_limit(LOG_LINES).finish(std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(log.clone())
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));

    let ended = tokio::runtime::Runtime::new().map_err(Into::into).and_then(|runtime| {
        let ended = runtime.block_on(service::run(options, Device::from_env, log.error_counter()));
        // Waits neither for a connection nor for a driver that starts.
        runtime.shutdown_background();
        ended
    });
    let written = match &ended {
        Ok(Stop::Asked) => Ok(()),
        Ok(Stop::Lost(error)) => writeln!(log, "server: nothing computes any more: {error}"),
        Err(error) => writeln!(log, "server: {error}"),
    };
    written.ok();
    // Where nobody reads the log it gives up after a second, and complains on stdout: which panics if that is closed.
    // Refused a thread, it is dropped here.
    std::thread::Builder::new().spawn(|| drop(flush)).map(|thread| thread.join().ok()).ok();
    ExitCode::from(service::exit_code(&ended))
}
