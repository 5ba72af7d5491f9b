//! Which calls are waiting, which are running, and how each of them ends (pure).
//!
//! More than 500 lines: each function is a step of one table, and has no use without it.
//!
//! | place | meaning | left by |
//! |---|---|---|
//! | `Queued` | no process has it, perhaps because there is no memory for its payload; the caller waits | `sent`; `becomes_suspect`; the deadline, a dropped future or the end of the worker end it |
//! | `Suspect` | it was running when a process died, and may be the cause, or is watched; it has the memory for its payload, and is sent to a process in which nothing else runs | as `Queued` |
//! | `Sent` | this process has it; the caller waits | `answered`, `died`; a deadline or a dropped future makes it `Abandoned` |
//! | `Abandoned` | this process has it; nobody waits. If it runs alone, its process is killed after a grace period | `answered`, `died` |
//!
//! # Invariants
//! 1. A call ends exactly once: every value that was inserted is returned once, whatever the order of events (`calls_end_once`).
//! 2. An answer counts only for the call that runs under that number, in the process that answers: others are stale (`calls_end_once`).
//! 3. A guilty call was alone and had begun, and nothing that another call left behind can be the reason: no other call was answered there for a
//!    while, or this one was to run alone and had the device to itself (`calls_end_once`, `what_others_left_is_nobodys_guilt`).
//! 4. Calls lost to an outside kill run beside others once more, and then alone (`who_was_killed_runs_beside_others_once`).
//! 5. While a suspect runs, nothing else does in its process, and no other suspect anywhere (`calls_end_once`, `suspects_run_alone`).
//! 6. An abandoned call counts against the capacity until its process is done with it, and reserved room until it is given back; a call whose
//!    room is elsewhere does not count here, and holds that room until its process is done with it (`calls_end_once`).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::blame::{Charge, Keys};
use crate::error::Guilt;
use crate::room::Room;

/// The number of a call: its slot, and how often that was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct CallId {
    slot: u32,
    generation: u64,
}

impl CallId {
    pub(crate) fn slot(self) -> u32 {
        self.slot
    }

    pub(crate) fn generation(self) -> u64 {
        self.generation
    }
}

/// The shortest time before a call that has not begun is checked again.
const AGAIN: Duration = Duration::from_millis(1);

/// How long after a call was answered its leftovers, on the device or with other calls of the process, may still end that: longer than the
/// 640 ms that a stray kernel ran before its fault was known.
const SETTLES: Duration = Duration::from_secs(1);

/// How much longer a call that runs alone holds up the others once its caller is gone and its deadline has passed: long enough for one that
/// kills its process to be found guilty.
const GRACE: Duration = Duration::from_secs(1);

/// What the caller of a call allows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// When the caller gives up.
    pub(crate) deadline: Option<Instant>,
    /// How long the call may run, once it has begun, before its process is killed.
    pub(crate) limit: Option<Duration>,
    /// How often it may be sent: more than once only if that does no harm.
    pub(crate) attempts: u32,
    /// The keys under which it is blamed.
    pub(crate) keys: Keys,
    /// How often other workers of its group sent it.
    pub(crate) sent_before: u32,
    /// How it runs, after a death of a process of its group.
    pub(crate) runs: Runs,
    /// Only its group may send it again.
    pub(crate) is_groups: bool,
    /// A worker of its group has admitted it: no other one refuses it for lack of room.
    pub(crate) was_admitted: bool,
}

impl Terms {
    /// Whether a call lost in this attempt to an outside kill runs beside others once more: the kill says nothing against it, and otherwise all
    /// calls lost with it would run one after the other. The last attempt runs alone, so that no other call's death can end it.
    pub(crate) fn runs_beside(&self, attempt: u32) -> bool {
        attempt == 1 && self.attempts > 2
    }
}

/// How a call of a group runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Runs {
    /// In any worker.
    #[default]
    Anywhere,
    /// In the worker that had it, whose process was killed from outside.
    Home,
    /// Alone, in the worker that had it: it may be why the process died.
    Alone,
}

