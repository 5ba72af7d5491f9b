//! Random collectives of random sizes over three communicators, by three tasks at once, with random drops and time-outs: what is
//! looked at is right, and nothing waits for ever.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpu_await::{Device, DeviceBuffer, Op, Stream};
use gpu_await_nccl::{Communicator, Reduction};

use crate::support;
use crate::support::{Random, all, devices, within};

const MOST: usize = 3000;
const TASKS: usize = 3;
/// Few, of another seed in each run.
const COLLECTIVES: usize = 2_400;

/// What a task has on each rank, and what is in it.
struct Memory {
    x: Vec<DeviceBuffer<f32>>,
    y: Vec<DeviceBuffer<f32>>,
}

struct Task {
    devices: Vec<Device>,
    comms: Arc<[Communicator]>,
    streams: Vec<Stream>,
    memory: Memory,
    random: Random,
}

impl Task {
    fn new(devices: &[Device], comms: &Arc<[Communicator]>, seed: u64) -> Task {
        let stream = |device: &Device| device.stream().expect("a stream");
        let streams: Vec<_> = devices.iter().map(stream).collect();
        let make = |stream: &Stream| stream.zeros::<f32>(MOST * 3).queued().expect("memory");
        let x = streams.iter().map(make).collect();
        let memory = Memory { x, y: streams.iter().map(make).collect() };
        let (devices, comms) = (devices.to_vec(), comms.clone());
        Task { devices, comms, streams, memory, random: Random(seed) }
    }

    /// One collective, behind fills of its memory on other streams; returns what each rank then has first.
    fn collective(&mut self, round: usize) -> (&'static str, Op<()>, Vec<f32>, usize) {
        let world = self.devices.len();
        let len = 1 + self.random.below(MOST);
        let values: Vec<f32> = (0..world).map(|rank| (round % 100 + rank) as f32).collect();
        let Memory { x, y } = &mut self.memory;
        for ((stream, x), value) in self.streams.iter().zip(&mut *x).zip(&values) {
            stream.fill(x, *value).queued().expect("a fill");
        }
        let comm = &self.comms[self.random.below(self.comms.len())];
        let what = self.random.below(5);
        let sum: f32 = values.iter().sum();
        let (name, expected, result) = match what {
            0 => ("all_reduce", vec![sum; world], len),
            1 => ("broadcast", vec![values[world - 1]; world], len),
            2 => ("all_gather", vec![values[0]; world], len * world),
            3 => ("reduce_scatter", vec![sum; world], len),
            _ => ("ring", (0..world).map(|rank| values[(rank + 1) % world]).collect(), len),
        };
        let given = if what == 3 { len * world } else { len };
        let mut views: Vec<_> = (x.iter().zip(y))
            .map(|(x, y)| (x.slice(..given).expect("x"), y.slice_mut(..result).expect("y")))
            .collect();
        let op = comm.group(|g| {
            for (rank, (x, y)) in views.iter_mut().enumerate() {
                let (x, calls) = (&*x, g.rank(rank)?);
                match what {
                    0 => calls.all_reduce(x, y, Reduction::Sum)?,
                    1 => calls.broadcast(x, y, world - 1)?,
                    2 => calls.all_gather(x, y)?,
                    3 => calls.reduce_scatter(x, y, Reduction::Sum)?,
                    _ => {
                        calls.send(x, (rank + world - 1) % world)?;
                        calls.recv(y, (rank + 1) % world)?;
                    }
                }
            }
            Ok(())
        });
        (name, op, expected, result)
    }

    async fn run(mut self, rounds: usize) -> usize {
        let mut looked = 0;
        for round in 0..rounds {
            let (name, op, expected, result) = self.collective(round);
            match self.random.below(4) {
                0 => drop(op),
                1 => op.queued().expect("submitted"),
                2 => drop(tokio::time::timeout(Duration::from_micros(50), op).await),
                _ => within(op).await.expect(name),
            }
            if self.random.below(4) > 0 {
                continue;
            }
            looked += 1;
            for ((stream, y), expected) in self.streams.iter().zip(&self.memory.y).zip(&expected) {
                let y = y.slice(..result).expect("the result");
                let found = within(stream.download(&y)).await.expect(name);
                let first = found[0];
                assert_eq!(first, *expected, "{name} of {result}, round {round}");
                if name != "all_gather" {
                    assert!(found.iter().all(|found| found == expected), "{name}, round {round}");
                }
            }
        }
        looked
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn random_collectives() {
    let _turn = support::turn().await;
    let devices = devices(3);
    let mut comms = Vec::new();
    for _ in 0..3 {
        comms.push(all(&devices).await);
    }
    let comms: Arc<[Communicator]> = comms.into();
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seed = since.expect("after 1970").as_nanos() as u64 | 1;
    // Shown where the test fails.
    println!("seed {seed}");
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let task = Task::new(&devices, &comms, seed + task as u64);
            tokio::spawn(task.run(COLLECTIVES / TASKS))
        })
        .collect();
    let mut looked = 0;
    for task in tasks {
        looked += task.await.expect("a task that does not panic");
    }
    assert!(looked > COLLECTIVES / 8, "{looked} results were looked at");
    assert!(comms.iter().all(|comm| comm.lost().is_none()));
}
