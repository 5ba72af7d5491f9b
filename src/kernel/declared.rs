//! The expansion of [`kernel!`](crate::kernel!): a declaration, and the kernel behind it.
//!
//! `unsafe fn` in a declaration is its author's signature; nothing else in the expansion lets safe code, in the declaring module or
//! elsewhere, launch the kernel other than as declared (`must_not_compile.rs`):
//!
//! | part of the expansion | why safe code cannot use it |
//! |---|---|
//! | the field | a [`Declared`], whose kernel is returned by an `unsafe fn` only |
//! | the struct's literal | needs a [`Declared`] of this very declaration, which only loading creates |
//! | the contents of the declaration | an `unsafe impl` of [`Declaration`] |
//! | expressions in the declaration | are never expanded inside an `unsafe` block, and can name the arguments but nothing that the macro defines |

use std::any::type_name;
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use crate::backend::KernelAttributes;
use crate::device::Device;
use crate::device::home::Home;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::image::Image;
use crate::kernel::occupancy::Occupancy;
use crate::kernel::shared_modules::{SharedModules, WaitsFirst};
use crate::kernel::signature::{Erased, Signature};
use crate::kernel::source::CudaSource;
use crate::runtime::coop;
use crate::thread::role;
use crate::thread::worker::offload;

/// What [`kernel!`](crate::kernel!) declares about a kernel.
///
/// # Safety
/// The implementor vouches for what `kernel!` requires: the signature matches the kernel's source, and
/// for all arguments that the requirements admit the kernel stays inside its arrays, and overwrites all
/// of those that are [`Out`](crate::Out).
#[doc(hidden)]
pub unsafe trait Declaration<S: Signature>: Sized + 'static {
    /// The arguments' names, for messages.
    const ARGUMENTS: &'static [&'static str];
    fn code() -> Code;
    /// Adds the declaration's preconditions on the arguments.
    fn require(kernel: Kernel<S>) -> Kernel<S>;
}

/// A kernel's code for each kind of device.
#[doc(hidden)]
pub struct Code {
    pub name: &'static str,
    pub entry: &'static str,
    pub cuda: Option<CudaCode>,
    pub twin: Option<Erased>,
}

/// A kernel's code for GPUs: an image, or a source that is compiled when it is loaded.
#[doc(hidden)]
pub enum CudaCode {
    Ptx(Cow<'static, str>),
    Source(CudaSource),
    /// Code that waits for the preceding launch first.
    Programmatic(Box<CudaCode>),
}

impl CudaCode {
    pub fn ptx(text: impl Into<Cow<'static, str>>) -> Self {
        CudaCode::Ptx(text.into())
    }

    pub fn source(source: impl Into<CudaSource>) -> Self {
        CudaCode::Source(source.into())
    }

    #[must_use]
    pub fn programmatic(self) -> Self {
        CudaCode::Programmatic(Box::new(self))
    }

    /// The text, if it is PTX.
    fn text(self) -> Option<Cow<'static, str>> {
        match self {
            CudaCode::Ptx(text) => Some(text),
            CudaCode::Source(_) => None,
            CudaCode::Programmatic(code) => code.text(),
        }
    }

    /// The image that contains the entry. A name with `<` is an instance of a template.
    fn image(self, name: &str, entry: &str, home: &Home) -> Result<Image> {
        match self {
            CudaCode::Ptx(text) => Ok(Image::ptx(text).named(name)),
            CudaCode::Source(source) if entry.contains('<') => {
                source.instance(entry).image_of(name, home)
            }
            CudaCode::Source(source) => source.image_of(name, home),
            CudaCode::Programmatic(code) => code.image(name, entry, home),
        }
    }
}

/// The kernel of the declaration `K`, and of no other: loaded, with its requirements, and out of reach of safe code,
/// which could launch it with any geometry and any derived arguments.
#[doc(hidden)]
pub struct Declared<K, S: Signature> {
    kernel: Kernel<S>,
    declaration: PhantomData<fn() -> K>,
}

