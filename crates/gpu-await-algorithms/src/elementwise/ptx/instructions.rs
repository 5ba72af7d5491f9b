//! The instructions for each operation of a formula, and for casts.
#![forbid(unsafe_code)]

use super::text::{PtxText, Register, RegisterClass};
use crate::elementwise::expression::{Binary, Comparison, Unary};
use crate::elementwise::number_kind::NumberKind;

/// The number as another type, like Rust's `as`; for a half, the value that is rounded when it is stored.
pub(super) fn cast(
    text: &mut PtxText,
    from: NumberKind,
    to: NumberKind,
    value: Register,
) -> Register {
    let (source, target) = (RegisterClass::of(from), RegisterClass::of(to));
    match (from.is_float(), to.is_float()) {
        (false, false) => match (source, target) {
            (RegisterClass::Word, RegisterClass::Long) if from.is_signed() => {
                text.op(RegisterClass::Long, "cvt.s64.s32", &[&value])
            }
            (RegisterClass::Word, RegisterClass::Long) => {
                text.op(RegisterClass::Long, "cvt.u64.u32", &[&value])
            }
            (RegisterClass::Long, RegisterClass::Word) => {
                text.op(RegisterClass::Word, "cvt.u32.u64", &[&value])
            }
            // Bits above the stored ones are dropped by the store.
            _ => value,
        },
        (false, true) => {
            let integer = integer(from);
            match target {
                RegisterClass::Double => {
                    text.op(RegisterClass::Double, &format!("cvt.rn.f64.{integer}"), &[&value])
                }
                // `f32` represents every 16-bit integer exactly.
                _ if to.is_half() && from.bytes() > 2 => {
                    let back = |text: &mut PtxText, near: Register| {
                        let back = text.op(source, &format!("cvt.rzi.{integer}.f32"), &[&near]);
                        let compare = format!("setp.ne.{integer}");
                        text.op(RegisterClass::Predicate, &compare, &[&back, &value])
                    };
                    odd(text, &format!("cvt.rz.f32.{integer}"), value, back)
                }
                _ => text.op(RegisterClass::Single, &format!("cvt.rn.f32.{integer}"), &[&value]),
            }
        }
        (true, true) => match (source, target) {
            (RegisterClass::Single, RegisterClass::Double) => {
                text.op(RegisterClass::Double, "cvt.f64.f32", &[&value])
            }
            (RegisterClass::Double, RegisterClass::Single) if to.is_half() => {
                odd(text, "cvt.rz.f32.f64", value, |text, near| {
                    let back = text.op(RegisterClass::Double, "cvt.f64.f32", &[&near]);
                    text.op(RegisterClass::Predicate, "setp.neu.f64", &[&back, &value])
                })
            }
            (RegisterClass::Double, RegisterClass::Single) => {
                text.op(RegisterClass::Single, "cvt.rn.f32.f64", &[&value])
            }
            _ => value,
        },
        (true, false) => {
            let float = if source == RegisterClass::Double { "f64" } else { "f32" };
            let wide = match (target, to.is_signed()) {
                (RegisterClass::Long, true) => "s64",
                (RegisterClass::Long, false) => "u64",
                (_, true) => "s32",
                (_, false) => "u32",
            };
            // Saturates.
            let mut result = text.op(target, &format!("cvt.rzi.{wide}.{float}"), &[&value]);
            if target == RegisterClass::Long || source == RegisterClass::Double {
                let is_nan = text.op(
                    RegisterClass::Predicate,
                    &format!("setp.nan.{float}"),
                    &[&value, &value],
                );
                let select = format!("selp.{}", target.bits());
                result = text.op(target, &select, &[&0, &result, &is_nan]);
            }
            let bits = 8 * to.bytes();
            if bits < 32 {
                let most = (1_i64 << (bits - u32::from(to.is_signed()))) - 1;
                result = text.op(target, &format!("min.{wide}"), &[&result, &most]);
                if to.is_signed() {
                    result = text.op(target, "max.s32", &[&result, &(-most - 1)]);
                }
            }
            result
        }
    }
}

/// Rounds to odd: rounding the result again, to a shorter type, is as good as rounding once.
fn odd(
    text: &mut PtxText,
    truncate: &str,
    value: Register,
    differs: impl Fn(&mut PtxText, Register) -> Register,
) -> Register {
    let near = text.op(RegisterClass::Single, truncate, &[&value]);
    let differs = differs(text, near);
    let bits = text.op(RegisterClass::Word, "mov.b32", &[&near]);
    let odd = text.op(RegisterClass::Word, "or.b32", &[&bits, &1]);
    let bits = text.op(RegisterClass::Word, "selp.b32", &[&odd, &bits, &differs]);
    text.op(RegisterClass::Single, "mov.b32", &[&bits])
}

