//! Matrix products by cuBLASLt, as operations.
//!
//! [`Blas`] is the library, found at run time; [`Gemm`] is a plan for products of one shape: layouts, epilogue and algorithm are chosen
//! when the plan is made, so that a launch searches for nothing. In a [partition](gpu_await::Partition) its first launch chooses an algorithm for
//! that number of multiprocessors. On a host device a plan computes the same on the CPU.
//!
//! | memory of a product | is declared as |
//! |---|---|
//! | `a`, `b`, the bias | read |
//! | `c` | overwritten if `beta` is 0 and it has no gaps, else updated |
//! | zeros, in place of `a` and `b` if `k` is 0 | read |
//! | the workspace | overwritten |
//!
//! From the third launch with the same addresses and scales, the library is not called: the launch submits the kernels that the second call
//! captured, in at most two thirds of the host time (`known_calls`). A server whose requests reuse their buffers benefits automatically;
//! so, mostly, does one that allocates per request, because allocations usually get back the blocks that the stream freed.
//!
//! # Invariants
//! 1. After [`GemmBuilder::plan`] no algorithm is searched for (`a_launch_searches_for_nothing`), except once for each size of
//!    partition
//!    (`products_in_partitions`). A plan for a recently planned shape is made without a search as well (`shapes_that_come_again`).
//! 2. Two streams never share a workspace (`products_on_two_streams`): a launch uses the plan's own, or one of its own
//!    ([`work_area`](crate::work_area)).

mod element;
mod known_calls;
mod lt;
mod plan;
mod plan_cache;
mod shape;
mod twin;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use gpu_await::sibling::{LibraryDevice, check_thread, off_executor};
use gpu_await::{Device, LaunchOn, Readable, Result, View, Writable};

pub use self::element::GemmElement;
use self::plan::{GemmCore, Multiplier};
pub use self::shape::Activation;
use self::shape::{Shape, Strides};

/// The library for matrix products on a device: cuBLASLt on a GPU, the CPU on a host device. Cheap to clone.
///
/// It keeps the 256 most recently used plans, so a service whose batches vary in their number of rows can make plans as they come: a shape that
/// comes again is not searched for again. Clones share these plans; another [`load`](Self::load) begins with none.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::Device;
/// use gpu_await_libs::{Activation, Blas};
/// let device = Device::cuda_or_host()?;
/// let stream = device.stream()?;
/// let blas = Blas::load(&device).await?;
/// // 2 x 3 times 3 x 2, row by row, with a bias for each column of the result.
/// let layer = blas.gemm::<f32>(2, 2, 3).bias().activation(Activation::Relu).plan().await?;
///
/// let a = stream.upload(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).queued()?;
/// let b = stream.upload(vec![1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).queued()?;
/// let bias = stream.upload(vec![0.5, -100.0]).queued()?;
/// let mut c = stream.empty::<f32>(4).queued()?;
/// layer.launch_with_bias(&stream, 1.0, &a, &b, &bias, 0.0, &mut c).queued()?;
/// assert_eq!(stream.download(&c).await?, [4.5, 0.0, 10.5, 0.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Blas {
    multiplier: Multiplier,
}

/// The shape of products, and how they are computed; made by [`Blas::gemm`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `plan`"]
pub struct GemmBuilder<T, C = T> {
    multiplier: Multiplier,
    shape: Shape,
    elements: Elements<T, C>,
}

/// A plan for products `c = activation(alpha * a * b + beta * c + bias)` of one shape: `a` and `b` of elements `T`, `c` and the bias of
/// elements `C`. Cheap to clone; any thread may launch it on any stream of its device.
pub struct Gemm<T, C = T> {
    core: Arc<GemmCore>,
    elements: Elements<T, C>,
}

type Elements<T, C> = PhantomData<fn() -> (T, C)>;

