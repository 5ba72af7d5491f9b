//! [`Queue`]: the verbs, defined once.
//!
//! Inside [`Stream::batch`](crate::Stream::batch) each verb puts its work on the stream and returns a plain `Result`; the batch as a whole
//! is one future with one marker. The verbs of [`Stream`](crate::Stream) are batches of one.
//!
//! Host values are returned as [`Lent`], which cannot be read before their operation is complete. The future returns the closure's
//! result, with every `Lent<T>` in it turned into `T`.
//!
//! # Invariants
//! 1. A refused call returns the host memory that was passed to it, unless the device may be using it (`a_refused_call_hands_the_memory_back`).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use crate::backend::RowCopy;
use crate::batch::graph_list::Writer;
use crate::batch::settle::{Lent, Settled};
use crate::batch::source::{Pool, Source, copied};
use crate::device::home::Home;
use crate::error::refused::Refused;
use crate::error::{Error, ErrorDetail, Result};
use crate::event::{Event, Mark};
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::reclaim::allowance::Allowance;
use crate::memory::view::{Readable, Writable};
use crate::op::host_fn::HostFn;
use crate::op::{HostValue, Values};
use crate::runtime::MarkedPoint;
use crate::runtime::event_pool::Marker;
use crate::runtime::stream_state::{StreamHandle, StreamState};
use crate::stream::permit::Permit;
use crate::submit::{
    Calls, Footprint, LateOutcomes, Raw, Refusal, SubmitError, check_can_wait, put_list_in_front,
    submit, wrong_device,
};
use crate::thread::role;

/// A stream inside [`Stream::batch`](crate::Stream::batch): verbs that return plain results.
///
/// Where a verb on a stream returns an [`Op`](crate::Op), for `.queued()?`, it returns a `Result` here, for `?` alone:
/// there is no method `queued`.
///
/// It is not `Send`: one thread puts a batch on its stream, in program order.
pub struct Queue<'s> {
    pub(crate) handle: &'s Arc<StreamHandle>,
    pub(crate) stream: &'s Arc<StreamState>,
    pub(crate) home: &'s Arc<Home>,
    /// The last ticket that this queue submitted; 0 before.
    pub(crate) last: Cell<u64>,
    /// Set if it accepts no work: the reason.
    pub(super) refused: Option<&'s Error>,
    /// A permit to notify of each ticket.
    pub(super) permit: Option<&'s Permit>,
    /// The allowance that its allocations draw from.
    pub(super) draws: Option<&'s Arc<Allowance>>,
    /// Where launches are recorded before they are submitted, if anywhere.
    pub(super) writer: Option<Writer<'s>>,
    /// The line that called the running verb; outside a verb, the line where the user opened the queue.
    pub(crate) at: Cell<&'static Location<'static>>,
    /// Whether operations put on it are parts of a verb whose line is known.
    pub(super) in_verb: Cell<bool>,
    /// The outcomes of work that can fail when it runs, and of the readers of its outputs.
    pub(crate) outcomes: LateOutcomes,
    pub(super) not_send: PhantomData<*const ()>,
}

impl fmt::Debug for Queue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("stream", self.stream).finish_non_exhaustive()
    }
}

impl<'s> Queue<'s> {
    /// Opens a queue at the caller's line, for a batch or a single verb.
    #[track_caller]
    #[inline]
    pub(crate) fn new(
        handle: &'s Arc<StreamHandle>,
        home: &'s Arc<Home>,
        refused: Option<&'s Error>,
        permit: Option<&'s Permit>,
        of_one_verb: bool,
    ) -> Self {
        let (at, in_verb) = (Cell::new(Location::caller()), Cell::new(of_one_verb));
        let (last, writer) = (Cell::new(0), None);
        let (outcomes, not_send) = (LateOutcomes::default(), PhantomData);
        let (stream, draws) = (&handle.state, None);
        Queue {
            handle,
            stream,
            home,
            last,
            refused,
            permit,
            draws,
            writer,
            at,
            in_verb,
            outcomes,
            not_send,
        }
    }

    /// Has its operations be parts of a call at that line.
    pub(crate) fn called_at(self, at: &'static Location<'static>) -> Self {
        let (at, in_verb) = (Cell::new(at), Cell::new(true));
        Queue { at, in_verb, ..self }
    }

    /// Has the queue's allocations draw from `allowance`.
    #[inline]
    pub(crate) fn drawing_from(self, allowance: Option<&'s Arc<Allowance>>) -> Self {
        Queue { draws: allowance, ..self }
    }

