//! Trains adapters in place of all parameters.

use std::sync::Arc;

use rstest::rstest;

use crate::common::{
    self, END, digest, max_difference, model, parameters, pretrained, prompts, share_of_a,
    tokenizer, trainer, without_seconds,
};
use candle_core::{DType, Tensor};
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::surrogate::Clip;
use candle_grpo_loss::{
    Aggregation, KlLoss, LogProbOptions, PolicyLoss, Recipe, RolloutCorrection, Surrogate,
    linear_log_prob,
};
use candle_grpo_nn::optim::{GradientDType, MasterWeights, Sharding};
use candle_grpo_nn::{
    AdamW, AdamWConfig, BaseWeights, Decoder, DecoderConfig, Lora, LoraConfig, Parameters,
};
use candle_grpo_test_support::{device, noise_tensor, stay_on_cpu};
use candle_grpo_train::learn::{
    MemoryPlan, OldLogProbs, Reference, ReferenceRefresh, TargetOutput, TargetPass, TargetRow,
};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{
    CompletionSeed, Engine, GenerationBatch, LocalGenerator, PolicyWeights, PromptRequest,
};
use candle_grpo_train::{
    Actor, Completion, ComputeDType, CriticConfig, Generator, NotFinite, Pretrained, Sample,
    Sampler, SamplingConfig, TokenBatch, TrainConfig, Trainer, TrainerParts,
};

fn config() -> TrainConfig {
    let mut config = TrainConfig {
        recipe: Recipe::grpo(),
        adapters: Some(LoraConfig::all_linear(4, 8.)),
        ..common::config()
    };
    // The reference policy is the base without the adapters.
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.04));
    config.optimizer.learning_rate = 2e-2;
    config
}

#[test]
fn adapters_learn_and_the_parameters_stay() {
    let mut trainer = trainer(share_of_a, config());
    let metrics: Vec<_> = (0..40).map(|_| trainer.step().unwrap()).collect();
    let mean = |part: &[candle_grpo_train::StepMetrics]| {
        part.iter().map(|m| m.reward_mean).sum::<f64>() / part.len() as f64
    };
    let (first, last) = (mean(&metrics[..5]), mean(&metrics[35..]));
    assert!(last > first + 0.3, "from {first} to {last}");
    let before = parameters();
    for (name, x) in trainer.actor().parameters().iter() {
        assert_eq!(max_difference(x, before.get(name).unwrap()), 0., "{name}");
    }
    // The reference is the policy without adapters, which the policy starts from and leaves.
    assert!(metrics[0].policy["kl"].abs() < 1e-9);
    assert!(metrics[39].policy["kl"] > 0.01);
}

#[test]
fn the_reference_of_adapters_is_the_base() {
    let mut trainer = trainer(share_of_a, config());
    for _ in 0..3 {
        trainer.step().unwrap();
    }
    let pairs: [(&[u32], &[u32]); 1] = [(&[1, 2], &[3, 4, END])];
    let batch = TokenBatch::new(&pairs, device()).unwrap();
    let reference = trainer.actor().reference().unwrap();
    let base = candle_grpo_train::learn::Reference::new(&model(), &parameters(), ComputeDType::F32)
        .unwrap();
    let [a, b] = [&reference, &base].map(|r| r.log_probs(&batch, 1.).unwrap());
    assert_eq!(max_difference(&a, &b), 0.);
    let policy = trainer.actor().log_probs(&batch).unwrap();
    assert!(max_difference(&policy, &b) > 1e-3);
}

