//! Reservations: who is granted when, what draws from them, and what they keep from others.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, ErrorKind, MemoryAdvice, Pressure, Reservation,
    ReservationProblem, Reserve, Result, Stream,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;

/// A device of the kind under test with this limit. The other one keeps this thread's turn on a GPU.
pub(super) fn limited(limit: u64, pressure: Pressure) -> (Device, Device) {
    let turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let builder = Device::builder().memory_limit_bytes(limit).on_pressure(pressure);
    (builder.named(&name).expect("the device under test"), turn)
}

pub(super) fn zeros(stream: &Stream, bytes: u64) -> Result<DeviceBuffer<u8>> {
    stream.zeros(bytes as usize).queued()
}

pub(super) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("in time")
}

fn problem<T: std::fmt::Debug>(result: Result<T>) -> ReservationProblem {
    match result.unwrap_err().detail() {
        ErrorDetail::Reservation { problem, .. } => problem.clone(),
        other => panic!("{other}"),
    }
}

/// Its size, and what was left.
fn spent(problem: ReservationProblem) -> (u64, u64) {
    match problem {
        ReservationProblem::Spent { size_bytes, left_bytes, .. } => (size_bytes, left_bytes),
        other => panic!("{other}"),
    }
}

/// A task that is polled by hand.
pub(super) struct Task {
    reserve: std::pin::Pin<Box<Reserve>>,
    woken: Arc<Woken>,
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    pub(super) fn new(reserve: Reserve) -> Self {
        Task { reserve: Box::pin(reserve), woken: Arc::default() }
    }

    pub(super) fn poll(&mut self) -> Poll<Result<Reservation>> {
        let waker = Waker::from(self.woken.clone());
        self.reserve.as_mut().poll(&mut Context::from_waker(&waker))
    }

    /// Polls again when it was woken since the poll that saw `seen`.
    pub(super) fn poll_when_woken(&mut self, seen: usize) -> Poll<Result<Reservation>> {
        eventually("it is woken", || self.woken() > seen);
        self.poll()
    }

    /// How often it was woken.
    pub(super) fn woken(&self) -> usize {
        self.woken.0.load(Ordering::SeqCst)
    }

    /// Polls until it is ready, when it is woken and only then.
    pub(super) fn finish(mut self) -> Result<Reservation> {
        let mut seen = self.woken();
        let mut polled = self.poll();
        loop {
            if let Poll::Ready(ended) = polled {
                return ended;
            }
            eventually("it is woken", || self.woken() > seen);
            seen = self.woken();
            polled = self.poll();
        }
    }
}

// ---- what it is for -----------------------------------------------------------------------------

const LANES: usize = 4;
/// What a proof holds at its peak: a trace that stays, and two tables one after another.
const TRACE: u64 = 2 * MIB;
const TABLE: u64 = MIB;
const PEAK: u64 = TRACE + TABLE;

/// One proof, whose steps depend on what the host reads in between.
async fn prove(stream: &Stream) -> Result<()> {
    let mut trace = zeros(stream, TRACE)?;
    stream.fill(&mut trace, 1).queued()?;
    for _ in 0..2 {
        let mut table = zeros(stream, TABLE)?;
        stream.copy(&trace.slice(..TABLE as usize)?, &mut table).queued()?;
        let read = stream.download(&table.slice(..4)?).await?;
        assert_eq!(read, [1; 4]);
    }
    Ok(())
}

