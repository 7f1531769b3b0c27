//! Tests of the effect of an update on the policy.

use crate::common::{
    self, actor_config, max_difference, model, model_with_experts, parameters, parameters_of,
    prompts, sampling, share_of_a, tokenizer,
};
use candle_core::Tensor;
use candle_grpo_loss::{
    Aggregation, KlLoss, LogProbOptions, PolicyBatch, PolicyLoss, PositiveNll, RolloutCorrection,
    StepTotals, linear_log_prob,
};
use candle_grpo_nn::optim::{GradientDType, MasterWeights};
use candle_grpo_nn::{AdamWConfig, Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::{count_prompt_tokens, read_tokens};
use candle_grpo_train::{
    Actor, ActorConfig, ComputeDType, Prompt, TokenBatch, TrainConfig, Trainer, TrainerParts,
    TrainingBatch,
};
use rstest::rstest;

fn actor(policy_loss: PolicyLoss) -> Actor {
    let config = actor_config(PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        entropy_coef: 0.01,
        ..policy_loss
    });
    Actor::new(model(), parameters(), config).unwrap()
}

/// Completions of unequal length, off-policy by a little.
fn batch(actor: &Actor) -> TrainingBatch {
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let sampler = actor.sampler(sampling()).unwrap();
    let rollouts = sampler
        .sample(&prompts.iter().collect::<Vec<_>>(), 4, 0)
        .unwrap();
    let tokens = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let log_probs = actor.log_probs(&tokens).unwrap();
    let advantages: Vec<f32> = (0..12).map(|i| (i as f32 * 1.7).sin()).collect();
    let prompts: Vec<usize> = (0..12).map(|i| i / 4).collect();
    let (prompt_tokens, _) = count_prompt_tokens(&tokens, &prompts).unwrap();
    let advantages = Tensor::new(advantages, device()).unwrap();
    TrainingBatch::new(tokens, &advantages).with_policy(|policy| {
        policy
            .old_log_probs(&(&log_probs + 0.05).unwrap())
            .ref_log_probs(&(&log_probs * 0.9).unwrap())
            .rollout_log_probs(&(&log_probs - 0.1).unwrap())
            .scores(&advantages)
            .sample_weights(&advantages.abs().unwrap())
            .prompt_tokens(&prompt_tokens)
            .entropy_mask(&log_probs.lt(-1.).unwrap())
    })
}

/// The batch with its advantages mapped by `f`.
fn with_advantages(
    batch: TrainingBatch,
    f: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> TrainingBatch {
    let advantages = f(&batch.policy().advantages).unwrap();
    batch.with_policy(|policy| PolicyBatch {
        advantages,
        ..policy
    })
}

/// The denominators of a step that is this batch.
fn totals(batch: &TrainingBatch) -> StepTotals {
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    match &batch.policy().entropy_mask {
        Some(mask) => totals.with_entropy_mask(mask).unwrap(),
        None => totals,
    }
}

#[rstest]
fn micro_batches_add_up_to_the_gradient_of_the_batch(
    #[values(
        PolicyLoss::grpo(),
        PolicyLoss::dapo(),
        PolicyLoss::dr_grpo(8.),
        PolicyLoss::gspo(),
        PolicyLoss {
            aggregation: Aggregation::PromptMeanTokenMean,
            positive_nll: Some(PositiveNll { coef: 0.3, score_above: 0.2 }),
            off_policy_threshold: Some(0.12),
            ..PolicyLoss::grpo()
        }
    )]
    policy_loss: PolicyLoss,
    #[values(1, 5, 6)] size: usize,
) {
    let mut whole = actor(policy_loss.clone());
    let batch = batch(&whole);
    let totals = totals(&batch).with_prompts(3.);
    let metrics = whole.forward_backward(&batch, &totals).unwrap();

    let mut pieces = actor(policy_loss);
    let mut merged = candle_grpo_core::MetricValues::default();
    for piece in batch.split(size).unwrap() {
        merged
            .merge(&pieces.forward_backward(&piece, &totals).unwrap())
            .unwrap();
    }

    for (name, gradient) in whole.gradients().iter() {
        let largest = gradient
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap();
        let largest = largest.to_scalar::<f32>().unwrap();
        let difference = max_difference(gradient, pieces.gradients().get(name).unwrap());
        assert!(
            difference <= 1e-5 * largest.max(1e-2),
            "{name}: {difference} of {largest}"
        );
    }
    for ((name, a), (other, b)) in metrics.iter().zip(merged.iter()) {
        assert_eq!(name, other);
        assert!((a - b).abs() < 1e-5, "{name}: {a} and {b}");
    }
}

