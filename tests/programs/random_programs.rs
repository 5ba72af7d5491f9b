//! Random programs over several streams and buffers, against the same steps one after the other.
//!
//! Nothing in a program says what waits for what: order is the library's. It runs on a device whose
//! commands a random number chooses (every interleaving that the waits allow can come), and on the
//! device under test with kernels of random length in between.

use std::ops::Range;

use futures::executor::block_on;
use gpu_await::testing::{self, Stepper};
use gpu_await::{Device, DeviceBuffer, Op, PinnedBuffer, Result, Stream, kernels};
use proptest::prelude::*;

use crate::under_test::cases::config;

const STREAMS: usize = 4;
const BUFFERS: usize = 3;
const LEN: usize = 24;

#[derive(Clone, Debug)]
enum Step {
    Fill {
        to: Place,
        value: u8,
    },
    Scale {
        to: Place,
    },
    Copy {
        from: Place,
        to: Place,
    },
    Axpy {
        from: Place,
        to: Place,
    },
    Upload {
        to: Place,
        value: u8,
    },
    /// Kept to the end.
    Download {
        from: Place,
    },
    /// A fresh buffer in the place of one, which is dropped with whatever still uses it.
    Renew {
        buffer: usize,
        value: u8,
    },
    /// So many microseconds of nothing.
    Delay {
        us: u64,
    },
}

#[derive(Clone, Debug)]
struct Place {
    buffer: usize,
    range: Range<usize>,
}

/// A step, and the stream that it is put on.
type Program = Vec<(usize, Step)>;

fn place() -> impl Strategy<Value = Place> {
    let range = prop_oneof![
        3 => Just(0..LEN),
        1 => Just(0..LEN / 2),
        1 => Just(LEN / 2..LEN),
        3 => (0..LEN, 1..=LEN).prop_map(|(start, len)| start..(start + len).min(LEN)),
    ];
    (0..BUFFERS, range).prop_map(|(buffer, range)| Place { buffer, range })
}

/// Two places of one length in different buffers.
fn places() -> impl Strategy<Value = (Place, Place)> {
    (place(), 1..BUFFERS, 0..LEN).prop_map(|(from, other, start)| {
        let len = from.range.len();
        let start = start.min(LEN - len);
        let buffer = (from.buffer + other) % BUFFERS;
        (from, Place { buffer, range: start..start + len })
    })
}

fn program() -> impl Strategy<Value = Program> {
    let step = prop_oneof![
        2 => (place(), any::<u8>()).prop_map(|(to, value)| Step::Fill { to, value }),
        3 => place().prop_map(|to| Step::Scale { to }),
        3 => places().prop_map(|(from, to)| Step::Copy { from, to }),
        3 => places().prop_map(|(from, to)| Step::Axpy { from, to }),
        1 => (place(), any::<u8>()).prop_map(|(to, value)| Step::Upload { to, value }),
        2 => place().prop_map(|from| Step::Download { from }),
        1 => (0..BUFFERS, any::<u8>()).prop_map(|(buffer, value)| Step::Renew { buffer, value }),
        2 => (0..200_u64).prop_map(|us| Step::Delay { us }),
    ];
    prop::collection::vec((0..STREAMS, step), 1..40)
}

/// What the steps give one after the other: the downloads, then every buffer.
fn one_after_the_other(program: &Program) -> Vec<Vec<f32>> {
    let mut buffers = vec![vec![1.0f32; LEN]; BUFFERS];
    let mut seen = Vec::new();
    for (_, step) in program {
        match step {
            Step::Fill { to, value } | Step::Upload { to, value } => {
                buffers[to.buffer][to.range.clone()].fill(f32::from(*value));
            }
            Step::Scale { to } => {
                buffers[to.buffer][to.range.clone()].iter_mut().for_each(|x| *x *= 0.5);
            }
            Step::Copy { from, to } => {
                let source = buffers[from.buffer][from.range.clone()].to_vec();
                buffers[to.buffer][to.range.clone()].copy_from_slice(&source);
            }
            Step::Axpy { from, to } => {
                let source = buffers[from.buffer][from.range.clone()].to_vec();
                for (y, x) in buffers[to.buffer][to.range.clone()].iter_mut().zip(source) {
                    *y = 0.5f32.mul_add(x, *y);
                }
            }
            Step::Download { from } => seen.push(buffers[from.buffer][from.range.clone()].to_vec()),
            Step::Renew { buffer, value } => buffers[*buffer] = vec![f32::from(*value); LEN],
            Step::Delay { .. } => {}
        }
    }
    seen.extend(buffers);
    seen
}

/// A device with what the programs use.
struct Machine {
    streams: Vec<Stream>,
    axpy: kernels::axpy,
    scale: kernels::scale,
    spin: kernels::spin,
    device: Device,
}

