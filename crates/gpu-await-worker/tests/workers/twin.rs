//! Services that fail in every way, and what tests share.

use std::time::Duration;

use gpu_await::Stream;
use gpu_await_worker::{
    Error, Failure, Host, KeptMut, KeptState, Payloads, Service, Worker, WorkerBuilder,
};
use serde::{Deserialize, Serialize};

/// What a call makes the process do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Do {
    /// Answers with the doubles, computed on the device.
    Double(Vec<f32>),
    /// Doubles on the device, again and again, for so long.
    DoubleOften(Vec<f32>, Duration),
    /// Answers with its argument, later.
    Later(u32, Duration),
    /// Answers so much later; its limit does not count until then. Or counts, and it never answers.
    WaitsItsTurn(Duration, bool),
    /// Answers when this file is gone.
    OnceGone(String),
    /// Blocks the thread that polls it, and answers with its argument.
    Block(u32, Duration),
    /// Likewise, in the process with that number; elsewhere it answers with the number of its process.
    BlockOnce(u32, Duration),
    /// Adds its argument to a file, and answers with it.
    Write(String, u32),
    /// Answers with the number of its process.
    Pid,
    /// Reverses its payload.
    Reverse,
    /// Takes memory for so long a response, and gives it back later.
    Hold(usize, Duration),
    /// Answers with the first byte of its payload, later, if all are the same; keeps the payload for as long, drops it, or uploads it.
    First(Use, Duration),
    /// Doubles the numbers of its payload, on the device.
    DoubleOnDevice,
    /// Forks, and the child sleeps for ever with all that it inherits.
    Fork,
    /// Forks; the child drops its copy of the payload. Answers later.
    ForkThatDrops(Duration),
    /// Answers with the sum of what is kept under this name.
    Keep(String, Filler),
    /// Counts in the memory that it may write, and answers with the count and what it found as it got the memory.
    Count(Write),
    /// Writes this count to that memory.
    Reset(u64),
    /// Forks; the child leaves the process group, and sleeps for ever with all that it inherits, but for descriptors if it closes them. Answers
    /// with its number.
    ForkAway {
        closes: bool,
    },
    /// Sends its supervisor what no service sends, from this seed.
    Fuzz(u64),
    /// Sends its supervisor this, and stays for a while.
    Send(Vec<u8>),
    /// Fails.
    Fail(String),
    Panic,
    Abort,
    /// Kills itself, as the system does a process that has too much memory.
    KillMe,
    Exit(i32),
    /// Answers, and exits a moment later.
    ExitLater(i32),
    /// Loses the device.
    Fault,
    /// Likewise, and is polled again so much later than it is woken.
    FaultPolledLate(Duration),
    /// Waits for a kernel that does not end, on the stream that all calls share.
    Endless,
    /// Launches a kernel that writes to this file and faults once it is gone, and waits for none of that.
    FaultOnceGone(String),
    /// Writes through a wild pointer.
    Stray,
    /// Blocks every thread of the runtime for ever.
    Loop,
    /// Stops itself.
    Stop,
    /// Blocks and ignores every signal that can be.
    BlockSignals,
    /// Starts a program that outlives the process, which holds what it inherits.
    Program,
    /// Starts a worker.
    Worker,
    /// Takes memory.
    Hoard(usize),
    /// Prints a line.
    Say(String),
    /// Answers, and ends the process in the same breath.
    AnswerAndDie,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Done {
    Floats(Vec<f32>),
    Number(u32),
    Text(String),
    Counted(u64, Found),
    Nothing,
}

/// What a process found in memory that it may write, and the number under which it has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Found {
    Fresh(u64),
    Clean(u64),
    Died(u64, u64),
}

/// How a call writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Write {
    Whole,
    /// Not: it reads.
    Nothing,
    /// And takes as long.
    Slowly(Duration),
    /// Dies in the middle.
    Dies,
    /// Fails in the middle.
    Fails,
}

