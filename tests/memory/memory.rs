//! Device memory and pinned memory: what they cost, what limits them, how they are viewed.

use std::time::Duration;

use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{Copy2d, Device, DeviceKind, Element, ErrorDetail, ErrorKind, Number};

const SOON: Duration = Duration::from_secs(10);
const MIB: usize = 1 << 20;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A device of the kind under test, with options. The other one keeps this thread's turn on a GPU.
fn opened(builder: gpu_await::DeviceBuilder) -> (Device, Device) {
    let turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    (builder.named(&name).expect("the device under test"), turn)
}

/// Waits until the device has freed everything.
async fn freed(device: &Device) {
    soon(async {
        let held = |stats: gpu_await::Stats| {
            stats.allocations > 0 || stats.pending_bytes > 0 || stats.lent_bytes > 0
        };
        while held(device.stats()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn every_number_has_its_ones_and_zeros() {
    async fn check<T: Number + PartialEq + std::fmt::Debug>(stream: &gpu_await::Stream) {
        let ones = stream.ones::<T>(1003).queued().unwrap();
        let zeros = stream.zeros::<T>(1003).queued().unwrap();
        assert!(stream.download(&ones).await.unwrap().iter().all(|x| *x == T::ONE));
        assert!(stream.download(&zeros).await.unwrap().iter().all(|x| *x == T::zeroed()));
        let data: Vec<T> = (0..100).map(|n| [T::ONE, T::zeroed()][n % 2]).collect();
        let x = stream.upload(data.clone()).queued().unwrap();
        assert_eq!(stream.download(&x).await.unwrap(), data, "{}", std::any::type_name::<T>());
    }
    let device = testing::device();
    let stream = device.stream().unwrap();
    check::<i8>(&stream).await;
    check::<i16>(&stream).await;
    check::<i32>(&stream).await;
    check::<i64>(&stream).await;
    check::<i128>(&stream).await;
    check::<u8>(&stream).await;
    check::<u16>(&stream).await;
    check::<u32>(&stream).await;
    check::<u64>(&stream).await;
    check::<half::f16>(&stream).await;
    check::<half::bf16>(&stream).await;
    check::<f32>(&stream).await;
    check::<f64>(&stream).await;
    assert_eq!((f32::ONE, half::bf16::ONE.to_f32(), i8::ONE), (1.0, 1.0, 1));
}

/// Zero is a fill of bytes, however many an element has; another value is not.
#[tokio::test]
async fn zeros_of_any_size() {
    async fn check<T: Element + PartialEq + std::fmt::Debug>(device: &Device) {
        let stream = device.stream().unwrap();
        let dirty = stream.upload(vec![0xA5_u8; 1003 * size_of::<T>()]).queued().unwrap();
        drop(dirty);
        let mut x = stream.zeros::<T>(1003).queued().unwrap();
        assert_eq!(stream.download(&x).await.unwrap(), vec![T::zeroed(); 1003]);
        let on_device = device.zeros::<T>(3).await.unwrap();
        assert_eq!(device.download(&on_device).await.unwrap(), [T::zeroed(); 3]);
        let batched = stream.batch(|queue| queue.download(&queue.zeros::<T>(3)?));
        assert_eq!(batched.await.unwrap(), [T::zeroed(); 3]);
        assert!(stream.zeros::<T>(0).await.unwrap().is_empty());
        let wide = size_of::<T>() > 16;
        let full = stream.full(3, T::zeroed()).await;
        assert_eq!(full.is_err_and(|error| error.kind() == ErrorKind::Unsupported), wide);
        let filled = stream.fill(&mut x, T::zeroed()).await;
        assert_eq!(filled.is_err_and(|error| error.kind() == ErrorKind::Unsupported), wide);
    }
    let device = testing::device();
    check::<[u8; 3]>(&device).await;
    check::<[u16; 7]>(&device).await;
    check::<[f64; 2]>(&device).await;
    check::<[u8; 17]>(&device).await;
    check::<[f32; 5]>(&device).await;
    check::<[u16; 9]>(&device).await;
    check::<[f64; 16]>(&device).await;
}

#[tokio::test]
async fn a_user_type_is_an_element() {
    #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Particle {
        position: [f32; 3],
        charge: i32,
    }
    let device = testing::device();
    let stream = device.stream().unwrap();
    let particle = Particle { position: [1.0, 2.0, 3.0], charge: -1 };
    let x = stream.full(100, particle).queued().unwrap();
    assert_eq!(stream.download(&x).await.unwrap(), [particle; 100]);
}

#[tokio::test]
async fn a_limit_refuses_with_its_figures_and_the_program_goes_on() {
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(64 << 20));
    let stream = device.stream().unwrap();
    let mut kept = Vec::new();
    let error = loop {
        match stream.full(10 * MIB, kept.len() as u8).queued() {
            Ok(buffer) => kept.push(buffer),
            Err(error) => break error,
        }
    };
    assert_eq!(kept.len(), 6);
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    let total = device.memory().unwrap().total_bytes;
    match *error.detail() {
        ErrorDetail::OutOfMemory { asked_bytes, free_bytes, total_bytes, limit_bytes, .. } => {
            assert_eq!((asked_bytes, total_bytes), (10 << 20, total));
            assert_eq!((free_bytes, limit_bytes), (4 << 20, Some(64 << 20)));
        }
        ref other => panic!("{other}"),
    }
    assert!(error.to_string().contains("free within the limit of 67108864"), "{error}");
    // In the middle of a program: what is there works, an op that depends on nothing else as well.
    let (other, last) = (device.stream().unwrap(), kept.len() - 1);
    let seen = soon(other.download(&kept[last])).await.unwrap();
    assert_eq!(seen[10 * MIB - 1], last as u8);
    let small = stream.full(4 * MIB, 9u8).queued().unwrap();
    assert_eq!(device.memory().unwrap().free_bytes, 0);
    // After freeing, the same request succeeds; a buffer that another stream read is retired first.
    kept.pop();
    let again = soon(stream.full(10 * MIB, 77u8)).await.unwrap();
    assert_eq!(soon(other.download(&again)).await.unwrap()[0], 77);
    for (n, buffer) in kept.iter().enumerate() {
        assert_eq!(
            soon(stream.download(&buffer.slice(5..9).unwrap())).await.unwrap(),
            [n as u8; 4]
        );
    }
    drop((kept, small, again));
    freed(&device).await;
    assert_eq!(device.memory().unwrap().limit_bytes, Some(64 << 20));
}

#[tokio::test]
async fn a_failed_allocation_does_not_count_against_the_limit() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    handle.fail_nth(DriverCall::Alloc, 1, ErrorKind::Unsupported);
    let peak = device.memory().unwrap().used_peak_bytes;
    assert!(stream.zeros::<u8>(50 * MIB).queued().is_err());
    assert_eq!(device.memory().unwrap().used_peak_bytes, peak, "nobody had that");
    handle.fail_nth(DriverCall::Fill, 1, ErrorKind::Unsupported);
    assert!(stream.zeros::<u8>(1000).queued().is_err());
    assert_eq!((device.stats().allocations, device.stats().allocated_bytes), (0, 0));
}

#[tokio::test]
async fn memory_says_what_is_used_reserved_and_what_the_peaks_were() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let before = device.memory().unwrap();
    let x = stream.zeros::<u8>(50 * MIB).await.unwrap();
    let during = device.memory().unwrap();
    assert!(during.used_bytes >= before.used_bytes + (50 << 20), "{before:?} {during:?}");
    assert!(during.reserved_bytes >= during.used_bytes);
    assert!(during.used_peak_bytes >= during.used_bytes);
    drop(x);
    stream.done().await.unwrap();
    freed(&device).await;
    // The free is counted when the stream was there.
    soon(stream.zeros::<u8>(1)).await.unwrap();
    let after = device.memory().unwrap();
    assert!(after.used_bytes < during.used_bytes, "{during:?} {after:?}");
    assert!(after.used_peak_bytes >= during.used_bytes);
    device.trim(0).await.unwrap();
    let trimmed = device.memory().unwrap();
    assert!(trimmed.reserved_bytes <= after.reserved_bytes);
    assert!(trimmed.reserved_peak_bytes >= during.used_bytes);
    assert!(trimmed.free_bytes <= trimmed.total_bytes);
}

