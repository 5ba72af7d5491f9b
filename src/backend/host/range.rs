//! Reserved addresses of the host device: an anonymous mapping, whose pages the system provides when they are written. Commands may use the
//! committed part only (`touch`), so a use beyond it loses the device, as a GPU's would.

use std::collections::BTreeMap;

use memmap2::{MmapOptions, MmapRaw};

use super::{HostBackend, INVALID_VALUE, OUT_OF_MEMORY, POISON};
use crate::backend::{DevicePtr, DriverResult, RangeCalls};
use crate::error::DriverCode;

/// As a GPU's.
const GRANULARITY: u64 = 2 << 20;

/// Reserved addresses.
pub(super) struct HostRange {
    map: MmapRaw,
    /// Committed memory, from the start.
    pub(super) committed: u64,
}

impl RangeCalls for HostBackend {
    fn range_granularity(&self) -> DriverResult<u64> {
        self.shared.healthy("range_granularity").map(|()| GRANULARITY)
    }

    fn range_reserve(&self, bytes: u64) -> DriverResult<DevicePtr> {
        const CALL: &str = "mmap";
        self.shared.healthy(CALL)?;
        let map = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| MmapOptions::new().len(bytes).no_reserve_swap().map_anon().ok())
            .ok_or(DriverCode { call: CALL, code: OUT_OF_MEMORY })?;
        let map = MmapRaw::from(map);
        let start = map.as_mut_ptr() as u64;
        self.shared.memory.lock().ranges.insert(start, HostRange { map, committed: 0 });
        Ok(DevicePtr(start))
    }

    unsafe fn range_commit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()> {
        const CALL: &str = "range_commit";
        self.shared.healthy(CALL)?;
        let bytes = step * steps;
        let mut memory = self.shared.memory.lock();
        if memory.left() < bytes {
            return Err(DriverCode { call: CALL, code: OUT_OF_MEMORY });
        }
        let (start, range) = range_at(&mut memory.ranges, at, CALL)?;
        if start + range.committed != at.0 || range.committed + bytes > range.map.len() as u64 {
            return Err(DriverCode { call: CALL, code: INVALID_VALUE });
        }
        let beginning = range.map.as_mut_ptr().wrapping_add(range.committed as usize);
        // SAFETY: inside the mapping, checked above; commands use committed memory only, and this is not committed yet.
        unsafe { std::ptr::write_bytes(beginning, POISON, bytes as usize) };
        range.committed += bytes;
        memory.used_beside_pool += bytes;
        Ok(())
    }

    unsafe fn range_decommit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()> {
        const CALL: &str = "range_decommit";
        self.shared.healthy(CALL)?;
        let bytes = step * steps;
        let mut memory = self.shared.memory.lock();
        let (start, range) = range_at(&mut memory.ranges, at, CALL)?;
        if start + range.committed != at.0 + bytes {
            return Err(DriverCode { call: CALL, code: INVALID_VALUE });
        }
        range.committed -= bytes;
        #[cfg(unix)]
        {
            let (advice, offset) = (memmap2::UncheckedAdvice::DontNeed, range.committed as usize);
            // SAFETY: nothing refers to these pages: commands that used them are complete, and no new one may. If this fails, they stay with the
            // process, and nobody reads them before they are written.
            unsafe { range.map.unchecked_advise_range(advice, offset, bytes as usize) }.ok();
        }
        memory.used_beside_pool -= bytes;
        Ok(())
    }

    unsafe fn range_free(&self, at: DevicePtr, _bytes: u64) -> DriverResult<()> {
        let removed = self.shared.memory.lock().ranges.remove(&at.0);
        removed.map(drop).ok_or(DriverCode { call: "range_free", code: INVALID_VALUE })
    }
}

/// The range that contains an address, and its start.
fn range_at<'r>(
    ranges: &'r mut BTreeMap<u64, HostRange>,
    at: DevicePtr,
    call: &'static str,
) -> DriverResult<(u64, &'r mut HostRange)> {
    let found = ranges.range_mut(..=at.0).next_back();
    found.map(|(start, range)| (*start, range)).ok_or(DriverCode { call, code: INVALID_VALUE })
}
