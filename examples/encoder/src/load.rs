//! From the mapped file to the device: a few threads convert parts into pinned memory while others are on the link.
#![forbid(unsafe_code)]

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder};

use gpu_await::{Device, DeviceBuffer, Frozen, Result};
use gpu_await_worker::{Failure, Filling, Host};

use crate::kernels::Precision;
use crate::model::Weights;
use crate::program::off_executor;
use crate::weights::{Folder, LoadError, Tensor};

/// Elements that a thread has in pinned memory.
const PART: usize = 1 << 20;
const MOST_THREADS: usize = 8;

/// A tensor to upload.
pub struct Piece<'f> {
    /// Its bytes.
    pub tensor: Tensor<'f>,
    /// Its number of elements.
    pub len: usize,
    /// What is added to each of its rows.
    pub row: Option<Vec<f32>>,
}

/// All tensors of the model, in their order.
pub(crate) fn pieces(folder: &Folder) -> Result<Vec<Piece<'_>>, LoadError> {
    let mut pieces = Vec::new();
    Weights::of(&folder.config, |names, shape| {
        for name in names {
            let (tensor, len) = (folder.tensor(name, shape)?, shape.iter().product());
            pieces.push(Piece { tensor, len, row: None });
        }
        Ok::<_, LoadError>(())
    })?;
    let types = [folder.config.type_vocab_size, folder.config.hidden_size];
    let types = folder.tensor("embeddings.token_type_embeddings.weight", &types)?;
    let mut first = vec![0.0; folder.config.hidden_size];
    types.read(0, &mut first);
    pieces[1].row = Some(first);
    Ok(pieces)
}

/// Uploads tensors, one behind the other, off the executor; nothing changes them any more.
///
/// # Errors
/// What `pieces` says; out of device or pinned memory; the system refuses a thread.
pub async fn frozen<C: Send + Sync + 'static, T: Precision>(
    device: &Device,
    folder: &Arc<Folder<C>>,
    pieces: impl FnOnce(&Folder<C>) -> Result<Vec<Piece<'_>>, LoadError> + Send + 'static,
) -> Result<Frozen<T>, LoadError> {
    let (device, folder) = (device.clone(), folder.clone());
    let uploaded = move || Ok::<_, LoadError>(upload(&device, &pieces(&folder)?)?);
    Ok(off_executor(uploaded).await??.freeze().await?)
}

/// [`frozen`], kept by the front of a worker: its next process maps what this one uploads.
pub(crate) async fn kept<T: Precision>(
    host: &Host,
    folder: &Arc<Folder>,
) -> Result<Frozen<T>, Failure> {
    let len = pieces(folder)?.iter().map(|piece| piece.len).sum();
    let fill = async |kept: &mut Filling<T>| {
        let device = kept.device().clone();
        let loaded = frozen::<_, T>(&device, folder, pieces).await?;
        Ok(device.copy(&loaded, kept.memory()).await?)
    };
    host.keep("weights", len, fill).await
}

fn upload<T: Precision>(device: &Device, pieces: &[Piece<'_>]) -> Result<DeviceBuffer<T>> {
    let stream = device.stream()?;
    let mut buffer = stream.empty::<T>(pieces.iter().map(|piece| piece.len).sum()).queued()?;
    let mut parts = Vec::new();
    let mut rest = buffer.view_mut();
    for (piece, at) in
        pieces.iter().flat_map(|piece| (0..piece.len).step_by(PART).map(move |at| (piece, at)))
    {
        let (part, behind) = rest.split_at_mut(PART.min(piece.len - at))?;
        parts.push((piece, at, part));
        rest = behind;
    }
    let parts = Mutex::new(parts.into_iter());
    let work = || -> Result<()> {
        loop {
            // The lock is released before the part is read.
            let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((piece, at, mut to)) = next else { return Ok(()) };
            let mut pinned = stream.pinned::<T>(to.len())?;
            piece.tensor.read(at, &mut pinned);
            if let Some(row) = &piece.row {
                let each = pinned.iter_mut().zip(row.iter().cycle().skip(at % row.len()));
                each.for_each(|(to, x)| *to = T::from_f32(to.to_f32() + x));
            }
            // Its end is awaited, so that the pinned memory of so many parts is all there is.
            drop(stream.upload_into(pinned, &mut to).synchronize()?);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    thread::scope(|scope| {
        // Whatever threads the system refuses, this one works.
        let more = (1..threads).map_while(|_| Builder::new().spawn_scoped(scope, work).ok());
        let more: Vec<_> = more.collect();
        let ended = work();
        let joined = more.into_iter().map(|thread| thread.join());
        let joined = joined.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)));
        joined.fold(ended, Result::and)
    })?;
    drop(parts);
    Ok(buffer)
}
