//! verl files, which Hydra writes, and the overrides in its scripts.

use serde_json::{Value, json};

use super::super::document::Document;
use super::report::{OtherDefault, Sizes};
use super::rules::{
    DATA, ENVIRONMENT, MEMORY, METRICS, RANKS,
    Rule::{self, Convert, NoMeaning, Set, To, Unless},
    SMALL_STATE, dtype, files, from_minus_one, period, rules, state_memory,
};
use super::translation::{Translation, count};
use super::{Import, System};

/// The section that only verl files have.
pub(in super::super) const SIGN: &str = "actor_rollout_ref";

const ACTOR: &str = "actor_rollout_ref.actor";
const TEACHER: &str = " and recipe.distillation_loss (docs/from-verl.md)";

pub(super) const RULES: &[(&str, Rule)] = rules! {
    "data.train_files": Convert("data.train", files);
    "data.val_files": Convert("data.held_out", files);
    "data.prompt_key": Set("data.prompt", "");
    "data.max_prompt_length": To("max_prompt_tokens");
    "data.max_response_length": To("sampling.max_new_tokens");
    "data.apply_chat_template_kwargs": To("data.chat_template_kwargs");
    "data.train_max_samples": Convert("data.max_rows", period);
    "data.shuffle": Unless("true", "prompts are shuffled");
    "data.seed": To("seed");
    "data.custom_cls.path": Unless("null", "write the rows to a file");
    "data.tool_config_path": Unless("null", ENVIRONMENT);
    "data.sampler.class_path": Unless("null", "prompts are shuffled");
    "data.datagen.path": Unless("null", "write the rows to a file");
    "data": NoMeaning(DATA);
    "actor_rollout_ref.model.path": To("model.path");
    "actor_rollout_ref.model.custom_chat_template": Unless("null", "set model.chat_template to a file");
    "actor_rollout_ref.model.enable_gradient_checkpointing": To("activation_checkpointing");
    "actor_rollout_ref.model.enable_activation_offload": To("activation_offloading");
    "actor_rollout_ref.model.lora.rank": Unless("0", "set lora_rank: each linear layer has adapters of its own");
    "actor_rollout_ref.model.lora_adapter_path": Unless("null", "merge the adapters first");
    "actor_rollout_ref.model.mtp.enable": Unless("false", "one token is predicted");
    "actor_rollout_ref.model.override_config": Set("model", ": a directory with that config.json");
    "actor_rollout_ref.model": NoMeaning(MEMORY);
    "actor_rollout_ref.actor.clip_ratio": NoMeaning("verl uses clip_ratio_low and clip_ratio_high");
    "actor_rollout_ref.actor.clip_ratio_c": To("recipe.policy_loss.surrogate.clip.dual_clip");
    "actor_rollout_ref.actor.entropy_coeff": To("algorithm.entropy_loss_coef");
    "actor_rollout_ref.actor.optim.lr": To("optimizer.learning_rate");
    "actor_rollout_ref.actor.optim.weight_decay": To("optimizer.weight_decay");
    "actor_rollout_ref.actor.optim.optimizer": Unless("\"AdamW\"", "the optimizer is AdamW");
    "actor_rollout_ref.actor.optim.clip_grad": To("max_grad_norm");
    "actor_rollout_ref.actor.grad_clip": To("max_grad_norm");
    "actor_rollout_ref.actor.optim.min_lr_ratio": To("schedule.min_lr_ratio");
    "actor_rollout_ref.actor.optim.num_cycles": Unless("0.5", "a cosine has half a cycle");
    "actor_rollout_ref.actor.optim.override_optimizer_config": Unless("null", "set optimizer");
    "actor_rollout_ref.actor.optim": NoMeaning("the optimizer is AdamW");
    "actor_rollout_ref.actor.shuffle": Unless("false", "mini-batches keep the order of the step");
    "actor_rollout_ref.actor.router_replay.mode": Unless("\"disabled\"", "set router_replay");
    "actor_rollout_ref.actor.policy_loss": NoMeaning("it is an option of another loss_mode");
    "actor_rollout_ref.actor.fsdp_config.offload_policy": Convert("optimizer.memory", state_memory);
    "actor_rollout_ref.actor.fsdp_config": NoMeaning(MEMORY);
    "actor_rollout_ref.actor.megatron": NoMeaning(MEMORY);
    "actor_rollout_ref.actor.checkpoint": NoMeaning("checkpoints are in the run directory");
    "actor_rollout_ref.actor.profiler": NoMeaning(MEMORY);
    "actor_rollout_ref.rollout.temperature": To("sampling.temperature");
    "actor_rollout_ref.rollout.top_p": To("sampling.top_p");
    "actor_rollout_ref.rollout.top_k": Convert("sampling.top_k", from_minus_one);
    "actor_rollout_ref.rollout.dtype": Convert("rollout.dtype", dtype);
    "actor_rollout_ref.rollout.do_sample": Unless("true", "completions are sampled");
    "actor_rollout_ref.rollout.ignore_eos": Unless("false", "a stop token ends a completion");
    "actor_rollout_ref.rollout.multi_turn.enable": Unless("false", ENVIRONMENT);
    "actor_rollout_ref.rollout.over_sample_rate": Unless("0", "all completions train");
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": Unless("false", "set router_replay");
    "actor_rollout_ref.rollout": NoMeaning("the training process samples; rollout.engine selects a server");
    "actor_rollout_ref.ref": NoMeaning("the reference is the initial policy");
    "actor_rollout_ref.hybrid_engine": NoMeaning(MEMORY);
    "actor_rollout_ref.nccl_timeout": NoMeaning(RANKS);
    "algorithm.gamma": Unless("1.0", "set algorithm.gamma in a file of ours");
    "algorithm.lam": Unless("1.0", "a lambda needs adv_estimator: gae");
    "algorithm.use_pf_ppo": Unless("false", "set resampling");
    "algorithm.pf_ppo": NoMeaning("use_pf_ppo is off");
    "algorithm.filter_groups.enable": Set("recipe.group_filter", " and max_sampling_batches");
    "algorithm.filter_groups": NoMeaning("it is an option of filter_groups.enable");
    "algorithm.rollout_correction.rollout_is": Unless("null", "set recipe.policy_loss.rollout_correction");
    "algorithm.rollout_correction.rollout_rs": Unless("null", "set recipe.policy_loss.rollout_correction");
    "algorithm.rollout_correction.bypass_mode": Unless("false", "set old_log_probs: sampler");
    "algorithm.rollout_correction": NoMeaning("it is an option of rollout_is");
    "algorithm.kl_penalty": NoMeaning("use_kl_in_reward is off");
    "algorithm.kl_ctrl": NoMeaning("use_kl_in_reward is off");
    "distillation": Set("teacher.model", TEACHER);
    "custom_reward_function.path": Set("rewards", ", such as {kind: program} (docs/from-verl.md)");
    "custom_reward_function": NoMeaning("rewards is used");
    "reward_model.enable": Set("rewards", ": [{kind: reward_model, path: ...}]");
    "reward_model": NoMeaning("rewards is used");
    "reward_manager": NoMeaning("rewards is used");
    "reward": NoMeaning("rewards is used");
    "trainer.default_local_dir": To("run_dir");
    "trainer.test_freq": Convert("evaluation.every_steps", period);
    "trainer.save_freq": Convert("checkpoint.every_steps", period);
    "trainer.max_actor_ckpt_to_keep": To("checkpoint.keep");
    "trainer.logger": NoMeaning(METRICS);
    "trainer.nnodes": NoMeaning(RANKS);
    "trainer.n_gpus_per_node": NoMeaning(RANKS);
    "trainer.critic_warmup": Unless("0", "the critic trains from the first step");
    "trainer.val_only": Unless("false", "use grpo eval");
};

