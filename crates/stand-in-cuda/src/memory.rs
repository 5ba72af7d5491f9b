//! Device memory and registered host memory, and the only code that touches their bytes.
//!
//! A queued command names memory as a [`Place`]: a range and the allocation or registration it lies
//! in. The range is looked up again when the command runs; if its owner is gone by then, the
//! command touches nothing and is counted as misuse.
//!
//! More than 500 lines: the bytes are touched nowhere else.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::abi::{Address, Handle, Outcome, code};
use crate::chunks::{Chunks, Spot};
use crate::points::Clock;

/// Devices that `standin_set_devices` can show.
pub(crate) const MAX_DEVICES: usize = 8;

/// Fresh device memory is filled with this: nobody may count on zeros.
const POISON: u8 = 0xCD;

/// Device memory is aligned like the driver's.
const ALIGNMENT: usize = 512;

/// All memory that the stand-in knows.
pub(crate) struct Memory {
    allocations: BTreeMap<Address, Allocation>,
    registrations: BTreeMap<Address, Registration>,
    allocations_made: u64,
    registrations_made: u64,
    used: [u64; MAX_DEVICES],
    /// By memory with a descriptor, beside that.
    taken: [u64; MAX_DEVICES],
    /// Of each pool, and the most that it ever was.
    of_pools: BTreeMap<Handle, (u64, u64)>,
    /// What the pools reserve.
    chunks: Chunks,
    /// Bytes that each device has.
    pub(crate) total_bytes: u64,
}

struct Allocation {
    number: u64,
    bytes: usize,
    device: usize,
    /// `None`: a mapping, which is unmapped and not freed.
    layout: Option<Layout>,
    /// Commands may write it.
    writable: bool,
    pool: Option<Handle>,
    /// A free was submitted and has not been reached.
    freeing: Option<Free>,
    /// Bytes that others have by now, who come after the free.
    given: u64,
}

/// A free on a stream: the number of its command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Free {
    pub(crate) stream: Handle,
    pub(crate) command: u64,
}

/// Who allocates, from a pool.
pub(crate) struct PoolUser<'a> {
    pub(crate) pool: Handle,
    pub(crate) max_bytes: u64,
    /// What is in front of the allocation.
    pub(crate) clock: &'a Clock,
}

struct Registration {
    number: u64,
    bytes: usize,
}

/// A range of memory that a command will use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    address: Address,
    bytes: usize,
    pub(crate) owner: Owner,
}

/// Who says how long a [`Place`] is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Allocation(u64),
    Registration(u64),
    /// Ordinary host memory: only while the call that names it has not returned.
    Pageable,
}

impl Memory {
    pub(crate) const fn new() -> Self {
        Memory {
            allocations: BTreeMap::new(),
            registrations: BTreeMap::new(),
            allocations_made: 0,
            registrations_made: 0,
            used: [0; MAX_DEVICES],
            taken: [0; MAX_DEVICES],
            of_pools: BTreeMap::new(),
            chunks: Chunks::new(),
            total_bytes: 4 << 30,
        }
    }

    /// What a device has left: what is in use is gone, and so is what pools reserve.
    pub(crate) fn left(&self, device: usize) -> u64 {
        let taken = self.used[device].max(self.chunks.of_device(device));
        self.total_bytes.saturating_sub(taken + self.taken[device])
    }

    /// What a pool holds, and the most that it ever held.
    pub(crate) fn of_pool(&self, pool: Handle) -> (u64, u64) {
        self.of_pools.get(&pool).copied().unwrap_or_default()
    }

    /// What a pool has reserved, and the most that it ever had.
    pub(crate) fn reserved(&self, pool: Handle) -> (u64, u64) {
        // What is in no chunk counts as well.
        let ((chunks, chunks_high), (held, high)) = (self.chunks.of_pool(pool), self.of_pool(pool));
        (chunks.max(held), chunks_high.max(high))
    }

    /// Returns what a pool reserves and does not use, down to `keep_bytes`.
    pub(crate) fn trim(&mut self, pool: Handle, keep_bytes: u64) {
        self.chunks.trim(pool, keep_bytes);
    }

    /// A pool was destroyed: what it reserves goes with its allocations.
    pub(crate) fn abandon(&mut self, pool: Handle) {
        self.chunks.abandon(pool);
    }

