//! [`LoadedKernels`]: a device's kernels, loaded at first use.
//!
//! | device | an algorithm's kernels |
//! |---|---|
//! | CUDA | come from one image, loaded whole; its tuning gives the geometry and the lengths |
//! | host | one kernel, whose twin computes everything, at any length |
//!
//! Kernels stay loaded for the life of the device. No lock is held while the driver works: at worst two threads that need the same kernels
//! load them twice.

use std::any::Any;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use gpu_await::sibling::lock::RwLock;
use gpu_await::sibling::{Home, HostTwin, UntypedKernel, load};
use gpu_await::{DeviceKind, ErrorDetail, Image, Module, Result};

use super::images::{PackedCode, PackedImage, Tuned};

/// The loaded kernels of a device, by algorithm and type.
#[derive(Default)]
pub(super) struct LoadedKernels {
    loaded: RwLock<HashMap<Key, Arc<dyn Any + Send + Sync>>>,
}

/// An algorithm, and its type or types.
pub(super) type Key = (&'static str, &'static str, &'static str);

/// An image on a device.
pub(super) struct LoadedImage {
    module: Module,
    code: &'static PackedCode,
    name: &'static str,
    waits_first: bool,
}

impl LoadedKernels {
    /// The value of `key`, made by the first caller.
    pub(super) fn get<T: Any + Send + Sync>(
        home: &Home,
        key: Key,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let all = match home.get_or_load(|| Ok::<_, Infallible>(LoadedKernels::default())) {
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

/// A kernel of the host device.
pub(super) fn twin(name: &'static str, twin: HostTwin) -> Arc<UntypedKernel> {
    // SAFETY: each algorithm passes its twin the arguments of the twin's own type, and declares all memory among them.
    unsafe { UntypedKernel::twin(name, twin) }
}

impl LoadedImage {
    /// The image of a family of algorithms for a type, unless the device is the host.
    ///
    /// # Errors
    /// What the driver refuses; [`ErrorDetail::Unsupported`] on a GPU below compute capability 8.0; a thread that must not
    /// call the driver.
    pub(super) fn of(home: &Home, family: &str, type_name: &str) -> Result<Option<Arc<Self>>> {
        home.check_can_load("loading an algorithm")?;
        if home.kind() == DeviceKind::Host {
            return Ok(None);
        }
        let name = &*format!("{family}_{type_name}");
        let image =
            PackedImage::find(name).unwrap_or_else(|| unreachable!("{name} is in the manifest"));
        let load = || LoadedImage::load(home, image);
        LoadedKernels::get(home, ("image", image.name, ""), load).map(Some)
    }

    fn load(home: &Home, image: &'static PackedImage) -> Result<Self> {
        let capability = home.capability_of_images();
        if capability < (8, 0) {
            let (major, minor) = capability;
            let device = format!("{} (of {major}.{minor})", home.label());
            let (what, requirement) = ("an algorithm", "compute capability 8.0");
            return Err(ErrorDetail::Requires { what, requirement, device }.into());
        }
        // PTX is for every device; a driver that refuses the machine code compiles that.
        let hopper = (capability == (9, 0)).then_some(Tuned::Hopper);
        let loaded = hopper.map(|tuned| LoadedImage::load_tuned(home, image, tuned));
        match loaded {
            Some(Err(error)) if !matches!(error.detail(), ErrorDetail::BadImage { .. }) => {
                Err(error)
            }
            Some(Ok(loaded)) => Ok(loaded),
            _ => LoadedImage::load_tuned(home, image, Tuned::General),
        }
    }

    fn load_tuned(home: &Home, image: &'static PackedImage, tuned: Tuned) -> Result<Self> {
        let (name, code) = (image.name, image.code(tuned));
        let waits_first = image.waits_first(tuned);
        let bytes = code.unpack().unwrap_or_else(|| unreachable!("{name} is in the archive"));
        let image = match tuned {
            Tuned::General => Image::ptx(
                String::from_utf8(bytes).unwrap_or_else(|_| unreachable!("{name} is text")),
            ),
            // SAFETY: it is what `build.py` packed, a whole cubin of NVIDIA's assembler (`every_image_unpacks`).
            Tuned::Hopper => unsafe { Image::binary(bytes) },
        };
        let module = load(home, image.named(name))?;
        Ok(LoadedImage { module, code, name, waits_first })
    }

    /// A kernel of the image.
    pub(super) fn kernel(&self, entry: &str) -> Result<Arc<UntypedKernel>> {
        let name = format!("{} of {}", entry, self.name);
        // SAFETY: each algorithm passes the arguments of its kernels, whose sources stand beside the image, and declares all memory
        // among them; `tests/algorithms` compares them at every length and offset.
        unsafe { UntypedKernel::find(&self.module, entry, &name, self.waits_first) }
    }

    /// A number of the image's tuning.
    pub(super) fn fact(&self, name: &str) -> u32 {
        self.code.fact(name).unwrap_or_else(|| unreachable!("{} has the fact {name}", self.name))
    }
}
