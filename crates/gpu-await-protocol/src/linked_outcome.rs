//! [`LinkedOutcome`]: whether a piece of work failed, or work that it descends from: outcomes, linked from producers to readers (pure).
//!
//! | an outcome | is | then |
//! |---|---|---|
//! | open | neither | a failure of its own or of a producer may come |
//! | failed | by its own failure, or by that of a producer | so has everything that descends from it |
//! | told | reported to have succeeded, as its readers may be | nothing can fail it, and it has no links any more |
//!
//! A producer keeps its readers: its failure reaches them even if nothing else refers to them. A reader does not keep its producers: one
//! that nothing refers to any more cannot fail.
//!
//! # Invariants
//! 1. An outcome that was told, or that a told one descends from, does not fail: producers are told first
//!    (`what_a_told_reader_descends_from_does_not_fail`).
//! 2. A failure reaches whatever is linked before it or after it (`a_failure_reaches_a_reader_that_is_linked_beside_it`).
//! 3. A reader that is asked meanwhile sees the failure: outcomes that it has reached stay until it has reached all
//!    (`a_failure_is_seen_through_what_it_has_reached`).
//! 4. No walk is recursive, nor is the drop (`a_long_chain_of_outcomes`).
#![forbid(unsafe_code)]

use std::mem::take;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::sync::Plain;

/// The outcome of a piece of work: `T` is known of it from the start, `M` is a piece of memory that it wrote, `F` is a failure.
pub struct LinkedOutcome<T, M, F> {
    /// What is known of the work.
    pub work: T,
    state: Plain<State<T, M, F>>,
}

struct State<T, M, F> {
    /// The first failure of its own, and the first that came from a producer.
    own: Option<F>,
    inherited: Option<F>,
    is_told: bool,
    producers: SmallVec<[Weak<LinkedOutcome<T, M, F>>; 1]>,
    readers: Readers<T, M, F>,
    written: SmallVec<[M; 1]>,
}

type Readers<T, M, F> = Vec<Arc<LinkedOutcome<T, M, F>>>;

/// What a failure goes on to: the readers, and the memory that was written.
type Reached<T, M, F> = (Readers<T, M, F>, SmallVec<[M; 1]>);

/// The outcome that failed, and how.
type Failed<T, M, F> = (Arc<LinkedOutcome<T, M, F>>, F);

impl<T, M, F> State<T, M, F> {
    fn failure(&self) -> Option<&F> {
        self.own.as_ref().or(self.inherited.as_ref())
    }
}

impl<T, M, F: Clone> LinkedOutcome<T, M, F> {
    /// Work that may fail.
    #[inline]
    pub fn new(work: T) -> Arc<Self> {
        let state = State {
            own: None,
            inherited: None,
            is_told: false,
            producers: SmallVec::new(),
            readers: Vec::new(),
            written: SmallVec::new(),
        };
        Arc::new(LinkedOutcome { work, state: Plain::new(state) })
    }

    /// The failure, if there was one.
    #[inline]
    pub fn failure(&self) -> Option<F> {
        self.state.lock().failure().cloned()
    }

    /// Whether a reader depends on it: it failed or may still fail. `is_over`: its work is known to be complete.
    #[inline]
    pub fn is_open(&self, is_over: impl FnOnce() -> bool) -> bool {
        let state = self.state.lock();
        state.failure().is_some() || !(state.is_told || is_over())
    }

    /// Links it to work that it reads from, before anybody asks for it; returns the failure of that work.
    #[inline]
    pub fn descends_from(self: &Arc<Self>, producer: &Arc<Self>) -> Option<F> {
        let mut theirs = producer.state.lock();
        if theirs.failure().is_none() && !theirs.is_told {
            theirs.readers.push(self.clone());
            drop(theirs);
            self.state.lock().producers.push(Arc::downgrade(producer));
            return None;
        }
        theirs.failure().cloned()
    }

    /// Enters memory that it wrote, unless it failed; returns that failure. Forgets what is not to be `kept`.
    #[inline]
    pub fn wrote(&self, memory: M, mut kept: impl FnMut(&M) -> bool) -> Option<F> {
        let mut state = self.state.lock();
        if state.failure().is_none() {
            state.written.retain(|known| kept(known));
            state.written.push(memory);
        }
        state.failure().cloned()
    }

    /// Records that it failed, unless it was told or `is_over` by now; its first own failure stays. Everything that descends from it fails
    /// as well, each with what `inherited` makes of it. `spread` gets each outcome that had not failed before, with what it wrote.
    #[inline]
    pub fn fail(
        self: &Arc<Self>,
        own: F,
        is_over: impl FnOnce() -> bool,
        inherited: impl Fn(&T) -> F,
        mut spread: impl FnMut(&Arc<Self>, &F, SmallVec<[M; 1]>),
    ) {
        let mut state = self.state.lock();
        if state.own.is_some() || state.is_told || is_over() {
            return;
        }
        state.own = Some(own.clone());
        // Empty if a producer had failed it before.
        let (mut reached, written) = (take(&mut state.readers), take(&mut state.written));
        drop(state);
        spread(self, &own, written);
        let mut at = 0;
        while let Some(reader) = reached.get(at).cloned() {
            at += 1;
            let failure = inherited(&reader.work);
            if let Some((readers, written)) = reader.inherit(&failure) {
                spread(&reader, &failure, written);
                reached.extend(readers);
            }
        }
    }

    /// Records a producer's failure. Returns the readers and what was written, unless it had failed before.
    #[inline]
    pub fn inherit(&self, failure: &F) -> Option<Reached<T, M, F>> {
        let mut state = self.state.lock();
        if state.inherited.is_some() {
            return None;
        }
        state.inherited = Some(failure.clone());
        Some((take(&mut state.readers), take(&mut state.written)))
    }

    /// Asked when the work is complete: the failure, if there was one, and whose; otherwise there will never be one.
    #[inline]
    pub fn tell(self: &Arc<Self>) -> Result<(), Failed<T, M, F>> {
        // Each with whether its producers were told.
        let mut path: SmallVec<[(Arc<Self>, bool); 1]> = SmallVec::new();
        path.push((self.clone(), false));
        while let Some((outcome, is_last)) = path.pop() {
            let mut state = outcome.state.lock();
            if let Some(failure) = state.failure().cloned() {
                drop(state);
                return Err((outcome, failure));
            }
            if state.is_told {
                continue;
            }
            if is_last || state.producers.is_empty() {
                state.is_told = true;
                state.producers = SmallVec::new();
                let links = (take(&mut state.readers), take(&mut state.written));
                drop(state);
                drop(links);
                continue;
            }
            let producers: SmallVec<[_; 1]> =
                state.producers.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            path.push((outcome, true));
            path.extend(producers.into_iter().map(|producer| (producer, false)));
        }
        Ok(())
    }
}

/// One by one, not recursively: each may hold the last reference to the next.
impl<T, M, F> Drop for LinkedOutcome<T, M, F> {
    fn drop(&mut self) {
        let mut readers = take(&mut self.state.lock().readers);
        while let Some(reader) = readers.pop() {
            if let Some(alone) = Arc::into_inner(reader) {
                readers.append(&mut alone.state.lock().readers);
            }
        }
    }
}
