//! [`Module`]: a loaded kernel image.

use std::fmt;
use std::sync::Arc;

use crate::backend::{DriverResult, Function, Grid, RawFunction, RawModule, RawStream};
use crate::device::Device;
use crate::error::image::ImageProblem;
use crate::error::{Error, ErrorDetail, Result};
use crate::kernel::Kernel;
use crate::kernel::image::Image;
use crate::kernel::programmatic::ImageVerdicts;
use crate::kernel::signature::Signature;
use crate::kernel::source::CudaSource;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::coop;
use crate::runtime::{Engine, UserList};
use crate::thread::role;
use crate::thread::worker::offload;

const NOT_FOUND: i32 = 500;

/// A loaded image (PTX, a cubin or a fatbin) on a CUDA device, whose kernels are found by name at run time.
///
/// # Source
/// `cuLibraryLoadData`.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<LoadedModule>,
    name: String,
}

pub(crate) struct LoadedModule {
    engine: Arc<Engine>,
    raw: RawModule,
    /// It is no longer loaded.
    is_gone: bool,
    /// Instances of templates, each with its name in the image.
    instances: Vec<(String, String)>,
    /// The names of its kernels, for errors.
    kernels: Vec<String>,
    verdicts: ImageVerdicts,
}

impl Module {
    /// Loads an image, off the executor: compiling PTX can take seconds.
    ///
    /// # Errors
    /// [`ErrorDetail::BadImage`] with the compiler's log, or the reason why it is not an image;
    /// [`ErrorDetail::NoImplementation`] on a host device.
    ///
    /// # Blocking
    /// No; but the future stays pending until everything running on the GPU has ended, and while a stream's
    /// [queue is full](crate::Stream#blocking). Load before serving.
    ///
    /// # Cancel safety
    /// If the future is dropped, the load goes on and its result is unloaded.
    pub async fn load(device: &Device, image: Image) -> Result<Module> {
        coop::proceed().await;
        // The call is not made on this thread, but waiting for it would wait for everything that is running, including
        // this host function.
        role::check_driver("loading a kernel")?;
        let engine = device.engine().clone();
        offload(move || Module::load_now(&engine, image)).await?
    }

    /// [`load`](Self::load) on the calling thread.
    ///
    /// # Blocking
    /// Yes: up to seconds, and until everything running on the GPU has ended, including full
    /// [queues](crate::Stream#blocking). Not for async code.
    ///
    /// # Errors
    /// As [`load`](Self::load); a thread on which it would deadlock.
    pub fn load_blocking(device: &Device, image: Image) -> Result<Module> {
        role::check("loading a kernel")?;
        Module::load_now(device.engine(), image)
    }

    pub(crate) fn load_now(engine: &Arc<Engine>, image: Image) -> Result<Module> {
        Module::load_if(engine, image, |_| Ok(ImageVerdicts::default()))
    }

    /// Loads an image that is valid and that `permit` allows.
    pub(super) fn load_if(
        engine: &Arc<Engine>,
        image: Image,
        permit: impl FnOnce(&Image) -> Result<ImageVerdicts>,
    ) -> Result<Module> {
        engine.check_open()?;
        if engine.backend.kind() == crate::DeviceKind::Host {
            return Err(super::no_implementation(&image.name, engine));
        }
        let bad = |problem, log| -> Error {
            ErrorDetail::BadImage { image: image.name.clone(), problem, log }.into()
        };
        let kernels = image.check().map_err(|problem| bad(problem, String::new()))?;
        let verdicts = permit(&image)?;
        // The driver needs PTX to end with a NUL; for a binary the NUL is harmless.
        let mut bytes = Vec::with_capacity(image.bytes.len() + 1);
        bytes.extend_from_slice(&image.bytes);
        bytes.push(0);
        let mut log = String::new();
        let raw = engine.backend.load(&bytes, &mut log).map_err(|code| {
            let error = engine.refused(code);
            if error.is_device_lost() {
                return error;
            }
            bad(ImageProblem::Driver(code), log)
        })?;
        let Image { name, instances, .. } = image;
        let engine = engine.clone();
        let loaded = LoadedModule { engine, raw, is_gone: false, instances, kernels, verdicts };
        Ok(Module::of(Arc::new(loaded), name))
    }

