//! Objects of other libraries that the device's work uses.
//!
//! | a library object | is |
//! |---|---|
//! | held by a plan or a handle of the user's | alive |
//! | dropped | retired behind everything submitted to the device so far, since launches may use it |
//! | retired, and all of that work complete | destroyed by the reaper, with the device's context current |
//! | on a lost device, or after `main` | leaked: destroying it would call the driver |

use std::sync::Arc;

use crate::backend::DevicePtr;
use crate::error::{ErrorDetail, Result};
use crate::memory::reclaim::retired::{Remnant, UserList};
use crate::runtime::Engine;

/// An object that a library made in a device's context, whose drop destroys it there.
pub(crate) struct LibraryObject<T: Send + 'static> {
    engine: Arc<Engine>,
    /// `None` only inside `drop`.
    object: Option<T>,
}

impl<T: Send + 'static> LibraryObject<T> {
    /// Makes one, with the device's context current on the calling thread.
    pub(crate) fn new(engine: &Arc<Engine>, make: impl FnOnce() -> Result<T>) -> Result<Self> {
        engine.check_open()?;
        let object = in_context(engine, make)??;
        Ok(LibraryObject { engine: engine.clone(), object: Some(object) })
    }

    pub(crate) fn get(&self) -> &T {
        self.object.as_ref().unwrap_or_else(|| unreachable!("taken by the drop only"))
    }

    #[cfg(feature = "blas")]
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl<T: Send + 'static> Drop for LibraryObject<T> {
    fn drop(&mut self) {
        let Some(object) = self.object.take() else { return };
        let engine = self.engine.clone();
        if !engine.is_usable() {
            return std::mem::forget(object);
        }
        let owner = Box::new(Remains { engine: engine.clone(), object: Some(object) });
        let what = Remnant::Foreign { ptr: DevicePtr::NULL, bytes: 0, owner };
        engine.retire_behind_all(what, UserList::new());
    }
}

/// Destroyed, on the reaper's thread, if its device still works by then.
struct Remains<T> {
    engine: Arc<Engine>,
    object: Option<T>,
}

impl<T> Drop for Remains<T> {
    fn drop(&mut self) {
        if !self.engine.is_usable() {
            std::mem::forget(self.object.take());
        }
    }
}

/// Runs `code` with the device's context current.
pub(crate) fn in_context<R>(engine: &Arc<Engine>, code: impl FnOnce() -> R) -> Result<R> {
    let (mut code, mut result) = (Some(code), None);
    let mut run = || result = code.take().map(|code| code());
    // SAFETY: the private stream lives as long as the engine, and the code puts nothing on it.
    let called = unsafe { engine.backend.foreign(engine.private, &mut run) };
    called.map_err(|code| engine.refused(code))?;
    result.ok_or_else(|| {
        let (what, device) = ("running a library's code", engine.label().to_owned());
        ErrorDetail::Unsupported { what, device }.into()
    })
}
