//! The forward pass of a tiny model, in the plainest way.

use serde_json::{Value, json};

pub(crate) use crate::tiny::Tiny;
use crate::tiny::{attention, norm, product};

pub(crate) const VOCABULARY: usize = 50;
pub(crate) const HIDDEN: usize = 64;
pub(crate) const POSITIONS: usize = 128;
const HEADS: usize = 4;
const LAYERS: usize = 2;
const EPS: f32 = 1e-5;

pub(crate) fn config() -> Value {
    json!({
        "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS,
        "n_inner": null, "layer_norm_epsilon": EPS, "activation_function": "gelu_new", "model_type": "gpt2",
    })
}

impl Tiny {
    pub(crate) fn new(name: &str, prefix: &str, dtype: &str) -> std::io::Result<Tiny> {
        let mut specs = vec![
            ("wte.weight".to_owned(), vec![VOCABULARY, HIDDEN], [0.0, 1.0]),
            ("wpe.weight".to_owned(), vec![POSITIONS, HIDDEN], [0.0, 0.5]),
        ];
        let mut norms = vec!["ln_f".to_owned()];
        for layer in 0..LAYERS {
            let of = |name: &str| format!("h.{layer}.{name}");
            for (name, inputs, outputs) in [
                ("attn.c_attn", HIDDEN, 3 * HIDDEN),
                ("attn.c_proj", HIDDEN, HIDDEN),
                ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
                ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
            ] {
                specs.extend(product(&of(name), [inputs, outputs], outputs));
            }
            norms.extend([of("ln_1"), of("ln_2")]);
        }
        specs.extend(norms.iter().flat_map(|name| norm(name, HIDDEN)));
        Tiny::write(name, &config(), specs, prefix, dtype)
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
            let qkv = self.linear(&of("attn.c_attn"), &self.norm(&of("ln_1"), &x, EPS));
            let part = |part: usize| -> Vec<f32> {
                qkv.chunks(3 * HIDDEN)
                    .flat_map(|row| row[part * HIDDEN..][..HIDDEN].to_vec())
                    .collect()
            };
            let all = [&part(0)[..], &part(1), &part(2)];
            let context = attention(all, [HIDDEN, HEADS], |token| token + 1);
            add(&mut x, &self.linear(&of("attn.c_proj"), &context));
            let mut wide = self.linear(&of("mlp.c_fc"), &self.norm(&of("ln_2"), &x, EPS));
            wide.iter_mut().for_each(|x| {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (*x + 0.044715 * x.powi(3));
                *x = 0.5 * *x * (1.0 + inner.tanh());
            });
            add(&mut x, &self.linear(&of("mlp.c_proj"), &wide));
        }
        let last = self.norm("ln_f", &x[(ids.len() - 1) * HIDDEN..], EPS);
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

pub(crate) fn largest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0) as u32
}
