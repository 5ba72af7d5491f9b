#!/usr/bin/env python3
"""Takes what the rules of waiting rest on out of the source, one piece at a time, and runs the loom
test that must fail then. A fence, a second look or an order that can go without a test failing is not
needed, or is not tested: both are defects.

    tests/mutations.py [part of a name]

Not in CI: some minutes. Prints a line a mutation; exit status 1 if one survived.
"""
import pathlib
import re
import shutil
import subprocess
import sys

CRATE = pathlib.Path(__file__).resolve().parent.parent
ROOT = CRATE.parent.parent
WORK = ROOT / "target" / "mutations"

COMPLETION = "a_completion_beside_a_registration_wakes_it"
SLEPT = "a_registration_is_never_slept_over"
GIVEN_UP = "a_stream_given_up_beside_a_registration_comes_back"
LOSS = "a_loss_is_seen_by_who_registers_beside_it"
LOSS_SLEPT = "a_loss_is_never_slept_over"
SWEEP = "a_missed_sweep_is_made_up_for"
WANTED = "a_wanted_marker_is_served_by_whoever_unlocks"
OTHER_WORK = "a_stream_given_up_beside_other_work_comes_back"
AHEAD = "who_is_woken_ahead_of_time_is_woken_again"
WISHES = "a_look_that_is_asked_for_serves_wishes"
PUBLISHED = "a_marker_is_published_after_its_call"
LOANS = "what_a_loan_left_is_covered"
TOLD = "what_a_told_reader_descends_from_does_not_fail"
THROUGH = "a_failure_is_seen_through_what_it_has_reached"
FORK = "a_fork_finds_no_thread_in_its_turn"

# (file, the text that precedes it, what, instead, the test that fails)
MUTATIONS = [
    # A registration, and a completion or a loss beside it.
    ("wait_queue", "fn register", "fence(Ordering::SeqCst);", "", COMPLETION),
    ("wait_queue", "fn register", "match outcome() {", "match outcome().filter(|_| false) {", COMPLETION),
    ("wait_queue", "fn settle", "fence(Ordering::SeqCst);", "", COMPLETION),
    ("wait_queue", "fn set(", "Ordering::Release", "Ordering::Relaxed", LOSS),
    ("wait_queue", "fn is_set(", "Ordering::Acquire", "Ordering::Relaxed", LOSS),
    ("wait_queue", "fn tell", "self.is_set() && ", "", LOSS),
    ("waiters", "fn replace", "Ok(slot.waker.replace(fresh))", "Ok(Some(fresh))",
     "each_poll_replaces_the_waker"),
    ("wait_queue", "fn wake_first", "if let Err(waker) = returned {",
     "if let Err(waker) = returned && false {", AHEAD),
    # A registration, and the poller beside it.
    ("wait_queue", "fn look_by", "self.next_look.fetch_min(due, Ordering::Release);", "", SLEPT),
    ("wait_queue", "fn look_by", "Ordering::Release", "Ordering::Relaxed", WISHES),
    ("wait_queue", "fn begin_look", "Ordering::Acquire", "Ordering::Relaxed", SLEPT),
    ("wait_queue", "fn begin_look", "self.next_look.swap(NEVER, Ordering::Acquire);", "", SLEPT),
    ("wait_queue", "fn give_up", "!(self.is_waited_for() || has_work()) || !self.hand_over()",
     "{ has_work(); true }", GIVEN_UP),
    ("wait_queue", "fn give_up", "Ordering::Acquire", "Ordering::Relaxed", OTHER_WORK),
    ("wait_queue", "fn hand_over", "Ordering::Release", "Ordering::Relaxed", OTHER_WORK),
    # A turn, and a fork beside it.
    ("turn", "fn end(", "Ordering::Release", "Ordering::Relaxed", FORK),
    ("turn", "fn hold(", "self.0.fetch_add(HOLD, Ordering::Relaxed);", "", FORK),
    ("turn", "fn is_at_rest(", "Ordering::Acquire", "Ordering::Relaxed", FORK),
    ("turn", "fn is_at_rest(", "self.0.load(Ordering::Acquire) & TAKEN == 0", "true", FORK),
    # A loan of a stream that ends beside a submitter.
    ("sharing", "fn end", "self.0.fetch_or(OWED, Ordering::Release);", "", LOANS),
    ("sharing", "fn end", "self.0.fetch_or(OWED, Ordering::Release);",
     "self.0.fetch_or(OWED, Ordering::Relaxed);", LOANS),
    ("sharing", "fn take_owed", "Ordering::Acquire", "Ordering::Relaxed", LOANS),
    # The poller's sleep.
    ("park", "fn look", "fence(Ordering::SeqCst);", "", SLEPT),
    ("park", "fn look", "let again = rounds.round();", "let again = false;", SLEPT),
    ("park", "fn look", "self.state.store(PARKING, Ordering::Relaxed);", "", SLEPT),
    ("park", "fn commit", "self.until.store(until, Ordering::Relaxed);", "", SLEPT),
    ("park", "fn commit", "(Ordering::Release, Ordering::Relaxed)",
     "(Ordering::Relaxed, Ordering::Relaxed)", SLEPT),
    ("park", "fn notify_before", "fence(Ordering::SeqCst);", "", SLEPT),
    ("park", "fn notify_before", "self.until.load(Ordering::Relaxed) <= due",
     "self.until.load(Ordering::Relaxed) <= due + 1", SLEPT),
    ("park", "fn notify_before", "match self.state.load(Ordering::Acquire)",
     "match self.state.load(Ordering::Relaxed)", SLEPT),
    # One sweep serves all.
    ("sweep", "fn run", "self.missed.store(true, Ordering::SeqCst);", "", SWEEP),
    ("sweep", "fn run", "self.missed.store(true, Ordering::SeqCst);",
     "self.missed.store(true, Ordering::Relaxed);", SWEEP),
    ("sweep", "fn run", "if self.busy.load(Ordering::SeqCst) {", "if true {", SWEEP),
    ("sweep", "fn run", "self.missed.swap(false, Ordering::SeqCst);",
     "self.missed.store(false, Ordering::Relaxed);", SWEEP),
    ("sweep", "fn run", "if !self.missed.load(Ordering::SeqCst) {", "if true {", SWEEP),
    ("sweep", "fn run", "if !self.missed.load(Ordering::SeqCst) {",
     "if !self.missed.load(Ordering::Relaxed) {", SWEEP),
    # The submission lock.
    ("submission", "fn unserved", "fence(Ordering::SeqCst);", "", WANTED),
    ("submission", "fn with<", "self.serve(cx);", "", WANTED),
    ("submission", "fn serve_one", "Some(tail) => tail >= wanted", "Some(_) => true",
     "a_ticket_that_is_not_there_yet_is_served_by_who_submits_it"),
    ("submission", "fn publish_mark", "Ordering::Release", "Ordering::Relaxed", PUBLISHED),
    ("submission", "fn is_marked", "Ordering::Acquire", "Ordering::Relaxed", PUBLISHED),
    # The timeline.
    ("timeline", "fn publish", "Ordering::Release", "Ordering::Relaxed",
     "what_is_in_flight_is_never_negative"),
    ("timeline", "fn submitted", "Ordering::Acquire", "Ordering::Relaxed",
     "what_is_in_flight_is_never_negative"),
    ("timeline", "fn complete(", "while known < ticket", "while known != ticket",
     "completed_only_rises"),
    ("timeline", "fn complete(", "Ordering::AcqRel", "Ordering::Relaxed",
     "what_is_complete_is_visible"),
    ("timeline", "fn completed(", "Ordering::Acquire", "Ordering::Relaxed",
     "what_is_complete_is_visible"),
    # Outcomes, and their readers.
    ("linked_outcome", "fn tell", "if is_last || state.producers.is_empty() {",
     "if !is_last { state.is_told = true } if is_last || state.producers.is_empty() {", TOLD),
    ("linked_outcome", "fn fail", "|| state.is_told ", "", TOLD),
    ("linked_outcome", "fn fail", "reached.get(at).cloned()", "reached.pop()", THROUGH),
    ("linked_outcome", "fn descends_from", "theirs.readers.push(self.clone());", "",
     "a_failure_reaches_a_reader_that_is_linked_beside_it"),
]

