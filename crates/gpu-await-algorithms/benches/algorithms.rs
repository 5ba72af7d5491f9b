//! Are algorithms as quick as CUB, from the call to the ready future and on the device?
//!
//! | line | is, the median of the rounds |
//! |---|---|
//! | `algorithm.NAME.2pN.us` | from the call until the awaited future is ready, with 2^N elements |
//! | `algorithm.NAME.2pN.device_us` | between two events around it |
//! | `algorithm.NAME.2pN.cub_us`, `.cub_device_us` | the same by CUB's call, until `cudaStreamSynchronize` returns |
//! | `algorithm.NAME.2pN.added_us`, `.device_ratio` | the difference of the first; the ratio of the second |
//! | `algorithm.runs_u32.2pN.cub_narrow_us`, `.cub_narrow_device_us` | CUB's with lengths of 32 bits; beside it in `cub_us` they are of 64, as ours |
//! | `algorithm.load.NAME.ms` | what the first use of a process takes |
//! | `algorithm.load.preload_f64.ms`, `.preloaded_sum_f64.ms` | what `preload` of two families takes, and a first use behind it |
//!
//! Keys that are sorted are put back before each round, which is not counted. CUB's lines are printed where the environment variable
//! `GPU_AWAIT_CUB` names what `cub.cu` was built to; it runs in the same process on the same memory. CUB counts elements
//! in 32 bits there (but runs), ours in 64. What `sum_f32` and `max_u32` give stays on the device; in `sum_f32_to_host` and
//! `max_u32_to_host` it comes to the host, by CUB's call and a copy to pinned memory.
//! `power=N`: with 2^N elements alone. CuPy and PyTorch do the same in `algorithms_cupy.py` and `algorithms_torch.py`.

#[path = "../../../benches/measure.rs"]
mod measure;

fn main() {
    compared::main();
}

mod compared {
    use std::ffi::c_void;
    use std::time::Instant;

    use bytemuck::Pod;
    use gpu_await::{DeviceBuffer, Element, Op, Stream};
    use gpu_await_algorithms::{
        AlgorithmFamily, Algorithms, Compare, Preload, ReduceOp, transform,
    };
    use tokio::runtime::Runtime;

    use super::measure::{self, Sorted, is_smoke, on_cuda, print, rounds, us};

    type Measure = unsafe extern "C" fn(
        i32,
        *const c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        usize,
        usize,
        i32,
        *mut f32,
        *mut f32,
    ) -> i32;

    /// As `cub.cu` numbers them: runs with lengths of 64 bits, and of 32.
    const RUNS: i32 = 10;
    const NARROW_RUNS: i32 = 11;
    /// Added to a number: the result is copied to the host behind it.
    const TO_HOST: i32 = 100;

    /// CUB, if it was built.
    struct Cub {
        measure: Measure,
    }

    impl Cub {
        fn find() -> Option<Cub> {
            let path = std::env::var_os("GPU_AWAIT_CUB").filter(|_| on_cuda())?;
            // SAFETY: it is what `cub.cu` was built to, which runs nothing when it is loaded.
            let library = unsafe { libloading::Library::new(&path) }.expect("GPU_AWAIT_CUB");
            let library = Box::leak(Box::new(library));
            // SAFETY: that is its signature.
            let measure = unsafe { library.get::<Measure>(b"cub_measure") }.expect("its function");
            Some(Cub { measure: *measure })
        }
    }

    struct Bench {
        stream: Stream,
        runtime: Runtime,
        cub: Option<Cub>,
    }

    /// Memory of one size.
    struct Memory<T: Element> {
        fresh: DeviceBuffer<T>,
        x: DeviceBuffer<T>,
        y: DeviceBuffer<T>,
        one: DeviceBuffer<T>,
        v: DeviceBuffer<T>,
        w: DeviceBuffer<T>,
        count: DeviceBuffer<u64>,
        bins: DeviceBuffer<u64>,
        lengths: DeviceBuffer<u64>,
        /// Of segments of 64 elements.
        offsets: DeviceBuffer<u64>,
    }

