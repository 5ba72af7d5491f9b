//! [`DeviceTimeline`]: a device's operations and their times, for people to read.
//!
//! The log itself is [`Tracer`](crate::runtime::tracer::Tracer); it is started, stopped and read here. Reading yields plain data, a
//! [`Trace`], which does not refer to its device; the files below render it.
#![forbid(unsafe_code)]

pub(crate) mod advice;
pub(crate) mod gaps;
pub(crate) mod page;
pub(crate) mod perfetto;
pub(crate) mod report;
pub(crate) mod trace;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use self::trace::Trace;
use crate::device::Device;
use crate::error::Result;
use crate::runtime::Engine;
use crate::thread::role;

/// The timeline of a device: a log of its last operations, off until it is started; from [`Device::timeline`](crate::Device::timeline).
///
/// For each operation it keeps what it was, where the program submitted it, what it waited for, and six times: submitted, started and completed on
/// the device, seen by the host, its task woken, and its future polled. See [`TracedOp`](crate::TracedOp).
///
/// A batch has an entry for each of its operations; a replayed list, or a launch of a [`Graph`](crate::Graph), has one. Allocations behind the
/// first operation of a replayed list have none. On a device of `testing::manual` operations have no device times.
///
/// # Cost
/// Off, none that instruction counts would show. On, each operation is put between two timed events and logged under a lock of the device; the events
/// are queried later, on a thread of this crate. While a full queue blocks a thread in the driver, the driver creates no events, and operations may
/// lack their device times.
///
/// # Tracing
/// Each operation whose times become known emits an event of [`tracing`] (target `gpu_await::timeline`, level trace) with the fields `op`, `stream`,
/// `ticket`, `span` (the number of the span that it was submitted in), `wait_us` (from submitted to started) and `device_us`. It is emitted when the
/// operation's events are queried: with the first operation that is seen a thousand operations or a quarter of a second later, or in a snapshot.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::host();
/// let stream = device.stream()?;
/// device.timeline().start(1000)?;
/// let x = stream.upload(vec![1.0f32; 1000]).queued()?;
/// stream.download(&x).await?;
/// let trace = device.timeline().snapshot()?;
/// assert_eq!(trace.operations().len(), 2);
/// println!("{}", trace.report());
/// let mut file = Vec::new();
/// trace.write_perfetto(&mut file)?; // for ui.perfetto.dev; or `write_html`, for any browser
/// # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct DeviceTimeline {
    engine: Arc<Engine>,
}

impl Device {
    /// Returns the log of the device's operations and their times; it is off until it is started.
    #[must_use]
    pub fn timeline(&self) -> DeviceTimeline {
        DeviceTimeline { engine: self.engine().clone() }
    }
}

impl DeviceTimeline {
    /// Starts an empty log of the last `capacity` operations, replacing an earlier one; 0 empties and stops it.
    ///
    /// While it is on, no launch on a stream starts before the preceding one is complete, as some do otherwise
    /// ([`Stats::overlaps`](crate::Stats::overlaps)), so that each is measured by itself. A replayed list or a graph is one entry, within which
    /// launches overlap as usual.
    ///
    /// # Blocking
    /// For about a millisecond: it makes events, and compares the device's clock with the host's.
    ///
    /// # Errors
    /// The loss of the device; a thread on which no driver call can be made.
    pub fn start(&self, capacity: usize) -> Result<()> {
        self.start_sampled(capacity, 1)
    }

    /// Like [`start`](Self::start), but logs one operation in `one_in` of each stream; 0 counts as 1. With more than 1 a [report](Trace::report) has
    /// no gaps and no advice: the operations in between are not known.
    ///
    /// # Blocking
    /// As [`start`](Self::start).
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_sampled(&self, capacity: usize, one_in: u32) -> Result<()> {
        self.engine.start_tracing(capacity, one_in)
    }

    /// Stops the log; an operation that is being submitted may still be logged. Its contents stay for [`snapshot`](Self::snapshot) until it is started again.
    pub fn stop(&self) {
        self.engine.tracer.stop();
    }

    /// Whether operations are logged.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.engine.tracer.is_on()
    }

    /// Asks the device how far each stream is, and copies the log. The copy is empty if the log was never started. For a lost device it holds what
    /// was known when the loss was found.
    ///
    /// # Blocking
    /// For about a millisecond, plus a microsecond for each operation whose events were not yet queried
    /// (usually at most a few thousand) and half a microsecond for each that is copied. A slow [`tracing`]
    /// subscriber adds to that.
    ///
    /// # Errors
    /// A thread on which no driver call can be made.
    pub fn snapshot(&self) -> Result<Trace> {
        role::check_driver("reading the timeline")?;
        let engine = &self.engine;
        for stream in engine.registry.streams() {
            stream.sweep();
            engine.tracer.seen(
                stream.progress.id,
                stream.progress.timeline.completed(),
                engine.pacing.now(),
            );
        }
        if engine.check_health().is_ok() && !engine.options.stepped {
            engine.tracer.look(&**engine, || engine.pacing.now());
            engine.resolve_traced();
        }
        let taken = (Duration::from_nanos(engine.pacing.now()), SystemTime::now());
        let log = engine.tracer.snapshot();
        Ok(Trace::of(engine.label(), taken, log))
    }
}

impl std::fmt::Debug for DeviceTimeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = if self.is_on() { "on" } else { "off" };
        write!(f, "DeviceTimeline({state}, {})", self.engine.label())
    }
}
