//! [`Preload`]: loads kernels before they are needed.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_await::sibling::{Home, load_ahead};
use gpu_await::{Device, Result};

use super::code::LoadedImage;
use super::elementwise::arithmetic::Arithmetic;
use super::elementwise::loaded::ElementwiseKernel;
use super::elementwise::operands::FormulaOver;
use super::elementwise::put::{
    Index, kernel_of_cast, kernel_of_gather, kernel_of_scatter, kernel_of_sequence,
};
use super::rows;
use super::scalar::Scalar;

/// Loading the kernels of a device before they are needed. Sealed.
pub trait Preload: sealed::Sealed {
    /// Loads the kernels of algorithms for an element type, off the executor, so that their first use is as fast as any other. On a
    /// host device there is nothing to load.
    ///
    /// # Errors
    /// A GPU below compute capability 8.0; what the driver refuses; a lost or closed device.
    ///
    /// # Blocking
    /// No; but the future stays pending until everything that runs on the GPU has ended. Load before serving. On a GPU with a
    /// compute capability other than 9.0 the driver compiles the kernels, once per machine, which takes seconds.
    ///
    /// # Cancel safety
    /// If the future is dropped, loading goes on.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Preload;
    /// use gpu_await::Device;
    /// use gpu_await_algorithms::AlgorithmFamily;
    /// let device = Device::cuda_or_host()?;
    /// device.preload::<f32>(&[AlgorithmFamily::Reduce, AlgorithmFamily::Sort]).await?;
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuLibraryLoadData`.
    fn preload<T: Scalar>(
        &self,
        families: &[AlgorithmFamily],
    ) -> impl Future<Output = Result<()>> + Send;

    /// Compiles and loads the kernel of a formula ahead of its first use, off the executor.
    ///
    /// `S` are the types of the formula's arguments, as for a [`Kernel`](gpu_await::Kernel): a number type for a number, [`In`](gpu_await::In)
    /// or [`InOut`](gpu_await::InOut) of it for an array.
    ///
    /// # Blocking
    /// No; but the future stays pending until everything that runs on the GPU has ended, and while a stream's
    /// [queue is full](gpu_await::Stream#blocking). Load before serving.
    ///
    /// # Errors
    /// [`ErrorDetail::LiteralOutOfRange`](gpu_await::ErrorDetail::LiteralOutOfRange); a device that is lost or closed.
    ///
    /// # Cancel safety
    /// If the future is dropped, loading goes on, and its result is kept for the first use.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Preload;
    /// use gpu_await::In;
    /// use gpu_await_algorithms::transform;
    /// # let device = gpu_await::Device::host();
    /// let axpy = transform!(|a, x, y| a * x + y);
    /// device.preload_transform::<(f32, In<f32>, In<f32>)>(axpy).await?;
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    fn preload_transform<S>(
        &self,
        formula: impl FormulaOver<S>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Loads the kernel of [`sequence`](crate::Algorithms::sequence) for a type ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    fn preload_sequence<T: Arithmetic>(&self) -> impl Future<Output = Result<()>> + Send;

    /// Loads the kernel of [`cast`](crate::Algorithms::cast) from `T` to `U` ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    fn preload_cast<T: Arithmetic, U: Arithmetic>(&self)
    -> impl Future<Output = Result<()>> + Send;

    /// Loads the kernel of [`gather`](crate::Algorithms::gather) for a type and its indices ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    fn preload_gather<T: Arithmetic, I: Index>(&self) -> impl Future<Output = Result<()>> + Send;

    /// Loads the kernel of [`scatter`](crate::Algorithms::scatter) for a type and its indices ahead of its first use; see
    /// [`preload_transform`](Self::preload_transform).
    ///
    /// # Errors
    /// A device that is lost or closed.
    fn preload_scatter<T: Arithmetic, I: Index>(&self) -> impl Future<Output = Result<()>> + Send;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Device {}
}

/// Algorithms whose kernels are loaded together; for [`Preload::preload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AlgorithmFamily {
    /// `sum`, `reduce`, `min`, `max`, `arg_min`, `arg_max`, `dot`, `count_if`.
    Reduce,
    /// `inclusive_scan`, `exclusive_scan`.
    Scan,
    /// `copy_if`, `partition`, `unique`, `select`, `partition_flagged`; for `u8` also `positions`.
    Select,
    /// `run_length_encode`.
    Runs,
    /// `histogram`, `histogram_between`.
    Histogram,
    /// `segmented_reduce`.
    Segmented,
    /// `sum_rows`, `arg_max_rows`, `softmax_rows`, `layer_norm_rows`, for `f16`, `bf16` and `f32`; for other types there is nothing to load.
    Rows,
    /// `sort`, `sort_by_key`, ascending and descending.
    Sort,
    /// `segmented_sort`, `segmented_sort_by_key`, ascending and descending.
    SegmentedSort,
    /// `top_k`, `bottom_k`, also with positions.
    TopK,
}

impl AlgorithmFamily {
    fn load<T: Scalar>(self, home: &Home) -> Result<()> {
        let image = |family, type_name: &str| LoadedImage::of(home, family, type_name).map(drop);
        match self {
            AlgorithmFamily::Reduce => {
                image("reduce", T::NAME).and_then(|()| image("reduce_combined", T::EQUAL_AS))
            }
            AlgorithmFamily::Scan => {
                image("scan", T::NAME).and_then(|()| image("scan_combined", T::EQUAL_AS))
            }
            AlgorithmFamily::Select => {
                image("select", T::NAME).and_then(|()| image("select_flagged", T::WORD))
            }
            AlgorithmFamily::Runs => image("runs", T::EQUAL_AS),
            AlgorithmFamily::Histogram => image("histogram", T::EQUAL_AS),
            AlgorithmFamily::Segmented => {
                image("segmented", T::NAME).and_then(|()| image("segmented_combined", T::EQUAL_AS))
            }
            AlgorithmFamily::Rows if rows::TYPES.contains(&T::NAME) => image(rows::FAMILY, T::NAME),
            AlgorithmFamily::Rows => Ok(()),
            AlgorithmFamily::TopK => ["top_k", "sort"]
                .into_iter()
                .try_for_each(|family| image(family, T::WORD))
                .and_then(|()| image("sort", &format!("{}_u32", T::WORD)))
                .and_then(|()| image("sort", "u64")),
            AlgorithmFamily::SegmentedSort => image("scan", "u64").and_then(|()| {
                let values = ["", "_u32", "_u64"].map(|values| format!("{}{values}", T::WORD));
                values.iter().try_for_each(|words| image("segmented_sort", words))
            }),
            AlgorithmFamily::Sort => ["", "_u32", "_u64"]
                .into_iter()
                .try_for_each(|values| image("sort", &format!("{}{values}", T::WORD))),
        }
    }
}

impl Preload for Device {
    async fn preload<T: Scalar>(&self, families: &[AlgorithmFamily]) -> Result<()> {
        let families = families.to_vec();
        load_ahead(self, "loading an algorithm", move |home| {
            families.into_iter().try_for_each(|family| family.load::<T>(home))
        })
        .await
    }

    async fn preload_transform<S>(&self, formula: impl FormulaOver<S>) -> Result<()> {
        let prepared = formula.prepare();
        load_kernel(self, move |home| prepared.kernel(home)).await
    }

    async fn preload_sequence<T: Arithmetic>(&self) -> Result<()> {
        load_kernel(self, kernel_of_sequence::<T>).await
    }

    async fn preload_cast<T: Arithmetic, U: Arithmetic>(&self) -> Result<()> {
        load_kernel(self, kernel_of_cast::<T, U>).await
    }

    async fn preload_gather<T: Arithmetic, I: Index>(&self) -> Result<()> {
        load_kernel(self, kernel_of_gather::<T, I>).await
    }

    async fn preload_scatter<T: Arithmetic, I: Index>(&self) -> Result<()> {
        load_kernel(self, kernel_of_scatter::<T, I>).await
    }
}

async fn load_kernel(
    device: &Device,
    kernel: impl FnOnce(&Home) -> Result<Arc<ElementwiseKernel>> + Send + 'static,
) -> Result<()> {
    load_ahead(device, "loading a kernel", move |home| kernel(home).map(drop)).await
}
