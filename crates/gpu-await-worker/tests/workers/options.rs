//! Options that no worker can have.

use std::time::Duration;

use gpu_await_worker::{Blame, Error, Replace, Worker, WorkerBuilder};

use crate::twin::{Do, Done, Twin, run, worker};

type Change = fn(WorkerBuilder<Twin>) -> WorkerBuilder<Twin>;

/// Each option, changed so that it cannot work; its value, and the limit that it is refused with.
const UNFIT: &[(&str, Change, u64, u64)] = &[
    ("most_calls", |it| it.most_calls(0), 0, 1),
    ("most_calls", |it| it.most_calls(usize::MAX), u64::MAX, 1 << 20),
    ("most_message_bytes", |it| it.most_message_bytes(0), 0, 64),
    ("most_message_bytes", |it| it.most_message_bytes(1 << 30), 1 << 30, 4 << 20),
    ("request payloads", |it| it.payload_bytes(0, 4096), 0, 4096),
    ("request payloads", |it| it.payload_bytes(1, 4096), 1, 4096),
    ("request payloads", |it| it.payload_bytes(u64::MAX, 4096), u64::MAX, 1 << 40),
    ("response payloads", |it| it.payload_bytes(4096, 4095), 4095, 4096),
    ("response payloads", |it| it.payload_bytes(4096, u64::MAX), u64::MAX, 1 << 40),
    ("threads", |it| it.threads(0), 0, 1),
    (
        "threads",
        |it| it.threads(u32::MAX),
        u64::from_ne_bytes([255, 255, 255, 255, 0, 0, 0, 0]),
        1024,
    ),
    ("log_bytes", |it| it.log_bytes(usize::MAX), u64::MAX, 64 << 20),
    ("resident_bytes", |it| it.resident_bytes(0), 0, 1 << 20),
    ("resident_bytes", |it| it.resident_bytes(64 << 20), 128 << 20, 64 << 20),
    ("executor_limit", |it| it.executor_limit(Duration::ZERO), 0, 500),
    ("start_limit", |it| it.start_limit(Duration::ZERO), 0, 1),
    ("client_guilty", |it| it.blame(Blame { client_guilty: 0, ..Blame::default() }), 0, 1),
    ("hot", |it| it.hot(Duration::from_secs(2)), 2000, 1000),
    ("Replace::calls", |it| it.replace(Replace { calls: Some(0), ..Replace::default() }), 0, 1),
    (
        "Replace::payload_bytes",
        |it| it.replace(Replace { payload_bytes: Some(0), ..Replace::default() }),
        0,
        1,
    ),
    (
        "Replace::time",
        |it| it.replace(Replace { time: Some(Duration::ZERO), ..Replace::default() }),
        0,
        1,
    ),
    ("name", |it| it.env("", "x"), 0, 1),
    ("a NUL", |it| it.env("A\0B", "x"), 1, 0),
    ("a NUL", |it| it.env("A=B", "x"), 1, 0),
    ("a NUL", |it| it.env("A", "x\0\0"), 2, 0),
    ("a variable", |it| it.env("A", "x".repeat(131_072)), 131_075, 131_072),
    ("all variables", many, 1_310_040, 1 << 20),
];

fn many(mut builder: WorkerBuilder<Twin>) -> WorkerBuilder<Twin> {
    for number in 0..10 {
        builder = builder.env(format!("A{number}"), "x".repeat(131_000));
    }
    builder
}

#[test]
fn options_that_cannot_work_are_refused() {
    run(async {
        for (name, change, found, limit) in UNFIT {
            let begun = change(worker()).begin();
            let Err(Error::Unfit { what, .. }) = &begun else { panic!("{name}: {begun:?}") };
            assert!(what.contains(name), "{what}");
            let wanted = Error::Unfit { what, found: *found, limit: *limit };
            assert_eq!(begun.map(drop), Err(wanted.clone()));
            assert_eq!(change(worker()).spawn().await.map(drop), Err(wanted));
        }
    });
}

