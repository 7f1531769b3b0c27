//! The folder of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_nn::write_whole;
use serde::{Deserialize, Serialize};

use crate::atomic_file::{is_leftover, remove_leftovers, write_folder};
use crate::data::json_lines::{lines_of, read_json_lines};
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

impl RunDir {
    /// Makes the folder and writes `config` to it.
    ///
    /// Errs if there is something at `path` already, other than an empty folder.
    pub fn create(path: &Path, config: &impl Serialize) -> Result<Self> {
        ensure!(
            is_vacant(path)?,
            "run directory {}: exists already, choose another or remove it",
            path.display()
        );
        Self::begin(path, config)
    }

    /// [`RunDir::create`] at `path`, or if that is taken at the first free one of `path-2`, `path-3`, ...
    pub fn create_numbered(path: &Path, config: &impl Serialize) -> Result<Self> {
        let mut candidate = path.to_path_buf();
        let mut number = 1;
        while !is_vacant(&candidate)? {
            number += 1;
            let Some(name) = path.file_name() else {
                bail!("run directory {}: has no name to number", path.display());
            };
            let mut name = name.to_owned();
            name.push(format!("-{number}"));
            candidate = path.with_file_name(name);
        }
        Self::begin(&candidate, config)
    }

    /// [`RunDir::create`], removing a run that is there.
    ///
    /// Errs if what is there is not a run directory.
    pub fn replace(path: &Path, config: &impl Serialize) -> Result<Self> {
        if !is_vacant(path)? {
            ensure!(
                Self::is_run(path),
                "run directory {}: has no {CONFIG} and {METRICS}, it is not a run and will not be removed",
                path.display()
            );
            let _lock = RunLock::take(path)?;
            fs::remove_dir_all(path).with_context(|| format!("removing {}", path.display()))?;
        }
        Self::begin(path, config)
    }

    /// Whether a run has begun at `path`.
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
                    true => Ok(write_whole(&file, lines_of(&file, keep)?.as_bytes())?),
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
            ensure!(
                is_vacant(path)?,
                "exists already, choose another or remove it"
            );
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
        write_whole(&path.join(CONFIG), &serde_json::to_vec_pretty(config)?)?;
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
        write_folder(&self.path.join("checkpoint"), |folder| {
            trainer.write_checkpoint(folder, model)
        })
    }

    /// Writes another file.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path.join(name);
        write_whole(&path, contents.as_ref()).with_context(|| format!("writing {}", path.display()))
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

    #[test]
    fn a_run_is_not_overwritten_unless_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/a");
        RunDir::create(&path, &json!({"seed": 1})).unwrap();
        let error = RunDir::create(&path, &json!({})).err().unwrap().to_string();
        assert!(
            error.ends_with("exists already, choose another or remove it"),
            "{error}"
        );
        for expected in ["a-2", "a-3"] {
            let run = RunDir::create_numbered(&path, &json!({})).unwrap();
            assert_eq!(run.path().file_name().unwrap(), expected);
        }
        RunDir::replace(&path, &json!({"seed": 2})).unwrap();
        let config = fs::read_to_string(path.join(CONFIG)).unwrap();
        assert!(config.contains('2'));
    }

    #[test]
    fn what_is_not_a_run_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "x").unwrap();
        let error = RunDir::replace(folder.path(), &json!({})).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("it is not a run and will not be removed")
        );
        assert!(folder.path().join("thesis.tex").exists());
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
