//! The kernels of rows as text, as they are packed: the interpreter runs whole blocks of them beside the model.
//!
//! A module of `src/rows.rs`, so that these are tests of `--lib`.
#![forbid(unsafe_code)]

#[path = "row_model.rs"]
mod model;

use bytemuck::{NoUninit, Pod};
use half::{bf16, f16};

use super::Scalar;
use crate::images::{PackedImage, Tuned};
use crate::interpreter::{FakeMemory, KernelText};

const EPSILON: f32 = 1e-5;

/// A type of elements as the tests need it.
trait Stored: Scalar<Total = f32> + Pod {
    fn of(value: f32) -> Self;
    /// How far one that was computed and rounded may be off, relative to 1.
    const SLACK: f64;
}

macro_rules! stored {
    ($($type:ident $of:expr, $slack:literal;)+) => {$(
        impl Stored for $type {
            fn of(value: f32) -> Self { $of(value) }
            const SLACK: f64 = $slack;
        }
    )+};
}
stored! {
    f16 f16::from_f32, 1e-3;
    bf16 bf16::from_f32, 8e-3;
    f32 |value| value, 1e-5;
}

/// Rows, and where the kernels find them.
struct Matrix<T> {
    elements: Vec<T>,
    columns: usize,
    /// The number of the first row: those before are not there.
    first: u64,
    /// Bytes behind a multiple of 256.
    offset: u64,
}

impl<T: Stored> Matrix<T> {
    fn new(kinds: &[usize], columns: usize) -> Self {
        let rows = kinds.iter().flat_map(|kind| model::row(*kind, columns, *kind as u64 + 77));
        let elements = rows.map(T::of).collect();
        Matrix { elements, columns, first: 0, offset: 0 }
    }

    fn rows(&self) -> impl Iterator<Item = Vec<f64>> {
        let wide = |row: &[T]| row.iter().map(|x| f64::from(x.total())).collect();
        self.elements.chunks(self.columns).map(wide)
    }
}

/// What a kernel for blocks, or for warps, leaves, run by `grid.1` blocks from `grid.0` on.
fn launched<T: Stored, R: Pod>(
    (kernel, team): (&str, &str),
    matrix: &Matrix<T>,
    more: &[&[T]],
    outs: usize,
    (first, blocks, of): (u64, u64, u64),
) -> Vec<R> {
    let image = PackedImage::find(&format!("rows_{}", T::NAME)).expect("it is in the manifest");
    let code = image.code(Tuned::General);
    let text = String::from_utf8(code.unpack().expect("it is whole")).expect("it is text");
    let kernel = KernelText::entry(&text, &format!("{kernel}_{team}"));
    let threads = u64::from(code.fact(&format!("{team}_threads")).expect("a fact"));
    let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
    let mut memory = FakeMemory::default();
    // Addresses as if all rows were there.
    let missing = |size: usize| matrix.first * (size as u64);
    let row_bytes = matrix.columns * size_of::<T>();
    let x = memory.add(bytes(&matrix.elements), matrix.offset).wrapping_sub(missing(row_bytes));
    let rows = matrix.first + (matrix.elements.len() / matrix.columns) as u64;
    let mut params = vec![x, rows, matrix.columns as u64];
    params.extend(more.iter().map(|values| memory.add(bytes(values), matrix.offset)));
    params.extend((!more.is_empty()).then_some(u64::from(EPSILON.to_bits())));
    let written = memory.arrays.len();
    let out_bytes = outs * size_of::<R>();
    let of_row = out_bytes / (matrix.elements.len() / matrix.columns);
    let offset = if outs == matrix.elements.len() { matrix.offset } else { 0 };
    params.push(memory.add(vec![0xA5; out_bytes], offset).wrapping_sub(missing(of_row)));
    for block in first..first + blocks {
        kernel.run_block(&mut memory, &params, (block, of), threads);
    }
    let times = &memory.written[written];
    assert!(times.iter().all(|times| *times == 1), "each is written once");
    bytemuck::cast_slice::<u8, R>(&memory.arrays[written]).to_vec()
}

fn wide<T: Stored>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.total())).collect()
}

fn assert_close<T: NoUninit>(
    (what, row): (&str, usize),
    found: impl Iterator<Item = f64>,
    wanted: &[f64],
    slack: f64,
) {
    for (column, (found, wanted)) in found.zip(wanted).enumerate() {
        assert!(
            model::is_close(found, *wanted, slack * (1.0 + wanted.abs())),
            "{what} of {}: {found} in row {row}, column {column}, not {wanted}",
            std::any::type_name::<T>()
        );
    }
}

