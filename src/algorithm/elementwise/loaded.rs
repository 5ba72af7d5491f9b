//! A device's elementwise kernels: generated and loaded at first use, then kept.
//!
//! | a separate kernel for each | because |
//! |---|---|
//! | formula, element type | the text differs |
//! | choice of which arguments are numbers | a number is not an address |
//! | number of arguments, flags or elements as output | one type may stand for several formulas |
//!
//! # Invariants
//! 1. A kernel is loaded once per device: concurrent requests for the same kernel wait, requests for another do not (`loaded_once`).
//! 2. No lock is held while a formula runs: it is user code, and may use the device (`a_formula_that_uses_itself`).
//! 3. A kernel's id holds everything that its text and its argument layout depend on (`a_type_of_several_formulas`).

use std::any::TypeId;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_await_protocol::sync::Mutex;
use smallvec::SmallVec;

use super::operand::MOST;
use super::ptx;
use super::ptx::{Recipe, Target, Tiling};
use crate::DeviceKind;
use crate::algorithm::code::capability_of_images;
use crate::backend::{ArgBlock, Function, Grid, HostTwin, LaunchShape, RawModule};
use crate::batch::queue::Queue;
use crate::device::home::Home;
use crate::error::image::ImageProblem;
use crate::error::{ErrorDetail, Result};
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::{Engine, UserList};
use crate::submit::{Footprint, KernelCode, KernelLaunch};
use crate::thread::role;

/// Which kernel is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelId {
    /// The formula's type, or one that stands for another algorithm.
    pub(super) of: TypeId,
    pub(super) element: TypeId,
    /// For each argument of a formula, whether it is a number.
    pub(super) scalars: SmallVec<[bool; MOST]>,
    /// It writes flags, not elements.
    pub(super) flags: bool,
}

/// A kernel's computation, on either kind of device.
pub(super) struct Blueprint<'e> {
    pub(super) name: &'static str,
    pub(super) recipe: Recipe<'e>,
    pub(super) twin: HostTwin,
}

/// The kernels of a device.
#[derive(Default)]
struct ElementwiseKernels {
    kernels: Mutex<HashMap<KernelId, Arc<KernelCell>>>,
}

/// A kernel that is loaded, or will be.
#[derive(Default)]
struct KernelCell {
    loading: Mutex<()>,
    kernel: OnceLock<Arc<ElementwiseKernel>>,
}

/// A kernel, and how it cuts its elements.
pub(super) struct ElementwiseKernel {
    engine: Arc<Engine>,
    name: Arc<str>,
    function: Function,
    tiling: Tiling,
    /// On a CUDA device.
    module: Option<RawModule>,
    /// It waits for what is before it in its stream by itself.
    waits_first: bool,
    /// It was launched before, so the driver's first-launch setup is done.
    launched: AtomicBool,
}

/// Loads a kernel once its computation is known, unless another thread did meanwhile.
pub(super) struct Loader<'h> {
    engine: &'h Arc<Engine>,
    cell: Arc<KernelCell>,
}

impl Loader<'_> {
    pub(super) fn load(&self, blueprint: &Blueprint<'_>) -> Result<Arc<ElementwiseKernel>> {
        let _loading = self.cell.loading.lock();
        if let Some(kernel) = self.cell.kernel.get() {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(ElementwiseKernel::load(self.engine, blueprint)?);
        Ok(self.cell.kernel.get_or_init(|| kernel).clone())
    }
}

impl ElementwiseKernel {
    fn load(engine: &Arc<Engine>, blueprint: &Blueprint<'_>) -> Result<Self> {
        engine.check_open()?;
        let name: Arc<str> = Arc::from(blueprint.name);
        let target = Target::of(capability_of_images(engine));
        let (function, module) = match engine.backend.kind() {
            DeviceKind::Host => (Function::Host(blueprint.twin.clone(), name.clone()), None),
            DeviceKind::Cuda => {
                let (function, module) = compile(engine, blueprint, target)?;
                (function, Some(module))
            }
        };
        let waits_first = module.is_some() && target.waits_first();
        let (engine, tiling) = (engine.clone(), blueprint.recipe.tiling());
        let launched = AtomicBool::new(false);
        Ok(ElementwiseKernel { engine, name, function, tiling, module, waits_first, launched })
    }

    /// The device's; the first to ask loads it. No lock is held when `define` is called.
    pub(super) fn get(
        home: &Home,
        id: KernelId,
        define: impl FnOnce(&Loader<'_>) -> Result<Arc<Self>>,
    ) -> Result<Arc<Self>> {
        let all = home.get_or_load(|| Ok::<_, Infallible>(ElementwiseKernels::default()));
        let all = match all {
            Ok(all) => all,
            Err(never) => match never {},
        };
        let cell = all.kernels.lock().entry(id).or_default().clone();
        if let Some(kernel) = cell.kernel.get() {
            return Ok(kernel.clone());
        }
        role::check("loading a kernel")?;
        define(&Loader { engine: &home.engine, cell })
    }

    /// How it cuts its elements.
    pub(super) fn tiling(&self) -> Tiling {
        self.tiling
    }

    /// Puts a launch for this many elements on the queue's stream.
    pub(super) fn launch(
        self: &Arc<Self>,
        queue: &Queue<'_>,
        footprint: &mut Footprint<'_>,
        count: u64,
        args: &ArgBlock,
    ) -> Result<()> {
        // ORDERING: Relaxed, here and below: a hint.
        if !self.launched.load(Ordering::Relaxed) {
            self.launched.store(true, Ordering::Relaxed);
            footprint.may_block();
        }
        // No memory has as many elements as the grid can have blocks.
        let blocks =
            u32::try_from(count.div_ceil(u64::from(self.tiling.tile()))).unwrap_or(u32::MAX);
        let grid = Grid {
            grid_dim: [blocks, 1, 1],
            block_dim: [ptx::THREADS, 1, 1],
            cluster_dim: [1, 1, 1],
            shared_mem_bytes: 0,
        };
        let shape = LaunchShape { overlaps: self.waits_first, ..LaunchShape::plain(grid) };
        let launch = KernelLaunch { code: self, function: &self.function, shape, args };
        Ok(queue.submit_launch(footprint, &launch)?)
    }
}

fn compile(
    engine: &Engine,
    blueprint: &Blueprint<'_>,
    target: Target,
) -> Result<(Function, RawModule)> {
    let mut image = ptx::generate(&blueprint.recipe, target).into_bytes();
    // The driver wants the end of a text marked.
    image.push(0);
    let mut log = String::new();
    let module = engine.backend.load(&image, &mut log).map_err(|code| {
        let error = engine.refused(code);
        if error.is_device_lost() {
            return error;
        }
        let (image, problem) = (blueprint.name.to_owned(), ImageProblem::Driver(code));
        ErrorDetail::BadImage { image, problem, log }.into()
    })?;
    // SAFETY: the module was loaded just now, and every holder of the function keeps it.
    let function = unsafe { engine.backend.function(module, ptx::ENTRY) };
    match function {
        Ok(function) => Ok((Function::Device(function), module)),
        Err(code) => {
            // SAFETY: nothing of it was launched. Refused, it stays loaded.
            unsafe { engine.backend.unload(module) }.ok();
            Err(engine.refused(code))
        }
    }
}

impl KernelCode for ElementwiseKernel {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl Drop for ElementwiseKernel {
    fn drop(&mut self) {
        let Some(module) = self.module.take() else { return };
        if self.engine.is_usable() {
            self.engine.retire_behind_all(Remnant::Module(module), UserList::new());
        }
    }
}
