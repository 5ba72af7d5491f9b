//! Several operations as one.
#![forbid(unsafe_code)]

use super::{HostValue, Op, Points};

/// Joins operations into one future, with one waker per stream.
///
/// # Errors
/// The error of the first operation that could not be submitted, at once; or the loss of a device. The others
/// are then abandoned.
///
/// # Panics
/// If the value of one of them was already taken.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::host();
/// let streams = [device.stream()?, device.stream()?];
/// gpu_await::join_all(streams.iter().map(|s| s.done())).await?;
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub fn join_all<T: Send + 'static>(ops: impl IntoIterator<Item = Op<T>>) -> Op<Vec<T>> {
    let ops = ops.into_iter();
    let mut points = Points::NONE;
    let mut values = Vec::with_capacity(ops.size_hint().0);
    for op in ops {
        match op.into_parts() {
            Ok((more, value)) => {
                points.merge(more);
                values.push(value);
            }
            Err(error) => return Op::failed(error),
        }
    }
    Op::at(points, HostValue::collect(values))
}
