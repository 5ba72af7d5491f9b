//! [`Queue`]: the verbs, once.
//!
//! Inside [`Stream::batch`](crate::Stream::batch) each verb puts its work on the stream and returns
//! a plain `Result`; the batch as a whole is one future with one marker. The verbs of
//! [`Stream`](crate::Stream) are batches of one.
//!
//! Host values come as [`Lent`]: nobody can look at them before the batch is complete. What the
//! closure returns is handed back whole by the future, with every `Lent<T>` in it turned into `T`.
#![forbid(unsafe_code)]

mod partial;
mod peer;
pub(crate) mod source;

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use self::source::{Pool, Source, copied};
use crate::backend::{DevicePtr, Pattern};
use crate::completion::lane::{Lane, LaneHandle};
use crate::completion::spare;
use crate::error::{Error, ErrorDetail, Result};
use crate::event::{Event, Mark, Recorded};
use crate::hazard::Use;
use crate::home::Home;
use crate::host_fn::HostFn;
use crate::lease::Lease;
use crate::memory::allocation::Allocation;
use crate::memory::buffer::{DeviceBuffer, Readable, Writable};
use crate::memory::pinned::{PinnedBuffer, bytes_of};
use crate::memory::{Element, Number};
use crate::op::{Op, Value};
use crate::submit::{
    Footprint, Raw, Refusal, at, check_can_wait, out_of_memory, submit, wrong_device,
};
use crate::thread_role;

/// A stream inside [`Stream::batch`](crate::Stream::batch): verbs that return plain results.
///
/// It is not `Send`: a batch is put on its stream by one thread, in program order.
pub struct Queue<'s> {
    lane: &'s Arc<LaneHandle>,
    home: &'s Arc<Home>,
    /// The last ticket that this queue submitted; 0 before.
    last: Cell<u64>,
    /// Why it takes no work.
    refused: Option<&'s Error>,
    /// Who is to know of each ticket.
    lease: Option<&'s Lease>,
    /// Where the user opened it.
    at: &'static Location<'static>,
    not_send: PhantomData<*const ()>,
}

/// A host value that is with the device until the batch is complete; the future hands it back.
///
/// Dropped, it is given back (to its pool, or to be dropped) when the device is through with it.
#[must_use = "return it from the batch, or the future cannot hand it back"]
pub struct Lent<T> {
    value: Value<T>,
}

/// What a batch may return: device values, [`Lent`] host values, and tuples, arrays, vectors and
/// options of them. Sealed: nobody else may open a [`Lent`] early.
pub trait Settle: sealed::Sealed + Sized {
    /// What the future resolves with.
    type Output: Send + 'static;
    #[doc(hidden)]
    fn settle(self) -> Settled<Self::Output>;
}

/// A value that waits for its batch.
#[doc(hidden)]
pub struct Settled<T>(pub(crate) Value<T>);

mod sealed {
    pub trait Sealed {}
}

impl<'s> Queue<'s> {
    #[track_caller]
    pub(crate) fn new(
        lane: &'s Arc<LaneHandle>,
        home: &'s Arc<Home>,
        refused: Option<&'s Error>,
        lease: Option<&'s Lease>,
    ) -> Self {
        let at = Location::caller();
        Queue { lane, home, last: Cell::new(0), refused, lease, at, not_send: PhantomData }
    }

