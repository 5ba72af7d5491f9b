//! Every kernel that can be generated, as text: the interpreter runs it beside its twin, and `python3 kernels/check_ptx.py` has `ptxas`
//! assemble it.
//!
//! A module of `src/elementwise/ptx.rs`, so that these are tests of `--lib`.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use half::{bf16, f16};

use super::*;
use crate::elementwise::arithmetic::Arithmetic;
use crate::elementwise::expression::{Binary, Comparison, Literal, Logic, Step, Unary};
use crate::elementwise::twin;
use crate::interpreter::{FakeMemory, KernelText};
use gpu_await::Grid;
use gpu_await::sibling::{ArgBlock, HostTwin};

const KINDS: [NumberKind; 12] = [
    NumberKind::U8,
    NumberKind::U16,
    NumberKind::U32,
    NumberKind::U64,
    NumberKind::I8,
    NumberKind::I16,
    NumberKind::I32,
    NumberKind::I64,
    NumberKind::F16,
    NumberKind::Bf16,
    NumberKind::F32,
    NumberKind::F64,
];
const OF_ALL: [Unary; 2] = [Unary::Neg, Unary::Abs];
const OF_FLOATS: [Unary; 12] = [
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Recip,
    Unary::Floor,
    Unary::Ceil,
    Unary::Round,
    Unary::Trunc,
    Unary::Exp,
    Unary::Ln,
    Unary::Sin,
    Unary::Cos,
    Unary::Tanh,
];
const BINARY: [Binary; 7] =
    [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Rem, Binary::Min, Binary::Max];
const OF_INTEGERS: [Binary; 5] = [Binary::And, Binary::Or, Binary::Xor, Binary::Shl, Binary::Shr];
const COMPARISONS: [Comparison; 6] = [
    Comparison::Lt,
    Comparison::Le,
    Comparison::Gt,
    Comparison::Ge,
    Comparison::Eq,
    Comparison::Ne,
];

/// Each operation of the type alone, on `x`, `y` and the number `z`; and whether it gives flags.
fn expressions(kind: NumberKind) -> Vec<(Expression, bool)> {
    let (x, y, z) = (Step::Argument(0), Step::Argument(1), Step::Argument(2));
    let mut all = Vec::new();
    let mut add = |last: &[Step], flags: bool| {
        let steps: Vec<Step> = [x, y, z].iter().chain(last).copied().collect();
        let result = steps.len() as u32 - 1;
        all.push((Expression { steps, result }, flags));
    };
    let mut unary = OF_ALL.to_vec();
    let mut binary = BINARY.to_vec();
    if kind.is_float() {
        unary.extend(OF_FLOATS);
        binary.push(Binary::Powf);
    } else {
        unary.push(Unary::Not);
        binary.extend(OF_INTEGERS);
    }
    unary.iter().for_each(|op| add(&[Step::Unary(*op, 0)], false));
    for op in binary {
        add(&[Step::Binary(op, 0, 1)], false);
        add(&[Step::Binary(op, 0, 2)], false);
        // An operation that must ignore the bits above its own comes next, so that wrong ones show.
        add(&[Step::Binary(Binary::Add, 0, 1), Step::Binary(op, 3, 2)], false);
    }
    add(&[Step::MulAdd(0, 1, 2)], false);
    for op in COMPARISONS {
        add(&[Step::Compare(op, 0, 1)], true);
        add(&[Step::Compare(op, 0, 2), Step::Select(3, 0, 1)], false);
    }
    for op in [Logic::And, Logic::Or, Logic::Xor] {
        let (less, equal) =
            (Step::Compare(Comparison::Lt, 0, 1), Step::Compare(Comparison::Eq, 0, 2));
        add(&[less, equal, Step::Logic(op, 3, 4), Step::LogicNot(5)], true);
    }
    let number = if kind.is_float() { Literal::Float(0.1) } else { Literal::Integer(100) };
    add(&[Step::Literal(number), Step::Binary(Binary::Mul, 0, 3)], false);
    all
}

