//! The CPU as a device: a worker thread a stream, truly asynchronous.
//!
//! Work is ordered exactly as on a GPU: commands of a stream run one after the other, streams run
//! beside each other, events order them. What would bite on CUDA fails here too:
//!
//! - memory exists from the moment its allocation *runs* to the moment its free runs; a command that
//!   touches anything else loses the device, as an illegal address would;
//! - fresh memory is filled with `0xA5`, so reading too early shows;
//! - a stream takes [`QUEUE_LIMIT`] commands, then the next call blocks its thread; until that goes on
//!   no stream or event is made or destroyed, no memory pinned, and no host function put on a stream;
//! - host functions run one after the other;
//! - the legacy default stream waits for all streams that are not non-blocking, and they for it;
//! - inside a host function every call is refused with 800;
//! - after a fault every call fails and no queued command runs.
//!
//! A kernel's host twin is called once a launch with the whole grid; a twin that panics loses the
//! device. The device without threads (`testing::manual`) runs a command only when it is stepped.
//!
//! More than 600 lines: what each command does, what it checks, and the trait's functions one by one.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, SendError, Sender, unbounded};
use parking_lot::{Condvar, Mutex, RwLock};

use super::{
    ArgBlock, Backend, DeviceKind, DevicePtr, DriverResult, EventOptions, Function, Grid,
    HostCallback, HostPtr, KernelAttributes, LaunchShape, Limits, Pattern, Place, PoolInfo, Query,
    RawEvent, RawFunction, RawModule, RawStream, RowCopy, StreamInfo, StreamOptions,
};
use crate::error::image::ParamLayout;
use crate::error::{DriverCode, LossCause};
use crate::system;
use crate::thread::contain;
use crate::thread::role;
use crate::thread::role::Role;

/// Commands that a stream takes before the next call blocks, as an H200's does.
pub(crate) const QUEUE_LIMIT: usize = 1021;

const ALIGNMENT: usize = 256;
/// What fresh memory is filled with.
pub(crate) const POISON: u8 = 0xA5;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const OPERATING_SYSTEM: i32 = 304;
const INVALID_HANDLE: i32 = 400;
const LAUNCH_FAILED: i32 = 719;
const NOT_SUPPORTED: i32 = 801;

/// The host device.
pub(crate) struct HostBackend {
    shared: Arc<HostCore>,
    ordinal: usize,
    name: String,
    limits: Limits,
    threads: bool,
}

struct HostCore {
    /// By handle. A handle is never used again, also not by another host device.
    streams: RwLock<BTreeMap<u64, Arc<HostStream>>>,
    /// Held while something is put on the legacy default stream or on one ordered with it.
    legacy_order: Mutex<()>,
    memory: Mutex<Memory>,
    fault: OnceLock<String>,
    host_fn_turn: Mutex<()>,
    /// Threads that are blocked by a full queue.
    blocked: Mutex<usize>,
    unblocked: Condvar,
    /// Streams of other devices may read this one's memory.
    has_peers: AtomicBool,
}

struct HostStream {
    /// Ordered with the legacy default stream, or that stream itself.
    blocking: bool,
    commands: Sender<Command>,
    books: Arc<Books>,
    /// The receiving end, where no thread owns it.
    stepped: Option<Mutex<Stepped>>,
}

/// What a stream owes; it outlives the stream's handle.
#[derive(Default)]
struct Books {
    handle: u64,
    /// No longer a handle; the stream goes when its queue is empty.
    destroyed: AtomicBool,
    /// Commands not yet through, all kinds.
    pending: AtomicU64,
    /// Commands not yet through that take a place in the queue.
    depth: Mutex<usize>,
    room: Condvar,
    /// The stream waited for an event that is never reached, and its handle is gone: the worker discards
    /// the commands that are left.
    given_up: AtomicBool,
}

struct Stepped {
    commands: Receiver<Command>,
    head: Option<Command>,
    /// A command runs: not under the lock, it is the user's code.
    running: bool,
}

