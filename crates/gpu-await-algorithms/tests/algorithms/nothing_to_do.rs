//! Operations that have nothing to put on the stream are refused as all others: a closed device, memory of another one, elements that
//! would be read and that nobody wrote, or whose producer failed.

use std::time::Duration;

use futures::executor::block_on;
use gpu_await::{
    Copy2d, Device, DeviceBuffer, ErrorDetail, ErrorKind, In, Op, Queue, Region, Result, Stream,
    testing,
};
use gpu_await_algorithms::{Algorithms, ReduceOp, Sequence, SequenceMut, transform};

/// Arrays that leave nothing to do.
struct Arrays {
    one: DeviceBuffer<f32>,
    other_one: DeviceBuffer<u32>,
    three: DeviceBuffer<f32>,
    one_segment: DeviceBuffer<u64>,
    no_segment: DeviceBuffer<u64>,
    count: DeviceBuffer<u64>,
    none: DeviceBuffer<f32>,
    out: DeviceBuffer<f32>,
    numbers: DeviceBuffer<u64>,
}

impl Arrays {
    /// Of elements that nobody wrote.
    fn new(stream: &Stream) -> Result<Self> {
        Ok(Arrays {
            one: stream.empty(1).queued()?,
            other_one: stream.empty(1).queued()?,
            three: stream.empty(3).queued()?,
            one_segment: stream.empty(2).queued()?,
            no_segment: stream.empty(1).queued()?,
            count: stream.empty(1).queued()?,
            none: stream.empty(0).queued()?,
            out: stream.empty(0).queued()?,
            numbers: stream.empty(0).queued()?,
        })
    }

    fn write(&mut self, stream: &Stream) -> Result<()> {
        stream.fill(&mut self.one, 1.0).queued()?;
        stream.fill(&mut self.other_one, 1).queued()?;
        stream.fill(&mut self.three, 1.0).queued()?;
        stream.fill(&mut self.one_segment, 0).queued()?;
        stream.fill(&mut self.no_segment, 0).queued()?;
        stream.fill(&mut self.count, 0).queued()
    }
}

/// A name, the operation, and whether it reads any of the arrays that have elements.
type Idle = (&'static str, fn(&Queue<'_>, &mut Arrays) -> Result<()>, bool);

const IDLE: &[Idle] = &[
    ("sort", |q, a| q.sort(&mut a.one), true),
    ("sort up to", |q, a| q.sort(&mut a.one.up_to_mut(&a.count)?), true),
    ("sort of nothing", |q, a| q.sort(&mut a.none), false),
    ("sort_descending", |q, a| q.sort_descending(&mut a.one), true),
    ("sort_by_key", |q, a| q.sort_by_key(&mut a.one, &mut a.other_one), true),
    ("sort_by_key_descending", |q, a| q.sort_by_key_descending(&mut a.one, &mut a.other_one), true),
    ("segmented_sort of one", |q, a| q.segmented_sort(&mut a.one, &a.one_segment), true),
    ("segmented_sort of none", |q, a| q.segmented_sort(&mut a.three, &a.no_segment), true),
    (
        "segmented_sort_by_key",
        |q, a| q.segmented_sort_by_key(&mut a.one, &mut a.other_one, &a.one_segment),
        true,
    ),
    ("inclusive_scan", |q, a| q.inclusive_scan(&a.none, ReduceOp::Sum, &mut a.out), false),
    (
        "inclusive_scan up to",
        |q, a| q.inclusive_scan(&a.none.up_to(&a.count)?, ReduceOp::Sum, &mut a.out),
        true,
    ),
    ("exclusive_scan", |q, a| q.exclusive_scan(&a.none, ReduceOp::Max, 0.0, &mut a.out), false),
    (
        "segmented_reduce",
        |q, a| q.segmented_reduce(&a.three, &a.no_segment, ReduceOp::Sum, 0.0, &mut a.out),
        true,
    ),
    ("sum_rows", |q, a| q.sum_rows(&a.none, 3, &mut a.out), false),
    ("arg_max_rows", |q, a| q.arg_max_rows(&a.none, 3, &mut a.numbers), false),
    ("softmax_rows", |q, a| q.softmax_rows(&a.none, 3, &mut a.out), false),
    (
        "layer_norm_rows",
        |q, a| q.layer_norm_rows(&a.none, &a.three, &a.three, 0.0, &mut a.out),
        true,
    ),
    ("top_k", |q, a| q.top_k(&a.three, &mut a.out), true),
    ("top_k_places", |q, a| q.top_k_places(&a.three, &mut a.out, &mut a.numbers), true),
    ("bottom_k", |q, a| q.bottom_k(&a.three, &mut a.out), true),
    (
        "histogram_between",
        |q, a| {
            // There is a bin, so that there is something to do; but there are no elements.
            q.histogram_between(&a.none, &a.three, &mut q.empty::<u64>(2)?)
        },
        true,
    ),
    ("transform", |q, a| q.transform(transform!(|x| x + 1), (&a.none,), &mut a.out), false),
    (
        "transform_in_place",
        |q, a| q.transform_in_place(transform!(|x| x + 1), (), &mut a.out),
        false,
    ),
    ("sequence", |q, a| q.sequence(0.0, 1.0, &mut a.out), false),
    ("cast", |q, a| q.cast(&a.none, &mut a.numbers), false),
    ("gather", |q, a| q.gather(&a.three, &a.numbers, &mut a.out), true),
    ("scatter", |q, a| q.scatter(&a.none, &a.numbers, &mut a.three), true),
    ("copy", |q, a| q.copy(&a.none, &mut a.out), false),
    ("copy_2d", |q, a| q.copy_2d(&a.none, &mut a.out, Copy2d::new(3, 0)), false),
    ("download", |q, a| q.download(&a.none).map(drop), false),
    ("fill", |q, a| q.fill(&mut a.out, 1.0), false),
];

