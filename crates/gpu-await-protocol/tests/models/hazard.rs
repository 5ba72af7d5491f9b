//! The hazard ranges against a model that remembers every byte, and the waiters of a stream.
//!
//! Both modules are pure: `main.rs` compiles their very sources.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::hazard::{Content, Hazards, Mode};
use gpu_await_protocol::timeline::{Point, Track};
use gpu_await_protocol::waiters::{self, Waiters};

const LEN: u64 = size(12) as u64;
const STREAMS: u64 = 4;

#[derive(Clone, Debug)]
struct Stream {
    id: u64,
    completed: Rc<Cell<u64>>,
}

impl Track for Stream {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_complete(&self, ticket: u64) -> bool {
        self.completed.get() >= ticket
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

type Poison = u32;
type Pair = (u64, u64);

/// What is known of one byte.
#[derive(Clone, Debug, PartialEq)]
struct Byte {
    writer: Option<Pair>,
    /// In the order in which the streams first read.
    readers: Vec<Pair>,
    content: Content<Poison>,
}

#[derive(Clone, Debug)]
enum Step {
    Use {
        range: Range<u64>,
        mode: Mode,
        stream: u64,
    },
    Poison {
        range: Range<u64>,
        leaves_data: bool,
        poison: Poison,
    },
    ClearPoison {
        range: Range<u64>,
    },
    /// What the stream's last ticket was the last to write.
    PoisonWritten {
        range: Range<u64>,
        stream: u64,
        poison: Poison,
    },
    /// Everything that the stream has is complete.
    Complete {
        stream: u64,
    },
    CutOff {
        from: u64,
    },
}

/// What a byte's uses were, complete or not.
#[derive(Clone, Debug, Default)]
struct Past {
    writer: Option<Pair>,
    readers: BTreeMap<u64, u64>,
}

/// The module beside its model; each step is checked from every side.
struct Twins {
    hazards: Hazards<Stream, Poison>,
    bytes: Vec<Byte>,
    past: Vec<Past>,
    streams: Vec<Stream>,
    tickets: [u64; STREAMS as usize],
}

impl Twins {
    fn new(len: u64, writer: Option<Pair>, content: Content<Poison>) -> Self {
        let streams: Vec<_> =
            (0..STREAMS).map(|id| Stream { id, completed: Rc::default() }).collect();
        let made_by = writer
            .map(|(stream, ticket)| Point { stream: streams[stream as usize].clone(), ticket });
        let byte = Byte { writer, readers: Vec::new(), content: content.clone() };
        Twins {
            hazards: Hazards::new(len, made_by, content),
            bytes: vec![byte; len as usize],
            past: vec![Past { writer, readers: BTreeMap::new() }; len as usize],
            streams,
            tickets: [10; STREAMS as usize],
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Use { range, mode, stream } => {
                self.check_dependencies(range, *mode, *stream);
                let ticket = &mut self.tickets[*stream as usize];
                *ticket += 1;
                let ticket = *ticket;
                self.hazards.record(range, *mode, &self.streams[*stream as usize], ticket);
                let is_complete =
                    |(stream, ticket): Pair| self.streams[stream as usize].is_complete(ticket);
                for at in range.start as usize..range.end as usize {
                    let (byte, past) = (&mut self.bytes[at], &mut self.past[at]);
                    if *mode != Mode::Read {
                        let writer = Some((*stream, ticket));
                        // What may leave bytes as they are writes none for certain.
                        let content = match mode {
                            Mode::Overwrite => Content::Valid,
                            _ => byte.content.clone(),
                        };
                        *byte = Byte { writer, readers: Vec::new(), content };
                        *past = Past { writer, readers: BTreeMap::new() };
                        continue;
                    }
                    past.readers.insert(*stream, ticket);
                    let known = byte.readers.iter().position(|(reader, _)| reader == stream);
                    let first = byte.readers.first().copied();
                    match known {
                        Some(at) if at == 0 || !first.is_some_and(is_complete) => {
                            byte.readers[at].1 = ticket;
                        }
                        _ => {
                            byte.readers.retain(|used| used.0 != *stream && !is_complete(*used));
                            byte.readers.push((*stream, ticket));
                            byte.writer.take_if(|writer| is_complete(*writer));
                        }
                    }
                }
            }
            Step::Complete { stream } => {
                self.streams[*stream as usize].completed.set(self.tickets[*stream as usize]);
            }
            Step::CutOff { from } => {
                let mut in_use = *from;
                for (at, byte) in self.bytes.iter_mut().enumerate().skip(*from as usize) {
                    let is_pending =
                        |used: &Pair| !self.streams[used.0 as usize].is_complete(used.1);
                    byte.content = Content::Unwritten;
                    byte.writer = byte.writer.filter(is_pending);
                    byte.readers.retain(is_pending);
                    if byte.writer.is_some() || !byte.readers.is_empty() {
                        in_use = at as u64 + 1;
                    }
                }
                assert_eq!(self.hazards.cut_off(*from), in_use);
            }
            Step::Poison { range, leaves_data, poison } => {
                self.hazards.poison(range, *leaves_data, poison);
                for byte in &mut self.bytes[range.start as usize..range.end as usize] {
                    let has_data = *leaves_data
                        && match byte.content {
                            Content::Unwritten => false,
                            Content::Valid => true,
                            Content::Poisoned { has_data, .. } => has_data,
                        };
                    byte.content = Content::Poisoned { by: *poison, has_data };
                }
            }
            Step::ClearPoison { range } => {
                self.hazards.clear_poison(range);
                for byte in &mut self.bytes[range.start as usize..range.end as usize] {
                    if matches!(byte.content, Content::Poisoned { has_data: true, .. }) {
                        byte.content = Content::Valid;
                    }
                }
            }
            Step::PoisonWritten { range, stream, poison } => {
                let by = (*stream, self.tickets[*stream as usize]);
                self.hazards.poison_written(range, by, poison);
                for byte in &mut self.bytes[range.start as usize..range.end as usize] {
                    if byte.writer == Some(by) {
                        byte.content = Content::Poisoned { by: *poison, has_data: false };
                    }
                }
            }
        }
    }

