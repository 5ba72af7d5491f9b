//! Memory beside the pools: reserved addresses, handles, mappings, perhaps with a file descriptor. All of it is in files without a name, so that two
//! processes under the stand-in have the same memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::abi::{Address, Array, Code, Handle, Out, Outcome, code};
use crate::shared::{Reserved, Shareable};
use crate::world::{World, call, told};

/// As an H200's.
const GRANULARITY: usize = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FILE_DESCRIPTOR: c_int = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProp {
    alloc_type: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    win32_meta_data: Handle,
    flags: [u8; 8],
}

impl World {
    /// Of pinned memory of a device, with a descriptor or without.
    fn shareable(&mut self, given: &[AllocationProp]) -> Outcome<usize> {
        match given.first() {
            Some(&AllocationProp {
                alloc_type: 1,
                handle_types: 0 | POSIX_FILE_DESCRIPTOR,
                location: [1, device],
                win32_meta_data: 0,
                flags: [0, 0, 0, 0, 0, 0, 0, 0],
            }) => self.device(device),
            _ => {
                self.journal
                    .misuse("an allocation's properties are not what they must be".to_owned());
                Err(code::INVALID_VALUE)
            }
        }
    }

    fn keep(&mut self, shareable: Shareable) -> u64 {
        let handle = self.next_handle();
        self.shared.handles.insert(handle, Arc::new(shareable));
        handle as u64
    }

    /// The end of a handle or a mapping.
    fn let_go(&mut self, shareable: Arc<Shareable>) {
        if let Some(Shareable { device, bytes, is_made_here: true, .. }) =
            Arc::into_inner(shareable)
        {
            self.memory.give(device, bytes);
        }
    }

    /// The reserved range that these addresses are in.
    fn reserved_at(&mut self, address: Address, bytes: usize) -> Outcome<&mut Reserved> {
        let found = self.shared.reserved.range_mut(..=address).next_back();
        match found.filter(|(start, range)| address + bytes <= **start + range.bytes) {
            Some((_, range)) => Ok(range),
            None => {
                let what = format!("{bytes} bytes at {address:#x} are in no reserved range");
                self.journal.misuse(what);
                Err(code::INVALID_VALUE)
            }
        }
    }

    /// Whole mappings, one behind the other, that these addresses are.
    fn mapped_at(&mut self, address: Address, bytes: usize) -> Outcome<Vec<Address>> {
        let (mut end, mut found) = (address, Vec::new());
        let range = self.reserved_at(address, bytes)?;
        for (start, mapped) in range.mapped.range(address..address + bytes) {
            if *start != end {
                break;
            }
            end += mapped.bytes;
            found.push(*start);
        }
        if found.is_empty() || end != address + bytes {
            self.journal.misuse(format!("{bytes} bytes at {address:#x} are no whole mappings"));
            return Err(code::INVALID_VALUE);
        }
        Ok(found)
    }
}

/// # Safety
/// `prop` is one description.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: Out<usize>,
    prop: Array<AllocationProp>,
    option: c_int,
) -> Code {
    // SAFETY: one description by this function's contract.
    let given = unsafe { prop.read(1) };
    call("cuMemGetAllocationGranularity", told!("option={option}"), |mut world| {
        world.shareable(&given)?;
        bytes.put(GRANULARITY)
    })
}

/// # Safety
/// `prop` is one description.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(
    handle: Out<u64>,
    bytes: usize,
    prop: Array<AllocationProp>,
    flags: u64,
) -> Code {
    // SAFETY: one description by this function's contract.
    let given = unsafe { prop.read(1) };
    call("cuMemCreate", told!("bytes={bytes}"), |mut world| {
        world.live_current()?;
        let device = world.shareable(&given)?;
        handle.check()?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if world.memory.left(device) < bytes as u64 {
            return Err(code::OUT_OF_MEMORY);
        }
        let file = file_of(bytes)?;
        world.memory.take(device, bytes);
        handle.put(world.keep(Shareable { file, bytes, device, is_made_here: true }))
    })
}

