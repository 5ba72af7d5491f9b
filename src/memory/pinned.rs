//! Pinned host memory: our own mappings, registered with the device, pooled by size.
//!
//! Blocks up to [`SLAB_BYTES`]` / 2` are cut from slabs; larger ones have a mapping of their own.
//! A block goes back to its pool when nobody holds it: neither the user nor a stream that it was
//! lent to. The mapping is ours and not the driver's, so it stays readable after a device is lost.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::MmapMut;
use parking_lot::Mutex;

use super::{Element, must_fit};
use crate::backend::{Backend, DeviceKind, DevicePtr, HostPtr};
use crate::completion::engine::Engine;
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::thread_role;

/// What small blocks are cut from: one huge page.
const SLAB_BYTES: usize = 2 << 20;
/// The smallest page of any system.
const PAGE_BYTES: usize = 4 << 10;
/// Every block begins on a line of this size.
const LEAST_BYTES: usize = 128;

/// The pinned memory of one device.
pub(crate) struct PinnedPool {
    engine: Arc<Engine>,
    state: Mutex<State>,
    /// Held by who registers. The driver makes others wait meanwhile, who submit: it comes to them
    /// between two.
    registers: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Free blocks by their size.
    free: HashMap<usize, Vec<RawBlock>>,
    mappings: Vec<Mapping>,
}

struct Mapping {
    memory: MmapMut,
    address: usize,
}

#[derive(Clone, Copy)]
struct RawBlock {
    /// The address of the mapping that it is cut from.
    mapping: usize,
    host: usize,
    device: DevicePtr,
    bytes: usize,
}

/// A block in use.
pub(crate) struct PinnedBlock {
    pool: Arc<PinnedPool>,
    raw: RawBlock,
}

impl PinnedPool {
    pub(crate) fn new(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(PinnedPool {
            engine: engine.clone(),
            state: Mutex::default(),
            registers: Mutex::default(),
        })
    }

    /// Bytes mapped and registered, and those of them in use.
    pub(crate) fn reserved_and_used(&self) -> (u64, u64) {
        let state = self.state.lock();
        let free: usize = state.free.iter().map(|(class, blocks)| class * blocks.len()).sum();
        let reserved = state.reserved_bytes();
        (reserved as u64, (reserved - free) as u64)
    }

    /// Gives mappings back of which nothing is in use, until at most `keep_bytes` are mapped or none
    /// is left; returns how many bytes went. Waits for what runs on a GPU.
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

    /// A block of at least `bytes`. Maps and registers memory where the pool has none: 0.2 to 6 ms
    /// a mebibyte on an H200.
    pub(crate) fn get(self: &Arc<Self>, bytes: usize) -> Result<Arc<PinnedBlock>> {
        // Also where the pool has some: that a call works must not depend on what others used.
        thread_role::check_driver("taking pinned memory")?;
        if let Some(block) = self.get_pooled(bytes) {
            return Ok(block);
        }
        let class = class_bytes(bytes).ok_or_else(|| out_of_pinned(bytes, "too large"))?;
        let raw = self.grow(class)?;
        Ok(Arc::new(PinnedBlock { pool: self.clone(), raw }))
    }

    /// A block of at least `bytes`, if the pool has one: quick.
    pub(crate) fn get_pooled(self: &Arc<Self>, bytes: usize) -> Option<Arc<PinnedBlock>> {
        let class = class_bytes(bytes)?;
        let raw = self.state.lock().free.get_mut(&class).and_then(Vec::pop)?;
        Some(Arc::new(PinnedBlock { pool: self.clone(), raw }))
    }

    /// How many blocks for `bytes` are free.
    pub(crate) fn free_blocks(&self, bytes: usize) -> usize {
        let class = class_bytes(bytes);
        class.and_then(|class| Some(self.state.lock().free.get(&class)?.len())).unwrap_or(0)
    }

    /// Makes one more block for `bytes`, unless `enough` are free.
    pub(crate) fn stock(&self, bytes: usize, enough: usize) -> Result<()> {
        if self.free_blocks(bytes) >= enough {
            return Ok(());
        }
        let class = class_bytes(bytes).ok_or_else(|| out_of_pinned(bytes, "too large"))?;
        let raw = self.grow(class)?;
        self.state.lock().free.entry(class).or_default().push(raw);
        Ok(())
    }

