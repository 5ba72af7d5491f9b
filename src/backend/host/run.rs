//! The commands of a host device, and how each runs.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::state::{Books, Everybody, HostEvent};
use super::{HostBackend, HostCore, NOT_SUPPORTED};
use crate::backend::{
    ArgBlock, Arguments, DevicePtr, DriverResult, Function, Grid, HostCallback, HostPtr, HostTwin,
    KernelAttributes, LaunchShape, ModuleCalls, Pattern, RawFunction, RawModule, RawStream,
    RowCopy,
};
use crate::error::DriverCode;
use crate::error::image::ParamLayout;
use crate::thread::role::Role;
use crate::thread::{contain, role, turn};

pub(super) enum Command {
    Alloc(DevicePtr),
    Free(DevicePtr),
    CopyIn {
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    },
    CopyOut {
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    },
    Copy {
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    },
    CopyRows(Box<RowCopy>),
    Fill {
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    },
    Launch(Box<Launch>),
    /// All nodes of a graph, in order.
    Graph(Vec<GraphStep>),
    HostFn {
        callback: HostCallback,
        data: HostPtr,
    },
    Record {
        event: Arc<HostEvent>,
        generation: u64,
    },
    Wait {
        event: Arc<HostEvent>,
        generation: u64,
    },
    Word {
        word: DevicePtr,
        value: u64,
    },
    Arrive {
        everybody: Arc<Everybody>,
    },
}

/// A node of a launched graph.
pub(super) enum GraphStep {
    Launch(Box<Launch>),
    Record { event: Arc<HostEvent>, generation: u64 },
}

#[derive(Clone)]
pub(super) struct Launch {
    pub(super) function: HostTwin,
    pub(super) kernel: Arc<str>,
    pub(super) shape: LaunchShape,
    pub(super) args: ArgBlock,
}

