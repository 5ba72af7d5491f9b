//! Work of other libraries whose failure is known only later, on every device: who is told of it.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use gpu_await::testing::{self, Gate};
use gpu_await::{
    DeviceBuffer, Error, ErrorDetail, ErrorKind, MemoryLoan, Op, Result, Stream, Uses, WorkOutcome,
};

/// Of anything that is not a wait.
const SOON: Duration = Duration::from_secs(10);
const LEN: usize = 1000;

/// Work that does nothing, and the outcome through which it fails.
fn work(stream: &Stream, y: &mut DeviceBuffer<f32>) -> (Op<()>, WorkOutcome) {
    let mut outcome = None;
    // SAFETY: nothing is put on the stream, and the memory was written before.
    let op = unsafe {
        stream.enqueue(Uses::new("their work").updates(y), |queue, _| {
            outcome = Some(queue.outcome()?);
            Ok::<(), Error>(())
        })
    };
    (op, outcome.expect("the closure ran"))
}

fn lend<'a>(stream: &Stream, y: &'a mut DeviceBuffer<f32>) -> Result<MemoryLoan<'a, impl Copy>> {
    // SAFETY: nobody does anything there, and the memory was written before.
    unsafe { stream.lend_memory(Uses::new("their work").updates(y)) }
}

fn assert_upstream(error: &Error) {
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    assert!(error.to_string().contains("their work"), "{error}");
}

#[tokio::test]
async fn an_outcome_reaches_every_reader() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let mut z = stream.zeros::<f32>(LEN).queued()?;
    for is_lent in [false, true, false, true] {
        stream.fill(&mut y, 1.0).queued()?;
        stream.fill(&mut z, 1.0).queued()?;
        let gate = Gate::close(&stream)?;
        let (op, outcome) = match is_lent {
            false => work(&stream, &mut y),
            true => {
                let loan = lend(&stream, &mut y)?;
                let outcome = loan.outcome();
                (loan.complete(), outcome)
            }
        };
        let copied = other.copy(&y, &mut z);
        let read = other.download(&z);
        assert!(!op.is_complete());
        outcome.fail("nobody sent anything");
        outcome.fail("the first failure counts");
        let after = other.download(&y);
        gate.open();
        let error = op.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Foreign);
        assert_eq!(error.detail().to_string(), "their work: nobody sent anything");
        for failed in [copied.await.unwrap_err(), read.await.unwrap_err()] {
            assert_upstream(&failed);
        }
        assert_upstream(&after.await.unwrap_err());
        assert_upstream(&stream.download(&z).await.unwrap_err());
    }
    // Overwritten, it is good again.
    stream.fill(&mut y, 3.0).queued()?;
    assert_eq!(stream.download(&y).await?, [3.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn work_that_does_not_fail() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 2.0f32).queued()?;
    let (op, outcome) = work(&stream, &mut y);
    let read = stream.download(&y);
    op.await?;
    drop(outcome);
    assert_eq!(read.await?, [2.0; LEN]);
    let loan = lend(&stream, &mut y)?;
    let outcome = loan.outcome();
    loan.complete().await?;
    assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    // Too late: whoever waited for it was told that it is good.
    outcome.fail("after all");
    assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    Ok(())
}

/// A reader on another stream is complete, so the work is, though nobody has asked its stream.
#[tokio::test]
async fn a_reader_that_succeeded_is_told_nothing_else() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut y = stream.full(LEN, 2.0f32).queued()?;
    let gate = Gate::close(&stream)?;
    let (op, outcome) = work(&stream, &mut y);
    let read = other.download(&y);
    gate.open();
    assert_eq!(read.await?, [2.0; LEN]);
    outcome.fail("too late");
    op.await?;
    assert_eq!(other.download(&y).await?, [2.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn the_work_of_a_loan_on_a_lost_device_is_over() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 2.0f32).queued()?;
    let loan = lend(&stream, &mut y)?;
    let outcome = loan.outcome();
    assert!(!outcome.is_complete(), "the loan has not ended");
    handle.lose_device("on purpose");
    assert!(stream.done().await.is_err(), "it is known");
    let error = loan.complete().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost);
    assert!(outcome.is_complete());
    Ok(())
}

