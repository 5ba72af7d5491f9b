//! [`GraphCalls`]: the calls of one rank in the closure of a graph.
#![forbid(unsafe_code)]

use std::fmt;
use std::panic::Location;

use gpu_await::{Queue, Readable, Writable};

use super::Communicator;
use super::group::{GroupCalls, RankCalls};
use super::parts::RankOf;
use super::shared::PendingCalls;
use crate::element::{CollectiveElement, Reduction};
use crate::error::Error;

/// Writes the calls of one rank to the closure of a [`Graph`](gpu_await::Graph); see [`Communicator::in_graph`].
pub struct GraphCalls<'q> {
    comm: &'q Communicator,
    queue: &'q Queue<'q>,
    at: usize,
}

impl Communicator {
    /// Writes collectives of the only rank of this process to the closure of a [`Graph`](gpu_await::Graph) on its device. Each launch of
    /// the graph makes the calls; all ranks have to launch, or call, the same collectives in the same order, and a peer has to make the
    /// receive of each send. Ready of a launch proves what it proves of each call in it.
    ///
    /// In the closure of a [`batch`](gpu_await::Stream::batch) the calls are made at once, on the stream of the batch.
    ///
    /// # Ordering
    /// In the graph, calls are ordered by the memory that they use, and after the calls of the communicator that were written before: NCCL runs one
    /// call of a communicator at a time. Launches of graphs and other calls of the communicator are ordered as they are submitted.
    ///
    /// # Ownership
    /// The graph keeps the communicator alive. NCCL frees a lost one when the last graph with its calls is dropped; until then a thread
    /// waits, which [`Stats::threads_in_nccl`](crate::Stats::threads_in_nccl) counts.
    ///
    /// # Failure
    /// When the communicator is lost, launches that are pending fail with [`CollectiveLost`](crate::CollectiveLost), and so do their
    /// outputs; later launches are refused with it. The [limit](Self::set_limit) counts from the launch. A launch that is refused because
    /// its input failed loses the communicator, as a call does. One that is refused for another reason makes no calls: other ranks wait for
    /// these until their limit, or take the next call of this rank for them.
    ///
    /// # Cancel safety
    /// Dropping the future of a launch does not cancel it.
    ///
    /// # Blocking
    /// Capturing takes as long as a call, with the same exception: the first use of an algorithm or a size may wait for the other
    /// ranks, which have to write the same call at the same time; the first send to a rank may wait for its receive. See
    /// [`Communicator`](Communicator#blocking).
    ///
    /// # Errors
    /// [`Error::SeveralRanks`]: use [`in_graph_of`](Self::in_graph_of).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Device, InOut, kernels};
    /// use gpu_await_nccl::{Communicator, Reduction};
    /// let device = Device::host();
    /// let comm = Communicator::all(&[device.clone()]).await?;
    /// let state = (kernels::scale::load(&device).await?, comm);
    /// // Twice the average over all ranks.
    /// let step = device.graph::<(InOut<f32>,), _, _>(state, |q, (scale, comm), (mut x,)| {
    ///     comm.in_graph(q)?.all_reduce_in_place(&mut x, Reduction::Average)?;
    ///     scale.launch(q, 2.0, &mut x)
    /// });
    /// let stream = device.stream()?;
    /// let mut x = stream.full(4, 1.0f32).queued()?;
    /// for _ in 0..3 {
    ///     step.launch(&stream, (&mut x,)).queued()?;
    /// }
    /// assert_eq!(stream.download(&x).await?, [8.0; 4]);
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// "Using NCCL with CUDA Graphs" in NVIDIA's documentation of NCCL.
    pub fn in_graph<'q>(&'q self, queue: &'q Queue<'q>) -> gpu_await::Result<GraphCalls<'q>> {
        match self.shared().ranks.len() {
            1 => Ok(GraphCalls { comm: self, queue, at: 0 }),
            _ => Err(Error::SeveralRanks { op: "in_graph", local: self.ranks() }.into()),
        }
    }

    /// [`in_graph`](Self::in_graph) of a process with several ranks. Each rank's calls are in a graph of its device; launch the graphs
    /// in the same order on every device, and all ranks' graphs before waiting for any. Connect what a call needs beforehand: a rank
    /// whose call is being captured must not wait for one whose call is captured next. For [`send`](GraphCalls::send),
    /// [`recv`](GraphCalls::recv) and [`all_to_all`](GraphCalls::all_to_all), build the communicator with
    /// [`connect_pairs`](crate::CommunicatorBuilder::connect_pairs).
    ///
    /// # Errors
    /// [`Error::NotLocal`].
    pub fn in_graph_of<'q>(
        &'q self,
        queue: &'q Queue<'q>,
        rank: usize,
    ) -> gpu_await::Result<GraphCalls<'q>> {
        let mut ranks = self.shared().ranks.iter();
        match ranks.position(|local| local.rank == rank) {
            Some(at) => Ok(GraphCalls { comm: self, queue, at }),
            None => Err(Error::NotLocal { rank, local: self.ranks() }.into()),
        }
    }
}

