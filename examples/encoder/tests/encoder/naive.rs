//! The forward pass of a tiny model, in the plainest way.

use serde_json::{Value, json};

pub(crate) use crate::tiny::Tiny;
use crate::tiny::{attention, norm, product};

pub(crate) const VOCABULARY: usize = 50;
pub(crate) const HIDDEN: usize = 64;
const HEADS: usize = 4;
const WIDE: usize = 96;
const LAYERS: usize = 2;
const POSITIONS: usize = 512;
const EPS: f32 = 1e-12;

pub(crate) fn config() -> Value {
    json!({
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": WIDE, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "layer_norm_eps": EPS, "hidden_act": "gelu", "model_type": "bert",
    })
}

impl Tiny {
    pub(crate) fn new(name: &str, prefix: &str, dtype: &str) -> std::io::Result<Tiny> {
        let tables = [("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)];
        let table = |(name, rows)| {
            let name = format!("embeddings.{name}_embeddings.weight");
            (name, vec![rows, HIDDEN], [0.0, 1.0])
        };
        let mut specs = Vec::from(tables.map(table));
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
                specs.extend(product(&of(name), [rows, columns], rows));
            }
            norms.extend([of("attention.output.LayerNorm"), of("output.LayerNorm")]);
        }
        specs.extend(norms.iter().flat_map(|name| norm(name, HIDDEN)));
        Tiny::write(name, &config(), specs, prefix, dtype)
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
        let mut x = self.norm("embeddings.LayerNorm", &x, EPS);
        let mut states = vec![x.clone()];
        for layer in 0..LAYERS {
            let of = |name: &str| format!("encoder.layer.{layer}.{name}");
            let [q, k, v] = ["query", "key", "value"]
                .map(|name| self.linear(&of(&format!("attention.self.{name}")), &x, HIDDEN));
            let context = attention([&q, &k, &v], [HIDDEN, HEADS], |_| ids.len());
            let mut y = self.linear(&of("attention.output.dense"), &context, HIDDEN);
            y.iter_mut().zip(&x).for_each(|(y, x)| *y += x);
            let y = self.norm(&of("attention.output.LayerNorm"), &y, EPS);
            let mut wide = self.linear(&of("intermediate.dense"), &y, HIDDEN);
            wide.iter_mut()
                .for_each(|x| *x = 0.5 * *x * (1.0 + erf(f64::from(*x) / 2f64.sqrt()) as f32));
            x = self.linear(&of("output.dense"), &wide, WIDE);
            x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
            x = self.norm(&of("output.LayerNorm"), &x, EPS);
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

/// NaN is the largest.
pub(crate) fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst: f32, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) })
}
