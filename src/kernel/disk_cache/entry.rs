//! The format of an entry: the whole key, the compiled result, and a hash of both at the end.
#![forbid(unsafe_code)]

use crate::backend::cuda::nvrtc::Compiled;

/// The start of an entry; the number is the format's version.
const MAGIC: &[u8] = b"gpu-await compiled 1\n";

/// Everything that determines the compiler's output.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::kernel) struct CacheKey(Vec<u8>);

impl CacheKey {
    /// `fields` in an unambiguous order, with the lengths of lists among them.
    pub(in crate::kernel) fn new<'a>(fields: impl IntoIterator<Item = &'a [u8]>) -> CacheKey {
        let mut key = Vec::new();
        fields.into_iter().for_each(|field| put(&mut key, field));
        CacheKey(key)
    }

    pub(super) fn hash(&self) -> u64 {
        hash(&self.0)
    }
}

pub(super) fn encode(key: &CacheKey, compiled: &Compiled) -> Vec<u8> {
    let mut fields = MAGIC.to_vec();
    put(&mut fields, &key.0);
    put(&mut fields, &compiled.image);
    put(&mut fields, compiled.log.as_bytes());
    for (written, lowered) in &compiled.names {
        put(&mut fields, written.as_bytes());
        put(&mut fields, lowered.as_bytes());
    }
    sealed(fields)
}

fn sealed(mut fields: Vec<u8>) -> Vec<u8> {
    let hash = hash(&fields);
    fields.extend_from_slice(&hash.to_le_bytes());
    fields
}

/// The contents of a whole entry of this key.
pub(super) fn decode(entry: &[u8], key: &CacheKey) -> Option<Compiled> {
    let (fields, end) = entry.split_last_chunk()?;
    if hash(fields) != u64::from_le_bytes(*end) {
        return None;
    }
    let mut fields = fields.strip_prefix(MAGIC)?;
    if take(&mut fields)? != key.0 {
        return None;
    }
    let image = take(&mut fields)?.to_vec();
    let text = |field: &[u8]| String::from_utf8(field.to_vec()).ok();
    let log = text(take(&mut fields)?)?;
    let mut names = Vec::new();
    while !fields.is_empty() {
        names.push((text(take(&mut fields)?)?, text(take(&mut fields)?)?));
    }
    Some(Compiled { image, names, log })
}

/// A field, after its length.
fn put(bytes: &mut Vec<u8>, field: &[u8]) {
    bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
    bytes.extend_from_slice(field);
}

fn take<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (field, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    *bytes = rest;
    Some(field)
}

/// FNV-1a: the same in every build of this crate, and different if any one byte changed.
fn hash(bytes: &[u8]) -> u64 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x100_0000_01b3;
    bytes.iter().fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> CacheKey {
        CacheKey::new([b"nvrtc 12.0".as_slice(), name.as_bytes()])
    }

    fn compiled() -> Compiled {
        let names = vec![("f<int>".to_owned(), "_Z1fIiEvv".to_owned())];
        Compiled { image: vec![7; 20], names, log: "a warning".to_owned() }
    }

    /// Different fields with the same concatenation are different keys.
    #[test]
    fn keys() {
        let fields: [&[&[u8]]; 6] =
            [&[], &[b""], &[b"ab", b"c"], &[b"a", b"bc"], &[b"abc"], &[b"abc", b""]];
        for (at, a) in fields.iter().enumerate() {
            for b in &fields[..at] {
                assert_ne!(CacheKey::new(a.iter().copied()).0, CacheKey::new(b.iter().copied()).0);
            }
        }
    }

    #[test]
    fn a_changed_byte_is_a_miss() {
        let a = key("a");
        let entry = encode(&a, &compiled());
        assert_eq!(decode(&entry, &a), Some(compiled()));
        for at in 0..entry.len() {
            for bit in 0..8 {
                let mut changed = entry.clone();
                changed[at] ^= 1 << bit;
                assert_eq!(decode(&changed, &a), None, "byte {at}, bit {bit}");
            }
            assert_eq!(decode(&entry[..at], &a), None, "cut to {at} bytes");
        }
        assert_eq!(decode(&[&entry[..], b"\0"].concat(), &a), None);
    }

    /// Even if the hash is right.
    #[test]
    fn another_format_or_key_is_a_miss() {
        let a = key("a");
        let entry = encode(&a, &compiled());
        assert_eq!(decode(&entry, &key("b")), None);
        let fields = &entry[..entry.len() - 8];
        let newer = [b"gpu-await compiled 2\n", &fields[MAGIC.len()..]].concat();
        assert_eq!(decode(&sealed(newer), &a), None);
        for at in 0..fields.len() {
            let cut = decode(&sealed(fields[..at].to_vec()), &a);
            // Truncated before the instances, it is complete without them.
            assert!(cut.is_none_or(|cut| cut.names.is_empty()), "cut to {at} bytes");
        }
        for len in [u64::MAX, u64::MAX / 2, 1 << 40].map(u64::to_le_bytes) {
            assert_eq!(decode(&sealed([MAGIC, &len, b"x"].concat()), &a), None);
        }
    }
}
