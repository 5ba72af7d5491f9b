//! The types of a kernel's arguments.
//!
//! A kernel is typed by a tuple of markers without lifetimes; a launch passes a tuple of arguments
//! that fit them:
//!
//! | marker | passed as | the device sees | the host twin sees |
//! |---|---|---|---|
//! | a plain type, e.g. `f32` | itself | the value | the value |
//! | [`Value<T>`] | `T`, any plain type of your own | the value | the value |
//! | [`In<T>`] | `&buffer`, `&view` | `const T*` | `&[T]` |
//! | [`InOut<T>`] | `&mut buffer`, `&mut view` | `T*` | `&mut [T]` |
//! | [`Out<T>`] | likewise; the kernel overwrites all of it | `T*` | `&mut [T]` |
//! | [`Flag`] | `&PinnedFlag` | `unsigned*` | `&AtomicU32` |

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use bytemuck::Pod;

use super::integers::Len;
use crate::backend::{ArgBlock, Grid, HostTwin};
use crate::error::image::ParamLayout;
use crate::memory::allocation::ALIGNMENT;
use crate::memory::must_fit;
use crate::memory::pinned::PinnedFlag;
use crate::memory::view::{Readable, Writable};
use crate::submit::Footprint;
use gpu_await_protocol::hazard::Mode;

/// Marker: an array that the kernel reads.
#[derive(Debug)]
pub struct In<T>(PhantomData<fn() -> T>);

/// Marker: an array that the kernel may read and write. All of it must have been written.
#[derive(Debug)]
pub struct InOut<T>(PhantomData<fn() -> T>);

/// Marker: an array of which the kernel overwrites every element before reading any. Unwritten memory is
/// accepted, and counts as written from then on.
#[derive(Debug)]
pub struct Out<T>(PhantomData<fn() -> T>);

/// Marker: a plain value of your own type, in the signature of a [`Kernel`](crate::Kernel) that is looked up at
/// run time. In [`kernel!`](crate::kernel!) the type stands for itself.
#[derive(Debug)]
pub struct Value<T>(PhantomData<fn() -> T>);

/// Marker: a word that the host and the running kernel share, a [`PinnedFlag`].
#[derive(Debug)]
pub struct Flag(());

/// Size and alignment of a pointer in a kernel's parameters.
const ADDRESS: (usize, usize) = (8, 8);

/// Size and alignment of a value: C++ has no values without a size.
pub(super) const fn layout_of<T>() -> (usize, usize) {
    assert!(size_of::<T>() > 0, "a kernel's parameter has a size");
    (size_of::<T>(), align_of::<T>())
}

/// One argument's type. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a type of kernel parameters",
    label = "not a kernel parameter",
    note = "parameters are numbers, `Value<T>` for plain data of yours, the arrays `In<T>`, `InOut<T>` and `Out<T>`, and `Flag`"
)]
pub trait Param: sealed::Sealed + 'static {
    /// The type that a precondition sees: the value, or the [`Len`] of an array.
    type Shape: Clone + Debug + 'static;
    /// The type that the host twin receives.
    type Twin<'a>;
    /// Size and alignment of the passed argument, in bytes.
    #[doc(hidden)]
    const LAYOUT: (usize, usize) = ADDRESS;

    /// Reads the argument for the twin.
    ///
    /// # Safety
    /// Argument `index` of `args` was pushed for this very type, its memory is live and exclusive
    /// (or only read, for [`In`]) for `'a`.
    #[doc(hidden)]
    unsafe fn twin<'a>(args: &'a ArgBlock, index: usize) -> Self::Twin<'a>;

    /// `name = 3`, `name.len() = 3`.
    #[doc(hidden)]
    fn describe(shape: &Self::Shape, name: &str) -> String {
        format!("{name} = {shape:?}")
    }
}

/// Something that can be passed for `P`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed to a kernel for its parameter `{P}`",
    label = "not an argument for `{P}`",
    note = "for `In<T>` pass `&DeviceBuffer<T>`, `&View<T>` or `&Frozen<T>`; for `InOut<T>` and `Out<T>` \
            `&mut DeviceBuffer<T>` or `&mut ViewMut<T>`; for rows `&View2<T>` or `&mut ViewMut2<T>`; for `Flag` `&PinnedFlag`; for a number that number; for `Value<T>` a `T`",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does",
    note = "host memory is uploaded first: `stream.upload(vec).queued()?`"
)]
pub trait Arg<'k, P: Param> {
    #[doc(hidden)]
    fn push(self, list: &mut ArgList<'k>) -> P::Shape;
}

/// A tuple of [`Param`] markers, up to sixteen. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the signature of a kernel",
    label = "not a tuple of kernel parameters",
    note = "a signature is a tuple of at most sixteen parameters, `(InOut<f32>,)` for a single one"
)]
pub trait Signature: sealed::Sealed + Sized + 'static {
    /// The types that preconditions see: a tuple of the arguments' shapes.
    type Shapes: 'static;
    #[doc(hidden)]
    fn describe(shapes: &Self::Shapes, names: &[&str]) -> String;
    /// The parameters of a kernel with these types.
    #[doc(hidden)]
    fn layout() -> Vec<ParamLayout>;
}

