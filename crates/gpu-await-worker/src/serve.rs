//! A process of a worker from the start of its service on: it takes calls, runs each as a task, and answers.
#![forbid(unsafe_code)]

mod timeline;

use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::{Device, ErrorDetail, ErrorKind, LossCause, SharedDescriptors};
use tokio::io::Interest;
use tokio::sync::{Notify, oneshot};

use crate::calls::CallId;
use crate::codec::{self, Refused};
use crate::failure::Failure;
use crate::frame::{ChildTerms, Ending, MOST_HEADER, ToProcess, ToSupervisor, Tried, Verdict};
use crate::host::Host;
use crate::inputs::{Payloads, RequestPayload, Requests, Room};
use crate::last_words;
use crate::leases::{LeaseId, Part};
use crate::link::{Lent, Link};
use crate::registered::register;
use crate::service::Service;
use crate::slab::Slab;
use crate::system::{self, Sent};
use crate::unpolled::Unpolled;

/// How long a call has to report the line of a fault that it hears of through another task, which is not tracked.
const HEARSAY: Duration = Duration::from_millis(10);

/// How long calls woken by a fault have to report it, however slow the machine is: some polls never end.
const KNOWS_MORE: Duration = Duration::from_secs(2);

/// How long a call that is to run alone waits for what others left on the device, and its answer for what it leaves there: a service may have a
/// kernel that never ends.
const LEFT: Duration = Duration::from_secs(1);

/// How often the executor signals that it runs.
const POLLED: Duration = Duration::from_millis(250);

/// A process of a worker before its service has started.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) socket: OwnedFd,
    pub(crate) requests: Slab,
    pub(crate) responses: Arc<Slab>,
    pub(crate) config: Vec<u8>,
    pub(crate) terms: ChildTerms,
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
    let built = child.socket.try_clone().and_then(|socket| {
        // tokio panics if the system refuses a thread, and would then wait forever for the threads it has, which it never told to end.
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let error = system_error(&codec::text_of(panic.payload()));
            last_words::refused(socket.as_fd(), Tried::Runtime, &error)
        }));
        let built = builder.enable_all().build();
        std::panic::set_hook(before);
        built
    });
    match built {
        Err(error) => last_words::refused(child.socket.as_fd(), Tried::Runtime, &error),
        Ok(runtime) => {
            let socket = child.socket.try_clone();
            let served = std::panic::catch_unwind(AssertUnwindSafe(|| {
                runtime.block_on(serve::<S>(child, runtime.handle().clone()))
            }));
            let (ending, why) = match served {
                Ok(why) => why,
                // The thread is another runtime's, which panics before anything has run.
                Err(panic) if tokio::runtime::Handle::try_current().is_ok() => {
                    (Ending::InsideRuntime, codec::panic_text(panic))
                }
                Err(panic) => (Ending::StartFailed, codec::panic_text(panic)),
            };
            match socket {
                Ok(socket) => last_words::end(socket.as_fd(), ending, &why),
                Err(_) => system::end_process(1),
            }
        }
    }
}

/// The system error in a text, written for people or by `Debug`.
fn system_error(text: &str) -> std::io::Error {
    let number = [("(os error ", ')'), ("Os { code: ", ',')]
        .into_iter()
        .find_map(|(begin, end)| text.rsplit_once(begin)?.1.split_once(end)?.0.parse().ok());
    match number {
        Some(number) => std::io::Error::from_raw_os_error(number),
        None => std::io::Error::other(text),
    }
}

/// Returns why it cannot go on.
async fn serve<S: Service>(child: Child, runtime: tokio::runtime::Handle) -> (Ending, String) {
    let Child { socket, requests, responses, config, terms } = child;
    let socket = match system::registered(socket, Interest::READABLE) {
        Ok(socket) => socket,
        Err(error) => return (last_words::refusal(Tried::Reactor, &error), String::new()),
    };
    let link = Arc::new(Link::new(socket, runtime.clone()));
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
    let running = Arc::new(Running::default());
    let begins = running.clone();
    let service_starts = async move {
        match guarded(start::<S>(&config, &terms, &starting, slabs, &begins)).await {
            Ok(Ok(started)) => {
                drop(service.send(started));
            }
            Ok(Err((ending, why))) => starting.end(ending, &why),
            Err(panic) => starting.end(Ending::StartPanicked, &panic),
        }
    };
    runtime.spawn(running.unpolled.follow(service_starts));
    let process = Serving {
        link,
        requests,
        room,
        most_response: terms.most_message_bytes as usize,
        device: None,
        holds: terms.hold_answers,
        hot: Duration::from_micros(terms.hot_us.into()),
        running,
        runtime,
    };
    (Ending::StartFailed, process.live::<S>(started).await)
}

