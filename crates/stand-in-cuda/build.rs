//! Gives the driver and its client one mark, made of the sources of both.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

fn main() {
    println!("cargo::rerun-if-changed=src");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        // It looks for none of its own functions by name, so that `install_without` can take names away.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    }
    let mut sources = BTreeMap::new();
    for entry in fs::read_dir("src").expect("the folder src") {
        let entry = entry.expect("an entry of src");
        let text = fs::read(entry.path()).expect("a source file");
        sources.insert(entry.file_name(), text);
    }
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    println!("cargo::rustc-env=STAND_IN_SOURCES={:016x}", hasher.finish());
}
