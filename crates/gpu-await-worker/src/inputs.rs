//! Payloads as a service sees them: what came with a request, and what goes with the response.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::frame::ToSupervisor;
use crate::leases::{LeaseId, Leases, Part};
use crate::serve::Link;
use crate::service::Failure;
use crate::slab::{STATUS_BYTES, Slab};

/// The payloads of one call, for its [`Service`](crate::Service).
#[derive(Debug)]
pub struct Payloads {
    request: Option<RequestPayload>,
    response: Option<ResponsePayload>,
    room: Arc<Room>,
}

impl Payloads {
    pub(crate) fn new(request: Option<RequestPayload>, room: Arc<Room>) -> Self {
        Payloads { request, response: None, room }
    }

    /// Takes what came with the request.
    pub fn request(&mut self) -> Option<RequestPayload> {
        self.request.take()
    }

    /// Takes shared memory of `bytes` for what goes with the response, once there is room: its contents are zeros, or an earlier
    /// response.
    ///
    /// # Errors
    /// More than the slab has.
    pub async fn respond(&self, bytes: usize) -> Result<ResponsePayload, Failure> {
        self.room.take(bytes as u64).await
    }

    /// Sends this with the response, if the call succeeds. The last one counts.
    pub fn attach(&mut self, response: ResponsePayload) {
        self.response = Some(response);
    }

    pub(crate) fn into_response(self) -> Option<ResponsePayload> {
        self.response
    }
}

/// The payload of a request, in memory that the supervisor shares for reading. It dereferences to `[u8]`, and may outlive its call.
///
/// # Ownership
/// When it is dropped, the supervisor may use the memory for another request.
pub struct RequestPayload {
    link: Arc<Link>,
    slab: Arc<Slab>,
    id: LeaseId,
    part: Part,
}

impl RequestPayload {
    pub(crate) fn new(link: Arc<Link>, slab: Arc<Slab>, id: LeaseId, part: Part) -> Self {
        RequestPayload { link, slab, id, part }
    }
}

impl Deref for RequestPayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the supervisor writes no part that it has lent, until it is returned in `drop`; nobody else can.
        unsafe { self.slab.slice(self.part) }
    }
}

impl Drop for RequestPayload {
    fn drop(&mut self) {
        self.link.post(&ToSupervisor::Returned(self.id));
    }
}

impl fmt::Debug for RequestPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestPayload({} bytes)", self.part.len)
    }
}

/// Shared memory for the payload of a response. It dereferences to `[u8]`.
pub struct ResponsePayload {
    room: Arc<Room>,
    id: LeaseId,
    part: Part,
}

impl ResponsePayload {
    /// Hands it to the supervisor.
    pub(crate) fn sent(&self) -> (LeaseId, Part) {
        self.room.leases.lock().send(self.id);
        (self.id, self.part)
    }
}

impl Deref for ResponsePayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as below, with a shared borrow.
        unsafe { self.room.slab.slice(self.part) }
    }
}

impl DerefMut for ResponsePayload {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: no two leases overlap, this one is exclusively borrowed, and the supervisor maps the slab for writing nowhere.
        unsafe { self.room.slab.slice_mut(self.part) }
    }
}

impl Drop for ResponsePayload {
    fn drop(&mut self) {
        // One that was sent is returned by the supervisor.
        if self.room.leases.lock().give_back(self.id) {
            self.room.freed.notify_waiters();
        }
    }
}

impl fmt::Debug for ResponsePayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ResponsePayload({} bytes)", self.part.len)
    }
}

/// The slab of responses, and who has which part of it.
#[derive(Debug)]
pub(crate) struct Room {
    slab: Arc<Slab>,
    leases: Mutex<Leases>,
    freed: Notify,
}

impl Room {
    pub(crate) fn new(slab: Arc<Slab>, incarnation: u32) -> Self {
        let leases = Leases::new(incarnation, STATUS_BYTES, slab.bytes());
        Room { slab, leases: Mutex::new(leases), freed: Notify::new() }
    }

    async fn take(self: &Arc<Self>, bytes: u64) -> Result<ResponsePayload, Failure> {
        let limit = self.leases.lock().largest();
        if bytes > limit {
            return Err(Failure::new(format!(
                "a payload of {bytes} bytes, and the slab has {limit}"
            )));
        }
        loop {
            // Before the look, so that nothing is missed in between.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some((id, part)) = self.leases.lock().take(bytes) {
                return Ok(ResponsePayload { room: self.clone(), id, part });
            }
            freed.await;
        }
    }

    /// The supervisor is done with it.
    pub(crate) fn released(&self, id: LeaseId) {
        if self.leases.lock().returned(id) {
            self.freed.notify_waiters();
        }
    }
}
