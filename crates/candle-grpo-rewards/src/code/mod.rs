//! Scores for programs that the policy wrote.

mod block;
mod case;
mod python;
mod statements;

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::block::last_block;
use self::case::{Case, Form, same_lines};
use self::python::{DRIVER, driver_input};
use super::options::{RewardInputs, RewardOptions};
use super::weighted::in_parallel;
use super::{AnswerPlace, Score};
use crate::isolation::{
    CodeLimits, End, Interpreter, Job, Probed, Sandbox, check_visible, real_path, text, words,
};
use crate::network::Network;
use crate::program::Program;
use crate::{Progress, RewardFunction, Sample};
use candle_grpo_base::progress::NoProgress;
use candle_grpo_base::within;

/// Placeholder in `command` for the program file.
const FILE: &str = "{file}";

/// Placeholder in `report` for the marker.
const MARKER: &str = "{marker}";

/// Options for [`CodeReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CodeConfig {
    /// Column with the tests: a text or a list of texts with assertions, a list of objects with
    /// `input` and `output`, an object with `inputs` and `outputs`, or the JSON text for any of
    /// these.
    pub column: String,
    /// Column that names the function which tests such as `def check(candidate)` accept.
    pub entry_point: String,
    /// Part of the completion in which the last fenced code block counts.
    pub find: AnswerPlace,
    /// Languages whose blocks count, as written after the fence. If empty, all blocks count.
    pub languages: Vec<String>,
    /// If true, the score is the share of tests that the program passes. Otherwise, it is 1 if the
    /// program passes all tests, and 0 if not.
    pub share: bool,
    /// Python interpreter and its options.
    pub python: Vec<String>,
    /// Command that runs programs in another language; absent: Python. `{file}` stands for the
    /// program file; without it, the file is the last argument.
    pub command: Option<Vec<String>>,
    /// Name for the program file; absent: `program.py`, or `program` with a `command`.
    pub file: Option<String>,
    /// With a `command`, the statement that reports that assertions have run to their end. It
    /// prints `{marker}` as a line, such as `echo {marker}`.
    pub report: Option<String>,
    /// Additional files and directories that isolated programs can read. None may contain `/work`,
    /// `/tmp`, `/dev/shm` or `/proc`, which each program has for itself.
    pub visible: Vec<PathBuf>,
    /// Limits for each execution.
    pub limits: CodeLimits,
    /// Programs to run in parallel; absent: one per core.
    pub workers: Option<usize>,
    /// If true, a machine that cannot isolate programs is an error. Otherwise, it is a warning.
    pub require_isolation: bool,
}

impl Default for CodeConfig {
    fn default() -> Self {
        Self {
            column: "tests".to_owned(),
            entry_point: "entry_point".to_owned(),
            find: AnswerPlace::Whole,
            languages: Vec::new(),
            share: false,
            python: words(["python3", "-s", "-S"]),
            command: None,
            file: None,
            report: None,
            visible: Vec::new(),
            limits: CodeLimits::default(),
            workers: None,
            require_isolation: false,
        }
    }
}

impl CodeConfig {
    /// Checks the options. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// Fails if a command is empty, a limit is out of range, there are no workers, the file name is
    /// a path, or a visible path contains a directory that programs have for themselves.
    pub fn validate(&self) -> Result<()> {
        check(
            self.python.first().is_some_and(|name| !name.is_empty()),
            "python",
            format_args!("{:?}", self.python),
            "begin with the name of a program",
        )?;
        if let Some(command) = &self.command {
            program(command).validate()?;
        }
        if let Some(file) = &self.file {
            let valid = !matches!(file.as_str(), "" | "." | "..") && !file.contains(['/', '\0']);
            check(
                valid,
                "file",
                format_args!("{file:?}"),
                "be a name without directories",
            )?;
        }
        if let Some(report) = &self.report {
            let value = format_args!("{report:?}");
            check(report.contains(MARKER), "report", value, "contain {marker}")?;
        }
        at_least_one("workers", self.workers.unwrap_or(1))?;
        let mut visible = self.visible.iter();
        visible.try_for_each(|path| check_visible("visible", path))?;
        let limits = self.limits.validate();
        limits.map_err(|error| within("limits", error.into()))
    }

    /// Checks that the interpreter or the command exists, by starting a program in a sandbox.
    ///
    /// # Errors
    ///
    /// Fails if it is missing or does not start there, or if programs are not isolated and
    /// `require_isolation` is true.
    pub fn check_files(&self) -> Result<()> {
        CodeReward::new(self.clone()).map(drop)
    }

    /// Returns the files that determine scores: those that the command names.
    pub fn files(&self) -> Vec<PathBuf> {
        let command = self.command.as_ref();
        command.map_or_else(Vec::new, |command| program(command).files())
    }

