//! A service that does nothing.

use gpu_await_worker::{Failure, Host, Payloads, Service};

#[derive(Debug)]
pub(crate) struct Nothing;

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