/// The failure is known before the loan ends, or when it ended without a future.
#[tokio::test]
async fn an_outcome_of_a_loan_at_any_time() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 2.0f32).queued()?;
    let loan = lend(&stream, &mut y)?;
    loan.outcome().fail("before the end");
    let error = loan.complete().await.unwrap_err();
    assert_eq!(error.detail().to_string(), "their work: before the end");
    assert_upstream(&stream.download(&y).await.unwrap_err());
    for ends in [true, false] {
        stream.fill(&mut y, 4.0).queued()?;
        let gate = Gate::close(&stream)?;
        let loan = lend(&stream, &mut y)?;
        let outcome = loan.outcome();
        match ends {
            true => loan.end()?,
            false => drop(loan),
        }
        outcome.fail("behind the end");
        gate.open();
        assert_upstream(&stream.download(&y).await.unwrap_err());
    }
    // A part that somebody overwrote meanwhile is good.
    stream.fill(&mut y, 4.0).queued()?;
    let gate = Gate::close(&stream)?;
    let (op, outcome) = work(&stream, &mut y);
    stream.fill(&mut y.slice_mut(..10)?, 5.0).queued()?;
    outcome.fail("late");
    gate.open();
    op.await.expect_err("it failed");
    assert_eq!(stream.download(&y.slice(..10)?).await?, [5.0; 10]);
    assert_upstream(&stream.download(&y.slice(10..)?).await.unwrap_err());
    Ok(())
}

/// Whoever asks a loan that has begun is told, also if the failure came before the question.
#[tokio::test]
async fn a_loan_is_not_ready_whose_input_failed() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    for fails_first in [true, false] {
        let mut y = stream.full(LEN, 1.0f32).queued()?;
        let gate = Gate::close(&stream)?;
        let (op, outcome) = work(&stream, &mut y);
        let loan = lend(&stream, &mut y)?;
        let own = loan.outcome();
        let ready = if fails_first {
            outcome.fail("late");
            loan.ready()
        } else {
            let ready = loan.ready();
            outcome.fail("late");
            ready
        };
        gate.open();
        op.await.expect_err("it failed");
        assert_upstream(&ready.await.unwrap_err());
        assert_upstream(&loan.complete().await.unwrap_err());
        // The library hears of it.
        assert_upstream(&own.failure().expect("its input failed"));
    }
    Ok(())
}

/// Two loans of which one gets data that the other reads: a failure of that reaches what it writes, whenever it comes, and a success is one.
#[tokio::test]
async fn a_loan_that_reads_the_inputs_of_another() -> Result<()> {
    let (device, peer) = (testing::device(), testing::peer_device());
    let (stream, there) = (device.stream()?, peer.stream()?);
    for fails_at in 0..5 {
        let mut x = stream.full(LEN, 1.0f32).queued()?;
        let mut y = there.full(LEN, 1.0f32).queued()?;
        let gate = Gate::close(&stream)?;
        let (decoded, outcome) = work(&stream, &mut x);
        let fail_at = |at| {
            if at == fails_at {
                outcome.fail("late");
            }
        };
        // SAFETY: nobody does anything there, and the memory was written before.
        let from = unsafe { stream.lend_memory(Uses::new("their send").reads(&x)) }?;
        let to = lend(&there, &mut y)?;
        let own = to.outcome();
        fail_at(0);
        to.reads_inputs_of(&from);
        fail_at(1);
        let (sent, received) = (from.complete(), to.complete());
        fail_at(2);
        let mut copy = stream.zeros::<f32>(LEN).queued()?;
        let copied = stream.copy(&y, &mut copy);
        fail_at(3);
        gate.open();
        let results = [decoded.await, sent.await, received.await, copied.await];
        let read = [there.download(&y).await, stream.download(&copy).await];
        for result in results.into_iter().chain(read.map(|read| read.map(drop))) {
            assert_eq!(result.is_err(), fails_at < 4, "{fails_at}: {result:?}");
        }
        // It is not the failure of the work itself, nor of what that declares.
        assert!(own.failure().is_none());
    }
    Ok(())
}

/// It fails on one device, and is read on another.
#[tokio::test]
async fn an_outcome_reaches_other_devices() -> Result<()> {
    let (device, peer) = (testing::device(), testing::peer_device());
    let (stream, there) = (device.stream()?, peer.stream()?);
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    let mut z = there.full(LEN, 1.0f32).queued()?;
    let gate = Gate::close(&stream)?;
    let (op, outcome) = work(&stream, &mut y);
    let copied = there.copy(&y, &mut z);
    outcome.fail("gone");
    gate.open();
    op.await.expect_err("it failed");
    assert_upstream(&copied.await.unwrap_err());
    assert_upstream(&there.download(&z).await.unwrap_err());
    Ok(())
}

