//! [`CudaSource`]: CUDA C++ that is compiled at run time.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::path::Path;

use crate::device::home::Home;
use crate::error::{Error, ErrorDetail, Result};
use crate::kernel::image::Image;

/// CUDA C++ source and compiler options, for [`Module::compile`](crate::Module::compile).
///
/// It is compiled for the device's compute capability, or for the newest below it that the compiler supports.
/// An `extern "C"` kernel is found by its name, an instance of a template by [`instance`](Self::instance).
///
/// # Caching
/// A source is compiled once if its result depends on nothing else: it has no
/// [`include_dir`](Self::include_dir), no [`option`](Self::option), and includes only its own
/// [`header`](Self::header)s. (If the words `include`, `embed`, `__has_include`, `__DATE__`, `__TIME__` and
/// the like occur anywhere else, even in a comment, it is compiled each time.)
///
/// - In memory, a device keeps the results of the last 32 sources.
/// - On disk, they are kept for other processes, by source, options, architecture and NVRTC's major and minor
///   version: in the folder named by the environment variable `GPU_AWAIT_CACHE_DIR`, else in `gpu-await`
///   under `XDG_CACHE_HOME` or `~/.cache`; nowhere if the variable is empty. The cache holds at most 256 MiB:
///   the least recently used entries are removed. Folders and files that another user could have written are
///   ignored. Problems with the cache never make a compilation fail.
///
/// # Examples
/// ```
/// use gpu_await::CudaSource;
/// let source = CudaSource::new("template <typename T> __global__ void zero(T* x) { *x = T(SEED); }")
///     .named("zero.cu")
///     .define("SEED", "7")
///     .instance("zero<float>");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a source does nothing until it is compiled"]
pub struct CudaSource {
    pub(super) text: Cow<'static, str>,
    pub(super) name: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) instances: Vec<String>,
    pub(super) options: Vec<String>,
    pub(super) architecture: Option<String>,
    pub(super) cubin: bool,
    /// An option may make the compiled result depend on something outside the source.
    pub(super) has_options: bool,
}

/// The name of an unnamed source.
const UNNAMED: &str = "source.cu";

impl CudaSource {
    /// Makes one from a text of CUDA C++.
    pub fn new(text: impl Into<Cow<'static, str>>) -> Self {
        CudaSource {
            text: text.into(),
            name: UNNAMED.to_owned(),
            headers: Vec::new(),
            instances: Vec::new(),
            options: Vec::new(),
            architecture: None,
            cubin: false,
            has_options: false,
        }
    }

    /// Names the text in messages and in the compiler's log.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Compiles a declared kernel's text, which messages call by the kernel's name unless it has its own. To the compiler all unnamed texts have
    /// the same name, so that kernels over the same text share one image.
    pub(super) fn image_of(&self, kernel: &str, home: &Home) -> Result<Image> {
        if self.name != UNNAMED {
            return self.image(home);
        }
        let named = |error: Error| match error.detail() {
            ErrorDetail::Compile { reason, log, .. } => {
                // The compiler saw the shared name.
                let (file, log) = (kernel.to_owned(), log.replace(UNNAMED, kernel));
                let reason = reason.clone();
                ErrorDetail::Compile { file, reason, log }.into()
            }
            _ => error,
        };
        Ok(self.image(home).map_err(named)?.named(kernel))
    }

    /// Defines a macro.
    pub fn define(self, name: &str, value: &str) -> Self {
        self.with(format!("--define-macro={name}={value}"))
    }

    /// Provides the text for `#include "name"`; no file is read.
    pub fn header(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.headers.push((name.into(), text.into()));
        self
    }

    /// Looks for `#include`d files in a folder.
    pub fn include_dir(self, folder: impl AsRef<Path>) -> Self {
        self.option(format!("--include-path={}", folder.as_ref().display()))
    }

    /// Instantiates a template, e.g. `scale<float>`; [`Module::kernel`](crate::Module::kernel) finds the
    /// instance by exactly this text.
    pub fn instance(mut self, expression: impl Into<String>) -> Self {
        self.instances.push(expression.into());
        self
    }

    /// Trades accuracy for speed: `--use_fast_math`.
    pub fn fast_math(self) -> Self {
        self.with("--use_fast_math".to_owned())
    }

    /// Limits the registers of a thread; further values are spilled to local memory.
    pub fn max_registers(self, registers: u32) -> Self {
        self.with(format!("--maxrregcount={registers}"))
    }

    /// Puts line numbers into the code, for profilers.
    pub fn line_info(self) -> Self {
        self.with("--generate-line-info".to_owned())
    }

    /// Compiles for another architecture than the device's, e.g. `compute_70`; `sm_90` with
    /// [`cubin`](Self::cubin).
    pub fn architecture(mut self, architecture: impl Into<String>) -> Self {
        self.architecture = Some(architecture.into());
        self
    }

    /// Compiles to machine code for this device instead of PTX. The driver then has nothing left to compile,
    /// and a driver older than the compiler, but of the same major version, loads it although it would not
    /// load the PTX.
    pub fn cubin(mut self) -> Self {
        self.cubin = true;
        self
    }

    /// Passes an option to NVRTC unchanged, e.g. `--std=c++20`.
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.has_options = true;
        self.with(option.into())
    }

    fn with(mut self, option: String) -> Self {
        self.options.push(option);
        self
    }

    /// Without CUDA there are only host devices.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn image(&self, home: &Home) -> Result<Image> {
        Err(no_cuda(home))
    }
}

pub(super) fn no_cuda(home: &Home) -> Error {
    let what = "CUDA C++ (on a host device a kernel is a Rust function: `Kernel::host`)";
    let device = home.engine.label().to_owned();
    ErrorDetail::Unsupported { what, device }.into()
}

/// The text, with default options.
impl From<&'static str> for CudaSource {
    fn from(text: &'static str) -> Self {
        CudaSource::new(text)
    }
}
