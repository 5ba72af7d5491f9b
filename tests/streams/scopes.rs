//! The current stream: where verbs of a device go, and whose state that is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{Device, ErrorKind, Op, Result, Stream, kernels};

const SOON: Duration = Duration::from_secs(5);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("nothing held it up")
}

/// Whether `op` is held up: nothing else would keep it for so long.
async fn is_held_up<T>(op: &mut Op<T>) -> bool {
    tokio::time::timeout(Duration::from_millis(20), op).await.is_err()
}

/// Submits something to the current stream; the stream must be `expected`.
fn goes_to(device: &Device, expected: &Stream) {
    let before = expected.submitted();
    device.host_fn(|| ()).abandon();
    assert_eq!(expected.submitted(), before + 1);
    assert_eq!(device.current_stream(), *expected);
}

#[tokio::test]
async fn every_verb_of_a_device_goes_to_the_current_stream() -> Result<()> {
    let device = testing::device();
    let fill = kernels::fill::load(&device).await?;
    let stream = device.stream()?;
    let default = device.default_stream().submitted();
    let mut before = 0;
    let mut one_more = |what: &str| {
        assert!(stream.submitted() > before, "{what}");
        before = stream.submitted();
    };
    stream
        .scope(async {
            let x = device.upload(vec![1u32, 2]).queued()?;
            one_more("upload");
            let mut y = device.upload_from(&[3u32, 4]).queued()?;
            one_more("upload_from");
            let pinned = device.download(&x).await?;
            one_more("download");
            let pinned = device.upload_into(pinned, &mut y).await?;
            one_more("upload_into");
            assert_eq!(device.download_into(&y, pinned).await?, [1, 2]);
            one_more("download_into");
            device.copy(&x, &mut y).queued()?;
            one_more("copy");
            device.fill(&mut y, 7).queued()?;
            one_more("fill");
            assert_eq!(device.download_vec(&y).await?, [7, 7]);
            one_more("download_vec");
            drop(device.empty::<u8>(3).queued()?);
            one_more("empty");
            drop(device.zeros::<u8>(3).queued()?);
            one_more("zeros");
            drop(device.ones::<f32>(3).queued()?);
            one_more("ones");
            let mut z = device.full(3, 2.0f32).queued()?;
            one_more("full");
            fill.launch(&device, 5.0, &mut z).queued()?;
            one_more("launch");
            assert_eq!(device.host_fn(|| 8).await?, 8);
            one_more("host_fn");
            assert_eq!(device.batch(|queue| queue.host_fn(|| 9)).await?, 9);
            one_more("batch");
            device.timed(|queue| queue.fill(&mut z, 1.0)).await?;
            one_more("timed");
            device.record_timed()?.done().await?;
            one_more("record_timed");
            let other = device.stream()?;
            let gate = Gate::close(&other)?;
            device.wait(&other).queued()?;
            one_more("wait");
            assert!(!device.record()?.is_complete());
            gate.open();
            device.record()?.done().await
        })
        .await?;
    assert_eq!(device.default_stream().submitted(), default);
    Ok(())
}

#[tokio::test]
async fn outside_of_scopes_the_default_stream_is_current() -> Result<()> {
    let device = testing::device();
    goes_to(&device, device.default_stream());
    assert!(Stream::current().is_none());
    let stream = device.stream()?;
    let handle = device.with_default_stream(&stream)?;
    goes_to(&handle, &stream);
    goes_to(&device, device.default_stream());
    assert_eq!(stream.device().default_stream(), device.default_stream());
    let other = Device::host();
    let error = other.with_default_stream(&stream).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    Ok(())
}

#[tokio::test]
async fn scopes_nest_and_each_device_has_its_own() -> Result<()> {
    let (device, other) = (testing::device(), Device::host());
    let (a, b, there) = (device.stream()?, device.stream()?, other.stream()?);
    a.scope(async {
        goes_to(&device, &a);
        b.scope(async {
            goes_to(&device, &b);
            goes_to(&other, other.default_stream());
            there
                .scope(async {
                    goes_to(&other, &there);
                    goes_to(&device, &b);
                    assert_eq!(Stream::current().as_ref(), Some(&there), "the innermost");
                    assert_eq!(Stream::current().unwrap().device().ordinal(), other.ordinal());
                })
                .await;
            goes_to(&device, &b);
        })
        .await;
        goes_to(&device, &a);
        b.scope_sync(|| goes_to(&device, &b));
        goes_to(&device, &a);
    })
    .await;
    goes_to(&device, device.default_stream());
    Ok(())
}

