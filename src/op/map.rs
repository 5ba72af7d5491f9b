//! An operation's value, passed through a function.
//!
//! | the operation | the function |
//! |---|---|
//! | completes, and is polled | is called in that poll, with no lock held |
//! | fails, or its device is lost | is dropped without being called |
//! | is dropped, abandoned or `queued` | is dropped without being called, in that call |
//!
//! # Invariants
//! 1. The function is called at most once, when every point is complete (`a_mapped_value_is_made_when_it_is_complete`).
//! 2. If the function panics, the operation counts as done and its stream continues (`a_panic_of_the_function_is_the_polls`).
#![forbid(unsafe_code)]

use super::{Op, Values};
use crate::error::Result;

impl<T: Send + 'static> Op<T> {
    /// Passes the value through a function; the result is again an [`Op`], which can be named, joined, polled
    /// in place or blocked on. Puts nothing on the stream. Ready proves the same as the operation's own, and
    /// that the function returned.
    ///
    /// `f` runs in the poll that finds the operation ready, on the thread that polls (or in
    /// [`try_take`](Op::try_take) or [`synchronize`](Op::synchronize)): keep it short, as in any
    /// `Future::poll`. It may submit work. It costs one allocation, or none if `f` and the value are
    /// zero-sized.
    ///
    /// It is not called `map` or `map_ok`, which belong to `FutureExt` and `TryFutureExt`: those work on an
    /// `Op` as on any future, and return other types.
    ///
    /// # Cancel safety
    /// `f` is called at most once. It is dropped without a call if the operation fails or is dropped before it was polled ready.
    /// [`queued`](Op::queued) waits for no value: for an `Op<()>` it succeeds without the call, for others it is an error.
    ///
    /// # Errors
    /// Those of the operation. Host memory of a refused call is no longer handed back: call
    /// [`accepted`](Op::accepted) first.
    ///
    /// # Panics
    /// If its value was already taken. A panic of `f` unwinds out of the poll; the operation is still
    /// complete on the device, and polling it again panics.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Op, join_all};
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.full(1000, 0.5f32).queued()?;
    /// let y = stream.full(10, 3.0f32).queued()?;
    /// let sums: Vec<Op<f32>> =
    ///     [&x, &y].map(|x| stream.download(x).map_value(|x| x.iter().sum())).into();
    /// assert_eq!(join_all(sums).await?, [500.0, 30.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn map_value<U: Send + 'static>(self, f: impl FnOnce(T) -> U + Send + 'static) -> Op<U> {
        self.try_map_value(move |value| Ok(f(value)))
    }

    /// [`map_value`](Self::map_value) with a function that can fail.
    pub(crate) fn try_map_value<U: Send + 'static>(
        self,
        f: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> Op<U> {
        match self.into_parts() {
            Err(error) => Op::failed(error),
            Ok((points, value)) => Op::at(points, value.make(f)),
        }
    }
}
