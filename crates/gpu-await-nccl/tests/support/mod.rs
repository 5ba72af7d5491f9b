//! The devices that the tests run on, and numbers in an order that a seed fixes.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod process;
#[path = "../../../../tests/under_test/random.rs"]
mod random;

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use gpu_await::Device;
use gpu_await_nccl::{Communicator, Error, Group};

#[allow(unused_imports, reason = "each test uses a part of it")]
pub(crate) use self::random::Random;

/// Long enough for a machine that does a lot besides.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn on_gpus() -> bool {
    std::env::var("GPU_AWAIT_TEST_DEVICE").is_ok_and(|name| name.starts_with("cuda"))
}

/// So many host devices; with `GPU_AWAIT_TEST_DEVICE=cuda` as many GPUs of them as there are.
///
/// # Panics
/// If GPUs are asked for and there is none: never a skip.
pub(crate) fn devices(most: usize) -> Vec<Device> {
    if !on_gpus() {
        return (0..most).map(|_| Device::host()).collect();
    }
    let count = Device::count().min(most);
    assert!(count > 0, "GPU_AWAIT_TEST_DEVICE asks for GPUs, and there is none");
    (0..count).map(|ordinal| Device::cuda(ordinal).expect("a GPU")).collect()
}

/// A communicator over all of them that fails rather than hang.
pub(crate) async fn all(devices: &[Device]) -> Communicator {
    let comm = Communicator::all(devices).await.expect("a communicator");
    comm.set_limit(Some(LIMIT));
    comm
}

/// An address that nobody listens at, and on Linux nobody else asks for: this process and this call have a loopback address of their own.
pub(crate) fn address() -> String {
    static CALLS: AtomicU8 = AtomicU8::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = match cfg!(target_os = "linux") {
        true => Ipv4Addr::new(127, high, low, CALLS.fetch_add(1, Ordering::Relaxed)),
        false => Ipv4Addr::LOCALHOST,
    };
    let listener = std::net::TcpListener::bind((host, 0)).expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// Groups of all ranks of a world, as if they were in processes of their own.
pub(crate) async fn groups(world: usize) -> Vec<Group> {
    let address = &address();
    let join = async |rank| within(Group::join_within(LIMIT, address, rank, world)).await;
    futures::future::try_join_all((0..world).map(join)).await.expect("they meet")
}

/// A communicator of each group.
pub(crate) async fn connect(groups: &[Group], device: &Device) -> Vec<Communicator> {
    let connect = async |group: &Group| {
        let comm = within(group.connect(device)).await?;
        comm.set_limit(Some(LIMIT));
        Ok::<_, Error>(comm)
    };
    futures::future::try_join_all(groups.iter().map(connect)).await.expect("connected")
}

/// Fails the test if a future is not ready in time.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(2 * LIMIT, future).await.expect("in time")
}

/// The text of an operation's error says nothing twice in a row, and no error of the crate repeats its source.
pub(crate) fn says_all_once(error: &gpu_await::Error) {
    let text = error.to_string();
    let parts: Vec<&str> = text.split(": ").collect();
    assert!(parts.windows(2).all(|parts| parts[0] != parts[1]), "{text}");
    let mut next = Error::of(error).map(|ours| ours as &dyn std::error::Error);
    while let Some(parent) = next {
        next = parent.source();
        let repeats = next.is_some_and(|next| parent.to_string().contains(&next.to_string()));
        assert!(!repeats, "{parent}");
    }
}

/// The crate's error in that of an operation.
pub(crate) fn ours(error: gpu_await::Error) -> Error {
    says_all_once(&error);
    Error::of(&error).expect("ours").clone()
}

/// Tests on GPUs run one at a time: they share them.
pub(crate) async fn turn() -> Option<tokio::sync::MutexGuard<'static, ()>> {
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    if on_gpus() { Some(TURN.lock().await) } else { None }
}
