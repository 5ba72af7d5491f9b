//! What people get wrong with `kernel!` and the verbs: one mistake is one error, which says what to do.
//!
//! Each file in `mistakes/` is compiled by itself. Its first line says what the compiler's first error
//! begins with, or `compiles`; the second, where it is not empty, which line it points at.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest library of that name beside this test: `cargo test` has just made or checked it.
fn library(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("this test's own file");
    let folder = this.parent().expect("a folder");
    let is_library = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib")
    };
    let files = fs::read_dir(folder).expect("the folder").flatten().map(|entry| entry.path());
    let made = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    files.filter(is_library).max_by_key(made).unwrap_or_else(|| panic!("no library of {name}"))
}

/// What the compiler says.
fn compile(file: &Path) -> String {
    let library_of = |name: &str| format!("{name}={}", library(name).display());
    let folder = library("gpu_await");
    let folder = folder.parent().expect("a folder");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=lib", "--crate-name=mistake", "--cap-lints=allow"])
        .args(["--color=never", "--emit=metadata", "-o"])
        .arg(std::env::temp_dir().join(format!("mistake-{}.rmeta", std::process::id())))
        .arg("-L")
        .arg(format!("dependency={}", folder.display()))
        .args(["--extern", &library_of("gpu_await"), "--extern", &library_of("bytemuck")])
        .arg(file)
        .output()
        .expect("the compiler runs");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What is wrong with what the compiler says of a file.
fn complaint(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).expect("a mistake");
    let mut lines = text.lines().map(|line| line.trim_start_matches("//").trim());
    let (expected, at) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let said = compile(file);
    let is_error = |line: &&str| line.starts_with("error") && !line.starts_with("error: aborting");
    let errors: Vec<&str> = said.lines().filter(is_error).collect();
    let good = match (&errors[..], expected) {
        ([], "compiles") => true,
        ([error], _) => {
            let place = said.lines().find_map(|line| line.trim().strip_prefix("--> "));
            let line = place.and_then(|place| place.rsplit(':').nth(1)?.parse::<usize>().ok());
            let pointed_at = line.and_then(|line| text.lines().nth(line - 1)).unwrap_or("");
            error.starts_with(expected) && pointed_at.contains(at)
        }
        _ => false,
    };
    let name = file.display();
    (!good)
        .then(|| format!("{name}: expected `{expected}` at `{at}`, and the compiler said\n{said}"))
}

#[test]
fn mistakes_have_one_error() {
    if std::env::var("GPU_AWAIT_TEST_DEVICE").is_ok_and(|name| name.starts_with("cuda")) {
        eprintln!("nothing to test: what the compiler says is the same for every device");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mistakes");
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("the mistakes").flatten().map(|entry| entry.path()).collect();
    files.sort();
    assert!(files.len() > 40, "{} mistakes", files.len());
    let complaints: Vec<_> = files.iter().filter_map(|file| complaint(file)).collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}
