//! [`Compare`]: a condition on an element.
#![forbid(unsafe_code)]

use super::scalar::Scalar;

/// A condition on an element: how it compares with a value. A NaN is unequal to everything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compare<T> {
    /// `x < value`
    Less(T),
    /// `x <= value`
    LessOrEqual(T),
    /// `x > value`
    Greater(T),
    /// `x >= value`
    GreaterOrEqual(T),
    /// `x == value`
    Equal(T),
    /// `x != value`
    NotEqual(T),
}

/// [`Compare`] as the kernels use it: whether a value is in the range from `from` to `to`, or whether it is not. Always two comparisons; with a
/// branch for each condition a selection took a quarter longer.
#[derive(Clone, Copy)]
pub(super) struct Within<C> {
    pub(super) from: C,
    pub(super) to: C,
    pub(super) is_not: u32,
}

impl<T: Scalar> Compare<T> {
    pub(super) fn within(self) -> Within<T::Computed> {
        let up_to = |to, is_not| Within { from: T::LEAST, to, is_not };
        let from = |from, is_not| Within { from, to: T::GREATEST, is_not };
        match self {
            // The complement of "below a value" is "from that value up", except that a NaN is in neither.
            Compare::Less(value) => {
                T::before(value.computed()).map_or_else(nothing::<T>, |to| up_to(to, 0))
            }
            Compare::LessOrEqual(value) => up_to(value.computed(), 0),
            Compare::Greater(value) => {
                T::after(value.computed()).map_or_else(nothing::<T>, |at| from(at, 0))
            }
            Compare::GreaterOrEqual(value) => from(value.computed(), 0),
            Compare::Equal(value) => {
                Within { from: value.computed(), to: value.computed(), is_not: 0 }
            }
            Compare::NotEqual(value) => {
                Within { from: value.computed(), to: value.computed(), is_not: 1 }
            }
        }
    }
}

/// The condition that no value satisfies.
fn nothing<T: Scalar>() -> Within<T::Computed> {
    // For floats: a NaN is in no range, and in `NOTHING`.
    match T::NOTHING {
        Some((from, to)) => Within { from, to, is_not: 0 },
        None => Within { from: T::LEAST, to: T::GREATEST, is_not: 1 },
    }
}

impl<C: PartialOrd> Within<C> {
    pub(super) fn holds(&self, value: &C) -> bool {
        (*value >= self.from && *value <= self.to) != (self.is_not != 0)
    }
}
