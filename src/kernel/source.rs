//! [`CudaSource`]: CUDA C++ that is compiled at run time, and what a device keeps of it.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::path::Path;

use parking_lot::Mutex;

use crate::device::home::Home;
use crate::error::Result;
use crate::kernel::image::Image;

/// CUDA C++ to compile with [`Module::compile`](crate::Module::compile), and how.
///
/// Compiled for the device's compute capability, or for the newest below it that the compiler knows.
/// A kernel that is `extern "C"` is found by its name, an instance of a template by
/// [`instance`](Self::instance).
///
/// A device keeps the results of the last 32 sources, with all their options, so that compiling one
/// of them again is quick. It does not look whether a file changed that a source includes by its
/// path; a source with [`include_dir`](Self::include_dir) or [`option`](Self::option) is compiled each time.
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
    text: Cow<'static, str>,
    name: String,
    headers: Vec<(String, String)>,
    instances: Vec<String>,
    options: Vec<String>,
    architecture: Option<String>,
    cubin: bool,
    /// Nothing but what is in here decides what it is compiled to.
    closed: bool,
}

/// What a source is called that nobody named.
const UNNAMED: &str = "source.cu";

impl CudaSource {
    /// A text of CUDA C++.
    pub fn new(text: impl Into<Cow<'static, str>>) -> Self {
        CudaSource {
            text: text.into(),
            name: UNNAMED.to_owned(),
            headers: Vec::new(),
            instances: Vec::new(),
            options: Vec::new(),
            architecture: None,
            cubin: false,
            closed: true,
        }
    }

    /// Names the text in messages and in the compiler's log.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Names the text, if nobody did.
    pub(crate) fn or_named(self, name: &str) -> Self {
        if self.name == UNNAMED { self.named(name) } else { self }
    }

    /// Defines a macro.
    pub fn define(self, name: &str, value: &str) -> Self {
        self.with(format!("--define-macro={name}={value}"))
    }

    /// Gives `#include "name"` a text; no file is read.
    pub fn header(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.headers.push((name.into(), text.into()));
        self
    }

    /// Looks for `#include`d files in a folder.
    pub fn include_dir(self, folder: impl AsRef<Path>) -> Self {
        self.option(format!("--include-path={}", folder.as_ref().display()))
    }

    /// Makes an instance of a template, e.g. `scale<float>`; [`Module::kernel`](crate::Module::kernel)
    /// finds it by that very text.
    pub fn instance(mut self, expression: impl Into<String>) -> Self {
        self.instances.push(expression.into());
        self
    }

    /// Trades accuracy for speed: `--use_fast_math`.
    pub fn fast_math(self) -> Self {
        self.with("--use_fast_math".to_owned())
    }

    /// Bounds the registers of a thread; more of them are spilled to local memory.
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

    /// Compiles to the machine code of this very device instead of PTX. The driver then has nothing
    /// left to compile, and a driver that is older than the compiler, but of the same major version,
    /// loads it where it does not load the PTX.
    pub fn cubin(mut self) -> Self {
        self.cubin = true;
        self
    }

