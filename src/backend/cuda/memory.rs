//! The driver's memory calls.

use std::ffi::{c_int, c_void};

use super::api::{Handle, Memcpy2d};
use super::exclusive::Exclusive;
use super::standstill::Standstill;
use super::{CudaBackend, driver, stream_handle};
use crate::backend::{
    DevicePtr, DriverResult, HostPtr, MemoryAt, MemoryCalls, Pattern, PoolInfo, RawStream, RowCopy,
};
use crate::error::DriverCode;

const INVALID_VALUE: i32 = 1;

impl CudaBackend {
    /// Puts a copy on the stream. For memory mapped from several handles, the driver needs a current context on the calling thread: if the
    /// copy is refused without one, it is made again with the device's (driver 580; fills and launches need none).
    fn copying(&self, stream: RawStream, copy: impl Fn() -> DriverResult<()>) -> DriverResult<()> {
        let bound = self.bind_for(stream)?;
        match copy() {
            Err(DriverCode { code: INVALID_VALUE, .. }) if bound.is_none() => {
                let _bound = self.bind()?;
                copy()
            }
            copied => copied,
        }
    }
}

impl MemoryCalls for CudaBackend {
    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut ptr = 0;
        let (pool, stream) = (self.pool as Handle, stream_handle(stream));
        driver!(self.cuMemAllocFromPoolAsync(&raw mut ptr, bytes as usize, pool, stream))?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuMemFreeAsync(ptr.0, stream_handle(stream)))
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut free, mut total) = (0, 0);
        driver!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    fn pool_info(&self) -> DriverResult<PoolInfo> {
        let _relaxed = self.api.relax();
        // `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`.
        let bytes = |attribute| self.api.pool_bytes(self.pool as Handle, attribute);
        Ok(PoolInfo { reserved: bytes(5)?, reserved_peak: bytes(6)? })
    }

    fn pool_trim(&self, keep_bytes: u64) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let keep = usize::try_from(keep_bytes).unwrap_or(usize::MAX);
        driver!(self.cuMemPoolTrimTo(self.pool as Handle, keep))
    }

    fn memory_at(&self, ptr: DevicePtr) -> DriverResult<MemoryAt> {
        // `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and its value for device memory.
        const MEMORY_TYPE: c_int = 2;
        const DEVICE: c_int = 2;
        const DEVICE_ORDINAL: c_int = 9;
        const RANGE_START_ADDR: c_int = 11;
        const RANGE_SIZE: c_int = 12;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut kind, mut ordinal, mut start, mut bytes): (c_int, c_int, u64, usize) =
            (0, 0, 0, 0);
        match driver!(self.cuPointerGetAttribute((&raw mut kind).cast(), MEMORY_TYPE, ptr.0)) {
            Ok(()) if kind == DEVICE => {}
            // The driver does not know the pointer.
            Ok(()) | Err(DriverCode { code: INVALID_VALUE, .. }) => {
                return Ok(MemoryAt { ordinal: None, allocation: None });
            }
            Err(code) => return Err(code),
        }
        driver!(self.cuPointerGetAttribute((&raw mut ordinal).cast(), DEVICE_ORDINAL, ptr.0))?;
        let ordinal = usize::try_from(ordinal).ok();
        // Some kinds of memory lack these attributes.
        let start =
            driver!(self.cuPointerGetAttribute((&raw mut start).cast(), RANGE_START_ADDR, ptr.0))
                .map(|()| start);
        let bytes = driver!(self.cuPointerGetAttribute((&raw mut bytes).cast(), RANGE_SIZE, ptr.0))
            .map(|()| bytes as u64);
        let allocation = start.ok().zip(bytes.ok()).map(|(start, bytes)| start..start + bytes);
        Ok(MemoryAt { ordinal, allocation })
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize) -> DriverResult<DevicePtr> {
        const PORTABLE_AND_MAPPED: u32 = 1 | 2;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        let host = ptr.0 as *mut c_void;
        driver!(self.cuMemHostRegister_v2(host, bytes, PORTABLE_AND_MAPPED))?;
        let mut device = 0;
        match driver!(self.cuMemHostGetDevicePointer_v2(&raw mut device, host, 0)) {
            Ok(()) => Ok(DevicePtr(device)),
            Err(code) => {
                // If this fails, the caller unmaps the memory.
                let _ = driver!(self.cuMemHostUnregister(host));
                Err(code)
            }
        }
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> DriverResult<()> {
        let _standstill = Standstill::begin();
        let _exclusive = Exclusive::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuMemHostUnregister(ptr.0 as *mut c_void))
    }

    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> DriverResult<()> {
        let (src, raw) = (src.0 as *const c_void, stream_handle(stream));
        self.copying(stream, || driver!(self.cuMemcpyHtoDAsync_v2(dst.0, src, bytes as usize, raw)))
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        let (dst, raw) = (dst.0 as *mut c_void, stream_handle(stream));
        self.copying(stream, || driver!(self.cuMemcpyDtoHAsync_v2(dst, src.0, bytes as usize, raw)))
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        let raw = stream_handle(stream);
        self.copying(stream, || {
            driver!(self.cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, raw))
        })
    }

    unsafe fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()> {
        let (copy, raw) = (Memcpy2d::from(copy), stream_handle(stream));
        self.copying(stream, || driver!(self.cuMemcpy2DAsync_v2(&raw const copy, raw)))
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        src_context: u64,
        bytes: u64,
    ) -> DriverResult<()> {
        let (here, there) = (self.raw_context as Handle, src_context as Handle);
        let (bytes, raw) = (bytes as usize, stream_handle(stream));
        self.copying(stream, || {
            driver!(self.cuMemcpyPeerAsync(dst.0, here, src.0, there, bytes, raw))
        })
    }

    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let stream = stream_handle(stream);
        let short = pattern.shortest();
        let pitch = short.len;
        // In units of the pattern.
        let count = pattern.len / pitch * count as usize;
        let is_aligned = |bytes: u64| dst.0.is_multiple_of(bytes);
        match *short.as_slice() {
            [byte] => driver!(self.cuMemsetD8Async(dst.0, byte, count, stream)),
            [a, b] if is_aligned(2) => {
                let value = u16::from_ne_bytes([a, b]);
                driver!(self.cuMemsetD16Async(dst.0, value, count, stream))
            }
            [a, b, c, d] if is_aligned(4) => {
                let value = u32::from_ne_bytes([a, b, c, d]);
                driver!(self.cuMemsetD32Async(dst.0, value, count, stream))
            }
            // Column by column, a thousand times slower than a launch of `fill_bytes`: only where that could not be loaded.
            ref whole => {
                for (index, byte) in whole.iter().enumerate() {
                    let at = dst.0 + index as u64;
                    driver!(self.cuMemsetD2D8Async(at, pitch, *byte, 1, count, stream))?;
                }
                Ok(())
            }
        }
    }
}
