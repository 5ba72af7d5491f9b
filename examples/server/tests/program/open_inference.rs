//! The Open Inference Protocol of the program `server`: what a client of it relies on. `triton.py` is a real one.
#![forbid(unsafe_code)]
#![cfg(unix)]

use hyper::body::Bytes;
use serde_json::{Value, json};

use crate::under_test::{JSON, Reply, Server, post};

const LENGTH: &str = "inference-header-content-length";
const MATMUL: &str = "/v2/models/matmul/infer";

fn matrix(name: &str, shape: [usize; 2], data: &[f32]) -> Value {
    json!({ "name": name, "shape": shape, "datatype": "FP32", "data": data })
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// With bytes behind the JSON.
async fn infer(server: &Server, path: &str, request: &Value, binary: &[u8]) -> Reply {
    let json = request.to_string();
    let length = json.len().to_string();
    let body: Bytes = [json.as_bytes(), binary].concat().into();
    let mut request = post(path, "application/octet-stream", body);
    request.headers_mut().insert(LENGTH, length.parse().expect("a value"));
    server.request(request).await
}

#[tokio::test]
async fn metadata_and_readiness() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/v2").await.json()["extensions"], json!(["binary_tensor_data"]));
    for path in [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/matmul/ready",
        "/v2/models/embed/versions/1/ready",
    ] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    let matrix = |name| json!({ "name": name, "datatype": "FP32", "shape": [-1, -1] });
    let model = json!({
        "name": "matmul", "versions": ["1"], "platform": "gpu_await",
        "inputs": [matrix("a"), matrix("b")], "outputs": [matrix("c")],
    });
    assert_eq!(server.get("/v2/models/matmul").await.json(), model);
    assert_eq!(server.get("/v2/models/matmul/versions/1").await.json(), model);
    for path in ["/v2/models/none", "/v2/models/none/ready", "/v2/models/matmul/versions/2"] {
        let reply = server.get(path).await;
        assert_eq!(reply.status, 404, "{path}");
        assert!(
            reply.json()["error"].as_str().is_some_and(|error| error.contains("no such model"))
        );
    }
    // In the protocol's form, whoever found it.
    for (path, status) in [
        (MATMUL, 405),
        ("/v2/", 404),
        ("/v2/none", 404),
        ("/v2/models/matmul/none", 404),
        ("/v2/models/%ff", 400),
        ("/v2/models/%ff/ready", 400),
        ("/v2/models/matmul/versions/%ff", 400),
    ] {
        let reply = server.get(path).await;
        assert_eq!(reply.status, status, "{path}");
        assert!(reply.json()["error"].is_string(), "{path}: {reply:?}");
    }
    for path in ["/v2/models/%ff/infer", "/v2/models/matmul/versions/%ff/infer", "/v2/none"] {
        let reply = server.post(path, JSON, "{}").await;
        assert!(reply.status.is_client_error(), "{path}: {reply:?}");
        assert!(reply.json()["error"].is_string(), "{path}: {reply:?}");
    }
}

