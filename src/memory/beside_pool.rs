//! Memory from outside the pool, which the pool may have to make room for.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::reclaim::claim::Backoff;
use crate::backend::DriverResult;
use crate::error::DriverCode;
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;
use gpu_await_protocol::account::Account;

/// The driver's out-of-memory code.
pub(super) const OUT_OF_MEMORY: i32 = 2;

/// Claims memory within the limit or the budget, with `take`; false if there is none, even after everything that streams keep was returned.
pub(super) fn claim(
    stream: &Arc<StreamState>,
    bytes: u64,
    budget: Option<usize>,
    take: impl Fn(&mut Account) -> bool,
) -> bool {
    let (engine, mut backoff) = (&stream.engine, Backoff::default());
    let is_claimed = || take(&mut engine.memory.account.lock());
    if is_claimed() {
        return true;
    }
    loop {
        give_back(engine);
        if is_claimed() {
            return true;
        }
        // Another thread may be moving the memory.
        if !engine.is_there(stream, bytes, budget) || !backoff.pause() {
            return false;
        }
    }
}

/// Calls `make`, and retries while the pool can still return memory that it reserves and does not use, such as frees that are about to run.
pub(super) fn make<R>(engine: &Arc<Engine>, make: impl Fn() -> DriverResult<R>) -> DriverResult<R> {
    let mut backoff = Backoff::default();
    loop {
        match make() {
            Err(DriverCode { code: OUT_OF_MEMORY, .. }) => {}
            made => return made,
        }
        let reserved = engine.backend.pool_info()?.reserved;
        give_back(engine);
        engine.backend.pool_trim(0)?;
        if reserved <= engine.memory.account.lock().figures().held() || !backoff.pause() {
            return make();
        }
    }
}

/// Returns the memory that streams and graphs keep to the pool.
fn give_back(engine: &Arc<Engine>) {
    engine.memory.graphs.give_up();
    engine.flush();
    engine.collect_freed();
}
