//! The folder of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_nn::atomic_file::{self, is_leftover, remove_leftovers};
use serde::{Deserialize, Serialize};

use crate::data::json_lines::{lines_of, read_json_lines};
use crate::owned_files::Owned;
use crate::{
    Checkpoints, EvaluatedSample, Evaluation, EventFile, Pretrained, StepCheckpoint, StepMetrics,
    Trainer, training_plot_svg,
};

const CONFIG: &str = "config.json";
const METRICS: &str = "metrics.jsonl";
const EVALUATIONS: &str = "evaluations.jsonl";
const SAMPLES: &str = "samples.jsonl";
const EVENTS: &str = "events.out.tfevents.";
const LOCK: &str = ".lock";

/// The message about a folder that holds a run already.
const TAKEN: &str =
    "exists already: go on with it (--resume), replace it (--replace), or choose another run_dir";

/// The folder in which a run leaves what is to be kept.
///
/// | file | |
/// |---|---|
/// | `config.json` | the settings |
/// | `metrics.jsonl` | one line of [`StepMetrics`] for each step |
/// | `events.out.tfevents.*` | the same for TensorBoard |
/// | `evaluations.jsonl`, `samples.jsonl` | one line for each evaluation, and for each of its answers |
/// | `metrics.svg` | reward, KL, entropy and clip fraction over the steps |
/// | `checkpoint/` | the policy at the end, see [`Self::write_checkpoint`] |
/// | `checkpoints/` | what a run goes on from, see [`Checkpoints`] |
/// | `.lock` | keeps other programs out |
/// | others | what [`RunDir::write`] is given |
///
/// Files are written under a temporary name and renamed, but for those that grow by lines or records: of these a run that is killed may
/// leave the last one torn, which readers leave out. As long as one program has it open, no other can begin or resume a run there.
pub struct RunDir {
    path: PathBuf,
    metrics: File,
    events: EventFile,
    _lock: RunLock,
}

/// Keeps other programs from beginning, resuming or replacing the run in a folder, until it is dropped.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    _file: File,
}

impl RunLock {
    /// Locks the folder at `path`, which must be there.
    ///
    /// Errs if another program has it open.
    pub fn take(path: &Path) -> Result<Self> {
        let lock = path.join(LOCK);
        let file = OpenOptions::new().create(true).append(true).open(&lock);
        let file = file.with_context(|| format!("opening {}", lock.display()))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("{}: another program has the run open", path.display());
        }
        // Another error is that of a file system that knows no locks.
        Ok(Self {
            path: path.to_path_buf(),
            _file: file,
        })
    }
}

/// A run that was set aside for a new one. It stays on the disk until [`Self::remove`] is called.
#[derive(Debug)]
pub struct ReplacedRun {
    path: PathBuf,
    lock: RunLock,
}

impl ReplacedRun {
    /// Returns its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it.
    ///
    /// # Errors
    ///
    /// Returns an error, and removes nothing, if it has an entry by now that no run writes.
    pub fn remove(self) -> Result<()> {
        Owned::Run.remove(&self.path)?;
        drop(self.lock);
        Ok(())
    }
}

impl RunDir {
    /// Makes the folder and writes `config` to it.
    ///
    /// Errs if there is something at `path` already, other than an empty folder.
    pub fn create(path: &Path, config: &impl Serialize) -> Result<Self> {
        if !is_vacant(path)? {
            let taken = ensure_whole(path).and_then(|()| bail!("{TAKEN}"));
            return taken.with_context(|| format!("run directory {}", path.display()));
        }
        Self::begin(path, config)
    }

    /// [`RunDir::create`] at `path`, or if that is taken at the first free one of `path-2`, `path-3`, ...
    pub fn create_numbered(path: &Path, config: &impl Serialize) -> Result<Self> {
        let candidate = numbered(path, is_vacant)
            .with_context(|| format!("run directory {}", path.display()))?;
        Self::begin(&candidate, config)
    }

