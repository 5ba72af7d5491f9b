//! Accepts connections and serves them, HTTP/1 and HTTP/2 (cleartext, prior knowledge), until the shutdown begins.
//!
//! `axum::serve` has no timeouts and lets any number of connections in; so this is the same loop on hyper-util:
//!
//! | a connection | is |
//! |---|---|
//! | whose next head does not arrive within the idle timeout | closed (HTTP/2: one that sends nothing for longer than a request may take) |
//! | whose answer does not leave within the write timeout, whether its socket or its HTTP/2 window is full | closed |
//! | beyond the most that there may be | left in the listener's queue until another one ends |
//! | that its client closed for sending, HTTP/1 | taken as left: what it asked for is dropped |
//! | idle when the server stops | closed |
//! | in a request when the server stops | closed behind the answer, or when the drain timeout has passed |
//!
//! Beside bodies and answers (`budget.rs`) a connection buffers up to 64 KiB in HTTP/1 and 256 KiB in HTTP/2.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ::metrics::{counter, gauge};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::options::Options;

/// Connections that nobody has accepted. The kernel ignores further ones, whose clients try again after a second;
/// `TcpListener::bind` leaves room for 128, which a burst exceeds.
const QUEUE: u32 = 1024;
/// What HTTP/1 buffers of a connection; and the window of a request's body in HTTP/2.
const BUFFER: u32 = 64 << 10;

/// # Errors
/// The address is not this machine's, or taken.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As `TcpListener::bind` does: connections of a predecessor that have not timed out keep no address.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE)
}

/// Serves `router` on `listener` until `stop` resolves, and then what is open; returns what `stop` gave.
pub(crate) async fn serve<S>(
    listener: TcpListener,
    router: Router,
    options: &Options,
    stop: impl Future<Output = S>,
) -> S {
    let mut stop = pin!(stop);
    let (graceful, all) = (GracefulShutdown::new(), CancellationToken::new());
    let permits = Arc::new(Semaphore::new(options.max_connections));
    let why = loop {
        let accepted = async {
            if permits.available_permits() == 0 {
                counter!("server_connections_full_total").increment(1);
            }
            // Nobody closes the semaphore, and a permit belongs to the connection that it admitted.
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            why = &mut stop => break why,
            accepted = accepted => accepted,
        };
        match accepted {
            Ok((socket, _)) => {
                let ends = (graceful.watcher(), all.child_token());
                let served = connection(socket, router.clone(), options.clone(), ends);
                tokio::spawn(async move {
                    gauge!("server_connections").increment(1.0);
                    let end = served.await;
                    gauge!("server_connections").decrement(1.0);
                    counter!("server_connections_ended_total", "end" => end).increment(1);
                    drop(permit);
                });
            }
            // One that is gone already, or too many open files.
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    };
    drop(listener);
    if timeout(options.drain_timeout_ms, graceful.shutdown()).await.is_err() {
        tracing::warn!("closing connections that did not end in time");
        all.cancel();
    }
    why
}

/// Serves a connection until it ends, and says how it did.
async fn connection(
    socket: TcpStream,
    router: Router,
    options: Options,
    (watcher, end): (Watcher, CancellationToken),
) -> &'static str {
    // Answers are small: they leave at once.
    socket.set_nodelay(true).ok();
    let (idle, write) = (options.idle_timeout_ms, options.write_timeout_ms);
    let mut io = TimeoutStream::new(socket);
    // Nothing is read either while a request waits, for memory and for its result, and its answer leaves.
    io.set_read_timeout(Some(idle + 2 * options.request_timeout_ms + write));
    io.set_write_timeout(Some(write));

    let (router, late) = (TowerToHyperService::new(router), end.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let (answer, late) = (router.call(request), late.clone());
        async move { Ok::<_, Infallible>(answer.await?.map(|body| leaves(body, write, late))) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(idle);
    builder.http1().max_buf_size(BUFFER as usize);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(100);
    builder.http2().initial_stream_window_size(BUFFER).initial_connection_window_size(4 * BUFFER);
    let served = builder.serve_connection(TokioIo::new(Box::pin(io)), service);
    tokio::select! {
        ended = watcher.watch(served) => match ended {
            Ok(()) => "closed",
            Err(error) => {
                tracing::debug!(%error, "a connection broke off");
                match error.downcast_ref::<hyper::Error>() {
                    Some(error) if error.is_parse_too_large() => "head_too_large", // 431, or 414
                    Some(error) if error.is_parse() => "malformed", // 400
                    Some(error) if error.is_timeout() => "timed_out",
                    _ => "broken",
                }
            }
        },
        () = end.cancelled() => "timed_out",
    }
}

/// The same body; `late` is cancelled unless all of its bytes leave in time. A client of HTTP/2 can leave an answer where it is while its
/// socket takes other frames.
fn leaves(body: Body, limit: Duration, late: CancellationToken) -> Body {
    struct Part(Bytes, #[expect(dead_code, reason = "it is kept")] Arc<AbortOnDropHandle<()>>);
    impl AsRef<[u8]> for Part {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let timer = Arc::new(AbortOnDropHandle::new(tokio::spawn(async move {
        sleep(limit).await;
        late.cancel();
    })));
    Body::new(body.map_frame(move |frame| {
        frame.map_data(|bytes| Bytes::from_owner(Part(bytes, timer.clone())))
    }))
}