#[tokio::test]
async fn a_scope_waits_on_the_device_for_the_stream_that_was_current() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    for sync in [false, true] {
        let gate = Gate::close(device.default_stream())?;
        // The host goes on: both are submitted while the gate is closed.
        let mut behind = if sync {
            a.scope_sync(|| device.host_fn(|| 1))
        } else {
            a.scope(async { device.host_fn(|| 1).submitted() }).await?
        };
        assert!(is_held_up(&mut behind).await);
        let beside = b.scope_unordered(async { device.host_fn(|| 2).submitted() }).await?;
        assert_eq!(soon(beside).await?, 2);
        assert!(!a.is_idle());
        gate.open();
        assert_eq!(soon(behind).await?, 1);
        assert!(!gate.timed_out());
    }
    Ok(())
}

#[tokio::test]
async fn a_nested_scope_waits_for_the_outer_one_and_nobody_waits_for_a_scope_that_ended()
-> Result<()> {
    let device = testing::device();
    let (outer, inner) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&outer)?;
    let (behind, after) = outer
        .scope_unordered(async {
            let behind = inner.scope(async { device.host_fn(|| 1).submitted() }).await;
            (behind, device.record())
        })
        .await;
    let mut behind = behind?;
    assert!(is_held_up(&mut behind).await);
    // The default stream is current again and waits for neither.
    soon(device.host_fn(|| ())).await?;
    assert!(!after?.is_complete());
    gate.open();
    soon(behind).await.map(drop)
}

#[tokio::test]
async fn a_scope_ends_with_its_future_whatever_the_way() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let failed: Result<()> = stream
        .scope(async {
            let unwritten = device.empty::<u8>(1).queued()?;
            device.download(&unwritten).await.map(drop)
        })
        .await;
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::InvalidCall);
    goes_to(&device, device.default_stream());

    let panics = stream.scope(async { panic!("on purpose") });
    let panicked: std::result::Result<(), _> = AssertUnwindSafe(panics).catch_unwind().await;
    assert!(panicked.is_err());
    goes_to(&device, device.default_stream());
    let panicked = catch_unwind(AssertUnwindSafe(|| stream.scope_sync(|| panic!("on purpose"))));
    assert!(panicked.is_err());
    goes_to(&device, device.default_stream());

    // Given up between two polls.
    let mut pending = Box::pin(stream.scope(async {
        goes_to(&device, &stream);
        std::future::pending::<()>().await;
    }));
    assert!((&mut pending).now_or_never().is_none());
    goes_to(&device, device.default_stream());
    drop(pending);
    goes_to(&device, device.default_stream());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn tasks_that_migrate_do_not_see_each_others_streams() -> Result<()> {
    let device = testing::device();
    let mut tasks = Vec::new();
    for task in 0..32u32 {
        let (device, stream) = (device.clone(), device.stream()?);
        let scoped = task % 4 != 3;
        let body = {
            let (device, stream) = (device.clone(), stream.clone());
            async move {
                let mut threads = std::collections::BTreeSet::new();
                for round in 0..100u32 {
                    let expected = if scoped { &stream } else { device.default_stream() };
                    assert_eq!(device.current_stream(), *expected);
                    let x = device.full(4, task * 1000 + round).queued()?;
                    if round % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    assert_eq!(device.current_stream(), *expected);
                    assert_eq!(device.download(&x).await?, [task * 1000 + round; 4]);
                    threads.insert(format!("{:?}", std::thread::current().id()));
                }
                Ok::<_, gpu_await::Error>((stream, threads.len()))
            }
        };
        tasks.push(tokio::spawn(async move {
            if scoped { stream.scope(body).await } else { body.await }
        }));
    }
    let mut most = 0;
    for (index, task) in tasks.into_iter().enumerate() {
        let (stream, threads) = task.await.expect("no task panics")?;
        most = most.max(threads);
        // A fill and a download a round, on its own stream and nowhere else.
        let expected = if index % 4 == 3 { 0 } else { 200 };
        assert!((expected..=expected + 1).contains(&stream.submitted()), "task {index}");
    }
    assert!(most > 1, "no task migrated");
    Ok(())
}

#[tokio::test]
async fn a_spawned_task_does_not_inherit_the_scope() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    stream
        .scope(async {
            let device = device.clone();
            let spawned = tokio::spawn(async move { goes_to(&device, device.default_stream()) });
            spawned.await.expect("it did not panic");
        })
        .await;
    Ok(())
}

/// Says which stream was current when it was woken.
struct Looks(std::sync::Mutex<Option<Option<u64>>>);

impl Wake for Looks {
    fn wake(self: Arc<Self>) {
        *self.0.lock().unwrap() = Some(Stream::current().map(|stream| stream.id()));
    }
}

