//! [`EventNode`]: the record of a timed event, as a graph node.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::kernel_launch::{KernelCode, KernelLaunch};
use crate::backend::{ArgBlock, Function, LaunchShape};
use crate::runtime::event_pool::EventHandle;

/// Each launch of a graph that contains it records the event.
pub(crate) struct EventNode {
    name: Arc<str>,
    event: EventHandle,
    function: Function,
    args: ArgBlock,
}

impl EventNode {
    pub(crate) fn new(event: EventHandle) -> Arc<Self> {
        let function = Function::Record(event.raw());
        Arc::new(EventNode { name: "record".into(), event, function, args: ArgBlock::default() })
    }

    pub(crate) fn event(&self) -> &EventHandle {
        &self.event
    }

    /// The launch that records the event.
    pub(crate) fn launch<'a>(self: &'a Arc<Self>) -> KernelLaunch<'a> {
        KernelLaunch::new(self, &self.function, LaunchShape::NONE, &self.args)
    }
}

impl KernelCode for EventNode {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}
