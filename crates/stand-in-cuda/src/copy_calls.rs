//! Copies and fills.

use std::ffi::c_uint;

use crate::abi::{Address, Array, Code, Handle, Outcome, code};
use crate::engine::wait_idle;
use crate::memory::{Owner, Place};
use crate::stream::Command;
use crate::world::{Guard, World, call, current_context};

/// Finds one side of a copy.
type Find = fn(&mut World, Address, usize) -> Outcome<Place>;
const DEVICE: Find = World::device_place;
const HOST: Find = World::host_place;

/// # Safety
/// The host range is readable until the copy is complete (until the call returns, if it is not
/// registered).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: Address,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> Code {
    // SAFETY: by this function's contract.
    unsafe { copy("cuMemcpyHtoDAsync_v2", [to, from], bytes, stream, DEVICE, HOST) }
}

/// # Safety
/// The host range is writable until the copy is complete (until the call returns, if it is not
/// registered).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: Address,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> Code {
    // SAFETY: by this function's contract.
    unsafe { copy("cuMemcpyDtoHAsync_v2", [to, from], bytes, stream, HOST, DEVICE) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoDAsync_v2(
    to: Address,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> Code {
    // SAFETY: both places are device memory or refused, so no pageable memory is touched.
    unsafe { copy("cuMemcpyDtoDAsync_v2", [to, from], bytes, stream, DEVICE, DEVICE) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyPeerAsync(
    to: Address,
    to_context: Handle,
    from: Address,
    from_context: Handle,
    bytes: usize,
    stream: Handle,
) -> Code {
    let in_context = |context: Handle| {
        move |world: &mut World, address: Address, bytes: usize| {
            world.context(context)?;
            world.device_place(address, bytes)
        }
    };
    // SAFETY: both places are device memory or refused, so no pageable memory is touched.
    unsafe {
        copy(
            "cuMemcpyPeerAsync",
            [to, from],
            bytes,
            stream,
            in_context(to_context),
            in_context(from_context),
        )
    }
}

/// `CUDA_MEMCPY2D`, as the words it consists of.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RowCopy {
    from: RowPlace,
    to: RowPlace,
    width_bytes: usize,
    height: usize,
}

/// One side of it. Only host (1) and device (2) memory is known here.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowPlace {
    x_bytes: usize,
    y: usize,
    memory_type: c_uint,
    host: Address,
    device: Address,
    array: Handle,
    pitch: usize,
}

/// Only between registered and device memory; row by row.
///
/// # Safety
/// `copy` is one description; host ranges are readable or writable until the copy is complete.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: Array<RowCopy>, stream: Handle) -> Code {
    // SAFETY: one description by this function's contract.
    let given = unsafe { copy.read(1) };
    let Some(&RowCopy { from, to, width_bytes, height }) = given.first() else {
        return code::INVALID_VALUE;
    };
    let address = |side: RowPlace| if side.memory_type == 1 { side.host } else { side.device };
    let arguments = |world: &World| {
        let label = |side| world.memory.label(address(side));
        let (to_label, from_label) = (label(to), label(from));
        let pitches = format!("to_pitch={} from_pitch={}", to.pitch, from.pitch);
        let stream = world.stream_label(stream);
        format!(
            "to={to_label} from={from_label} {pitches} width={width_bytes} height={height} {stream}"
        )
    };
    call("cuMemcpy2DAsync_v2", arguments, |mut world| {
        let (key, _) = world.live_stream(stream)?;
        let find = |world: &mut World, side: RowPlace, row: usize| {
            if width_bytes > side.pitch || !(1..=2).contains(&side.memory_type) {
                return Err(code::INVALID_VALUE);
            }
            let at = address(side) + (side.y + row) * side.pitch + side.x_bytes;
            let place = match side.memory_type {
                1 => world.host_place(at, width_bytes)?,
                _ => world.device_place(at, width_bytes)?,
            };
            if place.owner == Owner::Pageable { Err(code::NOT_SUPPORTED) } else { Ok(place) }
        };
        for row in 0..height {
            let (to, from) = (find(&mut world, to, row)?, find(&mut world, from, row)?);
            check_context(&world, [&to, &from])?;
            world.submit(key, Command::Copy { to, from });
        }
        Ok(())
    })
}

/// Refuses memory of several mappings to a thread without a current context, as driver 580 does, whatever the stream is.
fn check_context(world: &World, places: [&Place; 2]) -> Outcome<()> {
    let is_refused = |place: &&Place| world.memory.is_of_several(place);
    if current_context() == 0 && places.iter().any(is_refused) {
        return Err(code::INVALID_VALUE);
    }
    Ok(())
}

/// Puts a copy on the stream. Pageable memory is staged or waited for, as CUDA does, and the
/// journal says `pageable`.
///
/// # Safety
/// A pageable range is readable, or writable, until this returns.
unsafe fn copy(
    name: &'static str,
    [to, from]: [Address; 2],
    bytes: usize,
    stream: Handle,
    find_to: impl FnOnce(&mut World, Address, usize) -> Outcome<Place>,
    find_from: impl FnOnce(&mut World, Address, usize) -> Outcome<Place>,
) -> Code {
    let arguments = |world: &World| {
        let (to, from) = (world.memory.label(to), world.memory.label(from));
        format!("to={to} from={from} bytes={bytes} {}", world.stream_label(stream))
    };
    call(name, arguments, |mut world| {
        let (key, _) = world.live_stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = find_to(&mut world, to, bytes)?;
        let from = find_from(&mut world, from, bytes)?;
        check_context(&world, [&to, &from])?;
        let command = if from.owner == Owner::Pageable {
            // SAFETY: the call has not returned, and the range is readable until then by this
            // function's contract.
            Command::CopyStaged { to, from: unsafe { world.memory.snapshot(&from) } }
        } else {
            Command::Copy { to, from }
        };
        world.submit(key, command);
        if to.owner == Owner::Pageable { wait_idle(world, key).map(drop) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD8Async(
    to: Address,
    value: u8,
    length: usize,
    stream: Handle,
) -> Code {
    fill("cuMemsetD8Async", to, &value.to_ne_bytes(), length, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD16Async(
    to: Address,
    value: u16,
    length: usize,
    stream: Handle,
) -> Code {
    fill("cuMemsetD16Async", to, &value.to_ne_bytes(), length, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD32Async(
    to: Address,
    value: c_uint,
    length: usize,
    stream: Handle,
) -> Code {
    fill("cuMemsetD32Async", to, &value.to_ne_bytes(), length, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD2D8Async(
    to: Address,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
    stream: Handle,
) -> Code {
    fill_rows("cuMemsetD2D8Async", to, pitch, &value.to_ne_bytes(), [width, height], stream)
}

fn fill_rows(
    name: &'static str,
    to: Address,
    pitch: usize,
    pattern: &[u8],
    [width, height]: [usize; 2],
    stream: Handle,
) -> Code {
    let value = crate::engine::number(pattern);
    let arguments = |world: &World| {
        let (stream, to) = (world.stream_label(stream), world.memory.label(to));
        format!("to={to} pitch={pitch} value={value:#x} width={width} height={height} {stream}")
    };
    call(name, arguments, |mut world: Guard| {
        let (key, _) = world.live_stream(stream)?;
        let row_bytes = width.checked_mul(pattern.len()).ok_or(code::INVALID_VALUE)?;
        if !to.is_multiple_of(pattern.len()) || !pitch.is_multiple_of(pattern.len()) {
            return Err(code::INVALID_VALUE);
        }
        if row_bytes == 0 || height == 0 {
            return Ok(());
        }
        if row_bytes > pitch {
            return Err(code::INVALID_VALUE);
        }
        let rows = (height - 1).checked_mul(pitch).and_then(|rows| rows.checked_add(row_bytes));
        let to = world.device_place(to, rows.ok_or(code::INVALID_VALUE)?)?;
        let pattern = pattern.to_vec();
        world.submit(key, Command::FillRows { to, pattern, row_bytes, pitch });
        Ok(())
    })
}

fn fill(name: &'static str, to: Address, pattern: &[u8], length: usize, stream: Handle) -> Code {
    let value = crate::engine::number(pattern);
    let arguments = |world: &World| {
        let (stream, to) = (world.stream_label(stream), world.memory.label(to));
        format!("to={to} value={value:#x} len={length} {stream}")
    };
    call(name, arguments, |mut world: Guard| {
        let (key, _) = world.live_stream(stream)?;
        let bytes = length.checked_mul(pattern.len()).ok_or(code::INVALID_VALUE)?;
        if !to.is_multiple_of(pattern.len()) {
            return Err(code::INVALID_VALUE);
        }
        if bytes == 0 {
            return Ok(());
        }
        let to = world.device_place(to, bytes)?;
        world.submit(key, Command::Fill { to, pattern: pattern.to_vec() });
        Ok(())
    })
}