    /// Exactly what the bytes say, so none is redundant; and none that is pending is missing.
    fn check_dependencies(&self, range: &Range<u64>, mode: Mode, stream: u64) {
        let mut found = BTreeSet::new();
        self.hazards.dependencies(range, mode, stream, |used| {
            found.insert((used.stream.id, used.ticket));
        });
        let mut expected = BTreeSet::new();
        for byte in &self.bytes[range.start as usize..range.end as usize] {
            expected.extend(byte.writer);
            if mode != Mode::Read {
                expected.extend(byte.readers.iter().copied());
            }
        }
        expected.retain(|(other, _)| *other != stream);
        assert_eq!(found, expected, "{mode:?} of {range:?} by {stream}");
        for past in &self.past[range.start as usize..range.end as usize] {
            let readers = past.readers.iter().filter(|_| mode != Mode::Read);
            for used in past.writer.into_iter().chain(readers.map(|(stream, at)| (*stream, *at))) {
                let pending = !self.streams[used.0 as usize].is_complete(used.1);
                let other = used.0 != stream && pending;
                assert!(!other || found.contains(&used), "{used:?} is pending and was forgotten");
            }
        }
    }

    /// Everything that does not change the state.
    fn check(&self) {
        let ends: Vec<u64> = self.hazards.span_ends().collect();
        assert!(ends.is_sorted_by(|a, b| a < b), "sorted and disjoint: {ends:?}");
        assert_eq!(ends.last(), Some(&(self.bytes.len() as u64)), "covering");
        // Neighbours that say the same are one span, others are not.
        let cuts = (1..self.bytes.len()).filter(|i| self.bytes[*i] != self.bytes[*i - 1]);
        let cuts = cuts.map(|i| i as u64).chain([self.bytes.len() as u64]);
        assert_eq!(ends, cuts.collect::<Vec<_>>());

        let mut users = BTreeMap::new();
        for byte in &self.bytes {
            for (stream, ticket) in byte.writer.iter().chain(&byte.readers) {
                let known = users.entry(*stream).or_insert(*ticket);
                *known = (*known).max(*ticket);
            }
        }
        let all_valid = self.bytes.iter().all(|byte| byte.content == Content::Valid);
        let is_pending =
            |(stream, last): &(&u64, &u64)| !self.streams[**stream as usize].is_complete(**last);
        let mut pending = users.iter().filter(is_pending).map(|(stream, _)| *stream);
        let only = (pending.next(), pending.next(), all_valid);
        let only = if let (Some(only), None, true) = only { Some(only) } else { None };
        assert_eq!(self.hazards.only_user(), only);
        let found = self.hazards.users();
        assert_eq!(found.len(), users.len(), "a stream is named once");
        assert_eq!(
            found.iter().map(|u| (u.stream.id, u.ticket)).collect::<BTreeMap<_, _>>(),
            users
        );

        let len = self.bytes.len() as u64;
        for start in 0..len {
            for end in start..=len {
                self.check_content(&(start..end));
                for mode in [Mode::Read, Mode::Overwrite, Mode::ReadWrite] {
                    self.check_dependencies(&(start..end), mode, 0);
                    self.check_dependencies(&(start..end), mode, STREAMS);
                }
            }
        }
    }

