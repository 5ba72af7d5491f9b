//! The kernel images, as built by `kernels/build.py`: packed, each with the facts that a launch needs.
//!
//! An image holds PTX, tuned for compute capability 8.0, and machine code, tuned for 9.0. Tuning parameters belong to the code that they
//! were compiled into, so the two come from one build and are read together.
//!
//! # Invariants
//! 1. The manifest and the archive were built from the sources in the repository (`images_are_of_these_sources`).
//! 2. Every image unpacks to the contents that the manifest states (`every_image_unpacks`).
//! 3. No image with a kernel that loads by `ld.global.nc` is said to wait first (`constants_are_not_early`).
//! 4. No length that a launch of these kernels is given makes them overflow the integers that they count in
//!    (`parts_fit_the_kernels_integers`, `tiles_fit_the_kernels_integers`).
#![forbid(unsafe_code)]

use std::io::Read;
use std::ops::Range;

use ruzstd::decoding::StreamingDecoder;

/// The kernels of an algorithm for a type.
pub(super) struct PackedImage {
    pub(super) name: &'static str,
    general: PackedCode,
    hopper: PackedCode,
}

/// An image for one kind of device.
pub(super) struct PackedCode {
    packed: Range<usize>,
    bytes: usize,
    facts: &'static [(&'static str, u32)],
}

static ARCHIVE: &[u8] = include_bytes!("../kernels/images.bin");
static IMAGES: &[PackedImage] = include!("../kernels/manifest.rs");

/// Families with kernels that load by `ld.global.nc`.
const LOAD_CONSTANTS: [&str; 5] =
    ["reduce", "reduce_combined", "segmented", "segmented_combined", "histogram"];

/// Selects one of an image's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tuned {
    /// PTX, for every device from 8.0 on.
    General,
    /// Machine code for 9.0.
    Hopper,
}

impl PackedImage {
    /// Whether its kernels wait for the work before them in their stream before anything that can have an effect: `build.py` checks that they begin
    /// with a wait. That proves nothing for a kernel that loads through the cache for constant data, since the compiler may move such loads across
    /// a wait: it assumes that nobody writes the data, and the work before these kernels does.
    pub(super) fn waits_first(&self, tuned: Tuned) -> bool {
        tuned == Tuned::Hopper && !LOAD_CONSTANTS.iter().any(|family| self.is_of(family))
    }

    /// Whether its name is that of a family and an element type.
    fn is_of(&self, family: &str) -> bool {
        let rest = self.name.strip_prefix(family).and_then(|rest| rest.strip_prefix('_'));
        rest.is_some_and(|element| !element.contains('_'))
    }

    pub(super) fn find(name: &str) -> Option<&'static PackedImage> {
        IMAGES.iter().find(|image| image.name == name)
    }

    pub(super) fn code(&self, tuned: Tuned) -> &PackedCode {
        match tuned {
            Tuned::General => &self.general,
            Tuned::Hopper => &self.hopper,
        }
    }
}

impl PackedCode {
    /// The code; `None` if the archive does not match the manifest.
    pub(super) fn unpack(&self) -> Option<Vec<u8>> {
        let packed = ARCHIVE.get(self.packed.clone())?;
        let mut bytes = Vec::with_capacity(self.bytes);
        StreamingDecoder::new(packed).ok()?.read_to_end(&mut bytes).ok()?;
        (bytes.len() == self.bytes).then_some(bytes)
    }

    /// A number of a kernel's tuning.
    pub(super) fn fact(&self, name: &str) -> Option<u32> {
        let at = self.facts.binary_search_by_key(&name, |(fact, _)| fact).ok()?;
        Some(self.facts[at].1)
    }
}

#[cfg(test)]
mod tests {
    use super::{IMAGES, PackedCode, Tuned};
    use sha2::{Digest, Sha256};

    /// More elements than any GPU holds.
    const MOST_ELEMENTS: u64 = 1 << 40;

