//! Payloads as a service sees them: that of the request, and that of the response.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::{BoxFuture, Either};
use gpu_await::sibling::adopt_registered;
use gpu_await::{DeviceBuffer, Element, Op, Readable, Stream};
use gpu_await_protocol::lock::Mutex;
use tokio::sync::Notify;

use crate::calls::CallId;
use crate::failure::Failure;
use crate::frame::{ChildTerms, ToSupervisor};
use crate::leases::{LeaseId, Leases, Part, Returned};
use crate::link::{Link, sleep};
use crate::slab::Slab;

/// The payloads of one call, for its [`Service`](crate::Service).
#[derive(Debug)]
pub struct Payloads {
    request: Option<RequestPayload>,
    response: Option<ResponsePayload>,
    room: Arc<Room>,
    id: CallId,
}

impl Payloads {
    pub(crate) fn new(request: Option<RequestPayload>, room: Arc<Room>, id: CallId) -> Self {
        Payloads { request, response: None, room, id }
    }

    /// Takes the payload of the request, if it has one.
    pub fn request(&mut self) -> Option<RequestPayload> {
        self.request.take()
    }

    /// Takes `bytes` of shared memory for the payload of the response, once there is room: it contains zeros, or an earlier response. Calls that
    /// each hold one part and wait for another may deadlock: take all that a call needs at once.
    ///
    /// # Errors
    /// More than the slab has. Or nothing but payloads that the front holds has filled it for [`held_payload_limit`](crate::WorkerBuilder::held_payload_limit):
    /// a call that fails with this ends with [`Error::PayloadsHeld`](crate::Error::PayloadsHeld).
    pub async fn respond(&self, bytes: usize) -> Result<ResponsePayload, Failure> {
        self.room.take(bytes as u64).await
    }

    /// Sends this with the response, if the call succeeds. The last one counts.
    pub fn attach(&mut self, response: ResponsePayload) {
        self.response = Some(response);
    }

    /// Stops the limit of the call ([`Call::within`](crate::Call::within)) until the returned guard, and each other one of this call, is dropped, and then restarts it from zero: for
    /// a service whose calls wait for a stream or a batch, which says nothing about them. A call that waits this way is not
    /// [suspected](crate::Guilt) when another one exceeds its limit.
    ///
    /// # Examples
    /// ```
    /// use gpu_await::StreamPool;
    /// use gpu_await_worker::{Failure, Host, Payloads, Service};
    ///
    /// struct Double(StreamPool);
    ///
    /// impl Service for Double {
    /// #   type Config = ();
    /// #   type Request = Vec<f32>;
    /// #   type Response = Vec<f32>;
    /// #   async fn start((): (), host: &Host) -> Result<Self, Failure> {
    /// #       Ok(Double(StreamPool::builder().streams(host.device(), 4).build()?))
    /// #   }
    ///     async fn call(&self, x: Vec<f32>, payloads: &mut Payloads) -> Result<Vec<f32>, Failure> {
    ///         let waits = payloads.pause_limit();
    ///         let stream = self.0.acquire().await?;
    ///         drop(waits);
    ///         let x = stream.upload(x).queued()?;
    ///         Ok(stream.download(&x).await?.iter().map(|x| 2.0 * x).collect())
    ///     }
    /// }
    /// ```
    pub fn pause_limit(&self) -> PausedLimit {
        self.room.slab.begun(self.id.slot()).pauses();
        PausedLimit { room: self.room.clone(), id: self.id }
    }

    pub(crate) fn into_response(self) -> Option<ResponsePayload> {
        self.response
    }
}

/// The paused limit of a call: see [`Payloads::pause_limit`]. Dropping the last one of the call, on any thread, restarts the limit from zero.
#[derive(Debug)]
#[must_use = "the limit counts again when this is dropped"]
pub struct PausedLimit {
    room: Arc<Room>,
    id: CallId,
}

impl Drop for PausedLimit {
    fn drop(&mut self) {
        if self.room.slab.is_here() {
            self.room.slab.begun(self.id.slot()).restarts(self.id.generation());
        }
    }
}

/// The payload of a request, in memory that the supervisor shares for reading. It dereferences to `[u8]`, and may outlive its call.
///
/// # Ownership
/// When it is dropped, the supervisor may use the memory for another request.
pub struct RequestPayload {
    link: Arc<Link>,
    slab: Arc<Requests>,
    id: LeaseId,
    part: Part,
}