#[tokio::test]
async fn pinned_memory_is_pooled_counted_and_trimmed() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let (first, second) =
        (device.pinned::<u8>(MIB).unwrap(), device.pinned::<u8>(8 * MIB).unwrap());
    let address = first.as_ptr();
    let stats = device.stats();
    assert!(stats.pinned_used_bytes >= 9 << 20 && stats.pinned_bytes >= stats.pinned_used_bytes);
    drop(first);
    let again = device.pinned_async::<u8>(MIB - 5).await.unwrap();
    assert_eq!(again.as_ptr(), address, "the pool's own");
    assert_eq!(device.trim_pinned(u64::MAX).await.unwrap(), 0);
    // In use: stays. Of the others everything goes.
    drop(second);
    assert_eq!(device.trim_pinned(0).await.unwrap(), 8 << 20);
    let stats = device.stats();
    assert!(stats.pinned_bytes >= 2 << 20, "{stats:?}");
    // Lent is in use as well.
    let gate = Gate::close(&stream).unwrap();
    let x = stream.upload(again).queued().unwrap();
    let lent = device.stats();
    assert!(lent.pinned_used_bytes >= 1 << 20);
    gate.open();
    assert_eq!(soon(stream.download(&x)).await.unwrap().len(), MIB - 5);
    drop((x, gate));
    freed(&device).await;
    device.trim_pinned(0).await.unwrap();
    // Smaller blocks are cut from slabs, and the device's own words are in one.
    let left = device.stats();
    assert!(left.pinned_bytes <= 4 << 20, "{left:?}");
    let mut fresh = device.pinned::<u64>(100).unwrap();
    fresh.fill(5);
    let x = stream.upload(fresh).queued().unwrap();
    assert_eq!(soon(stream.download(&x)).await.unwrap(), [5; 100]);
}

