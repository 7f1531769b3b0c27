//! The routes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use candle_grpo_base::server::{Key, Refusal, allow, authorize, read_body, response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response};
use serde_json::{Map, Value, json};

use crate::queue::RequestId;
use crate::service::Service;
use crate::wire::answer::{self, Body};
use crate::wire::request;

/// Time that a request for a result waits for one.
const RESULT_LIMIT: Duration = Duration::from_secs(30);

const JSON: &str = "application/json";
const PROTOBUF: &str = "application/x-protobuf";

/// All calls are below this path.
const PREFIX: &str = "/api/v1/";

/// An API call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Health,
    ClientConfig,
    DynamicConfig,
    Capabilities,
    CreateSession,
    Heartbeat,
    FinishSession(String),
    CreateModel,
    GetInfo,
    Forward,
    ForwardBackward,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    LoadWeights,
    CreateSampler,
    GetSampler(String),
    Sample,
    Cancel,
    Retrieve,
    WeightsInfo,
    TrainingRun(String),
    Telemetry,
}

/// Client calls that this server does not have.
const MISSING: [&str; 14] = [
    "auth/token",
    "audit_logs",
    "billing",
    "checkpoints",
    "copy_weights",
    "create_custom_loss",
    "join_sampling_session",
    "projects",
    "retrieve_futures",
    "samplers",
    "save_weights_external",
    "sessions",
    "training_runs",
    "unload_model",
];

impl Call {
    /// Finds the call for a path below [`PREFIX`].
    fn of_path(path: &str) -> Result<Self, Refusal> {
        Ok(match path {
            "healthz" => Self::Health,
            "client/config" => Self::ClientConfig,
            "client/dynamic_config" => Self::DynamicConfig,
            "get_server_capabilities" => Self::Capabilities,
            "create_session" => Self::CreateSession,
            "session_heartbeat" => Self::Heartbeat,
            "create_model" => Self::CreateModel,
            "get_info" => Self::GetInfo,
            "forward" => Self::Forward,
            "forward_backward" => Self::ForwardBackward,
            "optim_step" => Self::OptimStep,
            "save_weights" => Self::SaveWeights,
            "save_weights_for_sampler" => Self::SaveWeightsForSampler,
            "load_weights" => Self::LoadWeights,
            "create_sampling_session" => Self::CreateSampler,
            "asample" => Self::Sample,
            "cancel_future" => Self::Cancel,
            "retrieve_future" => Self::Retrieve,
            "weights_info" => Self::WeightsInfo,
            "telemetry" => Self::Telemetry,
            _ => match path.split('/').collect::<Vec<_>>()[..] {
                ["sessions", id, "finish"] => Self::FinishSession(id.to_owned()),
                ["samplers", id] => Self::GetSampler(id.to_owned()),
                ["training_runs", id] => Self::TrainingRun(id.to_owned()),
                _ => return Err(missing(path)),
            },
        })
    }

    fn method(&self) -> Method {
        match self {
            Self::Health | Self::Capabilities | Self::GetSampler(_) | Self::TrainingRun(_) => {
                Method::GET
            }
            _ => Method::POST,
        }
    }
}