    pub(crate) fn live_allocations(&self) -> usize {
        self.allocations.len()
    }

    pub(crate) fn live_registrations(&self) -> usize {
        self.registrations.len()
    }

    /// Makes an allocation: `INVALID_VALUE` for no bytes, `OUT_OF_MEMORY` when the device, or the pool,
    /// has not so many left. From a pool, what is free behind the allocation is used again: frees on
    /// its stream, and in front of events that the stream waits for.
    pub(crate) fn allocate(
        &mut self,
        device: usize,
        bytes: usize,
        user: Option<&PoolUser<'_>>,
    ) -> Outcome<Address> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let size = bytes as u64;
        let spot = user.map(|user| self.use_again(device, size, user)).transpose()?;
        let used = self.used[device].saturating_add(size);
        if used + self.taken[device] > self.total_bytes {
            return Err(code::OUT_OF_MEMORY);
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: the layout's size is not zero, checked above.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: `start` was just allocated with `bytes` bytes, and nobody else knows it.
        unsafe { start.write_bytes(POISON, bytes) };
        let address = start.expose_provenance();
        self.used[device] = used;
        let pool = user.map(|user| user.pool);
        if let Some(pool) = pool {
            let (held, high) = self.of_pools.entry(pool).or_default();
            *held += size;
            *high = (*high).max(*held);
        }
        if let Some(spot) = spot {
            self.chunks.place(address, &spot);
        }
        self.allocations_made += 1;
        let number = self.allocations_made;
        let allocation = Allocation {
            number,
            bytes,
            device,
            layout: Some(layout),
            writable: true,
            pool,
            freeing: None,
            given: 0,
        };
        self.allocations.insert(address, allocation);
        Ok(address)
    }

    /// Finds a place in the pool's chunks, and takes up to so many bytes from frees that are in front of the
    /// allocation; `OUT_OF_MEMORY`, and nothing is taken, if the pool would reserve more than its maximum, or the
    /// device has not so many bytes left.
    fn use_again(&mut self, device: usize, size: u64, user: &PoolUser<'_>) -> Outcome<Spot> {
        let PoolUser { pool, max_bytes, clock } = *user;
        let is_behind = |free: Free| clock.get(&free.stream).is_some_and(|n| *n >= free.command);
        let is_freed = |allocation: &Allocation| allocation.freeing.is_some_and(is_behind);
        let in_front = |one: &Allocation| one.pool == Some(pool) && is_freed(one);
        let out_of_the_way = |address| self.allocations.get(&address).is_none_or(&in_front);
        let left = self.left(device);
        let spot = self.chunks.find((pool, device), size, max_bytes, left, out_of_the_way);
        let spot = spot.ok_or(code::OUT_OF_MEMORY)?;
        let mut fresh = size;
        let mut parts = Vec::new();
        for (&address, allocation) in self.allocations.iter().filter(|(_, one)| in_front(one)) {
            let part = (allocation.bytes as u64 - allocation.given).min(fresh);
            fresh -= part;
            parts.push((address, part));
        }
        if self.used[device].saturating_add(fresh) + self.taken[device] > self.total_bytes {
            return Err(code::OUT_OF_MEMORY);
        }
        for (address, part) in parts {
            if let Some(allocation) = self.allocations.get_mut(&address) {
                allocation.given += part;
            }
        }
        self.used[device] -= size - fresh;
        self.of_pools.entry(pool).or_default().0 -= size - fresh;
        Ok(spot)
    }

    /// Marks an allocation as freed by a call, its bytes still there. `None` if `address` does not
    /// start a live one.
    pub(crate) fn begin_free(&mut self, address: Address, free: Free) -> Option<Owner> {
        let allocation = self.allocations.get_mut(&address)?;
        if allocation.freeing.is_some() || allocation.layout.is_none() {
            return None;
        }
        allocation.freeing = Some(free);
        Some(Owner::Allocation(allocation.number))
    }

    /// Counts an allocation as given back.
    fn count_free(&mut self, allocation: &Allocation) {
        let left = allocation.bytes as u64 - allocation.given;
        self.used[allocation.device] -= left;
        if let Some(pool) = allocation.pool {
            self.of_pools.entry(pool).or_default().0 -= left;
        }
    }

