//! Returns memory that kernels used in place to the host.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::memory::Element;
use crate::memory::mapped::Mapped;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::view::Readable;
use crate::op::freeze::{before_host, check};
use crate::op::{HostValue, Op};
use gpu_await_protocol::hazard::Mode;

impl<T: Element> Mapped<T> {
    /// Waits until every use is complete, then lends the memory to the host, to read a kernel's output and
    /// write the next one's input. Nothing can be submitted with it during the borrow.
    ///
    /// # Cancel safety
    /// Yes: dropping the future loses nothing.
    ///
    /// # Errors
    /// Its producer failed ([`ErrorDetail::Upstream`](crate::ErrorDetail::Upstream)), until an
    /// operation overwrites all of it; a device that is lost or closed.
    pub async fn host(&mut self) -> Result<&mut [T]> {
        let (uses, on) = before_host("host", &self.span(), Mode::ReadWrite)?;
        // This fails if the producer failed when it ran. Checked again below: the driver may refuse a list that was not yet on its stream.
        Op::behind_uses(uses, HostValue::Here((), on)).await?;
        check("host", &self.span())?;
        Ok(self.host_mut())
    }

    /// Turns the memory back into a pinned buffer. Ready proves *visible to the host*: every use is complete.
    ///
    /// # Ownership
    /// If it fails or is dropped, the memory returns to its pool when every use is complete.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    pub fn into_pinned(self) -> Op<PinnedBuffer<T>> {
        match before_host("into_pinned", &self.span(), Mode::ReadWrite) {
            Err(error) => Op::failed(error),
            Ok((uses, on)) => {
                let pinned = HostValue::later(move || {
                    check("into_pinned", &self.span()).map(|()| self.into_host())
                });
                Op::behind_uses(uses, pinned.if_none_failed(on))
            }
        }
    }
}
