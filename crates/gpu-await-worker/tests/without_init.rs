//! A program that does not call `init`.

mod nothing;

use futures::executor::block_on;
use gpu_await_worker::{Error, Worker};

use nothing::Nothing;

#[test]
fn spawn_without_init_starts_nothing() {
    let spawned = block_on(Worker::<Nothing>::builder(()).spawn());
    assert!(matches!(spawned, Err(Error::NotInitialised)), "{spawned:?}");
}
