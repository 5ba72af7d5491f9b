//! [`PendingCalls`]: calls that are written before they are made.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::panic::Location;

use gpu_await::Uses;

use super::{OfParts, refuse};
use crate::call::Call;
use crate::error::Error;
use crate::transport::LocalRank;

/// The calls of a rank that are made together, and what they use.
#[derive(Default)]
pub(crate) struct PendingCalls<'a> {
    /// Where they are made.
    at: Option<&'static Location<'static>>,
    pub(super) uses: Option<Uses<'a>>,
    pub(crate) calls: OfParts<Call>,
}

impl<'a> PendingCalls<'a> {
    pub(crate) fn made_at(at: &'static Location<'static>) -> RefCell<Self> {
        RefCell::new(PendingCalls { at: Some(at), ..PendingCalls::default() })
    }

    /// Adds the memory of a call, and returns its slices.
    pub(crate) fn include<P>(
        &mut self,
        op: &'static str,
        memory: impl FnOnce(Uses<'a>) -> Uses<'a, P>,
    ) -> P {
        let uses = match self.uses.take() {
            None => match self.at {
                Some(at) => Uses::new(op).submitted_at(at),
                None => Uses::new(op),
            },
            Some(first) if self.calls.len() == 1 => {
                // The first call gave its name.
                let mut all = Uses::new("group");
                all.includes(first);
                all
            }
            Some(all) => all,
        };
        let (uses, slices) = memory(uses).into_parts();
        self.uses = Some(uses);
        slices
    }

    pub(crate) fn into_parts(self) -> (Uses<'a>, OfParts<Call>) {
        (self.uses.unwrap_or_else(|| Uses::new("group")), self.calls)
    }

    /// Refuses the calls: their outputs count as failed.
    pub(crate) fn refuse(self, local: &LocalRank, error: &Error) {
        if let Some(uses) = self.uses {
            refuse(local, uses, error.clone()).abandon();
        }
    }
}
