//! [`LibraryDevice`]: the device handle of a library binding, which destroys the library's objects.
//!
//! | an object of the library | is |
//! |---|---|
//! | held by a user's plan or handle | alive |
//! | retired | kept behind everything submitted to the device so far, since launches may use it |
//! | retired, and all of that work complete | destroyed by the reaper, with the device's context current |
//! | on a lost device, or after `main` | leaked: destroying it would call the driver |

use std::sync::Arc;

use crate::backend::{DeviceKind, DevicePtr};
use crate::batch::queue::Queue;
use crate::device::Device;
use crate::error::{ErrorDetail, Result};
use crate::memory::reclaim::retired::{Remnant, UserList};
use crate::runtime::Engine;
use crate::submit::wrong_device;

/// A device, without keeping it open.
#[derive(Clone)]
pub struct LibraryDevice {
    engine: Arc<Engine>,
}

impl LibraryDevice {
    /// Returns the device's handle for a library binding.
    #[must_use]
    pub fn of(device: &Device) -> Self {
        LibraryDevice { engine: device.engine().clone() }
    }

    /// Returns the kind of device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.engine.backend.kind()
    }

    /// Returns the device's name for messages.
    #[must_use]
    pub fn label(&self) -> &str {
        self.engine.label()
    }

    /// Refuses a device that is lost or closed.
    ///
    /// # Errors
    /// The loss; [`ErrorDetail::Closed`].
    pub fn check_open(&self) -> Result<()> {
        self.engine.check_open()
    }

    /// Refuses the queue of another device, for a plan.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`].
    pub fn check_queue(&self, queue: &Queue<'_>) -> Result<()> {
        let engine = &queue.stream.engine;
        match engine.state.id == self.engine.state.id {
            true => Ok(()),
            false => Err(wrong_device("the plan", engine, &self.engine)),
        }
    }

    /// Runs `code` with the device's context current.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn in_context<R>(&self, code: impl FnOnce() -> R) -> Result<R> {
        let (mut code, mut result) = (Some(code), None);
        let mut run = || result = code.take().map(|code| code());
        // SAFETY: the private stream lives as long as the engine, and the code puts nothing on it.
        let called = unsafe { self.engine.backend.foreign(self.engine.shares.private, &mut run) };
        called.map_err(|code| self.engine.refused(code))?;
        result.ok_or_else(|| {
            let (what, device) = ("running a library's code", self.label().to_owned());
            ErrorDetail::Unsupported { what, device }.into()
        })
    }

    /// Drops an object after everything submitted so far, with the device's context current, or never: see the module.
    pub fn retire<T: Send + 'static>(&self, object: T) {
        if !self.engine.is_usable() {
            return std::mem::forget(object);
        }
        let owner = Box::new(Remains { engine: self.engine.clone(), object: Some(object) });
        let what = Remnant::Foreign { ptr: DevicePtr::NULL, bytes: 0, owner };
        self.engine.retire_behind_all(what, UserList::new());
    }
}

/// Destroyed on the reaper's thread, if its device still works by then.
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
