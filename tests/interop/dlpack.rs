//! DLPack tensors, out and in: what is ordered, when memory is freed and deleters run, and what is refused.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gpu_await::testing::{self, Gate};
use gpu_await::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    Device, DeviceBuffer, DeviceKind, DlpackConsumer, DlpackElement, DlpackTensor, Error,
    ErrorDetail, ErrorKind, Result, Stream, TensorProblem,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const LEN: usize = 1000;

/// The other library's stream, as this one sees it.
fn adopted(device: &Device, theirs: &Stream) -> Result<Stream> {
    // SAFETY: the owner keeps the stream.
    let handle = unsafe { theirs.as_raw() };
    // SAFETY: the owner keeps the stream, and nobody captures it.
    unsafe { Stream::from_raw(device, handle, theirs.clone()) }
}

fn problem(error: &Error) -> TensorProblem {
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    match error.detail() {
        ErrorDetail::BadTensor { problem } => problem.clone(),
        _ => panic!("{error}"),
    }
}

fn used(device: &Device) -> u64 {
    device.memory().unwrap().used_bytes
}

/// Where memory of the device is, as DLPack says it.
fn here(device: &Device) -> DLDevice {
    match device.kind() {
        DeviceKind::Cuda => {
            let ordinal = device.to_string().rsplit(':').next().unwrap().parse().unwrap_or(0);
            DLDevice { device_type: DLDevice::CUDA, device_id: ordinal }
        }
        _ => DLDevice { device_type: DLDevice::CPU, device_id: 0 },
    }
}

/// Time for what is not held up to be complete: other work of the device, one after the other.
fn others_go_on(device: &Device) -> Result<()> {
    let other = device.stream()?;
    (0..200).try_for_each(|_| other.zeros::<f32>(LEN).synchronize().map(drop))
}

// ---- tensors of another library -----------------------------------------------------------------

/// A producer's tensor, and how often its deleter ran.
struct Producer {
    versioned: DLManagedTensorVersioned,
    unversioned: DLManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: Arc<AtomicUsize>,
    _memory: Option<DeviceBuffer<f32>>,
}

unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: the tensor is a producer's, and is deleted once, or the test fails.
    let context = unsafe { (*tensor).manager_ctx };
    // SAFETY: as above.
    let producer = unsafe { Box::from_raw(context.cast::<Producer>()) };
    producer.deleted.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn delete_unversioned(tensor: *mut DLManagedTensor) {
    // SAFETY: as above.
    let context = unsafe { (*tensor).manager_ctx };
    // SAFETY: as above.
    let producer = unsafe { Box::from_raw(context.cast::<Producer>()) };
    producer.deleted.fetch_add(1, Ordering::SeqCst);
}

/// What a test changes.
type Change = fn(&mut DLManagedTensorVersioned, &mut Vec<i64>, &mut Vec<i64>);

fn producer(
    device: &Device,
    memory: Option<DeviceBuffer<f32>>,
    change: Change,
    deleted: &Arc<AtomicUsize>,
) -> &'static mut Producer {
    let tensor = || DLTensor {
        data: memory.as_ref().map_or(null_mut(), |memory| memory.device_ptr() as *mut c_void),
        device: here(device),
        ndim: 0,
        dtype: f32::DATA_TYPE,
        shape: null_mut(),
        strides: null_mut(),
        byte_offset: 0,
    };
    let version = DLPackVersion { major: 1, minor: 1 };
    let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut DLManagedTensorVersioned));
    let (manager_ctx, flags, dl_tensor) = (null_mut(), 0, tensor());
    let mut versioned =
        DLManagedTensorVersioned { version, manager_ctx, deleter, flags, dl_tensor };
    let mut shape = vec![memory.as_ref().map_or(LEN, DeviceBuffer::len) as i64];
    let mut strides = Vec::new();
    change(&mut versioned, &mut shape, &mut strides);
    let deleter = Some(delete_unversioned as unsafe extern "C" fn(*mut DLManagedTensor));
    let unversioned = DLManagedTensor { dl_tensor: tensor(), manager_ctx, deleter };
    let deleted = deleted.clone();
    let producer = Producer { versioned, unversioned, shape, strides, deleted, _memory: memory };
    let producer = Box::into_raw(Box::new(producer));
    // SAFETY: leaked a moment ago.
    let leaked = unsafe { &mut *producer };
    for tensor in [&mut leaked.versioned.dl_tensor, &mut leaked.unversioned.dl_tensor] {
        tensor.ndim = leaked.shape.len() as i32;
        tensor.shape = leaked.shape.as_mut_ptr();
        if !leaked.strides.is_empty() {
            tensor.strides = leaked.strides.as_mut_ptr();
        }
    }
    leaked.versioned.manager_ctx = producer.cast();
    leaked.unversioned.manager_ctx = producer.cast();
    leaked
}

