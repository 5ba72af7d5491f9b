//! From bytes to checked requests, and from results to bytes. No GPU in here.
//!
//! Everything that a client can get wrong is found here, before it costs device time: what goes on to
//! the model has the right shape, is in range and finite.
#![forbid(unsafe_code)]

use std::time::Duration;

use ::metrics::counter;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::budget::{Budget, Reserved};
use crate::failure::Failure;
use crate::model::TOKENS;
use crate::options::Options;

/// Bytes of a request's body.
const MAX_BODY: usize = 16 << 20;
/// Rows and columns of a matrix.
pub(crate) const MAX_EXTENT: usize = 1024;
/// Tokens of one `/embed`.
const MAX_TOKENS: usize = 512;
/// A client that is told off while it sends gets so long to stop: one that finds its connection reset
/// does not read the answer.
const LINGER: Duration = Duration::from_secs(1);

/// How a body is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    Json,
    /// Numbers of four bytes, little endian.
    Raw,
}

/// What a request asks for, checked.
pub(crate) enum Input {
    Matmul(Matmul),
    Embed(Vec<u32>),
}

/// `c[m, n] = a[m, k] b[k, n]`, row-major.
pub(crate) struct Matmul {
    pub shape: [usize; 3],
    pub a: Vec<f32>,
    pub b: Vec<f32>,
}

// ---- bodies -----------------------------------------------------------------------------------

impl Format {
    /// Returns the one of these formats that the `Content-Type` names.
    ///
    /// # Errors
    /// 415.
    pub(crate) fn of(headers: &HeaderMap, formats: &[Format]) -> Result<Format, Failure> {
        let named = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let essence = named.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let is_named = |format: &&Format| essence.eq_ignore_ascii_case(format.content_type());
        formats.iter().find(is_named).copied().ok_or_else(|| {
            let names: Vec<_> = formats.iter().map(|format| format.content_type()).collect();
            Failure::new(415, "content_type", format!("expected {}", names.join(" or ")))
        })
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Format::Json => "application/json",
            Format::Raw => "application/octet-stream",
        }
    }

    /// How many bytes an answer of so many numbers takes at most.
    pub(crate) fn answer_bytes(self, numbers: usize) -> usize {
        match self {
            Format::Json => 16 * numbers + 1024, // `-1.1754944e-38,`
            Format::Raw => 4 * numbers + 1024,
        }
    }
}

/// Reads a body, whole, within the body timeout, when the budget has as many bytes; and, before that, what `check` finds in its
/// headers.
///
/// # Errors
/// What `check` says; 415 for one that is compressed; 413, 429, 408; 400 when it broke off.
pub(crate) async fn body<T>(
    (budget, options): (&Budget, &Options),
    request: Request,
    check: impl FnOnce(&HeaderMap) -> Result<T, Failure>,
) -> Result<(T, Vec<u8>, Reserved), Failure> {
    let (head, mut body) = request.into_parts();
    let read = async {
        if head.headers.contains_key(header::CONTENT_ENCODING) {
            return Err(Failure::new(415, "content_encoding", "bodies are not compressed here"));
        }
        let checked = check(&head.headers)?;
        if body.size_hint().lower() > MAX_BODY as u64 {
            return Err(too_large());
        }
        let most = body.size_hint().exact().map_or(MAX_BODY, |bytes| bytes as usize);
        let reserved = timeout(options.request_timeout_ms, budget.body(most)).await;
        let reserved = reserved.unwrap_or_else(|_| {
            counter!("server_body_refused_total").increment(1);
            Err(Failure::overloaded())
        })?;
        let limit = options.body_timeout_ms;
        let bytes = timeout(limit, collect(&mut body, most)).await.unwrap_or_else(|_| {
            let message = format!("the body was not there within {limit:?}");
            Err(Failure::new(408, "slow_body", message))
        })?;
        Ok((checked, bytes, reserved))
    };
    let read = read.await;
    if read.as_ref().is_err_and(|failure| failure.status != StatusCode::REQUEST_TIMEOUT) {
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        timeout(LINGER, rest).await.ok();
    }
    read
}

async fn collect(body: &mut Body, most: usize) -> Result<Vec<u8>, Failure> {
    let mut body = Limited::new(body, MAX_BODY);
    // Takes no memory before it is written to.
    let mut bytes = Vec::with_capacity(most);
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => frame.into_data().iter().for_each(|data| bytes.extend_from_slice(data)),
            Err(error) if error.is::<LengthLimitError>() => return Err(too_large()),
            Err(_) => return Err(Failure::invalid("the body broke off")),
        }
    }
    Ok(bytes)
}

fn too_large() -> Failure {
    Failure::new(413, "too_large", format!("a body has at most {MAX_BODY} bytes"))
}

