//! Payloads: leases, copies, and what happens to both when nobody waits, or a process dies.

use std::io::{Read, Seek};
use std::time::Duration;

use gpu_await_worker::Error;

use crate::twin::{Do, Done, Use, eventually, kill, lost, run, worker};

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[test]
fn payloads_go_both_ways() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        for len in [0, 1, 255, 256, 257, 1 << 20] {
            let mut expected = bytes(len, 5);
            let mut lease = worker.try_lease(len).unwrap();
            lease.copy_from_slice(&expected);
            let leased = worker.call(Do::Reverse).lease(lease).send().with_payload();
            let copied = worker.call(Do::Reverse).payload(expected.clone()).send().with_payload();
            expected.reverse();
            for answer in [leased.await.unwrap(), copied.await.unwrap()] {
                let (done, payload) = answer;
                assert_eq!(done, Done::Number(len as u32));
                let payload = payload.expect("it comes with a payload");
                assert_eq!(payload.to_vec(), expected);
                let mut file = std::fs::File::from(memory());
                assert_eq!(payload.write_to(&file, len / 2).unwrap(), len - len / 2);
                let mut written = Vec::new();
                file.rewind().unwrap();
                file.read_to_end(&mut written).unwrap();
                assert_eq!(written, expected[len / 2..]);
            }
        }
    });
}

#[test]
fn payloads_go_to_the_device_and_back() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        for len in [0, 1, 1000, 100_000] {
            let x: Vec<f32> = (0..len).map(|n| n as f32).collect();
            let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
            let call = worker.call(Do::DoubleOnDevice).payload(bytes).send().with_payload();
            let (_, payload) = call.await.unwrap();
            let y: Vec<u8> = x.iter().flat_map(|x| (2.0 * x).to_ne_bytes()).collect();
            assert_eq!(payload.unwrap().to_vec(), y);
        }
        let odd = worker.call(Do::DoubleOnDevice).payload(vec![1; 5]).await;
        assert!(odd.unwrap_err().to_string().contains("not a whole number"));
    });
}

fn memory() -> std::os::fd::OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: a name that ends with a zero; flags of the system's.
    let fd = unsafe { libc::memfd_create(c"written".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: just made, and nobody else's.
    unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }
}

#[test]
fn memory_comes_back_when_the_process_is_done() {
    run(async {
        const SLAB: usize = 1 << 20;
        let worker = worker().payload_bytes(SLAB as u64, SLAB as u64).spawn().await.unwrap();
        let too_large = worker.try_lease(SLAB + 1);
        assert!(matches!(too_large, Err(Error::TooLarge { .. })), "{too_large:?}");
        for round in 0..20 {
            // All of both slabs, again and again.
            let mut lease = worker.lease(SLAB).await.unwrap();
            assert!(matches!(worker.try_lease(1), Err(Error::Overloaded { .. })));
            lease.fill(round);
            let call = worker.call(Do::Reverse).lease(lease).send().with_payload();
            if round % 3 == 0 {
                // Nobody waits: the memory is not used again before the process is done with it.
                drop(call);
                continue;
            }
            // The response slab has a page of its own for the status.
            let answer = call.await.unwrap();
            assert!(answer.1.unwrap().to_vec().iter().all(|byte| *byte == round));
        }
        assert_eq!(worker.stats().stale_messages, 0);
    });
}

#[test]
fn a_lease_outlives_its_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let mut lease = worker.try_lease(10_000).unwrap();
        lease.copy_from_slice(&bytes(10_000, 1));
        let (_, kept) =
            worker.call(Do::Reverse).payload(bytes(5000, 2)).send().with_payload().await.unwrap();
        lost(worker.call(Do::Abort).await);
        worker.serving().await.unwrap();
        // What the dead process answered is still there, and what was to be sent to it goes to the next one.
        let mut expected = bytes(5000, 2);
        expected.reverse();
        assert_eq!(kept.unwrap().to_vec(), expected);
        let (_, answer) =
            worker.call(Do::Reverse).lease(lease).send().with_payload().await.unwrap();
        let mut expected = bytes(10_000, 1);
        expected.reverse();
        assert_eq!(answer.unwrap().to_vec(), expected);
    });
}

