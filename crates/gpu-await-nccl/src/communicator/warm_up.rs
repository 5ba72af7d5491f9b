//! Collectives that connect the ranks of a new communicator, so that a program's first ones do not wait for that: NCCL connects
//! what an algorithm needs when it is first used, and chooses algorithms by size.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;

use super::Communicator;
use super::parts::RankOf;
use super::shared::{Draft, OfParts, Shared};
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
    let drafts = memory.iter_mut().enumerate().map(|(at, memory)| {
        let draft = RefCell::default();
        call(&RankOf { shared, at, draft: &draft, is_alone: false }, memory)?;
        Ok(draft.into_inner())
    });
    let drafts: OfParts<Draft<'_>> = drafts.collect::<gpu_await::Result<_>>()?;
    Ok(shared.run_out_of_order("connect", drafts).synchronize()?)
}
