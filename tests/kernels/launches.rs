//! Launches: geometry, cooperation, clusters, occupancy, what the compiler made of a kernel.

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Axis, Device, DeviceKind, ErrorDetail, ErrorKind, LaunchConfig, LaunchLimit, Stream, kernel,
    kernels,
};

kernel! {
    /// `x[i] = x[(i + by) % n]` in place: every block reads before any block writes.
    unsafe fn rotate(x: &mut [u32], by: u32, n: u64 = x.len(), barrier: &mut [u32])
        where |config| config.is_cooperative(), config.threads().wide() >= x.len(),
            barrier.len() == 2;
    ptx = include_str!("../../kernels/rotate.ptx");
    host = twin::rotate;
}

kernel! {
    /// `out[b]` = the sum of `x` over the blocks of `b`'s cluster.
    unsafe fn cluster_sum(x: &[u32], out: Out<[u32]>, n: u64 = out.len())
        where |config| x.len() == out.len(), out.len() == config.blocks().wide();
    ptx = include_str!("../../kernels/cluster_sum.ptx");
    host = twin::cluster_sum;
}

kernel! {
    /// Every value as an `f64`.
    unsafe fn widths(
        out: Out<[f64]>, a: u8, b: u16, c: u32, d: u64, e: i8, f: i16, g: i32, h: i64, i: f32, j: f64,
    ) where out.len() == 10;
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("../../kernels/widths.ptx");
    host = twin::widths;
}

mod twin {
    use gpu_await::Grid;

    pub(super) fn rotate(_: &Grid, x: &mut [u32], by: u32, n: u64, _barrier: &mut [u32]) {
        x.rotate_left((u64::from(by) % n.max(1)) as usize);
    }

    pub(super) fn cluster_sum(grid: &Grid, x: &[u32], out: &mut [u32], _n: u64) {
        super::each_block(grid.grid_dim, |block, number| {
            out[number] = 0;
            super::each_block(grid.grid_dim, |peer, peer_number| {
                let together = (0..3).all(|axis| {
                    let size = grid.cluster_dim[axis];
                    block[axis] / size == peer[axis] / size
                });
                if together {
                    out[number] += x[peer_number];
                }
            });
        });
    }

    #[expect(clippy::too_many_arguments, reason = "one of each width")]
    pub(super) fn widths(
        _: &Grid,
        out: &mut [f64],
        a: u8,
        b: u16,
        c: u32,
        d: u64,
        e: i8,
        f: i16,
        g: i32,
        h: i64,
        i: f32,
        j: f64,
    ) {
        out.copy_from_slice(&[
            a.into(),
            b.into(),
            c.into(),
            d as f64,
            e.into(),
            f.into(),
            g.into(),
            h as f64,
            i.into(),
            j,
        ]);
    }
}

/// Calls `body` with each block's position and number, along x first.
fn each_block([x, y, z]: [u32; 3], mut body: impl FnMut([u32; 3], usize)) {
    let mut number = 0;
    for z in 0..z {
        for y in 0..y {
            for x in 0..x {
                body([x, y, z], number);
                number += 1;
            }
        }
    }
}

/// The limit that a launch was refused for, with what was asked and what is allowed.
fn refused(error: &gpu_await::Error) -> (LaunchLimit, u64, u64) {
    assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    match error.detail() {
        ErrorDetail::LaunchLimit { what, asked, limit, .. } => (*what, *asked, *limit),
        other => panic!("{other}"),
    }
}

async fn rotated(
    stream: &Stream,
    rotate: &rotate,
    config: LaunchConfig,
    n: u32,
) -> gpu_await::Result<()> {
    let x: Vec<u32> = (0..n).collect();
    let mut expected = x.clone();
    expected.rotate_left(3 % n as usize);
    let mut x = stream.upload(x).queued()?;
    let mut barrier = stream.zeros::<u32>(2).queued()?;
    rotate.launch(stream, config, &mut x, 3, &mut barrier).queued()?;
    assert_eq!(stream.download(&x).await?, expected, "{config:?}");
    Ok(())
}

