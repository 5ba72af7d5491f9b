//! cudarc's types, in and out, over one driver.

use std::sync::mpsc::{Sender, channel};

use cudarc::driver::result::ctx::get_current;
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, DevicePtr, DeviceSlice};
use gpu_await::{Completion, Device, DeviceKind, ErrorDetail, Uses};

use super::slices::random_orders;
use super::{MODES, async_under_the_stand_in, device_with, soon, under_the_stand_in};

#[test]
fn slices_in_random_orders() {
    under_the_stand_in(|_| {
        for (seed, mode) in MODES.into_iter().enumerate() {
            random_orders(&device_with(mode), 60, seed as u64 + 1).unwrap();
        }
    });
}

#[test]
fn a_device_of_their_context() {
    async_under_the_stand_in(async |driver| {
        let context = CudaContext::new(0).unwrap();
        let contexts = driver.live("context");
        let device = Device::from_cudarc(&context).unwrap();
        assert_eq!(driver.live("context"), contexts);
        assert!(std::sync::Arc::ptr_eq(&device.cudarc_context().unwrap(), &context));
        assert_eq!((device.kind(), device.ordinal()), (DeviceKind::Cuda, 0));
        let slice = context.default_stream().clone_htod(&[1.0f32; 100]).unwrap();
        // SAFETY: it was written, and nobody captures anything.
        let mut x = unsafe { device.adopt_cudarc(slice) }.unwrap();
        device.fill(&mut x, 3.0).queued().unwrap();
        // SAFETY: as above.
        let slice = unsafe { device.release_to_cudarc(x, &context.default_stream()) }.unwrap();
        assert_eq!(context.default_stream().clone_dtoh(&slice).unwrap(), [3.0; 100]);
        drop(device);
        super::eventually("the device goes", || driver.live("stream") == 0);
        // The context is still theirs.
        assert_eq!(context.default_stream().clone_dtoh(&slice).unwrap(), [3.0; 100]);
    });
}

/// What is current, and how its thread's calls meet captures, where it is dropped.
struct Noticing(Sender<(usize, CUstreamCaptureMode)>);

impl Drop for Noticing {
    fn drop(&mut self) {
        let context = get_current().unwrap().map_or(0, |context| context as usize);
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live mode.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
        self.0.send((context, mode)).unwrap();
    }
}

/// Another library's values may need it to go.
#[test]
fn what_was_kept_is_dropped_in_the_context() {
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let context = device.cudarc_context().unwrap().cu_ctx() as usize;
        let stream = device.stream().unwrap();
        let (noticed, drops) = channel();
        let noticing = || Noticing(noticed.clone());
        let x = stream.full(10, 1u32).queued().unwrap();
        // SAFETY: `x` outlives it, and nobody else uses it.
        let adopted =
            unsafe { device.adopt_memory::<u32>(x.device_ptr(), 10, noticing()) }.unwrap();
        drop(adopted);
        let uses = Uses::new("keeps").keeps(noticing());
        // SAFETY: nothing is put on the stream.
        let op = unsafe { stream.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) };
        soon(op).await.unwrap();
        let value = noticing();
        drop(stream.host_fn(move || value));
        for _ in 0..3 {
            let seen = drops.recv_timeout(super::SOON).unwrap();
            assert_eq!(seen, (context, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
        }
    });
}

/// Memory of ours leaves our figures, and cudarc frees it; nothing is freed twice, or not at all.
#[test]
fn memory_changes_hands() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let context = device.cudarc_context().unwrap();
        let stream = device.stream().unwrap();
        let theirs = context.new_stream().unwrap();
        let live = driver.live("memory");
        let x = stream.full(1000, 7u32).queued().unwrap();
        let allocated = device.memory().unwrap().allocated_bytes;
        assert_eq!(driver.live("memory"), live + 1);
        // SAFETY: nobody captures the stream.
        let slice = unsafe { device.release_to_cudarc(x, &theirs) }.unwrap();
        assert!(device.memory().unwrap().allocated_bytes < allocated);
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [7; 1000]);
        drop(slice);
        super::eventually("cudarc frees it", || driver.live("memory") == live);

        // And back again: the same slice comes out.
        let slice = theirs.clone_htod(&[8u32; 1000]).unwrap();
        let ptr = slice.device_ptr(&theirs).0;
        // SAFETY: as above.
        let x = unsafe { device.adopt_cudarc(slice) }.unwrap();
        assert_eq!(x.device_ptr(), ptr);
        assert_eq!(soon(stream.download(&x)).await.unwrap(), [8; 1000]);
        // SAFETY: as above.
        let slice = unsafe { device.release_to_cudarc(x, &context.default_stream()) }.unwrap();
        assert_eq!(slice.stream(), &theirs, "the stream is its own");
        // SAFETY: as above.
        let x = unsafe { device.adopt_cudarc(slice) }.unwrap();
        drop(x);
        super::eventually("it is dropped", || driver.live("memory") == live);
        soon(device.close(std::time::Duration::from_secs(5))).await.unwrap();
    });
}

