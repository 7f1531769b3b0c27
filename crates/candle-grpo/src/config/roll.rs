//! Configuration files of ROLL, with their roles and strategies.

use std::collections::BTreeSet;
use std::fmt;

use candle_grpo_train::TrainConfig;
use serde_json::{Map, Value, json};

use super::algorithm::AlgorithmConfig;
use super::document::Document;
use super::other_names::VERL_SIGN;
use super::suggestions::{nearest, sections};

/// The effect of a key of a ROLL file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is used under this key.
    Used(String),
    /// It has no meaning here for this reason.
    NoMeaning(String),
    /// It has a meaning that is not supported.
    NotSupported(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Used(key) => write!(f, "used: {key}"),
            Self::NoMeaning(why) => write!(f, "no meaning here: {why}"),
            Self::NotSupported(why) => write!(f, "not supported: {why}"),
        }
    }
}

/// A key of a ROLL file with its effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RollKey {
    /// Its path in the file.
    pub path: String,
    /// Its line.
    pub line: Option<usize>,
    /// Its effect.
    pub verdict: Verdict,
}

/// A key that a ROLL file leaves out, with two defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RollDefault {
    /// The key.
    pub key: &'static str,
    /// Its default in ROLL 0.3.0.
    pub roll: &'static str,
    /// Its default here, which applies.
    pub here: &'static str,
}

/// The keys of the algorithm whose defaults differ. ROLL's are those of its code. Its page names
/// another `loss_agg_mode`.
const DEFAULTS: [RollDefault; 4] = [
    RollDefault {
        key: "adv_estimator",
        roll: "gae",
        here: "grpo",
    },
    RollDefault {
        key: "rollout_batch_size",
        roll: "128",
        here: "32",
    },
    RollDefault {
        key: "num_return_sequences_in_group",
        roll: "1",
        here: "8",
    },
    // Without use_kl_loss, neither has a KL.
    RollDefault {
        key: "kl_loss_coef",
        roll: "0",
        here: "0.001",
    },
];

/// A configuration file of ROLL, translated.
#[derive(Debug, Clone)]
pub struct RollFile {
    /// Every key in the order of the file.
    pub keys: Vec<RollKey>,
    /// The keys that the file leaves out, and whose defaults differ.
    pub defaults: Vec<RollDefault>,
    /// The translation. Its errors have the keys and the lines of the file.
    pub document: Document,
}

