//! What a program is to its workers: the front, one of their processes, or something that those started.
//!
//! A process of a worker is recognised by two things together: the variable that names the process which started it, and a packet socket
//! as its standard input. Programs that it starts inherit the variable, which tells them that they are inside of a worker, and never the
//! socket: it is close-on-exec from the first statement on.
//!
//! # Invariants
//! 1. A child of a worker's process is never taken for a worker (`a_program_of_a_worker_is_none`).
//! 2. Nothing is started in a program that would run itself again (`spawn_without_init_starts_nothing`).
#![forbid(unsafe_code)]

use std::any::TypeId;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use gpu_await::sibling::Process;

use crate::child;
use crate::error::{Error, Result};
use crate::service::{Service, Services};
use crate::system::{self, Executable};

/// Names the process that started a worker's.
pub(crate) const PARENT: &str = "GPU_AWAIT_WORKER_OF";

/// The longest name of a service, in bytes: it travels in the first message.
const MOST_NAME: usize = 4096;

/// The one argument of a worker's process, for process lists.
const ARGUMENT: &str = "gpu-await-worker";

/// How processes of this program are started.
#[derive(Debug)]
pub(crate) struct Program {
    /// The file that this process was started from, whatever its path names meanwhile.
    pub(crate) file: OwnedFd,
    pub(crate) executable: Executable,
    pub(crate) arguments: Vec<String>,
    services: Vec<(&'static str, TypeId)>,
    process: Process,
}

static PROGRAM: OnceLock<Result<Program>> = OnceLock::new();

impl Program {
    /// The program of this process, to start this service.
    pub(crate) fn get<S: Service>() -> Result<&'static Program> {
        if std::env::var_os(PARENT).is_some() {
            return Err(Error::InsideWorker);
        }
        let program = PROGRAM.get().ok_or(Error::NotInitialised)?.as_ref().map_err(Clone::clone)?;
        if !program.process.is_here() {
            return Err(Error::Forked);
        }
        if !program.services.contains(&(S::name(), TypeId::of::<S>())) {
            return Err(Error::NotRegistered { service: S::name() });
        }
        Ok(program)
    }
}

/// Whether this is a fork of the process that called [`init`].
pub(crate) fn is_fork() -> bool {
    let program = PROGRAM.get().and_then(|program| program.as_ref().ok());
    program.is_some_and(|program| !program.process.is_here())
}

/// Lets workers run in this program: the first statement of `main`, with the services that they serve.
///
/// In a process of a worker it serves, and does not return. Everywhere else it returns at once: it opens the program's own file, which
/// all processes execute, and starts nothing. Whether that file is replaced, renamed, removed or touched meanwhile does not matter; without the
/// permission to execute it no process is started until that is back ([`WorkerHealth::refusal`](crate::WorkerHealth::refusal)).
///
/// # Examples
/// ```no_run
/// # struct Model;
/// # impl gpu_await_worker::Service for Model {
/// #     type Config = (); type Request = (); type Response = ();
/// #     async fn start(_: (), _: &gpu_await_worker::Host) -> Result<Self, gpu_await_worker::Failure> { Ok(Model) }
/// #     async fn call(&self, _: (), _: &mut gpu_await_worker::Payloads) -> Result<(), gpu_await_worker::Failure> { Ok(()) }
/// # }
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     gpu_await_worker::init::<Model>();
///     // Threads, runtimes and arguments from here on.
///     tokio::runtime::Runtime::new()?.block_on(async {
///         // ..
///         Ok(())
///     })
/// }
/// ```
///
/// Do not use it under `#[tokio::main]`, which builds the runtime before the first statement: a worker's process runs its own runtime, and ends
/// with [`Cause::InsideRuntime`](crate::Cause::InsideRuntime) where there is one.
///
/// In tests see [`test_main!`](crate::test_main).
///
/// # Panics
/// Two services have one [name](Service::name), of at most 4,096 bytes.
pub fn init<S: Services>() {
    register::<S>(vec![ARGUMENT.to_owned()]);
}

/// [`init`], for a program that is started with these arguments.
pub(crate) fn register<S: Services>(arguments: Vec<String>) {
    serve_if_child::<S>();
    let services = S::names();
    check_names(&services);
    PROGRAM.get_or_init(|| {
        let open = || -> std::io::Result<Program> {
            let file = system::own_program()?;
            Ok(Program {
                executable: system::identity(std::os::fd::AsFd::as_fd(&file))?,
                file,
                arguments,
                services,
                process: Process::remembered(),
            })
        };
        open().map_err(|error| Error::system("opening /proc/self/exe", error))
    });
}

/// Panics if a process could not tell two of them apart.
fn check_names(services: &[(&'static str, TypeId)]) {
    for (at, (name, service)) in services.iter().enumerate() {
        let clash = |(named, other): &(&str, TypeId)| named == name && other != service;
        assert!(
            !services[at..].iter().any(clash),
            "`init` names two services that are both called {name}: give one another name, by `Service::name`"
        );
        assert!(
            name.len() <= MOST_NAME,
            "the name of a service has {} bytes, and the limit is {MOST_NAME}: give it another one, by `Service::name`",
            name.len()
        );
    }
}

/// Serves, if this is a process of a worker.
pub(crate) fn serve_if_child<S: Services>() {
    let parent = std::env::var(PARENT).ok().and_then(|parent| parent.parse().ok());
    if let Some(parent) = parent.filter(|_| system::is_packet_socket(rustix::stdio::stdin())) {
        child::run::<S>(parent);
    }
}

/// Defines what a test binary needs to spawn workers: a test that a worker's process runs, and that otherwise does nothing, and a
/// function `gpu_await_worker_init`, which each test that spawns calls first. Takes the services.
///
/// # Examples
/// ```no_run
/// # struct Model;
/// # impl gpu_await_worker::Service for Model {
/// #     type Config = (); type Request = (); type Response = ();
/// #     async fn start(_: (), _: &gpu_await_worker::Host) -> Result<Self, gpu_await_worker::Failure> { Ok(Model) }
/// #     async fn call(&self, _: (), _: &mut gpu_await_worker::Payloads) -> Result<(), gpu_await_worker::Failure> { Ok(()) }
/// # }
/// gpu_await_worker::test_main!(Model);
///
/// // In each test that spawns:
/// gpu_await_worker_init();
/// ```
#[macro_export]
macro_rules! test_main {
    ($($service:ty),+ $(,)?) => {
        #[test]
        fn gpu_await_worker_child() {
            $crate::testing::child::<($($service,)+)>();
        }

        #[allow(dead_code, reason = "a binary may have no test that spawns")]
        fn gpu_await_worker_init() {
            $crate::testing::init::<($($service,)+)>(::core::module_path!());
        }
    };
}

/// What [`test_main!`](crate::test_main) expands to.
#[doc(hidden)]
pub mod testing {
    use super::{register, serve_if_child};
    use crate::service::Services;

    pub fn child<S: Services>() {
        serve_if_child::<S>();
    }

    pub fn init<S: Services>(module: &str) {
        // Without the name of the crate, which libtest leaves out.
        let path = module.split_once("::").map_or(String::new(), |(_, path)| format!("{path}::"));
        let test = format!("{path}gpu_await_worker_child");
        let options = ["--exact", "--nocapture", "--test-threads=1"].map(str::to_owned);
        register::<S>([vec![test], options.to_vec()].concat());
    }
}