/// A service that has started.
struct Started<S> {
    service: Arc<S>,
    /// The size of its device's pool at that moment.
    device_bytes: u64,
    device: Device,
}

/// Starts the service, on its device.
async fn start<S: Service>(
    config: &[u8],
    terms: &ChildTerms,
    link: &Arc<Link>,
    (requests, room): (Arc<Requests>, Arc<Room>),
    running: &Arc<Running>,
) -> Result<Started<S>, (Ending, String)> {
    let config =
        codec::decode(config).map_err(|error| (Ending::NoConfiguration, error.to_string()))?;
    let host = Host::open(terms, link).await?;
    // Beside the start of the service: until a slab is registered, payloads are copied.
    let device = host.device().clone();
    let thread = std::thread::Builder::new().name("worker registers".to_owned());
    let registering = thread.spawn(move || {
        // ORDERING: Relaxed: a call that sees it late copies.
        room.registered.store(register(&device, &room.slab, false), Ordering::Relaxed);
        requests.registered.store(register(&device, &requests.slab, true), Ordering::Relaxed);
    });
    if let Err(error) = registering {
        tracing::warn!(%error, "payloads are copied by the CPU: there is no thread that registers their memory");
    }
    let (lost, watching, running) = (host.device().lost(), link.clone(), running.clone());
    link.spawn(async move {
        let error = lost.await;
        // Otherwise the process is ending, and says itself how.
        if error.is_device_lost() {
            // Calls that waited for the device were woken before this task: one that met the fault knows its line, and ends the process with it.
            let known = async {
                running.unpolled.none().await;
                if running.count.load(Ordering::SeqCst) > 0 {
                    tokio::time::sleep(HEARSAY).await;
                    running.unpolled.none().await;
                }
            };
            let _late = tokio::time::timeout(KNOWS_MORE, known).await;
            watching.end(fault_of(&error), &error.to_string())
        }
    });
    if terms.timeline > 0 {
        let timeline = host.device().timeline().start(terms.timeline as usize);
        timeline.map_err(|error| (Ending::NoDevice, format!("its timeline: {error}")))?;
    }
    let started = S::start(config, &host).await;
    let started = started.map_err(|failure| (ending_of(&failure), failure.to_string()))?;
    let memory = host.device().memory();
    Ok(Started {
        service: Arc::new(started),
        device_bytes: memory.map_or(0, |memory| memory.reserved_bytes.max(memory.used_bytes)),
        device: host.device().clone(),
    })
}

/// The ending for a lost device: a memory fault if an ECC error was not corrected.
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
    match (failure.kind(), failure.refused()) {
        (Some(ErrorKind::DeviceLost), _) => Ending::Fault,
        (_, Some(errno)) => Ending::NotStarted { tried: Tried::Service, errno },
        (Some(ErrorKind::OutOfMemory), _) => Ending::OutOfMemory,
        _ => Ending::StartFailed,
    }
}

/// How many calls are running, and timelines being sent.
#[derive(Debug, Default)]
struct Running {
    count: AtomicUsize,
    none: Notify,
    /// Which of them, and of the service's start, have been woken.
    unpolled: Arc<Unpolled>,
}

impl Running {
    fn begins(self: &Arc<Self>) -> Runs {
        self.count.fetch_add(1, Ordering::SeqCst);
        Runs(self.clone())
    }
}

/// Something that runs, until it is dropped.
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
    /// Once the service has started.
    device: Option<Device>,
    /// Answers wait for the device.
    holds: bool,
    hot: Duration,
    running: Arc<Running>,
    runtime: tokio::runtime::Handle,
}

