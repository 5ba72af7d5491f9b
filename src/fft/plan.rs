//! A plan for Fourier transforms: its shape, and its implementation.

use std::fmt;
use std::sync::Arc;

use num_complex::Complex;

#[cfg(feature = "cuda")]
use super::cufft::CufftPlan;
use super::shape::{FftElement, FftShape};
use super::twin;
use crate::backend::DeviceKind;
use crate::batch::queue::Queue;
use crate::error::{ErrorDetail, Result};
#[cfg(feature = "cuda")]
use crate::interop::library_object::LibraryObject;
use crate::interop::work_area::{WorkArea, WorkMemory};
use crate::memory::raw_slice::RawSlice;
use crate::memory::view::{Readable, Writable};
use crate::runtime::Engine;
use crate::submit::{RawQueue, Uses, wrong_device};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Inverse,
}

/// The implementation of transforms on a device.
#[derive(Clone)]
pub(super) struct Transformer {
    engine: Arc<Engine>,
}

/// A plan of either kind of device.
pub(super) struct FftCore {
    shape: FftShape,
    engine: Arc<Engine>,
    area: WorkArea,
    #[cfg(feature = "cuda")]
    plan: Option<Arc<LibraryObject<CufftPlan>>>,
}

impl fmt::Debug for Transformer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.engine.label())
    }
}

impl Transformer {
    pub(super) fn load(engine: &Arc<Engine>) -> Result<Self> {
        engine.check_open()?;
        #[cfg(feature = "cuda")]
        if engine.backend.kind() == DeviceKind::Cuda {
            super::cufft::load()?;
        }
        Ok(Transformer { engine: engine.clone() })
    }

    pub(super) fn plan(&self, shape: &FftShape) -> Result<FftCore> {
        let engine = &self.engine;
        shape.check(engine.label())?;
        engine.check_open()?;
        Ok(FftCore {
            shape: shape.clone(),
            engine: engine.clone(),
            area: WorkArea::default(),
            #[cfg(feature = "cuda")]
            plan: match engine.backend.kind() {
                DeviceKind::Cuda => {
                    Some(Arc::new(LibraryObject::new(engine, || CufftPlan::new(shape))?))
                }
                DeviceKind::Host => None,
            },
        })
    }
}

impl FftCore {
    pub(super) fn shape(&self) -> &FftShape {
        &self.shape
    }

    #[cfg(feature = "cuda")]
    pub(super) fn work_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.get().work_bytes())
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) fn work_bytes(&self) -> usize {
        0
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
        let (from, to) = uses.pointers();
        let len = self.shape.len();
        let uses = self.prepare(
            queue,
            uses,
            [Argument::new("the input", from, len), Argument::new("the output", to, len)],
            &mut work,
        )?;
        let (uses, work) = uses.also_writes(work.get_mut());
        queue.enqueue_library(uses, |queue, (from, to)| {
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
        let uses = Uses::new("fft").can_be_captured().updates(data);
        let (slice,) = uses.pointers();
        let data = Argument::new("the data", slice, self.shape.len());
        let uses = self.prepare(queue, uses, [data], &mut work)?;
        let (uses, work) = uses.also_writes(work.get_mut());
        queue.enqueue_library(uses, |queue, (data,)| {
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
        let (from, to) = uses.pointers();
        let uses = self.prepare(queue, uses, self.real(from, to), &mut work)?;
        let (uses, work) = uses.also_writes(work.get_mut());
        queue.enqueue_library(uses, |queue, (from, to)| {
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
        let (from, to) = uses.pointers();
        let uses = self.prepare(queue, uses, self.real(to, from), &mut work)?;
        let (uses, work) = uses.also_writes(work.get_mut());
        queue.enqueue_library(uses, |queue, (from, to)| {
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
    fn prepare<'a, 'w, P, const N: usize>(
        &'w self,
        queue: &Queue<'_>,
        uses: Uses<'a, P>,
        arguments: [Argument; N],
        work: &mut WorkMemory<'w>,
    ) -> Result<Uses<'a, P>> {
        let engine = queue.stream().engine();
        if engine.id != self.engine.id {
            return Err(uses.refuse(wrong_device("the plan", engine, &self.engine)));
        }
        let alignment = self.shape.alignment();
        let mut arguments = arguments.into_iter();
        if let Some(error) = arguments.find_map(|argument| argument.problem(alignment)) {
            return Err(uses.refuse(error.into()));
        }
        match self.area.take(queue, self.work_bytes()) {
            Ok(memory) => *work = memory,
            Err(error) => return Err(uses.refuse(error)),
        }
        // A graph's launch uses the plan's tables, even after the plan is dropped.
        #[cfg(feature = "cuda")]
        let uses = match &self.plan {
            Some(plan) if queue.is_drawing() => uses.keeps(plan.clone()),
            _ => uses,
        };
        Ok(uses)
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
        #[cfg(feature = "cuda")]
        if let Some(plan) = &self.plan {
            let work = work.map_or(0, RawSlice::address);
            let forward = direction == Direction::Forward;
            return plan.get().execute(queue.stream(), forward, pointers, work);
        }
        let _ = (direction, pointers, work);
        queue.host_each(twin)
    }
}

/// Memory that a launch got, and the length that it should have.
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
