//! Collectives that connect the ranks of a new communicator, so that a program's first ones do not wait for that: NCCL connects
//! what an algorithm needs when it is first used, and chooses algorithms by size.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;

use super::Communicator;
use super::parts::RankOf;
use super::shared::{OfParts, PendingCalls, Shared};
use crate::element::Reduction;
use crate::error::Result;
use crate::transport::LocalRank;

/// In elements of four bytes; the last is where NCCL's algorithms for large messages begin.
const SIZES: [usize; 3] = [1, 16 << 10, 1 << 20];

/// Blocks until they are complete. With `pairs`, every two ranks are connected as well.
pub(super) fn connect_all(comm: &Communicator, pairs: bool) -> Result<()> {
    let shared = comm.shared();
    for len in SIZES {
        let zeros = |local: &LocalRank| local.stream.zeros::<f32>(len).queued();
        let mut memory: Vec<_> = shared.ranks.iter().map(zeros).collect::<Result<_, _>>()?;
        run(shared, &mut memory, |rank, x| rank.all_reduce_in_place(x, Reduction::Sum))?;
    }
    let small = |local: &LocalRank| {
        let shares = local.stream.zeros::<f32>(shared.world).queued()?;
        Ok((local.stream.zeros::<f32>(1).queued()?, shares))
    };
    let mut memory: Vec<_> =
        shared.ranks.iter().map(small).collect::<Result<_, gpu_await::Error>>()?;
    run(shared, &mut memory, |rank, (_, shares)| rank.all_gather_in_place(shares))?;
    run(shared, &mut memory, |rank, (x, _)| rank.broadcast_in_place(x, 0))?;
    run(shared, &mut memory, |rank, (_, shares)| {
        rank.reduce_scatter_in_place(shares, Reduction::Sum)
    })?;
    if !pairs {
        return Ok(());
    }
    let other = |(local, (_, shares)): (&LocalRank, _)| {
        Ok((shares, local.stream.zeros::<f32>(shared.world).queued()?))
    };
    let mut memory: Vec<_> =
        shared.ranks.iter().zip(memory).map(other).collect::<Result<_, gpu_await::Error>>()?;
    run(shared, &mut memory, |rank, (x, y)| rank.all_to_all(x, y))
}

/// A call of each rank.
fn run<'a, M>(
    shared: &Arc<Shared>,
    memory: &'a mut [M],
    call: impl Fn(&RankOf<'_, 'a>, &'a mut M) -> gpu_await::Result<()>,
) -> Result<()> {
    let pending = memory.iter_mut().enumerate().map(|(at, memory)| {
        let pending = RefCell::default();
        call(&RankOf { shared, at, pending: &pending, is_alone: false }, memory)?;
        Ok(pending.into_inner())
    });
    let pending: OfParts<PendingCalls<'_>> = pending.collect::<gpu_await::Result<_>>()?;
    Ok(shared.run_out_of_order("connect", pending).synchronize()?)
}
