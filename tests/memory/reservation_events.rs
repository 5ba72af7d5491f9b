//! What `tracing` hears of reservations: each that waited, each that was refused, once.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu_await::{Pressure, Result};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::reservations::{MIB, Task, limited};
use crate::under_test::child;

/// An event's fields.
#[derive(Default)]
struct Seen(BTreeMap<&'static str, String>);

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

#[derive(Clone, Default)]
struct Keeps(Arc<Mutex<Vec<Seen>>>);

impl<S: Subscriber> Layer<S> for Keeps {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "gpu_await::reservation" {
            assert_eq!(*event.metadata().level(), Level::DEBUG);
            let mut seen = Seen::default();
            event.record(&mut seen);
            self.0.lock().expect("no panic").push(seen);
        }
    }
}

impl Keeps {
    /// The one that came since the last look.
    fn one(&self) -> Seen {
        let mut all = std::mem::take(&mut *self.0.lock().expect("no panic"));
        assert_eq!(all.len(), 1);
        all.remove(0)
    }
}

#[test]
fn each_wait_and_refusal_is_an_event() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::each_wait_and_refusal_is_an_event")) {
        return Ok(());
    }
    let keeps = Keeps::default();
    let subscriber = tracing_subscriber::registry().with(keeps.clone());
    let _guard = tracing::subscriber::set_default(subscriber);
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let all = Task::new(device.reserve(MIB)).finish()?;
    assert!(keeps.0.lock().expect("no panic").is_empty(), "it did not wait");

    let error = device.try_reserve(1).unwrap_err();
    assert!(error.at().is_some_and(|at| at.file().ends_with("reservation_events.rs")));
    let Seen(refused) = keeps.one();
    assert_eq!((&*refused["reason"], &*refused["bytes"]), ("refused", "1"));
    assert_eq!(refused["error"], error.to_string());

    let mut waiting = Task::new(device.reserve(512));
    assert!(waiting.poll().is_pending());
    let late = Task::new(device.reserve(1).within(Duration::ZERO)).finish().unwrap_err();
    assert!(late.at().is_some_and(|at| at.file().ends_with("reservation_events.rs")));
    let Seen(late) = keeps.one();
    assert_eq!((&*late["reason"], &*late["waiting"]), ("late", "1"));

    drop(all);
    let granted = waiting.finish()?;
    let Seen(late) = keeps.one();
    assert_eq!((&*late["message"], &*late["bytes"]), ("granted late", "512"));
    assert!(late["at"].contains("reservation_events.rs"), "{late:?}");
    drop(granted);
    Ok(())
}
