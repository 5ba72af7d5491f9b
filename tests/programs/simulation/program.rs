//! Random programs: what a user of the crate, its device and its driver do, in one list.

use gpu_await::ErrorKind;
use gpu_await::testing::DriverCall;

pub(crate) const STREAMS: usize = 3;
pub(crate) const BUFFERS: usize = 3;
pub(crate) const EVENTS: usize = 2;
pub(crate) const LEN: usize = 12;

/// Part of a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) buffer: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// What happens to the future of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Given up at once: `queued` where there is one, a drop otherwise.
    Go,
    /// Polled, dropped or leaked later.
    Keep,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Contents {
    Empty,
    Full(u8),
    Upload(u8),
}

/// What is waited for or observed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Point {
    Stream(usize),
    Event(usize),
    Op(usize),
    Device,
}

/// How the operations of two streams become one future.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Join {
    And,
    All,
}

/// A step of a program. Numbers of things are taken modulo those that are there; a step whose
/// thing is missing does nothing, so that any part of a program is a program.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    OpenStream {
        stream: usize,
    },
    DropStream {
        stream: usize,
    },
    Make {
        stream: usize,
        buffer: usize,
        contents: Contents,
        then: Then,
    },
    DropBuffer {
        buffer: usize,
    },
    Fill {
        stream: usize,
        to: Place,
        value: u8,
        then: Then,
    },
    Scale {
        stream: usize,
        to: Place,
        then: Then,
    },
    Axpy {
        stream: usize,
        from: Place,
        to: Place,
        then: Then,
    },
    Copy {
        stream: usize,
        from: Place,
        to: Place,
        then: Then,
    },
    UploadInto {
        stream: usize,
        to: Place,
        value: u8,
        then: Then,
    },
    Download {
        stream: usize,
        from: Place,
        pageable: bool,
        then: Then,
    },
    HostFn {
        stream: usize,
        panics: bool,
        then: Then,
    },
    Batch {
        stream: usize,
        from: Place,
        to: Place,
        value: u8,
        then: Then,
    },
    Timed {
        stream: usize,
        to: Place,
        value: u8,
        then: Then,
    },
    /// A replayed batch of launches, or a launch of a graph of the same.
    Launches {
        stream: usize,
        from: Place,
        to: Place,
        as_graph: bool,
        then: Then,
    },
    Pair {
        streams: [usize; 2],
        join: Join,
        then: Then,
    },
    Record {
        stream: usize,
        event: usize,
    },
    DropEvent {
        event: usize,
    },
    Wait {
        stream: usize,
        on: Point,
    },
    Done {
        of: Point,
    },
    Poll {
        op: usize,
        panics: bool,
    },
    TryTake {
        op: usize,
    },
    IsComplete {
        op: usize,
    },
    DropOp {
        op: usize,
    },
    Leak {
        op: usize,
    },
    Stats,
    Step {
        choices: Vec<u8>,
    },
    Idle,
    Advance {
        us: u16,
    },
    Fail {
        call: DriverCall,
        nth: u64,
        kind: ErrorKind,
        after_effect: bool,
    },
    Lose,
    Trap {
        stream: usize,
    },
    Close,
}

/// What may go wrong in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    None,
    /// Calls of the driver are refused.
    Refusals,
    /// The device faults, is lost or is closed; calls are refused as well.
    Loss,
}

/// Splitmix64: the same numbers on every machine.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn then(&mut self) -> Then {
        if self.one_in(2) { Then::Keep } else { Then::Go }
    }

    fn place(&mut self) -> Place {
        let buffer = self.below(BUFFERS);
        let (start, end) = match self.below(4) {
            0 | 1 => (0, LEN),
            2 => (0, 1 + self.below(LEN)),
            _ => {
                let start = self.below(LEN);
                (start, start + 1 + self.below(LEN - start))
            }
        };
        Place { buffer, start, end }
    }

    /// Two places of one length in different buffers.
    fn places(&mut self) -> (Place, Place) {
        let from = self.place();
        let len = from.end - from.start;
        let start = self.below(LEN - len + 1);
        let buffer = (from.buffer + 1 + self.below(BUFFERS - 1)) % BUFFERS;
        (from, Place { buffer, start, end: start + len })
    }

    fn point(&mut self) -> Point {
        match self.below(6) {
            0 | 1 => Point::Stream(self.below(STREAMS)),
            2 | 3 => Point::Event(self.below(EVENTS)),
            4 => Point::Op(self.below(64)),
            _ => Point::Device,
        }
    }
}

