//! 2-D ranges of device memory, and kernels on them.
#![forbid(unsafe_code)]

use gpu_await::testing::{self, Gate};
use gpu_await::{Device, ErrorDetail, Grid, LaunchConfig, Result, Slice2, SliceMut2, kernel};

kernel! {
    /// `y[j][i] = x[i][j] + add`.
    unsafe fn transpose(
        add: u32,
        x: &[[u32]],
        y: Out<[[u32]]>,
        rows: u32 = x.rows(),
        columns: u32 = x.columns(),
        x_pitch: u32 = x.pitch(),
        y_pitch: u32 = y.pitch()
    ) where x.rows() == y.columns(), x.columns() == y.rows(), x.rows().max(x.columns()) < 1 << 16;
    launch = LaunchConfig::for_elements(x.rows() * x.columns());
    cuda = r#"extern "C" __global__ void transpose(
        unsigned add, const unsigned* x, unsigned* y,
        unsigned rows, unsigned columns, unsigned x_pitch, unsigned y_pitch
    ) {
        unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
        if (n >= rows * columns) return;
        unsigned i = n / columns, j = n % columns;
        y[(size_t)j * y_pitch + i] = x[(size_t)i * x_pitch + j] + add;
    }"#;
    host = transpose_twin;
}

#[expect(clippy::too_many_arguments, reason = "as many as the kernel has")]
fn transpose_twin(
    _: &Grid,
    add: u32,
    x: Slice2<'_, u32>,
    mut y: SliceMut2<'_, u32>,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
) {
    for (i, row) in x.iter().enumerate() {
        for (j, x) in row.iter().enumerate() {
            y[(j, i)] = x + add;
        }
    }
}

kernel! {
    /// Exchanges what has one shape.
    unsafe fn swap(
        a: &mut [[u32]],
        b: &mut [[u32]],
        columns: u32 = a.columns(),
        a_pitch: u32 = a.pitch(),
        b_pitch: u32 = b.pitch(),
        n: u32 = a.rows() * a.columns()
    ) where (a.rows(), a.columns()) == (b.rows(), b.columns()), a.rows() * a.columns() < 1 << 16;
    launch = LaunchConfig::for_elements(n);
    cuda = r#"extern "C" __global__ void swap(
        unsigned* a, unsigned* b, unsigned columns, unsigned a_pitch, unsigned b_pitch, unsigned n
    ) {
        unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
        if (at >= n) return;
        unsigned i = at / columns, j = at % columns;
        unsigned* x = a + (size_t)i * a_pitch + j;
        unsigned* y = b + (size_t)i * b_pitch + j;
        unsigned t = *x; *x = *y; *y = t;
    }"#;
    host = swap_twin;
}

fn swap_twin(
    _: &Grid,
    mut a: SliceMut2<'_, u32>,
    mut b: SliceMut2<'_, u32>,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
) {
    assert_eq!(a.iter().len(), b.iter().len());
    a.iter_mut().zip(b.iter_mut()).for_each(|(a, b)| a.swap_with_slice(b));
}

/// The device, and a kernel of it, or none where there is no compiler.
fn with<K>(load: impl FnOnce(&Device) -> Result<K>) -> Result<Option<(Device, K)>> {
    let device = testing::device();
    match load(&device) {
        Err(error) if matches!(error.detail(), ErrorDetail::NoCompiler { .. }) => {
            eprintln!("nothing to test without NVRTC: {error}");
            Ok(None)
        }
        loaded => Ok(Some((device, loaded?))),
    }
}

#[test]
fn a_part_of_rows_is_what_a_slice_of_slices_is() -> Result<()> {
    let stream = testing::device().stream()?;
    let host: Vec<u32> = (0..60).collect();
    let x = stream.upload(host.clone()).queued()?;
    let all = x.rows_of(10)?;
    assert_eq!((all.rows(), all.columns(), all.pitch()), (6, 10, 10));
    let part = all.slice(1..5, 2..=8)?.slice(1.., 1..3)?;
    assert_eq!((part.rows(), part.columns(), part.pitch()), (3, 2, 10));
    assert_eq!(part.device_ptr(), x.device_ptr() + 4 * 23);
    for row in 0..3 {
        let start = 23 + 10 * row;
        assert_eq!(*stream.download(&part.row(row)?).synchronize()?, host[start..start + 2]);
    }
    // Views, parts of buffers and frozen ones have rows as well.
    assert_eq!(x.slice(7..)?.rows_of(53)?.device_ptr(), x.device_ptr() + 28);
    let mut x = x;
    let rest = x.split_off(20)?;
    assert_eq!(rest.rows_of(4)?.rows(), 10);
    let frozen = rest.freeze().synchronize()?;
    assert_eq!(frozen.rows_of(4)?.slice(1.., ..)?.device_ptr(), frozen.device_ptr() + 16);
    Ok(())
}

