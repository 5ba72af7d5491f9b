//! How often a property is tried: as often as `PROPTEST_CASES` says, or `cases` times.

use proptest::prelude::ProptestConfig;

pub(crate) fn config(cases: u32) -> ProptestConfig {
    let said = std::env::var("PROPTEST_CASES").ok();
    let cases = said.map_or(cases, |said| said.parse().expect("PROPTEST_CASES is a number"));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}
