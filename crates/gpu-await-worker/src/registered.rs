//! Slabs as memory of the device: registered with the driver, so that copies to and from payloads need no thread and no CPU copy.
//!
//! The slab of requests is mapped for reading, and registered for reading where the driver can (`READ_ONLY`). What the driver refuses is
//! copied through the library's pinned memory instead. A slab stays registered until the process ends, which unregisters it.
//!
//! Source: `cuMemHostRegister`.

use std::ffi::{c_int, c_uint, c_void};

use gpu_await::sibling::LibraryDevice;
use gpu_await::{Device, DeviceKind};

use crate::leases::Part;
use crate::slab::Slab;

type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;

const PORTABLE: c_uint = 1;
const MAPPED: c_uint = 2;
const READ_ONLY: c_uint = 8;

/// Registers all of a slab; returns whether device copies can reach it.
pub(crate) fn register(device: &Device, slab: &Slab, for_reading: bool) -> bool {
    match device.kind() {
        DeviceKind::Host => true,
        _ => {
            let flags = PORTABLE | MAPPED | if for_reading { READ_ONLY } else { 0 };
            let registered = call(device, slab, flags);
            if let Err(why) = &registered {
                tracing::warn!(%why, "payloads are copied by the CPU: the driver does not register their memory");
            }
            registered.is_ok()
        }
    }
}

fn call(device: &Device, slab: &Slab, flags: c_uint) -> Result<(), String> {
    // SAFETY: the driver's library is loaded and initialised already: its device is open.
    let library = unsafe { libloading::Library::new("libcuda.so.1") };
    let library = library.map_err(|error| error.to_string())?;
    // SAFETY: this is the function's type, by the driver's documentation.
    let function = unsafe { library.get::<Register>(b"cuMemHostRegister_v2\0") };
    let function = function.map_err(|error| error.to_string())?;
    let start = slab.at(Part { offset: 0, len: slab.bytes() });
    // SAFETY: the slab is mapped whole, and stays so until the process ends: `serve` keeps it.
    let run = || unsafe { function(start.cast(), slab.bytes() as usize, flags) };
    match LibraryDevice::of(device).in_context(run) {
        Ok(0) => Ok(()),
        Ok(code) => Err(format!("cuMemHostRegister: {code}")),
        Err(error) => Err(error.to_string()),
    }
}