    /// [`RunDir::create`] in place of a run that is there, which is set aside beside it as `NAME.replaced`.
    ///
    /// # Errors
    ///
    /// Returns an error, and changes nothing, if the folder is not that of a run, has an entry that no run writes, is a link,
    /// holds the working directory, or is open in another program.
    pub fn replace(path: &Path, config: &impl Serialize) -> Result<(Self, Option<ReplacedRun>)> {
        if is_vacant(path)? {
            return Ok((Self::begin(path, config)?, None));
        }
        let set_aside = || -> Result<ReplacedRun> {
            ensure!(!path.is_symlink(), "is a link, must be the folder itself");
            let path = path.canonicalize()?;
            let here = env::current_dir()?.canonicalize()?;
            ensure!(
                !here.starts_with(&path),
                "holds the working directory and is not replaced, must be another folder"
            );
            ensure_whole(&path)?;
            if let Some(foreign) = Owned::Run.first_foreign(&path)? {
                bail!(
                    "holds {}, which no run writes; it is not replaced, move that or choose another run_dir",
                    foreign.strip_prefix(&path).unwrap_or(&foreign).display()
                );
            }
            let lock = RunLock::take(&path)?;
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
            // Nothing of the new run is of value yet.
            Err(error) => {
                let _ = Owned::Run.remove(path);
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

    /// Returns whether a run has begun at `path`.
    pub fn is_run(path: &Path) -> bool {
        path.join(CONFIG).is_file() && path.join(METRICS).is_file()
    }

    /// Goes on with the run that is locked, after `step` steps: what was noted of later ones is forgotten, and so are checkpoints of later
    /// ones. Returns the figures of the steps up to there too.
    ///
    /// Errs if what is there is not a run.
    pub fn resume(
        lock: RunLock,
        config: &impl Serialize,
        step: usize,
    ) -> Result<(Self, Vec<StepMetrics>)> {
        let path = lock.path.clone();
        let path = path.as_path();
        ensure!(
            Self::is_run(path),
            "run directory {}: has no {CONFIG} and {METRICS}, there is no run to resume",
            path.display()
        );
        let resume = || -> Result<(Self, Vec<StepMetrics>)> {
            remove_leftovers(path)?;
            let keep = |name: &str, keep: &dyn Fn(usize) -> bool| -> Result<()> {
                let file = path.join(name);
                match file.exists() {
                    true => Ok(atomic_file::write(
                        &file,
                        lines_of(&file, keep)?.as_bytes(),
                    )?),
                    false => Ok(()),
                }
            };
            keep(METRICS, &|of| of <= step)?;
            keep(EVALUATIONS, &|of| of <= step)?;
            // Answers are noted before the figures of their evaluation.
            let evaluated: BTreeSet<usize> = evaluations(path)?.iter().map(|e| e.step).collect();
            keep(SAMPLES, &|of| evaluated.contains(&of))?;
            Self::checkpoints(path).remove_after(step)?;
            let metrics: Vec<StepMetrics> = read_json_lines(&path.join(METRICS))?;
            let old_events = event_files(path)?;
            let mut run = Self::open(path, config, lock)?;
            for metrics in &metrics {
                run.write_scalars(metrics)?;
            }
            for evaluation in evaluations(path)? {
                run.write_figures(evaluation.step, &evaluation.figures)?;
            }
            for file in old_events {
                fs::remove_file(file)?;
            }
            Ok((run, metrics))
        };
        resume().with_context(|| format!("run directory {}", path.display()))
    }

    fn begin(path: &Path, config: &impl Serialize) -> Result<Self> {
        let begin = || -> Result<Self> {
            fs::create_dir_all(path)?;
            let lock = RunLock::take(path)?;
            // Another program may have been quicker.
            ensure!(is_vacant(path)?, "{TAKEN}");
            Self::open(path, config, lock)
        };
        begin().with_context(|| format!("run directory {}", path.display()))
    }

    fn open(path: &Path, config: &impl Serialize, lock: RunLock) -> Result<Self> {
        let metrics = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path.join(METRICS))?;
        // The last: a folder with settings and metrics is a run.
        atomic_file::write(&path.join(CONFIG), &serde_json::to_vec_pretty(config)?)?;
        Ok(Self {
            path: path.to_path_buf(),
            metrics,
            events: EventFile::create(path)?,
            _lock: lock,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line to `metrics.jsonl`, and a step to the file of TensorBoard.
    pub fn append_metrics(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(metrics)?;
        line.push(b'\n');
        self.metrics
            .write_all(&line)
            .and_then(|()| self.metrics.flush())
            .with_context(|| format!("writing {}", self.path.join(METRICS).display()))?;
        self.write_scalars(metrics)
    }

    fn write_scalars(&mut self, metrics: &StepMetrics) -> Result<()> {
        let scalars = metrics.scalars()?;
        let scalars = scalars
            .iter()
            .map(|(name, number)| (name.as_str(), *number));
        self.events.write_scalars(metrics.step, scalars)
    }

    /// Adds an evaluation after `step` steps: its figures, of which `reward_mean` says which is best, to `evaluations.jsonl`, its answers
    /// to `samples.jsonl`.
    pub fn append_evaluation(
        &mut self,
        step: usize,
        evaluation: &Evaluation,
        figures: &BTreeMap<String, f64>,
    ) -> Result<()> {
        // The figures last: where they are noted, the answers are too.
        let samples = evaluation.samples.iter();
        let samples: Vec<SampleLine> = samples.map(|sample| SampleLine { step, sample }).collect();
        self.append(SAMPLES, &samples)?;
        self.write_figures(step, figures)?;
        let figures = figures.clone();
        self.append(EVALUATIONS, &[EvaluationLine { step, figures }])
    }

    fn write_figures(&mut self, step: usize, figures: &BTreeMap<String, f64>) -> Result<()> {
        let names: Vec<(String, f64)> = figures
            .iter()
            .map(|(name, number)| (format!("evaluation/{name}"), *number))
            .collect();
        let scalars = names.iter().map(|(name, number)| (name.as_str(), *number));
        self.events.write_scalars(step, scalars)
    }

    /// The figures of the evaluations so far, with their steps.
    pub fn evaluations(&self) -> Result<Vec<(usize, BTreeMap<String, f64>)>> {
        Ok(evaluations(&self.path)?
            .into_iter()
            .map(|line| (line.step, line.figures))
            .collect())
    }

    /// The checkpoint of the run at `path` whose evaluation had the greatest mean reward, the earlier of equals; the last one that is whole if none
    /// was evaluated.
    pub fn best_checkpoint(path: &Path) -> Result<Option<StepCheckpoint>> {
        let checkpoints = Self::checkpoints(path);
        let mut all = checkpoints.all()?;
        match best(&evaluations(path)?, |step| {
            all.iter().any(|c| c.step == step)
        }) {
            Some(best) => {
                all.retain(|checkpoint| checkpoint.step == best);
                Ok(all.pop())
            }
            None => Ok(checkpoints.latest()?.checkpoint),
        }
    }

    /// After how many steps the evaluation was made that had the greatest mean reward, the earlier of equals; nothing if there was none.
    pub fn best_step(&self) -> Result<Option<usize>> {
        Ok(best(&evaluations(&self.path)?, |_| true))
    }

    /// Makes sure that what was noted outlasts a loss of power.
    pub fn sync(&self) -> Result<()> {
        self.metrics.sync_all()?;
        for name in [EVALUATIONS, SAMPLES] {
            let file = self.path.join(name);
            if file.exists() {
                OpenOptions::new().append(true).open(file)?.sync_all()?;
            }
        }
        Ok(())
    }

    /// The checkpoints of the run at `path`.
    pub fn checkpoints(path: &Path) -> Checkpoints {
        Checkpoints::new(&path.join("checkpoints"))
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

    /// Draws `metrics.svg`.
    pub fn write_plot(&self, metrics: &[StepMetrics]) -> Result<()> {
        self.write("metrics.svg", training_plot_svg(metrics)?)
    }

    /// Writes a checkpoint to `checkpoint/`, in place of one that is there: see [`Trainer::write_checkpoint`].
    ///
    /// The folder appears when it is complete. Whenever the program is interrupted, the folder is complete, or the previous one is
    /// kept beside it under another name (`.checkpoint.PID.old`).
    pub fn write_checkpoint(&self, trainer: &Trainer, model: &Pretrained) -> Result<()> {
        let path = self.path.join("checkpoint");
        atomic_file::write_folder(&path, |folder| trainer.write_checkpoint(folder, model))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Writes another file.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path.join(name);
        atomic_file::write(&path, contents.as_ref())
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// A line of `evaluations.jsonl`.
#[derive(Serialize, Deserialize)]
struct EvaluationLine {
    step: usize,
    #[serde(flatten)]
    figures: BTreeMap<String, f64>,
}

/// The step of the evaluation with the greatest mean reward among those that count.
fn best(evaluations: &[EvaluationLine], counts: impl Fn(usize) -> bool) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for line in evaluations.iter().filter(|line| counts(line.step)) {
        if let Some(&reward) = line.figures.get("reward_mean")
            && best.is_none_or(|(_, least)| reward > least)
        {
            best = Some((line.step, reward));
        }
    }
    best.map(|(step, _)| step)
}

/// A line of `samples.jsonl`.
#[derive(Serialize)]
struct SampleLine<'a> {
    step: usize,
    #[serde(flatten)]
    sample: &'a EvaluatedSample,
}

fn evaluations(path: &Path) -> Result<Vec<EvaluationLine>> {
    read_json_lines(&path.join(EVALUATIONS))
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

/// Returns an error unless `path` holds a run with its settings and metrics. It says what is missing, and how to go on from
/// the last whole checkpoint if there is one.
fn ensure_whole(path: &Path) -> Result<()> {
    if RunDir::is_run(path) {
        return Ok(());
    }
    let Some(checkpoint) = RunDir::checkpoints(path).latest()?.checkpoint else {
        bail!("exists already and is not a run, choose another run_dir");
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
    bail!(
        "the run has lost {}. Its checkpoint of step {} is whole. Put back what is missing and give --resume, or train on in another run_dir with model: {}",
        missing.join(" and "),
        checkpoint.step,
        checkpoint.path.display()
    )
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

/// Whether a run can begin at `path`: there is nothing, or a folder with nothing that counts.
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
        // What a run leaves that is killed as it begins.
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
    fn an_empty_folder_will_do() {
        let folder = tempfile::tempdir().unwrap();
        RunDir::create(folder.path(), &json!({})).unwrap();
    }

    #[test]
    fn an_evaluation_leaves_its_figures_and_answers() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(&folder.path().join("a"), &json!({})).unwrap();
        let sample = EvaluatedSample {
            prompt: "1 + 1 =".to_owned(),
            completion: " 2".to_owned(),
            reward: 1.,
            response_length: 2,
            finish_reason: crate::FinishReason::StopToken,
        };
        let evaluation = Evaluation {
            samples: vec![
                sample.clone(),
                EvaluatedSample {
                    reward: 0.,
                    ..sample
                },
            ],
            samples_per_prompt: 1,
        };
        let figures = evaluation.figures(&[1], 1.).unwrap();
        for step in [0, 10] {
            run.append_evaluation(step, &evaluation, &figures).unwrap();
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
