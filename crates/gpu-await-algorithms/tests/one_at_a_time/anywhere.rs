//! Every algorithm inside a host function, a submission lock, a twin and a waker, and on memory of another device.

use std::collections::BTreeSet;
use std::path::Path;

use gpu_await::{Device, DeviceKind, testing};

use crate::under_test::alone;
use crate::under_test::every_verb::every_verb;
use crate::under_test::foreign::Pair;
use crate::under_test::foreign_arrays::PROBES;
use crate::under_test::inside::{Inside, World};

/// As `every_public_method_inside_a_host_function` in `tests/streams/host_functions.rs`.
#[test]
fn every_algorithm_inside_a_host_function() {
    World::new(&alone::device()).unwrap().run(Inside::HostFn, every_verb).unwrap();
}

#[test]
fn every_algorithm_inside_enqueue() {
    World::new(&alone::device()).unwrap().run(Inside::Enqueue, every_verb).unwrap();
}

#[test]
fn no_algorithm_blocks_inside_a_twin() {
    // CUDA has no twins.
    World::new(&Device::host()).unwrap().run(Inside::Twin, every_verb).unwrap();
}

#[test]
fn no_algorithm_blocks_the_poller() {
    World::new(&alone::device()).unwrap().run(Inside::Waker, every_verb).unwrap();
}

#[test]
fn arrays_of_another_device_are_refused() {
    let (a, b, host) = (alone::device(), testing::peer_device(), Device::host());
    let mut pairs = vec![(&a, &b)];
    if a.kind() == DeviceKind::Cuda {
        pairs.extend([(&a, &host), (&host, &a)]);
    }
    let tried =
        pairs.iter().flat_map(|(ours, theirs)| Pair::new(ours, theirs).complaints_of(PROBES));
    let complaints: Vec<String> = tried.collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// A new verb is called in all of these places.
#[test]
fn every_algorithm_is_in_the_lists() {
    // Where this process runs: packed tests run on another machine than the one that built them.
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    let root = root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let source = |file: &str| std::fs::read_to_string(Path::new(&root).join(file)).unwrap();
    let methods = |file: &str| {
        let text = source(file);
        let body = text.split("pub trait ").nth(1).expect("a trait").split("\n}\n").next();
        let lines = body.expect("its end").lines();
        let names = lines.filter_map(|line| line.strip_prefix("    fn ")?.split(['<', '(']).next());
        names.filter(|name| *name != "call").map(str::to_owned).collect::<Vec<_>>()
    };
    let (verbs, preloads) = (methods("src/verbs.rs"), methods("src/preload.rs"));
    assert!(verbs.len() > 50 && preloads.len() > 5, "is the reader broken? {verbs:?} {preloads:?}");
    let owners = ["Stream", "Device", "Queue"];
    let of_all = verbs.iter().flat_map(|name| owners.map(|owner| format!("{owner}::{name}")));
    let of_devices = preloads.iter().map(|name| format!("Device::{name}"));
    let expected: BTreeSet<String> = of_all.chain(of_devices).collect();
    let world = World::new(&alone::device()).unwrap();
    let called: BTreeSet<String> =
        every_verb(&world).unwrap().names().into_iter().map(str::to_owned).collect();
    assert_eq!(called, expected);
    let probed: BTreeSet<&str> = PROBES.iter().flat_map(|probe| probe.calls).copied().collect();
    let not_probed: Vec<_> = verbs.iter().filter(|name| !probed.contains(name.as_str())).collect();
    assert!(not_probed.is_empty(), "{not_probed:?}");
}