/// The type of instructions that read an integer in its computed form.
pub(super) fn integer(kind: NumberKind) -> &'static str {
    match (RegisterClass::of(kind), kind.is_signed()) {
        (RegisterClass::Long, true) => "s64",
        (RegisterClass::Long, false) => "u64",
        (_, true) => "s32",
        (_, false) => "u32",
    }
}

pub(super) fn single(value: f32) -> String {
    format!("0f{:08X}", value.to_bits())
}

pub(super) fn double(value: f64) -> String {
    format!("0d{:016X}", value.to_bits())
}

pub(super) fn unary(text: &mut PtxText, kind: NumberKind, op: Unary, a: Register) -> Register {
    let class = RegisterClass::of(kind);
    let float = if class == RegisterClass::Double { "f64" } else { "f32" };
    let (one, half) = match class {
        RegisterClass::Double => (double(1.0), double(0.5)),
        _ => (single(1.0), single(0.5)),
    };
    match op {
        Unary::Abs if kind.is_integer() && !kind.is_signed() => a,
        Unary::Neg | Unary::Abs if kind.is_integer() => {
            let signed = if class == RegisterClass::Long { "s64" } else { "s32" };
            let negated = text.op(class, &format!("neg.{signed}"), &[&a]);
            match op {
                Unary::Abs => text.op(class, &format!("max.{signed}"), &[&a, &negated]),
                _ => negated,
            }
        }
        Unary::Neg => text.op(class, &format!("neg.{float}"), &[&a]),
        Unary::Abs => text.op(class, &format!("abs.{float}"), &[&a]),
        Unary::Not => text.op(class, &format!("not.{}", class.bits()), &[&a]),
        Unary::Sqrt => text.op(class, &format!("sqrt.rn.{float}"), &[&a]),
        Unary::Rsqrt => {
            let root = text.op(class, &format!("sqrt.rn.{float}"), &[&a]);
            text.op(class, &format!("rcp.rn.{float}"), &[&root])
        }
        Unary::Recip => text.op(class, &format!("rcp.rn.{float}"), &[&a]),
        Unary::Floor => text.op(class, &format!("cvt.rmi.{float}.{float}"), &[&a]),
        Unary::Ceil => text.op(class, &format!("cvt.rpi.{float}.{float}"), &[&a]),
        Unary::Trunc => text.op(class, &format!("cvt.rzi.{float}.{float}"), &[&a]),
        Unary::Round => {
            let whole = text.op(class, &format!("cvt.rzi.{float}.{float}"), &[&a]);
            let rest = text.op(class, &format!("sub.rn.{float}"), &[&a, &whole]);
            let rest = text.op(class, &format!("abs.{float}"), &[&rest]);
            let away =
                text.op(RegisterClass::Predicate, &format!("setp.ge.{float}"), &[&rest, &half]);
            let step = text.op(class, &format!("copysign.{float}"), &[&a, &one]);
            let next = text.op(class, &format!("add.rn.{float}"), &[&whole, &step]);
            text.op(class, &format!("selp.{float}"), &[&next, &whole, &away])
        }
        Unary::Exp => call(text, class, ["exp_f32", "exp_f64"], &[a]),
        Unary::Ln => call(text, class, ["ln_f32", "ln_f64"], &[a]),
        Unary::Sin => call(text, class, ["sin_f32", "sin_f64"], &[a]),
        Unary::Cos => call(text, class, ["cos_f32", "cos_f64"], &[a]),
        Unary::Tanh => call(text, class, ["tanh_f32", "tanh_f64"], &[a]),
    }
}

