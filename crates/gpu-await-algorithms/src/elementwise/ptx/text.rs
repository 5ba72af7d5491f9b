//! [`PtxText`]: a PTX writer, with its registers and loads and stores of elements.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write;

use super::Target;
use crate::elementwise::number_kind::NumberKind;

/// The kind of a register's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegisterClass {
    Half,
    Word,
    Long,
    Single,
    Double,
    Predicate,
}

const CLASSES: [(RegisterClass, &str, &str); 6] = [
    (RegisterClass::Half, "b16", "%h"),
    (RegisterClass::Word, "b32", "%r"),
    (RegisterClass::Long, "b64", "%l"),
    (RegisterClass::Single, "f32", "%f"),
    (RegisterClass::Double, "f64", "%d"),
    (RegisterClass::Predicate, "pred", "%p"),
];

impl RegisterClass {
    /// The class in which elements of that type are computed.
    pub(super) fn of(kind: NumberKind) -> Self {
        match kind {
            NumberKind::F16 | NumberKind::Bf16 | NumberKind::F32 => RegisterClass::Single,
            NumberKind::F64 => RegisterClass::Double,
            NumberKind::U64 | NumberKind::I64 => RegisterClass::Long,
            _ => RegisterClass::Word,
        }
    }

    /// The type of the instructions that move it.
    pub(super) fn bits(self) -> &'static str {
        CLASSES[self as usize].1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register {
    pub(super) class: RegisterClass,
    number: u32,
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", CLASSES[self.class as usize].2, self.number)
    }
}

/// The type of a kernel's parameter that is a number.
pub(super) fn parameter(kind: NumberKind) -> &'static str {
    match kind {
        NumberKind::U8 => "u8",
        NumberKind::I8 => "s8",
        NumberKind::U16 | NumberKind::Bf16 => "u16",
        NumberKind::I16 => "s16",
        NumberKind::F16 => "b16",
        NumberKind::U32 => "u32",
        NumberKind::I32 => "s32",
        NumberKind::F32 => "f32",
        NumberKind::U64 => "u64",
        NumberKind::I64 => "s64",
        NumberKind::F64 => "f64",
    }
}

pub(super) struct PtxText {
    pub(super) code: String,
    pub(super) target: Target,
    /// The library functions that are called.
    pub(super) functions: BTreeSet<&'static str>,
    counts: [u32; CLASSES.len()],
}

impl PtxText {
    pub(super) fn new(target: Target) -> Self {
        PtxText {
            code: String::new(),
            target,
            functions: BTreeSet::new(),
            counts: [0; CLASSES.len()],
        }
    }

    pub(super) fn fresh(&mut self, class: RegisterClass) -> Register {
        let count = &mut self.counts[class as usize];
        *count += 1;
        Register { class, number: *count - 1 }
    }