impl GraphCalls<'_> {
    /// A single call.
    #[track_caller]
    fn alone<'a>(
        &self,
        op: &'static str,
        call: impl FnOnce(&RankOf<'_, 'a>) -> gpu_await::Result<()>,
    ) -> gpu_await::Result<()> {
        let (shared, pending) = (self.comm.shared(), PendingCalls::made_at(Location::caller()));
        let written = call(&RankOf { shared, at: self.at, pending: &pending, is_alone: true });
        self.capture(op, pending.into_inner(), written)
    }

    /// Captures pending calls together; none of them if one is refused.
    fn capture(
        &self,
        op: &'static str,
        pending: PendingCalls<'_>,
        written: gpu_await::Result<()>,
    ) -> gpu_await::Result<()> {
        let (uses, calls) = pending.into_parts();
        let (uses, calls) = (uses.keeps(self.comm.clone()), written.map(|()| calls));
        self.comm.shared().capture((self.at, op), self.queue, uses, calls)
    }

    /// Writes several calls of the rank as one: they progress concurrently, so sends and receives in a group do not deadlock. The graph treats it
    /// as one call that uses the memory of all of them.
    ///
    /// # Errors
    /// The error of the first refused call, even if the closure ignores it; or of the closure. Nothing is captured then, and the
    /// outputs of all recorded calls count as failed. [`Error::Lost`]; what NCCL refuses; as of any operation.
    ///
    /// # Examples
    /// Rows of a grid, and a copy of the row beyond each end, which a neighbour in a ring has:
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Device, In, InOut};
    /// use gpu_await_nccl::Communicator;
    /// const WIDTH: usize = 8;
    /// let device = Device::host();
    /// let comm = Communicator::all(&[device.clone()]).await?; // its own neighbour
    /// type Slots = (In<f32>, InOut<f32>);
    /// let exchange = device.graph::<Slots, _, _>(comm, |q, comm, (rows, mut beyond)| {
    ///     let (rank, world) = (comm.ranks()[0], comm.world());
    ///     let (before, after) = ((rank + world - 1) % world, (rank + 1) % world);
    ///     let (first, last) = (rows.slice(..WIDTH)?, rows.slice(rows.len() - WIDTH..)?);
    ///     let (mut above, mut below) = beyond.split_at_mut(WIDTH)?;
    ///     // In this order also where both neighbours are one rank.
    ///     comm.in_graph(q)?.group(|g| {
    ///         g.send(&first, before)?;
    ///         g.recv(&mut below, after)?;
    ///         g.send(&last, after)?;
    ///         g.recv(&mut above, before)
    ///     })
    /// });
    /// let stream = device.stream()?;
    /// let rows = stream.upload((0..3 * WIDTH).map(|at| (at / WIDTH) as f32).collect::<Vec<_>>()).queued()?;
    /// let mut beyond = stream.zeros(2 * WIDTH).queued()?;
    /// exchange.launch(&stream, (&rows, &mut beyond)).queued()?;
    /// let beyond = stream.download(&beyond).await?;
    /// assert_eq!((beyond[0], beyond[WIDTH]), (2.0, 0.0));
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `ncclGroupStart`, `ncclGroupEnd`.
    #[track_caller]
    pub fn group<'a>(
        &self,
        calls: impl FnOnce(&RankCalls<'_, 'a>) -> gpu_await::Result<()>,
    ) -> gpu_await::Result<()> {
        let group = GroupCalls::new(self.comm.shared());
        let written = group.written(calls(&group.rank_at(self.at)));
        self.capture("group", group.take(self.at), written)
    }

    /// See [`Communicator::send`]. Each launch sends what `x` holds then, and the peer receives it in a graph or a call. Without the
    /// receive a launch may wait until the [limit](Communicator::set_limit), and so may two ranks that both send before they receive,
    /// since the calls of a rank run one after another: exchange in a [`group`](Self::group).
    ///
    /// # Errors
    /// [`Error::BadRank`]; [`Error::OwnRank`]; [`Error::Lost`]; what NCCL refuses; as of any operation.
    #[track_caller]
    pub fn send<T: CollectiveElement, X: Readable<T>>(
        &self,
        x: &X,
        peer: usize,
    ) -> gpu_await::Result<()> {
        self.alone("send", |rank| rank.send(x, peer))
    }

    /// See [`Communicator::recv`]. A launch waits for the peer's send, until the [limit](Communicator::set_limit).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[track_caller]
    pub fn recv<T: CollectiveElement, Y: Writable<T>>(
        &self,
        y: &mut Y,
        peer: usize,
    ) -> gpu_await::Result<()> {
        self.alone("recv", |rank| rank.recv(y, peer))
    }

    /// See [`Communicator::barrier`]. It runs after the rank's calls that were written before it, and ahead of those written later. It orders nothing
    /// else in the graph.
    ///
    /// # Errors
    /// [`Error::Lost`]; what NCCL refuses; as of any operation.
    #[track_caller]
    pub fn barrier(&self) -> gpu_await::Result<()> {
        self.alone("barrier", |rank| rank.barrier())
    }
}

