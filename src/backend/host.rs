//! The CPU as a device: a worker thread a stream, truly asynchronous.
//!
//! Work is ordered exactly as on a GPU: commands of a stream run one after the other, streams run
//! beside each other, events order them. What would bite on CUDA fails here too:
//!
//! - memory exists from the moment its allocation *runs* to the moment its free runs; a command that
//!   touches anything else loses the device, as an illegal address would;
//! - fresh memory is filled with `0xA5`, so reading too early shows;
//! - a stream takes [`QUEUE_LIMIT`] commands, then the next call blocks its thread;
//! - host functions run one after the other;
//! - after a fault every call fails and no queued command runs.
//!
//! A kernel's host twin is called once a launch with the whole grid; a twin that panics loses the
//! device. The device without threads (`testing::manual`) runs a command only when it is stepped.
//!
//! More than 600 lines: what each command does, what it checks, and the trait's functions one by one.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex, RwLock};
use slab::Slab;

use super::{
    ArgBlock, Backend, Call, DeviceKind, DevicePtr, EventOptions, Function, FunctionInfo,
    HostCallback, HostPtr, LaunchShape, Limits, Pattern, Query, RawEvent, RawFunction, RawModule,
    RawStream, StreamOptions,
};
use crate::error::{DriverCode, LossCause};
use crate::thread_role::{self, Role};

/// Commands that a stream takes before the next call blocks, as an H200's does.
pub(crate) const QUEUE_LIMIT: usize = 1021;

const ALIGNMENT: usize = 256;
const POISON: u8 = 0xA5;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const OPERATING_SYSTEM: i32 = 304;
const INVALID_HANDLE: i32 = 400;
const LAUNCH_FAILED: i32 = 719;
const NOT_SUPPORTED: i32 = 801;

/// The host device.
pub(crate) struct HostBackend {
    shared: Arc<Shared>,
    ordinal: usize,
    name: String,
    limits: Limits,
    threads: bool,
}

struct Shared {
    streams: RwLock<Slab<Arc<HostStream>>>,
    memory: Mutex<Memory>,
    fault: OnceLock<String>,
    host_fn_turn: Mutex<()>,
}

struct HostStream {
    commands: Sender<Command>,
    books: Arc<Books>,
    /// The receiving end, where no thread owns it.
    stepped: Option<Mutex<Stepped>>,
}

/// What a stream owes; it outlives the stream's handle.
#[derive(Default)]
struct Books {
    /// Commands not yet through, all kinds.
    pending: AtomicU64,
    /// Commands not yet through that take a place in the queue.
    depth: Mutex<usize>,
    room: Condvar,
}

struct Stepped {
    commands: Receiver<Command>,
    head: Option<Command>,
}

#[derive(Default)]
struct HostEvent {
    /// Records submitted and records reached.
    recorded: AtomicU64,
    reached: Mutex<Reached>,
    changed: Condvar,
}

#[derive(Default)]
struct Reached {
    generation: u64,
    at: Option<Instant>,
}

struct Memory {
    blocks: BTreeMap<u64, Block>,
    used: u64,
    limit: u64,
}

struct Block {
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
    Fill { dst: DevicePtr, pattern: Pattern, count: u64 },
    Launch(Box<Launch>),
    HostFn { callback: HostCallback, data: HostPtr },
    Record { event: Arc<HostEvent>, generation: u64 },
    Wait { event: Arc<HostEvent>, generation: u64 },
    Word { word: DevicePtr, value: u64 },
}

