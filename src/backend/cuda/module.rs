//! The driver's module and kernel calls.

use std::ffi::{CString, c_int, c_void};

use super::api::Handle;
use super::exclusive::Exclusive;
use super::launch_ex::{Attribute, RawConfig};
use super::standstill::Standstill;
use super::{CudaBackend, NOT_FOUND, NOT_SUPPORTED, api, driver, stream_handle};
use crate::backend::{
    Arguments, DriverResult, Function, Grid, KernelAttributes, LaunchShape, ModuleCalls,
    RawFunction, RawModule, RawStream,
};
use crate::error::DriverCode;
use crate::error::image::ParamLayout;

impl ModuleCalls for CudaBackend {
    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let Function::Device(RawFunction { function, .. }) = *function else {
            return Err(DriverCode { call: "cuLaunchKernel", code: NOT_SUPPORTED });
        };
        let function = function as Handle;
        let [gx, gy, gz] = shape.grid.grid_dim;
        let [bx, by, bz] = shape.grid.block_dim;
        let shared = shape.grid.shared_mem_bytes;
        let stream = stream_handle(stream);
        let mut pointers = args.pointers();
        let (params, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        // One combined test: most launches are neither.
        if shape.cooperative | shape.overlaps || shape.grid.has_clusters() {
            if shape.cooperative && !shape.grid.has_clusters() {
                return driver!(self.cuLaunchCooperativeKernel(
                    function, gx, gy, gz, bx, by, bz, shared, stream, params
                ));
            }
            let attributes = Attribute::of(shape);
            let config = RawConfig::new(&shape.grid, stream, &attributes);
            return driver!(self.cuLaunchKernelEx(&raw const config, function, params, extra));
        }
        driver!(
            self.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
        )
    }

    fn load(&self, image: &[u8], log: &mut String) -> DriverResult<RawModule> {
        const ERROR_LOG: c_int = 5;
        const ERROR_LOG_BYTES: c_int = 6;
        let _standstill = Standstill::begin();
        let _exclusive = Exclusive::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut buffer = vec![0_u8; 16 << 10];
        let mut options = [ERROR_LOG, ERROR_LOG_BYTES];
        let mut values: [*mut c_void; 2] =
            [buffer.as_mut_ptr().cast(), std::ptr::without_provenance_mut(buffer.len())];
        let mut module: Handle = std::ptr::null_mut();
        let (none, values): (*mut c_int, _) = (std::ptr::null_mut(), values.as_mut_ptr());
        let loaded = driver!(self.cuLibraryLoadData(
            &raw mut module,
            image.as_ptr().cast(),
            options.as_mut_ptr(),
            values,
            2,
            none,
            none.cast(),
            0,
        ));
        // The driver compiles PTX, and reports its errors, only when something of the library is looked up.
        let loaded = loaded.and_then(|()| {
            let mut whole: Handle = std::ptr::null_mut();
            driver!(self.cuLibraryGetModule(&raw mut whole, module)).inspect_err(|_| {
                driver!(self.cuLibraryUnload(module)).ok();
            })
        });
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        log.push_str(&String::from_utf8_lossy(&buffer[..end]));
        loaded?;
        self.logs.lock().insert(module as u64, buffer);
        Ok(RawModule(module as u64))
    }

    unsafe fn unload(&self, module: RawModule) -> DriverResult<()> {
        let _standstill = Standstill::begin();
        let _exclusive = Exclusive::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuLibraryUnload(module.0 as Handle))?;
        self.logs.lock().remove(&module.0);
        Ok(())
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction> {
        const CALL: &str = "cuLibraryGetKernel";
        let name = CString::new(name).map_err(|_| DriverCode { call: CALL, code: NOT_FOUND })?;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut kernel, mut function): (Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut());
        driver!(self.cuLibraryGetKernel(&raw mut kernel, module.0 as Handle, name.as_ptr()))?;
        driver!(self.cuKernelGetFunction(&raw mut function, kernel))?;
        let context = self.raw_context as u64;
        let (function, kernel) = (function as u64, kernel as u64);
        Ok(RawFunction { function, kernel, context, waits_first: false })
    }

    unsafe fn function_attributes(&self, function: RawFunction) -> DriverResult<KernelAttributes> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let attribute = |attribute: c_int| -> DriverResult<u32> {
            let mut value = 0;
            driver!(self.cuFuncGetAttribute(
                &raw mut value,
                attribute,
                function.function as Handle
            ))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(KernelAttributes {
            max_threads_per_block: attribute(0)?,
            static_shared_mem_bytes: attribute(1)?,
            const_bytes: attribute(2)?,
            local_bytes: attribute(3)?,
            registers: attribute(4)?,
            ptx_version: attribute(5)?,
            binary_version: attribute(6)?,
            cache_mode_ca: attribute(7)? != 0,
        })
    }

    unsafe fn function_parameters(
        &self,
        function: RawFunction,
    ) -> DriverResult<Option<Vec<ParamLayout>>> {
        const CALL: &str = "cuFuncGetParamInfo";
        const PAST_THE_LAST: i32 = 1;
        let Some(ask) = &self.api.cuFuncGetParamInfo else { return Ok(None) };
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut params, mut offset_bytes, mut size_bytes) = (Vec::new(), 0, 0);
        loop {
            let (function, offset, size) =
                (function.function as Handle, &raw mut offset_bytes, &raw mut size_bytes);
            // SAFETY: the function is loaded: the trait's contract. Both are live integers.
            let code = unsafe { ask(function, params.len(), offset, size) };
            match code {
                PAST_THE_LAST => return Ok(Some(params)),
                NOT_SUPPORTED => return Ok(None),
                code => api::check(CALL, code)?,
            }
            params.push(ParamLayout { offset_bytes, size_bytes });
        }
    }

    unsafe fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> DriverResult<()> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        let function = function.function as Handle;
        driver!(self.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes))
    }

    unsafe fn active_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared: u32,
    ) -> DriverResult<u32> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let (function, shared) = (function.function as Handle, shared as usize);
        let mut blocks = 0;
        driver!(self.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut blocks,
            function,
            threads,
            shared
        ))?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    unsafe fn active_clusters(
        &self,
        function: RawFunction,
        grid: &Grid,
        stream: Option<RawStream>,
    ) -> DriverResult<u32> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let attributes = Attribute::of(&LaunchShape::plain(*grid));
        let stream = stream.map_or(std::ptr::null_mut(), stream_handle);
        let config = RawConfig::new(grid, stream, &attributes);
        let function = function.function as Handle;
        let mut clusters = 0;
        driver!(self.cuOccupancyMaxActiveClusters(&raw mut clusters, function, &raw const config))?;
        Ok(u32::try_from(clusters).unwrap_or(0))
    }
}
