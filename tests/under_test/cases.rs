//! How much a test tries. Miri is some thousand times slower: what it gets less of is said here, and is
//! the same in every file.

use proptest::prelude::ProptestConfig;

/// How often a property is tried under Miri.
const MIRI_CASES: u32 = 3;

/// A property is tried as often as `PROPTEST_CASES` says, or `cases` times.
pub(crate) fn config(cases: u32) -> ProptestConfig {
    let said = std::env::var("PROPTEST_CASES").ok();
    let cases = if cfg!(miri) { MIRI_CASES } else { cases };
    let cases = said.map_or(cases, |said| said.parse().expect("PROPTEST_CASES is a number"));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// How long or how many: `full`, or a third of it under Miri.
#[allow(dead_code, reason = "not every file runs under Miri")]
pub(crate) const fn size(full: usize) -> usize {
    if cfg!(miri) { full.div_ceil(3) } else { full }
}

/// All that there is, or one in 150 under Miri.
#[allow(dead_code, reason = "as above")]
pub(crate) fn sample<I: Iterator>(all: I) -> impl Iterator<Item = I::Item> {
    all.step_by(if cfg!(miri) { 150 } else { 1 })
}
