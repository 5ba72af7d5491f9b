//! The container formats of a kernel image: checks that its own sizes stay inside its bytes, and the names of its kernels.
//!
//! The driver is passed an address and no length. It recognises the format by the first bytes, reads PTX up to a NUL, and trusts the sizes
//! in a binary: a truncated file would crash the process. So the sizes are checked before the driver sees them. The *contents* are not
//! checked, and cannot be: the caller vouches for a binary.
//!
//! | format | begins with | checked |
//! |---|---|---|
//! | PTX | printable text | no NUL inside, nothing that the driver could take for another format |
//! | cubin | `7f 45 4c 46`, ELF | header, program and section tables, what they refer to, names in their tables |
//! | fatbin | `50 ed 55 ba` | header, every entry's header and payload, the uncompressed cubins in it |
//!
//! # Invariants
//! 1. An accepted image refers to no byte outside of the slice (`what_passes_stays_inside`), and compilers' output is accepted
//!    (`machine_code_reaches_the_driver_as_such`).
//!
//! More than 500 lines: the checks, and tests that change every byte.
//!
//! Source: the ELF-64 object file format; the driver's `fatbinary_section.h` for the magic numbers; the layout of entries as found in
//! NVIDIA's libraries.
#![forbid(unsafe_code)]

use crate::error::image::ImageProblem;

type Checked<T = ()> = Result<T, ImageProblem>;

/// The names of an image's kernels, for errors: as many as can be read without the driver.
type Names = Vec<String>;

const ELF: [u8; 4] = *b"\x7fELF";
const FATBIN: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();

/// Checks PTX text.
pub(super) fn check_text(text: &[u8]) -> Checked<Names> {
    let printable = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    let wrong = match text.first() {
        Some(first) if !printable(*first) => Some(0),
        _ => text.iter().position(|byte| *byte == 0),
    };
    match wrong {
        Some(at) => Err(ImageProblem::NotText { at, byte: text[at] }),
        None => Ok(entries(&String::from_utf8_lossy(text))),
    }
}

/// The names behind PTX's `.entry`.
fn entries(text: &str) -> Names {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "_$%".contains(c);
    let names = text.split(".entry").skip(1).filter_map(|rest| {
        let name = rest.strip_prefix(char::is_whitespace)?.trim_start();
        let name = &name[..name.find(|c| !is_of_name(c)).unwrap_or(name.len())];
        (!name.is_empty()).then(|| name.to_owned())
    });
    names.collect()
}

/// Checks a cubin or a fatbin.
pub(super) fn check_binary(bytes: &[u8]) -> Checked<Names> {
    let whole = Segment { bytes, what: "first bytes" };
    match whole.read(0)? {
        ELF => check_elf(bytes),
        FATBIN => check_fatbin(bytes),
        first => Err(ImageProblem::UnknownForm { first }),
    }
}

/// Bytes, and their name for error messages.
#[derive(Clone, Copy)]
struct Segment<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Segment<'a> {
    /// `size` bytes at `start`, under a name of their own.
    fn part(self, what: &'static str, start: u64, size: u64) -> Checked<Segment<'a>> {
        let end = start.saturating_add(size);
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        match range.and_then(|(start, end)| self.bytes.get(start..end)) {
            Some(bytes) => Ok(Segment { bytes, what }),
            None => {
                let len = self.bytes.len() as u64;
                Err(ImageProblem::Truncated { part: what, start, end, len })
            }
        }
    }

    fn read<const N: usize>(self, at: u64) -> Checked<[u8; N]> {
        let part = self.part(self.what, at, N as u64)?;
        // It has the requested length.
        Ok(part.bytes.first_chunk().copied().unwrap_or([0; N]))
    }

    fn u16(self, at: u64) -> Checked<u64> {
        self.read(at).map(|bytes| u64::from(u16::from_le_bytes(bytes)))
    }

    fn u32(self, at: u64) -> Checked<u64> {
        self.read(at).map(|bytes| u64::from(u32::from_le_bytes(bytes)))
    }

    fn u64(self, at: u64) -> Checked<u64> {
        self.read(at).map(u64::from_le_bytes)
    }

    /// The bytes from `start` up to a NUL.
    fn string(self, what: &'static str, start: u64) -> Checked<&'a [u8]> {
        let rest = (self.bytes.len() as u64).saturating_sub(start).max(1);
        let rest = self.part(what, start, rest)?.bytes;
        Ok(rest.split(|byte| *byte == 0).next().unwrap_or(rest))
    }

    /// Equal parts of `size` bytes.
    fn rows(self, size: usize) -> impl Iterator<Item = Segment<'a>> {
        self.bytes.chunks_exact(size).map(move |bytes| Segment { bytes, ..self })
    }
}