#[test]
fn calls_wait_for_room() {
    run(async {
        const SLAB: u64 = 64 << 10;
        let worker = worker().payload_bytes(SLAB, SLAB).spawn().await.unwrap();
        // Ten times what the slabs hold.
        let calls = (0..40u8).map(|seed| {
            let call =
                worker.call(Do::Reverse).payload(bytes(16 << 10, seed)).send().with_payload();
            async move {
                let (_, payload) = call.await.unwrap();
                let mut expected = bytes(16 << 10, seed);
                expected.reverse();
                assert_eq!(payload.unwrap().to_vec(), expected);
            }
        });
        futures::future::join_all(calls).await;
        let large = worker.call(Do::Reverse).payload(bytes(SLAB as usize + 1, 0)).await;
        assert!(matches!(large, Err(Error::TooLarge { .. })), "{large:?}");
        let long = worker.call(Do::Fail("x".repeat(100_000))).await;
        assert!(matches!(long, Err(Error::TooLarge { .. })), "{long:?}");
        assert_eq!(worker.call(Do::Later(3, Duration::ZERO)).await, Ok(Done::Number(3)));
    });
}

#[test]
fn a_retried_call_has_its_own_payload() {
    run(async {
        const SLAB: usize = 1 << 20;
        for how in [Use::Keep, Use::Drop, Use::Upload] {
            for leased in [false, true] {
                let worker = worker().payload_bytes(SLAB as u64, 4096).spawn().await.unwrap();
                let call = worker.call(Do::First(how, Duration::from_millis(200))).idempotent();
                let call = match leased {
                    false => call.payload(vec![1; SLAB]).send(),
                    true => {
                        let mut lease = worker.try_lease(SLAB).unwrap();
                        lease.fill(1);
                        call.lease(lease).send()
                    }
                };
                eventually("it runs", || worker.stats().running == 1);
                // Whoever has the memory in between writes it.
                let next = tokio::time::timeout(Duration::from_millis(100), worker.lease(SLAB));
                let next = next.await.map(|lease| {
                    let mut lease = lease.unwrap();
                    lease.fill(2);
                    lease
                });
                kill(&worker);
                assert_eq!(call.await, Ok(Done::Number(1)), "{how:?}, leased {leased}");
                drop(next);
                assert_eq!(worker.stats().deaths, 1);
                assert_eq!(worker.lease(SLAB).await.unwrap().len(), SLAB);
            }
        }
    });
}

#[test]
fn calls_that_run_again_have_room() {
    run(async {
        const PART: usize = 16 << 10;
        for round in 0..50 {
            let how = if round % 2 == 0 { Use::Keep } else { Use::Drop };
            let slab = 2 * PART as u64;
            let worker = worker().payload_bytes(slab, slab).spawn().await.unwrap();
            let callers = (0..8u8).map(|number| {
                let worker = worker.clone();
                async move {
                    let mut lease = worker.lease(PART).await.unwrap();
                    lease.fill(number);
                    let request = Do::First(how, Duration::from_millis(8));
                    let answer = worker.call(request).lease(lease).idempotent().await;
                    assert_eq!(answer, Ok(Done::Number(number.into())));
                }
            });
            let killer = async {
                tokio::time::sleep(Duration::from_millis(round % 10)).await;
                // Some run beside one another again, or all alone.
                if round % 4 < 2 { kill(&worker) } else { drop(worker.call(Do::Abort).await) }
            };
            let all = futures::future::join(futures::future::join_all(callers), killer);
            let ended = tokio::time::timeout(Duration::from_secs(10), all).await;
            assert!(ended.is_ok(), "round {round}: {:?}", worker.stats());
        }
    });
}

#[test]
fn a_call_without_room_holds_up_no_lease() {
    run(async {
        const SLAB: usize = 64 << 10;
        let worker = worker().payload_bytes(SLAB as u64, SLAB as u64).spawn().await.unwrap();
        let mut lease = worker.try_lease(SLAB).unwrap();
        lease.fill(1);
        // It waits for the memory of the one behind it.
        let request = Do::First(Use::Keep, Duration::ZERO);
        let waits = worker.call(&request).payload(vec![2; SLAB]).send();
        let small = worker.call(&request).payload(vec![3; 1]).send();
        let leased = worker.call(&request).lease(lease).send();
        let plain = worker.call(Do::Later(4, Duration::ZERO)).send();
        let all = async { (waits.await, small.await, leased.await, plain.await) };
        let ended = tokio::time::timeout(Duration::from_secs(5), all).await.expect("all end");
        let number = |number| Ok(Done::Number(number));
        assert_eq!(ended, (number(2), number(3), number(1), number(4)));
    });
}

