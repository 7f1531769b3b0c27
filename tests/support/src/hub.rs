//! A server with the Hugging Face hub API, for tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::{HttpServer, Reply, Request};

const MAIN: &str = "main";

/// A repository on a [`FakeHub`].
#[derive(Debug, Clone)]
pub struct HubRepository {
    path: String,
    is_private: bool,
    /// The commit at each branch.
    branches: BTreeMap<String, String>,
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
            is_private: true,
            branches: BTreeMap::new(),
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

    /// Makes the repository public.
    #[must_use]
    pub fn as_public(self) -> Self {
        Self {
            is_private: false,
            ..self
        }
    }

    /// Adds a commit with `files` to `main`, and returns its hash.
    pub fn push<'a>(&mut self, files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> String {
        let files = files.into_iter();
        let files: BTreeMap<String, Vec<u8>> = files
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .collect();
        self.push_to(MAIN, files)
    }

    fn push_to(&mut self, branch: &str, files: BTreeMap<String, Vec<u8>>) -> String {
        let text = format!("{} {files:?}", self.commits.len());
        let commit = git_hash(text.as_bytes());
        self.commits.insert(commit.clone(), files);
        self.branches.insert(branch.to_owned(), commit.clone());
        commit
    }

    /// The commit at `main`.
    pub fn commit(&self) -> &str {
        &self.branches[MAIN]
    }

    /// The number of commits.
    pub fn commits(&self) -> usize {
        self.commits.len()
    }

    /// Returns whether only its owners can read the repository.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// The files at a branch.
    ///
    /// # Panics
    ///
    /// If there is no such branch.
    pub fn files(&self, branch: &str) -> &BTreeMap<String, Vec<u8>> {
        &self.commits[&self.branches[branch]]
    }

    /// The commit at a branch, or a commit.
    fn commit_of(&self, revision: &str) -> Option<String> {
        if revision == "refs/pr/1" {
            return Some(self.commit().to_owned());
        }
        let branch = self.branches.get(revision);
        let is_commit = self.commits.contains_key(revision);
        branch
            .cloned()
            .or_else(|| is_commit.then(|| revision.to_owned()))
    }
}

type Change = Box<dyn FnMut(&Request, Reply) -> Reply + Send>;
type Refusal = Box<dyn FnMut(&Request) -> Option<Reply> + Send>;

struct State {
    repositories: Vec<HubRepository>,
    /// Uploaded large files by their SHA-256.
    objects: BTreeMap<String, Vec<u8>>,
    /// Uploaded parts of large files, by SHA-256 and number.
    parts: BTreeMap<(String, usize), Vec<u8>>,
    /// The size of parts.
    part_size: Option<usize>,
    change: Change,
    refusal: Refusal,
}