/// A tensor of theirs, of `LEN` threes.
fn theirs(device: &Device, change: Change, deleted: &Arc<AtomicUsize>) -> Result<DlpackTensor> {
    let memory = device.stream()?.full(LEN, 3.0f32).synchronize()?;
    let producer = producer(device, Some(memory), change, deleted);
    // SAFETY: it is a producer's, and nobody else has it.
    unsafe { DlpackTensor::from_raw(NonNull::from(&mut producer.versioned)) }
}

fn as_it_is(_: &mut DLManagedTensorVersioned, _: &mut Vec<i64>, _: &mut Vec<i64>) {}

// ---- round trips --------------------------------------------------------------------------------

async fn round_trip<T: DlpackElement + PartialEq + std::fmt::Debug>(value: T) -> Result<()> {
    let device = testing::device();
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let x = ours.full(24, value).queued()?;
    let address = x.device_ptr();
    let consumer = DlpackConsumer::Stream(adopted(&device, &theirs)?);
    let tensor = x.into_dlpack(&[2, 3, 4], consumer)?;
    assert_eq!(tensor.data_type(), T::DATA_TYPE);
    assert_eq!((tensor.shape(), tensor.strides()), (&[2, 3, 4][..], Some(&[12, 4, 1][..])));
    assert_eq!((tensor.device(), tensor.address()), (here(&device), address));
    // Through both layouts.
    let tensor = tensor.into_raw_unversioned()?;
    // SAFETY: handed out above.
    let tensor = unsafe { DlpackTensor::from_raw_unversioned(tensor) }.into_raw();
    // SAFETY: as above.
    let tensor = unsafe { DlpackTensor::from_raw(tensor) }?;
    // SAFETY: nobody else uses it; what writes it is in front, on that stream.
    let back = unsafe { theirs.adopt_dlpack::<T>(tensor) }?;
    assert_eq!((back.device_ptr(), back.len()), (address, 24));
    assert_eq!(theirs.download(&back).await?, vec![value; 24]);
    drop(back);
    eventually("it is freed", || used(&device) == 0);
    Ok(())
}

#[tokio::test]
async fn every_element_type_there_and_back() -> Result<()> {
    round_trip(-3_i8).await?;
    round_trip(-3_i16).await?;
    round_trip(-3_i32).await?;
    round_trip(-3_i64).await?;
    round_trip(3_u8).await?;
    round_trip(3_u16).await?;
    round_trip(3_u32).await?;
    round_trip(3_u64).await?;
    round_trip(half::f16::from_f32(1.5)).await?;
    round_trip(half::bf16::from_f32(1.5)).await?;
    round_trip(1.5_f32).await?;
    round_trip(1.5_f64).await
}

#[tokio::test]
async fn strides_offsets_and_extents_of_one() -> Result<()> {
    let (device, deleted) = (testing::device(), Arc::default());
    let stream = device.stream()?;
    let good: [(Change, usize); 5] = [
        (|_, shape, strides| (*shape, *strides) = (vec![10, 100], vec![100, 1]), LEN),
        (|_, shape, strides| (*shape, *strides) = (vec![1, 10, 1], vec![7, 1, 0]), 10),
        (|tensor, shape, _| (tensor.dl_tensor.byte_offset, *shape) = (40, vec![10]), 10),
        (|_, shape, _| shape.clear(), 1),
        (|tensor, shape, _| (tensor.dl_tensor.data, *shape) = (null_mut(), vec![3, 0]), 0),
    ];
    for (change, len) in good {
        let tensor = theirs(&device, change, &deleted)?;
        let address = tensor.address();
        // SAFETY: nobody else uses it.
        let x = unsafe { stream.adopt_dlpack::<f32>(tensor) }?;
        assert_eq!((x.len(), x.device_ptr()), (len, address));
        assert_eq!(stream.download(&x).await?, vec![3.0; len]);
    }
    eventually("five are deleted", || deleted.load(Ordering::SeqCst) == 5);
    Ok(())
}

