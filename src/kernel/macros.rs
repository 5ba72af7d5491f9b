//! The `kernel!` macro and what it expands to.
//!
//! `unsafe fn` in a declaration is its author's signature; nothing else in the expansion lets safe code,
//! also of the declaring module, launch the kernel in another way than declared (`must_not_compile.rs`):
//!
//! | part of the expansion | why it is out of reach |
//! |---|---|
//! | the field | a [`Declared`], whose kernel only an `unsafe fn` hands out |
//! | the struct's literal | needs a [`Declared`] of this very declaration, which only loading makes |
//! | what the declaration says | an `unsafe impl` of [`Declaration`] |
//! | expressions of the author's | never inside an `unsafe` block of ours; they see the arguments' names and none of ours |
//!
//! More than 500 lines: one macro, whose rules are read together.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::KernelAttributes;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::image::Image;
use crate::kernel::module::Module;
use crate::kernel::occupancy::Occupancy;
use crate::kernel::signature::{Erased, Signature};
use crate::runtime::Engine;
use crate::runtime::coop;
use crate::thread::role;
use crate::thread::worker::offload;

/// What [`kernel!`](crate::kernel!) says of a kernel.
///
/// # Safety
/// The implementor vouches for what `kernel!` asks: the signature is that of the kernel's source, and
/// for all arguments that the requirements admit it stays inside its arrays, and overwrites all of those
/// that are [`Out`](crate::Out).
#[doc(hidden)]
pub unsafe trait Declaration<S: Signature>: Sized + 'static {
    /// The arguments' names, for messages.
    const ARGUMENTS: &'static [&'static str];
    fn code() -> Code;
    /// Adds what must hold of the arguments.
    fn require(kernel: Kernel<S>) -> Kernel<S>;
}

/// A kernel's code for each kind of device.
#[doc(hidden)]
pub struct Code {
    pub name: &'static str,
    pub entry: &'static str,
    pub ptx: Option<Cow<'static, str>>,
    pub twin: Option<Erased>,
}

/// The kernel of the declaration `K`, and of no other one: loaded, with its requirements, and out of reach
/// of safe code. Launched as it is, it would have any geometry and any derived arguments.
#[doc(hidden)]
pub struct Declared<K, S: Signature> {
    kernel: Kernel<S>,
    declaration: PhantomData<fn() -> K>,
}

impl<K: Declaration<S>, S: Signature> Declared<K, S> {
    /// Loads the code for the device's kind, off the executor.
    ///
    /// # Errors
    /// As [`Module::load`] and [`Module::kernel`];
    /// [`ErrorDetail::NoImplementation`](crate::ErrorDetail::NoImplementation) where the declaration has no
    /// code for the device's kind.
    pub async fn load(device: &Device) -> Result<Self> {
        coop::proceed().await;
        role::check_driver("loading a kernel")?;
        let (engine, code) = (device.engine().clone(), K::code());
        if engine.backend.kind() == crate::DeviceKind::Host {
            return Declared::of(code, &engine);
        }
        offload(move || Declared::of(code, &engine)).await?
    }

    /// [`load`](Self::load) on the calling thread.
    ///
    /// # Errors
    /// As [`load`](Self::load); a thread on which it would dead-lock.
    pub fn load_blocking(device: &Device) -> Result<Self> {
        role::check("loading a kernel")?;
        Declared::load_now(device.engine())
    }

    /// [`load`](Self::load) on the calling thread, whichever it is.
    pub(crate) fn load_now(engine: &Arc<Engine>) -> Result<Self> {
        Declared::of(K::code(), engine)
    }

    fn of(code: Code, engine: &Arc<Engine>) -> Result<Self> {
        engine.check_open()?;
        let kernel = match (engine.backend.kind(), code.ptx, code.twin) {
            (crate::DeviceKind::Host, _, Some(twin)) => {
                Kernel::host_erased(engine, code.name, twin)?
            }
            (crate::DeviceKind::Cuda, Some(ptx), _) => {
                let module = Module::load_now(engine, Image::ptx(ptx).named(code.name))?;
                // SAFETY: who declared `K` vouches for the signature, and for what `K::require` admits.
                unsafe { module.kernel(code.entry) }?
            }
            _ => return Err(super::no_implementation(code.name, engine)),
        };
        let kernel = K::require(kernel.named(K::ARGUMENTS));
        Ok(Declared { kernel, declaration: PhantomData })
    }

    /// What the compiler made of the kernel.
    pub fn attributes(&self) -> KernelAttributes {
        self.kernel.attributes()
    }

