//! The workers of [streams](crate::stream), which run what is in their queues.
//!
//! | a worker with | does |
//! |---|---|
//! | a command, nothing held, its device alive | runs it, unlocked where it waits |
//! | a wait for a point that is not reached | sleeps until a point is reached |
//! | nothing, or `standin_hold`, or a lost device | sleeps until rung |
//! | a destroyed stream, drained or lost | ends |

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::abi::{Address, Code, Handle, Outcome, code};
use crate::points::{Clock, Point};
use crate::stream::{Command, HostFunction, Launch, Stream};
use crate::world::{CHANGED, Guard, IN_HOST_FUNCTION, World, lock, wait};

/// Host functions are serialized across streams, as on the device measured.
static HOST_FUNCTIONS: Mutex<()> = Mutex::new(());

/// How often a waiting kernel looks at its word.
const GATE_PERIOD: Duration = Duration::from_micros(50);

/// What `gate` leaves in its word when its time is up.
const GATE_TIMED_OUT: u32 = 2;

impl Stream {
    /// Makes a stream and starts its worker.
    pub(crate) fn start(
        key: Handle,
        number: u64,
        device: usize,
        priority: i32,
        flags: u32,
    ) -> Outcome<Stream> {
        let bell = Arc::new(Condvar::new());
        let mine = Arc::clone(&bell);
        let worker = thread::Builder::new().name(format!("stand-in stream {number}"));
        worker.spawn(move || work(key, &mine)).map_err(|_| code::OPERATING_SYSTEM)?;
        let queue = VecDeque::new();
        Ok(Stream {
            number,
            device,
            priority,
            flags,
            queue,
            submitted: 0,
            completed: 0,
            clock: Clock::new(),
            retired: false,
            green: None,
            bell,
        })
    }
}

/// Waits until the stream has completed what it has now; an error if its device is lost first.
pub(crate) fn wait_idle(mut world: Guard, key: Handle) -> Outcome<Guard> {
    let Some(target) = world.streams.get(&key).map(|stream| stream.submitted) else {
        return Ok(world);
    };
    loop {
        let Some(stream) = world.streams.get(&key) else { return Ok(world) };
        world.alive(stream.device)?;
        if stream.completed >= target {
            return Ok(world);
        }
        world = wait(&CHANGED, world);
    }
}

/// Waits until all of the device's streams have completed what they have now.
pub(crate) fn wait_device(mut world: Guard, device: usize) -> Outcome<Guard> {
    let mine = world.streams.iter().filter(|(_, stream)| stream.device == device);
    let keys: Vec<Handle> = mine.map(|(&key, _)| key).collect();
    for key in keys {
        world = wait_idle(world, key)?;
    }
    world.alive(device)?;
    Ok(world)
}

/// Waits until the point is reached; an error if the device is lost first.
pub(crate) fn wait_point(mut world: Guard, device: usize, point: &Point) -> Outcome {
    loop {
        world.alive(device)?;
        if point.reached().is_some() {
            return Ok(());
        }
        world = wait(&CHANGED, world);
    }
}

enum Next {
    Run(Command),
    Sleep,
    End,
}

impl World {
    /// Runs a record, a word's write or the kernel `empty` within the call, if nothing is in front
    /// of it. False: it must be pushed.
    pub(crate) fn run_now(&mut self, key: Handle, command: &Command) -> bool {
        let Some(stream) = self.streams.get_mut(&key).filter(|stream| stream.is_idle()) else {
            return false;
        };
        let ran = match command {
            Command::Record(point) => point.0.set(Instant::now()).is_ok(),
            Command::WriteWord { to, value } => self.memory.store_word(to, *value),
            Command::Kernel(launch) => launch.entry == "empty",
            _ => false,
        };
        if ran {
            stream.submitted += 1;
            stream.completed += 1;
            if self.streams.values().any(Stream::waits) {
                self.reached();
            }
        }
        ran
    }

    fn next_command(&mut self, key: Handle) -> Next {
        let World { streams, devices, held, .. } = self;
        let Some(stream) = streams.get_mut(&key) else { return Next::End };
        if stream.queue.is_empty() || devices[stream.device].lost.is_some() {
            if stream.retired {
                streams.remove(&key);
                return Next::End;
            }
            return Next::Sleep;
        }
        let blocked =
            matches!(stream.queue.front(), Some(Command::Wait(point)) if point.reached().is_none());
        if *held || blocked {
            return Next::Sleep;
        }
        stream.queue.pop_front().map_or(Next::Sleep, Next::Run)
    }

    fn device_of_stream(&self, key: Handle) -> usize {
        self.streams.get(&key).map_or(0, |stream| stream.device)
    }

    fn stream_is_lost(&self, key: Handle) -> bool {
        self.devices[self.device_of_stream(key)].lost.is_some()
    }
}

fn work(key: Handle, bell: &Condvar) {
    let mut world = lock();
    loop {
        world = match world.next_command(key) {
            Next::Run(command) => run(world, key, command),
            Next::Sleep => wait(bell, world),
            Next::End => break,
        };
    }
    // A call that synchronizes the stream must see that it is gone.
    CHANGED.notify_all();
}

