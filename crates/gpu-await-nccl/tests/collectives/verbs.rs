//! Every verb with every type, against a plain computation.

use gpu_await::{Device, DeviceBuffer};
use gpu_await_nccl::{CollectiveElement, Communicator, Reduction};
use half::{bf16, f16};

use crate::support;
use crate::support::{all, devices};

const LEN: usize = 37;
const REDUCTIONS: [Reduction; 5] =
    [Reduction::Sum, Reduction::Product, Reduction::Min, Reduction::Max, Reduction::Average];

/// An element type and the small whole numbers that it holds exactly.
trait Plain: CollectiveElement + PartialEq + std::fmt::Debug {
    fn of(number: i32) -> Self;
}

macro_rules! plain {
    ($($type:ty, $of:expr;)+) => {$(
        impl Plain for $type {
            fn of(number: i32) -> Self { ($of)(number) }
        }
    )+};
}
plain! {
    i8, |x| x as i8;
    u8, |x| x as u8;
    i32, |x| x;
    u32, |x| x as u32;
    i64, i64::from;
    u64, |x| x as u64;
    f32, |x| x as f32;
    f64, f64::from;
    f16, |x| f16::from_f32(x as f32);
    bf16, |x| bf16::from_f32(x as f32);
}

/// What rank `rank` has at `at`: sums and products of a few of them stay exact in every type.
fn number(rank: usize, at: usize) -> i32 {
    ((rank + 1) * (at % 3 + 1)) as i32 % 4 + 1
}

/// Such that an average is whole: a multiple of the number of ranks.
fn input(by: Reduction, world: usize, rank: usize, at: usize) -> i32 {
    let factor = if by == Reduction::Average { world as i32 } else { 1 };
    factor * number(rank, at)
}

fn reduced(by: Reduction, world: usize, at: usize) -> i32 {
    let all = (0..world).map(|rank| input(by, world, rank, at));
    match by {
        Reduction::Sum => all.sum(),
        Reduction::Product => all.product(),
        Reduction::Min => all.min().expect("a rank"),
        Reduction::Max => all.max().expect("a rank"),
        Reduction::Average => all.sum::<i32>() / world as i32,
    }
}

struct Bed {
    devices: Vec<Device>,
    comm: Communicator,
}

impl Bed {
    async fn new(most: usize) -> Bed {
        let devices = devices(most);
        let comm = all(&devices).await;
        Bed { devices, comm }
    }

    fn world(&self) -> usize {
        self.devices.len()
    }

    /// A buffer a rank, of what a function says.
    fn buffers<T: Plain>(
        &self,
        len: usize,
        of: impl Fn(usize, usize) -> i32,
    ) -> Vec<DeviceBuffer<T>> {
        let make = |(rank, device): (usize, &Device)| {
            let data: Vec<T> = (0..len).map(|at| T::of(of(rank, at))).collect();
            device.upload(data).queued().expect("memory")
        };
        self.devices.iter().enumerate().map(make).collect()
    }

    fn empty<T: Plain>(&self, len: usize) -> Vec<DeviceBuffer<T>> {
        self.devices.iter().map(|device| device.empty(len).queued().expect("memory")).collect()
    }

    async fn check<T: Plain>(
        &self,
        what: &str,
        found: &[DeviceBuffer<T>],
        of: impl Fn(usize, usize) -> i32,
    ) {
        for (rank, (device, found)) in self.devices.iter().zip(found).enumerate() {
            let found = device.download(found).await.expect(what);
            let expected: Vec<T> = (0..found.len()).map(|at| T::of(of(rank, at))).collect();
            assert_eq!(*found, expected, "{what}, rank {rank}, {}", std::any::type_name::<T>());
        }
    }
}