/// Whose fault a death is, as far as the supervisor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Culprit {
    /// One of the calls that were running.
    Running,
    /// One of those that had begun: a call took longer than its limit, or nothing polled the executor. Which one held up the others is not
    /// known unless only one had begun: a call that waits on a stream, or behind code that blocks the executor, has begun as well.
    Begun,
    /// Perhaps a running call: the process used too much memory, or was stopped.
    Unclear,
    /// Perhaps a running call, but unlikely: the process was killed from outside.
    Killed,
    /// None of them.
    Outside,
}

/// What to do with an answer.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Answered<T> {
    /// Hand it to this caller.
    Ended(T),
    /// Nobody waits for it.
    Abandoned,
    /// No such call is running.
    Stale,
}

/// A call that died with its process.
#[derive(Debug)]
pub(crate) struct Lost<T> {
    pub(crate) value: T,
    pub(crate) guilt: Guilt,
    pub(crate) attempt: u32,
}

/// The calls of a process that died.
#[derive(Debug)]
#[must_use]
pub(crate) struct Died<T> {
    /// The calls that end with it, or that their group sends again; the others are sent again.
    pub(crate) lost: Vec<Lost<T>>,
    /// Charges against calls that do not run again, and against those killed from outside while they ran alone. Their callers may be gone.
    pub(crate) blamed: Vec<(Keys, Charge)>,
}

/// Calls whose time is up.
#[derive(Debug)]
#[must_use]
pub(crate) struct Expired<T> {
    /// Their callers give up.
    pub(crate) given_up: Vec<T>,
    /// Processes to kill, since they took longer for a call than this limit.
    pub(crate) over_limit: Vec<(u32, Duration)>,
    /// Processes to kill, since each runs one call alone that nobody waits for any more.
    pub(crate) forsaken: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Queued,
    Suspect,
    Sent(Instant, u32),
    Abandoned(Instant, u32),
}

impl Place {
    /// The process that has it.
    fn process(self) -> Option<u32> {
        match self {
            Place::Sent(_, process) | Place::Abandoned(_, process) => Some(process),
            Place::Queued | Place::Suspect => None,
        }
    }
}

/// Which calls a process takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// All; suspects first, and alone.
    All,
    /// All but suspects, which another process takes.
    Fresh,
    /// Only suspects.
    Suspects,
}

/// The calls of one process.
#[derive(Clone, Copy, Debug, Default)]
struct Has {
    running: usize,
    /// The suspect that runs.
    alone: Option<CallId>,
    /// When a call that did not run alone was answered: it may have left something behind. One that runs alone is answered when the device is done.
    answered: Option<Instant>,
}

#[derive(Debug)]
struct Entry<T> {
    place: Place,
    terms: Terms,
    /// How often it was sent.
    attempt: u32,
    /// It becomes a suspect once it has memory for its payload.
    is_watched: bool,
    /// When to check whether it has exceeded its limit.
    limit_due: Option<Instant>,
    /// When it will have run alone without a caller for too long.
    forsaken_due: Option<Instant>,
    /// `None` once abandoned.
    value: Option<T>,
    /// The room that it holds elsewhere, if it does not count here.
    room: Option<Room>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u64,
    entry: Option<Entry<T>>,
}

/// The calls of one worker, whichever processes serve them. Processes go by their numbers.
#[derive(Debug)]
pub(crate) struct Calls<T> {
    capacity: usize,
    /// The most calls, including those that count elsewhere: processes have a word for each.
    most: usize,
    /// Room reserved for calls that have not come yet.
    reserved: usize,
    /// How many calls have their room elsewhere.
    guests: usize,
    /// The rooms of such calls that ended: to be dropped once no lock is held.
    freed: Vec<Room>,
    slots: Vec<Slot<T>>,
    unused: Vec<u32>,
    /// In order. Those that ended meanwhile are skipped.
    queued: VecDeque<CallId>,
    /// Queued calls that wait for memory, in order: they hold up one another, but no call that has its memory.
    roomless: VecDeque<CallId>,
    suspects: VecDeque<CallId>,
    processes: BTreeMap<u32, Has>,
    /// Deadlines and limits of calls that have not ended.
    due: BTreeSet<(Instant, CallId)>,
}

