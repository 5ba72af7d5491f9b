//! How streams are opened, and the multiprocessors that each is confined to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use gpu_await_protocol::sync::Mutex;

use super::driver_stream::{DriverStream, Origin, Owner};
use super::foreign::ForeignWaits;
use super::look::Pace;
use super::markers::Markers;
use super::memory::{FreedMemory, LentQueue};
use super::submitter::{Announced, Submitter};
use super::{StreamHandle, StreamState};
use crate::backend::{DeviceKind, RawStream, StreamOptions};
use crate::error::{ErrorDetail, Result};
use crate::runtime::engine::Engine;
use crate::runtime::partitions::Share;
use crate::runtime::progress::Progress;
use crate::runtime::words::Word;
use crate::thread::role;
use gpu_await_protocol::overlap::Overlap;
use gpu_await_protocol::submission::SubmissionLock;
use gpu_await_protocol::timeline::Timeline;
use gpu_await_protocol::wait_queue::WaitQueue;

/// Events that a new stream is stocked with.
const EVENTS_IN_STOCK: usize = 8;

impl StreamState {
    /// A stream with a driver stream of its own, in the share of the device, if that has one.
    pub(crate) fn open(
        engine: &Arc<Engine<StreamState>>,
        options: StreamOptions,
        name: Option<Box<str>>,
    ) -> Result<Arc<StreamHandle>> {
        StreamState::open_in(engine, engine.shares.partition.clone(), options, name)
    }

    /// A stream with a driver stream of its own, in a share.
    pub(crate) fn open_in(
        engine: &Arc<Engine<StreamState>>,
        partition: Option<Arc<Share>>,
        options: StreamOptions,
        name: Option<Box<str>>,
    ) -> Result<Arc<StreamHandle>> {
        role::check("making a stream")?;
        engine.check_open()?;
        if partition.is_some() && options.blocking {
            let what = "a stream in a partition that is ordered with the legacy default stream";
            return Err(ErrorDetail::Unsupported { what, device: engine.label().to_owned() }.into());
        }
        let options =
            StreamOptions { partition: partition.as_ref().map(|share| share.raw()), ..options };
        let backend = &*engine.backend;
        let raw = backend.stream_create(options).map_err(|code| engine.refused(code))?;
        let made = || {
            let mut options = options;
            if options.priority != 0 {
                // SAFETY: the stream was made just now.
                options.priority = unsafe { backend.stream_info(raw) }?.priority;
            }
            let mode = engine.options.completion;
            let word = match mode.may_use_words() && backend.limits().words {
                true if mode.always_words() => Some(engine.pools.words.get(backend)?),
                // If there is no word, events serve as well.
                true => match engine.pools.words.get(backend) {
                    Err(code) if code.is_sticky() => return Err(code),
                    word => word.ok(),
                },
                false => None,
            };
            if mode.rings() {
                engine.pools.bells.stock(backend, &engine.pacing.attention)?;
            }
            Ok((options, word))
        };
        let (options, word) = made().map_err(|code| {
            // SAFETY: the stream was made just now, and nothing else refers to it.
            let _ = unsafe { backend.stream_destroy(raw) };
            engine.refused(code)
        })?;
        if partition.is_some() && backend.kind() == DeviceKind::Cuda {
            engine
                .shares
                .partitions
                .tell_of_queues(engine.label(), engine.registry.streams().len() + 1);
        }
        let driver = DriverStream::new(raw, options, name, partition, Origin::Ours);
        let stream = StreamState::over(engine, driver, word);
        stream.state.markers.stock_events(engine, EVENTS_IN_STOCK);
        Ok(stream)
    }

    /// A stream over another library's driver stream, which `owner` keeps if that is needed. It uses only
    /// events: a completion word would be ordered with work that this crate does not know.
    pub(crate) fn open_foreign(
        engine: &Arc<Engine<StreamState>>,
        partition: Option<Arc<Share>>,
        (raw, options): (RawStream, StreamOptions),
        name: Option<Box<str>>,
        owner: Option<Owner>,
    ) -> Result<Arc<StreamHandle>> {
        engine.check_open()?;
        let driver = DriverStream::new(raw, options, name, partition, Origin::Adopted(owner));
        Ok(StreamState::over(engine, driver, None))
    }

    /// The stream for [`mark_everything`](Self::mark_everything). It uses the engine's own driver stream, on
    /// which it puts no work, and leaves it to the engine.
    pub(crate) fn open_whole(engine: &Arc<Engine<StreamState>>) -> Result<Arc<StreamHandle>> {
        engine.check_open()?;
        let (raw, name) = (engine.shares.private, Some("whole device".into()));
        let (options, partition) = (StreamOptions::default(), engine.shares.partition.clone());
        let driver = DriverStream::new(raw, options, name, partition, Origin::Engine);
        Ok(StreamState::over(engine, driver, None))
    }

    fn over(
        engine: &Arc<Engine<StreamState>>,
        driver: DriverStream,
        word: Option<Word>,
    ) -> Arc<StreamHandle> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // ORDERING: Relaxed: only uniqueness matters.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let progress = |stream: &Weak<StreamState>| Progress {
            id,
            timeline: Timeline::new(),
            device: engine.state.clone(),
            stream: stream.clone(),
            waits_for_others: AtomicBool::new(false),
            stuck: OnceLock::new(),
        };
        let stream = Arc::new_cyclic(|this| {
            let progress = Arc::new(progress(this));
            StreamState {
                foreign: ForeignWaits::new(&progress),
                overlap: Overlap::new(),
                progress,
                engine: engine.clone(),
                driver,
                submission: SubmissionLock::new(Submitter::new()),
                markers: Markers::new(word),
                waiters: WaitQueue::new(),
                lent: LentQueue::default(),
                memory: FreedMemory::new(engine.options.block_cache_bytes),
                deserted: AtomicBool::new(false),
                pace: Pace::default(),
                announced: Announced::default(),
            }
        });
        engine.registry.insert(stream.progress.id, Arc::downgrade(&stream));
        StreamHandle::new(stream)
    }
}

impl StreamState {
    /// Whether work may be put on it that runs outside any share.
    pub(crate) fn is_outside(&self) -> bool {
        let is_ours = self.driver.raw.0 == self.engine.shares.private.0;
        let is_confined = self.driver.partition().is_some() || self.driver.is_confined_by_others();
        !is_confined && !self.is_deserted() && !is_ours
    }

    /// The stream for capturing its work; locked while that is done.
    pub(crate) fn captures(&self) -> &Mutex<Option<RawStream>> {
        self.driver.partition().map_or(&self.engine.shares.captures, |share| share.captures())
    }
}
