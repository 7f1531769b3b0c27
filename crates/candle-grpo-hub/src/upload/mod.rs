//! Uploads a folder as one commit.
//!
//! The requests are those of [`HfApi.upload_folder`](https://github.com/huggingface/huggingface_hub)
//! without Xet.

mod folder;
mod large;

use std::path::Path;

use anyhow::{Error, Result, anyhow, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_grpo_base::progress::Phase;
use candle_grpo_base::{Interrupted, Progress};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::client::{Client, Failure, Method, Refusal, TRIES, encoded};
use crate::name::is_revision;
use crate::{
    Hub, HubKind, HubName, Transfer, TransferError, UploadOptions, Uploaded, UploadedFile,
};
use folder::{LocalFile, git_hash};

const MAIN: &str = "main";
/// First part of revisions that are no branches, such as `refs/pr/1`.
const REFS: &str = "refs/";
/// Model card, whose metadata the hub checks.
const CARD: &str = "README.md";
/// Maximum number of files in a request.
const MAX_FILES: usize = 256;
/// Maximum size in bytes of the files in a commit that are not in large file storage. The hub
/// stores larger files than 10 MB there.
const MAX_COMMIT: u64 = 1 << 28;
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const JSON_LINES: [(&str, &str); 1] = [("content-type", "application/x-ndjson")];

impl Hub {
    /// Uploads a folder's files to the model `repository` as one commit, and creates the repository
    /// if it does not exist. Files in the repository that are not in the folder stay.
    ///
    /// Contents that the hub has are not sent again, so after an interruption, the same call
    /// continues with the file that was interrupted. The token goes to the hub alone. Folders named
    /// `.git` and `.cache` are skipped.
    ///
    /// ```no_run
    /// use std::path::Path;
    /// use candle_grpo_base::NoProgress;
    /// use candle_grpo_hub::{Hub, HubName, UploadOptions};
    ///
    /// if let Some(name) = HubName::of_prefixed(Path::new("hf://ORG/NAME"))? {
    ///     let (hub, options) = (Hub::from_environment()?, UploadOptions::default());
    ///     let uploaded = hub.upload(Path::new("policy"), &name, &options, &NoProgress)?;
    ///     println!("{} has commit {}", uploaded.url, uploaded.commit);
    /// }
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As in [`Self::check_upload`]. [`Interrupted`] if `progress` is canceled. [`TransferError`]
    /// if the server does not respond. Another error if the folder has no files, or the hub rejects
    /// the upload.
    pub fn upload(
        &self,
        folder: &Path,
        repository: &HubName,
        options: &UploadOptions,
        progress: &dyn Progress,
    ) -> Result<Uploaded> {
        self.check_upload(repository, options)?;
        let files = folder::list(folder)?;
        let upload = Upload {
            hub: self,
            repository,
            id: repository.id(),
            revision: options.revision.as_deref().unwrap_or(MAIN),
            options,
            client: Client::new(self, progress),
        };
        upload.run(&files)
    }

    /// Checks everything about an upload that needs no request.
    ///
    /// # Errors
    ///
    /// If requests are forbidden, there is no token, the name is not that of a model, or the
    /// revision is invalid.
    pub fn check_upload(&self, repository: &HubName, options: &UploadOptions) -> Result<()> {
        ensure!(
            repository.kind() == HubKind::Model
                && repository.revision().is_none()
                && repository.file().is_none(),
            "{repository}: must be ORG/NAME, the name of a model repository"
        );
        if let Some(revision) = &options.revision {
            ensure!(
                is_revision(revision),
                "revision: {revision:?}, must be the name of a branch, or refs/pr/N"
            );
        }
        if let Some(variable) = self.offline {
            bail!("{repository}: {variable} forbids uploads; unset the variable");
        }
        ensure!(
            self.token.is_some(),
            "{repository}: an upload needs a token; set HF_TOKEN, or log in with `hf auth login`"
        );
        Ok(())
    }
}

/// An upload to a repository.
struct Upload<'a> {
    hub: &'a Hub,
    repository: &'a HubName,
    /// `ORG/NAME`.
    id: &'a str,
    revision: &'a str,
    options: &'a UploadOptions,
    client: Client<'a>,
}

