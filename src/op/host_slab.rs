//! Host access to the blocks of a host slab.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::Location;

use crate::error::Result;
use crate::error::refused::Here;
use crate::memory::Element;
use crate::memory::host_slab::HostSlab;
use crate::memory::view::Readable;
use crate::op::freeze::{before_host, check};
use crate::op::{HostValue, Op};
use crate::runtime::Point;
use gpu_await_protocol::hazard::Mode;

impl<T: Element> HostSlab<T> {
    /// Waits until everything that writes the block is complete, then lends it to the host. Operations that read it may go on.
    ///
    /// # Cancel safety
    /// Yes: dropping the future loses nothing.
    ///
    /// # Errors
    /// Its producer failed ([`ErrorDetail::Upstream`](crate::ErrorDetail::Upstream)), until an operation overwrites all of it;
    /// a graph that uses it in each launch ([`ErrorDetail::KeptByGraph`](crate::ErrorDetail::KeptByGraph)); there is no such block; a device
    /// that is lost or closed.
    #[track_caller]
    pub fn host(&self, number: u32) -> impl Future<Output = Result<&[T]>> + Send {
        let at = Location::caller();
        async move {
            self.reached("host", number, Mode::Read).await.map_err(|error| error.called_at(at))?;
            Ok(self.slice(number))
        }
    }

    /// Waits until every use of the block is complete, then lends it to the host, to be read and written. Nothing can be submitted with the slab
    /// during the borrow.
    ///
    /// # Cancel safety
    /// Yes: dropping the future loses nothing.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    #[track_caller]
    pub fn host_mut(&mut self, number: u32) -> impl Future<Output = Result<&mut [T]>> + Send {
        let at = Location::caller();
        async move {
            let reached = self.reached("host_mut", number, Mode::ReadWrite).await;
            reached.map_err(|error| error.called_at(at))?;
            Ok(self.slice_mut(number))
        }
    }

    /// Lends the block to the host, if nothing that writes it is pending.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    #[track_caller]
    pub fn try_host(&self, number: u32) -> Result<Option<&[T]>> {
        let is_free = self.is_free("try_host", number, Mode::Read).here()?;
        Ok(is_free.then(|| self.slice(number)))
    }

    /// Lends the block to the host, to be read and written, if no use of it is pending.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    #[track_caller]
    pub fn try_host_mut(&mut self, number: u32) -> Result<Option<&mut [T]>> {
        let is_free = self.is_free("try_host_mut", number, Mode::ReadWrite).here()?;
        Ok(is_free.then(|| self.slice_mut(number)))
    }

    /// Returns a future that waits for the block's current uses and borrows nothing. Ready proves *visible to the host*: all of them
    /// are complete. Others may have been submitted since: check with [`try_host_mut`](Self::try_host_mut).
    ///
    /// # Errors
    /// As [`host`](Self::host).
    #[track_caller]
    pub fn idle(&self, number: u32) -> Op<()> {
        self.behind("idle", number, Mode::ReadWrite).here().unwrap_or_else(Op::failed)
    }

    /// Resolves when the uses that conflict with such an access are complete, and fails if the block's producer failed when it ran.
    fn behind(&self, op: &'static str, number: u32, mode: Mode) -> Result<Op<()>> {
        let (uses, on) = before_host(op, &self.block(number)?.span(), mode)?;
        Ok(Op::behind_uses(uses, HostValue::Here((), on)))
    }

    /// Waits until the host may access the block.
    async fn reached(&self, op: &'static str, number: u32, mode: Mode) -> Result<()> {
        self.behind(op, number, mode)?.await?;
        check(op, &self.block(number)?.span())
    }

    fn is_free(&self, op: &'static str, number: u32, mode: Mode) -> Result<bool> {
        let block = self.block(number)?.whole();
        let (uses, on) = before_host(op, &block, mode)?;
        let is_pending = |Point { stream, ticket }: &Point| {
            stream.ask(*ticket);
            !stream.is_complete(*ticket)
        };
        if uses.iter().any(is_pending) {
            return Ok(false);
        }
        on.map_or(Ok(()), |on| on.check())?;
        check(op, &block)?;
        Ok(true)
    }
}
