//! Modules and functions.

use std::ffi::c_int;

use crate::abi::{Array, Code, Handle, LaunchConfig, Out, Outcome, Text, code};
use crate::device_calls::{
    MAX_SHARED_OPTIN, MAX_THREADS_PER_BLOCK, REGISTERS_PER_THREAD, blocks_per_multiprocessor,
};
use crate::kernel_calls::{attributes, check_cluster};
use crate::memory_calls::as_int;
use crate::ptx;
use crate::world::{Function, World, call, told};

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;
/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`.
const CARVEOUT: c_int = 9;
/// What a block may have without asking.
const DEFAULT_SHARED_BYTES: u32 = 49_152;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleLoadData(module: Out<Handle>, image: Text) -> Code {
    let image = image.read();
    let bytes = image.as_ref().map_or(0, String::len);
    call("cuModuleLoadData", told!("bytes={bytes}"), |mut world| load(&mut world, module, image))
}

fn load(world: &mut World, module: Out<Handle>, image: Outcome<String>) -> Outcome {
    let device = world.live_current()?;
    module.check()?;
    let entries = ptx::entries(&image?)?;
    module.put(world.add_module(device, entries))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(module: Handle) -> Code {
    call("cuModuleUnload", told!(world: "{}", world.module_label(module)), |mut world| {
        world.remove_module(module)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleGetFunction(
    function: Out<Handle>,
    module: Handle,
    name: Text,
) -> Code {
    let name = name.read();
    let label = name.clone().unwrap_or_default();
    let line = told!(world: "{label} {}", world.module_label(module));
    call("cuModuleGetFunction", line, |mut world| {
        world.live_current()?;
        let handle = function_of(&mut world, module, &name?)?;
        function.put(handle)
    })
}

/// The function of this name.
pub(crate) fn function_of(world: &mut World, module: Handle, name: &str) -> Outcome<Handle> {
    let loaded = world.module(module)?;
    let device = loaded.device;
    let entry = loaded.entries.iter().find(|entry| entry.name == name).cloned();
    let entry = entry.ok_or(code::NOT_FOUND)?;
    let mut functions = world.functions.iter();
    let known = functions.find(|(_, known)| known.module == module && known.entry == entry);
    let known = known.map(|(&handle, _)| handle);
    let max_dynamic_shared_bytes = DEFAULT_SHARED_BYTES;
    Ok(known.unwrap_or_else(|| {
        world.add_function(Function { module, device, entry, max_dynamic_shared_bytes })
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    function: Handle,
) -> Code {
    let arguments = told!(world: "{} attribute={attribute}", world.function_label(function));
    call("cuFuncGetAttribute", arguments, |mut world| {
        let set = world.function_attributes.get(&attribute).copied();
        let function = world.live_function(function)?;
        if let Some(set) = set {
            return value.put(set);
        }
        value.put(match attribute {
            0 => MAX_THREADS_PER_BLOCK,
            1..=3 | 7 => 0, // SHARED_SIZE, CONST_SIZE, LOCAL_SIZE, CACHE_MODE_CA
            4 => REGISTERS_PER_THREAD,
            5 => 80, // PTX_VERSION
            6 => 90, // BINARY_VERSION
            MAX_DYNAMIC_SHARED => {
                c_int::try_from(function.max_dynamic_shared_bytes).unwrap_or(c_int::MAX)
            }
            CARVEOUT => -1,
            _ => return Err(code::INVALID_VALUE),
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncGetParamInfo(
    function: Handle,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> Code {
    let arguments = told!(world: "{} index={index}", world.function_label(function));
    call("cuFuncGetParamInfo", arguments, |mut world| {
        world.live_current()?;
        let entry = &world.live_function(function)?.entry;
        let (Some(&at), Some(&bytes)) = (entry.offsets.get(index), entry.parameters.get(index))
        else {
            return Err(code::INVALID_VALUE);
        };
        offset.put(at)?;
        size.put_if_wanted(bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncSetAttribute(
    function: Handle,
    attribute: c_int,
    value: c_int,
) -> Code {
    let arguments =
        told!(world: "{} attribute={attribute} value={value}", world.function_label(function));
    call("cuFuncSetAttribute", arguments, |mut world| {
        let function = world.live_function(function)?;
        match attribute {
            MAX_DYNAMIC_SHARED if (0..=MAX_SHARED_OPTIN).contains(&value) => {
                function.max_dynamic_shared_bytes =
                    u32::try_from(value).map_err(|_| code::INVALID_VALUE)?;
                Ok(())
            }
            CARVEOUT if (-1..=100).contains(&value) => Ok(()),
            _ => Err(code::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    function: Handle,
    block: c_int,
    dynamic: usize,
) -> Code {
    let arguments =
        told!(world: "{} block={block} shared={dynamic}", world.function_label(function));
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", arguments, |mut world| {
        world.live_current()?;
        world.live_function(function)?;
        if block < 1 {
            return Err(code::INVALID_VALUE);
        }
        blocks.put(blocks_per_multiprocessor(block, dynamic))
    })
}

/// # Safety
/// `config` has one element, and as many attributes as it says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveClusters(
    clusters: Out<c_int>,
    function: Handle,
    config: Array<LaunchConfig>,
) -> Code {
    // SAFETY: one element by this function's contract.
    let config = unsafe { config.read(1) };
    let Some(config) = config.first() else { return code::INVALID_VALUE };
    // SAFETY: by this function's contract.
    let (cluster, _) = attributes(&unsafe { config.attributes() });
    let cluster = cluster.unwrap_or([1; 3]);
    let LaunchConfig { grid, block, shared_mem_bytes, stream, .. } = *config;
    let [x, y, z] = cluster;
    let arguments = told!(world: "{} cluster={x}x{y}x{z} shared={shared_mem_bytes}", world.function_label(function));
    call("cuOccupancyMaxActiveClusters", arguments, |mut world| {
        world.live_current()?;
        world.live_function(function)?;
        check_cluster(grid, cluster)?;
        let threads: u32 = block.into_iter().product();
        let shared = usize::try_from(shared_mem_bytes).unwrap_or(usize::MAX);
        let blocks = blocks_per_multiprocessor(as_int(threads as usize), shared);
        // As if the multiprocessors lay in one row.
        let green = world.streams.get(&stream).and_then(|stream| stream.green);
        let multiprocessors = as_int(world.multiprocessors_of(green).count() as usize);
        clusters.put(multiprocessors * blocks / as_int((x * y * z) as usize))
    })
}
