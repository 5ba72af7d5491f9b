//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use crate::abi::{Code, Handle, Out, Outcome, code};
use crate::engine::wait_point;
use crate::points::{Everybody, Point};
use crate::stream::Command;
use crate::world::{World, call, told};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: c_uint = 4;

/// `CUipcEventHandle`: here the exporter's handle, and zeros.
#[repr(C)]
pub(crate) struct IpcHandle([u8; 64]);

/// Only for events made to be exported.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcGetEventHandle(out: Out<IpcHandle>, event: Handle) -> Code {
    call("cuIpcGetEventHandle", told!(world: "{}", world.event_label(event)), |mut world| {
        if world.live_event(event)?.flags & INTERPROCESS == 0 {
            return Err(code::INVALID_HANDLE);
        }
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&event.to_le_bytes());
        out.put(IpcHandle(bytes))
    })
}

/// Opens an event of this very process: there is no other.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcOpenEventHandle(out: Out<Handle>, handle: IpcHandle) -> Code {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle.0[..8]);
    let event = Handle::from_le_bytes(bytes);
    call("cuIpcOpenEventHandle", told!(world: "{}", world.event_label(event)), |mut world| {
        let device = world.live_current()?;
        out.check()?;
        let exported = world.events.get(&event).ok_or(code::INVALID_VALUE)?;
        if handle.0[8..] != [0; 56] || exported.flags & INTERPROCESS == 0 {
            return Err(code::INVALID_VALUE);
        }
        let last = Arc::clone(&exported.last);
        out.put(world.add_event(device, DISABLE_TIMING, last))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventCreate(event: Out<Handle>, flags: c_uint) -> Code {
    call("cuEventCreate", told!("flags={flags}"), |mut world| {
        let device = world.live_current()?;
        event.check()?;
        // BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS.
        let interprocess = flags & INTERPROCESS != 0;
        if flags > 7 || (interprocess && flags & DISABLE_TIMING == 0) {
            return Err(code::INVALID_VALUE);
        }
        event.put(world.add_event(device, flags, Arc::default()))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(handle: Handle, stream: Handle) -> Code {
    let arguments = told!(world: "{} {}", world.event_label(handle), world.stream_label(stream));
    call("cuEventRecord", arguments, |mut world| {
        let (key, device) = world.live_stream(stream)?;
        if world.live_event(handle)?.device != device {
            world.journal.misuse("an event was recorded on a stream of another context".to_owned());
            return Err(code::INVALID_HANDLE);
        }
        record_on(&mut world, handle, key)
    })
}

/// Records an event behind what is on a stream.
pub(crate) fn record_on(world: &mut World, event: Handle, stream: Handle) -> Outcome {
    let point = Arc::new(Point::behind(world.clock(stream)));
    world.live_event(event)?.last.set(Arc::clone(&point));
    world.submit(stream, Command::Record(point));
    Ok(())
}

/// Behind everything on the context's streams.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxRecordEvent(context: Handle, event: Handle) -> Code {
    let arguments = |world: &World| world.event_label(event);
    call("cuCtxRecordEvent", arguments, |mut world| {
        let device = world.live_event(event)?.device;
        if context != crate::world::context_handle(device) {
            return Err(code::INVALID_HANDLE);
        }
        let point = Arc::new(Point::default());
        world.live_event(event)?.last.set(Arc::clone(&point));
        let share = Arc::new(Everybody(point));
        for stream in world.streams.values_mut().filter(|stream| stream.device == device) {
            stream.push(Command::Arrive(Arc::clone(&share)));
        }
        Ok(())
    })
}

/// An event never recorded is complete.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(event: Handle) -> Code {
    call("cuEventQuery", told!(world: "{}", world.event_label(event)), |mut world| {
        match &world.live_event(event)?.last.get() {
            Some(point) if point.reached().is_none() => Err(code::NOT_READY),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(event: Handle) -> Code {
    call("cuEventSynchronize", told!(world: "{}", world.event_label(event)), |mut world| {
        let event = world.live_event(event)?;
        let device = event.device;
        match event.last.get() {
            Some(point) => wait_point(world, device, &point),
            None => Ok(()),
        }
    })
}

/// `INVALID_HANDLE` for events without timing or never recorded, `NOT_READY` for one not reached.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventElapsedTime(
    milliseconds: Out<f32>,
    start: Handle,
    end: Handle,
) -> Code {
    let arguments = told!(world: "{} {}", world.event_label(start), world.event_label(end));
    call("cuEventElapsedTime", arguments, |mut world| {
        let mut reached = Vec::with_capacity(2);
        for event in [start, end] {
            let event = world.live_event(event)?;
            if event.flags & DISABLE_TIMING != 0 {
                return Err(code::INVALID_HANDLE);
            }
            reached.push(event.last.get().ok_or(code::INVALID_HANDLE)?.reached());
        }
        let (Some(start), Some(end)) = (reached[0], reached[1]) else {
            return Err(code::NOT_READY);
        };
        let (later, earlier) =
            (end.saturating_duration_since(start), start.saturating_duration_since(end));
        milliseconds.put((later.as_secs_f32() - earlier.as_secs_f32()) * 1e3)
    })
}

/// The handle ends at once; a record that is still queued is no wrong.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(event: Handle) -> Code {
    call("cuEventDestroy_v2", told!(world: "{}", world.event_label(event)), |mut world| {
        let device = world.event(event)?.device;
        world.events.remove(&event);
        world.alive(device)
    })
}
