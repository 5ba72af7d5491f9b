//! What a user takes in with this crate: each package under a licence that both of ours allow, and none twice.
//! Asks `cargo metadata`, so it runs where cargo is. Advisories are not asked for: their list is not on crates.io.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Licences that ask for no more than to be named, as ours do.
const LICENCES: &[&str] =
    &["MIT", "Apache-2.0", "BSD-2-Clause", "ISC", "Unicode-3.0", "Unlicense", "Zlib"];

/// In two versions, and for whom: macros run in the compiler alone.
const TWICE: &[(&str, &str)] = &[("syn", "derive macros of packages of other years")];

/// The packages that a user builds: this one's with all features, and theirs, without what tests take.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--locked", "--offline", "--all-features", "--format-version=1"];
    let output = Command::new(cargo)
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let resolve = &metadata["resolve"];
    let nodes = resolve["nodes"].as_array().expect("a graph");
    let mut next = vec![resolve["root"].as_str().expect("a root")];
    let mut reached = BTreeSet::new();
    while let Some(package) = next.pop() {
        if !reached.insert(package) {
            continue;
        }
        let node = nodes.iter().find(|node| node["id"] == package).expect("a node");
        for dependency in node["deps"].as_array().expect("a list") {
            let kinds = dependency["dep_kinds"].as_array().expect("a list");
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                next.push(dependency["pkg"].as_str().expect("a name"));
            }
        }
    }
    let all = metadata["packages"].as_array().expect("a list");
    let is_reached = |package: &&Value| reached.contains(package["id"].as_str().unwrap_or(""));
    all.iter().filter(is_reached).cloned().collect()
}

fn text<'p>(package: &'p Value, field: &str) -> &'p str {
    package[field].as_str().unwrap_or("none")
}

/// Whether one of the licences to choose from asks for nothing else: `A OR B`, `(A OR B) AND C`.
fn is_allowed(licence: &str) -> bool {
    let known = |name: &str| LICENCES.contains(&name.trim_matches(['(', ')', ' ']));
    let choices = |part: &str| part.split(" OR ").any(known);
    licence.split(" AND ").all(choices)
}

#[test]
fn every_licence_asks_for_no_more_than_ours() {
    let packages = packages();
    assert!(packages.len() > 30, "only {} packages: is the reader broken?", packages.len());
    let refused: Vec<_> = packages
        .iter()
        .filter(|package| !is_allowed(text(package, "license")))
        .map(|package| format!("{}: {}", text(package, "name"), text(package, "license")))
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn no_package_comes_in_two_versions() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages() {
        let version = text(&package, "version").to_owned();
        versions.entry(text(&package, "name").to_owned()).or_default().insert(version);
    }
    let known = |name: &str| TWICE.iter().any(|(twice, _)| *twice == name);
    let twice: Vec<_> = versions.iter().filter(|(name, v)| v.len() > 1 && !known(name)).collect();
    assert!(twice.is_empty(), "in two versions: {twice:?}");
    let gone: Vec<_> = TWICE.iter().filter(|(name, _)| versions[*name].len() == 1).collect();
    assert!(gone.is_empty(), "in one version by now: {gone:?}");
}

#[test]
fn licences_are_read_as_they_are_written() {
    assert!(is_allowed("MIT OR GPL-3.0"));
    assert!(is_allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
    assert!(!is_allowed("GPL-3.0"));
    assert!(!is_allowed("MIT AND GPL-3.0"));
    assert!(!is_allowed("none"));
}
