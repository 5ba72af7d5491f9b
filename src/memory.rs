//! Device memory, views of it, and pinned host memory.
//!
//! | type | what it is |
//! |---|---|
//! | [`DeviceBuffer`](buffer::DeviceBuffer) | `len` elements in a device's memory, freed in stream order |
//! | [`View`](view::View), [`ViewMut`](view::ViewMut) | a borrowed range of a buffer |
//! | [`View2`](view_2d::View2), [`ViewMut2`](view_2d::ViewMut2) | borrowed rows of a buffer |
//! | [`Chunks`](chunks::Chunks), [`ChunksMut`](chunks::ChunksMut) | iterators over ranges of equal length |
//! | [`Frozen`](frozen::Frozen) | a read-only buffer, shared by readers |
//! | `SharedMemory` | memory with a descriptor, mapped |
//! | `AddressRange` | reserved addresses, backed by memory step by step |
//! | [`PinnedBuffer`](pinned::PinnedBuffer) | host memory that the device copies at full speed |
//! | [`Mapped`](mapped::Mapped) | pinned memory that kernels use in place |
//! | [`DeviceSlab`](slab::DeviceSlab), [`HostSlab`](host_slab::HostSlab) | device memory or pinned memory in blocks, tracked by block |
//! | [`Room`](pageable::Room) | a `Vec` that several threads fill |
//! | [`PinnedFlag`](pinned::PinnedFlag) | a word that the host and a running kernel share |

pub(crate) mod accesses;
pub(crate) mod allocation;
pub(crate) mod beside_pool;
pub(crate) mod buffer;
pub(crate) mod chunks;
pub(crate) mod copy_2d;
pub(crate) mod frozen;
pub(crate) mod grouped;
pub(crate) mod host_slab;
pub(crate) mod mapped;
pub(crate) mod pageable;
pub(crate) mod pinned;
pub(crate) mod pinned_pool;
pub(crate) mod range;
pub(crate) mod raw_slice;
pub(crate) mod reclaim;
#[cfg(target_os = "linux")]
pub(crate) mod shared_memory;
pub(crate) mod slab;
pub(crate) mod untracked;
pub(crate) mod view;
pub(crate) mod view_2d;

use std::sync::Arc;
use std::time::Duration;

use self::reclaim::claim::Backoff;
use self::reclaim::prospect::{Outlook, Prospect};
use crate::backend::PoolInfo;
use crate::error::advice::MemoryAdvice;
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;
use crate::thread::role;
use gpu_await_protocol::account::Figures;

