//! What strangers do at a rendezvous, and peers that are not what they say: limits are kept, and nobody else is disturbed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use gpu_await::Device;
use gpu_await_nccl::{Communicator, Error, Group, LostCause, Reduction};

use crate::support::{LIMIT, address, groups, within};

/// Long enough for a busy machine to say who is missing.
const SOON: Duration = Duration::from_secs(1);

/// A process that says what the test wants it to say.
struct Raw(TcpStream);

impl Raw {
    fn hello(world: u32, limit_ms: u32, ranks: &[u32]) -> Vec<u8> {
        let mut hello = b"gpuawait".to_vec();
        hello.extend(7u32.to_le_bytes());
        hello.extend([0; 16]);
        hello.extend(world.to_le_bytes());
        hello.extend(limit_ms.to_le_bytes());
        hello.extend([0; 2]);
        hello.extend((ranks.len() as u32).to_le_bytes());
        ranks.iter().for_each(|rank| hello.extend(rank.to_le_bytes()));
        hello
    }

    fn reach(address: &str) -> TcpStream {
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => return stream,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Rank 1 of two.
    fn join(address: &str) -> Raw {
        let mut stream = Raw::reach(address);
        stream.write_all(&Raw::hello(2, 30_000, &[1])).expect("sent");
        // Welcome, and a table of one: an address, a rank.
        let mut start = [0; 1 + 1 + 4 + 1];
        stream.read_exact(&mut start).expect("an answer");
        assert_eq!(start[..2], [0, 4]);
        stream.read_exact(&mut vec![0; usize::from(start[6]) + 4 + 4]).expect("a table");
        stream.write_all(&[1]).expect("sent");
        let mut go = [0];
        stream.read_exact(&mut go).expect("an answer");
        assert_eq!(go, [6]);
        Raw(stream)
    }

    /// A frame of rank 1 for rank 0, in the first channel of both.
    fn frame(&mut self, kind: u8, announced: u64, rest: &[u8]) {
        let step = |hash: u32, word: u32| (hash ^ word).wrapping_mul(0x0100_0193);
        let key = [0, 0, 0, 1].into_iter().fold(0x811c_9dc5, step);
        let mut frame = (u64::from(key) << 32 | 1).to_le_bytes().to_vec();
        frame.push(kind);
        frame.extend(1u32.to_le_bytes());
        frame.extend(0u32.to_le_bytes());
        frame.extend(announced.to_le_bytes());
        frame.extend(rest);
        self.0.write_all(&frame).expect("sent");
    }

    /// Connects the first communicator: it is ready when it has heard of rank 0.
    async fn connect(&mut self) {
        self.frame(4, 130, &[0; 130]);
        let mut stream = self.0.try_clone().expect("another handle");
        let heard = tokio::task::spawn_blocking(move || {
            let mut header = [0; 8 + 1 + 4 + 4 + 8];
            stream.read_exact(&mut header).expect("a hello");
            assert_eq!(header[8], 4);
            let bytes = u64::from_le_bytes(header[17..].try_into().expect("8 bytes"));
            stream.read_exact(&mut vec![0; bytes as usize]).expect("the rest");
        });
        heard.await.expect("a thread");
        self.frame(5, 0, &[]);
    }
}

/// Rank 0, and a rank 1 that is not one.
async fn with_raw() -> (Group, Raw) {
    let address = address();
    let raw = tokio::task::spawn_blocking({
        let address = address.clone();
        move || Raw::join(&address)
    });
    let group = within(Group::join_within(LIMIT, &address, 0, 2)).await.expect("they meet");
    (group, within(raw).await.expect("a thread"))
}

async fn connected(group: &Group, raw: &mut Raw, device: &Device) -> Communicator {
    let both = futures::future::join(group.connect(device), raw.connect());
    let comm = within(both).await.0.expect("connected");
    comm.set_limit(Some(LIMIT));
    comm
}

/// `all_reduce(Sum)` of so many `f32`.
fn head(count: u64) -> Vec<u8> {
    let mut head = vec![0, 7, 0, 0, 0, 0, 0, 0];
    head.extend(count.to_le_bytes());
    head
}

#[tokio::test]
async fn messages_that_are_none() {
    let device = Device::host();
    let elements = |count: u64, bytes: usize| {
        let mut rest = head(count);
        rest.resize(16 + bytes, 0);
        (0, rest.len() as u64, rest)
    };
    let frames = [
        // Shorter and longer than its head says, and longer than anything.
        elements(4, 8),
        elements(4, 32),
        (0, u64::MAX, head(4)),
        (0, 1 << 50, head(1 << 48)),
        (2, 24, [1, 0, 0].repeat(8)),
        (7, 3, vec![9; 3]),
        (99, 0, Vec::new()),
        (8, u64::MAX, Vec::new()),
    ];
    for (kind, announced, rest) in frames {
        let (group, mut raw) = with_raw().await;
        let comm = connected(&group, &mut raw, &device).await;
        let mut x = device.ones::<f32>(4).queued().expect("memory");
        let op = comm.all_reduce_in_place(&mut x, Reduction::Sum);
        raw.frame(1, 16, &head(4));
        raw.frame(kind, announced, &rest);
        let error = within(op).await.expect_err("a stranger");
        let lost = Error::lost(&error).expect("lost");
        // A rank that waits, and must not, has called something else.
        let is_right = match kind {
            2 => matches!(lost.cause, LostCause::Mismatch { .. }),
            _ => matches!(lost.cause, LostCause::BadMessage { rank: 1, .. }),
        };
        assert!(is_right, "{error}");
        assert_eq!(group.gone().is_empty(), kind == 2, "{error}");
        device.fill(&mut x, 1.0).await.expect("the device works");
    }
}

#[tokio::test]
async fn a_good_message_works() {
    let device = Device::host();
    let (group, mut raw) = with_raw().await;
    let comm = connected(&group, &mut raw, &device).await;
    let mut x = device.ones::<f32>(4).queued().expect("memory");
    raw.frame(1, 16, &head(4));
    raw.frame(0, 32, &[head(4), 2.0f32.to_le_bytes().repeat(4)].concat());
    within(comm.all_reduce_in_place(&mut x, Reduction::Sum)).await.expect("a sum");
    assert_eq!(device.download(&x).await.expect("sums"), [3.0; 4]);
    // Nothing is pending when it goes: it is known all the same.
    drop(raw);
    while comm.lost().is_none() {
        tokio::task::yield_now().await;
    }
    let lost = comm.lost().expect("lost");
    assert!(matches!(lost.cause, LostCause::PeerGone { rank: 1 }), "{lost}");
    assert_eq!(group.gone(), [1]);
}

/// Elements for a communicator that does not exist are dropped as they come.
#[tokio::test]
async fn data_for_nobody() {
    let device = Device::host();
    let (group, mut raw) = with_raw().await;
    let rest = [head(1 << 18), vec![0; 1 << 20]].concat();
    for _ in 0..64 {
        raw.frame(0, rest.len() as u64, &rest);
    }
    let comm = connected(&group, &mut raw, &device).await;
    let mut x = device.ones::<f32>(4).queued().expect("memory");
    raw.frame(1, 16, &head(4));
    raw.frame(0, 32, &[head(4), 2.0f32.to_le_bytes().repeat(4)].concat());
    within(comm.all_reduce_in_place(&mut x, Reduction::Sum)).await.expect("a sum");
}

/// Rank 0 that says nothing, or one byte now and then.
#[tokio::test]
async fn limits_are_kept() {
    for slowly in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let zero = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a visitor");
            while slowly && stream.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
            std::io::copy(&mut stream, &mut std::io::sink()).ok();
        });
        let began = Instant::now();
        let error = within(Group::join_within(SOON, &address, 1, 2)).await.unwrap_err();
        // As soon as a thread that has nothing else to do is run.
        assert!(began.elapsed() >= SOON && began.elapsed() < SOON + Duration::from_secs(1));
        let is_right =
            matches!(&error, Error::Closed { reason, .. } if reason == "no answer within 1s");
        assert!(is_right, "{error}");
        zero.join().expect("a thread");
    }
}

