//! [`Failure`]: why a service could not do something.
#![forbid(unsafe_code)]

use std::fmt;
use std::panic::Location;

use gpu_await::{ErrorDetail, ErrorKind};

/// Why a service could not do something. Made from any error by `?`.
///
/// A `gpu_await` error among its sources decides its kind: a lost device ends the process. An error that shows another's text and sources as
/// its own (`#[error(transparent)]`) hides that error; `#[source]` or `#[from]` with a text of its own does not.
///
/// # Examples
/// ```
/// use gpu_await_worker::Failure;
/// fn parse(text: &str) -> Result<u32, Failure> {
///     Ok(text.parse::<u32>()?)
/// }
/// assert!(parse("x").unwrap_err().to_string().contains("invalid digit"));
/// ```
#[derive(Debug)]
pub struct Failure {
    text: String,
    kind: Option<ErrorKind>,
    /// The bytes that found no room, the bytes that the front holds, and the bytes that there are.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no payloads"))]
    held: Option<(u64, u64, u64)>,
    /// The process is ending: its device refuses work.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no processes"))]
    is_ending: bool,
    /// The errno with which the system refused a thread, a descriptor or memory: there may be more soon.
    #[cfg(target_os = "linux")]
    refused: Option<i32>,
}

impl Failure {
    /// Makes a failure with this text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Failure {
            text: text.into(),
            kind: None,
            held: None,
            is_ending: false,
            #[cfg(target_os = "linux")]
            refused: None,
        }
    }

    /// There is no room for a payload of `bytes`, because the front holds `held` bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_held(bytes: u64, held: u64, limit: u64) -> Self {
        let text = format!(
            "no room for a payload of {bytes} bytes: the front holds {held} of {limit}, and lets go of none"
        );
        Failure { held: Some((bytes, held, limit)), ..Failure::new(text) }
    }

    /// Whether it failed because the process is ending.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// The errno with which the system refused something that there may be more of soon.
    #[cfg(target_os = "linux")]
    pub(crate) fn refused(&self) -> Option<i32> {
        self.refused
    }

    /// The figures given to [`of_held`](Self::of_held).
    #[cfg(target_os = "linux")]
    pub(crate) fn held(&self) -> Option<(u64, u64, u64)> {
        self.held
    }

    /// The kind of the `gpu-await` error behind it, which says what can be done; `None` for other errors.
    #[must_use]
    pub fn kind(&self) -> Option<ErrorKind> {
        self.kind
    }
}

impl<E: std::error::Error + 'static> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        let (mut kind, mut is_ending) = (None, false);
        #[cfg(target_os = "linux")]
        let mut refused = None;
        while let Some(error) = next {
            let ours = error.downcast_ref::<gpu_await::Error>();
            if let Some(error) = ours {
                let lost = error.is_device_lost().then_some(ErrorKind::DeviceLost);
                kind = kind.or(lost).or(Some(error.kind()));
                is_ending |= matches!(error.detail(), ErrorDetail::ProcessEnding { .. });
                // The caller's line is the next best, and the error's own text may contain it.
                let at = error.at().unwrap_or(Location::caller()).to_string();
                if !text.contains(&at) {
                    text = format!("{text} (at {at})");
                }
            }
            #[cfg(target_os = "linux")]
            {
                refused = refused.or(refusal(error));
            }
            next = error.source();
        }
        Failure {
            text,
            kind,
            held: None,
            is_ending,
            #[cfg(target_os = "linux")]
            refused,
        }
    }
}

/// The errno with which the system refused a thread, a descriptor or memory, if the error says so.
#[cfg(target_os = "linux")]
fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    const MORE_SOON: [i32; 4] = [libc::EAGAIN, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    let ours = error.downcast_ref::<gpu_await::Error>();
    if ours.is_some_and(|ours| matches!(ours.detail(), ErrorDetail::NoThread { .. })) {
        return Some(libc::EAGAIN);
    }
    let number = error.downcast_ref::<std::io::Error>()?.raw_os_error()?;
    MORE_SOON.contains(&number).then_some(number)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("a model")]
    struct Wrapped(#[source] std::io::Error);

    #[test]
    fn what_the_system_refuses_is_known() {
        let of = |number| Failure::from(Wrapped(std::io::Error::from_raw_os_error(number)));
        assert_eq!(of(libc::EMFILE).refused(), Some(libc::EMFILE));
        assert_eq!(of(libc::ENOENT).refused(), None);
        assert_eq!(Failure::new("no more").refused(), None);
    }
}