#[test]
fn rows_that_are_not_there_are_refused() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut x = stream.zeros::<u8>(12).queued()?;
    for columns in [0, 5, 7, 13, usize::MAX] {
        let error = x.rows_of(columns).unwrap_err();
        let ragged =
            matches!(error.detail(), ErrorDetail::Ragged { len: 12, columns: c } if *c == columns);
        assert!(ragged, "{error}");
    }
    let rows = x.rows_of(4)?;
    let outside = [
        rows.slice(..4, ..).unwrap_err(),
        rows.slice(.., ..5).unwrap_err(),
        rows.slice(.., 5..).unwrap_err(),
        rows.slice(..=usize::MAX, ..).unwrap_err(),
        rows.row(3).unwrap_err(),
        rows.row(usize::MAX).unwrap_err(),
        x.rows_of_mut(4)?.split_rows_at_mut(4).unwrap_err(),
        x.rows_of_mut(4)?.split_columns_at_mut(5).unwrap_err(),
    ];
    for error in outside {
        assert!(matches!(error.detail(), ErrorDetail::OutOfBounds { .. }), "{error}");
    }
    // What has no elements has rows and columns all the same.
    let none = x.rows_of(4)?.slice(3.., 4..)?;
    assert_eq!((none.rows(), none.columns()), (0, 0));
    let empty = stream.zeros::<u8>(0).queued()?;
    assert_eq!(empty.rows_of(3)?.rows(), 0);
    Ok(())
}

#[test]
fn a_kernel_on_a_corner() -> Result<()> {
    let Some((device, transpose)) = with(transpose::load_blocking)? else { return Ok(()) };
    let stream = device.stream()?;
    let x = stream.upload((0..40u32).collect::<Vec<_>>()).queued()?;
    let mut y = stream.zeros::<u32>(24).queued()?;
    let corner = x.rows_of(8)?.slice(2..4, 5..)?;
    let mut rows = y.rows_of_mut(6)?;
    let mut target = rows.slice_mut(1.., 3..5)?;
    transpose.launch(&stream, 100, &corner, &mut target).queued()?;
    let expected = [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 121, 129, 0],
        [0, 0, 0, 122, 130, 0],
        [0, 0, 0, 123, 131, 0],
    ];
    assert_eq!(*stream.download(&y).synchronize()?, *expected.as_flattened());
    // Of another shape.
    let error = transpose.launch(&stream, 0, &corner, &mut y.rows_of_mut(6)?).queued().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("x.rows() == y.columns()") && text.contains("y.pitch() = 6"), "{text}");
    // Without elements there is nothing to launch.
    let none = x.rows_of(8)?.slice(..0, ..)?;
    let mut y = stream.zeros::<u32>(8).queued()?;
    let mut rows = y.rows_of_mut(1)?;
    let mut no_columns = rows.slice_mut(.., ..0)?;
    transpose.launch(&stream, 0, &none, &mut no_columns).queued()?;
    stream.synchronize()
}

#[test]
fn columns_beside_each_other_are_two_arguments() -> Result<()> {
    let Some((device, swap)) = with(swap::load_blocking)? else { return Ok(()) };
    let stream = device.stream()?;
    let mut x = stream.upload((0..8u32).collect::<Vec<_>>()).queued()?;
    let (mut left, mut right) = x.rows_of_mut(4)?.split_columns_at_mut(2)?;
    swap.launch(&stream, &mut left, &mut right).queued()?;
    assert_eq!(*stream.download(&x).synchronize()?, [2, 3, 0, 1, 6, 7, 4, 5]);
    let (mut above, mut below) = x.rows_of_mut(4)?.split_rows_at_mut(1)?;
    swap.launch(&stream, &mut above, &mut below).queued()?;
    assert_eq!(*stream.download(&x).synchronize()?, [6, 7, 4, 5, 2, 3, 0, 1]);
    Ok(())
}

