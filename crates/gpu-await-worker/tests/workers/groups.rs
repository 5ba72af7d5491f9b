//! Workers that are called as one, on two host devices, one of which is lost.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gpu_await_worker::{Blame, Error, Group, Guilt, Health, Restart, Stats, Worker, WorkerBuilder};

use crate::twin::{
    Do, Done, Start, Twin, Use, eventually, kill, lives, lost, run, worker, written,
};

const LONG: Duration = Duration::from_secs(3600);

fn quick() -> Restart {
    let (first_delay, most_delay) = (Duration::from_millis(2), Duration::from_millis(100));
    Restart { first_delay, most_delay, ..Restart::default() }
}

/// Two workers.
fn two(builder: impl Fn() -> WorkerBuilder<Twin>) -> [WorkerBuilder<Twin>; 2] {
    [builder().restart(quick()), builder().restart(quick())]
}

fn at(group: &Group<Twin>, number: usize) -> Worker<Twin> {
    group.workers().nth(number).unwrap()
}

async fn pid(group: &Group<Twin>) -> u32 {
    match group.call(Do::Pid).await {
        Ok(Done::Number(pid)) => pid,
        other => panic!("{other:?}"),
    }
}

/// A device whose processes start once for each time that it is mended.
struct Fragile(PathBuf);

impl Fragile {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("gpu-await-group-{}-{next}", std::process::id());
        let fragile = Fragile(std::env::temp_dir().join(name));
        fragile.mend();
        fragile
    }

    fn mend(&self) {
        std::fs::write(&self.0, "").unwrap();
    }

    fn name(&self) -> String {
        self.0.to_str().unwrap().to_owned()
    }

    fn worker(&self) -> WorkerBuilder<Twin> {
        let worker = Worker::builder(Start { once: Some(self.name()), ..Start::default() });
        worker.threads(2).restart(quick())
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

#[test]
fn the_least_loaded_has_a_call() {
    run(async {
        let group = Group::spawn(two(worker)).await.unwrap();
        let stats = group.stats();
        let pids: Vec<_> = stats.workers.iter().map(|stats| stats.process.unwrap()).collect();
        let mut had = Vec::new();
        for _ in 0..6 {
            had.push(pid(&group).await);
        }
        // Equals in turn.
        assert!(
            had.chunks(2).all(|two| two.contains(&pids[0]) && two.contains(&pids[1])),
            "{had:?}"
        );
        // One that has something to do, and nobody waits for it any more, has no other.
        drop(group.call(Do::Later(1, LONG)).send());
        let stats = group.stats();
        let idle = stats.workers.iter().position(|stats| stats.calls == 0).unwrap();
        for _ in 0..6 {
            assert_eq!(pid(&group).await, pids[idle]);
        }
        group.close(Duration::ZERO).await;
        assert!(!pids.into_iter().any(lives));
    });
}

#[test]
fn a_lost_gpu_loses_no_idempotent_call() {
    run(async {
        let device = Fragile::new();
        let group = Group::spawn([worker().restart(quick()), device.worker()]).await.unwrap();
        let clients: Vec<_> = (0..16u32)
            .map(|client| {
                let group = group.clone();
                tokio::spawn(async move {
                    let (mut all, mut answered) = (0, 0);
                    // Until some time after one of them is out.
                    let mut until = None;
                    while until.is_none_or(|until| Instant::now() < until) {
                        let n = client * 1_000_000 + all;
                        let call = group.call(Do::Later(n, Duration::from_millis(1)));
                        all += 1;
                        match call.payload(vec![7; 100]).idempotent().await {
                            Ok(answer) => {
                                assert_eq!(answer, Done::Number(n));
                                answered += 1;
                            }
                            Err(error) => println!("{error:?}"),
                        }
                        let is_out = group.stats().workers[1].health == Some(Health::GivenUp);
                        if until.is_none() && is_out {
                            until = Some(Instant::now() + Duration::from_millis(50));
                        }
                    }
                    (all, answered)
                })
            })
            .collect();
        // It has calls to lose.
        let is_at_work = |stats: &Stats| stats.answered >= 100 && stats.running > 0;
        while !is_at_work(&group.stats().workers[1]) {
            tokio::task::yield_now().await;
        }
        kill(&at(&group, 1));
        let (mut all, mut answered) = (0, 0);
        for client in clients {
            let (made, good) = client.await.unwrap();
            (all, answered) = (all + made, answered + good);
        }
        let stats = group.stats();
        println!("{answered} of {all} answered, {} went on elsewhere", stats.moved);
        assert!(f64::from(answered) >= 0.99 * f64::from(all), "{answered} of {all}");
        // Three starts that failed, those that waited went to the other one, and that lived.
        assert!(stats.workers[1].deaths >= 4, "{stats:?}");
        assert!(stats.moved > 0 && stats.workers[0].deaths == 0, "{stats:?}");
    });
}

#[test]
fn a_gpu_that_probes_well_is_back() {
    run(async {
        let device = Fragile::new();
        let group = Group::spawn([device.worker(), worker().restart(quick())]).await.unwrap();
        let is =
            |health| move |group: &Group<Twin>| group.stats().workers[0].health == Some(health);
        for _ in 0..3 {
            kill(&at(&group, 0));
            eventually("it is out", || is(Health::GivenUp)(&group));
            let deaths = group.stats().workers[0].deaths;
            // Its probes fail, and calls have another one.
            eventually("it is probed", || group.stats().workers[0].deaths >= deaths + 2);
            let other = group.stats().workers[1].process.unwrap();
            assert_eq!(pid(&group).await, other);
            device.mend();
            eventually("it is back", || is(Health::Serving)(&group));
            let mine = group.stats().workers[0].process.unwrap();
            assert!([pid(&group).await, pid(&group).await].contains(&mine));
        }
        // One that is closed while it is out is not probed any more.
        kill(&at(&group, 0));
        eventually("it is out", || is(Health::GivenUp)(&group));
        at(&group, 0).close(Duration::ZERO).await;
        let starts = group.stats().workers[0].starts;
        device.mend();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(group.stats().workers[0].starts <= starts + 1);
        assert_ne!(group.stats().workers[0].health, Some(Health::Serving));
    });
}

#[test]
fn one_gpu_is_enough_to_begin() {
    run(async {
        let device = Fragile::new();
        drop(std::fs::remove_file(&device.0));
        let group = Group::spawn([device.worker(), worker()]).await.unwrap();
        group.serving().await.unwrap();
        assert_eq!(group.stats().workers[1].health, Some(Health::Serving));
        pid(&group).await;
        let none = Group::spawn([device.worker(), device.worker()]).await;
        assert!(matches!(none, Err(Error::GivenUp { .. })), "{none:?}");
        let none = Group::<Twin>::spawn([]).await;
        assert!(matches!(none, Err(Error::Unfit { found: 0, limit: 1, .. })), "{none:?}");
    });
}

#[test]
fn what_waits_for_a_gpu_goes_to_another() {
    run(async {
        let device = Fragile::new();
        drop(std::fs::remove_file(&device.0));
        let [fails, slow] = [300, 600].map(Duration::from_millis);
        let builders = [(fails, Some(device.name())), (slow, None)].map(|(delay, once)| {
            Worker::<Twin>::builder(Start { delay, once, ..Start::default() }).threads(2)
        });
        let group = Group::begin(builders).unwrap();
        // They wait at both, and may not run again: no process has had them.
        let calls: Vec<_> =
            (0..6).map(|n| group.call(Do::Later(n, Duration::ZERO)).send()).collect();
        for (n, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await, Ok(Done::Number(n as u32)));
        }
        assert_eq!(group.stats().workers[1].answered, 6);
        assert_eq!(group.stats().moved, 3);
    });
}

