//! The command line.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// What is told to who asks for something else.
pub const USAGE: &str = "\
usage: server [--listen ADDR:PORT] [OPTION N]...

  --listen ADDR:PORT     where to listen; port 0 picks one           127.0.0.1:8080
  --streams N            streams on the device                       4
  --max-in-flight N      requests on the device at once              16
  --max-waiting N        requests that wait for that; further: 429   1024
  --max-connections N    connections; further ones wait              1024
  --request-limit-ms N   time from the body to the result            5000
  --body-limit-ms N      time for a request's head, and its body     10000
  --drain-limit-ms N     time for open requests when stopping        10000
  --lose-device-after N  a host device, lost after N answers (feature `drill`)

GPU_AWAIT_DEVICE=cuda:0|host|auto names the device, RUST_LOG what is logged.";

/// What can be chosen.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) listen: SocketAddr,
    pub(crate) streams: usize,
    pub(crate) max_in_flight: usize,
    pub(crate) max_waiting: usize,
    pub(crate) max_connections: usize,
    pub(crate) request_limit: Duration,
    pub(crate) body_limit: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) lose_device_after: Option<u64>,
}

impl Options {
    /// Reads the arguments behind the program's name.
    ///
    /// # Errors
    /// What is wrong with the arguments, as a sentence.
    pub fn from_args(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let ms = Duration::from_millis;
        let mut options = Options {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            streams: 4,
            max_in_flight: 16,
            max_waiting: 1024,
            max_connections: 1024,
            request_limit: ms(5_000),
            body_limit: ms(10_000),
            drain_limit: ms(10_000),
            lose_device_after: None,
        };
        while let Some(name) = args.next() {
            let value = args.next();
            let value = value.as_deref();
            match name.as_str() {
                "--listen" => options.listen = parse(&name, value)?,
                "--streams" => options.streams = at_least_one(&name, value)?,
                "--max-in-flight" => options.max_in_flight = at_least_one(&name, value)?,
                "--max-waiting" => options.max_waiting = parse(&name, value)?,
                "--max-connections" => options.max_connections = at_least_one(&name, value)?,
                "--request-limit-ms" => options.request_limit = ms(parse(&name, value)?),
                "--body-limit-ms" => options.body_limit = ms(parse(&name, value)?),
                "--drain-limit-ms" => options.drain_limit = ms(parse(&name, value)?),
                "--lose-device-after" => options.lose_device_after = Some(parse(&name, value)?),
                _ => return Err(format!("`{name}` is no argument of this program")),
            }
        }
        Ok(options)
    }
}

fn parse<T: FromStr<Err: fmt::Display>>(name: &str, value: Option<&str>) -> Result<T, String> {
    let value = value.ok_or_else(|| format!("`{name}` needs a value"))?;
    value.parse().map_err(|error| format!("`{name} {value}`: {error}"))
}

fn at_least_one(name: &str, value: Option<&str>) -> Result<usize, String> {
    match parse(name, value)? {
        0 => Err(format!("`{name} 0`: at least 1")),
        n => Ok(n),
    }
}
