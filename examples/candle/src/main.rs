//! A candle model behind axum, awaited instead of blocked on. `README.md` says how to build it for a GPU.
//!
//! ```text
//! cargo run --release -- --check
//! cargo run --release -- --listen 127.0.0.1:8080
//! curl http://127.0.0.1:8080/embed -H 'content-type: application/json' -d '{"tokens": [1, 2, 3]}'
//! ```
//!
//! `--check` serves on a free port, asks itself, and prints `name value unit` lines; it exits with 1 if an answer is
//! not what candle computes on the CPU.
//!
//! | file | what it is |
//! |---|---|
//! | `app.rs` | the route, its handler, errors as statuses |
//! | `lanes.rs` | candle devices, each with its stream and its model: read this first |
//! | `lanes/cuda.rs` | candle on a GPU, on a stream that gpu-await adopted |
//! | `lanes/host.rs` | candle on the CPU, on a stream of the host device |
//! | `model.rs` | a small transformer, plain candle |
//! | `check.rs` | `--check` |

mod app;
mod check;
mod lanes;
mod model;

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;

use tokio::net::TcpListener;
use tokio::runtime;

use crate::lanes::Lanes;

type Failed = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["--check"] => check::run(),
        ["--listen", address] => serve(address),
        [] => serve("127.0.0.1:8080"),
        _ => {
            eprintln!("usage: candle [--check | --listen ADDRESS:PORT]");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("candle: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(address: &str) -> Result<(), Failed> {
    let address: SocketAddr = address.parse()?;
    let runtime = runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let lanes = Lanes::open().await?;
        let listener = TcpListener::bind(address).await?;
        println!("listening on http://{}", listener.local_addr()?);
        axum::serve(listener, app::router(lanes)).await?;
        Ok(())
    })
}
