//! Published values for each estimator, and results for special groups and batches.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_core::advantage::{
    Baseline, BaselinePopulation, KlPenalty, MaskedTokens, OptimalTokenBaseline, SingletonGroup,
    TokenAlignment, TokenBaseline, Whitening, ZeroSignalScaling,
};
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, Kl, KlEstimator, Scale,
    TokenAdvantage, experimental,
};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

use crate::tensor;

const EXAMPLE: [f64; 8] = [0., 1., 0., 1., 1., 0., 0., 0.];

/// Values for the example with three tokens per sequence: [failure, success] in group 1 and
/// [success, failure] in group 2.
#[rstest]
#[case::grpo(AdvantagePipeline::grpo(), [-0.866023904, 0.866023904, 1.499997, -0.499999])]
#[case::dr_grpo(AdvantagePipeline::dr_grpo(), [-0.5, 0.5, 0.75, -0.25])]
#[case::rloo(AdvantagePipeline::rloo(), [-0.666666667, 0.666666667, 1., -0.333333333])]
#[case::max_rl(experimental::max_rl(), [-0.999998, 0.999998, 2.999988, -0.999996])]
#[case::pass_at_k(AdvantagePipeline::pass_at_k(), [0., 0., 1.999996, 0.])]
#[case::gpg(AdvantagePipeline::gpg(), [-0.5, 0.5, 0.75, -0.25])]
#[case::flash(experimental::flash_reinforce(), [-0.375, 0.625, 0.625, -0.375])]
#[case::opo(experimental::opo(), [-0.5, 0.5, 0.75, -0.25])]
#[case::reinforce(
    AdvantagePipeline::reinforce_plus_plus(), [-0.758288, 1.263813, 1.263813, -0.758288]
)]
#[case::baseline(
    AdvantagePipeline::reinforce_plus_plus_baseline(), [-1.046536, 1.046536, 1.569804, -0.523268]
)]
fn the_example_has_the_published_values(
    #[case] pipeline: AdvantagePipeline,
    #[case] values: [f64; 4],
) -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&EXAMPLE, device)?;
        let mask = Tensor::ones((8, 3), DType::U8, device)?;
        let batch = AdvantageBatch::new(&rewards, 4).response_mask(&mask);
        let tokens = pipeline.estimate(&batch)?.on_tokens(&batch.mask()?)?;
        let got = numbers(&tokens.narrow(1, 0, 1)?)?;
        let [failure, success, alone, rest] = values;
        let expected = [failure, success, failure, success, alone, rest, rest, rest];
        assert_close(&got, &expected, 1e-6);
    }
    Ok(())
}

#[test]
fn gpg_can_count_nonzero_rewards_as_verl_does() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&EXAMPLE.map(|r| r as f32), device);
        let gpg = AdvantagePipeline::gpg()
            .map_sequence(|s| s.compensation = ZeroSignalScaling::NonZeroRewards);
        let got = numbers(&gpg.estimate(&AdvantageBatch::new(&rewards, 4))?.advantages)?;
        let (a, b, c) = (4. / 3., 2., -2. / 3.);
        assert_close(&got, &[-a, a, -a, a, b, c, c, c], 1e-6);

        // Half the samples are in a group without spread, so the others count twice.
        let rewards = tensor(&[-1., 1., 1., 1.], device);
        let batch = AdvantageBatch::new(&rewards, 2);
        let by_spread = AdvantagePipeline::gpg().estimate(&batch)?.advantages;
        assert_close(&numbers(&by_spread)?, &[-2., 2., 0., 0.], 0.);
        let by_rewards = gpg.estimate(&batch)?.advantages;
        assert_close(&numbers(&by_rewards)?, &[-1., 1., 0., 0.], 0.);
    }
    Ok(())
}

