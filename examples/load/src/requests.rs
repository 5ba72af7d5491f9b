//! What is asked, and what must be answered.
//!
//! The elements of matrices are quarters from -4 to 4: products and sums of them are exact in `f32`,
//! so that answers are compared to the last bit. Embeddings are computed in `f64` and compared within
//! a tolerance.
#![forbid(unsafe_code)]

use std::fmt;

use hyper::body::Bytes;
use hyper::{HeaderMap, Method};
use serde_json::{Value, json};

const JSON: &str = "application/json";
const RAW: &str = "application/octet-stream";
const TOKENS: u64 = 4096;
const WIDTH: usize = 64;
const MOST_BODY_BYTES: usize = 16 << 20;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        // Neighbouring seeds are far apart; zero is the one state that never changes.
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }

    fn extent(&mut self, most: u64) -> usize {
        1 + self.below(most) as usize
    }

    fn matrix(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.below(33) as f32 / 4.0 - 4.0).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Route {
    MatmulJson,
    MatmulRaw,
    Embed,
    Bad,
}

impl Route {
    pub(crate) const ALL: [Route; 4] =
        [Route::MatmulJson, Route::MatmulRaw, Route::Embed, Route::Bad];
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Route::MatmulJson => "matmul, JSON",
            Route::MatmulRaw => "matmul, raw",
            Route::Embed => "embed",
            Route::Bad => "bad and odd",
        })
    }
}

pub(crate) struct Request {
    pub(crate) route: Route,
    /// What it is, for messages.
    pub(crate) what: &'static str,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) content_type: &'static str,
    pub(crate) body: Bytes,
    expected: Expected,
}

enum Expected {
    Status(u16),
    /// Rows of so many floats.
    Json(Vec<f32>, usize),
    Raw(Vec<f32>),
    Embedding(Vec<f64>),
}

pub(crate) enum Verdict {
    Right,
    /// The server is full, or ends; with the kind that it says.
    Refused(String),
    Wrong(String),
    Unexpected(String),
}

impl Request {
    pub(crate) fn good(random: &mut Random) -> Request {
        match random.below(10) {
            0..4 => matmul_json(random),
            4..7 => matmul_raw(random),
            _ => embed(random),
        }
    }

