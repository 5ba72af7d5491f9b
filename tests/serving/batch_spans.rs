//! The span of a batch: which spans it follows from, and its times. A subscriber for the whole process, so one test.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use gpu_await::{Batch, Batcher, Device, Error, PooledStream, Result};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Instrument, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::under_test::child;

/// What is known of the batches' spans.
#[derive(Default)]
struct Seen {
    fields: BTreeMap<&'static str, u64>,
    follows_from: Vec<u64>,
}

/// Keeps the spans of batches by their numbers.
#[derive(Clone, Default)]
struct Keeps(Arc<Mutex<BTreeMap<u64, Seen>>>);

impl Visit for Seen {
    /// Signed, as OpenTelemetry has it: a text otherwise.
    fn record_i64(&mut self, field: &Field, value: i64) {
        let value = u64::try_from(value).expect("a figure");
        self.fields.insert(field.name(), value);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl Keeps {
    fn with(&self, id: &Id, change: impl FnOnce(&mut Seen)) {
        if let Some(seen) = self.0.lock().expect("no panic").get_mut(&id.into_u64()) {
            change(seen);
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Keeps {
    fn on_new_span(&self, span: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        if span.metadata().target() == "gpu_await::batch" {
            assert_eq!(span.metadata().name(), "batch");
            self.0.lock().expect("no panic").insert(id.into_u64(), Seen::default());
            self.with(id, |seen| span.record(seen));
        }
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, _: Context<'_, S>) {
        self.with(id, |seen| record.record(seen));
    }

    fn on_follows_from(&self, id: &Id, from: &Id, _: Context<'_, S>) {
        self.with(id, |seen| seen.follows_from.push(from.into_u64()));
    }
}

#[tokio::test]
async fn a_batch_follows_from_its_requests() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::a_batch_follows_from_its_requests")) {
        return Ok(());
    }
    let keeps = Keeps::default();
    let subscriber = tracing_subscriber::registry().with(keeps.clone());
    tracing::subscriber::set_global_default(subscriber).expect("the first");
    let pool = Device::host().streams(1)?;
    let inside = Arc::new(Mutex::new(None));
    let current = inside.clone();
    let run = move |stream: PooledStream, batch: Batch<u32>| {
        let current = current.clone();
        async move {
            *current.lock().expect("no panic") = tracing::Span::current().id();
            stream.done().await?;
            Ok::<_, Error>(batch.into_iter().map(Ok).collect())
        }
    };
    let (batcher, worker) = Batcher::builder().pool(&pool).build(run);
    let spans = [tracing::info_span!("first"), tracing::info_span!("second")];
    let requests: Vec<u64> =
        spans.iter().filter_map(|span| span.id()).map(|id| id.into_u64()).collect();
    let calls = [1, 2].map(|n| spans[n as usize - 1].in_scope(|| batcher.with_weight(3).call(n)));
    drop(batcher);
    let worker = worker.instrument(tracing::info_span!("the worker's"));
    let (answers, ()) = futures::future::join(futures::future::try_join_all(calls), worker).await;
    assert_eq!(answers?, [1, 2]);

    let keeps = keeps.0.lock().expect("no panic");
    assert_eq!(keeps.len(), 1);
    let (id, seen) = keeps.first_key_value().expect("there is one");
    // What the function's own spans and events are in.
    assert_eq!(inside.lock().expect("no panic").as_ref().map(Id::into_u64), Some(*id));
    assert_eq!(seen.follows_from, requests);
    let of = |name: &str| seen.fields.get(name).copied().unwrap_or_else(|| panic!("no {name}"));
    assert_eq!((of("requests"), of("weight")), (2, 6));
    assert!(of("permit_us") <= of("queue_us"));
    assert!(of("queue_us").max(of("run_us")) <= of("answer_us"));
    Ok(())
}