/// Lengths 3, 1, 2, 3 and rewards 1, 0, 1, 0 at the last token; NaN at all masked positions.
struct Fixture {
    rewards: Tensor,
    mask: Tensor,
    values: Tensor,
    log_probs: Tensor,
    squares: Tensor,
}

impl Fixture {
    fn new(device: &Device) -> Result<Self> {
        let nan = f64::NAN;
        let rows = |x: [[f64; 3]; 4]| Tensor::new(&x, device);
        Ok(Self {
            rewards: Tensor::new(&[1f64, 0., 1., 0.], device)?,
            mask: rows([[1., 1., 1.], [1., 0., 0.], [1., 1., 0.], [1., 1., 1.]])?,
            values: rows([
                [0.2, 0.4, 0.6],
                [0.1, nan, nan],
                [0.5, 0.4, nan],
                [0., 0.1, 0.2],
            ])?,
            log_probs: rows([
                [0.5, 0.6, 0.7],
                [0.3, nan, nan],
                [0.9, 0.8, nan],
                [0.2, 0.3, 0.4],
            ])?
            .log()?,
            squares: rows([
                [0.4, 0.45, 0.5],
                [0.3, nan, nan],
                [0.82, 0.7, nan],
                [0.2, 0.25, 0.3],
            ])?,
        })
    }

    fn batch(&self) -> AdvantageBatch {
        AdvantageBatch::new(&self.rewards, 4)
            .response_mask(&self.mask)
            .values(&self.values)
            .old_log_probs(&self.log_probs)
            .sum_of_squared_probs(&self.squares)
    }
}

#[test]
fn opo_weights_the_baseline_by_length() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let got = experimental::opo().estimate(&fixture.batch())?;
        let (a, b) = (4. / 9., -5. / 9.);
        assert_close(&numbers(&got.advantages)?, &[a, b, a, b], 1e-12);
    }
    Ok(())
}

#[test]
fn reinforce_plus_plus_discounts_and_whitens() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let pipeline =
            AdvantagePipeline::reinforce_plus_plus().map_tokens(|tokens| tokens.gamma = 0.9);
        let got = pipeline.estimate(&fixture.batch())?;
        let returns = [0.81, 0.9, 1., 0., 0., 0., 0.9, 1., 0., 0., 0., 0.];
        assert_close(&numbers(&got.returns.unwrap())?, &returns, 1e-12);
        let advantages = [
            0.6087, 0.7926, 0.9970, -1.0470, 0., 0., 0.7926, 0.9970, 0., -1.0470, -1.0470, -1.0470,
        ];
        assert_close(&numbers(&got.advantages)?, &advantages, 5.1e-5);
    }
    Ok(())
}

#[test]
fn the_baseline_variant_whitens_over_tokens() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let got = AdvantagePipeline::reinforce_plus_plus_baseline().estimate(&fixture.batch())?;
        let (s, f) = (0.8433, -1.0541);
        let expected = [s, s, s, f, 0., 0., s, s, 0., f, f, f];
        assert_close(&numbers(&got.advantages)?, &expected, 5.1e-5);
    }
    Ok(())
}

#[test]
fn remax_subtracts_the_given_baselines() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let baselines = Tensor::new(&[0.5f64, 0.5, 0., 1.], device)?;
        let batch = fixture.batch().reward_baselines(&baselines);
        let got = AdvantagePipeline::remax().estimate(&batch)?;
        let expected = [0.5, 0.5, 0.5, -0.5, 0., 0., 1., 1., 0., -1., -1., -1.];
        assert_close(&numbers(&got.advantages)?, &expected, 1e-12);
    }
    Ok(())
}