    pub(crate) fn lane(&self) -> &'s Arc<Lane> {
        self.lane
    }

    /// Turns what the closure of a batch returned into its future.
    pub(crate) fn finish<R: Settle>(&self, result: Result<R>) -> Op<R::Output> {
        match result {
            Ok(value) => Op::pending(self.lane, self.last.get(), value.settle().0),
            Err(error) => {
                self.lane.release(self.last.get());
                Op::failed(error)
            }
        }
    }

    /// Submits; only the last operation of a batch may want a marker of its own.
    #[inline]
    pub(crate) fn submit<R>(
        &self,
        footprint: Footprint<'_>,
        commands: u32,
        calls: impl FnOnce(&Raw<'_>) -> std::result::Result<R, Refusal>,
    ) -> Result<(u64, R)> {
        let op = footprint.name();
        let submitted = self.submit_untold(footprint, commands, calls)?;
        op.told(self.lane, submitted.0);
        Ok(submitted)
    }

    /// [`submit`](Self::submit) for a caller that has more to enter before it is told of.
    #[inline]
    fn submit_untold<R>(
        &self,
        footprint: Footprint<'_>,
        commands: u32,
        calls: impl FnOnce(&Raw<'_>) -> std::result::Result<R, Refusal>,
    ) -> Result<(u64, R)> {
        if let Some(error) = self.refused {
            return Err(footprint.poison(error.clone()));
        }
        if self.last.get() != 0 {
            self.lane.release(self.last.get());
        }
        let submitted = submit(self.lane, self.at, footprint, commands, calls);
        if let Some(lease) = self.lease {
            match &submitted {
                Ok((ticket, _)) => lease.submitted(*ticket),
                Err(_) => lease.failed(),
            }
        }
        let (ticket, value) = submitted?;
        self.last.set(ticket);
        Ok((ticket, value))
    }

    /// See [`Stream::upload`](crate::Stream::upload).
    ///
    /// # Errors
    /// Out of device or pinned memory; a device that is lost or closed.
    pub fn upload<T: Element>(&self, source: impl Source<T>) -> Result<DeviceBuffer<T>> {
        let source = source.into_pinned(&Pool(&self.home.pinned))?;
        let len = source.len();
        let footprint = || {
            let mut footprint = Footprint::new("upload");
            footprint.lends(source.block());
            footprint
        };
        self.make(footprint, len, true, |raw, ptr, bytes| {
            Ok(raw.copy_to_device(ptr, source.block().host(), bytes)?)
        })
    }

    /// See [`Stream::upload_from`](crate::Stream::upload_from).
    ///
    /// # Errors
    /// Out of device or pinned memory; a device that is lost or closed.
    pub fn upload_from<T: Element>(&self, source: &[T]) -> Result<DeviceBuffer<T>> {
        self.upload(copied(source, &Pool(&self.home.pinned))?)
    }

    /// See [`Stream::upload_into`](crate::Stream::upload_into).
    ///
    /// # Errors
    /// Lengths that differ (the pinned buffer then returns to its pool); a lost or closed device.
    pub fn upload_into<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
    ) -> Result<Lent<PinnedBuffer<T>>> {
        let destination_len = destination.len();
        let to = destination.span_mut();
        let mut footprint = Footprint::new("upload_into");
        footprint.overwrites(&to);
        if source.len() != destination_len {
            return Err(footprint.poison(lengths("upload_into", source.len(), destination_len)));
        }
        if source.size_bytes() > 0 {
            footprint.lends(source.block());
            let from = source.block().host();
            let bytes = source.size_bytes();
            self.submit(footprint, 1, |raw| Ok(raw.copy_to_device(at(&to), from, bytes)?))?;
        }
        Ok(Lent { value: Value::Here(source) })
    }

    /// See [`Stream::download`](crate::Stream::download).
    ///
    /// # Errors
    /// Out of pinned memory; data that was never written or whose producer failed; a lost or
    /// closed device.
    pub fn download<T: Element>(&self, source: &impl Readable<T>) -> Result<Lent<PinnedBuffer<T>>> {
        let destination = PinnedBuffer::new(&self.home.pinned, source.len())?;
        self.copy_out("download", source, destination)
    }

    /// See [`Stream::download_into`](crate::Stream::download_into).
    ///
    /// # Errors
    /// As [`download`](Self::download); lengths that differ.
    pub fn download_into<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
    ) -> Result<Lent<PinnedBuffer<T>>> {
        if source.len() != destination.len() {
            return Err(lengths("download_into", source.len(), destination.len()));
        }
        self.copy_out("download_into", source, destination)
    }

    /// See [`Stream::download_vec`](crate::Stream::download_vec).
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_vec<T: Element>(&self, source: &impl Readable<T>) -> Result<Lent<Vec<T>>> {
        let pinned = self.download(source)?;
        let value = Value::Later(Box::new(move || Ok(pinned.value.take()?.to_vec())));
        Ok(Lent { value })
    }

    fn copy_out<T: Element>(
        &self,
        name: &'static str,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
    ) -> Result<Lent<PinnedBuffer<T>>> {
        let from = source.span();
        if destination.size_bytes() == 0 {
            return Ok(Lent { value: Value::Here(destination) });
        }
        let mut footprint = Footprint::new(name);
        footprint.reads(&from);
        footprint.lends(destination.block());
        let to = destination.block().host();
        let bytes = destination.size_bytes();
        self.submit(footprint, 1, |raw| Ok(raw.copy_to_host(to, at(&from), bytes)?))?;
        Ok(Lent { value: Value::Here(destination) })
    }

    /// See [`Stream::copy`](crate::Stream::copy).
    ///
    /// # Errors
    /// Lengths that differ; a source that was never written or whose producer failed; buffers of
    /// devices of different kinds; a lost or closed device.
    pub fn copy<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
    ) -> Result<()> {
        let (source_len, destination_len) = (source.len(), destination.len());
        let from = source.span();
        let to = destination.span_mut();
        let mut footprint = Footprint::new("copy");
        footprint.allows_peers();
        footprint.reads(&from);
        footprint.overwrites(&to);
        if source_len != destination_len {
            return Err(footprint.poison(lengths("copy", source_len, destination_len)));
        }
        if to.memory.engine().id != self.lane.engine().id {
            let found = to.memory.engine().clone();
            return Err(footprint.poison(wrong_device(
                "the destination",
                self.lane.engine(),
                &found,
            )));
        }
        if from.range.is_empty() {
            return Ok(());
        }
        if from.memory.engine().id != self.lane.engine().id {
            return self.copy_from_peer(footprint, &from, &to);
        }
        self.submit(footprint, 1, |raw| Ok(raw.copy(&to, &from)?)).map(drop)
    }

    /// See [`Stream::empty`](crate::Stream::empty).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    pub fn empty<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.make(|| Footprint::new("empty"), len, false, |_, _, _| Ok(()))
    }

    /// See [`Stream::zeros`](crate::Stream::zeros).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.full(len, T::zeroed())
    }

    /// See [`Stream::ones`](crate::Stream::ones).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    pub fn ones<T: Number>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.full(len, T::ONE)
    }

    /// See [`Stream::full`](crate::Stream::full).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device; an element type of more than 16 bytes.
    pub fn full<T: Element>(&self, len: usize, value: T) -> Result<DeviceBuffer<T>> {
        let pattern = self.pattern(value)?;
        self.make(
            || Footprint::new("full"),
            len,
            true,
            |raw, ptr, _| Ok(raw.fill(ptr, pattern, len as u64)?),
        )
    }

    /// See [`Stream::fill`](crate::Stream::fill).
    ///
    /// # Errors
    /// A lost or closed device; an element type of more than 16 bytes.
    pub fn fill<T: Element>(&self, destination: &mut impl Writable<T>, value: T) -> Result<()> {
        let len = destination.len() as u64;
        let to = destination.span_mut();
        let mut footprint = Footprint::new("fill");
        footprint.overwrites(&to);
        let pattern = self.pattern(value).map_err(|error| footprint.poison(error))?;
        if to.range.is_empty() {
            return Ok(());
        }
        self.submit(footprint, 1, |raw| Ok(raw.fill(at(&to), pattern, len)?)).map(drop)
    }

    /// See [`Stream::host_fn`](crate::Stream::host_fn).
    ///
    /// # Errors
    /// A lost or closed device.
    pub fn host_fn<R: Send + 'static>(
        &self,
        function: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Lent<R>> {
        let host_fn = HostFn::new(self.lane.engine(), function);
        let mut footprint = Footprint::new("host_fn");
        footprint.may_be_held_up();
        // While it is lent, the driver's share is not the last.
        footprint.keeps(Box::new(host_fn.share()) as Box<dyn Any + Send>);
        self.submit(footprint, 1, |raw| {
            let data: *mut c_void = host_fn.lend();
            Ok(raw.host_fn(host_fn.callback(), data)?)
        })
        // Outside of the lock: it may drop the user's closure.
        .inspect_err(|_| host_fn.refused())?;
        let value = Value::Later(Box::new(move || Ok(host_fn.result())));
        Ok(Lent { value })
    }

    /// See [`Stream::record_timed`](crate::Stream::record_timed).
    ///
    /// # Errors
    /// A lost or closed device.
    pub fn record_timed(&self) -> Result<Event> {
        Ok(Event::recorded(self.lane.engine(), self.mark_timed()?, true))
    }

    pub(crate) fn mark_timed(&self) -> Result<Recorded> {
        thread_role::check("submitting work")?;
        let engine = self.lane.engine();
        engine.check_open()?;
        let event = engine.timed_event().map_err(|code| engine.refused(code))?;
        let mut footprint = Footprint::new("record_timed");
        footprint.records(event.clone());
        let (ticket, ()) = self.submit(footprint, 1, |_| Ok(()))?;
        Ok(Recorded::new(self.lane, ticket, Some(event)))
    }

    /// Makes this stream wait for points of others.
    pub(crate) fn wait_for(&self, marks: Vec<Mark>) -> Result<()> {
        let mut footprint = Footprint::new("wait");
        let mut waits = false;
        let mut shared = Vec::new();
        for mark in marks {
            let (point, event) = match mark {
                Mark::Ticket { point, event } => (point, event),
                Mark::Shared(event) => {
                    check_can_wait(self.lane.engine(), &event.engine().state)?;
                    shared.push(event);
                    continue;
                }
            };
            if point.lane.device().id != self.lane.engine().id || !point.is_complete() {
                waits = true;
                footprint.comes_after(Use { lane: point.lane, ticket: point.ticket }, event);
            }
        }
        if !shared.is_empty() {
            waits = true;
            footprint.may_be_held_up();
        }
        if !waits {
            return thread_role::check("submitting work");
        }
        let wait = self.submit(footprint, 1, |raw| {
            shared.iter().try_for_each(|event| Ok(raw.wait_shared(event)?))
        });
        wait.map(drop)
    }

    /// Allocates, and runs `write` on the fresh memory. Before it gives up for want of memory it
    /// flushes what is retired, has the pool give back what it holds unused, and tries once more.
    fn make<'a, T: Element>(
        &self,
        footprint: impl Fn() -> Footprint<'a>,
        len: usize,
        written: bool,
        write: impl Fn(&Raw<'_>, DevicePtr, u64) -> std::result::Result<(), Refusal>,
    ) -> Result<DeviceBuffer<T>> {
        thread_role::check("submitting work")?;
        let bytes = bytes_of::<T>(len)? as u64;
        let engine = self.lane.engine();
        if bytes == 0 {
            engine.check_open()?;
            // Nothing is within any limit.
            let _ = engine.count_alloc(0);
            let nothing = Allocation::new(self.lane, DevicePtr::NULL, 0, 0, true);
            return Ok(DeviceBuffer::new(nothing, len));
        }
        let attempt = || {
            if !engine.count_alloc(bytes) {
                return Err(out_of_memory(engine, bytes));
            }
            let mut footprint = footprint();
            footprint.makes_buffer();
            if bytes > spare::LARGEST {
                // Nothing is kept of that size, and the driver's pool may have to grow.
                footprint.may_block();
            }
            let op = footprint.name();
            let made = self
                .submit_untold(footprint, 2, |raw| {
                    let ptr = raw.alloc(bytes)?;
                    match write(raw, ptr, bytes) {
                        Ok(()) => Ok(ptr),
                        Err(refusal) => {
                            raw.undo_alloc(ptr);
                            Err(refusal)
                        }
                    }
                })
                .inspect_err(|_| engine.count_free(bytes));
            let (ticket, ptr) = made?;
            let memory = Allocation::new(self.lane, ptr, bytes, ticket, written);
            op.told(self.lane, ticket);
            Ok(DeviceBuffer::new(memory, len))
        };
        attempt().or_else(|error| match error.detail() {
            ErrorDetail::OutOfMemory { .. } => {
                engine.flush_retired();
                // Refused, there is nothing to give back.
                engine.backend.pool_trim(0).ok();
                attempt()
            }
            _ => Err(error),
        })
    }

    fn pattern<T: Element>(&self, value: T) -> Result<Pattern> {
        let source = bytemuck::bytes_of(&value);
        let mut bytes = [0; 16];
        let Some(head) = bytes.get_mut(..source.len()) else {
            let what = "filling with elements of more than 16 bytes";
            let device = self.lane.engine().label().to_owned();
            return Err(ErrorDetail::Unsupported { what, device }.into());
        };
        head.copy_from_slice(source);
        Ok(Pattern { bytes, len: source.len() })
    }
}

