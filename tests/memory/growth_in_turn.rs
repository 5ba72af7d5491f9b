//! Memory that grows by a reservation: it waits its turn, and for memory that work still uses.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use futures::Future;
use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{ErrorDetail, MemoryAdvice, Pressure, ReservationProblem, Result};

use super::reservations::{MIB, Task, limited, soon, zeros};
use crate::under_test::eventually::eventually;

const STEP: u64 = 2 * MIB;

#[tokio::test]
async fn a_growth_waits_its_turn() -> Result<()> {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (device, _turn) = limited(8 * MIB, pressure);
        let mut cache = soon(device.growable::<u8>(64 << 20)).await?;
        soon(cache.grow(STEP as usize)).await?;
        let others = device.try_reserve(5 * MIB)?;
        let error = soon(cache.grow(4 * MIB as usize)).await.unwrap_err();
        let ErrorDetail::OutOfMemory { advice, .. } = error.detail() else { panic!("{error}") };
        assert_eq!(*advice, MemoryAdvice::Reserve);
        assert!(error.to_string().contains("Reservation::grow"), "{error}");
        assert!(error.at().is_some_and(|at| at.file().ends_with("growth_in_turn.rs")), "{error}");
        let mut turn = Task::new(device.reserve(STEP));
        assert!(turn.poll().is_pending());
        drop(others);
        let turn = turn.finish()?;
        soon(turn.grow(&mut cache, 3 * MIB as usize)).await?;
        assert_eq!((cache.len() as u64, cache.committed_bytes()), (3 * MIB, 4 * MIB));
        assert_eq!((turn.size_bytes(), turn.left_bytes()), (STEP, 0));
        // Nothing is missing, so nothing is drawn; then a step is, and there is none.
        soon(turn.grow(&mut cache, 4 * MIB as usize)).await?;
        let error = soon(turn.grow(&mut cache, 4 * MIB as usize + 1)).await.unwrap_err();
        let ErrorDetail::Reservation { problem, .. } = error.detail() else { panic!("{error}") };
        assert!(matches!(problem, ReservationProblem::Spent { left_bytes: 0, .. }), "{error}");
        assert_eq!(cache.committed_bytes(), 4 * MIB);
        // The last step is the reservation's, the first is nobody's.
        assert_eq!(soon(cache.shrink(0)).await?, 4 * MIB);
        assert_eq!(turn.left_bytes(), STEP);
        soon(turn.grow(&mut cache, STEP as usize)).await?;
        drop(turn);
        let info = device.memory()?;
        assert_eq!((info.allocated_bytes, info.budgeted_bytes), (STEP, 0));
        drop(cache);
        soon(device.reserve(8 * MIB)).await?;
    }
    Ok(())
}

/// Freed memory is promised to it before work has left that.
#[tokio::test]
async fn a_growth_waits_for_what_is_freed() -> Result<()> {
    let (device, _turn) = limited(4 * MIB, Pressure::Wait);
    let (busy, stream) = (device.stream()?, device.default_stream());
    for stream in [&busy, stream] {
        let mut cache = soon(device.growable::<u8>(64 << 20)).await?;
        let held = zeros(stream, 4 * MIB)?;
        let gate = Gate::close(stream)?;
        drop(held);
        let turn = soon(device.reserve(4 * MIB)).await?;
        {
            let mut growth = pin!(turn.grow(&mut cache, 4 * MIB as usize));
            let early = tokio::time::timeout(std::time::Duration::from_millis(150), &mut growth);
            assert!(early.await.is_err(), "work still uses it");
            gate.open();
            soon(growth).await?;
        }
        assert_eq!(turn.left_bytes(), 0);
        drop((cache, turn));
        // Its memory goes on another thread.
        eventually("it is free", || device.memory().is_ok_and(|info| info.allocated_bytes == 0));
    }
    Ok(())
}

#[test]
fn a_growth_is_of_its_device() -> Result<()> {
    let (device, _turn) = limited(4 * MIB, Pressure::Wait);
    let turn = device.try_reserve(STEP)?;
    let mut theirs = block_on(testing::peer_device().growable::<u8>(64 << 20))?;
    let mut growth = pin!(turn.grow(&mut theirs, 1));
    let Poll::Ready(Err(error)) = growth.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    else {
        panic!("it grows")
    };
    assert!(
        matches!(error.detail(), ErrorDetail::WrongDevice { what: "the buffer", .. }),
        "{error}"
    );
    Ok(())
}