#[test]
fn a_checkpoint_has_the_policy_merged_and_the_adapters_alone() {
    let mut trainer = trainer(share_of_a, config());
    for _ in 0..3 {
        trainer.step().unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    trainer
        .write_checkpoint(path, &pretrained(), ComputeDType::F32)
        .unwrap();

    let pairs: [(&[u32], &[u32]); 1] = [(&[1, 2], &[3, 4, END])];
    let batch = TokenBatch::new(&pairs, device()).unwrap();
    let policy = trainer.actor().log_probs(&batch).unwrap();
    let merged = Pretrained::load(path, device()).unwrap().parameters;
    let merged =
        candle_grpo_train::learn::Reference::new(&model(), &merged, ComputeDType::F32).unwrap();
    assert!(max_difference(&merged.log_probs(&batch, 1.).unwrap(), &policy) < 1e-4);

    let adapters = Lora::load(&path.join("adapter"), &model(), device()).unwrap();
    let base = parameters();
    let decoder = Decoder::new(&model(), adapters.detached_var_builder(&base).unwrap()).unwrap();
    let padded = crate::common::padded(&batch);
    let hidden = decoder
        .padded_hidden_states(&padded.input_ids, &padded.attention_mask)
        .and_then(|hidden| hidden.narrow(1, 1, 3))
        .unwrap();
    let again = linear_log_prob(
        &hidden,
        decoder.output_weight(),
        None,
        batch.targets(),
        1.,
        LogProbOptions {
            mask: Some(batch.response_mask()),
            ..Default::default()
        },
    )
    .unwrap();
    assert_eq!(max_difference(&again.log_probs, &policy), 0.);
    let state = path.join("optimizer.safetensors");
    let state = candle_core::safetensors::load(state, device()).unwrap();
    trainer
        .actor_mut()
        .optimizer_mut()
        .load_state(state)
        .unwrap();
}

/// The adapters are finite, but their product is not.
#[test]
fn merged_weights_that_overflow_are_not_written() {
    let trainer = trainer(share_of_a, config());
    let adapters = trainer.actor().adapters().unwrap().parameters();
    for (_, adapter) in adapters.iter() {
        let large = (adapter.ones_like().unwrap() * 1e30).unwrap();
        adapter.set(&large).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    for result in [
        trainer.ensure_finite(),
        trainer.write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32),
    ] {
        let error = result.unwrap_err();
        let not_finite = error.downcast_ref::<NotFinite>().expect("another error");
        assert!(
            not_finite
                .tensor()
                .starts_with("merged weight model.layers."),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A checkpoint has the weights without adapters, too.
#[test]
fn frozen_weights_that_are_not_finite_are_not_written() {
    let trainer = trainer(share_of_a, config());
    let weight = trainer
        .actor()
        .parameters()
        .get("model.norm.weight")
        .unwrap();
    weight
        .set(&(weight.ones_like().unwrap() * f64::NAN).unwrap())
        .unwrap();
    let error = trainer.ensure_finite().unwrap_err();
    let not_finite = error.downcast_ref::<NotFinite>().expect("another error");
    assert_eq!(not_finite.tensor(), "weight model.norm.weight");
}

#[test]
fn settings_that_contradict_adapters_are_errors() {
    let mut config = config();
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 1,
        alpha: 1.,
    });
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("must be absent with adapters"), "{error}");
    config.reference_refresh = None;
    config.adapters = Some(LoraConfig::all_linear(0, 1.));
    let made = Trainer::new(TrainerParts::new(
        model(),
        parameters(),
        tokenizer(),
        prompts(&["a"]),
        |_: &Sample| 0.,
        config,
    ));
    let error = format!("{:#}", made.err().unwrap());
    assert!(error.contains("rank: 0"), "{error}");
}

#[test]
fn weights_under_adapters_are_stored_once_in_the_compute_dtype() {
    let trainer = trainer(
        share_of_a,
        TrainConfig {
            compute_dtype: ComputeDType::Bf16,
            ..config()
        },
    );
    let actor = trainer.actor();
    let name = "model.embed_tokens.weight";
    let stored = actor.parameters().get(name).unwrap();
    assert_eq!(stored.dtype(), DType::BF16);
    let pairs: [(&[u32], &[u32]); 1] = [(&[1, 2], &[3, 4, END])];
    let batch = TokenBatch::new(&pairs, device()).unwrap();
    let reference = actor.reference().unwrap();
    let before = reference.log_probs(&batch, 1.).unwrap();
    // The policy and the reference see a change, because they have no copy.
    stored.set(&stored.zeros_like().unwrap()).unwrap();
    let [policy, reference] =
        [actor.log_probs(&batch), reference.log_probs(&batch, 1.)].map(Result::unwrap);
    assert!(max_difference(&reference, &before) > 1e-3);
    assert_eq!(max_difference(&policy, &reference), 0.);
    for (name, adapter) in actor.adapters().unwrap().parameters().iter() {
        assert_eq!(adapter.dtype(), DType::F32, "{name}");
    }
}

/// A policy over quantized blocks, and one over their dequantized values.
#[test]
fn adapters_over_quantized_weights_learn_as_over_their_numbers() {
    let model = DecoderConfig {
        hidden_size: 32,
        intermediate_size: 64,
        ..model()
    };
    let quantized = common::parameters_of(&model, device())
        .frozen_as(&model, BaseWeights::Q8_0, DType::F32)
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    quantized.save(&file).unwrap();
    let numbers = Parameters::load(&model, &file, device()).unwrap();
    let [(blocks, of_blocks), (_, of_numbers)] = [
        (quantized.clone(), BaseWeights::Stored),
        (numbers, BaseWeights::Dense),
    ]
    .map(|(parameters, base_weights)| {
        let mut trainer = Trainer::new(TrainerParts::new(
            model.clone(),
            parameters,
            tokenizer(),
            prompts(&["a", "b"]),
            share_of_a,
            TrainConfig {
                base_weights,
                ..config()
            },
        ))
        .unwrap();
        let metrics: Vec<_> = (0..30).map(|_| trainer.step().unwrap()).collect();
        (trainer, metrics)
    });
    let mean = |part: &[candle_grpo_train::StepMetrics]| {
        part.iter().map(|m| m.reward_mean).sum::<f64>() / part.len() as f64
    };
    let (first, last) = (mean(&of_blocks[..5]), mean(&of_blocks[25..]));
    assert!(last > first + 0.3, "from {first} to {last}");
    // The reference has the same blocks.
    assert!(of_blocks[0].policy["kl"].abs() < 1e-9);
    // On a GPU, sums over blocks have another order, so a draw may differ.
    let exact = of_blocks.iter().zip(&of_numbers);
    for (a, b) in exact.filter(|_| device().is_cpu()) {
        let (a, b) = (without_seconds(a.clone()), without_seconds(b.clone()));
        assert_eq!(a.reward_mean, b.reward_mean, "step {}", a.step);
    }
    let mut quantized_maps = 0;
    for (name, weight) in blocks.actor().parameters().iter() {
        let stored = quantized.get(name).unwrap();
        assert_eq!(weight.dtype(), stored.dtype(), "{name}");
        quantized_maps += usize::from(weight.dtype() == DType::U8);
    }
    assert_eq!(quantized_maps, 7 * model.num_hidden_layers);
}

#[test]
fn quantized_weights_do_not_train() {
    let config = TrainConfig {
        base_weights: BaseWeights::Q4K,
        adapters: None,
        ..config()
    };
    let error = config.validate().unwrap_err().to_string();
    let expected = "base_weights: quantized, must be dense unless adapters train";
    assert!(error.contains(expected), "{error}");
    let model = DecoderConfig {
        hidden_size: 32,
        ..model()
    };
    let base = common::parameters_of(&model, device());
    let base = base.frozen_as(&model, BaseWeights::Q8_0, DType::F32);
    let error = AdamW::new(AdamWConfig::default(), &base.unwrap()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains(" is U8, must be F32 to train"), "{error}");
}

#[rstest]
#[case::weights("master_weights", |optimizer: &mut AdamWConfig| optimizer.master_weights = MasterWeights::Bf16)]
#[case::gradients("gradient_dtype", |optimizer: &mut AdamWConfig| optimizer.gradient_dtype = GradientDType::Bf16)]
fn an_optimizer_in_bf16_is_for_all_weights_of_a_policy_in_bf16(
    #[case] option: &str,
    #[case] set: fn(&mut AdamWConfig),
) {
    let bf16 = |optimizer: &AdamWConfig| {
        let mut optimizer = optimizer.clone();
        set(&mut optimizer);
        optimizer
    };
    let adapters = config().adapters;
    let plain = TrainConfig {
        adapters: None,
        compute_dtype: ComputeDType::Bf16,
        ..config()
    };
    let config = |compute_dtype, adapters| TrainConfig {
        optimizer: bf16(&plain.optimizer),
        compute_dtype,
        adapters,
        ..plain.clone()
    };
    config(ComputeDType::Bf16, None).validate().unwrap();
    let critic = CriticConfig {
        optimizer: bf16(&AdamWConfig::default()),
        ..CriticConfig::default()
    };
    let mut with_critic = plain.clone();
    with_critic.recipe.advantage = AdvantageName::Gae.into();
    with_critic.critic = Some(critic);
    for (config, expected) in [
        (
            config(ComputeDType::F32, None),
            "bf16, must be f32 unless compute_dtype is bf16; it is f32",
        ),
        (
            config(ComputeDType::Bf16, adapters),
            "bf16, must be f32 with adapters",
        ),
        (
            with_critic,
            "bf16, must be f32, as the critic computes in f32",
        ),
    ] {
        let error = format!("{:#}", config.validate().unwrap_err());
        let expected = format!("optimizer.{option}: {expected}");
        assert!(error.contains(&expected), "{error}");
    }
    let plan = |config: &TrainConfig| MemoryPlan::new(&model(), config, 10, 0).unwrap();
    let (found, plain) = (plan(&config(ComputeDType::Bf16, None)), plan(&plain));
    if option == "master_weights" {
        // Half of the weights, and no copies.
        assert_eq!(3 * found.weights, plain.weights);
    } else {
        let shapes = model().parameter_shapes().into_iter();
        let in_layers = shapes
            .filter(|(name, shape)| name.starts_with("model.layers.") && shape.dims().len() == 2);
        let in_layers = in_layers.map(|(_, shape)| shape.elem_count());
        assert_eq!(
            found.gradients + 2 * in_layers.sum::<usize>(),
            plain.gradients
        );
    }
}

#[test]
fn frozen_weights_do_not_train() {
    let frozen = parameters()
        .frozen_as(&model(), BaseWeights::Dense, DType::BF16)
        .unwrap();
    let error = AdamW::new(AdamWConfig::default(), &frozen).unwrap_err();
    let error = error.to_string();
    assert!(error.contains(" is BF16, must be F32 to train"), "{error}");
}

/// Actors with different adapters over the same parameters.
fn actors_over_one_base() -> Vec<Actor> {
    let base = parameters();
    let policy = |seed: u64| {
        let config = LoraConfig::all_linear(1 + seed as usize, 8.);
        let adapters = Lora::init(config, &model(), seed, device()).unwrap();
        let config = common::actor_config(PolicyLoss::default());
        Actor::with_adapters(model(), base.clone(), adapters, config).unwrap()
    };
    (1..4).map(policy).collect()
}

/// Rows for each of [`actors_over_one_base`], with its loss.
fn rows_and_losses() -> Vec<(Vec<TargetRow>, PolicyLoss)> {
    let row = |tokens: &[u32], old: bool| TargetRow {
        tokens: tokens[..tokens.len() - 1].to_vec(),
        targets: tokens[1..].to_vec(),
        advantages: tokens[1..].iter().map(|&t| t as f32 - 1.5).collect(),
        rollout_log_probs: old.then(|| vec![-1.5; tokens.len() - 1]),
    };
    let loss = |surrogate: Surrogate| PolicyLoss {
        surrogate,
        aggregation: Aggregation::TokenSum,
        log_ratio_clamp: None,
        ..PolicyLoss::default()
    };
    vec![
        (
            vec![row(&[1, 2, 3, 1, 2], false), row(&[1, 2, 3, 3], false)],
            loss(Surrogate::PolicyGradient),
        ),
        (
            vec![row(&[1, 2, 3, 1, 2], true)],
            loss(Clip::symmetric(0.2).into()),
        ),
        (
            vec![row(&[3, 1], false), row(&[2, 2, 2], false)],
            loss(Surrogate::PolicyGradient),
        ),
    ]
}

/// Each actor's pass over its rows.
fn passes<'a>(
    actors: &'a mut [Actor],
    rows: &'a [(Vec<TargetRow>, PolicyLoss)],
) -> Vec<TargetPass<'a>> {
    let pairs = actors.iter_mut().zip(rows);
    let passes = pairs.map(|(actor, (rows, policy_loss))| TargetPass {
        actor,
        rows,
        policy_loss,
    });
    passes.collect()
}