/// Its owner has a `&mut` to it, and the device may write it: under Miri another reference is an error.
#[test]
fn figures_make_no_reference_to_pinned_memory() {
    let device = testing::device();
    let mut large = device.pinned::<u8>(MIB + 1).unwrap();
    let elements = &mut large[..];
    let stats = device.stats();
    elements[0] = 1;
    assert!(stats.pinned_used_bytes > MIB as u64, "a mapping of its own: {stats:?}");
}

/// Also with the one that is made in the background.
#[test]
fn first_callers_share_a_slab() {
    for _ in 0..20 {
        let device = testing::device();
        let start = std::sync::Barrier::new(4);
        let kept: Vec<_> = std::thread::scope(|scope| {
            let callers: Vec<_> = (0..4)
                .map(|n| {
                    let (device, start) = (&device, &start);
                    scope.spawn(move || {
                        start.wait();
                        device.pinned::<u8>(100 << (4 * n)).unwrap()
                    })
                })
                .collect();
            callers.into_iter().map(|caller| caller.join().unwrap()).collect()
        });
        let stats = device.stats();
        let used = kept.iter().map(|kept| (kept.len() as u64).next_power_of_two()).sum::<u64>();
        assert_eq!((stats.pinned_bytes, stats.pinned_used_bytes), (2 << 20, used));
        drop(kept);
        assert_eq!(device.stats().pinned_used_bytes, 0);
    }
}

/// What small buffers took serves a large one when they are gone, and the other way round.
#[test]
fn pinned_sizes_share_slabs() {
    let (faults, _) = testing::faults();
    let device = testing::host_with(faults);
    for round in 0..3 {
        let large = [(); 2].map(|()| device.pinned::<u8>(MIB).unwrap());
        drop(large);
        let small: Vec<_> =
            (0..2 * MIB / 4096).map(|_| device.pinned::<u8>(4096).unwrap()).collect();
        assert_eq!(device.stats().pinned_used_bytes, 2 << 20);
        drop(small);
        assert_eq!(device.stats().pinned_bytes, 2 << 20, "round {round}");
    }
}

#[tokio::test]
async fn fresh_pinned_memory_is_aligned_and_readable() {
    let device = testing::device();
    for len in [1, 100, 5000, MIB, 3 * MIB + 1] {
        let mut pinned = device.pinned::<u8>(len).unwrap();
        assert!(pinned.as_ptr().addr().is_multiple_of(128));
        // Whatever is there is initialized: fresh pages are zero, used ones hold what was there.
        let sum: u64 = pinned.iter().map(|x| u64::from(*x)).sum();
        pinned.fill(1);
        assert!(sum <= 255 * len as u64 && pinned.iter().all(|x| *x == 1));
    }
}

