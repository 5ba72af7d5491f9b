//! Refusals of pools, batchers and services: each is an event, is counted, and names who refused.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing;
use gpu_await::{Batcher, Error, ErrorDetail, PoolShare, PooledStream, Result, StreamPool};
use tower::Service;
use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::under_test::child;
use crate::under_test::eventually::eventually;
use crate::under_test::held_pool::hold_for;

const MOMENT: Duration = Duration::from_millis(20);

/// An event's fields, and the span that it is in.
#[derive(Clone, Debug, Default)]
struct Seen {
    fields: BTreeMap<&'static str, String>,
    span: Option<&'static str>,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}

impl Seen {
    fn of(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", |value| value)
    }

    /// Who refused, and why.
    fn told(&self) -> [&str; 4] {
        ["by", "name", "share", "reason"].map(|field| self.of(field))
    }
}

/// Keeps the events of refusals on this thread.
#[derive(Clone, Default)]
struct Keeps(Arc<Mutex<Vec<Seen>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Keeps {
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != "gpu_await::refusal" {
            return;
        }
        assert_eq!(*event.metadata().level(), Level::DEBUG);
        let span = context.event_span(event).map(|span| span.name());
        let mut seen = Seen { span, ..Seen::default() };
        event.record(&mut seen);
        self.0.lock().expect("no panic").push(seen);
    }
}

impl Keeps {
    fn begin() -> (Keeps, DefaultGuard) {
        let keeps = Keeps::default();
        let subscriber = tracing_subscriber::registry().with(keeps.clone());
        (keeps, tracing::subscriber::set_default(subscriber))
    }

    /// The one that came since the last look.
    fn one(&self) -> Seen {
        let mut all = std::mem::take(&mut *self.0.lock().expect("no panic"));
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }
}

fn refused<T>(result: Result<T>) -> Error {
    result.map(drop).expect_err("it was let in")
}

#[tokio::test]
async fn every_refusal_is_an_event() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::every_refusal_is_an_event")) {
        return Ok(());
    }
    let (keeps, _guard) = Keeps::begin();
    let device = testing::device();
    let builder = StreamPool::builder().name("lane").streams(&device, 1).max_in_flight(1);
    let all = builder.max_waiting(1).share(PoolShare::new("train")).build()?;
    let pool = all.with_share("train")?;
    let asks = tracing::info_span!("asks");

    let held = pool.try_acquire()?;
    let full = asks.in_scope(|| refused(pool.try_acquire()));
    let ErrorDetail::Overloaded { by, .. } = full.detail() else { panic!("{full}") };
    assert_eq!((by.name.as_deref(), by.share.as_deref()), (Some("lane"), Some("train")));
    assert!(full.to_string().starts_with("the stream pool `lane` (share `train`) is full"));
    let seen = keeps.one();
    assert_eq!(seen.told(), ["stream pool", "lane", "train", "full"]);
    assert_eq!((seen.span, seen.of("requests"), seen.of("waiting")), (Some("asks"), "1", "0"));
    assert_eq!(seen.of("error"), full.to_string());

    // Told while it waits, and told nobody as nobody asks any more.
    for is_asked in [true, false] {
        let mut waits = pool.acquire_by(Instant::now() + MOMENT);
        assert!((&mut waits).now_or_never().is_none(), "the permit is taken");
        let before = pool.stats().expired;
        eventually("it expired", || pool.stats().expired > before);
        match is_asked {
            true => drop(refused(waits.await)),
            false => drop(waits),
        }
        let seen = keeps.one();
        assert_eq!(seen.told(), ["stream pool", "lane", "train", "expired"]);
        assert!(seen.of("waited_us").parse::<u64>().is_ok_and(|us| us > 0), "{seen:?}");
    }
    drop(held);

    // Held for longer than the next one has time.
    hold_for(&pool, 2 * MOMENT).await?;
    let held = pool.acquire().await?;
    let late = refused(pool.acquire_by(Instant::now() + MOMENT).await);
    assert!(matches!(late.detail(), ErrorDetail::TooLate { .. }), "{late}");
    let seen = keeps.one();
    assert_eq!(seen.told(), ["stream pool", "lane", "train", "late"]);
    for field in ["remaining_us", "expected_us", "takes_us"] {
        assert!(seen.of(field).parse::<u64>().is_ok(), "{field}: {seen:?}");
    }

    // Whoever goes is no refusal.
    let mut waits = Box::pin(pool.acquire());
    assert!((&mut waits).now_or_never().is_none(), "the permit is held");
    drop(waits);
    assert!(keeps.0.lock().expect("no panic").is_empty());
    let stats = all.stats();
    assert_eq!((stats.given_up, stats.shares[1].given_up), (1, 1));

    // Of the share that has no name.
    drop(refused(all.try_acquire()));
    assert_eq!(keeps.one().told(), ["stream pool", "lane", "", "full"]);
    drop(held);
    all.close();
    let closed = refused(pool.try_acquire());
    assert_eq!(closed.to_string(), "the stream pool `lane` (share `train`) was closed");
    assert_eq!(keeps.one().told(), ["stream pool", "lane", "train", "closed"]);

    let stats = all.stats();
    let of = |share: usize| {
        let share = &stats.shares[share];
        [share.refused, share.refused_early, share.expired, share.closed]
    };
    assert_eq!((of(0), of(1)), ([1, 0, 0, 0], [2, 1, 2, 1]));
    let sums = [stats.refused, stats.refused_early, stats.expired, stats.closed];
    assert_eq!(sums, [3, 1, 2, 1]);
    assert_eq!(stats.granted, stats.shares.iter().map(|share| share.granted).sum::<u64>());
    Ok(())
}

