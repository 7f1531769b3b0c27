//! Policies on disk.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use crate::common::{
    file_names, max_difference, model, parameters, parameters_of, pretrained, prompts, sampling,
    tokenizer,
};
use candle_core::{DType, Device, Tensor};
use candle_grpo_nn::{DecoderConfig, Export, LayerType, LoraConfig, ModelType, Parameters};
use candle_grpo_test_support::device;
use candle_grpo_train::{
    ComputeDType, NotFinite, Pretrained, RunDir, Sample, TrainConfig, Trainer, TrainerParts,
};
use rstest::rstest;
use serde_json::json;

/// A policy after one optimizer step.
fn trainer() -> Trainer {
    let config = TrainConfig {
        prompts_per_step: 2,
        sampling: sampling(),
        ..TrainConfig::default()
    };
    let reward = |sample: &Sample| sample.completion.len() as f32;
    let mut trainer = Trainer::new(TrainerParts::new(
        model(),
        parameters(),
        tokenizer(),
        prompts(&["ab", "c"]),
        reward,
        config,
    ))
    .unwrap();
    assert!(!trainer.step().unwrap().skipped);
    trainer
}

/// A folder with a checkpoint.
fn checkpoint() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let trainer = trainer();
    trainer
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    folder
}

/// The previous checkpoint stays, and the new one leaves no files.
#[test]
fn weights_that_are_not_finite_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = RunDir::checkpoints(folder.path());
    let trainer = trainer();
    let write = |step: usize| {
        checkpoints.write(step, |folder| {
            trainer.write_checkpoint(folder, &pretrained(), ComputeDType::F32)
        })
    };
    write(1).unwrap();
    let name = "model.norm.weight";
    for value in [f32::NAN, f32::INFINITY] {
        let weight = trainer.actor().parameters().get(name).unwrap();
        let ruined = (weight.ones_like().unwrap() * f64::from(value)).unwrap();
        weight.set(&ruined).unwrap();
        let error = write(2).unwrap_err();
        let not_finite = error.downcast_ref::<NotFinite>().expect("another error");
        assert_eq!(not_finite.tensor(), "weight model.norm.weight");
    }
    let left = std::fs::read_dir(folder.path().join("checkpoints")).unwrap();
    assert_eq!(left.count(), 1);
    assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 1);
}

/// A trainer for all weights, or for adapters.
fn trainer_of(adapters: bool) -> Trainer {
    let config = TrainConfig {
        prompts_per_step: 2,
        sampling: sampling(),
        adapters: adapters.then(|| LoraConfig::all_linear(2, 4.)),
        ..TrainConfig::default()
    };
    let reward = |sample: &Sample| sample.completion.len() as f32;
    let parameters = pretrained().parameters.copy_to(device()).unwrap();
    let prompts = prompts(&["ab", "c"]);
    Trainer::new(TrainerParts::new(
        model(),
        parameters,
        tokenizer(),
        prompts,
        reward,
        config,
    ))
    .unwrap()
}

