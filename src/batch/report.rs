//! The outcome of replayed lists and graphs, and the reasons: as figures, text and drawings.
#![forbid(unsafe_code)]

use std::fmt;
use std::fmt::Write as _;
use std::panic::Location;
use std::sync::Arc;

use crate::backend::{Grid, NodeLaunch};
use crate::runtime::Engine;
pub use crate::runtime::graph_budget::Report;
use crate::submit::{EdgeKind, List};
use crate::thread::contain;

/// The outcome of one list of a region's last run, or of a launch that was in no list.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListReport {
    /// How many launches it had.
    pub launches: usize,
    /// The outcome.
    pub outcome: ListOutcome,
    /// The operation that ended it: one that a graph cannot contain, or that used the stream outside the
    /// queue. `None` at the end of the closure, and where something waited for the list's work.
    pub ended_by: Option<OpSite>,
}

/// The outcome of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListOutcome {
    /// Launched as the graph that was compiled for its shape.
    Replayed {
        /// How many nodes had their arguments or launch configuration updated.
        nodes_set: usize,
    },
    /// Compiled and launched as a graph: its shape came a second time.
    Compiled,
    /// Launched one by one: the first list at its position.
    First,
    /// Launched one by one: this launch is of another kernel than in the last run's list at the same
    /// position.
    Differs(OpSite),
    /// Launched one by one: this launch is of the same kernel as the one in its place in the last run, but waits for other launches,
    /// because it uses other memory, a [barrier](crate::Queue::barrier) was added or removed, or the list begins later or earlier.
    Reordered(OpSite),
    /// Launched one by one: from this launch on, it is longer than in the last run.
    Longer(OpSite),
    /// Launched one by one: it stops earlier than in the last run.
    Shorter,
    /// Launched one by one, cut short: something else used the stream ([`ended_by`](ListReport::ended_by)), or waited for its work.
    Interrupted,
    /// In no list, as a kernel's first launch on a device may take long. In the next run this launch is in a list, which is therefore of
    /// another length.
    FirstLaunch(OpSite),
    /// In no list, as it cannot be replayed: a cooperative launch or one with clusters, one that waits for a flag, or any launch in
    /// verify mode.
    Unlisted(OpSite),
    /// Launched one by one: the driver refused to update its nodes or to compile it. The next run tries again; after each further
    /// refusal the pause doubles, up to sixteen runs.
    Refused,
    /// Not launched, or only in part: the driver refused it, or the device is lost or closed.
    Failed,
    /// Launched one by one: the device has as many graphs as it [may have](crate::DeviceBuilder::graph_limit), and those are in use.
    /// In the seventeenth such run the list gets the permit of a graph that was not launched since the first, if there is one.
    NoPlace,
}

/// An operation, and the line that called it.
#[derive(Clone, PartialEq, Eq)]
pub struct OpSite {
    name: SiteName,
    at: &'static Location<'static>,
}

#[derive(Clone, PartialEq, Eq)]
enum SiteName {
    Verb(&'static str),
    Kernel(Arc<str>),
}

impl OpSite {
    pub(crate) fn verb(name: &'static str, at: &'static Location<'static>) -> Self {
        OpSite { name: SiteName::Verb(name), at }
    }

    pub(crate) fn kernel(name: &Arc<str>, at: &'static Location<'static>) -> Self {
        OpSite { name: SiteName::Kernel(name.clone()), at }
    }

    /// Returns the name of the kernel, or of the operation.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.name {
            SiteName::Verb(name) => name,
            SiteName::Kernel(name) => name,
        }
    }

    /// Returns the line that called it.
    #[must_use]
    pub fn at(&self) -> &'static Location<'static> {
        self.at
    }
}

impl fmt::Display for OpSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.name(), self.at)
    }
}

impl fmt::Debug for OpSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ListOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListOutcome::Replayed { nodes_set: 1 } => f.write_str("replayed, 1 node set"),
            ListOutcome::Replayed { nodes_set } => write!(f, "replayed, {nodes_set} nodes set"),
            ListOutcome::Compiled => f.write_str("compiled"),
            ListOutcome::First => f.write_str("launched one by one: it is the first"),
            ListOutcome::Differs(site) => {
                write!(f, "launched one by one: {site} is another launch than before")
            }
            ListOutcome::Reordered(site) => {
                write!(f, "launched one by one: {site} waits for other launches than before")
            }
            ListOutcome::Longer(site) => {
                write!(f, "launched one by one: {site} is one launch more than before")
            }
            ListOutcome::Shorter => f.write_str("launched one by one: it is shorter than before"),
            ListOutcome::Interrupted => f.write_str("launched one by one: it was interrupted"),
            ListOutcome::FirstLaunch(site) => {
                write!(f, "in no list: {site} is the kernel's first launch")
            }
            ListOutcome::Unlisted(site) => write!(f, "in no list: {site} cannot be replayed"),
            ListOutcome::Failed => f.write_str("failed to launch"),
            ListOutcome::NoPlace => {
                f.write_str("launched one by one: there are as many graphs as may be, all in use")
            }
            ListOutcome::Refused => {
                f.write_str("launched one by one: the driver refused it as a graph")
            }
        }
    }
}

impl fmt::Display for ListReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.launches == 1 { "" } else { "es" };
        write!(f, "{} launch{plural}, {}", self.launches, self.outcome)?;
        match &self.ended_by {
            Some(site) => write!(f, "; ended by {site}"),
            None if self.outcome == ListOutcome::Interrupted => {
                f.write_str(": something waited for its work")
            }
            None => Ok(()),
        }
    }
}

/// Counts outcomes of the device's lists, and logs a warning for a driver refusal. The subscriber is foreign code: not to be called under a lock.
pub(crate) fn count(engine: &Engine, lists: &Report) {
    if let Some(code) = engine.graphs.count(lists) {
        let device = engine.label();
        contain::log(|| {
            tracing::warn!(target: "gpu_await::replay", device, %code, "the driver refused a graph: its work is launched one by one");
        });
    }
}

/// Writes a list as a cluster in the DOT language, with nodes numbered from `first` on; the flag says whether its edges may be programmatic. Returns
/// the number of nodes.
pub(crate) fn cluster(
    into: &mut String,
    title: &str,
    first: usize,
    (list, is_programmatic): (&List, bool),
) -> usize {
    let _ = writeln!(into, "  subgraph \"cluster {title}\" {{\n    label = \"{title}\";");
    for number in 0..list.known_len() {
        let (name, NodeLaunch { shape, args, .. }) = (list.name(number), list.launch(number));
        let Grid { grid_dim, block_dim, .. } = shape.grid;
        let mut label = format!("{name}\\n{grid_dim:?} x {block_dim:?}");
        for (address, bytes) in args.memory() {
            let _ = write!(label, "\\n{address:#x} + {bytes}");
        }
        let label = label.replace('"', "'");
        let _ = writeln!(into, "    n{} [label = \"{label}\"];", first + number);
    }
    // An interrupted or failed run has no edges.
    for ((before, behind), kind) in
        list.is_settled().then(|| list.edge_kinds()).into_iter().flatten()
    {
        let (before, behind) = (first + before as usize, first + behind as usize);
        let is_early = is_programmatic && kind == EdgeKind::Programmatic;
        let style = if is_early { " [style = dashed]" } else { "" };
        let _ = writeln!(into, "    n{before} -> n{behind}{style};");
    }
    into.push_str("  }\n");
    list.known_len()
}

/// The clusters as a whole graph.
pub(crate) fn dot(clusters: &str) -> String {
    format!("digraph {{\n  node [shape = box];\n{clusters}}}\n")
}
