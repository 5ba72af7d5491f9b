//! Memory that grows in place, as the driver sees it: which calls, in which order, on which thread, and what is left when one of them fails.

use gpu_await::testing::Gate;
use gpu_await::{Completion, Device, DeviceBuffer, ErrorDetail, ErrorKind, GrowableBuffer, Result};
use stand_in_cuda::StandIn;

use super::{Line, async_under_the_stand_in, device_with, eventually, soon};

const MIB: u64 = 1 << 20;
const STEP: u64 = 2 * MIB;
/// Elements of a step.
const N: usize = STEP as usize / 4;

/// The calls for such memory since the last clear, each with its bytes.
fn calls(driver: &StandIn) -> Vec<String> {
    const NAMES: [&str; 7] = [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemAddressFree",
    ];
    let calls = driver.calls();
    let of_memory = calls.iter().map(|line| Line(line)).filter(|line| {
        NAMES.iter().chain(&["cuMemRelease", "cuMemPoolTrimTo"]).any(|name| *name == line.name())
    });
    let with_bytes = of_memory.map(|line| match line.value("bytes") {
        Some(bytes) => format!("{} {bytes}", line.name()),
        None => line.name().to_owned(),
    });
    with_bytes.collect()
}

fn copies(driver: &StandIn) -> usize {
    driver.calls().iter().filter(|line| Line(line).name().starts_with("cuMemcpy")).count()
}

fn settled(driver: &StandIn, device: &Device) {
    eventually("it is unmapped", || {
        let info = device.memory().expect("a device");
        (info.allocated_bytes, driver.live("shared")) == (0, 0)
    });
}

async fn growable(device: &Device, steps: usize) -> Result<GrowableBuffer<u32>> {
    soon(device.growable(steps * N)).await
}

fn steps(n: usize) -> Vec<String> {
    let step = [format!("cuMemCreate {STEP}"), format!("cuMemMap {STEP}"), "cuMemRelease".into()];
    let steps = (0..n).flat_map(|_| step.clone());
    steps.chain(["cuMemSetAccess".to_owned()]).collect()
}

#[test]
fn growth_is_mapped_step_by_step() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        driver.clear();
        let mut table = growable(&device, 8).await.unwrap();
        let reserved =
            ["cuMemGetAllocationGranularity", &format!("cuMemAddressReserve {}", 8 * STEP)];
        assert_eq!(calls(driver), reserved);
        driver.clear();
        soon(table.grow(10)).await.unwrap();
        assert_eq!(calls(driver), steps(1));
        driver.clear();
        soon(table.grow(N)).await.unwrap();
        assert_eq!(calls(driver), [""; 0]);
        soon(table.grow(4 * N)).await.unwrap();
        assert_eq!(calls(driver), steps(3));
        // One command over all of the steps.
        device.fill(&mut table, 7).queued().unwrap();
        assert_eq!(soon(device.download(&table)).await.unwrap(), vec![7; 4 * N]);
        driver.clear();
        assert_eq!(soon(table.shrink(N)).await.unwrap(), 3 * STEP);
        assert_eq!(calls(driver), ["cuMemUnmap"]);
        driver.clear();
        drop(table);
        settled(driver, &device);
        assert_eq!(
            calls(driver),
            ["cuMemUnmap".to_owned(), format!("cuMemAddressFree {}", 8 * STEP)]
        );
        driver.clear();
        drop(growable(&device, 1).await.unwrap());
        settled(driver, &device);
        assert_eq!(calls(driver)[2..], [format!("cuMemAddressFree {STEP}")]);
    });
}

/// No thread of an executor makes these calls.
#[test]
fn growth_is_no_call_of_the_task() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        driver.clear();
        let mut table = growable(&device, 2).await.unwrap();
        soon(table.grow(2 * N)).await.unwrap();
        soon(table.shrink(N)).await.unwrap();
        drop(table);
        settled(driver, &device);
        let mine = super::my_names(driver);
        let made = calls(driver);
        assert!(made.len() > 8, "{made:?}");
        for name in made {
            let name = name.split(' ').next().unwrap().to_owned();
            assert!(!mine.contains(&name), "{name}");
        }
    });
}

