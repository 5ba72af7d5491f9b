//! Streams and events of the host device: queues of commands with a worker thread each, and recorded points in them.

use std::collections::btree_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_await_protocol::lock::Mutex;
use smallvec::smallvec;

use super::run::Command;
use super::state::{Books, Everybody, HostEvent};
use super::{HostBackend, HostCore, INVALID_VALUE, NOT_SUPPORTED, QUEUE_LIMIT, permitted};
use crate::backend::{
    Backend, DevicePtr, DriverResult, EventCalls, EventOptions, HostCallback, HostPtr, Query,
    RawEvent, RawStream, StreamCalls, StreamInfo, StreamOptions,
};
use crate::error::DriverCode;
use crate::thread::inbox::{Receiver, Sender, inbox};
use crate::thread::native;

pub(super) struct HostStream {
    /// Ordered with the legacy default stream, or that stream itself.
    pub(super) blocking: bool,
    pub(super) commands: Sender<Command>,
    pub(super) books: Arc<Books>,
    /// The receiving end, if no thread owns it.
    pub(super) stepped: Option<Mutex<Stepped>>,
}

pub(super) struct Stepped {
    pub(super) commands: Receiver<Command>,
    pub(super) head: Option<Command>,
    /// A command is running: not under the lock, since it is user code.
    pub(super) running: bool,
}

impl HostStream {
    pub(super) fn push(&self, command: Command) -> std::result::Result<(), Command> {
        // ORDERING: SeqCst: `stream_query` must not see zero while a command is on its way.
        self.books.pending.fetch_add(1, Ordering::SeqCst);
        self.commands.send(command)
    }

    pub(super) fn is_idle(&self) -> bool {
        // ORDERING: SeqCst, see `push`.
        self.books.pending.load(Ordering::SeqCst) == 0
    }

    /// Waits, in stream order, for everything on `other` so far.
    pub(super) fn come_after(&self, core: &Arc<HostCore>, other: &HostStream) {
        let (event, generation) = HostEvent::recorded_once(core, &other.books);
        // A stream whose worker is gone has nothing to wait for.
        if other.push(Command::Record { event: event.clone(), generation }).is_ok() {
            self.push(Command::Wait { event, generation }).ok();
        }
    }
}

impl Stepped {
    /// The head, to be run, if it is ready.
    pub(super) fn take(&mut self, shared: &HostCore) -> Option<Command> {
        self.running = self.is_ready(shared);
        if self.running { self.head.take() } else { None }
    }

    pub(super) fn is_ready(&mut self, shared: &HostCore) -> bool {
        if self.running {
            return false;
        }
        if self.head.is_none() {
            self.head = self.commands.try_recv();
        }
        self.head.as_ref().is_some_and(|head| shared.fault.get().is_some() || head.is_ready())
    }
}

impl HostBackend {
    pub(super) fn stream(
        &self,
        stream: RawStream,
        call: &'static str,
    ) -> DriverResult<Arc<HostStream>> {
        self.shared.healthy(call)?;
        let made = self.shared.streams.read().get(&stream.0).cloned();
        match made {
            // ORDERING: Relaxed: using a handle while it is being destroyed is an error anyway.
            Some(made) if !made.books.destroyed.load(Ordering::Relaxed) => return Ok(made),
            None if stream.0 == RawStream::LEGACY.0 => {}
            _ => return Err(DriverCode { call, code: DriverCode::INVALID_HANDLE }),
        }
        // The legacy default stream is created by its first use.
        match self.shared.streams.write().entry(stream.0) {
            Entry::Occupied(made) => Ok(made.get().clone()),
            Entry::Vacant(place) => Ok(place.insert(self.make_stream(stream.0, true)?).clone()),
        }
    }

    pub(super) fn make_stream(&self, handle: u64, blocking: bool) -> DriverResult<Arc<HostStream>> {
        let (commands, receiver) = inbox();
        let (stepped, worker) = if self.threads {
            (None, Some(receiver))
        } else {
            (Some(Mutex::new(Stepped { commands: receiver, head: None, running: false })), None)
        };
        let books = Arc::new(Books { handle, ..Books::default() });
        if let Some(receiver) = worker {
            let (shared, books) = (self.shared.clone(), books.clone());
            let name = format!("host:{}-stream", self.ordinal);
            // Runs until the stream is destroyed and its queue is empty.
            let work = move || receiver.iter().for_each(|command| shared.execute(&books, command));
            native::spawn(&name, Box::new(work))
                .map_err(|_| DriverCode { call: "stream_create", code: DriverCode::NO_THREAD })?;
        }
        Ok(Arc::new(HostStream { blocking, commands, books, stepped }))
    }