    /// The name of each image, its codes, and those of its facts whose names end this way: each with the start of the fact's name.
    fn facts(end: &str) -> Vec<(&'static str, &'static PackedCode, &'static str, u32)> {
        let codes = IMAGES.iter().flat_map(|image| {
            [Tuned::General, Tuned::Hopper].map(|tuned| (image.name, image.code(tuned)))
        });
        let facts = codes.flat_map(|(name, code)| {
            code.facts.iter().map(move |(fact, value)| (name, code, *fact, *value))
        });
        let ended = facts.filter_map(|(name, code, fact, value)| {
            Some((name, code, fact.strip_suffix(end)?, value))
        });
        ended.collect()
    }

    /// For the kernels that count the elements of a launch in `int`.
    #[test]
    fn parts_fit_the_kernels_integers() {
        let parts = facts("_part");
        for (name, code, kernel, part) in &parts {
            let what = format!("{kernel} of {name}");
            let tile = code.fact(&format!("{kernel}_tile")).expect(&what);
            assert!(*part > 0 && part % tile == 0, "{what}: {part} in tiles of {tile}");
            // CUB's agents count to the end of a tile; these kernels add a tile and divide.
            assert!(i32::try_from(part + tile).is_ok(), "{what}: {part} and {tile}");
        }
        // All that look back at counts in `int`: selections and runs; of these, each kernel that has tiles.
        let in_parts = |name: &str| name.starts_with("select_") || name.starts_with("runs_");
        let tiles = facts("_tile").into_iter().filter(|(name, ..)| in_parts(name)).count();
        assert_eq!(parts.len(), tiles);
        assert!(tiles > 100, "{tiles}");
        // A pass of a sort looks back at counts of 30 bits, and takes whole tiles of fewer than 2^28 elements.
        for (name, .., tile) in facts("pass_tile") {
            assert!(tile < 1 << 27, "{name}: {tile}");
        }
    }

    /// For the kernels that count elements in 64 bits, and tiles in `int` and in a grid's extent.
    #[test]
    fn tiles_fit_the_kernels_integers() {
        let in_tiles = |name: &str| {
            ["reduce_", "scan_", "histogram_"].iter().any(|family| name.starts_with(family))
        };
        let of_sorts = facts("count_tile").into_iter().chain(facts("pass_tile"));
        let tiles = facts("_tile").into_iter().filter(|(name, ..)| in_tiles(name)).chain(of_sorts);
        for (name, _, kernel, tile) in tiles {
            let tiles = MOST_ELEMENTS.div_ceil(u64::from(tile));
            assert!(tiles < i32::MAX as u64, "{kernel} of {name}: {tiles} tiles");
        }
    }

    #[test]
    fn every_image_unpacks() {
        for image in IMAGES {
            for tuned in [Tuned::General, Tuned::Hopper] {
                let code = image.code(tuned).unpack().expect(image.name);
                let begins =
                    if tuned == Tuned::General { &b".version 8.0"[..] } else { b"\x7fELF" };
                assert!(code.starts_with(begins), "{} {tuned:?}", image.name);
            }
        }
    }

    /// The general code is text; the code for 9.0 has the same loads.
    #[test]
    fn constants_are_not_early() {
        for image in IMAGES {
            let text = image.code(Tuned::General).unpack().expect(image.name);
            let text = String::from_utf8(text).expect("it is text");
            let loads = text.contains("ld.global.nc");
            assert_eq!(image.waits_first(Tuned::Hopper), !loads, "{}", image.name);
            assert!(!image.waits_first(Tuned::General));
        }
    }

    #[test]
    fn images_are_of_these_sources() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let mut sources: Vec<_> = std::fs::read_dir(folder)
            .expect("it is in the package")
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| {
                let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
                name.ends_with(".cu") || name.ends_with(".cuh") || name == "build.py"
            })
            .collect();
        sources.sort();
        let mut digest = Sha256::new();
        for path in sources {
            digest.update(path.file_name().expect("a name").as_encoded_bytes());
            digest.update([0]);
            digest.update(std::fs::read(&path).expect("it is readable"));
        }
        let hash: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let manifest = include_str!("../kernels/manifest.rs");
        let told = format!("// sources-sha256: {hash}");
        assert!(manifest.contains(&told), "run `python3 kernels/build.py`");
    }
}