#[tokio::test]
async fn pinned_memory_as_a_tensor() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut pinned = device.pinned::<u32>(6)?;
    pinned.copy_from_slice(&[1, 2, 3, 4, 5, 6]);
    let tensor = pinned.into_dlpack(&[2, 3], DlpackConsumer::Stream(stream.clone()))?;
    let kind = match device.kind() {
        DeviceKind::Cuda => DLDevice::CUDA_HOST,
        _ => DLDevice::CPU,
    };
    assert_eq!(tensor.device().device_type, kind);
    // SAFETY: nobody writes it, and the tensor keeps it.
    let seen = unsafe { std::slice::from_raw_parts(tensor.address() as *const u32, 6) };
    assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
    drop(tensor);
    stream.done().await
}

// ---- order --------------------------------------------------------------------------------------

#[tokio::test]
async fn exported_behind_a_slow_producer() -> Result<()> {
    let device = testing::device();
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let mut x = ours.zeros::<f32>(LEN).queued()?;
    let gate = Gate::close(&ours)?;
    ours.fill(&mut x, 5.0).queued()?;
    let consumer = DlpackConsumer::Stream(adopted(&device, &theirs)?);
    // Returns at once.
    let tensor = x.into_dlpack(&[LEN], consumer)?;
    // SAFETY: nobody else uses it; what writes it is in front, on that stream.
    let back = unsafe { theirs.adopt_dlpack::<f32>(tensor) }?;
    let seen = theirs.download(&back);
    others_go_on(&device)?;
    assert!(!seen.is_complete());
    gate.open();
    assert_eq!(seen.await?, [5.0; LEN]);
    assert!(!gate.timed_out());
    Ok(())
}

/// A consumer without a stream gets the address when the memory is complete.
#[test]
fn a_synchronized_export_waits() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut x = stream.zeros::<f32>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    stream.fill(&mut x, 5.0).queued()?;
    let mark = stream.record()?;
    let exporting = std::thread::spawn(move || {
        let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Synchronized).unwrap();
        (tensor, mark.is_complete())
    });
    gate.open();
    let (tensor, was_complete) = exporting.join().unwrap();
    assert!(was_complete);
    if device.kind() == DeviceKind::Host {
        // SAFETY: it is complete, and the tensor keeps it.
        let seen = unsafe { std::slice::from_raw_parts(tensor.address() as *const f32, LEN) };
        assert_eq!(seen, [5.0; LEN]);
    }
    Ok(())
}

/// A producer asked with our stream puts its work there.
#[tokio::test]
async fn adopted_behind_a_slow_producer() -> Result<()> {
    let device = testing::device();
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &theirs)?;
    let mut memory = theirs.zeros::<f32>(LEN).queued()?;
    let gate = Gate::close(&theirs)?;
    theirs.fill(&mut memory, 7.0).queued()?;
    let deleted = Arc::default();
    let producer = producer(&device, Some(memory), as_it_is, &deleted);
    // SAFETY: it is a producer's, and nobody else has it.
    let tensor = unsafe { DlpackTensor::from_raw(NonNull::from(&mut producer.versioned)) }?;
    // SAFETY: nobody else uses it; its writer is on that stream.
    let x = unsafe { stream.adopt_dlpack::<f32>(tensor) }?;
    let seen = ours.download(&x);
    drop(x);
    others_go_on(&device)?;
    assert!(!seen.is_complete());
    assert_eq!(deleted.load(Ordering::SeqCst), 0, "it is in use");
    gate.open();
    assert_eq!(seen.await?, [7.0; LEN]);
    eventually("it is deleted", || deleted.load(Ordering::SeqCst) == 1);
    Ok(())
}

