//! An HTTP/1.1 server for tests.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::WATCHDOG;

/// A request that an [`HttpServer`] received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The method in capital letters.
    pub method: String,
    /// The path with its query.
    pub target: String,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body; empty if there is none.
    pub body: Vec<u8>,
}

impl Request {
    /// The path without its query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The value of `name` in the query.
    pub fn query(&self, name: &str) -> Option<&str> {
        let (_, query) = self.target.split_once('?')?;
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }

    /// A header's value. `name` must be in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers
            .find(|(found, _)| found == name)
            .map(|(_, value)| value.as_str())
    }
}

/// A response to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    held: bool,
    delivery: Delivery,
}

/// The part of a response that is sent, and its encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    Whole,
    Chunked,
    Half,
    Nothing,
}

impl Reply {
    /// A response with a body, which is JSON unless [`Self::with_header`] sets another content
    /// type.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let content_type = ("content-type".to_owned(), "application/json".to_owned());
        Self {
            status,
            headers: vec![content_type],
            body: body.into(),
            held: false,
            delivery: Delivery::Whole,
        }
    }

    /// Sets a header, replacing one with the same name.
    #[must_use]
    pub fn with_header(self, name: &str, value: impl ToString) -> Self {
        let mut reply = self.without_header(name);
        reply.headers.push((name.to_owned(), value.to_string()));
        reply
    }

    /// Removes a header that [`Self::with_header`] has set.
    #[must_use]
    pub fn without_header(mut self, name: &str) -> Self {
        self.headers.retain(|(set, _)| set != name);
        self
    }

    /// No response: the connection closes.
    pub fn closed() -> Self {
        Self {
            delivery: Delivery::Nothing,
            ..Self::new(0, "")
        }
    }

    /// Sends the body in chunks, without its length.
    #[must_use]
    pub fn chunked(self) -> Self {
        Self {
            delivery: Delivery::Chunked,
            ..self
        }
    }

    /// Closes the connection in the middle of the body.
    #[must_use]
    pub fn cut(self) -> Self {
        Self {
            delivery: Delivery::Half,
            ..self
        }
    }

    /// Holds the response until [`HttpServer::release`].
    #[must_use]
    pub fn held(self) -> Self {
        Self { held: true, ..self }
    }

    /// The status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The bytes to send, and whether the connection stays open. A response to HEAD has no body.
    fn to_bytes(&self, is_head: bool) -> (Vec<u8>, bool) {
        let Self { status, body, .. } = self;
        let headers = self.headers.iter();
        let headers: String = headers
            .map(|(name, value)| format!("{name}: {value}\r\n"))
            .collect();
        let head = |framing: &str| {
            format!("HTTP/1.1 {status} Status\r\n{headers}{framing}\r\n").into_bytes()
        };
        let length = format!("content-length: {}\r\n", body.len());
        match self.delivery {
            Delivery::Whole if is_head => (head(&length), true),
            Delivery::Whole => ([head(&length), body.clone()].concat(), true),
            Delivery::Half => {
                let half = body[..body.len() / 2].to_vec();
                ([head(&length), half].concat(), false)
            }
            Delivery::Nothing => (Vec::new(), false),
            Delivery::Chunked => {
                let mut bytes = head("transfer-encoding: chunked\r\n");
                for chunk in body.chunks(7) {
                    bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
                    bytes.extend(chunk);
                    bytes.extend(b"\r\n");
                }
                bytes.extend(b"0\r\n\r\n");
                (bytes, true)
            }
        }
    }
}

/// An HTTP/1.1 server on 127.0.0.1, on a port that the system selects, with one thread per
/// connection.
///
/// ```
/// use candle_grpo_test_support::{HttpServer, Reply};
///
/// let server = HttpServer::start(|request| Reply::new(200, request.body.clone()));
/// assert!(server.url().starts_with("http://127.0.0.1:"));
/// assert!(server.requests().is_empty());
/// ```
pub struct HttpServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    handler: Box<dyn Fn(&Request) -> Reply + Send + Sync>,
    state: Mutex<State>,
    /// Notified after each state change.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// New connections close at once.
    stopped: bool,
    /// The server is being dropped.
    closing: bool,
    /// Responses on hold.
    held: usize,
    /// Changes when held responses are released.
    releases: u64,
    accepted: u64,
    connections: HashMap<u64, TcpStream>,
    threads: Vec<JoinHandle<()>>,
    requests: Vec<Request>,
}

impl State {
    fn close_connections(&mut self) {
        for (_, connection) in self.connections.drain() {
            // The client may have closed it.
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.releases += 1;
    }
}

impl HttpServer {
    /// Starts a server that calls `handler`, from several threads, to respond to each request.
    ///
    /// # Panics
    ///
    /// If 127.0.0.1 has no free port.
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("the address of a listener");
        let shared = Arc::new(Shared {
            handler: Box::new(handler),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept(&listener)
        });
        Self {
            address,
            shared,
            acceptor: Some(acceptor),
        }
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests since the start, in order of arrival.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.state().requests.clone()
    }

