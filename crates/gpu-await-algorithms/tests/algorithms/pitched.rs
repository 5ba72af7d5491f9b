//! Formulas over rows with pitches beside plain Rust: where vectors fit and where not, and what is between the rows.

use gpu_await::testing;
use gpu_await::{ErrorDetail, In2, InOut2, Region, Result, Stream};
use gpu_await_algorithms::{Algorithms, Arithmetic, Preload, transform};
use half::f16;

/// Part of a matrix: the pitch of its rows, and where it begins.
#[derive(Clone, Copy, Debug)]
struct Part(usize, (usize, usize));

impl Part {
    /// Where an element of the part is in the whole.
    fn at(self, row: usize, column: usize) -> usize {
        let Part(pitch, (first_row, first_column)) = self;
        (first_row + row) * pitch + first_column + column
    }
}

/// A formula of two arrays, in place too, and a comparison, for so many rows and columns. Its numbers are small: exact in each type.
async fn check<T: Arithmetic + From<u8>>(
    stream: &Stream,
    (rows, columns): (usize, usize),
    parts: [Part; 3],
) -> Result<()> {
    let [px, py, pout] = parts;
    let len = |part: Part| (part.1.0 + rows + 1) * part.0;
    let numbers = |part: Part| (0..len(part)).map(|at| (at % 13) as u8).collect::<Vec<_>>();
    let of = |numbers: &[u8]| numbers.iter().map(|n| T::from(*n)).collect::<Vec<T>>();
    let (hx, hy) = (numbers(px), numbers(py));
    let (x, mut y) = (stream.upload(of(&hx)).queued()?, stream.upload(of(&hy)).queued()?);
    let mut out = stream.zeros::<T>(len(pout)).queued()?;
    let mut flags = stream.full(len(pout), 7u8).queued()?;
    let range = |Part(_, (row, column))| (row..row + rows, column..column + columns);
    let [of_x, of_y, of_out] = parts.map(range);
    let (vx, axpy) = (x.rows_of(px.0)?.slice(of_x.0, of_x.1)?, transform!(|a, x, y| a * x + y));
    let vy = y.rows_of(py.0)?.slice(of_y.0.clone(), of_y.1.clone())?;
    let mut whole = out.rows_of_mut(pout.0)?;
    let written = whole.slice_mut(of_out.0.clone(), of_out.1.clone())?;
    stream.transform(axpy, (T::from(2), vx, vy), written).queued()?;
    let mut whole = flags.rows_of_mut(pout.0)?;
    let written = whole.slice_mut(of_out.0, of_out.1)?;
    stream.transform_flags(transform!(|x, y| x.lt(y)), (vx, vy), written).queued()?;
    let mut whole = y.rows_of_mut(py.0)?;
    let updated = whole.slice_mut(of_y.0, of_y.1)?;
    stream.transform_in_place(axpy, (T::from(2), vx), updated).queued()?;

    let (mut sums, mut in_place) = (vec![0; len(pout)], hy.clone());
    let mut less = vec![7; len(pout)];
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let (x, y) = (hx[px.at(row, column)], hy[py.at(row, column)]);
        sums[pout.at(row, column)] = 2 * x + y;
        in_place[py.at(row, column)] = 2 * x + y;
        less[pout.at(row, column)] = u8::from(x < y);
    }
    assert!(stream.download(&out).await? == of(&sums), "{rows} of {columns}: {parts:?}");
    assert!(stream.download(&y).await? == of(&in_place), "{rows} of {columns}: {parts:?}");
    assert_eq!(stream.download(&flags).await?, less, "{rows} of {columns}: {parts:?}");
    Ok(())
}

