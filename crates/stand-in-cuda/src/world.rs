//! Everything the stand-in knows, behind one mutex, and the frame around every driver call.
//!
//! More than 500 lines: what a handle means is decided here, for every kind of handle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::abi::{Address, Code, Handle, Outcome, code};
use crate::greens::{Green, Multiprocessors};
use crate::journal::Journal;
use crate::memory::{MAX_DEVICES, Memory, Owner, Place};
use crate::points::{Clock, Point};
use crate::shared::Shared;
use crate::stream::{Command, Launch, Stream};

/// Handles of what has no life of its own: a device's primary context and its memory pool.
const CONTEXTS: Handle = 0xC000;
const POOLS: Handle = 0xD000;
const PER_DEVICE: usize = 0x100;
/// Keys of the default streams, one a device.
const DEFAULT_STREAMS: Handle = 0xE000;
/// Everything created gets a handle from here on, whatever its kind, so that a handle of the wrong
/// kind is noticed.
const FIRST_HANDLE: Handle = 0x10_0000;

static WORLD: Mutex<World> = Mutex::new(World::new());

/// Rung when anything completes, and when a device is lost.
pub(crate) static CHANGED: Condvar = Condvar::new();

pub(crate) type Guard = MutexGuard<'static, World>;

/// Locks the world. A panic elsewhere has ended the call it happened in, and says so; the rest goes
/// on.
pub(crate) fn lock() -> Guard {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the condition variable, and locks again.
pub(crate) fn wait(bell: &Condvar, world: Guard) -> Guard {
    bell.wait(world).unwrap_or_else(PoisonError::into_inner)
}

/// All state.
pub(crate) struct World {
    pub(crate) journal: Journal,
    pub(crate) memory: Memory,
    pub(crate) initialized: bool,
    pub(crate) held: bool,
    /// What an idle stream can do without waiting is done within the call.
    pub(crate) instant: bool,
    pub(crate) device_count: usize,
    pub(crate) devices: [Device; MAX_DEVICES],
    pub(crate) attributes: BTreeMap<i32, i32>,
    pub(crate) function_attributes: BTreeMap<i32, i32>,
    pub(crate) peers: Vec<(usize, usize)>,
    pub(crate) streams: BTreeMap<Handle, Stream>,
    pub(crate) events: BTreeMap<Handle, Event>,
    /// The default ones from their first use on.
    pools: BTreeMap<Handle, Pool>,
    pub(crate) modules: BTreeMap<Handle, Module>,
    pub(crate) functions: BTreeMap<Handle, Function>,
    /// Kernels of libraries, each with its function.
    pub(crate) kernels: BTreeMap<Handle, Handle>,
    /// What green contexts are made from: of which device, and what.
    pub(crate) descriptors: BTreeMap<Handle, (usize, Multiprocessors)>,
    pub(crate) greens: BTreeMap<Handle, Green>,
    pub(crate) splits: u32,
    pub(crate) graphs: BTreeMap<Handle, Graph>,
    /// Streams that are captured, and into which graph.
    pub(crate) captures: BTreeMap<Handle, Handle>,
    pub(crate) execs: BTreeMap<Handle, Exec>,
    pub(crate) shared: Shared,
    handles_given: usize,
    streams_made: u64,
    events_made: u64,
    modules_made: u64,
}

/// A device and its primary context.
pub(crate) struct Device {
    pub(crate) retained: u32,
    /// What every call that talks to the device answers, once it is lost.
    pub(crate) lost: Option<Code>,
}

/// A memory pool.
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// The most that it may hold.
    pub(crate) max_bytes: u64,
    /// Those that were set, by their number.
    pub(crate) attributes: [u64; 9],
}

/// An event: what its last record will reach.
pub(crate) struct Event {
    pub(crate) number: u64,
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// What the last record will reach; an imported event has its exporter's.
    pub(crate) last: Arc<LastRecord>,
}