    /// Gives an allocation's memory back: its free was reached.
    pub(crate) fn finish_free(&mut self, address: Address) {
        if let Some(allocation) = self.allocations.remove(&address) {
            self.count_free(&allocation);
            self.chunks.leave(address);
            let Some(layout) = allocation.layout else { return };
            let start = ptr::with_exposed_provenance_mut::<u8>(address);
            // SAFETY: allocated with this layout in `allocate`, whose address was exposed there;
            // just taken out of the table, so it is freed once and no later look-up finds it.
            unsafe { dealloc(start, layout) };
        }
    }

    /// Takes a freed allocation of a lost device out of the books. Its memory stays: nobody says
    /// that the device stopped.
    pub(crate) fn forget(&mut self, address: Address) {
        if let Some(allocation) = self.allocations.remove(&address) {
            self.count_free(&allocation);
            self.chunks.leave(address);
        }
    }

    /// Takes memory of a device for what is no allocation.
    pub(crate) fn take(&mut self, device: usize, bytes: usize) {
        self.taken[device] += bytes as u64;
    }

    /// And gives it back.
    pub(crate) fn give(&mut self, device: usize, bytes: usize) {
        self.taken[device] -= bytes as u64;
    }

    /// Memory was mapped: device memory that is not freed.
    pub(crate) fn enter_mapping(&mut self, address: Address, bytes: usize, device: usize) {
        self.allocations_made += 1;
        let number = self.allocations_made;
        let (layout, pool) = (None, None);
        let mapped = Allocation {
            number,
            bytes,
            device,
            layout,
            writable: false,
            pool,
            freeing: None,
            given: 0,
        };
        self.allocations.insert(address, mapped);
    }

    /// Whether commands may write a mapping.
    pub(crate) fn set_access(&mut self, address: Address, writable: bool) {
        if let Some(mapped) = self.allocations.get_mut(&address) {
            mapped.writable = writable;
        }
    }

    /// A mapping was ended; names it.
    pub(crate) fn leave_mapping(&mut self, address: Address) -> Option<Owner> {
        self.allocations.remove(&address).map(|mapped| Owner::Allocation(mapped.number))
    }

    /// Makes registered host memory, which stays to the end of the process: nobody gives it back.
    pub(crate) fn allocate_registered(&mut self, bytes: usize) -> Outcome<Address> {
        let start = vec![0_u8; bytes].leak().as_mut_ptr().expose_provenance();
        self.register(start, bytes)?;
        Ok(start)
    }

