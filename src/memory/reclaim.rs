//! Freed memory, and how an allocation reuses it.
//!
//! | module | decides |
//! |---|---|
//! | [`retired`] | values that are freed when their last user is complete |
//! | [`allowance`] | the budget that allocations draw from |
//! | [`claim`] | the memory of an allocation, taken over from other streams' pending uses if it must be |
//! | [`prospect`] | how much memory is available, and when |
//! | [`pressure`] | what an allocation does when it finds no memory |
//! | [`reclaimers`] | the futures that wait for memory |
//! | `batch/allocate.rs`, in a room below | the retry of an allocation that found no memory, or that the driver refused |

pub(crate) mod allowance;
pub(crate) mod claim;
pub(crate) mod pressure;
pub(crate) mod prospect;
pub(crate) mod reclaimers;
pub(crate) mod retired;