/// The consumer calls the deleter while its work is on its stream.
#[tokio::test]
async fn freed_behind_the_consumer() -> Result<()> {
    let device = testing::device();
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let x = ours.full(LEN, 5.0f32).synchronize()?;
    let address = x.device_ptr();
    let consumer = adopted(&device, &theirs)?;
    let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(consumer.clone()))?;
    // From here on only the consumer's work is in the way.
    consumer.done().await?;
    // SAFETY: the tensor keeps it, and then the stream's order does.
    let view = unsafe { theirs.adopt_memory::<f32>(address, LEN, ()) }?;
    let gate = Gate::close(&theirs)?;
    let seen = theirs.download(&view);
    drop(tensor);
    // The reaper does one thing after the other: this one is behind the deleter's.
    let reaped = Arc::new(());
    // SAFETY: there is no memory.
    drop(unsafe { device.adopt_memory::<u8>(0, 0, reaped.clone()) }?);
    eventually("the reaper was there", || Arc::strong_count(&reaped) == 1);
    // What would be given out again is overwritten.
    let others = ours.full(LEN, 9.0f32).synchronize()?;
    assert_ne!(others.device_ptr(), address);
    assert!(used(&device) > others.size_bytes() as u64, "it is pending");
    gate.open();
    assert_eq!(seen.await?, [5.0; LEN]);
    drop((others, view));
    eventually("it is freed", || used(&device) == 0);
    assert!(!gate.timed_out());
    Ok(())
}

/// The protocol keeps nobody's stream: it may be destroyed in front of the deleter's call, and right behind it.
#[tokio::test]
async fn the_consumers_stream_may_go_first() -> Result<()> {
    let device = testing::device();
    let ours = device.stream()?;
    ours.synchronize()?;
    let before = used(&device);
    for round in 0..100 {
        let theirs = device.stream()?;
        let x = ours.full(LEN, round as f32).queued()?;
        let address = x.device_ptr();
        // SAFETY: the stream lives longer than that, and nobody captures it.
        let handle = unsafe { theirs.as_raw() };
        // SAFETY: as above.
        let consumer = unsafe { Stream::from_raw(&device, handle, ()) }?;
        let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(consumer))?;
        // SAFETY: the tensor keeps it, and what is on the stream when that goes.
        let view = unsafe { theirs.adopt_memory::<f32>(address, LEN, ()) }?;
        let seen = theirs.download(&view);
        if round % 2 == 0 {
            drop(tensor);
            drop(theirs);
        } else {
            drop(theirs);
            drop(tensor);
        }
        drop(ours.full(LEN, -1.0f32).queued()?);
        assert_eq!(seen.await?, [round as f32; LEN]);
    }
    eventually("all is freed", || used(&device) <= before);
    Ok(())
}

// ---- deleters -----------------------------------------------------------------------------------

/// Adopted, refused, dropped as it is; in any order, on any thread.
#[test]
fn every_deleter_runs_once() -> Result<()> {
    let (device, deleted) = (testing::device(), Arc::default());
    let stream = device.stream()?;
    let mut adopted = Vec::new();
    for _ in 0..20 {
        // SAFETY: nobody else uses it.
        adopted.push(unsafe { stream.adopt_dlpack::<f32>(theirs(&device, as_it_is, &deleted)?) }?);
    }
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let some: Vec<_> = adopted.drain(..5).rev().collect();
            std::thread::spawn(move || drop(some))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // SAFETY: refused.
    let refused = unsafe { stream.adopt_dlpack::<i32>(theirs(&device, as_it_is, &deleted)?) };
    let tensor = refused.unwrap_err().value.expect("it comes back");
    eventually("all but one", || deleted.load(Ordering::SeqCst) == 20);
    drop(tensor);
    assert_eq!(deleted.load(Ordering::SeqCst), 21);
    // Wrapped in another layout.
    drop(theirs(&device, as_it_is, &deleted)?.into_raw_unversioned().map(|raw| {
        // SAFETY: handed out a moment ago.
        unsafe { DlpackTensor::from_raw_unversioned(raw) }
    }));
    assert_eq!(deleted.load(Ordering::SeqCst), 22);
    Ok(())
}

