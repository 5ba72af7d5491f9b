//! Whether a kernel waits for what is in front of it before anything that can have an effect, by its PTX (pure).
//!
//! The entry may do nothing in front of its `griddepcontrol.wait` but compute from its parameters and special registers, and the wait has no
//! condition. So every thread of every block waits, whatever the arguments. Nothing in it, or in functions that it calls, loads through a cache that
//! asserts that nobody writes meanwhile: the compiler may move such loads across the wait, and what is in front writes. Nobody writes the tables of
//! CUDA's mathematical functions.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};

use super::ptx::{self, NotUnderstood, Ptx, PtxFunction, Statement};
use crate::error::image::NotProgrammatic;

/// The first compute capability, times ten, that starts kernels early.
const FIRST: u32 = 90;

/// What computes, and does nothing else. `ld.param` is apart.
const COMPUTES: [&str; 54] = [
    "abs", "add", "addc", "and", "bfe", "bfi", "bfind", "bmsk", "brev", "clz", "cnot", "copysign",
    "cos", "cvt", "cvta", "div", "dp2a", "dp4a", "ex2", "fma", "fns", "isspacep", "lg2", "lop3",
    "mad", "mad24", "madc", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc",
    "prmt", "rcp", "rem", "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr", "sin",
    "slct", "sqrt", "sub", "subc", "tanh", "xor",
];
/// How the names of CUDA's own tables begin.
const TABLE: &str = "__cudart_";

/// Why the entry does not, if so. One that is not there is for the driver to miss.
pub(super) fn check(text: &str, entry: &str) -> Result<(), NotProgrammatic> {
    let ptx =
        ptx::read(text).map_err(|NotUnderstood(found)| NotProgrammatic::NotUnderstood { found })?;
    let is_it = |function: &&PtxFunction<'_>| function.is_entry && function.name == entry;
    let body = ptx.functions.iter().filter(is_it).find_map(|function| function.body.as_deref());
    let Some(body) = body else { return Ok(()) };
    let number = |target: &str| {
        target.strip_prefix("sm_")?.trim_end_matches(char::is_alphabetic).parse().ok()
    };
    let target = ptx.targets.iter().find_map(|target| number(target));
    if target.is_none_or(|target: u32| target < FIRST) {
        return Err(NotProgrammatic::Target { target: ptx.targets.join(", ") });
    }
    let is_wait = |one: &&Statement<'_>| one.op == "griddepcontrol.wait" && one.operands.is_empty();
    if !body.iter().any(|one| is_wait(&one)) {
        return Err(NotProgrammatic::NoWait);
    }
    let mut before = body.iter().take_while(|one| !is_wait(one) || one.is_guarded);
    if let Some(early) = before.find(|one| !only_computes(one)) {
        return Err(NotProgrammatic::TooEarly { instruction: early.written(text) });
    }
    for statements in reached(&ptx, body) {
        let asserts = |one: &&Statement<'_>| is_of_constants(&one.op);
        let mut tables = None;
        for one in statements.iter().filter(asserts) {
            let tables = tables.get_or_insert_with(|| tables_of(statements));
            if !address(one).is_some_and(|from| from.starts_with(TABLE) || tables.contains(from)) {
                return Err(NotProgrammatic::LoadsConstants { instruction: one.op.clone() });
            }
        }
    }
    Ok(())
}

fn only_computes(statement: &Statement<'_>) -> bool {
    let name = statement.op.split('.').next().unwrap_or("");
    COMPUTES.contains(&name) || statement.op.starts_with("ld.param")
}

/// Whether it loads what nobody may write meanwhile.
fn is_of_constants(op: &str) -> bool {
    let mut parts = op.split('.');
    match parts.next() {
        Some("ld") => parts.any(|part| part == "nc"),
        Some("ldu" | "tex" | "tld4" | "suld") => true,
        _ => false,
    }
}

/// The body, and those of all functions that it may call.
fn reached<'p, 't>(ptx: &'p Ptx<'t>, body: &'p [Statement<'t>]) -> Vec<&'p [Statement<'t>]> {
    let functions = || ptx.functions.iter().filter(|function| !function.is_entry);
    let (mut bodies, mut names, mut at) = (vec![body], HashSet::new(), 0);
    while let Some(calls) = bodies.get(at).copied() {
        at += 1;
        for call in calls.iter().filter(|one| one.op.split('.').next() == Some("call")) {
            // Behind what it returns. Whom a register names is not known.
            let is_named = |name: &str| call.operands.contains(&name);
            let is_known = !ptx.has_aliases && functions().any(|function| is_named(function.name));
            for function in functions().filter(|function| !is_known || is_named(function.name)) {
                if let Some(body) = &function.body
                    && names.insert(function.name)
                {
                    bodies.push(body);
                }
            }
        }
    }
    bodies
}

/// Where it loads from: a register, or a name.
fn address<'t>(statement: &Statement<'t>) -> Option<&'t str> {
    let at = statement.operands.iter().position(|operand| *operand == "[")?;
    statement.operands.get(at + 1).copied()
}

