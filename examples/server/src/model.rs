//! The GPU work of the service: what is loaded once, and one plain function a model.
//!
//! A forward function puts its work on a stream and returns its one future, which the handler awaits. So the same function serves a
//! request, a batch of requests, a test and a bench, and nothing in it knows of HTTP.
#![forbid(unsafe_code)]

use std::time::Duration;

use gpu_await::{Device, Frozen, Op, PinnedBuffer, Result, Stream, kernels};
use serde::{Deserialize, Serialize};

use crate::embed_mean::{WIDTH, embed_mean};

/// Tokens that there are.
pub(crate) const TOKENS: u32 = 4096;

/// How long a request waited for its stream, and how long the device was at work on it. A handler
/// leaves it in its response.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Times {
    pub queue: Duration,
    pub gpu: Duration,
}

/// Code and weights on one device. Shared by all requests: nothing in it changes.
pub(crate) struct Model {
    matmul: kernels::matmul_tiled,
    embed: embed_mean,
    /// Frozen, so that streams read it side by side without a wait or an entry for each reader.
    table: Frozen<f32>,
}

impl Model {
    /// Loads kernels and weights. Before serving: on a GPU loading waits for everything that runs.
    ///
    /// # Errors
    /// Code that does not load; out of device memory.
    pub(crate) async fn load(device: &Device) -> Result<Model> {
        let stream = device.stream()?;
        let (matmul, embed) =
            (kernels::matmul_tiled::load(device).await?, embed_mean::load(device).await?);
        let width = WIDTH as u32;
        let value = |i: u32, j: u32| ((i * 31 + j * 17 + i * j) % 101) as f32 / 101.0 - 0.5;
        let table: Vec<f32> = (0..TOKENS * width).map(|at| value(at / width, at % width)).collect();
        let table = stream.upload(table).queued()?.freeze().await?;
        let model = Model { matmul, embed, table };
        // The first launch of a kernel and the first copies cost more than the others: pay now.
        let (inputs, c) = (device.pinned_async(512).await?, device.pinned_async(256).await?);
        model.matmul(&stream, [16; 3], inputs, c).await?;
        model.embed(&stream, &[&[0]]).await?;
        Ok(model)
    }

    /// Queues `c = a b` and returns the future of `c[m, n]`, whatever was there, and of the time that it took on the device. `a[m, k]`
    /// and `b[k, n]` are one behind the other.
    pub(crate) fn matmul(
        &self,
        stream: &Stream,
        [m, k, n]: [usize; 3],
        inputs: PinnedBuffer<f32>,
        c: PinnedBuffer<f32>,
    ) -> Op<(PinnedBuffer<f32>, Duration)> {
        stream.timed(|q| {
            let inputs = q.upload(inputs)?;
            let mut product = q.empty(m * n)?;
            let (a, b) = (inputs.slice(..m * k)?, inputs.slice(m * k..)?);
            self.matmul.launch(q, &a, &b, &mut product, m as u32, n as u32, k as u32)?;
            Ok(q.download_into(&product, c)?)
        })
    }

    /// Queues the embeddings of several requests as one launch, and returns the future of `WIDTH` numbers for each, one behind the
    /// other, and of the time on the device.
    pub(crate) fn embed(
        &self,
        stream: &Stream,
        requests: &[&[u32]],
    ) -> Op<(PinnedBuffer<f32>, Duration)> {
        let mut starts = vec![0];
        for request in requests {
            starts.push(starts[starts.len() - 1] + request.len() as u32);
        }
        stream.timed(|q| {
            let mut out = q.empty(WIDTH * requests.len())?;
            let (tokens, starts) = (q.upload(requests.concat())?, q.upload(starts)?);
            self.embed.launch(q, &tokens, &starts, &self.table, &mut out)?;
            q.download(&out)
        })
    }
}
