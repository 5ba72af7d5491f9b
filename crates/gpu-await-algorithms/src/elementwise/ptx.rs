//! PTX of elementwise kernels: text from a [`Recipe`]; pure.
//!
//! A block processes a tile of consecutive elements. If the tile is whole and all addresses are vector-aligned, each thread loads its
//! vectors of all arrays, computes and stores; otherwise threads take single elements, four at a time, and none past the end.
//!
//! | parameter | what it is |
//! |---|---|
//! | input arrays and numbers | in the order of the recipe |
//! | the output array | one element for each element of the grid |
//! | `u64` | the number of elements |
//! | `u32` | whether all addresses are vector-aligned |
//! | an array, and its length as a `u64` | the source of a gather or the destination of a scatter, accessed at any index |
//! | columns and pitches | for rows, as `pitched.rs` says |
//!
//! # Invariants
//! 1. No access leaves the arguments: for arrays of the grid the index is below the number of elements; any other index is compared with
//!    the length first (`every_kernel_assembles` covers every kernel, `tests/algorithms/elementwise.rs` the critical lengths).
//! 2. The text contains only numbers and names from this module, nothing from a user.
#![forbid(unsafe_code)]

mod body;
mod instructions;
mod pitched;
mod text;
mod written;

/// These tests inspect the text of every kernel, and the twins: hence the path.
#[cfg(test)]
#[path = "../../tests/algorithms/ptx/kernels.rs"]
mod tests;

use std::fmt::Write;

use self::body::Body;
use self::text::{PtxText, Register, RegisterClass};
use super::expression::Expression;
use super::math;
use super::number_kind::NumberKind;

/// The name of the kernel in the text.
pub(crate) const ENTRY: &str = "elementwise";
/// Threads per block.
pub(crate) const THREADS: u32 = 256;
/// Bytes per vector.
const VECTOR: u32 = 16;
/// Elements that a thread takes at once if it takes single ones.
const SINGLES: u32 = 4;
/// A kernel's computation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recipe<'e> {
    /// Arguments of one type, some of them numbers; the result is an element of that type or a flag.
    Formula {
        kind: NumberKind,
        expression: &'e Expression,
        scalars: &'e [bool],
        flags: bool,
        /// The arrays are rows with pitches.
        rows: bool,
    },
    /// A cast of the number to another type.
    Cast { from: NumberKind, to: NumberKind },
    /// The index times a step, plus a start.
    Sequence { kind: NumberKind },
    /// The element at an index, as bits; zero if there is none.
    Gather { bits: NumberKind, index: NumberKind },
    /// Writes an element, as bits, at an index.
    Scatter { bits: NumberKind, index: NumberKind },
}

/// The target that the driver compiles the text for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Pascal,
    /// Has an instruction that rounds to `bf16`.
    Ampere,
    /// Starts a kernel while the work before it in its stream is still ending, if the kernel itself waits for that.
    Hopper,
}

impl Target {
    pub(crate) fn of(compute_capability: (u32, u32)) -> Self {
        match compute_capability.0 {
            0..8 => Target::Pascal,
            8 => Target::Ampere,
            9.. => Target::Hopper,
        }
    }

    fn rounds_to_bf16(self) -> bool {
        self != Target::Pascal
    }

    /// Whether kernels begin by waiting for the work before them in their stream.
    pub(crate) fn waits_first(self) -> bool {
        self == Target::Hopper
    }
}

/// How a kernel tiles its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Elements per vector.
    pub(crate) lanes: u32,
    /// Vectors per thread.
    pub(crate) vectors: u32,
}

impl Tiling {
    /// Elements per block.
    pub(crate) fn tile(self) -> u32 {
        self.lanes * self.vectors * THREADS
    }

    /// Whether a vector of elements of this size can begin at the address.
    pub(crate) fn fits(self, address: u64, element_bytes: u32) -> bool {
        address.is_multiple_of(u64::from(self.lanes * element_bytes))
    }
}

