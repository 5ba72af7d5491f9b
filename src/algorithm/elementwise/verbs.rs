//! The elementwise verbs of a [`Stream`] and a [`Device`]: batches of one.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::arithmetic::Arithmetic;
use super::formula::Formula;
use super::loaded::ElementwiseKernel;
use super::operands::{FormulaOver, Operands};
use super::put::{Index, kernel_of_cast, kernel_of_gather, kernel_of_scatter, kernel_of_sequence};
use crate::device::Device;
use crate::device::home::Home;
use crate::error::Result;
use crate::memory::view::{Readable, Writable};
use crate::op::Op;
use crate::runtime::coop;
use crate::stream::Stream;
use crate::thread::role;
use crate::thread::worker::offload;

/// Makes methods of [`Stream`], and of [`Device`] the same on its current stream.
macro_rules! verbs {
    ($(
        $(#[$meta:meta])*
        pub fn $name:ident [$($generics:tt)*] ($($arg:ident : $type:ty),+ $(,)?);
    )+) => {
        impl Stream {$(
            $(#[$meta])*
            #[track_caller]
            pub fn $name<$($generics)*>(&self, $($arg: $type),+) -> Op<()> {
                self.one(|queue| queue.$name($($arg),+))
            }
        )+}

        /// Algorithms, on the [current stream](Device::current_stream).
        impl Device {$(
            $(#[$meta])*
            ///
            /// On a [`Device`] it goes to the [current stream](Device::current_stream).
            #[track_caller]
            pub fn $name<$($generics)*>(&self, $($arg: $type),+) -> Op<()> {
                self.current_stream().$name($($arg),+)
            }
        )+}
    };
}

verbs! {
    /// Computes each element of `output` by a formula from the elements at its place. Ready proves *complete on the device*.
    ///
    /// `operands` is a tuple with one for each argument of the formula, in their order: a number, or `&x` for an array as long as
    /// `output`. All have one type, that of `output`, which is overwritten; `&mut` says that it is none of the arrays
    /// ([`transform_in_place`](Self::transform_in_place) is for that). It is one launch, and a kernel node of a graph.
    ///
    /// # Blocking
    /// The first use of a formula on a device, for each element type and each choice of which arguments are numbers, has the driver
    /// compile the kernel: some milliseconds, and until everything that runs on the GPU has ended, full [queues](Stream#blocking)
    /// included. [`preload_transform`](Device::preload_transform) does that ahead, off the executor. After that it is a launch:
    /// [`Stream::launch`].
    ///
    /// # Errors
    /// [`ErrorDetail::LengthMismatch`](crate::ErrorDetail::LengthMismatch); [`ErrorDetail::LiteralOutOfRange`](crate::ErrorDetail::LiteralOutOfRange): a number in the formula that the integers do not have;
    /// arrays that nothing has written or whose producer failed; memory of another device; a device that is lost or closed. The
    /// output is then poisoned until it is overwritten.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![3.0f32, 5.0]).queued()?;
    /// let y = stream.upload(vec![4.0f32, 12.0]).queued()?;
    /// let mut out = stream.empty(2).queued()?;
    /// let hypot = transform!(|x, y| (x * x + y * y).sqrt());
    /// stream.transform(hypot, (&x, &y), &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [5.0, 13.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuModuleLoadDataEx` once, then `cuLaunchKernel`.
    pub fn transform ['k, T: Arithmetic, F: Formula<N>, const N: usize] (
        formula: F,
        operands: impl Operands<'k, T, N, false>,
        output: &'k mut impl Writable<T>,
    );

    /// Replaces each element of `updated` by what a formula computes from it: the formula's last argument. Ready proves *complete on
    /// the device*.
    ///
    /// `operands` is a tuple for the arguments in front of that, as in [`transform`](Self::transform), and `()` if there are none.
    /// All of `updated` must have been written before.
    ///
    /// # Blocking
    /// As [`transform`](Self::transform), with which it shares its kernels.
    ///
    /// # Errors
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.full(4, 10u32).queued()?;
    /// let mut y = stream.full(4, 1u32).queued()?;
    /// stream.transform_in_place(transform!(|y| y << 2), (), &mut y).queued()?;
    /// stream.transform_in_place(transform!(|a, x, y| a * x + y), (3, &x), &mut y).queued()?;
    /// assert_eq!(stream.download(&y).await?, [34; 4]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn transform_in_place ['k, T: Arithmetic, F: Formula<N>, const N: usize] (
        formula: F,
        operands: impl Operands<'k, T, N, true>,
        updated: &'k mut impl Writable<T>,
    );

    /// Computes a comparison for each element: 1 where it holds, 0 where it does not. Ready proves *complete on the device*.
    ///
    /// The formula ends with a comparison, as `|x| x.gt(0.0) & x.lt(1.0)`; otherwise it is [`transform`](Self::transform).
    ///
    /// # Blocking
    /// As [`transform`](Self::transform).
    ///
    /// # Errors
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![-1i32, 0, 7]).queued()?;
    /// let mut flags = stream.empty(3).queued()?;
    /// stream.transform_flags(transform!(|least, x| x.ge(least)), (0, &x), &mut flags).queued()?;
    /// assert_eq!(stream.download(&flags).await?, [0, 1, 1]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn transform_flags ['k, T: Arithmetic, F: Formula<N>, const N: usize] (
        formula: F,
        operands: impl Operands<'k, T, N, false>,
        flags: &'k mut impl Writable<u8>,
    );

    /// Writes `start`, `start + step`, `start + 2 * step` and so on. Ready proves *complete on the device*.
    ///
    /// Integers wrap. Floating point numbers are `start + index * step` in `f64`, rounded once to the type: the error does not grow with the
    /// index.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Device`] has a method that loads it ahead.
    ///
    /// # Errors
    /// Memory of another device; a device that is lost or closed.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let mut x = stream.empty(4).queued()?;
    /// stream.sequence(1.0f32, 0.5, &mut x).queued()?;
    /// assert_eq!(stream.download(&x).await?, [1.0, 1.5, 2.0, 2.5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn sequence [T: Arithmetic] (start: T, step: T, output: &mut impl Writable<T>);

    /// Converts each element to another number type, as `as` does. Ready proves *complete on the device*.
    ///
    /// Integers keep their lower bits. From a floating point number to an integer it truncates, saturates, and makes 0 of a NaN. To a floating
    /// point number, also `f16` and `bf16`, it rounds to the nearest once, half-way cases to even.
    ///
    /// # Blocking
    /// The first use for two types, as [`transform`](Self::transform); [`preload_cast`](Device::preload_cast) loads it ahead.
    ///
    /// # Errors
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![1.9f32, -3.0, 300.0, f32::NAN]).queued()?;
    /// let mut bytes = stream.empty::<u8>(4).queued()?;
    /// stream.cast(&x, &mut bytes).queued()?;
    /// assert_eq!(stream.download(&bytes).await?, [1, 0, 255, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn cast [T: Arithmetic, U: Arithmetic] (
        source: &impl Readable<T>,
        output: &mut impl Writable<U>,
    );

    /// Reads elements from where indices say: `output[i] = source[indices[i]]`. Ready proves *complete on the device*.
    ///
    /// `output` is as long as `indices`. An index that is not below `source.len()` reads nothing, and gives 0.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Device`] has a method that loads it ahead.
    ///
    /// # Errors
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![10i32, 20, 30]).queued()?;
    /// let indices = stream.upload(vec![2u32, 0, 9]).queued()?;
    /// let mut out = stream.empty(3).queued()?;
    /// stream.gather(&x, &indices, &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [30, 10, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn gather [T: Arithmetic, I: Index] (
        source: &impl Readable<T>,
        indices: &impl Readable<I>,
        output: &mut impl Writable<T>,
    );

    /// Writes elements to where indices say: `target[indices[i]] = source[i]`. Ready proves *complete on the device*.
    ///
    /// `indices` is as long as `source`. An index that is not below `target.len()` writes nothing. Of several elements for one place, one is
    /// there in the end, any of them. What no index names stays, so all of `target` must have been written before.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Device`] has a method that loads it ahead.
    ///
    /// # Errors
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![1.5f64, 2.5]).queued()?;
    /// let indices = stream.upload(vec![3u64, 0]).queued()?;
    /// let mut out = stream.zeros(4).queued()?;
    /// stream.scatter(&x, &indices, &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [2.5, 0.0, 0.0, 1.5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn scatter [T: Arithmetic, I: Index] (
        source: &impl Readable<T>,
        indices: &impl Readable<I>,
        target: &mut impl Writable<T>,
    );
}

