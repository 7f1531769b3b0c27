//! Locates a name's files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};

use super::cache::{Repository, is_commit};
use super::client::{Client, Failure, Listing, Refusal, TRIES};
use super::download::{Remote, describe};
use super::files::{INDEX, ModelFiles, indexed};
use super::name::{HubKind, HubName, is_gguf};
use super::{HubContent, Located, MissingFile, TransferError};
use candle_grpo_base::progress::Phase;
use candle_grpo_base::{Interrupted, Progress};

const MAIN: &str = "main";
/// Maximum number of files in a message.
const SHOWN: usize = 8;

/// The hub and its cache on this machine, in the same layout as Hugging Face's Python library.
///
/// ```no_run
/// use std::path::Path;
/// use candle_grpo_base::NoProgress;
/// use candle_grpo_hub::{Hub, HubContent, HubName};
///
/// let hub = Hub::from_environment()?;
/// if let Some(name) = HubName::of(Path::new("Qwen/Qwen2.5-0.5B-Instruct"))? {
///     let model = hub.locate(&name, HubContent::Model, None, &NoProgress)?;
///     println!("{} of commit {}", model.path.display(), model.commit);
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone)]
pub struct Hub {
    /// The cache folder: `HF_HUB_CACHE`.
    pub cache: PathBuf,
    /// The hub's URL: `HF_ENDPOINT`.
    pub endpoint: String,
    /// An account's token, which is only sent to the endpoint: `HF_TOKEN`.
    pub token: Option<String>,
    /// The variable that forbids requests, such as `HF_HUB_OFFLINE`.
    pub offline: Option<&'static str>,
    /// Pause after a request's first failure. It doubles with each further one.
    pub first_pause: std::time::Duration,
    /// Maximum time to receive a response that is not a file: a file list, or the result of an
    /// upload.
    pub answer_limit: std::time::Duration,
    /// Maximum size in bytes for a file whose size the server does not report.
    pub unsized_limit: u64,
}

impl Hub {
    /// Returns where the files for `name` are, after downloading those that are not in the cache.
    /// `commit` overrides the revision in the name.
    ///
    /// A cached file from a known commit needs no request. The hub is asked which commit a branch
    /// or tag is at, and which files a model has. Without a network, cached files are used, with a
    /// warning.
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if `progress` is canceled. [`TransferError`] if the server does not respond,
    /// sends different bytes than it should, or the disk is full. Another error if the repository,
    /// revision or file does not exist, the token has no access, or a file is missing and requests
    /// are forbidden.
    pub fn locate(
        &self,
        name: &HubName,
        content: HubContent,
        commit: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<Located> {
        let location = Location {
            hub: self,
            name,
            content,
            revision: commit.or(name.revision()).unwrap_or(MAIN),
            repository: Repository::new(&self.cache, name),
            client: Client::new(self, progress),
        };
        location.check_content()?;
        location
            .locate()
            .map_err(|failure| location.explained(failure))
    }
}

/// A name whose files are being located.
struct Location<'a> {
    hub: &'a Hub,
    name: &'a HubName,
    content: HubContent,
    revision: &'a str,
    repository: Repository,
    client: Client<'a>,
}

