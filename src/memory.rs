//! Device memory, views of it, and pinned host memory.
//!
//! | type | what it is |
//! |---|---|
//! | [`DeviceBuffer`](buffer::DeviceBuffer) | `len` elements in a device's memory, freed in stream order |
//! | [`View`](buffer::View), [`ViewMut`](buffer::ViewMut) | a borrowed range of one |
//! | [`PinnedBuffer`](pinned::PinnedBuffer) | host memory that the device copies at full speed |
//! | [`PinnedFlag`](pinned::PinnedFlag) | a word that the host and a running kernel share |

pub(crate) mod allocation;
pub(crate) mod buffer;
pub(crate) mod pinned;

/// What a buffer can hold: plain data that any bit pattern is valid for.
///
/// Implemented for every [`bytemuck::Pod`] type that may cross threads: all integers, `f16`,
/// `bf16`, `f32`, `f64`, arrays of them, and your own `#[repr(C)]` types with
/// `#[derive(bytemuck::Pod, bytemuck::Zeroable)]`.
pub trait Element: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Element for T {}
