//! [`PinnedPool`]: a device's pinned host memory, in mappings that the crate makes and registers with the device.
//!
//! | blocks | source |
//! |---|---|
//! | up to half a slab | cut from slabs of [`SLAB_BYTES`], each of which serves every such size ([`buddy`](gpu_await_protocol::buddy)) |
//! | larger | in a mapping of their own, reused for the same size |
//!
//! Registering is a driver call, which blocks while a thread is blocked submitting to a full queue. To spare callers that delay, a slab
//! is registered in the background when the device is opened, and again whenever no slab has a free half.
//!
//! A block returns to its pool when neither the user nor a stream that it was lent to holds it. The mapping belongs to the crate and not
//! to the driver, so it stays readable after the loss of a device.
//!
//! # Invariants
//! 1. The first block of a size up to half a slab costs no driver call, unless the previous slab is used up before a new one is
//!    registered (`a_full_queue_holds_up_no_first_download`).
//! 2. Slabs are registered one at a time, each for a caller that found no memory after the previous one: callers that arrive during a
//!    background registration do not register a second slab (`first_callers_share_a_slab`).
//! 3. A refusal of a slab in the background is not reported: the next caller without memory tries again, and gets that error
//!    (`a_slab_refused_in_the_background_is_no_error`).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;
use memmap2::{MmapMut, MmapRaw};

use super::reclaim::retired::LentBlock;
use crate::backend::{Backend, DeviceKind, DevicePtr, HostPtr};
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::system;
use crate::thread::crew::Crew;
use crate::thread::role;
use crate::thread::worker::{detach, last_act};
use gpu_await_protocol::buddy::{Buddy, LEAST_BYTES, SLAB_BYTES};

/// The largest block that is cut from a slab.
pub(super) const MOST_CUT_BYTES: usize = SLAB_BYTES / 2;
/// The smallest page of any system.
const PAGE_BYTES: usize = 4 << 10;

/// The pinned memory of one device.
pub(crate) struct PinnedPool {
    engine: Arc<Engine>,
    /// Starts the threads that make slabs in the background; `None` if only callers make slabs.
    crew: Option<Weak<Crew>>,
    state: Mutex<Slabs>,
    /// Held while memory is registered; for a slab, from the check whether it is needed. Registration blocks
    /// submitters in the driver: with this lock they can run between two registrations.
    registers: Mutex<()>,
}

#[derive(Default)]
struct Slabs {
    slabs: Vec<Slab>,
    /// Free blocks with their own mapping, by size.
    free: HashMap<usize, Vec<RawBlock>>,
    /// The mappings of such blocks, in use or free.
    mappings: Vec<Mapping>,
    /// At least one block is quarantined.
    has_quarantined: bool,
    /// A slab is being made in the background, or that failed and no caller has made one since.
    is_growing: bool,
}

struct Slab {
    mapping: Mapping,
    buddy: Buddy,
}

struct Mapping {
    /// Users and the device write it. `MmapRaw` gives no reference, which would count as an access to all of it.
    memory: MmapRaw,
    address: usize,
    device: DevicePtr,
}

#[derive(Clone, Copy)]
struct RawBlock {
    /// The address of its mapping.
    mapping: usize,
    host: usize,
    device: DevicePtr,
    bytes: usize,
}

/// A block in use.
pub(crate) struct PinnedBlock {
    pool: Arc<PinnedPool>,
    raw: RawBlock,
    /// A device may access the block at any time from now on.
    quarantined: AtomicBool,
}

impl PinnedPool {
    /// With a crew, slabs are made ahead of need, starting with the first one.
    pub(crate) fn new(engine: &Arc<Engine>, crew: Option<&Arc<Crew>>) -> Arc<Self> {
        let pool = Arc::new(PinnedPool {
            engine: engine.clone(),
            crew: crew.map(Arc::downgrade),
            state: Mutex::new(Slabs { is_growing: crew.is_some(), ..Slabs::default() }),
            registers: Mutex::default(),
        });
        if crew.is_some() {
            // If there is no thread for it, the first caller makes one.
            detach(pool.growth()).ok();
        }
        pool
    }

