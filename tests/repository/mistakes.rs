//! What people get wrong with `kernel!` and the verbs: one mistake is one error, which says what to do.
//!
//! Each file in `mistakes/` is compiled by itself. Its first line says what the compiler's first error
//! begins with, or `compiles`; the second, where it is not empty, which line it points at; the third, where there is one, what a
//! note says.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The libraries of that name beside this test, the newest first: `cargo test` has just made or checked one.
fn libraries(name: &str) -> Vec<PathBuf> {
    let this = std::env::current_exe().expect("this test's own file");
    let folder = this.parent().expect("a folder");
    let is_library = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib")
    };
    let files = fs::read_dir(folder).expect("the folder").flatten().map(|entry| entry.path());
    let made = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    let mut found: Vec<_> = files.filter(is_library).collect();
    found.sort_by_key(|path| std::cmp::Reverse(made(path)));
    assert!(!found.is_empty(), "no library of {name}");
    found
}

/// This crate, and the other libraries that mistakes use, of those that were made with it: others of its features may be there as well.
struct Made {
    this: PathBuf,
    others: Vec<(&'static str, PathBuf)>,
}

/// The newest of this crate that has all others.
fn made() -> &'static Made {
    const SAME: [(&str, &str); 2] = [
        (
            "bytemuck",
            "pub fn theirs<T: gpu_await::bytemuck::Pod>() {}\n\
             pub fn ours<T: bytemuck::Pod>() { theirs::<T>() }\n",
        ),
        (
            "gpu_await_algorithms",
            "pub fn theirs<T: gpu_await_algorithms::Algorithms>() {}\n\
             pub fn ours() { theirs::<gpu_await::Stream>() }\n",
        ),
    ];
    static FOUND: OnceLock<Made> = OnceLock::new();
    FOUND.get_or_init(|| {
        let whole = libraries("gpu_await").into_iter().find_map(|this| {
            let others = SAME.map(|(name, same)| Some((name, matching(&this, name, same)?)));
            let others = others.into_iter().collect::<Option<_>>()?;
            Some(Made { this, others })
        });
        whole.expect("a library of this crate with its others")
    })
}

/// The newest library with which a text compiles.
fn matching(this: &Path, name: &'static str, same: &str) -> Option<PathBuf> {
    let probe = std::env::temp_dir().join(format!("{name}-{}.rs", std::process::id()));
    fs::write(&probe, same).expect("a file");
    let mut all = libraries(name).into_iter();
    let found = all.find(|library| compile(this, &probe, &[(name, library.clone())]).is_empty());
    fs::remove_file(probe).expect("it is there");
    found
}

/// What the compiler says.
fn compile(this: &Path, file: &Path, others: &[(&str, PathBuf)]) -> String {
    let folder = this.parent().expect("a folder");
    let is = |name: &str, library: &Path| format!("{name}={}", library.display());
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let stem = file.file_stem().expect("a name").display();
    let made = std::env::temp_dir().join(format!("{stem}-{}.rmeta", std::process::id()));
    let output = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=lib", "--crate-name=mistake", "--cap-lints=allow"])
        .args(["--color=never", "--emit=metadata", "-o"])
        .arg(&made)
        .arg("-L")
        .arg(format!("dependency={}", folder.display()))
        .args(["--extern", &is("gpu_await", this)])
        .args(others.iter().flat_map(|(name, path)| ["--extern".to_owned(), is(name, path)]))
        .arg(file)
        .output()
        .expect("the compiler runs");
    // There is one where it compiles.
    fs::remove_file(made).ok();
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What is wrong with what the compiler says of a file.
fn complaint(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).expect("a mistake");
    let mut lines = text.lines().map(|line| line.strip_prefix("//").unwrap_or("").trim());
    let mut header = || lines.next().unwrap_or("");
    let (expected, at, note) = (header(), header(), header());
    let Made { this, others } = made();
    let said = compile(this, file, others);
    let is_error = |line: &&str| line.starts_with("error") && !line.starts_with("error: aborting");
    let errors: Vec<&str> = said.lines().filter(is_error).collect();
    let good = match (&errors[..], expected) {
        ([], "compiles") => true,
        ([error], _) => {
            let place = said.lines().find_map(|line| line.trim().strip_prefix("--> "));
            let line = place.and_then(|place| place.rsplit(':').nth(1)?.parse::<usize>().ok());
            let pointed_at = line.and_then(|line| text.lines().nth(line - 1)).unwrap_or("");
            error.starts_with(expected) && pointed_at.contains(at) && said.contains(note)
        }
        _ => false,
    };
    let name = file.display();
    (!good).then(|| {
        format!(
            "{name}: expected `{expected}` at `{at}` with `{note}`, and the compiler said\n{said}"
        )
    })
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
    // A compiler uses one core.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let complaints: Vec<_> = std::thread::scope(|scope| {
        let of = |files: &[PathBuf]| files.iter().filter_map(|file| complaint(file)).collect();
        let parts = files.chunks(files.len().div_ceil(cores));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || of(part))).collect();
        let ended = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        ended.flat_map(|complaints: Vec<String>| complaints).collect()
    });
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}
