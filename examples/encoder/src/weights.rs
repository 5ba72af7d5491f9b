//! A model's folder, as `transformers` writes it: `config.json`, and `model.safetensors`, which is mapped.
//!
//! A safetensors file is the length of its header in 8 bytes, the header in JSON, and the tensors' bytes. All of it is checked before a byte is
//! used: an [`LoadError`] names the file, or the tensor.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use gpu_await::half::f16;
use serde::Deserialize;

use crate::kernels::{HEAD_WIDTHS, LANES, MAX_HIDDEN, Precision};

/// Longer headers are refused, as by the format's own library.
const MOST_HEADER_BYTES: u64 = 100_000_000;

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
    #[error("the safetensors header: {reason}")]
    Header { reason: String },
    #[error("no tensor `{tensor}`, nor `{prefix}{tensor}`")]
    Missing { tensor: String, prefix: &'static str },
    #[error("tensor `{tensor}` has the shape {found:?}; the config makes it {expected:?}")]
    Shape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("tensor `{tensor}` has elements of type {found}; this program reads F32 and F16")]
    Dtype { tensor: String, found: String },
    #[error(
        "tensor `{tensor}`: its bytes {begin}..{end} are not the {expected} of its shape within the file's {available}"
    )]
    Range { tensor: String, begin: usize, end: usize, expected: usize, available: usize },
    #[error(transparent)]
    Device(#[from] gpu_await::Error),
}

/// What `config.json` says.
#[derive(Clone, Debug, Deserialize)]
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

impl Config {
    /// Parses and checks it.
    ///
    /// # Errors
    /// [`LoadError::Json`]; [`LoadError::Config`]: a value that this program does not have.
    pub fn parse(json: &[u8]) -> Result<Config, LoadError> {
        let config: Config = serde_json::from_slice(json)?;
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let is_text =
            |field, found: &String, is: &str| (field, found.clone(), found == is, is.into());
        let is_within = |field, found: usize, step: usize, most: usize| {
            let is_good = found != 0 && found.is_multiple_of(step) && found <= most;
            (field, found.to_string(), is_good, format!("multiples of {step} up to {most}"))
        };
        // So that no number of elements, nor of bytes, overflows.
        let most = u32::MAX as usize / hidden.max(1);
        let has_width = HEAD_WIDTHS.iter().any(|width| heads.checked_mul(*width) == Some(hidden));
        let eps = config.layer_norm_eps;
        let checks = [
            (
                "layer_norm_eps",
                eps.to_string(),
                eps.is_finite() && eps > 0.0,
                "positive numbers".to_owned(),
            ),
            is_text("hidden_act", &config.hidden_act, "gelu"),
            is_text("position_embedding_type", &config.position_embedding_type, "absolute"),
            is_within("hidden_size", hidden, LANES, MAX_HIDDEN),
            (
                "num_attention_heads",
                heads.to_string(),
                has_width,
                format!("heads of {HEAD_WIDTHS:?}"),
            ),
            is_within("intermediate_size", config.intermediate_size, 8, most),
            is_within("vocab_size", config.vocab_size, 1, most),
            is_within("num_hidden_layers", config.num_hidden_layers, 1, most),
            is_within("max_position_embeddings", config.max_position_embeddings, 1, most),
            is_within("type_vocab_size", config.type_vocab_size, 1, most),
        ];
        if let Some((field, found, _, supported)) = checks.into_iter().find(|check| !check.2) {
            return Err(LoadError::Config { field, found, supported });
        }
        Ok(config)
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
        Config::parse(json)
    }
}

/// A model's folder, opened.
pub struct Folder<C = Config> {
    /// Its configuration.
    pub config: C,
    file: memmap2::Mmap,
    /// Where the tensors begin.
    data: usize,
    tensors: HashMap<String, Header>,
}

