//! Invalid input gives an error with the argument, its value and the requirement.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_core::advantage::{
    AdvantageName, Baseline, BaselinePopulation, KlPenalty, OptimalTokenBaseline, TokenBaseline,
    Whitening, reverse_recurrence,
};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::rewards::{
    CostPenalty, Costs, NonFinite, NormLevel, OverlongPenalty, RewardNorm, RunningMoments,
    RunningState, ScoreEnsemble,
};
use candle_grpo_core::trajectories::{Gigpo, Steps};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, Groups, Kl, KlEstimator,
    Mask, MetricValue, MetricValues, Metrics, RewardShaping, Scale, TokenAdvantage, experimental,
};
use candle_grpo_test_support::{devices, message, numbers};
use rstest::rstest;

use crate::tensor;

fn grpo(rewards: &[f32], groups: impl Into<Groups>, device: &Device) -> Result<Tensor> {
    GroupAdvantage::grpo().compute(tensor(rewards, device), groups, Scale::Group)
}

#[test]
fn invalid_rewards_are_named() -> Result<()> {
    for device in devices() {
        assert_eq!(
            message(grpo(&[0., 1., f32::NAN, 1.], 2, device)),
            "rewards: sample 2 is NaN, must be finite (or exclude missing scores with NonFinite::Exclude)"
        );
        assert!(
            message(grpo(&[0., f32::NEG_INFINITY], 2, device))
                .starts_with("rewards: sample 1 is -inf")
        );
        let components = Tensor::new(&[[0f32, 1.], [f32::NAN, 1.]], device)?;
        let result = GroupAdvantage::grpo().compute(&components, 2, Scale::Group);
        assert!(message(result).starts_with("rewards: sample 1 has NaN in component 0"));
        assert!(message(grpo(&[], 2, device)).contains("at least one sample"));
        let none = tensor(&[], device);
        for (name, message) in [
            (
                "scores",
                message(ScoreEnsemble::Mean.combine(&none, NonFinite::Error)),
            ),
            (
                "rewards",
                message(CostPenalty::default().apply(&none, 2, &Costs::default())),
            ),
            (
                "rewards",
                message(AdvantageBatch::new(&none, 2).sequence_rewards()),
            ),
        ] {
            assert!(
                message.starts_with(&format!("{name}: shape [0]")),
                "{message}"
            );
        }
        let cube = Tensor::zeros((2, 2, 2), DType::F32, device)?;
        let result = GroupAdvantage::grpo().compute(&cube, 2, Scale::Group);
        assert_eq!(
            message(result),
            "rewards: shape [2, 2, 2], must be [B] or [B, K]"
        );
        let weighted = GroupAdvantage {
            reward_weights: Some(vec![1.; 3]),
            ..Default::default()
        };
        let components = Tensor::zeros((2, 2), DType::F32, device)?;
        assert_eq!(
            message(weighted.compute(&components, 2, Scale::Group)),
            "reward_weights: 3 weights for 2 reward components, there must be one each"
        );
    }
    Ok(())
}