/// A server with the hub API, and a second one with another origin that stores large files. Large
/// files are those whose names end in `.safetensors` or `.gguf`. Uploads need any token, and ignore
/// files whose names end in `.log`.
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
            objects: BTreeMap::new(),
            parts: BTreeMap::new(),
            part_size: None,
            change: Box::new(|_, reply| reply),
            refusal: Box::new(|_| None),
        }));
        let shared = Arc::clone(&state);
        let storage = HttpServer::start(move |request| lock(&shared).reply(request, State::stored));
        let (shared, address) = (Arc::clone(&state), storage.url());
        let api = HttpServer::start(move |request| {
            lock(&shared).reply(request, |state, request| state.answer(request, &address))
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

    /// Answers requests to both servers, from now on, for which `refusal` has a response. They have
    /// no effect.
    pub fn set_refusal(&self, refusal: impl FnMut(&Request) -> Option<Reply> + Send + 'static) {
        lock(&self.state).refusal = Box::new(refusal);
    }

    /// Makes uploads of large files come in parts of `bytes` bytes.
    pub fn set_part_size(&self, bytes: usize) {
        lock(&self.state).part_size = Some(bytes);
    }

    /// Changes the repository with index `index`. Repositories that uploads create follow those of
    /// [`Self::start`].
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
    fn reply(
        &mut self,
        request: &Request,
        answer: impl FnOnce(&mut Self, &Request) -> Reply,
    ) -> Reply {
        if let Some(refusal) = (self.refusal)(request) {
            return refusal;
        }
        let reply = answer(self, request);
        (self.change)(request, reply)
    }

    fn answer(&mut self, request: &Request, storage: &str) -> Reply {
        if request.method == "POST" {
            return self.write(request, storage);
        }
        let path = request.path().trim_start_matches('/').replace("%2F", "/");
        let (is_api, path) = match path.strip_prefix("api/") {
            Some(rest) => (true, rest.trim_start_matches("models/")),
            None => (false, path.as_str()),
        };
        let found = self.repositories.iter().find_map(|repository| {
            let rest = path.strip_prefix(&repository.path)?;
            let rest = if rest.is_empty() {
                rest
            } else {
                rest.strip_prefix('/')?
            };
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
        let commit_of = |revision: &str| repository.commit_of(revision);
        if is_api && rest.is_empty() {
            let found = json!({"id": repository.path, "private": repository.is_private});
            return Reply::new(200, found.to_string());
        }
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

    /// Answers a request that changes a repository.
    fn write(&mut self, request: &Request, storage: &str) -> Reply {
        if request.header("authorization").is_none() && request.path() != "/complete" {
            return Reply::new(401, r#"{"error": "Invalid username or password."}"#);
        }
        let path = request.path().replace("%2F", "/");
        let lines = request.body.split(|&byte| byte == b'\n');
        let lines = lines.filter(|line| !line.is_empty());
        let lines: Option<Vec<Value>> = lines
            .map(|line| serde_json::from_slice(line).ok())
            .collect();
        let Some([first, rest @ ..]) = lines.as_deref() else {
            return Reply::new(400, r#"{"error": "not JSON"}"#);
        };
        match path.as_str() {
            "/api/validate-yaml" => return json_reply(&json!({"errors": [], "warnings": []})),
            "/api/repos/create" => return self.create(first),
            "/complete" => return self.complete(first),
            _ => {}
        }
        let found = self.repositories.iter_mut().find_map(|repository| {
            let path = path
                .trim_start_matches("/api/models")
                .trim_start_matches('/');
            let rest = path.strip_prefix(&repository.path)?;
            Some((repository, rest.to_owned()))
        });
        let Some((repository, what)) = found else {
            return refuse(404, "RepoNotFound");
        };
        let host = request.header("host").unwrap_or_default();
        match what.as_str() {
            ".git/info/lfs/objects/batch" => {
                let id = repository.path.clone();
                return self.batch(&id, first, storage, &format!("http://{host}"));
            }
            "/verify" => {
                let object = self.objects.get(first["oid"].as_str().unwrap_or_default());
                let is_whole = object.is_some_and(|bytes| first["size"] == bytes.len());
                return Reply::new(if is_whole { 200 } else { 404 }, "");
            }
            _ => {}
        }
        let (action, revision) = what
            .trim_start_matches('/')
            .split_once('/')
            .unwrap_or_default();
        if action == "branch" {
            if repository.branches.contains_key(revision) {
                return Reply::new(409, r#"{"error": "the branch exists"}"#);
            }
            let commit = repository.commit().to_owned();
            repository.branches.insert(revision.to_owned(), commit);
            return Reply::new(201, "");
        }
        if !repository.branches.contains_key(revision) {
            return refuse(404, "RevisionNotFound");
        }
        match action {
            "preupload" => decide(repository.files(revision), first),
            "commit" => {
                let mut files = repository.files(revision).clone();
                for line in rest {
                    let value = &line["value"];
                    let path = value["path"].as_str().unwrap_or_default().to_owned();
                    let text = |key: &str| value[key].as_str().unwrap_or_default();
                    let contents = match line["key"].as_str() {
                        Some("file") => STANDARD.decode(text("content")).ok(),
                        _ => self.objects.get(text("oid")).cloned(),
                    };
                    let Some(contents) = contents else {
                        return Reply::new(400, r#"{"error": "the contents are missing"}"#);
                    };
                    files.insert(path, contents);
                }
                let commit = repository.push_to(revision, files);
                json_reply(&json!({"success": true, "commitOid": commit, "commitUrl": ""}))
            }
            _ => refuse(404, "EntryNotFound"),
        }
    }

    fn create(&mut self, repository: &Value) -> Reply {
        let text = |key: &str| repository[key].as_str().unwrap_or_default();
        let path = format!("{}/{}", text("organization"), text("name"));
        if self.repositories.iter().any(|found| found.path == path) {
            return Reply::new(409, r#"{"error": "You already created this model repo"}"#);
        }
        let mut created = HubRepository::new(&path, [(".gitattributes", Vec::new())]);
        created.is_private = repository["private"] == true;
        self.repositories.push(created);
        json_reply(&json!({"url": path}))
    }

    /// Answers the batch API of Git LFS.
    fn batch(&self, id: &str, request: &Value, storage: &str, hub: &str) -> Reply {
        let answer = |object: &Value| {
            let oid = object["oid"].as_str().unwrap_or_default();
            if self.objects.contains_key(oid) {
                return object.clone();
            }
            let size = object["size"].as_u64().unwrap_or_default() as usize;
            let upload = match self.part_size {
                None => json!({"href": format!("{storage}/{oid}?signature=1")}),
                Some(bytes) => {
                    let parts = (1..=size.div_ceil(bytes)).map(|part| {
                        let url = format!("{storage}/{oid}?part={part}&signature=1");
                        (part.to_string(), json!(url))
                    });
                    let mut header: serde_json::Map<String, Value> = parts.collect();
                    header.insert("chunk_size".to_owned(), json!(bytes.to_string()));
                    json!({"href": format!("{hub}/complete?signature=1"), "header": header})
                }
            };
            let verify = json!({"href": format!("{hub}/{id}/verify")});
            json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}})
        };
        let objects = request["objects"].as_array().into_iter().flatten();
        let objects: Vec<Value> = objects.map(answer).collect();
        json_reply(&json!({"objects": objects}))
    }

    /// Joins the parts of a large file.
    fn complete(&mut self, request: &Value) -> Reply {
        let oid = request["oid"].as_str().unwrap_or_default().to_owned();
        let mut whole = Vec::new();
        for part in request["parts"].as_array().into_iter().flatten() {
            let number = part["partNumber"].as_u64().unwrap_or_default() as usize;
            match self.parts.get(&(oid.clone(), number)) {
                Some(bytes) if part["etag"] == part_etag(bytes) => whole.extend(bytes),
                _ => return Reply::new(400, r#"{"error": "a part is missing"}"#),
            }
        }
        self.store(oid, whole)
    }

    fn store(&mut self, oid: String, contents: Vec<u8>) -> Reply {
        if hex(&Sha256::digest(&contents)) != oid {
            return Reply::new(400, r#"{"error": "the contents have another SHA-256"}"#);
        }
        self.objects.insert(oid, contents);
        Reply::new(200, "")
    }

    /// Answers a request to the server with large files.
    fn stored(&mut self, request: &Request) -> Reply {
        if request.method == "PUT" {
            if request.header("content-length").is_none() {
                return Reply::new(411, "");
            }
            let (oid, body) = (request.path().trim_start_matches('/'), request.body.clone());
            let Some(part) = request.query("part").and_then(|part| part.parse().ok()) else {
                return self.store(oid.to_owned(), body);
            };
            let reply = Reply::new(200, "").with_header("etag", part_etag(&body));
            self.parts.insert((oid.to_owned(), part), body);
            return reply;
        }
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

/// Answers where the hub stores files, of which a branch has `present`.
fn decide(present: &BTreeMap<String, Vec<u8>>, request: &Value) -> Reply {
    let decision = |file: &Value| {
        let path = file["path"].as_str().unwrap_or_default();
        let oid = present.get(path).map(|bytes| {
            if is_large(path) {
                hex(&Sha256::digest(bytes))
            } else {
                git_hash(bytes)
            }
        });
        let mode = if is_large(path) { "lfs" } else { "regular" };
        let is_ignored = path.ends_with(".log");
        json!({"path": path, "uploadMode": mode, "shouldIgnore": is_ignored, "oid": oid})
    };
    let files = request["files"].as_array().into_iter().flatten();
    let files: Vec<Value> = files.map(decision).collect();
    json_reply(&json!({"files": files}))
}

fn json_reply(value: &Value) -> Reply {
    Reply::new(200, value.to_string())
}

fn refuse(status: u16, code: &str) -> Reply {
    Reply::new(status, "").with_header("x-error-code", code)
}

/// The ETag of a file's part, with quotation marks.
fn part_etag(bytes: &[u8]) -> String {
    format!("\"{}\"", &hex(&Sha256::digest(bytes))[..8])
}

/// Git's hash of a file.
fn git_hash(bytes: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