impl Recipe<'_> {
    /// The inputs that are read element by element, in order; `None` is a number.
    fn inputs(&self) -> Vec<Option<NumberKind>> {
        match *self {
            Recipe::Formula { kind, scalars, .. } => {
                scalars.iter().map(|is_scalar| (!is_scalar).then_some(kind)).collect()
            }
            Recipe::Cast { from, .. } => vec![Some(from)],
            Recipe::Sequence { .. } => vec![None, None],
            Recipe::Gather { index, .. } => vec![Some(index)],
            Recipe::Scatter { bits, index } => vec![Some(bits), Some(index)],
        }
    }

    /// The output that is written element by element.
    fn output(&self) -> Option<NumberKind> {
        match *self {
            Recipe::Formula { flags: true, .. } => Some(NumberKind::U8),
            Recipe::Formula { kind, .. } | Recipe::Sequence { kind } => Some(kind),
            Recipe::Cast { to, .. } => Some(to),
            Recipe::Gather { bits, .. } => Some(bits),
            Recipe::Scatter { .. } => None,
        }
    }

    pub(crate) fn tiling(&self) -> Tiling {
        let kinds: Vec<NumberKind> =
            self.inputs().into_iter().flatten().chain(self.output()).collect();
        let largest = kinds.iter().map(|kind| kind.bytes()).max().unwrap_or(1);
        let lanes = VECTOR / largest;
        if matches!(self, Recipe::Formula { rows: true, .. }) {
            return Tiling { lanes, vectors: 1 };
        }
        let calls =
            matches!(self, Recipe::Formula { expression, .. } if math::is_needed(expression));
        let most = if calls { 1 } else { (32 / lanes).max(1) };
        let wanted = match kinds.len() {
            0..=2 => 4,
            3 => 2,
            _ => 1,
        };
        Tiling { lanes, vectors: wanted.min(most) }
    }
}

/// The text of a kernel.
pub(crate) fn generate(recipe: &Recipe<'_>, target: Target) -> String {
    let tiling = recipe.tiling();
    let mut text = PtxText::new(target);
    if target.waits_first() {
        text.line(format_args!("griddepcontrol.wait"));
    }
    let parameters = kernel(&mut text, recipe, tiling);
    let functions = math::text(&text.functions);
    let architecture = match target {
        Target::Pascal => "sm_60",
        Target::Ampere => "sm_80",
        Target::Hopper => "sm_90",
    };
    let mut whole =
        format!(".version 8.0\n.target {architecture}\n.address_size 64\n\n{functions}");
    let listed: Vec<String> = parameters
        .iter()
        .enumerate()
        .map(|(number, kind)| format!("    .param .{kind} p{number}"))
        .collect();
    let declared = text.declarations();
    let code = &text.code;
    let listed = listed.join(",\n");
    // Writing to a string cannot fail.
    let _ = write!(
        whole,
        ".visible .entry {ENTRY}(\n{listed}\n)\n.maxntid {THREADS}, 1, 1\n{{\n{declared}{code}    ret;\n}}\n"
    );
    whole
}

/// An array that the threads traverse.
struct Walked {
    kind: NumberKind,
    start: Register,
}

