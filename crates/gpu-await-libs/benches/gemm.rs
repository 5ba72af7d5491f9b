//! Does a planned product cost more than cuBLASLt's bare call, and than cudarc's?
//!
//! Compared in one process, round by round in turn: [`Gemm::launch`](gpu_await_libs::Gemm::launch) `.queued()` (`ours`),
//! `cublasLtMatmul` with everything looked up before (`bare`), and cudarc's `CudaBlasLT::matmul`, which searches for an
//! algorithm in every call (`cudarc`).
//!
//! | line | is |
//! |---|---|
//! | `gemm.SHAPE.WHO.tflops` | how fast the device is, when launches are queued: the median of the rounds |
//! | `gemm.SHAPE.ratio` | ours by the bare call |
//! | `gemm.two_streams.ratio` | small products on two streams, by as many on one |
//! | `gemm.call.WHO.us` | how long the thread is busy for a product of 64 x 64 x 64 |
//!
//! Without cuBLASLt it prints nothing.

#[path = "../../../benches/measure.rs"]
mod measure;

#[path = "raw/lt.rs"]
mod lt;

fn main() {
    compared::main();
}

mod compared {
    use std::sync::Arc;
    use std::time::Instant;

    use cudarc::cublaslt::sys::{cublasComputeType_t, cudaDataType};
    use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig};
    use cudarc::driver::{CudaSlice, CudaStream};
    use gpu_await::half::bf16;
    use gpu_await::{Device, DeviceBuffer, Stream};
    use gpu_await_libs::{Blas, Gemm, GemmElement};

    use super::lt::{BareGemm, Extents};
    use super::measure::{self, Sorted, print, rounds, us};

    /// Who computes a product of the same buffers.
    struct Rivals<T: GemmElement> {
        stream: Stream,
        gemm: Gemm<T>,
        /// `a`, `b` and `c`.
        buffers: [DeviceBuffer<T>; 3],
        bare: Option<(Arc<CudaStream>, BareGemm)>,
    }

    impl<T: GemmElement<Scale = f32>> Rivals<T> {
        fn new(device: &Device, extents: Extents, tf32: bool) -> Self {
            let (m, n, k, batch) = extents;
            let blas = Blas::load_blocking(device).expect("cuBLASLt");
            let builder = blas.gemm::<T>(m as usize, n as usize, k as usize).batch(batch as usize);
            let builder = if tf32 { builder.tf32() } else { builder };
            let gemm = builder.plan_blocking().expect("an algorithm");
            let stream = device.stream().expect("a stream");
            let full = |len: u64, value: f32| {
                let value = T::narrow(value);
                stream.full((len * batch as u64) as usize, value).queued().expect("memory")
            };
            let buffers = [full(m * k, 0.5), full(k * n, 0.25), full(m * n, 0.0)];
            let bare = measure::on_cuda().then(|| {
                let context = device.cudarc_context().expect("a GPU");
                let stream = context.new_stream().expect("a stream");
                let compute = match tf32 {
                    true => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
                    false => cublasComputeType_t::CUBLAS_COMPUTE_32F,
                };
                let element = match size_of::<T>() {
                    2 => cudaDataType::CUDA_R_16BF,
                    _ => cudaDataType::CUDA_R_32F,
                };
                let bare = BareGemm::new(&stream, extents, element, compute);
                (stream, bare)
            });
            stream.synchronize().expect("completes");
            Rivals { stream, gemm, buffers, bare }
        }

        fn launch_ours(&mut self) {
            let [a, b, c] = &mut self.buffers;
            self.gemm.launch(&self.stream, 1.0, a, b, 0.0, c).queued().expect("is launched");
        }

        fn launch_bare(&self) {
            let (_, bare) = self.bare.as_ref().expect("a GPU");
            bare.launch([0, 1, 2].map(|index| self.buffers[index].device_ptr()));
        }
    }

    /// cudarc's safe wrapper, which searches in every call; of `f32` it computes in TF32.
    struct Searching {
        stream: Arc<CudaStream>,
        blas: CudaBlasLT,
        slices: [CudaSlice<f32>; 3],
        config: MatmulConfig,
    }

    impl Searching {
        fn new(device: &Device, (m, n, k, batch): Extents) -> Self {
            let stream = device.cudarc_context().expect("a GPU").new_stream().expect("a stream");
            let blas = CudaBlasLT::new(stream.clone()).expect("cuBLASLt");
            let full = |len: u64, value: f32| {
                let host = vec![value; (len * batch as u64) as usize];
                stream.clone_htod(&host).expect("memory")
            };
            let slices = [full(m * k, 0.5), full(k * n, 0.25), full(m * n, 0.0)];
            let config = MatmulConfig {
                transa: false,
                transb: false,
                transc: false,
                // Row by row is the transposed product.
                m: n,
                n: m,
                k,
                alpha: 1.0,
                lda: n as i64,
                ldb: k as i64,
                beta: 0.0,
                ldc: n as i64,
                stride_a: Some((k * n) as i64),
                stride_b: Some((m * k) as i64),
                stride_c: Some((m * n) as i64),
                stride_bias: None,
                batch_size: Some(batch),
            };
            Searching { stream, blas, slices, config }
        }

        fn launch(&mut self) {
            let [a, b, c] = &mut self.slices;
            // SAFETY: the slices have these shapes.
            unsafe { self.blas.matmul(self.config, b, a, c, None, None) }.expect("is launched");
        }
    }

    fn tflops((m, n, k, batch): Extents, launches: usize, seconds: f64) -> f64 {
        2.0 * (m * n * k) as f64 * f64::from(batch) * launches as f64 / seconds / 1e12
    }

    fn speed<T>(device: &Device, name: &str, extents: Extents, tf32: bool, launches: usize)
    where
        T: GemmElement<Scale = f32>,
    {
        let mut rivals = Rivals::<T>::new(device, extents, tf32);
        let launches = rounds(launches, 1);
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        let (warm_up, rounds) = (rounds(2, 0), rounds(11, 1));
        for round in 0..warm_up + rounds {
            let start = Instant::now();
            (0..launches).for_each(|_| rivals.launch_ours());
            rivals.stream.synchronize().expect("completes");
            let mine = start.elapsed().as_secs_f64();
            let before = Instant::now();
            if let Some((stream, _)) = &rivals.bare {
                (0..launches).for_each(|_| rivals.launch_bare());
                stream.synchronize().expect("completes");
            }
            if round >= warm_up {
                ours.push(tflops(extents, launches, mine));
                bare.push(tflops(extents, launches, before.elapsed().as_secs_f64()));
            }
        }
        let (ours, bare) = (Sorted::new(ours).p50(), Sorted::new(bare).p50());
        print(&format!("gemm.{name}.ours.tflops"), ours, "TFLOP/s");
        let workspace = rivals.gemm.workspace_bytes() as f64 / f64::from(1 << 20);
        print(&format!("gemm.{name}.workspace"), workspace, "MiB");
        if rivals.bare.is_some() {
            print(&format!("gemm.{name}.bare.tflops"), bare, "TFLOP/s");
            print(&format!("gemm.{name}.ratio"), ours / bare, "ratio");
        }
    }

    fn speed_of_cudarc(device: &Device, name: &str, extents: Extents, launches: usize) {
        let mut searching = Searching::new(device, extents);
        let mut speeds = Vec::new();
        for _ in 0..11 {
            let start = Instant::now();
            (0..launches).for_each(|_| searching.launch());
            searching.stream.synchronize().expect("completes");
            speeds.push(tflops(extents, launches, start.elapsed().as_secs_f64()));
        }
        print(&format!("gemm.{name}.cudarc.tflops"), Sorted::new(speeds).p50(), "TFLOP/s");
    }

    /// How long a call keeps the thread, while the stream's queue is not full.
    fn call(count: usize, mut launch: impl FnMut(), mut drain: impl FnMut()) -> f64 {
        let mut times = Vec::new();
        for _ in 0..rounds(200, 2) {
            let start = Instant::now();
            (0..count).for_each(|_| launch());
            times.push(us(start.elapsed()) / count as f64);
            drain();
        }
        Sorted::new(times).p50()
    }

    fn calls(device: &Device) {
        const BURST: usize = 100;
        const SMALL: Extents = (64, 64, 64, 1);
        let mut rivals = Rivals::<f32>::new(device, SMALL, true);
        let ours = rivals.stream.clone();
        let drain = || ours.synchronize().expect("completes");
        print("gemm.call.ours.us", call(BURST, || rivals.launch_ours(), drain), "us");
        if let Some(stream) = rivals.bare.as_ref().map(|(stream, _)| stream.clone()) {
            let drain = || stream.synchronize().expect("completes");
            print("gemm.call.bare.us", call(BURST, || rivals.launch_bare(), drain), "us");
            let mut searching = Searching::new(device, SMALL);
            let stream = searching.stream.clone();
            let drain = || stream.synchronize().expect("completes");
            print("gemm.call.cudarc.us", call(BURST, || searching.launch(), drain), "us");
        }
    }

    /// Products that fill a part of the GPU: on two streams, by the time of as many on one.
    fn overlap(device: &Device) {
        const LAUNCHES: usize = 10;
        let gemm = Blas::load_blocking(device).expect("cuBLASLt").gemm::<f32>(128, 128, 16_384);
        let gemm = gemm.workspace_bytes(0).plan_blocking().expect("an algorithm");
        let streams = [device.stream().expect("a stream"), device.stream().expect("a stream")];
        let buffers = |stream: &Stream| {
            let full = |len: usize| stream.full(len, 0.5f32).queued().expect("memory");
            (full(128 * 16_384), full(16_384 * 128), full(128 * 128))
        };
        let mut each = streams.each_ref().map(buffers);
        let mut round = |both: bool| {
            let start = Instant::now();
            for _ in 0..LAUNCHES {
                for (index, (a, b, c)) in each.iter_mut().enumerate() {
                    let stream = &streams[if both { index } else { 0 }];
                    gemm.launch(stream, 1.0, a, b, 0.0, c).queued().expect("is launched");
                }
            }
            streams.iter().for_each(|stream| stream.synchronize().expect("completes"));
            us(start.elapsed())
        };
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for _ in 0..rounds(21, 1) {
            one.push(round(false));
            two.push(round(true));
        }
        let ratio = Sorted::new(two.split_off(1)).p50() / Sorted::new(one.split_off(1)).p50();
        print("gemm.two_streams.ratio", ratio, "ratio");
    }

    pub(super) fn main() {
        let device = measure::device();
        if let Err(error) = Blas::load_blocking(&device) {
            eprintln!("# nothing to compare: {error}");
            return;
        }
        calls(&device);
        if !measure::is_smoke() {
            overlap(&device);
        }
        if measure::is_smoke() {
            speed::<f32>(&device, "f32_tf32_64", (64, 64, 64, 1), true, 10);
            return;
        }
        speed::<bf16>(&device, "bf16_8192", (8192, 8192, 8192, 1), false, 10);
        speed::<f32>(&device, "f32_1024", (1024, 1024, 1024, 1), false, 200);
        speed::<f32>(&device, "f32_tf32_1024", (1024, 1024, 1024, 1), true, 200);
        speed_of_cudarc(&device, "f32_tf32_1024", (1024, 1024, 1024, 1), 200);
        speed::<bf16>(&device, "bf16_256x64", (256, 256, 256, 64), false, 200);
    }
}
