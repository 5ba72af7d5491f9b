//! A rewritten list, compared with one written from scratch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::backend::host::HostBackend;
use crate::backend::{ArgBlock, DevicePtr, Grid};
use crate::memory::allocation::NamedUses;
use crate::memory::view::Span;
use crate::runtime::Engine;
use crate::runtime::engine::EngineOptions;

const BUFFERS: usize = 3;
const LEN: u64 = 16;

struct TestCode(Arc<str>);

impl KernelCode for TestCode {
    fn name(&self) -> &Arc<str> {
        &self.0
    }
}

#[derive(Clone, Debug)]
struct TestLaunch {
    kernel: usize,
    accesses: Vec<(usize, Range<u64>, Mode, Tracking)>,
    /// Blocks of the slab.
    named: Vec<(Mode, Vec<u32>)>,
    value: u8,
    blocks: u32,
    is_barrier: bool,
}

/// A run, and where it ends.
#[derive(Clone, Debug)]
struct Rewrite {
    launches: Vec<TestLaunch>,
    /// It is interrupted after this many launches.
    ends_at: Option<usize>,
    /// The graph is updated to its launches.
    is_noted: bool,
}

fn launch() -> impl Strategy<Value = TestLaunch> {
    let range = prop_oneof![4 => Just(0..LEN), 1 => Just(0..8), 1 => Just(8..LEN), 1 => Just(3..9), 1 => Just(4..4)];
    let mode = prop_oneof![Just(Mode::Read), Just(Mode::Overwrite), Just(Mode::ReadWrite)];
    let tracking = prop_oneof![20 => Just(Tracking::Tracked), 1 => Just(Tracking::Frozen), 1 => Just(Tracking::ByCaller)];
    let accesses = prop::collection::vec((0..BUFFERS, range, mode, tracking), 0..4);
    let is_barrier = prop::bool::weighted(0.05);
    let few = prop::collection::vec(0..3_u32, 0..3);
    let named = (prop_oneof![Just(Mode::Read), Just(Mode::ReadWrite)], few);
    let named = prop::collection::vec(named, 0..3);
    (0..2_usize, accesses, named, 0..2_u8, 1..3_u32, is_barrier).prop_map(
        |(kernel, accesses, named, value, blocks, is_barrier)| TestLaunch {
            kernel,
            accesses,
            named,
            value,
            blocks,
            is_barrier,
        },
    )
}

/// One change to a list for its next run.
#[derive(Clone, Debug)]
enum Change {
    Nothing,
    Value(usize, u8),
    Blocks(usize, u32),
    Barrier(usize),
    /// Swaps two buffers.
    Swap(usize, usize),
    /// Passes one buffer in place of another as well.
    Alias(usize, usize),
    Access(usize, TestLaunch),
    /// Turns a read into a write, or back.
    Mode(usize),
    /// Names other blocks.
    Named(usize, TestLaunch),
    Launch(usize, TestLaunch),
    More(TestLaunch),
    Less,
}

fn change() -> impl Strategy<Value = Change> {
    let at = 0..8_usize;
    prop_oneof![
        2 => Just(Change::Nothing),
        2 => (at.clone(), 0..3_u8).prop_map(|(at, value)| Change::Value(at, value)),
        1 => (at.clone(), 1..4_u32).prop_map(|(at, blocks)| Change::Blocks(at, blocks)),
        1 => at.clone().prop_map(Change::Barrier),
        3 => (0..BUFFERS, 0..BUFFERS).prop_map(|(a, b)| Change::Swap(a, b)),
        1 => (0..BUFFERS, 0..BUFFERS).prop_map(|(a, b)| Change::Alias(a, b)),
        2 => (at.clone(), launch()).prop_map(|(at, with)| Change::Access(at, with)),
        2 => at.clone().prop_map(Change::Mode),
        2 => (at.clone(), launch()).prop_map(|(at, with)| Change::Named(at, with)),
        1 => (at, launch()).prop_map(|(at, with)| Change::Launch(at, with)),
        1 => launch().prop_map(Change::More),
        1 => Just(Change::Less),
    ]
}

fn runs() -> impl Strategy<Value = Vec<Rewrite>> {
    let first = prop::collection::vec(launch(), 0..8);
    let ends = prop::option::weighted(0.15, 0..8_usize);
    let changes = prop::collection::vec((change(), ends, any::<bool>()), 1..10);
    (first, changes).prop_map(|(mut launches, changes)| {
        let run = |(change, ends_at, is_noted): (Change, Option<usize>, bool)| {
            change.apply(&mut launches);
            Rewrite { launches: launches.clone(), ends_at, is_noted }
        };
        changes.into_iter().map(run).collect()
    })
}