#[rstest]
#[case::all_weights(false)]
#[case::adapters(true)]
fn a_run_resumes_bit_identically_from_a_checkpoint_in_bf16(#[case] adapters: bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut whole = trainer_of(adapters);
    whole.step().unwrap();
    let dtype = ComputeDType::Bf16;
    whole.write_checkpoint(path, &pretrained(), dtype).unwrap();
    // The model's weights in bf16 are the rounded policy.
    let model = Parameters::load(&model(), &path.join("model.safetensors"), device()).unwrap();
    for (name, value) in whole.policy_parameters().unwrap().iter() {
        let rounded = value.to_dtype(DType::BF16).unwrap();
        let rounded = rounded.to_dtype(DType::F32).unwrap();
        let saved = model.get(name).unwrap();
        assert_eq!(max_difference(&rounded, saved), 0., "{name}");
    }
    let config = fs::read(path.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
    // Adapters do not depend on the merged weights.
    assert_eq!(path.join("policy.safetensors").exists(), !adapters);
    let mut resumed = trainer_of(adapters);
    resumed.load_state(path).unwrap();
    let [whole_step, resumed_step] = [&mut whole, &mut resumed].map(|x| x.step().unwrap());
    assert_eq!(whole_step.policy, resumed_step.policy);
    let [whole, resumed] = [whole, resumed].map(|trainer| trainer.policy_parameters().unwrap());
    for (name, value) in whole.iter() {
        assert_eq!(
            max_difference(value, resumed.get(name).unwrap()),
            0.,
            "{name}"
        );
    }
}

#[test]
fn a_loaded_checkpoint_is_bit_identical_to_the_policy() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = trainer();
    trainer
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    let read = Pretrained::load(folder.path(), device()).unwrap();

    assert_eq!(read.model.vocab_size, 6);
    for (name, value) in trainer.actor().parameters().iter() {
        assert_eq!(
            max_difference(value, read.parameters.get(name).unwrap()),
            0.,
            "{name}"
        );
    }
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let before = trainer.sampler(sampling()).unwrap();
    let sampler = read.sampler(sampling()).unwrap();
    let [before, after] = [before, sampler].map(|sampler| {
        let rollouts = sampler.sample(&prompts, 4, 9).unwrap().into_iter();
        let drawn = rollouts.map(|r| (r.completion.tokens, r.completion.log_probs));
        drawn.collect::<Vec<_>>()
    });
    assert_eq!(after, before);
    let encoded = read.tokenizer.encode("cab", false).unwrap();
    assert_eq!(encoded.get_ids(), [3, 1, 2]);
}

#[test]
fn a_checkpoint_has_the_form_of_a_hugging_face_model() {
    let folder = checkpoint();
    let path = folder.path();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
    for (name, value) in [
        ("model_type", json!("llama")),
        ("architectures", json!(["LlamaForCausalLM"])),
        ("eos_token_id", json!([0])),
        ("head_dim", json!(4)),
        ("num_key_value_heads", json!(2)),
    ] {
        assert_eq!(config[name], value);
    }
    assert_eq!(
        file_names(path),
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "trainer.json"
        ]
    );
}

#[cfg(unix)]
#[test]
fn all_files_of_a_checkpoint_have_the_mode_of_any_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = checkpoint();
    let path = folder.path();
    let elsewhere = tempfile::tempdir().unwrap();
    let other = elsewhere.path().join("other");
    fs::write(&other, "").unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    for entry in fs::read_dir(path).unwrap() {
        let file = entry.unwrap().path();
        assert_eq!(
            mode(file.clone()),
            mode(other.clone()),
            "{}",
            file.display()
        );
    }
}

