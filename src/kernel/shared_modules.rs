//! [`SharedModules`]: one module for all kernels declared over the same code.
//!
//! | a text | left by |
//! |---|---|
//! | unknown, or unloaded | the load of a kernel over it, which others of the same text wait for |
//! | loaded | the drop of its last kernel, which unloads it |
//!
//! Loading waits for everything running on the GPU, so it is done once per text, not once per kernel. A text with kernels that are declared to wait
//! first is analysed once for all of them: the verdicts stay with the module.
//!
//! A host device loads no text. It reads the entries of a text once for all of its kernels, so that a wrong name is reported there too.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use gpu_await_protocol::lock::Mutex;

use super::image::{Form, Image, check_text};
use super::module::{LoadedModule, Module};
use super::programmatic::ImageVerdicts;
use crate::device::home::Home;
use crate::error::image::ImageProblem;
use crate::error::{ErrorDetail, Result};

/// The modules of a device's declared kernels.
#[derive(Default)]
pub(super) struct SharedModules {
    places: Mutex<HashMap<Key, Arc<Place>>>,
    /// For a host device: the entries of `'static` texts, by address and length.
    entries: Mutex<HashMap<Address, Entries>>,
}

/// The start of a text, and its length.
type Address = (usize, usize);

/// The names of a text's kernels.
type Entries = Arc<[String]>;

/// Held during the load; not one of the counted locks.
type Place = Mutex<Weak<LoadedModule>>;

/// The whole image except its name.
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
    /// The module of an image, loaded if it is not yet. If the kernel should wait first and does not, nothing is loaded for it.
    ///
    /// # Errors
    /// As [`Module::load`]; [`ErrorDetail::NotProgrammatic`].
    pub(super) fn load(
        home: &Home,
        image: Image,
        waits_first: Option<WaitsFirst<'_>>,
    ) -> Result<Module> {
        home.engine.check_open()?;
        let all = SharedModules::of(home);
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

    /// Checks that PTX has an entry, without a driver.
    ///
    /// # Errors
    /// [`ErrorDetail::NoSuchKernel`]; [`ErrorDetail::BadImage`] for what a driver would misread.
    pub(super) fn find_entry(
        home: &Home,
        name: &str,
        text: Cow<'static, str>,
        entry: &str,
    ) -> Result<()> {
        let there = SharedModules::of(home).entries(text).map_err(|problem| {
            ErrorDetail::BadImage { image: name.to_owned(), problem, log: String::new() }
        })?;
        if there.iter().any(|there| there == entry) {
            return Ok(());
        }
        let (image, kernel, there) = (name.to_owned(), entry.to_owned(), there.to_vec());
        Err(ErrorDetail::NoSuchKernel { image, kernel, there }.into())
    }

    fn entries(&self, text: Cow<'static, str>) -> std::result::Result<Entries, ImageProblem> {
        let text = match text {
            Cow::Borrowed(text) => text,
            Cow::Owned(text) => return Ok(check_text(text.as_bytes())?.into()),
        };
        // Others wait, so that the text is read once.
        let mut entries = self.entries.lock();
        let address = (text.as_ptr().addr(), text.len());
        if let Some(known) = entries.get(&address) {
            return Ok(known.clone());
        }
        let there = Entries::from(check_text(text.as_bytes())?);
        Ok(entries.entry(address).or_insert(there).clone())
    }

    fn of(home: &Home) -> &SharedModules {
        let all = home.modules.get_or_init(|| Box::new(SharedModules::default()));
        let Some(all) = all.downcast_ref::<SharedModules>() else {
            unreachable!("nobody else has this place")
        };
        all
    }

    fn place(&self, key: Key) -> Arc<Place> {
        let mut places = self.places.lock();
        if let Some(place) = places.get(&key) {
            return place.clone();
        }
        // A thread that is loading one has a share of its place.
        places.retain(|_, place| Arc::strong_count(place) > 1 || place.lock().strong_count() > 0);
        places.entry(key).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_once() {
        let (all, text) = (SharedModules::default(), ".entry one() .entry two()");
        let read = |text| all.entries(text).expect("it is text");
        let first = read(Cow::Borrowed(text));
        assert_eq!(*first, ["one", "two"]);
        assert!(Arc::ptr_eq(&first, &read(Cow::Borrowed(text))));
        assert_eq!(*read(Cow::Borrowed(&text[..12])), ["one"]);
        // An owned text may be a different one at a reused address.
        assert_eq!(read(Cow::Owned(text.to_owned())), first);
        assert_eq!(all.entries.lock().len(), 2);
    }
}
