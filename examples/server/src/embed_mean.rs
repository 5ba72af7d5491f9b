//! The kernel behind `/embed`, with its host twin.
//!
//! The source is `embed_mean.cu`; `kernels/build.py` of the repository made the PTX beside it, so nobody who
//! builds this needs a CUDA compiler. The twin does the same sums in the same order, and gives the same bits.
//! Without `#![forbid(unsafe_code)]`, as `drill.rs`: `unsafe fn` vouches for the PTX.

use gpu_await::{Grid, LaunchConfig, kernel};

/// Numbers in a row of the table, and in an embedding. The kernel's block has as many threads.
pub(crate) const WIDTH: usize = 64;

kernel! {
    /// `out[r, :]` = the mean of the table rows of request `r`'s tokens, divided by its norm.
    /// Request `r` has the tokens `starts[r]..starts[r + 1]`.
    pub(crate) unsafe fn embed_mean(
        tokens: &[u32],
        starts: &[u32],
        table: &[f32],
        out: Out<[f32]>,
        n_tokens: u32 = tokens.len(),
        rows: u32 = table.len() / WIDTH.wide(),
    )
        where out.len() % WIDTH.wide() == 0,
              starts.len() == out.len() / WIDTH.wide() + 1,
              table.len() % WIDTH.wide() == 0,
              !table.is_empty(),
              u32::try_from(table.len()).is_ok();
    launch = if out.is_empty() {
        LaunchConfig::nothing()
    } else {
        LaunchConfig::new(out.len() / WIDTH.wide(), WIDTH) // a block a request
    };
    ptx = include_str!("embed_mean.ptx");
    host = twin;
}

fn twin(
    _: &Grid,
    tokens: &[u32],
    starts: &[u32],
    table: &[f32],
    out: &mut [f32],
    n_tokens: u32,
    rows: u32,
) {
    for (out, ends) in out.chunks_exact_mut(WIDTH).zip(starts.windows(2)) {
        let (start, end) = (ends[0] as usize, ends[1].min(n_tokens) as usize);
        let tokens = tokens.get(start..end).unwrap_or_default();
        out.fill(0.0);
        for token in tokens {
            let row = (*token).min(rows - 1) as usize * WIDTH;
            out.iter_mut().zip(&table[row..]).for_each(|(sum, value)| *sum += value);
        }
        if !tokens.is_empty() {
            out.iter_mut().for_each(|sum| *sum /= tokens.len() as f32);
        }
        let mut squares: [f32; WIDTH] = std::array::from_fn(|j| out[j] * out[j]);
        let mut half = WIDTH / 2;
        while half > 0 {
            (0..half).for_each(|j| squares[j] += squares[j + half]);
            half /= 2;
        }
        let norm = squares[0].sqrt();
        out.iter_mut().for_each(|mean| *mean = if norm > 0.0 { *mean / norm } else { 0.0 });
    }
}
