//! ROLL configuration files, with their roles and strategies.

use std::collections::BTreeSet;

use candle_grpo_train::{SamplingConfig, TrainConfig};
use serde_json::{Value, json};

use super::super::algorithm::AlgorithmConfig;
use super::super::document::Document;
use super::super::former;
use super::super::schema::{keys_of, run_sections};
use super::report::{RollDefault, Sizes};
use super::rules::{ENVIRONMENT, METRICS, PENALTY, RANKS, rules};
use super::translation::{INTERPOLATED, first, fits, interpolated, is_same, unknown};
use super::{Import, ImportedKey, Severity, System, Verdict};

/// The algorithm keys whose defaults differ. ROLL's defaults come from its code. Its page names
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

/// The rule for the keys at and below a path, in which `*` stands for one step.
enum Rule {
    To(&'static str),
    /// Used at the first place, if the second path in the file is true.
    ToIf(&'static str, &'static str),
    NoMeaning(&'static str),
    NotSupported(&'static str),
    /// Not supported, unless the file has our key for it. Includes the end of the advice to set it.
    Set(&'static str, &'static str),
    /// Not supported, unless the file has both our keys for it.
    SetBoth(&'static str, &'static str),
    /// Not supported, unless the file has our key for it. The run learns the same without it.
    Advise(&'static str),
    /// Not supported, unless it has this value.
    Unless(&'static str, &'static str),
}

use Rule::{Advise, NoMeaning, NotSupported, Set, SetBoth, To, ToIf, Unless};

const NO_WORKERS: &str = "there are no workers";
const WORKERS: &str =
    " to the completions of an update of all workers; ROLL's keys have those of one";
const TEMPLATE: &str = "the chat template of the model is used";
const GROUP: &str = "num_return_sequences_in_group is used";
const PACKED: &str = "sequences are packed without padding";
const TOKENS: &str = "micro_batch_tokens bounds a pass";
const DISTILLATION: &str = " and recipe.policy_loss.distillation (docs/from-roll.md)";

/// The rules. The first one that fits applies.
const RULES: &[(&str, Rule)] = rules! {
    "seed": To("seed");
    "max_steps": To("max_steps");
    "save_steps": To("checkpoint.every_steps");
    "eval_steps": To("evaluation.every_steps");
    "output_dir": To("run_dir");
    "pretrain": To("model.path");
    "max_grad_norm": To("training.max_grad_norm");
    "defaults": NoMeaning("strategies do not apply");
    "hydra": NoMeaning("Hydra is not used");
    "exp_name": NoMeaning("the run directory names the run");
    "logging_dir": NoMeaning("everything is in the run directory");
    "logging_steps": NoMeaning("every step is logged");
    "resume_from_checkpoint": NoMeaning("`grpo train --resume` resumes a run");
    "checkpoint_config": NoMeaning("checkpoints are in the run directory");
    "track_with": NoMeaning(METRICS);
    "tracker_kwargs": NoMeaning(METRICS);
    "system_envs": NoMeaning("set variables in the shell");
    "num_gpus_per_node": NoMeaning(RANKS);
    "num_nodes": NoMeaning(RANKS);
    "rpc_timeout": NoMeaning(NO_WORKERS);
    "async_generation_ratio": Set("rollout.max_staleness", "");
    "is_num_return_sequences_expand": NoMeaning("groups are always sampled together");
    "max_running_requests": NoMeaning("rollout.max_inflight is used");
    "use_additional_prompts": NotSupported("set recipe.group_filter and max_sampling_batches");
    "max_additional_running_prompts": Set("training.max_sampling_batches", "");
    "reward_pretrain": NoMeaning("rewards lists a reward model by its kind, reward_model");
    "difficulty_loss_weight": NotSupported("samples are not weighted by difficulty");
    "length_loss_weight": NotSupported("samples are not weighted by length");
    "enable_reference": NoMeaning("a KL loads its reference");
    "enable_old_logprobs_recompute": Set("training.old_log_probs", "");
    "sequence_length": NoMeaning("prompt_length and response_length are used");
    "val_batch_size": NoMeaning("all held-out prompts are evaluated");
    "actor_infer.strategy_args": NoMeaning("the trained policy samples; rollout.engine selects a server");
    "*.strategy_args": NoMeaning("there are no strategies");
    "actor_train.device_mapping": Set("training.mini_batch_size", WORKERS);
    "*.device_mapping": NoMeaning(RANKS);
    "*.world_size": NoMeaning(RANKS);
    "*.num_gpus_per_worker": NoMeaning(RANKS);
    "*.infer_batch_size": NoMeaning("sampling.max_batch_size is used");
    "*.use_remote_checkpoint": NoMeaning(NO_WORKERS);
    "*.model_args.flash_attn": NoMeaning("there is one attention implementation");
    "*.model_args.attn_implementation": NoMeaning("there is one attention implementation");
    "*.model_args.disable_gradient_checkpointing": NoMeaning("activations are not checkpointed unless activation_checkpointing is set");
    "*.model_args.model_type": NoMeaning("the model's configuration is used");
    "*.model_args.dtype": Advise("training.compute_dtype");
    "actor_train.model_args.lora_rank": To("training.adapters.rank");
    "actor_train.model_args.lora_alpha": To("training.adapters.alpha");
    "actor_train.model_args.lora_target": Set("training.adapters.target_modules", "");
    "actor_train.model_args.lora_dropout": Unless("0", "adapters have no dropout");
    "actor_train.model_args.moe_aux_loss_coef": To("training.router_aux_loss_coef");
    "actor_train.model_args": NotSupported("not an option of a model");
    "actor_train.worker_cls": NoMeaning("pg_variant is used");
    "actor_train.pg_variant": To("algorithm.pg_variant");
    "actor_train.training_args.learning_rate": To("optimizer.learning_rate");
    "actor_train.training_args.weight_decay": To("optimizer.weight_decay");
    "actor_train.training_args.adam_beta1": To("optimizer.beta1");
    "actor_train.training_args.adam_beta2": To("optimizer.beta2");
    "actor_train.training_args.adam_epsilon": To("optimizer.epsilon");
    "actor_train.training_args.max_grad_norm": To("training.max_grad_norm");
    "actor_train.training_args.warmup_steps": To("schedule.warmup_steps");
    "actor_train.training_args.per_device_train_batch_size": To("training.micro_batch_size");
    "actor_train.max_tokens_per_microbatch_in_train": ToIf("training.micro_batch_tokens", "actor_train.use_dynamic_batching_in_train");
    "*.max_tokens_per_microbatch_in_train": NoMeaning(TOKENS);
    "*.max_tokens_per_microbatch_in_infer": NoMeaning(TOKENS);
    "*.use_dynamic_batching_in_train": NoMeaning(TOKENS);
    "*.use_dynamic_batching_in_infer": NoMeaning(TOKENS);
    "*.sequence_length_round_in_train": NoMeaning(PACKED);
    "*.sequence_length_round_in_infer": NoMeaning(PACKED);
    "actor_train.training_args.gradient_accumulation_steps": To("training.mini_batch_size");
    "actor_train.training_args.num_train_epochs": NoMeaning("max_steps is used");
    "actor_train.training_args.lr_scheduler_type": SetBoth("schedule.decay", "schedule.decay_until");
    "actor_train.training_args": NotSupported("not an option of the optimizer");
    "actor_train.data_args.file_name": To("data.train");
    "actor_train.data_args.dataset_dir": NoMeaning("paths include their folders");
    "actor_train.data_args.messages": NoMeaning("the column is found by its name");
    "actor_train.data_args.preprocessing_num_workers": NoMeaning(NO_WORKERS);
    "actor_train.data_args.domain_interleave_probs": Set("data.weights", "");
    "actor_train.data_args.interleave_probs": Set("data.weights", "");
    "*.data_args.template": NoMeaning(TEMPLATE);
    "validation.data_args.file_name": To("data.held_out");
    "validation.generating_args.num_return_sequences": To("evaluation.samples_per_prompt");
    "validation.generating_args.max_new_tokens": To("evaluation.sampler.max_new_tokens");
    "validation.generating_args.temperature": To("evaluation.sampler.temperature");
    "validation.generating_args.top_p": To("evaluation.sampler.top_p");
    "validation.generating_args.top_k": To("evaluation.sampler.top_k");
    "validation.eval_steps": To("evaluation.every_steps");
    "actor_infer.generating_args.max_new_tokens": NoMeaning("response_length is used");
    "actor_infer.generating_args.num_return_sequences": NoMeaning(GROUP);
    "actor_infer.generating_args.temperature": To("sampler.temperature");
    "actor_infer.generating_args.top_p": To("sampler.top_p");
    "actor_infer.generating_args.top_k": To("sampler.top_k");
    "*.generating_args.num_beams": NoMeaning("completions are sampled");
    "actor_infer.generating_args.stop_strings": To("sampler.stop_strings");
    "*.generating_args.do_sample": Unless("true", "set evaluation.sampler.greedy");
    "*.generating_args.repetition_penalty": Unless("1", PENALTY);
    "*.generating_args.length_penalty": Unless("1", PENALTY);
    "*.router_replay": Set("training.router_replay", "");
    "*.system_envs": NoMeaning("set variables in the shell");
    "*.sequence_packing_args": NoMeaning(PACKED);
    "actor_infer": NoMeaning("the trained policy samples");
    "reference": NoMeaning("the reference is the initial policy");
    "max_ckpt_to_keep": To("checkpoint.keep");
    "val_greedy": To("evaluation.sampler.greedy");
    "val_n_sample": To("evaluation.samples_per_prompt");
    "l2": Unless("0", "set optimizer.weight_decay");
    "mask_type": Unless("\"loss\"", "masks leave the loss alone");
    "train_infer_correction": Set("algorithm.recipe.policy_loss.rollout_correction", "");
    "is_use_additional_prompts": NotSupported("set recipe.group_filter and max_sampling_batches");
    "custom_envs": NotSupported(ENVIRONMENT);
    "custom_env": NotSupported(ENVIRONMENT);
    "agent_config_common": NotSupported(ENVIRONMENT);
    "env_manager_cls": NotSupported(ENVIRONMENT);
    "max_actions_per_traj": NotSupported(ENVIRONMENT);
    "reward_system_config": NotSupported(ENVIRONMENT);
    "train_env_manager": NotSupported(ENVIRONMENT);
    "val_env_manager": NotSupported(ENVIRONMENT);
    "reward_normalization": NotSupported(ENVIRONMENT);
    "dataset_filter": NotSupported("filter the rows of the file");
    "tag_to_template": NoMeaning(TEMPLATE);
    "global_template": NoMeaning(TEMPLATE);
    "rollout_mock": NoMeaning(NO_WORKERS);
    "router_args": NoMeaning(NO_WORKERS);
    "transfer_backend": NoMeaning(NO_WORKERS);
    "env_monitor": NoMeaning(NO_WORKERS);
    "is_pure_opd": Set("teacher.model", DISTILLATION);
    "use_opd": Set("teacher.model", DISTILLATION);
    "opd_kl_coef": Set("teacher.model", DISTILLATION);
    "teacher": Set("teacher.model", DISTILLATION);
    "student_train": NotSupported("name it actor_train");
    "student_infer": NotSupported("name it actor_infer");
    "critic": Set("training.critic", "");
    "validation": NotSupported("not an option of an evaluation");
    "rewards": NotSupported("reward workers are Python classes; list rewards by kind (docs/from-roll.md)");
    "reward": NotSupported("reward workers are Python classes; list rewards by kind (docs/from-roll.md)");
};

/// The rules for whole sections, in which a key must be one that ROLL has.
const SECTIONS: [&str; 5] = [
    "actor_infer",
    "reference",
    "actor_train.model_args",
    "actor_train.training_args",
    "validation",
];

/// ROLL keys that follow their section's rule, or that do not change what is learned.
const OF_NO_EFFECT: &str = "\
    name strategy_args strategy_name strategy_config base_dir rollout_dump_dir local_rank profiler_timeline \
    profiler_memory report_length_and_rewards is_offload_states is_offload_optimizer_states_in_train_step \
    length_profiler_dir profiler_output_dir otlp_output_dir model_update_buffer_size_mb model_download_type \
    generate_opt_level user_defined_rollout_loop_cls save_logging_board_dir balance_length backend_timeout \
    max_concurrency offload_nccl use_sequence_packing logits_in_fp32 model_update_frequency tag_included \
    val_prompt_length val_sequence_length seed data_seed dataloader_num_workers fp16 bf16 tf32 save_hf_model \
    output_dir max_steps eval_file_name dataset_type tag id prompt response image_folder video_folder \
    audio_folder include_stop_str_in_output logprobs max_length model_name_or_path autocast_adapter_dtype \
    gradient_checkpointing_use_reentrant device_map num_labels model_config_kwargs ulysses_size attn_implementation \
    flash_attn dtype model_type disable_gradient_checkpointing worker_cls force_disable_old_logprobs_recompute \
    exp_mode partial_gpu_mode render_save_dir skip_mock_system_prompt parse_tool_call_parameter_to_dict \
    temperature top_p top_k max_new_tokens num_return_sequences num_beams template file_name messages \
    preprocessing_num_workers dataset_dir image_max_pixels image_min_pixels video_max_pixels video_min_pixels \
    video_total_pixels video_fps video_max_frames video_resize_chunk_frames model_name use_remove_padding \
    lora_target lora_rank lora_alpha lora_dropout default_history_length max_tokens_per_step generate_redundancy_num";

/// Keys that ROLL has, which change what is learned, and have no counterpart.
const OF_AN_EFFECT: &str = "\
    use_reward_scaling add_len_reward use_reward_norm critic_warmup postive_loss_coef use_topr_neg_loss_coef \
    use_policy_loss_type use_topr_loss minibatch_data_iter_num apply_loss_scale mtp_training_mode dirty_data_mask \
    use_token_reward batch_adjust_mode episode_reward_weight step_reward_weight step_reward_gamma ratio_type \
    open_feedback_turn warmup_ratio adapter_name_or_path freeze_module_prefix additional_target \
    custom_data_kwargs_func pure_opd_pipeline_type";

/// Returns whether `names`, separated by spaces, contains a path's last name.
fn has_name(names: &str, path: &str) -> bool {
    let last = path.rsplit('.').next().unwrap_or(path);
    let last = last.split('[').next().unwrap_or(last);
    names.split_whitespace().any(|name| name == last)
}

/// Returns whether `document` is a ROLL file: it has roles or other keys that only ROLL has, or is
/// a flat page with ROLL's keys.
pub(super) fn is_of(document: &Document) -> bool {
    let signs = [
        "actor_train",
        "actor_infer",
        "pretrain",
        "hydra",
        "num_gpus_per_node",
    ];
    signs.iter().any(|key| document.get(key).is_some()) || is_flat_page(document)
}

/// Translates a ROLL file.
pub(super) fn translate(document: &Document) -> Import {
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
    Import {
        system: System::Roll,
        keys: translation.keys,
        defaults: DEFAULTS.into_iter().filter(leaves_out).collect(),
        sizes: sizes(document),
        document: translation.document,
    }
}

/// Returns a file's sizes, with ROLL's defaults.
fn sizes(document: &Document) -> Option<Sizes> {
    let number = |key: &str, default: f64| match document.get(key) {
        Some(value) => value.as_f64(),
        None => Some(default),
    };
    let sampled =
        number("rollout_batch_size", 128.)? * number("num_return_sequences_in_group", 1.)?;
    let arguments = "actor_train.training_args";
    let update = number(&format!("{arguments}.per_device_train_batch_size"), 1.)?
        * number(&format!("{arguments}.gradient_accumulation_steps"), 1.)?
        * workers(document)?;
    let updates = number("ppo_epochs", 1.)? * (sampled / update).ceil();
    let max_steps = document.get("max_steps").and_then(Value::as_f64);
    Some(Sizes {
        sampled,
        update,
        updates,
        all_updates: max_steps.map(|steps| steps * updates),
    })
}

/// Returns how many workers share an update in ROLL, if the file defines it.
fn workers(document: &Document) -> Option<f64> {
    let Some(mapping) = document.get("actor_train.device_mapping") else {
        return Some(1.);
    };
    let devices = match mapping {
        Value::Array(devices) => devices.len() as f64,
        mapping => {
            let range = mapping.as_str()?.strip_prefix("list(range(")?;
            let (from, to) = range.strip_suffix("))")?.split_once(',')?;
            to.trim().parse::<f64>().ok()? - from.trim().parse::<f64>().ok()?
        }
    };
    let sizes = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ];
    let shared: f64 = sizes
        .iter()
        .map(|size| {
            let path = format!("actor_train.strategy_args.strategy_config.{size}");
            document.get(&path).and_then(Value::as_f64).unwrap_or(1.)
        })
        .product();
    Some(devices / shared)
}

/// Returns whether at least [`FLAT_KEYS`] algorithm keys are at the top level.
fn is_flat_page(document: &Document) -> bool {
    if document.get("algorithm").is_some() {
        return false;
    }
    let keys = algorithm_keys();
    let at_top = keys.iter().filter(|key| document.get(key).is_some());
    at_top.count() >= FLAT_KEYS
}

/// The number of top-level keys that make a flat page; fewer are an error.
const FLAT_KEYS: usize = 3;

fn algorithm_keys() -> BTreeSet<String> {
    keys_of::<AlgorithmConfig>()
}

struct Translation {
    keys: Vec<ImportedKey>,
    document: Document,
    /// The bytes left from [`INTERPOLATED`].
    room: usize,
    algorithm_keys: BTreeSet<String>,
    sampler_keys: BTreeSet<String>,
    /// The names that the file mentions as `${name}`.
    variables: BTreeSet<String>,
}

/// Returns the names that a file mentions as `${name}`.
fn variables(document: &Document) -> BTreeSet<String> {
    let leaves = document.leaves();
    let texts = leaves.iter().map(|(_, value)| value.to_string());
    let names = texts.flat_map(|text| {
        let parts: Vec<String> = text
            .split("${")
            .skip(1)
            .filter_map(|part| Some(part.split_once('}')?.0.to_owned()))
            .collect();
        parts
    });
    names.collect()
}

impl Translation {
    fn new(document: &Document) -> Self {
        Self {
            keys: Vec::new(),
            document: document.with_value(json!({})),
            room: INTERPOLATED,
            algorithm_keys: algorithm_keys(),
            sampler_keys: keys_of::<SamplingConfig>(),
            variables: variables(document),
        }
    }

    fn take(&mut self, document: &Document, path: &str, value: &Value) {
        let line = document.line_of(path);
        let value = interpolated(document, value, &mut self.room);
        let top = first(path);
        let has = |path: &str| document.get(path).is_some();
        let own = match top {
            // ROLL has sections of these names, too.
            "rewards" => document.get(top).is_some_and(Value::is_array),
            "teacher" => has("teacher.model") || has("teacher.server"),
            _ if self.algorithm_keys.contains(top) => false,
            _ if RULES.iter().any(|(pattern, _)| first(pattern) == top) => false,
            _ => run_sections()[""].contains_key(top) || former::is_of(top),
        };
        let (verdict, severity) = if own || self.algorithm_keys.contains(top) {
            let place = if own {
                path.to_owned()
            } else {
                format!("algorithm.{path}")
            };
            self.document.insert(&place, value, path, line);
            (Verdict::Used(place), Severity::Note)
        } else {
            self.verdict(document, path, value)
        };
        self.keys.push(ImportedKey {
            path: path.to_owned(),
            line,
            verdict,
            severity,
        });
    }

    /// Returns the verdict for a key that is not ours.
    fn verdict(&mut self, document: &Document, path: &str, value: Value) -> (Verdict, Severity) {
        let line = document.line_of(path);
        let no_meaning = |why: String| (Verdict::NoMeaning(why), Severity::Note);
        let changes = |why: String| (Verdict::NotSupported(why), Severity::Changes);
        // ROLL and this program have some names in common.
        let given = |place: &str| former::place(place) != path && document.sets(place);
        let rule = RULES.iter().find(|(pattern, _)| fits(pattern, path));
        let names = [OF_NO_EFFECT, OF_AN_EFFECT];
        let in_section = rule.is_some_and(|(pattern, _)| SECTIONS.contains(pattern));
        let is_known = match rule {
            Some(_) if in_section => {
                names.iter().any(|names| has_name(names, path)) || path.contains("strategy_args")
            }
            Some(_) => true,
            None => false,
        };
        let off = is_off(&value);
        match rule.map(|(_, rule)| rule).filter(|_| is_known) {
            Some(ToIf(_, switch)) if !self.is_true(document, switch) => {
                no_meaning(format!("{switch} is not true"))
            }
            // What a file says in our words comes first.
            Some(To(place) | ToIf(place, _) | Set(place, _) | Advise(place)) if given(place) => {
                no_meaning(format!("{place} is set"))
            }
            Some(To(place) | ToIf(place, _)) => self.place(place, value, path, line),
            Some(SetBoth(a, b)) if given(a) && given(b) => {
                no_meaning(format!("{a} and {b} are set"))
            }
            // A switch that is off has no effect.
            Some(NotSupported(why)) if off => no_meaning(format!("it is off ({why})")),
            Some(Set(..) | SetBoth(..) | Advise(_) | Unless(..)) if off => {
                no_meaning("it is off".to_owned())
            }
            Some(SetBoth(..)) if value == "constant" => no_meaning("it is the default".to_owned()),
            Some(Unless(default, _)) if is_same(&value, default) => {
                no_meaning("it has no effect".to_owned())
            }
            Some(NoMeaning(why)) => no_meaning((*why).to_owned()),
            Some(NotSupported(_)) if in_section && has_name(OF_NO_EFFECT, path) => {
                no_meaning("it does not change what is learned".to_owned())
            }
            Some(NotSupported(why) | Unless(_, why)) => changes((*why).to_owned()),
            Some(Set(place, advice)) => match (path, workers(document), sizes(document)) {
                ("actor_train.device_mapping", Some(1.), _) => no_meaning(RANKS.to_owned()),
                ("actor_train.device_mapping", Some(workers), Some(Sizes { update, .. })) => {
                    changes(format!(
                        "set {} to {update}, the completions of an update of all {workers} workers",
                        former::place(place)
                    ))
                }
                _ => changes(format!("set {}{advice}", former::place(place))),
            },
            Some(SetBoth(a, b)) => changes(format!("set {a} and {b}")),
            Some(Advise(place)) => (
                Verdict::NotSupported(format!("set {}", former::place(place))),
                Severity::Note,
            ),
            None if has_name(OF_NO_EFFECT, path) => {
                no_meaning("it does not change what is learned".to_owned())
            }
            None if self.variables.contains(path) => {
                no_meaning("the file uses it as a variable".to_owned())
            }
            None if has_name(OF_AN_EFFECT, path) && off => no_meaning("it is off".to_owned()),
            None if has_name(OF_AN_EFFECT, path) => changes("it has no counterpart".to_owned()),
            None => {
                let ours = self.algorithm_keys.iter().map(String::as_str);
                let theirs = names.iter().flat_map(|names| names.split_whitespace());
                let known: Vec<&str> = ours.chain(theirs).collect();
                let last = path.rsplit('.').next().unwrap_or(path);
                (unknown(last, &known), Severity::Unknown)
            }
        }
    }

    fn is_true(&mut self, document: &Document, path: &str) -> bool {
        let value = document.get(path);
        let value = value.map(|value| interpolated(document, value, &mut self.room));
        value == Some(Value::Bool(true))
    }

    fn place(
        &mut self,
        place: &str,
        value: Value,
        origin: &str,
        line: Option<usize>,
    ) -> (Verdict, Severity) {
        if let Some((section, key)) = place.rsplit_once('.')
            && section.ends_with("sampler")
            && !self.sampler_keys.contains(key)
        {
            let message = format!("the sampler has no {key}");
            return (Verdict::NotSupported(message), Severity::Changes);
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
        (Verdict::Used(place.to_owned()), Severity::Note)
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

    /// Removes the micro-batch size if tokens bound a pass.
    fn leave_out_micro_batch_size(&mut self) {
        if self.document.sets("micro_batch_tokens") {
            self.leave_out("training", "micro_batch_size", TOKENS);
        }
    }

    /// Removes a key that has no effect for a reason.
    fn leave_out(&mut self, section: &str, key: &str, reason: &str) {
        self.document.remove(&format!("{section}.{key}"));
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
