//! The verbs of rows beside a slow model, of every type they take: every kind of row, at the lengths where something begins or ends.

use gpu_await::{DeviceBuffer, Element, ErrorDetail, Stream, testing};
use gpu_await_algorithms::{AlgorithmFamily, Algorithms, Preload, Scalar};
use half::{bf16, f16};

#[path = "ptx/row_model.rs"]
mod model;

const EPSILON: f32 = 1e-5;

trait Stored: Scalar<Total = f32> + Element {
    fn of(value: f32) -> Self;
    fn wide(self) -> f64;
    /// How far one that was computed and rounded may be off, relative to 1.
    const SLACK: f64;
}

macro_rules! stored {
    ($($type:ident $of:expr, $wide:expr, $slack:literal;)+) => {$(
        impl Stored for $type {
            fn of(value: f32) -> Self { $of(value) }
            fn wide(self) -> f64 { $wide(self) }
            const SLACK: f64 = $slack;
        }
    )+};
}
stored! {
    f16 f16::from_f32, f16::to_f64, 1e-3;
    bf16 bf16::from_f32, bf16::to_f64, 8e-3;
    f32 |value| value, f64::from, 1e-5;
}

/// A matrix, as a model and in a buffer from `offset` on.
struct Matrix<T: Stored> {
    rows: Vec<Vec<f64>>,
    columns: usize,
    offset: usize,
    buffer: DeviceBuffer<T>,
}

/// Elements on the device, from `offset` on.
fn upload<T: Stored>(
    stream: &Stream,
    offset: usize,
    of: impl Iterator<Item = f32>,
) -> DeviceBuffer<T> {
    let elements: Vec<T> = (0..offset).map(|_| 99.0).chain(of).map(T::of).collect();
    stream.upload(elements).queued().expect("memory")
}

impl<T: Stored> Matrix<T> {
    fn new(stream: &Stream, kinds: &[usize], columns: usize, offset: usize) -> Self {
        let rows: Vec<Vec<f32>> =
            kinds.iter().map(|kind| model::row(*kind, columns, 31 + *kind as u64)).collect();
        let buffer = upload::<T>(stream, offset, rows.iter().flatten().copied());
        let rounded = |row: Vec<f32>| row.into_iter().map(|x| T::of(x).wide()).collect();
        Matrix { rows: rows.into_iter().map(rounded).collect(), columns, offset, buffer }
    }

    fn check(&self, stream: &Stream) {
        let Matrix { rows, columns, offset, buffer } = self;
        let what = format!("{} rows of {columns} from {offset} on", rows.len());
        let x = buffer.slice(*offset..).expect("it is in there");
        let mut sums = stream.empty::<f32>(rows.len()).queued().expect("memory");
        let mut places = stream.empty::<u64>(rows.len()).queued().expect("memory");
        stream.sum_rows(&x, *columns, &mut sums).queued().expect("put");
        stream.arg_max_rows(&x, *columns, &mut places).queued().expect("put");
        let sums = stream.download(&sums).synchronize().expect("data");
        let places = stream.download(&places).synchronize().expect("data");
        for (row, x) in rows.iter().enumerate() {
            let (found, wanted) = (f64::from(sums[row]), model::sum(x));
            let slack = 1e-6 * (1.0 + model::sizes(x));
            assert!(model::is_close(found, wanted, slack), "{what}, {row}: {found}, not {wanted}");
            assert_eq!(places[row], model::arg_max(x), "{what}, {row}");
        }
        if *columns == 0 {
            return;
        }
        // From an odd place on as well.
        let mut out = stream.full(buffer.len(), T::of(-7.0)).queued().expect("memory");
        let mut written = out.slice_mut(*offset..).expect("it is in there");
        stream.softmax_rows(&x, *columns, &mut written).queued().expect("put");
        self.compare(stream, &out, &what, T::SLACK, model::softmax);
        let [gamma, beta] = [5, 6].map(|seed| model::row(0, *columns, seed));
        let on_device = [&gamma, &beta].map(|of| upload::<T>(stream, 0, of.iter().copied()));
        let mut written = out.slice_mut(*offset..).expect("it is in there");
        let [of_gamma, of_beta] = &on_device;
        let norm = stream.layer_norm_rows(&x, of_gamma, of_beta, EPSILON, &mut written);
        norm.queued().expect("put");
        let [gamma, beta] =
            [gamma, beta].map(|of| of.into_iter().map(|x| T::of(x).wide()).collect::<Vec<f64>>());
        self.compare(stream, &out, &what, 4.0 * T::SLACK, |x| {
            model::layer_norm(x, &gamma, &beta, f64::from(EPSILON))
        });
    }