impl Blas {
    /// Loads the library. If the future is dropped, the library still loads.
    ///
    /// # Errors
    /// [`ErrorDetail::NoLibrary`](gpu_await::ErrorDetail::NoLibrary): no cuBLASLt, with where it was looked for and what to install;
    /// [`ErrorDetail::Foreign`](gpu_await::ErrorDetail::Foreign): one that does not work with this driver; a device that is lost or closed.
    ///
    /// # Source
    /// `cublasLtCreate`. The library is `libcublasLt.so.13` or `.12`; the environment variable `GPU_AWAIT_CUBLASLT` names
    /// the file or its folder.
    pub async fn load(device: &Device) -> Result<Blas> {
        let device = LibraryDevice::of(device);
        off_executor("loading a library", move || {
            Ok(Blas { multiplier: Multiplier::load(device)? })
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
    pub fn load_blocking(device: &Device) -> Result<Blas> {
        check_thread("loading a library")?;
        Ok(Blas { multiplier: Multiplier::load(LibraryDevice::of(device))? })
    }

    /// Begins a plan for products of an `m` x `k` matrix and a `k` x `n` matrix, row-major and without gaps unless
    /// [strides](GemmBuilder::strides_a) say otherwise. All of `a`, `b`, `c` and the bias have elements of type `T`, unless the
    /// output is [wide](GemmBuilder::wide_output); sums are in `f32`, or in `f64` for `f64`.
    ///
    /// Extents may be 0. With an empty `c` nothing is computed. If `k` is 0, all sums are empty: `c` becomes `activation(beta * c + bias)`,
    /// whatever `alpha` is.
    pub fn gemm<T: GemmElement>(&self, m: usize, n: usize, k: usize) -> GemmBuilder<T> {
        let shape = Shape::new(m, n, k, T::KIND);
        GemmBuilder { multiplier: self.multiplier.clone(), shape, elements: PhantomData }
    }
}

impl<T: GemmElement, C: GemmElement<Scale = T::Scale>> GemmBuilder<T, C> {
    /// Gives `c` and the bias the type of the sums: `f32` where `a` and `b` are `f16` or `bf16`; other types stay the same.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::half::f16;
    /// use gpu_await::Device;
    /// use gpu_await_libs::Blas;
    /// let device = Device::cuda_or_host()?;
    /// let stream = device.stream()?;
    /// let gemm = Blas::load(&device).await?.gemm::<f16>(8, 8, 64).wide_output().plan().await?;
    ///
    /// let (a, b) = (stream.ones::<f16>(8 * 64).queued()?, stream.ones::<f16>(64 * 8).queued()?);
    /// let mut c = stream.empty::<f32>(8 * 8).queued()?;
    /// // `f16` ends at 65,504.
    /// gemm.launch(&stream, 2048.0, &a, &b, 0.0, &mut c).queued()?;
    /// assert_eq!(stream.download(&c).await?, [131_072.0; 64]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn wide_output(mut self) -> GemmBuilder<T, T::Scale> {
        self.shape.out = T::Scale::KIND;
        GemmBuilder { multiplier: self.multiplier, shape: self.shape, elements: PhantomData }
    }

    /// Makes each launch compute `count` products, of matrices stored one after the other unless strides say otherwise.
    pub fn batch(mut self, count: usize) -> Self {
        self.shape.batch = count;
        self
    }

    /// Takes `a` transposed: `k` rows of `m`.
    pub fn transposed_a(mut self) -> Self {
        self.shape.transposed_a = true;
        self
    }

    /// Takes `b` transposed: `n` rows of `k`, as the weights of a linear layer often are.
    pub fn transposed_b(mut self) -> Self {
        self.shape.transposed_b = true;
        self
    }

    /// Takes the rows of `a`, as they are stored, `row` elements apart (BLAS calls that the leading dimension), and the matrices of a
    /// [batch](Self::batch) `matrix` elements apart. If `matrix` is 0, all products share one `a`.
    ///
    /// # Shapes and units
    /// An argument with strides has at least the elements from the first to the last one used; any others are not touched. Rows do not overlap: `row`
    /// is at least a row's length.
    ///
    /// # Examples
    /// The products of each head of attention, `q * k'`, where a row of `qkv` has all heads of one token:
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Device;
    /// use gpu_await_libs::Blas;
    /// let device = Device::cuda_or_host()?;
    /// let stream = device.stream()?;
    /// let (tokens, heads, size) = (8, 2, 4);
    /// let hidden = heads * size;
    /// let scores = Blas::load(&device).await?.gemm::<f32>(tokens, tokens, size).batch(heads);
    /// let scores = scores.strides_a(3 * hidden, size).transposed_b().strides_b(3 * hidden, size);
    /// let scores = scores.plan().await?;
    ///
    /// let qkv = stream.full(tokens * 3 * hidden, 0.5f32).queued()?;
    /// let (q, k) = (qkv.slice(..)?, qkv.slice(hidden..)?);
    /// let mut out = stream.empty::<f32>(heads * tokens * tokens).queued()?;
    /// scores.launch(&stream, 1.0, &q, &k, 0.0, &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [1.0; 128]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn strides_a(mut self, row: usize, matrix: usize) -> Self {
        self.shape.strides[0] = Some(Strides { row, matrix });
        self
    }

    /// [`strides_a`](Self::strides_a) for `b`.
    pub fn strides_b(mut self, row: usize, matrix: usize) -> Self {
        self.shape.strides[1] = Some(Strides { row, matrix });
        self
    }

    /// [`strides_a`](Self::strides_a) for `c`, whose matrices have no element in common. Either each begins after the last element of the one before,
    /// or all of them interleave within one row stride: `matrix >= n` and `row >= (count - 1) * matrix + n`. Other strides are refused, even the
    /// few without overlap.
    ///
    /// Elements in gaps are not changed. So a `c` with gaps counts as updated even if `beta` is 0, and must have been written before.
    pub fn strides_c(mut self, row: usize, matrix: usize) -> Self {
        self.shape.strides[2] = Some(Strides { row, matrix });
        self
    }

    /// Adds a bias to each row of the product: `n` elements, the same for all products of a batch.
    pub fn bias(mut self) -> Self {
        self.shape.bias = true;
        self
    }

    /// Applies a function to each element of the result.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.shape.activation = activation;
        self
    }

