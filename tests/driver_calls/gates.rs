//! Gates of `testing`, and the calls that they keep out of the driver.

use std::time::{Duration, Instant};

use gpu_await::testing::Gate;
use gpu_await::{Device, kernels};

use super::{eventually, under_the_stand_in};

/// What a call may take that is held up by nothing.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Nobody opens or drops them: their own limit does, which they tell nobody.
#[test]
fn a_gate_past_its_limit_holds_up_nothing() {
    under_the_stand_in(|_| {
        let device = Device::cuda(0).unwrap();
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        // Loads the gate's own kernel.
        drop(Gate::close(&streams[0]).unwrap());
        // Two in a row on one stream: the limit of the second begins when the first is open.
        let limit = Duration::from_millis(200);
        let gates =
            [0, 0, 1].map(|stream: usize| Gate::close_for(&streams[stream], limit).unwrap());
        // Waits in front of the driver while they are closed, and no longer.
        let start = Instant::now();
        kernels::axpy::load_blocking(&device).unwrap();
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(300) && took < AT_ONCE, "{took:?}");
        eventually("the limits open them", || gates.iter().all(Gate::timed_out));
        let start = Instant::now();
        kernels::scale::load_blocking(&device).unwrap();
        let other = Device::cuda(0).unwrap();
        let stream = other.stream().unwrap();
        // Another device's gates are not waited for either.
        let gate = Gate::close(&stream).unwrap();
        gate.open();
        stream.synchronize().unwrap();
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    });
}

/// A gate whose handle is leaked, on a device that is lost, as well.
#[test]
fn a_gate_of_a_lost_device_holds_up_nothing() {
    under_the_stand_in(|driver| {
        driver.set_devices(2);
        let (device, other) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let stream = device.stream().unwrap();
        std::mem::forget(Gate::close_for(&stream, Duration::from_secs(20)).unwrap());
        driver.lose(0, 700);
        assert!(stream.synchronize().is_err_and(|error| error.is_device_lost()));
        let start = Instant::now();
        kernels::scale::load_blocking(&other).unwrap();
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    });
}
