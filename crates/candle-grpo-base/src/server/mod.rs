//! HTTP servers: connections, limits, keys and refusals.
//!
//! A [`Server`] runs on its own thread and stops when dropped. The routes are the caller's: one
//! function from a request to a response.

mod key;
mod refusal;

use std::convert::Infallible;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::AbortHandle;

pub use key::{Key, random_id};
pub use refusal::Refusal;

/// Maximum number of connections; further ones wait.
const MAX_CONNECTIONS: usize = 1024;

/// Time limit for a request's head, and for an idle connection.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a request's body.
const BODY_LIMIT: Duration = Duration::from_secs(60);

/// Maximum head size in bytes.
const MAX_HEAD: usize = 64 << 10;

/// Delay before the server accepts again after the system refuses.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An address that is ready to serve.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds `listen`; port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// Fails if the address is not a free one of this machine.
    pub fn bind(listen: SocketAddr) -> Result<Self> {
        let must = || format!("listen: {listen}, must be a free address of this machine");
        let listener = TcpListener::bind(listen).with_context(must)?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
        })
    }

    /// Returns the address, with its port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests with `answer` on a thread named `name`.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be started.
    pub fn serve<A, F, B>(self, name: &'static str, answer: A) -> Result<Server>
    where
        A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .with_context(|| format!("starting the server ({name})"))?;
        let answer = Arc::new(answer);
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let entrances = Entrances {
            runtime: runtime.handle().clone(),
            accept: Arc::new(move |listener| {
                let (answer, connections) = (Arc::clone(&answer), Arc::clone(&connections));
                Box::pin(accept(name, listener, answer, connections))
            }),
        };
        let main = entrances.open(self.listener)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || {
            // Dropping the server drops the sender, and dropping the runtime drops its connections.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Server {
            entrances,
            _main: main,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// Serves a listener's connections.
type Accept = dyn Fn(TcpListener) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;

/// Opens a running server to more listeners.
#[derive(Clone)]
pub struct Entrances {
    runtime: Handle,
    accept: Arc<Accept>,
}

impl std::fmt::Debug for Entrances {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entrances").finish_non_exhaustive()
    }
}

impl Entrances {
    /// Serves the connections of `listener`, too. They count toward the server's limit.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects the listener.
    pub fn open(&self, listener: TcpListener) -> Result<Entrance> {
        listener.set_nonblocking(true)?;
        let serving = (self.accept)(listener);
        Ok(Entrance(self.runtime.spawn(serving).abort_handle()))
    }
}

/// A listener of a server. It closes when dropped.
#[derive(Debug)]
pub struct Entrance(AbortHandle);

impl Drop for Entrance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A running server. It stops when dropped.
#[derive(Debug)]
pub struct Server {
    entrances: Entrances,
    /// The listener at the address.
    _main: Entrance,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    /// Returns what opens the server to more listeners.
    pub fn entrances(&self) -> &Entrances {
        &self.entrances
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept<A, F, B>(
    name: &'static str,
    listener: TcpListener,
    answer: Arc<A>,
    connections: Arc<Semaphore>,
) where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!("the server ({name}) cannot listen: {error}");
            return;
        }
    };
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("the server ({name}) cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let response = answer(request);
                async move { Ok::<_, Infallible>(response.await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_LIMIT)
                .max_buf_size(MAX_HEAD)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = served.await {
                tracing::debug!("a connection ({name}) ended: {error}");
            }
            drop(permit);
        });
    }
}

/// Creates a response whose body has the content type `kind`.
pub fn response<B>(status: u16, kind: &'static str, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Adds the method that the path of a refused request allows.
pub fn allow<B>(response: &mut Response<B>, method: &Method) {
    if let Ok(method) = HeaderValue::from_str(method.as_str()) {
        response.headers_mut().insert(ALLOW, method);
    }
}

/// Returns which of `keys` a request has, as a bearer token or in `x-api-key`.
///
/// # Errors
///
/// Refuses a request that has none of them.
pub fn authorize(keys: &[Key], headers: &HeaderMap, owner: &str) -> Result<usize, Refusal> {
    let bearer = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
    let found = given.and_then(|given| keys.iter().position(|key| key.is(given)));
    let message = format!("key: must be that of the {owner}, as a bearer token or in x-api-key");
    found.ok_or_else(|| Refusal::new(401, "invalid_api_key", message))
}

/// Reads a request's body of at most `limit` bytes. The refusal names the option `limit_name`.
///
/// # Errors
///
/// Refuses a body that is too large, late or incomplete.
pub async fn read_body(
    request: Request<Incoming>,
    limit: usize,
    limit_name: &str,
) -> Result<Bytes, Refusal> {
    let collected = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(BODY_LIMIT, collected).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let message = format!("body: more than {limit} bytes, {limit_name}");
            Err(Refusal::new(413, "request_too_large", message))
        }
        Ok(Err(error)) => {
            let message = format!("body: cannot be read: {error}");
            Err(Refusal::new(400, "invalid_body", message))
        }
        Err(_) => {
            let message = format!("body: not there within {} seconds", BODY_LIMIT.as_secs());
            Err(Refusal::new(408, "timeout", message))
        }
    }
}
