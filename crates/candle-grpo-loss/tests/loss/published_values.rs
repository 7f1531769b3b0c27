//! Losses and gradients for a fixture that was run through verl's, TRL's and ROLL's code.

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo_loss::correction::{ImportanceWeight, OutOfBounds};
use candle_grpo_loss::surrogate::{DetachedWeight, GeometricMean, SoftGate};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, ImportanceLevel, KlLoss, PolicyBatch, PolicyLoss,
    RolloutCorrection, StepTotals, Surrogate, experimental,
};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

const OLD: [[f64; 4]; 2] = [[-1., -0.5, -2., -0.1], [-2., -1.2, -0.3, 0.]];
const D: [[f64; 4]; 2] = [[0.3, -0.4, 0.1, 0.], [1.2, -0.4, -0.05, 0.]];
const REFERENCE: [[f64; 4]; 2] = [[-0.9, -0.9, -1.5, -0.2], [-1.5, -1., -0.4, 0.]];

fn clip() -> Clip {
    Clip::symmetric(0.2)
}

fn with(surrogate: Clip, aggregation: Aggregation) -> PolicyLoss {
    PolicyLoss {
        surrogate: Surrogate::Clip(surrogate),
        aggregation,
        ..Default::default()
    }
}

fn with_surrogate(surrogate: impl Into<Surrogate>, aggregation: Aggregation) -> PolicyLoss {
    PolicyLoss {
        surrogate: surrogate.into(),
        aggregation,
        ..Default::default()
    }
}

fn bounded(min: f64, max: f64) -> DetachedWeight {
    DetachedWeight {
        ratio_min: Some(min),
        ..DetachedWeight::at_most(max)
    }
}

fn compute(
    loss: &PolicyLoss,
    device: &Device,
) -> Result<(f64, Vec<f64>, candle_grpo_core::MetricValues)> {
    let old = Tensor::new(&OLD, device)?;
    let log_probs = Var::from_tensor(&(&old + Tensor::new(&D, device)?)?)?;
    let reference = Tensor::new(&REFERENCE, device)?;
    let mask = Tensor::new(&[[1u8, 1, 1, 1], [1, 1, 1, 0]], device)?;
    let advantages = Tensor::new(&[1f64, -0.5], device)?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
        .old_log_probs(&old)
        .ref_log_probs(&reference);
    let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
    let gradient = output.loss.backward()?;
    let gradient = numbers(gradient.get(&log_probs).expect("a gradient"))?;
    Ok((
        output.loss.to_scalar()?,
        gradient,
        output.metrics.to_host()?,
    ))
}