    /// Registers host memory: `HOST_MEMORY_ALREADY_REGISTERED` if a part of it is.
    pub(crate) fn register(&mut self, address: Address, bytes: usize) -> Outcome {
        let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        if address == 0 || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let before = self.registrations.range(..end).next_back();
        if before.is_some_and(|(&start, registration)| start + registration.bytes > address) {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.registrations_made += 1;
        self.registrations.insert(address, Registration { number: self.registrations_made, bytes });
        Ok(())
    }

    /// Ends a registration and names it; `None` if none starts there.
    pub(crate) fn unregister(&mut self, address: Address) -> Option<Owner> {
        let registration = self.registrations.remove(&address)?;
        Some(Owner::Registration(registration.number))
    }

    /// Finds the range in device memory or registered memory. A freed allocation's memory is not
    /// found.
    pub(crate) fn device_place(&self, address: Address, bytes: usize) -> Option<Place> {
        let end = address.checked_add(bytes)?;
        let allocation =
            self.allocations.range(..=address).next_back().and_then(|(&start, allocation)| {
                let inside = self.reaches(start, allocation, end) && allocation.freeing.is_none();
                inside.then_some(Owner::Allocation(allocation.number))
            });
        let owner = allocation.or_else(|| self.registration_of(address, end))?;
        Some(Place { address, bytes, owner })
    }

    /// The range with the owner that it has now; as it was, if it has none.
    pub(crate) fn found_again(&self, place: &Place) -> Place {
        self.device_place(place.address, place.bytes).unwrap_or(*place)
    }

    /// Finds the range in host memory: registered, or else pageable. `None` for null and for device
    /// memory.
    pub(crate) fn host_place(&self, address: Address, bytes: usize) -> Option<Place> {
        let end = address.checked_add(bytes)?;
        if address == 0 && bytes > 0 || self.allocation_at(address).is_some() {
            return None;
        }
        let owner = self.registration_of(address, end).unwrap_or(Owner::Pageable);
        Some(Place { address, bytes, owner })
    }

    /// Whether an allocation, freed by a call or not, contains the address.
    pub(crate) fn is_device_address(&self, address: Address) -> bool {
        self.allocation_at(address).is_some()
    }

    /// The allocation that contains an address: where it begins, how long it is, and its device.
    pub(crate) fn allocation_of(&self, address: Address) -> Option<(Address, usize, usize)> {
        let (start, allocation) = self.allocation_at(address)?;
        Some((start, allocation.bytes, allocation.device))
    }

    /// Whether the address is in registered host memory.
    pub(crate) fn is_registered(&self, address: Address) -> bool {
        self.registration_of(address, address + 1).is_some()
    }

    fn allocation_at(&self, address: Address) -> Option<(Address, &Allocation)> {
        let (&start, allocation) = self.allocations.range(..=address).next_back()?;
        (address < start + allocation.bytes).then_some((start, allocation))
    }

    /// Whether a range begins in one mapping and ends in another.
    pub(crate) fn is_of_several(&self, place: &Place) -> bool {
        let end = place.address + place.bytes;
        self.allocation_at(place.address)
            .is_some_and(|(start, allocation)| start + allocation.bytes < end)
    }

    /// Whether an allocation goes on to `end`; a mapping does with those right behind it.
    fn reaches(&self, start: Address, allocation: &Allocation, end: Address) -> bool {
        let mut reached = start + allocation.bytes;
        while reached < end && allocation.layout.is_none() {
            match self.allocations.get(&reached).filter(|next| next.layout.is_none()) {
                Some(next) => reached += next.bytes,
                None => break,
            }
        }
        end <= reached
    }

    fn registration_of(&self, address: Address, end: Address) -> Option<Owner> {
        let (&start, registration) = self.registrations.range(..=address).next_back()?;
        (end <= start + registration.bytes).then_some(Owner::Registration(registration.number))
    }

    /// Names an address in the journal: `memory2+16`, `registered1+0`, `pageable` or `null`.
    pub(crate) fn label(&self, address: Address) -> String {
        if let Some((start, allocation)) = self.allocation_at(address) {
            return format!("memory{}+{}", allocation.number, address - start);
        }
        match self.registrations.range(..=address).next_back() {
            Some((&start, registration)) if address < start + registration.bytes => {
                format!("registered{}+{}", registration.number, address - start)
            }
            _ if address == 0 => "null".to_owned(),
            _ => "pageable".to_owned(),
        }
    }

    /// Whether the place's owner is still the one it was when the place was found.
    pub(crate) fn is_there(&self, place: &Place) -> bool {
        let end = place.address + place.bytes;
        match place.owner {
            Owner::Allocation(number) => {
                self.allocations.range(..=place.address).next_back().is_some_and(
                    |(&start, allocation)| {
                        allocation.number == number && self.reaches(start, allocation, end)
                    },
                )
            }
            Owner::Registration(_) => self.registration_of(place.address, end) == Some(place.owner),
            Owner::Pageable => true,
        }
    }

    /// Whether it is there, and not mapped read-only.
    fn may_write(&self, place: &Place) -> bool {
        let known = self.allocation_at(place.address);
        self.is_there(place) && known.is_none_or(|(_, allocation)| allocation.writable)
    }

    /// Copies between places of one length; `false`, and nothing is touched, if one of them is
    /// gone.
    pub(crate) fn copy(&self, to: &Place, from: &Place) -> bool {
        if !self.may_write(to) || !self.is_there(from) || to.bytes != from.bytes {
            return false;
        }
        // SAFETY: both ranges are live: an allocation of ours; memory whose owner promised, by
        // registering it, that it stays mapped until it is unregistered; or pageable memory of a
        // call that waits for this copy. `copy` allows overlap.
        unsafe { ptr::copy(pointer(from), pointer(to), to.bytes) };
        true
    }

    /// Copies the place's bytes out, as the driver stages pageable memory during the call.
    ///
    /// # Safety
    /// The caller of the driver function, who says that the range is readable, is still waiting for
    /// its return.
    pub(crate) unsafe fn snapshot(&self, from: &Place) -> Vec<u8> {
        if from.bytes == 0 {
            return Vec::new();
        }
        // SAFETY: readable by this function's contract, and not null: `host_place` finds no bytes
        // at null.
        unsafe { std::slice::from_raw_parts(pointer(from), from.bytes) }.to_vec()
    }

    /// Writes bytes kept by a command; `false` if the place is gone or has another length.
    pub(crate) fn put(&self, to: &Place, bytes: &[u8]) -> bool {
        if !self.may_write(to) || to.bytes != bytes.len() {
            return false;
        }
        // SAFETY: the destination is live as in `copy`, and as long as `bytes`, which the command
        // owns, so they are apart.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(to), bytes.len()) };
        true
    }

    /// Fills the place with copies of `pattern`, whose length divides the place's; `false` if the
    /// place is gone.
    pub(crate) fn fill(&self, to: &Place, pattern: &[u8]) -> bool {
        self.put(to, &pattern.repeat(to.bytes / pattern.len()))
    }

    /// Repeats the pattern over the first `row_bytes` of every `pitch` bytes, the last of which end the place; `false`, and nothing is
    /// touched, if the place is gone.
    pub(crate) fn fill_rows(
        &self,
        to: &Place,
        pattern: &[u8],
        row_bytes: usize,
        pitch: usize,
    ) -> bool {
        if !self.may_write(to) {
            return false;
        }
        let row = pattern.repeat(row_bytes / pattern.len());
        for start in (0..to.bytes).step_by(pitch) {
            assert!(start + row.len() <= to.bytes, "the last row ends with the place");
            let at = pointer(&Place { address: to.address + start, ..*to });
            // SAFETY: the destination is live as in `copy`: it is in `to`, as was asserted. `row` is this function's, so they are apart.
            unsafe { ptr::copy_nonoverlapping(row.as_ptr(), at, row.len()) };
        }
        true
    }

    /// Stores an aligned 4- or 8-byte word with Release; `false` if the place is gone.
    pub(crate) fn store_word(&self, to: &Place, value: u64) -> bool {
        if !self.may_write(to) || !to.address.is_multiple_of(to.bytes) {
            return false;
        }
        // ORDERING: Release, what the stream did before the word is seen by who reads the word with
        // Acquire.
        if to.bytes == 8 {
            // SAFETY: live as in `copy`, aligned and 8 bytes, checked above; words are shared as
            // atomics by contract.
            unsafe { AtomicU64::from_ptr(pointer(to).cast()) }.store(value, Ordering::Release);
        } else if to.bytes == 4 {
            // The driver takes a 32-bit value for a 32-bit word, so nothing is cut.
            let value = (value & u64::from(u32::MAX)) as u32;
            // SAFETY: live as in `copy`, aligned and 4 bytes, checked above; words are shared as
            // atomics by contract.
            unsafe { AtomicU32::from_ptr(pointer(to).cast()) }.store(value, Ordering::Release);
        }
        true
    }

    /// Loads an aligned 4-byte word with Acquire; `None` if the place is gone.
    pub(crate) fn load_word(&self, from: &Place) -> Option<u32> {
        if !self.is_there(from) || from.bytes != 4 || !from.address.is_multiple_of(4) {
            return None;
        }
        // SAFETY: live as in `copy`, aligned and 4 bytes, checked above; words are shared as
        // atomics by contract.
        let word = unsafe { AtomicU32::from_ptr(pointer(from).cast()) };
        // ORDERING: Acquire, what the opener did before it opened the gate is seen by what runs
        // behind the gate.
        Some(word.load(Ordering::Acquire))
    }

    /// Sets an aligned 4-byte word from 0 to `value`; `false` if the place is gone.
    pub(crate) fn set_word_from_zero(&self, to: &Place, value: u32) -> bool {
        if !self.may_write(to) || to.bytes != 4 || !to.address.is_multiple_of(4) {
            return false;
        }
        // SAFETY: live as in `copy`, aligned and 4 bytes, checked above; words are shared as
        // atomics by contract.
        let word = unsafe { AtomicU32::from_ptr(pointer(to).cast()) };
        // ORDERING: Release on success as `store_word`; Acquire on failure as `load_word`: it was
        // opened in this instant. Either outcome is the kernel's end, so which one is not needed.
        word.compare_exchange(0, value, Ordering::Release, Ordering::Acquire).ok();
        true
    }
}

/// The pointer to a place's first byte. Device addresses were exposed when allocated; a host
/// caller's came as an integer.
fn pointer(place: &Place) -> *mut u8 {
    ptr::with_exposed_provenance_mut(place.address)
}
