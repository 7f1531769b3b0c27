//! A run's state, in memory and on disk.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor, safetensors};
use candle_grpo_core::selection::TaskScores;
use candle_grpo_nn::{
    ComputeDType, Export, Lora, ModelConfig, Parameters, all_finite, atomic_file,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::inputs::prompt_names;
use crate::NotFinite;
use crate::checksums::{sha256_of_parameters, sha256_of_whole_parameters};
use crate::data::json_lines::{read_json, read_json_lines};
use crate::learn::TrainerState;
use crate::learn::models::Models;
use crate::learn::self_teacher::SelfTeacher;
use crate::model::pretrained::write_tokenizer;
use crate::owned_files::{CONFIG, WEIGHTS};
use crate::{Pretrained, Prompt};

const STATE: &str = "trainer.json";
/// The groups that later steps continue, one per line.
const UNFINISHED_GROUPS: &str = "unfinished_groups.jsonl";
const OPTIMIZER: &str = "optimizer.safetensors";
/// The policy weights in f32, if the model's are in another dtype.
const POLICY: &str = "policy.safetensors";
/// The folder for adapters in PEFT's format.
pub(super) const ADAPTER: &str = "adapter";
const REFERENCE: &str = "reference.safetensors";
/// The weights of a teacher that follows the policy.
const TEACHER: &str = "teacher.safetensors";
const CRITIC: &str = "critic.safetensors";
const CRITIC_OPTIMIZER: &str = "critic_optimizer.safetensors";

const DIVERGED: &str = "the run has diverged and is not saved; resume from the last checkpoint \
    with a lower learning rate";

/// The file for [`TrainerState`]. Unfinished groups, whose tokens can be many, are in another file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile {
    state: TrainerState,
    /// Checksum of the initial weights, if adapters, a fixed reference or a frozen teacher need
    /// them, since they are not saved.
    base_sha256: Option<String>,
    /// [Names](prompt_names) of the prompts in the state, because their indices change with the
    /// data rows: those with a score, and those of unfinished groups.
    #[serde(
        default,
        alias = "scored_prompts",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    prompt_names: BTreeMap<usize, String>,
}

impl StateFile {
    /// Returns the state for `prompts`, which may differ from the file's.
    fn state_for(self, prompts: &[Prompt]) -> TrainerState {
        let Self {
            mut state,
            prompt_names: names,
            ..
        } = self;
        if names.is_empty() {
            return state;
        }
        let now = prompt_names(prompts).into_iter().enumerate();
        let now: HashMap<String, usize> = now.map(|(number, name)| (name, number)).collect();
        let row_now = |row: usize| now.get(names.get(&row)?).copied();
        let before = state.unfinished_groups.len();
        state.unfinished_groups.retain_mut(|group| {
            let row = row_now(group.row);
            group.row = row.unwrap_or(group.row);
            row.is_some()
        });
        let lost = before - state.unfinished_groups.len();
        if lost > 0 {
            tracing::warn!(
                "{lost} of {before} unfinished groups are lost: their prompts are not among the training rows now"
            );
        }
        if let Some(scores) = &mut state.task_scores {
            let before = scores.tasks().count();
            *scores = scores.renumber(row_now);
            let lost = before - scores.tasks().count();
            if lost > 0 {
                tracing::warn!(
                    "the curriculum has scores of {before} prompts, {lost} of which are not among the training rows now"
                );
            }
        }
        state
    }
}

/// Checks that a run resumes with the parts in its state.
fn ensure_same_parts(saved: &TrainerState, now: &TrainerState) -> Result<()> {
    for (name, saved, now) in [
        (
            "running_moments",
            saved.running_moments.is_some(),
            now.running_moments.is_some(),
        ),
        (
            "reward_kl",
            saved.reward_kl.is_some(),
            now.reward_kl.is_some(),
        ),
        (
            "role_baselines",
            saved.role_baselines.is_some(),
            now.role_baselines.is_some(),
        ),
        (
            "adaptive_entropy",
            saved.adaptive_entropy.is_some(),
            now.adaptive_entropy.is_some(),
        ),
        (
            "curriculum",
            saved.task_scores.is_some(),
            now.task_scores.is_some(),
        ),
    ] {
        ensure!(
            saved == now,
            "{name}: a run cannot begin to use it, or cease to"
        );
    }
    Ok(())
}

