//! [`SharedDescriptors`]: the descriptors that another process needs to map shared memory.
//!
//! | the header's file | means |
//! |---|---|
//! | has a fixed size | the memory is not sealed: its maker is filling it, or has died |
//! | has sealed contents as well | the memory is complete, and the header is its maker's |
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use super::info::{HEADER_BYTES, SharedInfo};
use crate::error::shared::SharedProblem;
use crate::error::{ErrorDetail, Result};
use crate::memory::shared_memory::system;
use crate::system::memfd;

/// The two descriptors of memory that [several processes share](crate::Device::shared), to be sent to another process over a Unix socket
/// (`SCM_RIGHTS`). A process can hold them, send them and read their [`info`](Self::info) without opening a device.
///
/// # Ownership
/// The memory stays while any process maps it or has a descriptor of it, even if the process that made it has died. Each descriptor closes on
/// `exec`, so no program that this process starts keeps the memory; to keep it that way, receive them with `MSG_CMSG_CLOEXEC`.
#[derive(Debug)]
pub struct SharedDescriptors {
    /// The memory's descriptor: from the driver, or on a host device a `memfd`.
    pub memory: OwnedFd,
    /// The header's descriptor: a `memfd`.
    pub header: OwnedFd,
}

impl SharedDescriptors {
    /// Descriptors with an empty header.
    pub(super) fn of(memory: OwnedFd) -> Result<Self> {
        let header = memfd::create(HEADER_BYTES as u64);
        Ok(SharedDescriptors {
            memory,
            header: header.map_err(|why| system("memfd_create", &why))?,
        })
    }

    /// Duplicates both; they close on `exec` as well.
    ///
    /// # Errors
    /// [`SharedProblem::System`]: no descriptor is left.
    pub fn try_clone(&self) -> Result<Self> {
        let clone = |of: &OwnedFd| of.try_clone().map_err(|why| system("dup", &why));
        Ok(SharedDescriptors { memory: clone(&self.memory)?, header: clone(&self.header)? })
    }

    /// Reads the description of the memory. Needs no device; makes two or three system calls, which do not block.
    ///
    /// # Errors
    /// [`ErrorDetail::BadShared`]: the memory is [not sealed](SharedProblem::NotSealed); the header is not one, or of another version.
    pub fn info(&self) -> Result<SharedInfo> {
        self.read().map_err(|problem| ErrorDetail::BadShared { problem }.into())
    }

    fn read(&self) -> std::result::Result<SharedInfo, SharedProblem> {
        let is_none = |reason: String| SharedProblem::NotShared { what: "header", reason };
        let header = self.header.as_fd();
        let seals = |seals| memfd::has(header, seals).map_err(|why| is_none(why.to_string()));
        let bytes = memfd::len(header).map_err(|why| is_none(why.to_string()))?;
        // Checked first: a pipe, for example, may never answer a read.
        if !seals(memfd::SIZE)? || bytes != HEADER_BYTES as u64 {
            return Err(is_none("not a file of a header's fixed size".to_owned()));
        }
        if !seals(memfd::ALL)? {
            return Err(SharedProblem::NotSealed);
        }
        let mut bytes = [0; HEADER_BYTES];
        let read =
            self.header.try_clone().and_then(|file| File::from(file).read_exact_at(&mut bytes, 0));
        read.map_err(|why| is_none(why.to_string()))?;
        SharedInfo::from_bytes(&bytes)
    }

    /// Writes the header, and seals it.
    pub(super) fn seal(&self, info: &SharedInfo) -> Result<()> {
        let write = || -> io::Result<()> {
            File::from(self.header.try_clone()?).write_all_at(&info.to_bytes(), 0)?;
            memfd::seal(self.header.as_fd(), memfd::ALL)
        };
        write().map_err(|why| system("sealing a header", &why))
    }
}
