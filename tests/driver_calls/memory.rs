//! The pool that device memory comes from, and what is held of it under a limit.

use gpu_await::{Completion, Device, ErrorKind, Pressure};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::{
    Line, Live, SOON, async_under_the_stand_in, eventually, limited, my_names, runtime, soon,
    under_the_stand_in,
};

const MIB: usize = 1 << 20;

#[test]
fn the_default_pool_is_left_alone() {
    async_under_the_stand_in(async |driver| {
        let before = Live::now(driver);
        // The limit is none of the pool's: that one would count chunks and holes.
        let builder = Device::builder().memory_limit_bytes(50 << 20).release_threshold_bytes(777);
        let device = builder.cuda(0).unwrap();
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let mut x = a.zeros::<u8>(40 * MIB).queued().unwrap();
        b.fill(&mut x, 1).queued().unwrap();
        drop(x);
        soon(b.zeros::<u8>(45 * MIB)).await.unwrap();
        device.memory().unwrap();
        soon(device.trim(0)).await.unwrap();
        drop((a, b, device));
        before.comes_back(driver, &[], "a pool of our own");
        let calls = driver.calls();
        let lines: Vec<_> = calls.iter().map(|call| Line(call)).collect();
        let of = |name: &'static str| lines.iter().filter(move |line| line.name() == name);
        let made = of("cuMemPoolCreate").next().expect("a pool is made");
        assert!(made.has("location=1:0") && made.has("max=0"), "{}", made.0);
        let pool = of("cuMemPoolDestroy").next().and_then(|line| line.value("pool")).unwrap();
        for name in ["cuMemPoolSetAttribute", "cuMemAllocFromPoolAsync"] {
            assert!(of(name).count() >= 2, "{name}: {calls:#?}");
            assert!(of(name).all(|line| line.value("pool") == Some(pool)), "{name}: {calls:#?}");
        }
        let others = ["cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool", "cuMemAllocAsync"];
        assert!(lines.iter().all(|line| !others.contains(&line.name())), "{calls:#?}");
    });
}

#[test]
fn a_pool_that_is_refused_leaves_nothing() {
    under_the_stand_in(|driver| {
        let before = Live::now(driver);
        for call in ["cuMemPoolCreate", "cuMemPoolSetAttribute"] {
            for nth in 1..=2 {
                driver.fail(call, nth, 999);
                drop(Device::cuda(0));
                driver.forgive();
                before.comes_back(driver, &[], call);
            }
        }
    });
}

/// The driver is full of what waits for other streams: the allocation waits for those, on the device.
#[test]
fn a_full_driver_is_asked_again_behind_the_frees() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(64 << 20);
        let device = Device::cuda(0).unwrap();
        let (a, b, c) =
            (device.stream().unwrap(), device.stream().unwrap(), device.stream().unwrap());
        for both in [false, true] {
            let held = driver.hold();
            let mut x = a.full(40 * MIB, 7u8).queued().unwrap();
            if both {
                c.fill(&mut x, 8).queued().unwrap();
            }
            // An event in front of the free is of no use.
            let _point = a.record().unwrap();
            drop(x);
            driver.clear();
            let y = b.full(40 * MIB, 9u8).queued().unwrap();
            let stats = device.stats();
            assert_eq!((stats.allocated_bytes, stats.pending_bytes), (40 << 20, 0));
            let calls = driver.calls();
            let names = my_names(driver);
            let place = |name: &str| names.iter().rposition(|known| known == name);
            let count = |name| names.iter().filter(|known| *known == name).count();
            assert_eq!(count("cuMemAllocFromPoolAsync"), 2, "{calls:#?}");
            assert!(place("cuStreamWaitEvent") < place("cuMemAllocFromPoolAsync"), "{calls:#?}");
            // A block that several streams used is freed by who takes it over.
            assert_eq!(count("cuMemFreeAsync"), usize::from(both), "{calls:#?}");
            drop(held);
            assert_eq!(soon(b.download(&y)).await.unwrap()[40 * MIB - 1], 9);
            drop(y);
            soon(device.done()).await.unwrap();
            eventually("all is free", || driver.live("memory") == 0);
        }
        // Nor is it asked again for what cannot be there.
        let _x = a.zeros::<u8>(40 * MIB).queued().unwrap();
        let error = b.zeros::<u8>(40 * MIB).queued().unwrap_err();
        assert_eq!(limited::told(&error), [0, 40 << 20, 0, 0, 0]);
    });
}

