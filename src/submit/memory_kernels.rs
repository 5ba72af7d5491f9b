//! [`MemoryKernels`]: fills and copies of device memory as launches, for lists of launches.
//!
//! The driver's memcpy and memset nodes would need no kernels. But a memcpy node cannot be updated to other addresses of the memory pool, updating
//! a memset node takes twice as long as updating a launch, and neither takes a pattern of more than four bytes or rows that change.
//!
//! | a device | its fills and copies inside a list |
//! |---|---|
//! | CUDA, kernels loaded | are launches of `kernels/fill_bytes.cu`, `kernels/copy_rows.cu` and `kernels/copy_pieces.cu` |
//! | CUDA, kernels not loaded | end the list; a graph refuses them |
//! | host | are launches of the twins |
//!
//! Outside of lists, a fill is such a launch where the driver has no memset for its value (`Pattern::is_word`), a copy where there are gaps between its
//! rows (`RowCopy::is_contiguous`), unless they are long and nothing aligns them.
//!
//! They are loaded when the device is opened: later, loading would wait for all running work. Machine code is used if available: the
//! driver's compiler would delay a machine's first device by a tenth of a second.

use std::convert::Infallible;
use std::sync::Arc;

use crate::DeviceKind;
use crate::backend::{
    ArgBlock, DevicePtr, DriverResult, Function, Grid, HostTwin, LaunchShape, Pattern, Place,
    RawFunction, RawModule, RowCopy,
};
use crate::device::home::Home;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::traced_op::TracedWork;
use crate::runtime::{Engine, UserList};
use crate::thread::contain;

use super::kernel_launch::{KernelCode, KernelLaunch};
use super::raw::Raw;

pub(crate) mod pieces;

/// Threads per block, and the most blocks of a fill: enough to occupy a large GPU.
const THREADS: u32 = 256;
const MOST_BLOCKS: u64 = 1024;
/// The most blocks of a copy: shorter ones hide each other's loads. `benches/results/fills.txt`
const MOST_COPY_BLOCKS: u64 = 32 << 10;
/// The rows that a thread of `copy_rows.cu` loads at once.
const ROWS_AT_ONCE: u64 = 4;
/// From this length on, rows that nothing aligns are copied by words; shorter ones faster by bytes.
const LONG_UNALIGNED: u64 = 256;

pub(crate) struct MemoryKernels {
    fill: Option<Arc<MemoryKernel>>,
    copy: Option<Arc<MemoryKernel>>,
    pieces: Option<Arc<MemoryKernel>>,
}

struct MemoryKernel {
    engine: Arc<Engine>,
    name: Arc<str>,
    function: Function,
    /// On a CUDA device.
    module: Option<RawModule>,
}

impl MemoryKernels {
    /// The kernels of the device, loaded if they are not yet.
    pub(crate) fn of(home: &Home) -> Arc<MemoryKernels> {
        let engine = &home.engine;
        let load = || {
            let fill = MemoryKernel::load(
                engine,
                ("fill", Arc::new(twin::fill)),
                "fill_bytes",
                [
                    include_bytes!("../../kernels/fill_bytes.sm_70.cubin"),
                    include_bytes!("../../kernels/fill_bytes.sm_80.cubin"),
                    include_bytes!("../../kernels/fill_bytes.sm_90.cubin"),
                    include_bytes!("../../kernels/fill_bytes.ptx"),
                ],
            );
            let copy = MemoryKernel::load(
                engine,
                ("copy", Arc::new(twin::copy)),
                "copy_rows",
                [
                    include_bytes!("../../kernels/copy_rows.sm_70.cubin"),
                    include_bytes!("../../kernels/copy_rows.sm_80.cubin"),
                    include_bytes!("../../kernels/copy_rows.sm_90.cubin"),
                    include_bytes!("../../kernels/copy_rows.ptx"),
                ],
            );
            let pieces = MemoryKernel::load(
                engine,
                ("copy_many", Arc::new(pieces::twin)),
                "copy_pieces",
                [
                    include_bytes!("../../kernels/copy_pieces.sm_70.cubin"),
                    include_bytes!("../../kernels/copy_pieces.sm_80.cubin"),
                    include_bytes!("../../kernels/copy_pieces.sm_90.cubin"),
                    include_bytes!("../../kernels/copy_pieces.ptx"),
                ],
            );
            Ok::<_, Infallible>(MemoryKernels { fill, copy, pieces })
        };
        match home.get_or_load(load) {
            Ok(kernels) => kernels,
            Err(never) => match never {},
        }
    }
}