impl<K: Declaration<S>, S: Signature> Declared<K, S> {
    /// Loads the code for the device's kind, off the executor.
    ///
    /// # Errors
    /// As [`Module::load`], [`Module::compile`] and [`Module::kernel`];
    /// [`ErrorDetail::NoImplementation`](crate::ErrorDetail::NoImplementation) if the declaration has no
    /// code for the device's kind. A host device also reports that PTX lacks the entry.
    pub async fn load(device: &Device) -> Result<Self> {
        coop::proceed().await;
        role::check_driver("loading a kernel")?;
        let (home, code) = (device.home().clone(), K::code());
        if home.engine.backend.kind() == crate::DeviceKind::Host {
            return Declared::of(code, &home);
        }
        offload(move || Declared::of(code, &home)).await?
    }

    /// [`load`](Self::load) on the calling thread.
    ///
    /// # Errors
    /// As [`load`](Self::load); a thread on which it would deadlock.
    pub fn load_blocking(device: &Device) -> Result<Self> {
        role::check("loading a kernel")?;
        Declared::load_now(device.home())
    }

    /// [`load`](Self::load) on the calling thread, without checking which thread that is.
    pub(crate) fn load_now(home: &Home) -> Result<Self> {
        Declared::of(K::code(), home)
    }

    fn of(code: Code, home: &Home) -> Result<Self> {
        let engine = &home.engine;
        engine.check_open()?;
        let kernel = match (engine.backend.kind(), code.cuda, code.twin) {
            (crate::DeviceKind::Host, cuda, Some(twin)) => {
                if let Some(text) = cuda.and_then(CudaCode::text) {
                    SharedModules::find_entry(home, code.name, text, code.entry)?;
                }
                Kernel::host_erased(engine, code.name, twin)?
            }
            (crate::DeviceKind::Cuda, Some(cuda), _) => {
                let starts_early = engine.limits.compute_capability.0 >= 9;
                let waits_first = starts_early && matches!(cuda, CudaCode::Programmatic(_));
                let image = cuda.image(code.name, code.entry, home)?;
                let (declaration, entry) = (type_name::<K>(), code.entry);
                let module = SharedModules::load(
                    home,
                    image,
                    waits_first.then_some(WaitsFirst { declaration, entry }),
                )?;
                // SAFETY: the author of `K` vouches for the signature, for every argument that
                // `K::require` admits, and that code declared as programmatic waits first.
                unsafe { module.find_kernel(code.entry, waits_first) }?
            }
            _ => return Err(super::no_implementation(code.name, engine)),
        };
        let kernel = K::require(kernel.named(K::ARGUMENTS));
        Ok(Declared { kernel, declaration: PhantomData })
    }

    /// The compiled kernel's attributes.
    pub fn attributes(&self) -> KernelAttributes {
        self.kernel.attributes()
    }

    /// How many blocks run at once.
    pub fn occupancy(&self) -> Occupancy<'_> {
        self.kernel.occupancy()
    }

    /// The kernel behind its declaration.
    ///
    /// # Safety
    /// It must be launched with the declaration's geometry, where it has one, and its derived arguments; or
    /// with others for which it also stays inside its arrays.
    pub unsafe fn kernel(&self) -> &Kernel<S> {
        &self.kernel
    }
}

impl<K, S: Signature> Clone for Declared<K, S> {
    fn clone(&self) -> Self {
        Declared { kernel: self.kernel.clone(), declaration: PhantomData }
    }
}

impl<K, S: Signature> fmt::Debug for Declared<K, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel.fmt(f)
    }
}

/// A twin with its types erased.
#[doc(hidden)]
pub fn erase<S: Signature, F: crate::kernel::signature::TwinFn<S>>(twin: F) -> Erased {
    twin.erase()
}