    fn check_content(&self, range: &Range<u64>) {
        let bytes = &self.bytes[range.start as usize..range.end as usize];
        let first = bytes.iter().position(|byte| byte.content != Content::Valid);
        match (self.hazards.unreadable(range), first) {
            (None, None) => {}
            (Some((part, content)), Some(first)) => {
                assert_eq!(part.start, range.start + first as u64, "the first such byte");
                assert!(part.start < part.end && part.end <= range.end);
                let part = &self.bytes[part.start as usize..part.end as usize];
                assert!(part.iter().all(|byte| byte.content == *content));
            }
            (found, expected) => panic!("{range:?}: found {found:?}, expected {expected:?}"),
        }
    }
}

fn range() -> impl Strategy<Value = Range<u64>> {
    prop_oneof![
        1 => Just(0..LEN),
        // Halves, as `split_at_mut` makes them.
        1 => Just(0..LEN / 2),
        1 => Just(LEN / 2..LEN),
        4 => (0..=LEN, 0..=LEN).prop_map(|(a, b)| a.min(b)..a.max(b)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let mode = prop_oneof![
        3 => Just(Mode::Read),
        1 => Just(Mode::Overwrite),
        1 => Just(Mode::ReadWrite)
    ];
    prop_oneof![
        8 => (range(), mode, 0..STREAMS)
            .prop_map(|(range, mode, stream)| Step::Use { range, mode, stream }),
        1 => (range(), any::<bool>(), 0..2_u32)
            .prop_map(|(range, leaves_data, poison)| Step::Poison { range, leaves_data, poison }),
        1 => range().prop_map(|range| Step::ClearPoison { range }),
        1 => (range(), 0..STREAMS, 0..2_u32)
            .prop_map(|(range, stream, poison)| Step::PoisonWritten { range, stream, poison }),
        2 => (0..STREAMS).prop_map(|stream| Step::Complete { stream }),
        1 => (0..=LEN).prop_map(|from| Step::CutOff { from }),
    ]
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn spans_say_what_every_byte_would(
        made_by in prop::option::of((0..STREAMS, 1..10_u64)),
        content in prop_oneof![
            Just(Content::Unwritten), Just(Content::Valid), Just(Content::Poisoned { by: 9, has_data: false })
        ],
        steps in prop::collection::vec(step(), 0..size(24)),
    ) {
        let mut twins = Twins::new(LEN, made_by, content);
        twins.check();
        for step in &steps {
            twins.step(step);
            twins.check();
        }
    }

    #[test]
    fn the_only_user_waits_for_nothing(
        uses in prop::collection::vec((range(), 0..2_u64, 0..4_usize), 0..size(24)),
    ) {
        let mut twins = Twins::new(LEN, Some((1, 1)), Content::Valid);
        for (range, stream, mode) in uses {
            let Some(mode) = [Mode::Read, Mode::Overwrite, Mode::ReadWrite].get(mode).copied() else {
                twins.step(&Step::Complete { stream });
                continue;
            };
            let before = twins.hazards.only_user();
            if before == Some(stream) {
                let found = |used: &Point<Stream>| assert!(used.is_complete(), "it waits for {used:?}");
                twins.hazards.dependencies(&range, mode, stream, found);
                prop_assert_eq!(twins.hazards.unreadable(&range), None);
            }
            twins.step(&Step::Use { range, mode, stream });
            // So that who enters a use need not ask again.
            prop_assert!(before != Some(stream) || twins.hazards.only_user() == before);
        }
    }

    #[test]
    fn an_uncut_buffer_keeps_one_span(
        uses in prop::collection::vec((0..STREAMS, 0..3_usize), 0..size(40)),
    ) {
        let mut twins = Twins::new(LEN, None, Content::Unwritten);
        for (stream, mode) in uses {
            let mode = [Mode::Read, Mode::Overwrite, Mode::ReadWrite][mode];
            twins.step(&Step::Use { range: 0..LEN, mode, stream });
            prop_assert_eq!(twins.hazards.span_ends().count(), 1);
        }
        twins.check();
    }

    #[test]
    fn a_full_overwrite_heals_and_joins_everything(
        steps in prop::collection::vec(step(), 0..size(24)),
        stream in 0..STREAMS,
    ) {
        let mut twins = Twins::new(LEN, None, Content::Unwritten);
        steps.iter().for_each(|step| twins.step(step));
        twins.step(&Step::Use { range: 0..LEN, mode: Mode::Overwrite, stream });
        prop_assert_eq!(twins.hazards.span_ends().count(), 1);
        prop_assert_eq!(twins.hazards.unreadable(&(0..LEN)), None);
        let users = twins.hazards.users();
        prop_assert_eq!(users.len(), 1);
        prop_assert_eq!(users[0].stream.id, stream);
    }
}

#[test]
fn halves_used_by_two_streams_do_not_depend_on_each_other() {
    let mut twins = Twins::new(LEN, Some((0, 1)), Content::Valid);
    twins.step(&Step::Use { range: 0..LEN / 2, mode: Mode::ReadWrite, stream: 1 });
    twins.step(&Step::Use { range: LEN / 2..LEN, mode: Mode::ReadWrite, stream: 2 });
    twins.hazards.dependencies(&(0..LEN / 2), Mode::ReadWrite, 1, |used| panic!("{used:?}"));
    twins.hazards.dependencies(&(LEN / 2..LEN), Mode::ReadWrite, 2, |used| panic!("{used:?}"));
    twins.check();
}

#[test]
fn two_readers_do_not_wait_for_each_other() {
    let mut twins = Twins::new(LEN, None, Content::Valid);
    twins.step(&Step::Use { range: 0..LEN, mode: Mode::Read, stream: 1 });
    twins.hazards.dependencies(&(0..LEN), Mode::Read, 2, |used| panic!("{used:?}"));
    let mut waits = 0;
    twins.hazards.dependencies(&(0..LEN), Mode::Overwrite, 2, |_| waits += 1);
    assert_eq!(waits, 1);
}

/// Streams that come, read and go: the next one finds none of them.
#[test]
fn readers_that_are_complete_are_forgotten() {
    let stream = |id| Stream { id, completed: Rc::default() };
    let maker = Some(Point { stream: stream(1), ticket: 1 });
    let mut hazards: Hazards<Stream, Poison> = Hazards::new(LEN, maker, Content::Valid);
    let pending = stream(2);
    hazards.record(&(0..LEN), Mode::Read, &pending, 1);
    let others: Vec<_> = (0..size(300) as u64).map(|id| stream(10 + id)).collect();
    for reader in &others {
        hazards.record(&(0..LEN), Mode::Read, reader, 1);
        assert!(hazards.users().len() <= 3, "the maker, who is pending, and the last reader");
        reader.completed.set(1);
    }
    // In flight all at once, and complete when one of them reads again.
    others.iter().for_each(|reader| reader.completed.set(0));
    others.iter().for_each(|reader| hazards.record(&(0..LEN), Mode::Read, reader, 2));
    assert_eq!(hazards.users().len(), others.len() + 2);
    others.iter().chain([&pending]).for_each(|reader| reader.completed.set(2));
    hazards.record(&(0..LEN), Mode::Read, others.last().unwrap(), 3);
    let users = hazards.users();
    assert_eq!(users.len(), 2, "the maker and who reads: {users:?}");
    // The maker as well, once its work is complete and another one reads.
    users[0].stream.completed.set(1);
    hazards.record(&(0..LEN), Mode::Read, &pending, 4);
    assert!(hazards.users().iter().all(|used| used.stream.id != 1));
}

#[test]
fn an_empty_range_touches_nothing() {
    let mut twins = Twins::new(LEN, Some((0, 1)), Content::Unwritten);
    for mode in [Mode::Read, Mode::Overwrite, Mode::ReadWrite] {
        twins.step(&Step::Use { range: LEN / 2..LEN / 2, mode, stream: 1 });
    }
    twins.step(&Step::Poison { range: 1..1, leaves_data: true, poison: 1 });
    assert_eq!(twins.hazards.span_ends().count(), 1);
    twins.check();
}

fn drain(waiters: &mut Waiters<&'static str>, completed: u64) -> Vec<&'static str> {
    std::iter::from_fn(|| waiters.pop_due(completed)).map(|(_, waiter)| waiter).collect()
}

#[test]
fn waiters_are_taken_in_the_order_of_their_tickets() {
    let mut waiters = Waiters::new();
    for (ticket, name) in [(5, "five"), (2, "two"), (9, "nine"), (3, "three")] {
        waiters.insert(ticket, name);
    }
    assert_eq!(waiters.next_due(), Some(2));
    assert_eq!(drain(&mut waiters, 1), [""; 0]);
    assert_eq!(drain(&mut waiters, 5), ["two", "three", "five"]);
    assert_eq!(waiters.next_due(), Some(9));
    assert_eq!(waiters.len(), 1);
    assert_eq!(drain(&mut waiters, u64::MAX), ["nine"]);
    assert_eq!(waiters.len(), 0);
    assert_eq!(waiters.next_due(), None);
}

#[test]
fn a_removed_waiter_is_neither_due_nor_taken() {
    let mut waiters = Waiters::new();
    let early = waiters.insert(1, "early");
    waiters.insert(2, "late");
    assert_eq!(waiters.remove(early), Some(Some("early")));
    assert_eq!(waiters.remove(early), None);
    assert_eq!(waiters.waker(early), None);
    assert_eq!(waiters.next_due(), Some(2));
    assert_eq!(drain(&mut waiters, 2), ["late"]);
}

#[test]
fn a_key_is_good_for_one_registration() {
    let mut waiters = Waiters::new();
    let first = waiters.insert(1, "first");
    assert_eq!(waiters.pop_due(1), Some((1, "first")));
    // The slot is used again, the key is not.
    let second = waiters.insert(7, "second");
    assert_ne!(first, second);
    assert_eq!(waiters.waker(first), None);
    assert_eq!(waiters.remove(first), None);
    assert_eq!(waiters.waker(second), Some(Some(&"second")));
    assert_eq!(waiters.pop_due(6), None);
    assert_eq!(waiters.pop_due(7), Some((7, "second")));
}

#[test]
fn a_stale_entry_does_not_take_the_slots_next_waiter() {
    let mut waiters = Waiters::new();
    let abandoned = waiters.insert(1, "abandoned");
    assert_eq!(waiters.remove(abandoned), Some(Some("abandoned")));
    waiters.insert(5, "next");
    // Entry (1, slot 0) is still in the heap; ticket 1 completes.
    assert_eq!(waiters.pop_due(1), None);
    assert_eq!(waiters.len(), 1);
    assert_eq!(waiters.pop_due(5), Some((5, "next")));
}

#[test]
fn a_borrowed_waker_keeps_its_place() {
    let mut waiters = Waiters::new();
    let key = waiters.insert(3, "first");
    waiters.insert(4, "second");
    let (borrowed, waker) = waiters.borrow_first().unwrap();
    assert_eq!((borrowed, waker), (key, "first"));
    assert_eq!((waiters.borrow_first(), waiters.waker(key)), (None, Some(None)));
    assert_eq!((waiters.len(), waiters.next_due()), (2, Some(3)));
    assert_eq!(waiters.return_borrowed(key, waker), Ok(()));
    assert_eq!(waiters.waker(key), Some(Some(&"first")));
    // Taken meanwhile: who has the waker wakes it.
    let (key, waker) = waiters.borrow_first().unwrap();
    assert_eq!(waiters.pop_due(4), Some((4, "second")));
    assert_eq!(waiters.return_borrowed(key, waker), Err("first"));
    // Entered again meanwhile, with another.
    let key = waiters.insert(5, "third");
    let (_, waker) = waiters.borrow_first().unwrap();
    assert_eq!(waiters.replace(key, "fresh"), Ok(None));
    assert_eq!(waiters.return_borrowed(key, waker), Err("third"));
    assert_eq!(waiters.replace(key, "other"), Ok(Some("fresh")));
    assert_eq!(waiters.pop_due(5), Some((5, "other")));
    assert_eq!(waiters.replace(key, "late"), Err("late"));
}

/// A stream whose tasks look for themselves: its list never grows.
#[test]
fn the_first_to_leave_leaves_no_entry() {
    let mut waiters = Waiters::new();
    let later = waiters.insert(1_000_000, "later");
    for ticket in 0..100 {
        let key = waiters.insert(ticket, "first");
        assert_eq!(waiters.remove(key), Some(Some("first")));
        assert_eq!(waiters.entries(), 1);
    }
    assert_eq!(waiters.remove(later), Some(Some("later")));
    assert_eq!(waiters.entries(), 0);
}

#[test]
fn stale_entries_never_outnumber_the_live_ones_by_much() {
    let mut waiters = Waiters::new();
    let live: Vec<_> = (0..10).map(|ticket| waiters.insert(1_000 + ticket, "live")).collect();
    for ticket in 0..size(10_000) as u64 {
        let key = waiters.insert(ticket, "abandoned");
        assert_eq!(waiters.remove(key), Some(Some("abandoned")));
        assert!(waiters.entries() <= 2 * waiters.len() + 64 + 1, "{} entries", waiters.entries());
    }
    assert_eq!(waiters.next_due(), Some(1_000));
    assert!(live.into_iter().all(|key| waiters.waker(key).is_some()));
    assert_eq!(drain(&mut waiters, u64::MAX).len(), 10);
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn waiters_do_what_a_sorted_list_would(
        acts in prop::collection::vec((0..4_u8, 0..8_u64), 0..size(60)),
    ) {
        let mut waiters = Waiters::new();
        let mut list: Vec<(u64, u64, waiters::WaiterKey)> = Vec::new();
        let mut gone = Vec::new();
        for (id, (act, ticket)) in acts.into_iter().enumerate() {
            match act {
                0 | 1 => list.push((ticket, id as u64, waiters.insert(ticket, id as u64))),
                2 if !list.is_empty() => {
                    let (_, id, key) = list.swap_remove(ticket as usize % list.len());
                    prop_assert_eq!(waiters.remove(key), Some(Some(id)));
                    gone.push(key);
                }
                2 => {}
                _ => {
                    while let Some((of, id)) = waiters.pop_due(ticket) {
                        let at = list.iter().position(|known| known.1 == id);
                        let (due, _, key) = list.swap_remove(at.expect("somebody who waits"));
                        prop_assert!(due <= ticket && due == of);
                        prop_assert!(list.iter().all(|other| due <= other.0));
                        gone.push(key);
                    }
                    prop_assert!(list.iter().all(|known| known.0 > ticket));
                }
            }
            prop_assert_eq!(waiters.len(), list.len());
            prop_assert_eq!(waiters.next_due(), list.iter().map(|known| known.0).min());
            prop_assert!(gone.iter().all(|key| waiters.waker(*key).is_none()));
        }
    }
}
