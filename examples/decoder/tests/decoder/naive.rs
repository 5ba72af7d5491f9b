//! A tiny model with random weights, written as `transformers` would, and its forward pass in the plainest way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpu_await::half::f16;
use serde_json::{Value, json};

pub(crate) const VOCABULARY: usize = 50;
pub(crate) const HIDDEN: usize = 64;
pub(crate) const POSITIONS: usize = 128;
const HEADS: usize = 4;
const LAYERS: usize = 2;
const EPS: f32 = 1e-5;

/// A folder, which its drop removes.
pub(crate) struct Tiny {
    folder: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

pub(crate) fn config() -> Value {
    json!({
        "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS,
        "n_inner": null, "layer_norm_epsilon": EPS, "activation_function": "gelu_new", "model_type": "gpt2",
    })
}

impl Tiny {
    pub(crate) fn new(name: &str, prefix: &str, dtype: &str) -> std::io::Result<Tiny> {
        let folder =
            std::env::temp_dir().join(format!("gpu-await-decoder-{}-{name}", std::process::id()));
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
        add("wte.weight".into(), &[VOCABULARY, HIDDEN], 0.0, 1.0);
        add("wpe.weight".into(), &[POSITIONS, HIDDEN], 0.0, 0.5);
        let mut norms = vec!["ln_f".to_owned()];
        for layer in 0..LAYERS {
            let of = |name: &str| format!("h.{layer}.{name}");
            for (name, inputs, outputs) in [
                ("attn.c_attn", HIDDEN, 3 * HIDDEN),
                ("attn.c_proj", HIDDEN, HIDDEN),
                ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
                ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
            ] {
                add(of(&format!("{name}.weight")), &[inputs, outputs], 0.0, 0.3);
                add(of(&format!("{name}.bias")), &[outputs], 0.0, 0.5);
            }
            norms.extend([of("ln_1"), of("ln_2")]);
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

    /// `x * weight + bias`, of a weight with a row for each input.
    fn linear(&self, name: &str, x: &[f32]) -> Vec<f32> {
        let (weight, bias) =
            (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let (outputs, inputs) = (bias.len(), weight.len() / bias.len());
        let each = x.chunks(inputs).flat_map(|x| {
            (0..outputs).map(move |to| {
                let products = x.iter().enumerate();
                let sum: f64 = products
                    .map(|(i, x)| f64::from(*x) * f64::from(weight[i * outputs + to]))
                    .sum();
                (sum + f64::from(bias[to])) as f32
            })
        });
        each.collect()
    }

    fn norm(&self, name: &str, x: &[f32]) -> Vec<f32> {
        let (weight, bias) =
            (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let each = x.chunks(HIDDEN).flat_map(|row| {
            let mean = row.iter().sum::<f32>() / HIDDEN as f32;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / HIDDEN as f32;
            let scaled = row.iter().map(move |x| (x - mean) / (variance + EPS).sqrt());
            scaled.zip(weight.iter().zip(bias)).map(|(x, (weight, bias))| x * weight + bias)
        });
        each.collect()
    }

    /// The logits behind the last token of the ids, all of which are computed each time.
    pub(crate) fn logits(&self, ids: &[u32]) -> Vec<f32> {
        let (words, places) = (self.get("wte.weight"), self.get("wpe.weight"));
        let mut x: Vec<f32> = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            x.extend(
                (0..HIDDEN).map(|i| words[*id as usize * HIDDEN + i] + places[at * HIDDEN + i]),
            );
        }
        let add = |x: &mut [f32], y: &[f32]| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        for layer in 0..LAYERS {
            let of = |name: &str| format!("h.{layer}.{name}");
            let qkv = self.linear(&of("attn.c_attn"), &self.norm(&of("ln_1"), &x));
            add(&mut x, &self.linear(&of("attn.c_proj"), &attention(&qkv, ids.len())));
            let mut wide = self.linear(&of("mlp.c_fc"), &self.norm(&of("ln_2"), &x));
            wide.iter_mut().for_each(|x| {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (*x + 0.044715 * x.powi(3));
                *x = 0.5 * *x * (1.0 + inner.tanh());
            });
            add(&mut x, &self.linear(&of("mlp.c_proj"), &wide));
        }
        let last = self.norm("ln_f", &x[(ids.len() - 1) * HIDDEN..]);
        let dot = |word: &[f32]| word.iter().zip(&last).map(|(w, x)| w * x).sum();
        words.chunks(HIDDEN).map(dot).collect()
    }

    /// New tokens, each the most likely one.
    pub(crate) fn greedy(&self, ids: &[u32], new: usize) -> Vec<u32> {
        let mut all = ids.to_vec();
        for _ in 0..new {
            all.push(largest(&self.logits(&all)));
        }
        all.split_off(ids.len())
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

pub(crate) fn largest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0) as u32
}

fn attention(qkv: &[f32], tokens: usize) -> Vec<f32> {
    let d = HIDDEN / HEADS;
    let mut out = vec![0.0; tokens * HIDDEN];
    for (token, head) in (0..tokens).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
        let part = |token: usize, part: usize| &qkv[(3 * token + part) * HIDDEN + head * d..][..d];
        let score = |key: usize| {
            let products = part(token, 0).iter().zip(part(key, 1));
            products.map(|(q, k)| q * k).sum::<f32>() / (d as f32).sqrt()
        };
        let scores: Vec<f32> = (0..=token).map(score).collect();
        let most = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        for i in 0..d {
            let value: f32 = weights.iter().enumerate().map(|(key, w)| w * part(key, 2)[i]).sum();
            out[token * HIDDEN + head * d + i] = value / sum;
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
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    for (name, (shape, values)) in tensors {
        let start = data.len();
        for value in values {
            match dtype {
                "F16" => data.extend(f16::from_f32(*value).to_le_bytes()),
                _ => data.extend(value.to_le_bytes()),
            }
        }
        let tensor = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(format!("{prefix}{name}"), tensor);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}
