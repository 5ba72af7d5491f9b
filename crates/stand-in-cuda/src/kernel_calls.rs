//! Launches.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Array, Code, Handle, LaunchAttribute, LaunchConfig, Outcome, code};
use crate::device_calls::{MAX_THREADS_PER_BLOCK, blocks_per_multiprocessor};
use crate::memory_calls::{argument_label, as_int, pointed_to};
use crate::stream::{Command, Launch};
use crate::world::{World, call, lock};

const MAX_GRID: [u32; 3] = [2_147_483_647, 65_535, 65_535];
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];

/// # Safety
/// `parameters` has a pointer to a value for each of the kernel's parameters.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_mem_bytes: c_uint,
    stream: Handle,
    parameters: Array<*const c_void>,
    extra: Array<*const c_void>,
) -> Code {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let config = plain(grid, block, shared_mem_bytes, stream);
    // SAFETY: by this function's contract.
    unsafe { launch("cuLaunchKernel", &config, function, &parameters, !extra.is_null()) }
}

/// # Safety
/// As for [`cuLaunchKernel`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchCooperativeKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_mem_bytes: c_uint,
    stream: Handle,
    parameters: Array<*const c_void>,
) -> Code {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let config = plain(grid, block, shared_mem_bytes, stream);
    // SAFETY: by this function's contract.
    unsafe { launch("cuLaunchCooperativeKernel", &config, function, &parameters, false) }
}

fn plain(grid: [u32; 3], block: [u32; 3], shared_mem_bytes: u32, stream: Handle) -> LaunchConfig {
    let attributes = std::ptr::null();
    LaunchConfig { grid, block, shared_mem_bytes, stream, attributes, attribute_count: 0 }
}

/// # Safety
/// As for [`cuLaunchKernel`], and `config` has one element.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernelEx(
    config: Array<LaunchConfig>,
    function: Handle,
    parameters: Array<*const c_void>,
    extra: Array<*const c_void>,
) -> Code {
    // SAFETY: one element by this function's contract.
    let config = unsafe { config.read(1) };
    let Some(config) = config.first() else { return code::INVALID_VALUE };
    // SAFETY: by this function's contract.
    unsafe { launch("cuLaunchKernelEx", config, function, &parameters, !extra.is_null()) }
}

/// # Safety
/// As for [`cuLaunchKernel`].
unsafe fn launch(
    name: &'static str,
    config: &LaunchConfig,
    function: Handle,
    parameters: &Array<*const c_void>,
    has_extra: bool,
) -> Code {
    // SAFETY: by this function's contract.
    let arguments = unsafe { copy_arguments(function, parameters) };
    let LaunchConfig { grid, block, shared_mem_bytes, stream, .. } = *config;
    // SAFETY: by this function's contract.
    let given = unsafe { config.attributes() };
    let (cluster, cooperative) = attributes(&given);
    let is_programmatic = given.iter().any(|one| one.id == 6 && one.value[0] != 0);
    let cooperative = cooperative || name == "cuLaunchCooperativeKernel";
    let label = |world: &World| {
        let values = arguments.iter().flatten().map(|argument| argument_label(world, argument));
        let values = values.collect::<Vec<_>>().join(",");
        let mut attributes = String::new();
        if let Some(cluster) = cluster {
            attributes.push_str(&format!(" cluster={}", dimensions(cluster)));
        }
        if cooperative {
            attributes.push_str(" cooperative");
        }
        if is_programmatic {
            attributes.push_str(" programmatic");
        }
        let (function, stream) = (world.function_label(function), world.stream_label(stream));
        let (grid, block) = (dimensions(grid), dimensions(block));
        format!(
            "{function} {stream} grid={grid} block={block} shared={shared_mem_bytes} \
             args=({values}){attributes}"
        )
    };
    call(name, label, |mut world| {
        let (key, device) = world.live_stream(stream)?;
        if has_extra {
            return Err(code::NOT_SUPPORTED);
        }
        let size = (grid, block, shared_mem_bytes);
        let mut prepared = prepare(&mut world, device, function, size, arguments.clone()?)?;
        prepared.green = world.streams.get(&key).and_then(|stream| stream.green);
        if let Some(cluster) = cluster {
            check_cluster(grid, cluster)?;
        }
        if cooperative {
            let multiprocessors = world.multiprocessors_of(prepared.green).count();
            check_fits(multiprocessors, grid, block, shared_mem_bytes)?;
        }
        world.submit(key, Command::Kernel(prepared));
        Ok(())
    })
}

