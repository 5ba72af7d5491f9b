//! Random replayed lists of kernels that start as early as they may, against a sequential model: they trigger directly behind their wait, read late
//! and write at the last moment, in grids so small that several are resident side by side. So an edge that is missing, or programmatic where it must
//! be full, shows in the values; on a host device a wrong kind of edge does.
//!
//! `GPU_AWAIT_OVERLAP_LISTS` is the number of lists, 20 by default.

use std::sync::Arc;

use futures::executor::block_on;
use gpu_await::sibling::{ArgBlock, Footprint, Home, UntypedKernel, VerbParts, load};
use gpu_await::{
    Device, DeviceBuffer, DeviceKind, Grid, Image, Overlap, Queue, Readable, Region, Result,
    Writable, testing,
};

const LEN: usize = 128;
const BUFFERS: usize = 4;
/// What `mix` does: `y = 3 y + x + by`.
const PTX: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry mix(.param .u64 x, .param .u64 y, .param .u32 n, .param .u32 by, .param .u32 naps)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ld.param.u64 %rd0, [x];
    ld.param.u64 %rd1, [y];
    ld.param.u32 %r0, [n];
    ld.param.u32 %r1, [by];
    ld.param.u32 %r2, [naps];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r3, 64, %r4;
    setp.ge.u32 %p0, %r5, %r0;
    @%p0 bra DONE;
    nanosleep.u32 %r2;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
    ld.volatile.global.u32 %r6, [%rd3];
    ld.volatile.global.u32 %r7, [%rd4];
    mad.lo.s32 %r8, %r7, 3, %r6;
    add.s32 %r9, %r8, %r1;
    nanosleep.u32 %r2;
    st.volatile.global.u32 [%rd4], %r9;
DONE:
    ret;
}
";

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// `y[start..end] = 3 y + x + by`, of two buffers or of a fresh one, which is freed behind it.
#[derive(Clone, Copy, Debug)]
struct Step {
    x: usize,
    y: usize,
    start: usize,
    end: usize,
    by: u32,
    naps: u32,
    /// It reads a buffer that was made for it, whose block the next ones get.
    is_fresh: bool,
    is_barrier: bool,
}

fn steps(random: &mut Random) -> Vec<Step> {
    let (buffers, count) = (2 + random.below(BUFFERS - 1), 2 + random.below(11));
    let step = |_| {
        let y = random.below(buffers);
        let x = (y + 1 + random.below(buffers - 1)) % buffers;
        let start = [0, 0, LEN / 2][random.below(3)];
        let end = [LEN, LEN, LEN / 2 + start / 2][random.below(3)];
        let (by, naps) = (random.below(1000) as u32, 200 * random.below(20) as u32);
        let (is_fresh, is_barrier) = (random.below(5) == 0, random.below(12) == 0);
        Step { x, y, start, end, by, naps, is_fresh, is_barrier }
    };
    (0..count).map(step).collect()
}

fn model(steps: &[Step], values: &mut [Vec<u32>]) {
    for step in steps {
        let part = step.start..step.end;
        let read = match step.is_fresh {
            true => vec![step.by; part.len()],
            false => values[step.x][part.clone()].to_vec(),
        };
        for (y, x) in values[step.y][part].iter_mut().zip(read) {
            *y = y.wrapping_mul(3).wrapping_add(x).wrapping_add(step.by);
        }
    }
}

fn twin(_: &Grid, args: &ArgBlock) {
    let (len, by) = (args.value(2, 4), args.value(3, 4));
    let [len, by] = [len, by].map(|value| u32::from_ne_bytes(value.try_into().unwrap()));
    for at in 0..u64::from(len) {
        let (x, y) = (args.address(0) + 4 * at, args.address(1) + 4 * at);
        // SAFETY: the launch names that memory, which is live when the stream gets there.
        let x = unsafe { (x as *const u32).read_volatile() };
        // SAFETY: likewise.
        let was = unsafe { (y as *const u32).read_volatile() };
        let new = was.wrapping_mul(3).wrapping_add(x).wrapping_add(by);
        // SAFETY: likewise, and no other launch touches it meanwhile.
        unsafe { (y as *mut u32).write_volatile(new) };
    }
}

fn kernel(home: &Home) -> Result<Arc<UntypedKernel>> {
    if home.kind() == DeviceKind::Host {
        // SAFETY: the launches below pass what it reads, and declare the memory.
        return Ok(unsafe { UntypedKernel::twin("mix", Arc::new(twin)) });
    }
    let module = load(home, Image::ptx(PTX).named("mix"))?;
    // SAFETY: likewise; its first statement waits.
    unsafe { UntypedKernel::find(&module, "mix", "mix", true) }
}

fn put(
    q: &Queue<'_>,
    mix: &Arc<UntypedKernel>,
    step: &Step,
    buffers: &mut [DeviceBuffer<u32>],
) -> Result<()> {
    if step.is_barrier {
        q.barrier();
    }
    let fresh = match step.is_fresh {
        true => Some(q.full(LEN, step.by)?),
        false => None,
    };
    let [x, y] = buffers.get_disjoint_mut([step.x, step.y]).expect("two of them");
    let x = fresh.as_ref().unwrap_or(x).slice(step.start..step.end)?;
    let mut y = y.slice_mut(step.start..step.end)?;
    let (mut footprint, mut args) = (Footprint::new("mix"), ArgBlock::default());
    let (from, to) = (x.span(), y.span_mut());
    footprint.reads(&from);
    footprint.updates(&to);
    args.push_memory(from.address(), from.size_bytes());
    args.push_memory(to.address(), to.size_bytes());
    let len = (step.end - step.start) as u32;
    [len, step.by, step.naps].iter().for_each(|value| args.push_value(&value.to_ne_bytes()));
    mix.launch(q, &mut footprint, &args, (len.div_ceil(64), 64))
}

#[test]
fn early_kernels_keep_the_order() {
    let asked = std::env::var("GPU_AWAIT_OVERLAP_LISTS").ok();
    let lists = asked.map_or(20, |asked| asked.parse().expect("a number"));
    let _turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let device = Device::builder().overlap(Overlap::LaunchesAndEdges).named(&name).unwrap();
    let stream = device.stream().unwrap();
    let mut mix = None;
    let loaded = stream.batch(|q| {
        mix = Some(kernel(VerbParts::home(q))?);
        Ok(())
    });
    block_on(loaded).unwrap();
    let mix = mix.expect("it was loaded");
    let mut random = Random(7);
    let mut buffers: Vec<_> =
        (0..BUFFERS).map(|_| stream.zeros::<u32>(LEN).queued().unwrap()).collect();
    let mut values = vec![vec![0; LEN]; BUFFERS];
    for number in 0..lists {
        let (steps, mut region) = (steps(&mut random), Region::new());
        // One by one, and then as a graph, which the last run launches again.
        for run in 0..4 {
            let op = stream.replay(&mut region, |q| {
                steps.iter().try_for_each(|step| put(q, &mix, step, &mut buffers))
            });
            block_on(op).unwrap();
            model(&steps, &mut values);
            for (buffer, values) in buffers.iter().zip(&values) {
                let found = block_on(stream.download(buffer)).unwrap();
                assert_eq!(found[..], values[..], "list {number}, run {run}: {steps:#?}");
            }
        }
    }
    let overlaps = device.stats().overlaps;
    println!("{lists} lists: {overlaps:?}");
    assert!(overlaps.allowed > 0 || !starts_early(&device), "{overlaps:?}");
}

fn starts_early(device: &Device) -> bool {
    device.kind() == DeviceKind::Host || device.compute_capability() >= (9, 0)
}
