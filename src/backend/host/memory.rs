//! Memory of the host device: what is allocated, and what a command may touch.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Weak;

use gpu_await_protocol::lock::Mutex;

use super::range::HostRange;
use super::run::Command;
use super::{ALIGNMENT, HostBackend, HostCore, INVALID_VALUE, OUT_OF_MEMORY, POISON, permitted};
use crate::backend::{
    DevicePtr, DriverResult, HostPtr, MemoryAt, MemoryCalls, Pattern, PeerMemory, Place, PoolInfo,
    RawStream, RowCopy,
};
use crate::error::DriverCode;
use crate::thread::contain::contain;
use crate::thread::native::spawn;

#[derive(Default)]
pub(super) struct Memory {
    pub(super) blocks: BTreeMap<u64, HostBlock>,
    /// Adopted memory, as address ranges: one entry per adoption.
    pub(super) adopted: Vec<Range<u64>>,
    /// Counts an allocation from when it runs to when its free runs.
    pub(super) pool: PoolInfo,
    /// Counts an allocation from its submission to that of its free.
    pub(super) used: u64,
    pub(super) limit: u64,
    /// Reserved addresses, by their beginning.
    pub(super) ranges: BTreeMap<u64, HostRange>,
    /// Mappings of memory that other processes may map as well, by address.
    #[cfg(target_os = "linux")]
    pub(super) shared: BTreeMap<u64, super::shared::Shared>,
    /// How much of the limit ranges and shared mappings take.
    pub(super) used_beside_pool: u64,
}

impl Memory {
    /// How much more may be allocated.
    pub(super) fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used + self.used_beside_pool)
    }
}

pub(super) struct HostBlock {
    pub(super) bytes: u64,
    pub(super) live: bool,
}

impl Memory {
    fn has(&self, ptr: DevicePtr, bytes: u64) -> bool {
        let block = self.blocks.range(..=ptr.0).next_back();
        let is_block =
            block.is_some_and(|(start, block)| block.live && ptr.0 + bytes <= start + block.bytes);
        let has = |range: &Range<u64>| range.start <= ptr.0 && ptr.0 + bytes <= range.end;
        let range = self.ranges.range(..=ptr.0).next_back();
        let is_committed =
            range.is_some_and(|(start, range)| ptr.0 + bytes <= start + range.committed);
        is_block || is_committed || self.adopted.iter().any(has)
    }
}

impl PeerMemory for Mutex<Memory> {
    fn has(&self, ptr: DevicePtr, bytes: u64) -> bool {
        self.lock().has(ptr, bytes)
    }
}

impl Drop for HostCore {
    fn drop(&mut self) {
        drop_values(std::mem::take(self.buried.get_mut()));
        if *self.has_peers.get_mut() {
            // Another device may still be copying from this memory; after a loss, this device does not wait for that copy.
            #[cfg(target_os = "linux")]
            std::mem::forget(std::mem::take(&mut self.memory.lock().shared));
            std::mem::forget(std::mem::take(&mut self.memory.lock().ranges));
            return;
        }
        for (start, block) in std::mem::take(&mut self.memory.lock().blocks) {
            free_block(start, block.bytes);
        }
    }
}

pub(super) fn free_block(start: u64, bytes: u64) {
    if let Ok(layout) = Layout::from_size_align(bytes as usize, ALIGNMENT) {
        // SAFETY: blocks are made by `alloc` with this very layout, and removed from the table
        // once.
        unsafe { dealloc(start as *mut u8, layout) };
    }
}

fn drop_values(values: Vec<Box<dyn Any + Send>>) {
    for value in values {
        contain("the drop of a value that a lost device kept", || drop(value));
    }
}

impl HostCore {
    /// Drops the buried values once no queue has a command that may use them. On a thread of its own: a value may hold
    /// the device, and so end it.
    pub(super) fn unearth(&self) {
        if self.buried.lock().is_empty() || !self.streams.read().values().all(|s| s.is_idle()) {
            return;
        }
        let values = std::mem::take(&mut *self.buried.lock());
        if values.is_empty() {
            return;
        }
        // If no thread can be started, they leak: this thread may be the device's own.
        let values = std::mem::ManuallyDrop::new(values);
        let drop_all = move || drop_values(std::mem::ManuallyDrop::into_inner(values));
        spawn("gpu-await-reaper", Box::new(drop_all)).ok();
    }

