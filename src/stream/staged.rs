//! Copies between the device and ordinary (pageable) host memory, off the executor.
//!
//! The driver copies pageable memory on the calling thread, at a fraction of the link's speed. Here the data is split into parts; a few
//! of the device's threads ([`Crew`](crate::thread::crew::Crew)) copy parts between pageable and pinned memory while other parts are on
//! the link. The calling task only submits copies and hands out parts.
//!
//! | | upload | download |
//! |---|---|---|
//! | first | the crew fills a pinned buffer | the device fills a pinned buffer |
//! | then | the device reads it | the crew empties it |
//!
//! A copy takes pinned memory for two [windows](Stream::window) of parts and reuses it, so a similar later copy finds the memory in the
//! pool.
//!
//! # Invariants
//! 1. At most one window of parts is with the crew, and at most two windows are with the crew and the device together, so pinned memory is
//!    bounded, whatever delays the stream (`a_staged_copy_keeps_a_bounded_amount_pinned`).
//! 2. The crew never waits for the device: a stream that is held up does not delay other streams' copies
//!    (`a_held_stream_delays_no_other_staged_copy`).
//! 3. The calling task neither copies, nor maps, nor frees much memory. In one poll it hands at most one part to the crew and submits at
//!    most one copy (`a_poll_of_a_staged_copy_submits_at_most_one_part`).
//! 4. A second copy of the same size creates nothing in the driver: pinned memory, events and the device's pool
//!    already exist (`a_second_staged_round_trip_makes_nothing_in_the_driver`). A first one creates them before it
//!    submits a copy (`a_first_staged_copy_pins_what_it_needs_before_it_copies`).
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::panic::Location;
use std::sync::Arc;
use std::task::Poll;

use crate::batch::queue::Queue;
use crate::batch::settle::Settle;
use crate::batch::source::{Source, StagedSource};
use crate::device::home::Home;
use crate::error::Result;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::pageable::{Part, Room};
use crate::memory::pinned::{PinnedBuffer, bytes_of};
use crate::memory::view::Readable;
use crate::op::Op;
use crate::runtime::coop;
use crate::runtime::stream_state::StreamState;
use crate::stream::Stream;
use crate::thread::crew::Line;
use crate::thread::worker::{Offloaded, Unwanted};
use crate::thread::{contain, role};

/// The part size: its copy takes long compared with a wake-up, and short compared with the whole.
const PART_BYTES: usize = 2 << 20;
/// Operations in flight above which a copy waits: well below the depth at which the driver blocks.
const MOST_IN_FLIGHT: u64 = 512;

impl Stream {
    /// Copies ordinary host data into a new device buffer, off the executor. Ready proves that all work is
    /// *on the stream*: device order is enough for work behind it.
    ///
    /// A few threads of the device copy the data into pinned memory, part by part, while earlier parts are
    /// being transferred: several times as fast as the driver's own copy from pageable memory. There are at
    /// most 8 of these threads, however many copies run, plus one for each stream whose copies wait for
    /// device memory. Below about a megabyte, or for a [`PinnedBuffer`], there is no gain over
    /// [`upload`](Self::upload).
    ///
    /// # Ownership
    /// The source moves in and is dropped off the executor. One call uses at most about 40 MiB of pinned
    /// memory.
    ///
    /// # Ordering
    /// The work is submitted while the future is polled, not before. Work that other tasks submit to the
    /// stream meanwhile goes between the parts; the buffer is not visible before the future returns it.
    ///
    /// # Cancel safety
    /// Dropping the future stops the copy: parts that are on the stream go on, and the buffer is freed behind them.
    ///
    /// # Blocking
    /// Never: a poll takes as long as the submission of one copy (longer while other threads pin memory or
    /// load kernels, as the driver has one lock for all of these). While the stream is held up, or has more
    /// than 512 operations in flight, the future waits.
    ///
    /// # Errors
    /// Out of device or pinned memory; a lost or closed device.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let weights = vec![1.0f32; 3_000_000];
    /// let weights = stream.upload_staged(weights).await?;
    /// let back = stream.download_staged(&weights).await?;
    /// assert_eq!(back, vec![1.0; 3_000_000]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuMemAllocFromPoolAsync`, `cuMemcpyHtoDAsync`.
    #[track_caller]
    pub fn upload_staged<T: Element>(
        &self,
        source: impl Source<T>,
    ) -> impl Future<Output = Result<DeviceBuffer<T>>> {
        self.upload_staged_at(Location::caller(), source)
    }

