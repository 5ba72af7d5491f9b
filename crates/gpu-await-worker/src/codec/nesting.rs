//! How deep values nest, counted while they are encoded and decoded, around any format (pure).
//!
//! A level is anything that contains a value of another type: an option that has one, a newtype, a list, tuple, map or struct, a variant with
//! contents. So the recursion over a recursive type ends before the stack does: earlier on a thread with little stack.
//!
//! # Invariants
//! 1. Both ways count alike: what could be encoded can be decoded (`as_many_levels_both_ways`).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use serde::ser::{self, Serialize, Serializer};

use super::stack;

/// So many levels fit on any stack.
const ON_ANY_STACK: u32 = 16;
/// The stack that must be left for one more level: unoptimised code takes a KiB for most.
const RESERVE: usize = 16 << 10;

/// The depth reached.
#[derive(Clone, Copy, Debug)]
struct Levels<'l> {
    depth: u32,
    most: u32,
    /// Set to the limit when it is exceeded.
    over: &'l Cell<Option<u32>>,
}

impl<'l> Levels<'l> {
    fn new(most: u32, over: &'l Cell<Option<u32>>) -> Self {
        Levels { depth: 0, most, over }
    }

    fn deeper(self) -> Option<Self> {
        let fits = self.depth < ON_ANY_STACK || stack::left() > RESERVE;
        if self.depth < self.most && fits {
            return Some(Levels { depth: self.depth + 1, ..self });
        }
        self.over.set(Some(self.depth));
        None
    }

    fn encode<E: ser::Error>(self) -> Result<Self, E> {
        self.deeper().ok_or_else(|| E::custom("nested too deep"))
    }

    fn decode<E: de::Error>(self) -> Result<Self, E> {
        self.deeper().ok_or_else(|| E::custom("nested too deep"))
    }
}

/// A value to encode, with a limit on its levels; sets `over` if it has more.
pub(super) struct Encoded<'v, T: ?Sized> {
    value: &'v T,
    levels: Levels<'v>,
}

impl<'v, T: ?Sized> Encoded<'v, T> {
    pub(super) fn new(value: &'v T, most: u32, over: &'v Cell<Option<u32>>) -> Self {
        Encoded { value, levels: Levels::new(most, over) }
    }
}

impl<T: Serialize + ?Sized> Serialize for Encoded<'_, T> {
    #[inline]
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(Within { inner: to, levels: self.levels })
    }
}

/// Decodes a value, with a limit on its levels; sets `over` if there are more.
pub(super) fn decode<'d, T: Deserialize<'d>, D: Deserializer<'d>>(
    from: D,
    most: u32,
    over: &Cell<Option<u32>>,
) -> Result<T, D::Error> {
    T::deserialize(Within { inner: from, levels: Levels::new(most, over) })
}

/// A serde object, with the levels that are left for its contents.
struct Within<'l, I> {
    inner: I,
    levels: Levels<'l>,
}

macro_rules! encode_plain {
    ($($method:ident($($arg:ident: $type:ty),*);)+) => {$(
        #[inline]
        fn $method(self, $($arg: $type),*) -> Result<S::Ok, S::Error> {
            self.inner.$method($($arg),*)
        }
    )+};
}

macro_rules! encode_many {
    ($($method:ident($($arg:ident: $type:ty),*) -> $many:ident;)+) => {$(
        #[inline]
        fn $method(self, $($arg: $type),*) -> Result<Within<'l, S::$many>, S::Error> {
            let levels = self.levels.encode()?;
            Ok(Within { inner: self.inner.$method($($arg),*)?, levels })
        }
    )+};
}