impl Change {
    fn apply(self, launches: &mut Vec<TestLaunch>) {
        let count = launches.len().max(1);
        let each = |launches: &mut Vec<TestLaunch>, change: &dyn Fn(&mut usize)| {
            let accesses = launches.iter_mut().flat_map(|launch| &mut launch.accesses);
            accesses.for_each(|(buffer, ..)| change(buffer));
        };
        match self {
            Change::Swap(a, b) => each(launches, &|buffer| match *buffer {
                x if x == a => *buffer = b,
                x if x == b => *buffer = a,
                _ => {}
            }),
            Change::Alias(a, b) => each(launches, &|buffer| {
                if *buffer == a {
                    *buffer = b;
                }
            }),
            Change::More(launch) => launches.push(launch),
            Change::Less => drop(launches.pop()),
            Change::Nothing => {}
            _ if launches.is_empty() => {}
            Change::Value(at, value) => launches[at % count].value = value,
            Change::Blocks(at, blocks) => launches[at % count].blocks = blocks,
            Change::Barrier(at) => launches[at % count].is_barrier ^= true,
            Change::Access(at, with) => {
                let known = &mut launches[at % count].accesses;
                for (known, new) in known.iter_mut().zip(with.accesses) {
                    *known = new;
                }
            }
            Change::Mode(at) => {
                if let Some((_, _, mode, _)) = launches[at % count].accesses.last_mut() {
                    *mode = if mode.writes() { Mode::Read } else { Mode::ReadWrite };
                }
            }
            Change::Named(at, with) => launches[at % count].named = with.named,
            Change::Launch(at, with) => launches[at % count] = with,
        }
    }
}

struct Machine {
    buffers: Vec<Arc<Allocation>>,
    slab: Arc<Allocation>,
    kernels: [(Arc<TestCode>, Function); 2],
}

impl Machine {
    fn new() -> Self {
        let backend = Arc::new(HostBackend::new(None, false));
        let engine = Engine::open(backend, EngineOptions::default()).unwrap();
        let memory = |number: usize| {
            let ptr = DevicePtr(256 * (number as u64 + 1));
            Allocation::foreign(&engine, ptr, LEN, None, Box::new(()))
        };
        let mut slab = memory(BUFFERS);
        slab.divide(1);
        let kernels = ["first", "second"].map(|name| {
            let name: Arc<str> = name.into();
            let twin = Arc::new(|_: &Grid, _: &ArgBlock| {});
            let code = Arc::new(TestCode(name.clone()));
            (code, Function::Host { twin, kernel: name, waits_first: false })
        });
        let buffers = (0..BUFFERS).map(|number| Arc::new(memory(number))).collect();
        Machine { buffers, slab: Arc::new(slab), kernels }
    }

    /// Writes launches; returns the accesses that were reported as new.
    fn write(&self, list: &mut List, launches: &[TestLaunch]) -> Entered {
        let mut entered = Entered::default();
        for TestLaunch { kernel, accesses, named, value, blocks, is_barrier } in launches {
            let uses = |(_, blocks): &(Mode, Vec<u32>)| NamedUses {
                used: BlockSet(blocks.clone()),
                read: BlockSet::default(),
            };
            let uses: Vec<_> = named.iter().map(uses).collect();
            let (mut footprint, mut args) = (Footprint::new("a launch"), ArgBlock::default());
            for ((mode, _), uses) in named.iter().zip(&uses) {
                let (memory, range) = (&self.slab, 0..LEN);
                let tracking = Tracking::Tracked;
                let span = Span { memory, range, tracking, named: Some(uses) };
                footprint.touches_named(&span, *mode);
            }
            // At another offset, so that the slots differ as well.
            if *value == 1 {
                args.push_value(&[*value]);
            }
            for (buffer, range, mode, tracking) in accesses {
                let memory = &self.buffers[*buffer];
                let span = Span { memory, range: range.clone(), tracking: *tracking, named: None };
                footprint.touches(&span, *mode);
                args.push_memory(span.address(), span.size_bytes());
            }
            if *value != 1 {
                args.push_value(&[*value]);
            }
            let (code, function) = &self.kernels[*kernel];
            let mut shape = LaunchShape::NONE;
            shape.grid.grid_dim[0] = *blocks;
            let launch = KernelLaunch::new(code, function, shape, &args);
            let entry = LaunchEntry { at: Location::caller(), is_barrier: *is_barrier };
            list.write(&launch, &footprint, entry, true, |access| {
                if let Some(BlockSet(blocks)) = access.named {
                    entered.named.push((access.mode, blocks.clone()));
                } else {
                    let is_its = |buffer: &Arc<Allocation>| Arc::ptr_eq(buffer, access.memory);
                    let buffer = self.buffers.iter().position(is_its).unwrap();
                    entered.ranges.push((buffer, access.range.clone(), access.mode));
                }
            });
        }
        entered
    }
}

