//! How a waiter spends its time: the phases of a wait, what a stream remembers, who checks.
//!
//! The modules are pure: `main.rs` compiles their very sources.
#![forbid(unsafe_code)]

use proptest::prelude::*;

use crate::under_test::cases::{config, sample, size};
use gpu_await_protocol::cadence::{self, Age, Completion, Plan};
use gpu_await_protocol::checkers::{CheckPermit, Checkers};
use gpu_await_protocol::estimator::{self, Estimator, Window};
use gpu_await_protocol::owed::{self, Owed};
use gpu_await_protocol::ready_tasks::ReadyTasks;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// The waits after which the oldest kind of work is forgotten.
const FORGET_AFTER: usize = 64;

/// A wait that only the poller looks after.
struct Found {
    /// The age at the last look that found it pending.
    pending_ns: u64,
    /// The age at which it was found complete.
    found_ns: u64,
    /// Looks outside of windows.
    naps: u64,
    /// Looks in windows.
    watched: u64,
}

/// A wait of that age, of an executor that wakes tasks at once.
fn age(age_ns: u64) -> Age {
    Age { age_ns, lag_ns: 0, rest_ns: cadence::rest(0), is_armed: false }
}

fn plan(age_ns: u64, estimator: &Estimator) -> Plan {
    cadence::plan(Completion::Adaptive, age(age_ns), estimator)
}

/// Waits for work of that length, as `StreamState::visit` does.
fn wait(estimator: &Estimator, length_ns: u64) -> Found {
    let mut found = Found { pending_ns: 0, found_ns: 0, naps: 0, watched: 0 };
    let mut age = 0;
    while age < length_ns {
        found.pending_ns = age;
        let next = plan(age, estimator).look_ns;
        assert!(next > age, "no progress at {age}");
        let is_open =
            estimator.window(age).is_some_and(|w| w.from_ns <= age + cadence::NAP_LEAST_NS);
        *(if is_open { &mut found.watched } else { &mut found.naps }) += 1;
        age = next;
    }
    found.found_ns = age;
    found
}

/// Waits, and remembers it.
fn wait_and_learn(estimator: &mut Estimator, length_ns: u64) -> Found {
    let found = wait(estimator, length_ns);
    estimator.learn(found.pending_ns, found.found_ns);
    found
}

/// An estimator of waits of these lengths.
fn after(lengths: &[u64]) -> Estimator {
    let mut estimator = Estimator::default();
    for length in lengths {
        wait_and_learn(&mut estimator, *length);
    }
    estimator
}

/// From nothing to ten seconds, under Miri to two milliseconds; as many short ones as long ones.
fn lengths() -> impl Strategy<Value = u64> {
    (0..14 + size(20) as u32, any::<u64>()).prop_map(|(bits, any)| any % (1 << bits))
}

/// As [`lengths`], to a second: a longer wait differs from those in the number of its longest naps alone.
fn taught_lengths() -> impl Strategy<Value = u64> {
    (0..14 + size(16) as u32, any::<u64>()).prop_map(|(bits, any)| any % (1 << bits))
}

/// What any looks, of the poller or of tasks, on time or late, may have taught.
fn estimators() -> impl Strategy<Value = Estimator> {
    prop::collection::vec((lengths(), lengths()), 0..size(80)).prop_map(|waits| {
        let mut estimator = Estimator::default();
        waits.into_iter().for_each(|(low, high)| estimator.learn(low, high));
        estimator
    })
}

const MODES: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];

fn modes() -> impl Strategy<Value = Completion> {
    prop::sample::select(MODES.to_vec())
}

// ---- estimator ------------------------------------------------------------------------------

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn a_window_holds_what_was_learned(
        before in estimators(), low in lengths(), high in lengths(), part in 0.0..=1.0,
    ) {
        let (low, high) = (low.min(high), low.max(high));
        let mut estimator = before;
        estimator.learn(low, high);
        let age = low + ((high - low) as f64 * part) as u64;
        let window = estimator.window(age).expect("of that wait");
        prop_assert!(window.from_ns <= age && age < window.until_ns, "{age}: {window:?}");
    }

    #[test]
    fn a_window_is_short_beside_the_wait(low in lengths(), high in lengths(), others in 0..9_u64) {
        let (low, high) = (low.min(high), low.max(high));
        let mut estimator = Estimator::default();
        // Waits that lie apart: the window grows with that, up to a limit.
        for other in 0..others {
            estimator.learn(low + other % 2 * 50 * US, high + other % 2 * 50 * US);
        }
        estimator.learn(low, high);
        let window = estimator.window(low).expect("of that wait");
        let most = (high / 8).max(estimator::LEAD_LEAST_NS);
        prop_assert!(low - window.from_ns <= most, "{window:?}");
        prop_assert!(window.until_ns - high <= most, "{window:?}");
    }
}

