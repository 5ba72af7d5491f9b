//! Whether kernels wait for the preceding launch before they can have any effect, as far as their PTX shows (pure).
//!
//! Before its `griddepcontrol.wait`, an entry may only compute from its parameters and special registers, and the wait is unconditional. So every
//! thread of every block waits, whatever the arguments. Neither the entry nor the functions that it calls load through a cache that assumes that
//! nobody is writing: the compiler may move such loads across the wait, and the preceding launch may still write. The tables of CUDA's mathematical
//! functions are exempt: nobody writes them.
//!
//! A text is read once for all of its entries, and a body with tables once more; only a summary of each function, and then a verdict for
//! each entry, are kept.
//!
//! # Invariants
//! 1. The number of steps is proportional to the length of the text (`steps_grow_with_the_text`).
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use self::tables::Tables;
use super::image::{Form, Image};
use super::ptx::{Item, NotUnderstood, Reader, Statement, step};
use crate::error::image::NotProgrammatic;

mod tables;

/// The first compute capability, times ten, that can start kernels early.
const FIRST: u32 = 90;

/// Instructions that only compute. `ld.param` is handled separately.
const COMPUTES: [&str; 54] = [
    "abs", "add", "addc", "and", "bfe", "bfi", "bfind", "bmsk", "brev", "clz", "cnot", "copysign",
    "cos", "cvt", "cvta", "div", "dp2a", "dp4a", "ex2", "fma", "fns", "isspacep", "lg2", "lop3",
    "mad", "mad24", "madc", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc",
    "prmt", "rcp", "rem", "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr", "sin",
    "slct", "sqrt", "sub", "subc", "tanh", "xor",
];
/// What a text shows about its entries.
#[derive(Debug)]
pub(super) struct Verdicts {
    /// For each entry, why it does not wait first, if it does not.
    entries: HashMap<Box<str>, Option<NotProgrammatic>>,
    /// Why none of them does: the text targets older GPUs.
    target: Option<NotProgrammatic>,
    /// Why nothing is known about any.
    unread: Option<NotProgrammatic>,
}

impl Verdicts {
    pub(super) fn of(text: &str) -> Self {
        let mut verdicts = Verdicts { entries: HashMap::new(), target: None, unread: None };
        match Found::of(text) {
            Err(NotUnderstood(found)) => {
                verdicts.unread = Some(NotProgrammatic::NotUnderstood { found });
            }
            Ok(found) => {
                verdicts.target = too_old(&found.targets);
                let asserting = asserting(&found);
                for (function, asserts) in found.functions.into_iter().zip(asserting) {
                    if function.is_entry {
                        let loads = |instruction| NotProgrammatic::LoadsConstants { instruction };
                        let verdict = function.does_not_wait.or(asserts.map(loads));
                        verdicts.entries.entry(function.name.into()).or_insert(verdict);
                    }
                }
            }
        }
        verdicts
    }

    /// Why the entry does not wait first, if it does not. A missing entry is left for the driver to report.
    pub(super) fn check(&self, entry: &str) -> Result<(), NotProgrammatic> {
        let of_all = match (&self.unread, self.entries.get(entry)) {
            (Some(unread), _) => Some(unread),
            (None, None) => None,
            (None, Some(verdict)) => self.target.as_ref().or(verdict.as_ref()),
        };
        of_all.map_or(Ok(()), |reason| Err(reason.clone()))
    }
}

/// The verdicts on an image, computed once when first needed.
#[derive(Debug, Default)]
pub(super) struct ImageVerdicts(OnceLock<Verdicts>);

impl ImageVerdicts {
    /// Why the entry of the image does not wait first, as far as can be seen: for a binary, its author vouches.
    pub(super) fn check(&self, image: &Image, entry: &str) -> Result<(), NotProgrammatic> {
        if image.form == Form::Binary {
            return Ok(());
        }
        let verdicts = self.0.get_or_init(|| Verdicts::of(&String::from_utf8_lossy(&image.bytes)));
        verdicts.check(image.lowered(entry))
    }
}

/// Why GPUs of these targets cannot start kernels early.
fn too_old(targets: &[&str]) -> Option<NotProgrammatic> {
    let number = |target: &str| {
        target.strip_prefix("sm_")?.trim_end_matches(char::is_alphabetic).parse().ok()
    };
    let target = targets.iter().find_map(|target| number(target));
    let is_old = target.is_none_or(|target: u32| target < FIRST);
    is_old.then(|| NotProgrammatic::Target { target: targets.join(", ") })
}

/// The summary of a function with a body.
#[derive(Debug)]
struct FunctionSummary<'t> {
    name: &'t str,
    is_entry: bool,
    /// It has no wait, or something before it.
    does_not_wait: Option<NotProgrammatic>,
    /// The first of its own instructions that loads through a cache that assumes that nobody is writing.
    asserts: Option<String>,
    /// The functions that it calls. `None`: called through a register.
    calls: Vec<Option<&'t str>>,
}

/// The summary of a text.
#[derive(Default)]
struct Found<'t> {
    targets: Vec<&'t str>,
    /// Functions with bodies.
    functions: Vec<FunctionSummary<'t>>,
    /// Functions without bodies.
    declared: HashSet<&'t str>,
}

