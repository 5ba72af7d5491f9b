//! How streams begin, and the multiprocessors that each is confined to.

use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;

use super::{EVENTS_IN_STOCK, Origin, Owner, StreamHandle, StreamState};
use crate::backend::{DeviceKind, RawStream, StreamOptions};
use crate::error::{ErrorDetail, Result};
use crate::runtime::engine::Engine;
use crate::runtime::partitions::Share;
use crate::thread::role;

impl StreamState {
    /// A stream with a driver stream of its own, in the share of the device, if that has one.
    pub(crate) fn open(
        engine: &Arc<Engine<StreamState>>,
        options: StreamOptions,
        name: Option<Box<str>>,
    ) -> Result<Arc<StreamHandle>> {
        StreamState::open_in(engine, engine.partition.clone(), options, name)
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
                true if mode.always_words() => Some(engine.words.get(backend)?),
                // If there is no word, events serve as well.
                true => engine.words.get(backend).ok(),
                false => None,
            };
            if mode.rings() {
                engine.bells.stock(backend, &engine.attention)?;
            }
            Ok((options, word))
        };
        let (options, word) = made().map_err(|code| {
            // SAFETY: the stream was made just now, and nothing else refers to it.
            let _ = unsafe { backend.stream_destroy(raw) };
            engine.refused(code)
        })?;
        if partition.is_some() && backend.kind() == DeviceKind::Cuda {
            engine.partitions.tell_of_queues(engine.label(), engine.streams().len() + 1);
        }
        let stream = StreamState::over(engine, raw, options, name, word, Origin::Ours(partition));
        stream.markers.stock_events(engine, EVENTS_IN_STOCK);
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
        let origin = Origin::Shared(owner, partition);
        Ok(StreamState::over(engine, raw, options, name, None, origin))
    }

    /// The stream for [`mark_everything`](Self::mark_everything). It uses the engine's own driver stream, on
    /// which it puts no work, and leaves it to the engine.
    pub(crate) fn open_whole(engine: &Arc<Engine<StreamState>>) -> Result<Arc<StreamHandle>> {
        engine.check_open()?;
        let (raw, name) = (engine.private, Some("whole device".into()));
        Ok(StreamState::over(engine, raw, StreamOptions::default(), name, None, Origin::Engine))
    }
}

impl StreamState {
    /// The share of the multiprocessors that it is confined to.
    pub(crate) fn partition(&self) -> Option<&Arc<Share>> {
        self.partition.as_ref()
    }

    /// Whether others confined it, to multiprocessors that this crate does not know. Their context may go at any time, and what is compiled
    /// for it or captured in it with it: neither is done.
    pub(crate) fn is_confined_by_others(&self) -> bool {
        self.partition.is_none() && self.options.partition.is_some()
    }

    /// Whether work is put on it that is in no share.
    pub(crate) fn is_outside(&self) -> bool {
        let is_confined = self.partition.is_some() || self.options.partition.is_some();
        !is_confined && !self.is_deserted() && self.raw.0 != self.engine.private.0
    }

    /// How many multiprocessors its work runs on.
    pub(crate) fn multiprocessors(&self) -> u32 {
        let all = self.engine.backend.limits().multiprocessors;
        self.partition.as_ref().map_or(all, |share| share.multiprocessors())
    }

    /// The stream on which work is captured for it; held while that is done.
    pub(crate) fn captures(&self) -> &Mutex<Option<RawStream>> {
        self.partition.as_ref().map_or(&self.engine.captures, |share| share.captures())
    }
}
