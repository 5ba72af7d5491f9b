//! The shape of `src`, held: imports run downhill, also from file to file, `unsafe` stays in a short
//! list of files, no two files have a type of one name, and no file grows past 500 lines without saying
//! why. The last holds for the other crates of the workspace as well, and so does that imports
//! have no circle; and the examples among them have no `unsafe` but for a kernel.
//!
//! The rooms, the crates, and the files that may hold `unsafe`, are read from the tables of `ARCHITECTURE.md`, so that it cannot be out
//! of date. Reads the sources, so a macro that pastes a
//! path together would escape it; nothing here does that.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const MOST_LINES: usize = 500;

#[test]
fn imports_run_downhill() {
    let (sources, rooms) = (Sources::read(), rooms());
    let mut complaints = Vec::new();
    let room = |file: &str| rooms.iter().position(|(_, files)| files.contains(file));
    for (from, to) in &sources.imports() {
        // A file without a room is the next test's.
        let (Some(here), Some(there)) = (room(from), room(to)) else { continue };
        if there > here {
            let (here, there) = (&rooms[here].0, &rooms[there].0);
            complaints.push(format!("src/{from}.rs ({here}) imports {to} ({there}): uphill"));
        }
    }
    fail_with(complaints);
}

/// A circle is a set of files each of which imports, perhaps by way of others, all of them. That a file
/// uses its own parts, by `self`, is no import.
#[test]
fn files_import_one_another_in_no_circle() {
    let mut complaints = Vec::new();
    for row in table("| folder | package | what it is |") {
        let folder = Path::new(row[0].trim_matches('`')).join("src");
        let imports = Sources::of(&folder).imports();
        let circles = in_circles(&imports);
        complaints.extend(
            circles.iter().map(|file| format!("{}/{file}.rs is in a circle", folder.display())),
        );
    }
    fail_with(complaints);
}

fn in_circles(imports: &BTreeSet<(String, String)>) -> BTreeSet<&str> {
    let imports: Vec<_> = imports.iter().map(|(from, to)| (&**from, &**to)).collect();
    let reaches_itself = |file: &&str| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![*file]);
        while let Some(here) = next.pop() {
            let targets = imports.iter().filter(|(from, _)| *from == here).map(|(_, to)| *to);
            next.extend(targets.filter(|to| reached.insert(*to)));
        }
        reached.contains(file)
    };
    let files: BTreeSet<&str> = imports.iter().map(|(from, _)| *from).collect();
    files.into_iter().filter(reaches_itself).collect()
}

#[test]
fn every_file_has_a_room_and_every_room_has_a_file() {
    let (sources, rooms) = (Sources::read(), rooms());
    let mut complaints = Vec::new();
    for file in sources.files.keys().filter(|file| *file != "lib") {
        match rooms.iter().filter(|(_, files)| files.contains(file)).count() {
            1 => {}
            n => complaints.push(format!("src/{file}.rs is in {n} rooms of ARCHITECTURE.md")),
        }
    }
    let named = rooms.iter().flat_map(|(_, files)| files);
    let gone = named.filter(|file| !sources.files.contains_key(*file));
    complaints
        .extend(gone.map(|file| format!("ARCHITECTURE.md names {file}.rs, which is no file")));
    fail_with(complaints);
}

