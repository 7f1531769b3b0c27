//! Demonstrations beside rewards.

use candle_grpo_core::schedule::{CoefSchedule, Decay};
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{DecoderConfig, LoraConfig, Parameters};
use candle_grpo_test_support::{device, stay_on_cpu};
use candle_grpo_train::Sequence;
use candle_grpo_train::data::MixedOrder;
use candle_grpo_train::learn::{DemonstrationConfig, DemonstrationPart, MemoryPlan};
use candle_grpo_train::sft::{SftConfig, SftParts, SftSchedule, SftTrainer};
use candle_grpo_train::{
    Actor, ComputeDType, CriticConfig, RewardFunction, Sample, StepMetrics, TrainConfig, Trainer,
    TrainerParts,
};
use rstest::rstest;

use crate::common::{
    self, END, actor_config, assert_ranks_agree, digest, model, model_with_experts, parameters,
    parameters_of, prompts, resumed, run, tokenizer, trainer_of,
};

/// Seven rows of 3 to 6 tokens.
fn examples() -> Vec<Sequence> {
    let row = |i: u32| {
        let answer: Vec<u32> = (0..1 + i % 4).map(|j| 1 + (2 * i + j) % 5).collect();
        Sequence::of_answer(&[1 + i % 5], &[answer.as_slice(), &[END]].concat()).unwrap()
    };
    (0..7).map(row).collect()
}

fn order() -> MixedOrder {
    MixedOrder::single(7, 5).unwrap()
}

fn rows() -> DemonstrationPart {
    DemonstrationPart::Rows(examples(), order())
}

pub(crate) fn demonstrations(share: f64) -> DemonstrationConfig {
    DemonstrationConfig {
        batch_size: 4,
        coef: CoefSchedule::constant(share),
        micro_batch_tokens: 9,
        ..DemonstrationConfig::default()
    }
}

fn config(demonstrations: DemonstrationConfig) -> TrainConfig {
    let mut config = TrainConfig {
        demonstrations: Some(demonstrations),
        ..common::config()
    };
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.epsilon = 1e-3;
    config
}

pub(crate) fn parts(reward: impl RewardFunction + 'static, config: TrainConfig) -> TrainerParts {
    TrainerParts {
        demonstrations: config.demonstrations.map(|_| rows()),
        ..common::parts(reward, config)
    }
}

fn trainer(reward: impl RewardFunction + 'static, config: TrainConfig) -> Trainer {
    trainer_of(parts(reward, config))
}

/// No completion is better than another.
fn constant(_: &Sample) -> f32 {
    1.
}

fn weights(parameters: &Parameters) -> Vec<(String, Vec<f32>)> {
    let flat = |(name, x): (&str, &candle_core::Var)| {
        (name.to_owned(), x.flatten_all().unwrap().to_vec1().unwrap())
    };
    parameters.iter().map(flat).collect()
}

/// Makes the first update of AdamW proportional to the gradient: it is
/// `learning_rate * g / (|g| + epsilon)`.
fn linear(optimizer: &mut candle_grpo_nn::AdamWConfig) {
    optimizer.learning_rate = 1e4;
    optimizer.epsilon = 1e4;
    optimizer.weight_decay = 0.;
}

/// The changes of the weights in a step.
fn changes(after: &Parameters) -> Vec<(String, Vec<f32>)> {
    let both = weights(after).into_iter().zip(weights(&parameters()));
    let change = both.map(|((name, after), (_, before))| {
        let change = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before);
        (name, change.collect())
    });
    change.collect()
}