/// What a call does with its payload once it has read it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Use {
    Keep,
    Drop,
    Upload,
}

/// How memory to be kept is filled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Filler {
    Good,
    Slow(Duration),
    /// Puts other memory, of so many elements, in the place of what is kept.
    Swaps(usize),
    /// Asks for the same name while it fills.
    Nests,
    Fails,
    Dies,
}

pub(crate) struct Twin {
    /// What it takes of the device as it starts.
    _taken: Option<gpu_await::DeviceBuffer<u8>>,
    stream: Stream,
    twice: twice,
    host: Host,
    kept: tokio::sync::Mutex<Option<KeptMut<u64>>>,
}

/// Its configuration: whether, and how often by now, the start goes wrong.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) delay: Duration,
    /// Starts once this file is gone.
    pub(crate) once_gone: Option<String>,
    /// Starts a program first, which outlives the process.
    pub(crate) program: bool,
    /// The name of kept memory that it needs.
    pub(crate) keep: Option<String>,
    /// The name of kept memory that it may write.
    pub(crate) keep_mut: Option<String>,
    /// A file that the first start makes, which does not ask for that memory.
    pub(crate) second: Option<String>,
    /// How much of the device it takes.
    pub(crate) takes: usize,
    /// Loses the device as it starts, and is polled again so much later than it is woken.
    pub(crate) fault_polled_late: Option<Duration>,
    /// A file that is removed by the first start, and whose absence makes later ones fail.
    pub(crate) once: Option<String>,
}

gpu_await::kernel! {
    /// Panics, which loses a host device as a fault loses a GPU.
    unsafe fn faulty(y: &mut [f32]);
    launch = gpu_await::LaunchConfig::for_elements(y.len());
    host = fault;
}

gpu_await::kernel! {
    /// Does not end.
    unsafe fn endless(y: &mut [f32]);
    launch = gpu_await::LaunchConfig::for_elements(y.len());
    host = never_end;
}

gpu_await::kernel! {
    /// Doubles.
    unsafe fn twice(x: &[f32], y: &mut [f32]) where x.len() == y.len();
    launch = gpu_await::LaunchConfig::for_elements(y.len());
    host = double;
}

gpu_await::kernel! {
    /// Writes to the file with that name, and faults when it is gone.
    unsafe fn faulty_later(path: &[u8]);
    launch = gpu_await::LaunchConfig::for_elements(path.len());
    host = fault_later;
}

fn fault_later(_: &gpu_await::Grid, path: &[u8]) {
    let path = std::str::from_utf8(path).unwrap();
    std::fs::write(path, "it runs").unwrap();
    while std::path::Path::new(path).exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("an illegal address, later");
}

fn double(_: &gpu_await::Grid, x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
}

fn never_end(_: &gpu_await::Grid, _: &mut [f32]) {
    loop {
        std::thread::park();
    }
}

fn fault(_: &gpu_await::Grid, _: &mut [f32]) {
    panic!("an illegal address");
}