/// `None`: never recorded, which queries as complete.
#[derive(Default)]
pub(crate) struct LastRecord(Mutex<Option<Arc<Point>>>);

impl LastRecord {
    pub(crate) fn get(&self) -> Option<Arc<Point>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, point: Arc<Point>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
    }
}

impl Pool {
    /// `CU_MEMPOOL_ATTR_REUSE_..` are on at first.
    fn new(device: usize, max_bytes: u64) -> Self {
        Pool { device, max_bytes, attributes: [0, 1, 1, 1, 0, 0, 0, 0, 0] }
    }
}

pub(crate) struct Module {
    pub(crate) number: u64,
    /// What looking something up in it answers.
    pub(crate) broken: Option<Code>,
    pub(crate) device: usize,
    pub(crate) entries: Vec<crate::ptx::Entry>,
}

pub(crate) struct Function {
    pub(crate) module: Handle,
    pub(crate) device: usize,
    pub(crate) entry: crate::ptx::Entry,
    pub(crate) max_dynamic_shared_bytes: u32,
}

/// What a node of a graph does.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(Launch),
    /// Of an event.
    Record(Handle),
}

/// A graph of launches, in the order in which they were added.
pub(crate) struct Graph {
    pub(crate) device: usize,
    /// Several where a node is a graph itself.
    pub(crate) nodes: BTreeMap<Handle, Vec<Work>>,
    /// The edges into each node, and whether they are programmatic.
    pub(crate) edges: BTreeMap<Handle, Vec<(Handle, bool)>>,
}

/// One that can be launched.
pub(crate) struct Exec {
    pub(crate) device: usize,
    /// Whose nodes its are.
    pub(crate) graph: Handle,
    pub(crate) nodes: BTreeMap<Handle, Vec<Work>>,
    /// A stream, and how many commands that had behind the last launch.
    pub(crate) last: Option<(Handle, u64)>,
}

impl World {
    const fn new() -> Self {
        World {
            journal: Journal::new(),
            memory: Memory::new(),
            initialized: false,
            held: false,
            instant: false,
            device_count: 1,
            devices: [const { Device { retained: 0, lost: None } }; MAX_DEVICES],
            attributes: BTreeMap::new(),
            function_attributes: BTreeMap::new(),
            peers: Vec::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            pools: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            kernels: BTreeMap::new(),
            descriptors: BTreeMap::new(),
            greens: BTreeMap::new(),
            splits: 0,
            graphs: BTreeMap::new(),
            captures: BTreeMap::new(),
            execs: BTreeMap::new(),
            shared: Shared::new(),
            handles_given: 0,
            streams_made: 0,
            events_made: 0,
            modules_made: 0,
        }
    }

    pub(crate) fn next_handle(&mut self) -> Handle {
        self.handles_given += 1;
        FIRST_HANDLE + self.handles_given * 0x10
    }

    /// The device of this ordinal; `INVALID_DEVICE` if there is none.
    pub(crate) fn device(&self, ordinal: i32) -> Outcome<usize> {
        let device = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        if device < self.device_count { Ok(device) } else { Err(code::INVALID_DEVICE) }
    }

    /// The device of a retained primary context.
    pub(crate) fn context(&mut self, handle: Handle) -> Outcome<usize> {
        let device = (0..self.device_count).find(|&device| context_handle(device) == handle);
        match device.filter(|&device| self.devices[device].retained > 0) {
            Some(device) => Ok(device),
            None => match self.green_of_context(handle).and_then(|green| self.greens.get(&green)) {
                Some(green) if green.destroyed => Err(code::CONTEXT_IS_DESTROYED),
                Some(green) => Ok(green.device),
                None => {
                    self.journal.misuse(format!("context {handle:#x} is not retained"));
                    Err(code::INVALID_CONTEXT)
                }
            },
        }
    }