#[test]
fn unsafe_code_stays_in_the_listed_files() {
    let sources = Sources::read();
    let table = table("| file | why |");
    let listed: BTreeSet<String> = table.iter().flat_map(|row| files_in(&row[0])).collect();
    let mut complaints = Vec::new();
    let macros = sources.unsafe_macros();
    for (file, text) in &sources.files {
        let tokens = tokens(text);
        let forbids = tokens.windows(3).any(|t| t == ["forbid", "(", "unsafe_code"]);
        let calls_unsafe = tokens.windows(2).any(|t| macros.contains(&t[0]) && t[1] == "!");
        let has_unsafe = calls_unsafe || tokens.iter().any(|token| token == "unsafe");
        // It cannot forbid it, because a file below it may not.
        let below = format!("{file}/");
        let is_parent = file == "lib" || listed.iter().any(|listed| listed.starts_with(&below));
        complaints.extend(match listed.contains(file) {
            true if forbids => {
                Some(format!("src/{file}.rs forbids unsafe code: remove it from ARCHITECTURE.md"))
            }
            true if !has_unsafe => Some(format!("src/{file}.rs has no `unsafe`: forbid it there")),
            false if has_unsafe && !forbids => {
                Some(format!("src/{file}.rs has `unsafe` and is not in ARCHITECTURE.md"))
            }
            false if !forbids && !is_parent => {
                Some(format!("src/{file}.rs does not say `#![forbid(unsafe_code)]`"))
            }
            _ => None,
        });
    }
    fail_with(complaints);
}

/// Foreign code that panics must not end a thread of the crate, nor the process: `native` starts the
/// threads, and `contain` catches panics where their payload does not go on to somebody.
#[test]
fn threads_and_panics_are_in_one_place() {
    let sources = Sources::read();
    let allowed = |file: &str, what: &str| match what {
        "catch_unwind" => ["thread/contain", "op/host_fn", "thread/worker"].contains(&file),
        _ => file == "thread/native",
    };
    let wanted: [(&str, &[&str]); 4] = [
        ("catch_unwind", &["catch_unwind"]),
        ("a thread", &["thread", "::", "Builder"]),
        ("a thread", &["thread", "::", "spawn"]),
        ("a thread of the executor's", &["spawn_blocking"]),
    ];
    let mut complaints = Vec::new();
    for (file, text) in &sources.files {
        let tokens = tokens(text);
        for (what, wanted) in wanted {
            let found = tokens.windows(wanted.len()).any(|tokens| tokens == wanted);
            if found && !allowed(file, what) {
                complaints.push(format!("src/{file}.rs: {what}; use `contain` or `native`"));
            }
        }
    }
    fail_with(complaints);
}

/// A yield on a busy core lasts as long as a neighbour's slice, and `crossbeam`'s receivers yield before they sleep.
#[test]
fn nobody_yields_where_it_could_sleep() {
    let wanted: [(&[&str], &[&str], &str); 2] = [
        (
            &["thread", "::", "yield_now"],
            &["thread/relax", "runtime/stream_state/poll"],
            "a yield; use `Relax`",
        ),
        (
            &["crossbeam_channel", "::"],
            &["thread/inbox", "thread/native"],
            "a channel; use `inbox`",
        ),
    ];
    let mut complaints = Vec::new();
    for (file, text) in &Sources::read().files {
        let tokens = tokens(text);
        for (wanted, allowed, what) in wanted {
            let found = tokens.windows(wanted.len()).any(|tokens| tokens == wanted);
            if found && !allowed.contains(&file.as_str()) {
                complaints.push(format!("src/{file}.rs: {what}"));
            }
        }
    }
    fail_with(complaints);
}

/// A subscriber is foreign code: a panic of it leaves no function of this crate.
#[test]
fn tracing_is_called_through_contain() {
    const MACROS: [&str; 7] = ["trace", "debug", "info", "warn", "error", "enabled", "debug_span"];
    /// Functions that `contain` calls: `refusal::send`, the tracer's `tell`.
    const CALLED_THERE: [&str; 2] = ["serve/refusal", "runtime/tracer"];
    /// From the name of the function of `contain` to the macro.
    const NEAR: usize = 60;
    let sources = Sources::read();
    let (mut complaints, mut found) = (Vec::new(), 0);
    for (file, text) in &sources.files {
        let tokens = tokens(text);
        for at in 0..tokens.len().saturating_sub(3) {
            let is_macro = tokens[at] == "tracing" && MACROS.contains(&tokens[at + 2].as_str());
            if !is_macro || tokens[at + 3] != "!" {
                continue;
            }
            found += 1;
            let before = &tokens[at.saturating_sub(NEAR)..at];
            let contained = before.iter().any(|token| ["contain", "log"].contains(&token.as_str()));
            if !contained && !CALLED_THERE.contains(&file.as_str()) {
                complaints.push(format!(
                    "src/{file}.rs: `tracing::{}!` outside of `contain`",
                    tokens[at + 2]
                ));
            }
        }
    }
    assert!(found > 10, "only {found} found: is the reader broken?");
    fail_with(complaints);
}