/// The rule for the keys at and below a path, in which `*` stands for one step.
enum Rule {
    To(&'static str),
    /// To a place, if the second path of the file is true.
    ToIf(&'static str, &'static str),
    NoMeaning(&'static str),
    NotSupported(&'static str),
    /// Not supported, unless the file has our key for it; with the end of the advice to set it.
    Set(&'static str, &'static str),
    /// Not supported, unless the file has both of our keys for it.
    SetBoth(&'static str, &'static str),
}

use Rule::{NoMeaning, NotSupported, Set, SetBoth, To, ToIf};

const RANKS: &str = "mpirun, srun or torchrun starts the ranks";
const NO_WORKERS: &str = "there are no workers";
const WORKERS: &str =
    " to the completions of an update of all workers; ROLL's keys have those of one";
const TEMPLATE: &str = "the chat template of the model is used";
const GROUP: &str = "num_return_sequences_in_group is used";
const PACKED: &str = "sequences are packed without padding";
const TOKENS: &str = "training.micro_batch_tokens bounds a pass";
const DISTILLATION: &str = " and recipe.policy_loss.distillation (docs/from-roll.md)";
const METRICS: &str = "TensorBoard files are always written; trackers adds others";

/// The rules. The first one that fits applies.
const RULES: &[(&str, Rule)] = &[
    ("seed", To("seed")),
    ("max_steps", To("max_steps")),
    ("save_steps", To("checkpoint.every_steps")),
    ("eval_steps", To("evaluation.every_steps")),
    ("output_dir", To("run_dir")),
    ("pretrain", To("model.path")),
    ("max_grad_norm", To("training.max_grad_norm")),
    ("defaults", NoMeaning("strategies do not apply")),
    ("hydra", NoMeaning("Hydra is not used")),
    ("exp_name", NoMeaning("the run directory names the run")),
    (
        "logging_dir",
        NoMeaning("everything is in the run directory"),
    ),
    ("logging_steps", NoMeaning("every step is logged")),
    (
        "resume_from_checkpoint",
        NoMeaning("`grpo train --resume` resumes a run"),
    ),
    (
        "checkpoint_config",
        NoMeaning("checkpoints are in the run directory"),
    ),
    ("track_with", NoMeaning(METRICS)),
    ("tracker_kwargs", NoMeaning(METRICS)),
    ("system_envs", NoMeaning("set variables in the shell")),
    ("num_gpus_per_node", NoMeaning(RANKS)),
    ("num_nodes", NoMeaning(RANKS)),
    ("rpc_timeout", NoMeaning(NO_WORKERS)),
    ("async_generation_ratio", Set("rollout.max_staleness", "")),
    (
        "is_num_return_sequences_expand",
        NoMeaning("groups are always sampled together"),
    ),
    (
        "max_running_requests",
        NoMeaning("rollout.max_inflight is used"),
    ),
    (
        "use_additional_prompts",
        NotSupported("set algorithm.recipe.group_filter and training.max_sampling_batches"),
    ),
    (
        "max_additional_running_prompts",
        Set("training.max_sampling_batches", ""),
    ),
    (
        "reward_pretrain",
        NotSupported("a reward model is a reward of the kind reward_model"),
    ),
    (
        "difficulty_loss_weight",
        NotSupported("samples are not weighted by difficulty"),
    ),
    (
        "length_loss_weight",
        NotSupported("samples are not weighted by length"),
    ),
    ("enable_reference", NoMeaning("a KL loads its reference")),
    (
        "enable_old_logprobs_recompute",
        Set("training.old_log_probs", ""),
    ),
    (
        "sequence_length",
        NoMeaning("prompt_length and response_length are used"),
    ),
    (
        "val_batch_size",
        NoMeaning("all held-out prompts are evaluated"),
    ),
    (
        "actor_infer.strategy_args",
        NoMeaning("the trained policy samples; rollout.engine selects a server"),
    ),
    ("*.strategy_args", NoMeaning("there are no strategies")),
    (
        "actor_train.device_mapping",
        Set("training.mini_batch_size", WORKERS),
    ),
    ("*.device_mapping", NoMeaning(RANKS)),
    ("*.world_size", NoMeaning(RANKS)),
    ("*.num_gpus_per_worker", NoMeaning(RANKS)),
    (
        "*.infer_batch_size",
        NoMeaning("sampler.max_batch_size is used"),
    ),
    ("*.use_remote_checkpoint", NoMeaning(NO_WORKERS)),
    (
        "*.model_args.flash_attn",
        NoMeaning("there is one attention implementation"),
    ),
    (
        "*.model_args.attn_implementation",
        NoMeaning("there is one attention implementation"),
    ),
    (
        "*.model_args.disable_gradient_checkpointing",
        NoMeaning(
            "activations are not checkpointed unless training.activation_checkpointing is set",
        ),
    ),
    (
        "*.model_args.model_type",
        NoMeaning("the model's configuration is used"),
    ),
    ("*.model_args.dtype", Set("training.compute_dtype", "")),
    (
        "actor_train.model_args.lora_rank",
        To("training.adapters.rank"),
    ),
    (
        "actor_train.model_args.lora_alpha",
        To("training.adapters.alpha"),
    ),
    (
        "actor_train.model_args.lora_target",
        Set("training.adapters.target_modules", ""),
    ),
    (
        "actor_train.model_args",
        NotSupported("not an option of a model"),
    ),
    ("actor_train.worker_cls", NoMeaning("pg_variant is used")),
    ("actor_train.pg_variant", To("algorithm.pg_variant")),
    (
        "actor_train.training_args.learning_rate",
        To("optimizer.learning_rate"),
    ),
    (
        "actor_train.training_args.weight_decay",
        To("optimizer.weight_decay"),
    ),
    (
        "actor_train.training_args.adam_beta1",
        To("optimizer.beta1"),
    ),
    (
        "actor_train.training_args.adam_beta2",
        To("optimizer.beta2"),
    ),
    (
        "actor_train.training_args.adam_epsilon",
        To("optimizer.epsilon"),
    ),
    (
        "actor_train.training_args.max_grad_norm",
        To("training.max_grad_norm"),
    ),
    (
        "actor_train.training_args.warmup_steps",
        To("schedule.warmup_steps"),
    ),
    (
        "actor_train.training_args.per_device_train_batch_size",
        To("training.micro_batch_size"),
    ),
    (
        "actor_train.max_tokens_per_microbatch_in_train",
        ToIf(
            "training.micro_batch_tokens",
            "actor_train.use_dynamic_batching_in_train",
        ),
    ),
    ("*.max_tokens_per_microbatch_in_train", NoMeaning(TOKENS)),
    ("*.max_tokens_per_microbatch_in_infer", NoMeaning(TOKENS)),
    ("*.use_dynamic_batching_in_train", NoMeaning(TOKENS)),
    ("*.use_dynamic_batching_in_infer", NoMeaning(TOKENS)),
    ("*.sequence_length_round_in_train", NoMeaning(PACKED)),
    ("*.sequence_length_round_in_infer", NoMeaning(PACKED)),
    (
        "actor_train.training_args.gradient_accumulation_steps",
        To("training.mini_batch_size"),
    ),
    (
        "actor_train.training_args.num_train_epochs",
        NoMeaning("max_steps is used"),
    ),
    (
        "actor_train.training_args.lr_scheduler_type",
        SetBoth("schedule.decay", "schedule.decay_until"),
    ),
    (
        "actor_train.training_args",
        NotSupported("not an option of the optimizer"),
    ),
    ("actor_train.data_args.file_name", To("data.train")),
    (
        "actor_train.data_args.dataset_dir",
        NoMeaning("paths include their folders"),
    ),
    (
        "actor_train.data_args.messages",
        NoMeaning("the column is found by its name"),
    ),
    (
        "actor_train.data_args.preprocessing_num_workers",
        NoMeaning(NO_WORKERS),
    ),
    (
        "actor_train.data_args.domain_interleave_probs",
        Set("data.weights", ""),
    ),
    (
        "actor_train.data_args.interleave_probs",
        Set("data.weights", ""),
    ),
    ("*.data_args.template", NoMeaning(TEMPLATE)),
    ("validation.data_args.file_name", To("data.held_out")),
    (
        "validation.generating_args.num_return_sequences",
        To("evaluation.samples_per_prompt"),
    ),
    (
        "validation.generating_args.max_new_tokens",
        To("evaluation.sampler.max_new_tokens"),
    ),
    (
        "validation.generating_args.temperature",
        To("evaluation.sampler.temperature"),
    ),
    (
        "validation.generating_args.top_p",
        To("evaluation.sampler.top_p"),
    ),
    (
        "validation.generating_args.top_k",
        To("evaluation.sampler.top_k"),
    ),
    ("validation.eval_steps", To("evaluation.every_steps")),
    (
        "actor_infer.generating_args.max_new_tokens",
        NoMeaning("response_length is used"),
    ),
    (
        "actor_infer.generating_args.num_return_sequences",
        NoMeaning(GROUP),
    ),
    (
        "actor_infer.generating_args.temperature",
        To("sampler.temperature"),
    ),
    ("actor_infer.generating_args.top_p", To("sampler.top_p")),
    ("actor_infer.generating_args.top_k", To("sampler.top_k")),
    (
        "*.generating_args.num_beams",
        NoMeaning("completions are sampled"),
    ),
    ("actor_infer", NoMeaning("the trained policy samples")),
    (
        "reference",
        NoMeaning("the reference is the initial policy"),
    ),
    ("is_pure_opd", Set("teacher.model", DISTILLATION)),
    ("use_opd", Set("teacher.model", DISTILLATION)),
    ("opd_kl_coef", Set("teacher.model", DISTILLATION)),
    ("teacher", Set("teacher.model", DISTILLATION)),
    ("student_train", NotSupported("name it actor_train")),
    ("student_infer", NotSupported("name it actor_infer")),
    ("critic", Set("training.critic", "")),
    ("validation", NotSupported("not an option of an evaluation")),
    (
        "rewards",
        NotSupported("reward workers are Python classes; list rewards by kind (docs/from-roll.md)"),
    ),
    (
        "reward",
        NotSupported("reward workers are Python classes; list rewards by kind (docs/from-roll.md)"),
    ),
];

impl RollFile {
    /// Returns the translation of `document` if it is a file of ROLL: it names roles, or what only
    /// ROLL has, or is a flat page of ROLL's keys.
    pub fn new(document: &Document) -> Option<Self> {
        let signs = [
            "actor_train",
            "actor_infer",
            "pretrain",
            "hydra",
            "num_gpus_per_node",
        ];
        let has_sign = signs.iter().any(|key| document.get(key).is_some());
        // Files of verl have Hydra's keys, too.
        if document.get(VERL_SIGN).is_some() || !has_sign && !is_flat_page(document) {
            return None;
        }
        let mut translation = Translation::new(document);
        let mut leaves = document.leaves();
        // The size of a micro-batch is known before its number is asked for.
        leaves.sort_by_key(|(path, _)| path.ends_with("gradient_accumulation_steps"));
        for (path, value) in leaves {
            translation.take(document, &path, value);
        }
        translation.leave_out_idle_keys();
        translation.leave_out_micro_batch_size();
        translation.keys.sort_by_key(|key| key.line);
        let has = |key: &str| {
            translation
                .document
                .get(&format!("algorithm.{key}"))
                .is_some()
        };
        // A preset of ours states the algorithm.
        let leaves_out = |default: &RollDefault| match default.key {
            "adv_estimator" => !has("adv_estimator") && !has("preset"),
            "kl_loss_coef" => has("use_kl_loss") && !has("kl_loss_coef") && !has("kl_coef"),
            key => !has(key),
        };
        Some(Self {
            keys: translation.keys,
            defaults: DEFAULTS.into_iter().filter(leaves_out).collect(),
            document: translation.document,
        })
    }
}

/// Returns whether at least [`FLAT_KEYS`] keys of the algorithm section stand at the top.
fn is_flat_page(document: &Document) -> bool {
    if document.get("algorithm").is_some() {
        return false;
    }
    let keys = algorithm_keys();
    let at_top = keys.iter().filter(|key| document.get(key).is_some());
    at_top.count() >= FLAT_KEYS
}

/// The number of keys at the top that make a flat page; fewer are an error.
const FLAT_KEYS: usize = 3;

fn algorithm_keys() -> BTreeSet<String> {
    let sections = sections().into_iter();
    let mut algorithm = sections.filter(|(section, _)| *section == "algorithm");
    algorithm.next().map(|(_, keys)| keys).unwrap_or_default()
}

/// The most bytes that all `${key}` may insert.
const INTERPOLATED: usize = 1 << 20;

struct Translation {
    keys: Vec<RollKey>,
    document: Document,
    /// The rest of [`INTERPOLATED`].
    room: usize,
    algorithm_keys: BTreeSet<String>,
    own_sections: BTreeSet<&'static str>,
    sampler_keys: BTreeSet<String>,
}

impl Translation {
    fn new(document: &Document) -> Self {
        let sections = sections();
        let sampler = sections.iter().find(|(section, _)| *section == "sampler");
        let sampler_keys = sampler.map(|(_, keys)| keys.clone()).unwrap_or_default();
        let own_sections = sections.into_iter().map(|(section, _)| section);
        Self {
            keys: Vec::new(),
            document: document.emptied(),
            room: INTERPOLATED,
            algorithm_keys: algorithm_keys(),
            own_sections: own_sections
                .chain([
                    "model",
                    "run_dir",
                    "threads",
                    "environment",
                    "demonstrations",
                    "rollout_log",
                    "trackers",
                ])
                .collect(),
            sampler_keys,
        }
    }

    fn take(&mut self, document: &Document, path: &str, value: &Value) {
        let line = document.line_of(path);
        let value = interpolated(document, value, &mut self.room);
        let top = path.split(['.', '[']).next().unwrap_or(path);
        let has = |path: &str| document.get(path).is_some();
        let own = match top {
            // ROLL has sections of these names, too.
            "rewards" => document.get(top).is_some_and(Value::is_array),
            "teacher" => has("teacher.model") || has("teacher.server"),
            _ => self.own_sections.contains(top),
        };
        let verdict = if own || self.algorithm_keys.contains(top) {
            let place = if own {
                path.to_owned()
            } else {
                format!("algorithm.{path}")
            };
            self.document.insert(&place, value, path, line);
            Verdict::Used(place)
        } else {
            match RULES.iter().find(|(pattern, _)| fits(pattern, path)) {
                Some((_, ToIf(_, switch))) if !self.is_true(document, switch) => {
                    Verdict::NoMeaning(format!("{switch} is not true"))
                }
                // What a file says in our words comes first.
                Some((_, To(place) | ToIf(place, _) | Set(place, _)))
                    if *place != path && document.get(place).is_some() =>
                {
                    Verdict::NoMeaning(format!("{place} is set"))
                }
                Some((_, To(place) | ToIf(place, _))) => self.place(place, value, path, line),
                Some((_, SetBoth(a, b)))
                    if document.get(a).is_some() && document.get(b).is_some() =>
                {
                    Verdict::NoMeaning(format!("{a} and {b} are set"))
                }
                // A switch that is off has no effect.
                Some((_, NotSupported(why))) if is_off(&value) => {
                    Verdict::NoMeaning(format!("it is off ({why})"))
                }
                Some((_, Set(..) | SetBoth(..))) if is_off(&value) => {
                    Verdict::NoMeaning("it is off".to_owned())
                }
                Some((_, NoMeaning(why))) => Verdict::NoMeaning((*why).to_owned()),
                Some((_, NotSupported(why))) => Verdict::NotSupported((*why).to_owned()),
                Some((_, Set(place, advice))) => {
                    Verdict::NotSupported(format!("set {place}{advice}"))
                }
                Some((_, SetBoth(a, b))) => Verdict::NotSupported(format!("set {a} and {b}")),
                None => {
                    let known: Vec<&str> = self.algorithm_keys.iter().map(String::as_str).collect();
                    let nearest = nearest(path, &known);
                    let nearest = nearest.map(|name| format!(", did you mean `{name}`?"));
                    Verdict::NotSupported(format!("not a known key{}", nearest.unwrap_or_default()))
                }
            }
        };
        self.keys.push(RollKey {
            path: path.to_owned(),
            line,
            verdict,
        });
    }

    fn is_true(&mut self, document: &Document, path: &str) -> bool {
        let value = document.get(path);
        let value = value.map(|value| interpolated(document, value, &mut self.room));
        value == Some(Value::Bool(true))
    }

    fn place(&mut self, place: &str, value: Value, origin: &str, line: Option<usize>) -> Verdict {
        if let Some((section, key)) = place.rsplit_once('.')
            && section.ends_with("sampler")
            && !self.sampler_keys.contains(key)
        {
            return Verdict::NotSupported(format!("the sampler has no {key}"));
        }
        let value = if place == "training.mini_batch_size" {
            // ROLL counts it in micro-batches.
            let micro = self.document.get("training.micro_batch_size");
            let micro = micro.and_then(Value::as_u64).unwrap_or(1);
            value
                .as_u64()
                .map_or(value, |steps| json!(steps.saturating_mul(micro)))
        } else {
            value
        };
        self.document.insert(place, value, origin, line);
        Verdict::Used(place.to_owned())
    }

    /// Removes the keys without effect in this combination, which ROLL accepts.
    fn leave_out_idle_keys(&mut self) {
        while let Some(algorithm) = self.document.get("algorithm").cloned() {
            let mut algorithm = algorithm;
            AlgorithmConfig::expand(&mut algorithm);
            let Ok(config) = serde_json::from_value::<AlgorithmConfig>(algorithm) else {
                return;
            };
            let Err(error) = config.apply(&mut TrainConfig::default()) else {
                return;
            };
            if !error.idle {
                return;
            }
            self.leave_out("algorithm", error.key, &error.message);
        }
    }

    /// Removes the number of completions of a pass, if tokens bound it.
    fn leave_out_micro_batch_size(&mut self) {
        if self.document.get("training.micro_batch_tokens").is_some() {
            self.leave_out("training", "micro_batch_size", TOKENS);
        }
    }

    /// Removes a key that has no effect for a reason.
    fn leave_out(&mut self, section: &str, key: &str, reason: &str) {
        self.document.remove(section, key);
        let place = Verdict::Used(format!("{section}.{key}"));
        for key in &mut self.keys {
            if key.verdict == place {
                key.verdict = Verdict::NoMeaning(reason.to_owned());
            }
        }
    }
}

fn is_off(value: &Value) -> bool {
    value == &Value::Bool(false) || value.is_null()
}

fn fits(pattern: &str, path: &str) -> bool {
    let mut steps = path.split(['.', '[']);
    pattern.split('.').all(|wanted| {
        steps
            .next()
            .is_some_and(|step| wanted == "*" || wanted == step)
    })
}

/// Replaces `${key}` by the value of that key of the file, a few times in a row, while there is
/// `room`.
fn interpolated(document: &Document, value: &Value, room: &mut usize) -> Value {
    let mut value = value.clone();
    for _ in 0..8 {
        let Value::String(text) = &value else { break };
        let Some((before, rest)) = text.split_once("${") else {
            break;
        };
        let Some((name, after)) = rest.split_once('}') else {
            break;
        };
        let Some(found) = document.get(name).filter(|_| *room > 0) else {
            break;
        };
        *room = room.saturating_sub(found.to_string().len());
        value = match found {
            found if before.is_empty() && after.is_empty() => found.clone(),
            Value::String(found) => Value::String(format!("{before}{found}{after}")),
            found => Value::String(format!("{before}{found}{after}")),
        };
    }
    value
}

impl Document {
    /// Returns a document of the same file without a key.
    fn emptied(&self) -> Self {
        self.with_value(Value::Object(Map::new()))
    }

    fn remove(&mut self, section: &str, key: &str) {
        if let Some(Value::Object(map)) = self.value.get_mut(section) {
            map.shift_remove(key);
        }
    }
}
