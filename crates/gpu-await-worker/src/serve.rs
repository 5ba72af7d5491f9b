//! A process of a worker from the start of its service on: it takes calls, runs each as a task, and answers.
#![forbid(unsafe_code)]

mod timeline;

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::sibling::Process;
use gpu_await::{Device, ErrorDetail, ErrorKind, LossCause, SharedDescriptors};
use parking_lot::Mutex;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};

use crate::calls::CallId;
use crate::child::{self, Child};
use crate::codec::{self, Refused};
use crate::frame::{ChildTerms, Ending, MOST_HEADER, ToProcess, ToSupervisor, Verdict};
use crate::host::Host;
use crate::inputs::{Payloads, RequestPayload, Requests, Room, sleep};
use crate::leases::{LeaseId, Part};
use crate::registered::register;
use crate::service::{Failure, Service};
use crate::system::{self, Received, Sent};

/// When a packet is sent again that the kernel had no memory for.
const AGAIN: Duration = Duration::from_millis(10);

/// How long a call whose error names the line of a fault has to say it.
const KNOWS_MORE: Duration = Duration::from_millis(10);

/// How often the executor is seen to run.
const POLLED: Duration = Duration::from_millis(250);

/// The socket, and messages that wait for room in it.
#[derive(Debug)]
pub(crate) struct Link {
    socket: AsyncFd<OwnedFd>,
    waiting: Mutex<Vec<Vec<u8>>>,
    /// A task sends what waits.
    is_flushing: AtomicBool,
    runtime: tokio::runtime::Handle,
    process: Process,
    /// Who waits for memory that the supervisor keeps.
    asked: Mutex<Vec<(String, oneshot::Sender<KeptReply>)>>,
}

/// Memory that the supervisor keeps: to fill under this number, or complete.
pub(crate) type KeptReply = (u64, Option<SharedDescriptors>);

impl Link {
    /// Sends an answer once there is room.
    async fn send(&self, header: &[u8], body: &[u8]) -> Sent {
        self.send_with(header, body, &[]).await
    }

