//! Objects of a library that the device's work uses, and the library itself.

use std::path::Path;

use gpu_await::sibling::{LibraryDevice, NotFound, Search, opened};
use gpu_await::{ErrorDetail, Result};

/// An object that a library made in a device's context, whose drop destroys it there: see [`LibraryDevice::retire`].
pub(crate) struct LibraryObject<T: Send + 'static> {
    device: LibraryDevice,
    /// `None` only inside `drop`.
    object: Option<T>,
}

impl<T: Send + 'static> LibraryObject<T> {
    /// Makes one, with the device's context current on the calling thread.
    pub(crate) fn new(device: &LibraryDevice, make: impl FnOnce() -> Result<T>) -> Result<Self> {
        let object = device.in_context(make)??;
        Ok(LibraryObject { device: device.clone(), object: Some(object) })
    }

    pub(crate) fn get(&self) -> &T {
        self.object.as_ref().unwrap_or_else(|| unreachable!("taken by the drop only"))
    }

    #[cfg(feature = "blas")]
    pub(crate) fn device(&self) -> &LibraryDevice {
        &self.device
    }
}

impl<T: Send + 'static> Drop for LibraryObject<T> {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            self.device.retire(object);
        }
    }
}

/// Finds a library, with its display name and what to install for it.
pub(crate) fn find<L>(
    search: &Search,
    (library, install): (&'static str, &'static str),
    open: impl Fn(&Path) -> std::result::Result<L, String>,
) -> Result<L> {
    search.find(open).map_err(|NotFound { looked_for, reason }| {
        let variable = search.variable;
        ErrorDetail::NoLibrary { library, install, variable, looked_for, reason }.into()
    })
}

/// Opens a library; an error is the loader's own words.
pub(crate) fn open(path: &Path) -> std::result::Result<libloading::Library, String> {
    // SAFETY: NVIDIA's libraries run only their own initializers.
    opened(unsafe { libloading::Library::new(path) })
}
