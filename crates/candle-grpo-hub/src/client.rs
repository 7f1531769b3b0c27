//! Requests to the hub.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use serde::Deserialize;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderMap, LOCATION};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body, RequestBuilder, SendBody, Timeout};

use super::name::{HubKind, HubName};
use super::{Hub, TransferError};
use crate::http::{MAX_PAUSE, backoff, is_transient, message_of, pause, redacted, retry_after};
use candle_grpo_base::Progress;

/// Timeout for connecting, and for each read.
const LIMIT: Duration = Duration::from_secs(10);
/// Timeout for all headers in a response.
const HEADERS: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 10;
/// Maximum size of a response body in bytes, such as a file list.
const MAX_ANSWER: usize = 1 << 26;
/// Attempts without progress.
pub(super) const TRIES: usize = 5;

/// The reason why a request has no response.
#[derive(Debug)]
pub(super) enum Failure {
    Canceled,
    /// The same request may succeed later, not before `after`.
    Transient {
        message: String,
        after: Option<Duration>,
    },
    /// The server rejects the request.
    Refused(Refusal),
    /// Anything else.
    Other(anyhow::Error),
}

impl Failure {
    pub(super) fn transient(message: impl ToString) -> Self {
        Self::Transient {
            message: message.to_string(),
            after: None,
        }
    }
}

/// A response with an error status.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: u16,
    /// The hub's error code, such as `GatedRepo`.
    pub(super) code: String,
    pub(super) message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Head,
    Get,
}

/// A response, and what the hub reports about the file.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// Identifies the contents. The hub's is preferred over a storage server's.
    pub(super) etag: Option<String>,
    /// The size in bytes.
    pub(super) size: Option<u64>,
    pub(super) commit: Option<String>,
}

/// A revision's commit and files.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<String>,
}

/// A client with a hub's address and token.
pub(super) struct Client<'a> {
    pub(super) hub: &'a Hub,
    pub(super) progress: &'a dyn Progress,
    agent: Agent,
}

impl<'a> Client<'a> {
    pub(super) fn new(hub: &'a Hub, progress: &'a dyn Progress) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Redirect headers describe the file, and only the hub may get the token.
            .max_redirects(0)
            .timeout_connect(Some(LIMIT))
            .timeout_per_read(Some(LIMIT))
            .timeout_per_write(Some(LIMIT))
            .timeout_recv_response(Some(HEADERS))
            .accept_encoding("identity")
            .user_agent(concat!("candle-grpo/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            hub,
            progress,
            agent: config.new_agent(),
        }
    }