#[test]
fn a_guilty_request_is_refused_by_all() {
    run(async {
        let group = Group::spawn(two(|| worker().blame(Blame::default()))).await.unwrap();
        assert_eq!(lost(group.call(Do::Exit(3)).await).guilt, Guilt::Alone);
        for _ in 0..4 {
            let again = group.call(Do::Exit(3)).idempotent().await;
            assert!(matches!(again, Err(Error::Refused { what: "request", .. })), "{again:?}");
        }
        // A client that sends another one each time goes through no GPU.
        for code in 10..13 {
            lost(group.call(Do::Exit(code)).client("bad").await);
        }
        for _ in 0..4 {
            let again = group.call(Do::Pid).client("bad").await;
            assert!(matches!(again, Err(Error::Refused { what: "client", .. })), "{again:?}");
        }
        let deaths: u64 = group.stats().workers.iter().map(|stats| stats.deaths).sum();
        assert_eq!(deaths, 4);
    });
}

#[test]
fn a_request_that_kills_takes_one_gpu_down() {
    run(async {
        let group = Group::spawn(two(worker)).await.unwrap();
        let later = |n| group.call(Do::Later(n, Duration::from_millis(100))).idempotent().send();
        let good: Vec<_> = (0..8).map(later).collect();
        let bad = group.call(Do::Abort).idempotent().send();
        let good = futures::future::join_all(good);
        let (good, bad) = futures::join!(good, bad);
        // Once beside others, once alone, both at the same place; and counted together.
        let bad = lost(bad);
        assert_eq!((bad.guilt, bad.attempt), (Guilt::Alone, 2));
        for (n, answer) in good.into_iter().enumerate() {
            assert_eq!(answer, Ok(Done::Number(n as u32)));
        }
        let stats = group.stats();
        let mut deaths = [stats.workers[0].deaths, stats.workers[1].deaths];
        deaths.sort_unstable();
        assert_eq!((deaths, stats.moved), ([0, 2], 0));
    });
}

