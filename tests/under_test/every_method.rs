//! Every public method, called where a call that waits would wait for itself.
//!
//! [`every_method`] makes a job of each; `surface` (in `tests/streams/host_functions.rs`) compares the names with
//! the crate's sources, so that a new method is either here or among those that call no driver.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Batcher, BlockTable, BlockTableMut, Copy2d, CopyBy, CudaSource, Device, DeviceKind,
    DlpackConsumer, DlpackTensor, Error, Event, Image, InOut, Kernel, LaunchConfig, Mapped, Module,
    Op, Partition, PooledStream, RawQueue, Result, Stream, StreamPool, Uses, join_all, kernels,
};
use tower::Service;

use super::inside::{Inside, Methods, SOON, World, at_once, is_a_poller, once};

/// What another library does that does nothing.
fn nothing(_: &RawQueue<'_>, (): ()) -> Result<()> {
    Ok(())
}

/// Kernels and a partition, made before the host function runs: on a GPU loading waits for that.
pub(crate) struct Loaded {
    scale: kernels::scale,
    module: Option<Module>,
    partition: Partition,
}

impl Loaded {
    pub(crate) fn new(device: &Device) -> Result<Loaded> {
        let scale = kernels::scale::load_blocking(device)?;
        let spin = || Image::ptx(include_str!("../../kernels/spin.ptx"));
        let module = match device.kind() {
            DeviceKind::Cuda => Some(Module::load_blocking(device, spin())?),
            _ => None,
        };
        let partition = futures::executor::block_on(device.reserve_partition(1))?;
        Ok(Loaded { scale, module, partition })
    }
}

/// Calls everything there.
pub(crate) fn run(device: &Device, inside: Inside) -> Result<()> {
    let loaded = Loaded::new(device)?;
    World::new(device)?.run(inside, |world| every_method(world, &loaded))
}

