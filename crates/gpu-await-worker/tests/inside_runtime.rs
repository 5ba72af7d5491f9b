//! A program whose `init` runs inside of a runtime: in a binary of its own, whose processes do so.

use futures::executor::block_on;
use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker, testing};

#[derive(Debug)]
struct Nothing;

impl Service for Nothing {
    type Config = ();
    type Request = ();
    type Response = ();

    async fn start((): (), _: &Host) -> Result<Self, Failure> {
        Ok(Nothing)
    }

    async fn call(&self, (): (), _: &mut Payloads) -> Result<(), Failure> {
        Ok(())
    }
}

/// As under `#[tokio::main]`: what a process of the worker runs.
#[tokio::test]
async fn gpu_await_worker_child() {
    testing::child::<Nothing>();
}

#[test]
fn an_init_inside_of_a_runtime_says_so() {
    testing::init::<Nothing>(module_path!());
    for threads in [1, 2] {
        block_on(async {
            let worker = Worker::<Nothing>::builder(()).threads(threads).begin().unwrap();
            let error = worker.serving().await.unwrap_err();
            assert!(matches!(error, Error::GivenUp { .. }), "{error:?}");
            let health = worker.health();
            for text in [error.to_string(), health.to_string()] {
                for part in ["inside of an async runtime", "`#[tokio::main]`", "plain `fn main()`"]
                {
                    assert!(text.contains(part), "{text}");
                }
            }
        });
    }
}