    /// Makes a block of `class` bytes, and its neighbours where it is cut from a slab.
    fn grow(&self, class: usize) -> Result<RawBlock> {
        let bytes = if class <= SLAB_BYTES / 2 { SLAB_BYTES } else { class };
        if crate::at_exit::begun() {
            return Err(out_of_pinned(bytes, "the process is ending"));
        }
        let mut memory =
            MmapMut::map_anon(bytes).map_err(|error| out_of_pinned(bytes, &error.to_string()))?;
        #[cfg(target_os = "linux")]
        if bytes >= SLAB_BYTES {
            // Only advice: small pages work as well, they take longer to make.
            memory.advise(memmap2::Advice::HugePage).ok();
        }
        let backend = &self.engine.backend;
        if backend.kind() == DeviceKind::Cuda {
            // The system makes the pages here, and not while the driver makes others wait.
            memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0);
        }
        let address = memory.as_mut_ptr() as usize;
        let registers = self.registers.lock();
        // SAFETY: the mapping is ours, page-aligned, `bytes` long, and stays mapped until `drop`
        // unregistered it or for ever.
        let device = unsafe { backend.register(HostPtr(address), bytes) }
            .map_err(|code| self.refused(bytes, code))?;
        drop(registers);
        let mut blocks = (0..bytes / class).map(|index| RawBlock {
            mapping: address,
            host: address + index * class,
            device: device.offset((index * class) as u64),
            bytes: class,
        });
        let first = blocks.next();
        let mut state = self.state.lock();
        state.free.entry(class).or_default().extend(blocks);
        state.mappings.push(Mapping { memory, address });
        first.ok_or_else(|| out_of_pinned(bytes, "nothing was cut"))
    }

    fn refused(&self, bytes: usize, code: DriverCode) -> crate::Error {
        match code.code {
            2 => out_of_pinned(bytes, &code.to_string()),
            _ => self.engine.refused(code),
        }
    }
}

impl PinnedBlock {
    pub(crate) fn host(&self) -> HostPtr {
        HostPtr(self.raw.host)
    }

    /// The address under which the device reaches the block.
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

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        if self.pool.engine.lost().is_some() {
            // A device that is lost may still write to it: nobody gets it again, and the pool's drop
            // leaves it mapped.
            return;
        }
        let mut state = self.pool.state.lock();
        state.free.entry(self.raw.bytes).or_default().push(self.raw);
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        let mappings = std::mem::take(&mut self.state.get_mut().mappings);
        if self.engine.lost().is_some() || crate::at_exit::begun() {
            // The device may still write; nobody may get this memory again.
            std::mem::forget(mappings);
            return;
        }
        let backend = self.engine.backend.clone();
        // Unregistering waits for everything that runs on a GPU.
        crate::completion::poller::last_act(move || {
            for mapping in mappings {
                // Refused, the memory stays mapped.
                unregister(&*backend, mapping).ok();
            }
        });
    }
}

impl State {
    fn reserved_bytes(&self) -> usize {
        self.mappings.iter().map(|mapping| mapping.memory.len()).sum()
    }

    /// Takes mappings out of which no block is in use, while more than `keep_bytes` are mapped.
    fn take_unused(&mut self, keep_bytes: usize) -> Vec<Mapping> {
        let mut free_in: HashMap<usize, usize> = HashMap::new();
        for block in self.free.values().flatten() {
            *free_in.entry(block.mapping).or_default() += block.bytes;
        }
        let mut reserved = self.reserved_bytes();
        let unused: Vec<Mapping> = self
            .mappings
            .extract_if(.., |mapping| {
                let bytes = mapping.memory.len();
                let unused = free_in.get(&mapping.address) == Some(&bytes);
                let takes = unused && reserved > keep_bytes;
                reserved -= if takes { bytes } else { 0 };
                takes
            })
            .collect();
        for blocks in self.free.values_mut() {
            blocks.retain(|block| unused.iter().all(|mapping| mapping.address != block.mapping));
        }
        unused
    }
}