    /// `pinned`, lent to the submitted ticket (to nothing if that is 0), or handed back.
    pub(super) fn lent<T: Element>(
        &self,
        pinned: PinnedBuffer<T>,
        ticket: Result<u64, SubmitError>,
    ) -> Result<Lent<PinnedBuffer<T>>, Refused<PinnedBuffer<T>>> {
        match ticket {
            Ok(ticket) => Ok(Lent::to(self.stream, ticket, self.proved(HostValue::here(pinned)))),
            Err(failed) => Err(failed.hand_back(pinned)),
        }
    }

    /// Submits an operation. Only the last operation of a batch needs a marker.
    #[inline]
    pub(crate) fn submit(
        &self,
        footprint: &mut Footprint<'_>,
        commands: u32,
        calls: &mut Calls<'_>,
    ) -> Result<u64, SubmitError> {
        let op = footprint.name();
        let ticket = self.submit_untold(footprint, commands, calls)?;
        op.told(self.stream, ticket);
        Ok(ticket)
    }

    /// [`submit`](Self::submit) for a caller that has more bookkeeping to do before it notifies subscribers.
    #[inline]
    pub(crate) fn submit_untold(
        &self,
        footprint: &mut Footprint<'_>,
        commands: u32,
        calls: &mut Calls<'_>,
    ) -> Result<u64, SubmitError> {
        if let Some(error) = self.refused {
            return Err(footprint.poison(error.without_line()).into());
        }
        let submitted = match self.writer {
            Some(writer) => self.submit_beside(writer, footprint, commands, calls),
            None => self.submit_now::<false>(footprint, commands, calls),
        };
        self.note(submitted)
    }

    /// Remembers the last submission.
    #[inline(always)]
    pub(super) fn note(&self, submitted: Result<u64, SubmitError>) -> Result<u64, SubmitError> {
        match &submitted {
            Ok(ticket) => self.note_ticket(*ticket),
            Err(_) => self.permit.into_iter().for_each(Permit::failed),
        }
        submitted
    }

    /// Remembers the ticket of the last submission.
    #[inline(always)]
    pub(super) fn note_ticket(&self, ticket: u64) {
        if let Some(permit) = self.permit {
            permit.submitted(ticket);
        }
        self.last.set(ticket);
    }

    #[inline(always)]
    pub(super) fn submit_now<const IS_LAUNCH: bool>(
        &self,
        footprint: &mut Footprint<'_>,
        commands: u32,
        calls: &mut (impl FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> + ?Sized),
    ) -> Result<u64, SubmitError> {
        self.release_last();
        let (stream, at) = (self.stream, self.at.get());
        put_list_in_front(stream, footprint, at);
        let is_plain = self.outcomes.look(footprint, stream);
        let submitted = submit::<IS_LAUNCH>(stream, at, (footprint, is_plain), commands, calls);
        self.outcomes.enter(footprint, stream, &submitted, at);
        submitted
    }

    /// Drops interest in the last operation's marker: another follows.
    #[inline]
    pub(crate) fn release_last(&self) {
        if self.last.get() != 0 {
            self.stream.progress.timeline.release(self.last.get());
        }
    }

    /// See [`Stream::upload`](crate::Stream::upload).
    ///
    /// # Errors
    /// Out of device or pinned memory; a device that is lost or closed. [`Refused`] has the data, in
    /// pinned memory.
    #[track_caller]
    pub fn upload<T: Element>(
        &self,
        source: impl Source<T>,
    ) -> Result<DeviceBuffer<T>, Refused<PinnedBuffer<T>>> {
        self.verb(|| {
            let source = source.into_pinned(&Pool(&self.home.pinned))?;
            match self.upload_pinned(&source) {
                Ok(buffer) => Ok(buffer),
                Err(failed) => Err(failed.hand_back(source)),
            }
        })
    }

    fn upload_pinned<T: Element>(
        &self,
        source: &PinnedBuffer<T>,
    ) -> Result<DeviceBuffer<T>, SubmitError> {
        let footprint = || {
            let mut footprint = Footprint::new("upload");
            footprint.lends(source.block());
            footprint
        };
        self.make(footprint, source.len(), true, |raw, ptr, bytes| {
            Ok(raw.copy_to_device(ptr, source.host(), bytes)?)
        })
    }

