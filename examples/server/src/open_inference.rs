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
use std::fmt;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use axum::{Json, Router};
use serde::de::{DeserializeSeed, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::app::{self, App};
use crate::embed_mean::WIDTH;
use crate::failure::Failure;
use crate::json::{self, Described, Few, Object};
use crate::observe::Route;
use crate::wire::{self, Format, MAX_EXTENT, MAX_TOKENS, Matmul, Matrix};

/// How long the JSON is, where bytes follow it.
const JSON_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const VERSION: &str = "1";
/// Inputs or outputs that are looked at, and dimensions of each: more than any model here has.
const MAX_TENSORS: usize = 16;
const MAX_DIMENSIONS: usize = 8;

#[derive(Clone, Copy)]
enum Model {
    Matmul,
    Embed,
}

/// What a path names, unless that is no text.
type Names = Result<Path<HashMap<String, String>>, PathRejection>;

impl Model {
    /// # Errors
    /// 404; 400 for a path that is no text.
    fn named(names: &Names) -> Result<Model, Failure> {
        let names = match names {
            Ok(Path(names)) => names,
            Err(rejection) => return Err(Failure::invalid(rejection.body_text())),
        };
        let version = names.get("version").map_or(VERSION, String::as_str);
        match (names["model"].as_str(), version) {
            ("matmul", VERSION) => Ok(Model::Matmul),
            ("embed", VERSION) => Ok(Model::Embed),
            _ => {
                let message = "no such model: there are `matmul` and `embed`, of version 1";
                Err(Failure::new(StatusCode::NOT_FOUND, "not_found", message))
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Model::Matmul => "matmul",
            Model::Embed => "embed",
        }
    }

    fn output(self) -> &'static str {
        match self {
            Model::Matmul => "c",
            Model::Embed => "embedding",
        }
    }

    fn metadata(self) -> Value {
        let tensor = |name: &str, datatype: &str, shape: &[i64]| json!({ "name": name, "datatype": datatype, "shape": shape });
        let (inputs, output) = match self {
            Model::Matmul => {
                let matrix = |name| tensor(name, "FP32", &[-1, -1]);
                (vec![matrix("a"), matrix("b")], matrix(self.output()))
            }
            Model::Embed => (
                vec![tensor("tokens", "UINT32", &[-1])],
                tensor(self.output(), "FP32", &[WIDTH as i64]),
            ),
        };
        json!({
            "name": self.name(), "versions": [VERSION], "platform": "gpu_await",
            "inputs": inputs, "outputs": [output],
        })
    }
}

// ---- routes -----------------------------------------------------------------------------------

pub(crate) fn routes(app: &App) -> Router<App> {
    let at = |path, is_work, methods: MethodRouter<App>| app.at(Route { path, is_work }, methods);
    let about = |path, methods| at(path, false, methods);
    let model = async |names: Names| Model::named(&names).map(|model| Json(model.metadata()));
    let model_ready = async |state: State<App>, names: Names| {
        Model::named(&names)?;
        app::ready(state).await
    };
    let server = async || {
        Json(json!({
            "name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION"),
            "extensions": ["binary_tensor_data"],
        }))
    };
    // Errors here have their own form.
    let other = Router::new()
        .route("/v2/", any(app::no_such_path))
        .route("/v2/{*path}", any(app::no_such_path));
    Router::new()
        .merge(app.observed(Route::OTHER, other))
        .merge(about("/v2", get(server)))
        .merge(about("/v2/health/live", get(app::healthy)))
        .merge(about("/v2/health/ready", get(app::ready)))
        .merge(about("/v2/models/{model}", get(model)))
        .merge(about("/v2/models/{model}/versions/{version}", get(model)))
        .merge(about("/v2/models/{model}/ready", get(model_ready)))
        .merge(about("/v2/models/{model}/versions/{version}/ready", get(model_ready)))
        .merge(at("/v2/models/{model}/infer", true, post(infer)))
        .merge(at("/v2/models/{model}/versions/{version}/infer", true, post(infer)))
        .layer(map_response(error))
}

/// Errors in the protocol's own form.
async fn error(response: Response) -> Response {
    let Some(failure) = response.extensions().get::<Failure>() else { return response };
    let own = Json(json!({ "error": failure.message })).into_response();
    let (mut head, _) = response.into_parts();
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, own.into_body())
}

