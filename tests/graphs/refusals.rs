//! What refusals leave of graphs and replayed batches: each launch behind one uses what is passed to it, whatever was
//! refused, and why.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use gpu_await::testing::{self, DriverCall, FaultHandle};
use gpu_await::{
    Device, DeviceBuffer, ErrorKind, Graph, In, InOut, Queue, RawQueue, RawSlice, Region, Result,
    Stream, Uses, View, ViewMut, kernels,
};
use proptest::prelude::*;

use crate::under_test::cases::config;

const LEN: usize = 8;
const INPUTS: usize = 2;
const OUTPUTS: usize = 3;
/// More than the device has.
const TOO_LONG: usize = 1 << 20;
/// How often a call is tried again that meets faults which were meant for others.
const TRIES: usize = 8;

/// All but `EventQuery`, whose refusal is a loss.
const CALLS: [DriverCall; 24] = [
    DriverCall::StreamCreate,
    DriverCall::StreamWaitEvent,
    DriverCall::StreamDestroy,
    DriverCall::EventCreate,
    DriverCall::EventDestroy,
    DriverCall::EventRecord,
    DriverCall::EventRecordAll,
    DriverCall::WriteWord,
    DriverCall::HostFn,
    DriverCall::Foreign,
    DriverCall::Alloc,
    DriverCall::Free,
    DriverCall::Register,
    DriverCall::Unregister,
    DriverCall::CopyToDevice,
    DriverCall::CopyToHost,
    DriverCall::CopyOnDevice,
    DriverCall::CopyRows,
    DriverCall::Fill,
    DriverCall::Launch,
    DriverCall::GraphCapture,
    DriverCall::GraphCompile,
    DriverCall::GraphSet,
    DriverCall::GraphLaunch,
];

/// What a closure does.
#[derive(Clone, Copy, Debug)]
enum Program {
    Plain,
    /// By way of memory that it makes.
    Temporary,
    /// With work that is captured in a graph.
    Captured,
}

/// What goes wrong in the closure, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    No,
    Error,
    Panic,
    OutOfMemory,
    NotInGraph,
}

#[derive(Clone, Debug)]
enum Act {
    Graph(Launch),
    Replay(Launch),
    /// The producer of an output fails.
    PoisonOutput(usize),
    PoisonInput(usize),
    /// Another buffer, which nobody wrote.
    Unwritten(usize),
    /// Another buffer.
    Renew(usize),
    Fault {
        call: usize,
        nth: u64,
        after_effect: bool,
    },
}

#[derive(Clone, Debug)]
struct Launch {
    from: usize,
    to: usize,
    a: u8,
    on_other: bool,
    trouble: Trouble,
}

fn launch() -> impl Strategy<Value = Launch> {
    let trouble = prop_oneof![
        8 => Just(Trouble::No),
        1 => Just(Trouble::Error),
        1 => Just(Trouble::Panic),
        1 => Just(Trouble::OutOfMemory),
        1 => Just(Trouble::NotInGraph),
    ];
    (0..INPUTS, 0..OUTPUTS, 1_u8..3, prop::bool::weighted(0.2), trouble)
        .prop_map(|(from, to, a, on_other, trouble)| Launch { from, to, a, on_other, trouble })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => launch().prop_map(Act::Graph),
        6 => launch().prop_map(Act::Replay),
        2 => (0..OUTPUTS).prop_map(Act::PoisonOutput),
        1 => (0..INPUTS).prop_map(Act::PoisonInput),
        1 => (0..OUTPUTS).prop_map(Act::Unwritten),
        1 => (0..OUTPUTS).prop_map(Act::Renew),
        6 => (0..CALLS.len(), 1_u64..4, any::<bool>())
            .prop_map(|(call, nth, after_effect)| Act::Fault { call, nth, after_effect }),
    ]
}

fn program() -> impl Strategy<Value = Program> {
    prop_oneof![Just(Program::Plain), Just(Program::Temporary), Just(Program::Captured)]
}

struct State {
    axpy: kernels::axpy,
    program: Program,
    trouble: Arc<AtomicU8>,
}

