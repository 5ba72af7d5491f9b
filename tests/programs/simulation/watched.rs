//! Futures of any kind in one list, and what is known of each.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::FutureExt;
use gpu_await::{DeviceBuffer, Op, Result, Stream};

use super::model::{Contents, Frontier};

/// What a host function that panics on purpose says.
pub(crate) const ON_PURPOSE: &str = "on purpose";

/// What a future resolved with.
pub(crate) enum Got {
    Unit,
    Floats(Vec<f32>),
    Ids(Vec<usize>),
    Both(Vec<f32>, usize),
    Buffer(DeviceBuffer<f32>),
}

/// What a future must resolve with.
#[derive(Clone, Debug)]
pub(crate) enum Expect {
    Unit,
    Floats(Vec<f32>),
    Ids(Vec<usize>),
    Both(Vec<f32>, usize),
    /// A buffer, for this place among the buffers.
    Buffer(Contents, usize),
    Panic,
}

/// How a poll or a look at a future ended.
pub(crate) enum Outcome {
    Pending,
    Ready(Result<Got>),
    Panicked(String),
}

/// A future that is kept.
pub(crate) struct Kept {
    pub(crate) op: Box<dyn Watched>,
    pub(crate) expect: Expect,
    /// Of the last poll, which was pending.
    pub(crate) flag: Option<Arc<Flag>>,
    /// What must have run when it is ready.
    pub(crate) frontier: Frontier,
    pub(crate) name: String,
}

/// A waker that remembers that it was called.
pub(crate) struct Flag {
    woken: AtomicBool,
    panics: bool,
}

impl Flag {
    pub(crate) fn new(panics: bool) -> Arc<Self> {
        Arc::new(Flag { woken: AtomicBool::new(false), panics })
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::SeqCst)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        if self.panics {
            // Not `panic!`: its message would go to the terminal.
            resume_unwind(Box::new(ON_PURPOSE));
        }
    }
}

/// An `Op` of any value.
pub(crate) trait Watched {
    fn poll(&mut self, waker: &Waker) -> Poll<Result<Got>>;
    fn try_take(&mut self) -> Option<Result<Got>>;
    fn is_complete(&self) -> bool;
    fn waited_by(&self, stream: &Stream) -> Op<()>;
}

pub(crate) struct Erased<T>(pub(crate) Op<T>, pub(crate) fn(T) -> Got);

impl<T> Watched for Erased<T> {
    fn poll(&mut self, waker: &Waker) -> Poll<Result<Got>> {
        self.0.poll_unpin(&mut Context::from_waker(waker)).map(|result| result.map(self.1))
    }

    fn try_take(&mut self) -> Option<Result<Got>> {
        self.0.try_take().map(|result| result.map(self.1))
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn waited_by(&self, stream: &Stream) -> Op<()> {
        stream.wait(&self.0)
    }
}

impl Kept {
    pub(crate) fn poll(&mut self, panics: bool) -> Outcome {
        let flag = Flag::new(panics);
        let waker = Waker::from(flag.clone());
        let outcome = caught(|| match self.op.poll(&waker) {
            Poll::Pending => Outcome::Pending,
            Poll::Ready(result) => Outcome::Ready(result),
        });
        self.flag = matches!(outcome, Outcome::Pending).then_some(flag);
        outcome
    }

    pub(crate) fn try_take(&mut self) -> Outcome {
        caught(|| self.op.try_take().map_or(Outcome::Pending, Outcome::Ready))
    }

    /// Whether it waits for a wake-up that has not come.
    pub(crate) fn sleeps(&self) -> bool {
        self.flag.as_ref().is_some_and(|flag| !flag.is_woken())
    }
}

fn caught(f: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|said| (*said).to_owned());
        Outcome::Panicked(said.or_else(|| panic.downcast_ref().cloned()).unwrap_or_default())
    })
}

/// What is wrong with a value.
pub(crate) fn differs(got: &Got, expect: &Expect) -> Option<String> {
    let wrong = match (got, expect) {
        (Got::Unit, Expect::Unit) | (Got::Buffer(_), Expect::Buffer(..)) => return None,
        (Got::Floats(got), Expect::Floats(expect)) => floats(got, expect)?,
        (Got::Ids(got), Expect::Ids(expect)) if got == expect => return None,
        (Got::Both(got, id), Expect::Both(expect, known)) if id == known => floats(got, expect)?,
        (Got::Ids(ids), _) => format!("functions {ids:?}"),
        _ => "another kind of value".to_owned(),
    };
    Some(format!("{wrong} instead of {expect:?}"))
}

fn floats(got: &[f32], expect: &[f32]) -> Option<String> {
    (got != expect).then(|| format!("{got:?}"))
}
