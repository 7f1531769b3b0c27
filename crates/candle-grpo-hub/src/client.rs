//! Requests to the hub.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use serde::Deserialize;
use ureq::http::header::{HeaderMap, LOCATION};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use super::name::{HubKind, HubName};
use super::{Hub, TransferError};
use crate::http::{MAX_PAUSE, backoff, is_transient, pause, retry_after};
use candle_grpo_base::Progress;

/// The limit of a connection, and of each read from it.
const LIMIT: Duration = Duration::from_secs(10);
/// The limit of the headers of an answer as a whole.
const HEADERS: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 10;
/// The longest list of files in bytes.
const MAX_LIST: usize = 1 << 26;
/// Attempts without progress.
pub(super) const TRIES: usize = 5;

/// The reason why a request has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    Canceled,
    /// The same request may succeed later, not before `after`.
    Transient {
        message: String,
        after: Option<Duration>,
    },
    /// The server refuses the request.
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

/// An answer with the status of an error.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: u16,
    /// The kind of the error in words of the hub, such as `GatedRepo`.
    pub(super) code: String,
    pub(super) message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Head,
    Get,
}

/// An answer and what the hub reports about the file.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// The identity of the contents. That of the hub is preferred to that of a storage server.
    pub(super) etag: Option<String>,
    /// The size in bytes.
    pub(super) size: Option<u64>,
    pub(super) commit: Option<String>,
}

/// The commit of a revision and its files.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<String>,
}

/// A client with the address and the token of a hub.
pub(super) struct Client<'a> {
    pub(super) hub: &'a Hub,
    pub(super) progress: &'a dyn Progress,
    agent: Agent,
}

impl<'a> Client<'a> {
    pub(super) fn new(hub: &'a Hub, progress: &'a dyn Progress) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // The headers of a redirect describe the file, and the token is for the hub alone.
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

    /// Asks for the files of a revision, at most `tries` times.
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
            self.read_list(&url, answer)
        })?;
        let wrong = |what: &str| {
            Failure::Other(anyhow::anyhow!(
                "{url}: {what}; HF_ENDPOINT must be the address of a hub"
            ))
        };
        let found: Repository = serde_json::from_slice(&text)
            .map_err(|_| wrong("is no description of a repository"))?;
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

    /// Reads the body of an answer with a list of files. A server that sends it in small parts
    /// does not hold up the program.
    fn read_list(&self, url: &str, answer: Answer) -> Result<Vec<u8>, Failure> {
        let begun = Instant::now();
        let too_much = |what: String| {
            let message = format!("{}: the list of files {what}", shown(url));
            Failure::Other(TransferError(message).into())
        };
        let mut body = answer.response.into_body().into_reader();
        let mut list = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            self.ensure_not_canceled()?;
            let limit = self.hub.list_limit;
            if begun.elapsed() > limit {
                return Err(too_much(format!(
                    "takes more than {} s",
                    limit.as_secs_f64()
                )));
            }
            match body.read(&mut buffer) {
                Ok(0) => return Ok(list),
                Ok(read) => list.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let failure = format!("{}: the list of files broke off: {error}", shown(url));
                    return Err(Failure::transient(failure));
                }
            }
            if list.len() > MAX_LIST {
                return Err(too_much(format!("has more than {MAX_LIST} bytes")));
            }
        }
    }

    /// The address of a file.
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

    /// Calls `attempt` until it succeeds, fails for good, or has failed `tries` times.
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

    /// Returns the failure unless it is transient and fewer than `tries` attempts have `failed`.
    /// Then it blocks until the next attempt.
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

    /// Sends a request for the bytes from `start` on, and follows redirects. Those of a HEAD are
    /// followed until an answer describes the file.
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
                url = redirected(&url, location)?;
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
        if let Some(token) = &self.hub.token
            && origin(url).is_some_and(|origin| Some(origin) == self::origin(&self.hub.endpoint))
        {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        request.call().map_err(of_transport)
    }
}

/// The failure that the status of an answer stands for.
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
        return Err(Failure::Transient {
            message: format!("{}: {reason} (status {status})", shown(url)),
            after: retry_after(headers),
        });
    }
    let header = |name: &str| text(headers, name).unwrap_or_default().to_owned();
    Err(Failure::Refused(Refusal {
        status,
        code: header("x-error-code"),
        message: header("x-error-message"),
    }))
}

/// The failure of a connection.
pub(super) fn of_transport(error: ureq::Error) -> Failure {
    use ureq::Error;
    match error {
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

/// An etag without its quotation marks and the mark of weak ones.
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

/// An address without its query, which can hold a signature.
fn shown(url: &str) -> &str {
    url.split('?').next().unwrap_or(url)
}

/// The address that `location` stands for in an answer from `url`. It is encrypted if `url` is.
fn redirected(url: &str, location: &str) -> Result<String, Failure> {
    let wrong = |what: &str| {
        let (from, to) = (shown(url), shown(location));
        Failure::Other(anyhow::anyhow!("{from}: a redirect to {to:?}, {what}"))
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

/// Percent-encodes `text` for a part of an address, except the characters of `keep`.
fn encoded(text: &str, keep: &str) -> String {
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
            assert_eq!(redirected(url, location).unwrap(), expected);
        }
        let error = |location: &str| match redirected(url, location) {
            Err(Failure::Other(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(error("f").ends_with("a redirect to \"f\", must be an address"));
        let error = error("http://cdn.example/x?signature=1");
        assert!(
            error.ends_with("\"http://cdn.example/x\", which is not encrypted and not followed")
        );
        assert!(redirected("http://hub.example/f", "http://cdn.example/x").is_ok());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| origin(a).is_some() && origin(a) == origin(b);
        assert!(same("https://Hub.example/a", "https://hub.example:443"));
        assert!(!same("https://hub.example/a", "http://hub.example/a"));
        assert!(!same("https://hub.example/a", "https://hub.example:444/a"));
        assert!(!same("https://hub.example/a", "https://hub.example.evil/a"));
        assert!(!same("https://hub.example/a", "https://hub.example@evil/a"));
    }

    #[test]
    fn addresses_are_encoded() {
        assert_eq!(encoded("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(encoded("d/a b+é.json", "/"), "d/a%20b%2B%C3%A9.json");
        assert_eq!(plain_etag("W/\"ab\""), "ab");
    }
}
