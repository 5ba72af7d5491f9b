//! [`Link`]: a process's end of the socket to its supervisor.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu_await::SharedDescriptors;
use gpu_await::sibling::Process;
use gpu_await_protocol::lock::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use crate::codec;
use crate::failure::Failure;
use crate::frame::{Ending, ToSupervisor};
use crate::last_words;
use crate::system::{self, Received, Sent};

/// When to send a packet again that the kernel had no memory for.
const AGAIN: Duration = Duration::from_millis(10);

/// The socket, and messages that wait for room in it.
#[derive(Debug)]
pub(crate) struct Link {
    socket: AsyncFd<OwnedFd>,
    waiting: Mutex<Vec<Vec<u8>>>,
    /// A task is sending the messages that wait.
    is_flushing: AtomicBool,
    runtime: tokio::runtime::Handle,
    process: Process,
    /// Tasks that wait for memory that the supervisor keeps.
    asked: Mutex<Vec<(String, oneshot::Sender<KeptReply>)>>,
    /// Memory that this process asked to write, each with the task that waits for it until it comes.
    asked_mut: Mutex<BTreeMap<String, Option<oneshot::Sender<Lent>>>>,
}

/// Memory that the supervisor keeps: to fill under this number, or complete.
pub(crate) type KeptReply = (u64, Option<SharedDescriptors>);

/// Memory that the process was given, or is to make.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) made: u64,
    pub(crate) generation: u64,
    pub(crate) died: Option<u64>,
    /// None: it is to be made.
    pub(crate) memory: Option<SharedDescriptors>,
}

impl Link {
    /// Makes the link of this process, on the calling task's runtime, which watches only whether there is something to read: if it also watched
    /// for room, each packet that the supervisor takes would wake this process.
    pub(crate) fn new(socket: AsyncFd<OwnedFd>, runtime: tokio::runtime::Handle) -> Link {
        Link {
            socket,
            waiting: Mutex::default(),
            is_flushing: AtomicBool::new(false),
            runtime,
            process: Process::remembered(),
            asked: Mutex::default(),
            asked_mut: Mutex::default(),
        }
    }

    /// Runs a task beside the others.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let _task = self.runtime.spawn(task);
    }

    /// The longest packet that can be sent.
    pub(crate) fn most_packet(&self) -> usize {
        system::most_packet(self.socket.as_fd())
    }

    /// Sends an answer once there is room.
    pub(crate) async fn send(&self, header: &[u8], body: &[u8]) -> Sent {
        self.send_with(header, body, &[]).await
    }

    async fn send_with(&self, header: &[u8], body: &[u8], fds: &[BorrowedFd<'_>]) -> Sent {
        loop {
            match system::send(self.socket.as_fd(), &[header, body], fds) {
                Sent::Full if self.room().await.is_ok() => {}
                // Nothing tells when there is memory.
                Sent::Full | Sent::NoMemory => sleep(&self.runtime, AGAIN).await,
                sent => return sent,
            }
        }
    }

    /// Waits until the socket may take a packet, on a separate descriptor.
    async fn room(&self) -> io::Result<()> {
        let socket = self.socket.get_ref().try_clone()?;
        system::registered(socket, Interest::WRITABLE)?.writable().await.map(drop)
    }

    /// Sends a message once there is room.
    pub(crate) async fn say(&self, message: &ToSupervisor<'_>, body: &[u8]) -> Sent {
        match codec::encode(message) {
            Ok(header) => self.send(&header, body).await,
            Err(_) => Sent::Gone,
        }
    }

    /// Sends a short message now, or queues it behind the others. A fork of the process says nothing in its name.
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
                // A message that was queued before that started no task.
                if self.waiting.lock().is_empty() || self.is_flushing.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        }
    }

    /// Says why, and ends the process.
    pub(crate) fn end(&self, ending: Ending, why: &str) -> ! {
        last_words::end(self.socket.as_fd(), ending, why)
    }

    /// Asks the supervisor for the memory that it keeps under a name.
    pub(crate) async fn keep(self: &Arc<Self>, name: &str) -> Option<KeptReply> {
        let (sender, reply) = oneshot::channel();
        self.asked.lock().push((name.to_owned(), sender));
        let _ = self.say(&ToSupervisor::Keep { name }, b"").await;
        reply.await.ok()
    }

    /// Hands kept memory to whichever task asked for it.
    pub(crate) fn kept(&self, name: &str, reply: KeptReply) {
        let mut asked = self.asked.lock();
        if let Some(at) = asked.iter().position(|(wanted, _)| wanted == name) {
            let (_, sender) = asked.swap_remove(at);
            drop(asked);
            drop(sender.send(reply));
        }
    }

    /// Asks the supervisor for memory to write; `None` if this process did before.
    pub(crate) fn ask_to_write(self: &Arc<Self>, name: &str) -> Option<oneshot::Receiver<Lent>> {
        let (sender, given) = oneshot::channel();
        let mut asked = self.asked_mut.lock();
        if asked.contains_key(name) {
            return None;
        }
        asked.insert(name.to_owned(), Some(sender));
        drop(asked);
        self.post(&ToSupervisor::KeepMut { name });
        Some(given)
    }

    /// Hands memory to write to whichever task asked for it.
    pub(crate) fn given(&self, name: &str, given: Lent) {
        let sender = self.asked_mut.lock().get_mut(name).and_then(Option::take);
        if let Some(sender) = sender {
            drop(sender.send(given));
        }
    }

    /// Sends a message, with descriptors, once there is room.
    pub(crate) async fn tell(
        &self,
        message: &ToSupervisor<'_>,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Failure> {
        let sent = match codec::encode(message) {
            Ok(header) => self.send_with(&header, b"", fds).await,
            Err(_) => Sent::TooLong,
        };
        match sent {
            Sent::Yes => Ok(()),
            _ => Err(Failure::new("the supervisor is gone")),
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
    /// With `hot`, it spins for that long before it sleeps, and yields to other tasks in between.
    pub(crate) async fn receive(
        &self,
        buffer: &mut [u8],
        hot: Duration,
    ) -> Option<(usize, Vec<OwnedFd>)> {
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

/// Sleeps on this runtime, whichever one polls it.
pub(crate) fn sleep(runtime: &tokio::runtime::Handle, time: Duration) -> tokio::time::Sleep {
    let _on = runtime.enter();
    tokio::time::sleep(time)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_packet_without_room_goes_out_when_there_is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = system::socket_pair().unwrap();
            let near = system::registered(near, Interest::READABLE).unwrap();
            let link = Link::new(near, tokio::runtime::Handle::current());
            let packet = vec![7; 4096];
            let mut waiting = 0;
            let mut last = loop {
                let mut next = Box::pin(link.send(b"head", &packet));
                match next.as_mut().now_or_never() {
                    Some(sent) => assert_eq!(sent, Sent::Yes),
                    None => break next,
                }
                waiting += 1;
            };
            // The reactor looks, and finds no room.
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_millis(1)).await;
                assert!(last.as_mut().now_or_never().is_none());
            }
            let mut buffer = vec![0; 8192];
            for _ in 0..waiting {
                assert_eq!(system::receive(far.as_fd(), &mut buffer).0, Received::Packet(4100));
            }
            assert_eq!(last.await, Sent::Yes);
            assert_eq!(system::receive(far.as_fd(), &mut buffer).0, Received::Packet(4100));
            drop(far);
            assert_eq!(link.send(b"head", b"").await, Sent::Gone);
        });
    }
}
