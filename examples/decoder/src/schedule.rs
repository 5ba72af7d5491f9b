//! The scheduler, without I/O or device: it decides which sequences run in the next step, and assigns slots and blocks to requests in the queue.
//!
//! | a request is | it has | until |
//! |---|---|---|
//! | waiting | its place in the queue | there is a slot, and blocks for its prompt and all its new tokens: first come, first served, but see below |
//! | running | a slot and its blocks | its last token or its stop token is delivered, or it is cancelled |
//!
//! A request for which there are not enough blocks is passed by later ones for which there are, at most [`PASSES`] times. Then nobody starts before it does, and
//! what runs gives it its blocks.
//!
//! A request runs in steps while its earlier tokens are still on their way to it, so that after a stop token, or when it is cancelled, steps in flight still
//! have it. They write to blocks that may have another owner by then, whose steps are behind them on the stream.
//!
//! # Invariants
//! 1. Blocks and slots are free or have one owner (`blocks_come_back_whenever_a_client_leaves`).
//! 2. Behind a step of prompts, running requests get a token (`prompts_starve_nobody`).
//! 3. No more than [`PASSES`] requests start before one that came earlier (`a_large_one_is_passed_so_often`).
//! 4. A token is delivered to the request that it was computed for, or to nobody (`joining_and_leaving`).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use gpu_await::Error;
use serde::Deserialize;
use tokio::sync::mpsc::UnboundedSender;

use crate::kernels::{BLOCK, NONE};
use crate::steps::{Limits, Row, Sampling, Step};

/// How many requests may start before an earlier one that needs more blocks than there are.
const PASSES: u32 = 8;

/// What is asked for.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// The prompt's token ids.
    pub ids: Vec<u32>,
    /// New tokens, at most.
    pub new: usize,
    /// The last token, if it comes earlier.
    pub stop: Option<u32>,
    /// How tokens are chosen.
    #[serde(flatten)]
    pub sampling: Sampling,
}

/// Why tokens end before the last.
#[derive(Clone, Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Broken {
    #[error("not finite: weights or f16 range")]
    NotFinite,
    #[error(transparent)]
    Device(#[from] Error),
}

pub(crate) type Answer = UnboundedSender<Result<u32, Broken>>;

pub(crate) struct Schedule {
    limits: Limits,
    free_blocks: Vec<u32>,
    free_slots: Vec<u32>,
    waiting: VecDeque<Waiting>,
    running: BTreeMap<u64, Running>,
    entered: u64,
    /// The last step was.
    was_of_prompts: bool,
}

struct Waiting {
    id: u64,
    request: Request,
    answer: Answer,
    /// Later ones that have started.
    passed: u32,
}

struct Running {
    answer: Answer,
    /// Its row in a step of next tokens, but for the position.
    row: Row,
    prompt_len: usize,
    new: usize,
    stop: Option<u32>,
    /// Tokens of steps that were launched, and those delivered.
    launched: usize,
    delivered: usize,
}

impl Schedule {
    pub(crate) fn new(limits: Limits) -> Schedule {
        Schedule {
            limits,
            free_blocks: (0..limits.blocks as u32).rev().collect(),
            free_slots: (0..limits.streams as u32).rev().collect(),
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
            entered: 0,
            was_of_prompts: false,
        }
    }

    pub(crate) fn free_blocks(&self) -> usize {
        self.free_blocks.len()
    }

    /// Requests that have not started.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Enters a request, which fits the limits, and returns its number.
    pub(crate) fn enter(&mut self, request: Request, answer: Answer) -> u64 {
        self.entered += 1;
        self.waiting.push_back(Waiting { id: self.entered, request, answer, passed: 0 });
        self.entered
    }

    /// The next step, `None` if no request needs one: of prompts if one can start, but behind such a step first one of next tokens, so that prompts that
    /// keep coming starve nobody.
    pub(crate) fn next_step(&mut self) -> Option<Step> {
        let rows = match self.was_of_prompts {
            true => Some(self.next_tokens()).filter(|rows| !rows.is_empty()),
            false => None,
        };
        let rows = rows.unwrap_or_else(|| self.prompts());
        self.was_of_prompts = rows.first().is_some_and(|row| !row.prompt.is_empty());
        let rows = if rows.is_empty() { self.next_tokens() } else { rows };
        (!rows.is_empty()).then_some(Step { rows })
    }

    fn prompts(&mut self) -> Vec<Row> {
        let (mut rows, mut tokens, mut at, mut may_pass) = (Vec::new(), 0, 0, PASSES);
        while let Some(Waiting { request, passed, .. }) = self.waiting.get(at) {
            let (prompt_len, blocks) = (request.ids.len(), blocks_of(request));
            if may_pass == 0 || self.free_slots.is_empty() {
                break;
            }
            if blocks > self.free_blocks.len() {
                (at, may_pass) = (at + 1, may_pass.min(PASSES - passed));
                continue;
            }
            // In the next step it does.
            if tokens + prompt_len > self.limits.prompt_tokens {
                break;
            }
            let (Some(Waiting { id, request, answer, .. }), Some(slot)) =
                (self.waiting.remove(at), self.free_slots.pop())
            else {
                break;
            };
            self.waiting.range_mut(..at).for_each(|earlier| earlier.passed += 1);
            may_pass -= u32::from(at > 0);
            let blocks = self.free_blocks.split_off(self.free_blocks.len() - blocks);
            let Request { ids: prompt, new, stop, sampling } = request;
            let (blocks, launched, delivered) = (blocks.into(), 1, 0);
            tokens += prompt_len;
            let first = Row { request: id, slot, prompt, position: 0, blocks, sampling };
            let row = Row { prompt: Vec::new(), blocks: first.blocks.clone(), ..first };
            rows.push(first);
            let running = Running { answer, row, prompt_len, new, stop, launched, delivered };
            self.running.insert(id, running);
        }
        rows
    }