/// On the CPU, they have the same bits.
#[test]
fn passes_of_several_actors_as_one_equal_separate_ones() {
    let (mut alone, mut together) = (actors_over_one_base(), actors_over_one_base());
    let mut rows = rows_and_losses();
    let bound = if device().is_cpu() { 0. } else { 1e-3 };
    for _ in 0..3 {
        // Two passes per step.
        for _ in 0..2 {
            let pairs = alone.iter_mut().zip(&rows);
            let expected = pairs.map(|(actor, (rows, loss))| {
                actor.forward_backward_targets(rows, loss, 4096).unwrap()
            });
            let expected: Vec<TargetOutput> = expected.collect();
            let passes = passes(&mut together, &rows);
            let found = Actor::forward_backward_targets_joined(passes).unwrap();
            if device().is_cpu() {
                assert_eq!(found, expected);
            }
            for (own, (rows, _)) in found.iter().zip(&rows) {
                let lengths = own.log_probs.iter().map(Vec::len);
                assert!(lengths.eq(rows.iter().map(|row| row.targets.len())));
            }
            for (alone, together) in alone.iter().zip(&together) {
                for (name, gradient) in alone.gradients().iter() {
                    let found = together.gradients().get(name).unwrap();
                    assert!(max_difference(found, gradient) <= bound, "{name}");
                }
            }
            // The next pass trains other rows.
            rows.rotate_left(1);
        }
        for actor in alone.iter_mut().chain(&mut together) {
            actor.clip_grad_and_step(1.).unwrap();
        }
    }
    for (alone, together) in alone.iter().zip(&together) {
        let (alone, together) = (alone.adapters().unwrap(), together.adapters().unwrap());
        for (name, x) in alone.parameters().iter() {
            let found = together.parameters().get(name).unwrap();
            assert!(max_difference(found, x) <= bound, "{name}");
        }
    }
}