impl<'t> Found<'t> {
    fn of(text: &'t str) -> Result<Self, NotUnderstood> {
        let (mut found, mut has_aliases) = (Found::default(), false);
        let mut reader = Reader::new(text);
        while let Some(item) = reader.next() {
            match item? {
                Item::Target(target) => found.targets.push(target),
                Item::Alias => has_aliases = true,
                Item::Function { name, is_entry, has_body: true } => {
                    found.functions.push(summary((name, is_entry), &mut reader)?);
                }
                Item::Function { name, is_entry, .. } => {
                    if !is_entry {
                        found.declared.insert(name);
                    }
                }
                Item::Statement(_) | Item::Ends => {}
            }
        }
        if has_aliases {
            let calls = found.functions.iter_mut().flat_map(|one| &mut one.calls);
            calls.for_each(|call| *call = None);
        }
        Ok(found)
    }
}

/// Summarizes a body.
fn summary<'t>(
    (name, is_entry): (&'t str, bool),
    reader: &mut Reader<'t>,
) -> Result<FunctionSummary<'t>, NotUnderstood> {
    let from_its_start = reader.again();
    let (mut has_wait, mut waited, mut early) = (false, false, None);
    let (mut asserting, mut calls) = (Vec::new(), Vec::new());
    for item in reader {
        let Item::Statement(one) = item? else { break };
        let is_wait = one.op == "griddepcontrol.wait" && one.operands().next().is_none();
        has_wait |= is_wait;
        waited |= is_wait && !one.is_guarded;
        if is_entry && !waited && early.is_none() && !only_computes(&one) {
            early = Some(NotProgrammatic::TooEarly { instruction: one.written() });
        }
        if is_of_constants(&one.op) {
            let from = address(&one);
            if !from.is_some_and(tables::is_named) {
                asserting.push((one.op, from));
            }
        } else if one.op.split('.').next() == Some("call") {
            calls.push(callee(&one));
        }
    }
    if !asserting.is_empty() {
        let tables = Tables::of(from_its_start);
        asserting.retain(|(_, from)| !from.is_some_and(|from| tables.has(from)));
    }
    let asserts = asserting.into_iter().next().map(|(op, _)| op.into_owned());
    let does_not_wait = if has_wait { early } else { Some(NotProgrammatic::NoWait) };
    Ok(FunctionSummary { name, is_entry, does_not_wait, asserts, calls })
}

fn only_computes(statement: &Statement<'_>) -> bool {
    let name = statement.op.split('.').next().unwrap_or("");
    COMPUTES.contains(&name) || statement.op.starts_with("ld.param")
}

/// Whether it loads through a cache that assumes that nobody is writing.
fn is_of_constants(op: &str) -> bool {
    let mut parts = op.split('.');
    match parts.next() {
        Some("ld") => parts.any(|part| part == "nc"),
        Some("ldu" | "tex" | "tld4" | "suld") => true,
        _ => false,
    }
}

/// The function that it calls: the name comes first, or after the return parameters.
fn callee<'t>(call: &Statement<'t>) -> Option<&'t str> {
    let mut operands = call.operands().peekable();
    if operands.peek() == Some(&"(") {
        operands.by_ref().find(|operand| *operand == ")");
        operands.next();
    }
    operands.next()
}

/// For each function, the first such load found, its own or that of a function that it may call.
fn asserting(Found { functions, declared, .. }: &Found<'_>) -> Vec<Option<String>> {
    let called = || functions.iter().enumerate().filter(|(_, function)| !function.is_entry);
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    called().for_each(|(number, function)| _ = by_name.entry(function.name).or_insert(number));
    let of_any = called().find_map(|(_, function)| function.asserts.as_ref());
    let mut callers: Vec<Vec<usize>> = vec![Vec::new(); functions.len()];
    let mut found: Vec<Option<&String>> = Vec::new();
    for (number, function) in functions.iter().enumerate() {
        let mut calls_any = false;
        for call in &function.calls {
            step();
            match call.map(|name| (by_name.get(name), declared.contains(name))) {
                Some((Some(called), _)) => callers[*called].push(number),
                Some((None, true)) => {}
                // Through a register, or to an unknown function.
                Some((None, false)) | None => calls_any = true,
            }
        }
        found.push(function.asserts.as_ref().or(of_any.filter(|_| calls_any)));
    }
    let mut fresh: Vec<usize> = (0..found.len()).filter(|one| found[*one].is_some()).collect();
    while let Some(number) = fresh.pop() {
        for caller in &callers[number] {
            step();
            if found[*caller].is_none() {
                found[*caller] = found[number];
                fresh.push(*caller);
            }
        }
    }
    found.into_iter().map(Option::<&String>::cloned).collect()
}