/// Keys that do not change what is learned.
const IDLE: &str = "\
    algorithm._target_ actor_rollout_ref.actor._target_ \
    global_profiler transfer_queue ray_kwargs ray_init hydra defaults trainer.balance_batch trainer.project_name \
    trainer.experiment_name trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir \
    trainer.esi_redundant_time trainer.resume_mode trainer.resume_from_path trainer.val_before_train \
    trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep \
    trainer.ray_wait_register_center_timeout trainer.device trainer.use_legacy_worker_impl trainer.profile_steps \
    trainer.controller_nsight_options trainer.worker_nsight_options actor_rollout_ref.actor.rollout_n \
    actor_rollout_ref.actor.strategy actor_rollout_ref.actor.freeze_vision_tower \
    actor_rollout_ref.actor.calculate_entropy actor_rollout_ref.actor.use_prefix_grouper \
    actor_rollout_ref.actor.use_torch_compile actor_rollout_ref.actor.data_loader_seed \
    actor_rollout_ref.actor.use_fused_kernels actor_rollout_ref.actor.ulysses_sequence_parallel_size \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking actor_rollout_ref.actor.entropy_checkpointing \
    actor_rollout_ref.actor.use_remove_padding actor_rollout_ref.actor.calculate_sum_pi_squared \
    actor_rollout_ref.actor.sum_pi_squared_checkpointing actor_rollout_ref.actor.router_replay \
    actor_rollout_ref.actor.load_weight actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.tau_neg \
    actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.kl_loss_coef";

