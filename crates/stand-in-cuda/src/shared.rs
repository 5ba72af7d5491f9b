//! Memory beside the pools: what is reserved, and what is mapped where.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use crate::abi::{Address, Handle};

/// What handles and addresses of such memory mean.
pub(crate) struct Shared {
    pub(crate) handles: BTreeMap<Handle, Arc<Shareable>>,
    pub(crate) reserved: BTreeMap<Address, Reserved>,
}

/// Memory that a handle keeps, and a mapping.
pub(crate) struct Shareable {
    pub(crate) file: File,
    pub(crate) bytes: usize,
    pub(crate) device: usize,
    /// It is counted while this process has it.
    pub(crate) is_made_here: bool,
}

pub(crate) struct Reserved {
    pub(crate) bytes: usize,
    /// What is mapped there, by address.
    pub(crate) mapped: BTreeMap<Address, Arc<Shareable>>,
}

impl Shared {
    pub(crate) const fn new() -> Self {
        Shared { handles: BTreeMap::new(), reserved: BTreeMap::new() }
    }

    /// Handles and reserved ranges that live.
    pub(crate) fn live(&self) -> usize {
        self.handles.len() + self.reserved.len()
    }
}
