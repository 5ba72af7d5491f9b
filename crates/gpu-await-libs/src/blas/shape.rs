//! The shape of matrix products, and their epilogue.
#![forbid(unsafe_code)]

use std::fmt;

use gpu_await::{ErrorDetail, Result};

use super::element::Kind;

/// The last step for each element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// Negative elements become 0.
    Relu,
    /// The Gaussian error linear unit, by its approximation with `tanh`.
    Gelu,
}

/// The alignment of addresses that vector loads need: algorithms are chosen for it.
pub(super) const ALIGNMENT: u64 = 16;

/// The workspace that cuBLAS's manual recommends for a Hopper GPU.
const WORKSPACE_BYTES: usize = 32 << 20;

/// What is computed, and how; also the key of known plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
    pub(super) kind: Kind,
    pub(super) out: Kind,
    pub(super) transposed_a: bool,
    pub(super) transposed_b: bool,
    /// For `a`, `b` and `c`, where they have gaps.
    pub(super) strides: [Option<Strides>; 3],
    pub(super) bias: bool,
    pub(super) activation: Activation,
    pub(super) tf32: bool,
    pub(super) workspace_bytes: usize,
}

/// How many elements lie between the beginnings of rows, and of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Strides {
    pub(super) row: usize,
    pub(super) matrix: usize,
}

/// Where the elements of an operand are: `count` matrices of `rows` x `columns`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) strides: Strides,
    count: usize,
    /// Whether there may be elements between and after those of the matrices.
    has_gaps: bool,
}

impl Shape {
    pub(super) fn new(m: usize, n: usize, k: usize, kind: Kind) -> Self {
        Shape {
            m,
            n,
            k,
            batch: 1,
            kind,
            out: kind,
            transposed_a: false,
            transposed_b: false,
            strides: [None; 3],
            bias: false,
            activation: Activation::None,
            tf32: false,
            workspace_bytes: WORKSPACE_BYTES,
        }
    }

    /// `a` as it is stored.
    pub(super) fn a(&self) -> Matrices {
        let (rows, columns) = if self.transposed_a { (self.k, self.m) } else { (self.m, self.k) };
        self.matrices(rows, columns, self.strides[0])
    }

    /// `b` as it is stored.
    pub(super) fn b(&self) -> Matrices {
        let (rows, columns) = if self.transposed_b { (self.n, self.k) } else { (self.k, self.n) };
        self.matrices(rows, columns, self.strides[1])
    }

    pub(super) fn c(&self) -> Matrices {
        self.matrices(self.m, self.n, self.strides[2])
    }

    fn matrices(&self, rows: usize, columns: usize, strides: Option<Strides>) -> Matrices {
        let packed = Strides { row: columns, matrix: rows.saturating_mul(columns) };
        let (mut strides, has_gaps) = (strides.unwrap_or(packed), strides.is_some());
        // A single matrix has no distance to a next one.
        if self.batch == 1 {
            strides.matrix = 0;
        }
        if rows == 1 {
            strides.row = strides.row.min(columns);
        }
        Matrices { rows, columns, strides, count: self.batch, has_gaps }
    }

    /// Whether `c` has no elements.
    pub(super) fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.batch == 0
    }

    /// Whether products write every one of `len` elements of `c`: the counts are compared, because none is written twice.
    pub(super) fn fills(&self, len: usize) -> bool {
        let written = if self.is_empty() { 0 } else { self.m * self.n * self.batch };
        written == len
    }

    /// The shape to ask the library for: empty sums become those of one product of zeros, with `max(m, n)` zeros in place of `a` and of `b`.
    pub(super) fn without_empty_sums(&self) -> Shape {
        if self.k > 0 {
            return *self;
        }
        let zeros = |row| Some(Strides { row, matrix: 0 });
        let strides = [zeros(1), zeros(self.n), self.strides[2]];
        Shape { k: 1, transposed_a: false, transposed_b: false, strides, ..*self }
    }

    /// Refuses matrices that fit no address space, rows that overlap, and products that would overwrite one another.
    pub(super) fn check(&self) -> Result<()> {
        for matrices in [self.a(), self.b(), self.c()] {
            let Matrices { rows, columns, strides, .. } = matrices;
            if strides.row < columns {
                let (op, width, pitch) = ("gemm", columns, strides.row);
                return Err(ErrorDetail::Pitch { op, width, pitch }.into());
            }
            if matrices.checked_len().and_then(|len| len.checked_mul(8)).is_none() {
                // The size of all matrices including gaps, or a lower bound of it.
                let behind = |count: usize, stride| count.saturating_sub(1).saturating_mul(stride);
                let last = behind(matrices.count, strides.matrix)
                    .saturating_add(behind(rows, strides.row));
                let (len, element_bytes) = (last.saturating_add(columns), 8);
                return Err(ErrorDetail::TooLarge { len, element_bytes }.into());
            }
        }
        self.c().check_apart()
    }
}

impl Matrices {
    pub(super) fn index(&self, matrix: usize, row: usize, column: usize) -> usize {
        matrix * self.strides.matrix + row * self.strides.row + column
    }

    /// From the first element to the last; `None` if that fits no address space.
    fn checked_len(&self) -> Option<usize> {
        if self.rows == 0 || self.columns == 0 || self.count == 0 {
            return Some(0);
        }
        let rows = (self.rows - 1).checked_mul(self.strides.row)?;
        let matrices = (self.count - 1).checked_mul(self.strides.matrix)?;
        matrices.checked_add(rows)?.checked_add(self.columns)
    }

    /// Refuses an argument of another length.
    pub(super) fn check_len(&self, what: &'static str, found: usize) -> Result<()> {
        let expected = self.checked_len().unwrap_or(usize::MAX);
        if found == expected || (found > expected && self.has_gaps) {
            return Ok(());
        }
        Err(ErrorDetail::WrongLength { op: "gemm", what, expected, found }.into())
    }

    /// Refuses matrices that may share elements: each must follow the one before, or all interleave within one row stride. A few others share
    /// none: 3 x 3 with strides 7 and 10.
    fn check_apart(&self) -> Result<()> {
        let Matrices { rows, columns, strides: Strides { row, matrix }, count, .. } = *self;
        if rows == 0 || columns == 0 || count <= 1 {
            return Ok(());
        }
        let len = (rows - 1) * row + columns;
        let is_interleaved =
            matrix >= columns && (rows == 1 || (count - 1) * matrix + columns <= row);
        if matrix >= len || is_interleaved {
            return Ok(());
        }
        let what =
            "elements from one matrix of `c` to the next, which neither follow nor interleave";
        Err(ErrorDetail::TooFew { what, found: matrix as u64, least: len as u64 }.into())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { m, n, k, batch, .. } = self;
        write!(f, "{m} x {k} times {k} x {n}, {batch} of them")
    }
}
