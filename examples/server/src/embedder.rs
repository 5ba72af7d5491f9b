//! Gathers requests of `/embed` into micro-batches: one launch for many.
//!
//! Nobody waits for a batch to fill up: requests are gathered while as many batches as may be are under
//! way, so a lone request goes at once and batches grow with the load. A batch takes one permit of the
//! pool, and with it a stream, as a request of `/matmul` does.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::{Batcher, Error, Result, StreamPool};

use crate::embed_mean::WIDTH;
use crate::metrics;
use crate::model::Model;

const MAX_BATCH: usize = 64;
/// Batches under way at once: one is computed while the next is copied.
const IN_FLIGHT: usize = 2;

/// A request that was checked.
pub(crate) struct Embed {
    pub tokens: Vec<u32>,
    pub since: Instant,
}

/// Its result, and how long it waited and its batch took.
pub(crate) struct Embedded {
    pub embedding: [f32; WIDTH],
    pub queue: Duration,
    pub gpu: Duration,
}

/// The batcher, and the task that it needs.
pub(crate) fn start(
    pool: StreamPool,
    model: Arc<Model>,
    max_waiting: usize,
) -> (Batcher<Embed, Embedded, Error>, impl Future<Output = ()> + Send + 'static) {
    Batcher::builder().max_len(MAX_BATCH).max_in_flight(IN_FLIGHT).max_waiting(max_waiting).build(
        move |requests: Vec<Embed>| {
            let (pool, model) = (pool.clone(), model.clone());
            async move { run(&pool, &model, requests).await }
        },
    )
}

async fn run(
    pool: &StreamPool,
    model: &Model,
    requests: Vec<Embed>,
) -> Result<Vec<Result<Embedded>>> {
    let stream = pool.acquire().await?;
    let queues: Vec<_> = requests.iter().map(|request| request.since.elapsed()).collect();
    queues.iter().copied().for_each(metrics::queued);
    metrics::batch(requests.len());

    let tokens: Vec<&[u32]> = requests.iter().map(|request| &request.tokens[..]).collect();
    let (rows, gpu) = model.embed(&stream, &tokens).await?;
    metrics::on_device("/embed", gpu);

    let each = rows.as_chunks::<WIDTH>().0.iter().zip(queues);
    Ok(each.map(|(row, queue)| Ok(Embedded { embedding: *row, queue, gpu })).collect())
}