#[tokio::test]
async fn another_program_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a visitor");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").ok();
        std::io::copy(&mut stream, &mut std::io::sink()).ok();
    });
    let error = within(Group::join_within(LIMIT, &address, 1, 2)).await.unwrap_err();
    assert!(error.to_string().contains("another program"), "{error}");
    other.join().expect("a thread");
}

/// Hundreds that say nothing, or slowly, cost the others nothing.
#[tokio::test]
async fn strangers_cost_nothing() {
    let address = address();
    let began = Instant::now();
    let zero = tokio::spawn({
        let address = address.clone();
        async move { Group::join_within(LIMIT, &address, 0, 2).await }
    });
    let strangers = tokio::task::spawn_blocking({
        let address = address.clone();
        move || {
            let mut strangers = Vec::new();
            while strangers.len() < 300 {
                let Ok(mut stream) = TcpStream::connect(&address) else { continue };
                if strangers.len() % 2 == 0 {
                    stream.write_all(b"gpua").ok();
                }
                strangers.push(stream);
            }
            strangers
        }
    });
    let _strangers = within(strangers).await.expect("a thread");
    let one = within(Group::join_within(LIMIT, &address, 1, 2)).await.expect("rank 1");
    within(zero).await.expect("a task").expect("rank 0");
    assert_eq!(one.world(), 2);
    // A thread that took them one after the other would wait ten minutes.
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

/// A process that ends may come again; what was wrong with others is told in the end.
#[tokio::test]
async fn visitors_that_end() {
    let address = &address();
    let zero = tokio::spawn({
        let address = address.clone();
        async move { Group::join_within(Duration::from_secs(3), &address, 0, 3).await }
    });
    let one = within(Group::join_within(SOON, address, 1, 3)).await.unwrap_err();
    let is_two = |missing: &[usize]| missing == [2];
    assert!(matches!(&one, Error::MissingRanks { missing, .. } if is_two(missing)), "{one}");
    let error = within(Group::join_within(SOON, address, 2, 4)).await.unwrap_err();
    assert!(matches!(error, Error::WrongWorld { rank: 2, .. }), "{error}");
    // It is no duplicate of itself.
    let again = within(Group::join_within(LIMIT, address, 1, 3)).await.unwrap_err();
    assert!(matches!(&again, Error::MissingRanks { missing, .. } if is_two(missing)), "{again}");
    let error = within(zero).await.expect("a task").unwrap_err();
    let Error::MissingRanks { missing, refused, .. } = &error else { panic!("{error}") };
    assert_eq!(missing, &[2]);
    assert!(
        matches!(refused[..], [Error::WrongWorld { rank: 2, expected: 3, found: 4 }]),
        "{error}"
    );
}

/// Its process is stopped, for example: its rank is free for one that started again.
#[tokio::test]
async fn a_visitor_that_stays_past_its_limit() {
    let address = address();
    let zero = tokio::spawn({
        let address = address.clone();
        async move { Group::join_within(LIMIT, &address, 0, 3).await }
    });
    let stopped = tokio::task::spawn_blocking({
        let address = address.clone();
        move || {
            let mut stream = Raw::reach(&address);
            stream.write_all(&Raw::hello(3, 1, &[1])).expect("sent");
            stream.read_exact(&mut [0]).expect("it is welcome");
            stream
        }
    });
    let _stopped = within(stopped).await.expect("a thread");
    let error = loop {
        match within(Group::join_within(LIMIT / 10, &address, 1, 3)).await.unwrap_err() {
            Error::DuplicateRank { rank: 1 } => {}
            error => break error,
        }
    };
    assert!(matches!(&error, Error::MissingRanks { missing, .. } if *missing == [2]), "{error}");
    let others = [1, 2].map(|rank| Group::join_within(LIMIT, &address, rank, 3));
    within(futures::future::try_join_all(others)).await.expect("they meet");
    within(zero).await.expect("a task").expect("they meet");
}

/// One that gives up connecting says so, and the next time all meet.
#[tokio::test]
async fn connects_that_do_not_meet() {
    let (groups, device) = (groups(3).await, Device::host());
    for drops in [false, true] {
        let early = groups[0].builder(&device).connect_limit(SOON).connect();
        match drops {
            true => drop(tokio::time::timeout(SOON / 2, early).await),
            false => {
                let error = within(early).await.unwrap_err();
                let is_right = |missing: &[usize]| missing == [1, 2];
                assert!(
                    matches!(&error, Error::MissingRanks { missing, .. } if is_right(missing)),
                    "{error}"
                );
            }
        }
        // Those who come later do not take it to be there.
        let mut late = Box::pin(futures::future::try_join(
            groups[1].connect(&device),
            groups[2].connect(&device),
        ));
        assert!(tokio::time::timeout(SOON, &mut late).await.is_err());
        let all = within(futures::future::try_join(groups[0].connect(&device), late)).await;
        let (zero, (one, two)) = all.expect("now all are there");
        let ops = [&zero, &one, &two].map(Communicator::barrier);
        within(futures::future::try_join_all(ops)).await.expect("they work");
    }
}

/// Two that try again and again, each for a short time, find each other.
#[tokio::test]
async fn staggered_retries() {
    let (groups, device) = (groups(2).await, Device::host());
    let tries = async |group: &Group, after: Duration| {
        tokio::time::sleep(after).await;
        for _ in 0..20 {
            match group.builder(&device).connect_limit(SOON).connect().await {
                Ok(comm) => return within(comm.barrier()).await.expect("connected"),
                Err(Error::MissingRanks { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        panic!("never");
    };
    let both =
        futures::future::join(tries(&groups[0], Duration::ZERO), tries(&groups[1], SOON * 5 / 3));
    within(both).await;
}

#[tokio::test]
async fn worlds_are_bounded() {
    let device = Device::host();
    for world in [1 << 17, 1 << 44, usize::MAX] {
        let id = gpu_await_nccl::UniqueId::new(gpu_await::DeviceKind::Host).expect("an id");
        let error = Communicator::builder(id, world).rank(0, &device).connect().await.unwrap_err();
        assert!(matches!(error, Error::WorldTooLarge { most: 65536, .. }), "{error}");
        let error = Group::join(&address(), 0, world).await.unwrap_err();
        assert!(matches!(error, Error::WorldTooLarge { most: 65536, .. }), "{error}");
    }
    let id = gpu_await_nccl::UniqueId::new(gpu_await::DeviceKind::Host).expect("an id");
    let began = Instant::now();
    // Long enough for the thread that knows who is missing to say so.
    let limit = 3 * SOON;
    let large = Communicator::builder(id, 60_000).rank(7, &device).connect_limit(limit).connect();
    let error = within(large).await.unwrap_err();
    let is_missing =
        matches!(&error, Error::MissingRanks { missing, .. } if missing.len() == 59_999);
    let text: String = error.to_string().chars().take(300).collect();
    assert!(is_missing, "{text}");
    assert!(began.elapsed() < limit + Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_id_is_used_once() {
    let device = Device::host();
    let id = gpu_await_nccl::UniqueId::new(gpu_await::DeviceKind::Host).expect("an id");
    let connect = || Communicator::builder(id, 1).rank(0, &device).connect();
    within(connect()).await.expect("alone");
    let error = within(connect()).await.unwrap_err();
    assert!(matches!(error, Error::BadId { .. }), "{error}");
}

/// Wakers are foreign code: one that panics when a communicator is lost takes no other's watchdog along.
#[tokio::test]
async fn a_waker_that_panics_ends_no_watch() {
    // Not while it is polled: a future may wake the task that polls it, whose own panic that is.
    #[derive(Default)]
    struct Panics(AtomicBool);
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            assert!(!self.0.load(Ordering::SeqCst), "a waker");
        }
    }
    let devices = [Device::host(), Device::host()];
    for _ in 0..3 {
        let comm = within(Communicator::all(&devices)).await.expect("connected");
        let mut x = devices[0].full(4, 1.0f32).queued().expect("memory");
        // The other rank never calls.
        let op = comm.group(|g| g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum));
        let mut room = Box::pin(comm.throttle(0));
        let panics = Arc::new(Panics::default());
        let waker = Waker::from(panics.clone());
        assert!(room.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        panics.0.store(true, Ordering::SeqCst);
        // Not before: this thread may be held up for as long.
        comm.set_limit(Some(SOON));
        let error = within(op).await.expect_err("its limit");
        assert!(Error::lost(&error).is_some(), "{error}");
        within(room).await.expect_err("it is lost");
    }
}
