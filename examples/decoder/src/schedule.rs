//! The scheduler, without I/O or device: it decides which sequences run in the next step, and assigns slots and blocks to requests in the queue.
//!
//! | a request is | it has | until |
//! |---|---|---|
//! | waiting | its place in the queue | there is a slot, and blocks for its prompt and all its new tokens: first come, first served |
//! | running | a slot and its blocks | its last token or its stop token is delivered, or it is cancelled |
//!
//! A request runs in steps while its earlier tokens are still on their way to it, so that after a stop token, or when it is cancelled, steps in flight still
//! have it. They write to blocks that may have another owner by then, whose steps are behind them on the stream.
//!
//! # Invariants
//! 1. Blocks and slots are free or have one owner (`blocks_come_back_whenever_a_client_leaves`).
//! 2. Behind a step of prompts, running requests get a token (`prompts_starve_nobody`).
//! 3. A token is delivered to the request that it was computed for, or to nobody (`joining_and_leaving`).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use gpu_await::Error;
use tokio::sync::mpsc::UnboundedSender;

use crate::kernels::{BLOCK, NONE};
use crate::steps::{Limits, Row, Sampling, Step};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's token ids.
    pub ids: Vec<u32>,
    /// New tokens, at most.
    pub new: usize,
    /// The last token, if it comes earlier.
    pub stop: Option<u32>,
    /// How tokens are chosen.
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
    waiting: VecDeque<(u64, Request, Answer)>,
    running: BTreeMap<u64, Running>,
    entered: u64,
    /// The last step was.
    was_of_prompts: bool,
}

struct Running {
    answer: Answer,
    slot: u32,
    blocks: Arc<[u32]>,
    prompt_len: usize,
    new: usize,
    stop: Option<u32>,
    sampling: Sampling,
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
        self.waiting.push_back((self.entered, request, answer));
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
        let (mut rows, mut tokens) = (Vec::new(), 0);
        while let Some((_, request, _)) = self.waiting.front() {
            let (prompt_len, blocks) = (request.ids.len(), blocks_of(request));
            let fits = tokens + prompt_len <= self.limits.prompt_tokens;
            if !fits || self.free_slots.is_empty() || blocks > self.free_blocks.len() {
                break;
            }
            let (Some((id, request, answer)), Some(slot)) =
                (self.waiting.pop_front(), self.free_slots.pop())
            else {
                break;
            };
            let blocks = self.free_blocks.split_off(self.free_blocks.len() - blocks);
            let Request { ids, new, stop, sampling } = request;
            let (blocks, launched, delivered): (Arc<[u32]>, _, _) = (blocks.into(), 1, 0);
            tokens += prompt_len;
            rows.push(Row {
                request: id,
                slot,
                prompt: ids,
                position: 0,
                blocks: blocks.clone(),
                sampling,
            });
            self.running.insert(
                id,
                Running {
                    answer,
                    slot,
                    blocks,
                    prompt_len,
                    new,
                    stop,
                    sampling,
                    launched,
                    delivered,
                },
            );
        }
        rows
    }

    fn next_tokens(&mut self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (id, running) in self.running.iter_mut().filter(|(_, it)| it.launched < it.new) {
            rows.push(Row {
                request: *id,
                slot: running.slot,
                prompt: Vec::new(),
                position: (running.prompt_len + running.launched - 1) as u32,
                blocks: running.blocks.clone(),
                sampling: running.sampling,
            });
            running.launched += 1;
        }
        rows
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

    /// Ends a request, if it has not ended.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.waiting.retain(|(waiting, ..)| *waiting != id);
        if let Some(Running { slot, blocks, .. }) = self.running.remove(&id) {
            self.free_slots.push(slot);
            self.free_blocks.extend_from_slice(&blocks);
        }
    }

    /// Ends all requests.
    pub(crate) fn fail(&mut self, error: &Error) {
        for (id, answer) in self
            .waiting
            .iter()
            .map(|(id, _, answer)| (*id, answer.clone()))
            .chain(self.running.iter().map(|(id, it)| (*id, it.answer.clone())))
            .collect::<Vec<_>>()
        {
            answer.send(Err(error.clone().into())).ok();
            self.cancel(id);
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

    #[test]
    fn prompts_starve_nobody() {
        let mut schedule =
            Schedule::new(Limits { streams: 8, prompt_tokens: 4, blocks: 80, waiting: 80 });
        let (answer, _received) = tokio::sync::mpsc::unbounded_channel();
        let enter = |schedule: &mut Schedule, new| {
            let sampling = Sampling::default();
            schedule.enter(Request { ids: vec![0; 4], new, stop: None, sampling }, answer.clone())
        };
        let running = enter(&mut schedule, 100);
        let mut kinds = Vec::new();
        for _ in 0..40 {
            enter(&mut schedule, 1);
            let step = schedule.next_step().expect("one runs");
            kinds.push(step.rows.iter().any(|row| row.request == running));
            schedule.deliver(&step, &vec![0; step.rows.len()]);
        }
        // Its prompt; then each second step has its next token.
        assert_eq!(kinds, (0..40).map(|at| at == 0 || at % 2 == 1).collect::<Vec<_>>());
    }
}