#[rstest]
#[case(0.3, None)]
#[case(0.75, Some(6))]
#[case(1., None)]
fn the_gradient_is_the_weighted_mean_of_both_gradients(
    #[case] share: f64,
    #[case] micro_batch_tokens: Option<usize>,
) {
    let step = |demonstrations: Option<DemonstrationConfig>| {
        let mut config = config(self::demonstrations(0.));
        config.demonstrations = demonstrations;
        config.max_grad_norm = 1e9;
        if let Some(tokens) = micro_batch_tokens {
            config.micro_batch_tokens = Some(tokens.into());
            config.micro_batch_size = TrainConfig::default().micro_batch_size;
        }
        linear(&mut config.optimizer);
        let mut trainer = trainer(digest, config);
        let metrics = trainer.step().unwrap();
        (changes(&trainer.policy_parameters().unwrap()), metrics)
    };
    let mut sft = SftConfig {
        batch_size: 4,
        max_grad_norm: 1e9,
        schedule: SftSchedule {
            decay: None,
            ..SftSchedule::default()
        },
        ..SftConfig::default()
    };
    linear(&mut sft.optimizer);
    let mut supervised = SftTrainer::new(SftParts {
        order: Some(order()),
        ..SftParts::new(model(), parameters(), examples(), sft)
    })
    .unwrap();
    let expected = supervised.step().unwrap();
    let of_rows = changes(&supervised.policy_parameters().unwrap());
    let (of_rewards, alone) = step(None);
    let (of_both, metrics) = step(Some(demonstrations(share)));

    for ((name, both), ((_, rewards), (_, rows))) in
        of_both.iter().zip(of_rewards.iter().zip(&of_rows))
    {
        let largest = both.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(largest > 1e-4, "{name}: {largest}");
        for (both, (rewards, rows)) in both.iter().zip(rewards.iter().zip(rows)) {
            let mean = (1. - share) * f64::from(*rewards) + share * f64::from(*rows);
            assert!(
                (f64::from(*both) - mean).abs() < 2e-3 * f64::from(largest),
                "{name}: {both}, must be {mean}"
            );
        }
    }
    assert_eq!(metrics.policy["demonstration_coef"], share);
    assert!((metrics.policy["demonstration_loss"] - expected.loss).abs() < 1e-6);
    let accuracy = metrics.policy["demonstration_token_accuracy"];
    assert_eq!(accuracy, expected.token_accuracy);
    // The metrics of the rewards are those without demonstrations.
    for (name, value) in &alone.policy {
        assert_eq!(metrics.policy[name], *value, "{name}");
    }
}

#[test]
fn a_step_without_a_signal_learns_from_demonstrations_as_long_as_they_have_a_share() {
    let mut config = config(DemonstrationConfig {
        coef: CoefSchedule {
            decay_steps: Some(60),
            end: 0.,
            decay: Decay::Cosine,
            ..CoefSchedule::constant(0.9)
        },
        batch_size: 7,
        ..demonstrations(0.)
    });
    config.optimizer.epsilon = 1e-8;
    let mut trainer = trainer(constant, config);
    let metrics = run(&mut trainer, 62);
    let loss = |step: usize| metrics[step - 1].policy["demonstration_loss"];
    assert!(loss(59) < 0.5 * loss(1), "{} {}", loss(1), loss(59));
    // Without clipping, the norm of the gradient is that of supervised training times the share.
    let first = &metrics[0];
    assert!(first.grad_norm.unwrap() > 0. && first.learning_rate == Some(1e-2));
    for (number, step) in metrics.iter().enumerate() {
        assert_eq!(step.skipped, number + 1 >= 60, "{}", number + 1);
    }
    assert!(!metrics[60].policy.contains_key("demonstration_loss"));
    assert_eq!(trainer.skipped_steps(), 3);
    assert_eq!(trainer.state().visited_demonstrations, 59 * 7);
}

/// The balance of experts is a part of the loss.
#[rstest]
#[case::dense(model())]
#[case::experts(model_with_experts())]
fn the_norm_of_the_gradient_has_the_share_of_the_demonstrations(#[case] model: DecoderConfig) {
    let norm = |share| {
        let config = TrainConfig {
            router_aux_loss_coef: if model.has_experts() { 1. } else { 0. },
            ..config(demonstrations(share))
        };
        let prompts = prompts(&["abc", "d", "ee"]);
        let parameters = parameters_of(&model, device());
        let mut trainer = trainer_of(TrainerParts {
            demonstrations: Some(rows()),
            ..TrainerParts::new(
                model.clone(),
                parameters,
                tokenizer(),
                prompts,
                constant,
                config,
            )
        });
        trainer.step().unwrap().grad_norm.unwrap()
    };
    let (half, whole) = (norm(0.5), norm(1.));
    assert!((whole - 2. * half).abs() < 1e-5 * whole, "{half} {whole}");
}

