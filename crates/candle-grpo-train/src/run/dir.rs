//! Run directories.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_base::atomic_file::{self, is_leftover, remove_leftovers};
use serde::{Deserialize, Serialize};

use super::trainer_state::ADAPTER;
use super::{
    Checkpoints, EvaluatedSample, Evaluation, EventFile, RolloutRecord, StepCheckpoint, StepRecord,
};
use crate::checksums::check_checksums;
use crate::data::json_lines::{Line, finite_numbers, read_json_lines, read_lines, retain_lines};
use crate::folder_lock::{FolderLock, LOCK};
use crate::owned_files::{ENGINE_WEIGHTS, Owned};
use crate::{Pretrained, StepMetrics, Trainer};
use candle_grpo_nn::ComputeDType;

const CONFIG: &str = "config.json";
const METRICS: &str = "metrics.jsonl";
const EVALUATIONS: &str = "evaluations.jsonl";
const SAMPLES: &str = "samples.jsonl";
const ROLLOUTS: &str = "rollouts.jsonl";
const EVENTS: &str = "events.out.tfevents.";

/// The message if a folder already contains a run.
const TAKEN: &str =
    "exists already: resume it (--resume), replace it (--replace), or choose another run_dir";

/// A run directory.
///
/// | file | |
/// |---|---|
/// | `config.json` | the settings |
/// | `inputs.json` | digests of the model, the prompts and the reward programs, see [`RunInputs`](super::RunInputs) |
/// | `metrics.jsonl` | one line of [`StepMetrics`], or [another record](StepRecord), per step |
/// | `events.out.tfevents.*` | the same metrics for TensorBoard |
/// | `evaluations.jsonl`, `samples.jsonl` | one line per evaluation, and per answer |
/// | `rollouts.jsonl` | one line of [`RolloutRecord`] per completion, for some steps |
/// | `checkpoint/` | the final policy, see [`Self::write_checkpoint`] |
/// | `checkpoints/` | states from which the run can resume, see [`Checkpoints`] |
/// | `weights/` | weights for an engine, while it runs |
/// | `.lock` | the lock against other programs |
/// | others | files from [`RunDir::write`] |
///
/// Files are written under a temporary name and renamed. Files that grow by lines or records may
/// end in a partial one after a kill; readers skip it. While one program has the run open, no other
/// program can start or resume a run in the same folder.
pub struct RunDir {
    path: PathBuf,
    metrics: File,
    events: EventFile,
    /// Contents of `evaluations.jsonl`.
    evaluations: Vec<EvaluationLine>,
    _lock: FolderLock,
}

/// A run that a new one has replaced. It stays on disk until [`Self::remove`].
#[derive(Debug)]
pub struct ReplacedRun {
    path: PathBuf,
    lock: FolderLock,
}

impl ReplacedRun {
    /// The replaced run's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the replaced run.
    ///
    /// # Errors
    ///
    /// Removes nothing if the folder has an entry that no run writes.
    pub fn remove(self) -> Result<()> {
        Owned::Run.remove(&self.path)?;
        drop(self.lock);
        Ok(())
    }
}

/// A run that is not in progress, locked against other programs. `M` is the type of its step
/// metrics.
pub struct StoppedRun<M = StepMetrics> {
    lock: FolderLock,
    metrics: Vec<Line<M>>,
}

/// The result of [`StoppedRun::resume`].
pub struct ResumedRun<M = StepMetrics> {
    /// The folder.
    pub dir: RunDir,
    /// Metrics for all steps so far.
    pub metrics: Vec<M>,
    /// Folders of later checkpoints that contain files no run writes, after renaming.
    pub set_aside: Vec<PathBuf>,
}