    /// A share of an event, which may be another host device's.
    fn event(&self, event: RawEvent, call: &'static str) -> DriverResult<Arc<HostEvent>> {
        self.shared.healthy(call)?;
        Ok(share(event))
    }

    /// An event, and the number of its next record, which is on this stream.
    pub(super) fn next_record(
        &self,
        event: RawEvent,
        stream: &HostStream,
    ) -> (Arc<HostEvent>, u64) {
        let event = share(event);
        let books = Arc::downgrade(&stream.books);
        let generation = event.next_record(&self.shared, smallvec![books]);
        (event, generation)
    }

    pub(super) fn enqueue(
        &self,
        handle: RawStream,
        call: &'static str,
        command: Command,
    ) -> DriverResult<()> {
        self.put(handle, &*self.stream(handle, call)?, call, command)
    }

    /// [`enqueue`](Self::enqueue) on a stream that is known.
    pub(super) fn put(
        &self,
        handle: RawStream,
        stream: &HostStream,
        call: &'static str,
        command: Command,
    ) -> DriverResult<()> {
        let books = &stream.books;
        if command.counts()
            && self.threads
            && let Err(code) = self.shared.take_room(books)
        {
            command.discard();
            return Err(DriverCode { call, code });
        }
        let _order = stream.blocking.then(|| self.shared.legacy_order.lock());
        if stream.blocking {
            self.shared.wait_for_counterparts(handle, stream);
        }
        stream.push(command).map_err(|_| DriverCode { call, code: DriverCode::INVALID_HANDLE })
    }
}

/// A share of the event behind a handle.
fn share(event: RawEvent) -> Arc<HostEvent> {
    let event = event.0 as *const HostEvent;
    // SAFETY: the caller's handle came from `event_create` and was not destroyed.
    unsafe { Arc::increment_strong_count(event) };
    // SAFETY: the count was raised for this very share.
    unsafe { Arc::from_raw(event) }
}

impl HostCore {
    /// Blocks until a stream has room for another command, and counts it. An error if it never will, where a driver would block the
    /// thread for ever.
    pub(super) fn take_room(&self, books: &Books) -> std::result::Result<(), i32> {
        let mut depth = books.depth.lock();
        // ORDERING: Relaxed: set under this lock.
        let stands_still = || books.stands_still.load(Ordering::Relaxed);
        if *depth >= QUEUE_LIMIT {
            *self.blocked.lock() += 1;
            while *depth >= QUEUE_LIMIT && self.fault.get().is_none() && !stands_still() {
                depth = books.room.wait(depth);
            }
            *self.blocked.lock() -= 1;
            self.unblocked.notify_all();
            if *depth >= QUEUE_LIMIT && stands_still() {
                return Err(DriverCode::ILLEGAL_STATE);
            }
        }
        *depth += 1;
        Ok(())
    }

    /// Blocks while a full queue blocks another thread: the driver does so as well before it creates a stream
    /// or an event, pins memory, or puts a host function on a stream.
    pub(super) fn wait_until_nobody_is_blocked(&self) {
        let mut blocked = self.blocked.lock();
        while *blocked > 0 && self.fault.get().is_none() {
            // The limit only bounds how late a fault is noticed.
            blocked = self.unblocked.wait_for(blocked, Duration::from_millis(20));
        }
    }

    /// Orders a stream that is not non-blocking: the legacy default stream after all others, any other after the legacy
    /// default stream. Called under `legacy_order`, so that no two of them wait for each other.
    pub(super) fn wait_for_counterparts(self: &Arc<Self>, handle: RawStream, stream: &HostStream) {
        let streams = self.streams.read();
        let legacy = RawStream::LEGACY.0;
        for (other, counterpart) in &*streams {
            let opposite = (handle.0 == legacy) != (*other == legacy);
            if counterpart.blocking && opposite && !counterpart.is_idle() {
                stream.come_after(self, counterpart);
            }
        }
    }
}