    /// Passes an option of NVRTC as it is, e.g. `--std=c++20`.
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.closed = false;
        self.with(option.into())
    }

    fn with(mut self, option: String) -> Self {
        self.options.push(option);
        self
    }

    /// Compiles it for a device, or takes what was kept. Blocks.
    #[cfg(feature = "cuda")]
    pub(crate) fn image(&self, home: &Home) -> Result<Image> {
        use crate::backend::cuda::nvrtc::{Job, Nvrtc};
        use crate::kernel::image::Form;

        if home.engine.backend.kind() == crate::DeviceKind::Host {
            return Err(no_cuda(home));
        }
        let cache = home.get_or_load(|| Ok::<_, crate::Error>(Cache::default()))?;
        if let Some(image) = cache.find(self) {
            return Ok(image);
        }
        let nvrtc = Nvrtc::get()?;
        let architecture = match &self.architecture {
            Some(architecture) => architecture.clone(),
            None => {
                let (major, minor) = home.engine.backend.limits().compute_capability;
                self.target(10 * major + minor, &nvrtc.architectures())
            }
        };
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend_from_slice(&self.options);
        let CudaSource { text, name, headers, instances, cubin, .. } = self;
        let job = Job { text, name, headers, instances, options: &options, cubin: *cubin };
        let compiled = nvrtc.compile(&job)?;
        if !compiled.log.is_empty() {
            tracing::warn!(file = name, log = compiled.log, "the compiler warns");
        }
        let form = if *cubin { Form::Binary } else { Form::Ptx };
        let mut image = compiled.image;
        if form == Form::Ptx {
            // The compiler marks the end of the text.
            while image.pop_if(|last| *last == 0).is_some() {}
        }
        let image = Image::compiled(form, image.into());
        let image = image.named(name).with_instances(compiled.names);
        if self.closed {
            cache.keep(self, &image);
        }
        Ok(image)
    }

    /// Without CUDA there are host devices only.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn image(&self, home: &Home) -> Result<Image> {
        Err(no_cuda(home))
    }

    /// The architecture for a device. PTX of an older one runs as well; machine code does not.
    fn target(&self, device: u32, known: &[u32]) -> String {
        let older = known.iter().copied().filter(|known| *known <= device).max();
        match self.cubin {
            true => format!("sm_{device}"),
            false => format!("compute_{}", older.unwrap_or(device)),
        }
    }
}

/// The text, with nothing else said.
impl From<&'static str> for CudaSource {
    fn from(text: &'static str) -> Self {
        CudaSource::new(text)
    }
}

fn no_cuda(home: &Home) -> crate::Error {
    let what = "CUDA C++ (on a host device a kernel is a Rust function: `Kernel::host`)";
    let device = home.engine.label().to_owned();
    crate::ErrorDetail::Unsupported { what, device }.into()
}

/// What a device keeps: the last sources that were compiled for it, the last used in front.
#[derive(Default)]
struct Cache(Mutex<Vec<(CudaSource, Image)>>);

impl Cache {
    const MOST: usize = 32;

    fn find(&self, source: &CudaSource) -> Option<Image> {
        let mut kept = self.0.lock();
        let at = kept.iter().position(|(known, _)| known == source)?;
        kept[..=at].rotate_right(1);
        Some(kept[0].1.clone())
    }

    fn keep(&self, source: &CudaSource, image: &Image) {
        let mut kept = self.0.lock();
        kept.retain(|(known, _)| known != source);
        kept.insert(0, (source.clone(), image.clone()));
        kept.truncate(Self::MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_the_newest_that_device_and_compiler_both_know() {
        let known = [50, 60, 70, 80, 90];
        let ptx = CudaSource::new("");
        assert_eq!(ptx.target(90, &known), "compute_90");
        assert_eq!(ptx.target(89, &known), "compute_80");
        assert_eq!(ptx.target(120, &known), "compute_90");
        // Left to the compiler to refuse, in its own words.
        assert_eq!(ptx.target(35, &known), "compute_35");
        assert_eq!(ptx.target(75, &[]), "compute_75");
        assert_eq!(ptx.cubin().target(89, &known), "sm_89");
    }

    #[test]
    fn the_last_used_sources_are_kept_with_all_their_options() {
        let cache = Cache::default();
        let source = |number: usize| CudaSource::new(format!("// {number}"));
        let image = |number: usize| Image::ptx("").named(number.to_string());
        for number in 0..Cache::MOST {
            cache.keep(&source(number), &image(number));
        }
        assert!(cache.find(&source(0).fast_math()).is_none());
        assert!(cache.find(&source(0).cubin()).is_none());
        assert!(cache.find(&source(0).header("a.h", "")).is_none());
        let found = format!("{:?}", cache.find(&source(0)).unwrap());
        assert_eq!(found, format!("{:?}", image(0)));
        // 0 was used last, so that 1 goes first.
        cache.keep(&source(100), &image(100));
        assert!(cache.find(&source(1)).is_none());
        assert!(cache.find(&source(0)).is_some() && cache.find(&source(100)).is_some());
        // Kept once more, it takes no second place.
        cache.keep(&source(100), &image(100));
        assert!(cache.find(&source(2)).is_some());
    }
}
