//! Losses and gradients of a fixture that was put through the code of verl, TRL and ROLL.

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, ImportanceLevel, KlLoss, PolicyBatch, PolicyLoss,
    StepTotals, Surrogate,
};
use rstest::rstest;

use crate::assert_close;

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

fn compute(loss: &PolicyLoss) -> Result<(f64, Vec<f64>, candle_grpo_core::MetricValues)> {
    let device = Device::Cpu;
    let old = Tensor::new(&OLD, &device)?;
    let log_probs = Var::from_tensor(&(&old + Tensor::new(&D, &device)?)?)?;
    let reference = Tensor::new(&REFERENCE, &device)?;
    let mask = Tensor::new(&[[1u8, 1, 1, 1], [1, 1, 1, 0]], &device)?;
    let advantages = Tensor::new(&[1f64, -0.5], &device)?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
        .old_log_probs(&old)
        .ref_log_probs(&reference);
    let output = loss.compute(&batch, &StepTotals::to_host(&mask)?)?;
    let gradient = output.loss.backward()?;
    let gradient = crate::numbers(gradient.get(&log_probs).expect("a gradient"))?;
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
#[case::k3(
    PolicyLoss { kl: Some(KlLoss::k3(0.1)), ..with(clip(), Aggregation::SeqMeanTokenMean) },
    -0.065882872,
    &[0.002265866, -0.083790006, -0.144294173, -0.123810468, 0.285066655, -0.013701980, 0.080081962, 0.]
)]
#[case::k3_corrected(
    PolicyLoss {
        kl: Some(KlLoss { coef: 0.1, kl: Kl::new(KlEstimator::K3), bias_correction: BiasCorrection::Token }),
        ..with(clip(), Aggregation::SeqMeanTokenMean)
    },
    -0.059300028,
    &[0.003374647, -0.083790006, -0.143672219, -0.12375, 0.315411108, -0.0067032, 0.08006181, 0.]
)]
fn loss_and_gradient(
    #[case] loss: PolicyLoss,
    #[case] expected: f64,
    #[case] expected_gradient: &[f64],
) -> Result<()> {
    let (value, gradient, _) = compute(&loss)?;
    assert_close(&[value], &[expected], 1e-8);
    assert_close(&gradient, expected_gradient, 1e-8);
    Ok(())
}

#[test]
fn metrics() -> Result<()> {
    let dual = Clip {
        dual_clip: Some(3.),
        ..clip()
    };
    let loss = PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        ..with(dual, Aggregation::TokenMean)
    };
    let (_, _, metrics) = compute(&loss)?;
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
    Ok(())
}
