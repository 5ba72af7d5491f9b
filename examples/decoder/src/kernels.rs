//! The kernels of `decoder.cu`, with their twins; and [`Launches`], by which generic code launches them.
//!
//! The PTX beside the source is committed, so nobody who builds this needs a CUDA compiler (`build.rs`). The one file of
//! this crate without `#![forbid(unsafe_code)]`: `unsafe fn` vouches for the PTX. More than 500 lines, as a declaration is read beside its twin.

use encoder::{HEAD_WIDTHS, LANES, MAX_HIDDEN, Precision, attend, launches, put};
use gpu_await::bytemuck::{Pod, Zeroable};
use gpu_await::half::f16;
use gpu_await::{
    Device, Frozen, Grid, Integer, LaunchConfig, Queue, Result, View, ViewMut, kernel,
};

/// Queries of an attention block over prompts.
pub(crate) const TILE: usize = 64;
/// Tokens of a block of the cache.
pub(crate) const BLOCK: usize = 16;
/// Words of a sequence in front of its table.
pub(crate) const SEQUENCE: usize = 8;
/// No sequence, or the token that was chosen last.
pub(crate) const NONE: u32 = u32::MAX;

/// All of them: one module.
static PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/decoder.ptx"));

/// Rows of a block, a warp each.
const ROWS: i128 = 4;
/// Rows of `product`.
pub(crate) const FEW: [i128; 2] = [1, 2];

/// Where a layer's keys and values are, and what they are of.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gpu_await::bytemuck")]
pub struct Cached {
    /// Words of a sequence.
    pub(crate) row_len: u32,
    /// Elements of a block.
    pub(crate) block_len: u32,
    pub(crate) hidden: u32,
    pub(crate) heads: u32,
    pub(crate) layer: u32,
}

impl Cached {
    fn is_right(&self) -> bool {
        let is_wide = |width: &usize| self.hidden.wide() == width.wide() * self.heads.wide();
        self.heads > 0
            && HEAD_WIDTHS.iter().any(is_wide)
            && self.row_len.wide() >= SEQUENCE.wide()
            && self.block_len.is_multiple_of(8)
            && (self.layer.wide() + 1) * 2 * BLOCK.wide() * self.hidden.wide()
                <= self.block_len.wide()
    }
}

/// A product, and what is in front of it and behind it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gpu_await::bytemuck")]
pub struct Product {
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    /// 0 or 1.
    pub(crate) norms: u32,
    pub(crate) gelu: u32,
    pub(crate) adds: u32,
    pub(crate) eps: f32,
}

kernel! {
    /// `x[t] = words[ids[t]] + places[positions[t]]`; an id of [`NONE`] stands for `chosen[slots[t]]`. The input has all ids, then all
    /// positions, then all slots.
    pub(crate) unsafe fn embed<T>(
        input: &[u32],
        chosen: &[u32],
        words: &[T],
        places: &[T],
        x: Out<[T]>,
        tokens: u32 = input.len() / 3,
        hidden: u32,
        vocabulary: u32 = words.len() / hidden.wide(),
        max_positions: u32 = places.len() / hidden.wide(),
        streams: u32 = chosen.len(),
    )
        where hidden % LANES.wide() == 0,
              hidden <= MAX_HIDDEN.wide(),
              input.len() == 3 * tokens,
              x.len() == tokens * hidden,
              vocabulary > 0,
              max_positions > 0,
              streams > 0;
    launch = LaunchConfig::for_extent(tokens * 32, 32 * ROWS);
    entry = [f32: "embed_f32", f16: "embed_f16"];
    ptx = PTX;
    host = embed_twin;
}