    impl Bench {
        fn memory<T: Element + Pod>(&self, len: usize, element: impl Fn(u64) -> T) -> Memory<T> {
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                element(state.wrapping_mul(0x2545_f491_4f6c_dd1d))
            };
            let fresh: Vec<T> = (0..len).map(|_| next()).collect();
            let up = || self.stream.zeros::<T>(len).queued().expect("memory");
            let fresh = self.runtime.block_on(self.stream.upload_staged(fresh)).expect("memory");
            let count = self.stream.empty(1).queued().expect("memory");
            let numbers = |len| self.stream.zeros::<u64>(len).queued().expect("memory");
            let offsets = (0..=len as u64 / 64).map(|segment| 64 * segment).collect::<Vec<_>>();
            let offsets = self.stream.upload(offsets).queued().expect("memory");
            let (bins, lengths) = (numbers(256), numbers(len));
            let one = self.stream.zeros(1).queued().expect("memory");
            Memory { fresh, x: up(), y: up(), one, v: up(), w: up(), count, bins, lengths, offsets }
        }

        fn measure<T: Element, R: Send + 'static>(
            &self,
            (name, which, power): (&str, i32, u32),
            memory: &mut Memory<T>,
            call: impl Fn(&Stream, &mut Memory<T>) -> Op<R>,
        ) {
            let stream = &self.stream;
            let rounds = rounds(if power > 24 { 9 } else { 25 }, 1);
            let (mut total, mut device) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                stream.copy(&memory.fresh, &mut memory.x).queued().expect("a copy");
                let begin = stream.record_timed().expect("an event");
                // Nobody waits for it: no marker of ours between the two events.
                call(stream, memory).abandon();
                let end = stream.record_timed().expect("an event");
                end.synchronize().expect("an event");
                device.push(us(end.elapsed_since(&begin).expect("a time")));
                stream.copy(&memory.fresh, &mut memory.x).synchronize().expect("a copy");
                let op = self.runtime.block_on(async {
                    let before = Instant::now();
                    let op = call(stream, memory);
                    op.await.map(|_| before.elapsed())
                });
                total.push(us(op.expect("a result")));
            }
            let (total, device) = (Sorted::new(total).p50(), Sorted::new(device).p50());
            let line = |what: &str| format!("algorithm.{name}.2p{power}.{what}");
            print(&line("us"), total, "us");
            print(&line("device_us"), device, "us");
            // Of some there is none.
            let Some((cub_total, cub_device)) = self.by_cub((name, which), memory, rounds) else {
                return;
            };
            print(&line("cub_us"), cub_total, "us");
            print(&line("cub_device_us"), cub_device, "us");
            print(&line("added_us"), total - cub_total, "us");
            print(&line("device_ratio"), device / cub_device, "ratio");
            if which != RUNS {
                return;
            }
            if let Some((total, device)) = self.by_cub((name, NARROW_RUNS), memory, rounds) {
                print(&line("cub_narrow_us"), total, "us");
                print(&line("cub_narrow_device_us"), device, "us");
            }
        }

        /// Until `cudaStreamSynchronize` returns, and on the device.
        fn by_cub<T: Element>(
            &self,
            (name, which): (&str, i32),
            memory: &Memory<T>,
            rounds: usize,
        ) -> Option<(f64, f64)> {
            let cub = self.cub.as_ref().filter(|_| which >= 0)?;
            let pointer = |buffer: &DeviceBuffer<T>| buffer.device_ptr() as *mut c_void;
            let (mut cub_device, mut cub_total) = (0.0, 0.0);
            let bytes = memory.x.len() * size_of::<T>();
            self.stream.done().synchronize().expect("all is done");
            // SAFETY: the memory is as large as it says, and nothing else uses it meanwhile.
            let status = unsafe {
                (cub.measure)(
                    which,
                    pointer(&memory.fresh),
                    pointer(&memory.x),
                    pointer(&memory.y),
                    pointer(&memory.v),
                    pointer(&memory.w),
                    memory.x.len(),
                    bytes,
                    rounds as i32,
                    &mut cub_device,
                    &mut cub_total,
                )
            };
            assert_eq!(status, 0, "{name} by CUB");
            Some((f64::from(cub_total), f64::from(cub_device)))
        }
    }

    pub(super) fn main() {
        let device = measure::device();
        let stream = device.stream().expect("a stream");
        let runtime = measure::current_thread();
        let bench = Bench { stream, runtime, cub: Cub::find() };
        let stream = &bench.stream;

        let few = stream.full(8, 1.0f32).queued().expect("memory");
        let before = Instant::now();
        stream.sum(&few).synchronize().expect("a sum");
        print("algorithm.load.sum_f32.ms", measure::ms(before.elapsed()), "ms");
        let mut few = stream.full(8, 1u32).queued().expect("memory");
        let before = Instant::now();
        stream.sort(&mut few).synchronize().expect("a sort");
        print("algorithm.load.sort_u32.ms", measure::ms(before.elapsed()), "ms");
        let families = [AlgorithmFamily::Reduce, AlgorithmFamily::Sort];
        let before = Instant::now();
        bench.runtime.block_on(device.preload::<f64>(&families)).expect("kernels");
        print("algorithm.load.preload_f64.ms", measure::ms(before.elapsed()), "ms");
        let few = stream.full(8, 1.0f64).queued().expect("memory");
        let before = Instant::now();
        stream.sum(&few).synchronize().expect("a sum");
        print("algorithm.load.preloaded_sum_f64.ms", measure::ms(before.elapsed()), "ms");

        let powers: &[u32] =
            if is_smoke() { &[10] } else { &[10, 12, 14, 16, 18, 20, 22, 24, 26, 28] };
        let only = measure::number("power");
        for &power in powers.iter().filter(|power| only.is_none_or(|only| only == **power as usize))
        {
            let len = 1 << power;
            {
                let mut memory = bench.memory(len, |bits| (bits >> 40) as f32 - 8_388_608.0);
                let axpy = |stream: &Stream, m: &mut Memory<f32>| {
                    stream.transform(transform!(|x, v| 2.0 * x + v), (&m.x, &m.v), &mut m.y)
                };
                bench.measure(("transform_f32", 8, power), &mut memory, axpy);
                bench.measure(("sum_f32", 0, power), &mut memory, |stream, m| {
                    stream.sum_into(&m.x, &mut m.one)
                });
                let to_host = ("sum_f32_to_host", TO_HOST, power);
                bench.measure(to_host, &mut memory, |stream, m| stream.sum(&m.x));
                bench.measure(("sort_f32", 6, power), &mut memory, |stream, m| {
                    stream.sort(&mut m.x)
                });
            }
            {
                let mut memory = bench.memory(len, |bits| (bits >> 32) as u32);
                let scan = |stream: &Stream, m: &mut Memory<u32>| {
                    stream.exclusive_scan(&m.x, ReduceOp::Sum, 0, &mut m.y)
                };
                bench.measure(("scan_u32", 1, power), &mut memory, scan);
                let select = |stream: &Stream, m: &mut Memory<u32>| {
                    stream.copy_if_into(&m.x, Compare::Less(1 << 31), &mut m.y, &mut m.count)
                };
                bench.measure(("select_u32", 2, power), &mut memory, select);
                bench.measure(("max_u32", 7, power), &mut memory, |stream, m| {
                    stream.max_into(&m.x, &mut m.one)
                });
                let to_host = ("max_u32_to_host", TO_HOST + 7, power);
                bench.measure(to_host, &mut memory, |stream, m| stream.max(&m.x));
                bench.measure(("sort_u32", 3, power), &mut memory, |stream, m| {
                    stream.sort(&mut m.x)
                });
                let pairs =
                    |stream: &Stream, m: &mut Memory<u32>| stream.sort_by_key(&mut m.x, &mut m.v);
                bench.measure(("sort_u32_u32", 4, power), &mut memory, pairs);
                bench.measure(("histogram_u32", 9, power), &mut memory, |stream, m| {
                    stream.histogram(&m.x, 0..=u32::MAX, &mut m.bins)
                });
                let sums = |stream: &Stream, m: &mut Memory<u32>| {
                    let mut out = m.y.slice_mut(..m.offsets.len() - 1).expect("inside");
                    stream.segmented_reduce(&m.x, &m.offsets, ReduceOp::Sum, 0, &mut out)
                };
                bench.measure(("segmented_sum_u32", -1, power), &mut memory, sums);
                bench.measure(("segmented_sort_u32", -1, power), &mut memory, |stream, m| {
                    stream.segmented_sort(&mut m.x, &m.offsets)
                });
                let top = |stream: &Stream, m: &mut Memory<u32>| {
                    let mut places = m.lengths.slice_mut(..50).expect("inside");
                    stream.top_k_places(
                        &m.x,
                        &mut m.y.slice_mut(..50).expect("inside"),
                        &mut places,
                    )
                };
                bench.measure(("top_50_u32", -1, power), &mut memory, top);
            }
            {
                // Runs of 15 on average, and single ones between them.
                let mut memory = bench.memory(len, |bits| u32::from(bits >> 60 == 0));
                bench.measure(("runs_u32", RUNS, power), &mut memory, |stream, m| {
                    stream.run_length_encode_into(&m.x, &mut m.y, &mut m.lengths, &mut m.count)
                });
            }
            let mut memory = bench.memory(len, |bits| bits);
            bench.measure(("sort_u64", 5, power), &mut memory, |stream, m| stream.sort(&mut m.x));
        }
    }
}
