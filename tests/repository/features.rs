//! `tests/features.md` is whole and true: every row is there once, and everything that it names
//! exists. So does what `RELIABILITY.md` names, and each test that the `//!` of a source file names beside an invariant.
//!
//! | an entry | names |
//! |---|---|
//! | `` `tests/a.rs::b` ``, `` `examples/a/tests/b.rs::c` `` | a test function `b`, `c` in that file |
//! | `` `examples/01_a` ``, `` `examples/a` ``, `` `benches/a` ``, `` `crates/a/examples/b` `` | an example, one with a crate of its own, or a bench |
//! | `` `src/a.rs` says "…" `` | a sentence in the documentation of that file |
//! | `*later*: …` | nothing yet, and what it waits for |
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use super::layering::{collect, root, table};

/// The rows of each group.
const ROWS: [(&str, RangeInclusive<usize>); 8] = [
    ("000", 1..=23),
    ("001", 1..=20),
    ("002", 1..=20),
    ("003", 1..=31),
    ("004", 1..=70),
    ("P", 101..=107),
    ("P", 111..=111),
    ("W", 1..=17),
];

struct Row {
    id: String,
    devices: String,
    shown_by: String,
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(root().join(file)).ok()
}

fn rows() -> Vec<Row> {
    let text = read("tests/features.md").expect("tests/features.md is there");
    let cells = |line: &str| -> Option<Row> {
        let cells: Vec<_> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [id, _what, devices, shown_by] = cells[..] else { return None };
        let group = id.split_once('-')?.0;
        ROWS.iter().any(|(known, _)| *known == group).then(|| Row {
            id: id.to_owned(),
            devices: devices.to_owned(),
            shown_by: shown_by.to_owned(),
        })
    };
    text.lines().filter_map(cells).collect()
}

/// What stands between backticks.
fn names(shown_by: &str) -> impl Iterator<Item = &str> {
    shown_by.split('`').skip(1).step_by(2)
}

/// Whether the text defines a test of that name, by itself or as a line of a table of tests.
fn defines(text: &str, name: &str) -> bool {
    if !text.contains(name) {
        return false;
    }
    let (function, entry) = (format!("fn {name}("), format!("{name}: "));
    let lines: Vec<_> = text.lines().map(str::trim_start).collect();
    lines.iter().enumerate().any(|(index, line)| {
        let attributes = &lines[index.saturating_sub(2)..index];
        let is_test = attributes.iter().any(|line| line.starts_with("#[") && line.contains("test"));
        (line.contains(&function) && is_test) || line.starts_with(&entry)
    })
}

/// What is wrong with one name; `None` if it exists.
fn complaint(name: &str, row: &Row) -> Option<String> {
    let folder = Path::new(name).components().next()?.as_os_str().to_str()?;
    match (folder, name.split_once("::")) {
        ("tests" | "examples" | "crates", Some((file, test))) => match read(file) {
            None => Some(format!("{name}: no such file")),
            Some(text) if defines(&text, test) => None,
            Some(_) => Some(format!("{name}: no such test")),
        },
        ("examples" | "benches" | "crates", None) => {
            let of_it = [format!("{name}.rs"), format!("{name}/Cargo.toml")];
            let exists = of_it.iter().any(|file| read(file).is_some());
            (!exists).then(|| format!("{name}: no such file"))
        }
        ("src", None) => {
            let quoted = row.shown_by.split_once(&format!("`{name}` says \""));
            let Some((said, _)) = quoted.and_then(|(_, said)| said.split_once('"')) else {
                return Some(format!("{name}: what does it say?"));
            };
            // As it is shown, without the ends of lines.
            let text = read(name).unwrap_or_default().replace("\n", " ");
            let text = text.replace("///", " ").replace("//!", " ");
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            (!text.contains(said)).then(|| format!("{name} does not say \"{said}\""))
        }
        _ => Some(format!("{name} is not an entry that this test knows")),
    }
}

fn fail_with(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "tests/features.md:\n{}", complaints.join("\n"));
}

