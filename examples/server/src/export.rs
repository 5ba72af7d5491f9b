//! Spans to a collector: the OpenTelemetry protocol over HTTP, as protobuf.
//!
//! A thread of the SDK's takes spans from a bounded queue and sends them, so a request never waits for the collector: while that
//! is slow or away, spans that find the queue full are dropped. The end of the process waits for the last of them for at most
//! [`FLUSH_LIMIT`].
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response, Uri};
use opentelemetry::Key;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};
use tokio::runtime::Handle;

use crate::{Options, Result};

/// How long the process waits for spans to be sent, at its end.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Spans that wait to be sent: about 2 MiB of them. Further ones are dropped.
const QUEUE: usize = 4096;
const A_REQUEST: usize = 512;
const EVERY: Duration = Duration::from_secs(1);
/// For a collector to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What makes spans, which go to the collector that `options` name, if they name one. Requests to it run on `runtime`.
///
/// # Errors
/// An exporter that cannot be made.
pub fn provider(options: &Options, runtime: &Handle) -> Result<SdkTracerProvider> {
    let provider = SdkTracerProvider::builder();
    let Some(endpoint) = &options.otlp_endpoint else { return Ok(provider.build()) };
    let client = HyperClient::with_default_connector(TIMEOUT, None);
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(OnRuntime { client, runtime: runtime.clone() })
        .with_endpoint(format!("{}/v1/traces", endpoint.to_string().trim_end_matches('/')))
        .with_timeout(TIMEOUT)
        .build()?;
    let queue = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE)
        .with_max_export_batch_size(A_REQUEST)
        .with_scheduled_delay(EVERY)
        .build();
    let processor = BatchSpanProcessor::builder(exporter).with_batch_config(queue).build();
    // `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` go first.
    let named = Resource::builder().build();
    let name = named.get(&Key::from_static_str("service.name"));
    let is_named = name.is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    let resource = Resource::builder();
    let resource =
        if is_named { resource } else { resource.with_service_name(env!("CARGO_PKG_NAME")) };
    Ok(provider.with_span_processor(processor).with_resource(resource.build()).build())
}

/// Which spans and events are part of traces, whatever is logged; as `RUST_LOG` says it. Without a collector it is those
/// that give a request its trace.
#[must_use]
pub fn spans(options: &Options) -> &'static str {
    match options.otlp_endpoint {
        Some(_) => "warn,service=info,gpu_await::batch=debug,gpu_await::refusal=debug",
        None => "off,service=info",
    }
}

/// The address of a collector: `http`, without a path of its own.
pub(crate) fn endpoint(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|error| format!("{error}"))?;
    match (uri.scheme_str(), uri.host(), uri.query()) {
        (Some("http"), Some(_), None) => Ok(uri),
        _ => Err("expected http://HOST:PORT".to_owned()),
    }
}

/// A client whose requests run on a runtime, whoever polls them: the SDK's thread has none.
#[derive(Debug)]
struct OnRuntime {
    client: HyperClient,
    runtime: Handle,
}

#[async_trait::async_trait]
impl HttpClient for OnRuntime {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}