#[test]
fn rewards_whose_differences_overflow_are_named() -> Result<()> {
    let (max, cpu) = (f64::MAX, Device::Cpu);
    let grpo = GroupAdvantage::grpo();
    let must = "must be from -1e150 to 1e150, because differences and squares must be finite";
    for (rewards, sample, value) in [
        ([max, -max, max, -max], 0, "1.7976931348623157e308"),
        ([0., 1e308, 0., -1e308], 1, "1e308"),
        ([1., 2., 3., -1e200], 3, "-1e200"),
    ] {
        for scale in [Scale::Group, Scale::Batch, Scale::None] {
            assert_eq!(
                message(grpo.compute(rewards, 4, scale)),
                format!("rewards: sample {sample} has {value}, {must}")
            );
        }
    }
    // The infinite reward is a missing score; the large one is not.
    let excluding = GroupAdvantage {
        non_finite: NonFinite::Exclude,
        ..GroupAdvantage::grpo()
    };
    let rewards = [f64::INFINITY, 1e308, 0., 1.];
    assert!(message(excluding.compute(rewards, 4, Scale::Group)).contains("sample 1 has 1e308"));
    let weighted = GroupAdvantage {
        reward_weights: Some(vec![1e300, 1.]),
        ..GroupAdvantage::grpo()
    };
    let components = Tensor::new(&[[1f64, 1.], [0., 1.]], &cpu)?;
    let error = message(weighted.compute(&components, 2, Scale::Group));
    assert!(
        error.starts_with("rewards with reward_weights: sample 0 has 1e300"),
        "{error}"
    );
    let components = Tensor::new(&[[1f64, 1.], [0., max]], &cpu)?;
    let error = message(grpo.compute(&components, 2, Scale::Group));
    assert!(
        error.starts_with("rewards: sample 1 in component 1 has "),
        "{error}"
    );
    // Finite in f64, but not in the result dtype.
    let error = message(grpo.compute([1e100, -1e100], 2, Scale::None));
    assert_eq!(
        error,
        "rewards: the advantage of sample 0 is inf in f32, the rewards must be smaller"
    );
    let rewards = Tensor::new(&[1e100, -1e100], &cpu)?;
    let advantages = numbers(&grpo.compute(&rewards, 2, Scale::None)?)?;
    assert_eq!(advantages, [1e100, -1e100]);
    let mask = Tensor::ones((2, 2), DType::U8, &cpu)?;
    let token_rewards = Tensor::new(&[[max, max], [0., 0.]], &cpu)?;
    let batch = AdvantageBatch::from_token_rewards(&token_rewards, &mask);
    let error = message(TokenAdvantage::default().estimate(&batch));
    assert!(error.starts_with("token_rewards: "), "{error}");
    Ok(())
}

#[test]
fn advantages_and_returns_that_overflow_in_the_dtype_of_results_are_named() -> Result<()> {
    let cpu = Device::Cpu;
    let error = |name: &str, place: &str| {
        format!("rewards: the {name} of {place} is inf in f32, the rewards must be smaller")
    };
    // A return is the sum over two tokens.
    let token_rewards = Tensor::new(&[[0f32, 0.], [3e38, 3e38]], &cpu)?;
    let mask = Tensor::ones((2, 2), DType::U8, &cpu)?;
    let batch = AdvantageBatch::from_token_rewards(&token_rewards, &mask);
    let tokens = TokenAdvantage::default();
    let expected = error("advantage", "row 1 in column 0");
    assert_eq!(message(tokens.estimate(&batch)), expected);
    let clipped = TokenAdvantage {
        advantage_clip: Some(1.),
        ..tokens
    };
    let expected = error("return", "row 1 in column 0");
    assert_eq!(message(clipped.estimate(&batch)), expected);
    // A trajectory's score is the sum over two steps.
    let rewards = tensor(&[3e38, 3e38, -3e38, -3e38], &cpu);
    let steps = Steps::new(2, 1);
    let batch = AdvantageBatch::new(&rewards, 4).steps(&steps);
    let mut gigpo = Gigpo::default();
    assert!(gigpo.estimate(&batch).is_ok());
    gigpo.normalization.scale = Scale::None;
    assert_eq!(
        message(gigpo.estimate(&batch)),
        error("advantage", "sample 0")
    );
    Ok(())
}

#[test]
fn log_probs_that_are_nan_are_no_fault_of_the_rewards() -> Result<()> {
    let cpu = Device::Cpu;
    let (rewards, mask) = (
        tensor(&[1., 0.], &cpu),
        Tensor::ones((2, 2), DType::U8, &cpu)?,
    );
    let log_probs = Tensor::new(&[[-1f32, f32::NAN], [-1., -1.]], &cpu)?;
    let batch = AdvantageBatch::new(&rewards, 2)
        .response_mask(&mask)
        .old_log_probs(&log_probs)
        .ref_log_probs(&log_probs);
    let penalized = TokenAdvantage {
        kl_penalty: Some(KlPenalty::default()),
        ..TokenAdvantage::default()
    };
    let advantages = numbers(&penalized.estimate(&batch)?.advantages)?;
    assert!(advantages[0].is_nan());
    Ok(())
}

