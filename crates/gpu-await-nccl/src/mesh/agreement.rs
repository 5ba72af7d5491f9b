//! How the remaining processes agree on which of them remain.
//!
//! Each tells the others which processes it considers left, and which gone. What one considers gone the others do as well, so proposals only
//! shrink. A process that returns and one that has to begin again, because a third one died in between, meet in the next generation: a process
//! that hears of a later generation adopts it.
//!
//! | step | a process sends it when it | and then |
//! |---|---|---|
//! | [`Called`](Step::Called) | proposes | waits until all that it considers left propose the same |
//! | [`Heard`](Step::Heard) | has heard that | waits until all of them have heard it |
//! | [`Agreed`](Step::Agreed) | has heard that, and that the processes left out know it; or that one of the remaining has agreed | returns |
//!
//! When a process's limit is over, it considers those that have not called gone, tells them too, and goes on with the others. From
//! then on each change of its proposal restarts the limit, and when that is over the processes that do not agree are gone.
//!
//! A process that is left out and alive [notes](Kind::Noted) it, after whatever it has agreed to before, so that this arrives first. A process
//! that does not note it within [a while](NOTED) is stopped, or cut off.
//!
//! # Invariants
//! 1. Nobody agrees to a group with a process that may still consider one of its members gone for not calling: that process must have heard
//!    all of them first (`a_call_at_the_limit`).
//! 2. A process that another one considered gone no longer agrees, even if that one has ended since (`one_group_or_left_out`).
//! 3. Of two processes that consider each other gone neither agrees, and whatever one had agreed to before counts
//!    (`one_that_agrees_as_it_is_left_out`).
//! 4. A process that was stopped reads what the others said meanwhile before it agrees, or considers anyone gone (`one_is_stopped`).
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::frame::{Kind, Label, Proposal, Step};
use super::registry::{End, RegistryState};
use super::{Link, Mesh};
use crate::error::{Error, Result};
use crate::patience::Patience;

/// A process that has not looked for this long was stopped, and first spends as long reading what the others said meanwhile.
const STOPPED: Duration = Duration::from_millis(500);

/// How long processes that are left out may take to note it.
const NOTED: Duration = Duration::from_secs(3);

impl Mesh {
    /// Waits until all remaining members agree on who they are; returns them, and the generation of the agreement.
    pub(crate) fn agree(
        &self,
        members: &[usize],
        patience: &Patience,
    ) -> Result<(Vec<usize>, u64)> {
        let _agreeing = self.agreeing.lock();
        let (mut told, mut limit, mut is_late) = (Proposal::default(), patience.again(), false);
        let (mut looked, mut agrees_from) = (Instant::now(), Instant::now());
        let mut noted_by = Instant::now();
        let mut state = self.registry.state.lock();
        let heard = (0..self.links.len()).find_map(|at| state.caller(at));
        let caller = heard.unwrap_or(self.own[0]);
        state.generation += 1;
        loop {
            // Do not agree on behalf of a call that was given up: nobody sees this error.
            if !patience.is_wanted() {
                return Err(patience.missing(Vec::new(), members.len()));
            }
            let now = Instant::now();
            if now - looked > STOPPED {
                (limit, agrees_from) = (limit.again(), now + STOPPED);
            }
            looked = now;
            let mut others = Vec::new();
            let may_agree =
                now >= agrees_from && (now >= noted_by || self.is_noted(&state, members));
            let told_before = if may_agree { Some(&told) } else { None };
            let mut proposal = self.propose(&mut state, members, &mut others, told_before)?;
            proposal.caller = caller;
            if told != proposal {
                drop(state);
                self.tell_proposal(&proposal, &told.gone, &others);
                if proposal.step == Step::Agreed {
                    return Ok((proposal.left, proposal.generation));
                }
                if !told.is(&proposal, Step::Called) {
                    noted_by = now + NOTED;
                }
                told = proposal;
                if is_late {
                    limit = limit.again();
                }
                state = self.registry.state.lock();
                continue;
            }
            // Not `is_over`, which is also true of a call that was given up: nobody is gone because of that.
            if now >= limit.end {
                let is_late = std::mem::replace(&mut is_late, true);
                let has_come = |at: &usize| {
                    let theirs = state.proposals.get(at);
                    theirs.is_some_and(|theirs| match is_late {
                        false => theirs.generation == proposal.generation,
                        true => theirs.is(&proposal, proposal.step),
                    })
                };
                others.retain(|at| !has_come(at));
                others.iter().for_each(|at| state.end(&self.links[*at].ranks, &End::Gone));
                self.registry.changed.notify_all();
                limit = limit.again();
                continue;
            }
            self.registry.changed.wait_until(&mut state, limit.next_look());
        }
    }