    async fn send_with(&self, header: &[u8], body: &[u8], fds: &[BorrowedFd<'_>]) -> Sent {
        loop {
            let Ok(mut ready) = self.socket.writable().await else { return Sent::Gone };
            let sent =
                ready.try_io(|socket| match system::send(socket.as_fd(), &[header, body], fds) {
                    Sent::Full => Err(io::ErrorKind::WouldBlock.into()),
                    sent => Ok(sent),
                });
            match sent {
                // The socket is as ready as before: nothing wakes it up.
                Ok(Ok(Sent::NoMemory)) => sleep(&self.runtime, AGAIN).await,
                Ok(sent) => return sent.unwrap_or(Sent::Gone),
                Err(_would_block) => {}
            }
        }
    }

    /// Sends a message once there is room.
    async fn say(&self, message: &ToSupervisor<'_>, body: &[u8]) -> Sent {
        match codec::encode(message) {
            Ok(header) => self.send(&header, body).await,
            Err(_) => Sent::Gone,
        }
    }

    /// Sends a short message now, or later in front of nothing. A fork of the process says nothing in its name.
    pub(crate) fn post(self: &Arc<Self>, message: &ToSupervisor<'_>) {
        if !self.process.is_here() {
            return;
        }
        let Ok(header) = codec::encode(message) else { return };
        if !matches!(
            system::send(self.socket.as_fd(), &[&header], &[]),
            Sent::Full | Sent::NoMemory
        ) {
            return;
        }
        self.waiting.lock().push(header);
        if !self.is_flushing.swap(true, Ordering::SeqCst) {
            let link = self.clone();
            self.runtime.spawn(async move { link.flush().await });
        }
    }

    async fn flush(&self) {
        loop {
            let waiting = std::mem::take(&mut *self.waiting.lock());
            for message in &waiting {
                let _ = self.send(message, b"").await;
            }
            if waiting.is_empty() {
                self.is_flushing.store(false, Ordering::SeqCst);
                // Whoever came before that started no task.
                if self.waiting.lock().is_empty() || self.is_flushing.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        }
    }

    /// Says why, and ends the process.
    pub(crate) fn end(&self, ending: Ending, why: &str) -> ! {
        child::end(self.socket.as_fd(), ending, why)
    }

    /// Asks the supervisor for the memory that it keeps under a name.
    pub(crate) async fn keep(self: &Arc<Self>, name: &str) -> Option<KeptReply> {
        let (sender, reply) = oneshot::channel();
        self.asked.lock().push((name.to_owned(), sender));
        let _ = self.say(&ToSupervisor::Keep { name }, b"").await;
        reply.await.ok()
    }

    /// Hands kept memory to who asked for it.
    fn kept(&self, name: &str, reply: KeptReply) {
        let mut asked = self.asked.lock();
        if let Some(at) = asked.iter().position(|(wanted, _)| wanted == name) {
            let (_, sender) = asked.swap_remove(at);
            drop(asked);
            drop(sender.send(reply));
        }
    }

    /// Sends sealed memory to the supervisor, which keeps it.
    pub(crate) async fn sealed(&self, name: &str, generation: u64, memory: &SharedDescriptors) {
        let Ok(header) = codec::encode(&ToSupervisor::Sealed { name, generation }) else { return };
        let fds = [memory.memory.as_fd(), memory.header.as_fd()];
        let _ = self.send_with(&header, b"", &fds).await;
    }

    /// Takes one packet, with descriptors; `None` at the end.
    ///
    /// With `hot`, it looks for so long before it sleeps, and lets other tasks run in between.
    async fn receive(&self, buffer: &mut [u8], hot: Duration) -> Option<(usize, Vec<OwnedFd>)> {
        let begun = (!hot.is_zero()).then(Instant::now);
        while begun.is_some_and(|begun| begun.elapsed() < hot) {
            match system::receive(self.socket.as_fd(), buffer) {
                (Received::Packet(bytes), beside) if bytes <= buffer.len() => {
                    return Some((bytes, beside.fds));
                }
                (Received::Nothing, _) => tokio::task::yield_now().await,
                (Received::Packet(_) | Received::End, _) => return None,
            }
        }
        loop {
            let mut ready = self.socket.readable().await.ok()?;
            let taken = ready.try_io(|socket| match system::receive(socket.as_fd(), buffer) {
                (Received::Packet(bytes), beside) => Ok(Some((bytes, beside.fds))),
                (Received::End, _) => Ok(None),
                (Received::Nothing, _) => Err(io::ErrorKind::WouldBlock.into()),
            });
            match taken {
                Ok(Ok(Some(packet))) if packet.0 <= buffer.len() => return Some(packet),
                Ok(_) => return None,
                Err(_would_block) => {}
            }
        }
    }
}

/// Serves; does not return.
pub(crate) fn run<S: Service>(child: Child) -> ! {
    let mut builder = match child.terms.threads {
        0 | 1 => tokio::runtime::Builder::new_current_thread(),
        threads => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads as usize);
            builder
        }
    };
    // It panics if the system refuses a thread.
    let built = std::panic::catch_unwind(AssertUnwindSafe(|| builder.enable_all().build()));
    let built = built.map_err(codec::panic_text);
    match built.and_then(|built| built.map_err(|error| error.to_string())) {
        Err(why) => {
            child::end(child.socket.as_fd(), Ending::StartFailed, &format!("no runtime: {why}"))
        }
        Ok(runtime) => {
            let socket = child.socket.try_clone();
            let served = std::panic::catch_unwind(AssertUnwindSafe(|| {
                runtime.block_on(serve::<S>(child, runtime.handle().clone()))
            }));
            let why = match served {
                Ok(why) => why,
                Err(panic) => codec::panic_text(panic),
            };
            match socket {
                Ok(socket) => child::end(socket.as_fd(), Ending::StartFailed, &why),
                Err(_) => system::end_process(1),
            }
        }
    }
}

/// Returns why it cannot go on.
async fn serve<S: Service>(child: Child, runtime: tokio::runtime::Handle) -> String {
    let Child { socket, requests, responses, config, terms } = child;
    let socket = match system::registered(socket) {
        Ok(socket) => socket,
        Err(error) => return format!("no reactor: {error}"),
    };
    let link = Arc::new(Link {
        socket,
        waiting: Mutex::default(),
        is_flushing: AtomicBool::new(false),
        runtime: runtime.clone(),
        process: Process::remembered(),
        asked: Mutex::default(),
    });
    let status = responses.clone();
    runtime.spawn(async move {
        loop {
            status.status().polled();
            tokio::time::sleep(POLLED).await;
        }
    });
    let room = Arc::new(Room::new(responses, &terms, runtime.clone()));
    let requests = Arc::new(Requests { slab: requests, registered: AtomicBool::new(false) });
    let slabs = (requests.clone(), room.clone());
    let (service, started) = oneshot::channel();
    let starting = link.clone();
    runtime.spawn(async move {
        match guarded(start::<S>(&config, &terms, &starting, slabs)).await {
            Ok(Ok((started, device))) => drop(service.send((Arc::new(started), device))),
            Ok(Err((ending, why))) => starting.end(ending, &why),
            Err(panic) => starting.end(Ending::StartFailed, &panic),
        }
    });
    let process = Serving {
        link,
        requests,
        room,
        most_response: terms.most_message_bytes as usize,
        hot: Duration::from_micros(terms.hot_us.into()),
        running: Arc::new(Running::default()),
        runtime,
    };
    process.live::<S>(started).await
}

