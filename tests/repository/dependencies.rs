//! What a user takes in with this crate: each package under a licence that both of ours allow, and none twice. What is
//! taken in with a copy of an example: each under a licence that allows it. What only tests need is not asked for.
//! Asks `cargo metadata`, so it runs where cargo is. Advisories are not asked for: their list is not on crates.io.
//!
//! Building the tests has downloaded the packages of this platform and no others, so only these are looked at. With
//! `GPU_AWAIT_TEST_ALL_PLATFORMS` set, packages of all platforms are, which `cargo fetch` downloads.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Licences that ask for no more than to be named, as ours do.
const LICENCES: &[&str] =
    &["MIT", "Apache-2.0", "BSD-2-Clause", "ISC", "Unicode-3.0", "Unlicense", "Zlib"];

/// And of what the examples take in: not to advertise with the authors' names.
const OF_EXAMPLES: &[&str] = &["BSD-3-Clause"];

/// In two versions, and for whom: macros run in the compiler alone.
const TWICE: &[(&str, &str)] = &[("syn", "derive macros of packages of other years")];

/// The packages that a user of the library builds: this one's with all features, and theirs, without what tests take.
fn packages() -> Vec<Value> {
    packages_of(&metadata(), |name| name == "gpu-await")
}

/// Of the workspace, with all features.
fn metadata() -> Value {
    let mut arguments =
        vec!["metadata", "--locked", "--offline", "--all-features", "--format-version=1"];
    let version = cargo(&["--version", "--verbose"]);
    if std::env::var_os("GPU_AWAIT_TEST_ALL_PLATFORMS").is_none() {
        let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
        arguments.push("--filter-platform");
        arguments.push(host);
    }
    serde_json::from_str(&cargo(&arguments)).expect("JSON")
}

/// What cargo prints.
fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// What the members of the workspace with such a name build, tests apart.
fn packages_of(metadata: &Value, is_root: impl Fn(&str) -> bool) -> Vec<Value> {
    let nodes = metadata["resolve"]["nodes"].as_array().expect("a graph");
    let all = metadata["packages"].as_array().expect("a list");
    let members = metadata["workspace_members"].as_array().expect("a list");
    let roots = all.iter().filter(|package| {
        members.contains(&package["id"]) && is_root(package["name"].as_str().expect("a name"))
    });
    let mut next: Vec<_> = roots.map(|root| root["id"].as_str().expect("an id")).collect();
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
    let is_reached = |package: &&Value| reached.contains(package["id"].as_str().unwrap_or(""));
    all.iter().filter(is_reached).cloned().collect()
}

fn text<'p>(package: &'p Value, field: &str) -> &'p str {
    package[field].as_str().unwrap_or("none")
}

/// Whether one of the licences to choose from asks for nothing else: `A OR B`, `A/B`, `(A OR B) AND C`.
fn is_allowed(licence: &str, also: &[&str]) -> bool {
    let known = |name: &str| {
        let name = name.trim_matches(['(', ')', ' ']);
        LICENCES.contains(&name) || also.contains(&name)
    };
    let choices = |part: &str| part.split(" OR ").flat_map(|part| part.split('/')).any(known);
    licence.split(" AND ").all(choices)
}

/// Those whose licence asks for more.
fn refused(packages: &[Value], also: &[&str]) -> Vec<String> {
    let refused = packages.iter().filter(|package| !is_allowed(text(package, "license"), also));
    let said = |package: &Value| format!("{}: {}", text(package, "name"), text(package, "license"));
    refused.map(said).collect()
}

#[test]
fn every_licence_asks_for_no_more_than_ours() {
    let packages = packages();
    assert!(packages.len() > 30, "only {} packages: is the reader broken?", packages.len());
    assert_eq!(refused(&packages, &[]), [""; 0]);
}

#[test]
fn an_example_may_be_copied_with_all_that_it_needs() {
    let packages = packages_of(&metadata(), |name| name.starts_with("gpu-await-example-"));
    assert!(packages.len() > 100, "only {} packages: is the reader broken?", packages.len());
    assert_eq!(refused(&packages, OF_EXAMPLES), [""; 0]);
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
    assert!(is_allowed("MIT OR GPL-3.0", &[]));
    assert!(is_allowed("MIT/GPL-3.0", &[]));
    assert!(is_allowed("(MIT OR Apache-2.0) AND Unicode-3.0", &[]));
    assert!(is_allowed("MIT AND BSD-3-Clause", OF_EXAMPLES));
    assert!(!is_allowed("MIT AND BSD-3-Clause", &[]));
    assert!(!is_allowed("GPL-3.0", &[]));
    assert!(!is_allowed("MIT AND GPL-3.0", &[]));
    assert!(!is_allowed("none", &[]));
}
