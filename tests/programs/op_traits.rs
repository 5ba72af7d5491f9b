//! The traits and sizes that users build on.

use std::future::Future;
use std::rc::Rc;

use futures::future::FusedFuture;
use gpu_await::{
    Device, DeviceBuffer, DlpackTensor, Error, ErrorDetail, Event, Kernel, Lent, MemoryLoan,
    Module, Op, PinnedBuffer, PinnedFlag, Refused, Result, Scope, Stream,
};
use static_assertions::{assert_impl_all, assert_not_impl_any};

assert_impl_all!(Op<()>: Future<Output = Result<()>>, FusedFuture, Send, Sync, Unpin);
assert_impl_all!(Op<DeviceBuffer<f32>>: Future, FusedFuture, Send, Sync, Unpin);
assert_impl_all!(Op<PinnedBuffer<f32>>: Future, FusedFuture, Send, Sync, Unpin);
// A value that may move between threads, but not be shared, makes a future that may be both.
assert_impl_all!(Op<std::cell::Cell<u32>>: Send, Sync);
assert_not_impl_any!(Op<Rc<u32>>: Send);

assert_impl_all!(Device: Clone, Send, Sync, Unpin, Eq, std::hash::Hash, std::fmt::Debug);
assert_impl_all!(Stream: Clone, Send, Sync, Unpin, Eq, std::hash::Hash);
assert_impl_all!(Event: Clone, Send, Sync, Unpin);
assert_impl_all!(Scope<std::future::Ready<()>>: Future<Output = ()>, Send, Sync, Unpin);
assert_not_impl_any!(Scope<std::marker::PhantomPinned>: Unpin);
assert_impl_all!(Error: Clone, Eq, Send, Sync, std::error::Error);
assert_impl_all!(ErrorDetail: Clone, Eq, std::fmt::Debug);
assert_impl_all!(Kernel<(f32,)>: Clone, Send, Sync);
assert_impl_all!(Module: Clone, Send, Sync);
assert_impl_all!(DeviceBuffer<f32>: Send, Sync);
assert_impl_all!(PinnedBuffer<f32>: Send, Sync, std::ops::DerefMut<Target = [f32]>);
assert_impl_all!(PinnedFlag: Clone, Send, Sync);
assert_impl_all!(Lent<PinnedBuffer<f32>>: Send);
// So that `?` makes a boxed error of it.
assert_impl_all!(Refused<DlpackTensor>: Send, Sync, std::error::Error);
assert_impl_all!(MemoryLoan<'static, ()>: Send);
assert_not_impl_any!(DeviceBuffer<f32>: Clone);
assert_not_impl_any!(PinnedBuffer<f32>: Clone);
assert_not_impl_any!(gpu_await::Queue<'static>: Send, Sync);

fn is_static<T: 'static>() {}

#[test]
fn an_op_is_static_and_small() {
    is_static::<Op<()>>();
    is_static::<Op<PinnedBuffer<u8>>>();
    assert!(size_of::<Op<()>>() <= 88, "{}", size_of::<Op<()>>());
    assert!(size_of::<Op<DeviceBuffer<f32>>>() <= 104, "{}", size_of::<Op<DeviceBuffer<f32>>>());
}

#[test]
fn an_error_is_one_word() {
    assert_eq!(size_of::<Error>(), size_of::<usize>());
    assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
}

#[test]
fn handles_of_a_device_are_equal() {
    let (device, other) = (Device::host(), Device::host());
    assert_eq!(device, device.clone());
    assert_eq!(device, device.stream().unwrap().device());
    assert_ne!(device, other);
}

#[test]
fn errors_of_the_same_facts_are_equal() {
    let stream = Device::host().stream().unwrap();
    let x = stream.full(3, 1u32).queued().unwrap();
    let beyond = |end: usize| x.slice(1..end).unwrap_err();
    assert_eq!(beyond(7), beyond(7));
    assert_ne!(beyond(7), beyond(8));
    let range = ErrorDetail::OutOfBounds { start: 1, end: 7, len: 3, unit: "elements" };
    assert_eq!(*beyond(7).detail(), range);
}
