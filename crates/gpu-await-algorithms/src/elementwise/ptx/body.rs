//! [`Body`]: a kernel's work for one element.
#![forbid(unsafe_code)]

use super::Recipe;
use super::instructions::{cast, double};
use super::text::{PtxText, Register, RegisterClass};
use super::written::WrittenFormula;
use crate::elementwise::number_kind::NumberKind;

/// The computation of one element, and the registers shared by all elements.
pub(super) enum Body<'e> {
    Formula { formula: WrittenFormula<'e>, flags: bool },
    Cast { from: NumberKind, to: NumberKind },
    Sequence { kind: NumberKind, start: Register, step: Register },
    Gather { bits: NumberKind, from: Register, len: Register },
    Scatter { bits: NumberKind, to: Register, len: Register },
}

impl<'e> Body<'e> {
    pub(super) fn new(
        text: &mut PtxText,
        recipe: &Recipe<'e>,
        scalars: &[Register],
        elsewhere: Option<(Register, Register)>,
    ) -> Self {
        match (*recipe, elsewhere) {
            (Recipe::Formula { kind, expression, scalars: which, flags, .. }, _) => {
                let formula = WrittenFormula::new(text, (kind, expression), which, scalars);
                Body::Formula { formula, flags }
            }
            (Recipe::Cast { from, to }, _) => Body::Cast { from, to },
            (Recipe::Sequence { kind }, _) => {
                let [mut start, mut step] = [scalars[0], scalars[1]];
                if start.class == RegisterClass::Single {
                    [start, step] =
                        [start, step].map(|x| text.op(RegisterClass::Double, "cvt.f64.f32", &[&x]));
                }
                Body::Sequence { kind, start, step }
            }
            (Recipe::Gather { bits, .. }, Some((from, len))) => Body::Gather { bits, from, len },
            (Recipe::Scatter { bits, .. }, Some((to, len))) => Body::Scatter { bits, to, len },
            (Recipe::Gather { .. } | Recipe::Scatter { .. }, None) => {
                unreachable!("both have an array elsewhere")
            }
        }
    }

    /// The values that elements from `index + offset` on are computed from, where they depend on the index.
    pub(super) fn index(
        &self,
        text: &mut PtxText,
        index: Register,
        offset: u64,
    ) -> Option<Register> {
        let Body::Sequence { kind, .. } = self else { return None };
        let index = text.op(RegisterClass::Long, "add.s64", &[&index, &offset]);
        Some(match RegisterClass::of(*kind) {
            RegisterClass::Long => index,
            RegisterClass::Word => text.op(RegisterClass::Word, "cvt.u32.u64", &[&index]),
            _ => text.op(RegisterClass::Double, "cvt.rn.f64.u64", &[&index]),
        })
    }

    /// The element at an offset, or its instructions under a predicate.
    pub(super) fn element(
        &self,
        text: &mut PtxText,
        inputs: &[Register],
        index: Option<Register>,
        lane: u64,
        predicate: Option<Register>,
    ) -> Option<Register> {
        match *self {
            Body::Formula { ref formula, flags } => {
                let result = formula.element(text, inputs);
                Some(match flags {
                    true => text.op(RegisterClass::Word, "selp.b32", &[&1, &0, &result]),
                    false => result,
                })
            }
            Body::Cast { from, to } => Some(cast(text, from, to, inputs[0])),
            Body::Sequence { kind, start, step } => {
                Some(nth(text, kind, (start, step), index?, lane))
            }
            Body::Gather { bits, from, len } => {
                let (place, is_there) = place(text, bits, (from, len), inputs[0], predicate);
                text.load(bits, 1, place, 0, Some(is_there)).pop()
            }
            Body::Scatter { bits, to, len } => {
                let (place, is_there) = place(text, bits, (to, len), inputs[1], predicate);
                text.store(bits, 1, place, 0, &inputs[..1], Some(is_there));
                None
            }
        }
    }
}

/// The address at an index, and whether it is valid.
fn place(
    text: &mut PtxText,
    bits: NumberKind,
    (start, len): (Register, Register),
    index: Register,
    predicate: Option<Register>,
) -> (Register, Register) {
    let index = match index.class {
        RegisterClass::Word => text.op(RegisterClass::Long, "cvt.u64.u32", &[&index]),
        _ => index,
    };
    let mut is_there = text.op(RegisterClass::Predicate, "setp.lt.u64", &[&index, &len]);
    if let Some(predicate) = predicate {
        is_there = text.op(RegisterClass::Predicate, "and.pred", &[&is_there, &predicate]);
    }
    (text.element_address(start, index, bits), is_there)
}

/// `start + (index + lane) * step`: integers wrap, others are computed in `f64`.
fn nth(
    text: &mut PtxText,
    kind: NumberKind,
    (start, step): (Register, Register),
    index: Register,
    lane: u64,
) -> Register {
    match index.class {
        RegisterClass::Word => {
            let index = text.op(RegisterClass::Word, "add.s32", &[&index, &lane]);
            text.op(RegisterClass::Word, "mad.lo.s32", &[&index, &step, &start])
        }
        RegisterClass::Long => {
            let index = text.op(RegisterClass::Long, "add.s64", &[&index, &lane]);
            text.op(RegisterClass::Long, "mad.lo.s64", &[&index, &step, &start])
        }
        _ => {
            let lane = double(lane as f64);
            let index = text.op(RegisterClass::Double, "add.rn.f64", &[&index, &lane]);
            let scaled = text.op(RegisterClass::Double, "mul.rn.f64", &[&index, &step]);
            let sum = text.op(RegisterClass::Double, "add.rn.f64", &[&start, &scaled]);
            cast(text, NumberKind::F64, kind, sum)
        }
    }
}
