//! [`RangeMap`]: a map from ranges of numbers to values (pure).
//!
//! # Invariants
//! 1. The ranges are sorted and disjoint, and none is empty (`as_one_value_for_each_number`).
#![forbid(unsafe_code)]

use std::ops::Range;

#[derive(Debug)]
pub(super) struct RangeMap<V> {
    stretches: Vec<(Range<u64>, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        RangeMap { stretches: Vec::new() }
    }
}

impl<V: Clone + Default> RangeMap<V> {
    pub(super) fn clear(&mut self) {
        self.stretches.clear();
    }

    /// In ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Range<u64>, V)> {
        self.stretches.iter()
    }

    /// Changes the values of a range, which may differ between its parts.
    pub(super) fn change(&mut self, range: Range<u64>, mut change: impl FnMut(&mut V)) {
        let mut start = range.start;
        let mut at = self.stretches.partition_point(|(stretch, _)| stretch.end <= start);
        while start < range.end {
            match self.stretches.get(at) {
                Some((stretch, _)) if stretch.start < start => {
                    self.split(at, start);
                    at += 1;
                }
                Some((stretch, _)) if stretch.start == start => {
                    if stretch.end > range.end {
                        self.split(at, range.end);
                    }
                    let (stretch, value) = &mut self.stretches[at];
                    start = stretch.end;
                    change(value);
                    at += 1;
                }
                next => {
                    let end = next.map_or(range.end, |(next, _)| next.start.min(range.end));
                    self.stretches.insert(at, (start..end, V::default()));
                }
            }
        }
    }

    /// Gives a changed range a single value.
    pub(super) fn cover(&mut self, range: &Range<u64>, value: V) {
        let first = self.stretches.partition_point(|(stretch, _)| stretch.end <= range.start);
        if let Some((known, old)) = self.stretches.get_mut(first)
            && known == range
        {
            *old = value;
            return;
        }
        let last = self.stretches.partition_point(|(stretch, _)| stretch.start < range.end);
        self.stretches.splice(first..last, [(range.clone(), value)]);
    }

    fn split(&mut self, at: usize, border: u64) {
        let (range, value) = &mut self.stretches[at];
        let rest = (border..range.end, value.clone());
        range.end = border;
        self.stretches.insert(at + 1, rest);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn as_one_value_for_each_number(changes in prop::collection::vec((0_u64..30, 0_u64..9, any::<bool>()), 0..12)) {
            let mut map = RangeMap::<Vec<usize>>::default();
            let mut each = vec![Vec::new(); 40];
            for (number, (start, len, covers)) in changes.into_iter().enumerate() {
                let range = start..start + len;
                map.change(range.clone(), |value| value.push(number));
                range.clone().for_each(|at| each[at as usize].push(number));
                if covers && len > 0 {
                    map.cover(&range, vec![number]);
                    range.for_each(|at| each[at as usize] = vec![number]);
                }
            }
            let mut end = 0;
            for (range, value) in map.iter() {
                prop_assert!(end <= range.start && range.start < range.end);
                end = range.end;
                range.clone().for_each(|at| assert_eq!(std::mem::take(&mut each[at as usize]), *value));
            }
            prop_assert!(each.iter().all(Vec::is_empty));
        }
    }
}