#[test]
fn a_standby_that_dies_with_its_worker_is_refused() {
    run(async {
        let refused = worker().standby(true).allow_mps(true).spawn().await.map(drop);
        let Err(Error::Excluded { option, by, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!((option, by), ("standby", "allow_mps"));
        let policy = Replace { calls: Some(1), ..Replace::default() };
        let refused = worker().replace(policy).allow_mps(true).spawn().await.map(drop);
        assert!(matches!(refused, Err(Error::Excluded { option: "replace", .. })), "{refused:?}");
        assert!(worker().standby(true).spawn().await.is_ok());
        let worker = worker().allow_mps(true).spawn().await.unwrap();
        let refused = worker.replace().await;
        assert!(matches!(refused, Err(Error::Excluded { option: "replace", .. })), "{refused:?}");
        assert!(worker.call(Do::Pid).await.is_ok());
    });
}

#[test]
fn options_at_their_limits_work() {
    run(async {
        let least = worker()
            .most_calls(1)
            .most_message_bytes(64)
            .payload_bytes(4096, 4096)
            .threads(1)
            .log_bytes(0);
        let most = worker()
            .most_calls(1 << 20)
            .most_message_bytes(4 << 20)
            .payload_bytes(1 << 40, 1 << 40)
            .log_bytes(64 << 20)
            .env("A", "x".repeat(131_068));
        for builder in [least, most] {
            let worker: Worker<Twin> = builder.spawn().await.unwrap();
            assert_eq!(worker.lease(0).await.unwrap().len(), 0);
            let call = worker.call(Do::Reverse).payload(vec![1; 4096]);
            assert_eq!(call.await, Ok(Done::Number(4096)));
        }
    });
}

#[test]
fn all_of_an_odd_slab_can_be_leased() {
    run(async {
        // No multiple of what leases are aligned to.
        let worker = worker().payload_bytes(5000, 5000).spawn().await.unwrap();
        assert_eq!(worker.lease(5000).await.unwrap().len(), 5000);
        let call = worker.call(Do::Reverse).payload(vec![1; 5000]);
        assert_eq!(call.await, Ok(Done::Number(5000)));
    });
}

#[test]
fn a_refused_message_names_the_right_limit() {
    run(async {
        let most = 4 << 20;
        let worker = worker().most_message_bytes(most).spawn().await.unwrap();
        let calls = [Do::Fail("x".repeat(most as usize)), Do::Fail("x".repeat(most as usize - 64))];
        let errors = calls.map(|request| worker.call(request));
        let mut limits = Vec::new();
        for call in errors {
            match call.await {
                Err(Error::TooLarge { bytes, limit, .. }) => {
                    assert!(bytes > limit);
                    limits.push(limit);
                }
                // Where sockets take as much.
                Err(Error::Service(text)) => assert_eq!(text.len(), most as usize - 64),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(limits[0], u64::from(most));
        // What the system takes, and no figure that follows from the request.
        for limit in &limits[1..] {
            let fits = "x".repeat(*limit as usize - 64);
            assert!(matches!(worker.call(Do::Fail(fits)).await, Err(Error::Service(_))));
        }
    });
}

const SMALL: &str = "GPU_AWAIT_TEST_SMALL_FILES";

/// In a process of its own, which may make small files alone.
#[test]
fn a_front_with_small_files() {
    if std::env::var_os(SMALL).is_none() {
        return;
    }
    let small = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: the limits are this function's.
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const small) };
    run(async {
        let refused = worker().begin().map(drop);
        assert!(matches!(refused, Err(Error::Unfit { limit: 0x10_0000, .. })), "{refused:?}");
        let fits = worker().payload_bytes(4096, 4096).spawn().await.unwrap();
        assert_eq!(fits.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
    });
}

#[test]
fn a_limit_of_files_does_not_end_the_front() {
    let program = std::env::current_exe().unwrap();
    let front = std::process::Command::new(program)
        .args(["--exact", "options::a_front_with_small_files", "--nocapture"])
        .env(SMALL, "1")
        .output()
        .unwrap();
    assert!(front.status.success(), "{front:?}");
}

#[test]
fn a_process_has_the_name_of_its_program() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        assert_eq!(name(worker.stats().process.unwrap()), name(std::process::id()));
    });
}