    pub(super) fn line(&mut self, instruction: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.code, "    {instruction};");
    }

    pub(super) fn label(&mut self, name: &str) {
        let _ = writeln!(self.code, "{name}:");
    }

    /// An instruction `op result, operand, ..`, with a fresh register for the result.
    pub(super) fn op(
        &mut self,
        class: RegisterClass,
        op: &str,
        operands: &[&dyn fmt::Display],
    ) -> Register {
        let result = self.fresh(class);
        let _ = write!(self.code, "    {op} {result}");
        for operand in operands {
            let _ = write!(self.code, ", {operand}");
        }
        self.code.push_str(";\n");
        result
    }

    pub(super) fn declarations(&self) -> String {
        let mut declared = String::new();
        for ((_, kind, name), count) in CLASSES.iter().zip(self.counts) {
            if count > 0 {
                let _ = writeln!(declared, "    .reg .{kind} {name}<{count}>;");
            }
        }
        declared
    }

    pub(super) fn parameter(
        &mut self,
        class: RegisterClass,
        kind: &str,
        number: usize,
    ) -> Register {
        self.op(class, &format!("ld.param.{kind}"), &[&format_args!("[p{number}]")])
    }

    /// An array's address.
    pub(super) fn address(&mut self, number: usize) -> Register {
        let generic = self.parameter(RegisterClass::Long, "u64", number);
        self.op(RegisterClass::Long, "cvta.to.global.u64", &[&generic])
    }

    /// A number that was passed.
    pub(super) fn scalar(&mut self, kind: NumberKind, number: usize) -> Register {
        let class = if kind == NumberKind::F16 { RegisterClass::Half } else { loaded(kind) };
        let raw = self.parameter(class, parameter(kind), number);
        self.widen(kind, raw)
    }

    /// The address of an element.
    pub(super) fn element_address(
        &mut self,
        start: Register,
        index: Register,
        kind: NumberKind,
    ) -> Register {
        let shift = kind.bytes().trailing_zeros();
        let offset = self.op(RegisterClass::Long, "shl.b64", &[&index, &shift]);
        self.op(RegisterClass::Long, "add.s64", &[&start, &offset])
    }

    /// Loads consecutive elements; zeros if the predicate does not hold.
    pub(super) fn load(
        &mut self,
        kind: NumberKind,
        lanes: u32,
        address: Register,
        offset: u64,
        predicate: Option<Register>,
    ) -> Vec<Register> {
        let (class, what, count) = access(kind, lanes);
        let registers: Vec<Register> = (0..count).map(|_| self.fresh(class)).collect();
        if predicate.is_some() {
            for register in &registers {
                let (bits, zero) = (class.bits(), zero(class));
                self.line(format_args!("mov.{bits} {register}, {zero}"));
            }
        }
        let (guard, vector) = (Guard(predicate), vector(count));
        let list = list(&registers);
        self.line(format_args!("{guard}ld.global{vector}.{what} {list}, [{address}+{offset}]"));
        registers
    }

    pub(super) fn store(
        &mut self,
        kind: NumberKind,
        lanes: u32,
        address: Register,
        offset: u64,
        registers: &[Register],
        predicate: Option<Register>,
    ) {
        let (_, what, count) = access(kind, lanes);
        let (guard, vector) = (Guard(predicate), vector(count));
        let list = list(registers);
        self.line(format_args!("{guard}st.global{vector}.{what} [{address}+{offset}], {list}"));
    }

    /// Elements in their computed form, from the loaded registers.
    pub(super) fn unpack(
        &mut self,
        kind: NumberKind,
        lanes: u32,
        loaded: &[Register],
    ) -> Vec<Register> {
        let bytes = kind.bytes();
        if bytes >= 4 {
            return loaded.to_vec();
        }
        if lanes == 1 {
            return vec![self.widen(kind, loaded[0])];
        }
        let in_word = 4 / bytes;
        (0..lanes)
            .map(|lane| {
                let (word, place) = (loaded[(lane / in_word) as usize], lane % in_word);
                self.part(kind, word, 8 * bytes * place)
            })
            .collect()
    }

    /// The element at a bit of a word.
    fn part(&mut self, kind: NumberKind, word: Register, bit: u32) -> Register {
        let bits = 8 * kind.bytes();
        match kind {
            NumberKind::F16 => {
                let [low, high] = [(), ()].map(|()| self.fresh(RegisterClass::Half));
                self.line(format_args!("mov.b32 {{{low}, {high}}}, {word}"));
                let half = if bit == 0 { low } else { high };
                self.op(RegisterClass::Single, "cvt.f32.f16", &[&half])
            }
            NumberKind::Bf16 => {
                let above = match bit {
                    0 => self.op(RegisterClass::Word, "shl.b32", &[&word, &16]),
                    _ => self.op(RegisterClass::Word, "and.b32", &[&word, &"0xffff0000"]),
                };
                self.op(RegisterClass::Single, "mov.b32", &[&above])
            }
            _ if kind.is_signed() => self.op(RegisterClass::Word, "bfe.s32", &[&word, &bit, &bits]),
            _ => self.op(RegisterClass::Word, "bfe.u32", &[&word, &bit, &bits]),
        }
    }

    /// A single element in its computed form.
    fn widen(&mut self, kind: NumberKind, raw: Register) -> Register {
        match kind {
            NumberKind::F16 => self.op(RegisterClass::Single, "cvt.f32.f16", &[&raw]),
            NumberKind::Bf16 => self.part(kind, raw, 0),
            _ => raw,
        }
    }

    /// Elements in their stored form, from the computed values.
    pub(super) fn pack(&mut self, kind: NumberKind, values: &[Register]) -> Vec<Register> {
        match (kind, values) {
            (NumberKind::F16, [value]) => {
                vec![self.op(RegisterClass::Half, "cvt.rn.f16.f32", &[value])]
            }
            (NumberKind::Bf16, [value]) => vec![self.bf16(*value)],
            (NumberKind::F16 | NumberKind::Bf16, _) => {
                values.chunks(2).map(|pair| self.pack_halves(kind, pair[0], pair[1])).collect()
            }
            _ if kind.bytes() == 2 && values.len() > 1 => {
                values.chunks(2).map(|pair| self.permute(pair[0], pair[1], "0x5410")).collect()
            }
            _ if kind.bytes() == 1 && values.len() > 1 => {
                let pairs: Vec<Register> =
                    values.chunks(2).map(|pair| self.permute(pair[0], pair[1], "0x0040")).collect();
                match pairs[..] {
                    [_] => pairs,
                    _ => pairs
                        .chunks(2)
                        .map(|pair| self.permute(pair[0], pair[1], "0x5410"))
                        .collect(),
                }
            }
            _ => values.to_vec(),
        }
    }

    /// The bytes of two words that the selector names.
    fn permute(&mut self, low: Register, high: Register, selector: &str) -> Register {
        self.op(RegisterClass::Word, "prmt.b32", &[&low, &high, &selector])
    }

    fn pack_halves(&mut self, kind: NumberKind, low: Register, high: Register) -> Register {
        match (kind, self.target.rounds_to_bf16()) {
            (NumberKind::F16, true) => {
                self.op(RegisterClass::Word, "cvt.rn.f16x2.f32", &[&high, &low])
            }
            (NumberKind::F16, false) => {
                let [low, high] = [low, high]
                    .map(|value| self.op(RegisterClass::Half, "cvt.rn.f16.f32", &[&value]));
                self.op(RegisterClass::Word, "mov.b32", &[&format_args!("{{{low}, {high}}}")])
            }
            (_, true) => self.op(RegisterClass::Word, "cvt.rn.bf16x2.f32", &[&high, &low]),
            (_, false) => {
                let [low, high] = [low, high].map(|value| self.bf16(value));
                self.permute(low, high, "0x5410")
            }
        }
    }

    /// Rounds to the lower half of a word.
    fn bf16(&mut self, value: Register) -> Register {
        if self.target.rounds_to_bf16() {
            let half = self.op(RegisterClass::Half, "cvt.rn.bf16.f32", &[&value]);
            return self.op(RegisterClass::Word, "cvt.u32.u16", &[&half]);
        }
        let bits = self.op(RegisterClass::Word, "mov.b32", &[&value]);
        let last = self.op(RegisterClass::Word, "bfe.u32", &[&bits, &16, &1]);
        let sum = self.op(RegisterClass::Word, "add.u32", &[&bits, &last]);
        let sum = self.op(RegisterClass::Word, "add.u32", &[&sum, &0x7FFF]);
        let is_nan = self.op(RegisterClass::Predicate, "setp.nan.f32", &[&value, &value]);
        let rounded = self.op(RegisterClass::Word, "shr.u32", &[&sum, &16]);
        self.op(RegisterClass::Word, "selp.b32", &[&0x7FFF, &rounded, &is_nan])
    }
}