    /// One that the server should refuse, or something rare that it should not.
    pub(crate) fn odd(random: &mut Random) -> Request {
        let raw = |path: &str, body: Vec<f32>, what, status| {
            let body = Bytes::copy_from_slice(bytemuck::cast_slice(&body));
            odd(what, Method::POST, &format!("/matmul?{path}"), RAW, body, status)
        };
        let matmul = |value: Value, what, status| {
            odd(what, Method::POST, "/matmul", JSON, value.to_string().into(), status)
        };
        let tokens = |tokens: Vec<u64>, what| {
            let body = json!({ "tokens": tokens }).to_string().into();
            odd(what, Method::POST, "/embed", JSON, body, 400)
        };
        let text = |path, content_type, body: &'static str, what, status| {
            odd(what, Method::POST, path, content_type, Bytes::from_static(body.as_bytes()), status)
        };
        let get = |path, what, status| odd(what, Method::GET, path, "", Bytes::new(), status);
        match random.below(28) {
            0 => text("/matmul", JSON, "{\"a\": [[1", "JSON that breaks off", 400),
            1 => text("/embed", JSON, "no JSON at all", "no JSON", 400),
            2 => matmul(json!({ "a": [[1, 2]] }), "one matrix", 400),
            3 => matmul(json!({ "a": [[1, 2]], "b": [[1, 2]] }), "matrices that do not fit", 400),
            4 => matmul(json!({ "a": [[1, 2], [1]], "b": [[1], [1]] }), "ragged rows", 400),
            5 => matmul(json!({ "a": [], "b": [] }), "no rows", 400),
            6 => matmul(json!({ "a": [[]], "b": [[]] }), "empty rows", 400),
            7 => matmul(json!({ "a": [["x"]], "b": [[1]] }), "a string for a number", 400),
            8 => matmul(json!({ "a": vec![[0]; 1025], "b": [[1]] }), "1,025 rows", 400),
            9 => matmul(json!({ "a": [[1e39]], "b": [[1]] }), "a number that is infinite", 400),
            10 => text("/matmul", JSON, "{\"a\": [[NaN]], \"b\": [[1]]}", "NaN in JSON", 400),
            11 => raw("m=1&k=1&n=1", vec![f32::NAN, 1.0], "NaN, raw", 400),
            12 => raw("m=1&k=1&n=1", vec![1.0, f32::INFINITY], "infinity, raw", 400),
            13 => raw("m=2&k=2&n=2", vec![1.0; 7], "too short a body", 400),
            14 => raw("m=2&k=2&n=2", vec![1.0; 9], "too long a body", 400),
            15 => raw("m=0&k=1&n=1", vec![1.0], "an extent of 0", 400),
            16 => raw("m=1025&k=1&n=1", vec![1.0; 1026], "an extent of 1,025", 400),
            17 => raw("m=1&k=one&n=1", vec![1.0; 2], "an extent that is no number", 400),
            18 => raw("m=1&k=1", vec![1.0; 2], "an extent that is missing", 400),
            19 => tokens(vec![], "no tokens"),
            20 => tokens(vec![1; 513], "513 tokens"),
            21 => tokens(vec![TOKENS], "a token that there is not"),
            22 => get("/nowhere", "no such page", 404),
            23 => get("/matmul", "the wrong method", 405),
            24 => text("/embed", "text/plain", "{\"tokens\": [1]}", "the wrong content type", 415),
            25 => {
                let (a, b) = (json!([[3e38, 3e38]]), json!([[3], [3]]));
                matmul(json!({ "a": a, "b": b }), "an infinite result, JSON", 422)
            }
            26 => Request {
                expected: Expected::Raw(vec![f32::INFINITY]),
                ..raw("m=1&k=1&n=1", vec![3e38, 3.0], "an infinite result, raw", 200)
            },
            _ => match random.below(6) {
                0 => {
                    let body = Bytes::from(vec![0; MOST_BODY_BYTES + 1]);
                    let path = "/matmul?m=1024&k=1024&n=1024";
                    odd("a body that is too long", Method::POST, path, RAW, body, 413)
                }
                1 => get("/metrics", "metrics", 200),
                2 => get("/readyz", "readiness", 200),
                _ => get("/healthz", "health", 200),
            },
        }
    }

    /// A server that refuses a body before it has read it may close the connection: the answer may
    /// be lost on the way, and what is asked next on that connection is.
    pub(crate) fn may_be_cut_off(&self) -> bool {
        self.body.len() > MOST_BODY_BYTES
    }

    pub(crate) fn judge(&self, status: u16, headers: &HeaderMap, body: &[u8]) -> Verdict {
        let what = self.what;
        let expected = if let Expected::Status(status) = self.expected { status } else { 200 };
        if status != 200 {
            let kind = match error_kind(body) {
                Ok(kind) => kind,
                Err(why) => return Verdict::Unexpected(format!("{what}: {status}, {why}")),
            };
            if status == expected {
                return Verdict::Right;
            }
            let named = format!("{status} {kind}");
            let later = headers.get("retry-after").is_some_and(|after| after == "1");
            return match status {
                429 if !later => Verdict::Unexpected(format!("{what}: 429 without Retry-After: 1")),
                429 | 503 => Verdict::Refused(named),
                _ => Verdict::Unexpected(format!("{what}: {named} instead of {expected}")),
            };
        }
        let right = match &self.expected {
            Expected::Status(200) => Ok(()),
            Expected::Status(expected) => {
                return Verdict::Unexpected(format!("{what}: 200 instead of {expected}"));
            }
            Expected::Json(values, columns) => check_json(body, values, *columns),
            Expected::Raw(values) if body == bytemuck::cast_slice::<f32, u8>(values) => Ok(()),
            Expected::Raw(values) => {
                Err(format!("{} bytes instead of the {} right ones", body.len(), 4 * values.len()))
            }
            Expected::Embedding(values) => check_embedding(body, values),
        };
        match right {
            Ok(()) => Verdict::Right,
            Err(why) => Verdict::Wrong(format!("{what}: {why}")),
        }
    }
}