#[test]
fn a_window_grows_with_the_spread() {
    let steady = after(&vec![MS; size(20)]);
    let spread: Vec<_> = (0..size(20) as u64).map(|index| MS + index % 2 * 60 * US).collect();
    let spread = after(&spread);
    let window = |estimator: &Estimator| estimator.window(900 * US).expect("about a millisecond");
    let length = |estimator: &Estimator| window(estimator).until_ns - window(estimator).from_ns;
    assert!(length(&steady) < 80 * US, "{:?}", window(&steady));
    assert!(length(&spread) > 120 * US, "{:?}", window(&spread));
}

#[test]
fn alternating_lengths_keep_both_windows() {
    // From hardly apart to much apart: each hundredth while a window may be shared.
    let parts = || sample((1..60).chain((60..300).step_by(8)));
    let short = &[50 * US, 500 * US, 8 * MS, 20 * MS, 100 * MS][..size(5)];
    for (short, long) in short
        .iter()
        .flat_map(|short| parts().map(move |part| (*short, *short + part * *short / 100)))
    {
        let mut estimator = Estimator::default();
        for round in 0..6 + size(14) {
            for length in [short, long] {
                let late = wait_and_learn(&mut estimator, length).found_ns - length;
                // The first ones teach it; two lengths may share a window.
                let shared = 2 * estimator::lead_most(long) / 32;
                let most = if round < 6 { u64::MAX } else { cadence::rest(0).max(shared) };
                assert!(late <= most, "{short} and {long}: {length} is found {late} late");
            }
        }
    }
}

#[test]
fn a_kind_of_work_is_forgotten_after_64_waits_for_others() {
    let mut estimator = after(&[10 * MS]);
    for count in 1..=FORGET_AFTER {
        assert!(estimator.window(10 * MS - US).is_some(), "{count}");
        wait_and_learn(&mut estimator, 100 * US);
    }
    assert!(estimator.window(10 * MS - US).is_some(), "known to the last");
    wait_and_learn(&mut estimator, 100 * US);
    assert_eq!(estimator.window(10 * MS - US), None);
    assert!(estimator.window(100 * US).is_some());
}

#[test]
fn a_length_repeats_from_its_third_time_on() {
    let repeats = |lengths: &[u64]| after(lengths).window(0).expect("of these").repeats;
    let times = [1, 2, 3, 4].map(|times| repeats(&vec![500 * US; times]));
    assert_eq!(times, [false, false, true, true]);
    // One that comes in between does not undo it, and does not share it.
    let estimator = after(&[500 * US, 500 * US, 500 * US, 5 * MS]);
    assert!(estimator.window(0).unwrap().repeats && !estimator.window(4 * MS).unwrap().repeats);
}

#[test]
fn five_kinds_of_work_leave_the_newest_four() {
    let kinds = [100 * US, MS, 10 * MS, 100 * MS, 1000 * MS];
    let estimator = after(&kinds);
    let is_known =
        |length: &u64| estimator.window(*length).is_some_and(|window| window.from_ns <= *length);
    assert_eq!(kinds.each_ref().map(is_known), [false, true, true, true, true]);
}

#[test]
fn short_means_all_that_is_remembered() {
    let mut estimator = Estimator::default();
    assert!(!estimator.is_short(30 * US), "nothing is known");
    estimator.learn(0, 30 * US);
    assert!(estimator.is_short(30 * US) && !estimator.is_short(29 * US));
    estimator.learn(900 * US, MS);
    assert!(!estimator.is_short(30 * US));
}

// ---- cadence ------------------------------------------------------------------------------

#[test]
fn the_last_look_of_a_window_lies_ahead() {
    let estimator = after(&[100_000; 3]);
    let Window { until_ns, .. } = estimator.window(100_000).unwrap();
    for (mode, left_ns) in
        MODES.into_iter().flat_map(|mode| (1..=size(600) as u64).map(move |left| (mode, left)))
    {
        let Plan { look_ns, .. } = cadence::plan(mode, age(until_ns - left_ns), &estimator);
        assert!(look_ns > until_ns - left_ns, "{mode:?}, {left_ns} ns before its end");
    }
}