/// Checks a launch on a stream of `device`.
pub(crate) fn prepare(
    world: &mut World,
    device: usize,
    function: Handle,
    (grid, block, shared_mem_bytes): ([u32; 3], [u32; 3], u32),
    arguments: Vec<Vec<u8>>,
) -> Outcome<Launch> {
    let loaded = world.live_function(function)?;
    let (module, entry, most_shared) =
        (loaded.module, loaded.entry.name.clone(), loaded.max_dynamic_shared_bytes);
    if loaded.device != device {
        world.journal.misuse(format!("{entry} was launched on a stream of another context"));
        return Err(code::INVALID_HANDLE);
    }
    check_dimensions(grid, block)?;
    if shared_mem_bytes > most_shared {
        return Err(code::INVALID_VALUE);
    }
    let mut places = Vec::new();
    for argument in &arguments {
        places.extend(pointed_to(world, argument));
    }
    Ok(Launch { entry, green: None, module, arguments, places })
}

/// Copies the arguments, as the driver does during the call. Their number and sizes are the entry's
/// in the module's text.
///
/// # Safety
/// As for [`cuLaunchKernel`].
pub(crate) unsafe fn copy_arguments(
    function: Handle,
    parameters: &Array<*const c_void>,
) -> Outcome<Vec<Vec<u8>>> {
    let sizes = {
        let world = lock();
        match world.functions.get(&world.as_function(function)) {
            Some(function) => function.entry.parameters.clone(),
            None => return Ok(Vec::new()),
        }
    };
    if parameters.is_null() && !sizes.is_empty() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: a pointer for each parameter by this function's contract.
    let pointers = unsafe { parameters.read(sizes.len()) };
    let mut arguments = Vec::with_capacity(sizes.len());
    for (&pointer, size) in pointers.iter().zip(sizes) {
        if pointer.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null, and a value of the parameter's size by this function's contract.
        arguments.push(unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) }.to_vec());
    }
    Ok(arguments)
}

/// The cluster and whether the launch is cooperative; other attributes are ignored.
pub(crate) fn attributes(given: &[LaunchAttribute]) -> (Option<[u32; 3]>, bool) {
    let value = |id| given.iter().find(|one| one.id == id).map(|one| one.value);
    let cluster = value(4).map(|value| [value[0], value[1], value[2]]);
    (cluster, value(2).is_some_and(|value| value[0] != 0))
}

/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: whole clusters, of no more blocks than are portable.
pub(crate) fn check_cluster(grid: [u32; 3], cluster: [u32; 3]) -> Outcome {
    let blocks: u64 = cluster.into_iter().map(u64::from).product();
    let whole = grid.iter().zip(cluster).all(|(grid, cluster)| cluster > 0 && grid % cluster == 0);
    if whole && blocks <= 8 { Ok(()) } else { Err(code::INVALID_CLUSTER_SIZE) }
}

fn dimensions([x, y, z]: [u32; 3]) -> String {
    format!("{x}x{y}x{z}")
}

fn check_dimensions(grid: [u32; 3], block: [u32; 3]) -> Outcome {
    let inside = |given: [u32; 3], most: [u32; 3]| {
        given.iter().zip(most).all(|(&given, most)| (1..=most).contains(&given))
    };
    let threads: u64 = block.into_iter().map(u64::from).product();
    let threads_fit = threads <= u64::from(MAX_THREADS_PER_BLOCK.unsigned_abs());
    if inside(grid, MAX_GRID) && inside(block, MAX_BLOCK) && threads_fit {
        Ok(())
    } else {
        Err(code::INVALID_VALUE)
    }
}

/// All blocks of a cooperative launch must be on so many multiprocessors at once.
fn check_fits(
    multiprocessors: u32,
    grid: [u32; 3],
    block: [u32; 3],
    shared_mem_bytes: u32,
) -> Outcome {
    let threads: u32 = block.into_iter().product();
    let shared = usize::try_from(shared_mem_bytes).unwrap_or(usize::MAX);
    let threads: c_int = as_int(usize::try_from(threads).unwrap_or(usize::MAX));
    let room = as_int(multiprocessors as usize) * blocks_per_multiprocessor(threads, shared);
    let blocks: u128 = grid.into_iter().map(u128::from).product();
    if blocks <= u128::from(room.unsigned_abs()) {
        Ok(())
    } else {
        Err(code::COOPERATIVE_LAUNCH_TOO_LARGE)
    }
}
