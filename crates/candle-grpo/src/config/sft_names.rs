//! Other trainers' names for supervised training keys.

/// Key names in TRL's `SFTConfig`, verl's SFT trainer or prime-rl's `sft`, or in our reinforcement
/// learning files, with the paths in a supervised training file.
const NAMES: &[(&str, &str)] = &[
    // Sizes.
    ("per_device_train_batch_size", "sft.batch_size"),
    ("gradient_accumulation_steps", "sft.batch_size"),
    ("train_batch_size", "sft.batch_size"),
    ("micro_batch_size", "sft.micro_batch_tokens"),
    ("micro_batch_size_per_gpu", "sft.micro_batch_tokens"),
    ("max_token_len_per_gpu", "sft.micro_batch_tokens"),
    ("packing", "sft.micro_batch_tokens"),
    ("max_seq_length", "data.max_length"),
    ("seq_len", "data.max_length"),
    ("num_train_epochs", "epochs"),
    ("total_epochs", "epochs"),
    ("total_training_steps", "max_steps"),
    // Rows.
    ("train_files", "data.train"),
    ("val_files", "data.held_out"),
    ("train_dataset", "data.train"),
    ("eval_dataset", "data.held_out"),
    ("dataset_text_field", "data.text"),
    ("messages_key", "data.messages"),
    ("prompt_key", "data.prompt"),
    ("response_key", "data.completion"),
    ("tools_key", "data.tools"),
    ("assistant_only_loss", "data.train_on"),
    ("completion_only_loss", "data.train_on"),
    ("loss_mask", "data.train_on"),
    ("chat_template_path", "model.chat_template"),
    // Optimizer and schedule.
    ("optim", "optimizer"),
    ("lr", "optimizer.learning_rate"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("betas", "optimizer.beta1"),
    ("adam_epsilon", "optimizer.epsilon"),
    ("clip_grad", "sft.max_grad_norm"),
    ("max_norm", "sft.max_grad_norm"),
    ("warmup_ratio", "schedule.warmup_steps"),
    ("lr_warmup_steps_ratio", "schedule.warmup_steps"),
    ("lr_scheduler_type", "schedule.decay"),
    ("lr_scheduler", "schedule.decay"),
    ("decay_until", "schedule.decay"),
    // Memory and adapters.
    ("training", "sft"),
    ("gradient_checkpointing", "sft.activation_checkpointing"),
    ("activation_offloading", "sft.activation_offloading"),
    ("bf16", "sft.compute_dtype"),
    ("dtype", "sft.compute_dtype"),
    ("torch_dtype", "sft.compute_dtype"),
    ("peft_config", "sft.adapters"),
    ("use_peft", "sft.adapters"),
    ("r", "sft.adapters"),
    ("lora_r", "sft.adapters"),
    ("lora_rank", "sft.adapters"),
    ("load_in_4bit", "sft.base_weights"),
    ("load_in_8bit", "sft.base_weights"),
    // The run.
    ("output_dir", "run_dir"),
    ("default_local_dir", "run_dir"),
    ("save_steps", "checkpoint.every_steps"),
    ("save_freq", "checkpoint.every_steps"),
    ("save_total_limit", "checkpoint.keep"),
    ("load_best_model_at_end", "checkpoint.keep_best"),
    ("eval_steps", "evaluation.every_steps"),
    ("test_freq", "evaluation.every_steps"),
    ("max_prompts", "evaluation.max_rows"),
    ("report_to", "trackers"),
    ("logging_steps", "trackers"),
];

/// Returns the place for a key that another trainer calls `name`.
pub(super) fn place(name: &str) -> Option<String> {
    let found = NAMES.iter().find(|(other, _)| *other == name)?;
    Some(found.1.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::super::schema::{has_key, sft_schema};
    use super::*;
    use crate::config::{Document, SftRunConfig};

    #[test]
    fn every_name_leads_to_a_key_that_exists() {
        let schema = sft_schema();
        let mut seen = BTreeSet::new();
        for (name, path) in NAMES {
            assert!(seen.insert(name), "{name} is there twice");
            assert!(has_key(&schema, path), "{name}: {path}");
        }
    }

    #[test]
    fn a_name_of_another_trainer_is_told_its_place() {
        let error = |text: &str| {
            let document = Document::from_yaml(Path::new("x.yaml"), text).unwrap();
            SftRunConfig::new(&document).unwrap_err().to_string()
        };
        assert_eq!(
            error("sft: {per_device_train_batch_size: 4}"),
            "x.yaml:1: sft.per_device_train_batch_size: unknown key; here it is sft.batch_size"
        );
        assert_eq!(
            error("sft: {}\ntraining: {}"),
            "x.yaml:2: training: unknown key; here it is sft"
        );
        assert_eq!(
            error("sft: {}\nrewards: []"),
            "x.yaml:2: rewards: unknown key, must be one of model, data, sft, optimizer, schedule, evaluation, checkpoint, trackers, epochs, max_steps, run_dir, seed, threads"
        );
    }
}
