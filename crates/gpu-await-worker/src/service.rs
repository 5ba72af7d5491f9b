//! [`Service`]: what a process of a worker does.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::panic::Location;

use gpu_await::{ErrorDetail, ErrorKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Host, Payloads};

/// What a process of a worker does: it starts once, and is called from then on, many times at once.
///
/// Its methods run in the process of the worker, on a tokio runtime of its own. A panic in `call`, in its future as it is dropped, or in the
/// code of requests and responses (`Serialize`, `Deserialize`, `Drop`) is that call's error. What ends the
/// process (a fault of the GPU, an abort, a stray pointer) ends the calls that it had, and no others.
///
/// # Examples
/// ```
/// use gpu_await_worker::{Failure, Host, Payloads, Service};
///
/// struct Double(gpu_await::Stream);
///
/// impl Service for Double {
///     type Config = ();
///     type Request = Vec<f32>;
///     type Response = Vec<f32>;
///
///     async fn start((): (), host: &Host) -> Result<Self, Failure> {
///         Ok(Double(host.device().stream()?))
///     }
///
///     async fn call(&self, x: Vec<f32>, _: &mut Payloads) -> Result<Vec<f32>, Failure> {
///         let x = self.0.upload(x).queued()?;
///         Ok(self.0.download(&x).await?.iter().map(|x| 2.0 * x).collect())
///     }
/// }
/// ```
pub trait Service: Sized + Send + Sync + 'static {
    /// What it needs to start. The same for each process of a worker.
    type Config: Serialize + DeserializeOwned + Send + 'static;
    /// What a call asks: small, as large data are [payloads](Payloads). At most 128 levels deep, of options, newtypes, lists, maps, structs and
    /// variants ([`Error::TooDeep`](crate::Error::TooDeep)). The format (postcard's) has no names of fields, and says of no value what it is: serde's
    /// `untagged`, `tag`, `flatten` and `skip_serializing_if` do not work in it. Zero-sized elements in lists take time for each and no byte of
    /// the message: do not use them.
    type Request: Serialize + DeserializeOwned + Send + 'static;
    /// What a call answers: small, likewise.
    type Response: Serialize + DeserializeOwned + Send + 'static;

    /// Tells it from the other services of a program, in its processes: the name of its type. Two types that Rust names alike, such as those of
    /// two functions' blocks, need names of their own: [`init`](crate::init) refuses them otherwise.
    fn name() -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Loads models, compiles kernels, opens streams of [`Host::device`].
    ///
    /// # Errors
    /// The process ends; whether another one is started says [`Restart`](crate::Restart).
    fn start(
        config: Self::Config,
        host: &Host,
    ) -> impl Future<Output = Result<Self, Failure>> + Send;

    /// Answers a call.
    ///
    /// # Cancel safety
    /// Runs to its end once it has begun, whether or not somebody waits for the answer.
    ///
    /// # Errors
    /// The caller gets the text, as [`Error::Service`](crate::Error::Service). An error of `gpu-await` that says that the device is lost
    /// ends the process instead.
    fn call(
        &self,
        request: Self::Request,
        payloads: &mut Payloads,
    ) -> impl Future<Output = Result<Self::Response, Failure>> + Send;
}

/// Why a service could not do something. Made from any error by `?`.
///
/// An error of `gpu_await` among its sources says what kind it is: that a device was lost ends the process. An error that shows another's text and
/// sources as its own (`#[error(transparent)]`) hides which one that is; `#[source]` or `#[from]` with a text of its own does not.
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
    /// The bytes that there was no room for, those that the front holds, and those that there are.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no payloads"))]
    held: Option<(u64, u64, u64)>,
    /// The process is ending: its device refuses work.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no processes"))]
    is_ending: bool,
}

impl Failure {
    /// With this text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Failure { text: text.into(), kind: None, held: None, is_ending: false }
    }

    /// There is no room for a payload of `bytes`, because the front holds so many.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_held(bytes: u64, held: u64, limit: u64) -> Self {
        let text = format!(
            "no room for a payload of {bytes} bytes: the front holds {held} of {limit}, and lets go of none"
        );
        Failure { held: Some((bytes, held, limit)), ..Failure::new(text) }
    }

    /// Whether the process is ending, and so is what it was asked to do.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// What it was made of by [`of_held`](Self::of_held).
    #[cfg(target_os = "linux")]
    pub(crate) fn held(&self) -> Option<(u64, u64, u64)> {
        self.held
    }

    /// What an error of `gpu-await` says that can be done; `None` of other errors.
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
        while let Some(error) = next {
            let ours = error.downcast_ref::<gpu_await::Error>();
            if let Some(error) = ours {
                let lost = error.is_device_lost().then_some(ErrorKind::DeviceLost);
                kind = kind.or(lost).or(Some(error.kind()));
                is_ending |= matches!(error.detail(), ErrorDetail::ProcessEnding { .. });
                // The line that met it is the next best, and the error's own text may have that.
                let at = error.at().unwrap_or(Location::caller()).to_string();
                if !text.contains(&at) {
                    text = format!("{text} (at {at})");
                }
            }
            next = error.source();
        }
        Failure { text, kind, held: None, is_ending }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The services that processes of a program may serve: one, or a tuple of up to four. For [`init`](crate::init).
pub trait Services: sealed::Services {}

impl<S: sealed::Services> Services for S {}

pub(crate) mod sealed {
    use std::any::TypeId;

    use super::Service;

    /// How a service is found by name.
    pub trait Services {
        /// The names of all, and the types that have them.
        fn names() -> Vec<(&'static str, TypeId)>;

        /// Serves the one with that name, which does not return; returns if there is none.
        #[cfg(target_os = "linux")]
        #[doc(hidden)]
        fn serve(name: &str, child: crate::child::Child) -> crate::child::Child;
    }

    impl<S: Service> Services for S {
        fn names() -> Vec<(&'static str, TypeId)> {
            vec![(S::name(), TypeId::of::<S>())]
        }

        #[cfg(target_os = "linux")]
        fn serve(name: &str, child: crate::child::Child) -> crate::child::Child {
            if name == S::name() { child.serve::<S>() } else { child }
        }
    }

    macro_rules! tuples {
        ($($($service:ident)+;)+) => {$(
            impl<$($service: Service),+> Services for ($($service,)+) {
                fn names() -> Vec<(&'static str, TypeId)> {
                    [$(<$service as Services>::names()),+].concat()
                }

                #[cfg(target_os = "linux")]
                fn serve(name: &str, child: crate::child::Child) -> crate::child::Child {
                    $(let child = <$service as Services>::serve(name, child);)+
                    child
                }
            }
        )+};
    }
    tuples! { A; A B; A B C; A B C D; }
}
