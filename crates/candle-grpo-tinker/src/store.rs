//! The server's folder: sessions, models, requests, results and weights.
//!
//! ```text
//! sessions/SESSION/session.json
//!                  models/N/model.json           adapters and where they start from
//!                           requests/SEQ         promised requests, and passes since the state
//!                           results/SEQ          results
//!                           states/SEQ/          adapters and optimizer before the request SEQ
//!                           weights/NAME/        save_weights: a PEFT folder with optimizer state
//!                           sampler_weights/NAME/  save_weights_for_sampler: a PEFT folder
//!                  samplers/N.json
//! identity/                                      adapters that change nothing, for an engine
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use candle_grpo_base::atomic_file;
use candle_grpo_base::server::Refusal;
use candle_grpo_train::data::read_json;
use candle_grpo_train::run::FolderLock;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::work::{Answered, Outcome, WeightsKind, Work};

/// Folder version.
const VERSION: &str = "1";

/// A model in its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelRecord {
    pub(crate) start: Start,
    pub(crate) rank: usize,
    pub(crate) train_attn: bool,
    pub(crate) train_mlp: bool,
}

/// The weights that a model starts from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Start {
    Seed(u64),
    /// Saved weights, with the optimizer state if `optimizer`.
    Weights {
        path: String,
        optimizer: bool,
    },
}

/// A sampling session in its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SamplerRecord {
    /// Saved weights; absent for the base model.
    pub(crate) model_path: Option<String>,
}

impl SamplerRecord {
    /// Returns whether these are its weights.
    pub(crate) fn has(&self, path: &WeightsPath) -> bool {
        let own = self.model_path.as_deref();
        own.is_some_and(|own| WeightsPath::parse(own).as_ref() == Ok(path))
    }
}

/// A model's state after a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StateRecord {
    /// Sequence number of the first request that it does not include.
    pub(crate) next: u64,
    /// Result for the last request that it includes.
    pub(crate) last: Answered,
}

/// A model's identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ModelId {
    pub(crate) session: String,
    pub(crate) number: u64,
}

impl ModelId {
    /// Reads `SESSION:train:N`.
    pub(crate) fn parse(id: &str) -> Result<Self, Refusal> {
        let must = "be a model of this server, SESSION:train:N";
        let parsed = id.split_once(":train:").and_then(|(session, number)| {
            Some(Self {
                session: session_name(session)?.to_owned(),
                number: number.parse().ok()?,
            })
        });
        parsed.ok_or_else(|| Refusal::missing("model_id", id, must))
    }
}

impl std::fmt::Display for ModelId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:train:{}", self.session, self.number)
    }
}

/// Returns a session's id if it has the form that the server gives, which is a safe file name.
pub(crate) fn session_name(id: &str) -> Option<&str> {
    let is_name = id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit());
    is_name.then_some(id)
}

/// Saved weights: `tinker://MODEL/KIND/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightsPath {
    pub(crate) model: ModelId,
    pub(crate) kind: WeightsKind,
    pub(crate) name: String,
}

impl WeightsPath {
    pub(crate) fn parse(path: &str) -> Result<Self, Refusal> {
        let must = "be tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME";
        let invalid = || Refusal::invalid("path", path, must);
        let rest = path.strip_prefix("tinker://").ok_or_else(invalid)?;
        let parts: Vec<&str> = rest.split('/').collect();
        let [model, kind, name] = parts[..] else {
            return Err(invalid());
        };
        let kind = match kind {
            "weights" => WeightsKind::Training,
            "sampler_weights" => WeightsKind::Sampler,
            _ => return Err(invalid()),
        };
        Ok(Self {
            model: ModelId::parse(model)?,
            kind,
            name: weights_name(name)?.to_owned(),
        })
    }

    /// Returns the path of unnamed sampler weights.
    pub(crate) fn unnamed(model: &ModelId, number: u64) -> Self {
        Self {
            model: model.clone(),
            kind: WeightsKind::Sampler,
            name: unnamed(number),
        }
    }

    /// Returns the record for a sampling session with these weights.
    pub(crate) fn sampler(&self) -> SamplerRecord {
        SamplerRecord {
            model_path: Some(self.to_string()),
        }
    }
}

impl std::fmt::Display for WeightsPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "tinker://{}/{}/{}",
            self.model,
            self.kind.name(),
            self.name
        )
    }
}

