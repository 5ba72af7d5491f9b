//! What a device has done by a thread of its own: driver calls that may be held up, drops of users' values.
//!
//! | while the system gives no thread | is kept, and |
//! |---|---|
//! | errands | the poller does one after the other itself, until there is a thread |
//! | values of users | the poller asks for the thread again |
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{DeviceStream, Engine};
use crate::thread::exit::ExitGuard;
use crate::thread::role::Role;
use crate::thread::{role, worker};

impl<S: DeviceStream> Engine<S> {
    /// Makes a driver call that may be held up for long, on a thread that nobody waits for. It is not
    /// made once the device is lost or the process ends.
    pub(crate) fn errand(self: &Arc<Self>, errand: impl FnOnce(&Arc<Self>) + Send + 'static) {
        if self.options.stepped {
            return errand(self);
        }
        let engine = Arc::downgrade(self);
        self.errands.enqueue(Box::new(move || {
            if let Some(engine) = engine.upgrade().filter(|engine| engine.lost().is_none())
                && let Some(_in_driver) = ExitGuard::in_driver()
            {
                errand(&engine);
            }
        }));
        self.call_for_left();
    }

    /// Has `act` destroy something. Not here: the driver may wait for full queues in that, and the caller
    /// is a drop, or the poller.
    pub(crate) fn act(&self, act: impl FnOnce() + Send + 'static) {
        if self.options.stepped && role::may_call_driver() {
            act();
        } else {
            self.errands.send(act);
            self.call_for_left();
        }
    }

    /// What waits for a thread that the system did not give.
    pub(crate) fn left_without_a_thread(&self) -> u64 {
        self.errands.left() + self.reaper.left()
    }

    fn call_for_left(&self) {
        if self.errands.left() > 0 {
            self.attention.call();
        }
    }

    /// Asks for the threads again. Without one the poller runs an errand itself: the end of a stream may be
    /// what gives a thread back, and to be held up is better than to wait for ever. Values of users wait.
    pub(crate) fn send_left(&self) {
        if let Some(value) = self.reaper.send_left() {
            self.reaper.keep([value]);
        }
        if let Some(errand) = self.errands.send_left() {
            worker::run(errand);
        }
    }

    /// Drops what is the user's here, or on the reaper's thread if this one is the driver's or ours.
    pub(crate) fn let_go(&self, value: impl Send + 'static) {
        if role::current() == Role::Free {
            drop(value);
        } else {
            self.reaper.drop_later(Box::new(value));
        }
    }
}