#[test]
fn deleters_in_a_host_function() -> Result<()> {
    let device = testing::device();
    let (stream, theirs) = (device.stream()?, device.stream()?);
    let x = stream.full(LEN, 5.0f32).queued()?;
    let consumer = DlpackConsumer::Stream(adopted(&device, &theirs)?);
    let first = x.into_dlpack(&[LEN], consumer.clone())?;
    let pinned = device.pinned::<f32>(LEN)?.into_dlpack(&[LEN], consumer)?;
    // What is leaked in place of freed is never deleted.
    let deleted = Arc::default();
    let tensor = self::theirs(&device, as_it_is, &deleted)?;
    // SAFETY: nobody else uses it.
    let x = unsafe { stream.adopt_dlpack::<f32>(tensor) }?;
    let second = x.into_dlpack(&[LEN], DlpackConsumer::Stream(adopted(&device, &theirs)?))?;
    let gate = Gate::close(&theirs)?;
    stream.host_fn(move || drop((first, pinned, second))).synchronize()?;
    others_go_on(&device)?;
    assert_eq!(deleted.load(Ordering::SeqCst), 0, "it is behind the consumer");
    gate.open();
    eventually("it is deleted", || deleted.load(Ordering::SeqCst) == 1);
    drop((stream, theirs));
    eventually("it is freed", || used(&device) == 0);
    Ok(())
}

#[tokio::test]
async fn deleters_after_a_loss() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let x = ours.full(LEN, 5.0f32).synchronize()?;
    let exported = x.into_dlpack(&[LEN], DlpackConsumer::Stream(adopted(&device, &theirs)?))?;
    let deleted = Arc::default();
    // Of the process's: what a lost device quarantines must not keep that device.
    let on_the_heap: Change = |tensor, _, _| {
        tensor.dl_tensor.data = Box::leak(Box::new([1.0_f32; LEN])).as_mut_ptr().cast();
    };
    let producer = producer(&device, None, on_the_heap, &deleted);
    // SAFETY: it is a producer's, and nobody else has it.
    let tensor = unsafe { DlpackTensor::from_raw(NonNull::from(&mut producer.versioned)) }?;
    // SAFETY: nobody else uses it.
    let adopted = unsafe { ours.adopt_dlpack::<f32>(tensor) }?;
    handle.lose_device("unplugged");
    assert!(ours.zeros::<u8>(1).await.unwrap_err().is_device_lost());
    drop((exported, adopted));
    drop((ours, theirs, device));
    eventually("it is deleted", || deleted.load(Ordering::SeqCst) == 1);
    Ok(())
}

/// A driver that refuses once what is needed to learn of the consumer's work is asked again.
#[tokio::test]
async fn freed_whatever_is_refused_once() -> Result<()> {
    use gpu_await::ErrorKind;
    use gpu_await::testing::DriverCall::{EventCreate, EventRecord, EventRecordAll, WriteWord};
    for call in [EventCreate, EventRecord, EventRecordAll, WriteWord] {
        for after_effect in [false, true] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream()?;
            let kept = Arc::new(());
            for nth in 1..12 {
                let x = stream.full(LEN, 5.0f32).synchronize()?;
                // SAFETY: the owner keeps the memory.
                let x =
                    unsafe { device.adopt_memory::<f32>(x.device_ptr(), LEN, (x, kept.clone())) }?;
                let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(stream.clone()))?;
                if after_effect {
                    handle.fail_nth_after_effect(call, nth, ErrorKind::Driver);
                } else {
                    handle.fail_nth(call, nth, ErrorKind::Driver);
                }
                for _ in 0..nth {
                    drop(stream.done().submitted());
                }
                drop(tensor);
                eventually("its owner is dropped", || Arc::strong_count(&kept) == 1);
            }
        }
    }
    Ok(())
}