pub(super) fn is_of(document: &Document) -> bool {
    document.get(SIGN).is_some()
}

/// Translates a file, with verl's defaults.
pub(super) fn translate(document: &Document) -> Import {
    let mut file = Translation::new(document);
    let sizes = sizes(&mut file);
    loss(&mut file);
    advantage(&mut file);
    kl(&mut file);
    optimizer(&mut file);
    evaluation(&mut file);
    adapters(&mut file);
    if file.text("data.prompt_key").as_deref() == Some("prompt") {
        file.no_meaning("data.prompt_key", "it is the default");
    }
    file.apply(RULES, IDLE);
    file.default("max_prompt_tokens", json!(512));
    file.default("sampling.max_new_tokens", json!(512));
    file.default("checkpoint.every_steps", Value::Null);
    file.default("evaluation.every_steps", Value::Null);
    if file.translated("activation_offloading") == Some(json!(true)) {
        file.default("activation_checkpointing", json!(true));
    }
    let epochs = OtherDefault::new("trainer.total_epochs", "30", "100 steps");
    let defaults = file.left_out(sizes.all_updates.is_none(), [epochs]);
    file.finish(System::Verl, defaults, Some(sizes))
}

/// Translates the step sizes. verl counts all of them in prompts, over all processes.
fn sizes(file: &mut Translation<'_>) -> Sizes {
    let key = |name: &str| format!("{ACTOR}.{name}");
    let prompts = file.number("data.train_batch_size").unwrap_or(1024.);
    let group = file.number("actor_rollout_ref.rollout.n").unwrap_or(1.);
    let mini = file.number(&key("ppo_mini_batch_size")).unwrap_or(256.);
    let passes = file.number(&key("ppo_epochs")).unwrap_or(1.);
    let updates = passes * (prompts / mini).ceil();
    for (path, place, value) in [
        (
            "data.train_batch_size".to_owned(),
            "prompts_per_step",
            prompts,
        ),
        (
            "actor_rollout_ref.rollout.n".to_owned(),
            "num_generations",
            group,
        ),
        (key("ppo_mini_batch_size"), "mini_batch_size", mini * group),
        (key("ppo_epochs"), "epochs", passes),
    ] {
        file.decide(&[&path], place, count(value));
    }
    let (tokens, micro) = (
        key("ppo_max_token_len_per_gpu"),
        key("ppo_micro_batch_size_per_gpu"),
    );
    let bounds_tokens = file.flag(&key("use_dynamic_bsz")) || file.get(&micro).is_none();
    match (bounds_tokens, file.get(&tokens)) {
        (true, Some(value)) => {
            file.used(&tokens, "micro_batch_tokens", value);
            file.no_meaning(&micro, "tokens bound a pass");
        }
        _ => {
            if let Some(value) = file.get(&micro) {
                file.used(&micro, "micro_batch_size", value);
            }
            file.no_meaning(&tokens, "use_dynamic_bsz is off");
        }
    }
    file.no_meaning(&key("use_dynamic_bsz"), "micro_batch_tokens is used");
    let why = "use ppo_micro_batch_size_per_gpu";
    file.no_meaning(&key("ppo_micro_batch_size"), why);
    let steps = file.get("trainer.total_training_steps");
    match &steps {
        Some(steps) => {
            file.used("trainer.total_training_steps", "max_steps", steps.clone());
            file.no_meaning("trainer.total_epochs", "total_training_steps is set");
        }
        None if file.get("max_steps").is_some() => {
            file.no_meaning("trainer.total_epochs", "max_steps is set");
        }
        None => file.refuse(
            "trainer.total_epochs",
            format!("set trainer.total_training_steps to prompts x epochs / {prompts}"),
        ),
    }
    let steps = steps.as_ref().and_then(Value::as_f64);
    Sizes {
        sampled: prompts * group,
        update: mini * group,
        updates,
        all_updates: steps.map(|steps| steps * updates),
    }
}