    fn next_tokens(&mut self) -> Vec<Row> {
        let running = self.running.values_mut().filter(|it| it.launched < it.new);
        let row = |it: &mut Running| {
            it.launched += 1;
            Row { position: (it.prompt_len + it.launched - 2) as u32, ..it.row.clone() }
        };
        running.map(row).collect()
    }

    /// Sends each its token. Requests that have ended give back what they had.
    pub(crate) fn deliver(&mut self, step: &Step, tokens: &[u32]) {
        for (row, token) in step.rows.iter().zip(tokens) {
            let Some(running) = self.running.get_mut(&row.request) else { continue };
            running.delivered += 1;
            let token = if *token == NONE { Err(Broken::NotFinite) } else { Ok(*token) };
            let is_last = running.delivered == running.new
                || token.as_ref().map_or(true, |token| running.stop == Some(*token));
            // Whoever left has cancelled it, or is about to.
            running.answer.send(token).ok();
            if is_last {
                self.cancel(row.request);
            }
        }
    }

    /// Ends the requests of a step that was not launched.
    pub(crate) fn refuse(&mut self, requests: &[u64], error: &Error) {
        for id in requests {
            if let Some(running) = self.running.get(id) {
                running.answer.send(Err(error.clone().into())).ok();
            }
            self.cancel(*id);
        }
    }

    /// Ends a request, if it has not ended.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.waiting.retain(|waiting| waiting.id != id);
        if let Some(Running { row, .. }) = self.running.remove(&id) {
            self.free_slots.push(row.slot);
            self.free_blocks.extend_from_slice(&row.blocks);
        }
    }

    /// Ends all requests.
    pub(crate) fn fail(self, error: &Error) {
        let running = self.running.into_values().map(|it| it.answer);
        for answer in self.waiting.into_iter().map(|it| it.answer).chain(running) {
            answer.send(Err(error.clone().into())).ok();
        }
    }
}

/// Blocks for its prompt and all new tokens; the last one needs no place.
pub(crate) fn blocks_of(request: &Request) -> usize {
    (request.ids.len() + request.new - 1).div_ceil(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A schedule with so many blocks, and how a request for a prompt of so many tokens and as many new ones enters it.
    fn schedule(blocks: usize) -> (Schedule, impl Fn(&mut Schedule, usize, usize) -> u64) {
        let limits = Limits { streams: 8, prompt_tokens: 64, blocks, waiting: 80 };
        let (answer, received) = tokio::sync::mpsc::unbounded_channel();
        let enter = move |schedule: &mut Schedule, len, new| {
            let _is_open = &received;
            let sampling = Sampling::default();
            let request = Request { ids: vec![0; len], new, stop: None, sampling };
            schedule.enter(request, answer.clone())
        };
        (Schedule::new(limits), enter)
    }

    #[test]
    fn prompts_starve_nobody() {
        let (mut schedule, enter) = schedule(80);
        let running = enter(&mut schedule, 64, 100);
        let mut kinds = Vec::new();
        for _ in 0..40 {
            enter(&mut schedule, 64, 1);
            let step = schedule.next_step().expect("one runs");
            kinds.push(step.rows.iter().any(|row| row.request == running));
            schedule.deliver(&step, &vec![0; step.rows.len()]);
        }
        // Its prompt; then each second step has its next token.
        assert_eq!(kinds, (0..40).map(|at| at == 0 || at % 2 == 1).collect::<Vec<_>>());
    }

    #[test]
    fn a_large_one_is_passed_so_often() {
        let (mut schedule, enter) = schedule(8);
        // Six of eight blocks, for a while.
        let running = enter(&mut schedule, 16, 81);
        let large = [enter(&mut schedule, 48, 1), enter(&mut schedule, 49, 1)];
        let mut started = Vec::new();
        for step in 0..200 {
            // Two small ones keep waiting.
            if step % 2 == 0 {
                enter(&mut schedule, 16, 1);
            }
            let Some(step) = schedule.next_step() else { continue };
            let new = step.rows.iter().filter(|row| !row.prompt.is_empty());
            started.extend(new.map(|row| row.request));
            schedule.deliver(&step, &vec![0; step.rows.len()]);
        }
        // Eight small ones, then both large ones, and all others behind them.
        let small = large[1] + 1..;
        let expected = [running].into_iter().chain(small.clone().take(PASSES as usize));
        let expected = expected.chain(large).chain(small.skip(PASSES as usize));
        let expected: Vec<_> = expected.take(started.len()).collect();
        assert!(started.len() > 50, "{started:?}");
        assert_eq!(started, expected);
    }
}
