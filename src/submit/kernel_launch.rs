//! [`KernelLaunch`]: a kernel launch with the kernel's type erased, and the code that it keeps loaded.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::outcome::LateOutcomes;
use super::raw::{Raw, Refusal};
use crate::backend::{ArgBlock, Function, LaunchShape};
use crate::error::Error;

/// A kernel's code, loaded as long as this exists.
pub(crate) trait KernelCode: Send + Sync {
    fn name(&self) -> &Arc<str>;

    /// Whether a library is notified of each launch; only for captured work.
    fn is_told(&self) -> bool {
        false
    }

    /// Notifies the library of the launch being submitted, and enters its outcomes; the library may refuse the launch.
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

/// A launch that is not yet submitted or recorded.
pub(crate) struct KernelLaunch<'a> {
    pub(super) code: &'a dyn ShareCode,
    /// The address of the code, unique while the code is shared.
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

    /// Whether it can be part of a graph.
    pub(crate) fn can_be_listed(&self) -> bool {
        !self.shape.cooperative && !self.shape.grid.has_clusters()
    }
}