/// The surrogate and its clip.
fn loss(file: &mut Translation<'_>) {
    let key = |name: &str| format!("{ACTOR}.{name}");
    let mode = key("policy_loss.loss_mode");
    let kind = file.text(&mode).unwrap_or("vanilla".to_owned());
    let (low, high) = (key("clip_ratio_low"), key("clip_ratio_high"));
    let widths = [&low, &high].map(|path| file.number(path).unwrap_or(0.2));
    let aggregation = key("loss_agg_mode");
    let surrogate = "recipe.policy_loss.surrogate";
    let preset = match kind.as_str() {
        "vanilla" => "verl",
        "geo_mean" => "gmpo",
        "gspo" | "cispo" | "sapo" | "gpg" => kind.as_str(),
        kind => {
            file.refuse(&mode, format!("{kind} has no counterpart"));
            "verl"
        }
    };
    file.decide(&[&mode], "algorithm.preset", json!(preset));
    match preset {
        "verl" | "gspo" => {
            file.decide(&[&low], "algorithm.pg_clip_low", json!(widths[0]));
            file.decide(&[&high], "algorithm.pg_clip_high", json!(widths[1]));
            file.default("algorithm.use_pg_clip_range", json!(true));
        }
        "cispo" => {
            let place = format!("{surrogate}.detached_weight");
            file.decide(
                &[&low],
                &format!("{place}.ratio_min"),
                json!(1. - widths[0]),
            );
            file.decide(
                &[&high],
                &format!("{place}.ratio_max"),
                json!(1. + widths[1]),
            );
        }
        "sapo" => {
            for (name, default) in [("tau_pos", 1.), ("tau_neg", 1.05)] {
                let path = key(name);
                file.decide_number(&path, &format!("{surrogate}.soft_gate.{name}"), default);
            }
        }
        _ => {
            for path in [&low, &high] {
                if file.get(path).is_some() {
                    file.refuse(path, format!("the preset {preset} has its own clip"));
                }
            }
        }
    }
    match file.get(&aggregation) {
        Some(_) if matches!(preset, "gspo" | "gmpo" | "gpg") => {
            file.no_meaning(&aggregation, format!("{kind} has its own aggregation"));
        }
        Some(value) => {
            let length = file.number(&key("loss_scale_factor"));
            match (value.as_str(), length) {
                (Some(name @ "seq-mean-token-sum-norm"), Some(length)) => file.used(
                    &aggregation,
                    "algorithm.loss_agg_mode",
                    json!({name: {"length": length}}),
                ),
                _ => file.used(&aggregation, "algorithm.loss_agg_mode", value),
            }
        }
        None => {}
    }
    if preset != "verl" {
        // The dual clip is one of the clipped loss.
        file.no_meaning(&key("clip_ratio_c"), format!("{kind} has no dual clip"));
    }
}

