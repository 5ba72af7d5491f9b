//! From bytes to checked requests, and from results to bytes. No GPU in here.
//!
//! Everything that a client can get wrong is found here, before it costs device time: what goes on to
//! the model has the right shape, is in range and finite. What takes long is not done on the threads that
//! serve connections: see [`compute`].
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::budget::{Budget, Reserved};
use crate::failure::Failure;
use crate::json::{self, Described, Few};
use crate::metrics;
use crate::model::TOKENS;
use crate::options::Options;

/// Bytes of a request's body.
pub(crate) const MAX_BODY: usize = 16 << 20;
/// Rows and columns of a matrix.
pub(crate) const MAX_EXTENT: usize = 1024;
/// Tokens of one `/embed`.
pub(crate) const MAX_TOKENS: usize = 512;
/// Bodies above it are decoded, and answers above it encoded, off the threads that serve connections.
const LONG: usize = 64 << 10;
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

/// `c[m, n] = a[m, k] b[k, n]`, row-major.
#[derive(Debug)]
pub(crate) struct Matmul {
    pub shape: [usize; 3],
    pub a: Vec<f32>,
    pub b: Vec<f32>,
}

/// The `?m=..&k=..&n=..` of a raw product.
#[derive(Deserialize)]
pub(crate) struct Extents {
    m: usize,
    k: usize,
    n: usize,
}

// ---- bodies -----------------------------------------------------------------------------------

/// Returns the one of these formats that the `Content-Type` names.
///
/// # Errors
/// 415.
pub(crate) fn format(headers: &HeaderMap, formats: &[Format]) -> Result<Format, Failure> {
    let named = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = named.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let is_named = |format: &&Format| essence.eq_ignore_ascii_case(format.content_type());
    formats.iter().find(is_named).copied().ok_or_else(|| {
        let names: Vec<_> = formats.iter().map(Format::content_type).collect();
        let message = format!("the content type must be {}", names.join(" or "));
        Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", message)
    })
}

impl Format {
    pub(crate) fn content_type(&self) -> &'static str {
        match self {
            Format::Json => "application/json",
            Format::Raw => "application/octet-stream",
        }
    }
}

/// A body, and the bytes that it takes of the budget.
pub(crate) struct Upload {
    bytes: Vec<u8>,
    reserved: Reserved,
}

impl Upload {
    /// Makes something of the bytes, as [`compute`] does. What comes with it is to be kept as long as it. Dropped, the decoding goes
    /// on, and its bytes are reserved until it ends.
    ///
    /// # Errors
    /// Those of `decode`; a panic of it.
    pub(crate) async fn decode<T: Send + 'static>(
        self,
        decode: impl FnOnce(&[u8]) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, Reserved), Failure> {
        let Upload { bytes, reserved } = self;
        let decoded = compute(bytes.len(), move || {
            let decoded = decode(&bytes);
            drop(bytes);
            Ok((decoded?, reserved))
        });
        decoded.await?
    }
}

/// Reads a body, whole, within the body timeout, when the budget has as many bytes; and, before that, what `check` finds in
/// its headers.
///
/// # Errors
/// 415 for one that is compressed; what `check` says; 413, 429, 408; 400 when it broke off.
pub(crate) async fn body<T>(
    request: Request,
    budget: &Budget,
    options: &Options,
    check: impl FnOnce(&HeaderMap) -> Result<T, Failure>,
) -> Result<(T, Upload), Failure> {
    let checked = plain(request.headers()).and_then(|()| check(request.headers()));
    // Who sent `Expect: 100-continue` has sent nothing yet and is told at once.
    let waits = request.headers().contains_key(header::EXPECT);
    let mut body = request.into_body();
    let result = match checked {
        Err(failure) => Err(failure),
        Ok(_) if body.size_hint().lower() > MAX_BODY as u64 => Err(too_large()),
        Ok(checked) => read(&mut body, budget, options).await.map(|upload| (checked, upload)),
    };
    if let Err(failure) = &result
        && failure.status != StatusCode::REQUEST_TIMEOUT
        && !waits
    {
        discard(body).await;
    }
    result
}

/// Nothing here takes the encoding off again.
fn plain(headers: &HeaderMap) -> Result<(), Failure> {
    if headers.contains_key(header::CONTENT_ENCODING) {
        let message = "bodies are not compressed here";
        return Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_encoding", message));
    }
    Ok(())
}

