//! Runs a kernel's text on the CPU for tests, one thread at a time: one that the generator wrote, or one of an image. It knows the instructions that are in
//! these, refuses a text with others, and checks each access against its array and for alignment.
//!
//! A text is read once: what is run has numbers for registers and names, and a function for each instruction that computes.
//!
//! | a thread of a block comes to | and goes on when |
//! |---|---|
//! | `shfl.sync` | all lanes of its warp are at the same one: each has what its partner brought |
//! | `bar.sync` | all threads of the block are at the same one |
//! | `ret` | never; a warp that is waited for by others at a barrier must not be there |
//!
//! More than 500 lines: a table of instructions.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use half::{bf16, f16};

/// A register's number in a kernel.
type RegisterNumber = usize;

/// The result of an instruction's operands.
type Computation = fn(&[u64]) -> u64;

// Numbers of what has a name: a function's arguments come next, then shared memory and the kernel's parameters.
const THREAD: usize = 0;
const BLOCK: usize = 1;
const BLOCKS: usize = 2;
const RESULT: usize = 3;
const ARGUMENT: usize = 4;
const SHARED: usize = 6;

#[derive(Clone, Copy)]
enum ReadOperand {
    Register(RegisterNumber),
    Number(u64),
    Named(usize),
}

/// An address.
#[derive(Clone, Copy)]
struct Place {
    base: ReadOperand,
    offset: u64,
}

enum Action {
    /// `griddepcontrol.wait`
    WaitFirst,
    Return,
    Barrier,
    Shuffle {
        to: RegisterNumber,
        value: ReadOperand,
        xor: ReadOperand,
        of: [ReadOperand; 2],
    },
    /// To an instruction.
    Branch(usize),
    Pass {
        name: usize,
        value: ReadOperand,
    },
    Call(fn(u64, u64) -> u64),
    Load {
        to: Vec<RegisterNumber>,
        bytes: usize,
        extended: Computation,
        place: Place,
    },
    Store {
        from: Vec<RegisterNumber>,
        bytes: usize,
        place: Place,
    },
    /// A register's lower and upper half.
    Split {
        to: [RegisterNumber; 2],
        half_bits: usize,
        value: ReadOperand,
    },
    Join {
        to: RegisterNumber,
        half_bits: usize,
        from: [RegisterNumber; 2],
    },
    Compute {
        to: RegisterNumber,
        computation: Computation,
        operands: Vec<ReadOperand>,
    },
}

struct Instruction {
    /// A register, and whether the instruction is skipped where it holds.
    guard: Option<(RegisterNumber, bool)>,
    action: Action,
}

/// A kernel's instructions.
pub(super) struct KernelText {
    instructions: Vec<Instruction>,
    registers: usize,
    /// Bytes of shared memory, of each array.
    shared: Vec<usize>,
}

/// Arrays, far from one another.
#[derive(Clone, Default)]
pub(super) struct FakeMemory {
    pub(super) arrays: Vec<Vec<u8>>,
    starts: Vec<u64>,
    /// How often each byte was written, of each array.
    pub(super) written: Vec<Vec<u8>>,
}

impl FakeMemory {
    /// Adds an array at an address that is a multiple of 256, plus `offset` bytes.
    pub(super) fn add(&mut self, bytes: Vec<u8>, offset: u64) -> u64 {
        let start = ((self.arrays.len() as u64 + 1) << 40) + offset;
        self.written.push(vec![0; bytes.len()]);
        self.arrays.push(bytes);
        self.starts.push(start);
        start
    }

    /// Takes the last array away.
    fn remove_last(&mut self) {
        self.arrays.pop();
        self.starts.pop();
        self.written.pop();
    }

    /// The array and the place in it.
    fn find(&self, address: u64, bytes: usize) -> (usize, usize) {
        assert!(address.is_multiple_of(bytes as u64), "{address:#x} is not aligned to {bytes}");
        let array = ((address >> 40) as usize).wrapping_sub(1);
        if let Some(start) = self.starts.get(array)
            && address >= *start
            && (address - start) as usize + bytes <= self.arrays[array].len()
        {
            return (array, (address - start) as usize);
        }
        panic!("{bytes} bytes at {address:#x} are outside of the arrays");
    }

