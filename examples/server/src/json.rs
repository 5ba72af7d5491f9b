//! JSON of requests: objects, and arrays of bounded length, so that a body makes no more of itself than `budget.rs` counts on.
//!
//! | serde | here |
//! |---|---|
//! | reads an array as a struct, too: its members in order | [`Object`]: an object alone |
//! | reads an array of any length, and says afterwards that it is too long | [`Few`]: as many as there may be |
//! | quotes a string in its message, escaped and in full | long ones are refused before |
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::failure::Failure;

/// Bytes of a name in JSON. Nothing else there is text.
const MAX_STRING: usize = 256;

/// A struct that is read from an object.
pub(crate) trait Described {
    /// What errors say was expected.
    const EXPECTED: &'static str;
}

/// A `T`, from an object alone.
#[derive(Default)]
pub(crate) struct Object<T>(pub T);

/// An array of up to `N`; what is behind them is not read.
pub(crate) struct Few<T, const N: usize>(pub Vec<T>);

/// Reads an object.
///
/// # Errors
/// 400.
pub(crate) fn object<'a, T: Deserialize<'a> + Described>(body: &'a [u8]) -> Result<T, Failure> {
    if has_long_string(body) {
        return Err(Failure::invalid(format!("a string of more than {MAX_STRING} bytes")));
    }
    let read = serde_json::from_slice(body);
    read.map(|Object(read)| read).map_err(|error| Failure::invalid(error.to_string()))
}

impl<'de, T: Deserialize<'de> + Described> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Members(PhantomData))
    }
}

struct Members<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Described> Visitor<'de> for Members<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(members)).map(Object)
    }
}

impl<T, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        Few(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for Few<T, N> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(Array(PhantomData))
    }
}

struct Array<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for Array<T, N> {
    type Value = Few<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {N}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Few<T, N>, A::Error> {
        let mut few = Vec::new();
        while let Some(one) = seq.next_element()? {
            if few.len() == N {
                return Err(A::Error::invalid_length(N + 1, &self));
            }
            few.push(one);
        }
        Ok(Few(few))
    }
}

/// Serde quotes strings in its messages, escaped and in full: seven times the body, at worst.
fn has_long_string(json: &[u8]) -> bool {
    let (mut start, mut is_escaped) = (None, false);
    json.iter().enumerate().any(|(at, byte)| {
        match (start, byte) {
            (None, b'"') => (start, is_escaped) = (Some(at), false),
            (None, _) => {}
            (Some(_), _) if is_escaped => is_escaped = false,
            (Some(_), b'"') => start = None,
            (Some(_), byte) => is_escaped = *byte == b'\\',
        }
        start.is_some_and(|start| at - start > MAX_STRING)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_strings_are_found() {
        let long = "x".repeat(MAX_STRING + 1);
        let short = "x".repeat(MAX_STRING - 1);
        for json in [
            format!(r#"{{"{long}": 1}}"#),
            format!(r#"["", "{long}""#),
            format!(r#"["\"{long}"]"#),
            format!(r#"["\\", "{long}"]"#),
            format!("[\"{}\"]", r"\\".repeat(MAX_STRING)),
            format!("[\"{}\"]", r#"\""#.repeat(MAX_STRING)),
        ] {
            assert!(has_long_string(json.as_bytes()), "{json}");
        }
        let numbers = "1, ".repeat(MAX_STRING);
        for json in [format!(r#"{{"a": [{numbers}1], "\"b\\": "{short}"}}"#), long] {
            assert!(!has_long_string(json.as_bytes()), "{json}");
        }
    }
}
