//! The little of PTX that the stand-in reads: entry names and the sizes of their parameters.

use crate::abi::{Outcome, code};

/// What `ptxas` says about text that it cannot parse.
pub(crate) const SYNTAX_ERROR: &str =
    "ptxas application ptx input, line 7; fatal : Parsing error near 'syntax'";

/// A kernel's declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Bytes of each parameter.
    pub(crate) parameters: Vec<usize>,
    /// Where each parameter begins.
    pub(crate) offsets: Vec<usize>,
}

/// Reads an image's entries: `INVALID_PTX` for one with a syntax error, `INVALID_IMAGE` for one
/// without entries.
pub(crate) fn entries(image: &str) -> Outcome<Vec<Entry>> {
    if image.contains("syntax error") {
        return Err(code::INVALID_PTX);
    }
    if !image.contains(".entry") {
        return Err(code::INVALID_IMAGE);
    }
    let text: String = image
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""))
        .collect::<Vec<_>>()
        .join("\n");
    Ok(text.split(".entry").skip(1).filter_map(entry).collect())
}

/// Reads `NAME ( parameters )`, what follows `.entry`. A kernel without parameters may lack the
/// parentheses in PTX; it is not found then, and a test notices at once.
fn entry(text: &str) -> Option<Entry> {
    let (name, rest) = text.split_once('(')?;
    let name = name.trim();
    let is_name =
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_$%".contains(c));
    let (list, _) = rest.split_once(')')?;
    let declared = || list.split(',').map(str::trim).filter(|one| !one.is_empty());
    let parameters: Vec<usize> = declared().map(parameter_bytes).collect();
    let mut end = 0_usize;
    let place = |(size, alignment): (&usize, usize)| {
        let offset = end.next_multiple_of(alignment);
        end = offset + size;
        offset
    };
    let offsets = parameters.iter().zip(declared().map(alignment_bytes)).map(place).collect();
    is_name.then(|| Entry { name: name.to_owned(), parameters, offsets })
}

/// What follows `.align`, or else the size of one element.
fn alignment_bytes(declaration: &str) -> usize {
    let mut words = declaration.split_whitespace();
    let named = words.find(|word| *word == ".align").and_then(|_| words.next()?.parse().ok());
    named.or_else(|| declaration.split_whitespace().find_map(type_bytes)).unwrap_or(8)
}

/// The bytes of `.param .u64 name`, or of `.param .align 8 .b8 name[16]`.
fn parameter_bytes(declaration: &str) -> usize {
    let one = declaration.split_whitespace().find_map(type_bytes).unwrap_or(8);
    let count = declaration
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']')?.0.trim().parse::<usize>().ok());
    one * count.unwrap_or(1)
}

fn type_bytes(word: &str) -> Option<usize> {
    let bits = word.strip_prefix(['.'])?.strip_prefix(['u', 's', 'b', 'f'])?;
    let bits: usize = bits.parse().ok()?;
    Some(bits / 8)
}