    /// Bytes mapped and registered, and those of them in use.
    pub(crate) fn reserved_and_used(&self) -> (u64, u64) {
        let state = self.state.lock();
        let reserved = state.reserved_bytes();
        (reserved as u64, (reserved - state.free_bytes()) as u64)
    }

    /// Unmaps unused mappings until at most `keep_bytes` are mapped or none is left; returns the number of
    /// bytes unmapped. Waits for everything that runs on a GPU.
    pub(crate) fn trim(&self, keep_bytes: u64) -> Result<u64> {
        let unused =
            self.state.lock().take_unused(usize::try_from(keep_bytes).unwrap_or(usize::MAX));
        let (mut gone, mut result) = (0, Ok(()));
        for mapping in unused {
            let bytes = mapping.memory.len() as u64;
            match unregister(&*self.engine.backend, mapping) {
                Ok(()) => gone += bytes,
                Err(code) => result = Err(self.engine.refused(code)),
            }
        }
        result.map(|()| gone)
    }

    /// A block of at least `bytes`. If the pool has none, maps and registers memory: 0.2 to 6 ms per MiB on
    /// an H200.
    pub(crate) fn get(self: &Arc<Self>, bytes: usize) -> Result<Arc<PinnedBlock>> {
        // Checked even if the pool has memory: whether a call works must not depend on earlier uses.
        role::check("taking pinned memory")?;
        let class = class_bytes(bytes).ok_or_else(|| out_of_pinned(bytes, "too large"))?;
        loop {
            if let Some(block) = self.get_pooled(bytes) {
                return Ok(block);
            }
            if class > MOST_CUT_BYTES {
                let raw = self.map_block(class)?;
                return Ok(self.block(raw));
            }
            // Others may use up the new slab; then another is made.
            self.grow(|state| state.count(class, 1) == 0)?;
        }
    }

    /// A block of at least `bytes`, if the pool has one: quick.
    pub(crate) fn get_pooled(self: &Arc<Self>, bytes: usize) -> Option<Arc<PinnedBlock>> {
        let class = class_bytes(bytes)?;
        let (raw, grows) = {
            let mut state = self.state.lock();
            let raw = state.take(class)?;
            let may_grow = self.crew.is_some() && !state.is_growing && class <= MOST_CUT_BYTES;
            let grows = may_grow && state.is_short();
            state.is_growing |= grows;
            (raw, grows)
        };
        if grows && let Some(crew) = self.crew.as_ref().and_then(Weak::upgrade) {
            // Not on a thread of the crew: the driver may block it, which would delay copies.
            crew.detach(self.growth());
        }
        Some(self.block(raw))
    }

    /// How many blocks for `bytes` are free, counted up to `most`.
    pub(crate) fn free_blocks(&self, bytes: usize, most: usize) -> usize {
        class_bytes(bytes).map_or(0, |class| self.state.lock().count(class, most))
    }

    /// Makes another block for `bytes`, or a slab of several, unless `enough` are free.
    pub(crate) fn stock(&self, bytes: usize, enough: usize) -> Result<()> {
        let class = class_bytes(bytes).ok_or_else(|| out_of_pinned(bytes, "too large"))?;
        if class <= MOST_CUT_BYTES {
            return self.grow(|state| state.count(class, enough) < enough);
        }
        if self.free_blocks(bytes, enough) < enough {
            let raw = self.map_block(class)?;
            self.state.lock().free.entry(class).or_default().push(raw);
        }
        Ok(())
    }

    fn block(self: &Arc<Self>, raw: RawBlock) -> Arc<PinnedBlock> {
        let quarantined = AtomicBool::new(false);
        Arc::new(PinnedBlock { pool: self.clone(), raw, quarantined })
    }

