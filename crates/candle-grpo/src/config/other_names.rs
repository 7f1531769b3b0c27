//! The names that other trainers have for keys of this program.

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
    use serde_json::Value;

    use crate::config::algorithm::AlgorithmConfig;
    use crate::config::{Document, RunConfig};
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_name_leads_to_a_key_that_exists() {
        let all = all_keys();
        let mut seen = BTreeSet::new();
        let ambiguous = AMBIGUOUS.iter().map(|(name, _)| name);
        for name in NAMES.iter().map(|(name, _)| name).chain(ambiguous) {
            assert!(seen.insert(name), "{name} is there twice");
        }
        let ambiguous = AMBIGUOUS.iter().flat_map(|(_, meanings)| meanings);
        for (name, path) in NAMES.iter().chain(ambiguous) {
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
