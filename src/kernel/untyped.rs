//! [`UntypedKernel`]: kernels without a type, the basis of a sibling crate's verbs.
//!
//! A verb is a few launches on a queue, so it works wherever a launch does: on a stream, in a batch, a replayed batch or a graph. Each
//! launch declares its memory in a [`Footprint`]; the sibling's kernels are found at run time, so their author vouches for both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::{ArgBlock, DeviceKind, Function, Grid, HostTwin, LaunchShape, RawFunction};
use crate::batch::queue::Queue;
use crate::batch::settle::{Lent, Settle, Settled};
use crate::device::Device;
use crate::device::home::Home;
use crate::error::Result;
use crate::kernel::image::Image;
use crate::kernel::module::{LoadedModule, Module};
use crate::memory::Element;
use crate::memory::allocation::AllocationHazards;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::view::{Span, Writable};
use crate::memory::view_2d::{View2, ViewMut2};
use crate::op::{HostValue, Op, Values};
use crate::runtime::coop;
use crate::stream::Stream;
use crate::submit::{Footprint, KernelCode, KernelLaunch, wrong_device};
use crate::thread::role;
use crate::thread::worker::offload;

/// A kernel known only by its name.
pub struct UntypedKernel {
    name: Arc<str>,
    function: Function,
    /// It was launched before, so the driver's first-launch setup is done.
    launched: AtomicBool,
    /// Keeps the code loaded.
    module: Option<Arc<LoadedModule>>,
}

impl KernelCode for UntypedKernel {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl UntypedKernel {
    /// A kernel of a host device.
    ///
    /// # Safety
    /// Each launch passes the arguments that the twin reads, and its footprint declares all memory that the twin touches, with its kind of access.
    #[must_use]
    pub unsafe fn twin(name: &str, twin: HostTwin) -> Arc<Self> {
        let name: Arc<str> = name.into();
        // Like kernels on GPUs that can start them early.
        let function = Function::Host { twin, kernel: name.clone(), waits_first: true };
        let launched = AtomicBool::new(true);
        Arc::new(UntypedKernel { name, function, launched, module: None })
    }

    /// A kernel of an image; messages call it `name`. `waits_first` says that the kernel in the loaded image waits first: every thread of every block
    /// executes `griddepcontrol.wait` before it can have any effect, whatever the arguments. A device that starts no kernel early ignores
    /// it.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// Each launch passes the arguments of the kernel, and its footprint declares all memory that the kernel touches, with its kind of access.
    pub unsafe fn find(
        module: &Module,
        entry: &str,
        name: &str,
        waits_first: bool,
    ) -> Result<Arc<Self>> {
        let found = module.function(entry)?;
        let limits = &module.loaded().engine().limits;
        let waits_first = waits_first && limits.compute_capability.0 >= 9;
        let function = Function::Device(RawFunction { waits_first, ..found });
        let (launched, module) = (AtomicBool::new(false), Some(module.loaded().clone()));
        Ok(Arc::new(UntypedKernel { name: name.into(), function, launched, module }))
    }

    /// The kernel `entry` of an image, named after the image in messages; see [`find`](Self::find). If it is missing, nothing stays
    /// loaded.
    ///
    /// # Errors
    /// As [`load`], and the driver's refusal.
    ///
    /// # Safety
    /// As [`find`](Self::find).
    pub unsafe fn load(
        home: &Home,
        image: Image,
        entry: &str,
        waits_first: bool,
    ) -> Result<Arc<Self>> {
        let name = image.name.clone();
        let module = load(home, image)?;
        // SAFETY: the caller's contract.
        let found = unsafe { UntypedKernel::find(&module, entry, &name, waits_first) };
        if found.is_err() {
            module.unload();
        }
        found
    }

    /// The number of blocks of this many threads that are resident on a multiprocessor at once; at least 1.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn active_blocks(&self, threads: u32) -> Result<u32> {
        let (Function::Device(function), Some(module)) = (&self.function, &self.module) else {
            return Ok(1);
        };
        let engine = module.engine();
        let active = module.active_blocks(*function, threads, 0);
        let active = active.map_err(|code| engine.refused(code))?;
        Ok(active.max(1))
    }