    /// Blocks until the requests since the start satisfy `condition`.
    ///
    /// # Panics
    ///
    /// If they do not within [`WATCHDOG`].
    pub fn wait_for_requests(&self, condition: impl Fn(&[Request]) -> bool) {
        self.shared.wait(|state| condition(&state.requests));
    }

    /// Blocks until `count` responses are held.
    ///
    /// # Panics
    ///
    /// If they are not within [`WATCHDOG`].
    pub fn wait_until_held(&self, count: usize) {
        self.shared.wait(|state| state.held >= count);
    }

    /// Sends all held responses.
    pub fn release(&self) {
        self.shared.change(|state| state.releases += 1);
    }

    /// Closes all connections. New ones close without a response until [`Self::restart`]. The port
    /// stays bound, so that no other program gets it.
    pub fn stop(&self) {
        self.shared.change(|state| {
            state.stopped = true;
            state.close_connections();
        });
    }

    /// Responds again, on the same port.
    pub fn restart(&self) {
        self.shared.change(|state| state.stopped = false);
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.shared.change(|state| {
            state.closing = true;
            state.close_connections();
        });
        if let Some(acceptor) = self.acceptor.take() {
            // A connection wakes the thread that accepts connections.
            while !acceptor.is_finished() && TcpStream::connect(self.address).is_err() {
                thread::yield_now();
            }
            let _ = acceptor.join();
        }
        let threads = std::mem::take(&mut self.shared.state().threads);
        for thread in threads {
            // A panic in the handler has already been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn wait(&self, condition: impl Fn(&State) -> bool) {
        let (_state, timeout) = self
            .changed
            .wait_timeout_while(self.state(), WATCHDOG, |state| !condition(state))
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "the server waited for {WATCHDOG:?}");
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            let mut state = self.state();
            if state.closing {
                return;
            }
            let Ok((stream, _)) = accepted else {
                continue;
            };
            if state.stopped {
                continue;
            }
            let Ok(connection) = stream.try_clone() else {
                continue;
            };
            let number = state.accepted;
            state.accepted += 1;
            state.connections.insert(number, connection);
            state.threads.retain(|thread| !thread.is_finished());
            let shared = Arc::clone(self);
            state.threads.push(thread::spawn(move || {
                // The client may close the connection at any time.
                let _ = shared.serve(&stream);
                let _ = stream.shutdown(Shutdown::Both);
                shared.state().connections.remove(&number);
            }));
        }
    }

    /// Responds to the requests on a connection.
    fn serve(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(request) = read_request(&mut reader)? {
            self.change(|state| state.requests.push(request.clone()));
            let reply = (self.handler)(&request);
            if reply.held {
                self.hold();
            }
            let (bytes, open) = reply.to_bytes(request.method == "HEAD");
            stream.write_all(&bytes)?;
            if !open {
                break;
            }
        }
        Ok(())
    }

    /// Blocks until held responses are released or connections close.
    fn hold(&self) {
        let mut state = self.state();
        let releases = state.releases;
        state.held += 1;
        self.changed.notify_all();
        let waiting = |state: &mut State| state.releases == releases && !state.closing;
        let waited = self.changed.wait_while(state, waiting);
        waited.unwrap_or_else(PoisonError::into_inner).held -= 1;
    }
}

/// Reads a request; `None` at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(target)) = (words.next(), words.next()) else {
        return Err(invalid());
    };
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').ok_or_else(invalid)?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut request = Request {
        method,
        target,
        headers,
        body: Vec::new(),
    };
    if request.header("transfer-encoding").is_some() {
        request.body = read_chunks(reader)?;
    } else if let Some(length) = request.header("content-length") {
        let length = length.parse().map_err(|_| invalid())?;
        request.body = vec![0; length];
        reader.read_exact(&mut request.body)?;
    }
    Ok(Some(request))
}

fn read_chunks(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let length = usize::from_str_radix(line.trim(), 16)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        let start = body.len();
        body.resize(start + length, 0);
        reader.read_exact(&mut body[start..])?;
        // Each chunk is followed by a line ending.
        line.clear();
        reader.read_line(&mut line)?;
        if length == 0 {
            return Ok(body);
        }
    }
}

/// A port on 127.0.0.1 that refuses connections, and that no other program gets.
pub struct ClosedPort {
    /// This end's port: a connection uses it without listening on it.
    connection: TcpStream,
    /// Keeps the connection open.
    _listener: TcpListener,
}

impl ClosedPort {
    /// Reserves a free port.
    ///
    /// # Panics
    ///
    /// If 127.0.0.1 has no free port.
    pub fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("the address of a listener");
        Self {
            connection: TcpStream::connect(address).expect("a connection to a listener"),
            _listener: listener,
        }
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        let address = self.connection.local_addr();
        format!("http://{}", address.expect("the address of a connection"))
    }
}

impl Default for ClosedPort {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn connect(server: &HttpServer) -> TcpStream {
        TcpStream::connect(server.address).unwrap()
    }

