//! Fills and copies on a stream, in a replayed batch and in a graph, beside the same on the host.
//!
//! Elements of every size, parts that begin anywhere, rows with gaps: what lies beside the part keeps its bytes.

use futures::executor::block_on;
use gpu_await::{
    Copy2d, DeviceBuffer, DeviceKind, Element, ErrorDetail, In, InOut, Queue, Region, Result,
    Stream, View, ViewMut, testing,
};
use proptest::collection::vec;
use proptest::prelude::*;

const LEN: usize = 400;

#[derive(Clone, Debug)]
struct Part {
    start: usize,
    len: usize,
    from: usize,
    value: u8,
}

fn part() -> impl Strategy<Value = Part> {
    (0..LEN, 0..LEN, 0..LEN, any::<u8>()).prop_map(|(start, len, from, value)| {
        let len = len.min(LEN - start).min(LEN - from);
        Part { start, len, from, value }
    })
}

/// Rows with gaps between them on either side; in elements.
#[derive(Clone, Copy, Debug)]
struct Rows {
    width: usize,
    height: usize,
    /// Where the first row begins, and from row to row.
    from: (usize, usize),
    to: (usize, usize),
}

fn rows(most_wide: usize) -> impl Strategy<Value = Rows> {
    let gaps = (0..9_usize, 0..9_usize, 0..20_usize, 0..20_usize);
    (1..12_usize, 1..most_wide, gaps).prop_map(|(height, width, (to_gap, from_gap, to, from))| {
        Rows { width, height, from: (from, width + from_gap), to: (to, width + to_gap) }
    })
}

impl Rows {
    fn on_device(self) -> Copy2d {
        Copy2d::new(self.width, self.height)
            .source_start(self.from.0)
            .source_pitch(self.from.1)
            .destination_start(self.to.0)
            .destination_pitch(self.to.1)
    }

    fn on_host<T: Element>(self, from: &[T], to: &mut [T]) {
        for row in 0..self.height {
            let [from_at, to_at] = [self.from, self.to].map(|(start, pitch)| start + row * pitch);
            to[to_at..to_at + self.width].copy_from_slice(&from[from_at..from_at + self.width]);
        }
    }
}

/// Elements whose bytes all differ, so that a byte of a wrong place shows.
fn element<T: Element>(value: u8) -> T {
    let bytes: Vec<u8> =
        (0..size_of::<T>()).map(|at| value.wrapping_add(37_u8.wrapping_mul(at as u8))).collect();
    bytemuck::pod_read_unaligned(&bytes)
}

fn write<T: Element>(
    q: &Queue<'_>,
    from: &View<'_, T>,
    mut to: ViewMut<'_, T>,
    (part, rows): &(Part, Rows),
) -> Result<()> {
    let Part { start, len, from: begin, value } = *part;
    let some = len / 3;
    q.copy_2d(from, &mut to, rows.on_device())?;
    q.copy(&from.slice(begin..begin + len)?, &mut to.slice_mut(start..start + len)?)?;
    q.fill(&mut to.slice_mut(start..start + some)?, element(value))?;
    // By way of memory that begins filled.
    let mut fresh = q.full(len, element::<T>(value.wrapping_add(1)))?;
    q.copy(&from.slice(begin..begin + some)?, &mut fresh.slice_mut(..some)?)?;
    q.copy(&fresh, &mut to.slice_mut(LEN - len..)?)?;
    q.copy(&q.zeros::<T>(some)?, &mut to.slice_mut(..some)?)
}

/// The same on the host.
fn expected<T: Element>(from: &[T], (part, rows): &(Part, Rows)) -> Vec<u8> {
    let Part { start, len, from: begin, value } = *part;
    let some = len / 3;
    let mut to = vec![element::<T>(0xEE); LEN];
    rows.on_host(from, &mut to);
    to[start..start + len].copy_from_slice(&from[begin..begin + len]);
    to[start..start + some].fill(element(value));
    let mut fresh = vec![element::<T>(value.wrapping_add(1)); len];
    fresh[..some].copy_from_slice(&from[begin..begin + some]);
    to[LEN - len..].copy_from_slice(&fresh);
    to[..some].fill(T::zeroed());
    bytemuck::cast_slice(&to).to_vec()
}

