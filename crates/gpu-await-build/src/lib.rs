//! Compiles CUDA C++ to PTX in a `build.rs`, for kernels declared with `kernel!` of `gpu-await`.
//!
//! ```no_run
//! // build.rs; gpu-await-build is one of [build-dependencies]
//! fn main() -> Result<(), gpu_await_build::Error> {
//!     gpu_await_build::ptx("kernels/mine.cu").arch("compute_80").compile()
//! }
//! ```
//! ```text
//! kernel! {
//!     pub unsafe fn scale(a: f32, x: &mut [f32], n: u64 = x.len());
//!     launch = LaunchConfig::for_elements(x.len());
//!     ptx = include_str!(concat!(env!("OUT_DIR"), "/mine.ptx"));
//! }
//! ```
//!
//! A file has any number of kernels, which become one module. Declare them `extern "C"`: other names are mangled in PTX. `kernel!` takes such a
//! name as `entry`, also that of an explicit instance of a template (`template __global__ void scale<float>(..);`).
//!
//! # The compiler
//! The first of these that is found; no GPU is needed.
//!
//! | what | where |
//! |---|---|
//! | the NVRTC that `GPU_AWAIT_NVRTC` names, a file or its folder | only there if it is set |
//! | `nvcc` | `PATH`; `bin` of `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`; packages of the `python3` on `PATH` |
//! | NVRTC | the loader's path; `lib64` of these; `lib` of `CONDA_PREFIX`; packages of that `python3` |
//!
//! `nvcc` needs a C++ compiler, NVRTC does not. NVRTC finds NVIDIA's own headers (`cuda_fp16.h`) in the toolkit or Python package that it
//! belongs to. PTX of a newer CUDA needs a newer driver: that of CUDA 12.0 loads on drivers from 525 on.
//!
//! # Keeping the PTX
//! With [`committed`](Ptx::committed), a package builds even without a compiler, as on docs.rs, and from the same PTX everywhere.
// Tests may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod compiler;
mod error;
mod inputs;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, process};

use crate::compiler::{Compiler, VARIABLES};
pub use crate::error::{Error, Result, Stale};
use crate::inputs::{Inputs, sha256};

/// Names a file of CUDA C++, relative to the package. Nothing is done before [`Ptx::compile`].
pub fn ptx(source: impl Into<PathBuf>) -> Ptx {
    let (source, arch) = (source.into(), "compute_75".to_owned());
    Ptx { source, arch, options: Vec::new(), folders: Vec::new(), committed: false }
}

/// A file of CUDA C++ and how to compile it; made by [`ptx`].
#[derive(Clone, Debug)]
#[must_use = "nothing is compiled before `compile`"]
pub struct Ptx {
    source: PathBuf,
    arch: String,
    options: Vec<String>,
    folders: Vec<PathBuf>,
    committed: bool,
}

impl Ptx {
    /// Sets the oldest architecture that can run it, `compute_75` by default: the driver compiles PTX further, for the GPU at hand.
    pub fn arch(mut self, arch: impl Into<String>) -> Self {
        self.arch = arch.into();
        self
    }

