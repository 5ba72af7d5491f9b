//! Workers on the host device, whose services do what services must not.

mod basics;
mod blame;
mod forks;
mod front;
mod groups;
mod health;
mod kept;
mod kept_mut;
mod limits;
mod misbehave;
mod odd;
mod options;
mod payloads;
mod replace;
mod standby;
mod timelines;
mod tower;
mod twin;

gpu_await_worker::test_main!(twin::Twin, twin::NeverStarts, odd::Odd);