/// Waits until there is no such file.
async fn gone(path: Option<String>) {
    while path.as_ref().is_some_and(|path| std::path::Path::new(path).exists()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Loses the device. Whoever awaits it is held up, as on a busy machine, between its waking and its poll.
async fn fault_polled_late(stream: &Stream, late: Duration) -> Result<(), Failure> {
    let kernel = faulty::load(&stream.device()).await?;
    let mut y = stream.zeros::<f32>(4).queued()?;
    let mut launch = std::pin::pin!(kernel.launch(stream, &mut y).into_future());
    let mut is_woken = false;
    let launched = std::future::poll_fn(|cx| {
        if std::mem::replace(&mut is_woken, true) {
            std::thread::sleep(late);
        }
        launch.as_mut().poll(cx)
    });
    Ok(launched.await?)
}

impl Service for Twin {
    type Config = Start;
    type Request = Do;
    type Response = Done;

    async fn start(config: Start, host: &Host) -> Result<Self, Failure> {
        if config.program {
            std::process::Command::new("sleep").arg("3600").spawn()?;
        }
        tokio::time::sleep(config.delay).await;
        gone(config.once_gone).await;
        if let Some(once) = config.once {
            std::fs::remove_file(once)?;
        }
        if let Some(name) = config.keep {
            let fill = async |kept: &mut gpu_await_worker::Filling<u32>| {
                let device = kept.device().clone();
                Ok(device.fill(kept.memory(), 1).await?)
            };
            drop(host.keep::<u32>(&name, 1000, fill).await?);
        }
        let twice = twice::load(host.device()).await?;
        let stream = host.device().stream()?;
        if let Some(late) = config.fault_polled_late {
            fault_polled_late(&stream, late).await?;
        }
        let _taken = match config.takes {
            0 => None,
            len => Some(stream.zeros(len).await?),
        };
        let is_first = config.second.is_some_and(|it| std::fs::File::create_new(it).is_ok());
        let kept = config
            .keep_mut
            .filter(|_| !is_first)
            .map(|name| host.keep_mut(&name, CELLS))
            .transpose()?;
        Ok(Twin { _taken, stream, twice, host: host.clone(), kept: kept.into() })
    }

    async fn call(&self, request: Do, payloads: &mut Payloads) -> Result<Done, Failure> {
        Ok(match request {
            Do::Double(x) => {
                let x = self.stream.upload(x).queued()?;
                let x = self.stream.download(&x).await?;
                Done::Floats(x.iter().map(|x| 2.0 * x).collect())
            }
            Do::DoubleOften(x, time) => {
                let until = std::time::Instant::now() + time;
                while std::time::Instant::now() < until {
                    let y = self.stream.upload(x.clone()).queued()?;
                    drop(self.stream.download(&y).await?);
                }
                Done::Nothing
            }
            Do::WaitsItsTurn(time, answers) => {
                let waits = payloads.pause_limit();
                // One that ends meanwhile restarts nothing.
                drop(payloads.pause_limit());
                tokio::time::sleep(time).await;
                drop(waits);
                if !answers {
                    std::future::pending::<()>().await;
                }
                Done::Nothing
            }
            Do::Later(number, delay) => {
                tokio::time::sleep(delay).await;
                Done::Number(number)
            }
            Do::OnceGone(path) => {
                gone(Some(path)).await;
                Done::Nothing
            }
            Do::Block(number, time) => {
                std::thread::sleep(time);
                Done::Number(number)
            }
            Do::BlockOnce(pid, time) => {
                if pid == std::process::id() {
                    std::thread::sleep(time);
                }
                Done::Number(std::process::id())
            }
            Do::Write(path, number) => {
                let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
                std::io::Write::write_all(&mut file, &number.to_ne_bytes())?;
                Done::Number(number)
            }
            Do::Pid => Done::Number(std::process::id()),
            Do::Reverse => {
                let request = payloads.request().ok_or_else(|| Failure::new("no payload"))?;
                let mut response = payloads.respond(request.len()).await?;
                response.copy_from_slice(&request);
                response.reverse();
                payloads.attach(response);
                Done::Number(request.len() as u32)
            }
            Do::Hold(bytes, time) => {
                // On a thread that has no runtime.
                let held = std::thread::scope(|threads| {
                    let take = || futures::executor::block_on(payloads.respond(bytes));
                    threads.spawn(take).join().expect("no panic")
                });
                let held = held?;
                tokio::time::sleep(time).await;
                drop(held);
                Done::Nothing
            }
            Do::First(how, delay) => {
                let request = payloads.request().ok_or_else(|| Failure::new("no payload"))?;
                let bytes = request.to_vec();
                let mut kept = None;
                match how {
                    Use::Keep => kept = Some(request),
                    Use::Drop => drop(request),
                    Use::Upload => drop(request.upload::<u8>(&self.stream).await?),
                }
                tokio::time::sleep(delay).await;
                drop(kept);
                match bytes.iter().all(|byte| *byte == bytes[0]) {
                    true => Done::Number(bytes[0].into()),
                    false => Done::Text("they differ".to_owned()),
                }
            }
            Do::DoubleOnDevice => {
                let request = payloads.request().ok_or_else(|| Failure::new("no payload"))?;
                let bytes = request.len();
                let x = request.upload::<f32>(&self.stream).await?;
                let mut y = self.stream.zeros::<f32>(x.len()).queued()?;
                self.twice.launch(&self.stream, &x, &mut y).queued()?;
                let response = payloads.respond(bytes).await?;
                payloads.attach(response.download(&self.stream, &y).await?);
                Done::Nothing
            }
            Do::Fork => {
                // SAFETY: the child calls nothing but what may be called after a fork.
                match unsafe { libc::fork() } {
                    0 => loop {
                        // SAFETY: waits, and touches no memory.
                        unsafe { libc::pause() };
                    },
                    child => Done::Number(child as u32),
                }
            }
            Do::ForkThatDrops(delay) => {
                let request = payloads.request();
                // SAFETY: the child drops a value, which may not wait for another thread, and then waits.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    drop(request);
                    loop {
                        // SAFETY: waits, and touches no memory.
                        unsafe { libc::pause() };
                    }
                }
                tokio::time::sleep(delay).await;
                Done::Number(child as u32)
            }
            Do::Keep(name, filler) => {
                let kept = self.host.keep::<u32>(&name, 1000, async |weights| {
                    match filler {
                        Filler::Dies => std::process::abort(),
                        Filler::Fails => return Err(Failure::new("no weights")),
                        Filler::Slow(time) => tokio::time::sleep(time).await,
                        Filler::Swaps(len) => {
                            let device = weights.device().clone();
                            let mut other = device.shared::<u32>(len).await?;
                            device.fill(&mut other, 1).await?;
                            std::mem::swap(weights.memory(), &mut other);
                            return Ok(());
                        }
                        Filler::Nests => {
                            let again = self.host.keep::<u32>(&name, 1000, async |_| Ok(()));
                            drop(again.await?);
                        }
                        Filler::Good => {}
                    }
                    let device = weights.device().clone();
                    // Another pid each time: who filled it can be told.
                    device.fill(weights.memory(), std::process::id()).await?;
                    Ok(())
                });
                let kept = self.stream.download(&kept.await?).await?;
                assert!(kept.iter().all(|filler| *filler == kept[0]));
                Done::Number(kept[0])
            }
            Do::Count(how) => self.count(how).await?,
            Do::Reset(count) => {
                let mut kept = self.kept.lock().await;
                let kept = kept.as_mut().ok_or_else(|| Failure::new("nothing is kept"))?;
                kept.write(async |mut memory| Ok(self.stream.fill(&mut memory, count).await?))
                    .await?;
                Done::Nothing
            }
            Do::ForkAway { closes } => {
                // SAFETY: the child calls nothing but what may be called after a fork.
                match unsafe { libc::fork() } {
                    0 => {
                        if closes {
                            // SAFETY: touches no memory; nothing of the child uses descriptors.
                            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
                        }
                        // SAFETY: touches no memory.
                        unsafe { libc::setsid() };
                        loop {
                            // SAFETY: waits, and touches no memory.
                            unsafe { libc::pause() };
                        }
                    }
                    child => {
                        // It has left the group when the answer is there.
                        // SAFETY: touches no memory.
                        while unsafe { libc::getsid(child) } != child {
                            tokio::task::yield_now().await;
                        }
                        Done::Number(child as u32)
                    }
                }
            }
            Do::Fuzz(seed) => {
                crate::misbehave::misbehave(seed);
                Done::Nothing
            }
            Do::Send(packet) => {
                crate::misbehave::send(&packet);
                tokio::time::sleep(Duration::from_secs(5)).await;
                Done::Nothing
            }
            Do::Fail(why) => return Err(Failure::new(why)),
            Do::Panic => panic!("as asked"),
            Do::Abort => std::process::abort(),
            Do::KillMe => {
                // SAFETY: ends this process, and touches no memory.
                unsafe { libc::raise(libc::SIGKILL) };
                Done::Nothing
            }
            Do::Exit(code) => std::process::exit(code),
            Do::ExitLater(code) => {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(50));
                    std::process::exit(code);
                });
                Done::Nothing
            }
            Do::Fault => {
                let kernel = faulty::load(&self.stream.device()).await?;
                let mut y = self.stream.zeros::<f32>(4).queued()?;
                kernel.launch(&self.stream, &mut y).await?;
                Done::Nothing
            }
            Do::Endless => {
                let kernel = endless::load(&self.stream.device()).await?;
                let mut y = self.stream.zeros::<f32>(4).queued()?;
                kernel.launch(&self.stream, &mut y).await?;
                Done::Nothing
            }
            Do::FaultPolledLate(late) => {
                fault_polled_late(&self.stream, late).await?;
                Done::Nothing
            }
            Do::FaultOnceGone(path) => {
                let stream = self.stream.device().stream()?;
                let kernel = faulty_later::load(&self.stream.device()).await?;
                let path = stream.upload(path.into_bytes()).queued()?;
                kernel.launch(&stream, &path).queued()?;
                Done::Nothing
            }
            Do::Stray => {
                let nowhere = std::ptr::without_provenance_mut::<u8>(8);
                // SAFETY: none; that is the point.
                unsafe { nowhere.write_volatile(1) };
                Done::Nothing
            }
            Do::Loop => {
                println!("it loops");
                for _ in 0..8 {
                    tokio::spawn(async { std::thread::sleep(Duration::from_secs(3600)) });
                }
                std::thread::sleep(Duration::from_secs(3600));
                Done::Nothing
            }
            Do::Stop => {
                // SAFETY: stops this process, and touches no memory.
                unsafe { libc::raise(libc::SIGSTOP) };
                Done::Nothing
            }
            Do::BlockSignals => {
                for signal in 1..32 {
                    // SAFETY: changes no memory of this program; what cannot be ignored is refused.
                    unsafe { libc::signal(signal, libc::SIG_IGN) };
                }
                // SAFETY: a set of signals is plain numbers, which the call fills.
                let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
                // SAFETY: the set is this function's.
                unsafe { libc::sigfillset(&raw mut all) };
                // SAFETY: the set is initialised; no old one is wanted.
                unsafe {
                    libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut())
                };
                Done::Nothing
            }
            Do::Program => {
                let child = std::process::Command::new("sleep").arg("3600").spawn()?;
                Done::Number(child.id())
            }
            Do::Worker => match worker().spawn().await {
                Err(error) => Done::Text(format!("{error:?}")),
                Ok(_) => Done::Nothing,
            },
            Do::Hoard(bytes) => {
                let hoard = vec![1u8; bytes];
                tokio::time::sleep(Duration::from_secs(3600)).await;
                Done::Number(hoard.len() as u32)
            }
            Do::Say(line) => {
                println!("{line}");
                Done::Nothing
            }
            Do::AnswerAndDie => {
                // The answer of this call is sent before the timer fires; the socket is full of it when the process is gone.
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    std::process::abort();
                });
                Done::Nothing
            }
        })
    }
}

