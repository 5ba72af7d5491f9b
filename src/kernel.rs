//! Kernels: typed, checked before every launch, on either kind of device.
//!
//! | item | what it is |
//! |---|---|
//! | [`kernel!`](crate::kernel!) | declares a kernel: types, preconditions, geometry, PTX, host twin |
//! | [`Kernel<S>`] | a loaded kernel whose arguments have the types `S` |
//! | [`Module`] | a loaded image, for kernels that are looked up at run time |
//! | [`CudaSource`](crate::CudaSource) | CUDA C++, compiled at run time |
//! | [`LaunchConfig`] | grid, block, dynamic shared memory, cluster |
//! | [`Occupancy`](crate::Occupancy) | how many blocks run at once, the best block size |
//!
//! # Safety of kernels
//! The driver does not check a kernel's arguments. Declaring a kernel is therefore `unsafe`, once: the author vouches that the argument
//! types match the kernel's source, and that the kernel stays inside the memory it is passed for all arguments that its preconditions
//! admit. The preconditions are checked before every launch that reaches the device, so launching is safe.

#[cfg(feature = "cuda")]
mod compile;
pub(crate) mod declared;
#[cfg(feature = "cuda")]
mod disk_cache;
mod expansion;
pub(crate) mod image;
pub(crate) mod integers;
pub(crate) mod launch_config;
mod macros;
pub(crate) mod module;
pub(crate) mod occupancy;
pub(crate) mod plain;
mod programmatic;
mod ptx;
pub(crate) mod rows;
mod shared_modules;
pub(crate) mod signature;
pub(crate) mod source;
pub(crate) mod table;
pub(crate) mod untyped;
mod value_macros;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::{Function, HostTwin, KernelAttributes, LaunchShape};
use crate::batch::queue::Queue;
use crate::device::Device;
use crate::error::{Error, ErrorDetail, Result};
use crate::op::Op;
use crate::runtime::Engine;
use crate::stream::Stream;
use crate::submit::{KernelCode, KernelLaunch, wrong_device};
use crate::thread::contain;
use integers::NoValue;
use launch_config::LaunchConfig;
use module::LoadedModule;
use signature::{ArgList, Args, Signature, TwinFn};

/// A loaded kernel whose arguments have the types `S`, a tuple of plain values,
/// [`In<T>`](crate::In), [`InOut<T>`](crate::InOut), [`Out<T>`](crate::Out) and
/// [`Flag`](crate::Flag). Cheap to clone.
///
/// Passing something else does not compile:
/// ```compile_fail
/// # use gpu_await::*;
/// # fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>) {
/// s.launch(k, LaunchConfig::for_elements(4), (2.0, x, x)); // `x` is shared, the kernel writes it
/// # }
/// ```
pub struct Kernel<S: Signature> {
    core: Arc<Core>,
    requirements: Arc<Vec<Requirement<S>>>,
    names: &'static [&'static str],
}

struct Core {
    engine: Arc<Engine>,
    name: Arc<str>,
    function: Function,
    attributes: KernelAttributes,
    /// Keeps the code loaded.
    module: Option<Arc<LoadedModule>>,
    /// Whether the driver was asked to allow more shared memory than the default.
    shared_mem_allowed: AtomicBool,
    /// It was launched before, so the driver's first-launch setup is done.
    launched: AtomicBool,
}

struct Requirement<S: Signature> {
    text: &'static str,
    holds: Box<Check<S>>,
}

type Check<S> = dyn Fn(&LaunchConfig, &<S as Signature>::Shapes) -> bool + Send + Sync;

/// Something that kernels are launched on: [`Stream`] and [`Device`] (the launch is a future), and
/// [`Queue`] (inside a batch, the launch is a plain result). Sealed.
#[diagnostic::on_unimplemented(
    message = "a kernel cannot be launched on `{Self}`",
    label = "not a stream",
    note = "launch on a `Stream`, a `PooledStream`, a `Device` (its current stream) or, inside a batch, its `Queue`"
)]
pub trait LaunchOn: sealed::Sealed {
    /// The return type of a launch.
    type Launched;