/// Told to fail, it waits for nobody; what is complete it gets all the same, though the driver might
/// not know yet.
#[test]
fn a_full_driver_under_fail_is_asked_behind_what_is_complete() {
    async_under_the_stand_in(async |driver| {
        driver.set_memory(64 << 20);
        let device = Device::builder().on_pressure(Pressure::Fail).cuda(0).unwrap();
        let (a, b, c) =
            (device.stream().unwrap(), device.stream().unwrap(), device.stream().unwrap());
        let x = a.full(40 * MIB, 7u8).queued().unwrap();
        soon(a.done()).await.unwrap();
        // The free is on the stream, and has not run.
        let held = driver.hold();
        drop(x);
        assert_eq!(device.stats().pending_bytes, 0);
        let y = b.full(40 * MIB, 9u8).queued().expect("behind the free");
        drop(held);
        soon(b.done()).await.unwrap();
        // Used, and not complete.
        let held = driver.hold();
        drop(y);
        let mut z = a.full(20 * MIB, 7u8).queued().unwrap();
        c.fill(&mut z, 8).queued().unwrap();
        drop(z);
        let error = b.full(50 * MIB, 9u8).queued().unwrap_err();
        assert_eq!(limited::told(&error)[..3], [20 << 20, 0, 20 << 20]);
        let mut reclaimed = Box::pin(b.reclaimed(50 << 20));
        assert!(futures::poll!(&mut reclaimed).is_pending());
        drop(held);
        soon(reclaimed).await.unwrap();
        soon(b.full(50 * MIB, 9u8)).await.unwrap();
    });
}

/// What a stream kept is freed aside when that goes. Until the free has run nobody has the memory who is
/// not behind it.
#[test]
fn a_free_that_has_not_run_counts() {
    async_under_the_stand_in(async |driver| {
        const LIMIT: u64 = 8 << 20;
        driver.set_memory(LIMIT);
        for pressure in [Pressure::Wait, Pressure::Fail] {
            let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(pressure);
            let device = builder.cuda(0).unwrap();
            let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
            let parts: Vec<_> = (0..4).map(|_| a.zeros::<u8>(MIB).queued().unwrap()).collect();
            drop(parts);
            soon(a.done()).await.unwrap();
            let held = driver.hold();
            driver.clear();
            drop(a);
            let frees = || driver.names().iter().filter(|name| *name == "cuMemFreeAsync").count();
            eventually("what it kept is freed", || frees() == 4);
            assert_eq!(device.stats().pending_bytes, 4 << 20, "{pressure:?}");
            let y = b.full(8 * MIB, 5u8).queued().expect("behind the frees");
            assert_eq!(device.stats().pending_bytes, 0);
            drop(held);
            assert_eq!(soon(b.download(&y)).await.unwrap()[8 * MIB - 1], 5);
            drop(y);
            eventually("all of it is free", || device.stats().pending_bytes == 0);
            eventually("and the driver's", || driver.live("memory") == 0);
        }
    });
}

/// A driver's pool does not join what a stream has yet to free with what was never used: the error says
/// who refused, and `reclaimed` waits instead of saying again that it fits.
#[test]
fn reclaimed_waits_where_the_driver_refused() {
    async_under_the_stand_in(async |driver| {
        for pressure in [Pressure::Wait, Pressure::Fail] {
            let builder = Device::builder().memory_limit_bytes(64 << 20).on_pressure(pressure);
            let device = builder.cuda(0).unwrap();
            let a = device.stream().unwrap();
            let held = driver.hold();
            drop(a.zeros::<u8>(40 * MIB).queued().unwrap());
            driver.fail("cuMemAllocFromPoolAsync", 1, 2);
            let refuse_again = a.zeros::<u8>(50 * MIB).queued();
            // Asked once more, with all that it could take over.
            drop(refuse_again.expect("the second attempt"));
            for nth in [1, 2] {
                driver.fail("cuMemAllocFromPoolAsync", nth, 2);
            }
            let error = a.zeros::<u8>(60 * MIB).queued().unwrap_err();
            driver.forgive();
            let text = error.to_string();
            assert!(text.contains("the driver refused although there is room"), "{text}");
            assert!(text.contains("await `reclaimed`"), "{text}");
            let mut reclaimed = Box::pin(a.reclaimed(60 << 20));
            assert!(futures::poll!(&mut reclaimed).is_pending());
            drop(held);
            soon(reclaimed).await.unwrap();
            soon(a.zeros::<u8>(60 * MIB)).await.unwrap();
            soon(device.done()).await.unwrap();
        }
    });
}