    /// How many blocks run at once.
    pub fn occupancy(&self) -> Occupancy<'_> {
        self.kernel.occupancy()
    }

    /// The kernel behind its declaration.
    ///
    /// # Safety
    /// It is launched with the declaration's geometry, where it has one, and its derived arguments; or
    /// with others for which it stays inside its arrays as well.
    pub unsafe fn kernel(&self) -> &Kernel<S> {
        &self.kernel
    }
}

impl<K, S: Signature> Clone for Declared<K, S> {
    fn clone(&self) -> Self {
        Declared { kernel: self.kernel.clone(), declaration: PhantomData }
    }
}

impl<K, S: Signature> fmt::Debug for Declared<K, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel.fmt(f)
    }
}

/// Declares a kernel: its types, what must hold of its arguments, and its code.
///
/// ```text
/// kernel! {
///     /// Docs.
///     pub unsafe fn NAME(ARGUMENTS)
///         where CONDITION, CONDITION;    // or: where |config| CONDITION, CONDITION
///     launch = LAUNCH_CONFIG;        // may be left out: then a launch takes one
///     ptx = "...";                   // may be left out: no CUDA devices then
///     entry = "...";                 // may be left out: NAME
///     host = path::to::twin;         // may be left out: no host devices then
/// }
/// ```
///
/// in this order, makes `struct NAME` with `NAME::load(&device).await?` (`NAME::load_blocking(&device)?` in sync
/// code) and `.launch(&stream, ..)`, which returns `Op<()>` on a [`Stream`](crate::Stream) and
/// `Result<()>` on a [`Queue`](crate::Queue).
///
/// | declared | a launch takes | the CUDA kernel receives | the host twin receives |
/// |---|---|---|---|
/// | `a: f32`, any number type | `f32` | `float` | `f32` |
/// | `x: &[f32]` | `&` a buffer or view ([`Readable`](crate::Readable)) | `const float*` | `&[f32]` |
/// | `y: &mut [f32]` | `&mut` a buffer or view ([`Writable`](crate::Writable)) | `float*` | `&mut [f32]` |
/// | `y: Out<[f32]>` | likewise | `float*` | `&mut [f32]` |
/// | `go: &PinnedFlag` | `&PinnedFlag` | `unsigned*` | [`&AtomicU32`](std::sync::atomic::AtomicU32) |
/// | `n: u64 = y.len() as u64` | nothing: the launch computes it | `unsigned long long` | `u64` |
///
/// The twin is a function of [`&Grid`](crate::Grid) and these, in order; it is called once a launch.
/// [`Value`](crate::Value), for types of yours, is for signatures of a [`Kernel`](crate::Kernel) that is
/// made at run time and cannot be declared here: declare the fields one by one.
///
/// Arguments are plain values (`a: f32`), arrays that are read (`x: &[f32]`), read and written
/// (`y: &mut [f32]`) or overwritten as a whole (`y: Out<[f32]>`), words shared with the host (`go: &PinnedFlag`), and derived values that the
/// launch computes (`n: u64 = y.len() as u64`). The CUDA kernel receives arrays as bare pointers.
/// Only an `Out` may be given memory that nothing has written, as `empty` makes it: say `Out` where the
/// kernel writes every element, or pass `zeros`.
/// In conditions and in `launch`, arrays have a `len()` and values are themselves; `|config|` names
/// the [`LaunchConfig`](crate::LaunchConfig) for the conditions. Loading on a GPU compares the number,
/// sizes and alignments of the parameters with those of the compiled kernel
/// ([`ErrorDetail::WrongParameters`](crate::ErrorDetail::WrongParameters)), where the driver tells them
/// (CUDA 12.4).
///
/// # Safety
/// `unsafe fn` is your signature under: these types are those of the CUDA source, and for all
/// arguments and geometries that the `where` lines and `launch` admit the kernel stays inside its
/// arrays, and overwrites all of those declared `Out`. Without `launch`, that is any geometry.
///
/// # Examples
/// ```
/// use gpu_await::{Device, Grid, LaunchConfig, kernel};
///
/// kernel! {
///     /// `y = y * y`.
///     pub unsafe fn square(y: &mut [f32], n: u64 = y.len() as u64);
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
#[macro_export]
macro_rules! kernel {
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident ( $($args:tt)* ) where |$config:ident| $($condition:expr),+ $(,)? ;
        $(launch = $launch:expr;)?
        $(ptx = $ptx:expr;)?
        $(entry = $entry:expr;)?
        $(host = $host:expr;)?
    ) => {
        $crate::__kernel! {
            @args [ $($args)* , ]
            types [] takes [] shapes [] before [] passes [] names [] idents []
            rest [
                [$(#[$meta])*] [$vis] $name
                [$config] [$($condition,)+] [$($launch)?] [$($ptx)?] [$($entry)?] [$($host)?]
            ]
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident ( $($args:tt)* ) where $($condition:expr),+ $(,)? ;
        $(launch = $launch:expr;)?
        $(ptx = $ptx:expr;)?
        $(entry = $entry:expr;)?
        $(host = $host:expr;)?
    ) => {
        $crate::__kernel! {
            @args [ $($args)* , ]
            types [] takes [] shapes [] before [] passes [] names [] idents []
            rest [
                [$(#[$meta])*] [$vis] $name
                [] [$($condition,)+] [$($launch)?] [$($ptx)?] [$($entry)?] [$($host)?]
            ]
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident ( $($args:tt)* ) ;
        $(launch = $launch:expr;)?
        $(ptx = $ptx:expr;)?
        $(entry = $entry:expr;)?
        $(host = $host:expr;)?
    ) => {
        $crate::__kernel! {
            @args [ $($args)* , ]
            types [] takes [] shapes [] before [] passes [] names [] idents []
            rest [
                [$(#[$meta])*] [$vis] $name
                [] [] [$($launch)?] [$($ptx)?] [$($entry)?] [$($host)?]
            ]
        }
    };
}

/// Reads one argument after the other, then expands.
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel {
    // an array that is written
    (@args [ $arg:ident : & mut [ $type:ty ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::InOut<$type>,]
            takes [$($takes)* $arg: &mut impl $crate::Writable<$type>,]
            shapes [$($shapes)* let $arg = $crate::Len::of(&*$arg);] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // an array that is overwritten
    (@args [ $arg:ident : Out < [ $type:ty ] > , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::Out<$type>,]
            takes [$($takes)* $arg: &mut impl $crate::Writable<$type>,]
            shapes [$($shapes)* let $arg = $crate::Len::of(&*$arg);] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // an array that is read
    (@args [ $arg:ident : & [ $type:ty ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::In<$type>,]
            takes [$($takes)* $arg: &impl $crate::Readable<$type>,]
            shapes [$($shapes)* let $arg = $crate::Len::of($arg);] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // a flag
    (@args [ $arg:ident : & PinnedFlag , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::Flag,]
            takes [$($takes)* $arg: &$crate::PinnedFlag,]
            shapes [$($shapes)*] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // a derived value
    (@args [ $arg:ident : $type:ty = $derive:expr , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $type,]
            takes [$($takes)*]
            shapes [$($shapes)* let $arg: $type = $derive;]
            before [$($before)* $arg,]
            passes [$($passes)* $arg,]
            names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // a value
    (@args [ $arg:ident : $type:ty , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $type,]
            takes [$($takes)* $arg: $type,]
            shapes [$($shapes)*] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] rest $rest
        }
    };
    // a trailing comma
    (@args [ , ] $($state:tt)*) => {
        $crate::__kernel! { @args [] $($state)* }
    };
    // all arguments read
    (@args [ ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents $idents:tt
        rest [
            [$($meta:tt)*] [$vis:vis] $name:ident
            $config:tt [$($condition:expr,)*] [$($launch:expr)?] [$($ptx:expr)?] [$($entry:expr)?] [$($host:expr)?]
        ]) => {
        $($meta)*
        #[allow(non_camel_case_types, reason = "a kernel is named as in its source")]
        #[derive(::core::clone::Clone, ::core::fmt::Debug)]
        $vis struct $name {
            kernel: $crate::__private::Declared<$name, ($($types)*)>,
        }

        #[allow(unused_variables, reason = "not every argument is in every condition")]
        // SAFETY: the declaration is an `unsafe fn`: its author vouches for the types, and for all
        // arguments that the conditions admit.
        unsafe impl $crate::__private::Declaration<($($types)*)> for $name {
            const ARGUMENTS: &'static [&'static ::core::primitive::str] = &[$($names)*];

            fn code() -> $crate::__private::Code {
                $crate::__private::Code {
                    name: ::core::stringify!($name),
                    entry: $crate::__kernel!(@or [$($entry)?] [::core::stringify!($name)]),
                    ptx: $crate::__kernel!(@some [$($ptx)?]),
                    twin: $crate::__kernel!(@twin ($($types)*) [$($host)?]),
                }
            }

            fn require(kernel: $crate::Kernel<($($types)*)>) -> $crate::Kernel<($($types)*)> {
                $(let kernel = $crate::__kernel!(@require kernel $config [$condition] $idents);)*
                kernel
            }
        }

        #[allow(unused_variables, reason = "not every argument is in every expression")]
        impl $name {
            /// Loads the kernel for `device`'s kind, off the executor.
            ///
            /// # Errors
            /// An image that does not load, with the compiler's log; parameters that are not the declared
            /// ones; a device of a kind that the kernel has no code for.
            $vis async fn load(device: &$crate::Device) -> $crate::Result<Self> {
                let kernel = $crate::__private::Declared::load(device).await?;
                ::core::result::Result::Ok(Self { kernel })
            }

            /// Loads the kernel for `device`'s kind, on the calling thread.
            ///
            /// # Blocking
            /// Yes, up to seconds, and on a GPU until everything that runs there has ended: not from
            /// async code.
            ///
            /// # Errors
            /// As [`load`](Self::load); a thread on which it would dead-lock.
            $vis fn load_blocking(device: &$crate::Device) -> $crate::Result<Self> {
                let kernel = $crate::__private::Declared::load_blocking(device)?;
                ::core::result::Result::Ok(Self { kernel })
            }

            /// What the compiler made of the kernel: registers, memory, versions.
            #[must_use]
            $vis fn attributes(&self) -> $crate::KernelAttributes {
                self.kernel.attributes()
            }

            /// How many blocks run at once, and which block size fills the device best.
            #[must_use]
            $vis fn occupancy(&self) -> $crate::Occupancy<'_> {
                self.kernel.occupancy()
            }

            /// The kernel behind its declaration.
            ///
            /// # Safety
            /// Its launches must have the declaration's geometry and its derived arguments: only the
            /// declared `launch` computes them.
            $vis unsafe fn kernel(&self) -> &$crate::Kernel<($($types)*)> {
                // SAFETY: passed on to the caller.
                unsafe { self.kernel.kernel() }
            }

            $crate::__kernel! { @launch [$($launch)?] [$vis] [$($takes)*] [$($shapes)*] [$($before)*] [$($passes)*] }
        }
    };
    (@launch [$launch:expr] [$vis:vis] [$($takes:tt)*] [$($shapes:tt)*] [$($before:tt)*] [$($passes:tt)*]) => {
        /// Puts a launch on a stream or a batch; see [`Stream::launch`]($crate::Stream::launch).
        #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
        #[track_caller]
        $vis fn launch<__On: $crate::LaunchOn>(
            &self,
            on: &__On,
            $($takes)*
        ) -> <__On as $crate::LaunchOn>::Launched {
            // Each derived value once: the geometry, the conditions and the kernel see the same.
            let (config, ($($before)*)): ($crate::LaunchConfig, _) = {
                $($shapes)*
                ($launch, ($($before)*))
            };
            // SAFETY: launched with the geometry and the derived arguments of the declaration.
            let kernel = unsafe { self.kernel.kernel() };
            $crate::LaunchOn::launch_kernel(on, kernel, config, ($($passes)*))
        }
    };
    (@launch [] [$vis:vis] [$($takes:tt)*] [$($shapes:tt)*] [$($before:tt)*] [$($passes:tt)*]) => {
        /// Puts a launch on a stream or a batch; see [`Stream::launch`]($crate::Stream::launch).
        #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
        #[track_caller]
        $vis fn launch<__On: $crate::LaunchOn>(
            &self,
            on: &__On,
            config: $crate::LaunchConfig,
            $($takes)*
        ) -> <__On as $crate::LaunchOn>::Launched {
            let (_, ($($before)*)) = { $($shapes)* ((), ($($before)*)) };
            // SAFETY: the declaration admits any geometry; the derived arguments are its own.
            let kernel = unsafe { self.kernel.kernel() };
            $crate::LaunchOn::launch_kernel(on, kernel, config, ($($passes)*))
        }
    };
    (@require $kernel:ident [] $condition:tt $idents:tt) => {
        $crate::__kernel!(@require $kernel [_config] $condition $idents)
    };
    (@require $kernel:ident [$config:ident] [$condition:expr] [$($idents:tt)*]) => {
        $kernel.require(::core::stringify!($condition), |$config: &$crate::LaunchConfig, shapes| {
            let ($($idents)*) = *shapes;
            $condition
        })
    };
    (@or [] [$default:expr]) => { $default };
    (@or [$value:expr] [$default:expr]) => { $value };
    (@some []) => { ::core::option::Option::None };
    (@some [$value:expr]) => { ::core::option::Option::Some(::std::borrow::Cow::from($value)) };
    (@twin ($($types:tt)*) []) => { ::core::option::Option::None };
    (@twin ($($type:ty,)*) [$host:expr]) => {{
        // The error for a twin of another type shows both types, and points at the twin.
        let __twin: fn(&$crate::Grid, $(<$type as $crate::Param>::Twin<'_>),*) = $host;
        ::core::option::Option::Some($crate::__private::erase::<($($type,)*), _>(__twin))
    }};
}

/// A twin behind its types.
#[doc(hidden)]
pub fn erase<S: Signature, F: crate::kernel::signature::TwinFn<S>>(twin: F) -> Erased {
    twin.erase()
}
