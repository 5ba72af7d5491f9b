//! Events that come back after their engine is gone: kept by a handle of a user's, or by an entry of a log.

use std::sync::Arc;

use crate::backend::{Backend, RawEvent};
use crate::runtime::event_pool::Destroy;
use crate::thread::worker;
use gpu_await_protocol::sync::Mutex;

/// Destroys events that come back after their engine is gone, on one thread however many they are; until `main` returns.
pub(super) fn destroy_later(backend: &Arc<dyn Backend>) -> Destroy {
    let backend = backend.clone();
    // Some while a thread destroys events: those that it has not taken yet.
    let late: Arc<Mutex<Option<Vec<RawEvent>>>> = Arc::default();
    Arc::new(move |event| {
        let mut waiting = late.lock();
        if let Some(waiting) = &mut *waiting {
            return waiting.push(event);
        }
        *waiting = Some(vec![event]);
        drop(waiting);
        let (backend, late) = (backend.clone(), late.clone());
        worker::last_act(move || {
            loop {
                let events = {
                    let mut waiting = late.lock();
                    let Some(events) = waiting.take().filter(|events| !events.is_empty()) else {
                        return;
                    };
                    *waiting = Some(Vec::new());
                    events
                };
                for event in events {
                    // SAFETY: the event was pooled: it has no other holder.
                    let _ = unsafe { backend.event_destroy(event) };
                }
            }
        });
    })
}
