//! What a newcomer sees first is short, and leads somewhere: links between the pages that are packed, and the guide's pages.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

/// Words of the README, programs and tables included.
const MOST_WORDS: usize = 1200;

fn root() -> PathBuf {
    // Where this process runs: packed tests run on another machine than the one that built them.
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    PathBuf::from(root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()))
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The guide's pages, as paths from the root.
fn guide() -> Vec<String> {
    let folder = fs::read_dir(root().join("src/guide")).expect("the guide");
    let names = folder.map(|entry| entry.expect("an entry").file_name());
    names.map(|name| format!("src/guide/{}", name.to_string_lossy())).collect()
}

/// Where the links of a page lead.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

#[test]
fn links_lead_to_files_that_exist() {
    let mut pages = guide();
    pages.extend(["README.md", "ARCHITECTURE.md", "RELIABILITY.md"].map(str::to_owned));
    for page in pages {
        let text = read(&page);
        let folder = Path::new(&page).parent().expect("a folder").to_owned();
        for target in links(&text).filter(|target| !target.starts_with("https://")) {
            let file = root().join(&folder).join(target.split('#').next().expect("a part"));
            assert!(file.exists(), "{page} links to {target}, which is not there");
        }
    }
}

#[test]
fn the_readme_is_short() {
    let words = read("README.md").split_whitespace().count();
    assert!(words <= MOST_WORDS, "{words} words: what is not for everybody belongs in the guide");
}

#[test]
fn every_page_is_shown_and_linked() {
    let (shown, readme) = (read("src/guide.rs"), read("README.md"));
    for page in guide() {
        let name = page.strip_prefix("src/").expect("a page of the guide");
        assert!(shown.contains(&format!("include_str!(\"{name}\")")), "src/guide.rs lacks {page}");
        assert!(links(&readme).any(|target| target == page), "the README does not link {page}");
    }
}
