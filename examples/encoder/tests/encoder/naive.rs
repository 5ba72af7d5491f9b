//! A tiny model with random weights, written as `transformers` would, and its forward pass in the plainest way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpu_await::half::f16;
use serde_json::{Value, json};

pub(crate) const VOCABULARY: usize = 50;
pub(crate) const HIDDEN: usize = 64;
const HEADS: usize = 4;
const WIDE: usize = 96;
const LAYERS: usize = 2;
const POSITIONS: usize = 512;
const EPS: f32 = 1e-12;

/// A folder, which its drop removes.
pub(crate) struct Tiny {
    folder: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

pub(crate) fn config() -> Value {
    json!({
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": WIDE, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "layer_norm_eps": EPS, "hidden_act": "gelu", "model_type": "bert",
    })
}

impl Tiny {
    pub(crate) fn new(name: &str, prefix: &str, dtype: &str) -> std::io::Result<Tiny> {
        let folder =
            std::env::temp_dir().join(format!("gpu-await-encoder-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let mut seed = 1u64;
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize], mean: f32, spread: f32| {
            let mut next = || {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let value = mean + spread * ((seed >> 40) as f32 / (1 << 23) as f32 - 1.0);
                // Exact in either type.
                f16::from_f32(value).to_f32()
            };
            let values = (0..shape.iter().product()).map(|_| next()).collect();
            tensors.insert(name, (shape.to_vec(), values));
        };
        for (name, rows) in [("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)] {
            add(format!("embeddings.{name}_embeddings.weight"), &[rows, HIDDEN], 0.0, 1.0);
        }
        let mut norms = vec!["embeddings.LayerNorm".to_owned()];
        for layer in 0..LAYERS {
            let of = |name: &str| format!("encoder.layer.{layer}.{name}");
            for (name, rows, columns) in [
                ("attention.self.query", HIDDEN, HIDDEN),
                ("attention.self.key", HIDDEN, HIDDEN),
                ("attention.self.value", HIDDEN, HIDDEN),
                ("attention.output.dense", HIDDEN, HIDDEN),
                ("intermediate.dense", WIDE, HIDDEN),
                ("output.dense", HIDDEN, WIDE),
            ] {
                add(of(&format!("{name}.weight")), &[rows, columns], 0.0, 0.3);
                add(of(&format!("{name}.bias")), &[rows], 0.0, 0.5);
            }
            norms.extend([of("attention.output.LayerNorm"), of("output.LayerNorm")]);
        }
        for norm in norms {
            add(format!("{norm}.weight"), &[HIDDEN], 1.0, 0.5);
            add(format!("{norm}.bias"), &[HIDDEN], 0.0, 0.3);
        }
        std::fs::write(folder.join("config.json"), config().to_string())?;
        std::fs::write(folder.join("model.safetensors"), safetensors(&tensors, prefix, dtype))?;
        Ok(Tiny { folder, tensors })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn get(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    fn linear(&self, name: &str, x: &[f32], inputs: usize) -> Vec<f32> {
        let (weight, bias) =
            (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let each = x.chunks(inputs).flat_map(|x| {
            weight.chunks(inputs).zip(bias).map(move |(row, bias)| {
                let sum: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                (sum + f64::from(*bias)) as f32
            })
        });
        each.collect()
    }

    fn norm(&self, name: &str, x: &mut [f32]) {
        let (weight, bias) =
            (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        for row in x.chunks_mut(HIDDEN) {
            let mean = row.iter().sum::<f32>() / HIDDEN as f32;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / HIDDEN as f32;
            for (i, x) in row.iter_mut().enumerate() {
                *x = (*x - mean) / (variance + EPS).sqrt() * weight[i] + bias[i];
            }
        }
    }

    /// The hidden states, the embedding's first, and the pooled embedding.
    pub(crate) fn naive(&self, ids: &[u32]) -> (Vec<Vec<f32>>, Vec<f32>) {
        let table = |name: &str, row: usize| {
            &self.get(&format!("embeddings.{name}_embeddings.weight"))[row * HIDDEN..][..HIDDEN]
        };
        let mut x = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            let rows = [table("word", *id as usize), table("position", at), table("token_type", 0)];
            x.extend((0..HIDDEN).map(|i| rows[0][i] + rows[1][i] + rows[2][i]));
        }
        self.norm("embeddings.LayerNorm", &mut x);
        let mut states = vec![x.clone()];
        for layer in 0..LAYERS {
            let of = |name: &str| format!("encoder.layer.{layer}.{name}");
            let [q, k, v] = ["query", "key", "value"]
                .map(|name| self.linear(&of(&format!("attention.self.{name}")), &x, HIDDEN));
            let context = attention(&q, &k, &v, ids.len());
            let mut y = self.linear(&of("attention.output.dense"), &context, HIDDEN);
            y.iter_mut().zip(&x).for_each(|(y, x)| *y += x);
            self.norm(&of("attention.output.LayerNorm"), &mut y);
            let mut wide = self.linear(&of("intermediate.dense"), &y, HIDDEN);
            wide.iter_mut()
                .for_each(|x| *x = 0.5 * *x * (1.0 + erf(f64::from(*x) / 2f64.sqrt()) as f32));
            x = self.linear(&of("output.dense"), &wide, WIDE);
            x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
            self.norm(&of("output.LayerNorm"), &mut x);
            states.push(x.clone());
        }
        let mut mean: Vec<f32> = (0..HIDDEN)
            .map(|i| x.iter().skip(i).step_by(HIDDEN).sum::<f32>() / ids.len() as f32)
            .collect();
        let norm = mean.iter().map(|x| x * x).sum::<f32>().sqrt();
        mean.iter_mut().for_each(|x| *x /= norm);
        (states, mean)
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

fn attention(q: &[f32], k: &[f32], v: &[f32], tokens: usize) -> Vec<f32> {
    let d = HIDDEN / HEADS;
    let mut out = vec![0.0; tokens * HIDDEN];
    for (token, head) in (0..tokens).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
        let at = |token: usize| token * HIDDEN + head * d;
        let score = |key: usize| {
            (0..d).map(|i| q[at(token) + i] * k[at(key) + i]).sum::<f32>() / (d as f32).sqrt()
        };
        let scores: Vec<f32> = (0..tokens).map(score).collect();
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

/// By its Taylor series, and 1 where that is beyond `f32`.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
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

/// NaN is the largest.
pub(crate) fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst: f32, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) })
}