impl<M: StepRecord> StoppedRun<M> {
    /// Locks the run at `path` and reads its metrics.
    ///
    /// # Errors
    ///
    /// Fails if the folder is not a run or another program has it open.
    pub fn open(path: &Path) -> Result<Self> {
        ensure!(
            RunDir::is_run(path),
            "run directory {}: has no {CONFIG} and {METRICS}, there is no run to resume",
            path.display()
        );
        Ok(Self {
            lock: FolderLock::take(path, "run")?,
            metrics: read_lines(&path.join(METRICS))?,
        })
    }

    /// Returns how many steps have metrics.
    pub fn steps(&self) -> usize {
        self.metrics.last().map_or(0, |line| line.value.step())
    }

    /// Resumes the run after `step` steps.
    ///
    /// Removes metrics, evaluations, answers, rollouts and checkpoints from later steps.
    pub fn resume(self, config: &impl Serialize, step: usize) -> Result<ResumedRun<M>> {
        let Self { lock, metrics } = self;
        let path = lock.path().to_path_buf();
        let resume = || -> Result<ResumedRun<M>> {
            remove_leftovers(&path)?;
            RunDir::checkpoints(&path).remove_leftovers()?;
            let file = |name: &str| path.join(name);
            // Nothing is written if a line cannot be read.
            let evaluations: Vec<Line<EvaluationLine>> = read_lines(&file(EVALUATIONS))?;
            let samples: Vec<Line<StepLine>> = read_lines(&file(SAMPLES))?;
            let rollouts: Vec<Line<StepLine>> = read_lines(&file(ROLLOUTS))?;
            let metrics = retain_lines(&file(METRICS), metrics, |line| line.step() <= step)?;
            let evaluations =
                retain_lines(&file(EVALUATIONS), evaluations, |line| line.step <= step)?;
            // Answers are written before their evaluation's metrics.
            retain_lines(&file(SAMPLES), samples, |sample| {
                evaluations.iter().any(|line| line.step == sample.step)
            })?;
            retain_lines(&file(ROLLOUTS), rollouts, |line| line.step <= step)?;
            let set_aside = RunDir::checkpoints(&path).remove_after(step)?;
            let old_events = event_files(&path)?;
            let mut dir = RunDir::open(&path, config, lock)?;
            for metrics in &metrics {
                dir.write_scalars(metrics)?;
            }
            for line in &evaluations {
                dir.write_evaluation_scalars(line.step, &line.metrics)?;
            }
            dir.evaluations = evaluations;
            for file in old_events {
                fs::remove_file(file)?;
            }
            Ok(ResumedRun {
                dir,
                metrics,
                set_aside,
            })
        };
        resume().with_context(|| format!("run directory {}", path.display()))
    }
}

impl RunDir {
    /// Creates the folder and writes `config` to it.
    ///
    /// # Errors
    ///
    /// Fails if `path` exists and is not an empty folder.
    pub fn create(path: &Path, config: &impl Serialize) -> Result<Self> {
        if !is_vacant(path)? {
            let taken = ensure_whole(path).and_then(|()| bail!("{TAKEN}"));
            return taken.with_context(|| format!("run directory {}", path.display()));
        }
        Self::begin(path, config)
    }

    /// Calls [`RunDir::create`] with `path` or, if it exists, the first free of `path-2`, `path-3`,
    /// ...
    pub fn create_numbered(path: &Path, config: &impl Serialize) -> Result<Self> {
        let candidate = numbered(path, is_vacant)
            .with_context(|| format!("run directory {}", path.display()))?;
        Self::begin(&candidate, config)
    }

