//! Memory that was given up, and what an allocation makes of it.
//!
//! | module | decides |
//! |---|---|
//! | [`retired`] | what is freed when its last user is complete |
//! | [`claim`] | the memory for an allocation, taken over from what other streams still use if it must be |
//! | [`prospect`] | what could be had, and when |
//! | [`pressure`] | what an allocation does that finds nothing |
//! | [`reclaimers`] | the futures that wait for memory |

pub(crate) mod claim;
pub(crate) mod pressure;
pub(crate) mod prospect;
pub(crate) mod reclaimers;
pub(crate) mod retired;
