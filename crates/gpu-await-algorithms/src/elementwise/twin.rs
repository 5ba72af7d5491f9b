//! Elementwise kernels on the CPU: the same bits as `ptx.rs`, except for the functions of `math.rs`.
//!
//! A formula is computed for a few hundred elements at a time, one step after another. The inputs are copied first: the output array may
//! also be an input, element by element.

use std::sync::Arc;

use super::arithmetic::{Arithmetic, Computed, map, zip};
use super::expression::{Comparison, Expression, Logic, Step};
use gpu_await::sibling::{ArgBlock, HostTwin};

/// Elements at a time.
const CHUNK: usize = 256;

/// The arguments of a launch, with the memory they name.
struct Launched<'a>(&'a ArgBlock);

impl Launched<'_> {
    fn number<N: bytemuck::Pod>(&self, slot: usize) -> N {
        bytemuck::pod_read_unaligned(self.0.value(slot, size_of::<N>()))
    }

    /// The address of `len` elements from `start` on, which are inside of the array.
    fn address<N>(&self, slot: usize, start: usize, len: usize) -> *mut N {
        let there = self.0.memory_bytes(slot) as usize / size_of::<N>();
        assert!(start + len <= there, "{start} + {len} of {there} elements");
        (self.0.address(slot) as *mut N).wrapping_add(start)
    }

    fn read<N: bytemuck::Pod>(&self, slot: usize, start: usize, into: &mut [N]) {
        let from = self.address::<N>(slot, start, into.len());
        // SAFETY: the launch names that memory, which is live, aligned for its elements and exclusive when the stream gets
        // there; the range was checked, and `into` is the host's own.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    fn write<N: bytemuck::Pod>(&self, slot: usize, start: usize, from: &[N]) {
        let to = self.address::<N>(slot, start, from.len());
        // SAFETY: as above; the launch declared it as written.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Calls `part` with the start and the length of each chunk.
    fn parts(count: u64, mut part: impl FnMut(usize, usize)) {
        let count = count as usize;
        (0..count).step_by(CHUNK).for_each(|start| part(start, CHUNK.min(count - start)));
    }
}

/// A few hundred values of a step.
enum Chunk<C> {
    Numbers(Vec<C>),
    Flags(Vec<bool>),
}

impl<C: Computed> Chunk<C> {
    fn of(step: &Step) -> Self {
        match step {
            Step::Compare(..) | Step::Logic(..) | Step::LogicNot(_) => {
                Chunk::Flags(vec![false; CHUNK])
            }
            _ => Chunk::Numbers(vec![C::default(); CHUNK]),
        }
    }

    fn numbers(&self) -> &[C] {
        if let Chunk::Numbers(numbers) = self { numbers } else { &[] }
    }

    fn flags(&self) -> &[bool] {
        if let Chunk::Flags(flags) = self { flags } else { &[] }
    }

    fn numbers_mut(&mut self) -> &mut [C] {
        if let Chunk::Numbers(numbers) = self { numbers } else { &mut [] }
    }

    fn flags_mut(&mut self) -> &mut [bool] {
        if let Chunk::Flags(flags) = self { flags } else { &mut [] }
    }
}

/// The twin of a formula; the arguments are laid out as in `ptx.rs`.
pub(super) fn formula<T: Arithmetic>(
    expression: &Arc<Expression>,
    scalars: &[bool],
    flags: bool,
    rows: bool,
) -> HostTwin {
    let (expression, scalars) = (expression.clone(), scalars.to_vec());
    let uniform = expression.uniform(&scalars);
    Arc::new(move |_, args| {
        let launched = Launched(args);
        let out = scalars.len();
        let count: u64 = launched.number(out + 1);
        // Columns, and the pitch of each array in bytes, the output's last. Without rows there is one row.
        let columns = if rows { launched.number(out + 3) } else { count };
        let pitch = |number: usize| -> u64 {
            let before = scalars[..number].iter().filter(|is_scalar| !**is_scalar).count();
            if rows { launched.number(out + 4 + before) } else { 0 }
        };
        let steps = &expression.steps;
        let mut chunks: Vec<Chunk<T::Computed>> = steps.iter().map(Chunk::of).collect();
        let mut elements = vec![T::zeroed(); CHUNK];
        let mut bytes = vec![0_u8; CHUNK];
        let mut is_first = true;
        let mut part = |row: u64, start: usize, len: usize| {
            let start_of =
                |number: usize, bytes: usize| (row * pitch(number)) as usize / bytes + start;
            for (at, step) in steps.iter().enumerate().filter(|(at, _)| is_first || !uniform[*at]) {
                let (before, rest) = chunks.split_at_mut(at);
                let to = &mut rest[0];
                match *step {
                    Step::Argument(number) if scalars[number as usize] => {
                        to.numbers_mut().fill(launched.number::<T>(number as usize).widen());
                    }
                    Step::Argument(number) => {
                        let start = start_of(number as usize, size_of::<T>());
                        launched.read(number as usize, start, &mut elements[..len]);
                        map(to.numbers_mut(), &elements, T::widen);
                    }
                    _ => compute(to, step, before),
                }
            }
            is_first = false;
            let result = &chunks[expression.result as usize];
            if flags {
                map(&mut bytes, result.flags(), u8::from);
                launched.write(out, start_of(out, 1), &bytes[..len]);
            } else {
                map(&mut elements, result.numbers(), T::narrow);
                launched.write(out, start_of(out, size_of::<T>()), &elements[..len]);
            }
        };
        for row in 0..count / columns {
            Launched::parts(columns, |start, len| part(row, start, len));
        }
    })
}