/// Nor does a loss at that moment keep anything: neither the memory, nor the device.
#[test]
fn freed_whatever_is_lost_meanwhile() -> Result<()> {
    use gpu_await::ErrorKind;
    use gpu_await::testing::DriverCall::EventCreate;
    for round in 0..200 {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let kept = Arc::new(());
        let x = stream.full(LEN, 5.0f32).synchronize()?;
        // SAFETY: the owner keeps the memory.
        let x = unsafe { device.adopt_memory::<f32>(x.device_ptr(), LEN, (x, kept.clone())) }?;
        let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(stream.clone()))?;
        for nth in 1..20 {
            handle.fail_nth(EventCreate, nth, ErrorKind::Driver);
        }
        let loses = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(round * 3));
            handle.lose_device("meanwhile");
        });
        drop(tensor);
        drop((stream, device));
        loses.join().expect("no panic");
        eventually("its owner is dropped", || Arc::strong_count(&kept) == 1);
    }
    Ok(())
}

/// Nobody knows any more when the consumer's work is complete.
#[tokio::test]
async fn a_deleter_after_the_close() -> Result<()> {
    let device = testing::device();
    let (ours, theirs) = (device.stream()?, device.stream()?);
    let x = ours.full(LEN, 5.0f32).synchronize()?;
    let kept = Arc::new(());
    // SAFETY: the owner keeps the memory.
    let x = unsafe { device.adopt_memory::<f32>(x.device_ptr(), LEN, (x, kept.clone())) }?;
    let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(adopted(&device, &theirs)?))?;
    device.close(SOON).await?;
    drop(tensor);
    eventually("its owner is dropped", || Arc::strong_count(&kept) == 1);
    Ok(())
}

// ---- refusals -----------------------------------------------------------------------------------

#[test]
fn what_is_wrong_with_a_tensor() -> Result<()> {
    let (device, deleted) = (testing::device(), Arc::default());
    let stream = device.stream()?;
    let refused = |change: Change| {
        let adopt = || {
            let tensor = theirs(&device, change, &deleted)?;
            // SAFETY: refused.
            Ok(unsafe { stream.adopt_dlpack::<f32>(tensor) }?)
        };
        problem(&adopt().unwrap_err())
    };
    let expected = "float32".to_owned();
    for (found, data_type) in [
        ("uint32", DLDataType { code: 1, bits: 32, lanes: 1 }),
        ("float64", f64::DATA_TYPE),
        ("float32x4", DLDataType { lanes: 4, ..f32::DATA_TYPE }),
    ] {
        let change: Change = match found {
            "uint32" => |tensor, _, _| tensor.dl_tensor.dtype = u32::DATA_TYPE,
            "float64" => |tensor, _, _| tensor.dl_tensor.dtype = f64::DATA_TYPE,
            _ => |tensor, _, _| tensor.dl_tensor.dtype.lanes = 4,
        };
        assert_eq!(data_type.to_string(), found);
        let (expected, found) = (expected.clone(), found.to_owned());
        assert_eq!(refused(change), TensorProblem::ElementType { expected, found });
    }
    let elsewhere = refused(|tensor, _, _| {
        tensor.dl_tensor.device = DLDevice { device_type: DLDevice::CUDA, device_id: 77 };
    });
    let (expected, found) = (here(&device).to_string(), "cuda:77".to_owned());
    assert_eq!(elsewhere, TensorProblem::Device { expected, found });
    let (shape, strides) = (vec![10, 10], vec![1, 10]);
    let columns = refused(|_, shape, strides| (*shape, *strides) = (vec![10, 10], vec![1, 10]));
    assert_eq!(columns, TensorProblem::NotContiguous { shape, strides });
    let newer = refused(|tensor, _, _| tensor.version.major = 2);
    assert_eq!(newer, TensorProblem::Version { major: 2, minor: 1 });
    let null = refused(|tensor, _, _| tensor.dl_tensor.data = null_mut());
    assert_eq!(null, TensorProblem::NullData { len: LEN });
    assert_eq!(refused(|tensor, _, _| tensor.flags = 1), TensorProblem::ReadOnly);
    let negative = refused(|_, shape, _| *shape = vec![-1]);
    assert_eq!(negative, TensorProblem::Shape { shape: vec![-1], len: 0 });
    assert_eq!(negative.to_string(), "axis 0 of shape [-1] is negative");
    // What `adopt_memory` refuses.
    let tensor =
        theirs(&device, |t, shape, _| (t.dl_tensor.byte_offset, *shape) = (2, vec![1]), &deleted)?;
    // SAFETY: refused.
    let error = unsafe { stream.adopt_dlpack::<f32>(tensor) }.unwrap_err().error;
    assert!(matches!(error.detail(), ErrorDetail::BadMemory { .. }), "{error}");
    assert_eq!(deleted.load(Ordering::SeqCst), 10, "each is deleted");
    Ok(())
}