#[test]
fn an_error_in_joined_passes_clears_all_gradients() {
    let mut actors = actors_over_one_base();
    let good = rows_and_losses();
    let clears = |actors: &mut [Actor], rows: &[(Vec<TargetRow>, PolicyLoss)]| {
        Actor::forward_backward_targets_joined(passes(actors, &good)).unwrap();
        assert!(!actors[0].gradients().is_empty());
        let error = Actor::forward_backward_targets_joined(passes(actors, rows)).unwrap_err();
        for actor in actors.iter() {
            assert!(actor.gradients().is_empty());
        }
        error
    };
    let mut rows = rows_and_losses();
    rows[1].0[0].rollout_log_probs = Some(vec![-1e30; 4]);
    let error = clears(&mut actors, &rows);
    assert!(error.is::<NotFinite>(), "{error:#}");

    let mut rows = rows_and_losses();
    rows[2].0[1].targets[0] = 99;
    let error = clears(&mut actors, &rows).to_string();
    assert!(
        error.contains("rows[1].targets[0]: 99, must be below"),
        "{error}"
    );

    // Another base.
    let mut other = actors_over_one_base();
    std::mem::swap(&mut actors[2], &mut other[2]);
    let error = Actor::forward_backward_targets_joined(passes(&mut actors, &good)).unwrap_err();
    let words = "decoders[2]: model.embed_tokens.weight: another tensor";
    assert!(error.to_string().contains(words), "{error:#}");

    let config = common::actor_config(PolicyLoss::default());
    let mut plain = vec![Actor::new(model(), parameters(), config).unwrap()];
    let error = Actor::forward_backward_targets_joined(passes(&mut plain, &good)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("adapters: absent, must be given"),
        "{error:#}"
    );
}

