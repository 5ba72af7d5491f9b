//! What subscribers of `tracing` hear of a worker: each state, each cause and each step of a recovery, once. In a binary of its own, whose
//! subscriber is the process'.

#[path = "workers/misbehave.rs"]
mod misbehave;
#[path = "workers/twin.rs"]
#[expect(dead_code, reason = "what other tests use")]
mod twin;

use std::fmt::{Debug, Write};
use std::sync::Mutex;
use std::time::Duration;

use gpu_await_worker::{Blame, Error, Restart, Worker};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use twin::{Do, NeverStarts, eventually, lost, run, worker};

gpu_await_worker::test_main!(twin::Twin, twin::NeverStarts);

/// Messages, each with its level in front and its fields behind.
static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Hears;

#[derive(Default)]
struct Fields {
    message: String,
    rest: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => write!(self.message, "{value:?}").unwrap(),
            name => write!(self.rest, " {name}={value:?}").unwrap(),
        }
    }
}

impl Subscriber for Hears {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("gpu_await_worker")
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let level = event.metadata().level().as_str().to_lowercase();
        HEARD.lock().unwrap().push(format!("{level} {}|{}", fields.message, fields.rest));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

const STARTED: &str = "info a worker's process started";
const HELLO: &str = "debug a worker's process said hello";
const SERVES: &str = "info a worker serves";
const KILLED: &str = "info a worker's process is killed";
const DIED: &str = "warn a worker's process died";
const GIVEN_UP: &str = "error a worker is given up";
const CLOSING: &str = "info a worker is closing";
const CLOSED: &str = "info a worker was closed";

/// Exactly these were heard since, each with that among its fields. Two threads tell them, so that two may come in the other order.
#[track_caller]
fn heard(expected: &[(&str, &str)]) {
    eventually("all is heard", || HEARD.lock().unwrap().len() >= expected.len());
    let mut heard = std::mem::take(&mut *HEARD.lock().unwrap());
    let mut expected = expected.to_vec();
    heard.sort_unstable();
    expected.sort_unstable();
    assert_eq!(heard.len(), expected.len(), "{heard:#?}");
    for (event, (message, part)) in heard.iter().zip(expected) {
        let (told, fields) = event.split_once('|').unwrap();
        assert_eq!(told, message, "{heard:#?}");
        assert!(fields.contains(part) && fields.contains(" service="), "{event}: no {part}");
    }
}

fn quick() -> Restart {
    Restart { first_delay: Duration::from_millis(1), ..Restart::default() }
}

#[test]
fn each_state_cause_and_step_is_told_once() {
    run(async {
        tracing::subscriber::set_global_default(Hears).unwrap();
        let worker = worker().restart(quick()).spawn().await.unwrap();
        heard(&[(STARTED, "pid="), (HELLO, "started="), (SERVES, "recovery=Recovery")]);
        lost(worker.call(Do::Exit(3)).await);
        worker.serving().await.unwrap();
        let served = [(STARTED, "pid="), (HELLO, "started="), (SERVES, "hello_to_serving: ")];
        let died = (DIED, "cause=it exited with 3 killed=None");
        heard(&[&[died], &served[..]].concat());
        // Killed, and after a delay since it is the second one.
        let limit = Duration::from_millis(20);
        lost(worker.call(Do::Loop).within(limit).await);
        worker.serving().await.unwrap();
        let killed = (KILLED, "cause=a call took longer than 20ms");
        let died = (DIED, "cause=a call took longer than 20ms killed=Some(");
        let waits = ("info a worker's next process waits", "delay=");
        heard(&[&[killed, died, waits], &served[..]].concat());
        // Stopped, for as long as it is.
        let pid = worker.stats().process.unwrap();
        let stopped = worker.call(Do::Stop).send();
        heard(&[("warn a worker's process is stopped or traced", "pid=")]);
        // SAFETY: signals a child of this process, which has not been waited for.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGCONT) };
        stopped.await.unwrap();
        eventually("it is seen", || !worker.stats().is_stopped);
        heard(&[("info a worker's process runs again", "standby=false")]);
        worker.close(Duration::from_secs(20)).await;
        heard(&[
            (CLOSING, ""),
            ("info a worker's process ended, as it was asked to", ""),
            (CLOSED, ""),
        ]);

        // The system refuses what a start needs.
        let worker = twin::worker().restart(quick()).spawn().await.unwrap();
        heard(&served);
        let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills a value of this function's.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files) };
        let few = libc::rlimit { rlim_cur: 3, ..files };
        // SAFETY: reads a value of this function's.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) };
        let call = worker.call(Do::Abort).send();
        drop(call.await);
        eventually("a start is refused", || worker.stats().refused_starts >= 1);
        // SAFETY: as above.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files) };
        worker.serving().await.unwrap();
        let refused = worker.stats().refused_starts;
        let mut expected = vec![(DIED, "cause=signal 6")];
        for _ in 0..refused {
            expected.push(("warn a worker's process was not started", "(os error 24)"));
            expected.push(waits);
        }
        heard(&[&expected[..], &served].concat());
        // By force: it has the time that it needs to say nothing.
        worker.close(Duration::ZERO).await;
        let killed = (KILLED, "cause=it was asked to end");
        heard(&[
            (CLOSING, ""),
            killed,
            ("info a worker's process ended, as it was asked to", ""),
            (CLOSED, ""),
        ]);

        // Given up; it begins anew, and is again.
        let worker = Worker::<NeverStarts>::builder("no".to_owned()).begin().unwrap();
        assert!(matches!(worker.serving().await, Err(Error::GivenUp { .. })));
        let failed = (DIED, "cause=the service did not start: no");
        let given_up = [(STARTED, ""), (HELLO, ""), failed, (GIVEN_UP, "why=given up after 1 ")];
        heard(&given_up);
        assert!(worker.revive().await.is_err());
        let revived = ("info a worker that was given up begins anew", "");
        heard(&[&[revived], &given_up[..]].concat());
        drop(worker);
        heard(&[(CLOSED, "")]);

        // A standby, which takes over.
        let worker = twin::worker().restart(quick()).standby(true).spawn().await.unwrap();
        eventually("it is ready", || worker.stats().standby.is_some());
        let ready = [(STARTED, "standby=true"), (HELLO, ""), ("info a standby is ready", "pid=")];
        heard(&[&served[..], &ready].concat());
        lost(worker.call(Do::Exit(3)).await);
        eventually("the next is ready", || worker.stats().standby.is_some());
        let takes_over = ("info a standby takes over", "ready=true");
        heard(&[&[(DIED, "cause=it exited with 3"), takes_over], &ready[..]].concat());
        worker.close(Duration::from_secs(20)).await;
        let ended = ("info a worker's process ended, as it was asked to", "");
        heard(&[(CLOSING, ""), ended, ended, (CLOSED, "")]);

        // One that does not start, and is given up.
        let path = std::env::temp_dir().join(format!("gpu-await-events-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let once = Some(path.to_string_lossy().into_owned());
        let config = twin::Start { once, ..twin::Start::default() };
        let restart = Restart { early_deaths: 1, ..quick() };
        let worker = Worker::<twin::Twin>::builder(config).restart(restart).standby(true);
        let worker = worker.spawn().await.unwrap();
        let health = || worker.health();
        eventually("none is started any more", || health().no_standby.is_some());
        let why = "cause=the service did not start: No such file";
        let fails = [(STARTED, "pid="), (HELLO, ""), (DIED, why)];
        let none = ("error no standby is started any more", why);
        heard(&[&served[..], &fails, &[waits], &fails, &[none]].concat());
        assert!(health().is_serving() && health().no_standby == worker.stats().last_standby_cause);
        worker.close(Duration::from_secs(20)).await;
        heard(&[(CLOSING, ""), ended, (CLOSED, "")]);

        // A process that is replaced: a standby for as long as it takes.
        let worker = twin::worker().restart(quick()).spawn().await.unwrap();
        heard(&served);
        worker.replace().await.unwrap();
        let wanted = ("info a worker's process is to be replaced", "why=\"demand\"");
        let takes_over = ("info a replacement takes over", "pid=");
        let ready = [(STARTED, "standby=true"), (HELLO, ""), ("info a replacement is ready", "")];
        heard(&[&[wanted, takes_over, ended], &ready[..]].concat());
        worker.close(Duration::from_secs(20)).await;
        heard(&[(CLOSING, ""), ended, (CLOSED, "")]);

        // What kills is watched, then refused, and who sent it.
        let blame = Blame { client_guilty: 1, ..Blame::default() };
        let worker = twin::worker().restart(quick()).blame(blame).spawn().await.unwrap();
        heard(&served);
        let bad = || worker.call(Do::KillMe).key("bad").client("bad");
        let died = (DIED, "cause=signal 9");
        let delayed = [waits, served[0], served[1], served[2]];
        for kill in 1..=3 {
            lost(bad().await);
            worker.serving().await.unwrap();
            let standing: &[_] = match kill {
                1 => &[("info a request is watched: a process died with it", "key=")],
                2 => &[],
                _ => &[
                    ("warn a request is refused: it killed a process", "refused_for=60s"),
                    ("warn a client is refused: its requests killed processes", "client="),
                ],
            };
            let next = if kill == 1 { &served[..] } else { &delayed };
            heard(&[&[died], standing, next].concat());
        }
        for _ in 0..2 {
            assert!(matches!(bad().await, Err(Error::Refused { .. })));
        }
        worker.close(Duration::from_secs(20)).await;
        heard(&[(CLOSING, ""), ended, (CLOSED, "")]);

        // Kept memory that a process of another worker may write.
        let keep_mut = Some("told".to_owned());
        let config = twin::Start { keep_mut, ..twin::Start::default() };
        let [first, second] = [config.clone(), config].map(Worker::<twin::Twin>::builder);
        let first = first.threads(2).spawn().await.unwrap();
        heard(&served);
        let second = second.threads(2).spawn().await.unwrap();
        eventually("it waits", || second.health().waits_for.is_some());
        let what = "warn a worker's process waits for kept memory that another one may write";
        heard(&[&served[..], &[(what, "name=\"told\" writer=")]].concat());
        second.close(Duration::from_secs(20)).await;
        heard(&[(CLOSING, ""), ended, (CLOSED, "")]);
        first.close(Duration::from_secs(20)).await;
        heard(&[(CLOSING, ""), ended, (CLOSED, "")]);

        // One that does not go.
        let worker =
            twin::worker().restart(quick()).stuck(Duration::ZERO, 1).spawn().await.unwrap();
        heard(&served);
        lost(worker.call(Do::Loop).within(limit).await);
        worker.serving().await.unwrap();
        eventually("it is reaped after all", || worker.stats().stuck == 0);
        let gone = ("info a process that was set aside is gone", "pid=");
        let aside = ("error a killed process does not go: set aside", "pid=");
        let killed = (KILLED, "cause=a call took longer than 20ms");
        heard(&[&[killed, aside, gone], &served[..]].concat());
    });
}
