//! What was counted, and the table of it.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::requests::{Route, Verdict};

/// So many complaints are kept; the rest are counted.
const SHOWN: usize = 10;

#[derive(Default)]
pub(crate) struct Tally(Mutex<State>);

#[derive(Default)]
struct State {
    latencies: BTreeMap<Route, Histogram>,
    refused: BTreeMap<String, u64>,
    right: u64,
    wrong: u64,
    unexpected: u64,
    hung: u64,
    abandoned: u64,
    complaints: Vec<String>,
    elapsed: Duration,
    unsent: u64,
    /// Answers at the last progress line, and when.
    before: (u64, Option<std::time::Instant>),
}

impl Tally {
    pub(crate) fn new() -> Tally {
        Tally::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn answered(&self, route: Route, latency: Duration, verdict: Verdict) {
        let mut state = self.state();
        state.latencies.entry(route).or_default().add(latency);
        match verdict {
            Verdict::Right => state.right += 1,
            Verdict::Refused(kind) => *state.refused.entry(kind).or_default() += 1,
            Verdict::Wrong(why) => state.wrong(why),
            Verdict::Unexpected(why) => state.unexpected(why),
        }
    }

    pub(crate) fn wrong(&self, why: String) {
        self.state().wrong(why);
    }

    pub(crate) fn unexpected(&self, why: String) {
        self.state().unexpected(why);
    }

    pub(crate) fn hang(&self, why: String) {
        let mut state = self.state();
        state.hung += 1;
        state.complain(why);
    }

    pub(crate) fn abandoned(&self) {
        self.state().abandoned += 1;
    }

    pub(crate) fn ended(&self, elapsed: Duration, unsent: u64) {
        let mut state = self.state();
        (state.elapsed, state.unsent) = (elapsed, unsent);
    }

    /// The line of every few seconds.
    pub(crate) fn progress(&self) -> String {
        let mut state = self.state();
        let (answers, now) = (state.answers(), std::time::Instant::now());
        let (before, then) = std::mem::replace(&mut state.before, (answers, Some(now)));
        let seconds = then.map_or(5.0, |then| (now - then).as_secs_f64());
        let rate = (answers - before) as f64 / seconds;
        let State { wrong, unexpected, hung, abandoned, .. } = *state;
        let refused: u64 = state.refused.values().sum();
        format!(
            "{answers} answers, {rate:.0}/s, {abandoned} abandoned, {refused} refused, {wrong} wrong, \
             {unexpected} unexpected, {hung} hung"
        )
    }

    /// What went wrong, in a sentence.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let state = self.state();
        let State { right, wrong, unexpected, hung, .. } = *state;
        if wrong + unexpected + hung > 0 {
            return Err(format!(
                "{wrong} wrong, {unexpected} unexpected, {hung} without an answer"
            ));
        }
        if right == 0 {
            return Err("not one answer was right".to_owned());
        }
        Ok(())
    }
}

impl State {
    fn answers(&self) -> u64 {
        self.latencies.values().map(Histogram::count).sum()
    }

    fn wrong(&mut self, why: String) {
        self.wrong += 1;
        self.complain(format!("wrong: {why}"));
    }

    fn unexpected(&mut self, why: String) {
        self.unexpected += 1;
        self.complain(format!("unexpected: {why}"));
    }

    fn complain(&mut self, why: String) {
        if self.complaints.len() < SHOWN && !self.complaints.contains(&why) {
            self.complaints.push(why);
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let seconds = state.elapsed.as_secs_f64();
        writeln!(
            f,
            "\n{:<14} {:>10} {:>10} {:>9} {:>9} {:>9}",
            "", "answers", "a second", "p50 ms", "p99 ms", "p99.9 ms"
        )?;
        for route in Route::ALL {
            let Some(latencies) = state.latencies.get(&route) else { continue };
            let (count, ms) = (latencies.count(), |p| latencies.percentile(p).as_secs_f64() * 1e3);
            write!(f, "{route:<14} {count:>10} {:>10.1}", count as f64 / seconds)?;
            writeln!(f, " {:>9.2} {:>9.2} {:>9.2}", ms(0.5), ms(0.99), ms(0.999))?;
        }
        let answers = state.answers();
        writeln!(f, "{:<14} {answers:>10} {:>10.1}", "all", answers as f64 / seconds)?;
        let State { right, wrong, unexpected, hung, abandoned, unsent, .. } = *state;
        writeln!(
            f,
            "\nright {right}, wrong {wrong}, unexpected {unexpected}, hung {hung}, abandoned {abandoned}"
        )?;
        if unsent > 0 {
            writeln!(f, "{unsent} requests were due and found no connection: more --connections?")?;
        }
        for (kind, count) in &state.refused {
            writeln!(f, "refused with {kind}: {count}")?;
        }
        state.complaints.iter().try_for_each(|why| writeln!(f, "{why}"))
    }
}

/// Latencies in classes of at most 3 % width.
struct Histogram {
    classes: Vec<u64>,
    count: u64,
}

/// Classes a factor of two.
const CLASSES: u32 = 32;

impl Default for Histogram {
    fn default() -> Self {
        // Up to 2^36 µs, which is most of a day.
        Histogram { classes: vec![0; 36 * CLASSES as usize], count: 0 }
    }
}

impl Histogram {
    fn add(&mut self, latency: Duration) {
        let us = (latency.as_secs_f64() * 1e6).max(1.0);
        let class = (us.log2() * f64::from(CLASSES)) as usize;
        self.classes[class.min(36 * CLASSES as usize - 1)] += 1;
        self.count += 1;
    }

    fn count(&self) -> u64 {
        self.count
    }

    /// The upper end of the class that has the latency in question.
    fn percentile(&self, p: f64) -> Duration {
        let (rank, mut seen) = ((self.count as f64 * p).ceil() as u64, 0);
        let class = self.classes.iter().position(|count| {
            seen += count;
            seen >= rank.max(1)
        });
        let class = class.unwrap_or(0) + 1;
        Duration::from_secs_f64((class as f64 / f64::from(CLASSES)).exp2() / 1e6)
    }
}
