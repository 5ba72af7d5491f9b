//! Memory that outlives processes.

use std::time::Duration;

use gpu_await_worker::{Cause, Error, Worker, forget_kept, kept};

use crate::twin::{Do, Done, Filler, Start, Twin, lost, run, worker};

/// Who filled it.
fn filler(done: Result<Done, Error>) -> u32 {
    match done {
        Ok(Done::Number(pid)) => pid,
        other => panic!("{other:?}"),
    }
}

#[test]
fn kept_memory_outlives_its_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let name = || "outlives".to_owned();
        let first = filler(worker.call(Do::Keep(name(), Filler::Good)).await);
        assert_eq!(Some(first), worker.stats().process);
        for _ in 0..3 {
            lost(worker.call(Do::Abort).await);
            // A process that could not fill it again.
            let again = filler(worker.call(Do::Keep(name(), Filler::Fails)).await);
            assert_eq!(again, first, "it was filled once");
        }
        let found = kept().into_iter().find(|kept| kept.name == "outlives").unwrap();
        assert_eq!((found.gpu, found.info.len), (None, 1000));
        assert!(forget_kept(None, "outlives") && !forget_kept(None, "outlives"));
        assert_ne!(filler(worker.call(Do::Keep(name(), Filler::Good)).await), first);
    });
}

#[test]
fn a_death_while_filling_leaves_nothing() {
    run(async {
        let (one, other) = (worker().spawn().await.unwrap(), worker().spawn().await.unwrap());
        let name = || "half".to_owned();
        lost(one.call(Do::Keep(name(), Filler::Dies)).await);
        let failed = one.call(Do::Keep(name(), Filler::Fails)).await;
        assert_eq!(failed, Err(Error::Service("no weights".into())));
        assert!(kept().iter().all(|kept| kept.name != "half"));
        // One fills, the other waits for it, and gets what the first one filled.
        let slow = Filler::Slow(Duration::from_millis(100));
        let first = one.call(Do::Keep(name(), slow)).send();
        tokio::time::sleep(Duration::from_millis(30)).await;
        let second = other.call(Do::Keep(name(), Filler::Fails)).send();
        let (first, second) = (filler(first.await), filler(second.await));
        assert_eq!((Some(first), second), (one.stats().process, first));
        assert!(forget_kept(None, "half"));
        // The one that fills dies while the other waits: that fills it then.
        let never = one.call(Do::Keep(name(), Filler::Slow(Duration::from_secs(3600)))).send();
        tokio::time::sleep(Duration::from_millis(30)).await;
        let waits = other.call(Do::Keep(name(), Filler::Good)).send();
        lost(one.call(Do::Abort).await);
        lost(never.await);
        assert_eq!(Some(filler(waits.await)), other.stats().process);
        assert!(forget_kept(None, "half"));
    });
}

#[test]
fn only_the_memory_itself_is_kept() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        for len in [1000, 10] {
            let name = "swapped".to_owned();
            let swapped = worker.call(Do::Keep(name, Filler::Swaps(len))).await;
            let Err(Error::Service(why)) = swapped else { panic!("{swapped:?}") };
            assert!(why.contains("`swapped`"), "{why}");
            assert!(kept().iter().all(|kept| kept.name != "swapped"));
        }
        // The next one fills it.
        filler(worker.call(Do::Keep("swapped".to_owned(), Filler::Good)).await);
        assert!(forget_kept(None, "swapped"));
    });
}

#[test]
fn who_waits_for_kept_memory_says_so() {
    run(async {
        let one = worker().spawn().await.unwrap();
        let name = || "endless".to_owned();
        let endless = Filler::Slow(Duration::from_secs(3600));
        let _fills = one.call(Do::Keep(name(), endless)).send();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let start = Start { keep: Some(name()), ..Start::default() };
        let limit = Duration::from_millis(200);
        let other = Worker::<Twin>::builder(start).start_limit(limit).spawn().await;
        let Err(Error::GivenUp { cause, .. }) = other else { panic!("{other:?}") };
        let process = one.stats().process.unwrap();
        assert_eq!(cause, Cause::KeptNotFilled { name: name(), process, limit });
        // One that waits for itself does not wait.
        let nested = one.call(Do::Keep("nested".to_owned(), Filler::Nests));
        let nested = nested.deadline(Duration::from_secs(5)).await;
        let Err(Error::Service(why)) = nested else { panic!("{nested:?}") };
        assert!(why.contains("`nested`"), "{why}");
    });
}