/// How many numbers are kept.
pub(crate) const CELLS: usize = 1000;

impl Twin {
    /// Adds one to what every cell has. Fails with "two writers" if another process writes at the same time, and with "torn" if the last
    /// write was not whole, and nobody says so.
    async fn count(&self, how: Write) -> Result<Done, Failure> {
        let mut kept = self.kept.lock().await;
        let kept = kept.as_mut().ok_or_else(|| Failure::new("nothing is kept"))?;
        let generation = kept.generation().await?;
        let found = match kept.state().await? {
            KeptState::Fresh => Found::Fresh(generation),
            KeptState::Clean => Found::Clean(generation),
            KeptState::WriterDied { generation: died } => Found::Died(generation, died),
            other => return Err(Failure::new(format!("{other:?}"))),
        };
        let before = self.stream.download(kept.memory().await?).await?;
        let last = before.iter().copied().max().unwrap_or(0);
        let is_torn = before.iter().any(|cell| *cell != last);
        if is_torn && !matches!(found, Found::Died(..)) {
            return Err(Failure::new("torn"));
        }
        if how == Write::Nothing {
            return Ok(Done::Counted(last, found));
        }
        let next = last + 1;
        let written = kept.write(async |mut memory| {
            // Who writes is there to be seen for as long as it does.
            let mine = u64::from(std::process::id()) << 32;
            self.stream.fill(&mut memory, mine).await?;
            match how {
                Write::Slowly(time) => tokio::time::sleep(time).await,
                Write::Dies => std::process::abort(),
                Write::Fails => return Err(Failure::new("half written")),
                Write::Whole | Write::Nothing => {}
            }
            if self.stream.download(&memory).await?.iter().any(|cell| *cell != mine) {
                return Err(Failure::new("two writers"));
            }
            Ok(self.stream.fill(&mut memory, next).await?)
        });
        written.await?;
        Ok(Done::Counted(next, found))
    }
}