#[test]
fn a_checkpoint_of_a_foreign_model_is_refused() {
    let folder = checkpoint();
    let path = folder.path();
    let config = path.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"llama\"", "\"gemma3\"")).unwrap();
    let error = format!("{:#}", Pretrained::load(path, device()).err().unwrap());
    assert!(
        error.contains("config.json: model_type: \"gemma3\", must be one of"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_that_cannot_be_read_says_which_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let error = format!("{:#}", Pretrained::load(path, device()).err().unwrap());
    assert!(error.contains("config.json"), "{error}");
    trainer()
        .write_checkpoint(path, &pretrained(), ComputeDType::F32)
        .unwrap();
    fs::write(path.join("model.safetensors"), "torn").unwrap();
    let error = format!("{:#}", Pretrained::load(path, device()).err().unwrap());
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn a_run_directory_holds_only_complete_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer();
    let mut run = RunDir::create(&folder.path().join("run"), trainer.config()).unwrap();
    run.append_metrics(&trainer.step().unwrap()).unwrap();
    for _ in 0..2 {
        run.write_checkpoint(&trainer, &pretrained()).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(run.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    // The rest of its name is its start time.
    let events = names.remove(3);
    assert!(events.starts_with("events.out.tfevents."), "{events}");
    assert_eq!(
        names,
        [".lock", "checkpoint", "config.json", "metrics.jsonl"]
    );

    // A checkpoint that cannot be written leaves the one before.
    fs::remove_dir_all(run.path().join("checkpoint")).unwrap();
    fs::write(run.path().join("checkpoint"), "in the way").unwrap();
    let result = run.write_checkpoint(&trainer, &pretrained());
    assert!(result.is_err());
    assert_eq!(
        fs::read_to_string(run.path().join("checkpoint")).unwrap(),
        "in the way"
    );
    assert!(
        !fs::read_dir(run.path())
            .unwrap()
            .any(|e| { e.unwrap().file_name().to_string_lossy().ends_with(".tmp") })
    );
}

/// A run's checkpoint keeps the other parts, and a run resumes from it.
#[test]
fn parts_beside_the_text_model_stay_in_checkpoints() -> anyhow::Result<()> {
    let model = DecoderConfig {
        model_type: ModelType::Qwen3_5,
        layer_types: vec![LayerType::LinearAttention; model().num_hidden_layers],
        partial_rotary_factor: 0.5,
        linear_conv_kernel_dim: Some(4),
        linear_key_head_dim: Some(3),
        linear_value_head_dim: Some(5),
        linear_num_key_heads: Some(2),
        linear_num_value_heads: Some(4),
        head_dim: Some(model().head_dim()),
        ..model()
    };
    let parameters = parameters_of(&model, device());
    let [source, first, second] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let text = Pretrained {
        model: model.clone(),
        parameters,
        ..pretrained()
    };
    text.write_files(&Export::new(&text.parameters), source.path())?;
    let path = source.path().join("config.json");
    let text: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    let vision = json!({"depth": 1});
    let config = json!({"model_type": "qwen3_5", "text_config": text, "vision_config": vision});
    fs::write(path, config.to_string())?;
    let weights = |folder: &Path| {
        candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)
    };
    let tensors = weights(source.path())?.into_iter();
    let rename = |name: String| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name,
    };
    let mut tensors: HashMap<_, _> = tensors.map(|(name, x)| (rename(name), x)).collect();
    let names: BTreeSet<_> = tensors.keys().cloned().collect();
    let vision_weight = Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?.to_dtype(DType::BF16)?;
    tensors.insert("model.visual.weight".to_owned(), vision_weight);
    candle_core::safetensors::save(&tensors, source.path().join("model.safetensors"))?;

    let loaded = Pretrained::load(source.path(), device())?;
    let trainer = || {
        let config = TrainConfig {
            prompts_per_step: 2,
            sampling: sampling(),
            ..TrainConfig::default()
        };
        let reward = |sample: &Sample| sample.completion.len() as f32;
        let (model, parameters) = (loaded.model.clone(), loaded.parameters.copy_to(device())?);
        let prompts = prompts(&["ab", "c"]);
        Trainer::new(TrainerParts::new(
            model,
            parameters,
            tokenizer(),
            prompts,
            reward,
            config,
        ))
    };
    let mut run = trainer()?;
    assert!(!run.step()?.skipped);
    run.write_checkpoint(first.path(), &loaded, ComputeDType::F32)?;
    let mut resumed = trainer()?;
    resumed.load_state(first.path())?;
    resumed.write_checkpoint(
        second.path(),
        &Pretrained::load(first.path(), device())?,
        ComputeDType::F32,
    )?;
    for folder in [&first, &second] {
        let mut saved = weights(folder.path())?;
        let vision = saved.remove("model.visual.weight").unwrap();
        assert_eq!(vision.dtype(), DType::BF16);
        let values = vision.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        assert_eq!(values, [1., 2., 3.]);
        assert_eq!(saved.into_keys().collect::<BTreeSet<_>>(), names);
        let config: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.path().join("config.json"))?)?;
        assert_eq!(config["vision_config"], json!({"depth": 1}));
    }
    let read = Pretrained::load(second.path(), device())?;
    for (name, value) in run.actor().parameters().iter() {
        let read = read.parameters.get(name).unwrap();
        assert_eq!(max_difference(value, read), 0., "{name}");
    }
    Ok(())
}
