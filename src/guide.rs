//! The guide: one page per subject, each with programs that run as they stand.
//!
//! | page | about |
//! |---|---|
//! | [`streams`] | streams and futures in ten minutes |
//! | [`waiting`] | what to wait for, and what ready proves |
//! | [`memory`] | buffers, views, pinned memory; how work on the same memory is ordered |
//! | [`kernels`] | your own kernels, in CUDA C++ or PTX, with a twin for the CPU |
//! | [`libraries`] | calls, memory and streams of other libraries |
//! | [`graphs`] | many small kernels as one launch |
//! | [gpu-await-algorithms](https://docs.rs/gpu-await-algorithms), a crate | sums, scans, sorts, selections; formulas without a kernel |
//! | [gpu-await-libs](https://docs.rs/gpu-await-libs), a crate | matrix products by cuBLASLt, Fourier transforms by cuFFT |
//! | [`server`] | admission, batching, deadlines, shutting down |
//! | [`model`] | a transformer encoder behind HTTP, in five steps, with the figures of each |
//! | [`faults`] | what a fault ends, and a service that survives it |
#![cfg_attr(
    feature = "test-util",
    doc = "| [`testing`] | tests without a GPU; which operation faults; where the time goes |"
)]
//! | [`performance`] | figures, each with the command that prints it |
//! | [`limits`] | two traps, what is not guaranteed, limits of the driver |
//! | [`coming_from`] | `spawn_blocking`, cudarc, candle, CuPy, Warp, CUDA C++ |
//!
//! The programs call `Device::from_env()`, which opens the first GPU, or the CPU if there is none.
#![forbid(unsafe_code)]

#[doc = include_str!("guide/streams.md")]
///
/// Reference: [`Device`](crate::Device), [`Stream`](crate::Stream), [`Op`](crate::Op),
/// [`Stream::scope`](crate::Stream::scope).
pub mod streams {}

#[doc = include_str!("guide/waiting.md")]
///
/// Reference: [`Op`](crate::Op), [`Event`](crate::Event), [`Stream::wait`](crate::Stream::wait),
/// [`join_all`](crate::join_all), [`Device::done`](crate::Device::done),
/// [`Stream::timed`](crate::Stream::timed), [`ErrorKind`](crate::ErrorKind).
pub mod waiting {}

#[doc = include_str!("guide/memory.md")]
///
/// Reference: [`DeviceBuffer`](crate::DeviceBuffer), [`View`](crate::View), [`ViewMut`](crate::ViewMut),
/// [`Frozen`](crate::Frozen), [`PinnedBuffer`](crate::PinnedBuffer), [`Mapped`](crate::Mapped),
/// [`PinnedFlag`](crate::PinnedFlag), [`Stream::upload_staged`](crate::Stream::upload_staged),
/// [`DeviceBuilder`](crate::DeviceBuilder), [`Device::reclaimed`](crate::Device::reclaimed).
pub mod memory {}

#[doc = include_str!("guide/kernels.md")]
///
/// Reference: [`kernel!`](crate::kernel!), [`LaunchConfig`](crate::LaunchConfig), [`Kernel`](crate::Kernel),
/// [`Module`](crate::Module), [`CudaSource`](crate::CudaSource), [`Occupancy`](crate::Occupancy).
pub mod kernels {}

#[doc = include_str!("guide/libraries.md")]
///
/// Reference: [`Stream::enqueue`](crate::Stream::enqueue), [`Uses`](crate::Uses),
/// [`RawQueue`](crate::RawQueue), [`Device::adopt_memory`](crate::Device::adopt_memory),
/// [`Stream::lend_memory`](crate::Stream::lend_memory), [`Stream::lend_raw`](crate::Stream::lend_raw),
/// [`DlpackTensor`](crate::DlpackTensor).
pub mod libraries {}

#[doc = include_str!("guide/graphs.md")]
///
/// Reference: [`Stream::batch`](crate::Stream::batch), [`Stream::replay`](crate::Stream::replay),
/// [`Region`](crate::Region), [`Graph`](crate::Graph), [`Queue`](crate::Queue).
pub mod graphs {}

#[doc = include_str!("guide/server.md")]
///
/// Reference: [`StreamPool`](crate::StreamPool), [`PoolShare`](crate::PoolShare),
/// [`Batcher`](crate::Batcher), [`PooledStream`](crate::PooledStream),
/// [`Device::close`](crate::Device::close).
pub mod server {}

#[doc = include_str!("guide/model.md")]
///
/// Reference: [`Batcher`](crate::Batcher), [`Graph`](crate::Graph), [`Partition`](crate::Partition), [`Mapped`](crate::Mapped).
pub mod model {}

#[doc = include_str!("guide/faults.md")]
///
/// Reference: [`Device::lost`](crate::Device::lost), [`LossCause`](crate::LossCause), [`Device::shared`](crate::Device::shared),
/// [`DeviceBuilder::verify`](crate::DeviceBuilder::verify).
pub mod faults {}

#[cfg(feature = "test-util")]
#[doc = include_str!("guide/testing.md")]
///
/// Reference: [`testing`](crate::testing), [`DeviceBuilder::verify`](crate::DeviceBuilder::verify),
/// [`Device::timeline`](crate::Device::timeline), [`Trace`](crate::Trace).
pub mod testing {}

#[doc = include_str!("guide/performance.md")]
///
/// Reference: [`Device::timeline`](crate::Device::timeline), [`Stream::timed`](crate::Stream::timed).
pub mod performance {}

#[doc = include_str!("guide/limits.md")]
///
/// Reference: [`Stream`](crate::Stream), [`Stream::throttle`](crate::Stream::throttle),
/// [`Device::pinned_async`](crate::Device::pinned_async).
pub mod limits {}

#[doc = include_str!("guide/coming_from.md")]
///
/// Reference: [`Stream`](crate::Stream), [`StreamPool`](crate::StreamPool), [`kernel!`](crate::kernel!),
/// [`Device::enable_peer`](crate::Device::enable_peer).
pub mod coming_from {}