/// Runs `work` on about so many bytes; if that takes long, this thread's other tasks move to another one.
pub(crate) fn compute<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes <= 64 << 10 { work() } else { tokio::task::block_in_place(work) }
}

/// # Errors
/// 400.
pub(crate) fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Failure::invalid(error.to_string()))
}

/// # Errors
/// 422 for a number that JSON cannot say.
pub(crate) fn to_json(values: &[f32], answer: &impl Serialize) -> Result<Vec<u8>, Failure> {
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        let value = values[at];
        let message =
            format!("number {at} of the result is {value}, which JSON cannot say: ask in raw form");
        return Err(Failure::new(422, "not_finite", message));
    }
    serde_json::to_vec(answer).map_err(|error| Failure::internal(&error))
}

// ---- /matmul ----------------------------------------------------------------------------------

/// The JSON body of `/matmul`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `a` and `b`")]
pub(crate) struct Matrices {
    pub a: Matrix,
    pub b: Matrix,
}

/// The `?m=..&k=..&n=..` of a raw product.
#[derive(Deserialize)]
pub(crate) struct Extents {
    m: usize,
    k: usize,
    n: usize,
}

/// Rows of equal length, one behind the other.
#[derive(Deserialize)]
#[serde(try_from = "Vec<Vec<f32>>")]
pub(crate) struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub values: Vec<f32>,
}

impl TryFrom<Vec<Vec<f32>>> for Matrix {
    type Error = String;

    fn try_from(rows: Vec<Vec<f32>>) -> Result<Matrix, String> {
        let columns = rows.first().map_or(0, Vec::len);
        match rows.iter().position(|row| row.len() != columns) {
            None => Ok(Matrix { rows: rows.len(), columns, values: rows.concat() }),
            Some(at) => {
                let len = rows[at].len();
                Err(format!("row {at} has {len} numbers, row 0 has {columns}"))
            }
        }
    }
}

impl Matmul {
    /// # Errors
    /// 400: matrices that do not fit, an extent out of range, a number that is not finite.
    pub(crate) fn new(a: Matrix, b: Matrix) -> Result<Matmul, Failure> {
        if a.columns != b.rows {
            return Err(Failure::invalid(format!(
                "a is {} x {} and b is {} x {}: a must have as many columns as b has rows",
                a.rows, a.columns, b.rows, b.columns
            )));
        }
        let shape = [a.rows, a.columns, b.columns];
        check_extents(shape)?;
        for (name, Matrix { values, .. }) in [("a", &a), ("b", &b)] {
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let message = format!("number {at} of {name} is {}: not finite", values[at]);
                return Err(Failure::invalid(message));
            }
        }
        Ok(Matmul { shape, a: a.values, b: b.values })
    }

    /// # Errors
    /// 400: an extent out of range, another length, a number that is not finite.
    pub(crate) fn from_raw(Extents { m, k, n }: Extents, body: &[u8]) -> Result<Matmul, Failure> {
        check_extents([m, k, n])?;
        let expected = (m * k + k * n) * size_of::<f32>();
        if body.len() != expected {
            let found = body.len();
            let message =
                format!("the body has {found} bytes; a[{m}, {k}] and b[{k}, {n}] are {expected}");
            return Err(Failure::invalid(message));
        }
        let matrix = |rows, columns, bytes| Matrix {
            rows,
            columns,
            values: numbers(bytes, f32::from_le_bytes),
        };
        let (a, b) = body.split_at(m * k * size_of::<f32>());
        Matmul::new(matrix(m, k, a), matrix(k, n, b))
    }
}

fn check_extents([m, k, n]: [usize; 3]) -> Result<(), Failure> {
    for (name, extent) in [("m", m), ("k", k), ("n", n)] {
        if !(1..=MAX_EXTENT).contains(&extent) {
            return Err(Failure::invalid(format!("{name} is {extent}: 1 to {MAX_EXTENT}")));
        }
    }
    Ok(())
}

/// Of whole numbers of four bytes.
pub(crate) fn numbers<T>(bytes: &[u8], number: fn([u8; 4]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
}

// ---- /embed -----------------------------------------------------------------------------------

/// The JSON body of `/embed`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `tokens`")]
pub(crate) struct Tokens {
    pub tokens: Vec<u32>,
}

/// # Errors
/// 400: too few or too many tokens, a token that there is not.
pub(crate) fn check_tokens(tokens: Vec<u32>) -> Result<Vec<u32>, Failure> {
    if !(1..=MAX_TOKENS).contains(&tokens.len()) {
        return Err(Failure::invalid(format!("{} tokens: 1 to {MAX_TOKENS}", tokens.len())));
    }
    match tokens.iter().position(|token| *token >= TOKENS) {
        None => Ok(tokens),
        Some(at) => {
            let message = format!("token {at} is {}: the last one is {}", tokens[at], TOKENS - 1);
            Err(Failure::invalid(message))
        }
    }
}