/// A group with a call of each rank.
macro_rules! each {
    ($bed:ident, $rank:ident => $($x:ident),+: |$g:ident| $call:expr) => {{
        let mut rest = ($($x.iter_mut(),)+);
        $bed.comm.group(|group| {
            #[allow(non_snake_case, reason = "names of the macro")]
            let ($($x,)+) = &mut rest;
            for $rank in 0..$bed.devices.len() {
                $(let $x = $x.next().expect("a rank");)+
                let $g = group.rank($rank)?;
                $call?;
            }
            Ok(())
        })
        .await
        .expect("it runs");
    }};
}

async fn reductions<T: Plain>(bed: &Bed) {
    let world = bed.world();
    for by in REDUCTIONS {
        let of = |rank, at| input(by, world, rank, at);
        let mut x = bed.buffers::<T>(LEN, of);
        let mut y = bed.empty::<T>(LEN);
        each!(bed, rank => x, y: |g| g.all_reduce(&*x, y, by));
        bed.check("all_reduce", &y, |_, at| reduced(by, world, at)).await;
        bed.check("all_reduce leaves x", &x, of).await;
        each!(bed, rank => x: |g| g.all_reduce_in_place(x, by));
        bed.check("all_reduce in place", &x, |_, at| reduced(by, world, at)).await;

        let root = world - 1;
        let kept = |rank, at| if rank == root { reduced(by, world, at) } else { of(rank, at) };
        let mut x = bed.buffers::<T>(LEN, of);
        let mut y = bed.buffers::<T>(LEN, of);
        each!(bed, rank => x, y: |g| g.reduce(&*x, y, by, root));
        bed.check("reduce", &y, kept).await;
        each!(bed, rank => x: |g| g.reduce_in_place(x, by, root));
        bed.check("reduce in place", &x, kept).await;

        let mut x = bed.buffers::<T>(LEN * world, of);
        let mut y = bed.empty::<T>(LEN);
        each!(bed, rank => x, y: |g| g.reduce_scatter(&*x, y, by));
        bed.check("reduce_scatter", &y, |rank, at| reduced(by, world, rank * LEN + at)).await;
        each!(bed, rank => x: |g| g.reduce_scatter_in_place(x, by));
        for (rank, (device, x)) in bed.devices.iter().zip(&x).enumerate() {
            let share = x.slice(rank * LEN..(rank + 1) * LEN).expect("a share");
            let found = device.download(&share).await.expect("reduce_scatter in place");
            let expected: Vec<T> =
                (0..LEN).map(|at| T::of(reduced(by, world, rank * LEN + at))).collect();
            assert_eq!(*found, expected, "reduce_scatter in place");
        }
    }
}

async fn copies<T: Plain>(bed: &Bed) {
    let world = bed.world();
    let root = world - 1;
    let mut x = bed.buffers::<T>(LEN, number);
    let mut y = bed.empty::<T>(LEN);
    each!(bed, rank => x, y: |g| g.broadcast(&*x, y, root));
    bed.check("broadcast", &y, |_, at| number(root, at)).await;
    each!(bed, rank => x: |g| g.broadcast_in_place(x, root));
    bed.check("broadcast in place", &x, |_, at| number(root, at)).await;

    let gathered = |_, at| number(at / LEN, at % LEN);
    let mut x = bed.buffers::<T>(LEN, number);
    let mut y = bed.empty::<T>(LEN * world);
    each!(bed, rank => x, y: |g| g.all_gather(&*x, y));
    bed.check("all_gather", &y, gathered).await;
    let mut y =
        bed.buffers::<T>(
            LEN * world,
            |rank, at| {
                if at / LEN == rank { number(rank, at % LEN) } else { 0 }
            },
        );
    each!(bed, rank => y: |g| g.all_gather_in_place(y));
    bed.check("all_gather in place", &y, gathered).await;

    let mut x = bed.buffers::<T>(LEN * world, |rank, at| number(rank + at / LEN, at));
    let mut y = bed.empty::<T>(LEN * world);
    each!(bed, rank => x, y: |g| g.all_to_all(&*x, y));
    let exchanged = |rank: usize, at: usize| number(at / LEN + rank, rank * LEN + at % LEN);
    bed.check("all_to_all", &y, exchanged).await;

    let mut x = bed.buffers::<T>(LEN, number);
    let mut y = bed.empty::<T>(LEN);
    each!(bed, rank => x, y: |g| {
        g.send(&*x, (rank + 1) % world)?;
        g.recv(y, (rank + world - 1) % world)
    });
    bed.check("send and recv", &y, |rank, at| number((rank + world - 1) % world, at)).await;
}

