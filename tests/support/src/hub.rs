//! A server with the Hugging Face hub API, for tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{HttpServer, Reply, Request};

/// A repository on a [`FakeHub`].
#[derive(Debug, Clone)]
pub struct HubRepository {
    path: String,
    /// The commit at `main`.
    commit: String,
    /// Each commit's files.
    commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// The token that grants access, and whether others can see that the repository exists.
    token: Option<(String, bool)>,
}

impl HubRepository {
    /// A model or data set at `path`: `ORG/NAME` or `datasets/ORG/NAME`.
    pub fn new<'a>(path: &str, files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> Self {
        let mut repository = Self {
            path: path.to_owned(),
            commit: String::new(),
            commits: BTreeMap::new(),
            token: None,
        };
        repository.push(files);
        repository
    }

    /// Restricts access to `token`. Without it, a gated repository is visible, and a private one is
    /// not.
    #[must_use]
    pub fn with_token(self, token: &str, is_gated: bool) -> Self {
        Self {
            token: Some((token.to_owned(), is_gated)),
            ..self
        }
    }

    /// Adds a commit with `files` to `main`, and returns its hash.
    pub fn push<'a>(&mut self, files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> String {
        let files = files.into_iter();
        let files: BTreeMap<String, Vec<u8>> = files
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .collect();
        let text = format!("{} {files:?}", self.commits.len());
        self.commit = git_hash(text.as_bytes());
        self.commits.insert(self.commit.clone(), files);
        self.commit.clone()
    }

    /// The commit at `main`.
    pub fn commit(&self) -> &str {
        &self.commit
    }
}

type Change = Box<dyn FnMut(&Request, Reply) -> Reply + Send>;

struct State {
    repositories: Vec<HubRepository>,
    change: Change,
}

/// A server with the hub API, and a second one with another origin that stores large files. Large
/// files are those whose names end in `.safetensors` or `.gguf`.
///
/// ```
/// use candle_grpo_test_support::{FakeHub, HubRepository};
///
/// let hub = FakeHub::start([HubRepository::new("a/b", [("config.json", b"{}".to_vec())])]);
/// assert!(hub.url().starts_with("http://127.0.0.1:"));
/// ```
pub struct FakeHub {
    /// The server with the API.
    pub api: HttpServer,
    /// The server with large files, whose paths are their SHA-256.
    pub storage: HttpServer,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    /// Starts both servers.
    pub fn start(repositories: impl IntoIterator<Item = HubRepository>) -> Self {
        let state = Arc::new(Mutex::new(State {
            repositories: repositories.into_iter().collect(),
            change: Box::new(|_, reply| reply),
        }));
        let shared = Arc::clone(&state);
        let storage = HttpServer::start(move |request| {
            let mut state = lock(&shared);
            let reply = state.stored(request);
            (state.change)(request, reply)
        });
        let (shared, address) = (Arc::clone(&state), storage.url());
        let api = HttpServer::start(move |request| {
            let mut state = lock(&shared);
            let reply = state.answer(request, &address);
            (state.change)(request, reply)
        });
        Self {
            api,
            storage,
            state,
        }
    }