fn lengths(op: &'static str, source_len: usize, destination_len: usize) -> crate::Error {
    ErrorDetail::LengthMismatch { op, source_len, destination_len }.into()
}

impl<T> sealed::Sealed for Lent<T> {}
impl<T: Send + 'static> Settle for Lent<T> {
    type Output = T;
    fn settle(self) -> Settled<T> {
        Settled(self.value)
    }
}

impl<T: Element> sealed::Sealed for DeviceBuffer<T> {}
impl<T: Element> Settle for DeviceBuffer<T> {
    type Output = Self;
    fn settle(self) -> Settled<Self> {
        Settled(Value::Here(self))
    }
}

impl<S: Settle> sealed::Sealed for Vec<S> {}
impl<S: Settle> Settle for Vec<S> {
    type Output = Vec<S::Output>;
    fn settle(self) -> Settled<Vec<S::Output>> {
        Settled(Value::collect(self.into_iter().map(|value| value.settle().0).collect()))
    }
}

impl<S: Settle> sealed::Sealed for Option<S> {}
impl<S: Settle> Settle for Option<S> {
    type Output = Option<S::Output>;
    fn settle(self) -> Settled<Option<S::Output>> {
        Settled(match self.map(|value| value.settle().0) {
            None => Value::Here(None),
            Some(Value::Here(value)) => Value::Here(Some(value)),
            Some(later) => Value::Later(Box::new(move || later.take().map(Some))),
        })
    }
}