impl MemoryKernel {
    fn load(
        engine: &Arc<Engine>,
        (name, twin): (&str, HostTwin),
        entry: &str,
        images: Images,
    ) -> Option<Arc<MemoryKernel>> {
        let name = Arc::from(name);
        let (function, module) = match engine.backend.kind() {
            DeviceKind::Host => {
                (Function::Host { twin, kernel: Arc::clone(&name), waits_first: true }, None)
            }
            DeviceKind::Cuda => {
                let loaded = load(engine, entry, images);
                let told = |code| {
                    let error = engine.refused(code);
                    contain::log(|| {
                        tracing::warn!(device = engine.label(), %error, "fills and copies will end the lists of replayed batches");
                    });
                };
                let (function, module) = loaded.inspect_err(|code| told(*code)).ok()?;
                (function, Some(module))
            }
        };
        Some(Arc::new(MemoryKernel { engine: engine.clone(), name, function, module }))
    }

    /// A launch of so many blocks and of so many threads in each, along a row and from row to row.
    fn with(
        self: &Arc<Self>,
        blocks: [u64; 2],
        threads: [u64; 2],
        args: ArgBlock,
        (work, bytes): (TracedWork, u64),
    ) -> MemoryLaunch<'_> {
        let dim = |[x, y]: [u64; 2]| [x as u32, y as u32, 1];
        let grid = Grid {
            grid_dim: dim(blocks),
            block_dim: dim(threads),
            cluster_dim: [1, 1, 1],
            shared_mem_bytes: 0,
        };
        MemoryLaunch { kernel: self, shape: LaunchShape::plain(grid), args, work, bytes }
    }
}

/// Machine code for compute capabilities 7, 8 and 9, and PTX for all others. The code for 9 waits first: `kernels/build.py` checks that.
type Images = [&'static [u8]; 4];

fn load(engine: &Engine, entry: &str, images: Images) -> DriverResult<(Function, RawModule)> {
    let [volta, ampere, hopper, ptx] = images;
    let (code, waits_first) = match engine.limits.compute_capability.0 {
        _ if engine.options.general_images => return load_image(engine, entry, ptx, false),
        7 => (volta, false),
        8 => (ampere, false),
        9 => (hopper, true),
        _ => return load_image(engine, entry, ptx, false),
    };
    match load_image(engine, entry, code, waits_first) {
        Err(code) if !code.is_sticky() => load_image(engine, entry, ptx, false),
        loaded => loaded,
    }
}

fn load_image(
    engine: &Engine,
    entry: &str,
    image: &[u8],
    waits_first: bool,
) -> DriverResult<(Function, RawModule)> {
    // PTX must end with a zero, and the driver reads machine code as words.
    let image = [image, b"\0"].concat();
    let module = engine.backend.load(&image, &mut String::new())?;
    // SAFETY: the module was loaded just now, and every holder of the function keeps it.
    let function = unsafe { engine.backend.function(module, entry) };
    let function = function.inspect_err(|_| {
        // SAFETY: nothing of it was launched. If the call is refused, it stays loaded.
        unsafe { engine.backend.unload(module) }.ok();
    });
    let function = RawFunction { waits_first, ..function? };
    Ok((Function::Device(function), module))
}

impl KernelCode for MemoryKernel {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl Drop for MemoryKernel {
    fn drop(&mut self) {
        let Some(module) = self.module.take() else { return };
        if self.engine.is_usable() {
            self.engine.retire_behind_all(Remnant::Module(module), UserList::new());
        }
    }
}

/// A launch of one of the kernels, before it is submitted or recorded.
pub(crate) struct MemoryLaunch<'k> {
    kernel: &'k Arc<MemoryKernel>,
    shape: LaunchShape,
    args: ArgBlock,
    work: TracedWork,
    bytes: u64,
}

impl MemoryLaunch<'_> {
    pub(crate) fn launch(&self) -> KernelLaunch<'_> {
        let MemoryLaunch { kernel, shape, args, .. } = self;
        KernelLaunch::new(kernel, &kernel.function, *shape, args)
    }

    /// Puts it on the stream; a trace has the fill or the copy that it is.
    pub(crate) fn put(&self, raw: &Raw<'_>) -> DriverResult<()> {
        raw.launch(&self.kernel.function, &self.shape, self.args.arguments())?;
        raw.moved(self.work, self.bytes);
        Ok(())
    }
}

