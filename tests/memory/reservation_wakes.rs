//! Each way in which memory comes back wakes the reservation that waits for it, with nothing else going on.

use std::any::Any;
use std::task::Poll;

use futures::executor::block_on;
use gpu_await::testing::Gate;
use gpu_await::{Device, InOut, Pressure, Result, Stream};

use super::reservations::{MIB, Task, limited, soon, zeros};

/// Frees what a way holds, and returns what stays: a stream's end would free what it keeps.
type Free = Box<dyn FnOnce() -> Result<Box<dyn Any>>>;
/// Whether the reservation is told of the drop already: what is mapped beside the pool is pending nowhere.
enum Told {
    OfTheDrop,
    OfTheEnd,
}

/// Holds 8 of 16 MiB. In front of what it does later may be a gate, which is opened when the reservation was told of the drop.
type Way = fn(&Device, [Stream; 2]) -> Result<(Free, Option<(Gate, Told)>)>;

const HALF: u64 = 8 * MIB;

fn dropping<T: 'static, U: 'static>(held: T, stays: U) -> Free {
    Box::new(move || {
        drop(held);
        Ok(Box::new(stays))
    })
}

const WAYS: [(&str, Way); 18] = [
    ("a buffer", |_, [stream, other]| {
        let held = zeros(&stream, HALF)?;
        stream.synchronize()?;
        Ok((dropping(held, (stream, other)), None))
    }),
    ("a buffer behind work", |_, [stream, other]| {
        let held = zeros(&stream, HALF)?;
        let gate = Gate::close(&stream)?;
        Ok((dropping(held, (stream, other)), Some((gate, Told::OfTheDrop))))
    }),
    ("a buffer that another stream uses", |_, [stream, other]| {
        let (held, mut copied) = (zeros(&stream, HALF)?, zeros(&other, 512)?);
        let gate = Gate::close(&other)?;
        other.copy(&held.slice(..512)?, &mut copied).queued()?;
        Ok((dropping(held, (stream, other, copied)), Some((gate, Told::OfTheDrop))))
    }),
    ("blocks that a stream keeps", |_, [stream, other]| {
        let held = (0..8).map(|_| zeros(&stream, MIB)).collect::<Result<Vec<_>>>()?;
        stream.synchronize()?;
        Ok((dropping(held, (stream, other)), None))
    }),
    ("blocks that a stream keeps, behind work", |_, [stream, other]| {
        let held = (0..8).map(|_| zeros(&stream, MIB)).collect::<Result<Vec<_>>>()?;
        let gate = Gate::close(&stream)?;
        Ok((dropping(held, (stream, other)), Some((gate, Told::OfTheDrop))))
    }),
    ("a slab", |_, [stream, other]| {
        let held = block_on(stream.slab::<u8>(8, MIB as usize))?;
        Ok((dropping(held, (stream, other)), None))
    }),
    ("a slab behind work", |_, [stream, other]| {
        let held = stream.slab::<u8>(8, MIB as usize).queued()?;
        let gate = Gate::close(&stream)?;
        Ok((dropping(held, (stream, other)), Some((gate, Told::OfTheDrop))))
    }),
    ("a growable buffer, cut off", |device, _| {
        let mut held = block_on(device.growable::<u8>(HALF as usize))?;
        block_on(held.grow(HALF as usize))?;
        let free = move || {
            block_on(held.shrink(0))?;
            Ok(Box::new(held) as _)
        };
        Ok((Box::new(free), None))
    }),
    ("a growable buffer behind work", |device, [stream, other]| {
        let mut held = block_on(device.growable::<u8>(HALF as usize))?;
        block_on(held.grow(HALF as usize))?;
        let gate = Gate::close(&stream)?;
        stream.fill(&mut held, 1).queued()?;
        Ok((dropping(held, (stream, other)), Some((gate, Told::OfTheEnd))))
    }),
    ("frozen memory behind work", |_, [stream, other]| {
        let held = block_on(zeros(&stream, HALF)?.freeze())?;
        let gate = Gate::close(&stream)?;
        Ok((dropping(held, (stream, other)), Some((gate, Told::OfTheDrop))))
    }),
    ("a buffer with its stream, behind work", |_, [stream, other]| {
        let held = zeros(&stream, HALF)?;
        let gate = Gate::close(&stream)?;
        Ok((dropping((held, stream), other), Some((gate, Told::OfTheDrop))))
    }),
    ("an operation that nobody awaited", |_, [stream, other]| {
        let held = stream.zeros::<u8>(HALF as usize);
        Ok((dropping(held, (stream, other)), None))
    }),
    ("an operation that was refused", |device, [stream, other]| {
        // The claim takes over what is free before it fails.
        let held = device.try_reserve(HALF)?;
        let free = move || {
            drop(held);
            zeros(&stream, 17 * MIB).unwrap_err();
            Ok(Box::new((stream, other)) as _)
        };
        Ok((Box::new(free), None))
    }),
    ("a reservation", |device, _| Ok((dropping(device.try_reserve(HALF)?, ()), None))),
    ("a reservation, then its buffer behind work", |device, [stream, other]| {
        let held = device.try_reserve(HALF)?;
        let buffer = zeros(&held.stream(&stream)?, HALF)?;
        let gate = Gate::close(&stream)?;
        let free = move || {
            drop(held);
            drop(buffer);
            Ok(Box::new((stream, other)) as _)
        };
        Ok((Box::new(free), Some((gate, Told::OfTheDrop))))
    }),
    ("its buffer behind work, then a reservation", |device, [stream, other]| {
        let held = device.try_reserve(HALF)?;
        let buffer = zeros(&held.stream(&stream)?, HALF)?;
        let gate = Gate::close(&stream)?;
        let free = move || {
            drop(buffer);
            drop(held);
            Ok(Box::new((stream, other)) as _)
        };
        Ok((Box::new(free), Some((gate, Told::OfTheDrop))))
    }),
    ("a reservation that shrinks, then its buffer behind work", |device, [stream, other]| {
        let held = device.try_reserve(HALF)?;
        let buffer = zeros(&held.stream(&stream)?, HALF)?;
        let gate = Gate::close(&stream)?;
        let free = move || {
            held.shrink(0);
            drop(buffer);
            Ok(Box::new((stream, other, held)) as _)
        };
        Ok((Box::new(free), Some((gate, Told::OfTheDrop))))
    }),
    ("what a graph keeps", |device, [stream, other]| {
        let held = device.try_reserve(HALF)?;
        let graph = device.graph::<(InOut<u8>,), _, _>((), |q, (), (mut y,)| {
            let mut kept = q.empty::<u8>(HALF as usize)?;
            q.fill(&mut kept, 1)?;
            q.copy(&kept.slice(..y.len())?, &mut y)
        });
        let mut y = zeros(&stream, 512)?;
        let free = move || {
            drop(held);
            graph.launch(&stream, (&mut y,)).synchronize()?;
            Ok(Box::new((stream, other, graph, y)) as _)
        };
        Ok((Box::new(free), None))
    }),
];

