//! Collectives that connect the ranks of a new communicator, so that a program's first ones do not wait for that: NCCL connects
//! what an algorithm needs when it is first used, and chooses algorithms by size.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Communicator;
use super::parts::RankOf;
use super::shared::{OfParts, Part, Shared};
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
        let mut parts = OfParts::new();
        for (at, x) in memory.iter_mut().enumerate() {
            parts.push(rank(shared, at).all_reduce_in_place(x, Reduction::Sum)?);
        }
        run(shared, parts)?;
    }
    let small = |local: &LocalRank| {
        let shares = local.stream.zeros::<f32>(shared.world).queued()?;
        Ok((local.stream.zeros::<f32>(1).queued()?, shares))
    };
    let mut memory: Vec<_> =
        shared.ranks.iter().map(small).collect::<Result<_, gpu_await::Error>>()?;
    let mut parts = OfParts::new();
    for (at, (_, shares)) in memory.iter_mut().enumerate() {
        parts.push(rank(shared, at).all_gather_in_place(shares)?);
    }
    run(shared, parts)?;
    let mut parts = OfParts::new();
    for (at, (x, _)) in memory.iter_mut().enumerate() {
        parts.push(rank(shared, at).broadcast_in_place(x, 0)?);
    }
    run(shared, parts)?;
    let mut parts = OfParts::new();
    for (at, (_, shares)) in memory.iter_mut().enumerate() {
        parts.push(rank(shared, at).reduce_scatter_in_place(shares, Reduction::Sum)?);
    }
    run(shared, parts)?;
    if !pairs {
        return Ok(());
    }
    let zeros = |local: &LocalRank| local.stream.zeros::<f32>(shared.world).queued();
    let mut received: Vec<_> = shared.ranks.iter().map(zeros).collect::<Result<_, _>>()?;
    let mut parts = OfParts::new();
    for (at, ((_, shares), y)) in memory.iter().zip(&mut received).enumerate() {
        parts.push(rank(shared, at).all_to_all(shares, y)?);
    }
    run(shared, parts)
}

fn rank<'s, 'a>(shared: &'s Arc<Shared>, at: usize) -> RankOf<'s, 'a> {
    RankOf::new(shared, at, false)
}

fn run(shared: &Arc<Shared>, parts: OfParts<Part<'_>>) -> Result<()> {
    Ok(shared.run_out_of_order("connect", parts).synchronize()?)
}