    /// A loaded image, under the name that messages use for it here.
    pub(super) fn of(loaded: Arc<LoadedModule>, name: String) -> Self {
        Module { loaded, name }
    }

    pub(crate) fn loaded(&self) -> &Arc<LoadedModule> {
        &self.loaded
    }

    /// Unloads it at once, if none of its kernels was launched. If that fails, it stays loaded.
    pub(crate) fn unload(self) {
        if let Some(mut loaded) = Arc::into_inner(self.loaded) {
            // SAFETY: the module is loaded, nothing of it was launched, and nobody else has it.
            unsafe { loaded.engine.backend.unload(loaded.raw) }.ok();
            loaded.is_gone = true;
        }
    }

    /// Compiles CUDA C++ for this device and loads it, off the executor, which takes milliseconds to minutes.
    /// The result is cached, also for later processes: see [`CudaSource`].
    ///
    /// The compiler is NVRTC, loaded at the first call: `libnvrtc.so.12` (or 13, 11.2) on the loader's search
    /// path or in a CUDA toolkit; the environment variable `GPU_AWAIT_NVRTC` names another library, or its
    /// folder. A compiler newer than the driver produces PTX that the driver does not load: see
    /// [`CudaSource::cubin`].
    ///
    /// # Errors
    /// [`ErrorDetail::Compile`] with the compiler's log, which names file and line;
    /// [`ErrorDetail::NoCompiler`] with the names that were tried; [`ErrorDetail::Unsupported`] on a host
    /// device, which runs twins instead of CUDA C++ (see [`Kernel::host`]); those of [`load`](Self::load).
    ///
    /// # Cancel safety
    /// If it is dropped, the compilation goes on and its result is cached.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn f(device: gpu_await::Device) -> gpu_await::Result<()> {
    /// use gpu_await::{CudaSource, InOut, LaunchConfig, Module};
    /// let source = CudaSource::new(r#"
    ///     extern "C" __global__ void square(float* x, unsigned int n) {
    ///         unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    ///         if (i < n) x[i] *= x[i];
    ///     }
    /// "#);
    /// let module = Module::compile(&device, source.named("square.cu")).await?;
    /// // SAFETY: these are its parameters, and it stays below n.
    /// let square = unsafe { module.kernel::<(InOut<f32>, u32)>("square")? }
    ///     .require("n <= x.len()", |_, (x, n)| *n as usize <= x.len());
    /// let stream = device.stream()?;
    /// let mut x = stream.upload(vec![1.0f32, 2.0, 3.0]).queued()?;
    /// stream.launch(&square, LaunchConfig::for_elements(3), (&mut x, 3)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Source
    /// `nvrtcCompileProgram`, `cuLibraryLoadData`.
    pub async fn compile(device: &Device, source: CudaSource) -> Result<Module> {
        coop::proceed().await;
        role::check_driver("loading a kernel")?;
        let home = device.home().clone();
        home.engine.check_open()?;
        offload(move || Module::load_now(&home.engine, source.image(&home)?)).await?
    }

    /// Finds a kernel by its name in the image, or by the name that [`CudaSource::instance`] gave an instance
    /// of a template.
    ///
    /// # Safety
    /// `S` must be the types of the kernel's parameters in order (arrays as bare pointers), and for
    /// all arguments that the preconditions added with [`Kernel::require`] admit, the kernel must
    /// stay inside the arrays it is passed, and overwrite all of those declared
    /// [`Out`](crate::Out).
    ///
    /// # Errors
    /// [`ErrorDetail::NoSuchKernel`], which lists the kernels that exist: without `extern "C"` a kernel has a mangled name;
    /// [`ErrorDetail::WrongParameters`] if number, sizes or alignments of the
    /// parameters differ from those the kernel was compiled with, where the driver reports them (CUDA 12.4).
    /// Types beyond their sizes cannot be checked.
    ///
    /// # Blocking
    /// For driver calls: the driver may load the kernel's code only then, which waits as [`load`](Self::load) does. Look kernels up
    /// before serving.
    ///
    /// # Source
    /// `cuLibraryGetKernel`, `cuFuncGetAttribute`, `cuFuncGetParamInfo`.
    pub unsafe fn kernel<S: Signature>(&self, name: &str) -> Result<Kernel<S>> {
        // SAFETY: the caller's contract; the kernel is not declared to wait first.
        unsafe { self.find_kernel(name, false) }
    }