/// A service whose start fails.
#[derive(Debug)]
pub(crate) struct NeverStarts;

impl Service for NeverStarts {
    type Config = String;
    type Request = ();
    type Response = ();

    async fn start(config: String, _: &Host) -> Result<Self, Failure> {
        println!("about to fail");
        match config.as_str() {
            "abort" => std::process::abort(),
            "panic" => panic!("at the start"),
            _ => Err(Failure::new(config)),
        }
    }

    async fn call(&self, (): (), _: &mut Payloads) -> Result<(), Failure> {
        Ok(())
    }
}

/// A service that `init` does not name.
#[derive(Debug)]
pub(crate) struct Stranger;

impl Service for Stranger {
    type Config = ();
    type Request = ();
    type Response = ();

    async fn start((): (), _: &Host) -> Result<Self, Failure> {
        Ok(Stranger)
    }

    async fn call(&self, (): (), _: &mut Payloads) -> Result<(), Failure> {
        Ok(())
    }
}

/// A builder of the twin.
pub(crate) fn worker() -> WorkerBuilder<Twin> {
    Worker::builder(Start::default()).threads(2)
}

/// Runs a test with a limit: nothing here may wait for ever.
pub(crate) fn run<F: Future>(test: F) -> F::Output {
    super::gpu_await_worker_init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), test).await.expect("within a minute")
    })
}

pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: signals a child of this process, which has not been waited for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Kills the process of a worker from outside.
pub(crate) fn kill<S: Service>(worker: &Worker<S>) {
    let pid = worker.stats().process.expect("it has a process");
    // SAFETY: signals a child of this process, which the worker waits for.
    unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
}

/// The loss that a call ended with.
#[track_caller]
pub(crate) fn lost<T: std::fmt::Debug>(result: Result<T, Error>) -> gpu_await_worker::WorkerLost {
    match result {
        Err(Error::Lost(lost)) => lost,
        other => panic!("not lost: {other:?}"),
    }
}

/// Waits until something holds, or panics after ten seconds.
#[track_caller]
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let limit = std::time::Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(std::time::Instant::now() < limit, "not so after ten seconds: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How often calls of [`Do::Write`] wrote each number to this file.
pub(crate) fn written(path: &str) -> std::collections::BTreeMap<u32, usize> {
    let mut written = std::collections::BTreeMap::new();
    for bytes in std::fs::read(path).unwrap().chunks_exact(4) {
        *written.entry(u32::from_ne_bytes(bytes.try_into().unwrap())).or_default() += 1;
    }
    written
}

/// Whether there is a process with that number that has not ended.
pub(crate) fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    !matches!(state, None | Some("Z" | "X"))
}