proptest! {
    #![proptest_config(config(500))]

    /// A look lies ahead, and no further than the cadence wants it; a window that is open ends ahead.
    #[test]
    fn every_plan_makes_progress(
        mode in modes(), age_ns in lengths(), estimator in estimators(), lag_ns in 0..cadence::LAG_MOST_NS,
        is_armed: bool,
    ) {
        let age = Age { lag_ns, is_armed, ..age(age_ns) };
        let Plan { check_until_ns, look_ns, .. } = cadence::plan(mode, age, &estimator);
        prop_assert!(check_until_ns.is_none_or(|until_ns| until_ns > age_ns));
        prop_assert!(age_ns < look_ns, "{look_ns}");
        let most_ns = if is_armed { cadence::PROBE_NS } else { cadence::cadence(age_ns) };
        prop_assert!(look_ns <= age_ns + most_ns, "{look_ns}");
    }

    /// Nobody checks for long, however long the windows are.
    #[test]
    fn a_check_is_short(age_ns in lengths(), estimator in estimators(), lag_ns in 0..cadence::LAG_MOST_NS) {
        let plan = cadence::plan(Completion::Adaptive, Age { lag_ns, ..age(age_ns) }, &estimator);
        if let Some(until_ns) = plan.check_until_ns {
            let ahead = cadence::NAP_LEAST_NS + lag_ns + lag_ns / 2;
            prop_assert!(until_ns - age_ns <= estimator::CHECK_MOST_NS + ahead, "{}", until_ns - age_ns);
            // And a task that is woken for a window does not check for most of the wait.
            prop_assert!(until_ns - age_ns <= estimator::CHECK_MOST_NS + cadence::NAP_LEAST_NS + until_ns / 5);
        }
    }

    /// The looks outside of windows grow with the logarithm of the wait; those of long waits are as far
    /// apart as the longest nap.
    #[test]
    fn looks_are_few(waits in prop::collection::vec(taught_lengths(), 0..size(80)), length in lengths()) {
        let estimator = after(&waits);
        let found = wait(&estimator, length);
        let part = cadence::NAP_PART;
        let growth = length.min(part * cadence::NAP_MOST_NS) as f64 / (part * cadence::NAP_LEAST_NS) as f64;
        let growing = (part + 1) as f64 * growth.max(1.0).ln();
        // And one that is cut short by each window.
        let most = part + growing.ceil() as u64 + 5 + length / cadence::NAP_MOST_NS;
        prop_assert!(found.naps <= most, "{} naps, {most} at most", found.naps);
        // In windows they are a 32nd of what is left apart, and at least a rest.
        prop_assert!(found.watched <= 4 * 150 + most, "{} in windows", found.watched);
    }

    /// Work of any length is found late by a part of it at most, whatever came before.
    #[test]
    fn any_length_is_found_in_time(
        waits in prop::collection::vec(taught_lengths(), 0..size(80)), length in lengths(),
    ) {
        let late = wait(&after(&waits), length).found_ns - length;
        prop_assert!(late <= cadence::cadence(length), "late by {late}");
    }

    #[test]
    fn steady_work_is_found_at_once(length in lengths(), jitter in 0..10_u64, waits in 8..40_u64) {
        // By up to a hundredth shorter.
        let varied = |index: u64| length - (index * jitter % 10) * (length / 1_000);
        let lengths: Vec<_> = (0..waits).map(varied).collect();
        let estimator = after(&lengths);
        let late = wait(&estimator, length).found_ns - length;
        prop_assert!(late <= (length / 32).max(cadence::NAP_LEAST_NS), "late by {late}");
    }
}

#[test]
fn with_nothing_remembered_a_task_checks_first() {
    let empty = Estimator::default();
    let (until, cadence) = (cadence::CHECK_NS, cadence::cadence);
    let check =
        |age| Plan { check_until_ns: Some(until), repeats: true, look_ns: age + cadence(age) };
    assert_eq!([plan(0, &empty), plan(until - 1, &empty)], [check(0), check(until - 1)]);
    for age in [until, MS, 10 * MS, 1000 * MS] {
        assert_eq!(
            plan(age, &empty),
            Plan { check_until_ns: None, repeats: true, look_ns: age + cadence(age) }
        );
    }
    assert_eq!([0, 10 * MS, 1000 * MS].map(cadence), [20 * US, 156_250, MS]);
}