kernel! {
    /// `out[t] = activation(norm(x[t]) * weight + bias)`, or that added to it: weights come at the speed of memory for few rows.
    pub(crate) unsafe fn product<T>(
        x: &[T],
        norm_weight: &[T],
        norm_bias: &[T],
        weight: &[T],
        bias: &[T],
        out: &mut [T],
        rows: u32 = x.len() / p.inputs.wide(),
        p: Product,
    )
        where FEW.contains(&rows),
              x.len() == rows * p.inputs.wide(),
              out.len() == rows * p.outputs.wide(),
              weight.len() == p.inputs.wide() * p.outputs.wide(),
              bias.len() == p.outputs.wide(),
              p.outputs % 16 == 0,
              p.norms == 0 || (p.inputs <= 1024 && norm_weight.len() == p.inputs.wide() && norm_bias.len() == norm_weight.len());
    launch = LaunchConfig::new(bias.len() / 16, 256);
    entry = [f32: "product_f32", f16: "product_f16"];
    ptx = PTX;
    host = product_twin;
}

kernel! {
    /// `y[t] = norm(x[t])`.
    pub(crate) unsafe fn norm<T>(
        x: &[T],
        weight: &[T],
        bias: &[T],
        y: Out<[T]>,
        tokens: u32 = x.len() / weight.len(),
        hidden: u32 = weight.len(),
        eps: f32,
    )
        where weight.len() % LANES.wide() == 0,
              weight.len() <= MAX_HIDDEN.wide(),
              bias.len() == weight.len(),
              x.len() == tokens * hidden,
              y.len() == x.len();
    launch = LaunchConfig::for_extent(tokens * 32, 32 * ROWS);
    entry = [f32: "norm_f32", f16: "norm_f16"];
    ptx = PTX;
    host = norm_twin;
}

kernel! {
    /// `y[r]` = the norm of the last token of sequence `r`.
    pub(crate) unsafe fn norm_last<T>(
        x: &[T],
        rows: &[u32],
        weight: &[T],
        bias: &[T],
        y: Out<[T]>,
        sequences: u32 = y.len() / weight.len(),
        row_len: u32,
        tokens: u32 = x.len() / weight.len(),
        hidden: u32 = weight.len(),
        eps: f32,
    )
        where weight.len() % LANES.wide() == 0,
              weight.len() <= MAX_HIDDEN.wide(),
              bias.len() == weight.len(),
              tokens > 0,
              x.len() == tokens * hidden,
              y.len() == sequences * hidden,
              row_len >= SEQUENCE.wide(),
              rows.len() == sequences * row_len;
    launch = LaunchConfig::for_extent(sequences * 32, 32 * ROWS);
    entry = [f32: "norm_last_f32", f16: "norm_last_f16"];
    ptx = PTX;
    host = norm_last_twin;
}

kernel! {
    /// Attention over prompts, each token's over those up to it, whose keys and values go to the cache. Rows of no prompt stay as they are.
    pub(crate) unsafe fn prompt<T>(
        qkv: &[T],
        rows: &[u32],
        tiles: &[u32],
        slab: &mut [T],
        out: &mut [T],
        tokens: u32 = out.len() / cached.hidden.wide(),
        sequences: u32 = rows.len() / cached.row_len.wide(),
        blocks: u32 = slab.len() / cached.block_len.wide(),
        cached: Cached,
    )
        where cached.is_right(),
              out.len() == tokens * cached.hidden.wide(),
              qkv.len() == 3 * out.len(),
              tiles.len() % 2 == 0,
              rows.len() == sequences * cached.row_len.wide(),
              slab.len() == blocks * cached.block_len.wide();
    launch = LaunchConfig::new((tiles.len() / 2, cached.heads), 2 * TILE.wide());
    entry = [f32: "prompt_f32", f16: "prompt_f16"];
    ptx = PTX;
    host = prompt_twin;
}

