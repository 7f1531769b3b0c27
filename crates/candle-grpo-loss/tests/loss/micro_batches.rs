//! k micro-batches against one batch.

use candle_core::{DType, Result};
use candle_grpo_core::MetricValues;
use candle_grpo_loss::PolicyLoss;
use candle_grpo_test_support::{assert_close, devices};
use rstest::rstest;

use crate::fixture::{B, Fixture, all_losses};

#[rstest]
#[case::one_by_one(&[0, 1, 2, 3, 4, 5])]
#[case::unequal(&[0, 3, 5])]
#[case::an_empty_one(&[0, 2, 3, 5])]
fn micro_batches_add_up_to_the_batch(#[case] bounds: &[usize]) -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let totals = fixture.totals()?;
        for loss in all_losses() {
            let whole = fixture.compute(&loss)?;
            let (mut sum, mut log_probs, mut entropy) = (0., Vec::new(), Vec::new());
            let mut metrics = MetricValues::default();
            for pair in bounds.windows(2) {
                let part = fixture.compute_rows(&loss, pair[0]..pair[1], &totals, DType::F64)?;
                sum += part.loss;
                log_probs.extend(part.log_probs);
                entropy.extend(part.entropy);
                metrics.merge(&part.output.metrics.to_host()?)?;
            }
            assert_close(&[sum], &[whole.loss], 1e-12);
            assert_close(&log_probs, &whole.log_probs, 1e-12);
            assert_close(&entropy, &whole.entropy, 1e-12);
            let expected = whole.output.metrics.to_host()?;
            let names: Vec<&str> = expected.iter().map(|(name, _)| name).collect();
            assert!(names.contains(&"ratio_max") && names.contains(&"approx_kl"));
            for (name, value) in expected.iter() {
                assert_close(&[metrics.get(name).unwrap_or(f64::NAN)], &[value], 1e-12);
            }
        }
    }
    Ok(())
}

#[test]
fn totals_of_micro_batches_add_up() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let totals = fixture.totals()?;
        assert_eq!(
            (totals.tokens, totals.sequences, totals.rows),
            (14., 4., B as f64)
        );
        let halves = [totals, totals]
            .into_iter()
            .sum::<candle_grpo_loss::StepTotals>();
        assert_eq!(halves.tokens, 28.);
        // Twice the denominators: half the loss.
        let loss = PolicyLoss::dapo();
        let half = fixture.compute_rows(&loss, 0..B, &halves, DType::F64)?;
        assert_close(&[2. * half.loss], &[fixture.compute(&loss)?.loss], 1e-12);
    }
    Ok(())
}
