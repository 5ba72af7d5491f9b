//! Handles of another device: each public call that takes one works as documented, or is a typed error
//! before any driver call. `driver_calls/peers.rs` shows the same on two GPUs of the stand-in driver.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use gpu_await::{Device, DeviceKind, ErrorDetail, kernels, testing};

use crate::under_test::foreign;
use crate::under_test::foreign::Pair;

fn no_complaints(pairs: &[(&Device, &Device)]) {
    let complaints = pairs.iter().flat_map(|(ours, theirs)| Pair::new(ours, theirs).complaints());
    let complaints: Vec<String> = complaints.collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn handles_of_another_device_are_refused() {
    let (a, b) = (testing::device(), testing::peer_device());
    no_complaints(&[(&a, &b)]);
    if a.kind() == DeviceKind::Cuda {
        let host = Device::host();
        no_complaints(&[(&a, &host), (&host, &a)]);
    }
}

#[test]
fn a_flag_of_another_device_is_refused() {
    let (device, other) = (testing::device(), testing::peer_device());
    let stream = device.stream().unwrap();
    let gate = kernels::gate::load_blocking(&device).unwrap();
    let flag = other.pinned_flag().unwrap();
    flag.set(1);
    let error = gate.launch(&stream, &flag, 1000).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { what: "the flag", .. }), "{error}");
    assert_eq!(stream.submitted(), 0);
    let own = device.pinned_flag().unwrap();
    own.set(1);
    gate.launch(&stream, &own, 1000).synchronize().unwrap();
}

/// What a device makes, as it stands among a function's parameters.
const HANDLES: &[&str] = &[
    "Stream",
    "Device",
    "Event",
    "Op",
    "Kernel",
    "Module",
    "PinnedBuffer",
    "PinnedFlag",
    "Source",
    "Readable",
    "Writable",
    "Marks",
    "Args",
    "LaunchOn",
    "DeviceBuffer",
    "Frozen",
    "View",
];

/// Functions that take a handle and are not tried, with the reason.
const NOT_TRIED: &[(&str, &str)] = &[
    (
        "from_raw",
        "unsafe: the caller vouches for the handle; `driver_calls/shared.rs` has its check",
    ),
    ("from_argument", "likewise, through it; `dlpack.rs` has what it reads"),
    (
        "unsplit",
        "puts nothing on a stream; memory of another buffer comes back: `tests/memory/parts.rs`",
    ),
    ("release_to_cudarc", "`driver_calls/cudarc.rs` has its check"),
    ("load", "makes a module or a kernel for that device"),
    ("load_blocking", "likewise"),
    ("compile", "likewise"),
    ("host", "makes a kernel for that device"),
    ("close", "makes a gate on that stream"),
    ("close_for", "likewise"),
    ("gate", "a declaration: tried as `launch`"),
    ("find", "of `src/sibling.rs`, which is no public interface"),
    ("of", "likewise"),
    ("load_ahead", "likewise"),
    ("import", "likewise"),
    ("digest", "likewise"),
    ("one", "likewise"),
    ("on", "a question: `streams/partitions.rs` has its check"),
    ("high_priority_streams", "makes streams of that device, as `streams`"),
    ("graph_across", "makes a graph of all these devices: `graphs/across.rs` has its checks"),
    ("adopt_registered", "for this workspace's crates, and no public interface"),
];

/// A new public function that takes what a device made is tried with another device's as well.
#[test]
fn every_call_with_a_handle_is_probed() {
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    let root = PathBuf::from(root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()));
    let mut found = BTreeMap::new();
    collect(&root.join("src"), &mut found);
    assert!(found.len() > 30, "only {} functions found: is the reader broken?", found.len());
    let probed: BTreeSet<&str> =
        foreign::PROBES.iter().flat_map(|probe| probe.calls).copied().collect();
    let known = |name: &str| {
        probed.contains(name) || NOT_TRIED.iter().any(|(not_tried, _)| *not_tried == name)
    };
    let new: Vec<_> = found.iter().filter(|(name, _)| !known(name)).collect();
    assert!(new.is_empty(), "neither in PROBES nor in NOT_TRIED: {new:#?}");
    let gone: Vec<_> = NOT_TRIED.iter().filter(|(name, _)| !found.contains_key(*name)).collect();
    assert!(gone.is_empty(), "no such function any more: {gone:?}");
}

/// Public functions with a handle among their parameters, each with a file that has it.
fn collect(folder: &Path, found: &mut BTreeMap<String, String>) {
    let entries = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("a folder's entry").path();
        if path.is_dir() {
            collect(&path, found);
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source");
        let code: Vec<&str> =
            text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
        let code = code.join("\n");
        for public in code.split("pub ").skip(1) {
            let item = ["async fn ", "unsafe fn ", "async unsafe fn ", "fn "];
            let Some(rest) = item.iter().find_map(|item| public.strip_prefix(item)) else {
                continue;
            };
            let name: String =
                rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            // Up to the body: generic bounds, parameters, what it returns.
            let signature = rest.split(['{', ';']).next().unwrap_or("");
            let parameters = signature.rsplit_once("->").map_or(signature, |(before, _)| before);
            let words = parameters.split(|c: char| !c.is_alphanumeric() && c != '_');
            if words.into_iter().skip(1).any(|word| HANDLES.contains(&word)) {
                found.insert(name, path.display().to_string());
            }
        }
    }
}