pub(super) fn binary(
    text: &mut PtxText,
    kind: NumberKind,
    op: Binary,
    a: Register,
    b: Register,
) -> Register {
    let class = RegisterClass::of(kind);
    if kind.is_float() {
        let float = if class == RegisterClass::Double { "f64" } else { "f32" };
        let op = match op {
            Binary::Add => "add.rn",
            Binary::Sub => "sub.rn",
            Binary::Mul => "mul.rn",
            Binary::Div => "div.rn",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Rem => return call(text, class, ["rem_f32", "rem_f64"], &[a, b]),
            _ => return call(text, class, ["powf_f32", "powf_f64"], &[a, b]),
        };
        return text.op(class, &format!("{op}.{float}"), &[&a, &b]);
    }
    let (typed, bits) = (integer(kind), class.bits());
    match op {
        Binary::Add => text.op(class, &format!("add.{typed}"), &[&a, &b]),
        Binary::Sub => text.op(class, &format!("sub.{typed}"), &[&a, &b]),
        Binary::Mul => text.op(class, &format!("mul.lo.{typed}"), &[&a, &b]),
        Binary::Min => text.op(class, &format!("min.{typed}"), &[&a, &b]),
        Binary::Max => text.op(class, &format!("max.{typed}"), &[&a, &b]),
        Binary::And => text.op(class, &format!("and.{bits}"), &[&a, &b]),
        Binary::Or => text.op(class, &format!("or.{bits}"), &[&a, &b]),
        Binary::Xor => text.op(class, &format!("xor.{bits}"), &[&a, &b]),
        Binary::Shl | Binary::Shr => {
            let by = match class {
                RegisterClass::Long => text.op(RegisterClass::Word, "cvt.u32.u64", &[&b]),
                _ => b,
            };
            let by = text.op(RegisterClass::Word, "and.b32", &[&by, &(8 * kind.bytes() - 1)]);
            match op {
                Binary::Shl => text.op(class, &format!("shl.{bits}"), &[&a, &by]),
                _ => text.op(class, &format!("shr.{typed}"), &[&a, &by]),
            }
        }
        _ => divide(text, kind, op == Binary::Rem, a, b),
    }
}

/// Division by zero gives the quotient 0 and the dividend as remainder; by -1 the quotient wraps.
fn divide(text: &mut PtxText, kind: NumberKind, rest: bool, a: Register, b: Register) -> Register {
    let (class, typed) = (RegisterClass::of(kind), integer(kind));
    let select = format!("selp.{}", class.bits());
    let by_zero = text.op(RegisterClass::Predicate, &format!("setp.eq.{typed}"), &[&b, &0]);
    let by = text.op(class, &select, &[&1, &b, &by_zero]);
    let (op, by_minus_one, at_zero): (_, Option<Register>, _) = match rest {
        true => ("rem", None, a),
        false => {
            let negated = kind.is_signed().then(|| text.op(class, &format!("neg.{typed}"), &[&a]));
            let zero = text.op(class, &format!("mov.{}", class.bits()), &[&0]);
            ("div", negated, zero)
        }
    };
    let mut result;
    if kind.is_signed() {
        let is_minus_one =
            text.op(RegisterClass::Predicate, &format!("setp.eq.{typed}"), &[&b, &-1]);
        let by = text.op(class, &select, &[&1, &by, &is_minus_one]);
        result = text.op(class, &format!("{op}.{typed}"), &[&a, &by]);
        let instead =
            by_minus_one.unwrap_or_else(|| text.op(class, &format!("mov.{}", class.bits()), &[&0]));
        result = text.op(class, &select, &[&instead, &result, &is_minus_one]);
    } else {
        result = text.op(class, &format!("{op}.{typed}"), &[&a, &by]);
    }
    text.op(class, &select, &[&at_zero, &result, &by_zero])
}

pub(super) fn compare(
    text: &mut PtxText,
    kind: NumberKind,
    op: Comparison,
    a: Register,
    b: Register,
) -> Register {
    let typed = match RegisterClass::of(kind) {
        RegisterClass::Single => "f32",
        RegisterClass::Double => "f64",
        _ => integer(kind),
    };
    let op = match op {
        Comparison::Lt => "lt",
        Comparison::Le => "le",
        Comparison::Gt => "gt",
        Comparison::Ge => "ge",
        Comparison::Eq => "eq",
        Comparison::Ne if kind.is_float() => "neu",
        Comparison::Ne => "ne",
    };
    text.op(RegisterClass::Predicate, &format!("setp.{op}.{typed}"), &[&a, &b])
}

/// Calls a function of the library.
fn call(
    text: &mut PtxText,
    class: RegisterClass,
    [of_single, of_double]: [&'static str; 2],
    arguments: &[Register],
) -> Register {
    let (name, bits) = match class {
        RegisterClass::Double => (of_double, "b64"),
        _ => (of_single, "b32"),
    };
    text.functions.insert(name);
    let result = text.fresh(class);
    text.code.push_str("    {\n");
    let mut passed = Vec::new();
    for (number, argument) in arguments.iter().enumerate() {
        text.line(format_args!(".param .{bits} a{number}"));
        text.line(format_args!("st.param.{} [a{number}], {argument}", class.bits()));
        passed.push(format!("a{number}"));
    }
    text.line(format_args!(".param .{bits} result"));
    text.line(format_args!("call (result), gpu_await_{name}, ({})", passed.join(", ")));
    text.line(format_args!("ld.param.{} {result}, [result]", class.bits()));
    text.code.push_str("    }\n");
    result
}
