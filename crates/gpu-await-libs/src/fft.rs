//! Fourier transforms by cuFFT, as operations.
//!
//! [`Fft`] is the library, found at run time; [`ComplexFft`] and [`RealFft`] are plans for transforms of one shape. On a host device a plan
//! computes the same on the CPU.
//!
//! | memory of a transform | is declared as |
//! |---|---|
//! | the input | read; for an inverse real transform updated, because cuFFT overwrites it |
//! | the output | overwritten |
//! | the work area | overwritten |
//!
//! # Invariants
//! 1. A plan's stream and work area are set and used by one launch at a time: two streams may use one plan (`one_plan_on_two_streams`).

mod cufft;
mod plan;
mod shape;
mod twin;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use gpu_await::sibling::{LibraryDevice, check_thread, off_executor};
use gpu_await::{Device, LaunchOn, Readable, Result, Writable};
use num_complex::Complex;

use self::plan::{Direction, FftCore, Transformer};
pub use self::shape::FftElement;
use self::shape::FftShape;

/// The library for Fourier transforms on a device: cuFFT on a GPU, `rustfft` on a host device. Cheap to clone.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::Device;
/// use gpu_await_libs::{Complex, Fft};
/// let device = Device::cuda_or_host()?;
/// let stream = device.stream()?;
/// let plan = Fft::load(&device).await?.real::<f32>(&[8]).plan().await?;
/// let signal = stream.upload(vec![1.0f32; 8]).queued()?;
/// let mut spectrum = stream.empty::<Complex<f32>>(5).queued()?; // 8 / 2 + 1
/// plan.forward(&stream, &signal, &mut spectrum).queued()?;
/// assert_eq!(stream.download(&spectrum).await?[0], Complex::new(8.0, 0.0));
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Fft {
    transformer: Transformer,
}

/// The shape of transforms; made by [`Fft::complex`] and [`Fft::real`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `plan`"]
pub struct FftBuilder<P> {
    transformer: Transformer,
    shape: FftShape,
    plan: PhantomData<fn() -> P>,
}

/// A plan for transforms of complex numbers. Cheap to clone; any thread may launch it on any stream of its device.
///
/// Nothing is scaled: the inverse of a forward transform is the signal times its length.
pub struct ComplexFft<T> {
    core: Arc<FftCore>,
    element: PhantomData<fn() -> T>,
}

/// A plan for transforms of real signals, whose spectra have `n / 2 + 1` numbers in the last dimension of `n`. Cheap to
/// clone; any thread may launch it on any stream of its device.
///
/// Nothing is scaled: an inverse of a forward transform is the signal times its length.
pub struct RealFft<T> {
    core: Arc<FftCore>,
    element: PhantomData<fn() -> T>,
}

impl Fft {
    /// Loads the library. If the future is dropped, the library still loads.
    ///
    /// # Errors
    /// [`ErrorDetail::NoLibrary`](gpu_await::ErrorDetail::NoLibrary): no cuFFT, with where it was looked for and what to
    /// install; a device that is lost or closed.
    ///
    /// # Source
    /// The library is `libcufft.so.12` or `.11`; the environment variable `GPU_AWAIT_CUFFT` names the file or its folder.
    pub async fn load(device: &Device) -> Result<Fft> {
        let device = LibraryDevice::of(device);
        off_executor("loading a library", move || {
            Ok(Fft { transformer: Transformer::load(device)? })
        })
        .await
    }

    /// [`load`](Self::load) on the calling thread.
    ///
    /// # Blocking
    /// Yes, up to seconds: not from async code.
    ///
    /// # Errors
    /// As [`load`](Self::load); a thread on which it would deadlock.
    pub fn load_blocking(device: &Device) -> Result<Fft> {
        check_thread("loading a library")?;
        Ok(Fft { transformer: Transformer::load(LibraryDevice::of(device))? })
    }

    /// Begins a plan for transforms of complex numbers, of one to three dimensions, row-major.
    pub fn complex<T: FftElement>(&self, extents: &[usize]) -> FftBuilder<ComplexFft<T>> {
        self.builder(FftShape::new(extents, false, T::DOUBLE))
    }

    /// Begins a plan for transforms of real numbers, of one to three dimensions, row-major.
    pub fn real<T: FftElement>(&self, extents: &[usize]) -> FftBuilder<RealFft<T>> {
        self.builder(FftShape::new(extents, true, T::DOUBLE))
    }

    fn builder<P>(&self, shape: FftShape) -> FftBuilder<P> {
        FftBuilder { transformer: self.transformer.clone(), shape, plan: PhantomData }
    }
}

impl<P: From<FftPlan>> FftBuilder<P> {
    /// Makes each launch compute `count` transforms, of signals stored one after the other.
    pub fn batch(mut self, count: usize) -> Self {
        self.shape.batch = count;
        self
    }

    /// Makes the plan. If the future is dropped, the plan is still made.
    ///
    /// # Errors
    /// [`ErrorDetail::TooFew`](gpu_await::ErrorDetail::TooFew): an extent or a batch of 0, or no extent; more elements than fit in memory;
    /// [`ErrorDetail::Unsupported`](gpu_await::ErrorDetail::Unsupported): more than three extents;
    /// [`ErrorDetail::Foreign`](gpu_await::ErrorDetail::Foreign): errors of cuFFT; a device that is lost or closed.
    ///
    /// # Source
    /// `cufftMakePlanMany64`.
    pub async fn plan(self) -> Result<P> {
        let core =
            off_executor("making a plan", move || self.transformer.plan(&self.shape)).await?;
        Ok(FftPlan(Arc::new(core)).into())
    }