#[test]
fn what_cannot_change_hands_comes_back() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let (device, other) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let theirs = other.cudarc_context().unwrap().default_stream();
        let slice = theirs.clone_htod(&[1u32; 10]).unwrap();
        // SAFETY: refused.
        let refused = unsafe { device.adopt_cudarc(slice) }.unwrap_err();
        assert!(
            matches!(refused.error.detail(), ErrorDetail::WrongDevice { .. }),
            "{}",
            refused.error
        );
        let slice = refused.value.expect("it comes back");
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [1; 10]);

        let elsewhere = other.zeros::<u32>(10).synchronize().unwrap();
        // SAFETY: refused.
        let refused = unsafe { device.adopt_memory::<u32>(elsewhere.device_ptr(), 10, ()) };
        let error = refused.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
        assert!(error.to_string().contains("cuda:1"), "{error}");

        let stream = device.stream().unwrap();
        let ours = device.cudarc_context().unwrap().default_stream();
        let release = |buffer, stream| {
            // SAFETY: refused.
            let refused = unsafe { device.release_to_cudarc::<u32>(buffer, stream) }.unwrap_err();
            assert!(refused.value.is_some(), "it comes back");
            refused.error
        };
        let unwritten = release(stream.empty(10).queued().unwrap(), &ours);
        assert!(matches!(unwritten.detail(), ErrorDetail::Unwritten { .. }), "{unwritten}");
        let elsewhere = release(stream.zeros(10).queued().unwrap(), &theirs);
        assert!(matches!(elsewhere.detail(), ErrorDetail::WrongDevice { .. }), "{elsewhere}");
        let empty = release(stream.zeros(0).queued().unwrap(), &ours);
        assert!(matches!(empty.detail(), ErrorDetail::Unsupported { .. }), "{empty}");
        let memory = stream.full(10, 5u32).synchronize().unwrap();
        // SAFETY: the owner keeps it.
        let third = unsafe { device.adopt_memory::<u32>(memory.device_ptr(), 10, memory) }.unwrap();
        let third = release(third, &ours);
        assert!(matches!(third.detail(), ErrorDetail::Unsupported { .. }), "{third}");
        let mut whole = stream.zeros(10).queued().unwrap();
        let rest = whole.split_off(4).unwrap();
        let part = release(rest, &ours);
        assert!(matches!(part.detail(), ErrorDetail::Unsupported { .. }), "{part}");
        // Uses of the other part are nobody's any more.
        let alone = release(whole, &ours);
        assert!(matches!(alone.detail(), ErrorDetail::Unsupported { .. }), "{alone}");
        assert!(Device::host().cudarc_context().is_err());
    });
}

/// What cudarc's safe wrappers take.
#[test]
fn declared_ranges_as_theirs() {
    async_under_the_stand_in(async |_| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.full(100, 3u8).queued().unwrap();
        let mut y = stream.empty(100).queued().unwrap();
        let uses = Uses::new("copy").reads(&x).writes(&mut y);
        // SAFETY: cudarc copies all of `x` to `y`, on the stream.
        let op = unsafe {
            stream.enqueue(uses, |queue, (x, y)| {
                let theirs = queue.cudarc_stream()?;
                assert_eq!(theirs.cu_stream() as u64, queue.stream());
                let (x, mut y) = (x.cudarc(&theirs), y.cudarc(&theirs));
                assert_eq!((x.len(), x.stream()), (100, &theirs));
                theirs
                    .memcpy_dtod(&x, &mut y)
                    .map_err(Box::<dyn std::error::Error + Send + Sync>::from)
            })
        };
        op.queued().unwrap();
        assert_eq!(soon(stream.download(&y)).await.unwrap(), [3; 100]);
        // SAFETY: the loan goes before the stream, and nobody captures it.
        let (theirs, loan) = unsafe { stream.lend_cudarc() }.unwrap();
        let slice = theirs.clone_htod(&[4u8; 10]).unwrap();
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [4; 10]);
        drop((slice, theirs, loan));
        soon(stream.done()).await.unwrap();
    });
}

/// A stream on loan marks each operation; afterwards it does not.
#[test]
fn a_loan_of_a_stream_ends() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(100, 1u8).queued().unwrap();
        soon(stream.done()).await.unwrap();
        let mut fill = || {
            driver.clear();
            stream.fill(&mut x, 2).queued().unwrap();
            super::my_names(driver)
        };
        assert_eq!(fill(), ["cuMemsetD8Async"]);
        // SAFETY: nobody uses it.
        let loan = unsafe { stream.lend_raw() };
        assert_eq!(fill(), ["cuMemsetD8Async", "cuEventRecord"]);
        drop(loan);
        assert_eq!(fill(), ["cuMemsetD8Async"]);
    });
}

/// As the Python extension does: a share of a buffer, exported, and dropped by the consumer while its work is under way;
/// nobody asks for anything afterwards.
#[test]
fn a_share_that_was_exported_is_freed() {
    const LEN: usize = 1 << 20;
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let context = device.cudarc_context().unwrap();
            let stream = device.stream().unwrap();
            let theirs = context.new_stream().unwrap();
            let mut work = theirs.alloc_zeros::<u8>(100).unwrap();
            soon(stream.host_fn(|| ())).await.unwrap();
            let before = driver.live("memory");
            for _ in 0..3 {
                let buffer = std::sync::Arc::new(stream.full(LEN, 1.0f32).queued().unwrap());
                let (ptr, owner) = (buffer.device_ptr(), buffer.clone());
                // SAFETY: the owner keeps the memory, whose writer is on the stream.
                let share = unsafe { stream.adopt_memory::<f32>(ptr, LEN, owner) }.unwrap();
                let number = Some(theirs.cu_stream() as i64);
                // SAFETY: the stream lives as long as the test.
                let consumer =
                    unsafe { gpu_await::DlpackConsumer::from_argument(&device, number) }.unwrap();
                let tensor = share.into_dlpack(&[LEN], consumer).unwrap();
                let held = driver.hold();
                theirs.memset_zeros(&mut work).unwrap();
                drop(tensor);
                drop(buffer);
                // The reaper has marked the end by then.
                let marked = || driver.names().iter().any(|name| name == "cuCtxRecordEvent");
                super::eventually("the end is marked", marked);
                drop(held);
                super::eventually("it is freed", || driver.live("memory") == before);
                super::eventually("that is known", || device.memory().unwrap().used_bytes == 0);
                driver.clear();
            }
        }
    });
}
