//! What goes wrong, with what to do about it: cargo prints the error of a build script's `main` by `Debug`, so that gives the same text.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::{fmt, io};

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no PTX. `Debug` prints the same text as `Display`.
#[non_exhaustive]
#[expect(missing_docs, reason = "of the fields: their names say it")]
pub enum Error {
    /// Nothing here compiles CUDA C++, and there is no usable committed PTX, if one is kept.
    NoCompiler { source: PathBuf, looked_for: Vec<String>, stale: Option<Stale> },
    /// The compiler refuses the source.
    Compile { source: PathBuf, compiler: &'static str, log: String },
    /// One script makes different PTX of one name, from two sources or from one source with different options.
    SameName { path: PathBuf, sources: [PathBuf; 2] },
    /// A file cannot be read or written.
    File { path: PathBuf, error: io::Error },
}

/// Why a committed PTX is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "of the fields: their names say it")]
pub enum Stale {
    /// There is none.
    Missing,
    /// It was made from another source, or other included files, or does not say from which.
    Source,
    /// It was made with other options.
    Options { committed: String, now: String },
    /// It is not what its compiler wrote, or does not say what that was.
    Cut,
}

impl Error {
    pub(crate) fn file(path: &Path, error: io::Error) -> Error {
        Error::File { path: path.to_owned(), error }
    }
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stale::Missing => f.write_str("was missing"),
            Stale::Source => f.write_str("was of another source, or of other included files"),
            Stale::Options { committed, now } => write!(f, "was of `{committed}`, not of `{now}`"),
            Stale::Cut => f.write_str("was cut short, or changed by hand"),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoCompiler { source, looked_for, stale } => {
                writeln!(f, "nothing here compiles {}.", source.display())?;
                if let Some(stale) = stale {
                    writeln!(
                        f,
                        "The committed {} {stale}.",
                        source.with_extension("ptx").display()
                    )?;
                }
                write!(f, "{INSTALL}Looked for {}.", looked_for.join(", "))
            }
            Error::Compile { source, compiler, log } => {
                write!(f, "{compiler} does not compile {}:\n{log}", source.display())
            }
            Error::SameName { path, sources: [first, second] } => write!(
                f,
                "{} and {} would both become {}. Rename one, or give it a file of its own that includes the other.",
                first.display(),
                second.display(),
                path.display()
            ),
            Error::File { path, error } => write!(f, "{}: {error}", path.display()),
        }
    }
}

const INSTALL: &str = "Install a compiler, for which no GPU is needed:
    pip install nvidia-cuda-nvrtc-cu12        (NVRTC alone; headers such as cuda_fp16.h are in nvidia-cuda-runtime-cu12)
    conda install -c conda-forge cuda-nvrtc
    apt install nvidia-cuda-toolkit           (nvcc, on Debian and Ubuntu)
    or the CUDA toolkit: https://developer.nvidia.com/cuda-downloads
or name a libnvrtc.so by GPU_AWAIT_NVRTC.
";

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
