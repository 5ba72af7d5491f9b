//! A device that runs lists and streams in the worst order that edges, their kinds and the driver's attribute allow.
//!
//! One operation is held: it does not complete. Everything else happens as early as allowed, and no operation that must be behind the held
//! one may have an effect. Holding more operations would only delay others, so holding each one in turn finds every wrong order.
//!
//! | a kernel | is launched behind a full edge | behind a programmatic one |
//! |---|---|---|
//! | starts | when the one in front is complete | when all blocks of the one in front have triggered or ended |
//! | that waits first has an effect | when it starts | when the one in front is complete: the first of them, if there are several |
//! | that does not | when it starts | when it starts |
//! | triggers | when it may have an effect, or at its start if it does not wait first | likewise |
//!
//! Buffers are freed and their blocks reused: only addresses count. `GPU_AWAIT_OVERLAP_LISTS` is the number of lists and of streams.
#![forbid(unsafe_code)]

use gpu_await_protocol::overlap::Overlap;

use super::{Edge, EdgeKind, Edges, Node, kinds};

/// Few enough for every test run; 20 million take some minutes in a release build.
const LISTS: u64 = 3_000;
const BLOCKS: u64 = 5;
const CELLS: u64 = 4;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

fn lists() -> u64 {
    let asked = std::env::var("GPU_AWAIT_OVERLAP_LISTS").ok();
    asked.map_or(LISTS, |asked| asked.parse().expect("a number"))
}

/// An operation of a list. Bit `n` of a mask is cell `n` of memory.
#[derive(Clone, Copy, Debug)]
struct ModelLaunch {
    reads: u32,
    writes: u32,
    is_barrier: bool,
    node: Node,
}

impl ModelLaunch {
    fn must_be_behind(&self, first: &ModelLaunch) -> bool {
        self.is_barrier
            || first.is_barrier
            || first.writes & (self.reads | self.writes) != 0
            || first.reads & self.writes != 0
    }
}

/// A list, and the edges that it gets.
#[derive(Default)]
struct RandomList {
    operations: Vec<ModelLaunch>,
    edges: Edges,
    kinds: Vec<(Edge, EdgeKind)>,
}

impl RandomList {
    fn fill(&mut self, random: &mut Random) {
        self.operations.clear();
        self.edges.clear();
        // The current buffer of each block: a dropped buffer's block goes to the next one.
        let mut lives = [0_u64; BLOCKS as usize];
        let long = 2 + random.below(11);
        // Long chains, and operations spread over all blocks.
        let blocks = 1 + random.below(BLOCKS);
        for _ in 0..long {
            let kernel_of = (!random.one_in(10)).then(|| u64::from(random.one_in(10)));
            let waits_first = kernel_of.is_some() && !random.one_in(4);
            let mut listed = ModelLaunch {
                reads: 0,
                writes: 0,
                is_barrier: random.one_in(15),
                node: Node { kernel_of, waits_first },
            };
            let mut accesses = [const { (0..0, false) }; 3];
            let count = 1 + random.below(3) as usize;
            for access in &mut accesses[..count] {
                let block = random.below(blocks);
                let (start, writes) = (random.below(CELLS), random.one_in(2));
                let end = start + 1 + random.below(CELLS - start);
                let cells = (start..end).fold(0, |all, cell| all | 1 << (block * CELLS + cell));
                if writes {
                    listed.writes |= cells;
                } else {
                    listed.reads |= cells;
                }
                *access = (address(block, lives[block as usize], start, end), writes);
            }
            if listed.is_barrier {
                self.edges.add_barrier();
            } else {
                self.edges.add(accesses.into_iter().take(count));
            }
            self.operations.push(listed);
            if random.one_in(3) {
                lives[random.below(blocks) as usize] += 1;
            }
        }
        let operations = &self.operations;
        self.kinds.clear();
        self.kinds.extend(kinds(self.edges.edges(), |node| operations[node as usize].node));
    }

    /// The first operation that must be behind `held` and has an effect before `held` is complete.
    fn first_too_early(&self, held: usize) -> Option<usize> {
        let (mut has_triggered, mut is_complete) = (0_u32, 0_u32);
        let mut edges = self.kinds.iter().peekable();
        for (number, listed) in self.operations.iter().enumerate() {
            let (mut starts, mut waited_for) = (true, None);
            while let Some(((first, _), kind)) =
                edges.next_if(|((_, second), _)| *second as usize == number)
            {
                let is_complete = is_complete >> first & 1 != 0;
                if *kind == EdgeKind::Programmatic {
                    starts &= has_triggered >> first & 1 != 0;
                    // The wait is documented only for the first.
                    waited_for.get_or_insert(is_complete);
                } else {
                    starts &= is_complete;
                }
            }
            let waited = !listed.node.waits_first || waited_for.unwrap_or(true);
            let has_effect = starts && waited;
            if has_effect && number > held && listed.must_be_behind(&self.operations[held]) {
                return Some(number);
            }
            let triggers = match listed.node {
                Node { kernel_of: None, .. } => has_effect && number != held,
                Node { waits_first: true, .. } => has_effect,
                Node { .. } => starts,
            };
            has_triggered |= u32::from(triggers) << number;
            is_complete |= u32::from(has_effect && number != held) << number;
        }
        None
    }
}

