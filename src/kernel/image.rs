//! A kernel image: the argument of [`Module::load`](crate::Module::load).
//!
//! The driver is passed an address and no length. It recognises the format by the first bytes, reads PTX up to a NUL, and trusts the
//! sizes in a binary. So text is checked before the driver sees it; for a binary, its author vouches.
//!
//! | format | begins with | checked |
//! |---|---|---|
//! | PTX | printable text | no NUL inside, nothing that the driver could take for another format |
//! | cubin | `7f 45 4c 46`, ELF | these bytes |
//! | fatbin | `50 ed 55 ba` | these bytes |
//!
//! # Invariants
//! 1. Text is not read past its end, nor as a binary (`text_is_text`), and compilers' output is accepted
//!    (`machine_code_reaches_the_driver_as_such`).

use std::borrow::Cow;

use crate::error::image::ImageProblem;

const ELF: [u8; 4] = *b"\x7fELF";
const FATBIN: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();

/// A kernel image: PTX text, or the bytes of a cubin or fatbin.
#[derive(Clone, Debug)]
pub struct Image {
    pub(super) name: String,
    pub(super) form: Form,
    pub(super) bytes: Cow<'static, [u8]>,
    /// Instances of templates, each with its name in the image.
    pub(super) instances: Vec<(String, String)>,
}

/// The format of an image's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    Ptx,
    Binary,
}

impl Image {
    /// Makes an image from PTX text; the driver compiles it for its GPU.
    ///
    /// Loading refuses text that contains a NUL, or begins like a binary so that the driver would take it for one
    /// ([`ErrorDetail::BadImage`](crate::ErrorDetail::BadImage)).
    pub fn ptx(text: impl Into<Cow<'static, str>>) -> Self {
        let bytes = match text.into() {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
        Image { name: "PTX".to_owned(), form: Form::Ptx, bytes, instances: Vec::new() }
    }

    /// Makes an image from the bytes of a cubin or fatbin.
    ///
    /// Loading refuses bytes that begin like neither ([`ErrorDetail::BadImage`](crate::ErrorDetail::BadImage)).
    /// The driver trusts everything else in them.
    ///
    /// # Safety
    /// The bytes are a whole cubin or fatbin as written by a CUDA compiler. The driver is not given their
    /// length and runs what they contain; a truncated or modified file can crash the process.
    ///
    /// # Examples
    /// ```
    /// # fn f(bytes: Vec<u8>) -> gpu_await::Image {
    /// // SAFETY: `bytes` is what `nvcc --cubin` wrote, whole.
    /// unsafe { gpu_await::Image::binary(bytes) }.named("model.cubin")
    /// # }
    /// ```
    pub unsafe fn binary(bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        Image::compiled(Form::Binary, bytes.into())
    }

    /// The output of a compiler in this process.
    pub(crate) fn compiled(form: Form, bytes: Cow<'static, [u8]>) -> Self {
        let name = "binary".to_owned();
        Image { name, form, bytes, instances: Vec::new() }
    }

    /// Adds the names that the instances of templates have in the image.
    pub(crate) fn with_instances(mut self, instances: Vec<(String, String)>) -> Self {
        self.instances = instances;
        self
    }

    /// Names the image for messages.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The name in the image of an entry, or of an instance of a template.
    pub(super) fn lowered<'n>(&'n self, entry: &'n str) -> &'n str {
        let instance = self.instances.iter().find(|(written, _)| written == entry);
        instance.map_or(entry, |(_, lowered)| lowered)
    }

    /// The names of its kernels, for errors: as many as can be found without the driver. Refuses what the driver would misread.
    pub(super) fn check(&self) -> Result<Vec<String>, ImageProblem> {
        match self.form {
            Form::Ptx => check_text(&self.bytes),
            Form::Binary => check_binary(&self.bytes),
        }
    }
}

/// The names of the kernels of PTX. Refuses what the driver would misread.
pub(super) fn check_text(text: &[u8]) -> Result<Vec<String>, ImageProblem> {
    let printable = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    let wrong = match text.first() {
        Some(first) if !printable(*first) => Some(0),
        _ => text.iter().position(|byte| *byte == 0),
    };
    match wrong {
        Some(at) => Err(ImageProblem::NotText { at, byte: text[at] }),
        None => Ok(entries(&String::from_utf8_lossy(text))),
    }
}

/// The names after PTX's `.entry`.
fn entries(text: &str) -> Vec<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "_$%".contains(c);
    let names = text.split(".entry").skip(1).filter_map(|rest| {
        let name = rest.strip_prefix(char::is_whitespace)?.trim_start();
        let name = &name[..name.find(|c| !is_of_name(c)).unwrap_or(name.len())];
        (!name.is_empty()).then(|| name.to_owned())
    });
    names.collect()
}