/// On the CPU, they have the same bits.
#[test]
fn completions_of_several_policies_as_one_batch_equal_those_of_each() {
    let actors = actors_over_one_base();
    for actor in &actors {
        // New adapters change nothing.
        for (name, variable) in actor.adapters().unwrap().parameters().iter() {
            let noise = noise_tensor(variable.shape(), name.len() as u64, DType::F32, device());
            variable.set(&noise.unwrap()).unwrap();
        }
    }
    let generators: Vec<LocalGenerator> = actors
        .iter()
        .map(|actor| LocalGenerator::from_decoder(actor.policy().clone()))
        .collect();
    let decoders: Vec<&Decoder> = generators.iter().map(LocalGenerator::model).collect();
    let joined = LocalGenerator::from_decoder(Decoder::joined(&decoders).unwrap());
    let tokens: [&[u32]; 4] = [&[1, 2, 3], &[1, 2, 3], &[3, 1], &[1, 2, 3]];
    let adapters = [2, 0, 1, 2];
    let requests = tokens
        .iter()
        .enumerate()
        .map(|(prompt, tokens)| PromptRequest {
            tokens,
            seeds: (0..3)
                .map(|sample| CompletionSeed {
                    seed: 1,
                    stream: 0,
                    prompt: prompt as u64,
                    sample,
                    turn: 0,
                })
                .collect(),
            max_new_tokens: 8 + prompt,
        });
    let requests: Vec<PromptRequest<'_>> = requests.collect();
    let sampling = SamplingConfig {
        max_new_tokens: 11,
        // Completions leave the batch, and others take their places.
        max_batch_size: 5,
        ..SamplingConfig::default()
    };
    let all = |generator: &LocalGenerator, requests: &[PromptRequest<'_>], adapters: &[usize]| {
        let batch = GenerationBatch {
            prompts: requests,
            sampling: &sampling,
            decode: None,
            progress: &NoProgress,
            records_experts: false,
            partial: None,
        };
        let mut all = vec![None; 3 * requests.len()];
        let mut deliver = |place: usize, completion: Completion| {
            all[place] = Some(completion);
            Ok(())
        };
        let sampled = generator.generate_joined(&batch, adapters, &mut deliver);
        sampled.map(|()| all)
    };
    let found = all(&joined, &requests, &adapters).unwrap();
    if device().is_cpu() {
        for (at, &adapter) in adapters.iter().enumerate() {
            let expected = all(&generators[adapter], &requests[at..=at], &[0]).unwrap();
            assert_eq!(found[3 * at..3 * at + 3], expected);
        }
    }
    assert_ne!(found[..3], found[3..6]);

    let error = all(&joined, &requests, &[0]).unwrap_err().to_string();
    assert!(
        error.contains("adapters: 1, must be 4, one for each prompt"),
        "{error}"
    );
    let error = all(&joined, &requests, &[0, 0, 0, 3])
        .unwrap_err()
        .to_string();
    assert!(error.contains("adapter: 3, must be below 3"), "{error}");
}

