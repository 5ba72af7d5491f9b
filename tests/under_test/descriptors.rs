//! Descriptors between two processes, and files without a name.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use gpu_await::{Device, DeviceBuffer, Frozen, SharedDescriptors};

const SPACE: usize = 64;

/// Sends both with one message.
pub(crate) fn send(to: &UnixStream, descriptors: &SharedDescriptors) {
    let numbers = [descriptors.memory.as_raw_fd(), descriptors.header.as_raw_fd()];
    with_message(|message, control| {
        // SAFETY: all fields of the message point into what lives until it was sent, and the control buffer has room for the header.
        let head = unsafe { libc::CMSG_FIRSTHDR(message) };
        // SAFETY: as above.
        let head = unsafe { &mut *head };
        head.cmsg_level = libc::SOL_SOCKET;
        head.cmsg_type = libc::SCM_RIGHTS;
        // SAFETY: computes a size.
        head.cmsg_len = unsafe { libc::CMSG_LEN(size_of_val(&numbers) as u32) } as usize;
        // SAFETY: as above.
        let data = unsafe { libc::CMSG_DATA(head) };
        assert!((data as usize) < control + SPACE);
        // SAFETY: the buffer has room for two numbers behind the header.
        unsafe { data.cast::<[RawFd; 2]>().write_unaligned(numbers) };
        // SAFETY: the message and all that it points to live.
        assert_eq!(unsafe { libc::sendmsg(to.as_raw_fd(), message, 0) }, 1);
    });
}

/// Receives what [`send`] sent.
pub(crate) fn receive(from: &UnixStream) -> SharedDescriptors {
    with_message(|message, _| {
        // SAFETY: the message and all that it points to live, and are writable.
        let got = unsafe { libc::recvmsg(from.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC) };
        assert_eq!(got, 1, "a message");
        // SAFETY: filled by the call.
        let head = unsafe { libc::CMSG_FIRSTHDR(message) };
        // SAFETY: as above.
        let head = unsafe { head.as_ref() }.expect("descriptors");
        assert_eq!(head.cmsg_type, libc::SCM_RIGHTS);
        // SAFETY: behind that header.
        let data = unsafe { libc::CMSG_DATA(head) };
        // SAFETY: the sender sends two.
        let numbers: [RawFd; 2] = unsafe { data.cast::<[RawFd; 2]>().read_unaligned() };
        // SAFETY: new ones, which nobody else has.
        let [memory, header] = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) });
        SharedDescriptors { memory, header }
    })
}

/// A message of one byte, with room for descriptors, and where that room is.
fn with_message<R>(f: impl FnOnce(&mut libc::msghdr, usize) -> R) -> R {
    let (mut byte, mut control) = ([0_u8; 1], [0_u64; SPACE / 8]);
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: computes a size.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(8) } as usize;
    f(&mut message, control.as_ptr() as usize)
}

/// Starts a process whose standard input is a socket, and returns the other end.
pub(crate) fn start_with_socket(mut command: Command) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a socket");
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    (command.spawn().expect("a child process"), ours)
}

/// The socket in such a process.
pub(crate) fn socket() -> UnixStream {
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    UnixStream::from(input.expect("standard input"))
}

/// Memory that says it may be written, at an address of memory that may not.
pub(crate) fn astray(memory: &Frozen<u32>, device: &Device) -> DeviceBuffer<u32> {
    let (address, len) = (memory.device_ptr(), memory.len());
    // SAFETY: not sound: this is the mistake that a test makes. What is written there is refused by the system or the device, and the
    // process ends.
    unsafe { device.adopt_memory(address, len, memory.clone()) }.expect("device memory")
}

/// A file without a name, with these bytes and seals.
pub(crate) fn memfd(bytes: &[u8], seals: i32) -> OwnedFd {
    // SAFETY: the name is a C string that lives.
    let number = unsafe {
        libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    };
    assert!(number >= 0);
    // SAFETY: new, and nobody else has it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(number) });
    file.write_all_at(bytes, 0).expect("room");
    // SAFETY: it is open.
    assert_eq!(unsafe { libc::fcntl(number, libc::F_ADD_SEALS, seals) }, 0);
    file.into()
}

/// What a file has in it.
pub(crate) fn bytes_of(file: BorrowedFd<'_>) -> Vec<u8> {
    let file = File::from(file.try_clone_to_owned().expect("a descriptor"));
    let mut bytes = vec![0; file.metadata().expect("a length").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("its bytes");
    bytes
}