/// How many of the lanes' proofs run out of memory, where the limit has room for one and a bit.
fn lanes(reserves: bool) -> usize {
    let (device, _turn) = limited(PEAK + TABLE, Pressure::Wait);
    let (barrier, failed) = (Barrier::new(LANES), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                let stream = device.stream().expect("a stream");
                barrier.wait();
                for _ in 0..3 {
                    let proof = async {
                        if !reserves {
                            return prove(&stream).await;
                        }
                        let reservation = device.reserve(PEAK).await?;
                        prove(&reservation.stream(&stream)?).await
                    };
                    match block_on(proof) {
                        Ok(()) => {}
                        Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                            failed.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    failed.into_inner()
}

#[test]
fn lanes_at_a_tight_limit_never_run_out() {
    let failed: usize = (0..5).map(|_| lanes(false)).sum();
    assert!(failed > 0, "without reservations they fit as well: the limit is not tight");
    for run in 0..100 {
        assert_eq!(lanes(true), 0, "run {run}");
    }
}

// ---- what draws ---------------------------------------------------------------------------------

#[tokio::test]
async fn whatever_allocates_draws() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let stream = device.stream()?;
    let reservation = device.reserve(256 * KIB).await?;
    let mine = reservation.stream(&stream)?;
    let before = reservation.left_bytes();
    let drawn = || before - reservation.left_bytes();
    assert_eq!((reservation.size_bytes(), drawn()), (256 * KIB, 0));
    let kept = (
        mine.zeros::<u8>(512).queued()?,
        mine.upload(vec![1_u8; 512]).queued()?,
        mine.full(512, 3_u8).queued()?,
        mine.clone().empty::<u8>(512).queued()?,
        mine.upload_staged(vec![2_u8; 512]).await?,
        mine.batch(|queue| queue.zeros::<u8>(512)).queued()?,
        mine.scope(async { device.zeros::<u8>(512).queued() }).await?,
        mine.fork(1)?[0].zeros::<u8>(512).queued()?,
    );
    assert_eq!(drawn(), 8 * 512);
    assert_eq!(device.memory()?.budgeted_bytes, 256 * KIB - 8 * 512);
    let beside = (stream.zeros::<u8>(512).queued()?, device.zeros::<u8>(512).queued()?);
    assert_eq!(drawn(), 8 * 512);
    drop((kept, beside));
    assert_eq!(drawn(), 0);
    // A part of a buffer keeps all of it.
    let mut whole = mine.zeros::<u8>(1024).queued()?;
    let part = whole.split_off(512)?;
    drop(whole);
    assert_eq!(drawn(), 1024);
    drop(part);
    assert_eq!(drawn(), 0);
    Ok(())
}

#[tokio::test]
async fn what_is_spent_is_a_typed_error() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let stream = device.stream()?;
    let reservation = device.reserve(10 * KIB).await?;
    let mine = reservation.stream(&stream)?;
    let all = zeros(&mine, 8 * KIB)?;
    let error = zeros(&mine, 3 * KIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(
        error.to_string().contains("2048 of its 10240 bytes are left (made at tests/"),
        "{error}"
    );
    assert_eq!(spent(problem::<()>(Err(error))), (10 * KIB, 2 * KIB));
    drop(all);
    let _all = zeros(&mine, 10 * KIB - 100)?;
    assert_eq!(reservation.left_bytes(), 0);
    let (other, _) = (testing::peer_device(), ());
    let error = reservation.stream(&other.stream()?).unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

/// So many blocks of one size as were counted, whatever the size, one after another as well.
#[tokio::test]
async fn blocks_draw_what_they_ask_for() -> Result<()> {
    let (device, _turn) = limited(64 * MIB, Pressure::Wait);
    let stream = device.stream()?;
    for each in [512, 4096, 4608, 5120, 66_048, 209_408, 525_312, MIB - 512, MIB, MIB + 512] {
        let count = (4 * MIB / each).min(100);
        // Larger ones of that size, which the stream keeps, do not count either.
        drop(zeros(&stream, each)?);
        let reservation = soon(device.reserve(each * count)).await?;
        let mine = reservation.stream(&stream)?;
        for _ in 0..2 {
            let all: Result<Vec<_>> = (0..count).map(|_| zeros(&mine, each - 100)).collect();
            let all = all.unwrap_or_else(|error| panic!("{each} bytes: {error}"));
            assert_eq!(reservation.left_bytes(), 0, "{each} bytes");
            drop(all);
        }
    }
    Ok(())
}

#[tokio::test]
async fn others_do_not_get_it() -> Result<()> {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (device, _turn) = limited(MIB, pressure);
        let stream = device.stream()?;
        // In its cache, where a budget counts as well.
        drop(zeros(&stream, 512 * KIB)?);
        soon(stream.done()).await?;
        let reservation = soon(device.reserve(768 * KIB)).await?;
        let error = zeros(&stream, 512 * KIB).unwrap_err();
        let ErrorDetail::OutOfMemory { budgeted_bytes, free_bytes, .. } = *error.detail() else {
            panic!("{error}")
        };
        assert_eq!((budgeted_bytes, free_bytes), (768 * KIB, 256 * KIB), "{pressure:?}");
        assert!(error.to_string().contains("786432 reserved for others"), "{error}");
        let other = zeros(&stream, 256 * KIB)?;
        let mine = reservation.stream(&device.stream()?)?;
        let all = zeros(&mine, 768 * KIB)?;
        drop((all, other));
        soon(device.done()).await?;
        drop(reservation);
        zeros(&stream, MIB)?;
    }
    Ok(())
}

/// Its memory is behind another stream's work: the stream that draws waits for that on the device.
#[tokio::test]
async fn a_budget_reaches_what_is_pending() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let (busy, stream) = (device.stream()?, device.stream()?);
    zeros(&stream, 512)?;
    soon(stream.done()).await?;
    let held = zeros(&busy, 768 * KIB)?;
    let gate = Gate::close(&busy)?;
    let waiting = Task::new(device.reserve(MIB));
    drop(held);
    let reservation = waiting.finish()?;
    let made = reservation.stream(&stream)?.zeros::<u8>(MIB as usize);
    assert!(!made.is_complete());
    gate.open();
    soon(made).await?;
    Ok(())
}

/// Told to fail, it is granted when the memory is free on the device.
#[tokio::test]
async fn under_fail_it_waits_for_the_device() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Fail);
    let (busy, stream) = (device.stream()?, device.stream()?);
    let held = zeros(&busy, 768 * KIB)?;
    let gate = Gate::close(&busy)?;
    let mut waiting = Task::new(device.reserve(MIB));
    drop(held);
    for _ in 0..10 {
        assert!(waiting.poll().is_pending());
        thread::sleep(Duration::from_millis(1));
    }
    gate.open();
    let reservation = waiting.finish()?;
    zeros(&reservation.stream(&stream)?, MIB)?;
    Ok(())
}