impl Command {
    /// Whether it takes a slot in the stream's queue, as launches, fills and copies do on an H200.
    pub(super) fn counts(&self) -> bool {
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

    /// The role of the user code that it runs, if any.
    pub(super) fn role(&self) -> Option<Role> {
        match self {
            Command::HostFn { .. } => Some(Role::HostFn),
            Command::Launch(_) | Command::Graph(_) => Some(Role::Twin),
            _ => None,
        }
    }

    /// Drops it without running it.
    pub(super) fn discard(self) {
        match self {
            Command::Launch(launch) => launch.discard(),
            Command::Graph(steps) => steps.into_iter().for_each(GraphStep::discard),
            Command::Record { event, generation } => event.discard(generation),
            _ => {}
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        match self {
            Command::Wait { event, generation } => event.reached.lock().generation >= *generation,
            _ => true,
        }
    }

    pub(super) fn run(self, shared: &HostCore, books: &Books) -> std::result::Result<(), String> {
        match self {
            Command::Alloc(ptr) => shared.make_live(ptr),
            Command::Free(ptr) => shared.release(ptr),
            Command::CopyIn { dst, src, bytes } => {
                let dst = shared.touch(dst, bytes)?;
                // SAFETY: `touch` proved `dst` live for `bytes`; the submitter keeps `src` valid until this command is
                // complete, whether it is host memory or another device's; neither overlaps with this device's memory.
                unsafe { std::ptr::copy_nonoverlapping(src.0 as *const u8, dst, bytes as usize) };
                Ok(())
            }
            Command::CopyOut { dst, src, bytes } => {
                let src = shared.touch(src, bytes)?;
                // SAFETY: as above, in the other direction.
                unsafe { std::ptr::copy_nonoverlapping(src, dst.0 as *mut u8, bytes as usize) };
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
            Command::Launch(launch) => launch.run_and_discard(shared),
            Command::Graph(steps) => {
                let mut steps = steps.into_iter();
                let ran = steps.by_ref().try_for_each(|step| step.run(shared));
                // Others may follow the one that failed.
                steps.for_each(GraphStep::discard);
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
            Command::Arrive { everybody } => {
                everybody.arrive(books);
                Ok(())
            }
            Command::Wait { event, generation } => {
                let mut reached = event.reached.lock();
                while reached.generation < generation && shared.fault.get().is_none() {
                    if event.never_comes(generation) {
                        books.stand_still();
                        // ORDERING: SeqCst, see `stream_destroy`.
                        if books.destroyed.load(Ordering::SeqCst) {
                            // ORDERING: Relaxed: only this thread reads it.
                            books.given_up.store(true, Ordering::Relaxed);
                            break;
                        }
                    }
                    // The limit only bounds how late a fault elsewhere is noticed.
                    let changed = &event.changed;
                    reached = turn::rest(|| changed.wait_for(reached, Duration::from_millis(20)));
                }
                // It continues, or discards the rest. ORDERING: Relaxed, see `stand_still`.
                books.stands_still.store(false, Ordering::Relaxed);
                Ok(())
            }
            Command::Word { word, value } => {
                let word: *mut u64 = word.0 as *mut u64;
                // SAFETY: the engine keeps the word, 8-byte aligned, until it has seen its last value.
                let word = unsafe { AtomicU64::from_ptr(word) };
                // ORDERING: Release: a reader of the value sees the stream's earlier writes.
                word.store(value, Ordering::Release);
                Ok(())
            }
        }
    }
}

impl GraphStep {
    fn run(self, shared: &HostCore) -> std::result::Result<(), String> {
        match self {
            GraphStep::Launch(launch) => launch.run_and_discard(shared),
            GraphStep::Record { event, generation } => {
                event.reach(generation);
                Ok(())
            }
        }
    }

    fn discard(self) {
        match self {
            GraphStep::Launch(launch) => launch.discard(),
            GraphStep::Record { event, generation } => event.discard(generation),
        }
    }
}

impl Launch {
    fn run_and_discard(self: Box<Self>, shared: &HostCore) -> std::result::Result<(), String> {
        let ran = self.run(shared);
        self.discard();
        ran
    }

    /// Drops it: if it holds the last reference to a user's twin, that drops the twin's captures too.
    pub(super) fn discard(self: Box<Self>) {
        contain::contain("the drop of what a kernel's host twin captured", || drop(self));
    }

    pub(super) fn run(&self, shared: &HostCore) -> std::result::Result<(), String> {
        for (address, bytes) in self.args.arguments().memory() {
            let touched = shared.touch(DevicePtr(address), bytes);
            touched.map_err(|what| format!("kernel `{}`: {what}", self.kernel))?;
        }
        turn::rest(|| contain::catch(|| (self.function)(&self.shape.grid, &self.args)))
            .map_err(|message| format!("the host twin of `{}` panicked: {message}", self.kernel))
    }
}

impl HostCore {
    /// Runs one command of a stream and keeps its books.
    pub(super) fn execute(&self, books: &Books, command: Command) {
        let counts = command.counts();
        // This covers the drop of the command's values as well, which is user code.
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
        if last {
            self.unearth();
        }
    }

    /// Forgets a destroyed stream: its worker ends.
    pub(super) fn forget(&self, books: &Books) {
        let stream = self.streams.write().remove(&books.handle);
        drop(stream);
    }
}

impl ModuleCalls for HostBackend {
    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()> {
        const CALL: &str = "launch";
        let Function::Host { twin, kernel, .. } = function else {
            return Err(DriverCode { call: CALL, code: NOT_SUPPORTED });
        };
        let (function, kernel) = (twin.clone(), kernel.clone());
        let launch = Launch { function, kernel, shape: *shape, args: args.to_block() };
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

    unsafe fn active_clusters(
        &self,
        _function: RawFunction,
        _grid: &Grid,
        _stream: Option<RawStream>,
    ) -> DriverResult<u32> {
        Err(DriverCode { call: "active_clusters", code: NOT_SUPPORTED })
    }
}