fn recipes(kind: NumberKind, expressions: &[(Expression, bool)]) -> Vec<Recipe<'_>> {
    let mut all: Vec<Recipe<'_>> = expressions
        .iter()
        .map(|(expression, flags)| Recipe::Formula {
            kind,
            expression,
            scalars: &[false, false, true],
            flags: *flags,
            rows: false,
        })
        .collect();
    // What is not of the text around a formula is the same for rows.
    all.extend(expressions.iter().take(1).chain(expressions.last()).map(|(expression, flags)| {
        let scalars = &[false, false, true];
        Recipe::Formula { kind, expression, scalars, flags: *flags, rows: true }
    }));
    all.extend(KINDS.map(|to| Recipe::Cast { from: kind, to }));
    all.push(Recipe::Sequence { kind });
    if kind.is_integer() && !kind.is_signed() {
        for index in [NumberKind::U32, NumberKind::U64] {
            all.push(Recipe::Gather { bits: kind, index });
            all.push(Recipe::Scatter { bits: kind, index });
        }
    }
    all
}

/// All kernels of a type in one text.
fn text(kind: NumberKind, target: Target) -> String {
    let expressions = expressions(kind);
    let (mut functions, mut entries, mut header) = (BTreeSet::new(), String::new(), String::new());
    for (number, recipe) in recipes(kind, &expressions).iter().enumerate() {
        let whole = generate(recipe, target);
        let (before, entry) = whole.split_once(".visible .entry elementwise(").expect("one kernel");
        assert!(entry.is_ascii() && !entry.contains(".entry"));
        entries.push_str(&format!(".visible .entry elementwise_{number}({entry}"));
        header = before.split_inclusive('\n').take(3).collect();
        let mut text = PtxText::new(target);
        kernel(&mut text, recipe, recipe.tiling());
        functions.extend(text.functions);
    }
    format!("{header}{}{entries}", math::text(&functions))
}

/// With `GPU_AWAIT_PTXAS`, the path of `ptxas`, the GPU's assembler reads them all.
#[test]
fn every_kernel_assembles() {
    let assembler = std::env::var_os("GPU_AWAIT_PTXAS");
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/tmp/elementwise");
    let targets = [
        (Target::Pascal, ["sm_60", "sm_70"]),
        (Target::Ampere, ["sm_80", "sm_89"]),
        (Target::Hopper, ["sm_90", "sm_100"]),
    ];
    for kind in KINDS {
        for (target, architectures) in targets {
            let text = text(kind, target);
            let Some(assembler) = &assembler else { continue };
            std::fs::create_dir_all(&folder).unwrap();
            let path = folder.join(format!("{kind:?}-{target:?}.ptx"));
            std::fs::write(&path, text).unwrap();
            for architecture in architectures {
                let mut command = Command::new(assembler);
                command.arg(format!("-arch={architecture}")).arg("-v").arg(&path);
                let output = command.arg("-o").arg(path.with_extension("cubin")).output().unwrap();
                let log = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{kind:?} for {architecture}: {log}");
                std::fs::write(path.with_extension(format!("{architecture}.log")), &*log).unwrap();
            }
        }
    }
}

/// The arguments of a kernel.
enum PassedBytes {
    Array(Vec<u8>),
    Number(Vec<u8>),
    /// The output array, with its initial contents.
    Written(Vec<u8>),
}

