//! [`SharedModules`]: one module for all kernels that are declared over the same code.
//!
//! | a text | left by |
//! |---|---|
//! | unknown, or not loaded any more | the load of a kernel of it, for which others of the same text wait |
//! | loaded | the drop of its last kernel, which unloads it |
//!
//! Loading waits for everything that runs on the GPU, so it is done once a text, not once a kernel. A text with kernels that are declared to wait first
//! is read once for all of them: what it says of them stays with the module.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::image::{Form, Image};
use super::module::{LoadedModule, Module};
use super::programmatic::ImageVerdicts;
use crate::device::home::Home;
use crate::error::{ErrorDetail, Result};

/// The modules of a device's declared kernels.
#[derive(Default)]
pub(super) struct SharedModules(Mutex<HashMap<Key, Arc<Place>>>);

/// Held while it is loaded: it is none of the locks that are counted.
type Place = Mutex<Weak<LoadedModule>>;

/// All that an image is, but for its name.
type Key = (Form, Cow<'static, [u8]>, Vec<(String, String)>);

/// A kernel that is declared to wait first.
pub(super) struct WaitsFirst<'e> {
    pub(super) declaration: &'static str,
    pub(super) entry: &'e str,
}

impl WaitsFirst<'_> {
    fn check(&self, verdicts: &ImageVerdicts, image: &Image) -> Result<()> {
        verdicts.check(image, self.entry).map_err(|reason| {
            let (declaration, kernel) = (self.declaration.to_owned(), self.entry.to_owned());
            ErrorDetail::NotProgrammatic { declaration, kernel, reason }.into()
        })
    }
}

impl SharedModules {
    /// The module of an image, loaded unless it is. One whose kernel is to wait first and does not is not loaded for it.
    ///
    /// # Errors
    /// As [`Module::load`]; [`ErrorDetail::NotProgrammatic`].
    pub(super) fn load(
        home: &Home,
        image: Image,
        waits_first: Option<WaitsFirst<'_>>,
    ) -> Result<Module> {
        home.engine.check_open()?;
        let all = home.modules.get_or_init(|| Box::new(SharedModules::default()));
        let Some(all) = all.downcast_ref::<SharedModules>() else {
            unreachable!("nobody else has this place")
        };
        let place = all.place((image.form, image.bytes.clone(), image.instances.clone()));
        let mut place = place.lock();
        let check = |verdicts: &ImageVerdicts, image: &Image| {
            waits_first.as_ref().map_or(Ok(()), |kernel| kernel.check(verdicts, image))
        };
        if let Some(loaded) = place.upgrade() {
            check(loaded.verdicts(), &image)?;
            return Ok(Module::of(loaded, image.name));
        }
        let module = Module::load_if(&home.engine, image, |image| {
            let verdicts = ImageVerdicts::default();
            check(&verdicts, image).map(|()| verdicts)
        })?;
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