    fn read(&self, (array, at): (usize, usize), bytes: usize) -> u64 {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(&self.arrays[array][at..at + bytes]);
        u64::from_le_bytes(value)
    }

    fn write(&mut self, (array, at): (usize, usize), bytes: usize, value: u64) {
        self.arrays[array][at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        for times in &mut self.written[array][at..at + bytes] {
            *times = times.saturating_add(1);
        }
    }
}

/// A text while it is read.
struct Reader<'t> {
    kernel: &'t str,
    registers: HashMap<&'t str, RegisterNumber>,
    labels: HashMap<&'t str, usize>,
    /// Names of shared memory.
    shared: Vec<&'t str>,
}

impl<'t> Reader<'t> {
    fn register(&mut self, name: &'t str) -> RegisterNumber {
        let name = name.trim();
        assert!(name.starts_with('%'), "{name} is no register");
        let number = self.registers.len();
        *self.registers.entry(name).or_insert(number)
    }

    /// One, or those of a vector.
    fn registers(&mut self, text: &'t str) -> Vec<RegisterNumber> {
        match text.strip_prefix('{') {
            Some(list) => {
                list.trim_end_matches('}').split(',').map(|name| self.register(name)).collect()
            }
            // Behind it is whether the partner takes part, as all do.
            None => vec![self.register(text.split('|').next().expect("a register"))],
        }
    }

    fn named(&self, name: &str) -> usize {
        let parameter = name
            .strip_prefix(self.kernel)
            .and_then(|name| name.strip_prefix("_param_"))
            .or_else(|| name.strip_prefix('p'))
            .and_then(|digits| digits.parse::<usize>().ok());
        let shared = || self.shared.iter().position(|shared| *shared == name);
        match name {
            "%tid.x" => THREAD,
            "%ctaid.x" => BLOCK,
            "%nctaid.x" => BLOCKS,
            "result" => RESULT,
            "a0" => ARGUMENT,
            "a1" => ARGUMENT + 1,
            _ => match parameter {
                Some(number) => SHARED + self.shared.len() + number,
                None => SHARED + shared().unwrap_or_else(|| panic!("{name}")),
            },
        }
    }

    fn operand(&mut self, text: &'t str) -> ReadOperand {
        let hexadecimal = |digits| u64::from_str_radix(digits, 16).expect("digits");
        match text {
            _ if ["%tid", "%ctaid", "%nctaid"].iter().any(|name| text.starts_with(name)) => {
                ReadOperand::Named(self.named(text))
            }
            _ if text.starts_with('%') => ReadOperand::Register(self.register(text)),
            _ if ["0f", "0d", "0x"].iter().any(|prefix| text.starts_with(prefix)) => {
                ReadOperand::Number(hexadecimal(&text[2..]))
            }
            _ => match text.parse::<i64>() {
                Ok(number) => ReadOperand::Number(number as u64),
                Err(_) => ReadOperand::Named(self.named(text)),
            },
        }
    }

    fn place(&mut self, text: &'t str) -> Place {
        let place = inside(text);
        match place.split_once('+') {
            Some((base, offset)) => Place {
                base: ReadOperand::Register(self.register(base)),
                offset: offset.parse::<i64>().expect("bytes") as u64,
            },
            None => Place { base: self.operand(place), offset: 0 },
        }
    }

