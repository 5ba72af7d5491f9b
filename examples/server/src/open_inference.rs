//! The Open Inference Protocol, version 2, over REST: what clients of KServe and Triton speak.
//!
//! | path | what |
//! |---|---|
//! | `GET /v2` | the server's name and extensions |
//! | `GET /v2/health/live`, `/v2/health/ready` | `/healthz` and `/readyz` |
//! | `GET /v2/models/{model}`, and `/ready` behind it | names, types and shapes of its tensors |
//! | `POST /v2/models/{model}/infer` | tensors in, tensors out |
//!
//! `{model}` is `matmul` or `embed`, and may be followed by `/versions/1`. Tensors are JSON, or bytes behind the JSON (the
//! binary tensor data extension). An error is `{"error": "what is wrong"}`.
//!
//! # Source
//! <https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol>
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::app::{self, App};
use crate::embed_mean::WIDTH;
use crate::failure::Failure;
use crate::wire::{self, Format, Input, Matmul, Matrix};

/// How long the JSON is, where bytes follow it.
const JSON_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// What clients are told of the models. Requests are read by it.
static MODELS: LazyLock<Value> = LazyLock::new(|| {
    let model = |name, inputs: Value, output: Value| json!({ "name": name, "versions": ["1"], "platform": "gpu_await", "inputs": inputs, "outputs": [output] });
    let tensor = |name, datatype, shape: &[i64]| json!({ "name": name, "datatype": datatype, "shape": shape });
    let matrix = |name| tensor(name, "FP32", &[-1, -1]);
    let (tokens, embedding) =
        (tensor("tokens", "UINT32", &[-1]), tensor("embedding", "FP32", &[WIDTH as i64]));
    json!({
        "matmul": model("matmul", json!([matrix("a"), matrix("b")]), matrix("c")),
        "embed": model("embed", json!([tokens]), embedding),
    })
});

/// What a path names, unless that is no text.
type Names = Result<Path<HashMap<String, String>>, PathRejection>;

/// What an answer says again: the model, and the request's id.
type Asked = (&'static Value, Option<String>);

/// # Errors
/// 404; 400 for a path that is no text.
fn model(names: &Names) -> Result<&'static Value, Failure> {
    let Path(names) = names.as_ref().map_err(|error| Failure::invalid(error.to_string()))?;
    let is_there = names.get("version").is_none_or(|version| version == "1");
    let model = names.get("model").and_then(|name| MODELS.get(name)).filter(|_| is_there);
    model.ok_or_else(|| Failure::new(404, "not_found", "no such model, or no such version of it"))
}

pub(crate) fn routes() -> Router<Arc<App>> {
    let server = json!({
        "name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION"),
        "extensions": ["binary_tensor_data"],
    });
    let mut routes = Router::new()
        .route("/v2", get(Json(server)))
        .route("/v2/health/live", get(app::healthy))
        .route("/v2/health/ready", get(app::ready));
    for path in ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"] {
        let metadata = async |names: Names| model(&names).map(Json);
        let ready = async |state: State<Arc<App>>, names: Names| {
            model(&names)?;
            app::ready(state).await
        };
        routes = routes
            .route(path, get(metadata))
            .route(&format!("{path}/ready"), get(ready))
            .route(&format!("{path}/infer"), post(infer));
    }
    routes
}

/// The layer that gives errors of these paths the protocol's own form.
pub(crate) async fn errors(request: Request, next: Next) -> Response {
    let is_ours = request.uri().path().starts_with("/v2");
    let response = next.run(request).await;
    let Some(failure) = response.extensions().get::<Failure>().filter(|_| is_ours) else {
        return response;
    };
    let own = Json(json!({ "error": failure.message })).into_response();
    let (mut head, _) = response.into_parts();
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, own.into_body())
}

