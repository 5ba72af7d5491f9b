//! [`ForeignError`]: another library's error, carried by an [`Error`](crate::Error).
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

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