/// A predicate before an instruction.
struct Guard(Option<Register>);

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |predicate| write!(f, "@{predicate} "))
    }
}

/// The registers (type and number) that one load of this many elements fills.
fn access(kind: NumberKind, lanes: u32) -> (RegisterClass, &'static str, u32) {
    let bytes = kind.bytes() * lanes;
    match kind.bytes() {
        1 | 2 if bytes >= 4 => (RegisterClass::Word, "b32", bytes / 4),
        1 | 2 if lanes > 1 => (RegisterClass::Word, "u16", 1),
        1 | 2 => {
            let class =
                if kind == NumberKind::F16 { RegisterClass::Half } else { RegisterClass::Word };
            (class, parameter(kind), 1)
        }
        _ => {
            let class = RegisterClass::of(kind);
            (class, class.bits(), lanes)
        }
    }
}

/// The register class that a number of that type is loaded into.
fn loaded(kind: NumberKind) -> RegisterClass {
    access(kind, 1).0
}

fn vector(count: u32) -> &'static str {
    match count {
        1 => "",
        2 => ".v2",
        _ => ".v4",
    }
}

fn list(registers: &[Register]) -> String {
    match registers {
        [register] => register.to_string(),
        _ => {
            let names: Vec<String> = registers.iter().map(Register::to_string).collect();
            format!("{{{}}}", names.join(", "))
        }
    }
}

fn zero(class: RegisterClass) -> &'static str {
    match class {
        RegisterClass::Single => "0f00000000",
        RegisterClass::Double => "0d0000000000000000",
        _ => "0",
    }
}