/// Its thread says so at any time, beside readers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_beside_readers_is_lost_to_nobody() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let mut z = other.zeros::<f32>(LEN).queued()?;
    for _ in 0..200 {
        stream.fill(&mut y, 1.0).queued()?;
        let gate = Gate::close(&stream)?;
        let (op, outcome) = work(&stream, &mut y);
        let thread = std::thread::spawn(move || {
            outcome.fail("gone");
            gate.open();
        });
        let copied = other.copy(&y, &mut z);
        op.await.expect_err("it failed before it was complete");
        assert_upstream(&copied.await.unwrap_err());
        assert_upstream(&other.download(&z).await.unwrap_err());
        thread.join().expect("ends");
    }
    Ok(())
}

#[tokio::test]
async fn no_outcome_in_a_graph() -> Result<()> {
    let device = testing::device();
    let made = device.graph::<(gpu_await::InOut<f32>,), _, _>((), |q, (), (mut y,)| {
        let uses = Uses::new("their work").updates(&mut y).can_be_captured();
        // SAFETY: nothing is put on the stream.
        unsafe { q.enqueue(uses, |queue, _| queue.outcome().map(drop)) }
    });
    let stream = device.stream()?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let error = made.launch(&stream, (&mut y,)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    Ok(())
}

/// Outcomes that somebody keeps after their work is complete cost nothing, and those in a chain of open ones no more than the first.
#[tokio::test]
async fn outcomes_that_are_kept() -> Result<()> {
    const CHAIN: usize = 5000;
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let mut kept = Vec::new();
    for is_open in [false, true] {
        let gate = is_open.then(|| Gate::close(&stream)).transpose()?;
        let start = std::time::Instant::now();
        for _ in 0..CHAIN {
            let (op, outcome) = work(&stream, &mut y);
            kept.push(outcome);
            if is_open { op.queued()? } else { op.await? }
        }
        let took = start.elapsed();
        // Where each looked at all in front of it, 1000 took 0.2 s of an optimized build.
        assert!(took < std::time::Duration::from_secs(4), "{took:?}");
        if let Some(gate) = gate {
            kept[CHAIN].fail("the first of those that are open");
            gate.open();
            assert_upstream(&stream.download(&y).await.unwrap_err());
        }
    }
    Ok(())
}

/// Each work of a chain, and whatever reads of several, fails with any work in front of it and with none behind it.
#[tokio::test]
async fn a_failure_in_a_chain_of_outcomes() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    for failing in 0..4 {
        let mut y = stream.zeros::<f32>(LEN).queued()?;
        let mut z = stream.zeros::<f32>(LEN).queued()?;
        let mut sum = stream.zeros::<f32>(LEN).queued()?;
        let gate = Gate::close(&stream)?;
        let mut ops = Vec::new();
        let mut outcomes = Vec::new();
        for at in 0..4 {
            // The last one is beside the chain.
            let memory = if at < 3 { &mut y } else { &mut z };
            let (op, outcome) = work(&stream, memory);
            ops.push(op);
            outcomes.push(outcome);
        }
        let uses = Uses::new("sum").reads(&y).reads(&z).updates(&mut sum);
        // SAFETY: nothing is put on the stream, and the memory was written before.
        let summed = unsafe { other.enqueue(uses, |_, _| Ok::<(), Error>(())) };
        let read = other.download(&sum);
        outcomes[failing].fail("in the middle");
        drop(outcomes);
        let after = [stream.download(&y), stream.download(&z), other.download(&sum)];
        // Overwritten, it is good again, whatever becomes of what was there.
        other.fill(&mut y, 3.0).queued()?;
        let healed = stream.download(&y);
        gate.open();
        for (at, op) in ops.into_iter().enumerate() {
            match op.await {
                Ok(()) => assert!(at < failing || failing == 3 || at == 3, "{at} of {failing}"),
                Err(error) if at == failing => {
                    assert_eq!(error.detail().to_string(), "their work: in the middle");
                }
                Err(error) => {
                    assert!(failing < at && at < 3, "{at} of {failing}: {error}");
                    assert_upstream(&error);
                }
            }
        }
        for failed in [summed.await.unwrap_err(), read.await.map(drop).unwrap_err()] {
            assert_upstream(&failed);
        }
        let [y, z, sum] = after;
        assert_eq!(y.await.is_err(), failing < 3);
        assert_eq!(z.await.is_err(), failing == 3);
        assert_upstream(&sum.await.unwrap_err());
        assert_eq!(healed.await?, [3.0; LEN]);
    }
    Ok(())
}

