//! Every public call that takes what a device made, tried with what another device made.
//!
//! [`PROBES`] is the list; `tests/errors/foreign_handles.rs` compares it with the public functions in `src`, so
//! that a new one is tried as well. Each probe is documented to work, or a typed error without an
//! operation: no driver call sees a handle or an address of another device.
#![allow(dead_code, reason = "each test uses a part of it")]

use futures::executor::block_on;
use gpu_await::{
    BlockTable, Copy2d, CopyBy, Device, DeviceBuffer, DeviceKind, DlpackConsumer, Error,
    ErrorDetail, Event, Kernel, LaunchConfig, PinnedBuffer, RawQueue, Result, Stream, Uses,
    kernels,
};

pub(crate) const LEN: usize = 64;

/// What a call makes of a handle of another device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is documented to work.
    Works,
    /// [`ErrorDetail::WrongDevice`].
    WrongDevice,
    /// It works for devices of one kind, and is [`ErrorDetail::WrongDevice`] between kinds.
    OfItsKind,
    /// It works for devices of one kind, and is [`ErrorDetail::Unsupported`] between kinds.
    WaitsForItsKind,
    /// The same, but of one GPU it must be.
    WaitsForItsGpu,
}
use Outcome::{OfItsKind, WaitsForItsGpu, WaitsForItsKind, Works, WrongDevice};

/// A stream of one device, and another device with a stream.
pub(crate) struct Pair {
    pub(crate) ours: Device,
    pub(crate) theirs: Device,
    pub(crate) stream: Stream,
    pub(crate) elsewhere: Stream,
}

/// The public functions that a probe calls, what must come of it, and the call.
pub(crate) struct Probe {
    pub(crate) calls: &'static [&'static str],
    pub(crate) outcome: Outcome,
    pub(crate) run: fn(&Pair) -> Result<()>,
}

impl Pair {
    pub(crate) fn new(ours: &Device, theirs: &Device) -> Pair {
        let (stream, elsewhere) = (ours.stream().unwrap(), theirs.stream().unwrap());
        Pair { ours: ours.clone(), theirs: theirs.clone(), stream, elsewhere }
    }

    fn same_kind(&self) -> bool {
        self.ours.kind() == self.theirs.kind()
    }

    pub(crate) fn buffer(&self) -> DeviceBuffer<f32> {
        self.stream.full(LEN, 1.0).queued().unwrap()
    }

    pub(crate) fn their_buffer(&self) -> DeviceBuffer<f32> {
        self.elsewhere.full(LEN, 2.0).synchronize().unwrap()
    }

    fn pinned(&self) -> PinnedBuffer<f32> {
        self.ours.pinned(LEN).unwrap()
    }

    fn their_pinned(&self) -> PinnedBuffer<f32> {
        self.theirs.pinned(LEN).unwrap()
    }

    fn axpy(&self) -> kernels::axpy {
        kernels::axpy::load_blocking(&self.ours).unwrap()
    }

    fn their_axpy(&self) -> kernels::axpy {
        kernels::axpy::load_blocking(&self.theirs).unwrap()
    }

    fn of_two_gpus(&self) -> bool {
        self.ours.kind() == DeviceKind::Cuda && self.ours.to_string() != self.theirs.to_string()
    }

    /// Tries everything, and says what went wrong.
    pub(crate) fn complaints(&self) -> Vec<String> {
        self.complaints_of(PROBES)
    }

    /// Tries these, and says what went wrong.
    pub(crate) fn complaints_of(&self, probes: &[Probe]) -> Vec<String> {
        let expected = |outcome| match (outcome, self.same_kind()) {
            (WaitsForItsGpu, true) if self.of_two_gpus() => WrongDevice,
            (OfItsKind | WaitsForItsKind | WaitsForItsGpu, true) | (Works, _) => Works,
            (OfItsKind, false) | (WrongDevice, _) => WrongDevice,
            (WaitsForItsKind | WaitsForItsGpu, false) => WaitsForItsKind,
        };
        let wrong = probes.iter().enumerate().filter_map(|(number, probe)| {
            let result = (probe.run)(self);
            let found = match result.as_ref().map_err(Error::detail) {
                Ok(()) => Works,
                Err(ErrorDetail::WrongDevice { .. }) => WrongDevice,
                Err(ErrorDetail::Unsupported { .. }) => WaitsForItsKind,
                Err(other) => return Some(format!("probe {number}, {:?}: {other}", probe.calls)),
            };
            let expected = expected(probe.outcome);
            let calls = probe.calls;
            (found != expected).then(|| {
                let (ours, theirs) = (&self.ours, &self.theirs);
                format!("probe {number}, {calls:?} on {ours} with what {theirs} made: {found:?}, expected {expected:?}")
            })
        });
        let mut complaints: Vec<String> = wrong.collect();
        for stream in [&self.stream, &self.elsewhere] {
            if let Err(error) = stream.synchronize() {
                complaints.push(format!("afterwards: {error}"));
            }
        }
        complaints
    }

