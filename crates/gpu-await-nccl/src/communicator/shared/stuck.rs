//! Calls that do not return before an abort: the transport waits in each for a rank that never comes, as NCCL does where it connects
//! ranks; except for a barrier in a graph, which does nothing. And calls that do not reach the transport.
#![forbid(unsafe_code)]

use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_await::testing::Gate;
use gpu_await::{Device, InOut, Op, RawQueue};
use parking_lot::{Condvar, Mutex};

use super::{Origin, Shared};
use crate::call::{Call, Verb};
use crate::communicator::Communicator;
use crate::error::{Error, LostCause, Result, ShrinkRefusal};
use crate::transport::{CallOwner, LocalRank, Placed, Shrink, Transport};

const SOON: Duration = Duration::from_millis(200);
const LATE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Stuck {
    refusal: Option<LostCause>,
    is_aborted: Mutex<bool>,
    aborted: Condvar,
}

impl Stuck {
    fn wait(&self) -> LostCause {
        self.aborted.wait_while(&mut self.is_aborted.lock(), |is_aborted| !*is_aborted);
        LostCause::Nccl { code: 3, text: "told to stop".to_owned() }
    }
}

impl Transport for Stuck {
    fn operations(&self) -> u64 {
        2
    }

    fn submit(
        &self,
        _: &[LocalRank],
        _: &[Placed<'_, '_>],
        _: &Weak<dyn CallOwner>,
    ) -> std::result::Result<(), LostCause> {
        Err(self.wait())
    }

    fn capture(
        &self,
        _: (usize, &LocalRank),
        _: &RawQueue<'_>,
        calls: &[Call],
        _: &Weak<dyn CallOwner>,
    ) -> Result<()> {
        if calls.iter().all(|call| call.verb == Verb::Barrier) {
            return Ok(());
        }
        let detail = self.wait().to_string();
        Err(Error::Nccl { call: "ncclGroupEnd", code: 3, text: String::new(), detail })
    }

    fn kept_by_graphs(&self) -> Arc<()> {
        Arc::default()
    }

    fn can_shrink(&self) -> bool {
        false
    }

    fn shrink(&self, _: &[LocalRank], _: Shrink<'_>) -> Result<Box<dyn Transport>> {
        Err(Error::CannotShrink { reason: ShrinkRefusal::NotLinked })
    }

    fn look(&self) -> Option<LostCause> {
        None
    }

    fn refusal(&self) -> Option<LostCause> {
        self.refusal.clone()
    }

    fn abort(&self, _: &LostCause) {
        *self.is_aborted.lock() = true;
        self.aborted.notify_all();
    }

    fn finish(&self) {}
}

/// The first of two ranks.
fn communicator(transport: Stuck) -> (Communicator, Device) {
    let device = Device::host();
    let stream = device.stream().expect("a stream");
    let scratch = vec![stream.zeros::<f32>(1).queued().expect("memory")];
    let order = vec![stream.zeros::<u8>(1).queued().expect("memory")];
    let local = LocalRank { rank: 0, device: device.clone(), stream };
    let origin = Origin { channel: None, connect_limit: LATE, pairs: false };
    let shared = Shared::new(2, vec![local], (Box::new(transport), origin), (scratch, order));
    (Communicator::of(shared), device)
}

/// Makes a call on a thread of its own, and returns its error.
fn made(call: impl FnOnce(&Communicator, &Device) -> Op<()> + Send + 'static) -> gpu_await::Error {
    let (comm, device) = communicator(Stuck::default());
    comm.set_limit(Some(SOON));
    let (send, receive) = channel();
    let began = Instant::now();
    std::thread::spawn(move || drop(send.send(call(&comm, &device).synchronize())));
    let error = receive.recv_timeout(LATE).expect("a limit ends the call").unwrap_err();
    assert!(began.elapsed() >= SOON, "{error}");
    error
}

#[test]
fn a_limit_ends_a_call_that_waits() {
    let error = made(|comm, _| comm.barrier());
    let lost = Error::lost(&error).expect("lost");
    assert!(matches!(lost.cause, LostCause::TimedOut { limit: SOON }), "{error}");
}

#[test]
fn a_limit_ends_a_capture_that_waits() {
    // Alone, and with a pending launch on the same stream, which is locked during the capture.
    for has_pending in [false, true] {
        let error = made(move |comm, device| {
            let first = device.graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut x,)| {
                comm.in_graph(q)?.barrier()?;
                q.fill(&mut x, 1.0)
            });
            let second = device.graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut x,)| {
                comm.in_graph(q)?.recv(&mut x, 1)
            });
            let stream = device.stream().expect("a stream");
            let mut x = stream.zeros::<f32>(8).queued().expect("memory");
            let gate = Gate::close(&stream).expect("a gate");
            if has_pending {
                first.launch(&stream, (&mut x,)).queued().expect("launched");
            }
            let stuck = second.launch(&stream, (&mut x,));
            assert!(!gate.timed_out());
            stuck
        });
        let lost = Error::lost(&error).expect("lost");
        assert!(matches!(lost.cause, LostCause::TimedOut { limit: SOON }), "{error}");
    }
}

/// Before each call and each capture the communicator checks whether another rank has ended.
#[test]
fn a_refused_call_reaches_no_transport() {
    let makes: [fn(&Communicator, &Device) -> Op<()>; 2] = [
        |comm, _| comm.barrier(),
        |comm, device| {
            let step = device.graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut x,)| {
                comm.in_graph(q)?.recv(&mut x, 1)
            });
            let stream = device.stream().expect("a stream");
            step.launch(&stream, (&mut stream.zeros::<f32>(8).queued().expect("memory"),))
        },
    ];
    for call in makes {
        let refusal = Some(LostCause::PeerLeft { rank: 1 });
        let (comm, device) = communicator(Stuck { refusal, ..Stuck::default() });
        assert_eq!(comm.lost().expect("it has left").origin(), 1);
        // If it reached the transport, the limit would end it.
        comm.set_limit(Some(SOON));
        let error = call(&comm, &device).submitted().unwrap_err();
        let lost = Error::lost(&error).expect("lost");
        assert!(matches!(lost.cause, LostCause::PeerLeft { rank: 1 }), "{error}");
    }
}
