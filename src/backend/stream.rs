//! Driver calls for streams, other than those for memory and kernels.

use std::ffi::c_void;

use super::{
    DevicePtr, DriverResult, HostCallback, Query, RawEvent, RawStream, StreamInfo, StreamOptions,
};

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share.
pub(crate) trait StreamCalls {
    fn stream_create(&self, options: StreamOptions) -> DriverResult<RawStream>;
    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()>;
    unsafe fn stream_info(&self, stream: RawStream) -> DriverResult<StreamInfo>;
    unsafe fn stream_query(&self, stream: RawStream) -> DriverResult<Query>;
    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()>;
    unsafe fn write_word(&self, stream: RawStream, word: DevicePtr, value: u64)
    -> DriverResult<()>;
    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> DriverResult<()>;
    /// Runs another library's code that puts work on `stream`, with the device's context current and the thread's capture
    /// mode relaxed. After an error, `code` may not have run.
    unsafe fn foreign(&self, stream: RawStream, code: &mut dyn FnMut()) -> DriverResult<()>;
}
