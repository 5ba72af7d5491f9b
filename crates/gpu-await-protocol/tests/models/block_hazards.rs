//! The uses of a slab's blocks against a list of all uses that there ever were.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::block_hazards::{BlockHazards, Blocks};
use gpu_await_protocol::hazard::{Content, Mode};
use gpu_await_protocol::timeline::{Point, Track};

const BLOCKS: u32 = 6;
const BLOCK_BYTES: u64 = 4;
const STREAMS: u64 = 4;

#[derive(Clone, Debug)]
struct Stream {
    id: u64,
    completed: Rc<Cell<u64>>,
}

impl Track for Stream {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_complete(&self, ticket: u64) -> bool {
        self.completed.get() >= ticket
    }
}

#[derive(Clone, Debug)]
enum Part {
    Range(Range<u64>),
    Named(Vec<u32>),
}

impl Part {
    fn blocks(&self) -> Blocks<'_> {
        match self {
            Part::Range(range) => Blocks::Range(range),
            Part::Named(named) => Blocks::Named(named),
        }
    }

    /// Each block, and whether all of it is touched.
    fn touched(&self) -> BTreeMap<u32, bool> {
        let block =
            |number: u32| u64::from(number) * BLOCK_BYTES..u64::from(number + 1) * BLOCK_BYTES;
        match self {
            Part::Named(named) => named.iter().map(|number| (*number, true)).collect(),
            Part::Range(range) => (0..BLOCKS)
                .filter(|number| block(*number).any(|byte| range.contains(&byte)))
                .map(|number| (number, block(number).all(|byte| range.contains(&byte))))
                .collect(),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Use { part: Part, mode: Mode, stream: u64, again: bool },
    Poison { part: Part, leaves_data: bool, poison: u32 },
    ClearPoison { part: Part },
    PoisonWritten { part: Part, stream: u64, poison: u32 },
    Complete { stream: u64 },
}

fn part() -> impl Strategy<Value = Part> {
    let len = u64::from(BLOCKS) * BLOCK_BYTES;
    prop_oneof![
        1 => Just(Part::Range(0..len)),
        2 => (0..=len, 0..=len).prop_map(|(a, b)| Part::Range(a.min(b)..a.max(b))),
        2 => (0..BLOCKS).prop_map(|at| {
            Part::Range(u64::from(at) * BLOCK_BYTES..u64::from(at + 1) * BLOCK_BYTES)
        }),
        4 => prop::collection::vec(0..BLOCKS, 0..4).prop_map(Part::Named),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let mode =
        prop_oneof![3 => Just(Mode::Read), 1 => Just(Mode::Overwrite), 1 => Just(Mode::ReadWrite)];
    prop_oneof![
        10 => (part(), mode, 0..STREAMS, any::<bool>())
            .prop_map(|(part, mode, stream, again)| Step::Use { part, mode, stream, again }),
        1 => (part(), any::<bool>(), 0..2_u32)
            .prop_map(|(part, leaves_data, poison)| Step::Poison { part, leaves_data, poison }),
        1 => part().prop_map(|part| Step::ClearPoison { part }),
        1 => (part(), 0..STREAMS, 0..2_u32)
            .prop_map(|(part, stream, poison)| Step::PoisonWritten { part, stream, poison }),
        2 => (0..STREAMS).prop_map(|stream| Step::Complete { stream }),
    ]
}

/// The module beside its model.
struct Twins {
    hazards: BlockHazards<Stream, u32>,
    /// Every use of each block, in order: by whom, and whether it wrote.
    uses: Vec<Vec<(u64, u64, bool)>>,
    /// Those of all blocks: whoever is given the slab waits for the last write of it, as that may have made it.
    wholes: Vec<(u64, u64, bool)>,
    /// Whose uses keep the slab: also of those that name no block.
    users: BTreeMap<u64, u64>,
    content: Vec<Content<u32>>,
    streams: Vec<Stream>,
    tickets: Vec<u64>,
    last_user: Option<u64>,
}

impl Twins {
    fn new() -> Self {
        let streams: Vec<_> =
            (0..STREAMS).map(|id| Stream { id, completed: Rc::default() }).collect();
        let maker = Point { stream: streams[0].clone(), ticket: 1 };
        Twins {
            hazards: BlockHazards::new(BLOCKS as usize, BLOCK_BYTES, Some(maker)),
            uses: vec![vec![(0, 1, true)]; BLOCKS as usize],
            wholes: vec![(0, 1, true)],
            users: BTreeMap::from([(0, 1)]),
            content: vec![Content::Valid; BLOCKS as usize],
            streams,
            tickets: vec![1; STREAMS as usize],
            last_user: None,
        }
    }

    fn is_complete(&self, (stream, ticket): (u64, u64)) -> bool {
        self.streams[stream as usize].is_complete(ticket)
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Use { part, mode, stream, again } => {
                self.check_dependencies(part, *mode, *stream);
                let at = *stream as usize;
                // The ticket of a list is that of several uses, until another stream uses the slab, or it is complete.
                let is_listed = *again && self.last_user == Some(*stream);
                if !is_listed || self.is_complete((*stream, self.tickets[at])) {
                    self.tickets[at] += 1;
                }
                self.last_user = Some(*stream);
                let ticket = self.tickets[at];
                self.hazards.record(&part.blocks(), *mode, &self.streams[at], ticket);
                if !matches!(part, Part::Range(range) if range.is_empty()) {
                    self.users.insert(*stream, ticket);
                }
                if matches!(part, Part::Range(_)) && part.touched().len() == BLOCKS as usize {
                    self.wholes.push((*stream, ticket, mode.writes()));
                }
                for (block, is_all) in part.touched() {
                    self.uses[block as usize].push((*stream, ticket, mode.writes()));
                    if *mode == Mode::Overwrite && is_all {
                        self.content[block as usize] = Content::Valid;
                    }
                }
            }
            Step::Complete { stream } => {
                self.streams[*stream as usize].completed.set(self.tickets[*stream as usize]);
            }
            Step::Poison { part, leaves_data, poison } => {
                self.hazards.poison(&part.blocks(), *leaves_data, poison);
                for block in part.touched().into_keys() {
                    let content = &mut self.content[block as usize];
                    let had_data = !matches!(content, Content::Poisoned { has_data: false, .. });
                    let has_data = *leaves_data && had_data;
                    *content = Content::Poisoned { by: *poison, has_data };
                }
            }
            Step::ClearPoison { part } => {
                self.hazards.clear_poison(&part.blocks());
                for block in part.touched().into_keys() {
                    let content = &mut self.content[block as usize];
                    if matches!(content, Content::Poisoned { has_data: true, .. }) {
                        *content = Content::Valid;
                    }
                }
            }
            Step::PoisonWritten { part, stream, poison } => {
                let by = (*stream, self.tickets[*stream as usize]);
                let is_written = |uses: &[(u64, u64, bool)]| {
                    let last = uses.iter().rfind(|(.., writes)| *writes);
                    last.is_some_and(|(stream, ticket, _)| (*stream, *ticket) == by)
                };
                let written =
                    part.touched().into_keys().filter(|at| is_written(&self.uses[*at as usize]));
                let written: Vec<_> = written.collect();
                assert_eq!(self.hazards.is_written_by(&part.blocks(), by), !written.is_empty());
                self.hazards.poison_written(&part.blocks(), by, poison);
                for block in written {
                    let poisoned = Content::Poisoned { by: *poison, has_data: false };
                    self.content[block as usize] = poisoned;
                }
            }
        }
    }

    fn check_dependencies(&self, part: &Part, mode: Mode, stream: u64) {
        let mut found = BTreeMap::new();
        self.hazards.dependencies(&part.blocks(), mode, stream, |used| {
            let known = found.insert(used.stream.id, used.ticket);
            assert_eq!(known, None, "a stream is named once");
        });
        let touched = part.touched();
        let is_named = matches!(part, Part::Named(_));
        let all = touched.keys().flat_map(|block| &self.uses[*block as usize]);
        let all = all.chain(self.wholes.iter().filter(|_| is_named));
        let conflicts: BTreeSet<_> = all
            .filter(|(other, _, writes)| *other != stream && (*writes || mode.writes()))
            .map(|(other, ticket, _)| (*other, *ticket))
            .collect();
        for used in &conflicts {
            // What a later write of the same block waited for needs no wait of its own.
            let is_behind = touched.keys().all(|block| {
                let uses = &self.uses[*block as usize];
                let at = uses.iter().rposition(|(other, ticket, writes)| {
                    (*other, *ticket) == *used && (*writes || mode.writes())
                });
                at.is_none_or(|at| uses[at + 1..].iter().any(|(.., writes)| *writes))
            });
            let is_found = found.get(&used.0).is_some_and(|ticket| *ticket >= used.1);
            assert!(
                is_found || is_behind || self.is_complete(*used),
                "{used:?} is forgotten: {found:?}"
            );
        }
        let made = self.wholes.iter().rfind(|(.., writes)| *writes);
        let made = made.filter(|_| is_named).filter(|(other, ..)| *other != stream);
        assert!(made.is_none_or(|(other, ticket, _)| {
            found.get(other).is_some_and(|found| found >= ticket)
                || self.is_complete((*other, *ticket))
        }));
        for (other, ticket) in found {
            let is_pending = !self.is_complete((other, ticket));
            assert!(
                !is_pending || conflicts.contains(&(other, ticket)),
                "{other} {ticket} is no use of these"
            );
        }
        if self.hazards.only_user() == Some(stream) {
            assert!(conflicts.iter().all(|used| self.is_complete(*used)));
            assert_eq!(self.hazards.unreadable(&part.blocks()), None);
        }
    }

    fn check(&self) {
        let is_pending = |used: &(&u64, &u64)| !self.is_complete((*used.0, *used.1));
        let mut pending = self.users.iter().filter(is_pending).map(|(stream, _)| *stream);
        let only = pending.next().filter(|_| pending.next().is_none());
        let all_valid = self.content.iter().all(|content| *content == Content::Valid);
        assert_eq!(self.hazards.only_user(), only.filter(|_| all_valid));
        let found = self.hazards.users();
        let found = found.iter().map(|used| (used.stream.id, used.ticket));
        assert_eq!(found.collect::<BTreeMap<_, _>>(), self.users);
        for block in 0..BLOCKS {
            let found = self.hazards.unreadable(&Blocks::Named(&[block]));
            let start = u64::from(block) * BLOCK_BYTES;
            match &self.content[block as usize] {
                Content::Valid => assert_eq!(found, None),
                content => assert_eq!(found, Some((start..start + BLOCK_BYTES, content))),
            }
        }
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn blocks_say_what_a_list_of_all_uses_would(
        steps in prop::collection::vec(step(), 0..size(40)), keeps in any::<bool>(),
    ) {
        let mut twins = Twins::new();
        twins.hazards.keeps_writers = keeps;
        for step in &steps {
            twins.step(step);
            twins.check();
        }
    }
}

/// Hundreds of streams that come, use blocks and go, beside one that stays pending.
#[test]
fn streams_that_go_are_forgotten() {
    let stream = |id| Stream { id, completed: Rc::default() };
    let mut hazards: BlockHazards<Stream, u32> =
        BlockHazards::new(BLOCKS as usize, BLOCK_BYTES, None);
    let stays = stream(1);
    hazards.record(&Blocks::Named(&[0, 2]), Mode::Read, &stays, 7);
    for id in 0..size(600) as u64 {
        let comes = stream(10 + id);
        let mode = [Mode::Read, Mode::ReadWrite][id as usize % 2];
        let block = if mode.writes() { 1 } else { id as u32 % BLOCKS };
        hazards.record(&Blocks::Named(&[block]), mode, &comes, 1);
        comes.completed.set(1);
        let mut found = Vec::new();
        let visit = |used: &Point<Stream>| {
            if !used.is_complete() {
                found.push((used.stream.id, used.ticket));
            }
        };
        hazards.dependencies(&Blocks::Named(&[0, 1, 2, 3]), Mode::ReadWrite, 5, visit);
        assert_eq!(found, [(1, 7)]);
    }
    assert!(hazards.users().len() <= 33, "{} streams are remembered", hazards.users().len());
}
