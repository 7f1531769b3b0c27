//! Metrics that an operator has reduced.

use candle_core::{Result, Tensor};
use candle_grpo_core::{Mask, MetricKind, Metrics};
use candle_grpo_test_support::devices;

#[test]
fn reduced_numbers_are_read_at_their_indices() -> Result<()> {
    for device in devices() {
        let mask = Mask::new(&Tensor::new(&[[1u8, 1]], device)?)?;
        let mut metrics = Metrics::new();
        metrics.push_masked_mean("masked", &Tensor::new(&[[2f32, 4.]], device)?, &mask)?;
        for scale in [1f64, 3.] {
            let numbers = Tensor::new(&[6. * scale, 4., scale, -scale], device)?;
            metrics.push_reduced(
                &numbers,
                1,
                &[
                    ("mean", MetricKind::Mean, 0),
                    ("max", MetricKind::Max, 2),
                    ("min", MetricKind::Min, 3),
                ],
            )?;
            let error = metrics.push_reduced(&numbers, 4, &[("x", MetricKind::Max, 0)]);
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("metric x: indices 0 and 4"), "{error}");
        }
        let values = metrics.to_host()?;
        // 6 + 18 over 4 + 4.
        for (name, expected) in [("masked", 3.), ("mean", 3.), ("max", 3.), ("min", -3.)] {
            assert_eq!(values.get(name), Some(expected), "{name}");
        }
        assert_eq!(values.iter().count(), 4);
    }
    Ok(())
}