impl MemoryKernels {
    /// The launch that fills memory with this many patterns.
    pub(crate) fn fill(
        &self,
        to: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> Option<MemoryLaunch<'_>> {
        let kernel = self.fill.as_ref()?;
        let bytes = count * pattern.len as u64;
        let short = pattern.shortest();
        let mut repeated = [0; 32];
        let source = short.as_slice().iter().cycle();
        repeated.iter_mut().zip(source).for_each(|(to, from)| *to = *from);
        let mut args = ArgBlock::default();
        args.push_memory(to.0, bytes);
        args.push_value(&bytes.to_ne_bytes());
        repeated.chunks_exact(8).for_each(|word| args.push_value(word));
        args.push_value(&(short.len as u32).to_ne_bytes());
        let blocks = bytes.div_ceil(16 * u64::from(THREADS)).min(MOST_BLOCKS);
        Some(kernel.with([blocks, 1], [THREADS.into(), 1], args, (TracedWork::Fill, bytes)))
    }

    /// The launch that copies rows within the device's memory; `None` for rows on the host, and unless it is recorded for long rows that
    /// nothing aligns, which the driver copies faster.
    pub(crate) fn copy(&self, copy: &RowCopy, is_recorded: bool) -> Option<MemoryLaunch<'_>> {
        let kernel = self.copy.as_ref()?;
        let (Place::Device(to), Place::Device(from)) = (copy.to, copy.from) else { return None };
        let RowCopy { to_pitch, from_pitch, mut row_bytes, mut rows, .. } = *copy;
        if copy.is_contiguous() {
            (row_bytes, rows) = (row_bytes * rows, 1);
        }
        let pitches = if rows == 1 { 0 } else { to_pitch | from_pitch };
        // What a narrow row has behind its last unit would take it as long again.
        let length = if row_bytes < LONG_UNALIGNED { row_bytes } else { 0 };
        // The largest power of two that divides all of them and 16.
        let unit = 1u64 << (to.0 | from.0 | pitches | length | 16).trailing_zeros();
        let (unit, units) = match unit {
            1 if row_bytes >= LONG_UNALIGNED && !is_recorded => return None,
            1 if row_bytes >= LONG_UNALIGNED => (0, row_bytes.div_ceil(8) + 1),
            unit => (unit, row_bytes.div_ceil(unit)),
        };
        let mut args = ArgBlock::default();
        args.push_memory(to.0, copy.extent(to_pitch));
        args.push_memory(from.0, copy.extent(from_pitch));
        for value in [to_pitch, from_pitch, row_bytes, rows] {
            args.push_value(&value.to_ne_bytes());
        }
        args.push_value(&(unit as u32).to_ne_bytes());
        let across = units.min(THREADS.into());
        let down = u64::from(THREADS) / across;
        let x = units.div_ceil(across).min(MOST_COPY_BLOCKS);
        let y = rows.div_ceil(down * ROWS_AT_ONCE).min(MOST_COPY_BLOCKS / x);
        let moved = (TracedWork::Copy, row_bytes * rows);
        Some(kernel.with([x, y], [across, down], args, moved))
    }
}

/// The kernels on the CPU.
mod twin {
    use super::{ArgBlock, Grid};

    pub(super) fn fill(_: &Grid, args: &ArgBlock) {
        let bytes = args.memory_bytes(0) as usize;
        let pattern = [number(args, 2), number(args, 3)];
        let pattern = &bytemuck::bytes_of(&pattern)[..small(args, 6)];
        // SAFETY: the launch names that memory, which is live and exclusive when the stream gets there.
        let to = unsafe { std::slice::from_raw_parts_mut(args.address(0) as *mut u8, bytes) };
        to[..pattern.len()].copy_from_slice(pattern);
        let mut filled = pattern.len();
        while filled < bytes {
            let more = filled.min(bytes - filled);
            to.copy_within(..more, filled);
            filled += more;
        }
    }

    pub(super) fn copy(_: &Grid, args: &ArgBlock) {
        let [to_pitch, from_pitch, row_bytes, rows] =
            [2, 3, 4, 5].map(|slot| number(args, slot) as usize);
        let [to, from] = [0, 1].map(|slot| args.memory_bytes(slot) as usize);
        // SAFETY: as above.
        let to = unsafe { std::slice::from_raw_parts_mut(args.address(0) as *mut u8, to) };
        // SAFETY: as above; source and destination are disjoint.
        let from = unsafe { std::slice::from_raw_parts(args.address(1) as *const u8, from) };
        for row in 0..rows {
            let (to, from) = (&mut to[row * to_pitch..], &from[row * from_pitch..]);
            to[..row_bytes].copy_from_slice(&from[..row_bytes]);
        }
    }

    fn number(args: &ArgBlock, slot: usize) -> u64 {
        bytemuck::pod_read_unaligned(args.value(slot, 8))
    }

    pub(super) fn small(args: &ArgBlock, slot: usize) -> usize {
        bytemuck::pod_read_unaligned::<u32>(args.value(slot, 4)) as usize
    }
}