#[tokio::test]
async fn scalars_of_every_width_arrive_as_they_were_passed() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let widths = widths::load(&device).await.unwrap();
    let mut out = stream.empty::<f64>(10).queued().unwrap();
    let launched = widths.launch(
        &stream,
        &mut out,
        200,
        60_000,
        4_000_000_000,
        1 << 52,
        -100,
        -30_000,
        -2_000_000_000,
        -(1 << 52),
        0.5,
        -0.1,
    );
    launched.queued().unwrap();
    let expected = [
        200.0,
        60_000.0,
        4e9,
        4_503_599_627_370_496.0,
        -100.0,
        -30_000.0,
        -2e9,
        -4_503_599_627_370_496.0,
        0.5,
        -0.1,
    ];
    assert_eq!(stream.download(&out).await.unwrap(), expected);
}

#[tokio::test]
async fn grids_and_blocks_of_one_two_and_three_dimensions_reach_every_element() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let matmul = kernels::matmul_tiled::load(&device).await.unwrap();
    // Two dimensions, with edges: 33 x 50 elements in 16 x 16 tiles.
    let (m, n, k) = (33_u32, 50_u32, 7_u32);
    let a = stream.upload(vec![1.0f32; (m * k) as usize]).queued().unwrap();
    let b = stream.upload(vec![2.0f32; (k * n) as usize]).queued().unwrap();
    let mut c = stream.empty::<f32>((m * n) as usize).queued().unwrap();
    matmul.launch(&stream, &a, &b, &mut c, m, n, k).queued().unwrap();
    assert!(stream.download(&c).await.unwrap().iter().all(|c| *c == 14.0));

    // One to three, of a kernel that numbers blocks and threads along x, then y, then z. One block
    // is resident everywhere.
    let rotate = rotate::load(&device).await.unwrap();
    for block in [(210, 1, 1), (7, 30, 1), (7, 5, 6), (1, 1, 64)] {
        let config = LaunchConfig::new(1, block).cooperative();
        rotated(&stream, &rotate, config, config.threads() as u32).await.unwrap();
    }
    if device.kind() == DeviceKind::Cuda {
        for grid in [(30, 1, 1), (5, 6, 1), (5, 2, 3)] {
            let config = LaunchConfig::new(grid, (8, 2, 4)).cooperative();
            rotated(&stream, &rotate, config, 30 * 64 - 5).await.unwrap();
        }
    }
}

#[test]
fn an_extent_is_covered_along_each_axis_and_an_empty_one_is_no_launch() {
    let dims = |config: LaunchConfig| (config.grid_dim(), config.block_dim());
    assert_eq!(dims(LaunchConfig::for_extent(1000, 256)), ([4, 1, 1], [256, 1, 1]));
    assert_eq!(dims(LaunchConfig::for_extent((64, 9), (32, 8))), ([2, 2, 1], [32, 8, 1]));
    assert_eq!(dims(LaunchConfig::for_extent((5, 4, 3), (2, 2, 2))), ([3, 2, 2], [2, 2, 2]));
    assert_eq!(dims(LaunchConfig::for_extent(u32::MAX, 1)), ([u32::MAX, 1, 1], [1, 1, 1]));

    let device = testing::device();
    let stream = device.stream().unwrap();
    let empty = futures::executor::block_on(kernels::empty::load(&device)).unwrap();
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let empty = unsafe { empty.kernel() };
    for extent in [(0, 5), (5, 0)] {
        stream.launch(empty, LaunchConfig::for_extent(extent, (8, 8)), ()).queued().unwrap();
    }
    assert_eq!(stream.submitted(), 0, "nothing was submitted");
    let no_threads = LaunchConfig::for_extent((5, 5), (8, 0));
    let error = stream.launch(empty, no_threads, ()).queued().unwrap_err();
    assert_eq!(refused(&error), (LaunchLimit::Block(Axis::Y), 0, 1024));
    // More blocks than there are, without an overflow on the way.
    let huge = LaunchConfig::new((u32::MAX, u32::MAX, u32::MAX), (u32::MAX, u32::MAX));
    assert_eq!((huge.blocks(), huge.threads()), (u64::MAX, u64::MAX));
    assert!(stream.launch(empty, huge, ()).queued().is_err());
    for block in [LaunchConfig::new(1, (-1, -1, -1)), LaunchConfig::new(1, [1_u32 << 22; 3])] {
        let error = stream.launch(empty, block, ()).queued().unwrap_err();
        assert_eq!(
            refused(&error),
            (LaunchLimit::Block(Axis::X), block.block_dim()[0].into(), 1024)
        );
        assert!(empty.occupancy().resident_blocks(&block).is_err());
    }
}

