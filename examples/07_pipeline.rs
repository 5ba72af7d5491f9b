//! Upload, compute, download over several streams: while one item is computed, the next is on its way
//! up and the one before on its way down.
//!
//! An item goes through one stream, in order; items on different streams overlap by themselves. Prints
//! what each stream did when (`u`p, `k`ernels, `d`own, by the device's clock) and the time of the same
//! on one stream.
//!
//! ```text
//! stream 0 |uuuukkkkkkkkkkdddd     uuuuukkkkkkkkkkkddd        |
//! stream 1 |     uuuukkkkkkkkkkkkdddd     uuuukkkkkkkkkkdddd  |
//! ```

use std::time::{Duration, Instant};

use gpu_await::{Device, Event, Op, PinnedBuffer, Result, Stream, join_all, kernels};

const STREAMS: usize = 3;
const ITEMS: usize = 9;
const LEN: usize = 1 << 20; // 4 MiB
const WIDTH: f64 = 72.0;

/// The points between the stages of an item.
type Marks = [Event; 4];

/// Puts an item on a stream: up, `x = 2^16 x`, down. Nothing waits.
fn item(s: &Stream, scale: &kernels::scale, n: usize) -> Result<(Op<PinnedBuffer<f32>>, Marks)> {
    let mut input = s.pinned(LEN)?;
    input.fill(n as f32);
    let output = s.pinned(LEN)?;
    let mut x = s.empty(LEN).queued()?;
    let begin = s.record_timed()?;
    drop(s.upload_into(input, &mut x)); // comes back to its pool by itself
    let up = s.record_timed()?;
    for _ in 0..16 {
        scale.launch(s, 2.0, &mut x).queued()?;
    }
    let computed = s.record_timed()?;
    let output = s.download_into(&x, output);
    Ok((output, [begin, up, computed, s.record_timed()?]))
}

async fn run(streams: &[Stream], scale: &kernels::scale) -> Result<(Duration, Vec<Marks>)> {
    let start = Instant::now();
    let submit = |n| item(&streams[n % streams.len()], scale, n);
    let (ops, marks): (Vec<_>, Vec<_>) =
        (0..ITEMS).map(submit).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let outputs = join_all(ops).await?;
    let took = start.elapsed();
    join_all(marks.iter().map(|marks| marks[3].done())).await?;
    for (n, output) in outputs.iter().enumerate() {
        assert!(output.iter().all(|x| *x == n as f32 * 65_536.0), "item {n} is wrong");
    }
    Ok((took, marks))
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
    let scale = kernels::scale::load(&device).await?;
    let start = device.default_stream().record_timed()?;
    run(&streams, &scale).await?; // pinned memory is made once
    let (alone, _) = run(&streams[..1], &scale).await?;
    let (took, marks) = run(&streams, &scale).await?;

    let seconds = |at: &Event| at.elapsed_since(&start).map(|time| time.as_secs_f64());
    let times: Vec<[f64; 4]> = marks
        .iter()
        .map(|[a, b, c, d]| Result::Ok([seconds(a)?, seconds(b)?, seconds(c)?, seconds(d)?]))
        .collect::<Result<_>>()?;
    let first = times.iter().map(|t| t[0]).fold(f64::MAX, f64::min);
    let last = times.iter().map(|t| t[3]).fold(0.0, f64::max);
    println!("device: {device}; {ITEMS} items of {} MiB over {STREAMS} streams\n", LEN >> 18);
    for stream in 0..STREAMS {
        let mut line = vec![' '; WIDTH as usize + 1];
        let column = |at: f64| ((at - first) / (last - first) * WIDTH) as usize;
        for t in times.iter().skip(stream).step_by(STREAMS) {
            for (stage, name) in [(1, 'k'), (0, 'u'), (2, 'd')] {
                let (from, to) = (column(t[stage]), column(t[stage + 1]));
                line[from..to.max(from + 1)].fill(name);
            }
        }
        println!("stream {stream} |{}|", line.into_iter().collect::<String>());
    }
    let busy: f64 = times.iter().map(|t| t[3] - t[0]).sum();
    println!("\nitems at once, on the average: {:.1}", busy / (last - first));
    println!("{STREAMS} streams: {took:.1?}; one stream: {alone:.1?}");
    assert!(busy > last - first, "no two items were under way at once");
    Ok(())
}
