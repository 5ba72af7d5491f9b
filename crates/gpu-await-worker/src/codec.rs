//! Values as bytes: postcard's format, within limits.
//!
//! Decoding trusts nothing: lengths allocate no more than the message has bytes for, and values that nest deeper than
//! [`MOST_LEVELS`] are refused, both ways, before they overflow the stack.
//!
//! # Invariants
//! 1. An encoded value decodes to the same value (`values_come_back`).
//! 2. Any bytes decode to a value or to an error: no panic leaves, and no stack overflows (`deep_values_are_refused`, `bytes_never_panic`).
//! 3. A value that refuses to be encoded gets no hint about what the format lacks (`the_hint_is_for_what_it_explains`).
#![forbid(unsafe_code)]

mod nesting;
mod stack;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use postcard::de_flavors::Flavor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use nesting::Encoded;

/// How deep a value may nest.
pub(crate) const MOST_LEVELS: u32 = 128;

/// The most likely mistake in a user's own type.
const HINT: &str = "the format has no names of fields, so that `untagged`, `tag`, `flatten` and `skip_serializing_if` do not work in it";

/// Why a value is not encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It has more than this many levels: [`MOST_LEVELS`], or what the stack has room for.
    TooDeep(u32),
    /// Its own code, or the format, refuses it.
    Because(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::TooDeep(limit) => write!(f, "it nests deeper than {limit} levels"),
            Refused::Because(why) => f.write_str(why),
        }
    }
}

/// Runs a value's code, which may panic, and says why it failed; `why` explains errors of the format.
fn refused<T>(
    code: impl FnOnce(&Cell<Option<u32>>) -> postcard::Result<T>,
    why: impl FnOnce(postcard::Error) -> String,
) -> Result<T, Refused> {
    let over = Cell::new(None);
    let done = catch_unwind(AssertUnwindSafe(|| code(&over)));
    let done = done.map_err(|panic| Refused::Because(panic_text(panic)))?;
    done.map_err(|error| match over.get() {
        Some(limit) => Refused::TooDeep(limit),
        None => Refused::Because(why(error)),
    })
}

/// Encodes a value.
pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, Refused> {
    let encode =
        |over: &Cell<_>| postcard::to_extend(&Encoded::new(value, MOST_LEVELS, over), Vec::new());
    refused(encode, |error| match error {
        // Its own message is lost.
        postcard::Error::SerdeSerCustom => {
            "its `Serialize` refuses it, as that of a path does which is not UTF-8".to_owned()
        }
        error => format!("{error}; {HINT}"),
    })
}

/// Decodes a value that is all of `bytes`. A panic of the value's own code is an error.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refused> {
    let decode = |over: &Cell<_>| {
        let mut from = postcard::Deserializer::from_flavor(Bounded::new(bytes));
        let value = nesting::decode(&mut from, MOST_LEVELS, over)?;
        let rest = from.finalize()?;
        if rest.is_empty() { Ok(value) } else { Err(postcard::Error::SerdeDeCustom) }
    };
    refused(decode, |error| match error {
        // Its own message is lost; or it read less than there is.
        postcard::Error::SerdeDeCustom => {
            format!(
                "its `Deserialize` refuses what its `Serialize` wrote; if it is derived: {HINT}"
            )
        }
        error => format!("{error}; {HINT}"),
    })
}

/// Decodes one of this crate's headers; also returns what follows it.
pub(crate) fn header<'m, T: Deserialize<'m>>(message: &'m [u8]) -> Option<(T, &'m [u8])> {
    postcard::take_from_bytes(message).ok()
}

/// The message of a panic that is resumed.
pub(crate) fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".to_owned(),
    }
}

/// The message of a panic that ends here.
pub(crate) fn panic_text(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = text_of(&*panic);
    // A payload may panic when it is dropped.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
    text
}

/// The start of a text, at most `most` bytes.
pub(crate) fn cut(text: &str, most: usize) -> &[u8] {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text.as_bytes()[..end.unwrap_or(0)]
}

/// Bytes to decode, which know their number: no length allocates more.
struct Bounded<'m>(&'m [u8]);

impl<'m> Bounded<'m> {
    fn new(bytes: &'m [u8]) -> Self {
        Bounded(bytes)
    }
}

impl<'m> Flavor<'m> for Bounded<'m> {
    type Remainder = &'m [u8];
    type Source = &'m [u8];

    fn pop(&mut self) -> postcard::Result<u8> {
        let (first, rest) =
            self.0.split_first().ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
        self.0 = rest;
        Ok(*first)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.0.len())
    }

    fn try_take_n(&mut self, count: usize) -> postcard::Result<&'m [u8]> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
        self.0 = rest;
        Ok(taken)
    }

    fn finalize(self) -> postcard::Result<&'m [u8]> {
        Ok(self.0)
    }
}
