//! The `kernel!` macro: the head of a declaration and its clauses.
//!
//! | macro | parses |
//! |---|---|
//! | `kernel!` | docs, visibility, `unsafe fn`, name; passes the arguments to `__kernel!` in `expansion.rs` |
//! | `__kernel_clauses!` | the clauses after the head, in any order |
//! | `__kernel_error!` | nothing: an invalid declaration ends there, with one message |
//!
//! # Invariants
//! 1. One mistake is one error (`mistakes_have_one_error`).
//! 2. The expressions in a declaration can name the arguments, and nothing that the macro defines (`names_of_a_declaration_take_none_of_ours`).
#![forbid(unsafe_code)]

/// Declares a kernel: its types, the preconditions on its arguments, and its code.
///
/// ```text
/// kernel! {
///     /// Docs.
///     pub unsafe fn NAME(ARGUMENTS)     // or NAME<T>(ARGUMENTS)
///         where CONDITION, CONDITION;    // or: where |config| CONDITION, CONDITION
///     launch = LAUNCH_CONFIG;        // may be left out: then a launch takes one
///     ptx = "...";                   // or cuda = "..."; may be left out: no CUDA devices then
///     entry = "...";                 // may be left out: NAME. Of NAME<T>: [f32: "...", f64: "..."]
///     host = path::to::twin;         // may be left out: no host devices then
///     programmatic = true;           // may be left out: it starts when what is in front of it is complete
/// }
/// ```
///
/// with its clauses in any order and code for at least one kind of device, makes `struct NAME` with
/// `NAME::load(&device).await?` (`NAME::load_blocking(&device)?` in sync code) and `.launch(&stream, ..)`,
/// which returns `Op<()>` on a [`Stream`](crate::Stream) and `Result<()>` on a [`Queue`](crate::Queue).
///
/// | declared | a launch takes | the CUDA kernel receives | the host twin receives |
/// |---|---|---|---|
/// | `a: f32`, any number type | `f32` | `float` | `f32` |
/// | `p: Params`, your own plain data | `Params` | the same struct | `Params` |
/// | `x: &[f32]` | `&` a buffer or view ([`Readable`](crate::Readable)) | `const float*` | `&[f32]` |
/// | `y: &mut [f32]` | `&mut` a buffer or view ([`Writable`](crate::Writable)) | `float*` | `&mut [f32]` |
/// | `y: Out<[f32]>` | likewise | `float*` | `&mut [f32]` |
/// | `x: &[[f32]]` | `&` a [`View2`](crate::View2) | `const float*` | [`Slice2<f32>`](crate::Slice2) |
/// | `y: &mut [[f32]]`, `y: Out<[[f32]]>` | `&mut` a [`ViewMut2`](crate::ViewMut2) | `float*` | [`SliceMut2<f32>`](crate::SliceMut2) |
/// | `x: &[&[f32]]` | `&` a [`BlockTable`](crate::BlockTable) | `const float* const*` | [`BlockSlices<f32>`](crate::BlockSlices) |
/// | `y: &mut [&mut [f32]]` | `&mut` a [`BlockTableMut`](crate::BlockTableMut) | `float* const*` | [`BlockSlicesMut<f32>`](crate::BlockSlicesMut) |
/// | `go: &PinnedFlag` | `&PinnedFlag` | `unsigned*` | [`&AtomicU32`](std::sync::atomic::AtomicU32) |
/// | `n: u64 = y.len()` | nothing: the launch computes it | `unsigned long long` | `u64` |
///
/// The twin is a function of [`&Grid`](crate::Grid) and these, in order; it is called once per launch. A
/// struct is passed by value, as in CUDA C++: `#[repr(C)]`, with its fields in the kernel's order,
/// `#[derive(Clone, Copy, Debug, Pod, Zeroable)]` of [`bytemuck`](crate::bytemuck) (with `#[bytemuck(crate =
/// "gpu_await::bytemuck")]`, unless the program depends on bytemuck itself), and no padding: fill gaps with a
/// field on both sides. Conditions and `launch` can read its fields. In CUDA C++, `f16` and `bf16` of `half` are `__half`
/// and `__nv_bfloat16`, `Complex<f32>` of `num-complex` is `float2`, and `Complex<f64>` is `double2`.
///
/// `ptx` is PTX text; `cuda` is CUDA C++, as text or as a [`CudaSource`](crate::CudaSource), which NVRTC
/// compiles when the kernel is loaded ([`Module::compile`](crate::Module::compile)). The entry is either
/// `extern "C"`, or an instance of a template: `entry = "scale<float>"`. PTX without the entry is refused on a host
/// device too ([`ErrorDetail::NoSuchKernel`](crate::ErrorDetail::NoSuchKernel), which lists the entries that exist).
///
/// Kernels over the same text share one module, loaded with the first of them and unloaded after the last: they share its `__device__` variables, as
/// in one `.cu` file, and only one load waits for the GPU.
///
/// `programmatic = true` (for programmatic dependent launch) says that every thread of every block executes `griddepcontrol.wait` before any load,
/// store, atomic, branch, return, call or trigger, whatever the arguments: before the guard `if (i >= n) return;`, and also where there is nothing to
/// do. A GPU of compute capability 9.0 may then start the kernel while the preceding launch, of such a kernel or another, is still ending, on a
/// stream and in replayed batches and graphs. Completion of the launch still proves completion of everything before it; a kernel that only
/// *sometimes* waits breaks that, and memory still in use would be reused. Make `asm volatile("griddepcontrol.wait;" ::: "memory");` the first
/// statement, and no parameter `__restrict__`: loads of constant data may be moved across the wait. PTX, which `cuda` is compiled to as well, is
/// checked when a device of compute capability 9.0 or later loads it, and must target such devices
/// ([`ErrorDetail::NotProgrammatic`](crate::ErrorDetail::NotProgrammatic)); for machine code ([`CudaSource::cubin`](crate::CudaSource::cubin)) the
/// declaration vouches. Debug builds (`-G`) mostly store before they wait, and are then refused. A kernel that waits for anything but the preceding
/// launch, such as a flag, must never execute `griddepcontrol.launch_dependents`. On other devices the clause has no effect; older ones lack the
/// instruction, so code for both puts it in `#if __CUDA_ARCH__ >= 900`. A preceding kernel must not write `__constant__` memory.
///
/// A declaration with a type parameter, `NAME<T>(a: T, x: &mut [T])`, is one kernel for each type that
/// `entry` lists, each with its own name in the code and loaded separately: `NAME::<f32>::load`. `NAME<T>`
/// needs `T: 'static`, which every [`Element`](crate::Element) is. The twin is a function generic in the
/// same way, with any bounds. Each instance is a separate type with its own methods: code that is generic over the
/// element needs a trait of your own, implemented for each listed type by a macro: `trait Scale: Element { fn
/// scale(on: &Stream, kernel: &scale<Self>, a: Self, x: &mut DeviceBuffer<Self>) -> Op<()>; }` (the
/// example `encoder` has a macro for such traits in `kernels.rs`).
///
/// Arguments are plain values (`a: f32`), arrays that are read (`x: &[f32]`), read and written (`y: &mut
/// [f32]`) or overwritten as a whole (`y: Out<[f32]>`), words shared with the host (`go: &PinnedFlag`), and
/// derived values that the launch computes (`n: u64 = y.len()`). The CUDA kernel receives arrays as
/// bare pointers. Only an `Out` accepts unwritten memory, such as that from `empty`: declare `Out` if the
/// kernel writes every element; otherwise pass `zeros`. An array that it writes in part is `&mut [T]`: the rest would be read later.
///
/// # Conditions and geometry
/// In conditions, `launch` and derived values, arrays have a `len()`, rows have `rows()`, `columns()` and `pitch()`, tables have `blocks()` and
/// `block_len()`, and values are themselves. Lengths and integer arguments are `i128` there, so that `x.len() == rows * columns` does not wrap around
/// for arguments of any type: the product of two 63-bit integers is exact, and so is that of four `u32`. Convert a constant, a field or a function's
/// result with [`wide`](crate::Integer::wide) to combine it with them. A derived value takes an integer of any type; one that its parameter cannot
/// hold refuses the launch ([`ErrorDetail::IntegerRange`](crate::ErrorDetail::IntegerRange)), and so does a division by zero or any other panic
/// ([`ErrorDetail::Evaluation`](crate::ErrorDetail::Evaluation)). You vouch for what you convert with `as`, and for integers that keep their own
/// type: fields without `wide`, and a literal on the left of a shift, `1 << log`, which is an `i32` as anywhere in Rust: write `1_i128 << log`.
///
/// Derived values are computed first, in order, then `launch`, then the conditions, which see all of them. A derived value can name any argument,
/// even a later one, and the derived values before it. So a condition cannot protect a derived value from a divisor of 0; the launch is refused all
/// the same, and the error names the value.
///
/// `|config|` names the [`LaunchConfig`](crate::LaunchConfig) for the conditions. Loading on a GPU compares
/// the number, sizes and alignments of the parameters with those of the compiled kernel
/// ([`ErrorDetail::WrongParameters`](crate::ErrorDetail::WrongParameters)), where the driver reports them
/// (CUDA 12.4).
///
/// Errors and [reports](crate::Region::last_run) name the line that called `launch`. Put `#[track_caller]` on
/// a wrapper function, so that they name its caller's line instead.
///
/// # Safety
/// By writing `unsafe fn` you vouch that these types match the CUDA source, and that for all arguments
/// and geometries that the `where` lines and `launch` admit, the kernel stays inside its arrays and
/// overwrites all of those declared `Out`. Without `launch`, that means any geometry.
///
/// # Examples
/// ```
/// use gpu_await::{Device, Grid, LaunchConfig, kernel};
///
/// kernel! {
///     /// `y = y * y`.
///     pub unsafe fn square(y: &mut [f32], n: u64 = y.len());
///     launch = LaunchConfig::for_elements(y.len());
///     host = twin;
/// }
/// fn twin(_: &Grid, y: &mut [f32], _n: u64) {
///     y.iter_mut().for_each(|y| *y *= *y);
/// }
///
/// # futures::executor::block_on(async {
/// let device = Device::host();
/// let square = square::load(&device).await?;
/// let stream = device.stream()?;
/// let mut y = stream.upload(vec![1.0, 2.0, 3.0]).queued()?;
/// square.launch(&stream, &mut y).queued()?;
/// assert_eq!(stream.download(&y).await?, [1.0, 4.0, 9.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
///
/// One template of CUDA C++, and one generic twin, for two types:
/// ```
/// use std::ops::MulAssign;
/// use gpu_await::{Device, Grid, LaunchConfig, kernel};
///
/// kernel! {
///     /// `x[i] *= a`.
///     pub unsafe fn scale<T>(a: T, x: &mut [T], n: u64 = x.len());
///     launch = LaunchConfig::for_elements(x.len());
///     entry = [f32: "scale<float>", f64: "scale<double>"];
///     cuda = "template <typename T> __global__ void scale(T a, T* x, unsigned long long n) {
///         unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
///         if (i < n) x[i] *= a;
///     }";
///     host = twin;
/// }
/// fn twin<T: Copy + MulAssign>(_: &Grid, a: T, x: &mut [T], _n: u64) {
///     x.iter_mut().for_each(|x| *x *= a);
/// }
///
/// # futures::executor::block_on(async {
/// # let device = Device::host();
/// let scale = scale::<f64>::load(&device).await?;
/// let mut x = device.upload(vec![1.0, 2.0]).queued()?;
/// scale.launch(&device.current_stream(), 0.5, &mut x).queued()?;
/// assert_eq!(device.download(&x).await?, [0.5, 1.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[macro_export]
macro_rules! kernel {
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident $(<$of:ident>)? ( $($args:tt)* ) -> $($rest:tt)*
    ) => {
        $crate::__kernel_error! {
            $name, "a kernel returns nothing: write the result to a parameter `Out<[T]>`"
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident $(<$of:ident>)? ( $($args:tt)* ) where $($clauses:tt)*
    ) => {
        $crate::__kernel_clauses! {
            [[$(#[$meta])*] [$vis] $name [$($of)?] [$($args)*]]
            where [] launch [] code [] entry [] host []
            read [where $($clauses)*]
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident $(<$of:ident>)? ( $($args:tt)* ) ; $($clauses:tt)*
    ) => {
        $crate::__kernel_clauses! {
            [[$(#[$meta])*] [$vis] $name [$($of)?] [$($args)*]]
            where [] launch [] code [] entry [] host []
            read [$($clauses)*]
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident $(<$of:ident>)? ( $($args:tt)* ) $($rest:tt)*
    ) => {
        $crate::__kernel_error! { $name, "expected `;` or `where` behind the parameters" }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident < $($rest:tt)*
    ) => {
        $crate::__kernel_error! {
            $name, "a kernel has one type parameter at most, without bounds: `",
            ::core::stringify!($name), "<T>`; the clause `entry` lists its types"
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $($rest:tt)*
    ) => {
        $crate::__kernel_error! {
            $name,
            "write `unsafe fn`: a declaration vouches for the kernel's types and bounds"
        }
    };
}

/// Ends a declaration with one message.
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel_error {
    ($name:ident, $($message:expr),+) => {
        ::core::compile_error!(::core::concat!(
            "kernel `", ::core::stringify!($name), "`: ", $($message),+
        ));
    };
}

/// Parses one clause after another, in any order.
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel_clauses {
    // all clauses parsed, `programmatic` among them: a property of the code for GPUs
    ([$meta:tt $vis:tt $name:ident $of:tt $args:tt programmatic]
        where $where:tt launch $launch:tt code [] entry $entry:tt host $host:tt read []) => {
        $crate::__kernel_clauses! {
            [$meta $vis $name $of $args] where $where launch $launch code [] entry $entry host $host read []
        }
    };
    ([$meta:tt $vis:tt $name:ident $of:tt $args:tt programmatic]
        where $where:tt launch $launch:tt code $code:tt entry $entry:tt host $host:tt read []) => {
        $crate::__kernel_clauses! {
            [$meta $vis $name $of $args]
            where $where launch $launch code [programmatic $code] entry $entry host $host read []
        }
    };
    // all clauses parsed, and no code among them
    ([$meta:tt $vis:tt $name:ident $of:tt $args:tt]
        where $where:tt launch $launch:tt code [] entry $entry:tt host [] read []) => {
        $crate::__kernel_error! {
            $name,
            "there is no code: add `ptx = ..;` or `cuda = ..;` for GPUs, `host = ..;` for host devices, or both"
        }
    };
    // all clauses parsed: types are listed if there is a type parameter
    ([$meta:tt $vis:tt $name:ident [$of:ident] [$($args:tt)*]]
        where [$($where:tt)*] launch $launch:tt code $code:tt entry [of $($entry:tt)+] host $host:tt read []) => {
        $crate::__kernel! {
            @args [ $($args)* , ]
            types [] takes [] shapes [] before [] passes [] names [] idents [] seen []
            rest [$meta $vis $name [$of] [$($where)*] $launch $code [of $($entry)+] $host]
        }
    };
    ([$meta:tt $vis:tt $name:ident [$of:ident] $args:tt]
        where $where:tt launch $launch:tt code $code:tt entry $entry:tt host $host:tt read []) => {
        $crate::__kernel_error! {
            $name, "list the types that `", ::core::stringify!($of), "` may be, each with the kernel's name: `entry = [f32: \"",
            ::core::stringify!($name), "_f32\", f64: \"", ::core::stringify!($name), "_f64\"];`"
        }
    };
    ([$meta:tt $vis:tt $name:ident [] $args:tt]
        where $where:tt launch $launch:tt code $code:tt entry [of $($entry:tt)+] host $host:tt read []) => {
        $crate::__kernel_error! {
            $name, "`entry` lists types, and there is no type parameter: declare `",
            ::core::stringify!($name), "<T>(..)`"
        }
    };
    // all clauses parsed
    ([$meta:tt $vis:tt $name:ident [] [$($args:tt)*]]
        where [$($where:tt)*] launch $launch:tt code $code:tt entry $entry:tt host $host:tt read []) => {
        $crate::__kernel! {
            @args [ $($args)* , ]
            types [] takes [] shapes [] before [] passes [] names [] idents [] seen []
            rest [$meta $vis $name [] [$($where)*] $launch $code $entry $host]
        }
    };
    ($head:tt where [] launch $launch:tt code $code:tt entry $entry:tt host $host:tt
        read [where |$config:ident| $($condition:expr),+ $(,)? ; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where [[$config] $([$condition])+]
            launch $launch code $code entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where [] launch $launch:tt code $code:tt entry $entry:tt host $host:tt
        read [where $($condition:expr),+ $(,)? ; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where [[_config] $([$condition])+]
            launch $launch code $code entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch [] code $code:tt entry $entry:tt host $host:tt
        read [launch = $launch:expr; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch [$launch] code $code entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code [] entry $entry:tt host $host:tt
        read [ptx = $code:expr; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch $launch code [ptx $code] entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code [] entry $entry:tt host $host:tt
        read [cuda = $code:expr; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch $launch code [cuda $code] entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code $code:tt entry [] host $host:tt
        read [entry = [ $($type:ty : $entry:expr),+ $(,)? ]; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch $launch code $code entry [of $([$type] [$entry])+] host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code $code:tt entry [] host $host:tt
        read [entry = $entry:expr; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch $launch code $code entry [$entry] host $host read [$($more)*]
        }
    };
    ([$meta:tt $vis:tt $name:ident $of:tt $args:tt]
        where $where:tt launch $launch:tt code $code:tt entry $entry:tt host $host:tt
        read [programmatic = true; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            [$meta $vis $name $of $args programmatic] where $where
            launch $launch code $code entry $entry host $host read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code $code:tt entry $entry:tt host []
        read [host = $host:expr; $($more:tt)*]) => {
        $crate::__kernel_clauses! {
            $head where $where
            launch $launch code $code entry $entry host [$host] read [$($more)*]
        }
    };
    ($head:tt where $where:tt launch $launch:tt code $code:tt entry $entry:tt host $host:tt
        read $wrong:tt) => {
        $crate::__kernel_clauses! { @wrong $head $wrong }
    };
    (@wrong [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] [where $($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name,
            "one `where` with all conditions, separated by `,` and ended by `;`, at `where ",
            ::core::stringify!($($rest)*), "`"
        }
    };
    (@wrong $head:tt [programmatic = $value:literal; $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @programmatic $head $value }
    };
    (@programmatic [$meta:tt $vis:tt $name:ident $of:tt $args:tt programmatic] $value:literal) => {
        $crate::__kernel_error! { $name, "there are two clauses `programmatic`: remove one" }
    };
    (@programmatic [$meta:tt $vis:tt $name:ident $of:tt $args:tt] $value:literal) => {
        $crate::__kernel_error! {
            $name, "`programmatic = true;`, or no such clause: a kernel that does not wait first is not"
        }
    };
    (@wrong $head:tt [launch = $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @known $head launch [$($rest)*] }
    };
    (@wrong $head:tt [ptx = $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @known $head ptx [$($rest)*] }
    };
    (@wrong $head:tt [cuda = $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @known $head cuda [$($rest)*] }
    };
    (@wrong $head:tt [entry = $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @known $head entry [$($rest)*] }
    };
    (@wrong $head:tt [host = $($rest:tt)*]) => {
        $crate::__kernel_clauses! { @known $head host [$($rest)*] }
    };
    (@wrong [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] [$clause:ident $($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "`", ::core::stringify!($clause),
            "` is not a clause: there are `where`, `launch`, `ptx`, `cuda`, `entry`, `programmatic` and `host`, as in `host = twin;`"
        }
    };
    (@wrong [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] [$($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "expected a clause such as `host = twin;`, found `",
            ::core::stringify!($($rest)*), "`"
        }
    };
    (@known [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] ptx [$value:expr; $($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "there is code for GPUs twice: one clause is enough, `ptx` or `cuda`"
        }
    };
    (@known [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] cuda [$value:expr; $($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "there is code for GPUs twice: one clause is enough, `ptx` or `cuda`"
        }
    };
    (@known [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] $clause:ident [$value:expr; $($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "there are two clauses `", ::core::stringify!($clause), "`: remove one"
        }
    };
    (@known [$meta:tt $vis:tt $name:ident $of:tt $args:tt $($programmatic:tt)?] $clause:ident [$($rest:tt)*]) => {
        $crate::__kernel_error! {
            $name, "the clause `", ::core::stringify!($clause), "` must end with `;`"
        }
    };
}