#[test]
fn a_window_opens_early_enough_to_wake_a_task_for_it() {
    let estimator = after(&[10 * MS; 3]);
    let window = estimator.window(0).expect("of these");
    for lag_ns in [0, 50 * US, 400 * US] {
        let open = window.from_ns - cadence::NAP_LEAST_NS - lag_ns - lag_ns / 2;
        let plan =
            |age_ns| cadence::plan(Completion::Adaptive, Age { lag_ns, ..age(age_ns) }, &estimator);
        assert_eq!(plan(open - 1), Plan { check_until_ns: None, repeats: true, look_ns: open });
        assert_eq!(plan(open).check_until_ns, Some(window.until_ns));
    }
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn the_lag_comes_to_what_is_measured(known in lengths(), measured in lengths()) {
        let mut lag = known.min(cadence::LAG_MOST_NS);
        let target = measured.min(cadence::LAG_MOST_NS);
        let (low, high) = (lag.min(target), lag.max(target));
        for _ in 0..200 {
            let next = cadence::lag(lag, measured);
            prop_assert!((low..=high).contains(&next), "{next}");
            prop_assert!(next.abs_diff(target) <= lag.abs_diff(target), "from {lag} to {next}");
            lag = next;
        }
        // What a sixteenth of the rest rounds to nothing.
        prop_assert!(lag.abs_diff(target) < 16, "{lag} for {target}");
    }
}

#[test]
fn the_lag_follows_late_polls_sooner_than_early_ones() {
    assert_eq!(cadence::lag(0, 100), 100, "the first is what is known");
    assert_eq!(cadence::lag(100, 200), 150);
    assert_eq!(cadence::lag(260, 100), 250);
}

#[test]
fn a_backlog_counts_who_was_not_forgotten() {
    let backlog = ReadyTasks::new();
    backlog.leave();
    assert!(backlog.is_empty(), "nobody was woken");
    backlog.enter();
    backlog.enter();
    backlog.leave();
    assert!(!backlog.is_empty());
    backlog.forget();
    backlog.leave();
    assert!(backlog.is_empty(), "and not below nothing");
    backlog.enter();
    assert!(!backlog.is_empty());
}

#[test]
fn the_poller_rests_in_proportion() {
    assert_eq!(cadence::rest(0), cadence::REST_LEAST_NS);
    assert_eq!(cadence::rest(10 * US), 10 * US);
    assert_eq!(cadence::rest(2 * MS), 2 * MS, "however many streams there are");
}

// ---- checkers -----------------------------------------------------------------------------

proptest! {
    #![proptest_config(config(500))]

    /// Against a list of who holds a permit until when.
    #[test]
    fn permits_are_few_and_come_back(
        acts in prop::collection::vec((0..3_u8, 0..20_u64), 0..size(80)),
    ) {
        let checkers = Checkers::new();
        let mut now = 1;
        let mut held: Vec<CheckPermit> = Vec::new();
        for (act, number) in acts {
            match act {
                0 => now += number,
                1 => {
                    let permit = checkers.enter(now, now + 1 + number);
                    prop_assert_eq!(permit.is_some(), held.len() < cadence::CHECKERS);
                    prop_assert!(permit.is_none_or(|permit| permit.until() == now + 1 + number));
                    held.extend(permit);
                }
                _ if !held.is_empty() => {
                    checkers.leave(held.swap_remove(number as usize % held.len()));
                }
                _ => {}
            }
            // Who leaks a permit gives it back by the clock.
            held.retain(|permit| permit.until() > now);
            prop_assert_eq!(checkers.held(now), held.len());
        }
    }
}

#[test]
fn one_stays_awake_while_the_poller_wakes_often() {
    let checkers = Checkers::new();
    let now = std::cell::Cell::new(MS);
    let wake = |count: usize, gap: u64| {
        for _ in 0..count {
            now.set(now.get() + gap);
            checkers.woke(now.get());
        }
        now.get()
    };
    assert!(checkers.stay_awake(wake(30, 400 * US)).is_none(), "seldom");
    let now = wake(60, 50 * US);
    let awake = checkers.stay_awake(now).expect("often, and nobody is awake");
    assert!(checkers.stay_awake(now).is_none() && !checkers.all_sleep(now));
    assert_eq!(checkers.held(now), 0);
    let awake = checkers.keep_awake(awake, now + 150 * US).expect("still often");
    assert!(checkers.stay_awake(now + 250 * US).is_none(), "its time was renewed");
    checkers.leave(awake);
    assert!(checkers.all_sleep(now));
    // Leaked: its time ends.
    checkers.stay_awake(now).expect("nobody is awake");
    let now = wake(8, 50 * US);
    let awake = checkers.stay_awake(now).expect("the other one's time is over");
    // Nothing was found for a while.
    assert!(checkers.keep_awake(awake, now + MS).is_none());
    assert!(checkers.all_sleep(now + MS) && checkers.stay_awake(now + MS).is_none());
    let now = wake(20, 50 * US);
    let check = checkers.enter(now, now + MS).expect("free");
    assert!(checkers.stay_awake(now).is_none(), "somebody checks");
    checkers.leave(check);
    assert!(checkers.stay_awake(now).is_some());
}