fn check_binary(bytes: &[u8]) -> Result<Vec<String>, ImageProblem> {
    let mut first = [0; 4];
    first.iter_mut().zip(bytes).for_each(|(first, byte)| *first = *byte);
    match first {
        ELF | FATBIN => Ok(sections(bytes)),
        _ => Err(ImageProblem::UnknownForm { first }),
    }
}

/// The names after `.text.` in section names, wherever these are: a kernel's code has a section of its own. Compressed images have no
/// readable ones.
fn sections(bytes: &[u8]) -> Vec<String> {
    const CODE: &[u8] = b".text.";
    let mut names: Vec<String> = bytes
        .split(|byte| *byte == 0)
        .filter_map(|name| Some(&name[name.windows(CODE.len()).position(|part| part == CODE)?..]))
        .filter_map(|name| std::str::from_utf8(&name[CODE.len()..]).ok())
        .map(str::to_owned)
        .collect();
    // Other sections of a kernel contain its name too, and a fatbin has it for several architectures.
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a binary that are looked at: the beginning, and section names.
    fn binary(first: [u8; 4]) -> Vec<u8> {
        [&first[..], b"\x02\x01\0\0.strtab\0.text.ab\0.rela.text.ab\0.bss\0.text.\xff\0"].concat()
    }

    #[test]
    fn other_forms_are_refused() {
        let others = [b"PK\x03\x04", b"BC\xC0\xDE", &0x4662_43B1_u32.to_le_bytes(), &[0; 4]];
        for first in others {
            let problem = check_binary(&binary(*first)).unwrap_err();
            assert_eq!(problem, ImageProblem::UnknownForm { first: *first });
        }
        for (short, first) in [(&b""[..], [0; 4]), (b"\x7fEL", *b"\x7fEL\0")] {
            assert_eq!(check_binary(short), Err(ImageProblem::UnknownForm { first }));
        }
    }

    #[test]
    fn text_is_text() {
        for text in
            ["", ".version 7.0", "\n\t// a comment\n.version 8.0", "no PTX at all", "// \u{fc}"]
        {
            check_text(text.as_bytes()).unwrap();
        }
        let elf = binary(ELF);
        let cases = [(&elf[..], 0, 0x7f), (b"// a\0b", 4, 0), (b"// a\0", 4, 0), (b"\0", 0, 0)];
        for (text, at, byte) in cases {
            assert_eq!(check_text(text), Err(ImageProblem::NotText { at, byte }));
        }
    }

    #[test]
    fn names_of_kernels() {
        let ptx = ".visible .entry a(\n)\n{ }\n.entry\n\t_Z1bPf ()\n.entrypoint .entry";
        assert_eq!(check_text(ptx.as_bytes()).unwrap(), ["a", "_Z1bPf"]);
        for first in [ELF, FATBIN] {
            assert_eq!(check_binary(&binary(first)).unwrap(), ["ab"]);
        }
        let said = |kernel: &str, there: &[&str]| {
            let there = there.iter().map(|name| (*name).to_owned()).collect();
            let (image, kernel) = ("x.cu".to_owned(), kernel.to_owned());
            crate::ErrorDetail::NoSuchKernel { image, kernel, there }.to_string()
        };
        let in_a_namespace = said("square", &["other", "_ZN4mine6squareEPf"]);
        assert!(
            in_a_namespace.contains("`_ZN4mine6squareEPf`, its name in C++"),
            "{in_a_namespace}"
        );
        assert_eq!(said("c", &["a", "_Z1bPf"]), "`x.cu` has no kernel `c`, but `a`, `_Z1bPf`");
        assert!(said("c", &["a"; 10]).ends_with("`a`, `a` and 2 more"));
        assert!(said("c", &[]).ends_with("a template needs `CudaSource::instance`"));
    }
}