fn expect(field: &'static str, found: u64, expected: u64) -> Checked {
    if found == expected { Ok(()) } else { Err(ImageProblem::Field { field, found, expected }) }
}

fn check_elf(bytes: &[u8]) -> Checked<Names> {
    /// In front of a kernel's name, in that of the section that has its code.
    const CODE: &[u8] = b".text.";
    const HEADER: u64 = 64;
    const PROGRAM: u64 = 56;
    const SECTION: u64 = 64;
    /// More than a half-word can count: the number is in the first section.
    const MANY: u64 = 0xffff;
    const CUDA: u64 = 190;

    let file = Segment { bytes, what: "ELF file" };
    let header = file.part("ELF header", 0, HEADER)?;
    let [_, _, _, _, class, order, ..] = header.read::<16>(0)?;
    expect("ELF class (2: 64-bit)", class.into(), 2)?;
    expect("ELF byte order (1: little-endian)", order.into(), 1)?;
    expect("ELF machine (190: CUDA)", header.u16(18)?, CUDA)?;
    expect("ELF header size", header.u16(52)?, HEADER)?;
    let (programs_at, sections_at) = (header.u64(32)?, header.u64(40)?);
    let (mut programs, mut sections) = (header.u16(56)?, header.u16(60)?);
    let mut names = header.u16(62)?;
    if sections_at != 0 {
        let first = file.part("first section header", sections_at, SECTION)?;
        sections = if sections == 0 { first.u64(32)? } else { sections };
        names = if names == MANY { first.u32(40)? } else { names };
        programs = if programs == MANY { first.u32(44)? } else { programs };
    }
    let table = programs.saturating_mul(PROGRAM);
    let programs_table = file.part("program header table", programs_at, table)?;
    if programs > 0 {
        expect("size of a program header", header.u16(54)?, PROGRAM)?;
    }
    for program in programs_table.rows(56) {
        file.part("segment", program.u64(8)?, program.u64(32)?)?;
    }
    let mut kernels = Names::new();
    if sections == 0 {
        return Ok(kernels);
    }
    expect("size of a section header", header.u16(58)?, SECTION)?;
    let table = file.part("section header table", sections_at, sections.saturating_mul(SECTION))?;
    let strings = Section::find(table, names)?.strings(file)?;
    for row in table.rows(64) {
        let section = Section::read(row)?;
        section.contents(file)?;
        let name = strings.string("section name", section.name)?;
        if let Some(kernel) = name.strip_prefix(CODE) {
            kernels.push(String::from_utf8_lossy(kernel).into_owned());
        }
        if section.kind == Section::SYMBOLS {
            check_symbols(file, table, &section)?;
        }
    }
    Ok(kernels)
}

/// Every symbol has its name in the string table that its section names.
fn check_symbols(file: Segment<'_>, table: Segment<'_>, section: &Section) -> Checked {
    const SYMBOL: u64 = 24;
    expect("size of a symbol", section.entry_size, SYMBOL)?;
    let symbols = section.contents(file)?;
    expect("rest of the symbol table", symbols.bytes.len() as u64 % SYMBOL, 0)?;
    let strings = Section::find(table, section.link)?.strings(file)?;
    for symbol in symbols.rows(24) {
        strings.part("symbol name", symbol.u32(0)?, 1)?;
    }
    Ok(())
}

/// A row of the section header table.
struct Section {
    name: u64,
    kind: u64,
    start: u64,
    size: u64,
    link: u64,
    entry_size: u64,
}

impl Section {
    const UNUSED: u64 = 0;
    const SYMBOLS: u64 = 2;
    const STRINGS: u64 = 3;
    /// Has a size and no bytes in the file.
    const NO_BITS: u64 = 8;

