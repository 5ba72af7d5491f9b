//! Initialization, devices, contexts, peers and memory pools.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::AtomicU64;

use crate::abi::{Code, Handle, Out, code};
use crate::engine::wait_device;
use crate::greens::MULTIPROCESSORS;
use crate::journal::{capture_mode, set_capture_mode};
use crate::world::{self, World, call, context_handle, nothing, pool_handle, slowly, told};

const NAME: &str = "Stand-in GPU";

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(flags: c_uint) -> Code {
    stay_loaded();
    call("cuInit", nothing, |mut world| {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        world.initialized = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> Code {
    call("cuDriverGetVersion", nothing, |_| version.put(13_000))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> Code {
    call("cuDeviceGet", told!("device={ordinal}"), |world| {
        world.device(ordinal)?;
        device.put(ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> Code {
    call("cuDeviceGetCount", nothing, |world| {
        count.put(c_int::try_from(world.device_count).unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: c_int) -> Code {
    call("cuDeviceGetName", told!("device={device}"), |world| {
        world.device(device)?;
        name.check()?;
        name.put_text(NAME, usize::try_from(length).unwrap_or(0));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> Code {
    call("cuDeviceGetUuid_v2", told!("device={device}"), |world| {
        let index = world.device(device)?;
        let mut value = *b"stand-in device0";
        value[15] += u8::try_from(index).unwrap_or(0);
        uuid.put(value)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> Code {
    call("cuDeviceGetAttribute", told!("attribute={attribute} device={device}"), |world| {
        world.device(device)?;
        let set = world.attributes.get(&attribute).copied();
        value.put(set.unwrap_or_else(|| default_attribute(attribute)))
    })
}

/// The numbers of an H200, by `CUdevice_attribute`; 0 for what nobody asks.
fn default_attribute(attribute: c_int) -> c_int {
    match attribute {
        1 => MAX_THREADS_PER_BLOCK,       // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,                    // MAX_BLOCK_DIM_X, _Y
        4 => 64,                          // MAX_BLOCK_DIM_Z
        5 => 2_147_483_647,               // MAX_GRID_DIM_X
        6 | 7 => 65_535,                  // MAX_GRID_DIM_Y, _Z
        8 => 49_152,                      // MAX_SHARED_MEMORY_PER_BLOCK
        9 => 65_536,                      // TOTAL_CONSTANT_MEMORY
        10 => 32,                         // WARP_SIZE
        11 => 2_147_483_647,              // MAX_PITCH
        12 | 82 => 65_536,                // MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR
        13 => 1_980_000,                  // CLOCK_RATE
        14 => 512,                        // TEXTURE_ALIGNMENT
        15 | 19 | 31 | 32 | 41 => 1, // OVERLAP, MAP_HOST_MEMORY, CONCURRENT_KERNELS, ECC, UNIFIED
        16 => MULTIPROCESSORS,       // MULTIPROCESSOR_COUNT
        36 => 3_201_000,             // MEMORY_CLOCK_RATE
        37 => 6144,                  // GLOBAL_MEMORY_BUS_WIDTH
        38 => 62_914_560,            // L2_CACHE_SIZE
        39 => THREADS_PER_MULTIPROCESSOR, // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 3,                     // ASYNC_ENGINE_COUNT
        75 => 9,                     // COMPUTE_CAPABILITY_MAJOR (_MINOR, 76, is 0)
        78 => 1,                     // STREAM_PRIORITIES_SUPPORTED
        81 => 233_472,               // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        83 | 89 | 90 | 91 => 1,      // MANAGED, CONCURRENT_MANAGED, PREEMPTION, REGISTERED_POINTER
        95 | 98 | 99 => 1, // COOPERATIVE_LAUNCH, CAN_FLUSH_REMOTE_WRITES, HOST_REGISTER_SUPPORTED
        97 => MAX_SHARED_OPTIN, // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        102 | 103 => 1,    // VIRTUAL_MEMORY_MANAGEMENT, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        106 => BLOCKS_PER_MULTIPROCESSOR, // MAX_BLOCKS_PER_MULTIPROCESSOR
        111 => 1024,       // RESERVED_SHARED_MEMORY_PER_BLOCK
        113 | 115 | 120 => 1, // READ_ONLY_HOST_REGISTER, MEMORY_POOLS_SUPPORTED, CLUSTER_LAUNCH
        122 | 123 => 1,    // CAN_USE_64_BIT_STREAM_MEM_OPS, CAN_USE_STREAM_WAIT_VALUE_NOR
        125 => 1,          // IPC_EVENT_SUPPORTED
        _ => 0,
    }
}

pub(crate) const MAX_THREADS_PER_BLOCK: c_int = 1024;
const THREADS_PER_MULTIPROCESSOR: c_int = 2048;
const BLOCKS_PER_MULTIPROCESSOR: c_int = 32;
pub(crate) const MAX_SHARED_OPTIN: c_int = 232_448;
/// Registers that every kernel is said to use.
pub(crate) const REGISTERS_PER_THREAD: c_int = 32;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) -> Code {
    call("cuDevicePrimaryCtxRetain", told!("device={device}"), |mut world| {
        let device = world.device(device)?;
        world.alive(device)?;
        context.put(context_handle(device))?;
        world.devices[device].retained += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    slowly(&SLOW_RELEASE_MS, || release_now(device))
}

/// What `standin_slow_release` says, in milliseconds.
pub(crate) static SLOW_RELEASE_MS: AtomicU64 = AtomicU64::new(0);

fn release_now(device: c_int) -> Code {
    call("cuDevicePrimaryCtxRelease_v2", told!("device={device}"), |mut world| {
        let device = world.device(device)?;
        match world.devices[device].retained.checked_sub(1) {
            Some(left) => {
                world.devices[device].retained = left;
                Ok(())
            }
            None => {
                world.journal.misuse(format!("device {device}'s primary context is not retained"));
                Err(code::INVALID_CONTEXT)
            }
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetCurrent(context: Out<Handle>) -> Code {
    call("cuCtxGetCurrent", nothing, |_| context.put(world::current_context()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCurrent(context: Handle) -> Code {
    call("cuCtxSetCurrent", told!(world: "{}", context_label(world, context)), |mut world| {
        if context != 0 {
            world.context(context)?;
        }
        world::set_current_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> Code {
    call("cuCtxPushCurrent_v2", told!(world: "{}", context_label(world, context)), |mut world| {
        world.context(context)?;
        if world::push_context(context) { Ok(()) } else { Err(code::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPopCurrent_v2(context: Out<Handle>) -> Code {
    call("cuCtxPopCurrent_v2", nothing, |_| match world::pop_context() {
        0 => Err(code::INVALID_CONTEXT),
        popped => {
            context.put_if_wanted(popped);
            Ok(())
        }
    })
}

fn context_label(world: &World, context: Handle) -> String {
    if let Some(green) = world.green_of_context(context) {
        return format!("context={}", world.green_label(green).replace('=', ""));
    }
    if context == 0 { "context=none".to_owned() } else { format!("context={context:#x}") }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSynchronize() -> Code {
    call("cuCtxSynchronize", nothing, |mut world| {
        let device = world.live_current()?;
        wait_device(world, device).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetStreamPriorityRange(
    least: Out<c_int>,
    greatest: Out<c_int>,
) -> Code {
    call("cuCtxGetStreamPriorityRange", nothing, |mut world| {
        world.current()?;
        least.put_if_wanted(LEAST_PRIORITY);
        greatest.put_if_wanted(GREATEST_PRIORITY);
        Ok(())
    })
}

pub(crate) const LEAST_PRIORITY: c_int = 0;
pub(crate) const GREATEST_PRIORITY: c_int = -5;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceCanAccessPeer(
    can: Out<c_int>,
    device: c_int,
    peer: c_int,
) -> Code {
    call("cuDeviceCanAccessPeer", told!("device={device} peer={peer}"), |world| {
        let different = world.device(device)? != world.device(peer)?;
        can.put(c_int::from(different))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) -> Code {
    call("cuCtxEnablePeerAccess", told!("peer={peer:#x} flags={flags}"), |mut world| {
        let device = world.live_current()?;
        let peer = world.context(peer)?;
        if peer == device {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        if world.peers.contains(&(device, peer)) {
            return Err(code::PEER_ACCESS_ALREADY_ENABLED);
        }
        world.peers.push((device, peer));
        Ok(())
    })
}

/// The thread's mode is exchanged with the one given. Lines of calls made in relaxed mode say so in
/// the journal.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) -> Code {
    let given = mode.peek().map_or_else(String::new, |mode| format!("mode={mode}"));
    call(
        "cuThreadExchangeStreamCaptureMode",
        |_| given,
        |_| {
            let old = capture_mode();
            let new = mode.replace(old)?;
            if new > 2 {
                return Err(code::INVALID_VALUE);
            }
            set_capture_mode(new);
            Ok(())
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: c_int) -> Code {
    mem_pool("cuDeviceGetDefaultMemPool", pool, device)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetMemPool(pool: Out<Handle>, device: c_int) -> Code {
    mem_pool("cuDeviceGetMemPool", pool, device)
}

fn mem_pool(name: &'static str, pool: Out<Handle>, device: c_int) -> Code {
    call(name, told!("device={device}"), |world| {
        let device = world.device(device)?;
        world.alive(device)?;
        pool.put(pool_handle(device))
    })
}

/// Blocks of a kernel of [`REGISTERS_PER_THREAD`] registers that fit into one multiprocessor.
pub(crate) fn blocks_per_multiprocessor(block: c_int, dynamic_bytes: usize) -> c_int {
    if block > MAX_THREADS_PER_BLOCK {
        return 0;
    }
    let threads = (block + 31) / 32 * 32;
    let by_threads = THREADS_PER_MULTIPROCESSOR / threads;
    let by_registers = 65_536 / (REGISTERS_PER_THREAD * threads);
    let by_shared = c_int::try_from(233_472 / (dynamic_bytes.saturating_add(1024))).unwrap_or(0);
    by_threads.min(by_registers).min(by_shared).min(BLOCKS_PER_MULTIPROCESSOR)
}

/// Keeps this library mapped for the life of the process: its workers must not lose their code when
/// a handle is closed.
#[cfg(target_os = "linux")]
fn stay_loaded() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let (null, null_mut) = (std::ptr::null(), std::ptr::null_mut());
        let mut info = libc::Dl_info {
            dli_fname: null,
            dli_fbase: null_mut,
            dli_sname: null,
            dli_saddr: null_mut,
        };
        // SAFETY: the address is any; `info` may be written.
        let found = unsafe { libc::dladdr(cuInit as *const c_void, &raw mut info) };
        if found != 0 {
            let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            // SAFETY: the name is the loader's own string for this library; NOLOAD opens nothing
            // new. The handle that comes back is kept for ever on purpose.
            unsafe { libc::dlopen(info.dli_fname, flags) };
        }
    });
}

/// Elsewhere the library is not unloaded by the tests.
#[cfg(not(target_os = "linux"))]
fn stay_loaded() {}