    /// See [`Stream::upload_from`](crate::Stream::upload_from).
    ///
    /// # Errors
    /// Out of device or pinned memory; a device that is lost or closed.
    #[track_caller]
    pub fn upload_from<T: Element>(&self, source: &[T]) -> Result<DeviceBuffer<T>> {
        self.verb(|| Ok(self.upload_pinned(&copied(source, &Pool(&self.home.pinned))?)?))
    }

    /// See [`Stream::upload_into`](crate::Stream::upload_into).
    ///
    /// # Errors
    /// Lengths that differ; a lost or closed device. [`Refused`] has the pinned buffer.
    ///
    /// # Examples
    /// As the only operation of a batch: `?` turns a [`Refused`] into an [`Error`](crate::Error).
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let mut x = stream.empty::<f32>(10).queued()?;
    /// let frame = stream.pinned::<f32>(10)?;
    /// let frame = stream.batch(|q| Ok(q.upload_into(frame, &mut x)?)).await?;
    /// assert_eq!(frame.len(), 10);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn upload_into<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
    ) -> Result<Lent<PinnedBuffer<T>>, Refused<PinnedBuffer<T>>> {
        self.verb(|| {
            let ticket = self.copy_in(&source, destination);
            self.lent(source, ticket)
        })
    }

    fn copy_in<T: Element>(
        &self,
        source: &PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
    ) -> Result<u64, SubmitError> {
        let destination_len = destination.len();
        let to = destination.span_mut();
        let mut footprint = Footprint::new("upload_into");
        footprint.overwrites(&to);
        if source.len() != destination_len {
            let error = lengths("upload_into", source.len(), destination_len);
            return Err(footprint.poison(error).into());
        }
        footprint.lends(source.block());
        if source.size_bytes() == 0 {
            return Ok(self.submit_nothing(&footprint).map(|()| 0)?);
        }
        let (from, bytes) = (source.host(), source.size_bytes());
        self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_to_device(to.ptr(), from, bytes)?))
    }

    /// See [`Stream::download`](crate::Stream::download).
    ///
    /// # Errors
    /// Out of pinned memory; data that was never written or whose producer failed; a lost or
    /// closed device.
    #[track_caller]
    pub fn download<T: Element>(&self, source: &impl Readable<T>) -> Result<Lent<PinnedBuffer<T>>> {
        self.verb(|| {
            let destination = PinnedBuffer::new(&self.home.pinned, source.len())?;
            let ticket = self.copy_out("download", source, &destination);
            Ok(self.lent(destination, ticket)?)
        })
    }

    /// See [`Stream::download_into`](crate::Stream::download_into).
    ///
    /// # Errors
    /// As [`download`](Self::download); lengths that differ. [`Refused`] has the pinned buffer.
    #[track_caller]
    pub fn download_into<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
    ) -> Result<Lent<PinnedBuffer<T>>, Refused<PinnedBuffer<T>>> {
        self.verb(|| {
            let ticket = self.copy_out("download_into", source, &destination);
            self.lent(destination, ticket)
        })
    }

    /// See [`Stream::download_vec`](crate::Stream::download_vec).
    ///
    /// # Errors
    /// As [`download`](Self::download).
    #[track_caller]
    pub fn download_vec<T: Element>(&self, source: &impl Readable<T>) -> Result<Lent<Vec<T>>> {
        let Lent(Settled { value: pinned, points }) = self.download(source)?;
        let value = pinned.make(|pinned| Ok(pinned.to_vec()));
        Ok(Lent(Settled { value, points }))
    }

    fn copy_out<T: Element>(
        &self,
        name: &'static str,
        source: &impl Readable<T>,
        destination: &PinnedBuffer<T>,
    ) -> Result<u64, SubmitError> {
        if source.len() != destination.len() {
            return Err(lengths(name, source.len(), destination.len()).into());
        }
        let from = source.span();
        let mut footprint = Footprint::new(name);
        footprint.reads(&from);
        footprint.lends(destination.block());
        if destination.size_bytes() == 0 {
            return Ok(self.submit_nothing(&footprint).map(|()| 0)?);
        }
        let (to, bytes) = (destination.host(), destination.size_bytes());
        self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_to_host(to, from.ptr(), bytes)?))
    }

    /// See [`Stream::copy`](crate::Stream::copy).
    ///
    /// # Errors
    /// Lengths that differ; a source that was never written or whose producer failed; buffers of
    /// devices of different kinds; a lost or closed device.
    #[track_caller]
    pub fn copy<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
    ) -> Result<()> {
        self.verb(|| {
            let (source_len, destination_len) = (source.len(), destination.len());
            let from = source.span();
            let to = destination.span_mut();
            let mut footprint = Footprint::new("copy");
            footprint.peers = true;
            footprint.reads(&from);
            footprint.overwrites(&to);
            if source_len != destination_len {
                return Err(footprint.poison(lengths("copy", source_len, destination_len)));
            }
            if to.memory.engine.state.id != self.stream.engine.state.id {
                let found = to.memory.engine.clone();
                return Err(footprint.poison(wrong_device(
                    "the destination",
                    &self.stream.engine,
                    &found,
                )));
            }
            if from.range.is_empty() {
                return self.submit_nothing(&footprint);
            }
            if from.memory.engine.state.id != self.stream.engine.state.id {
                return self.copy_from_peer(&mut footprint, &from, &to);
            }
            let copy = RowCopy::whole(to.ptr(), from.ptr(), to.range.end - to.range.start);
            Ok(self.submit_copy(&mut footprint, &copy)?)
        })
    }

    /// See [`Stream::host_fn`](crate::Stream::host_fn).
    ///
    /// # Errors
    /// A lost or closed device.
    #[track_caller]
    pub fn host_fn<R: Send + 'static>(
        &self,
        function: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Lent<R>> {
        self.verb(|| {
            let host_fn = HostFn::new(&self.stream.engine, function);
            let mut footprint = Footprint::new("host_fn");
            footprint.may_be_held_up = true;
            // As long as this share is lent, the driver's is not the last.
            footprint.calls(Box::new(host_fn.share()));
            let submitted = self.submit(&mut footprint, 1, &mut |raw| {
                let data: *mut c_void = host_fn.lend();
                Ok(raw.host_fn(host_fn.callback(), data)?)
            });
            // Outside the lock: it may drop the user's closure.
            let ticket = submitted.inspect_err(|_| host_fn.refused())?;
            let value = HostValue::later(move || Ok(host_fn.result()));
            Ok(Lent::to(self.stream, ticket, value))
        })
    }

    /// See [`Stream::record_timed`](crate::Stream::record_timed).
    ///
    /// # Errors
    /// A lost or closed device.
    #[track_caller]
    pub fn record_timed(&self) -> Result<Event> {
        Ok(Event::recorded(&self.stream.engine, self.mark_in_queue("record_timed", true)?, true))
    }

    /// The point behind everything on the queue, with an event of its own.
    #[track_caller]
    pub(crate) fn mark_in_queue(&self, op: &'static str, timing: bool) -> Result<MarkedPoint> {
        self.verb(|| {
            role::check("submitting work")?;
            let engine = &self.stream.engine;
            engine.check_open()?;
            let event = if timing { engine.pools.timed_event() } else { engine.pools.event() };
            let event = event.map_err(|code| engine.refused(code))?;
            let mut footprint = Footprint::new(op);
            footprint.records(event.clone());
            let ticket = self.submit(&mut footprint, 1, &mut |_| Ok(()))?;
            Ok(MarkedPoint::at(self.stream.progress.clone(), Marker { ticket, event }))
        })
    }

    /// Makes this stream wait for points of others.
    pub(crate) fn wait_for(&self, marks: Vec<Mark>) -> Result<()> {
        let mut footprint = Footprint::new("wait");
        let mut waits = false;
        let mut shared = Vec::new();
        for mark in marks {
            let at = match mark {
                Mark::Point(at) => at,
                Mark::Shared(event) => {
                    let (engine, theirs) = (&self.stream.engine, event.engine());
                    check_can_wait(engine, &theirs.state)?;
                    // The driver's own wait crashes the process on a stream of another GPU.
                    if theirs.backend.ordinal() != engine.backend.ordinal() {
                        return Err(wrong_device("the interprocess event", engine, theirs));
                    }
                    shared.push(event);
                    continue;
                }
            };
            let point = &at.point;
            if point.stream.device().id != self.stream.engine.state.id || !point.is_complete() {
                waits = true;
                footprint.comes_after(at);
            }
        }
        if !shared.is_empty() {
            waits = true;
            footprint.may_be_held_up = true;
        }
        if !waits {
            return role::check("submitting work");
        }
        self.submit(&mut footprint, 1, &mut |raw| {
            shared.iter().try_for_each(|event| Ok(raw.wait_shared(event)?))
        })?;
        Ok(())
    }
}

fn lengths(op: &'static str, source_len: usize, destination_len: usize) -> crate::Error {
    ErrorDetail::LengthMismatch { op, source_len, destination_len }.into()
}
