//! [`Call`] and its future.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::{Future, IntoFuture};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use crate::blame::Keys;
use crate::calls::Terms;
use crate::codec;
use crate::error::{Error, Result};
use crate::inside::{Handle, SentCall};
use crate::members::{Member, Members};
use crate::options::capped;
use crate::payload::{Input, Lease, Payload};
use crate::room::Room;
use crate::service::Service;
use crate::ticket::Outcome;

/// A call that has not been sent, with its options. Awaiting it sends it and returns the response; [`send`](Self::send) sends it at once.
///
/// # Examples
/// ```no_run
/// # use std::time::Duration;
/// # async fn ask<S: gpu_await_worker::Service<Request = u32, Response = u32>>(worker: gpu_await_worker::Worker<S>)
/// # -> Result<(), gpu_await_worker::Error> {
/// let one = worker.call(1).await?;
/// let two = worker.call(2).within(Duration::from_secs(1)).idempotent().await?;
/// # Ok(()) }
/// ```
#[must_use = "a call is not made until it is awaited or sent"]
pub struct Call<S: Service> {
    to: To,
    request: Result<Vec<u8>>,
    payload: Option<Input>,
    deadline: Option<Instant>,
    limit: Option<Duration>,
    attempts: u32,
    keys: Keys,
    /// The room that was reserved for it.
    room: Option<Room>,
    service: PhantomData<fn() -> S>,
}

/// The target of a call.
#[derive(Clone)]
pub(crate) enum To {
    Worker(Arc<Handle>),
    Group(Arc<Members>),
}

impl To {
    /// Whether guilty requests are refused.
    fn blames(&self) -> bool {
        match self {
            To::Worker(handle) => handle.inside.spec.options.blame.is_some(),
            To::Group(members) => members.blames(),
        }
    }
}

impl<S: Service> fmt::Debug for Call<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("payload", &self.payload).finish_non_exhaustive()
    }
}

impl<S: Service> Call<S> {
    pub(crate) fn new(to: To, request: &S::Request) -> Self {
        Call {
            to,
            request: codec::encode(request).map_err(|why| Error::encode("request", why)),
            payload: None,
            deadline: None,
            limit: None,
            attempts: 1,
            keys: Keys::default(),
            room: None,
            service: PhantomData,
        }
    }

    /// Sends a leased payload with it, without a copy. The last one counts.
    pub fn lease(mut self, lease: Lease) -> Self {
        self.payload = Some(Input::Lease(lease));
        self
    }

    /// Sends bytes as its payload, which are copied once. Without room for them they wait in the front, up to
    /// [`most_waiting_bytes`](crate::WorkerBuilder::most_waiting_bytes), and calls without a payload or with a lease pass.
    pub fn payload(mut self, bytes: impl Into<Arc<[u8]>>) -> Self {
        self.payload = Some(Input::Bytes(bytes.into()));
        self
    }

