//! What is left when the n-th call of a kind fails: a typed error, a stream that goes on, no
//! misuse, and nothing that lives on.

use gpu_await::{Completion, Copy2d, Device, ErrorKind, Image, LaunchConfig, Module, Result};

use super::{Live, async_under_the_stand_in, eventually, soon};
use stand_in_cuda::StandIn;

/// How much of which kind may be left.
type Left = &'static [(&'static str, i64)];

/// Every kind of call that is made while a device is used, and what is left behind when it reports
/// failure *before* and *after* it did its work: a driver that made something and says that it did
/// not leaves nobody a handle to give it back with, and what it refused to destroy stays.
///
/// `cuCtxSetCurrent` is not among them: a context that cannot be put back stays where it is.
const CALLS: &[(&str, [Left; 2])] = &[
    ("cuStreamCreateWithPriority", [&[], &[("stream", 1)]]),
    ("cuStreamDestroy_v2", [&[("stream", 1)], &[]]),
    ("cuStreamWaitEvent", [&[], &[]]),
    ("cuStreamWriteValue64_v2", [&[], &[]]),
    ("cuLaunchHostFunc", [&[], &[]]),
    ("cuEventCreate", [&[], &[("event", 1)]]),
    ("cuEventDestroy_v2", [&[("event", 1)], &[]]),
    ("cuEventRecord", [&[], &[]]),
    ("cuEventElapsedTime", [&[], &[]]),
    ("cuMemAllocFromPoolAsync", [&[], &[("memory", 1)]]),
    ("cuMemFreeAsync", [&[("memory", 1)], &[]]),
    ("cuMemPoolDestroy", [&[("pool", 1)], &[]]),
    ("cuMemHostGetDevicePointer_v2", [&[], &[]]),
    ("cuMemHostUnregister", [&[("registered", 1)], &[]]),
    ("cuMemcpyHtoDAsync_v2", [&[], &[]]),
    ("cuMemcpyDtoHAsync_v2", [&[], &[]]),
    ("cuMemcpyDtoDAsync_v2", [&[], &[]]),
    ("cuMemcpy2DAsync_v2", [&[], &[]]),
    ("cuMemGetInfo_v2", [&[], &[]]),
    ("cuMemPoolGetAttribute", [&[], &[]]),
    ("cuMemPoolTrimTo", [&[], &[]]),
    ("cuMemsetD8Async", [&[], &[]]),
    ("cuMemsetD32Async", [&[], &[]]),
    ("cuLibraryLoadData", [&[], &[("module", 1)]]),
    ("cuLibraryUnload", [&[("module", 1)], &[]]),
    ("cuLibraryGetModule", [&[], &[]]),
    ("cuLibraryGetKernel", [&[], &[]]),
    ("cuKernelGetFunction", [&[], &[]]),
    ("cuFuncGetAttribute", [&[], &[]]),
    ("cuFuncGetParamInfo", [&[], &[]]),
    ("cuFuncSetAttribute", [&[], &[]]),
    ("cuLaunchKernel", [&[], &[]]),
    ("cuCtxGetCurrent", [&ANYTHING, &ANYTHING]),
];

/// Refused before its work only: the memory is unmapped then, and a driver that had it registered
/// would be out of its mind.
const BEFORE_ONLY: &[(&str, Left)] = &[("cuMemHostRegister_v2", &[])];

/// Without its context nothing can be given back.
const ANYTHING: [(&str, i64); 6] =
    [("stream", 9), ("event", 9), ("memory", 9), ("registered", 9), ("module", 9), ("pool", 9)];

/// Uses everything, on a device of its own.
async fn tour(driver: &StandIn, mode: Completion) -> Result<()> {
    let device = Device::builder().completion(mode).spare_bytes_per_stream(0).cuda(0)?;
    let outcome = work(&device).await;
    driver.forgive();
    // Whatever happened, the device can be used or says that it is gone.
    match (&outcome, again(&device).await) {
        (Err(error), again) if error.is_device_lost() => {
            assert!(again.is_err_and(|error| error.is_device_lost()));
        }
        (_, Err(error)) if error.is_device_lost() => return Err(error),
        (_, again) => again.unwrap_or_else(|error| panic!("{outcome:?}, then {error}")),
    }
    outcome
}