async fn infer(
    State(app): State<Arc<App>>,
    names: Names,
    request: Request,
) -> Result<Response, Failure> {
    let check = |headers: &_| Ok((model(&names)?, json_length(headers)?));
    let mut json_length = None;
    let encode = |(model, id): Asked, format, shape: &_, values: &_| {
        let (length, encoded) = encode(model, id, format, shape, values)?;
        json_length = (format == Format::Raw).then_some(length);
        Ok(encoded)
    };
    let mut response = app::answer(&app, request, check, decode, encode).await?;
    if let Some(length) = json_length {
        response.headers_mut().insert(JSON_LENGTH, length.into());
    }
    Ok(response)
}

/// # Errors
/// 400.
fn json_length(headers: &HeaderMap) -> Result<Option<usize>, Failure> {
    let Some(length) = headers.get(JSON_LENGTH) else { return Ok(None) };
    let length = length.to_str().ok().and_then(|length| length.parse().ok());
    length.map(Some).ok_or_else(|| Failure::invalid(format!("{JSON_LENGTH} is not a length")))
}

#[derive(Deserialize)]
#[serde(expecting = "an inference request: an object")]
struct WireRequest {
    id: Option<String>,
    #[serde(default)]
    parameters: Value,
    inputs: Vec<WireInput>,
    #[serde(default)]
    outputs: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(expecting = "a tensor: an object")]
struct WireInput {
    name: String,
    shape: Vec<usize>,
    datatype: String,
    #[serde(default)]
    parameters: Value,
    /// Is of the type that `datatype` says, before it or behind it.
    data: Option<Box<RawValue>>,
}