/// A device's memory, in bytes; a snapshot.
///
/// Each byte is counted in one of six figures, which mean the same in [`Stats`](crate::Stats) and in
/// [`OutOfMemory`](crate::ErrorDetail::OutOfMemory). Under a limit they add up to it, or to less if others use the device as well. The unused part of
/// [reservations](crate::Device::reserve) is not free, and in none of the six. With them, the limit is the sum of free, allocated, leaked and shared
/// bytes and, under [`Pressure::Wait`](crate::Pressure), the larger of two: pending plus kept bytes, or budgeted bytes. Under
/// [`Pressure::Fail`](crate::Pressure) all three are added, but freed memory of a reservation counts twice until it is returned.
///
/// | figure | memory | available to |
/// |---|---|---|
/// | free | unused, within the limit | any stream, at once |
/// | allocated | held by buffers | no allocation |
/// | pending | freed, and waiting for device work | the stream that freed it, at once; others behind that work |
/// | kept | freed, and cached by a stream | that stream, at once; others too once its last use is complete, and before that behind it |
/// | leaked | never freed | no allocation |
/// | shared | made for [several processes](crate::guide::memory#memory-that-several-processes-share), and mapped here | no allocation |
///
/// [`Pressure`](crate::Pressure) decides whether an allocation may take memory that is behind other work.
///
/// The limit bounds the sum of allocated, pending, kept, leaked and shared bytes. It does not bound `reserved_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Memory that any stream can allocate at once: the rest of the limit, or of the device if that is less, without allocated,
    /// pending, kept, leaked and shared memory.
    pub free_bytes: u64,
    /// All memory of the device.
    pub total_bytes: u64,
    /// Memory held by buffers, in whole blocks; for [growable](crate::GrowableBuffer) ones, the committed memory.
    pub allocated_bytes: u64,
    /// Freed memory that waits for device work: other streams still use it, or its free is on a stream. It becomes free by itself.
    pub pending_bytes: u64,
    /// Freed memory that streams cache for their next allocations, whether its last use is complete or not. An allocation
    /// that does not fit without it takes it, if its last use is complete or [`Pressure`](crate::Pressure) lets it wait.
    pub kept_bytes: u64,
    /// Memory that is never freed, see [`Stats`](crate::Stats::leaked_bytes).
    pub leaked_bytes: u64,
    /// Memory made here for other processes as well, until its last buffer here is dropped and every use is complete.
    pub shared_bytes: u64,
    /// Memory of other processes that is mapped here. Its maker counts it; the limit here and the other figures do not.
    pub imported_bytes: u64,
    /// The unused part of [reservations](crate::Device::reserve), for their allocations only. Under [`Pressure::Wait`](crate::Pressure) these
    /// take pending and kept memory as well, so both figures may count the same bytes. `free_bytes` excludes it.
    pub budgeted_bytes: u64,
    /// How many [reservations](crate::Device::reserve) are waiting to be granted.
    pub reservations_waiting: u64,
    /// How many bytes they request.
    pub reservations_waiting_bytes: u64,
    /// How long the first of them has been waiting; zero if none is.
    pub reservations_waiting_for: Duration,
    /// By how much free memory shrank when the driver made the device's [partitions](crate::Partition), some 4 MiB for each set of
    /// multiprocessors: neither allocated nor counted in the limit. It includes anything that others allocated at that moment.
    pub partitions_bytes: u64,
    /// Allocated and pending memory.
    pub used_bytes: u64,
    /// The most that `used_bytes` ever was.
    pub used_peak_bytes: u64,
    /// Memory that the pool has reserved, in use or not, by the driver's count.
    ///
    /// It may exceed the limit: a GPU's driver reserves chunks of 32 MiB or a multiple of that, a new one if free memory
    /// is too fragmented, and returns only empty chunks, on [`Device::trim`](crate::Device::trim) or when an allocation
    /// would fail otherwise.
    pub reserved_bytes: u64,
    /// The most that `reserved_bytes` ever was.
    pub reserved_peak_bytes: u64,
    /// The limit set with [`DeviceBuilder::memory_limit_bytes`](crate::DeviceBuilder::memory_limit_bytes).
    pub limit_bytes: Option<u64>,
}

impl MemoryInfo {
    pub(crate) fn of(engine: &Engine) -> Result<MemoryInfo> {
        if let Some(lost) = engine.state.lost() {
            return Err(lost.clone());
        }
        // Completed work that nothing waits for may have freed memory.
        engine.registry.streams().iter().for_each(|stream| stream.ask_after_all());
        let reach = Reach::of(engine)?;
        engine.collect_freed();
        let (figures, room, [waiting, waiting_bytes], since) = {
            let account = engine.memory.account.lock();
            let queue = &account.reservations;
            let waiting = [queue.waiting() as u64, queue.waiting_bytes()];
            (account.figures(), account.room(None), waiting, queue.waiting_since())
        };
        let waiting_ns = since.map_or(0, |since| engine.pacing.now().saturating_sub(since));
        Ok(MemoryInfo {
            free_bytes: reach.free_bytes(&figures, room),
            total_bytes: reach.total,
            allocated_bytes: figures.of_buffers(),
            pending_bytes: figures.pending,
            kept_bytes: figures.kept,
            leaked_bytes: figures.leaked,
            shared_bytes: figures.shared,
            imported_bytes: figures.imported,
            budgeted_bytes: figures.budgeted,
            reservations_waiting: waiting,
            reservations_waiting_bytes: waiting_bytes,
            reservations_waiting_for: Duration::from_nanos(waiting_ns),
            partitions_bytes: engine.shares.partitions.bytes(),
            used_bytes: figures.of_buffers() + figures.pending,
            used_peak_bytes: figures.used_peak,
            reserved_bytes: reach.pool.reserved,
            reserved_peak_bytes: reach.pool.reserved_peak,
            limit_bytes: reach.limit,
        })
    }

    /// The out-of-memory error for `op` on `stream`.
    pub(crate) fn out_of_memory(
        stream: &Arc<StreamState>,
        op: Arc<str>,
        asked_bytes: u64,
        budget: Option<usize>,
    ) -> Error {
        let engine = &stream.engine;
        let reach = match Reach::of(engine) {
            Ok(reach) => reach,
            Err(error) => return error,
        };
        let outlook = engine.outlook(stream, asked_bytes, reach.bytes(), budget);
        reach.refusal(engine, op, asked_bytes, &outlook)
    }
}