/// The slab of requests.
#[derive(Debug)]
pub(crate) struct Requests {
    pub(crate) slab: Slab,
    /// Device copies can reach it.
    pub(crate) registered: AtomicBool,
}

impl RequestPayload {
    pub(crate) fn new(link: Arc<Link>, slab: Arc<Requests>, id: LeaseId, part: Part) -> Self {
        RequestPayload { link, slab, id, part }
    }

    /// Copies it to the device, as `len() / size_of::<T>()` elements: with no CPU copy where the driver registered the slab.
    ///
    /// The copy is on the stream when this returns; ready proves that it is complete on the device. The payload is returned to the
    /// supervisor when the device has read it, even if the future is dropped.
    ///
    /// # Errors
    /// A length that is not a multiple of the element's size; whatever [`Stream::upload`] fails with.
    pub fn upload<T: Element>(
        self,
        stream: &Stream,
    ) -> impl Future<Output = Result<DeviceBuffer<T>, Failure>> + Send + 'static {
        let queued = self.queue_upload(stream);
        async move {
            let (copied, buffer) = queued?;
            copied.await?;
            Ok(buffer)
        }
    }

    fn queue_upload<T: Element>(
        self,
        stream: &Stream,
    ) -> Result<(Op<()>, DeviceBuffer<T>), Failure> {
        let len = elements::<T>(self.len())?;
        // ORDERING: Relaxed: the slab was registered before; a call that sees it late copies.
        if len == 0 || !self.slab.registered.load(Ordering::Relaxed) {
            let buffer = stream.upload_from(bytemuck::cast_slice::<u8, T>(&self)).queued()?;
            return Ok((stream.done(), buffer));
        }
        let address = self.slab.slab.at(self.part).addr() as u64;
        let device = stream.device();
        let mut buffer = stream.empty::<T>(len).queued()?;
        // SAFETY: the part is mapped for as long as `self`, which is the owner, and aligned to 256; plain elements are initialised whatever
        // the bytes; the supervisor wrote them before it sent the call, and leaves them alone. Operations here only read it.
        let source = unsafe { adopt_registered::<T>(&device, address, len, self) }?;
        let copied = stream.copy(&source, &mut buffer);
        Ok((copied, buffer))
    }
}

/// A process has only one other side: its front.
const FRONT: u32 = 0;

/// How many elements a payload has.
fn elements<T: Element>(bytes: usize) -> Result<usize, Failure> {
    match bytes.checked_rem(size_of::<T>()) {
        Some(0) => Ok(bytes / size_of::<T>()),
        _ => Err(Failure::new(format!(
            "a payload of {bytes} bytes is not a whole number of elements of {} bytes",
            size_of::<T>()
        ))),
    }
}

impl Deref for RequestPayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the supervisor writes no part that it has lent, until it is returned in `drop`; nobody else can.
        unsafe { self.slab.slab.slice(self.part) }
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
    inner: Arc<ResponsePart>,
}

/// The part, which a device copy may hold as well: it is given back once neither does.
struct ResponsePart {
    room: Arc<Room>,
    id: LeaseId,
    part: Part,
}

impl ResponsePayload {
    /// Hands it to the supervisor.
    pub(crate) fn sent(&self) -> (LeaseId, Part) {
        self.inner.room.leases.lock().send(self.inner.id, FRONT);
        (self.inner.id, self.inner.part)
    }