/// `y += (a + 2) x`, whatever the program; the trouble in the middle.
fn write(
    q: &Queue<'_>,
    state: &State,
    (x, mut y, a): (View<'_, f32>, ViewMut<'_, f32>, f32),
) -> Result<()> {
    let State { axpy, program, trouble } = state;
    axpy.launch(q, 2.0, &x, &mut y)?;
    let trouble = trouble.swap(Trouble::No as u8, Ordering::Relaxed);
    if trouble == Trouble::Error as u8 {
        x.slice(LEN + 1..)?;
    } else if trouble == Trouble::Panic as u8 {
        resume_unwind(Box::new("on purpose"));
    } else if trouble == Trouble::OutOfMemory as u8 {
        drop(q.zeros::<f32>(TOO_LONG)?);
    } else if trouble == Trouble::NotInGraph as u8 {
        drop(q.host_fn(|| ())?);
    }
    match program {
        Program::Plain => axpy.launch(q, a, &x, &mut y),
        Program::Temporary => {
            let mut fresh = q.zeros::<f32>(LEN)?;
            axpy.launch(q, a, &x, &mut fresh)?;
            axpy.launch(q, 1.0, &fresh, &mut y)
        }
        Program::Captured => {
            let uses = Uses::new("add").reads(&x).updates(&mut y).can_be_captured();
            let add = move |raw: &RawQueue<'_>, (x, y): (RawSlice<f32>, RawSlice<f32>)| {
                raw.host_each(move || {
                    // SAFETY: it is declared as read, and the stream orders it with all other uses.
                    let x = unsafe { x.as_slice() };
                    // SAFETY: as above, as updated.
                    let y = unsafe { y.as_mut_slice() };
                    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
                })
            };
            // SAFETY: what it does on the stream is declared.
            unsafe { q.enqueue(uses, add) }
        }
    }
}

/// The device, and what should be in its buffers; `None` of one that a refusal left open.
struct Bench {
    streams: [Stream; 2],
    faults: FaultHandle,
    state: State,
    graph: Graph<(In<f32>, InOut<f32>, f32)>,
    region: Region,
    inputs: Vec<DeviceBuffer<f32>>,
    outputs: Vec<DeviceBuffer<f32>>,
    expected: [f32; OUTPUTS],
    short: DeviceBuffer<f32>,
}

/// Tries it again while it meets faults that were meant for others.
fn insist<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    let mut last = call();
    for _ in 1..TRIES {
        match last {
            Err(error) if matches!(error.kind(), ErrorKind::Driver | ErrorKind::OutOfMemory) => {
                last = call();
            }
            _ => break,
        }
    }
    last
}