/// Checks a name for saved weights, which becomes a folder name.
pub(crate) fn weights_name(name: &str) -> Result<&str, Refusal> {
    let is_part = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let is_name = name.bytes().all(is_part) && !name.starts_with('.') && !name.is_empty();
    if is_name && name.len() <= 128 {
        return Ok(name);
    }
    let must = "be 1 to 128 letters, digits, '-', '_' and '.', not '.' first";
    Err(Refusal::invalid("path", format!("{name:?}"), must))
}

/// A request's SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// A request in its file: its digest and its work.
pub(crate) struct StoredRequest(Vec<u8>);

impl StoredRequest {
    pub(crate) fn new(work: &Work) -> Result<Self> {
        let mut bytes = vec![0; size_of::<Digest>()];
        bytes = postcard::to_extend(work, bytes)?;
        let (digest, work) = bytes.split_at_mut(size_of::<Digest>());
        digest.copy_from_slice(&crate::digest(work));
        Ok(Self(bytes))
    }

    pub(crate) fn digest(&self) -> Digest {
        *self.0.first_chunk().unwrap_or(&Digest::default())
    }
}

/// The server's folder.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    _lock: FolderLock,
}

/// A model's requests and results when the server starts.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Digests for requests without a result.
    pub(crate) waiting: BTreeMap<u64, Digest>,
    /// Sequence numbers with a result.
    pub(crate) results: Vec<u64>,
    /// Sequence number of the first request without a result.
    pub(crate) next: u64,
}