/// The registers that have addresses of tables alone, whatever the way to an instruction.
fn tables_of<'t>(statements: &[Statement<'t>]) -> HashSet<&'t str> {
    let mut written: HashMap<&str, Vec<&Statement<'_>>> = HashMap::new();
    for statement in statements {
        let to = statement.operands.iter().take_while(|operand| **operand != ",");
        to.for_each(|to| written.entry(to).or_default().push(statement));
    }
    let moves = |one: &&Statement<'_>| {
        matches!(one.op.split('.').next(), Some("mov" | "cvta" | "add" | "mad"))
    };
    let mut tables: HashSet<&str> = written
        .iter()
        .filter(|(_, by)| by.iter().all(moves))
        .map(|(register, _)| *register)
        .collect();
    loop {
        let is_of_table = |one: &&Statement<'_>| {
            one.operands.iter().skip(2).any(|from| from.starts_with(TABLE) || tables.contains(from))
        };
        let is_wrong = |register: &&str| !written[register].iter().all(is_of_table);
        let wrong: Vec<&str> = tables.iter().copied().filter(is_wrong).collect();
        if wrong.is_empty() {
            return tables;
        }
        wrong.iter().for_each(|register| _ = tables.remove(register));
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
            ".loc 1 2 3\n ld.param.v2.f32 {%f1, %f2}, [p+8]; rcp.rn.f32 %f3, %f1; .loc 1 3 3\n griddepcontrol .wait; .loc 1 4 4\n@%p1 bra L; L: ret;",
            // A table of CUDA's own, as in a sine.
            "griddepcontrol.wait; mov.u64 %rd1, __cudart_i2opi_f; L: ld.global.nc.u32 %r1, [%rd1]; add.s64 %rd1, %rd1, 4; @%p1 bra L; ret;",
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
            (".loc 1 1 1\n@%p1 exit;", "@%p1 exit"),
            ("mov : st.global.u32 [%rd1], 7;", "st.global.u32 [%rd1], 7"),
            (
                ".pragma \"griddepcontrol.wait;\"; red.global.add.u32 [%rd1], 1;",
                "red.global.add.u32 [%rd1], 1",
            ),
        ];
        for (code, instruction) in before {
            assert_eq!(check(&format!("{code} {WAIT} DONE: ret;")), early(instruction));
        }
        assert_eq!(check("mov.u32 %r1, 1;"), Err(NotProgrammatic::NoWait));
        assert_eq!(check("@%p1 bra DONE; DONE: ret;"), Err(NotProgrammatic::NoWait));
        let unknown = NotProgrammatic::NotUnderstood {
            found: ".unknown 1 ret; griddepcontrol.wait; ret;".to_owned(),
        };
        assert_eq!(check(".unknown 1 ret; griddepcontrol.wait; ret;"), Err(unknown));
        for op in ["ld.global.nc.u32", "ld.global.nc.L1::no_allocate.v4.f32", "ldu.global.u32"] {
            assert_eq!(check(&format!("{WAIT} @%p1 {op} %r1, [%rd1]; ret;")), loads(op));
            assert_eq!(
                check(&format!("{WAIT} .loc 1 1 1\n A: @ ! %p1 {op} %r1, [%rd1]; ret;")),
                loads(op)
            );
        }
        let mixed = "mov.u64 %rd1, __cudart_i2opi_f; @%p1 mov.u64 %rd1, %rd2; ld.global.nc.u32 %r1, [%rd1];";
        assert_eq!(check(&format!("{WAIT} {mixed} ret;")), loads("ld.global.nc.u32"));
        let with = |function: &str, code: &str| {
            super::check(&format!("{}\n{function}", kernel("sm_90a", code)), "it")
        };
        let function = ".func f() { ld.global.nc.f64 %fd1, [%rd1]; ret; }";
        assert_eq!(with(function, "griddepcontrol.wait; call f; ret;"), loads("ld.global.nc.f64"));
        assert_eq!(
            with(function, "griddepcontrol.wait; @ %p1 call (o), f, (a); ret;"),
            loads("ld.global.nc.f64")
        );
        assert_eq!(
            with(function, "griddepcontrol.wait; call %rd1, (a), p; ret;"),
            loads("ld.global.nc.f64")
        );
        assert_eq!(with(function, "griddepcontrol.wait; ret;"), Ok(()));
        let other = ".extern .func vprintf(.param .b64 a); .entry other() { ld.global.nc.f64 %fd1, [%rd1]; ret; } .func g() { ld.global.nc.f64 %fd1, [%rd1]; ret; }";
        assert_eq!(with(other, "griddepcontrol.wait; call vprintf, (a); ret;"), Ok(()));
        let old = super::check(&kernel("sm_80", WAIT), "it");
        assert_eq!(old, Err(NotProgrammatic::Target { target: "sm_80".to_owned() }));
        // The driver says which kernels there are.
        assert_eq!(super::check(&kernel("sm_90", WAIT), "none"), Ok(()));
        assert_eq!(super::check(&kernel("texmode_independent, sm_90a", WAIT), "it"), Ok(()));
    }
}
