//! What a staged copy makes that the next one needs as well.

use std::time::Duration;

use gpu_await::{Device, Stream};

use stand_in_cuda::StandIn;

use super::{Line, Live, MODES, async_under_the_stand_in, device_with, eventually, soon};

/// Eleven parts and a bit: more than are on their way at once on few cores.
const BYTES: usize = (11 << 21) + 5;

async fn round_trip(device: &Device, stream: &Stream) {
    let all_back = || device.stats().lent_bytes == 0;
    let x = soon(stream.upload_staged(vec![7u8; BYTES])).await.unwrap();
    soon(stream.done()).await.unwrap();
    eventually("taken back", all_back);
    let back = soon(stream.download_staged(&x)).await.unwrap();
    assert_eq!((back.len(), back[BYTES - 1]), (BYTES, 7));
    eventually("taken back", all_back);
}

/// The calls that wait while the driver holds a thread in a launch on a full queue.
fn made(driver: &StandIn) -> Vec<String> {
    let makes = ["cuEventCreate", "cuStreamCreate", "cuMemHost", "cuMemAlloc"];
    let mut calls = driver.calls();
    calls.retain(|call| {
        let name = Line(call).name();
        name != "cuMemAllocFromPoolAsync" && makes.iter().any(|known| name.starts_with(known))
    });
    calls
}

#[test]
fn a_second_staged_round_trip_makes_nothing_in_the_driver() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let before = Live::now(driver);
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            round_trip(&device, &stream).await;
            for _ in 0..5 {
                driver.clear();
                round_trip(&device, &stream).await;
                let calls = driver.calls();
                let copies = calls.iter().filter(|call| call.starts_with("cuMemcpy")).count();
                assert_eq!(copies, 2 * 12);
                assert_eq!(made(driver), [""; 0], "{mode:?}");
            }
            // A device gives back what it has on a thread of its own.
            drop((stream, device));
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}

#[test]
fn staged_copies_that_stand_still_find_their_events() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let before = Live::now(driver);
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            round_trip(&device, &stream).await;
            let x = soon(stream.upload_staged(vec![7u8; BYTES])).await.unwrap();
            soon(stream.done()).await.unwrap();
            let parts: Vec<_> = (0..24).map(|_| device.pinned::<u8>(2 << 20).unwrap()).collect();
            drop(parts);
            driver.clear();
            let held = driver.hold();
            let mut both = Box::pin(async {
                futures::join!(stream.upload_staged(vec![8u8; BYTES]), stream.download_staged(&x))
            });
            let stuck = tokio::time::timeout(Duration::from_millis(100), &mut both).await;
            assert!(stuck.is_err(), "held");
            drop(held);
            let (y, back) = soon(both).await;
            let y = y.unwrap();
            assert_eq!((y.len(), back.unwrap()[BYTES - 1]), (BYTES, 7));
            assert_eq!(made(driver), [""; 0], "{mode:?}");
            drop((x, y, stream, device));
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}

/// The driver makes who submits wait while it registers memory.
#[test]
fn a_first_staged_copy_pins_what_it_needs_before_it_copies() {
    fn check(driver: &StandIn, copy: &str) {
        let names = driver.names();
        let first = names.iter().position(|name| name.starts_with(copy)).expect("copies");
        let pins = names.iter().rposition(|name| name == "cuMemHostRegister_v2").expect("pins");
        assert!(pins < first, "{copy}: {names:?}");
    }
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            driver.clear();
            drop(soon(stream.upload_staged(vec![7u8; BYTES])).await.unwrap());
            check(driver, "cuMemcpyHtoD");
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let x = soon(stream.zeros::<u8>(BYTES)).await.unwrap();
            driver.clear();
            soon(stream.download_staged(&x)).await.unwrap();
            check(driver, "cuMemcpyDtoH");
        }
    });
}