impl<C: ModelConfig> Models<C> {
    /// Checks the policy weights, with any adapters merged, and all other weights that train. If
    /// ranks divide all weights, these are the parts of this rank, and adapters alone.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if one is NaN or infinite.
    pub(crate) fn ensure_finite(&self) -> Result<()> {
        check_weights(self.actor.trained(), "")?;
        if let Some(critic) = &self.critic {
            check_weights(critic.parameters(), "critic's ")?;
        }
        if self.actor.parameters().is_full() {
            // Merged weights need those of all ranks.
            return Ok(());
        }
        if let Some(adapters) = self.actor.adapters() {
            let policy = self.weights(0).export();
            for (name, base) in self.actor.parameters().iter() {
                if adapters.adapts(name) {
                    // The product of finite adapters may overflow.
                    ensure_finite(&policy.tensor(name)?, name, "merged ")?
                } else {
                    ensure_finite(base, name, "")?
                }
            }
        }
        Ok(())
    }

    /// Writes a custom model with its configuration and `tokenizer`.
    ///
    /// # Errors
    ///
    /// Fails if it is a decoder, and with [`NotFinite`], before anything is written, if a weight is
    /// NaN or infinite.
    pub(crate) fn write_custom(&self, folder: &Path, tokenizer: &Tokenizer) -> Result<()> {
        ensure!(
            self.model.decoder().is_none(),
            "model: a decoder, must be saved by write_checkpoint, in the form of Hugging Face"
        );
        self.ensure_finite()?;
        let write = || -> Result<()> {
            atomic_file::write(
                &folder.join(CONFIG),
                &serde_json::to_vec_pretty(&self.model)?,
            )?;
            self.actor.parameters().save(&folder.join(WEIGHTS))?;
            write_tokenizer(folder, tokenizer)
        };
        write().with_context(|| format!("writing the model in {}", folder.display()))
    }

    /// Checks that `folder` has this custom model's configuration, if it has one.
    fn ensure_same_custom(&self, folder: &Path) -> Result<()> {
        let path = folder.join(CONFIG);
        if self.model.decoder().is_some() || !path.exists() {
            return Ok(());
        }
        let saved: Value = read_json(&path)?;
        // Read the same way as the other, so that numbers have the same bits.
        let now: Value = serde_json::from_slice(&serde_json::to_vec(&self.model)?)?;
        ensure!(
            saved == now,
            "{CONFIG}: the run began with the model {saved}, and would go on with {now}"
        );
        Ok(())
    }

    /// Writes all checkpoint files except the policy weights. `prompts` are those with scores in
    /// `state`.
    pub(crate) fn save(
        &self,
        folder: &Path,
        state: &TrainerState,
        prompts: &[Prompt],
    ) -> Result<()> {
        self.save_files(folder, state, prompts)
            .with_context(|| format!("saving the state of the run in {}", folder.display()))
    }

    fn save_files(&self, folder: &Path, state: &TrainerState, prompts: &[Prompt]) -> Result<()> {
        self.actor.parameters().end_exports()?;
        self.actor.optimizer().save_state(&folder.join(OPTIMIZER))?;
        if let Some(adapters) = self.actor.adapters() {
            fs::create_dir_all(folder.join(ADAPTER))?;
            adapters.save(&folder.join(ADAPTER), None)?;
        }
        if let (Some(reference), Some(_)) = (&self.reference, self.reference_refresh)
            && let Some(parameters) = reference.parameters()
        {
            parameters.save(&folder.join(REFERENCE))?;
        }
        let teacher = self.teachers.own();
        if let Some(parameters) = teacher.and_then(SelfTeacher::followed) {
            parameters.save(&folder.join(TEACHER))?;
        }
        if let Some(critic) = &self.critic {
            let weights = Export::new(critic.parameters()).with_masters();
            if critic.parameters().is_full() {
                check_export(&weights, "critic's ")?;
            }
            weights.save(&folder.join(CRITIC))?;
            critic.parameters().end_exports()?;
            critic
                .optimizer()
                .save_state(&folder.join(CRITIC_OPTIMIZER))?;
        }
        let scored = state.task_scores.iter().flat_map(TaskScores::tasks);
        let rows = scored.chain(state.unfinished_groups.iter().map(|group| group.row));
        let rows: BTreeSet<usize> = rows.collect();
        let names = if rows.is_empty() {
            Vec::new()
        } else {
            prompt_names(prompts)
        };
        let name = |row: usize| Some((row, names.get(row)?.clone()));
        let mut state = state.clone();
        let groups = std::mem::take(&mut state.unfinished_groups);
        if !groups.is_empty() {
            let mut lines = Vec::new();
            for group in groups {
                serde_json::to_writer(&mut lines, &group)?;
                lines.push(b'\n');
            }
            atomic_file::write(&folder.join(UNFINISHED_GROUPS), &lines)?;
        }
        let file = StateFile {
            state,
            base_sha256: self.base_sha256()?,
            prompt_names: rows.into_iter().filter_map(name).collect(),
        };
        Ok(atomic_file::write(
            &folder.join(STATE),
            &serde_json::to_vec_pretty(&file)?,
        )?)
    }

