//! [`ServiceTimes`]: an estimator of recent durations, as a function of the number in flight and of a weight (pure).
//!
//! How long a permit is held depends on how many are: on a full device twice as many take twice as long; on one with spare capacity, as
//! long as one. So the estimate is a line, time over number in flight, from moving averages. Where the number hardly varied the line is
//! flat, and it is never steeper than in proportion to the number.
//!
//! How long a batch takes depends on its weight as well, by a line of its own; the number in flight stretches that time. Deviations count in proportion
//! to it.
//!
//! A *likely* duration adds a number of mean deviations, which follows from lateness: it rises each time a request that was expected to be
//! in time was late, and falls a little each time one was not. A fixed number would refuse requests that can be in time where none is ever
//! late.
//!
//! The averages and the mean deviation from the line have the gains of TCP's round-trip estimate (Jacobson, "Congestion avoidance and
//! control", 1988): an eighth, so that one outlier moves them little and sixteen samples replace it; a quarter for the deviation, which has
//! to widen before the mean has moved. A duration of less than half of the expected one counts for as much as all before it: a slow first
//! request, which loads and compiles, is forgotten after a few samples, and so is any large outlier.
//!
//! # Invariants
//! 1. The mean stays within the samples, and an estimate for a number in flight that was seen stays within twice that
//!    (`an_estimate_stays_within_its_samples`).
//! 2. Where no admitted request is late, the mean alone decides (`nobody_is_refused_who_can_be_in_time`); where some are, about one in
//!    fifty is (`too_many_permits_cost_little_goodput`).
//! 3. Full devices and devices with spare capacity are told apart (`a_line_is_learned`).
//! 4. Light work is not expected to take as long as heavy work (`light_requests_beside_a_heavy_one`), nor heavy work in proportion to light samples
//!    that differ by chance (`weights_are_told_apart`).
//! 5. One slow sample is soon forgotten (`a_slow_first_request_is_soon_forgotten`, `a_slow_batch_is_soon_forgotten`).
#![forbid(unsafe_code)]

const GAIN: f64 = 1.0 / 8.0;
/// A sample of less than half of the estimate means that an outlier, or first-time work, was remembered.
const FALL_GAIN: f64 = 1.0 / 2.0;
const DEVIATION_GAIN: f64 = 1.0 / 4.0;
/// The most mean deviations that [`ServiceTimes::likely_ns`] adds. Two cover 19 of 20 samples of a normal distribution, for which the
/// mean deviation is 0.8 standard deviations; TCP's four are for losses, which cost it more than a wrong guess costs here.
const DEVIATIONS: f64 = 2.0;
/// The part of a deviation that each request in time takes off. Each late one adds a whole one, so about one in fifty is late where any are.
const IN_TIME: f64 = 1.0 / 50.0;
/// A variance of the number in flight at which its slope counts half: that of a number which is off by one every fourth
/// time.
const LITTLE: f64 = 0.25;

/// A weight further above the mean than this many standard deviations counts as that far: nothing as heavy was seen lately, so it must not be refused
/// for what light work took.
const FAR: f64 = 4.0;
/// At a standard deviation of this part of the mean weight, the slope counts half.
const LITTLE_PART: f64 = 1.0 / 8.0;

/// How long requests took lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServiceTimes {
    samples: u64,
    ns: f64,
    in_flight: Varied,
    weight: Varied,
    /// Mean deviation from the line.
    deviation_ns: f64,
    /// How many deviations `likely_ns` adds.
    margin: f64,
}

/// A quantity that times depend on, by moving averages.
#[derive(Clone, Copy, Debug, Default)]
struct Varied {
    mean: f64,
    variance: f64,
    /// Its covariance with the time.
    covariance: f64,
}

impl Varied {
    fn add(&mut self, by: f64, ns: f64, gain: f64) {
        self.mean += gain * by;
        self.variance = (1.0 - GAIN) * (self.variance + GAIN * by * by);
        self.covariance = (1.0 - GAIN) * (self.covariance + GAIN * by * ns);
    }

    /// Time per unit, at most in proportion; little of it where the variance is no more than `little`.
    fn slope(&self, mean_ns: f64, little: f64) -> f64 {
        let steepest = mean_ns / self.mean.max(1.0);
        (self.covariance / (self.variance + little)).clamp(0.0, steepest)
    }
}

impl ServiceTimes {
    /// Enters a sample: a duration, and the number in flight, itself included.
    pub fn add(&mut self, in_flight: u64, ns: u64) {
        self.add_of(in_flight, 1, ns);
    }

    /// [`add`](Self::add), with a weight.
    pub fn add_of(&mut self, in_flight: u64, weight: u64, ns: u64) {
        let (n, w, t) = (in_flight as f64, weight as f64, ns as f64);
        self.samples += 1;
        if self.samples == 1 {
            (self.ns, self.in_flight.mean, self.weight.mean) = (t, n, w);
            self.deviation_ns = t / 2.0;
            return;
        }
        let of_weight = self.of_weight(w);
        let expected = self.part(w) * self.at(n);
        let gain = if t < expected / 2.0 { FALL_GAIN } else { GAIN };
        self.deviation_ns += DEVIATION_GAIN * ((t - expected).abs() - self.deviation_ns);
        let dt = t - self.ns;
        // What the weight explains is not put down to the number.
        self.in_flight.add(n - self.in_flight.mean, t - of_weight, gain);
        self.weight.add(w - self.weight.mean, dt, gain);
        self.ns += gain * dt;
    }

    /// Records whether a request that was expected to be in time was late.
    pub fn judge(&mut self, late: bool) {
        let step = if late { 1.0 } else { -IN_TIME };
        self.margin = (self.margin + step).clamp(0.0, DEVIATIONS);
    }

    /// The mean; `None` before the first sample.
    pub fn mean_ns(&self) -> Option<u64> {
        (self.samples > 0).then_some(self.ns as u64)
    }

    /// The mean for that weight; 0 before the first sample.
    pub fn mean_ns_of(&self, weight: u64) -> u64 {
        self.of_weight(weight as f64) as u64
    }

    /// The likely duration with this many in flight, at the mean weight; 0 before the first sample.
    pub fn likely_ns(&self, in_flight: u64) -> u64 {
        // A float that is too large for the integer becomes the largest.
        (self.at(in_flight as f64) + self.margin * self.deviation_ns) as u64
    }

    /// [`likely_ns`](Self::likely_ns), for that weight.
    pub fn likely_ns_of(&self, in_flight: u64, weight: u64) -> u64 {
        let at_mean = self.at(in_flight as f64) + self.margin * self.deviation_ns;
        (self.part(weight as f64) * at_mean) as u64
    }

    /// The estimate at the mean weight.
    fn at(&self, in_flight: f64) -> f64 {
        let slope = self.in_flight.slope(self.ns, LITTLE);
        (self.ns + slope * (in_flight - self.in_flight.mean)).max(0.0)
    }

    /// The estimate at the mean number in flight.
    fn of_weight(&self, weight: f64) -> f64 {
        let Varied { mean, variance, .. } = self.weight;
        let slope = self.weight.slope(self.ns, (mean * LITTLE_PART).powi(2));
        (self.ns + slope * (weight.min(mean + FAR * variance.sqrt()) - mean)).max(0.0)
    }

    /// The time for a weight, relative to that for the mean weight.
    fn part(&self, weight: f64) -> f64 {
        if self.ns > 0.0 { self.of_weight(weight) / self.ns } else { 1.0 }
    }
}