impl Machine {
    fn new(device: Device) -> Self {
        Machine {
            streams: (0..STREAMS).map(|_| device.stream().unwrap()).collect(),
            axpy: block_on(kernels::axpy::load(&device)).unwrap(),
            scale: block_on(kernels::scale::load(&device)).unwrap(),
            spin: block_on(kernels::spin::load(&device)).unwrap(),
            device,
        }
    }

    /// Puts everything on the streams, with the downloads of every buffer at the end.
    fn submit(&self, program: &Program) -> Result<Vec<Op<PinnedBuffer<f32>>>> {
        let fresh = |s: usize, value: u8| self.streams[s].full(LEN, f32::from(value)).queued();
        let mut buffers: Vec<DeviceBuffer<f32>> =
            (0..BUFFERS).map(|buffer| fresh(buffer % STREAMS, 1)).collect::<Result<_>>()?;
        let mut seen = Vec::new();
        for (s, step) in program {
            let stream = &self.streams[*s];
            match step {
                Step::Fill { to, value } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    stream.fill(&mut to, f32::from(*value)).queued()?;
                }
                Step::Upload { to, value } => {
                    let mut pinned = stream.pinned::<f32>(to.range.len())?;
                    pinned.fill(f32::from(*value));
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    drop(stream.upload_into(pinned, &mut to).submitted()?);
                }
                Step::Scale { to } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    self.scale.launch(stream, 0.5, &mut to).queued()?;
                }
                Step::Copy { from, to } => {
                    let [source, destination] =
                        buffers.get_disjoint_mut([from.buffer, to.buffer]).expect("two buffers");
                    let mut to = destination.slice_mut(to.range.clone())?;
                    stream.copy(&source.slice(from.range.clone())?, &mut to).queued()?;
                }
                Step::Axpy { from, to } => {
                    let [x, y] =
                        buffers.get_disjoint_mut([from.buffer, to.buffer]).expect("two buffers");
                    let (x, mut y) = (x.slice(from.range.clone())?, y.slice_mut(to.range.clone())?);
                    self.axpy.launch(stream, 0.5, &x, &mut y).queued()?;
                }
                Step::Download { from } => {
                    let from = buffers[from.buffer].slice(from.range.clone())?;
                    seen.push(stream.download(&from).submitted()?);
                }
                Step::Renew { buffer, value } => buffers[*buffer] = fresh(*s, *value)?,
                Step::Delay { us } => self.spin.launch(stream, us * 1000).queued()?,
            }
        }
        for (index, buffer) in buffers.iter().enumerate() {
            seen.push(self.streams[index % STREAMS].download(buffer).submitted()?);
        }
        Ok(seen)
    }
}

fn check(program: &Program, seen: Vec<Op<PinnedBuffer<f32>>>) {
    for (index, (op, expected)) in seen.into_iter().zip(one_after_the_other(program)).enumerate() {
        let seen = block_on(op).unwrap();
        assert_eq!(seen, expected, "download {index}");
    }
}

/// A stream and a ticket.
type Use = (usize, u64);

/// How many waits a program needs if a stream remembers what it has already waited for: one for each
/// other stream with a later use than that of what the step touches.
fn waits_needed(program: &Program) -> usize {
    #[derive(Clone)]
    struct Element {
        writer: Use,
        readers: Vec<Use>,
    }
    let mut tickets = [0_u64; STREAMS];
    let mut known = [[0_u64; STREAMS]; STREAMS];
    let mut waits = 0;
    let mut buffers: Vec<Vec<Element>> = Vec::new();
    for buffer in 0..BUFFERS {
        tickets[buffer % STREAMS] += 1;
        let writer = (buffer % STREAMS, tickets[buffer % STREAMS]);
        buffers.push(vec![Element { writer, readers: Vec::new() }; LEN]);
    }
    let mut enter = |s: usize, touched: &[(&Place, bool)], buffers: &mut Vec<Vec<Element>>| {
        tickets[s] += 1;
        let mut latest = [0_u64; STREAMS];
        for (place, writes) in touched {
            for element in &buffers[place.buffer][place.range.clone()] {
                let readers = element.readers.iter().filter(|_| *writes);
                for (stream, ticket) in std::iter::once(&element.writer).chain(readers) {
                    latest[*stream] = latest[*stream].max(*ticket);
                }
            }
        }
        for other in (0..STREAMS).filter(|other| *other != s) {
            if latest[other] > known[s][other] {
                waits += 1;
                known[s][other] = latest[other];
            }
        }
        for (place, writes) in touched {
            for element in &mut buffers[place.buffer][place.range.clone()] {
                if *writes {
                    *element = Element { writer: (s, tickets[s]), readers: Vec::new() };
                } else {
                    element.readers.push((s, tickets[s]));
                }
            }
        }
        (s, tickets[s])
    };
    for (s, step) in program {
        match step {
            Step::Fill { to, .. } | Step::Upload { to, .. } | Step::Scale { to } => {
                enter(*s, &[(to, true)], &mut buffers);
            }
            Step::Copy { from, to } | Step::Axpy { from, to } => {
                enter(*s, &[(from, false), (to, true)], &mut buffers);
            }
            Step::Download { from } => drop(enter(*s, &[(from, false)], &mut buffers)),
            Step::Renew { buffer, .. } => {
                let writer = enter(*s, &[], &mut buffers);
                buffers[*buffer] = vec![Element { writer, readers: Vec::new() }; LEN];
            }
            Step::Delay { .. } => drop(enter(*s, &[], &mut buffers)),
        }
    }
    for buffer in 0..BUFFERS {
        enter(buffer % STREAMS, &[(&Place { buffer, range: 0..LEN }, false)], &mut buffers);
    }
    waits
}

