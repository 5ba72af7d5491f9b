//! Whether a kernel waits for what is in front of it before anything that can have an effect, by its PTX (pure).
//!
//! The entry may do nothing in front of its `griddepcontrol.wait` but compute from its parameters and special registers, and the wait has no
//! condition. So every thread of every block waits, whatever the arguments. Nothing in it, or in functions of the image if it calls any, loads
//! through a cache that asserts that nobody writes meanwhile: the compiler may move such loads across the wait, and what is in front writes.
#![forbid(unsafe_code)]

use crate::error::image::NotProgrammatic;

/// The first compute capability, times ten, that starts kernels early.
const FIRST: u32 = 90;

/// What computes, and does nothing else. `ld.param` is apart.
const COMPUTES: [&str; 34] = [
    "abs", "add", "and", "bfe", "bfi", "bfind", "brev", "clz", "cnot", "copysign", "cvt", "cvta",
    "div", "fma", "isspacep", "lop3", "mad", "mad24", "max", "min", "mov", "mul", "mul24", "neg",
    "not", "or", "popc", "prmt", "rem", "selp", "setp", "shf", "shl", "shr",
];
const COMPUTES_TOO: [&str; 3] = ["slct", "sub", "xor"];

/// Why the entry does not, if so.
pub(super) fn check(ptx: &str, entry: &str) -> Result<(), NotProgrammatic> {
    let text = without_comments(ptx);
    let target = text.split(".target").nth(1).map_or("", str::trim_start);
    let target = target.split([',', '\n', ' ', '\t', '\r']).next().unwrap_or("");
    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
    if digits.parse().map_or(true, |target: u32| target < FIRST) {
        return Err(NotProgrammatic::Target { target: target.to_owned() });
    }
    let body = body(&text, entry).ok_or(NotProgrammatic::NoWait)?;
    let statements =
        || body.split([';', '{', '}']).map(without_label).filter(|one| !one.is_empty());
    let mut waits = false;
    for statement in statements().take_while(|one| *one != "griddepcontrol.wait") {
        if !only_computes(statement) {
            let instruction = statement.split_whitespace().collect::<Vec<_>>().join(" ");
            return Err(NotProgrammatic::TooEarly { instruction });
        }
    }
    let (mut calls, mut loads) = (false, None);
    for statement in statements() {
        let (_, op) = guarded(statement);
        waits |= statement == "griddepcontrol.wait";
        calls |= op == "call" || op.starts_with("call.");
        loads = loads.or_else(|| is_of_constants(op).then(|| op.to_owned()));
    }
    if !waits {
        return Err(NotProgrammatic::NoWait);
    }
    if calls && text.contains(".func") {
        let all = text.split([';', '{', '}']).map(|one| guarded(without_label(one)).1);
        loads = loads.or_else(|| all.into_iter().find(|op| is_of_constants(op)).map(str::to_owned));
    }
    loads.map_or(Ok(()), |instruction| Err(NotProgrammatic::LoadsConstants { instruction }))
}

/// The text between the braces of the entry.
fn body<'t>(text: &'t str, entry: &str) -> Option<&'t str> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "_$%".contains(c);
    let rest = text.split(".entry").skip(1).find_map(|rest| {
        let rest = rest.trim_start().strip_prefix(entry)?;
        (!rest.starts_with(is_of_name)).then_some(rest)
    })?;
    let rest = &rest[rest.find('{')? + 1..];
    let mut depth = 1;
    let end = rest.find(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        depth == 0
    })?;
    Some(&rest[..end])
}

fn without_comments(ptx: &str) -> String {
    let mut rest = ptx;
    let mut text = String::with_capacity(ptx.len());
    while let Some(at) = rest.find('/') {
        let (before, from) = rest.split_at(at);
        text.push_str(before);
        let end = match from.as_bytes().get(1) {
            Some(b'/') => from.find('\n'),
            Some(b'*') => from.find("*/").map(|end| end + 2),
            _ => {
                text.push('/');
                Some(1)
            }
        };
        text.push(' ');
        rest = end.map_or("", |end| &from[end..]);
    }
    text + rest
}

/// A statement behind its label.
fn without_label(statement: &str) -> &str {
    let statement = statement.trim();
    let label = statement.split_once(':');
    let is_label =
        |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_$%".contains(c));
    label.filter(|(name, _)| is_label(name)).map_or(statement, |(_, rest)| rest.trim_start())
}