    /// Copies device elements into it, from its beginning: with no CPU copy where the driver registered the slab. Returns it when
    /// they are there.
    ///
    /// The copy is on the stream when this returns. If the future is dropped, the memory is not used again before the copy is complete.
    ///
    /// # Errors
    /// More elements than it has room for; whatever [`Stream::download`] fails with.
    pub fn download<T: Element>(
        mut self,
        stream: &Stream,
        source: &impl Readable<T>,
    ) -> impl Future<Output = Result<ResponsePayload, Failure>> + Send + 'static {
        let queued = self.queue_download(stream, source);
        async move {
            match queued? {
                Queued::Direct(copied, _kept) => copied.await?,
                Queued::Through(copied) => {
                    let bytes = copied.await?;
                    self[..bytes.len()].copy_from_slice(&bytes);
                }
            }
            Ok(self)
        }
    }

    fn queue_download<T: Element>(
        &mut self,
        stream: &Stream,
        source: &impl Readable<T>,
    ) -> Result<Queued<T>, Failure> {
        let (bytes, room) = (source.len() * size_of::<T>(), self.len());
        if bytes > room {
            return Err(Failure::new(format!("{bytes} bytes for a payload of {room}")));
        }
        // ORDERING: Relaxed: the slab was registered before; a call that sees it late copies.
        if bytes == 0 || !self.inner.room.registered.load(Ordering::Relaxed) {
            let copied = stream.download(source);
            let copied = Box::pin(async move {
                let elements = copied.await?;
                Ok::<_, Failure>(bytemuck::cast_slice::<T, u8>(&elements).to_vec())
            });
            return Ok(Queued::Through(copied));
        }
        let address = self.inner.room.slab.at(self.inner.part).addr() as u64;
        let owner = self.inner.clone();
        let (device, len) = (stream.device(), source.len());
        // SAFETY: the part is mapped for as long as the owner, and aligned to 256; plain elements are initialised whatever the bytes. It is
        // this lease's alone, and `self` is in nobody's hands until the copy is complete.
        let room = unsafe { adopt_registered::<T>(&device, address, len, owner) };
        let mut room = room?;
        let copied = stream.copy(source, &mut room);
        Ok(Queued::Direct(copied, room))
    }
}

/// A download that is under way.
enum Queued<T> {
    Direct(Op<()>, DeviceBuffer<T>),
    Through(BoxFuture<'static, Result<Vec<u8>, Failure>>),
}

impl Deref for ResponsePayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as below, with a shared borrow.
        unsafe { self.inner.room.slab.slice(self.inner.part) }
    }
}

impl DerefMut for ResponsePayload {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: no two leases overlap; this one is exclusively borrowed, and what a copy of the device still holds of it is complete;
        // the supervisor maps the slab for writing nowhere.
        unsafe { self.inner.room.slab.slice_mut(self.inner.part) }
    }
}

impl Drop for ResponsePart {
    fn drop(&mut self) {
        // A part that was sent is returned by the supervisor. In a fork of the process the lock may be held forever.
        if self.room.slab.is_here() && self.room.leases.lock().give_back(self.id) {
            self.room.freed.notify_waiters();
        }
    }
}

impl fmt::Debug for ResponsePayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ResponsePayload({} bytes)", self.inner.part.len)
    }
}

/// The slab of responses, and which lease has which part of it.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) slab: Arc<Slab>,
    /// Device copies can reach it.
    pub(crate) registered: AtomicBool,
    leases: Mutex<Leases>,
    freed: Notify,
    /// How long payloads that the supervisor's side holds may be all that fills the slab.
    held: Duration,
    /// The process's runtime: the waiting code may be on none.
    runtime: tokio::runtime::Handle,
}

impl Room {
    pub(crate) fn new(
        slab: Arc<Slab>,
        terms: &ChildTerms,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        let leases = Leases::new(terms.incarnation, terms.status_bytes, slab.bytes());
        let (leases, freed) = (Mutex::new(leases), Notify::new());
        let held = Duration::from_millis(terms.held_ms);
        Room { slab, registered: AtomicBool::new(false), leases, freed, held, runtime }
    }

    async fn take(self: &Arc<Self>, bytes: u64) -> Result<ResponsePayload, Failure> {
        let limit = self.leases.lock().largest();
        if bytes > limit {
            return Err(Failure::new(format!(
                "a payload of {bytes} bytes, and the slab has {limit}"
            )));
        }
        loop {
            // Before the attempt, so that no release is missed in between.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some((id, part)) = self.leases.lock().take(bytes) {
                let inner = Arc::new(ResponsePart { room: self.clone(), id, part });
                return Ok(ResponsePayload { inner });
            }
            // Parts that calls still have here will be sent or given back, so only a slab that the front holds alone is an error.
            let limit_over = std::pin::pin!(sleep(&self.runtime, self.held));
            if let Either::Right(_) = futures::future::select(freed, limit_over).await
                && let (0, held) = self.leases.lock().used()
            {
                return Err(Failure::of_held(bytes, held, limit));
            }
        }
    }

    /// The supervisor is done with it.
    pub(crate) fn released(&self, id: LeaseId) {
        if self.leases.lock().returned(id, FRONT) == Returned::Free {
            self.freed.notify_waiters();
        }
    }
}
