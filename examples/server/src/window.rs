//! The last minute, second by second: what the page draws.
//!
//! Latencies are counted in classes of a quarter of an octave, so a second takes the same memory whatever
//! the load, and a percentile is right to within 10 %.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use serde::Serialize;

/// Whole seconds that are remembered.
const SECONDS: usize = 60;
/// Classes a doubling, from a microsecond to 16 seconds.
const A_DOUBLING: f64 = 4.0;
const CLASSES: usize = 96;

/// What was counted in one second.
#[derive(Clone)]
struct Second {
    /// The second since the start; another one than expected means that nothing was counted.
    number: u64,
    requests: u32,
    refused: u32,
    errors: u32,
    classes: [u32; CLASSES],
    samples: u32,
    busy: u32,
}

/// The last minute, for all threads.
pub(crate) struct Window {
    start: Instant,
    seconds: Mutex<Vec<Second>>,
}

/// One second, or several, as the page gets them. `null` where there is nothing to tell.
#[derive(Serialize)]
pub(crate) struct Summary {
    /// Results.
    pub requests: u32,
    /// Answers 429 and 503: the service could not.
    pub refused: u32,
    /// Answers that are other errors.
    pub errors: u32,
    pub p50_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    /// Of the moments at which somebody looked, those at which the device had work.
    pub busy: Option<f64>,
}

impl Second {
    fn new(number: u64) -> Second {
        let classes = [0; CLASSES];
        Second { number, requests: 0, refused: 0, errors: 0, classes, samples: 0, busy: 0 }
    }
}

impl Window {
    pub(crate) fn new() -> Window {
        let nothing = vec![Second::new(u64::MAX); SECONDS + 1];
        Window { start: Instant::now(), seconds: Mutex::new(nothing) }
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Counts an answer that took so long.
    pub(crate) fn record(&self, status: StatusCode, latency: Duration) {
        self.now(|second| match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => second.refused += 1,
            status if !status.is_success() => second.errors += 1,
            _ => {
                second.requests += 1;
                second.classes[class(latency)] += 1;
            }
        });
    }

    /// Counts a look at the device.
    pub(crate) fn look(&self, busy: bool) {
        self.now(|second| {
            second.samples += 1;
            second.busy += u32::from(busy);
        });
    }

    /// The last whole second; the last ten; and each of the last minute, the oldest first.
    pub(crate) fn summaries(&self) -> (Summary, Summary, Vec<Summary>) {
        let now = self.start.elapsed().as_secs();
        let seconds = self.lock();
        // `ago` is 1 for the last whole second.
        let at = |ago: u64| {
            let number = now.checked_sub(ago)?;
            seconds.get(place(number)).filter(|second| second.number == number)
        };
        let minute = (1..=SECONDS as u64).rev().map(|ago| summary(at(ago).into_iter())).collect();
        (summary((1..=1).filter_map(at)), summary((1..=10).filter_map(at)), minute)
    }

    fn now(&self, count: impl FnOnce(&mut Second)) {
        let number = self.start.elapsed().as_secs();
        let mut seconds = self.lock();
        let second = &mut seconds[place(number)];
        if second.number != number {
            *second = Second::new(number);
        }
        count(second);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Second>> {
        // Counts are whole after every line: a panic elsewhere leaves nothing half done.
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a second is kept: one more than a minute, for the one that is not over.
fn place(number: u64) -> usize {
    (number % (SECONDS as u64 + 1)) as usize
}

fn class(latency: Duration) -> usize {
    let us = latency.as_secs_f64() * 1e6;
    ((us.max(1.0).log2() * A_DOUBLING) as usize).min(CLASSES - 1)
}

fn summary<'a>(seconds: impl Iterator<Item = &'a Second>) -> Summary {
    let mut sum =
        Summary { requests: 0, refused: 0, errors: 0, p50_ms: None, p99_ms: None, busy: None };
    let (mut classes, mut samples, mut busy) = ([0; CLASSES], 0, 0);
    for second in seconds {
        sum.requests += second.requests;
        sum.refused += second.refused;
        sum.errors += second.errors;
        samples += second.samples;
        busy += second.busy;
        classes.iter_mut().zip(&second.classes).for_each(|(sum, count)| *sum += count);
    }
    sum.p50_ms = percentile(&classes, sum.requests, 0.50);
    sum.p99_ms = percentile(&classes, sum.requests, 0.99);
    sum.busy = (samples > 0).then(|| f64::from(busy) / f64::from(samples));
    sum
}

fn percentile(classes: &[u32; CLASSES], requests: u32, share: f64) -> Option<f64> {
    let rank = (f64::from(requests) * share).ceil() as u32;
    let mut seen = 0;
    let at = classes.iter().position(|count| {
        seen += count;
        seen >= rank && requests > 0
    })?;
    Some(((at as f64 + 0.5) / A_DOUBLING).exp2() / 1000.0)
}