#[test]
fn gae_has_the_values_of_verl() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let got = AdvantagePipeline::gae(0.99, 0.95).estimate(&fixture.batch())?;
        let returns = [
            0.9323, 0.9702, 1., 0., 0., 0., 0.9603, 1., 0., 0.0143, 0.0099, 0.,
        ];
        assert_close(&numbers(&got.returns.unwrap())?, &returns, 5.1e-5);
        let advantages = [
            1.3090, 0.8548, 0.3778, -1.0236, 0., 0., 0.5468, 0.9383, 0., -0.7033, -0.9958, -1.3038,
        ];
        assert_close(&numbers(&got.advantages)?, &advantages, 5.1e-5);
    }
    Ok(())
}

#[rstest]
fn the_optimal_token_baseline_has_the_values_of_verl(
    #[values(TokenAlignment::Position, TokenAlignment::Generated)] alignment: TokenAlignment,
) -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let tokens = |handle_zero_tail| TokenAdvantage {
            baseline: TokenBaseline::OptimalToken(OptimalTokenBaseline {
                alignment,
                handle_zero_tail,
                ..OptimalTokenBaseline::default()
            }),
            ..TokenAdvantage::default()
        };
        let got = tokens(false).estimate(&fixture.batch())?.advantages;
        let expected = [
            0.7813, 0.6532, 0.7222, -0.2187, 0., 0., 0.7813, 0.6532, 0., -0.2187, -0.3468, -0.2778,
        ];
        assert_close(&numbers(&got)?, &expected, 5.1e-5);

        let batch = fixture.batch().groups([0u32, 0, 0, 1].as_slice());
        let got = tokens(true).estimate(&batch)?.advantages;
        let expected = [0.625, 0., 1., -0.375, 0., 0., 0.625, 0., 0., 0., 0., 0.];
        assert_close(&numbers(&got)?, &expected, 5.1e-5);
    }
    Ok(())
}

#[test]
fn masked_tokens_take_a_time_step_only_if_counted() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 1]], device)?;
        let rewards = Tensor::new(&[[0f64, f64::NAN, 1.]], device)?;
        let values = Tensor::new(&[[0.25f64, f64::NAN, 0.5]], device)?;
        let batch = AdvantageBatch::from_token_rewards(&rewards, &mask).values(&values);
        let skipped = (MaskedTokens::Skipped, 0.5, 0.5 * 0.5 - 0.25 + 0.25 * 0.5);
        // The masked token has reward 0 and is followed by a value of 0.5.
        let counted = (
            MaskedTokens::Counted,
            0.25,
            -0.25 + 0.25 * 0.25 + 0.0625 * 0.5,
        );
        for (masked_tokens, discounted, generalised) in [skipped, counted] {
            let returns = TokenAdvantage {
                gamma: 0.5,
                masked_tokens,
                ..TokenAdvantage::default()
            };
            let got = returns.estimate(&batch)?.advantages;
            assert_close(&numbers(&got)?, &[discounted, 0., 1.], 1e-12);
            let gae = TokenAdvantage {
                lambda: Some(0.5),
                ..returns
            };
            let got = gae.estimate(&batch)?.advantages;
            assert_close(&numbers(&got)?, &[generalised, 0., 0.5], 1e-12);
        }
    }
    Ok(())
}

#[test]
fn gdpo_normalizes_components_before_the_sum() -> Result<()> {
    for device in devices() {
        let components = [[1f64, 0.], [0., 1.], [1., 1.], [0., 0.]];
        let rewards = Tensor::new(&components, device)?;
        let got = AdvantagePipeline::gdpo().estimate(&AdvantageBatch::new(&rewards, 4))?;
        let expected = [0., 0., 1.224658260, -1.224658260];
        assert_close(&numbers(&got.advantages)?, &expected, 1e-8);

        // A missing component is excluded; a sample without any gets 0 and affects no other.
        let nan = f64::NAN;
        let missing = [
            [1f64, 0.],
            [0., 1.],
            [1., 1.],
            [0., 0.],
            [nan, nan],
            [nan, 1.],
        ];
        let rewards = Tensor::new(&missing, device)?;
        let batch = AdvantageBatch::new(&rewards, [0u32, 0, 0, 0, 0, 1].as_slice());
        let gdpo = AdvantagePipeline::gdpo().map_sequence(|sequence| {
            sequence.non_finite = NonFinite::Exclude;
            sequence.single_sample = SingletonGroup::Zero;
            sequence.normalize = None;
        });
        let got = numbers(&gdpo.estimate(&batch)?.advantages)?;
        assert_eq!(got[4..], [0., 0.]);
        assert!((got[2] - 2. * 0.866).abs() < 1e-3, "{got:?}");
    }
    Ok(())
}

