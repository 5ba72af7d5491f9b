//! [`GraphCalls`]: the calls of one rank in the closure of a graph.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;

use gpu_await::{DeviceBuffer, Queue, Readable, Uses, Writable};

use super::Communicator;
use super::parts::{Ranges, RankOf};
use super::shared::Part;
use crate::call::Call;
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
    /// the graph makes the calls; all ranks have to launch, or call, the same collectives in the same order.
    ///
    /// In the closure of a [`batch`](gpu_await::Stream::batch) the calls are made at once, on the stream of the batch.
    ///
    /// # Ordering
    /// In the graph, by the memory that they use, and behind the calls of the communicator that were written before: NCCL runs one of
    /// a communicator at a time. Launches of graphs and other calls of the communicator are ordered as they are submitted.
    ///
    /// # Ownership
    /// The graph keeps the communicator. NCCL frees one that is lost when the last graph with calls of it is dropped; until then a thread
    /// waits, which [`Stats::threads_in_nccl`](crate::Stats::threads_in_nccl) counts.
    ///
    /// # Failure
    /// When the communicator is lost, launches that are pending fail with [`CollectiveLost`](crate::CollectiveLost), and so does all that
    /// they write; later launches are refused with it. The [limit](Self::set_limit) counts from the launch.
    ///
    /// # Blocking
    /// Capturing takes as long as a call, with the same exception: the first use of an algorithm or a size may wait for the other
    /// ranks, which have to write the same call at the same time. See [`Communicator`](Communicator#blocking).
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
            _ => Err(Error::SeveralRanks { op: "in_graph_of", local: self.ranks() }.into()),
        }
    }

    /// [`in_graph`](Self::in_graph) of a process with several ranks. Each rank's calls are in a graph of its device; the graphs are
    /// launched in the same order on every device, and the launches of all ranks before any of them is waited for. What a call needs is
    /// connected before: a rank whose call is captured does not wait for one whose call is captured next. For
    /// [`all_to_all`](GraphCalls::all_to_all), build the communicator with
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
    pub(super) fn capture<'a, P: Ranges>(
        &self,
        rank: &RankOf<'_, 'a>,
        uses: Uses<'a, P>,
        call: impl FnOnce(P) -> Call,
    ) -> gpu_await::Result<Part<'a>> {
        let Some(order) = rank.order.take() else { return Ok(Part::captured(self.at)) };
        let uses = uses.updates(order).keeps(self.comm.clone());
        rank.shared.capture(self.at, self.queue, uses, call)?;
        Ok(Part::captured(self.at))
    }

    /// The rank, with the memory that its calls update.
    fn rank<'a>(&'a self, order: &'a mut DeviceBuffer<u8>) -> RankOf<'a, 'a> {
        let order = Cell::new(Some(order));
        RankOf { shared: self.comm.shared(), at: self.at, graph: Some(self), order }
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
                pub fn $verb<T, X, Y>(&self, x: &X, y: &mut Y $(, $arg: $type)*) -> gpu_await::Result<()>
                where
                    T: CollectiveElement,
                    X: Readable<T>,
                    Y: Writable<T>,
                {
                    let mut order = self.comm.shared().in_order(self.at)?;
                    self.rank(&mut order).$verb(x, y $(, $arg)*).map(drop)
                }

                #[doc = concat!("See [`Communicator::", stringify!($in_place), "`].")]
                ///
                /// # Errors
                #[doc = $errors]
                /// [`Error::Lost`]; what NCCL refuses; as of any operation.
                pub fn $in_place<T: CollectiveElement, X: Writable<T>>(
                    &self,
                    x: &mut X $(, $arg: $type)*
                ) -> gpu_await::Result<()> {
                    let mut order = self.comm.shared().in_order(self.at)?;
                    self.rank(&mut order).$in_place(x $(, $arg)*).map(drop)
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
    pub fn all_to_all<T, X, Y>(&self, x: &X, y: &mut Y) -> gpu_await::Result<()>
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let mut order = self.comm.shared().in_order(self.at)?;
        self.rank(&mut order).all_to_all(x, y).map(drop)
    }
}

impl fmt::Debug for GraphCalls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.comm.shared().ranks[self.at].rank;
        f.debug_struct("GraphCalls").field("rank", &rank).finish_non_exhaustive()
    }
}
