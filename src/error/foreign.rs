//! [`ForeignError`]: another library's error, carried by an [`Error`](crate::Error); [`LibraryStatus`]: a number that such a library returned.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::ErrorKind;

/// An error of another library, shared. It dereferences to that error: `cause.downcast_ref::<TheirError>()`.
///
/// Two are equal only if they are the very same error.
#[derive(Clone)]
pub struct ForeignError(Arc<dyn Error + Send + Sync>);

impl Deref for ForeignError {
    type Target = dyn Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl<E: Error + Send + Sync + 'static> From<Arc<E>> for ForeignError {
    fn from(error: Arc<E>) -> Self {
        ForeignError(error)
    }
}

impl From<Box<dyn Error + Send + Sync>> for ForeignError {
    fn from(error: Box<dyn Error + Send + Sync>) -> Self {
        ForeignError(error.into())
    }
}

impl PartialEq for ForeignError {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ForeignError {}

impl fmt::Debug for ForeignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl fmt::Display for ForeignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&*self.0, f)
    }
}

/// A status that another library returned, with the name of the call. The source of an
/// [`ErrorDetail::Foreign`](crate::ErrorDetail::Foreign).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{call} returned {code}{}", .name.map(|name| format!(" ({name})")).unwrap_or_default())]
pub struct LibraryStatus {
    /// The library's entry point, e.g. `cublasLtMatmul`.
    pub call: &'static str,
    /// The status, as a number: it may be newer than this crate.
    pub code: i32,
    /// Its name in the library's header, if this crate knows it.
    pub name: Option<&'static str>,
}

impl LibraryStatus {
    pub(super) fn kind(&self) -> ErrorKind {
        match self.name {
            Some("CUBLAS_STATUS_ALLOC_FAILED" | "CUFFT_ALLOC_FAILED") => ErrorKind::OutOfMemory,
            Some("CUBLAS_STATUS_NOT_SUPPORTED" | "CUFFT_NOT_SUPPORTED") => ErrorKind::Unsupported,
            _ => ErrorKind::Foreign,
        }
    }
}
