//! The kernel images, as built by `kernels/algorithms/build.py`: packed, each with the facts that a launch needs.
//!
//! An image holds PTX, tuned for compute capability 8.0, and machine code, tuned for 9.0. Tuning parameters belong to the code that they
//! were compiled into, so the two come from one build and are read together.
//!
//! # Invariants
//! 1. The manifest and the archive were built from the sources in the repository (`images_are_of_these_sources`).
//! 2. Every image unpacks to the contents that the manifest states (`every_image_unpacks`).
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

static ARCHIVE: &[u8] = include_bytes!("../../kernels/algorithms/images.bin");
static IMAGES: &[PackedImage] = include!("../../kernels/algorithms/manifest.rs");

/// Which of an image's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tuned {
    /// PTX, for every device from 8.0 on.
    General,
    /// Machine code for 9.0.
    Hopper,
}

impl PackedImage {
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
    /// The code; `None` if the archive is not that of the manifest.
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
    use super::{IMAGES, Tuned};
    use sha2::{Digest, Sha256};

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

    #[test]
    fn images_are_of_these_sources() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/algorithms");
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
        let manifest = include_str!("../../kernels/algorithms/manifest.rs");
        let told = format!("// sources-sha256: {hash}");
        assert!(manifest.contains(&told), "run `python3 kernels/algorithms/build.py`");
    }
}