#[test]
fn large_rewards_have_the_advantages_of_small_ones() -> Result<()> {
    let rewards = [3., -1., 2., 0.];
    let small = numbers(&GroupAdvantage::grpo().compute(rewards, 4, Scale::Group)?)?;
    let large = rewards.map(|x| x * 1e149);
    let large = numbers(&GroupAdvantage::grpo().compute(large, 4, Scale::Group)?)?;
    for (small, large) in small.iter().zip(large) {
        assert!((small - large).abs() < 1e-5, "{small} {large}");
    }
    Ok(())
}

#[test]
fn masks_with_other_entries_than_0_and_1_are_named() -> Result<()> {
    let cpu = Device::Cpu;
    let mask = |value: f64, dtype| Tensor::new(&[[1., 0.], [value, 1.]], &cpu)?.to_dtype(dtype);
    for (value, dtype) in [
        (2., DType::U8),
        (2., DType::F64),
        (-1., DType::I64),
        (0.5, DType::F32),
        (0.5, DType::BF16),
        (f64::NAN, DType::F32),
        (f64::INFINITY, DType::F32),
    ] {
        assert_eq!(
            message(Mask::new(&mask(value, dtype)?)),
            format!("response_mask: row 1 has {value} in column 0, must be 0 or 1")
        );
    }
    for (value, dtype) in [(1., DType::U8), (0., DType::I64), (1., DType::BF16)] {
        Mask::new(&mask(value, dtype)?)?;
    }
    Ok(())
}

#[test]
fn groups_that_do_not_fit_are_named() -> Result<()> {
    for device in devices() {
        let message_of = |groups: Groups| message(grpo(&[0., 1., 2., 3., 4., 5.], groups, device));
        assert_eq!(
            message_of(4.into()),
            "groups: 4 for 6 samples, must divide their number (or be the group id of each sample, for groups of unequal size)"
        );
        assert!(message_of(0.into()).starts_with("groups: 0"));
        assert!(message_of(1.into()).starts_with("groups: group 0 has one sample"));
        assert_eq!(
            message_of([1u32, 1].as_slice().into()),
            "groups: 2 ids for 6 samples, there must be one for each"
        );
        assert!(
            message_of([1u32, 1, 1, 2, 3, 3].as_slice().into()).contains("group 1 has one sample")
        );
    }
    Ok(())
}