#[rstest]
#[case::ppo_token_mean(
    with(clip(), Aggregation::TokenMean), -0.205688256,
    &[0., -0.095760007, -0.157881560, -0.142857143, 0.237151209, 0., 0.067944959, 0.]
)]
#[case::ppo_seq_mean_token_mean(
    with(clip(), Aggregation::SeqMeanTokenMean), -0.074324175,
    &[0., -0.083790006, -0.138146365, -0.125, 0.276676410, 0., 0.079269119, 0.]
)]
#[case::dr_grpo(
    with(clip(), Aggregation::SeqMeanTokenSumNorm { length: 8. }), -0.089988612,
    &[0., -0.041895003, -0.069073182, -0.0625, 0.103753654, 0., 0.029725920, 0.]
)]
#[case::dual_clip_of_verl(
    with(Clip { dual_clip: Some(3.), ..clip() }, Aggregation::TokenMean), -0.228553750,
    &[0., -0.095760007, -0.157881560, -0.142857143, 0., 0., 0.067944959, 0.]
)]
#[case::dual_clip_of_roll(
    with(Clip { dual_clip: Some(1.4), ..clip() }, Aggregation::TokenMean), -0.342839465,
    &[0., -0.095760007, -0.157881560, -0.142857143, 0., 0., 0.067944959, 0.]
)]
#[case::delta_of_trl(
    with(Clip { delta: Some(3.), ..clip() }, Aggregation::SeqMeanTokenMean), -0.101000585,
    &[0., -0.083790006, -0.138146365, -0.125, 0., 0., 0.079269119, 0.]
)]
#[case::gspo(
    PolicyLoss { importance_level: ImportanceLevel::Sequence, ..with(clip(), Aggregation::SeqMeanTokenMean) },
    -0.178993646,
    &[-0.125, -0.125, -0.125, -0.125, 0.107002118, 0.107002118, 0.107002118, 0.]
)]
#[case::policy_gradient(
    PolicyLoss { surrogate: Surrogate::PolicyGradient, aggregation: Aggregation::TokenMean, ..Default::default() },
    0.317857143,
    &[-0.142857143, -0.142857143, -0.142857143, -0.142857143, 0.071428571, 0.071428571, 0.071428571, 0.]
)]
#[case::delta_below_the_clip(
    with(Clip { delta: Some(1.3), ..clip() }, Aggregation::SeqMeanTokenMean), -0.242667252,
    &[0., -0.083790006, -0.138146365, -0.125, 0., 0., 0.079269119, 0.]
)]
#[case::luspo(
    PolicyLoss { importance_level: ImportanceLevel::Sequence, ..with(clip(), Aggregation::SeqMeanTokenSum) },
    -1.036980937,
    &[-0.5, -0.5, -0.5, -0.5, 0.321006354, 0.321006354, 0.321006354, 0.]
)]
#[case::gmpo(
    with_surrogate(GeometricMean { low: 0.35, high: 0.35 }, Aggregation::SeqMeanTokenMean), -0.173598707,
    &[-0.125, -0.125, -0.125, -0.125, 0.108800431, 0., 0.108800431, 0.]
)]
#[case::sapo(
    with_surrogate(SoftGate::default(), Aggregation::SeqMeanTokenMean), -0.437472742,
    &[-0.163672625, -0.081553862, -0.137765061, -0.125, 0.081880287, 0.054219447, 0.079217173, 0.]
)]
#[case::cispo_of_verl(
    with_surrogate(bounded(0.8, 1.2), Aggregation::TokenMean), 0.353337,
    &[-0.171429, -0.114286, -0.157882, -0.142857, 0.085714, 0.057143, 0.067945, 0.]
)]
#[case::cispo_of_trl(
    with_surrogate(DetachedWeight::at_most(1.2), Aggregation::TokenMean), 0.351484514,
    &[-0.171428571, -0.095760007, -0.157881560, -0.142857143, 0.085714286, 0.047880003, 0.067944959, 0.]
)]
#[case::cispo_of_roll(
    with_surrogate(bounded(0.9, 1.1), Aggregation::TokenMean), 0.349076407,
    &[-0.157142857, -0.128571429, -0.157142857, -0.142857143, 0.078571429, 0.064285714, 0.067944959, 0.]
)]
#[case::tis(
    PolicyLoss::tis(), 0.314366694,
    &[-0.142857143, -0.095760007, -0.142857143, -0.142857143, 0.071428571, 0.047880003, 0.067944959, 0.]
)]
#[case::topr(
    PolicyLoss::topr(), 0.356754116,
    &[-0.142857143, -0.142857143, -0.142857143, -0.142857143, 0.071428571, 0.047880003, 0.067944959, 0.]
)]
#[case::kimi(
    PolicyLoss::kimi_k1_5(), 0.331160714,
    &[-0.138571429, -0.148571429, -0.141428571, -0.142857143, 0.088571429, 0.065714286, 0.070714286, 0.]
)]
#[case::vespo(
    experimental::policy_loss::vespo(), 0.314689015,
    &[-0.142857143, -0.142857143, -0.142857143, -0.142857143, 0.072580618, 0.072580618, 0.072580618, 0.]
)]
#[case::rloo_of_trl(
    PolicyLoss { importance_level: ImportanceLevel::SequenceProduct, ..with(clip(), Aggregation::SeqMeanTokenMean) },
    0.029250004,
    &[-0.5, -0.5, -0.5, -0.5, 0.529250004, 0.529250004, 0.529250004, 0.]
)]
#[case::k3(
    PolicyLoss { kl: Some(KlLoss::k3(0.1)), ..with(clip(), Aggregation::SeqMeanTokenMean) },
    -0.065882872,
    &[0.002265866, -0.083790006, -0.144294173, -0.123810468, 0.285066655, -0.013701980, 0.080081962, 0.]
)]
#[case::k3_corrected(
    PolicyLoss {
        kl: Some(KlLoss { bias_correction: BiasCorrection::Token, ..KlLoss::k3(0.1) }),
        ..with(clip(), Aggregation::SeqMeanTokenMean)
    },
    -0.059300028,
    &[0.003374647, -0.083790006, -0.143672219, -0.12375, 0.315411108, -0.0067032, 0.08006181, 0.]
)]
fn losses_and_gradients_have_their_published_values(
    #[case] loss: PolicyLoss,
    #[case] expected: f64,
    #[case] expected_gradient: &[f64],
) -> Result<()> {
    for device in devices() {
        let (value, gradient, _) = compute(&loss, device)?;
        // Some rows are printed with six digits.
        assert_close(&[value], &[expected], 1e-6);
        assert_close(&gradient, expected_gradient, 1e-6);
    }
    Ok(())
}

#[test]
fn metrics_have_their_published_values() -> Result<()> {
    for device in devices() {
        let dual = Clip {
            dual_clip: Some(3.),
            ..clip()
        };
        let loss = PolicyLoss {
            kl: Some(KlLoss::k3(0.1)),
            ..with(dual, Aggregation::TokenMean)
        };
        let (_, _, metrics) = compute(&loss, device)?;
        let get = |name: &str| metrics.get(name).unwrap_or(f64::NAN);
        assert_close(
            &[
                get("clip_fraction"),
                get("clip_fraction_low"),
                get("clip_fraction_high"),
                get("dual_clip_fraction"),
                get("approx_kl"),
                get("kl"),
            ],
            &[2. / 7., 1. / 7., 1. / 7., 1. / 7., -0.107142857, 0.0764752],
            1e-7,
        );
        assert_close(
            &[get("ratio_max"), get("ratio_min")],
            &[1.2f64.exp(), (-0.4f64).exp()],
            1e-12,
        );
    }
    Ok(())
}