#[cfg(target_os = "linux")]
fn file_of(bytes: usize) -> Outcome<File> {
    // SAFETY: the name is a C string that lives. Not closed on `exec`: whether the driver's are, nobody says.
    let number = unsafe { libc::memfd_create(c"stand-in".as_ptr(), libc::MFD_ALLOW_SEALING) };
    if number < 0 {
        return Err(code::OPERATING_SYSTEM);
    }
    // SAFETY: new, and nobody else has it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(number) });
    file.set_len(bytes as u64).map_err(|_| code::OUT_OF_MEMORY)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn file_of(_: usize) -> Outcome<File> {
    Err(code::NOT_SUPPORTED)
}

/// The descriptor is not closed on `exec`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemExportToShareableHandle(
    to: Out<c_void>,
    handle: u64,
    kind: c_int,
    flags: u64,
) -> Code {
    call("cuMemExportToShareableHandle", told!("handle={handle:#x}"), |world| {
        let Some(known) = world.shared.handles.get(&(handle as Handle)) else {
            return Err(code::INVALID_VALUE);
        };
        if kind != POSIX_FILE_DESCRIPTOR || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: it is open.
        let number = unsafe { libc::dup(known.file.as_raw_fd()) };
        if number < 0 {
            return Err(code::OPERATING_SYSTEM);
        }
        to.of::<c_int>().put(number)
    })
}

/// What is no memory of this driver is refused, as far as a file without a name can tell.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemImportFromShareableHandle(
    handle: Out<u64>,
    descriptor: Handle,
    kind: c_int,
) -> Code {
    call("cuMemImportFromShareableHandle", told!("kind={kind}"), |mut world| {
        let device = world.live_current()?;
        handle.check()?;
        let number = c_int::try_from(descriptor).map_err(|_| code::INVALID_VALUE)?;
        if kind != POSIX_FILE_DESCRIPTOR || number < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's, which is open during the call.
        let theirs = unsafe { BorrowedFd::borrow_raw(number) };
        let file = File::from(theirs.try_clone_to_owned().map_err(|_| code::INVALID_VALUE)?);
        let name = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        let bytes = file.metadata().map_or(0, |known| known.len()) as usize;
        if !name.to_string_lossy().contains("stand-in") || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        handle.put(world.keep(Shareable { file, bytes, device, is_made_here: false }))
    })
}

