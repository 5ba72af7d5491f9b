//! Captured kernels, read out of their graph and launched on their own.
//!
//! Source: `cuda.h`, "Graph Management"; the argument pointers that a kernel node returns belong to the node, and are valid while it
//! exists.

use std::ffi::{c_int, c_void};

use super::api::Handle;
use super::launch_ex::RawConfig;
use super::node_params::NodeParams;
use super::{CudaBackend, driver, newer, stream_handle};
use crate::backend::{DriverResult, KernelCall, RawStream};

/// The driver's code for an edge that is not a full dependency: the node may start before its predecessor is complete.
const LOSSY_QUERY: i32 = 920;

impl CudaBackend {
    /// The kernels of a graph that is nothing but a chain of kernels.
    pub(super) fn kernel_chain(&self, graph: Handle) -> DriverResult<Option<Vec<KernelCall>>> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let Some(nodes) = self.node_chain(graph)? else { return Ok(None) };
        let mut calls = Vec::new();
        for node in nodes {
            const KERNEL: c_int = 0;
            let mut kind = KERNEL;
            newer!(self.cuGraphNodeGetType(node, &raw mut kind))?;
            if kind != KERNEL {
                return Ok(None);
            }
            let mut params = NodeParams::unset();
            newer!(self.cuGraphKernelNodeGetParams_v2(node, &raw mut params))?;
            calls.push(params.call(self.launch_attributes_of(node)?));
        }
        Ok(Some(calls))
    }

    /// The nodes of a graph that is a chain of full dependencies, in order.
    fn node_chain(&self, graph: Handle) -> DriverResult<Option<Vec<Handle>>> {
        let none: Handle = std::ptr::null_mut();
        let mut count: usize = 0;
        newer!(self.cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count))?;
        let mut nodes = vec![none; count];
        newer!(self.cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count))?;
        // The dependency of each.
        let mut links = Vec::new();
        for node in nodes {
            match newer!(self.cuGraphNodeGetDependencies(
                node,
                std::ptr::null_mut(),
                &raw mut count
            )) {
                Err(code) if code.code == LOSSY_QUERY => return Ok(None),
                told => told?,
            }
            let mut first = none;
            match count {
                0 => {}
                1 => {
                    match newer!(self.cuGraphNodeGetDependencies(
                        node,
                        &raw mut first,
                        &raw mut count
                    )) {
                        Err(code) if code.code == LOSSY_QUERY => return Ok(None),
                        told => told?,
                    }
                }
                _ => return Ok(None),
            }
            links.push((first, node));
        }
        let (mut chain, mut last) = (Vec::new(), none);
        while let Some((_, node)) = links.iter().find(|(first, _)| *first == last) {
            chain.push(*node);
            last = *node;
        }
        Ok((chain.len() == links.len()).then_some(chain))
    }

    /// The attributes of a kernel node that a launch of its own needs as well, as far as they are set.
    fn launch_attributes_of(&self, node: Handle) -> DriverResult<Box<[[u64; 9]]>> {
        // Cooperative, cluster extents, cluster scheduling policy; from CUDA 12.8 on, the preferred cluster extents.
        const ASKED: [c_int; 4] = [2, 4, 5, 11];
        const INVALID_VALUE: c_int = 1;
        let mut attributes = Vec::new();
        for id in ASKED {
            // `CUlaunchAttribute`: its id, padding, and 64 bytes of a value.
            let mut attribute = [0; 9];
            attribute[0] = u64::from(id as u32);
            let value: *mut c_void = attribute[1..].as_mut_ptr().cast();
            match newer!(self.cuGraphKernelNodeGetAttribute(node, id, value)) {
                Err(code) if code.code == INVALID_VALUE => continue,
                told => told?,
            }
            if attribute[1..].iter().any(|part| *part != 0) {
                attributes.push(attribute);
            }
        }
        Ok(attributes.into())
    }

    pub(super) fn launch_again(&self, call: &KernelCall, stream: RawStream) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let config = RawConfig::of(call, stream_handle(stream));
        let function = call.function as Handle;
        let (params, extra) = (call.params as *mut *mut c_void, call.extra as *mut *mut c_void);
        driver!(self.cuLaunchKernelEx(&raw const config, function, params, extra))
    }
}
