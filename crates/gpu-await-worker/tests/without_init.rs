//! A program that does not call `init`.

use futures::executor::block_on;
use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker};

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

#[test]
fn spawn_without_init_starts_nothing() {
    let spawned = block_on(Worker::<Nothing>::builder(()).spawn());
    assert!(matches!(spawned, Err(Error::NotInitialised)), "{spawned:?}");
}