/// Adapters whose b is not zero.
fn noisy_adapters(model: &DecoderConfig) -> Lora {
    let lora = Lora::init(LoraConfig::all_linear(4, 8.), model, 3, device()).unwrap();
    set_noise(&lora, 0.2);
    lora
}

fn set_noise(lora: &Lora, size: f64) {
    for (name, variable) in lora.parameters().iter() {
        let noise = noise_tensor(variable.shape(), name.len() as u64, DType::F32, device());
        variable.set(&(noise.unwrap() * size).unwrap()).unwrap();
    }
}

/// Four completions for each of two prompts.
fn completions(generator: &Arc<LocalGenerator>) -> Vec<(Vec<u32>, Completion)> {
    let sampler = Sampler::from_generator(generator.clone(), 6, common::sampling()).unwrap();
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let rollouts = sampler.sample(&prompts, 4, 0).unwrap();
    let completion = |(at, rollout): (usize, candle_grpo_train::Rollout)| {
        (prompts[at / 4].tokens.clone(), rollout.completion)
    };
    rollouts.into_iter().enumerate().map(completion).collect()
}

/// The largest difference between the log-probs of `completions` and those in a pass in f32 with
/// the adapters apart.
fn difference_from_policy(
    base: &Parameters,
    lora: &Lora,
    completions: &[(Vec<u32>, Completion)],
) -> f32 {
    let dtype = ComputeDType::F32;
    let policy = Reference::with_adapters(&model(), base, Some(lora), dtype).unwrap();
    let differences = completions.iter().map(|(prompt, completion)| {
        let pairs: [(&[u32], &[u32]); 1] = [(prompt, &completion.tokens)];
        let batch = TokenBatch::new(&pairs, device()).unwrap();
        let expected = policy.log_probs(&batch, 1.).unwrap();
        let found = completion.log_probs.as_deref().unwrap();
        let found = Tensor::new(found, device()).unwrap().unsqueeze(0).unwrap();
        max_difference(&found, &expected)
    });
    differences.fold(0., f32::max)
}