#[rstest]
#[case(GroupAdvantage { epsilon: -1., ..Default::default() }, "epsilon: -1, must be")]
#[case(GroupAdvantage { epsilon: f64::NAN, ..Default::default() }, "epsilon: NaN, must be")]
#[case(GroupAdvantage { ddof: 2, ..Default::default() }, "ddof: 2, must be 0 or 1")]
fn invalid_options_of_the_advantage_function_are_named(
    #[case] function: GroupAdvantage,
    #[case] expected: &str,
) {
    for device in devices() {
        let message = message(function.compute(tensor(&[0., 1.], device), 2, Scale::Group));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[rstest]
#[case(f64::NAN, "reward_weights: weight 1 is NaN, must be finite")]
#[case(f64::NEG_INFINITY, "reward_weights: weight 1 is -inf, must be finite")]
fn weights_that_are_not_finite_are_named(
    #[case] weight: f64,
    #[case] expected: &str,
) -> Result<()> {
    for device in devices() {
        let reward_weights = Some(vec![1., weight]);
        let rewards = Tensor::new(&[[0f32, 1.], [1., 0.]], device)?;
        let function = GroupAdvantage {
            reward_weights: reward_weights.clone(),
            ..Default::default()
        };
        assert_eq!(
            message(function.compute(&rewards, 2, Scale::None)),
            expected
        );
        let shaping = RewardShaping {
            reward_weights,
            ..Default::default()
        };
        assert_eq!(message(shaping.apply(&rewards, 2, None)), expected);
    }
    Ok(())
}

#[rstest]
#[case(experimental::opo(), "response_mask: absent")]
#[case(AdvantagePipeline::reinforce_plus_plus(), "response_mask: absent")]
#[case(AdvantageName::Pipeline.into(), "sequence and tokens: both absent")]
#[case(
    AdvantagePipeline::grpo().map_sequence(|s| s.baseline = Baseline::Given),
    "sequence.scale: group with the baseline given, must be batch or none"
)]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.baseline = Baseline::Given),
    "reward_baselines: absent"
)]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.population = BaselinePopulation::Unmasked),
    "response_mask: absent"
)]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.factor = f64::INFINITY),
    "sequence.factor: inf, must be finite"
)]
#[case(AdvantagePipeline::rloo().map_sequence(|s| s.clip = Some([1., -1.])), "sequence.clip: [1, -1], must be")]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.kl_penalty = Some(KlPenalty::default())),
    "old_log_probs: absent"
)]
#[case(AdvantagePipeline::pass_at_k().map_sequence(|s| s.ddof = 3), "sequence.ddof: 3, must be 0 or 1")]
fn missing_tensors_and_invalid_sequence_stages_are_named(
    #[case] pipeline: AdvantagePipeline,
    #[case] expected: &str,
) {
    for device in devices() {
        let rewards = tensor(&[0., 1.], device);
        let message = message(pipeline.estimate(&AdvantageBatch::new(&rewards, 2)));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[rstest]
#[case(AdvantagePipeline::gae(1., 1.), "values: absent")]
#[case(AdvantagePipeline::gae(1., 1.5), "lambda: 1.5, must be from 0 to 1")]
#[case(AdvantagePipeline::remax(), "reward_baselines: absent")]
#[case(
    AdvantagePipeline::reinforce().map_tokens(|t| t.distillation = Some(KlPenalty::default())),
    "old_log_probs: absent"
)]
#[case(AdvantagePipeline::optimal_token_baseline(), "old_log_probs: absent")]
#[case(
    AdvantagePipeline::multi_turn_optimal_token_baseline(),
    "old_log_probs: absent"
)]
#[case(
    AdvantagePipeline::remax().map_tokens(|t| t.lambda = Some(1.)),
    "tokens.baseline: given, must be none where lambda is given"
)]
#[case(
    AdvantagePipeline::reinforce().map_tokens(|t| t.whitening.epsilon = 0.),
    "tokens.whitening.epsilon: 0, must be positive"
)]
#[case(AdvantagePipeline::reinforce().map_tokens(|t| t.whitening.ddof = 2), "tokens.whitening.ddof: 2, must be 0 or 1")]
fn missing_tensors_and_invalid_token_stages_are_named(
    #[case] pipeline: AdvantagePipeline,
    #[case] expected: &str,
) -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[0., 1.], device);
        let mask = Tensor::ones((2, 3), DType::U8, device)?;
        let batch = AdvantageBatch::new(&rewards, 2).response_mask(&mask);
        let text = message(pipeline.estimate(&batch));
        assert!(text.starts_with(expected), "{text}");

        let short = Tensor::ones((1, 3), DType::U8, device)?;
        let grpo = experimental::opo();
        let text = message(grpo.estimate(&AdvantageBatch::new(&rewards, 2).response_mask(&short)));
        assert_eq!(
            text,
            "response_mask: [1] for 2 rewards, there must be one for each"
        );
    }
    Ok(())
}

#[test]
fn invalid_reward_baselines_are_named() -> Result<()> {
    for device in devices() {
        let (rewards, nan) = (tensor(&[0., 1.], device), tensor(&[0., f32::NAN], device));
        let mask = Tensor::ones((2, 3), DType::U8, device)?;
        let batch = AdvantageBatch::new(&rewards, 2).response_mask(&mask);
        let given = AdvantagePipeline::rloo().map_sequence(|s| s.baseline = Baseline::Given);
        for pipeline in [given, AdvantagePipeline::remax()] {
            let error = |baselines: &Tensor| {
                message(pipeline.estimate(&batch.clone().reward_baselines(baselines)))
            };
            assert!(error(&nan).starts_with("reward_baselines: sample 1 is NaN"));
            assert!(error(&tensor(&[0.], device)).starts_with("reward_baselines: "));
        }
    }
    Ok(())
}

