//! What is known of a device by those who outlive it: light, and without its streams.
//!
//! | state | left by |
//! |---|---|
//! | healthy | the first call that reports a sticky code; or never |
//! | lost | – |
#![forbid(unsafe_code)]

use std::sync::OnceLock;

use crate::backend::DeviceKind;
use crate::error::Error;

#[derive(Debug)]
pub(crate) struct DeviceState {
    /// Process-unique and never reused.
    pub(crate) id: u64,
    pub(crate) kind: DeviceKind,
    /// `cuda:0`, `host:3`: for messages.
    pub(crate) label: String,
    pub(crate) lost: OnceLock<Error>,
}