kernel! {
    /// Attention of one token of each sequence over the cache, where its key and value go first. Rows of no sequence stay as they are.
    pub(crate) unsafe fn next<T>(
        qkv: &[T],
        rows: &[u32],
        slab: &mut [T],
        out: &mut [T],
        blocks: u32 = slab.len() / cached.block_len.wide(),
        cached: Cached,
    )
        where cached.is_right(),
              qkv.len() == 3 * out.len(),
              rows.len() * cached.hidden.wide() == out.len() * cached.row_len.wide(),
              slab.len() == blocks * cached.block_len.wide();
    // Of few sequences each has all of a multiprocessor; of many, there is enough to do.
    launch = LaunchConfig::new(
        (cached.heads.wide(), out.len() / cached.hidden.wide()),
        if out.len() <= 8 * cached.hidden.wide() { 512 } else { 128 },
    );
    entry = [f32: "next_f32", f16: "next_f16"];
    ptx = PTX;
    host = next_twin;
}

kernel! {
    /// A token for each sequence, by its logits and its sampling; 0 for rows of no sequence.
    pub(crate) unsafe fn choose(
        logits: &[f32],
        rows: &[u32],
        chosen: &mut [u32],
        out: Out<[u32]>,
        row_len: u32,
        vocabulary: u32,
        stride: u32 = logits.len() / out.len(),
        streams: u32 = chosen.len(),
    )
        where row_len >= SEQUENCE.wide(),
              rows.len() == out.len() * row_len,
              logits.len() == out.len() * stride,
              stride % 4 == 0,
              vocabulary > 0,
              vocabulary <= stride;
    launch = LaunchConfig::new(out.len(), 1024);
    ptx = PTX;
    host = choose_twin;
}

