//! Which requests and clients are refused because they killed processes (pure).
//!
//! | state of a request's key | meaning | left by |
//! |---|---|---|
//! | – | nothing is known of it | `Suspected`, `Killed` → watched; `Guilty` → refused |
//! | watched, until, killed so often | a call with it was lost along with others and may not run again, or its process was killed from outside while it ran alone: the next one runs alone | `answered`, time → –; `Guilty`, the third `Killed` → refused |
//! | refused, until | a call with it died alone, or calls with it were killed three times while alone | time → – |
//!
//! | state of a client's key | meaning | left by |
//! |---|---|---|
//! | – | it is not guilty of anything | `Guilty` → counted; `Suspected` → lost |
//! | counted, until | it sent guilty calls, but not too many | `Guilty` → one more, or refused; time → – |
//! | refused, until | it sent too many: its circuit is open | time → – |
//!
//! | beside that | meaning | left by |
//! |---|---|---|
//! | lost, until, in so many deaths | its calls were lost along with others and may not run again; none has been answered since | `answered`, time → –; `Suspected` in another death → one more, or watched |
//! | watched, until | the same in two deaths: its calls run alone, since each may be a different poison request | as above |
//!
//! # Invariants
//! 1. Only the guilty are refused, never a call that was lost along with others or by another call's fault, and never for longer than the
//!    policy says (`only_the_guilty_are_refused`).
//! 2. Kills from outside are counted by key, over all calls and attempts, until one is answered (`only_the_guilty_are_refused`).
//! 3. A client is never refused for calls lost along with others: its calls then run alone until one is answered
//!    (`only_the_guilty_are_refused`).
//! 4. At most [`MOST`] keys of each kind are kept; the one that would expire first is dropped first (`what_is_blamed_is_bounded`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How many keys of each kind are kept.
pub(crate) const MOST: usize = 4096;

/// How many outside kills, each while a call with the key ran alone, make a key guilty.
pub(crate) const MOST_KILLS: u32 = 3;

/// In how many deaths a client must lose calls along with others, with none answered in between, before its next calls run alone. One death
/// says nothing: every call in the process is lost.
pub(crate) const MOST_LOST: u32 = 2;

/// How requests and clients whose calls kill processes are refused: see [`WorkerBuilder::blame`](crate::WorkerBuilder::blame).
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
    /// How long a request is refused after it ran alone and killed its process or exceeded its limit; or after its process was killed from
    /// outside three times while it ran alone, each within this time of the one before and with no answer in between. 60 s.
    pub refused_for: Duration,
    /// How many guilty calls, each within [`client_refused_for`](Self::client_refused_for) of the one before, get a
    /// [client](crate::Call::client) refused. 3; at least 1.
    ///
    /// A client may send a different poison request each time, which may not run again and dies along with others, so that none is found guilty. A
    /// client that loses calls this way in two deaths, with none answered in between, has its next calls run alone until one is answered.
    pub client_guilty: u32,
    /// How long a client is refused. 60 s.
    pub client_refused_for: Duration,
}

impl Default for Blame {
    fn default() -> Self {
        let minute = Duration::from_secs(60);
        Blame { refused_for: minute, client_guilty: 3, client_refused_for: minute }
    }
}

/// The keys under which a call is blamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) request: Option<u64>,
    pub(crate) client: Option<u64>,
}

/// What a call is charged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charge {
    /// It died alone.
    Guilty,
    /// Its process was killed from outside while it ran alone.
    Killed,
    /// It was lost along with others, and does not run again.
    Suspected,
}

/// How calls with a key are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Watched,
    Refused,
}

/// What a charge changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub(crate) struct Follows {
    pub(crate) request: Option<Standing>,
    pub(crate) client: Option<Standing>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// For a client: how many of its calls were guilty, or in how many deaths some were lost. For a watched request: how many outside kills hit it
    /// while it ran alone.
    count: u32,
    is_refused: bool,
    /// When the entry expires.
    until: Instant,
}

/// What is known about keys.
#[derive(Debug, Default)]
pub(crate) struct Blamed {
    requests: BTreeMap<u64, Known>,
    clients: BTreeMap<u64, Known>,
    /// Clients that lost calls along with others.
    lost: BTreeMap<u64, Known>,
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
        let request = keys.request.and_then(|key| self.requests.get(&key));
        let client = keys.client.and_then(|key| self.lost.get(&key));
        let client = client.filter(|known| known.count >= MOST_LOST);
        request.into_iter().chain(client).any(|known| now < known.until)
    }

    /// Records a charge against a call.
    pub(crate) fn charge(
        &mut self,
        keys: Keys,
        charge: Charge,
        now: Instant,
        policy: &Blame,
    ) -> Follows {
        let before = keys.request.and_then(|key| self.requests.get(&key));
        let before = before.filter(|known| now < known.until).copied();
        let was_refused = before.is_some_and(|known| known.is_refused);
        let kills = before.map_or(0, |known| known.count) + u32::from(charge == Charge::Killed);
        let is_guilty = charge == Charge::Guilty || kills >= MOST_KILLS;
        let mut follows = Follows::default();
        if let Some(key) = keys.request.filter(|_| is_guilty || !was_refused) {
            let count = if is_guilty { 0 } else { kills };
            let known = Known { count, is_refused: is_guilty, until: now + policy.refused_for };
            learn(&mut self.requests, key, known);
            follows.request = match is_guilty {
                true if !was_refused => Some(Standing::Refused),
                false if before.is_none() => Some(Standing::Watched),
                _ => None,
            };
        }
        if let Some(key) = keys.client.filter(|_| is_guilty) {
            let before = self.clients.get(&key).filter(|known| now < known.until).copied();
            let count = before.map_or(0, |known| known.count).saturating_add(1);
            let is_refused = count >= policy.client_guilty;
            let known = Known { count, is_refused, until: now + policy.client_refused_for };
            learn(&mut self.clients, key, known);
            let is_new = is_refused && before.is_none_or(|known| !known.is_refused);
            follows.client = is_new.then_some(Standing::Refused);
        }
        if let Some(key) = keys.client.filter(|_| charge == Charge::Suspected) {
            let before = self.lost.get(&key).filter(|known| now < known.until).copied();
            let until = now + policy.client_refused_for;
            let before = before.unwrap_or(Known { count: 0, is_refused: false, until: now });
            // All calls lost in one death are charged at the same instant.
            let count = if before.until == until { before.count } else { before.count + 1 };
            learn(&mut self.lost, key, Known { count, until, ..before });
            let is_new = before.count < MOST_LOST && count >= MOST_LOST;
            follows.client = is_new.then_some(Standing::Watched);
        }
        follows
    }

    /// A call was answered: its process lives.
    pub(crate) fn answered(&mut self, keys: Keys) {
        if let Some(key) = keys.request
            && self.requests.get(&key).is_some_and(|known| !known.is_refused)
        {
            self.requests.remove(&key);
        }
        if let Some(key) = keys.client {
            self.lost.remove(&key);
        }
    }

    /// Whether nothing is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.clients.is_empty() && self.lost.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.requests.len().max(self.clients.len()).max(self.lost.len())
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
