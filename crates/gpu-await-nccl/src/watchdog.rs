//! The watchdog: a thread that looks after communicators with pending work, and sleeps while there is none.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::communicator::shared::Shared;
use crate::quiet::Quiet;
use crate::stats;

/// How often it looks: what an error, a lost peer or a limit takes longer to be seen.
const EVERY: Duration = Duration::from_millis(20);

static WATCHED: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

/// What is pending, as far as it has looked.
pub(crate) fn quiet() -> &'static Quiet {
    static QUIET: OnceLock<Quiet> = OnceLock::new();
    QUIET.get_or_init(Quiet::new)
}

/// Looks after a communicator until it has no pending work.
pub(crate) fn watch(shared: Weak<Shared>) {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        // Without it errors and limits are not seen; operations go on.
        drop(stats::spawn("watchdog", run));
    });
    WATCHED.lock().push(shared);
    CHANGED.notify_one();
}

fn run() {
    loop {
        let mut watched = {
            let mut all = WATCHED.lock();
            while all.is_empty() {
                CHANGED.wait(&mut all);
            }
            std::mem::take(&mut *all)
        };
        std::thread::sleep(EVERY);
        // One that could not be looked after is looked after again.
        let look = |shared: Arc<Shared>| stats::contain(|| shared.look()).unwrap_or(true);
        watched.retain(|shared| shared.upgrade().is_some_and(look));
        WATCHED.lock().append(&mut watched);
    }
}
