//! Streams: creation, queries, waits, words and host functions.

use std::ffi::{c_int, c_uint};

use crate::abi::{Address, Code, Handle, Out, code};
use crate::device_calls::{GREATEST_PRIORITY, LEAST_PRIORITY};
use crate::engine::wait_idle;
use crate::stream::{Command, HostFunction};
use crate::world::{call, current_context, told};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) -> Code {
    create("cuStreamCreate", stream, flags, LEAST_PRIORITY)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreateWithPriority(
    stream: Out<Handle>,
    flags: c_uint,
    priority: c_int,
) -> Code {
    create("cuStreamCreateWithPriority", stream, flags, priority)
}

fn create(name: &'static str, stream: Out<Handle>, flags: c_uint, priority: c_int) -> Code {
    call(name, told!("flags={flags} priority={priority}"), |mut world| {
        let device = world.live_current()?;
        stream.check()?;
        if flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        // A priority outside the range is clamped, as CUDA does.
        let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
        stream.put(world.add_stream(device, priority, flags)?)
    })
}

/// The handle ends at once; what was queued still runs.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Code {
    call("cuStreamDestroy_v2", told!(world: "{}", world.stream_label(stream)), |mut world| {
        if stream <= 2 {
            return Err(code::INVALID_HANDLE);
        }
        let key = world.stream(stream)?;
        if let Some(captured) = world.captures.remove(&key) {
            world.remove_graph(captured)?;
        }
        let mut device = 0;
        if let Some(stream) = world.streams.get_mut(&key) {
            stream.retired = true;
            device = stream.device;
            stream.bell.notify_all();
        }
        world.alive(device)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamQuery(stream: Handle) -> Code {
    call("cuStreamQuery", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, _) = world.live_stream(stream)?;
        match world.streams.get(&key) {
            Some(stream) if !stream.is_idle() => Err(code::NOT_READY),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(stream: Handle) -> Code {
    call("cuStreamSynchronize", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, _) = world.live_stream(stream)?;
        wait_idle(world, key).map(drop)
    })
}

/// Captures the event's last record: a later one changes nothing, and one never recorded is not
/// waited for.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Code {
    let arguments = told!(world: "{} {}", world.stream_label(stream), world.event_label(event));
    call("cuStreamWaitEvent", arguments, |mut world| {
        let (key, _) = world.live_stream(stream)?;
        let last = world.live_event(event)?.last.get();
        if flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        if let Some(point) = last {
            world.come_after(key, &point);
            world.submit(key, Command::Wait(point));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamGetPriority(stream: Handle, priority: Out<c_int>) -> Code {
    call("cuStreamGetPriority", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let key = world.stream(stream)?;
        priority.put(world.streams.get(&key).map_or(0, |stream| stream.priority))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) -> Code {
    call("cuStreamGetFlags", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let key = world.stream(stream)?;
        flags.put(world.streams.get(&key).map_or(0, |stream| stream.flags))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWriteValue64_v2(
    stream: Handle,
    address: Address,
    value: u64,
    flags: c_uint,
) -> Code {
    let arguments = |world: &crate::world::World| {
        let (stream, to) = (world.stream_label(stream), world.memory.label(address));
        format!("{stream} to={to} value={value} flags={flags}")
    };
    call("cuStreamWriteValue64_v2", arguments, |mut world| {
        let (key, _) = world.live_stream(stream)?;
        if !address.is_multiple_of(8) || flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        let to = world.device_place(address, 8)?;
        world.submit(key, Command::WriteWord { to, value });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchHostFunc(
    stream: Handle,
    function: Option<HostFunction>,
    data: Address,
) -> Code {
    call("cuLaunchHostFunc", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, _) = world.live_stream(stream)?;
        let function = function.ok_or(code::INVALID_VALUE)?;
        world.submit(key, Command::HostFunction { function, data });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamIsCapturing(stream: Handle, status: Out<c_uint>) -> Code {
    call("cuStreamIsCapturing", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, _) = world.live_stream(stream)?;
        status.put(u32::from(world.captures.contains_key(&key)))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) -> Code {
    let line = told!(world: "{} mode={mode}", world.stream_label(stream));
    call("cuStreamBeginCapture_v2", line, |mut world| {
        let (key, device) = world.live_stream(stream)?;
        if world.captures.contains_key(&key) {
            return Err(code::INVALID_VALUE);
        }
        let graph = world.add_graph(device);
        world.captures.insert(key, graph);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) -> Code {
    call("cuStreamEndCapture", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, _) = world.live_stream(stream)?;
        graph.check()?;
        match world.captures.remove(&key) {
            Some(captured) => graph.put(captured),
            None => Err(code::INVALID_VALUE),
        }
    })
}

/// The context that the stream was made in.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) -> Code {
    call("cuStreamGetCtx", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, device) = world.live_stream(stream)?;
        let green = world.streams.get(&key).and_then(|stream| stream.green);
        let green = green.and_then(|green| world.greens.get(&green));
        let primary = crate::world::context_handle(device);
        let handle = green.map_or(primary, |green| green.context);
        context.put(if stream <= 2 { current_context() } else { handle })
    })
}