    /// Makes a slab in the background, unless the device is closed or lost by then.
    fn growth(self: &Arc<Self>) -> impl FnOnce() + Send + 'static {
        let pool = Arc::downgrade(self);
        move || {
            if let Some(pool) = pool.upgrade()
                && pool.engine.check_open().is_ok()
            {
                // After a refusal the next caller tries again.
                pool.grow(Slabs::is_short).ok();
            }
        }
    }

    /// Makes a slab, unless the previous caller's slab has made that unnecessary.
    fn grow(&self, is_needed: impl FnOnce(&Slabs) -> bool) -> Result<()> {
        let _registers = self.registers.lock();
        if is_needed(&self.state.lock()) {
            let mapping = self.register(self.map(SLAB_BYTES)?)?;
            self.state.lock().slabs.push(Slab { mapping, buddy: Buddy::new() });
        }
        self.state.lock().is_growing = false;
        Ok(())
    }

    /// Makes a block with its own mapping.
    fn map_block(&self, bytes: usize) -> Result<RawBlock> {
        let memory = self.map(bytes)?;
        let registers = self.registers.lock();
        let mapping = self.register(memory)?;
        drop(registers);
        let block = mapping.block(0, bytes);
        self.state.lock().mappings.push(mapping);
        Ok(block)
    }

    /// Memory that is not registered yet.
    fn map(&self, bytes: usize) -> Result<MmapRaw> {
        if crate::thread::exit::begun() {
            return Err(ErrorDetail::ProcessEnding { what: "pinned memory" }.into());
        }
        let mut memory =
            MmapMut::map_anon(bytes).map_err(|error| out_of_pinned(bytes, &error.to_string()))?;
        if bytes >= SLAB_BYTES {
            system::advise_huge_pages(memory.as_mut_ptr() as usize, bytes);
        }
        if self.engine.backend.kind() == DeviceKind::Cuda {
            // Faults the pages in here, not while the driver blocks others.
            memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0);
        }
        Ok(memory.into())
    }

    fn register(&self, memory: MmapRaw) -> Result<Mapping> {
        let (address, bytes) = (memory.as_mut_ptr() as usize, memory.len());
        // SAFETY: this crate made the mapping, which is page-aligned, `bytes` long, and stays mapped until
        // `drop` has unregistered it or for ever.
        let device = unsafe { self.engine.backend.register(HostPtr(address), bytes) };
        match device {
            Ok(device) => Ok(Mapping { memory, address, device }),
            Err(code) if code.code == 2 => Err(out_of_pinned(bytes, &code.to_string())),
            Err(code) => Err(self.engine.refused(code)),
        }
    }
}

impl PinnedBlock {
    pub(crate) fn host(&self) -> HostPtr {
        HostPtr(self.raw.host)
    }

    /// The device address of the block.
    pub(crate) fn device(&self) -> DevicePtr {
        self.raw.device
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.raw.bytes as u64
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.pool.engine
    }
}

impl LentBlock for PinnedBlock {
    fn quarantine(&self) -> u64 {
        // ORDERING: Relaxed: read when nothing holds the block any more.
        if self.quarantined.swap(true, Ordering::Relaxed) { 0 } else { self.bytes() }
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        if *self.quarantined.get_mut() {
            // The block is never lent again, and the pool's drop leaves it mapped.
            state.has_quarantined = true;
        } else {
            state.put(self.raw);
        }
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let (mappings, has_quarantined) = (state.take_all(), state.has_quarantined);
        if has_quarantined || !self.engine.is_usable() {
            // The device may still write; this memory must never be reused.
            std::mem::forget(mappings);
            return;
        }
        let backend = self.engine.backend.clone();
        // Unregistering waits for everything that runs on a GPU.
        last_act(move || {
            for mapping in mappings {
                // After a refusal the memory stays mapped.
                unregister(&*backend, mapping).ok();
            }
        });
    }
}

impl Mapping {
    fn block(&self, offset: usize, bytes: usize) -> RawBlock {
        RawBlock {
            mapping: self.address,
            host: self.address + offset,
            device: self.device.offset(offset as u64),
            bytes,
        }
    }
}

