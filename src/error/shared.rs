//! Problems of memory that several processes share.
#![forbid(unsafe_code)]

/// Why memory of another process cannot be used, or memory cannot be shared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum SharedProblem {
    /// A descriptor refers to something else, or to memory that others can still write.
    #[error("the descriptor of its {what} cannot be used ({reason})")]
    NotShared { what: &'static str, reason: String },
    /// The header has a version that this crate does not know.
    #[error("its header is of version {found}, expected {expected}")]
    Version { expected: u32, found: u32 },
    /// It is not sealed: its maker is still filling it, or died.
    #[error(
        "it is not sealed: await the other side's `seal`, which its maker may not have lived to do"
    )]
    NotSealed,
    /// It is memory of another GPU, or of another kind of device.
    #[error("it is on {found}, expected {expected}")]
    Device { expected: String, found: String },
    /// Its elements are of another type.
    #[error("its elements are {found}, expected {expected}")]
    ElementType { expected: String, found: String },
    /// It has a different number of elements.
    #[error("it has {found} elements, expected {expected}")]
    Len { expected: u64, found: u64 },
    /// It has a different generation.
    #[error("it is of generation {found}, expected {expected}")]
    Generation { expected: u64, found: u64 },
    /// The length of the memory, in bytes, is not what its header says or its elements need.
    #[error("it is {found} bytes long, expected {expected}")]
    Size { expected: u64, found: u64 },
    /// Its contents differ from those that were sealed.
    #[error("its contents have changed: their digest is {found:#018x}, expected {expected:#018x}")]
    Digest { expected: u64, found: u64 },
    /// The operating system refused a call: too many descriptors, or no memory.
    #[error("{call}: {}", std::io::Error::from_raw_os_error(*.code))]
    System { call: &'static str, code: i32 },
}
