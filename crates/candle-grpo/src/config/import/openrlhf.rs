//! OpenRLHF's `train_ppo_ray` options, in a script or a file.

use serde_json::{Value, json};

use super::super::document::Document;
use super::report::{OtherDefault, Sizes};
use super::rules::{
    DATA, ENVIRONMENT, MEMORY, METRICS, RANKS,
    Rule::{self, Convert, NoMeaning, Set, To, Unless},
    SMALL_STATE, dtype, files, period, rules, state_memory,
};
use super::translation::{Translation, count};
use super::{Import, System};

/// Options that no other file has.
const SIGNS: [&str; 4] = [
    "algo.advantage.estimator",
    "actor.model_name_or_path",
    "rollout.n_samples_per_prompt",
    "rollout.batch_size",
];

/// Options from versions before the sections, with today's names.
const OLD: &[(&str, &str)] = &[
    ("pretrain", "actor.model_name_or_path"),
    ("reward_pretrain", "reward.model_name_or_path"),
    ("remote_rm_url", "reward.remote_url"),
    ("prompt_data", "data.prompt_dataset"),
    ("input_key", "data.input_key"),
    ("label_key", "data.label_key"),
    ("apply_chat_template", "data.apply_chat_template"),
    ("rollout_batch_size", "rollout.batch_size"),
    ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
    ("micro_rollout_batch_size", "rollout.micro_batch_size"),
    ("train_batch_size", "train.batch_size"),
    ("micro_train_batch_size", "train.micro_batch_size"),
    ("max_epochs", "train.max_epochs"),
    ("num_episodes", "train.num_episodes"),
    ("generate_max_len", "rollout.max_new_tokens"),
    ("advantage_estimator", "algo.advantage.estimator"),
    ("init_kl_coef", "algo.kl.init_coef"),
    ("kl_estimator", "algo.kl.estimator"),
    ("use_kl_loss", "algo.kl.use_loss"),
    ("actor_learning_rate", "actor.adam.lr"),
    ("critic_learning_rate", "critic.adam.lr"),
    ("eps_clip", "actor.eps_clip"),
    ("adam_offload", "ds.adam_offload"),
    ("save_path", "ckpt.output_dir"),
    ("save_steps", "ckpt.save_steps"),
    ("gamma", "algo.advantage.gamma"),
    ("lambd", "algo.advantage.lambd"),
];

/// The number of such options that make an OpenRLHF file; fewer are a slip.
const FLAT: usize = 4;