impl<'l, S: Serializer> Serializer for Within<'l, S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Within<'l, S::SerializeSeq>;
    type SerializeTuple = Within<'l, S::SerializeTuple>;
    type SerializeTupleStruct = Within<'l, S::SerializeTupleStruct>;
    type SerializeTupleVariant = Within<'l, S::SerializeTupleVariant>;
    type SerializeMap = Within<'l, S::SerializeMap>;
    type SerializeStruct = Within<'l, S::SerializeStruct>;
    type SerializeStructVariant = Within<'l, S::SerializeStructVariant>;

    encode_plain! {
        serialize_bool(v: bool);
        serialize_i8(v: i8);
        serialize_i16(v: i16);
        serialize_i32(v: i32);
        serialize_i64(v: i64);
        serialize_i128(v: i128);
        serialize_u8(v: u8);
        serialize_u16(v: u16);
        serialize_u32(v: u32);
        serialize_u64(v: u64);
        serialize_u128(v: u128);
        serialize_f32(v: f32);
        serialize_f64(v: f64);
        serialize_char(v: char);
        serialize_str(v: &str);
        serialize_bytes(v: &[u8]);
        serialize_none();
        serialize_unit();
        serialize_unit_struct(name: &'static str);
        serialize_unit_variant(name: &'static str, index: u32, variant: &'static str);
    }

    encode_many! {
        serialize_seq(len: Option<usize>) -> SerializeSeq;
        serialize_tuple(len: usize) -> SerializeTuple;
        serialize_tuple_struct(name: &'static str, len: usize) -> SerializeTupleStruct;
        serialize_tuple_variant(name: &'static str, index: u32, variant: &'static str, len: usize) -> SerializeTupleVariant;
        serialize_map(len: Option<usize>) -> SerializeMap;
        serialize_struct(name: &'static str, len: usize) -> SerializeStruct;
        serialize_struct_variant(name: &'static str, index: u32, variant: &'static str, len: usize) -> SerializeStructVariant;
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        let levels = self.levels.encode()?;
        self.inner.serialize_some(&Encoded { value, levels })
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let levels = self.levels.encode()?;
        self.inner.serialize_newtype_struct(name, &Encoded { value, levels })
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let levels = self.levels.encode()?;
        self.inner.serialize_newtype_variant(name, index, variant, &Encoded { value, levels })
    }

    fn collect_str<T: fmt::Display + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.collect_str(value)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! encode_fields {
    ($($many:ident: $method:ident($($key:ident)?);)+) => {$(
        impl<S: ser::$many> ser::$many for Within<'_, S> {
            type Ok = S::Ok;
            type Error = S::Error;

            #[inline]
            fn $method<T: Serialize + ?Sized>(
                &mut self,
                $($key: &'static str,)?
                value: &T,
            ) -> Result<(), S::Error> {
                self.inner.$method($($key,)? &Encoded { value, levels: self.levels })
            }

            #[inline]
            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        }
    )+};
}

encode_fields! {
    SerializeSeq: serialize_element();
    SerializeTuple: serialize_element();
    SerializeTupleStruct: serialize_field();
    SerializeTupleVariant: serialize_field();
    SerializeStruct: serialize_field(key);
    SerializeStructVariant: serialize_field(key);
}

impl<S: ser::SerializeMap> ser::SerializeMap for Within<'_, S> {
    type Ok = S::Ok;
    type Error = S::Error;

    #[inline]
    fn serialize_key<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.inner.serialize_key(&Encoded { value, levels: self.levels })
    }

    #[inline]
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.inner.serialize_value(&Encoded { value, levels: self.levels })
    }

    #[inline]
    fn end(self) -> Result<S::Ok, S::Error> {
        self.inner.end()
    }
}

macro_rules! decode_any {
    ($($method:ident($($arg:ident: $type:ty),*);)+) => {$(
        #[inline]
        fn $method<V: Visitor<'d>>(self, $($arg: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method($($arg,)* Within { inner: visitor, levels: self.levels })
        }
    )+};
}

impl<'d, D: Deserializer<'d>> Deserializer<'d> for Within<'_, D> {
    type Error = D::Error;

