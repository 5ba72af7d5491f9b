//! Values and futures whose code panics wherever the library runs it; values that nest without end.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker, WorkerBuilder};
use serde::{Deserialize, Serialize};

use crate::twin::run;

/// Set in the process of the worker, where bombs go off.
const ARMED: &str = "GPU_AWAIT_TEST_BOMBS";

/// Where a bomb goes off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum When {
    Never,
    Drop,
    Encode,
    Decode,
}

/// Panics, with a payload that panics as it is dropped.
#[derive(Debug, PartialEq)]
pub(crate) struct Bomb(When);

impl Bomb {
    fn goes_off(&self, when: When) {
        if self.0 == when && std::env::var_os(ARMED).is_some() {
            std::panic::panic_any(Payload(1));
        }
    }
}

struct Payload(u32);

impl Drop for Payload {
    fn drop(&mut self) {
        if self.0 > 0 {
            std::panic::panic_any(Payload(self.0 - 1));
        }
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.goes_off(When::Drop);
        }
    }
}

impl Serialize for Bomb {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.goes_off(When::Encode);
        self.0.serialize(to)
    }
}

impl<'d> Deserialize<'d> for Bomb {
    fn deserialize<D: serde::Deserializer<'d>>(from: D) -> Result<Self, D::Error> {
        let bomb = Bomb(When::deserialize(from)?);
        bomb.goes_off(When::Decode);
        Ok(bomb)
    }
}

impl std::fmt::Display for Bomb {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.goes_off(When::Encode);
        Ok(())
    }
}

impl std::error::Error for Bomb {}

/// A list that nests.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct List(Option<Box<List>>);

impl List {
    fn of(levels: u32) -> List {
        (0..levels).fold(List(None), |list, _| List(Some(Box::new(list))))
    }

    fn levels(&self) -> u32 {
        std::iter::successors(Some(self), |list| list.0.as_deref()).count() as u32 - 1
    }
}

impl Drop for List {
    fn drop(&mut self) {
        let mut next = self.0.take();
        while let Some(mut list) = next {
            next = list.0.take();
        }
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Untagged {
    Number(u32),
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ask {
    Number(u32),
    Request(Bomb),
    Respond(When),
    Error(When),
    Future(When),
    Panic,
    /// The list goes back.
    Down(List),
    /// One of so many levels comes back.
    Up(u32),
    Untagged(Untagged),
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    Number(u32),
    Bomb(Bomb),
    List(List),
}

pub(crate) struct Odd;

/// A future that drops a bomb when it is dropped.
struct Dropped<F> {
    future: Pin<Box<F>>,
    _bomb: Bomb,
}

impl<F: Future> Future for Dropped<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.future.as_mut().poll(cx)
    }
}

impl Service for Odd {
    type Config = Bomb;
    type Request = Ask;
    type Response = Answer;

    /// Its future drops what it was configured with.
    fn start(bomb: Bomb, _: &Host) -> impl Future<Output = Result<Self, Failure>> + Send {
        Dropped { future: Box::pin(async { Ok(Odd) }), _bomb: bomb }
    }