impl StreamCalls for HostBackend {
    fn stream_create(&self, options: StreamOptions) -> DriverResult<RawStream> {
        /// The first handles mean something else to CUDA.
        static NEXT: AtomicU64 = AtomicU64::new(16);
        self.shared.wait_until_nobody_is_blocked();
        self.shared.healthy("stream_create")?;
        // ORDERING: Relaxed: only uniqueness matters.
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        let stream = self.make_stream(handle, options.blocking)?;
        self.shared.streams.write().insert(handle, stream);
        Ok(RawStream(handle))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()> {
        self.shared.wait_until_nobody_is_blocked();
        // It runs until its queue is empty, as on a GPU.
        let stream = self.stream(stream, "stream_destroy")?;
        // ORDERING: SeqCst: against `execute`, which lowers `pending` and then looks at this.
        stream.books.destroyed.store(true, Ordering::SeqCst);
        if stream.is_idle() {
            self.shared.forget(&stream.books);
        }
        Ok(())
    }

    unsafe fn stream_info(&self, stream: RawStream) -> DriverResult<StreamInfo> {
        let stream = self.stream(stream, "stream_info")?;
        Ok(StreamInfo { priority: 0, blocking: stream.blocking, context: self.context(), green: 0 })
    }

    unsafe fn stream_query(&self, stream: RawStream) -> DriverResult<Query> {
        let stream = self.stream(stream, "stream_query")?;
        Ok(if stream.is_idle() { Query::Complete } else { Query::Pending })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()> {
        let event = self.event(event, "stream_wait_event")?;
        // ORDERING: SeqCst: the newest record that this thread may know of.
        let generation = event.recorded.load(Ordering::SeqCst);
        self.enqueue(stream, "stream_wait_event", Command::Wait { event, generation })
    }

    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "write_word", Command::Word { word, value })
    }

    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> DriverResult<()> {
        let data = HostPtr(data as usize);
        self.shared.wait_until_nobody_is_blocked();
        self.enqueue(stream, "host_fn", Command::HostFn { callback, data })
    }

    unsafe fn foreign(&self, stream: RawStream, code: &mut dyn FnMut()) -> DriverResult<()> {
        self.stream(stream, "foreign")?;
        code();
        Ok(())
    }
}

impl EventCalls for HostBackend {
    fn event_create(&self, _options: EventOptions) -> DriverResult<RawEvent> {
        self.shared.wait_until_nobody_is_blocked();
        self.shared.healthy("event_create")?;
        Ok(RawEvent(Arc::into_raw(Arc::new(HostEvent::default())) as u64))
    }

    unsafe fn event_export(&self, _event: RawEvent) -> DriverResult<[u8; 64]> {
        Err(DriverCode { call: "event_export", code: NOT_SUPPORTED })
    }

    unsafe fn event_import(&self, _handle: &[u8; 64]) -> DriverResult<RawEvent> {
        Err(DriverCode { call: "event_import", code: NOT_SUPPORTED })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        permitted("event_destroy")?;
        self.shared.wait_until_nobody_is_blocked();
        // SAFETY: the handle is the share that `event_create` made; nothing uses it after this.
        drop(unsafe { Arc::from_raw(event.0 as *const HostEvent) });
        Ok(())
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        const CALL: &str = "event_record";
        let on = self.stream(stream, CALL)?;
        let (event, generation) = self.next_record(event, &on);
        self.put(stream, &on, CALL, Command::Record { event, generation })
    }

    unsafe fn event_record_all(&self, event: RawEvent) -> DriverResult<()> {
        let event = self.event(event, "event_record_all")?;
        let streams = self.shared.streams.read();
        let books = streams.values().map(|stream| Arc::downgrade(&stream.books)).collect();
        let generation = event.next_record(&self.shared, books);
        // Reached when the last share is dropped: each stream has one, and so does this call.
        let everybody = Arc::new(Everybody { event, generation });
        for stream in streams.values() {
            // A stream whose worker is gone has nothing to wait for.
            stream.push(Command::Arrive { everybody: everybody.clone() }).ok();
        }
        Ok(())
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<Query> {
        let event = self.event(event, "event_query")?;
        // ORDERING: SeqCst, see `stream_wait_event`.
        let recorded = event.recorded.load(Ordering::SeqCst);
        let complete = event.reached.lock().generation >= recorded;
        Ok(if complete { Query::Complete } else { Query::Pending })
    }

    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> DriverResult<f32> {
        const CALL: &str = "event_elapsed_ms";
        let (start, end) = (self.event(start, CALL)?, self.event(end, CALL)?);
        // One lock after the other: both may be the same event.
        let start = start.reached.lock().at;
        let end = end.reached.lock().at;
        match (start, end) {
            (Some(start), Some(end)) => {
                let later = end.saturating_duration_since(start).as_secs_f32();
                let earlier = start.saturating_duration_since(end).as_secs_f32();
                Ok((later - earlier) * 1e3)
            }
            _ => Err(DriverCode { call: CALL, code: INVALID_VALUE }),
        }
    }
}