#[tokio::test]
async fn a_launch_with_dynamic_shared_memory_returns_before_it_completes() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let empty = kernels::empty::load(&device).await.unwrap();
    let gate = Gate::close(&stream).unwrap();
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let empty = unsafe { empty.kernel() };
    let op = stream.launch(empty, LaunchConfig::new((3, 2), (8, 8)).shared_mem_bytes(1000), ());
    assert!(!op.is_complete(), "the gate is closed");
    gate.open();
    op.await.unwrap();
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn a_cooperative_launch_synchronizes_the_whole_grid() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let rotate = rotate::load(&device).await.unwrap();
    let config = LaunchConfig::new(1, 128).cooperative();
    let most = rotate.occupancy().resident_blocks(&config).unwrap();
    assert!(most >= device.multiprocessors(), "{most}");
    for blocks in [1, most.div_ceil(2), most] {
        let config = LaunchConfig::new(blocks, 128).cooperative();
        // A tail, and several times on the same barrier.
        rotated(&stream, &rotate, config, blocks * 128 - 5).await.unwrap();
    }
    let mut x = stream.upload((0..128_u32).collect::<Vec<_>>()).queued().unwrap();
    let mut barrier = stream.zeros::<u32>(2).queued().unwrap();
    for _ in 0..5 {
        rotate.launch(&stream, config, &mut x, 1, &mut barrier).queued().unwrap();
    }
    assert_eq!(stream.download(&x).await.unwrap()[..3], [5, 6, 7]);

    // A launch that is not cooperative does not meet the kernel's preconditions.
    let plain = LaunchConfig::new(1, 128);
    let error = rotate.launch(&stream, plain, &mut x, 1, &mut barrier).queued().unwrap_err();
    assert!(error.to_string().contains("config.is_cooperative()"), "{error}");
}

#[tokio::test]
async fn a_cooperative_grid_that_is_not_resident_at_once_is_refused_with_both_figures() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let rotate = rotate::load(&device).await.unwrap();
    for (block, shared) in [(128, 0), (1024, 0), (32, 40_000), (32, 100_000)] {
        let config = LaunchConfig::new(1, block).shared_mem_bytes(shared).cooperative();
        let most = rotate.occupancy().resident_blocks(&config).unwrap();
        let over = LaunchConfig::new(most + 1, block).shared_mem_bytes(shared).cooperative();
        let mut x = stream.zeros::<u32>(32).queued().unwrap();
        let mut barrier = stream.zeros::<u32>(2).queued().unwrap();
        let before = stream.submitted();
        let error = rotate.launch(&stream, over, &mut x, 1, &mut barrier).queued().unwrap_err();
        let (asked, limit) = (u64::from(most) + 1, u64::from(most));
        assert_eq!(refused(&error), (LaunchLimit::ResidentBlocks, asked, limit));
        assert_eq!(stream.submitted(), before, "nothing was submitted");
    }
}

/// Whether the device has clusters; where it has none, launches say so.
async fn clusters(device: &Device) -> bool {
    if device.kind() == DeviceKind::Host || device.compute_capability().0 >= 9 {
        return true;
    }
    let stream = device.stream().unwrap();
    let empty = kernels::empty::load(device).await.unwrap();
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let empty = unsafe { empty.kernel() };
    let error = stream.launch(empty, LaunchConfig::new(2, 1).cluster(2), ()).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Requires { .. }), "{error}");
    false
}

#[tokio::test]
async fn blocks_of_a_cluster_read_each_others_shared_memory() {
    let device = testing::device();
    if !clusters(&device).await {
        return;
    }
    let stream = device.stream().unwrap();
    let cluster_sum = cluster_sum::load(&device).await.unwrap();
    let cases = [
        ((12, 1, 1), (1, 1, 1)),
        ((12, 1, 1), (2, 1, 1)),
        ((16, 1, 1), (8, 1, 1)),
        ((4, 6, 1), (2, 3, 1)),
        ((2, 4, 6), (2, 2, 2)),
    ];
    for (grid, cluster) in cases {
        let config = LaunchConfig::new(grid, 64).cluster(cluster);
        let n = config.blocks() as usize;
        let x: Vec<u32> = (0..n as u32).map(|i| 1 << (i % 31)).collect();
        let mut expected = vec![0; n];
        let shape = (config.grid_dim(), config.cluster_dim());
        each_block(shape.0, |block, number| {
            each_block(shape.0, |peer, other| {
                if (0..3).all(|axis| block[axis] / shape.1[axis] == peer[axis] / shape.1[axis]) {
                    expected[number] += x[other];
                }
            });
        });
        let x = stream.upload(x).queued().unwrap();
        let mut out = stream.empty::<u32>(n).queued().unwrap();
        cluster_sum.launch(&stream, config, &x, &mut out).queued().unwrap();
        assert_eq!(stream.download(&out).await.unwrap(), expected, "{config:?}");
    }
    let resident = cluster_sum.occupancy().resident_blocks(&LaunchConfig::new(1, 64).cluster(4));
    let resident = resident.unwrap();
    assert!(resident >= 4 && resident.is_multiple_of(4), "{resident}");
}