/// Whether it has a condition, and the instruction's name.
fn guarded(statement: &str) -> (bool, &str) {
    let is_guarded = statement.starts_with('@');
    let mut words = statement.split_whitespace();
    let name = words.nth(usize::from(is_guarded)).unwrap_or("");
    (is_guarded, name)
}

fn only_computes(statement: &str) -> bool {
    let (_, op) = guarded(statement);
    let name = op.split('.').next().unwrap_or("");
    // A declaration, or where the source is.
    op.starts_with('.')
        || op.starts_with("ld.param")
        || COMPUTES.contains(&name)
        || COMPUTES_TOO.contains(&name)
}

/// Whether it loads what nobody may write meanwhile.
fn is_of_constants(op: &str) -> bool {
    let mut parts = op.split('.');
    match parts.next() {
        Some("ld") => parts.any(|part| part == "nc"),
        Some("ldu" | "tex" | "tld4") => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(target: &str, code: &str) -> String {
        format!(
            ".version 8.0\n.target {target}\n.address_size 64\n.visible .entry first(.param .u64 p)\n{{ st.global.u32 [%rd1], 0; ret; }}\n\
             .visible .entry it(\n.param .u64 p /* griddepcontrol.wait; */\n)\n.maxntid 256, 1, 1\n{{\n{code}\n}}\n"
        )
    }

    #[test]
    fn waiting_first_is_seen() {
        const WAIT: &str = "griddepcontrol.wait;";
        let check = |code: &str| check(&kernel("sm_90", code), "it");
        let early = |instruction: &str| {
            Err(NotProgrammatic::TooEarly { instruction: instruction.to_owned() })
        };
        let loads = |op: &str| Err(NotProgrammatic::LoadsConstants { instruction: op.to_owned() });
        let accepted = [
            "griddepcontrol.wait; ret;",
            ".reg .b64 %rd<3>; ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;\n// ret;\ngriddepcontrol.wait; griddepcontrol.launch_dependents; ret;",
            "{ griddepcontrol.wait; } @%p1 bra L; L: ret;",
            "L: griddepcontrol.wait; ld.global.u32 %r1, [%rd1]; ret;",
        ];
        for code in accepted {
            assert_eq!(check(code), Ok(()), "{code}");
        }
        let before = [
            ("setp.ge.u32 %p1, %r1, %r2; @%p1 bra DONE;", "@%p1 bra DONE"),
            ("@%p1 ret;", "@%p1 ret"),
            ("ld.global.u32 %r1, [%rd1];", "ld.global.u32 %r1, [%rd1]"),
            ("st.shared.u32 [%rd1], 1;", "st.shared.u32 [%rd1], 1"),
            ("bar.sync 0;", "bar.sync 0"),
            ("@%p1 griddepcontrol.wait;", "@%p1 griddepcontrol.wait"),
            ("griddepcontrol.launch_dependents;", "griddepcontrol.launch_dependents"),
            ("call.uni f, (a);", "call.uni f, (a)"),
        ];
        for (code, instruction) in before {
            assert_eq!(check(&format!("{code} {WAIT} DONE: ret;")), early(instruction));
        }
        assert_eq!(check("mov.u32 %r1, 1;"), Err(NotProgrammatic::NoWait));
        for op in ["ld.global.nc.u32", "ld.global.nc.L1::no_allocate.v4.f32", "ldu.global.u32"] {
            assert_eq!(check(&format!("{WAIT} @%p1 {op} %r1, [%rd1]; ret;")), loads(op));
        }
        let with = |function: &str, code: &str| {
            super::check(&format!("{}\n{function}", kernel("sm_90a", code)), "it")
        };
        let function = ".func f() { ld.global.nc.f64 %fd1, [%rd1]; ret; }";
        assert_eq!(with(function, "griddepcontrol.wait; call f; ret;"), loads("ld.global.nc.f64"));
        assert_eq!(with(function, "griddepcontrol.wait; ret;"), Ok(()));
        let old = super::check(&kernel("sm_80", WAIT), "it");
        assert_eq!(old, Err(NotProgrammatic::Target { target: "sm_80".to_owned() }));
        assert_eq!(super::check(&kernel("sm_90", WAIT), "none"), Err(NotProgrammatic::NoWait));
    }
}