    async fn upload_staged_at<T: Element>(
        &self,
        at: &'static Location<'static>,
        source: impl Source<T>,
    ) -> Result<DeviceBuffer<T>> {
        coop::proceed().await;
        role::check("submitting work")?;
        let source = match source.into_staged().0 {
            StagedSource::Pinned(source) => {
                return self.part_of(at, |queue| Ok(queue.upload(source)?)).queued();
            }
            StagedSource::Pageable(source) => self.dropped_there(source),
        };
        let len = (*source.share()).as_ref().len();
        if len == 0 {
            return self.part_of(at, |queue| queue.empty(len)).queued();
        }
        // Without pinned memory to reuse, the crew takes more.
        let fill = |start: usize, pinned: Option<PinnedBuffer<T>>| {
            let (source, pool) = (source.share(), self.home.pinned.clone());
            let part = self.home.crew.run(move || {
                let source = &(*source).as_ref()[start..len.min(start + part_len::<T>())];
                let mut part = match pinned {
                    Some(pinned) => pinned,
                    None => PinnedBuffer::new(&pool, block_len::<T>(len))?,
                };
                part = part.resized(source.len());
                part.copy_from_slice(source);
                Ok(part)
            });
            (start, part)
        };
        let window = self.window();
        let events = staged_events(window);
        self.throttle(MOST_IN_FLIGHT).await?;
        // For a large buffer the driver must map memory. Not on the crew's threads: the stream may be busy.
        let stream = self.clone();
        let allocated = self.home.crew.offload(self.line(), Unwanted::IsLeft, move || {
            stock(stream.state(), events);
            stream.part_of(at, |queue| queue.empty::<T>(len)).queued()
        });
        self.stock_pinned::<T>(len, window).await?;
        let mut starts = (0..len).step_by(part_len::<T>());
        let mut filling = VecDeque::with_capacity(window);
        for start in starts.by_ref().take(window) {
            pause().await;
            filling.push_back(fill(start, None));
        }
        let mut flying: VecDeque<Op<PinnedBuffer<T>>> = VecDeque::with_capacity(window + 1);
        let mut buffer = allocated.await??;
        while let Some((start, part)) = filling.pop_front() {
            let part = filled(part).await?;
            self.throttle(MOST_IN_FLIGHT).await?;
            let op = self.part_of(at, |queue| queue.upload_part(part, &mut buffer, start));
            flying.push_back(op.submitted()?);
            if filling.is_empty() {
                break;
            }
            pause().await;
            if let Some(start) = starts.next() {
                let oldest = if flying.len() > window { flying.pop_front() } else { None };
                let pinned = match oldest {
                    Some(oldest) => Some(oldest.await?),
                    None => None,
                };
                filling.push_back(fill(start, pinned));
            }
        }
        Ok(buffer)
    }

    /// Copies device memory into a `Vec`, off the executor. Ready proves *visible to the host*.
    ///
    /// The counterpart of [`upload_staged`](Self::upload_staged), with the same speed, pinned memory, cancel
    /// safety and blocking.
    ///
    /// # Ordering
    /// The work is submitted while the future is polled, not before. The source stays borrowed meanwhile, so
    /// all parts come from one state of it.
    ///
    /// # Errors
    /// As [`download`](Self::download); out of host memory.
    ///
    /// # Source
    /// `cuMemcpyDtoHAsync`.
    #[track_caller]
    pub fn download_staged<T: Element>(
        &self,
        source: &impl Readable<T>,
    ) -> impl Future<Output = Result<Vec<T>>> {
        self.download_staged_at(Location::caller(), source, Vec::new())
    }