fn odd(
    what: &'static str,
    method: Method,
    path: &str,
    content_type: &'static str,
    body: Bytes,
    status: u16,
) -> Request {
    let (route, path, expected) = (Route::Bad, path.to_owned(), Expected::Status(status));
    Request { route, what, method, path, content_type, body, expected }
}

fn matmul_json(random: &mut Random) -> Request {
    let (m, k, n) = (random.extent(16), random.extent(16), random.extent(16));
    let (a, b) = (random.matrix(m * k), random.matrix(k * n));
    let rows = |x: &[f32], columns| x.chunks(columns).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let body = json!({ "a": rows(&a, k), "b": rows(&b, n) }).to_string();
    Request {
        route: Route::MatmulJson,
        what: "a product, JSON",
        method: Method::POST,
        path: "/matmul".to_owned(),
        content_type: JSON,
        body: body.into(),
        expected: Expected::Json(product(&a, &b, k, n), n),
    }
}

fn matmul_raw(random: &mut Random) -> Request {
    let most = if random.below(50) == 0 { 200 } else { 48 };
    let (m, k, n) = (random.extent(most), random.extent(most), random.extent(most));
    let (mut a, b) = (random.matrix(m * k), random.matrix(k * n));
    let expected = product(&a, &b, k, n);
    a.extend(b);
    Request {
        route: Route::MatmulRaw,
        what: "a product, raw",
        method: Method::POST,
        path: format!("/matmul?m={m}&k={k}&n={n}"),
        content_type: RAW,
        body: Bytes::copy_from_slice(bytemuck::cast_slice(&a)),
        expected: Expected::Raw(expected),
    }
}

fn embed(random: &mut Random) -> Request {
    let most = if random.below(50) == 0 { 512 } else { 32 };
    let tokens: Vec<u64> = (0..random.extent(most)).map(|_| random.below(TOKENS)).collect();
    Request {
        route: Route::Embed,
        what: "an embedding",
        method: Method::POST,
        path: "/embed".to_owned(),
        content_type: JSON,
        body: json!({ "tokens": tokens }).to_string().into(),
        expected: Expected::Embedding(embedding(&tokens)),
    }
}

fn product(a: &[f32], b: &[f32], k: usize, n: usize) -> Vec<f32> {
    let mut c = Vec::with_capacity(a.len() / k * n);
    for row in a.chunks(k) {
        let start = c.len();
        c.resize(start + n, 0.0);
        for (a, b) in row.iter().zip(b.chunks(n)) {
            c[start..].iter_mut().zip(b).for_each(|(c, b)| *c += a * b);
        }
    }
    c
}

/// The mean of the table's rows, of length one.
fn embedding(tokens: &[u64]) -> Vec<f64> {
    let element =
        |i: u64, j: u64| f64::from(((i * 31 + j * 17 + i * j) % 101) as u32) / 101.0 - 0.5;
    let column = |j| tokens.iter().map(|i| element(*i, j)).sum::<f64>() / tokens.len() as f64;
    let mean: Vec<f64> = (0..WIDTH as u64).map(column).collect();
    let norm = mean.iter().map(|x| x * x).sum::<f64>().sqrt();
    mean.iter().map(|x| x / norm).collect()
}

fn check_json(body: &[u8], values: &[f32], columns: usize) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Answer {
        c: Vec<Vec<f32>>,
    }
    let answer: Answer = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    if !answer.c.iter().map(Vec::as_slice).eq(values.chunks(columns)) {
        return Err("not the product".to_owned());
    }
    Ok(())
}

fn check_embedding(body: &[u8], values: &[f64]) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Answer {
        embedding: Vec<f64>,
    }
    let answer: Answer = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let near = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-3;
    if answer.embedding.len() != WIDTH || !answer.embedding.iter().zip(values).all(near) {
        return Err("not the embedding".to_owned());
    }
    Ok(())
}

/// Of an answer that is an error.
fn error_kind(body: &[u8]) -> Result<String, String> {
    let value: Value = serde_json::from_slice(body).map_err(|_| "no JSON".to_owned())?;
    match (&value["error"]["kind"], &value["error"]["message"]) {
        (Value::String(kind), Value::String(message)) if !message.is_empty() => Ok(kind.clone()),
        _ => Err("without kind and message".to_owned()),
    }
}
