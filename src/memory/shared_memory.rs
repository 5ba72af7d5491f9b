//! [`SharedMemory`]: memory with a file descriptor, which other processes may map as well, in the address space of one device.
//!
//! # Invariants
//! 1. It is unmapped when every use here is complete, by the thread that drops owners of memory, and then removed from the
//!    account (`drops_in_any_order_leave_nothing`).
//! 2. New memory is counted in the limit before the driver call (`the_limit_bounds_shared_memory`).

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::MemoryInfo;
use super::allocation::Allocation;
use super::beside_pool;
use super::beside_pool::OUT_OF_MEMORY;
use crate::backend::SharedMapping;
use crate::error::shared::SharedProblem;
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;
use crate::system::memfd;

const INVALID_VALUE: i32 = 1;

/// Unmapped when it is dropped, unless the device is lost.
pub(crate) struct SharedMemory {
    engine: Arc<Engine>,
    raw: SharedMapping,
    is_made_here: bool,
}

impl SharedMemory {
    /// Creates memory, in multiples of the granularity. Blocks for driver calls.
    ///
    /// # Errors
    /// Out of memory, after everything that streams keep and the pool reserves was returned; a driver refusal; no descriptor from the system.
    pub(crate) fn create(stream: &Arc<StreamState>, bytes: u64) -> Result<(SharedMemory, OwnedFd)> {
        let engine = &stream.engine;
        engine.check_open()?;
        let full = || MemoryInfo::out_of_memory(stream, "shared".into(), bytes, None);
        if !beside_pool::claim(stream, bytes, None, |account| account.share(bytes)) {
            return Err(full());
        }
        match beside_pool::make(engine, || engine.backend.shared_create(bytes)) {
            Ok((raw, number)) => {
                let mapping = SharedMemory { engine: engine.clone(), raw, is_made_here: true };
                // SAFETY: the backend made it for this call.
                let descriptor = unsafe { memfd::take_over(number) };
                Ok((mapping, descriptor.map_err(|why| system("fcntl", &why))?))
            }
            Err(code) => {
                let mut account = engine.memory.account.lock();
                account.unshare(bytes);
                if code.code == OUT_OF_MEMORY {
                    account.refuse(bytes);
                }
                drop(account);
                Err(if code.code == OUT_OF_MEMORY { full() } else { not_exported(engine, code) })
            }
        }
    }

    /// Maps all of the memory behind a descriptor for reading and, with `writes`, for writing. Blocks for driver calls.
    ///
    /// # Errors
    /// A descriptor of something else, or of less memory; a driver refusal.
    pub(crate) fn import(
        engine: &Arc<Engine>,
        memory: BorrowedFd<'_>,
        bytes: u64,
        writes: bool,
    ) -> Result<SharedMemory> {
        engine.check_open()?;
        let raw = engine.backend.shared_import(memory.as_raw_fd(), bytes, writes);
        let raw = raw.map_err(|code| is_of_something_else(engine, code))?;
        engine.memory.account.lock().import(bytes);
        Ok(SharedMemory { engine: engine.clone(), raw, is_made_here: false })
    }

    /// The mapping, for [`protect`] while the memory exists.
    pub(crate) fn raw(&self) -> SharedMapping {
        self.raw
    }

    /// The first `bytes`, as memory like any other: `written` by another process, or not written.
    pub(crate) fn into_allocation(self, bytes: u64, written: bool) -> Allocation {
        let (engine, ptr) = (self.engine.clone(), self.raw.ptr);
        if bytes > 0 {
            // SAFETY: it is mapped, and its owner is dropped behind the last use.
            unsafe { engine.backend.adopt(ptr, bytes) };
        }
        Allocation::mapped(&engine, ptr, bytes, written, Box::new(self))
    }
}

/// Makes a mapping read-only. Blocks for a driver call.
///
/// # Safety
/// The memory exists during the call, nothing writes it from now on, and every use of it is complete.
pub(crate) unsafe fn protect(
    engine: &Engine,
    mapping: &SharedMapping,
    memory: BorrowedFd<'_>,
) -> Result<()> {
    engine.check_open()?;
    // SAFETY: the caller's promise is that of the backend.
    let protected = unsafe { engine.backend.shared_protect(mapping, memory.as_raw_fd()) };
    protected.map_err(|code| engine.refused(code))
}

/// The error for memory that the driver did not create. The driver does not say what the system refused: if the process cannot get two
/// descriptors, the number that such memory needs, it was those.
fn not_exported(engine: &Engine, code: DriverCode) -> crate::Error {
    const OPERATING_SYSTEM: i32 = 304;
    match memfd::create(0).and_then(|one| one.try_clone()) {
        Err(why) if code.code == OPERATING_SYSTEM => system("memfd_create", &why),
        _ => engine.refused(code),
    }
}

/// The error for an import that the driver refused. Its codes for other kinds of descriptor are not documented.
fn is_of_something_else(engine: &Engine, code: DriverCode) -> crate::Error {
    let error = engine.refused(code);
    if error.is_device_lost() || code.code == OUT_OF_MEMORY {
        return error;
    }
    let reason = match code.code {
        INVALID_VALUE => "or of another size".to_owned(),
        _ => code.to_string(),
    };
    ErrorDetail::BadShared { problem: SharedProblem::NotShared { what: "memory", reason } }.into()
}

/// The error for a refused system call.
pub(crate) fn system(call: &'static str, why: &std::io::Error) -> crate::Error {
    let code = why.raw_os_error().unwrap_or(0);
    ErrorDetail::BadShared { problem: SharedProblem::System { call, code } }.into()
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let SharedMemory { engine, raw, is_made_here } = self;
        if engine.is_usable() {
            // SAFETY: the owner of memory is dropped when every use is complete; before it owned memory there was no use.
            let unmapped = unsafe { engine.backend.shared_unmap(raw) };
            if unmapped.is_err() {
                engine.state.count_unreturned();
            }
        }
        let mut account = engine.memory.account.lock();
        if *is_made_here {
            account.unshare(raw.bytes)
        } else {
            account.unimport(raw.bytes)
        }
        drop(account);
        engine.memory.moved();
    }
}