#[derive(Default)]
struct HostEvent {
    /// Records submitted and records reached.
    recorded: AtomicU64,
    reached: Mutex<Reached>,
    changed: Condvar,
    /// The device of the last record.
    recorder: Mutex<Weak<HostCore>>,
    /// The last record that a stream was told to make and discarded.
    discarded: AtomicU64,
}

impl HostEvent {
    /// Whether a record that was not reached never will be.
    fn never_comes(&self, generation: u64) -> bool {
        // ORDERING: Relaxed: the stream that waits polls this.
        self.discarded.load(Ordering::Relaxed) >= generation
            || self.recorder.lock().upgrade().is_none_or(|core| core.fault.get().is_some())
    }

    fn reach(&self, generation: u64) {
        let mut reached = self.reached.lock();
        reached.generation = reached.generation.max(generation);
        reached.at = Some(Instant::now());
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct Reached {
    generation: u64,
    at: Option<Instant>,
}

struct Memory {
    blocks: BTreeMap<u64, HostBlock>,
    /// From when an allocation runs to when its free runs.
    pool: PoolInfo,
    /// From when an allocation is submitted to when its free is.
    used: u64,
    limit: u64,
}

struct HostBlock {
    bytes: u64,
    live: bool,
}

enum Command {
    Alloc(DevicePtr),
    Free(DevicePtr),
    CopyIn { dst: DevicePtr, src: HostPtr, bytes: u64 },
    CopyOut { dst: HostPtr, src: DevicePtr, bytes: u64 },
    CopyPeer { dst: DevicePtr, src: DevicePtr, bytes: u64 },
    Copy { dst: DevicePtr, src: DevicePtr, bytes: u64 },
    CopyRows(Box<RowCopy>),
    Fill { dst: DevicePtr, pattern: Pattern, count: u64 },
    Launch(Box<Launch>),
    HostFn { callback: HostCallback, data: HostPtr },
    Record { event: Arc<HostEvent>, generation: u64 },
    Wait { event: Arc<HostEvent>, generation: u64 },
    Word { word: DevicePtr, value: u64 },
    Arrive { _everybody: Arc<Everybody> },
}

/// Marks an event as reached when every stream has dropped its share.
struct Everybody {
    event: Arc<HostEvent>,
    generation: u64,
}

impl Drop for Everybody {
    fn drop(&mut self) {
        self.event.reach(self.generation);
    }
}

struct Launch {
    function: super::HostTwin,
    kernel: Arc<str>,
    shape: LaunchShape,
    args: ArgBlock,
}

impl HostBackend {
    /// A device with `memory_limit` bytes of memory; without threads it must be stepped.
    pub(crate) fn new(memory_limit: Option<u64>, threads: bool) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // ORDERING: Relaxed: only uniqueness matters.
        let ordinal = NEXT.fetch_add(1, Ordering::Relaxed);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        HostBackend {
            shared: Arc::new(HostCore {
                streams: RwLock::default(),
                legacy_order: Mutex::default(),
                memory: Mutex::new(Memory {
                    blocks: BTreeMap::new(),
                    pool: PoolInfo::default(),
                    used: 0,
                    limit: memory_limit.unwrap_or_else(system::physical_memory),
                }),
                fault: OnceLock::new(),
                host_fn_turn: Mutex::new(()),
                blocked: Mutex::new(0),
                unblocked: Condvar::new(),
                has_peers: AtomicBool::new(false),
            }),
            ordinal,
            name: format!("host CPU, {cores} cores"),
            limits: Limits {
                threads_per_block: 1024,
                registers_per_block: 65_536,
                block_dim: [1024, 1024, 64],
                grid_dim: [i32::MAX as u32, 65_535, 65_535],
                shared_mem_bytes: 48 << 10,
                shared_mem_optin_bytes: 227 << 10,
                multiprocessors: cores,
                warp_size: 32,
                compute_capability: (0, 0),
                priorities: (0, 0),
                words: true,
                // A twin is called with the whole grid: it may do what needs all blocks at once.
                cooperative: true,
                clusters: true,
                interprocess_events: false,
            },
            threads,
        }
    }

    fn stream(&self, stream: RawStream, call: &'static str) -> DriverResult<Arc<HostStream>> {
        self.shared.healthy(call)?;
        let made = self.shared.streams.read().get(&stream.0).cloned();
        match made {
            // ORDERING: Relaxed: who uses a handle beside its destruction is wrong anyway.
            Some(made) if !made.books.destroyed.load(Ordering::Relaxed) => return Ok(made),
            None if stream.0 == RawStream::LEGACY.0 => {}
            _ => return Err(DriverCode { call, code: INVALID_HANDLE }),
        }
        // The legacy default stream is there from its first use on.
        match self.shared.streams.write().entry(stream.0) {
            Entry::Occupied(made) => Ok(made.get().clone()),
            Entry::Vacant(place) => Ok(place.insert(self.make_stream(stream.0, true)?).clone()),
        }
    }

    fn make_stream(&self, handle: u64, blocking: bool) -> DriverResult<Arc<HostStream>> {
        let (commands, receiver) = unbounded();
        let (stepped, worker) = if self.threads {
            (None, Some(receiver))
        } else {
            (Some(Mutex::new(Stepped { commands: receiver, head: None, running: false })), None)
        };
        let books = Arc::new(Books { handle, ..Books::default() });
        if let Some(receiver) = worker {
            let (shared, books) = (self.shared.clone(), books.clone());
            let name = format!("host:{}-stream", self.ordinal);
            // Until the stream was destroyed and its queue is empty.
            let work = move || receiver.iter().for_each(|command| shared.execute(&books, command));
            contain::spawn(&name, work)
                .map_err(|_| DriverCode { call: "stream_create", code: OPERATING_SYSTEM })?;
        }
        Ok(Arc::new(HostStream { blocking, commands, books, stepped }))
    }

    /// A share of an event, which may be another host device's.
    fn event(&self, event: RawEvent, call: &'static str) -> DriverResult<Arc<HostEvent>> {
        self.shared.healthy(call)?;
        let event = event.0 as *const HostEvent;
        // SAFETY: the caller's handle came from `event_create` and was not destroyed.
        unsafe { Arc::increment_strong_count(event) };
        // SAFETY: the count was raised for this very share.
        Ok(unsafe { Arc::from_raw(event) })
    }

    fn enqueue(&self, handle: RawStream, call: &'static str, command: Command) -> DriverResult<()> {
        let stream = self.stream(handle, call)?;
        let books = &stream.books;
        if command.counts() && self.threads {
            self.shared.take_room(books);
        }
        let _order = stream.blocking.then(|| self.shared.legacy_order.lock());
        if stream.blocking {
            self.shared.wait_for_counterparts(handle, &stream);
        }
        stream.push(command).map_err(|_| DriverCode { call, code: INVALID_HANDLE })
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        // Each worker has a share of all this: without handles they end.
        let streams = std::mem::take(&mut *self.shared.streams.write());
        drop(streams);
    }
}

impl HostStream {
    fn push(&self, command: Command) -> std::result::Result<(), SendError<Command>> {
        // ORDERING: SeqCst: `stream_query` must not see zero while a command is on its way.
        self.books.pending.fetch_add(1, Ordering::SeqCst);
        self.commands.send(command)
    }