    /// The address, if the whole range is live memory of this device, or of one that it can access.
    pub(super) fn touch(&self, ptr: DevicePtr, bytes: u64) -> std::result::Result<*mut u8, String> {
        if self.memory.lock().has(ptr, bytes) || self.reaches(ptr, bytes) {
            return Ok(ptr.0 as *mut u8);
        }
        Err(format!("illegal address: {bytes} bytes at {:#x} are not live memory", ptr.0))
    }

    #[cold]
    fn reaches(&self, ptr: DevicePtr, bytes: u64) -> bool {
        let reached = self.reached.lock();
        reached.iter().filter_map(Weak::upgrade).any(|memory| memory.has(ptr, bytes))
    }

    pub(super) fn copy_rows(&self, copy: &RowCopy) -> std::result::Result<(), String> {
        let find = |place, pitch| match place {
            Place::Device(ptr) => self.touch(ptr, copy.extent(pitch)),
            Place::Host(ptr) => Ok(ptr.0 as *mut u8),
        };
        let (to, from) = (find(copy.to, copy.to_pitch)?, find(copy.from, copy.from_pitch)?);
        for row in 0..copy.rows {
            let (to_at, from_at) =
                ((row * copy.to_pitch) as usize, (row * copy.from_pitch) as usize);
            // SAFETY: the row begins inside the extent that `touch` proved live, or that the
            // submitter keeps valid.
            let to = unsafe { to.add(to_at) };
            // SAFETY: as above.
            let from = unsafe { from.add(from_at) };
            // SAFETY: both rows lie inside their extents; `copy` allows overlap.
            unsafe { std::ptr::copy(from, to, copy.row_bytes as usize) };
        }
        Ok(())
    }

    pub(super) fn make_live(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let mut memory = self.memory.lock();
        let block = memory.blocks.get_mut(&ptr.0).ok_or("an allocation lost its block")?;
        // SAFETY: the block was allocated with this size and nothing uses it before it is live.
        unsafe { std::ptr::write_bytes(ptr.0 as *mut u8, POISON, block.bytes as usize) };
        block.live = true;
        let bytes = block.bytes;
        let pool = &mut memory.pool;
        pool.reserved += bytes;
        pool.reserved_peak = pool.reserved_peak.max(pool.reserved);
        Ok(())
    }

    pub(super) fn release(&self, ptr: DevicePtr) -> std::result::Result<(), String> {
        let removed = {
            let mut memory = self.memory.lock();
            let removed = memory.blocks.remove(&ptr.0);
            let live = removed.as_ref().filter(|block| block.live);
            memory.pool.reserved -= live.map_or(0, |block| block.bytes);
            removed
        };
        let block = removed.ok_or_else(|| format!("double free at {:#x}", ptr.0))?;
        free_block(ptr.0, block.bytes);
        Ok(())
    }

    pub(super) fn fill(
        &self,
        dst: DevicePtr,
        pattern: &Pattern,
        count: u64,
    ) -> std::result::Result<(), String> {
        let bytes = count * pattern.len as u64;
        let dst = self.touch(dst, bytes)?;
        let short = pattern.shortest();
        if let [byte] = short.as_slice() {
            // SAFETY: `touch` proved the range live.
            unsafe { std::ptr::write_bytes(dst, *byte, bytes as usize) };
            return Ok(());
        }
        for index in 0..count as usize {
            // SAFETY: index * len is inside the range that `touch` proved live.
            let at = unsafe { dst.add(index * pattern.len) };
            // SAFETY: `at` has room for one pattern; the pattern is ours.
            unsafe { std::ptr::copy_nonoverlapping(pattern.bytes.as_ptr(), at, pattern.len) };
        }
        Ok(())
    }
}