/// Computes a step that is not an argument.
fn compute<C: Computed>(to: &mut Chunk<C>, step: &Step, before: &[Chunk<C>]) {
    let numbers = |at: u32| before[at as usize].numbers();
    let flags = |at: u32| before[at as usize].flags();
    match *step {
        Step::Argument(_) => {}
        Step::Literal(literal) => to.numbers_mut().fill(C::literal(literal)),
        Step::Unary(op, a) => C::unary(to.numbers_mut(), op, numbers(a)),
        Step::Binary(op, a, b) => C::binary(to.numbers_mut(), op, numbers(a), numbers(b)),
        Step::MulAdd(a, b, c) => {
            let others = numbers(b).iter().zip(numbers(c));
            let all = to.numbers_mut().iter_mut().zip(numbers(a).iter().zip(others));
            all.for_each(|(to, (a, (b, c)))| *to = a.mul_add(*b, *c));
        }
        Step::Compare(op, a, b) => {
            let (to, a, b) = (to.flags_mut(), numbers(a), numbers(b));
            match op {
                Comparison::Lt => zip(to, a, b, |a, b| a < b),
                Comparison::Le => zip(to, a, b, |a, b| a <= b),
                Comparison::Gt => zip(to, a, b, |a, b| a > b),
                Comparison::Ge => zip(to, a, b, |a, b| a >= b),
                Comparison::Eq => zip(to, a, b, |a, b| a == b),
                Comparison::Ne => zip(to, a, b, |a, b| a != b),
            }
        }
        Step::Logic(op, a, b) => {
            let (to, a, b) = (to.flags_mut(), flags(a), flags(b));
            match op {
                Logic::And => zip(to, a, b, |a, b| a & b),
                Logic::Or => zip(to, a, b, |a, b| a | b),
                Logic::Xor => zip(to, a, b, |a, b| a ^ b),
            }
        }
        Step::LogicNot(a) => map(to.flags_mut(), flags(a), |a: bool| !a),
        Step::Select(mask, a, b) => {
            let both = numbers(a).iter().zip(numbers(b));
            let all = to.numbers_mut().iter_mut().zip(flags(mask).iter().zip(both));
            all.for_each(|(to, (holds, (a, b)))| *to = if *holds { *a } else { *b });
        }
    }
}

pub(super) fn cast<T: Arithmetic, U: Arithmetic>() -> HostTwin {
    Arc::new(|_, args| {
        let launched = Launched(args);
        let (mut from, mut to) = (vec![T::zeroed(); CHUNK], vec![U::zeroed(); CHUNK]);
        Launched::parts(launched.number(2), |start, len| {
            launched.read(0, start, &mut from[..len]);
            map(&mut to, &from, |value| U::from_wide(value.to_wide()));
            launched.write(1, start, &to[..len]);
        });
    })
}

pub(super) fn sequence<T: Arithmetic>() -> HostTwin {
    Arc::new(|_, args| {
        let launched = Launched(args);
        let (start, step): (T, T) = (launched.number(0), launched.number(1));
        let mut to = [T::zeroed(); CHUNK];
        Launched::parts(launched.number(3), |first, len| {
            let indices = first as u64..;
            to.iter_mut().zip(indices).for_each(|(to, index)| *to = T::nth(start, step, index));
            launched.write(2, first, &to[..len]);
        });
    })
}

pub(super) fn gather<T: Arithmetic, I: Arithmetic + Into<u64>>() -> HostTwin {
    Arc::new(|_, args| {
        let launched = Launched(args);
        let len_of_source: u64 = launched.number(5);
        let (mut indices, mut to) = (vec![I::zeroed(); CHUNK], vec![T::zeroed(); CHUNK]);
        Launched::parts(launched.number(2), |start, len| {
            launched.read(0, start, &mut indices[..len]);
            for (to, index) in to.iter_mut().zip(&indices[..len]) {
                let index: u64 = (*index).into();
                *to = T::zeroed();
                if index < len_of_source {
                    launched.read(4, index as usize, std::slice::from_mut(to));
                }
            }
            launched.write(1, start, &to[..len]);
        });
    })
}

pub(super) fn scatter<T: Arithmetic, I: Arithmetic + Into<u64>>() -> HostTwin {
    Arc::new(|_, args| {
        let launched = Launched(args);
        let len_of_target: u64 = launched.number(5);
        let (mut from, mut indices) = (vec![T::zeroed(); CHUNK], vec![I::zeroed(); CHUNK]);
        Launched::parts(launched.number(2), |start, len| {
            launched.read(0, start, &mut from[..len]);
            launched.read(1, start, &mut indices[..len]);
            for (from, index) in from.iter().zip(&indices[..len]) {
                let index: u64 = (*index).into();
                if index < len_of_target {
                    launched.write(4, index as usize, std::slice::from_ref(from));
                }
            }
        });
    })
}
