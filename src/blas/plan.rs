//! A plan for matrix products: its shape, and its implementation.

use std::fmt;
use std::sync::Arc;

use super::element::GemmElement;
#[cfg(feature = "cuda")]
use super::lt::{Library, LtPlan};
use super::shape::{ALIGNMENT, Shape};
use super::twin;
use crate::backend::DeviceKind;
use crate::batch::queue::Queue;
use crate::error::{ErrorDetail, Result};
#[cfg(feature = "cuda")]
use crate::interop::library_object::LibraryObject;
use crate::interop::work_area::WorkArea;
use crate::memory::raw_slice::RawSlice;
use crate::memory::view::{Readable, Writable};
use crate::runtime::Engine;
use crate::submit::{RawQueue, Uses, wrong_device};

/// The implementation of products on a device.
#[derive(Clone)]
pub(super) struct Multiplier {
    engine: Arc<Engine>,
    #[cfg(feature = "cuda")]
    library: Option<Arc<LibraryObject<Library>>>,
}

/// A plan of either kind of device.
pub(super) struct GemmCore {
    shape: Shape,
    engine: Arc<Engine>,
    area: WorkArea,
    #[cfg(feature = "cuda")]
    plan: Option<LtPlan>,
}

impl fmt::Debug for Multiplier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.engine.label())
    }
}

impl Multiplier {
    pub(super) fn load(engine: &Arc<Engine>) -> Result<Self> {
        engine.check_open()?;
        Ok(Multiplier {
            engine: engine.clone(),
            #[cfg(feature = "cuda")]
            library: match engine.backend.kind() {
                DeviceKind::Cuda => Some(Arc::new(LibraryObject::new(engine, Library::open)?)),
                DeviceKind::Host => None,
            },
        })
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(super) fn plan(&self, shape: &Shape) -> Result<GemmCore> {
        shape.check()?;
        self.engine.check_open()?;
        Ok(GemmCore {
            shape: *shape,
            engine: self.engine.clone(),
            area: WorkArea::default(),
            #[cfg(feature = "cuda")]
            plan: self.library.as_ref().map(|library| LtPlan::new(library, shape)).transpose()?,
        })
    }
}

impl GemmCore {
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    #[cfg(feature = "cuda")]
    pub(super) fn workspace_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, LtPlan::workspace_bytes)
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) fn workspace_bytes(&self) -> usize {
        0
    }

    /// Puts a product on the queue's stream.
    pub(super) fn put<T: GemmElement>(
        &self,
        queue: &Queue<'_>,
        (alpha, beta): (T::Scale, T::Scale),
        a: &impl Readable<T>,
        b: &impl Readable<T>,
        bias: Option<&impl Readable<T>>,
        c: &mut impl Writable<T>,
    ) -> Result<()> {
        let mut workspace;
        let (alpha, beta) = (positive_zero(alpha), positive_zero(beta));
        let overwrites = beta == T::Scale::default();
        let uses = Uses::new("gemm").can_be_captured().reads(a).reads(b);
        let uses = if overwrites { uses.writes(c) } else { uses.updates(c) };
        let (uses, bias) = uses.also_reads(bias);
        let slices = uses.pointers();
        if let Err(error) = self.check(queue, slices, bias) {
            return Err(uses.refuse(error));
        }
        match self.area.take(queue, self.workspace_bytes()) {
            Ok(memory) => workspace = memory,
            Err(error) => return Err(uses.refuse(error)),
        }
        // A graph's launch uses the library's objects, even after plan and handle are dropped.
        #[cfg(feature = "cuda")]
        let uses = match &self.plan {
            Some(plan) if queue.is_drawing() => uses.keeps(plan.library()),
            _ => uses,
        };
        let (uses, workspace) = uses.also_writes(workspace.get_mut());
        let product = |queue: &RawQueue<'_>, (a, b, c): Slices<T>| {
            #[cfg(feature = "cuda")]
            if let Some(plan) = &self.plan {
                let pointers = [a.address(), b.address(), c.address()];
                let bias = bias.map(RawSlice::address);
                let workspace = workspace.map_or(0, RawSlice::address);
                return plan.multiply(queue, (&alpha, &beta), pointers, bias, workspace);
            }
            let _ = &workspace;
            let shape = self.shape;
            queue.host_each(move || multiply(&shape, (alpha, beta), (a, b, bias), c))
        };
        queue.enqueue_library(uses, product)
    }

    fn check<T>(
        &self,
        queue: &Queue<'_>,
        (a, b, c): Slices<T>,
        bias: Option<RawSlice<T>>,
    ) -> Result<()> {
        let (engine, shape) = (queue.stream().engine(), &self.shape);
        if engine.id != self.engine.id {
            return Err(wrong_device("the plan", engine, &self.engine));
        }
        let op = "gemm";
        if bias.is_some() != shape.bias {
            let (what, expected) = match shape.bias {
                true => ("the bias, which `launch_with_bias` takes,", shape.n),
                false => ("the bias, which the plan was made without,", 0),
            };
            let found = bias.map_or(0, RawSlice::len);
            return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
        }
        let arguments = [
            ("a", Some(a), shape.batch * shape.m * shape.k),
            ("b", Some(b), shape.batch * shape.k * shape.n),
            ("c", Some(c), shape.batch * shape.m * shape.n),
            ("the bias", bias, shape.n),
        ];
        let given =
            arguments.into_iter().filter_map(|(what, slice, len)| Some((what, slice?, len)));
        for (what, slice, expected) in given {
            let (found, ptr, alignment) = (slice.len(), slice.address(), ALIGNMENT);
            if found != expected {
                return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
            }
            if !ptr.is_multiple_of(alignment) {
                return Err(ErrorDetail::Misaligned { op, what, ptr, alignment }.into());
            }
        }
        Ok(())
    }
}

/// The scale, without the sign of a zero: cuBLASLt reads what -0.0 scales, and not what 0.0 does.
fn positive_zero<S: PartialEq + Default>(scale: S) -> S {
    let zero = S::default();
    if scale == zero { zero } else { scale }
}

type Slices<T> = (RawSlice<T>, RawSlice<T>, RawSlice<T>);

/// The twin, on the worker of a host device's stream.
fn multiply<T: GemmElement>(
    shape: &Shape,
    scales: (T::Scale, T::Scale),
    (a, b, bias): (RawSlice<T>, RawSlice<T>, Option<RawSlice<T>>),
    c: RawSlice<T>,
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
