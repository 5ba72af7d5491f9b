//! [`GraphMemory`]: who keeps device memory for launches of graphs, and gives it up where an allocation finds none.
//!
//! What a graph's closure makes is written anew in each launch, so that nothing is lost with it: the next launch makes it again.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

pub(crate) trait KeepsMemory: Send + Sync {
    /// Gives up what nobody else has, unless it is in use; whether there was any.
    fn give_up_memory(&self) -> bool;
}

#[derive(Default)]
pub(crate) struct GraphMemory(Mutex<Keepers>);

#[derive(Default)]
struct Keepers {
    all: Vec<Weak<dyn KeepsMemory>>,
    /// At how many those that are gone are forgotten.
    tidied_at: usize,
}

impl GraphMemory {
    pub(crate) fn enter(&self, keeper: Weak<dyn KeepsMemory>) {
        let mut keepers = self.0.lock();
        if keepers.all.len() >= keepers.tidied_at {
            keepers.all.retain(|known| known.strong_count() > 0);
            keepers.tidied_at = 2 * keepers.all.len() + 8;
        }
        keepers.all.push(keeper);
    }

    /// Has everybody give up what is not in use; whether there was any.
    pub(crate) fn give_up(&self) -> bool {
        // Not under the lock: whoever is the last to have one drops it here.
        let all: Vec<Arc<dyn KeepsMemory>> =
            self.0.lock().all.iter().filter_map(Weak::upgrade).collect();
        let given_up = all.iter().filter(|keeper| keeper.give_up_memory());
        given_up.count() > 0
    }
}