/// Calls that fail without the device being gone.
const REFUSED: [DriverCall; 17] = [
    DriverCall::StreamCreate,
    DriverCall::StreamWaitEvent,
    DriverCall::EventCreate,
    DriverCall::EventRecord,
    DriverCall::EventRecordAll,
    DriverCall::WriteWord,
    DriverCall::HostFn,
    DriverCall::Alloc,
    DriverCall::Free,
    DriverCall::Register,
    DriverCall::CopyToDevice,
    DriverCall::CopyToHost,
    DriverCall::CopyOnDevice,
    DriverCall::Launch,
    DriverCall::GraphCompile,
    DriverCall::GraphSet,
    DriverCall::GraphLaunch,
];

/// The program of a seed.
pub(crate) fn program(seed: u64, trouble: Trouble) -> Vec<Action> {
    let mut random = Random::new(seed);
    let mut actions = vec![
        Action::OpenStream { stream: 0 },
        Action::OpenStream { stream: 1 },
        Action::Make { stream: 0, buffer: 0, contents: Contents::Full(1), then: Then::Go },
        Action::Make { stream: 1, buffer: 1, contents: Contents::Upload(2), then: Then::Go },
    ];
    let len = 8 + random.below(60);
    for _ in 0..len {
        let action = match trouble {
            Trouble::Refusals if random.one_in(8) => refusal(&mut random),
            Trouble::Loss if random.one_in(24) => loss(&mut random),
            _ => action(&mut random),
        };
        actions.push(action);
    }
    actions
}

fn refusal(random: &mut Random) -> Action {
    Action::Fail {
        call: REFUSED[random.below(REFUSED.len())],
        nth: 1 + random.below(3) as u64,
        kind: [ErrorKind::OutOfMemory, ErrorKind::Driver, ErrorKind::Unsupported][random.below(3)],
        after_effect: random.one_in(2),
    }
}

fn loss(random: &mut Random) -> Action {
    match random.below(6) {
        0 => Action::Lose,
        1 => Action::Trap { stream: random.below(STREAMS) },
        2 => Action::Close,
        3 => refusal(random),
        4 => Action::Fail {
            call: DriverCall::EventQuery,
            nth: 1 + random.below(4) as u64,
            kind: ErrorKind::Driver,
            after_effect: random.one_in(2),
        },
        _ => match refusal(random) {
            Action::Fail { call, nth, after_effect, .. } => {
                Action::Fail { call, nth, kind: ErrorKind::DeviceLost, after_effect }
            }
            other => other,
        },
    }
}

fn action(random: &mut Random) -> Action {
    let (stream, buffer) = (random.below(STREAMS), random.below(BUFFERS));
    let (op, then) = (random.below(64), random.then());
    match random.below(64) {
        0 => Action::OpenStream { stream },
        1 => Action::DropStream { stream },
        2..=4 => {
            let value = random.byte();
            let contents = match random.below(5) {
                0 => Contents::Empty,
                1 | 2 => Contents::Full(value),
                _ => Contents::Upload(value),
            };
            Action::Make { stream, buffer, contents, then }
        }
        5 | 6 => Action::DropBuffer { buffer },
        7..=9 => Action::Fill { stream, to: random.place(), value: random.byte(), then },
        10..=12 => Action::Scale { stream, to: random.place(), then },
        13..=15 => {
            let (from, to) = random.places();
            Action::Axpy { stream, from, to, then }
        }
        16..=18 => {
            let (from, to) = random.places();
            Action::Copy { stream, from, to, then }
        }
        19 | 20 => Action::UploadInto { stream, to: random.place(), value: random.byte(), then },
        21..=24 => {
            Action::Download { stream, from: random.place(), pageable: random.one_in(3), then }
        }
        25..=27 => Action::HostFn { stream, panics: random.one_in(8), then },
        28 => {
            let (from, to) = (random.place(), random.place());
            Action::Batch { stream, from, to, value: random.byte(), then }
        }
        29 => Action::Timed { stream, to: random.place(), value: random.byte(), then },
        30 => {
            let join = if random.one_in(2) { Join::And } else { Join::All };
            Action::Pair { streams: [stream, random.below(STREAMS)], join, then }
        }
        31 => Action::Record { stream, event: random.below(EVENTS) },
        32 => Action::DropEvent { event: random.below(EVENTS) },
        33 | 34 => Action::Wait { stream, on: random.point() },
        35 => Action::Done { of: random.point() },
        36..=44 => Action::Poll { op, panics: random.one_in(10) },
        45 => Action::TryTake { op },
        46 => Action::IsComplete { op },
        47 | 48 => Action::DropOp { op },
        49 => Action::Leak { op },
        50 => Action::Stats,
        51 => Action::Idle,
        52 => Action::Advance { us: random.next() as u16 % 300 },
        53..=56 => {
            let (from, to) = random.places();
            Action::Launches { stream, from, to, as_graph: random.one_in(2), then }
        }
        _ => {
            let count = 1 + random.below(8);
            Action::Step { choices: (0..count).map(|_| random.byte()).collect() }
        }
    }
}