/// One name, one type: who reads `State` in an error or a backtrace would have to ask which. (`Sealed` is
/// the idiom's.)
#[test]
fn no_two_files_have_a_type_of_one_name() {
    let sources = Sources::read();
    let mut homes: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (file, text) in &sources.files {
        for pair in tokens(text).windows(2) {
            let declares = ["struct", "enum", "trait", "union"].contains(&pair[0].as_str());
            if declares && pair[1].starts_with(char::is_uppercase) && pair[1] != "Sealed" {
                homes.entry(pair[1].clone()).or_default().insert(file);
            }
        }
    }
    assert!(homes.len() > 200, "only {} types found: is the reader broken?", homes.len());
    let twice = homes.into_iter().filter(|(_, files)| files.len() > 1);
    fail_with(twice.map(|(name, files)| format!("`{name}` is in {files:?}")).collect());
}

#[test]
fn a_long_file_says_why() {
    let sources = Sources::read();
    let library = sources.files.into_iter().map(|(file, text)| (format!("src/{file}"), text));
    let complaints = library.chain(files_of_crates()).filter_map(|(file, text)| {
        let lines = text.lines().count();
        let header = text.lines().take_while(|line| line.starts_with("//!"));
        let says = header.into_iter().any(|line| line.contains("500 lines"));
        let wrong = lines > MOST_LINES && !says;
        wrong.then(|| {
            format!("{file}.rs has {lines} lines: split it, or say in `//!` why it has more than 500 lines")
        })
    });
    fail_with(complaints.collect());
}

#[test]
fn every_crate_is_in_the_table() {
    let path = root().join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let line = text.lines().find_map(|line| line.strip_prefix("default-members = "));
    let members = line.expect("members that plain commands take").split('"').skip(1).step_by(2);
    let members: Vec<_> = members.collect();
    let table = table("| folder | package | what it is |");
    let named: Vec<_> = table.iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(named, members, "ARCHITECTURE.md and the workspace of Cargo.toml");
    let all = text.lines().find_map(|line| line.strip_prefix("members = "));
    for member in all.expect("members").split('"').skip(1).step_by(2) {
        assert!(members.contains(&member), "`cargo test` leaves {member} out");
    }
}

/// They are copied: what they show is that a service needs none.
#[test]
fn examples_have_no_unsafe_code_but_for_a_kernel() {
    // The last is the parent of the others.
    const MAY: [&str; 3] =
        ["examples/server/src/embed_mean", "examples/server/src/drill", "examples/server/src/lib"];
    let examples = files_of_crates().into_iter().filter(|(file, _)| file.starts_with("examples/"));
    let complaints = examples.filter_map(|(file, text)| {
        // A `main.rs` forbids it for its crate, the others for themselves.
        let forbids = tokens(&text).windows(3).any(|t| t == ["forbid", "(", "unsafe_code"]);
        (forbids == MAY.contains(&file.as_str()))
            .then(|| format!("{file}.rs: forbid unsafe code there, or list the file here"))
    });
    fail_with(complaints.collect());
}