/// The memory stays while it is mapped.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemRelease(handle: u64) -> Code {
    call("cuMemRelease", told!("handle={handle:#x}"), |mut world| {
        match world.shared.handles.remove(&(handle as Handle)) {
            Some(known) => {
                let device = known.device;
                world.let_go(known);
                world.alive(device)
            }
            None => {
                world.journal.misuse(format!("{handle:#x} is no handle of memory"));
                Err(code::INVALID_VALUE)
            }
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAddressReserve(
    address: Out<Address>,
    bytes: usize,
    alignment: usize,
    hint: Address,
    flags: u64,
) -> Code {
    call("cuMemAddressReserve", told!("bytes={bytes}"), |mut world| {
        world.live_current()?;
        address.check()?;
        let is_odd = bytes == 0 || !bytes.is_multiple_of(GRANULARITY);
        if is_odd || (alignment, hint, flags) != (0, 0, 0) {
            return Err(code::INVALID_VALUE);
        }
        let start = mmap(0, bytes, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        world.shared.reserved.insert(start, Reserved { bytes, mapped: BTreeMap::new() });
        address.put(start)
    })
}

/// Nobody may use it before the access is set.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemMap(
    address: Address,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Code {
    call("cuMemMap", told!("bytes={bytes} handle={handle:#x}"), |mut world| {
        let there = &world.reserved_at(address, bytes)?.mapped;
        if there.range(address..address + bytes).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        let Some(known) = world.shared.handles.get(&(handle as Handle)).cloned() else {
            return Err(code::INVALID_VALUE);
        };
        if known.bytes != bytes || (offset, flags) != (0, 0) {
            return Err(code::INVALID_VALUE);
        }
        let (device, number) = (known.device, known.file.as_raw_fd());
        mmap(address, bytes, libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_FIXED, number)?;
        world.reserved_at(address, bytes)?.mapped.insert(address, known);
        world.memory.enter_mapping(address, bytes, device);
        Ok(())
    })
}

/// # Safety
/// `descriptions` has `count` elements, each a `CUmemAccessDesc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemSetAccess(
    address: Address,
    bytes: usize,
    descriptions: Array<[c_int; 3]>,
    count: usize,
) -> Code {
    // SAFETY: `count` elements by this function's contract.
    let given = unsafe { descriptions.read(count) };
    let flags = given.first().map_or(0, |description| description[2]);
    let line = told!(world: "{} flags={flags}", world.memory.label(address));
    call("cuMemSetAccess", line, |mut world| {
        let parts = world.mapped_at(address, bytes)?;
        let device = world.reserved_at(address, bytes)?.mapped[&address].device;
        world.alive(device)?;
        if given.len() != 1 || given[0][..2] != [1, device as c_int] || !matches!(flags, 1 | 3) {
            return Err(code::INVALID_VALUE);
        }
        let writes = flags == 3;
        let protection = libc::PROT_READ | if writes { libc::PROT_WRITE } else { 0 };
        let pages = ptr::with_exposed_provenance_mut::<c_void>(address);
        // SAFETY: pages of a mapping that this file made.
        if unsafe { libc::mprotect(pages, bytes, protection) } != 0 {
            return Err(code::OPERATING_SYSTEM);
        }
        parts.iter().for_each(|part| world.memory.set_access(*part, writes));
        Ok(())
    })
}

/// What was mapped is reserved again.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemUnmap(address: Address, bytes: usize) -> Code {
    call("cuMemUnmap", told!(world: "{}", world.memory.label(address)), |mut world| {
        for part in world.mapped_at(address, bytes)? {
            let mapped = world.reserved_at(part, 0)?.mapped.remove(&part);
            let mapped = mapped.ok_or(code::INVALID_VALUE)?;
            let device = mapped.device;
            world.let_go(mapped);
            if let Some(owner) = world.memory.leave_mapping(part) {
                world.check_unused(owner);
            }
            world.alive(device)?;
        }
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        mmap(address, bytes, libc::PROT_NONE, how, -1).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAddressFree(address: Address, bytes: usize) -> Code {
    call("cuMemAddressFree", told!("bytes={bytes}"), |mut world| {
        if world.shared.reserved.get(&address).is_none_or(|range| range.bytes != bytes) {
            world.journal.misuse(format!("{bytes} bytes at {address:#x} are no reserved range"));
            return Err(code::INVALID_VALUE);
        }
        if !world.reserved_at(address, bytes)?.mapped.is_empty() {
            world.journal.misuse("a range is freed that something is mapped in".to_owned());
            return Err(code::INVALID_VALUE);
        }
        world.shared.reserved.remove(&address);
        let pages = ptr::with_exposed_provenance_mut::<c_void>(address);
        // SAFETY: pages that this file reserved, and that nothing is mapped in.
        if unsafe { libc::munmap(pages, bytes) } == 0 {
            Ok(())
        } else {
            Err(code::OPERATING_SYSTEM)
        }
    })
}

/// Maps pages: anywhere for address 0, or over pages that this file reserved.
fn mmap(
    address: Address,
    bytes: usize,
    protection: c_int,
    how: c_int,
    file: c_int,
) -> Outcome<Address> {
    let at = ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: a new range, or, with `MAP_FIXED`, one that this file reserved, of this length.
    let start = unsafe { libc::mmap(at, bytes, protection, how, file, 0) };
    if start == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(start.expose_provenance()) }
}