    #[doc(hidden)]
    #[track_caller]
    fn launch_kernel<'k, S: Signature>(
        &self,
        kernel: &'k Kernel<S>,
        config: Result<LaunchConfig, NoValue>,
        args: impl Args<'k, S>,
    ) -> Self::Launched {
        self.batch_of_one(|queue| kernel.submit(queue, config, args))
    }

    #[doc(hidden)]
    #[track_caller]
    fn batch_of_one(&self, put: impl FnOnce(&Queue<'_>) -> Result<()>) -> Self::Launched;
}

pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Stream {}
    impl Sealed for super::Device {}
    impl Sealed for super::Queue<'_> {}
}

impl<S: Signature> Kernel<S> {
    /// Makes a kernel for the host device only: `twin` is called once per launch, for the whole grid.
    ///
    /// A twin occupies its stream while it runs. Inside a twin, calls that submit or block fail with
    /// [`ErrorDetail::WrongThread`].
    ///
    /// The twin must overwrite all of an [`Out`](crate::Out); that is trusted, not checked, and the memory
    /// counts as written from then on. Elements that the twin skips keep their old value: in memory never
    /// written before, the `0xA5` bytes with which a host device fills new memory.
    ///
    /// # Errors
    /// [`ErrorDetail::NoImplementation`] on another kind of device.
    pub fn host(device: &Device, name: &str, twin: impl TwinFn<S>) -> Result<Self> {
        Kernel::host_erased(device.engine(), name, twin.erase())
    }

    /// [`host`](Self::host) for a twin whose types have been checked.
    pub(crate) fn host_erased(engine: &Arc<Engine>, name: &str, twin: HostTwin) -> Result<Self> {
        if engine.backend.kind() != crate::DeviceKind::Host {
            return Err(no_implementation(name, engine));
        }
        let max_threads_per_block = engine.limits.threads_per_block;
        let attributes = KernelAttributes { max_threads_per_block, ..KernelAttributes::default() };
        let function = Function::Host { twin, kernel: name.into(), waits_first: false };
        Ok(Kernel::new(engine, name, function, attributes, None))
    }

    fn new(
        engine: &Arc<Engine>,
        name: &str,
        function: Function,
        attributes: KernelAttributes,
        module: Option<Arc<LoadedModule>>,
    ) -> Self {
        let core = Core {
            engine: engine.clone(),
            name: Arc::from(name),
            function,
            attributes,
            module,
            shared_mem_allowed: AtomicBool::new(false),
            launched: AtomicBool::new(false),
        };
        Kernel { core: Arc::new(core), requirements: Arc::default(), names: &[] }
    }

    /// Adds a precondition that is checked before every launch that reaches the device; launches of [nothing](LaunchConfig::nothing) are not
    /// checked. `text` appears in the error. A clone with further preconditions reports the original's as a whole, without their texts.
    ///
    /// # Examples
    /// ```
    /// # use gpu_await::*;
    /// # let device = Device::host();
    /// let double = Kernel::<(InOut<f32>, u32)>::host(&device, "double", |_: &Grid, x: &mut [f32], n: u32| {
    ///     x[..n as usize].iter_mut().for_each(|x| *x *= 2.0);
    /// })?
    /// .require("n <= x.len()", |_, (x, n)| *n as usize <= x.len());
    /// let stream = device.stream()?;
    /// let mut x = stream.full(3, 1.0f32).queued()?;
    /// let error = stream.launch(&double, LaunchConfig::for_elements(3), (&mut x, 4)).queued().unwrap_err();
    /// assert!(error.to_string().contains("n <= x.len()"));
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn require(
        mut self,
        text: &'static str,
        holds: impl Fn(&LaunchConfig, &S::Shapes) -> bool + Send + Sync + 'static,
    ) -> Self {
        let requirement = Requirement { text, holds: Box::new(holds) };
        match Arc::get_mut(&mut self.requirements) {
            Some(requirements) => requirements.push(requirement),
            // Clones of this kernel keep their own; the checks cannot be copied, so chain them.
            None => {
                let before = self.requirements.clone();
                let chained = Requirement {
                    text: "the preconditions of the kernel that this one was made from",
                    holds: Box::new(move |config: &LaunchConfig, shapes: &S::Shapes| {
                        before.iter().all(|r| (r.holds)(config, shapes))
                    }),
                };
                self.requirements = Arc::new(vec![chained, requirement]);
            }
        }
        self
    }