/// The hub's decision on a file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Decision {
    path: String,
    upload_mode: UploadMode,
    #[serde(default)]
    should_ignore: bool,
    /// The hash of the branch's file.
    oid: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum UploadMode {
    /// In large file storage.
    Lfs,
    /// In the commit.
    Regular,
}

impl Upload<'_> {
    fn run(&self, files: &[LocalFile]) -> Result<Uploaded> {
        self.check_card(files)?;
        let is_private = self.create()?;
        self.create_branch()?;
        let decisions = self.decide(files)?;
        let (lines, transfers) = self.send(files, &decisions)?;
        let commit = if lines.is_empty() {
            let listing = self.client.listing(self.repository, self.revision, TRIES);
            let listing = listing.map_err(|failure| self.explained(failure, "the last commit"));
            listing?.commit
        } else {
            self.commit(&lines)?
        };
        let files = files.iter().zip(transfers);
        Ok(Uploaded {
            url: match self.revision {
                MAIN => self.page(),
                revision => format!("{}/tree/{}", self.page(), encoded(revision, "")),
            },
            commit,
            is_private,
            files: files
                .map(|(file, transfer)| UploadedFile {
                    path: file.path.clone(),
                    bytes: file.size,
                    transfer,
                })
                .collect(),
        })
    }

    fn page(&self) -> String {
        format!("{}/{}", self.hub.endpoint, self.id)
    }

    /// The URL of an API path below the repository.
    fn api(&self, path: &str) -> String {
        format!("{}/api/models/{}{path}", self.hub.endpoint, self.id)
    }

    /// Posts JSON, with retries.
    fn post(&self, url: &str, body: &Value) -> Result<Vec<u8>, Failure> {
        let body = body.to_string();
        self.client
            .with_retries(TRIES, || self.client.post(url, &JSON, body.as_bytes()))
    }

    /// Checks a model card's metadata, so that they do not make the commit fail after the transfer.
    fn check_card(&self, files: &[LocalFile]) -> Result<()> {
        let Some(card) = files.iter().find(|file| file.path == CARD) else {
            return Ok(());
        };
        let content = String::from_utf8(card.contents()?)
            .map_err(|_| anyhow!("{CARD}: must be text in UTF-8"))?;
        let url = format!("{}/api/validate-yaml", self.hub.endpoint);
        let body = json!({"content": content, "repoType": "model"});
        match self.post(&url, &body) {
            // Other servers than Hugging Face's may lack this check.
            Err(Failure::Refused(refusal)) if matches!(refusal.status, 404 | 405) => Ok(()),
            Err(Failure::Refused(Refusal {
                status: 400,
                message,
                ..
            })) => bail!(
                "{}: the metadata in {CARD} are not valid: {message}",
                self.id
            ),
            checked => checked
                .map(drop)
                .map_err(|failure| self.explained(failure, "checking the model card")),
        }
    }

    /// Creates the repository, unless it exists. Returns whether it is private.
    fn create(&self) -> Result<bool> {
        let (organization, name) = self.id.split_once('/').unwrap_or_default();
        let url = format!("{}/api/repos/create", self.hub.endpoint);
        let body = json!({
            "type": "model",
            "name": name,
            "organization": organization,
            "private": !self.options.public,
        });
        let created = self.post(&url, &body);
        // A token may be allowed to write to a repository, but not to create one.
        let refusal = match created {
            Ok(_) => None,
            Err(Failure::Refused(refusal)) if matches!(refusal.status, 401..=403 | 409) => {
                Some(refusal)
            }
            Err(failure) => return Err(self.explained(failure, "creating the repository")),
        };
        let is_private = match (self.is_private(), refusal) {
            (Err(Failure::Refused(_)), Some(refusal)) => {
                let failure = Failure::Refused(refusal);
                return Err(self.explained(failure, "creating the repository"));
            }
            (found, _) => {
                found.map_err(|failure| self.explained(failure, "describing the repository"))?
            }
        };
        match (is_private, self.options.public) {
            (false, false) => bail!(
                "{}: is public, and everyone could read the files; pass --public (`public` in Rust) to upload to it, or choose another name",
                self.id
            ),
            (true, true) => tracing::warn!(
                "{}: exists already and stays private; its settings are on {}/settings",
                self.id,
                self.page()
            ),
            _ => {}
        }
        Ok(is_private)
    }

    fn is_private(&self) -> Result<bool, Failure> {
        #[derive(Deserialize)]
        struct Repository {
            private: bool,
        }
        let url = self.api("");
        let text = self.client.with_retries(TRIES, || {
            let answer = self.client.send(Method::Get, &url, 0)?;
            self.client.read(&url, answer.response, "the response")
        })?;
        let repository: Repository = parsed(&url, &text)?;
        Ok(repository.private)
    }

    fn create_branch(&self) -> Result<()> {
        let revision = self.revision;
        if revision == MAIN || revision.starts_with(REFS) {
            return Ok(());
        }
        let url = self.api(&format!("/branch/{}", encoded(revision, "")));
        match self.post(&url, &json!({})) {
            Err(Failure::Refused(refusal)) if refusal.status == 409 => Ok(()),
            created => created
                .map(drop)
                .map_err(|failure| self.explained(failure, "creating the branch")),
        }
    }

    /// Asks where the hub stores each file.
    fn decide(&self, files: &[LocalFile]) -> Result<Vec<Decision>> {
        #[derive(Deserialize)]
        struct Decisions {
            files: Vec<Decision>,
        }
        let url = self.api(&format!("/preupload/{}", encoded(self.revision, "")));
        let mut decisions = Vec::new();
        for chunk in files.chunks(MAX_FILES) {
            let described = chunk.iter().map(|file| {
                let sample = STANDARD.encode(file.sample()?);
                Ok(json!({"path": file.path, "sample": sample, "size": file.size}))
            });
            let described: Vec<Value> = described.collect::<Result<_>>()?;
            let found: Decisions =
                self.ask(&url, &json!({"files": described}), "preparing the upload")?;
            for file in chunk {
                let decision = found.files.iter().find(|found| found.path == file.path);
                let Some(decision) = decision else {
                    bail!("{url}: the response has no decision for {}", file.path);
                };
                decisions.push(Decision {
                    // Storage servers reject empty files.
                    upload_mode: match file.size {
                        0 => UploadMode::Regular,
                        _ => decision.upload_mode,
                    },
                    path: decision.path.clone(),
                    oid: decision.oid.clone(),
                    ..*decision
                });
            }
        }
        Ok(decisions)
    }

    /// Sends the large files. Returns the commit's lines, and the files' transfers.
    fn send(
        &self,
        files: &[LocalFile],
        decisions: &[Decision],
    ) -> Result<(Vec<Value>, Vec<Transfer>)> {
        let is_sent = |(_, decision): &(&LocalFile, &Decision)| !decision.should_ignore;
        let sent = files.iter().zip(decisions).filter(is_sent);
        let regular = sent
            .clone()
            .filter(|(_, decision)| decision.upload_mode == UploadMode::Regular);
        let in_commit: u64 = regular.map(|(file, _)| file.size).sum();
        ensure!(
            in_commit <= MAX_COMMIT,
            "{}: the hub takes {in_commit} bytes in the commit and not in large file storage, must be at most {MAX_COMMIT}",
            self.id
        );
        let bytes: u64 = sent.map(|(file, _)| file.size).sum();
        self.client.progress.begin(Phase::Upload, bytes as usize);
        let (mut lines, mut transfers) = (Vec::new(), Vec::new());
        for (file, decision) in files.iter().zip(decisions) {
            let (line, transfer) = match decision {
                Decision {
                    should_ignore: true,
                    ..
                } => (None, Transfer::Ignored),
                decision => self.send_file(file, decision)?,
            };
            lines.extend(line);
            transfers.push(transfer);
        }
        Ok((lines, transfers))
    }

    /// Sends a file, unless the hub has it. Returns its line in the commit, unless it is unchanged.
    fn send_file(
        &self,
        file: &LocalFile,
        decision: &Decision,
    ) -> Result<(Option<Value>, Transfer)> {
        let path = &file.path;
        let has = |hash: &str| decision.oid.as_deref() == Some(hash);
        match decision.upload_mode {
            UploadMode::Regular => {
                let contents = file.contents()?;
                self.client.progress.advance(contents.len(), 0);
                if has(&git_hash(&contents)) {
                    return Ok((None, Transfer::Present));
                }
                let content = STANDARD.encode(contents);
                let value = json!({"content": content, "path": path, "encoding": "base64"});
                Ok((Some(json!({"key": "file", "value": value})), Transfer::Sent))
            }
            UploadMode::Lfs => {
                let explained = |failure| self.explained(failure, path);
                let oid = file.sha256(&self.client).map_err(explained)?;
                if has(&oid) {
                    self.client.progress.advance(file.size as usize, 0);
                    return Ok((None, Transfer::Present));
                }
                let transfer = self.send_large(file, &oid).map_err(explained)?;
                let value = json!({"path": path, "algo": "sha256", "oid": oid, "size": file.size});
                Ok((Some(json!({"key": "lfsFile", "value": value})), transfer))
            }
        }
    }

    /// Commits the files, and returns the commit's hash.
    fn commit(&self, lines: &[Value]) -> Result<String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Commit {
            commit_oid: String,
        }
        let value = json!({"summary": self.options.message, "description": ""});
        let header = json!({"key": "header", "value": value});
        let lines = std::iter::once(&header).chain(lines);
        let body: String = lines.map(|line| format!("{line}\n")).collect();
        let url = self.api(&format!("/commit/{}", encoded(self.revision, "")));
        let sent = self.client.with_retries(TRIES, || {
            self.client.post(&url, &JSON_LINES, body.as_bytes())
        });
        let commit = sent.and_then(|text| parsed::<Commit>(&url, &text));
        let commit = commit.map_err(|failure| self.explained(failure, "the commit"))?;
        Ok(commit.commit_oid)
    }

    /// Posts JSON, and reads the response. Errors call the request `what`.
    fn ask<T: DeserializeOwned>(&self, url: &str, body: &Value, what: &str) -> Result<T> {
        let found = self.post(url, body).and_then(|text| parsed(url, &text));
        found.map_err(|failure| self.explained(failure, what))
    }

    fn explained(&self, failure: Failure, what: &str) -> Error {
        let id = self.id;
        match failure {
            Failure::Canceled => Interrupted.into(),
            Failure::Other(error) => error.context(format!("{id}: {what}")),
            Failure::Transient { message, .. } => Error::new(TransferError(format!(
                "{id}: {what}: {message}. Run the same command again: it does not repeat files that are complete"
            ))),
            Failure::Refused(refusal) => self.refused(&refusal, what),
        }
    }

    fn refused(&self, refusal: &Refusal, what: &str) -> Error {
        let Self {
            hub, id, revision, ..
        } = self;
        let token = "the token in HF_TOKEN, or in the file `token` in HF_HOME,";
        let tokens = format!(
            "create one that may write at {}/settings/tokens",
            hub.endpoint
        );
        let advice = match (refusal.status, refusal.code.as_str()) {
            (_, "RevisionNotFound") => format!("the repository has no revision {revision}"),
            (401, _) => format!("{token} is not valid; {tokens}"),
            (403, _) => format!(
                "{token} may not write there; {tokens}, or choose a name of your account or organization"
            ),
            (404, _) => format!(
                "{} has no such repository, account or organization, or {token} has no access to it",
                hub.endpoint
            ),
            (409 | 412, _) => {
                "another change of the repository came first; run the same command again".to_owned()
            }
            (413, _) => {
                "it is larger than the hub accepts; upload smaller files, for example with --dtype bf16".to_owned()
            }
            _ => "the hub rejects it".to_owned(),
        };
        let Refusal {
            status, message, ..
        } = refusal;
        match message.as_str() {
            "" => anyhow!("{id}: {what}: {advice} (status {status})"),
            message => anyhow!("{id}: {what}: {advice} (status {status}: {message})"),
        }
    }
}

/// Parses a response.
fn parsed<T: DeserializeOwned>(url: &str, text: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(text).map_err(|error| {
        Failure::Other(anyhow!(
            "{url}: the response is not that of a hub: {error}; HF_ENDPOINT must be a hub's URL"
        ))
    })
}