    /// The URL for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        self.api.url()
    }

    /// Makes a command use this hub, with the cache in `home` and without a token.
    pub fn set_environment(&self, command: &mut Command, home: &Path) {
        for name in [
            "HF_HUB_CACHE",
            "HF_TOKEN",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
        ] {
            command.env_remove(name);
        }
        command.env("HF_HOME", home).env("HF_ENDPOINT", self.url());
    }

    /// Changes every response from both servers from now on.
    pub fn set_change(&self, change: impl FnMut(&Request, Reply) -> Reply + Send + 'static) {
        lock(&self.state).change = Box::new(change);
    }

    /// Changes the repository with index `index`.
    pub fn change_repository<T>(
        &self,
        index: usize,
        change: impl FnOnce(&mut HubRepository) -> T,
    ) -> T {
        change(&mut lock(&self.state).repositories[index])
    }

    /// Number of GET requests to both servers since the start.
    pub fn downloads(&self) -> usize {
        let requests = [self.api.requests(), self.storage.requests()].concat();
        requests
            .iter()
            .filter(|request| request.method == "GET")
            .count()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn answer(&self, request: &Request, storage: &str) -> Reply {
        let refuse = |status, code: &str| Reply::new(status, "").with_header("x-error-code", code);
        let path = request.path().trim_start_matches('/').replace("%2F", "/");
        let (is_api, path) = match path.strip_prefix("api/") {
            Some(rest) => (true, rest.trim_start_matches("models/")),
            None => (false, path.as_str()),
        };
        let found = self.repositories.iter().find_map(|repository| {
            let rest = path.strip_prefix(&repository.path)?.strip_prefix('/')?;
            Some((repository, rest))
        });
        let Some((repository, rest)) = found else {
            return refuse(401, "RepoNotFound");
        };
        let sent = request.header("authorization").unwrap_or_default();
        if let Some((token, is_gated)) = &repository.token
            && sent != format!("Bearer {token}")
        {
            return if *is_gated {
                refuse(403, "GatedRepo")
            } else {
                refuse(401, "RepoNotFound")
            };
        }
        let commit_of = |revision: &str| match revision {
            "main" | "refs/pr/1" => Some(repository.commit.clone()),
            commit => repository
                .commits
                .contains_key(commit)
                .then(|| commit.to_owned()),
        };
        if is_api {
            let Some(commit) = rest.strip_prefix("revision/").and_then(commit_of) else {
                return refuse(404, "RevisionNotFound");
            };
            let files = repository.commits[&commit].keys();
            let files: Vec<_> = files.map(|name| json!({"rfilename": name})).collect();
            return Reply::new(200, json!({"sha": commit, "siblings": files}).to_string());
        }
        let found = rest
            .strip_prefix("resolve/")
            .and_then(|rest| rest.split_once('/'));
        let Some((commit, file)) = found.and_then(|(at, file)| Some((commit_of(at)?, file))) else {
            return refuse(404, "RevisionNotFound");
        };
        let Some(bytes) = repository.commits[&commit].get(file) else {
            return refuse(404, "EntryNotFound");
        };
        if is_large(file) {
            let sha256 = hex(&Sha256::digest(bytes));
            return Reply::new(302, "Found")
                .with_header("location", format!("{storage}/{sha256}?signature=1"))
                .with_header("x-linked-etag", format!("\"{sha256}\""))
                .with_header("x-linked-size", bytes.len())
                .with_header("x-repo-commit", commit);
        }
        part(request, bytes)
            .with_header("etag", format!("\"{}\"", git_hash(bytes)))
            .with_header("x-repo-commit", commit)
    }

    fn stored(&self, request: &Request) -> Reply {
        let commits = self.repositories.iter().flat_map(|r| r.commits.values());
        let mut files = commits.flat_map(BTreeMap::values);
        let hash = request.path().trim_start_matches('/');
        match files.find(|bytes| hex(&Sha256::digest(bytes)) == hash) {
            Some(bytes) => part(request, bytes).with_header("etag", "\"of-storage\""),
            None => Reply::new(404, ""),
        }
    }
}

/// Responds with the bytes that the request selects.
fn part(request: &Request, bytes: &[u8]) -> Reply {
    let range = request
        .header("range")
        .and_then(|range| range.strip_prefix("bytes="));
    let start = range.and_then(|range| range.strip_suffix('-')?.parse::<usize>().ok());
    match start {
        None => Reply::new(200, bytes),
        Some(start) if start >= bytes.len() => Reply::new(416, ""),
        Some(start) => {
            let (last, size) = (bytes.len() - 1, bytes.len());
            let reply = Reply::new(206, &bytes[start..]);
            reply.with_header("content-range", format!("bytes {start}-{last}/{size}"))
        }
    }
}

fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors") || file.ends_with(".gguf")
}

/// A hash as long as git's. The client does not compute it.
fn git_hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))[..40].to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