#[rstest]
#[case(RewardShaping { clip: Some(0.), ..Default::default() }, "clip: 0, must be positive")]
#[case(RewardShaping { shift: f64::NAN, ..Default::default() }, "shift: NaN, must be finite")]
#[case(
    RewardShaping { norm: RewardNorm { mean: NormLevel::Running, ..Default::default() }, ..Default::default() },
    "running: absent"
)]
#[case(
    RewardShaping { norm: RewardNorm { std: NormLevel::Batch, epsilon: 0., ..Default::default() }, ..Default::default() },
    "norm.epsilon: 0, must be positive"
)]
fn invalid_shaping_is_refused_when_applied(#[case] shaping: RewardShaping, #[case] expected: &str) {
    for device in devices() {
        let message = message(shaping.apply(tensor(&[0., 1.], device), 2, None));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_group_of_one_has_no_standard_deviation() {
    for device in devices() {
        let norm = RewardNorm {
            std: NormLevel::Group,
            ..Default::default()
        };
        let shaping = RewardShaping {
            norm,
            ..Default::default()
        };
        assert!(
            message(shaping.apply(tensor(&[0., 1.], device), 1, None))
                .starts_with("norm.std: group 0 has one sample")
        );
    }
}

#[test]
fn shapes_and_options_of_the_token_stage_are_checked() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[0., 1.], device);
        let mask = Tensor::ones((2, 3), DType::U8, device)?;
        let shaping = TokenAdvantage::default();
        let estimate = |function: TokenAdvantage, rewards: &Tensor, mask: &Tensor| {
            let batch = AdvantageBatch::new(rewards, 1).response_mask(mask);
            message(function.estimate(&batch))
        };
        assert!(
            estimate(shaping, &tensor(&[0.], device), &mask)
                .starts_with("rewards: shape [1], must be [2]")
        );
        assert_eq!(
            estimate(shaping, &rewards, &rewards),
            "response_mask: shape [2], must be [B, T]"
        );
        assert_eq!(
            estimate(shaping, &tensor(&[0., f32::NAN], device), &mask),
            "rewards: sample 1 is NaN, must be finite"
        );
        let empty = Tensor::zeros((0, 3), DType::U8, device)?;
        assert!(message(Mask::new(&empty)).contains("is empty"));
        let with = |shaping: TokenAdvantage| estimate(shaping, &rewards, &mask);
        assert!(
            with(TokenAdvantage {
                gamma: 1.5,
                ..shaping
            })
            .starts_with("gamma: 1.5, must be from 0 to 1")
        );
        assert!(
            with(TokenAdvantage {
                advantage_clip: Some(-1.),
                ..shaping
            })
            .starts_with("advantage_clip: -1, must be")
        );
        let penalty = KlPenalty {
            coef: 0.1,
            kl: Kl::default(),
        };
        assert!(
            with(TokenAdvantage {
                kl_penalty: Some(penalty),
                ..shaping
            })
            .starts_with("old_log_probs: absent")
        );
        let values = Tensor::zeros((3, 2), DType::F32, device)?;
        assert_eq!(
            message(Whitening::default().apply(&values, &Mask::new(&mask)?)),
            "values: shape [3, 2], must be that of response_mask, [2, 3]"
        );
        assert!(message(reverse_recurrence(&values, &rewards)).starts_with("factor: shape [2]"));
    }
    Ok(())
}

/// One NaN inside the mask would make every whitened advantage NaN.
#[test]
fn token_rewards_inside_the_mask_must_be_finite() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], device)?;
        let whitened = TokenAdvantage {
            whiten_advantages: true,
            ..TokenAdvantage::default()
        };
        let rewards = tensor(&[f32::NAN, 1.], device);
        let batch = AdvantageBatch::new(&rewards, 1).response_mask(&mask);
        let text = message(whitened.estimate(&batch));
        assert!(text.starts_with("rewards: sample 0 is NaN"), "{text}");

        let inside = Tensor::new(&[[0f32, 0., f32::NAN], [0., f32::NAN, 1.]], device)?;
        let expected = "token_rewards: row 1 has NaN in column 1, must be finite at every position of response_mask";
        let batch = AdvantageBatch::from_token_rewards(&inside, &mask);
        assert_eq!(message(whitened.estimate(&batch)), expected);
        let reinforce = AdvantagePipeline::reinforce_plus_plus();
        assert_eq!(message(reinforce.estimate(&batch)), expected);

        let outside = Tensor::new(&[[0f32, 2., f32::NAN], [0., 0., 1.]], device)?;
        let batch = AdvantageBatch::from_token_rewards(&outside, &mask);
        let advantages = reinforce.estimate(&batch)?.advantages;
        assert!(numbers(&advantages)?.iter().all(|x| x.is_finite()));
    }
    Ok(())
}

