//! How the processes that are left agree on who is left.
//!
//! Each tells the others whom it takes to be left, and whom to be gone. What one takes to be gone the others do as well, so that the
//! proposals only shrink. A process that returns and one that has to begin again, as a third one died in between, meet in the next
//! generation: who hears of a later one takes it.
//!
//! | step | a process tells it when it | and then |
//! |---|---|---|
//! | [`Called`](Step::Called) | proposes | waits until all that it takes to be left propose the same |
//! | [`Heard`](Step::Heard) | has heard that | waits until all of them have heard it |
//! | [`Agreed`](Step::Agreed) | has heard that, and that those who are left out know it; or that one of them has agreed | returns |
//!
//! When a process's limit is over, it takes those that have not called to be gone, tells them, too, and goes on with the others. From
//! then on each change of its proposal starts the limit again, and when it is over those that do not agree are gone.
//!
//! A process that is left out and alive [notes](Kind::Noted) it, behind whatever it has agreed to before, so that this is heard first. One
//! that does not for [a while](NOTED) is stopped, or cut off.
//!
//! # Invariants
//! 1. Nobody agrees to a group with a process that may still take one of its members to be gone for not calling: it has to have heard
//!    all of them first (`a_call_at_the_limit`).
//! 2. A process that another one took to be gone does not agree any more, also when that one has ended since (`one_group_or_left_out`).
//! 3. Of two processes that take each other to be gone neither agrees, and what one had agreed to before counts
//!    (`one_that_agrees_as_it_is_left_out`).
//! 4. A process that was stopped reads what the others said meanwhile before it agrees, or takes anybody to be gone (`one_is_stopped`).
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::frame::{Kind, Label, Proposal, Step};
use super::registry::{End, RegistryState};
use super::{Link, Mesh};
use crate::error::{Error, Result};
use crate::patience::Patience;

/// Who has not looked for so long was stopped, and reads for so long what the others said meanwhile.
const STOPPED: Duration = Duration::from_millis(500);

/// How long those who are left out may take to note it.
const NOTED: Duration = Duration::from_secs(3);

impl Mesh {
    /// Waits until all members that are left agree on who that is; returns them, and the generation of the agreement.
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
            // Nobody is agreed with on behalf of a call that was given up: the error is for nobody.
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
            // Not `is_over`, which a call is that was given up since: nobody is gone for that.
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

    /// Tells those that are left, and then those that are gone now: they may be alive.
    fn tell_proposal(&self, proposal: &Proposal, told: &[usize], others: &[usize]) {
        let is_news = |rank: &usize| {
            proposal.gone.binary_search(rank).is_ok() && told.binary_search(rank).is_err()
        };
        let gone = self.links.iter().filter(|link| link.ranks.iter().any(is_news));
        let (label, bytes) = (Label::of(0, Kind::Agree), proposal.to_bytes());
        let others = others.iter().map(|at| &self.links[*at]);
        others.chain(gone).for_each(|link| self.tell(link, label, &bytes));
    }

    /// Whether those that this process takes to be gone have ended, or know it.
    fn is_noted(&self, state: &RegistryState, members: &[usize]) -> bool {
        let is_gone = |link: &Link| {
            let mut ranks = link.ranks.iter();
            ranks.any(|rank| state.ended.contains_key(rank) && members.binary_search(rank).is_ok())
        };
        let mut links = self.links.iter().enumerate();
        links.all(|(at, link)| !is_gone(link) || state.noted.contains(&at))
    }

    /// What this process proposes, or agrees to, and the connections to the others that it takes to be left. It agrees to what it has `told`
    /// before, so that those who are left out can know.
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
                // Of an agreement that is over nothing is taken.
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