#[test]
fn gradients_of_matrices_are_summed_in_place() {
    let mut actor = actor(PolicyLoss::grpo());
    let batch = batch(&actor);
    let totals = totals(&batch);
    actor.forward_backward(&batch, &totals).unwrap();
    let matrices = actor.gradients().iter();
    let matrices = matrices.filter(|(_, gradient)| gradient.rank() == 2);
    let first: Vec<(String, Tensor, f64)> = matrices
        .map(|(name, sum)| (name.to_owned(), sum.clone(), norm(sum)))
        .collect();
    actor.forward_backward(&batch, &totals).unwrap();
    assert!(first.iter().any(|(name, ..)| name == "lm_head.weight"));
    for (name, sum, before) in first {
        let now = norm(actor.gradients().get(&name).unwrap());
        assert!(
            (now - 2. * before).abs() < 1e-4 * now,
            "{name}: {before}, {now}"
        );
        assert_eq!(norm(&sum), now, "{name}");
    }
}

fn norm(x: &Tensor) -> f64 {
    let squares = x.sqr().unwrap().sum_all().unwrap();
    f64::from(squares.to_scalar::<f32>().unwrap()).sqrt()
}

#[test]
fn a_step_raises_what_did_well_and_leaves_the_reference() {
    let mut actor = actor(PolicyLoss::grpo());
    let reference = actor.reference().unwrap();
    let batch = with_advantages(batch(&actor), Tensor::ones_like);
    let mask = batch
        .tokens()
        .response_mask()
        .to_dtype(candle_core::DType::F32)
        .unwrap();
    let likelihood = |actor: &Actor| -> f32 {
        let log_probs = actor.log_probs(batch.tokens()).unwrap();
        (log_probs * &mask)
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar()
            .unwrap()
    };
    let before = likelihood(&actor);
    let reference_before = reference.log_probs(batch.tokens(), 1.).unwrap();
    let totals = totals(&batch);
    actor.forward_backward(&batch, &totals).unwrap();
    let stats = actor.clip_grad_and_step(1.).unwrap();
    assert!(stats.grad_norm > 0. && stats.learning_rate == 1e-3);
    assert!(likelihood(&actor) > before);
    let reference_after = reference.log_probs(batch.tokens(), 1.).unwrap();
    assert_eq!(max_difference(&reference_before, &reference_after), 0.);
    assert!(actor.gradients().is_empty(), "a step forgets the gradients");
}

#[test]
fn a_step_without_gradients_is_an_error() {
    let error = actor(PolicyLoss::grpo())
        .clip_grad_and_step(1.)
        .unwrap_err();
    assert!(
        format!("{error:#}").contains("optimizer step: gradients"),
        "{error:#}"
    );
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    let mut actor = actor(PolicyLoss::grpo());
    let batch = with_advantages(batch(&actor), |x| x * f64::NAN);
    let before = actor.parameters().frozen_copy().unwrap();
    let totals = totals(&batch);
    let result = actor
        .forward_backward(&batch, &totals)
        .and_then(|_| actor.clip_grad_and_step(1.));
    assert!(result.is_err());
    for (name, value) in actor.parameters().iter() {
        assert_eq!(max_difference(value, &before[name]), 0., "{name}");
    }
}

#[test]
fn shapes_that_do_not_belong_together_are_errors_that_name_them() {
    let mut actor = actor(PolicyLoss::grpo());
    let good = batch(&actor);
    let totals = totals(&good);
    let short = with_advantages(good, |x| x.narrow(0, 0, 3));
    let error = actor.forward_backward(&short, &totals).unwrap_err();
    assert!(error.to_string().starts_with("advantages: "), "{error}");
}