#[test]
fn a_lease_of_another_worker_is_copied() {
    run(async {
        let (one, other) = (worker().spawn().await.unwrap(), worker().spawn().await.unwrap());
        let mut decoy = other.try_lease(10_000).unwrap();
        decoy.fill(9);
        let mut lease = one.try_lease(10_000).unwrap();
        lease.fill(1);
        let call = other.call(Do::First(Use::Keep, Duration::ZERO)).lease(lease);
        assert_eq!(call.await, Ok(Done::Number(1)));
        assert_eq!(one.stats().stale_messages + other.stats().stale_messages, 0);
        drop(decoy);
    });
}

#[test]
fn payloads_that_the_program_holds_are_named() {
    run(async {
        const PART: usize = 4096;
        const PARTS: usize = 4;
        let slab = (PART * PARTS) as u64;
        let limit = Duration::from_millis(100);
        let worker = worker().payload_bytes(1 << 20, slab).held_payload_limit(limit);
        let worker = worker.spawn().await.unwrap();
        let call = || worker.call(Do::Reverse).payload(vec![1; PART]).send().with_payload();
        // All answers at once, and nobody lets go of any.
        let calls = futures::future::join_all((0..3 * PARTS).map(|_| call()));
        let ended = tokio::time::timeout(Duration::from_secs(5), calls).await.expect("all end");
        let (held, refused): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
        assert_eq!((held.len(), refused.len()), (PARTS, 2 * PARTS));
        for refused in refused {
            let wanted = Error::PayloadsHeld { bytes: PART as u64, held: slab, limit: slab };
            assert_eq!(refused.map(drop), Err(wanted));
        }
        assert_eq!(worker.stats().calls, 0);
        // One that waits has the room of the first that goes.
        let waits = call();
        drop(held);
        assert!(waits.await.is_ok());
        // Memory that a call has, in the process, is no reason: it waits for that.
        let slow = worker.call(Do::Hold(slab as usize, 4 * limit)).send();
        eventually("it runs", || worker.stats().running == 1);
        assert!(call().await.is_ok());
        assert!(slow.await.is_ok());
    });
}

#[test]
fn what_waits_for_room_is_bounded() {
    run(async {
        const SLAB: u64 = 4096;
        let worker = worker().payload_bytes(SLAB, 1 << 20).most_waiting_bytes(10_000);
        let worker = worker.spawn().await.unwrap();
        let other = self::worker().spawn().await.unwrap();
        let all = worker.try_lease(SLAB as usize).unwrap();
        let reverse = || worker.call(Do::Reverse);
        let mut waits: Vec<_> = (0..3).map(|n| reverse().payload(vec![n; 3000]).send()).collect();
        assert_eq!(worker.stats().waiting_bytes, 9000);
        // Of its own, and out of another worker's memory; as much as is left; and none.
        for refused in [
            reverse().payload(vec![1; 1001]).await,
            reverse().lease(other.try_lease(1001).unwrap()).await,
        ] {
            let Err(Error::Overloaded { what, found, limit }) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!((what, found, limit), ("bytes of payloads without room", 10_001, 10_000));
        }
        assert_eq!(worker.stats().overloads, 2);
        waits.push(reverse().payload(vec![1; 1000]).send());
        waits.push(reverse().payload(vec![]).send());
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
        // One that gives up waits for nothing any more.
        drop(waits.remove(0));
        assert_eq!(worker.stats().waiting_bytes, 7000);
        drop(all);
        for (call, bytes) in waits.into_iter().zip([3000, 3000, 1000, 0]) {
            assert_eq!(call.await, Ok(Done::Number(bytes)));
        }
        assert_eq!(worker.stats().waiting_bytes, 0);
        // Nor does one whose worker ends.
        let all = worker.lease(SLAB as usize).await.unwrap();
        let waits = reverse().payload(vec![1; 10_000]).await;
        assert!(matches!(waits, Err(Error::TooLarge { .. })), "{waits:?}");
        let waits = reverse().payload(vec![1; 4000]).send();
        let (rest, _all) = (worker.clone(), all);
        worker.close(Duration::ZERO).await;
        assert_eq!((waits.await, rest.stats().waiting_bytes), (Err(Error::Closed), 0));
    });
}