    /// Supports [`Self::save`] on another rank, which gathers what the ranks share.
    pub(crate) fn take_part_in_save(&self) -> Result<()> {
        self.actor.parameters().take_part_in_export()?;
        self.actor.optimizer().take_part_in_state()?;
        if let Some(critic) = &self.critic {
            critic.parameters().take_part_in_export()?;
            critic.optimizer().take_part_in_state()?;
        }
        Ok(())
    }

    /// Reads what [`Self::save`] wrote, and the policy weights. `now` is the new run's state, which
    /// must have the same parts, and `prompts` are its prompts.
    pub(crate) fn load(
        &mut self,
        folder: &Path,
        now: &TrainerState,
        prompts: &[Prompt],
    ) -> Result<TrainerState> {
        self.load_files(folder, now, prompts)
            .with_context(|| format!("reading the state of the run in {}", folder.display()))
    }

    fn load_files(
        &mut self,
        folder: &Path,
        now: &TrainerState,
        prompts: &[Prompt],
    ) -> Result<TrainerState> {
        let read = |name: &str| read_tensors(&folder.join(name));
        let mut file: StateFile = read_json(&folder.join(STATE))?;
        let groups = read_json_lines(&folder.join(UNFINISHED_GROUPS))?;
        file.state.unfinished_groups.extend(groups);
        ensure_same_parts(&file.state, now)?;
        if let (Some(saved), Some(now)) = (&mut file.state.role_baselines, &now.role_baselines) {
            saved.set_decay_of(now);
        }
        self.ensure_same_custom(folder)?;
        match (&file.base_sha256, self.base_sha256()?) {
            (Some(saved), Some(now)) => ensure!(
                *saved == now,
                "{STATE}: the run began with other weights, which its adapters or its fixed reference need; only a run with the first model can go on"
            ),
            (Some(_), None) => bail!(
                "{STATE}: the run has adapters or a fixed reference of a KL term and cannot go on without them"
            ),
            (None, Some(_)) => bail!(
                "{STATE}: the run has no adapters and no fixed reference of a KL term and cannot go on with them"
            ),
            (None, None) => {}
        }
        match self.actor.adapters() {
            None => {
                let file = if folder.join(POLICY).exists() {
                    POLICY
                } else {
                    WEIGHTS
                };
                let path = folder.join(file);
                let actor = &self.actor;
                let set = actor.set_trained_from(&path, self.model.decoder());
                set.with_context(|| path.display().to_string())?;
            }
            Some(own) => {
                let folder = folder.join(ADAPTER);
                let model = self.model.decoder();
                let model = model.context("adapters: given, must be absent for a custom model")?;
                let adapters = Lora::load(&folder, model, &Device::Cpu)?;
                ensure!(
                    adapters.config() == own.config(),
                    "{ADAPTER}: the run began with {:?}, and would go on with {:?}",
                    adapters.config(),
                    own.config()
                );
                let values = adapters.parameters().iter();
                let values =
                    values.map(|(name, value)| (name.to_owned(), value.as_detached_tensor()));
                self.actor.set_trained(&values.collect()).context(ADAPTER)?;
            }
        }
        let optimizer = self.actor.optimizer_mut();
        optimizer.load_state_from(&folder.join(OPTIMIZER))?;
        if let (Some(reference), Some(_)) = (&self.reference, self.reference_refresh) {
            reference.set_values(&read(REFERENCE)?).context(REFERENCE)?;
        }
        self.load_teacher(folder)?;
        ensure!(
            self.critic.is_some() == folder.join(CRITIC).exists(),
            "{CRITIC}: a run cannot begin to use a critic, or cease to"
        );
        if let Some(critic) = &mut self.critic {
            let set = critic
                .parameters()
                .set_values_from(&folder.join(CRITIC), None);
            set.context(CRITIC)?;
            let optimizer = critic.optimizer_mut();
            optimizer.load_state_from(&folder.join(CRITIC_OPTIMIZER))?;
        }
        Ok(file.state_for(prompts))
    }

