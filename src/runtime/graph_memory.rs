//! [`GraphMemory`]: the holders of device memory for graph launches, which release it when an allocation finds no other memory.
//!
//! Memory made by a graph's closure is rewritten by each launch, so releasing it loses nothing: the next launch allocates it again.
#![forbid(unsafe_code)]

use std::sync::Weak;

use gpu_await_protocol::sync::Mutex;

use super::weak_list::WeakList;

pub(crate) trait KeepsMemory: Send + Sync {
    /// Releases memory that is not shared, unless it is in use; whether there was any.
    fn give_up_memory(&self) -> bool;
}

#[derive(Default)]
pub(crate) struct GraphMemory(Mutex<WeakList<dyn KeepsMemory>>);

impl GraphMemory {
    pub(crate) fn enter(&self, keeper: Weak<dyn KeepsMemory>) {
        self.0.lock().push(keeper);
    }

    /// Whether there is any holder.
    pub(crate) fn are_there(&self) -> bool {
        self.0.lock().has_any()
    }

    /// Has every holder release its unused memory; whether there was any.
    pub(crate) fn give_up(&self) -> bool {
        let all = self.0.lock().alive();
        all.iter().filter(|keeper| keeper.give_up_memory()).count() > 0
    }
}