    /// Adds a compiler option; both compilers know `-DTILE=64`, `--std=c++17`, `--fmad=false`, `--use_fast_math`.
    /// Files are also looked for in the folders of `-I`, `--include-path`, `-isystem` and `--system-include`, as of [`include`](Self::include).
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Also looks for included files in a folder. Files beside the including file are found without it.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folders.push(folder.into());
        self
    }

    /// Keeps the PTX beside the source, `mine.ptx` for `mine.cu`, to be committed.
    ///
    /// Its first lines record what it was made from: a digest of the source and of the files that it includes (not those that a macro names, nor
    /// NVIDIA's), the compiler, the options; and a digest of the PTX that follows. If all but the compiler still match, it is used. Otherwise it is
    /// rewritten, with a warning, or refused where there is no compiler. To have it made by another compiler, delete it.
    pub fn committed(mut self) -> Self {
        self.committed = true;
        self
    }

    /// Writes the PTX into `OUT_DIR`, as `mine.ptx` for `mine.cu` in any folder, and tells cargo when to do so again: when a file that was read
    /// changes, or one appears in a subfolder of the package where an included file was looked for in vain. Blocks while the compiler runs.
    ///
    /// # Errors
    /// There is no compiler, and no usable committed PTX; the source does not compile; the script has written other PTX of that name; the
    /// source is itself named `.ptx`; a file cannot be read or written. A `main` that returns the error prints what to do.
    pub fn compile(&self) -> Result<()> {
        let out = env::var_os("OUT_DIR").filter(|out| !out.is_empty()).ok_or_else(|| {
            let error = io::Error::other("not set, or empty: only a build script has it");
            Error::file(Path::new("OUT_DIR"), error)
        })?;
        for variable in VARIABLES {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        let text = self.made(Compiler::find)?;
        let path = Path::new(&out).join(self.kept().file_name().unwrap_or_default());
        let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        let others = written.iter().find(|(one, ..)| *one == path);
        if let Some((_, other, _)) = others.filter(|(.., digest)| *digest != sha256(&text)) {
            let sources = [other.clone(), self.source.clone()];
            return Err(Error::SameName { path, sources });
        }
        write(&path, &text)?;
        written.push((path, self.source.clone(), sha256(&text)));
        Ok(())
    }

    /// The PTX with its first lines: the committed one, or what the compiler from `find` makes.
    fn made(
        &self,
        find: impl FnOnce() -> std::result::Result<Compiler, Vec<String>>,
    ) -> Result<String> {
        let (kept, mut why) = (self.kept(), None);
        if kept == self.source {
            let error = io::Error::other("the PTX would overwrite its source: name a `.cu`");
            return Err(Error::file(&kept, error));
        }
        let [mut folders, forced] = [&FOLDERS[..], &FORCED[..]].map(|names| self.values(names));
        folders.extend(self.folders.iter().map(|folder| folder.display().to_string()));
        let folders: Vec<_> = folders.into_iter().map(PathBuf::from).collect();
        let inputs = Inputs::read(&self.source, &folders, &forced)?;
        inputs.tell_cargo();
        if self.committed {
            println!("cargo::rerun-if-changed={}", kept.display());
            match fs::read_to_string(&kept) {
                Ok(text) => match self.stale(&text, &inputs.digest) {
                    None => return Ok(text),
                    stale => why = stale,
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound => why = Some(Stale::Missing),
                Err(error) => return Err(Error::file(&kept, error)),
            }
        }
        let compiler = find().map_err(|looked_for| Error::NoCompiler {
            source: self.source.clone(),
            looked_for,
            stale: why.clone(),
        })?;
        let folders = self.folders.iter().map(|folder| format!("-I{}", folder.display()));
        let options = self.options().into_iter().chain(folders);
        let ptx = compiler.compile(&self.source, options.collect())?;
        // PTX of any compiler has this line.
        let version = ptx.lines().find_map(|line| line.rsplit_once(", V"));
        let version = version.map_or("unknown", |(_, version)| version);
        let (digest, options) = (&inputs.digest, self.options().join(" "));
        let mut body = String::new();
        for line in ptx.trim_matches(['\0', '\n']).lines() {
            body.extend([line.trim_end(), "\n"]);
        }
        let (compiler, whole) = (compiler.name(), sha256(&body));
        let lines = [
            format!("{SOURCE}{digest}"),
            format!("{COMPILER}{compiler} {version} {options}"),
            format!("{BODY}{whole}"),
        ];
        let text = format!("{}\n{body}", lines.join("\n"));
        if let Some(why) = why {
            write(&kept, &text)?;
            println!("cargo::warning={} {why}: compiled, and to be committed", kept.display());
        }
        Ok(text)
    }

    fn kept(&self) -> PathBuf {
        self.source.with_extension("ptx")
    }

    /// What the PTX depends on besides the files and the compiler.
    fn options(&self) -> Vec<String> {
        let arch = format!("--gpu-architecture={}", self.arch);
        [arch].into_iter().chain(self.options.iter().cloned()).collect()
    }

    /// The values of options with these names: `-Ione`, `-I one`, `--include-path=one,two`.
    fn values(&self, names: &[&str]) -> Vec<String> {
        let mut options = self.options.iter();
        let mut values = Vec::new();
        while let Some(option) = options.next() {
            let value = names.iter().find_map(|name| option.trim().strip_prefix(name));
            let value = value.map(|value| value.trim_start_matches(['=', ' ']));
            let value = if value == Some("") { options.next().map(String::as_str) } else { value };
            values.extend(value.into_iter().flat_map(|value| value.split(',')).map(str::to_owned));
        }
        values
    }

    /// Why a committed PTX does not match these inputs.
    fn stale(&self, text: &str, digest: &str) -> Option<Stale> {
        let text = text.replace("\r\n", "\n");
        let mut lines = text.splitn(4, '\n');
        let made_of = lines.next().and_then(|line| line.strip_prefix(SOURCE));
        let compiler = lines.next().and_then(|line| line.strip_prefix(COMPILER));
        // The options follow the compiler's name and version.
        let options = compiler.and_then(|line| line.splitn(3, ' ').nth(2));
        let Some(options) = options.filter(|_| made_of == Some(digest)) else {
            return Some(Stale::Source);
        };
        let (committed, now) = (options.to_owned(), self.options().join(" "));
        if committed != now {
            return Some(Stale::Options { committed, now });
        }
        let whole = lines.next().and_then(|line| line.strip_prefix(BODY));
        (whole != Some(&*sha256(lines.next().unwrap_or_default()))).then_some(Stale::Cut)
    }
}

/// What the first three lines of a PTX begin with; the last is a digest of the text that follows it.
const SOURCE: &str = "// source-sha256: ";
const COMPILER: &str = "// compiler: ";
const BODY: &str = "// ptx-sha256: ";

/// Options of either compiler that name folders to look for included files in, and those that name files to include first.
const FOLDERS: [&str; 4] = ["-I", "--include-path", "-isystem", "--system-include"];
const FORCED: [&str; 2] = ["-include", "--pre-include"];

/// What this script has written into `OUT_DIR`: the file, its source, its digest.
static WRITTEN: Mutex<Vec<(PathBuf, PathBuf, String)>> = Mutex::new(Vec::new());

/// Writes a file unless it already has that text; whole or not at all.
fn write(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let partial = path.with_extension(format!("{}.partial", process::id()));
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    written.map_err(|error| Error::file(path, error))
}