#[derive(Deserialize)]
struct Header {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// The entries of a header in their order, so that one that comes twice is seen.
struct Named(Vec<(String, serde_json::Value)>);

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Named, D::Error> {
        struct Entries;
        impl<'de> serde::de::Visitor<'de> for Entries {
            type Value = Named;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<M: serde::de::MapAccess<'de>>(
                self,
                mut map: M,
            ) -> Result<Named, M::Error> {
                let mut all = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    all.push(entry);
                }
                Ok(Named(all))
            }
        }
        from.deserialize_map(Entries)
    }
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
        let named = |path: &Path, error| LoadError::File { path: path.to_owned(), error };
        let path = folder.join("config.json");
        let config = C::parse(&std::fs::read(&path).map_err(|error| named(&path, error))?)?;
        let path = folder.join("model.safetensors");
        let file = File::open(&path).map_err(|error| named(&path, error))?;
        // SAFETY: nobody writes the file of a model that is being served; whoever did would change weights, which any bits are.
        let file = unsafe { memmap2::Mmap::map(&file) }.map_err(|error| named(&path, error))?;

        let header = |reason: String| LoadError::Header { reason };
        let len = file.first_chunk::<8>().map(|len| u64::from_le_bytes(*len));
        let len =
            len.ok_or_else(|| header(format!("the file has {} bytes, and needs 8", file.len())))?;
        if len > MOST_HEADER_BYTES || len > file.len() as u64 - 8 {
            return Err(header(format!(
                "it has {len} bytes by its first 8, and the file {}",
                file.len()
            )));
        }
        let data = 8 + len as usize;
        let Named(all) =
            serde_json::from_slice(&file[8..data]).map_err(|error| header(error.to_string()))?;
        let mut tensors: HashMap<String, Header> = HashMap::with_capacity(all.len());
        for (name, value) in all.into_iter().filter(|(name, _)| name != "__metadata__") {
            let tensor = Header::deserialize(value)
                .map_err(|error| header(format!("tensor `{name}`: {error}")))?;
            if tensors.contains_key(&name) {
                return Err(header(format!("tensor `{name}`: named twice")));
            }
            tensors.insert(name, tensor);
        }
        // One behind the other, to the end of the file.
        let mut sorted: Vec<_> = tensors.iter().map(|(name, it)| (it.data_offsets, name)).collect();
        sorted.sort_unstable();
        let (mut last, available) = (0, file.len() - data);
        for ([begin, end], name) in &sorted {
            if *begin != last || end < begin || *end > available {
                return Err(header(format!(
                    "tensor `{name}`: its bytes {begin}..{end} begin at {last}, and end within the file's {available}"
                )));
            }
            last = *end;
        }
        if last != available {
            return Err(header(format!("its tensors have {last} bytes, and the file {available}")));
        }
        Ok(Folder { config, file, data, tensors })
    }

    /// The tensor of that name, with or without [`PREFIX`](ModelConfig::PREFIX) in front, and of that shape.
    ///
    /// # Errors
    /// [`LoadError`]: there is none, or it is another one.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        let prefix = C::PREFIX;
        let found = self.tensors.get(name).or_else(|| self.tensors.get(&format!("{prefix}{name}")));
        let tensor = name.to_owned();
        let Some(Header { dtype, shape: found, data_offsets: [begin, end] }) = found else {
            return Err(LoadError::Missing { tensor, prefix });
        };
        if found != shape {
            return Err(LoadError::Shape {
                tensor,
                expected: shape.to_vec(),
                found: found.clone(),
            });
        }
        let element_bytes = match dtype.as_str() {
            "F32" => 4,
            "F16" => 2,
            _ => return Err(LoadError::Dtype { tensor, found: dtype.clone() }),
        };
        let data = &self.file[self.data..];
        // The config's check bounds the product.
        let expected = shape.iter().product::<usize>() * element_bytes;
        match data.get(*begin..*end).filter(|bytes| bytes.len() == expected) {
            Some(bytes) if element_bytes == 4 => Ok(Tensor::F32(bytes)),
            Some(bytes) => Ok(Tensor::F16(bytes)),
            None => Err(LoadError::Range {
                tensor,
                begin: *begin,
                end: *end,
                expected,
                available: data.len(),
            }),
        }
    }
}

impl Tensor<'_> {
    fn element_bytes(&self) -> usize {
        match self {
            Tensor::F32(_) => 4,
            Tensor::F16(_) => 2,
        }
    }

    /// Writes the elements from `start` on, as many as `to` has.
    pub(crate) fn read<T: Precision>(&self, start: usize, to: &mut [T]) {
        // Bytes, as a file may align its tensors as it likes.
        match self {
            Tensor::F32(bytes) | Tensor::F16(bytes) if self.element_bytes() == size_of::<T>() => {
                let to: &mut [u8] = bytemuck::cast_slice_mut(to);
                to.copy_from_slice(&bytes[start * size_of::<T>()..][..to.len()]);
            }
            Tensor::F32(bytes) => {
                let each = bytes[4 * start..].as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
                to.iter_mut().zip(each).for_each(|(to, x)| *to = T::from_f32(x));
            }
            Tensor::F16(bytes) => {
                let each = bytes[2 * start..].as_chunks().0.iter().map(|x| f16::from_le_bytes(*x));
                to.iter_mut().zip(each).for_each(|(to, x)| *to = T::from_f32(x.to_f32()));
            }
        }
    }
}
