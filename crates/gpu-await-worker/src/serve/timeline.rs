//! The timeline of the device, as a process sends it to its supervisor.
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::Arc;

use gpu_await::Device;

use super::Link;
use crate::codec;
use crate::frame::{MOST_HEADER, MOST_TIMELINE, TimelinePart, ToSupervisor};
use crate::system::{self, Sent};

impl Link {
    /// The longest body of a message.
    fn most_body(&self) -> usize {
        let socket = system::most_packet(self.socket.as_fd()).saturating_sub(MOST_HEADER);
        socket.min(self.most_message).max(1)
    }
}

/// Sends the timeline of the device, in parts.
pub(super) async fn tell(link: Arc<Link>, device: Option<Device>) {
    let taken = tokio::task::spawn_blocking(move || {
        let device = device.ok_or("there is no device")?;
        let trace = device.timeline().snapshot().map_err(|error| error.to_string())?;
        let mut bytes = Vec::new();
        trace.write_perfetto(&mut bytes).map_err(|error| error.to_string())?;
        match bytes.len() {
            0..=MOST_TIMELINE => Ok(bytes),
            len => Err(format!("{len} bytes of timeline, and the limit is {MOST_TIMELINE}")),
        }
    });
    let most = link.most_body();
    let taken = taken.await.unwrap_or_else(|error| Err(error.to_string()));
    let bytes = match taken {
        Ok(bytes) => bytes,
        Err(why) => {
            let part = ToSupervisor::Timeline(TimelinePart::Failed);
            let _ = link.say(&part, codec::cut(&why, most)).await;
            return;
        }
    };
    let mut rest = &bytes[..];
    loop {
        let (body, behind) = rest.split_at(rest.len().min(most));
        let part = if behind.is_empty() { TimelinePart::Last } else { TimelinePart::More };
        if link.say(&ToSupervisor::Timeline(part), body).await != Sent::Yes || behind.is_empty() {
            return;
        }
        rest = behind;
    }
}
