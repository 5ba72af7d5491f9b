//! The timeline of the device, as a process sends it to its supervisor.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_await::Device;

use super::Link;
use crate::codec;
use crate::frame::{MOST_TIMELINE, TimelinePart, ToSupervisor};
use crate::system::Sent;

/// A body that any socket takes.
const SHORT: usize = 1 << 10;

/// Sends the timeline of the device, in parts of at most `most` bytes.
pub(super) async fn tell(link: Arc<Link>, device: Option<Device>, mut most: usize) {
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
    let taken = taken.await.unwrap_or_else(|error| Err(error.to_string()));
    let bytes = match taken {
        Ok(bytes) => bytes,
        Err(why) => {
            let part = ToSupervisor::Timeline(TimelinePart::Failed);
            let _ = link.say(&part, codec::cut(&why, most.min(SHORT))).await;
            return;
        }
    };
    let mut rest = &bytes[..];
    loop {
        let (body, behind) = rest.split_at(rest.len().min(most));
        let part = if behind.is_empty() { TimelinePart::Last } else { TimelinePart::More };
        match link.say(&ToSupervisor::Timeline(part), body).await {
            Sent::Yes if behind.is_empty() => return,
            Sent::Yes => rest = behind,
            // The system's sockets take less.
            Sent::TooLong if most > SHORT => most /= 2,
            Sent::TooLong | Sent::Full | Sent::NoMemory | Sent::Gone => return,
        }
    }
}
