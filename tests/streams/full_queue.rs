//! A stream whose queue is full holds up who submits to it, and nobody else.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Completion, Device, DeviceBuffer, Error, ErrorDetail, Graph, Grid, Kernel, LaunchConfig,
    Region, Result, Stream, Uses, kernels,
};

use crate::under_test::child;
use crate::under_test::host_threads::threads_called;

/// A call that takes longer is held up: the gate stays closed meanwhile.
const AT_ONCE: Duration = Duration::from_secs(2);

const MODES: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];

/// A stream behind a closed gate, a thread that the driver holds because the stream's queue is full, and
/// a buffer that was used on the stream before.
struct FullQueue {
    stream: Stream,
    gate: Option<Gate>,
    used: Arc<DeviceBuffer<u32>>,
    stop: Arc<AtomicBool>,
    producer: Option<JoinHandle<()>>,
}

impl FullQueue {
    fn of(device: &Device) -> Self {
        let stream = device.stream().unwrap();
        let mut used = stream.full(1000, 7u32).queued().unwrap();
        stream.fill(&mut used, 8).queued().unwrap();
        let gate = Gate::close(&stream).unwrap();
        // Behind the gate as well: the buffer's last use waits for it.
        stream.fill(&mut used, 9).queued().unwrap();
        let (submits, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let producer = std::thread::spawn({
            let (stream, submits, stop) = (stream.clone(), submits.clone(), stop.clone());
            move || {
                let mut scratch = stream.zeros::<u32>(16).queued().unwrap();
                while !stop.load(Ordering::SeqCst) {
                    stream.fill(&mut scratch, 1).queued().unwrap();
                    submits.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        assert_held_up(&submits);
        FullQueue { stream, gate: Some(gate), used: Arc::new(used), stop, producer: Some(producer) }
    }

    /// Runs `call` on a thread of its own; false if it is held up.
    fn returns<R: Send + 'static>(
        &self,
        call: impl FnOnce(&Stream, &DeviceBuffer<u32>) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, receiver) = mpsc::channel();
        let (stream, used) = (self.stream.clone(), self.used.clone());
        std::thread::spawn(move || sender.send(call(&stream, &used)).ok());
        receiver.recv_timeout(AT_ONCE).ok()
    }

    fn open(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(self.gate.take());
        self.producer.take().unwrap().join().unwrap();
        self.stream.done().synchronize().unwrap();
    }
}

/// Waits until a thread is held up: it submitted nothing for a while, and the queue is about as deep as it
/// can be.
fn assert_held_up(submits: &AtomicU64) {
    let (mut last, mut since) = (0, Instant::now());
    while last < 500 || since.elapsed() < Duration::from_millis(300) {
        let now = submits.load(Ordering::SeqCst);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        assert!(since.elapsed() < Duration::from_secs(30), "the queue takes no more after {last}");
        assert!(last < 100_000, "the queue is never full");
        std::thread::yield_now();
    }
}

fn each_mode(check: impl Fn(Device)) {
    for completion in MODES {
        check(testing::device_with(completion));
    }
}

/// What others do with a full stream, each by name; all of them return at once.
#[test]
fn a_full_queue_holds_up_nobody_else() {
    each_mode(|device| {
        // A driver makes no streams and pins no memory while it blocks a thread.
        let [other, download, inner, beside] = [(); 4].map(|()| device.stream().unwrap());
        let warm = beside.zeros::<u32>(1000).queued().unwrap();
        let pinned = [(); 4].map(|()| beside.download(&warm).synchronize().unwrap());
        drop((warm, pinned));
        let full = FullQueue::of(&device);
        let mut held_up = Vec::new();
        let mut check = |name, returned: bool| {
            if !returned {
                held_up.push(name);
            }
        };
        check("record", full.returns(|stream, _| drop(stream.record().unwrap())).is_some());
        let waits = other.clone();
        check(
            "wait",
            full.returns(move |stream, _| waits.wait(stream).queued().unwrap()).is_some(),
        );
        let joins = other.clone();
        check(
            "join",
            full.returns(move |stream, _| joins.join([stream]).queued().unwrap()).is_some(),
        );
        let downloaded = full.returns(move |_, used| download.download(used));
        check("download of what was used on it", downloaded.is_some());
        let scoped = device.clone();
        let scope = full.returns(move |stream, _| {
            stream.scope_sync(|| inner.scope_sync(|| scoped.zeros::<u32>(4).queued().map(drop)))
        });
        check("a scope entered from it", scope.is_some());
        let whole = device.clone();
        let done = full.returns(move |_, _| whole.done());
        check("done of the device", done.is_some());
        let again = device.clone();
        let many = full.returns(move |_, _| (0..20).map(|_| again.done()).collect::<Vec<_>>());
        check("done of the device, again and again", many.is_some());
        check("done", full.returns(|stream, _| stream.done()).is_some());
        check("is_idle", full.returns(|stream, _| stream.is_idle()) == Some(false));
        check("backlog", full.returns(|stream, _| stream.backlog()).is_some());
        let stats = device.clone();
        check("stats", full.returns(move |_, _| stats.stats()).is_some());
        let memory = device.clone();
        check("memory", full.returns(move |_, _| memory.memory().unwrap()).is_some());
        // A time stamp has its place behind the thread that is held up: it blocks nobody, and comes.
        let timed = full.stream.clone();
        let (sender, stamp) = mpsc::channel();
        std::thread::spawn(move || {
            let recorded = futures::executor::block_on(timed.record_timed_async());
            sender.send(recorded.map(|event| event.done().synchronize())).ok()
        });
        // The poller still serves everybody.
        let ran = full.returns(move |_, _| {
            let x = beside.full(1000, 3u32).queued().unwrap();
            futures::executor::block_on(beside.download(&x)).unwrap()[99]
        });
        check("an await beside it", ran == Some(3));
        full.open();
        assert!(held_up.is_empty(), "{:?}: held up: {held_up:?}", device);
        assert_eq!(downloaded.unwrap().synchronize().unwrap(), [9; 1000]);
        done.unwrap().synchronize().unwrap();
        stamp.recv_timeout(Duration::from_secs(10)).unwrap().unwrap().unwrap();
    });
}

/// Of whatever size: blocks of pinned memory are cut from a slab that is there, and the next slab is made
/// in the background.
#[test]
fn a_full_queue_holds_up_no_first_download() {
    each_mode(|device| {
        let beside = device.stream().unwrap();
        let sizes = [1, 1000, 10_000, 100_000, 500_000, 1 << 20];
        let sources = sizes.map(|size| Arc::new(beside.full(size, 5u8).queued().unwrap()));
        let full = FullQueue::of(&device);
        let mut held_up = Vec::new();
        // Kept: none has the block of another.
        let mut kept = Vec::new();
        for source in &sources {
            let (stream, source) = (beside.clone(), source.clone());
            let size = source.len();
            let downloaded = full.returns(move |_, _| stream.download(&*source).synchronize());
            match downloaded {
                Some(downloaded) => kept.push(downloaded.unwrap()),
                None => held_up.push(size),
            }
        }
        full.open();
        assert_eq!(held_up, [0; 0], "{device:?}: sizes whose download is held up");
        assert!(kept.iter().zip(sizes).all(|(kept, size)| *kept == vec![5; size]));
        let deadline = Instant::now() + Duration::from_secs(10);
        while device.stats().pinned_bytes < 4 << 20 {
            assert!(Instant::now() < deadline, "a second slab: {:?}", device.stats());
            std::thread::yield_now();
        }
    });
}

/// Nobody looks at a stream that is only ever given work and events: the events behind what is complete
/// are taken back when there are none.
#[test]
fn a_full_queue_leaves_events_to_record() {
    each_mode(|device| {
        let [beside, reader] = [(); 2].map(|()| device.stream().unwrap());
        let full = FullQueue::of(&device);
        let at = Arc::new(Mutex::new((0, "the allocation")));
        let recorded = full.returns({
            let at = at.clone();
            move |_, _| {
                let begin = |round, call| *at.lock().unwrap() = (round, call);
                let mut x = beside.zeros::<u32>(16).queued().unwrap();
                // More than there are in stock.
                for round in 0..100 {
                    begin(round, "the fill");
                    beside.fill(&mut x, 1).queued().unwrap();
                    begin(round, "`record`");
                    drop(beside.record().unwrap());
                    // It is through with that, which only the other stream was asked.
                    begin(round, "the download");
                    let download = reader.download(&x);
                    begin(round, "the wait for the download");
                    download.synchronize().unwrap();
                }
            }
        });
        let held_up = *at.lock().unwrap();
        let timed = {
            let beside = device.default_stream().clone();
            full.returns(move |_, _| beside.timed(|_| Ok(())).synchronize())
        };
        full.open();
        assert!(recorded.is_some(), "{device:?}: held up (round, call): {held_up:?}");
        assert!(timed.is_some(), "{device:?}: `timed` is held up");
    });
}

/// Has a thread put work on the stream until it is held up; it sends the error that ends it.
fn hold_up(stream: &Stream) -> mpsc::Receiver<Error> {
    let mut scratch = stream.zeros::<u32>(16).queued().unwrap();
    hold_up_with(stream, move |stream| stream.fill(&mut scratch, 1).queued())
}

fn hold_up_with(
    stream: &Stream,
    mut submit: impl FnMut(&Stream) -> Result<()> + Send + 'static,
) -> mpsc::Receiver<Error> {
    let (sender, ended) = mpsc::channel();
    let submits = Arc::new(AtomicU64::new(0));
    std::thread::spawn({
        let (stream, submits) = (stream.clone(), submits.clone());
        move || {
            let error = loop {
                match submit(&stream) {
                    Ok(()) => submits.fetch_add(1, Ordering::SeqCst),
                    Err(error) => break error,
                };
            };
            sender.send(error).ok()
        }
    });
    assert_held_up(&submits);
    ended
}

/// As the driver lets go of who waits in it when the device faults. (Of a GPU that is said to be lost, and
/// is not, it does not.)
#[test]
fn the_loss_of_the_device_ends_who_is_held_up() {
    for completion in MODES {
        let (faults, handle) = testing::faults();
        let device = testing::host_with_completion(faults, completion);
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let ended = hold_up(&stream);
        handle.lose_device("a test");
        let waits = stream.done().synchronize();
        assert!(waits.is_err_and(|error| error.is_device_lost()));
        let error = ended.recv_timeout(Duration::from_secs(10)).expect("it is let go of");
        assert!(error.is_device_lost(), "{error}");
        drop(gate);
    }
}

/// Of a host device alone: a GPU's driver lets go of nobody.
#[test]
fn the_loss_of_another_device_ends_who_is_held_up() {
    for completion in MODES {
        let (lost, device) =
            (Device::host(), testing::host_with_completion(testing::faults().0, completion));
        let (gated, faulty) = (lost.stream().unwrap(), lost.stream().unwrap());
        let fault = Kernel::<()>::host(&lost, "fault", |_: &Grid| panic!("on purpose")).unwrap();
        let [waits, behind, whole, other] = [(); 4].map(|()| device.stream().unwrap());
        let gate = Gate::close(&gated).unwrap();
        waits.wait(&gated).queued().unwrap();
        behind.wait(&waits).queued().unwrap();
        whole.wait(&device.done()).queued().unwrap();
        let ended = [&waits, &behind, &whole].map(hold_up);
        // Nobody asks the device.
        faulty.launch(&fault, LaunchConfig::new(1, 1), ()).queued().unwrap();
        for (ended, who) in ended.iter().zip(["waits for it", "waits for that", "for all"]) {
            let error = ended.recv_timeout(Duration::from_secs(10));
            let error = error.unwrap_or_else(|_| panic!("{completion:?}: who {who} is held up"));
            let is_it = matches!(error.detail(), ErrorDetail::DependencyLost { .. });
            assert!(is_it && !error.is_device_lost(), "{completion:?}, who {who}: {error}");
        }
        let again = behind.zeros::<u32>(1).queued().expect_err("it would never run");
        assert!(matches!(again.detail(), ErrorDetail::DependencyLost { .. }), "{again}");
        // The others go on, and nothing waits for the full queues.
        let x = other.full(3, 7u8).queued().unwrap();
        assert_eq!(*other.download(&x).synchronize().unwrap(), [7; 3]);
        drop((device.stream().unwrap(), gate));
    }
}

fn empty(device: &Device) -> kernels::empty {
    kernels::empty::load_blocking(device).unwrap()
}

/// Whatever it submits.
#[test]
fn each_kind_of_work_that_a_loss_holds_up_ends() {
    type Submit = Box<dyn FnMut(&Stream) -> Result<()> + Send>;
    type Kind = (&'static str, fn(&Device) -> Submit);
    let kinds: [Kind; 4] = [
        ("a host function", |_| Box::new(|stream| stream.host_fn(|| ()).without_value().queued())),
        ("a replayed batch", |device| {
            let (empty, mut region) = (empty(device), Region::new());
            Box::new(move |stream| {
                stream.replay(&mut region, |q| (0..2).try_for_each(|_| empty.launch(q))).queued()
            })
        }),
        ("a graph", |device| {
            let graph: Graph<()> = device.graph(empty(device), |q, empty, ()| empty.launch(q));
            Box::new(move |stream| graph.launch(stream, ()).queued())
        }),
        ("another library's work", |_| {
            Box::new(|stream| {
                // SAFETY: it uses no memory.
                let op = unsafe { stream.enqueue(Uses::new("its"), |q, ()| q.host(|| ())) };
                op.queued()
            })
        }),
    ];
    for (kind, make) in kinds {
        let (lost, device) = (Device::host(), Device::host());
        let (gated, faulty) = (lost.stream().unwrap(), lost.stream().unwrap());
        let fault = Kernel::<()>::host(&lost, "fault", |_: &Grid| panic!("on purpose")).unwrap();
        let (waits, submit) = (device.stream().unwrap(), make(&device));
        let gate = Gate::close(&gated).unwrap();
        waits.wait(&gated).queued().unwrap();
        let ended = hold_up_with(&waits, submit);
        faulty.launch(&fault, LaunchConfig::new(1, 1), ()).queued().unwrap();
        let error = ended.recv_timeout(Duration::from_secs(10));
        let error = error.unwrap_or_else(|_| panic!("{kind}: it is held up"));
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{kind}: {error}");
        drop(gate);
    }
}

#[test]
fn a_close_beside_who_is_held_up_by_a_loss() {
    let ((faults, handle), device) = (testing::faults(), Device::host());
    let lost = testing::host_with(faults);
    let (gated, waits) = (lost.stream().unwrap(), device.stream().unwrap());
    let gate = Gate::close(&gated).unwrap();
    waits.wait(&gated).queued().unwrap();
    let ended = hold_up(&waits);
    handle.lose_device("a test");
    gated.done().synchronize().unwrap_err();
    let closed = futures::executor::block_on(device.close(Duration::from_secs(20)));
    let error = closed.expect_err("not all of it is complete");
    assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    ended.recv_timeout(Duration::from_secs(10)).expect("it is let go of");
    drop(gate);
}

/// Its wait will end: for the legacy default stream, and for a mark on all streams that those which wait for the lost device have
/// passed.
#[test]
fn who_waits_for_none_of_a_lost_device_stays_held_up() {
    let (faults, handle) = testing::faults();
    let (lost, device) = (Device::host(), testing::host_with(faults));
    let (gated, faulty) = (lost.stream().unwrap(), lost.stream().unwrap());
    let fault = Kernel::<()>::host(&lost, "fault", |_: &Grid| panic!("on purpose")).unwrap();
    // The mark on all streams is waited for before those on each.
    device.done().synchronize().unwrap();
    let [waits, behind, whole] = [(); 3].map(|()| device.stream().unwrap());
    let legacy = device.legacy_stream().unwrap();
    let blocking = device.stream_builder().non_blocking(false).build().unwrap();
    let gates = [&gated, &legacy].map(|stream| Gate::close(stream).unwrap());
    let all = device.done();
    waits.done().synchronize().unwrap();
    whole.wait(&all).queued().unwrap();
    waits.wait(&gated).queued().unwrap();
    behind.wait(&waits).queued().unwrap();
    let [told, stay @ ..] = [&behind, &whole, &blocking].map(hold_up);
    faulty.launch(&fault, LaunchConfig::new(1, 1), ()).queued().unwrap();
    told.recv_timeout(Duration::from_secs(10)).expect("it is let go of");
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        assert!(stay.iter().all(|stay| stay.try_recv().is_err()), "it will get room");
        std::thread::yield_now();
    }
    handle.lose_device("a test");
    assert!(legacy.done().synchronize().is_err_and(|error| error.is_device_lost()));
    for ended in stay {
        let error = ended.recv_timeout(Duration::from_secs(10)).expect("it is let go of");
        assert!(error.is_device_lost(), "{error}");
    }
    drop(gates);
}

/// However many wait off the executor for one stream, one thread waits for them, and in order.
#[test]
fn what_a_full_queue_holds_up_takes_one_thread() {
    if !child::is_alone(concat!(module_path!(), "::what_a_full_queue_holds_up_takes_one_thread")) {
        return;
    }
    let device = testing::device();
    drop([(); 101].map(|()| device.default_stream().record_timed().unwrap()));
    device.synchronize().unwrap();
    let full = FullQueue::of(&device);
    let stream = full.stream.clone();
    let begin = |_| Box::pin(stream.record_timed_async());
    let mut held: Vec<_> = (0..101).map(begin).collect();
    for record in &mut held {
        assert!(record.now_or_never().is_none());
    }
    // Given up: nobody's thread is left behind, and the others are done all the same.
    held.truncate(51);
    let names = "gpu-await-offlo";
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        let threads = threads_called(names);
        assert!(threads <= 4, "{threads} threads wait for one stream");
        std::thread::yield_now();
    }
    full.open();
    let events: Vec<_> = futures::executor::block_on(futures::future::join_all(held));
    let events: Vec<_> = events.into_iter().map(Result::unwrap).collect();
    device.synchronize().unwrap();
    for (earlier, later) in events.iter().zip(&events[1..]) {
        later.elapsed_since(earlier).unwrap();
    }
}