    /// Creates a run in place of an existing one, which is renamed to `NAME.replaced`.
    ///
    /// # Errors
    ///
    /// Changes nothing if the folder is not a run, has an entry that no run writes, is a link,
    /// contains the working directory, or is open in another program.
    pub fn replace(path: &Path, config: &impl Serialize) -> Result<(Self, Option<ReplacedRun>)> {
        if is_vacant(path)? {
            return Ok((Self::begin(path, config)?, None));
        }
        let set_aside = || -> Result<ReplacedRun> {
            ensure!(
                !path.is_symlink(),
                "is a link, must be the directory itself"
            );
            let path = path.canonicalize()?;
            let here = env::current_dir()?.canonicalize()?;
            ensure!(
                !here.starts_with(&path),
                "holds the working directory and is not replaced, must be another directory"
            );
            ensure_whole(&path)?;
            if let Some(foreign) = Owned::Run.first_foreign(&path)? {
                bail!(
                    "holds {}, which no run writes; it is not replaced, move that or choose another run_dir",
                    foreign.strip_prefix(&path).unwrap_or(&foreign).display()
                );
            }
            let lock = FolderLock::take(&path, "run")?;
            let mut aside = path.clone().into_os_string();
            aside.push(".replaced");
            let is_free = |aside: &Path| Ok(!aside.try_exists()? && !aside.is_symlink());
            let aside = numbered(Path::new(&aside), is_free)?;
            fs::rename(&path, &aside)?;
            Ok(ReplacedRun { path: aside, lock })
        };
        let replaced = set_aside().with_context(|| format!("run directory {}", path.display()))?;
        match Self::begin(path, config) {
            Ok(run) => Ok((run, Some(replaced))),
            // The new run has no results yet.
            Err(error) => {
                if let Ok(_lock) = FolderLock::take(path, "run") {
                    let _ = Owned::Run.remove(path);
                }
                Err(match fs::rename(&replaced.path, path) {
                    Ok(()) => error,
                    Err(_) => error.context(format!(
                        "the previous run is kept in {}",
                        replaced.path.display()
                    )),
                })
            }
        }
    }

    /// Returns whether there is a run at `path`.
    pub fn is_run(path: &Path) -> bool {
        path.join(CONFIG).is_file() && path.join(METRICS).is_file()
    }

    /// Returns the settings file for the run at `path`.
    pub fn settings(path: &Path) -> PathBuf {
        path.join(CONFIG)
    }

    /// Returns a message that lists the files that the run at `path` has lost, and says how to
    /// continue from its last intact checkpoint. `None` if it has both files or no checkpoint.
    ///
    /// # Errors
    ///
    /// Fails if a folder cannot be read.
    pub fn lost_files(path: &Path) -> Result<Option<String>> {
        if Self::is_run(path) {
            return Ok(None);
        }
        let Some(checkpoint) = RunDir::checkpoints(path).latest()?.checkpoint else {
            return Ok(None);
        };
        let missing = [
            (CONFIG, "one with {} will do"),
            (METRICS, "an empty one will do"),
        ];
        let missing = missing
            .into_iter()
            .filter(|(name, _)| !path.join(name).is_file());
        let missing: Vec<String> = missing
            .map(|(name, substitute)| format!("{name} ({substitute})"))
            .collect();
        Ok(Some(format!(
            "the run has lost {}. Its checkpoint of step {} is whole. Put back what is missing and give --resume, or train on in another run_dir with model: {}",
            missing.join(" and "),
            checkpoint.step,
            checkpoint.path.display()
        )))
    }

    fn begin(path: &Path, config: &impl Serialize) -> Result<Self> {
        let begin = || -> Result<Self> {
            fs::create_dir_all(path)?;
            let lock = FolderLock::take(path, "run")?;
            // Another program may have started a run in the meantime.
            ensure!(is_vacant(path)?, "{TAKEN}");
            remove_leftovers(path)?;
            Self::open(path, config, lock)
        };
        begin().with_context(|| format!("run directory {}", path.display()))
    }