pub(super) const RULES: &[(&str, Rule)] = rules! {
    "actor.model_name_or_path": To("model.path");
    "reward.model_name_or_path": Convert("rewards", reward_model);
    "reward.remote_url": Set("rewards", ", such as {kind: program} (docs/configuration.md)");
    "reward.normalize_enable": Unless("false", "set recipe.reward_shaping.norm");
    "reward.stop_properly_penalty_coef": Unless("null", "completions that are cut off have their reward");
    "reward.overlong_penalty_factor": NoMeaning("overlong_buffer_len is absent");
    "reward": NoMeaning(MEMORY);
    "data.prompt_dataset": Convert("data.train", files);
    "data.prompt_probs": Set("data.weights", "");
    "data.prompt_split": Unless("\"train\"", "name the file of the split");
    "data.input_key": Convert("data.prompt", column);
    "data.input_template": Set("data.prompt", "");
    "data.apply_chat_template": To("data.chat");
    "data.max_samples": To("data.max_rows");
    "data.max_images_per_prompt": Unless("0", "prompts are texts");
    "data": NoMeaning(DATA);
    "eval.dataset": Convert("data.held_out", files);
    "eval.steps": Convert("evaluation.every_steps", period);
    "eval.temperature": To("evaluation.sampler.temperature");
    "eval.n_samples_per_prompt": To("evaluation.samples_per_prompt");
    "eval": NoMeaning(DATA);
    "rollout.temperature": To("sampling.temperature");
    "rollout.top_p": To("sampling.top_p");
    "rollout.vllm_generate_batch_size": Unless("null", "a step samples rollout.batch_size prompts");
    "rollout": NoMeaning(MEMORY);
    "train.seed": To("seed");
    "train.enable_ema": Unless("false", "weights are not averaged");
    "train.async_enable": Set("rollout.max_staleness", "");
    "train.partial_rollout_enable": Set("rollout.in_flight_updates", "");
    "train.agent_func_path": Unless("null", ENVIRONMENT);
    "train": NoMeaning(MEMORY);
    "actor.adam.lr": To("optimizer.learning_rate");
    "actor.adam.eps": To("optimizer.epsilon");
    "actor.adam.weight_decay": To("optimizer.weight_decay");
    "actor.optim": Unless("\"adam\"", "the optimizer is AdamW");
    "actor.muon": NoMeaning("the optimizer is AdamW");
    "actor.max_norm": To("max_grad_norm");
    "actor.min_lr_ratio": To("schedule.min_lr_ratio");
    "actor.eps_clip": To("algorithm.pg_clip");
    "actor.dual_clip": To("recipe.policy_loss.surrogate.clip.dual_clip");
    "actor.policy_loss_type": Unless("\"ppo\"", "use a file of ours with algorithm.preset: gspo");
    "actor.entropy_coef": To("algorithm.entropy_loss_coef");
    "actor.aux_loss_coef": To("router_aux_loss_coef");
    "actor.gradient_checkpointing_enable": To("activation_checkpointing");
    "actor.gradient_checkpointing_reentrant": NoMeaning(MEMORY);
    "actor.freeze_visual_encoder": NoMeaning(DATA);
    "actor.num_nodes": NoMeaning(RANKS);
    "actor.num_gpus_per_node": NoMeaning(RANKS);
    "algo.advantage.is_correction_enable": NoMeaning("the training process samples");
    "algo.advantage.is_correction_threshold": NoMeaning("the training process samples");
    "algo.advantage.is_correction_type": NoMeaning("the training process samples");
    "algo.advantage.no_std_norm": Unless("false", "the estimator does not divide by a deviation");
    "algo.kl.target": Unless("null", "the coefficient is fixed");
    "algo.kl.horizon": NoMeaning("algo.kl.target is absent");
    "algo.dynamic_filtering_range": NoMeaning("algo.dynamic_filtering_enable is off");
    "algo.dynamic_filtering_enable": NoMeaning("it is off");
    "ds.param_dtype": Convert("compute_dtype", dtype);
    "ds.load_in_4bit": Set("base_weights", "");
    "ds.adam_offload": Convert("optimizer.memory", state_memory);
    "ds.lora.rank": NoMeaning("it is 0");
    "ds.lora.alpha": NoMeaning("ds.lora.rank is 0");
    "ds.lora.target_modules": NoMeaning("ds.lora.rank is 0");
    "ds.lora.dropout": Unless("0", "adapters have no dropout");
    "ds": NoMeaning(MEMORY);
    "ckpt.output_dir": To("run_dir");
    "ckpt.save_steps": Convert("checkpoint.every_steps", period);
    "ckpt.max_num": To("checkpoint.keep");
    "ckpt": NoMeaning("checkpoints are in the run directory");
    "vllm": NoMeaning("the training process samples; rollout.engine selects a server");
    "ref": NoMeaning("the reference is the initial policy");
    "logger": NoMeaning(METRICS);
};

const IDLE: &str = "local_rank use_ms";

pub(super) fn is_of(document: &Document) -> bool {
    let old = OLD.iter().filter(|(key, _)| document.get(key).is_some());
    SIGNS.iter().any(|key| document.get(key).is_some())
        || document.get("n_samples_per_prompt").is_some() && old.count() >= FLAT
}

/// Returns whether `name` is an option from a version before the sections.
pub(super) fn is_old(name: &str) -> bool {
    OLD.iter().any(|(old, _)| *old == name)
}

/// Translates a file, with OpenRLHF's defaults.
pub(super) fn translate(document: &Document) -> Import {
    let document = renamed(document);
    let mut file = Translation::new(&document);
    let sizes = sizes(&mut file);
    algorithm(&mut file);
    optimizer(&mut file);
    lengths(&mut file);
    file.apply(RULES, IDLE);
    let defaults = file.left_out(
        sizes.all_updates.is_none(),
        [
            OtherDefault::new("train.num_episodes", "1 pass over the prompts", "100 steps"),
            OtherDefault::new(
                "actor.lr_scheduler",
                "cosine_with_min_lr, with a warm-up of 3%",
                "constant",
            ),
        ],
    );
    file.finish(System::OpenRlhf, defaults, Some(sizes))
}

/// Returns the document with today's names.
fn renamed(document: &Document) -> Document {
    let mut renamed = document.clone();
    for (old, new) in OLD {
        if let Some(value) = document.get(old) {
            let line = document.line_of(old);
            renamed.remove(old);
            renamed.insert(new, value.clone(), old, line);
        }
    }
    renamed
}