#[test]
fn every_row_is_there_once() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for row in rows() {
        *found.entry(row.id).or_default() += 1;
    }
    let mut complaints = Vec::new();
    for (group, numbers) in ROWS {
        for number in numbers {
            let id = format!("{group}-{number:02}");
            match found.remove(&id) {
                Some(1) => {}
                times => complaints.push(format!("{id} is there {} times", times.unwrap_or(0))),
            }
        }
    }
    complaints.extend(found.keys().map(|id| format!("{id} is no row")));
    fail_with(complaints);
}

#[test]
fn everything_that_a_row_names_exists() {
    let mut complaints = Vec::new();
    let mut checked = 0;
    for row in rows() {
        let later = row.shown_by.starts_with("*later*: ");
        let mut named = 0;
        for name in names(&row.shown_by) {
            named += 1;
            complaints.extend(complaint(name, &row).map(|what| format!("{}: {what}", row.id)));
        }
        checked += named;
        if later != (named == 0) {
            complaints.push(format!("{}: say what shows it, or `*later*: ` and why", row.id));
        }
        let documentation = row.devices == "–";
        if documentation && !later && !row.shown_by.contains(" says \"") {
            complaints.push(format!("{}: documentation is a sentence of a file in src", row.id));
        }
        if row.devices.is_empty() {
            complaints.push(format!("{}: on which devices?", row.id));
        }
    }
    assert!(checked > 100, "only {checked} names found: is the reader broken?");
    fail_with(complaints);
}

#[test]
fn everything_that_a_promise_names_exists() {
    let text = read("RELIABILITY.md").expect("RELIABILITY.md is there");
    let promises = text.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    let mut complaints = Vec::new();
    let mut checked = 0;
    for name in names(&text).filter(|name| name.contains("::") || name.starts_with("examples/")) {
        if !["tests/", "examples/", "crates/"].iter().any(|folder| name.starts_with(folder)) {
            continue;
        }
        let row = Row { id: String::new(), devices: String::new(), shown_by: String::new() };
        complaints.extend(complaint(name, &row));
        checked += 1;
    }
    for promise in promises {
        let held_by = promise.trim().trim_matches('|').rsplit('|').next().unwrap_or_default();
        if names(held_by).count() == 0 {
            complaints.push(format!("nothing holds: {promise}"));
        }
    }
    assert!(checked > 30, "only {checked} names found: is the reader broken?");
    assert!(complaints.is_empty(), "RELIABILITY.md:\n{}", complaints.join("\n"));
}

/// The tests that a `//!` names: what stands in parentheses and is nothing but names between backticks.
fn tests_of_invariants(text: &str) -> Vec<String> {
    let header = text.lines().take_while(|line| line.starts_with("//!"));
    let header: Vec<_> = header.map(|line| line.trim_start_matches("//!").trim()).collect();
    let header = header.join(" ");
    let groups = header.split('(').skip(1).filter_map(|group| Some(group.split_once(')')?.0));
    let all_names = |group: &&str| {
        let between = group.split('`').step_by(2);
        let is_name = |name: &str| {
            name.matches('_').count() > 1
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        group.starts_with('`')
            && between.into_iter().all(|rest| ["", ", ", " and "].contains(&rest))
            && names(group).all(is_name)
    };
    let groups = groups.filter(all_names);
    groups.flat_map(|group| names(group).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn every_test_that_an_invariant_names_exists() {
    let (mut sources, mut tests) = (BTreeMap::new(), BTreeMap::new());
    for row in table("| folder | package | what it is |") {
        let of_crate = row[0].trim_matches('`');
        for (folder, files) in [("src", &mut sources), ("tests", &mut tests)] {
            let folder = format!("{of_crate}/{folder}");
            if root().join(&folder).is_dir() {
                collect(&root().join(&folder), &format!("{folder}/"), files);
            }
        }
    }
    let mut checked = 0;
    let mut complaints = Vec::new();
    for (file, text) in &sources {
        for name in tests_of_invariants(text) {
            checked += 1;
            if !tests.iter().chain(&sources).any(|(_, text)| defines(text, &name)) {
                complaints.push(format!("{file}.rs names the test `{name}`, which is nowhere"));
            }
        }
    }
    assert!(checked > 60, "only {checked} names found: is the reader broken?");
    fail_with(complaints);
}
