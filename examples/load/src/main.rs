//! Load for `examples/server`: many connections, every answer checked.
//!
//! ```text
//! cargo run --release --bin server -- --listen 127.0.0.1:8080 &
//! cargo run --release --bin load -- http://127.0.0.1:8080 --seconds 30 --connections 64 --mix mixed
//! ```
//!
//! Multiplies matrices, as JSON and as raw floats, and embeds; each answer is compared with what the
//! CPU says. `--mix mixed` also sends requests that are wrong, each way that the server should
//! notice, and drops connections at random moments. Without `--rate` each connection asks again when
//! it has its answer (a *closed loop*). With `--rate R` requests are due R times a second whatever
//! the server does, and a latency counts from the moment that the request was due.
//!
//! Prints a line every few seconds and a table at the end. The exit code is 1 after a wrong answer,
//! an answer that should not be, or a request without any; and 2 for arguments that make no sense.
//! Answers 429 and 503 are the server's right when it is full: they are counted, no more, unless there
//! is nothing else. Only this machine is a target.
#![forbid(unsafe_code)]

mod arguments;
mod client;
mod requests;
mod tally;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use arguments::Arguments;
use client::{Client, Schedule};
use tally::Tally;
use tokio::time::{MissedTickBehavior, interval_at, sleep, timeout};

/// Between progress lines.
const PROGRESS: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--help") {
        println!("{}", arguments::USAGE);
        return ExitCode::SUCCESS;
    }
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}\n\n{}", arguments::USAGE);
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("no runtime: {error}");
            return ExitCode::from(1);
        }
    };
    let tally = runtime.block_on(run(&arguments));
    // What still waits for a body that never comes is of no interest any more.
    runtime.shutdown_background();
    println!("{tally}");
    match tally.verdict() {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::from(1)
        }
    }
}

async fn run(arguments: &Arguments) -> Arc<Tally> {
    let (tally, seconds) = (Arc::new(Tally::new()), Duration::from_secs(arguments.seconds));
    let schedule = Arc::new(Schedule::new(seconds, arguments.rate));
    println!("{arguments}");
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..arguments.connections {
        let client = Client::new(arguments, number, tally.clone());
        tasks.spawn(client.run(schedule.clone()));
    }
    if arguments.mixed {
        let (address, tally) = (arguments.address, tally.clone());
        tasks.spawn(async move {
            // A slow body is given up by the server when it likes, which may be after our end.
            tokio::select! {
                () = client::slow(address, &tally) => {}
                () = sleep(seconds) => {}
            }
        });
    }
    let start = tokio::time::Instant::now();
    let mut ticks = interval_at(start + PROGRESS, PROGRESS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let all = async {
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tally.unexpected(format!("the load generator itself: {error}"));
            }
        }
    };
    let progress = async {
        loop {
            ticks.tick().await;
            println!("{:4} s: {}", start.elapsed().as_secs(), tally.progress());
        }
    };
    // Each request has a limit, so this one is never reached but by a fault of ours.
    let all = timeout(seconds + 2 * client::LIMIT, all);
    tokio::select! {
        ended = all => if ended.is_err() { tally.hang("the load generator itself".to_owned()) },
        () = progress => {}
    }
    tally.ended(start.elapsed(), schedule.unsent());
    tally
}
