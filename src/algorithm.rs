//! Algorithms on device memory: reductions, scans, sorts, selections, histograms, elementwise formulas.
//!
//! | file | what it is |
//! |---|---|
//! | [`scalar`] | element types, and the types they are computed in |
//! | [`sequence`] | arrays whose length is known to the host, or to the device alone |
//! | [`compare`] | a condition on an element |
//! | [`reduce_op`] | the operators of reductions |
//! | [`images`] | the packed kernel images |
//! | [`code`] | a device's kernels, loaded at first use |
//! | [`preload`] | loads kernels before they are needed |
//! | [`launch`] | one kernel launch of an algorithm |
//! | [`lookback`] | kernels whose tiles look back at earlier tiles |
//! | [`parts`] | arrays that are selected from by one launch after the other |
//! | [`queue`] | the verbs of a queue |
//! | [`reduce`] | reduces an array to one value |
//! | [`segmented`] | reduces each segment of an array to one value |
//! | [`scan`] | prefix sums, and prefixes of other operators |
//! | [`segmented_sort`] | sorts each segment of an array |
//! | [`select`] | selects elements, in order |
//! | [`sort`] | sorts an array |
//! | [`histogram`] | counts the elements in each bin |
//! | [`top_k`] | the largest or smallest elements |
//! | [`verbs`] | the verbs of streams and devices for all of these |
//! | [`elementwise`] | `transform`, `sequence`, `cast`, `gather`, `scatter`: kernels generated at first use |
//!
//! All kernels but the elementwise ones are CUB's, prebuilt (`kernels/algorithms`). An algorithm is a few launches on a queue, so it goes
//! wherever a launch goes: onto a stream, into a batch, a replayed batch or a graph. On the host device it is one launch of a twin.

mod code;
pub(crate) mod compare;
pub(crate) mod elementwise;
mod histogram;
mod images;
mod launch;
mod lookback;
mod parts;
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