    /// The device of the calling thread's current context; `INVALID_CONTEXT` without one.
    pub(crate) fn current(&mut self) -> Outcome<usize> {
        match current_context() {
            0 => Err(code::INVALID_CONTEXT),
            handle => self.context(handle),
        }
    }

    /// As [`World::current`], and the device must not be lost.
    pub(crate) fn live_current(&mut self) -> Outcome<usize> {
        let device = self.current()?;
        self.alive(device)?;
        Ok(device)
    }

    /// The device's loss, if it is lost.
    pub(crate) fn alive(&self, device: usize) -> Outcome {
        self.devices[device].lost.map_or(Ok(()), Err)
    }

    /// The memory pool of this handle, whose device must not be lost.
    pub(crate) fn live_pool(&mut self, handle: Handle) -> Outcome<&mut Pool> {
        let default = (0..self.device_count).find(|&device| pool_handle(device) == handle);
        if let Some(device) = default {
            self.pools.entry(handle).or_insert_with(|| Pool::new(device, u64::MAX));
        }
        let Some(device) = self.pools.get(&handle).map(|pool| pool.device) else {
            return Err(self.bad_handle("memory pool", handle));
        };
        self.alive(device)?;
        self.pools.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn add_pool(&mut self, device: usize, max_bytes: u64) -> Handle {
        let handle = self.next_handle();
        self.pools.insert(handle, Pool::new(device, max_bytes));
        handle
    }

    /// Ends a pool's handle; what was allocated from it stays. The default ones have no end.
    pub(crate) fn remove_pool(&mut self, handle: Handle) -> Outcome<Pool> {
        let made = self.pools.remove(&handle).filter(|_| handle >= FIRST_HANDLE);
        made.ok_or_else(|| self.bad_handle("memory pool that was made", handle))
    }

    /// Pools that were made.
    pub(crate) fn pools_made(&self) -> usize {
        self.pools.range(FIRST_HANDLE..).count()
    }

    /// What is in front of something that the stream gets now.
    pub(crate) fn clock(&self, key: Handle) -> Clock {
        let Some(stream) = self.streams.get(&key) else { return Clock::new() };
        let mut clock = stream.clock.clone();
        clock.insert(key, stream.submitted);
        clock
    }

    /// Orders a stream behind a point, for the eyes of the pools.
    pub(crate) fn come_after(&mut self, key: Handle, point: &Point) {
        if let Some(stream) = self.streams.get_mut(&key) {
            for (other, count) in point.clock() {
                let known = stream.clock.entry(*other).or_default();
                *known = (*known).max(*count);
            }
        }
    }

    fn bad_handle(&mut self, kind: &str, handle: Handle) -> Code {
        self.journal.misuse(format!("{handle:#x} is no live {kind}"));
        code::INVALID_HANDLE
    }

    /// The key of a stream. Handles 0, 1 and 2 are the current context's default stream, and need
    /// one.
    pub(crate) fn stream(&mut self, handle: Handle) -> Outcome<Handle> {
        if handle <= 2 {
            let device = self.current()?;
            let key = DEFAULT_STREAMS + device;
            if let Entry::Vacant(vacant) = self.streams.entry(key) {
                vacant.insert(Stream::start(key, 0, device, 0, 0)?);
            }
            return Ok(key);
        }
        match self.streams.get(&handle) {
            Some(stream) if handle >= FIRST_HANDLE && !stream.retired => Ok(handle),
            _ => Err(self.bad_handle("stream", handle)),
        }
    }

    /// As [`World::stream`], with its device, which must not be lost.
    pub(crate) fn live_stream(&mut self, handle: Handle) -> Outcome<(Handle, usize)> {
        let key = self.stream(handle)?;
        let stream = self.streams.get(&key);
        let (device, green) = stream.map_or((0, None), |stream| (stream.device, stream.green));
        self.alive(device)?;
        if self.is_destroyed(green) { Err(code::CONTEXT_IS_DESTROYED) } else { Ok((key, device)) }
    }

    pub(crate) fn add_stream(
        &mut self,
        device: usize,
        priority: i32,
        flags: u32,
    ) -> Outcome<Handle> {
        let handle = self.next_handle();
        let stream = Stream::start(handle, self.streams_made + 1, device, priority, flags)?;
        self.streams_made += 1;
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    /// Puts a command behind what the stream has.
    pub(crate) fn submit(&mut self, key: Handle, command: Command) {
        if let Some(graph) = self.captures.get(&key).copied() {
            match command {
                Command::Kernel(launch) => {
                    let _ = self.add_node(graph, &[], vec![Work::Launch(launch)]);
                }
                _ => self.journal.misuse("of captures only launches are modelled".to_owned()),
            }
            return;
        }
        if !self.greens.is_empty() {
            self.note_place(key, &command);
        }
        if self.instant && !self.held && self.run_now(key, &command) {
            return;
        }
        if let Some(stream) = self.streams.get_mut(&key) {
            stream.push(command);
        }
    }

    /// Writes down where a kernel or a fill runs. Nobody asks before there is a green context.
    fn note_place(&mut self, key: Handle, command: &Command) {
        let (what, green) = match command {
            Command::Kernel(launch) => (launch.entry.as_str(), launch.green),
            Command::Fill { .. } | Command::FillRows { .. } => {
                ("memset", self.streams.get(&key).and_then(|stream| stream.green))
            }
            _ => return,
        };
        let place = format!("{what} on={}", self.multiprocessors_of(green));
        self.journal.note_place(place);
    }

    /// The event of this handle.
    pub(crate) fn event(&mut self, handle: Handle) -> Outcome<&mut Event> {
        if !self.events.contains_key(&handle) {
            return Err(self.bad_handle("event", handle));
        }
        self.events.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    /// As [`World::event`], and its device must not be lost.
    pub(crate) fn live_event(&mut self, handle: Handle) -> Outcome<&mut Event> {
        let device = self.event(handle)?.device;
        self.alive(device)?;
        self.event(handle)
    }

    pub(crate) fn add_event(&mut self, device: usize, flags: u32, last: Arc<LastRecord>) -> Handle {
        let handle = self.next_handle();
        self.events_made += 1;
        self.events.insert(handle, Event { number: self.events_made, device, flags, last });
        handle
    }

    pub(crate) fn add_graph(&mut self, device: usize) -> Handle {
        let handle = self.next_handle();
        self.graphs
            .insert(handle, Graph { device, nodes: BTreeMap::new(), edges: BTreeMap::new() });
        handle
    }

    pub(crate) fn graph(&mut self, handle: Handle) -> Outcome<&mut Graph> {
        if !self.graphs.contains_key(&handle) {
            return Err(self.bad_handle("graph", handle));
        }
        self.graphs.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn remove_graph(&mut self, handle: Handle) -> Outcome {
        self.graph(handle)?;
        self.graphs.remove(&handle);
        Ok(())
    }

    /// A node behind these.
    pub(crate) fn add_node(
        &mut self,
        graph: Handle,
        dependencies: &[Handle],
        work: Vec<Work>,
    ) -> Outcome<Handle> {
        let handle = self.next_handle();
        let graph = self.graph(graph)?;
        graph.nodes.insert(handle, work);
        graph.edges.insert(handle, dependencies.iter().map(|node| (*node, false)).collect());
        Ok(handle)
    }

    pub(crate) fn add_exec(&mut self, exec: Exec) -> Handle {
        let handle = self.next_handle();
        self.execs.insert(handle, exec);
        handle
    }

    pub(crate) fn exec(&mut self, handle: Handle) -> Outcome<&mut Exec> {
        if !self.execs.contains_key(&handle) {
            return Err(self.bad_handle("executable graph", handle));
        }
        self.execs.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn remove_exec(&mut self, handle: Handle) {
        self.execs.remove(&handle);
    }

    /// How many commands a stream was given so far.
    pub(crate) fn submitted(&self, key: Handle) -> u64 {
        self.streams.get(&key).map_or(0, |stream| stream.submitted)
    }

    /// Whether a stream ran so many commands, is gone, or never will.
    pub(crate) fn is_reached(&self, key: Handle, count: u64) -> bool {
        let stream = self.streams.get(&key);
        stream.is_none_or(|stream| {
            stream.has_run(count) || self.devices[stream.device].lost.is_some()
        })
    }

    /// The module of this handle.
    pub(crate) fn module(&mut self, handle: Handle) -> Outcome<&Module> {
        if !self.modules.contains_key(&handle) {
            return Err(self.bad_handle("module", handle));
        }
        self.modules.get(&handle).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn add_module(&mut self, device: usize, entries: Vec<crate::ptx::Entry>) -> Handle {
        let handle = self.next_handle();
        self.modules_made += 1;
        self.modules
            .insert(handle, Module { number: self.modules_made, broken: None, device, entries });
        handle
    }

    /// Unloads a module, with what was looked up in it.
    pub(crate) fn remove_module(&mut self, handle: Handle) -> Outcome {
        self.current()?;
        let device = self.module(handle)?.device;
        self.modules.remove(&handle);
        self.functions.retain(|_, function| function.module != handle);
        let functions = &self.functions;
        self.kernels.retain(|_, function| functions.contains_key(function));
        self.alive(device)
    }

    /// The kernel that a function of a library is.
    pub(crate) fn kernel_of(&mut self, function: Handle) -> Handle {
        let known = self.kernels.iter().find(|(_, known)| **known == function);
        if let Some((&kernel, _)) = known {
            return kernel;
        }
        let kernel = self.next_handle();
        self.kernels.insert(kernel, function);
        kernel
    }

    /// A kernel's function; a kernel may be passed as one.
    pub(crate) fn as_function(&self, handle: Handle) -> Handle {
        self.kernels.get(&handle).copied().unwrap_or(handle)
    }

    pub(crate) fn add_descriptor(&mut self, device: usize, set: Multiprocessors) -> Handle {
        let handle = self.next_handle();
        self.descriptors.insert(handle, (device, set));
        handle
    }

    pub(crate) fn add_green(&mut self, device: usize, set: Multiprocessors) -> Handle {
        let (handle, context) = (self.next_handle(), self.next_handle());
        let number = self.greens.len() as u64 + 1;
        let green = Green { number, device, context, set, destroyed: false };
        self.greens.insert(handle, green);
        handle
    }

    /// How many nodes of graphs are in a green context.
    pub(crate) fn nodes_in(&self, green: Handle) -> usize {
        let graphs = self.graphs.values().map(|graph| &graph.nodes);
        let nodes = graphs.chain(self.execs.values().map(|exec| &exec.nodes));
        let work = nodes.flat_map(BTreeMap::values).flatten();
        let inside = |work: &&Work| matches!(work, Work::Launch(one) if one.green == Some(green));
        work.filter(inside).count()
    }

    /// The function of this handle, whose device must not be lost.
    pub(crate) fn live_function(&mut self, handle: Handle) -> Outcome<&mut Function> {
        let handle = self.as_function(handle);
        let Some(device) = self.functions.get(&handle).map(|function| function.device) else {
            return Err(self.bad_handle("function", handle));
        };
        self.alive(device)?;
        self.functions.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn add_function(&mut self, function: Function) -> Handle {
        let handle = self.next_handle();
        self.functions.insert(handle, function);
        handle
    }

    /// A range of device memory, or of registered memory under its device address.
    pub(crate) fn device_place(&mut self, address: Address, bytes: usize) -> Outcome<Place> {
        let place = self.memory.device_place(address, bytes);
        place.ok_or_else(|| self.bad_range("device memory", address, bytes))
    }

    /// A range of host memory, registered or pageable.
    pub(crate) fn host_place(&mut self, address: Address, bytes: usize) -> Outcome<Place> {
        let place = self.memory.host_place(address, bytes);
        place.ok_or_else(|| self.bad_range("host memory", address, bytes))
    }

    fn bad_range(&mut self, kind: &str, address: Address, bytes: usize) -> Code {
        let label = self.memory.label(address);
        self.journal.misuse(format!("{bytes} bytes at {label} ({address:#x}) are no live {kind}"));
        code::INVALID_VALUE
    }

    /// Counts it as misuse if a queued command still needs the memory.
    pub(crate) fn check_unused(&mut self, owner: Owner) {
        let users = self.streams.values().flat_map(|stream| &stream.queue);
        let users = users
            .filter(|command| command.places().iter().any(|place| place.owner == owner))
            .count();
        if users > 0 {
            self.journal.misuse(format!("{owner:?} goes while {users} queued commands need it"));
        }
    }

    /// Puts a device into the state that nothing leads out of.
    pub(crate) fn lose(&mut self, device: usize, code: Code) {
        self.devices[device].lost.get_or_insert(code);
        self.ring();
    }

    /// Has every worker and every waiting call look again.
    pub(crate) fn ring(&self) {
        for stream in self.streams.values() {
            stream.bell.notify_all();
        }
        CHANGED.notify_all();
    }

    /// A point was reached: has the workers that may be waiting for it, and every waiting call, look again. Not the others: streams of a
    /// lost device stay, and a test has hundreds.
    pub(crate) fn reached(&self) {
        let is_alive = |stream: &&Stream| self.devices[stream.device].lost.is_none();
        for stream in self.streams.values().filter(|stream| stream.waits()).filter(is_alive) {
            stream.bell.notify_all();
        }
        CHANGED.notify_all();
    }

    /// `stream=3`; the default stream is 0.
    pub(crate) fn stream_label(&self, handle: Handle) -> String {
        match self.streams.get(&handle) {
            Some(stream) => format!("stream={}", stream.number),
            None if handle <= 2 => "stream=0".to_owned(),
            None => format!("stream=?{handle:#x}"),
        }
    }

    /// `event=3`.
    pub(crate) fn event_label(&self, handle: Handle) -> String {
        match self.events.get(&handle) {
            Some(event) => format!("event={}", event.number),
            None => format!("event=?{handle:#x}"),
        }
    }

    /// `module=3`.
    pub(crate) fn module_label(&self, handle: Handle) -> String {
        match self.modules.get(&handle) {
            Some(module) => format!("module={}", module.number),
            None => format!("module=?{handle:#x}"),
        }
    }

    /// The entry's name.
    pub(crate) fn function_label(&self, handle: Handle) -> String {
        match self.functions.get(&self.as_function(handle)) {
            Some(function) => function.entry.name.clone(),
            None => format!("?{handle:#x}"),
        }
    }
}

pub(crate) fn context_handle(device: usize) -> Handle {
    CONTEXTS + device * PER_DEVICE
}

pub(crate) fn pool_handle(device: usize) -> Handle {
    POOLS + device * PER_DEVICE
}

/// Runs a driver call: writes it down, refuses it where CUDA would, lets injected failures strike,
/// and does `effect`.
///
/// `effect` gets the lock, because some calls wait.
pub(crate) fn call(
    name: &'static str,
    arguments: impl FnOnce(&World) -> String,
    effect: impl FnOnce(Guard) -> Outcome,
) -> Code {
    // Refused on a thread that is past it.
    THREAD_END.try_with(|_| ()).ok();
    let mut world = lock();
    let arguments = arguments(&world);
    let line = world.journal.enter(name, &arguments);
    let injected = world.journal.injected(name);
    let outcome = match injected {
        Some(injected) if !injected.after_effect => {
            drop(world);
            Err(injected.code)
        }
        _ => match admit(&mut world, name) {
            Ok(()) => effect(world),
            Err(code) => {
                drop(world);
                Err(code)
            }
        },
    };
    let outcome = match injected {
        Some(injected) => outcome.and(Err(injected.code)),
        None => outcome,
    };
    let code = outcome.err().unwrap_or(code::SUCCESS);
    if code != code::SUCCESS
        && let Some(line) = line
    {
        lock().journal.leave(line, code);
    }
    code
}

/// What a call's line says: text as `format!` takes it, behind the name of the [`World`] if that is asked.
macro_rules! told {
    ($text:literal $(, $value:expr)*) => {
        |_: &$crate::world::World| format!($text $(, $value)*)
    };
    ($world:ident: $text:literal $(, $value:expr)*) => {
        |$world: &$crate::world::World| format!($text $(, $value)*)
    };
}
pub(crate) use told;

/// For calls whose arguments say nothing.
pub(crate) fn nothing(_: &World) -> String {
    String::new()
}

fn admit(world: &mut World, name: &str) -> Outcome {
    if IN_HOST_FUNCTION.get() {
        world.journal.misuse("a host function called the driver".to_owned());
        return Err(code::NOT_PERMITTED);
    }
    if !world.initialized && name != "cuInit" && name != "cuDriverGetVersion" {
        return Err(code::NOT_INITIALIZED);
    }
    Ok(())
}

thread_local! {
    /// Set on a worker while it runs a host function, which must not call the driver. No
    /// destructors here and below: calls are made while threads end.
    pub(crate) static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static CONTEXT_STACK: Cell<ContextStack> = const { Cell::new(ContextStack::EMPTY) };
}

thread_local! {
    /// What a driver does as a thread ends that called it.
    static THREAD_END: ThreadEnd = const { ThreadEnd };
}

/// What `standin_slow_thread_end` says, in milliseconds.
pub(crate) static SLOW_THREAD_END_MS: AtomicU64 = AtomicU64::new(0);
/// Releases of contexts and ends of threads that have not returned.
pub(crate) static LEAVING: AtomicU32 = AtomicU32::new(0);

struct ThreadEnd;

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        slowly(&SLOW_THREAD_END_MS, || ());
    }
}

/// Does something of which a test says how long it takes.
pub(crate) fn slowly<R>(ms: &AtomicU64, act: impl FnOnce() -> R) -> R {
    LEAVING.fetch_add(1, Ordering::SeqCst);
    thread::sleep(Duration::from_millis(ms.load(Ordering::SeqCst)));
    let result = act();
    LEAVING.fetch_sub(1, Ordering::SeqCst);
    result
}

/// A thread's contexts, the current one last.
#[derive(Clone, Copy)]
struct ContextStack {
    contexts: [Handle; 16],
    depth: usize,
}

impl ContextStack {
    const EMPTY: ContextStack = ContextStack { contexts: [0; 16], depth: 0 };
}

/// The calling thread's current context; 0 if it has none.
pub(crate) fn current_context() -> Handle {
    let stack = CONTEXT_STACK.get();
    stack.depth.checked_sub(1).map_or(0, |top| stack.contexts[top])
}

/// Replaces the calling thread's current context; 0 takes it off.
pub(crate) fn set_current_context(context: Handle) {
    pop_context();
    if context != 0 {
        push_context(context);
    }
}

/// Pushes a context; `false` when the stack is full.
pub(crate) fn push_context(context: Handle) -> bool {
    let mut stack = CONTEXT_STACK.get();
    let Some(place) = stack.contexts.get_mut(stack.depth) else { return false };
    *place = context;
    stack.depth += 1;
    CONTEXT_STACK.set(stack);
    true
}

/// Pops the current context; 0 if there was none.
pub(crate) fn pop_context() -> Handle {
    let mut stack = CONTEXT_STACK.get();
    let top = current_context();
    stack.depth = stack.depth.saturating_sub(1);
    CONTEXT_STACK.set(stack);
    top
}