#[tokio::test]
async fn every_refusal_of_a_batcher_is_an_event() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::every_refusal_of_a_batcher_is_an_event")) {
        return Ok(());
    }
    let (keeps, _guard) = Keeps::begin();
    let device = testing::device();
    let pool = device.streams(1)?;
    let builder = Batcher::builder().name("embed").max_waiting(1).pool(&pool);
    let run = |_: PooledStream, batch: gpu_await::Batch<u32>| async move {
        Ok::<_, Error>(batch.into_iter().map(Ok).collect())
    };
    let (batcher, worker) = builder.build(run);
    let asks = tracing::info_span!("asks");
    drop(batcher.call(0));
    assert_eq!(batcher.stats().given_up, 1);
    let waits = asks.in_scope(|| batcher.call_by(1, Instant::now() + MOMENT));
    let full = refused(batcher.call(2).await);
    assert!(full.to_string().starts_with("the batcher `embed` is full"), "{full}");
    assert_eq!(keeps.one().told(), ["batcher", "embed", "", "full"]);

    // The worker comes too late.
    let start = Instant::now();
    while start.elapsed() < 2 * MOMENT {
        tokio::task::yield_now().await;
    }
    let mut worker = Box::pin(worker);
    assert!((&mut worker).now_or_never().is_none(), "a batcher is there");
    assert!(matches!(refused(waits.await).detail(), ErrorDetail::Expired { .. }));
    let seen = keeps.one();
    assert_eq!((seen.told(), seen.span), (["batcher", "embed", "", "expired"], Some("asks")));

    // No stream for a batch: the pool says so as well.
    pool.close();
    let waits = batcher.call(3);
    assert!((&mut worker).now_or_never().is_none(), "a batcher is there");
    drop(refused(waits.await));
    let all = std::mem::take(&mut *keeps.0.lock().expect("no panic"));
    let told: Vec<_> = all.iter().map(|seen| (seen.told(), seen.span)).collect();
    let expected = [
        (["stream pool", "", "", "closed"], None),
        (["batcher", "embed", "", "closed"], Some("batch")),
    ];
    assert_eq!(told, expected);

    // Its worker goes, with one that waits and one behind that.
    let waits = asks.in_scope(|| batcher.call(4));
    drop(worker);
    assert_eq!(keeps.one().span, Some("asks"));
    assert_eq!(refused(waits.await).to_string(), "the batcher `embed` was closed");
    drop(refused(batcher.call(5).await));
    assert_eq!(keeps.one().told(), ["batcher", "embed", "", "closed"]);
    let stats = batcher.stats();
    let counted = [stats.refused, stats.refused_early, stats.expired, stats.closed];
    assert_eq!(counted, [1, 0, 1, 3]);
    Ok(())
}

#[tokio::test]
async fn services_refuse_as_what_they_serve() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::services_refuse_as_what_they_serve")) {
        return Ok(());
    }
    let (keeps, _guard) = Keeps::begin();
    let device = testing::device();
    let pool = StreamPool::builder().name("lane").streams(&device, 1).max_in_flight(1).build()?;
    let held = pool.try_acquire()?;
    let eager = pool.with_patience(Duration::ZERO);
    let mut service = eager.service(|_: PooledStream, ()| async { Ok::<_, Error>(()) });
    drop(refused(service.call(()).await));
    assert_eq!(keeps.one().told(), ["stream pool", "lane", "", "full"]);
    drop(held);

    let (batcher, worker) = Batcher::builder()
        .name("embed")
        .build(|batch: Vec<()>| async move { Ok::<_, Error>(batch.into_iter().map(Ok).collect()) });
    drop(worker);
    drop(refused(batcher.service().call(()).await));
    assert_eq!(keeps.one().told(), ["batcher", "embed", "", "closed"]);
    Ok(())
}
