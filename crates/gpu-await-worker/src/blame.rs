//! Which requests and clients are refused, because what they sent killed processes (pure).
//!
//! | state of a request's key | meaning | left by |
//! |---|---|---|
//! | – | nothing is known of it | `suspected` → watched; `guilty` → refused |
//! | watched, until | a call under it was lost beside others, and may not run again: the next one runs alone | `answered`, time → –; `guilty` → refused |
//! | refused, until | a call under it died alone | time → – |
//!
//! | state of a client's key | meaning | left by |
//! |---|---|---|
//! | – | it is not guilty of anything | `guilty` → counted |
//! | counted, until | it sent so many guilty calls, not too many | `guilty` → one more, or refused; time → – |
//! | refused, until | it sent too many: its circuit is open | time → – |
//!
//! # Invariants
//! 1. Only who was guilty is refused, never one that was lost beside others or by another call's fault, and never for longer than the policy
//!    says (`only_the_guilty_are_refused`).
//! 2. It never knows more than [`MOST`] keys of each kind; the one that would be forgotten first goes first (`what_is_blamed_is_bounded`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How many keys of each kind are known.
pub(crate) const MOST: usize = 4096;

/// What becomes of requests and clients whose calls kill processes: see [`WorkerBuilder::blame`](crate::WorkerBuilder::blame).
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use gpu_await_worker::Blame;
/// let strict = Blame { client_guilty: 1, ..Blame::default() };
/// assert_eq!(strict.refused_for, Duration::from_secs(60));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blame {
    /// For how long a request is refused that killed its process while it ran alone, or took longer than its limit. 60 s.
    pub refused_for: Duration,
    /// After so many guilty calls, none later than [`client_refused_for`](Self::client_refused_for) after the one before, a
    /// [client](crate::Call::client) is refused. 3; at least 1.
    pub client_guilty: u32,
    /// For how long. 60 s.
    pub client_refused_for: Duration,
}

impl Default for Blame {
    fn default() -> Self {
        let minute = Duration::from_secs(60);
        Blame { refused_for: minute, client_guilty: 3, client_refused_for: minute }
    }
}

/// Under which a call is blamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) request: Option<u64>,
    pub(crate) client: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// Of a client: how many of its calls were guilty.
    guilty: u32,
    is_refused: bool,
    /// Then it is forgotten.
    until: Instant,
}

/// What is known of keys.
#[derive(Debug, Default)]
pub(crate) struct Blamed {
    requests: BTreeMap<u64, Known>,
    clients: BTreeMap<u64, Known>,
}

impl Blamed {
    /// Whether a call is refused, for what, and until when.
    pub(crate) fn refuses(&self, keys: Keys, now: Instant) -> Option<(&'static str, Instant)> {
        let find = |known: &BTreeMap<u64, Known>, key: Option<u64>| {
            let known = known.get(&key?).filter(|known| known.is_refused && now < known.until)?;
            Some(known.until)
        };
        let request = find(&self.requests, keys.request).map(|until| ("request", until));
        request.or(find(&self.clients, keys.client).map(|until| ("client", until)))
    }

    /// Whether a call is to run alone.
    pub(crate) fn watches(&self, keys: Keys, now: Instant) -> bool {
        let known = keys.request.and_then(|key| self.requests.get(&key));
        known.is_some_and(|known| now < known.until)
    }

    /// A call died alone.
    pub(crate) fn guilty(&mut self, keys: Keys, now: Instant, policy: &Blame) {
        if let Some(key) = keys.request {
            let known = Known { guilty: 1, is_refused: true, until: now + policy.refused_for };
            learn(&mut self.requests, key, known);
        }
        if let Some(key) = keys.client {
            let before = self.clients.get(&key).filter(|known| now < known.until);
            let guilty = before.map_or(0, |known| known.guilty).saturating_add(1);
            let is_refused = guilty >= policy.client_guilty;
            let known = Known { guilty, is_refused, until: now + policy.client_refused_for };
            learn(&mut self.clients, key, known);
        }
    }

    /// A call was lost beside others, and does not run again.
    pub(crate) fn suspected(&mut self, keys: Keys, now: Instant, policy: &Blame) {
        let known = keys.request.filter(|key| {
            let known = self.requests.get(key).filter(|known| now < known.until);
            known.is_none_or(|known| !known.is_refused)
        });
        if let Some(key) = known {
            let known = Known { guilty: 0, is_refused: false, until: now + policy.refused_for };
            learn(&mut self.requests, key, known);
        }
    }

    /// A call was answered: its process lives.
    pub(crate) fn answered(&mut self, keys: Keys) {
        if let Some(key) = keys.request
            && self.requests.get(&key).is_some_and(|known| !known.is_refused)
        {
            self.requests.remove(&key);
        }
    }

    /// Whether nothing is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.clients.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.requests.len().max(self.clients.len())
    }
}

fn learn(all: &mut BTreeMap<u64, Known>, key: u64, known: Known) {
    if all.len() >= MOST
        && !all.contains_key(&key)
        && let Some(first) = all.iter().min_by_key(|(_, known)| known.until).map(|(key, _)| *key)
    {
        all.remove(&first);
    }
    all.insert(key, known);
}