fn alone(stream: &Stream, (_, put, _): Idle, arrays: &mut Arrays) -> Op<()> {
    stream.batch(|queue| put(queue, arrays))
}

fn replayed(stream: &Stream, (_, put, _): Idle, arrays: &mut Arrays) -> Op<()> {
    stream.replay(&mut Region::new(), |queue| put(queue, arrays))
}

type Way = fn(&Stream, Idle, &mut Arrays) -> Op<()>;

const WAYS: [Way; 2] = [alone, replayed];

#[test]
fn nothing_is_put_on_the_stream() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut arrays = Arrays::new(&stream)?;
    arrays.write(&stream)?;
    for idle in IDLE.iter().filter(|(name, ..)| *name != "histogram_between") {
        for way in WAYS {
            let before = stream.submitted();
            way(&stream, *idle, &mut arrays).synchronize()?;
            assert_eq!(stream.submitted(), before, "{}", idle.0);
        }
    }
    Ok(())
}

#[test]
fn elements_that_nobody_wrote() -> Result<()> {
    let stream = testing::device().stream()?;
    for idle in IDLE {
        for way in WAYS {
            let found = way(&stream, *idle, &mut Arrays::new(&stream)?).synchronize();
            match idle.2 {
                true => {
                    let error = found.expect_err(idle.0);
                    let unwritten = matches!(error.detail(), ErrorDetail::Unwritten { .. });
                    assert!(unwritten, "{}: {error}", idle.0);
                }
                false => found.expect(idle.0),
            }
        }
    }
    Ok(())
}

/// What would have changed counts as failed, and what reads that fails.
#[test]
fn a_producer_that_failed() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut x = stream.empty::<f32>(1).queued()?;
    stream.sort(&mut x).queued().expect_err("unwritten");
    for _ in 0..2 {
        let error = stream.sort(&mut x).queued().expect_err("poisoned");
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    }
    let mut none = stream.empty::<f32>(0).queued()?;
    let error = stream.top_k(&x, &mut none).queued().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    stream.fill(&mut x, 2.0).queued()?;
    stream.sort(&mut x).synchronize()?;
    assert_eq!(stream.download(&x).synchronize()?, [2.0]);
    Ok(())
}

#[test]
fn memory_of_another_device() -> Result<()> {
    let (stream, theirs) = (testing::device().stream()?, Device::host().stream()?);
    for idle in IDLE {
        for way in WAYS {
            let mut arrays = Arrays::new(&theirs)?;
            arrays.write(&theirs)?;
            let error = way(&stream, *idle, &mut arrays).synchronize().expect_err(idle.0);
            let wrong = matches!(error.detail(), ErrorDetail::WrongDevice { .. });
            assert!(wrong, "{}: {error}", idle.0);
        }
    }
    let mut elsewhere = theirs.empty::<f32>(0).queued()?;
    let frame = stream.pinned::<f32>(0)?;
    stream.upload_into(frame, &mut elsewhere).synchronize().expect_err("upload_into");
    let frame = stream.pinned::<f32>(0)?;
    stream.download_into(&elsewhere, frame).synchronize().expect_err("download_into");
    Ok(())
}

#[test]
fn a_closed_device() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut arrays = Arrays::new(&stream)?;
    arrays.write(&stream)?;
    block_on(device.close(Duration::from_secs(30)))?;
    for idle in IDLE {
        for way in WAYS {
            let error = way(&stream, *idle, &mut arrays).synchronize().expect_err(idle.0);
            assert_eq!(error.kind(), ErrorKind::Closed, "{}: {error}", idle.0);
        }
    }
    Ok(())
}

/// A graph is drawn without contents; but memory of another device is never right.
#[test]
fn drawn_for_a_graph() -> Result<()> {
    let device = testing::device();
    let (stream, theirs) = (device.stream()?, Device::host().stream()?);
    let mut elsewhere = Arrays::new(&theirs)?;
    elsewhere.write(&theirs)?;
    let state = std::sync::Mutex::new(elsewhere);
    let graph = device.graph::<(In<f32>,), _, _>(state, |queue, state, (_,)| {
        let mut arrays = state.lock().expect("no panic");
        for (name, put, _) in IDLE {
            let error = put(queue, &mut arrays).expect_err(name);
            let wrong = matches!(error.detail(), ErrorDetail::WrongDevice { .. });
            assert!(wrong, "{name}: {error}");
        }
        Ok(())
    });
    let x = stream.zeros::<f32>(1).queued()?;
    graph.launch(&stream, (&x,)).synchronize()
}
