//! Which other libraries put work on a stream (pure).
//!
//! | other libraries | an operation is followed by a marker | a ticket covers their work |
//! |---|---|---|
//! | none | if a wait needs one | – |
//! | use the stream, through a loan of its handle or permanently | always | when a query covers everything on the stream |
//! | used it: the last loan ended | if a wait needs one | from the next turn on, which begins with a ticket of its own |
//!
//! A loan that ended leaves a debt: a ticket behind everything on the stream. The next turn takes the debt over, publishes the ticket and
//! settles it. A loan that ends in the meantime leaves a new debt.
//!
//! # Invariants
//! 1. Work put on the stream before a loan ended is covered by a published ticket, or `is_owed` returns true
//!    (`what_a_loan_left_is_covered`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

/// Other libraries use the stream permanently.
const FOR_GOOD: u64 = 1 << 63;

/// A loan ended, and no turn has taken over the ticket behind it yet.
const OWED: u64 = 1 << 62;

/// The ticket behind loans that ended is about to be published.
const COVERING: u64 = 1 << 61;

/// The flags, and the number of loans.
#[derive(Debug)]
pub struct Sharing(AtomicU64);

impl Sharing {
    /// A stream that is ours, or shared for good.
    #[inline]
    pub fn new(for_good: bool) -> Self {
        Sharing(AtomicU64::new(if for_good { FOR_GOOD } else { 0 }))
    }

    /// Other libraries use the stream from now on.
    #[inline]
    pub fn for_good(&self) {
        self.0.fetch_or(FOR_GOOD, Ordering::SeqCst);
    }

    /// Another library uses the stream until [`end`](Self::end).
    #[inline]
    pub fn begin(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// A loan is over: everything that its user put on the stream is on it.
    #[inline]
    pub fn end(&self) {
        // ORDERING: Release pairs with `take_owed`.
        self.0.fetch_or(OWED, Ordering::Release);
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Whether others use the stream.
    #[inline]
    pub fn is_shared(&self) -> bool {
        // ORDERING: Relaxed: the thread that shared the stream hands it on by means that order this.
        self.0.load(Ordering::Relaxed) & !(OWED | COVERING) != 0
    }

    /// Whether the work that a loan left still needs a ticket; if not, the ticket is published.
    #[inline]
    pub fn is_owed(&self) -> bool {
        // ORDERING: Acquire pairs with `settle`.
        self.0.load(Ordering::Acquire) & (OWED | COVERING) != 0
    }

    /// Takes the debt over: true if the caller is to publish a ticket, behind everything that is on the stream, and then to
    /// [`settle`](Self::settle). One caller at a time.
    #[inline]
    pub fn take_owed(&self) -> bool {
        // ORDERING: Relaxed: only the caller takes debts.
        if self.0.load(Ordering::Relaxed) & OWED == 0 {
            return false;
        }
        // ORDERING: Relaxed: it takes over what the debt said.
        self.0.fetch_or(COVERING, Ordering::Relaxed);
        // ORDERING: Acquire pairs with `end`: the loan's work is on the stream before the ticket.
        self.0.fetch_and(!OWED, Ordering::Acquire);
        true
    }

    /// The ticket is published.
    #[inline]
    pub fn settle(&self) {
        // ORDERING: Release pairs with `is_owed`.
        self.0.fetch_and(!COVERING, Ordering::Release);
    }
}