#[tokio::test]
async fn tensors_in_json_and_in_bytes() {
    let server = Server::start(&[]);
    let (a, b) = (matrix("a", [1, 2], &[1.0, 2.0]), matrix("b", [2, 1], &[3.0, 4.0]));
    let right = |id: Value| {
        let c = matrix("c", [1, 1], &[11.0]);
        let mut answer = json!({ "model_name": "matmul", "model_version": "1", "outputs": [c] });
        if !id.is_null() {
            answer["id"] = id;
        }
        answer
    };
    let request = json!({ "id": "x", "inputs": [a, b] });
    let reply = server.post(MATMUL, JSON, request.to_string()).await;
    assert_eq!((reply.header("content-type"), reply.json()), (JSON, right(json!("x"))));
    assert_eq!(reply.header(LENGTH), "");

    // Nested arrays, a version, an unknown parameter, the outputs named.
    let nested = json!({ "name": "b", "shape": [2, 1], "datatype": "FP32", "data": [[3], [4]] });
    let request = json!({
        "inputs": [nested, a], "outputs": [{ "name": "c", "parameters": { "binary_data": false } }],
        "parameters": { "binary_data_output": true, "priority": 3 },
    });
    let reply = server.post("/v2/models/matmul/versions/1/infer", JSON, request.to_string()).await;
    assert_eq!(reply.json(), right(Value::Null));

    // Bytes, of one input and the output.
    let binary = json!({
        "name": "b", "shape": [2, 1], "datatype": "FP32", "parameters": { "binary_data_size": 8 },
    });
    let request = json!({ "inputs": [a, binary], "parameters": { "binary_data_output": true } });
    let reply = infer(&server, MATMUL, &request, &bytes(&[3.0, 4.0])).await;
    let length: usize = reply.header(LENGTH).parse().expect("a length");
    let (head, data) = reply.body.split_at(length);
    let head: Value = serde_json::from_slice(head).expect("JSON");
    let parameters = json!({ "binary_data_size": 4 });
    let output =
        json!({ "name": "c", "shape": [1, 1], "datatype": "FP32", "parameters": parameters });
    assert_eq!((&head["outputs"], data), (&json!([output]), &bytes(&[11.0])[..]));

    let tokens = json!({ "name": "tokens", "shape": [3], "datatype": "UINT32", "data": [1, 2, 3] });
    let request = json!({ "inputs": [tokens] }).to_string();
    let reply = server.post("/v2/models/embed/infer", JSON, request).await.json();
    let plain = server.post("/embed", JSON, r#"{"tokens": [1, 2, 3]}"#).await.json();
    assert_eq!(reply["outputs"][0]["data"], plain["embedding"]);
    assert_eq!(reply["outputs"][0]["shape"], json!([64]));
}

#[tokio::test]
async fn wrong_requests_are_told_in_a_sentence() {
    let server = Server::start(&[]);
    let (a, b) = (matrix("a", [1, 2], &[1.0, 2.0]), matrix("b", [2, 1], &[3.0, 4.0]));
    let with = |input: Value| json!({ "inputs": [input, b] });
    let changed = |key: &str, value: Value| {
        let mut input = a.clone();
        input[key] = value;
        with(input)
    };
    let sized = |size: usize| {
        let mut input = matrix("a", [1, 2], &[]);
        input.as_object_mut().expect("an object").remove("data");
        input["parameters"] = json!({ "binary_data_size": size });
        with(input)
    };
    let (none, nine): (&[u8], _) = (&[], [bytes(&[1.0, 2.0]), vec![0]].concat());
    let cases: Vec<(Value, &[u8], &str)> = vec![
        (json!(1), none, "inference request"),
        (json!({ "inputs": [1] }), none, "a tensor"),
        (changed("shape", json!([1024, 1025])), none, "elements"),
        (changed("data", json!([1, 2, 3])), none, "3 elements"),
        (json!({}), none, "inputs"),
        (json!({ "id": "x".repeat(1 << 20), "inputs": [a, b] }), none, "an id"),
        (json!({ "inputs": [a] }), none, "\"b\""),
        (json!({ "inputs": [a, b, b] }), none, "twice"),
        (json!({ "inputs": [a, b, matrix("x", [1, 1], &[1.0])] }), none, "`x`"),
        (changed("shape", json!([2, 2])), none, "[2, 2]"),
        (changed("shape", json!([2])), none, "1 dimensions, expected 2"),
        (changed("shape", json!([-1, 2])), none, "-1"),
        (changed("shape", json!([4294967296u64, 4294967296u64])), none, "shape"),
        (changed("shape", json!([1025, 2])), none, "elements"),
        (changed("datatype", json!("FP64")), none, "FP64, expected"),
        (changed("data", json!([1, "2"])), none, "its data"),
        (changed("data", json!([1, 1e39])), none, "not finite"),
        (changed("data", json!({})), none, "its data"),
        (sized(8), none, "its bytes are not there"),
        (sized(7), &nine[..7], "whole elements"),
        (sized(8), &nine, "no tensor's"),
        (with(json!({ "name": "a", "shape": [1, 2], "datatype": "FP32" })), none, "needs"),
        (json!({ "inputs": [a, b], "outputs": [{ "name": "d" }] }), none, "\"c\""),
    ];
    for (request, binary, told) in cases {
        let reply = infer(&server, MATMUL, &request, binary).await;
        assert_eq!(reply.status, 400, "{request}: {reply:?}");
        let error = reply.json()["error"].as_str().expect("a sentence").to_owned();
        assert!(error.contains(told) && error.len() < 300, "{request}: {error}");
    }
    for (header, value, status) in
        [(LENGTH, "1000000", 400), (LENGTH, "x", 400), ("content-encoding", "gzip", 415)]
    {
        let mut request = post(MATMUL, JSON, json!({ "inputs": [a, b] }).to_string());
        request.headers_mut().insert(header, value.parse().expect("a value"));
        let reply = server.request(request).await;
        assert_eq!(reply.status, status, "{header}: {value}");
        assert!(reply.json()["error"].is_string(), "{reply:?}");
    }
    let reply = server.post("/v2/models/none/infer", JSON, "{}").await;
    assert_eq!(reply.status, 404);
    let huge = json!({ "inputs": [matrix("a", [1, 1], &[1e38]), matrix("b", [1, 1], &[1e38])] });
    let reply = server.post(MATMUL, JSON, huge.to_string()).await;
    assert_eq!(reply.status, 422, "{reply:?}");
    assert!(reply.json()["error"].is_string());
}
