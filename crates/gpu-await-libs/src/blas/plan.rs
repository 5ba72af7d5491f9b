//! A plan for matrix products: its shape, and its implementation.

use std::fmt;
use std::sync::Arc;

use gpu_await::sibling::{LibraryDevice, Mutex, VerbParts, refuse};
use gpu_await::{
    DeviceKind, ErrorDetail, Queue, RawQueue, RawSlice, Readable, Result, Uses, Writable,
};

use super::element::GemmElement;
use super::lt::{Library, LtPlan};
use super::plan_cache::PlanCache;
use super::shape::{ALIGNMENT, Shape};
use super::twin;
use crate::library_object::LibraryObject;
use crate::work_area::WorkArea;

/// The implementation of products on a device.
#[derive(Clone)]
pub(super) struct Multiplier {
    device: LibraryDevice,
    library: Option<Lt>,
}

/// The library on a GPU, and its plans.
#[derive(Clone)]
struct Lt {
    object: Arc<LibraryObject<Library>>,
    plans: Arc<Mutex<PlanCache<Arc<LtPlan>>>>,
}

/// A plan for a device of either kind.
pub(super) struct GemmCore {
    shape: Shape,
    device: LibraryDevice,
    area: WorkArea,
    /// `None` on a host device, or if there is nothing to compute.
    plan: Option<Arc<LtPlan>>,
}

impl fmt::Debug for Multiplier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device.label())
    }
}

impl Multiplier {
    pub(super) fn load(device: LibraryDevice) -> Result<Self> {
        device.check_open()?;
        let library = match device.kind() {
            DeviceKind::Cuda => {
                let object = Arc::new(LibraryObject::new(&device, Library::open)?);
                Some(Lt { object, plans: Arc::new(Mutex::new(PlanCache::new())) })
            }
            _ => None,
        };
        Ok(Multiplier { device, library })
    }

    pub(super) fn device(&self) -> &LibraryDevice {
        &self.device
    }

    /// A plan that needs no search.
    pub(super) fn known_plan(&self, shape: &Shape) -> Option<GemmCore> {
        let plan = self.library.as_ref()?.plans.lock().find(shape)?;
        self.device.check_open().ok()?;
        Some(self.core(shape, Some(plan)))
    }

    pub(super) fn plan(&self, shape: &Shape) -> Result<GemmCore> {
        if let Some(known) = self.known_plan(shape) {
            return Ok(known);
        }
        shape.check()?;
        self.device.check_open()?;
        let plan = match &self.library {
            Some(library) if !shape.is_empty() => Some(library.search(shape)?),
            _ => None,
        };
        Ok(self.core(shape, plan))
    }

    fn core(&self, shape: &Shape, plan: Option<Arc<LtPlan>>) -> GemmCore {
        GemmCore { shape: *shape, device: self.device.clone(), area: WorkArea::default(), plan }
    }
}

impl Lt {
    fn search(&self, shape: &Shape) -> Result<Arc<LtPlan>> {
        let plan = Arc::new(LtPlan::new(&self.object, &shape.without_empty_sums())?);
        let _gone = self.plans.lock().enter(*shape, plan.clone());
        Ok(plan)
    }
}