/// A tuple of arguments that fit `S`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not the arguments of a kernel with the signature `{S}`",
    label = "other arguments than the signature's",
    note = "arguments are a tuple with one for each parameter of the signature, `(x,)` for a single one"
)]
pub trait Args<'k, S: Signature> {
    #[doc(hidden)]
    fn collect(self, list: &mut ArgList<'k>) -> S::Shapes;
}

/// A kernel's host twin: a function of the grid and the arguments' twin types.
#[diagnostic::on_unimplemented(
    message = "this is not a host twin of a kernel with the signature `{S}`",
    label = "not a twin for `{S}`",
    note = "a twin takes `&Grid`, then for each parameter what the twin sees: `&[T]` for `In<T>`, `&mut [T]` for \
            `InOut<T>` and `Out<T>`, `&AtomicU32` for `Flag`, numbers as they are; and it returns nothing"
)]
pub trait TwinFn<S: Signature>: Send + Sync + 'static {
    #[doc(hidden)]
    fn erase(self) -> Erased;
}

/// A twin with its types erased.
pub(crate) type Erased = HostTwin;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// The arguments of a launch, while they are collected.
#[doc(hidden)]
pub struct ArgList<'k> {
    pub(crate) block: ArgBlock,
    pub(crate) footprint: Footprint<'k>,
    /// Whether the kernel may wait for the host.
    pub(crate) waits: bool,
}

impl<'k> ArgList<'k> {
    // Inlined, as every push is: starting from an empty list, the compiler then knows each argument's place.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        ArgList { block: ArgBlock::default(), footprint: Footprint::new("a launch"), waits: false }
    }
}

macro_rules! scalars {
    ($($type:ty)+) => {$(
        impl sealed::Sealed for $type {}
        impl Param for $type {
            type Shape = $type;
            type Twin<'a> = $type;
            const LAYOUT: (usize, usize) = layout_of::<$type>();
            unsafe fn twin(args: &ArgBlock, index: usize) -> $type {
                bytemuck::pod_read_unaligned(args.value(index, size_of::<$type>()))
            }
        }
        impl<'k> Arg<'k, $type> for $type {
            #[inline(always)]
            fn push(self, list: &mut ArgList<'k>) -> $type {
                list.block.push_value(bytemuck::bytes_of(&self));
                self
            }
        }
    )+};
}
scalars! { u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 half::f16 half::bf16 }

impl<T> sealed::Sealed for Value<T> {}
impl<T: Pod + Debug + Send + Sync> Param for Value<T> {
    type Shape = T;
    type Twin<'a> = T;
    const LAYOUT: (usize, usize) = layout_of::<T>();
    unsafe fn twin(args: &ArgBlock, index: usize) -> T {
        const { must_fit::<T>(u64::MAX) };
        bytemuck::pod_read_unaligned(args.value(index, size_of::<T>()))
    }
}
impl<'k, T: Pod + Debug + Send + Sync> Arg<'k, Value<T>> for T {
    #[inline(always)]
    fn push(self, list: &mut ArgList<'k>) -> T {
        const { must_fit::<T>(u64::MAX) };
        list.block.push_value(bytemuck::bytes_of(&self));
        self
    }
}

impl<T> sealed::Sealed for In<T> {}
// A buffer requires `Element`, and so does everything passed for an array. The markers require nothing.
impl<T: 'static> Param for In<T> {
    type Shape = Len;
    type Twin<'a> = &'a [T];
    unsafe fn twin(args: &ArgBlock, index: usize) -> &[T] {
        let (start, len) = array::<T>(args, index);
        // SAFETY: the caller vouches for the memory; `start` is aligned and not null even if empty.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
    fn describe(shape: &Len, name: &str) -> String {
        format!("{name}.len() = {}", shape.len())
    }
}
impl<'k, T: 'static, B: Readable<T>> Arg<'k, In<T>> for &'k B {
    #[inline(always)]
    fn push(self, list: &mut ArgList<'k>) -> Len {
        let len = Len::of(self);
        let span = self.span();
        list.footprint.touches_named(&span, Mode::Read);
        push_array(list, &span);
        len
    }
}

