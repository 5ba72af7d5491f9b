//! From the mapped file to the device: a few threads convert parts into pinned memory while others are on the link.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use gpu_await::{Device, DeviceBuffer, Result};

use crate::kernels::Precision;
use crate::model::{Affine, Layer, Weights};
use crate::weights::{Config, Folder, LoadError, Tensor};

/// Elements that a thread has in pinned memory.
const PART: usize = 1 << 20;
const MOST_THREADS: usize = 8;

/// The weights on the device, one behind the other in the order of [`pieces`].
pub(crate) struct Uploaded<T>(DeviceBuffer<T>);

struct Piece<'f> {
    tensor: Tensor<'f>,
    len: usize,
    /// Is added to each row.
    row: Option<Tensor<'f>>,
}

/// All tensors of the model, in the order in which [`Uploaded::freeze`] takes them apart.
fn pieces(folder: &Folder) -> Result<Vec<Piece<'_>>, LoadError> {
    let Config { hidden_size: hidden, intermediate_size: wide, .. } = folder.config;
    let mut pieces = Vec::new();
    let mut add = |name: &str, shape: &[usize], row| {
        let tensor = folder.tensor(name, shape)?;
        pieces.push(Piece { tensor, len: shape.iter().product(), row });
        Ok::<_, LoadError>(())
    };
    add("embeddings.word_embeddings.weight", &[folder.config.vocab_size, hidden], None)?;
    let types = folder.tensor(
        "embeddings.token_type_embeddings.weight",
        &[folder.config.type_vocab_size, hidden],
    )?;
    let places = [folder.config.max_position_embeddings, hidden];
    add("embeddings.position_embeddings.weight", &places, Some(types))?;
    add("embeddings.LayerNorm.weight", &[hidden], None)?;
    add("embeddings.LayerNorm.bias", &[hidden], None)?;
    for layer in 0..folder.config.num_hidden_layers {
        let parts: [(&[&str], [usize; 2]); 4] = [
            (
                &["attention.self.query", "attention.self.key", "attention.self.value"],
                [hidden, hidden],
            ),
            (&["attention.output.dense"], [hidden, hidden]),
            (&["intermediate.dense"], [wide, hidden]),
            (&["output.dense"], [hidden, wide]),
        ];
        for (names, shape) in parts {
            for name in names {
                add(&format!("encoder.layer.{layer}.{name}.weight"), &shape, None)?;
            }
            for name in names {
                add(&format!("encoder.layer.{layer}.{name}.bias"), &shape[..1], None)?;
            }
        }
        for name in ["attention.output.LayerNorm", "output.LayerNorm"] {
            add(&format!("encoder.layer.{layer}.{name}.weight"), &[hidden], None)?;
            add(&format!("encoder.layer.{layer}.{name}.bias"), &[hidden], None)?;
        }
    }
    Ok(pieces)
}

/// Uploads all weights.
///
/// # Blocking
/// Yes, until all is on the device.
///
/// # Errors
/// A tensor that is missing or not of the config's shape; out of device or pinned memory.
pub(crate) fn upload<T: Precision>(
    device: &Device,
    folder: &Folder,
) -> Result<Uploaded<T>, LoadError> {
    let pieces = pieces(folder)?;
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
    let width = folder.config.hidden_size;
    let work = || -> Result<()> {
        loop {
            // The lock is released before the part is read.
            let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((piece, at, mut to)) = next else { return Ok(()) };
            let mut pinned = stream.pinned(to.len())?;
            piece.tensor.read(at, &mut pinned);
            if let Some(row) = &piece.row {
                add_row(row, at, width, &mut pinned);
            }
            // Its end is awaited, so that the pinned memory of so many parts is all there is.
            drop(stream.upload_into(pinned, &mut to).synchronize()?);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<Result<()>>()
    })?;
    drop(parts);
    Ok(Uploaded(buffer))
}

/// Adds the first row of a table to elements of another, of which `to` has those from `at` on.
fn add_row<T: Precision>(table: &Tensor<'_>, at: usize, width: usize, to: &mut [T]) {
    let mut row = vec![0.0f32; width];
    table.read(0, &mut row);
    for (i, to) in to.iter_mut().enumerate() {
        *to = T::from_f32(to.to_f32() + row[(at + i) % width]);
    }
}

impl<T: Precision> Uploaded<T> {
    /// Takes it apart.
    ///
    /// # Errors
    /// The device is lost or closed.
    pub(crate) async fn freeze(self, config: &Config) -> Result<Weights<T>> {
        let Config { hidden_size: hidden, intermediate_size: wide, .. } = *config;
        let all = self.0.freeze().await?;
        let mut next = 0..0;
        let mut take = |len: usize| {
            next = Range { start: next.end, end: next.end + len };
            all.part(next.clone())
        };
        let mut affine =
            |weight, bias| -> Result<_> { Ok(Affine { weight: take(weight)?, bias: take(bias)? }) };
        let Affine { weight: words, bias: places } =
            affine(config.vocab_size * hidden, config.max_position_embeddings * hidden)?;
        let norm = affine(hidden, hidden)?;
        let layers = (0..config.num_hidden_layers).map(|_| {
            Ok(Layer {
                qkv: affine(3 * hidden * hidden, 3 * hidden)?,
                project: affine(hidden * hidden, hidden)?,
                up: affine(wide * hidden, wide)?,
                down: affine(hidden * wide, hidden)?,
                middle_norm: affine(hidden, hidden)?,
                norm: affine(hidden, hidden)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Weights { words, places, norm, layers })
    }
}