/// Who wants no value is told all the same.
#[tokio::test]
async fn without_a_value_it_fails_as_well() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let mut copy = stream.zeros::<f32>(LEN).queued()?;
    let mut mapped = stream.pinned(LEN)?.into_mapped();
    let gate = Gate::close(&stream)?;
    let (op, outcome) = work(&stream, &mut y);
    stream.copy(&y, &mut copy).queued()?;
    stream.copy(&y, &mut mapped).queued()?;
    // Lent by one batch, and a part of the value of another.
    let (other, mut elsewhere) = (device.stream()?, None);
    let lending = stream.batch(|q| {
        let lent = q.download_vec(&y)?;
        elsewhere = Some(other.batch(|_| Ok((lent, 1_u32))));
        Ok(())
    });
    let reads = [
        elsewhere.expect("the closure ran").without_value(),
        lending,
        stream.download(&y).without_value(),
        stream.download_vec(&y).without_value(),
        stream.download(&y).and(stream.done()).without_value(),
        stream.download_vec(&y).and(stream.done()).without_value(),
        stream.download_vec(&y).map_value(|y| y.len()).without_value(),
        gpu_await::join_all([stream.download_vec(&y), stream.download_vec(&y)]).without_value(),
        stream.batch(|q| Ok(Some(q.download_vec(&y)?))).without_value(),
        stream.batch(|q| Ok([q.download(&y)?, q.download(&y)?])).without_value(),
        stream.batch(|q| Ok((q.download_vec(&y)?, q.download(&y)?))).without_value(),
        stream.batch(|q| Ok(vec![q.download_vec(&y)?])).without_value(),
        copy.freeze().without_value(),
        mapped.into_pinned().without_value(),
    ];
    let op = op.without_value();
    outcome.fail("late");
    gate.open();
    op.await.expect_err("it failed");
    let mut not_told = Vec::new();
    for (at, read) in reads.into_iter().enumerate() {
        match read.await {
            Ok(()) => not_told.push(at),
            Err(error) => assert_upstream(&error),
        }
    }
    assert_eq!(not_told, []);
    Ok(())
}

/// A failure is not lost because its text cannot be made.
#[tokio::test]
async fn a_cause_that_panics() -> Result<()> {
    struct Panics;
    impl From<Panics> for Box<dyn std::error::Error + Send + Sync> {
        fn from(_: Panics) -> Self {
            panic!("no text for it")
        }
    }
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    let (op, outcome) = work(&stream, &mut y);
    let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| outcome.fail(Panics)));
    assert!(told.is_err());
    gate.open();
    assert_eq!(op.await.unwrap_err().detail().to_string(), "their work: no text for it");
    assert_upstream(&stream.download(&y).await.unwrap_err());
    Ok(())
}

/// Work that fails as it becomes complete: what a reader wrote has failed if the reader has, whoever read that since.
#[test]
fn a_failure_at_the_end_of_the_work() -> Result<()> {
    let stream = testing::device().stream()?;
    let spin = |rounds: u64| (0..rounds).for_each(|_| std::hint::spin_loop());
    let mut random = 1_u64;
    for _ in 0..3000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut y = stream.zeros::<f32>(LEN).queued()?;
        let mut z = stream.zeros::<f32>(LEN).queued()?;
        let gate = Gate::close(&stream)?;
        let (op, outcome) = work(&stream, &mut y);
        let reader = stream.copy(&y, &mut z);
        let failing = std::thread::spawn(move || {
            spin(random >> 52);
            outcome.fail("late");
        });
        spin((random >> 40) % 4096);
        gate.open();
        let waiting = std::thread::spawn(move || op.synchronize());
        let failed = reader.synchronize().is_err();
        assert_eq!(stream.download(&z).synchronize().is_err(), failed);
        failing.join().expect("no panic");
        assert_eq!(waiting.join().expect("no panic").is_err(), failed);
        for memory in [&y, &z] {
            assert_eq!(stream.download(memory).synchronize().is_err(), failed);
        }
    }
    Ok(())
}

