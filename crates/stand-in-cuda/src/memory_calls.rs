//! Device memory and registered memory.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Address, Array, Code, Handle, Out, Outcome, code};
use crate::engine::wait_device;
use crate::memory::{Free, Owner, Place, PoolUser};
use crate::stream::Command;
use crate::world::{Guard, World, call, nothing, pool_handle, told};

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, and the four that count bytes: reserved and used, each now and at most.
const POOL_RELEASE_THRESHOLD: c_uint = 4;
const POOL_RESERVED: c_uint = 5;
const POOL_RESERVED_HIGH: c_uint = 6;
const POOL_USED: c_uint = 7;
const POOL_USED_HIGH: c_uint = 8;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) -> Code {
    call("cuMemAlloc_v2", told!("bytes={bytes}"), |mut world| {
        let device = world.live_current()?;
        address.check()?;
        address.put(world.memory.allocate(device, bytes, None)?)
    })
}

/// From the device's default pool.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAllocAsync(
    address: Out<Address>,
    bytes: usize,
    stream: Handle,
) -> Code {
    let line = told!(world: "bytes={bytes} {}", world.stream_label(stream));
    call("cuMemAllocAsync", line, |mut world| {
        world.live_current()?;
        let (_, device) = world.live_stream(stream)?;
        allocate_from(world, pool_handle(device), address, bytes, stream)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAllocFromPoolAsync(
    address: Out<Address>,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> Code {
    let line = told!(world: "bytes={bytes} pool={pool:#x} {}", world.stream_label(stream));
    call("cuMemAllocFromPoolAsync", line, |mut world| {
        world.live_current()?;
        allocate_from(world, pool, address, bytes, stream)
    })
}

fn allocate_from(
    mut world: Guard,
    pool: Handle,
    address: Out<Address>,
    bytes: usize,
    stream: Handle,
) -> Outcome {
    let (key, device) = world.live_stream(stream)?;
    let of = world.live_pool(pool)?;
    if of.device != device {
        world
            .journal
            .misuse("memory of one device was allocated on a stream of another".to_owned());
        return Err(code::INVALID_VALUE);
    }
    let max_bytes = of.max_bytes;
    address.check()?;
    let clock = world.clock(key);
    let user = PoolUser { pool, max_bytes, clock: &clock };
    address.put(world.memory.allocate(device, bytes, Some(&user))?)
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolProps {
    alloc_type: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    win32_security_attributes: Handle,
    max_bytes: usize,
    reserved: [u8; 56],
}

/// Of pinned memory of a device, for this process alone.
///
/// # Safety
/// `props` is one description.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolCreate(
    pool: Out<Handle>,
    props: Array<PoolProps>,
) -> Code {
    // SAFETY: one description by this function's contract.
    let given = unsafe { props.read(1) };
    let Some(&PoolProps { alloc_type, handle_types, location, max_bytes, reserved, .. }) =
        given.first()
    else {
        return code::INVALID_VALUE;
    };
    let security = given[0].win32_security_attributes;
    let line = told!("location={}:{} max={max_bytes}", location[0], location[1]);
    call("cuMemPoolCreate", line, |mut world| {
        // CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE.
        let known = (alloc_type, handle_types, location[0], security) == (1, 0, 1, 0);
        if !known || reserved != [0; 56] {
            world.journal.misuse("a memory pool's properties are not what they must be".to_owned());
            return Err(code::INVALID_VALUE);
        }
        let device = world.device(location[1])?;
        world.alive(device)?;
        pool.check()?;
        let most = if max_bytes == 0 { u64::MAX } else { max_bytes as u64 };
        pool.put(world.add_pool(device, most))
    })
}

/// The handle ends at once; what was allocated from it stays until it is freed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolDestroy(pool: Handle) -> Code {
    call("cuMemPoolDestroy", told!("pool={pool:#x}"), |mut world| {
        let device = world.remove_pool(pool)?.device;
        world.memory.abandon(pool);
        world.alive(device)
    })
}

/// Waits for the device first, as CUDA does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: Address) -> Code {
    call("cuMemFree_v2", told!(world: "{}", world.memory.label(address)), |mut world| {
        let device = world.current()?;
        if address == 0 {
            return world.alive(device);
        }
        begin_free(&mut world, address, device, Free { stream: 0, command: 0 })?;
        let mut world = wait_device(world, device)?;
        world.memory.finish_free(address);
        Ok(())
    })
}

/// The bytes are back when the stream gets there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeAsync(address: Address, stream: Handle) -> Code {
    let arguments = told!(world: "{} {}", world.memory.label(address), world.stream_label(stream));
    call("cuMemFreeAsync", arguments, |mut world| {
        let key = world.stream(stream)?;
        let on = world.streams.get(&key);
        let (device, last) = on.map_or((0, 0), |stream| (stream.device, stream.submitted));
        begin_free(&mut world, address, device, Free { stream: key, command: last + 1 })?;
        world.submit(key, Command::Free(address));
        Ok(())
    })
}

/// Refuses what is no live allocation, as misuse. On a lost device the books are closed and its
/// memory stays.
fn begin_free(world: &mut World, address: Address, device: usize, free: Free) -> Outcome {
    if world.memory.begin_free(address, free).is_none() {
        let label = world.memory.label(address);
        world
            .journal
            .misuse(format!("free of {label} ({address:#x}), which is no live allocation"));
        return Err(code::INVALID_VALUE);
    }
    let alive = world.alive(device);
    if alive.is_err() {
        world.memory.forget(address);
    }
    alive
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> Code {
    call("cuMemGetInfo_v2", nothing, |mut world| {
        let device = world.live_current()?;
        let all = world.memory.total_bytes;
        let left = world.memory.left(device);
        free.put(usize::try_from(left).unwrap_or(usize::MAX))?;
        total.put(usize::try_from(all).unwrap_or(usize::MAX))
    })
}

/// # Safety
/// `value` has the attribute's type, as `cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: Handle,
    attribute: c_uint,
    value: Array<u8>,
) -> Code {
    // SAFETY: the caller gave as many bytes as the attribute's type has.
    let bytes = unsafe { value.read(pool_attribute_bytes(attribute)) };
    let given = crate::engine::number(&bytes);
    let line = told!("attribute={attribute} value={given} pool={pool:#x}");
    call("cuMemPoolSetAttribute", line, |mut world| {
        let pool = world.live_pool(pool)?;
        let known = usize::try_from(attribute).ok().filter(|_| attribute > 0 && !value.is_null());
        let slot = known.and_then(|index| pool.attributes.get_mut(index));
        *slot.ok_or(code::INVALID_VALUE)? = given;
        Ok(())
    })
}

/// # Safety
/// `value` has the attribute's type, as `cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolGetAttribute(
    pool: Handle,
    attribute: c_uint,
    value: Array<u8>,
) -> Code {
    call("cuMemPoolGetAttribute", told!("attribute={attribute}"), |mut world| {
        let attributes = world.live_pool(pool)?.attributes;
        let (used, used_high) = world.memory.of_pool(pool);
        let (reserved, reserved_high) = world.memory.reserved(pool);
        let answer = match usize::try_from(attribute).ok().and_then(|index| attributes.get(index)) {
            None => return Err(code::INVALID_VALUE),
            Some(_) if value.is_null() || attribute == 0 => return Err(code::INVALID_VALUE),
            Some(&set) => match attribute {
                POOL_RESERVED => reserved,
                POOL_RESERVED_HIGH => reserved_high,
                POOL_USED => used,
                POOL_USED_HIGH => used_high,
                _ => set,
            },
        };
        for (index, byte) in
            answer.to_le_bytes().into_iter().take(pool_attribute_bytes(attribute)).enumerate()
        {
            // SAFETY: not null, checked above, and the caller gave as many bytes as the
            // attribute's type has.
            unsafe { value.write(index, byte) };
        }
        Ok(())
    })
}

