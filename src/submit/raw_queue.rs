//! [`RawQueue`]: the stream, as the closure of `enqueue` sees it.
#![forbid(unsafe_code)]

use std::error::Error as StdError;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;
use smallvec::SmallVec;

use super::captured::Recorder;
use super::footprint::Name;
use super::outcome::{Dependency, LateOutcomes, RunOutcome, WorkOfOutcome, WorkOutcome, foreign};
use super::raw::Raw;
use crate::backend::{ArgBlock, DeviceKind, DevicePtr, Function, Grid, LaunchShape};
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::Engine;

/// The ranges that an operation declared, tracked or not.
pub(super) type Ranges = SmallVec<[(DevicePtr, u64); 4]>;

/// A stream inside the closure of [`enqueue`](crate::Stream::enqueue): the driver's handles, and host functions in place
/// of device work on a host device.
pub struct RawQueue<'q> {
    pub(super) raw: &'q Raw<'q>,
    pub(super) name: Name<'q>,
    pub(super) memory: &'q Ranges,
    /// Set if its work is being captured.
    pub(super) recorder: Option<&'q Recorder>,
    /// Takes outcomes that are known only when the work runs.
    pub(super) outcomes: Option<&'q LateOutcomes>,
    pub(super) not_send: PhantomData<*const ()>,
}

impl fmt::Debug for RawQueue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawQueue({:?})", self.raw.stream)
    }
}

