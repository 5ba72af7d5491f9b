//! Device memory, views of it, and pinned host memory.
//!
//! | type | what it is |
//! |---|---|
//! | [`DeviceBuffer`](buffer::DeviceBuffer) | `len` elements in a device's memory, freed in stream order |
//! | [`View`](buffer::View), [`ViewMut`](buffer::ViewMut) | a borrowed range of one |
//! | [`Frozen`](frozen::Frozen) | a buffer that nobody writes any more, shared by readers |
//! | [`PinnedBuffer`](pinned::PinnedBuffer) | host memory that the device copies at full speed |
//! | [`Room`](pageable::Room) | a `Vec` that several threads fill |
//! | [`PinnedFlag`](pinned::PinnedFlag) | a word that the host and a running kernel share |

pub(crate) mod allocation;
mod buddy;
pub(crate) mod buffer;
pub(crate) mod copy_2d;
pub(crate) mod frozen;
pub(crate) mod pageable;
pub(crate) mod pinned;
pub(crate) mod pinned_pool;
pub(crate) mod untracked;

use std::sync::Arc;

use crate::backend::PoolInfo;
use crate::completion::account::block;
use crate::completion::claim::Backoff;
use crate::completion::engine::Engine;
use crate::completion::lane::Lane;
use crate::completion::prospect::Prospect;
use crate::error::advice::MemoryAdvice;
use crate::error::{Error, ErrorDetail, Result};
use crate::thread_role;

/// A device's memory, in bytes; a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// What an allocation finds without taking over what is pending, in pieces: what the device has
    /// left, what its pool holds unused and what streams keep, within the limit.
    pub free_bytes: u64,
    /// What there is in all.
    pub total_bytes: u64,
    /// What buffers hold, in whole blocks.
    pub allocated_bytes: u64,
    /// What was given up and waits for device work: other streams use it, or its free is on a stream.
    /// It is not in `free_bytes`, and comes free without a buffer being dropped.
    pub pending_bytes: u64,
    /// What streams keep of what was given up, for their next allocations. It is in `free_bytes`.
    pub kept_bytes: u64,
    /// What the driver refused to free: lost for the life of the process.
    pub leaked_bytes: u64,
    /// What is allocated or pending.
    pub used_bytes: u64,
    /// The most that `used_bytes` ever was.
    pub used_peak_bytes: u64,
    /// What the device's pool took from it, in use or not, as the driver counts: it takes more at a
    /// time than it is asked for.
    pub reserved_bytes: u64,
    /// The most that `reserved_bytes` ever was.
    pub reserved_peak_bytes: u64,
    /// What [`DeviceBuilder::memory_limit_bytes`](crate::DeviceBuilder::memory_limit_bytes) said.
    pub limit_bytes: Option<u64>,
}

impl MemoryInfo {
    pub(crate) fn of(engine: &Engine) -> Result<MemoryInfo> {
        thread_role::check_driver("asking how much memory there is")?;
        engine.collect_freed();
        let (left, total_bytes, pool) = driver_figures(engine)?;
        let (figures, room) = {
            let account = engine.account.lock();
            (account.figures(), account.room())
        };
        let left = left + pool.reserved.saturating_sub(figures.held());
        Ok(MemoryInfo {
            free_bytes: left.min(room) + figures.kept,
            total_bytes,
            allocated_bytes: figures.allocated,
            pending_bytes: figures.pending,
            kept_bytes: figures.kept,
            leaked_bytes: figures.leaked,
            used_bytes: figures.allocated + figures.pending,
            used_peak_bytes: figures.used_peak,
            reserved_bytes: pool.reserved,
            reserved_peak_bytes: pool.reserved_peak,
            limit_bytes: engine.options.memory_limit,
        })
    }

    /// The error of an allocation on `lane` that cannot be had.
    pub(crate) fn out_of_memory(lane: &Arc<Lane>, asked_bytes: u64) -> Error {
        let engine = lane.engine();
        let seen = MemoryInfo::within_reach(engine)
            .map(|within_reach| engine.prospect(lane, asked_bytes, within_reach))
            .and_then(|prospect| Ok((prospect, MemoryInfo::of(engine)?)));
        let (prospect, info) = match seen {
            Ok(seen) => seen,
            Err(error) => return error,
        };
        ErrorDetail::OutOfMemory {
            asked_bytes,
            advice: match prospect {
                Prospect::Fits => MemoryAdvice::TryAgain,
                Prospect::Later(_) => MemoryAdvice::Reclaim,
                Prospect::Never => MemoryAdvice::DropBuffers,
            },
            driver_refused: engine.account.lock().is_refused(block(asked_bytes)),
            reclaimable_bytes: info.pending_bytes,
            allocated_bytes: info.allocated_bytes,
            pending_bytes: info.pending_bytes,
            kept_bytes: info.kept_bytes,
            free_bytes: info.free_bytes,
            total_bytes: info.total_bytes,
            limit_bytes: info.limit_bytes,
        }
        .into()
    }

    /// What the device can give in all, with what it gave already, whatever the limit is.
    pub(crate) fn within_reach(engine: &Engine) -> Result<u64> {
        thread_role::check_driver("asking how much memory there is")?;
        let (left, _, pool) = driver_figures(engine)?;
        Ok(left + pool.reserved)
    }
}

/// Bytes that are free, bytes in all, and what the pool has, of one moment: what goes from one to the
/// other while both are asked would be seen twice, or nowhere.
fn driver_figures(engine: &Engine) -> Result<(u64, u64, PoolInfo)> {
    let refused = |code| engine.refused(code);
    let mut backoff = Backoff::default();
    let mut before = engine.backend.pool_info().map_err(refused)?;
    loop {
        let (left, total) = engine.backend.memory_info().map_err(refused)?;
        let pool = engine.backend.pool_info().map_err(refused)?;
        if pool.reserved == before.reserved || !backoff.pause() {
            return Ok((left, total, pool));
        }
        before = pool;
    }
}

/// What a buffer can hold: plain data that any bit pattern is valid for.
///
/// Implemented for every [`bytemuck::Pod`] type that may cross threads: all integers, `f16`,
/// `bf16`, `f32`, `f64`, arrays of them, and your own `#[repr(C)]` types with
/// `#[derive(bytemuck::Pod, bytemuck::Zeroable)]`.
///
/// A buffer of a type that has no size, or that is aligned to more than 256 bytes (in pinned memory:
/// 128), does not compile.
pub trait Element: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Element for T {}

/// Refuses, when the program is compiled, a type that memory of so much alignment cannot hold or that
/// has no size: its length would be anybody's guess.
pub(crate) const fn must_fit<T>(alignment: u64) {
    assert!(size_of::<T>() > 0, "the element type has no size");
    assert!(align_of::<T>() as u64 <= alignment, "the element type is aligned too strictly");
}

/// Numbers, which have a one: all integers, `f16`, `bf16`, `f32`, `f64`. Sealed.
pub trait Number: Element + sealed::Number {
    /// 1.
    const ONE: Self;
}

mod sealed {
    pub trait Number {}
}

macro_rules! numbers {
    ($($type:ty = $one:expr;)+) => {$(
        impl sealed::Number for $type {}
        impl Number for $type {
            const ONE: Self = $one;
        }
    )+};
}
numbers! {
    i8 = 1; i16 = 1; i32 = 1; i64 = 1; i128 = 1; isize = 1;
    u8 = 1; u16 = 1; u32 = 1; u64 = 1; u128 = 1; usize = 1;
    half::f16 = half::f16::ONE; half::bf16 = half::bf16::ONE; f32 = 1.0; f64 = 1.0;
}