#[rstest]
#[case::f32(ComputeDType::F32, 1e-4)]
#[case::bf16(ComputeDType::Bf16, 0.1)]
#[case::f16(ComputeDType::F16, 0.02)]
fn a_merged_sampler_has_the_policy_that_it_received(
    #[case] dtype: ComputeDType,
    #[case] tolerance: f32,
) {
    let (model, wide) = (model(), parameters());
    let base = wide
        .clone()
        .frozen_as(&model, BaseWeights::Dense, dtype.into())
        .unwrap();
    let lora = noisy_adapters(&model);
    let weights = |version| PolicyWeights {
        version,
        model: &model,
        parameters: &base,
        adapters: Some(&lora),
    };
    let merged = Arc::new(LocalGenerator::merged(&weights(7), dtype).unwrap());
    assert!(!merged.shares_weights());
    let before = completions(&merged);
    let mut earlier = before.clone();
    for version in [7, 8] {
        let found = completions(&merged);
        let versions = |c: &Completion| c.weight_versions.iter().all(|&v| v == version);
        assert!(found.iter().all(|(_, c)| versions(c)));
        let difference = difference_from_policy(&wide, &lora, &found);
        assert!(difference < tolerance, "{difference}");
        if dtype == ComputeDType::F32 {
            let apart = LocalGenerator::in_dtype(&weights(version), dtype).unwrap();
            let apart = completions(&Arc::new(apart));
            for ((_, merged), (_, apart)) in found.iter().zip(&apart) {
                assert_eq!(merged.tokens, apart.tokens);
            }
        }
        // An update. The sampler keeps its copies until it receives the new weights.
        earlier = found;
        set_noise(&lora, -0.3);
        assert_eq!(completions(&merged), earlier);
        let received = merged.weights_changed(&weights(8), &NoProgress);
        received.unwrap();
    }
    assert_ne!(before, earlier);
}

#[test]
fn a_sampler_without_adapters_to_merge_is_refused() {
    let (model, parameters) = (model(), parameters());
    let lora = noisy_adapters(&model);
    let weights = |adapters| PolicyWeights {
        version: 0,
        model: &model,
        parameters: &parameters,
        adapters,
    };
    let dtype = ComputeDType::F32;
    let expected = "adapters: absent, must be given, as they are merged into the weights";
    let error = LocalGenerator::merged(&weights(None), dtype).err().unwrap();
    assert_eq!(error.to_string(), expected);
    let merged = LocalGenerator::merged(&weights(Some(&lora)), dtype).unwrap();
    let error = merged.weights_changed(&weights(None), &NoProgress);
    assert_eq!(error.unwrap_err().to_string(), expected);

    // A joined decoder has the weights of the base once.
    let apart = LocalGenerator::in_dtype(&weights(Some(&lora)), dtype).unwrap();
    let error = Decoder::joined(&[apart.model(), merged.model()]).unwrap_err();
    let words = "q_proj.weight: another tensor, must be that of the first decoder";
    assert!(error.to_string().contains(words), "{error}");
}

fn merging(mut config: TrainConfig) -> TrainConfig {
    config.rollout.merge_adapters = true;
    config
}

/// A loss that may train on older weights, for a run without rewards that decide a draw.
fn corrected() -> TrainConfig {
    let mut config = config();
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config
}

