//! ROLL configuration files, with their roles and strategies.

use std::collections::BTreeSet;

use candle_grpo_train::TrainConfig;
use serde_json::{Value, json};

use super::super::algorithm::AlgorithmConfig;
use super::super::document::Document;
use super::super::former;
use super::super::schema::{keys_of, run_sections};
use super::report::{OtherDefault, Sizes};
use super::rules::{
    ENVIRONMENT, METRICS, PENALTY, RANKS,
    Rule::{self, Advise, NoMeaning, Refuse, Set, To, Unless},
    rules,
};
use super::translation::{Translation, first, fits};
use super::{Import, System};

/// The algorithm keys whose defaults differ. ROLL's defaults come from its code. Its page names
/// another `loss_agg_mode`.
const DEFAULTS: [OtherDefault; 4] = [
    OtherDefault::new("adv_estimator", "gae", "grpo"),
    OtherDefault::new("rollout_batch_size", "128", "32"),
    OtherDefault::new("num_return_sequences_in_group", "1", "8"),
    // Without use_kl_loss, neither has a KL.
    OtherDefault::new("kl_loss_coef", "0", "0.001"),
];

const ARGUMENTS: &str = "actor_train.training_args";
const NO_WORKERS: &str = "there are no workers";
const WORKERS: &str =
    " to the completions of an update of all workers; ROLL's keys have those of one";
const TEMPLATE: &str = "the chat template of the model is used";
const GROUP: &str = "num_return_sequences_in_group is used";
const PACKED: &str = "sequences are packed without padding";
const TOKENS: &str = "micro_batch_tokens bounds a pass";
const DISTILLATION: &str = " and recipe.policy_loss.distillation (docs/from-roll.md)";

pub(super) const RULES: &[(&str, Rule)] = rules! {
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
    "use_additional_prompts": Refuse("set recipe.group_filter and max_sampling_batches");
    "max_additional_running_prompts": Set("training.max_sampling_batches", "");
    "reward_pretrain": NoMeaning("rewards lists a reward model by its kind, reward_model");
    "difficulty_loss_weight": Refuse("samples are not weighted by difficulty");
    "length_loss_weight": Refuse("samples are not weighted by length");
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
    "actor_train.model_args": Refuse("not an option of a model");
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
    "actor_train.max_tokens_per_microbatch_in_train": To("training.micro_batch_tokens");
    "*.max_tokens_per_microbatch_in_train": NoMeaning(TOKENS);
    "*.max_tokens_per_microbatch_in_infer": NoMeaning(TOKENS);
    "*.use_dynamic_batching_in_train": NoMeaning(TOKENS);
    "*.use_dynamic_batching_in_infer": NoMeaning(TOKENS);
    "*.sequence_length_round_in_train": NoMeaning(PACKED);
    "*.sequence_length_round_in_infer": NoMeaning(PACKED);
    "actor_train.training_args.gradient_accumulation_steps": To("training.mini_batch_size");
    "actor_train.training_args.num_train_epochs": NoMeaning("max_steps is used");
    "actor_train.training_args.lr_scheduler_type": Unless("null", "set schedule.decay and schedule.decay_until");
    "actor_train.training_args": Refuse("not an option of the optimizer");
    "actor_train.data_args.file_name": To("data.train");
    "actor_train.data_args.dataset_dir": NoMeaning("paths include their directories");
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
    "is_use_additional_prompts": Refuse("set recipe.group_filter and max_sampling_batches");
    "custom_envs": Refuse(ENVIRONMENT);
    "custom_env": Refuse(ENVIRONMENT);
    "agent_config_common": Refuse(ENVIRONMENT);
    "env_manager_cls": Refuse(ENVIRONMENT);
    "max_actions_per_traj": Refuse(ENVIRONMENT);
    "reward_system_config": Refuse(ENVIRONMENT);
    "train_env_manager": Refuse(ENVIRONMENT);
    "val_env_manager": Refuse(ENVIRONMENT);
    "reward_normalization": Refuse(ENVIRONMENT);
    "dataset_filter": Refuse("filter the rows of the file");
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
    "student_train": Refuse("name it actor_train");
    "student_infer": Refuse("name it actor_infer");
    "critic": Set("training.critic", "");
    "validation": Refuse("not an option of an evaluation");
    "rewards": Refuse("reward workers are Python classes; list rewards by kind (docs/from-roll.md)");
    "reward": Refuse("reward workers are Python classes; list rewards by kind (docs/from-roll.md)");
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
const IDLE: &str = "\
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
    let mut file = Translation::new(document);
    tokens(&mut file);
    update(&mut file);
    schedule(&mut file);
    apply(&mut file);
    idle_keys(&mut file);
    let has = |key: &str| file.translated(&format!("algorithm.{key}")).is_some();
    // A preset of ours states the algorithm.
    let leaves_out = |default: &OtherDefault| match default.key {
        "adv_estimator" => !has("adv_estimator") && !has("preset"),
        "kl_loss_coef" => has("use_kl_loss") && !has("kl_loss_coef") && !has("kl_coef"),
        key => !has(key),
    };
    let defaults = DEFAULTS.into_iter().filter(leaves_out).collect();
    file.finish(System::Roll, defaults, sizes(document))
}

/// The bound on tokens, which a switch turns on.
fn tokens(file: &mut Translation<'_>) {
    let switch = "actor_train.use_dynamic_batching_in_train";
    if !file.flag(switch) {
        let bound = "actor_train.max_tokens_per_microbatch_in_train";
        file.no_meaning(bound, format!("{switch} is not true"));
    }
}