impl MemoryCalls for HostBackend {
    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr> {
        const CALL: &str = "alloc";
        let refused = DriverCode { call: CALL, code: OUT_OF_MEMORY };
        self.shared.healthy(CALL)?;
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| Layout::from_size_align(bytes, ALIGNMENT).ok())
            .filter(|layout| layout.size() > 0)
            .ok_or(DriverCode { call: CALL, code: INVALID_VALUE })?;
        let ptr = {
            let mut memory = self.shared.memory.lock();
            if memory.left() < bytes {
                return Err(refused);
            }
            // SAFETY: the layout's size is not zero.
            let ptr = unsafe { alloc(layout) } as u64;
            if ptr == 0 {
                return Err(refused);
            }
            memory.used += bytes;
            memory.blocks.insert(ptr, HostBlock { bytes, live: false });
            DevicePtr(ptr)
        };
        self.enqueue(stream, CALL, Command::Alloc(ptr))?;
        Ok(ptr)
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()> {
        const CALL: &str = "free";
        self.shared.healthy(CALL)?;
        {
            // Counted at once: later allocations are ordered after it, as in the driver's pool.
            let mut memory = self.shared.memory.lock();
            let block = memory.blocks.get(&ptr.0);
            let bytes = block.ok_or(DriverCode { call: CALL, code: INVALID_VALUE })?.bytes;
            memory.used -= bytes;
        }
        self.enqueue(stream, CALL, Command::Free(ptr))
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        self.shared.healthy("memory_info")?;
        let memory = self.shared.memory.lock();
        let taken = memory.pool.reserved + memory.used_beside_pool;
        Ok((memory.limit.saturating_sub(taken), memory.limit))
    }

    fn pool_info(&self) -> DriverResult<PoolInfo> {
        self.shared.healthy("pool_info")?;
        Ok(self.shared.memory.lock().pool)
    }

    /// Freed memory returns to the system at once.
    fn pool_trim(&self, _keep_bytes: u64) -> DriverResult<()> {
        self.shared.healthy("pool_trim")
    }

    /// The device's memory is the host's: the caller's claim is taken as true.
    fn memory_at(&self, _ptr: DevicePtr) -> DriverResult<MemoryAt> {
        self.shared.healthy("memory_at")?;
        Ok(MemoryAt { ordinal: Some(self.ordinal), allocation: None })
    }

    unsafe fn adopt(&self, ptr: DevicePtr, bytes: u64) {
        self.shared.memory.lock().adopted.push(ptr.0..ptr.0 + bytes);
    }

    unsafe fn disown(&self, ptr: DevicePtr, bytes: u64) {
        let adopted = &mut self.shared.memory.lock().adopted;
        let at = adopted.iter().position(|range| *range == (ptr.0..ptr.0 + bytes));
        at.map(|at| adopted.swap_remove(at));
    }

    /// A worker may be inside a command.
    fn bury(&self, value: Box<dyn Any + Send>) -> Option<Box<dyn Any + Send>> {
        self.shared.buried.lock().push(value);
        self.shared.unearth();
        None
    }

    unsafe fn register(&self, ptr: HostPtr, _bytes: usize) -> DriverResult<DevicePtr> {
        self.shared.wait_until_nobody_is_blocked();
        self.shared.healthy("register")?;
        Ok(DevicePtr(ptr.0 as u64))
    }

    unsafe fn unregister(&self, _ptr: HostPtr) -> DriverResult<()> {
        permitted("unregister")
    }

    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_to_device", Command::CopyIn { dst, src, bytes })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_to_host", Command::CopyOut { dst, src, bytes })
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "copy_on_device", Command::Copy { dst, src, bytes })
    }

    unsafe fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()> {
        self.enqueue(stream, "copy_rows", Command::CopyRows(Box::new(*copy)))
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        _src_context: u64,
        bytes: u64,
    ) -> DriverResult<()> {
        // The other device's memory is host memory, which this device does not track.
        let src = HostPtr(src.0 as usize);
        self.enqueue(stream, "copy_from_peer", Command::CopyIn { dst, src, bytes })
    }

    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> DriverResult<()> {
        self.enqueue(stream, "fill", Command::Fill { dst, pattern, count })
    }
}