macro_rules! types {
    ($($type:ident)+) => {
        #[tokio::test]
        async fn every_verb_and_type() {
            let _turn = support::turn().await;
            for most in [1, 2, 3] {
                let bed = Bed::new(most).await;
                if bed.world() < most {
                    return;
                }
                $(
                    reductions::<$type>(&bed).await;
                    copies::<$type>(&bed).await;
                )+
            }
        }
    };
}
types! { i8 u8 i32 u32 i64 u64 f16 bf16 f32 f64 }

#[tokio::test]
async fn nothing_to_move() {
    let _turn = support::turn().await;
    let bed = Bed::new(2).await;
    let mut x = bed.buffers::<f32>(0, number);
    let mut y = bed.empty::<f32>(0);
    each!(bed, rank => x, y: |g| g.all_reduce(&*x, y, Reduction::Sum));
    each!(bed, rank => x, y: |g| g.all_gather(&*x, y));
    each!(bed, rank => x: |g| { let _ = &x; g.barrier() });
    bed.comm.group(|_| Ok(())).await.expect("no calls");
}

/// The order of kernels, copies and collectives is that of their memory.
#[tokio::test]
async fn ordered_by_memory() {
    let _turn = support::turn().await;
    let bed = Bed::new(2).await;
    let world = bed.world() as f32;
    let streams: Vec<_> =
        bed.devices.iter().map(|device| device.stream().expect("a stream")).collect();
    let mut x = bed.buffers::<f32>(1000, |_, _| 0);
    for round in 0..50 {
        let value = round as f32;
        for (stream, x) in streams.iter().zip(&mut x) {
            stream.fill(x, value).queued().expect("a fill");
        }
        bed.comm
            .group(|group| {
                for (rank, x) in x.iter_mut().enumerate() {
                    group.rank(rank)?.all_reduce_in_place(x, Reduction::Sum)?;
                }
                Ok(())
            })
            .queued()
            .expect("submitted");
        for (stream, x) in streams.iter().zip(&x) {
            let sums = stream.download(x).await.expect("sums");
            assert!(sums.iter().all(|sum| *sum == value * world), "round {round}: {}", sums[0]);
        }
    }
}

/// A trace names the lines of the program, not those of the crate.
#[tokio::test]
async fn lines_are_those_of_the_caller() {
    let device = Device::host();
    let comm = Communicator::all(std::slice::from_ref(&device)).await.expect("connected");
    let mut x = device.ones::<f32>(LEN).queued().expect("memory");
    device.timeline().start(100).expect("a timeline");
    let first = line!();
    comm.all_reduce_in_place(&mut x, Reduction::Sum).queued().expect("submitted");
    comm.group(|g| g.rank(0)?.broadcast_in_place(&mut x, 0)).queued().expect("submitted");
    comm.barrier().await.expect("it runs");
    let trace = device.timeline().snapshot().expect("a trace");
    for (name, line) in [("all_reduce", 1), ("broadcast", 2), ("barrier", 3)] {
        let ops = trace.operations().iter().filter(|op| &*op.name == name);
        let lines: Vec<_> = ops.map(|op| (op.at.file(), op.at.line())).collect();
        assert!(lines.len() >= 2, "both ends of the loan: {lines:?}");
        assert!(lines.iter().all(|at| *at == (file!(), first + line)), "{name}: {lines:?}");
    }
}
