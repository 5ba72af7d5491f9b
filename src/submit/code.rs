//! [`KernelLaunch`]: a kernel launch without the kernel's type, and the code that it keeps loaded.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::outcome::LateOutcomes;
use super::raw::{Raw, Refusal};
use crate::backend::{ArgBlock, Function, LaunchShape};
use crate::error::Error;

/// A kernel's code, loaded as long as this exists.
pub(crate) trait KernelCode: Send + Sync {
    fn name(&self) -> &Arc<str>;

    /// Whether its library is notified of each launch, if it is captured work.
    fn is_told(&self) -> bool {
        false
    }

    /// Notifies the library of the launch that is being submitted, and enters its outcomes; the library may refuse it.
    fn tell(&self, _raw: &Raw<'_>, _outcomes: &LateOutcomes) -> std::result::Result<(), Refusal> {
        Ok(())
    }

    /// Notifies the library of a launch that was refused before [`tell`](Self::tell).
    fn tell_refused(&self, _error: &Error) {}
}

/// A kernel whose code can be shared, without its type.
pub(crate) trait ShareCode {
    fn share(&self) -> Arc<dyn KernelCode>;
}

impl<C: KernelCode + 'static> ShareCode for Arc<C> {
    fn share(&self) -> Arc<dyn KernelCode> {
        self.clone()
    }
}

/// A launch that is not submitted or recorded yet.
pub(crate) struct KernelLaunch<'a> {
    pub(super) code: &'a dyn ShareCode,
    /// Where the code is. No other has the address as long as it is shared.
    pub(super) address: usize,
    pub(crate) function: &'a Function,
    pub(crate) shape: LaunchShape,
    pub(crate) args: &'a ArgBlock,
}

impl<'a> KernelLaunch<'a> {
    #[inline]
    pub(crate) fn new<C: KernelCode + 'static>(
        code: &'a Arc<C>,
        function: &'a Function,
        shape: LaunchShape,
        args: &'a ArgBlock,
    ) -> Self {
        KernelLaunch { code, address: Arc::as_ptr(code).addr(), function, shape, args }
    }

    /// Whether a graph takes it.
    pub(crate) fn can_be_listed(&self) -> bool {
        !self.shape.cooperative && !self.shape.grid.has_clusters()
    }
}