    fn call(
        &self,
        ask: Ask,
        _: &mut Payloads,
    ) -> impl Future<Output = Result<Answer, Failure>> + Send {
        let bomb = match ask {
            Ask::Future(when) => Bomb(when),
            _ => Bomb(When::Never),
        };
        let future = async {
            Ok(match ask {
                Ask::Number(number) => Answer::Number(number),
                Ask::Request(bomb) => {
                    drop(bomb);
                    Answer::Number(1)
                }
                Ask::Respond(when) => Answer::Bomb(Bomb(when)),
                Ask::Error(when) => return Err(Bomb(when))?,
                Ask::Future(_) | Ask::Untagged(_) => Answer::Number(1),
                Ask::Panic => std::panic::panic_any(Payload(1)),
                Ask::Down(list) => Answer::Number(list.levels()),
                Ask::Up(levels) => Answer::List(List::of(levels)),
            })
        };
        Dropped { future: Box::pin(future), _bomb: bomb }
    }
}

fn odd(when: When) -> WorkerBuilder<Odd> {
    Worker::<Odd>::builder(Bomb(when)).env(ARMED, "1")
}

#[test]
fn code_of_the_service_panics_in_its_call_alone() {
    run(async {
        // More calls than may be under way: each gives its place back.
        let worker = odd(When::Never).most_calls(2).spawn().await.unwrap();
        for _ in 0..3 {
            for ask in [
                Ask::Request(Bomb(When::Drop)),
                Ask::Request(Bomb(When::Decode)),
                Ask::Respond(When::Drop),
                Ask::Respond(When::Encode),
                Ask::Error(When::Drop),
                Ask::Error(When::Encode),
                Ask::Future(When::Drop),
                Ask::Panic,
            ] {
                let call = worker.call(&ask).deadline(Duration::from_secs(5));
                let ended = call.await;
                match &ended {
                    Err(Error::Panicked(_)) => {}
                    Err(Error::Decode { what: "request", .. }) => {}
                    Err(Error::Encode { what: "response", .. }) => {}
                    _ => panic!("{ask:?}: {ended:?}"),
                }
            }
        }
        assert_eq!(worker.call(Ask::Number(7)).await, Ok(Answer::Number(7)));
        let stats = worker.stats();
        assert_eq!((stats.deaths, stats.calls), (0, 0));
        worker.close(Duration::from_secs(5)).await;
    });
}

#[test]
fn a_start_that_panics_as_it_is_dropped_is_reported() {
    run(async {
        for when in [When::Drop, When::Decode] {
            let spawned = tokio::time::timeout(Duration::from_secs(5), odd(when).spawn()).await;
            let Ok(Err(Error::GivenUp { cause, .. })) = spawned else {
                panic!("{when:?}: {:?}", spawned.map(|worker| worker.map(drop)))
            };
            let is_it = match when {
                When::Decode => matches!(cause, gpu_await_worker::Cause::NoConfiguration(_)),
                _ => matches!(cause, gpu_await_worker::Cause::StartPanicked(_)),
            };
            assert!(is_it, "{when:?}: {cause:?}");
        }
    });
}

#[test]
fn deep_values_are_refused_both_ways() {
    run(async {
        let worker = odd(When::Never).spawn().await.unwrap();
        let ask = |ask| futures::executor::block_on(worker.call(ask).into_future());
        let check = |most: u32| {
            // Levels of a list are an option and a newtype each.
            for levels in [0, 1, most / 2 - 4] {
                assert_eq!(ask(Ask::Down(List::of(levels))), Ok(Answer::Number(levels)));
                assert_eq!(ask(Ask::Up(levels)), Ok(Answer::List(List::of(levels))));
            }
            for levels in [64, 500, 1_000_000] {
                for (value, name) in
                    [(Ask::Down(List::of(levels)), "request"), (Ask::Up(levels), "response")]
                {
                    let Err(Error::TooDeep { what, limit }) = ask(value) else {
                        panic!("{levels}")
                    };
                    assert_eq!(what, name);
                    assert!((most..=128).contains(&limit), "{limit}");
                }
            }
            assert_eq!(worker.stats().deaths, 0);
        };
        std::thread::scope(|threads| {
            // On a thread with little stack as well.
            for (stack, most) in [(64 << 10, 16), (4 << 20, 128)] {
                let thread = std::thread::Builder::new().stack_size(stack);
                thread.spawn_scoped(threads, move || check(most)).unwrap().join().unwrap();
            }
        });
    });
}

#[test]
fn what_the_format_cannot_do_is_said() {
    run(async {
        let worker = odd(When::Never).spawn().await.unwrap();
        let error = worker.call(Ask::Untagged(Untagged::Number(1))).await.unwrap_err();
        assert!(matches!(error, Error::Decode { what: "request", .. }), "{error:?}");
        assert!(error.to_string().contains("`untagged`"), "{error}");
    });
}