/// The sources of the workspace's other crates, by their names without `.rs`.
fn files_of_crates() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for row in table("| folder | package | what it is |") {
        let folder = row[0].trim_matches('`');
        if folder != "." {
            let prefix = format!("{folder}/src/");
            let before = files.len();
            collect(&root().join(&prefix), &prefix, &mut files);
            assert!(files.len() > before, "no file in {prefix}");
        }
    }
    files
}

/// Every file of `src`, by its name without `src/` and `.rs`.
struct Sources {
    files: BTreeMap<String, String>,
    /// What `lib.rs` re-exports, and from which file.
    exports: BTreeMap<String, String>,
}

impl Sources {
    fn read() -> Self {
        let sources = Sources::of(Path::new("src"));
        let found = sources.imports().len();
        assert!(found > 50, "only {found} imports found: is the reader broken?");
        sources
    }

    /// Those of another crate, by its folder.
    fn of(folder: &Path) -> Self {
        let folder = root().join(folder);
        let mut files = BTreeMap::new();
        collect(&folder, "", &mut files);
        let is_program = !files.contains_key("lib");
        if is_program && let Some(main) = files.remove("main") {
            files.insert("lib".to_owned(), main);
        }
        assert!(files.contains_key("lib"), "no lib.rs in {}", folder.display());
        let mut sources = Sources { files, exports: BTreeMap::new() };
        let exported = paths(&sources.files["lib"], true);
        for path in exported.iter().filter(|path| path.segments.len() > 1) {
            if let Some(file) = sources.file_of(&path.segments) {
                sources.exports.insert(path.segments[path.segments.len() - 1].clone(), file);
            }
        }
        sources
    }

    /// Which file mentions which, `lib` apart: by `use` or by a path in the code.
    fn imports(&self) -> BTreeSet<(String, String)> {
        let mut imports = BTreeSet::new();
        for (file, text) in self.files.iter().filter(|(file, _)| *file != "lib") {
            for path in paths(text, false) {
                let Some(absolute) = path.absolute(file) else { continue };
                match self.file_of(&absolute) {
                    Some(target) if target != *file => drop(imports.insert((file.clone(), target))),
                    _ => {}
                }
            }
        }
        imports
    }

    /// The macros whose expansion holds `unsafe`: a file that calls one holds it as well.
    fn unsafe_macros(&self) -> BTreeSet<String> {
        let mut macros = BTreeSet::new();
        for text in self.files.values() {
            let tokens = tokens(text);
            for (at, name) in tokens.windows(3).enumerate().filter(|(_, t)| t[0] == "macro_rules") {
                let mut depth = 0;
                let body = tokens[at + 3..].iter().take_while(|token| {
                    depth += i32::from(*token == "{") - i32::from(*token == "}");
                    depth > 0
                });
                if body.into_iter().any(|token| token == "unsafe") {
                    macros.insert(name[2].clone());
                }
            }
        }
        macros
    }

    /// The file that a path from the crate's root leads into.
    fn file_of(&self, segments: &[String]) -> Option<String> {
        let longest = (1..=segments.len()).rev().map(|len| segments[..len].join("/"));
        longest
            .into_iter()
            .find(|name| self.files.contains_key(name))
            .or_else(|| self.exports.get(segments.first()?).cloned())
    }
}

/// Where this process runs: packed tests run on another machine than the one that built them.
pub(super) fn root() -> PathBuf {
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    PathBuf::from(root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()))
}

pub(super) fn collect(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) {
    let entries = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("a folder's entry").path();
        let stem = path.file_stem().expect("a name").to_string_lossy();
        if path.is_dir() {
            collect(&path, &format!("{prefix}{stem}/"), files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
            files.insert(format!("{prefix}{stem}"), text);
        }
    }
}

/// The rooms of `ARCHITECTURE.md`, downhill first, each with its files.
fn rooms() -> Vec<(String, BTreeSet<String>)> {
    let rows = table("| room | files | what it is |");
    assert!(rows.len() > 10, "only {} rooms found: is the reader broken?", rows.len());
    rows.iter().map(|row| (row[0].clone(), files_in(&row[1]))).collect()
}

