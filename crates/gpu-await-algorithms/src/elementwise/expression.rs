//! [`Expression`]: the computation of a formula for one element, as a list of steps; pure.
//!
//! # Invariants
//! 1. A step reads only earlier steps: their results exist when it is recorded.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use super::number_kind::NumberKind;

/// A number written in a formula.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Literal {
    Integer(i128),
    Float(f64),
}

#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Neg,
    Not,
    Abs,
    Sqrt,
    Rsqrt,
    Recip,
    Floor,
    Ceil,
    Round,
    Trunc,
    Exp,
    Ln,
    Sin,
    Cos,
    Tanh,
}

#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    Min,
    Max,
    Powf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// A step's index in its list.
pub(crate) type At = u32;

/// One step; it reads earlier steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Argument(u32),
    Literal(Literal),
    Unary(Unary, At),
    Binary(Binary, At, At),
    MulAdd(At, At, At),
    Compare(Comparison, At, At),
    Logic(Logic, At, At),
    LogicNot(At),
    Select(At, At, At),
}

/// The computation of a formula for one element.
#[derive(Clone, Debug)]
pub(crate) struct Expression {
    pub(crate) steps: Vec<Step>,
    /// The step whose value is the result.
    pub(crate) result: At,
}

/// The steps of a formula while it runs and is recorded. Nothing else can make steps: a term of another tape would refer to
/// a different step.
#[doc(hidden)]
pub struct Tape(RefCell<Vec<Step>>);

impl Tape {
    pub(super) fn new() -> Self {
        Tape(RefCell::default())
    }

    pub(super) fn push(&self, step: Step) -> At {
        let mut steps = self.0.borrow_mut();
        steps.push(step);
        steps.len() as At - 1
    }

    pub(super) fn finish(self, result: At) -> Expression {
        Expression { steps: self.0.into_inner(), result }
    }
}

impl Expression {
    /// A number in it that the element type cannot represent.
    pub(crate) fn unfit_literal(&self, kind: NumberKind) -> Option<i128> {
        self.steps.iter().find_map(|step| match *step {
            Step::Literal(Literal::Integer(value)) if kind.is_integer() && !kind.holds(value) => {
                Some(value)
            }
            _ => None,
        })
    }

    /// Whether each step has one value for all elements, given which arguments are numbers.
    pub(crate) fn uniform(&self, scalars: &[bool]) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let is = |at: At| uniform[at as usize];
            let this = match *step {
                Step::Argument(number) => scalars[number as usize],
                Step::Literal(_) => true,
                Step::Unary(_, a) | Step::LogicNot(a) => is(a),
                Step::Binary(_, a, b) | Step::Compare(_, a, b) | Step::Logic(_, a, b) => {
                    is(a) && is(b)
                }
                Step::MulAdd(a, b, c) | Step::Select(a, b, c) => is(a) && is(b) && is(c),
            };
            uniform.push(this);
        }
        uniform
    }
}
