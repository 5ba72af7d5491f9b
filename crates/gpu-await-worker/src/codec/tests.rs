//! What any bytes decode to, and how deep values nest.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::{MOST_LEVELS, Refused};
use crate::codec;

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        drop(codec::decode::<Nested>(&bytes));
        drop(codec::decode::<(Vec<String>, BTreeMap<u64, Vec<f64>>)>(&bytes));
    }

    #[test]
    fn values_come_back(value in any::<(u8, i64, String, Vec<(f64, Option<bool>)>)>()) {
        let bytes = codec::encode(&value).unwrap();
        let again: (u8, i64, String, Vec<(f64, Option<bool>)>) = codec::decode(&bytes).unwrap();
        prop_assert_eq!(codec::encode(&again).unwrap(), bytes.clone());
        let mut longer = bytes;
        longer.push(0);
        prop_assert!(codec::decode::<(u8, i64, String, Vec<(f64, Option<bool>)>)>(&longer).is_err());
    }
}

/// A value that nests.
#[derive(Debug, Serialize, Deserialize)]
enum Nested {
    End,
    One(Box<Nested>),
    Many(Vec<Nested>),
}

#[test]
fn deep_values_are_refused() {
    // A million levels in a megabyte; a length without elements; a length that no memory has.
    let deep = vec![1u8; 1 << 20];
    assert_eq!(codec::decode::<Nested>(&deep).map(drop), Err(Refused::TooDeep(MOST_LEVELS)));
    assert!(codec::decode::<Nested>(&[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).is_err());
    let shallow = [[1u8; 20].as_slice(), &[0]].concat();
    assert!(matches!(codec::decode(&shallow), Ok(Nested::One(_))));
}

#[test]
fn as_many_levels_both_ways() {
    const MOST: usize = MOST_LEVELS as usize;
    let check = |most: Range<usize>| {
        let is_too_deep = |refused: &Refused, levels: usize| match refused {
            Refused::TooDeep(limit) => {
                most.contains(&(*limit as usize)) && levels > *limit as usize
            }
            Refused::Because(_) => false,
        };
        for levels in [0, 1, 16, MOST - 1, MOST, MOST + 1, 500, 5000] {
            let nested = (0..levels).fold(Nested::End, |inner, _| Nested::One(Box::new(inner)));
            let bytes = [vec![1; levels], vec![0]].concat();
            let encoded = codec::encode(&nested);
            flatten(nested);
            let decoded = codec::decode::<Nested>(&bytes).map(flatten);
            match encoded {
                Ok(encoded) => assert_eq!(encoded, bytes),
                Err(refused) => assert!(is_too_deep(&refused, levels), "{levels}: {refused:?}"),
            }
            match decoded {
                Ok(()) => assert!(levels <= MOST),
                Err(refused) => assert!(is_too_deep(&refused, levels), "{levels}: {refused:?}"),
            }
        }
        // Each kind of level.
        type Inner = Vec<BTreeMap<u8, Result<Box<Option<u8>>, ()>>>;
        let inner: Inner = vec![BTreeMap::from([(1, Ok(Box::new(Some(2))))])];
        let all = Some((inner, std::num::Wrapping(3u8)));
        let bytes = codec::encode(&all).unwrap();
        assert_eq!(codec::decode(&bytes), Ok(all));
    };
    // On a small stack, as threads of services may have, and on a large one.
    for (stack, limits) in [(64 << 10, 16..MOST + 1), (4 << 20, MOST..MOST + 1)] {
        let thread = std::thread::Builder::new().stack_size(stack);
        thread.spawn(move || check(limits)).unwrap().join().unwrap();
    }
}

/// Drops it without a recursion.
fn flatten(mut nested: Nested) {
    while let Nested::One(inner) = nested {
        nested = *inner;
    }
}

#[test]
fn the_hint_is_for_what_it_explains() {
    use std::os::unix::ffi::OsStrExt;

    #[derive(Serialize)]
    struct Flat {
        #[serde(flatten)]
        all: BTreeMap<String, u8>,
    }
    #[derive(Debug, Serialize, Deserialize)]
    struct Skips {
        #[serde(skip_serializing_if = "Option::is_none")]
        first: Option<u8>,
    }
    struct Refuses;
    impl Serialize for Refuses {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("not today"))
        }
    }
    let text = |refused: Refused| refused.to_string();
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(b"/\xff"));
    let not_utf8 = text(codec::encode(&vec![(1, Some(path))]).unwrap_err());
    let refuses = text(codec::encode(&BTreeMap::from([(1, Refuses)])).unwrap_err());
    for text in [not_utf8, refuses] {
        assert!(!text.contains("`untagged`") && text.contains("refuses"), "{text}");
    }
    let flat = text(codec::encode(&Flat { all: BTreeMap::new() }).unwrap_err());
    let skips = codec::encode(&Skips { first: None }).unwrap();
    let skips = text(codec::decode::<Skips>(&skips).unwrap_err());
    for text in [flat, skips] {
        assert!(text.contains("`flatten`"), "{text}");
    }
}