/// The cells of the table of `ARCHITECTURE.md` with that head.
pub(super) fn table(head: &str) -> Vec<Vec<String>> {
    let path = root().join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let rows = text.lines().skip_while(|line| *line != head).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|c| c.trim().to_owned()).collect();
    let rows: Vec<_> = rows.map(cells).collect();
    assert!(!rows.is_empty(), "ARCHITECTURE.md has no table {head}");
    rows
}

/// The files that a cell names, without `.rs`: `a.rs`, `b/{c,d}.rs`.
fn files_in(cell: &str) -> BTreeSet<String> {
    let names = cell.split('`').filter_map(|name| name.strip_suffix(".rs"));
    let expand = |name: &str| match name.split_once('{') {
        Some((folder, rest)) => {
            let names = rest.trim_end_matches('}').split(',');
            names.map(|name| format!("{folder}{name}")).collect()
        }
        None => vec![name.to_owned()],
    };
    names.flat_map(expand).collect()
}

/// A path as it stands in a file: `crate::a::b`, `super::c`.
struct Mention {
    /// `crate`, `super`, `self`, or nothing for a path of `lib.rs`.
    anchor: String,
    segments: Vec<String>,
    /// How many modules within its file surround it.
    depth: usize,
}

impl Mention {
    /// From the crate's root; `None` if it stays inside its file.
    fn absolute(&self, file: &str) -> Option<Vec<String>> {
        let here: Vec<String> = file.split('/').map(str::to_owned).collect();
        let ups = self.segments.iter().take_while(|segment| *segment == "super").count();
        let (base, ups) = match self.anchor.as_str() {
            "crate" => (Vec::new(), 0),
            "super" => (here, ups + 1),
            _ => (here, ups),
        };
        let leaving = ups.checked_sub(self.depth).filter(|ups| *ups > 0);
        let base = match (self.anchor.as_str(), leaving) {
            ("crate", _) => base,
            (_, None) => return None,
            (_, Some(ups)) => base[..base.len().checked_sub(ups)?].to_vec(),
        };
        let names = self.segments.iter().filter(|segment| *segment != "super").cloned();
        Some(base.into_iter().chain(names).collect())
    }
}

/// All paths of a file that begin with `crate`, `super` or `self`; of `lib.rs`, those of `pub use`.
fn paths(text: &str, of_lib: bool) -> Vec<Mention> {
    let tokens = tokens(text);
    let mut found = Vec::new();
    let mut modules: Vec<usize> = Vec::new();
    let mut braces = 0;
    for (index, token) in tokens.iter().enumerate() {
        let before = |back: usize| index.checked_sub(back).map_or("", |at| tokens[at].as_str());
        match token.as_str() {
            "{" => {
                braces += 1;
                if before(2) == "mod" {
                    modules.push(braces);
                }
            }
            "}" => {
                if modules.last() == Some(&braces) {
                    modules.pop();
                }
                braces -= 1;
            }
            // `$crate` is for the users of a macro.
            "crate" | "super" | "self"
                if !of_lib
                    && !["$", "::"].contains(&before(1))
                    && tokens.get(index + 1).is_some_and(|next| next == "::") =>
            {
                let mut leaves = Vec::new();
                leaves_of(&tokens, index + 2, false, &mut Vec::new(), &mut leaves);
                let mention =
                    |segments| Mention { anchor: token.clone(), segments, depth: modules.len() };
                found.extend(leaves.into_iter().map(mention));
            }
            "use" if of_lib && before(1) == "pub" => {
                let mut leaves = Vec::new();
                leaves_of(&tokens, index + 1, false, &mut Vec::new(), &mut leaves);
                let mention = |segments| Mention { anchor: String::new(), segments, depth: 0 };
                found.extend(leaves.into_iter().map(mention));
            }
            _ => {}
        }
    }
    found
}