/// Runs threads of a kernel and its twin, and compares what they wrote.
fn compare<T: Arithmetic, U: Arithmetic>(
    what: &str,
    recipe: &Recipe<'_>,
    twin: &HostTwin,
    passed: Vec<PassedBytes>,
    elsewhere: Option<Vec<u8>>,
    count: usize,
) {
    let tile = recipe.tiling().tile() as usize;
    let scatters = matches!(recipe, Recipe::Scatter { .. });
    let codes = [Target::Pascal, Target::Ampere, Target::Hopper]
        .map(|target| (target, KernelText::read(&generate(recipe, target))));
    for (aligned, offset) in [(1_u32, 0), (0, 8)] {
        let (mut memory, mut params, mut written) = (FakeMemory::default(), Vec::new(), None);
        let (mut args, mut own) = (ArgBlock::default(), Vec::new());
        let mut arrays: Vec<&Vec<u8>> = Vec::new();
        for argument in &passed {
            match argument {
                PassedBytes::Number(bytes) => {
                    args.push_value(bytes);
                    params.push(words(bytes)[0]);
                }
                PassedBytes::Array(bytes) | PassedBytes::Written(bytes) => {
                    if matches!(argument, PassedBytes::Written(_)) {
                        written = Some(arrays.len());
                    }
                    arrays.push(bytes);
                    params.push(memory.add(bytes.clone(), offset));
                    // Aligned for any element.
                    own.push(words(bytes));
                    let address = own.last_mut().expect("one").as_mut_ptr() as u64;
                    args.push_memory(address, bytes.len() as u64);
                }
            }
        }
        args.push_value(&(count as u64).to_ne_bytes());
        args.push_value(&aligned.to_ne_bytes());
        params.extend([count as u64, aligned.into()]);
        if let Some(bytes) = &elsewhere {
            if scatters {
                written = Some(arrays.len());
            }
            arrays.push(bytes);
            let len = (bytes.len() / size_of::<T>()) as u64;
            params.extend([memory.add(bytes.clone(), offset), len]);
            own.push(words(bytes));
            let address = own.last_mut().expect("one").as_mut_ptr() as u64;
            args.push_memory(address, bytes.len() as u64);
            args.push_value(&len.to_ne_bytes());
        }
        let grid =
            Grid { grid_dim: [1; 3], block_dim: [1; 3], cluster_dim: [1; 3], shared_mem_bytes: 0 };
        twin(&grid, &args);
        let written = written.expect("something is");
        let expected: &[u8] = bytemuck::cast_slice(&own[written]);
        for (target, code) in &codes {
            let mut memory = memory.clone();
            let blocks = count.div_ceil(tile) as u64;
            for block in [0, blocks - 1] {
                // The last block has three elements more than whole rows of threads: one of these threads is the first behind the end.
                for thread in [0, 1, 2, 3, 31, 100, 255] {
                    code.run(&mut memory, &params, (block, thread));
                }
            }
            let (found, times) = (&memory.arrays[written], &memory.written[written]);
            let size = size_of::<U>();
            let mut seen = 0;
            for at in (0..found.len() / size).map(|at| at * size) {
                if times[at] == 0 {
                    continue;
                }
                assert!(
                    scatters || times[at] == 1,
                    "{what}: element {} is written twice",
                    at / size
                );
                seen += 1;
                let number =
                    |bytes: &[u8]| bytemuck::pod_read_unaligned::<U>(&bytes[at..at + size]);
                let (found, expected) = (number(found), number(expected));
                let both_nan = found.partial_cmp(&found).is_none()
                    && expected.partial_cmp(&expected).is_none();
                let same = bytemuck::bytes_of(&found) == bytemuck::bytes_of(&expected);
                assert!(
                    both_nan || same,
                    "{what} for {target:?}, aligned {aligned}, element {}",
                    at / size
                );
            }
            assert!(scatters || seen > 7 * recipe.tiling().lanes, "{what}: only {seen} elements");
        }
    }
}

/// Bytes as words, so that they are aligned for any element.
fn words(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

/// Bits of any kind, and small numbers among them.
fn bytes<T: Arithmetic>(len: usize, mut seed: u64) -> Vec<u8> {
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        seed >> 32
    };
    let element = |at: usize| {
        let small = T::nth(T::zeroed(), T::ONE, at as u64 % 37);
        let words = [next() as u32, next() as u32];
        let any = bytemuck::pod_read_unaligned::<T>(&bytemuck::bytes_of(&words)[..size_of::<T>()]);
        if at.is_multiple_of(3) { small } else { any }
    };
    let elements: Vec<T> = (0..len).map(element).collect();
    bytemuck::cast_slice(&elements).to_vec()
}

