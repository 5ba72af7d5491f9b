//! Problems of another library's tensor.
#![forbid(unsafe_code)]

/// Why a DLPack tensor cannot be adopted, or memory cannot be exported as one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum TensorProblem {
    /// Its elements are of another type.
    #[error("its elements are {found}, expected {expected}")]
    ElementType { expected: String, found: String },
    /// It is on another device.
    #[error("it is on {found}, expected {expected}")]
    Device { expected: String, found: String },
    /// Its elements do not follow each other in row-major order (strides in elements).
    #[error("shape {shape:?} with strides {strides:?} is not contiguous: copy it first")]
    NotContiguous { shape: Vec<i64>, strides: Vec<i64> },
    /// Its structures have a version of DLPack that this crate does not know.
    #[error("it is of DLPack {major}.{minor}, the newest supported is 1.x: ask with `max_version`")]
    Version { major: u32, minor: u32 },
    /// It has elements but no address.
    #[error("its data pointer is null, and it has {len} elements")]
    NullData { len: usize },
    /// It is read-only.
    #[error("it is read-only: adopt it as frozen memory")]
    ReadOnly,
    /// An extent of the shape exceeds `i64::MAX`, the most that a tensor can have.
    #[error("axis {axis} of the shape is {extent}, and the most is {}", i64::MAX)]
    Extent { axis: usize, extent: usize },
    /// An extent is negative, or the shape does not have as many elements as the memory.
    #[error("{}", misshapen(.shape, *.len))]
    Shape { shape: Vec<i64>, len: usize },
}

fn misshapen(shape: &[i64], len: usize) -> String {
    match shape.iter().position(|extent| *extent < 0) {
        Some(axis) => format!("axis {axis} of shape {shape:?} is negative"),
        None => format!("shape {shape:?} does not have {len} elements"),
    }
}