/// Everything that can be called. What it takes is made here, outside of the host function; the full
/// stream waits for that from here on.
pub(crate) fn every_method(world: &World, loaded: &Loaded) -> Result<Methods> {
    let World { device, host, full, idle, .. } = world;
    let (scale, module) = (loaded.scale.clone(), loaded.module.clone());
    let mut list = Methods::called_in(file!());
    let is_cuda = device.kind() == DeviceKind::Cuda;

    // What needs a device that is idle.
    let double = match is_cuda {
        true => None,
        false => Some(Kernel::<(InOut<f32>,)>::host(device, "double", |_: &_, x: &mut [f32]| {
            x.iter_mut().for_each(|x| *x *= 2.0);
        })?),
    };
    let pool = StreamPool::builder().streams(device, 1).max_in_flight(2).build()?;
    let pooled = pool.try_acquire()?;
    let partition = loaded.partition.clone();
    let moved = (pool.clone(), partition.clone());
    let frozen = idle.full(8, 1u32).queued()?.freeze().synchronize()?;
    let start = idle.record_timed()?;
    let end = idle.record_timed()?;
    idle.synchronize()?;
    let buffer = || full.full(8, 1.0f32).queued();
    let pinned = || full.pinned::<f32>(8);
    let other = idle.full(8, 2.0f32).queued()?;
    let reservation = Arc::new(device.try_reserve(512)?);
    let drawing = (reservation.clone(), full.clone());
    let growable = || {
        let mut made = futures::executor::block_on(device.growable::<u8>(8 << 20))?;
        futures::executor::block_on(made.grow(100)).map(|()| made)
    };
    let [mut grows, mut shrinks, mut borrowed, mut drawn] =
        [growable()?, growable()?, growable()?, growable()?];
    idle.synchronize()?;
    #[cfg(target_os = "linux")]
    let shared_buffer = futures::executor::block_on(device.shared::<u8>(8))?;

    // From now on what is submitted to it waits for the host function.
    full.wait(host).queued()?;
    let pending = || full.zeros::<u8>(100);
    let event = full.record()?;
    let shared = unshared(device, full)?;
    let other = Arc::new(other);

    macro_rules! both {
        ($how:ident $stream:literal $device:literal, $on:ident => $call:expr) => {
            both!($how $stream $device, $on, () = () => $call);
        };
        // with something that the call takes
        ($how:ident $stream:literal $device:literal, $on:ident, $with:pat = $make:expr => $call:expr) => {{
            let ($on, $with) = (full.clone(), $make);
            list.$how($stream, move || $call);
            let ($on, $with) = (device.clone(), $make);
            list.$how($device, move || $call);
        }};
    }
    macro_rules! queue {
        ($name:literal, $q:ident => $call:expr) => {
            queue!($name, $q, () = () => $call);
        };
        ($name:literal, $q:ident, $with:pat = $make:expr => $call:expr) => {{
            let (stream, $with) = (full.clone(), $make);
            list.refuses($name, move || stream.batch(|$q| $call.map(drop).map_err(gpu_await::Error::from)).queued());
        }};
    }
    macro_rules! each {
        ($how:ident: $($name:literal, $object:ident => |$on:ident| $call:expr;)+) => {$({
            let $on = $object.clone();
            list.$how($name, move || $call);
        })+};
    }

    // ---- opening --------------------------------------------------------------------------
    list.refuses("Device::cuda", || Device::cuda(0));
    list.refuses("Device::cuda_or_host", Device::cuda_or_host);
    list.refuses("DeviceBuilder::cuda", || Device::builder().cuda(0));
    list.refuses("DeviceBuilder::cuda_or_host", || Device::builder().cuda_or_host());
    list.refuses("DeviceBuilder::named", || Device::builder().named("cuda:0"));
    list.answers("DeviceBuilder::from_env", || Device::builder().from_env().is_ok());
    list.answers("Device::from_env", || Device::from_env().is_ok());
    list.answers("Device::host", || {
        let device = Device::host();
        assert_eq!(device.kind(), DeviceKind::Host);
    });
    list.answers("DeviceBuilder::host", || drop(Device::builder().host()));
    list.answers("DeviceBuilder::host_with", || {
        drop(Device::builder().host_with(testing::faults().0));
    });
    list.answers("Device::count", move || assert!(!is_cuda || Device::count() > 0));

    // ---- devices --------------------------------------------------------------------------
    each! { refuses:
        "Device::pinned", device => |d| d.pinned::<u8>(100);
        "Device::pinned_async", device => |d| at_once(d.pinned_async::<u8>(100));
        "Device::host_slab", device => |d| at_once(d.host_slab::<u8>(10, 10));
        "Device::pinned_flag", device => |d| d.pinned_flag();
        "Device::memory", device => |d| d.memory();
        "DeviceTimeline::start", device => |d| d.timeline().start(10);
        "DeviceTimeline::start_sampled", device => |d| d.timeline().start_sampled(10, 2);
        "DeviceTimeline::snapshot", device => |d| d.timeline().snapshot();
        "Device::trim", device => |d| at_once(d.trim(0));
        "Device::reclaimed", device => |d| at_once(d.reclaimed(1));
        "Device::reserve", device => |d| at_once(d.reserve(1));
        "Device::try_reserve", device => |d| d.try_reserve(1);
        "Reserve::poll", device => |d| at_once(d.reserve(1));
        "Reservation::nested", reservation => |r| r.nested(1);
        "Stream::reclaimed", full => |s| at_once(s.reclaimed(1));
        "Device::trim_pinned", device => |d| at_once(d.trim_pinned(0));
        "Device::enable_peer", device => |d| at_once(d.enable_peer(&d));
        "Device::done", device => |d| d.done().submitted();
        "Device::all_done", device => |d| Device::all_done([&d]).submitted();
        "Device::synchronize", device => |d| d.synchronize();
        "Device::stream", device => |d| d.stream();
        "Device::reserve_partition", device => |d| at_once(d.reserve_partition(1));
        "Partition::stream", partition => |p| p.stream();
        "StreamBuilder::build", device => |d| d.stream_builder().name("never").build();
        "Device::thread_stream", device => |d| d.thread_stream();
        "Device::streams", device => |d| d.streams(2);
        "StreamPoolBuilder::build", device => |d| StreamPool::builder().streams(&d, 1).build();
        "StreamPool::move_to", moved => |p| p.0.move_to(&p.1);
        "EventBuilder::build", device => |d| d.event_builder().interprocess(true).build();
        // SAFETY: refused before anybody looks at the handle, and in `ONLY_WHERE_REFUSED`.
        "Device::import_event", device => |d| unsafe { d.import_event(&[0; 64]) };
    }
    let d = device.clone();
    list.refuses("Device::growable", move || at_once(d.growable::<u8>(8)));
    list.refuses("GrowableBuffer::grow", move || at_once(grows.grow(4 << 20)));
    let turn = reservation.clone();
    list.refuses("Reservation::grow", move || at_once(turn.grow(&mut drawn, 4 << 20)));
    list.refuses("GrowableBuffer::shrink", move || at_once(shrinks.shrink(0)));
    list.answers("GrowableBuffer::committed_bytes", move || {
        let whole = borrowed.committed_bytes();
        (whole, borrowed.view_mut().len(), borrowed.slice_mut(..1).map(|part| part.len()))
    });
    #[cfg(target_os = "linux")]
    {
        let (d, descriptors) = (device.clone(), shared_buffer.descriptors()?);
        list.refuses("Device::shared", move || at_once(d.shared::<u8>(8)));
        let d = device.clone();
        list.refuses("Device::import_shared", move || {
            at_once(d.import_shared::<u8>(&descriptors, 8, 1))
        });
        let d = device.clone();
        list.refuses("SharedBuffer::seal", move || at_once(shared_buffer.seal(&d, 1)));
    }
    each! { answers:
        "Device::stats", device => |d| d.stats();
        "Reservation::size_bytes", reservation => |r| r.size_bytes();
        "Reservation::left_bytes", reservation => |r| r.left_bytes();
        "Reservation::stream", drawing => |d| drop(d.0.stream(&d.1));
        "Reservation::shrink", reservation => |r| r.shrink(0);
        "Device::lost", device => |d| once(d.lost());
        "Loss::poll", device => |d| once(d.lost());
        "Device::legacy_stream", device => |d| drop(d.legacy_stream());
        "Device::event", device => |d| d.event();
        "Device::current_stream", device => |d| d.current_stream();
        "Device::with_default_stream", device => |d| drop(d.with_default_stream(&d.current_stream()));
    }

    // ---- streams --------------------------------------------------------------------------
    each! { refuses:
        // SAFETY: nothing is put on the stream.
        "Stream::lend_memory", full => |s| unsafe { s.lend_memory(Uses::new("none")) }.map(drop);
    }
    each! { answers:
        // SAFETY: it is not used.
        "Stream::lend_raw", full => |s| drop(unsafe { s.lend_raw() });
        // SAFETY: likewise.
        "Stream::lend_cudarc", full => |s| drop(unsafe { s.lend_cudarc() });
    }
    // ---- libraries --------------------------------------------------------------------------
    if let Ok(context) = device.cudarc_context() {
        each! { refuses:
            "Device::from_cudarc", context => |c| Device::from_cudarc(&c);
            "DeviceBuilder::from_cudarc", context => |c| Device::builder().from_cudarc(&c);
        }
        let theirs = context.default_stream();
        let buffer = buffer()?;
        let d = device.clone();
        list.refuses("Device::release_to_cudarc", move || {
            // SAFETY: refused.
            unsafe { d.release_to_cudarc(buffer, &theirs) }.map_err(gpu_await::Error::from)
        });
    }
    each! { refuses:
        "Stream::synchronize", full => |s| s.synchronize();
        "Stream::fork", full => |s| s.fork(2);
        "Stream::join", full => |s| s.join([&s.clone()]).queued();
        "Stream::join", idle => |s| s.join::<Stream>([]).queued();
        "Stream::is_non_blocking", full => |s| s.is_non_blocking();
        "Stream::pinned", full => |s| s.pinned::<u8>(100);
        "Stream::record_timed_async", full => |s| at_once(s.record_timed_async());
        "Stream::upload_staged", full => |s| at_once(s.upload_staged(vec![1u8; 100]));
        // SAFETY: refused before anybody looks at the handle, and in `ONLY_WHERE_REFUSED`.
        "Stream::from_raw", device => |d| unsafe { Stream::from_raw(&d, 77, ()) };
        "Scope::poll", device => |d| {
            let scoped = d.clone();
            at_once(d.default_stream().scope(async move { scoped.zeros::<u8>(1).queued() }))
        };
    }
    let (s, d) = (full.clone(), device.clone());
    list.refuses("Stream::scope_sync", move || s.scope_sync(|| d.zeros::<u8>(1).queued()));
    let (s, d) = (full.clone(), device.clone());
    list.refuses("Stream::scope", move || {
        at_once(s.scope(async move { d.zeros::<u8>(1).queued() }))
    });
    let (from, into, d) = (full.clone(), idle.clone(), device.clone());
    list.refuses("Stream::scope", move || {
        let inner = into.scope(async move { d.zeros::<u8>(1).queued() });
        at_once(from.scope_unordered(inner))
    });
    let (s, source) = (full.clone(), other.clone());
    list.refuses("Stream::download_staged", move || at_once(s.download_staged(&*source)));
    let (s, source) = (full.clone(), other.clone());
    list.refuses("Stream::download_staged_into", move || {
        at_once(s.download_staged_into(&*source, Vec::new()))
    });
    each! { answers:
        "Stream::done", full => |s| once(s.done());
        "Stream::done", idle => |s| assert!(s.done().is_complete());
        "Stream::is_idle", full => |s| assert!(!s.is_idle());
        "Stream::is_idle", shared => |s| assert!(!s.is_idle());
        "Stream::backlog", full => |s| assert!(s.backlog() > 0);
        "Stream::throttle", full => |s| once(Box::pin(s.throttle(0)));
        "Stream::device", full => |s| s.device();
    }

    // ---- verbs ----------------------------------------------------------------------------
    both!(refuses "Stream::batch" "Device::batch", s => s.batch(|q| q.zeros::<u8>(1)).queued());
    both!(refuses "Stream::replay" "Device::replay", s => s.replay(&mut gpu_await::Region::new(), |q| q.zeros::<u8>(1)).queued());
    let empty_graph = device.graph::<(gpu_await::InOut<f32>,), _, _>((), |_, (), _| Ok(()));
    both!(refuses "Graph::launch" "Device::graph", s, (graph, mut x) = (empty_graph.clone(), buffer()?) => graph.launch(&s, (&mut x,)).queued());
    both!(refuses "Stream::timed" "Device::timed", s => s.timed(|q| q.zeros::<u8>(1)).submitted());
    both!(refuses "Stream::upload" "Device::upload", s => s.upload(vec![1u8; 10]).queued());
    both!(refuses "Stream::upload" "Device::upload", s, p = pinned()? => s.upload(p).queued());
    both!(refuses "Stream::upload_from" "Device::upload_from", s => s.upload_from(&[1u8; 10]).queued());
    both!(refuses "Stream::upload_into" "Device::upload_into", s, (p, mut b) = (pinned()?, buffer()?) => s.upload_into(p, &mut b).submitted());
    both!(refuses "Stream::download" "Device::download", s, b = other.clone() => s.download(&*b).submitted());
    both!(refuses "Stream::download_into" "Device::download_into", s, (p, b) = (pinned()?, other.clone()) => s.download_into(&*b, p).submitted());
    both!(refuses "Stream::download_vec" "Device::download_vec", s, b = other.clone() => s.download_vec(&*b).submitted());
    both!(refuses "Stream::copy" "Device::copy", s, (b, mut to) = (other.clone(), buffer()?) => s.copy(&*b, &mut to).queued());
    both!(refuses "Stream::slab" "Device::slab", s => s.slab::<u8>(10, 10).queued());
    both!(refuses "Stream::copy_many" "Device::copy_many", s, (b, mut to) = (other.clone(), buffer()?) => s.copy_many(vec![(b.view(), to.view_mut())], CopyBy::Auto).queued());
    both!(refuses "Stream::copy_2d" "Device::copy_2d", s, (b, mut to) = (other.clone(), buffer()?) => s.copy_2d(&*b, &mut to, Copy2d::new(2, 2)).queued());
    both!(refuses "Stream::upload_2d" "Device::upload_2d", s, (p, mut to) = (pinned()?, buffer()?) => s.upload_2d(p, &mut to, Copy2d::new(2, 2)).submitted());
    both!(refuses "Stream::download_2d" "Device::download_2d", s, (b, p) = (other.clone(), pinned()?) => s.download_2d(&*b, p, Copy2d::new(2, 2)).submitted());
    both!(refuses "Stream::empty" "Device::empty", s => s.empty::<u8>(10).queued());
    both!(refuses "Stream::zeros" "Device::zeros", s => s.zeros::<u8>(10).queued());
    both!(refuses "Stream::zeros" "Device::zeros", s => s.zeros::<u8>(0).queued());
    both!(refuses "Stream::ones" "Device::ones", s => s.ones::<u8>(10).queued());
    both!(refuses "Stream::full" "Device::full", s => s.full(10, 7u8).queued());
    both!(refuses "Stream::full" "Device::full", s => s.full(usize::MAX / 2, 7u8).queued());
    both!(refuses "Stream::fill" "Device::fill", s, mut b = buffer()? => s.fill(&mut b, 1.0).queued());
    both!(refuses "Stream::host_fn" "Device::host_fn", s => s.host_fn(|| ()).queued());
    // SAFETY: it is not used, and refused first.
    both!(refuses "Stream::adopt_memory" "Device::adopt_memory", s => unsafe { s.adopt_memory::<u8>(0, 0, ()) });
    // Of work behind the host function.
    let mut outcome = None;
    let keep = |queue: &RawQueue<'_>, ()| {
        outcome = Some(queue.outcome()?);
        Ok::<_, Error>(())
    };
    // SAFETY: nothing is put on the stream.
    unsafe { full.enqueue(Uses::new("outcome"), keep) }.queued()?;
    let outcome = outcome.expect("it was called");
    list.answers("WorkOutcome::is_complete", move || outcome.is_complete());
    // SAFETY: nothing is put on the stream.
    both!(refuses "Stream::enqueue" "Device::enqueue", s => unsafe { s.enqueue(Uses::new("none"), nothing) }.queued());
    both!(refuses "Stream::record" "Device::record", s => s.record());
    both!(refuses "Stream::record_timed" "Device::record_timed", s => s.record_timed());
    both!(refuses "Stream::wait" "Device::wait", s, on = full.clone() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = event.clone() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = pending() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = device.event() => s.wait(&on).queued());

    // ---- batches --------------------------------------------------------------------------
    queue!("Queue::upload", q => q.upload(vec![1u8; 10]));
    queue!("Queue::upload_from", q => q.upload_from(&[1u8; 10]));
    queue!("Queue::upload_into", q, (p, mut b) = (pinned()?, buffer()?) => q
        .upload_into(p, &mut b));
    queue!("Queue::download", q, b = other.clone() => q.download(&*b));
    queue!("Queue::download_into", q, (b, p) = (other.clone(), pinned()?) => q
        .download_into(&*b, p));
    queue!("Queue::download_vec", q, b = other.clone() => q.download_vec(&*b));
    queue!("Queue::copy", q, (b, mut to) = (other.clone(), buffer()?) => q.copy(&*b, &mut to));
    queue!("Queue::slab", q => q.slab::<u8>(10, 10));
    queue!("Queue::copy_many", q, (b, mut to) = (other.clone(), buffer()?) => q
        .copy_many(vec![(b.view(), to.view_mut())], CopyBy::Kernel));
    queue!("Queue::copy_2d", q, (b, mut to) = (other.clone(), buffer()?) => q.copy_2d(
        &*b,
        &mut to,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::upload_2d", q, (p, mut to) = (pinned()?, buffer()?) => q.upload_2d(
        p,
        &mut to,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::download_2d", q, (b, p) = (other.clone(), pinned()?) => q.download_2d(
        &*b,
        p,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::empty", q => q.empty::<u8>(10));
    queue!("Queue::zeros", q => q.zeros::<u8>(10));
    queue!("Queue::ones", q => q.ones::<u8>(10));
    queue!("Queue::full", q => q.full(10, 7u8));
    queue!("Queue::fill", q, mut b = buffer()? => q.fill(&mut b, 1.0));
    queue!("Queue::host_fn", q => q.host_fn(|| ()));
    // SAFETY: nothing is put on the stream.
    queue!("Queue::enqueue", q => unsafe { q.enqueue(Uses::new("none"), nothing) });
    queue!("Queue::record_timed", q => q.record_timed());

    // ---- operations -----------------------------------------------------------------------
    let op = pending();
    list.answers("Op::poll", move || once(op));
    let op = idle.done();
    list.answers("Op::poll", move || drop(at_once(op)));
    let op = pending();
    list.answers("Op::is_complete", move || assert!(!op.is_complete()));
    let mut op = pending();
    list.answers("Op::try_take", move || assert!(op.try_take().is_none()));
    let op = pending();
    list.refuses("Op::synchronize", move || op.synchronize());
    let op = pending();
    list.answers("Op::queued", move || drop(op.queued()));
    let op = pending();
    list.answers("Op::submitted", move || drop(op.submitted()));
    let op = idle.upload_into(idle.pinned::<f32>(8)?, &mut idle.zeros::<f32>(8).queued()?);
    list.answers("Op::accepted", move || drop(op.accepted().map_err(gpu_await::Error::from)));
    let op = idle.upload_into(idle.pinned::<f32>(8)?, &mut idle.zeros::<f32>(8).queued()?);
    list.answers("Op::without_value", move || drop(op.without_value()));
    let op = pending();
    list.answers("Op::abandon", move || op.abandon());
    let op = pending();
    list.answers("Op::map_value", move || once(op.map_value(drop)));
    let (a, b) = (pending(), pending());
    list.answers("Op::and", move || once(a.and(b)));
    let ops = [pending(), pending()];
    list.answers("join::join_all", move || once(join_all(ops)));

    // ---- events ---------------------------------------------------------------------------
    each! { refuses:
        "Event::synchronize", event => |e| e.synchronize();
        "Event::export", event => |e| e.export();
    }
    let (e, s) = (device.event(), full.clone());
    list.refuses("Event::record", move || e.record(&s));
    let (e, s) = (device.event_builder().timed(true).build()?, full.clone());
    list.refuses("Event::record", move || e.record(&s));
    for event in [device.event(), device.event_builder().timed(true).build()?] {
        queue!("Event::record_in", q, event = event => event.record_in(q));
    }
    list.refuses("Event::elapsed_since", move || end.elapsed_since(&start));
    each! { answers:
        "Event::done", event => |e| once(e.done());
        "Event::is_complete", event => |e| assert!(!e.is_complete());
    }
    if is_cuda && let Ok(event) = device.event_builder().interprocess(true).build() {
        event.record(full)?;
        each! { answers:
            "Event::is_complete", event => |e| assert!(!e.is_complete());
        }
        each! { refuses:
            "Event::done", event => |e| e.done().submitted();
            "Event::export", event => |e| e.export();
        }
    }

    // ---- memory ---------------------------------------------------------------------------
    let b = buffer()?;
    list.refuses("DeviceBuffer::into_dlpack", move || {
        b.into_dlpack(&[8], DlpackConsumer::Synchronized).map(drop).map_err(Error::from)
    });
    let p = device.pinned::<f32>(8)?;
    list.refuses("PinnedBuffer::into_dlpack", move || {
        p.into_dlpack(&[8], DlpackConsumer::Synchronized).map(drop).map_err(Error::from)
    });
    let tensor = || -> Result<DlpackTensor> {
        Ok(idle.zeros::<u8>(4).queued()?.into_dlpack(&[4], DlpackConsumer::Synchronized)?)
    };
    let (s, t) = (full.clone(), tensor()?);
    list.refuses("Stream::adopt_dlpack", move || {
        // SAFETY: refused, or dropped.
        unsafe { s.adopt_dlpack::<u8>(t) }.map(drop).map_err(Error::from)
    });
    let (s, t) = (full.clone(), tensor()?);
    list.refuses("Stream::adopt_dlpack_frozen", move || {
        // SAFETY: likewise.
        at_once(unsafe { s.adopt_dlpack_frozen::<u8>(t) })
    });
    let d = device.clone();
    list.refuses("DlpackConsumer::from_argument", move || {
        // SAFETY: no stream is adopted but the legacy default stream.
        unsafe { DlpackConsumer::from_argument(&d, None) }
    });
    let b = buffer()?;
    list.answers("DeviceBuffer::freeze", move || once(b.freeze()));
    let p = device.pinned::<f32>(8)?;
    list.answers("PinnedBuffer::into_mapped", move || p.into_mapped());
    let mapped = || -> Result<Mapped<f32>> { Ok(device.pinned(8)?.into_mapped()) };
    let (mut m, pending) = (mapped()?, mapped()?);
    list.answers("Mapped::host", move || once(Box::pin(m.host())));
    list.answers("Mapped::into_pinned", move || once(pending.into_pinned()));
    let slab = || futures::executor::block_on(device.host_slab::<f32>(8, 8));
    let (mut a, mut b) = (slab()?, slab()?);
    // Of one block a use is pending.
    full.fill(&mut a.block_mut(1)?, 1.0).queued()?;
    list.answers("HostSlab::host", move || {
        once(Box::pin(a.host(1)));
        a.try_host(1).is_ok()
    });
    list.answers("HostSlab::host_mut", move || once(Box::pin(b.host_mut(1))));
    let (mut a, mut b) = (slab()?, slab()?);
    full.fill(&mut a.block_mut(1)?, 1.0).queued()?;
    full.fill(&mut b.block_mut(1)?, 1.0).queued()?;
    list.answers("HostSlab::idle", move || once(a.idle(1)));
    list.answers("HostSlab::try_host", move || b.try_host(1).is_ok_and(|block| block.is_none()));
    let mut b = slab()?;
    full.fill(&mut b.block_mut(1)?, 1.0).queued()?;
    list.answers("HostSlab::try_host_mut", move || {
        b.try_host_mut(1).is_ok_and(|block| block.is_none())
    });
    let (s, b) = (full.clone(), buffer()?);
    list.refuses("BlockTable::new", move || BlockTable::new(&s, vec![b.view()]).map(drop));
    let (s, mut b) = (full.clone(), buffer()?);
    list.refuses("BlockTableMut::new", move || {
        BlockTableMut::new(&s, vec![b.view_mut()]).map(drop)
    });
    let f = frozen.clone();
    list.answers("Frozen::view", move || f.view().len());

    // ---- kernels --------------------------------------------------------------------------
    let d = device.clone();
    list.refuses("kernel!::load", move || at_once(kernels::empty::load(&d)));
    let d = device.clone();
    list.refuses("kernel!::load_blocking", move || kernels::empty::load_blocking(&d));
    let (k, s, mut b) = (scale.clone(), full.clone(), buffer()?);
    list.refuses("kernel!::launch", move || k.launch(&s, 2.0, &mut b).queued());
    if let Some(double) = &double {
        macro_rules! launch {
            ($name:literal, $on:ident) => {
                let (k, s, mut b) = (double.clone(), $on.clone(), buffer()?);
                list.refuses($name, move || {
                    s.launch(&k, LaunchConfig::new(1, 1), (&mut b,)).queued()
                });
            };
        }
        launch!("Stream::launch", full);
        launch!("Device::launch", device);
        let (k, s, mut b) = (double.clone(), full.clone(), buffer()?);
        list.refuses("Queue::launch", move || {
            s.batch(|q| q.launch(&k, LaunchConfig::new(1, 1), (&mut b,))).queued()
        });
        let d = device.clone();
        list.answers("Kernel::host", move || {
            drop(Kernel::<()>::host(&d, "nothing", |_: &gpu_await::Grid| {}));
        });
    }
    let (k, d) = (scale.clone(), device.clone());
    list.refuses("Occupancy::active_blocks", move || k.occupancy().active_blocks(32, 0));
    let k = scale.clone();
    list.refuses("Occupancy::resident_blocks", move || {
        k.occupancy().resident_blocks(&LaunchConfig::new(1, 32))
    });
    let k = scale.clone();
    list.refuses("Occupancy::best_block", move || k.occupancy().best_block(|_| 0, None));
    let k = scale.clone();
    list.refuses("Occupancy::config_for_elements", move || k.occupancy().config_for_elements(100));
    list.refuses("Module::load", {
        let d = d.clone();
        move || at_once(Module::load(&d, Image::ptx("")))
    });
    list.refuses("Module::load_blocking", {
        let d = d.clone();
        move || Module::load_blocking(&d, Image::ptx(""))
    });
    list.refuses("Module::compile", move || at_once(Module::compile(&d, CudaSource::new(""))));
    if let Some(module) = module {
        // SAFETY: refused before the kernel is looked up.
        list.refuses("Module::kernel", move || unsafe { module.kernel::<(u64,)>("spin") });
    }

    // ---- pools and batchers ---------------------------------------------------------------
    let held = pool.try_acquire()?;
    each! { answers:
        "StreamPool::acquire", pool => |p| once(p.acquire());
        "StreamPool::acquire_by", pool => |p| once(p.acquire_by(Instant::now()));
        "Acquire::poll", pool => |p| once(p.acquire());
        "StreamPool::try_acquire", pool => |p| drop(p.try_acquire());
        "StreamPool::drained", pool => |p| once(p.drained());
        "Drained::poll", pool => |p| once(p.drained());
        "StreamPool::drained_within", pool => |p| once(p.drained_within(Duration::from_secs(1)));
        "DrainedWithin::poll", pool => |p| once(p.drained_within(Duration::from_secs(1)));
        "StreamPool::stats", pool => |p| p.stats();
        "StreamPool::close", pool => |p| p.close();
    }
    list.answers("PooledStream::drop", move || drop((held, pooled)));
    let free = StreamPool::builder().streams(device, 1).build()?;
    let service = move || {
        free.service(|stream: PooledStream, ()| async move { stream.zeros::<u8>(1).queued() })
    };
    let (mut waiting, mut called, mut polled) = (service(), service(), service());
    list.answers("StreamPool::service", service);
    list.answers("PoolService::poll_ready", move || {
        drop(waiting.poll_ready(&mut Context::from_waker(Waker::noop())));
    });
    list.answers("PoolService::call", move || drop(called.call(())));
    list.refuses("PoolCall::poll", move || at_once(polled.call(())));
    let (batcher, worker) = Batcher::builder().build(|numbers: Vec<u32>| async move {
        Ok::<_, Error>(numbers.into_iter().map(Ok).collect())
    });
    each! { answers:
        "Batcher::call", batcher => |b| b.call(1);
        "Batcher::call_by", batcher => |b| b.call_by(1, Instant::now());
        "Call::poll", batcher => |b| once(b.call(1));
        "Batcher::stats", batcher => |b| b.stats();
        "Batcher::service", batcher => |b| b.service();
        "BatchService::poll_ready", batcher => |b| {
            drop(b.service().poll_ready(&mut Context::from_waker(Waker::noop())));
        };
        "BatchService::call", batcher => |b| {
            let mut service = b.service();
            drop(service.poll_ready(&mut Context::from_waker(Waker::noop())));
            once(service.call(1));
        };
    }
    list.answers("BatchWorker::poll", move || once(worker));

    // ---- testing --------------------------------------------------------------------------
    let gate = Gate::close(&device.stream()?)?;
    each! { refuses:
        "Gate::close", full => |s| Gate::close(&s);
        "Gate::close_for", full => |s| Gate::close_for(&s, SOON);
    }
    list.answers("Gate::open", move || gate.open());
    let (manual, stepper) = testing::manual();
    let op = manual.default_stream().zeros::<u8>(10);
    let stepper = Arc::new(stepper);
    each! { answers:
        "Stepper::step", stepper => |s| assert!(!s.step(0) || is_a_poller());
        "Stepper::run_until_idle", stepper => |s| s.run_until_idle();
    }
    list.answers("Op::drop", move || drop((op, manual)));
    drops(&mut list, world)?;
    // Last: a device that is closed refuses everything.
    each! { refuses:
        "Device::close", device => |d| at_once(d.close(Duration::from_secs(1)));
    }
    assert!(list.names().len() > 150, "the list is short");
    Ok(list)
}

/// A stream that others use as well, with work that waits for `full`.
fn unshared(device: &Device, full: &Stream) -> Result<Stream> {
    let stream = device.stream()?;
    // SAFETY: nobody uses the handle.
    let _handle = unsafe { stream.as_raw() };
    stream.wait(full).queued()?;
    Ok(stream)
}

/// The drop of each kind of handle: of the last one, with work pending.
fn drops(list: &mut Methods, World { device, full, .. }: &World) -> Result<()> {
    let stream = || -> Result<Stream> {
        let stream = device.stream()?;
        stream.wait(full).queued()?;
        Ok(stream)
    };
    let op = |op: Op<_>| op;
    let last = stream()?;
    drop(last.zeros::<u8>(100).queued()?);
    list.answers("Stream::drop", move || drop(last));
    let buffer = stream()?.zeros::<u8>(100).queued()?;
    list.answers("DeviceBuffer::drop", move || drop(buffer));
    let mut crossed = stream()?.zeros::<u8>(5000).queued()?;
    stream()?.fill(&mut crossed, 1).queued()?;
    list.answers("DeviceBuffer::drop", move || drop(crossed));
    let download = stream()?.batch(|q| q.download(&q.zeros::<u8>(100)?));
    list.answers("Op::drop", move || drop(op(download)));
    let event: Event = stream()?.record()?;
    list.answers("Event::drop", move || drop(event));
    let timed = stream()?.record_timed()?;
    list.answers("Event::drop", move || drop(timed));
    let pinned = device.pinned::<u8>(100)?;
    list.answers("PinnedBuffer::drop", move || drop(pinned));
    let flag = device.pinned_flag()?;
    list.answers("PinnedFlag::drop", move || drop(flag));
    Ok(())
}