impl Store {
    /// Opens or creates the folder, and locks it.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder.join("sessions"))
            .with_context(|| format!("folder: cannot create {}", folder.display()))?;
        let must = || {
            let folder = folder.display();
            format!("folder: {folder}, must be one that no other server has open")
        };
        let lock = FolderLock::take(folder, "sessions").with_context(must)?;
        let version = folder.join("version");
        match fs::read_to_string(&version) {
            Ok(found) => ensure!(
                found == VERSION,
                "folder: {} has the form {found:?}, must have the form {VERSION:?}",
                folder.display()
            ),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                write(&version, VERSION.as_bytes())?;
            }
            Err(error) => return Err(error).with_context(|| version.display().to_string()),
        }
        Ok(Self {
            folder: folder.to_owned(),
            _lock: lock,
        })
    }

    fn session(&self, id: &str) -> PathBuf {
        self.folder.join("sessions").join(id)
    }

    /// A model's folder.
    pub(crate) fn model(&self, id: &ModelId) -> PathBuf {
        let models = self.session(&id.session).join("models");
        models.join(id.number.to_string())
    }

    /// A model's state folder before the request `next`. A new state has a new name, so that
    /// there is always a complete one.
    pub(crate) fn state(&self, id: &ModelId, next: u64) -> PathBuf {
        self.model(id).join("states").join(next.to_string())
    }

    /// The folder for saved weights.
    pub(crate) fn weights(&self, path: &WeightsPath) -> PathBuf {
        self.model(&path.model)
            .join(path.kind.name())
            .join(&path.name)
    }

    /// The folder for adapters that change nothing, which each server writes.
    pub(crate) fn identity(&self) -> PathBuf {
        self.folder.join("identity")
    }

    /// Returns the folder with saved weights.
    pub(crate) fn saved(&self, path: &str) -> Result<PathBuf> {
        let parsed = WeightsPath::parse(path).map_err(|refusal| anyhow!(refusal.message))?;
        let folder = self.weights(&parsed);
        ensure!(
            folder.exists(),
            "path: {path}, must be saved weights that were not removed"
        );
        Ok(folder)
    }

    fn request(&self, id: &ModelId, seq: u64) -> PathBuf {
        self.model(id).join("requests").join(seq.to_string())
    }

    fn result(&self, id: &ModelId, seq: u64) -> PathBuf {
        self.model(id).join("results").join(seq.to_string())
    }

    fn sampler(&self, session: &str, number: u64) -> PathBuf {
        let samplers = self.session(session).join("samplers");
        samplers.join(format!("{number}.json"))
    }

    pub(crate) fn add_session(&self, id: &str) -> Result<()> {
        write(&self.session(id).join("session.json"), b"{}")
    }

    /// Returns whether a session was finished.
    pub(crate) fn is_finished(&self, session: &str) -> bool {
        self.session(session).join("finished").exists()
    }

    /// Notes that a session is finished.
    pub(crate) fn finish(&self, session: &str) -> Result<()> {
        write(&self.session(session).join("finished"), b"")
    }

    /// Removes all but a model's saved weights.
    pub(crate) fn finish_model(&self, id: &ModelId) -> Result<()> {
        for part in ["requests", "results", "states"] {
            let folder = self.model(id).join(part);
            if folder.exists() {
                atomic_file::remove_folder(&folder)?;
            }
        }
        self.remove_leftovers(id)
    }

    /// Removes what a killed server was about to write or to remove.
    fn remove_leftovers(&self, id: &ModelId) -> Result<()> {
        let parts = [
            "requests",
            "results",
            "states",
            "weights",
            "sampler_weights",
        ];
        let model = self.model(id);
        let parts = parts.iter().map(|part| model.join(part));
        for folder in parts.chain([model.clone()]) {
            if folder.exists() {
                atomic_file::remove_leftovers(&folder)?;
            }
        }
        Ok(())
    }

    pub(crate) fn add_model(&self, id: &ModelId, record: &ModelRecord) -> Result<()> {
        write_json(&self.model(id).join("model.json"), record)
    }

    pub(crate) fn model_record(&self, id: &ModelId) -> Result<ModelRecord> {
        read_json(&self.model(id).join("model.json"))
    }

    pub(crate) fn add_sampler(&self, session: &str, n: u64, record: &SamplerRecord) -> Result<()> {
        write_json(&self.sampler(session, n), record)
    }

    pub(crate) fn remove_sampler(&self, session: &str, n: u64) -> Result<()> {
        remove_file(&self.sampler(session, n))
    }

    /// Stores a promised request.
    pub(crate) fn add_request(
        &self,
        id: &ModelId,
        seq: u64,
        request: &StoredRequest,
    ) -> Result<()> {
        write(&self.request(id, seq), &request.0)
    }

    /// Reads a promised request with its digest; `None` if it was removed.
    pub(crate) fn read_request(&self, id: &ModelId, seq: u64) -> Result<Option<(Digest, Work)>> {
        read_record(&self.request(id, seq))
    }

    /// Removes a request whose session was finished meanwhile.
    pub(crate) fn remove_request(&self, id: &ModelId, seq: u64) -> Result<()> {
        remove_file(&self.request(id, seq))
    }

    /// Removes what a server that starts again need not repeat, after the last request's result.
    pub(crate) fn settle(
        &self,
        id: &ModelId,
        seq: u64,
        work: &Work,
        outcome: &Outcome,
    ) -> Result<()> {
        if outcome.starts_state() {
            self.forget_before(id, seq + 1)
        } else if work.clears_gradients(outcome) {
            self.forget_requests_before(id, seq + 1)
        } else if work.uses_gradients() {
            Ok(())
        } else {
            self.remove_request(id, seq)
        }
    }

    pub(crate) fn add_result(&self, id: &ModelId, seq: u64, answered: &Answered) -> Result<()> {
        write_record(&self.result(id, seq), answered)
    }

    pub(crate) fn read_result(&self, id: &ModelId, seq: u64) -> Result<Option<Answered>> {
        read_record(&self.result(id, seq))
    }

    pub(crate) fn remove_result(&self, id: &ModelId, seq: u64) -> Result<()> {
        remove_file(&self.result(id, seq))
    }

    /// Reads a model's state record; `None` if the model was not created.
    pub(crate) fn state_record(&self, id: &ModelId) -> Result<Option<StateRecord>> {
        match numbers(&self.model(id).join("states"))?.last() {
            Some(&next) => read_record(&self.state(id, next).join("record")),
            None => Ok(None),
        }
    }

    /// Writes the record for a state that is being saved in `folder`.
    pub(crate) fn write_state_record(folder: &Path, record: &StateRecord) -> Result<()> {
        write_record(&folder.join("record"), record)
    }

    /// Returns all session ids.
    pub(crate) fn sessions(&self) -> Result<Vec<String>> {
        let names = names(&self.folder.join("sessions"))?;
        let sessions = names
            .into_iter()
            .filter(|name| session_name(name).is_some());
        Ok(sessions
            .filter(|name| self.session(name).join("session.json").exists())
            .collect())
    }

    /// Returns a session's models.
    pub(crate) fn models(&self, session: &str) -> Result<Vec<ModelId>> {
        let numbers = names(&self.session(session).join("models"))?;
        let models = numbers.iter().filter_map(|name| name.parse().ok());
        let models = models.map(|number| ModelId {
            session: session.to_owned(),
            number,
        });
        Ok(models
            .filter(|id| self.model(id).join("model.json").exists())
            .collect())
    }

    /// Returns a session's sampling sessions, in the order of their numbers.
    pub(crate) fn samplers(&self, session: &str) -> Result<Vec<(u64, SamplerRecord)>> {
        let folder = self.session(session).join("samplers");
        let mut found = Vec::new();
        for name in names(&folder)? {
            let number = name.strip_suffix(".json").and_then(|n| n.parse().ok());
            if let Some(number) = number {
                found.push((number, read_json(&folder.join(name))?));
            }
        }
        found.sort_unstable_by_key(|(number, _)| *number);
        Ok(found)
    }

    /// Reads which requests and results a model has. Completes what a killed server left: the last
    /// result that the state includes, and the removal of requests that nothing needs.
    pub(crate) fn recover(&self, id: &ModelId) -> Result<Found> {
        self.remove_leftovers(id)?;
        let mut found = Found::default();
        if let Some(state) = self.state_record(id)? {
            let last = state.next.saturating_sub(1);
            if !self.result(id, last).exists() {
                self.add_result(id, last, &state.last)?;
            }
            found.next = state.next;
            self.forget_before(id, state.next)?;
        }
        found.results = numbers(&self.model(id).join("results"))?;
        if let Some(&last) = found.results.last() {
            found.next = found.next.max(last.saturating_add(1));
            let work = self.read_request(id, last)?.map(|(_, work)| work);
            if let (Some(work), Some(answered)) = (work, self.read_result(id, last)?) {
                self.settle(id, last, &work, &answered.outcome)?;
            }
        }
        let requests = numbers(&self.model(id).join("requests"))?;
        for seq in requests.into_iter().filter(|&seq| seq >= found.next) {
            let path = self.request(id, seq);
            let mut digest = Digest::default();
            let read = fs::File::open(&path).and_then(|mut file| file.read_exact(&mut digest));
            read.with_context(|| format!("reading {}", path.display()))?;
            found.waiting.insert(seq, digest);
        }
        Ok(found)
    }

    /// Removes requests and states before `next`, which the state before `next` includes.
    fn forget_before(&self, id: &ModelId, next: u64) -> Result<()> {
        for state in numbers(&self.model(id).join("states"))? {
            if state < next {
                atomic_file::remove_folder(&self.state(id, state))?;
            }
        }
        self.forget_requests_before(id, next)
    }

    fn forget_requests_before(&self, id: &ModelId, next: u64) -> Result<()> {
        for seq in numbers(&self.model(id).join("requests"))? {
            if seq < next {
                self.remove_request(id, seq)?;
            }
        }
        Ok(())
    }

    /// Returns the numbers of a model's unnamed sampler weights, in their order.
    pub(crate) fn unnamed(&self, id: &ModelId) -> Result<Vec<u64>> {
        let names = names(&self.model(id).join(WeightsKind::Sampler.name()))?;
        let numbers = names.iter().filter_map(|name| name.strip_prefix(UNNAMED));
        let mut numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(crate) fn remove_weights(&self, path: &WeightsPath) -> Result<()> {
        Ok(atomic_file::remove_folder(&self.weights(path))?)
    }
}

