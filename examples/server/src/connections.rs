//! Accepts connections and serves them, HTTP/1 and HTTP/2 (cleartext, prior knowledge), until the shutdown begins.
//!
//! `axum::serve` has no timeouts and lets any number of connections in; so this is the same loop on hyper-util:
//!
//! | a connection | is |
//! |---|---|
//! | slow to send a head, idle, or with an answer that its client leaves | closed: see `exchanges.rs` |
//! | whose socket takes no bytes for the write timeout | closed |
//! | beyond the most that there may be | left in the listener's queue until another one ends |
//! | that its client closed for sending, HTTP/1 | taken as left: what it asked for is dropped |
//! | idle when the server stops | closed if no request arrives within [`LAST_READ`]: one may be in flight, or in the socket's buffer |
//! | in a request when the server stops | closed behind the answer, or when the drain timeout has passed |
//! | in the listener's queue when the server stops | served one request, within the drain timeout, if there is a descriptor for it |
//!
//! A client that has gone and one that only sends no more (`shutdown(SHUT_WR)`, `nc -N`) look the same until an answer is written. hyper's
//! `half_close` would answer the second, and have the device compute for the first: with it, requests that were given up keep their
//! place in the queue and their stream. Clients of HTTP keep their side open until they have read the answer.
//!
//! Beside bodies and answers (`budget.rs`) a connection buffers up to 64 KiB in HTTP/1 and 256 KiB in HTTP/2.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::http::{Request, Version};
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutWriter;
use tokio_util::io::InspectReader;

use crate::exchanges::Exchanges;

/// Connections that nobody has accepted. The kernel ignores further ones, whose clients try again after a second;
/// `TcpListener::bind` leaves room for 128, which a burst exceeds.
const QUEUE: u32 = 1024;
/// What HTTP/1 buffers of a connection; and the window of a request's body in HTTP/2.
const BUFFER: u32 = 64 << 10;
/// Requests at once on an HTTP/2 connection: as many as clients begin with before they have read the server's SETTINGS
/// (RFC 9113, 6.5.2, recommends no fewer). Those beyond it are reset.
const STREAMS: u32 = 100;
/// The window of all their bodies.
const WINDOW: u32 = 4 * BUFFER;
/// How long idle connections are still read after the server has stopped accepting.
const LAST_READ: Duration = Duration::from_millis(200);

/// The limits of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub connections: usize,
    /// Those and the ones that wait in the listener's queue when the server stops.
    pub sockets: usize,
    pub head: Duration,
    pub exchange: Duration,
    pub keep_alive: Duration,
    pub write: Duration,
    pub drain: Duration,
}

/// # Errors
/// The address is not this machine's, or taken.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As `TcpListener::bind` does: connections of a predecessor that have not timed out keep no address.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE)
}

/// Serves `router` on `listener` until `stop` resolves, and then what is open; returns what `stop`
/// gave.
pub(crate) async fn serve<S>(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = S>,
) -> S {
    let mut stop = pin!(stop);
    let (stopping, _) = watch::channel(());
    let permits = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    let why = loop {
        let accepted = async {
            // Nobody closes the semaphore, and a permit belongs to the connection that it admitted.
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        tokio::select! {
            why = &mut stop => break why,
            (permit, accepted) = accepted => match accepted {
                Ok((socket, _)) => {
                    let mut stopping = stopping.subscribe();
                    let stop = |_| async move {
                        drop(stopping.changed().await);
                        tokio::time::sleep(LAST_READ).await;
                    };
                    let served = connection(socket, router.clone(), limits, stop);
                    open.spawn(async move {
                        let _permit = permit;
                        served.await;
                    });
                }
                Err(error) => refused(&error).await,
            },
            // Tasks that ended are forgotten as they end.
            Some(_) = open.join_next() => {}
        }
    };
    let connected = limits.connections - permits.available_permits();
    for socket in queue_of(listener, limits.sockets.saturating_sub(connected)) {
        let (permits, router) = (permits.clone(), router.clone());
        open.spawn(async move {
            let _permit = permits.acquire_owned().await;
            if let Ok(socket) = TcpStream::from_std(socket) {
                let one_request =
                    async |exchanges: Arc<Exchanges>| exchanges.served.notified().await;
                connection(socket, router, limits, one_request).await;
            }
        });
    }
    stopping.send_replace(());
    let drained = async { while open.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::warn!(connections = open.len(), "closing connections that did not end in time");
    }
    open.shutdown().await;
    why
}

/// Takes the connections that the kernel has made and nobody has accepted: closing the listener would
/// reset them, as it does those beyond `most`. From here on nobody connects.
fn queue_of(listener: TcpListener, most: usize) -> Vec<std::net::TcpStream> {
    // It does not block, as tokio made it.
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok()).take((QUEUE as usize).min(most));
    accepted
        .map(|(socket, _)| socket)
        .filter(|socket| socket.set_nonblocking(true).is_ok())
        .collect()
}

/// Serves a connection until it ends, its time is up, or, behind the requests in progress, `stop` resolves.
async fn connection<F: Future<Output = ()>>(
    socket: TcpStream,
    router: Router,
    limits: Limits,
    stop: impl FnOnce(Arc<Exchanges>) -> F,
) {
    // Answers are small: they leave at once.
    socket.set_nodelay(true).ok();
    let exchanges = Exchanges::new();
    let (read, write) = socket.into_split();
    let noted = exchanges.clone();
    let read = InspectReader::new(read, move |_: &[u8]| noted.read());
    let mut write = TimeoutWriter::new(write);
    write.set_timeout(Some(limits.write));
    let io = TokioIo::new(Box::pin(tokio::io::join(read, write)));

    let (router, begun) = (TowerToHyperService::new(router), exchanges.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let watch = begun.begin(request.version() == Version::HTTP_2);
        let answer = router.call(request);
        async move { Ok::<_, Infallible>(answer.await?.map(watch)) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None);
    builder.http1().max_buf_size(BUFFER as usize);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS);
    builder.http2().initial_stream_window_size(BUFFER).initial_connection_window_size(WINDOW);
    let mut connection = pin!(builder.serve_connection(io, service));

    let mut stop = pin!(stop(exchanges.clone()));
    let mut timer = pin!(tokio::time::sleep_until(exchanges.deadline(&limits)));
    let mut is_told = false;
    loop {
        // The deadline is looked at behind each poll: what a connection does changes in polls.
        let ended = poll_fn(|cx| {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(Some(ended));
            }
            let deadline = exchanges.deadline(&limits);
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(cx).map(|()| None)
        });
        tokio::select! {
            // First: a request in the socket's buffer is read before the shutdown closes its idle connection.
            biased;
            ended = ended => match ended {
                Some(Ok(())) => return,
                Some(Err(error)) => return tracing::debug!(%error, "a connection broke off"),
                None if exchanges.is_idle() => {}
                None => return tracing::debug!("a connection timed out"),
            },
            () = &mut stop, if !is_told => is_told = true,
        }
        exchanges.close();
        connection.as_mut().graceful_shutdown();
    }
}

/// What `accept` can fail with: a connection that is gone already, or too many open files.
async fn refused(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    if !matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
        tracing::error!(%error, "cannot accept connections: trying again in a second");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
