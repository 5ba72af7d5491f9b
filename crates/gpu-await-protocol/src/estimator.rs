//! How long a stream's recent work took, and so when its current work may be complete (pure).
//!
//! A wait is timed from the moment its stream's head was first waited for, or from the preceding completion, to its own completion. That
//! time is known as an interval: between the last look that found it pending and the first that found it complete. A few such spans are
//! kept, one for each kind of work: a stream that alternates between short and long operations has two.
//!
//! | a wait that | does to the spans |
//! |---|---|
//! | fits some | replaces the closest, and adapts its spread |
//! | fits none | replaces the one that has gone unmatched the longest |
//!
//! A span that no wait fitted for `FORGET_AFTER` waits is forgotten. A span that two later waits fitted is a length that repeats; the
//! others may be chance. A short one (`SHORT_NS`) counts as repeating from the start, because checking it is short as well.
//!
//! # Invariants
//! 1. A span's window contains the span (`a_window_holds_what_was_learned`).
//! 2. A window extends beyond its span by at most an eighth of the wait, or by [`LEAD_LEAST_NS`] (`a_window_is_short_beside_the_wait`).
//! 3. Clearly different lengths keep separate spans (`alternating_lengths_keep_both_windows`).
//! 4. A length repeats from its third time on (`a_length_repeats_from_its_third_time_on`).
#![forbid(unsafe_code)]

/// Kinds of work that a stream remembers.
const SPANS: usize = 4;

/// How many waits it takes to forget one that nothing fitted since.
const FORGET_AFTER: u32 = 64;

/// Work of less than that is checked for whether it repeats or not.
const SHORT_NS: u64 = 70_000;

/// Tasks check in windows of at most this length; the poller watches longer ones.
pub const CHECK_MOST_NS: u64 = 250_000;
/// How long before and behind a span its window opens and closes, at least.
pub const LEAD_LEAST_NS: u64 = 30_000;

/// How long before and behind a span of that length its window opens and closes at most.
#[inline]
pub fn lead_most(span_ns: u64) -> u64 {
    (span_ns / 8).min(CHECK_MOST_NS).max(span_ns / 32).max(LEAD_LEAST_NS)
}

/// A stream's memory of its waits.
#[derive(Clone, Debug, Default)]
pub struct Estimator {
    spans: [Option<RunTime>; SPANS],
    /// Waits learned so far.
    learned: u32,
}

/// How long one kind of work takes.
#[derive(Clone, Copy, Debug)]
struct RunTime {
    low_ns: u64,
    high_ns: u64,
    /// How far successive waits lie apart: an average over about four.
    spread_ns: u64,
    /// The number of the wait that last fitted.
    fitted: u32,
    /// Whether a later wait fitted, and whether more than one did.
    fits: bool,
    repeats: bool,
}

/// When work may be complete, by its age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its first age.
    pub from_ns: u64,
    /// Its last age.
    pub until_ns: u64,
    /// Whether work of that length was seen again and again.
    pub repeats: bool,
}

impl Estimator {
    /// Enters a wait that was pending at the age of `low_ns` and complete at `high_ns`.
    pub fn learn(&mut self, low_ns: u64, high_ns: u64) {
        self.learned = self.learned.wrapping_add(1);
        let learned = self.learned;
        let low_ns = low_ns.min(high_ns);
        for span in &mut self.spans {
            span.take_if(|span| learned.wrapping_sub(span.fitted) > FORGET_AFTER);
        }
        let fitting = self.spans.iter_mut().flatten().filter(|span| span.fits(low_ns, high_ns));
        if let Some(span) = fitting.min_by_key(|span| span.apart(low_ns, high_ns)) {
            let apart = span.apart(low_ns, high_ns);
            span.spread_ns = span.spread_ns - span.spread_ns / 4 + apart / 4;
            (span.low_ns, span.high_ns, span.fitted) = (low_ns, high_ns, self.learned);
            (span.repeats, span.fits) = (span.fits, true);
            return;
        }
        let age =
            |span: &Option<RunTime>| span.map_or(u32::MAX, |s| learned.wrapping_sub(s.fitted));
        if let Some(place) = self.spans.iter_mut().max_by_key(|span| age(span)) {
            let repeats = high_ns < SHORT_NS;
            *place = Some(RunTime {
                low_ns,
                high_ns,
                spread_ns: 0,
                fitted: learned,
                fits: repeats,
                repeats,
            });
        }
    }

    /// The first window that is not over at `age_ns`.
    pub fn window(&self, age_ns: u64) -> Option<Window> {
        let windows = self.spans.iter().flatten().map(RunTime::window);
        windows.filter(|window| window.until_ns > age_ns).min_by_key(|window| window.from_ns)
    }

    /// Whether all that is remembered took at most `most_ns`, and something is.
    #[inline]
    pub fn is_short(&self, most_ns: u64) -> bool {
        !self.is_empty() && self.spans.iter().flatten().all(|span| span.high_ns <= most_ns)
    }

    /// Whether nothing is known yet.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.learned == 0
    }
}

impl RunTime {
    /// Whether a wait is of this kind: it overlaps, or all of it lies where a window can reach.
    fn fits(&self, low_ns: u64, high_ns: u64) -> bool {
        let slack = lead_most(self.high_ns);
        let is_near = low_ns + slack >= self.low_ns && high_ns <= self.high_ns + slack;
        is_near || self.apart(low_ns, high_ns) == 0
    }

    /// The minimum distance of a wait from this span: both are intervals, which may hold the same length.
    fn apart(&self, low_ns: u64, high_ns: u64) -> u64 {
        low_ns.saturating_sub(self.high_ns) + self.low_ns.saturating_sub(high_ns)
    }

    fn window(&self) -> Window {
        let lead = (LEAD_LEAST_NS + 2 * self.spread_ns).min(lead_most(self.high_ns));
        Window {
            from_ns: self.low_ns.saturating_sub(lead),
            until_ns: self.high_ns + lead,
            repeats: self.repeats,
        }
    }
}