    fn open(path: &Path, config: &impl Serialize, lock: FolderLock) -> Result<Self> {
        let metrics = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path.join(METRICS))?;
        // Written last, because settings and metrics together make a folder a run.
        atomic_file::write(&path.join(CONFIG), &serde_json::to_vec_pretty(config)?)?;
        Ok(Self {
            path: path.to_path_buf(),
            metrics,
            events: EventFile::create(path)?,
            evaluations: Vec::new(),
            _lock: lock,
        })
    }

    /// Returns the folder path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line to `metrics.jsonl` and a step to the TensorBoard file.
    pub fn append_metrics(&mut self, metrics: &impl StepRecord) -> Result<()> {
        let mut line = serde_json::to_vec(metrics)?;
        line.push(b'\n');
        self.metrics
            .write_all(&line)
            .and_then(|()| self.metrics.flush())
            .with_context(|| format!("writing {}", self.path.join(METRICS).display()))?;
        self.write_scalars(metrics)
    }

    /// Appends a step's completions to `rollouts.jsonl`, as [`Trainer::rollouts`] returns them.
    ///
    /// Append them before the step's metrics, so that every step with metrics also has its
    /// completions.
    pub fn append_rollouts(&mut self, rollouts: &[RolloutRecord]) -> Result<()> {
        self.append(ROLLOUTS, rollouts)
    }

    fn write_scalars(&mut self, metrics: &impl StepRecord) -> Result<()> {
        let scalars = metrics.scalars()?;
        let scalars = scalars
            .iter()
            .map(|(name, number)| (name.as_str(), *number));
        self.events.write_scalars(metrics.step(), scalars)
    }

    /// Appends an evaluation after `step` steps.
    ///
    /// Its `metrics` go to `evaluations.jsonl`, its answers to `samples.jsonl`. The metric
    /// `reward_mean` selects the best checkpoint.
    pub fn append_evaluation(
        &mut self,
        step: usize,
        evaluation: &Evaluation,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<()> {
        // Metrics are written last, so that an evaluation with metrics also has its answers.
        let samples = evaluation.samples.iter();
        let samples: Vec<SampleLine> = samples.map(|sample| SampleLine { step, sample }).collect();
        self.append(SAMPLES, &samples)?;
        self.append_evaluation_metrics(step, metrics)
    }

    /// Like [`Self::append_evaluation`], for an evaluation without answers. Without `reward_mean`,
    /// the lowest `loss` selects the best checkpoint.
    pub fn append_evaluation_metrics(
        &mut self,
        step: usize,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<()> {
        self.write_evaluation_scalars(step, metrics)?;
        let metrics = metrics.clone();
        let line = EvaluationLine { step, metrics };
        self.append(EVALUATIONS, std::slice::from_ref(&line))?;
        self.evaluations.push(line);
        Ok(())
    }

    fn write_evaluation_scalars(
        &mut self,
        step: usize,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<()> {
        let names: Vec<(String, f64)> = metrics
            .iter()
            .map(|(name, number)| (format!("evaluation/{name}"), *number))
            .collect();
        let scalars = names.iter().map(|(name, number)| (name.as_str(), *number));
        self.events.write_scalars(step, scalars)
    }

    /// Returns how many steps came before the last evaluation.
    pub fn last_evaluation(&self) -> Option<usize> {
        self.evaluations.last().map(|line| line.step)
    }

    /// Returns the folder with a checkpoint's adapters in PEFT's format. `None` if all weights
    /// train.
    pub fn adapter_folder(checkpoint: &Path) -> Option<PathBuf> {
        let folder = checkpoint.join(ADAPTER);
        folder.is_dir().then_some(folder)
    }

    /// Returns the checkpoint with the best evaluation, for the run at `path`.
    ///
    /// The best evaluation has the highest mean reward, or in supervised training the lowest loss.
    /// If several tie, it is the first. Without evaluations, returns the last intact checkpoint.
    pub fn best_checkpoint(path: &Path) -> Result<Option<StepCheckpoint>> {
        let checkpoints = Self::checkpoints(path);
        let mut all = checkpoints.all()?;
        let evaluations = read_json_lines(&path.join(EVALUATIONS))?;
        match best(&evaluations, |step| all.iter().any(|c| c.step == step)) {
            Some(best) => {
                all.retain(|checkpoint| checkpoint.step == best);
                if let Some(best) = all.last() {
                    check_checksums(&best.path).with_context(|| best.path.display().to_string())?;
                }
                Ok(all.pop())
            }
            None => Ok(checkpoints.latest()?.checkpoint),
        }
    }

    /// Returns the step with the highest mean reward in its evaluation, or in supervised training
    /// the lowest loss. If several tie, it is the first.
    pub fn best_step(&self) -> Option<usize> {
        best(&self.evaluations, |_| true)
    }

    /// Flushes the logs to the disk, so that they survive a power failure.
    pub fn sync(&self) -> Result<()> {
        self.metrics.sync_all()?;
        for name in [EVALUATIONS, SAMPLES, ROLLOUTS] {
            let file = self.path.join(name);
            if file.exists() {
                OpenOptions::new().append(true).open(file)?.sync_all()?;
            }
        }
        Ok(())
    }

    /// Returns the checkpoints for the run at `path`.
    pub fn checkpoints(path: &Path) -> Checkpoints {
        Checkpoints::new(&path.join("checkpoints"))
    }

    /// Returns the folder where an engine finds weights for the run at `path`.
    pub fn engine_weights(path: &Path) -> PathBuf {
        path.join(ENGINE_WEIGHTS)
    }

    fn append(&self, name: &str, lines: &[impl Serialize]) -> Result<()> {
        let path = self.path.join(name);
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(&text))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Writes or replaces the checkpoint in `checkpoint/`, with weights in f32, see
    /// [`Trainer::write_checkpoint`].
    ///
    /// The folder appears when it is complete. After an interruption, either the folder is
    /// complete, or the previous one remains as `.checkpoint.PID.old`.
    pub fn write_checkpoint(&self, trainer: &Trainer, model: &Pretrained) -> Result<()> {
        let path = self.path.join("checkpoint");
        let write = |folder: &Path| trainer.write_checkpoint(folder, model, ComputeDType::F32);
        atomic_file::write_folder(&path, write)
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Writes another file to the folder.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path.join(name);
        atomic_file::write(&path, contents.as_ref())
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// A line in `evaluations.jsonl`.
#[derive(Serialize, Deserialize)]
struct EvaluationLine {
    step: usize,
    #[serde(flatten, deserialize_with = "finite_numbers")]
    metrics: BTreeMap<String, f64>,
}

/// Returns the step with the highest mean reward, or the lowest loss, among evaluations that
/// `counts` selects.
fn best(evaluations: &[EvaluationLine], counts: impl Fn(usize) -> bool) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for line in evaluations.iter().filter(|line| counts(line.step)) {
        let loss = || line.metrics.get("loss").map(|loss| -loss);
        if let Some(score) = line.metrics.get("reward_mean").copied().or_else(loss)
            && best.is_none_or(|(_, least)| score > least)
        {
            best = Some((line.step, score));
        }
    }
    best.map(|(step, _)| step)
}

/// A line in `samples.jsonl`.
#[derive(Serialize)]
struct SampleLine<'a> {
    step: usize,
    #[serde(flatten)]
    sample: &'a EvaluatedSample,
}

/// A line's step.
#[derive(Deserialize)]
struct StepLine {
    step: usize,
}

fn event_files(path: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(EVENTS) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Fails unless `path` contains a run with settings and metrics.
///
/// The message names the missing file, and says how to continue from the last intact checkpoint.
fn ensure_whole(path: &Path) -> Result<()> {
    if RunDir::is_run(path) {
        return Ok(());
    }
    match RunDir::lost_files(path)? {
        Some(lost) => bail!(lost),
        None => bail!("exists already and is not a run, choose another run_dir"),
    }
}

/// Returns the first of `path`, `path-2`, `path-3`, ... that is free.
fn numbered(path: &Path, is_free: impl Fn(&Path) -> Result<bool>) -> Result<PathBuf> {
    let mut candidate = path.to_path_buf();
    let mut number = 1;
    while !is_free(&candidate)? {
        number += 1;
        let mut name = path
            .file_name()
            .context("has no name to number")?
            .to_owned();
        name.push(format!("-{number}"));
        candidate = path.with_file_name(name);
    }
    Ok(candidate)
}

/// Returns whether a run can start at `path`: it does not exist, or is a folder with only
/// leftovers.
fn is_vacant(path: &Path) -> Result<bool> {
    if !path
        .try_exists()
        .with_context(|| path.display().to_string())?
    {
        return Ok(true);
    }
    if !path.is_dir() {
        return Ok(false);
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        // Leftovers from a run that was killed at its start.
        let begun = name == METRICS && entry.metadata()?.len() == 0;
        if !begun && name != LOCK && !is_leftover(&name) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message<T>(result: Result<T>) -> String {
        format!("{:#}", result.err().unwrap())
    }

    #[test]
    fn an_existing_run_is_refused_with_the_ways_to_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/a");
        RunDir::create(&path, &json!({"seed": 1})).unwrap();
        let error = message(RunDir::create(&path, &json!({})));
        assert!(
            error.contains("--resume") && error.contains("--replace"),
            "{error}"
        );
        for expected in ["a-2", "a-3"] {
            let run = RunDir::create_numbered(&path, &json!({})).unwrap();
            assert_eq!(run.path().file_name().unwrap(), expected);
        }
    }

    #[test]
    fn a_replaced_run_stays_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let seed = |path: &Path| -> serde_json::Value {
            let config = fs::read(path.join(CONFIG)).unwrap();
            serde_json::from_slice::<serde_json::Value>(&config).unwrap()["seed"].clone()
        };
        RunDir::create(&path, &json!({"seed": 1})).unwrap();
        let (run, replaced) = RunDir::replace(&path, &json!({"seed": 2})).unwrap();
        let first = replaced.unwrap();
        assert!(first.path().ends_with("a.replaced"));
        assert_eq!((seed(&path), seed(first.path())), (2.into(), 1.into()));
        drop(run);
        let (_run, replaced) = RunDir::replace(&path, &json!({"seed": 3})).unwrap();
        let second = replaced.unwrap();
        assert!(second.path().ends_with("a.replaced-2"));

        let kept = first.path().to_path_buf();
        fs::write(kept.join("notes.txt"), "mine").unwrap();
        let error = message(first.remove());
        assert!(error.contains("notes.txt"), "{error}");
        assert_eq!(seed(&kept), 1);
        let gone = second.path().to_path_buf();
        second.remove().unwrap();
        assert!(!gone.exists());
    }

    #[test]
    fn only_a_folder_that_runs_alone_have_written_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "mine").unwrap();
        let error = message(RunDir::replace(folder.path(), &json!({})));
        assert!(error.contains("is not a run"), "{error}");
        assert!(folder.path().join("thesis.tex").exists());

        let outer = folder.path().join("outer");
        RunDir::create(&outer, &json!({})).unwrap();
        RunDir::create(&outer.join("inner"), &json!({})).unwrap();
        let error = message(RunDir::replace(&outer, &json!({})));
        assert!(
            error.contains("holds inner, which no run writes"),
            "{error}"
        );
        assert!(RunDir::is_run(&outer) && RunDir::is_run(&outer.join("inner")));
    }

    #[test]
    fn a_run_that_lost_a_file_names_it_and_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let run = RunDir::create(&path, &json!({})).unwrap();
        let fill = |folder: &Path| Ok(fs::write(folder.join("trainer.json"), "{}")?);
        RunDir::checkpoints(&path).write(7, fill).unwrap();
        drop(run);
        for name in [CONFIG, METRICS] {
            let content = fs::read(path.join(name)).unwrap();
            fs::remove_file(path.join(name)).unwrap();
            for error in [
                message(RunDir::create(&path, &json!({}))),
                message(RunDir::replace(&path, &json!({}))),
            ] {
                assert!(
                    error.contains(&format!("has lost {name}")) && error.contains("step-000007"),
                    "{error}"
                );
            }
            fs::write(path.join(name), content).unwrap();
        }
        assert!(path.join("checkpoints/step-000007/trainer.json").exists());
    }

    #[test]
    fn a_run_can_begin_in_an_empty_folder_or_one_with_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        let leftover = folder.path().join(".config.json.77.tmp");
        fs::write(&leftover, "{").unwrap();
        RunDir::create(folder.path(), &json!({})).unwrap();
        assert!(!leftover.exists());
    }

    #[test]
    fn an_evaluation_appends_its_metrics_and_answers() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(&folder.path().join("a"), &json!({})).unwrap();
        let sample = EvaluatedSample {
            prompt: "1 + 1 =".to_owned(),
            completion: " 2".to_owned(),
            reward: Some(1.),
            response_length: 2,
            finish_reason: crate::FinishReason::StopToken,
        };
        let evaluation = Evaluation {
            samples: vec![
                sample.clone(),
                EvaluatedSample {
                    reward: Some(0.),
                    ..sample
                },
            ],
            samples_per_prompt: 1,
        };
        let metrics = evaluation.metrics(&[1], 1.).unwrap();
        for step in [0, 10] {
            run.append_evaluation(step, &evaluation, &metrics).unwrap();
        }
        let lines = |name: &str| -> Vec<serde_json::Value> {
            let text = fs::read_to_string(run.path().join(name)).unwrap();
            text.lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect()
        };
        assert_eq!(
            lines("evaluations.jsonl")[1],
            json!({"step": 10, "pass_at_1": 0.5, "reward_mean": 0.5, "response_length": 2.})
        );
        let samples = lines("samples.jsonl");
        assert_eq!(samples.len(), 4);
        assert_eq!(
            samples[2],
            json!({"step": 10, "prompt": "1 + 1 =", "completion": " 2", "reward": 1., "response_length": 2, "finish_reason": "stop_token"})
        );
    }

    #[test]
    fn a_run_whose_metrics_were_not_finite_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut run = RunDir::create(&path, &json!({})).unwrap();
        let mut metrics = StepMetrics {
            step: 1,
            reward_mean: f64::NAN,
            ..StepMetrics::default()
        };
        let numbers = [("x".to_owned(), f64::INFINITY), ("y".to_owned(), 2.)];
        metrics.environment = numbers.clone().into();
        metrics.policy = numbers.clone().into();
        run.append_metrics(&metrics).unwrap();
        run.append_evaluation_metrics(1, &numbers.into()).unwrap();
        let written = fs::read_to_string(path.join(METRICS)).unwrap();
        assert!(written.contains("null"), "{written}");
        drop(run);
        let resumed = StoppedRun::<StepMetrics>::open(&path).unwrap();
        let resumed = resumed.resume(&json!({}), 1).unwrap();
        assert!(resumed.metrics[0].reward_mean.is_nan());
        let finite = BTreeMap::from([("y".to_owned(), 2.)]);
        assert_eq!(resumed.metrics[0].environment, finite);
        assert_eq!(resumed.metrics[0].policy, finite);
        assert_eq!(resumed.dir.evaluations[0].metrics, finite);
        assert_eq!(fs::read_to_string(path.join(METRICS)).unwrap(), written);
    }

    #[test]
    fn metrics_are_lines_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(&folder.path().join("a"), &json!({})).unwrap();
        let mut metrics = StepMetrics {
            step: 1,
            reward_mean: 0.25,
            ..StepMetrics::default()
        };
        metrics.policy.insert("kl".to_owned(), 0.5);
        run.append_metrics(&metrics).unwrap();
        run.append_metrics(&metrics).unwrap();
        let text = fs::read_to_string(run.path().join(METRICS)).unwrap();
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(value["kl"], 0.5);
            let read: StepMetrics = serde_json::from_value(value).unwrap();
            assert_eq!(read, metrics);
        }
        assert_eq!(text.lines().count(), 2);
    }
}