/// Translates the step sizes. A sampling batch counts prompts, and a training batch completions.
fn sizes(file: &mut Translation<'_>) -> Sizes {
    let prompts = file.number("rollout.batch_size").unwrap_or(1024.);
    let group = file.number("rollout.n_samples_per_prompt").unwrap_or(1.);
    let update = file.number("train.batch_size").unwrap_or(128.);
    let passes = file.number("train.max_epochs").unwrap_or(1.);
    for (path, place, value) in [
        ("rollout.batch_size", "prompts_per_step", prompts),
        ("rollout.n_samples_per_prompt", "num_generations", group),
        ("train.batch_size", "mini_batch_size", update),
        ("train.max_epochs", "epochs", passes),
    ] {
        file.decide(&[path], place, count(value));
    }
    let tokens = "train.max_tokens_per_gpu";
    if file.flag("train.dynamic_batch_enable") {
        let value = file.number(tokens).unwrap_or(16192.);
        file.decide(&[tokens], "micro_batch_tokens", count(value));
        file.no_meaning("train.micro_batch_size", "tokens bound a pass");
    } else if let Some(value) = file.get("train.micro_batch_size") {
        file.used("train.micro_batch_size", "micro_batch_size", value);
    }
    let steps = file.number("max_steps");
    match steps {
        Some(steps) => {
            file.used("max_steps", "max_steps", count(steps));
            file.no_meaning("train.num_episodes", "max_steps is set");
        }
        None => file.refuse(
            "train.num_episodes",
            format!("set max_steps to prompts x episodes / {prompts}"),
        ),
    }
    let sampled = prompts * group;
    let updates = passes * (sampled / update).ceil();
    Sizes {
        sampled,
        update,
        updates,
        all_updates: steps.map(|steps| steps * updates),
    }
}

fn algorithm(file: &mut Translation<'_>) {
    let path = "algo.advantage.estimator";
    let kind = file.text(path).unwrap_or("gae".to_owned());
    let preset = match kind.as_str() {
        "group_norm" | "gae" => "openrlhf",
        "reinforce" => "reinforce_plus_plus",
        "reinforce_baseline" => "reinforce_plus_plus_baseline",
        "rloo" | "dr_grpo" => kind.as_str(),
        kind => {
            file.refuse(path, format!("{kind} has no counterpart"));
            "openrlhf"
        }
    };
    file.decide(&[path], "algorithm.preset", json!(preset));
    file.default("recipe.policy_loss.aggregation", json!("token-mean"));
    let gamma = file.number("algo.advantage.gamma").unwrap_or(1.);
    if kind == "gae" || gamma != 1. {
        file.decide(&["algo.advantage.gamma"], "algorithm.gamma", json!(gamma));
    }
    file.no_meaning("algo.advantage.gamma", "it is the default");
    if kind == "gae" {
        file.default("algorithm.adv_estimator", json!("gae"));
        for (key, place, default) in [
            ("algo.advantage.lambd", "algorithm.lambd", 1.),
            ("critic.value_clip", "algorithm.value_clip", 0.5),
            ("critic.adam.lr", "critic.optimizer.learning_rate", 9e-6),
        ] {
            file.decide_number(key, place, default);
        }
        file.section_without_meaning("critic", "the critic has the settings of the policy");
    } else {
        file.no_meaning("algo.advantage.lambd", "it is one of gae");
        file.section_without_meaning("critic", "there is no critic");
    }
    if kind == "group_norm" && file.flag("algo.advantage.no_std_norm") {
        let place = "algorithm.advantage_scale";
        file.used("algo.advantage.no_std_norm", place, json!("none"));
    }
    kl(file, &kind);
    let both = "actor.eps_clip_low_high";
    if let Some(Value::Array(pair)) = file.get(both)
        && let [low, high] = pair.as_slice()
    {
        file.default("algorithm.pg_clip_low", low.clone());
        file.default("algorithm.use_pg_clip_range", json!(true));
        file.used(both, "algorithm.pg_clip_high", high.clone());
        file.no_meaning("actor.eps_clip", "eps_clip_low_high is set");
    }
    let range = file.get("reward.clip_range").unwrap_or(json!([-10, 10]));
    let place = "recipe.reward_shaping.clip_range";
    file.decide(&["reward.clip_range"], place, range);
    if file.flag("algo.dynamic_filtering_enable") {
        let range = file.get("algo.dynamic_filtering_range");
        let range = range.unwrap_or(json!([0, 1]));
        let filter = json!({"mean_above": range[0], "mean_below": range[1], "spread": false});
        let place = "recipe.group_filter";
        file.used("algo.dynamic_filtering_enable", place, filter);
        file.no_meaning("algo.dynamic_filtering_range", format!("{place} is set"));
    }
}