// ---- who is granted when ------------------------------------------------------------------------

#[test]
fn first_come_first_reserved() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let all = device.try_reserve(MIB)?;
    let mut large = Task::new(device.reserve(768 * KIB));
    let mut small = Task::new(device.reserve(KIB));
    let mut dropped = Task::new(device.reserve(KIB));
    let mut last = Task::new(device.reserve(KIB));
    for task in [&mut large, &mut small, &mut dropped, &mut last] {
        assert!(task.poll().is_pending());
    }
    all.shrink(512 * KIB);
    // There is room for the small ones, which do not overtake.
    for task in [&mut large, &mut small, &mut dropped, &mut last] {
        assert!(task.poll().is_pending());
    }
    let refused = problem(device.try_reserve(KIB));
    assert_eq!(refused, ReservationProblem::NotNow { free_bytes: 512 * KIB, waiting: 4 });
    drop(dropped);
    drop(large);
    let small = small.finish()?;
    let last = last.finish()?;
    assert_eq!(device.memory()?.budgeted_bytes, 514 * KIB);
    drop((small, last, all));
    assert_eq!(device.memory()?.budgeted_bytes, 0);
    Ok(())
}

/// Each waits for a buffer that another one drops.
#[tokio::test]
async fn drops_of_buffers_are_heard() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let stream = device.stream()?;
    for _ in 0..50 {
        let held = zeros(&stream, 700 * KIB)?;
        let waiting = device.clone();
        let waiting = tokio::spawn(async move { waiting.reserve(800 * KIB).await });
        tokio::task::yield_now().await;
        drop(held);
        soon(waiting).await.expect("no panic")?;
    }
    Ok(())
}

