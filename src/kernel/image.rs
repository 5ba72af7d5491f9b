//! A kernel image: the argument of [`Module::load`](crate::Module::load).

use std::borrow::Cow;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Ptx,
    Binary,
}

impl Image {
    /// Makes an image from PTX text; the driver compiles it for its GPU.
    ///
    /// Loading refuses text that contains a NUL or begins like a binary, which the driver would take it for
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
    /// Loading refuses bytes whose internal sizes exceed them, such as a truncated file
    /// ([`ErrorDetail::BadImage`](crate::ErrorDetail::BadImage) with the figures). The driver trusts
    /// everything else in them.
    ///
    /// # Safety
    /// The bytes are a whole cubin or fatbin as a CUDA compiler wrote it. The driver does not learn their
    /// length and runs what they contain; modified bytes can crash the process.
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
}
