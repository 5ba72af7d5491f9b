//! [`SharedModules`]: one module for all kernels that are declared over the same code.
//!
//! | a text | left by |
//! |---|---|
//! | unknown, or not loaded any more | the load of a kernel of it, for which others of the same text wait |
//! | loaded | the drop of its last kernel, which unloads it |
//!
//! Loading waits for everything that runs on the GPU, so it is done once a text, not once a kernel.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::image::{Form, Image};
use super::module::{LoadedModule, Module};
use crate::device::home::Home;
use crate::error::Result;

/// The modules of a device's declared kernels.
#[derive(Default)]
pub(super) struct SharedModules(Mutex<HashMap<Key, Arc<Place>>>);

/// Held while it is loaded: it is none of the locks that are counted.
type Place = Mutex<Weak<LoadedModule>>;

/// All that an image is, but for its name.
type Key = (Form, Cow<'static, [u8]>, Vec<(String, String)>);

impl SharedModules {
    /// The module of an image, loaded unless it is.
    ///
    /// # Errors
    /// As [`Module::load`].
    pub(super) fn load(home: &Home, image: Image) -> Result<Module> {
        home.engine.check_open()?;
        let all = home.modules.get_or_init(|| Box::new(SharedModules::default()));
        let Some(all) = all.downcast_ref::<SharedModules>() else {
            unreachable!("nobody else has this place")
        };
        let place = all.place((image.form, image.bytes.clone(), image.instances.clone()));
        let mut place = place.lock();
        if let Some(loaded) = place.upgrade() {
            return Ok(Module::of(loaded, image.name));
        }
        let module = Module::load_now(&home.engine, image)?;
        *place = Arc::downgrade(module.loaded());
        Ok(module)
    }

    fn place(&self, key: Key) -> Arc<Place> {
        let mut places = self.0.lock();
        if let Some(place) = places.get(&key) {
            return place.clone();
        }
        // Whoever loads one has a share of its place.
        places.retain(|_, place| Arc::strong_count(place) > 1 || place.lock().strong_count() > 0);
        places.entry(key).or_default().clone()
    }
}
