//! The calling thread is left as it was found: its current context is its own.

use std::ffi::{c_int, c_void};

use gpu_await::{Completion, Device, Image, Module};

use super::{MODES, async_under_the_stand_in, axpy, device_with, soon};

/// The driver, as another user of it in the same process sees it.
struct OtherUser {
    library: libloading::Library,
}

type Context = *mut c_void;

impl OtherUser {
    fn open() -> Self {
        // SAFETY: the stand-in runs no code when loaded.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
        OtherUser { library }
    }

    fn current(&self) -> Context {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver's function of this name has this type.
        let call = unsafe {
            self.library.get::<unsafe extern "C" fn(*mut Context) -> c_int>(b"cuCtxGetCurrent\0")
        };
        let call = call.unwrap();
        // SAFETY: `context` is a live handle.
        assert_eq!(unsafe { call(&raw mut context) }, 0);
        context
    }

    fn set_current(&self, context: Context) {
        // SAFETY: the driver's function of this name has this type.
        let call = unsafe {
            self.library.get::<unsafe extern "C" fn(Context) -> c_int>(b"cuCtxSetCurrent\0")
        };
        let call = call.unwrap();
        // SAFETY: a live context, or none.
        assert_eq!(unsafe { call(context) }, 0);
    }

    fn init(&self) {
        // SAFETY: the driver's function of this name has this type.
        let call = unsafe { self.library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0") };
        let call = call.unwrap();
        // SAFETY: 0 is the only flag.
        assert_eq!(unsafe { call(0) }, 0);
    }

    /// The primary context of a device, for good.
    fn retain(&self, device: c_int) -> Context {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver's function of this name has this type.
        let call = unsafe {
            self.library.get::<unsafe extern "C" fn(*mut Context, c_int) -> c_int>(
                b"cuDevicePrimaryCtxRetain\0",
            )
        };
        let call = call.unwrap();
        // SAFETY: `context` is a live handle.
        assert_eq!(unsafe { call(&raw mut context, device) }, 0);
        context
    }
}

/// Makes every kind of public call, and looks at the current context after each.
async fn tour(device: Device, mode: Completion, check: impl Fn(&str)) {
    let look = |what: &str| check(&format!("{mode:?}: {what}"));
    look("Device::cuda");
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    look("stream");
    let module = Module::load(&device, Image::ptx(include_str!("../../kernels/spin.ptx"))).await;
    let module = module.unwrap();
    look("Module::load");
    // SAFETY: the stand-in's kernel takes one word.
    let spin = unsafe { module.kernel::<(u64,)>("spin") }.unwrap();
    look("Module::kernel");
    let axpy = axpy(&device).await;
    look("load");
    let x = a.upload(vec![1.0f32; 1000]).queued().unwrap();
    look("upload");
    let mut y = a.full(1000, 2.0f32).queued().unwrap();
    look("full");
    let e = a.empty::<u8>(7).queued().unwrap();
    look("empty");
    a.fill(&mut y, 3.0).queued().unwrap();
    a.copy(&x, &mut y).queued().unwrap();
    look("fill, copy");
    axpy.launch(&a, 3.0, &x, &mut y).queued().unwrap();
    soon(axpy.launch(&a, 3.0, &x, &mut y)).await.unwrap();
    look("launch");
    let config = gpu_await::LaunchConfig::new(1, 1);
    a.launch(&spin, config.shared_mem_bytes(60_000), (1_000,)).queued().unwrap();
    look("a launch with much shared memory");
    axpy.launch(&b, 3.0, &x, &mut y).queued().unwrap();
    b.wait(&a).queued().unwrap();
    look("another stream");
    let host = soon(b.download(&y)).await.unwrap();
    look("download");
    soon(b.upload_into(host, &mut y)).await.map(drop).unwrap();
    look("upload_into");
    assert_eq!(soon(a.host_fn(|| 7)).await.unwrap(), 7);
    look("host_fn");
    let start = a.record_timed().unwrap();
    let end = a.record_timed().unwrap();
    soon(end.done()).await.unwrap();
    end.elapsed_since(&start).unwrap();
    look("events");
    a.copy_2d(&x, &mut y, gpu_await::Copy2d::new(10, 10).source_pitch(50)).queued().unwrap();
    let z = soon(b.upload_staged(vec![3u32; 50_000])).await.unwrap();
    assert_eq!(soon(a.download_staged(&z)).await.unwrap(), [3; 50_000]);
    drop(z);
    look("rows, staged copies");
    soon(device.trim(0)).await.unwrap();
    let peer = Device::cuda(0).unwrap();
    look("trim, another device");
    assert!(soon(device.enable_peer(&peer)).await.unwrap());
    let there = peer.stream().unwrap().full(1000, 4.0f32).queued().unwrap();
    a.copy(&there, &mut y).queued().unwrap();
    look("enable_peer, a copy from a peer");
    drop((there, peer));
    look("dropping a peer");
    let legacy = device.legacy_stream().unwrap();
    legacy.fill(&mut y, 4.0).queued().unwrap();
    axpy.launch(&legacy, 3.0, &x, &mut y).queued().unwrap();
    legacy.wait(&b).queued().unwrap();
    assert_eq!(soon(legacy.host_fn(|| 8)).await.unwrap(), 8);
    let _ = legacy.is_idle();
    look("the legacy default stream");
    drop(device.pinned::<u8>(9 << 20).unwrap());
    soon(device.trim_pinned(0)).await.unwrap();
    drop(device.pinned_flag().unwrap());
    look("pinned");
    device.memory().unwrap();
    let _ = device.stats();
    look("memory, stats");
    let leaves = |context: Option<Context>| {
        let call = |queue: &gpu_await::RawQueue<'_>, ()| {
            let driver = OtherUser::open();
            assert_eq!(driver.current() as u64, queue.context(), "the device's, inside");
            context.into_iter().for_each(|context| driver.set_current(context));
            Ok::<_, gpu_await::Error>(())
        };
        // SAFETY: nothing is put on the stream.
        unsafe { a.enqueue(gpu_await::Uses::new("nothing"), call) }.queued().unwrap();
    };
    leaves(None);
    look("enqueue");
    leaves(Some(std::ptr::null_mut()));
    look("enqueue, which left no context current");
    leaves(Some(OtherUser::open().retain(1)));
    look("enqueue, which left another context current");
    a.synchronize().unwrap();
    device.synchronize().unwrap();
    look("synchronize");
    drop((e, x));
    look("dropping a buffer of one stream");
    drop(y);
    look("dropping a buffer of two streams");
    drop((axpy, spin, module));
    look("dropping a module");
    drop((a, b));
    look("dropping streams");
    drop(device);
    look("dropping the device");
}

