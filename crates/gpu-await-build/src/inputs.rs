//! The files that a PTX is made from: the source, and what it includes from the package. NVIDIA's own headers belong to the compiler.
//!
//! The text is read as the preprocessor reads it where a directive can be spelled in other ways (spliced lines, comments, digraphs), and more
//! generously everywhere else: an `#include` counts in a comment or a branch that is not compiled, and so does each file of that name in any
//! searched folder. A superfluous file makes a PTX stale too early, never too late. Not followed: names from macros, `__has_include`, and
//! option files (`--options-file`).
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::{env, fs};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

pub(crate) struct Inputs {
    /// The source comes first. Their folders are canonical, so that a file has one path however it is reached.
    pub(crate) files: Vec<PathBuf>,
    /// Folders where a file would be found earlier than the one that was found.
    pub(crate) watched: Vec<PathBuf>,
    /// SHA-256 of the source; with other files, of all digests and of which file includes which. It does not change if the package moves.
    /// Line ends count as Unix ones, since Git may change them.
    pub(crate) digest: String,
}

impl Inputs {
    pub(crate) fn read(source: &Path, folders: &[PathBuf], forced: &[String]) -> Result<Inputs> {
        let (mut files, mut watched) = (vec![canonical(source)], Vec::new());
        // As `sha256sum` prints them, with the indices of each file's includes in place of a name.
        let (mut alone, mut all) = (String::new(), String::new());
        let mut next = 0;
        while let Some(file) = files.get(next).cloned() {
            let name = if next == 0 { source } else { &file };
            let text = fs::read_to_string(name).map_err(|error| Error::file(name, error))?;
            let text = text.replace("\r\n", "\n");
            let own = sha256(&text);
            all += &own;
            let forced = forced.iter().filter(|_| next == 0);
            let forced = forced.map(|name| (name.clone(), Some(Path::new(""))));
            let included = included(&text).into_iter();
            let included = included.map(|(name, beside)| (name, file.parent().filter(|_| beside)));
            for (name, first) in forced.chain(included) {
                let folders = first.into_iter().chain(folders.iter().map(PathBuf::as_path));
                let candidates: Vec<_> = folders.map(|folder| folder.join(&name)).collect();
                all.push(' ');
                let missing = candidates.iter().take_while(|path| !path.is_file());
                for path in missing {
                    let folder = path.ancestors().skip(1).find(|folder| folder.is_dir());
                    if let Some(folder) = folder.and_then(|one| one.canonicalize().ok()) {
                        add(&mut watched, folder);
                    }
                }
                for path in candidates.iter().filter(|path| path.is_file()) {
                    let at = add(&mut files, canonical(path));
                    all += &format!(" {at}");
                }
            }
            all.push('\n');
            if next == 0 {
                alone = own;
            }
            next += 1;
        }
        let digest = if files.len() == 1 { alone } else { sha256(&all) };
        Ok(Inputs { files, watched, digest })
    }

    /// Tells cargo when to run the script again. A missing file would make it run each time, so its folder is named instead, and cargo watches all
    /// that is in there: but not the package's own folder, which has `target`, nor folders that this script writes to, nor any outside the package.
    pub(crate) fn tell_cargo(&self) {
        let package = env::current_dir().and_then(|folder| folder.canonicalize());
        let out = env::var_os("OUT_DIR").and_then(|out| PathBuf::from(out).canonicalize().ok());
        let watched = self.watched.iter().filter(|folder| {
            let is_out = out.as_ref().is_some_and(|out| folder.starts_with(out));
            let inside = package.as_ref().ok().and_then(|root| folder.strip_prefix(root).ok());
            inside.is_some_and(|inside| inside != Path::new("")) && !is_out
        });
        for path in self.files.iter().chain(watched) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The index of an element, which is appended if it was not there.
fn add(paths: &mut Vec<PathBuf>, path: PathBuf) -> usize {
    let at = paths.iter().position(|one| *one == path);
    at.unwrap_or_else(|| {
        paths.push(path);
        paths.len() - 1
    })
}

/// The path with its folder made canonical, but not the file: includes are looked for beside a link, not beside its target.
fn canonical(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// The files that a text includes, and whether each is to be looked for beside it.
fn included(text: &str) -> Vec<(String, bool)> {
    let text = text.replace("%:", "#").replace("??=", "#").replace("??/", "\\");
    // Compilers allow blanks between the backslash and the end of the line.
    let mut spliced = String::new();
    for line in text.lines() {
        match line.trim_end().strip_suffix('\\') {
            Some(line) => spliced += line,
            None => spliced.extend([line, "\n"]),
        }
    }
    spliced.match_indices('#').filter_map(|(at, _)| directive(&spliced[at + 1..])).collect()
}

/// The file that the text after a `#` includes.
fn directive(text: &str) -> Option<(String, bool)> {
    let text = behind_blanks(text);
    let names = ["include_next", "include", "import"];
    let text = behind_blanks(names.into_iter().find_map(|name| text.strip_prefix(name))?);
    let (name, is_beside) = match text.strip_prefix('"') {
        Some(text) => (text.split_once('"')?.0, true),
        None => (text.strip_prefix('<')?.split_once('>')?.0, false),
    };
    (!name.contains('\n')).then(|| (name.to_owned(), is_beside))
}

/// The text after blanks and comments.
fn behind_blanks(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        match text.strip_prefix("/*").and_then(|comment| comment.split_once("*/")) {
            Some((_, behind)) => text = behind,
            None => return text,
        }
    }
}