    /// Names the arguments for messages.
    fn named(mut self, names: &'static [&'static str]) -> Self {
        self.names = names;
        self
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core.name
    }

    #[inline(always)]
    fn check(&self, config: &LaunchConfig, is_simple: bool, shapes: &S::Shapes) -> Result<()> {
        if !config.is_nothing() {
            self.core.check_limits(config, is_simple)?;
        }
        if self.requirements.is_empty() {
            return Ok(());
        }
        // The requirement evaluated last, in case it panics.
        let last = Cell::new("");
        let failed = contain::hold(|| {
            self.requirements.iter().find(|requirement| {
                last.set(requirement.text);
                !(requirement.holds)(config, shapes)
            })
        });
        match failed {
            Ok(None) => Ok(()),
            failed => Err(self.unmet(shapes, failed, last.get())),
        }
    }

    /// The error for a requirement that does not hold, or for `what`, which panicked.
    #[cold]
    #[inline(never)]
    fn unmet(
        &self,
        shapes: &S::Shapes,
        failed: std::thread::Result<Option<&Requirement<S>>>,
        what: &'static str,
    ) -> Error {
        let kernel = self.name().to_owned();
        match failed {
            Err(payload) => {
                let message = contain::message_of(payload);
                ErrorDetail::Evaluation { kernel, what, message }.into()
            }
            Ok(failed) => {
                let requirement = failed.map_or(what, |Requirement { text, .. }| text);
                let values = S::describe(shapes, self.names);
                ErrorDetail::Precondition { kernel, requirement, values }.into()
            }
        }
    }

    /// Puts a launch on the queue's stream, unless its grid is empty.
    fn submit<'k>(
        &'k self,
        queue: &Queue<'_>,
        config: Result<LaunchConfig, NoValue>,
        args: impl Args<'k, S>,
    ) -> Result<()> {
        let core = &*self.core;
        let mut list = ArgList::new();
        let shapes = args.collect(&mut list);
        let ArgList { block, footprint, waits } = &mut list;
        footprint.launches(&core.name);
        let stream = queue.stream;
        let engine = &stream.engine;
        if !Arc::ptr_eq(&core.engine, engine) && core.engine.state.id != engine.state.id {
            return Err(footprint.poison(wrong_device("the kernel", engine, &core.engine)));
        }
        let config = match config {
            Ok(config) => config,
            Err(why) => return Err(footprint.poison(why.of(&core.name))),
        };
        // Computed once: the check below calls user code.
        let is_simple = config.is_simple();
        let mut checked = self.check(&config, is_simple, &shapes);
        let is_nothing = config.is_nothing();
        if !is_simple && !is_nothing {
            checked = checked.and_then(|()| core.admit(&config, stream));
        }
        checked.map_err(|error| footprint.poison(error))?;
        if is_nothing {
            return Ok(());
        }
        if *waits {
            footprint.may_be_held_up = true;
        }
        // ORDERING: Relaxed, here and below: a hint.
        if !core.launched.load(Ordering::Relaxed) {
            core.launched.store(true, Ordering::Relaxed);
            footprint.may_block = true;
        }
        let shape = LaunchShape {
            cooperative: config.is_cooperative(),
            ..LaunchShape::plain(config.grid())
        };
        queue.submit_launch(
            footprint,
            &KernelLaunch::new(&self.core, &core.function, shape, block),
        )?;
        Ok(())
    }
}

