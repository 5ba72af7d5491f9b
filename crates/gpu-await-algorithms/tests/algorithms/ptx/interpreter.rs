//! Runs a kernel's text on the CPU for tests, one thread at a time: one that the generator wrote, or one of an image. It knows the instructions that are in
//! these, checks each access against its array and for alignment, and refuses everything else.
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

/// The first index of each class of registers.
const CLASS: usize = 1 << 12;

#[derive(Clone, Debug)]
enum ReadOperand {
    Register(usize),
    Number(u64),
    Registers(Vec<usize>),
    /// A memory operand: a register and an offset.
    Place(usize, u64),
    /// A parameter, or a function's argument or result.
    Named(String),
}

#[derive(Debug)]
struct Instruction<'t> {
    guard: Option<usize>,
    is_not: bool,
    op: Vec<&'t str>,
    operands: Vec<ReadOperand>,
}

/// A kernel's instructions.
pub(super) struct KernelText<'t> {
    instructions: Vec<Instruction<'t>>,
    labels: HashMap<String, usize>,
    name: String,
    /// Names and bytes of shared memory.
    shared: Vec<(String, usize)>,
}

/// Arrays, far from one another.
#[derive(Default)]
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

    fn find(&self, address: u64, bytes: usize, of: usize) -> (usize, usize) {
        assert!(address.is_multiple_of(of as u64), "{address:#x} is not aligned to {of}");
        let inside = |(start, array): (&u64, &Vec<u8>)| {
            let at = address.checked_sub(*start)? as usize;
            (at + bytes <= array.len()).then_some(at)
        };
        let mut all = self.starts.iter().zip(&self.arrays).enumerate();
        let found = all.find_map(|(number, array)| Some((number, inside(array)?)));
        found.unwrap_or_else(|| panic!("{bytes} bytes at {address:#x} are outside of the arrays"))
    }

    fn read(&self, address: u64, bytes: usize) -> u64 {
        let (array, at) = self.find(address, bytes, bytes);
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(&self.arrays[array][at..at + bytes]);
        u64::from_le_bytes(value)
    }

    fn write(&mut self, address: u64, bytes: usize, value: u64) {
        let (array, at) = self.find(address, bytes, bytes);
        self.arrays[array][at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        let written = self.written[array][at..at + bytes].iter_mut();
        written.for_each(|times| *times = times.saturating_add(1));
    }
}

/// The classes of the generator, `hrlfdp`; the compiler calls the first `rs`, and the third `rd`.
fn register(name: &str) -> usize {
    let digits = name.find(|letter: char| letter.is_ascii_digit()).expect("a number");
    let class = match &name[1..digits] {
        "h" | "rs" => 0,
        "r" => 1,
        "l" | "rd" => 2,
        "f" => 3,
        "d" | "fd" => 4,
        "p" => 5,
        other => panic!("registers of class {other}"),
    };
    CLASS * class + name[digits..].parse::<usize>().expect("a number")
}

fn operand(text: &str) -> ReadOperand {
    let text = text.trim();
    if let Some(list) = text.strip_prefix('{') {
        let list = list.trim_end_matches('}').split(',');
        return ReadOperand::Registers(list.map(|name| register(name.trim())).collect());
    }
    if let Some(place) = text.strip_prefix('[') {
        let place = place.trim_end_matches(']');
        return match place.split_once('+') {
            Some((base, offset)) => {
                ReadOperand::Place(register(base), offset.parse::<i64>().expect("bytes") as u64)
            }
            None if place.starts_with('%') => ReadOperand::Place(register(place), 0),
            None => ReadOperand::Named(place.to_owned()),
        };
    }
    let hexadecimal = |digits| u64::from_str_radix(digits, 16).expect("digits");
    match text {
        _ if ["%tid", "%ctaid", "%nctaid"].iter().any(|name| text.starts_with(name)) => {
            ReadOperand::Named(text.to_owned())
        }
        // Behind it is whether the partner takes part, as all do.
        _ if text.contains('|') => operand(text.split('|').next().expect("a register")),
        _ if text.starts_with('%') => ReadOperand::Register(register(text)),
        _ if ["0f", "0d", "0x"].iter().any(|prefix| text.starts_with(prefix)) => {
            ReadOperand::Number(hexadecimal(&text[2..]))
        }
        _ => match text.parse::<i64>() {
            Ok(number) => ReadOperand::Number(number as u64),
            Err(_) => ReadOperand::Named(text.to_owned()),
        },
    }
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<ReadOperand> {
    let (mut parts, mut depth, mut part) = (Vec::new(), 0, String::new());
    for letter in text.chars() {
        match letter {
            '{' | '(' => depth += 1,
            '}' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(operand(&std::mem::take(&mut part)));
                continue;
            }
            _ => {}
        }
        part.push(letter);
    }
    if !part.trim().is_empty() {
        parts.push(operand(&part));
    }
    parts
}