macro_rules! written_arrays {
    ($($marker:ident $mode:ident)+) => {$(
        impl<T> sealed::Sealed for $marker<T> {}
        impl<T: 'static> Param for $marker<T> {
            type Shape = Len;
            type Twin<'a> = &'a mut [T];
            unsafe fn twin(args: &ArgBlock, index: usize) -> &mut [T] {
                let (start, len) = array::<T>(args, index);
                // SAFETY: the caller vouches for the memory, and that nobody else uses it;
                // `start` is aligned and not null even if empty.
                unsafe { std::slice::from_raw_parts_mut(start, len) }
            }
            fn describe(shape: &Len, name: &str) -> String {
                format!("{name}.len() = {}", shape.len())
            }
        }
        impl<'k, T: 'static, B: Writable<T>> Arg<'k, $marker<T>> for &'k mut B {
            #[inline(always)]
            fn push(self, list: &mut ArgList<'k>) -> Len {
                let len = Len::of(self);
                let span = self.span_mut();
                list.footprint.touches_named(&span, Mode::$mode);
                push_array(list, &span);
                len
            }
        }
    )+};
}
written_arrays! { InOut ReadWrite Out Overwrite }

impl sealed::Sealed for Flag {}
impl Param for Flag {
    type Shape = ();
    type Twin<'a> = &'a AtomicU32;
    unsafe fn twin(args: &ArgBlock, index: usize) -> &AtomicU32 {
        let word: *mut u32 = args.address(index) as *mut u32;
        // SAFETY: the caller vouches that the flag's block, which was lent to the launch, is live; all
        // access to it is atomic.
        unsafe { AtomicU32::from_ptr(word) }
    }
}
impl<'k> Arg<'k, Flag> for &'k PinnedFlag {
    fn push(self, list: &mut ArgList<'k>) {
        list.footprint.lends_flag(self.block());
        list.block.push_memory(self.block().device().0, 0);
        list.waits = true;
    }
}

#[inline(always)]
fn push_array(list: &mut ArgList<'_>, span: &crate::memory::view::Span<'_>) {
    let bytes = span.range.end - span.range.start;
    list.block.push_memory(span.ptr().0, bytes);
}

/// Address and length of an array argument; dangling but aligned for an empty one.
fn array<T>(args: &ArgBlock, index: usize) -> (*mut T, usize) {
    const { must_fit::<T>(ALIGNMENT) };
    let bytes = args.memory_bytes(index) as usize;
    if bytes == 0 {
        return (std::ptr::dangling_mut(), 0);
    }
    (args.address(index) as *mut T, bytes / size_of::<T>())
}

macro_rules! tuples {
    ($(($($param:ident $arg:ident $index:tt)+))+) => {$(
        impl<$($param: Param),+> sealed::Sealed for ($($param,)+) {}

        impl<$($param: Param),+> Signature for ($($param,)+) {
            type Shapes = ($($param::Shape,)+);
            fn describe(shapes: &Self::Shapes, names: &[&str]) -> String {
                let described: Vec<String> = vec![$({
                    let unnamed = concat!("argument ", stringify!($index));
                    let name = names.get($index).copied().unwrap_or(unnamed);
                    $param::describe(&shapes.$index, name)
                }),+];
                described.join(", ")
            }
            fn layout() -> Vec<ParamLayout> {
                ParamLayout::in_order([$($param::LAYOUT),+])
            }
        }

        impl<'k, $($param: Param, $arg: Arg<'k, $param>),+> Args<'k, ($($param,)+)> for ($($arg,)+) {
            #[inline(always)]
            fn collect(self, list: &mut ArgList<'k>) -> ($($param::Shape,)+) {
                ($(self.$index.push(list),)+)
            }
        }

        impl<Twin, $($param: Param),+> TwinFn<($($param,)+)> for Twin
        where
            Twin: for<'a> Fn(&Grid, $($param::Twin<'a>),+) + Send + Sync + 'static,
        {
            fn erase(self) -> HostTwin {
                Arc::new(move |grid, args| self(grid, $(
                    // SAFETY: `args` was collected for this signature, and the host device calls
                    // the twin while it may use the memory: live, and ordered by hazards.
                    unsafe { $param::twin(args, $index) }
                ),+))
            }
        }
    )+};
}
tuples! {
    (P0 A0 0)
    (P0 A0 0 P1 A1 1)
    (P0 A0 0 P1 A1 1 P2 A2 2)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10 P11 A11 11)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10 P11 A11 11 P12 A12 12)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10 P11 A11 11 P12 A12 12 P13 A13 13)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10 P11 A11 11 P12 A12 12 P13 A13 13 P14 A14 14)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7 P8 A8 8 P9 A9 9 P10 A10 10 P11 A11 11 P12 A12 12 P13 A13 13 P14 A14 14 P15 A15 15)
}

impl sealed::Sealed for () {}
impl Signature for () {
    type Shapes = ();
    fn describe(_shapes: &(), _names: &[&str]) -> String {
        "it has no arguments".to_owned()
    }
    fn layout() -> Vec<ParamLayout> {
        Vec::new()
    }
}
impl<'k> Args<'k, ()> for () {
    fn collect(self, _list: &mut ArgList<'k>) {}
}
impl<Twin: Fn(&Grid) + Send + Sync + 'static> TwinFn<()> for Twin {
    fn erase(self) -> HostTwin {
        Arc::new(move |grid, _args| self(grid))
    }
}
