//! One default GRPO: the library, the trainer and the program compute the same numbers.

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo::config::{Document, RunConfig};
use candle_grpo::core::advantage::DEFAULT_EPSILON;
use candle_grpo::core::rewards::{NormLevel, RewardNorm};
use candle_grpo::core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Mask, RewardShaping, TokenAdvantage,
};
use candle_grpo::loss::{PolicyBatch, Recipe, StepTotals};
use candle_grpo::train::TrainConfig;

/// Three groups with four rewards each: mixed, all equal, and with a large offset.
const REWARDS: [f64; 12] = [0., 1., 0., 0.3, 0.1, 0.1, 0.1, 0.1, 900., 901., 900.5, 900.];
const GROUP_SIZE: usize = 4;
const TOKENS: usize = 5;

fn program(algorithm: &str) -> Recipe {
    let text = format!(
        "model: m\ndata: {{train: d.jsonl}}\nrewards: [{{kind: json}}]\nalgorithm: {algorithm}"
    );
    let document = Document::from_yaml(Path::new("run.yaml"), &text).unwrap();
    RunConfig::new(&document).unwrap().train.recipe
}

fn values(seed: f64) -> Vec<f32> {
    let value = |i: usize| -1. + 0.4 * (seed + i as f64 * 1.7).sin() as f32;
    (0..REWARDS.len() * TOKENS).map(value).collect()
}

/// Computes token advantages, the loss, and its gradient with respect to the log-probs.
fn compute(recipe: &Recipe) -> Result<[Vec<f64>; 3]> {
    let device = Device::Cpu;
    let rewards = Tensor::new(&REWARDS, &device)?;
    let shape = (REWARDS.len(), TOKENS);
    let lengths = (0..REWARDS.len()).map(|i| 1 + i % TOKENS);
    let mask: Vec<u8> = lengths
        .flat_map(|n| (0..TOKENS).map(move |t| u8::from(t < n)))
        .collect();
    let mask = Tensor::from_vec(mask, shape, &device)?;
    let log_probs = Var::from_tensor(&Tensor::from_vec(values(0.), shape, &device)?)?;
    let old = Tensor::from_vec(values(3.), shape, &device)?;

    let shaped = recipe.reward_shaping.apply(&rewards, GROUP_SIZE, None)?;
    assert!(recipe.overlong.is_none());
    let batch = AdvantageBatch::new(&shaped.rewards, GROUP_SIZE)
        .response_mask(&mask)
        .old_log_probs(&old);
    let advantages = recipe.advantage.estimate(&batch)?;
    let advantages = advantages.on_tokens(&Mask::new(&mask)?)?;
    let narrow = advantages.to_dtype(DType::F32)?;
    let batch = PolicyBatch::new(&log_probs, &narrow, &mask).old_log_probs(&old);
    let output = recipe
        .policy_loss
        .compute(&batch, &StepTotals::count(&mask)?)?;
    let gradients = output.loss.backward()?;
    let gradient = gradients.get(&log_probs).expect("the loss has a gradient");
    let numbers = |x: &Tensor| x.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    Ok([
        numbers(&advantages)?,
        numbers(&output.loss)?,
        numbers(gradient)?,
    ])
}

#[test]
fn every_default_grpo_computes_the_same_advantages_and_loss() -> Result<()> {
    let expected = compute(&Recipe::default())?;
    for (name, recipe) in [
        ("Recipe::grpo", Recipe::grpo()),
        ("TrainConfig::default", TrainConfig::default().recipe),
        ("the program", program("{}")),
        ("preset: grpo", program("{preset: grpo}")),
        ("adv_estimator: grpo", program("{adv_estimator: grpo}")),
    ] {
        assert_eq!(compute(&recipe)?, expected, "{name}");
    }
    Ok(())
}