    /// Reads the weights of a teacher that follows the policy.
    fn load_teacher(&self, folder: &Path) -> Result<()> {
        let path = folder.join(TEACHER);
        let teacher = self.teachers.own();
        let teacher = teacher.filter(|own| own.followed().is_some());
        ensure!(
            teacher.is_some() == path.exists(),
            "{TEACHER}: a teacher cannot begin to follow the policy, or cease to"
        );
        if let Some(teacher) = teacher {
            let set = teacher.set_values(&read_tensors(&path)?);
            set.context(TEACHER)?;
        }
        Ok(())
    }

    /// Hash of the initial weights, if the adapters, a frozen reference or a frozen teacher depend
    /// on them.
    fn base_sha256(&self) -> Result<Option<String>> {
        let Some(base) = self.base() else {
            return Ok(None);
        };
        // The weights do not change, and hashing them takes a while.
        if self.base_sha256.get().is_none() {
            let _ = self.base_sha256.set(sha256_of_parameters(base)?);
        }
        Ok(self.base_sha256.get().cloned())
    }

    /// Computes [`Self::base_sha256`] if ranks divide these weights. All of them must call it
    /// together.
    pub(crate) fn hash_divided_base(&self) -> Result<()> {
        if let Some(base) = self.base()
            && base.is_full()
            && self.base_sha256.get().is_none()
        {
            let _ = self.base_sha256.set(sha256_of_whole_parameters(base)?);
        }
        Ok(())
    }

    /// The initial weights that do not change, if adapters, a fixed reference or a frozen teacher
    /// depend on them.
    fn base(&self) -> Option<&Parameters> {
        let base = match (self.actor.adapters(), &self.reference) {
            (Some(_), _) => Some(self.actor.parameters()),
            (None, Some(reference)) if self.reference_refresh.is_none() => reference.parameters(),
            _ => None,
        };
        let teacher = self.teachers.own();
        base.or(teacher.and_then(SelfTeacher::frozen))
    }
}

impl Models {
    /// Writes a checkpoint's model with the policy weights in `dtype`, and also in f32 if all of
    /// them train and `dtype` differs. Adapters are merged.
    ///
    /// # Errors
    ///
    /// [`NotFinite`], before anything is written, if a weight is NaN or infinite.
    pub(crate) fn write_policy(
        &self,
        folder: &Path,
        model: &Pretrained,
        dtype: ComputeDType,
    ) -> Result<()> {
        self.ensure_finite()?;
        let policy = self.weights(0);
        let weights = policy.export().with_masters();
        if policy.parameters.is_full() {
            check_export(&weights, "")?;
        }
        model.write_files(&weights.in_dtype(dtype.into()), folder)?;
        if dtype != ComputeDType::F32 && policy.adapters.is_none() {
            let weights = Export::new(policy.parameters).with_masters();
            weights.save(&folder.join(POLICY))?;
        }
        Ok(())
    }
}

fn check_weights(parameters: &Parameters, owner: &str) -> Result<()> {
    let mut weights = parameters.kept();
    weights.try_for_each(|(name, variable)| ensure_finite(&variable, name, owner))
}

/// Checks weights of which each rank keeps its part.
fn check_export(weights: &Export<'_>, owner: &str) -> Result<()> {
    let mut names = weights.names();
    names.try_for_each(|name| ensure_finite(&weights.tensor(name)?, name, owner))
}

fn ensure_finite(weight: &Tensor, name: &str, owner: &str) -> Result<()> {
    if !all_finite(weight)? {
        let name = format!("{owner}weight {name}");
        return Err(NotFinite::with_consequence(name, DIVERGED).into());
    }
    Ok(())
}

/// Reads tensors onto the CPU, because a GPU may not have enough memory for two copies.
fn read_tensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    safetensors::load(path, &Device::Cpu).with_context(|| path.display().to_string())
}
