//! [`SharedInfo`]: the contents of the header of shared memory, and their encoding (pure).
//!
//! Little-endian, at fixed offsets; bytes behind the last field are zero. It is written once, before the header's file is sealed, and is read
//! from a file that the seals keep from changing: each number is loaded once, checked, and used.
//!
//! # Invariants
//! 1. No bytes make it panic, and an accepted header is consistent: the elements lie inside the memory, whose size is a multiple of the
//!    granularity (`any_bytes_are_a_header_or_refused`).
#![forbid(unsafe_code)]

use std::any::type_name;
use std::fmt::Write;

use crate::backend::DeviceKind;
use crate::error::shared::SharedProblem;
use crate::memory::Element;

/// The length of the header's file.
pub(super) const HEADER_BYTES: usize = 256;
const MAGIC: [u8; 8] = *b"gpuawait";
const VERSION: u32 = 1;
/// A flag beside the kind: the memory may change.
const MUTABLE: u32 = 1 << 16;
/// Room for the element type's name.
const NAME_BYTES: usize = 128;

/// The description of sealed memory, readable by any holder of its [descriptors](crate::SharedDescriptors).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedInfo {
    /// The kind of device that the memory belongs to.
    pub kind: DeviceKind,
    /// The GPU's UUID; zeros on a host device, since all host devices share one memory.
    pub uuid: [u8; 16],
    /// The number of elements.
    pub len: u64,
    /// The name of the element type, cut to 128 bytes.
    pub element: String,
    /// The size of an element.
    pub element_bytes: u32,
    /// The alignment of an element, in bytes.
    pub alignment: u32,
    /// The size of the memory: a multiple of `granularity_bytes`.
    pub size_bytes: u64,
    /// The unit in which the GPU allocates such memory.
    pub granularity_bytes: u64,
    /// The number that it was [sealed](crate::SharedBuffer::seal) with.
    pub generation: u64,
    /// The digest of the elements' bytes; see [`SharedBuffer::seal`](crate::SharedBuffer::seal). Zero for memory that may change.
    pub digest: u64,
    /// Whether the memory may change: it is passed from one process to the next, and never sealed.
    pub is_mutable: bool,
}