/// Refuses a path without a call.
fn missing(path: &str) -> Refusal {
    let is_call = MISSING.iter().any(|call| {
        path.strip_prefix(call)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    if is_call {
        let message = format!("{path}: this server does not have the call (docs/tinker.md)");
        // A status of 500 and above would make the client try again for minutes.
        return Refusal::new(404, "not_implemented", message);
    }
    Refusal::new(404, "not_found", format!("path: {path:?}, there is none"))
}

/// Answers a request.
pub(crate) async fn answer(
    service: Arc<Service>,
    key: Option<Arc<Key>>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    match routed(service, key, request).await {
        Ok(response) => response,
        Err(refusal) => refused(refusal),
    }
}

fn refused(refusal: Refusal) -> Response<Full<Bytes>> {
    let Refusal {
        status,
        code,
        param,
        message,
    } = refusal;
    let body = json!({"detail": message, "code": code, "param": param});
    reply(status, Body::Json(body))
}

fn reply(status: u16, body: Body) -> Response<Full<Bytes>> {
    let (kind, bytes) = match body {
        Body::Json(value) => (JSON, Bytes::from(value.to_string())),
        Body::Protobuf(bytes) => (PROTOBUF, Bytes::from(bytes)),
    };
    response(status, kind, Full::new(bytes))
}

fn text(value: Option<&HeaderValue>) -> Option<&str> {
    value.and_then(|value| value.to_str().ok())
}

async fn routed(
    service: Arc<Service>,
    key: Option<Arc<Key>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Refusal> {
    let path = request.uri().path().to_owned();
    let call = match path.strip_prefix(PREFIX) {
        Some(path) => Call::of_path(path)?,
        None => return Err(missing(&path)),
    };
    let method = call.method();
    if request.method() != method {
        let mut response = refused(Refusal::method(request.method(), &method));
        allow(&mut response, &method);
        return Ok(response);
    }
    if let Some(key) = &key {
        authorize(std::slice::from_ref(key), request.headers(), "server")?;
    }
    let headers = request.headers();
    let is_protobuf = |value| text(value).is_some_and(|kind| kind.contains(PROTOBUF));
    let encoding = text(headers.get(CONTENT_ENCODING)).map(str::to_owned);
    let is_proto = is_protobuf(headers.get(CONTENT_TYPE));
    let accepts_proto = is_protobuf(headers.get(ACCEPT));
    let limit = service.max_request_bytes();
    let body = read_body(request, limit, "--max-request-bytes").await?;
    if call == Call::Retrieve {
        let request: request::Retrieve = request::json(&body)?;
        return retrieve(service, &request.request_id, accepts_proto).await;
    }
    let handled = aside(move || {
        let body = request::decoded(body, encoding.as_deref(), limit)?;
        handle(&service, call, body, is_proto)
    });
    Ok(reply(200, Body::Json(handled.await?)))
}

/// Reads and writes files and large bodies outside the thread of the connections.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Refusal::new(500, "internal_error", error.to_string())))
}

fn handle(service: &Service, call: Call, body: Bytes, is_proto: bool) -> Result<Value, Refusal> {
    match call {
        Call::Health => service.health(),
        Call::ClientConfig => Ok(service.client_config()),
        Call::DynamicConfig => Ok(json!({"sample_cancel_enabled": true})),
        Call::Capabilities => Ok(service.capabilities()),
        Call::CreateSession => {
            // Nothing in it changes a session.
            request::json::<Map<String, Value>>(&body)?;
            service.create_session()
        }
        Call::Heartbeat => service.heartbeat(&request::json(&body)?),
        Call::FinishSession(id) => service.finish_session(&id),
        Call::CreateModel => service.create_model(&request::json(&body)?),
        Call::GetInfo => service.get_info(&request::json(&body)?),
        Call::Forward | Call::ForwardBackward => {
            let pass = if is_proto {
                request::Pass::from_proto(body)?
            } else {
                request::Pass::from_json(&body, call == Call::ForwardBackward)?
            };
            service.pass(pass)
        }
        Call::OptimStep => service.optim_step(request::json(&body)?),
        Call::SaveWeights => service.save_weights(request::json(&body)?),
        Call::SaveWeightsForSampler => service.save_weights_for_sampler(request::json(&body)?),
        Call::LoadWeights => service.load_weights(request::json(&body)?),
        Call::CreateSampler => service.create_sampler(request::json(&body)?),
        Call::GetSampler(id) => service.get_sampler(&id),
        Call::Sample => service.sample(request::json(&body)?),
        Call::Cancel => service.cancel(&request::json(&body)?),
        Call::WeightsInfo => service.weights_info(&request::json(&body)?),
        Call::TrainingRun(id) => service.training_run(&id),
        // Accepted and dropped.
        Call::Telemetry => Ok(json!({"status": "accepted"})),
        Call::Retrieve => Err(Refusal::new(500, "internal_error", "retrieve_future")),
    }
}

/// Waits for a result.
async fn retrieve(
    service: Arc<Service>,
    request_id: &str,
    accepts_proto: bool,
) -> Result<Response<Full<Bytes>>, Refusal> {
    let id = RequestId::parse(request_id)?;
    let mut results = service.queues().results();
    let ended = async {
        while service.queues().is_pending(&id)? {
            if results.changed().await.is_err() {
                break;
            }
        }
        Ok::<_, Refusal>(())
    };
    match tokio::time::timeout(RESULT_LIMIT, ended).await {
        Ok(ended) => ended?,
        Err(_) => {
            let body = json!({
                "type": "try_again",
                "request_id": request_id,
                "queue_state": "active",
            });
            return Ok(reply(408, Body::Json(body)));
        }
    }
    let body = aside(move || {
        let outcome = service.queues().retrieve(&id)?;
        let outcome = outcome.ok_or_else(|| {
            let message = format!(
                "request_id: {id}, the server has no such request, or no longer: send it again"
            );
            Refusal::new(410, "send_again", message)
        })?;
        Ok(answer::body(&outcome, accepts_proto))
    });
    Ok(reply(200, body.await?))
}