async fn work(device: &Device) -> Result<()> {
    let (a, b) = (device.stream()?, device.stream()?);
    let axpy = soon(gpu_await::kernels::axpy::load(device)).await?;
    let image = Image::ptx(include_str!("../../kernels/spin.ptx"));
    let module = soon(Module::load(device, image)).await?;
    // SAFETY: the stand-in's kernel takes one word.
    let spin = unsafe { module.kernel::<(u64,)>("spin") }?;
    let x = a.upload(vec![1.0f32; 1000]).queued()?;
    let mut y = a.full(1000, 2.0f32).queued()?;
    let mut bytes = a.zeros::<u8>(100).queued()?;
    a.fill(&mut bytes, 7).queued()?;
    drop(a.full(10, [1u32, 2, 3]).queued()?);
    a.launch(&spin, LaunchConfig::new(1, 1).shared_mem_bytes(60_000), (1_000,)).queued()?;
    soon(axpy.launch(&a, 3.0, &x, &mut y)).await?;
    axpy.launch(&b, 3.0, &x, &mut y).queued()?;
    a.copy(&x, &mut y).queued()?;
    let (first, second) = (a.fill(&mut y, 1.0), b.host_fn(|| 7));
    soon(second).await?;
    soon(first).await?;
    b.wait(&a).queued()?;
    let start = b.record_timed()?;
    let host = soon(b.download(&y)).await?;
    let end = b.record_timed()?;
    soon(end.done()).await?;
    end.elapsed_since(&start)?;
    soon(b.upload_into(host, &mut y)).await?;
    let rows = Copy2d::new(10, 10).source_pitch(50);
    a.copy_2d(&x, &mut y, rows).queued()?;
    soon(a.download_2d(&x, a.pinned(500)?, rows)).await?;
    let z = soon(b.upload_staged(vec![3u32; 50_000])).await?;
    assert_eq!(soon(a.download_staged(&z)).await?, [3; 50_000]);
    device.memory()?;
    soon(device.trim(0)).await?;
    drop(y);
    soon(device.done()).await
}

async fn again(device: &Device) -> Result<()> {
    let stream = device.stream()?;
    let axpy = soon(gpu_await::kernels::axpy::load(device)).await?;
    let x = stream.upload(vec![1.0f32; 100]).queued()?;
    let mut y = stream.full(100, 2.0f32).queued()?;
    axpy.launch(&stream, 3.0, &x, &mut y).queued()?;
    let y = soon(stream.download(&y)).await?;
    assert_eq!(y.len(), 100);
    assert_eq!(soon(stream.host_fn(|| 7)).await?, 7);
    soon(device.done()).await
}

/// How often a call is made in a tour, the end of its device included.
async fn times(driver: &StandIn, mode: Completion, call: &str) -> u64 {
    let before = Live::settled(driver).of("context");
    driver.clear();
    soon(tour(driver, mode)).await.expect("nothing fails");
    eventually("the context is given back", || driver.live("context") <= before);
    driver.names().iter().filter(|name| *name == call).count() as u64
}

