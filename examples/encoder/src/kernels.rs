//! The kernels of `encoder.cu`, with their twins; and [`Launches`], by which generic code launches them. The decoder has the macro, norms and attention of
//! twins from here.
//!
//! The PTX beside the source is committed, so nobody who builds this needs a CUDA compiler (`build.rs`). The one file of
//! this crate without `#![forbid(unsafe_code)]`, beside the mapping of a file in `weights.rs`: `unsafe fn` vouches for the PTX.

use gpu_await::half::f16;
use gpu_await::{Device, Frozen, Grid, LaunchConfig, Queue, Result, View, ViewMut, kernel};
use gpu_await_libs::GemmElement;

/// Queries of an attention block; see [`crate::model::Packed`].
pub(crate) const TILE: usize = 64;
/// Rows have a multiple of this many elements.
pub const LANES: usize = 64;
/// Rows have at most so many.
pub const MAX_HIDDEN: usize = 1024;
/// Elements of a head.
pub const HEAD_WIDTHS: [usize; 3] = [16, 32, 64];

/// All of them: one module.
static PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/encoder.ptx"));

/// Rows of a block, a warp each.
const ROWS: i128 = 4;

kernel! {
    /// `out[t] = norm(words[ids[t]] + places[positions[t]])`.
    pub(crate) unsafe fn embed_norm<T>(
        ids: &[u32],
        positions: &[u32],
        words: &[T],
        places: &[T],
        weight: &[T],
        bias: &[T],
        out: Out<[T]>,
        tokens: u32 = ids.len(),
        hidden: u32 = weight.len(),
        vocabulary: u32 = words.len() / weight.len(),
        max_positions: u32 = places.len() / weight.len(),
        eps: f32,
    )
        where weight.len() % LANES.wide() == 0,
              weight.len() <= MAX_HIDDEN.wide(),
              bias.len() == weight.len(),
              positions.len() == ids.len(),
              out.len() == ids.len() * weight.len(),
              vocabulary > 0,
              max_positions > 0;
    launch = LaunchConfig::for_extent(ids.len() * 32, 32 * ROWS);
    entry = [f32: "embed_norm_f32", f16: "embed_norm_f16"];
    ptx = PTX;
    host = embed_norm_twin;
}

kernel! {
    /// `out[t] = norm(x[t] + residual[t])`.
    pub(crate) unsafe fn add_norm<T>(
        x: &[T],
        residual: &[T],
        weight: &[T],
        bias: &[T],
        out: Out<[T]>,
        tokens: u32 = x.len() / weight.len(),
        hidden: u32 = weight.len(),
        eps: f32,
    )
        where weight.len() % LANES.wide() == 0,
              weight.len() <= MAX_HIDDEN.wide(),
              bias.len() == weight.len(),
              x.len() == tokens * hidden,
              residual.len() == x.len(),
              out.len() == x.len();
    launch = LaunchConfig::for_extent(tokens * 32, 32 * ROWS);
    entry = [f32: "add_norm_f32", f16: "add_norm_f16"];
    ptx = PTX;
    host = add_norm_twin;
}

kernel! {
    /// `x = x / 2 * (1 + erf(x / sqrt(2)))`.
    pub(crate) unsafe fn gelu<T>(x: &mut [T], eights: u64 = x.len() / 8) where x.len() % 8 == 0;
    launch = LaunchConfig::for_elements(x.len() / 8);
    entry = [f32: "gelu_f32", f16: "gelu_f16"];
    ptx = PTX;
    host = gelu_twin;
}

kernel! {
    /// `out[t] = softmax(q[t] k^T / sqrt(d)) v`, for each head, over the tokens of `t`'s text. Rows of no text stay as they are.
    pub(crate) unsafe fn attention<T>(
        qkv: &[T],
        starts: &[u32],
        tiles: &[u32],
        out: &mut [T],
        tokens: u32 = out.len() / hidden,
        texts: u32 = starts.len() - 1,
        hidden: u32,
        heads: u32,
    )
        where heads > 0,
              HEAD_WIDTHS.iter().any(|width| hidden == width.wide() * heads),
              out.len() == tokens * hidden,
              qkv.len() == 3 * out.len(),
              tiles.len() % 2 == 0;
    launch = LaunchConfig::new((tiles.len() / 2, heads), 2 * TILE.wide());
    entry = [f32: "attention_f32", f16: "attention_f16"];
    ptx = PTX;
    host = attention_twin;
}