impl Slabs {
    /// A block of that class, if there is one.
    fn take(&mut self, class: usize) -> Option<RawBlock> {
        if class > MOST_CUT_BYTES {
            return self.free.get_mut(&class)?.pop();
        }
        self.slabs.iter_mut().find_map(|slab| {
            let offset = slab.buddy.take(class)?;
            Some(slab.mapping.block(offset, class))
        })
    }

    fn put(&mut self, raw: RawBlock) {
        if raw.bytes > MOST_CUT_BYTES {
            return self.free.entry(raw.bytes).or_default().push(raw);
        }
        let mut slabs = self.slabs.iter_mut();
        if let Some(slab) = slabs.find(|slab| slab.mapping.address == raw.mapping) {
            slab.buddy.put(raw.host - raw.mapping, raw.bytes);
        }
    }

    /// How many blocks of that class are free, counted up to `most`.
    fn count(&self, class: usize, most: usize) -> usize {
        if class > MOST_CUT_BYTES {
            return self.free.get(&class).map_or(0, |blocks| blocks.len().min(most));
        }
        self.slabs.iter().fold(0, |count, slab| count + slab.buddy.count(class, most - count))
    }

    /// Whether no slab has room for the largest block.
    fn is_short(&self) -> bool {
        !self.slabs.iter().any(|slab| slab.buddy.has(MOST_CUT_BYTES))
    }

    fn reserved_bytes(&self) -> usize {
        let mapped: usize = self.mappings.iter().map(|mapping| mapping.memory.len()).sum();
        mapped + self.slabs.len() * SLAB_BYTES
    }

    fn free_bytes(&self) -> usize {
        let blocks: usize = self.free.iter().map(|(class, blocks)| class * blocks.len()).sum();
        blocks + self.slabs.iter().map(|slab| slab.buddy.free_bytes()).sum::<usize>()
    }

    /// Removes unused mappings while more than `keep_bytes` are mapped.
    fn take_unused(&mut self, keep_bytes: usize) -> Vec<Mapping> {
        let mut reserved = self.reserved_bytes();
        let mut takes = |bytes: usize, is_unused: bool| {
            let takes = is_unused && reserved > keep_bytes;
            reserved -= if takes { bytes } else { 0 };
            takes
        };
        let free: HashSet<usize> =
            self.free.values().flatten().map(|block| block.mapping).collect();
        let mut unused: Vec<Mapping> = self
            .mappings
            .extract_if(.., |mapping| takes(mapping.memory.len(), free.contains(&mapping.address)))
            .collect();
        for blocks in self.free.values_mut() {
            blocks.retain(|block| unused.iter().all(|mapping| mapping.address != block.mapping));
        }
        let slabs = self.slabs.extract_if(.., |slab| takes(SLAB_BYTES, slab.buddy.has(SLAB_BYTES)));
        unused.extend(slabs.map(|slab| slab.mapping));
        unused
    }

    fn take_all(&mut self) -> Vec<Mapping> {
        let slabs = self.slabs.drain(..).map(|slab| slab.mapping);
        self.mappings.drain(..).chain(slabs).collect()
    }
}

/// Unregisters and unmaps memory. If the driver refuses, the memory stays mapped until the process ends.
fn unregister(backend: &dyn Backend, mapping: Mapping) -> std::result::Result<(), DriverCode> {
    // SAFETY: no block of the mapping is in use or can be handed out.
    let unregistered = unsafe { backend.unregister(HostPtr(mapping.address)) };
    if unregistered.is_err() {
        std::mem::forget(mapping.memory);
    }
    unregistered
}

/// The size that a request of `bytes` is rounded to: powers of two up to a slab, then quarter steps.
fn class_bytes(bytes: usize) -> Option<usize> {
    let least = bytes.max(LEAST_BYTES);
    let power = least.checked_next_power_of_two()?;
    if power <= SLAB_BYTES {
        return Some(power);
    }
    least.checked_next_multiple_of(power / 8)
}

fn out_of_pinned(bytes: usize, reason: &str) -> crate::Error {
    ErrorDetail::OutOfPinnedMemory { asked_bytes: bytes as u64, reason: reason.to_owned() }.into()
}