impl Serving {
    /// Takes messages from the beginning on, and calls once the service has started. Returns why it cannot go on.
    async fn live<S: Service>(mut self, started: oneshot::Receiver<Started<S>>) -> String {
        let mut buffer = vec![0; self.most_response + MOST_HEADER];
        let mut started = Some(started);
        let mut service = None;
        // The process is to finish what runs.
        let mut ending = false;
        loop {
            if ending && self.running.count.load(Ordering::SeqCst) == 0 {
                self.link.end(Ending::Done, "");
            }
            let packet = match &mut started {
                // What runs may need memory that others give back, or that is kept.
                None if ending => tokio::select! {
                    packet = self.link.receive(&mut buffer, Duration::ZERO) => packet,
                    () = self.running.none.notified() => continue,
                },
                None => self.link.receive(&mut buffer, self.hot).await,
                Some(starting) => tokio::select! {
                    packet = self.link.receive(&mut buffer, self.hot) => packet,
                    ready = starting => {
                        started = None;
                        // Otherwise its task is gone, and ends the process.
                        let Ok(ready) = ready else { continue };
                        let device_bytes = ready.device_bytes;
                        (service, self.device) = (Some(ready.service), Some(ready.device));
                        let _ = self.link.say(&ToSupervisor::Serving { device_bytes }, b"").await;
                        continue;
                    }
                },
            };
            // Without a packet the supervisor is gone.
            let Some((bytes, fds)) = packet else { last_words::end_with_front() };
            let Some((message, body)) = codec::header(&buffer[..bytes]) else {
                return "its supervisor sent an unknown message".to_owned();
            };
            match (message, &service) {
                (ToProcess::Call { id, payload, alone }, Some(service)) => {
                    let answer = self.answer(service, id, payload, alone, body.to_vec());
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
                (ToProcess::KeptMut { name, made, generation, died }, _) => {
                    let memory = <[OwnedFd; 2]>::try_from(fds).ok();
                    let memory =
                        memory.map(|[memory, header]| SharedDescriptors { memory, header });
                    self.link.given(name, Lent { made, generation, died, memory });
                }
                (ToProcess::End, _) => ending = true,
                (ToProcess::Timeline, Some(_)) => {
                    // The timeline is sent in full, even by a process that is ending.
                    let runs = self.running.begins();
                    let timeline =
                        timeline::tell(self.link.clone(), self.device.clone(), self.most_response);
                    let _task = self.runtime.spawn(async move {
                        timeline.await;
                        drop(runs);
                    });
                }
                (ToProcess::Setup(_) | ToProcess::Call { .. } | ToProcess::Timeline, _) => {
                    return "its supervisor sent a message that it does not expect".to_owned();
                }
            }
        }
    }

    fn answer<S: Service>(
        &self,
        service: &Arc<S>,
        id: CallId,
        payload: Option<(LeaseId, Part)>,
        alone: bool,
        request: Vec<u8>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (service, link, running) = (service.clone(), self.link.clone(), self.running.clone());
        let payload = payload
            .map(|(id, part)| RequestPayload::new(link.clone(), self.requests.clone(), id, part));
        let (payloads, room) = (Payloads::new(payload, self.room.clone(), id), self.room.clone());
        let most_response = self.most_response;
        let (device, holds) = (self.device.clone(), self.holds);
        let (unpolled, runs) = (running.unpolled.clone(), running.begins());
        unpolled.follow(async move {
            let _runs = runs;
            let mut hold = holds.then_some(Duration::MAX);
            if let Some(device) = device.as_ref().filter(|_| alone) {
                // If the device is lost by then, this call has not begun.
                let is_clear = well(device, LEFT).await;
                hold = hold.or(is_clear.then_some(LEFT));
            }
            room.slab.begun(id.slot()).begins(id.generation());
            let (verdict, body, payload) =
                call(&*service, &link, payloads, &request, most_response).await;
            if let Some((device, most)) = device.as_ref().zip(hold) {
                well(device, most).await;
            }
            let sent = payload.as_ref().map(|payload| payload.sent());
            let answer = ToSupervisor::Answer { id, verdict, payload: sent };
            if link.say(&answer, &body).await == Sent::TooLong {
                let limit = link.most_packet().saturating_sub(MOST_HEADER);
                let verdict = Verdict::TooLarge { bytes: body.len() as u64, limit: limit as u64 };
                let answer = ToSupervisor::Answer { id, verdict, payload: None };
                let _ = link.say(&answer, b"").await;
            }
        })
    }
}

/// Waits until all work on the device is complete, or for `most`, and returns which; forever if the device is lost, which ends the process.
async fn well(device: &Device, most: Duration) -> bool {
    match tokio::time::timeout(most, device.done()).await {
        Ok(Err(error)) if error.is_device_lost() => std::future::pending().await,
        done => done.is_ok(),
    }
}

/// Runs one call. All code of the service runs, and its values are dropped, where panics are caught.
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
                    // The death of the process is the answer, and sends the call again if it may run again.
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

/// Runs code of the service. Its panics, also in drops of its values and of the panic's payload, are errors; all of these are dropped within.
async fn guarded<T>(code: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(code).catch_unwind().await.map_err(codec::panic_text)
}