impl Device {
    /// Compiles and loads the kernel of a formula ahead of its first use, off the executor.
    ///
    /// `S` are the types of the formula's arguments, as of a [`Kernel`](crate::Kernel): a number type for a number, [`In`](crate::In)
    /// or [`InOut`](crate::InOut) of it for an array.
    ///
    /// # Blocking
    /// No; but the future stays pending until everything that runs on the GPU has ended, and while a stream's
    /// [queue is full](Stream#blocking). Load before serving.
    ///
    /// # Errors
    /// [`ErrorDetail::LiteralOutOfRange`](crate::ErrorDetail::LiteralOutOfRange); a device that is lost or closed.
    ///
    /// # Cancel safety
    /// Dropped, the load goes on, and its result is kept for the first use.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{In, transform};
    /// # let device = gpu_await::Device::host();
    /// let axpy = transform!(|a, x, y| a * x + y);
    /// device.preload_transform::<(f32, In<f32>, In<f32>)>(axpy).await?;
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub async fn preload_transform<S>(&self, formula: impl FormulaOver<S>) -> Result<()> {
        let prepared = formula.prepare();
        self.load_ahead(move |home| prepared.kernel(home)).await
    }

    /// Loads the kernel of [`sequence`](Self::sequence) for a type ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub async fn preload_sequence<T: Arithmetic>(&self) -> Result<()> {
        self.load_ahead(kernel_of_sequence::<T>).await
    }

    /// Loads the kernel of [`cast`](Self::cast) from `T` to `U` ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub async fn preload_cast<T: Arithmetic, U: Arithmetic>(&self) -> Result<()> {
        self.load_ahead(kernel_of_cast::<T, U>).await
    }

    /// Loads the kernel of [`gather`](Self::gather) for a type and its indices ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub async fn preload_gather<T: Arithmetic, I: Index>(&self) -> Result<()> {
        self.load_ahead(kernel_of_gather::<T, I>).await
    }

    /// Loads the kernel of [`scatter`](Self::scatter) for a type and its indices ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub async fn preload_scatter<T: Arithmetic, I: Index>(&self) -> Result<()> {
        self.load_ahead(kernel_of_scatter::<T, I>).await
    }

    async fn load_ahead(
        &self,
        kernel: impl FnOnce(&Home) -> Result<Arc<ElementwiseKernel>> + Send + 'static,
    ) -> Result<()> {
        coop::proceed().await;
        role::check_driver("loading a kernel")?;
        let home = self.home().clone();
        offload(move || kernel(&home).map(drop)).await?
    }
}