    /// Puts a launch on the queue's stream.
    ///
    /// # Errors
    /// Those of any launch; the footprint's outputs are then poisoned.
    pub fn launch(
        self: &Arc<Self>,
        queue: &Queue<'_>,
        footprint: &mut Footprint<'_>,
        args: &ArgBlock,
        (blocks, threads): (u32, u32),
    ) -> Result<()> {
        // ORDERING: Relaxed, twice: a hint, as for any kernel.
        if !self.launched.load(Ordering::Relaxed) {
            self.launched.store(true, Ordering::Relaxed);
            footprint.may_block = true;
        }
        let grid = Grid {
            grid_dim: [blocks, 1, 1],
            block_dim: [threads, 1, 1],
            cluster_dim: [1, 1, 1],
            shared_mem_bytes: 0,
        };
        let (function, shape) = (&self.function, LaunchShape::plain(grid));
        let launch = KernelLaunch::new(self, function, shape, args);
        Ok(queue.submit_launch(footprint, &launch)?)
    }
}

/// The destination of a result.
#[derive(Clone)]
pub struct ResultTarget<'k>(Destination<'k>);

#[derive(Clone)]
enum Destination<'k> {
    Memory(Span<'k>),
    Pinned(&'k Arc<PinnedBlock>, u64),
}

impl<'k> ResultTarget<'k> {
    /// Memory of the device.
    #[must_use]
    pub fn memory(span: Span<'k>) -> Self {
        ResultTarget(Destination::Memory(span))
    }

    /// Adds it to a launch, as the next argument.
    pub fn enter(&self, footprint: &mut Footprint<'k>, args: &mut ArgBlock) {
        match &self.0 {
            Destination::Memory(span) => {
                footprint.overwrites(span);
                args.push_memory(span.address(), span.size_bytes());
            }
            Destination::Pinned(block, bytes) => {
                footprint.lends(block);
                args.push_memory(block.device().0, *bytes);
            }
        }
    }
}

/// What a verb needs from a queue besides its public verbs.
pub trait VerbParts {
    /// State that the streams of the device share.
    fn home(&self) -> &Arc<Home>;

    /// Whether its launches become a graph.
    fn is_recording_graph(&self) -> bool;

    /// The number of multiprocessors that its launches run on: those of its stream. A graph may also be launched on streams with more or fewer.
    fn multiprocessors(&self) -> u32;

    /// The number of multiprocessors of the device, wherever its launches run: for work whose result depends on how it is divided.
    fn multiprocessors_of_device(&self) -> u32;

    /// Runs a verb: its errors name the line that called it.
    ///
    /// # Errors
    /// The verb's errors.
    #[track_caller]
    fn verb<R>(&self, put: impl FnOnce() -> Result<R>) -> Result<R>;

    /// Scratch memory for an operation of several launches.
    ///
    /// # Errors
    /// Out of memory; a lost or closed device.
    #[track_caller]
    fn scratch<T: Element>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>>;

    /// Whether using the buffer would wait for no other stream: its uses elsewhere are complete.
    fn is_free<T: Element>(&self, buffer: &DeviceBuffer<T>) -> bool;

    /// Refuses memory of another device, before anything is loaded, allocated or put on the stream for an operation.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`](crate::ErrorDetail::WrongDevice).
    fn check_memory<'m>(&self, memory: impl IntoIterator<Item = &'m Span<'m>>) -> Result<()>;

    /// The checks of a launch, for an operation that runs nothing.
    ///
    /// # Errors
    /// As a launch.
    fn put_nothing(&self, footprint: &Footprint<'_>) -> Result<()>;

    /// Has `put`, of the operation `op`, write one value, which the host reads when the write is complete.
    ///
    /// On a GPU the kernel writes it to pinned memory, which holds `unwritten` before. On a host device, where kernels reach only
    /// device memory, it is downloaded.
    ///
    /// # Errors
    /// Out of memory; the errors of `put`.
    fn to_host<R: Element, H: Send + 'static>(
        &self,
        op: &'static str,
        unwritten: R,
        put: impl FnOnce(&ResultTarget<'_>) -> Result<()>,
        read: impl FnOnce(R) -> Result<H> + Send + 'static,
    ) -> Result<Lent<H>>;
}

impl VerbParts for Queue<'_> {
    fn home(&self) -> &Arc<Home> {
        self.home
    }

    fn is_recording_graph(&self) -> bool {
        Queue::is_recording_graph(self)
    }

    fn multiprocessors(&self) -> u32 {
        let stream = self.stream;
        stream.driver.multiprocessors(&*stream.engine.backend).max(1)
    }

    fn multiprocessors_of_device(&self) -> u32 {
        self.stream.engine.limits.multiprocessors.max(1)
    }

    fn verb<R>(&self, put: impl FnOnce() -> Result<R>) -> Result<R> {
        Queue::verb(self, put)
    }

    fn scratch<T: Element>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        Queue::scratch(self, op, len)
    }

    fn is_free<T: Element>(&self, buffer: &DeviceBuffer<T>) -> bool {
        let stream = self.stream.progress.id;
        buffer.memory().is_only_used_by(stream) || {
            let users = buffer.memory().with_hazards(AllocationHazards::users);
            users.iter().all(|used| used.stream.id == stream || used.is_complete())
        }
    }

    fn check_memory<'m>(&self, memory: impl IntoIterator<Item = &'m Span<'m>>) -> Result<()> {
        let engine = &self.stream.engine;
        match memory.into_iter().find(|span| span.memory.engine.state.id != engine.state.id) {
            Some(other) => Err(wrong_device("a buffer", engine, &other.memory.engine)),
            None => Ok(()),
        }
    }

    fn put_nothing(&self, footprint: &Footprint<'_>) -> Result<()> {
        self.submit_nothing(footprint)
    }

    fn to_host<R: Element, H: Send + 'static>(
        &self,
        op: &'static str,
        unwritten: R,
        put: impl FnOnce(&ResultTarget<'_>) -> Result<()>,
        read: impl FnOnce(R) -> Result<H> + Send + 'static,
    ) -> Result<Lent<H>> {
        if self.home.kind() == DeviceKind::Host {
            let mut out = Queue::scratch::<R>(self, op, 1)?;
            put(&ResultTarget::memory(out.span_mut()))?;
            let Lent(Settled { value, points }) = self.download(&out)?;
            let value = value.make(|value| read(value[0]));
            return Ok(Lent(Settled { value, points }));
        }
        let mut result = PinnedBuffer::<R>::new(&self.home.pinned, 1)?;
        result[0] = unwritten;
        put(&ResultTarget(Destination::Pinned(result.block(), result.size_bytes())))?;
        let value = HostValue::later(move || read(result[0]));
        Ok(Lent::to(self.stream, self.last.get(), self.proved(value)))
    }
}

