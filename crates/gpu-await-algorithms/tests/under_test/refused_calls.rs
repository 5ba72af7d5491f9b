//! Each call of the driver refused in turn.

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::DriverCall;
use gpu_await::{ErrorKind, Stream, testing};

/// Has `run` do the same on one host device after the other. It makes what it needs and calls `refuse`, behind which the nth launch,
/// allocation or copy to the host is refused, for each n below `calls`; the text says which. What it made is to be dropped when it
/// returns: nothing is left behind then.
pub(crate) fn each_call_refused(calls: u64, run: impl Fn(&Stream, &dyn Fn(), &str)) {
    for nth in 1..calls {
        for kind in [DriverCall::Launch, DriverCall::Alloc, DriverCall::CopyToHost] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream().expect("a stream");
            let refuse = || {
                stream.done().synchronize().expect("done");
                handle.fail_nth(kind, nth, ErrorKind::Driver);
            };
            let which = format!("{kind:?} {nth}");
            run(&stream, &refuse, &which);
            assert!(device.lost().now_or_never().is_none(), "{which}");
            stream.done().synchronize().expect("done");
            block_on(device.trim(0)).ok();
        }
    }
}