#[test]
fn a_holder_waits_for_no_other() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let outcome = block_on(async {
        let first = device.reserve(256 * KIB).await?;
        let held = problem(device.reserve(1).await);
        assert!(
            matches!(held, ReservationProblem::Held { held_bytes, .. } if held_bytes == 256 * KIB)
        );
        // It is the waker that tells tasks apart.
        let mut other = Task::new(device.reserve(MIB));
        assert!(other.poll().is_pending());
        let nested = first.nested(512 * KIB)?;
        let refused = problem(nested.nested(MIB / 2));
        assert_eq!(refused, ReservationProblem::NotNow { free_bytes: 256 * KIB, waiting: 1 });
        drop(other);
        let first = first.hand_over();
        let second = device.reserve(1).await?;
        // Nothing that another one could wait for.
        second.shrink(0);
        let none = device.reserve(0).await?;
        let third = device.reserve(1).await?;
        drop((second, none, third));
        drop(first);
        device.reserve(512 * KIB).await
    });
    outcome.map(drop)
}

#[test]
fn a_limit_of_time_ends_the_wait() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let all = device.try_reserve(MIB)?;
    let mut ahead = Task::new(device.reserve(1));
    assert!(ahead.poll().is_pending());
    let late = Task::new(device.reserve(1).within(Duration::from_millis(20))).finish();
    assert_eq!(late.as_ref().unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(
        problem(late),
        ReservationProblem::TooLate {
            limit_ms: 20,
            ahead: 1,
            free_bytes: 0,
            allocated_bytes: 0,
            budgeted_bytes: MIB
        }
    );
    drop(all);
    ahead.finish()?;
    let most = problem(Task::new(device.reserve(MIB + 1)).finish());
    assert_eq!(most, ReservationProblem::TooMuch { most_bytes: MIB });
    assert_eq!(problem(device.try_reserve(MIB + 1)), most);
    Ok(())
}

/// Nobody polls it when its time is over: the next one has its turn.
#[test]
fn a_late_one_leaves_by_itself() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let half = device.try_reserve(512 * KIB)?;
    let mut large = Task::new(device.reserve(MIB).within(Duration::from_millis(50)));
    let mut behind = Task::new(device.reserve(MIB).within(Duration::from_millis(60)));
    let mut small = Task::new(device.reserve(KIB));
    for task in [&mut large, &mut behind, &mut small] {
        assert!(task.poll().is_pending());
    }
    small.finish()?;
    eventually("both are woken", || large.woken() > 0 && behind.woken() > 0);
    drop(half);
    // There is room by now, and a limit is a limit.
    for (task, limit) in [(large, 50), (behind, 60)] {
        let late = problem(task.finish());
        let ReservationProblem::TooLate { limit_ms, ahead: 0, free_bytes: MIB, .. } = late else {
            panic!("{late}")
        };
        assert_eq!(limit_ms, limit);
    }
    Ok(())
}

#[test]
fn waiters_hear_of_the_end() -> Result<()> {
    let _turn = testing::device();
    for is_lost in [true, false] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let total = device.memory()?.total_bytes;
        let all = device.try_reserve(device.memory()?.free_bytes)?;
        let mut tasks: Vec<Task> =
            (0..3).map(|_| Task::new(device.reserve(total / 2).within(Duration::MAX))).collect();
        tasks.iter_mut().for_each(|task| assert!(task.poll().is_pending()));
        if is_lost {
            handle.lose_device("a test");
        } else {
            block_on(device.close(Duration::from_secs(10)))?;
        }
        // The last first: it does not wait for those in front of it.
        for task in tasks.into_iter().rev() {
            let error = task.finish().unwrap_err();
            let kind = if is_lost { ErrorKind::DeviceLost } else { ErrorKind::Closed };
            assert_eq!(error.kind(), kind, "{error}");
        }
        drop(all);
    }
    Ok(())
}

