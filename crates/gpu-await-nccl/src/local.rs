//! [`LocalDevices`]: the devices of a process, one or several.
#![forbid(unsafe_code)]

use gpu_await::Device;

/// The devices of a process's ranks, as [`Group::connect`](crate::Group::connect) takes them: `&device`, or a slice, array or `Vec` of them
/// by reference. Sealed.
pub trait LocalDevices<'d>: sealed::Devices<'d> {}

impl<'d, D: sealed::Devices<'d>> LocalDevices<'d> for D {}

mod sealed {
    use gpu_await::Device;

    /// How the crate reads them.
    pub trait Devices<'d> {
        #[doc(hidden)]
        fn into_devices(self) -> &'d [Device];
    }
}

impl<'d> sealed::Devices<'d> for &'d Device {
    fn into_devices(self) -> &'d [Device] {
        std::slice::from_ref(self)
    }
}

impl<'d> sealed::Devices<'d> for &'d [Device] {
    fn into_devices(self) -> &'d [Device] {
        self
    }
}

impl<'d> sealed::Devices<'d> for &'d Vec<Device> {
    fn into_devices(self) -> &'d [Device] {
        self
    }
}

impl<'d, const N: usize> sealed::Devices<'d> for &'d [Device; N] {
    fn into_devices(self) -> &'d [Device] {
        self
    }
}
