//! The command line: what makes no sense is refused with a sentence.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

pub(crate) const USAGE: &str = "\
usage: load http://127.0.0.1:PORT [--seconds N] [--connections N] [--rate R] [--mix good|mixed] [--seed S]
  --seconds N      how long, 1 to 86400; 10 if not given
  --connections N  how many at once, 1 to 4096; 16 if not given
  --rate R         requests a second that are due, whatever the server does; else each connection
                   asks again when it has its answer
  --mix mixed      also requests that are wrong, and connections that are dropped
  --seed S         for the same requests again";

pub(crate) struct Arguments {
    pub(crate) address: SocketAddr,
    pub(crate) seconds: u64,
    pub(crate) connections: u64,
    pub(crate) rate: Option<f64>,
    pub(crate) mixed: bool,
    pub(crate) seed: u64,
}

impl Arguments {
    pub(crate) fn parse(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
        let (mut target, mut seconds, mut connections) = (None, 10, 16);
        let (mut rate, mut mixed, mut seed) = (None, false, 1);
        while let Some(argument) = given.next() {
            if !argument.starts_with("--") {
                if target.replace(address(&argument)?).is_some() {
                    return Err(format!("one target is enough: `{argument}` is another"));
                }
                continue;
            }
            let mut value = || given.next().ok_or_else(|| format!("{argument} wants a value"));
            match argument.as_str() {
                "--seconds" => seconds = whole(&argument, &value()?, 1..=86_400)?,
                "--connections" => connections = whole(&argument, &value()?, 1..=4096)?,
                "--seed" => seed = whole(&argument, &value()?, 0..=u64::MAX)?,
                "--rate" => {
                    let value = value()?;
                    let parsed = value.parse().ok().filter(|r| (0.01..=1e6).contains(r));
                    rate = Some(parsed.ok_or_else(|| {
                        format!("--rate {value}: it is a number from 0.01 to 1000000")
                    })?);
                }
                "--mix" => {
                    mixed = match value()?.as_str() {
                        "good" => false,
                        "mixed" => true,
                        other => return Err(format!("--mix {other}: it is `good` or `mixed`")),
                    }
                }
                _ => return Err(format!("`{argument}` is no option")),
            }
        }
        let address = target.ok_or("there is no target")?;
        Ok(Arguments { address, seconds, connections, rate, mixed, seed })
    }
}

/// The address in `http://ADDRESS:PORT`, if it is one of this machine alone.
fn address(target: &str) -> Result<SocketAddr, String> {
    let form = || format!("`{target}` is no target: try http://127.0.0.1:8080");
    let rest = target.strip_prefix("http://").ok_or_else(form)?;
    let rest = rest.strip_suffix('/').unwrap_or(rest).replace("localhost:", "127.0.0.1:");
    let (host, port) = rest.rsplit_once(':').ok_or_else(form)?;
    if host.is_empty() || host.contains('/') || port.parse::<u16>().is_err() {
        return Err(form());
    }
    match rest.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(address),
        _ => Err(format!("`{target}` is not this machine: load goes to loopback addresses only")),
    }
}

fn whole(option: &str, value: &str, range: RangeInclusive<u64>) -> Result<u64, String> {
    let parsed = value.parse().ok().filter(|n| range.contains(n));
    let (from, to) = (range.start(), range.end());
    parsed.ok_or_else(|| format!("{option} {value}: it is a whole number from {from} to {to}"))
}

impl fmt::Display for Arguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arguments { address, seconds, connections, rate, mixed, seed } = self;
        write!(f, "load on http://{address}: {connections} connections for {seconds} s, ")?;
        match rate {
            Some(rate) => write!(f, "{rate} requests/s due, ")?,
            None => write!(f, "closed loop, ")?,
        }
        write!(f, "{} requests, seed {seed}", if *mixed { "good and bad" } else { "good" })
    }
}
