//! Buffers in parts: chunks that are borrowed, and parts that are owned.
#![forbid(unsafe_code)]

use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceBuffer, ErrorDetail, PinnedBuffer, Readable, Result, Stream};

const LEN: usize = 1000;

#[test]
fn chunks_are_those_of_slices() -> Result<()> {
    let stream = testing::device().stream()?;
    for (len, chunk_len) in [(10, 4), (12, 4), (3, 4), (1, 1), (0, 3)] {
        let host: Vec<u32> = (0..len).collect();
        let mut x = stream.upload(host.clone()).queued()?;
        let read = |view: gpu_await::View<'_, u32>| stream.download_vec(&view).synchronize();
        let forward: Vec<_> = x.chunks(chunk_len).map(read).collect::<Result<_>>()?;
        let backward: Vec<_> = x.view().chunks(chunk_len).rev().map(read).collect::<Result<_>>()?;
        assert!(forward.iter().eq(host.chunks(chunk_len)), "{len} by {chunk_len}: {forward:?}");
        assert!(backward.iter().eq(host.chunks(chunk_len).rev()), "{len} by {chunk_len}");
        let lens: Vec<_> = x.chunks_mut(chunk_len).map(|chunk| chunk.len()).collect();
        let mut both_ends = x.view_mut().chunks_mut(chunk_len);
        assert_eq!(both_ends.len(), lens.len());
        assert_eq!(both_ends.next_back().map(|chunk| chunk.len()), lens.last().copied());
        assert_eq!(both_ends.len(), lens.len().saturating_sub(1));
    }
    Ok(())
}

/// Fills a part on a stream that is held up, and another part beside it, which is not.
fn fill_beside(
    held: &Stream,
    free: &Stream,
    left: &mut impl gpu_await::Writable<u32>,
    right: &mut impl gpu_await::Writable<u32>,
) -> Result<()> {
    let gate = Gate::close(held)?;
    let late = held.fill(left, 1);
    free.fill(right, 2).synchronize()?;
    assert!(!late.is_complete());
    gate.open();
    late.synchronize()?;
    assert!(!gate.timed_out());
    Ok(())
}

#[test]
fn chunks_are_written_at_once() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.zeros::<u32>(LEN).synchronize()?;
    let mut chunks = x.chunks_mut(LEN / 2);
    let (mut left, mut right) = (chunks.next().expect("two"), chunks.next().expect("two"));
    fill_beside(&a, &b, &mut left, &mut right)?;
    let seen = b.download(&x).synchronize()?;
    assert_eq!([seen[0], seen[LEN / 2 - 1], seen[LEN / 2], seen[LEN - 1]], [1, 1, 2, 2]);
    Ok(())
}

#[test]
fn parts_are_written_at_once_by_two_threads() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut left = a.zeros::<u32>(LEN).synchronize()?;
    let mut right = left.split_off(LEN / 4)?;
    assert_eq!((left.len(), right.len()), (LEN / 4, LEN - LEN / 4));
    assert_eq!(right.device_ptr(), left.device_ptr() + LEN as u64);
    fill_beside(&a, &b, &mut left, &mut right)?;
    let thread = std::thread::spawn(move || {
        b.fill(&mut right, 3).queued()?;
        Ok::<_, gpu_await::Error>(right)
    });
    a.fill(&mut left, 4).queued()?;
    left.unsplit(thread.join().expect("no panic")?).expect("its other part");
    let seen = a.download(&left).synchronize()?;
    assert!(seen[..LEN / 4].iter().all(|word| *word == 4), "{seen:?}");
    assert!(seen[LEN / 4..].iter().all(|word| *word == 3), "{seen:?}");
    Ok(())
}

#[test]
fn only_what_follows_is_joined() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut a = stream.upload((0..10u32).collect::<Vec<_>>()).queued()?;
    let mut b = a.split_off(3)?;
    let c = b.split_off(4)?;
    let (a_ptr, c_ptr) = (a.device_ptr(), c.device_ptr());
    let c = a.unsplit(c).expect_err("b lies between");
    assert_eq!((a.len(), c.device_ptr()), (3, c_ptr));
    let mut c = c;
    let a = c.unsplit(a).expect_err("the wrong way round");
    let mut a = a;
    let stranger = stream.zeros::<u32>(4).queued()?;
    a.unsplit(stranger).expect_err("other memory");
    b.unsplit(c).expect("c follows b");
    a.unsplit(b).expect("b follows a");
    assert_eq!((a.len(), a.device_ptr()), (10, a_ptr));
    assert_eq!(*stream.download(&a).synchronize()?, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);

    let error = a.split_off(11).expect_err("beyond its end");
    assert!(matches!(error.detail(), ErrorDetail::OutOfBounds { .. }), "{error}");
    assert_eq!(a.len(), 10);
    let empty = a.split_off(10)?;
    assert!(empty.is_empty());
    a.unsplit(empty).expect("nothing follows it as well");
    Ok(())
}

