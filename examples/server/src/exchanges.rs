//! What a connection is doing, and how long it may.
//!
//! | state | may last | then the connection is |
//! |---|---|---|
//! | no byte has come yet, or a part of a head | head timeout | dropped |
//! | requests in progress, answers that have not left | exchange timeout, since the last request or part of an answer | dropped |
//! | idle | keep-alive timeout | told to end (HTTP/2: `GOAWAY`); dropped if it has not a write timeout later |
//!
//! A socket that takes no bytes is the write timeout's. The exchange timeout is for HTTP/2, where a client can leave an
//! answer where it is while the socket takes other frames; it is longer than an honest request takes.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::{Body, Bytes};
use http_body_util::BodyExt as _;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::connections::Limits;

pub(crate) struct Exchanges {
    state: Mutex<State>,
    /// The first request has come.
    pub served: Notify,
}

struct State {
    /// Requests in progress, and parts of answers.
    open: usize,
    reads_head: bool,
    /// Frames come at any time: they are no heads.
    is_http2: bool,
    is_closing: bool,
    since: Instant,
}

/// A request in progress, or a part of an answer that has not left.
struct Open(Arc<Exchanges>);

impl Exchanges {
    pub(crate) fn new() -> Arc<Exchanges> {
        let state = State {
            open: 0,
            reads_head: true,
            is_http2: false,
            is_closing: false,
            since: Instant::now(),
        };
        Arc::new(Exchanges { state: Mutex::new(state), served: Notify::new() })
    }

    /// Bytes have come.
    pub(crate) fn read(&self) {
        let mut state = self.lock();
        if state.open == 0 && !state.reads_head && !state.is_http2 {
            (state.reads_head, state.since) = (true, Instant::now());
        }
    }

    /// A request has come; what it returns makes its answer's bytes count until they have left.
    pub(crate) fn begin(self: &Arc<Self>, is_http2: bool) -> impl FnOnce(Body) -> Body + use<> {
        let mut state = self.lock();
        (state.reads_head, state.is_http2) = (false, is_http2);
        drop(state);
        let request = self.open();
        self.served.notify_one();
        move |body| {
            Body::new(body.map_frame(move |frame| {
                frame.map_data(|bytes| Bytes::from_owner(Part { bytes, _open: request.0.open() }))
            }))
        }
    }

    /// It was told to end.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closing = true;
        if state.open == 0 && !state.reads_head {
            state.since = Instant::now();
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.open == 0 && !state.reads_head && !state.is_closing
    }

    pub(crate) fn deadline(&self, limits: &Limits) -> Instant {
        let state = self.lock();
        let limit = match *state {
            State { reads_head: true, .. } => limits.head,
            State { open: 1.., .. } => limits.exchange,
            State { is_closing: true, .. } => limits.write,
            _ => limits.keep_alive,
        };
        state.since + limit
    }

    fn open(self: &Arc<Self>) -> Open {
        let mut state = self.lock();
        state.open += 1;
        state.since = Instant::now();
        Open(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.open -= 1;
        state.since = Instant::now();
    }
}

struct Part {
    bytes: Bytes,
    _open: Open,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
