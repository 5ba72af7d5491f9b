//! Graphs of kernel launches, and of graphs of those.
//!
//! A launch of one runs its kernels in the order in which they were added, which every edge allows: edges lead from a node to
//! one that was added later, or the call that adds them is refused.

use std::ffi::{c_uint, c_void};

use crate::abi::{Array, Code, Handle, Out, Outcome, code};
use crate::event_calls::record_on;
use crate::kernel_calls::{copy_arguments, prepare};
use crate::stream::{Command, Launch};
use crate::world::{Exec, Graph, Work, World, call, current_context, told};

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NodeParams {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared_mem_bytes: u32,
    parameters: *const *const c_void,
    extra: *const *const c_void,
    kernel: Handle,
    context: Handle,
}

impl NodeParams {
    /// What a launch takes, by its copied arguments.
    ///
    /// # Safety
    /// As of [`cuGraphAddKernelNode_v2`].
    unsafe fn arguments(&self) -> Outcome<Vec<Vec<u8>>> {
        let parameters = Array::of(self.parameters);
        // SAFETY: by this function's contract.
        unsafe { copy_arguments(self.code(), &parameters) }
    }

    /// The function, or the kernel.
    fn code(&self) -> Handle {
        if self.kernel == 0 { self.function } else { self.kernel }
    }

    fn prepared(
        &self,
        world: &mut World,
        device: usize,
        arguments: Outcome<Vec<Vec<u8>>>,
    ) -> Outcome<Launch> {
        if !self.extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        if self.kernel != 0 && self.function != 0 {
            return Err(code::INVALID_VALUE);
        }
        let size = (self.grid, self.block, self.shared_mem_bytes);
        // With a function, to which context the node belongs is the function's.
        let context = world.kernels.contains_key(&self.code()).then_some(match self.context {
            0 => current_context(),
            context => context,
        });
        let device = context.map_or(Ok(device), |context| world.context(context))?;
        let green = context.and_then(|context| world.green_of_context(context));
        let prepared = prepare(world, device, self.code(), size, arguments?)?;
        Ok(Launch { green, ..prepared })
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphCreate(graph: Out<Handle>, flags: c_uint) -> Code {
    call(
        "cuGraphCreate",
        |_| String::new(),
        |mut world| {
            let device = world.live_current()?;
            graph.check()?;
            if flags != 0 {
                return Err(code::INVALID_VALUE);
            }
            graph.put(world.add_graph(device))
        },
    )
}

/// # Safety
/// `dependencies` has so many nodes, `params` one element, whose parameters are those of its kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddKernelNode_v2(
    node: Out<Handle>,
    graph: Handle,
    dependencies: Array<Handle>,
    count: usize,
    params: Array<NodeParams>,
) -> Code {
    // SAFETY: so many by this function's contract.
    let dependencies = unsafe { dependencies.read(count) };
    // SAFETY: one by this function's contract.
    let Some(params) = unsafe { params.read(1) }.first().copied() else {
        return code::INVALID_VALUE;
    };
    // SAFETY: by this function's contract.
    let arguments = unsafe { params.arguments() };
    let label =
        told!(world: "{} behind={}", world.function_label(params.code()), dependencies.len());
    call("cuGraphAddKernelNode_v2", label, |mut world| {
        let device = world.graph(graph)?.device;
        world.alive(device)?;
        node.check()?;
        check_dependencies(world.graph(graph)?, &dependencies)?;
        let prepared = params.prepared(&mut world, device, arguments)?;
        node.put(world.add_node(graph, &dependencies, vec![Work::Launch(prepared)])?)
    })
}

fn check_dependencies(graph: &Graph, dependencies: &[Handle]) -> Outcome {
    let mut unique = dependencies.to_vec();
    unique.sort_unstable();
    unique.dedup();
    let all_known = unique.iter().all(|node| graph.nodes.contains_key(node));
    if unique.len() != dependencies.len() || !all_known {
        return Err(code::INVALID_VALUE);
    }
    Ok(())
}

/// # Safety
/// `dependencies` has so many nodes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddChildGraphNode(
    node: Out<Handle>,
    graph: Handle,
    dependencies: Array<Handle>,
    count: usize,
    child: Handle,
) -> Code {
    // SAFETY: so many by this function's contract.
    let dependencies = unsafe { dependencies.read(count) };
    call("cuGraphAddChildGraphNode", told!("behind={}", dependencies.len()), |mut world| {
        let device = world.graph(graph)?.device;
        world.alive(device)?;
        node.check()?;
        check_dependencies(world.graph(graph)?, &dependencies)?;
        let work = world.graph(child)?.nodes.values().flatten().cloned().collect();
        node.put(world.add_node(graph, &dependencies, work)?)
    })
}

/// # Safety
/// `dependencies` has so many nodes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddEventRecordNode(
    node: Out<Handle>,
    graph: Handle,
    dependencies: Array<Handle>,
    count: usize,
    event: Handle,
) -> Code {
    // SAFETY: so many by this function's contract.
    let dependencies = unsafe { dependencies.read(count) };
    let label = told!(world: "{} behind={}", world.event_label(event), dependencies.len());
    call("cuGraphAddEventRecordNode", label, |mut world| {
        let device = world.graph(graph)?.device;
        world.alive(device)?;
        node.check()?;
        if world.live_event(event)?.device != device {
            return Err(code::INVALID_HANDLE);
        }
        check_dependencies(world.graph(graph)?, &dependencies)?;
        node.put(world.add_node(graph, &dependencies, vec![Work::Record(event)])?)
    })
}

/// `CUgraphEdgeData`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct EdgeData {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

