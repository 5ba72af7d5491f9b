//! How `kernel!` parses the types of a declaration's arrays and values.
//!
//! | macro | parses |
//! |---|---|
//! | `__kernel_array!` | an array's element type, which must be plain data |
//! | `__kernel_value!` | the type of a value: numbers stand for themselves, other types are [`Plain`](super::plain::Plain) |
#![forbid(unsafe_code)]

/// The type that a launch passes for an array, whose elements must be plain data.
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel_array {
    ([$type:ty] $arg:ident) => {{
        // As for values, this line alone is in error.
        const _: () = $crate::__private::element::<$type>();
        $arg
    }};
}

/// The type of a value: its marker (`type`), what a launch passes (`pass`, and `pass_derived`, which may have no value) and what conditions
/// see (`see`). Expressions see integers as `i128` (`shadow`, `derive`), and their results must fit (`fit`).
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel_value {
    (type [u8]) => { u8 };
    (pass [u8] $arg:ident) => { $arg };
    (pass_derived [u8] $arg:ident) => { $arg.unwrap_or_default() };
    (see [u8] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [u8] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [u8] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [u8] $arg:ident) => { let $arg = $crate::__private::fit::<u8>(::core::stringify!($arg), $arg)?; };
    (type [u16]) => { u16 };
    (pass [u16] $arg:ident) => { $arg };
    (pass_derived [u16] $arg:ident) => { $arg.unwrap_or_default() };
    (see [u16] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [u16] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [u16] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [u16] $arg:ident) => { let $arg = $crate::__private::fit::<u16>(::core::stringify!($arg), $arg)?; };
    (type [u32]) => { u32 };
    (pass [u32] $arg:ident) => { $arg };
    (pass_derived [u32] $arg:ident) => { $arg.unwrap_or_default() };
    (see [u32] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [u32] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [u32] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [u32] $arg:ident) => { let $arg = $crate::__private::fit::<u32>(::core::stringify!($arg), $arg)?; };
    (type [u64]) => { u64 };
    (pass [u64] $arg:ident) => { $arg };
    (pass_derived [u64] $arg:ident) => { $arg.unwrap_or_default() };
    (see [u64] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [u64] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [u64] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [u64] $arg:ident) => { let $arg = $crate::__private::fit::<u64>(::core::stringify!($arg), $arg)?; };
    (type [usize]) => { usize };
    (pass [usize] $arg:ident) => { $arg };
    (pass_derived [usize] $arg:ident) => { $arg.unwrap_or_default() };
    (see [usize] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [usize] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [usize] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [usize] $arg:ident) => { let $arg = $crate::__private::fit::<usize>(::core::stringify!($arg), $arg)?; };
    (type [i8]) => { i8 };
    (pass [i8] $arg:ident) => { $arg };
    (pass_derived [i8] $arg:ident) => { $arg.unwrap_or_default() };
    (see [i8] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [i8] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [i8] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [i8] $arg:ident) => { let $arg = $crate::__private::fit::<i8>(::core::stringify!($arg), $arg)?; };
    (type [i16]) => { i16 };
    (pass [i16] $arg:ident) => { $arg };
    (pass_derived [i16] $arg:ident) => { $arg.unwrap_or_default() };
    (see [i16] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [i16] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [i16] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [i16] $arg:ident) => { let $arg = $crate::__private::fit::<i16>(::core::stringify!($arg), $arg)?; };
    (type [i32]) => { i32 };
    (pass [i32] $arg:ident) => { $arg };
    (pass_derived [i32] $arg:ident) => { $arg.unwrap_or_default() };
    (see [i32] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [i32] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [i32] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [i32] $arg:ident) => { let $arg = $crate::__private::fit::<i32>(::core::stringify!($arg), $arg)?; };
    (type [i64]) => { i64 };
    (pass [i64] $arg:ident) => { $arg };
    (pass_derived [i64] $arg:ident) => { $arg.unwrap_or_default() };
    (see [i64] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [i64] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [i64] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [i64] $arg:ident) => { let $arg = $crate::__private::fit::<i64>(::core::stringify!($arg), $arg)?; };
    (type [isize]) => { isize };
    (pass [isize] $arg:ident) => { $arg };
    (pass_derived [isize] $arg:ident) => { $arg.unwrap_or_default() };
    (see [isize] $arg:ident) => { $crate::Integer::wide($arg) };
    (shadow [isize] $arg:ident) => { let $arg = $crate::Integer::wide($arg); };
    (derive [isize] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $crate::Integer::wide($value));
    };
    (fit [isize] $arg:ident) => { let $arg = $crate::__private::fit::<isize>(::core::stringify!($arg), $arg)?; };
    (type [f32]) => { f32 };
    (pass [f32] $arg:ident) => { $arg };
    (pass_derived [f32] $arg:ident) => { $arg.unwrap_or_default() };
    (see [f32] $arg:ident) => { $arg };
    (type [f64]) => { f64 };
    (pass [f64] $arg:ident) => { $arg };
    (pass_derived [f64] $arg:ident) => { $arg.unwrap_or_default() };
    (see [f64] $arg:ident) => { $arg };
    (type [$type:ty]) => { $crate::__private::Plain<$type> };
    (pass [$type:ty] $arg:ident) => {{
        // For a type that is not plain data, this line alone is in error, and the error points at the type.
        const __PROOF: $crate::__private::Proof<$type> = $crate::__private::proof::<$type>();
        $crate::__private::Plain::new($arg, __PROOF)
    }};
    (pass_derived [$type:ty] $arg:ident) => {{
        const __PROOF: $crate::__private::Proof<$type> = $crate::__private::proof::<$type>();
        $crate::__private::Plain::or_zero($arg, __PROOF)
    }};
    (see [$type:ty] $arg:ident) => {{
        let $arg = $crate::__private::Plain::get(&$arg);
        $crate::__kernel_value!(shown [$type] $arg)
    }};
    (shadow [f32] $arg:ident) => {};
    (shadow [f64] $arg:ident) => {};
    (shadow [$type:ty] $arg:ident) => { let $arg = $crate::__kernel_value!(shown [$type] $arg); };
    (derive [f32] $arg:ident $value:expr) => { let $arg: f32 = $crate::__private::evaluate(::core::stringify!($arg), || $value); };
    (derive [f64] $arg:ident $value:expr) => { let $arg: f64 = $crate::__private::evaluate(::core::stringify!($arg), || $value); };
    (derive [$type:ty] $arg:ident $value:expr) => {
        let $arg = $crate::__private::evaluate(::core::stringify!($arg), || $value);
        let $arg = $crate::__kernel_value!(shown [$type] $arg);
    };
    (fit [f32] $arg:ident) => {};
    (fit [f64] $arg:ident) => {};
    (fit [$type:ty] $arg:ident) => {
        let $arg: $type = {
            #[allow(unused_imports, reason = "one of them is used")]
            use $crate::__private::{FitInteger as _, FitValue as _};
            (&&&$crate::__private::Named::<$type, _>(&$arg, ::core::marker::PhantomData))
                .fitted(::core::stringify!($arg))?
        };
    };
    // An alias of an integer counts as one.
    (shown [$type:ty] $arg:ident) => {{
        #[allow(unused_imports, reason = "one of them is used")]
        use $crate::__private::{NamedAny as _, NamedInteger as _, NamedValue as _};
        (&&&$crate::__private::Named::<$type, _>(&$arg, ::core::marker::PhantomData)).shown()
    }};
}