/// Translates the advantage, which the estimator decides for every loss.
fn advantage(file: &mut Translation<'_>) {
    let path = "algorithm.adv_estimator";
    let kind = file.text(path).unwrap_or("gae".to_owned());
    match kind.as_str() {
        "grpo" => {
            let subtracts = file.flag("algorithm.use_kl_in_reward");
            let mut advantage = json!({"name": "grpo", "epsilon": 1e-6, "single_sample": "raw"});
            if file.get("algorithm.norm_adv_by_std_in_grpo") == Some(json!(false)) {
                advantage["scale"] = json!("none");
                let place = "recipe.advantage.scale";
                file.no_meaning(
                    "algorithm.norm_adv_by_std_in_grpo",
                    format!("{place} is none"),
                );
            }
            if subtracts {
                // verl subtracts the KL before it normalizes rewards in their group.
                let coef = file.number("algorithm.kl_ctrl.kl_coef").unwrap_or(0.001);
                let estimator = file.text("algorithm.kl_penalty");
                let estimator = estimator.unwrap_or("kl".to_owned());
                advantage["kl_penalty"] = json!({"coef": coef, "kl": {"estimator": estimator}});
                let place = "recipe.advantage.kl_penalty";
                for key in ["use_kl_in_reward", "kl_ctrl.kl_coef", "kl_penalty"] {
                    file.no_meaning(&format!("algorithm.{key}"), format!("{place} is set"));
                }
                if file.text("algorithm.kl_ctrl.type").as_deref() == Some("adaptive") {
                    let why = "the coefficient of a KL before the normalization is fixed";
                    file.refuse("algorithm.kl_ctrl.type", why);
                }
            }
            file.used(path, "recipe.advantage", advantage);
        }
        "gae" => {
            file.decide(&[path], "algorithm.adv_estimator", json!("gae"));
            for (key, place) in [("gamma", "algorithm.gamma"), ("lam", "algorithm.lambd")] {
                let key = format!("algorithm.{key}");
                file.decide_number(&key, place, 1.);
            }
            for (key, place, default) in [
                ("critic.cliprange_value", "algorithm.value_clip", 0.5),
                ("critic.optim.lr", "critic.optimizer.learning_rate", 1e-5),
            ] {
                file.decide_number(key, place, default);
            }
        }
        "rloo"
        | "reinforce_plus_plus"
        | "reinforce_plus_plus_baseline"
        | "remax"
        | "opo"
        | "gpg"
        | "optimal_token_baseline" => {
            file.used(path, "recipe.advantage", json!({"name": kind}));
        }
        kind => file.refuse(path, format!("{kind} has no counterpart")),
    }
    let why = match kind.as_str() {
        "gae" => "the critic has the settings of the policy",
        _ => "there is no critic",
    };
    file.section_without_meaning("critic", why);
    if kind != "grpo" {
        let why = format!("{kind} does not divide by a deviation of the group");
        file.no_meaning("algorithm.norm_adv_by_std_in_grpo", why);
    }
    let why = "it is the default";
    file.no_meaning("algorithm.norm_adv_by_std_in_grpo", why);
}

/// Translates the KL in the loss, and in the rewards for estimators other than GRPO.
fn kl(file: &mut Translation<'_>) {
    let key = |name: &str| format!("{ACTOR}.{name}");
    let switch = key("use_kl_loss");
    if file.flag(&switch) {
        file.used(&switch, "algorithm.use_kl_loss", json!(true));
        let coef = key("kl_loss_coef");
        file.decide_number(&coef, "algorithm.kl_loss_coef", 0.001);
        let kind = key("kl_loss_type");
        match file.text(&kind).as_deref() {
            None => {}
            Some(name @ ("kl" | "k1" | "mse" | "k2" | "low_var_kl" | "k3" | "abs")) => {
                let place = "recipe.policy_loss.kl.kl.estimator";
                file.used(&kind, place, json!(name));
            }
            Some(name) => file.refuse(&kind, format!("{name} has no counterpart")),
        }
    } else {
        file.no_meaning(&switch, "it is off");
    }
    let switch = "algorithm.use_kl_in_reward";
    if file.flag(switch) && file.text("algorithm.adv_estimator").as_deref() != Some("grpo") {
        file.used(switch, "algorithm.add_token_level_kl", json!(true));
        let coef = "algorithm.kl_ctrl.kl_coef";
        file.decide_number(coef, "algorithm.init_kl_coef", 0.001);
        if let Some(estimator) = file.get("algorithm.kl_penalty") {
            file.used("algorithm.kl_penalty", "algorithm.kl_penalty", estimator);
        }
        if file.text("algorithm.kl_ctrl.type").as_deref() == Some("adaptive") {
            for (name, place, default) in [
                ("target_kl", "algorithm.target_kl", 0.1),
                ("horizon", "algorithm.kl_horizon", 10_000.),
            ] {
                let path = format!("algorithm.kl_ctrl.{name}");
                file.decide_number(&path, place, default);
            }
            let why = "algorithm.target_kl is set";
            file.no_meaning("algorithm.kl_ctrl.type", why);
        }
    } else {
        file.no_meaning(switch, "it is off");
    }
}

