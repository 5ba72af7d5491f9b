//! A plan for Fourier transforms: its shape, and its implementation.

use std::fmt;
use std::sync::Arc;

use gpu_await::sibling::{LibraryDevice, VerbParts, refuse};
use gpu_await::{
    DeviceKind, ErrorDetail, Queue, RawQueue, RawSlice, Readable, Result, Uses, Writable,
};
use num_complex::Complex;

use super::cufft::CufftPlan;
use super::shape::{FftElement, FftShape};
use super::twin;
use crate::library_object::LibraryObject;
use crate::work_area::{WorkArea, WorkMemory};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Inverse,
}

/// The implementation of transforms on a device.
#[derive(Clone)]
pub(super) struct Transformer {
    device: LibraryDevice,
}

/// A plan for a device of either kind.
pub(super) struct FftCore {
    shape: FftShape,
    device: LibraryDevice,
    area: WorkArea,
    plan: Option<Arc<LibraryObject<CufftPlan>>>,
}

impl fmt::Debug for Transformer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device.label())
    }
}

impl Transformer {
    pub(super) fn load(device: LibraryDevice) -> Result<Self> {
        device.check_open()?;
        if device.kind() == DeviceKind::Cuda {
            super::cufft::load()?;
        }
        Ok(Transformer { device })
    }

    pub(super) fn plan(&self, shape: &FftShape) -> Result<FftCore> {
        let device = &self.device;
        shape.check(device.label())?;
        device.check_open()?;
        let plan = match device.kind() {
            DeviceKind::Cuda => {
                Some(Arc::new(LibraryObject::new(device, || CufftPlan::new(shape))?))
            }
            _ => None,
        };
        let (shape, device) = (shape.clone(), device.clone());
        Ok(FftCore { shape, device, area: WorkArea::default(), plan })
    }
}

impl FftCore {
    pub(super) fn shape(&self) -> &FftShape {
        &self.shape
    }