    /// Requests a revision's files, with at most `tries` attempts.
    pub(super) fn listing(
        &self,
        name: &HubName,
        revision: &str,
        tries: usize,
    ) -> Result<Listing, Failure> {
        #[derive(Deserialize)]
        struct Repository {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let kind = match name.kind() {
            HubKind::Model => "models",
            HubKind::Dataset => "datasets",
        };
        let (endpoint, id) = (&self.hub.endpoint, name.id());
        let url = format!(
            "{endpoint}/api/{kind}/{id}/revision/{}",
            encoded(revision, "")
        );
        let text = self.with_retries(tries, || {
            let answer = self.send(Method::Get, &url, 0)?;
            self.read(&url, answer.response, "the file list")
        })?;
        let wrong = |what: &str| {
            Failure::Other(anyhow::anyhow!(
                "{url}: {what}; HF_ENDPOINT must be a hub's URL"
            ))
        };
        let found: Repository =
            serde_json::from_slice(&text).map_err(|_| wrong("does not describe a repository"))?;
        if !super::cache::is_commit(&found.sha) {
            return Err(wrong("has no commit"));
        }
        Ok(Listing {
            commit: found.sha,
            files: (found.siblings.into_iter())
                .map(|sibling| sibling.rfilename)
                .collect(),
        })
    }

    /// Reads a response body, which messages call `what`. A server that sends it in small pieces
    /// does not hold up the program.
    pub(super) fn read(
        &self,
        url: &str,
        response: Response<Body>,
        what: &str,
    ) -> Result<Vec<u8>, Failure> {
        let begun = Instant::now();
        let too_much = |problem: String| {
            let message = format!("{}: {what} {problem}", shown(url));
            Failure::Other(TransferError(message).into())
        };
        let mut body = response.into_body().into_reader();
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            self.ensure_not_canceled()?;
            let limit = self.hub.answer_limit;
            if begun.elapsed() > limit {
                return Err(too_much(format!(
                    "takes more than {} s",
                    limit.as_secs_f64()
                )));
            }
            match body.read(&mut buffer) {
                Ok(0) => return Ok(bytes),
                Ok(read) => bytes.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let failure = format!("{}: {what} was interrupted: {error}", shown(url));
                    return Err(Failure::transient(failure));
                }
            }
            if bytes.len() > MAX_ANSWER {
                return Err(too_much(format!("has more than {MAX_ANSWER} bytes")));
            }
        }
    }

    /// A file's URL.
    pub(super) fn address(&self, name: &HubName, commit: &str, file: &str) -> String {
        let kind = match name.kind() {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
        };
        let (endpoint, id) = (&self.hub.endpoint, name.id());
        format!(
            "{endpoint}/{kind}{id}/resolve/{commit}/{}",
            encoded(file, "/")
        )
    }

    /// Calls `attempt` until it succeeds, fails permanently, or has failed `tries` times.
    pub(super) fn with_retries<T>(
        &self,
        tries: usize,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut failed = 0;
        loop {
            match attempt() {
                Err(failure) => {
                    failed += 1;
                    self.pause(failure, failed, tries)?;
                }
                done => return done,
            }
        }
    }

    /// Returns the failure if it is permanent or `failed` attempts reach `tries`. Otherwise blocks
    /// until the next attempt.
    pub(super) fn pause(
        &self,
        failure: Failure,
        failed: usize,
        tries: usize,
    ) -> Result<(), Failure> {
        let Failure::Transient { message, after } = failure else {
            return Err(failure);
        };
        if failed >= tries {
            return Err(Failure::transient(message));
        }
        let backoff = backoff(self.hub.first_pause, failed, MAX_PAUSE);
        let duration = after.unwrap_or(backoff).min(MAX_PAUSE);
        tracing::warn!("{message}; trying again in {} s", duration.as_secs_f64());
        if pause(duration, || self.progress.is_canceled()) {
            Ok(())
        } else {
            Err(Failure::Canceled)
        }
    }

    pub(super) fn ensure_not_canceled(&self) -> Result<(), Failure> {
        if self.progress.is_canceled() {
            Err(Failure::Canceled)
        } else {
            Ok(())
        }
    }

    /// Requests the bytes from `start` on, following redirects. For HEAD, stops at the first
    /// response that describes the file.
    pub(super) fn send(&self, method: Method, url: &str, start: u64) -> Result<Answer, Failure> {
        self.ensure_not_canceled()?;
        let mut url = url.to_owned();
        let (mut etag, mut size, mut commit) = (None, None, None);
        for _ in 0..MAX_REDIRECTS {
            let response = self.send_once(method, &url, start)?;
            let headers = response.headers();
            let status = response.status();
            etag = etag.or_else(|| text(headers, "x-linked-etag").map(plain_etag));
            size = size.or_else(|| text(headers, "x-linked-size")?.parse().ok());
            commit = commit.or_else(|| text(headers, "x-repo-commit").map(str::to_owned));
            let is_redirect = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
            if is_redirect && !(method == Method::Head && etag.is_some()) {
                let location = text(headers, LOCATION.as_str()).unwrap_or_default();
                url = linked(&url, location, "a redirect")?;
                continue;
            }
            if !is_redirect {
                failure_of(&url, &response)?;
                etag = etag.or_else(|| text(headers, "etag").map(plain_etag));
                if method == Method::Head {
                    size = size.or_else(|| text(headers, "content-length")?.parse().ok());
                }
            }
            return Ok(Answer {
                response,
                etag,
                size,
                commit,
            });
        }
        Err(Failure::transient(format!(
            "{}: more than {MAX_REDIRECTS} redirects",
            shown(&url)
        )))
    }

    fn send_once(&self, method: Method, url: &str, start: u64) -> Result<Response<Body>, Failure> {
        let mut request = match method {
            Method::Head => self.agent.head(url),
            Method::Get => self.agent.get(url),
        };
        if start > 0 {
            request = request.header("Range", format!("bytes={start}-"));
        }
        let sent = self.authorized(request, url).call();
        sent.map_err(|error| of_transport(error, LIMIT))
    }

    /// Adds the token to a request, if it goes to the hub.
    fn authorized<B>(&self, request: RequestBuilder<B>, url: &str) -> RequestBuilder<B> {
        match &self.hub.token {
            Some(token) if is_same_origin(url, &self.hub.endpoint) => {
                request.header(AUTHORIZATION, format!("Bearer {token}"))
            }
            _ => request,
        }
    }

    /// Posts `body` once, and returns the response body. Redirects within a host are followed.
    pub(super) fn post(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            self.ensure_not_canceled()?;
            let mut request = self.authorized(self.agent.post(&url), &url);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let sent = self.limited(request).send(body);
            let response = sent.map_err(|error| of_transport(error, self.hub.answer_limit))?;
            let status = response.status().as_u16();
            // With other redirects, the request would become a GET.
            if matches!(status, 307 | 308) {
                let location = text(response.headers(), LOCATION.as_str()).unwrap_or_default();
                let target = linked(&url, location, "a redirect")?;
                if !is_same_origin(&url, &target) {
                    let (from, to) = (shown(&url), shown(&target));
                    return Err(Failure::Other(anyhow::anyhow!(
                        "{from}: a redirect to {to}, another host, is not followed; set HF_ENDPOINT to the hub's URL"
                    )));
                }
                url = target;
                continue;
            }
            return self.accepted(&url, response);
        }
        Err(Failure::transient(format!(
            "{}: more than {MAX_REDIRECTS} redirects",
            shown(&url)
        )))
    }

    /// Uploads the `size` bytes in `body` to a storage server once, without the token. Returns the
    /// ETag.
    pub(super) fn put(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &mut dyn Read,
        size: u64,
    ) -> Result<Option<String>, Failure> {
        self.ensure_not_canceled()?;
        let mut request = self.agent.put(url).header(CONTENT_LENGTH, size);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let sent = self.limited(request).send(SendBody::from_reader(body));
        // The body ends with an error if the upload is canceled.
        self.ensure_not_canceled()?;
        let response = sent.map_err(|error| of_transport(error, self.hub.answer_limit))?;
        let etag = text(response.headers(), "etag").map(str::to_owned);
        self.accepted(url, response)?;
        Ok(etag)
    }

    /// Sets the timeout for a response to an upload, for which the server may compute.
    fn limited<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        let limit = self.hub.answer_limit;
        // A time that no clock can measure is no limit.
        let limit = Instant::now().checked_add(limit).map(|_| limit);
        let config = request.config().timeout_recv_response(limit);
        config.timeout_per_read(limit).build()
    }

    /// Returns the body of a response, or the failure that its status stands for.
    fn accepted(&self, url: &str, response: Response<Body>) -> Result<Vec<u8>, Failure> {
        let mut refusal = match failure_of(url, &response) {
            Ok(()) => return self.read(url, response, "the response"),
            Err(Failure::Refused(refusal)) => refusal,
            Err(failure) => return Err(failure),
        };
        if refusal.message.is_empty() {
            let body = self.read(url, response, "the response").unwrap_or_default();
            refusal.message = message_of(&String::from_utf8_lossy(&body));
        }
        refusal.message = self.redacted(&refusal.message);
        Err(Failure::Refused(refusal))
    }

    /// The text without the token.
    pub(super) fn redacted(&self, text: &str) -> String {
        redacted(text, self.hub.token.as_deref())
    }
}