/// A thread's registers, by class; reading one that was never set is an error.
#[derive(Default)]
struct Registers([Vec<Option<u64>>; 6]);

impl Registers {
    fn get(&self, register: usize) -> u64 {
        let found = self.0[register / CLASS].get(register % CLASS).copied().flatten();
        found.expect("a register that was set")
    }

    fn set(&mut self, register: usize, value: u64) {
        let class = &mut self.0[register / CLASS];
        class.resize(class.len().max(register % CLASS + 1), None);
        class[register % CLASS] = Some(value);
    }
}

/// A thread on its way.
struct FakeThread {
    registers: Registers,
    passed: HashMap<String, u64>,
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
        to: usize,
        value: u64,
        xor: u64,
    },
}

impl FakeThread {
    fn new(params: &[u64], (block, thread): (u64, u64)) -> FakeThread {
        let mut passed: HashMap<String, u64> = HashMap::new();
        passed.insert("%tid.x".into(), thread);
        passed.insert("%ctaid.x".into(), block);
        for (number, value) in params.iter().enumerate() {
            passed.insert(format!("p{number}"), *value);
        }
        FakeThread { registers: Registers::default(), passed, next: 0, steps: 0 }
    }
}

impl<'t> KernelText<'t> {
    pub(super) fn read(text: &'t str) -> KernelText<'t> {
        let (_, kernel) = text.split_once(".visible .entry").expect("a kernel");
        let (_, body) = kernel.split_once('{').expect("a body");
        KernelText::of_body(body)
    }

    /// One kernel of several.
    pub(super) fn entry(text: &'t str, name: &str) -> KernelText<'t> {
        let (_, kernel) = text.split_once(&format!(".visible .entry {name}(")).expect("the kernel");
        let (_, body) = kernel.split_once("\n{").expect("a body");
        let mut code = KernelText::of_body(body.split_once("\n}").expect("an end").0);
        code.shared = text.lines().filter_map(shared).collect();
        code.name = name.to_owned();
        code
    }

    fn of_body(body: &'t str) -> KernelText<'t> {
        let mut code = KernelText {
            instructions: Vec::new(),
            labels: HashMap::new(),
            name: String::new(),
            shared: Vec::new(),
        };
        for line in body.lines().map(str::trim) {
            if let Some(label) = line.strip_suffix(':') {
                code.labels.insert(label.to_owned(), code.instructions.len());
                continue;
            }
            let Some(line) = line.strip_suffix(';') else { continue };
            if line.starts_with('.') {
                continue;
            }
            let (guard, is_not, line) = match line.strip_prefix('@') {
                Some(line) => {
                    let (guard, line) = line.split_once(' ').expect("an instruction");
                    let plain = guard.trim_start_matches('!');
                    (Some(register(plain)), plain != guard, line)
                }
                None => (None, false, line),
            };
            let (op, rest) = line.split_once([' ', '\t']).unwrap_or((line, ""));
            code.instructions.push(Instruction {
                guard,
                is_not,
                op: op.split('.').collect(),
                operands: split(rest),
            });
        }
        code
    }

    /// Runs one thread.
    pub(super) fn run(&self, memory: &mut FakeMemory, params: &[u64], at: (u64, u64)) {
        let stop = self.advance(memory, &mut FakeThread::new(params, at));
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
        let all = (0..threads).map(|thread| FakeThread::new(params, (block, thread)));
        let mut all: Vec<FakeThread> = all.collect();
        for thread in &mut all {
            thread.passed.insert("%nctaid.x".into(), blocks);
            for (number, value) in params.iter().enumerate() {
                thread.passed.insert(format!("{}_param_{number}", self.name), *value);
            }
        }
        for (name, bytes) in &self.shared {
            // What was there before.
            let start = memory.add(vec![0xFF; *bytes], 0);
            for thread in &mut all {
                thread.passed.insert(name.clone(), start);
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
                warp[lane].registers.set(to, value);
            }
        }
    }

    /// Runs one thread as far as it comes alone.
    fn advance(&self, memory: &mut FakeMemory, thread: &mut FakeThread) -> Stop {
        let FakeThread { registers, passed, next, steps } = thread;
        while let Some(Instruction { guard, is_not, op, operands }) = self.instructions.get(*next) {
            *next += 1;
            *steps += 1;
            assert!(*steps < 1_000_000, "it does not end");
            if guard.is_some_and(|guard| (registers.get(guard) == 0) != *is_not) {
                continue;
            }
            let value = |at: usize| -> u64 {
                match &operands[at] {
                    ReadOperand::Register(register) => registers.get(*register),
                    ReadOperand::Number(number) => *number,
                    ReadOperand::Named(name) => {
                        *passed.get(name).unwrap_or_else(|| panic!("{op:?}: {name}"))
                    }
                    other => panic!("{op:?}: {other:?}"),
                }
            };
            match op[..] {
                ["griddepcontrol", "wait"] => assert_eq!(*steps, 1, "it waits first"),
                ["ret"] => return Stop::Returned,
                ["bar", "sync"] => return Stop::Barrier(*next),
                ["shfl", "sync", "bfly", "b32"] => {
                    assert_eq!((value(3), value(4) as u32), (31, u32::MAX), "of a whole warp");
                    let to = targets(&operands[0])[0];
                    return Stop::Shuffle { at: *next, to, value: value(1), xor: value(2) };
                }
                ["bra"] | ["bra", "uni"] => {
                    let ReadOperand::Named(label) = &operands[0] else { panic!("a label") };
                    *next = self.labels[label];
                }
                ["st", "param", _] => {
                    let ReadOperand::Named(name) = &operands[0] else { panic!("a name") };
                    let value = value(1);
                    passed.insert(name.clone(), value);
                }
                ["call"] => {
                    let ReadOperand::Named(name) = &operands[1] else { panic!("a name") };
                    let result = function(name, |name| passed.get(name).copied().unwrap_or(0));
                    passed.insert("result".into(), result);
                }
                ["ld", "param", kind] => {
                    let value = extended(kind, value(1));
                    let ReadOperand::Register(to) = operands[0] else { panic!("a register") };
                    registers.set(to, value);
                }
                ["ld", "global" | "shared", .., kind] => {
                    let (bytes, address) = (bytes_of(kind), place(registers, passed, &operands[1]));
                    let to = targets(&operands[0]);
                    memory.find(address, 1, bytes * to.len());
                    for (at, to) in to.iter().enumerate() {
                        let value = memory.read(address + (at * bytes) as u64, bytes);
                        registers.set(*to, extended(kind, value));
                    }
                }
                ["st", "global" | "shared", .., kind] => {
                    let (bytes, address) = (bytes_of(kind), place(registers, passed, &operands[0]));
                    let from = targets(&operands[1]);
                    memory.find(address, 1, bytes * from.len());
                    for (at, from) in from.iter().enumerate() {
                        memory.write(address + (at * bytes) as u64, bytes, registers.get(*from));
                    }
                }
                ["mov", kind] if matches!(operands[0], ReadOperand::Registers(_)) => {
                    let (value, half) = (value(1), 4 * bytes_of(kind));
                    let to = targets(&operands[0]);
                    registers.set(to[0], value & !(u64::MAX << half));
                    registers.set(to[1], value >> half);
                }
                ["mov", kind] if matches!(operands[1], ReadOperand::Registers(_)) => {
                    let from = targets(&operands[1]);
                    let high = registers.get(from[1]) << (4 * bytes_of(kind));
                    registers.set(targets(&operands[0])[0], registers.get(from[0]) | high);
                }
                _ => {
                    let values: Vec<u64> = (1..operands.len()).map(value).collect();
                    let result = compute(op, &values);
                    registers.set(targets(&operands[0])[0], result);
                }
            }
        }
        panic!("it ends without `ret`");
    }
}

/// An address.
fn place(registers: &Registers, passed: &HashMap<String, u64>, operand: &ReadOperand) -> u64 {
    match operand {
        ReadOperand::Place(base, offset) => registers.get(*base).wrapping_add(*offset),
        ReadOperand::Named(name) => passed[name],
        other => panic!("{other:?}"),
    }
}

/// Name and bytes of the shared memory that a line declares.
fn shared(line: &str) -> Option<(String, usize)> {
    let declared = line.trim_start().strip_prefix(".shared ")?.split(' ').next_back()?;
    let (name, bytes) = declared.trim_end_matches("];").split_once('[')?;
    Some((name.to_owned(), bytes.parse().ok()?))
}

fn targets(operand: &ReadOperand) -> Vec<usize> {
    match operand {
        ReadOperand::Register(register) => vec![*register],
        ReadOperand::Registers(registers) => registers.clone(),
        other => panic!("{other:?}"),
    }
}

fn bytes_of(kind: &str) -> usize {
    kind[1..].parse::<usize>().expect("bits") / 8
}

/// The contents of a register after loading a value of that type.
fn extended(kind: &str, value: u64) -> u64 {
    match kind {
        "s8" => value as i8 as u32 as u64,
        "s16" => value as i16 as u32 as u64,
        "u8" => value as u8 as u64,
        "u16" | "b16" => value as u16 as u64,
        "u32" | "s32" | "b32" | "f32" => value as u32 as u64,
        _ => value,
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
fn function(name: &str, passed: impl Fn(&str) -> u64) -> u64 {
    let (x, y) = (passed("a0"), passed("a1"));
    let (f, g, d, e) = (single(x), single(y), double(x), double(y));
    match name.trim_start_matches("gpu_await_") {
        "exp_f32" => f.exp().bits(),
        "exp_f64" => d.exp().bits(),
        "ln_f32" => f.ln().bits(),
        "ln_f64" => d.ln().bits(),
        "sin_f32" => f.sin().bits(),
        "sin_f64" => d.sin().bits(),
        "cos_f32" => f.cos().bits(),
        "cos_f64" => d.cos().bits(),
        "tanh_f32" => f.tanh().bits(),
        "tanh_f64" => d.tanh().bits(),
        "powf_f32" => f.powf(g).bits(),
        "powf_f64" => d.powf(e).bits(),
        "rem_f32" => (f % g).bits(),
        "rem_f64" => (d % e).bits(),
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
    ($type:ident, $of:ident, $parts:ident, $v:ident) => {{
        let x: Vec<$type> = $v.iter().map(|bits| $of(*bits)).collect();
        match $parts[..$parts.len() - 1] {
            ["cvt", "rmi", _] => x[0].floor().bits(),
            ["cvt", "rpi", _] => x[0].ceil().bits(),
            ["cvt", "rzi", _] => x[0].trunc().bits(),
            ["add"] | ["add", "rn"] => (x[0] + x[1]).bits(),
            ["sub"] | ["sub", "rn"] => (x[0] - x[1]).bits(),
            ["mul"] | ["mul", "rn"] => (x[0] * x[1]).bits(),
            ["div", "rn"] => (x[0] / x[1]).bits(),
            ["fma", "rn"] => x[0].mul_add(x[1], x[2]).bits(),
            ["sqrt", "rn"] => x[0].sqrt().bits(),
            ["rcp", "rn"] => (1.0 / x[0]).bits(),
            ["neg"] => (-x[0]).bits(),
            ["abs"] => x[0].abs().bits(),
            ["copysign"] => x[1].copysign(x[0]).bits(),
            ["min"] => least!(x[0], x[1]).bits(),
            ["max"] => (-least!(-x[0], -x[1])).bits(),
            ["max", "NaN"] if x[0].is_nan() || x[1].is_nan() => $type::NAN.bits(),
            ["max", "NaN"] => (-least!(-x[0], -x[1])).bits(),
            ["setp", compare] => holds(compare, x[0].partial_cmp(&x[1])),
            _ => panic!("{:?}", $parts),
        }
    }};
}

macro_rules! of_integers {
    ($parts:expr, $v:expr; $($name:literal $type:ident;)+) => {
        match $parts {
            $(
                ["add", $name] => ($v[0] as $type).wrapping_add($v[1] as $type).bits(),
                ["sub", $name] => ($v[0] as $type).wrapping_sub($v[1] as $type).bits(),
                ["mul", "lo", $name] => ($v[0] as $type).wrapping_mul($v[1] as $type).bits(),
                ["mad", "lo", $name] => {
                    ($v[0] as $type).wrapping_mul($v[1] as $type).wrapping_add($v[2] as $type).bits()
                }
                // Division by zero panics, and so does the least number by -1: the text must avoid both.
                ["div", $name] => ($v[0] as $type / $v[1] as $type).bits(),
                ["rem", $name] => ($v[0] as $type % $v[1] as $type).bits(),
                ["min", $name] => ($v[0] as $type).min($v[1] as $type).bits(),
                ["max", $name] => ($v[0] as $type).max($v[1] as $type).bits(),
                ["neg", $name] => ($v[0] as $type).wrapping_neg().bits(),
                ["shr", $name] => (($v[0] as $type) >> $v[1]).bits(),
                ["setp", "lt", $name] => (($v[0] as $type) < $v[1] as $type).bits(),
                ["setp", "le", $name] => ($v[0] as $type <= $v[1] as $type).bits(),
                ["setp", "gt", $name] => ($v[0] as $type > $v[1] as $type).bits(),
                ["setp", "ge", $name] => ($v[0] as $type >= $v[1] as $type).bits(),
                ["setp", "eq", $name] => ($v[0] as $type == $v[1] as $type).bits(),
                ["setp", "ne", $name] => ($v[0] as $type != $v[1] as $type).bits(),
                ["cvt", "rn", "f32", $name] => ($v[0] as $type as f32).bits(),
                ["cvt", "rn", "f64", $name] => ($v[0] as $type as f64).bits(),
                ["cvt", "rz", "f32", $name] => toward_zero($v[0] as $type as i128).bits(),
                // The result for a NaN is 0 only where both have 32 bits.
                ["cvt", "rzi", $name, "f32"] => match single($v[0]) {
                    x if x.is_nan() && $type::BITS == 64 => 1 << 63,
                    x => (x as $type).bits(),
                },
                ["cvt", "rzi", $name, "f64"] => match double($v[0]) {
                    x if x.is_nan() => 1 << ($type::BITS - 1),
                    x => (x as $type).bits(),
                },
            )+
            _ => of_floats(&$parts, $v),
        }
    };
}

fn compute(parts: &[&str], v: &[u64]) -> u64 {
    match *parts {
        ["setp", "eq", "or", "u32"] => (v[0] as u32 == v[1] as u32 || v[2] != 0).bits(),
        ["mul", "wide", "u32"] => u64::from(v[0] as u32) * u64::from(v[1] as u32),
        ["mad", "wide", "u32"] => u64::from(v[0] as u32) * u64::from(v[1] as u32) + v[2],
        ["cvta", ..] => v[0],
        ["mov", "b32" | "u32" | "f32"] => (v[0] as u32).bits(),
        ["mov", _] => v[0],
        ["shl", "b32"] => ((v[0] as u32) << v[1]).bits(),
        ["shl", "b64"] => v[0] << v[1],
        ["shr", "b32"] => ((v[0] as u32) >> v[1]).bits(),
        ["and", _] => v[0] & v[1],
        ["or", _] => v[0] | v[1],
        ["xor", _] => v[0] ^ v[1],
        ["not", "pred"] => v[0] ^ 1,
        ["not", "b32"] => (!v[0] as u32).bits(),
        ["not", "b64"] => !v[0],
        ["selp", "b32" | "f32"] => ((if v[2] != 0 { v[0] } else { v[1] }) as u32).bits(),
        ["selp", _] => {
            if v[2] != 0 {
                v[0]
            } else {
                v[1]
            }
        }
        ["bfe", "u32"] => ((v[0] as u32) >> v[1] & (u32::MAX >> (32 - v[2]))).bits(),
        ["bfe", "s32"] => (((v[0] as i32) << (32 - v[1] - v[2])) >> (32 - v[2])).bits(),
        ["prmt", "b32"] => {
            let bytes = [(v[0] as u32).to_le_bytes(), (v[1] as u32).to_le_bytes()].concat();
            let byte = |at: u32| bytes[(v[2] >> (4 * at) & 7) as usize];
            u32::from_le_bytes([0, 1, 2, 3].map(byte)).bits()
        }
        ["cvt", "u32", "u64" | "u16"] => (v[0] as u32).bits(),
        ["cvt", "u64", "u32"] => u64::from(v[0] as u32),
        ["cvt", "s64", "s32"] => i64::from(v[0] as i32).bits(),
        _ => of_integers! { *parts, v; "u32" u32; "s32" i32; "u64" u64; "s64" i64; },
    }
}

/// Rounds an integer toward zero.
fn toward_zero(value: i128) -> f32 {
    let near = value as f32;
    let is_farther = (near as i128).unsigned_abs() > value.unsigned_abs();
    f32::from_bits(near.to_bits() - u32::from(is_farther))
}

fn of_floats(parts: &[&str], v: &[u64]) -> u64 {
    let half = |value: u64| u64::from(f16::from_f32(single(value)).to_bits());
    let brain = |value: u64| u64::from(bf16::from_f32(single(value)).to_bits());
    match *parts {
        ["cvt", "f32", "f16"] => f16::from_bits(v[0] as u16).to_f32().bits(),
        ["cvt", "rn", "f16", "f32"] => half(v[0]),
        ["cvt", "sat", "f32", "f32"] => match single(v[0]) {
            x if x.is_nan() => 0.0f32.bits(),
            x => x.clamp(0.0, 1.0).bits(),
        },
        ["fma", "rm", "f32"] => {
            let [a, b, c] = [0, 1, 2].map(|at| f64::from(single(v[at])));
            let exact = a.mul_add(b, c);
            let near = exact as f32;
            if f64::from(near) > exact { near.next_down().bits() } else { near.bits() }
        }
        ["ex2", "approx", "ftz", "f32"] => match single(v[0]).exp2() {
            x if x.is_subnormal() => 0.0f32.bits(),
            x => x.bits(),
        },
        ["cvt", "rn", "bf16", "f32"] => brain(v[0]),
        ["cvt", "rn", "f16x2", "f32"] => half(v[0]) << 16 | half(v[1]),
        ["cvt", "rn", "bf16x2", "f32"] => brain(v[0]) << 16 | brain(v[1]),
        ["cvt", "f64", "f32"] => f64::from(single(v[0])).bits(),
        ["cvt", "rn", "f32", "f64"] => (double(v[0]) as f32).bits(),
        ["cvt", "rz", "f32", "f64"] => {
            let (value, near) = (double(v[0]), double(v[0]) as f32);
            let is_farther = f64::from(near).abs() > value.abs();
            f32::from_bits(near.to_bits() - u32::from(is_farther)).bits()
        }
        [.., "f32"] => of_floats_of!(f32, single, parts, v),
        [.., "f64"] => of_floats_of!(f64, double, parts, v),
        _ => panic!("{parts:?}"),
    }
}

fn holds(compare: &str, order: Option<std::cmp::Ordering>) -> u64 {
    let holds = match compare {
        "lt" => order.is_some_and(|order| order.is_lt()),
        "le" => order.is_some_and(|order| order.is_le()),
        "gt" => order.is_some_and(|order| order.is_gt()),
        "ge" => order.is_some_and(|order| order.is_ge()),
        "eq" => order.is_some_and(|order| order.is_eq()),
        "leu" => order.is_none_or(|order| order.is_le()),
        "num" => order.is_some(),
        "neu" => order.is_none_or(|order| order.is_ne()),
        "nan" => order.is_none(),
        other => panic!("{other}"),
    };
    holds.bits()
}
