//! State that the streams of a device share above its completion engine.
#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};

use gpu_await_protocol::sync::Mutex;

use crate::backend::{DeviceKind, RawStream, StreamOptions};
use crate::error::Result;
use crate::memory::pinned_pool::PinnedPool;
use crate::runtime::stream_state::{StreamHandle, StreamState};
use crate::runtime::{Engine, Point};
use crate::thread::crew::Crew;
use crate::thread::role;

/// The compute capability whose kernels every later GPU can run too: they are PTX.
const GENERAL: (u32, u32) = (8, 0);

/// The homes that have a stream for the current thread.
struct Homes(RefCell<Vec<(ThreadId, Weak<Home>)>>);

thread_local! {
    static HOMES: Homes = const { Homes(RefCell::new(Vec::new())) };
}

impl Drop for Homes {
    fn drop(&mut self) {
        for (thread, home) in self.0.get_mut().drain(..) {
            let stream = home.upgrade().and_then(|home| home.of_threads.lock().remove(&thread));
            drop(stream);
        }
    }
}

/// The pinned memory of a device, its own streams, and code that is loaded once for it.
pub struct Home {
    pub(crate) engine: Arc<Engine>,
    pub(crate) pinned: Arc<PinnedPool>,
    /// The threads of the staged copies.
    pub(crate) crew: Arc<Crew>,
    /// The devices whose peer access was requested, by the engine's id, and whether their memory can be accessed
    /// directly.
    peers: Mutex<Vec<(u64, bool)>>,
    /// The stream that every device has from the start.
    pub(crate) default: Arc<StreamHandle>,
    legacy: Mutex<Option<Arc<StreamHandle>>>,
    /// A stream for tickets that cover the whole device.
    whole: Mutex<Option<Arc<StreamHandle>>>,
    of_threads: Mutex<HashMap<ThreadId, Arc<StreamHandle>>>,
    /// One value per type. Held while one is being loaded, which may load kernels.
    loaded: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// The modules of declared kernels; the type belongs to the code that loads them.
    pub(crate) modules: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Drop for Home {
    fn drop(&mut self) {
        self.engine.leave_soon();
    }
}

impl Home {
    pub(crate) fn new(engine: &Arc<Engine>) -> Result<Arc<Self>> {
        let default = StreamState::open(engine, StreamOptions::default(), Some("default".into()))?;
        let crew = Arc::new(Crew::new());
        if !engine.options.stepped {
            crew.start();
            engine.background.start_reaper();
        }
        let pins_ahead = !engine.options.stepped && !engine.options.pins_on_demand;
        let pinned = PinnedPool::new(engine, pins_ahead.then_some(&crew));
        Ok(Arc::new(Home {
            engine: engine.clone(),
            pinned,
            crew,
            peers: Mutex::default(),
            default,
            legacy: Mutex::default(),
            whole: Mutex::default(),
            of_threads: Mutex::default(),
            loaded: Mutex::default(),
            modules: OnceLock::new(),
        }))
    }

    /// Checks the thread and the device, before something is loaded for an operation.
    ///
    /// # Errors
    /// A thread that must not call the driver; a lost or closed device.
    pub fn check_can_load(&self, what: &'static str) -> Result<()> {
        role::check(what)?;
        self.engine.check_open()
    }

    /// Returns the kind of device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.engine.backend.kind()
    }

    /// Returns the device's name for messages.
    #[must_use]
    pub fn label(&self) -> &str {
        self.engine.label()
    }

    /// Returns the compute capability that kernels are chosen for: the device's, unless it should run kernels that fit every GPU.
    #[must_use]
    pub fn capability_of_images(&self) -> (u32, u32) {
        let capability = self.engine.limits.compute_capability;
        if self.engine.options.general_images { capability.min(GENERAL) } else { capability }
    }

    /// Returns the most elements per launch of a selection, if that is less than its kernel can take.
    #[must_use]
    pub fn part_of_selections(&self) -> Option<u32> {
        self.engine.options.part_of_selections
    }

    /// Returns whether each operation is waited for before its call returns.
    #[must_use]
    pub fn verifies(&self) -> bool {
        self.engine.options.verify
    }

    /// Whether copies of this device can access the other's memory directly; enables that once per pair.
    pub(crate) fn reaches(&self, other: &Engine) -> Result<bool> {
        let known =
            |peers: &[(u64, bool)]| peers.iter().find(|(id, _)| *id == other.state.id).copied();
        if let Some((_, direct)) = known(&self.peers.lock()) {
            return Ok(direct);
        }
        // Not under the lock: it may take long. Calling it twice is harmless.
        let asked = self.engine.backend.enable_peer(&*other.backend);
        let direct = asked.map_err(|code| self.engine.refused(code))?;
        let mut peers = self.peers.lock();
        if known(&peers).is_none() {
            peers.push((other.state.id, direct));
        }
        Ok(direct)
    }

