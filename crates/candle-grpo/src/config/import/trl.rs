//! Flat TRL files: `trl grpo --config`.

use serde_json::{Value, json};

use super::super::document::{Document, share_of};
use super::report::{OtherDefault, Sizes};
use super::rules::{
    ENVIRONMENT, MEMORY, METRICS, PENALTY,
    Rule::{self, Convert, NoMeaning, Set, To, Unless},
    bf16, files, rules,
};
use super::translation::{Translation, count};
use super::{Import, System};

/// Top-level keys that only TRL files have.
const SIGNS: &[&str] = &[
    "num_generations",
    "max_completion_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "model_name_or_path",
    "dataset_name",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "loss_type",
    "scale_rewards",
    "reward_funcs",
    "beta",
    "epsilon",
    "learning_rate",
    "num_train_epochs",
    "save_steps",
    "eval_steps",
    "warmup_steps",
    "use_vllm",
    "bf16",
    "logging_steps",
    "report_to",
    "lr_scheduler_type",
    "use_peft",
    "gradient_checkpointing",
    "mask_truncated_completions",
];

/// The number of such keys that make a TRL file; fewer are a slip.
const FLAT: usize = 3;

pub(super) const RULES: &[(&str, Rule)] = rules! {
    "model_name_or_path": To("model.path");
    "chat_template_path": To("model.chat_template");
    "dataset_name": Convert("data.train", files);
    "dataset_config": Set("data.train", ": the file of the configuration");
    "dataset_train_split": Unless("\"train\"", "set data.train to the file of the split");
    "dataset_test_split": Set("data.held_out", " to the file of the split");
    "chat_template_kwargs": To("data.chat_template_kwargs");
    "reward_funcs": Set("rewards", ", a list of kinds (docs/from-trl.md)");
    "reward_model_name_or_path": Set("rewards", ": [{kind: reward_model, path: ...}]");
    "reward_weights": Set("rewards", ": each has a weight");
    "multi_objective_aggregation": Unless("\"sum_then_normalize\"", "use recipe.advantage of the name gdpo");
    "max_completion_length": To("sampling.max_new_tokens");
    "max_prompt_length": To("max_prompt_tokens");
    "temperature": To("sampling.temperature");
    "top_p": To("sampling.top_p");
    "top_k": To("sampling.top_k");
    "min_p": To("sampling.min_p");
    "repetition_penalty": Unless("1.0", PENALTY);
    "generation_kwargs": Set("sampling", "");
    "vllm_mode": Unless("\"colocate\"", "set rollout.engine: vllm and rollout.base_url (docs/engines.md)");
    "vllm_server_base_url": To("rollout.base_url");
    "vllm_server_timeout": To("rollout.server_timeout");
    "vllm_structured_outputs_regex": To("sampling.structured_outputs.regex");
    "vllm_importance_sampling_correction": Set("recipe.policy_loss.rollout_correction", " with a server");
    "vllm_importance_sampling_mode": Set("recipe.policy_loss.rollout_correction", " with a server");
    "vllm_importance_sampling_cap": Set("recipe.policy_loss.rollout_correction", " with a server");
    "vllm_importance_sampling_clip_max": Set("recipe.policy_loss.rollout_correction", " with a server");
    "vllm_importance_sampling_clip_min": Set("recipe.policy_loss.rollout_correction", " with a server");
    "off_policy_mask_threshold": Unless("null", "set recipe.policy_loss.rollout_correction");
    "use_bias_correction_kl": Unless("false", "set recipe.policy_loss.kl.bias_correction");
    "beta": To("algorithm.kl_coef");
    "delta": To("recipe.policy_loss.surrogate.clip.delta");
    "importance_sampling_level": To("algorithm.importance_sampling");
    "sapo_temperature_pos": To("recipe.policy_loss.surrogate.soft_gate.tau_pos");
    "sapo_temperature_neg": To("recipe.policy_loss.surrogate.soft_gate.tau_neg");
    "vespo_k_pos": To("recipe.policy_loss.surrogate.vespo.k_pos");
    "vespo_k_neg": To("recipe.policy_loss.surrogate.vespo.k_neg");
    "vespo_lambda_pos": To("recipe.policy_loss.surrogate.vespo.lambda_pos");
    "vespo_lambda_neg": To("recipe.policy_loss.surrogate.vespo.lambda_neg");
    "scale_rewards": Convert("algorithm.advantage_scale", scale);
    "mask_truncated_completions": Convert("sample_filters", truncated);
    "top_entropy_quantile": Convert("top_entropy", share);
    "entropy_coef": To("algorithm.entropy_loss_coef");
    "use_adaptive_entropy": Set("adaptive_entropy", "");
    "sync_ref_model": Set("reference_refresh", "");
    "router_aux_loss_coef": To("router_aux_loss_coef");
    "max_tool_calling_iterations": Unless("null", ENVIRONMENT);
    "learning_rate": To("optimizer.learning_rate");
    "weight_decay": To("optimizer.weight_decay");
    "adam_beta1": To("optimizer.beta1");
    "adam_beta2": To("optimizer.beta2");
    "adam_epsilon": To("optimizer.epsilon");
    "optim": Convert("optimizer.state", adamw);
    "max_grad_norm": To("max_grad_norm");
    "gradient_checkpointing": To("activation_checkpointing");
    "bf16": Convert("compute_dtype", bf16);
    "fp16": Unless("false", "set compute_dtype: f16");
    "dtype": NoMeaning("weights that train are f32; compute_dtype is that of products");
    "load_in_4bit": Set("base_weights", "");
    "load_in_8bit": Set("base_weights", "");
    "lora_dropout": Unless("0", "adapters have no dropout");
    "lora_target_parameters": Unless("null", "set adapters.target_modules");
    "lora_modules_to_save": Unless("null", "adapters alone train");
    "use_rslora": Unless("false", "set adapters.alpha");
    "use_dora": Unless("false", "adapters are LoRA");
    "num_generations_eval": To("evaluation.samples_per_prompt");
    "save_total_limit": To("checkpoint.keep");
    "load_best_model_at_end": To("checkpoint.keep_best");
    "lr_scheduler_kwargs.min_lr_rate": To("schedule.min_lr_ratio");
    "lr_scheduler_kwargs.min_lr": Set("schedule.min_lr_ratio", " to min_lr / learning_rate");
    "lr_scheduler_kwargs": Unless("null", "set schedule");
    "output_dir": To("run_dir");
    "seed": To("seed");
    "data_seed": Unless("null", "set seed");
    "shuffle_dataset": Unless("true", "prompts are shuffled");
    "report_to": NoMeaning(METRICS);
    "use_liger_kernel": NoMeaning(MEMORY);
    "per_device_eval_batch_size": To("sampling.max_batch_size");
    "model_init_kwargs": Unless("null", "set model");
    "label_smoothing_factor": Unless("0", "there are no labels");
    "neftune_noise_alpha": Unless("null", "embeddings have no noise");
    "cast_lm_head_to_fp32": NoMeaning(MEMORY);
};

/// Keys that do not change what is learned.
const IDLE: &str = "\
    logging_steps logging_strategy logging_first_step logging_dir log_level run_name log_completions log_multimodal \
    num_completions_to_print log_unique_prompts log_completions_hub_repo eval_strategy save_strategy do_train do_eval \
    push_to_hub hub_model_id hub_strategy hub_private_repo hub_token trust_remote_code model_revision \
    attn_implementation torch_dtype disable_dropout remove_unused_columns ds3_gather_for_generation \
    pad_to_multiple_of cache_implementation vllm_model_impl vllm_enable_sleep_mode vllm_server_host \
    vllm_server_port vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size \
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged \
    gradient_checkpointing_kwargs torch_empty_cache_steps torch_compile tf32 ddp_timeout deepspeed fsdp fsdp_config \
    dataloader_num_workers dataloader_pin_memory dataloader_drop_last resume_from_checkpoint save_only_model \
    save_safetensors overwrite_output_dir dataset_streaming lora_task_type bnb_4bit_quant_type \
    use_bnb_nested_quant bnb_4bit_quant_storage greater_is_better metric_for_best_model prediction_loss_only \
    local_rank disable_tqdm project trackio_space_id eval_on_start include_num_input_tokens_seen \
    average_tokens_across_devices entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target \
    ref_model_mixup_alpha ref_model_sync_steps ignore_bias_buffers use_cpu full_determinism";

/// Returns whether a file has several TRL keys, and does not name a model as our files do.
pub(super) fn is_of(document: &Document) -> bool {
    let keys = SIGNS.iter().filter(|key| document.get(key).is_some());
    document.get("model").is_none() && keys.count() >= FLAT
}