#[tokio::test]
async fn a_cluster_that_does_not_fit_is_refused_with_the_cause() {
    let device = testing::device();
    if !clusters(&device).await {
        return;
    }
    let stream = device.stream().unwrap();
    let empty = kernels::empty::load(&device).await.unwrap();
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let empty = unsafe { empty.kernel() };
    let launch = |config| stream.launch(empty, config, ()).queued().map(drop);
    let config = LaunchConfig::new((8, 8), 32);
    launch(config.cluster((2, 4))).unwrap();
    assert_eq!(
        refused(&launch(config.cluster(0)).unwrap_err()),
        (LaunchLimit::Cluster(Axis::X), 0, 8)
    );
    assert_eq!(
        refused(&launch(config.cluster((1, 16))).unwrap_err()),
        (LaunchLimit::Cluster(Axis::Y), 16, 8)
    );
    assert_eq!(
        refused(&launch(config.cluster((4, 4))).unwrap_err()),
        (LaunchLimit::BlocksPerCluster, 16, 8)
    );
    let error = empty.occupancy().resident_blocks(&config.cluster(1 << 30)).unwrap_err();
    assert_eq!(refused(&error), (LaunchLimit::Cluster(Axis::X), 1 << 30, 8));
    let error = launch(config.cluster((2, 3))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    match *error.detail() {
        ErrorDetail::PartialCluster { axis: Axis::Y, grid_dim: 8, cluster_dim: 3, .. } => {}
        ref other => panic!("{other}"),
    }
}

#[tokio::test]
async fn what_the_compiler_made_of_a_kernel_can_be_asked() {
    let device = testing::device();
    let matmul = kernels::matmul_tiled::load(&device).await.unwrap();
    let attributes = matmul.attributes();
    assert_eq!(attributes.max_threads_per_block, 1024);
    if device.kind() == DeviceKind::Host {
        assert_eq!((attributes.registers, attributes.static_shared_mem_bytes), (0, 0));
        return;
    }
    assert_eq!(attributes.static_shared_mem_bytes, 2 * 16 * 16 * 4, "two tiles");
    assert!((16..=255).contains(&attributes.registers), "{attributes:?}");
    let (major, minor) = device.compute_capability();
    assert_eq!(attributes.binary_version, 10 * major + minor);
    assert!((60..=attributes.binary_version).contains(&attributes.ptx_version), "{attributes:?}");
    assert_eq!(attributes.local_bytes, 0, "nothing is spilled");
}

#[tokio::test]
async fn fewer_blocks_are_active_the_more_each_takes() {
    let device = testing::device();
    let matmul = kernels::matmul_tiled::load(&device).await.unwrap();
    let occupancy = matmul.occupancy();
    if device.kind() == DeviceKind::Host {
        assert_eq!(occupancy.active_blocks(1024, 100_000).unwrap(), 1);
        assert_eq!(occupancy.best_block(|_| 0, None).unwrap(), (1, 1));
        return;
    }
    // Warp slots: at most 64 warps on any architecture.
    let by_threads = [64, 256, 1024].map(|block| occupancy.active_blocks(block, 0).unwrap());
    assert!(by_threads.is_sorted_by(|a, b| a > b), "{by_threads:?}");
    assert!(by_threads[2] >= 1 && by_threads[2] * 1024 <= 2048, "{by_threads:?}");
    assert_eq!(occupancy.active_blocks((16, 16), 0).unwrap(), by_threads[1]);
    // Shared memory.
    let by_shared = [0, 30_000, 60_000].map(|shared| occupancy.active_blocks(64, shared).unwrap());
    assert!(by_shared.is_sorted_by(|a, b| a > b), "{by_shared:?}");
    // A block that a launch would be refused for.
    let error = occupancy.active_blocks(2048, 0).unwrap_err();
    assert_eq!(refused(&error), (LaunchLimit::Block(Axis::X), 2048, 1024));
    let error = occupancy.active_blocks(32, 1 << 20).unwrap_err();
    assert_eq!(refused(&error).0, LaunchLimit::SharedMemBytes);
}

#[tokio::test]
async fn the_best_block_keeps_most_threads_active() {
    let device = testing::device();
    let matmul = kernels::matmul_tiled::load(&device).await.unwrap();
    let occupancy = matmul.occupancy();
    let error = occupancy.best_block(|_| 0, Some(0)).unwrap_err();
    assert_eq!(refused(&error).1, 0);
    if device.kind() == DeviceKind::Host {
        assert_eq!(occupancy.best_block(|_| 1 << 30, Some(7)).unwrap(), (1, 1));
        return;
    }
    let shared = |block: u32| block * 100;
    for limit in [None, Some(1024), Some(500), Some(33), Some(7)] {
        let (min_grid, block) = occupancy.best_block(shared, limit).unwrap();
        assert!(block <= limit.unwrap_or(1024), "{limit:?}: {block}");
        let active = occupancy.active_blocks(block, shared(block)).unwrap();
        assert_eq!(min_grid, active * device.multiprocessors());
        for other in (32..=limit.unwrap_or(1024)).step_by(32) {
            let threads = occupancy.active_blocks(other, shared(other)).unwrap() * other;
            assert!(threads <= active * block, "{other} beats {block} (limit {limit:?})");
        }
    }
    let error = occupancy.best_block(|_| 1 << 20, None).unwrap_err();
    let (what, asked, limit) = refused(&error);
    assert_eq!((what, asked), (LaunchLimit::SharedMemBytes, 1 << 20));
    assert!(limit < 1 << 20);
}

#[tokio::test]
async fn a_launch_sized_by_occupancy_covers_every_element() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let scale = kernels::scale::load(&device).await.unwrap();
    // SAFETY: `scale` takes any 1-D geometry; its last argument is the length of its array.
    let kernel = unsafe { scale.kernel() };
    for n in [1_usize, 1000, 1_000_003] {
        let config = kernel.occupancy().config_for_elements(n).unwrap();
        assert!(config.threads() >= n as u64 && config.threads() < n as u64 + 1024);
        let mut x = stream.full(n, 1.5f32).queued().unwrap();
        stream.launch(kernel, config, (2.0f32, &mut x, n as u64)).queued().unwrap();
        assert!(stream.download(&x).await.unwrap().iter().all(|x| *x == 3.0));
    }
    // More elements than a grid has blocks.
    let many = kernel.occupancy().config_for_elements(1 << 33).unwrap();
    assert!(many.grid_dim()[0] < 1 << 31 && many.threads() >= 1 << 33, "{many:?}");
    let nothing = kernel.occupancy().config_for_elements(0).unwrap();
    let mut x = stream.empty::<f32>(0).queued().unwrap();
    let before = stream.submitted();
    stream.launch(kernel, nothing, (2.0f32, &mut x, 0)).queued().unwrap();
    assert_eq!(stream.submitted(), before);
}

#[test]
fn a_kernel_is_loaded_without_an_executor() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let scale = kernels::scale::load_blocking(&device).unwrap();
    let mut x = stream.full(3, 1.5f32).queued().unwrap();
    scale.launch(&stream, 2.0, &mut x).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [3.0; 3]);
    // Its declared conditions hold here as well.
    let axpy = kernels::axpy::load_blocking(&device).unwrap();
    let short = stream.zeros::<f32>(2).queued().unwrap();
    let error = axpy.launch(&stream, 1.0, &short, &mut x).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
    // Also for no elements, where nothing is launched.
    let mut none = stream.zeros::<f32>(0).queued().unwrap();
    let error = axpy.launch(&stream, 1.0, &short, &mut none).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
    // Where it would wait for its own thread.
    let inner = device.clone();
    let refused = stream.host_fn(move || kernels::empty::load_blocking(&inner).map(drop));
    let error = refused.synchronize().unwrap().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongThread { .. }), "{error}");
}