/// The waits between streams that were recorded.
fn waits(handle: &testing::FaultHandle) -> usize {
    handle.calls().iter().filter(|call| **call == "stream_wait_event").count()
}

#[test]
fn a_stream_waits_once_for_what_one_event_covers() {
    let (faults, handle) = testing::faults();
    let (device, step) = testing::manual_with_faults(faults);
    let (a, b, c) = (device.stream().unwrap(), device.stream().unwrap(), device.stream().unwrap());
    let mut x: Vec<_> = (0..6).map(|n| a.full(10, n as f32).queued().unwrap()).collect();
    handle.record();
    // One edge is one event and one wait; it covers everything that was on `a` by then.
    b.fill(&mut x[2], 7.0).queued().unwrap();
    let calls = handle.calls();
    let count = |name: &str| calls.iter().filter(|call| **call == name).count();
    assert_eq!(count("stream_wait_event"), 1, "{calls:?}");
    handle.record();
    (0..6).for_each(|n| b.fill(&mut x[n], 8.0).queued().unwrap());
    assert_eq!(waits(&handle), 0, "what is already ordered");
    // What came later on `a` is not covered.
    let mut later = a.full(10, 9.0f32).queued().unwrap();
    handle.record();
    b.fill(&mut later, 8.0).queued().unwrap();
    b.fill(&mut later, 8.0).queued().unwrap();
    assert_eq!(waits(&handle), 1);
    // Another stream has to wait for itself: for b, the last writer, and for nobody else.
    handle.record();
    c.fill(&mut x[5], 1.0).queued().unwrap();
    assert_eq!(waits(&handle), 1);
    handle.record();
    c.fill(&mut x[4], 1.0).queued().unwrap();
    assert_eq!(waits(&handle), 0, "b wrote it before");
    // What is complete needs no wait.
    step.run_until_idle();
    handle.record();
    (0..6).for_each(|n| a.fill(&mut x[n], 8.0).queued().unwrap());
    assert_eq!(waits(&handle), 0);
    step.run_until_idle();
}

fn run_all(step: &Stepper, choices: &[usize]) {
    for choice in choices {
        if !step.step(*choice) {
            break;
        }
    }
    step.run_until_idle();
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn every_interleaving_gives_what_one_after_the_other_gives(
        program in program(),
        choices in prop::collection::vec(0..1000_usize, 200),
    ) {
        let (faults, handle) = testing::faults();
        let (device, step) = testing::manual_with_faults(faults);
        let machine = Machine::new(device);
        // Without delays: a manual device has no time to lose.
        let program: Program = program.into_iter().map(|(s, step)| match step {
            Step::Delay { .. } => (s, Step::Delay { us: 0 }),
            step => (s, step),
        }).collect();
        handle.record();
        let seen = machine.submit(&program).unwrap();
        // Nothing ran yet, so that nothing was complete. Fewer, where one event covers several.
        let (waits, needed) = (waits(&handle), waits_needed(&program));
        prop_assert!(waits <= needed, "{} of {}", waits, needed);
        run_all(&step, &choices);
        check(&program, seen);
        step.run_until_idle();
        // What nobody has asked for yet gets its marker by this, which then runs.
        let asked = machine.device.stats();
        prop_assert_eq!(asked.allocations, 0);
        step.run_until_idle();
        let stats = machine.device.stats();
        prop_assert_eq!((stats.allocations, stats.lent_bytes, stats.pending_bytes), (0, 0, 0));
    }
}

#[test]
fn a_program_with_delays_gives_what_one_after_the_other_gives() {
    let device = testing::device();
    let machine = Machine::new(device);
    let mut runner = proptest::test_runner::TestRunner::new(config(60));
    let outcome = runner.run(&program(), |program| {
        check(&program, machine.submit(&program).unwrap());
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
