//! The timeline of a process's device, through the supervisor.

use std::time::Duration;

use gpu_await_worker::{Cause, Error, Guilt, Restart, Worker};

use crate::twin::{Do, Done, Twin, eventually, kill, lost, run, signal, worker};

const LONG: Duration = Duration::from_secs(3600);

async fn double(worker: &Worker<Twin>, often: u32) {
    for n in 0..often {
        let doubled = worker.call(Do::Double(vec![n as f32])).await;
        assert_eq!(doubled, Ok(Done::Floats(vec![2.0 * n as f32])));
    }
}

/// How often a word is in it.
fn count(timeline: &[u8], word: &str) -> usize {
    timeline.windows(word.len()).filter(|part| *part == word.as_bytes()).count()
}

/// How many packets it has, of which each says how long it is: no byte is missing.
fn packets(mut timeline: &[u8]) -> usize {
    let mut packets = 0;
    while let [tag, rest @ ..] = timeline {
        assert_eq!(*tag, 0x0a, "field 1 of a trace");
        let varint = rest.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
        let digits = rest[..varint].iter().rev();
        let len = digits.fold(0, |len, byte| len << 7 | usize::from(byte & 0x7f));
        timeline = &rest[varint..][len..];
        packets += 1;
    }
    packets
}

#[test]
fn a_timeline_comes_from_the_process() {
    run(async {
        for message_bytes in [64, 64 << 10] {
            let worker = worker().timeline(100).most_message_bytes(message_bytes).spawn().await;
            let worker = worker.unwrap();
            let empty = worker.timeline().await.unwrap();
            assert!(!empty.is_empty() && count(&empty, "upload") == 0);
            double(&worker, 5).await;
            // Beside calls, and for two at once: both have asked when it goes on.
            let pid = worker.stats().process.unwrap();
            signal(pid, libc::SIGSTOP);
            let goes_on = async { signal(pid, libc::SIGCONT) };
            let (one, other, ..) =
                futures::join!(worker.timeline(), worker.timeline(), goes_on, double(&worker, 20));
            assert!(one.is_ok() && one == other);
            let whole = worker.timeline().await.unwrap();
            assert!(count(&whole, "upload") > 0 && count(&whole, "download") > 0);
            assert!(packets(&whole) > packets(&empty));
            // Of the last hundred alone.
            double(&worker, 100).await;
            let last = worker.timeline().await.unwrap();
            assert!(packets(&last) > 100 && last.len() < 10 * whole.len(), "{}", last.len());
        }
    });
}

#[test]
fn a_long_timeline_comes_in_parts() {
    run(async {
        // Longer than sixteen messages.
        let worker = worker().timeline(1 << 16).spawn().await.unwrap();
        let mut timeline = Vec::new();
        while timeline.len() < 1 << 20 {
            let often = Do::DoubleOften(vec![1.0], Duration::from_millis(50));
            assert_eq!(worker.call(often).await, Ok(Done::Nothing));
            timeline = worker.timeline().await.unwrap();
        }
        assert!(packets(&timeline) > 1000);
    });
}

#[test]
fn a_timeline_ends_with_its_process() {
    run(async {
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let worker = worker().threads(1).timeline(10).restart(restart).spawn().await.unwrap();
        let blocks = worker.call(Do::Block(1, LONG)).send();
        eventually("it runs", || worker.stats().running == 1);
        // It does not read what it is asked.
        let mut timelines = [(); 3].map(|()| Box::pin(worker.timeline()));
        for timeline in &mut timelines {
            assert!(futures::poll!(timeline).is_pending());
        }
        kill(&worker);
        for timeline in timelines {
            let lost = lost(timeline.await);
            assert_eq!((lost.cause, lost.guilt), (Cause::Signal(9), Guilt::Innocent));
        }
        lost(blocks.await);
        // The next one has its own.
        assert!(worker.timeline().await.is_ok());
        // A worker that ends answers as well.
        let blocks = worker.call(Do::Block(1, LONG)).send();
        eventually("it runs", || worker.stats().running == 1);
        let mut timeline = Box::pin(worker.timeline());
        assert!(futures::poll!(&mut timeline).is_pending());
        worker.clone().close(Duration::ZERO).await;
        assert!(timeline.await.is_err());
        lost(blocks.await);
        assert_eq!(worker.timeline().await, Err(Error::Closed));
    });
}

#[test]
fn a_process_that_is_replaced_sends_its_timeline() {
    run(async {
        // Many short messages; and the other process stands by, so that the end is asked for in the next moment.
        let worker = worker().standby(true).timeline(100).most_message_bytes(64).spawn().await;
        let worker = worker.unwrap();
        for round in 1..=5 {
            double(&worker, 50).await;
            eventually("another one stands by", || worker.stats().standby.is_some());
            let (timeline, replaced) = futures::join!(worker.timeline(), worker.replace());
            assert_eq!(replaced, Ok(()));
            assert!(packets(&timeline.unwrap()) > 50);
            assert_eq!((worker.stats().replacements, worker.stats().deaths), (round, 0));
        }
    });
}

#[test]
fn a_timeline_is_asked_for_first() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let none = worker.timeline().await;
        assert!(matches!(none, Err(Error::Unfit { found: 0, limit: 1, .. })), "{none:?}");
        let spawned = crate::twin::worker().timeline((1 << 16) + 1).spawn().await;
        assert!(matches!(spawned, Err(Error::Unfit { limit: 65_536, .. })), "{spawned:?}");
    });
}