impl GemmCore {
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.workspace_bytes())
    }

    /// Puts a product on the queue's stream.
    pub(super) fn put<T: GemmElement, C: GemmElement<Scale = T::Scale>>(
        &self,
        queue: &Queue<'_>,
        (alpha, beta): (T::Scale, T::Scale),
        a: &impl Readable<T>,
        b: &impl Readable<T>,
        bias: Option<&impl Readable<C>>,
        c: &mut impl Writable<C>,
    ) -> Result<()> {
        let (mut workspace, zeros);
        let no_sums = self.shape.k == 0;
        // An empty sum is 0, however it is scaled.
        let alpha = if no_sums { T::Scale::default() } else { positive_zero(alpha) };
        let beta = positive_zero(beta);
        let overwrites = beta == T::Scale::default() && self.shape.fills(c.len());
        let uses = Uses::new("gemm").can_be_captured().reads(a).reads(b);
        let uses = if overwrites { uses.writes(c) } else { uses.updates(c) };
        let (uses, (a, b, c)) = uses.into_parts();
        let (uses, bias) = match bias {
            Some(bias) => {
                let (uses, (bias,)) = uses.reads(bias).into_parts();
                (uses, Some(bias))
            }
            None => (uses, None),
        };
        if let Err(error) = self.check(queue, (a, b, c), bias) {
            return Err(refuse(uses, error));
        }
        match self.area.take(queue, self.workspace_bytes()) {
            Ok(memory) => workspace = memory,
            Err(error) => return Err(refuse(uses, error)),
        }
        let (uses, [a, b]) = match &self.plan {
            Some(_) if no_sums => {
                match queue.zeros::<T>(self.shape.m.max(self.shape.n)) {
                    Ok(memory) => zeros = memory,
                    Err(error) => return Err(refuse(uses, error)),
                }
                let (uses, (zeros,)) = uses.reads(&zeros).into_parts();
                (uses, [zeros; 2])
            }
            _ => (uses, [a, b]),
        };
        // A graph's launch uses the library's objects, even after plan and handle are dropped.
        let uses = match &self.plan {
            Some(plan) if queue.is_recording_graph() => uses.keeps(plan.library()),
            _ => uses,
        };
        let (uses, workspace) = workspace.declare(uses);
        let product = |queue: &RawQueue<'_>, ()| {
            if let Some(plan) = &self.plan {
                let pointers = [a.address(), b.address(), c.address()];
                let bias = bias.map(RawSlice::address);
                let workspace = workspace.map_or(0, RawSlice::address);
                return plan.multiply(queue, (&alpha, &beta), pointers, bias, workspace);
            }
            let shape = self.shape;
            if shape.is_empty() {
                return Ok(());
            }
            queue.host_each(move || multiply(&shape, (alpha, beta), (a, b, bias), c))
        };
        // SAFETY: all that cuBLASLt and the twin touch is declared, and the library puts its work on that stream alone.
        unsafe { queue.enqueue(uses, product) }
    }

    fn check<T, C>(
        &self,
        queue: &Queue<'_>,
        (a, b, c): Slices<T, C>,
        bias: Option<RawSlice<C>>,
    ) -> Result<()> {
        self.device.check_queue(queue)?;
        let (op, shape) = ("gemm", &self.shape);
        if bias.is_some() != shape.bias {
            let (what, expected) = match shape.bias {
                true => ("the bias, which `launch_with_bias` takes,", shape.n),
                false => ("the bias, which the plan was made without,", 0),
            };
            let found = bias.map_or(0, RawSlice::len);
            return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
        }
        shape.a().check_len("a", a.len())?;
        shape.b().check_len("b", b.len())?;
        shape.c().check_len("c", c.len())?;
        if let Some(found) = bias.map(RawSlice::len).filter(|found| *found != shape.n) {
            let (what, expected) = ("the bias", shape.n);
            return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
        }
        let addresses = [
            ("a", Some(a.address())),
            ("b", Some(b.address())),
            ("c", Some(c.address())),
            ("the bias", bias.map(RawSlice::address)),
        ];
        for (what, ptr) in addresses {
            let Some(ptr) = ptr.filter(|ptr| !ptr.is_multiple_of(ALIGNMENT)) else { continue };
            return Err(ErrorDetail::Misaligned { op, what, ptr, alignment: ALIGNMENT }.into());
        }
        Ok(())
    }
}

/// The scale, without the sign of a zero: cuBLASLt reads the operand for -0.0, but not for 0.0.
fn positive_zero<S: PartialEq + Default>(scale: S) -> S {
    let zero = S::default();
    if scale == zero { zero } else { scale }
}

type Slices<T, C> = (RawSlice<T>, RawSlice<T>, RawSlice<C>);

/// The twin, on the worker of a host device's stream.
fn multiply<T: GemmElement, C: GemmElement<Scale = T::Scale>>(
    shape: &Shape,
    scales: (T::Scale, T::Scale),
    (a, b, bias): (RawSlice<T>, RawSlice<T>, Option<RawSlice<C>>),
    c: RawSlice<C>,
) {
    // SAFETY: the operation declared it as read, and this ends before that.
    let a = unsafe { a.as_slice() };
    // SAFETY: likewise.
    let b = unsafe { b.as_slice() };
    // SAFETY: likewise.
    let bias = bias.map(|bias| unsafe { bias.as_slice() });
    // SAFETY: the operation declared it as written, and borrowed it alone.
    let c = unsafe { c.as_mut_slice() };
    twin::gemm(shape, scales, (a, b, bias), c);
}