    fn read(row: Segment<'_>) -> Checked<Section> {
        Ok(Section {
            name: row.u32(0)?,
            kind: row.u32(4)?,
            start: row.u64(24)?,
            size: row.u64(32)?,
            link: row.u32(40)?,
            entry_size: row.u64(56)?,
        })
    }

    fn find(table: Segment<'_>, index: u64) -> Checked<Section> {
        Section::read(table.part("header of a named section", index.saturating_mul(64), 64)?)
    }

    /// Its bytes in the file; none where it has none.
    fn contents<'a>(&self, file: Segment<'a>) -> Checked<Segment<'a>> {
        match self.kind {
            Section::UNUSED | Section::NO_BITS => file.part("section", 0, 0),
            _ => file.part("section", self.start, self.size),
        }
    }

    /// Its strings, the last of which ends inside it.
    fn strings<'a>(&self, file: Segment<'a>) -> Checked<Segment<'a>> {
        expect("type of a string table", self.kind, Section::STRINGS)?;
        let strings = self.contents(file)?;
        if let Some(last) = strings.bytes.last() {
            expect("end of a string table", (*last).into(), 0)?;
        }
        Ok(strings)
    }
}

fn check_fatbin(bytes: &[u8]) -> Checked<Names> {
    const HEADER: u64 = 16;
    const ENTRY: u64 = 64;
    const CUBIN: u64 = 2;

    let file = Segment { bytes, what: "fatbin" };
    let header = file.part("fatbin header", 0, HEADER)?;
    expect("fatbin version", header.u16(4)?, 1)?;
    expect("fatbin header size", header.u16(6)?, HEADER)?;
    let entries = file.part("fatbin payload", HEADER, header.u64(8)?)?;
    let (mut at, mut kernels) = (0, Names::new());
    while at < entries.bytes.len() as u64 {
        let head = entries.part("header of a fatbin entry", at, ENTRY)?;
        let (head_size, size) = (head.u32(4)?, head.u64(8)?);
        if head_size < ENTRY {
            let field = "header size of a fatbin entry";
            return Err(ImageProblem::Field { field, found: head_size, expected: ENTRY });
        }
        let entry = entries.part("fatbin entry", at, head_size.saturating_add(size))?;
        let payload = entry.part("payload of a fatbin entry", head_size, size)?;
        payload.part("compressed payload of a fatbin entry", 0, head.u32(16)?)?;
        entry.part("name of a fatbin entry", head.u32(32)?, head.u32(36)?)?;
        // Compressed, it begins with something else.
        if head.u16(0)? == CUBIN && payload.bytes.starts_with(&ELF) {
            kernels.extend(check_elf(payload.bytes)?);
        }
        at += entry.bytes.len() as u64;
    }
    // One for each architecture.
    kernels.sort_unstable();
    kernels.dedup();
    Ok(kernels)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A cubin of one string table, one symbol table, one section of code and one segment, with its tables
    /// at the end, as compilers place them.
    fn cubin() -> Vec<u8> {
        let strings = b"\0.strtab\0.symtab\0.text.ab\0.bss\0";
        let code = [0x5a; 32];
        let symbols = [0; 48];
        let strings_at = 64;
        let symbols_at = (strings_at + strings.len()).next_multiple_of(8);
        let code_at = symbols_at + symbols.len();
        let sections_at = code_at + code.len();
        let programs_at = sections_at + 5 * 64;
        let mut file = vec![0; programs_at + 56];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01\x33\x07");
        for (at, value) in
            [(16, 2), (18, 190), (52, 64), (54, 56), (56, 1), (58, 64), (60, 5), (62, 1)]
        {
            put(at, &u16::to_le_bytes(value));
        }
        put(32, &(programs_at as u64).to_le_bytes());
        put(40, &(sections_at as u64).to_le_bytes());
        put(strings_at, strings);
        put(symbols_at, &symbols);
        put(symbols_at + 24, &17_u32.to_le_bytes());
        put(code_at, &code);
        // Name, type, where, size, link, size of an entry.
        let sections = [
            (0, 0, 0, 0, 0, 0),
            (1, 3, strings_at, strings.len(), 0, 0),
            (9, 2, symbols_at, symbols.len(), 1, 24),
            (17, 1, code_at, code.len(), 0, 0),
            (26, 8, code_at, 1 << 40, 0, 0),
        ];
        for (row, (name, kind, start, size, link, entry_size)) in sections.into_iter().enumerate() {
            let row = sections_at + 64 * row;
            put(row, &u32::to_le_bytes(name));
            put(row + 4, &u32::to_le_bytes(kind));
            put(row + 24, &(start as u64).to_le_bytes());
            put(row + 32, &(size as u64).to_le_bytes());
            put(row + 40, &u32::to_le_bytes(link));
            put(row + 56, &u64::to_le_bytes(entry_size));
        }
        put(programs_at, &1_u32.to_le_bytes());
        put(programs_at + 8, &(code_at as u64).to_le_bytes());
        put(programs_at + 32, &(code.len() as u64).to_le_bytes());
        file
    }

    /// A fatbin of that cubin, and of something compressed with a name.
    fn fatbin() -> Vec<u8> {
        let cubin = cubin();
        let entry = |kind: u16, head_size: u32, compressed: u32, payload: &[u8]| {
            let mut entry = vec![0; head_size as usize];
            let size = payload.len().next_multiple_of(8);
            entry[..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&head_size.to_le_bytes());
            entry[8..16].copy_from_slice(&(size as u64).to_le_bytes());
            entry[16..20].copy_from_slice(&compressed.to_le_bytes());
            let name = head_size - 64;
            entry[32..36].copy_from_slice(&if name > 0 { 64_u32 } else { 0 }.to_le_bytes());
            entry[36..40].copy_from_slice(&name.to_le_bytes());
            entry.extend_from_slice(payload);
            entry.resize(head_size as usize + size, 0);
            entry
        };
        let entries = [entry(2, 64, 0, &cubin), entry(1, 80, 21, &[0xf0; 21])].concat();
        let mut file = FATBIN.to_vec();
        file.extend_from_slice(&1_u16.to_le_bytes());
        file.extend_from_slice(&16_u16.to_le_bytes());
        file.extend_from_slice(&(entries.len() as u64).to_le_bytes());
        file.extend_from_slice(&entries);
        file
    }

    fn number(bytes: &[u8], at: usize, len: usize) -> u128 {
        bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u128::from(*byte))
    }

    /// The ends of a binary's parts, read without checks.
    fn ends(bytes: &[u8]) -> Vec<u128> {
        let at = |at, len| number(bytes, at, len);
        if bytes.starts_with(&FATBIN) {
            let mut ends = vec![16 + at(8, 8)];
            let mut place = 16;
            while (place as u128) < ends[0] {
                let (head, size) = (at(place + 4, 4), at(place + 8, 8));
                let entry = place as u128 + head;
                ends.extend([entry + size, entry + at(place + 16, 4)]);
                ends.push(place as u128 + at(place + 32, 4) + at(place + 36, 4));
                let payload = &bytes[entry as usize..(entry + size) as usize];
                if payload.starts_with(&ELF) && at(place, 2) == 2 {
                    ends.extend(self::ends(payload).into_iter().map(|end| entry + end));
                }
                place = (entry + size) as usize;
            }
            return ends;
        }
        let (programs_at, mut programs) = (at(32, 8), at(56, 2));
        let (sections_at, mut sections) = (at(40, 8), at(60, 2));
        if sections == 0 && sections_at > 0 {
            sections = at(sections_at as usize + 32, 8);
        }
        if programs == 0xffff && sections_at > 0 {
            programs = at(sections_at as usize + 44, 4);
        }
        let mut ends = vec![64, programs_at + 56 * programs, sections_at + 64 * sections];
        for row in 0..programs as usize {
            let row = programs_at as usize + 56 * row;
            ends.push(at(row + 8, 8) + at(row + 32, 8));
        }
        for row in 0..sections as usize {
            let row = sections_at as usize + 64 * row;
            if ![0, 8].contains(&at(row + 4, 4)) {
                ends.push(at(row + 24, 8) + at(row + 32, 8));
            }
        }
        ends
    }

    fn passes_inside(bytes: &[u8]) -> bool {
        if check_binary(bytes).is_err() {
            return false;
        }
        let (end, len) = (ends(bytes).into_iter().max().unwrap(), bytes.len() as u128);
        assert!(end <= len, "passed, and names byte {end} of {len}");
        true
    }

    #[test]
    fn a_truncated_binary_is_refused_with_the_figures() {
        for whole in [cubin(), fatbin()] {
            assert!(passes_inside(&whole));
            for len in 0..whole.len() {
                let problem = check_binary(&whole[..len]).unwrap_err();
                let ImageProblem::Truncated { start, end, len: found, .. } = problem else {
                    panic!("{len}: {problem}");
                };
                assert!(start <= end && end > found && found <= len as u64, "{problem}");
            }
        }
    }

    #[test]
    fn other_forms_are_refused() {
        for first in [*b"PK\x03\x04", *b"BC\xC0\xDE", 0x4662_43B1_u32.to_le_bytes(), [0; 4]] {
            let bytes = [&first[..], &[0; 100]].concat();
            let problem = check_binary(&bytes).unwrap_err();
            assert!(
                matches!(problem, ImageProblem::UnknownForm { first: found } if found == first)
            );
        }
        let mut of_the_host = cubin();
        of_the_host[18] = 62;
        let problem = check_binary(&of_the_host).unwrap_err();
        assert!(
            matches!(problem, ImageProblem::Field { found: 62, expected: 190, .. }),
            "{problem}"
        );
        let mut endless = fatbin();
        endless[16 + 4..16 + 8].fill(0);
        assert!(matches!(
            check_binary(&endless).unwrap_err(),
            ImageProblem::Field { found: 0, .. }
        ));
    }

    #[test]
    fn text_is_text() {
        for text in
            ["", ".version 7.0", "\n\t// a comment\n.version 8.0", "no PTX at all", "// \u{fc}"]
        {
            check_text(text.as_bytes()).unwrap();
        }
        let elf = cubin();
        let cases = [(&elf[..], 0, 0x7f), (b"// a\0b", 4, 0), (b"// a\0", 4, 0), (b"\0", 0, 0)];
        for (text, expected_at, expected_byte) in cases {
            let problem = check_text(text).unwrap_err();
            let ImageProblem::NotText { at, byte } = problem else { panic!("{problem}") };
            assert_eq!((at, byte), (expected_at, expected_byte));
        }
    }

    #[test]
    fn names_of_kernels() {
        let ptx = ".visible .entry a(\n)\n{ }\n.entry\n\t_Z1bPf ()\n.entrypoint .entry";
        assert_eq!(check_text(ptx.as_bytes()).unwrap(), ["a", "_Z1bPf"]);
        assert_eq!(check_binary(&cubin()).unwrap(), ["ab"]);
        assert_eq!(check_binary(&fatbin()).unwrap(), ["ab"]);
        let said = |kernel: &str, there: &[&str]| {
            let there = there.iter().map(|name| (*name).to_owned()).collect();
            let (image, kernel) = ("x.cu".to_owned(), kernel.to_owned());
            crate::ErrorDetail::NoSuchKernel { image, kernel, there }.to_string()
        };
        let in_a_namespace = said("square", &["other", "_ZN4mine6squareEPf"]);
        assert!(
            in_a_namespace.contains("`_ZN4mine6squareEPf`, its name in C++"),
            "{in_a_namespace}"
        );
        assert_eq!(said("c", &["a", "_Z1bPf"]), "`x.cu` has no kernel `c`, but `a`, `_Z1bPf`");
        assert!(said("c", &["a"; 10]).ends_with("`a`, `a` and 2 more"));
        assert!(said("c", &[]).ends_with("a template needs `CudaSource::instance`"));
    }

    fn config() -> ProptestConfig {
        ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() }
    }

    proptest! {
        #![proptest_config(config())]

        /// Sizes and offsets that were changed at random, in files that were cut at random.
        #[test]
        fn what_passes_stays_inside(
            fat in any::<bool>(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            wide in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0..64_u32), 0..3),
            keeps in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = if fat { fatbin() } else { cubin() };
            for (at, bits) in flips {
                let at = at.index(bytes.len());
                bytes[at] ^= bits;
            }
            for (at, value, shift) in wide {
                let at = at.index(bytes.len() / 8 - 1) * 8;
                bytes[at..at + 8].copy_from_slice(&(value >> shift).to_le_bytes());
            }
            if let Some(keeps) = keeps {
                let keeps = keeps.index(bytes.len());
                bytes.truncate(keeps);
            }
            passes_inside(&bytes);
        }
    }
}