#[test]
fn a_costly_yield_is_the_last_for_a_while() {
    let checkers = Checkers::new();
    let mut now = 1_000_000;
    // Often enough that one stays awake.
    (0..40).for_each(|n| checkers.woke(now + n * 10_000));
    now += 400_000;
    checkers.was_away(cadence::SLICE_NS, now);
    let awake = checkers.stay_awake(now).expect("yields are cheap");
    let awake = checkers.keep_awake(awake, now).expect("they still are");
    checkers.was_away(cadence::SLICE_NS + 1, now);
    assert!(checkers.keep_awake(awake, now).is_none());
    // Whoever could check or stay awake sleeps, until it is tried again.
    for later in [0, cadence::BUSY_NS - 1] {
        assert!(!checkers.may_yield(now + later));
        assert!(checkers.enter(now + later, u64::MAX).is_none());
        assert!(checkers.stay_awake(now + later).is_none());
    }
    assert!(checkers.may_yield(now + cadence::BUSY_NS));
    assert!(checkers.enter(now + cadence::BUSY_NS, u64::MAX).is_some());
}

/// Each try costs a slice while the neighbours stay: they become rare. Of later neighbours nothing is held against them.
#[test]
fn busy_cores_are_tried_less_and_less() {
    let checkers = Checkers::new();
    let mut now = 1_000_000;
    let mut tries = 0;
    while now < 20_000_000_000 {
        if checkers.may_yield(now) {
            tries += 1;
            now += 4_000_000;
            checkers.was_away(4_000_000, now);
            // Another thread that lost the same slice.
            checkers.was_away(4_000_000, now);
        } else {
            now += 1_000_000;
        }
    }
    assert_eq!(tries, 11, "after 100, 200, 400, 800, 1600 ms, then every 3.2 s");
    now += 2 * cadence::BUSY_MOST_NS;
    checkers.was_away(4_000_000, now);
    assert!(!checkers.may_yield(now) && checkers.may_yield(now + cadence::BUSY_NS));
}

/// A thread and a neighbour of so many times its weight: woken with more than its share, it waits for the neighbour's slice.
#[test]
fn a_light_thread_sleeps_longer() {
    for (weight, at_most) in [(1, 0.01), (2, 0.01), (9, 0.06), (30, 0.2)] {
        let mut owed = Owed::new();
        let (mut late, mut slept) = (0, 0);
        for _ in 0..20_000 {
            let sleep_ns = owed.sleep_ns(6_000);
            assert!((owed::LEAST * 3_000..=owed::MOST * 3_000).contains(&sleep_ns));
            let is_late = sleep_ns < 6_000 * weight;
            late += u32::from(is_late);
            slept += 1;
            owed.slept(is_late);
        }
        assert!(f64::from(late) / f64::from(slept) <= at_most, "{weight}: {late} of {slept}");
    }
    // One that is late now and then is not for that.
    let mut owed = Owed::new();
    (0..1000).for_each(|n| owed.slept(n % 3 != 0));
    assert_eq!(owed.sleep_ns(6_000), owed::LEAST * 3_000);
}

#[test]
fn a_late_checker_returns_nothing() {
    let checkers = Checkers::new();
    let late = checkers.enter(1, 10).expect("all are free");
    let others: Vec<_> = (0..cadence::CHECKERS).filter_map(|_| checkers.enter(10, 30)).collect();
    assert_eq!(others.len(), cadence::CHECKERS, "the first one's time is over");
    checkers.leave(late);
    assert_eq!(checkers.held(20), cadence::CHECKERS);
    assert!(checkers.enter(20, 40).is_none());
    others.into_iter().for_each(|permit| checkers.leave(permit));
    assert_eq!(checkers.held(20), 0);
}
