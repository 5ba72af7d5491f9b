//! Memory that several processes share, as the driver sees it: which calls, in which order, and what is left when one of them fails.

use gpu_await::sibling::mutable;
use gpu_await::{Completion, Device, DeviceBuffer, ErrorDetail, ErrorKind, Result, SharedProblem};
use stand_in_cuda::StandIn;

use super::{Line, async_under_the_stand_in, device_with, eventually, soon};

const LEN: usize = 1000;
const MIB: u64 = 1 << 20;

/// The calls for such memory since the last clear, with what their access is.
fn calls(driver: &StandIn) -> Vec<String> {
    let calls = driver.calls();
    let calls = calls.iter().map(|line| (Line(line).name(), Line(line).value("flags")));
    let of_memory = calls.filter(|(name, _)| {
        ["cuMemCreate", "cuMemExport", "cuMemImport", "cuMemAddress", "cuMemMap", "cuMemUnmap"]
            .iter()
            .chain(&["cuMemSetAccess", "cuMemRelease"])
            .any(|start| name.starts_with(start))
    });
    of_memory
        .map(|(name, flags)| match flags {
            Some(flags) => format!("{name} {flags}"),
            None => name.to_owned(),
        })
        .collect()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a folder").count()
}

/// Makes, fills, seals and imports.
async fn tour(device: &Device) -> Result<()> {
    let mut buffer = soon(device.shared::<u32>(LEN)).await?;
    device.fill(&mut buffer, 1).queued()?;
    let (ours, descriptors) = soon(buffer.seal(device, 1)).await?;
    let theirs = soon(device.import_shared::<u32>(&descriptors, LEN, 1)).await?;
    assert_eq!(soon(device.download(&theirs)).await?, [1; LEN]);
    drop(ours);
    Ok(())
}

fn settled(driver: &StandIn, device: &Device) {
    eventually("it is unmapped", || {
        let info = device.memory().expect("a device");
        (info.shared_bytes, info.imported_bytes, driver.live("shared")) == (0, 0, 0)
    });
}

#[test]
fn shared_memory_is_made_sealed_and_imported() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        tour(&device).await.unwrap();
        settled(driver, &device);
        driver.clear();
        let mut buffer = soon(device.shared::<u32>(LEN)).await.unwrap();
        let made = [
            "cuMemCreate",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess 3",
            "cuMemExportToShareableHandle",
            "cuMemRelease",
        ];
        assert_eq!(calls(driver), made);
        device.fill(&mut buffer, 1).queued().unwrap();
        driver.clear();
        let (ours, descriptors) = soon(buffer.seal(&device, 1)).await.unwrap();
        assert_eq!(calls(driver), ["cuMemSetAccess 1"]);
        driver.clear();
        let theirs = soon(device.import_shared::<u32>(&descriptors, LEN, 1)).await.unwrap();
        let imported = [
            "cuMemImportFromShareableHandle",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess 1",
            "cuMemRelease",
        ];
        assert_eq!(calls(driver), imported);
        driver.clear();
        drop((ours, theirs));
        settled(driver, &device);
        let unmapped = ["cuMemUnmap", "cuMemAddressFree", "cuMemUnmap", "cuMemAddressFree"];
        assert_eq!(calls(driver), unmapped);
    });
}

/// Memory that passes from one process to the next is mapped for writing, and is never made read-only.
#[test]
fn memory_that_is_handed_over_is_writable() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let mut made = soon(device.shared::<u32>(LEN)).await.unwrap();
        assert!(mutable::hand_over(&made, 3).is_err(), "nobody wrote it");
        soon(device.fill(&mut made, 1)).await.unwrap();
        driver.clear();
        let descriptors = mutable::hand_over(&made, 3).unwrap();
        assert_eq!(calls(driver), [""; 0]);
        drop(made);
        settled(driver, &device);
        driver.clear();
        // SAFETY: nobody else has it.
        let imported = unsafe { mutable::import::<u32>(&device, &descriptors, LEN, 3) };
        let mut taken = soon(imported).await.unwrap();
        let calls = calls(driver);
        assert_eq!(calls[0], "cuMemImportFromShareableHandle");
        assert!(calls.contains(&"cuMemSetAccess 3".to_owned()), "{calls:?}");
        soon(device.fill(&mut taken, 2)).await.unwrap();
        soon(mutable::settled(&taken).unwrap()).await.unwrap();
        drop(taken);
        settled(driver, &device);
    });
}