async fn infer(
    State(app): State<App>,
    names: Names,
    request: Request,
) -> Result<Response, Failure> {
    let check = |headers: &HeaderMap| Ok((Model::named(&names)?, json_length(headers)?));
    let ((model, json_length), upload) =
        wire::body(request, &app.budget, &app.options, check).await?;
    app::within(&app, async {
        let call = upload.decode(move |bytes| Call::decode(model, json_length, bytes));
        let (Call { id, format, input }, reserved) = call.await?;
        let (json_length, encoded, times) = match input {
            Input::Matmul(input) => {
                let [m, _, n] = input.shape;
                let answer_bytes = app.budget.answer(wire::answer_bytes(format, m * n)).await?;
                let (c, times) = app::multiply(&app, input, reserved).await?;
                let length = size_of_val(&c[..]);
                let encoded = wire::compute(length, move || {
                    let encoded = encode(model, id, format, &[m, n], &c);
                    encoded.map(|(json_length, encoded)| (json_length, answer_bytes.hold(encoded)))
                });
                let (json_length, encoded) = encoded.await??;
                (json_length, encoded, times)
            }
            Input::Embed(tokens) => {
                let _until_answered = reserved;
                let answer_bytes = app.budget.answer(wire::answer_bytes(format, WIDTH)).await?;
                let (embedding, times) = app::look_up(&app, tokens).await?;
                let (json_length, encoded) = encode(model, id, format, &[WIDTH], &embedding)?;
                (json_length, answer_bytes.hold(encoded), times)
            }
        };
        let mut response = app::answer(format, encoded, times);
        if let Format::Raw = format {
            response.headers_mut().insert(JSON_LENGTH, json_length.into());
        }
        Ok(response)
    })
    .await
}

/// # Errors
/// 400.
fn json_length(headers: &HeaderMap) -> Result<Option<usize>, Failure> {
    let Some(length) = headers.get(JSON_LENGTH) else { return Ok(None) };
    let length = length.to_str().ok().and_then(|length| length.parse().ok());
    length.map(Some).ok_or_else(|| Failure::invalid(format!("{JSON_LENGTH} is not a length")))
}

// ---- requests ---------------------------------------------------------------------------------

/// A request that was checked.
struct Call {
    id: Option<String>,
    /// Of the output.
    format: Format,
    input: Input,
}

enum Input {
    Matmul(Matmul),
    Embed(Vec<u32>),
}

#[derive(Deserialize)]
struct WireRequest<'a> {
    id: Option<String>,
    #[serde(default)]
    parameters: Object<Parameters>,
    #[serde(borrow)]
    inputs: Few<Object<WireInput<'a>>, MAX_TENSORS>,
    #[serde(default)]
    outputs: Few<Object<WireOutput>, MAX_TENSORS>,
}

#[derive(Deserialize)]
struct WireInput<'a> {
    name: String,
    shape: Few<usize, MAX_DIMENSIONS>,
    datatype: String,
    #[serde(default)]
    parameters: Object<Parameters>,
    /// Is of the type that `datatype` says, before it or behind it.
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WireOutput {
    name: String,
    #[serde(default)]
    parameters: Object<Parameters>,
}

/// Of a request, an input or an output; what else there is may be ignored.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Parameters {
    binary_data_size: Option<usize>,
    binary_data: Option<bool>,
    binary_data_output: Option<bool>,
}

impl Described for WireRequest<'_> {
    const EXPECTED: &'static str = "an inference request: an object";
}

impl Described for WireInput<'_> {
    const EXPECTED: &'static str = "a tensor: an object";
}

impl Described for WireOutput {
    const EXPECTED: &'static str = "an output: an object";
}

impl Described for Parameters {
    const EXPECTED: &'static str = "an object of parameters";
}

impl Call {
    /// # Errors
    /// 400: no such request; other tensors than the model's; what `wire` checks of their values.
    fn decode(model: Model, json_length: Option<usize>, body: &[u8]) -> Result<Call, Failure> {
        let Some((json, mut bytes)) = body.split_at_checked(json_length.unwrap_or(body.len()))
        else {
            return Err(Failure::invalid(format!("{JSON_LENGTH} is more than the body has")));
        };
        let WireRequest { id, parameters: Object(parameters), inputs, outputs } =
            json::object(json)?;
        let output = model.output();
        let asked = match &outputs.0[..] {
            [] => None,
            [Object(one)] if one.name == output => one.parameters.0.binary_data,
            _ => return Err(Failure::invalid(format!("the one output is `{output}`"))),
        };
        let is_binary = asked.or(parameters.binary_data_output).unwrap_or(false);
        let format = if is_binary { Format::Raw } else { Format::Json };

        // Bytes are there in the order of the inputs, whatever that is.
        let mut tensors = HashMap::new();
        for Object(input) in inputs.0 {
            let size = input.parameters.0.binary_data_size.unwrap_or(0);
            let Some((own, rest)) = bytes.split_at_checked(size) else {
                return Err(Failure::invalid(format!("{}: its bytes are not there", input.name)));
            };
            bytes = rest;
            if let Some((twice, _)) = tensors.insert(input.name.clone(), (input, own)) {
                return Err(Failure::invalid(format!("input `{}` is there twice", twice.name)));
            }
        }
        if !bytes.is_empty() {
            return Err(Failure::invalid(format!("{} bytes are no tensor's", bytes.len())));
        }
        let mut input = |name: &str| {
            tensors.remove(name).ok_or_else(|| Failure::invalid(format!("no input `{name}`")))
        };
        let input = match model {
            Model::Matmul => {
                Input::Matmul(Matmul::new(matrix(input("a")?)?, matrix(input("b")?)?)?)
            }
            Model::Embed => {
                let tokens = input("tokens")?;
                let ([_], tokens) = tensor(tokens, "UINT32", MAX_TOKENS, u32::from_le_bytes)?;
                Input::Embed(wire::check_tokens(tokens)?)
            }
        };
        match tensors.into_keys().next() {
            None => Ok(Call { id, format, input }),
            Some(name) => Err(Failure::invalid(format!("the model has no input `{name}`"))),
        }
    }
}