impl<S: Settle, const N: usize> sealed::Sealed for [S; N] {}
impl<S: Settle, const N: usize> Settle for [S; N] {
    type Output = [S::Output; N];
    fn settle(self) -> Settled<[S::Output; N]> {
        let values = self.map(|value| value.settle().0);
        Settled(Value::Later(Box::new(move || {
            let taken: Result<Vec<_>> = values.into_iter().map(Value::take).collect();
            let array: std::result::Result<[S::Output; N], _> = taken?.try_into();
            array.map_err(|_| unreachable!("as many as there were"))
        })))
    }
}

macro_rules! settle_plain {
    ($($type:ty)+) => {$(
        impl sealed::Sealed for $type {}
        impl Settle for $type {
            type Output = Self;
            fn settle(self) -> Settled<Self> {
                Settled(Value::Here(self))
            }
        }
    )+};
}
settle_plain! { () bool u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 String std::time::Instant }

macro_rules! settle_tuples {
    ($(($($name:ident)+))+) => {$(
        impl<$($name: Settle),+> sealed::Sealed for ($($name,)+) {}
        impl<$($name: Settle),+> Settle for ($($name,)+) {
            type Output = ($($name::Output,)+);
            #[expect(non_snake_case, reason = "a value for each type parameter")]
            fn settle(self) -> Settled<Self::Output> {
                let ($($name,)+) = self;
                let ($($name,)+) = ($($name.settle().0,)+);
                Settled(match ($($name,)+) {
                    ($(Value::Here($name),)+) => Value::Here(($($name,)+)),
                    ($($name,)+) => Value::Later(Box::new(move || Ok(($($name.take()?,)+)))),
                })
            }
        }
    )+};
}
settle_tuples! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }
