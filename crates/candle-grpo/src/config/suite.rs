//! Evaluation suites.

use std::path::{Path, PathBuf};

use candle_grpo_train::rollout::Engine;
use candle_grpo_train::{
    ChatTemplate, Dataset, DatasetConfig, Pretrained, RewardConfig, SamplingConfig,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds;
use super::document::Document;
use super::error::ConfigError;
use super::problem::{Problem, each, within};
use super::run::{DATA, REWARDS, chat_template, evaluation};
use super::schema::{suite_sections, without_empty_sections};
use super::sections::{EvaluationConfig, EvaluationKeys};
use super::suggestions::unknown_name;

/// An evaluation suite: files of rows, how they become prompts, and the reward that decides whether
/// a completion passes.
///
/// ```
/// use std::path::Path;
/// use candle_grpo::config::{Document, SuiteConfig};
///
/// let text = "
/// data: {held_out: capitals.jsonl, prompt: 'The capital of {country}?'}
/// id: country
/// rewards: [{kind: exact, column: capital}]
/// evaluation: {samples_per_prompt: 4}
/// ";
/// let file = Path::new("capitals.yaml");
/// let suite = SuiteConfig::new(&Document::from_yaml(file, text)?, file)?;
/// assert_eq!((suite.name.as_str(), suite.evaluation.samples_per_prompt), ("capitals", 4));
/// assert_eq!(SuiteConfig::find("gsm8k")?.name, "gsm8k");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SuiteConfig {
    /// The name in tables: a built-in suite's, or the file name without its extension.
    pub name: String,
    /// The files, in `held_out`, and how their rows become prompts.
    pub data: DatasetConfig,
    /// The hub file with the same rows.
    pub hub: Option<PathBuf>,
    /// The column that identifies a row in comparisons.
    pub id: Option<String>,
    /// Where the choices of a multiple-choice question are.
    pub choices: Option<ChoicesConfig>,
    /// The reward terms.
    pub rewards: Vec<RewardConfig>,
    /// The sampler, and the number of completions.
    pub evaluation: EvaluationConfig,
    /// True if the suite sets the token distribution, which otherwise is the model's.
    pub has_distribution: bool,
    document: Document,
}

/// The keys in a suite file.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SuiteKeys {
    /// The [data section](#data) with the files in `held_out`, which are relative to `--data` if
    /// it is set. Without the training keys.
    data: DatasetConfig,
    /// The [hub](guide.md#the-hugging-face-hub) file with the same rows, used without `--data`.
    /// Absent: none.
    hub: Option<PathBuf>,
    /// The column that identifies a row in comparisons. Absent: a digest of the question.
    id: Option<String>,
    /// The choices of multiple-choice questions: `{column: NAME}` for a list of texts, or
    /// `{right: NAME, wrong: [NAME, ...]}` for texts in columns of their own, which are shuffled.
    /// Rows get the columns `choices`, `lettered_choices` (a text with a line such as `A)
    /// Paris` for each), and with `right` the right choice's number as `answer`. Absent: no
    /// such columns.
    choices: Option<ChoicesConfig>,
    /// The [reward terms](#rewards).
    rewards: Vec<RewardConfig>,
    /// The [evaluation section](#evaluation) without `every_steps`. Without a key of the
    /// distribution in `sampler`, that of the model's `generation_config.json` applies.
    evaluation: EvaluationKeys,
}

/// Where the choices of a multiple-choice question are: in `column`, or in `right` and `wrong`.
/// Texts lose whitespace at their ends.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ChoicesConfig {
    /// Column with a list of the choices, in order.
    pub column: Option<String>,
    /// Column with the right choice.
    pub right: Option<String>,
    /// Columns with the wrong choices. They are shuffled with the right one, in an order that
    /// depends on the texts alone.
    pub wrong: Vec<String>,
}

impl ChoicesConfig {
    fn validate(&self) -> Result<(), Problem> {
        let apart = self.right.is_some() && !self.wrong.is_empty();
        let neither = self.right.is_none() && self.wrong.is_empty();
        if apart != self.column.is_some() && (apart || neither) {
            return Ok(());
        }
        let message = "must be either column, or right and wrong";
        Err(Problem::at("choices", message))
    }
}

/// The built-in suites by name.
const BUILT_IN: [(&str, &str); 12] = [
    ("gsm8k", include_str!("../suite/built_in/gsm8k.yaml")),
    ("svamp", include_str!("../suite/built_in/svamp.yaml")),
    ("math500", include_str!("../suite/built_in/math500.yaml")),
    ("aime24", include_str!("../suite/built_in/aime24.yaml")),
    ("aime25", include_str!("../suite/built_in/aime25.yaml")),
    ("mmlu", include_str!("../suite/built_in/mmlu.yaml")),
    ("mmlu_pro", include_str!("../suite/built_in/mmlu_pro.yaml")),
    (
        "gpqa_diamond",
        include_str!("../suite/built_in/gpqa_diamond.yaml"),
    ),
    ("ifeval", include_str!("../suite/built_in/ifeval.yaml")),
    (
        "humaneval",
        include_str!("../suite/built_in/humaneval.yaml"),
    ),
    (
        "humaneval_plus",
        include_str!("../suite/built_in/humaneval_plus.yaml"),
    ),
    (
        "mbpp_plus",
        include_str!("../suite/built_in/mbpp_plus.yaml"),
    ),
];

/// The sampler keys that define the token distribution.
const DISTRIBUTION: [&str; 5] = ["temperature", "top_k", "top_p", "min_p", "greedy"];