    fn compare(
        &self,
        stream: &Stream,
        out: &DeviceBuffer<T>,
        what: &str,
        slack: f64,
        wanted: impl Fn(&[f64]) -> Vec<f64>,
    ) {
        let found = stream.download(out).synchronize().expect("data");
        let (before, found) = found.split_at(self.offset);
        assert!(before.iter().all(|x| x.wide() == -7.0), "{what}: it wrote in front");
        for (number, (row, found)) in self.rows.iter().zip(found.chunks(self.columns)).enumerate() {
            for (column, (found, wanted)) in found.iter().zip(wanted(row)).enumerate() {
                let (found, slack) = (found.wide(), slack * (1.0 + wanted.abs()));
                assert!(
                    model::is_close(found, wanted, slack),
                    "{what}, {number}, {column}: {found}, not {wanted}"
                );
            }
        }
    }
}

fn check_type<T: Stored>() {
    let device = testing::device();
    let stream = device.stream().expect("a stream");
    let kinds: Vec<usize> = (0..model::KINDS).collect();
    for columns in [0, 1, 2, 7, 8, 31, 32, 33, 64, 257, 384, 1_023, 1_024, 1_025, 4_096, 5_001] {
        for offset in [0, 1] {
            Matrix::<T>::new(&stream, &kinds, columns, offset).check(&stream);
        }
    }
    Matrix::<T>::new(&stream, &[], 5, 0).check(&stream);
    // More rows than warps in a block, and a count that is no multiple of them.
    let many: Vec<usize> = (0..1_003).map(|row| row % model::KINDS).collect();
    Matrix::<T>::new(&stream, &many, 3, 0).check(&stream);
    let long = (1 << 20) + 3;
    Matrix::<T>::new(&stream, &[0, 9], long, 0).check(&stream);
}

#[test]
fn rows_of_f32() {
    check_type::<f32>();
}

#[test]
fn rows_of_f16() {
    check_type::<f16>();
}

#[test]
fn rows_of_bf16() {
    check_type::<bf16>();
}

/// What NumPy and PyTorch say of special values, and of rows of one column.
#[test]
fn special_rows() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let stream = testing::device().stream().expect("a stream");
    let softmax = |x: &[f32], columns: usize| {
        let x = stream.upload(x.to_vec()).queued().expect("memory");
        let mut y = stream.empty::<f32>(x.len()).queued().expect("memory");
        stream.softmax_rows(&x, columns, &mut y).queued().expect("put");
        stream.download(&y).synchronize().expect("data").to_vec()
    };
    let all_nan = |x: &[f32]| softmax(x, x.len()).iter().all(|y| y.is_nan());
    assert!(
        all_nan(&[-INF, -INF, -INF]) && all_nan(&[1.0, INF, 2.0]) && all_nan(&[1.0, NAN, -INF])
    );
    assert_eq!(softmax(&[-INF, 3.0, -INF, 3.0], 4), [0.0, 0.5, 0.0, 0.5]);
    assert_eq!(softmax(&[3.0e38, -3.0e38], 2), [1.0, 0.0]);
    let ones = softmax(&[5.0, -3.0e38, INF, -INF, NAN], 1);
    assert!(ones[..2] == [1.0; 2] && ones[2..].iter().all(|y| y.is_nan()), "{ones:?}");

    let first = |x: &[f32]| {
        let x = stream.upload(x.to_vec()).queued().expect("memory");
        let mut at = stream.empty::<u64>(1).queued().expect("memory");
        stream.arg_max_rows(&x, x.len(), &mut at).queued().expect("put");
        stream.download(&at).synchronize().expect("data")[0]
    };
    assert_eq!(first(&[1.0, 7.0, 7.0]), 1);
    assert_eq!(first(&[1.0, INF, NAN, -NAN, INF]), 2);
    assert_eq!((first(&[-INF, -INF]), first(&[-0.0, 0.0]), first(&[])), (0, 0, u64::MAX));

    let norm = |x: &[f32], epsilon: f32| {
        let x = stream.upload(x.to_vec()).queued().expect("memory");
        let gamma = stream.full(x.len(), 3.0f32).queued().expect("memory");
        let beta = stream.full(x.len(), 0.25f32).queued().expect("memory");
        let mut y = stream.empty::<f32>(x.len()).queued().expect("memory");
        stream.layer_norm_rows(&x, &gamma, &beta, epsilon, &mut y).queued().expect("put");
        stream.download(&y).synchronize().expect("data").to_vec()
    };
    assert_eq!(norm(&[9.0, 9.0, 9.0], 1e-5), [0.25; 3]);
    assert!(norm(&[9.0, 9.0], 0.0).iter().all(|y| y.is_nan()));
    assert!(norm(&[1.0, INF], 1e-5).iter().all(|y| y.is_nan()));
    assert_eq!(norm(&[5.0], 1e-5), [0.25]);
}

