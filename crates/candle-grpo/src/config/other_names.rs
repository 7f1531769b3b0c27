//! Other trainers' names for our keys.

/// Key names in TRL, verl, OpenRLHF or ROLL, with our paths, for keys that an import does not
/// simply move.
pub(super) const NAMES: &[(&str, &str)] = &[
    // Sizes of a step.
    ("rollout_batch_size", "prompts_per_step"),
    ("num_return_sequences_in_group", "num_generations"),
    ("prompt_length", "max_prompt_tokens"),
    ("response_length", "sampling.max_new_tokens"),
    ("ppo_epochs", "epochs"),
    ("group_size", "num_generations"),
    ("n", "num_generations"),
    ("n_samples_per_prompt", "num_generations"),
    ("num_return_sequences", "num_generations"),
    ("generation_batch_size", "prompts_per_step"),
    ("batch_size", "prompts_per_step"),
    ("gen_batch_size", "prompts_per_step"),
    ("num_iterations", "epochs"),
    ("max_epochs", "epochs"),
    ("generate_max_len", "sampling.max_new_tokens"),
    ("max_seq_length", "sampling.max_new_tokens"),
    ("prompt_max_len", "max_prompt_tokens"),
    ("per_device_train_batch_size", "micro_batch_size"),
    ("gradient_accumulation_steps", "mini_batch_size"),
    ("micro_train_batch_size", "micro_batch_size"),
    ("ppo_micro_batch_size", "micro_batch_size"),
    ("ppo_micro_batch_size_per_gpu", "micro_batch_size"),
    ("ppo_max_token_len_per_gpu", "micro_batch_tokens"),
    ("train_max_tokens_per_gpu", "micro_batch_tokens"),
    ("max_tokens_per_microbatch_in_train", "micro_batch_tokens"),
    ("ppo_mini_batch_size", "mini_batch_size"),
    ("steps_per_generation", "prompts_per_step"),
    ("micro_rollout_batch_size", "sampling.max_batch_size"),
    ("max_num_seqs", "sampling.max_batch_size"),
    ("num_train_epochs", "max_steps"),
    ("num_episodes", "max_steps"),
    ("total_epochs", "max_steps"),
    ("total_training_steps", "max_steps"),
    // Rewards and advantages.
    ("reward_model", "rewards"),
    ("custom_reward_function", "rewards"),
    ("remote_rm_url", "rewards"),
    ("advantage_estimator", "recipe.advantage.name"),
    ("scale_rewards", "recipe.advantage.scale"),
    ("norm_adv_by_std_in_grpo", "recipe.advantage.scale"),
    ("no_advantage_std_norm", "recipe.advantage.scale"),
    ("reward_clip_range", "recipe.reward_shaping.clip"),
    ("lam", "recipe.advantage.lambda"),
    ("gae_lambda", "recipe.advantage.lambda"),
    ("filter_groups", "recipe.group_filter"),
    ("dynamic_filtering", "recipe.group_filter"),
    ("overlong_buffer", "recipe.overlong"),
    // The loss.
    ("kl_coeff", "recipe.policy_loss.kl.coef"),
    ("kl_beta", "recipe.policy_loss.kl.coef"),
    ("kl_estimator", "recipe.policy_loss.kl.kl.estimator"),
    ("kl_loss_type", "recipe.policy_loss.kl.kl.estimator"),
    ("use_kl_in_reward", "recipe.advantage.kl_penalty"),
    ("kl_target", "reward_kl"),
    ("horizon", "reward_kl"),
    ("loss_type", "recipe.policy_loss.aggregation"),
    ("policy_loss_type", "preset"),
    ("loss_mode", "preset"),
    (
        "importance_sampling_level",
        "recipe.policy_loss.importance_level",
    ),
    ("epsilon", "recipe.policy_loss.surrogate.clip.low"),
    ("eps_clip", "recipe.policy_loss.surrogate.clip.low"),
    ("clip_ratio", "recipe.policy_loss.surrogate.clip.low"),
    ("cliprange", "recipe.policy_loss.surrogate.clip.low"),
    ("epsilon_low", "recipe.policy_loss.surrogate.clip.low"),
    ("clip_ratio_low", "recipe.policy_loss.surrogate.clip.low"),
    ("epsilon_high", "recipe.policy_loss.surrogate.clip.high"),
    ("clip_ratio_high", "recipe.policy_loss.surrogate.clip.high"),
    (
        "eps_clip_low_high",
        "recipe.policy_loss.surrogate.clip.high",
    ),
    ("delta", "recipe.policy_loss.surrogate"),
    ("clip_ratio_c", "recipe.policy_loss.surrogate"),
    ("dual_clip", "recipe.policy_loss.surrogate"),
    ("critic_learning_rate", "critic"),
    ("freezing_actor_steps", "critic"),
    ("critic_warmup", "critic"),
    ("cliprange_value", "critic"),
    ("value_clip_range", "critic"),
    ("entropy_coeff", "recipe.policy_loss.entropy_coef"),
    ("overlong_filter", "sample_filters"),
    ("rollout_is", "recipe.policy_loss.rollout_correction"),
    // Distillation.
    ("teacher_model", "teacher.model"),
    ("teacher_model_name_or_path", "teacher.model"),
    ("use_teacher_server", "teacher.server"),
    ("teacher_model_server_url", "teacher.server.base_url"),
    ("loss_top_k", "recipe.distillation_loss.support"),
    ("topk", "recipe.distillation_loss.support"),
    ("loss_add_tail", "recipe.distillation_loss.tail"),
    ("jsd_beta", "recipe.distillation_loss.beta"),
    ("distillation_loss_coef", "recipe.distillation_loss.coef"),
    ("loss_max_clamp", "recipe.distillation_loss.value_clamp"),
    (
        "log_prob_min_clamp",
        "recipe.distillation_loss.log_prob_floor",
    ),
    // Engines.
    ("use_vllm", "rollout.engine"),
    ("vllm_mode", "rollout.engine"),
    ("max_inflight_tasks", "rollout.max_inflight"),
    ("async_generation_ratio", "rollout.max_staleness"),
    ("vllm_enable_sleep_mode", "rollout.sleep_mode"),
    ("free_cache_engine", "rollout.sleep_mode"),
    ("trigger_parameter_sync_step", "rollout.weight_sync_steps"),
    ("staleness_threshold", "rollout.max_staleness"),
    ("partial_rollout", "rollout.partial"),
    ("over_sampling_batch_size", "rollout.prompts_in_flight"),
    ("max_off_policy_steps", "rollout.max_staleness"),
    // Optimizer and schedule.
    ("optim", "optimizer"),
    ("lr", "optimizer.learning_rate"),
    ("actor_learning_rate", "optimizer.learning_rate"),
    ("adam_betas", "optimizer.beta1"),
    ("betas", "optimizer.beta1"),
    ("eps", "optimizer.epsilon"),
    ("l2", "optimizer.weight_decay"),
    ("lr_warmup_steps", "schedule.warmup_steps"),
    ("num_warmup_steps", "schedule.warmup_steps"),
    ("warmup_ratio", "schedule.warmup_steps"),
    ("lr_warmup_ratio", "schedule.warmup_steps"),
    ("lr_warmup_steps_ratio", "schedule.warmup_steps"),
    ("lr_scheduler_type", "schedule.decay"),
    ("lr_scheduler", "schedule.decay"),
    ("warmup_style", "schedule.decay"),
    ("lr_scheduler_kwargs", "schedule.min_lr_ratio"),
    // Memory and adapters.
    ("bf16", "compute_dtype"),
    ("fp16", "compute_dtype"),
    ("torch_dtype", "compute_dtype"),
    ("dtype", "compute_dtype"),
    ("use_peft", "adapters"),
    ("peft_config", "adapters"),
    ("r", "adapters.rank"),
    ("lora_r", "adapters.rank"),
    ("lora_rank", "adapters.rank"),
    ("lora_alpha", "adapters.alpha"),
    ("lora_target_modules", "adapters.target_modules"),
    ("target_modules", "adapters.target_modules"),
    ("ref_model_sync_steps", "reference_refresh"),
    ("ref_model_mixup_alpha", "reference_refresh"),
    // Models, data and files.
    ("model_name_or_path", "model"),
    ("pretrain", "model"),
    ("base_model", "model"),
    ("dataset", "data.train"),
    ("train_dataset", "data.train"),
    ("prompt_data", "data.train"),
    ("eval_dataset", "data.held_out"),
    ("eval_data", "data.held_out"),
    ("prompt_data_probs", "data.weights"),
    ("interleave_probs", "data.weights"),
    ("domain_interleave_probs", "data.weights"),
    ("system_prompt", "data.system"),
    ("template_kwargs", "data.chat_template_kwargs"),
    ("save_path", "run_dir"),
    ("ckpt_path", "run_dir"),
    ("max_ckpt_num", "checkpoint.keep"),
    ("eval_n_samples_per_prompt", "evaluation.samples_per_prompt"),
    ("eval_steps", "evaluation.every_steps"),
    ("num_workers", "threads"),
    ("report_to", "trackers"),
    ("logging_steps", "trackers"),
];