/// Steps sample from merged adapters of the weights that they would otherwise have: metrics are the
/// same up to rounding, but not bit-identical.
#[rstest]
#[case::in_turn(|_: &mut TrainConfig| ())]
#[case::ahead(|config: &mut TrainConfig| config.rollout.max_staleness = 1)]
#[case::in_flight(|config: &mut TrainConfig| {
    config.rollout.max_staleness = 1;
    config.rollout.in_flight_updates = true;
})]
#[case::partial(|config: &mut TrainConfig| config.rollout.partial = true)]
#[case::sampler_log_probs(|config: &mut TrainConfig| {
    config.recipe.policy_loss.rollout_correction = None;
    config.old_log_probs = OldLogProbs::Sampler;
})]
#[case::blocks(|config: &mut TrainConfig| config.base_weights = BaseWeights::Q8_0)]
fn steps_with_merged_adapters_are_those_with_adapters_apart(#[case] set: fn(&mut TrainConfig)) {
    stay_on_cpu();
    let mut config = corrected();
    set(&mut config);
    let model = DecoderConfig {
        hidden_size: 32,
        intermediate_size: 64,
        ..model()
    };
    let steps = |config: TrainConfig| {
        let parameters = common::parameters_of(&model, device());
        let prompts = prompts(&["abc", "d", "ee", "ca", "b"]);
        let parts = TrainerParts::new(
            model.clone(),
            parameters,
            tokenizer(),
            prompts,
            digest,
            config,
        );
        common::run(&mut common::trainer_of(parts), 4)
    };
    let (apart, merged) = (steps(config.clone()), steps(merging(config)));
    assert!(merged.iter().all(|step| !step.skipped));
    common::assert_records_close(&merged, &apart);
    assert_ne!(merged, apart);
}

/// Evaluations sample from the merged adapters of each step.
#[rstest]
#[case::in_the_training_dtype(None)]
#[case::in_another_dtype(Some(ComputeDType::Bf16))]
fn the_sampler_of_a_trainer_has_merged_adapters(#[case] dtype: Option<ComputeDType>) {
    let mut config = merging(config());
    config.rollout.dtype = dtype;
    let mut trainer = trainer(digest, config);
    let log_probs = |sampler: &Sampler| {
        let rollouts = sampler.sample(&[&prompts(&["abc"])[0]], 4, 0).unwrap();
        let log_probs = rollouts.into_iter().map(|r| r.completion.log_probs);
        log_probs.collect::<Vec<_>>()
    };
    let mut earlier = Vec::new();
    for _ in 0..2 {
        trainer.step().unwrap();
        let drawn = log_probs(&trainer.sampler(common::sampling()).unwrap());
        assert_ne!(drawn, earlier);
        let weights = PolicyWeights {
            version: 0,
            model: trainer.actor().model(),
            parameters: trainer.actor().parameters(),
            adapters: trainer.actor().adapters(),
        };
        let expected = LocalGenerator::merged(&weights, dtype.unwrap_or_default()).unwrap();
        let expected = Sampler::from_generator(Arc::new(expected), 6, common::sampling());
        assert_eq!(drawn, log_probs(&expected.unwrap()));
        earlier = drawn;
    }
}

#[rstest]
#[case::all(Sharding::None)]
#[case::divided(Sharding::Resident)]
fn ranks_merge_the_same_adapters(#[case] sharding: Sharding) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
        ..merging(config())
    };
    common::assert_ranks_agree(&[2, 3], || common::parts(digest, config.clone()), 3);
}

#[test]
fn a_custom_generator_merges_adapters_itself() {
    stay_on_cpu();
    let generator = LocalGenerator::new(&model(), &parameters()).unwrap();
    let parts = TrainerParts {
        generator: Some(Arc::new(generator)),
        ..common::parts(digest, merging(config()))
    };
    let error = Trainer::new(parts).map(drop).unwrap_err().to_string();
    let must = "be false with a generator of your own, which merges them itself";
    assert_eq!(error, format!("rollout.merge_adapters: true, must {must}"));
}

#[rstest]
#[case::no_adapters(
    |config: &mut TrainConfig| config.adapters = None,
    "rollout.merge_adapters: true, must be false unless adapters train"
)]
#[case::a_server(
    |config: &mut TrainConfig| config.rollout.engine = Engine::Vllm,
    "rollout.merge_adapters: true, must be false with engine vllm, which does not sample in this process"
)]
#[case::divided_weights(
    |config: &mut TrainConfig| config.sharding = Sharding::Full,
    "rollout.merge_adapters: true, must be false with sharding: full, because merged copies are not divided"
)]
fn adapters_that_cannot_be_merged_are_refused(
    #[case] set: fn(&mut TrainConfig),
    #[case] expected: &str,
) {
    let mut config = merging(config());
    config.validate().unwrap();
    set(&mut config);
    assert_eq!(config.validate().unwrap_err().to_string(), expected);
}