#[rstest]
#[case(
    AdvantagePipeline { gamma: Some(7.), ..AdvantageName::Gae.into() },
    "gamma: 7, must be from 0 to 1"
)]
#[case(
    AdvantagePipeline { lambda: Some(-1.), ..AdvantageName::Gae.into() },
    "lambda: -1, must be from 0 to 1"
)]
#[case(
    AdvantagePipeline { gamma: Some(f64::NAN), ..AdvantageName::Reinforce.into() },
    "gamma: NaN, must be"
)]
#[case(
    AdvantagePipeline { reward_weights: Some(vec![f64::NAN]), ..AdvantageName::Gdpo.into() },
    "reward_weights: weight 0 is NaN"
)]
#[case(
    AdvantagePipeline { epsilon: Some(1e-4), ..AdvantageName::Remax.into() },
    "epsilon: given, must be absent for remax"
)]
#[case(
    AdvantagePipeline { gamma: Some(0.9), ..AdvantageName::Grpo.into() },
    "gamma: given, must be absent for grpo"
)]
#[case(
    AdvantagePipeline { lambda: Some(0.9), ..AdvantageName::Reinforce.into() },
    "lambda: given, must be absent for reinforce"
)]
#[case(
    AdvantagePipeline { sequence: Some(GroupAdvantage::grpo()), ..AdvantageName::Rloo.into() },
    "sequence: given, must be absent for rloo"
)]
#[case(
    AdvantagePipeline { kl_penalty: Some(penalty(f64::NAN)), ..AdvantageName::Grpo.into() },
    "kl_penalty.coef: NaN, must be finite"
)]
#[case(AdvantageName::Pipeline.into(), "sequence and tokens: both absent")]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.epsilon = -1.),
    "sequence.epsilon: -1, must be"
)]
#[case(AdvantagePipeline::rloo().map_sequence(|s| s.ddof = 2), "sequence.ddof: 2, must be")]
#[case(
    AdvantagePipeline::rloo().map_sequence(|s| s.clip = Some([1., -1.])),
    "sequence.clip: [1, -1], must be"
)]
#[case(
    AdvantagePipeline::grpo().map_sequence(|s| s.baseline = Baseline::None),
    "sequence.scale: group with the baseline none"
)]
#[case(
    AdvantagePipeline::gdpo()
        .map_sequence(|s| s.normalize = Some(Whitening { ddof: 2, ..Whitening::trl() }))
        ,
    "sequence.normalize.ddof: 2, must be"
)]
#[case(
    AdvantagePipeline::remax().map_tokens(|t| t.token_reward_clip = Some(-1.)),
    "tokens.token_reward_clip: -1, must be positive"
)]
#[case(
    AdvantagePipeline::remax().map_tokens(|t| t.advantage_clip = Some(0.)),
    "tokens.advantage_clip: 0, must be positive"
)]
#[case(
    AdvantagePipeline::remax().map_tokens(|t| t.distillation = Some(penalty(f64::NAN))),
    "tokens.distillation.coef: NaN, must be finite"
)]
#[case(
    AdvantagePipeline::rloo()
        .map_sequence(|s| s.kl_penalty = Some(KlPenalty { kl: clamped(0.), ..penalty(1.) }))
        ,
    "sequence.kl_penalty.kl.value_clamp: 0, must be positive"
)]
#[case(
    AdvantagePipeline::remax()
        .map_tokens(|t| {
            let gradient = KlGradient::ImportanceWeighted { max: 1. };
            t.kl_penalty = Some(KlPenalty { kl: Kl { gradient, ..Kl::default() }, ..penalty(1.) });
        })
        ,
    "tokens.kl_penalty.kl.gradient: importance_weighted"
)]
#[case(
    AdvantagePipeline::remax()
        .map_tokens(|t| {
            t.baseline = TokenBaseline::OptimalToken(OptimalTokenBaseline {
                epsilon: 0.,
                ..OptimalTokenBaseline::default()
            });
        })
        ,
    "tokens.baseline.optimal_token.epsilon: 0, must be positive"
)]
fn configurations_are_checked_without_a_batch(
    #[case] config: AdvantagePipeline,
    #[case] expected: &str,
) {
    let text = message(config.validate());
    assert!(text.starts_with(expected), "{text}");
}

