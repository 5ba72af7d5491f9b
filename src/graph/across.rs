//! Graphs of several devices: one list, one launch, one future.
//!
//! The closure gets a queue for each device. All of them write to one list, whose edges come from the memory that its launches touch, on
//! whichever device. A node runs on the device of the queue that it was written to, beside the nodes of other devices.
//!
//! | | the graph's device | the others |
//! |---|---|---|
//! | launches | are confined to the partition of the stream, if it has one | run on the whole device: one whose default stream is in a partition is refused |
//! | memory that the closure allocates | belongs to the stream | belongs to the default stream; kept by the graph likewise |
//! | memory that is touched | counts as used by the launch of the graph, as by any operation of its stream | the same |
//! | a loss | the launch resolves with the loss | with [`ErrorDetail::DependencyLost`]; its outputs cannot be read, though its nodes on the graph's device may end |
//!
//! A list of several devices is launched only as a graph: one by one, its launches would all run on one device.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::slots::GraphSlots;
use super::{Definition, Graph};
use crate::batch::queue::Queue;
use crate::device::Device;
use crate::error::{ErrorDetail, Result};
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, Point};
use crate::submit::{check_is_there, of_dependency, wrong_device};

/// A graph's state and closure, and its other devices.
struct Across<State, F, const N: usize> {
    others: [Device; N],
    state: State,
    closure: F,
}

impl<S, State, F, const N: usize> Definition<S> for Across<State, F, N>
where
    S: GraphSlots,
    State: Send + Sync,
    F: for<'a> Fn(&Queue<'_>, [&Queue<'_>; N], &State, S::Of<'a>) -> Result<()> + Send + Sync,
{
    fn record(&self, queue: &Queue<'_>, slots: S::Of<'_>) -> Result<()> {
        let others = self.open_beside(queue)?;
        let recorded = (self.closure)(queue, others.each_ref(), &self.state, slots);
        others.iter().for_each(Queue::release_last);
        recorded.map_err(|error| of_dependency(&queue.stream.engine, error))
    }

    fn others(&self) -> &[Device] {
        &self.others
    }
}

impl<State, F, const N: usize> Across<State, F, N> {
    /// A queue for each of the other devices, whose launches are written to the same list.
    fn open_beside<'q>(&'q self, queue: &'q Queue<'_>) -> Result<[Queue<'q>; N]> {
        let engine = &queue.stream.engine;
        for device in &self.others {
            if device.engine().shares.partition.is_some() {
                let what = "a graph's node on another device whose streams are in a partition";
                let device = device.engine().label().to_owned();
                return Err(ErrorDetail::Unsupported { what, device }.into());
            }
            if device.engine().backend.kind() != engine.backend.kind() {
                return Err(wrong_device("another device of the graph", engine, device.engine()));
            }
            // Host devices get access to each other's memory here.
            let reached = queue.home.reaches(device.engine());
            reached.map_err(|error| of_dependency(engine, error))?;
        }
        Ok(self.others.each_ref().map(|device| {
            let stream = device.default_stream();
            queue.beside(stream.handle(), stream.home())
        }))
    }
}

impl Device {
    /// Makes a [`Graph`] whose nodes run on this device and on others: one launch, and one future for all of it.
    ///
    /// The closure is that of [`graph`](Self::graph), with an additional queue for each of the other devices. Launches written to a
    /// queue run on that queue's device, with kernels and memory of that device. The launches form one list: one that reads what another
    /// writes runs behind it, and launches that touch different memory run side by side, across the devices. [`Queue::copy`] moves data
    /// between two of them, from the queue of the destination.
    ///
    /// The graph is launched on streams of this device, and any slot takes memory of any of the devices. Other work that uses the same
    /// memory is ordered with the launch, on whichever stream and device it runs.
    ///
    /// # Errors
    /// None here. A launch fails as [`Graph::launch`] does, and with [`ErrorDetail::WrongDevice`] for a GPU beside a host device;
    /// [`ErrorDetail::NotInGraph`] for a copy to a device without access to the source's memory (see [`enable_peer`](Self::enable_peer));
    /// [`ErrorDetail::Unsupported`] for another device whose streams are in a partition; [`ErrorDetail::Closed`] if another device was closed before
    /// the launch; and [`ErrorDetail::DependencyLost`] if one is lost before the launch is known to be complete: its outputs cannot be read then. A
    /// graph that the driver does not compile is not launched.
    ///
    /// # Ownership
    /// The graph keeps handles of the other devices, which do not close by themselves as long as the graph exists. [`Device::close`]
    /// and [`done`](Self::done) of each wait for its launches.
    ///
    /// # Source
    /// `cuGraphAddKernelNode`, whose nodes name their context.
    ///
    /// # Examples
    /// A step on two devices: each updates its part, then the second gets a copy of the first's last elements.
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Device, InOut, kernels};
    /// let devices = [Device::host(), Device::host()];
    /// let state = (kernels::scale::load(&devices[0]).await?, kernels::scale::load(&devices[1]).await?);
    /// let step = devices[0].graph_across::<(InOut<f32>, InOut<f32>, f32), _, _, 1>(
    ///     [&devices[1]],
    ///     state,
    ///     |q0, [q1], (scale0, scale1), (mut x0, mut x1, a)| {
    ///         scale0.launch(q0, a, &mut x0)?;
    ///         scale1.launch(q1, a, &mut x1)?;
    ///         let end = x0.len() - 2..;
    ///         q1.copy(&x0.slice(end)?, &mut x1.slice_mut(..2)?)
    ///     },
    /// );
    /// let streams = [devices[0].stream()?, devices[1].stream()?];
    /// let (mut x0, mut x1) = (streams[0].full(8, 1.0f32).queued()?, streams[1].full(8, 3.0f32).queued()?);
    /// step.launch(&streams[0], (&mut x0, &mut x1, 2.0)).await?;
    /// assert_eq!(streams[1].download(&x1).await?, [2.0, 2.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn graph_across<S, State, F, const N: usize>(
        &self,
        others: [&Device; N],
        state: State,
        closure: F,
    ) -> Graph<S>
    where
        S: GraphSlots,
        State: Send + Sync + 'static,
        F: for<'a> Fn(&Queue<'_>, [&Queue<'_>; N], &State, S::Of<'a>) -> Result<()>
            + Send
            + Sync
            + 'static,
    {
        const {
            assert!(
                size_of::<F>() == 0,
                "the closure of a graph captures nothing: pass what it uses as the state of `graph_across`, or for a slot"
            );
        }
        Graph::of(self, Across { others: others.map(Device::clone), state, closure })
    }
}

/// Refuses a launch if one of `others` is lost or closed: its ticket would never be complete, even without a node on that device.
pub(super) fn check_all_are_there(engine: &Engine, others: &[Device]) -> Result<()> {
    others.iter().try_for_each(|device| check_is_there(engine, device.engine()))
}

/// Makes the stream's ticket fail if one of `others` is lost first, and makes a wait for any of them as a whole wait for the ticket.
pub(super) fn enter(stream: &StreamState, ticket: u64, others: &[Device]) {
    if !others.is_empty() {
        let states = others
            .iter()
            .map(|device| Arc::clone(&device.default_stream().handle().state.progress));
        stream.foreign.is_lost_with(ticket, states);
        for device in others {
            let stream = stream.progress.clone();
            device.engine().registry.visited(Point { stream, ticket });
        }
    }
}
