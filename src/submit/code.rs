//! What keeps a kernel's code loaded, without the kernel's type.
#![forbid(unsafe_code)]

use std::sync::Arc;

/// A kernel's code, loaded as long as this is there.
pub(crate) trait KernelCode: Send + Sync {
    fn name(&self) -> &Arc<str>;
}

/// A kernel whose code can be shared, without its type.
pub(crate) trait ShareCode {
    fn share(&self) -> Arc<dyn KernelCode>;
    fn address(&self) -> *const ();
}

impl<C: KernelCode + 'static> ShareCode for Arc<C> {
    fn share(&self) -> Arc<dyn KernelCode> {
        self.clone()
    }

    fn address(&self) -> *const () {
        Arc::as_ptr(self).cast()
    }
}