    /// [`plan`](Self::plan) on the calling thread.
    ///
    /// # Blocking
    /// Yes, up to seconds: not from async code.
    ///
    /// # Errors
    /// As [`plan`](Self::plan); a thread on which it would deadlock.
    pub fn plan_blocking(self) -> Result<P> {
        check_thread("making a plan")?;
        Ok(FftPlan(Arc::new(self.transformer.plan(&self.shape)?)).into())
    }
}

/// A plan of either kind; not part of the API.
#[doc(hidden)]
pub struct FftPlan(Arc<FftCore>);

impl<T> From<FftPlan> for ComplexFft<T> {
    fn from(plan: FftPlan) -> Self {
        ComplexFft { core: plan.0, element: PhantomData }
    }
}

impl<T> From<FftPlan> for RealFft<T> {
    fn from(plan: FftPlan) -> Self {
        RealFft { core: plan.0, element: PhantomData }
    }
}

impl<T: FftElement> ComplexFft<T> {
    /// Puts a forward transform on a stream, a device's current stream, or a batch. Ready proves *complete on the
    /// device*.
    ///
    /// # Blocking
    /// As a [launch](gpu_await::Stream::launch): while the stream's queue is full, and the first time.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength): an argument of another shape;
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): an address, even of real numbers, that is not a
    /// multiple of the size of a complex number, 8 bytes or 16;
    /// [`ErrorDetail::WrongDevice`](gpu_await::ErrorDetail::WrongDevice); no memory for the work area; those of cuFFT, as
    /// [`ErrorDetail::Foreign`](gpu_await::ErrorDetail::Foreign); an input that was never written or whose producer
    /// failed.
    ///
    /// # Source
    /// `cufftExecC2C`, `cufftExecZ2Z`.
    #[track_caller]
    pub fn forward<O: LaunchOn>(
        &self,
        on: &O,
        input: &impl Readable<Complex<T>>,
        output: &mut impl Writable<Complex<T>>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.transform(queue, Direction::Forward, input, output))
    }

    /// Puts an inverse transform on a stream, a device's current stream, or a batch, unscaled. Ready proves *complete on
    /// the device*.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn inverse<O: LaunchOn>(
        &self,
        on: &O,
        input: &impl Readable<Complex<T>>,
        output: &mut impl Writable<Complex<T>>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.transform(queue, Direction::Inverse, input, output))
    }

    /// [`forward`](Self::forward) in place.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn forward_in_place<O: LaunchOn>(
        &self,
        on: &O,
        data: &mut impl Writable<Complex<T>>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.transform_in_place::<T>(queue, Direction::Forward, data))
    }

    /// [`inverse`](Self::inverse) in place.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn inverse_in_place<O: LaunchOn>(
        &self,
        on: &O,
        data: &mut impl Writable<Complex<T>>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.transform_in_place::<T>(queue, Direction::Inverse, data))
    }
}

impl<T: FftElement> RealFft<T> {
    /// Puts a forward transform on a stream, a device's current stream, or a batch. Ready proves *complete on the
    /// device*.
    ///
    /// # Errors
    /// As [`ComplexFft::forward`].
    ///
    /// # Source
    /// `cufftExecR2C`, `cufftExecD2Z`.
    #[track_caller]
    pub fn forward<O: LaunchOn>(
        &self,
        on: &O,
        signal: &impl Readable<T>,
        spectrum: &mut impl Writable<Complex<T>>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.real_forward::<T>(queue, signal, spectrum))
    }

    /// Puts an inverse transform on a stream, a device's current stream, or a batch, unscaled. Ready proves *complete on
    /// the device*. What `spectrum` holds afterwards is unspecified.
    ///
    /// # Errors
    /// As [`ComplexFft::forward`].
    ///
    /// # Source
    /// `cufftExecC2R`, `cufftExecZ2D`.
    #[track_caller]
    pub fn inverse<O: LaunchOn>(
        &self,
        on: &O,
        spectrum: &mut impl Writable<Complex<T>>,
        signal: &mut impl Writable<T>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.real_inverse::<T>(queue, spectrum, signal))
    }
}

macro_rules! plans {
    ($($plan:ident)+) => {$(
        impl<T> $plan<T> {
            /// Returns how much memory a launch uses besides its arguments, in bytes. The plan keeps that much from
            /// its first launch on; a launch that finds it in use by another stream allocates as much for itself.
            #[must_use]
            pub fn work_bytes(&self) -> usize {
                self.core.work_bytes()
            }
        }

        impl<T> Clone for $plan<T> {
            fn clone(&self) -> Self {
                $plan { core: self.core.clone(), element: PhantomData }
            }
        }

        impl<T> fmt::Debug for $plan<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}<{}>({})", stringify!($plan), std::any::type_name::<T>(), self.core.shape())
            }
        }
    )+};
}
plans! { ComplexFft RealFft }