/// Names that mean something else in each of these trainers.
const AMBIGUOUS: [(&str, [(&str, &str); 2]); 2] = [
    (
        "train_batch_size",
        [
            ("verl", "prompts_per_step"),
            ("OpenRLHF", "mini_batch_size"),
        ],
    ),
    (
        "beta",
        [
            ("GRPOTrainer", "recipe.policy_loss.kl.coef"),
            ("DistillationTrainer", "recipe.distillation_loss.beta"),
        ],
    ),
];

/// Returns our place for a key that another trainer calls `name`: a path, or one per trainer.
pub(super) fn place(name: &str) -> Option<String> {
    if let Some((_, meanings)) = AMBIGUOUS.iter().find(|(other, _)| *other == name) {
        let places = meanings.map(|(trainer, path)| format!("{path} ({trainer}'s {name})"));
        return Some(places.join(" or "));
    }
    let found = NAMES.iter().find(|(other, _)| *other == name)?;
    Some(found.1.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::schema::{has_key, run_schema};
    use super::*;

    #[test]
    fn every_name_leads_to_a_key_that_exists() {
        let schema = run_schema();
        let mut seen = BTreeSet::new();
        let ambiguous = AMBIGUOUS.iter().map(|(name, _)| name);
        for name in NAMES.iter().map(|(name, _)| name).chain(ambiguous) {
            assert!(seen.insert(name), "{name} is there twice");
        }
        let ambiguous = AMBIGUOUS.iter().flat_map(|(_, meanings)| meanings);
        for (name, path) in NAMES.iter().chain(ambiguous) {
            assert!(has_key(&schema, path), "{name}: {path}");
        }
        assert_eq!(
            place("beta").as_deref(),
            Some(
                "recipe.policy_loss.kl.coef (GRPOTrainer's beta) or recipe.distillation_loss.beta (DistillationTrainer's beta)"
            )
        );
        assert_eq!(
            place("train_batch_size").as_deref(),
            Some(
                "prompts_per_step (verl's train_batch_size) or mini_batch_size (OpenRLHF's train_batch_size)"
            )
        );
        assert_eq!(place("of no trainer"), None);
    }
}