#[tokio::test]
async fn host_functions_and_wakers_see_no_scope() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    stream
        .scope(async {
            let seen = device.host_fn(|| Stream::current().map(|stream| stream.id())).await?;
            assert_eq!(seen, None);
            let gate = Gate::close(&stream)?;
            let mut op = stream.done();
            let looks = Arc::new(Looks(std::sync::Mutex::default()));
            let waker = Waker::from(looks.clone());
            // Until it no longer wakes itself to check, and so is registered with the poller.
            loop {
                *looks.0.lock().unwrap() = None;
                assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
                if looks.0.lock().unwrap().is_none() {
                    break;
                }
            }
            gate.open();
            let end = std::time::Instant::now() + SOON;
            while looks.0.lock().unwrap().is_none() {
                assert!(std::time::Instant::now() < end, "never woken");
                std::thread::yield_now();
            }
            assert_eq!(*looks.0.lock().unwrap(), Some(None));
            op.await
        })
        .await
}

#[tokio::test]
async fn a_scope_that_could_not_be_ordered_refuses_work_and_poisons() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let mut x = device.full(4, 1u8).queued()?;
    let gate = Gate::close(device.default_stream())?;
    handle.fail_nth(DriverCall::StreamWaitEvent, 1, ErrorKind::Unsupported);
    stream
        .scope(async {
            let error = device.host_fn(|| ()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(device.record().unwrap_err().kind(), ErrorKind::Unsupported);
            device.fill(&mut x, 2).abandon();
        })
        .await;
    assert_eq!(stream.submitted(), 0);
    gate.open();
    let error = device.download(&x).await.unwrap_err();
    assert!(error.to_string().contains("fill"), "{error}");
    // The stream itself is as good as before.
    stream.fill(&mut x, 3).queued()?;
    assert_eq!(stream.scope(async { device.download(&x).await }).await?, [3; 4]);
    Ok(())
}

#[tokio::test]
async fn a_program_without_a_stream_in_sight_is_right() -> Result<()> {
    let device = testing::device();
    let axpy = kernels::axpy::load(&device).await?;
    let x = device.upload(vec![2.0f32; 1000]).queued()?;
    let mut y = device.ones::<f32>(1000).queued()?;
    for _ in 0..10 {
        axpy.launch(&device, 0.5, &x, &mut y).queued()?;
    }
    assert_eq!(device.download_vec(&y).await?, [11.0; 1000]);
    Ok(())
}

/// What it does when its thread ends.
struct AtTheEnd(Option<Box<dyn FnOnce()>>);

impl Drop for AtTheEnd {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

thread_local! {
    static AT_THE_END: std::cell::RefCell<AtTheEnd> =
        const { std::cell::RefCell::new(AtTheEnd(None)) };
}

/// Runs `act` in the destructor of a thread-local that was made before any other, so that it is dropped
/// last; panics do not come back from there.
fn in_a_destructor(device: &Device, act: impl FnOnce() + Send + 'static) {
    let device = device.clone();
    let thread = std::thread::spawn(move || {
        AT_THE_END.with(|end| end.borrow_mut().0 = Some(Box::new(act)));
        // Others, of this crate's as well.
        device.default_stream().scope_sync(|| assert!(Stream::current().is_some()));
        drop(device.thread_stream());
    });
    thread.join().expect("the thread itself");
}

#[test]
fn scopes_work_in_the_destructors_of_a_thread() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let (told, tells) = std::sync::mpsc::channel();
    let given = device.clone();
    in_a_destructor(&device, move || {
        let device = given;
        let tell = |ok: bool| told.send(ok).unwrap();
        tell(Stream::current().is_none());
        tell(device.current_stream() == *device.default_stream());
        // On a system whose thread-locals are gone by now a scope has no effect.
        let effect = !cfg!(target_os = "linux");
        tell(a.scope_sync(|| device.current_stream() == a) || effect);
        let nested = a.scope_sync(|| {
            // More than are kept without an allocation.
            fn down(device: &Device, streams: [&Stream; 2], depth: u32) -> bool {
                depth == 0
                    || streams[0].scope_sync(|| {
                        device.current_stream() == *streams[0]
                            && down(device, [streams[1], streams[0]], depth - 1)
                            && device.current_stream() == *streams[0]
                    })
            }
            down(&device, [&b, &a], 9) && device.current_stream() == a
        });
        tell(nested || effect);
        let inside = b.scope(async { device.current_stream() == b && device.done().await.is_ok() });
        tell(futures::executor::block_on(inside) || effect);
        let outside = catch_unwind(AssertUnwindSafe(|| a.scope_sync(|| panic!("on purpose"))));
        tell(outside.is_err() && Stream::current().is_none());
        let own = device.thread_stream();
        tell(own.is_ok_and(|own| {
            own.fill(&mut own.zeros(4).queued().unwrap(), 1).synchronize().is_ok()
        }));
        tell(device.host_fn(|| 3).synchronize().is_ok_and(|three| three == 3));
    });
    let told: Vec<bool> = tells.iter().collect();
    assert_eq!(told, [true; 8], "in this order, up to where it ended");
    // Nothing was left behind by the thread.
    goes_to(&device, device.default_stream());
}
