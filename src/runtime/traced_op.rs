//! One entry of a [`Tracer`](super::tracer::Tracer)'s log: plain data about an operation.
#![forbid(unsafe_code)]

use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::Grid;

/// The device's work for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TracedWork {
    /// An operation that takes no time: an allocation, an event, a wait.
    Order,
    /// The launch of a kernel.
    Kernel,
    /// A replayed list or a [`Graph`](crate::Graph), launched one by one or as a graph.
    List,
    /// A copy from the host.
    ToDevice,
    /// A copy to the host.
    ToHost,
    /// A copy on the device, or from another one.
    Copy,
    /// A fill.
    Fill,
    /// A function on the host.
    HostFn,
    /// Calls into another library.
    Foreign,
}

/// The driver calls of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Note {
    pub(crate) work: TracedWork,
    pub(crate) bytes: u64,
    pub(crate) launches: u32,
    pub(crate) grid_dim: [u32; 3],
    pub(crate) block_dim: [u32; 3],
    pub(crate) shared_mem_bytes: u32,
}

/// An operation that was submitted.
#[derive(Clone, Debug)]
pub(crate) struct TracedSubmission {
    pub(crate) name: Arc<str>,
    pub(crate) note: Note,
    pub(crate) stream: u64,
    pub(crate) stream_name: Option<Arc<str>>,
    /// The multiprocessors of its partition, if it is in one.
    pub(crate) partition: Option<u32>,
    pub(crate) ticket: u64,
    pub(crate) at: &'static Location<'static>,
    pub(crate) span: Option<u64>,
    /// The id of the tokio task.
    pub(crate) task: Option<u64>,
    /// Tickets of other streams that it waits for on the device.
    pub(crate) waits_for: SmallVec<[(u64, u64); 2]>,
    pub(crate) submitted_ns: u64,
    /// Bytes held by the device's buffers at that time.
    pub(crate) buffers_bytes: u64,
}

/// The operation's progress; times of the engine's clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TracedTimes {
    pub(crate) device_ns: Option<(f64, f64)>,
    /// The start time of a running one.
    pub(crate) since_ns: Option<f64>,
    pub(crate) clock_error_ns: f64,
    pub(crate) seen_ns: Option<u64>,
    pub(crate) woken_ns: Option<u64>,
    pub(crate) polled_ns: Option<u64>,
}

impl Default for Note {
    fn default() -> Self {
        Note {
            work: TracedWork::Order,
            bytes: 0,
            launches: 0,
            grid_dim: [0; 3],
            block_dim: [0; 3],
            shared_mem_bytes: 0,
        }
    }
}

impl Note {
    /// Counts one more launch of a kernel.
    pub(crate) fn launch(&mut self, grid: &Grid) {
        self.launches += 1;
        self.work = if self.launches == 1 { TracedWork::Kernel } else { TracedWork::List };
        self.grid_dim = grid.grid_dim;
        self.block_dim = grid.block_dim;
        self.shared_mem_bytes = grid.shared_mem_bytes;
    }
}
