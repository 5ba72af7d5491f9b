//! Another thread captures a stream of its own into a graph, in the mode that every thread's unsafe
//! calls void, while tasks await operations and the poller looks: the capture ends as if it were alone.
//!
//! What such a call is, the driver decides: these run on a GPU alone. That each one of ours is made in
//! a relaxed bracket is held under the stand-in driver, in `tests/driver_calls`.
#![cfg(feature = "cuda")]

use std::time::Duration;

use cudarc::driver::sys;
use futures::executor::block_on;
use gpu_await::{
    Device, DeviceKind, InOut, RawQueue, RawSlice, Region, Result, Uses, kernels, testing,
};

use crate::under_test::modes;

const BYTES: usize = 4096;
const WORKERS: usize = 4;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A stream of another library, and memory for its graph.
struct Capture {
    stream: sys::CUstream,
    memory: sys::CUdeviceptr,
}

impl Capture {
    /// The calling thread keeps the device's context current.
    fn new(device: &Device) -> Self {
        let context = device.cudarc_context().expect("a CUDA device");
        context.bind_to_thread().expect("the context is alive");
        let (mut stream, mut memory) = (std::ptr::null_mut(), 0);
        // SAFETY: a context is current and the result is live. 1 is `CU_STREAM_NON_BLOCKING`.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        // SAFETY: a context is current and the result is live.
        ok(unsafe { sys::cuMemAlloc_v2(&raw mut memory, BYTES) });
        Capture { stream, memory }
    }

    fn begin(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is this one's and nothing is being captured on it.
        ok(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) });
    }

    /// Adds a node to the graph, and looks whether somebody voided it.
    fn add(&self, value: u8) {
        // SAFETY: the memory is this one's, of that size, and lives longer than the graph.
        let added = unsafe { sys::cuMemsetD8Async(self.memory, value, BYTES, self.stream) };
        assert_eq!(added, sys::CUresult::CUDA_SUCCESS, "the capture is void");
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is this one's and the result is live.
        ok(unsafe { sys::cuStreamIsCapturing(self.stream, &raw mut status) });
        assert_eq!(status, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    }

    /// Ends the capture and runs the graph; what the memory then holds.
    fn end(&self) -> Vec<u8> {
        let (mut graph, mut runnable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: this thread began the capture; the result is live.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) };
        assert_eq!(ended, sys::CUresult::CUDA_SUCCESS, "somebody voided the capture");
        assert!(!graph.is_null());
        // SAFETY: the graph was made just now; the result is live.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut runnable, graph, 0) });
        // SAFETY: the graph was instantiated just now, and its memory is there.
        ok(unsafe { sys::cuGraphLaunch(runnable, self.stream) });
        // SAFETY: the stream is this one's.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
        // SAFETY: it ran to its end.
        ok(unsafe { sys::cuGraphExecDestroy(runnable) });
        // SAFETY: nobody else has it.
        ok(unsafe { sys::cuGraphDestroy(graph) });
        let mut seen = vec![0_u8; BYTES];
        // SAFETY: both are `BYTES` long, and nothing is under way on them.
        ok(unsafe { sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), self.memory, BYTES) });
        seen
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: what was put on the stream ended, or the test failed and the process ends.
        let freed = unsafe { sys::cuMemFree_v2(self.memory) };
        // SAFETY: the stream is this one's.
        let gone = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        if !std::thread::panicking() {
            ok(freed);
            ok(gone);
        }
    }
}

/// Captures on this thread while `WORKERS` others do `work`, in each mode.
fn beside(work: impl Fn(&Device, usize) -> Result<()> + Sync) {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        if device.kind() != DeviceKind::Cuda {
            eprintln!("nothing to test: a host device has no captures");
            return;
        }
        let capture = Capture::new(&device);
        // First: who fails here keeps nobody waiting.
        capture.begin();
        let values = std::thread::scope(|scope| {
            let (device, work) = (&device, &work);
            let workers: Vec<_> =
                (0..WORKERS).map(|worker| scope.spawn(move || work(device, worker))).collect();
            let mut nodes = 0_u8;
            // Few nodes, over all the time that the others work.
            while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                nodes = nodes.wrapping_add(1);
                capture.add(nodes);
                std::thread::park_timeout(Duration::from_millis(1));
            }
            capture.add(nodes);
            let seen = capture.end();
            assert_eq!(seen, [nodes; BYTES], "{mode:?}: the graph runs");
            workers.into_iter().map(|worker| worker.join().expect("no panic")).collect::<Vec<_>>()
        });
        for value in values {
            value.expect("nothing fails beside a capture");
        }
    }
}

#[test]
fn a_capture_elsewhere_survives_what_is_awaited() {
    beside(|device, worker| {
        let stream = device.stream()?;
        let scale = kernels::scale::load_blocking(device)?;
        let spin = kernels::spin::load_blocking(device)?;
        for round in 0..30_u64 {
            let value = (worker as f32) + 1.0;
            let mut x = block_on(stream.upload(vec![value; 10_000]))?;
            // Short and long waits: by the task itself, by the poller, by a doorbell.
            block_on(spin.launch(&stream, (round % 6) * 500_000))?;
            block_on(scale.launch(&stream, 2.0, &mut x))?;
            assert_eq!(block_on(stream.host_fn(move || round))?, round);
            assert!(block_on(stream.download(&x))?.iter().all(|x| *x == 2.0 * value));
            stream.fill(&mut x, 0.0).queued()?;
            block_on(stream.record()?.done())?;
            block_on(stream.done())?;
            assert!(stream.is_idle());
            let _ = (device.stats(), stream.backlog());
        }
        Ok(())
    });
}