// ---- how it ends --------------------------------------------------------------------------------

#[tokio::test]
async fn bytes_of_a_dropped_reservation() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let stream = device.stream()?;
    let reservation = device.reserve(MIB).await?;
    let mine = reservation.stream(&stream)?;
    let held = zeros(&mine, 256 * KIB)?;
    drop(reservation);
    assert_eq!(device.memory()?.budgeted_bytes, 0);
    let next = device.try_reserve(768 * KIB)?;
    let refused = problem(next.nested(KIB));
    assert_eq!(refused, ReservationProblem::NotNow { free_bytes: 0, waiting: 0 });
    // Its handle makes nothing any more, whoever has its number.
    let gone = zeros(&mine, 512).unwrap_err();
    assert!(gone.to_string().contains("it is dropped, or shrunk to nothing"), "{gone}");
    assert_eq!(spent(problem::<()>(Err(gone))), (0, 0));
    let waiting = next.hand_over();
    let mut last = Task::new(device.reserve(256 * KIB));
    assert!(last.poll().is_pending());
    drop(held);
    let last = last.finish()?;
    assert_eq!(device.memory()?.budgeted_bytes, MIB);
    drop((last, waiting));
    assert_eq!(device.memory()?.budgeted_bytes, 0);
    Ok(())
}

/// A smaller one keeps its buffers; the rest follows as they go.
#[tokio::test]
async fn it_shrinks_below_what_it_holds() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let reservation = device.reserve(MIB).await?;
    let mine = reservation.stream(&device.stream()?)?;
    let (a, b) = (zeros(&mine, 512 * KIB)?, zeros(&mine, 256 * KIB)?);
    reservation.shrink(600 * KIB);
    assert_eq!((reservation.size_bytes(), reservation.left_bytes()), (600 * KIB, 0));
    drop(a);
    assert_eq!(reservation.left_bytes(), 344 * KIB);
    reservation.shrink(u64::MAX);
    drop(b);
    assert_eq!(reservation.left_bytes(), 600 * KIB);
    device.try_reserve(424 * KIB)?;
    Ok(())
}

// ---- who waits beside one -----------------------------------------------------------------------

/// It waits for the reservation, with what it made, and for nothing that stays behind it.
#[test]
fn reclaimed_waits_for_reservations() -> Result<()> {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (device, _turn) = limited(10 * MIB, pressure);
        let (stream, other) = (device.stream()?, device.stream()?);
        let reservation = device.try_reserve(4 * MIB)?;
        let made = zeros(&reservation.stream(&other)?, MIB)?;
        // A stream keeps them: memory that others would get, if the reservation did not come first.
        let kept = (0..5).map(|_| zeros(&other, MIB)).collect::<Result<Vec<_>>>()?;
        other.synchronize()?;
        drop(kept);
        let error = zeros(&stream, 7 * MIB).unwrap_err();
        assert_eq!(advice(&error), MemoryAdvice::Reclaim, "{pressure:?}");
        let woken = Arc::<Woken>::default();
        let waker = Waker::from(woken.clone());
        let mut polled = Context::from_waker(&waker);
        let mut waiting = Box::pin(stream.reclaimed(7 * MIB));
        assert!(waiting.as_mut().poll(&mut polled).is_pending(), "{pressure:?}");
        drop(made);
        drop(reservation);
        let resolved = || waiting.as_mut().poll(&mut polled).is_ready();
        eventually("it is woken", || woken.0.load(Ordering::SeqCst) > 0);
        eventually("it resolves", resolved);
        zeros(&stream, 7 * MIB)?;
        // What stays is no reservation's any more.
        let reservation = block_on(device.reserve(4 * MIB))?;
        let made = zeros(&reservation.stream(&other)?, 4 * MIB)?;
        drop(reservation);
        let error = block_on(stream.reclaimed(7 * MIB)).unwrap_err();
        assert_eq!(advice(&error), MemoryAdvice::DropBuffers, "{pressure:?}");
        drop(made);
    }
    Ok(())
}

