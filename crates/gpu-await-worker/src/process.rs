//! One process of a worker, as its supervisor sees it: how it is started, what it was sent, what it has said.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::calls::Culprit;
use crate::error::Cause;
use crate::frame::{ChildTerms, Ending, Setup, ToProcess, VERSION};
use crate::heart::Heart;
use crate::log::Log;
use crate::program::PARENT;
use crate::replace::Used;
use crate::slab::{Slab, status_bytes};
use crate::spec::Spec;
use crate::system::{self, Exit, Sent};
use crate::watch::Ends;

/// How long a process that ends may take before it is killed.
const ENDING: Duration = Duration::from_millis(200);

/// How often a process may ask for memory that is kept.
pub(crate) const MOST_KEPT: usize = 4096;

/// A process that was started and has not been reaped.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) incarnation: u32,
    pub(crate) pid: Pid,
    pub(crate) ends: Arc<Ends>,
    /// Which pipes have not ended.
    pub(crate) open_pipes: [bool; 2],
    pub(crate) log: Log,
    pub(crate) responses: Arc<Slab>,
    pub(crate) heart: Heart,
    /// As of the last look.
    pub(crate) is_stopped: bool,
    pub(crate) is_busy: bool,
    /// The size of its device's pool as it began to serve.
    pub(crate) device_bytes: u64,
    pub(crate) next_look: Instant,
    /// How much it was used since it took over the calls.
    pub(crate) used: Used,
    /// Messages that go out before any call.
    control: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// Memory that it asked for, and waits for.
    pub(crate) asked: Vec<String>,
    /// Memory that it asked to write, and waits for. Until it has it, no call is sent.
    pub(crate) asked_mut: Vec<String>,
    /// Only looking tells when the memory that it waits for is free.
    pub(crate) settles: bool,
    /// How often it asked.
    pub(crate) requests_to_keep: usize,
    /// The socket takes no more for now.
    pub(crate) full: bool,
    /// The kernel had no memory for a packet.
    pub(crate) starved: bool,
    /// When it closed its end of the socket.
    pub(crate) deaf: Option<Instant>,
    /// Why it says that it ends, and when it said so.
    pub(crate) told: Option<(Ending, String, Instant)>,
    pub(crate) killed_for: Option<(Cause, Culprit)>,
    pub(crate) times: Times,
    killed_before: u64,
}

/// When it reached each step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) started: Instant,
    pub(crate) hello: Option<Instant>,
    pub(crate) serving: Option<Instant>,
    pub(crate) killed: Option<Instant>,
}

/// What the system refused when a process was to be started.
#[derive(Debug, thiserror::Error)]
#[error("{tried}: {error}")]
pub(crate) struct Refusal {
    pub(crate) tried: &'static str,
    pub(crate) error: std::io::Error,
}

/// The system refused this.
fn tried(tried: &'static str) -> impl FnOnce(std::io::Error) -> Refusal {
    move |error| Refusal { tried, error }
}

