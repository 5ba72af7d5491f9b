//! What a value's own code says when it refuses to be encoded, which postcard's errors do not keep (pure).
//!
//! The value is encoded a second time, to nothing: its code runs again.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::ser::{self, Serialize, Serializer};

use super::nesting::Encoded;
use super::{MOST_LEVELS, panic_text};

/// Why the value is not encoded.
pub(super) fn of<T: Serialize + ?Sized>(value: &T) -> String {
    let over = Cell::new(None);
    let encode = || Encoded::new(value, MOST_LEVELS, &over).serialize(Nothing);
    match catch_unwind(AssertUnwindSafe(encode)) {
        Ok(Err(Said(text))) => text,
        Err(panic) => panic_text(panic),
        Ok(Ok(())) => "its `Serialize` refused it once, and not again".to_owned(),
    }
}

/// Where nothing is encoded.
struct Nothing;

/// What the value said.
#[derive(Debug)]
struct Said(String);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Said {}

impl ser::Error for Said {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Said(text.to_string())
    }
}

macro_rules! plain {
    ($($method:ident($($type:ty),*);)+) => {$(
        fn $method(self, $(_: $type),*) -> Result<(), Said> {
            Ok(())
        }
    )+};
}

macro_rules! many {
    ($($method:ident($($type:ty),*);)+) => {$(
        fn $method(self, $(_: $type),*) -> Result<Nothing, Said> {
            Ok(Nothing)
        }
    )+};
}

macro_rules! one {
    ($($method:ident($($type:ty),*);)+) => {$(
        fn $method<T: Serialize + ?Sized>(self, $(_: $type,)* value: &T) -> Result<(), Said> {
            value.serialize(Nothing)
        }
    )+};
}

impl Serializer for Nothing {
    type Ok = ();
    type Error = Said;
    type SerializeSeq = Nothing;
    type SerializeTuple = Nothing;
    type SerializeTupleStruct = Nothing;
    type SerializeTupleVariant = Nothing;
    type SerializeMap = Nothing;
    type SerializeStruct = Nothing;
    type SerializeStructVariant = Nothing;

    plain! {
        serialize_bool(bool);
        serialize_i8(i8);
        serialize_i16(i16);
        serialize_i32(i32);
        serialize_i64(i64);
        serialize_i128(i128);
        serialize_u8(u8);
        serialize_u16(u16);
        serialize_u32(u32);
        serialize_u64(u64);
        serialize_u128(u128);
        serialize_f32(f32);
        serialize_f64(f64);
        serialize_char(char);
        serialize_str(&str);
        serialize_bytes(&[u8]);
        serialize_none();
        serialize_unit();
        serialize_unit_struct(&'static str);
        serialize_unit_variant(&'static str, u32, &'static str);
    }

    one! {
        serialize_some();
        serialize_newtype_struct(&'static str);
        serialize_newtype_variant(&'static str, u32, &'static str);
    }

    many! {
        serialize_seq(Option<usize>);
        serialize_tuple(usize);
        serialize_tuple_struct(&'static str, usize);
        serialize_tuple_variant(&'static str, u32, &'static str, usize);
        serialize_map(Option<usize>);
        serialize_struct(&'static str, usize);
        serialize_struct_variant(&'static str, u32, &'static str, usize);
    }

    // As postcard is.
    fn is_human_readable(&self) -> bool {
        false
    }
}

macro_rules! parts {
    ($($many:ident: $($method:ident($($key:ty)?)),+;)+) => {$(
        impl ser::$many for Nothing {
            type Ok = ();
            type Error = Said;

            $(fn $method<T: Serialize + ?Sized>(
                &mut self,
                $(_: $key,)?
                value: &T,
            ) -> Result<(), Said> {
                value.serialize(Nothing)
            })+

            fn end(self) -> Result<(), Said> {
                Ok(())
            }
        }
    )+};
}

parts! {
    SerializeSeq: serialize_element();
    SerializeTuple: serialize_element();
    SerializeTupleStruct: serialize_field();
    SerializeTupleVariant: serialize_field();
    SerializeMap: serialize_key(), serialize_value();
    SerializeStruct: serialize_field(&'static str);
    SerializeStructVariant: serialize_field(&'static str);
}