/// The loop in its docs ends, also where the stream draws.
#[test]
fn reclaimed_of_what_is_spent() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let reservation = device.try_reserve(512 * KIB)?;
    let mine = reservation.stream(&device.stream()?)?;
    let all = (512 * KIB, 512 * KIB);
    assert_eq!(spent(problem(zeros(&mine, 600 * KIB))), all);
    assert_eq!(spent(problem(block_on(mine.reclaimed(600 * KIB)))), all);
    block_on(mine.reclaimed(512 * KIB))
}

fn advice(error: &gpu_await::Error) -> MemoryAdvice {
    match error.detail() {
        ErrorDetail::OutOfMemory { advice, .. } => *advice,
        other => panic!("{other}"),
    }
}

// ---- what is seen from outside ------------------------------------------------------------------

#[test]
fn who_waits_is_in_the_figures() -> Result<()> {
    let (device, _turn) = limited(MIB, Pressure::Wait);
    let waiting = |device: &Device| -> Result<_> {
        let info = device.memory()?;
        Ok((
            info.reservations_waiting,
            info.reservations_waiting_bytes,
            info.reservations_waiting_for,
        ))
    };
    assert_eq!(waiting(&device)?, (0, 0, Duration::ZERO));
    let all = device.try_reserve(MIB)?;
    let mut tasks = [300 * KIB, 200 * KIB].map(|bytes| Task::new(device.reserve(bytes)));
    assert!(tasks.iter_mut().all(|task| task.poll().is_pending()));
    let (count, bytes, age) = waiting(&device)?;
    assert_eq!((count, bytes), (2, 500 * KIB));
    assert!(age > Duration::ZERO && age < SOON);
    let lines = [format!("{all:?}"), format!("{:?}", tasks[0].reserve)];
    assert!(
        lines.iter().all(|line| line.contains("at tests/memory/reservations.rs:")),
        "{lines:?}"
    );
    let [first, second] = tasks;
    drop(second);
    assert_eq!(waiting(&device)?.0, 1);
    drop(all);
    first.finish()?;
    assert_eq!(waiting(&device)?, (0, 0, Duration::ZERO));
    Ok(())
}

/// The sums in the docs of `MemoryInfo`.
#[test]
fn figures_beside_reservations_add_up() -> Result<()> {
    const LIMIT: u64 = 10 * MIB;
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (device, _turn) = limited(LIMIT, pressure);
        let stream = device.stream()?;
        let adds_up = |what: &str| -> Result<()> {
            let info = device.memory()?;
            let back = info.pending_bytes + info.kept_bytes;
            let promised = match pressure {
                Pressure::Wait => back.max(info.budgeted_bytes),
                _ => back + info.budgeted_bytes,
            };
            let held = info.allocated_bytes + info.leaked_bytes + info.shared_bytes;
            assert_eq!(info.free_bytes + held + promised, LIMIT, "{pressure:?}, {what}: {info:?}");
            Ok(())
        };
        let reservation = device.try_reserve(4 * MIB)?;
        adds_up("reserved")?;
        let mine = reservation.stream(&stream)?;
        let drawn = zeros(&mine, MIB)?;
        adds_up("drawn")?;
        drop(drawn);
        stream.synchronize()?;
        adds_up("kept")?;
        let beside = (0..5).map(|_| zeros(&stream, MIB)).collect::<Result<Vec<_>>>()?;
        adds_up("beside")?;
        drop(beside);
        stream.synchronize()?;
        adds_up("more kept than reserved")?;
        drop(reservation);
        adds_up("dropped")?;
    }
    Ok(())
}
