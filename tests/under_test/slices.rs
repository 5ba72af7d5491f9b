//! cudarc's slices that come and go between its streams and ours, in random orders, with slow producers.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, result};
use gpu_await::testing::Gate;
use gpu_await::{Device, DeviceBuffer, Result, Stream};

use super::random::Random;

const LEN: usize = 4096;

/// Memory on its way: theirs or ours.
enum Data {
    Theirs(CudaSlice<u32>),
    Ours(DeviceBuffer<u32>),
}

/// A word whose bytes are all `value`.
fn word(value: u8) -> u32 {
    u32::from_ne_bytes([value; 4])
}

fn their_fill(slice: &mut CudaSlice<u32>, stream: &Arc<CudaStream>, value: u8) {
    let bytes = slice.num_bytes();
    let (ptr, _recorded) = slice.device_ptr_mut(stream);
    stream.context().bind_to_thread().unwrap();
    // SAFETY: the slice has that many bytes.
    unsafe { result::memset_d8_async(ptr, value, bytes, stream.cu_stream()) }.unwrap();
}

fn check(seen: &[u32], value: u8, round: usize, seed: u64) {
    let wrong = seen.iter().find(|seen| **seen != word(value));
    assert_eq!(wrong, None, "{:#x} was written; round {round}, seed {seed}", word(value));
}

/// Fills, copies and hands over one piece of memory `rounds` times, each time by somebody else; whoever reads sees the
/// last fill in program order. In each round one stream is held up, and goes on when everything is submitted.
pub(crate) fn random_orders(device: &Device, rounds: usize, seed: u64) -> Result<()> {
    let context = device.cudarc_context()?;
    let theirs = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let ours = [device.stream()?, device.stream()?];
    // SAFETY: nobody captures them.
    let adopt = |stream| unsafe { device.adopt(stream) };
    let adopted = [adopt(&theirs[0])?, adopt(&theirs[1])?];
    let mut random = Random(seed);
    let mut data = Data::Theirs(theirs[0].alloc_zeros::<u32>(LEN).unwrap());
    let mut value = 0_u8;
    // cudarc knows the last of several streams that read a slice: there is one, until somebody else has it.
    let mut reader = 0;
    for round in 0..rounds {
        let slow: &Stream = [&ours[0], &ours[1], &adopted[0], &adopted[1]][random.below(4)];
        let gate = Gate::close(slow)?;
        let mut seen = Vec::new();
        let mut snapshots = Vec::new();
        for _ in 0..1 + random.below(5) {
            let (at, fills) = (random.below(2), random.below(2) == 0);
            if fills {
                value = value.wrapping_add(1);
            }
            // Each step changes hands, or not.
            data = match (data, random.below(2) == 0) {
                (Data::Theirs(slice), true) => {
                    // SAFETY: it was written, and nobody captures its stream.
                    Data::Ours(unsafe { device.adopt_cudarc(slice) }?)
                }
                (Data::Ours(buffer), true) => {
                    reader = random.below(2);
                    // SAFETY: nobody captures the stream.
                    Data::Theirs(unsafe { device.release_to_cudarc(buffer, &theirs[at]) }?)
                }
                (data, false) => data,
            };
            match &mut data {
                Data::Theirs(slice) => {
                    if fills {
                        their_fill(slice, &theirs[at], value);
                    }
                    let reader = &theirs[reader];
                    // SAFETY: the copy overwrites it.
                    let mut snapshot = unsafe { reader.alloc::<u32>(LEN) }.unwrap();
                    reader.memcpy_dtod(slice, &mut snapshot).unwrap();
                    snapshots.push((reader, snapshot, value));
                }
                Data::Ours(buffer) => {
                    if fills {
                        ours[at].fill(buffer, word(value)).queued()?;
                    }
                    seen.push((ours[random.below(2)].download(buffer), value));
                }
            }
        }
        gate.open();
        for (op, value) in seen {
            check(&op.synchronize()?, value, round, seed);
        }
        for (reader, snapshot, value) in snapshots {
            let host = reader.clone_dtoh(&snapshot).unwrap();
            check(&host, value, round, seed);
        }
        assert!(!gate.timed_out(), "round {round}, seed {seed}");
    }
    drop(data);
    context.synchronize().unwrap();
    context.check_err().unwrap();
    device.synchronize()
}