/// Weights for the fixture's rollout, at each level and with each kind of bound.
#[rstest]
#[case::truncated(
    weight(ImportanceLevel::Token, None, 1.2, OutOfBounds::Truncate), Aggregation::SeqMeanTokenMean, -0.160440396,
    &[0., -0.075816332, -0.165775638, -0.125, 0.226523486, 0., 0.071725665, 0.]
)]
#[case::masked(
    weight(ImportanceLevel::Token, None, 1.2, OutOfBounds::Mask), Aggregation::SeqMeanTokenMean, 0.005335241,
    &[0., -0.075816332, 0., -0.125, 0.226523486, 0., 0.071725665, 0.]
)]
#[case::product(
    weight(ImportanceLevel::SequenceProduct, None, 1.2, OutOfBounds::Truncate), Aggregation::SeqMeanTokenMean,
    -0.250318043,
    &[0., -0.100548007, -0.165775638, -0.15, 0.226523486, 0., 0.064900065, 0.]
)]
#[case::tis_of_openrlhf(
    weight(ImportanceLevel::Token, Some(0.8), 1.2, OutOfBounds::Truncate), Aggregation::TokenMean, -0.289625370,
    &[0., -0.086647237, -0.189457872, -0.142857143, 0.194162988, 0., 0.061479141, 0.]
)]
#[case::icepop(
    ImportanceWeight::icepop(0.8, 1.2), Aggregation::TokenMean, -0.100167499,
    &[0., -0.086647237, 0., -0.142857143, 0.194162988, 0., 0.061479141, 0.]
)]
fn corrected_losses_and_gradients_have_their_published_values(
    #[case] weight: ImportanceWeight,
    #[case] aggregation: Aggregation,
    #[case] expected: f64,
    #[case] expected_gradient: &[f64],
) -> Result<()> {
    for device in devices() {
        let old = Tensor::new(&OLD, device)?;
        let log_probs = Var::from_tensor(&(&old + Tensor::new(&D, device)?)?)?;
        let rollout = Tensor::new(
            &[[-1.1, -0.4, -2.3, -0.1], [-1.8, -1.3, -0.2, f64::NAN]],
            device,
        )?;
        let mask = Tensor::new(&[[1u8, 1, 1, 1], [1, 1, 1, 0]], device)?;
        let correction = RolloutCorrection {
            weight: Some(weight),
            ..Default::default()
        };
        let corrected = correction.compute(&old, &rollout, &mask)?;
        let metrics = corrected.metrics.to_host()?;
        assert_close(
            &[metrics.get("rollout_kl").expect("a KL")],
            &[-0.014285714],
            1e-8,
        );
        let loss = PolicyLoss {
            rollout_correction: Some(correction),
            ..with(clip(), aggregation)
        };
        let advantages = Tensor::new(&[1f64, -0.5], device)?;
        let weights = corrected.weights.expect("weights");
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
            .old_log_probs(&old)
            .importance_weights(&weights);
        let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
        let gradient = output.loss.backward()?;
        let gradient = numbers(gradient.get(&log_probs).expect("a gradient"))?;
        assert_close(&[output.loss.to_scalar()?], &[expected], 1e-8);
        assert_close(&gradient, expected_gradient, 1e-8);
    }
    Ok(())
}

fn weight(
    level: ImportanceLevel,
    min: Option<f64>,
    max: f64,
    out_of_bounds: OutOfBounds,
) -> ImportanceWeight {
    ImportanceWeight {
        level,
        min,
        max: Some(max),
        out_of_bounds,
        normalize: false,
    }
}

/// GMPO counts a bound only on the side where it changes something: above with `A = 1`, below with
/// `A = -0.5`.
#[test]
fn gmpo_counts_the_clips_that_act() -> Result<()> {
    for device in devices() {
        let tight = GeometricMean {
            low: 0.2,
            high: 0.2,
        };
        // d is 0.3, -0.4, 0.1, 0 and 1.2, -0.4, -0.05.
        let (_, gradient, metrics) = compute(
            &with_surrogate(tight, Aggregation::SeqMeanTokenMean),
            device,
        )?;
        let clipped = |i: usize| gradient[i] == 0.;
        assert_eq!([0, 1, 4, 5].map(clipped), [true, false, false, true]);
        let names = ["clip_fraction", "clip_fraction_low", "clip_fraction_high"];
        assert_close(
            &names.map(|name| metrics.get(name).expect(name)),
            &[2. / 7., 1. / 7., 1. / 7.],
            1e-12,
        );
    }
    Ok(())
}
