//! Doorbells: how a sleeping poller is told that a marker was reached.
//!
//! A bell is a private stream that waits for a marker's event and then runs a host function, which makes the poller look at the marker's
//! stream. It serves one user stream at a time. A bell is only a hint: it may ring late or, on a faulted device, never; the poller's
//! time-out covers that. Bells are armed by the errands thread ([`Engine::errand`](super::engine::Engine::errand)): `cuLaunchHostFunc`
//! takes the driver's lock exclusively, and threads that launch without a pause may delay it a long time.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpu_await_protocol::sync::Mutex;

use super::attention::Attention;
use crate::backend::{Backend, DriverResult, RawStream, StreamOptions};
use crate::runtime::event_pool::EventHandle;

/// Bells of one device; more streams than this are served by the poller's time-out.
const BELLS: usize = 16;

#[derive(Default)]
pub(crate) struct Bells {
    bells: Mutex<Vec<Arc<Bell>>>,
}

pub(crate) struct Bell {
    stream: RawStream,
    /// Between being armed and having rung.
    armed: AtomicBool,
    /// The poller's next look at the stream that it was armed for.
    next_look: Mutex<Arc<AtomicU64>>,
    attention: Arc<Attention>,
}

impl Bells {
    /// Takes the streams for destruction.
    pub(crate) fn drain(&self) -> Vec<RawStream> {
        self.bells.lock().drain(..).map(|bell| bell.stream).collect()
    }

    /// Makes one more bell, up to a limit. Not on the poller's thread: while other threads launch without a pause, the driver may delay
    /// it for seconds.
    pub(crate) fn stock(
        &self,
        backend: &dyn Backend,
        attention: &Arc<Attention>,
    ) -> DriverResult<()> {
        let mut bells = self.bells.lock();
        if bells.len() < BELLS {
            let stream = backend.stream_create(StreamOptions::default())?;
            bells.push(Arc::new(Bell {
                stream,
                armed: AtomicBool::new(false),
                next_look: Mutex::default(),
                attention: attention.clone(),
            }));
        }
        Ok(())
    }

    /// A bell that is free, if there is one; it counts as armed from now on.
    pub(crate) fn take(&self) -> Option<Arc<Bell>> {
        // ORDERING: Acquire pairs with `ring`: a free bell's commands have finished.
        let free = |bell: &&Arc<Bell>| !bell.armed.swap(true, Ordering::Acquire);
        self.bells.lock().iter().find(free).cloned()
    }
}

impl Bell {
    /// Puts a taken bell behind `event`, of the stream that `next_look` belongs to; gives the bell back if the driver refuses.
    pub(crate) fn place(
        &self,
        backend: &dyn Backend,
        event: &EventHandle,
        next_look: &Arc<AtomicU64>,
    ) -> DriverResult<()> {
        *self.next_look.lock() = next_look.clone();
        // SAFETY: the bell's stream is private and lives as long as the engine; the handle keeps
        // the event.
        let waited = unsafe { backend.stream_wait_event(self.stream, event.raw()) };
        waited.inspect_err(|_| self.disarm())
    }

    /// Arms a bell that was placed.
    pub(crate) fn arm(self: Arc<Self>, backend: &dyn Backend) -> DriverResult<()> {
        let stream = self.stream;
        let data = Arc::into_raw(self);
        // SAFETY: `data` is a reference that the callback returns; if it never runs, it leaks and stays
        // valid.
        let rung = unsafe { backend.host_fn(stream, ring, data.cast_mut().cast()) };
        rung.inspect_err(|_| {
            // The reference is not taken back: the driver may report an earlier failure and still make the call. The extra ring is
            // harmless.
            // SAFETY: `data` came from `into_raw`, and that reference is leaked.
            unsafe { &*data }.disarm();
        })
    }

    /// Gives back a bell that was taken.
    pub(crate) fn disarm(&self) {
        // ORDERING: Release pairs with `take`.
        self.armed.store(false, Ordering::Release);
    }
}

/// The host function. It makes no driver call and cannot panic.
unsafe extern "C" fn ring(data: *mut c_void) {
    // SAFETY: `arm` passed a reference of its own, and the driver calls at most once.
    let bell = unsafe { Arc::from_raw(data.cast_const().cast::<Bell>()) };
    let next_look = std::mem::take(&mut *bell.next_look.lock());
    bell.disarm();
    // ORDERING: Release: the device has finished its earlier work; the look asks it.
    next_look.store(0, Ordering::Release);
    bell.attention.call();
}
