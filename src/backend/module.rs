//! Driver calls for kernels: loading, attributes, launching.

use super::{
    Arguments, DriverResult, Function, Grid, KernelAttributes, LaunchShape, RawFunction, RawModule,
    RawStream,
};
use crate::error::image::ParamLayout;

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share.
pub(crate) trait ModuleCalls {
    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()>;
    /// Loads a kernel image; `log` receives the JIT compiler's messages.
    fn load(&self, image: &[u8], log: &mut String) -> DriverResult<RawModule>;
    unsafe fn unload(&self, module: RawModule) -> DriverResult<()>;
    unsafe fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction>;
    unsafe fn function_attributes(&self, function: RawFunction) -> DriverResult<KernelAttributes>;
    /// The parameters that the function was compiled with; `None` where the driver does not report them.
    unsafe fn function_parameters(
        &self,
        function: RawFunction,
    ) -> DriverResult<Option<Vec<ParamLayout>>>;
    unsafe fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> DriverResult<()>;
    /// Blocks that a multiprocessor can hold at once.
    unsafe fn active_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared: u32,
    ) -> DriverResult<u32>;
    /// Clusters that a stream's multiprocessors can hold at once; without a stream, the device's.
    unsafe fn active_clusters(
        &self,
        function: RawFunction,
        grid: &Grid,
        stream: Option<RawStream>,
    ) -> DriverResult<u32>;
}
