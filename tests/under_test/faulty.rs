//! A kernel that faults, on a GPU and on the host device.

use gpu_await::{Device, DeviceKind, Grid, Image, Kernel, Module};

/// A kernel that faults.
pub(crate) async fn faulty(device: &Device) -> Kernel<()> {
    match device.kind() {
        DeviceKind::Cuda => {
            let ptx = include_str!("../../kernels/trap.ptx");
            let module = Module::load(device, Image::ptx(ptx)).await.expect("trap.ptx loads");
            // SAFETY: it takes nothing and touches nothing.
            unsafe { module.kernel("trap") }.expect("trap is there")
        }
        _ => Kernel::host(device, "trap", |_: &Grid| panic!("fault on purpose")).expect("a twin"),
    }
}