    fn action(&mut self, op: &'t str, operands: &[&'t str]) -> Action {
        let parts: Vec<&str> = op.split('.').collect();
        match parts[..] {
            ["griddepcontrol", "wait"] => Action::WaitFirst,
            ["ret"] => Action::Return,
            ["bar", "sync"] => Action::Barrier,
            ["shfl", "sync", "bfly", "b32"] => Action::Shuffle {
                to: self.registers(operands[0])[0],
                value: self.operand(operands[1]),
                xor: self.operand(operands[2]),
                of: [3, 4].map(|at| self.operand(operands[at])),
            },
            ["bra"] | ["bra", "uni"] => Action::Branch(self.labels[operands[0]]),
            ["st", "param", _] => Action::Pass {
                name: self.named(inside(operands[0])),
                value: self.operand(operands[1]),
            },
            ["call"] => Action::Call(function(operands[1])),
            ["ld", "param", kind] => {
                let name = ReadOperand::Named(self.named(inside(operands[1])));
                Action::Compute {
                    to: self.register(operands[0]),
                    computation: extended(kind),
                    operands: vec![name],
                }
            }
            ["ld", "global" | "shared", .., kind] => Action::Load {
                to: self.registers(operands[0]),
                bytes: bytes_of(kind),
                extended: extended(kind),
                place: self.place(operands[1]),
            },
            ["st", "global" | "shared", .., kind] => Action::Store {
                from: self.registers(operands[1]),
                bytes: bytes_of(kind),
                place: self.place(operands[0]),
            },
            ["mov", kind] if operands[0].starts_with('{') => Action::Split {
                to: self.registers(operands[0]).try_into().expect("two halves"),
                half_bits: 4 * bytes_of(kind),
                value: self.operand(operands[1]),
            },
            ["mov", kind] if operands[1].starts_with('{') => Action::Join {
                to: self.register(operands[0]),
                half_bits: 4 * bytes_of(kind),
                from: self.registers(operands[1]).try_into().expect("two halves"),
            },
            _ => Action::Compute {
                to: self.register(operands[0]),
                computation: computation(&parts),
                operands: operands[1..].iter().map(|text| self.operand(text)).collect(),
            },
        }
    }
}

