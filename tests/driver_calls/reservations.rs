//! Reservations on a GPU: what they count, and that they ask the driver for nothing but figures.

use std::time::Duration;

use gpu_await::{Completion, Device, DeviceBuffer, ErrorDetail, ReservationProblem};

use super::{async_under_the_stand_in, device_with, my_names, soon};

const MIB: u64 = 1 << 20;

fn zeros(device: &Device, mib: u64) -> DeviceBuffer<u8> {
    device.zeros((mib * MIB) as usize).queued().expect("memory")
}

/// What was dropped is the driver's again. A free may be left to the poller, so once is not always enough.
async fn gives_all_back(device: &Device) {
    soon(async {
        loop {
            device.trim(0).await.unwrap();
            if device.memory().unwrap().reserved_bytes == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// Without a limit the device's free memory is the limit, whoever has the rest.
#[test]
fn without_a_limit_the_device_is_it() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(200 * MIB);
        let (device, other) =
            (device_with(Completion::Adaptive), device_with(Completion::Adaptive));
        let theirs = zeros(&other, 160);
        soon(other.done()).await.unwrap();
        let problem = |bytes| match device.try_reserve(bytes).unwrap_err().detail() {
            ErrorDetail::Reservation { problem, .. } => problem.clone(),
            other => panic!("{other}"),
        };
        assert!(matches!(problem(60 * MIB), ReservationProblem::NotNow { waiting: 0, .. }));
        let too_much = ReservationProblem::TooMuch { most_bytes: 200 * MIB };
        assert_eq!(problem(201 * MIB), too_much);
        let half = device.try_reserve(10 * MIB).unwrap();
        let made: DeviceBuffer<u8> =
            half.stream(device.default_stream()).unwrap().zeros(5 << 20).queued().unwrap();
        assert_eq!(half.left_bytes(), 5 * MIB);
        drop((half, made, theirs));
        gives_all_back(&other).await;
        let all = soon(device.reserve(150 * MIB)).await.unwrap();
        drop(all);
    });
}

/// Others free what it waits for: nobody says so.
#[test]
fn memory_of_others_is_waited_for() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(200 * MIB);
        let (device, other) =
            (device_with(Completion::Adaptive), device_with(Completion::Adaptive));
        let theirs = zeros(&other, 60);
        let mine = zeros(&device, 90);
        soon(other.done()).await.unwrap();
        soon(device.done()).await.unwrap();
        let waiting = tokio::spawn({
            let device = device.clone();
            async move { device.reserve(100 * MIB).await.map(drop) }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        drop(theirs);
        gives_all_back(&other).await;
        soon(waiting).await.expect("no panic").unwrap();
        drop(mine);
    });
}

#[test]
fn a_reservation_asks_for_figures_alone() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        driver.clear();
        let reservation = soon(device.reserve(MIB)).await.unwrap();
        reservation.shrink(10);
        drop(reservation);
        let asked = my_names(driver);
        let figures = ["cuMemGetInfo_v2", "cuMemPoolGetAttribute"];
        let others: Vec<_> = asked
            .iter()
            .filter(|name| !figures.contains(&name.as_str()))
            .filter(|name| name.starts_with("cuMem"))
            .collect();
        assert!(others.is_empty() && asked.len() > 2, "{asked:?}");
    });
}