/// Starts the service, on this device.
async fn start<S: Service>(
    config: &[u8],
    terms: &ChildTerms,
    link: &Arc<Link>,
    (requests, room): (Arc<Requests>, Arc<Room>),
) -> Result<(S, Device), (Ending, String)> {
    let config = codec::decode(config)
        .map_err(|error| (Ending::StartFailed, format!("the configuration: {error}")))?;
    let host = Host::open(terms, link).await?;
    // Beside the start of the service: until a slab is registered, payloads are copied.
    let device = host.device().clone();
    let thread = std::thread::Builder::new().name("worker registers".to_owned());
    let registering = thread.spawn(move || {
        // ORDERING: Relaxed: whoever sees it late copies.
        room.registered.store(register(&device, &room.slab, false), Ordering::Relaxed);
        requests.registered.store(register(&device, &requests.slab, true), Ordering::Relaxed);
    });
    if let Err(error) = registering {
        tracing::warn!(%error, "payloads are copied by the CPU: there is no thread that registers their memory");
    }
    let (lost, watching) = (host.device().lost(), link.clone());
    link.runtime.spawn(async move {
        let error = lost.await;
        // Else the process is ending, and says itself how.
        if error.is_device_lost() {
            // A call that met it knows its line, and comes first, if the executor runs.
            tokio::time::sleep(KNOWS_MORE).await;
            watching.end(fault_of(&error), &error.to_string())
        }
    });
    if terms.timeline > 0 {
        let timeline = host.device().timeline().start(terms.timeline as usize);
        timeline.map_err(|error| (Ending::StartFailed, format!("its timeline: {error}")))?;
    }
    let started = S::start(config, &host).await;
    let started = started.map_err(|failure| (ending_of(&failure), failure.to_string()))?;
    Ok((started, host.device().clone()))
}

/// Whether a loss says that the device's memory is wrong: an ECC error that was not corrected.
fn fault_of(error: &gpu_await::Error) -> Ending {
    const ECC_UNCORRECTABLE: i32 = 214;
    match error.detail() {
        ErrorDetail::DeviceLost { cause: LossCause::Driver(code), .. }
            if code.code == ECC_UNCORRECTABLE =>
        {
            Ending::MemoryFault
        }
        _ => Ending::Fault,
    }
}

fn ending_of(failure: &Failure) -> Ending {
    match failure.kind() {
        Some(ErrorKind::DeviceLost) => Ending::Fault,
        Some(ErrorKind::OutOfMemory) => Ending::OutOfMemory,
        _ => Ending::StartFailed,
    }
}

/// How many calls run.
#[derive(Debug, Default)]
struct Running {
    count: AtomicUsize,
    none: Notify,
}

/// A call that runs, until it is dropped.
struct Runs(Arc<Running>);

impl Drop for Runs {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.none.notify_one();
        }
    }
}

/// A process that takes messages.
struct Serving {
    link: Arc<Link>,
    requests: Arc<Requests>,
    room: Arc<Room>,
    most_response: usize,
    hot: Duration,
    running: Arc<Running>,
    runtime: tokio::runtime::Handle,
}

impl Serving {
    /// Takes messages from the beginning on, and calls once the service has started. Returns why it cannot go on.
    async fn live<S: Service>(self, started: oneshot::Receiver<(Arc<S>, Device)>) -> String {
        let mut buffer = vec![0; self.most_response + MOST_HEADER];
        let mut started = Some(started);
        let (mut service, mut device) = (None, None);
        loop {
            let packet = match &mut started {
                None => self.link.receive(&mut buffer, self.hot).await,
                Some(starting) => tokio::select! {
                    packet = self.link.receive(&mut buffer, self.hot) => packet,
                    ready = starting => {
                        let (ready, of) = ready.ok().unzip();
                        // What its pool has now.
                        let memory = of.as_ref().and_then(|device: &Device| device.memory().ok());
                        let device_bytes = memory
                            .map_or(0, |memory| memory.reserved_bytes.max(memory.used_bytes));
                        (service, started, device) = (ready, None, of);
                        let _ = self.link.say(&ToSupervisor::Serving { device_bytes }, b"").await;
                        continue;
                    }
                },
            };
            // Without a packet the supervisor is gone.
            let Some((bytes, fds)) = packet else { child::end_with_front() };
            let Some((message, body)) = codec::header(&buffer[..bytes]) else {
                return "its supervisor sent an unknown message".to_owned();
            };
            match (message, &service) {
                (ToProcess::Call { id, payload }, Some(service)) => {
                    let answer = self.answer(service, id, payload, body.to_vec());
                    let _task = self.runtime.spawn(answer);
                }
                (ToProcess::Release(lease), _) => self.room.released(lease),
                (ToProcess::Kept { name, generation, fill }, _) => {
                    let memory = <[OwnedFd; 2]>::try_from(fds).ok();
                    let memory =
                        memory.map(|[memory, header]| SharedDescriptors { memory, header });
                    if memory.is_some() != fill {
                        self.link.kept(name, (generation, memory));
                    }
                }
                (ToProcess::End, _) => break,
                (ToProcess::Timeline, Some(_)) => {
                    let timeline =
                        timeline::tell(self.link.clone(), device.clone(), self.most_response);
                    let _task = self.runtime.spawn(timeline);
                }
                (ToProcess::Setup(_) | ToProcess::Call { .. } | ToProcess::Timeline, _) => {
                    return "its supervisor sent a message that it does not expect".to_owned();
                }
            }
        }
        while self.running.count.load(Ordering::SeqCst) > 0 {
            self.running.none.notified().await;
        }
        self.link.end(Ending::Done, "")
    }