#[test]
fn a_capture_elsewhere_survives_memory_that_is_pinned_and_streams_that_are_made() {
    beside(|device, worker| {
        for round in 0..10_usize {
            // Each larger than what the pool has.
            let bytes = (3 + round * WORKERS + worker) << 20;
            let pinned = block_on(device.pinned_async::<u8>(bytes))?;
            let stream = device.stream()?;
            let x = block_on(stream.upload(pinned))?;
            assert_eq!(block_on(stream.download_staged(&x))?.len(), bytes);
            let (start, end) = (stream.record_timed()?, stream.record_timed()?);
            block_on(end.done())?;
            end.elapsed_since(&start)?;
            device.memory()?;
        }
        Ok(())
    });
}

#[test]
fn a_capture_elsewhere_survives_kernels_that_are_loaded() {
    beside(|device, _| {
        let stream = device.stream()?;
        for _ in 0..5 {
            let add = block_on(kernels::add::load(device))?;
            let (a, b) = (stream.ones::<f32>(100).queued()?, stream.ones::<f32>(100).queued()?);
            let mut sum = stream.empty::<f32>(100).queued()?;
            add.launch(&stream, &a, &b, &mut sum).queued()?;
            assert_eq!(block_on(stream.download(&sum))?[99], 2.0);
        }
        Ok(())
    });
}

#[test]
fn a_capture_elsewhere_survives_devices_that_are_opened_and_closed() {
    beside(|_, _| {
        for _ in 0..5 {
            let device = Device::cuda(0)?;
            let x = block_on(device.zeros::<u8>(BYTES))?;
            assert_eq!(block_on(device.download(&x))?, [0; BYTES]);
            drop(x);
            block_on(device.close(Duration::MAX))?;
        }
        Ok(())
    });
}

/// What other libraries do inside `enqueue` may be what voids captures: they allocate as they please.
#[test]
fn a_capture_elsewhere_survives_other_libraries() {
    beside(|device, worker| {
        let stream = device.stream()?;
        for round in 0..20_u8 {
            let mut x = stream.empty::<u8>(BYTES).queued()?;
            let uses = Uses::new("theirs").writes(&mut x);
            let call =
                |queue: &RawQueue<'_>, (x,): (RawSlice<u8>,)| -> std::result::Result<(), String> {
                    let mut scratch = 0;
                    // SAFETY: the result is live; a context is current.
                    let allocated = unsafe { sys::cuMemAlloc_v2(&raw mut scratch, BYTES) };
                    let handle = queue.stream() as sys::CUstream;
                    // SAFETY: live memory of that length, on a live stream.
                    let set = unsafe { sys::cuMemsetD8Async(x.address(), round, x.len(), handle) };
                    // SAFETY: nobody uses it.
                    let freed = unsafe { sys::cuMemFree_v2(scratch) };
                    let codes = [allocated, set, freed];
                    let fine = codes.iter().all(|code| *code == sys::CUresult::CUDA_SUCCESS);
                    if fine { Ok(()) } else { Err(format!("{codes:?}")) }
                };
            // SAFETY: it overwrites what is declared, on the stream.
            unsafe { stream.enqueue(uses, call) }.queued()?;
            let ptr = x.device_ptr();
            // SAFETY: the buffer keeps the memory, which is behind the stream.
            let adopted = unsafe { stream.adopt_memory::<u8>(ptr, BYTES, x) }?;
            assert!(
                block_on(stream.download(&adopted))?.iter().all(|byte| *byte == round),
                "{worker}"
            );
        }
        Ok(())
    });
}

/// Graphs are compiled, set and launched, and others' work is captured, while another thread captures.
#[test]
fn a_capture_elsewhere_survives_graphs() {
    type Slots = (InOut<f32>, f32);
    beside(|device, worker| {
        let stream = device.stream()?;
        let scale = kernels::scale::load_blocking(device)?;
        let graph = device.graph::<Slots, _, _>(scale.clone(), |q, scale, (mut x, a)| {
            let mut t = q.full(x.len(), a)?;
            scale.launch(q, 2.0, &mut t)?;
            let uses = Uses::new("theirs").reads(&t).writes(&mut x).can_be_captured();
            let call = |queue: &RawQueue<'_>, (t, x): (RawSlice<f32>, RawSlice<f32>)| {
                let (to, bytes) = (x.address(), x.size_bytes());
                let handle = queue.stream() as sys::CUstream;
                // SAFETY: live ranges of that length, on a live stream.
                let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, t.address(), bytes, handle) };
                if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{code:?}")) }
            };
            // SAFETY: it copies between what is declared, and may be repeated.
            unsafe { q.enqueue(uses, call) }?;
            scale.launch(q, 3.0, &mut x)
        });
        let mut region = Region::new();
        let mut x = stream.zeros::<f32>(100).queued()?;
        for round in 0..60 {
            let a = (round / 3) as f32;
            graph.launch(&stream, (&mut x, a)).queued()?;
            let replayed = stream.replay(&mut region, |q| {
                scale.launch(q, 0.5, &mut x)?;
                (0..round % 3).try_for_each(|_| scale.launch(q, 1.0, &mut x))
            });
            block_on(replayed)?;
            assert_eq!(block_on(stream.download(&x))?, [3.0 * a; 100], "{worker}, {round}");
        }
        Ok(())
    });
}
