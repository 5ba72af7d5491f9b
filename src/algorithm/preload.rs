//! [`AlgorithmFamily`]: a group of kernels that can be loaded before they are needed.
#![forbid(unsafe_code)]

use super::code::LoadedImage;
use super::scalar::Scalar;
use crate::device::Device;
use crate::device::home::Home;
use crate::error::Result;
use crate::runtime::coop;
use crate::thread::role;
use crate::thread::worker::offload;

/// Algorithms whose kernels are loaded together; for [`Device::preload`].
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
    /// `sort`, `sort_by_key`, up and down.
    Sort,
    /// `segmented_sort`, `segmented_sort_by_key`, up and down.
    SegmentedSort,
    /// `top_k`, `bottom_k`, also with places.
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

impl Device {
    /// Loads the kernels of algorithms for an element type, off the executor, so that their first use is as quick as any other. On a
    /// host device there is nothing to load.
    ///
    /// # Errors
    /// A GPU below compute capability 8.0; what the driver refuses; a lost or closed device.
    ///
    /// # Blocking
    /// No; but the future stays pending until everything that runs on the GPU has ended. Load before serving. On a GPU of another
    /// compute capability than 9.0 the driver compiles the kernels, once for a machine, which takes seconds.
    ///
    /// # Cancel safety
    /// Dropped, the load goes on.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{AlgorithmFamily, Device};
    /// let device = Device::cuda_or_host()?;
    /// device.preload::<f32>(&[AlgorithmFamily::Reduce, AlgorithmFamily::Sort]).await?;
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuModuleLoadDataEx`.
    pub async fn preload<T: Scalar>(&self, families: &[AlgorithmFamily]) -> Result<()> {
        coop::proceed().await;
        role::check_driver("loading an algorithm")?;
        let (home, families) = (self.home().clone(), families.to_vec());
        offload(move || families.into_iter().try_for_each(|family| family.load::<T>(&home))).await?
    }
}
