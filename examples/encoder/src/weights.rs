//! A model's folder, as `transformers` writes it: `config.json`, and `model.safetensors`, which is mapped.
//!
//! All of the file's header is checked before a byte is used, by the format's own library; a [`LoadError`] names the file, or the tensor.

use std::fs::File;
use std::path::{Path, PathBuf};

use gpu_await::half::f16;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors, TensorInfo};
use serde::{Deserialize, Serialize};

use crate::kernels::{HEAD_WIDTHS, LANES, MAX_HIDDEN, Precision, put};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LoadError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    #[error("config.json: `{field}` is {found}; this program has {supported}")]
    Config { field: &'static str, found: String, supported: String },
    #[error("{}: {error}", path.display())]
    Header { path: PathBuf, error: SafeTensorError },
    #[error("no tensor `{tensor}`, nor `{prefix}{tensor}`")]
    Missing { tensor: String, prefix: &'static str },
    #[error("tensor `{tensor}` has the shape {found:?}; the config makes it {expected:?}")]
    Shape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("tensor `{tensor}` has elements of type {found}; this program reads F32 and F16")]
    Dtype { tensor: String, found: Dtype },
    #[error("{0}")]
    Device(#[from] gpu_await::Error),
    #[error("{0}")]
    Thread(#[from] std::io::Error),
}

/// What `config.json` says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are those of `transformers`")]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub max_position_embeddings: usize,
    pub type_vocab_size: usize,
    pub layer_norm_eps: f32,
    pub hidden_act: String,
    #[serde(default = "absolute")]
    pub position_embedding_type: String,
}

fn absolute() -> String {
    "absolute".into()
}

/// A field of a config: its name, what it is, whether the program has that, and what it has.
pub struct Check(&'static str, String, bool, String);

#[expect(missing_docs, reason = "the names say it")]
impl Check {
    pub fn is(field: &'static str, found: impl ToString, expected: &str) -> Check {
        let found = found.to_string();
        let is_good = found == expected;
        Check(field, found, is_good, expected.into())
    }

    pub fn within(field: &'static str, found: usize, step: usize, most: usize) -> Check {
        let is_good = found != 0 && found.is_multiple_of(step) && found <= most;
        Check(field, found.to_string(), is_good, format!("multiples of {step} up to {most}"))
    }

    pub fn positive(field: &'static str, found: f32) -> Check {
        let is_good = found.is_finite() && found > 0.0;
        Check(field, found.to_string(), is_good, "positive numbers".into())
    }

    pub fn heads(field: &'static str, heads: usize, hidden: usize) -> Check {
        let is_good = HEAD_WIDTHS.iter().any(|width| heads.checked_mul(*width) == Some(hidden));
        Check(field, heads.to_string(), is_good, format!("heads of {HEAD_WIDTHS:?}"))
    }

    /// The first that the program does not have is the error.
    pub fn all(checks: impl IntoIterator<Item = Check>) -> Result<(), LoadError> {
        match checks.into_iter().find(|Check(_, _, is_good, _)| !is_good) {
            Some(Check(field, found, _, supported)) => {
                Err(LoadError::Config { field, found, supported })
            }
            None => Ok(()),
        }
    }
}

/// What differs between models' folders.
pub trait ModelConfig: Sized {
    /// What may be in front of the names of tensors.
    const PREFIX: &'static str;

    /// Parses and checks `config.json`.
    ///
    /// # Errors
    /// [`LoadError::Json`]; [`LoadError::Config`]: a value that the program does not have.
    fn parse(json: &[u8]) -> Result<Self, LoadError>;
}

impl ModelConfig for Config {
    const PREFIX: &'static str = "bert.";

    fn parse(json: &[u8]) -> Result<Config, LoadError> {
        let config: Config = serde_json::from_slice(json)?;
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        // So that no number of elements, nor of bytes, overflows.
        let most = u32::MAX as usize / hidden.max(1);
        Check::all([
            Check::positive("layer_norm_eps", config.layer_norm_eps),
            Check::is("hidden_act", &config.hidden_act, "gelu"),
            Check::is("position_embedding_type", &config.position_embedding_type, "absolute"),
            Check::within("hidden_size", hidden, LANES, MAX_HIDDEN),
            Check::heads("num_attention_heads", heads, hidden),
            Check::within("intermediate_size", config.intermediate_size, 8, most),
            Check::within("vocab_size", config.vocab_size, 1, most),
            Check::within("num_hidden_layers", config.num_hidden_layers, 1, most),
            Check::within("max_position_embeddings", config.max_position_embeddings, 1, most),
            Check::within("type_vocab_size", config.type_vocab_size, 1, most),
        ])?;
        Ok(config)
    }
}

/// A model's folder, opened.
pub struct Folder<C = Config> {
    /// Its configuration.
    pub config: C,
    file: memmap2::Mmap,
    tensors: Metadata,
    /// Where the first one begins.
    start: usize,
}

/// The bytes of a tensor.
#[expect(missing_docs, reason = "the names say it")]
pub enum Tensor<'f> {
    F32(&'f [u8]),
    F16(&'f [u8]),
}

impl<C: ModelConfig> Folder<C> {
    /// Maps the file and checks its header.
    ///
    /// # Errors
    /// [`LoadError`]: a file that cannot be read, a config of another kind of model, a header that is none.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join("config.json");
        let json = std::fs::read(&path).map_err(|error| LoadError::File { path, error })?;
        Self::with(folder, C::parse(&json)?)
    }

    /// [`open`](Self::open) of one whose config was read before.
    ///
    /// # Errors
    /// [`LoadError`]: a file that cannot be read, a header that is none.
    pub(crate) fn with(folder: &Path, config: C) -> Result<Self, LoadError> {
        let path = &folder.join("model.safetensors");
        let named = |path: &Path, error| LoadError::File { path: path.to_owned(), error };
        let file = File::open(path).map_err(|error| named(path, error))?;
        // SAFETY: nobody writes the file of a model that is being served; whoever did would change weights, which any bits are.
        let file = unsafe { memmap2::Mmap::map(&file) }.map_err(|error| named(path, error))?;

        let (header_len, tensors) = SafeTensors::read_metadata(&file)
            .map_err(|error| LoadError::Header { path: path.clone(), error })?;
        Ok(Folder { config, file, tensors, start: 8 + header_len })
    }

    /// The tensor of that name, with or without [`PREFIX`](ModelConfig::PREFIX) in front, and of that shape.
    ///
    /// # Errors
    /// [`LoadError`]: there is none, or it is another one.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        let prefix = C::PREFIX;
        let found = self.tensors.info(name);
        let found = found.or_else(|| self.tensors.info(&format!("{prefix}{name}")));
        let tensor = name.to_owned();
        let Some(TensorInfo { dtype, shape: found, data_offsets: (begin, end) }) = found else {
            return Err(LoadError::Missing { tensor, prefix });
        };
        if found != shape {
            let (expected, found) = (shape.to_vec(), found.clone());
            return Err(LoadError::Shape { tensor, expected, found });
        }
        let bytes = &self.file[self.start..][*begin..*end];
        match dtype {
            Dtype::F32 => Ok(Tensor::F32(bytes)),
            Dtype::F16 => Ok(Tensor::F16(bytes)),
            _ => Err(LoadError::Dtype { tensor, found: *dtype }),
        }
    }
}

impl Tensor<'_> {
    /// Writes the elements from `start` on, as many as `to` has.
    pub(crate) fn read<T: Precision>(&self, start: usize, to: &mut [T]) {
        let (Tensor::F32(bytes) | Tensor::F16(bytes)) = self;
        let width = if matches!(self, Tensor::F32(_)) { 4 } else { 2 };
        // Bytes, as a file may align its tensors as it likes.
        let bytes = &bytes[start * width..][..to.len() * width];
        if width == size_of::<T>() {
            bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
        } else if width == 4 {
            put(to, bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
        } else {
            put(to, bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()));
        }
    }
}
