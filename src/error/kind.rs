//! [`ErrorKind`]: what a caller can do about an error, and which kind each error is of.
#![forbid(unsafe_code)]

use super::ErrorDetail;
use super::foreign::LibraryStatus;
use super::reservation::ReservationProblem;
use super::shared::SharedProblem;

/// What a caller can do about an [`Error`](crate::Error).
///
/// | kind | what the caller can do |
/// |---|---|
/// | [`ErrorKind::InvalidCall`] | fix the call; nothing was put on the device, and its outputs cannot be read until something overwrites them |
/// | [`ErrorKind::OutOfMemory`] | free something and retry; everything else still works. Any call can return it: an allocation, a launch that needs scratch memory, NVIDIA's libraries. Before retrying an in-place operation (`sort`, an update) call [`clear_poison`](crate::DeviceBuffer::clear_poison), see below |
/// | [`ErrorKind::Overloaded`] | retry later |
/// | [`ErrorKind::TimedOut`] | wait longer or give up; submitted work goes on, and work not yet submitted never runs |
/// | [`ErrorKind::Unsupported`] | this device or driver cannot do it |
/// | [`ErrorKind::DeviceLost`] | [`is_device_lost`](crate::Error::is_device_lost): the process cannot get that device back: report and exit; otherwise ([`ErrorDetail::DependencyLost`]) another device is lost: make a new stream |
/// | [`ErrorKind::Closed`] | the device was closed by [`Device::close`](crate::Device::close), the context of an adopted stream by its owner, or `main` has returned |
/// | [`ErrorKind::Driver`] | the driver refused a valid call; its number is in the detail |
/// | [`ErrorKind::Panicked`] | fix the closure that ran the batch or enqueued the work; other work goes on |
/// | [`ErrorKind::Foreign`] | see the other library's error, the [`source`](std::error::Error::source) |
///
/// Whatever the kind, memory that a failed operation would have written or updated counts as failed until
/// something overwrites all of it, even if nothing was put on the device, because the error may have gone
/// unnoticed. Its readers fail with [`ErrorDetail::Upstream`], whose kind is that of the cause: code that
/// retries by kind should check for that detail first. An in-place operation that was refused before it began
/// can be retried after [`DeviceBuffer::clear_poison`](crate::DeviceBuffer::clear_poison).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call itself was wrong; nothing was put on the device.
    ///
    /// Errors follow data, including those of refused calls: the destination counts as failed, and its readers are
    /// refused with [`ErrorDetail::Upstream`], which names the call, until all of it is overwritten by a
    /// fill, a copy or a kernel's [`Out`](crate::Out). The corrected call does that, unless it keeps part of
    /// the destination, as a kernel's `&mut [T]` and [rows with gaps](crate::Stream::copy_2d) do. Before such a call,
    /// [clear the poison](crate::DeviceBuffer::clear_poison) if the refused call would have kept a part as well; otherwise, as after
    /// rows without gaps or ones that do not fit, overwrite all of it.
    InvalidCall,
    /// Device memory or host memory ran out.
    OutOfMemory,
    /// Too much work is in flight, or the system refuses a thread.
    Overloaded,
    /// A time limit passed.
    TimedOut,
    /// This device, driver or build cannot do what was asked.
    Unsupported,
    /// A device is gone for this process: the operation's own, or, with
    /// [`ErrorDetail::DependencyLost`], another one that its stream waits for.
    /// [`Error::is_device_lost`](crate::Error::is_device_lost) tells the two apart.
    DeviceLost,
    /// The device was closed, or the context of an adopted stream; or the process is ending.
    Closed,
    /// The driver refused a call that this crate considered valid.
    Driver,
    /// A closure that the caller passed panicked.
    Panicked,
    /// Another library refused its part; its error is the [`source`](std::error::Error::source).
    Foreign,
}

impl ErrorDetail {
    pub(super) fn kind(&self) -> ErrorKind {
        use ErrorDetail as D;
        match self {
            D::BadDeviceName { .. }
            | D::BadImage { .. }
            | D::Compile { .. }
            | D::NoSuchKernel { .. }
            | D::WrongParameters { .. }
            | D::NotProgrammatic { .. }
            | D::Precondition { .. }
            | D::IntegerRange { .. }
            | D::Evaluation { .. }
            | D::LaunchLimit { .. }
            | D::PartialCluster { .. }
            | D::WrongDevice { .. }
            | D::BadStream { .. }
            | D::BadMemory { .. }
            | D::BadTensor { .. }
            | D::LengthMismatch { .. }
            | D::BadPiece { .. }
            | D::RepeatedBlock { .. }
            | D::OutOfBounds { .. }
            | D::WrongLength { .. }
            | D::LiteralOutOfRange { .. }
            | D::Misaligned { .. }
            | D::TooLarge { .. }
            | D::Reinterpret { .. }
            | D::Pitch { .. }
            | D::Ragged { .. }
            | D::HostValue { .. }
            | D::NotInGraph { .. }
            | D::KeptByGraph { .. }
            | D::Unwritten { .. }
            | D::WrongThread { .. }
            | D::TooFew { .. }
            | D::Replies { .. }
            | D::NoSuchShare { .. }
            | D::Event { .. } => ErrorKind::InvalidCall,
            D::NoDriver { .. }
            | D::NotBuilt
            | D::NoSuchDevice { .. }
            | D::MissingSymbol { .. }
            | D::NoCompiler { .. }
            | D::NoLibrary { .. }
            | D::NoImplementation { .. }
            | D::Requires { .. }
            | D::Unsupported { .. } => ErrorKind::Unsupported,
            D::Reservation { problem, .. } => match problem {
                ReservationProblem::TooMuch { .. } | ReservationProblem::Spent { .. } => {
                    ErrorKind::OutOfMemory
                }
                ReservationProblem::NotNow { .. } => ErrorKind::Overloaded,
                ReservationProblem::TooLate { .. } => ErrorKind::TimedOut,
                ReservationProblem::Held { .. } => ErrorKind::InvalidCall,
            },
            D::BadShared { problem: SharedProblem::System { .. } } => ErrorKind::Overloaded,
            D::BadShared { .. } => ErrorKind::InvalidCall,
            D::Driver { code, .. } | D::BrokenDriver { code, .. } => code.kind(),
            D::BadCount { .. } => ErrorKind::Driver,
            // The cause decides what the reader can do about it.
            D::Upstream { cause, .. } | D::Verify { cause, .. } => cause.kind(),
            D::OutOfMemory { .. } | D::OutOfPinnedMemory { .. } | D::OutOfHostMemory { .. } => {
                ErrorKind::OutOfMemory
            }
            D::BatchPanicked { .. } | D::EnqueuePanicked { .. } => ErrorKind::Panicked,
            D::Foreign { cause, .. } => {
                cause.downcast_ref().map_or(ErrorKind::Foreign, LibraryStatus::kind)
            }
            D::NoPartition { asked, all, .. } if asked > all => ErrorKind::Unsupported,
            D::Overloaded { .. }
            | D::TooLate { .. }
            | D::NoThread { .. }
            | D::NoPartition { .. } => ErrorKind::Overloaded,
            D::Expired { remaining_us: 1.., .. } => ErrorKind::Overloaded,
            D::TimedOut { .. } | D::Expired { .. } => ErrorKind::TimedOut,
            D::DependencyLost { .. } | D::DeviceLost { .. } => ErrorKind::DeviceLost,
            D::Closed { .. }
            | D::StreamDetached { .. }
            | D::ProcessEnding { .. }
            | D::Forked { .. } => ErrorKind::Closed,
        }
    }
}