    /// Submits, and sees to it that a refused call put nothing on the stream.
    pub(crate) fn tries(&self, submit: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let before = self.stream.submitted();
        let result = submit(&self.stream);
        if result.is_err() {
            assert_eq!(self.stream.submitted(), before, "refused, and yet on the stream");
        }
        result
    }
}

/// What comes of calls that are each to be refused: the first that is not, or else the first. With `?` behind each
/// call those behind the first refusal would not be tried.
pub(crate) fn each(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let refused = |result: &Result<()>| {
        let error = result.as_ref().err();
        error.is_some_and(|error| matches!(error.detail(), ErrorDetail::WrongDevice { .. }))
    };
    let results: Vec<Result<()>> = results.into_iter().collect();
    let at = results.iter().position(|result| !refused(result)).unwrap_or(0);
    results.into_iter().nth(at).expect("a call")
}

/// A kernel that its preconditions hold for everything that is passed here.
fn raw(axpy: &kernels::axpy) -> &Kernel<(f32, gpu_await::In<f32>, gpu_await::InOut<f32>, u64)> {
    // SAFETY: launched with the length of its arrays, or refused.
    unsafe { axpy.kernel() }
}

fn rows() -> Copy2d {
    Copy2d::new(LEN / 4, 4)
}

fn config() -> LaunchConfig {
    LaunchConfig::for_elements(LEN)
}

/// Launches with one argument of the other device.
fn launch_gate(pair: &Pair) -> Result<()> {
    let gate = kernels::gate::load_blocking(&pair.ours)?;
    let flag = pair.theirs.pinned_flag()?;
    flag.set(1);
    pair.tries(|stream| gate.launch(stream, &flag, 1000).queued())
}

fn waits_for(pair: &Pair, event: Result<Event>) -> Result<()> {
    let event = event?;
    pair.stream.wait(&event).queued()
}

/// The driver's own event, where the other device has such.
fn shared(pair: &Pair) -> Option<Result<Event>> {
    let event = pair.theirs.event_builder().interprocess(true).build();
    let there = pair.theirs.kind() == DeviceKind::Cuda || !pair.same_kind();
    there.then_some(event)
}

/// What another library does that does nothing.
fn nothing<P>(_: &RawQueue<'_>, _: P) -> Result<()> {
    Ok(())
}

