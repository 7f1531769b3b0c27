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

/// Bounds on connections.
const BOUNDS: Bounds = Bounds {
    connections: 1024,
    head_time: Duration::from_secs(60),
};

/// Time limit for a request's body.
const BODY_LIMIT: Duration = Duration::from_secs(60);

/// Maximum head size in bytes.
const MAX_HEAD: usize = 64 << 10;

/// Delay before the server accepts again after the system refuses.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bounds on connections.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Maximum number of connections; further ones wait.
    connections: usize,
    /// Time limit for a request's head, and for an idle connection.
    head_time: Duration,
}

/// An address that is ready to serve.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
    bounds: Bounds,
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
            bounds: BOUNDS,
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
        let head_time = self.bounds.head_time;
        let connections = Arc::new(Semaphore::new(self.bounds.connections));
        let entrances = Entrances {
            runtime: runtime.handle().clone(),
            accept: Arc::new(move |listener| {
                let (answer, connections) = (Arc::clone(&answer), Arc::clone(&connections));
                Box::pin(accept(name, listener, answer, connections, head_time))
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
    head_time: Duration,
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
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("the server ({name}) cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // An idle listener takes no place from the others.
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
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
                .header_read_timeout(head_time)
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
    read_body_within(BODY_LIMIT, request, limit, limit_name).await
}

async fn read_body_within(
    time: Duration,
    request: Request<Incoming>,
    limit: usize,
    limit_name: &str,
) -> Result<Bytes, Refusal> {
    let collected = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(time, collected).await {
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
            let message = format!("body: not there within {} seconds", time.as_secs());
            Err(Refusal::new(408, "timeout", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpStream};
    use std::sync::Mutex;

    use http_body_util::Full;

    use super::*;

    /// Paths of the requests so far.
    type Seen = Arc<Mutex<Vec<String>>>;

    fn listener(bounds: Bounds) -> Listener {
        Listener {
            bounds,
            ..Listener::bind(([127, 0, 0, 1], 0).into()).unwrap()
        }
    }

    /// A server and its address.
    struct Served {
        server: Server,
        address: SocketAddr,
    }

    /// Answers each request with its path.
    fn serve(bounds: Bounds) -> (Served, Seen) {
        let seen = Seen::default();
        let paths = Arc::clone(&seen);
        let listener = listener(bounds);
        let address = listener.address();
        let server = listener.serve("test", move |request| {
            let path = request.uri().path().to_owned();
            paths.lock().unwrap().push(path.clone());
            async move { Response::new(Full::new(Bytes::from(path))) }
        });
        let server = server.unwrap();
        (Served { server, address }, seen)
    }

    fn connect(address: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        send(&mut stream, path);
        stream
    }

    fn send(stream: &mut TcpStream, path: &str) {
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    }

    /// Reads until the answer to `path` is there.
    fn receive(stream: &mut TcpStream, path: &str) {
        let mut answer = Vec::new();
        while !answer.ends_with(format!("\r\n\r\n{path}").as_bytes()) {
            let mut bytes = [0; 1024];
            let length = stream.read(&mut bytes).unwrap();
            let text = String::from_utf8_lossy(&answer);
            assert!(length > 0, "{path}: closed after {text}");
            answer.extend(&bytes[..length]);
        }
    }

    fn rest(mut stream: TcpStream) -> String {
        let mut rest = Vec::new();
        // A server that closes early may reset the connection.
        let _ = stream.read_to_end(&mut rest);
        String::from_utf8(rest).unwrap()
    }

    /// Makes requests on an open connection. Other connections that the server may serve are
    /// served meanwhile, because it has one thread.
    fn make_requests(stream: &mut TcpStream) {
        for _ in 0..8 {
            send(stream, "/again");
            receive(stream, "/again");
        }
    }

    #[test]
    fn a_connection_above_the_bound_waits_until_another_closes() {
        let bounds = Bounds {
            connections: 2,
            ..BOUNDS
        };
        let (server, seen) = serve(bounds);
        let open = |path: &str| connect(server.address, path);
        let [mut first, mut second] = ["/first", "/second"].map(|path| {
            let mut stream = open(path);
            receive(&mut stream, path);
            stream
        });
        let mut third = open("/third");
        make_requests(&mut first);
        make_requests(&mut second);
        let is_seen = |path: &str| seen.lock().unwrap().iter().any(|seen| seen == path);
        assert!(!is_seen("/third"));
        drop(second);
        receive(&mut third, "/third");
        let mut fourth = open("/fourth");
        make_requests(&mut third);
        assert!(!is_seen("/fourth"));
        drop(first);
        receive(&mut fourth, "/fourth");
    }

    #[test]
    fn connections_of_all_listeners_count() {
        let bounds = Bounds {
            connections: 2,
            ..BOUNDS
        };
        let (server, seen) = serve(bounds);
        let more = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = more.local_addr().unwrap();
        let entrance = server.server.entrances().open(more).unwrap();
        let mut first = connect(server.address, "/first");
        receive(&mut first, "/first");
        let mut second = connect(address, "/second");
        receive(&mut second, "/second");
        let mut waiting = connect(server.address, "/waiting");
        make_requests(&mut first);
        make_requests(&mut second);
        assert!(!seen.lock().unwrap().contains(&"/waiting".to_owned()));
        drop(first);
        receive(&mut waiting, "/waiting");
        // A listener that closes leaves its connections open, and accepts no others.
        drop(entrance);
        make_requests(&mut second);
        drop(waiting);
        if let Ok(mut gone) = TcpStream::connect(address) {
            // Another process may have the address by now.
            let _ = write!(gone, "GET /gone HTTP/1.1\r\n\r\n");
        }
        make_requests(&mut second);
        assert!(!seen.lock().unwrap().contains(&"/gone".to_owned()));
    }

    #[test]
    fn a_server_that_is_dropped_closes_its_connections() {
        let (server, seen) = serve(BOUNDS);
        let mut stream = connect(server.address, "/first");
        receive(&mut stream, "/first");
        drop(server);
        // The client may notice it only when it reads.
        let _ = write!(stream, "GET /second HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(rest(stream), "");
        assert_eq!(*seen.lock().unwrap(), ["/first"]);
    }

    fn fields(all: &[(&str, &str)]) -> HeaderMap {
        let name = |name: &str| hyper::header::HeaderName::try_from(name).unwrap();
        let all = all.iter();
        all.map(|(field, value)| (name(field), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn a_key_is_a_bearer_token_or_a_field_of_its_own() {
        let keys = [Key::random(), Key::random()];
        let [first, second] = [&keys[0], &keys[1]].map(Key::text);
        let bearer = |scheme: &str, key: &str| {
            let value = format!("{scheme} {key}");
            authorize(&keys, &fields(&[("authorization", &value)]), "owner")
        };
        assert_eq!(bearer("Bearer", first), Ok(0));
        assert_eq!(bearer("bearer", second), Ok(1));
        let own = |key: &str| authorize(&keys, &fields(&[("x-api-key", key)]), "owner");
        assert_eq!(own(second), Ok(1));
        // A scheme that is not known leaves the other field.
        let both = fields(&[("authorization", "Basic eA=="), ("x-api-key", first)]);
        assert_eq!(authorize(&keys, &both, "owner"), Ok(0));
        let refused = [
            authorize(&keys, &fields(&[]), "owner"),
            authorize(&[], &fields(&[("x-api-key", first)]), "owner"),
            bearer("Basic", first),
            bearer("Bearer", &format!("{first}x")),
            bearer("Bearer", &first[..first.len() - 1]),
            bearer("Bearer", ""),
            own(""),
        ];
        for refusal in refused {
            let refusal = refusal.unwrap_err();
            assert_eq!((refusal.status, refusal.code), (401, "invalid_api_key"));
            assert!(refusal.message.contains("that of the owner"), "{refusal:?}");
            assert!(!refusal.message.contains(first));
        }
        assert_ne!(first, second);
        assert!(!format!("{keys:?}").contains(first));
    }

    #[test]
    fn an_idle_listener_takes_no_place() {
        let bounds = Bounds {
            connections: 1,
            ..BOUNDS
        };
        let (server, _) = serve(bounds);
        let more = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = more.local_addr().unwrap();
        let _entrance = server.server.entrances().open(more).unwrap();
        for address in [address, server.address, address] {
            let mut stream = connect(address, "/one");
            receive(&mut stream, "/one");
            make_requests(&mut stream);
        }
    }

    #[test]
    fn a_large_head_is_refused() {
        let (server, seen) = serve(BOUNDS);
        let mut stream = TcpStream::connect(server.address).unwrap();
        let head = |name: &str, length: usize| {
            let field = "a".repeat(length);
            format!("GET /{name} HTTP/1.1\r\nHost: a\r\nField: {field}\r\n\r\n")
        };
        let small = head("small", MAX_HEAD / 2);
        stream.write_all(small.as_bytes()).unwrap();
        receive(&mut stream, "/small");
        // The server closes while the head comes.
        let _ = stream.write_all(head("large", 4 * MAX_HEAD).as_bytes());
        assert!(!rest(stream).contains("200 OK"));
        assert_eq!(*seen.lock().unwrap(), ["/small"]);
    }

    #[test]
    fn a_late_head_closes_the_connection() {
        let bounds = Bounds {
            head_time: Duration::from_millis(1),
            ..BOUNDS
        };
        let (server, seen) = serve(bounds);
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET /late HTTP/1.1\r\nHost: a").unwrap();
        assert!(!rest(stream).contains("200 OK"));
        assert!(seen.lock().unwrap().is_empty());
    }

    /// Reads bodies of at most ten bytes. The response has the refusal's status, or the body.
    fn read_bodies(time: Duration) -> Served {
        let listener = listener(BOUNDS);
        let address = listener.address();
        let server = listener.serve("test", move |request| async move {
            let read = read_body_within(time, request, 10, "the_limit").await;
            let (status, text) = match read {
                Ok(body) => (200, body),
                Err(refusal) => (refusal.status, Bytes::from(refusal.message)),
            };
            response(status, "text/plain", Full::new(text))
        });
        let server = server.unwrap();
        Served { server, address }
    }

    fn post(server: &Served, fields: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let request =
            format!("POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{fields}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    #[test]
    fn a_large_body_is_refused_also_in_chunks() {
        let server = read_bodies(BODY_LIMIT);
        let (sized, chunked) = ("Content-Length: ", "Transfer-Encoding: chunked");
        for (fields, body, expected) in [
            (format!("{sized}10"), "0123456789", "200 OK"),
            (format!("{sized}11"), "0123456789a", "413 Payload Too Large"),
            (
                chunked.to_owned(),
                "4\r\n0123\r\n6\r\n456789\r\n0\r\n\r\n",
                "200 OK",
            ),
            (
                chunked.to_owned(),
                "4\r\n0123\r\n7\r\n456789a\r\n0\r\n\r\n",
                "413 Payload Too Large",
            ),
        ] {
            let text = rest(post(&server, &fields, body));
            assert!(
                text.starts_with(&format!("HTTP/1.1 {expected}\r\n")),
                "{text}"
            );
            let end = match expected {
                "200 OK" => "0123456789",
                _ => "body: more than 10 bytes, the_limit",
            };
            assert!(text.ends_with(end), "{text}");
        }
    }

    #[test]
    fn a_body_that_is_late_or_ends_early_is_refused() {
        let late = read_bodies(Duration::ZERO);
        let text = rest(post(&late, "Content-Length: 3", "ab"));
        assert!(
            text.starts_with("HTTP/1.1 408 ") && text.contains("not there within"),
            "{text}"
        );
        let server = read_bodies(BODY_LIMIT);
        let stream = post(&server, "Content-Length: 3", "ab");
        stream.shutdown(Shutdown::Write).unwrap();
        let text = rest(stream);
        assert!(!text.contains("200 OK"), "{text}");
    }
}