    /// Copies device memory into an existing `Vec`, replacing its elements, off the executor; see
    /// [`download_staged`](Self::download_staged). Faster than into a fresh `Vec`, whose pages the system
    /// must first allocate. Ready proves *visible to the host* and hands the `Vec` back.
    ///
    /// # Ownership
    /// If it fails or is dropped, the `Vec` is dropped.
    ///
    /// # Errors
    /// As [`download_staged`](Self::download_staged).
    #[track_caller]
    pub fn download_staged_into<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: Vec<T>,
    ) -> impl Future<Output = Result<Vec<T>>> {
        self.download_staged_at(Location::caller(), source, destination)
    }

    async fn download_staged_at<T: Element>(
        &self,
        at: &'static Location<'static>,
        source: &impl Readable<T>,
        destination: Vec<T>,
    ) -> Result<Vec<T>> {
        coop::proceed().await;
        role::check("submitting work")?;
        let len = source.len();
        if len == 0 {
            self.engine().check_open()?;
            return Ok(Vec::new());
        }
        // Allocating the room may wait for other threads' page faults.
        let room = move || Room::in_parts(destination, len, part_len::<T>());
        let (room, parts) = self.home.crew.run(room).await??;
        // This share is dropped last: all parts, even those in flight, are dropped before it.
        let room = self.dropped_there(room);
        let window = self.window();
        let events = staged_events(window);
        // Before pinned memory is taken, so that a waiting call leaves it to others.
        self.throttle(MOST_IN_FLIGHT).await?;
        if !self.handle.state.markers.has_events(events) {
            let stream = self.handle.state.clone();
            let stock = move || stock(&stream, events);
            self.home.crew.offload(self.line(), Unwanted::IsLeft, stock).await?;
        }
        self.stock_pinned::<T>(len, window).await?;
        let mut flying: VecDeque<(Op<PinnedBuffer<T>>, Part<T>)> = VecDeque::with_capacity(window);
        let mut emptying: VecDeque<Offloaded<PinnedBuffer<T>>> =
            VecDeque::with_capacity(window + 1);
        let empty = |part: Part<T>, full: PinnedBuffer<T>| {
            self.home.crew.run(move || {
                part.fill(&full);
                full
            })
        };
        for part in parts {
            if flying.len() == window
                && let Some((op, part)) = flying.pop_front()
            {
                emptying.push_back(empty(part, op.await?));
            }
            let emptied = if emptying.len() > window { emptying.pop_front() } else { None };
            let pinned = match emptied {
                Some(emptied) => emptied.await?,
                None => self.pinned_part(block_len::<T>(len)).await?,
            };
            let pinned = pinned.resized(part.len());
            self.throttle(MOST_IN_FLIGHT).await?;
            let op = self.part_of(at, |queue| queue.download_part(source, part.start(), pinned));
            flying.push_back((op.submitted()?, part));
            pause().await;
        }
        for (op, part) in flying {
            emptying.push_back(empty(part, op.await?));
            pause().await;
        }
        for emptied in emptying {
            drop(emptied.await?);
        }
        match Room::into_vec(room.take()) {
            Some(vec) => Ok(vec),
            None => unreachable!("every part was filled, and its end awaited"),
        }
    }

    /// Puts `work` on the stream as a part of the call at that line.
    fn part_of<R: Settle>(
        &self,
        at: &'static Location<'static>,
        work: impl FnOnce(&Queue<'_>) -> Result<R>,
    ) -> Op<R::Output> {
        let queue = self.queue_of_one().called_at(at);
        let result = work(&queue);
        queue.finish(result)
    }

    /// The queue for work that this stream may hold up.
    pub(crate) fn line(&self) -> Line {
        Line::Stream(self.handle.state.progress.id)
    }

    /// How many parts may be with the crew; as many more may be with the device.
    fn window(&self) -> usize {
        self.home.crew.threads + 2
    }

    /// Has the crew make the pinned memory that the pool lacks for a copy of `len` elements: before the first
    /// part is submitted, because registration blocks submitters in the driver.
    async fn stock_pinned<T: Element>(&self, len: usize, window: usize) -> Result<()> {
        let pool = &self.home.pinned;
        let (bytes, parts) = (bytes_of::<T>(block_len::<T>(len))?, len.div_ceil(part_len::<T>()));
        let enough = parts.min(2 * window);
        let mut making = Vec::new();
        for _ in pool.free_blocks(bytes, enough)..enough {
            let pool = pool.clone();
            making.push(self.home.crew.run(move || pool.stock(bytes, enough)));
            pause().await;
        }
        for made in making {
            made.await??;
        }
        Ok(())
    }

    /// Pinned memory for a part of at most `len` elements; the crew makes it if others took it.
    async fn pinned_part<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        let pool = &self.home.pinned;
        if let Some(pooled) = PinnedBuffer::pooled(pool, len)? {
            return Ok(pooled);
        }
        let pool = pool.clone();
        self.home.crew.run(move || PinnedBuffer::new(&pool, len)).await?
    }

    fn dropped_there<V: ?Sized>(&self, value: Arc<V>) -> DroppedThere<V>
    where
        Arc<V>: Send + 'static,
    {
        DroppedThere { value: Some(value), home: self.home.clone() }
    }
}

/// A share of large memory; if it is the last one, the crew frees the memory.
struct DroppedThere<V: ?Sized>
where
    Arc<V>: Send + 'static,
{
    /// `None` once it was taken, by value or by the drop.
    value: Option<Arc<V>>,
    home: Arc<Home>,
}

impl<V: ?Sized> DroppedThere<V>
where
    Arc<V>: Send + 'static,
{
    fn share(&self) -> Arc<V> {
        self.value.clone().unwrap_or_else(|| unreachable!("taken by value only"))
    }

    fn take(mut self) -> Arc<V> {
        self.value.take().unwrap_or_else(|| unreachable!("taken by value only"))
    }
}

impl<V: ?Sized> Drop for DroppedThere<V>
where
    Arc<V>: Send + 'static,
{
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.home.crew.drop_there(value);
        }
    }
}

/// The number of elements in a part.
fn part_len<T>() -> usize {
    (PART_BYTES / size_of::<T>()).max(1)
}

/// How many events a stream keeps for staged copies: a marker for each part in flight of an upload and,
/// before those are complete, of a download.
fn staged_events(window: usize) -> usize {
    3 * (window + 1)
}

/// Lets other tasks of the executor run.
async fn pause() {
    let mut paused = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        contain::wake_by_ref(cx.waker());
        Poll::Pending
    })
    .await;
}

/// The length of the pinned buffer for each part of a copy of `len` elements.
fn block_len<T>(len: usize) -> usize {
    part_len::<T>().min(len)
}

/// Ensures that there are that many events, plus one, because the poller may still hold one whose work is
/// complete.
fn stock(stream: &StreamState, events: usize) {
    if !stream.markers.has_events(events) {
        stream.markers.stock_events(&stream.engine, events + 1);
    }
}

async fn filled<T>(part: Offloaded<Result<PinnedBuffer<T>>>) -> Result<PinnedBuffer<T>> {
    part.await?
}