/// Translates a file for `processes` processes, with TRL's defaults.
pub(super) fn translate(document: &Document, processes: usize) -> Import {
    let mut file = Translation::new(document);
    let sizes = sizes(&mut file, processes as f64);
    algorithm(&mut file);
    schedule(&mut file);
    if file.flag("use_vllm") && file.get("vllm_server_base_url").is_some() {
        file.used("use_vllm", "rollout.engine", json!("vllm"));
    } else {
        // A policy that samples in this process has the log-probs of the trainer.
        let why = "the training process samples";
        for key in [
            "use_vllm",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ] {
            file.no_meaning(key, why);
        }
    }
    adapters(&mut file);
    file.apply(RULES, IDLE);
    file.default("sampling.max_new_tokens", json!(512));
    file.default("optimizer.learning_rate", json!(1e-6));
    file.default("optimizer.weight_decay", json!(0));
    file.default("seed", json!(42));
    let defaults = file.left_out(
        sizes.all_updates.is_none(),
        [
            OtherDefault::new("num_train_epochs", "3", "100 steps"),
            OtherDefault::new("lr_scheduler_type", "linear", "constant"),
        ],
    );
    file.finish(System::Trl, defaults, Some(sizes))
}

/// Translates the step sizes. TRL counts completions per process, and its steps are updates.
fn sizes(file: &mut Translation<'_>, processes: f64) -> Sizes {
    const MICRO_BATCH: f64 = 8.;
    let positive = |file: &mut Translation<'_>, key: &str| {
        let number = file.number(key);
        number.filter(|number| *number > 0.)
    };
    let group = positive(file, "num_generations").unwrap_or(8.);
    let passes = positive(file, "num_iterations").unwrap_or(1.);
    let micro = positive(file, "per_device_train_batch_size").unwrap_or(MICRO_BATCH);
    let accumulated = positive(file, "gradient_accumulation_steps").unwrap_or(1.);
    let drawn = positive(file, "steps_per_generation")
        .or_else(|| {
            let size = positive(file, "generation_batch_size")?;
            Some(size / (micro * processes))
        })
        .unwrap_or(accumulated);
    // A step here makes at least one update.
    let batches = drawn.max(accumulated);
    let (sampled, update) = (micro * batches * processes, micro * accumulated * processes);
    let updates = passes * (batches / accumulated);
    let prompts = sampled / group;
    let sources = [
        "steps_per_generation",
        "generation_batch_size",
        "per_device_train_batch_size",
    ];
    if prompts.fract() == 0. {
        file.decide(&sources[..2], "prompts_per_step", count(prompts))
    } else {
        for key in sources {
            file.refuse(
                key,
                format!("{sampled} completions, must be whole groups of {group}"),
            );
        }
    }
    file.decide(&["num_generations"], "num_generations", count(group));
    file.decide(&["num_iterations"], "epochs", count(passes));
    file.decide(
        &["per_device_train_batch_size"],
        "micro_batch_size",
        count(micro),
    );
    file.decide(
        &["gradient_accumulation_steps"],
        "mini_batch_size",
        count(update),
    );
    let all_updates = positive(file, "max_steps");
    match all_updates {
        Some(all) => {
            let steps = count((all / updates).ceil());
            file.used("max_steps", "max_steps", steps);
            file.no_meaning("num_train_epochs", "max_steps is set");
        }
        None => {
            file.no_meaning("max_steps", "num_train_epochs bounds the run");
            let why = format!("set max_steps to updates: prompts x epochs x {updates} / {prompts}");
            file.refuse("num_train_epochs", why);
        }
    }
    let steps = all_updates.map(|all| (all / updates).ceil());
    for (key, place) in [
        ("warmup_steps", "schedule.warmup_steps"),
        ("warmup_ratio", "schedule.warmup_steps"),
        ("eval_steps", "evaluation.every_steps"),
        ("save_steps", "checkpoint.every_steps"),
    ] {
        let Some(value) = file.number(key) else {
            continue;
        };
        // Below 1 it is a share in transformers.
        let steps = match (value < 1., steps) {
            (true, Some(steps)) => Some(share_of(value, steps)),
            (true, None) if value > 0. => None,
            _ => Some(share_of(value, 1. / updates)),
        };
        match steps {
            Some(steps) => file.used(key, place, count(steps)),
            None => file.refuse(key, "a share of max_steps, which is absent"),
        }
    }
    Sizes {
        sampled,
        update,
        updates,
        all_updates,
    }
}