#[test]
fn pieces_and_step_counts_of_nothing_are_errors() {
    let mut actor = actor(PolicyLoss::grpo());
    let batch = batch(&actor);
    assert!(batch.split(0).is_err());
    let nothing = batch.tokens().response_mask().zeros_like().unwrap();
    let update = StepTotals::count(&nothing)
        .map_err(anyhow::Error::from)
        .and_then(|totals| actor.forward_backward(&batch, &totals));
    assert!(update.is_err());
}

/// Padded sequences and Candle's own graph, against packed sequences without one.
#[rstest]
fn gradients_are_those_of_a_graph(
    #[values((false, false), (true, false), (true, true))] checkpointing: (bool, bool),
    #[values(PolicyLoss::grpo(), PolicyLoss::gspo())] policy_loss: PolicyLoss,
) {
    let sampled = actor(policy_loss.clone());
    let batch = batch(&sampled);
    let totals = totals(&batch);
    let (activation_checkpointing, activation_offloading) = checkpointing;
    let config = ActorConfig {
        activation_checkpointing: activation_checkpointing.into(),
        activation_offloading,
        ..sampled.config().clone()
    };
    let parameters = parameters();
    let decoder = Decoder::new(&model(), parameters.var_builder()).unwrap();
    let tokens = batch.tokens();
    let padded = common::padded(tokens);
    let hidden = decoder
        .padded_hidden_states(&padded.input_ids, &padded.attention_mask)
        .unwrap();
    let (_, t) = tokens.dims();
    let states = hidden.narrow(1, hidden.dim(1).unwrap() - t, t).unwrap();
    let now = linear_log_prob(
        &states,
        decoder.output_weight(),
        None,
        tokens.targets(),
        1.,
        LogProbOptions {
            mask: Some(tokens.response_mask()),
            ..Default::default()
        },
    )
    .unwrap();
    let inputs = batch.policy().clone().log_probs(&now.log_probs);
    let loss = config
        .policy_loss
        .compute(&inputs.entropy(&now.entropy), &totals)
        .unwrap();
    let mut graph = Gradients::new();
    graph.accumulate(&loss.loss, &parameters).unwrap();

    let mut actor = Actor::new(model(), crate::common::parameters(), config).unwrap();
    actor.forward_backward(&batch, &totals).unwrap();
    assert_eq!(actor.gradients().iter().count(), graph.iter().count());
    for (name, expected) in graph.iter() {
        let found = actor.gradients().get(name).unwrap();
        let largest = max_difference(expected, &expected.zeros_like().unwrap());
        let distance = max_difference(found, expected);
        assert!(
            largest > 0. && distance < 2e-5 * largest,
            "{name}: {distance} of {largest}"
        );
    }
}

#[rstest]
#[case(ComputeDType::Bf16, MasterWeights::F32, GradientDType::F32, 0.06)]
#[case(ComputeDType::Bf16, MasterWeights::Bf16, GradientDType::F32, 0.06)]
#[case(ComputeDType::Bf16, MasterWeights::F32, GradientDType::Bf16, 0.06)]
#[case(ComputeDType::Bf16, MasterWeights::Bf16, GradientDType::Bf16, 0.06)]
#[case(ComputeDType::F16, MasterWeights::F32, GradientDType::F32, 0.01)]
fn half_types_compute_and_master_weights_learn(
    #[case] compute_dtype: ComputeDType,
    #[case] master_weights: MasterWeights,
    #[case] gradient_dtype: GradientDType,
    #[case] near: f32,
) {
    let mut full = actor(PolicyLoss::grpo());
    let batch = batch(&full);
    let totals = totals(&batch);
    let optimizer = AdamWConfig {
        master_weights,
        gradient_dtype,
        ..full.config().optimizer.clone()
    };
    let config = ActorConfig {
        compute_dtype,
        optimizer,
        ..full.config().clone()
    };
    let mut half = Actor::new(model(), parameters(), config).unwrap();
    let before = half.log_probs(batch.tokens()).unwrap();
    let distance = max_difference(&before, &full.log_probs(batch.tokens()).unwrap());
    assert!(distance > 0. && distance < near, "{distance}");

    for actor in [&mut full, &mut half] {
        actor.forward_backward(&batch, &totals).unwrap();
    }
    for (name, expected) in full.gradients().iter() {
        let found = half.gradients().get(name).unwrap();
        let largest = max_difference(expected, &expected.zeros_like().unwrap());
        let distance = max_difference(found, expected);
        assert!(
            distance < 10. * near * largest,
            "{name}: {distance} of {largest}"
        );
    }
    let reference = half.reference().unwrap();
    let sampler = half.sampler(sampling()).unwrap();
    let prompts = prompts(&["abc"]);
    let draw = || {
        sampler
            .sample(&prompts.iter().collect::<Vec<_>>(), 2, 0)
            .unwrap()
    };
    let drawn = draw();
    half.set_learning_rate(1.);
    half.clip_grad_and_step(1.).unwrap();
    // Policy and sampler follow the update, and the reference does not.
    assert!(max_difference(&half.log_probs(batch.tokens()).unwrap(), &before) > 1.);
    assert_ne!(
        draw()[0].completion.log_probs,
        drawn[0].completion.log_probs
    );
    assert_eq!(
        max_difference(&reference.log_probs(batch.tokens(), 1.).unwrap(), &before),
        0.
    );
}

