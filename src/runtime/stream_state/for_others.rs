//! What is asked of a stream by those who know none: points that outlive it, and its device.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Lane;
use crate::error::Error;
use crate::memory::reclaim::retired::Block;
use crate::runtime::engine::DeviceStream;
use crate::runtime::progress::{PointStream, Progress};

impl PointStream for Lane {
    fn is_settled(&self, ticket: u64) -> bool {
        Lane::is_settled(self, ticket)
    }

    fn ask_after(self: &Arc<Self>, ticket: u64) {
        self.want(ticket);
        self.ask_here_or_there();
    }

    fn dependency_lost(&self, ticket: u64) -> Option<Error> {
        Lane::dependency_lost(self, ticket)
    }
}

impl DeviceStream for Lane {
    fn progress(&self) -> &Arc<Progress<Lane>> {
        Lane::progress(self)
    }

    fn sweep(&self) -> bool {
        Lane::sweep(self)
    }

    fn mourn(&self) {
        Lane::mourn(self);
    }

    fn collect_freed(&self, mark: bool) {
        Lane::collect_freed(self);
        if let Some(last) = self.frees_in_order().last().filter(|_| mark) {
            self.want(last.ticket);
        }
    }

    fn take_all_kept(&self) -> Vec<Block> {
        Lane::take_all_kept(self)
    }
}
