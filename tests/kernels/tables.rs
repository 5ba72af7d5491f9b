//! Blocks that a kernel reaches through a table of addresses.

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    BlockSlices, BlockSlicesMut, BlockTable, BlockTableMut, ErrorDetail, ErrorKind, Grid,
    LaunchConfig, ListOutcome, Region, Result, kernel, kernels,
};

const LEN: usize = 64;

kernel! {
    /// `out[i]` = the sum of element `i` of all blocks.
    unsafe fn sum_blocks(
        blocks: &[&[f32]], out: Out<[f32]>, count: u32 = blocks.blocks(), n: u32 = out.len()
    ) where blocks.block_len() == out.len();
    launch = LaunchConfig::for_elements(out.len());
    cuda = "extern \"C\" __global__ void sum_blocks(
        const float* const* blocks, float* out, unsigned count, unsigned n) {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float sum = 0;
        for (unsigned block = 0; block < count; ++block) sum += blocks[block][i];
        out[i] = sum;
    }";
    host = sum_twin;
}

fn sum_twin(_: &Grid, blocks: BlockSlices<'_, f32>, out: &mut [f32], _count: u32, _n: u32) {
    out.fill(0.0);
    for block in blocks.iter() {
        out.iter_mut().zip(block).for_each(|(out, x)| *out += x);
    }
}

kernel! {
    /// Adds its number, from 1, to each block.
    unsafe fn number_blocks(
        blocks: &mut [&mut [f32]], count: u32 = blocks.blocks(), n: u32 = blocks.block_len()
    );
    launch = LaunchConfig::for_elements(blocks.block_len());
    cuda = "extern \"C\" __global__ void number_blocks(float* const* blocks, unsigned count, unsigned n) {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        for (unsigned block = 0; block < count; ++block) blocks[block][i] += block + 1;
    }";
    host = number_twin;
}

fn number_twin(_: &Grid, mut blocks: BlockSlicesMut<'_, f32>, _count: u32, _n: u32) {
    assert!(blocks.get(blocks.len()).is_none() && blocks.get_mut(blocks.len()).is_none());
    for number in 0..blocks.len() {
        let block = blocks.get_mut(number).expect("there is one");
        block.iter_mut().for_each(|x| *x += (number + 1) as f32);
    }
}

#[tokio::test]
async fn blocks_of_slabs_and_buffers() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (sum, number) = (sum_blocks::load(&device).await?, number_blocks::load(&device).await?);
    let mut slab = stream.slab::<f32>(10, LEN).queued()?;
    let mut buffer = stream.full(2 * LEN, 5.0f32).queued()?;
    let mut written = slab.blocks_mut(&[8, 1, 4])?;
    written.push(buffer.slice_mut(LEN..)?);
    let mut table = BlockTableMut::new(&stream, written)?;
    assert_eq!((table.shape().blocks(), table.shape().block_len()), (4, LEN));
    // A table serves several launches.
    number.launch(&stream, &mut table).queued()?;
    number.launch(&stream, &mut table).queued()?;
    drop(table);
    let firsts = stream.download(&slab).await?;
    let firsts: Vec<_> = firsts.chunks(LEN).map(|block| block[LEN - 1]).collect();
    assert_eq!(firsts, [0.0, 4.0, 0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 2.0, 0.0]);
    assert_eq!(stream.download(&buffer).await?[LEN - 1..=LEN], [5.0, 13.0]);

    let mut out = stream.empty::<f32>(LEN).queued()?;
    let mut read = slab.blocks(&[1, 4, 4, 8])?;
    read.push(buffer.slice(LEN..)?);
    let table = BlockTable::new(&stream, read)?;
    sum.launch(&stream, &table, &mut out).queued()?;
    drop(table);
    assert_eq!(stream.download(&out).await?, [31.0; LEN]);

    let table = BlockTable::new(&stream, Vec::new())?;
    sum.launch(&stream, &table, &mut stream.empty(0).queued()?).await?;
    let error = sum.launch(&stream, &table, &mut out).await.unwrap_err();
    assert!(error.to_string().contains("blocks.blocks() = 0, blocks.block_len() = 0"), "{error}");
    Ok(())
}

#[tokio::test]
async fn blocks_of_another_length_are_refused() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let sum = sum_blocks::load(&device).await?;
    let x = stream.zeros::<f32>(2 * LEN).queued()?;
    let error = BlockTable::new(&stream, vec![x.slice(..LEN)?, x.slice(..LEN - 1)?]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    assert!(matches!(error.detail(), ErrorDetail::WrongLength { .. }), "{error}");
    // What nobody wrote is refused by the launch.
    let (unwritten, mut out) = (stream.empty::<f32>(LEN).queued()?, stream.zeros(LEN).queued()?);
    let table = BlockTable::new(&stream, vec![x.slice(..LEN)?, unwritten.view()])?;
    let error = sum.launch(&stream, &table, &mut out).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let theirs = testing::peer_device().zeros::<f32>(LEN).synchronize()?;
    let error = BlockTable::new(&stream, vec![x.slice(..LEN)?, theirs.view()]).unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_table_is_ordered_by_what_it_names() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let number = number_blocks::load(&device).await?;
    let (mut slab, mut x) = (a.slab::<f32>(8, LEN).await?, a.zeros::<f32>(2 * LEN).await?);
    // Its addresses are there before the gate.
    let mut blocks = slab.blocks_mut(&[2, 5])?;
    blocks.push(x.slice_mut(..LEN)?);
    let mut table = BlockTableMut::new(&a, blocks)?;
    a.synchronize()?;
    let gate = Gate::close(&a)?;
    // The table goes, and what it names may go: the launch keeps both.
    number.launch(&a, &mut table).queued()?;
    drop(table);
    b.fill(&mut slab.block_mut(4)?, 9.0).await?;
    b.fill(&mut x.slice_mut(LEN..)?, 9.0).await?;
    let (mut left, mut right) = (b.download(&x.slice(..LEN)?), b.download(&slab.block(5)?));
    assert!((&mut left).now_or_never().is_none() && (&mut right).now_or_never().is_none());
    drop((slab, x));
    gate.open();
    assert_eq!((left.await?[0], right.await?[0]), (3.0, 2.0));
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn tables_in_a_replayed_batch() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (number, scale) =
        (number_blocks::load(&device).await?, kernels::scale::load(&device).await?);
    let mut slab = stream.slab::<f32>(16, LEN).queued()?;
    let mut region = Region::new();
    number.launch(&stream, &mut BlockTableMut::new(&stream, slab.blocks_mut(&[0])?)?).queued()?;
    scale.launch(&stream, 0.0, &mut slab).queued()?;
    let mut model = [0.0; 16];
    for run in 0..6 {
        let blocks = [run, run + 5, run + 9];
        let mut table = BlockTableMut::new(&stream, slab.blocks_mut(&blocks)?)?;
        let op = stream.replay(&mut region, |q| {
            number.launch(q, &mut table)?;
            number.launch(q, &mut table)
        });
        op.queued()?;
        drop(table);
        blocks.iter().zip([2.0, 4.0, 6.0]).for_each(|(at, by)| model[*at as usize] += by);
        let outcomes: Vec<_> = region.last_run().iter().map(|list| &list.outcome).collect();
        let is_replayed = matches!(outcomes[..], [ListOutcome::Replayed { .. }]);
        assert!(is_replayed || run < 2, "run {run}: {outcomes:?}");
    }
    let slab = stream.download(&slab).await?;
    assert_eq!(slab.chunks(LEN).map(|block| block[7]).collect::<Vec<_>>(), model);
    Ok(())
}
