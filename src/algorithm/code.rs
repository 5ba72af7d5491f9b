//! [`Algorithms`]: a device's kernels, loaded at first use.
//!
//! | device | an algorithm's kernels |
//! |---|---|
//! | CUDA | come from one image, loaded whole; its tuning gives the geometry and the lengths |
//! | host | one kernel, whose twin computes everything, at any length |
//!
//! Kernels stay loaded for the life of the device. No lock is held while the driver works: at worst two threads that need the same kernels
//! load them twice.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::RwLock;

use super::images::{PackedCode, PackedImage, Tuned};
use crate::DeviceKind;
use crate::backend::{Function, HostTwin};
use crate::device::home::Home;
use crate::error::{ErrorDetail, Result};
use crate::kernel::image::{Form, Image};
use crate::kernel::module::{LoadedModule, Module};
use crate::runtime::Engine;
use crate::submit::KernelCode;
use crate::thread::role;

/// The compute capability whose kernels every later GPU runs as well: they are PTX.
const GENERAL: (u32, u32) = (8, 0);

/// The compute capability that kernels are chosen for: the device's, unless it is to run those of every GPU.
pub(super) fn capability_of_images(engine: &Engine) -> (u32, u32) {
    let capability = engine.backend.limits().compute_capability;
    if engine.options.general_images { capability.min(GENERAL) } else { capability }
}

/// The loaded kernels of a device, by algorithm and type.
#[derive(Default)]
pub(super) struct Algorithms {
    loaded: RwLock<HashMap<Key, Arc<dyn Any + Send + Sync>>>,
}

/// An algorithm, and the type or types that it is for.
pub(super) type Key = (&'static str, &'static str, &'static str);

/// One kernel.
pub(super) struct AlgorithmKernel {
    name: Arc<str>,
    pub(super) function: Function,
    /// It was launched before, so the driver's first-launch setup is done.
    pub(super) launched: AtomicBool,
    /// Its first statement waits for what is before it in its stream: `build.py` checks the code for capability 9.0.
    pub(super) waits_first: bool,
    /// Keeps the code loaded.
    _module: Option<Arc<LoadedModule>>,
}

impl KernelCode for AlgorithmKernel {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}

/// An image on a device.
pub(super) struct LoadedImage {
    engine: Arc<Engine>,
    module: Module,
    code: &'static PackedCode,
    tuned: Tuned,
    name: &'static str,
}

impl Algorithms {
    /// The value of `key`, made by the first caller.
    pub(super) fn get<T: Any + Send + Sync>(
        home: &Home,
        key: Key,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let all =
            match home.get_or_load(|| Ok::<_, std::convert::Infallible>(Algorithms::default())) {
                Ok(all) => all,
                Err(never) => match never {},
            };
        let found = all.loaded.read().get(&key).cloned();
        if let Some(found) = found.and_then(|found| found.downcast::<T>().ok()) {
            return Ok(found);
        }
        let fresh = Arc::new(load()?);
        let mut loaded = all.loaded.write();
        let kept = loaded.entry(key).or_insert_with(|| fresh.clone()).clone();
        Ok(kept.downcast::<T>().unwrap_or(fresh))
    }
}

impl AlgorithmKernel {
    /// A kernel of the host device.
    pub(super) fn twin(name: &'static str, twin: HostTwin) -> Arc<Self> {
        let name: Arc<str> = name.into();
        let function = Function::Host(twin, name.clone());
        let launched = AtomicBool::new(true);
        Arc::new(AlgorithmKernel { name, function, launched, waits_first: false, _module: None })
    }
}

impl LoadedImage {
    /// The image of a family of algorithms for a type, unless the device is the host.
    ///
    /// # Errors
    /// What the driver refuses; [`ErrorDetail::Unsupported`] on a GPU below compute capability 8.0; a thread that must not
    /// call the driver.
    pub(super) fn of(home: &Home, family: &str, type_name: &str) -> Result<Option<Arc<Self>>> {
        role::check("loading an algorithm")?;
        let (engine, name) = (&home.engine, &*format!("{family}_{type_name}"));
        engine.check_open()?;
        if engine.backend.kind() == DeviceKind::Host {
            return Ok(None);
        }
        let image =
            PackedImage::find(name).unwrap_or_else(|| unreachable!("{name} is in the manifest"));
        let load = || LoadedImage::load(engine, image);
        Algorithms::get(home, ("image", image.name, ""), load).map(Some)
    }

    fn load(engine: &Arc<Engine>, image: &'static PackedImage) -> Result<Self> {
        let capability = capability_of_images(engine);
        if capability < (8, 0) {
            let (major, minor) = capability;
            let device = format!("{} (of {major}.{minor})", engine.label());
            let (what, requirement) = ("an algorithm", "compute capability 8.0");
            return Err(ErrorDetail::Requires { what, requirement, device }.into());
        }
        // PTX is for every device; a driver that refuses the machine code compiles that.
        let hopper = (capability == (9, 0)).then_some(Tuned::Hopper);
        let loaded = hopper.map(|tuned| LoadedImage::load_tuned(engine, image, tuned));
        match loaded {
            Some(Err(error)) if !matches!(error.detail(), ErrorDetail::BadImage { .. }) => {
                Err(error)
            }
            Some(Ok(loaded)) => Ok(loaded),
            _ => LoadedImage::load_tuned(engine, image, Tuned::General),
        }
    }

    fn load_tuned(engine: &Arc<Engine>, image: &'static PackedImage, tuned: Tuned) -> Result<Self> {
        let (name, code) = (image.name, image.code(tuned));
        let form = if tuned == Tuned::Hopper { Form::Binary } else { Form::Ptx };
        let bytes = code.unpack().unwrap_or_else(|| unreachable!("{name} is in the archive"));
        let module = Module::load_now(engine, Image::compiled(form, bytes.into()).named(name))?;
        Ok(LoadedImage { engine: engine.clone(), module, code, tuned, name })
    }

    /// A kernel of the image.
    pub(super) fn kernel(&self, entry: &str) -> Result<Arc<AlgorithmKernel>> {
        let function = self.module.loaded().function(entry)?;
        let name = format!("{} of {}", entry, self.name).into();
        let (function, module) = (Function::Device(function), Some(self.module.loaded().clone()));
        let launched = AtomicBool::new(false);
        let waits_first = self.tuned == Tuned::Hopper;
        Ok(Arc::new(AlgorithmKernel { name, function, launched, waits_first, _module: module }))
    }

    /// A number of the image's tuning.
    pub(super) fn fact(&self, name: &str) -> u32 {
        self.code.fact(name).unwrap_or_else(|| unreachable!("{} has the fact {name}", self.name))
    }

    /// The number of blocks of this many threads that are resident on the device at once.
    pub(super) fn resident_blocks(&self, kernel: &AlgorithmKernel, threads: u32) -> Result<u32> {
        let Function::Device(function) = kernel.function else { return Ok(1) };
        let active = self.module.loaded().active_blocks(function, threads, 0);
        let active = active.map_err(|code| self.engine.refused(code))?;
        Ok(active.max(1) * self.engine.backend.limits().multiprocessors.max(1))
    }
}