#[test]
fn each_way_back_is_heard() -> Result<()> {
    for pressure in [Pressure::Fail, Pressure::Wait] {
        for (what, way) in WAYS {
            let (device, _turn) = limited(16 * MIB, pressure);
            let streams = [device.stream()?, device.stream()?];
            drop(Gate::close(&streams[0])?);
            streams.iter().try_for_each(Stream::synchronize)?;
            println!("{pressure:?}: {what}");
            let (free, gate) = way(&device, streams)?;
            let mut waiting = Task::new(device.reserve(14 * MIB));
            assert!(waiting.poll().is_pending(), "{pressure:?}: {what}");
            let seen = waiting.woken();
            let _stays = free()?;
            if let Some((gate, told)) = gate {
                let polled = match told {
                    Told::OfTheDrop => waiting.poll_when_woken(seen),
                    Told::OfTheEnd => waiting.poll(),
                };
                // It looks, and finds nothing yet if it is to be complete on the device.
                if let Poll::Ready(granted) = polled {
                    assert_eq!(pressure, Pressure::Wait, "{what}");
                    granted?;
                    continue;
                }
                gate.open();
            }
            waiting.finish()?;
        }
    }
    Ok(())
}

/// The same for who waits with [`Stream::reclaimed`].
#[tokio::test]
async fn a_free_is_heard_without_an_event() -> Result<()> {
    let (device, _turn) = limited(16 * MIB, Pressure::Fail);
    let (stream, other) = (device.stream()?, device.stream()?);
    for _ in 0..20 {
        let held = zeros(&stream, HALF)?;
        let gate = Gate::close(&stream)?;
        drop(held);
        let waiting = tokio::spawn({
            let other = other.clone();
            async move { other.reclaimed(14 * MIB).await }
        });
        tokio::task::yield_now().await;
        gate.open();
        soon(waiting).await.expect("no panic")?;
    }
    Ok(())
}
