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

use gpu_await::sibling::lock::Mutex;
use gpu_await::sibling::{ArgBlock, Footprint, Home, HostTwin, UntypedKernel};
use gpu_await::{DeviceKind, Image, Queue, Result};
use smallvec::SmallVec;

use super::operand::MOST;
use super::ptx;
use super::ptx::{Recipe, Target, Tiling};

/// Identifies a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelId {
    /// The formula's type, or one that stands for another algorithm.
    pub(super) of: TypeId,
    pub(super) element: TypeId,
    /// For each argument of a formula, whether it is a number.
    pub(super) scalars: SmallVec<[bool; MOST]>,
    /// It writes flags, not elements.
    pub(super) flags: bool,
    /// Its arrays are rows with pitches.
    pub(super) rows: bool,
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
pub(crate) struct ElementwiseKernel {
    kernel: Arc<UntypedKernel>,
    tiling: Tiling,
}

/// Loads a kernel once its computation is known, unless another thread did meanwhile.
pub(super) struct Loader<'h> {
    home: &'h Home,
    cell: Arc<KernelCell>,
}

impl Loader<'_> {
    pub(super) fn load(&self, blueprint: &Blueprint<'_>) -> Result<Arc<ElementwiseKernel>> {
        let _loading = self.cell.loading.lock();
        if let Some(kernel) = self.cell.kernel.get() {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(ElementwiseKernel::load(self.home, blueprint)?);
        Ok(self.cell.kernel.get_or_init(|| kernel).clone())
    }
}

impl ElementwiseKernel {
    fn load(home: &Home, blueprint: &Blueprint<'_>) -> Result<Self> {
        let Blueprint { name, recipe, twin } = blueprint;
        let kernel = if home.kind() == DeviceKind::Host {
            // SAFETY: the launches pass what the recipe's parameters are, and declare all memory among them; the twin checks its
            // accesses against that.
            unsafe { UntypedKernel::twin(name, twin.clone()) }
        } else {
            let target = Target::of(home.capability_of_images());
            let image = Image::ptx(ptx::generate(recipe, target)).named(*name);
            // SAFETY: likewise; the text is this crate's own, and no index in it leaves the arguments (invariant 1 of `ptx`).
            unsafe { UntypedKernel::load(home, image, ptx::ENTRY, target.waits_first())? }
        };
        Ok(ElementwiseKernel { kernel, tiling: recipe.tiling() })
    }

    /// The device's kernel; the first caller loads it. No lock is held when `define` is called.
    pub(super) fn get(
        home: &Home,
        id: KernelId,
        define: &dyn Fn(&Loader<'_>) -> Result<Arc<Self>>,
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
        home.check_can_load("loading a kernel")?;
        define(&Loader { home, cell })
    }

    /// How it tiles its elements.
    pub(super) fn tiling(&self) -> Tiling {
        self.tiling
    }

    /// Puts a launch of this many blocks on the queue's stream.
    pub(super) fn launch(
        &self,
        queue: &Queue<'_>,
        footprint: &mut Footprint<'_>,
        blocks: u64,
        args: &ArgBlock,
    ) -> Result<()> {
        // No memory holds more elements than a grid of this many blocks covers.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        self.kernel.launch(queue, footprint, args, (blocks, ptx::THREADS))
    }
}