pub(crate) const PROBES: &[Probe] = &[
    // ---- other libraries ----------------------------------------------------------------------
    Probe {
        calls: &["enqueue", "reads"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            // SAFETY: nothing is put on the stream.
            pair.tries(|s| unsafe { s.enqueue(Uses::new("none").reads(&x), nothing) }.queued())
        },
    },
    Probe {
        calls: &["enqueue", "writes"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.their_buffer();
            // SAFETY: nothing is put on the stream.
            pair.tries(|s| unsafe { s.enqueue(Uses::new("none").writes(&mut x), nothing) }.queued())
        },
    },
    Probe {
        calls: &["enqueue", "updates"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.their_buffer();
            pair.tries(|s| {
                // SAFETY: nothing is put on the stream.
                unsafe { s.enqueue(Uses::new("none").updates(&mut x), nothing) }.queued()
            })
        },
    },
    Probe {
        calls: &["enqueue", "lends"],
        outcome: WrongDevice,
        run: |pair| {
            let pinned = pair.their_pinned();
            // SAFETY: nothing is put on the stream.
            pair.tries(|s| unsafe { s.enqueue(Uses::new("none").lends(&pinned), nothing) }.queued())
        },
    },
    Probe {
        calls: &["lend_memory", "reads"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            // SAFETY: nothing is put on the stream.
            pair.tries(|s| unsafe { s.lend_memory(Uses::new("none").reads(&x)) }.map(drop))
        },
    },
    Probe {
        calls: &["lend_memory", "lends"],
        outcome: WrongDevice,
        run: |pair| {
            let pinned = pair.their_pinned();
            // SAFETY: nothing is put on the stream.
            pair.tries(|s| unsafe { s.lend_memory(Uses::new("none").lends(&pinned)) }.map(drop))
        },
    },
    Probe {
        calls: &["into_dlpack"],
        outcome: WrongDevice,
        run: |pair| {
            let consumer = DlpackConsumer::Stream(pair.elsewhere.clone());
            Ok(pair.buffer().into_dlpack(&[LEN], consumer).map(drop)?)
        },
    },
    Probe {
        calls: &["into_dlpack"],
        outcome: WrongDevice,
        run: |pair| {
            let consumer = DlpackConsumer::Stream(pair.elsewhere.clone());
            Ok(pair.pinned().into_dlpack(&[LEN], consumer).map(drop)?)
        },
    },
    // ---- host memory ------------------------------------------------------------------------
    Probe {
        calls: &["upload", "batch"],
        outcome: WrongDevice,
        run: |pair| {
            each([
                pair.tries(|stream| stream.upload(pair.their_pinned()).queued().map(drop)),
                pair.tries(|stream| {
                    stream.batch(|q| Ok(q.upload(pair.their_pinned())?)).queued().map(drop)
                }),
            ])
        },
    },
    Probe {
        calls: &["upload_staged"],
        outcome: WrongDevice,
        run: |pair| {
            pair.tries(|stream| block_on(stream.upload_staged(pair.their_pinned())).map(drop))
        },
    },
    Probe {
        calls: &["upload_into"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.buffer();
            pair.tries(|stream| {
                stream.upload_into(pair.their_pinned(), &mut x).synchronize().map(drop)
            })
        },
    },
    Probe {
        calls: &["upload_into"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.their_buffer();
            let pinned = pair.pinned();
            pair.tries(|stream| stream.upload_into(pinned, &mut x).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download_into"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.buffer();
            pair.tries(|stream| {
                stream.download_into(&x, pair.their_pinned()).synchronize().map(drop)
            })
        },
    },
    Probe {
        calls: &["download_into"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, pinned) = (pair.their_buffer(), pair.pinned());
            pair.tries(|stream| stream.download_into(&x, pinned).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["upload_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.buffer();
            let pinned = pair.their_pinned();
            pair.tries(|stream| stream.upload_2d(pinned, &mut x, rows()).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["upload_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.their_buffer();
            let pinned = pair.pinned();
            pair.tries(|stream| stream.upload_2d(pinned, &mut x, rows()).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, pinned) = (pair.buffer(), pair.their_pinned());
            pair.tries(|stream| stream.download_2d(&x, pinned, rows()).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, pinned) = (pair.their_buffer(), pair.pinned());
            pair.tries(|stream| stream.download_2d(&x, pinned, rows()).synchronize().map(drop))
        },
    },
    // ---- device memory ----------------------------------------------------------------------
    Probe {
        calls: &["download"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            pair.tries(|stream| stream.download(&x).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            // SAFETY: nothing writes it, and it outlives the call, which is refused.
            let view = unsafe { x.view().untracked() };
            pair.tries(|stream| stream.download(&view).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download"],
        outcome: WrongDevice,
        run: |pair| {
            let frozen = pair.their_buffer().freeze().synchronize()?;
            each([
                pair.tries(|stream| stream.download(&frozen).synchronize().map(drop)),
                pair.tries(|stream| stream.download(&frozen.slice(..5)?).synchronize().map(drop)),
            ])
        },
    },
    Probe {
        calls: &["download_vec"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            pair.tries(|stream| stream.download_vec(&x).synchronize().map(drop))
        },
    },
    Probe {
        calls: &["download_staged"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            pair.tries(|stream| block_on(stream.download_staged(&x)).map(drop))
        },
    },
    Probe {
        calls: &["download_staged_into"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            pair.tries(|stream| block_on(stream.download_staged_into(&x, Vec::new())).map(drop))
        },
    },
    Probe {
        calls: &["fill"],
        outcome: WrongDevice,
        run: |pair| {
            let mut x = pair.their_buffer();
            pair.tries(|stream| stream.fill(&mut x, 3.0).queued())
        },
    },
    Probe {
        calls: &["copy"],
        outcome: OfItsKind,
        run: |pair| {
            let (x, mut y) = (pair.their_buffer(), pair.buffer());
            let frozen = pair.their_buffer().freeze().synchronize()?;
            pair.tries(|stream| stream.copy(&x, &mut y).queued())?;
            pair.tries(|stream| stream.copy(&frozen, &mut y).queued())?;
            assert_eq!(pair.stream.download(&y).synchronize()?, [2.0; LEN]);
            Ok(())
        },
    },
    Probe {
        calls: &["copy"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.buffer(), pair.their_buffer());
            pair.tries(|stream| stream.copy(&x, &mut y).queued())
        },
    },
    Probe {
        calls: &["copy_many"],
        outcome: OfItsKind,
        run: |pair| {
            let (x, mut y) = (pair.their_buffer(), pair.buffer());
            pair.tries(|stream| {
                stream.copy_many(vec![(x.view(), y.view_mut())], CopyBy::Auto).queued()
            })?;
            assert_eq!(pair.stream.download(&y).synchronize()?, [2.0; LEN]);
            Ok(())
        },
    },
    Probe {
        calls: &["copy_many"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.buffer(), pair.their_buffer());
            pair.tries(|stream| {
                stream.copy_many(vec![(x.view(), y.view_mut())], CopyBy::Auto).queued()
            })
        },
    },
    Probe {
        calls: &["new"],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.their_buffer();
            pair.tries(|stream| BlockTable::new(stream, vec![x.view()]).map(drop))
        },
    },
    Probe {
        calls: &["copy_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.their_buffer(), pair.buffer());
            pair.tries(|stream| stream.copy_2d(&x, &mut y, rows()).queued())
        },
    },
    Probe {
        calls: &["copy_2d"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.buffer(), pair.their_buffer());
            pair.tries(|stream| stream.copy_2d(&x, &mut y, rows()).queued())
        },
    },
    // ---- launches ---------------------------------------------------------------------------
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let (axpy, x, mut y) = (pair.their_axpy(), pair.buffer(), pair.buffer());
            pair.tries(|stream| axpy.launch(stream, 1.0, &x, &mut y).queued())
        },
    },
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let (axpy, x, mut y) = (pair.their_axpy(), pair.buffer(), pair.buffer());
            let args = (1.0, &x, &mut y, LEN as u64);
            pair.tries(|stream| stream.launch(raw(&axpy), config(), args).queued())
        },
    },
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let (axpy, x, mut y) = (pair.axpy(), pair.their_buffer(), pair.buffer());
            pair.tries(|stream| axpy.launch(stream, 1.0, &x, &mut y).queued())
        },
    },
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let (axpy, mut y) = (pair.axpy(), pair.buffer());
            let frozen = pair.their_buffer().freeze().synchronize()?;
            pair.tries(|stream| axpy.launch(stream, 1.0, &frozen, &mut y).queued())
        },
    },
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let (axpy, x, mut y) = (pair.axpy(), pair.buffer(), pair.their_buffer());
            pair.tries(|stream| axpy.launch(stream, 1.0, &x, &mut y.view_mut()).queued())
        },
    },
    Probe {
        calls: &["launch"],
        outcome: WrongDevice,
        run: |pair| {
            let fill = kernels::fill::load_blocking(&pair.ours)?;
            let mut x = pair.their_buffer();
            pair.tries(|stream| fill.launch(stream, 1.0, &mut x).queued())
        },
    },
    Probe { calls: &["launch"], outcome: WrongDevice, run: launch_gate },
    Probe {
        calls: &["launch", "streams", "try_acquire"],
        outcome: WrongDevice,
        run: |pair| {
            // A pool of both devices lends a stream of either.
            let pool = gpu_await::StreamPool::builder();
            let pool = pool.streams(&pair.theirs, 1).streams(&pair.ours, 1).build()?;
            let streams = [pool.try_acquire()?, pool.try_acquire()?];
            let axpy = pair.axpy();
            let results = streams.iter().map(|stream| {
                let (x, mut y) = (stream.full(LEN, 1.0).queued()?, stream.full(LEN, 1.0).queued()?);
                axpy.launch(stream, 1.0, &x, &mut y).queued()
            });
            let results: Vec<Result<()>> = results.collect();
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
            results.into_iter().collect()
        },
    },
    // ---- order ------------------------------------------------------------------------------
    Probe {
        calls: &["wait"],
        outcome: WaitsForItsKind,
        run: |pair| pair.tries(|stream| stream.wait(&pair.elsewhere).queued()),
    },
    Probe {
        calls: &["wait"],
        outcome: WaitsForItsKind,
        run: |pair| pair.tries(|_| waits_for(pair, pair.elsewhere.record())),
    },
    Probe {
        calls: &["wait"],
        outcome: WaitsForItsKind,
        run: |pair| pair.tries(|_| waits_for(pair, pair.elsewhere.record_timed())),
    },
    Probe {
        calls: &["wait"],
        outcome: WaitsForItsGpu,
        run: |pair| match shared(pair) {
            None => Ok(()),
            Some(event) => pair.tries(|_| waits_for(pair, event)),
        },
    },
    Probe {
        calls: &["wait"],
        outcome: WaitsForItsKind,
        run: |pair| {
            let op = pair.elsewhere.full(LEN, 1.0f32);
            pair.tries(|stream| stream.wait(&op).queued())
        },
    },
    Probe {
        calls: &["join"],
        outcome: WaitsForItsKind,
        run: |pair| {
            let both = [pair.elsewhere.record()?, pair.ours.stream()?.record()?];
            pair.tries(|stream| stream.join(&both).queued())
        },
    },
    Probe {
        calls: &["record"],
        outcome: WrongDevice,
        run: |pair| {
            let events =
                [false, true].map(|timed| pair.theirs.event_builder().timed(timed).build());
            let refused = events.into_iter().chain(shared(pair).filter(Result::is_ok));
            each(refused.map(|event| pair.tries(|stream| event?.record(stream))))
        },
    },
    Probe {
        calls: &["elapsed_since"],
        outcome: WrongDevice,
        run: |pair| {
            let (start, end) = (pair.elsewhere.record_timed()?, pair.stream.record_timed()?);
            start.synchronize()?;
            end.synchronize()?;
            end.elapsed_since(&start).map(drop)
        },
    },
    Probe {
        calls: &["stream"],
        outcome: WrongDevice,
        run: |pair| pair.ours.try_reserve(512)?.stream(&pair.elsewhere).map(drop),
    },
    Probe {
        calls: &["with_default_stream"],
        outcome: WrongDevice,
        run: |pair| pair.ours.with_default_stream(&pair.elsewhere).map(drop),
    },
    Probe {
        calls: &["scope", "scope_sync", "scope_unordered"],
        outcome: Works,
        run: |pair| {
            // A stream of another device is nobody's current one here.
            let ours = || assert_eq!(pair.ours.current_stream(), *pair.ours.default_stream());
            pair.elsewhere.scope_sync(ours);
            block_on(pair.elsewhere.scope(async { ours() }));
            block_on(pair.elsewhere.scope_unordered(async { ours() }));
            Ok(())
        },
    },
    // ---- both devices -----------------------------------------------------------------------
    Probe {
        calls: &["enable_peer"],
        outcome: Works,
        run: |pair| {
            let reaches = block_on(pair.ours.enable_peer(&pair.theirs))?;
            assert!(pair.same_kind() || !reaches);
            Ok(())
        },
    },
    #[cfg(all(target_os = "linux", not(miri)))]
    Probe {
        calls: &["seal"],
        outcome: WrongDevice,
        run: |pair| {
            let mut buffer = block_on(pair.theirs.shared::<u32>(8))?;
            pair.theirs.fill(&mut buffer, 1).queued()?;
            block_on(buffer.seal(&pair.ours, 1)).map(drop)
        },
    },
    Probe {
        calls: &["all_done", "and", "join_all"],
        outcome: Works,
        run: |pair| {
            Device::all_done([&pair.ours, &pair.theirs]).synchronize()?;
            pair.stream.done().and(pair.elsewhere.done()).synchronize()?;
            let all = gpu_await::join_all([pair.stream.done(), pair.elsewhere.done()]);
            all.synchronize().map(drop)
        },
    },
];