/// In a batch, in a replayed one, on a device, of a pool; in place of what was there.
#[tokio::test]
async fn rows_wherever_verbs_are() -> gpu_await::Result<()> {
    let device = testing::device();
    device.preload::<f16>(&[AlgorithmFamily::Rows]).await?;
    device.preload::<u8>(&[AlgorithmFamily::Rows]).await?;
    let stream = device.stream()?;
    let x = stream.upload(vec![1.0f32, 2.0, 3.0, 4.0]).queued()?;
    let (mut sums, mut y) = (stream.empty(2).queued()?, stream.empty(4).queued()?);
    let seen = stream.batch(|q| {
        q.softmax_rows(&x, 2, &mut y)?;
        q.sum_rows(&y, 2, &mut sums)?;
        q.download(&sums)
    });
    assert_eq!(seen.await?, [1.0, 1.0]);
    let mut region = gpu_await::Region::new();
    for _ in 0..3 {
        stream.replay(&mut region, |q| q.sum_rows(&x, 2, &mut sums)).await?;
    }
    assert_eq!(stream.download(&sums).await?, [3.0, 7.0]);
    let mut places = stream.empty(1).queued()?;
    device.arg_max_rows(&x, 4, &mut places).await?;
    assert_eq!(stream.download(&places).await?, [3]);
    Ok(())
}

#[test]
fn lengths_that_are_no_matrix() {
    let stream = testing::device().stream().expect("a stream");
    let x = stream.ones::<f32>(6).queued().expect("memory");
    let mut y = stream.ones::<f32>(6).queued().expect("memory");
    let (three, two) = (x.slice(..3).expect("a part"), x.slice(..2).expect("a part"));
    let mut sums = stream.zeros::<f32>(2).queued().expect("memory");
    let ragged = |error: gpu_await::Error| {
        assert!(matches!(error.detail(), ErrorDetail::Ragged { len: 6, .. }), "{error}");
    };
    let wrong = |error: gpu_await::Error, of: &str| {
        let found = matches!(error.detail(), ErrorDetail::WrongLength { what, .. } if *what == of);
        assert!(found, "{error}");
    };
    ragged(stream.softmax_rows(&x, 4, &mut y).queued().unwrap_err());
    ragged(stream.softmax_rows(&x, 0, &mut y).queued().unwrap_err());
    let mut short = y.slice_mut(..5).expect("a part");
    wrong(stream.softmax_rows(&x, 3, &mut short).queued().unwrap_err(), "the output");
    wrong(stream.sum_rows(&x, 4, &mut sums).queued().unwrap_err(), "the matrix");
    wrong(stream.sum_rows(&x, usize::MAX, &mut sums).queued().unwrap_err(), "the matrix");
    wrong(stream.layer_norm_rows(&x, &three, &two, 0.0, &mut y).queued().unwrap_err(), "beta");
    ragged(
        stream
            .layer_norm_rows(&x, &x.slice(..4).unwrap(), &three, 0.0, &mut y)
            .queued()
            .unwrap_err(),
    );
    // What it would have written counts as failed.
    let read = stream.download(&y).synchronize().unwrap_err();
    assert!(matches!(read.detail(), ErrorDetail::Upstream { .. }), "{read}");
    stream.layer_norm_rows(&x, &three, &three, 1.0, &mut y).queued().expect("put");
    assert_eq!(stream.download(&y).synchronize().expect("data"), [1.0; 6]);
}