    /// Sends it to the remaining processes, and then to those newly gone: they may be alive.
    fn tell_proposal(&self, proposal: &Proposal, told: &[usize], others: &[usize]) {
        let is_news = |rank: &usize| {
            proposal.gone.binary_search(rank).is_ok() && told.binary_search(rank).is_err()
        };
        let gone = self.links.iter().filter(|link| link.ranks.iter().any(is_news));
        let (label, bytes) = (Label::of(0, Kind::Agree), proposal.to_bytes());
        let others = others.iter().map(|at| &self.links[*at]);
        others.chain(gone).for_each(|link| self.tell(link, label, &bytes));
    }

    /// Whether the processes that this one considers gone have ended, or know it.
    fn is_noted(&self, state: &RegistryState, members: &[usize]) -> bool {
        let is_gone = |link: &Link| {
            let mut ranks = link.ranks.iter();
            ranks.any(|rank| state.ended.contains_key(rank) && members.binary_search(rank).is_ok())
        };
        let mut links = self.links.iter().enumerate();
        links.all(|(at, link)| !is_gone(link) || state.noted.contains(&at))
    }

    /// What this process proposes, or agrees to, and the connections to the others that it considers left. It agrees only to what it has already
    /// `told`, so that the processes left out can know.
    fn propose(
        &self,
        state: &mut RegistryState,
        members: &[usize],
        others: &mut Vec<usize>,
        told: Option<&Proposal>,
    ) -> Result<Proposal> {
        let is_member = |rank: &usize| members.binary_search(rank).is_ok();
        let has_ended = |state: &RegistryState, link: &Link| {
            link.ranks.iter().any(|rank| state.ended.contains_key(rank))
        };
        let links =
            || self.links.iter().enumerate().filter(|(_, link)| link.ranks.iter().any(is_member));
        loop {
            let mut gone: HashSet<usize> = HashSet::new();
            let mut generation = state.generation;
            let mut agreed = None;
            for (at, link) in links() {
                let Some(theirs) = state.proposals.get(&at) else { continue };
                if theirs.gone.iter().any(|rank| self.own.contains(rank)) {
                    let by = link.ranks.iter().find_map(|rank| members.binary_search(rank).ok());
                    return Err(Error::Excluded { by: by.unwrap_or_default() });
                }
                // Nothing is taken from an agreement that is over.
                if theirs.generation < state.generation {
                    continue;
                }
                if theirs.step == Step::Agreed && theirs.left.iter().all(is_member) {
                    agreed = Some(theirs.clone());
                }
                if !has_ended(state, link) {
                    generation = generation.max(theirs.generation);
                    gone.extend(&theirs.gone);
                }
            }
            if let Some(agreed) = agreed {
                state.generation = agreed.generation;
                others.clear();
                others.extend(links().filter(|(_, l)| !has_ended(state, l)).map(|(at, _)| at));
                return Ok(agreed);
            }
            state.generation = generation;
            let alive: Vec<_> = links().filter(|(_, link)| !has_ended(state, link)).collect();
            let news: Vec<_> = alive
                .iter()
                .filter(|(_, link)| link.ranks.iter().any(|rank| gone.contains(rank)))
                .map(|(_, link)| link.ranks.clone())
                .collect();
            if !news.is_empty() {
                news.iter().for_each(|ranks| state.end(ranks, &End::Gone));
                continue;
            }
            others.clear();
            others.extend(alive.iter().map(|(at, _)| *at));
            let here = alive.iter().flat_map(|(_, link)| &link.ranks).chain(&self.own);
            let mut left: Vec<usize> = here.copied().filter(is_member).collect();
            left.sort_unstable();
            let mut gone: Vec<usize> = state.ended.keys().copied().collect();
            gone.sort_unstable();
            let mut proposal = Proposal { generation, step: Step::Called, left, gone, caller: 0 };
            for (step, next) in [(Step::Called, Step::Heard), (Step::Heard, Step::Agreed)] {
                let is_at = |at| state.proposals.get(at).is_some_and(|p| p.is(&proposal, step));
                let was_told = told.is_some_and(|told| told.is(&proposal, Step::Called));
                let may_go = next != Step::Agreed || was_told;
                if proposal.step == step && may_go && others.iter().all(is_at) {
                    proposal.step = next;
                }
            }
            return Ok(proposal);
        }
    }
}