#[test]
fn the_innocent_go_on_at_once() {
    run(async {
        let group = Group::spawn(two(|| worker().threads(1))).await.unwrap();
        let bad = group.call(Do::Loop).within(Duration::from_secs(1)).send();
        let loops = |worker| at(&group, worker).log().contains("it loops");
        eventually("it has begun", || loops(0) || loops(1));
        // One of them is behind it, does not begin, and is lost by that one's limit.
        let later = |n| group.call(Do::Later(n, Duration::from_secs(1))).idempotent().send();
        let good = futures::future::join_all([later(2), later(3), later(4)]);
        let (bad, good) = futures::join!(bad, good);
        assert_eq!(lost(bad).guilt, Guilt::Alone);
        assert_eq!(good, [2, 3, 4].map(|n| Ok(Done::Number(n))));
        let stats = group.stats();
        assert_eq!((stats.moved, stats.workers[0].retries + stats.workers[1].retries), (1, 1));
    });
}

#[test]
fn a_suspect_takes_its_payload_along() {
    run(async {
        let device = Fragile::new();
        let builders = [device.worker(), worker()].map(|worker| worker.payload_bytes(4096, 4096));
        let group = Group::spawn(builders).await.unwrap();
        let all = at(&group, 1).try_lease(4096).unwrap();
        let mut first = at(&group, 0).try_lease(2000).unwrap();
        first.fill(9);
        let call = group.call(Do::First(Use::Keep, Duration::from_millis(50))).lease(first);
        let moved = call.idempotent().send();
        let moved = tokio::spawn(moved);
        eventually("it runs", || group.stats().workers[0].running == 1);
        kill(&at(&group, 0));
        while group.stats().moved == 0 {
            tokio::task::yield_now().await;
        }
        // It waits for room, and holds up nobody.
        assert_eq!(at(&group, 1).call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
        assert!(!moved.is_finished());
        let busy = at(&group, 1).call(Do::Later(2, Duration::from_millis(50))).send();
        drop(all);
        assert_eq!(busy.await, Ok(Done::Number(2)));
        assert_eq!(moved.await.unwrap(), Ok(Done::Number(9)));
    });
}

#[test]
fn a_deadline_counts_over_all() {
    run(async {
        let group = Group::spawn(two(worker)).await.unwrap();
        let limit = Duration::from_millis(300);
        let begun = Instant::now();
        let call = group.call(Do::Later(1, LONG)).idempotent().deadline(limit).send();
        let call = tokio::spawn(call);
        let mut had = 0;
        while !call.is_finished() {
            let at = group.workers().find(|worker| worker.stats().running == 1);
            if let Some(worker) = at.filter(|_| had == 0) {
                kill(&worker);
                had += 1;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(call.await.unwrap(), Err(Error::Deadline));
        let took = begun.elapsed();
        assert!(took >= limit && took < 10 * limit, "{took:?}");
        let deaths: u64 = group.stats().workers.iter().map(|stats| stats.deaths).sum();
        assert_eq!(deaths, 1);
    });
}

#[test]
fn one_worker_of_a_group_may_be_closed() {
    run(async {
        let group = Group::spawn(two(worker)).await.unwrap();
        at(&group, 0).close(Duration::from_secs(10)).await;
        for _ in 0..4 {
            pid(&group).await;
        }
        assert_eq!(group.stats().workers[1].answered, 4);
        let call = group.call(Do::Pid).send();
        let other = group.clone();
        other.close(Duration::from_secs(10)).await;
        assert!(call.await.is_ok(), "it was under way");
        assert_eq!(group.call(Do::Pid).await, Err(Error::Closed));
        assert_eq!(group.serving().await, Err(Error::Closed));
    });
}

#[test]
fn replacements_under_load_lose_no_call() {
    const REPLACEMENTS: u64 = 20;
    run(async {
        let file = Fragile::new();
        let path = file.name();
        // Three payloads at a time, so that calls of eight clients wait for memory while they are being replaced.
        let room = 64 << 10;
        let group = Group::spawn(two(|| worker().payload_bytes(room, room))).await.unwrap();
        let done = |group: &Group<Twin>| {
            group.stats().workers.iter().all(|stats| stats.replacements >= REPLACEMENTS)
        };
        let clients: Vec<_> = (0..8u32)
            .map(|client| {
                let (group, path) = (group.clone(), path.clone());
                tokio::spawn(async move {
                    let mut calls = 0;
                    while !done(&group) {
                        // None may run again: what is lost or doubled shows.
                        let number = client << 24 | calls;
                        let write = group.call(Do::Write(path.clone(), number));
                        let wrote = write.payload(vec![7; 20_000]).await;
                        assert_eq!(wrote, Ok(Done::Number(number)));
                        calls += 1;
                    }
                    calls
                })
            })
            .collect();
        let replaced = group.workers().map(|worker| async move {
            for _ in 0..REPLACEMENTS {
                // One that it has, and one that waits for all the memory, which the old process or the new one gets.
                let runs = worker.call(Do::Later(1, Duration::from_millis(5))).send();
                let all = worker.call(Do::First(Use::Keep, Duration::ZERO));
                let waits = all.payload(vec![9; room as usize]).send();
                let (replaced, runs, waits) = tokio::join!(worker.replace(), runs, waits);
                let both = (runs, waits);
                assert_eq!((replaced, both), (Ok(()), (Ok(Done::Number(1)), Ok(Done::Number(9)))));
            }
        });
        futures::future::join_all(replaced).await;
        let mut wanted = BTreeMap::new();
        for (client, calls) in clients.into_iter().enumerate() {
            let calls = calls.await.unwrap();
            wanted.extend((0..calls).map(|n| ((client as u32) << 24 | n, 1)));
        }
        assert_eq!(written(&path), wanted);
        let stats = group.stats();
        assert_eq!(stats.moved, 0);
        for (stats, worker) in stats.workers.iter().zip(group.workers()) {
            assert_eq!((stats.replacements, stats.deaths, stats.retries), (REPLACEMENTS, 0, 0));
            assert_eq!((stats.lost_calls, stats.stale_messages), (0, 0));
            assert!(stats.answered > 4 * REPLACEMENTS, "both had calls: {stats:?}");
            assert!(worker.lease(room as usize).await.is_ok(), "all memory came back");
        }
    });
}

#[test]
fn who_is_being_replaced_takes_calls() {
    run(async {
        let builder = || worker().payload_bytes(16_384, 4096).held_payload_limit(LONG);
        let group = Group::spawn(two(builder)).await.unwrap();
        let workers = [at(&group, 0), at(&group, 1)];
        let [first, second] = &workers;
        let old = first.stats().process.unwrap();
        let reverse = |worker: &Worker<Twin>| {
            let call = worker.call(Do::Reverse).payload([7; 4096]);
            tokio::spawn(call.send().with_payload())
        };
        // While the program has these answers, others wait for their room: one in a process, three in the other.
        let mut held = Vec::new();
        for worker in &workers {
            held.push(reverse(worker).await.unwrap().unwrap());
        }
        let waits_there = reverse(first);
        let busy = [(); 3].map(|()| reverse(second));
        eventually("they run", || first.stats().running == 1 && second.stats().running == 3);
        // And one waits for memory, and has no process.
        let all = first.try_lease(12_288).unwrap();
        let waits = first.call(Do::First(Use::Drop, Duration::ZERO)).payload([9; 100]).send();
        let mut replaced = Box::pin(first.replace());
        assert!(futures::poll!(&mut replaced).is_pending());
        eventually("it is being replaced", || first.stats().draining == Some(old));
        // It is ready, and has the next calls, in the new process.
        assert!(first.health().is_serving());
        let next = first.stats().process.unwrap();
        assert_ne!(next, old);
        assert_eq!(pid(&group).await, next);
        drop(all);
        assert_eq!(waits.await, Ok(Done::Number(9)));
        assert!(lives(old) && futures::poll!(&mut replaced).is_pending());
        drop(held);
        // In whatever order: each of the three needs the room of another one's answer.
        let waited = [waits_there].into_iter().chain(busy).map(|waited| async move {
            let (done, payload) = waited.await.unwrap().unwrap();
            (done, payload.unwrap().len())
        });
        for answer in futures::future::join_all(waited).await {
            assert_eq!(answer, (Done::Number(4096), 4096));
        }
        assert_eq!(replaced.await, Ok(()));
        let stats = group.stats();
        assert_eq!((stats.moved, stats.workers[0].deaths, lives(old)), (0, 0, false));
    });
}
