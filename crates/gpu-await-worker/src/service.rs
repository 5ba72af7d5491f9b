//! [`Service`]: what a process of a worker does.
#![forbid(unsafe_code)]

use std::future::Future;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::{Host, Payloads};

/// What a worker's process does: it starts once, and then serves many calls at the same time.
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
    /// The request of a call: small, since large data are [payloads](Payloads). At most 128 levels deep, of options, newtypes, lists, maps, structs and
    /// variants ([`Error::TooDeep`](crate::Error::TooDeep)). The format (postcard's) has no field names and is not self-describing: serde's `untagged`,
    /// `tag`, `flatten` and `skip_serializing_if` do not work in it. Do not use zero-sized elements in lists: each takes time but no byte
    /// of the message.
    type Request: Serialize + DeserializeOwned + Send + 'static;
    /// The response of a call: small, likewise.
    type Response: Serialize + DeserializeOwned + Send + 'static;

    /// Identifies the service among those of a program: by default the name of its type. Two types that Rust names alike, such as those of
    /// two functions' blocks, need names of their own: [`init`](crate::init) refuses them otherwise.
    fn name() -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Loads models, compiles kernels, opens streams of [`Host::device`].
    ///
    /// # Errors
    /// The process ends; [`Restart`](crate::Restart) says whether another one is started. If the error, or one of its sources, says that
    /// the system refused a thread, a descriptor or memory, that is not a [death](crate::Stats::refused_starts).
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

        /// Serves the service with that name; returns if there is none.
        #[doc(hidden)]
        fn serve<P: Serves>(name: &str, process: P) -> P;
    }

    /// A process that can serve any service.
    pub trait Serves: Sized {
        /// Serves this one; does not return.
        fn serve<S: Service>(self) -> Self;
    }

    impl<S: Service> Services for S {
        fn names() -> Vec<(&'static str, TypeId)> {
            vec![(S::name(), TypeId::of::<S>())]
        }

        fn serve<P: Serves>(name: &str, process: P) -> P {
            if name == S::name() { process.serve::<S>() } else { process }
        }
    }

    macro_rules! tuples {
        ($($($service:ident)+;)+) => {$(
            impl<$($service: Service),+> Services for ($($service,)+) {
                fn names() -> Vec<(&'static str, TypeId)> {
                    [$(<$service as Services>::names()),+].concat()
                }

                fn serve<P: Serves>(name: &str, process: P) -> P {
                    $(let process = <$service as Services>::serve(name, process);)+
                    process
                }
            }
        )+};
    }
    tuples! { A; A B; A B C; A B C D; }
}