/// The address that it loads from: a register, or a name.
fn address<'t>(statement: &Statement<'t>) -> Option<&'t str> {
    statement.operands().skip_while(|operand| *operand != "[").nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ptx::STEPS;

    fn checked(text: &str, entry: &str) -> Result<(), NotProgrammatic> {
        Verdicts::of(text).check(entry)
    }

    fn kernel(target: &str, code: &str) -> String {
        format!(
            ".version 8.0\n.target {target}\n.address_size 64\n.visible .entry first(.param .u64 p)\n{{ st.global.u32 [%rd1], 0; ret; }}\n\
             .visible .entry it(\n.param .u64 p /* griddepcontrol.wait; */\n)\n.maxntid 256, 1, 1\n{{\n{code}\n}}\n"
        )
    }

    #[test]
    fn waiting_first_is_seen() {
        const WAIT: &str = "griddepcontrol.wait;";
        let check = |code: &str| checked(&kernel("sm_90", code), "it");
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
            // One of CUDA's own tables, as in a sine.
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
            checked(&format!("{}\n{function}", kernel("sm_90a", code)), "it")
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
        // A function passed as an argument is not the one called.
        assert_eq!(
            with(
                &format!("{function} .func g() {{ ret; }}"),
                "griddepcontrol.wait; call %rd1, (g), p; ret;"
            ),
            loads("ld.global.nc.f64")
        );
        let old = checked(&kernel("sm_80", WAIT), "it");
        assert_eq!(old, Err(NotProgrammatic::Target { target: "sm_80".to_owned() }));
        // The driver reports which kernels exist.
        assert_eq!(checked(&kernel("sm_90", WAIT), "none"), Ok(()));
        assert_eq!(checked(&kernel("texmode_independent, sm_90a", WAIT), "it"), Ok(()));
    }

    /// Each register of a vector is written.
    #[test]
    fn vectors_are_no_tables() {
        let code = "griddepcontrol.wait; mov.u64 %rd2, __cudart_i2opi_f; ld.global.v2.u64 {%rd1, %rd2}, [%rd9]; \
            ld.global.nc.u32 %r1, [%rd2]; ret;";
        let loads = NotProgrammatic::LoadsConstants { instruction: "ld.global.nc.u32".to_owned() };
        assert_eq!(checked(&kernel("sm_90", code), "it"), Err(loads));
    }

    #[test]
    fn one_reading_for_all_entries() {
        let text = kernel("sm_90", "griddepcontrol.wait; ret;");
        STEPS.set(0);
        let verdicts = Verdicts::of(&text);
        let steps = STEPS.get();
        assert_eq!(verdicts.check("it"), Ok(()));
        assert_eq!(verdicts.check("first"), Err(NotProgrammatic::NoWait));
        assert_eq!(verdicts.check("none"), Ok(()));
        assert_eq!(STEPS.get(), steps);
        let (image, verdicts) = (Image::ptx(text), ImageVerdicts::default());
        STEPS.set(0);
        for _ in 0..3 {
            assert_eq!(verdicts.check(&image, "it"), Ok(()));
            assert_eq!(verdicts.check(&image, "first"), Err(NotProgrammatic::NoWait));
        }
        assert_eq!(STEPS.get(), steps);
    }

    #[test]
    fn steps_grow_with_the_text() {
        use std::fmt::Write as _;

        let entry = |name: &str, code: &str| {
            format!(".entry {name}(.param .u64 p)\n{{ griddepcontrol.wait; {code} ret; }}\n")
        };
        // A chain of registers, none of which holds a table in the end.
        let a_sum = |n: usize| {
            let mut code = "ld.global.nc.u32 %r1, [%rd0]; mov.f32 %f0, 0f00000000;".to_owned();
            (0..n).for_each(|i| _ = writeln!(code, "add.f32 %f{}, %f{i}, %g{i};", i + 1));
            entry("it", &format!("mov.u64 %rd0, __cudart_i2opi_f; {code}"))
        };
        let addresses = |n: usize| {
            let mut code = String::new();
            (0..n).for_each(|i| _ = writeln!(code, "add.s64 %rd{}, %rd{i}, 4;", i + 1));
            entry("it", &format!("mov.u64 %rd0, 7; {code} ld.global.nc.u32 %r1, [%rd{n}];"))
        };
        let calls = |n: usize| {
            let mut text = ".func last() { ld.global.nc.u32 %r1, [%rd0]; ret; }\n".to_owned();
            let mut code = String::new();
            for i in 0..n {
                let _ = writeln!(text, ".func f{i}() {{ call f{}; ret; }}", i + 1);
                let _ = writeln!(code, "call.uni f{i}, ();");
            }
            text + &entry("it", &code)
        };
        let entries = |n: usize| {
            let mut text = calls(n);
            (0..n).for_each(|i| text += &entry(&format!("e{i}"), "call f0, ();"));
            text
        };
        let texts: [(&str, &dyn Fn(usize) -> String); 4] = [
            ("a sum", &a_sum),
            ("addresses", &addresses),
            ("calls", &calls),
            ("entries", &entries),
        ];
        for (name, text) in texts {
            let steps = |n: usize| {
                STEPS.set(0);
                drop(Verdicts::of(&format!(".target sm_90\n{}", text(n))).check("it"));
                STEPS.get()
            };
            let (once, twice) = (steps(500), steps(1000));
            assert!(twice < 2 * once + once / 4, "{name}: {once}, {twice}");
        }
    }
}
