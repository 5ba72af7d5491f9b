//! The GPU work of the service: what is loaded once, and one plain function a model.
//!
//! A forward function puts its work on a stream, and its one future is awaited by the handler. So the same function serves a request, a batch of requests, a test and a bench, and nothing
//! in it knows of HTTP.
#![forbid(unsafe_code)]

use std::time::Duration;

use gpu_await::{Device, Frozen, Mapped, Op, PinnedBuffer, Result, Stream, kernels};

use crate::embed_mean::{WIDTH, embed_mean};

/// Tokens that there are.
pub(crate) const TOKENS: u32 = 4096;

/// The longest request of a batch that the kernel reads where the host wrote it. A block walks its tokens one after the other, over the
/// bus: on an H200 a batch takes 19 to 28 us in place and 24 to 32 with copies up to 32 tokens a request, 42 to 49 and 32 to 42 at 128.
const IN_PLACE_TOKENS: usize = 32;

/// Code and weights on one device. Shared by all requests: nothing in it changes.
pub(crate) struct Model {
    matmul: kernels::matmul_tiled,
    embed: embed_mean,
    /// Frozen, so that streams read it side by side without a wait or an entry for each reader.
    table: Frozen<f32>,
}

/// The host memory of one product: pinned, so that copies need no thread and no second copy.
pub(crate) struct Product {
    /// `m`, `k` and `n`.
    pub shape: [usize; 3],
    /// `a[m, k]`.
    pub a: PinnedBuffer<f32>,
    /// `b[k, n]`.
    pub b: PinnedBuffer<f32>,
    /// `c[m, n]`: whatever was there is overwritten.
    pub c: PinnedBuffer<f32>,
}

impl Product {
    /// Copies `a` and `b` into pinned memory; where the device's pool has to grow for that, it does so
    /// off the executor.
    ///
    /// # Errors
    /// Out of pinned memory.
    pub(crate) async fn new(
        device: &Device,
        shape: [usize; 3],
        a: &[f32],
        b: &[f32],
    ) -> Result<Product> {
        let pinned = async |values: &[f32]| -> Result<PinnedBuffer<f32>> {
            let mut pinned = device.pinned_async(values.len()).await?;
            pinned.copy_from_slice(values);
            Ok(pinned)
        };
        let c = device.pinned_async(shape[0] * shape[2]).await?;
        Ok(Product { shape, a: pinned(a).await?, b: pinned(b).await?, c })
    }
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
        let zeros = [0.0; 256];
        let product = Product::new(device, [16; 3], &zeros, &zeros).await?;
        model.matmul(&stream, product).await?;
        model.embed(&stream, &[&[0]]).await?;
        model.embed_copied(&stream, vec![0], vec![0, 1]).await?;
        Ok(model)
    }

    /// Queues `c = a b` and returns the future of `c` and of the time that it took on the device.
    pub(crate) fn matmul(
        &self,
        stream: &Stream,
        product: Product,
    ) -> Op<(PinnedBuffer<f32>, Duration)> {
        let Product { shape: [m, k, n], a, b, c } = product;
        stream.timed(|q| {
            let (a, b) = (q.upload(a)?, q.upload(b)?);
            let mut product = q.empty(m * n)?;
            self.matmul.launch(q, &a, &b, &mut product, m as u32, n as u32, k as u32)?;
            Ok(q.download_into(&product, c)?)
        })
    }

    /// Computes the embeddings of several requests with one launch: `WIDTH` numbers for each, one behind
    /// the other, and the time on the device.
    ///
    /// # Errors
    /// Out of memory; a device that is lost or closed.
    pub(crate) async fn embed(
        &self,
        stream: &Stream,
        requests: &[&[u32]],
    ) -> Result<(PinnedBuffer<f32>, Duration)> {
        let tokens = requests.concat();
        let mut starts = vec![0];
        for request in requests {
            starts.push(starts[starts.len() - 1] + request.len() as u32);
        }
        if requests.iter().all(|request| request.len() <= IN_PLACE_TOKENS) {
            self.embed_in_place(stream, &tokens, &starts).await
        } else {
            self.embed_copied(stream, tokens, starts).await
        }
    }

    /// The kernel reads and writes the host's memory.
    async fn embed_in_place(
        &self,
        stream: &Stream,
        tokens: &[u32],
        starts: &[u32],
    ) -> Result<(PinnedBuffer<f32>, Duration)> {
        let mapped = |values: &[u32]| -> Result<Mapped<u32>> {
            let mut pinned = stream.pinned(values.len())?;
            pinned.copy_from_slice(values);
            Ok(pinned.into_mapped())
        };
        let (tokens, starts) = (mapped(tokens)?, mapped(starts)?);
        let mut out = stream.pinned(WIDTH * (starts.len() - 1))?.into_mapped();
        let launch =
            stream.timed(|q| self.embed.launch(q, &tokens, &starts, &self.table, &mut out));
        let ((), time) = launch.await?;
        Ok((out.into_pinned().await?, time))
    }

    /// The kernel has copies on the device.
    async fn embed_copied(
        &self,
        stream: &Stream,
        tokens: Vec<u32>,
        starts: Vec<u32>,
    ) -> Result<(PinnedBuffer<f32>, Duration)> {
        let batch = stream.timed(|q| {
            let mut out = q.empty(WIDTH * (starts.len() - 1))?;
            let (tokens, starts) = (q.upload(tokens)?, q.upload(starts)?);
            self.embed.launch(q, &tokens, &starts, &self.table, &mut out)?;
            q.download(&out)
        });
        batch.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn in_place_and_copied_are_the_same() -> Result<()> {
        let device = Device::host();
        let (stream, model) = (device.stream()?, Model::load(&device).await?);
        let tokens: Vec<u32> = (0..500).map(|n| n * 7 % TOKENS).collect();
        let starts = vec![0, 1, 1, 130, 500];
        let (in_place, _) = model.embed_in_place(&stream, &tokens, &starts).await?;
        let (copied, _) = model.embed_copied(&stream, tokens.clone(), starts).await?;
        assert_eq!(in_place[..], copied[..]);
        assert!(in_place.iter().any(|value| *value != 0.0));
        Ok(())
    }
}
