//! The start of a worker's process, and its thread that only watches.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::codec;
use crate::frame::{Ending, MOST_HEADER, Setup, ToProcess, ToSupervisor, Tried, VERSION};
use crate::last_words::{self, end, end_with_front, refusal, refused, say};
use crate::serve::{self, Child};
use crate::service::sealed::Serves;
use crate::service::{Service, Services};
use crate::slab::Slab;
use crate::system;

/// How often a process signals that it is alive.
const BEAT: Duration = Duration::from_millis(100);
/// Serves what the supervisor asks for; `parent` started this process.
pub(crate) fn run<S: Services>(parent: u32) -> ! {
    // First of all, make sure that this process ends with its parent.
    let stdin = rustix::stdio::stdin();
    let front = match system::watch_parent(parent) {
        Ok(front) => front,
        Err(error) => refused(stdin, Tried::Front, &error),
    };
    system::settle_in();
    system::name_program();
    let socket = match system::take_stdin() {
        Ok(socket) => socket,
        Err(error) => refused(stdin, Tried::Socket, &error),
    };
    if let Err(error) = system::close_stdin() {
        refused(socket.as_fd(), Tried::Socket, &error);
    }
    let beats = match watch(&socket, last_words::front(front)) {
        Ok(beats) => beats,
        Err(error) => refused(socket.as_fd(), Tried::Watch, &error),
    };
    let mut buffer = vec![0; MOST_HEADER.max(16 << 10)];
    let (bytes, [requests, responses, config]) =
        match system::receive_fds(socket.as_fd(), &mut buffer) {
            Ok(received) => received,
            Err(error) => refused(socket.as_fd(), Tried::Memory, &error),
        };
    let setup = codec::header(&buffer[..bytes]).map(|(message, _)| message);
    let Some(ToProcess::Setup(setup)) = setup else {
        end(socket.as_fd(), Ending::WrongProgram, "its first message is unknown");
    };
    match begin(&setup, requests, responses, config) {
        Err((ending, why)) => end(socket.as_fd(), ending, &why),
        Ok((requests, responses, config)) => {
            let hello = ToSupervisor::Hello { version: VERSION, executable: setup.executable };
            let _ = say(socket.as_fd(), &hello, b"");
            let responses = Arc::new(responses);
            drop(beats.set(responses.clone()));
            let child = Child { socket, requests, responses, config, terms: setup.terms };
            let child = S::serve(setup.service, child);
            let why = format!("its `init` does not name {}", setup.service);
            end(child.socket.as_fd(), Ending::WrongProgram, &why)
        }
    }
}

/// Checks the set-up that it was given.
fn begin(
    setup: &Setup<'_>,
    requests: OwnedFd,
    responses: OwnedFd,
    config: OwnedFd,
) -> Result<(Slab, Slab, Vec<u8>), (Ending, String)> {
    let file = system::own_program().and_then(|file| system::identity(file.as_fd()));
    let file = file.map_err(|error| (refusal(Tried::Program, &error), String::new()))?;
    if setup.version != VERSION || file != setup.executable {
        let why = "its file is not the one that was to be started".to_owned();
        return Err((Ending::WrongProgram, why));
    }
    let open = || -> std::io::Result<_> {
        let requests = Slab::open(requests, setup.request_slab_bytes, false)?;
        let responses = Slab::open(responses, setup.response_slab_bytes, true)?;
        if responses.bytes() < setup.terms.status_bytes {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        Ok((requests, responses, system::read_all(config, setup.config_bytes)?))
    };
    open().map_err(|error| (refusal(Tried::Memory, &error), String::new()))
}

/// Starts the thread that ends the process, and all that it started, when its front is gone, whatever the driver does. Once the cell has the
/// slab, the thread also signals that the process is alive.
fn watch(socket: &OwnedFd, front: &'static OwnedFd) -> std::io::Result<Arc<OnceLock<Arc<Slab>>>> {
    let socket = socket.try_clone()?;
    let place = Arc::new(OnceLock::<Arc<Slab>>::new());
    let beats = place.clone();
    let run = move || {
        loop {
            if let Some(slab) = beats.get() {
                slab.status().beat();
            }
            // The front may be gone while a fork of it still holds its end of the socket open.
            let mut fds =
                [PollFd::new(&socket, PollFlags::RDHUP), PollFd::new(front, PollFlags::IN)];
            let limit = Timespec { tv_sec: 0, tv_nsec: BEAT.subsec_nanos().into() };
            let polled = system::poll(&mut fds, Some(limit));
            if polled.is_err() || fds.iter().any(|fd| !fd.revents().is_empty()) {
                end_with_front();
            }
        }
    };
    let thread = std::thread::Builder::new().name("worker watch".to_owned());
    thread.spawn(run)?;
    Ok(place)
}

impl Serves for Child {
    fn serve<S: Service>(self) -> Self {
        serve::run::<S>(self)
    }
}
