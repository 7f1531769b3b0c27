//! CUDA driver calls for a policy loss, counted by the emulated GPU.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_test_support::{CudaCalls, device};

#[test]
fn a_loss_and_its_metrics_keep_their_budgets_of_driver_calls() -> Result<()> {
    let device = device();
    let log_probs = Var::randn(-1f32, 0.1, (4, 6), device)?;
    let old_log_probs = Tensor::randn(-1f32, 0.1, (4, 6), device)?;
    let advantages = Tensor::new(&[1f32, -1., 0.5, -0.5], device)?;
    let response_mask = Tensor::ones((4, 6), DType::U8, device)?;
    let totals = StepTotals::count(&response_mask)?;
    let policy_loss = PolicyLoss::dapo();
    let run = || {
        let batch =
            PolicyBatch::new(&log_probs, &advantages, &response_mask).old_log_probs(&old_log_probs);
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
        return Ok(());
    };
    let (loss, reading) = (between - before, after - between);
    println!(
        "loss: {loss:?}, {} metrics: {reading:?}",
        values.iter().count()
    );
    assert!(loss.launches <= 111, "{loss:?}");
    assert_eq!(loss.copies_to_host, 0, "{loss:?}");
    assert!(reading.launches <= 57, "{reading:?}");
    assert_eq!(reading.copies_to_host, 1, "{reading:?}");
    Ok(())
}
