//! A plan for matrix products: its shape, and its implementation.

use std::fmt;
use std::sync::Arc;

use gpu_await::sibling::{LibraryDevice, VerbParts, refuse};
use gpu_await::{
    DeviceKind, ErrorDetail, Queue, RawQueue, RawSlice, Readable, Result, Uses, Writable,
};

use super::element::GemmElement;
use super::lt::{Library, LtPlan};
use super::shape::{ALIGNMENT, Shape};
use super::twin;
use crate::library_object::LibraryObject;
use crate::work_area::WorkArea;

/// The implementation of products on a device.
#[derive(Clone)]
pub(super) struct Multiplier {
    device: LibraryDevice,
    library: Option<Arc<LibraryObject<Library>>>,
}

/// A plan of either kind of device.
pub(super) struct GemmCore {
    shape: Shape,
    device: LibraryDevice,
    area: WorkArea,
    plan: Option<LtPlan>,
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
            DeviceKind::Cuda => Some(Arc::new(LibraryObject::new(&device, Library::open)?)),
            _ => None,
        };
        Ok(Multiplier { device, library })
    }

    pub(super) fn device(&self) -> &LibraryDevice {
        &self.device
    }

    pub(super) fn plan(&self, shape: &Shape) -> Result<GemmCore> {
        shape.check()?;
        self.device.check_open()?;
        Ok(GemmCore {
            shape: *shape,
            device: self.device.clone(),
            area: WorkArea::default(),
            plan: self.library.as_ref().map(|library| LtPlan::new(library, shape)).transpose()?,
        })
    }
}

impl GemmCore {
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, LtPlan::workspace_bytes)
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
            queue.host_each(move || multiply(&shape, (alpha, beta), (a, b, bias), c))
        };
        // SAFETY: all that cuBLASLt and the twin touch is declared, and the library puts its work on that stream alone.
        unsafe { queue.enqueue(uses, product) }
    }

    fn check<T>(
        &self,
        queue: &Queue<'_>,
        (a, b, c): Slices<T>,
        bias: Option<RawSlice<T>>,
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