MANIFEST = """\
[package]
name = "mutated"
version = "0.0.0"
edition = "2024"
[workspace]
[dependencies]
{dependencies}
[profile.dev]
opt-level = 1
"""


def main() -> int:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    prepare()
    survived = 0
    for file, behind, what, instead, test in MUTATIONS:
        name = f"{file}.rs, {behind.strip('(<')}: {what} -> {instead or 'nothing'}"
        if only not in name:
            continue
        source = (CRATE / "src" / f"{file}.rs").read_text()
        start = source.index(what, source.index(behind))
        mutated = source[:start] + instead + source[start + len(what):]
        target = WORK / "src" / f"{file}.rs"
        target.write_text(mutated)
        failed = run(test)
        target.write_text(source)
        print(f"{'red ' if failed else 'LIVE'} {test}: {name}", flush=True)
        survived += not failed
    return min(survived, 1)


def prepare() -> None:
    """A package of the sources and the loom tests alone: it builds in seconds."""
    shutil.rmtree(WORK / "src", ignore_errors=True)
    (WORK / "tests").mkdir(parents=True, exist_ok=True)
    shutil.copytree(CRATE / "src", WORK / "src")
    shutil.copy(CRATE / "tests/loom.rs", WORK / "tests/loom.rs")
    lock = (ROOT / "Cargo.lock").read_text()
    names = ["loom", "parking_lot", "proptest", "slab", "smallvec"]
    used = [name for name in names if re.search(rf'name = "{name}"', lock)]
    version = {n: re.search(rf'name = "{n}"\nversion = "([^"]+)"', lock)[1] for n in used}
    lines = "\n".join(f'{n} = "={version[n]}"' for n in used)
    (WORK / "Cargo.toml").write_text(MANIFEST.format(dependencies=lines))
    if not run("nothing_is_called_so", want="ok"):
        sys.exit("the unchanged source does not build")


def run(test: str, want: str = "FAILED") -> bool:
    """Whether the test ends that way; one that hangs or does not compile is no answer."""
    command = ["cargo", "test", "--quiet", "--test", "loom", "--", test]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, timeout=900)
    if "error" in done.stderr and "could not compile" in done.stderr:
        sys.exit(done.stderr)
    return f"test result: {want}" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