struct Launch {
    function: super::HostTwin,
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
            shared: Arc::new(Shared {
                streams: RwLock::new(Slab::new()),
                memory: Mutex::new(Memory {
                    blocks: BTreeMap::new(),
                    used: 0,
                    limit: memory_limit.unwrap_or_else(physical_memory),
                }),
                fault: OnceLock::new(),
                host_fn_turn: Mutex::new(()),
            }),
            ordinal,
            name: format!("host CPU, {cores} cores"),
            limits: Limits {
                threads_per_block: 1024,
                block_dim: [1024, 1024, 64],
                grid_dim: [i32::MAX as u32, 65_535, 65_535],
                shared_mem_bytes: 48 << 10,
                shared_mem_optin_bytes: 227 << 10,
                multiprocessors: cores,
                warp_size: 32,
                compute_capability: (0, 0),
                priorities: (0, 0),
                words: true,
            },
            threads,
        }
    }

    fn stream(&self, stream: RawStream, call: &'static str) -> Call<Arc<HostStream>> {
        self.shared.healthy(call)?;
        let streams = self.shared.streams.read();
        streams.get(stream.0 as usize).cloned().ok_or(DriverCode { call, code: INVALID_HANDLE })
    }

    /// A share of an event, which may be another host device's.
    fn event(&self, event: RawEvent, call: &'static str) -> Call<Arc<HostEvent>> {
        self.shared.healthy(call)?;
        let event = event.0 as *const HostEvent;
        // SAFETY: the caller's handle came from `event_create` and was not destroyed.
        unsafe { Arc::increment_strong_count(event) };
        // SAFETY: the count was raised for this very share.
        Ok(unsafe { Arc::from_raw(event) })
    }

    fn enqueue(&self, stream: RawStream, call: &'static str, command: Command) -> Call<()> {
        let stream = self.stream(stream, call)?;
        let books = &stream.books;
        if command.counts() && self.threads {
            let mut depth = books.depth.lock();
            while *depth >= QUEUE_LIMIT && self.shared.fault.get().is_none() {
                books.room.wait(&mut depth);
            }
            *depth += 1;
        }
        // ORDERING: SeqCst: `stream_query` must not see zero while a command is on its way.
        books.pending.fetch_add(1, Ordering::SeqCst);
        stream.commands.send(command).map_err(|_| DriverCode { call, code: INVALID_HANDLE })
    }
}

impl Command {
    /// Whether it takes a place in the stream's queue; event records and waits do not.
    fn counts(&self) -> bool {
        !matches!(self, Command::Record { .. } | Command::Wait { .. } | Command::Word { .. })
    }

    fn is_ready(&self) -> bool {
        match self {
            Command::Wait { event, generation } => event.reached.lock().generation >= *generation,
            _ => true,
        }
    }