fn with_experts(router_aux_loss_coef: f64) -> Actor {
    let model = model_with_experts();
    let config = ActorConfig {
        router_aux_loss_coef,
        ..actor(PolicyLoss::grpo()).config().clone()
    };
    let parameters = parameters_of(&model, device());
    Actor::new(model, parameters, config).unwrap()
}

/// The gradients of the load-balancing losses of micro-batches add up with their shares of the
/// tokens.
#[test]
fn the_load_balancing_loss_is_weighted_by_tokens() {
    let batch = batch(&with_experts(0.));
    let totals = totals(&batch);
    let read = |batch: &TrainingBatch| read_tokens(batch.tokens());
    let of_balance = |parts: &[TrainingBatch], tokens: f64| {
        let [mut with, mut without] = [0.5, 0.].map(with_experts);
        for part in parts {
            let metrics = with.forward_backward_of(part, &totals, tokens).unwrap();
            let [loss, load] =
                ["router_aux_loss", "router_max_load"].map(|name| metrics.get(name).unwrap());
            assert!((1. ..=4.).contains(&loss) && (1. ..=2.).contains(&load));
            let plain = without.forward_backward(part, &totals).unwrap();
            assert_eq!(plain.get("router_aux_loss"), Some(loss));
        }
        let names = [
            "model.layers.0.mlp.gate.weight",
            "model.embed_tokens.weight",
        ];
        names.map(|name| {
            let [with, without] = [&with, &without].map(|x| x.gradients().get(name).unwrap());
            (with - without).unwrap()
        })
    };
    let parts = batch.split(5).unwrap();
    let together = of_balance(&parts, read(&batch));
    for (at, found) in together.into_iter().enumerate() {
        let mut expected = found.zeros_like().unwrap();
        for part in &parts {
            let alone = &of_balance(std::slice::from_ref(part), read(part))[at];
            let share = read(part) / read(&batch);
            expected = (expected + (alone * share).unwrap()).unwrap();
        }
        let largest = max_difference(&expected, &expected.zeros_like().unwrap());
        let distance = max_difference(&found, &expected);
        assert!(
            largest > 1e-4 && distance < 1e-3 * largest,
            "{distance} of {largest}"
        );
    }
    // One micro-batch is a whole step.
    let mut whole = with_experts(0.5);
    whole.forward_backward(&batch, &totals).unwrap();
    let mut told = with_experts(0.5);
    let tokens = read(&batch);
    told.forward_backward_of(&batch, &totals, tokens).unwrap();
    for (name, gradient) in whole.gradients().iter() {
        let own = told.gradients().get(name).unwrap();
        assert_eq!(max_difference(gradient, own), 0., "{name}");
    }
}