/// A batch of one call, reported under the caller's line.
#[track_caller]
pub fn one<R: Settle>(
    stream: &Stream,
    call: impl FnOnce(&Queue<'_>) -> Result<R>,
) -> Op<R::Output> {
    stream.one(call)
}

/// The value of a completed download: in verify mode every download is complete when it returns.
///
/// # Errors
/// The download's error.
pub fn take_complete<T>(lent: Lent<T>) -> Result<T> {
    lent.0.value.take()
}

/// The memory of rows, from the start of the first to the end of the last.
#[must_use]
pub fn rows_span<'a, T>(rows: &View2<'a, T>) -> Span<'a> {
    rows.span()
}

/// The same, for writing.
#[must_use]
pub fn rows_span_mut<'a, T>(rows: &mut ViewMut2<'a, T>) -> Span<'a> {
    rows.span_mut()
}

/// Loads an image on the calling thread.
///
/// # Errors
/// As [`Module::load_blocking`], but without the check of the thread.
pub fn load(home: &Home, image: Image) -> Result<Module> {
    Module::load_now(&home.engine, image)
}

/// Has a device load something off the executor, ahead of its first use.
///
/// # Errors
/// The errors of `load`; a thread that must not call the driver, for `what`.
pub async fn load_ahead(
    device: &Device,
    what: &'static str,
    load: impl FnOnce(&Home) -> Result<()> + Send + 'static,
) -> Result<()> {
    let home = device.home().clone();
    off_executor(what, move || load(&home)).await
}

/// Runs `work` off the executor. Dropping the future leaves it running.
///
/// # Errors
/// The errors of `work`; a thread that must not call the driver, for `what`.
pub async fn off_executor<R: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<R> + Send + 'static,
) -> Result<R> {
    coop::proceed().await;
    role::check_driver(what)?;
    offload(work).await?
}