impl RawQueue<'_> {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.raw.stream.engine
    }

    /// The operation's declared ranges, as arguments.
    pub(super) fn ranges(&self) -> ArgBlock {
        let mut args = ArgBlock::default();
        self.memory.iter().for_each(|(ptr, bytes)| args.push_memory(ptr.0, *bytes));
        args
    }

    fn check_host(&self) -> Result<()> {
        if self.kind() != DeviceKind::Host {
            return Err(self.unsupported("a host function in place of device work"));
        }
        Ok(())
    }

    fn unsupported(&self, what: &'static str) -> Error {
        ErrorDetail::Unsupported { what, device: self.engine().label().to_owned() }.into()
    }

    /// Returns the driver's handle of the stream: a `CUstream` as a number. On a host device a library cannot use it.
    #[must_use]
    pub fn stream(&self) -> u64 {
        self.raw.handle()
    }

    /// Returns the driver's handle of the device's context, which is current: a `CUcontext` as a number; 0 on
    /// a host device.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.engine().backend.context()
    }

    /// Returns the kind of the device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.engine().backend.kind()
    }

    /// Returns the ordinal of the device: its number among the devices of its kind.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.engine().backend.ordinal()
    }

    /// Puts a Rust function on the stream of a host device, in place of the library's work on a GPU.
    ///
    /// The stream's worker runs it once, in stream order, after checking that every declared range is live. A panic in
    /// it loses the device, as a kernel fault does. Pass a function that can fail to [`try_host`](Self::try_host).
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a host device; in a [`Graph`](crate::Graph), which needs a function that can run
    /// more than once ([`host_each`](Self::host_each)). If the device is lost, its loss.
    pub fn host(&self, twin: impl FnOnce() + Send + 'static) -> Result<()> {
        self.check_host()?;
        if self.recorder.is_some() {
            return Err(self.unsupported("a host function that runs once, in a graph"));
        }
        let args = self.ranges();
        let twin = Mutex::new(Some(twin));
        let once = move |_: &Grid, _: &ArgBlock| {
            let twin = twin.lock().take();
            if let Some(twin) = twin {
                twin();
            }
        };
        let (grid_dim, block_dim, cluster_dim) = ([1; 3], [1; 3], [1; 3]);
        let grid = Grid { grid_dim, block_dim, cluster_dim, shared_mem_bytes: 0 };
        let (twin, kernel) = (Arc::new(once), self.name.to_arc());
        let function = Function::Host { twin, kernel, waits_first: false };
        let shape = LaunchShape::plain(grid);
        self.raw
            .launch(&function, &shape, args.arguments())
            .map_err(|code| self.raw.stream.refused(code))
    }

    /// [`host`](Self::host) for a function that can fail: its status is known only once it has run.
    ///
    /// If it fails, the future of the operation (or of its batch) resolves with [`ErrorDetail::Foreign`], whose source is
    /// the function's error; an [`Error`] of this crate stays as it is. The operation's declared outputs count as failed
    /// from then on, until they are overwritten: operations that are submitted later and read them fail with
    /// [`ErrorDetail::Upstream`].
    ///
    /// An operation that was submitted *before* the failure and reads that memory still runs, on invalid data. Its future fails
    /// likewise when it is ready, and its outputs count as failed too.
    ///
    /// On a GPU, device work has no status of its own; a library that learns of a failure in another way reports it through an
    /// [`outcome`](Self::outcome). Work that the library does on the host goes between
    /// [`MemoryLoan::ready`](crate::MemoryLoan::ready) and [`MemoryLoan::fail`](crate::MemoryLoan::fail) on every device.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::{ErrorDetail, Uses};
    /// # fn lib_run(_: u64, _: usize) -> i32 { 5 }
    /// let mut y = stream.empty::<f32>(4).queued()?;
    /// // SAFETY: the library overwrites `y`, if it succeeds.
    /// let op = unsafe {
    ///     stream.enqueue(Uses::new("lib_run").writes(&mut y), |queue, (y,)| {
    ///         queue.try_host(move || match lib_run(y.address(), y.len()) {
    ///             0 => Ok(()),
    ///             status => Err(format!("status {status}")),
    ///         })
    ///     })
    /// };
    /// let error = op.await.unwrap_err();
    /// assert_eq!(error.detail().to_string(), "lib_run: status 5");
    /// let error = stream.download(&y).await.unwrap_err();
    /// assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`host`](Self::host).
    pub fn try_host<E>(
        &self,
        twin: impl FnOnce() -> std::result::Result<(), E> + Send + 'static,
    ) -> Result<()>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let outcome = RunOutcome::of_next(self.name, self.raw.stream);
        let told = outcome.clone();
        self.host(move || {
            if let Err(error) = twin() {
                told.fail_with(error.into());
            }
        })?;
        if let Some(outcomes) = self.outcomes {
            outcomes.push(Dependency::own(outcome));
        }
        Ok(())
    }

    /// Returns the outcome of the operation, through which the library can report a failure of the work after the call and
    /// from any thread: a lost peer, or an error status that one of the library's threads finds.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: in the closure of a [`Graph`](crate::Graph), whose launches have outcomes of their own; see
    /// [`each_launch`](Self::each_launch).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::{Error, ErrorDetail, Uses};
    /// let mut y = stream.empty::<f32>(4).queued()?;
    /// // SAFETY: the library overwrites `y`, if it succeeds.
    /// let op = unsafe {
    ///     stream.enqueue(Uses::new("receive").writes(&mut y), |queue, (y,)| {
    ///         let outcome = queue.outcome()?;
    ///         // On a GPU the library's own thread does this; a host device runs it here.
    ///         queue.host(move || outcome.fail(format!("nobody sent {} numbers", y.len())))?;
    ///         Ok::<(), Error>(())
    ///     })
    /// };
    /// assert_eq!(op.await.unwrap_err().detail().to_string(), "receive: nobody sent 4 numbers");
    /// let error = stream.download(&y).await.unwrap_err();
    /// assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }));
    /// # Ok::<(), Error>(()) }).unwrap();
    /// ```
    pub fn outcome(&self) -> Result<WorkOutcome> {
        let Some(outcomes) = self.outcomes else {
            return Err(self.unsupported("the outcome of work in a graph"));
        };
        let outcome = RunOutcome::of_next(self.name, self.raw.stream);
        outcomes.push(Dependency::own(outcome.clone()));
        Ok(WorkOutcome::new(&outcome))
    }

    /// Has `told` called with the outcome of each launch, for work that [can be captured](crate::Uses::can_be_captured) and whose library
    /// may learn that a launch failed. In a graph, `told` is called in each launch of the graph, in front of the work, on the launching
    /// thread; the outcome fails that launch alone, with everything that the graph writes. Elsewhere this operation is the only launch,
    /// and `told` is called at once.
    ///
    /// An error of `told` refuses the launch, or the operation: [`ErrorDetail::Foreign`]. It runs under the same rules as the closure of
    /// [`enqueue`](crate::Stream::enqueue), and is dropped with the graph.
    ///
    /// `told` is also called for a launch of the graph that is refused before its work is submitted, for example because an input failed.
    /// The outcome of that launch [has failed](WorkOutcome::failure) already: a library whose peers expect the launch may have to notify
    /// them.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// use gpu_await::{Error, InOut, Uses};
    /// static IS_UP: AtomicBool = AtomicBool::new(true);
    /// let graph = device.graph::<(InOut<f32>,), _, _>((), |q, (), (mut y,)| {
    ///     let uses = Uses::new("theirs").updates(&mut y).can_be_captured();
    ///     // SAFETY: it puts nothing on the stream.
    ///     unsafe {
    ///         q.enqueue(uses, |queue, _| {
    ///             queue.each_launch(|outcome| {
    ///                 drop(outcome); // or kept, to tell of a failure until the launch is complete
    ///                 if IS_UP.load(Ordering::SeqCst) { Ok(()) } else { Err("the library is down") }
    ///             })
    ///         })
    ///     }
    /// });
    /// let mut y = stream.zeros::<f32>(4).queued()?;
    /// graph.launch(&stream, (&mut y,)).await?;
    /// IS_UP.store(false, Ordering::SeqCst);
    /// let error = graph.launch(&stream, (&mut y,)).await.unwrap_err();
    /// assert_eq!(error.detail().to_string(), "theirs: the library is down");
    /// # Ok::<(), Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// Outside a graph, the error of `told`.
    ///
    /// # Panics
    /// Outside a graph, if `told` panics. In a graph a panic of `told` refuses the launch, with its message as the error.
    pub fn each_launch<E>(
        &self,
        mut told: impl FnMut(WorkOutcome) -> std::result::Result<(), E> + Send + 'static,
    ) -> Result<()>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let op = self.name.to_arc();
        let mut told =
            move |outcome| told(outcome).map_err(|error| foreign(op.clone(), error.into()));
        match self.recorder {
            Some(recorder) => recorder.told.borrow_mut().push(Box::new(told)),
            None => told(self.outcome()?)?,
        }
        Ok(())
    }

    /// [`host`](Self::host) for work that [can be captured](crate::Uses::can_be_captured): in a graph each launch calls the
    /// function, on one thread at a time.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a host device. If the device is lost, its loss.
    pub fn host_each(&self, twin: impl FnMut() + Send + 'static) -> Result<()> {
        self.check_host()?;
        match self.recorder {
            Some(recorder) => recorder.twins.borrow_mut().push(Box::new(twin)),
            None => self.host(twin)?,
        }
        Ok(())
    }
}