    pub(super) fn work_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.get().work_bytes())
    }

    pub(super) fn transform<T: FftElement>(
        &self,
        queue: &Queue<'_>,
        direction: Direction,
        input: &impl Readable<Complex<T>>,
        output: &mut impl Writable<Complex<T>>,
    ) -> Result<()> {
        let mut work = WorkMemory::None;
        let uses = Uses::new("fft").can_be_captured().reads(input).writes(output);
        let (uses, (from, to)) = uses.into_parts();
        let len = self.shape.len();
        let uses = self.prepare(
            queue,
            uses,
            [Argument::new("the input", from, len), Argument::new("the output", to, len)],
            &mut work,
        )?;
        let (uses, work) = work.declare(uses);
        self.enqueue(queue, uses, |queue| {
            let shape = self.shape.clone();
            self.run(queue, direction, [from.address(), to.address()], work, move || {
                let (from, to) = (slice(from), slice_mut(to));
                to.copy_from_slice(from);
                twin::complex(&shape, to, direction == Direction::Forward);
            })
        })
    }

    pub(super) fn transform_in_place<T: FftElement>(
        &self,
        queue: &Queue<'_>,
        direction: Direction,
        data: &mut impl Writable<Complex<T>>,
    ) -> Result<()> {
        let mut work = WorkMemory::None;
        let (uses, (data,)) = Uses::new("fft").can_be_captured().updates(data).into_parts();
        let argument = Argument::new("the data", data, self.shape.len());
        let uses = self.prepare(queue, uses, [argument], &mut work)?;
        let (uses, work) = work.declare(uses);
        self.enqueue(queue, uses, |queue| {
            let shape = self.shape.clone();
            self.run(queue, direction, [data.address(); 2], work, move || {
                twin::complex(&shape, slice_mut(data), direction == Direction::Forward);
            })
        })
    }

    pub(super) fn real_forward<T: FftElement>(
        &self,
        queue: &Queue<'_>,
        signal: &impl Readable<T>,
        spectrum: &mut impl Writable<Complex<T>>,
    ) -> Result<()> {
        let mut work = WorkMemory::None;
        let uses = Uses::new("fft_forward").can_be_captured().reads(signal).writes(spectrum);
        let (uses, (from, to)) = uses.into_parts();
        let uses = self.prepare(queue, uses, self.real(from, to), &mut work)?;
        let (uses, work) = work.declare(uses);
        self.enqueue(queue, uses, |queue| {
            let (shape, pointers) = (self.shape.clone(), [from.address(), to.address()]);
            self.run(queue, Direction::Forward, pointers, work, move || {
                twin::real_forward(&shape, slice(from), slice_mut(to));
            })
        })
    }

    pub(super) fn real_inverse<T: FftElement>(
        &self,
        queue: &Queue<'_>,
        spectrum: &mut impl Writable<Complex<T>>,
        signal: &mut impl Writable<T>,
    ) -> Result<()> {
        let mut work = WorkMemory::None;
        let uses = Uses::new("fft_inverse").can_be_captured().updates(spectrum).writes(signal);
        let (uses, (from, to)) = uses.into_parts();
        let uses = self.prepare(queue, uses, self.real(to, from), &mut work)?;
        let (uses, work) = work.declare(uses);
        self.enqueue(queue, uses, |queue| {
            let (shape, pointers) = (self.shape.clone(), [from.address(), to.address()]);
            self.run(queue, Direction::Inverse, pointers, work, move || {
                twin::real_inverse(&shape, slice(from), slice_mut(to));
            })
        })
    }

    fn real<T>(&self, signal: RawSlice<T>, spectrum: RawSlice<Complex<T>>) -> [Argument; 2] {
        [
            Argument::new("the signal", signal, self.shape.len()),
            Argument::new("the spectrum", spectrum, self.shape.spectrum_len()),
        ]
    }

    /// Checks device, lengths and addresses, and takes memory for the work area.
    fn prepare<'a, 'w, const N: usize>(
        &'w self,
        queue: &Queue<'_>,
        uses: Uses<'a>,
        arguments: [Argument; N],
        work: &mut WorkMemory<'w>,
    ) -> Result<Uses<'a>> {
        if let Err(error) = self.device.check_queue(queue) {
            return Err(refuse(uses, error));
        }
        let alignment = self.shape.alignment();
        let mut arguments = arguments.into_iter();
        if let Some(error) = arguments.find_map(|argument| argument.problem(alignment)) {
            return Err(refuse(uses, error.into()));
        }
        match self.area.take(queue, self.work_bytes()) {
            Ok(memory) => *work = memory,
            Err(error) => return Err(refuse(uses, error)),
        }
        // A graph's launch uses the plan's tables, even after the plan is dropped.
        let uses = match &self.plan {
            Some(plan) if queue.is_recording_graph() => uses.keeps(plan.clone()),
            _ => uses,
        };
        Ok(uses)
    }

    /// Puts a transform on the queue's stream.
    fn enqueue(
        &self,
        queue: &Queue<'_>,
        uses: Uses<'_>,
        transform: impl FnOnce(&RawQueue<'_>) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: all that cuFFT and the twins touch is declared, and the library puts its work on that stream alone.
        unsafe { queue.enqueue(uses, |queue, ()| transform(queue)) }
    }

    /// Transforms with the library on a GPU, or with the twin.
    fn run(
        &self,
        queue: &RawQueue<'_>,
        direction: Direction,
        pointers: [u64; 2],
        work: Option<RawSlice<u8>>,
        twin: impl FnMut() + Send + 'static,
    ) -> Result<()> {
        if let Some(plan) = &self.plan {
            let work = work.map_or(0, RawSlice::address);
            let forward = direction == Direction::Forward;
            return plan.get().execute(queue.stream(), forward, pointers, work);
        }
        queue.host_each(twin)
    }
}

/// Memory given to a launch, and the length that it should have.
struct Argument {
    what: &'static str,
    ptr: u64,
    found: usize,
    expected: usize,
}

impl Argument {
    fn new<T>(what: &'static str, slice: RawSlice<T>, expected: usize) -> Self {
        Argument { what, ptr: slice.address(), found: slice.len(), expected }
    }

    fn problem(self, alignment: u64) -> Option<ErrorDetail> {
        let Argument { what, ptr, found, expected } = self;
        let op = "fft";
        if found != expected {
            return Some(ErrorDetail::WrongLength { op, what, expected, found });
        }
        let is_aligned = ptr.is_multiple_of(alignment);
        (!is_aligned).then_some(ErrorDetail::Misaligned { op, what, ptr, alignment })
    }
}

/// A declared range, on the worker of a host device's stream.
fn slice<'a, T>(declared: RawSlice<T>) -> &'a [T] {
    // SAFETY: a twin calls this, in an operation that declared the range as read or updated, and ends first.
    unsafe { declared.as_slice() }
}

/// A declared range for writing, on the worker of a host device's stream.
fn slice_mut<'a, T>(declared: RawSlice<T>) -> &'a mut [T] {
    // SAFETY: a twin calls this, in an operation that declared the range as written or updated, and ends first.
    unsafe { declared.as_mut_slice() }
}
