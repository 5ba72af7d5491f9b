//! The pure modules of the crate, from their sources, under every interleaving that loom finds.
#![forbid(unsafe_code)]

#[path = "../src/quiet.rs"]
mod quiet;

/// Loom's types.
mod sync {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
}

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use loom::thread;
use quiet::Quiet;

/// Loom's waits have no end.
const LIMIT: Duration = Duration::from_secs(1);

/// What has passed. Loom does not see it.
#[derive(Default)]
struct Record {
    passed: AtomicUsize,
}

impl Record {
    fn free(&self) {
        assert_eq!(self.passed.load(Ordering::SeqCst), 0);
        thread::yield_now();
        assert_eq!(self.passed.load(Ordering::SeqCst), 0);
    }
}

/// Frees a communicator on a thread.
fn freer(quiet: &Arc<Quiet>, record: &Arc<Record>) -> thread::JoinHandle<()> {
    let (quiet, record) = (quiet.clone(), record.clone());
    thread::spawn(move || quiet.free(|| record.free()))
}

/// A call that is entered.
fn pass(quiet: &Quiet, record: &Record) {
    quiet.pass(LIMIT);
    record.passed.fetch_add(1, Ordering::SeqCst);
    thread::yield_now();
    record.passed.fetch_sub(1, Ordering::SeqCst);
}

/// Two calls of one communicator, of which the first makes it pending.
#[test]
fn what_passes_is_not_beside_a_free() {
    loom::model(|| {
        let (quiet, record) = (Arc::new(Quiet::new()), Arc::new(Record::default()));
        let freer = freer(&quiet, &record);
        quiet.begin();
        let calls = (quiet.clone(), record.clone());
        let other = thread::spawn(move || pass(&calls.0, &calls.1));
        pass(&quiet, &record);
        other.join().expect("it passes");
        quiet.end();
        freer.join().expect("it is freed");
    });
}

/// Two threads free others.
#[test]
fn what_passes_is_beside_neither_free() {
    loom::model(|| {
        let (quiet, record) = (Arc::new(Quiet::new()), Arc::new(Record::default()));
        let freers = [freer(&quiet, &record), freer(&quiet, &record)];
        quiet.begin();
        pass(&quiet, &record);
        quiet.end();
        for freer in freers {
            freer.join().expect("it is freed");
        }
    });
}

/// Whoever waits for quiet when the process ends goes, and frees nothing.
#[test]
fn nothing_is_freed_at_the_end() {
    loom::model(|| {
        let quiet = Arc::new(Quiet::new());
        quiet.begin();
        let frees = quiet.clone();
        let freer = thread::spawn(move || frees.free(|| unreachable!("it is not quiet")));
        quiet.end_all();
        freer.join().expect("it goes");
    });
}