#[tokio::test]
async fn a_read_only_tensor_is_frozen() -> Result<()> {
    let (device, deleted) = (testing::device(), Arc::default());
    let stream = device.stream()?;
    let tensor = theirs(&device, |tensor, _, _| tensor.flags = 1, &deleted)?;
    let tensor = tensor.into_raw_unversioned().unwrap_err().value.expect("it comes back");
    // SAFETY: nobody else uses it.
    let x = unsafe { stream.adopt_dlpack_frozen::<f32>(tensor) }.await?;
    assert_eq!(stream.download(&x).await?, [3.0; LEN]);
    drop(x);
    eventually("it is deleted", || deleted.load(Ordering::SeqCst) == 1);
    Ok(())
}

/// A part is a tensor of its own: ordered by its own uses, and freed with the last of its memory.
#[test]
fn parts_are_exported_by_themselves() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    stream.synchronize()?;
    let before = used(&device);
    let mut left = stream.upload((0..8u32).collect::<Vec<_>>()).synchronize()?;
    let right = left.split_off(3)?;
    let gate = Gate::close(&stream)?;
    let late = stream.fill(&mut left, 9);
    let address = right.device_ptr();
    // The other part is in use, and nobody waits for that.
    let tensor = right.into_dlpack(&[5], DlpackConsumer::Synchronized)?;
    assert!(!late.is_complete());
    gate.open();
    assert_eq!((tensor.address(), tensor.shape()), (address, &[5i64][..]));
    drop(left);
    // SAFETY: the memory is complete, and nobody else writes it.
    let back: DeviceBuffer<u32> = unsafe { stream.adopt_dlpack(tensor) }?;
    assert_eq!(*stream.download(&back).synchronize()?, [3, 4, 5, 6, 7]);
    assert!(!gate.timed_out());
    drop(back);
    eventually("both parts are gone", || used(&device) == before);

    let mut pinned = stream.pinned::<u8>(6)?;
    let part = pinned.split_off(2)?;
    let address = part.as_ptr() as u64;
    let tensor = part.into_dlpack(&[2, 2], DlpackConsumer::Unordered)?;
    assert_eq!(tensor.address(), address);
    Ok(())
}

#[test]
fn what_cannot_be_exported() -> Result<()> {
    let (device, other) = (testing::device(), testing::peer_device());
    let stream = device.stream()?;
    let refused = stream.ones::<f32>(6).queued()?.into_dlpack(&[2, 2], DlpackConsumer::Unordered);
    let refused = refused.unwrap_err();
    assert_eq!(problem(&refused.error), TensorProblem::Shape { shape: vec![2, 2], len: 6 });
    let x = refused.value.expect("it comes back");
    let large = x.into_dlpack(&[usize::MAX, 2], DlpackConsumer::Unordered).unwrap_err();
    assert_eq!(problem(&large.error), TensorProblem::Extent { axis: 0, extent: usize::MAX });
    let x = large.value.expect("it comes back");
    let too_many = [i64::MAX as usize, 3, 1 << 62];
    let refused = x.into_dlpack(&too_many, DlpackConsumer::Unordered).unwrap_err();
    let shape = vec![i64::MAX, 3, 1 << 62];
    assert_eq!(problem(&refused.error), TensorProblem::Shape { shape, len: 6 });
    let x = refused.value.expect("it comes back");
    let elsewhere = DlpackConsumer::Stream(other.stream()?);
    let refused = x.into_dlpack(&[6], elsewhere).unwrap_err();
    assert!(matches!(refused.error.detail(), ErrorDetail::WrongDevice { .. }), "{refused}");
    let x = refused.value.expect("it comes back");
    assert_eq!(stream.download(&x).synchronize()?, [1.0; 6], "it is as it was");
    let unwritten = stream.empty::<f32>(6).queued()?;
    let refused = unwritten.into_dlpack(&[6], DlpackConsumer::Unordered).unwrap_err();
    assert!(matches!(refused.error.detail(), ErrorDetail::Unwritten { .. }), "{refused}");
    Ok(())
}