impl SuiteConfig {
    /// Returns the names of the built-in suites.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// Returns the built-in suite `name`, or the suite in the file at the path `name`.
    ///
    /// # Errors
    ///
    /// If there is no such suite, or the file is not valid.
    pub fn find(name: &str) -> Result<Self, ConfigError> {
        let path = Path::new(name);
        if let Some((name, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::new(&Document::from_yaml(path, text)?, Path::new(name));
        }
        if path.extension().is_none() && !path.is_file() {
            let mut known: Vec<&str> = Self::names().collect();
            known.push("or a file such as suite.yaml");
            return Err(ConfigError {
                file: "--suite".into(),
                line: None,
                message: unknown_name(name, &known),
            });
        }
        Self::new(&Document::read(path)?, path)
    }

    /// Reads a document; `file` gives the name. Opens no file that it names.
    ///
    /// # Errors
    ///
    /// Returns an error with line and key if a key is unknown, a value is not valid, or keys
    /// contradict each other.
    pub fn new(document: &Document, file: &Path) -> Result<Self, ConfigError> {
        document.locate(Self::build(document, file))
    }

    fn build(document: &Document, file: &Path) -> Result<Self, Problem> {
        let value = without_empty_sections(document.value.clone(), suite_sections());
        let keys: SuiteKeys = document.parse("", &value)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let evaluation = evaluation(document, &keys.evaluation, &SamplingConfig::default())?;
        let has_distribution = DISTRIBUTION
            .iter()
            .any(|key| keys.evaluation.sampler.contains_key(*key));
        let suite = Self {
            name: name.into_owned(),
            data: keys.data,
            hub: keys.hub,
            id: keys.id,
            choices: keys.choices,
            rewards: keys.rewards,
            evaluation,
            has_distribution,
            document: document.clone(),
        };
        suite.validate()?;
        Ok(suite)
    }

    fn validate(&self) -> Result<(), Problem> {
        let data = &self.data;
        for (key, is_given) in [
            ("data.train", !data.train.is_empty()),
            ("data.held_out_rows", data.held_out_rows.is_some()),
            ("data.weights", data.weights.is_some()),
            ("data.curriculum", data.curriculum.is_some()),
            (
                "evaluation.every_steps",
                self.document.get("evaluation.every_steps").is_some(),
            ),
        ] {
            if is_given {
                return Err(Problem::at(key, "given, must be absent in a suite"));
            }
        }
        if data.held_out.is_empty() {
            return Err(Problem::at("data.held_out", "absent, must be given"));
        }
        bounds::positive(&[
            ("data.max_rows", data.max_rows),
            ("evaluation.max_prompts", self.evaluation.max_prompts),
        ])?;
        within(DATA, Dataset::without_rows(data))?;
        self.choices
            .as_ref()
            .map_or(Ok(()), ChoicesConfig::validate)?;
        let sampler = &self.evaluation.sampler;
        within("evaluation.sampler", sampler.validate())?;
        // A suite is sampled in this process.
        within(
            "evaluation.sampler",
            Engine::Local.validate_sampling(sampler),
        )?;
        if self.rewards.is_empty() {
            return Err(Problem::at(REWARDS, "none, must be at least one"));
        }
        each(REWARDS, &self.rewards, RewardConfig::validate)
    }

    /// Checks that the rewards' programs, scripts and models exist.
    ///
    /// # Errors
    ///
    /// Returns an error with the reward's line if one is missing.
    pub fn check_files(&self) -> Result<(), ConfigError> {
        let checked = each(REWARDS, &self.rewards, RewardConfig::check_files);
        self.document.locate(checked)
    }

    /// Returns the model's chat template with `data.chat_template_kwargs`.
    ///
    /// # Errors
    ///
    /// As [`RunConfig::chat_template`](super::RunConfig::chat_template).
    pub fn chat_template(&self, model: &Pretrained) -> Result<Option<ChatTemplate>, ConfigError> {
        let variables = &self.data.chat_template_kwargs;
        chat_template(&self.document, DATA, variables, model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_suites_are_valid() {
        for name in SuiteConfig::names() {
            let suite = SuiteConfig::find(name).unwrap();
            assert_eq!((suite.name.as_str(), suite.rewards.len()), (name, 1));
            assert!(!suite.has_distribution);
        }
    }

    #[test]
    fn a_wrong_suite_names_its_key() {
        let fails = |text: &str| {
            let file = Path::new("s.yaml");
            let document = Document::from_yaml(file, text).unwrap();
            SuiteConfig::new(&document, file).unwrap_err().to_string()
        };
        for (text, words) in [
            ("rewards: [{kind: math}]", "data.held_out: absent"),
            ("data: {held_out: x}", "rewards: none"),
            (
                "data: {held_out: x, train: z}\nrewards: [{kind: math}]",
                "s.yaml:1: data.train: given",
            ),
            (
                "data: {held_out: x}\nrewards: [{kind: mat}]",
                "s.yaml:2: rewards[0]",
            ),
            (
                "data: {held_out: x}\nrewards: [{kind: math}]\nevaluation: {pass_at: [2]}",
                "s.yaml:3: evaluation.pass_at[0]: 2",
            ),
            (
                "data: {held_out: x, prompt: '{a'}\nrewards: [{kind: math}]",
                "s.yaml:1: data.prompt",
            ),
            (
                "data: {held_out: x}\nrewards: [{kind: math}]\nevaluation: {every_steps: 1}",
                "s.yaml:3: evaluation.every_steps",
            ),
            (
                "data: {held_out: x}\nchoices: {column: a, right: b, wrong: [c]}\nrewards: [{kind: math}]",
                "s.yaml:2: choices: must be either column, or right and wrong",
            ),
            (
                "data: {held_out: x}\nchoices: {right: b}\nrewards: [{kind: math}]",
                "s.yaml:2: choices: must be either column, or right and wrong",
            ),
            ("datta: {}", "did you mean `data`"),
        ] {
            let error = fails(text);
            assert!(error.contains(words), "{text}: {error}");
        }
        let error = SuiteConfig::find("gsm8").unwrap_err().to_string();
        assert!(
            error.contains("--suite") && error.contains("gsm8k"),
            "{error}"
        );
    }
}
