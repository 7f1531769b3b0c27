//! The routes.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use candle_grpo_base::server::{allow, authorize, read_body};
use hyper::body::Incoming;
use hyper::header::HOST;
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Episodes;
use super::reply::{self, Reply};
use crate::dialect::Dialect;
use crate::episode::{Episode, Identity};
use crate::request::Refusal;

/// Time that a request for an episode waits for one.
const OFFER_LIMIT: Duration = Duration::from_secs(20);

/// Model name in the model list without roles. A request may then name any.
const MODEL: &str = "policy";

/// A server route.
enum Route<'a> {
    Episodes,
    Answer(&'a str, Dialect),
    Models(&'a str),
    Model(&'a str, &'a str),
    Reward(&'a str),
}

impl<'a> Route<'a> {
    fn of_path(path: &'a str) -> Option<Self> {
        if path == "/episodes" {
            return Some(Self::Episodes);
        }
        let (id, path) = path.strip_prefix("/s/")?.split_once('/')?;
        if path == "reward" {
            return Some(Self::Reward(id));
        }
        let path = path.strip_prefix("v1/")?;
        if path == "models" {
            return Some(Self::Models(id));
        }
        match path.strip_prefix("models/") {
            Some(name) => Some(Self::Model(id, name)),
            None => Dialect::of_path(path).map(|dialect| Self::Answer(id, dialect)),
        }
    }

    fn method(&self) -> Method {
        match self {
            Self::Models(_) | Self::Model(..) => Method::GET,
            _ => Method::POST,
        }
    }

    /// Returns the dialect for errors.
    fn dialect(&self) -> Dialect {
        match self {
            Self::Answer(_, dialect) => *dialect,
            _ => Dialect::Chat,
        }
    }
}

/// Answers a request.
pub(super) async fn answer(episodes: &Episodes, request: Request<Incoming>) -> Response<Reply> {
    let path = request.uri().path().to_owned();
    let Some(route) = Route::of_path(&path) else {
        let refusal = Refusal::new(404, "not_found", format!("path: {path:?}, there is none"));
        return refused(Dialect::Chat, &refusal);
    };
    if request.method() != route.method() {
        let refusal = Refusal::method(request.method(), &route.method());
        let mut response = refused(route.dialect(), &refusal);
        allow(&mut response, &route.method());
        return response;
    }
    let dialect = route.dialect();
    match routed(episodes, route, request).await {
        Ok(response) => response,
        Err(refusal) => refused(dialect, &refusal),
    }
}

fn refused(dialect: Dialect, refusal: &Refusal) -> Response<Reply> {
    reply::json(refusal.status, &dialect.refusal(refusal))
}

async fn routed(
    episodes: &Episodes,
    route: Route<'_>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Refusal> {
    match route {
        Route::Episodes => {
            if episodes.keys.is_empty() {
                let message = "the run starts its agents itself (command)";
                return Err(Refusal::new(404, "not_found", message));
            }
            let worker = authorize(&episodes.keys, request.headers(), "episode")?;
            offer(episodes, worker, request.headers()).await
        }
        Route::Models(id) => {
            let episode = admitted(episodes, id, request.headers())?;
            let models: Vec<Value> = match episode.roles.as_slice() {
                [] => vec![model(MODEL)],
                roles => roles.iter().map(|role| model(role)).collect(),
            };
            let list = json!({"object": "list", "data": models});
            Ok(reply::json(200, &list))
        }
        Route::Model(id, name) => {
            let episode = admitted(episodes, id, request.headers())?;
            episode.role(name)?;
            Ok(reply::json(200, &model(name)))
        }
        Route::Reward(id) => {
            let episode = admitted(episodes, id, request.headers())?;
            let body = body(episodes, request).await?;
            episode.report(&parsed(&body)?)?;
            Ok(reply::json(200, &json!({})))
        }
        Route::Answer(id, dialect) => {
            let episode = admitted(episodes, id, request.headers())?;
            draw(episodes, episode, dialect, request).await
        }
    }
}

fn model(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "candle-grpo"})
}

/// Returns the episode that a request addresses, after checking its key.
fn admitted(episodes: &Episodes, id: &str, headers: &HeaderMap) -> Result<Arc<Episode>, Refusal> {
    let episode = episodes.get(id);
    let message = "the episode does not exist, or has ended";
    let episode = episode.ok_or_else(|| Refusal::new(404, "episode_ended", message))?;
    authorize(slice::from_ref(&episode.key), headers, "episode")?;
    episode.count()?;
    Ok(episode)
}

/// Reads a request's body.
async fn body(episodes: &Episodes, request: Request<Incoming>) -> Result<Bytes, Refusal> {
    read_body(request, episodes.max_request_bytes, "max_request_bytes").await
}

fn parsed(body: &[u8]) -> Result<Value, Refusal> {
    serde_json::from_slice(body).map_err(|error| {
        let message = format!("body: must be JSON: {error}");
        Refusal::new(400, "invalid_json", message)
    })
}

async fn draw(
    episodes: &Episodes,
    episode: Arc<Episode>,
    dialect: Dialect,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Refusal> {
    let header = |name: &str| {
        let value = request.headers().get(name)?;
        Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    let idempotency_key = header("idempotency-key");
    let retries = header("x-stainless-retry-count");
    let retries = retries.and_then(|count| count.parse::<u32>().ok());
    let path = request.uri().path().to_owned();
    let body = body(episodes, request).await?;
    let identity = Identity {
        digest: Sha256::new()
            .chain_update(path)
            .chain_update([0])
            .chain_update(&body)
            .finalize()
            .into(),
        idempotency_key,
        is_repeated: retries.is_some_and(|count| count > 0),
    };
    let (request, form) = dialect.read(&parsed(&body)?)?;
    let role = episode.role(&form.model)?;
    let request = crate::request::Request { role, ..request };
    let (place, mut outcome) = episode.ask(identity, request)?;
    let outcome = match outcome.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone(),
        Err(_) => None,
    };
    let answer = outcome.unwrap_or_else(|| {
        let message = "the run has ended";
        Err(Refusal::new(503, "unavailable", message))
    })?;
    let body = if form.streams {
        dialect.stream(&answer, &form)
    } else {
        dialect.json(&answer, &form).to_string()
    };
    Ok(reply::answer(body, form.streams, episode, place))
}

/// Offers an episode to an agent, if one is available in time.
async fn offer(
    episodes: &Episodes,
    worker: usize,
    headers: &HeaderMap,
) -> Result<Response<Reply>, Refusal> {
    let offer = tokio::time::timeout(OFFER_LIMIT, episodes.next_offer());
    let Ok(episode) = offer.await else {
        return Ok(reply::empty(204));
    };
    episode.begin(worker);
    // The agent may be on another machine, which has another name for this one.
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let url = match host {
        Some(host) => format!("http://{host}/s/{}", episode.id),
        None => episodes.url(&episode),
    };
    let body = json!({
        "id": episode.id,
        "api_key": episode.key.text(),
        "base_url": format!("{url}/v1"),
        "anthropic_base_url": url,
        "reward_url": format!("{url}/reward"),
        "row": episode.row,
    });
    Ok(reply::json(200, &body))
}
