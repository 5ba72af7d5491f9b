//! The `kernel!` macro and what it expands to.

use std::borrow::Cow;
use std::sync::Arc;

use crate::completion::engine::Engine;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::module::{Image, Module};
use crate::kernel::signature::{Erased, Signature};
use crate::offload::offload;

/// A kernel's code for each kind of device.
#[doc(hidden)]
pub struct Definition {
    pub name: &'static str,
    pub entry: &'static str,
    pub ptx: Option<Cow<'static, str>>,
    pub twin: Option<Erased>,
}

impl Definition {
    /// Loads the code for the device's kind.
    ///
    /// # Safety
    /// As for [`Module::kernel`].
    ///
    /// # Errors
    /// As [`Module::load`]; [`ErrorDetail::NoImplementation`](crate::ErrorDetail::NoImplementation)
    /// where the definition has no code for the device's kind.
    pub async unsafe fn load<S: Signature>(self, device: &Device) -> Result<Kernel<S>> {
        let engine = device.engine().clone();
        if engine.backend.kind() == crate::DeviceKind::Host {
            // SAFETY: the caller vouches.
            return unsafe { self.load_now(&engine) };
        }
        // SAFETY: the caller vouches.
        offload(move || unsafe { self.load_now(&engine) }).await?
    }

    /// [`load`](Self::load) on the calling thread.
    ///
    /// # Safety
    /// As for [`Module::kernel`].
    ///
    /// # Errors
    /// As [`load`](Self::load); a thread on which it would dead-lock.
    pub unsafe fn load_blocking<S: Signature>(self, device: &Device) -> Result<Kernel<S>> {
        crate::thread_role::check("loading a kernel")?;
        // SAFETY: the caller vouches.
        unsafe { self.load_now(device.engine()) }
    }

