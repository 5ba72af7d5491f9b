//! What is wrong with a kernel image, and with the declaration of a kernel in it.
#![forbid(unsafe_code)]

use super::DriverCode;

/// Why a kernel image did not load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum ImageProblem {
    /// The driver refused it.
    #[error("{0}")]
    Driver(DriverCode),
    /// A part of a binary ends behind its bytes: it was cut off, or a size in it is wrong. The driver did
    /// not see it.
    #[error(
        "its {part} is at bytes {start}..{end} of {len}: it is truncated, or was not written by a CUDA \
         compiler; load the whole file"
    )]
    Truncated { part: &'static str, start: u64, end: u64, len: u64 },
    /// A field of a binary has a value that no CUDA compiler writes. The driver did not see it.
    #[error("its {field} is {found}, expected {expected}: no CUDA compiler wrote it")]
    Field { field: &'static str, found: u64, expected: u64 },
    /// A binary begins like neither a cubin nor a fatbin. The driver did not see it.
    #[error(
        "it begins with {first:02x?}, as neither a cubin nor a fatbin does; PTX is `Image::ptx`"
    )]
    UnknownForm { first: [u8; 4] },
    /// A byte that cannot be there in PTX. The driver did not see it.
    #[error(
        "byte {at} is {byte:#04x}, which PTX does not contain; a cubin or fatbin is `Image::binary`"
    )]
    NotText { at: usize, byte: u8 },
}