    /// Gives up after this time, whatever the state of the call: it ends with [`Error::Deadline`]. The process goes on with it; but a
    /// [suspect](Self::idempotent) that runs alone has 1 s more, and is then killed with its process ([`Cause::Abandoned`](crate::Cause::Abandoned)).
    /// So is one whose future was dropped, once its deadline, if it has one, has passed.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(Instant::now() + capped(limit));
        self
    }

    /// Kills the process if the call takes longer than this: nothing else ends a kernel that never does. The call ends with
    /// [`Lost`](Error::Lost), and so do other calls, unless they are [idempotent](Self::idempotent).
    ///
    /// The limit counts from when the process begins the call. Waiting does not count: for a process that takes calls, for room for the payload,
    /// in the process for the first poll, or while its service [pauses the limit](crate::Payloads::pause_limit). A [`deadline`](Self::deadline) bounds all of that.
    /// A call behind one that has no limit, and blocks the executor, waits with it: see [`executor_limit`](crate::WorkerBuilder::executor_limit).
    ///
    /// Once a call has begun, its limit counts on while it waits for others: for a stream that it shares with them, or for code that blocks the
    /// executor. A stream for each call, or slack in the limit, keeps waiting calls from overrunning. Which call held up the process is unknown
    /// unless only one had begun: all that had are [suspects](crate::Guilt::Suspect), and run alone if they may run again. A call that exceeds its
    /// limit alone is guilty.
    ///
    /// The first panic of a process with `RUST_BACKTRACE=1` blocks its executor for more than 100 ms, to look up symbols: for a shorter limit
    /// set `RUST_BACKTRACE=0` with [`env`](crate::WorkerBuilder::env).
    ///
    /// A limit of zero is refused: the call is not sent, and ends with [`Error::Unfit`].
    pub fn within(mut self, limit: Duration) -> Self {
        if limit.is_zero() && self.request.is_ok() {
            let what = "nanoseconds of a call (`Call::within`)";
            self.request = Err(Error::Unfit { what, found: 0, limit: 1 });
        }
        self.limit = Some(capped(limit));
        self
    }

    /// The call may run again after a death, in part or as a whole: it is sent to the next process, up to three times in all, and within
    /// its deadline.
    ///
    /// Calls that ran beside others when a process died are suspects: they are sent again one at a time, while nothing else runs. One that
    /// [was alone](crate::Guilt::Alone) is not sent again. If somebody killed the process (`SIGKILL` from outside), all run again beside one another
    /// once, and then alone.
    ///
    /// In a [`Group`](crate::Group) the next process may be another worker's. If none takes it, because the workers are given up, closed or
    /// full, it ends with the [`Lost`](Error::Lost) of the last one that had it.
    ///
    /// The memory of its payload is reused only once the call has ended.
    pub fn idempotent(mut self) -> Self {
        self.attempts = 3;
        self
    }

    /// Identifies the request, if its calls kill processes: see [`WorkerBuilder::blame`](crate::WorkerBuilder::blame). Two calls that do the same
    /// have the same key, such as a hash of their input.
    pub fn key(mut self, key: impl Hash) -> Self {
        self.keys.request = Some(hash(|hasher| key.hash(hasher)));
        self
    }

    /// Identifies the sender: see [`Blame::client_guilty`](crate::Blame::client_guilty).
    pub fn client(mut self, client: impl Hash) -> Self {
        self.keys.client = Some(hash(|hasher| client.hash(hasher)));
        self
    }

    #[cfg(feature = "tower")]
    pub(crate) fn in_room(mut self, room: Option<Room>) -> Self {
        self.room = room;
        self
    }

    /// Sends it now, or when a process takes calls.
    ///
    /// # Blocking
    /// Copies the payload, unless it is a lease.
    pub fn send(self) -> Answer<S> {
        let Call { to, request, payload, deadline, limit, attempts, mut keys, room, .. } = self;
        if let (Ok(request), true, None) = (&request, to.blames(), keys.request) {
            keys.request = digest(request, payload.as_ref().map_or(&[], Input::bytes));
        }
        let is_groups = matches!(to, To::Group(_));
        let terms = Terms { deadline, limit, attempts, keys, is_groups, ..Terms::default() };
        let sent = request.and_then(|request| match to {
            To::Worker(handle) => match handle.submit(request, payload, terms, room) {
                Ok(sent) => Ok((State::sent(sent), None)),
                Err(returned) => Err(returned.error),
            },
            To::Group(members) => {
                let (member, sent) = members.send(room, None, request, payload, terms)?;
                Ok((State::sent(sent), Some((members, member))))
            }
        });
        let (state, member) = sent.unwrap_or_else(|error| (State::Failed(error), None));
        Answer { state, member, service: PhantomData }
    }
}

/// The digest of a request, unless that would take long.
fn digest(request: &[u8], payload: &[u8]) -> Option<u64> {
    const MOST: usize = 1 << 20;
    let is_short = payload.len() <= MOST;
    is_short.then(|| hash(|hasher| (request, payload).hash(hasher)))
}

/// A keyed hash, so that nobody outside this process can find a collision.
fn hash(value: impl FnOnce(&mut DefaultHasher)) -> u64 {
    static SECRET: OnceLock<RandomState> = OnceLock::new();
    let mut hasher = SECRET.get_or_init(RandomState::new).build_hasher();
    value(&mut hasher);
    hasher.finish()
}

impl<S: Service> IntoFuture for Call<S> {
    type Output = Result<S::Response>;
    type IntoFuture = Answer<S>;

