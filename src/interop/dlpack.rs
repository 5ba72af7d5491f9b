//! DLPack, version 1: tensors that libraries of one process pass to each other.
//!
//! | a tensor | its memory is freed, or its producer's deleter called |
//! |---|---|
//! | exported, with a consumer's stream | behind everything on the device when the deleter is called |
//! | exported, synchronized or unordered | behind every use here: the consumer's uses are complete when it calls the deleter |
//! | adopted | by the reaper, when every use here is complete |
//! | refused, or dropped as a [`DlpackTensor`] | at once |
//!
//! # Invariants
//! 1. The consumer's stream is ordered after the last use here before it can use an exported tensor (`exported_behind_a_slow_producer`).
//! 2. Our deleter makes no driver call and waits for nothing, on any thread: the reaper does the work
//!    (`deleters_in_a_host_function`).
//! 3. Memory is freed after everything that the consumer put on its stream before it called the deleter (`freed_behind_the_consumer`).
//! 4. A producer's deleter is called once, whatever happens to the tensor (`every_deleter_runs_once`).

pub(crate) mod abi;
pub(crate) mod export;
pub(crate) mod tensor;

use abi::DlpackElement;
use tensor::{DlpackTensor, bad};

use crate::error::Result;
use crate::error::refused::Refused;
use crate::error::tensor::TensorProblem;
use crate::interop::memory::Adoptable;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::frozen::Frozen;
use crate::op::Op;
use crate::stream::Stream;
use crate::thread::role;

impl Stream {
    /// Adopts a tensor of another library as a buffer, without a copy, ready when everything on this stream so far
    /// is complete: it was requested from its producer with this stream (`__dlpack__(stream=…)`). See
    /// [`Device::adopt_memory`](crate::Device::adopt_memory).
    ///
    /// # Ownership
    /// The tensor's deleter is called on a thread of this crate when the buffer is dropped and every use of it is
    /// complete; at the end of the process it is not called.
    ///
    /// # Errors
    /// [`ErrorDetail::BadTensor`](crate::ErrorDetail::BadTensor): another element type or device, not row-major, no data, read-only; as
    /// [`Device::adopt_memory`](crate::Device::adopt_memory). [`Refused`] has the tensor.
    ///
    /// # Safety
    /// As [`Device::adopt_memory`](crate::Device::adopt_memory), for the tensor's elements; the work that writes them is on this stream, or complete.
    pub unsafe fn adopt_dlpack<T: DlpackElement>(
        &self,
        tensor: DlpackTensor,
    ) -> Result<DeviceBuffer<T>, Refused<DlpackTensor>> {
        if tensor.is_read_only() {
            return Err(Refused { error: bad(TensorProblem::ReadOnly), value: Some(tensor) });
        }
        self.adopt_tensor(tensor)
    }

    /// Adopts a tensor, possibly read-only, as memory that nobody writes; see [`adopt_dlpack`](Self::adopt_dlpack)
    /// and [`DeviceBuffer::freeze`]. Ready proves *complete on the device*: everything on this stream so far.
    ///
    /// # Errors
    /// As [`adopt_dlpack`](Self::adopt_dlpack); a refused tensor is dropped.
    ///
    /// # Safety
    /// As [`adopt_dlpack`](Self::adopt_dlpack), and nobody writes the elements until the deleter is called.
    pub unsafe fn adopt_dlpack_frozen<T: DlpackElement>(
        &self,
        tensor: DlpackTensor,
    ) -> Op<Frozen<T>> {
        match self.adopt_tensor(tensor) {
            Ok(buffer) => buffer.freeze(),
            Err(refused) => Op::failed(refused.error),
        }
    }

    /// The unsafe callers vouch for the memory.
    fn adopt_tensor<T: DlpackElement>(
        &self,
        tensor: DlpackTensor,
    ) -> Result<DeviceBuffer<T>, Refused<DlpackTensor>> {
        let adoptable = role::check("adopting a tensor").and_then(|()| {
            let len = tensor.check::<T>(self.engine())?;
            Adoptable::behind(self, tensor.address(), len)
        });
        match adoptable {
            Ok(adoptable) => Ok(adoptable.adopt(Box::new(tensor))),
            Err(error) => Err(Refused { error, value: Some(tensor) }),
        }
    }
}