/// The completions per update. ROLL counts micro-batches, of one worker.
fn update(file: &mut Translation<'_>) {
    let place = "training.mini_batch_size";
    if file.source.sets(place) {
        return;
    }
    let path = format!("{ARGUMENTS}.gradient_accumulation_steps");
    let steps = file.get(&path).and_then(|steps| steps.as_u64());
    let micro = file.get("training.micro_batch_size");
    let micro = micro.or_else(|| file.get(&format!("{ARGUMENTS}.per_device_train_batch_size")));
    let micro = micro.and_then(|size| size.as_u64()).unwrap_or(1);
    if let Some(steps) = steps {
        file.used(&path, place, json!(steps.saturating_mul(micro)));
    }
    let devices = "actor_train.device_mapping";
    match (workers(file.source), sizes(file.source)) {
        (Some(1.), _) => file.no_meaning(devices, RANKS),
        (Some(workers), Some(Sizes { update, .. })) => file.refuse(
            devices,
            format!(
                "set {} to {update}, the completions of an update of all {workers} workers",
                former::place(place)
            ),
        ),
        _ => {}
    }
}

/// The schedule, for which a file may have both our keys.
fn schedule(file: &mut Translation<'_>) {
    let path = format!("{ARGUMENTS}.lr_scheduler_type");
    let [decay, until] = ["schedule.decay", "schedule.decay_until"];
    if file.source.sets(decay) && file.source.sets(until) {
        file.no_meaning(&path, format!("{decay} and {until} are set"));
    } else if file.text(&path).as_deref() == Some("constant") {
        file.no_meaning(&path, "it is the default");
    }
}

/// Gives each remaining key a verdict: as a key of ours, by its rule, or by the lists of names.
fn apply(file: &mut Translation<'_>) {
    let algorithm_keys = keys_of::<AlgorithmConfig>();
    let variables = variables(file.source);
    let idle = "it does not change what is learned";
    for (path, value) in file.source.leaves() {
        if file.is_done(&path) {
            continue;
        }
        let value = file.interpolated(value);
        let rule = RULES.iter().find(|(pattern, _)| fits(pattern, &path));
        let (is_idle, is_named) = (has_name(IDLE, &path), has_name(OF_AN_EFFECT, &path));
        // In some sections a key must be one that ROLL has.
        let is_known = is_idle || is_named || path.contains("strategy_args");
        let is_open = |pattern: &&str| !SECTIONS.contains(pattern);
        match rule {
            _ if algorithm_keys.contains(first(&path)) => {
                file.used(&path, &format!("algorithm.{path}"), value);
            }
            _ if is_ours(file.source, &path) => file.used(&path, &path, value),
            Some((pattern, Refuse(_))) if is_idle && !is_open(pattern) => {
                file.no_meaning(&path, idle);
            }
            Some((pattern, rule)) if is_known || is_open(pattern) => {
                file.follow(pattern, &path, value, rule);
            }
            _ if is_idle => file.no_meaning(&path, idle),
            _ if variables.contains(&path) => {
                file.no_meaning(&path, "the file uses it as a variable");
            }
            _ if is_named => {
                file.follow(
                    &path,
                    &path,
                    value,
                    &Unless("null", "it has no counterpart"),
                );
            }
            _ => {
                let ours = algorithm_keys.iter().map(String::as_str);
                let theirs = [IDLE, OF_AN_EFFECT].map(str::split_whitespace);
                let known: Vec<&str> = ours.chain(theirs.into_iter().flatten()).collect();
                let name = path.rsplit('.').next().unwrap_or(&path);
                file.unknown(&path, name, &known);
            }
        }
    }
}

/// Returns whether the key at `path` is one of ours. ROLL has sections with some of their names.
fn is_ours(document: &Document, path: &str) -> bool {
    let has = |path: &str| document.get(path).is_some();
    match first(path) {
        "rewards" => document.get("rewards").is_some_and(Value::is_array),
        "teacher" => has("teacher.model") || has("teacher.server"),
        top if RULES.iter().any(|(pattern, _)| first(pattern) == top) => false,
        top => run_sections()[""].contains_key(top) || former::is_of(top),
    }
}

/// Leaves out the keys without effect in this combination, which ROLL accepts.
fn idle_keys(file: &mut Translation<'_>) {
    let tokens = ["training.micro_batch_tokens", "micro_batch_tokens"];
    if tokens.iter().any(|place| file.translated(place).is_some()) {
        file.leave_out("training.micro_batch_size", TOKENS);
    }
    while let Some(mut algorithm) = file.translated("algorithm") {
        AlgorithmConfig::expand(&mut algorithm);
        let config = serde_json::from_value::<AlgorithmConfig>(algorithm);
        let applied = config.map(|config| config.apply(&mut TrainConfig::default()));
        match applied {
            Ok(Err(error)) if error.idle => {
                file.leave_out(&format!("algorithm.{}", error.key), &error.message);
            }
            _ => return,
        }
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
    let update = number(&format!("{ARGUMENTS}.per_device_train_batch_size"), 1.)?
        * number(&format!("{ARGUMENTS}.gradient_accumulation_steps"), 1.)?
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
    let keys = keys_of::<AlgorithmConfig>();
    let at_top = keys.iter().filter(|key| document.get(key).is_some());
    document.get("algorithm").is_none() && at_top.count() >= FLAT_KEYS
}

/// The number of top-level keys that make a flat page; fewer are an error.
const FLAT_KEYS: usize = 3;

/// Returns the names that a file mentions as `${name}`.
fn variables(document: &Document) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, value) in document.leaves() {
        for part in value.to_string().split("${").skip(1) {
            names.extend(part.split_once('}').map(|(name, _)| name.to_owned()));
        }
    }
    names
}
