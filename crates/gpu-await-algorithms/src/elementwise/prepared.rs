//! A formula with its argument types, and its kernel.
#![forbid(unsafe_code)]

use std::any::TypeId;
use std::sync::Arc;

use smallvec::SmallVec;

use super::arithmetic::Arithmetic;
use super::formula::{Formula, gives_flags, written};
use super::loaded::{Blueprint, ElementwiseKernel, KernelId};
use super::operand::MOST;
use super::ptx::Recipe;
use super::twin;
use gpu_await::sibling::Home;
use gpu_await::{ErrorDetail, Result};

/// Loads a formula's kernel, given which arguments are numbers, and whether its arrays are rows with pitches.
pub(super) type LoadFormula = fn(&Home, &[bool], bool) -> Result<Arc<ElementwiseKernel>>;

/// A formula over elements of one type, and which of its arguments are numbers.
#[doc(hidden)]
pub struct Prepared {
    scalars: SmallVec<[bool; MOST]>,
    rows: bool,
    load: LoadFormula,
}

impl Prepared {
    pub(super) fn new<T: Arithmetic, F: Formula<N>, const N: usize>(
        scalars: &[bool],
        rows: bool,
    ) -> Self {
        Prepared { scalars: scalars.into(), rows, load: kernel_of::<T, F, N> }
    }

    /// Its kernel, loaded by the first caller.
    pub(crate) fn kernel(&self, home: &Home) -> Result<Arc<ElementwiseKernel>> {
        (self.load)(home, &self.scalars, self.rows)
    }
}

/// The kernel of a formula; the first caller loads it.
pub(super) fn kernel_of<T: Arithmetic, F: Formula<N>, const N: usize>(
    home: &Home,
    scalars: &[bool],
    rows: bool,
) -> Result<Arc<ElementwiseKernel>> {
    assert_eq!(scalars.len(), N, "each argument of the formula is passed");
    let (of, element, flags) = (TypeId::of::<F>(), TypeId::of::<T>(), gives_flags::<T, F, N>());
    let id = KernelId { of, element, scalars: scalars.into(), flags, rows };
    ElementwiseKernel::get(home, id, &|loader| {
        let expression = Arc::new(written::<T, F, N>());
        if let Some(value) = expression.unfit_literal(T::KIND) {
            let (op, element) = ("transform", std::any::type_name::<T>());
            return Err(ErrorDetail::LiteralOutOfRange { op, value, element }.into());
        }
        loader.load(&Blueprint {
            name: if flags { "transform_flags" } else { "transform" },
            recipe: Recipe::Formula {
                kind: T::KIND,
                expression: &expression,
                scalars,
                flags,
                rows,
            },
            twin: twin::formula::<T>(&expression, scalars, flags, rows),
        })
    })
}