    /// Checks that a row has tests.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, has no tests or a test that asserts nothing, or has
    /// assertions in a language whose `report` is missing.
    pub fn check_row(&self, columns: &Value) -> Result<()> {
        self.cases(columns).map(drop)
    }

    fn cases(&self, columns: &Value) -> Result<Vec<Case>> {
        let form = Form {
            column: &self.column,
            entry_point: &self.entry_point,
            is_python: self.command.is_none(),
        };
        let cases = Case::of_row(columns, form)?;
        let mut all = cases.iter();
        let has_assertions = all.any(|case| matches!(case, Case::Assertions { .. }));
        ensure!(
            !has_assertions || self.command.is_none() || self.report.is_some(),
            "column {:?}: has assertions, which need the key \"report\" beside \"command\"",
            self.column
        );
        Ok(cases)
    }

    fn file_name(&self) -> &str {
        let default = match self.command {
            None => "program.py",
            Some(_) => "program",
        };
        self.file.as_deref().unwrap_or(default)
    }
}

impl RewardOptions for CodeConfig {
    fn validate(&self) -> Result<()> {
        Self::validate(self)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(CodeReward::new(self.clone())?))
    }

    fn check_row(&self, columns: &Value) -> Result<()> {
        Self::check_row(self, columns)
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::from_files(self.files())
    }

    fn check_inputs(&self) -> Result<()> {
        self.check_files()
    }
}

fn program(command: &[String]) -> Program {
    Program::new(command, None, 1., 0.)
}

/// Scores the program in a completion's last fenced code block: the share of its tests that it
/// passes, or 1 if it passes all. A completion without such a block scores 0.
///
/// Each test is a separate execution, in a sandbox with [`CodeLimits`]. A program passes assertions
/// if at least one was executed and all hold. It passes a call if the function returns the result.
/// It passes an input and output pair if it exits with status 0 and prints the same lines, ignoring
/// white space around them.
///
/// `docs/code.md` describes the sandbox layers, and what they do not protect. Call
/// [`Self::missing_isolation`] to see what your machine lacks.
///
/// ```no_run
/// use candle_grpo_rewards::{CodeConfig, CodeReward};
///
/// let reward = CodeReward::new(CodeConfig { share: true, ..CodeConfig::default() })?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct CodeReward {
    config: CodeConfig,
    sandbox: Sandbox,
    /// Sentence about missing protection.
    lacks: Option<String>,
    /// The interpreter, or the command with a place for the file.
    command: Vec<String>,
    workers: usize,
    progress: Arc<dyn Progress>,
}