/// Ends a registration and the mapping; refused, the mapping stays for good.
fn unregister(backend: &dyn Backend, mapping: Mapping) -> std::result::Result<(), DriverCode> {
    // SAFETY: no block of the mapping is in use, and none is free to be handed out.
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

/// `len` elements in pinned host memory: copies to and from the device run at full speed and
/// without the calling thread.
///
/// It derefs to `[T]` and is aligned to 128 bytes. Fresh ones are zero, also where the pool had the
/// memory from somebody else. It is *lent* to a copy and comes back from the copy's future; dropped, it
/// returns to its device's pool.
pub struct PinnedBuffer<T> {
    block: Arc<PinnedBlock>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> PinnedBuffer<T> {
    /// Memory for a copy that overwrites all of it before anybody may look: it holds what whoever had
    /// it before left there.
    pub(crate) fn new(pool: &Arc<PinnedPool>, len: usize) -> Result<Self> {
        Ok(PinnedBuffer::over(pool.get(bytes_of::<T>(len)?)?, len))
    }

    /// `len` elements in a block that is large enough: the one way to a buffer.
    fn over(block: Arc<PinnedBlock>, len: usize) -> Self {
        const { must_fit::<T>(LEAST_BYTES as u64) };
        PinnedBuffer { block, len, element: PhantomData }
    }

    /// [`new`](Self::new) for users: zeros, whatever whoever had the memory before left there.
    pub(crate) fn zeroed(pool: &Arc<PinnedPool>, len: usize) -> Result<Self> {
        let mut fresh = PinnedBuffer::new(pool, len)?;
        bytemuck::fill_zeroes(&mut fresh);
        Ok(fresh)
    }

    /// [`zeroed`](Self::zeroed) if the pool has such memory and clearing it is quick.
    pub(crate) fn pooled_zeroed(pool: &Arc<PinnedPool>, len: usize) -> Result<Option<Self>> {
        // What is cut from slabs takes as long to clear as a wake-up.
        if bytes_of::<T>(len)? > SLAB_BYTES / 2 {
            return Ok(None);
        }
        let mut pooled = PinnedBuffer::pooled(pool, len)?;
        if let Some(pooled) = &mut pooled {
            bytemuck::fill_zeroes(pooled);
        }
        Ok(pooled)
    }

    /// [`new`](Self::new) if the pool has such memory: quick.
    pub(crate) fn pooled(pool: &Arc<PinnedPool>, len: usize) -> Result<Option<Self>> {
        let block = pool.get_pooled(bytes_of::<T>(len)?);
        Ok(block.map(|block| PinnedBuffer::over(block, len)))
    }

    /// The same memory with another length, for which it must have room.
    pub(crate) fn resized(self, len: usize) -> Self {
        assert!(len <= self.block.raw.bytes / size_of::<T>(), "no room for {len} elements");
        PinnedBuffer { len, ..self }
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn block(&self) -> &Arc<PinnedBlock> {
        &self.block
    }

    /// The buffer, unless a stream has a share of it: then the device may use it.
    pub(crate) fn unless_lent(mut self) -> Option<Self> {
        Arc::get_mut(&mut self.block).is_some().then_some(self)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }
}

impl<T: Element> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start: *const T = self.block.raw.host as *const T;
        // SAFETY: the block has room for `len` elements, is aligned for `T` (asserted in `over`)
        // and mapped; any bits are a valid `T: Pod`. A `PinnedBuffer` is in the user's hands only
        // while no device command may touch the block: it moves into the operation it is lent to
        // and comes back when that is complete.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl<T: Element> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start: *mut T = self.block.raw.host as *mut T;
        // SAFETY: as in `deref`; and no other `PinnedBuffer` has this block.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T: Element + PartialEq<U>, U: Element> PartialEq<[U]> for PinnedBuffer<T> {
    fn eq(&self, other: &[U]) -> bool {
        self[..] == *other
    }
}

impl<T: Element + PartialEq<U>, U: Element, const N: usize> PartialEq<[U; N]> for PinnedBuffer<T> {
    fn eq(&self, other: &[U; N]) -> bool {
        self[..] == other[..]
    }
}

impl<T: Element + PartialEq<U>, U: Element> PartialEq<Vec<U>> for PinnedBuffer<T> {
    fn eq(&self, other: &Vec<U>) -> bool {
        self[..] == other[..]
    }
}

/// A 32-bit word in pinned memory that the host and *running* kernels share.
///
/// Cheap to clone; all clones are the same word. A launch that was given the flag keeps it alive
/// until it is complete.
#[derive(Clone)]
pub struct PinnedFlag {
    block: Arc<PinnedBlock>,
}

impl PinnedFlag {
    pub(crate) fn new(pool: &Arc<PinnedPool>) -> Result<Self> {
        let flag = PinnedFlag { block: pool.get(size_of::<u32>())? };
        flag.set(0);
        Ok(flag)
    }

    /// Reads the word.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Writes the word; running kernels see it soon.
    pub fn set(&self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    /// Writes `new` if the word is `current`; returns what it was.
    ///
    /// Atomic towards the host's threads. Towards a kernel it is not, unless the device reports
    /// native host atomics.
    ///
    /// # Errors
    /// The value that was found, if it was not `current`.
    pub fn compare_exchange(&self, current: u32, new: u32) -> std::result::Result<u32, u32> {
        self.word().compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    pub(crate) fn block(&self) -> &Arc<PinnedBlock> {
        &self.block
    }

    fn word(&self) -> &AtomicU32 {
        let word: *mut u32 = self.block.raw.host as *mut u32;
        // SAFETY: the block is mapped for as long as `self.block` lives, aligned to 128 bytes, and
        // everybody accesses it as one atomic word.
        unsafe { AtomicU32::from_ptr(word) }
    }
}

impl fmt::Debug for PinnedFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedFlag({})", self.get())
    }
}

/// `len` elements in bytes.
pub(crate) fn bytes_of<T>(len: usize) -> Result<usize> {
    let element_bytes = size_of::<T>();
    match len.checked_mul(element_bytes).filter(|bytes| isize::try_from(*bytes).is_ok()) {
        Some(bytes) => Ok(bytes),
        None => Err(ErrorDetail::TooLarge { len, element_bytes }.into()),
    }
}