/// The driver's figures, consistent at one moment.
pub(crate) struct Reach {
    free: u64,
    total: u64,
    pool: PoolInfo,
    limit: Option<u64>,
}

impl Reach {
    /// Queries until two readings agree: memory that moves between the device's free memory and the pool
    /// during a reading would be counted twice, or not at all.
    pub(crate) fn of(engine: &Engine) -> Result<Reach> {
        role::check_driver("asking how much memory there is")?;
        let refused = |code| engine.refused(code);
        let mut backoff = Backoff::default();
        let mut before = engine.backend.pool_info().map_err(refused)?;
        loop {
            let (free, total) = engine.backend.memory_info().map_err(refused)?;
            let pool = engine.backend.pool_info().map_err(refused)?;
            if pool.reserved == before.reserved || !backoff.pause() {
                return Ok(Reach { free, total, pool, limit: engine.options.memory_limit });
            }
            before = pool;
        }
    }

    /// All memory that the device can give, including what it has given, regardless of the limit.
    pub(crate) fn bytes(&self) -> u64 {
        self.free + self.pool.reserved
    }

    /// [`bytes`](Self::bytes) plus the memory outside the pool.
    pub(crate) fn bytes_beside(&self, engine: &Engine) -> u64 {
        let Figures { shared, committed, .. } = engine.memory.account.lock().figures();
        self.bytes() + shared + committed
    }

    /// All memory of the device.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// How much more it can give, within the limit.
    fn free_bytes(&self, figures: &Figures, room: u64) -> u64 {
        self.bytes().saturating_sub(figures.held()).min(room)
    }

    /// The error for an allocation with that outlook.
    pub(crate) fn refusal(
        &self,
        engine: &Engine,
        op: Arc<str>,
        asked_bytes: u64,
        outlook: &Outlook,
    ) -> Error {
        let Outlook { prospect, figures, room, kept_in_use, driver_refused } = outlook;
        ErrorDetail::OutOfMemory {
            op,
            device: engine.label().to_owned(),
            asked_bytes,
            advice: match prospect {
                Prospect::Fits => MemoryAdvice::TryAgain,
                Prospect::Later(_) => MemoryAdvice::Reclaim,
                Prospect::Never if engine.memory.loans.open() > 0 => MemoryAdvice::EndLoans,
                Prospect::Never => MemoryAdvice::DropBuffers,
            },
            driver_refused: *driver_refused,
            reclaimable_bytes: figures.pending + kept_in_use,
            allocated_bytes: figures.of_buffers(),
            pending_bytes: figures.pending,
            kept_bytes: figures.kept,
            leaked_bytes: figures.leaked,
            shared_bytes: figures.shared,
            budgeted_bytes: figures.budgeted,
            free_bytes: self.free_bytes(figures, *room),
            total_bytes: self.total,
            limit_bytes: self.limit,
        }
        .into()
    }
}

/// An element of a buffer: plain data for which any bit pattern is valid.
///
/// Implemented for every [`bytemuck::Pod`] type that may cross threads: all integers, `f16`,
/// `bf16`, `f32`, `f64`, arrays of them, and your own `#[repr(C)]` types with
/// `#[derive(bytemuck::Pod, bytemuck::Zeroable)]`.
///
/// A buffer of a zero-sized type, or of one aligned to more than 256 bytes (in pinned memory: 128), does not
/// compile.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not plain data that device memory or a kernel can hold",
    label = "not `bytemuck::Pod`",
    note = "integers, `f16`, `bf16`, `f32`, `f64` and arrays of them are; of a `bool` or a `char` not every bit pattern is one: \
            pass a `u8` or a `u32`",
    note = "a `#[repr(C)]` struct of them is with `#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]`"
)]
pub trait Element: bytemuck::Pod + Send + Sync {}

#[diagnostic::do_not_recommend]
impl<T: bytemuck::Pod + Send + Sync> Element for T {}

/// Rejects, at compile time, a type that memory of this alignment cannot hold, and a zero-sized type, for
/// which lengths are meaningless.
pub(crate) const fn must_fit<T>(alignment: u64) {
    assert!(size_of::<T>() > 0, "the element type has no size");
    assert!(align_of::<T>() as u64 <= alignment, "the element type is aligned too strictly");
}

/// A number type, which has a one: all integers, `f16`, `bf16`, `f32`, `f64`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a number that memory can be filled with ones of",
    label = "not a number",
    note = "integers, `f16`, `bf16`, `f32` and `f64` are; for other types say `full(len, value)`"
)]
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
