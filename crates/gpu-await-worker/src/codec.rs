//! Values as bytes: postcard's format, within limits.
//!
//! Whoever decodes trusts nothing: lengths allocate no more than the message has bytes for, and values that nest deeper than
//! [`MOST_STACK`] allows are refused, before they overflow the stack.
//!
//! # Invariants
//! 1. What was encoded decodes to the same (`values_come_back`).
//! 2. Any bytes decode to a value or to an error: no panic leaves, and no stack overflows (`deep_values_are_refused`, `bytes_never_panic`).
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use postcard::de_flavors::Flavor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// How much stack a value may take while it is decoded. Each level of nesting reads a byte, and there the depth is checked.
const MOST_STACK: usize = 128 << 10;

/// Encodes a value.
pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, String> {
    let encoded = catch_unwind(AssertUnwindSafe(|| postcard::to_extend(value, Vec::new())));
    encoded.map_err(panic_text)?.map_err(|error| error.to_string())
}

/// Decodes a value that is all of `bytes`. A panic of the value's own code is an error.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let mut from = postcard::Deserializer::from_flavor(Bounded::new(bytes));
        let value = T::deserialize(&mut from)?;
        let rest = from.finalize()?;
        if rest.is_empty() { Ok(value) } else { Err(postcard::Error::SerdeDeCustom) }
    }));
    decoded.map_err(panic_text)?.map_err(|error| error.to_string())
}

/// Decodes a header of this crate's, in front of what it describes.
pub(crate) fn header<'m, T: Deserialize<'m>>(message: &'m [u8]) -> Option<(T, &'m [u8])> {
    postcard::take_from_bytes(message).ok()
}

/// What a panic says, which goes on.
pub(crate) fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".to_owned(),
    }
}

/// What a panic says, which ends here.
pub(crate) fn panic_text(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = text_of(&*panic);
    // A payload may panic when it is dropped.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
    text
}

/// The beginning of a text, of at most so many bytes.
pub(crate) fn cut(text: &str, most: usize) -> &[u8] {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text.as_bytes()[..end.unwrap_or(0)]
}

/// Bytes to decode, and where the stack was when that began.
struct Bounded<'m> {
    rest: &'m [u8],
    stack: usize,
}

impl<'m> Bounded<'m> {
    fn new(bytes: &'m [u8]) -> Self {
        Bounded { rest: bytes, stack: stack_now() }
    }

    fn check_depth(&self) -> postcard::Result<()> {
        if self.stack.abs_diff(stack_now()) > MOST_STACK {
            return Err(postcard::Error::SerdeDeCustom);
        }
        Ok(())
    }
}

/// An address in the frame of the caller.
#[inline(never)]
fn stack_now() -> usize {
    let here = 0u8;
    std::hint::black_box(&raw const here).addr()
}

impl<'m> Flavor<'m> for Bounded<'m> {
    type Remainder = &'m [u8];
    type Source = &'m [u8];

    fn pop(&mut self) -> postcard::Result<u8> {
        self.check_depth()?;
        let (first, rest) =
            self.rest.split_first().ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
        self.rest = rest;
        Ok(*first)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }

    fn try_take_n(&mut self, count: usize) -> postcard::Result<&'m [u8]> {
        self.check_depth()?;
        let (taken, rest) =
            self.rest.split_at_checked(count).ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
        self.rest = rest;
        Ok(taken)
    }

    fn finalize(self) -> postcard::Result<&'m [u8]> {
        Ok(self.rest)
    }
}
