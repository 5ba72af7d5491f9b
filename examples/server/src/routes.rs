//! The routes of the service.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use tower_http::catch_panic::CatchPanicLayer;

use crate::app::{self, App};
use crate::failure::Failure;
use crate::wire::{self, Extents, Format, Input, Matmul, Matrices, Tokens};
use crate::{metrics, observe, open_inference};

/// The routes of work.
pub(crate) fn work() -> Router<Arc<App>> {
    Router::new()
        .route("/matmul", post(matmul))
        .route("/embed", post(embed))
        .merge(open_inference::routes())
}

/// The routes that tell of the service.
pub(crate) fn about() -> Router<Arc<App>> {
    Router::new()
        .route("/metrics", get(async |State(app): State<Arc<App>>| metrics::scrape(&app)))
        .route("/healthz", get(app::healthy))
        .route("/readyz", get(app::ready))
}

/// These routes, and an answer for any other path or method.
pub(crate) fn serve(app: &Arc<App>, routes: Router<Arc<App>>) -> Router {
    routes
        .fallback(async || Failure::new(404, "not_found", "no such path"))
        .method_not_allowed_fallback(async || {
            let message = "this path takes another method: see the `Allow` header";
            Failure::new(405, "method", message)
        })
        // A panic is one request's: its client gets an answer, the connection goes on.
        .layer(CatchPanicLayer::custom(|_| {
            Failure::internal(&"a handler panicked").into_response()
        }))
        .layer(middleware::from_fn(open_inference::errors))
        .layer(middleware::from_fn_with_state(app.clone(), observe::observe))
        .with_state(app.clone())
}

async fn matmul(
    State(app): State<Arc<App>>,
    extents: Result<Query<Extents>, QueryRejection>,
    request: Request,
) -> Result<Response, Failure> {
    let check = |headers: &_| Format::of(headers, &[Format::Json, Format::Raw]);
    let decode = |format, body: &_| {
        let input = match (format, extents) {
            (Format::Json, _) => {
                wire::from_json(body).and_then(|Matrices { a, b }| Matmul::new(a, b))
            }
            (Format::Raw, Ok(Query(extents))) => Matmul::from_raw(extents, body),
            (Format::Raw, Err(error)) => Err(Failure::invalid(format!("m, k and n: {error}"))),
        };
        Ok((format, Input::Matmul(input?), ()))
    };
    app::answer(&app, request, check, decode, |(), format, shape, c| match format {
        Format::Json => {
            wire::to_json(c, &HashMap::from([("c", c.chunks_exact(shape[1]).collect::<Vec<_>>())]))
        }
        Format::Raw => Ok(bytemuck::cast_slice(c).to_vec()),
    })
    .await
}

async fn embed(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let check = |headers: &_| Format::of(headers, &[Format::Json]);
    let decode = |format, body: &_| {
        let Tokens { tokens } = wire::from_json(body)?;
        Ok((format, Input::Embed(wire::check_tokens(tokens)?), ()))
    };
    app::answer(&app, request, check, decode, |(), _, _, embedding| {
        wire::to_json(embedding, &HashMap::from([("embedding", embedding)]))
    })
    .await
}
