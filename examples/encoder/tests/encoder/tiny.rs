//! A tiny model with random weights, written as `transformers` would. The decoder's tests have it from here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpu_await::half::f16;
use serde_json::{Value, json};

/// A folder, which its drop removes.
pub(crate) struct Tiny {
    folder: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// A tensor: its name, its shape, and the mean and the spread of its values.
pub(crate) type Spec = (String, Vec<usize>, [f32; 2]);

/// A weight and a bias of a product, for the last extent.
pub(crate) fn product(name: &str, shape: [usize; 2], outputs: usize) -> [Spec; 2] {
    let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
    [(weight, shape.into(), [0.0, 0.3]), (bias, vec![outputs], [0.0, 0.5])]
}

/// Those of a norm.
pub(crate) fn norm(name: &str, hidden: usize) -> [Spec; 2] {
    let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
    [(weight, vec![hidden], [1.0, 0.5]), (bias, vec![hidden], [0.0, 0.3])]
}

impl Tiny {
    pub(crate) fn write(
        name: &str,
        config: &Value,
        specs: Vec<Spec>,
        prefix: &str,
        dtype: &str,
    ) -> std::io::Result<Tiny> {
        let mut seed = 1u64;
        let mut next = |[mean, spread]: [f32; 2]| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Exact in either type.
            let value = mean + spread * ((seed >> 40) as f32 / (1 << 23) as f32 - 1.0);
            f16::from_f32(value).to_f32()
        };
        let tensors = specs.into_iter().map(|(name, shape, of)| {
            let values = (0..shape.iter().product()).map(|_| next(of)).collect();
            (name, (shape, values))
        });
        let tensors: BTreeMap<_, _> = tensors.collect();
        let folder = format!("gpu-await-{}-{}-{name}", env!("CARGO_PKG_NAME"), std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("config.json"), config.to_string())?;
        std::fs::write(folder.join("model.safetensors"), safetensors(&tensors, prefix, dtype))?;
        Ok(Tiny { folder, tensors })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn get(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    /// Rows, normed.
    pub(crate) fn norm(&self, name: &str, x: &[f32], eps: f32) -> Vec<f32> {
        let (weight, bias) =
            (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let each = x.chunks(weight.len()).flat_map(|row| {
            let count = row.len() as f32;
            let mean = row.iter().sum::<f32>() / count;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / count;
            let scaled = row.iter().map(move |x| (x - mean) / (variance + eps).sqrt());
            scaled.zip(weight.iter().zip(bias)).map(|(x, (weight, bias))| x * weight + bias)
        });
        each.collect()
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Attention of queries over so many keys each: rows of queries, keys and values, of `heads` heads.
pub(crate) fn attention(
    [q, k, v]: [&[f32]; 3],
    [hidden, heads]: [usize; 2],
    keys: impl Fn(usize) -> usize,
) -> Vec<f32> {
    let d = hidden / heads;
    let mut out = vec![0.0; q.len()];
    let tokens = q.len() / hidden;
    for (token, head) in (0..tokens).flat_map(|token| (0..heads).map(move |head| (token, head))) {
        let at = |token: usize| token * hidden + head * d;
        let score = |key: usize| {
            (0..d).map(|i| q[at(token) + i] * k[at(key) + i]).sum::<f32>() / (d as f32).sqrt()
        };
        let scores: Vec<f32> = (0..keys(token)).map(score).collect();
        let most = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        for i in 0..d {
            let value: f32 = weights.iter().enumerate().map(|(key, w)| w * v[at(key) + i]).sum();
            out[at(token) + i] = value / sum;
        }
    }
    out
}

fn safetensors(
    tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    prefix: &str,
    dtype: &str,
) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in tensors {
        let begin = data.len();
        for value in values {
            match dtype {
                "F16" => data.extend(f16::from_f32(*value).to_le_bytes()),
                _ => data.extend(value.to_le_bytes()),
            }
        }
        let tensor = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] });
        header.insert(format!("{prefix}{name}"), tensor);
    }
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}
