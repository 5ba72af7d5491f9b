//! Algorithms on device memory: reductions, scans, sorts, selections, histograms, formulas over elements.
//!
//! | file | what it is |
//! |---|---|
//! | [`scalar`] | the element types, and what they are computed in |
//! | [`sequence`] | elements whose number the host knows, or the device alone |
//! | [`compare`] | a condition on an element |
//! | [`reduce_op`] | what elements are combined by |
//! | [`images`] | the kernels' images, packed |
//! | [`code`] | the kernels of a device, loaded at first use |
//! | [`preload`] | kernels that are loaded before they are needed |
//! | [`launch`] | one launch of one of them |
//! | [`lookback`] | kernels whose tiles look back at those before them |
//! | [`queue`] | the verbs of a queue |
//! | [`reduce`] | many elements, one value |
//! | [`segmented`] | each segment of an array, one value |
//! | [`scan`] | for each element, what those up to it come to |
//! | [`segmented_sort`] | the elements of each segment, in another order |
//! | [`select`] | some elements, in their order |
//! | [`sort`] | all elements, in another order |
//! | [`histogram`] | how many elements fall into each bin |
//! | [`top_k`] | the greatest elements, or the least |
//! | [`verbs`] | the verbs of streams and devices for all of those |
//! | [`elementwise`] | `transform`, `sequence`, `cast`, `gather`, `scatter`: kernels that are made when they are used first |
//!
//! The kernels of all but the last are CUB's, prebuilt (`kernels/algorithms`). Each algorithm is some launches of a queue, so that it
//! goes wherever a launch goes: on a stream, into a batch, a replayed batch, a graph. On the host device it is one launch of a twin.

mod code;
pub(crate) mod compare;
pub(crate) mod elementwise;
mod histogram;
mod images;
mod launch;
mod lookback;
pub(crate) mod preload;
mod queue;
mod reduce;
pub(crate) mod reduce_op;
pub(crate) mod scalar;
mod scan;
mod segmented;
mod segmented_sort;
mod select;
pub(crate) mod sequence;
mod sort;
mod top_k;
mod verbs;