    /// [`load`](Self::load) on the calling thread, whichever it is.
    ///
    /// # Safety
    /// As for [`Module::kernel`].
    pub(crate) unsafe fn load_now<S: Signature>(self, engine: &Arc<Engine>) -> Result<Kernel<S>> {
        engine.check_open()?;
        match (engine.backend.kind(), self.ptx, self.twin) {
            (crate::DeviceKind::Host, _, Some(twin)) => {
                Kernel::host_erased(engine, self.name, twin)
            }
            (crate::DeviceKind::Cuda, Some(ptx), _) => {
                let module = Module::load_now(engine, Image::ptx(ptx).named(self.name))?;
                // SAFETY: the caller vouches.
                unsafe { module.kernel(self.entry) }
            }
            _ => Err(super::no_implementation(self.name, engine)),
        }
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
/// makes `struct NAME` with `NAME::load(&device).await?` (`NAME::load_blocking(&device)?` in sync
/// code) and `.launch(&stream, ..)`, which returns `Op<()>` on a [`Stream`](crate::Stream) and
/// `Result<()>` on a [`Queue`](crate::Queue).
///
/// Arguments are plain values (`a: f32`), arrays that are read (`x: &[f32]`), read and written
/// (`y: &mut [f32]`) or overwritten as a whole (`y: Out<[f32]>`), words shared with the host (`go: &PinnedFlag`), and derived values that the
/// launch computes (`n: u64 = y.len() as u64`). The CUDA kernel receives arrays as bare pointers.
/// In conditions and in `launch`, arrays have a `len()` and values are themselves; `|config|` names
/// the [`LaunchConfig`](crate::LaunchConfig) for the conditions.
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
        $(host = $host:path;)?
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
        $(host = $host:path;)?
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
        $(host = $host:path;)?
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
            passes [$($passes)* $arg,] names [$($names)* stringify!($arg),]
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
            passes [$($passes)* $arg,] names [$($names)* stringify!($arg),]
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
            passes [$($passes)* $arg,] names [$($names)* stringify!($arg),]
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
            passes [$($passes)* $arg,] names [$($names)* stringify!($arg),]
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
            before [$($before)* let $arg: $type = { $($shapes)* $derive };]
            passes [$($passes)* $arg,]
            names [$($names)* stringify!($arg),]
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
            passes [$($passes)* $arg,] names [$($names)* stringify!($arg),]
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
            $config:tt [$($condition:expr,)*] [$($launch:expr)?] [$($ptx:expr)?] [$($entry:expr)?] [$($host:path)?]
        ]) => {
        $($meta)*
        #[allow(non_camel_case_types, reason = "a kernel is named as in its source")]
        #[derive(Clone, Debug)]
        $vis struct $name {
            kernel: $crate::Kernel<($($types)*)>,
        }

        #[allow(unused_variables, reason = "not every argument is in every condition")]
        impl $name {
            /// Loads the kernel for `device`'s kind, off the executor.
            ///
            /// # Errors
            /// An image that does not load, with the compiler's log; a device of a kind that the
            /// kernel has no code for.
            $vis async fn load(device: &$crate::Device) -> $crate::Result<Self> {
                // SAFETY: the kernel's declaration is an `unsafe fn`: its author vouches for the
                // types and for all arguments that the conditions admit.
                let kernel = unsafe { Self::definition().load(device).await? };
                ::core::result::Result::Ok(Self::checked(kernel))
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
                // SAFETY: as in `load`.
                let kernel = unsafe { Self::definition().load_blocking(device)? };
                ::core::result::Result::Ok(Self::checked(kernel))
            }

            fn definition() -> $crate::__private::Definition {
                $crate::__private::Definition {
                    name: stringify!($name),
                    entry: $crate::__kernel!(@or [$($entry)?] [stringify!($name)]),
                    ptx: $crate::__kernel!(@some [$($ptx)?]),
                    twin: $crate::__kernel!(@twin ($($types)*) [$($host)?]),
                }
            }

            fn checked(kernel: $crate::Kernel<($($types)*)>) -> Self {
                let kernel = kernel.named(&[$($names)*]);
                $(let kernel = $crate::__kernel!(@require kernel $config [$condition] $idents);)*
                Self { kernel }
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
                &self.kernel
            }

            $crate::__kernel! { @launch [$($launch)?] [$vis] [$($takes)*] [$($shapes)*] [$($before)*] [$($passes)*] }
        }
    };
    (@launch [$launch:expr] [$vis:vis] [$($takes:tt)*] [$($shapes:tt)*] [$($before:tt)*] [$($passes:tt)*]) => {
        /// Puts a launch on a stream or a batch; see [`Stream::launch`]($crate::Stream::launch).
        #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
        #[track_caller]
        $vis fn launch<On: $crate::LaunchOn>(&self, on: &On, $($takes)*) -> On::Launched {
            let config = { $($shapes)* $launch };
            $($before)*
            on.launch_kernel(&self.kernel, config, ($($passes)*))
        }
    };
    (@launch [] [$vis:vis] [$($takes:tt)*] [$($shapes:tt)*] [$($before:tt)*] [$($passes:tt)*]) => {
        /// Puts a launch on a stream or a batch; see [`Stream::launch`]($crate::Stream::launch).
        #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
        #[track_caller]
        $vis fn launch<On: $crate::LaunchOn>(
            &self,
            on: &On,
            config: $crate::LaunchConfig,
            $($takes)*
        ) -> On::Launched {
            $($before)*
            on.launch_kernel(&self.kernel, config, ($($passes)*))
        }
    };
    (@require $kernel:ident [] $condition:tt $idents:tt) => {
        $crate::__kernel!(@require $kernel [_config] $condition $idents)
    };
    (@require $kernel:ident [$config:ident] [$condition:expr] [$($idents:tt)*]) => {
        $kernel.require(stringify!($condition), |$config: &$crate::LaunchConfig, shapes| {
            let ($($idents)*) = *shapes;
            $condition
        })
    };
    (@or [] [$default:expr]) => { $default };
    (@or [$value:expr] [$default:expr]) => { $value };
    (@some []) => { ::core::option::Option::None };
    (@some [$value:expr]) => { ::core::option::Option::Some(::std::borrow::Cow::from($value)) };
    (@twin ($($types:tt)*) []) => { ::core::option::Option::None };
    (@twin ($($types:tt)*) [$host:path]) => {
        ::core::option::Option::Some($crate::__private::erase::<($($types)*), _>($host))
    };
}

/// A twin behind its types.
#[doc(hidden)]
pub fn erase<S: Signature, F: crate::kernel::signature::TwinFn<S>>(twin: F) -> Erased {
    twin.erase()
}