/// Rows above each other run at once; columns beside each other in the order of the calls.
#[test]
fn rows_are_ordered_by_what_they_span() -> Result<()> {
    let Some((device, transpose)) = with(transpose::load_blocking)? else { return Ok(()) };
    let (a, b) = (device.stream()?, device.stream()?);
    let ones = a.full(4, 1u32).queued()?;
    let ones = ones.rows_of(2)?;
    let mut x = a.zeros::<u32>(16).synchronize()?;

    let gate = Gate::close(&a)?;
    let (mut above, mut below) = x.rows_of_mut(4)?.split_rows_at_mut(2)?;
    let late = transpose.launch(&a, 0, &ones, &mut above.slice_mut(.., ..2)?);
    transpose.launch(&b, 1, &ones, &mut below.slice_mut(.., 2..)?).synchronize()?;
    assert!(!late.is_complete());
    let (mut left, mut right) = x.rows_of_mut(4)?.split_columns_at_mut(2)?;
    let second = transpose.launch(&a, 2, &ones, &mut left.slice_mut(..2, ..)?);
    let behind = transpose.launch(&b, 3, &ones, &mut right.slice_mut(..2, ..)?);
    let read = b.download(&left.view().row(1)?);
    gate.open();
    assert_eq!(*read.synchronize()?, [3, 3]);
    assert!(late.is_complete() && second.is_complete());
    behind.synchronize()?;
    assert!(!gate.timed_out());
    let expected = [[3, 3, 4, 4], [3, 3, 4, 4], [0, 0, 2, 2], [0, 0, 2, 2]];
    assert_eq!(*a.download(&x).synchronize()?, *expected.as_flattened());
    Ok(())
}

#[test]
fn gaps_stay_unwritten() -> Result<()> {
    let Some((device, transpose)) = with(transpose::load_blocking)? else { return Ok(()) };
    let stream = device.stream()?;
    let ones = stream.full(4, 1u32).queued()?;
    let ones = ones.rows_of(2)?;
    let mut x = stream.empty::<u32>(8).queued()?;
    let (mut left, _) = x.rows_of_mut(4)?.split_columns_at_mut(2)?;
    let error = transpose.launch(&stream, 0, &ones, &mut left).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    // Dense rows are overwritten as a whole.
    let mut x = stream.empty::<u32>(8).queued()?;
    let (mut above, _) = x.rows_of_mut(2)?.split_rows_at_mut(2)?;
    transpose.launch(&stream, 6, &ones, &mut above).queued()?;
    assert_eq!(*stream.download(&x.slice(..4)?).synchronize()?, [7; 4]);
    let error = stream.download(&x).synchronize().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { start: 16, end: 32, .. }), "{error}");
    // Four elements are written: the first column's third one is none of them.
    let column = x.rows_of(2)?.slice(..3, ..1)?;
    let mut y = stream.empty::<u32>(3).queued()?;
    let error = transpose.launch(&stream, 0, &column, &mut y.rows_of_mut(3)?).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { start: 16, end: 20, .. }), "{error}");
    Ok(())
}

/// A range that is wrong is told in what it counts.
#[tokio::test]
async fn what_is_out_of_bounds() -> Result<()> {
    let device = testing::device();
    let x = device.zeros::<f32>(6).queued()?;
    let told = |wrong: Result<()>| wrong.unwrap_err().to_string();
    let rows = x.rows_of(2)?;
    assert_eq!(
        told(rows.slice(1..9, ..).map(drop)),
        "range 1..9 is out of bounds: there are 3 rows"
    );
    assert_eq!(
        told(rows.slice(.., 1..9).map(drop)),
        "range 1..9 is out of bounds: there are 2 columns"
    );
    assert_eq!(told(x.slice(1..9).map(drop)), "range 1..9 is out of bounds: there are 6 elements");
    Ok(())
}
