//! Many pending calls, odd limits, and what is told.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu_await::{Device, DeviceKind};
use gpu_await_nccl::{Communicator, Error, LostCause, Reduction, UniqueId};
use tracing::Level;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::child;
use crate::support;
use crate::support::{LIMIT, all, devices, within};

/// More than a stream takes.
const MANY: usize = 3000;

/// Ranks 0 and 1, each with a communicator of its own, as two processes have them; on host devices.
async fn pair() -> [Communicator; 2] {
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let devices = [Device::host(), Device::host()];
    let rank = |rank: usize| Communicator::builder(id, 2).rank(rank, &devices[rank]).connect();
    let (zero, one) = futures::try_join!(rank(0), rank(1)).expect("connected");
    [zero, one]
}

/// A thread that has filled a communicator waits for its peer, and nobody else does; a loss ends it.
#[tokio::test]
async fn a_full_communicator_blocks_no_other() {
    let ([full, _silent], [zero, one]) = (pair().await, pair().await);
    let calls = {
        let full = full.clone();
        std::thread::spawn(move || {
            (0..MANY).map(|_| full.barrier().submitted().err()).collect::<Vec<_>>()
        })
    };
    // It is full when it does not get further.
    let stream_is_full = async {
        loop {
            let throttled = tokio::time::timeout(Duration::from_millis(50), full.throttle(250));
            if throttled.await.is_err() {
                break;
            }
        }
    };
    within(stream_is_full).await;
    let others = tokio::task::spawn_blocking(move || (zero.barrier(), one.barrier()));
    let (zero, one) = within(others).await.expect("no panic");
    within(async { futures::try_join!(zero, one) }).await.expect("barriers");
    assert!(!calls.is_finished());
    let waits = full.throttle(0);
    within(full.abort()).await.expect("aborted");
    assert!(matches!(within(waits).await, Err(Error::Lost(_))));
    let calls = within(tokio::task::spawn_blocking(|| calls.join())).await;
    let refused = calls.expect("no panic").expect("no panic").into_iter().flatten();
    assert!(refused.clone().all(|error| Error::lost(&error).is_some()));
    assert!(refused.count() > MANY / 2, "of those that had no room");
}

#[tokio::test]
async fn throttle_counts_calls() {
    let [waits, _silent] = pair().await;
    let pending: Vec<_> = (0..20).map(|_| waits.barrier()).collect();
    within(waits.throttle(20)).await.expect("there is room for another");
    let full = tokio::time::timeout(Duration::from_millis(50), waits.throttle(19)).await;
    assert!(full.is_err(), "of 20 calls 19 seem to be pending");
    within(waits.abort()).await.expect("aborted");
    drop(pending);
}

#[tokio::test]
async fn a_limit_ends_the_wait_for_room() {
    let [full, _silent] = pair().await;
    full.set_limit(Some(Duration::from_millis(300)));
    let called = tokio::task::spawn_blocking(move || {
        (0..MANY).filter_map(|_| full.barrier().submitted().err()).next_back()
    });
    let last = within(called).await.expect("no panic").expect("an error");
    let lost = Error::lost(&last).expect("lost");
    assert!(matches!(lost.cause, LostCause::TimedOut { .. }), "{last}");
}

#[tokio::test]
async fn more_calls_than_a_stream_takes() {
    let _turn = support::turn().await;
    let devices = devices(2);
    let comm = all(&devices).await;
    let mut memory: Vec<_> =
        devices.iter().map(|device| device.ones::<u64>(8).queued().expect("memory")).collect();
    for _ in 0..MANY {
        let call = comm.group(|g| {
            let mut ranks = memory.iter_mut().enumerate();
            ranks.try_for_each(|(rank, x)| g.rank(rank)?.all_reduce_in_place(x, Reduction::Max))
        });
        call.queued().expect("room");
    }
    for (device, x) in devices.iter().zip(&memory) {
        assert_eq!(within(device.download(x)).await.expect("data"), [1; 8]);
    }
}

