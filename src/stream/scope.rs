//! The current stream, on which a verb called on a [`Device`](crate::Device) puts its work.
//!
//! It is the stream of the innermost *scope* on that device, or else the device's default stream. A scope is state of a future: [`Scope`]
//! installs its stream when it is polled and removes it before the poll returns. Between polls nothing is installed anywhere.
//!
//! # Invariants
//! 1. A stream installed by a poll is removed when the poll returns or panics (`a_scope_ends_with_its_future_whatever_the_way`).
//! 2. A task sees no other task's scopes, on whatever thread it is polled (`tasks_that_migrate_do_not_see_each_others_streams`).
//! 3. Threads of the driver and of this crate see no scopes (`host_functions_and_wakers_see_no_scope`).
//! 4. Destructors of thread-locals may use scopes like any other code (`scopes_work_in_the_destructors_of_a_thread`).
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project::pin_project;
use smallvec::SmallVec;

use crate::stream::Stream;

/// The streams of the current scopes, innermost last.
///
/// It has no destructor, so that it exists until the thread has ended. By then it is empty, and an empty one
/// owns nothing: see [`Installed`].
type Streams = ManuallyDrop<SmallVec<[Stream; 4]>>;

thread_local! {
    static SCOPES: RefCell<Streams> = RefCell::default();
}

/// A future with a current stream; see [`Stream::scope`].
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
#[pin_project]
pub struct Scope<F> {
    #[pin]
    future: F,
    state: ScopeState,
}

#[derive(Debug)]
enum ScopeState {
    /// Not polled yet.
    New {
        stream: Stream,
        ordered: bool,
    },
    Entered(Stream),
}

impl<F: Future> Future for Scope<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if let ScopeState::New { stream, ordered } = this.state {
            *this.state = ScopeState::Entered(enter(stream, *ordered));
        }
        let ScopeState::Entered(stream) = this.state else { unreachable!("entered just now") };
        let _installed = Installed::new(stream);
        this.future.poll(cx)
    }
}

/// Keeps a stream current until dropped; the flag says whether the stream was installed. On systems without
/// thread-locals that outlive destructors, destructors see no scopes.
struct Installed(bool);

impl Installed {
    fn new(stream: &Stream) -> Self {
        let stream = stream.clone();
        Installed(SCOPES.try_with(|scopes| scopes.borrow_mut().push(stream)).is_ok())
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        if !self.0 {
            return;
        }
        let pop = |scopes: &RefCell<Streams>| {
            let mut scopes = scopes.borrow_mut();
            let innermost = scopes.pop();
            if scopes.is_empty() && scopes.spilled() {
                // Frees the memory.
                drop(std::mem::take(&mut **scopes));
            }
            innermost
        };
        // Dropped after the borrow: it may be the last handle of its stream.
        drop(SCOPES.try_with(pop));
    }
}

/// The stream of the innermost scope, of one device or of any.
pub(crate) fn innermost(engine: Option<u64>) -> Option<Stream> {
    let fits = |stream: &&Stream| engine.is_none_or(|id| stream.engine().state.id == id);
    // An ending thread may have no scopes any more.
    let found = SCOPES.try_with(|scopes| scopes.borrow().iter().rev().find(fits).cloned());
    found.ok().flatten()
}

/// Orders `stream` behind the one that was current.
fn enter(stream: &Stream, ordered: bool) -> Stream {
    let stream = stream.clone();
    if !ordered {
        return stream;
    }
    let previous =
        innermost(Some(stream.engine().state.id)).unwrap_or_else(|| stream.default_stream());
    if previous == stream {
        return stream;
    }
    match stream.wait(&previous).queued() {
        Ok(()) => stream,
        Err(error) => stream.refusing(error),
    }
}

impl Stream {
    /// Makes this stream the [current stream](crate::Device::current_stream) of its device inside `future`:
    /// verbs called on the [`Device`](crate::Device) go to it.
    ///
    /// The scope is state of the future, installed for the duration of each poll: spawned tasks do not
    /// inherit it, other tasks on the same thread do not see it, and it may be awaited on any thread. Scopes
    /// nest, and a scope leaves the current streams of other devices alone.
    ///
    /// # Ordering
    /// At the first poll, this stream is ordered, on the device, behind everything submitted so far to the
    /// stream that was current; [`scope_unordered`](Self::scope_unordered) skips that. Work after the scope
    /// does not wait for the scope's work: use `stream.wait(..)`.
    ///
    /// # Cancel safety
    /// That of `future`.
    ///
    /// # Errors
    /// If the wait cannot be put on the stream, verbs that the future calls on the device fail with that
    /// error.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// let device = gpu_await::Device::host();
    /// let stream = device.stream()?;
    /// let x = stream.scope(async { device.full(4, 2u32).queued() }).await?;   // on `stream`
    /// assert_eq!(device.download(&x).await?, [2; 4]);                         // on the default stream
    /// assert_eq!(stream.submitted(), 1);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn scope<F: Future>(&self, future: F) -> Scope<F> {
        Scope { future, state: ScopeState::New { stream: self.clone(), ordered: true } }
    }

    /// [`scope`](Self::scope) without the wait for the stream that was current. Work on the same buffers is
    /// still ordered.
    pub fn scope_unordered<F: Future>(&self, future: F) -> Scope<F> {
        Scope { future, state: ScopeState::New { stream: self.clone(), ordered: false } }
    }

    /// Makes this stream the current one of its device while `work` runs; the blocking form of
    /// [`scope`](Self::scope).
    ///
    /// # Panics
    /// If `work` panics; the scope ends first.
    pub fn scope_sync<R>(&self, work: impl FnOnce() -> R) -> R {
        let _installed = Installed::new(&enter(self, true));
        work()
    }

    /// Returns the stream of the innermost scope, on whatever device; `None` outside any scope.
    ///
    /// It lets code that has no device or stream at hand record, wait and submit.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Device, Stream};
    /// let device = Device::host();
    /// let stream = device.stream()?;
    /// stream.scope(async { assert_eq!(Stream::current().as_ref(), Some(&stream)) }).await;
    /// assert!(Stream::current().is_none());
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn current() -> Option<Stream> {
        innermost(None)
    }
}
