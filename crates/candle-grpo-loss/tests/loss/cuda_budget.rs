//! CUDA driver calls for a policy loss, counted by the emulated GPU.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_loss::{KlLoss, PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_test_support::{CudaCalls, device};

use crate::fixture::composed;

/// Returns the calls for a loss with its backward pass, and for reading its metrics.
fn calls(policy_loss: &PolicyLoss) -> Result<Option<[CudaCalls; 2]>> {
    let device = device();
    let log_probs = Var::randn(-1f32, 0.1, (4, 6), device)?;
    let entropy = Var::rand(0f32, 1., (4, 6), device)?;
    let old_log_probs = Tensor::randn(-1f32, 0.1, (4, 6), device)?;
    let advantages = Tensor::new(&[1f32, -1., 0.5, -0.5], device)?;
    let response_mask = Tensor::ones((4, 6), DType::U8, device)?;
    let totals = StepTotals::count(&response_mask)?;
    let run = || {
        let mut batch =
            PolicyBatch::new(&log_probs, &advantages, &response_mask).old_log_probs(&old_log_probs);
        if policy_loss.kl.is_some() {
            batch = batch.ref_log_probs(&old_log_probs).entropy(&entropy);
        }
        let output = policy_loss.compute(&batch, &totals)?;
        output.loss.backward()?;
        Ok::<_, candle_core::Error>(output.metrics)
    };
    run()?;
    let before = CudaCalls::now();
    let metrics = run()?;
    let between = CudaCalls::now();
    let values = metrics.to_host()?;
    let (Some(before), Some(between), Some(after)) = (before, between, CudaCalls::now()) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(None);
    };
    let (loss, reading) = (between - before, after - between);
    println!(
        "loss: {loss:?}, {} metrics: {reading:?}",
        values.iter().count()
    );
    Ok(Some([loss, reading]))
}

#[test]
fn a_loss_and_its_metrics_keep_their_budgets_of_driver_calls() -> Result<()> {
    let with_all_terms = PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        old_kl: Some(KlLoss::k3(0.1)),
        entropy_coef: 0.1,
        ..PolicyLoss::grpo()
    };
    for (policy_loss, launches, reading_launches) in [
        (PolicyLoss::dapo(), 6, 0),
        (with_all_terms, 7, 0),
        (composed(&PolicyLoss::dapo()), 109, 36),
    ] {
        if let Some([loss, reading]) = calls(&policy_loss)? {
            assert!(loss.launches <= launches, "{loss:?}");
            assert_eq!(loss.copies_to_host, 0, "{loss:?}");
            assert!(reading.launches <= reading_launches, "{reading:?}");
            assert_eq!(reading.copies_to_host, 1, "{reading:?}");
        }
    }
    Ok(())
}
