//! Shares of a device's multiprocessors: resources, green contexts, and the streams of these.
//!
//! The device has 132 multiprocessors: 15 groups of 8 at most, and 12 that are in none. Groups of one split may be joined;
//! those of different splits may be the same multiprocessors, and are refused together.

use std::ffi::{c_int, c_uint};

use crate::abi::{Array, Code, Handle, Out, Outcome, code};
use crate::device_calls::{GREATEST_PRIORITY, LEAST_PRIORITY};
use crate::greens::{Green, MULTIPROCESSORS, Multiprocessors};
use crate::world::{World, call, current_context, told};

/// `CUdevResource`. What the driver keeps in the padding is ours as well: which multiprocessors of which split.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct DevResource {
    kind: c_int,
    /// 0: the whole device.
    split: u32,
    device: usize,
    set: Multiprocessors,
    pad: [u8; 56],
    multiprocessors: c_uint,
    rest: [u8; 44],
}

const _: () = {
    assert!(size_of::<DevResource>() == 144);
    assert!(std::mem::offset_of!(DevResource, multiprocessors) == 96);
};

impl DevResource {
    fn new(split: u32, device: usize, set: Multiprocessors) -> Self {
        let (kind, multiprocessors) = (SM, set.count());
        DevResource { kind, split, device, set, pad: [0; 56], multiprocessors, rest: [0; 44] }
    }
}

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: c_int = 1;
/// The smallest group.
const GROUP: u32 = 8;
/// Those that are in no group.
const LEFT: u32 = 12;
/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

impl World {
    /// The green context of this handle, not destroyed.
    fn green(&mut self, handle: Handle) -> Outcome<&Green> {
        if self.greens.get(&handle).is_none_or(|green| green.destroyed) {
            self.journal.misuse(format!("{handle:#x} is no live green context"));
            return Err(code::INVALID_HANDLE);
        }
        self.greens.get(&handle).ok_or(code::INVALID_HANDLE)
    }

    /// The green context that is this as a context.
    pub(crate) fn green_of_context(&self, context: Handle) -> Option<Handle> {
        let found = self.greens.iter().find(|(_, green)| green.context == context);
        found.map(|(&handle, _)| handle)
    }

    /// Where work of a green context runs; without one, on the whole device.
    pub(crate) fn multiprocessors_of(&self, green: Option<Handle>) -> Multiprocessors {
        let green = green.and_then(|green| self.greens.get(&green));
        green.map_or_else(Multiprocessors::all, |green| green.set)
    }

    pub(crate) fn is_destroyed(&self, green: Option<Handle>) -> bool {
        let green = green.and_then(|green| self.greens.get(&green));
        green.is_some_and(|green| green.destroyed)
    }