impl<T> Calls<T> {
    pub(crate) fn new(capacity: usize, most: usize) -> Self {
        Calls {
            capacity,
            most,
            reserved: 0,
            guests: 0,
            freed: Vec::new(),
            slots: Vec::new(),
            unused: Vec::new(),
            queued: VecDeque::new(),
            roomless: VecDeque::new(),
            suspects: VecDeque::new(),
            processes: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// How many have not ended.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.unused.len()
    }

    /// How many calls are in processes.
    pub(crate) fn running(&self) -> usize {
        self.processes.values().map(|has| has.running).sum()
    }

    /// How many wait to run alone.
    pub(crate) fn suspects(&self) -> usize {
        let waits = |id: &&CallId| place(&self.slots, **id) == Some(Place::Suspect);
        self.suspects.iter().filter(waits).count()
    }

    /// How many this process has.
    pub(crate) fn running_in(&self, process: u32) -> usize {
        self.processes.get(&process).map_or(0, |has| has.running)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// How much room is taken, by calls and by reservations.
    pub(crate) fn taken(&self) -> usize {
        self.len() - self.guests + self.reserved
    }

    /// Whether there is no room for another call.
    pub(crate) fn is_full(&self) -> bool {
        self.taken() >= self.capacity
    }

    /// Keeps the room of a call that has just ended and will be sent again.
    pub(crate) fn keep_room(&mut self) {
        self.reserved += 1;
    }

    /// Takes the rooms that ended calls held elsewhere.
    pub(crate) fn take_freed(&mut self) -> Vec<Room> {
        std::mem::take(&mut self.freed)
    }

    /// Reserves room for one call, if there is any.
    pub(crate) fn reserve(&mut self) -> bool {
        let has_room = !self.is_full();
        self.reserved += usize::from(has_room);
        has_room
    }

    /// Releases reserved room.
    pub(crate) fn give_back_room(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Enters a call, which runs alone if `watched`, and counts where it already has room, if anywhere; returns its value if there is no room for it.
    pub(crate) fn insert(
        &mut self,
        value: T,
        terms: Terms,
        watched: bool,
        room: Option<Room>,
    ) -> Result<CallId, T> {
        if room.is_none() && self.is_full() || self.len() >= self.most {
            return Err(value);
        }
        self.guests += usize::from(room.is_some());
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, entry: None });
            self.slots.len() as u32 - 1
        });
        let id = CallId { slot, generation: self.slots[slot as usize].generation };
        let entry = Entry {
            place: if watched { Place::Suspect } else { Place::Queued },
            terms,
            attempt: terms.sent_before,
            is_watched: false,
            limit_due: None,
            forsaken_due: None,
            value: Some(value),
            room,
        };
        self.slots[slot as usize].entry = Some(entry);
        self.due.extend(terms.deadline.map(|deadline| (deadline, id)));
        if watched {
            self.suspects.push_back(id)
        } else {
            self.queued.push_back(id)
        }
        // Callers may come and give up while no process takes calls.
        for (queue, wanted) in [
            (&mut self.queued, Place::Queued),
            (&mut self.roomless, Place::Queued),
            (&mut self.suspects, Place::Suspect),
        ] {
            if queue.len() > 2 * self.most {
                queue.retain(|id| place(&self.slots, *id) == Some(wanted));
            }
        }
        Ok(id)
    }

    /// The call to send to this process next, if one may be sent now; with `room`, one that waited for memory goes first.
    pub(crate) fn next(&mut self, process: u32, takes: Takes, room: bool) -> Option<CallId> {
        let slots = &self.slots;
        while self.suspects.front().is_some_and(|id| place(slots, *id) != Some(Place::Suspect)) {
            self.suspects.pop_front();
        }
        for queue in [&mut self.queued, &mut self.roomless] {
            while queue.front().is_some_and(|id| place(slots, *id) != Some(Place::Queued)) {
                queue.pop_front();
            }
        }
        let has = self.processes.get(&process).copied().unwrap_or_default();
        if has.alone.is_some() {
            return None;
        }
        let suspect = self.suspects.front().filter(|_| takes != Takes::Fresh).copied();
        if suspect.is_some() || takes == Takes::Suspects {
            let is_free =
                has.running == 0 && self.processes.values().all(|has| has.alone.is_none());
            return suspect.filter(|_| is_free);
        }
        let roomless = self.roomless.front().filter(|_| room);
        roomless.or(self.queued.front()).copied()
    }

    /// Whether the call that `next` returned runs alone.
    pub(crate) fn runs_alone(&self, id: CallId) -> bool {
        place(&self.slots, id) == Some(Place::Suspect)
    }

    /// There is no memory for the call that `next` returned: it lets others pass.
    pub(crate) fn wait_for_room(&mut self, id: CallId) {
        if self.roomless.front() != Some(&id) {
            self.queued.pop_front();
            self.roomless.push_back(id);
        }
    }

    /// The call is to run alone, and first waits for memory beside others: a call that runs alone waits for no other.
    pub(crate) fn watch(&mut self, id: CallId) {
        if let Some(entry) = self.entry(id) {
            entry.is_watched = true;
        }
    }

    /// There is memory for the call that `next` returned. Returns whether that makes it a suspect, which `next` returns again in its turn.
    pub(crate) fn becomes_suspect(&mut self, id: CallId) -> bool {
        let Some(entry) = self.entry(id).filter(|entry| entry.is_watched) else { return false };
        (entry.place, entry.is_watched) = (Place::Suspect, false);
        self.leave_queue(id);
        self.suspects.push_back(id);
        true
    }

    /// Removes the call that `next` returned from its queue.
    fn leave_queue(&mut self, id: CallId) {
        match self.roomless.front() == Some(&id) {
            true => drop(self.roomless.pop_front()),
            false => drop(self.queued.pop_front()),
        }
    }

    /// Whether another call has waited for memory for longer.
    pub(crate) fn is_behind_roomless(&self, id: CallId) -> bool {
        self.roomless.front().is_some_and(|first| *first != id)
    }

    /// Whether a call waits for memory.
    pub(crate) fn has_roomless(&self) -> bool {
        !self.roomless.is_empty()
    }

    /// How often it was sent.
    pub(crate) fn attempt(&mut self, id: CallId) -> u32 {
        self.entry(id).map_or(0, |entry| entry.attempt)
    }

    /// The keys under which it is blamed.
    pub(crate) fn keys(&mut self, id: CallId) -> Keys {
        self.entry(id).map(|entry| entry.terms.keys).unwrap_or_default()
    }

    /// Whether it may be sent once more.
    pub(crate) fn may_run_again(&mut self, id: CallId) -> bool {
        self.entry(id).is_some_and(|entry| entry.attempt < entry.terms.attempts)
    }

    /// The value that was entered, while the caller waits.
    pub(crate) fn value(&mut self, id: CallId) -> Option<&mut T> {
        self.entry(id)?.value.as_mut()
    }

    /// The process has the call that `next` returned.
    pub(crate) fn sent(&mut self, id: CallId, process: u32, now: Instant) {
        let Some(entry) = self.entry(id) else { return };
        let was = std::mem::replace(&mut entry.place, Place::Sent(now, process));
        entry.attempt += 1;
        let limit = entry.terms.limit.map(|limit| now + limit);
        entry.limit_due = limit;
        let has = self.processes.entry(process).or_default();
        has.running += 1;
        match was {
            Place::Suspect => {
                self.suspects.pop_front();
                has.alone = Some(id);
            }
            _ => self.leave_queue(id),
        }
        self.due.extend(limit.map(|limit| (limit, id)));
    }

    /// The process is done with it.
    pub(crate) fn answered(&mut self, id: CallId, process: u32, now: Instant) -> Answered<T> {
        if self.entry(id).and_then(|entry| entry.place.process()) != Some(process) {
            return Answered::Stale;
        }
        if let Some(has) = self.processes.get_mut(&process).filter(|has| has.alone != Some(id)) {
            has.answered = Some(now);
        }
        match self.remove(id) {
            Some(value) => Answered::Ended(value),
            None => Answered::Abandoned,
        }
    }

    /// Its caller no longer waits. Returns its value.
    pub(crate) fn abandon(&mut self, id: CallId, now: Instant) -> Option<T> {
        let entry = self.entry(id)?;
        match entry.place {
            Place::Sent(since, process) => {
                entry.place = Place::Abandoned(since, process);
                let value = entry.value.take();
                let until = entry.terms.deadline.map_or(now, |deadline| deadline.max(now)) + GRACE;
                if self.processes.get(&process).is_some_and(|has| has.alone == Some(id)) {
                    self.entry(id)?.forsaken_due = Some(until);
                    self.due.insert((until, id));
                }
                value
            }
            Place::Abandoned(..) => None,
            Place::Queued | Place::Suspect => self.remove(id),
        }
    }

    /// The process is gone, with all its calls. `begun` says which of them had begun.
    pub(crate) fn died(
        &mut self,
        process: u32,
        culprit: Culprit,
        begun: impl Fn(CallId) -> bool,
    ) -> Died<T> {
        // A process that corrupted its memory may have corrupted the record of what had begun: then every call it had counts.
        let ran = |id| culprit != Culprit::Begun || begun(id);
        let ids: Vec<_> = self.ids().collect();
        let is_its = |id: &CallId| {
            place(&self.slots, *id).and_then(Place::process) == Some(process) && ran(*id)
        };
        let alone = ids.iter().copied().filter(is_its).count() == 1;
        let has = self.processes.remove(&process).unwrap_or_default();
        let (mut lost, mut blamed, mut again) = (Vec::new(), Vec::new(), Vec::new());
        for id in ids {
            let Some(entry) = self.entry(id) else { continue };
            let since = match entry.place {
                Place::Sent(since, has_it) if has_it == process => since,
                Place::Abandoned(since, has_it) if has_it == process => since,
                _ => continue,
            };
            let is_unclear = matches!(culprit, Culprit::Unclear | Culprit::Killed);
            // Nothing that another call left can be why: calls that run alone begin when the device is done.
            let was_settled = || has.answered.is_none_or(|at| at + SETTLES <= since);
            let is_alone = alone && begun(id) && (has.alone == Some(id) || was_settled());
            let guilt = match culprit {
                Culprit::Outside => Guilt::Innocent,
                _ if !ran(id) => Guilt::Innocent,
                Culprit::Running | Culprit::Begun if is_alone => Guilt::Alone,
                _ => Guilt::Suspect,
            };
            let charge = match guilt {
                Guilt::Alone => Some(Charge::Guilty),
                Guilt::Suspect if alone && is_unclear => Some(Charge::Killed),
                Guilt::Suspect => Some(Charge::Suspected),
                Guilt::Innocent => None,
            };
            let (attempt, keys) = (entry.attempt, entry.terms.keys);
            let is_awaited = entry.value.is_some();
            let may_run_again =
                is_awaited && guilt != Guilt::Alone && attempt < entry.terms.attempts;
            // One that runs again is alone then, and needs no watch.
            blamed.extend(
                charge.filter(|it| !may_run_again || *it == Charge::Killed).map(|it| (keys, it)),
            );
            if may_run_again && entry.terms.is_groups {
                lost.extend(self.remove(id).map(|value| Lost { value, guilt, attempt }));
            } else if may_run_again {
                let limit = entry.limit_due.take().map(|at| (at, id));
                let beside = culprit == Culprit::Killed && has.alone.is_none();
                let beside = beside && entry.terms.runs_beside(attempt);
                let suspect = guilt == Guilt::Suspect && !beside;
                entry.place = if suspect { Place::Suspect } else { Place::Queued };
                if let Some(limit) = limit {
                    self.due.remove(&limit);
                }
                again.push((since, suspect, id));
            } else {
                lost.extend(self.remove(id).map(|value| Lost { value, guilt, attempt }));
            }
        }
        // Ahead of calls that were never sent, in order.
        again.sort_unstable();
        for (_, suspect, id) in again.into_iter().rev() {
            if suspect { self.suspects.push_front(id) } else { self.queued.push_front(id) }
        }
        Died { lost, blamed }
    }

    /// When to call `expired` next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Ends calls that have waited too long. `begun` says since when a process is at a call; one that has not begun keeps waiting, behind others.
    pub(crate) fn expired(
        &mut self,
        now: Instant,
        begun: impl Fn(CallId, u32) -> Option<Instant>,
    ) -> Expired<T> {
        let mut expired =
            Expired { given_up: Vec::new(), over_limit: Vec::new(), forsaken: Vec::new() };
        while let Some((due, id)) = self.due.first().copied().filter(|(due, _)| *due <= now) {
            self.due.remove(&(due, id));
            let Some(entry) = self.entry(id) else { continue };
            let gives_up = entry.terms.deadline == Some(due);
            let (process, is_forsaken) = (entry.place.process(), entry.forsaken_due == Some(due));
            let limit = entry.terms.limit.filter(|_| entry.limit_due == Some(due));
            if let Some((limit, process)) = limit.zip(entry.place.process()) {
                let over = begun(id, process).map(|since| since + limit);
                entry.limit_due = match over {
                    Some(over) if over <= now => {
                        expired.over_limit.push((process, limit));
                        None
                    }
                    Some(over) => Some(over),
                    // It cannot begin before now.
                    None => Some(now + limit.max(AGAIN)),
                };
                let again = entry.limit_due.map(|due| (due, id));
                self.due.extend(again);
            }
            if is_forsaken {
                expired.forsaken.extend(process);
            }
            if gives_up {
                expired.given_up.extend(self.abandon(id, now));
            }
        }
        expired
    }

    /// Ends the calls that no process has.
    pub(crate) fn end_waiting(&mut self) -> Vec<T> {
        let ids: Vec<_> = self.ids().collect();
        let waits =
            |id: &CallId| matches!(place(&self.slots, *id), Some(Place::Queued | Place::Suspect));
        let ids: Vec<_> = ids.into_iter().filter(waits).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Ends all calls, when no process will come.
    pub(crate) fn end_all(&mut self) -> Vec<T> {
        let ids: Vec<_> = self.ids().collect();
        self.processes.clear();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Takes the rooms that calls hold elsewhere, whatever state the rest is in.
    pub(crate) fn take_rooms(&mut self) -> Vec<Room> {
        let rooms = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut()?.room.take());
        rooms.chain(self.freed.drain(..)).collect()
    }

    /// All that have not ended, whatever state the rest is in.
    pub(crate) fn into_values(self) -> impl Iterator<Item = T> {
        self.slots.into_iter().filter_map(|slot| slot.entry?.value)
    }

    fn ids(&self) -> impl Iterator<Item = CallId> {
        let used = self.slots.iter().enumerate().filter(|(_, slot)| slot.entry.is_some());
        used.map(|(at, slot)| CallId { slot: at as u32, generation: slot.generation })
    }

    fn entry(&mut self, id: CallId) -> Option<&mut Entry<T>> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        slot.entry.as_mut().filter(|_| slot.generation == id.generation)
    }

    fn remove(&mut self, id: CallId) -> Option<T> {
        self.entry(id)?;
        let slot = &mut self.slots[id.slot as usize];
        let entry = slot.entry.take()?;
        slot.generation += 1;
        self.unused.push(id.slot);
        self.guests -= usize::from(entry.room.is_some());
        self.freed.extend(entry.room);
        let dues = [entry.terms.deadline, entry.limit_due, entry.forsaken_due];
        for due in dues.into_iter().flatten() {
            self.due.remove(&(due, id));
        }
        if let Some(has) = entry.place.process().and_then(|it| self.processes.get_mut(&it)) {
            has.running -= 1;
            has.alone = has.alone.filter(|alone| *alone != id);
        }
        entry.value
    }
}

fn place<T>(slots: &[Slot<T>], id: CallId) -> Option<Place> {
    let slot = slots.get(id.slot as usize)?;
    slot.entry.as_ref().filter(|_| slot.generation == id.generation).map(|entry| entry.place)
}
