//! The cross entropy on observations (ECHO).

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::MetricValues;
use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_test_support::{assert_close, devices, message, numbers};

const MASK: [[u8; 4]; 3] = [[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]];
/// Row 1 ends with padding, and row 2 has no observation.
const OBSERVED: [[u8; 4]; 3] = [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]];
const LOG_PROBS: [[f64; 4]; 3] = [
    [-0.5, -1.25, -0.25, -2.],
    [-0.75, -0.1, -3., f64::NAN],
    [-0.2, -0.3, -0.4, -0.6],
];

fn loss(observation_coef: f64) -> PolicyLoss {
    PolicyLoss {
        observation_coef,
        ..PolicyLoss::dapo()
    }
}

/// Returns the loss, its gradient, and the metrics.
fn compute(
    policy_loss: &PolicyLoss,
    log_probs: &[[f64; 4]],
    (mask, observed): (&[[u8; 4]], &[[u8; 4]]),
    totals: &StepTotals,
    device: &Device,
) -> Result<(f64, Vec<f64>, MetricValues)> {
    let shape = (mask.len(), 4);
    let log_probs = Tensor::from_slice(log_probs.as_flattened(), shape, device)?;
    let log_probs = Var::from_tensor(&log_probs)?;
    let flags = |mask: &[[u8; 4]]| Tensor::from_slice(mask.as_flattened(), shape, device);
    let advantages = Tensor::ones((mask.len(), 1), DType::F64, device)?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &flags(mask)?)
        .observation_mask(&flags(observed)?);
    let output = policy_loss.compute(&batch, totals)?;
    let gradients = output.loss.backward()?;
    let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
    Ok((
        numbers(&output.loss)?[0],
        gradient,
        output.metrics.to_host()?,
    ))
}

fn totals(observed: &[[u8; 4]; 3]) -> Result<StepTotals> {
    let tensor = |mask: &[[u8; 4]; 3]| Tensor::new(mask, &Device::Cpu);
    StepTotals::count(&tensor(&MASK)?)?.with_observation_mask(&tensor(observed)?)
}

/// The mean over the three observations, (1.25 + 0.25 + 3) / 3 nats, whose derivative is -1 / 3.
#[test]
fn observations_add_their_mean_cross_entropy() -> Result<()> {
    for device in devices() {
        let totals = totals(&OBSERVED)?;
        let masks = (&MASK[..], &OBSERVED[..]);
        let (without, gradient, metrics) = compute(&loss(0.), &LOG_PROBS, masks, &totals, device)?;
        assert_eq!(metrics.get("observation_loss"), None);
        let (found, moved, metrics) = compute(&loss(0.05), &LOG_PROBS, masks, &totals, device)?;
        assert_close(&[found - without], &[0.05 * 1.5], 1e-12);
        assert_eq!(metrics.get("observation_loss"), Some(1.5));
        let observed = OBSERVED.as_flattened().iter();
        let expected = gradient.iter().zip(observed);
        let expected: Vec<f64> = expected
            .map(|(gradient, &observed)| gradient - f64::from(observed) * 0.05 / 3.)
            .collect();
        assert_close(&moved, &expected, 1e-12);
    }
    Ok(())
}

#[test]
fn the_gradient_is_the_finite_difference_of_the_loss() -> Result<()> {
    let totals = totals(&OBSERVED)?;
    let masks = (&MASK[..], &OBSERVED[..]);
    // Without an old policy, the value of the surrogate does not depend on the log-probs.
    let alone = PolicyLoss {
        loss_coef: 0.,
        ..loss(0.3)
    };
    let compute = |x: &[[f64; 4]]| compute(&alone, x, masks, &totals, &Device::Cpu);
    let (_, gradient, _) = compute(&LOG_PROBS)?;
    let step = 1e-6;
    for (place, found) in gradient.into_iter().enumerate() {
        let moved = |by: f64| {
            let mut moved = LOG_PROBS;
            moved[place / 4][place % 4] += by;
            Ok::<f64, candle_core::Error>(compute(&moved)?.0)
        };
        let expected = (moved(step)? - moved(-step)?) / (2. * step);
        assert!(
            (found - expected).abs() < 1e-8,
            "{place}: {found} {expected}"
        );
    }
    Ok(())
}

#[test]
fn micro_batches_add_up_even_if_one_has_no_observations() -> Result<()> {
    for device in devices() {
        let totals = totals(&OBSERVED)?;
        let whole = (&MASK[..], &OBSERVED[..]);
        let (expected, gradient, metrics) =
            compute(&loss(0.05), &LOG_PROBS, whole, &totals, device)?;
        let (mut sum, mut gradients, mut merged) = (0., Vec::new(), MetricValues::default());
        for row in 0..3 {
            let part = (&MASK[row..=row], &OBSERVED[row..=row]);
            let log_probs = &LOG_PROBS[row..=row];
            let (loss, gradient, metrics) = compute(&loss(0.05), log_probs, part, &totals, device)?;
            sum += loss;
            gradients.extend(gradient);
            merged.merge(&metrics)?;
        }
        assert_close(&[sum], &[expected], 1e-12);
        assert_close(&gradients, &gradient, 1e-12);
        let name = "observation_loss";
        assert_eq!(merged.get(name), metrics.get(name));
    }
    Ok(())
}

#[test]
fn without_observations_the_term_is_0() -> Result<()> {
    for device in devices() {
        let none = [[0; 4]; 3];
        let totals = totals(&none)?;
        let masks = (&MASK[..], &none[..]);
        let (expected, gradient, _) = compute(&loss(0.), &LOG_PROBS, masks, &totals, device)?;
        let (found, moved, _) = compute(&loss(0.05), &LOG_PROBS, masks, &totals, device)?;
        assert_eq!(found, expected);
        assert_eq!(moved, gradient);
    }
    Ok(())
}

#[test]
fn a_coefficient_that_lacks_its_inputs_is_an_error() -> Result<()> {
    let counted = totals(&OBSERVED)?;
    let masks = (&MASK[..], &OBSERVED[..]);
    let uncounted = StepTotals {
        observations: None,
        ..counted
    };
    let error = message(compute(
        &loss(0.05),
        &LOG_PROBS,
        masks,
        &uncounted,
        &Device::Cpu,
    ));
    assert!(error.starts_with("totals.observations: absent"), "{error}");
    let log_probs = Var::from_tensor(&Tensor::new(&LOG_PROBS, &Device::Cpu)?)?;
    let advantages = Tensor::ones((3, 1), DType::F64, &Device::Cpu)?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &Tensor::new(&MASK, &Device::Cpu)?);
    let error = message(loss(0.05).compute(&batch, &counted));
    assert!(error.starts_with("observation_mask: absent"), "{error}");
    let error = message(loss(-0.5).validate());
    assert_eq!(
        error,
        "observation_coef: -0.5, must be finite and at least 0"
    );
    Ok(())
}