fn penalty(coef: f64) -> KlPenalty {
    KlPenalty {
        coef,
        kl: Kl::default(),
    }
}

fn clamped(value: f64) -> Kl {
    Kl {
        value_clamp: Some(value),
        ..Kl::default()
    }
}

#[test]
fn the_default_configurations_are_valid() -> Result<()> {
    AdvantagePipeline::default().validate()?;
    AdvantagePipeline::gdpo().validate()?;
    RewardShaping::default().validate()?;
    Ok(TokenAdvantage::default().validate()?)
}

#[rstest]
#[case(RewardShaping { clip: Some(-1.), ..Default::default() }, "clip: -1, must be positive")]
#[case(
    RewardShaping { clip: Some(1.), clip_range: Some([0., 1.]), ..Default::default() },
    "clip and clip_range: both given"
)]
#[case(RewardShaping { clip_range: Some([1., 1.]), ..Default::default() }, "clip_range: [1, 1], must be")]
#[case(RewardShaping { scale: f64::INFINITY, ..Default::default() }, "scale: inf, must be finite")]
#[case(
    RewardShaping { reward_weights: Some(vec![f64::INFINITY]), ..Default::default() },
    "reward_weights: weight 0 is inf"
)]
#[case(
    RewardShaping { norm: RewardNorm { ddof: 2, ..Default::default() }, ..Default::default() },
    "norm.ddof: 2, must be 0 or 1"
)]
fn shaping_is_checked_without_rewards(#[case] shaping: RewardShaping, #[case] expected: &str) {
    let text = message(shaping.validate());
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn an_overlong_penalty_is_checked_without_lengths() {
    let penalty = OverlongPenalty::new(8, 9);
    assert!(message(penalty.validate()).starts_with("buffer: 9, must be from 1 to max_length, 8"));
}

#[test]
fn kl_checks_shapes_and_options() {
    for device in devices() {
        let (a, b) = (tensor(&[0., 1.], device), tensor(&[0.], device));
        assert_eq!(
            message(Kl::default().per_token(&a, &b, None)),
            "ref_log_probs: shape [1], must be that of log_probs, [2]"
        );
        let weighted = Kl {
            gradient: KlGradient::ImportanceWeighted { max: 10. },
            ..Kl::default()
        };
        assert!(message(weighted.per_token(&a, &a, None)).starts_with("old_log_probs: absent"));
        let clamped = Kl {
            value_clamp: Some(0.),
            ..Kl::new(KlEstimator::K1)
        };
        assert!(
            message(clamped.per_token(&a, &a, None))
                .starts_with("kl.value_clamp: 0, must be positive")
        );
    }
}

#[test]
fn metrics_and_running_moments_refuse_invalid_input() -> Result<()> {
    for device in devices() {
        let vector = tensor(&[0., 1.], device);
        assert!(
            message(Metrics::new().push_mean("x", &vector, &vector)).contains("must be scalars")
        );
        let mut a = MetricValues::default();
        a.insert("x", MetricValue::Max(1.));
        let mut b = MetricValues::default();
        b.insert("x", MetricValue::Min(1.));
        assert!(message(a.merge(&b)).starts_with("metric x: "));
        for (count, mean, squares) in [(-1., 0., 0.), (f64::INFINITY, 0., 0.), (2., 0., f64::NAN)] {
            let state = RunningState {
                count,
                mean,
                squares,
            };
            let message = message(RunningMoments::from_state(state, device));
            assert!(message.starts_with("state: RunningState {"), "{message}");
        }
    }
    Ok(())
}
