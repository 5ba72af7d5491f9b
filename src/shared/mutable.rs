//! Memory that one process after another may write: for `gpu-await-worker`, whose supervisor decides which one.
//!
//! Its header is sealed from the beginning, so no import trusts a header that may change, and says that the memory is mutable:
//! [`Device::import_shared`] refuses it, and [`import`] refuses sealed memory.

use std::os::fd::AsFd;

use super::{SharedBuffer, SharedDescriptors, SharedInfo, bad, bytes_of, digest, expected};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::shared_memory::SharedMemory;
use crate::memory::view::Readable;
use crate::op::freeze::before_host;
use crate::op::{HostValue, Op};
use crate::runtime::coop;
use crate::thread::role;
use gpu_await_protocol::hazard::Mode;

/// Writes the memory's header, as `generation`, so that another process can [`import`] it after this one; returns its descriptors.
///
/// # Errors
/// Part of it was never written, which the next process could not know; no descriptor is left; it was already handed over or sealed.
pub fn hand_over<T: Element>(
    memory: &SharedBuffer<T>,
    generation: u64,
) -> Result<SharedDescriptors> {
    before_host("hand_over", &memory.span(), Mode::Read)?;
    let info = SharedInfo { generation, is_mutable: true, ..memory.info.clone() };
    memory.descriptors.seal(&info)?;
    memory.descriptors()
}

/// Maps memory that was [handed over](hand_over), for writing. Ready proves that it is mapped, and nothing about its contents.
///
/// # Safety
/// As long as this mapping exists or any work uses it, no other process uses the memory, and no other mapping in this process does.
///
/// # Errors
/// As [`Device::import_shared`].
pub async unsafe fn import<T: Element>(
    device: &Device,
    from: &SharedDescriptors,
    len: usize,
    generation: u64,
) -> Result<SharedBuffer<T>> {
    coop::proceed().await;
    role::check_driver("importing shared memory")?;
    let (bytes, engine) = (bytes_of::<T>(len)?, device.engine().clone());
    let (info, descriptors) = (from.info()?, from.try_clone()?);
    let imported = device.home().crew.run_alone(move || {
        engine.check_open()?;
        let expected = SharedInfo { generation, is_mutable: true, ..expected::<T>(&engine, len)? };
        info.check(&expected).map_err(bad)?;
        let file = descriptors.memory.as_fd();
        let mapping = SharedMemory::import(&engine, file, info.size_bytes, true)?;
        let raw = mapping.raw();
        let buffer = DeviceBuffer::<T>::new(mapping.into_allocation(bytes, true), len);
        Ok::<_, Error>(SharedBuffer { buffer, mapping: raw, info, descriptors })
    });
    imported.await?
}

/// Computes the digest of the current contents.
///
/// # Errors
/// As [`Device::import_shared`].
pub async fn digest<T: Element>(device: &Device, memory: &SharedBuffer<T>) -> Result<u64> {
    digest::of(device, memory.view()).await
}

/// Resolves when every use of the memory so far is complete.
///
/// # Errors
/// Its producer failed; the device is lost.
pub fn settled<T: Element>(memory: &SharedBuffer<T>) -> Result<Op<()>> {
    let (uses, on) = before_host("settled", &memory.span(), Mode::ReadWrite)?;
    Ok(Op::behind_uses(uses, HostValue::Here((), on)))
}