fn matrix(input: (WireInput<'_>, &[u8])) -> Result<Matrix, Failure> {
    let most = MAX_EXTENT * MAX_EXTENT;
    let ([rows, columns], values) = tensor(input, "FP32", most, f32::from_le_bytes)?;
    Ok(Matrix { rows, columns, values })
}

/// The shape and the elements of a tensor of this type, of `N` dimensions and up to `most` elements.
fn tensor<'a, T: Deserialize<'a>, const N: usize>(
    (input, bytes): (WireInput<'a>, &[u8]),
    datatype: &str,
    most: usize,
    element: fn([u8; 4]) -> T,
) -> Result<([usize; N], Vec<T>), Failure> {
    let WireInput { name, shape: Few(shape), parameters: Object(parameters), data, .. } = input;
    let invalid = |what: String| Failure::invalid(format!("{name}: {what}"));
    if input.datatype != datatype {
        return Err(invalid(format!("it is {}, expected {datatype}", input.datatype)));
    }
    let dimensions = shape.len();
    let shape: [usize; N] =
        shape.try_into().map_err(|_| invalid(format!("{dimensions} dimensions, expected {N}")))?;
    let size = shape.iter().try_fold(1usize, |size, extent| size.checked_mul(*extent));
    let Some(size) = size.filter(|size| *size <= most) else {
        return Err(invalid(format!("a shape of {shape:?} has more than {most} elements")));
    };
    let elements = match (data, parameters.binary_data_size) {
        (Some(data), None) => {
            let mut elements = Elements { read: Vec::new(), most: size };
            let mut from = serde_json::Deserializer::from_str(data.get());
            (&mut elements)
                .deserialize(&mut from)
                .map_err(|error| invalid(format!("its data, of the shape {shape:?}: {error}")))?;
            elements.read
        }
        (None, Some(_)) => {
            let (elements, rest) = bytes.as_chunks();
            if !rest.is_empty() {
                return Err(invalid(format!("{} bytes are no whole elements", bytes.len())));
            }
            elements.iter().map(|bytes| element(*bytes)).collect()
        }
        _ => return Err(invalid("it needs `data` or `binary_data_size`, one of them".to_owned())),
    };
    if elements.len() != size {
        let message = format!("{} elements do not have the shape {shape:?}", elements.len());
        return Err(invalid(message));
    }
    Ok((shape, elements))
}

/// Reads elements behind each other, whether their arrays are nested or not, and no more than there may be.
struct Elements<T> {
    read: Vec<T>,
    most: usize,
}

impl<T> Elements<T> {
    fn push<'de, E: serde::de::Error>(
        &mut self,
        value: impl IntoDeserializer<'de, E>,
    ) -> Result<(), E>
    where
        T: Deserialize<'de>,
    {
        if self.read.len() == self.most {
            return Err(E::custom(format_args!("more than {} elements", self.most)));
        }
        self.read.push(T::deserialize(value.into_deserializer())?);
        Ok(())
    }
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for &mut Elements<T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for &mut Elements<T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers, in arrays")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(&mut *self)?.is_some() {}
        Ok(())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.push(value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.push(value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.push(value)
    }
}

// ---- answers ----------------------------------------------------------------------------------

/// The answer's bytes, and how many of them are JSON.
///
/// # Errors
/// 422 for a number that JSON cannot say.
fn encode(
    model: Model,
    id: Option<String>,
    format: Format,
    shape: &[usize],
    values: &[f32],
) -> Result<(usize, Vec<u8>), Failure> {
    #[derive(Serialize)]
    struct WireAnswer<'a> {
        model_name: &'a str,
        model_version: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        outputs: [WireTensor<'a>; 1],
    }
    #[derive(Serialize)]
    struct WireTensor<'a> {
        name: &'a str,
        datatype: &'a str,
        shape: &'a [usize],
        #[serde(skip_serializing_if = "Option::is_none")]
        parameters: Option<Value>,
        #[serde(skip_serializing_if = "Option::is_none")]
        data: Option<&'a [f32]>,
    }
    let (parameters, data) = match format {
        Format::Json => {
            wire::check_result(values)?;
            (None, Some(values))
        }
        Format::Raw => (Some(json!({ "binary_data_size": size_of_val(values) })), None),
    };
    let output = WireTensor { name: model.output(), datatype: "FP32", shape, parameters, data };
    let answer =
        WireAnswer { model_name: model.name(), model_version: VERSION, id, outputs: [output] };
    let mut encoded = serde_json::to_vec(&answer).map_err(|error| Failure::internal(&error))?;
    let json_length = encoded.len();
    if let Format::Raw = format {
        encoded.extend_from_slice(bytemuck::cast_slice(values));
    }
    Ok((json_length, encoded))
}