#[test]
fn batch_normalization_equals_trl() -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&EXAMPLE, device)?;
        let rloo = AdvantagePipeline::rloo()
            .map_sequence(|sequence| sequence.normalize = Some(Whitening::trl()));
        let got = numbers(&rloo.estimate(&AdvantageBatch::new(&rewards, 4))?.advantages)?;
        let variance: f64 = (4. * 4. / 9. + 1. + 3. / 9.) / 7.;
        assert_close(&got[4..5], &[1. / (variance.sqrt() + 1e-4)], 1e-9);
    }
    Ok(())
}

#[test]
fn the_kl_penalty_is_subtracted_from_the_sequence_reward() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let shifted = (&fixture.log_probs - 0.1)?;
        let batch = fixture.batch().ref_log_probs(&shifted);
        let sequence = GroupAdvantage {
            kl_penalty: Some(KlPenalty {
                coef: 2.,
                kl: Kl::new(KlEstimator::K1),
            }),
            ..GroupAdvantage::centered(Baseline::GroupMean)
        };
        // 0.2 for each token: rewards 0.4, -0.2, 0.6, -0.6.
        let got = sequence.estimate(&batch)?.advantages;
        assert_close(&numbers(&got)?, &[0.35, -0.25, 0.55, -0.65], 1e-12);
    }
    Ok(())
}

#[test]
fn distillation_subtracts_the_divergence_from_the_teacher() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device)?;
        let zeros = fixture.rewards.zeros_like()?;
        let teacher = (&fixture.log_probs + 0.5)?;
        let batch = AdvantageBatch::new(&zeros, 4)
            .response_mask(&fixture.mask)
            .old_log_probs(&fixture.log_probs)
            .teacher_log_probs(&teacher);
        let tokens = TokenAdvantage {
            distillation: Some(KlPenalty {
                coef: 2.,
                kl: Kl::new(KlEstimator::K1),
            }),
            ..TokenAdvantage::default()
        };
        let got = tokens.estimate(&batch)?;
        let expected = [1., 1., 1., 1., 0., 0., 1., 1., 0., 1., 1., 1.];
        assert_close(&numbers(&got.advantages)?, &expected, 1e-12);
        assert_close(&numbers(&got.returns.unwrap())?, &[0.; 12], 0.);
        assert_eq!(got.metrics.to_host()?.get("teacher_kl"), Some(-0.5));

        // The first and the last sequence have no teacher, whatever is in their place.
        let taught = Tensor::new(&[[0u8; 3], [1; 3], [1; 3], [0; 3]], device)?;
        let nan = (&teacher * f64::NAN)?;
        let given = taught.where_cond(&teacher, &nan)?;
        let batch = batch.teacher_log_probs(&given).teacher_mask(&taught);
        let got = tokens.estimate(&batch)?;
        let expected = [0., 0., 0., 1., 0., 0., 1., 1., 0., 0., 0., 0.];
        assert_close(&numbers(&got.advantages)?, &expected, 1e-12);
        assert_eq!(got.metrics.to_host()?.get("teacher_kl"), Some(-0.5));
        let wrong = batch.teacher_mask(&taught.t()?);
        let error = tokens.estimate(&wrong).unwrap_err().to_string();
        assert!(error.starts_with("teacher_mask: shape [3, 4]"), "{error}");
    }
    Ok(())
}