#[tokio::test]
async fn a_pinned_mapping_that_cannot_be_given_back_stays() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    drop(device.pinned::<u8>(8 * MIB).unwrap());
    handle.fail_nth(DriverCall::Unregister, 1, ErrorKind::Unsupported);
    assert_eq!(device.trim_pinned(0).await.unwrap_err().kind(), ErrorKind::Unsupported);
    let fresh = device.pinned::<u8>(8 * MIB).unwrap();
    assert_eq!(fresh.len(), 8 * MIB);
}

#[test]
fn a_release_threshold_is_the_pools() {
    // What the driver does with it is the driver's; here it must only be accepted.
    let (device, _turn) = opened(Device::builder().release_threshold_bytes(1 << 30));
    assert!(matches!(device.kind(), DeviceKind::Host | DeviceKind::Cuda));
    assert!(device.stream().unwrap().zeros::<u8>(10).synchronize().is_ok());
}

#[tokio::test]
async fn a_view_is_taken_as_another_type_only_where_it_fits() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let mut x = stream.upload((0..100u32).collect::<Vec<_>>()).queued().unwrap();
    let bytes = x.view().cast::<u8>().unwrap();
    assert_eq!(bytes.len(), 400);
    // Byte 4 to 20 of it, back as words.
    let words = bytes.slice(4..20).unwrap().cast::<u32>().unwrap();
    assert_eq!(stream.download(&words).await.unwrap(), [1, 2, 3, 4]);
    let triples = x.slice(3..99).unwrap().cast::<[u32; 3]>().unwrap();
    assert_eq!(stream.download(&triples).await.unwrap()[31], [96, 97, 98]);

    let refused = |error: gpu_await::Error, start, bytes, element_bytes, alignment| {
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        match *error.detail() {
            ErrorDetail::Reinterpret { start: s, bytes: b, element_bytes: e, alignment: a } => {
                assert_eq!((s, b, e, a), (start, bytes, element_bytes, alignment));
            }
            ref other => panic!("{other}"),
        }
    };
    refused(bytes.slice(1..5).unwrap().cast::<u32>().unwrap_err(), 1, 4, 4, 4);
    refused(bytes.slice(4..10).unwrap().cast::<u32>().unwrap_err(), 4, 6, 4, 4);
    refused(x.slice(1..3).unwrap().cast::<u64>().unwrap_err(), 4, 8, 8, 8);
    refused(x.view().cast::<[u8; 0]>().unwrap_err(), 0, 400, 0, 1);
    assert_eq!(bytes.slice(7..7).unwrap().cast::<u8>().unwrap().len(), 0);

    // Two halves of different types, at once.
    let (left, right) = x.split_at_mut(50).unwrap();
    let (mut left, mut right) = (left.cast::<f32>().unwrap(), right.cast::<u64>().unwrap());
    stream.fill(&mut left, 1.0).queued().unwrap();
    stream.fill(&mut right.slice_mut(24..).unwrap(), u64::MAX).queued().unwrap();
    let (_, mut end) = right.split_at_mut(23).unwrap();
    stream.fill(&mut end.slice_mut(..1).unwrap(), 5).queued().unwrap();
    let x = stream.download(&x).await.unwrap();
    assert!(x[..50].iter().all(|x| *x == 1.0f32.to_bits()));
    assert_eq!(x[94..], [94, 95, 5, 0, u32::MAX, u32::MAX]);
}

/// `rows` of `source` onto `destination`, on the host.
fn on_host(
    source: &[u16],
    destination: &mut [u16],
    [width, height]: [usize; 2],
    [source_start, source_pitch, destination_start, destination_pitch]: [usize; 4],
) {
    for row in (0..height).filter(|_| width > 0) {
        let from = source_start + row * source_pitch;
        let to = destination_start + row * destination_pitch;
        destination[to..to + width].copy_from_slice(&source[from..from + width]);
    }
}