/// What is between brackets.
fn inside(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).expect("brackets")
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let parts = text.split(|letter| {
        match letter {
            '{' | '(' => depth += 1,
            '}' | ')' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// A thread on its way.
struct FakeThread {
    /// Reading one that was never set is an error, and so is the value of a name that was not passed.
    registers: Vec<Option<u64>>,
    passed: Vec<Option<u64>>,
    next: usize,
    steps: usize,
}

/// Where a thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Returned,
    /// At an instruction, which it is behind of.
    Barrier(usize),
    Shuffle {
        at: usize,
        to: RegisterNumber,
        value: u64,
        xor: u64,
    },
}

impl FakeThread {
    fn register(&self, number: RegisterNumber) -> u64 {
        self.registers[number].expect("a register that was set")
    }

    fn value(&self, operand: &ReadOperand) -> u64 {
        match *operand {
            ReadOperand::Register(number) => self.register(number),
            ReadOperand::Number(number) => number,
            ReadOperand::Named(name) => self.passed[name].expect("a value that was passed"),
        }
    }

    fn address(&self, place: &Place) -> u64 {
        self.value(&place.base).wrapping_add(place.offset)
    }
}

impl KernelText {
    pub(super) fn read(text: &str) -> KernelText {
        let (_, kernel) = text.split_once(".visible .entry").expect("a kernel");
        let (_, body) = kernel.split_once('{').expect("a body");
        KernelText::of_body("", body, &[])
    }

    /// One kernel of several.
    pub(super) fn entry(text: &str, name: &str) -> KernelText {
        let (_, kernel) = text.split_once(&format!(".visible .entry {name}(")).expect("the kernel");
        let (_, body) = kernel.split_once("\n{").expect("a body");
        let shared: Vec<(&str, usize)> = text.lines().filter_map(shared).collect();
        KernelText::of_body(name, body.split_once("\n}").expect("an end").0, &shared)
    }

    fn of_body(kernel: &str, body: &str, shared: &[(&str, usize)]) -> KernelText {
        let (mut lines, mut labels) = (Vec::new(), HashMap::new());
        for line in body.lines().map(str::trim) {
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label, lines.len());
            } else if let Some(line) = line.strip_suffix(';')
                && !line.starts_with('.')
            {
                lines.push(line);
            }
        }
        let names = shared.iter().map(|(name, _)| *name).collect();
        let mut reader = Reader { kernel, registers: HashMap::new(), labels, shared: names };
        let mut instructions = Vec::new();
        for line in lines {
            let (guard, line) = match line.strip_prefix('@') {
                Some(line) => {
                    let (guard, line) = line.split_once(' ').expect("an instruction");
                    let plain = guard.trim_start_matches('!');
                    (Some((reader.register(plain), plain != guard)), line)
                }
                None => (None, line),
            };
            let (op, rest) = line.split_once([' ', '\t']).unwrap_or((line, ""));
            let action = reader.action(op, &split(rest));
            instructions.push(Instruction { guard, action });
        }
        let shared = shared.iter().map(|(_, bytes)| *bytes).collect();
        KernelText { instructions, registers: reader.registers.len(), shared }
    }

    fn thread(&self, params: &[u64], block: u64, thread: u64) -> FakeThread {
        let mut passed = vec![None; SHARED + self.shared.len()];
        passed[THREAD] = Some(thread);
        passed[BLOCK] = Some(block);
        passed.extend(params.iter().map(|value| Some(*value)));
        FakeThread { registers: vec![None; self.registers], passed, next: 0, steps: 0 }
    }

    /// Runs one thread.
    pub(super) fn run(&self, memory: &mut FakeMemory, params: &[u64], (block, thread): (u64, u64)) {
        let stop = self.advance(memory, &mut self.thread(params, block, thread));
        assert_eq!(stop, Stop::Returned, "it is alone");
    }

    /// Runs all threads of a block of a grid of so many.
    pub(super) fn run_block(
        &self,
        memory: &mut FakeMemory,
        params: &[u64],
        (block, blocks): (u64, u64),
        threads: u64,
    ) {
        let all = (0..threads).map(|thread| self.thread(params, block, thread));
        let mut all: Vec<FakeThread> = all.collect();
        for thread in &mut all {
            thread.passed[BLOCKS] = Some(blocks);
        }
        for (number, bytes) in self.shared.iter().enumerate() {
            // What was there before.
            let start = memory.add(vec![0xFF; *bytes], 0);
            for thread in &mut all {
                thread.passed[SHARED + number] = Some(start);
            }
        }
        loop {
            let warps = all.chunks_mut(32).map(|warp| self.advance_warp(memory, warp));
            let stops: Vec<Stop> = warps.collect();
            assert!(stops.iter().all(|stop| *stop == stops[0]), "a barrier without {stops:?}");
            if stops[0] == Stop::Returned {
                break;
            }
        }
        self.shared.iter().for_each(|_| memory.remove_last());
    }

    /// Runs a warp up to a barrier, or to its end.
    fn advance_warp(&self, memory: &mut FakeMemory, warp: &mut [FakeThread]) -> Stop {
        loop {
            let stops: Vec<Stop> = warp.iter_mut().map(|lane| self.advance(memory, lane)).collect();
            let Stop::Shuffle { at: first, .. } = stops[0] else {
                assert!(stops.iter().all(|stop| *stop == stops[0]), "lanes part: {stops:?}");
                return stops[0];
            };
            for (lane, stop) in stops.iter().enumerate() {
                let Stop::Shuffle { at, to, xor, .. } = *stop else {
                    panic!("lanes part: {stops:?}")
                };
                assert_eq!(at, first, "lanes part");
                let Stop::Shuffle { value, .. } = stops[lane ^ xor as usize] else {
                    panic!("lanes part: {stops:?}")
                };
                warp[lane].registers[to] = Some(value);
            }
        }
    }

    /// Runs one thread as far as it comes alone.
    fn advance(&self, memory: &mut FakeMemory, thread: &mut FakeThread) -> Stop {
        while let Some(Instruction { guard, action }) = self.instructions.get(thread.next) {
            thread.next += 1;
            thread.steps += 1;
            assert!(thread.steps < 1_000_000, "it does not end");
            if let Some((guard, is_not)) = guard
                && (thread.register(*guard) == 0) != *is_not
            {
                continue;
            }
            match action {
                Action::WaitFirst => assert_eq!(thread.steps, 1, "it waits first"),
                Action::Return => return Stop::Returned,
                Action::Barrier => return Stop::Barrier(thread.next),
                Action::Shuffle { to, value, xor, of: [lanes, members] } => {
                    let of = (thread.value(lanes), thread.value(members) as u32);
                    assert_eq!(of, (31, u32::MAX), "of a whole warp");
                    let (value, xor) = (thread.value(value), thread.value(xor));
                    return Stop::Shuffle { at: thread.next, to: *to, value, xor };
                }
                Action::Branch(next) => thread.next = *next,
                Action::Pass { name, value } => thread.passed[*name] = Some(thread.value(value)),
                Action::Call(function) => {
                    let [x, y] = [0, 1].map(|at| thread.passed[ARGUMENT + at].unwrap_or(0));
                    thread.passed[RESULT] = Some(function(x, y));
                }
                Action::Load { to, bytes, extended, place } => {
                    let (array, at) = memory.find(thread.address(place), bytes * to.len());
                    for (lane, to) in to.iter().enumerate() {
                        let value = memory.read((array, at + lane * bytes), *bytes);
                        thread.registers[*to] = Some(extended(&[value]));
                    }
                }
                Action::Store { from, bytes, place } => {
                    let (array, at) = memory.find(thread.address(place), bytes * from.len());
                    for (lane, from) in from.iter().enumerate() {
                        let value = thread.register(*from);
                        memory.write((array, at + lane * bytes), *bytes, value);
                    }
                }
                Action::Split { to: [low, high], half_bits, value } => {
                    let value = thread.value(value);
                    thread.registers[*low] = Some(value & !(u64::MAX << half_bits));
                    thread.registers[*high] = Some(value >> half_bits);
                }
                Action::Join { to, half_bits, from: [low, high] } => {
                    let high = thread.register(*high) << half_bits;
                    thread.registers[*to] = Some(thread.register(*low) | high);
                }
                Action::Compute { to, computation, operands } => {
                    let mut values = [0; 4];
                    for (value, operand) in values.iter_mut().zip(operands) {
                        *value = thread.value(operand);
                    }
                    thread.registers[*to] = Some(computation(&values[..operands.len()]));
                }
            }
        }
        panic!("it ends without `ret`");
    }
}

