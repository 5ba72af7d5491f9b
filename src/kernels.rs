//! The kernels that come with the crate, each with its CUDA source in `kernels/` and its host twin.
//!
//! All arrays are row-major; lengths count elements. Load one with `NAME::load(&device).await?`, or
//! with `NAME::load_blocking(&device)?` in sync code.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::{Grid, LaunchConfig, kernel};

kernel! {
    /// `y[i] = a * x[i] + y[i]`, fused.
    pub unsafe fn axpy(a: f32, x: &[f32], y: &mut [f32], n: u64 = y.len())
        where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("../kernels/axpy.ptx");
    host = twin::axpy;
}

kernel! {
    /// `x[i] = a * x[i]`.
    pub unsafe fn scale(a: f32, x: &mut [f32], n: u64 = x.len());
    launch = LaunchConfig::for_elements(x.len());
    ptx = include_str!("../kernels/scale.ptx");
    host = twin::scale;
}

kernel! {
    /// `out[i] = a[i] + b[i]`.
    pub unsafe fn add(a: &[f32], b: &[f32], out: Out<[f32]>, n: u64 = out.len())
        where a.len() == out.len(), b.len() == out.len();
    launch = LaunchConfig::for_elements(out.len());
    ptx = include_str!("../kernels/add.ptx");
    host = twin::add;
}

kernel! {
    /// `x[i] = value`.
    pub unsafe fn fill(value: f32, x: Out<[f32]>, n: u64 = x.len());
    launch = LaunchConfig::for_elements(x.len());
    ptx = include_str!("../kernels/fill.ptx");
    host = twin::fill;
}

kernel! {
    /// `c[m, n] = a[m, k] b[k, n]`, row-major, in 16 × 16 tiles of shared memory; each element is a
    /// chain of fused multiply-adds in ascending `k`. At most 1,048,560 rows.
    pub unsafe fn matmul_tiled(a: &[f32], b: &[f32], c: Out<[f32]>, m: u32, n: u32, k: u32)
        where a.len() == m * k,
              b.len() == k * n,
              c.len() == m * n;
    launch = if c.is_empty() {
        LaunchConfig::nothing()
    } else {
        LaunchConfig::new((n.div_ceil(16), m.div_ceil(16)), (16, 16))
    };
    ptx = include_str!("../kernels/matmul_tiled.ptx");
    host = twin::matmul_tiled;
}

kernel! {
    /// Keeps one thread busy for at least `nanoseconds`.
    pub unsafe fn spin(nanoseconds: u64);
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("../kernels/spin.ptx");
    host = twin::spin;
}

kernel! {
    /// Waits until the word is nonzero, for at most `timeout_ns`; on a timeout it sets the word to 2.
    ///
    /// Its stream is held up meanwhile. Open it with
    /// [`PinnedFlag::compare_exchange`](crate::PinnedFlag::compare_exchange)`(0, 1)`, and use a fresh word
    /// for each launch.
    pub unsafe fn gate(word: &PinnedFlag, timeout_ns: u64);
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("../kernels/gate.ptx");
    host = twin::gate;
}

kernel! {
    /// Does nothing.
    pub unsafe fn empty();
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("../kernels/empty.ptx");
    host = twin::empty;
}

/// [`gate`] for `testing`, loaded on the calling thread, whichever it is.
#[cfg(feature = "test-util")]
pub(crate) fn load_gate(home: &crate::device::home::Home) -> crate::Result<gate> {
    Ok(gate { kernel: crate::kernel::declared::Declared::load_now(home)? })
}

/// The kernels on the CPU: called once per launch, for the whole grid.
mod twin {
    use super::{Duration, Grid, Instant, Ordering};
    use std::sync::atomic::AtomicU32;

    pub(super) fn axpy(_: &Grid, a: f32, x: &[f32], y: &mut [f32], _n: u64) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = a.mul_add(*x, *y);
        }
    }

    pub(super) fn scale(_: &Grid, a: f32, x: &mut [f32], _n: u64) {
        x.iter_mut().for_each(|x| *x *= a);
    }

    pub(super) fn add(_: &Grid, a: &[f32], b: &[f32], out: &mut [f32], _n: u64) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }

    pub(super) fn fill(_: &Grid, value: f32, x: &mut [f32], _n: u64) {
        x.fill(value);
    }

    pub(super) fn matmul_tiled(
        _: &Grid,
        a: &[f32],
        b: &[f32],
        c: &mut [f32],
        m: u32,
        n: u32,
        k: u32,
    ) {
        let (m, n, k) = (m as usize, n as usize, k as usize);
        for row in 0..m {
            let out = &mut c[row * n..][..n];
            out.fill(0.0);
            for (step, a) in a[row * k..][..k].iter().enumerate() {
                for (out, b) in out.iter_mut().zip(&b[step * n..][..n]) {
                    *out = a.mul_add(*b, *out);
                }
            }
        }
    }

    pub(super) fn spin(_: &Grid, nanoseconds: u64) {
        let end = Instant::now() + Duration::from_nanos(nanoseconds);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // Don't spin long on the CPU.
            if left > Duration::from_micros(300) {
                std::thread::sleep(left - Duration::from_micros(150));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub(super) fn gate(_: &Grid, word: &AtomicU32, timeout_ns: u64) {
        let end = Instant::now() + Duration::from_nanos(timeout_ns);
        while word.load(Ordering::Acquire) == 0 {
            if Instant::now() >= end {
                let _ = word.compare_exchange(0, 2, Ordering::AcqRel, Ordering::Acquire);
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    pub(super) fn empty(_: &Grid) {}
}