#[tokio::test]
async fn every_shape_and_pitch() -> Result<()> {
    let stream = testing::device().stream()?;
    let corner = (0, 0);
    for (shape, parts) in [
        ((1, 1), [Part(1, corner), Part(3, (1, 2)), Part(2, (0, 1))]),
        ((5, 64), [Part(192, (0, 64)), Part(64, corner), Part(128, (3, 64))]),
        ((3, 16), [Part(16, corner), Part(16, corner), Part(16, corner)]),
        ((7, 33), [Part(40, (1, 7)), Part(33, corner), Part(64, (0, 31))]),
        // Vectors would fit each row's begin, but not its length; and its length, but not each row's begin.
        ((4, 18), [Part(32, corner), Part(32, corner), Part(32, corner)]),
        ((4, 16), [Part(17, corner), Part(32, corner), Part(32, corner)]),
        ((4, 16), [Part(32, corner), Part(32, (0, 1)), Part(32, corner)]),
        ((2, 5000), [Part(5008, (1, 8)), Part(5000, corner), Part(6000, (0, 16))]),
        ((1001, 3), [Part(5, (2, 1)), Part(3, corner), Part(4, (0, 1))]),
    ] {
        check::<u8>(&stream, shape, parts).await?;
        check::<i16>(&stream, shape, parts).await?;
        check::<f16>(&stream, shape, parts).await?;
        check::<f32>(&stream, shape, parts).await?;
        check::<f64>(&stream, shape, parts).await?;
        check::<u64>(&stream, shape, parts).await?;
    }
    Ok(())
}

/// Rows beside memory without gaps, either way: packing and unpacking.
#[tokio::test]
async fn rows_beside_arrays() -> Result<()> {
    let stream = testing::device().stream()?;
    let x = stream.upload((0..12u32).collect::<Vec<_>>()).queued()?;
    let mut packed = stream.empty::<u32>(6).queued()?;
    let columns = x.rows_of(4)?.slice(.., 1..3)?;
    stream.transform(transform!(|x| 10 * x), (columns,), &mut packed).queued()?;
    assert_eq!(stream.download(&packed).await?, [10, 20, 50, 60, 90, 100]);
    let mut whole = stream.full(9, 1u32).queued()?;
    let mut rows = whole.rows_of_mut(3)?;
    let mut left = rows.slice_mut(.., ..2)?;
    stream.transform(transform!(|x| x + 5), (&packed,), left.slice_mut(.., ..)?).queued()?;
    stream.transform_in_place(transform!(|x, y| y - x), (&packed,), left).queued()?;
    assert_eq!(stream.download(&whole).await?, [5, 5, 1, 5, 5, 1, 5, 5, 1]);
    Ok(())
}