type Reads<'a, T> = &'a View<'a, T>;
type Writes<'a, 'v, T> = &'a mut ViewMut<'v, T>;
launches! {
    embed(input: Reads<'_, u32>, chosen: Reads<'_, u32>, words: &Frozen<Self>, places: &Frozen<Self>, x: Writes<'_, '_, Self>, hidden: u32);
    product(x: Reads<'_, Self>, norm_weight: &Frozen<Self>, norm_bias: &Frozen<Self>, weight: &Frozen<Self>, bias: &Frozen<Self>, out: Writes<'_, '_, Self>, p: Product);
    norm(x: Reads<'_, Self>, weight: &Frozen<Self>, bias: &Frozen<Self>, y: Writes<'_, '_, Self>, eps: f32);
    norm_last(x: Reads<'_, Self>, rows: Reads<'_, u32>, weight: &Frozen<Self>, bias: &Frozen<Self>, y: Writes<'_, '_, Self>, row_len: u32, eps: f32);
    prompt(qkv: Reads<'_, Self>, rows: Reads<'_, u32>, tiles: Reads<'_, u32>, slab: Writes<'_, '_, Self>, out: Writes<'_, '_, Self>, cached: Cached);
    next(qkv: Reads<'_, Self>, rows: Reads<'_, u32>, slab: Writes<'_, '_, Self>, out: Writes<'_, '_, Self>, cached: Cached);
}

// ---- twins: the same on the CPU, in the order of the elements -----------------------------------

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn embed_twin<T: Precision>(
    _: &Grid,
    input: &[u32],
    chosen: &[u32],
    words: &[T],
    places: &[T],
    x: &mut [T],
    tokens: u32,
    hidden: u32,
    vocabulary: u32,
    max_positions: u32,
    streams: u32,
) {
    let (ids, rest) = input.split_at(tokens as usize);
    let (positions, slots) = rest.split_at(tokens as usize);
    let width = hidden as usize;
    let row = |table: &[T], at: u32, most: u32, i: usize| {
        table[at.min(most - 1) as usize * width + i].to_f32()
    };
    for (t, x) in x.chunks_mut(width).enumerate() {
        let id = if ids[t] == NONE { chosen[slots[t].min(streams - 1) as usize] } else { ids[t] };
        for (i, x) in x.iter_mut().enumerate() {
            let sum = row(words, id, vocabulary, i) + row(places, positions[t], max_positions, i);
            *x = T::from_f32(sum);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn product_twin<T: Precision>(
    _: &Grid,
    x: &[T],
    norm_weight: &[T],
    norm_bias: &[T],
    weight: &[T],
    bias: &[T],
    out: &mut [T],
    _rows: u32,
    p: Product,
) {
    let outputs = p.outputs as usize;
    for (x, out) in x.chunks(p.inputs as usize).zip(out.chunks_mut(outputs)) {
        let wide = x.iter().map(|x| x.to_f32());
        let wide: Vec<f32> = match p.norms {
            0 => wide.collect(),
            _ => encoder::norm(wide, norm_weight, norm_bias, p.eps).collect(),
        };
        let mut sums: Vec<f32> = bias.iter().map(|bias| bias.to_f32()).collect();
        for (x, row) in wide.iter().zip(weight.chunks(outputs)) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += x * weight.to_f32());
        }
        for (sum, out) in sums.into_iter().zip(out) {
            let inner = std::f32::consts::FRAC_2_PI.sqrt() * (sum + 0.044_715 * sum * sum * sum);
            let sum = if p.gelu != 0 { 0.5 * sum * (1.0 + inner.tanh()) } else { sum };
            *out = T::from_f32(if p.adds != 0 { sum + out.to_f32() } else { sum });
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn norm_twin<T: Precision>(
    _: &Grid,
    x: &[T],
    weight: &[T],
    bias: &[T],
    y: &mut [T],
    _tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let width = hidden as usize;
    for (x, y) in x.chunks(width).zip(y.chunks_mut(width)) {
        put(y, encoder::norm(x.iter().map(|x| x.to_f32()), weight, bias, eps));
    }
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn norm_last_twin<T: Precision>(
    _: &Grid,
    x: &[T],
    rows: &[u32],
    weight: &[T],
    bias: &[T],
    y: &mut [T],
    _sequences: u32,
    row_len: u32,
    tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let width = hidden as usize;
    for (y, row) in y.chunks_mut(width).zip(rows.chunks(row_len as usize)) {
        let last = row[1].wrapping_add(row[2]).wrapping_sub(1).min(tokens - 1) as usize;
        let x = x[last * width..][..width].iter().map(|x| x.to_f32());
        put(y, encoder::norm(x, weight, bias, eps));
    }
}

/// Where the cache has the keys of a head's token, and its values.
fn places(
    row: &[u32],
    position: usize,
    head: usize,
    (blocks, cached): (u32, Cached),
) -> Option<[usize; 2]> {
    let Cached { block_len, hidden, heads, layer, .. } = cached;
    let block = *row.get(SEQUENCE + position / BLOCK)?;
    let each = BLOCK * hidden as usize;
    let start = block as usize * block_len as usize + layer as usize * 2 * each;
    let keys = start + (head * BLOCK + position % BLOCK) * (hidden / heads) as usize;
    (block < blocks).then_some([keys, keys + each])
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn prompt_twin<T: Precision>(
    _: &Grid,
    qkv: &[T],
    rows: &[u32],
    tiles: &[u32],
    slab: &mut [T],
    out: &mut [T],
    tokens: u32,
    sequences: u32,
    blocks: u32,
    cached: Cached,
) {
    let Cached { row_len, hidden, heads, .. } = cached;
    let (width, d) = (hidden as usize, (hidden / heads) as usize);
    for tile in tiles.chunks(2).filter(|tile| tile[0] < sequences) {
        let row = &rows[(tile[0] * row_len) as usize..][..row_len as usize];
        let start = row[1].min(tokens) as usize;
        let len = (row[2].min(tokens) as usize).min(tokens as usize - start);
        let first = tile[1] as usize;
        for (token, head) in (first..len.min(first.saturating_add(TILE)))
            .flat_map(|token| (0..heads as usize).map(move |head| (token, head)))
        {
            // Part 0 is the query, 1 the key, 2 the value.
            let part = |token: usize, part: usize| {
                &qkv[(3 * (start + token) + part) * width + head * d..][..d]
            };
            let place = row[3] as usize + token;
            if let Some(at) = places(row, place, head, (blocks, cached)) {
                slab[at[0]..][..d].copy_from_slice(part(token, 1));
                slab[at[1]..][..d].copy_from_slice(part(token, 2));
            }
            let each = (0..=token).map(|key| (part(key, 1), part(key, 2)));
            attend(part(token, 0), each, &mut out[(start + token) * width + head * d..][..d]);
        }
    }
}

fn next_twin<T: Precision>(
    _: &Grid,
    qkv: &[T],
    rows: &[u32],
    slab: &mut [T],
    out: &mut [T],
    blocks: u32,
    cached: Cached,
) {
    let Cached { row_len, hidden, heads, .. } = cached;
    let (width, d) = (hidden as usize, (hidden / heads) as usize);
    let each_row = rows.chunks(row_len as usize).zip(qkv.chunks(3 * width));
    for ((row, qkv), out) in each_row.zip(out.chunks_mut(width)) {
        if row[0] == NONE || row[2] == 0 {
            continue;
        }
        let last = (row[3] as usize).min((row.len() - SEQUENCE) * BLOCK - 1);
        for (head, out) in out.chunks_mut(d).enumerate() {
            let place = |position: usize| places(row, position, head, (blocks, cached));
            if let Some(at) = place(last) {
                slab[at[0]..][..d].copy_from_slice(&qkv[width + head * d..][..d]);
                slab[at[1]..][..d].copy_from_slice(&qkv[2 * width + head * d..][..d]);
            }
            let (slab, known) = (&*slab, (0..=last).filter_map(place));
            let each = known.map(|[k, v]| (&slab[k..][..d], &slab[v..][..d]));
            attend(&qkv[head * d..][..d], each, out);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the kernel's")]
fn choose_twin(
    _: &Grid,
    logits: &[f32],
    rows: &[u32],
    chosen: &mut [u32],
    out: &mut [u32],
    row_len: u32,
    vocabulary: u32,
    stride: u32,
    _streams: u32,
) {
    let each = logits.chunks(stride as usize).zip(rows.chunks(row_len as usize));
    for ((logits, row), out) in each.zip(out) {
        *out = 0;
        let &[slot, _, count, position, temperature, top_k, seed, more_seed, ..] = row else {
            continue;
        };
        if slot == NONE {
            continue;
        }
        let logits = &logits[..vocabulary as usize];
        let temperature = f32::from_bits(temperature);
        let mut least = 0;
        if temperature > 0.0 && 0 < top_k && top_k < vocabulary {
            let mut all: Vec<u32> = logits.iter().map(|x| ordered(*x)).collect();
            let kth = all.len() - top_k as usize;
            least = *all.select_nth_unstable(kth).1;
        }
        let place = position.wrapping_add(count);
        let scored = logits.iter().zip(0..).filter_map(|(x, id)| {
            if temperature > 0.0 {
                let noisy = x / temperature + noise(id, [seed, more_seed, place]);
                return (ordered(*x) >= least).then(|| (ordered(noisy), !id));
            }
            Some((ordered(*x), !id))
        });
        let token = scored.max().map_or(0, |(_, id)| !id);
        *out = if logits.iter().all(|x| x.is_finite()) { token } else { NONE };
        if let Some(chosen) = chosen.get_mut(slot as usize) {
            *chosen = token;
        }
    }
}

/// Of Gumbel's distribution: the largest of logits, each with such a number added, is a sample of their softmax.
fn noise(id: u32, keys: [u32; 3]) -> f32 {
    let mixed = |x: u32| {
        let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        x ^ (x >> 16)
    };
    let bits = keys.iter().fold(mixed(id.wrapping_add(0x9e37_79b9)), |bits, key| mixed(bits ^ key));
    -(-(((bits >> 9) as f32 + 0.5) / 8_388_608.0).ln()).ln()
}

/// Integers in the order of the numbers.
fn ordered(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}