/// Translates the loss and the clip. The advantage is TRL's with every loss.
fn algorithm(file: &mut Translation<'_>) {
    for preset in ["preset", "algorithm.preset"] {
        if file.get(preset).is_some() {
            for key in ["loss_type", "epsilon", "epsilon_high"] {
                file.no_meaning(key, format!("{preset} is set"));
            }
            return;
        }
    }
    let kind = file.text("loss_type").unwrap_or("dapo".to_owned());
    let length = file.number("max_completion_length").unwrap_or(512.);
    let preset = match kind.as_str() {
        "cispo" | "sapo" | "vespo" | "luspo" => {
            let advantage = json!({"name": "grpo", "epsilon": 1e-4, "single_sample": "zero"});
            file.default("recipe.advantage", advantage);
            kind.as_str()
        }
        _ => "trl",
    };
    let aggregation = match kind.as_str() {
        "grpo" => Some(json!("seq-mean-token-mean")),
        "dr_grpo" => Some(json!({"seq-mean-token-sum-norm": {"length": length}})),
        "dapo" | "bnpo" | "cispo" | "sapo" | "vespo" | "luspo" => None,
        kind => {
            let why = format!("{kind}, must be one of the losses in docs/from-trl.md");
            file.refuse("loss_type", why);
            None
        }
    };
    file.decide(&["loss_type"], "algorithm.preset", json!(preset));
    if let Some(aggregation) = aggregation {
        file.default("algorithm.loss_agg_mode", aggregation);
    }
    let low = file.number("epsilon").unwrap_or(0.2);
    let high = file.number("epsilon_high");
    match preset {
        "cispo" => {
            let place = "recipe.policy_loss.surrogate.detached_weight.ratio_max";
            let bound = high.unwrap_or(low);
            file.decide(&["epsilon_high"], place, json!(bound));
            if bound < 1. {
                let place = "recipe.policy_loss.surrogate.detached_weight.allow_max_below_one";
                file.default(place, json!(true));
            }
            file.no_meaning("epsilon", "the weight has one bound, epsilon_high");
        }
        "trl" | "luspo" if high.is_some() => {
            file.used("epsilon", "algorithm.pg_clip_low", json!(low));
            file.used("epsilon_high", "algorithm.pg_clip_high", json!(high));
            file.default("algorithm.use_pg_clip_range", json!(true));
        }
        "trl" | "luspo" => file.decide(&["epsilon"], "algorithm.pg_clip", json!(low)),
        _ => {
            file.no_meaning("epsilon", "the loss does not clip");
            file.no_meaning("epsilon_high", "the loss does not clip");
        }
    }
    if file.text("importance_sampling_level").as_deref() == Some("sequence") {
        file.default("recipe.policy_loss.allow_length_weighting", json!(true));
    }
}

/// Translates the learning rate schedule, which decays to 0 by default.
fn schedule(file: &mut Translation<'_>) {
    if file.get("schedule.decay").is_some() {
        return file.no_meaning("lr_scheduler_type", "schedule.decay is set");
    }
    let kind = file.text("lr_scheduler_type");
    file.decay("lr_scheduler_type", kind.as_deref().unwrap_or("linear"));
}

fn adapters(file: &mut Translation<'_>) {
    let keys = [
        ("lora_r", "rank", json!(16)),
        ("lora_alpha", "alpha", json!(32)),
    ];
    if !file.flag("use_peft") {
        for key in ["use_peft", "lora_r", "lora_alpha", "lora_target_modules"] {
            file.no_meaning(key, "use_peft is not true");
        }
        return;
    }
    for (key, option, default) in keys {
        let value = file.get(key).unwrap_or(default);
        file.decide(&[key], &format!("adapters.{option}"), value);
    }
    if let Some(modules) = file.get("lora_target_modules").as_ref().and_then(files) {
        let place = "adapters.target_modules";
        file.used("lora_target_modules", place, modules);
    }
    file.no_meaning("use_peft", "adapters is set");
}

fn scale(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(true) => Some(json!("group")),
        Value::Bool(false) => Some(json!("none")),
        Value::String(name) => match name.as_str() {
            "group" | "batch" | "none" => Some(value.clone()),
            _ => None,
        },
        _ => None,
    }
}

fn truncated(value: &Value) -> Option<Value> {
    Some(if value.as_bool()? {
        json!([{"kind": "not_truncated"}])
    } else {
        json!([])
    })
}

/// Converts a token share. A share of 1 means that all tokens train.
fn share(value: &Value) -> Option<Value> {
    Some(if value.as_f64()? == 1. {
        Value::Null
    } else {
        value.clone()
    })
}

/// Converts AdamW's state type.
fn adamw(value: &Value) -> Option<Value> {
    value
        .as_str()
        .filter(|name| name.starts_with("adamw_torch"))
        .map(|_| json!("f32"))
}