/// The failure that a response's status stands for.
fn failure_of(url: &str, response: &Response<Body>) -> Result<(), Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let headers = response.headers();
    let status = status.as_u16();
    if is_transient(status) {
        let reason = match status {
            429 => "too many requests",
            _ => "the server is not available",
        };
        let after = retry_after(headers);
        let asked = match after {
            Some(pause) => format!("; it asks for a pause of {} s", pause.as_secs()),
            None => String::new(),
        };
        return Err(Failure::Transient {
            message: format!("{}: {reason} (status {status}){asked}", shown(url)),
            after,
        });
    }
    let header = |name: &str| text(headers, name).unwrap_or_default().to_owned();
    Err(Failure::Refused(Refusal {
        status,
        code: header("x-error-code"),
        message: header("x-error-message"),
    }))
}

/// The failure for a connection error. A response may take up to `limit` to begin.
fn of_transport(error: ureq::Error, limit: Duration) -> Failure {
    use ureq::Error;
    match error {
        Error::Timeout(Timeout::RecvResponse | Timeout::PerRead) => {
            Failure::transient(format!("no answer within {} s", limit.as_secs_f64()))
        }
        Error::Timeout(_) => Failure::transient(format!("no answer within {} s", LIMIT.as_secs())),
        Error::BadUri(_) | Error::Http(_) | Error::InvalidProxyUrl | Error::Rustls(_) => {
            Failure::Other(error.into())
        }
        error => Failure::transient(error),
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// An etag without quotation marks and weak prefix.
fn plain_etag(etag: &str) -> String {
    let etag = etag.strip_prefix("W/").unwrap_or(etag);
    etag.trim_matches('"').to_owned()
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, Option<u16>)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().or(match scheme.as_str() {
        "https" => Some(443),
        "http" => Some(80),
        _ => None,
    });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// Returns whether two URLs have the same scheme, host and port.
fn is_same_origin(a: &str, b: &str) -> bool {
    origin(a).is_some_and(|origin| Some(origin) == self::origin(b))
}

/// A URL without its query, which can contain a signature.
pub(super) fn shown(url: &str) -> &str {
    url.split('?').next().unwrap_or(url)
}

/// The URL that `location`, which messages call `what`, stands for in a response from `url`. It
/// must be encrypted if `url` is.
pub(super) fn linked(url: &str, location: &str, what: &str) -> Result<String, Failure> {
    let wrong = |problem: &str| {
        let (from, to) = (shown(url), shown(location));
        Failure::Other(anyhow::anyhow!("{from}: {what} to {to:?}, {problem}"))
    };
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let host = rest.split('/').next().unwrap_or_default();
    let target = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{host}{location}")
    } else {
        return Err(wrong("must be an address"));
    };
    match origin(&target) {
        None => Err(wrong("must be an address")),
        Some((to, ..)) if scheme == "https" && to != "https" => {
            Err(wrong("which is not encrypted and not followed"))
        }
        Some(_) => Ok(target),
    }
}

/// Percent-encodes `text` for part of a URL, except the characters in `keep`.
pub(super) fn encoded(text: &str, keep: &str) -> String {
    text.bytes()
        .map(|byte| match char::from(byte) {
            c if c.is_ascii_alphanumeric() || "-._~".contains(c) || keep.contains(c) => {
                c.to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_locations_are_joined_and_stay_encrypted() {
        let url = "https://hub.example:8/a/resolve/main/f";
        for (location, expected) in [
            ("https://cdn.example/x?y=1", "https://cdn.example/x?y=1"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/b/f", "https://hub.example:8/b/f"),
        ] {
            assert_eq!(linked(url, location, "a redirect").unwrap(), expected);
        }
        let error = |location: &str| match linked(url, location, "a redirect") {
            Err(Failure::Other(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(error("f").ends_with("a redirect to \"f\", must be an address"));
        let error = error("http://cdn.example/x?signature=1");
        assert!(
            error.ends_with("\"http://cdn.example/x\", which is not encrypted and not followed")
        );
        assert!(linked("http://hub.example/f", "http://cdn.example/x", "a redirect").is_ok());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        assert!(is_same_origin(
            "https://Hub.example/a",
            "https://hub.example:443"
        ));
        assert!(!is_same_origin(
            "https://hub.example/a",
            "http://hub.example/a"
        ));
        assert!(!is_same_origin(
            "https://hub.example/a",
            "https://hub.example:444/a"
        ));
        assert!(!is_same_origin(
            "https://hub.example/a",
            "https://hub.example.evil/a"
        ));
        assert!(!is_same_origin(
            "https://hub.example/a",
            "https://hub.example@evil/a"
        ));
    }

    #[test]
    fn addresses_are_encoded() {
        assert_eq!(encoded("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(encoded("d/a b+é.json", "/"), "d/a%20b%2B%C3%A9.json");
        assert_eq!(plain_etag("W/\"ab\""), "ab");
    }
}
