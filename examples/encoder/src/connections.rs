//! Connections, HTTP/1. `axum::serve` has no timeouts; so this is the same loop on hyper.
//!
//! | a client | gets |
//! |---|---|
//! | whose head does not arrive in time, or that is idle for as long | its connection closed |
//! | whose body does not | 408 |
//! | that closes its connection, also for sending alone | nothing: it has left, and its request is dropped |
//! | that comes while 900 are served | to wait in the system's queue: of 1,024 descriptors the others are for all else, as the next process of `--isolate` |
//! | whose body is over 2 MB | 413, at once if its head says so |
//! | that comes before there is a model | 503, on `/healthz` as anywhere |
//! | that asked before the end (SIGTERM, SIGINT, or nothing computes any more), or 200 ms behind it | its answer, within the time of a drain; its connection is closed behind it |
#![forbid(unsafe_code)]

use std::io;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Bytes, HttpBody as _};
use axum::extract::{FromRequest as _, Request};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn};
use hyper::server::conn::http1::Builder;
use hyper::service::Service as _;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::program::Failed;
use crate::serve::Failure;

const MOST_CONNECTIONS: usize = 900;
/// As axum has it.
const MOST_BODY_BYTES: u64 = 2 << 20;
/// How long connections and requests are taken behind a signal: those that came before it may not be accepted, or read, yet.
const LAST: Duration = Duration::from_millis(200);
/// How long answers that are on their way then may take.
const DRAIN: Duration = Duration::from_secs(10);

/// What is served, once it is there.
pub type Routes = Arc<OnceLock<Router>>;

/// Serves connections until a signal asks the process to end, or `model` ends, and then what was asked before. A client has so much time for a request's
/// head, and for its body.
///
/// # Errors
/// What `model` says; the system refuses descriptors for the signals.
pub async fn serve(
    listener: TcpListener,
    routes: Routes,
    patience: Duration,
    model: impl Future<Output = Result<(), Failed>>,
) -> Result<(), Failed> {
    // From here on the signals end nothing by themselves, also where this is the first process of a container.
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let read = move |request: Request, next: Next| async move {
        let reason = || format!("the body did not arrive within {patience:?}");
        let late = |_| Err(Failure(StatusCode::REQUEST_TIMEOUT, reason()));
        let request = timeout(patience, whole(request)).await.unwrap_or_else(late);
        Ok::<_, Failure>(next.run(request.map_err(Failure::counted)?).await)
    };
    let each = move |request: Request| {
        let routes = routes.get().cloned();
        async move {
            let Some(routes) = routes else {
                let failure =
                    Failure(StatusCode::SERVICE_UNAVAILABLE, "the model is loading".into());
                // Probes are not counted.
                return Err(if request.method() == Method::GET {
                    failure
                } else {
                    failure.counted()
                });
            };
            let Ok(response) = TowerToHyperService::new(routes).call(request).await;
            Ok::<_, Failure>(response)
        }
    };
    let routes = TowerToHyperService::new(Router::new().fallback(each).layer(from_fn(read)));
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience);
    let (open, room) = (GracefulShutdown::new(), Arc::new(Semaphore::new(MOST_CONNECTIONS)));
    let next = async || {
        let place = room.clone().acquire_owned().await.map_err(io::Error::other)?;
        Ok::<_, io::Error>((listener.accept().await?.0, place))
    };
    let mut ends = pin!(async {
        let ended = tokio::select! {
            _ = term.recv() => Ok(()),
            _ = int.recv() => Ok(()),
            ended = model => ended,
        };
        sleep(LAST).await;
        ended
    });
    let ended = loop {
        let accepted = tokio::select! {
            accepted = next() => accepted,
            ended = &mut ends => break ended,
        };
        match accepted {
            Ok((socket, place)) => {
                // Tokens leave at once.
                socket.set_nodelay(true).ok();
                let connection = builder.serve_connection(TokioIo::new(socket), routes.clone());
                let connection = open.watch(connection);
                tokio::spawn(async move {
                    connection.await.ok();
                    drop(place);
                });
            }
            // One that is gone already, or too many open files.
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    };
    drop(listener);
    let connections = open.count();
    tracing::info!(
        "ending: {connections} connections are served to their end, for {DRAIN:?} at most"
    );
    if timeout(DRAIN, open.shutdown()).await.is_err() {
        tracing::warn!("some were not");
    }
    ended
}

/// The request with its whole body in memory.
async fn whole(request: Request) -> Result<Request, Failure> {
    if request.body().size_hint().lower() > MOST_BODY_BYTES {
        let reason = format!("a body of more than {MOST_BODY_BYTES} bytes");
        return Err(Failure(StatusCode::PAYLOAD_TOO_LARGE, reason));
    }
    let (head, body) = request.into_parts();
    let bytes = Bytes::from_request(Request::from_parts(head.clone(), body), &()).await;
    let bytes = bytes.map_err(|refused| Failure(refused.status(), refused.body_text()))?;
    Ok(Request::from_parts(head, bytes.into()))
}