/// Fails the first ones and some of the others; true if the device was lost by any of it. What lives
/// after each is checked unless a lost device may leave things where they are (`None`).
async fn fail(
    driver: &StandIn,
    mode: Completion,
    call: &str,
    code: i32,
    after_effect: bool,
    left: Option<Left>,
) -> bool {
    let mut any_lost = false;
    let before = Live::settled(driver);
    let times = times(driver, mode, call).await;
    if left.is_some() {
        before.comes_back(driver, &[], "a tour without failures");
    }
    assert!(
        times > 0 || (call == "cuStreamWriteValue64_v2" && mode != Completion::Word),
        "{mode:?}: {call}"
    );
    for nth in (1..=times).filter(|nth| *nth <= 6 || nth.is_multiple_of(7)).take(9) {
        let context =
            format!("{mode:?}: {call} {nth} returns {code}, after effect: {after_effect}");
        let before = Live::settled(driver);
        if after_effect {
            driver.fail_after_effect(call, nth, code);
        } else {
            driver.fail(call, nth, code);
        }
        let outcome = soon(tour(driver, mode)).await;
        let lost = outcome.as_ref().is_err_and(gpu_await::Error::is_device_lost);
        if let Err(error) = outcome {
            let text = error.to_string();
            let said = text.contains(call) || text.contains(&code.to_string());
            assert!(said || error.kind() == ErrorKind::OutOfMemory, "{context}: {text}");
        }
        assert_eq!(driver.misuse(), [""; 0], "{context}");
        any_lost |= lost;
        if let Some(left) = left {
            before.comes_back(driver, left, &context);
        }
    }
    any_lost
}

async fn fail_each(driver: &StandIn, mode: Completion, code: i32) {
    for (call, left) in CALLS {
        for (after_effect, left) in [false, true].into_iter().zip(left) {
            let lost = fail(driver, mode, call, code, after_effect, Some(left)).await;
            assert!(!lost, "{mode:?}: {call}");
        }
    }
    for (call, left) in BEFORE_ONLY {
        assert!(!fail(driver, mode, call, code, false, Some(left)).await, "{mode:?}: {call}");
    }
}

#[test]
fn a_sticky_result_of_any_call_is_the_loss_of_the_device() {
    async_under_the_stand_in(async |driver| {
        for (call, _) in CALLS.iter().chain(&[("cuMemHostRegister_v2", [&[] as Left, &[]])]) {
            fail(driver, Completion::Adaptive, call, 719, false, None).await;
        }
    });
}

macro_rules! each_mode {
    ($each:ident: $($name:ident: $mode:ident, $code:expr;)+) => {$(
        #[test]
        fn $name() {
            async_under_the_stand_in(async |driver| {
                $each(driver, Completion::$mode, $code).await;
            });
        }
    )+};
}

each_mode! { fail_each:
    a_refused_call_harms_nobody_adaptive: Adaptive, 1;
    a_refused_call_harms_nobody_event: Event, 1;
    a_refused_call_harms_nobody_word: Word, 1;
    a_refused_call_harms_nobody_callback: Callback, 1;
    a_call_out_of_memory_harms_nobody: Adaptive, 2;
    a_result_that_nobody_knows_harms_nobody: Adaptive, 9999;
    a_negative_result_harms_nobody: Word, -1;
    a_call_that_is_not_permitted_harms_nobody: Adaptive, 800;
}

/// A question that is answered with an error will not be answered better: the device counts as
/// lost, and everybody is told.
async fn fail_questions(driver: &StandIn, mode: Completion, code: i32) {
    for call in ["cuEventQuery", "cuStreamQuery"] {
        for after_effect in [false, true] {
            fail(driver, mode, call, code, after_effect, None).await;
        }
    }
}

// One child each: the streams of a lost device stay, and with them the stand-in's threads.
each_mode! { fail_questions:
    a_question_that_fails_hangs_nobody_adaptive: Adaptive, 1;
    a_question_that_fails_hangs_nobody_event: Event, 1;
    a_question_that_fails_hangs_nobody_word: Word, 1;
    a_question_that_fails_hangs_nobody_callback: Callback, 1;
    a_question_without_a_known_answer_hangs_nobody_adaptive: Adaptive, 9999;
    a_question_without_a_known_answer_hangs_nobody_event: Event, 9999;
    a_question_without_a_known_answer_hangs_nobody_word: Word, 9999;
    a_question_without_a_known_answer_hangs_nobody_callback: Callback, 9999;
}