    /// `green=3`.
    pub(crate) fn green_label(&self, handle: Handle) -> String {
        match self.greens.get(&handle) {
            Some(green) => format!("green={}", green.number),
            None => format!("green=?{handle:#x}"),
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetDevResource(
    device: c_int,
    resource: Out<DevResource>,
    kind: c_int,
) -> Code {
    call("cuDeviceGetDevResource", told!("device={device} kind={kind}"), |world| {
        let device = world.device(device)?;
        world.alive(device)?;
        if kind != SM {
            return Err(code::INVALID_RESOURCE_TYPE);
        }
        resource.put(DevResource::new(0, device, Multiprocessors::all()))
    })
}

/// Splits the whole device alone: groups of groups are not modelled.
///
/// # Safety
/// `groups` is null or has as many elements as `count` says, and `input` has one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevSmResourceSplitByCount(
    groups: Array<DevResource>,
    count: Out<c_uint>,
    input: Array<DevResource>,
    rest: Out<DevResource>,
    flags: c_uint,
    least: c_uint,
) -> Code {
    // SAFETY: one element by this function's contract.
    let input = unsafe { input.read(1) }.first().copied();
    let wanted = count.peek();
    let arguments = |_: &World| format!("least={least} groups={}", wanted.unwrap_or(0));
    let mut made = Vec::new();
    let code = call("cuDevSmResourceSplitByCount", arguments, |mut world| {
        let (Some(input), Some(wanted)) = (input, wanted) else { return Err(code::INVALID_VALUE) };
        if input.kind != SM {
            return Err(code::INVALID_RESOURCE_TYPE);
        }
        let size = least.max(1).next_multiple_of(GROUP);
        let most = (MULTIPROCESSORS.unsigned_abs() - LEFT) / size;
        if flags != 0 || input.split != 0 || most == 0 {
            return Err(code::INVALID_RESOURCE_CONFIGURATION);
        }
        if groups.is_null() {
            return count.put(most);
        }
        world.splits += 1;
        let (given, split, device) = (wanted.min(most), world.splits, input.device);
        let group = |at| DevResource::new(split, device, Multiprocessors::run(at * size, size));
        made = (0..given).map(group).collect();
        let (first, left) = (given * size, MULTIPROCESSORS.unsigned_abs() - given * size);
        rest.put_if_wanted(DevResource::new(split, device, Multiprocessors::run(first, left)));
        count.put(given)
    });
    for (at, group) in made.into_iter().enumerate() {
        // SAFETY: no more than the caller has room for, by this function's contract.
        unsafe { groups.write(at, group) };
    }
    code
}

/// # Safety
/// `resources` has so many elements.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevResourceGenerateDesc(
    described: Out<Handle>,
    resources: Array<DevResource>,
    count: c_uint,
) -> Code {
    // SAFETY: so many by this function's contract.
    let resources = unsafe { resources.read(count as usize) };
    call("cuDevResourceGenerateDesc", told!("resources={count}"), |mut world| {
        let Some(first) = resources.first() else { return Err(code::INVALID_VALUE) };
        let mut set = Multiprocessors::NONE;
        for one in &resources {
            if one.kind != SM {
                return Err(code::INVALID_RESOURCE_TYPE);
            }
            let same = (one.split, one.device) == (first.split, first.device);
            if !same || set.overlaps(one.set) {
                return Err(code::INVALID_RESOURCE_CONFIGURATION);
            }
            set = set.joined(one.set);
        }
        let device = first.device;
        described.check()?;
        described.put(world.add_descriptor(device, set))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGreenCtxCreate(
    green: Out<Handle>,
    described: Handle,
    device: c_int,
    flags: c_uint,
) -> Code {
    let arguments = |world: &World| {
        let set = world.descriptors.get(&described).map(|(_, set)| set.to_string());
        format!("device={device} flags={flags} on={}", set.unwrap_or_default())
    };
    call("cuGreenCtxCreate", arguments, |mut world| {
        let device = world.device(device)?;
        world.alive(device)?;
        green.check()?;
        let Some(&(of, set)) = world.descriptors.get(&described) else {
            return Err(code::INVALID_VALUE);
        };
        if flags != DEFAULT_STREAM || of != device || world.devices[device].retained == 0 {
            return Err(code::INVALID_VALUE);
        }
        green.put(world.add_green(device, set))
    })
}

/// What it has of streams and nodes of graphs is written down: their calls fail from now on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGreenCtxDestroy(green: Handle) -> Code {
    let arguments = |world: &World| {
        let streams = world.streams.values().filter(|stream| !stream.retired);
        let streams = streams.filter(|stream| stream.green == Some(green)).count();
        let (label, nodes) = (world.green_label(green), world.nodes_in(green));
        format!("{label} streams={streams} nodes={nodes}")
    };
    call("cuGreenCtxDestroy", arguments, |mut world| {
        let device = world.green(green)?.device;
        if let Some(green) = world.greens.get_mut(&green) {
            green.destroyed = true;
        }
        world.alive(device)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxFromGreenCtx(context: Out<Handle>, green: Handle) -> Code {
    call("cuCtxFromGreenCtx", told!(world: "{}", world.green_label(green)), |mut world| {
        let made = world.green(green)?.context;
        context.put(made)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGreenCtxStreamCreate(
    stream: Out<Handle>,
    green: Handle,
    flags: c_uint,
    priority: c_int,
) -> Code {
    let arguments = told!(world: "{} flags={flags} priority={priority}", world.green_label(green));
    call("cuGreenCtxStreamCreate", arguments, |mut world| {
        let device = world.green(green)?.device;
        world.alive(device)?;
        stream.check()?;
        if flags != NON_BLOCKING {
            return Err(code::INVALID_VALUE);
        }
        let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
        let made = world.add_stream(device, priority, flags)?;
        if let Some(stream) = world.streams.get_mut(&made) {
            stream.green = Some(green);
        }
        stream.put(made)
    })
}

/// The primary context beside a green one.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamGetCtx_v2(
    stream: Handle,
    context: Out<Handle>,
    green: Out<Handle>,
) -> Code {
    call("cuStreamGetCtx_v2", told!(world: "{}", world.stream_label(stream)), |mut world| {
        let (key, device) = world.live_stream(stream)?;
        let of = world.streams.get(&key).and_then(|stream| stream.green);
        let handle = crate::world::context_handle(device);
        context.put(if stream <= 2 { current_context() } else { handle })?;
        green.put_if_wanted(of.unwrap_or(0));
        Ok(())
    })
}