/// An element type's name, truncated to fit the header.
fn name_of<T>() -> &'static str {
    let name = type_name::<T>();
    let end = (0..=NAME_BYTES.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

fn element(name: &str, bytes: u32, alignment: u32) -> String {
    format!("`{name}` ({bytes} bytes, aligned to {alignment})")
}

/// A device's name in the format of `nvidia-smi -L`.
fn device(kind: DeviceKind, uuid: &[u8; 16]) -> String {
    if kind == DeviceKind::Host {
        return "a host device".to_owned();
    }
    let mut text = "GPU".to_owned();
    for (at, byte) in uuid.iter().enumerate() {
        let dash = if [0, 4, 6, 8, 10].contains(&at) { "-" } else { "" };
        // Writing to a string never fails.
        let _ = write!(text, "{dash}{byte:02x}");
    }
    text
}

impl SharedInfo {
    /// The description of `len` elements of a type, not sealed yet.
    pub(super) fn of<T: Element>(kind: DeviceKind, uuid: [u8; 16], len: u64) -> Self {
        SharedInfo {
            kind,
            uuid,
            len,
            element: name_of::<T>().to_owned(),
            element_bytes: size_of::<T>() as u32,
            alignment: align_of::<T>() as u32,
            size_bytes: 0,
            granularity_bytes: 0,
            generation: 0,
            digest: 0,
            is_mutable: false,
        }
    }

    /// Rejects memory that is not as expected.
    pub(super) fn check(&self, expected: &SharedInfo) -> Result<(), SharedProblem> {
        let SharedInfo { kind, uuid, len, generation, is_mutable, .. } = expected;
        if self.is_mutable && !is_mutable {
            return Err(SharedProblem::NotSealed);
        }
        if *is_mutable && !self.is_mutable {
            let reason = "of memory that is sealed for good".to_owned();
            return Err(SharedProblem::NotShared { what: "header", reason });
        }
        let type_of =
            |info: &SharedInfo| element(&info.element, info.element_bytes, info.alignment);
        if (self.kind, &self.uuid) != (*kind, uuid) {
            let (expected, found) = (device(*kind, uuid), device(self.kind, &self.uuid));
            return Err(SharedProblem::Device { expected, found });
        }
        if type_of(self) != type_of(expected) {
            let (expected, found) = (type_of(expected), type_of(self));
            return Err(SharedProblem::ElementType { expected, found });
        }
        if self.len != *len {
            return Err(SharedProblem::Len { expected: *len, found: self.len });
        }
        if self.generation != *generation {
            let (expected, found) = (*generation, self.generation);
            return Err(SharedProblem::Generation { expected, found });
        }
        Ok(())
    }

    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let kind: u32 = match self.kind {
            DeviceKind::Cuda => 1,
            DeviceKind::Host => 2,
        };
        let kind = kind | if self.is_mutable { MUTABLE } else { 0 };
        let name = &self.element.as_bytes()[..self.element.len().min(NAME_BYTES)];
        let fields: [&[u8]; 13] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &kind.to_le_bytes(),
            &self.uuid,
            &self.size_bytes.to_le_bytes(),
            &self.granularity_bytes.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.element_bytes.to_le_bytes(),
            &self.alignment.to_le_bytes(),
            &self.generation.to_le_bytes(),
            &self.digest.to_le_bytes(),
            &(name.len() as u32).to_le_bytes(),
            name,
        ];
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        for field in fields {
            bytes[at..][..field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }

    /// Reads a header that another process wrote.
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Self, SharedProblem> {
        let bad =
            |reason: &str| SharedProblem::NotShared { what: "header", reason: reason.to_owned() };
        let mut fields = Fields(bytes);
        if fields.take::<8>() != MAGIC {
            return Err(bad("it does not begin as one"));
        }
        let version = fields.number();
        if version != VERSION {
            return Err(SharedProblem::Version { expected: VERSION, found: version });
        }
        let kind = fields.number();
        let is_mutable = kind & MUTABLE != 0;
        let kind = match kind & !MUTABLE {
            1 => DeviceKind::Cuda,
            2 => DeviceKind::Host,
            _ => return Err(bad("its kind of device is unknown")),
        };
        let uuid = fields.take();
        let [size_bytes, granularity_bytes, len] = std::array::from_fn(|_| fields.long());
        let [element_bytes, alignment] = std::array::from_fn(|_| fields.number());
        let [generation, digest] = std::array::from_fn(|_| fields.long());
        let name_bytes = fields.number() as usize;
        let name = fields.0.get(..name_bytes.min(NAME_BYTES + 1));
        let name =
            name.filter(|name| name.len() == name_bytes).and_then(|name| str::from_utf8(name).ok());
        let Some(name) = name else { return Err(bad("its element type has no name")) };
        if element_bytes == 0 || !alignment.is_power_of_two() {
            return Err(bad("its elements have no size or alignment"));
        }
        if !granularity_bytes.is_power_of_two()
            || !size_bytes.is_multiple_of(granularity_bytes)
            || isize::try_from(size_bytes).is_err()
        {
            return Err(bad("its size is no multiple of its granularity"));
        }
        let needed = len.saturating_mul(u64::from(element_bytes));
        if needed > size_bytes {
            return Err(SharedProblem::Size { expected: needed, found: size_bytes });
        }
        let element = name.to_owned();
        Ok(SharedInfo {
            kind,
            uuid,
            len,
            element,
            element_bytes,
            alignment,
            size_bytes,
            granularity_bytes,
            generation,
            digest,
            is_mutable,
        })
    }
}

/// The unread rest of a header.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        // The fields in front of the name are shorter than a header.
        let (field, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *field
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn infos() -> impl Strategy<Value = SharedInfo> {
        let sizes = (0..40_u32, 0..9_u64, 1..64_u32, 0..5_u32);
        (any::<bool>(), any::<[u8; 16]>(), sizes, any::<(u64, u64, u64)>(), "\\PC{0,40}").prop_map(
            |(
                cuda,
                uuid,
                (power, pieces, element_bytes, align),
                (len, generation, digest),
                name,
            )| {
                let granularity_bytes = 1_u64 << power;
                let size_bytes = granularity_bytes * pieces;
                let mut element = name;
                while element.len() > NAME_BYTES {
                    element.pop();
                }
                SharedInfo {
                    kind: if cuda { DeviceKind::Cuda } else { DeviceKind::Host },
                    uuid,
                    len: len % (size_bytes / u64::from(element_bytes) + 1),
                    element,
                    element_bytes,
                    alignment: 1 << align,
                    size_bytes,
                    granularity_bytes,
                    generation,
                    digest,
                    is_mutable: digest % 2 == 0,
                }
            },
        )
    }

    fn fits(info: &SharedInfo) -> bool {
        let needed = u128::from(info.len) * u128::from(info.element_bytes);
        needed <= u128::from(info.size_bytes)
            && info.size_bytes.is_multiple_of(info.granularity_bytes)
            && info.element.len() <= NAME_BYTES
            && info.element_bytes > 0
    }

    proptest! {
        #[test]
        fn a_header_says_what_was_written(info in infos()) {
            prop_assert_eq!(SharedInfo::from_bytes(&info.to_bytes()), Ok(info));
        }

        /// Arbitrary bytes, and real headers with a few bytes changed.
        #[test]
        fn any_bytes_are_a_header_or_refused(
            info in infos(),
            noise in prop::collection::vec((0..HEADER_BYTES, any::<u8>()), 0..6),
            wild in prop::option::weighted(0.3, prop::collection::vec(any::<u8>(), HEADER_BYTES)),
        ) {
            let mut bytes = info.to_bytes();
            if let Some(wild) = wild {
                bytes[16..].copy_from_slice(&wild[16..]);
            }
            noise.into_iter().for_each(|(at, byte)| bytes[at] = byte);
            if let Ok(read) = SharedInfo::from_bytes(&bytes) {
                prop_assert!(fits(&read), "{:?}", read);
            }
        }
    }
}
