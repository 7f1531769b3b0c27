//! Digests of a run's inputs, to detect changes when it resumes.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use anyhow::{Result, anyhow};
use candle_grpo_kernels::CpuInstructions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::canonical_json::canonical_json;
use crate::checksums::{sha256_of_file, sha256_of_whole_parameters};
use crate::{ChatTemplate, Pretrained, Prompt};
use candle_grpo_base::checksum::hex;
use candle_grpo_hub::HubName;

/// SHA-256 digests of everything that a run reads: its model, its prompts, and the programs,
/// scripts and models for its rewards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunInputs {
    /// The model's weights. Absent in digests read from a file.
    #[serde(skip)]
    pub(crate) parameters: Option<String>,
    /// The model's shape and weights.
    weights: String,
    /// Tokenizer and stop tokens.
    tokenizer: String,
    chat_template: Option<String>,
    /// The time that the chat template prints, which is when the run was first started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    clock: Option<String>,
    train: PromptDigests,
    held_out: PromptDigests,
    /// Rows other than prompts, by the section of the settings that names them.
    #[serde(flatten)]
    other_rows: BTreeMap<String, PromptDigests>,
    /// By path, or by hub name.
    reward_files: BTreeMap<String, String>,
    /// Commits of the hub repositories that the run reads.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    hub: BTreeMap<String, String>,
    /// Name of the process's [`CpuInstructions`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_instructions: Option<String>,
}

/// Digests of prompts in order, and in any order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptDigests {
    count: usize,
    in_order: String,
    in_any_order: String,
}

/// Differences between a run's inputs and those with which it would resume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InputChanges {
    /// Changes that make earlier and later metrics incomparable.
    pub breaking: Vec<String>,
    /// Changes that only affect the next steps.
    pub notable: Vec<String>,
}

impl RunInputs {
    /// Returns the SHA-256 sum of the initial weights, if it is known.
    pub fn parameters_sha256(&self) -> Option<&str> {
        self.parameters.as_deref()
    }

    /// Computes the digests. `model` must be in its state before training. If ranks divide its
    /// weights, all of them must call it together.
    ///
    /// `reward_files` are the files that determine rewards, from both reward functions and
    /// environments.
    ///
    /// A prompt's digest does not include its text, because a chat template can print the date. It
    /// includes its row's columns.
    pub fn new(
        model: &Pretrained,
        train: &[Prompt],
        held_out: &[Prompt],
        reward_files: &[PathBuf],
    ) -> Result<Self> {
        let digests =
            |prompts: &[Prompt]| -> Vec<RowDigest> { prompts.iter().map(prompt_digest).collect() };
        Self::of_rows(model, &digests(train), &digests(held_out), reward_files)
    }

