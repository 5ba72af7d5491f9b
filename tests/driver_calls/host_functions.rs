//! Host functions make no driver call: the stand-in counts each as misuse, and answers 800.

#[path = "../under_test/every_method.rs"]
mod every_method;
#[path = "../../crates/gpu-await-libs/tests/under_test/every_plan.rs"]
mod every_plan;
#[path = "../../crates/gpu-await-algorithms/tests/under_test/every_verb.rs"]
mod every_verb;
#[path = "../under_test/inside.rs"]
mod inside;

use gpu_await::{Completion, ErrorDetail, ErrorKind, Result};
use inside::{Inside, World};

use super::{MODES, async_under_the_stand_in, device_with, soon, under_the_stand_in};

/// See `every_public_method_inside_a_host_function` in `tests/streams/host_functions.rs`.
#[test]
fn no_public_method_calls_the_driver_there() {
    under_the_stand_in(|driver| {
        for mode in MODES {
            let device = device_with(mode);
            every_method::run(&device, Inside::HostFn).unwrap();
            let device = device_with(mode);
            World::new(&device).unwrap().run(Inside::HostFn, every_verb::every_verb).unwrap();
            let device = device_with(mode);
            every_plan::run(&device, Inside::HostFn).unwrap();
            assert_eq!(driver.misuse(), [""; 0], "{mode:?}");
        }
    });
}

/// What is about the caller says nothing of the device, however often it is said.
#[test]
fn a_code_about_the_caller_is_never_a_loss() {
    async_under_the_stand_in(async |driver| {
        for code in [800, 900, 901, 905, 906, 907, 908] {
            let device = device_with(Completion::Event);
            let stream = device.stream().unwrap();
            let x = soon(stream.full(100, 7u8)).await.unwrap();
            for call in ["cuEventQuery", "cuStreamQuery", "cuEventRecord", "cuMemsetD8Async"] {
                let work = async || -> Result<()> {
                    let mut op = stream.download(&x);
                    while !op.is_complete() {
                        tokio::task::yield_now().await;
                    }
                    assert_eq!(soon(&mut op).await?, [7; 100]);
                    soon(stream.full(10, 1u8)).await?;
                    soon(device.done()).await
                };
                for nth in 1..8 {
                    driver.fail(call, nth, code);
                }
                let outcome = work().await;
                driver.forgive();
                if let Err(error) = outcome {
                    assert!(!error.is_device_lost(), "{call} returns {code}: {error}");
                    let is_typed = matches!(error.detail(), ErrorDetail::WrongThread { what, .. } if *what == call);
                    assert!(code != 800 || is_typed, "{call}: {error}");
                    assert!(
                        code != 800 || error.kind() == ErrorKind::InvalidCall,
                        "{call}: {error}"
                    );
                }
                work().await.unwrap_or_else(|error| panic!("{call} returned {code}: {error}"));
            }
        }
    });
}