/// The format of the output, the input, and what the answer says again.
///
/// # Errors
/// 400: no such request; other tensors than the model's; what `wire` checks of their values.
fn decode(
    (model, json_length): (&'static Value, Option<usize>),
    body: &[u8],
) -> Result<(Format, Input, Asked), Failure> {
    let parts = body.split_at_checked(json_length.unwrap_or(body.len()));
    let too_long = || Failure::invalid(format!("{JSON_LENGTH} is more than the body has"));
    let (json, mut bytes) = parts.ok_or_else(too_long)?;
    let WireRequest { id, parameters, inputs, outputs } = wire::from_json(json)?;
    // It comes back in the answer, for whose size there is a bound.
    if id.as_ref().is_some_and(|id| id.len() > 256) {
        return Err(Failure::invalid("an id of more than 256 bytes"));
    }
    let output = &model["outputs"][0]["name"];
    let asked = match &outputs[..] {
        [] => None,
        [one] if one["name"] == *output => one["parameters"]["binary_data"].as_bool(),
        _ => return Err(Failure::invalid(format!("the one output is {output}"))),
    };
    let is_binary = asked.or(parameters["binary_data_output"].as_bool()).unwrap_or(false);
    let format = if is_binary { Format::Raw } else { Format::Json };

    let named = model["inputs"].as_array().map_or(&[][..], Vec::as_slice);
    let mut tensors = vec![None; named.len()];
    // Bytes are there in the order of the inputs, whatever that is.
    for input in inputs {
        let name = input.name.clone();
        let Some(at) = named.iter().position(|named| named["name"] == name) else {
            return Err(Failure::invalid(format!("the model has no input `{name}`")));
        };
        let (dimensions, datatype) = (&named[at]["shape"], &named[at]["datatype"]);
        let tensor = tensor(input, &mut bytes, datatype, dimensions.as_array().map_or(0, Vec::len));
        let tensor = tensor.map_err(|what| Failure::invalid(format!("{name}: {what}")))?;
        if tensors[at].replace(tensor).is_some() {
            return Err(Failure::invalid(format!("input `{name}` is there twice")));
        }
    }
    if !bytes.is_empty() {
        return Err(Failure::invalid(format!("{} bytes are no tensor's", bytes.len())));
    }
    let matrix = |(shape, values): &(Vec<usize>, Vec<[u8; 4]>)| {
        let values = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Matrix { rows: shape[0], columns: shape[1], values }
    };
    let input = match &tensors[..] {
        [Some(a), Some(b)] => Input::Matmul(Matmul::new(matrix(a), matrix(b))?),
        [Some((_, tokens))] => {
            let tokens = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            Input::Embed(wire::check_tokens(tokens)?)
        }
        _ => {
            let missing = tensors.iter().position(Option::is_none).unwrap_or(0);
            let message = format!("no input {}", named[missing]["name"]);
            return Err(Failure::invalid(message));
        }
    };
    Ok((format, input, (model, id)))
}

/// The shape and the elements of a tensor of this type and of so many dimensions, from its JSON or the front of `bytes`.
fn tensor(
    input: WireInput,
    bytes: &mut &[u8],
    datatype: &Value,
    dimensions: usize,
) -> Result<(Vec<usize>, Vec<[u8; 4]>), String> {
    let WireInput { shape, parameters, data, .. } = input;
    if input.datatype != *datatype {
        return Err(format!("it is {}, expected {datatype}", input.datatype));
    }
    if shape.len() != dimensions {
        return Err(format!("{} dimensions, expected {dimensions}", shape.len()));
    }
    let elements = match (data, parameters["binary_data_size"].as_u64()) {
        (Some(data), None) => {
            // Rows behind each other, whether they are arrays of their own or not.
            let flat = format!("[{}]", data.get().replace(['[', ']'], ""));
            let read = if datatype == "FP32" {
                serde_json::from_str(&flat)
                    .map(|read: Vec<f32>| read.into_iter().map(f32::to_le_bytes).collect())
            } else {
                serde_json::from_str(&flat)
                    .map(|read: Vec<u32>| read.into_iter().map(u32::to_le_bytes).collect())
            };
            read.map_err(|error| format!("its data: {error}"))?
        }
        (None, Some(size)) => {
            let own = bytes.split_off(..size as usize).ok_or("its bytes are not there")?;
            let (elements, rest) = own.as_chunks();
            if !rest.is_empty() {
                return Err(format!("{size} bytes are no whole elements"));
            }
            elements.to_vec()
        }
        _ => return Err("it needs `data` or `binary_data_size`, one of them".to_owned()),
    };
    let size = shape.iter().try_fold(1usize, |size, extent| size.checked_mul(*extent));
    if size != Some(elements.len()) {
        return Err(format!("{} elements do not have the shape {shape:?}", elements.len()));
    }
    Ok((shape, elements))
}

/// How many of an answer's bytes are JSON, and the bytes.
///
/// # Errors
/// 422 for a number that JSON cannot say.
fn encode(
    model: &Value,
    id: Option<String>,
    format: Format,
    shape: &[usize],
    values: &[f32],
) -> Result<(usize, Vec<u8>), Failure> {
    #[derive(Serialize)]
    struct Output<'a> {
        name: &'a Value,
        datatype: &'a str,
        shape: &'a [usize],
        #[serde(skip_serializing_if = "Option::is_none")]
        parameters: Option<Value>,
        #[serde(skip_serializing_if = "Option::is_none")]
        data: Option<&'a [f32]>,
    }
    #[derive(Serialize)]
    struct Answer<'a> {
        model_name: &'a Value,
        model_version: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        outputs: [Output<'a>; 1],
    }
    let size = json!({ "binary_data_size": size_of_val(values) });
    let (parameters, data, binary) = match format {
        Format::Json => (None, Some(values), &[][..]),
        Format::Raw => (Some(size), None, values),
    };
    let name = &model["outputs"][0]["name"];
    let output = Output { name, datatype: "FP32", shape, parameters, data };
    let answer = Answer { model_name: &model["name"], model_version: "1", id, outputs: [output] };
    let mut encoded = wire::to_json(data.unwrap_or_default(), &answer)?;
    let json_length = encoded.len();
    encoded.extend_from_slice(bytemuck::cast_slice(binary));
    Ok((json_length, encoded))
}