fn check<T: Element>(stream: &Stream, runs: &[(Part, Rows)]) {
    let numbers: Vec<T> = (0..LEN).map(|at| element(at as u8)).collect();
    let from = stream.upload(numbers.clone()).queued().unwrap();
    let fresh = || -> DeviceBuffer<T> { stream.upload(vec![element(0xEE); LEN]).queued().unwrap() };
    // Bytes: not every float is equal to itself.
    let whole = |buffer: &DeviceBuffer<T>| -> Vec<u8> {
        bytemuck::cast_slice(&block_on(stream.download(buffer)).unwrap()).to_vec()
    };
    let mut region = Region::new();
    for run in runs {
        let (mut plain, mut replayed, mut in_graph) = (fresh(), fresh(), fresh());
        let view = from.slice(..).unwrap();
        stream.batch(|q| write(q, &view, plain.slice_mut(..)?, run)).queued().unwrap();
        for _ in 0..3 {
            let again = |q: &Queue<'_>| write(q, &view, replayed.slice_mut(..)?, run);
            stream.replay(&mut region, again).queued().unwrap();
        }
        let graph =
            stream.device().graph::<(In<T>, InOut<T>), _, _>(run.clone(), |q, run, (from, to)| {
                write(q, &from, to, run)
            });
        for _ in 0..2 {
            graph.launch(stream, (&from, &mut in_graph)).queued().unwrap();
        }
        let expected = expected(&numbers, run);
        let found = [("plain", &plain), ("replayed", &replayed), ("in a graph", &in_graph)];
        for (how, found) in found {
            let differs = whole(found).iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{how}, elements of {} bytes: {run:?}", size_of::<T>());
        }
    }
    let report = region.report();
    assert!(report.compiled > 0 && report.refused == 0, "{report:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn the_same_bytes(runs in vec((part(), rows(20)), 1..6)) {
        let device = testing::device();
        let stream = device.stream().unwrap();
        check::<u8>(&stream, &runs);
        check::<[u8; 3]>(&stream, &runs);
        check::<u16>(&stream, &runs);
        check::<[u16; 5]>(&stream, &runs);
        check::<f32>(&stream, &runs);
        check::<[f32; 3]>(&stream, &runs);
        check::<f64>(&stream, &runs);
        check::<[u8; 11]>(&stream, &runs);
        check::<[u32; 4]>(&stream, &runs);
    }

    /// Rows of bytes that nothing aligns: words, and what is left of them at both ends.
    #[test]
    fn long_rows(runs in vec(rows(3000), 1..20)) {
        const LEN: usize = 12 * 3008 + 20;
        let device = testing::device();
        let stream = device.stream().unwrap();
        let numbers: Vec<u8> = (0..LEN).map(|at| (at / 251 + at) as u8).collect();
        let from = stream.upload(numbers.clone()).queued().unwrap();
        let mut region = Region::new();
        for rows in runs {
            let fresh = || stream.full(LEN, 0xEE_u8).queued().unwrap();
            let (mut plain, mut listed) = (fresh(), fresh());
            stream.copy_2d(&from, &mut plain, rows.on_device()).queued().unwrap();
            let list = |q: &Queue<'_>| q.copy_2d(&from, &mut listed, rows.on_device());
            stream.replay(&mut region, list).queued().unwrap();
            let mut expected = vec![0xEE; LEN];
            rows.on_host(&numbers, &mut expected);
            for (how, found) in [("plain", &plain), ("listed", &listed)] {
                let found = block_on(stream.download(found)).unwrap();
                let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{how}, {rows:?}");
            }
        }
    }
}

