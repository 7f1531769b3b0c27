//! The divergence over the whole vocabulary as the regulariser of a loss.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_grpo_core::Kl;
use candle_grpo_loss::{Aggregation, KlLoss, PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

/// Two sequences of three tokens from a vocabulary of four.
const SHAPE: (usize, usize, usize) = (2, 3, 4);
const MASK: [[u8; 3]; 2] = [[1, 0, 1], [1, 0, 0]];

fn logits(seed: f64) -> Vec<f64> {
    (0..24).map(|i| (f64::from(i) * seed).sin() * 2.).collect()
}

fn log_dist(logits: &Tensor) -> Result<Tensor> {
    logits.broadcast_sub(&logits.log_sum_exp(D::Minus1)?.unsqueeze(D::Minus1)?)
}

/// The loss of the first token of the vocabulary everywhere, and what `kl` of it is.
fn loss(
    logits: &Tensor,
    reference: &Tensor,
    kl: Option<KlLoss>,
    aggregation: Aggregation,
) -> Result<Tensor> {
    let device = logits.device();
    let policy = log_dist(logits)?;
    let kl_values = Kl::full(&policy, &log_dist(reference)?)?;
    let log_probs = policy.narrow(2, 0, 1)?.squeeze(2)?;
    let old = (log_probs.detach() * 0.9)?;
    let advantages = Tensor::new(&[0.7f64, -0.4], device)?;
    let mask = Tensor::new(&MASK, device)?;
    let policy_loss = PolicyLoss {
        kl,
        aggregation,
        loss_coef: 0.5,
        ..Default::default()
    };
    let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
        .old_log_probs(&old)
        .kl_values(&kl_values);
    let output = policy_loss.compute(&batch, &StepTotals::count(&mask)?)?;
    assert_eq!(output.metrics.to_host()?.get("kl").is_some(), kl.is_some());
    Ok(output.loss)
}

fn tensor(values: &[f64], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(values, SHAPE, device)
}

/// `sum_v p (log p - log q)` of one position, in plain loops.
fn divergence(logits: &[f64], reference: &[f64]) -> f64 {
    let log_dist = |x: &[f64]| {
        let total = x.iter().map(|z| z.exp()).sum::<f64>().ln();
        x.iter().map(|z| z - total).collect::<Vec<f64>>()
    };
    let pairs = log_dist(logits).into_iter().zip(log_dist(reference));
    pairs.map(|(p, q)| p.exp() * (p - q)).sum()
}

#[rstest]
// Over three tokens; and over two of the first sequence and one of the second.
#[case(Aggregation::TokenMean, [1. / 3., 1. / 3., 1. / 3.])]
#[case(Aggregation::SeqMeanTokenMean, [0.25, 0.25, 0.5])]
fn a_given_kl_has_the_coefficient_mask_and_aggregation_of_an_estimate(
    #[case] aggregation: Aggregation,
    #[case] shares: [f64; 3],
) -> Result<()> {
    let (policy, reference) = (logits(1.3), logits(0.7));
    let at = |position: usize| {
        let range = 4 * position..4 * position + 4;
        divergence(&policy[range.clone()], &reference[range])
    };
    let expected = shares[0] * at(0) + shares[1] * at(2) + shares[2] * at(3);
    for device in devices() {
        let (policy, reference) = (tensor(&policy, device)?, tensor(&reference, device)?);
        let of = |kl| loss(&policy, &reference, kl, aggregation)?.to_scalar::<f64>();
        let term = of(Some(KlLoss::given(0.3)))? - of(None)?;
        assert_close(&[term], &[0.5 * 0.3 * expected], 1e-12);
    }
    Ok(())
}

#[test]
fn the_gradient_of_a_given_kl_is_the_finite_difference() -> Result<()> {
    let aggregation = Aggregation::TokenMean;
    let (policy, step) = (logits(1.3), 1e-6);
    for device in devices() {
        let reference = tensor(&logits(0.7), device)?;
        let kl = Some(KlLoss::given(0.3));
        let value = |x: &[f64]| -> Result<f64> {
            // The policy term is taken off: its old policy is a constant, and would move along
            // here.
            let moved =
                loss(&tensor(x, device)?, &reference, kl, aggregation)?.to_scalar::<f64>()?;
            let without = loss(&tensor(x, device)?, &reference, None, aggregation)?;
            Ok(moved - without.to_scalar::<f64>()?)
        };
        let gradient = |kl| -> Result<Vec<f64>> {
            let policy = Var::from_tensor(&tensor(&policy, device)?)?;
            let gradients = loss(&policy, &reference, kl, aggregation)?.backward()?;
            numbers(gradients.get(&policy).expect("a gradient of the logits"))
        };
        let (with, without) = (gradient(kl)?, gradient(None)?);
        for i in 0..policy.len() {
            let mut moved = policy.clone();
            moved[i] += step;
            let above = value(&moved)?;
            moved[i] -= 2. * step;
            let difference = (above - value(&moved)?) / (2. * step);
            assert_close(&[with[i] - without[i]], &[difference], 1e-8);
            let outside = i / 4 % 3 == 1 || i / 4 == 5;
            assert_eq!(with[i] == 0., outside, "[{i}]");
        }
    }
    Ok(())
}

#[test]
fn kl_values_outside_the_mask_change_nothing() -> Result<()> {
    for device in devices() {
        let log_probs = Tensor::new(&[[-1f64, -2., -0.5], [-0.3, -1., -1.]], device)?;
        let mask = Tensor::new(&MASK, device)?;
        let advantages = Tensor::new(&[1f64, -1.], device)?;
        let policy_loss = PolicyLoss {
            kl: Some(KlLoss::given(0.3)),
            ..PolicyLoss::dapo()
        };
        let of = |outside: f64| -> Result<(f64, Vec<f64>)> {
            let values = [[0.1, outside, 0.2], [0.3, outside, outside]];
            let kl_values = Var::new(&values, device)?;
            let batch =
                PolicyBatch::new(&log_probs, &advantages, &mask).kl_values(kl_values.as_tensor());
            let output = policy_loss.compute(&batch, &StepTotals::count(&mask)?)?;
            assert_close(
                &[output.metrics.to_host()?.get("kl").expect("a KL")],
                &[0.2],
                1e-12,
            );
            let gradients = output.loss.backward()?;
            let gradient = numbers(gradients.get(&kl_values).expect("a gradient"))?;
            Ok((output.loss.to_scalar()?, gradient))
        };
        let clean = of(0.)?;
        assert_close(&clean.1, &[0.1, 0., 0.1, 0.1, 0., 0.], 1e-12);
        for outside in [f64::NAN, f64::INFINITY, 1e300] {
            assert_eq!(of(outside)?, clean);
        }
    }
    Ok(())
}