#[test]
fn masked_samples_can_be_excluded_from_the_statistics() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[1., 0., 5., 1., 0., 0.], device);
        let mask = Tensor::new(&[[1u8], [1], [0], [1], [1], [1]], device)?;
        let batch = AdvantageBatch::new(&rewards, 3).response_mask(&mask);
        let all = AdvantagePipeline::dr_grpo();
        let got = numbers(&all.estimate(&batch)?.advantages)?;
        assert_close(&got[..3], &[-1., -2., 3.], 1e-6);
        let unmasked =
            all.map_sequence(|sequence| sequence.population = BaselinePopulation::Unmasked);
        let got = numbers(&unmasked.estimate(&batch)?.advantages)?;
        assert_close(&got[..3], &[0.5, -0.5, 0.], 1e-6);
        assert_close(&got[3..], &[2. / 3., -1. / 3., -1. / 3.], 1e-6);
    }
    Ok(())
}

#[rstest]
#[case(&[2., 2., 1.], [0., 0., 0.])] // two best
#[case(&[-3., -1., -2.], [0., 1., 0.])]
#[case(&[f32::NAN, 7., 3.], [0., 4., 0.])]
#[case(&[f32::NAN, f32::NAN, 3.], [0., 0., 0.])]
fn pass_at_k_is_the_margin_of_the_best_sample(
    #[case] rewards: &[f32],
    #[case] expected: [f64; 3],
) -> Result<()> {
    for device in devices() {
        let pipeline = AdvantagePipeline::pass_at_k().map_sequence(|sequence| {
            sequence.scale = Scale::None;
            sequence.non_finite = NonFinite::Exclude;
        });
        let rewards = tensor(rewards, device);
        let got = pipeline.estimate(&AdvantageBatch::new(&rewards, 3))?;
        assert_close(&numbers(&got.advantages)?, &expected, 0.);
    }
    Ok(())
}

#[test]
fn openrlhf_clips_after_the_baseline() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[0., 8., 1., 1.], device);
        let rloo = AdvantagePipeline::rloo().map_sequence(|s| s.clip = Some([-0.5, 2.]));
        let got = rloo.estimate(&AdvantageBatch::new(&rewards, 2))?;
        assert_close(&numbers(&got.advantages)?, &[-0.5, 2., 0., 0.], 0.);
        let metrics = got.metrics.to_host()?;
        assert_eq!(metrics.get("sequence_clip_fraction"), Some(0.5));
    }
    Ok(())
}

