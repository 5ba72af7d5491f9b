//! [`NumberKind`]: the number types of algorithms, by name.
#![forbid(unsafe_code)]

/// Which number type it is.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumberKind {
    U8,
    U16,
    U32,
    U64,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl NumberKind {
    /// The size in bytes.
    pub(crate) const fn bytes(self) -> u32 {
        match self {
            NumberKind::U8 | NumberKind::I8 => 1,
            NumberKind::U16 | NumberKind::I16 | NumberKind::F16 | NumberKind::Bf16 => 2,
            NumberKind::U32 | NumberKind::I32 | NumberKind::F32 => 4,
            NumberKind::U64 | NumberKind::I64 | NumberKind::F64 => 8,
        }
    }

    pub(crate) const fn is_float(self) -> bool {
        matches!(self, NumberKind::F16 | NumberKind::Bf16 | NumberKind::F32 | NumberKind::F64)
    }

    pub(crate) const fn is_half(self) -> bool {
        matches!(self, NumberKind::F16 | NumberKind::Bf16)
    }

    pub(crate) const fn is_signed(self) -> bool {
        !matches!(self, NumberKind::U8 | NumberKind::U16 | NumberKind::U32 | NumberKind::U64)
    }

    pub(crate) const fn is_integer(self) -> bool {
        !self.is_float()
    }

    /// Whether an integer type holds the value.
    pub(crate) fn holds(self, value: i128) -> bool {
        let bits = 8 * self.bytes();
        match self.is_signed() {
            true => (-(1_i128 << (bits - 1))..1 << (bits - 1)).contains(&value),
            false => (0..1_i128 << bits).contains(&value),
        }
    }
}