fn check<T: Arithmetic>() {
    let kind = T::KIND;
    let expressions = expressions(kind);
    let written = |bytes: usize| PassedBytes::Written(vec![0xA5; bytes]);
    let count_of = |recipe: &Recipe<'_>| {
        let tile = recipe.tiling().tile() as usize;
        2 * tile + tile / 2 + 259
    };
    let scalars = [false, false, true];
    let recipes = expressions.iter().map(|(expression, flags)| Recipe::Formula {
        kind,
        expression,
        scalars: &scalars,
        flags: *flags,
        rows: false,
    });
    let recipes: Vec<_> = recipes.collect();
    let most = recipes.iter().map(count_of).max().expect("some");
    let all = [3, 4].map(|seed| bytes::<T>(most, seed));
    for ((expression, flags), recipe) in expressions.iter().zip(&recipes) {
        let count = count_of(recipe);
        let twin = twin::formula::<T>(&Arc::new(expression.clone()), &scalars, *flags, false);
        let arrays =
            all.each_ref().map(|all| PassedBytes::Array(all[..count * size_of::<T>()].to_vec()));
        let number = bytes::<T>(5, 9)[4 * size_of::<T>()..][..size_of::<T>()].to_vec();
        let mut passed: Vec<PassedBytes> = arrays.into();
        passed.push(PassedBytes::Number(number));
        passed.push(written(count * if *flags { 1 } else { size_of::<T>() }));
        let what = format!("{kind:?}: {:?}", &expression.steps[3..]);
        match flags {
            true => compare::<T, u8>(&what, recipe, &twin, passed, None, count),
            false => compare::<T, T>(&what, recipe, &twin, passed, None, count),
        }
    }
    let recipe = Recipe::Sequence { kind };
    let count = count_of(&recipe);
    let [start, step] = [1, 2].map(|at| {
        PassedBytes::Number(bytes::<T>(9, 5)[at * size_of::<T>()..][..size_of::<T>()].to_vec())
    });
    let passed = vec![start, step, written(count * size_of::<T>())];
    compare::<T, T>("sequence", &recipe, &twin::sequence::<T>(), passed, None, count);
    check_casts::<T>();
}

fn check_casts<T: Arithmetic>() {
    fn one<T: Arithmetic, U: Arithmetic>() {
        let recipe = Recipe::Cast { from: T::KIND, to: U::KIND };
        let tile = recipe.tiling().tile() as usize;
        let count = tile + tile / 2 + 259;
        let passed = vec![
            PassedBytes::Array(bytes::<T>(count, 11)),
            PassedBytes::Written(vec![0xA5; count * size_of::<U>()]),
        ];
        let what = format!("{:?} to {:?}", T::KIND, U::KIND);
        compare::<T, U>(&what, &recipe, &twin::cast::<T, U>(), passed, None, count);
    }
    one::<T, u8>();
    one::<T, u16>();
    one::<T, u32>();
    one::<T, u64>();
    one::<T, i8>();
    one::<T, i16>();
    one::<T, i32>();
    one::<T, i64>();
    one::<T, f16>();
    one::<T, bf16>();
    one::<T, f32>();
    one::<T, f64>();
}

