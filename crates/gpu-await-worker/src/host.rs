//! [`Host`]: what a service has of its process.
#![forbid(unsafe_code)]

use gpu_await::{Device, ErrorKind};

use crate::child::ChildTerms;
use crate::frame::Ending;

/// What a [`Service`](crate::Service) has of its process: its device.
#[derive(Debug)]
pub struct Host {
    device: Device,
}

impl Host {
    /// The device that the process was started for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) async fn open(terms: &ChildTerms) -> Result<Host, (Ending, String)> {
        let mut builder = Device::builder().verify(terms.verify);
        if let Some(bytes) = terms.device_memory_bytes {
            builder = builder.memory_limit_bytes(bytes);
        }
        let device = match terms.gpu {
            None => builder.host(),
            Some(_) if is_under_mps() && !terms.allow_mps => {
                return Err((Ending::UnderMps, String::new()));
            }
            Some(gpu) => builder.cuda(gpu as usize).map_err(|error| match error.kind() {
                ErrorKind::OutOfMemory => (Ending::OutOfMemory, error.to_string()),
                _ => (Ending::StartFailed, error.to_string()),
            })?,
        };
        Ok(Host { device })
    }
}

/// Whether a daemon of MPS takes the clients of this process's environment.
fn is_under_mps() -> bool {
    use rustix::fs::{Mode, OFlags};
    let folder = std::env::var("CUDA_MPS_PIPE_DIRECTORY");
    let control = format!("{}/control", folder.unwrap_or_else(|_| "/tmp/nvidia-mps".to_owned()));
    // Its pipe can be opened for writing while somebody reads it.
    rustix::fs::open(control, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .is_ok()
}
