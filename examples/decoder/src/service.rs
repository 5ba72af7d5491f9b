//! Requests of many clients, in the steps of one worker.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_await::{Error, ErrorDetail, Result};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::kernels::Launches;
use crate::model::Model;
use crate::schedule::{Broken, Request, Schedule, blocks_of};
use crate::steps::{Limits, Steps};

/// Logits divided by less would not be finite.
const LEAST_TEMPERATURE: f32 = 1e-4;

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refused {
    #[error("a prompt of {found} tokens: 1 to {most} are possible")]
    Prompt { found: usize, most: usize },
    #[error("{found} new tokens: 1 to {most} are possible behind this prompt")]
    New { found: usize, most: usize },
    #[error("id {found}: the vocabulary has {vocabulary}")]
    Id { found: u32, vocabulary: u32 },
    #[error("it needs {needed} blocks of the cache, which has {blocks}")]
    Blocks { needed: usize, blocks: usize },
    #[error("the temperature is {found}, and must be 0, or a number from {LEAST_TEMPERATURE} on")]
    Temperature { found: f32 },
    #[error("{waiting} requests wait already")]
    Waiting { waiting: usize },
    #[error("the worker has ended")]
    Ended,
}

/// A model behind a worker. Cheap to clone.
#[derive(Clone)]
pub struct Decoder {
    shared: Arc<Shared>,
    limits: Limits,
    positions: usize,
    vocabulary: u32,
}

struct Shared {
    /// `None` when the worker has ended. Never held over an await.
    schedule: Mutex<Option<Schedule>>,
    /// A request has come.
    came: Notify,
}

/// The tokens of a request, as they come. Dropped, it cancels the request: its blocks are free at once.
pub struct Tokens {
    shared: Arc<Shared>,
    id: u64,
    received: UnboundedReceiver<Result<u32, Broken>>,
}

/// Launches steps and delivers their tokens; to be spawned. Dropped, it fails all requests.
struct Worker<T: Launches> {
    shared: Arc<Shared>,
    steps: Steps<T>,
}

impl Shared {
    fn schedule(&self) -> MutexGuard<'_, Option<Schedule>> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, error: &Error) {
        if let Some(schedule) = self.schedule().take() {
            schedule.fail(error);
        }
    }
}

impl Decoder {
    /// Makes the cache, and the worker, which is to be spawned and runs until it is dropped or the device fails.
    ///
    /// # Errors
    /// Out of device memory; the device is lost or closed.
    pub async fn new<T: Launches>(
        model: &Model<T>,
        limits: Limits,
        is_warmed: bool,
    ) -> Result<(Decoder, impl Future<Output = Result<()>> + Send + use<T>)> {
        let mut steps = Steps::new(model, &limits).await?;
        if is_warmed {
            steps.warm(&limits).await?;
        }
        let schedule = Mutex::new(Some(Schedule::new(limits)));
        let shared = Arc::new(Shared { schedule, came: Notify::new() });
        let decoder = Decoder {
            shared: shared.clone(),
            limits,
            positions: model.config().n_positions,
            vocabulary: model.config().vocab_size as u32,
        };
        Ok((decoder, Worker { shared, steps }.run()))
    }

    /// Enters a request. It joins the other ones in the next step for which there are blocks.
    ///
    /// # Errors
    /// [`Refused`]: it can never run, or too many wait.
    pub fn generate(&self, request: Request) -> Result<Tokens, Refused> {
        let Request { ids, new, sampling, .. } = &request;
        let most = self.limits.prompt_tokens.min(self.positions);
        if ids.is_empty() || ids.len() > most {
            return Err(Refused::Prompt { found: ids.len(), most });
        }
        // The last token needs no place.
        let most = self.positions - ids.len() + 1;
        if *new == 0 || *new > most {
            return Err(Refused::New { found: *new, most });
        }
        if let Some(found) = ids.iter().find(|id| **id >= self.vocabulary) {
            return Err(Refused::Id { found: *found, vocabulary: self.vocabulary });
        }
        let found = sampling.temperature;
        if !(found == 0.0 || found.is_finite() && found >= LEAST_TEMPERATURE) {
            return Err(Refused::Temperature { found });
        }
        let (needed, blocks) = (blocks_of(&request), self.limits.blocks);
        if needed > blocks {
            return Err(Refused::Blocks { needed, blocks });
        }
        let (answer, received) = unbounded_channel();
        let id = {
            let mut schedule = self.shared.schedule();
            let schedule = schedule.as_mut().ok_or(Refused::Ended)?;
            if schedule.waiting() >= self.limits.waiting {
                return Err(Refused::Waiting { waiting: schedule.waiting() });
            }
            schedule.enter(request, answer)
        };
        self.shared.came.notify_one();
        Ok(Tokens { shared: self.shared.clone(), id, received })
    }

    /// Whether the worker has not ended.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.shared.schedule().is_some()
    }

    /// How many blocks of the cache no request has; 0 when the worker has ended.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.shared.schedule().as_ref().map_or(0, Schedule::free_blocks)
    }

    /// How many requests have not started, and how many blocks those have that have; 0 when the worker has ended.
    pub(crate) fn waiting_and_used_blocks(&self) -> [usize; 2] {
        let schedule = self.shared.schedule();
        let each = |it: &Schedule| [it.waiting(), self.limits.blocks - it.free_blocks()];
        schedule.as_ref().map_or([0; 2], each)
    }
}

impl Tokens {
    /// The next token; `None` behind the last one. Dropped, the future loses nothing.
    ///
    /// # Errors
    /// Logits that are not finite; the device failed; the worker was dropped.
    pub async fn next(&mut self) -> Option<Result<u32, Broken>> {
        self.received.recv().await
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        if let Some(schedule) = self.shared.schedule().as_mut() {
            schedule.cancel(self.id);
        }
        // Blocks may be free that the next one waits for.
        self.shared.came.notify_one();
    }
}

impl<T: Launches> Worker<T> {
    async fn run(mut self) -> Result<()> {
        let ended = self.steps().await;
        ended.inspect_err(|error| self.shared.end(error))
    }

    async fn steps(&mut self) -> Result<()> {
        loop {
            let step = match self.steps.in_flight() {
                0 | 1 => self.shared.schedule().as_mut().and_then(Schedule::next_step),
                _ => None,
            };
            if let Some(step) = step {
                let requests: Vec<u64> = step.rows.iter().map(|row| row.request).collect();
                match self.steps.launch(step).await {
                    // For a new shape. What is in flight, and other requests, need none.
                    Err(error) if matches!(error.detail(), ErrorDetail::NoThread { .. }) => {
                        if let Some(schedule) = self.shared.schedule().as_mut() {
                            schedule.refuse(&requests, &error);
                        }
                    }
                    launched => launched?,
                }
            } else if let Some((step, tokens)) = self.steps.collect().await? {
                if let Some(schedule) = self.shared.schedule().as_mut() {
                    schedule.deliver(&step, &tokens);
                }
            } else {
                tokio::select! {
                    () = self.shared.came.notified() => {}
                    lost = self.steps.lost() => return Err(lost),
                }
            }
        }
    }
}

impl<T: Launches> Drop for Worker<T> {
    fn drop(&mut self) {
        self.shared.end(&ErrorDetail::Closed { device: "the worker".into() }.into());
    }
}