    fn run(self, shared: &Shared) -> std::result::Result<(), String> {
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
            Command::Fill { dst, pattern, count } => shared.fill(dst, &pattern, count),
            Command::Launch(launch) => launch.run(shared),
            Command::HostFn { callback, data } => {
                let _turn = shared.host_fn_turn.lock();
                let _role = thread_role::enter(Role::HostFn);
                // SAFETY: the submitter gave `data` for this callback and keeps it valid.
                unsafe { callback(data.0 as *mut c_void) };
                Ok(())
            }
            Command::Record { event, generation } => {
                let mut reached = event.reached.lock();
                reached.generation = reached.generation.max(generation);
                reached.at = Some(Instant::now());
                event.changed.notify_all();
                Ok(())
            }
            Command::Wait { event, generation } => {
                let mut reached = event.reached.lock();
                while reached.generation < generation && shared.fault.get().is_none() {
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
    fn run(&self, shared: &Shared) -> std::result::Result<(), String> {
        for (index, slot) in self.args.slots().iter().enumerate() {
            if slot.memory_bytes > 0 {
                shared.touch(DevicePtr(self.args.address(index)), slot.memory_bytes)?;
            }
        }
        catch_unwind(AssertUnwindSafe(|| (self.function)(&self.shape.grid, &self.args)))
            .map_err(|panic| format!("a kernel's host twin panicked: {}", panic_message(&*panic)))
    }
}

impl Shared {
    fn healthy(&self, call: &'static str) -> Call<()> {
        match self.fault.get() {
            None => Ok(()),
            Some(_) => Err(DriverCode { call, code: LAUNCH_FAILED }),
        }
    }

    fn fail(&self, what: String) {
        // The first fault is the cause; later ones follow from it.
        if self.fault.set(what).is_ok() {
            for (_, stream) in &*self.streams.read() {
                let _depth = stream.books.depth.lock();
                stream.books.room.notify_all();
            }
        }
    }

    /// Runs one command of a stream and keeps its books.
    fn execute(&self, books: &Books, command: Command) {
        let counts = command.counts();
        if self.fault.get().is_none()
            && let Err(what) = command.run(self)
        {
            self.fail(what);
        }
        if counts {
            let mut depth = books.depth.lock();
            *depth = depth.saturating_sub(1);
            books.room.notify_one();
        }
        // ORDERING: SeqCst, see `enqueue`.
        books.pending.fetch_sub(1, Ordering::SeqCst);
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

    fn make_live(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let mut memory = self.memory.lock();
        let block = memory.blocks.get_mut(&ptr.0).ok_or("an allocation lost its block")?;
        // SAFETY: the block was allocated with this size and nobody uses it before it is live.
        unsafe { std::ptr::write_bytes(ptr.0 as *mut u8, POISON, block.bytes as usize) };
        block.live = true;
        Ok(())
    }

    fn release(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let removed = self.memory.lock().blocks.remove(&ptr.0);
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

impl Drop for Shared {
    fn drop(&mut self) {
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
    /// Runs the head if it is ready.
    fn step(&mut self, books: &Books, shared: &Shared) -> bool {
        if !self.is_ready(shared) {
            return false;
        }
        match self.head.take() {
            Some(command) => {
                shared.execute(books, command);
                true
            }
            None => false,
        }
    }

    fn is_ready(&mut self, shared: &Shared) -> bool {
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
        let streams: Vec<_> = self.shared.streams.read().iter().map(|(_, s)| s.clone()).collect();
        let ready: Vec<_> = streams
            .iter()
            .filter_map(|stream| Some((stream, stream.stepped.as_ref()?)))
            .filter(|(_, stepped)| stepped.lock().is_ready(&self.shared))
            .collect();
        if ready.is_empty() {
            return false;
        }
        let (stream, stepped) = ready[choose % ready.len()];
        stepped.lock().step(&stream.books, &self.shared)
    }

    fn stream_create(&self, _options: StreamOptions) -> Call<RawStream> {
        const CALL: &str = "stream_create";
        self.shared.healthy(CALL)?;
        let (commands, receiver) = unbounded();
        let (stepped, worker) = if self.threads {
            (None, Some(receiver))
        } else {
            (Some(Mutex::new(Stepped { commands: receiver, head: None })), None)
        };
        let books = Arc::new(Books::default());
        if let Some(receiver) = worker {
            let (shared, books) = (self.shared.clone(), books.clone());
            std::thread::Builder::new()
                .name(format!("host:{}-stream", self.ordinal))
                // Until the stream was destroyed and its queue is empty.
                .spawn(move || receiver.iter().for_each(|command| shared.execute(&books, command)))
                .map_err(|_| DriverCode { call: CALL, code: OPERATING_SYSTEM })?;
        }
        let stream = Arc::new(HostStream { commands, books, stepped });
        let handle = self.shared.streams.write().insert(stream);
        Ok(RawStream(handle as u64))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Call<()> {
        let removed = self.shared.streams.write().try_remove(stream.0 as usize);
        // The worker goes on until the queue is empty, as the driver does.
        removed.map(drop).ok_or(DriverCode { call: "stream_destroy", code: INVALID_HANDLE })
    }

    unsafe fn stream_query(&self, stream: RawStream) -> Call<Query> {
        let stream = self.stream(stream, "stream_query")?;
        // ORDERING: SeqCst, see `enqueue`.
        let pending = stream.books.pending.load(Ordering::SeqCst);
        Ok(if pending == 0 { Query::Complete } else { Query::Pending })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Call<()> {
        let event = self.event(event, "stream_wait_event")?;
        // ORDERING: SeqCst: the newest record that this thread may know of.
        let generation = event.recorded.load(Ordering::SeqCst);
        self.enqueue(stream, "stream_wait_event", Command::Wait { event, generation })
    }

    fn event_create(&self, _options: EventOptions) -> Call<RawEvent> {
        self.shared.healthy("event_create")?;
        Ok(RawEvent(Arc::into_raw(Arc::new(HostEvent::default())) as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Call<()> {
        // SAFETY: the handle is the share that `event_create` made; nobody uses it after this.
        drop(unsafe { Arc::from_raw(event.0 as *const HostEvent) });
        Ok(())
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Call<()> {
        let event = self.event(event, "event_record")?;
        // ORDERING: SeqCst, see `stream_wait_event`.
        let generation = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        self.enqueue(stream, "event_record", Command::Record { event, generation })
    }

    unsafe fn event_query(&self, event: RawEvent) -> Call<Query> {
        let event = self.event(event, "event_query")?;
        // ORDERING: SeqCst, see `stream_wait_event`.
        let recorded = event.recorded.load(Ordering::SeqCst);
        let complete = event.reached.lock().generation >= recorded;
        Ok(if complete { Query::Complete } else { Query::Pending })
    }

    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Call<f32> {
        const CALL: &str = "event_elapsed_ms";
        let (start, end) = (self.event(start, CALL)?, self.event(end, CALL)?);
        let (start, end) = (start.reached.lock().at, end.reached.lock().at);
        match (start, end) {
            (Some(start), Some(end)) => {
                Ok(end.saturating_duration_since(start).as_secs_f32() * 1e3)
            }
            _ => Err(DriverCode { call: CALL, code: INVALID_VALUE }),
        }
    }

    unsafe fn write_word(&self, stream: RawStream, word: DevicePtr, value: u64) -> Call<()> {
        self.enqueue(stream, "write_word", Command::Word { word, value })
    }

    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> Call<()> {
        let data = HostPtr(data as usize);
        self.enqueue(stream, "host_fn", Command::HostFn { callback, data })
    }

    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> Call<DevicePtr> {
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
            memory.blocks.insert(ptr, Block { bytes, live: false });
            DevicePtr(ptr)
        };
        self.enqueue(stream, CALL, Command::Alloc(ptr))?;
        Ok(ptr)
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> Call<()> {
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

    fn memory_info(&self) -> Call<(u64, u64)> {
        let memory = self.shared.memory.lock();
        Ok((memory.limit.saturating_sub(memory.used), memory.limit))
    }

    unsafe fn register(&self, ptr: HostPtr, _bytes: usize) -> Call<DevicePtr> {
        self.shared.healthy("register")?;
        Ok(DevicePtr(ptr.0 as u64))
    }

    unsafe fn unregister(&self, _ptr: HostPtr) -> Call<()> {
        Ok(())
    }

    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> Call<()> {
        self.enqueue(stream, "copy_to_device", Command::CopyIn { dst, src, bytes })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> Call<()> {
        self.enqueue(stream, "copy_to_host", Command::CopyOut { dst, src, bytes })
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> Call<()> {
        self.enqueue(stream, "copy_on_device", Command::Copy { dst, src, bytes })
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        _src_context: u64,
        bytes: u64,
    ) -> Call<()> {
        self.enqueue(stream, "copy_from_peer", Command::CopyPeer { dst, src, bytes })
    }

    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> Call<()> {
        self.enqueue(stream, "fill", Command::Fill { dst, pattern, count })
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: &ArgBlock,
    ) -> Call<()> {
        const CALL: &str = "launch";
        let Function::Host(function) = function else {
            return Err(DriverCode { call: CALL, code: NOT_SUPPORTED });
        };
        let launch = Launch { function: function.clone(), shape: *shape, args: args.clone() };
        self.enqueue(stream, CALL, Command::Launch(Box::new(launch)))
    }

    fn load(&self, _image: &[u8], _log: &mut String) -> Call<RawModule> {
        Err(DriverCode { call: "load", code: NOT_SUPPORTED })
    }

    unsafe fn unload(&self, _module: RawModule) -> Call<()> {
        Err(DriverCode { call: "unload", code: NOT_SUPPORTED })
    }

    unsafe fn function(&self, _module: RawModule, _name: &str) -> Call<RawFunction> {
        Err(DriverCode { call: "function", code: NOT_SUPPORTED })
    }

    unsafe fn function_info(&self, _function: RawFunction) -> Call<FunctionInfo> {
        Err(DriverCode { call: "function_info", code: NOT_SUPPORTED })
    }

    unsafe fn allow_shared_mem(&self, _function: RawFunction, _bytes: u32) -> Call<()> {
        Err(DriverCode { call: "allow_shared_mem", code: NOT_SUPPORTED })
    }
}

/// What a panic said, where it said anything.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no message)")
}

fn physical_memory() -> u64 {
    // SAFETY: sysconf reads a number and touches no memory of ours.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    // SAFETY: as above.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0))
}