    fn answer<S: Service>(
        &self,
        service: &Arc<S>,
        id: CallId,
        payload: Option<(LeaseId, Part)>,
        request: Vec<u8>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (service, link, running) = (service.clone(), self.link.clone(), self.running.clone());
        let payload = payload
            .map(|(id, part)| RequestPayload::new(link.clone(), self.requests.clone(), id, part));
        let (payloads, room) = (Payloads::new(payload, self.room.clone()), self.room.clone());
        let most_response = self.most_response;
        running.count.fetch_add(1, Ordering::SeqCst);
        let runs = Runs(running);
        async move {
            let _runs = runs;
            room.slab.begun(id.slot()).begins(id.generation());
            let (verdict, body, payload) =
                call(&*service, &link, payloads, &request, most_response).await;
            let sent = payload.as_ref().map(|payload| payload.sent());
            let answer = ToSupervisor::Answer { id, verdict, payload: sent };
            if link.say(&answer, &body).await == Sent::TooLong {
                let limit = system::most_packet(link.socket.as_fd()).saturating_sub(MOST_HEADER);
                let verdict = Verdict::TooLarge { bytes: body.len() as u64, limit: limit as u64 };
                let answer = ToSupervisor::Answer { id, verdict, payload: None };
                let _ = link.say(&answer, b"").await;
            }
        }
    }
}

/// Runs one call: whatever is the service's runs, and is dropped, where its panics end.
async fn call<S: Service>(
    service: &S,
    link: &Arc<Link>,
    mut payloads: Payloads,
    request: &[u8],
    most: usize,
) -> (Verdict, Vec<u8>, Option<crate::inputs::ResponsePayload>) {
    let cut = |text: &str| codec::cut(text, most).to_vec();
    let called = guarded(async {
        let request = match codec::decode(request) {
            Ok(request) => request,
            Err(Refused::TooDeep(limit)) => {
                return (Verdict::TooDeep { response: false, limit }, Vec::new());
            }
            Err(Refused::Because(why)) => return (Verdict::Undecodable, cut(&why)),
        };
        let response = match service.call(request, &mut payloads).await {
            Ok(response) => response,
            Err(failure) => {
                if let Some((bytes, held, limit)) = failure.held() {
                    return (Verdict::PayloadsHeld { bytes, held, limit }, Vec::new());
                }
                if failure.is_ending() {
                    // Its death is the answer, which sends it again if it may be.
                    return std::future::pending().await;
                }
                if failure.kind() == Some(ErrorKind::DeviceLost) {
                    link.end(Ending::Fault, &failure.to_string());
                }
                return (Verdict::Failed, cut(&failure.to_string()));
            }
        };
        match codec::encode(&response) {
            Ok(bytes) if bytes.len() <= most => (Verdict::Answered, bytes),
            Ok(bytes) => {
                let verdict = Verdict::TooLarge { bytes: bytes.len() as u64, limit: most as u64 };
                (verdict, Vec::new())
            }
            Err(Refused::TooDeep(limit)) => {
                (Verdict::TooDeep { response: true, limit }, Vec::new())
            }
            Err(Refused::Because(why)) => (Verdict::Unencodable, cut(&why)),
        }
    });
    match called.await {
        Ok((Verdict::Answered, body)) => (Verdict::Answered, body, payloads.into_response()),
        Ok((verdict, body)) => (verdict, body, None),
        Err(panic) => (Verdict::Panicked, cut(&panic), None),
    }
}

/// Runs code of the service; a panic of it, of what it drops and of its own payload is an error. All of that has to be dropped within.
async fn guarded<T>(code: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(code).catch_unwind().await.map_err(codec::panic_text)
}