/// Runs one command, releasing the lock for as long as it waits.
fn run(mut world: Guard, key: Handle, command: Command) -> Guard {
    let mut recorded = false;
    let there = match command {
        Command::Copy { to, from } => world.memory.copy(&to, &from),
        Command::CopyStaged { to, from } => world.memory.put(&to, &from),
        Command::Fill { to, pattern } => world.memory.fill(&to, &pattern),
        Command::FillRows { to, pattern, row_bytes, pitch } => {
            world.memory.fill_rows(&to, &pattern, row_bytes, pitch)
        }
        Command::WriteWord { to, value } => world.memory.store_word(&to, value),
        Command::Wait(_) => true,
        Command::Record(point) => {
            recorded = point.0.set(Instant::now()).is_ok();
            true
        }
        Command::Arrive(share) => {
            drop(share);
            recorded = true;
            true
        }
        Command::Free(address) => {
            world.memory.finish_free(address);
            true
        }
        Command::HostFunction { function, data } => {
            world = run_host_function(world, key, function, data);
            true
        }
        Command::Kernel(launch) => {
            let there;
            (world, there) = run_kernel(world, key, &launch);
            there
        }
    };
    let number = world.streams.get(&key).map_or(0, |stream| stream.number);
    if !there {
        world
            .journal
            .misuse(format!("stream {number} reached a command whose memory or module is gone"));
    }
    if world.stream_is_lost(key) {
        return world;
    }
    if let Some(stream) = world.streams.get_mut(&key) {
        stream.completed += 1;
    }
    if recorded {
        world.reached();
    } else {
        CHANGED.notify_all();
    }
    world
}

fn run_host_function(world: Guard, key: Handle, function: HostFunction, data: Address) -> Guard {
    drop(world);
    let turn = HOST_FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    // Lost while it waited for its turn: it never runs.
    if !lock().stream_is_lost(key) {
        IN_HOST_FUNCTION.set(true);
        // SAFETY: the caller of cuLaunchHostFunc gave this function with this data, to be called
        // once from another thread.
        unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
        IN_HOST_FUNCTION.set(false);
        crate::journal::back_to_queue();
    }
    drop(turn);
    lock()
}

/// Runs a kernel: nothing, but for those below, which do what `kernels/` says of them. `false` if
/// something that it uses is gone.
///
/// | kernel | does |
/// |---|---|
/// | `spin(duration_ns)` | sleeps; 1 ms without a parameter |
/// | `gate(word*, timeout_ns)` | waits until the 32-bit word is not 0; late: sets it to 2 |
/// | `out_of_bounds(x*, index)` | writes 1.0 to `x[index]`, or loses the device with 700 |
/// | `trap()` | loses the device with 719 |
fn run_kernel(mut world: Guard, key: Handle, launch: &Launch) -> (Guard, bool) {
    let there = world.modules.contains_key(&launch.module)
        && launch.places.iter().all(|place| world.memory.is_there(place));
    if !there {
        return (world, false);
    }
    let argument = |index: usize| launch.arguments.get(index).map(|bytes| number(bytes));
    match launch.entry.as_str() {
        "spin" => {
            drop(world);
            thread::sleep(Duration::from_nanos(argument(0).unwrap_or(1_000_000)));
            (lock(), true)
        }
        "gate" => run_gate(world, key, argument(0).unwrap_or(0), argument(1).unwrap_or(0)),
        "out_of_bounds" => {
            let offset = argument(1).unwrap_or(0).wrapping_mul(4);
            let address = argument(0).unwrap_or(0).wrapping_add(offset);
            let place =
                usize::try_from(address).ok().and_then(|at| world.memory.device_place(at, 4));
            if let Some(place) = place {
                let there = world.memory.put(&place, &1.0f32.to_le_bytes());
                return (world, there);
            }
            let device = world.device_of_stream(key);
            world.lose(device, code::ILLEGAL_ADDRESS);
            (world, true)
        }
        "trap" => {
            let device = world.device_of_stream(key);
            world.lose(device, code::LAUNCH_FAILED);
            (world, true)
        }
        _ => (world, true),
    }
}

fn run_gate(mut world: Guard, key: Handle, word: u64, timeout_ns: u64) -> (Guard, bool) {
    let Some(place) =
        usize::try_from(word).ok().and_then(|word| world.memory.device_place(word, 4))
    else {
        return (world, false);
    };
    let start = Instant::now();
    loop {
        match world.memory.load_word(&place) {
            None => return (world, false),
            Some(0) => {}
            Some(_) => return (world, true),
        }
        if world.stream_is_lost(key) {
            return (world, true);
        }
        if start.elapsed() >= Duration::from_nanos(timeout_ns) {
            let there = world.memory.set_word_from_zero(&place, GATE_TIMED_OUT);
            return (world, there);
        }
        drop(world);
        thread::sleep(GATE_PERIOD);
        world = lock();
    }
}

/// A little-endian argument of up to 8 bytes.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// The loss of a device, as a test asks for it.
pub(crate) fn lose(device: usize, code: Code) {
    lock().lose(device, code);
}
