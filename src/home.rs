//! What the streams of a device share above its completion engine.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::completion::engine::Engine;
use crate::memory::pinned::PinnedPool;

/// The pinned memory of a device, and what is loaded once for it.
pub(crate) struct Home {
    pub(crate) engine: Arc<Engine>,
    pub(crate) pinned: Arc<PinnedPool>,
    /// One value of each type.
    loaded: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Home {
    pub(crate) fn new(engine: &Arc<Engine>) -> Arc<Self> {
        let pinned = PinnedPool::new(engine);
        Arc::new(Home { engine: engine.clone(), pinned, loaded: Mutex::default() })
    }

    /// The device's value of type `T`; loaded by the first to ask.
    #[cfg_attr(not(feature = "test-util"), expect(dead_code, reason = "used by `testing`"))]
    pub(crate) fn get_or_load<T: Any + Send + Sync, E>(
        &self,
        load: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let mut loaded = self.loaded.lock();
        if let Some(found) = loaded.iter().find_map(|value| value.clone().downcast().ok()) {
            return Ok(found);
        }
        let fresh = Arc::new(load()?);
        loaded.push(fresh.clone());
        Ok(fresh)
    }
}