/// Reads `a::{b, c::d}` from `at` on into its leaves; returns where it ends.
fn leaves_of(
    tokens: &[String],
    at: usize,
    in_group: bool,
    prefix: &mut Vec<String>,
    leaves: &mut Vec<Vec<String>>,
) -> usize {
    let depth = prefix.len();
    let mut at = at;
    loop {
        match tokens.get(at).map(String::as_str) {
            Some("{") => {
                while tokens.get(at).is_some_and(|token| token == "{" || token == ",") {
                    at = leaves_of(tokens, at + 1, true, prefix, leaves);
                }
                prefix.truncate(depth);
                return at + 1; // behind the `}`
            }
            Some(name) if name.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                prefix.push(name.to_owned());
                at += 1;
                if tokens.get(at).is_some_and(|token| token == "::") {
                    at += 1;
                    continue;
                }
            }
            _ => {} // `*`, or generics: what was read so far is the path
        }
        if !prefix.is_empty() {
            leaves.push(prefix.clone());
        }
        // An alias or a glob ends with the next separator of the group that it stands in.
        while in_group
            && tokens.get(at).is_some_and(|token| ![",", "}", ";"].contains(&token.as_str()))
        {
            at += 1;
        }
        prefix.truncate(depth);
        return at;
    }
}

/// Identifiers and punctuation, without comments, strings, characters and lifetimes.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        match rest {
            ['/', '/', ..] => at += rest.iter().take_while(|c| **c != '\n').count(),
            ['/', '*', ..] => {
                let end = rest.windows(2).skip(2).position(|two| two == ['*', '/']);
                at += end.map_or(rest.len(), |end| end + 4);
            }
            ['r', '"' | '#', ..] if rest.iter().skip(1).find(|c| **c != '#') == Some(&'"') => {
                let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
                let close: Vec<char> =
                    std::iter::once('"').chain("#".repeat(hashes).chars()).collect();
                let body = &rest[hashes + 2..];
                let end = body.windows(close.len()).position(|part| part == close);
                at += end.map_or(rest.len(), |end| hashes + 2 + end + close.len());
            }
            ['"', ..] => {
                let mut len = 1;
                while len < rest.len() && rest[len] != '"' {
                    len += if rest[len] == '\\' { 2 } else { 1 };
                }
                at += len + 1;
            }
            ['\'', '\\', _, ..] => {
                at += 3 + rest[3..].iter().take_while(|c| **c != '\'').count() + 1;
            }
            ['\'', _, '\'', ..] => at += 3,
            [c, ..] if word(*c) => {
                let len = rest.iter().take_while(|c| word(**c)).count();
                tokens.push(rest[..len].iter().collect());
                at += len;
            }
            [':', ':', ..] => {
                tokens.push("::".to_owned());
                at += 2;
            }
            [c, ..] => {
                if !c.is_whitespace() {
                    tokens.push(c.to_string());
                }
                at += 1;
            }
            [] => break,
        }
    }
    tokens
}

fn fail_with(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn the_reader_reads_what_rust_reads() {
    let text = r##"
        //! use crate::comment::A;
        use crate::{Grid, a::{b::C, d as e}, f::*};
        const TEXT: &str = "crate::string::B";
        /* crate::block::C */ const RAW: &str = r#"crate::raw::D "quoted" "#;
        fn f<'a>(c: char) -> crate::g::H<'a> { if c == '"' || c == '\'' { $crate::user::I } }
        mod inner { use super::Local; fn f() { super::super::sibling::f() } }
        use super::up::J;
    "##;
    let found: Vec<String> = paths(text, false)
        .iter()
        .filter_map(|path| Some(path.absolute("room/file")?.join("::")))
        .collect();
    assert_eq!(found, ["Grid", "a::b::C", "a::d", "f", "g::H", "room::sibling::f", "room::up::J"],);
}
