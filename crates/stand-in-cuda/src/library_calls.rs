//! Libraries: modules that belong to no context, and kernels that run in any.
//!
//! Here one belongs to the device whose context was current when it was loaded.

use std::ffi::{c_char, c_uint, c_void};

use crate::abi::{Array, Code, Handle, Out, Text, code};
use crate::module_calls::function_of;
use crate::ptx;
use crate::world::{World, call, told};

/// `CU_JIT_*_LOG_BUFFER` and their sizes.
const INFO_LOG: [c_uint; 2] = [3, 4];
const ERROR_LOG: [c_uint; 2] = [5, 6];

/// A text that is not PTX is loaded, and its log written; the error comes when something of it is looked up.
///
/// # Safety
/// `options` and `values` have `count` elements, and buffers named by options have the sizes named
/// by options.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLibraryLoadData(
    library: Out<Handle>,
    image: Text,
    options: Array<c_uint>,
    values: Array<usize>,
    count: c_uint,
    _library_options: Array<c_uint>,
    _library_values: Array<*const c_void>,
    library_options: c_uint,
) -> Code {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: `count` elements by this function's contract.
    let names = unsafe { options.read(count) };
    let image = image.read();
    let bytes = image.as_ref().map_or(0, String::len);
    let arguments = |_: &World| {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        format!("bytes={bytes} options={}", names.join(","))
    };
    let mut late = code::SUCCESS;
    let code = call("cuLibraryLoadData", arguments, |mut world| {
        let device = world.live_current()?;
        library.check()?;
        if library_options != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        let entries = match ptx::entries(&image?) {
            Err(code::INVALID_PTX) => {
                late = code::INVALID_PTX;
                Vec::new()
            }
            entries => entries?,
        };
        let made = world.add_module(device, entries);
        if let Some(module) = world.modules.get_mut(&made)
            && late != code::SUCCESS
        {
            module.broken = Some(late);
        }
        library.put(made)
    });
    // SAFETY: by this function's contract.
    unsafe { write_logs(late, &names, &values) };
    code
}

/// Writes what compiling an image says to the buffers that options name.
///
/// # Safety
/// As of [`cuLibraryLoadData`], with an element of `values` for each of the options.
unsafe fn write_logs(code: Code, names: &[c_uint], values: &Array<usize>) {
    // SAFETY: so many elements by this function's contract.
    let given = unsafe { values.read(names.len()) };
    let error = if code == code::INVALID_PTX { ptx::SYNTAX_ERROR } else { "" };
    for ([buffer, size], text) in [(INFO_LOG, ""), (ERROR_LOG, error)] {
        let find = |option: c_uint| names.iter().position(|&name| name == option);
        let (Some(buffer), Some(size)) = (find(buffer), find(size)) else { continue };
        if let (Some(&start), Some(&bytes)) = (given.get(buffer), given.get(size)) {
            // The size is a `unsigned int` in a pointer's place.
            let capacity = bytes & 0xFFFF_FFFF;
            // SAFETY: the option's value is null or a buffer of as many bytes as the size option
            // says.
            let log = unsafe { Out::<c_char>::from_option(start) };
            let written = log.put_text(text, capacity);
            // SAFETY: `size` is an index into `names`, as long as `values`; the driver may write
            // this option's value.
            unsafe { values.write(size, written) };
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLibraryUnload(library: Handle) -> Code {
    call("cuLibraryUnload", told!(world: "{}", world.module_label(library)), |mut world| {
        world.remove_module(library)
    })
}

/// The library for the current context; an error that loading did not tell is told here.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLibraryGetModule(module: Out<Handle>, library: Handle) -> Code {
    call("cuLibraryGetModule", told!(world: "{}", world.module_label(library)), |mut world| {
        world.live_current()?;
        world.module(library)?.broken.map_or(Ok(()), Err)?;
        module.put(library)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLibraryGetKernel(
    kernel: Out<Handle>,
    library: Handle,
    name: Text,
) -> Code {
    let name = name.read();
    let label = name.clone().unwrap_or_default();
    let line = told!(world: "{label} {}", world.module_label(library));
    call("cuLibraryGetKernel", line, |mut world| {
        world.module(library)?.broken.map_or(Ok(()), Err)?;
        let function = function_of(&mut world, library, &name?)?;
        kernel.put(world.kernel_of(function))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuKernelGetFunction(function: Out<Handle>, kernel: Handle) -> Code {
    call("cuKernelGetFunction", told!(world: "{}", world.function_label(kernel)), |mut world| {
        world.live_current()?;
        let found = world.kernels.get(&kernel).copied().ok_or(code::INVALID_HANDLE)?;
        function.put(found)
    })
}