fn check_indices<T: Arithmetic, I: Arithmetic + Into<u64>>(index_of: impl Fn(u64) -> I) {
    const SOURCE: usize = 999;
    let (bits, index) = (T::KIND, I::KIND);
    // Some are outside, some far outside.
    let indices = |count: usize, once: bool| -> Vec<u8> {
        let place = |at: usize| match at % 7 {
            3 if !once => u64::MAX - at as u64,
            4 => (SOURCE + at / 7 % 3) as u64,
            5 => (SOURCE + at) as u64,
            _ => (at * 31 % SOURCE) as u64,
        };
        let all: Vec<I> = (0..count).map(|at| index_of(place(at))).collect();
        bytemuck::cast_slice(&all).to_vec()
    };
    let recipe = Recipe::Gather { bits, index };
    let tile = recipe.tiling().tile() as usize;
    let count = tile + tile / 2 + 259;
    let passed = vec![
        PassedBytes::Array(indices(count, false)),
        PassedBytes::Written(vec![0xA5; count * size_of::<T>()]),
    ];
    let source = Some(bytes::<T>(SOURCE, 6));
    compare::<T, T>("gather", &recipe, &twin::gather::<T, I>(), passed, source.clone(), count);
    let recipe = Recipe::Scatter { bits, index };
    // Elements that are written twice get the same value.
    let values: Vec<T> = (0..count).map(|_| T::ONE).collect();
    let passed = vec![
        PassedBytes::Array(bytemuck::cast_slice(&values).to_vec()),
        PassedBytes::Array(indices(count, true)),
    ];
    compare::<T, T>("scatter", &recipe, &twin::scatter::<T, I>(), passed, source, count);
}

/// Rows with pitches, by vectors and by single elements: each element is written once, as the twin does, and nothing between rows.
fn check_rows<T: Arithmetic>() {
    let (kind, scalars) = (T::KIND, [false, false, true]);
    let small = |len: usize| -> Vec<u8> {
        let all: Vec<T> = (0..len as u64).map(|at| T::nth(T::ONE, T::ONE, at % 11)).collect();
        bytemuck::cast_slice(&all).to_vec()
    };
    for (last, flags) in
        [(Step::MulAdd(0, 2, 1), false), (Step::Compare(Comparison::Lt, 0, 1), true)]
    {
        let steps = vec![Step::Argument(0), Step::Argument(1), Step::Argument(2), last];
        let expression = Expression { steps, result: 3 };
        let recipe =
            Recipe::Formula { kind, expression: &expression, scalars: &scalars, flags, rows: true };
        let twin = twin::formula::<T>(&Arc::new(expression.clone()), &scalars, flags, true);
        let (lanes, size) = (recipe.tiling().lanes as usize, size_of::<T>());
        for (rows, columns, gap, aligned) in [
            (1, lanes, lanes, true),
            (3, 2 * lanes, 3 * lanes, true),
            (2, 40 * lanes, lanes, true),
            (70, 4 * lanes, 0, true),
            (1, 1, 1, false),
            (5, 3 * lanes + 1, 2, false),
            (3, 299, 0, false),
            (300, 1, 7, false),
        ] {
            // The second array is no rows, and has no gaps.
            let out_size = if flags { 1 } else { size };
            let arrays = [(size, columns + gap), (size, columns), (out_size, columns + 2 * gap)];
            let extent = |pitch: usize| (rows - 1) * pitch + columns;
            let offset = if aligned { 0 } else { 8 };
            let (mut memory, mut own, mut args) =
                (FakeMemory::default(), Vec::new(), ArgBlock::default());
            let mut params = Vec::new();
            for (number, (bytes, pitch)) in arrays.iter().enumerate() {
                let is_output = number == 2;
                if is_output {
                    let two = small(2)[size..].to_vec();
                    let mut word = [0; 8];
                    word[..size].copy_from_slice(&two);
                    params.push(u64::from_le_bytes(word));
                    args.push_value(&two);
                }
                let len = extent(*pitch);
                let contents = if is_output { vec![0xA5; len * bytes] } else { small(len) };
                params.push(memory.add(contents.clone(), offset));
                own.push(words(&contents));
                let address = own.last_mut().expect("one").as_mut_ptr() as u64;
                args.push_memory(address, contents.len() as u64);
            }
            let count = (rows * columns) as u64;
            params.extend([count, aligned.into(), columns as u64]);
            args.push_value(&count.to_ne_bytes());
            args.push_value(&u32::from(aligned).to_ne_bytes());
            args.push_value(&(columns as u64).to_ne_bytes());
            for (bytes, pitch) in arrays {
                params.push((bytes * pitch) as u64);
                args.push_value(&((bytes * pitch) as u64).to_ne_bytes());
            }
            let (grid_dim, block_dim, cluster_dim) = ([1; 3], [1; 3], [1; 3]);
            twin(&Grid { grid_dim, block_dim, cluster_dim, shared_mem_bytes: 0 }, &args);
            let units = count / if aligned { lanes as u64 } else { 1 };
            for target in [Target::Pascal, Target::Hopper] {
                let text = generate(&recipe, target);
                let code = KernelText::read(&text);
                memory.written[2].fill(0);
                for block in 0..units.div_ceil(THREADS.into()) {
                    for thread in 0..u64::from(THREADS) {
                        code.run(&mut memory, &params, (block, thread));
                    }
                }
                let what = format!("{kind:?}, {rows} rows of {columns}, flags {flags}");
                let expected: &[u8] = bytemuck::cast_slice(&own[2]);
                let found = &memory.arrays[2];
                assert_eq!(*found, expected[..found.len()], "{what}");
                for (at, times) in memory.written[2].iter().enumerate() {
                    let is_element = at / out_size % arrays[2].1 < columns;
                    assert_eq!(*times, u8::from(is_element), "{what}: byte {at}");
                }
            }
        }
    }
}