impl Location<'_> {
    fn check_content(&self) -> Result<()> {
        let name = self.name;
        if self.content == HubContent::Data {
            ensure!(
                name.file().is_some(),
                "{name}: must end in a file in the repository, as in {name}/train.jsonl"
            );
            return Ok(());
        }
        ensure!(
            name.kind() == HubKind::Model,
            "{name}: is a data set, must be a model"
        );
        match name.file() {
            Some(file) if !is_gguf(Path::new(file)) => bail!(
                "{name}: {file}, must be a GGUF file, or absent for a model in safetensors files"
            ),
            _ => Ok(()),
        }
    }

    fn locate(&self) -> Result<Located, Failure> {
        let cached = self.repository.commit(self.revision);
        let cached = cached.map(|commit| self.in_cache(commit));
        // Another program may have skipped optional files in a commit.
        let is_listed = is_commit(self.revision)
            && (self.name.file().is_some() || self.repository.list(self.revision).is_some());
        match &cached {
            Some(Ok(located)) if is_listed || self.hub.offline.is_some() => {
                return Ok(located.clone());
            }
            _ => {}
        }
        if let Some(variable) = self.hub.offline {
            return Err(Failure::Other(
                self.offline_error(variable, cached.and_then(Result::err)),
            ));
        }
        let cached = cached.and_then(Result::ok);
        let tries = if cached.is_some() { 1 } else { TRIES };
        let listing = match (self.client.listing(self.name, self.revision, tries), cached) {
            (Err(Failure::Transient { message, .. }), Some(located)) => {
                tracing::warn!(
                    "{}: {message}; using commit {} from the cache",
                    self.name,
                    located.commit
                );
                return Ok(located);
            }
            (listing, _) => listing?,
        };
        self.download(&listing)
    }

    /// Returns a commit's files in the cache, or the reason why some are missing.
    fn in_cache(&self, commit: String) -> Result<Located> {
        let list = self.repository.list(&commit);
        let files = list.unwrap_or_else(|| self.repository.files(&commit));
        let missing = |file: &String| !self.repository.has(&commit, file);
        let needed = match self.name.file() {
            Some(file) => vec![file.to_owned()],
            None => {
                let ModelFiles { mut small, weights } = ModelFiles::select(&files)?;
                if let Some(file) = small.iter().find(|file| missing(file)) {
                    bail!("{file} is missing");
                }
                small.extend(match weights {
                    Some(weights) => weights,
                    None => indexed(&self.repository.snapshot(&commit).join(INDEX))?,
                });
                small
            }
        };
        if let Some(file) = needed.iter().find(|file| missing(file)) {
            bail!("{file} is missing");
        }
        Ok(self.located(commit, Vec::new()))
    }

    fn located(&self, commit: String, missing: Vec<MissingFile>) -> Located {
        let folder = self.repository.snapshot(&commit);
        Located {
            path: match self.name.file() {
                Some(file) => folder.join(file),
                None => folder,
            },
            commit,
            missing,
        }
    }

    fn download(&self, listing: &Listing) -> Result<Located, Failure> {
        let commit = &listing.commit;
        let (small, weights) = match self.name.file() {
            Some(file) => {
                self.ensure_listed(listing, file)?;
                match self.content {
                    HubContent::Data => (vec![file.to_owned()], Some(Vec::new())),
                    _ => (Vec::new(), Some(vec![file.to_owned()])),
                }
            }
            None => {
                let files = ModelFiles::select(&listing.files);
                let files = files
                    .with_context(|| self.name.to_string())
                    .map_err(Failure::Other)?;
                (files.small, files.weights)
            }
        };
        self.fetch(commit, &small)?;
        let weights = match weights {
            Some(weights) => weights,
            None => {
                let index = indexed(&self.repository.snapshot(commit).join(INDEX));
                index
                    .with_context(|| self.name.to_string())
                    .map_err(Failure::Other)?
            }
        };
        if self.content == HubContent::ModelWithoutWeights {
            let remote = self.describe_missing(commit, &weights)?.into_iter();
            let remote = remote.filter(|remote| !remote.is_at(&self.repository.blob(&remote.etag)));
            let missing: Vec<MissingFile> = remote
                .map(|remote| MissingFile {
                    file: remote.file,
                    bytes: remote.size,
                })
                .collect();
            if !missing.is_empty() {
                return Ok(self.located(commit.clone(), missing));
            }
        }
        self.fetch(commit, &weights)?;
        // After the files, so that the reference never names a commit whose download was
        // interrupted.
        let written = self.repository.set_commit(self.revision, commit);
        written
            .with_context(|| format!("writing to {}", self.hub.cache.display()))
            .map_err(Failure::Other)?;
        if self.revision != commit {
            tracing::info!("{}: {} is commit {commit}", self.name, self.revision);
        }
        Ok(self.located(commit.clone(), Vec::new()))
    }

    fn ensure_listed(&self, listing: &Listing, file: &str) -> Result<(), Failure> {
        if listing.files.iter().any(|listed| listed == file) {
            return Ok(());
        }
        let end = file.rsplit('.').next().unwrap_or_default();
        let mut alike: Vec<&str> = listing.files.iter().map(String::as_str).collect();
        alike.retain(|listed| listed.rsplit('.').next() == Some(end));
        let hint = match alike.as_slice() {
            [] => String::new(),
            alike => {
                let more = if alike.len() > SHOWN { ", ..." } else { "" };
                format!(
                    "; it has {}{more}",
                    alike[..alike.len().min(SHOWN)].join(", ")
                )
            }
        };
        Err(Failure::Other(anyhow!(
            "{}: the repository has no file {file}{hint}",
            self.name
        )))
    }

    /// Describes the files in a commit that are not in its folder.
    fn describe_missing(&self, commit: &str, files: &[String]) -> Result<Vec<Remote>, Failure> {
        let missing = files
            .iter()
            .filter(|file| !self.repository.has(commit, file));
        missing
            .map(|file| {
                let url = self.client.address(self.name, commit, file);
                describe(&self.client, url, file, commit)
            })
            .collect()
    }

    /// Downloads a commit's files to the cache, unless they are there.
    fn fetch(&self, commit: &str, files: &[String]) -> Result<(), Failure> {
        let missing = self.describe_missing(commit, files)?;
        let blob = |remote: &Remote| self.repository.blob(&remote.etag);
        let absent = missing.iter().filter(|remote| !remote.is_at(&blob(remote)));
        let bytes: u64 = absent.clone().filter_map(|remote| remote.size).sum();
        if bytes > 0 {
            self.client.progress.begin(Phase::Download, bytes as usize);
        }
        for remote in absent {
            remote.download(&self.client, &blob(remote))?;
        }
        for remote in &missing {
            let linked = self.repository.link(commit, &remote.file, &remote.etag);
            linked
                .with_context(|| format!("writing to {}", self.hub.cache.display()))
                .map_err(Failure::Other)?;
        }
        Ok(())
    }

    fn offline_error(&self, variable: &str, reason: Option<Error>) -> Error {
        let reason = match reason {
            Some(reason) => format!("{reason:#}"),
            None => format!("{} is missing", self.revision),
        };
        anyhow!(
            "{}: there is no such file or directory, and {variable} forbids downloads. The cache {}: {reason}. Unset the variable, or run `{}` where there is a network, with the same HF_HOME",
            self.name,
            self.hub.cache.display(),
            self.command()
        )
    }

    /// The command that downloads the files with Hugging Face's Python library.
    fn command(&self) -> String {
        let mut command = format!("hf download {}", self.name.id());
        if let Some(file) = self.name.file() {
            command += &format!(" {file}");
        }
        if self.name.kind() == HubKind::Dataset {
            command += " --repo-type dataset";
        }
        if self.revision != MAIN {
            command += &format!(" --revision {}", self.revision);
        }
        command
    }

    fn explained(&self, failure: Failure) -> Error {
        match failure {
            Failure::Canceled => Interrupted.into(),
            Failure::Other(error) => error,
            Failure::Transient { message, .. } => {
                let Hub {
                    endpoint, cache, ..
                } = self.hub;
                Error::new(TransferError(format!(
                    "{}: there is no such file or directory, and the hub {endpoint} (HF_ENDPOINT) did not send it: {message}. Without a network the files must be in {}: run `{}` where there is one, with the same HF_HOME",
                    self.name,
                    cache.display(),
                    self.command()
                )))
            }
            Failure::Refused(refusal) => self.refused(&refusal),
        }
    }

    fn refused(&self, refusal: &Refusal) -> Error {
        let (name, endpoint, id) = (self.name, &self.hub.endpoint, self.name.id());
        let kind = match name.kind() {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
        };
        let page = format!("{endpoint}/{kind}{id}");
        let token = match &self.hub.token {
            Some(_) => {
                "the token in HF_TOKEN, or in the file `token` in HF_HOME, has no access to it"
            }
            None => "no token is given: set HF_TOKEN, or log in with `hf auth login`",
        };
        let Refusal {
            status,
            code,
            message,
        } = refusal;
        let reason = match (*status, code.as_str()) {
            (_, "GatedRepo") => {
                format!("access is restricted: accept its conditions on {page}; {token}")
            }
            (_, "RevisionNotFound") => format!("has no revision {}", self.revision),
            (_, "EntryNotFound") => "a file in the repository does not exist".to_owned(),
            (401, _) if message.starts_with("Invalid credentials") => {
                "the token in HF_TOKEN, or in the file `token` in HF_HOME, is not valid".to_owned()
            }
            (401 | 404, _) => format!(
                "there is no such file or directory, and {endpoint} has no such repository, or it is private; {token}"
            ),
            (403, _) => format!("access to {page} is denied; {token}"),
            _ => String::new(),
        };
        let server = match message.as_str() {
            "" => format!("status {status}"),
            message => format!("status {status}: {message}"),
        };
        match reason.as_str() {
            "" => anyhow!("{name}: {page}: {server}"),
            reason => anyhow!("{name}: {reason} ({server})"),
        }
    }
}