impl Bench {
    fn new(program: Program) -> Result<Self> {
        let (faults, handle) = testing::faults();
        let device = Device::builder().memory_limit_bytes(1 << 20).host_with(faults);
        let axpy = kernels::axpy::load_blocking(&device)?;
        let streams = [device.stream()?, device.stream()?];
        let trouble = Arc::<AtomicU8>::default();
        let state = || State { axpy: axpy.clone(), program, trouble: trouble.clone() };
        let full = |value| streams[0].full(LEN, value).queued();
        let bench = Bench {
            faults: handle,
            state: state(),
            graph: device.graph(state(), write),
            region: Region::new(),
            inputs: vec![full(1.0)?, full(3.0)?],
            outputs: (0..OUTPUTS).map(|_| full(0.0)).collect::<Result<_>>()?,
            expected: [0.0; OUTPUTS],
            short: streams[0].full(LEN - 1, 1.0).queued()?,
            streams,
        };
        // The first launch of a kernel is never part of a list.
        axpy.launch(&bench.streams[0], 1.0, &bench.inputs[0], &mut full_of(&bench.streams[0])?)
            .queued()?;
        Ok(bench)
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Fault { call, nth, after_effect: false } => {
                self.faults.fail_nth(CALLS[*call], *nth, ErrorKind::Driver);
            }
            Act::Fault { call, nth, after_effect: true } => {
                self.faults.fail_nth_after_effect(CALLS[*call], *nth, ErrorKind::Driver);
            }
            Act::PoisonOutput(to) => {
                self.streams[0].copy(&self.short, &mut self.outputs[*to]).queued().unwrap_err();
                self.refused_then_healed(*to);
            }
            Act::PoisonInput(from) => {
                self.streams[0].copy(&self.short, &mut self.inputs[*from]).queued().unwrap_err();
                self.launch(&Launch {
                    from: *from,
                    to: 0,
                    a: 1,
                    on_other: false,
                    trouble: Trouble::No,
                });
                let value = [1.0, 3.0][*from];
                insist(|| self.streams[0].fill(&mut self.inputs[*from], value).queued()).unwrap();
            }
            Act::Unwritten(to) => {
                self.outputs[*to] = insist(|| self.streams[0].empty(LEN).queued()).unwrap();
                self.refused_then_healed(*to);
            }
            Act::Renew(to) => {
                self.outputs[*to] = insist(|| self.streams[0].full(LEN, 0.0).queued()).unwrap();
                self.expected[*to] = 0.0;
            }
            Act::Graph(launch) => self.launch(launch),
            Act::Replay(launch) => self.replay(launch),
        }
    }

    /// A launch with an output that cannot be read, which can be read then.
    fn refused_then_healed(&mut self, to: usize) {
        let (x, y) = (&self.inputs[0], &mut self.outputs[to]);
        self.graph.launch(&self.streams[0], (x, y, 1.0)).queued().unwrap_err();
        self.heal(to);
    }

    fn heal(&mut self, to: usize) {
        insist(|| self.streams[0].fill(&mut self.outputs[to], 0.0).queued()).unwrap();
        self.expected[to] = 0.0;
    }

    fn launch(&mut self, launch: &Launch) {
        let Launch { from, to, a, on_other, trouble } = *launch;
        let stream = &self.streams[usize::from(on_other)];
        self.state.trouble.store(trouble as u8, Ordering::Relaxed);
        let launch = AssertUnwindSafe(|| {
            let arguments = (&self.inputs[from], &mut self.outputs[to], f32::from(a));
            self.graph.launch(stream, arguments).queued()
        });
        let launched = catch_unwind(launch);
        self.state.trouble.store(Trouble::No as u8, Ordering::Relaxed);
        match launched {
            Ok(Ok(())) => self.expected[to] += (f32::from(a) + 2.0) * [1.0, 3.0][from],
            Ok(Err(error)) => {
                let read = insist(|| stream.download(&self.outputs[to]).synchronize());
                assert!(read.is_err(), "what was passed counts as failed: {error}");
                self.heal(to);
            }
            // What was passed stays as it was.
            Err(_) => {}
        }
    }

    fn replay(&mut self, launch: &Launch) {
        let Launch { from, to, a, on_other, trouble } = *launch;
        let stream = &self.streams[usize::from(on_other)];
        self.state.trouble.store(trouble as u8, Ordering::Relaxed);
        let (x, y) = (self.inputs[from].slice(..).unwrap(), &mut self.outputs[to]);
        let replay = AssertUnwindSafe(|| {
            let work = |q: &Queue<'_>| write(q, &self.state, (x, y.slice_mut(..)?, f32::from(a)));
            stream.replay(&mut self.region, work).queued()
        });
        let replayed = catch_unwind(replay);
        self.state.trouble.store(Trouble::No as u8, Ordering::Relaxed);
        match replayed {
            Ok(Ok(())) => self.expected[to] += (f32::from(a) + 2.0) * [1.0, 3.0][from],
            // What precedes it is launched.
            _ => self.heal(to),
        }
    }

    fn check(&self) {
        for (output, expected) in self.outputs.iter().zip(self.expected) {
            let read = insist(|| self.streams[1].download(output).synchronize()).unwrap();
            assert_eq!(*read, [expected; LEN], "{:?} {:?}", self.graph.report(), self.region);
        }
    }
}

fn full_of(stream: &Stream) -> Result<DeviceBuffer<f32>> {
    stream.full(LEN, 0.0).queued()
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn a_launch_behind_a_refusal_uses_what_is_passed(program in program(), acts in prop::collection::vec(act(), 1..24)) {
        let mut bench = Bench::new(program).unwrap();
        for act in &acts {
            bench.act(act);
        }
        bench.check();
    }
}