kernel! {
    /// `out[s]` = the mean of the rows of text `s`, divided by its Euclidean norm; zeros for a text without tokens.
    pub(crate) unsafe fn pool<T>(
        x: &[T],
        starts: &[u32],
        out: Out<[f32]>,
        tokens: u32 = x.len() / hidden,
        hidden: u32,
    )
        where hidden > 0,
              hidden % LANES.wide() == 0,
              hidden <= MAX_HIDDEN.wide(),
              x.len() == tokens * hidden,
              out.len() == (starts.len() - 1) * hidden;
    launch = LaunchConfig::new(starts.len() - 1, 512);
    entry = [f32: "pool_f32", f16: "pool_f16"];
    ptx = PTX;
    host = pool_twin;
}

/// An element type that the model computes in: `f32` or `f16`, with sums in `f32`.
pub trait Precision: GemmElement<Scale = f32> {
    #[expect(missing_docs, reason = "its name says it")]
    fn from_f32(x: f32) -> Self;
    #[expect(missing_docs, reason = "its name says it")]
    fn to_f32(self) -> f32;
}

impl Precision for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Precision for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

/// Makes `Launches`. A kernel with a type parameter is another type for each element, whose methods generic code cannot name; it can name
/// those of a trait.
#[macro_export]
macro_rules! launches {
    ($($kernel:ident($($arg:ident: $taken:ty),+);)+) => {
        /// Launches of the kernels, by their names.
        #[expect(missing_docs, clippy::too_many_arguments, reason = "the kernels'")]
        pub trait Launches: $crate::Precision {
            fn load(device: &Device) -> impl Future<Output = Result<Kernels<Self>>> + Send;
            $(fn $kernel(kernels: &Kernels<Self>, q: &Queue<'_>, $($arg: $taken),+) -> Result<()>;)+
        }
        /// The kernels for elements of one type: one module, as they have one text.
        #[derive(Clone)]
        pub struct Kernels<T: 'static> {
            $($kernel: $kernel<T>,)+
        }
        $crate::launches! { @for f32 $($kernel($($arg: $taken),+);)+ }
        $crate::launches! { @for f16 $($kernel($($arg: $taken),+);)+ }
    };
    (@for $element:ident $($kernel:ident($($arg:ident: $taken:ty),+);)+) => {
        impl Launches for $element {
            async fn load(device: &Device) -> Result<Kernels<Self>> {
                Ok(Kernels { $($kernel: $kernel::<$element>::load(device).await?,)+ })
            }
            $(fn $kernel(kernels: &Kernels<Self>, q: &Queue<'_>, $($arg: $taken),+) -> Result<()> {
                kernels.$kernel.launch(q, $($arg),+)
            })+
        }
    };
}
type Reads<'a, T> = &'a View<'a, T>;
type Writes<'a, 'v, T> = &'a mut ViewMut<'v, T>;
launches! {
    embed_norm(ids: Reads<'_, u32>, positions: Reads<'_, u32>, words: &Frozen<Self>, places: &Frozen<Self>, weight: &Frozen<Self>, bias: &Frozen<Self>, out: Writes<'_, '_, Self>, eps: f32);
    add_norm(x: Reads<'_, Self>, residual: Reads<'_, Self>, weight: &Frozen<Self>, bias: &Frozen<Self>, out: Writes<'_, '_, Self>, eps: f32);
    gelu(x: Writes<'_, '_, Self>);
    attention(qkv: Reads<'_, Self>, starts: Reads<'_, u32>, tiles: Reads<'_, u32>, out: Writes<'_, '_, Self>, hidden: u32, heads: u32);
    pool(x: Reads<'_, Self>, starts: Reads<'_, u32>, out: Writes<'_, '_, f32>, hidden: u32);
}

// ---- twins: the same on the CPU, in the order of the elements -----------------------------------

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn embed_norm_twin<T: Precision>(
    _: &Grid,
    ids: &[u32],
    positions: &[u32],
    words: &[T],
    places: &[T],
    weight: &[T],
    bias: &[T],
    out: &mut [T],
    _tokens: u32,
    hidden: u32,
    vocabulary: u32,
    max_positions: u32,
    eps: f32,
) {
    let width = hidden as usize;
    let row = |table: &[T], at: u32, most: u32| -> Vec<f32> {
        let row = &table[at.min(most - 1) as usize * width..][..width];
        row.iter().map(|x| x.to_f32()).collect()
    };
    for (out, (id, position)) in out.chunks_mut(width).zip(ids.iter().zip(positions)) {
        let rows =
            row(words, *id, vocabulary).into_iter().zip(row(places, *position, max_positions));
        put(out, norm(rows.map(|(word, place)| word + place), weight, bias, eps));
    }
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn add_norm_twin<T: Precision>(
    _: &Grid,
    x: &[T],
    residual: &[T],
    weight: &[T],
    bias: &[T],
    out: &mut [T],
    _tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let width = hidden as usize;
    for (out, (x, residual)) in
        out.chunks_mut(width).zip(x.chunks(width).zip(residual.chunks(width)))
    {
        let sum = x.iter().zip(residual).map(|(x, y)| x.to_f32() + y.to_f32());
        put(out, norm(sum, weight, bias, eps));
    }
}

/// A row, normed.
pub fn norm<T: Precision>(
    row: impl Iterator<Item = f32>,
    weight: &[T],
    bias: &[T],
    eps: f32,
) -> impl Iterator<Item = f32> {
    let row: Vec<f32> = row.collect();
    let count = row.len() as f32;
    let mean = row.iter().sum::<f32>() / count;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / count;
    let scale = 1.0 / (variance + eps).sqrt();
    let affine = weight.iter().zip(bias);
    let each = row.into_iter().zip(affine);
    each.map(move |(x, (weight, bias))| (x - mean) * scale * weight.to_f32() + bias.to_f32())
}

/// Rounds numbers into place.
pub fn put<T: Precision>(out: &mut [T], from: impl Iterator<Item = f32>) {
    out.iter_mut().zip(from).for_each(|(out, x)| *out = T::from_f32(x));
}

fn gelu_twin<T: Precision>(_: &Grid, x: &mut [T], _eights: u64) {
    for x in x {
        let wide = x.to_f32();
        *x = T::from_f32(0.5 * wide * (1.0 + erf(wide * std::f32::consts::FRAC_1_SQRT_2)));
    }
}

/// Abramowitz and Stegun, 7.1.26, in `f64`: within 1.5e-7.
fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let series = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let sum = series.iter().fold(0.0, |sum, factor| sum * t + factor) * t;
    ((1.0 - sum * (-x * x).exp()) * x.signum()) as f32
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn attention_twin<T: Precision>(
    _: &Grid,
    qkv: &[T],
    starts: &[u32],
    tiles: &[u32],
    out: &mut [T],
    tokens: u32,
    texts: u32,
    hidden: u32,
    heads: u32,
) {
    let (width, heads) = (hidden as usize, heads as usize);
    let d = width / heads;
    for tile in tiles.chunks(2).filter(|tile| tile[0] < texts) {
        let end = starts[tile[0] as usize + 1].min(tokens) as usize;
        let start = (starts[tile[0] as usize] as usize).min(end);
        let first = start + tile[1] as usize;
        for (query, head) in
            (first..end.min(first + TILE)).flat_map(|q| (0..heads).map(move |h| (q, h)))
        {
            // Part 0 is the query, 1 the key, 2 the value.
            let part =
                |token: usize, part: usize| &qkv[(3 * token + part) * width + head * d..][..d];
            let each = (start..end).map(|key| (part(key, 1), part(key, 2)));
            attend(part(query, 0), each, &mut out[query * width + head * d..][..d]);
        }
    }
}

/// `out = softmax(q k^T / sqrt(d)) v`, for keys and values as pairs.
pub fn attend<'a, T: Precision>(
    q: &[T],
    each: impl Iterator<Item = (&'a [T], &'a [T])> + Clone,
    out: &mut [T],
) {
    let scale = 1.0 / (q.len() as f32).sqrt();
    let dot = |k: &[T]| q.iter().zip(k).map(|(q, k)| q.to_f32() * k.to_f32()).sum::<f32>() * scale;
    let mut weights: Vec<f32> = each.clone().map(|(k, _)| dot(k)).collect();
    let most = weights.iter().copied().fold(f32::MIN, f32::max);
    weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
    let total: f32 = weights.iter().sum();
    for (i, out) in out.iter_mut().enumerate() {
        let value: f32 = each.clone().zip(&weights).map(|((_, v), w)| w * v[i].to_f32()).sum();
        *out = T::from_f32(value / total);
    }
}

fn pool_twin<T: Precision>(
    _: &Grid,
    x: &[T],
    starts: &[u32],
    out: &mut [f32],
    tokens: u32,
    hidden: u32,
) {
    let width = hidden as usize;
    for (out, ends) in out.chunks_mut(width).zip(starts.windows(2)) {
        let end = ends[1].min(tokens) as usize;
        let start = (ends[0] as usize).min(end);
        out.fill(0.0);
        for row in x[start * width..end * width].chunks(width) {
            out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f32());
        }
        let count = (end - start).max(1) as f32;
        out.iter_mut().for_each(|sum| *sum /= count);
        let norm = out.iter().map(|x| x * x).sum::<f32>().sqrt();
        out.iter_mut().for_each(|mean| *mean = if norm > 0.0 { *mean / norm } else { 0.0 });
    }
}