/// Defines the verbs of a graph.
macro_rules! verbs {
    ($($verb:ident, $in_place:ident, ($($arg:ident: $type:ty),*), $errors:literal;)+) => {
        impl GraphCalls<'_> {
            $(
                #[doc = concat!("See [`Communicator::", stringify!($verb), "`].")]
                ///
                /// # Errors
                #[doc = $errors]
                /// [`Error::Lost`]; what NCCL refuses; as of any operation.
                #[track_caller]
                pub fn $verb<T, X, Y>(&self, x: &X, y: &mut Y $(, $arg: $type)*) -> gpu_await::Result<()>
                where
                    T: CollectiveElement,
                    X: Readable<T>,
                    Y: Writable<T>,
                {
                    self.alone(stringify!($verb), |rank| rank.$verb(x, y $(, $arg)*))
                }

                #[doc = concat!("See [`Communicator::", stringify!($in_place), "`].")]
                ///
                /// # Errors
                #[doc = $errors]
                /// [`Error::Lost`]; what NCCL refuses; as of any operation.
                #[track_caller]
                pub fn $in_place<T: CollectiveElement, X: Writable<T>>(
                    &self,
                    x: &mut X $(, $arg: $type)*
                ) -> gpu_await::Result<()> {
                    self.alone(stringify!($verb), |rank| rank.$in_place(x $(, $arg)*))
                }
            )+
        }
    };
}

verbs! {
    all_reduce, all_reduce_in_place, (by: Reduction), "[`Error::WrongLength`];";
    reduce, reduce_in_place, (by: Reduction, root: usize), "[`Error::WrongLength`]; [`Error::BadRank`];";
    broadcast, broadcast_in_place, (root: usize), "[`Error::WrongLength`]; [`Error::BadRank`];";
    all_gather, all_gather_in_place, (), "[`Error::WrongLength`]; in place [`Error::NotShared`];";
    reduce_scatter, reduce_scatter_in_place, (by: Reduction), "[`Error::WrongLength`]; in place [`Error::NotShared`];";
}

impl GraphCalls<'_> {
    /// See [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// [`Error::WrongLength`]; [`Error::NotShared`]; [`Error::Lost`]; what NCCL refuses; as of any operation.
    #[track_caller]
    pub fn all_to_all<T, X, Y>(&self, x: &X, y: &mut Y) -> gpu_await::Result<()>
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        self.alone("all_to_all", |rank| rank.all_to_all(x, y))
    }
}

impl fmt::Debug for GraphCalls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.comm.shared().ranks[self.at].rank;
        f.debug_struct("GraphCalls").field("rank", &rank).finish_non_exhaustive()
    }
}