/// The published estimators' names and pipelines.
fn published() -> [(&'static str, AdvantagePipeline); 18] {
    use AdvantagePipeline as P;
    [
        ("grpo", P::grpo()),
        ("dr_grpo", P::dr_grpo()),
        ("lite_ppo", experimental::lite_ppo()),
        ("rloo", P::rloo()),
        ("max_rl", experimental::max_rl()),
        ("opo", experimental::opo()),
        ("gpg", P::gpg()),
        ("pass_at_k", P::pass_at_k()),
        ("gdpo", P::gdpo()),
        ("reinforce_plus_plus", P::reinforce_plus_plus()),
        (
            "reinforce_plus_plus_baseline",
            P::reinforce_plus_plus_baseline(),
        ),
        ("remax", P::remax()),
        ("gae", P::gae(1., 0.95)),
        ("optimal_token_baseline", P::optimal_token_baseline()),
        (
            "multi_turn_optimal_token_baseline",
            P::multi_turn_optimal_token_baseline(),
        ),
        ("reinforce", P::reinforce()),
        ("reinforce_baseline", P::reinforce_baseline()),
        ("flash_reinforce", experimental::flash_reinforce()),
    ]
}

#[test]
fn every_estimator_has_a_name_and_survives_serde() -> serde_json::Result<()> {
    for (name, pipeline) in published() {
        let config: AdvantagePipeline = serde_json::from_str(&format!(r#"{{"name": "{name}"}}"#))?;
        assert_eq!(config.pipeline(), pipeline.pipeline(), "{name}");
        let again: AdvantagePipeline = serde_json::from_str(&serde_json::to_string(&config)?)?;
        assert_eq!(again, config);
        let explicit = pipeline.pipeline();
        let again: AdvantagePipeline = serde_json::from_str(&serde_json::to_string(&explicit)?)?;
        assert_eq!(again, explicit);
        let unknown = format!(r#"{{"name": "{name}", "epsilom": 1}}"#);
        let error = serde_json::from_str::<AdvantagePipeline>(&unknown).unwrap_err();
        assert!(error.to_string().contains("epsilom"), "{name}: {error}");
    }
    let default = AdvantagePipeline::default();
    assert_eq!(default, AdvantagePipeline::grpo());
    let error = serde_json::from_str::<AdvantagePipeline>(r#"{"name": "grop"}"#).unwrap_err();
    assert!(error.to_string().contains("grop"), "{error}");
    let gae: AdvantagePipeline = serde_json::from_str(r#"{"name": "gae", "lambda": 0.5}"#)?;
    assert_eq!(gae.pipeline(), AdvantagePipeline::gae(1., 0.5).pipeline());
    let unknown = r#"{"name": "pipeline", "sequence": {"epsilom": 1}}"#;
    assert!(serde_json::from_str::<AdvantagePipeline>(unknown).is_err());
    Ok(())
}

#[test]
fn options_beside_a_name_are_laid_over_its_stages() -> serde_json::Result<()> {
    let text = r#"{"name": "reinforce_plus_plus_baseline", "scale": "batch", "epsilon": 0.5, "gamma": 0.25,
        "single_sample": "zero", "compensation": "non_zero_rewards", "reward_weights": [2, 3],
        "kl_penalty": {"coef": 0.125}}"#;
    let penalty = KlPenalty {
        coef: 0.125,
        ..KlPenalty::default()
    };
    let expected = AdvantagePipeline::reinforce_plus_plus_baseline()
        .map_sequence(|group| {
            group.scale = Scale::Batch;
            group.epsilon = 0.5;
            group.single_sample = SingletonGroup::Zero;
            group.compensation = ZeroSignalScaling::NonZeroRewards;
            group.reward_weights = Some(vec![2., 3.]);
        })
        .map_tokens(|tokens| {
            tokens.gamma = 0.25;
            tokens.kl_penalty = Some(penalty);
        });
    let config: AdvantagePipeline = serde_json::from_str(text)?;
    assert_eq!(config.pipeline(), expected);
    let text = r#"{"name": "opo", "kl_penalty": {"coef": 0.125}}"#;
    let config: AdvantagePipeline = serde_json::from_str(text)?;
    let expected = experimental::opo().map_sequence(|group| group.kl_penalty = Some(penalty));
    assert_eq!(config.pipeline(), expected);
    Ok(())
}

#[test]
fn the_zero_tail_excludes_columns_that_two_sequences_share() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 0, 1, 1], [1, 0, 0, 1, 0]], device)?;
        let rewards = tensor(&[1., 3.], device);
        let log_probs = Tensor::full(0.5f32.ln(), (2, 5), device)?;
        let squares = Tensor::full(0.5f32, (2, 5), device)?;
        let batch = AdvantageBatch::new(&rewards, 2)
            .response_mask(&mask)
            .old_log_probs(&log_probs)
            .sum_of_squared_probs(&squares);
        let advantages = AdvantagePipeline::optimal_token_baseline().estimate(&batch)?;
        // The energies are equal, so the baseline is the mean of the returns, 2, but for the last
        // column.
        let expected = [-1., 0., 0., -1., 1., 1., 0., 0., 1., 0.];
        assert_close(&numbers(&advantages.advantages)?, &expected, 1e-6);
    }
    Ok(())
}