/// All verbs, by one kind of team.
fn check<T: Stored>(team: &str, matrix: &Matrix<T>, grid: (u64, u64, u64)) {
    let columns = matrix.columns;
    let (len, rows) = (matrix.elements.len(), matrix.elements.len() / columns);
    let what = format!("{columns} columns by {team}");
    let sums: Vec<f32> = launched(("sum", team), matrix, &[], rows, grid);
    let places: Vec<u64> = launched(("arg_max", team), matrix, &[], rows, grid);
    let softmax: Vec<T> = launched(("softmax", team), matrix, &[], len, grid);
    let gamma: Vec<T> = model::row(0, columns, 5).into_iter().map(T::of).collect();
    let beta: Vec<T> = model::row(0, columns, 6).into_iter().map(T::of).collect();
    let normal: Vec<T> = launched(("layer_norm", team), matrix, &[&gamma, &beta], len, grid);
    let (gamma, beta) = (wide(&gamma), wide(&beta));
    for (row, x) in matrix.rows().enumerate() {
        let slack = 1e-6 * (1.0 + model::sizes(&x));
        assert_close::<T>(
            (&what, row),
            std::iter::once(f64::from(sums[row])),
            &[model::sum(&x)],
            slack,
        );
        assert_eq!(places[row], model::arg_max(&x), "{what}, row {row}");
        let of_row = |all: &[T]| wide(&all[row * columns..][..columns]);
        let wanted = model::softmax(&x);
        assert_close::<T>((&what, row), of_row(&softmax).into_iter(), &wanted, T::SLACK);
        let wanted = model::layer_norm(&x, &gamma, &beta, f64::from(EPSILON));
        assert_close::<T>((&what, row), of_row(&normal).into_iter(), &wanted, 4.0 * T::SLACK);
    }
}

/// All kinds of rows, aligned and not, by more rows than the grid has teams.
fn check_type<T: Stored>() {
    let odd = size_of::<T>() as u64;
    // Two blocks of eight warps, for nineteen rows.
    let kinds: Vec<usize> = (0..model::KINDS).cycle().take(19).collect();
    for columns in [1, 33, 264] {
        check("warps", &Matrix::<T>::new(&kinds, columns), (0, 2, 2));
    }
    check("warps", &Matrix::<T> { offset: odd, ..Matrix::new(&kinds[..9], 64) }, (0, 2, 2));
    // Two blocks, for three rows and more.
    check("blocks", &Matrix::<T>::new(&[4, 7, 8, 9, 11], 520), (0, 2, 2));
    check("blocks", &Matrix::<T> { offset: odd, ..Matrix::new(&[0, 10, 12], 520) }, (0, 2, 2));
    check("blocks", &Matrix::<T>::new(&[5], 4_104), (0, 1, 1));
}

#[test]
fn texts_are_as_the_model_f32() {
    check_type::<f32>();
}

#[test]
fn texts_are_as_the_model_f16() {
    check_type::<f16>();
}

#[test]
fn texts_are_as_the_model_bf16() {
    check_type::<bf16>();
}

/// The last rows of a matrix of 2^43 elements, by the last blocks of a grid.
#[test]
fn rows_beyond_32_bits() {
    let first = (1 << 33) - 8;
    let kinds = [0, 4, 8, 9, 1, 2, 13, 3];
    let matrix = Matrix::<f16> { first, ..Matrix::new(&kinds, 1_000) };
    check("warps", &matrix, (first / 8, 1, (1 << 30) + 5));
    let matrix = Matrix::<f32> { first: (1 << 31) - 3, ..Matrix::new(&kinds[..2], 1_100) };
    check("blocks", &matrix, ((1 << 31) - 3, 2, (1 << 31) - 1));
}

/// No columns: there is nothing to read, and a result for each row.
#[test]
fn no_columns() {
    let mut memory = FakeMemory::default();
    let image = PackedImage::find("rows_f32").expect("it is in the manifest");
    let text = image.code(Tuned::General).unpack().expect("it is whole");
    let text = String::from_utf8(text).expect("it is text");
    let (nothing, sums) = (memory.add(Vec::new(), 0), memory.add(vec![0xA5; 12], 0));
    let places = memory.add(vec![0xA5; 24], 0);
    for (team, threads, blocks) in [("warps", 256, 1), ("blocks", 512, 3)] {
        for (kernel, out) in [("sum", sums), ("arg_max", places)] {
            let kernel = KernelText::entry(&text, &format!("{kernel}_{team}"));
            for block in 0..blocks {
                kernel.run_block(&mut memory, &[nothing, 3, 0, out], (block, blocks), threads);
            }
        }
        assert_eq!(memory.arrays[1], [0; 12]);
        assert_eq!(memory.arrays[2], [0xFF; 24]);
    }
}