/// Each of its calls fails once: a typed error, the length as before, and nothing is left.
#[test]
fn growth_survives_a_failure_of_each_call() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        for name in ["cuMemGetAllocationGranularity", "cuMemAddressReserve"] {
            driver.fail(name, 1, 304);
            let error = growable(&device, 4).await.unwrap_err();
            let is_it =
                matches!(error.detail(), ErrorDetail::Driver { code, .. } if code.code == 304);
            assert!(is_it, "{name}: {error}");
            settled(driver, &device);
        }
        // No memory was asked for: no advice about memory helps.
        driver.fail("cuMemAddressReserve", 1, 2);
        let error = growable(&device, 4).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
        settled(driver, &device);
        driver.fail("cuMemGetAllocationGranularity", 1, 801);
        assert_eq!(growable(&device, 4).await.unwrap_err().kind(), ErrorKind::Unsupported);
        let mut table = growable(&device, 4).await.unwrap();
        soon(table.grow(N)).await.unwrap();
        device.fill(&mut table, 1).queued().unwrap();
        soon(device.done()).await.unwrap();
        let times = [("cuMemCreate", 3), ("cuMemMap", 3), ("cuMemSetAccess", 1)];
        for (name, nth) in times.into_iter().flat_map(|(name, n)| (1..=n).map(move |n| (name, n))) {
            let live = driver.live("shared");
            driver.fail(name, nth, 304);
            let error = soon(table.grow(4 * N)).await.expect_err(name);
            let is_it =
                matches!(error.detail(), ErrorDetail::Driver { code, .. } if code.code == 304);
            assert!(is_it, "{name} {nth}: {error}");
            assert_eq!((table.len(), table.committed_bytes()), (N, STEP), "{name} {nth}");
            assert_eq!(device.memory().unwrap().allocated_bytes, STEP, "{name} {nth}");
            assert_eq!(driver.live("shared"), live, "{name} {nth}: no handle stays");
        }
        // A release that fails keeps the handle, and takes nothing from the buffer.
        soon(table.grow(4 * N)).await.unwrap();
        driver.fail("cuMemUnmap", 1, 304);
        let error = soon(table.shrink(N)).await.unwrap_err();
        assert!(error.to_string().contains("cuMemUnmap"), "{error}");
        assert_eq!((table.len(), table.committed_bytes()), (N, 4 * STEP));
        soon(table.grow(3 * N)).await.unwrap();
        assert_eq!(soon(table.shrink(N)).await.unwrap(), 3 * STEP);
        assert_eq!(soon(device.download(&table)).await.unwrap(), vec![1; N]);
        // Nobody can be told: it is counted.
        let before = device.stats().unreturned;
        driver.fail("cuMemUnmap", 1, 304);
        drop(table);
        eventually("it is counted", || device.stats().unreturned == before + 1);
        assert_eq!(driver.forgive(), 0);
        assert_eq!(device.memory().unwrap().allocated_bytes, 0);
    });
}

/// Before it fails the pool is trimmed and what streams keep is taken back; then it tries again.
#[test]
fn the_pool_makes_room_for_growth() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(100 * MIB);
        let device = device_with(Completion::Adaptive);
        let buffers: [DeviceBuffer<u8>; 2] =
            [30, 60].map(|mib| device.zeros((mib * MIB) as usize).queued().unwrap());
        let kept = device.zeros::<u8>(MIB as usize).queued().unwrap();
        soon(device.done()).await.unwrap();
        drop((buffers, kept));
        assert!(device.memory().unwrap().reserved_bytes > 60 * MIB);
        let mut table = growable(&device, 60).await.unwrap();
        driver.clear();
        soon(table.grow(48 * N)).await.unwrap();
        // Once more while a free is on its way.
        assert!(calls(driver).iter().any(|name| name == "cuMemPoolTrimTo"));
        driver.clear();
        let error = soon(table.grow(51 * N)).await.unwrap_err();
        match *error.detail() {
            ErrorDetail::OutOfMemory { allocated_bytes, asked_bytes, driver_refused, .. } => {
                assert_eq!((allocated_bytes, asked_bytes), (96 * MIB, 6 * MIB));
                assert!(driver_refused, "{error}");
            }
            ref other => panic!("{other}"),
        }
        assert_eq!(calls(driver).iter().filter(|name| *name == "cuMemPoolTrimTo").count(), 1);
        drop(table);
        settled(driver, &device);
    });
}

/// While work holds the steps, none is unmapped; and the driver is left alone after a loss.
#[test]
fn nothing_in_use_is_unmapped() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut table = growable(&device, 4).await.unwrap();
        soon(table.grow(3 * N)).await.unwrap();
        soon(stream.fill(&mut table, 1)).await.unwrap();
        let gate = Gate::close(&stream).unwrap();
        stream.fill(&mut table.slice_mut(N..N + 1).unwrap(), 2).queued().unwrap();
        driver.clear();
        assert_eq!(soon(table.shrink(0)).await.unwrap(), STEP);
        assert_eq!(calls(driver), ["cuMemUnmap"]);
        driver.clear();
        drop(table);
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(calls(driver), [""; 0]);
        gate.open();
        settled(driver, &device);
        let mut table = growable(&device, 4).await.unwrap();
        soon(table.grow(N)).await.unwrap();
        driver.lose(0, 700);
        assert!(soon(device.done()).await.unwrap_err().is_device_lost());
        driver.clear();
        assert!(soon(table.grow(2 * N)).await.unwrap_err().is_device_lost());
        assert!(soon(table.shrink(0)).await.unwrap_err().is_device_lost());
        drop(table);
        eventually("the account is closed", || device.stats().allocated_bytes == 0);
        assert_eq!(calls(driver), [""; 0]);
    });
}

/// The driver refuses such copies to a thread without a current context: they are asked for again with one.
#[test]
fn copies_over_several_steps_are_made() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut table = growable(&device, 4).await.unwrap();
        soon(table.grow(2 * N)).await.unwrap();
        stream.fill(&mut table, 7).queued().unwrap();
        driver.clear();
        assert_eq!(
            soon(stream.download(&table.slice(N - 1..N + 1).unwrap())).await.unwrap(),
            [7; 2]
        );
        assert_eq!(copies(driver), 2);
        let plain = stream.zeros::<u32>(N).queued().unwrap();
        stream.copy(&plain, &mut table.slice_mut(N / 2..N + N / 2).unwrap()).queued().unwrap();
        let source = stream.pinned::<u32>(4).unwrap();
        let uploaded = stream.upload_into(source, &mut table.slice_mut(N - 2..N + 2).unwrap());
        soon(uploaded).await.unwrap();
        soon(stream.done()).await.unwrap();
        // Within a step nothing is asked twice.
        driver.clear();
        soon(stream.download(&table.slice(..N).unwrap())).await.unwrap();
        assert_eq!(copies(driver), 1);
        drop((table, plain));
        settled(driver, &device);
    });
}
