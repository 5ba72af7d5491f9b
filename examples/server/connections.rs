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
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    let why = loop {
        let accepted = async {
            // Nobody closes the semaphore, and a permit is of the connection that it let in.
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        tokio::select! {
            why = &mut stop => break why,
            (place, accepted) = accepted => match accepted {
                Ok((socket, _)) => {
                    let served = connection(socket, router.clone(), limits.head, stopping.subscribe());
                    open.spawn(async move {
                        let _place = place;
                        served.await;
                    });
                }
                Err(error) => refused(&error).await,
            },
            // Tasks that ended are forgotten as they end.
            Some(_) = open.join_next() => {}
        }
    };
    drop(listener); // from here on nobody connects
    stopping.send_replace(());
    let drained = async { while open.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::warn!(connections = open.len(), "closing connections that did not end in time");
    }
    open.shutdown().await;
    why
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
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
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