/// Name and bytes of the shared memory that a line declares.
fn shared(line: &str) -> Option<(&str, usize)> {
    let declared = line.trim_start().strip_prefix(".shared ")?.split(' ').next_back()?;
    let (name, bytes) = declared.trim_end_matches("];").split_once('[')?;
    Some((name, bytes.parse().ok()?))
}

fn bytes_of(kind: &str) -> usize {
    kind[1..].parse::<usize>().expect("bits") / 8
}

/// The contents of a register after loading a value of that type.
fn extended(kind: &str) -> Computation {
    match kind {
        "s8" => |v| v[0] as i8 as u32 as u64,
        "s16" => |v| v[0] as i16 as u32 as u64,
        "u8" => |v| v[0] as u8 as u64,
        "u16" | "b16" => |v| v[0] as u16 as u64,
        "u32" | "s32" | "b32" | "f32" => |v| v[0] as u32 as u64,
        _ => |v| v[0],
    }
}

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn double(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// A number, or its answer to a question, as bits.
trait Bits {
    fn bits(self) -> u64;
}
impl Bits for f32 {
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}
impl Bits for f64 {
    fn bits(self) -> u64 {
        self.to_bits()
    }
}
impl Bits for bool {
    fn bits(self) -> u64 {
        self.into()
    }
}
impl Bits for u32 {
    fn bits(self) -> u64 {
        self.into()
    }
}
impl Bits for i32 {
    fn bits(self) -> u64 {
        (self as u32).into()
    }
}
impl Bits for u64 {
    fn bits(self) -> u64 {
        self
    }
}
impl Bits for i64 {
    fn bits(self) -> u64 {
        self as u64
    }
}

/// The functions that are not in the text: the host's.
fn function(name: &str) -> fn(u64, u64) -> u64 {
    match name.trim_start_matches("gpu_await_") {
        "exp_f32" => |x, _| single(x).exp().bits(),
        "exp_f64" => |x, _| double(x).exp().bits(),
        "ln_f32" => |x, _| single(x).ln().bits(),
        "ln_f64" => |x, _| double(x).ln().bits(),
        "sin_f32" => |x, _| single(x).sin().bits(),
        "sin_f64" => |x, _| double(x).sin().bits(),
        "cos_f32" => |x, _| single(x).cos().bits(),
        "cos_f64" => |x, _| double(x).cos().bits(),
        "tanh_f32" => |x, _| single(x).tanh().bits(),
        "tanh_f64" => |x, _| double(x).tanh().bits(),
        "powf_f32" => |x, y| single(x).powf(single(y)).bits(),
        "powf_f64" => |x, y| double(x).powf(double(y)).bits(),
        "rem_f32" => |x, y| (single(x) % single(y)).bits(),
        "rem_f64" => |x, y| (double(x) % double(y)).bits(),
        other => panic!("{other}"),
    }
}

/// The lesser, with -0 before +0 and numbers before NaNs.
macro_rules! least {
    ($a:expr, $b:expr) => {
        match ($a, $b) {
            (a, b) if a.is_nan() => b,
            (a, b) if b.is_nan() => a,
            (a, b) if a < b || (a == b && a.is_sign_negative()) => a,
            (_, b) => b,
        }
    };
}

macro_rules! of_floats_of {
    ($type:ident, $of:ident, $parts:ident) => {
        match $parts[..$parts.len() - 1] {
            ["cvt", "rmi", _] => |v| $of(v[0]).floor().bits(),
            ["cvt", "rpi", _] => |v| $of(v[0]).ceil().bits(),
            ["cvt", "rzi", _] => |v| $of(v[0]).trunc().bits(),
            ["add"] | ["add", "rn"] => |v| ($of(v[0]) + $of(v[1])).bits(),
            ["sub"] | ["sub", "rn"] => |v| ($of(v[0]) - $of(v[1])).bits(),
            ["mul"] | ["mul", "rn"] => |v| ($of(v[0]) * $of(v[1])).bits(),
            ["div", "rn"] => |v| ($of(v[0]) / $of(v[1])).bits(),
            ["fma", "rn"] => |v| $of(v[0]).mul_add($of(v[1]), $of(v[2])).bits(),
            ["sqrt", "rn"] => |v| $of(v[0]).sqrt().bits(),
            ["rcp", "rn"] => |v| (1.0 / $of(v[0])).bits(),
            ["neg"] => |v| (-$of(v[0])).bits(),
            ["abs"] => |v| $of(v[0]).abs().bits(),
            ["copysign"] => |v| $of(v[1]).copysign($of(v[0])).bits(),
            ["min"] => |v| least!($of(v[0]), $of(v[1])).bits(),
            ["max"] => |v| (-least!(-$of(v[0]), -$of(v[1]))).bits(),
            ["max", "NaN"] => |v| match ($of(v[0]), $of(v[1])) {
                (a, b) if a.is_nan() || b.is_nan() => $type::NAN.bits(),
                (a, b) => (-least!(-a, -b)).bits(),
            },
            ["setp", "lt"] => |v| ($of(v[0]) < $of(v[1])).bits(),
            ["setp", "le"] => |v| ($of(v[0]) <= $of(v[1])).bits(),
            ["setp", "gt"] => |v| ($of(v[0]) > $of(v[1])).bits(),
            ["setp", "ge"] => |v| ($of(v[0]) >= $of(v[1])).bits(),
            ["setp", "eq"] => |v| ($of(v[0]) == $of(v[1])).bits(),
            // And so it is where one is NaN.
            ["setp", "neu"] => |v| ($of(v[0]) != $of(v[1])).bits(),
            ["setp", "leu"] => {
                |v| $of(v[0]).partial_cmp(&$of(v[1])).is_none_or(|order| order.is_le()).bits()
            }
            ["setp", "num"] => |v| $of(v[0]).partial_cmp(&$of(v[1])).is_some().bits(),
            ["setp", "nan"] => |v| $of(v[0]).partial_cmp(&$of(v[1])).is_none().bits(),
            _ => panic!("{:?}", $parts),
        }
    };
}

macro_rules! of_integers {
    ($parts:expr; $($name:literal $type:ident;)+) => {
        match $parts {
            $(
                ["add", $name] => |v| (v[0] as $type).wrapping_add(v[1] as $type).bits(),
                ["sub", $name] => |v| (v[0] as $type).wrapping_sub(v[1] as $type).bits(),
                ["mul", "lo", $name] => |v| (v[0] as $type).wrapping_mul(v[1] as $type).bits(),
                ["mad", "lo", $name] => |v| {
                    (v[0] as $type).wrapping_mul(v[1] as $type).wrapping_add(v[2] as $type).bits()
                },
                // Division by zero panics, and so does the least number by -1: the text must avoid both.
                ["div", $name] => |v| (v[0] as $type / v[1] as $type).bits(),
                ["rem", $name] => |v| (v[0] as $type % v[1] as $type).bits(),
                ["min", $name] => |v| (v[0] as $type).min(v[1] as $type).bits(),
                ["max", $name] => |v| (v[0] as $type).max(v[1] as $type).bits(),
                ["neg", $name] => |v| (v[0] as $type).wrapping_neg().bits(),
                ["shr", $name] => |v| ((v[0] as $type) >> v[1]).bits(),
                ["setp", "lt", $name] => |v| ((v[0] as $type) < v[1] as $type).bits(),
                ["setp", "le", $name] => |v| (v[0] as $type <= v[1] as $type).bits(),
                ["setp", "gt", $name] => |v| (v[0] as $type > v[1] as $type).bits(),
                ["setp", "ge", $name] => |v| (v[0] as $type >= v[1] as $type).bits(),
                ["setp", "eq", $name] => |v| (v[0] as $type == v[1] as $type).bits(),
                ["setp", "ne", $name] => |v| (v[0] as $type != v[1] as $type).bits(),
                ["cvt", "rn", "f32", $name] => |v| (v[0] as $type as f32).bits(),
                ["cvt", "rn", "f64", $name] => |v| (v[0] as $type as f64).bits(),
                ["cvt", "rz", "f32", $name] => |v| toward_zero(v[0] as $type as i128).bits(),
                // The result for a NaN is 0 only where both have 32 bits.
                ["cvt", "rzi", $name, "f32"] => |v| match single(v[0]) {
                    x if x.is_nan() && $type::BITS == 64 => 1 << 63,
                    x => (x as $type).bits(),
                },
                ["cvt", "rzi", $name, "f64"] => |v| match double(v[0]) {
                    x if x.is_nan() => 1 << ($type::BITS - 1),
                    x => (x as $type).bits(),
                },
            )+
            _ => of_floats(&$parts),
        }
    };
}

/// What an instruction computes that writes one register.
fn computation(parts: &[&str]) -> Computation {
    match *parts {
        ["setp", "eq", "or", "u32"] => |v| (v[0] as u32 == v[1] as u32 || v[2] != 0).bits(),
        ["mul", "wide", "u32"] => |v| u64::from(v[0] as u32) * u64::from(v[1] as u32),
        ["mad", "wide", "u32"] => |v| u64::from(v[0] as u32) * u64::from(v[1] as u32) + v[2],
        ["cvta", ..] => |v| v[0],
        ["mov", "b32" | "u32" | "f32"] => |v| (v[0] as u32).bits(),
        ["mov", _] => |v| v[0],
        ["shl", "b32"] => |v| ((v[0] as u32) << v[1]).bits(),
        ["shl", "b64"] => |v| v[0] << v[1],
        ["shr", "b32"] => |v| ((v[0] as u32) >> v[1]).bits(),
        ["and", _] => |v| v[0] & v[1],
        ["or", _] => |v| v[0] | v[1],
        ["xor", _] => |v| v[0] ^ v[1],
        ["not", "pred"] => |v| v[0] ^ 1,
        ["not", "b32"] => |v| (!v[0] as u32).bits(),
        ["not", "b64"] => |v| !v[0],
        ["selp", "b32" | "f32"] => |v| ((if v[2] != 0 { v[0] } else { v[1] }) as u32).bits(),
        ["selp", _] => |v| {
            if v[2] != 0 { v[0] } else { v[1] }
        },
        ["bfe", "u32"] => |v| ((v[0] as u32) >> v[1] & (u32::MAX >> (32 - v[2]))).bits(),
        ["bfe", "s32"] => |v| (((v[0] as i32) << (32 - v[1] - v[2])) >> (32 - v[2])).bits(),
        ["prmt", "b32"] => |v| {
            let bytes = (v[1] << 32 | u64::from(v[0] as u32)).to_le_bytes();
            let byte = |at: u32| bytes[(v[2] >> (4 * at) & 7) as usize];
            u32::from_le_bytes([0, 1, 2, 3].map(byte)).bits()
        },
        ["cvt", "u32", "u64" | "u16"] => |v| (v[0] as u32).bits(),
        ["cvt", "u64", "u32"] => |v| u64::from(v[0] as u32),
        ["cvt", "s64", "s32"] => |v| i64::from(v[0] as i32).bits(),
        _ => of_integers! { *parts; "u32" u32; "s32" i32; "u64" u64; "s64" i64; },
    }
}

/// Rounds an integer toward zero.
fn toward_zero(value: i128) -> f32 {
    let near = value as f32;
    let is_farther = (near as i128).unsigned_abs() > value.unsigned_abs();
    f32::from_bits(near.to_bits() - u32::from(is_farther))
}

fn half(value: u64) -> u64 {
    f16::from_f32(single(value)).to_bits().into()
}

fn brain(value: u64) -> u64 {
    bf16::from_f32(single(value)).to_bits().into()
}

fn of_floats(parts: &[&str]) -> Computation {
    match *parts {
        ["cvt", "f32", "f16"] => |v| f16::from_bits(v[0] as u16).to_f32().bits(),
        ["cvt", "rn", "f16", "f32"] => |v| half(v[0]),
        ["cvt", "sat", "f32", "f32"] => |v| match single(v[0]) {
            x if x.is_nan() => 0.0f32.bits(),
            x => x.clamp(0.0, 1.0).bits(),
        },
        ["fma", "rm", "f32"] => |v| {
            let [a, b, c] = [0, 1, 2].map(|at| f64::from(single(v[at])));
            let exact = a.mul_add(b, c);
            let near = exact as f32;
            if f64::from(near) > exact { near.next_down().bits() } else { near.bits() }
        },
        ["ex2", "approx", "ftz", "f32"] => |v| match single(v[0]).exp2() {
            x if x.is_subnormal() => 0.0f32.bits(),
            x => x.bits(),
        },
        ["cvt", "rn", "bf16", "f32"] => |v| brain(v[0]),
        ["cvt", "rn", "f16x2", "f32"] => |v| half(v[0]) << 16 | half(v[1]),
        ["cvt", "rn", "bf16x2", "f32"] => |v| brain(v[0]) << 16 | brain(v[1]),
        ["cvt", "f64", "f32"] => |v| f64::from(single(v[0])).bits(),
        ["cvt", "rn", "f32", "f64"] => |v| (double(v[0]) as f32).bits(),
        ["cvt", "rz", "f32", "f64"] => |v| {
            let (value, near) = (double(v[0]), double(v[0]) as f32);
            let is_farther = f64::from(near).abs() > value.abs();
            f32::from_bits(near.to_bits() - u32::from(is_farther)).bits()
        },
        [.., "f32"] => of_floats_of!(f32, single, parts),
        [.., "f64"] => of_floats_of!(f64, double, parts),
        _ => panic!("{parts:?}"),
    }
}