/// What no memory bounds is bounded all the same: a tensor without elements has extents and strides too.
#[test]
fn shapes_of_nothing() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let exported = |shape: &[usize]| {
        let nothing = stream.zeros::<f32>(0).queued()?;
        Ok::<_, Error>(nothing.into_dlpack(shape, DlpackConsumer::Synchronized)?)
    };
    let tensor = exported(&[2, 0, i64::MAX as usize])?;
    assert_eq!(tensor.shape(), [2, 0, i64::MAX]);
    assert_eq!(tensor.strides(), Some(&[0, i64::MAX, 1][..]));
    let error = exported(&[0, 1 << 63, 2]).unwrap_err();
    assert_eq!(problem(&error), TensorProblem::Extent { axis: 1, extent: 1 << 63 });
    let error = exported(&[0, 1 << 62, 2]).unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
    let pinned = stream.pinned::<u8>(0)?;
    let error = pinned.into_dlpack(&[usize::MAX, 0], DlpackConsumer::Unordered).unwrap_err().error;
    assert_eq!(problem(&error), TensorProblem::Extent { axis: 0, extent: usize::MAX });
    // Of another library's, with strides that would not fit either.
    let deleted = Arc::default();
    let change: Change = |_, shape, strides| {
        (*shape, *strides) = (vec![2, 1 << 62, 2], vec![i64::MAX, 2, 1]);
    };
    let tensor = theirs(&device, change, &deleted)?;
    // SAFETY: refused.
    let error = unsafe { stream.adopt_dlpack::<f32>(tensor) }.unwrap_err().error;
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
    Ok(())
}

/// What Python's `__dlpack__` is called with.
#[test]
fn the_argument_of_a_consumer() -> Result<()> {
    let device = testing::device();
    // SAFETY: the streams are refused, the driver's own, or kept by the test.
    let consumer = |stream| unsafe { DlpackConsumer::from_argument(&device, stream) };
    let is_refused = |stream| {
        let error = consumer(stream).unwrap_err();
        matches!(error.detail(), ErrorDetail::BadStream { .. })
    };
    assert!(is_refused(Some(0)) && is_refused(Some(-2)));
    if device.kind() == DeviceKind::Host {
        assert!(matches!(consumer(None)?, DlpackConsumer::Synchronized));
        assert!(is_refused(Some(1)) && is_refused(Some(-1)));
        return Ok(());
    }
    assert!(matches!(consumer(Some(-1))?, DlpackConsumer::Unordered));
    let stream = device.stream()?;
    // SAFETY: the stream lives as long as this test.
    let raw = unsafe { stream.as_raw() } as i64;
    for argument in [None, Some(1), Some(2), Some(raw)] {
        let DlpackConsumer::Stream(_) = consumer(argument)? else { panic!("{argument:?}") };
        let x = stream.ones::<f32>(6).queued()?;
        drop(x.into_dlpack(&[6], consumer(argument)?)?);
    }
    Ok(())
}

/// The reaper drops a tensor that was exported and adopted again in two steps: the adopted memory, then the exported buffer.
#[tokio::test]
async fn a_closed_device_has_back_what_was_exported_and_adopted() -> Result<()> {
    for _ in 0..200 {
        let device = testing::device();
        let stream = device.stream()?;
        let x = stream.full(LEN, 1.0f32).queued()?;
        let tensor = x.into_dlpack(&[LEN], DlpackConsumer::Stream(stream.clone()))?;
        // SAFETY: what writes it is on that stream.
        let y = unsafe { stream.adopt_dlpack::<f32>(tensor) }?;
        assert_eq!(stream.download_vec(&y).await?, [1.0; LEN]);
        drop((y, stream));
        device.close(SOON).await?;
        let stats = device.stats();
        assert_eq!((stats.allocations, stats.allocated_bytes), (0, 0));
    }
    Ok(())
}