impl CodeReward {
    /// Determines how programs can be isolated, by trying. Once per process, a warning in the log
    /// names what this machine does not enforce.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if the interpreter or the command does not start in the
    /// sandbox, or if isolation is required and does not work.
    pub fn new(config: CodeConfig) -> Result<Self> {
        config.validate()?;
        let (command, mut visible) = match &config.command {
            Some(command) => (with_place(located(command)?), config.files()),
            None => {
                let interpreter = Interpreter::find(&config.python)?;
                (interpreter.command, interpreter.files)
            }
        };
        visible.extend(command.first().map(PathBuf::from));
        visible.extend_from_slice(&config.visible);
        let Probed { sandbox, lacks } = Sandbox::probe(config.limits, &visible, Network::None)?;
        if let Some(lacks) = &lacks {
            ensure!(
                !config.require_isolation,
                "require_isolation: true, but programs are not isolated: {lacks}"
            );
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                tracing::warn!("programs of the reward code are not isolated: {lacks}");
            });
        }
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let reward = Self {
            workers: config.workers.unwrap_or_else(cores),
            progress: Arc::new(NoProgress),
            config,
            sandbox,
            lacks,
            command,
        };
        reward.check_start()?;
        Ok(reward)
    }

    /// Returns a sentence about limits that this machine does not enforce, if there are any.
    pub fn missing_isolation(&self) -> Option<&str> {
        self.lacks.as_deref()
    }

    /// Checks that the interpreter runs in the sandbox, or that the command exists.
    fn check_start(&self) -> Result<()> {
        let starts = match &self.config.command {
            None => {
                let text = "assert True".to_owned();
                let case = Case::Assertions {
                    text,
                    candidates: Vec::new(),
                    entry: None,
                };
                self.passes("", &case, &NoProgress)?
            }
            Some(_) => {
                let mut command = words(["sh", "-c", "command -v \"$0\""]);
                command.extend(self.command.first().cloned());
                let job = Job {
                    command: &command,
                    file: None,
                    input: Vec::new(),
                    helpers: 0,
                    announced: true,
                };
                self.sandbox.run(&job, &NoProgress)?.end == End::Exited(true)
            }
        };
        ensure!(
            starts,
            "{:?} does not start in the sandbox, must be in a directory of the system or of \
             \"visible\", and within the limits",
            self.command
        );
        Ok(())
    }

    /// Computes one completion's score.
    fn compute(&self, sample: &Sample, progress: &dyn Progress) -> Result<f32> {
        let cases = self.config.cases(sample.columns)?;
        let place = self.config.find.find(sample.completion).unwrap_or_default();
        let Some(program) = last_block(place, &self.config.languages) else {
            return Ok(0.);
        };
        let mut passed = 0;
        for case in &cases {
            match self.passes(&program, case, progress)? {
                true => passed += 1,
                false if self.config.share => {}
                false => return Ok(0.),
            }
        }
        Ok(passed as f32 / cases.len() as f32)
    }

    fn passes(&self, program: &str, case: &Case, progress: &dyn Progress) -> Result<bool> {
        let name = self.config.file_name();
        let with_file = |word: &String| word.replace(FILE, name);
        let text;
        let marker = new_marker()?;
        let mut job = Job {
            command: &[],
            file: Some((name, program)),
            input: Vec::new(),
            helpers: 0,
            announced: true,
        };
        let command: Vec<String> = match (&self.config.command, case) {
            (None, Case::Output { input, .. }) => {
                job.input = input.as_bytes().to_vec();
                [&self.command[..], &[name.to_owned()]].concat()
            }
            (Some(_), Case::Output { input, .. }) => {
                job.input = input.as_bytes().to_vec();
                self.command.iter().map(with_file).collect()
            }
            (Some(_), Case::Assertions { text: test, .. }) => {
                let report = self.config.report.as_deref().unwrap_or_default();
                let report = report.replace(MARKER, &marker);
                text = format!("{program}\n{test}\n{report}\n");
                job.file = Some((name, &text));
                self.command.iter().map(with_file).collect()
            }
            (_, Case::Assertions { .. } | Case::Call { .. }) => {
                let driver = words(["-c", DRIVER]);
                job.file = None;
                job.input = driver_input(program, case, &marker)?;
                // The judge is not part of the program.
                job.helpers = 1;
                [&self.command[..], &driver].concat()
            }
        };
        job.command = &command;
        let outcome = self.sandbox.run(&job, progress)?;
        if outcome.end != End::Exited(true) {
            return Ok(false);
        }
        if let Case::Output { output, .. } = case {
            return Ok(same_lines(&outcome.output, output));
        }
        let last = String::from_utf8_lossy(&outcome.output);
        let last = last.trim_end().lines().next_back().unwrap_or_default();
        if let Some(fault) = last.strip_prefix(&format!("{marker} ")) {
            tracing::warn!(
                "a test of the reward code cannot run, so that all programs fail: {fault}"
            );
        }
        Ok(last.trim() == marker)
    }
}

impl RewardFunction for CodeReward {
    /// A free worker fetches the next completion. Scores do not depend on the number of workers.
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = |_: &()| -> Result<Vec<(usize, f32)>> {
            let mut scores = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some(sample) = samples.get(place) else {
                    break;
                };
                let score = self.compute(sample, self.progress.as_ref());
                failed.fetch_or(score.is_err(), Ordering::Relaxed);
                scores.push((place, score?));
            }
            Ok(scores)
        };
        let workers = vec![(); self.workers.min(samples.len())];
        let mut scores = vec![Score::NONE; samples.len()];
        for share in in_parallel(&workers, work) {
            for (place, score) in share? {
                scores[place] = score.into();
            }
        }
        Ok(scores)
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }
}

/// Adds a place for the file to the command, if it has none.
fn with_place(mut command: Vec<String>) -> Vec<String> {
    if !command.iter().any(|word| word.contains(FILE)) {
        command.push(FILE.to_owned());
    }
    command
}

/// Replaces file names in the command by full paths, because programs run in another directory.
fn located(command: &[String]) -> Result<Vec<String>> {
    program(command).check_files()?;
    let (name, arguments) = command.split_first().context("command: empty")?;
    let whole = |path: PathBuf| real_path(&path).map(|path| text(&path));
    let Some(first) = program(command).find_program(name).and_then(whole) else {
        bail!("command: {name:?}, must be a program that exists");
    };
    let argument = |word: &String| {
        let file = Some(PathBuf::from(word)).filter(|path| path.is_file());
        file.and_then(whole).unwrap_or_else(|| word.clone())
    };
    Ok(std::iter::once(first)
        .chain(arguments.iter().map(argument))
        .collect())
}

/// Returns a text that no program can guess.
fn new_marker() -> Result<String> {
    let mut bytes = [0; 16];
    let source = "/dev/urandom";
    let mut random = File::open(source).context(source)?;
    random.read_exact(&mut bytes).context(source)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
