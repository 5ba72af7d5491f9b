//! NCCL called barely: its entry points, streams of the driver's, and nothing between them and the clock.

use std::ffi::{c_int, c_void};

use gpu_await::{Device, DeviceKind, Uses};
use libloading::Library;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Id(pub(crate) [u8; 128]);

type Comm = *mut c_void;
type Raw = *mut c_void;

/// A rank of this process.
pub(crate) struct Lane {
    comm: Comm,
    stream: Raw,
}

pub(crate) struct Bare {
    nccl: Library,
    driver: Library,
    pub(crate) lanes: Vec<Lane>,
    contexts: Vec<u64>,
    get: Entry,
}

/// The entry points of the measured loops.
struct Entry {
    start: unsafe extern "C" fn() -> c_int,
    end: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Raw) -> c_int,
    all_gather: unsafe extern "C" fn(u64, u64, usize, c_int, Comm, Raw) -> c_int,
    broadcast: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Raw) -> c_int,
    synchronize: unsafe extern "C" fn(Raw) -> c_int,
}

/// `ncclFloat32`, `ncclSum`.
const F32: c_int = 7;
const SUM: c_int = 0;

macro_rules! symbol {
    ($library:expr, $name:literal, $type:ty) => {
        // SAFETY: the type is the entry point's in the library's header.
        *unsafe { $library.get::<$type>(concat!($name, "\0")) }.expect($name)
    };
}

fn ok(code: c_int) {
    assert_eq!(code, 0, "NCCL or the driver refused a call");
}

pub(crate) fn unique_id() -> Id {
    // SAFETY: NCCL's initializers have no preconditions.
    let nccl = unsafe { Library::new("libnccl.so.2") }.expect("NCCL");
    let get = symbol!(nccl, "ncclGetUniqueId", unsafe extern "C" fn(*mut Id) -> c_int);
    let mut id = Id([0; 128]);
    // SAFETY: the pointer is to an id that lives.
    ok(unsafe { get(&raw mut id) });
    std::mem::forget(nccl);
    id
}

impl Bare {
    /// None without GPUs.
    pub(crate) fn new(id: Id, world: usize, ranks: &[(usize, Device)]) -> Option<Bare> {
        if ranks[0].1.kind() != DeviceKind::Cuda {
            return None;
        }
        // SAFETY: the initializers of both have no preconditions.
        let nccl = unsafe { Library::new("libnccl.so.2") }.expect("NCCL");
        // SAFETY: as above.
        let driver = unsafe { Library::new("libcuda.so.1") }.expect("the driver");
        let get = Entry {
            start: symbol!(nccl, "ncclGroupStart", unsafe extern "C" fn() -> c_int),
            end: symbol!(nccl, "ncclGroupEnd", unsafe extern "C" fn() -> c_int),
            all_reduce: symbol!(
                nccl,
                "ncclAllReduce",
                unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Raw) -> c_int
            ),
            all_gather: symbol!(
                nccl,
                "ncclAllGather",
                unsafe extern "C" fn(u64, u64, usize, c_int, Comm, Raw) -> c_int
            ),
            broadcast: symbol!(
                nccl,
                "ncclBroadcast",
                unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Raw) -> c_int
            ),
            synchronize: symbol!(driver, "cuStreamSynchronize", unsafe extern "C" fn(Raw) -> c_int),
        };
        let contexts = ranks.iter().map(|(_, device)| context_of(device)).collect();
        let mut bare = Bare { nccl, driver, lanes: Vec::new(), contexts, get };
        let init = symbol!(
            bare.nccl,
            "ncclCommInitRank",
            unsafe extern "C" fn(*mut Comm, c_int, Id, c_int) -> c_int
        );
        let make =
            symbol!(bare.driver, "cuStreamCreate", unsafe extern "C" fn(*mut Raw, u32) -> c_int);
        bare.start();
        for (at, (rank, _)) in ranks.iter().enumerate() {
            bare.enter(at);
            let mut lane = Lane { comm: std::ptr::null_mut(), stream: std::ptr::null_mut() };
            // SAFETY: the pointer is to a handle that lives; in a group it is written in the call.
            ok(unsafe { init(&raw mut lane.comm, world as c_int, id, *rank as c_int) });
            // SAFETY: the pointer is to a handle that lives; 1 is CU_STREAM_NON_BLOCKING.
            ok(unsafe { make(&raw mut lane.stream, 1) });
            bare.lanes.push(lane);
        }
        bare.end();
        bare.enter(0);
        Some(bare)
    }

    /// Makes a context current, as a program with one thread has it.
    pub(crate) fn enter(&self, at: usize) {
        let set = symbol!(self.driver, "cuCtxSetCurrent", unsafe extern "C" fn(u64) -> c_int);
        // SAFETY: the bench keeps the device.
        ok(unsafe { set(self.contexts[at]) });
    }

    pub(crate) fn start(&self) {
        // SAFETY: no preconditions.
        ok(unsafe { (self.get.start)() });
    }

    pub(crate) fn end(&self) {
        // SAFETY: no preconditions.
        ok(unsafe { (self.get.end)() });
    }

    pub(crate) fn all_reduce(&self, at: usize, x: u64, y: u64, len: usize) {
        let Lane { comm, stream } = self.lanes[at];
        // SAFETY: the bench keeps memory of that length, and waits for the call.
        ok(unsafe { (self.get.all_reduce)(x, y, len, F32, SUM, comm, stream) });
    }

    pub(crate) fn all_gather(&self, at: usize, x: u64, y: u64, len: usize) {
        let Lane { comm, stream } = self.lanes[at];
        // SAFETY: as above.
        ok(unsafe { (self.get.all_gather)(x, y, len, F32, comm, stream) });
    }

    pub(crate) fn broadcast(&self, at: usize, x: u64, y: u64, len: usize) {
        let Lane { comm, stream } = self.lanes[at];
        // SAFETY: as above.
        ok(unsafe { (self.get.broadcast)(x, y, len, F32, 0, comm, stream) });
    }

    pub(crate) fn synchronize(&self) {
        for lane in &self.lanes {
            // SAFETY: the stream is this one's.
            ok(unsafe { (self.get.synchronize)(lane.stream) });
        }
    }
}

fn context_of(device: &Device) -> u64 {
    let (stream, mut context) = (device.stream().expect("a stream"), 0);
    let uses = Uses::new("context");
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(uses, |queue, ()| {
            context = queue.context();
            Ok::<(), gpu_await::Error>(())
        })
    };
    op.queued().expect("a context");
    context
}
