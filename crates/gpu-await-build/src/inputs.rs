//! The files that a PTX is made of: the source, and what it includes and the package has. NVIDIA's own headers belong to the compiler.
//!
//! `#include` is found wherever a line begins with it, also where the preprocessor would not look: a file too many makes a PTX stale too early,
//! never too late. The one that a macro names is not found.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

pub(crate) struct Inputs {
    /// The source is the first.
    pub(crate) files: Vec<PathBuf>,
    /// SHA-256 of their contents behind one another, in hexadecimal. The ends of lines are those of Unix, as Git may change them.
    pub(crate) digest: String,
}

impl Inputs {
    pub(crate) fn read(source: &Path, folders: &[PathBuf]) -> Result<Inputs> {
        let mut files = vec![source.to_owned()];
        let mut digest = Sha256::new();
        let mut next = 0;
        while let Some(file) = files.get(next).cloned() {
            let text = fs::read_to_string(&file).map_err(|error| Error::file(&file, error))?;
            let text = text.replace("\r\n", "\n");
            digest.update(&text);
            for (name, beside) in text.lines().filter_map(included) {
                let beside = file.parent().filter(|_| beside).into_iter();
                let folders = beside.chain(folders.iter().map(PathBuf::as_path));
                let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
                files.extend(found.filter(|path| !files.contains(path)));
            }
            next += 1;
        }
        let digest = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Inputs { files, digest })
    }
}

/// The file that a line includes, and whether it is looked for beside the including one.
fn included(line: &str) -> Option<(&str, bool)> {
    let name = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
    let name = name.trim_start();
    match name.strip_prefix('"') {
        Some(name) => Some((name.split_once('"')?.0, true)),
        None => Some((name.strip_prefix('<')?.split_once('>')?.0, false)),
    }
}