fn optimizer(file: &mut Translation<'_>) {
    let key = |name: &str| format!("{ACTOR}.optim.{name}");
    let betas = key("betas");
    if let Some(Value::Array(pair)) = file.get(&betas)
        && let [beta1, beta2] = pair.as_slice()
    {
        let (beta1, beta2) = (beta1.clone(), beta2.clone());
        file.default("optimizer.beta1", beta1);
        file.used(&betas, "optimizer.beta2", beta2);
    }
    let steps = file.translated("max_steps");
    let (warmup, share) = (key("lr_warmup_steps"), key("lr_warmup_steps_ratio"));
    match (file.number(&warmup), file.number(&share)) {
        (Some(value), _) if value >= 0. => {
            file.used(&warmup, "schedule.warmup_steps", count(value));
            file.no_meaning(&share, "lr_warmup_steps is set");
        }
        (_, Some(ratio)) if ratio > 0. => match steps.as_ref().and_then(Value::as_f64) {
            Some(steps) => {
                let warm = count((ratio * steps).floor());
                file.used(&share, "schedule.warmup_steps", warm);
            }
            None => file.refuse(&share, "a share of the steps, whose number is not known"),
        },
        _ => {}
    }
    for path in [&warmup, &share] {
        file.no_meaning(path, "it is off");
    }
    for name in ["lr_scheduler_type", "warmup_style"] {
        let path = key(name);
        match file.text(&path).as_deref() {
            None => {}
            Some("constant") => file.no_meaning(&path, "it is the default"),
            Some("cosine") => {
                file.used(&path, "schedule.decay", json!("cosine"));
                match &steps {
                    Some(steps) => file.default("schedule.decay_until", steps.clone()),
                    None => file.refuse(&path, "set schedule.decay_until"),
                }
            }
            Some(kind) => file.refuse(&path, format!("{kind}, must be constant or cosine")),
        }
    }
}

/// Translates the evaluation sampler, which is greedy by default.
fn evaluation(file: &mut Translation<'_>) {
    let key = |name: &str| format!("actor_rollout_ref.rollout.val_kwargs.{name}");
    let samples = key("n");
    if let Some(value) = file.get(&samples) {
        file.used(&samples, "evaluation.samples_per_prompt", value);
    }
    if !file.flag(&key("do_sample")) {
        file.decide(
            &[&key("do_sample")],
            "evaluation.sampler.greedy",
            json!(true),
        );
        for name in ["temperature", "top_p", "top_k"] {
            file.no_meaning(&key(name), "val_kwargs.do_sample is false");
        }
        return;
    }
    file.no_meaning(&key("do_sample"), "evaluations sample");
    for name in ["temperature", "top_p", "top_k"] {
        let path = key(name);
        if let Some(value) = file.get(&path).as_ref().and_then(|value| match name {
            "top_k" => from_minus_one(value),
            _ => Some(value.clone()),
        }) {
            file.used(&path, &format!("evaluation.sampler.{name}"), value);
        }
    }
}

fn adapters(file: &mut Translation<'_>) {
    let key = |name: &str| format!("actor_rollout_ref.model.{name}");
    let rank = key("lora_rank");
    if file.number(&rank).unwrap_or(0.) > 0. {
        file.no_meaning(&format!("{ACTOR}.fsdp_config.offload_policy"), SMALL_STATE);
        let value = file.get(&rank).unwrap_or_default();
        file.used(&rank, "adapters.rank", value);
        let alpha = key("lora_alpha");
        file.decide_number(&alpha, "adapters.alpha", 16.);
        let modules = key("target_modules");
        if let Some(value) = file.get(&modules).as_ref().and_then(files) {
            file.used(&modules, "adapters.target_modules", value);
        }
        let excluded = key("exclude_modules");
        if file.get(&excluded).is_some() {
            file.refuse(&excluded, "set target_modules");
        }
        let merge = key("lora.merge");
        if let Some(value) = file.get(&merge) {
            file.used(&merge, "rollout.merge_adapters", value);
        }
    }
}
