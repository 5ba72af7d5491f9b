//! The command line.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::Parser;
use clap::builder::{RangedU64ValueParser, TypedValueParser};
use serde::{Deserialize, Serialize};

const DAY_MS: u64 = 86_400_000;

/// An inference service on one GPU
#[derive(Clone, Debug, Parser, Serialize, Deserialize)]
#[command(
    name = "server",
    after_help = "GPU_AWAIT_DEVICE=cuda:0|host|auto names the device, RUST_LOG what is logged."
)]
pub struct Options {
    /// Address of the service; port 0 picks a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) listen: SocketAddr,
    /// Address of health and metrics, which then no longer share that of the service
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) health_listen: Option<SocketAddr>,

    /// Streams on the device
    #[arg(long, value_name = "N", default_value = "4", value_parser = number(1..=128))]
    pub(crate) streams: usize,
    /// Requests on the device at once
    #[arg(long, value_name = "N", default_value = "16", value_parser = number(1..=65_536))]
    pub(crate) max_in_flight: usize,
    /// Requests of a kind that wait for that; further ones get 429
    #[arg(long, value_name = "N", default_value = "1024", value_parser = number(0..=1_048_576))]
    pub(crate) max_waiting: usize,
    /// Connections; further ones wait. Each takes a file descriptor: see `ulimit -n`
    #[arg(long, value_name = "N", default_value = "512", value_parser = number(1..=1_048_576))]
    pub(crate) max_connections: usize,
    /// Bytes of bodies and answers in memory, over all connections, in MiB
    #[arg(long, value_name = "N", default_value = "256", value_parser = number(64..=1_048_576))]
    pub(crate) buffer_budget_mib: usize,

    /// From the body to the result
    #[arg(long, value_name = "N", default_value = "5000", value_parser = ms(1..=DAY_MS))]
    pub(crate) request_timeout_ms: Duration,
    /// For a request's body to arrive
    #[arg(long, value_name = "N", default_value = "10000", value_parser = ms(1..=DAY_MS))]
    pub(crate) body_timeout_ms: Duration,
    /// For the next head on a connection to arrive: longer than a load balancer keeps idle ones
    #[arg(long, value_name = "N", default_value = "75000", value_parser = ms(1..=DAY_MS))]
    pub(crate) idle_timeout_ms: Duration,
    /// For an answer to leave
    #[arg(long, value_name = "N", default_value = "30000", value_parser = ms(1..=DAY_MS))]
    pub(crate) write_timeout_ms: Duration,
    /// For the device to run the launch that health depends on
    #[arg(long, value_name = "N", default_value = "10000", value_parser = ms(1..=DAY_MS))]
    pub(crate) health_timeout_ms: Duration,
    /// For load balancers to notice the end: not ready, and still serving
    #[arg(long, value_name = "N", default_value = "2000", value_parser = ms(0..=DAY_MS))]
    pub(crate) lame_duck_ms: Duration,
    /// For open requests, after that
    #[arg(long, value_name = "N", default_value = "10000", value_parser = ms(1..=DAY_MS))]
    pub(crate) drain_timeout_ms: Duration,

    #[cfg(target_os = "linux")]
    #[command(flatten)]
    pub(crate) isolate: IsolateOptions,
}

#[cfg(target_os = "linux")]
#[derive(Clone, Debug, clap::Args, Serialize, Deserialize)]
pub(crate) struct IsolateOptions {
    /// Compute in another process: a GPU fault, an abort or an endless kernel ends that one alone
    #[arg(long)]
    pub(crate) isolate: bool,
    /// With --isolate, for the device to compute a request: a longer one ends the process
    #[arg(long, requires = "isolate", value_name = "N", default_value = "2000", value_parser = ms(1..=DAY_MS))]
    pub(crate) gpu_limit_ms: Duration,
    /// Requests that fail on purpose, for tests: see drill.rs
    #[arg(long, requires = "isolate", hide = true)]
    pub(crate) drill: bool,
}

fn number(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

fn ms(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = Duration> {
    RangedU64ValueParser::<u64>::new().range(range).map(Duration::from_millis)
}
