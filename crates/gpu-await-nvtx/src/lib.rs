//! [`gpu-await`](gpu_await) in Nsight Systems and other tools that listen to NVTX.
//!
//! Such a tool shows kernels and copies by itself, and to which launch on which thread they belong. This crate tells it what the program
//! was doing meanwhile, and what its streams are called:
//!
//! | | shows |
//! |---|---|
//! | [`SpanRanges`] | each time that a thread is inside of a [`tracing`] span, as a range of that thread; the tool draws it over the kernels that were launched in it as well |
//! | [`name_stream`] | the name of a stream in place of its number |
//!
//! Without a tool nobody is called; a span costs the lookup of its name. Threads of `gpu-await` have their names from the system.
//!
//! ```
//! # futures::executor::block_on(async {
//! use gpu_await::Device;
//! use gpu_await_nvtx::{SpanRanges, name_stream};
//! use tracing::{Instrument, info_span};
//! use tracing_subscriber::layer::SubscriberExt;
//!
//! let subscriber = tracing_subscriber::registry().with(SpanRanges::new());
//! tracing::subscriber::set_global_default(subscriber)?;
//!
//! let device = Device::from_env()?;
//! let stream = device.stream_builder().name("decode").build()?;
//! name_stream(&stream);
//! let work = async {
//!     let x = stream.upload(vec![1.0f32; 1000]).queued()?;
//!     stream.download(&x).await
//! };
//! work.instrument(info_span!("request")).await?; // `nsys profile ./program`
//! # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(()) }).unwrap();
//! ```
//!
//! To build it, [NVIDIA's `nvtx`](nvtx) needs a C compiler and libclang (Debian: `libclang-dev`), which `gpu-await` does not; hence it is a crate of
//! its own.

use std::cell::RefCell;
use std::fmt;
use std::sync::OnceLock;

use gpu_await::{DeviceKind, Stream};
use nvtx::domain::LocalRange;
use nvtx::{CudaResource, Domain, Str, name_cuda_resource};
use tracing::Subscriber;
use tracing::span::Id;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

thread_local! {
    /// The spans that the thread is inside of.
    static ENTERED: RefCell<Vec<(Id, LocalRange<'static>)>> = const { RefCell::new(Vec::new()) };
}

/// A layer of [`tracing_subscriber`] that shows spans as NVTX ranges, in the domain `gpu-await`.
///
/// A range is from when a thread enters a span to when it leaves it: an asynchronous task that is polled three times has three ranges, on the
/// threads that polled it. Select spans by a filter of `tracing_subscriber`; events are not shown.
///
/// # Source
/// `nvtxDomainRangePushEx`, `nvtxDomainRangePop`.
#[derive(Clone, Copy, Default)]
pub struct SpanRanges(());

impl SpanRanges {
    /// Makes the layer.
    #[must_use]
    pub fn new() -> Self {
        SpanRanges(())
    }
}

impl fmt::Debug for SpanRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SpanRanges")
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for SpanRanges {
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        static DOMAIN: OnceLock<Domain> = OnceLock::new();
        let Some(metadata) = context.metadata(id) else { return };
        let domain = DOMAIN.get_or_init(|| Domain::new(c"gpu-await"));
        let range = domain.local_range(Str::from_str_lossy(metadata.name()));
        // At the end of the thread there is no list any more, and the range ends at once.
        let _entered = ENTERED.try_with(|entered| entered.borrow_mut().push((id.clone(), range)));
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        let left = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            // Mostly the last one; of others the list stays as long as NVTX's own.
            let at = entered.iter().rposition(|(entered, _)| entered == id)?;
            Some(entered.remove(at))
        });
        drop(left);
    }
}

/// Shows the name of a stream, or `stream` and its id, in place of the driver's number. On a host device this does nothing.
///
/// # Source
/// `nvtxNameCuStreamA`.
pub fn name_stream(stream: &Stream) {
    if stream.device().kind() != DeviceKind::Cuda {
        return;
    }
    let name = stream.name().map_or_else(|| format!("stream {}", stream.id()), str::to_owned);
    // SAFETY: nothing is put on the stream, and the handle is not used after the loan.
    let loan = unsafe { stream.lend_raw() };
    // The handle is an address, of which NVTX takes only the number.
    let handle = std::ptr::with_exposed_provenance_mut(loan.handle() as usize);
    name_cuda_resource(CudaResource::Stream(handle), Str::from_str_lossy(&name));
}