    fn into_future(self) -> Answer<S> {
        self.send()
    }
}

/// The answer to a [`Call`]: a future of the response. Ready proves that the service answered, or that it never will.
///
/// # Cancel safety
/// Dropping it abandons the answer. A call that was sent goes on, and counts against the limits until the process is done with it.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Answer<S: Service> {
    state: State,
    /// For a call of a group: the group, and which of its workers has the call.
    member: Option<(Arc<Members>, Member)>,
    service: PhantomData<fn() -> S>,
}

enum State {
    Sent {
        call: SentCall,
        /// Until then it checks for the answer itself.
        hot_until: Option<Instant>,
    },
    Failed(Error),
    Done,
}

impl State {
    fn sent(call: SentCall) -> Self {
        let hot = call.handle.inside.spec.options.hot;
        let hot_until = (!hot.is_zero()).then(|| Instant::now() + hot);
        State::Sent { call, hot_until }
    }
}

impl<S: Service> fmt::Debug for Answer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Sent { .. } => "Answer(pending)",
            State::Failed(_) => "Answer(failed)",
            State::Done => "Answer(done)",
        })
    }
}

impl<S: Service> Answer<S> {
    /// A future of the response and its payload, which takes up room for other answers until it is dropped: see
    /// [`payload_bytes`](crate::WorkerBuilder::payload_bytes).
    pub fn with_payload(self) -> AnswerWithPayload<S> {
        AnswerWithPayload(self)
    }

    fn poll_reply(&mut self, cx: &mut Context<'_>) -> Poll<Result<(S::Response, Option<Payload>)>> {
        let outcome = loop {
            let outcome = ready!(self.poll_outcome(cx));
            let Outcome::Returned(returned) = outcome else { break outcome };
            let Some((members, member)) = &mut self.member else {
                break Outcome::Returned(returned);
            };
            match members.send_again(*member, *returned) {
                Ok((next, sent)) => (*member, self.state) = (next, State::sent(sent)),
                Err(error) => break Outcome::Failed(error),
            }
        };
        self.state = State::Done;
        Poll::Ready(match outcome {
            Outcome::Failed(error) => Err(error),
            Outcome::Returned(returned) => Err(returned.error),
            Outcome::Answered { response, payload } => codec::decode(&response)
                .map(|response| (response, payload))
                .map_err(|why| Error::decode("response", why)),
        })
    }

    fn poll_outcome(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        Poll::Ready(match &mut self.state {
            State::Sent { call, .. } if call.handle.inside.check_here().is_err() => {
                Outcome::Failed(Error::Forked)
            }
            State::Sent { call: SentCall { handle, reply, .. }, hot_until } => {
                let mut polled = Pin::new(&mut *reply).poll(cx);
                if let Some(until) = hot_until.filter(|_| polled.is_pending()) {
                    // Checks for the answer itself, and yields to other tasks in between; later the supervisor wakes it.
                    let now = Instant::now();
                    if now >= until {
                        *hot_until = None;
                    } else {
                        handle.inside.hear_now(now);
                        polled = Pin::new(reply).poll(cx);
                        if polled.is_pending() {
                            cx.waker().wake_by_ref();
                        }
                    }
                }
                match polled {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(outcome) => {
                        outcome.unwrap_or_else(|_| Outcome::Failed(handle.inside.why_forgotten()))
                    }
                }
            }
            State::Failed(error) => Outcome::Failed(error.clone()),
            State::Done => panic!("an answer is not polled after it was ready"),
        })
    }
}

impl<S: Service> Drop for Answer<S> {
    fn drop(&mut self) {
        if let State::Sent { call, .. } = &self.state {
            call.handle.inside.abandon(call.id);
        }
    }
}

impl<S: Service> Future for Answer<S> {
    type Output = Result<S::Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_reply(cx).map_ok(|(response, _)| response)
    }
}

/// The answer to a [`Call`] with its payload, if it has one: see [`Answer::with_payload`].
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct AnswerWithPayload<S: Service>(Answer<S>);

impl<S: Service> Future for AnswerWithPayload<S> {
    type Output = Result<(S::Response, Option<Payload>)>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_reply(cx)
    }
}