#[tokio::test]
async fn rows_that_do_not_fit() -> Result<()> {
    let stream = testing::device().stream()?;
    let (x, y) = (stream.full(12, 1u8).queued()?, stream.full(8, 1u8).queued()?);
    let mut out = stream.full(12, 7u8).queued()?;
    let (same, sum) = (transform!(|x| x), transform!(|x, y| x + y));
    // 3 rows of 4 and 4 of 3 are as many elements.
    let error = stream.transform(same, (x.rows_of(4)?,), out.rows_of_mut(3)?).queued().unwrap_err();
    let (op, expected) = ("transform", ("a row", 4, 3));
    match *error.detail() {
        ErrorDetail::WrongLength { op: found, what, expected: length, found: other } => {
            assert_eq!((found, (what, length, other)), (op, expected));
        }
        ref other => panic!("{other:?}"),
    }
    let less = x.rows_of(4)?.slice(..2, ..)?;
    let error = stream.transform(same, (less,), out.rows_of_mut(4)?).queued().unwrap_err();
    let column = ErrorDetail::WrongLength { op, what: "a column", expected: 2, found: 3 };
    assert_eq!(format!("{:?}", error.detail()), format!("{column:?}"));
    let error = stream.download(&out).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let error = stream.transform(sum, (x.rows_of(4)?, &y), &mut out).queued().unwrap_err();
    let length = ErrorDetail::LengthMismatch { op, source_len: 8, destination_len: 12 };
    assert_eq!(format!("{:?}", error.detail()), format!("{length:?}"));
    // An array as long as it likes beside rows alone; with as many columns as none.
    let two = || x.rows_of(4)?.slice(..2, ..);
    let views =
        [(two()?, 8), (x.rows_of(4)?.slice(1..1, ..)?, 0), (x.rows_of(4)?.slice(.., 2..2)?, 0)];
    for (view, source_len) in views {
        for destination_len in [3, 4, 12, 24] {
            let mut out = stream.full(destination_len, 7u8).queued()?;
            let mut flags = stream.full(destination_len, 7u8).queued()?;
            for refused in [
                stream.transform(same, (view,), &mut out).queued().unwrap_err(),
                stream.transform_in_place(sum, (view,), &mut out).queued().unwrap_err(),
                stream
                    .transform_flags(transform!(|x| x.gt(0)), (view,), &mut flags)
                    .queued()
                    .unwrap_err(),
            ] {
                match *refused.detail() {
                    ErrorDetail::LengthMismatch { source_len: s, destination_len: d, .. } => {
                        assert_eq!((s, d), (source_len, destination_len));
                    }
                    ref other => panic!("{other:?}"),
                }
            }
        }
    }
    // Nobody wrote what is between the rows, and nobody does now.
    let mut fresh = stream.empty::<u8>(12).queued()?;
    let mut rows = fresh.rows_of_mut(4)?;
    let gaps = rows.slice_mut(.., ..3)?;
    let of_x = x.rows_of(4)?.slice(.., ..3)?;
    let error = stream.transform(same, (of_x,), gaps).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    stream.transform(same, (x.rows_of(4)?,), fresh.rows_of_mut(4)?).queued()?;
    assert_eq!(stream.download(&fresh).await?, [1; 12]);
    // Without elements there is nothing to do.
    let before = stream.submitted();
    let none = x.rows_of(4)?.slice(.., 4..)?;
    stream.transform(same, (none,), fresh.rows_of_mut(4)?.slice_mut(.., ..0)?).queued()?;
    assert_eq!(stream.submitted(), before);
    Ok(())
}

#[tokio::test]
async fn preloaded_and_replayed() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = transform!(|a, x, y| a * x + y);
    device.preload_transform::<(f32, In2<f32>, InOut2<f32>)>(axpy).await?;
    let x = stream.full(64, 2.0f32).queued()?;
    let mut y = stream.full(64, 1.0f32).queued()?;
    let mut region = Region::new();
    for round in 0..6 {
        let op = stream.replay(&mut region, |q| {
            for column in 0..4 {
                let x = x.rows_of(16)?.slice(.., 4 * column..4 * column + 4)?;
                let mut y = y.rows_of_mut(8)?;
                let y = y.slice_mut(2 * (round % 2).., ..)?;
                let half = y.split_columns_at_mut(4)?;
                q.transform_in_place(
                    axpy,
                    (1.0, x),
                    if column % 2 == 0 { half.0 } else { half.1 }.slice_mut(..4, ..)?,
                )?;
            }
            Ok(())
        });
        op.await?;
    }
    let report = region.report();
    assert!(report.replayed >= 3 && report.refused == 0, "{report:?}");
    // Two additions of 2 a round, of six or of three rounds.
    let found = stream.download(&y).await?;
    assert_eq!(
        (found[0], found[16], found[32], found[40], found[48]),
        (13.0, 25.0, 13.0, 13.0, 1.0)
    );
    Ok(())
}

/// What the compiler advises for `fill` of a `ViewMut2`.
#[tokio::test]
async fn rows_are_filled_by_a_formula() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut x = stream.zeros::<u8>(12).queued()?;
    let mut rows = x.rows_of_mut(4)?;
    let column = rows.slice_mut(.., 1..3)?;
    stream.transform(transform!(|v| v), (7u8,), column).queued()?;
    assert_eq!(stream.download(&x).await?, [0, 7, 7, 0, 0, 7, 7, 0, 0, 7, 7, 0]);
    Ok(())
}