/// Writes the kernel's code, and returns its parameters.
fn kernel(text: &mut PtxText, recipe: &Recipe<'_>, tiling: Tiling) -> Vec<&'static str> {
    let mut parameters = Vec::new();
    let mut arrays: Vec<Walked> = Vec::new();
    let mut scalars: Vec<Register> = Vec::new();
    let inputs = recipe.inputs();
    // For each argument, its index among the arrays, if it is one.
    let number_kind = match *recipe {
        Recipe::Formula { kind, .. } | Recipe::Sequence { kind } => kind,
        _ => NumberKind::U8,
    };
    for (number, input) in inputs.iter().enumerate() {
        match *input {
            Some(kind) => {
                arrays.push(Walked { kind, start: text.address(number) });
                parameters.push("u64");
            }
            None => {
                scalars.push(text.scalar(number_kind, number));
                parameters.push(text::parameter(number_kind));
            }
        }
    }
    let output = recipe.output().map(|kind| {
        let start = text.address(parameters.len());
        parameters.push("u64");
        Walked { kind, start }
    });
    let count = text.parameter(RegisterClass::Long, "u64", parameters.len());
    parameters.push("u64");
    let aligned = text.parameter(RegisterClass::Word, "u32", parameters.len());
    parameters.push("u32");
    let elsewhere = matches!(recipe, Recipe::Gather { .. } | Recipe::Scatter { .. }).then(|| {
        let start = text.address(parameters.len());
        parameters.push("u64");
        let len = text.parameter(RegisterClass::Long, "u64", parameters.len());
        parameters.push("u64");
        (start, len)
    });
    let body = Body::new(text, recipe, &scalars, elsewhere);
    if matches!(recipe, Recipe::Formula { rows: true, .. }) {
        arrays.extend(output);
        pitched::rows(text, &body, &arrays, tiling.lanes, (count, aligned), &mut parameters);
        return parameters;
    }

    let tile = tiling.tile();
    let [thread, block] = [RegisterClass::Word, RegisterClass::Word].map(|class| text.fresh(class));
    text.line(format_args!("mov.u32 {thread}, %tid.x"));
    text.line(format_args!("mov.u32 {block}, %ctaid.x"));
    let [first, rest] = [RegisterClass::Long, RegisterClass::Long].map(|class| text.fresh(class));
    text.line(format_args!("mul.wide.u32 {first}, {block}, {tile}"));
    text.line(format_args!("sub.s64 {rest}, {count}, {first}"));
    let [partial, single] =
        [RegisterClass::Predicate, RegisterClass::Predicate].map(|class| text.fresh(class));
    text.line(format_args!("setp.lt.u64 {partial}, {rest}, {tile}"));
    text.line(format_args!("setp.eq.or.u32 {single}, {aligned}, 0, {partial}"));
    text.line(format_args!("@{single} bra SINGLES"));

    whole_tile(text, &body, (&arrays, output.as_ref()), tiling, thread, first);
    text.line(format_args!("ret"));
    text.label("SINGLES");
    singles(text, &body, (&arrays, output.as_ref()), tile, thread, (first, rest));
    parameters
}

/// A whole tile, in vectors.
fn whole_tile(
    text: &mut PtxText,
    body: &Body<'_>,
    (arrays, output): (&[Walked], Option<&Walked>),
    Tiling { lanes, vectors }: Tiling,
    thread: Register,
    first: Register,
) {
    let index = text.fresh(RegisterClass::Long);
    text.line(format_args!("mad.wide.u32 {index}, {thread}, {lanes}, {first}"));
    let places: Vec<Register> =
        arrays.iter().map(|array| text.element_address(array.start, index, array.kind)).collect();
    let to = output.map(|array| text.element_address(array.start, index, array.kind));
    let stride = |kind: NumberKind| u64::from(THREADS * lanes * kind.bytes());
    // All loads come first, so that they overlap.
    let mut loaded = Vec::new();
    for vector in 0..u64::from(vectors) {
        let load = |(array, place): (&Walked, &Register)| {
            text.load(array.kind, lanes, *place, vector * stride(array.kind), None)
        };
        let of_arrays: Vec<Vec<Register>> = arrays.iter().zip(&places).map(load).collect();
        loaded.push(of_arrays);
    }
    for (vector, of_arrays) in loaded.iter().enumerate() {
        let unpacked: Vec<Vec<Register>> = arrays
            .iter()
            .zip(of_arrays)
            .map(|(array, words)| text.unpack(array.kind, lanes, words))
            .collect();
        let at = body.index(text, index, vector as u64 * u64::from(THREADS * lanes));
        let mut results = Vec::new();
        for lane in 0..lanes {
            let elements: Vec<Register> =
                unpacked.iter().map(|lanes| lanes[lane as usize]).collect();
            results.extend(body.element(text, &elements, at, u64::from(lane), None));
        }
        if let (Some(array), Some(to)) = (output, to) {
            let words = text.pack(array.kind, &results);
            text.store(array.kind, lanes, to, vector as u64 * stride(array.kind), &words, None);
        }
    }
}

/// Single elements: of a tile that is not whole, or of arrays with any alignment.
fn singles(
    text: &mut PtxText,
    body: &Body<'_>,
    (arrays, output): (&[Walked], Option<&Walked>),
    tile: u32,
    thread: Register,
    (first, rest): (Register, Register),
) {
    let [limit, position] =
        [RegisterClass::Word, RegisterClass::Word].map(|class| text.fresh(class));
    let [least, index] = [RegisterClass::Long, RegisterClass::Long].map(|class| text.fresh(class));
    text.line(format_args!("min.u64 {least}, {rest}, {tile}"));
    text.line(format_args!("cvt.u32.u64 {limit}, {least}"));
    text.line(format_args!("mov.u32 {position}, {thread}"));
    text.line(format_args!("mad.wide.u32 {index}, {thread}, 1, {first}"));
    let places: Vec<Register> =
        arrays.iter().map(|array| text.element_address(array.start, index, array.kind)).collect();
    let to = output.map(|array| text.element_address(array.start, index, array.kind));
    let ended = text.fresh(RegisterClass::Predicate);
    text.label("NEXT");
    text.line(format_args!("setp.ge.u32 {ended}, {position}, {limit}"));
    text.line(format_args!("@{ended} bra DONE"));
    let stride = |kind: NumberKind| u64::from(THREADS * kind.bytes());
    let mut there = Vec::new();
    let mut loaded = Vec::new();
    for single in 0..SINGLES {
        let [at, is_there] =
            [RegisterClass::Word, RegisterClass::Predicate].map(|class| text.fresh(class));
        text.line(format_args!("add.u32 {at}, {position}, {}", single * THREADS));
        text.line(format_args!("setp.lt.u32 {is_there}, {at}, {limit}"));
        there.push(is_there);
        let load = |(array, place): (&Walked, &Register)| {
            let offset = u64::from(single) * stride(array.kind);
            text.load(array.kind, 1, *place, offset, Some(is_there))
        };
        let of_arrays: Vec<Vec<Register>> = arrays.iter().zip(&places).map(load).collect();
        loaded.push(of_arrays);
    }
    for (single, (of_arrays, is_there)) in loaded.iter().zip(there).enumerate() {
        let elements: Vec<Register> = arrays
            .iter()
            .zip(of_arrays)
            .map(|(array, words)| text.unpack(array.kind, 1, words)[0])
            .collect();
        let at = body.index(text, index, single as u64 * u64::from(THREADS));
        let result = body.element(text, &elements, at, 0, Some(is_there));
        if let (Some(array), Some(to), Some(result)) = (output, to, result) {
            let words = text.pack(array.kind, &[result]);
            let offset = single as u64 * stride(array.kind);
            text.store(array.kind, 1, to, offset, &words, Some(is_there));
        }
    }
    let step = SINGLES * THREADS;
    text.line(format_args!("add.u32 {position}, {position}, {step}"));
    text.line(format_args!("add.s64 {index}, {index}, {step}"));
    for (array, place) in arrays.iter().zip(&places).chain(output.zip(to.as_ref())) {
        let bytes = step * array.kind.bytes();
        text.line(format_args!("add.s64 {place}, {place}, {bytes}"));
    }
    text.line(format_args!("bra NEXT"));
    text.label("DONE");
}