    /// Like [`Self::new`], for rows with these digests in place of prompts.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    pub fn of_rows(
        model: &Pretrained,
        train: &[RowDigest],
        held_out: &[RowDigest],
        reward_files: &[PathBuf],
    ) -> Result<Self> {
        let parameters = sha256_of_whole_parameters(&model.parameters)?;
        let mut weights = Sha256::new();
        weights.update(serde_json::to_vec(&model.model)?);
        weights.update(&parameters);
        let tokenizer = model.tokenizer.to_string(false);
        let mut tokens = Sha256::new();
        tokens.update(tokenizer.map_err(|error| anyhow!("tokenizer: {error}"))?);
        tokens.update(serde_json::to_vec(&model.special_tokens.stop_token_ids)?);
        let template = model.chat_template.as_ref();
        let mut files = BTreeMap::new();
        for path in reward_files {
            let name = HubName::of_cached(path).unwrap_or_else(|| path.display().to_string());
            files.insert(name, sha256_of_file(path)?);
        }
        Ok(Self {
            parameters: Some(parameters),
            weights: hex(&weights.finalize()),
            tokenizer: hex(&tokens.finalize()),
            chat_template: template.map(template_digest),
            clock: template.and_then(ChatTemplate::clock),
            train: PromptDigests::new(train),
            held_out: PromptDigests::new(held_out),
            other_rows: BTreeMap::new(),
            reward_files: files,
            hub: BTreeMap::new(),
            cpu_instructions: Some(CpuInstructions::selected()?.to_string()),
        })
    }

    /// Adds digests of rows other than prompts, which the settings name in `section`.
    #[must_use]
    pub fn with_rows(mut self, section: &str, rows: &[RowDigest]) -> Self {
        let digests = PromptDigests::new(rows);
        self.other_rows.insert(section.to_owned(), digests);
        self
    }

    /// Adds commits of the hub repositories that the run reads, by [name](HubName::repository).
    #[must_use]
    pub fn with_hub_commits(self, hub: BTreeMap<String, String>) -> Self {
        Self { hub, ..self }
    }

    /// Returns the hub repositories' commits.
    pub fn hub_commits(&self) -> &BTreeMap<String, String> {
        &self.hub
    }

    /// Returns the time that the run's chat template prints, if it is fixed:
    /// [`ChatTemplate::with_clock_at`].
    pub fn clock(&self) -> Option<&str> {
        self.clock.as_deref()
    }

    /// Returns the sections of the settings whose rows are the same as in `other`: `data` for the
    /// prompts, and those in [`Self::with_rows`].
    pub fn sections_with_rows_of<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a str> {
        let has_prompts = self.train == other.train && self.held_out == other.held_out;
        let others = self.other_rows.iter();
        let others = others.filter(|(section, rows)| other.other_rows.get(*section) == Some(rows));
        let others = others.map(|(section, _)| section.as_str());
        has_prompts.then_some("data").into_iter().chain(others)
    }

    /// Returns the differences between `self` and `now`, whose training rows have the digests
    /// `train`.
    pub fn changes(&self, now: &Self, train: &[RowDigest]) -> InputChanges {
        let mut changes = InputChanges::default();
        let mut breaking = |differs: bool, what: &str| {
            if differs {
                changes.breaking.push(what.to_owned());
            }
        };
        breaking(
            self.weights != now.weights,
            "the model has other weights: the run would continue with those of its checkpoint, and KL terms and adapters would be relative to another model",
        );
        breaking(
            self.tokenizer != now.tokenizer,
            "the model has another tokenizer or other stop tokens, with which the policy was not trained",
        );
        breaking(
            self.chat_template != now.chat_template,
            "the model has another chat template, so prompts have another form",
        );
        breaking(
            self.held_out != now.held_out,
            &format!(
                "the held-out rows are other ones ({}, now {}): evaluations could not be compared with those before, and rows that were trained on could be among them",
                self.held_out.count, now.held_out.count
            ),
        );
        if let Some(change) = self.train.change(&now.train, train) {
            changes.notable.push(format!(
                "{change}: the rows have a new random order, so some may repeat early and others come late"
            ));
        }
        for (section, before) in &self.other_rows {
            if let Some(now) = now.other_rows.get(section).filter(|now| before != *now) {
                changes.notable.push(format!(
                    "the rows in {section} are other ones ({}, now {})",
                    before.count, now.count
                ));
            }
        }
        if let (Some(before), Some(now)) = (&self.cpu_instructions, &now.cpu_instructions)
            && before != now
        {
            changes.notable.push(format!(
                "the CPU computes with the instructions {now}, and did with {before}: from avx2 on, results in f32 have the same bits, and those in bf16 may differ"
            ));
        }
        let paths = self.reward_files.keys().chain(now.reward_files.keys());
        let paths: std::collections::BTreeSet<&String> = paths.collect();
        for path in paths {
            if self.reward_files.get(path) != now.reward_files.get(path) {
                changes.notable.push(format!(
                    "the reward file {path} is another one: rewards before and after may not be comparable"
                ));
            }
        }
        changes
    }
}

impl PromptDigests {
    fn new(rows: &[RowDigest]) -> Self {
        let in_order = hex(&Sha256::digest(rows.concat()));
        let mut rows = rows.to_vec();
        rows.sort_unstable();
        Self {
            count: rows.len(),
            in_order,
            in_any_order: hex(&Sha256::digest(rows.concat())),
        }
    }

    /// Describes the difference between these and `rows`, whose digests are `now`.
    fn change(&self, now: &Self, rows: &[RowDigest]) -> Option<String> {
        if self == now {
            return None;
        }
        if self.in_any_order == now.in_any_order {
            return Some("the training rows have another order".to_owned());
        }
        let beginning = rows.get(..self.count).map(Self::new);
        Some(if beginning.is_some_and(|beginning| beginning == *self) {
            format!("{} training rows were added", now.count - self.count)
        } else {
            format!(
                "the training rows are other ones ({}, now {})",
                self.count, now.count
            )
        })
    }
}

fn template_digest(template: &ChatTemplate) -> String {
    let mut digest = Sha256::new();
    digest.update(template.source());
    for (name, source) in template.named() {
        digest.update(name);
        digest.update(source);
    }
    hex(&digest.finalize())
}

/// Returns the SHA-256 of a prompt's row columns, or of its text if it has none.
pub fn prompt_digest(prompt: &Prompt) -> RowDigest {
    match &prompt.columns {
        Value::Null => Sha256::digest(&prompt.text).into(),
        columns => row_digest(columns),
    }
}

/// Returns a name for each prompt that stays the same when other rows are added, removed or
/// reordered: 32 hexadecimal digits of its digest. If prompts are equal, later ones have a number
/// appended.
pub(crate) fn prompt_names(prompts: &[Prompt]) -> Vec<String> {
    let mut counts = HashMap::new();
    let name = |prompt| {
        let digest = prompt_digest(prompt);
        let count = counts.entry(digest).or_insert(0);
        *count += 1;
        match (hex(&digest[..16]), *count) {
            (digits, 1) => digits,
            (digits, count) => format!("{digits}-{count}"),
        }
    };
    prompts.iter().map(name).collect()
}

/// The SHA-256 of a row's columns.
pub type RowDigest = [u8; 32];

/// Computes the SHA-256 of a row's columns.
pub fn row_digest(columns: &Value) -> RowDigest {
    Sha256::digest(canonical_json(columns)).into()
}
