//! Upload, compute, download over several streams: while one item is computed, the next is on its way
//! up and the one before on its way down.
//!
//! An item goes through one stream, in order; items on different streams overlap by themselves. Prints
//! what each stream did when (`u`p, `k`ernels, `d`own, by the device's clock, with the time that a
//! stage waits for what it needs) and the time of the same on one stream.
//!
//! ```text
//! stream 0 |uuuukkkkkkkkkkdddd     uuuuukkkkkkkkkkkddd        |
//! stream 1 |     uuuukkkkkkkkkkkkdddd     uuuukkkkkkkkkkdddd  |
//! ```

use std::time::{Duration, Instant};

use gpu_await::{
    Device, DeviceBuffer, DeviceKind, Event, Op, PinnedBuffer, Result, Stream, kernels,
};

const STREAMS: usize = 3;
const ITEMS: usize = 9;
const WIDTH: f64 = 72.0;

/// What an item needs, made once.
struct Item {
    input: PinnedBuffer<f32>,
    x: DeviceBuffer<f32>,
    output: PinnedBuffer<f32>,
}

/// The points between the stages of an item.
type Marks = [Event; 4];
type OnItsWay = (Op<(PinnedBuffer<f32>, PinnedBuffer<f32>)>, DeviceBuffer<f32>, Marks);

/// Puts an item on a stream: up, `x = 2^launches x`, down. Nothing waits.
fn submit(s: &Stream, scale: &kernels::scale, launches: i32, item: Item) -> Result<OnItsWay> {
    let mut x = item.x;
    let begin = s.record_timed()?;
    let input = s.upload_into(item.input, &mut x);
    let up = s.record_timed()?;
    for _ in 0..launches {
        scale.launch(s, 2.0, &mut x).queued()?;
    }
    let computed = s.record_timed()?;
    let output = s.download_into(&x, item.output);
    Ok((input.and(output), x, [begin, up, computed, s.record_timed()?]))
}

/// Runs all items; how long that took, and their marks.
async fn run(
    streams: &[Stream],
    scale: &kernels::scale,
    launches: i32,
    items: &mut Vec<Item>,
) -> Result<(Duration, Vec<Marks>)> {
    let start = Instant::now();
    let submitted: Vec<_> = items
        .drain(..)
        .zip(streams.iter().cycle())
        .map(|(item, stream)| submit(stream, scale, launches, item))
        .collect::<Result<_>>()?;
    let mut marks = Vec::new();
    for (op, x, at) in submitted {
        let (input, output) = op.await?;
        at[3].done().await?;
        items.push(Item { input, x, output });
        marks.push(at);
    }
    Ok((start.elapsed(), marks))
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    // On a GPU so long that what a submission costs the host does not matter.
    let len = if device.kind() == DeviceKind::Host { 1 << 18 } else { 1 << 23 };
    let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
    let scale = kernels::scale::load(&device).await?;
    let mut items = Vec::new();
    for n in 0..ITEMS {
        let mut input = device.pinned_async(len).await?;
        input.fill(n as f32);
        let x = streams[n % STREAMS].zeros(len).await?;
        items.push(Item { input, x, output: device.pinned_async(len).await? });
    }
    let start = device.default_stream().record_timed()?;
    let seconds = |at: &Event| at.elapsed_since(&start).map(|time| time.as_secs_f64());
    let spans = |marks: &[Marks]| -> Result<Vec<[f64; 4]>> {
        let times = marks
            .iter()
            .map(|[a, b, c, d]| Ok([seconds(a)?, seconds(b)?, seconds(c)?, seconds(d)?]));
        times.collect()
    };

    // Warms up, and says how many launches take as long as a copy.
    run(&streams, &scale, 1, &mut items).await?;
    let (_, marks) = run(&streams[..1], &scale, 8, &mut items).await?;
    let [a, b, c, _] = spans(&marks)?[ITEMS / 2];
    let launches = ((b - a) / ((c - b) / 8.0)).clamp(1.0, 64.0) as i32;

    let (alone, _) = run(&streams[..1], &scale, launches, &mut items).await?;
    let mut tries = 0;
    let (took, times) = loop {
        let (took, marks) = run(&streams, &scale, launches, &mut items).await?;
        let times = spans(&marks)?;
        let overlap = |i: usize, j: usize| times[i][0] < times[j][3] && times[j][0] < times[i][3];
        // On a host device with one core to spare the system may run one stream after the other.
        if (0..ITEMS).any(|i| (0..i).any(|j| overlap(i, j))) {
            break (took, times);
        }
        tries += 1;
        assert!(tries < 20, "no two items were under way at once");
    };
    let first = times.iter().map(|t| t[0]).fold(f64::MAX, f64::min);
    let last = times.iter().map(|t| t[3]).fold(0.0, f64::max);
    println!("device: {device}; {ITEMS} items of {} MiB over {STREAMS} streams", len >> 18);
    println!("kernels an item: {launches}\n");
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

    for (n, item) in items.iter().enumerate() {
        let expected = n as f32 * 2.0f32.powi(launches);
        assert!(item.output.iter().all(|x| *x == expected), "item {n} is wrong");
    }
    Ok(())
}