    decode_any! {
        deserialize_any();
        deserialize_bool();
        deserialize_i8();
        deserialize_i16();
        deserialize_i32();
        deserialize_i64();
        deserialize_i128();
        deserialize_u8();
        deserialize_u16();
        deserialize_u32();
        deserialize_u64();
        deserialize_u128();
        deserialize_f32();
        deserialize_f64();
        deserialize_char();
        deserialize_str();
        deserialize_string();
        deserialize_bytes();
        deserialize_byte_buf();
        deserialize_option();
        deserialize_unit();
        deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str);
        deserialize_seq();
        deserialize_tuple(len: usize);
        deserialize_tuple_struct(name: &'static str, len: usize);
        deserialize_map();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
        deserialize_identifier();
        deserialize_ignored_any();
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! visit_plain {
    ($($method:ident($type:ty);)+) => {$(
        #[inline]
        fn $method<E: de::Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )+};
}

impl<'d, V: Visitor<'d>> Visitor<'d> for Within<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit_plain! {
        visit_bool(bool);
        visit_i8(i8);
        visit_i16(i16);
        visit_i32(i32);
        visit_i64(i64);
        visit_i128(i128);
        visit_u8(u8);
        visit_u16(u16);
        visit_u32(u32);
        visit_u64(u64);
        visit_u128(u128);
        visit_f32(f32);
        visit_f64(f64);
        visit_char(char);
        visit_str(&str);
        visit_borrowed_str(&'d str);
        visit_string(String);
        visit_bytes(&[u8]);
        visit_borrowed_bytes(&'d [u8]);
        visit_byte_buf(Vec<u8>);
    }

    #[inline]
    fn visit_none<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    #[inline]
    fn visit_unit<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    #[inline]
    fn visit_some<D: Deserializer<'d>>(self, from: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Within { inner: from, levels: self.levels.decode()? })
    }

    #[inline]
    fn visit_newtype_struct<D: Deserializer<'d>>(self, from: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Within { inner: from, levels: self.levels.decode()? })
    }

    #[inline]
    fn visit_seq<A: SeqAccess<'d>>(self, from: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Within { inner: from, levels: self.levels.decode()? })
    }

    #[inline]
    fn visit_map<A: MapAccess<'d>>(self, from: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Within { inner: from, levels: self.levels.decode()? })
    }

    /// Counted where the variant has contents.
    #[inline]
    fn visit_enum<A: EnumAccess<'d>>(self, from: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(Within { inner: from, levels: self.levels })
    }
}

impl<'d, T: DeserializeSeed<'d>> DeserializeSeed<'d> for Within<'_, T> {
    type Value = T::Value;

    #[inline]
    fn deserialize<D: Deserializer<'d>>(self, from: D) -> Result<T::Value, D::Error> {
        self.inner.deserialize(Within { inner: from, levels: self.levels })
    }
}

impl<'d, A: SeqAccess<'d>> SeqAccess<'d> for Within<'_, A> {
    type Error = A::Error;

    #[inline]
    fn next_element_seed<T: DeserializeSeed<'d>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        self.inner.next_element_seed(Within { inner: seed, levels: self.levels })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'d, A: MapAccess<'d>> MapAccess<'d> for Within<'_, A> {
    type Error = A::Error;

    #[inline]
    fn next_key_seed<T: DeserializeSeed<'d>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        self.inner.next_key_seed(Within { inner: seed, levels: self.levels })
    }

    #[inline]
    fn next_value_seed<T: DeserializeSeed<'d>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.next_value_seed(Within { inner: seed, levels: self.levels })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'l, 'd, A: EnumAccess<'d>> EnumAccess<'d> for Within<'l, A> {
    type Error = A::Error;
    type Variant = Within<'l, A::Variant>;

    #[inline]
    fn variant_seed<T: DeserializeSeed<'d>>(
        self,
        seed: T,
    ) -> Result<(T::Value, Self::Variant), A::Error> {
        let levels = self.levels;
        let (value, variant) = self.inner.variant_seed(Within { inner: seed, levels })?;
        Ok((value, Within { inner: variant, levels }))
    }
}

impl<'d, A: VariantAccess<'d>> VariantAccess<'d> for Within<'_, A> {
    type Error = A::Error;

    #[inline]
    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    #[inline]
    fn newtype_variant_seed<T: DeserializeSeed<'d>>(self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.newtype_variant_seed(Within { inner: seed, levels: self.levels.decode()? })
    }

    #[inline]
    fn tuple_variant<V: Visitor<'d>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.inner.tuple_variant(len, Within { inner: visitor, levels: self.levels })
    }

    #[inline]
    fn struct_variant<V: Visitor<'d>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.inner.struct_variant(fields, Within { inner: visitor, levels: self.levels })
    }
}