    fn is_idle(&self) -> bool {
        // ORDERING: SeqCst, see `push`.
        self.books.pending.load(Ordering::SeqCst) == 0
    }

    /// Waits, in stream order, for everything on `other` so far.
    fn come_after(&self, other: &HostStream) {
        let event = Arc::new(HostEvent::default());
        let generation = 1;
        // A stream whose worker is gone has nothing to wait for.
        if other.push(Command::Record { event: event.clone(), generation }).is_ok() {
            self.push(Command::Wait { event, generation }).ok();
        }
    }
}

impl Command {
    /// Whether it takes a place in the stream's queue, as launches, fills and copies do on an H200.
    fn counts(&self) -> bool {
        !matches!(
            self,
            Command::Alloc(_)
                | Command::Free(_)
                | Command::Record { .. }
                | Command::Wait { .. }
                | Command::Word { .. }
                | Command::Arrive { .. }
        )
    }

    /// Whose code it runs.
    fn role(&self) -> Option<Role> {
        match self {
            Command::HostFn { .. } => Some(Role::HostFn),
            Command::Launch(_) => Some(Role::Twin),
            _ => None,
        }
    }

    /// Drops it without running it.
    fn discard(self) {
        match self {
            Command::Launch(launch) => launch.discard(),
            Command::Record { event, generation } => {
                // ORDERING: Relaxed: a stream that waits for the event polls this.
                event.discarded.fetch_max(generation, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    fn is_ready(&self) -> bool {
        match self {
            Command::Wait { event, generation } => event.reached.lock().generation >= *generation,
            _ => true,
        }
    }

    fn run(self, shared: &HostCore, books: &Books) -> std::result::Result<(), String> {
        match self {
            Command::Alloc(ptr) => shared.make_live(ptr),
            Command::Free(ptr) => shared.release(ptr),
            Command::CopyIn { dst, src, bytes } => {
                let dst = shared.touch(dst, bytes)?;
                // SAFETY: `touch` proved `dst` live for `bytes`; the submitter keeps `src` valid
                // until this command is complete; host and device memory never overlap.
                unsafe { std::ptr::copy_nonoverlapping(src.0 as *const u8, dst, bytes as usize) };
                Ok(())
            }
            Command::CopyOut { dst, src, bytes } => {
                let src = shared.touch(src, bytes)?;
                // SAFETY: as above, the other way round.
                unsafe { std::ptr::copy_nonoverlapping(src, dst.0 as *mut u8, bytes as usize) };
                Ok(())
            }
            Command::CopyPeer { dst, src, bytes } => {
                let dst = shared.touch(dst, bytes)?;
                // SAFETY: `dst` is live; the submitter keeps the other device's `src` alive and
                // ordered before this command.
                unsafe { std::ptr::copy_nonoverlapping(src.0 as *const u8, dst, bytes as usize) };
                Ok(())
            }
            Command::Copy { dst, src, bytes } => {
                let (dst, src) = (shared.touch(dst, bytes)?, shared.touch(src, bytes)?);
                // SAFETY: both are live for `bytes`; `copy` allows overlap.
                unsafe { std::ptr::copy(src, dst, bytes as usize) };
                Ok(())
            }
            Command::CopyRows(copy) => shared.copy_rows(&copy),
            Command::Fill { dst, pattern, count } => shared.fill(dst, &pattern, count),
            Command::Launch(launch) => {
                let ran = launch.run(shared);
                launch.discard();
                ran
            }
            Command::HostFn { callback, data } => {
                let _turn = shared.host_fn_turn.lock();
                // SAFETY: the submitter gave `data` for this callback and keeps it valid.
                unsafe { callback(data.0 as *mut c_void) };
                Ok(())
            }
            Command::Record { event, generation } => {
                event.reach(generation);
                Ok(())
            }
            // Its share is dropped.
            Command::Arrive { .. } => Ok(()),
            Command::Wait { event, generation } => {
                let mut reached = event.reached.lock();
                while reached.generation < generation && shared.fault.get().is_none() {
                    // ORDERING: SeqCst, see `stream_destroy`.
                    if books.destroyed.load(Ordering::SeqCst) && event.never_comes(generation) {
                        // ORDERING: Relaxed: for this thread.
                        books.given_up.store(true, Ordering::Relaxed);
                        break;
                    }
                    // The limit only bounds how late a fault elsewhere is noticed.
                    event.changed.wait_for(&mut reached, Duration::from_millis(20));
                }
                Ok(())
            }
            Command::Word { word, value } => {
                let word: *mut u64 = word.0 as *mut u64;
                // SAFETY: the engine keeps the word, 8-byte aligned, until its last value was seen.
                let word = unsafe { AtomicU64::from_ptr(word) };
                // ORDERING: Release: who reads the value sees what the stream did before.
                word.store(value, Ordering::Release);
                Ok(())
            }
        }
    }
}

impl Launch {
    /// Drops it: if it is the last to have the twin, that includes whatever a user's twin captured.
    fn discard(self: Box<Self>) {
        contain::contain("the drop of what a kernel's host twin captured", || drop(self));
    }

    fn run(&self, shared: &HostCore) -> std::result::Result<(), String> {
        for (index, slot) in self.args.slots().iter().enumerate() {
            if slot.memory_bytes > 0 {
                shared.touch(DevicePtr(self.args.address(index)), slot.memory_bytes)?;
            }
        }
        contain::catch(|| (self.function)(&self.shape.grid, &self.args))
            .map_err(|message| format!("the host twin of `{}` panicked: {message}", self.kernel))
    }
}

impl HostCore {
    /// Blocks until a stream takes another command, which is then counted.
    fn take_room(&self, books: &Books) {
        let mut depth = books.depth.lock();
        if *depth >= QUEUE_LIMIT {
            *self.blocked.lock() += 1;
            while *depth >= QUEUE_LIMIT && self.fault.get().is_none() {
                books.room.wait(&mut depth);
            }
            *self.blocked.lock() -= 1;
            self.unblocked.notify_all();
        }
        *depth += 1;
    }

    /// Blocks while a full queue blocks another thread: so does the driver when it is to make a stream
    /// or an event, to pin memory, or to put a host function on a stream.
    fn wait_until_nobody_is_blocked(&self) {
        let mut blocked = self.blocked.lock();
        while *blocked > 0 && self.fault.get().is_none() {
            // The limit only bounds how late a fault is noticed.
            self.unblocked.wait_for(&mut blocked, Duration::from_millis(20));
        }
    }

    /// Orders a stream that is not non-blocking: the legacy default stream behind all others, another
    /// one behind the legacy default stream. Under `legacy_order`, so that no two of them wait for
    /// each other.
    fn wait_for_counterparts(&self, handle: RawStream, stream: &HostStream) {
        let streams = self.streams.read();
        let legacy = RawStream::LEGACY.0;
        for (other, counterpart) in &*streams {
            let opposite = (handle.0 == legacy) != (*other == legacy);
            if counterpart.blocking && opposite && !counterpart.is_idle() {
                stream.come_after(counterpart);
            }
        }
    }

    fn healthy(&self, call: &'static str) -> DriverResult<()> {
        permitted(call)?;
        match self.fault.get() {
            None => Ok(()),
            Some(_) => Err(DriverCode { call, code: LAUNCH_FAILED }),
        }
    }

    fn fail(&self, what: String) {
        // The first fault is the cause; later ones follow from it.
        if self.fault.set(what).is_ok() {
            for stream in self.streams.read().values() {
                let _depth = stream.books.depth.lock();
                stream.books.room.notify_all();
            }
        }
    }

    /// Runs one command of a stream and keeps its books.
    fn execute(&self, books: &Books, command: Command) {
        let counts = command.counts();
        // Also for the drop of what the command has, which is the user's.
        let role = command.role().map(role::enter);
        // ORDERING: Relaxed: written by this thread.
        if self.fault.get().is_some() || books.given_up.load(Ordering::Relaxed) {
            command.discard();
        } else if let Err(what) = command.run(self, books) {
            self.fail(what);
        }
        drop(role);
        if counts {
            let mut depth = books.depth.lock();
            *depth = depth.saturating_sub(1);
            books.room.notify_one();
        }
        // ORDERING: SeqCst, see `HostStream::push`.
        let last = books.pending.fetch_sub(1, Ordering::SeqCst) == 1;
        // ORDERING: SeqCst, see `stream_destroy`.
        if last && books.destroyed.load(Ordering::SeqCst) {
            self.forget(books);
        }
    }

    /// Lets go of a destroyed stream: its worker ends.
    fn forget(&self, books: &Books) {
        let stream = self.streams.write().remove(&books.handle);
        drop(stream);
    }

    /// The address, if all of it is live memory of this device.
    fn touch(&self, ptr: DevicePtr, bytes: u64) -> std::result::Result<*mut u8, String> {
        let memory = self.memory.lock();
        let found = memory.blocks.range(..=ptr.0).next_back();
        match found {
            Some((start, block)) if block.live && ptr.0 + bytes <= start + block.bytes => {
                Ok(ptr.0 as *mut u8)
            }
            _ => Err(format!("illegal address: {bytes} bytes at {:#x} are not live memory", ptr.0)),
        }
    }

    fn copy_rows(&self, copy: &RowCopy) -> std::result::Result<(), String> {
        let find = |place, pitch| match place {
            Place::Device(ptr) => self.touch(ptr, copy.extent(pitch)),
            Place::Host(ptr) => Ok(ptr.0 as *mut u8),
        };
        let (to, from) = (find(copy.to, copy.to_pitch)?, find(copy.from, copy.from_pitch)?);
        for row in 0..copy.rows {
            let (to_at, from_at) =
                ((row * copy.to_pitch) as usize, (row * copy.from_pitch) as usize);
            // SAFETY: the row begins inside the extent that `touch` proved live, or that the
            // submitter keeps valid.
            let to = unsafe { to.add(to_at) };
            // SAFETY: as above.
            let from = unsafe { from.add(from_at) };
            // SAFETY: both rows lie inside their extents; `copy` allows overlap.
            unsafe { std::ptr::copy(from, to, copy.row_bytes as usize) };
        }
        Ok(())
    }

    fn make_live(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let mut memory = self.memory.lock();
        let block = memory.blocks.get_mut(&ptr.0).ok_or("an allocation lost its block")?;
        // SAFETY: the block was allocated with this size and nobody uses it before it is live.
        unsafe { std::ptr::write_bytes(ptr.0 as *mut u8, POISON, block.bytes as usize) };
        block.live = true;
        let bytes = block.bytes;
        let pool = &mut memory.pool;
        pool.reserved += bytes;
        pool.reserved_peak = pool.reserved_peak.max(pool.reserved);
        Ok(())
    }

    fn release(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let removed = {
            let mut memory = self.memory.lock();
            let removed = memory.blocks.remove(&ptr.0);
            let live = removed.as_ref().filter(|block| block.live);
            memory.pool.reserved -= live.map_or(0, |block| block.bytes);
            removed
        };
        let block = removed.ok_or_else(|| format!("double free at {:#x}", ptr.0))?;
        free_block(ptr.0, block.bytes);
        Ok(())
    }

    fn fill(
        &self,
        dst: DevicePtr,
        pattern: &Pattern,
        count: u64,
    ) -> std::result::Result<(), String> {
        let bytes = count * pattern.len as u64;
        let dst = self.touch(dst, bytes)?;
        let short = pattern.shortest();
        if let [byte] = short.as_slice() {
            // SAFETY: `touch` proved the range live.
            unsafe { std::ptr::write_bytes(dst, *byte, bytes as usize) };
            return Ok(());
        }
        for index in 0..count as usize {
            // SAFETY: index * len is inside the range that `touch` proved live.
            let at = unsafe { dst.add(index * pattern.len) };
            // SAFETY: `at` has room for one pattern; the pattern is ours.
            unsafe { std::ptr::copy_nonoverlapping(pattern.bytes.as_ptr(), at, pattern.len) };
        }
        Ok(())
    }
}

impl Drop for HostCore {
    fn drop(&mut self) {
        if *self.has_peers.get_mut() {
            // Another device may still copy from this memory, and after a loss this device does not wait for that
            // copy.
            return;
        }
        for (start, block) in std::mem::take(&mut self.memory.get_mut().blocks) {
            free_block(start, block.bytes);
        }
    }
}

fn free_block(start: u64, bytes: u64) {
    if let Ok(layout) = Layout::from_size_align(bytes as usize, ALIGNMENT) {
        // SAFETY: blocks are made by `alloc` with this very layout, and removed from the table
        // once.
        unsafe { dealloc(start as *mut u8, layout) };
    }
}

impl Stepped {
    /// The head, to be run, if it is ready.
    fn take(&mut self, shared: &HostCore) -> Option<Command> {
        self.running = self.is_ready(shared);
        if self.running { self.head.take() } else { None }
    }

    fn is_ready(&mut self, shared: &HostCore) -> bool {
        if self.running {
            return false;
        }
        if self.head.is_none() {
            self.head = self.commands.try_recv().ok();
        }
        self.head.as_ref().is_some_and(|head| shared.fault.get().is_some() || head.is_ready())
    }
}

impl Backend for HostBackend {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn loss_cause(&self, code: DriverCode) -> LossCause {
        match self.shared.fault.get() {
            Some(what) => LossCause::Host(what.clone()),
            None => LossCause::Driver(code),
        }
    }

    fn step(&self, choose: usize) -> bool {
        let streams: Vec<_> = self.shared.streams.read().values().cloned().collect();
        let ready: Vec<_> = streams
            .iter()
            .filter_map(|stream| Some((stream, stream.stepped.as_ref()?)))
            .filter(|(_, stepped)| stepped.lock().is_ready(&self.shared))
            .collect();
        if ready.is_empty() {
            return false;
        }
        let (stream, stepped) = ready[choose % ready.len()];
        let Some(command) = stepped.lock().take(&self.shared) else { return false };
        self.shared.execute(&stream.books, command);
        stepped.lock().running = false;
        true
    }

    /// Host devices share the host's memory.
    fn abandon(&self) {
        // Whoever a full queue holds goes on: no command runs any more.
        self.shared.fail("the device is lost".to_owned());
    }

    fn enable_peer(&self, other: &dyn Backend) -> DriverResult<bool> {
        self.shared.healthy("enable_peer")?;
        other.begin_peer_access();
        Ok(other.kind() == DeviceKind::Host)
    }

    fn begin_peer_access(&self) {
        // ORDERING: Relaxed: in front of the first copy, and read when nobody has this any more.
        self.shared.has_peers.store(true, Ordering::Relaxed);
    }

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
        // It goes on until its queue is empty, as on a GPU.
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
        Ok(StreamInfo { priority: 0, blocking: stream.blocking, context: self.context() })
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
        // SAFETY: the handle is the share that `event_create` made; nobody uses it after this.
        drop(unsafe { Arc::from_raw(event.0 as *const HostEvent) });
        Ok(())
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        let event = self.event(event, "event_record")?;
        // ORDERING: SeqCst, see `stream_wait_event`.
        let generation = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        *event.recorder.lock() = Arc::downgrade(&self.shared);
        self.enqueue(stream, "event_record", Command::Record { event, generation })
    }

    unsafe fn event_record_all(&self, event: RawEvent) -> DriverResult<()> {
        let event = self.event(event, "event_record_all")?;
        // ORDERING: SeqCst, see `stream_wait_event`.
        let generation = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        *event.recorder.lock() = Arc::downgrade(&self.shared);
        // Reached when the last share is dropped: by the streams, and by this call.
        let everybody = Arc::new(Everybody { event, generation });
        for stream in self.shared.streams.read().values() {
            // A stream whose worker is gone has nothing to wait for.
            stream.push(Command::Arrive { _everybody: everybody.clone() }).ok();
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
        // One lock after the other: it may be one event.
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

    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr> {
        const CALL: &str = "alloc";
        let refused = DriverCode { call: CALL, code: OUT_OF_MEMORY };
        self.shared.healthy(CALL)?;
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| Layout::from_size_align(bytes, ALIGNMENT).ok())
            .filter(|layout| layout.size() > 0)
            .ok_or(DriverCode { call: CALL, code: INVALID_VALUE })?;
        let ptr = {
            let mut memory = self.shared.memory.lock();
            if memory.limit.saturating_sub(memory.used) < bytes {
                return Err(refused);
            }
            // SAFETY: the layout's size is not zero.
            let ptr = unsafe { alloc(layout) } as u64;
            if ptr == 0 {
                return Err(refused);
            }
            memory.used += bytes;
            memory.blocks.insert(ptr, HostBlock { bytes, live: false });
            DevicePtr(ptr)
        };
        self.enqueue(stream, CALL, Command::Alloc(ptr))?;
        Ok(ptr)
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()> {
        const CALL: &str = "free";
        self.shared.healthy(CALL)?;
        {
            // Counted at once: later allocations are ordered behind it, as in the driver's pool.
            let mut memory = self.shared.memory.lock();
            let block = memory.blocks.get(&ptr.0);
            let bytes = block.ok_or(DriverCode { call: CALL, code: INVALID_VALUE })?.bytes;
            memory.used -= bytes;
        }
        self.enqueue(stream, CALL, Command::Free(ptr))
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        self.shared.healthy("memory_info")?;
        let memory = self.shared.memory.lock();
        Ok((memory.limit.saturating_sub(memory.pool.reserved), memory.limit))
    }

    fn pool_info(&self) -> DriverResult<PoolInfo> {
        self.shared.healthy("pool_info")?;
        Ok(self.shared.memory.lock().pool)
    }

    /// What is freed goes back to the system at once.
    fn pool_trim(&self, _keep_bytes: u64) -> DriverResult<()> {
        self.shared.healthy("pool_trim")
    }

    unsafe fn register(&self, ptr: HostPtr, _bytes: usize) -> DriverResult<DevicePtr> {
        self.shared.wait_until_nobody_is_blocked();
        self.shared.healthy("register")?;
        Ok(DevicePtr(ptr.0 as u64))
    }

    unsafe fn unregister(&self, _ptr: HostPtr) -> DriverResult<()> {
        permitted("unregister")
    }

    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_to_device", Command::CopyIn { dst, src, bytes })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_to_host", Command::CopyOut { dst, src, bytes })
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_on_device", Command::Copy { dst, src, bytes })
    }

    unsafe fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()> {
        self.enqueue(stream, "copy_rows", Command::CopyRows(Box::new(*copy)))
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        _src_context: u64,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_from_peer", Command::CopyPeer { dst, src, bytes })
    }

    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "fill", Command::Fill { dst, pattern, count })
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: &ArgBlock,
    ) -> DriverResult<()> {
        const CALL: &str = "launch";
        let Function::Host(function, kernel) = function else {
            return Err(DriverCode { call: CALL, code: NOT_SUPPORTED });
        };
        let (function, kernel) = (function.clone(), kernel.clone());
        let launch = Launch { function, kernel, shape: *shape, args: args.clone() };
        self.enqueue(stream, CALL, Command::Launch(Box::new(launch)))
    }

    fn load(&self, _image: &[u8], _log: &mut String) -> DriverResult<RawModule> {
        Err(DriverCode { call: "load", code: NOT_SUPPORTED })
    }

    unsafe fn unload(&self, _module: RawModule) -> DriverResult<()> {
        Err(DriverCode { call: "unload", code: NOT_SUPPORTED })
    }

    unsafe fn function(&self, _module: RawModule, _name: &str) -> DriverResult<RawFunction> {
        Err(DriverCode { call: "function", code: NOT_SUPPORTED })
    }

    unsafe fn function_attributes(&self, _function: RawFunction) -> DriverResult<KernelAttributes> {
        Err(DriverCode { call: "function_attributes", code: NOT_SUPPORTED })
    }

    unsafe fn function_parameters(&self, _: RawFunction) -> DriverResult<Option<Vec<ParamLayout>>> {
        Ok(None)
    }

    unsafe fn allow_shared_mem(&self, _function: RawFunction, _bytes: u32) -> DriverResult<()> {
        Err(DriverCode { call: "allow_shared_mem", code: NOT_SUPPORTED })
    }

    unsafe fn active_blocks(&self, _function: RawFunction, _: u32, _: u32) -> DriverResult<u32> {
        Err(DriverCode { call: "active_blocks", code: NOT_SUPPORTED })
    }

    unsafe fn active_clusters(&self, _function: RawFunction, _grid: &Grid) -> DriverResult<u32> {
        Err(DriverCode { call: "active_clusters", code: NOT_SUPPORTED })
    }
}

/// Refuses calls from inside a host function, as the driver does.
fn permitted(call: &'static str) -> DriverResult<()> {
    match role::may_call_driver() {
        true => Ok(()),
        false => Err(DriverCode { call, code: DriverCode::NOT_PERMITTED }),
    }
}