/// The first three are `int`, the others `cuuint64_t`.
fn pool_attribute_bytes(attribute: c_uint) -> usize {
    if attribute < POOL_RELEASE_THRESHOLD { 4 } else { 8 }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolTrimTo(pool: Handle, keep_bytes: usize) -> Code {
    call("cuMemPoolTrimTo", told!("keep={keep_bytes}"), |mut world| {
        world.live_pool(pool)?;
        world.memory.trim(pool, keep_bytes as u64);
        Ok(())
    })
}

/// Noted and not enforced.
///
/// # Safety
/// `descriptions` has `count` elements, each a `CUmemAccessDesc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAccess(
    pool: Handle,
    descriptions: Array<[u32; 3]>,
    count: usize,
) -> Code {
    // SAFETY: `count` elements by this function's contract; a description is three 32-bit fields.
    let given = unsafe { descriptions.read(count) };
    let arguments = |_: &World| {
        let each = given
            .iter()
            .map(|[kind, device, flags]| format!("location={kind}:{device} flags={flags}"));
        format!("pool={pool:#x} {}", each.collect::<Vec<_>>().join(" "))
    };
    call("cuMemPoolSetAccess", arguments, |mut world| world.live_pool(pool).map(drop))
}

/// Never given back: `cuMemFreeHost` is not there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostAlloc(
    address: Out<Address>,
    bytes: usize,
    flags: c_uint,
) -> Code {
    call("cuMemHostAlloc", told!("bytes={bytes} flags={flags}"), |mut world| {
        world.live_current()?;
        // PORTABLE, DEVICEMAP, WRITECOMBINED.
        if flags > 7 || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        address.check()?;
        address.put(world.memory.allocate_registered(bytes)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostRegister_v2(
    address: Address,
    bytes: usize,
    flags: c_uint,
) -> Code {
    call("cuMemHostRegister_v2", told!("bytes={bytes} flags={flags}"), |mut world| {
        world.live_current()?;
        // PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY.
        if flags > 15 {
            return Err(code::INVALID_VALUE);
        }
        let registered = world.memory.register(address, bytes);
        if registered == Err(code::HOST_MEMORY_ALREADY_REGISTERED) {
            world.journal.misuse(format!("{bytes} bytes at {address:#x} are registered already"));
        }
        registered
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostUnregister(address: Address) -> Code {
    call("cuMemHostUnregister", told!(world: "{}", world.memory.label(address)), |mut world| {
        let device = world.current()?;
        let Some(owner) = world.memory.unregister(address) else {
            world.journal.misuse(format!("no registration starts at {address:#x}"));
            return Err(code::HOST_MEMORY_NOT_REGISTERED);
        };
        world.alive(device)?;
        world.check_unused(owner);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostGetDevicePointer_v2(
    device: Out<Address>,
    host: Address,
    flags: c_uint,
) -> Code {
    let line = told!(world: "{}", world.memory.label(host));
    call("cuMemHostGetDevicePointer_v2", line, |mut world| {
        world.live_current()?;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        // Host memory that is not registered is refused; device memory is no host memory.
        match world.host_place(host, 1)?.owner {
            Owner::Registration(_) => device.put(host),
            _ => {
                world.journal.misuse(format!("{host:#x} is not registered"));
                Err(code::INVALID_VALUE)
            }
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuPointerGetAttribute(
    data: Out<c_void>,
    attribute: c_int,
    address: Address,
) -> Code {
    let line = told!(world: "attribute={attribute} {}", world.memory.label(address));
    call("cuPointerGetAttribute", line, |mut world| {
        world.live_current()?;
        let found = world.memory.allocation_of(address);
        match (attribute, found) {
            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device memory is 2, host memory 1.
            (2, Some(_)) => data.of::<c_uint>().put(2),
            (2, None) if world.memory.is_registered(address) => data.of::<c_uint>().put(1),
            // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ..._RANGE_START_ADDR, ..._RANGE_SIZE.
            (9, Some((.., device))) => data.of::<c_int>().put(device as c_int),
            (11, Some((start, ..))) => data.of::<u64>().put(start as u64),
            (12, Some((_, bytes, _))) => data.of::<usize>().put(bytes),
            _ => Err(code::INVALID_VALUE),
        }
    })
}

/// Used by the launch: an argument that points into known memory needs it until the kernel has run.
pub(crate) fn pointed_to(world: &mut World, argument: &[u8]) -> Vec<Place> {
    let mut places = Vec::new();
    for word in argument.as_chunks::<8>().0 {
        let Ok(address) = usize::try_from(u64::from_le_bytes(*word)) else { continue };
        match world.memory.device_place(address, 1) {
            Some(place) => places.push(place),
            None if world.memory.is_device_address(address) => {
                let label = world.memory.label(address);
                world
                    .journal
                    .misuse(format!("a kernel's argument points to {label}, which was freed"));
            }
            None => {}
        }
    }
    places
}

/// The journal's word for an argument: known memory by name, anything else as a number, or its size
/// when it is large.
pub(crate) fn argument_label(world: &World, argument: &[u8]) -> String {
    let value = crate::engine::number(argument);
    let address = usize::try_from(value).unwrap_or(0);
    match argument.len() {
        8 if world.memory.device_place(address, 1).is_some() => world.memory.label(address),
        0..=8 => value.to_string(),
        bytes => format!("<{bytes} bytes>"),
    }
}

/// A count for C.
pub(crate) fn as_int(count: usize) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}
