//! [`Plain`]: a by-value argument of a declared kernel, of any plain type.
//!
//! A wrong type in a declaration is one error, at that type. So the expansion of [`kernel!`](crate::kernel!) requires [`Element`]
//! in one place, where it makes the [`Proof`], and everything else is well-formed whatever the type is.
//!
//! # Invariants
//! 1. A [`Plain<T>`] exists only for a `T: Element`: it holds the proof (`mistakes_have_one_error`).
//! 2. What a twin reads as `T` was pushed as `T`, by a [`Plain<T>`] (`a_struct_is_passed_by_value`).

use std::fmt;

use super::signature::sealed::Sealed;
use super::signature::{Arg, ArgList, Param, layout_of};
use crate::backend::ArgBlock;
use crate::memory::Element;

/// Proves that `T` is plain data.
#[doc(hidden)]
pub struct Proof<T> {
    bytes: fn(&T) -> &[u8],
    copy: fn(&T) -> T,
    zero: fn() -> T,
    debug: fn(&T, &mut fmt::Formatter<'_>) -> fmt::Result,
}

/// A value with the proof that it is plain data: a parameter's marker, what a launch passes for it, and
/// what its preconditions see.
#[doc(hidden)]
pub struct Plain<T> {
    value: T,
    proof: Proof<T>,
}

/// The one place where a declaration states its requirement on an array's elements.
#[doc(hidden)]
pub const fn element<T: Element>() {}

/// The one place where a declaration states its requirement on a value's type.
#[doc(hidden)]
#[must_use]
pub const fn proof<T: Element + fmt::Debug>() -> Proof<T> {
    Proof {
        bytes: bytemuck::bytes_of,
        copy: |value| *value,
        zero: T::zeroed,
        debug: fmt::Debug::fmt,
    }
}

impl<T> Plain<T> {
    #[must_use]
    pub fn new(value: T, proof: Proof<T>) -> Self {
        Plain { value, proof }
    }

    /// A derived value, or zero bytes for a launch that is refused because it has none.
    #[must_use]
    pub fn or_zero(value: Option<T>, proof: Proof<T>) -> Self {
        Plain { value: value.unwrap_or_else(proof.zero), proof }
    }

    /// The value itself.
    #[must_use]
    pub fn get(&self) -> T {
        (self.proof.copy)(&self.value)
    }
}

impl<T: 'static> Sealed for Plain<T> {}
impl<T: 'static> Param for Plain<T> {
    type Shape = Plain<T>;
    type Twin<'a> = T;
    const LAYOUT: (usize, usize) = layout_of::<T>();
    unsafe fn twin(args: &ArgBlock, index: usize) -> T {
        const { assert!(size_of::<T>() > 0, "a kernel's parameter has a size") };
        let bytes = args.value(index, size_of::<T>());
        // SAFETY: the caller vouches that the argument was pushed for this type, so from a `Plain<T>`:
        // these bytes are a whole `T`, and its proof says that it is plain data. No alignment is needed.
        unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
    }
}
impl<'k, T: 'static> Arg<'k, Plain<T>> for Plain<T> {
    fn push(self, list: &mut ArgList<'k>) -> Plain<T> {
        list.block.push_value((self.proof.bytes)(&self.value));
        self
    }
}
impl<'k, T: Element + fmt::Debug> Arg<'k, Plain<T>> for T {
    fn push(self, list: &mut ArgList<'k>) -> Plain<T> {
        Plain::new(self, proof()).push(list)
    }
}

impl<T> Clone for Proof<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Proof<T> {}

impl<T> Clone for Plain<T> {
    fn clone(&self) -> Self {
        Plain { value: self.get(), proof: self.proof }
    }
}

impl<T> fmt::Debug for Plain<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.proof.debug)(&self.value, f)
    }
}