#[test]
fn empty_parts_of_pinned_memory_are_joined_in_any_order() -> Result<()> {
    let stream = testing::device().stream()?;
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let mut whole = stream.pinned::<u8>(3)?;
        let mut empty: Vec<_> =
            (0..3).map(|_| whole.split_off(3).map(Some)).collect::<Result<_>>()?;
        for at in order {
            let part = empty[at].take().expect("once each");
            whole.unsplit(part).expect("it follows");
        }
        assert_eq!(whole.len(), 3);
    }
    Ok(())
}

#[test]
fn memory_is_freed_with_its_last_part() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    stream.synchronize()?;
    let before = device.stats().allocations;
    let mut left = stream.zeros::<u32>(LEN).synchronize()?;
    let right = left.split_off(1)?;
    let read = |part: &DeviceBuffer<u32>| stream.download(part).synchronize();
    drop(left);
    assert_eq!(*read(&right)?, [0; LEN - 1]);
    assert_eq!(device.stats().allocations, before + 1);
    drop(right);
    stream.synchronize()?;
    assert_eq!(device.stats().allocations, before);
    Ok(())
}

/// Nothing of a part is said of the other: contents, errors, being frozen.
#[test]
fn parts_have_contents_of_their_own() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut left = a.empty::<u32>(LEN).queued()?;
    let mut right = left.split_off(LEN / 2)?;
    b.fill(&mut right, 5).queued()?;
    let frozen = right.freeze().synchronize()?;
    assert_eq!(*b.download(&frozen).synchronize()?, [5; LEN / 2]);
    let error = a.download(&left).synchronize().expect_err("nobody wrote it");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");

    // A reader of the frozen part waits for nobody who writes the other.
    let gate = Gate::close(&a)?;
    let late = a.fill(&mut left, 6);
    let part = frozen.part(1..3)?;
    assert_eq!(*b.download(&part).synchronize()?, [5, 5]);
    assert_eq!(part.device_ptr(), frozen.device_ptr() + 4);
    assert!(!late.is_complete());
    gate.open();
    drop(frozen);
    assert_eq!(*b.download(&part).synchronize()?, [5, 5]);
    assert_eq!(*a.download(&left).synchronize()?, [6; LEN / 2]);
    assert!(!gate.timed_out());

    let error = part.part(1..3).expect_err("beyond its end");
    assert!(matches!(error.detail(), ErrorDetail::OutOfBounds { .. }), "{error}");
    Ok(())
}

/// The sum of a pinned buffer is that of its parts, wherever they are.
#[test]
fn a_part_of_pinned_memory_is_lent_while_another_is_written() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let x = stream.full(4, 7u32).queued()?;
    let mut whole = stream.pinned::<u32>(10)?;
    let whole_ptr = whole.device_ptr();
    let mut part = whole.split_off(3)?;
    let rest = part.split_off(4)?;
    assert_eq!((whole.len(), part.len(), rest.len()), (3, 4, 3));
    assert_eq!(part.device_ptr(), whole_ptr + 12);

    let gate = Gate::close(&stream)?;
    let copy = stream.download_into(&x, part);
    whole.fill(1);
    let rest = whole.unsplit(rest).expect_err("the lent part lies between");
    gate.open();
    let part = copy.synchronize()?;
    assert!(!gate.timed_out());
    assert!(part.iter().all(|word| *word == 7), "{part:?}");
    whole.unsplit(part).expect("it follows");
    whole.unsplit(rest).expect("it follows");
    assert_eq!(whole, [1, 1, 1, 7, 7, 7, 7, 0, 0, 0]);

    // Up again from the middle, and the part alone outlives the rest.
    let mut middle = whole.split_off(2)?;
    drop(middle.split_off(3)?);
    drop(whole);
    let mut y = stream.zeros::<u32>(3).queued()?;
    let middle: PinnedBuffer<u32> = stream.upload_into(middle, &mut y).synchronize()?;
    assert_eq!(middle, [1, 7, 7]);
    assert_eq!(*stream.download(&y).synchronize()?, [1, 7, 7]);
    assert!(middle.device_ptr() == whole_ptr + 8 && sum_of(&y, &stream)? == 15);
    Ok(())
}

fn sum_of(x: &impl Readable<u32>, stream: &Stream) -> Result<u32> {
    Ok(stream.download(x).synchronize()?.iter().sum())
}