    /// The legacy default stream.
    pub(crate) fn legacy(&self) -> Result<Arc<StreamHandle>> {
        let mut legacy = self.legacy.lock();
        if let Some(stream) = &*legacy {
            return Ok(stream.clone());
        }
        let (name, options) = (Some("legacy default".into()), RawStream::LEGACY_OPTIONS);
        // It belongs to the driver: nothing has to keep it alive.
        let stream = StreamState::open_foreign(
            &self.engine,
            None,
            (RawStream::LEGACY, options),
            name,
            None,
        )?;
        Ok(legacy.insert(stream).clone())
    }

    /// Points that together cover all work on the device, including other libraries' if the device is open. If the driver
    /// cannot report theirs, only their work on streams ordered with the legacy default stream is covered.
    pub(crate) fn everything(&self) -> Result<Vec<Point>> {
        role::check("waiting for a whole device")?;
        if self.engine.check_open().is_err() {
            return Ok(self.ours());
        }
        if self.has_given_up_streams() {
            // The driver's wait would cover those as well.
            self.legacy()?;
            return Ok(self.ours());
        }
        let stream = self.whole_device()?;
        if stream.state.mark_everything()?.is_none() {
            // Its tail is a point behind all of these streams.
            self.legacy()?;
        }
        Ok(self.ours())
    }

    /// Points behind all work on the device, other libraries' included, even if it is closed. If the driver
    /// cannot report their work, only that on streams ordered with the legacy default stream is covered.
    pub(crate) fn mark_all(&self) -> Result<Vec<Point>> {
        role::check("marking a whole device")?;
        if !self.has_given_up_streams() {
            let stream = self.whole_device()?;
            if let Some(ticket) = stream.state.mark_everything()? {
                return Ok(vec![stream.state.point(ticket)]);
            }
        }
        self.legacy()?;
        Ok(self.ours())
    }

    /// The tail of every stream, and of what streams of other devices have launched here.
    pub(crate) fn ours(&self) -> Vec<Point> {
        if self.has_given_up_streams() {
            // The point recorded for the whole device covers those.
            let whole = self.whole.lock().take();
            drop(whole);
        }
        let streams = self.engine.registry.streams_unlocked();
        let streams = streams.iter().filter(|stream| !stream.is_given_up());
        let tails = streams.map(|stream| stream.point(stream.tail()));
        tails.chain(self.engine.registry.visits()).collect()
    }

    /// The stream that marks everything on the device; made only while the device is open.
    pub(crate) fn whole_device(&self) -> Result<Arc<StreamHandle>> {
        let mut whole = self.whole.lock();
        if let Some(stream) = &*whole {
            return Ok(stream.clone());
        }
        Ok(whole.insert(StreamState::open_whole(&self.engine)?).clone())
    }

    /// Whether there are streams without a handle that will never finish.
    fn has_given_up_streams(&self) -> bool {
        let gone = self.engine.registry.has_given_up_streams();
        gone || self.engine.registry.streams().iter().any(|stream| stream.is_given_up())
    }

    /// Streams that users have handles of.
    pub(crate) fn streams(&self) -> usize {
        let whole = usize::from(self.whole.lock().is_some());
        self.engine.registry.streams().len() - whole
    }

    /// The calling thread's stream; released when the thread ends.
    pub(crate) fn of_this_thread(self: &Arc<Self>) -> Result<Arc<StreamHandle>> {
        let this = thread::current();
        if let Some(stream) = self.of_threads.lock().get(&this.id()) {
            return Ok(stream.clone());
        }
        let name = this.name().map(Box::from);
        let stream = StreamState::open(&self.engine, StreamOptions::default(), name)?;
        let kept = self.of_threads.lock().entry(this.id()).or_insert(stream).clone();
        // On a thread that is about to end, nothing would release it.
        let home = (this.id(), Arc::downgrade(self));
        let enter = |homes: &Homes| {
            let mut homes = homes.0.borrow_mut();
            homes.retain(|(_, home)| home.strong_count() > 0);
            homes.push(home);
        };
        if HOMES.try_with(enter).is_err() {
            self.of_threads.lock().remove(&this.id());
        }
        Ok(kept)
    }

    /// Returns the device's value of type `T`, loaded by the first caller.
    ///
    /// # Errors
    /// The errors of `load`.
    pub fn get_or_load<T: Any + Send + Sync, E>(
        &self,
        load: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Arc<T>, E> {
        let mut loaded = self.loaded.lock();
        if let Some(found) = loaded.iter().find_map(|value| value.clone().downcast().ok()) {
            return Ok(found);
        }
        let fresh = Arc::new(load()?);
        loaded.push(fresh.clone());
        Ok(fresh)
    }
}
