//! How the processes that are left agree on who is left.
//!
//! Each tells the others whom it takes to be left, and whom to be gone. What one takes to be gone the others do as well, so that the
//! proposals only shrink; when a process has the same proposal, of the same generation, from everybody in it, it is agreed. A process that
//! returns and one that has to begin again, as a third one died in between, meet in the next generation: who hears of a later one takes
//! it.
#![forbid(unsafe_code)]

use std::collections::HashSet;

use super::frame::{Kind, Label, Proposal};
use super::registry::{End, RegistryState};
use super::{Link, Mesh};
use crate::error::{Error, Result};
use crate::exchange::Patience;

impl Mesh {
    /// Waits until all members that are left agree on who that is; returns them, and the generation of the agreement.
    pub(crate) fn agree(
        &self,
        members: &[usize],
        patience: &Patience,
    ) -> Result<(Vec<usize>, u64)> {
        let _agreeing = self.agreeing.lock();
        let mut told = None;
        let mut state = self.registry.state.lock();
        state.generation += 1;
        loop {
            let mut others = Vec::new();
            let proposal = self.propose(&mut state, members, &mut others)?;
            if told.as_ref() != Some(&proposal) {
                drop(state);
                let bytes = proposal.to_bytes();
                let label = Label::of(0, Kind::Agree);
                others.iter().for_each(|at| self.tell(&self.links[*at], label, &bytes));
                told = Some(proposal);
                state = self.registry.state.lock();
                continue;
            }
            let agrees = |at: &usize| {
                let theirs = state.proposals.get(at);
                theirs.is_some_and(|theirs| {
                    (theirs.generation, &theirs.left) == (proposal.generation, &proposal.left)
                })
            };
            let missing: Vec<_> = others.into_iter().filter(|at| !agrees(at)).collect();
            if missing.is_empty() {
                return Ok((proposal.left, proposal.generation));
            }
            if patience.is_over() {
                let ranks = missing.iter().flat_map(|at| &self.links[*at].ranks);
                let place = |rank: &usize| members.binary_search(rank).ok();
                let mut missing: Vec<usize> = ranks.filter_map(place).collect();
                missing.sort_unstable();
                let (world, limit, refused) = (members.len(), patience.limit, Vec::new());
                return Err(Error::MissingRanks { missing, world, limit, refused });
            }
            self.registry.changed.wait_until(&mut state, patience.next_look());
        }
    }

    /// Whom this process takes to be left, and the connections to the others of them.
    fn propose(
        &self,
        state: &mut RegistryState,
        members: &[usize],
        others: &mut Vec<usize>,
    ) -> Result<Proposal> {
        let is_member = |link: &Link| link.ranks.iter().any(|r| members.binary_search(r).is_ok());
        let has_ended = |state: &RegistryState, link: &Link| {
            link.ranks.iter().any(|rank| state.ended.contains_key(rank))
        };
        let links = || self.links.iter().enumerate().filter(|(_, link)| is_member(link));
        loop {
            let alive: Vec<_> = links().filter(|(_, link)| !has_ended(state, link)).collect();
            let theirs = alive.iter().filter_map(|(at, _)| Some((*at, state.proposals.get(at)?)));
            // Of an agreement that is over nothing is taken.
            let current = theirs.filter(|(_, theirs)| theirs.generation >= state.generation);
            let mut gone: HashSet<usize> = HashSet::new();
            let mut generation = state.generation;
            for (at, theirs) in current {
                generation = generation.max(theirs.generation);
                if theirs.gone.iter().any(|rank| self.own.contains(rank)) {
                    let by = self.links[at].ranks[0];
                    return Err(Error::Excluded { by: members.binary_search(&by).unwrap_or(by) });
                }
                gone.extend(&theirs.gone);
            }
            let news: Vec<_> = alive
                .iter()
                .filter(|(_, link)| link.ranks.iter().any(|rank| gone.contains(rank)))
                .map(|(_, link)| link.ranks.clone())
                .collect();
            state.generation = generation;
            if !news.is_empty() {
                news.iter().for_each(|ranks| state.end(ranks, &End::Gone));
                continue;
            }
            others.clear();
            others.extend(alive.iter().map(|(at, _)| *at));
            let here = alive.iter().flat_map(|(_, link)| &link.ranks).chain(&self.own);
            let is_member = |rank: &&usize| members.binary_search(rank).is_ok();
            let mut left: Vec<usize> = here.filter(is_member).copied().collect();
            left.sort_unstable();
            let mut gone: Vec<usize> = state.ended.keys().copied().collect();
            gone.sort_unstable();
            return Ok(Proposal { generation, left, gone });
        }
    }
}
