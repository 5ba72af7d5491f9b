//! Committed PTX is what its source says: every `.cu` of `kernels/`, of formulas and of the examples `server`, `encoder` and `decoder` has a `.ptx` beside it
//! that was built from exactly those bytes, loads on every driver from 525 on, and holds one kernel, named for the file (`math` holds functions
//! alone, `encoder` and `decoder` several kernels).
//!
//! Needs no GPU and no compiler. `python3 kernels/build.py --check` says more: it compiles afresh and compares.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;

use sha2::{Digest, Sha256};

use super::layering::root;

/// Where there are kernels.
const FOLDERS: [&str; 5] = [
    "kernels",
    "crates/gpu-await-algorithms/src/elementwise",
    "examples/server/src",
    "examples/encoder/src",
    "examples/decoder/src",
];
/// The newest PTX ISA that driver 525 (CUDA 12.0) loads.
const MAX_PTX_ISA: (u32, u32) = (8, 0);
/// The oldest architecture that must load the kernels: Pascal. The driver compiles them further for newer ones.
const TARGET: &str = "sm_60";
/// Kernels that use what older architectures do not have, with the oldest that has it.
const NEWER: &[(&str, &str)] = &[
    ("kernels/cluster_sum", "sm_90"),
    ("examples/encoder/src/encoder", "sm_80"),
    ("examples/decoder/src/decoder", "sm_80"),
];
/// Functions and no kernel.
const FUNCTIONS: [&str; 1] = ["crates/gpu-await-algorithms/src/elementwise/math"];
/// Several kernels.
const SEVERAL: [&str; 2] = ["examples/encoder/src/encoder", "examples/decoder/src/decoder"];
const REBUILD: &str = "run `python3 kernels/build.py` and commit the result";

#[test]
fn every_kernel_source_has_a_ptx() {
    let missing: Vec<_> = stems("cu").difference(&stems("ptx")).cloned().collect();
    assert!(missing.is_empty(), "kernels without a .ptx: {missing:?}; {REBUILD}");
}

#[test]
fn every_ptx_has_a_kernel_source() {
    let orphans: Vec<_> = stems("ptx").difference(&stems("cu")).cloned().collect();
    assert!(
        orphans.is_empty(),
        "these .ptx have no .cu beside them: {orphans:?}; remove them, or restore the source and {REBUILD}"
    );
}

/// What is loaded when a GPU is opened is machine code as well.
#[test]
fn every_binary_holds_its_kernel() {
    for kernel in ["copy_pieces", "copy_rows", "fill_bytes"] {
        for architecture in ["sm_70", "sm_80", "sm_90"] {
            let binary = read(&format!("kernels/{kernel}.{architecture}"), "cubin");
            let name = format!(".text.{kernel}\0");
            let found = binary.windows(name.len()).any(|part| part == name.as_bytes());
            assert!(found, "{kernel}.{architecture}.cubin has no {name}; {REBUILD}");
        }
    }
}

#[test]
fn every_ptx_was_built_from_the_source_beside_it() {
    fail_with(stems("cu").iter().filter_map(|stem| {
        let expected = format!("// source-sha256: {}", sha256_of_source(stem));
        let ptx = read_text(stem);
        let found = ptx.lines().next().unwrap_or_default();
        (found != expected).then(|| {
            format!("{stem}.ptx is not of the source beside it:\n    expected `{expected}`\n    found    `{found}`")
        })
    }));
}

#[test]
fn every_ptx_names_its_compiler() {
    fail_with(stems("ptx").iter().filter_map(|stem| {
        let ptx = read_text(stem);
        let found = ptx.lines().nth(1).unwrap_or_default();
        (!found.starts_with("// compiler: NVRTC ")).then(|| {
            format!("{stem}.ptx: expected `// compiler: NVRTC ...` in line 2, found `{found}`")
        })
    }));
}

#[test]
fn every_ptx_is_what_its_compiler_wrote() {
    fail_with(stems("ptx").iter().filter_map(|stem| {
        let ptx = read_text(stem);
        let (_, rest) = ptx.split_once("\n// ptx-sha256: ").unwrap_or_default();
        let (found, body) = rest.split_once('\n').unwrap_or_default();
        (found != sha256(body)).then(|| format!("{stem}.ptx was cut short, or changed by hand"))
    }));
}