impl Process {
    /// Starts a process. The calling thread must never end: the kernel signals the process when that thread ends, not only with the front.
    pub(crate) fn start(spec: &Spec, incarnation: u32, now: Instant) -> Result<Process, Refusal> {
        let Spec { options, program, config, requests, service, .. } = spec;
        let status_bytes = status_bytes(options.most_slots());
        let response_bytes = options.response_slab_bytes + status_bytes;
        let responses =
            Slab::new("responses", response_bytes, false).map_err(tried("memory for responses"))?;
        let configuration = Slab::new("configuration", config.len().max(1) as u64, false);
        let configuration = configuration.map_err(tried("memory for the configuration"))?;
        let all = crate::leases::Part { offset: 0, len: config.len() as u64 };
        // SAFETY: new memory that nobody else knows of.
        unsafe { configuration.slice_mut(all) }.copy_from_slice(config);

        let (ours, theirs) = system::socket_pair().map_err(tried("a pair of sockets"))?;
        let packet = spec.packet_bytes();
        system::widen(ours.as_fd(), packet);
        system::widen(theirs.as_fd(), packet);
        let setup = ToProcess::Setup(Setup {
            version: VERSION,
            executable: program.executable,
            service,
            request_slab_bytes: requests.bytes(),
            response_slab_bytes: responses.bytes(),
            config_bytes: config.len() as u64,
            terms: ChildTerms {
                incarnation,
                status_bytes,
                held_ms: options.held.as_millis().try_into().unwrap_or(u64::MAX),
                most_message_bytes: options.most_message_bytes,
                threads: options.threads,
                hot_us: options.hot.as_micros().try_into().unwrap_or(u32::MAX),
                gpu: options.gpu.as_ref().map(|_| 0),
                device_memory_bytes: options.device_memory_bytes,
                verify: options.verify,
                hold_answers: options.hold_answers,
                allow_mps: options.allow_mps,
                timeline: options.timeline,
            },
        });
        let first = tried("its first packet");
        let setup = match crate::codec::encode(&setup) {
            Ok(setup) => setup,
            Err(why) => return Err(first(std::io::Error::other(why.to_string()))),
        };
        let fds = [requests.fd(), responses.fd(), configuration.fd()];
        if system::send(ours.as_fd(), &[&setup], &fds) != Sent::Yes {
            return Err(first(std::io::Error::other("the socket does not take it")));
        }
        system::name_senders(ours.as_fd(), true).map_err(tried("an option of its socket"))?;

        let killed_before = system::killed_for_memory();
        use std::os::fd::AsRawFd;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.file.as_raw_fd()));
        let name = std::env::args_os().next().unwrap_or_else(|| "worker".into());
        command.arg0(name).args(&program.arguments);
        command.envs(options.environment.iter().map(|(name, value)| (name, value)));
        if let Some(gpu) = &options.gpu {
            command.env("CUDA_VISIBLE_DEVICES", gpu);
        }
        command.env(PARENT, std::process::id().to_string());
        // A group of its own: it gets no signals of a terminal, and what it starts can be killed with it.
        command.process_group(0);
        command.stdin(Stdio::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(tried("executing the program"))?;
        let pipes =
            [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let [Some(output), Some(errors)] = pipes else {
            return Err(tried("its pipes")(std::io::ErrorKind::NotFound.into()));
        };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let no_number = || tried("its number")(std::io::ErrorKind::InvalidData.into());
        let pid = pid.ok_or_else(no_number)?;
        let handle = system::handle_of(pid).inspect_err(|_| {
            // Without a handle the process cannot be told apart from a successor with its number: it must not live.
            drop(child.kill());
            drop(child.wait());
        });
        let handle = handle.map_err(tried("its handle"))?;
        for pipe in [&output, &errors] {
            system::set_nonblocking(pipe.as_fd()).map_err(tried("its pipes"))?;
        }
        Ok(Process {
            incarnation,
            pid,
            ends: Arc::new(Ends { socket: ours, handle, pipes: [output, errors] }),
            open_pipes: [true; 2],
            log: Log::new(options.log_bytes),
            responses: Arc::new(responses),
            heart: Heart::default(),
            is_stopped: false,
            is_busy: false,
            device_bytes: 0,
            next_look: now + crate::heart::EVERY,
            used: Used::new(now),
            control: VecDeque::new(),
            asked: Vec::new(),
            asked_mut: Vec::new(),
            settles: false,
            requests_to_keep: 0,
            full: false,
            starved: false,
            deaf: None,
            told: None,
            killed_for: None,
            times: Times { started: now, hello: None, serving: None, killed: None },
            killed_before,
        })
    }

    /// Sends a message ahead of all calls, now or when the socket takes it.
    pub(crate) fn tell(&mut self, message: &ToProcess<'_>, fds: Vec<OwnedFd>) {
        // This crate's headers always encode.
        if let Ok(message) = crate::codec::encode(message) {
            self.control.push_back((message, fds));
            self.send_control();
        }
    }

    /// Whether more messages wait for it than a process that reads what it is sent would leave.
    pub(crate) fn is_swamped(&self, most_slots: usize) -> bool {
        self.control.len() > 2 * most_slots + MOST_KEPT
    }

    /// Whether it is stopped now, or silent: it would answer nobody.
    pub(crate) fn is_still(&self) -> bool {
        self.heart.is_silent() || system::is_stopped(self.pid)
    }

    /// Sends waiting messages; true if none is left.
    pub(crate) fn send_control(&mut self) -> bool {
        while let Some((message, fds)) = self.control.front() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            let sent = system::send(self.ends.socket.as_fd(), &[message], &fds);
            (self.full, self.starved) = (sent == Sent::Full, sent == Sent::NoMemory);
            match sent {
                Sent::Full | Sent::NoMemory => return false,
                Sent::Yes | Sent::TooLong | Sent::Gone => drop(self.control.pop_front()),
            }
        }
        true
    }

    /// Sends one packet.
    pub(crate) fn send(&mut self, parts: &[&[u8]]) -> Sent {
        let sent = system::send(self.ends.socket.as_fd(), parts, &[]);
        (self.full, self.starved) = (sent == Sent::Full, sent == Sent::NoMemory);
        sent
    }

    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Whether something waits that the supervisor has to send.
    pub(crate) fn has_to_send(&self) -> bool {
        self.full || self.starved
    }

    /// The longest packet that its socket takes.
    pub(crate) fn most_packet(&self) -> usize {
        system::most_packet(self.ends.socket.as_fd())
    }

    /// Kills it, and notes why if it did not say so itself.
    pub(crate) fn kill(&mut self, cause: Cause, culprit: Culprit, now: Instant) {
        if self.killed_for.is_none() && self.told.is_none() {
            self.killed_for = Some((cause, culprit));
        }
        self.times.killed.get_or_insert(now);
        system::kill(self.ends.handle.as_fd(), self.pid);
    }

    /// When to kill it, if it said that it ends, or closed its socket, and is still there.
    pub(crate) fn ends_until(&self) -> Option<Instant> {
        let told = self.told.as_ref().map(|(_, _, at)| *at).or(self.deaf)?;
        self.times.killed.is_none().then_some(told + ENDING)
    }

    /// Whether it takes no more calls: it was killed, says that it ends, or closed its socket.
    pub(crate) fn is_falling(&self) -> bool {
        self.times.killed.is_some() || self.told.is_some() || self.deaf.is_some()
    }

    /// Reads what it wrote to one pipe.
    pub(crate) fn read_log(&mut self, pipe: usize) {
        let log = &mut self.log;
        let open = system::drain(self.ends.pipes[pipe].as_fd(), |bytes| log.push(bytes));
        self.open_pipes[pipe] &= open;
    }

    /// Why it ended, and whose fault it was.
    pub(crate) fn cause(&self, exit: Exit) -> (Cause, Culprit) {
        if let Some((cause, culprit)) = &self.killed_for {
            return (cause.clone(), *culprit);
        }
        if let Some((ending, text, _)) = &self.told {
            let text = text.clone();
            return match ending {
                Ending::Done => (Cause::Closed, Culprit::Outside),
                Ending::Fault | Ending::MemoryFault => (Cause::Fault(text), Culprit::Running),
                Ending::StartFailed => (Cause::StartFailed(text), Culprit::Outside),
                Ending::StartPanicked => (Cause::StartPanicked(text), Culprit::Outside),
                Ending::NoConfiguration => (Cause::NoConfiguration(text), Culprit::Outside),
                Ending::NoDevice => (Cause::NoDevice(text), Culprit::Outside),
                Ending::InsideRuntime => (Cause::InsideRuntime, Culprit::Outside),
                Ending::NotStarted { tried, errno } => {
                    (Cause::NotStarted(tried.refusal(*errno)), Culprit::Outside)
                }
                Ending::OutOfMemory => (Cause::OutOfDeviceMemory(text), Culprit::Outside),
                Ending::WrongProgram => (Cause::WrongProgram(text), Culprit::Outside),
                Ending::UnderMps => (Cause::UnderMps, Culprit::Outside),
            };
        }
        let cause = match exit {
            Exit::Code(code) => Cause::Exited(code),
            Exit::Signal(9) if system::killed_for_memory() > self.killed_before => {
                return (Cause::OutOfMemory, Culprit::Unclear);
            }
            Exit::Signal(signal) => Cause::Signal(signal),
            Exit::Unknown => Cause::Unknown,
        };
        let culprit = if cause.is_kill() { Culprit::Killed } else { Culprit::Running };
        (cause, culprit)
    }
}
