//! Memory that several processes map, on the host device: a file without a name.
//!
//! Read-only here means that the pages are: a twin that writes them kills its process (`SIGSEGV`), where a GPU's kernel faults. Twins get
//! such memory as `&[T]`, so safe twins cannot. Once it is sealed, no process can map it writable any more.
//!
//! Each process maps a file description of its own, so that another one can ask the system whether that process and its forks have let go of
//! it (`fcntl(2)`, `F_SETLEASE`).

use std::io;
use std::os::fd::BorrowedFd;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::{HostBackend, INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};
use crate::backend::{DevicePtr, DriverResult, SharedCalls, SharedMapping};
use crate::error::DriverCode;
use crate::system::memfd;

/// As a GPU's.
const GRANULARITY: u64 = 2 << 20;

/// A mapping.
pub(super) struct Shared {
    map: MmapRaw,
    /// How much of this device's memory it takes: imported memory counts for its creator.
    bytes: u64,
}

impl HostBackend {
    fn enter(&self, map: MmapRaw, bytes: u64) -> SharedMapping {
        // Otherwise a crash would dump it to disk.
        map.advise(Advice::DontDump).ok();
        let mapping =
            SharedMapping { ptr: DevicePtr(map.as_mut_ptr() as u64), bytes: map.len() as u64 };
        self.shared.memory.lock().shared.insert(mapping.ptr.0, Shared { map, bytes });
        mapping
    }
}

impl SharedCalls for HostBackend {
    /// All host devices have the same memory.
    fn uuid(&self) -> DriverResult<[u8; 16]> {
        self.shared.healthy("uuid").map(|()| [0; 16])
    }

    fn shared_granularity(&self) -> DriverResult<u64> {
        self.shared.healthy("shared_granularity").map(|()| GRANULARITY)
    }

    fn shared_create(&self, bytes: u64) -> DriverResult<(SharedMapping, i32)> {
        const CALL: &str = "shared_create";
        self.shared.healthy(CALL)?;
        {
            let mut memory = self.shared.memory.lock();
            if memory.left() < bytes {
                return Err(DriverCode { call: CALL, code: OUT_OF_MEMORY });
            }
            memory.used_beside_pool += bytes;
        }
        let made = memfd::create(bytes).and_then(|file| {
            // The kernel does not count the description from `memfd_create` among the file's writers.
            let file = memfd::opened_again(&file).unwrap_or(file);
            let map = MmapOptions::new().len(bytes as usize).map_raw(&file)?;
            Ok((map, memfd::into_number(file)))
        });
        match made {
            Ok((map, number)) => Ok((self.enter(map, bytes), number)),
            Err(why) => {
                self.shared.memory.lock().used_beside_pool -= bytes;
                Err(code_of(CALL, &why))
            }
        }
    }

    fn shared_import(
        &self,
        descriptor: i32,
        bytes: u64,
        writes: bool,
    ) -> DriverResult<SharedMapping> {
        const CALL: &str = "shared_import";
        self.shared.healthy(CALL)?;
        // SAFETY: the caller's descriptor, open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let import = || {
            // Without these seals it could be truncated, and reading it would kill this process; or written although it is shared read-only.
            let seals = if writes { memfd::SIZE } else { memfd::SIZE | memfd::NEW_WRITERS };
            if !memfd::has(file, seals)? || memfd::len(file)? != bytes {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let mut options = MmapOptions::new();
            options.len(bytes as usize);
            if writes { options.map_raw(&file) } else { options.map_raw_read_only(&file) }
        };
        import().map(|map| self.enter(map, 0)).map_err(|why| code_of(CALL, &why))
    }

    unsafe fn shared_protect(&self, mapping: &SharedMapping, descriptor: i32) -> DriverResult<()> {
        const CALL: &str = "shared_protect";
        self.shared.healthy(CALL)?;
        let start = mapping.ptr.0 as *mut u8;
        // SAFETY: a mapping of this backend that no command uses.
        let forbidden = unsafe { memfd::forbid_writes(start, mapping.bytes as usize) };
        forbidden.map_err(|why| code_of(CALL, &why))?;
        // SAFETY: the caller's descriptor, open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // Kernels before 5.1 lack that seal.
        memfd::seal(file, memfd::NEW_WRITERS).ok();
        Ok(())
    }

    unsafe fn shared_unmap(&self, mapping: &SharedMapping) -> DriverResult<()> {
        let mut memory = self.shared.memory.lock();
        let removed = memory.shared.remove(&mapping.ptr.0);
        let removed = removed.ok_or(DriverCode { call: "shared_unmap", code: INVALID_VALUE })?;
        memory.used_beside_pool -= removed.bytes;
        drop(memory);
        drop(removed.map);
        Ok(())
    }
}

fn code_of(call: &'static str, why: &io::Error) -> DriverCode {
    let code = match why.kind() {
        io::ErrorKind::OutOfMemory => OUT_OF_MEMORY,
        io::ErrorKind::InvalidInput => INVALID_VALUE,
        _ => OPERATING_SYSTEM,
    };
    DriverCode { call, code }
}
