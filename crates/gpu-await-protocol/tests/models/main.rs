//! Each module against a model of what it must do.

#[path = "../../../../tests/under_test"]
mod under_test {
    pub(crate) mod cases;
}

mod account;
mod admission;
mod block_cache;
mod block_hazards;
mod buddy;
mod cadence;
mod copies;
mod grains;
mod hazard;
mod reservations;
