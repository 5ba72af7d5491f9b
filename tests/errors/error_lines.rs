//! An error names the line that called the verb, whatever refused it, and keeps it on its way.
#![forbid(unsafe_code)]

use std::panic::Location;

use gpu_await::testing::{self, DriverCall};
use gpu_await::{
    Device, DeviceBuffer, Error, ErrorDetail, ErrorKind, InOut, Op, Region, Result, Stream, kernels,
};

/// Checks that the error is of this kind and of the line of the call.
#[track_caller]
fn is_here<T>(kind: ErrorKind, result: Result<T>) -> Error {
    let Err(error) = result else { panic!("it is refused") };
    let here = Location::caller();
    assert_eq!(error.kind(), kind, "{error}");
    let at = error.at().unwrap_or_else(|| panic!("no line: {error}"));
    assert_eq!((at.file(), at.line()), (here.file(), here.line()), "{error}");
    let place = format!("{}:{}", here.file(), here.line());
    assert!(error.to_string().contains(&place), "{error}");
    error
}

/// The same for an operation that is refused at once.
#[track_caller]
fn fails_here<T>(kind: ErrorKind, op: Op<T>) -> Error {
    is_here(kind, op.submitted())
}

fn buffers(stream: &Stream) -> (DeviceBuffer<f32>, DeviceBuffer<f32>) {
    (stream.zeros(3).queued().unwrap(), stream.zeros(4).queued().unwrap())
}

fn equal(stream: &Stream) -> (DeviceBuffer<f32>, DeviceBuffer<f32>) {
    (stream.zeros(4).queued().unwrap(), stream.zeros(4).queued().unwrap())
}

#[test]
fn an_invalid_call() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load_blocking(&device).unwrap();
    let (x, mut y) = buffers(&stream);
    let kind = ErrorKind::InvalidCall;
    fails_here(kind, axpy.launch(&stream, 1.0, &x, &mut y));
    fails_here(kind, axpy.launch(&device, 1.0, &x, &mut y));
    fails_here(kind, stream.copy(&x, &mut y));
    fails_here(kind, device.copy(&x, &mut y));
    let empty = stream.empty::<f32>(4).queued().unwrap();
    fails_here(kind, stream.download(&empty));
    fails_here(kind, stream.download_vec(&empty));
    let pinned = stream.pinned::<f32>(5).unwrap();
    let refused = stream.upload_into(pinned, &mut y).accepted().map_err(|refused| refused.error);
    // It was refused in the line above.
    assert_eq!(refused.unwrap_err().at().map(Location::line), Some(line!() - 2));
}

/// A wrapper hands on the line of its caller.
#[test]
fn a_wrapper() {
    #[track_caller]
    fn wrapper(stream: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Op<()> {
        stream.copy(x, y)
    }
    let stream = testing::device().stream().unwrap();
    let (x, mut y) = buffers(&stream);
    fails_here(ErrorKind::InvalidCall, wrapper(&stream, &x, &mut y));
}

/// The verb, and not the batch; an error that is none of a verb's is the batch's.
#[test]
fn in_a_batch() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load_blocking(&device).unwrap();
    let (x, mut y) = buffers(&stream);
    let kind = ErrorKind::InvalidCall;
    let mut region = Region::new();
    for _ in 0..2 {
        let batch = stream.batch(|q| {
            q.zeros::<f32>(4)?;
            is_here(kind, q.copy(&x, &mut y));
            is_here(kind, axpy.launch(q, 1.0, &x, &mut y));
            q.download(&y)
        });
        assert_eq!(batch.submitted().unwrap_err().at().map(Location::line), Some(line!() - 2));
        let replayed = stream.replay(&mut region, |q| axpy.launch(q, 1.0, &x, &mut y));
        assert_eq!(replayed.submitted().unwrap_err().at().map(Location::line), Some(line!() - 1));
    }
    fails_here(kind, stream.batch(|_| x.slice(2..9).map(|_| ())));
    fails_here(kind, stream.timed(|_| x.slice(2..9).map(|_| ())));
}

#[test]
fn in_a_graph() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load_blocking(&device).unwrap();
    let graph = device.graph::<(InOut<f32>,), _, _>(axpy, |q, axpy, (mut y,)| {
        let x = q.zeros(3)?;
        axpy.launch(q, 1.0, &x, &mut y)
    });
    let line = line!() - 2;
    let (_, mut y) = buffers(&stream);
    let error = graph.launch(&stream, (&mut y,)).submitted().unwrap_err();
    assert_eq!(error.at().map(Location::line), Some(line), "{error}");
}

#[test]
fn out_of_memory() {
    let device = Device::builder().memory_limit_bytes(1 << 20).host();
    let stream = device.stream().unwrap();
    let kind = ErrorKind::OutOfMemory;
    fails_here(kind, stream.empty::<u8>(2 << 20));
    fails_here(kind, stream.zeros::<u8>(2 << 20));
    fails_here(kind, device.full(2 << 20, 1u8));
    let batch = stream.batch(|q| q.empty::<u8>(2 << 20));
    assert_eq!(batch.submitted().unwrap_err().at().map(Location::line), Some(line!() - 1));
}

#[test]
fn a_closed_device() {
    let device = Device::host();
    let stream = device.stream().unwrap();
    let (x, mut y) = equal(&stream);
    let limit = std::time::Duration::from_secs(10);
    futures::executor::block_on(device.close(limit)).unwrap();
    let kind = ErrorKind::Closed;
    fails_here(kind, stream.copy(&x, &mut y));
    fails_here(kind, stream.fill(&mut y, 1.0));
    fails_here(kind, stream.host_fn(|| ()));
    is_here(kind, stream.record());
    is_here(kind, stream.record_timed());
    is_here(kind, stream.pinned::<u8>(1));
}

/// One loss is the error of many operations, each with its own line.
#[test]
fn a_lost_device() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let (x, mut y) = equal(&stream);
    handle.lose_device("on purpose");
    let kind = ErrorKind::DeviceLost;
    let first = fails_here(kind, stream.copy(&x, &mut y));
    let second = fails_here(kind, stream.fill(&mut y, 1.0));
    fails_here(kind, stream.done());
    assert_eq!(first, second, "the line is none of its facts");
}

/// Of readers there are two: theirs, and that of the operation that failed.
#[test]
fn a_refused_call_and_its_readers() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let (x, mut y) =
        (stream.zeros::<f32>(4).queued().unwrap(), stream.zeros::<f32>(4).queued().unwrap());
    let axpy = kernels::axpy::load_blocking(&device).unwrap();
    handle.fail_nth(DriverCall::Launch, 1, ErrorKind::Driver);
    let error = fails_here(ErrorKind::Driver, axpy.launch(&stream, 1.0, &x, &mut y));
    let reader = fails_here(ErrorKind::Driver, stream.download(&y));
    let ErrorDetail::Upstream { cause, .. } = reader.detail() else { panic!("{reader}") };
    assert_eq!(cause.at(), error.at());
    assert!(error.at().is_some_and(|at| at.line() == line!() - 4));
}

/// A stream that takes no work refuses each call with its own line.
#[test]
fn a_stream_that_is_refused() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let _busy = testing::Gate::close(device.default_stream()).unwrap();
    handle.fail_nth(DriverCall::StreamWaitEvent, 1, ErrorKind::Driver);
    stream.scope_sync(|| {
        fails_here(ErrorKind::Driver, device.empty::<u8>(4));
        fails_here(ErrorKind::Driver, device.full(4, 1u8));
        is_here(ErrorKind::Driver, device.record());
    });
}
