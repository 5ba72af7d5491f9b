//! The watchdog: a thread that looks after communicators with pending work, and sleeps while there is none.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::stats;
use gpu_await::sibling::PerProcess;

/// How often it looks: the delay with which an error, a lost peer or an exceeded limit is seen.
const EVERY: Duration = Duration::from_millis(20);

static WATCHDOG: PerProcess<Watchdog> = PerProcess::new(Watchdog::new);

/// Something that has pending work.
pub(crate) trait LookedAfter: Send + Sync {
    /// Looks once. False: nothing is pending, and it is not looked after any more.
    fn look(&self) -> bool;
}

struct Watchdog {
    watched: Mutex<Vec<Weak<dyn LookedAfter>>>,
    changed: Condvar,
    started: OnceLock<()>,
}

impl Watchdog {
    fn new() -> Self {
        let (watched, changed, started) = (Mutex::default(), Condvar::new(), OnceLock::new());
        Watchdog { watched, changed, started }
    }
}

/// Looks after a communicator until it has no pending work.
pub(crate) fn watch(communicator: Weak<dyn LookedAfter>) {
    let watchdog = WATCHDOG.get();
    watchdog.started.get_or_init(|| {
        // Without the thread errors and limits are not seen; operations go on.
        drop(stats::spawn("watchdog", run));
    });
    watchdog.watched.lock().push(communicator);
    watchdog.changed.notify_one();
}

fn run() {
    let watchdog = WATCHDOG.get();
    loop {
        let mut watched = {
            let mut all = watchdog.watched.lock();
            while all.is_empty() {
                watchdog.changed.wait(&mut all);
            }
            std::mem::take(&mut *all)
        };
        std::thread::sleep(EVERY);
        // After a panic it is looked after again.
        let look = |it: Arc<dyn LookedAfter>| stats::contain(|| it.look()).unwrap_or(true);
        watched.retain(|it| it.upgrade().is_some_and(look));
        watchdog.watched.lock().append(&mut watched);
    }
}
