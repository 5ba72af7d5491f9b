//! Gathers requests of `/embed` into micro-batches: one launch for many.
//!
//! No request waits for a batch to fill up: a batch waits for a permit of the pool, as a request of `/matmul` does, and takes
//! the requests that are there when it has one. So a lone request goes at once, batches grow with the load, and
//! requests that were given up or are too late are in none.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::metrics::histogram;
use gpu_await::{Batch, BatchWorker, Batcher, Error, PooledStream, Result, StreamPool};

use crate::embed_mean::WIDTH;
use crate::model::{Model, Times};

/// Requests of a batch, and the tokens of all of them.
const MAX_BATCH: usize = 64;
const MAX_TOKENS: u64 = 8192;
/// Batches under way at once: one is computed while the next is copied.
const IN_FLIGHT: usize = 2;

/// A request that was checked.
pub(crate) struct Embed {
    pub tokens: Vec<u32>,
    pub since: Instant,
    /// Dropped when its batch has a stream.
    pub waits: Box<dyn Send + Sync>,
}

/// Its result, and how long it waited and its batch took.
pub(crate) struct Embedded {
    pub embedding: [f32; WIDTH],
    pub times: Times,
}

/// The batcher, and the task that it needs. Callers wait up to `patience` for their answers.
pub(crate) fn start(
    pool: &StreamPool,
    model: Arc<Model>,
    max_waiting: usize,
    patience: Duration,
) -> (Batcher<Embed, Embedded, Error>, BatchWorker) {
    Batcher::builder()
        .max_len(MAX_BATCH)
        .max_weight(MAX_TOKENS)
        .max_in_flight(IN_FLIGHT)
        .max_waiting(max_waiting)
        .patience(patience)
        // One thread that wakes all callers would be late for some of them.
        .spawn(|batch| drop(tokio::spawn(batch)))
        .pool(pool)
        .build(move |stream, requests| {
            let model = model.clone();
            async move { run(&stream, &model, requests).await }
        })
}

async fn run(
    stream: &PooledStream,
    model: &Model,
    requests: Batch<Embed>,
) -> Result<Vec<Result<Embedded>>> {
    let has_a_stream = |Embed { tokens, since, waits }: Embed| {
        drop(waits);
        (tokens, since.elapsed())
    };
    let (tokens, queues): (Vec<_>, Vec<_>) = requests.into_iter().map(has_a_stream).unzip();
    queues.iter().for_each(|queue| histogram!("server_queue_seconds").record(*queue));
    histogram!("server_batch_requests").record(tokens.len() as f64);

    let tokens: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
    let (rows, gpu) = model.embed(stream, &tokens).await?;
    histogram!("server_gpu_seconds", "route" => "/embed").record(gpu);

    let each = rows.as_chunks::<WIDTH>().0.iter().zip(queues);
    Ok(each
        .map(|(row, queue)| Ok(Embedded { embedding: *row, times: Times { queue, gpu } }))
        .collect())
}
