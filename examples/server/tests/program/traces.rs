//! What a collector of OpenTelemetry gets of the server's spans.
//!
//! The collector is in this process: it decodes what the exporter sends, as the protocol's own types.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use tokio::net::TcpListener;

use crate::under_test::{JSON, Server, post};

/// A span, and the name of the resource that it is of.
type Exported = (String, Span);

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Exported>>>);

impl Collector {
    /// Begins to listen.
    async fn start() -> (Collector, String) {
        let collector = Collector::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let collects = collector.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let collector = collects.clone();
                let service = service_fn(move |request| collector.clone().takes(request));
                let connection =
                    http1::Builder::new().serve_connection(TokioIo::new(socket), service);
                tokio::spawn(async move { connection.await.ok() });
            }
        });
        (collector, endpoint(address))
    }

    async fn takes(self, request: Request<Incoming>) -> hyper::Result<Response<Full<Bytes>>> {
        assert_eq!(request.uri().path(), "/v1/traces");
        assert_eq!(request.headers()["content-type"], "application/x-protobuf");
        let body = request.into_body().collect().await?.to_bytes();
        let export = ExportTraceServiceRequest::decode(body).expect("the protocol's");
        let mut spans = self.0.lock().expect("no panic");
        for of_resource in export.resource_spans {
            let resource = of_resource.resource.expect("one");
            let name = text(&resource.attributes, "service.name");
            let scopes = of_resource.scope_spans.into_iter();
            spans.extend(scopes.flat_map(|scope| scope.spans).map(|span| (name.clone(), span)));
        }
        let answer = ExportTraceServiceResponse::default().encode_to_vec();
        Ok(Response::new(Full::new(answer.into())))
    }

    fn spans(&self) -> Vec<Exported> {
        self.0.lock().expect("no panic").clone()
    }

    fn named(&self, name: &str) -> Vec<Span> {
        self.spans().into_iter().map(|(_, span)| span).filter(|span| span.name == name).collect()
    }
}

fn endpoint(address: SocketAddr) -> String {
    format!("http://{address}")
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match value(attributes, key) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{key} is {other:?} in {attributes:?}"),
    }
}

fn number(span: &Span, key: &str) -> u64 {
    match value(&span.attributes, key) {
        Some(Value::IntValue(number)) => u64::try_from(*number).expect("a count"),
        other => panic!("{key} is {other:?} in {span:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Requests of a trace each: their spans go on with it, have their times, and are linked to by the batches that answered them.
#[tokio::test]
async fn a_collector_gets_requests_and_their_batches() {
    const PARENT: &str = "00f067aa0ba902b7";
    const REQUESTS: usize = 8;
    let (collector, endpoint) = Collector::start().await;
    let mut server = Server::start(&["--otlp-endpoint", &endpoint]);
    let trace = |n: usize| format!("4bf92f3577b34da6a3ce929d0e0e473{n:x}");
    let ask = |n| {
        let mut request = post("/embed", JSON, r#"{"tokens": [1, 2, 3]}"#);
        let theirs = format!("00-{}-{PARENT}-01", trace(n));
        request.headers_mut().insert("traceparent", theirs.parse().expect("a value"));
        server.request(request)
    };
    let replies = futures::future::join_all((0..REQUESTS).map(ask)).await;
    assert!(replies.iter().all(|reply| reply.status == StatusCode::OK));
    // The rest is sent at the end.
    server.signal("TERM");
    assert!(server.ended().await.success());

    assert!(collector.spans().iter().all(|(name, _)| name == "gpu-await-example-server"));
    let requests: BTreeMap<String, Span> =
        collector.named("request").into_iter().map(|span| (hex(&span.trace_id), span)).collect();
    for n in 0..REQUESTS {
        let span = &requests[&trace(n)];
        assert_eq!(hex(&span.parent_span_id), PARENT);
        assert_eq!(span.kind(), SpanKind::Server);
        assert_eq!(text(&span.attributes, "http.route"), "/embed");
        assert_eq!(number(span, "http.response.status_code"), 200);
        let (queue_us, gpu_us) = (number(span, "queue_us"), number(span, "gpu_us"));
        assert!(queue_us.max(gpu_us) <= number(span, "total_us"), "{span:?}");
    }
    // Each request is in one batch, whose span links to it.
    let batches = collector.named("batch");
    let batched: u64 = batches.iter().map(|batch| number(batch, "requests")).sum();
    assert_eq!(batched, REQUESTS as u64);
    let mut linked: Vec<_> = Vec::new();
    for batch in &batches {
        assert_eq!(batch.links.len() as u64, number(batch, "requests"), "{batch:?}");
        assert!(number(batch, "permit_us") <= number(batch, "queue_us"));
        let (run_us, answer_us) = (number(batch, "run_us"), number(batch, "answer_us"));
        assert!(run_us <= answer_us);
        linked.extend(batch.links.iter().map(|link| (hex(&link.trace_id), link.span_id.clone())));
    }
    linked.sort();
    let spans = (0..REQUESTS).map(|n| (trace(n), requests[&trace(n)].span_id.clone()));
    assert_eq!(linked, spans.collect::<Vec<_>>());
}

/// One that accepts and never answers holds up no request, and the end for as long as is documented.
#[tokio::test]
async fn a_collector_that_hangs_holds_nothing_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let hangs = endpoint(listener.local_addr().expect("its address"));
    let mut server = Server::start(&["--otlp-endpoint", &hangs]);
    let mut client = server.client().await;
    // More than a queue of spans: each is a request's and a batch's.
    for _ in 0..3000 {
        let request = post("/embed", JSON, r#"{"tokens": [1]}"#);
        assert_eq!(crate::under_test::send(&mut client, request).await.status, StatusCode::OK);
    }
    drop(client);
    // The exporter waits for it.
    let (_held, _) = listener.accept().await.expect("a connection");
    server.signal("TERM");
    let begun = Instant::now();
    assert!(server.ended().await.success());
    let flush = service::export::FLUSH_LIMIT;
    assert!(begun.elapsed() < flush + Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// Nobody listens there.
#[tokio::test]
async fn a_collector_that_is_away_fails_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let away = endpoint(listener.local_addr().expect("its address"));
    drop(listener);
    let mut server = Server::start(&["--otlp-endpoint", &away]);
    let reply = server.post("/embed", JSON, r#"{"tokens": [1]}"#).await;
    assert_eq!(reply.status, StatusCode::OK);
    server.signal("TERM");
    assert!(server.ended().await.success());
}

#[test]
fn what_is_no_collector_is_refused() {
    for wrong in ["127.0.0.1:4318", "https://localhost", "ftp://localhost", "nothing"] {
        let output =
            crate::under_test::command(&["--otlp-endpoint", wrong]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}
