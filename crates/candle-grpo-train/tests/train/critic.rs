//! Training with a critic.

use crate::common::{max_difference, model, parameters, sampling, share_of_a, trainer};
use candle_core::Tensor;
use candle_grpo_core::AdvantagePipeline;
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_loss::{PolicyLoss, Recipe, StepTotals, ValueLoss};
use candle_grpo_nn::AdamWConfig;
use candle_grpo_test_support::device;
use candle_grpo_train::learn::explained_variance;
use candle_grpo_train::{
    Critic, CriticConfig, StepMetrics, TokenBatch, TrainConfig, TrainingBatch,
};

fn critic_config() -> CriticConfig {
    CriticConfig {
        optimizer: AdamWConfig {
            learning_rate: 1e-2,
            ..AdamWConfig::default()
        },
        ..CriticConfig::default()
    }
}

fn config() -> TrainConfig {
    let mut config = TrainConfig {
        prompts_per_step: 5,
        num_generations: 4,
        sampling: sampling(),
        micro_batch_size: 7,
        recipe: Recipe {
            advantage: AdvantageName::Gae.into(),
            policy_loss: PolicyLoss::default(),
            ..Recipe::default()
        },
        critic: Some(critic_config()),
        ..TrainConfig::default()
    };
    config.optimizer.learning_rate = 1e-2;
    config
}

fn mean(part: &[StepMetrics], metric: &str) -> f64 {
    part.iter().map(|m| m.policy[metric]).sum::<f64>() / part.len() as f64
}

#[test]
fn a_critic_and_its_policy_both_learn() {
    let mut trainer = trainer(share_of_a, config());
    let metrics: Vec<_> = (0..60).map(|_| trainer.step().unwrap()).collect();
    assert!(metrics.iter().all(|m| m.policy["value_grad_norm"] > 0.));
    let (first, last) = (&metrics[..5], &metrics[55..]);
    let reward =
        |part: &[StepMetrics]| part.iter().map(|m| m.reward_mean).sum::<f64>() / part.len() as f64;
    assert!(reward(last) > reward(first) + 0.3);
    // The values are 0 in the first step and explain nothing.
    assert!(metrics[0].policy["value_explained_variance"].abs() < 1e-9);
}

/// The policy stays fixed, so the critic's target does too.
#[test]
fn the_loss_of_a_critic_falls_and_it_explains_more() {
    let mut config = config();
    config.critic = Some(CriticConfig {
        warmup_steps: 60,
        ..critic_config()
    });
    config.prompts_per_step = 20;
    let mut trainer = trainer(share_of_a, config);
    let metrics: Vec<_> = (0..60).map(|_| trainer.step().unwrap()).collect();
    let (first, last) = (&metrics[..5], &metrics[55..]);
    let loss = [first, last].map(|part| mean(part, "value_loss"));
    assert!(loss[1] < 0.7 * loss[0], "{loss:?}");
    let explained = [first, last].map(|part| mean(part, "value_explained_variance"));
    assert!(
        explained[1] > 0.3 && explained[1] > explained[0] + 0.2,
        "{explained:?}"
    );
    // A warm-up is that of the critic alone.
    assert!(metrics.iter().all(|m| m.grad_norm.is_none() && !m.skipped));
    let before = parameters();
    for (name, x) in trainer.actor().parameters().iter() {
        assert_eq!(max_difference(x, before.get(name).unwrap()), 0., "{name}");
    }
    assert!(trainer.step().unwrap().grad_norm.unwrap() > 0.);
}

fn batch() -> TrainingBatch {
    let pairs: [(&[u32], &[u32]); 4] = [
        (&[1, 2, 3], &[4, 0]),
        (&[5], &[1, 2, 0]),
        (&[2], &[0]),
        (&[3, 3], &[2, 2]),
    ];
    let tokens = TokenBatch::new(&pairs, device()).unwrap();
    let returns = Tensor::new(
        &[
            [1f32, 0.5, f32::NAN],
            [0., 0.2, 0.9],
            [-1., 7e30, 0.],
            [0.3, 0.4, f32::INFINITY],
        ],
        device(),
    )
    .unwrap();
    let advantages = Tensor::zeros(4, candle_core::DType::F32, device()).unwrap();
    let mut batch = TrainingBatch::new(tokens, &advantages);
    batch.returns = Some(returns);
    batch
}

#[test]
fn a_critic_fits_fixed_returns() {
    let mut critic = Critic::new(&model(), &parameters(), critic_config()).unwrap();
    let batch = batch();
    let mask = batch.tokens().response_mask();
    let totals = StepTotals::count(mask).unwrap();
    let explained = |critic: &Critic| {
        let values = critic.values(batch.tokens()).unwrap();
        explained_variance(&values, batch.returns.as_ref().unwrap(), mask).unwrap()
    };
    assert_eq!(explained(&critic), Some(0.));
    let mut losses = Vec::new();
    for _ in 0..150 {
        let mut loss = 0.;
        for piece in batch.split(3).unwrap() {
            loss += critic.forward_backward(&piece, &totals).unwrap().0;
        }
        losses.push(loss);
        critic.clip_grad_and_step().unwrap();
    }
    // Half the mean square of the returns of the mask, token by token.
    let squares = [1., 0.25, 0., 0.04, 0.81, 1., 0.09, 0.16];
    let first = squares.iter().sum::<f64>() / 8. / 2.;
    assert!((losses[0] - first).abs() < 1e-6, "{} {first}", losses[0]);
    assert!(losses[149] < 0.01 * losses[0], "{}", losses[149]);
    assert!(explained(&critic).unwrap() > 0.98);
}

#[test]
fn an_input_that_a_critic_lacks_is_named() {
    let mut critic = Critic::new(&model(), &parameters(), critic_config()).unwrap();
    let mut batch = batch();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    batch.returns = None;
    let error = critic.forward_backward(&batch, &totals).unwrap_err();
    assert!(error.to_string().starts_with("returns: absent"), "{error}");
    let error = format!("{:#}", critic.clip_grad_and_step().unwrap_err());
    assert!(
        error.starts_with("optimizer step of the critic: "),
        "{error}"
    );

    let error = |change: fn(&mut TrainConfig)| {
        let mut config = config();
        change(&mut config);
        format!("{:#}", config.validate().unwrap_err())
    };
    let absent = error(|config| config.critic = None);
    assert!(
        absent.starts_with("critic: absent, must be given"),
        "{absent}"
    );
    let surplus = error(|config| config.recipe.advantage = AdvantagePipeline::default());
    assert!(
        surplus.starts_with("critic: given, must be absent"),
        "{surplus}"
    );
    let clip = error(|config| {
        config.critic = Some(CriticConfig {
            value_loss: ValueLoss {
                clip: Some(0.),
                ..ValueLoss::default()
            },
            ..CriticConfig::default()
        });
    });
    assert!(clip.starts_with("critic.value_loss.clip: 0"), "{clip}");
}

#[test]
fn a_value_loss_that_clips_gets_the_old_values() {
    let mut config = config();
    config.epochs = 3;
    config.critic = Some(CriticConfig {
        value_loss: ValueLoss {
            clip: Some(1e-3),
            ..ValueLoss::default()
        },
        ..critic_config()
    });
    let metrics = trainer(share_of_a, config).step().unwrap();
    // In the later epochs values have moved beyond the clip.
    assert!(metrics.policy["value_clip_fraction"] > 0.1);
}