macro_rules! as_twins {
    ($($name:ident)+) => {$(
        #[test]
        fn $name() {
            check::<$name>();
            check_rows::<$name>();
        }
    )+};
}

/// Each kernel writes what its twin writes, once, and nothing outside.
mod kernels_are_as_their_twins {
    use super::*;
    as_twins! { u8 u16 u32 u64 i8 i16 i32 i64 f16 bf16 f32 f64 }

    #[test]
    fn indices() {
        check_indices::<u8, u32>(|index| index as u32);
        check_indices::<u16, u64>(|index| index);
        check_indices::<u32, u32>(|index| index as u32);
        check_indices::<u64, u64>(|index| index);
        check_indices::<u64, u32>(|index| index as u32);
        check_indices::<u8, u64>(|index| index);
    }
}

/// The last block of more than 2^32 elements: only the part of the arrays that it reaches exists.
#[test]
fn the_end_of_a_long_array() {
    let steps = vec![Step::Argument(0), Step::Unary(Unary::Neg, 0)];
    let expression = Expression { steps, result: 1 };
    let recipe = Recipe::Formula {
        kind: NumberKind::F32,
        expression: &expression,
        scalars: &[false],
        flags: false,
        rows: false,
    };
    let tile = u64::from(recipe.tiling().tile());
    let text = generate(&recipe, Target::Ampere);
    let code = KernelText::read(&text);
    for last in [tile, 259] {
        let block = 3 * (1 << 32) / tile;
        let first = block * tile;
        let mut memory = FakeMemory::default();
        let numbers: Vec<f32> = (0..last).map(|at| at as f32 + 1.0).collect();
        let window = bytemuck::cast_slice(&numbers).to_vec();
        let from = memory.add(window.clone(), 0).wrapping_sub(4 * first);
        let to = memory.add(vec![0; window.len()], 0).wrapping_sub(4 * first);
        for thread in 0..u64::from(THREADS) {
            code.run(&mut memory, &[from, to, first + last, 1], (block, thread));
        }
        let found: Vec<f32> =
            memory.arrays[1].chunks(4).map(bytemuck::pod_read_unaligned).collect();
        assert!(found.iter().zip(&numbers).all(|(found, number)| *found == -number), "{last}");
        assert!(memory.written[1].iter().all(|times| *times == 1), "{last}");
    }
}