    /// [`kernel`](Self::kernel), for one that waits first if `waits_first`.
    ///
    /// # Safety
    /// As [`kernel`](Self::kernel); and with `waits_first`, it waits as [`Function::waits_first`] describes.
    pub(super) unsafe fn find_kernel<S: Signature>(
        &self,
        name: &str,
        waits_first: bool,
    ) -> Result<Kernel<S>> {
        role::check("asking the driver about a kernel")?;
        let engine = &self.loaded.engine;
        let refused = |code| engine.refused(code);
        let function = self.function(name)?;
        // SAFETY: the function was found in that module just now.
        let attributes = unsafe { engine.backend.function_attributes(function) };
        let attributes = attributes.map_err(refused)?;
        // SAFETY: as above.
        let compiled = unsafe { engine.backend.function_parameters(function) };
        let declared = S::layout();
        match compiled.map_err(refused)? {
            Some(compiled) if compiled != declared => {
                let kernel = name.to_owned();
                return Err(ErrorDetail::WrongParameters { kernel, declared, compiled }.into());
            }
            _ => {}
        }
        let (module, function) =
            (Some(self.loaded.clone()), RawFunction { waits_first, ..function });
        Ok(Kernel::new(engine, name, Function::Device(function), attributes, module))
    }
}

impl Module {
    /// A function by its name, or an instance of a template by the name that it was requested with.
    pub(crate) fn function(&self, name: &str) -> Result<RawFunction> {
        let Module { loaded, name: image } = self;
        let LoadedModule { engine, raw, instances, kernels, .. } = &**loaded;
        let instance = instances.iter().find(|(written, _)| written == name);
        let in_image = instance.map_or(name, |(_, lowered)| lowered);
        // SAFETY: the module is loaded for as long as `self` lives.
        let function = unsafe { engine.backend.function(*raw, in_image) };
        function.map_err(|code| match code.code {
            NOT_FOUND => {
                let (image, kernel, there) = (image.clone(), name.to_owned(), kernels.clone());
                ErrorDetail::NoSuchKernel { image, kernel, there }.into()
            }
            _ => engine.refused(code),
        })
    }
}

impl LoadedModule {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The verdicts on the entries of the text that it was loaded from.
    pub(super) fn verdicts(&self) -> &ImageVerdicts {
        &self.verdicts
    }

    /// Raises the limit of dynamic shared memory of a function of this module.
    pub(crate) fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> DriverResult<()> {
        // SAFETY: the function belongs to this module, which is loaded.
        unsafe { self.engine.backend.allow_shared_mem(function, bytes) }
    }

    /// Blocks of a function of this module that a multiprocessor can hold at once.
    pub(crate) fn active_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_mem_bytes: u32,
    ) -> DriverResult<u32> {
        // SAFETY: the function belongs to this module, which is loaded.
        unsafe { self.engine.backend.active_blocks(function, threads, shared_mem_bytes) }
    }

    /// Clusters of a function of this module that a stream, or without one the device, can hold at once.
    pub(crate) fn active_clusters(
        &self,
        function: RawFunction,
        grid: &Grid,
        stream: Option<RawStream>,
    ) -> DriverResult<u32> {
        // SAFETY: the function belongs to this module, which is loaded; the caller has the stream.
        unsafe { self.engine.backend.active_clusters(function, grid, stream) }
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        let engine = &self.engine;
        if self.is_gone || !engine.is_usable() {
            return;
        }
        // Launches of its kernels may still be queued: it is unloaded when they have finished.
        engine.retire_behind_all(Remnant::Module(self.raw), UserList::new());
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({} on {})", self.name, self.loaded.engine.label())
    }
}