    fn post(mut stream: &TcpStream, target: &str, body: &str) {
        let length = body.len();
        let request = format!(
            "POST {target} HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
    }

    /// Reads everything until the connection ends, for any reason.
    fn rest(mut stream: &TcpStream) -> String {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    fn read(mut stream: &TcpStream, length: usize) -> String {
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// Responds according to the path.
    fn server() -> HttpServer {
        HttpServer::start(|request| {
            let reply = Reply::new(201, request.body.clone());
            match request.path() {
                "/chunked" => reply.chunked(),
                "/cut" => reply.cut(),
                "/closed" => Reply::closed(),
                "/held" => reply.held(),
                _ => reply,
            }
        })
    }

    const ANSWER: &str = "HTTP/1.1 201 Status\r\ncontent-type: application/json\r\n\
                          content-length: 5\r\n\r\nHello";

    #[test]
    fn requests_on_one_connection_are_recorded_and_answered_in_order() {
        let server = server();
        let stream = connect(&server);
        for target in ["/a?mode=keep&n=2", "/b"] {
            post(&stream, target, "Hello");
            assert_eq!(read(&stream, ANSWER.len()), ANSWER);
        }
        let requests = server.requests();
        let [first, second] = requests.as_slice() else {
            panic!("{requests:?}");
        };
        assert_eq!((first.method.as_str(), first.path()), ("POST", "/a"));
        assert_eq!((first.query("n"), first.query("m")), (Some("2"), None));
        assert_eq!(first.header("content-length"), Some("5"));
        assert_eq!(
            (second.path(), second.body.as_slice()),
            ("/b", &b"Hello"[..])
        );
    }

    #[test]
    fn a_request_in_chunks_has_a_whole_body() {
        let server = server();
        let mut stream = connect(&server);
        let request = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\
                       2\r\nHe\r\n3\r\nllo\r\n0\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(read(&stream, ANSWER.len()), ANSWER);
    }

    #[test]
    fn each_fault_is_what_its_name_says() {
        let server = server();
        let answer = |path: &str| {
            let stream = connect(&server);
            post(&stream, path, "Hello, world");
            if path == "/chunked" {
                post(&stream, "/closed", "");
            }
            rest(&stream)
        };
        assert_eq!(answer("/closed"), "");
        let cut = answer("/cut");
        assert!(cut.ends_with("content-length: 12\r\n\r\nHello,"), "{cut}");
        let chunked = answer("/chunked");
        let end = "transfer-encoding: chunked\r\n\r\n7\r\nHello, \r\n5\r\nworld\r\n0\r\n\r\n";
        assert!(chunked.ends_with(end), "{chunked}");
    }

    #[test]
    fn the_answer_to_a_head_has_headers_alone() {
        let server = HttpServer::start(|_| {
            let reply = Reply::new(302, "Hello").with_header("etag", "a");
            reply
                .with_header("etag", "b")
                .with_header("x", 1)
                .without_header("x")
        });
        let mut stream = connect(&server);
        stream.write_all(b"HEAD / HTTP/1.1\r\n\r\n").unwrap();
        post(&stream, "/", "");
        let head = "HTTP/1.1 302 Status\r\ncontent-type: application/json\r\netag: b\r\n\
                    content-length: 5\r\n\r\n";
        let both = format!("{head}{head}Hello");
        assert_eq!(read(&stream, both.len()), both);
    }

    #[test]
    fn a_held_answer_is_sent_after_the_release() {
        let server = server();
        let stream = connect(&server);
        post(&stream, "/held", "Hello");
        server.wait_until_held(1);
        stream.set_nonblocking(true).unwrap();
        let early = (&stream).read(&mut [0]).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
        stream.set_nonblocking(false).unwrap();
        server.release();
        assert_eq!(read(&stream, ANSWER.len()), ANSWER);
    }

    #[test]
    fn a_stopped_server_closes_connections_until_it_restarts() {
        let server = server();
        let open = connect(&server);
        post(&open, "/", "Hello");
        assert_eq!(read(&open, ANSWER.len()), ANSWER);
        let held = connect(&server);
        post(&held, "/held", "Hello");
        server.wait_until_held(1);
        server.stop();
        for stream in [&open, &held, &connect(&server)] {
            assert_eq!(rest(stream), "");
        }
        server.restart();
        let again = connect(&server);
        post(&again, "/", "Hello");
        assert_eq!(read(&again, ANSWER.len()), ANSWER);
    }

    #[test]
    fn a_dropped_server_ends_idle_and_held_connections() {
        let server = server();
        let idle = connect(&server);
        let held = connect(&server);
        post(&held, "/held", "Hello");
        server.wait_until_held(1);
        drop(server);
        for stream in [&idle, &held] {
            assert_eq!(rest(stream), "");
        }
    }

    #[test]
    fn a_closed_port_refuses_connections() {
        let port = ClosedPort::new();
        let address = port.connection.local_addr().unwrap();
        let error = TcpStream::connect(address).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