/// A failure while a loan ends is either found by it or reaches it.
#[test]
fn a_failure_while_a_loan_ends() -> Result<()> {
    let stream = testing::device().stream()?;
    for round in 0..400 {
        let mut y = stream.zeros::<f32>(LEN).queued()?;
        let gate = Gate::close(&stream)?;
        let (op, outcome) = work(&stream, &mut y);
        let loan = lend(&stream, &mut y)?;
        let failing = std::thread::spawn(move || outcome.fail("late"));
        (0..round % 64 * 20).for_each(|_| std::hint::spin_loop());
        let ended = loan.complete();
        failing.join().expect("no panic");
        gate.open();
        assert_eq!(op.synchronize().unwrap_err().kind(), ErrorKind::Foreign);
        assert_upstream(&ended.synchronize().unwrap_err());
        assert_upstream(&stream.download(&y).synchronize().unwrap_err());
    }
    Ok(())
}

/// An error that uses its stream when it is dropped, as one of a library's that gives a loan back.
#[derive(Debug)]
struct UsesItsStream(Stream, Sender<bool>);

impl std::fmt::Display for UsesItsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for UsesItsStream {}

impl Drop for UsesItsStream {
    fn drop(&mut self) {
        let submitted = self.0.host_fn(|| ()).submitted();
        self.1.send(submitted.is_ok()).ok();
    }
}

/// Who overwrites failed data holds locks, under which no error of another library is dropped.
#[test]
fn a_cause_may_use_its_stream_when_it_is_dropped() -> Result<()> {
    type Fail = fn(&Stream, &mut DeviceBuffer<f32>, UsesItsStream);
    type Overwrite = fn(&Stream, &DeviceBuffer<f32>, &mut DeviceBuffer<f32>) -> Result<()>;
    let fails: [Fail; 3] = [
        |stream, y, cause| drop(lend(stream, y).expect("a loan").fail(cause)),
        |stream, y, cause| {
            let (op, outcome) = work(stream, y);
            outcome.fail(cause);
            op.abandon();
        },
        |stream, y, cause| {
            // SAFETY: nothing is put on the stream.
            unsafe {
                stream.enqueue(Uses::new("their work").updates(y), |_, _| Err::<(), _>(cause))
            }
            .abandon();
        },
    ];
    let overwrites: [Overwrite; 5] = [
        |stream, _, y| stream.fill(y, 1.0).queued(),
        |stream, x, y| stream.copy(x, y).queued(),
        |stream, x, y| stream.copy(&x.slice(..LEN)?, &mut y.slice_mut(..LEN)?).queued(),
        |stream, _, y| stream.batch(|q| q.fill(y, 1.0)).queued(),
        // SAFETY: nobody does anything there, and nobody reads it.
        |stream, _, y| unsafe { stream.lend_memory(Uses::new("other work").writes(y)) }?.end(),
    ];
    for fail in fails {
        for overwrite in overwrites {
            let device = testing::device();
            let stream = device.stream()?;
            let (dropped, is_dropped) = channel();
            let (done, is_done) = channel();
            let overwriter = std::thread::spawn(move || -> Result<()> {
                let x = stream.zeros::<f32>(LEN).queued()?;
                let mut y = stream.zeros::<f32>(LEN).queued()?;
                let cause = UsesItsStream(stream.clone(), dropped);
                fail(&stream, &mut y, cause);
                stream.synchronize()?;
                overwrite(&stream, &x, &mut y)?;
                done.send(()).ok();
                Ok(())
            });
            is_done.recv_timeout(SOON).expect("it does not hang");
            assert!(is_dropped.recv_timeout(SOON).expect("it is dropped"), "it may submit");
            overwriter.join().expect("no panic")?;
        }
    }
    Ok(())
}

/// Whoever was given the data has been told, on whatever stream the host learned that it is complete.
#[test]
fn a_failure_behind_what_the_host_was_given_changes_nothing() -> Result<()> {
    type Given = fn(&Stream, DeviceBuffer<f32>) -> Result<()>;
    let given: [Given; 2] = [
        |_, copy| copy.freeze().synchronize().map(drop),
        |stream, mut copy| {
            let loan = lend(stream, &mut copy)?;
            loan.ready().synchronize()?;
            loan.end()
        },
    ];
    for given in given {
        for _ in 0..20 {
            let device = testing::device();
            let (stream, other) = (device.stream()?, device.stream()?);
            let mut y = stream.zeros::<f32>(LEN).queued()?;
            let mut copy = other.zeros::<f32>(LEN).queued()?;
            let gate = Gate::close(&stream)?;
            let (op, outcome) = work(&stream, &mut y);
            op.queued()?;
            other.copy(&y, &mut copy).queued()?;
            gate.open();
            given(&other, copy)?;
            outcome.fail("too late");
            assert_eq!(outcome.failure(), None);
            stream.download(&y).synchronize()?;
        }
    }
    Ok(())
}
