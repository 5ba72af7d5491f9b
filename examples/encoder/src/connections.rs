//! Connections, HTTP/1. `axum::serve` has no timeouts; so this is the same loop on hyper.
//!
//! | a client | gets |
//! |---|---|
//! | whose head does not arrive in time, or that is idle for as long | its connection closed |
//! | whose body does not | 408 |
//! | that closes its connection, also for sending alone | nothing: it has left, and its request is dropped |
//! | that comes while 900 are served | to wait in the system's queue: of 1,024 descriptors the others are for all else, as the next process of `--isolate` |
//! | that comes before there is a model | 503, on `/healthz` as anywhere |
//! | that asked before SIGTERM or SIGINT, or 200 ms behind it | its answer, within the time of a drain; its connection is closed behind it |
#![forbid(unsafe_code)]

use std::io;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request};
use axum::http::StatusCode;
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

use crate::serve::Failure;

const MOST_CONNECTIONS: usize = 900;
/// How long connections and requests are taken behind a signal: those that came before it may not be accepted, or read, yet.
const LAST: Duration = Duration::from_millis(200);
/// How long answers that are on their way then may take.
const DRAIN: Duration = Duration::from_secs(10);

/// What is served, once it is there.
pub type Routes = Arc<OnceLock<Router>>;

/// Serves connections until a signal asks the process to end, and then what was asked before. A client has so much time for a request's head,
/// and for its body.
pub async fn serve(listener: TcpListener, routes: Routes, patience: Duration) -> io::Result<()> {
    // From here on the signals end nothing by themselves, also where this is the first process of a container.
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let read = move |request: Request, next: Next| async move {
        let reason = || format!("the body did not arrive within {patience:?}");
        let late = |_| Failure(StatusCode::REQUEST_TIMEOUT, reason());
        let request = timeout(patience, whole(request)).await.map_err(late)??;
        Ok::<_, Failure>(next.run(request).await)
    };
    let each = move |request: Request| {
        let routes = routes.get().cloned();
        async move {
            let loading =
                || Failure(StatusCode::SERVICE_UNAVAILABLE, "the model is loading".into());
            let routes = TowerToHyperService::new(routes.ok_or_else(loading)?);
            let Ok(response) = routes.call(request).await;
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
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        sleep(LAST).await;
    });
    loop {
        let accepted = tokio::select! {
            accepted = next() => accepted,
            () = &mut ends => break,
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
    }
    drop(listener);
    let connections = open.count();
    tracing::info!(
        "asked to end: {connections} connections are served to their end, for {DRAIN:?} at most"
    );
    if timeout(DRAIN, open.shutdown()).await.is_err() {
        tracing::warn!("some were not");
    }
    Ok(())
}

/// The request with its whole body in memory.
async fn whole(request: Request) -> Result<Request, Failure> {
    let (head, body) = request.into_parts();
    let bytes = Bytes::from_request(Request::from_parts(head.clone(), body), &()).await;
    let bytes = bytes.map_err(|refused| Failure(refused.status(), refused.body_text()))?;
    Ok(Request::from_parts(head, bytes.into()))
}
