//! Accepts connections and serves them until it is told to stop.
//!
//! `axum::serve` has no time limit for a request's head and lets any number of connections in; so this is
//! the same loop with both, on hyper:
//!
//! | a connection | is |
//! |---|---|
//! | idle, or slow to send a request's head | closed after the head limit |
//! | beyond the most that there may be | left in the listener's queue until another one ends |
//! | idle when the server stops | closed at once |
//! | in a request when the server stops | closed behind the answer, or when the drain limit has passed |
//! | in the listener's queue when the server stops | served one request, within the drain limit |
//!
//! A client that reads its answer slowly is not hurried: it holds a connection and the answer's memory, and
//! nothing of the device.
#![forbid(unsafe_code)]

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// As many as a listener of tokio's queues.
const QUEUE: usize = 1024;

/// The limits of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub connections: usize,
    pub head: Duration,
    pub drain: Duration,
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
                    let served = connection(socket, router.clone(), limits.head, stopping.subscribe());
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
    for socket in queue_of(listener) {
        let (permits, router) = (permits.clone(), router.clone());
        open.spawn(async move {
            let _permit = permits.acquire_owned().await;
            if let Ok(socket) = TcpStream::from_std(socket) {
                last_request(socket, router, limits.head).await;
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
/// reset them. From here on nobody connects.
fn queue_of(listener: TcpListener) -> Vec<std::net::TcpStream> {
    // It does not block, as tokio made it.
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok()).take(QUEUE);
    accepted
        .map(|(socket, _)| socket)
        .filter(|socket| socket.set_nonblocking(true).is_ok())
        .collect()
}

async fn last_request(socket: TcpStream, router: Router, head: Duration) {
    socket.set_nodelay(true).ok();
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .keep_alive(false)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    ended(connection.await);
}

async fn connection(
    socket: TcpStream,
    router: Router,
    head: Duration,
    mut stopping: watch::Receiver<()>,
) {
    // Answers are small: they leave at once.
    socket.set_nodelay(true).ok();
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    ended(tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    });
}

fn ended(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
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