impl KernelCode for Core {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl<S: Signature> Clone for Kernel<S> {
    fn clone(&self) -> Self {
        Kernel {
            core: self.core.clone(),
            requirements: self.requirements.clone(),
            names: self.names,
        }
    }
}

impl<S: Signature> fmt::Debug for Kernel<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({} on {})", self.core.name, self.core.engine.label())
    }
}

impl LaunchOn for Stream {
    type Launched = Op<()>;

    fn batch_of_one(&self, put: impl FnOnce(&Queue<'_>) -> Result<()>) -> Op<()> {
        self.one(put)
    }
}

/// On the device's [current stream](Device::current_stream).
impl LaunchOn for Device {
    type Launched = Op<()>;

    fn batch_of_one(&self, put: impl FnOnce(&Queue<'_>) -> Result<()>) -> Op<()> {
        self.current_stream().one(put)
    }
}

impl LaunchOn for Queue<'_> {
    type Launched = Result<()>;

    fn batch_of_one(&self, put: impl FnOnce(&Queue<'_>) -> Result<()>) -> Result<()> {
        self.verb(|| put(self))
    }
}

/// Makes the method `launch`, which needs no trait in scope.
macro_rules! launch {
    ($($(#[$meta:meta])* $on:ty;)+) => {$(
        impl $on {
            $(#[$meta])*
            #[track_caller]
            pub fn launch<'k, S: Signature>(
                &self,
                kernel: &'k Kernel<S>,
                config: LaunchConfig,
                args: impl Args<'k, S>,
            ) -> <Self as LaunchOn>::Launched {
                self.launch_kernel(kernel, Ok(config), args)
            }
        }
    )+};
}

launch! {
    /// Puts a kernel launch on the stream. Ready proves *complete on the device*.
    ///
    /// Buffers are borrowed for the call only: `&x` for [`In`](crate::In), `&mut y` for
    /// [`InOut`](crate::InOut) and [`Out`](crate::Out). If other streams still use them, this stream waits
    /// for that work on the device.
    ///
    /// # Errors
    /// Refused before the driver sees it: a precondition that does not hold, with the values
    /// ([`ErrorDetail::Precondition`]); an extent that is zero or over a limit, with the requested and the
    /// allowed value ([`ErrorDetail::LaunchLimit`]: grid and block by axis, threads, registers
    /// and shared memory of a block, the blocks that a cooperative launch needs resident at once); a grid that
    /// is not a whole number of clusters ([`ErrorDetail::PartialCluster`]); clusters or a cooperative
    /// launch on a device without support ([`ErrorDetail::Unsupported`]); buffers or a kernel of another
    /// device; inputs that were never written or whose producer failed. The outputs are then poisoned
    /// until they are overwritten.
    ///
    /// # Blocking
    /// The driver blocks the thread when about a thousand launches are queued on the stream; see
    /// [`throttle`](Stream::throttle). The first launch of a kernel may also wait while the driver sets it
    /// up: launch each kernel once before serving. A launch that shares memory with other streams also needs an event
    /// from the device's pool of a few dozen: if all are in use, the driver creates one, which blocks while
    /// another stream's [queue is full](Stream#blocking).
    ///
    /// # Source
    /// `cuLaunchKernel`; `cuLaunchCooperativeKernel`; with clusters, `cuLaunchKernelEx`.
    Stream;
    /// Puts a kernel launch on the [current stream](Device::current_stream); see
    /// [`Stream::launch`].
    ///
    /// # Errors
    /// As [`Stream::launch`].
    Device;
    /// Puts a kernel launch on the stream of the batch; see [`Stream::launch`].
    ///
    /// # Errors
    /// As [`Stream::launch`].
    Queue<'_>;
}

fn no_implementation(kernel: &str, engine: &Engine) -> crate::Error {
    let device = match engine.backend.kind() {
        crate::DeviceKind::Cuda => "CUDA",
        crate::DeviceKind::Host => "host",
    };
    ErrorDetail::NoImplementation { kernel: kernel.to_owned(), device }.into()
}
