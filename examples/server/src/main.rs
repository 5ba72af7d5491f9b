//! An inference service on one GPU: what to copy when you build your own.
//!
//! ```text
//! cargo run --release --bin server
//! curl http://127.0.0.1:8080/matmul -H 'content-type: application/json' -d '{"a": [[1, 2]], "b": [[3], [4]]}'
//! ```
//!
//! `http://127.0.0.1:8080/` shows what it is doing. Prints `listening on http://ADDR:PORT` when it is ready;
//! the log goes to stderr.
//!
//! | file | what it is |
//! |---|---|
//! | `main.rs` | arguments, the log, exit codes |
//! | `lib.rs` | starts, waits for a reason to stop, stops |
//! | `app.rs` | the state, the routes, and what they do: read this first |
//! | `model.rs`, `embed_mean.rs`, `.cu`, `.ptx` | the GPU work: plain functions that queue and never wait; a kernel |
//! | `embedder.rs` | requests gathered into micro-batches |
//! | `wire.rs`, `failure.rs` | from bytes to checked requests and back; errors as answers |
//! | `connections.rs` | the loop that accepts connections, with limits |
//! | `observe.rs`, `metrics.rs` | ids, the log, what Prometheus is told |
//! | `status.rs`, `window.rs`, `page.html` | the page, and the last minute that it draws |
//! | `options.rs`, `drill.rs` | the command line; losing the device on purpose (feature `drill`) |
//!
//! | it ends with | when |
//! |---|---|
//! | 0 | SIGTERM or ctrl-c, after the requests in flight were answered, and those of connections that wait to be accepted |
//! | 1 | it could not start, or the device was not idle 10 s after the last answer |
//! | 2 | unknown arguments |
//! | 3 | the device is lost: a process cannot get it back, so whoever runs this starts another one |

#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::process::ExitCode;

use service::{Options, Stop, USAGE};
use tracing_subscriber::EnvFilter;

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
    match service::run(options).await {
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