#[tokio::test]
async fn rows_go_where_they_should_in_every_direction() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let data: Vec<u16> = (0..1000).collect();
    for (extent, places) in [
        ([7, 5], [3, 20, 100, 9]),
        ([7, 5], [0, 7, 11, 30]),
        ([7, 5], [13, 31, 0, 7]),
        ([7, 5], [0, 7, 0, 7]),
        ([100, 1], [17, 0, 400, 0]),
        ([1, 100], [0, 10, 5, 4]),
        ([0, 5], [1000, 3, 0, 3]),
        ([5, 0], [0, 5, 1000, 5]),
    ] {
        let [source_start, source_pitch, destination_start, destination_pitch] = places;
        let rows = Copy2d::new(extent[0], extent[1])
            .source_start(source_start)
            .source_pitch(source_pitch)
            .destination_start(destination_start)
            .destination_pitch(destination_pitch);
        let mut expected = vec![7; 1000];
        on_host(&data, &mut expected, extent, places);
        let fresh = || stream.full(1000, 7u16).queued().unwrap();
        let x = stream.upload(data.clone()).queued().unwrap();

        let mut y = fresh();
        stream.copy_2d(&x, &mut y, rows).queued().unwrap();
        assert_eq!(stream.download(&y).await.unwrap(), expected, "{rows:?}");

        let mut y = fresh();
        let mut pinned = stream.pinned::<u16>(1000).unwrap();
        pinned.copy_from_slice(&data);
        let mut pinned = stream.upload_2d(pinned, &mut y, rows).await.unwrap();
        assert_eq!(stream.download(&y).await.unwrap(), expected, "{rows:?}");

        pinned.fill(7);
        let pinned = stream.download_2d(&x, pinned, rows).await.unwrap();
        assert_eq!(pinned, expected, "{rows:?}");
    }
}

#[tokio::test]
async fn rows_outside_of_their_buffers_are_refused() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let x = stream.upload(vec![1u8; 100]).queued().unwrap();
    for rows in [
        Copy2d::new(10, 11),
        Copy2d::new(10, 10).source_start(1),
        Copy2d::new(1, 10).destination_pitch(12),
        Copy2d::new(101, 1),
        Copy2d::new(usize::MAX, usize::MAX),
        Copy2d::new(2, 2).source_start(usize::MAX),
        Copy2d::new(0, 2).destination_start(101),
    ] {
        let mut y = stream.zeros::<u8>(100).queued().unwrap();
        let error = stream.copy_2d(&x, &mut y, rows).queued().unwrap_err();
        let out = matches!(error.detail(), ErrorDetail::OutOfBounds { len: 100, .. });
        assert!(out, "{rows:?}: {error}");
        // What would have been written is poisoned, and nothing else.
        let upstream = stream.download(&y).await.unwrap_err();
        assert!(matches!(upstream.detail(), ErrorDetail::Upstream { .. }), "{upstream}");
        let pinned = stream.pinned::<u8>(100).unwrap();
        assert!(stream.upload_2d(pinned, &mut y, rows).await.is_err());
        let pinned = stream.pinned::<u8>(100).unwrap();
        assert!(stream.download_2d(&x, pinned, rows).await.is_err());
    }
    let mut y = stream.zeros::<u8>(100).queued().unwrap();
    for (rows, side) in [
        (Copy2d::new(10, 10).source_start(1), "source"),
        (Copy2d::new(10, 10).destination_start(1), "destination"),
    ] {
        let error = stream.copy_2d(&x, &mut y, rows).queued().unwrap_err().to_string();
        let named = format!("there are 100 elements in the {side}");
        assert!(error.contains(&named), "{error}");
    }
    let overlapping = Copy2d::new(3, 2).source_pitch(2);
    let error = stream.copy_2d(&x, &mut y, overlapping).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Pitch { width: 3, pitch: 2, .. }), "{error}");
    assert_eq!(stream.download(&x).await.unwrap(), [1; 100]);
}

#[tokio::test]
async fn rows_are_ordered_with_other_streams_and_do_not_heal_gaps() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let x = a.upload(vec![5u32; 64]).queued().unwrap();
    let mut y = a.zeros::<u32>(64).queued().unwrap();
    let left = Copy2d::new(4, 8).source_pitch(8).destination_pitch(8);
    let right = left.source_start(4).destination_start(4);
    let gate = Gate::close(&a).unwrap();
    a.copy_2d(&x, &mut y, left).queued().unwrap();
    b.fill(&mut y.slice_mut(60..).unwrap(), 9).queued().unwrap();
    let seen = b.download(&y);
    gate.open();
    let seen = soon(seen).await.unwrap();
    assert_eq!((seen[0], seen[4], seen[63]), (5, 0, 9));
    // A half that failed is not healed by rows that leave it out.
    let mut z = a.zeros::<u32>(64).queued().unwrap();
    assert!(a.copy_2d(&x, &mut z, Copy2d::new(64, 2)).queued().is_err());
    let error = a.copy_2d(&x, &mut z, right).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    z.clear_poison().unwrap_err();
    a.copy_2d(&x, &mut z, Copy2d::new(8, 8)).queued().unwrap();
    assert_eq!(soon(a.download(&z)).await.unwrap(), [5; 64]);
    // A refused call that would have kept the gaps leaves what was there.
    let error = a.copy_2d(&x, &mut z, right.source_start(99)).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::OutOfBounds { .. }), "{error}");
    a.copy_2d(&x, &mut z, right).queued().unwrap_err();
    z.clear_poison().unwrap();
    a.copy_2d(&x, &mut z, right).queued().unwrap();
}