/// Without advantages, the loads of the experts become equal.
#[test]
fn the_load_balancing_loss_balances_the_experts() {
    let mut actor = with_experts(1.);
    let batch = with_advantages(batch(&actor), Tensor::zeros_like);
    let totals = totals(&batch);
    actor.set_learning_rate(3e-3);
    let mut losses = Vec::new();
    for _ in 0..60 {
        let metrics = actor.forward_backward(&batch, &totals).unwrap();
        losses.push(metrics.get("router_aux_loss").unwrap());
        actor.clip_grad_and_step(1.).unwrap();
    }
    assert!(losses[0] > 2.02 && losses[59] < 2.01, "{losses:?}");
}

#[test]
fn the_load_balancing_loss_needs_experts() {
    let config = ActorConfig {
        router_aux_loss_coef: 0.1,
        ..actor(PolicyLoss::grpo()).config().clone()
    };
    let error = Actor::new(model(), parameters(), config).err().unwrap();
    assert_eq!(
        error.to_string(),
        "router_aux_loss_coef: 0.1, must be 0 for a model without experts"
    );
    let config = TrainConfig {
        router_aux_loss_coef: -1.,
        ..TrainConfig::default()
    };
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("router_aux_loss_coef: -1"), "{error}");
}

/// Moves the routers of `actor` so far that they choose other experts.
fn turn_routers(actor: &Actor) {
    for (name, weight) in actor.parameters().iter() {
        if name.ends_with("mlp.gate.weight") {
            weight.set(&weight.neg().unwrap()).unwrap();
        }
    }
}

#[test]
fn the_policy_replays_the_experts_of_the_sampler() {
    let actor = with_experts(0.);
    let prompts = prompts(&["abc", "d", "abc"]);
    let all: Vec<&Prompt> = prompts.iter().collect();
    let sampler = actor.sampler(sampling()).unwrap();
    let plain = sampler.sample(&all, 3, 0).unwrap();
    assert!(plain.iter().all(|x| x.completion.experts.is_none()));
    let rollouts = sampler.with_experts(true).sample(&all, 3, 0).unwrap();
    for (plain, own) in plain.iter().zip(&rollouts) {
        assert_eq!(plain.completion.tokens, own.completion.tokens);
        let read = own.prompt_tokens.len() + own.completion.tokens.len() - 1;
        let choices = actor.policy().expert_choices();
        let experts = own.completion.experts.as_ref().unwrap();
        assert_eq!(experts.len(), choices * read);
        assert!(experts.iter().all(|&expert| expert < 4));
    }
    let chosen = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let replayed = TokenBatch::replaying(&rollouts, device()).unwrap();
    let log_probs = |batch: &TokenBatch| actor.log_probs(batch).unwrap();
    // The same weights choose the same experts.
    assert!(max_difference(&log_probs(&chosen), &log_probs(&replayed)) < 1e-6);
    turn_routers(&actor);
    let (own, again) = (log_probs(&chosen), log_probs(&replayed));
    assert!(max_difference(&own, &again) > 1e-3);
    // As the decoder replays them, sequence by sequence.
    for (row, rollout) in rollouts.iter().enumerate() {
        let completion = &rollout.completion;
        let mut tokens = rollout.prompt_tokens.clone();
        tokens.extend(&completion.tokens);
        tokens.pop();
        let experts = completion.experts.clone().unwrap();
        let packed = PackedTokens::replaying(&[tokens], &[experts], device()).unwrap();
        let hidden = actor.policy().hidden_states(&packed).unwrap();
        let logits = actor.policy().logits(&hidden).unwrap();
        let logits = (logits / actor.config().temperature).unwrap();
        let all = candle_nn::ops::log_softmax(&logits, 1).unwrap();
        let all = all.to_vec2::<f32>().unwrap();
        let found = again.get(row).unwrap().to_vec1::<f32>().unwrap();
        let first = rollout.prompt_tokens.len() - 1;
        for (at, &token) in completion.tokens.iter().enumerate() {
            let expected = all[first + at][token as usize];
            assert!((found[at] - expected).abs() < 1e-4, "{row}, {at}");
        }
    }
    // Parts of a batch have their own experts, and so do other models.
    let part = replayed.select(&[2, 3, 4]).unwrap();
    let expected = again.narrow(0, 2, 3).unwrap();
    assert!(max_difference(&log_probs(&part), &expected) < 1e-6);
    let reference = actor.reference().unwrap();
    let [a, b] = [&chosen, &replayed].map(|batch| reference.log_probs(batch, 1.).unwrap());
    assert_eq!(max_difference(&a, &b), 0.);
}

