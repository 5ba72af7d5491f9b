//! Each module against a model of what it must do.

#[path = "../../../../tests/under_test"]
mod under_test {
    pub(crate) mod cases;
}

mod account;
mod admission;
mod block_cache;
mod buddy;
mod cadence;
mod grains;
mod hazard;
mod reservations;