/// The KL, which is in the loss or in the rewards.
fn kl(file: &mut Translation<'_>, estimator: &str) {
    let coef = file.number("algo.kl.init_coef").unwrap_or(0.01);
    let kind = file.get("algo.kl.estimator").unwrap_or(json!("k1"));
    let coefs = ["algo.kl.init_coef"];
    if file.flag("algo.kl.use_loss") {
        if matches!(estimator, "group_norm" | "reinforce") {
            file.default("recipe.advantage.kl_penalty", Value::Null);
        }
        file.used("algo.kl.use_loss", "algorithm.use_kl_loss", json!(true));
        file.decide(&coefs, "algorithm.kl_loss_coef", json!(coef));
        let place = "recipe.policy_loss.kl.kl.estimator";
        file.decide(&["algo.kl.estimator"], place, kind);
    } else if matches!(estimator, "group_norm" | "reinforce") {
        // OpenRLHF bounds the estimate, and not the ratio.
        let kl = json!({"estimator": kind, "log_ratio_clamp": null, "value_clamp": 10.});
        let keys = ["algo.kl.init_coef", "algo.kl.estimator"];
        let place = "recipe.advantage.kl_penalty";
        file.decide(&keys, place, json!({"coef": coef, "kl": kl}));
    } else if coef != 0. {
        file.default("algorithm.add_token_level_kl", json!(true));
        file.decide(&coefs, "algorithm.init_kl_coef", json!(coef));
        file.decide(&["algo.kl.estimator"], "algorithm.kl_penalty", kind);
    }
    for key in ["algo.kl.use_loss", "algo.kl.init_coef", "algo.kl.estimator"] {
        file.no_meaning(key, "it is off");
    }
}

fn optimizer(file: &mut Translation<'_>) {
    file.default("optimizer.weight_decay", json!(0));
    let betas = file.get("actor.adam.betas").unwrap_or(json!([0.9, 0.95]));
    file.default("optimizer.beta1", betas[0].clone());
    file.decide(&["actor.adam.betas"], "optimizer.beta2", betas[1].clone());
    let path = "actor.lr_scheduler";
    let kind = file.text(path);
    let kind = kind.unwrap_or("cosine_with_min_lr".to_owned());
    file.decay(path, &kind);
    let steps = file.number("max_steps");
    if kind == "cosine_with_min_lr" && steps.is_some() {
        file.default("schedule.min_lr_ratio", json!(0.1));
    }
    let path = "actor.lr_warmup_ratio";
    let ratio = file.number(path).unwrap_or(0.03);
    match steps {
        Some(steps) => file.decide(
            &[path],
            "schedule.warmup_steps",
            count((ratio * steps).ceil()),
        ),
        None => file.refuse(path, "set max_steps, of which it is a share"),
    }
}

/// Translates prompt and completion lengths. `data.max_len` bounds their sum.
fn lengths(file: &mut Translation<'_>) {
    let sum = file.number("data.max_len").unwrap_or(2048.);
    let completion = file.number("rollout.max_new_tokens");
    let keys = ["rollout.max_new_tokens", "data.max_len"];
    let length = completion.unwrap_or(sum);
    file.decide(
        if completion.is_some() {
            &keys[..1]
        } else {
            &keys[1..]
        },
        "sampling.max_new_tokens",
        count(length),
    );
    let prompt = match completion {
        Some(completion) => (sum - completion).max(1.),
        None => sum,
    };
    file.decide(&keys[1..], "max_prompt_tokens", count(prompt));
    if let Some(buffer) = file.get("reward.overlong_buffer_len") {
        let factor = file.number("reward.overlong_penalty_factor").unwrap_or(1.);
        let penalty = json!({"max_length": count(length), "buffer": buffer, "factor": factor});
        let place = "recipe.overlong";
        file.used("reward.overlong_buffer_len", place, penalty);
    }
    if file.number("ds.lora.rank").unwrap_or(0.) > 0. {
        file.no_meaning("ds.adam_offload", SMALL_STATE);
        for (key, default) in [("rank", json!(0)), ("alpha", json!(16))] {
            let path = format!("ds.lora.{key}");
            let value = file.get(&path).unwrap_or(default);
            file.decide(&[&path], &format!("adapters.{key}"), value);
        }
        let path = "ds.lora.target_modules";
        if let Some(modules) = file.get(path).as_ref().and_then(files) {
            file.used(path, "adapters.target_modules", modules);
        }
    }
}

fn reward_model(value: &Value) -> Option<Value> {
    Some(json!([{"kind": "reward_model", "path": value.as_str()?}]))
}

/// Converts a column name to a prompt template. Message columns are found by name.
fn column(value: &Value) -> Option<Value> {
    Some(match value.as_str()? {
        "prompt" | "messages" => Value::Null,
        name => json!(format!("{{{name}}}")),
    })
}