impl EdgeData {
    const FULL: EdgeData = EdgeData { from_port: 0, to_port: 0, kind: 0, reserved: [0; 5] };
    const PROGRAMMATIC: EdgeData = EdgeData { from_port: 1, kind: 1, ..EdgeData::FULL };
}

/// Refuses a programmatic edge from or to anything but a single kernel, and one into a kernel that is behind another node as well: what that
/// one waits for is not documented.
///
/// # Safety
/// `from`, `to` and `data` have so many elements each.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddDependencies_v2(
    graph: Handle,
    from: Array<Handle>,
    to: Array<Handle>,
    data: Array<EdgeData>,
    count: usize,
) -> Code {
    // SAFETY: so many by this function's contract.
    let from = unsafe { from.read(count) };
    // SAFETY: likewise.
    let to = unsafe { to.read(count) };
    // SAFETY: likewise.
    let data = unsafe { data.read(count) };
    let programmatic = data.iter().filter(|data| **data == EdgeData::PROGRAMMATIC).count();
    let label = told!("edges={count} programmatic={programmatic}");
    call("cuGraphAddDependencies_v2", label, |mut world| {
        let device = world.graph(graph)?.device;
        world.alive(device)?;
        for ((from, to), data) in from.iter().zip(&to).zip(&data) {
            let graph = world.graph(graph)?;
            let is_kernel = |node: &Handle| {
                matches!(graph.nodes.get(node).map(Vec::as_slice), Some([Work::Launch(_)]))
            };
            let known = graph.edges.get(to).map_or(&[][..], Vec::as_slice);
            let is_programmatic = match *data {
                EdgeData::FULL => false,
                EdgeData::PROGRAMMATIC => true,
                _ => return Err(code::INVALID_VALUE),
            };
            let is_refused = match is_programmatic {
                true => !is_kernel(from) || !is_kernel(to) || !known.is_empty(),
                false => known.iter().any(|(_, programmatic)| *programmatic),
            };
            let is_known = graph.nodes.contains_key(from) && graph.nodes.contains_key(to);
            if is_refused || !is_known || from >= to || known.iter().any(|(node, _)| node == from) {
                return Err(code::INVALID_VALUE);
            }
            graph.edges.entry(*to).or_default().push((*from, is_programmatic));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphInstantiateWithFlags(
    exec: Out<Handle>,
    graph: Handle,
    flags: u64,
) -> Code {
    call(
        "cuGraphInstantiateWithFlags",
        |_| String::new(),
        |mut world| {
            let Graph { device, nodes, .. } = world.graph(graph)?;
            let (device, nodes) = (*device, nodes.clone());
            world.alive(device)?;
            exec.check()?;
            if flags != 0 {
                return Err(code::INVALID_VALUE);
            }
            exec.put(world.add_exec(Exec { device, graph, nodes, last: None }))
        },
    )
}

/// # Safety
/// As of [`cuGraphAddKernelNode_v2`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphExecKernelNodeSetParams_v2(
    exec: Handle,
    node: Handle,
    params: Array<NodeParams>,
) -> Code {
    // SAFETY: one by this function's contract.
    let Some(params) = unsafe { params.read(1) }.first().copied() else {
        return code::INVALID_VALUE;
    };
    // SAFETY: by this function's contract.
    let arguments = unsafe { params.arguments() };
    let label = |world: &World| world.function_label(params.code());
    call("cuGraphExecKernelNodeSetParams_v2", label, |mut world| {
        if world.current().is_err() {
            // Where driver 580 ends the process.
            world.journal.misuse("a graph's node was set without a context".to_owned());
            return Err(code::INVALID_CONTEXT);
        }
        let (device, graph) = {
            let exec = world.exec(exec)?;
            (exec.device, exec.graph)
        };
        world.alive(device)?;
        // The node is the graph's: that has to be there still.
        world.graph(graph)?;
        let prepared = params.prepared(&mut world, device, arguments)?;
        match world.exec(exec)?.nodes.get_mut(&node) {
            Some(known) => *known = vec![Work::Launch(prepared)],
            None => return Err(code::INVALID_VALUE),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphLaunch(exec: Handle, stream: Handle) -> Code {
    let label = |world: &World| world.stream_label(stream);
    call("cuGraphLaunch", label, |mut world| {
        let (key, device) = world.live_stream(stream)?;
        let launched = world.exec(exec)?;
        if launched.device != device {
            return Err(code::INVALID_HANDLE);
        }
        let work: Vec<Work> = launched.nodes.values().flatten().cloned().collect();
        let gone = |work: &Work| match work {
            Work::Launch(launch) => world.is_destroyed(launch.green),
            Work::Record(_) => false,
        };
        if work.iter().any(gone) {
            world.journal.misuse("a graph's node is in a context that was destroyed".to_owned());
            return Err(code::CONTEXT_IS_DESTROYED);
        }
        for work in work {
            match work {
                // A node has addresses, whoever has the memory there when the graph is launched.
                Work::Launch(mut launch) => {
                    for place in &mut launch.places {
                        *place = world.memory.found_again(place);
                    }
                    world.submit(key, Command::Kernel(launch));
                }
                Work::Record(event) => record_on(&mut world, event, key)?,
            }
        }
        let count = world.submitted(key);
        world.exec(exec)?.last = Some((key, count));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphExecDestroy(exec: Handle) -> Code {
    call(
        "cuGraphExecDestroy",
        |_| String::new(),
        |mut world| {
            let last = world.exec(exec)?.last;
            if last.is_some_and(|(stream, count)| !world.is_reached(stream, count)) {
                world.journal.misuse("a graph was destroyed while it runs".to_owned());
            }
            world.remove_exec(exec);
            Ok(())
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphDestroy(graph: Handle) -> Code {
    call("cuGraphDestroy", |_| String::new(), |mut world| world.remove_graph(graph))
}