#[test]
fn every_ptx_loads_on_drivers_from_525_on() {
    fail_with(stems("ptx").iter().filter_map(|stem| {
        let ptx = read_text(stem);
        let found = directive(&ptx, ".version");
        let isa = found.and_then(|version| version.split_once('.')).and_then(|(major, minor)| {
            Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
        });
        isa.is_none_or(|isa| isa > MAX_PTX_ISA).then(|| {
            let (major, minor) = MAX_PTX_ISA;
            format!("{stem}.ptx: expected `.version` {major}.{minor} at most, found {found:?}")
        })
    }));
}

#[test]
fn every_ptx_targets_pascal_or_says_what_it_needs() {
    fail_with(stems("ptx").iter().filter_map(|stem| {
        let newer = NEWER.iter().find(|(kernel, _)| kernel == stem).map(|(_, target)| *target);
        let target = newer.unwrap_or(TARGET);
        let ptx = read_text(stem);
        let found = directive(&ptx, ".target");
        (found != Some(target))
            .then(|| format!("{stem}.ptx: expected `.target {target}`, found {found:?}"))
    }));
}

#[test]
fn every_ptx_holds_one_kernel_named_for_its_file() {
    fail_with(stems("ptx").iter().filter_map(|stem| {
        let ptx = read_text(stem);
        let entries: Vec<&str> = ptx.lines().filter_map(entry_name).collect();
        let (_, name) = stem.rsplit_once('/').expect("a folder and a name");
        let expected = if FUNCTIONS.contains(&&**stem) { &[][..] } else { &[name][..] };
        let is_wrong = match SEVERAL.contains(&&**stem) {
            true => entries.is_empty(),
            false => entries != expected,
        };
        is_wrong.then(|| {
            format!("{stem}.ptx: expected these `.entry`: {expected:?}, found {entries:?}")
        })
    }));
}

/// The files of [`FOLDERS`] with this extension, as `kernels/axpy`. Some in each, so that no test passes vacuously.
fn stems(extension: &str) -> BTreeSet<String> {
    let stems_in = |folder: &str| {
        let path = root().join(folder);
        let entries = fs::read_dir(&path)
            .unwrap_or_else(|error| panic!("cannot list {}: {error}", path.display()));
        let stems: Vec<String> = entries
            .map(|entry| {
                entry.unwrap_or_else(|e| panic!("cannot list {}: {e}", path.display())).path()
            })
            .filter(|path| path.extension().is_some_and(|found| found == extension))
            .filter_map(|path| Some(format!("{folder}/{}", path.file_stem()?.to_string_lossy())))
            .collect();
        assert!(!stems.is_empty(), "no .{extension} file in {}; {REBUILD}", path.display());
        stems
    };
    FOLDERS.into_iter().flat_map(stems_in).collect()
}

fn read(stem: &str, extension: &str) -> Vec<u8> {
    let path = root().join(format!("{stem}.{extension}"));
    fs::read(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}; {REBUILD}", path.display()))
}

fn read_text(stem: &str) -> String {
    String::from_utf8(read(stem, "ptx"))
        .unwrap_or_else(|error| panic!("{stem}.ptx is not text: {error}; {REBUILD}"))
}

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Of a source; where it includes others, of the hashes of all and of which one includes which, as gpu-await-build has it.
fn sha256_of_source(stem: &str) -> String {
    let source = root().join(format!("{stem}.cu"));
    let (mut files, mut all, mut next) = (vec![source], String::new(), 0);
    while let Some(file) = files.get(next).cloned() {
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        all += &sha256(&text);
        for line in text.lines() {
            let Some(name) = line.strip_prefix("#include \"") else { continue };
            let header = file.with_file_name(name.trim_end_matches('"'));
            let header = header.canonicalize().unwrap_or(header);
            let at = files.iter().position(|known| *known == header);
            all += &format!("  {}", at.unwrap_or(files.len()));
            files.extend(at.is_none().then_some(header));
        }
        all += "\n";
        next += 1;
    }
    if files.len() == 1 { sha256(read(stem, "cu")) } else { sha256(all) }
}

/// The operand of a module directive such as `.version`.
fn directive<'a>(ptx: &'a str, name: &str) -> Option<&'a str> {
    ptx.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The kernel that this line of PTX declares.
fn entry_name(line: &str) -> Option<&str> {
    let code = line.split("//").next()?;
    let (_, after) = code.split_once(".entry ")?;
    after.split(|c: char| !(c.is_alphanumeric() || "_$%".contains(c))).find(|name| !name.is_empty())
}

fn fail_with(complaints: impl Iterator<Item = String>) {
    let complaints: Vec<String> = complaints.collect();
    assert!(complaints.is_empty(), "{}\n{REBUILD}", complaints.join("\n"));
}