/// `(x - mean) / (std + 1e-6)` with the unbiased standard deviation, and 0 for equal rewards.
#[test]
fn the_default_advantage_is_the_formula() -> Result<()> {
    let [advantages, ..] = compute(&Recipe::default())?;
    for (group, rewards) in REWARDS.chunks(GROUP_SIZE).enumerate() {
        let n = rewards.len() as f64;
        let mean = rewards.iter().sum::<f64>() / n;
        let squares: f64 = rewards.iter().map(|x| (x - mean).powi(2)).sum();
        let std = (squares / (n - 1.)).sqrt();
        for (i, x) in rewards.iter().enumerate() {
            let first_token = advantages[(group * GROUP_SIZE + i) * TOKENS];
            if rewards.iter().all(|y| y == x) {
                assert_eq!(first_token, 0.);
            } else {
                let expected = (x - mean) / (std + DEFAULT_EPSILON);
                assert!(
                    (first_token - expected).abs() < 1e-9,
                    "{first_token} {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn an_estimator_that_the_preset_has_keeps_its_options() {
    for (preset, estimator) in [
        ("trl", "grpo"),
        ("verl", "grpo"),
        ("dr_grpo", "grpo"),
        ("lite_ppo", "grpo"),
        ("roll", "grpo"),
        ("openrlhf", "grpo"),
        ("reinforce_plus_plus", "reinforce"),
    ] {
        let alone = program(&format!("{{preset: {preset}}}"));
        let stated = program(&format!("{{preset: {preset}, adv_estimator: {estimator}}}"));
        assert_eq!(stated, alone, "{preset}");
    }
    // Another estimator replaces that of the preset.
    for (preset, estimator) in [("rloo", "grpo"), ("trl", "reinforce")] {
        let alone = program(&format!("{{preset: {preset}}}"));
        let other = program(&format!("{{preset: {preset}, adv_estimator: {estimator}}}"));
        assert_ne!(other.advantage, alone.advantage, "{preset}");
    }
}

/// ROLL normalizes and clips rewards, then sums them from each token to the end.
#[test]
fn grpo_with_keys_of_rewards_is_the_pipeline_of_roll() -> Result<()> {
    for (key, std) in [
        ("reward_norm: group", NormLevel::Group),
        ("norm_std_type: batch", NormLevel::Batch),
        ("reward_shift: true", NormLevel::None),
    ] {
        let tokens = TokenAdvantage::default();
        let roll = Recipe {
            reward_shaping: RewardShaping {
                norm: RewardNorm {
                    mean: NormLevel::Group,
                    std,
                    ..RewardNorm::default()
                },
                clip: Some(0.75),
                ..RewardShaping::default()
            },
            advantage: AdvantagePipeline::from(tokens),
            ..Recipe::default()
        };
        let expected = compute(&roll)?;
        let found = compute(&program(&format!("{{{key}, reward_clip: 0.75}}")))?;
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!(
                (found - expected).abs() < 1e-12,
                "{key}: {found} {expected}"
            );
        }
    }
    Ok(())
}

#[test]
fn epsilon_and_scale_are_one_key_with_and_without_the_preset() -> Result<()> {
    for base in [
        "",
        "preset: grpo, ",
        "adv_estimator: grpo, ",
        "reward_clip: 10, ",
        "reward_norm: group, ",
    ] {
        let with = |patch: &str| {
            compute(&program(&format!(
                "{{{base}recipe: {{advantage: {patch}}}}}"
            )))
        };
        let [advantages, ..] = with("{epsilon: 1.0}")?;
        let std = 0.471_699_056_602_830_2; // of 0, 1, 0, 0.3
        let expected = -0.325 / (std + 1.);
        assert!(
            (advantages[0] - expected).abs() < 1e-9,
            "{base}: {}",
            advantages[0]
        );
        let [advantages, ..] = with("{scale: none}")?;
        assert!(
            (advantages[0] + 0.325).abs() < 1e-9,
            "{base}: {}",
            advantages[0]
        );
    }
    Ok(())
}