async fn read(body: &mut Body, budget: &Budget, options: &Options) -> Result<Upload, Failure> {
    let most = body.size_hint().exact().map_or(MAX_BODY, |bytes| bytes as usize);
    let reserved = timeout(options.request_timeout_ms, budget.body(most)).await;
    let mut reserved = reserved.unwrap_or_else(|_| {
        metrics::body_refused();
        Err(Failure::overloaded())
    })?;
    let limit = options.body_timeout_ms;
    let bytes = timeout(limit, collect(body, most)).await.unwrap_or_else(|_| {
        let message = format!("the body was not there within {limit:?}");
        Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "slow_body", message))
    })?;
    reserved.shrink(bytes.len());
    Ok(Upload { bytes, reserved })
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

/// Lets a client finish sending, for a moment.
async fn discard(mut body: Body) {
    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
    timeout(LINGER, rest).await.ok();
}

fn too_large() -> Failure {
    let message = format!("a body has at most {MAX_BODY} bytes");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
}

/// Runs `work` on about so many bytes: here if that is short, else on the blocking pool, no more at
/// once than there are cores. Dropped, `work` ends by itself.
///
/// # Errors
/// A panic of `work`.
pub(crate) async fn compute<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    static CORES: LazyLock<Semaphore> = LazyLock::new(|| {
        Semaphore::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
    });
    if bytes <= LONG {
        return Ok(work());
    }
    let core = CORES.acquire().await.map_err(|error| Failure::internal(&error))?;
    let result = tokio::task::spawn_blocking(move || {
        let _core = core;
        work()
    });
    result.await.map_err(|error| Failure::internal(&error))
}

// ---- /matmul ----------------------------------------------------------------------------------

/// # Errors
/// 400: no JSON, another shape, a number that is not finite.
pub(crate) fn matmul_from_json(body: &[u8]) -> Result<Matmul, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wire {
        a: Matrix,
        b: Matrix,
    }
    impl Described for Wire {
        const EXPECTED: &'static str = "an object with `a` and `b`";
    }
    let Wire { a, b } = json::object(body)?;
    Matmul::new(a, b)
}

/// # Errors
/// 400: an extent out of range, another length, a number that is not finite.
pub(crate) fn matmul_from_raw(
    Extents { m, k, n }: Extents,
    body: &[u8],
) -> Result<Matmul, Failure> {
    check_extents([m, k, n])?;
    let expected = (m * k + k * n) * size_of::<f32>();
    if body.len() != expected {
        return Err(Failure::invalid(format!(
            "the body has {} bytes; a[{m}, {k}] and b[{k}, {n}] are {expected}",
            body.len()
        )));
    }
    let (a, b) = body.split_at(m * k * size_of::<f32>());
    Matmul { shape: [m, k, n], a: floats(a), b: floats(b) }.check()
}

fn check_extents([m, k, n]: [usize; 3]) -> Result<(), Failure> {
    for (name, extent) in [("m", m), ("k", k), ("n", n)] {
        if !(1..=MAX_EXTENT).contains(&extent) {
            return Err(Failure::invalid(format!("{name} is {extent}: 1 to {MAX_EXTENT}")));
        }
    }
    Ok(())
}

/// Little endian.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
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
        Matmul { shape, a: a.values, b: b.values }.check()
    }

    fn check(self) -> Result<Matmul, Failure> {
        for (name, values) in [("a", &self.a), ("b", &self.b)] {
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let message = format!("number {at} of {name} is {}: not finite", values[at]);
                return Err(Failure::invalid(message));
            }
        }
        Ok(self)
    }
}

/// `{"c": [[..], ..]}`
///
/// # Errors
/// 422 for a number that JSON cannot say.
pub(crate) fn matmul_to_json(c: &[f32], columns: usize) -> Result<Vec<u8>, Failure> {
    #[derive(Serialize)]
    struct Wire<'a> {
        #[serde(serialize_with = "rows")]
        c: (&'a [f32], usize),
    }
    fn rows<S: Serializer>((c, columns): &(&[f32], usize), to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(c.chunks_exact(*columns))
    }
    check_result(c)?;
    serde_json::to_vec(&Wire { c: (c, columns) }).map_err(|error| Failure::internal(&error))
}

/// How many bytes an answer of so many numbers takes at most.
pub(crate) fn answer_bytes(format: Format, numbers: usize) -> usize {
    match format {
        Format::Json => 16 * numbers + 1024, // `-1.1754944e-38,`
        Format::Raw => 4 * numbers,
    }
}

