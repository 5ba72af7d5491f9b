//! A process that sends its supervisor anything: bytes, and messages that are almost right.
//!
//! `GPU_AWAIT_TEST_SECONDS` says for how long. In a binary of its own: a process may say that its device's memory is wrong, and what is kept
//! there is dropped then.

#[path = "workers/misbehave.rs"]
mod misbehave;
#[path = "workers/twin.rs"]
#[expect(dead_code, reason = "what other tests use")]
mod twin;

use std::time::{Duration, Instant};

use gpu_await_worker::{Error, Restart};

use twin::{Do, Done, run, worker};

gpu_await_worker::test_main!(twin::Twin, twin::NeverStarts);

/// Whether a process may end a call so by what it sends.
fn is_its_own(error: &Error) -> bool {
    matches!(
        error,
        Error::Lost(_)
            | Error::Service(_)
            | Error::Panicked(_)
            | Error::Decode { .. }
            | Error::Encode { .. }
            | Error::TooLarge { .. }
            | Error::TooDeep { .. }
            | Error::PayloadsHeld { .. }
    )
}

#[test]
fn nothing_that_a_process_sends_harms_its_supervisor() {
    let seconds = std::env::var("GPU_AWAIT_TEST_SECONDS").ok().and_then(|text| text.parse().ok());
    let until = Instant::now() + Duration::from_secs(seconds.unwrap_or(2));
    let mut seed = 0;
    let mut deaths = 0;
    while Instant::now() < until {
        let begun = seed;
        run(async {
            let restart = Restart {
                early_deaths: u32::MAX,
                first_delay: Duration::ZERO,
                ..Restart::default()
            };
            let worker = worker().restart(restart).spawn().await.unwrap();
            while Instant::now() < until && seed < begun + 500 {
                seed += 1;
                let calls: Vec<_> =
                    (0..3).map(|n| worker.call(Do::Later(n, Duration::ZERO)).send()).collect();
                let fuzz = worker.call(Do::Fuzz(seed)).send();
                for call in calls.into_iter().chain([fuzz]) {
                    // Any end will do, as long as it ends. A forged answer may come in the name of the process: it is its own.
                    match call.await {
                        Ok(_) => {}
                        Err(error) => assert!(is_its_own(&error), "seed {seed}: {error:?}"),
                    }
                }
                // The next process, or this one, is in order.
                loop {
                    match worker.call(Do::Later(7, Duration::ZERO)).await {
                        Ok(answer) => {
                            break assert!(matches!(answer, Done::Number(_) | Done::Nothing));
                        }
                        Err(error) => assert!(is_its_own(&error), "seed {seed}: {error:?}"),
                    }
                }
            }
            deaths += worker.stats().deaths;
        });
    }
    assert!(deaths > 0, "nothing of {seed} seeds was refused");
}
