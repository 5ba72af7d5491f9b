//! What a subscriber of `tracing` is told of the timeline. By itself: the subscriber is the process's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use gpu_await::{Device, Result, testing};
use tracing::field::{Field, Visit};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::under_test::child;

/// What a subscriber is told: the fields of the timeline's events.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<HashMap<&'static str, String>>>>, Arc<Mutex<Option<Device>>>);

impl<S: tracing::Subscriber> Layer<S> for Told {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Fields(HashMap<&'static str, String>);
        impl Visit for Fields {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0.insert(field.name(), format!("{value:?}"));
            }
        }
        if event.metadata().target() == "gpu_await::timeline" {
            let mut fields = Fields(HashMap::new());
            event.record(&mut fields);
            self.0.lock().unwrap().push(fields.0);
            let device = self.1.lock().unwrap().take();
            if let Some(device) = device {
                device.timeline().snapshot().expect("a trace");
            }
        }
    }
}

#[test]
fn a_subscriber_is_told_with_the_span() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::a_subscriber_is_told_with_the_span")) {
        return Ok(());
    }
    let told = Told::default();
    let subscriber = tracing_subscriber::registry().with(told.clone());
    tracing::subscriber::set_global_default(subscriber).expect("the only one");
    let device = testing::device();
    let stream = device.stream()?;
    device.timeline().start(100)?;
    let span = tracing::info_span!("request");
    let number = span.id().expect("a subscriber").into_u64();
    let mut x = span.in_scope(|| stream.full(1000, 1.0_f32).queued())?;
    stream.download(&x).synchronize()?;
    let trace = device.timeline().snapshot()?;
    let (told, again) = (told.0.lock().unwrap(), told.1.clone());
    assert_eq!(told.len(), trace.operations().len());
    for (fields, op) in told.iter().zip(trace.operations()) {
        assert_eq!(fields["op"], *op.name);
        assert_eq!(fields["ticket"], op.ticket.number.to_string());
        let device_us: f64 = fields["device_us"].parse().expect("a number");
        let (started, completed) = op.device_time().expect("its times");
        assert!(
            (device_us - (completed - started).as_nanos() as f64 / 1e3).abs() < 0.01,
            "{fields:?}"
        );
    }
    assert_eq!(told[0]["span"], number.to_string());
    assert_eq!((trace.operations()[0].span, trace.operations()[1].span), (Some(number), None));
    drop(told);

    // It may ask for a snapshot itself.
    *again.lock().unwrap() = Some(device.clone());
    stream.fill(&mut x, 1.0).synchronize()?;
    assert_eq!(device.timeline().snapshot()?.operations().len(), 3);
    assert!(again.lock().unwrap().is_none(), "it was asked");
    Ok(())
}