/// Sizes at which a grid is full, and the loops of its threads begin.
#[tokio::test]
async fn large_memory() -> Result<()> {
    const MANY: usize = (16 << 20) + 7;
    let device = testing::device();
    let stream = device.stream()?;
    let graph = device.graph::<(InOut<u8>, InOut<u8>, InOut<u8>), _, _>(
        (),
        |q, (), (mut x, mut aligned, mut shifted)| {
            q.fill(&mut x.slice_mut(1..MANY - 2)?, 7)?;
            q.copy(&x, &mut aligned)?;
            q.copy(&x.slice(3..)?, &mut shifted.slice_mut(..MANY - 3)?)
        },
    );
    let mut x = stream.full(MANY, 1u8).queued()?;
    let (mut aligned, mut shifted) = (stream.zeros(MANY).queued()?, stream.zeros(MANY).queued()?);
    graph.launch(&stream, (&mut x, &mut aligned, &mut shifted)).await?;
    let mut expected = vec![7; MANY];
    (expected[0], expected[MANY - 2], expected[MANY - 1]) = (1, 1, 1);
    assert!(stream.download(&aligned).await?[..] == expected);
    expected.rotate_left(3);
    expected[MANY - 3..].fill(0);
    assert!(stream.download(&shifted).await?[..] == expected);
    Ok(())
}

/// More rows than the blocks of a grid take at once.
#[tokio::test]
async fn many_rows() -> Result<()> {
    let rows = Rows { width: 255, height: 140_001, from: (3, 257), to: (2, 256) };
    let numbers: Vec<u8> = (0..257 * rows.height + 3).map(|at| (at / 251 + at) as u8).collect();
    let stream = testing::device().stream()?;
    let from = stream.upload(numbers.clone()).queued()?;
    let mut to = stream.full(numbers.len(), 0xEE_u8).queued()?;
    stream.copy_2d(&from, &mut to, rows.on_device()).queued()?;
    let mut expected = vec![0xEE; numbers.len()];
    rows.on_host(&numbers, &mut expected);
    assert!(stream.download(&to).await?[..] == expected);
    Ok(())
}

/// Fills and copies that are launches may start early, as the launches behind them may.
#[tokio::test]
async fn they_overlap_with_the_next() -> Result<()> {
    const EACH: u64 = 10;
    let device = testing::device();
    let stream = device.stream()?;
    let from = stream.full(1000, 0.1_f64).queued()?;
    let mut to = stream.full(1000, 0.2_f64).queued()?;
    stream.done().await?;
    let before = device.stats().overlaps.allowed;
    for _ in 0..EACH {
        stream.fill(&mut to, 0.3).queued()?;
        stream.copy_2d(&from, &mut to, Copy2d::new(3, 100).source_pitch(10)).queued()?;
    }
    stream.done().await?;
    let seen = device.stats().overlaps.allowed - before;
    // Machine code of other compute capabilities does not wait first.
    let may = device.kind() == DeviceKind::Host || device.compute_capability().0 == 9;
    assert!(if may { seen >= 2 * EACH - 1 } else { seen == 0 }, "{seen}");
    Ok(())
}

/// A fill is a launch among the others: replayed, set when its value changes, and named in the report.
#[tokio::test]
async fn a_fill_ends_no_list() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut region = Region::new();
    let mut x = stream.full(64, 0.0f32).queued()?;
    let mut y = stream.full(64, 0.0f32).queued()?;
    for round in 0..6 {
        let op = stream.replay(&mut region, |q| {
            q.fill(&mut x, round as f32)?;
            q.copy(&x, &mut y)
        });
        op.await?;
        assert_eq!(stream.download(&y).await?, [round as f32; 64]);
    }
    let report = region.report();
    assert_eq!((report.plain, report.compiled, report.replayed), (1, 1, 4), "{report:?}");
    assert_eq!(report.nodes_set, 4, "the fill alone changes: {report:?}");
    assert_eq!(region.last_run().len(), 1);
    let picture = region.dot();
    assert!(picture.contains("fill") && picture.contains("copy"), "{picture}");
    Ok(())
}

/// What is left out of a copy in a graph stays unwritten.
#[tokio::test]
async fn a_copy_of_what_was_never_written() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let graph = device.graph::<(InOut<f32>,), _, _>((), |q, (), (mut y,)| {
        let nothing = q.empty(y.len())?;
        q.copy(&nothing, &mut y)
    });
    let mut y = stream.full(8, 1.0f32).queued()?;
    let error = graph.launch(&stream, (&mut y,)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    Ok(())
}
