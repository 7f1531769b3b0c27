//! The names that other trainers have for keys of this program.

use std::collections::BTreeSet;

use serde_json::Value;

use super::document::Document;
use super::error::ConfigError;
use super::suggestions::place_of;

/// Each name of a key in TRL, verl, OpenRLHF or ROLL, with the path of the key here.
pub(super) const NAMES: &[(&str, &str)] = &[
    // Sections.
    ("trainer", "training"),
    // Sizes of a step.
    ("num_generations", "algorithm.num_return_sequences_in_group"),
    ("group_size", "algorithm.num_return_sequences_in_group"),
    ("n", "algorithm.num_return_sequences_in_group"),
    (
        "n_samples_per_prompt",
        "algorithm.num_return_sequences_in_group",
    ),
    (
        "num_return_sequences",
        "algorithm.num_return_sequences_in_group",
    ),
    ("generation_batch_size", "algorithm.rollout_batch_size"),
    ("batch_size", "algorithm.rollout_batch_size"),
    ("gen_batch_size", "algorithm.rollout_batch_size"),
    ("num_iterations", "algorithm.ppo_epochs"),
    ("max_epochs", "algorithm.ppo_epochs"),
    ("max_completion_length", "algorithm.response_length"),
    ("max_response_length", "algorithm.response_length"),
    ("generate_max_len", "algorithm.response_length"),
    ("max_new_tokens", "algorithm.response_length"),
    ("max_seq_length", "algorithm.response_length"),
    ("max_prompt_length", "algorithm.prompt_length"),
    ("prompt_max_len", "algorithm.prompt_length"),
    ("per_device_train_batch_size", "training.micro_batch_size"),
    ("micro_train_batch_size", "training.micro_batch_size"),
    ("ppo_micro_batch_size", "training.micro_batch_size"),
    ("ppo_micro_batch_size_per_gpu", "training.micro_batch_size"),
    ("ppo_max_token_len_per_gpu", "training.micro_batch_tokens"),
    ("train_max_tokens_per_gpu", "training.micro_batch_tokens"),
    (
        "max_tokens_per_microbatch_in_train",
        "training.micro_batch_tokens",
    ),
    ("gradient_accumulation_steps", "training.mini_batch_size"),
    ("ppo_mini_batch_size", "training.mini_batch_size"),
    ("steps_per_generation", "algorithm.rollout_batch_size"),
    ("micro_rollout_batch_size", "sampler.max_batch_size"),
    ("per_device_eval_batch_size", "sampler.max_batch_size"),
    ("max_num_seqs", "sampler.max_batch_size"),
    ("num_train_epochs", "max_steps"),
    ("num_episodes", "max_steps"),
    ("total_epochs", "max_steps"),
    ("total_training_steps", "max_steps"),
    // Rewards and advantages.
    ("reward_funcs", "rewards"),
    ("reward_weights", "rewards"),
    ("reward_model", "rewards"),
    ("custom_reward_function", "rewards"),
    ("remote_rm_url", "rewards"),
    ("advantage_estimator", "algorithm.adv_estimator"),
    ("scale_rewards", "algorithm.advantage_scale"),
    ("norm_adv_by_std_in_grpo", "algorithm.advantage_scale"),
    ("no_advantage_std_norm", "algorithm.advantage_scale"),
    ("reward_clip_range", "algorithm.reward_clip"),
    ("lam", "algorithm.lambd"),
    ("gae_lambda", "algorithm.lambd"),
    ("filter_groups", "algorithm.recipe.group_filter"),
    ("dynamic_filtering", "algorithm.recipe.group_filter"),
    ("overlong_buffer", "algorithm.recipe.overlong"),
    // The loss.
    ("kl_coeff", "algorithm.kl_coef"),
    ("kl_beta", "algorithm.kl_coef"),
    ("kl_estimator", "algorithm.kl_penalty"),
    (
        "kl_loss_type",
        "algorithm.recipe.policy_loss.kl.kl.estimator",
    ),
    ("use_kl_in_reward", "algorithm.add_token_level_kl"),
    ("kl_target", "algorithm.target_kl"),
    ("horizon", "algorithm.kl_horizon"),
    ("loss_type", "algorithm.loss_agg_mode"),
    ("policy_loss_type", "algorithm.preset"),
    ("loss_mode", "algorithm.preset"),
    ("importance_sampling_level", "algorithm.importance_sampling"),
    ("epsilon", "algorithm.pg_clip"),
    ("eps_clip", "algorithm.pg_clip"),
    ("clip_ratio", "algorithm.pg_clip"),
    ("cliprange", "algorithm.pg_clip"),
    ("epsilon_low", "algorithm.pg_clip_low"),
    ("clip_ratio_low", "algorithm.pg_clip_low"),
    ("epsilon_high", "algorithm.pg_clip_high"),
    ("clip_ratio_high", "algorithm.pg_clip_high"),
    ("eps_clip_low_high", "algorithm.pg_clip_high"),
    ("delta", "algorithm.recipe.policy_loss.surrogate"),
    ("clip_ratio_c", "algorithm.recipe.policy_loss.surrogate"),
    ("dual_clip", "algorithm.recipe.policy_loss.surrogate"),
    ("critic_learning_rate", "training.critic"),
    ("freezing_actor_steps", "training.critic"),
    ("critic_warmup", "training.critic"),
    ("cliprange_value", "algorithm.value_clip"),
    ("value_clip_range", "algorithm.value_clip"),
    ("entropy_coeff", "algorithm.entropy_loss_coef"),
    ("entropy_coef", "algorithm.entropy_loss_coef"),
    ("mask_truncated_completions", "training.sample_filters"),
    ("overlong_filter", "training.sample_filters"),
    ("top_entropy_quantile", "training.top_entropy"),
    ("vllm_importance_sampling_correction", ROLLOUT_CORRECTION),
    ("vllm_importance_sampling_mode", ROLLOUT_CORRECTION),
    ("vllm_importance_sampling_cap", ROLLOUT_CORRECTION),
    ("rollout_is", ROLLOUT_CORRECTION),
    // Distillation.
    ("teacher_model", "teacher.model"),
    ("teacher_model_name_or_path", "teacher.model"),
    ("use_teacher_server", "teacher.server"),
    ("teacher_model_server_url", "teacher.server.base_url"),
    ("loss_top_k", "algorithm.recipe.distillation_loss.support"),
    ("topk", "algorithm.recipe.distillation_loss.support"),
    ("loss_add_tail", "algorithm.recipe.distillation_loss.tail"),
    ("jsd_beta", "algorithm.recipe.distillation_loss.beta"),
    (
        "distillation_loss_coef",
        "algorithm.recipe.distillation_loss.coef",
    ),
    (
        "loss_max_clamp",
        "algorithm.recipe.distillation_loss.value_clamp",
    ),
    (
        "log_prob_min_clamp",
        "algorithm.recipe.distillation_loss.log_prob_floor",
    ),
    // Engines.
    ("use_vllm", "rollout.engine"),
    ("vllm_mode", "rollout.engine"),
    ("vllm_server_base_url", "rollout.base_url"),
    ("vllm_server_timeout", "rollout.server_timeout"),
    ("max_inflight_tasks", "rollout.max_inflight"),
    ("trigger_parameter_sync_step", "rollout.weight_sync_steps"),
    ("async_generation_ratio", "rollout.max_staleness"),
    ("staleness_threshold", "rollout.max_staleness"),
    ("max_off_policy_steps", "rollout.max_staleness"),
    // Optimizer and schedule.
    ("optim", "optimizer"),
    ("lr", "optimizer.learning_rate"),
    ("actor_learning_rate", "optimizer.learning_rate"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("adam_betas", "optimizer.beta1"),
    ("betas", "optimizer.beta1"),
    ("adam_epsilon", "optimizer.epsilon"),
    ("eps", "optimizer.epsilon"),
    ("l2", "optimizer.weight_decay"),
    ("max_norm", "training.max_grad_norm"),
    ("grad_clip", "training.max_grad_norm"),
    ("clip_grad", "training.max_grad_norm"),
    ("lr_warmup_steps", "schedule.warmup_steps"),
    ("num_warmup_steps", "schedule.warmup_steps"),
    ("warmup_ratio", "schedule.warmup_steps"),
    ("lr_warmup_ratio", "schedule.warmup_steps"),
    ("lr_warmup_steps_ratio", "schedule.warmup_steps"),
    ("lr_scheduler_type", "schedule.decay"),
    ("lr_scheduler", "schedule.decay"),
    ("warmup_style", "schedule.decay"),
    ("min_lr_rate", "schedule.min_lr_ratio"),
    ("lr_scheduler_kwargs", "schedule.min_lr_ratio"),
    // Memory and adapters.
    (
        "gradient_checkpointing",
        "training.activation_checkpointing",
    ),
    (
        "enable_gradient_checkpointing",
        "training.activation_checkpointing",
    ),
    ("bf16", "training.compute_dtype"),
    ("fp16", "training.compute_dtype"),
    ("torch_dtype", "training.compute_dtype"),
    ("dtype", "training.compute_dtype"),
    ("load_in_4bit", "training.base_weights"),
    ("load_in_8bit", "training.base_weights"),
    ("use_peft", "training.adapters"),
    ("peft_config", "training.adapters"),
    ("r", "training.adapters.rank"),
    ("lora_r", "training.adapters.rank"),
    ("lora_rank", "training.adapters.rank"),
    ("lora_alpha", "training.adapters.alpha"),
    ("lora_target_modules", "training.adapters.target_modules"),
    ("target_modules", "training.adapters.target_modules"),
    ("sync_ref_model", "training.reference_refresh"),
    ("ref_model_sync_steps", "training.reference_refresh"),
    ("ref_model_mixup_alpha", "training.reference_refresh"),
    // Models, data and files.
    ("model_name_or_path", "model"),
    ("pretrain", "model"),
    ("base_model", "model"),
    ("chat_template_path", "model.chat_template"),
    ("dataset_name", "data.train"),
    ("dataset", "data.train"),
    ("train_dataset", "data.train"),
    ("train_files", "data.train"),
    ("prompt_data", "data.train"),
    ("eval_dataset", "data.held_out"),
    ("val_files", "data.held_out"),
    ("eval_data", "data.held_out"),
    ("interleave_probs", "data.weights"),
    ("domain_interleave_probs", "data.weights"),
    ("prompt_data_probs", "data.weights"),
    ("max_samples", "data.max_rows"),
    ("system_prompt", "data.system"),
    ("input_template", "data.prompt"),
    ("input_key", "data.prompt"),
    ("prompt_key", "data.prompt"),
    ("apply_chat_template", "data.chat"),
    ("apply_chat_template_kwargs", "data.chat_template_kwargs"),
    ("template_kwargs", "data.chat_template_kwargs"),
    ("output_dir", "run_dir"),
    ("save_path", "run_dir"),
    ("default_local_dir", "run_dir"),
    ("ckpt_path", "run_dir"),
    ("save_steps", "checkpoint.every_steps"),
    ("save_freq", "checkpoint.every_steps"),
    ("save_total_limit", "checkpoint.keep"),
    ("max_ckpt_num", "checkpoint.keep"),
    ("max_actor_ckpt_to_keep", "checkpoint.keep"),
    ("load_best_model_at_end", "checkpoint.keep_best"),
    ("eval_steps", "evaluation.every_steps"),
    ("test_freq", "evaluation.every_steps"),
    ("num_generations_eval", "evaluation.samples_per_prompt"),
    ("eval_n_samples_per_prompt", "evaluation.samples_per_prompt"),
    ("num_workers", "threads"),
    ("report_to", "trackers"),
    ("logging_steps", "trackers"),
];

const ROLLOUT_CORRECTION: &str = "algorithm.recipe.policy_loss.rollout_correction";

/// The names whose values count something else than the key here, with the conversion.
const CONVERSIONS: &[(&str, &str)] = &[
    (
        "generation_batch_size",
        "prompts: divided by num_generations",
    ),
    ("gradient_accumulation_steps", UPDATE),
    ("steps_per_generation", GENERATION),
    ("max_seq_length", "tokens of the completion alone"),
    ("logging_steps", "each step is logged"),
    ("ppo_mini_batch_size", "completions: times rollout.n"),
    ("num_train_epochs", EPOCHS),
    ("num_episodes", EPOCHS),
    ("total_epochs", EPOCHS),
    ("warmup_ratio", SHARE),
    ("lr_warmup_ratio", SHARE),
    ("lr_warmup_steps_ratio", SHARE),
];

const UPDATE: &str = "completions of an update: times per_device_train_batch_size and processes; algorithm.rollout_batch_size counts the prompts of a step";
const GENERATION: &str =
    "prompts: times per_device_train_batch_size and processes, divided by num_generations";
const EPOCHS: &str = "steps: times the prompts, divided by algorithm.rollout_batch_size";
const SHARE: &str = "steps: times max_steps";

/// Names that have another meaning in each of these trainers.
const AMBIGUOUS: [(&str, [(&str, &str); 2]); 2] = [
    (
        "train_batch_size",
        [
            ("verl", "algorithm.rollout_batch_size"),
            ("OpenRLHF", "training.mini_batch_size"),
        ],
    ),
    (
        "beta",
        [
            ("GRPOTrainer", "algorithm.kl_coef"),
            (
                "DistillationTrainer",
                "algorithm.recipe.distillation_loss.beta",
            ),
        ],
    ),
];

/// The keys and sections of verl whose last name does not tell their place, with that place. The
/// first one that fits applies.
const VERL: &[(&str, &str)] = &[
    ("data.train_batch_size", "algorithm.rollout_batch_size"),
    ("actor_rollout_ref.rollout.dtype", "rollout.dtype"),
    ("actor_rollout_ref.model.path", "model"),
    (
        "actor_rollout_ref.model.custom_chat_template",
        "model.chat_template",
    ),
    (
        "actor_rollout_ref.rollout.val_kwargs.n",
        "evaluation.samples_per_prompt",
    ),
    ("actor_rollout_ref.rollout.val_kwargs", "evaluation.sampler"),
    ("actor_rollout_ref.rollout.name", "rollout.engine"),
    ("data.filter_overlong_prompts", "algorithm.prompt_length"),
    ("trainer.logger", "trackers"),
    ("algorithm.rollout_correction", ROLLOUT_CORRECTION),
    ("algorithm.kl_ctrl.kl_coef", "algorithm.init_kl_coef"),
    ("algorithm.filter_groups", "algorithm.recipe.group_filter"),
    ("distillation.teacher_model", "teacher.model"),
    ("distillation.teacher_models", "teacher.model"),
    (
        "distillation.distillation_loss.loss_mode",
        "algorithm.recipe.distillation_loss",
    ),
    (
        "distillation.distillation_loss.use_policy_loss",
        "algorithm.recipe.policy_loss.loss_coef",
    ),
    (
        "distillation.distillation_loss.use_task_rewards",
        "algorithm.recipe.policy_loss.loss_coef",
    ),
    ("critic", "training.critic"),
    ("reward_model", "rewards"),
    ("custom_reward_function", "rewards"),
];

/// The sections of verl in which a name of [`NAMES`] has its meaning.
const VERL_SECTIONS: [&str; 10] = [
    "data",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.rollout",
    "algorithm",
    "algorithm.kl_ctrl",
    "distillation.distillation_loss",
    "trainer",
];

/// The section of verl that no other file has.
pub(super) const VERL_SIGN: &str = "actor_rollout_ref";

/// Returns the error of a file of verl, with the place here of each key or section that has one.
pub(super) fn verl(document: &Document) -> Option<ConfigError> {
    document.get(VERL_SIGN)?;
    let place = |path: &str| {
        let fits = |rule: &str| {
            let rest = path.strip_prefix(rule);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if let Some((place, note)) = kl_in_group_rewards(document, path) {
            return Some(format!("\n  {path}: {place} ({note})"));
        }
        if let Some((rule, place)) = VERL.iter().find(|(rule, _)| fits(rule)) {
            return Some(format!("\n  {rule}: {place}"));
        }
        let (section, key) = path.rsplit_once('.')?;
        if !VERL_SECTIONS.contains(&section) {
            return None;
        }
        line(path, key, None)
    };
    let leaves = document.leaves();
    let mut lines: Vec<String> = leaves.iter().filter_map(|(path, _)| place(path)).collect();
    let others = leaves.len() - lines.len();
    lines.dedup();
    let message = format!(
        "a section of verl; these keys have these places here (docs/from-verl.md):{}\n\
         {others} other keys have no place here",
        lines.concat()
    );
    Some(document.error(VERL_SIGN, message))
}

/// Returns the place of a key of verl's KL in the rewards of GRPO, with a note. verl subtracts the
/// KL before it normalizes rewards in their group. Here that is a stage of sequences, and
/// `algorithm.add_token_level_kl` subtracts after the normalization.
fn kl_in_group_rewards(document: &Document, path: &str) -> Option<(&'static str, String)> {
    let is_on = document.get("algorithm.use_kl_in_reward") == Some(&Value::Bool(true));
    let estimator = document.get("algorithm.adv_estimator")?;
    if !is_on || estimator != "grpo" {
        return None;
    }
    let shown = |path: &str, default: &str| match document.get(path) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => default.to_owned(),
    };
    let penalty = "algorithm.recipe.advantage";
    Some(match path {
        "algorithm.use_kl_in_reward" => (
            penalty,
            format!(
                "subtracted before rewards are normalized: recipe: {{advantage: {{name: grpo, epsilon: 1e-6, single_sample: raw, kl_penalty: {{coef: {}, kl: {{estimator: {}}}}}}}}}",
                shown("algorithm.kl_ctrl.kl_coef", "0.001"),
                match shown("algorithm.kl_penalty", "kl").as_str() {
                    "kl" => "k1",
                    name => name,
                },
            ),
        ),
        "algorithm.kl_ctrl.kl_coef" => (penalty, "kl_penalty.coef".to_owned()),
        "algorithm.kl_penalty" => (penalty, "kl_penalty.kl.estimator".to_owned()),
        "algorithm.kl_ctrl.target_kl" => ("algorithm.target_kl", ADAPTIVE.to_owned()),
        "algorithm.kl_ctrl.horizon" => ("algorithm.kl_horizon", ADAPTIVE.to_owned()),
        _ => return None,
    })
}

const ADAPTIVE: &str = "only if kl_ctrl.type is adaptive, and with add_token_level_kl: true, which subtracts the KL after the normalization";

/// The number of names of other trainers at the top of a file that are more than a slip.
const FLAT: usize = 3;

/// Returns the error of a file with names of another trainer at its top level, as the files of
/// TRL's commands have them. It has the place here of each of these keys. `own` are the keys that
/// stand at the top here, too.
pub(super) fn flat(document: &Document, own: &BTreeSet<String>) -> Option<ConfigError> {
    let leaves = document.leaves();
    let mut keys: Vec<&str> = leaves
        .iter()
        .filter_map(|(path, _)| path.split('.').next())
        .collect();
    keys.dedup();
    if keys.iter().filter(|key| place(key).is_some()).count() < FLAT {
        return None;
    }
    let sizes = TrlSizes::new(document);
    let line_of = |key: &&str| {
        let value = document.get(key).and_then(Value::as_f64);
        let note = sizes.as_ref().zip(value);
        let note = note.and_then(|(sizes, value)| sizes.conversion(key, value));
        // One that also stands at the top here has another meaning, if it counts updates.
        let same = |note| format!("\n  {key}: {key} ({note})");
        line(key, key, note.clone()).or_else(|| note.map(same))
    };
    let lines: String = keys.iter().filter_map(line_of).collect();
    keys.retain(|key| line(key, key, None).is_none() && !own.contains(*key));
    let others = match keys.is_empty() {
        true => String::new(),
        false => format!("\nno place here: {}", keys.join(", ")),
    };
    let message = format!(
        "the keys of another trainer are in sections here, in these places (docs/configuration.md):{lines}{others}"
    );
    Some(document.error("", message))
}

/// The keys of TRL that count optimizer updates, and of which ours count steps.
const COUNTS_OF_UPDATES: [&str; 4] = ["max_steps", "warmup_steps", "eval_steps", "save_steps"];

/// The keys of TRL that give the warm-up as a share of `max_steps`, whatever their value.
const SHARES: [&str; 1] = ["warmup_ratio"];

/// The sizes of a step of TRL's GRPOTrainer, with the defaults of TRL, and those in its file.
struct TrlSizes {
    /// `max_steps`: updates.
    max_steps: Option<f64>,
    /// `num_generations`: completions of a prompt.
    group: f64,
    /// `num_iterations`: passes over the completions.
    passes: f64,
    /// `per_device_train_batch_size`: completions of a micro-batch.
    micro_batch: Option<f64>,
    /// `gradient_accumulation_steps`: micro-batches of an update.
    accumulated: f64,
    /// Micro-batches of a generation.
    drawn: f64,
}

impl TrlSizes {
    /// Absent: the file names nothing that only GRPOTrainer has.
    fn new(document: &Document) -> Option<Self> {
        const MICRO_BATCH: f64 = 8.;
        let number = |key: &str| document.get(key).and_then(Value::as_f64);
        let positive = |key: &str| number(key).filter(|number| *number > 0.);
        document.get("num_generations")?;
        let accumulated = positive("gradient_accumulation_steps").unwrap_or(1.);
        let micro_batch = positive("per_device_train_batch_size");
        let drawn = positive("steps_per_generation")
            .or_else(|| {
                Some(positive("generation_batch_size")? / micro_batch.unwrap_or(MICRO_BATCH))
            })
            .unwrap_or(accumulated);
        Some(Self {
            max_steps: positive("max_steps"),
            group: positive("num_generations").unwrap_or(MICRO_BATCH),
            passes: positive("num_iterations").unwrap_or(1.),
            micro_batch,
            accumulated,
            drawn,
        })
    }

    /// Returns the number of micro-batches of a step here, which makes at least one update.
    fn micro_batches(&self) -> f64 {
        self.drawn.max(self.accumulated)
    }

    /// Returns the number of updates of TRL in one step here, which samples once: passes over the
    /// completions, times the batches of an update in them.
    fn updates(&self) -> f64 {
        self.passes * self.micro_batches() / self.accumulated
    }

    /// Returns the conversion of a key with this value, if its numbers are known.
    fn conversion(&self, key: &str, value: f64) -> Option<String> {
        match key {
            "gradient_accumulation_steps" => {
                let micro_batch = self.micro_batch?;
                Some(format!(
                    "completions of an update: {micro_batch} x {value} = {}, times processes",
                    micro_batch * value
                ))
            }
            "steps_per_generation" => {
                let (micro_batch, micro_batches) = (self.micro_batch?, self.micro_batches());
                let reason = match self.drawn < self.accumulated {
                    true => format!(
                        "; {micro_batches} micro-batches, because a step makes at least one update"
                    ),
                    false => String::new(),
                };
                Some(format!(
                    "prompts: {micro_batch} x {micro_batches} / {} = {}, times processes{reason}",
                    self.group,
                    rounded(micro_batch * micro_batches / self.group)
                ))
            }
            _ if SHARES.contains(&key) => self.share(value),
            // Below 1 it is a share in transformers.
            _ if COUNTS_OF_UPDATES.contains(&key) && value > 0. && value < 1. => self.share(value),
            _ if COUNTS_OF_UPDATES.contains(&key) => {
                let updates = self.updates();
                let steps = rounded(value / updates);
                let whole = match steps.fract() == 0. {
                    true => String::new(),
                    false => format!(", so {}", steps.ceil()),
                };
                Some(format!(
                    "steps that sample: {value} updates are {steps} with {updates} in each{whole}"
                ))
            }
            _ => None,
        }
    }

    /// Returns the conversion of a share of `max_steps`.
    fn share(&self, share: f64) -> Option<String> {
        let Some(max_steps) = self.max_steps else {
            return Some(format!(
                "a share of max_steps: {share} times max_steps here"
            ));
        };
        let max_steps = rounded(max_steps / self.updates()).ceil();
        Some(share_of_steps(share, max_steps))
    }
}

/// Returns the number of steps that are a share of `max_steps`, in words.
pub(super) fn share_of_steps(share: f64, max_steps: f64) -> String {
    let steps = rounded(share * max_steps).ceil();
    format!("a share of max_steps: {share} of {max_steps} is {steps}")
}

/// Returns a quotient or product without the error of its last digits.
fn rounded(x: f64) -> f64 {
    const DIGITS: f64 = 1e6;
    (x * DIGITS).round() / DIGITS
}

/// Returns a line with the place here of the key at `path`, whose last name is `name`, and `note`
/// or else the conversion of any value.
fn line(path: &str, name: &str, note: Option<String>) -> Option<String> {
    let place = place(name).or_else(|| place_of(name))?;
    let conversion = CONVERSIONS.iter().find(|(other, _)| *other == name);
    let note = note.or(conversion.map(|(_, how)| (*how).to_owned()));
    let note = note.map_or(String::new(), |note| format!(" ({note})"));
    Some(format!("\n  {path}: {place}{note}"))
}

/// Returns the place here of a key that another trainer calls `name`: a path, or one for each
/// trainer.
pub(super) fn place(name: &str) -> Option<String> {
    if let Some((_, meanings)) = AMBIGUOUS.iter().find(|(other, _)| *other == name) {
        let places = meanings.map(|(trainer, path)| format!("{path} ({trainer}'s {name})"));
        return Some(places.join(" or "));
    }
    let found = NAMES.iter().find(|(other, _)| *other == name)?;
    Some(found.1.to_owned())
}

/// Returns a value with every key that a file can have.
#[cfg(test)]
pub(super) fn all_keys() -> serde_json::Value {
    use crate::config::RunConfig;
    use crate::config::algorithm::AlgorithmConfig;
    let text = "{model: {path: m}, data: {train: d}, rewards: [{kind: json}], teacher: {model: t}, algorithm: {use_kl_loss: true, recipe: {group_filter: {}, overlong: {max_length: 8, buffer: 4}, distillation_loss: {tail_floor: 1e-7, value_clamp: 1.0, log_prob_floor: -9.0}, policy_loss: {rollout_correction: {weight: {}}}}}, training: {adapters: {rank: 1, alpha: 1}}}";
    let document = Document::from_yaml(std::path::Path::new("x.yaml"), text).unwrap();
    let mut all = RunConfig::new(&document).unwrap().to_value().unwrap();
    let Value::Object(keys) = serde_json::to_value(AlgorithmConfig::default()).unwrap() else {
        panic!("a section is a mapping");
    };
    let algorithm = all["algorithm"].as_object_mut().unwrap();
    for (key, value) in keys {
        algorithm.entry(key).or_insert(value);
    }
    let mut sampler = all["sampler"].clone();
    sampler["greedy"] = Value::Null;
    all["evaluation"]["sampler"] = sampler;
    all["teacher"]["server"] = all["rollout"].clone();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_a_key_that_exists() {
        let all = all_keys();
        let mut seen = BTreeSet::new();
        let ambiguous = AMBIGUOUS.iter().map(|(name, _)| name);
        for name in NAMES.iter().map(|(name, _)| name).chain(ambiguous) {
            assert!(seen.insert(name), "{name} is there twice");
        }
        for (name, _) in CONVERSIONS {
            assert!(seen.contains(name), "{name} has no place");
        }
        let ambiguous = AMBIGUOUS.iter().flat_map(|(_, meanings)| meanings);
        for (name, path) in NAMES.iter().chain(VERL).chain(ambiguous) {
            let pointer = format!("/{}", path.replace('.', "/"));
            assert!(all.pointer(&pointer).is_some(), "{name}: {path}");
        }
        assert_eq!(
            place("beta").as_deref(),
            Some(
                "algorithm.kl_coef (GRPOTrainer's beta) or algorithm.recipe.distillation_loss.beta (DistillationTrainer's beta)"
            )
        );
        assert_eq!(
            place("train_batch_size").as_deref(),
            Some(
                "algorithm.rollout_batch_size (verl's train_batch_size) or training.mini_batch_size (OpenRLHF's train_batch_size)"
            )
        );
        assert_eq!(place("of no trainer"), None);
    }
}
