//! Problems of a kernel image, and mismatches with a kernel's declaration.
#![forbid(unsafe_code)]

use std::fmt;

use super::DriverCode;

/// The offset and size of a kernel's parameter among the launch's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct ParamLayout {
    pub offset_bytes: usize,
    pub size_bytes: usize,
}

impl ParamLayout {
    /// The offsets of parameters of these sizes and alignments, in bytes.
    pub(crate) fn in_order<const N: usize>(params: [(usize, usize); N]) -> Vec<ParamLayout> {
        let mut end = 0_usize;
        let place = params.into_iter().map(|(size_bytes, alignment)| {
            let offset_bytes = end.next_multiple_of(alignment);
            end = offset_bytes + size_bytes;
            ParamLayout { offset_bytes, size_bytes }
        });
        place.collect()
    }
}

impl fmt::Display for ParamLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ParamLayout { offset_bytes, size_bytes } = self;
        write!(f, "{size_bytes} bytes at offset {offset_bytes}")
    }
}

/// The first parameter whose declaration differs from the compiled one.
pub(super) fn difference(declared: &[ParamLayout], compiled: &[ParamLayout]) -> String {
    let either =
        (0..declared.len().max(compiled.len())).find(|n| declared.get(*n) != compiled.get(*n));
    let Some(number) = either else { return String::new() };
    let side = |params: &[ParamLayout], what: &str| match params.get(number) {
        Some(layout) => format!("{what} {layout}"),
        None => format!("not {what}"),
    };
    let (here, there) = (side(declared, "declared"), side(compiled, "compiled"));
    format!("parameter {number} is {here}, {there}")
}

/// The names that an image has instead of a kernel's.
pub(super) fn instead(kernel: &str, there: &[String]) -> String {
    const MOST: usize = 8;
    let mangled = format!("{}{kernel}", kernel.len());
    let is_it = |name: &&String| name.starts_with("_Z") && name.contains(&mangled);
    if let Some(name) = there.iter().find(is_it) {
        return format!(", but `{name}`, its name in C++: declare it `extern \"C\" __global__`");
    }
    let quoted: Vec<_> = there.iter().take(MOST).map(|name| format!("`{name}`")).collect();
    match there.len().saturating_sub(MOST) {
        _ if there.is_empty() => {
            ", and no name of one was found in it: a template needs `CudaSource::instance`"
                .to_owned()
        }
        0 => format!(", but {}", quoted.join(", ")),
        more => format!(", but {} and {more} more", quoted.join(", ")),
    }
}

/// Why a kernel declared `programmatic` is refused, judging by its PTX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum NotProgrammatic {
    /// The PTX targets older GPUs, which lack the wait.
    #[error("its PTX is for `{target}`; compile it for sm_90 or later (`nvcc -arch=sm_90`)")]
    Target { target: String },
    /// There is no wait.
    #[error(
        "it does not execute `griddepcontrol.wait`: begin it with `asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");`"
    )]
    NoWait,
    /// Something before the wait can have an effect, leave the kernel, or bypass the wait.
    #[error(
        "`{instruction}` is in front of its `griddepcontrol.wait`, which must be the first statement, in front of any guard"
    )]
    TooEarly { instruction: String },
    /// It loads through a cache that assumes that nobody is writing; the preceding launch may be.
    #[error(
        "`{instruction}` asserts that nobody writes what it loads; write no `__restrict__` and no `__ldg`, and use no textures"
    )]
    LoadsConstants { instruction: String },
    /// The text contains something that this crate does not understand, so nothing is known about the kernel.
    #[error("its PTX is not understood from `{found}` on; take the PTX as the compiler writes it")]
    NotUnderstood { found: String },
}

/// Why a kernel image did not load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum ImageProblem {
    /// The driver refused it.
    #[error("{0}")]
    Driver(DriverCode),
    /// A binary begins like neither a cubin nor a fatbin. The driver was not called.
    #[error(
        "it begins with {first:02x?}, as neither a cubin nor a fatbin does; PTX is `Image::ptx`"
    )]
    UnknownForm { first: [u8; 4] },
    /// A byte that cannot occur in PTX. The driver was not called.
    #[error(
        "byte {at} is {byte:#04x}, which PTX does not contain; a cubin or fatbin is `Image::binary`"
    )]
    NotText { at: usize, byte: u8 },
}