/// The accesses that a list reported as new.
#[derive(Default)]
struct Entered {
    ranges: Vec<(usize, Range<u64>, Mode)>,
    named: Vec<(Mode, Vec<u32>)>,
}

/// A launch, for comparison.
type Contents = (Arc<str>, LaunchShape, Vec<u64>, Vec<ArgSlot>);

fn contents(list: &List, number: usize) -> Contents {
    let NodeLaunch { shape, args, .. } = list.launch(number);
    (list.name(number).clone(), *shape, args.words.to_vec(), args.slots.to_vec())
}

fn all(list: &List) -> Vec<Contents> {
    (0..list.known_len()).map(|number| contents(list, number)).collect()
}

fn check(machine: &Machine, runs: &[Rewrite]) {
    let mut list = List::default();
    // The launches in a graph of the list's shape, which is compiled or updated whenever a run is noted.
    let mut graph = (list.shape(), Vec::new(), Vec::new());
    let mut last = None;
    for Rewrite { launches, ends_at, is_noted } in runs {
        list.begin();
        let ends_at = ends_at.filter(|end| *end < launches.len());
        let written = &launches[..ends_at.unwrap_or(launches.len())];
        let entered = machine.write(&mut list, written);
        // Each byte used is entered, and each byte written is entered as written.
        for (buffer, range, mode, _) in written.iter().flat_map(|launch| &launch.accesses) {
            assert!(entered.ranges.iter().any(|(known, of, as_mode)| {
                known == buffer && of == range && (as_mode.writes() || !mode.writes())
            }));
        }
        let mut named = written.iter().flat_map(|launch| &launch.named);
        assert!(named.all(|named| entered.named.contains(named)));
        if ends_at.is_none() {
            let mut anew = List::default();
            anew.begin();
            machine.write(&mut anew, written);
            anew.finish();
            let shape = list.finish();
            assert_eq!((list.edges(), all(&list)), (anew.edges(), all(&anew)), "{shape:?}");
            let names =
                |of: &[Contents]| of.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>();
            if graph.0 == list.shape() {
                assert_eq!((&graph.1[..], names(&graph.2)), (list.edges(), names(&all(&list))));
                let differs = |number: &usize| graph.2[*number] != contents(&list, *number);
                let is_changed = |number: &usize| list.changed().contains(&(*number as u32));
                assert!((0..list.len()).filter(differs).all(|number| is_changed(&number)));
            }
            let now = (list.edges().to_vec(), names(&all(&list)));
            if shape == ListShape::Same
                && let Some(last) = last
            {
                assert_eq!(last, now);
            }
            last = Some(now);
            let kept = list.accesses(0).filter(|(_, range, ..)| !range.is_empty()).count();
            let touched = written.iter().flat_map(|launch| &launch.accesses);
            let touched = touched.filter(|(_, range, ..)| !range.is_empty()).count();
            let named: usize = written.iter().map(|launch| launch.named.len()).sum();
            assert_eq!(kept, touched + named);
            if *is_noted {
                list.note_changes();
                graph = (list.shape(), list.edges().to_vec(), all(&list));
            }
        }
        if ends_at.is_some() {
            last = None;
        }
        list.release();
        assert_eq!(list.accesses(0).count(), 0);
        // No array keeps unused entries.
        let touches: usize = list.operations.iter().map(|known| known.touches.range().len()).sum();
        assert!(list.touches.len() == touches && list.kernels.len() <= 2);
        assert!(list.pieces.len() <= 2 * touches.max(8), "{} pieces", list.pieces.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rewritten_as_written_anew(runs in runs()) {
        thread_local!(static MACHINE: Machine = Machine::new());
        MACHINE.with(|machine| check(machine, &runs));
    }
}

/// Once per run, however many launches name them.
#[test]
fn equal_blocks_are_entered_once() {
    let machine = Machine::new();
    let named = vec![(Mode::Read, vec![1, 2]), (Mode::ReadWrite, vec![3])];
    let (accesses, is_barrier) = (Vec::new(), false);
    let launch =
        TestLaunch { kernel: 0, accesses, named: named.clone(), value: 0, blocks: 1, is_barrier };
    let mut list = List::default();
    for _ in 0..3 {
        list.begin();
        let entered = machine.write(&mut list, &vec![launch.clone(); 3]);
        assert_eq!(entered.named, named);
        list.finish();
        list.release();
    }
}