/// The addresses of part of a buffer; they do not depend on which buffer of the block it is.
fn address(block: u64, _life: u64, start: u64, end: u64) -> std::ops::Range<u64> {
    block * 256 + start..block * 256 + end
}

/// A command of a stream, as the driver sees it.
#[derive(Clone, Copy, Debug)]
enum ModelCommand {
    /// Behind everything.
    Full,
    /// Behind the last command alone, for whose completion it waits.
    Early,
    /// Behind the last command alone: it starts when that has triggered, and waits for nothing. Other libraries' kernels may do this.
    Careless,
    /// Beside the last command, behind everything before that: a graph that ends in two kernels.
    Beside,
    /// Another stream's work: behind nothing; `Full` commands wait for it.
    Elsewhere,
}

/// Generates a stream's commands; returns how many launches may start early. Each launch's body, if of this crate, must run after all earlier
/// commands.
fn random_stream(random: &mut Random, commands: &mut Vec<ModelCommand>) -> usize {
    let (overlap, mut ticket) = (Overlap::new(), 0);
    commands.clear();
    for _ in 0..2 + random.below(12) {
        ticket += 1;
        let is_refused = random.one_in(8);
        match random.below(12) {
            // As `Raw::launch` and `submit`.
            0..6 => {
                let waits_first = !random.one_in(4);
                let is_early = waits_first && overlap.may_overlap(ticket);
                if is_refused {
                    overlap.demand_full(ticket);
                    continue;
                }
                commands.push(if is_early { ModelCommand::Early } else { ModelCommand::Full });
                if waits_first {
                    overlap.launched(ticket, is_early);
                }
            }
            6 | 7 => {
                commands.extend([ModelCommand::Full, ModelCommand::Careless]);
                if random.one_in(2) {
                    // The first kernel starts early as well.
                    let at = commands.len() - 2;
                    commands[at] = ModelCommand::Careless;
                }
                overlap.demand_full(ticket);
            }
            8 => {
                commands.extend([ModelCommand::Full, ModelCommand::Beside]);
                overlap.demand_full(ticket);
            }
            9 => {
                commands.push(ModelCommand::Elsewhere);
                overlap.demand_full(ticket);
            }
            10 => {
                commands.push(ModelCommand::Full);
                overlap.demand_full(ticket);
            }
            // Memory from the stream's cache, or an empty list.
            _ => overlap.pass_on(ticket),
        }
    }
    commands.iter().filter(|command| matches!(command, ModelCommand::Early)).count()
}

/// The first launch of this crate whose body runs before `held`, an earlier command, is complete.
fn first_too_early(commands: &[ModelCommand], held: usize) -> Option<usize> {
    let (mut has_triggered, mut is_complete) = (0_u64, 0_u64);
    let has = |set: u64, number: usize| set >> number & 1 != 0;
    let all_before = |set: u64, number: usize| set & ((1 << number) - 1) == (1 << number) - 1;
    for (number, command) in commands.iter().enumerate() {
        let last = number.checked_sub(1);
        // A wait for another stream is not a command to be behind.
        let last = last.and_then(|last| {
            (0..=last).rev().find(|at| !matches!(commands[*at], ModelCommand::Elsewhere))
        });
        let (starts, waited) = match command {
            ModelCommand::Full => (all_before(is_complete, number), true),
            ModelCommand::Early => (
                last.is_none_or(|last| has(has_triggered, last)),
                last.is_none_or(|last| has(is_complete, last)),
            ),
            ModelCommand::Careless => (last.is_none_or(|last| has(has_triggered, last)), true),
            ModelCommand::Beside => (last.is_none_or(|last| all_before(is_complete, last)), true),
            ModelCommand::Elsewhere => (true, true),
        };
        let has_effect = starts && waited;
        let is_ours = matches!(command, ModelCommand::Early | ModelCommand::Full);
        if has_effect && is_ours && number > held {
            return Some(number);
        }
        let triggers = if matches!(command, ModelCommand::Careless) { starts } else { has_effect };
        has_triggered |= u64::from(triggers) << number;
        is_complete |= u64::from(has_effect && number != held) << number;
    }
    None
}

#[test]
fn every_order_keeps_the_programs() {
    let (mut random, mut list) = (Random(1), RandomList::default());
    let (mut commands, mut programmatic, mut early) = (Vec::new(), 0, 0);
    for number in 0..lists() {
        list.fill(&mut random);
        programmatic +=
            list.kinds.iter().filter(|(_, kind)| *kind == EdgeKind::Programmatic).count();
        for held in 0..list.operations.len() {
            if let Some(wrong) = list.first_too_early(held) {
                let RandomList { operations, kinds, .. } = &list;
                panic!("list {number}: {wrong} beside {held} of {operations:#?}, {kinds:?}");
            }
        }
        early += random_stream(&mut random, &mut commands);
        for held in 0..commands.len() {
            if let Some(wrong) = first_too_early(&commands, held) {
                panic!("stream {number}: {wrong} beside {held} of {commands:?}");
            }
        }
    }
    println!("{} lists: {programmatic} programmatic edges, {early} early launches", lists());
    assert!(programmatic > 0 && early > 0);
}
