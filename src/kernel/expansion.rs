//! How `kernel!` parses a declaration's arguments, and its expansion, which uses the items of `declared.rs`.
//! [`value_macros`](super::value_macros) parses the types of arguments.

/// Parses one argument after another, then expands.
#[doc(hidden)]
#[macro_export]
macro_rules! __kernel {
    // a table of blocks that are written
    (@args [ $arg:ident : & mut [ & mut [ $type:ty ] ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::InOutTable<$type>,]
            takes [$($takes)* $arg: &mut $crate::BlockTableMut<'_, $type>,]
            shapes [$($shapes)* let $arg = $crate::__private::TableLen::new($crate::BlockTableMut::shape($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::TableLen::new($arg);] rest $rest
        }
    };
    // a table of blocks that are read
    (@args [ $arg:ident : & [ & [ $type:ty ] ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::InTable<$type>,]
            takes [$($takes)* $arg: &$crate::BlockTable<'_, $type>,]
            shapes [$($shapes)* let $arg = $crate::__private::TableLen::new($crate::BlockTable::shape($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::TableLen::new($arg);] rest $rest
        }
    };
    // rows that are written
    (@args [ $arg:ident : & mut [ [ $type:ty ] ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::InOut2<$type>,]
            takes [$($takes)* $arg: &mut $crate::ViewMut2<'_, $type>,]
            shapes [$($shapes)* let $arg = $crate::__private::RowsLen::new($crate::ViewMut2::shape($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::RowsLen::new($arg);] rest $rest
        }
    };
    // rows that are overwritten
    (@args [ $arg:ident : Out < [ [ $type:ty ] ] > , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::Out2<$type>,]
            takes [$($takes)* $arg: &mut $crate::ViewMut2<'_, $type>,]
            shapes [$($shapes)* let $arg = $crate::__private::RowsLen::new($crate::ViewMut2::shape($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::RowsLen::new($arg);] rest $rest
        }
    };
    // rows that are read
    (@args [ $arg:ident : & [ [ $type:ty ] ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::In2<$type>,]
            takes [$($takes)* $arg: &$crate::View2<'_, $type>,]
            shapes [$($shapes)* let $arg = $crate::__private::RowsLen::new($crate::View2::shape($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::RowsLen::new($arg);] rest $rest
        }
    };
    // an array that is written
    (@args [ $arg:ident : & mut [ $type:ty ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::InOut<$type>,]
            takes [$($takes)* $arg: &mut impl $crate::Writable<$type>,]
            shapes [$($shapes)* let $arg = $crate::__private::ArrayLen::new($crate::Len::of(&*$arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::ArrayLen::new($arg);] rest $rest
        }
    };
    // an array that is overwritten
    (@args [ $arg:ident : Out < [ $type:ty ] > , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::Out<$type>,]
            takes [$($takes)* $arg: &mut impl $crate::Writable<$type>,]
            shapes [$($shapes)* let $arg = $crate::__private::ArrayLen::new($crate::Len::of(&*$arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::ArrayLen::new($arg);] rest $rest
        }
    };
    // an array that is read
    (@args [ $arg:ident : & [ $type:ty ] , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::In<$type>,]
            takes [$($takes)* $arg: &impl $crate::Readable<$type>,]
            shapes [$($shapes)* let $arg = $crate::__private::ArrayLen::new($crate::Len::of($arg));] before [$($before)*]
            passes [$($passes)* $crate::__kernel_array!([$type] $arg),] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)* let $arg = $crate::__private::ArrayLen::new($arg);] rest $rest
        }
    };
    // a flag
    (@args [ $arg:ident : & PinnedFlag , $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::Flag,]
            takes [$($takes)* $arg: &$crate::PinnedFlag,]
            shapes [$($shapes)*] before [$($before)*]
            passes [$($passes)* $arg,] names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,] seen [$($seen)*] rest $rest
        }
    };
    // not an array
    (@args [ $arg:ident : * $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), "` is a pointer: declare the array, as `&[T]`, `&mut [T]` or \
                `Out<[T]>`; the kernel receives its address"] $($state)*
        }
    };
    (@args [ $arg:ident : & $lifetime:lifetime $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), "` has a lifetime: leave it out"] $($state)*
        }
    };
    (@args [ $arg:ident : & mut $type:ty , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), ": &mut ", ::core::stringify!($type), "` is not an array: an array \
                is `&[T]`, `&mut [T]` or `Out<[T]>`, and a single result is an array of one element"] $($state)*
        }
    };
    (@args [ $arg:ident : & mut $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! { @unread [ $arg : & mut $($more)* ] $($state)* }
    };
    (@args [ $arg:ident : & $type:ty , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), ": &", ::core::stringify!($type), "` is not an array: an array is \
                `&[T]`, `&mut [T]` or `Out<[T]>`, and a value is passed as it is, without `&`"] $($state)*
        }
    };
    (@args [ $arg:ident : [ $type:ty ] , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), ": [", ::core::stringify!($type), "]` is an array by value: say `&[T]`, \
                `&mut [T]` or `Out<[T]>`"] $($state)*
        }
    };
    (@args [ $arg:ident : Out < $type:ty > , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["`", ::core::stringify!($arg), ": Out<", ::core::stringify!($type), ">` is not an array: say `Out<[",
                ::core::stringify!($type), "]>`, also for one element"] $($state)*
        }
    };
    // a derived value
    (@args [ $arg:ident : $type:tt = $derive:expr , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! { @derived $arg [$type] [$derive] [ $($more)* ] $($state)* }
    };
    // a value
    (@args [ $arg:ident : $type:tt , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! { @value $arg [$type] [ $($more)* ] $($state)* }
    };
    // the same for types that are more than a name
    (@args [ $arg:ident : $type:ty = $derive:expr , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! { @derived $arg [$type] [$derive] [ $($more)* ] $($state)* }
    };
    (@args [ $arg:ident : $type:ty , $($more:tt)* ] $($state:tt)*) => {
        $crate::__kernel! { @value $arg [$type] [ $($more)* ] $($state)* }
    };
    (@derived $arg:ident [$($type:tt)+] [$derive:expr] [ $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::__kernel_value!(type [$($type)+]),]
            takes [$($takes)*]
            shapes [$($shapes)*]
            before [$($before)* ($arg [$($type)+] [$derive])]
            passes [$($passes)* $crate::__kernel_value!(pass_derived [$($type)+] $arg),]
            names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,]
            seen [$($seen)* let $arg = $crate::__kernel_value!(see [$($type)+] $arg);] rest $rest
        }
    };
    (@value $arg:ident [$($type:tt)+] [ $($more:tt)* ]
        types [$($types:tt)*] takes [$($takes:tt)*] shapes [$($shapes:tt)*] before [$($before:tt)*]
        passes [$($passes:tt)*] names [$($names:tt)*] idents [$($idents:tt)*] seen [$($seen:tt)*] rest $rest:tt) => {
        $crate::__kernel! {
            @args [ $($more)* ]
            types [$($types)* $crate::__kernel_value!(type [$($type)+]),]
            takes [$($takes)* $arg: $($type)+,]
            shapes [$($shapes)* $crate::__kernel_value!(shadow [$($type)+] $arg);] before [$($before)*]
            passes [$($passes)* $crate::__kernel_value!(pass [$($type)+] $arg),]
            names [$($names)* ::core::stringify!($arg),]
            idents [$($idents)* $arg,]
            seen [$($seen)* let $arg = $crate::__kernel_value!(see [$($type)+] $arg);] rest $rest
        }
    };
    // a trailing comma
    (@args [ , ] $($state:tt)*) => {
        $crate::__kernel! { @args [] $($state)* }
    };
    (@args [ $($unread:tt)+ ] $($state:tt)*) => {
        $crate::__kernel! { @unread [ $($unread)+ ] $($state)* }
    };
    (@unread [ $($unread:tt)+ ] $($state:tt)*) => {
        $crate::__kernel! {
            @wrong ["expected parameters `name: type`, separated by `,`, at `",
                ::core::stringify!($($unread)+), "`"] $($state)*
        }
    };
    (@wrong [$($message:expr),+] types $types:tt takes $takes:tt shapes $shapes:tt before $before:tt
        passes $passes:tt names $names:tt idents $idents:tt seen $seen:tt
        rest [$meta:tt $vis:tt $name:ident $($rest:tt)*]) => {
        $crate::__kernel_error! { $name, $($message),+ }
    };
    // all arguments parsed: one kernel
    (@args [ ]
        types [$($types:tt)*] takes $takes:tt shapes $shapes:tt before $before:tt
        passes $passes:tt names $names:tt idents $idents:tt seen $seen:tt
        rest [
            [$($meta:tt)*] [$vis:vis] $name:ident [] $where:tt $launch:tt $code:tt [$($entry:expr)?] $host:tt
        ]) => {
        $($meta)*
        #[allow(non_camel_case_types, reason = "a kernel is named as in its source")]
        #[derive(::core::clone::Clone, ::core::fmt::Debug)]
        $vis struct $name {
            kernel: $crate::__private::Declared<$name, ($($types)*)>,
        }

        $crate::__kernel! {
            @impls [$name] [::core::stringify!($name)]
            [$crate::__kernel!(@or [$($entry)?] [::core::stringify!($name)])]
            [$vis] $where $launch $code $host
            [$($types)*] $takes $shapes $before $passes $names $idents $seen
        }
    };
    // all arguments parsed: one kernel for each type of a list
    (@args [ ]
        types $types:tt takes $takes:tt shapes $shapes:tt before $before:tt
        passes $passes:tt names $names:tt idents $idents:tt seen $seen:tt
        rest [
            [$($meta:tt)*] $vis:tt $name:ident [$of:ident] $where:tt $launch:tt $code:tt
            [of $([$type:ty] [$entry:expr])+] $host:tt
        ]) => {
        $crate::__kernel! {
            @generic [$($meta)*] $vis $name $of $types
        }
        $(const _: () = {
            // The type that the parameter stands for.
            type $of = $type;
            $crate::__kernel! {
                @impls [$name<$of>]
                [::core::concat!(::core::stringify!($name), "<", ::core::stringify!($type), ">")] [$entry]
                $vis $where $launch $code $host
                $types $takes $shapes $before $passes $names $idents $seen
            }
        };)+
    };
    (@generic [$($meta:tt)*] [$vis:vis] $name:ident $of:ident [$($types:tt)*]) => {
        $($meta)*
        #[allow(non_camel_case_types, reason = "a kernel is named as in its source")]
        $vis struct $name<$of: 'static> {
            kernel: $crate::__private::Declared<$name<$of>, ($($types)*)>,
        }

        impl<$of: 'static> ::core::clone::Clone for $name<$of> {
            fn clone(&self) -> Self {
                $name { kernel: ::core::clone::Clone::clone(&self.kernel) }
            }
        }

        impl<$of: 'static> ::core::fmt::Debug for $name<$of> {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Debug::fmt(&self.kernel, f)
            }
        }
    };
    (@impls [$type:ty] [$called:expr] [$entry:expr]
        [$vis:vis] [$($config:tt $($condition:tt)+)?] [$($launch:expr)?] $code:tt [$($host:expr)?]
        [$($types:tt)*] [$($takes:tt)*] [$($shapes:tt)*] [$($before:tt)*]
        [$($passes:tt)*] [$($names:tt)*] $idents:tt $seen:tt) => {
        #[allow(unused_variables, unstable_name_collisions, reason = "not every argument is in every condition; `i128` may get `div_ceil`")]
        // SAFETY: the declaration is an `unsafe fn`: its author vouches for the types, and for all
        // arguments that the conditions admit.
        unsafe impl $crate::__private::Declaration<($($types)*)> for $type {
            const ARGUMENTS: &'static [&'static ::core::primitive::str] = &[$($names)*];

            fn code() -> $crate::__private::Code {
                $crate::__private::Code {
                    name: $called,
                    entry: $entry,
                    cuda: $crate::__kernel!(@code $code),
                    twin: $crate::__kernel!(@twin ($($types)*) [$($host)?]),
                }
            }

            fn require(kernel: $crate::Kernel<($($types)*)>) -> $crate::Kernel<($($types)*)> {
                $crate::__kernel!(@require kernel $idents $seen $($config $($condition)+)?)
            }
        }

        #[allow(unused_variables, unstable_name_collisions, reason = "as above, of expressions")]
        impl $type {
            /// Loads the kernel for `device`'s kind, off the executor.
            ///
            /// # Errors
            /// An image that does not load, with the compiler's log; parameters that differ from the declared
            /// ones; a device of a kind that the kernel has no code for.
            $vis async fn load(device: &$crate::Device) -> $crate::Result<Self> {
                let kernel = $crate::__private::Declared::load(device).await?;
                ::core::result::Result::Ok(Self { kernel })
            }

            /// Loads the kernel for `device`'s kind, on the calling thread.
            ///
            /// # Blocking
            /// Yes, up to seconds, and on a GPU until everything running there has ended: not for
            /// async code.
            ///
            /// # Errors
            /// As [`load`](Self::load); a thread on which it would deadlock.
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
            $crate::__kernel!(@evaluate config [$($before)*] [$($shapes)*] [$launch]);
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
            $crate::__kernel!(@evaluate config [$($before)*] [$($shapes)*] [config]);
            // SAFETY: the declaration admits any geometry; the derived arguments are its own.
            let kernel = unsafe { self.kernel.kernel() };
            $crate::LaunchOn::launch_kernel(on, kernel, config, ($($passes)*))
        }
    };
    // Nothing is derived.
    (@evaluate $config:ident [] [$($shapes:tt)*] [$given:ident]) => {
        let $config = ::core::result::Result::Ok($given);
    };
    // Each derived value is computed once: the geometry, the conditions and the kernel see the same one. It is `None` if it has no value. All passed
    // arguments are in scope first, so that a derived value can name those after it as well as those before it.
    (@evaluate $config:ident [$(($arg:ident $type:tt [$derive:expr]))*] [$($shapes:tt)*] [$launch:expr]) => {
        let evaluated = $crate::__private::evaluate_all(|| {
            #[allow(unused_imports, reason = "not every expression needs it")]
            use $crate::{__private::AsUnsigned as _, Integer as _};
            $($shapes)*
            $($crate::__kernel_value!(derive $type $arg $derive);)*
            let config = $crate::__private::evaluate("launch", || -> $crate::LaunchConfig { $launch });
            $($crate::__kernel_value!(fit $type $arg);)*
            ::core::result::Result::Ok((config, ($($arg,)*)))
        });
        let ($config, ($($arg,)*)) = match evaluated {
            ::core::result::Result::Ok((config, ($($arg,)*))) => (
                ::core::result::Result::Ok(config),
                ($(::core::option::Option::Some($arg),)*),
            ),
            ::core::result::Result::Err(why) => (
                ::core::result::Result::Err(why),
                ($($crate::__private::none(::core::stringify!($arg)),)*),
            ),
        };
    };
    (@require $kernel:ident $idents:tt $seen:tt $($config:tt)?) => { $kernel };
    (@require $kernel:ident $idents:tt $seen:tt $config:tt $condition:tt $($more:tt)*) => {{
        let $kernel = $crate::__kernel!(@condition $kernel $idents $seen $config $condition);
        $crate::__kernel!(@require $kernel $idents $seen $config $($more)*)
    }};
    (@condition $kernel:ident [$($idents:tt)*] [$($seen:tt)*] [$config:ident] [$condition:expr]) => {
        $kernel.require(::core::stringify!($condition), |$config: &$crate::LaunchConfig, shapes| {
            #[allow(unused_imports, reason = "not every condition needs it")]
            use $crate::{__private::AsUnsigned as _, Integer as _};
            let ($($idents)*) = ::core::clone::Clone::clone(shapes);
            $($seen)*
            $condition
        })
    };
    (@or [] [$default:expr]) => { $default };
    (@or [$value:expr] [$default:expr]) => { $value };
    (@code [programmatic $code:tt]) => {
        ::core::option::Option::map($crate::__kernel!(@code $code), $crate::__private::CudaCode::programmatic)
    };
    (@code []) => { ::core::option::Option::None };
    (@code [ptx $text:expr]) => {
        ::core::option::Option::Some($crate::__private::CudaCode::ptx($text))
    };
    (@code [cuda $source:expr]) => {
        ::core::option::Option::Some($crate::__private::CudaCode::source($source))
    };
    (@twin ($($types:tt)*) []) => { ::core::option::Option::None };
    (@twin ($($type:ty,)*) [$host:expr]) => {{
        // The error for a twin of another type shows both types, and points at the twin.
        let __twin: fn(&$crate::Grid, $(<$type as $crate::Param>::Twin<'_>),*) = $host;
        ::core::option::Option::Some($crate::__private::erase::<($($type,)*), _>(__twin))
    }};
}