/// Each of its calls fails once: a typed error, and nothing is left.
#[test]
fn each_call_of_shared_memory_fails() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        tour(&device).await.unwrap();
        settled(driver, &device);
        let before = descriptors();
        let times = [
            ("cuDeviceGetUuid_v2", 2),
            ("cuMemGetAllocationGranularity", 1),
            ("cuMemCreate", 1),
            ("cuMemAddressReserve", 2),
            ("cuMemMap", 2),
            ("cuMemSetAccess", 3),
            ("cuMemExportToShareableHandle", 1),
            ("cuMemImportFromShareableHandle", 1),
        ];
        for (name, nth) in times.into_iter().flat_map(|(name, n)| (1..=n).map(move |n| (name, n))) {
            driver.fail(name, nth, 304);
            let error = tour(&device).await.expect_err(name);
            let is_typed = match error.detail() {
                ErrorDetail::Driver { code, .. } => code.code == 304,
                // Whatever the driver says to a descriptor.
                ErrorDetail::BadShared { problem: SharedProblem::NotShared { what, .. } } => {
                    *what == "memory"
                }
                _ => false,
            };
            assert!(is_typed, "{name} {nth}: {error}");
            assert_eq!(driver.forgive(), 0, "{name} {nth}");
            settled(driver, &device);
            eventually("its descriptors are closed", || descriptors() == before);
        }
        driver.fail("cuMemGetAllocationGranularity", 1, 801);
        let error = tour(&device).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        tour(&device).await.unwrap();
    });
}

/// What the pool reserves and does not use is returned before an allocation beside it fails.
#[test]
fn the_pool_returns_what_it_reserves() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(100 * MIB);
        let device = device_with(Completion::Adaptive);
        let buffers: [DeviceBuffer<u8>; 2] =
            [30, 60].map(|mib| device.zeros((mib * MIB) as usize).queued().unwrap());
        soon(device.done()).await.unwrap();
        drop(buffers);
        assert!(device.memory().unwrap().reserved_bytes > 60 * MIB);
        let shared = soon(device.shared::<u8>((80 * MIB) as usize)).await.unwrap();
        let error = soon(device.shared::<u8>((80 * MIB) as usize)).await.unwrap_err();
        match *error.detail() {
            ErrorDetail::OutOfMemory { shared_bytes, asked_bytes, .. } => {
                assert_eq!((shared_bytes, asked_bytes), (80 * MIB, 80 * MIB));
            }
            ref other => panic!("{other}"),
        }
        drop(shared);
        settled(driver, &device);
    });
}

/// The process has as many descriptors as it may: that is said, and not the driver's code.
#[test]
fn no_descriptor_for_shared_memory() {
    async_under_the_stand_in(async |_| {
        let device = device_with(Completion::Adaptive);
        drop(soon(device.shared::<u32>(LEN)).await.unwrap());
        // SAFETY: all zeros is a limit.
        let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
        // SAFETY: it is written during the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        limit.rlim_cur = 200;
        // SAFETY: it is read during the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        let mut taken = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            taken.push(file);
        }
        let mut refused = 0;
        let shared = loop {
            match soon(device.shared::<u32>(LEN)).await {
                Ok(shared) => break shared,
                Err(error) => {
                    let ErrorDetail::BadShared {
                        problem: SharedProblem::System { code: libc::EMFILE, .. },
                    } = error.detail()
                    else {
                        panic!("with {refused} free: {error}");
                    };
                    eventually("nothing is left", || device.stats().shared_bytes == 0);
                }
            }
            refused += 1;
            drop(taken.pop());
        };
        // The memory's and the header's, at least.
        assert!(refused >= 2, "{refused}");
        drop(shared);
    });
}

/// After a loss the driver is left alone, and everything resolves.
#[test]
fn shared_memory_of_a_lost_device() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let mut buffer = soon(device.shared::<u32>(LEN)).await.unwrap();
        device.fill(&mut buffer, 1).queued().unwrap();
        let (ours, descriptors) = soon(buffer.seal(&device, 1)).await.unwrap();
        let filling = soon(device.shared::<u32>(LEN)).await.unwrap();
        driver.lose(0, 700);
        assert!(soon(device.done()).await.unwrap_err().is_device_lost());
        driver.clear();
        assert!(soon(filling.seal(&device, 1)).await.unwrap_err().is_device_lost());
        let import = device.import_shared::<u32>(&descriptors, LEN, 1);
        assert!(soon(import).await.unwrap_err().is_device_lost());
        assert!(soon(device.shared::<u32>(LEN)).await.unwrap_err().is_device_lost());
        drop(ours);
        eventually("the account is closed", || device.stats().shared_bytes == 0);
        assert_eq!(calls(driver), [""; 0]);
        // Another process imports it all the same: this is all that it needs.
        assert_eq!(descriptors.info().unwrap().generation, 1);
    });
}
