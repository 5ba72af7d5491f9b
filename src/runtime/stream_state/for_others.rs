//! The traits by which code that does not know the type of a stream uses one: points that outlive it, and its device.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::StreamState;
use crate::error::Error;
use crate::memory::reclaim::retired::Block;
use crate::runtime::engine::DeviceStream;
use crate::runtime::progress::{PointStream, Progress};

impl PointStream for StreamState {
    fn end_elsewhere(self) {
        self.engine.clone().drop_stream(self);
    }

    fn is_settled(&self, ticket: u64) -> bool {
        StreamState::is_settled(self, ticket)
    }

    fn ask_after(self: &Arc<Self>, ticket: u64) {
        self.want(ticket);
        self.ask_here_or_there();
    }

    fn expect(&self, ticket: u64) {
        StreamState::expect(self, ticket);
    }

    fn dependency_lost(&self, ticket: u64) -> Option<Error> {
        StreamState::dependency_lost(self, ticket)
    }
}

impl DeviceStream for StreamState {
    fn progress(&self) -> &Arc<Progress<StreamState>> {
        StreamState::progress(self)
    }

    fn sweep(&self) -> bool {
        StreamState::sweep(self)
    }

    fn mourn(&self) {
        StreamState::mourn(self);
    }

    fn collect_freed(&self, mark: bool) {
        StreamState::collect_freed(self);
        if let Some(last) = self.memory.frees_in_order().last().filter(|_| mark) {
            self.want(last.ticket);
        }
    }

    fn take_all_kept(&self) -> Vec<Block> {
        self.memory.take_kept(&self.engine.account, u64::MAX, |_| true)
    }

    fn may_sit_in_driver(self: &Arc<Self>) -> bool {
        self.is_blocked()
    }
}
