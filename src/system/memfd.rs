//! Files without a name (`memfd_create`), whose size and contents can be sealed, and descriptors that no started program inherits.
//!
//! Linux only.
//!
//! Source: `memfd_create(2)`; `fcntl(2)`, `F_ADD_SEALS`, `F_GET_SEALS`; `mprotect(2)`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

/// Its size cannot change any more, and these seals cannot be removed.
pub(crate) const SIZE: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
/// Its contents cannot change either, and no seal can be added.
pub(crate) const ALL: i32 = SIZE | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;
/// No new writable mapping of it can be made, and no descriptor can write it. Existing mappings stay.
pub(crate) const NEW_WRITERS: i32 = libc::F_SEAL_FUTURE_WRITE;

/// Makes a file of `bytes` zeros that can neither grow nor shrink, and that no started program inherits.
pub(crate) fn create(bytes: u64) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Kernels before 6.3 do not know the flag for files that are no programs; later ones may insist on it.
    let made = open(flags | libc::MFD_NOEXEC_SEAL).or_else(|_| open(flags))?;
    let file = File::from(made);
    file.set_len(bytes)?;
    let made = OwnedFd::from(file);
    seal(made.as_fd(), SIZE)?;
    Ok(made)
}

fn open(flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string that lives.
    let number = unsafe { libc::memfd_create(c"gpu-await".as_ptr(), flags) };
    taken(number)
}

/// A descriptor of the same file that shares no state with this one. Needs `/proc`.
pub(crate) fn opened_again(file: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(File::options().read(true).write(true).open(path)?.into())
}

/// The descriptor that a call made.
fn taken(number: i32) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made by the call, and owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes over a descriptor that a driver made, and keeps started programs from inheriting it. Those that another thread started before this
/// call inherit it, unless the driver prevented that.
///
/// # Safety
/// The descriptor is open, and the caller owns it.
pub(crate) unsafe fn take_over(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the caller vouches that it is open and its own.
    let taken = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: it is open, and the call takes a number.
    let set = unsafe { libc::fcntl(taken.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(taken) }
}

/// The descriptor as the driver would give it: for [`take_over`].
pub(crate) fn into_number(file: OwnedFd) -> i32 {
    file.into_raw_fd()
}

/// Adds seals.
pub(crate) fn seal(file: BorrowedFd<'_>, seals: i32) -> io::Result<()> {
    // SAFETY: it is open, and the call takes a number.
    let added = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if added < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether it has all of these seals; an error for a file that cannot have any.
pub(crate) fn has(file: BorrowedFd<'_>, seals: i32) -> io::Result<bool> {
    // SAFETY: it is open, and the call takes no argument.
    let found = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(found & seals == seals) }
}

/// How long it is, in bytes.
pub(crate) fn len(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(File::from(file.try_clone_to_owned()?).metadata()?.len())
}

/// Makes pages read-only for this process.
///
/// # Safety
/// The range is one mapping, which is the caller's, and no reference exists through which it is written.
pub(crate) unsafe fn forbid_writes(start: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: as the caller vouches; the contents stay.
    let refused = unsafe { libc::mprotect(start.cast(), bytes, libc::PROT_READ) };
    if refused < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