#[test]
fn steps_visit_the_rows_in_their_order() {
    let mut config = config(demonstrations(0.5));
    // Weights that do not change.
    config.optimizer.learning_rate = 1e-30;
    let mut trainer = trainer(constant, config);
    let examples = examples();
    for step in 0..4 {
        let rows = order().slice(4 * step, 4).into_iter();
        let rows: Vec<Sequence> = rows.map(|row| examples[row].clone()).collect();
        let expected = trainer.actor().likelihood(&rows).unwrap().mean_loss();
        let found = trainer.step().unwrap().policy["demonstration_loss"];
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[test]
fn the_weight_of_uncertain_tokens_is_in_the_gradient_and_not_in_the_metric() {
    let step = |uncertainty_weight| {
        let demonstrations = DemonstrationConfig {
            uncertainty_weight,
            ..demonstrations(1.)
        };
        let mut config = config(demonstrations);
        config.max_grad_norm = 1e9;
        trainer(constant, config).step().unwrap()
    };
    let (plain, weighted) = (step(false), step(true));
    let loss = |metrics: &StepMetrics| metrics.policy["demonstration_loss"];
    assert_eq!(loss(&plain), loss(&weighted));

    let examples = examples();
    let rows: Vec<Sequence> = order()
        .slice(0, 4)
        .into_iter()
        .map(|row| examples[row].clone())
        .collect();
    let weight: f64 = rows.iter().map(|row| row.total_weight()).sum();
    let config = actor_config(Default::default());
    let mut actor = Actor::new(model(), parameters(), config).unwrap();
    let likelihood = Likelihood {
        uncertainty_weight: true,
    };
    actor
        .forward_backward_examples(&rows, likelihood, 1. / weight, 0.)
        .unwrap();
    let expected = actor.gradients().global_norm().unwrap();
    let found = weighted.grad_norm.unwrap();
    assert!(
        (found - expected).abs() < 1e-4 * expected,
        "{found} {expected}"
    );
    // A factor is at most 1/4.
    assert!(found < 0.5 * plain.grad_norm.unwrap());
}

#[rstest]
#[case::mini_batches(TrainConfig { mini_batch_size: Some(5), epochs: 2, ..config(demonstrations(0.4)) })]
#[case::uncertainty(config(DemonstrationConfig { uncertainty_weight: true, ..demonstrations(0.4) }))]
#[case::bf16(TrainConfig { compute_dtype: ComputeDType::Bf16, ..config(demonstrations(0.4)) })]
fn a_resumed_run_is_bit_identical(#[case] config: TrainConfig) {
    stay_on_cpu();
    let mut whole = trainer(digest, config.clone());
    let expected = run(&mut whole, 6);
    let mut first = trainer(digest, config.clone());
    let mut found = run(&mut first, 3);
    let rows = first.state().visited_demonstrations;
    assert_eq!(rows, 3 * 4 * if config.epochs == 2 { 6 } else { 1 });
    let mut second = resumed(&first, trainer(digest, config));
    drop(first);
    found.extend(run(&mut second, 3));
    assert_eq!(found, expected);
    let bits = |trainer: &Trainer| weights(&trainer.policy_parameters().unwrap());
    assert_eq!(bits(&second), bits(&whole));
}

#[rstest]
#[case::with_a_signal(digest, 4)]
#[case::without_a_signal(constant, 4)]
#[case::fewer_rows_than_ranks(digest, 2)]
fn the_steps_of_ranks_are_those_of_one_rank(
    #[case] reward: fn(&Sample) -> f32,
    #[case] batch_size: usize,
    #[values(Sharding::None, Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let demonstrations = DemonstrationConfig {
        batch_size,
        ..demonstrations(0.4)
    };
    let config = TrainConfig {
        sharding,
        // The gradients of every step are clipped.
        max_grad_norm: 0.01,
        ..config(demonstrations)
    };
    assert_ranks_agree(&[2, 3], || parts(reward, config.clone()), 4);
}

#[rstest]
#[case::adapters(model(), Some(LoraConfig::all_linear(2, 4.)))]
#[case::experts(model_with_experts(), None)]
fn all_that_trains_learns_from_demonstrations(
    #[case] model: DecoderConfig,
    #[case] adapters: Option<LoraConfig>,
) {
    let config = TrainConfig {
        adapters,
        router_aux_loss_coef: if model.has_experts() { 0.1 } else { 0. },
        ..config(demonstrations(0.4))
    };
    let prompts = prompts(&["abc", "d", "ee", "ca", "b"]);
    let parameters = parameters_of(&model, device());
    let mut trainer = trainer_of(TrainerParts {
        demonstrations: Some(rows()),
        ..TrainerParts::new(model, parameters, tokenizer(), prompts, digest, config)
    });
    let metrics = run(&mut trainer, 40);
    let loss = |step: usize| metrics[step].policy["demonstration_loss"];
    let mean = |first: usize| (first..first + 5).map(loss).sum::<f64>() / 5.;
    assert!(mean(35) < 0.8 * mean(0), "{} {}", mean(0), mean(35));
}

#[test]
fn a_share_without_a_peak_is_small() {
    let read = |text: &str| serde_json::from_str::<DemonstrationConfig>(text).unwrap();
    assert_eq!(read("{}").coef.peak, 0.1);
    let partial = read(r#"{"coef": {"warmup_steps": 2}}"#).coef;
    assert_eq!((partial.peak, partial.warmup_steps), (0.1, 2));
    assert_eq!(read(r#"{"coef": {"peak": 0.7}}"#).coef.peak, 0.7);
}

#[test]
fn the_policy_learns_nothing_while_the_critic_warms_up() {
    let mut settings = config(demonstrations(0.5));
    settings.recipe.advantage = serde_json::from_str(r#"{"name": "gae"}"#).unwrap();
    settings.critic = Some(CriticConfig {
        warmup_steps: 1,
        ..CriticConfig::default()
    });
    let mut trainer = trainer(digest, settings);
    trainer.step().unwrap();
    assert_eq!(trainer.state().visited_demonstrations, 0);
    let unchanged = weights(&trainer.policy_parameters().unwrap());
    assert_eq!(unchanged, weights(&parameters()));
    let metrics = trainer.step().unwrap();
    assert_eq!(trainer.state().visited_demonstrations, 4);
    assert_eq!(metrics.policy["demonstration_coef"], 0.5);
}

#[test]
fn demonstrations_that_are_missing_or_too_many_are_errors() {
    let without = Trainer::new(common::parts(digest, config(demonstrations(0.5))));
    let error = format!("{:#}", without.err().unwrap());
    assert!(
        error.starts_with("demonstrations: none, must be given"),
        "{error}"
    );
    let plain = Trainer::new(TrainerParts {
        demonstrations: Some(rows()),
        ..common::parts(digest, common::config())
    });
    let error = plain.err().unwrap().to_string();
    assert!(
        error.starts_with("demonstrations: 7, must be none"),
        "{error}"
    );
    let few = MixedOrder::single(3, 0).unwrap();
    let other = Trainer::new(TrainerParts {
        demonstrations: Some(DemonstrationPart::Rows(examples(), few)),
        ..common::parts(digest, config(demonstrations(0.5)))
    });
    let error = other.err().unwrap().to_string();
    assert!(
        error.starts_with("order: 3 rows, must be 7, the number of demonstrations"),
        "{error}"
    );
}

#[rstest]
#[case(DemonstrationConfig { batch_size: 0, ..demonstrations(0.5) }, "demonstrations.batch_size: 0, must be at least 1")]
#[case(DemonstrationConfig { micro_batch_tokens: 0, ..demonstrations(0.5) }, "demonstrations.micro_batch_tokens: 0, must be at least 1")]
#[case(demonstrations(1.5), "demonstrations.coef.peak: 1.5, must be")]
#[case(demonstrations(f64::NAN), "demonstrations.coef.peak: NaN, must be")]
#[case(
    DemonstrationConfig { coef: CoefSchedule { end: -0.1, ..CoefSchedule::constant(0.5) }, ..demonstrations(0.) },
    "demonstrations.coef.end: -0.1, must be"
)]
fn settings_that_are_not_valid_are_errors(
    #[case] demonstrations: DemonstrationConfig,
    #[case] expected: &str,
) {
    let error = config(demonstrations).validate().unwrap_err().to_string();
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn the_plan_of_memory_has_the_longest_pass_of_both() {
    let plan =
        |config: &TrainConfig, longest| MemoryPlan::new(&model(), config, 3, longest).unwrap();
    let alone = plan(&common::config(), 0);
    let config = config(demonstrations(0.5));
    assert_eq!(plan(&config, 1).activations, alone.activations);
    // A row that is longer than the bound is a pass of its own.
    assert!(plan(&config, 1000).activations > alone.activations);
    assert!(plan(&config, 2000).activations > plan(&config, 1000).activations);
    // Four rows of 500 tokens have 2000.
    let wide = |micro_batch_tokens| {
        let demonstrations = DemonstrationConfig {
            micro_batch_tokens,
            ..demonstrations(0.5)
        };
        let config = self::config(demonstrations);
        plan(&config, 500).activations
    };
    assert!(wide(1000) > wide(500));
    assert_eq!(wide(2000), wide(100_000));
    let plan = |longest| plan(&config, longest);
    // Two passes accumulate gradients, in place.
    let kept = plan(1000).gradients + plan(1000).activations;
    assert_eq!(plan(1000).training, kept);
}