#[tokio::test]
async fn limits_without_end_and_of_nothing() {
    let device = Device::host();
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let builder = Communicator::builder(id, 1).rank(0, &device);
    let comm = within(builder.connect_limit(Duration::MAX).connect()).await.expect("connected");
    let mut x = device.ones::<f32>(4).queued().expect("memory");
    for endless in [Duration::MAX, Duration::from_secs(1 << 35), Duration::from_secs(1 << 40)] {
        comm.set_limit(Some(endless));
        assert_eq!(comm.limit(), None);
        within(comm.all_reduce_in_place(&mut x, Reduction::Sum)).await.expect("no limit");
    }
    for limit in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 34)] {
        comm.set_limit(Some(limit));
        assert_eq!(comm.limit(), Some(limit));
    }
}

#[tokio::test]
async fn an_abort_needs_no_poll() {
    let [zero, _silent] = pair().await;
    let op = zero.barrier();
    drop(zero.abort());
    let error = within(op).await.unwrap_err();
    assert!(matches!(Error::lost(&error).expect("lost").cause, LostCause::Aborted), "{error}");
}

/// What the closure ignores is no secret: the group is refused as a whole.
#[tokio::test]
async fn a_refused_call_that_its_group_ignores() {
    let devices = [Device::host(), Device::host()];
    let comm = all(&devices).await;
    let mut x = devices[0].ones::<f32>(4).queued().expect("memory");
    let mut y = devices[1].ones::<f32>(4).queued().expect("memory");
    let op = comm.group(|g| {
        g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
        let _ignored = g.rank(1)?.broadcast_in_place(&mut y, 7);
        Ok(())
    });
    let error = within(op).await.unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::BadRank { rank: 7, world: 2 })), "{error}");
    let op = comm.group(|g| {
        let _ignored = g.rank(5);
        Ok(())
    });
    let error = within(op).await.unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::NotLocal { rank: 5, .. })), "{error}");
    assert!(comm.lost().is_none());
    // It counts as failed, and for the same reason.
    let error = within(devices[0].download(&x)).await.unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::BadRank { rank: 7, world: 2 })), "{error}");
}

/// What was recorded before fails with it as well.
#[tokio::test]
async fn a_loss_while_a_group_is_recorded() {
    let devices = [Device::host(), Device::host()];
    let comm = all(&devices).await;
    let mut x = devices[0].ones::<f32>(4).queued().expect("memory");
    let mut y = devices[1].ones::<f32>(4).queued().expect("memory");
    let op = comm.group(|g| {
        g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
        drop(comm.abort());
        g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum)
    });
    let read = devices[0].download(&x);
    for error in [within(op).await.unwrap_err(), within(read).await.unwrap_err()] {
        assert!(Error::lost(&error).is_some(), "{error}");
    }
}

/// Levels and causes of losses.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<(Level, String)>>>);

impl<S: tracing::Subscriber> Layer<S> for Told {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Cause(String);
        impl tracing::field::Visit for Cause {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "cause" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        if event.metadata().target() == "gpu_await_nccl" {
            let mut cause = Cause(String::new());
            event.record(&mut cause);
            self.0.lock().unwrap().push((*event.metadata().level(), cause.0));
        }
    }
}

#[test]
fn losses_are_traced() {
    if child::parameter().is_none() {
        child::run(concat!(module_path!(), "::losses_are_traced"), "");
        return;
    }
    let told = Told::default();
    let subscriber = tracing_subscriber::registry().with(told.clone());
    let _guard = tracing::subscriber::set_default(subscriber);
    // The loss is told by the thread that aborts: this one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let [zero, _silent] = pair().await;
        zero.set_limit(Some(LIMIT));
        within(zero.abort()).await.expect("aborted");
    });
    assert_eq!(*told.0.lock().unwrap(), [(Level::INFO, "it was aborted".to_owned())]);
}