/// Prefix in the names of unnamed sampler weights, before a number.
pub(crate) const UNNAMED: &str = "unnamed-";

/// Returns the name of unnamed sampler weights.
pub(crate) fn unnamed(number: u64) -> String {
    format!("{UNNAMED}{number}")
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| folder.display().to_string()),
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<String> = names.collect::<Result<_>>()?;
    names.sort();
    Ok(names)
}

fn numbers(folder: &Path) -> Result<Vec<u64>> {
    let names = names(folder)?;
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        atomic_file::write(path, bytes)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    write(path, &serde_json::to_vec_pretty(value)?)
}

fn write_record<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    write(path, &postcard::to_stdvec(value)?)
}

fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let value = postcard::from_bytes(&bytes);
    Ok(Some(
        value.with_context(|| format!("reading {}", path.display()))?,
    ))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a.b-C_9", true)]
    #[case(&"a".repeat(128), true)]
    #[case(&"a".repeat(129), false)]
    #[case("", false)]
    #[case(".a", false)]
    #[case("a/b", false)]
    #[case("\u{e4}", false)]
    fn names_of_weights_are_file_names(#[case] name: &str, #[case] is_name: bool) {
        assert_eq!(weights_name(name).is_ok(), is_name);
    }

    #[rstest]
    #[case(&"0f".repeat(16), true)]
    #[case(&"0".repeat(31), false)]
    #[case(&"0".repeat(33), false)]
    #[case(&".".repeat(32), false)]
    fn ids_of_sessions_have_the_form_of_the_server(#[case] id: &str, #[case] is_name: bool) {
        assert_eq!(session_name(id).is_some(), is_name);
        assert_eq!(ModelId::parse(&format!("{id}:train:0")).is_ok(), is_name);
    }
}
