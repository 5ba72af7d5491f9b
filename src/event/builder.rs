//! Events that are created first and recorded later.
#![forbid(unsafe_code)]

use super::{Event, Recorded};
use crate::backend::EventOptions;
use crate::batch::queue::Queue;
use crate::device::Device;
use crate::error::refused::Here;
use crate::error::{ErrorDetail, EventProblem, Result};
use crate::event::interprocess::SharedEvent;
use crate::stream::Stream;
use crate::submit::Footprint;
use crate::thread::role;

/// Options for making an [`Event`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct EventBuilder<'d> {
    device: &'d Device,
    options: EventOptions,
}

impl Device {
    /// Creates an event without timing, to be [recorded](Event::record) later.
    ///
    /// To record a point once, right away, [`Stream::record`] is shorter.
    #[must_use]
    pub fn event(&self) -> Event {
        Event::unrecorded(self.engine(), EventOptions::default(), None)
    }

    /// Sets options before making an event.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let start = device.event_builder().timed(true).build()?;
    /// let end = device.event_builder().timed(true).build()?;
    /// start.record(&stream)?;
    /// let x = stream.zeros::<f32>(1 << 20).queued()?;
    /// end.record(&stream)?;
    /// end.done().await?;
    /// println!("{:?}", end.elapsed_since(&start)?);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn event_builder(&self) -> EventBuilder<'_> {
        EventBuilder { device: self, options: EventOptions::default() }
    }
}

impl EventBuilder<'_> {
    /// Whether the event takes a device timestamp; false by default.
    ///
    /// # Source
    /// `CU_EVENT_DISABLE_TIMING`.
    pub fn timed(mut self, timed: bool) -> Self {
        self.options.timing = timed;
        self
    }

    /// Whether a thread that [synchronizes](Event::synchronize) with the event sleeps at once instead of
    /// polling briefly first.
    ///
    /// # Source
    /// `CU_EVENT_BLOCKING_SYNC`.
    pub fn blocking_sync(mut self, blocking_sync: bool) -> Self {
        self.options.blocking_sync = blocking_sync;
        self
    }

    /// Whether the event can be [exported](Event::export) to other processes. Such an event has no timing,
    /// and awaiting it takes an extra stream.
    ///
    /// # Source
    /// `CU_EVENT_INTERPROCESS`.
    pub fn interprocess(mut self, interprocess: bool) -> Self {
        self.options.interprocess = interprocess;
        self
    }

    /// Makes the event.
    ///
    /// # Blocking
    /// An interprocess event is created at once, which blocks while any stream's [queue is
    /// full](Stream#blocking). Others are created when they are first recorded.
    ///
    /// # Errors
    /// [`EventProblem::InterprocessTimed`]; [`ErrorDetail::Unsupported`] for an interprocess event on a
    /// device that does not support them, such as the host device; a lost or closed device.
    ///
    /// # Source
    /// `cuEventCreate`.
    #[track_caller]
    pub fn build(self) -> Result<Event> {
        self.made().here()
    }

    fn made(self) -> Result<Event> {
        let (engine, options) = (self.device.engine(), self.options);
        engine.check_open()?;
        if options.interprocess && options.timing {
            let problem = EventProblem::InterprocessTimed;
            return Err(ErrorDetail::Event { which: "the event", problem }.into());
        }
        let shared = options.interprocess.then(|| SharedEvent::new(engine, options.blocking_sync));
        Ok(Event::unrecorded(engine, options, shared.transpose()?))
    }
}

impl Event {
    /// Records the event behind everything submitted to `stream` so far: from now on it stands for that
    /// point. Waits for an earlier point are unaffected. The host does not wait.
    ///
    /// # Blocking
    /// As [`Stream::record`]; for a timed event, as [`Stream::record_timed`].
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`]: a stream of another device. A device that is lost or closed.
    ///
    /// # Source
    /// `cuEventRecord`.
    #[track_caller]
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.record_on(stream).here()
    }

    /// Records the event behind everything put on `queue` so far, as [`record`](Self::record). In the closure of
    /// [`replay`](Stream::replay) this ends the list of launches, because each run records another point; in a graph
    /// it becomes a node.
    ///
    /// In the closure of a [`Graph`](crate::Graph), every launch records it: it then stands for the whole launch,
    /// and its time is that of its position in the graph, which acts as a [`barrier`](Queue::barrier). The event
    /// is part of the graph's state. Launches on several streams record the same event, so its time may come from
    /// any of them: to measure, give each stream its own graph.
    ///
    /// ```
    /// # use gpu_await::{Device, InOut};
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let stream = device.stream()?;
    /// let [start, end] = [device.event_builder().timed(true).build()?, device.event_builder().timed(true).build()?];
    /// let marks = (start.clone(), end.clone());
    /// let graph = device.graph::<(InOut<f32>,), _, _>(marks, |q, (start, end), (mut y,)| {
    ///     start.record_in(q)?;
    ///     q.fill(&mut y, 1.0)?;
    ///     end.record_in(q)
    /// });
    /// let mut y = stream.zeros::<f32>(1 << 20).queued()?;
    /// assert!(end.elapsed_since(&start).is_err(), "no launch yet");
    /// graph.launch(&stream, (&mut y,)).await?;
    /// println!("{:?}", end.elapsed_since(&start)?);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`record`](Self::record); in a graph [`ErrorDetail::NotInGraph`] for an interprocess event.
    ///
    /// # Source
    /// `cuEventRecord`; in a graph `cuGraphAddEventRecordNode`.
    #[track_caller]
    pub fn record_in(&self, queue: &Queue<'_>) -> Result<()> {
        queue.verb(|| {
            self.check_device(&queue.stream.engine)?;
            if queue.is_recording_graph() {
                return queue.record_event(self);
            }
            let Some(shared) = self.shared() else {
                let timing = self.options().timing;
                self.set_last(Recorded::behind(queue.mark_in_queue("record_in", timing)?, timing));
                return Ok(());
            };
            queue.submit(&mut Footprint::new("record"), 1, &mut |raw| {
                Ok(raw.record_shared(shared)?)
            })?;
            Ok(())
        })
    }

    #[track_caller]
    fn record_on(&self, stream: &Stream) -> Result<()> {
        role::check("submitting work")?;
        self.check_device(stream.engine())?;
        if self.shared().is_some() {
            let queue = stream.queue_of_one();
            return queue.finish(self.record_in(&queue)).queued();
        }
        let timing = self.options().timing;
        let at = if timing { stream.mark_timed()? } else { stream.mark()? };
        self.set_last(Recorded::behind(at, timing));
        Ok(())
    }
}