/// The gates of the replayed experts have gradients.
#[test]
fn a_step_trains_the_gates_of_replayed_experts() {
    let mut actor = with_experts(0.);
    let prompts = prompts(&["abc", "d"]);
    let all: Vec<&Prompt> = prompts.iter().collect();
    let sampler = actor.sampler(sampling()).unwrap().with_experts(true);
    let rollouts = sampler.sample(&all, 4, 0).unwrap();
    let tokens = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let advantages = Tensor::arange(-4f32, 4., device()).unwrap();
    turn_routers(&actor);
    let mut gradient_with = |tokens: TokenBatch| {
        let old = actor.log_probs(&tokens).unwrap();
        let batch = TrainingBatch::new(tokens, &advantages)
            .with_policy(|policy| policy.old_log_probs(&old).ref_log_probs(&old));
        let totals = totals(&batch);
        actor.zero_grad();
        actor.forward_backward(&batch, &totals).unwrap();
        let name = "model.layers.0.mlp.gate.weight";
        actor.gradients().get(name).unwrap().copy().unwrap()
    };
    let chosen = gradient_with(tokens);
    let replayed = gradient_with(TokenBatch::replaying(&rollouts, device()).unwrap());
    assert!(max_difference(&replayed, &replayed.zeros_like().unwrap()) > 1e-5);
    assert!(max_difference(&replayed, &chosen) > 1e-5);
}

#[test]
fn experts_that_are_missing_are_errors_with_the_completion() {
    let actor = with_experts(0.);
    let prompts = prompts(&["abc"]);
    let sampler = actor.sampler(sampling()).unwrap().with_experts(true);
    let mut rollouts = sampler.sample(&[&prompts[0]], 2, 0).unwrap();
    rollouts[1].completion.experts.as_mut().unwrap().pop();
    let error = |rollouts: &[_]| {
        let replayed = TokenBatch::replaying(rollouts, device());
        format!("{:#}", replayed.unwrap_err())
    };
    let few = error(&rollouts);
    assert!(few.starts_with("completion 1 of prompt 0: "), "{few}");
    rollouts[1].completion.experts = None;
    assert_eq!(
        error(&rollouts),
        "completion 1 of prompt 0: no experts, must have them to be replayed"
    );
}

/// Several updates of a step, drawn ahead or not.
#[rstest]
fn a_run_replays_experts(#[values(0, 1)] max_staleness: usize) {
    if max_staleness > 0 && !device().is_cpu() {
        // The local engine cannot draw ahead on a GPU.
        return;
    }
    let mut config = TrainConfig {
        router_replay: true,
        mini_batch_size: Some(4),
        ..common::config()
    };
    // Experts change within a step.
    config.optimizer.learning_rate = 0.1;
    config.rollout.max_staleness = max_staleness;
    if max_staleness > 0 {
        config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection::default());
    }
    let model = model_with_experts();
    let trainer = |model: &DecoderConfig, config: TrainConfig| {
        Trainer::new(TrainerParts::new(
            model.clone(),
            parameters_of(model, device()),
            tokenizer(),
            prompts(&["a", "b", "ab"]),
            share_of_a,
            config,
        ))
    };
    let steps = |router_replay| {
        let config = TrainConfig {
            router_replay,
            ..config.clone()
        };
        let mut trainer = trainer(&model, config).unwrap();
        let metrics: Vec<_> = (0..6).map(|_| trainer.step().unwrap()).collect();
        metrics
            .into_iter()
            .map(|x| x.reward_mean)
            .collect::<Vec<_>>()
    };
    // The first step draws the same completions.
    let (with, without) = (steps(true), steps(false));
    assert_eq!(with[0], without[0]);
    assert_ne!(with, without);
    let error = trainer(&common::model(), config).err().unwrap();
    assert_eq!(
        error.to_string(),
        "router_replay: true, must be false for a model without experts"
    );
}