/// The driver's pool reserves whole chunks and does not join pieces: a limit bounds what is held, not those.
#[test]
fn what_fits_beside_holes_is_given() {
    async_under_the_stand_in(async |_driver| {
        let open = |limit| Device::builder().memory_limit_bytes(limit).cuda(0).unwrap();
        limited::fits_beside_holes(open).await.unwrap();
    });
}

#[test]
fn a_refused_free_of_the_driver_is_counted() {
    async_under_the_stand_in(async |driver| {
        let builder = Device::builder().memory_limit_bytes(8 << 20).spare_bytes_per_stream(0);
        let device = builder.cuda(0).unwrap();
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        driver.fail("cuMemFreeAsync", 1, 1);
        drop(a.zeros::<u8>(MIB).queued().unwrap());
        assert_eq!(device.stats().leaked_bytes, 1 << 20);
        // Taken over: the allocation fails with it, and puts the rest back.
        let held = driver.hold();
        let mut parts = Vec::new();
        for _ in 0..3 {
            let mut x = a.zeros::<u8>(2 * MIB).queued().unwrap();
            b.fill(&mut x, 1).queued().unwrap();
            parts.push(x);
        }
        drop(parts);
        driver.fail("cuMemFreeAsync", 1, 1);
        let error = a.zeros::<u8>(5 * MIB).queued().unwrap_err();
        assert!(error.to_string().contains("cuMemFreeAsync"), "{error}");
        let stats = device.stats();
        let seen = (stats.leaked_bytes, stats.pending_bytes, stats.allocated_bytes);
        assert_eq!(seen, (3 << 20, 4 << 20, 0));
        // The leak leaves 5 MiB.
        assert!(a.zeros::<u8>(6 * MIB).queued().is_err());
        let y = a.full(5 * MIB, 3u8).queued().unwrap();
        drop(held);
        assert_eq!(soon(a.download(&y)).await.unwrap()[5 * MIB - 1], 3);
    });
}

#[test]
fn the_figures_are_those_of_the_host_device() {
    async_under_the_stand_in(async |_driver| {
        let device = Device::cuda(0).unwrap();
        assert_eq!(limited::figures(&device).await.unwrap(), limited::FIGURES);
    });
}

/// The device has no more than the limit, and gives what was freed to nobody who is not behind the free.
#[test]
fn random_programs_stay_within_the_limit() {
    under_the_stand_in(|driver| {
        let mut runner = TestRunner::deterministic();
        let end = std::time::Instant::now() + 4 * SOON;
        for _ in 0..40 {
            let program = limited::programs(4).new_tree(&mut runner).unwrap().current();
            runtime().block_on(async {
                let pressure = if program.waits { Pressure::Wait } else { Pressure::Fail };
                let builder = Device::builder()
                    .on_pressure(pressure)
                    .spare_bytes_per_stream(program.limit / 4)
                    .memory_limit_bytes(program.limit);
                driver.set_memory(program.limit);
                let device = builder.cuda(0).unwrap();
                let mut streams = limited::streams(&device).await.unwrap();
                let run = limited::run(&device, &mut streams, &program);
                run.await.expect("only what the model says");
            });
            assert_eq!(driver.misuse(), [""; 0], "{program:#?}");
            // And its pool, which reserves all that there is.
            eventually("the device is gone", || driver.live("memory") + driver.live("pool") == 0);
            if std::time::Instant::now() > end {
                break;
            }
        }
    });
}

#[test]
fn a_slab_refused_in_the_background_is_no_error() {
    const REGISTER: &str = "cuMemHostRegister_v2";
    under_the_stand_in(|driver| {
        for refusals in [1, 2] {
            driver.clear();
            (1..=refusals).for_each(|nth| driver.fail(REGISTER, nth, 2));
            // In this mode nothing else is registered.
            let device = Device::builder().completion(Completion::Event).cuda(0).unwrap();
            let count = || driver.names().iter().filter(|name| *name == REGISTER).count() as u64;
            eventually("it is refused", || count() == 1);
            assert_eq!(device.stats().pinned_bytes, 0);
            // Nobody tries it in the background again; the next caller does.
            if refusals == 2 {
                let error = device.pinned::<u8>(10).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            }
            let first = device.pinned::<u8>(10).unwrap();
            assert_eq!((count(), device.stats().pinned_bytes), (refusals + 1, 2 << 20));
            // From then on they are made ahead of need again.
            let second = device.pinned::<u8>(MIB).unwrap();
            eventually("another one", || device.stats().pinned_bytes == 4 << 20);
            drop((first, second));
        }
    });
}