pub(crate) fn check_result(values: &[f32]) -> Result<(), Failure> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let message = format!(
                "number {at} of the result is {}, which JSON cannot say: ask in raw form",
                values[at]
            );
            Err(Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "not_finite", message))
        }
    }
}

// ---- /embed -----------------------------------------------------------------------------------

/// # Errors
/// 400: no JSON, too few or too many tokens, a token that there is not.
pub(crate) fn embed_from_json(body: &[u8]) -> Result<Vec<u32>, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wire {
        tokens: Few<u32, MAX_TOKENS>,
    }
    impl Described for Wire {
        const EXPECTED: &'static str = "an object with `tokens`";
    }
    let Wire { tokens: Few(tokens) } = json::object(body)?;
    check_tokens(tokens)
}

pub(crate) fn check_tokens(tokens: Vec<u32>) -> Result<Vec<u32>, Failure> {
    if !(1..=MAX_TOKENS).contains(&tokens.len()) {
        return Err(Failure::invalid(format!("{} tokens: 1 to {MAX_TOKENS}", tokens.len())));
    }
    if let Some(at) = tokens.iter().position(|token| *token >= TOKENS) {
        let message = format!("token {at} is {}: the last one is {}", tokens[at], TOKENS - 1);
        return Err(Failure::invalid(message));
    }
    Ok(tokens)
}

/// `{"embedding": [..]}`
///
/// # Errors
/// 422 for a number that JSON cannot say.
pub(crate) fn embed_to_json(embedding: &[f32]) -> Result<Vec<u8>, Failure> {
    #[derive(Serialize)]
    struct Wire<'a> {
        embedding: &'a [f32],
    }
    check_result(embedding)?;
    serde_json::to_vec(&Wire { embedding }).map_err(|error| Failure::internal(&error))
}

// ---- matrices in JSON --------------------------------------------------------------------------

/// Rows of equal length, read into one array: a body full of empty rows costs no more than its bytes.
pub(crate) struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub values: Vec<f32>,
}

impl<'de> Deserialize<'de> for Matrix {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(Rows)
    }
}

struct Rows;

impl<'de> Visitor<'de> for Rows {
    type Value = Matrix;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of rows, each an array of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Matrix, A::Error> {
        let mut matrix = Matrix { rows: 0, columns: 0, values: Vec::new() };
        while let Some(columns) = seq.next_element_seed(Row(&mut matrix.values))? {
            if matrix.rows == 0 {
                matrix.columns = columns;
            }
            if columns != matrix.columns {
                return Err(A::Error::custom(format_args!(
                    "row {} has {columns} numbers, row 0 has {}",
                    matrix.rows, matrix.columns
                )));
            }
            matrix.rows += 1;
            if matrix.rows > MAX_EXTENT {
                return Err(A::Error::custom(format_args!("more than {MAX_EXTENT} rows")));
            }
        }
        if matrix.values.is_empty() {
            return Err(A::Error::custom("a matrix has at least one row and one column"));
        }
        Ok(matrix)
    }
}

/// Reads one row behind the others; says how long it was.
struct Row<'a>(&'a mut Vec<f32>);

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<usize, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Row<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row: an array of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<usize, A::Error> {
        let mut columns = 0;
        while let Some(value) = seq.next_element()? {
            columns += 1;
            if columns > MAX_EXTENT {
                return Err(A::Error::custom(format_args!("more than {MAX_EXTENT} columns")));
            }
            self.0.push(value);
        }
        Ok(columns)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn bytes_are_reserved_while_they_are_decoded() {
        let budget = Budget::new(64 << 20);
        let bytes = vec![0; LONG + 1];
        let reserved = budget.body(bytes.len()).await.expect("there is room");
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let decoding = Upload { bytes, reserved }.decode(move |_| {
            begun.send(()).expect("somebody listens");
            ends.recv().ok();
            Ok(())
        });
        // As a time limit does.
        tokio::select! {
            _ = decoding => panic!("it has not ended"),
            begun = begins => begun.expect("it begins"),
        }
        assert_eq!(budget.used(), (LONG + 1, 0));
        drop(end);
        let all = budget.body(usize::MAX); // all of the part of large bodies
        timeout(Duration::from_secs(15), all).await.expect("they are free").expect("it is open");
    }
}
