//! NCCL, loaded at run time: results and enumerations are plain integers, because a newer library may return numbers that
//! an older header does not know.
//!
//! Looked up once per process, by name (`libnccl.so.2`, then `libnccl.so`), so `LD_LIBRARY_PATH` and an already loaded library
//! (PyTorch's) are found. Version 2.19 is the oldest that this crate takes.
//!
//! The configuration of a communicator is laid out as in 2.17 and declares itself 2.19's: every newer library accepts what
//! older programs were built with, and fills in the rest itself.
//!
//! Source: `nccl.h` of NCCL 2.19 to 2.30.

pub(crate) mod driver;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use gpu_await::sibling::once;

use crate::element::{ElementType, Reduction};
use crate::error::{Error, Result};

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const OLDEST: c_int = 2_19_00;
const OLDEST_NAME: &str = "2.19";
const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_UNIQUE_ID_BYTES`.
pub(crate) const ID_BYTES: usize = 128;

type Code = c_int;
type RawComm = *mut c_void;
type RawStream = *mut c_void;
/// `ncclCommShrink`.
type Shrink =
    unsafe extern "C" fn(RawComm, *mut c_int, c_int, *mut RawComm, *mut Config, c_int) -> Code;

/// `NCCL_SHRINK_DEFAULT`, `NCCL_SHRINK_ABORT`.
const SHRINK_FLAGS: [c_int; 2] = [0, 1];

/// A rank's handle to a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Comm(usize);

impl Comm {
    /// None yet.
    pub(crate) const NONE: Comm = Comm(0);
}

/// `ncclUniqueId`: passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawId(pub(crate) [u8; ID_BYTES]);

/// `ncclConfig_t` of 2.17.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Everything left to NCCL, and calls that return when the work is on its stream: see `transport/gpu.rs`.
    fn blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! entry_points {
    ($($name:ident($($type:ty),*) -> $result:ty;)+) => {
        /// The entry points that this crate calls.
        #[expect(non_snake_case, reason = "the library's names")]
        pub(crate) struct Nccl {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)+
            /// From 2.27 on.
            shrink: Option<Shrink>,
            version: c_int,
            /// Never unloaded: the functions above point into it.
            _library: libloading::Library,
        }

        impl Nccl {
            fn symbols(library: libloading::Library) -> Result<Nccl> {
                $(
                    // SAFETY: the type is the entry point's in `nccl.h`.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> $result>(
                            concat!(stringify!($name), "\0"),
                        )
                    };
                    #[expect(non_snake_case, reason = "the library's names")]
                    let $name = *found.map_err(|_| Error::MissingSymbol {
                        library: "NCCL",
                        symbol: stringify!($name),
                    })?;
                )+
                // SAFETY: as above.
                let shrink = unsafe { library.get::<Shrink>(b"ncclCommShrink\0") };
                let shrink = shrink.ok().map(|shrink| *shrink);
                Ok(Nccl { $($name,)+ shrink, version: 0, _library: library })
            }
        }
    };
}
entry_points! {
    ncclGetVersion(*mut c_int) -> Code;
    ncclGetUniqueId(*mut RawId) -> Code;
    ncclCommInitRankConfig(*mut RawComm, c_int, RawId, c_int, *mut Config) -> Code;
    ncclCommGetAsyncError(RawComm, *mut Code) -> Code;
    ncclCommFinalize(RawComm) -> Code;
    ncclCommDestroy(RawComm) -> Code;
    ncclCommAbort(RawComm) -> Code;
    ncclGetErrorString(Code) -> *const c_char;
    ncclGetLastError(RawComm) -> *const c_char;
    ncclGroupStart() -> Code;
    ncclGroupEnd() -> Code;
    ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    ncclReduce(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawComm, RawStream) -> Code;
    ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    ncclAllGather(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> Code;
    ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    ncclSend(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
    ncclRecv(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
}

/// Memory that a collective reads, and memory that it writes: device addresses.
#[derive(Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// Where a call goes: a rank's handle and its stream.
#[derive(Clone, Copy)]
pub(crate) struct Lane {
    pub(crate) comm: Comm,
    pub(crate) stream: u64,
}

impl Lane {
    fn parts(self) -> (RawComm, RawStream) {
        (self.comm.0 as RawComm, self.stream as RawStream)
    }
}

impl Addresses {
    fn parts(self) -> (*const c_void, *mut c_void) {
        (self.from as *const c_void, self.to as *mut c_void)
    }
}

impl Nccl {
    /// The library, looked up once per process.
    pub(crate) fn get() -> Result<&'static Nccl> {
        static NCCL: OnceLock<Nccl> = OnceLock::new();
        once(&NCCL, Self::find)
    }

    /// Its version, as NCCL writes it in one number: 22803 is 2.28.3.
    pub(crate) fn version(&self) -> i32 {
        self.version
    }

    fn find() -> Result<Nccl> {
        let mut reason = String::new();
        for name in NAMES {
            // SAFETY: NCCL's initializers have no preconditions.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Nccl::open(library),
                Err(error) => reason = error.to_string(),
            }
        }
        let looked_for = NAMES.map(str::to_owned).to_vec();
        Err(Error::NoLibrary { looked_for, reason })
    }

    fn open(library: libloading::Library) -> Result<Nccl> {
        let mut nccl = Nccl::symbols(library)?;
        let mut version = 0;
        // SAFETY: the pointer is to an integer that lives.
        let code = unsafe { (nccl.ncclGetVersion)(&raw mut version) };
        nccl.check("ncclGetVersion", code)?;
        if version < OLDEST {
            let found = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
            return Err(Error::OldLibrary { found, needed: OLDEST_NAME });
        }
        nccl.version = version;
        Ok(nccl)
    }

    /// NCCL's text for a result.
    pub(crate) fn text(&self, code: i32) -> String {
        // SAFETY: any number may be asked for; the text is static.
        let text = unsafe { (self.ncclGetErrorString)(code) };
        owned(text)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: without a communicator the last error of any is asked for; the text is copied at once.
        let detail = unsafe { (self.ncclGetLastError)(std::ptr::null_mut()) };
        Err(Error::Nccl { call, code, text: self.text(code), detail: owned(detail) })
    }

    /// The id of a communicator to be made.
    pub(crate) fn unique_id(&self) -> Result<RawId> {
        let mut id = RawId([0; ID_BYTES]);
        // SAFETY: the pointer is to an id that lives.
        let code = unsafe { (self.ncclGetUniqueId)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Begins a group of calls on this thread, which [`group_end`](Self::group_end) submits.
    pub(crate) fn group_start(&self) -> Result<()> {
        // SAFETY: no preconditions.
        let code = unsafe { (self.ncclGroupStart)() };
        self.check("ncclGroupStart", code)
    }

    /// Ends the group. For an initialization: returns when every rank of the communicator has come. For collectives: when the work is on
    /// its streams.
    pub(crate) fn group_end(&self) -> Result<()> {
        // SAFETY: no preconditions; without a group it is refused.
        let code = unsafe { (self.ncclGroupEnd)() };
        self.check("ncclGroupEnd", code)
    }

    /// Makes a rank's handle, in a group, on the device whose context is current.
    ///
    /// # Safety
    /// The handle stays where it is until the group has ended, and is not read before.
    pub(crate) unsafe fn init_rank(
        &self,
        handle: &mut Comm,
        world: usize,
        id: RawId,
        rank: usize,
    ) -> Result<()> {
        let mut config = Config::blocking();
        let (comm, world, rank) = (&raw mut *handle, world as c_int, rank as c_int);
        // SAFETY: NCCL copies the configuration in the call; a handle is a pointer, and the caller vouches for its place.
        let code =
            unsafe { (self.ncclCommInitRankConfig)(comm.cast(), world, id, rank, &raw mut config) };
        self.check("ncclCommInitRankConfig", code)
    }

    /// Whether the library has [`shrink`](Self::shrink).
    pub(crate) fn can_shrink(&self) -> bool {
        self.shrink.is_some()
    }

    /// Makes a rank's handle of a communicator without some of the ranks, in a group, on the device of the parent, with the parent's
    /// configuration. With `aborts` it tells the parent's work to stop, and waits for that.
    ///
    /// # Safety
    /// The parent's handle is live and no collective call uses it until the group has ended; the new handle stays where it is until
    /// then, and is not read before. The rank is not excluded.
    pub(crate) unsafe fn shrink(
        &self,
        parent: Comm,
        excluded: &[usize],
        handle: &mut Comm,
        aborts: bool,
    ) -> Result<()> {
        let call = "ncclCommShrink";
        let Some(shrink) = self.shrink else {
            return Err(Error::MissingSymbol { library: "NCCL", symbol: call });
        };
        // NCCL sorts it.
        let mut excluded: Vec<c_int> = excluded.iter().map(|rank| *rank as c_int).collect();
        let (parent, comm) = (parent.0 as RawComm, (&raw mut *handle).cast());
        let (list, count) = (excluded.as_mut_ptr(), excluded.len() as c_int);
        let flags = SHRINK_FLAGS[usize::from(aborts)];
        // SAFETY: the caller vouches for the handles; NCCL copies the list in the call; without a configuration it takes the parent's.
        let code = unsafe { shrink(parent, list, count, comm, std::ptr::null_mut(), flags) };
        self.check(call, code)
    }

    /// The error that NCCL's threads found, as a number; 0 is none.
    ///
    /// # Safety
    /// The handle is live, and stays so during the call.
    pub(crate) unsafe fn async_error(&self, comm: Comm) -> i32 {
        let mut found = 0;
        // SAFETY: the caller vouches for the handle; the pointer is to an integer that lives.
        let code = unsafe { (self.ncclCommGetAsyncError)(comm.0 as RawComm, &raw mut found) };
        if code == 0 { found } else { code }
    }

    /// Flushes what is pending, in a group.
    ///
    /// # Safety
    /// The handle is live, and nobody else uses it.
    pub(crate) unsafe fn finalize(&self, comm: Comm) -> Result<()> {
        // SAFETY: the caller vouches for the handle.
        let code = unsafe { (self.ncclCommFinalize)(comm.0 as RawComm) };
        self.check("ncclCommFinalize", code)
    }

    /// Frees a handle.
    ///
    /// # Safety
    /// The handle is live, and used by nobody, now or later.
    pub(crate) unsafe fn destroy(&self, comm: Comm) -> Result<()> {
        // SAFETY: the caller vouches for the handle.
        let code = unsafe { (self.ncclCommDestroy)(comm.0 as RawComm) };
        self.check("ncclCommDestroy", code)
    }

    /// Tells the work of a handle to stop, at once; frees the handle when the group of the caller ends.
    ///
    /// # Safety
    /// The handle is live; calls that use it may be running, none begins any more, and the group of this thread is ended when none
    /// is running.
    pub(crate) unsafe fn abort_in_group(&self, comm: Comm) -> Result<()> {
        // SAFETY: the caller vouches for the handle. What running calls see of this is a flag that they are made to look at.
        let code = unsafe { (self.ncclCommAbort)(comm.0 as RawComm) };
        self.check("ncclCommAbort", code)
    }
}

macro_rules! collectives {
    ($($(#[$meta:meta])* $method:ident($($arg:ident: $type:ty),*) = $name:ident(|$lane:ident| $($value:expr),*);)+) => {
        /// Collectives: each puts its work on the stream of the lane, or adds it to the group of the thread.
        ///
        /// # Safety
        /// Of all of them: the handle is live and of the stream's device, no other thread makes a collective call meanwhile,
        /// and the memory is as long as the call says and used by nobody else while the work runs.
        impl Nccl {
            $(
                $(#[$meta])*
                pub(crate) unsafe fn $method(&self, lane: Lane, memory: Addresses, count: usize, element: ElementType $(, $arg: $type)*) -> Result<()> {
                    let (comm, stream) = lane.parts();
                    let (from, to) = memory.parts();
                    let $lane = Raw { from, to, count, element: element_code(element) };
                    // SAFETY: the caller vouches for the handle, the stream and the memory.
                    let code = unsafe { (self.$name)($($value,)* comm, stream) };
                    self.check(stringify!($name), code)
                }
            )+
        }
    };
}

/// The arguments that most calls have.
struct Raw {
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
}

collectives! {
    all_reduce(by: Reduction) = ncclAllReduce(|raw| raw.from, raw.to, raw.count, raw.element, reduction_code(by));
    reduce(by: Reduction, root: usize) = ncclReduce(|raw| raw.from, raw.to, raw.count, raw.element, reduction_code(by), root as c_int);
    broadcast(root: usize) = ncclBroadcast(|raw| raw.from, raw.to, raw.count, raw.element, root as c_int);
    all_gather() = ncclAllGather(|raw| raw.from, raw.to, raw.count, raw.element);
    reduce_scatter(by: Reduction) = ncclReduceScatter(|raw| raw.from, raw.to, raw.count, raw.element, reduction_code(by));
    send(peer: usize) = ncclSend(|raw| raw.from, raw.count, raw.element, peer as c_int);
    receive(peer: usize) = ncclRecv(|raw| raw.to, raw.count, raw.element, peer as c_int);
}

/// `ncclDataType_t`.
fn element_code(element: ElementType) -> c_int {
    match element {
        ElementType::I8 => 0,
        ElementType::U8 => 1,
        ElementType::I32 => 2,
        ElementType::U32 => 3,
        ElementType::I64 => 4,
        ElementType::U64 => 5,
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::Bf16 => 9,
    }
}

/// `ncclRedOp_t`.
fn reduction_code(by: Reduction) -> c_int {
    match by {
        Reduction::Sum => 0,
        Reduction::Product => 1,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Average => 4,
    }
}

fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's texts end with a zero byte, and live at least until the next call on this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ncclConfig_v21700`, whose size NCCL reads first.
    #[test]
    fn the_configuration_is_laid_out_as_in_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }
}