    /// Lets products of `f32` round their inputs to 10 bits of mantissa, for tensor cores; other types and
    /// host devices are not affected.
    pub fn tf32(mut self) -> Self {
        self.shape.tf32 = true;
        self
    }

    /// Limits the scratch memory of a launch; 32 MiB by default.
    pub fn workspace_bytes(mut self, most: usize) -> Self {
        self.shape.workspace_bytes = most;
        self
    }

    /// Chooses the algorithm; for a shape that the [library](Blas) planned recently it is known, and the future is ready at once. Each plan has
    /// scratch memory of its own. If the future is dropped, the choice goes on.
    ///
    /// # Errors
    /// [`ErrorDetail::TooLarge`](gpu_await::ErrorDetail::TooLarge); strides that make rows overlap ([`ErrorDetail::Pitch`](gpu_await::ErrorDetail::Pitch)), or matrices of `c`
    /// that might overlap ([`ErrorDetail::TooFew`](gpu_await::ErrorDetail::TooFew)); [`ErrorDetail::Foreign`](gpu_await::ErrorDetail::Foreign): cuBLASLt has no algorithm for that; a
    /// device that is lost or closed.
    ///
    /// # Source
    /// `cublasLtMatmulAlgoGetHeuristic`.
    pub async fn plan(self) -> Result<Gemm<T, C>> {
        let GemmBuilder { multiplier, shape, .. } = self;
        let core = match multiplier.known_plan(&shape) {
            Some(core) => core,
            None => off_executor("choosing an algorithm", move || multiplier.plan(&shape)).await?,
        };
        Ok(Gemm { core: Arc::new(core), elements: PhantomData })
    }

    /// [`plan`](Self::plan) on the calling thread.
    ///
    /// # Blocking
    /// Yes, some milliseconds the first time: not from async code.
    ///
    /// # Errors
    /// As [`plan`](Self::plan); a thread on which it would deadlock.
    pub fn plan_blocking(self) -> Result<Gemm<T, C>> {
        check_thread("choosing an algorithm")?;
        let core = self.multiplier.plan(&self.shape)?;
        Ok(Gemm { core: Arc::new(core), elements: PhantomData })
    }
}

impl<T: GemmElement, C: GemmElement<Scale = T::Scale>> Gemm<T, C> {
    /// Puts the product on a stream, a device's current stream, or a batch. Ready proves *complete on the
    /// device*.
    ///
    /// If `beta` is 0, or -0.0, it does not count as a factor: `c` is overwritten, whatever it held. For `alpha` that holds where `a` and `b` are
    /// finite: the product is 0. cuBLASLt may sum in parts and scale each: where 0 meets an infinity or a NaN (an `alpha` of 0 with such
    /// elements, an infinite `alpha` and a part whose sum is 0), whether NaN results is its choice.
    ///
    /// # Blocking
    /// As a [launch](gpu_await::Stream::launch): while the stream's queue is full, and the first time, in each size of partition.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength): an argument of another shape, or with strides a shorter one;
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): one whose address is not a multiple of 16;
    /// [`ErrorDetail::WrongDevice`](gpu_await::ErrorDetail::WrongDevice); a plan with a bias
    /// ([`launch_with_bias`](Self::launch_with_bias)); no memory for the workspace; errors of cuBLASLt, as
    /// [`ErrorDetail::Foreign`](gpu_await::ErrorDetail::Foreign); inputs that were never written or whose producer failed.
    ///
    /// # Source
    /// `cublasLtMatmul`; for addresses and scales that came before, `cuLaunchKernelEx` with the kernels that it launched then.
    #[track_caller]
    pub fn launch<O: LaunchOn>(
        &self,
        on: &O,
        alpha: T::Scale,
        a: &impl Readable<T>,
        b: &impl Readable<T>,
        beta: T::Scale,
        c: &mut impl Writable<C>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.put(queue, (alpha, beta), a, b, None::<&View<'_, C>>, c))
    }

    /// [`launch`](Self::launch) for a plan with a bias.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); a plan without a bias.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "the product has as many")]
    pub fn launch_with_bias<O: LaunchOn>(
        &self,
        on: &O,
        alpha: T::Scale,
        a: &impl Readable<T>,
        b: &impl Readable<T>,
        bias: &impl Readable<C>,
        beta: T::Scale,
        c: &mut impl Writable<C>,
    ) -> O::Launched {
        on.batch_of_one(|queue| self.core.put(queue, (alpha, beta), a, b, Some(bias), c))
    }

    /// Returns the size of a launch's scratch memory, in bytes. The plan keeps that much from its first launch on; a launch that finds it in
    /// use by another stream allocates as much again. In a graph each product has its own memory of that size, on each stream:
    /// [`GemmBuilder::workspace_bytes`] bounds it, and 0 allows none.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.core.workspace_bytes()
    }
}

impl<T, C> Clone for Gemm<T, C> {
    fn clone(&self) -> Self {
        Gemm { core: self.core.clone(), elements: PhantomData }
    }
}

impl<T, C> fmt::Debug for Gemm<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gemm<{}>({})", std::any::type_name::<T>(), self.core.shape())
    }
}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blas({})", self.multiplier.device().label())
    }
}
