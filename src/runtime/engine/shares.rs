//! The multiprocessors of a device: who has which, and the engine's own driver streams on them.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;

use super::EngineOptions;
use crate::backend::{Backend, RawPartition, RawStream, StreamOptions};
use crate::error::Result;
use crate::runtime::partitions::{Partitions, Share};

pub(crate) struct Shares {
    pub(crate) partitions: Arc<Partitions>,
    /// The share for streams that name no other, the engine's own included.
    pub(crate) partition: Option<Arc<Share>>,
    /// Our own stream for frees of retired memory and for asking how the device is: never full.
    pub(crate) private: RawStream,
    /// A stream for capturing others' work, once there was one. Held while that is done.
    pub(crate) captures: Mutex<Option<RawStream>>,
}

impl Shares {
    pub(super) fn open(
        backend: &Arc<dyn Backend>,
        options: &EngineOptions,
        label: &str,
    ) -> Result<Self> {
        let partitions = Partitions::new(backend.clone());
        let partition = partitions.of_device(options.multiprocessors, label)?;
        let confined = partition.as_ref().map(|share| share.raw());
        let private = StreamOptions { partition: confined, ..StreamOptions::default() };
        let private = backend.stream_create(private).inspect_err(|_| partitions.give_up())?;
        Ok(Shares { partitions, partition, private, captures: Mutex::default() })
    }

    /// The end of the engine: the streams and the driver's partitions, for the caller to destroy in this order.
    pub(super) fn close(&self) -> (Vec<RawStream>, Vec<RawPartition>) {
        let mut streams = vec![self.private];
        streams.extend(self.captures.lock().take());
        let (captures, partitions) = self.partitions.end();
        streams.extend(captures);
        (streams, partitions)
    }
}
