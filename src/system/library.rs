//! NVIDIA's libraries, found at run time.
//!
//! | where | searched |
//! |---|---|
//! | the file or folder named by the library's environment variable | nowhere else if it is set |
//! | otherwise the loader's search path, then `lib64` under `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda` | its names, in order |

use std::env;
use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::thread::exit;

/// A library and where it may be.
pub struct Search {
    /// The environment variable that names the library or its folder.
    pub variable: &'static str,
    /// The file names; the first found wins.
    pub names: &'static [&'static str],
}

/// Why no library was found.
pub struct NotFound {
    /// The names and paths that were tried.
    pub looked_for: Vec<String>,
    /// The loader's message for one of them.
    pub reason: String,
}

impl Search {
    /// The first of the candidates that `open` can use.
    ///
    /// # Errors
    /// None of them can be used.
    pub fn find<L>(
        &self,
        open: impl Fn(&Path) -> std::result::Result<L, String>,
    ) -> std::result::Result<L, NotFound> {
        let candidates = self.candidates();
        let mut reasons = Vec::new();
        for path in &candidates {
            match open(path) {
                Ok(library) => return Ok(library),
                Err(reason) => reasons.push(reason),
            }
        }
        // A file that exists and cannot be used makes a better error than files that are missing.
        let there = candidates.iter().position(|path| path.exists()).unwrap_or(0);
        let reason = reasons.swap_remove(there);
        let looked_for = candidates.iter().map(|path| path.display().to_string()).collect();
        Err(NotFound { looked_for, reason })
    }

    fn candidates(&self) -> Vec<PathBuf> {
        if let Some(named) = env::var_os(self.variable).filter(|named| !named.is_empty()) {
            let named = PathBuf::from(named);
            return match named.is_dir() {
                true => self.names.iter().map(|name| named.join(name)).collect(),
                false => vec![named],
            };
        }
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
        let toolkits = toolkits.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
        let in_toolkits = toolkits
            .flat_map(|root| self.names.iter().map(move |name| root.join("lib64").join(name)));
        self.names.iter().map(PathBuf::from).chain(in_toolkits).collect()
    }
}

/// What is in `cell`, or what `find` finds. A failure is not remembered: what was missing may be there later.
///
/// # Errors
/// Those of `find`.
pub fn once<T, E>(
    cell: &'static OnceLock<T>,
    find: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<&'static T, E> {
    if let Some(found) = cell.get() {
        return Ok(found);
    }
    let found = find()?;
    // Another thread may have been first.
    Ok(cell.get_or_init(|| found))
}

/// Opens a library; an error is the loader's own message.
#[cfg(feature = "cuda")]
pub(crate) fn open(path: &Path) -> std::result::Result<libloading::Library, String> {
    // SAFETY: NVIDIA's libraries run only their own initializers.
    opened(unsafe { libloading::Library::new(path) })
}

/// Registers this crate's exit handler again, after that of a library that was just loaded; an error is the loader's own message.
///
/// # Errors
/// The library could not be loaded.
pub fn opened<L, E: StdError>(
    library: std::result::Result<L, E>,
) -> std::result::Result<L, String> {
    exit::register_again();
    library.map_err(|error| error.source().map_or(error.to_string(), |why| why.to_string()))
}
