//! Views whose uses the library neither tracks nor orders: the caller orders them.

use super::Element;
use super::view::{View, ViewMut};

impl<'a, T: Element> View<'a, T> {
    /// Returns the same range outside the library's tracking: operations that use it wait for no other
    /// stream, and no other operation waits for them.
    ///
    /// This saves the cost of tracking, some ten nanoseconds per use. Nothing checks whether the range was
    /// written or its producer failed.
    ///
    /// # Safety
    /// Every use of the result must be ordered by the caller, as in CUDA: by the stream itself, by
    /// [`Stream::wait`](crate::Stream::wait), or by awaiting. It must come behind the writes that produced
    /// the data, and later writes, and **the drop of the buffer**, must come behind it: a buffer is freed
    /// when its *tracked* uses are complete.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let (a, b) = (device.stream()?, device.stream()?);
    /// let weights = a.upload(vec![1.0f32; 100]).await?; // complete: nobody needs to wait for it
    /// // SAFETY: nothing writes the weights again, and they outlive the await.
    /// let read_only = unsafe { weights.view().untracked() };
    /// assert_eq!(b.download(&read_only).await?[99], 1.0);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub unsafe fn untracked(self) -> View<'a, T> {
        self.without_tracking()
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Returns the same range outside the library's tracking; see [`View::untracked`].
    ///
    /// Writes through it are not recorded: a buffer from [`empty`](crate::Stream::empty) stays unreadable for
    /// tracked operations.
    ///
    /// # Safety
    /// As [`View::untracked`]; and the caller orders every other use of the range, including reads, with the
    /// writes.
    #[must_use]
    pub unsafe fn untracked(self) -> ViewMut<'a, T> {
        self.without_tracking()
    }
}