#[test]
fn the_current_context_is_current_again_after_every_call() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let other = OtherUser::open();
        other.init();
        let theirs = other.retain(1);
        for mode in MODES {
            for context in [std::ptr::null_mut(), theirs] {
                other.set_current(context);
                let device = device_with(mode);
                tour(device, mode, |what| assert_eq!(other.current(), context, "{what}")).await;
            }
        }
    });
}

#[test]
fn a_refused_device_leaves_the_current_context() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let other = OtherUser::open();
        other.init();
        let theirs = other.retain(1);
        for context in [std::ptr::null_mut(), theirs] {
            other.set_current(context);
            for (call, nth) in [
                ("cuDevicePrimaryCtxRetain", 1),
                // The first is asked by cudarc, which keeps the context if that fails.
                ("cuDeviceGetAttribute", 2),
                ("cuDeviceGetAttribute", 5),
                ("cuDeviceGetName", 1),
                ("cuCtxGetStreamPriorityRange", 1),
                ("cuMemPoolSetAttribute", 1),
                ("cuStreamCreateWithPriority", 1),
                ("cuStreamCreateWithPriority", 2),
            ] {
                driver.fail(call, nth, 999);
                let error = Device::cuda(0).unwrap_err();
                assert!(error.to_string().contains("999"), "{call}: {error}");
                assert_eq!(other.current(), context, "{call}");
            }
        }
        super::eventually("contexts are released", || driver.live("context") == 1);
        assert_eq!(driver.live("stream"), 0);
    });
}
