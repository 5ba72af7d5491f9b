//! A stream's queue, and what may be in it. Its worker is the [engine](crate::engine)'s.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Condvar};

use crate::abi::{Address, Handle};
use crate::memory::Place;
use crate::points::{Clock, Everybody, Point};

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A stream: FIFO, run by one worker.
pub(crate) struct Stream {
    pub(crate) number: u64,
    pub(crate) device: usize,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    pub(crate) queue: VecDeque<Command>,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Up to which of its commands each other stream is waited for, whoever waited.
    pub(crate) clock: Clock,
    /// Destroyed: no longer a handle, only drained.
    pub(crate) retired: bool,
    /// The green context that it is a stream of.
    pub(crate) green: Option<Handle>,
    /// Wakes the worker.
    pub(crate) bell: Arc<Condvar>,
}

/// What a stream runs.
pub(crate) enum Command {
    Copy {
        to: Place,
        from: Place,
    },
    /// A copy of pageable memory, staged by the call.
    CopyStaged {
        to: Place,
        from: Vec<u8>,
    },
    Fill {
        to: Place,
        pattern: Vec<u8>,
    },
    /// Fills the first `row_bytes` of every `pitch` bytes.
    FillRows {
        to: Place,
        pattern: Vec<u8>,
        row_bytes: usize,
        pitch: usize,
    },
    WriteWord {
        to: Place,
        value: u64,
    },
    HostFunction {
        function: HostFunction,
        data: Address,
    },
    Record(Arc<Point>),
    /// The last share that is dropped reaches the point.
    Arrive(Arc<Everybody>),
    Wait(Arc<Point>),
    Free(Address),
    Kernel(Launch),
}

/// A kernel launch.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) entry: String,
    /// The green context that it runs in.
    pub(crate) green: Option<Handle>,
    pub(crate) module: Handle,
    /// A copy of each argument's bytes.
    pub(crate) arguments: Vec<Vec<u8>>,
    /// Memory that arguments point to.
    pub(crate) places: Vec<Place>,
}

impl Command {
    /// The memory that the command uses.
    pub(crate) fn places(&self) -> Vec<Place> {
        match self {
            Command::Copy { to, from } => vec![*to, *from],
            Command::CopyStaged { to, .. }
            | Command::Fill { to, .. }
            | Command::FillRows { to, .. }
            | Command::WriteWord { to, .. } => vec![*to],
            Command::Kernel(launch) => launch.places.clone(),
            Command::HostFunction { .. }
            | Command::Arrive(_)
            | Command::Record(_)
            | Command::Wait(_)
            | Command::Free(_) => Vec::new(),
        }
    }
}

impl Stream {
    /// Adds a command.
    pub(crate) fn push(&mut self, command: Command) {
        self.queue.push_back(command);
        self.submitted += 1;
        self.bell.notify_all();
    }

    /// Whether it waits for another stream.
    pub(crate) fn waits(&self) -> bool {
        matches!(self.queue.front(), Some(Command::Wait(_)))
    }

    /// Whether it ran so many commands.
    pub(crate) fn has_run(&self, count: u64) -> bool {
        self.completed >= count
    }

    /// Commands that are not complete.
    pub(crate) fn pending(&self) -> u64 {
        self.submitted - self.completed
    }

    /// Whether everything submitted is complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending() == 0
    }
}
