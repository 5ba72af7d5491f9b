//! What readiness and liveness probes ask for.

use std::time::{Duration, Instant};

use gpu_await_worker::{Cause, Group, Health, Restart, Worker};

use crate::twin::{Do, NeverStarts, Start, Twin, eventually, kill, lost, run, worker};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn health_says_since_when_and_why() {
    run(async {
        let begun = Instant::now();
        let delay = Duration::from_millis(300);
        let start = Start { delay, ..Start::default() };
        let worker = Worker::<Twin>::builder(start).begin().unwrap();
        let starting = worker.health();
        assert_eq!((starting.health, &starting.cause), (Some(Health::Starting), &None));
        assert!(!starting.is_serving() && !starting.has_ended());
        worker.serving().await.unwrap();
        let serving = worker.health();
        assert_eq!((serving.health, &serving.cause), (Some(Health::Serving), &None));
        assert!(serving.is_serving() && serving.since >= begun + delay);
        // Calls change nothing of it.
        drop(worker.call(Do::Pid).await);
        assert_eq!(worker.health(), serving);
        lost(worker.call(Do::Exit(3)).await);
        let restarting = worker.health();
        assert_eq!(restarting.health, Some(Health::Restarting));
        assert_eq!(restarting.cause, Some(Cause::Exited(3)));
        assert!(!restarting.is_serving() && restarting.since >= serving.since);
        let text = restarting.to_string();
        assert!(text.starts_with("restarting for ") && text.ends_with(", after: it exited with 3"));
        // The same one, whatever steps it takes, until it serves.
        while worker.health().health == Some(Health::Restarting) {
            let again = worker.health();
            assert!(again.since == restarting.since || again.is_serving());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(worker.health().is_serving() && worker.health().since >= restarting.since + delay);
        let before = Instant::now();
        worker.clone().close(Duration::from_secs(10)).await;
        let closed = worker.health();
        assert_eq!((closed.health, &closed.cause), (Some(Health::Closed), &None));
        assert!(closed.has_ended() && closed.since >= before);
    });
}

#[test]
fn a_worker_that_is_given_up_says_why() {
    run(async {
        let worker = Worker::<NeverStarts>::builder("no weights".into()).begin().unwrap();
        worker.serving().await.unwrap_err();
        let health = worker.health();
        assert_eq!(health.health, Some(Health::GivenUp));
        assert!(health.has_ended() && matches!(health.cause, Some(Cause::StartFailed(_))));
        assert!(health.cause.as_ref().unwrap().to_string().contains("no weights"), "{health:?}");
        // Whoever probes does not see what the process wrote.
        let text = health.to_string();
        let why = ", after: the service did not start: its `start` returned an error, ";
        assert!(text.contains(why) && !text.contains("no weights"), "{text}");
    });
}

#[test]
fn a_process_that_does_not_run_is_not_ready() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let call = worker.call(Do::Stop).send();
        eventually("it is seen", || worker.health().is_stopped);
        let health = worker.health();
        assert!(health.health == Some(Health::Serving) && !health.is_serving());
        assert!(health.to_string().contains("stopped"), "{health}");
        kill(&worker);
        lost(call.await);
    });
}

#[test]
fn a_group_is_ready_while_one_is() {
    run(async {
        let restart =
            Restart { settled: LONG, first_delay: LONG, most_delay: LONG, ..Restart::default() };
        let slow = || Worker::<Twin>::builder(Start::default()).restart(restart).threads(2);
        let group = Group::spawn([slow(), slow()]).await.unwrap();
        let health = group.health();
        assert!(
            health.is_serving()
                && health.to_string().starts_with("2 of 2 serve\nworker 0: serving for ")
        );
        let workers: Vec<_> = group.workers().collect();
        // The first one of each restarts at once, the second one much later.
        let fall = |at: usize| {
            let worker = workers[at].clone();
            async move {
                for _ in 0..2 {
                    worker.serving().await.unwrap();
                    lost(worker.call(Do::Abort).await);
                }
            }
        };
        fall(1).await;
        let health = group.health();
        assert!(health.is_serving() && !health.workers[1].is_serving());
        let text = health.to_string();
        assert!(text.contains("1 of 2 serve") && text.contains("worker 1: restarting"), "{text}");
        fall(0).await;
        let health = group.health();
        assert!(!health.is_serving() && !health.has_ended());
        group.clone().close(Duration::ZERO).await;
        assert!(group.health().has_ended());
    });
}
