//! [`WrittenFormula`]: a formula as instructions, one step after another.
#![forbid(unsafe_code)]

use super::instructions::{binary, compare, double, single, unary};
use super::text::{PtxText, Register, RegisterClass};
use crate::elementwise::expression::{Binary, Expression, Literal, Logic, Step, Unary};
use crate::elementwise::number_kind::NumberKind;

/// A formula, with those steps already computed that are the same for all elements.
pub(super) struct WrittenFormula<'e> {
    kind: NumberKind,
    expression: &'e Expression,
    /// For each argument, its index among the arrays, if it is one.
    arrays: Vec<Option<usize>>,
    values: Vec<Option<Computing>>,
}

/// A value while it is computed.
#[derive(Clone, Copy)]
struct Computing {
    register: Register,
    /// For an integer of less than 32 bits: its upper bits are arbitrary.
    is_dirty: bool,
}

impl<'e> WrittenFormula<'e> {
    pub(super) fn new(
        text: &mut PtxText,
        (kind, expression): (NumberKind, &'e Expression),
        which: &[bool],
        scalars: &[Register],
    ) -> Self {
        let (mut arrays, mut passed, mut next) = (Vec::new(), Vec::new(), 0);
        let mut given = scalars.iter().copied();
        for is_scalar in which {
            passed.push(if *is_scalar { given.next() } else { None });
            arrays.push((!is_scalar).then_some(next));
            next += usize::from(!is_scalar);
        }
        let mut written =
            WrittenFormula { kind, expression, arrays, values: vec![None; expression.steps.len()] };
        let mut values = written.values.clone();
        let uniform = expression.uniform(which);
        for (at, step) in expression.steps.iter().enumerate() {
            if uniform[at] {
                let argument = |number: u32| passed[number as usize];
                values[at] = written.step(text, &mut values, *step, &argument);
            }
        }
        written.values = values;
        written
    }

    /// The result for one element of each array.
    pub(super) fn element(&self, text: &mut PtxText, inputs: &[Register]) -> Register {
        let mut values = self.values.clone();
        for (at, step) in self.expression.steps.iter().enumerate() {
            if values[at].is_none() {
                let argument = |number: u32| self.arrays[number as usize].map(|at| inputs[at]);
                values[at] = self.step(text, &mut values, *step, &argument);
            }
        }
        let result = values[self.expression.result as usize];
        result.expect("steps read steps in front of them").register
    }

    fn step(
        &self,
        text: &mut PtxText,
        values: &mut [Option<Computing>],
        step: Step,
        argument: &dyn Fn(u32) -> Option<Register>,
    ) -> Option<Computing> {
        let kind = self.kind;
        // Operations whose result depends only on an integer's own bits.
        let any = |at: u32| values[at as usize];
        let clean = |register| Some(Computing { register, is_dirty: false });
        let narrow = kind.is_integer() && kind.bytes() < 4;
        let dirty = |register| Some(Computing { register, is_dirty: narrow });
        match step {
            Step::Argument(number) => clean(argument(number)?),
            Step::Literal(literal) => clean(self.literal(text, literal)),
            Step::Unary(op @ (Unary::Neg | Unary::Not), a) => {
                let a = any(a)?.register;
                dirty(unary(text, kind, op, a))
            }
            Step::Unary(Unary::Abs, a) => {
                let a = self.clean(text, values, a)?;
                dirty(unary(text, kind, Unary::Abs, a))
            }
            Step::Unary(op, a) => clean(unary(text, kind, op, any(a)?.register)),
            Step::Binary(op @ (Binary::Add | Binary::Sub | Binary::Mul), a, b) => {
                let (a, b) = (any(a)?.register, any(b)?.register);
                dirty(binary(text, kind, op, a, b))
            }
            Step::Binary(op @ (Binary::And | Binary::Or | Binary::Xor), a, b) => {
                let (a, b) = (any(a)?, any(b)?);
                let register = binary(text, kind, op, a.register, b.register);
                Some(Computing { register, is_dirty: a.is_dirty || b.is_dirty })
            }
            Step::Binary(Binary::Shl, a, b) => {
                let (a, b) = (any(a)?.register, any(b)?.register);
                dirty(binary(text, kind, Binary::Shl, a, b))
            }
            Step::Binary(op, a, b) => {
                let (a, b) = (self.clean(text, values, a)?, self.clean(text, values, b)?);
                let register = binary(text, kind, op, a, b);
                // The least number divided by -1 does not fit.
                if op == Binary::Div { dirty(register) } else { clean(register) }
            }
            Step::MulAdd(a, b, c) => {
                let [a, b, c] = [any(a)?, any(b)?, any(c)?].map(|value| value.register);
                let op = match RegisterClass::of(kind) {
                    RegisterClass::Single => "fma.rn.f32",
                    RegisterClass::Double => "fma.rn.f64",
                    RegisterClass::Long => "mad.lo.s64",
                    _ => "mad.lo.s32",
                };
                dirty(text.op(RegisterClass::of(kind), op, &[&a, &b, &c]))
            }
            Step::Compare(op, a, b) => {
                let (a, b) = (self.clean(text, values, a)?, self.clean(text, values, b)?);
                clean(compare(text, kind, op, a, b))
            }
            Step::Logic(op, a, b) => {
                let op = match op {
                    Logic::And => "and.pred",
                    Logic::Or => "or.pred",
                    Logic::Xor => "xor.pred",
                };
                let (a, b) = (any(a)?.register, any(b)?.register);
                clean(text.op(RegisterClass::Predicate, op, &[&a, &b]))
            }
            Step::LogicNot(a) => {
                let a = any(a)?.register;
                clean(text.op(RegisterClass::Predicate, "not.pred", &[&a]))
            }
            Step::Select(mask, a, b) => {
                let (mask, a, b) = (any(mask)?.register, any(a)?, any(b)?);
                let class = RegisterClass::of(kind);
                let op = format!("selp.{}", class.bits());
                let register = text.op(class, &op, &[&a.register, &b.register, &mask]);
                Some(Computing { register, is_dirty: a.is_dirty || b.is_dirty })
            }
        }
    }

    /// The value, sign-extended or zero-extended above its own bits.
    fn clean(
        &self,
        text: &mut PtxText,
        values: &mut [Option<Computing>],
        at: u32,
    ) -> Option<Register> {
        let value = values[at as usize].as_mut()?;
        if value.is_dirty {
            let op = if self.kind.is_signed() { "bfe.s32" } else { "bfe.u32" };
            let bits = 8 * self.kind.bytes();
            value.register = text.op(RegisterClass::Word, op, &[&value.register, &0, &bits]);
            value.is_dirty = false;
        }
        Some(value.register)
    }

    fn literal(&self, text: &mut PtxText, literal: Literal) -> Register {
        let class = RegisterClass::of(self.kind);
        let operand = match (class, literal) {
            (RegisterClass::Single, Literal::Float(value)) => single(value as f32),
            (RegisterClass::Single, Literal::Integer(value)) => single(value as f32),
            (RegisterClass::Double, Literal::Float(value)) => double(value),
            (RegisterClass::Double, Literal::Integer(value)) => double(value as f64),
            (RegisterClass::Long, Literal::Integer(value)) => format!("0x{:x}", value as u64),
            (_, Literal::Integer(value)) => format!("0x{:x}", value as u32),
            (_, Literal::Float(value)) => format!("0x{:x}", value as u32),
        };
        text.op(class, &format!("mov.{}", class.bits()), &[&operand])
    }
}