#[tokio::test]
async fn untracked_uses_wait_for_nobody_and_nobody_for_them() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let mut x = a.upload(vec![3u32; 100]).await.unwrap();
    let gate = Gate::close(&a).unwrap();
    a.fill(&mut x.slice_mut(50..).unwrap(), 4).queued().unwrap();
    let tracked = b.done();
    // SAFETY: the first half is complete, and the buffer outlives the await.
    let first = unsafe { x.view().untracked() }.slice(..50).unwrap();
    assert_eq!(soon(b.download(&first)).await.unwrap(), [3; 50]);
    tracked.await.unwrap();
    // The reads above are no reason to wait.
    // SAFETY: as above.
    let held = a.download(&unsafe { x.view().untracked() }.slice(..50).unwrap());
    soon(b.fill(&mut x.slice_mut(..10).unwrap(), 8)).await.unwrap();
    assert!(!gate.timed_out());
    gate.open();
    assert_eq!(soon(held).await.unwrap()[9..11], [8, 3]);
    let other = Device::host();
    // SAFETY: never submitted.
    let error = other.stream().unwrap().download(&unsafe { x.view().untracked() }).await;
    assert!(matches!(error.unwrap_err().detail(), ErrorDetail::WrongDevice { .. }));
}

/// Casts of views begin at any byte that their element's alignment allows; so does a fill.
#[tokio::test]
async fn a_fill_begins_at_any_byte() {
    const BYTES: usize = 200;
    async fn check<T: gpu_await::Element>(stream: &gpu_await::Stream, offset: usize) {
        let (size, count) = (size_of::<T>(), (BYTES - offset) / size_of::<T>());
        for uniform in [true, false] {
            let pattern: Vec<u8> =
                (0..size).map(|n| if uniform { 5 } else { n as u8 + 1 }).collect();
            let mut x = stream.zeros::<u8>(BYTES).queued().unwrap();
            let mut part = x.slice_mut(offset..offset + count * size).unwrap().cast::<T>().unwrap();
            stream.fill(&mut part, bytemuck::pod_read_unaligned(&pattern)).queued().unwrap();
            let seen = soon(stream.download(&x)).await.unwrap();
            let mut expected = vec![0; BYTES];
            expected[offset..offset + count * size].copy_from_slice(&pattern.repeat(count));
            assert_eq!(seen, expected, "{} at {offset}", std::any::type_name::<T>());
        }
    }
    let device = testing::device();
    let stream = device.stream().unwrap();
    for offset in 0..9 {
        check::<[u8; 1]>(&stream, offset).await;
        check::<[u8; 2]>(&stream, offset).await;
        check::<[u8; 3]>(&stream, offset).await;
        check::<[u8; 4]>(&stream, offset).await;
        check::<[u8; 8]>(&stream, offset).await;
        check::<[u8; 12]>(&stream, offset).await;
        check::<[u8; 16]>(&stream, offset).await;
        if offset % 2 == 0 {
            check::<[u16; 2]>(&stream, offset).await;
            check::<[u16; 4]>(&stream, offset).await;
        }
    }
}

/// With one row there is nothing at the distance of the next.
#[test]
fn the_pitch_of_one_row_may_be_any() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let x = stream.upload(vec![7u32; 64]).queued().unwrap();
    let mut y = stream.zeros::<u32>(64).queued().unwrap();
    for rows in [
        Copy2d::new(2, 1).destination_pitch(1 << 62).destination_start(3),
        Copy2d::new(2, 1).source_pitch(usize::MAX).destination_start(3),
    ] {
        stream.copy_2d(&x, &mut y, rows).queued().unwrap();
        assert_eq!(stream.download(&y).synchronize().unwrap()[2..6], [0, 7, 7, 0]);
        let pinned = stream.download_2d(&y, stream.pinned(64).unwrap(), rows);
        assert_eq!(pinned.synchronize().unwrap().len(), 64);
    }
}
