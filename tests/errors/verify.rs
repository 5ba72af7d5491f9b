//! Verify mode: each operation is waited for, and the one that faults is named with its place.

use std::panic::Location;

use gpu_await::testing;
use gpu_await::{
    Completion, Device, Error, ErrorDetail, ErrorKind, LaunchConfig, Queue, Result, kernels,
};

use crate::under_test::child;
use crate::under_test::faulty::faulty;
use crate::under_test::modes;

/// The device under test, in verify mode.
fn verified(completion: Completion) -> Device {
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let opened = Device::builder().completion(completion).verify(true).named(&name);
    opened.unwrap_or_else(|error| panic!("{name}: {error}"))
}

mod declared {
    gpu_await::kernel! {
        /// Faults.
        pub unsafe fn trap();
        launch = gpu_await::LaunchConfig::new(1, 1);
        ptx = include_str!("../../kernels/trap.ptx");
        host = twin;
    }

    fn twin(_: &gpu_await::Grid) {
        panic!("fault on purpose");
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

/// Where an error says that the operation `op` was submitted.
fn place(error: &Error, op: &str) -> (String, u32) {
    match error.detail() {
        ErrorDetail::Verify { op: found, cause } => {
            let at = error.at().expect("its line");
            assert_eq!((&**found, cause.kind()), (op, ErrorKind::DeviceLost));
            assert_eq!(error.kind(), ErrorKind::DeviceLost);
            let text = error.to_string();
            assert!(text.contains(op) && text.contains("verify.rs"), "{text}");
            (at.file().to_owned(), at.line())
        }
        other => panic!("not of verify mode: {other:?}"),
    }
}

/// The line of the call.
#[track_caller]
fn line() -> (String, u32) {
    let at = Location::caller();
    (at.file().to_owned(), at.line())
}

#[test]
fn a_fault_names_its_operation_and_where_it_was_submitted() {
    const NAME: &str =
        concat!(module_path!(), "::a_fault_names_its_operation_and_where_it_was_submitted");
    let Some(way) = child::parameter() else {
        for way in ["stream", "device", "batch", "kernel"] {
            child::run(NAME, way);
        }
        return;
    };
    block_on(async move {
        let device = verified(Completion::Adaptive);
        let stream = device.stream().expect("a stream");
        let trap = faulty(&device).await;
        let one = LaunchConfig::new(1, 1);
        let mut x = stream.full(4, 1u8).queued().expect("before the fault");
        let (op, here) = match &*way {
            "stream" => (stream.launch(&trap, one, ()), line()),
            "device" => (device.launch(&trap, one, ()), line()),
            // The line of the launch; what is in front of it in the batch is not what faulted.
            "batch" => {
                let mut fill = |q: &Queue<'_>| q.fill(&mut x, 2);
                (stream.batch(|q| fill(q).and_then(|()| q.launch(&trap, one, ()))), line())
            }
            _ => (declared::trap::load(&device).await.expect("loads").launch(&stream), line()),
        };
        let error = op.submitted().expect_err("known when the call returns");
        assert_eq!(place(&error, "trap"), here);
        // What comes later is told of the loss, and not that it was the cause.
        let later = stream.fill(&mut x, 3).submitted().expect_err("the device is lost");
        assert!(matches!(later.detail(), ErrorDetail::DeviceLost { .. }), "{later}");
    });
}

#[test]
fn without_it_the_fault_is_told_by_the_future() {
    const NAME: &str = concat!(module_path!(), "::without_it_the_fault_is_told_by_the_future");
    if child::parameter().is_none() {
        child::run(NAME, "child");
        return;
    }
    block_on(async {
        let device = testing::device();
        let trap = faulty(&device).await;
        let op = device.launch(&trap, LaunchConfig::new(1, 1), ()).submitted().expect("accepted");
        let error = op.await.expect_err("the device is lost");
        assert!(matches!(error.detail(), ErrorDetail::DeviceLost { .. }), "{error}");
    });
}

#[test]
fn the_environment_turns_it_on() {
    const NAME: &str = concat!(module_path!(), "::the_environment_turns_it_on");
    let Some(value) = child::parameter() else {
        for value in ["0", "1"] {
            let output = child::command(NAME, value).env("GPU_AWAIT_VERIFY", value).output();
            let output = output.expect("a child process");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{value}: {text}");
        }
        return;
    };
    block_on(async move {
        let device = testing::device();
        let trap = faulty(&device).await;
        let submitted = device.launch(&trap, LaunchConfig::new(1, 1), ()).submitted();
        assert_eq!(submitted.is_err(), value == "1");
    });
}

#[tokio::test]
async fn every_operation_is_complete_when_its_call_returns_and_right() -> Result<()> {
    // One test at a time on a GPU: this handle keeps others with gates away.
    let _turn = testing::device();
    for mode in modes::ALL {
        let device = verified(mode);
        let (a, b) = (device.stream()?, device.stream()?);
        let axpy = kernels::axpy::load(&device).await?;
        let complete = || {
            assert_eq!((a.completed(), b.completed()), (a.submitted(), b.submitted()), "{mode:?}");
        };
        let x = a.upload(vec![1.0f32; 1000]).queued()?;
        complete();
        let mut y = b.full(1000, 2.0f32).queued()?;
        complete();
        axpy.launch(&b, 3.0, &x, &mut y).queued()?;
        complete();
        let answer = a.host_fn(|| 42);
        complete();
        assert_eq!(answer.await?, 42);
        let mut z = a.zeros::<f32>(1000).queued()?;
        a.copy(&y, &mut z).queued()?;
        complete();
        b.wait(&a).queued()?;
        let start = b.record_timed()?;
        let end = b.record_timed()?;
        assert!(end.is_complete() && end.elapsed_since(&start).is_ok());
        let host = b.download(&z);
        complete();
        assert_eq!(host.await?, [5.0; 1000]);
        let error = b.download(&b.empty::<u8>(1).queued()?).submitted().unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
        device.done().await?;
    }
    Ok(())
}
