//! [`Module`]: a loaded kernel image.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::backend::{Call, Function, RawModule};
use crate::completion::engine::Engine;
use crate::device::Device;
use crate::error::{ErrorDetail, Result};
use crate::kernel::Kernel;
use crate::kernel::signature::Signature;
use crate::offload::offload;

const NOT_FOUND: i32 = 500;

/// Kernels found by name at run time: PTX, a cubin or a fatbin, loaded on a CUDA device.
///
/// # Source
/// `cuModuleLoadDataEx`.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<LoadedModule>,
}

pub(crate) struct LoadedModule {
    engine: Arc<Engine>,
    raw: RawModule,
    name: String,
}

/// A kernel image: PTX text, or the bytes of a cubin or fatbin.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    bytes: Cow<'static, [u8]>,
}

impl Image {
    /// PTX text; the driver compiles it for its GPU.
    pub fn ptx(text: impl Into<Cow<'static, str>>) -> Self {
        let bytes = match text.into() {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
        Image { name: "PTX".to_owned(), bytes }
    }

    /// The bytes of a cubin or fatbin.
    pub fn binary(bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        Image { name: "binary".to_owned(), bytes: bytes.into() }
    }

    /// Names the image for messages.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}

impl Module {
    /// Loads an image, off the executor: compiling PTX can take seconds.
    ///
    /// # Errors
    /// [`ErrorDetail::BadImage`] with the compiler's log and line;
    /// [`ErrorDetail::NoImplementation`] on a host device.
    ///
    /// # Cancel safety
    /// Dropped, the load goes on and its result is unloaded.
    pub async fn load(device: &Device, image: Image) -> Result<Module> {
        let engine = device.engine().clone();
        offload(move || Module::load_now(&engine, image)).await?
    }

    pub(crate) fn load_now(engine: &Arc<Engine>, image: Image) -> Result<Module> {
        engine.check_open()?;
        if engine.backend.kind() == crate::DeviceKind::Host {
            return Err(super::no_implementation(&image.name, engine));
        }
        let mut bytes = image.bytes.into_owned();
        // PTX is text and the driver wants its end marked; a binary does not mind.
        bytes.push(0);
        let mut log = String::new();
        let raw = engine.backend.load(&bytes, &mut log).map_err(|code| {
            let error = engine.refused(code);
            if error.is_device_lost() {
                return error;
            }
            ErrorDetail::BadImage { image: image.name.clone(), code, log }.into()
        })?;
        let loaded = LoadedModule { engine: engine.clone(), raw, name: image.name };
        Ok(Module { loaded: Arc::new(loaded) })
    }

    /// Finds a kernel by name.
    ///
    /// # Safety
    /// `S` must be the types of the kernel's parameters in order (arrays as bare pointers), and for
    /// all arguments that the preconditions added with [`Kernel::require`] admit, the kernel must
    /// stay inside the arrays it is passed, and overwrite all of those declared
    /// [`Out`](crate::Out).
    ///
    /// # Errors
    /// [`ErrorDetail::NoSuchKernel`].
    pub unsafe fn kernel<S: Signature>(&self, name: &str) -> Result<Kernel<S>> {
        let LoadedModule { engine, raw, name: image } = &*self.loaded;
        let refused = |code: crate::error::DriverCode| match code.code {
            NOT_FOUND => {
                let (image, kernel) = (image.clone(), name.to_owned());
                ErrorDetail::NoSuchKernel { image, kernel }.into()
            }
            _ => engine.refused(code),
        };
        // SAFETY: the module is loaded for as long as `self.loaded` lives.
        let function = unsafe { engine.backend.function(*raw, name) }.map_err(refused)?;
        // SAFETY: the function was found in that module just now.
        let info = unsafe { engine.backend.function_info(function) }.map_err(refused)?;
        let module = Some(self.loaded.clone());
        Ok(Kernel::new(engine, name, Function::Device(function), info, module))
    }
}

impl LoadedModule {
    /// Raises the function's limit of dynamic shared memory.
    pub(crate) fn allow_shared_mem(&self, function: &Function, bytes: u32) -> Call<()> {
        match function {
            // SAFETY: the function belongs to this module, which is loaded.
            Function::Device(raw) => unsafe { self.engine.backend.allow_shared_mem(*raw, bytes) },
            Function::Host(_) => Ok(()),
        }
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        let engine = &self.engine;
        if engine.lost().is_some() || crate::at_exit::begun() {
            return;
        }
        // Launches of its kernels may still be queued: unloaded when they are through.
        engine.unload_later(self.raw);
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({} on {})", self.loaded.name, self.loaded.engine.label())
    }
}
