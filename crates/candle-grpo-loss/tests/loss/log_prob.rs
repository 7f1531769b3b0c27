use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_loss::{LogProbOptions, log_prob, sum_of_squared_probs};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

const LOGITS: [[f64; 4]; 3] = [
    [0.3, -1.2, 2.0, 0.7],
    [5.0, 5.0, -4.0, 1.0],
    [-0.1, 0.0, 0.1, 0.2],
];

#[rstest]
fn gradients_are_finite_differences(#[values(1.0, 0.7, 2.5)] temperature: f64) -> Result<()> {
    for device in devices() {
        let targets = Tensor::new(&[2u32, 0, 3], device)?;
        let weights = Tensor::new(&[0.3, -1.1, 0.8], device)?;
        let value = |logits: &Tensor| -> Result<Tensor> {
            let tokens = log_prob(logits, &targets, temperature, LogProbOptions::default())?;
            let mixed = ((&tokens.log_probs * 1.5)? + (&tokens.entropy * 0.4)?)?;
            let mixed = (mixed + (&tokens.log_sum_exp * 0.2)?)?;
            let mixed = (mixed + sum_of_squared_probs(logits, temperature)?)?;
            (mixed * &weights)?.sum_all()
        };
        let logits = Var::new(&LOGITS, device)?;
        let loss = value(&logits)?;
        let gradient = numbers(
            loss.backward()?
                .get(&logits)
                .expect("a gradient of the logits"),
        )?;
        for (i, g) in gradient.iter().enumerate() {
            let moved = |by: f64| -> Result<f64> {
                let mut logits = LOGITS;
                logits[i / 4][i % 4] += by;
                value(&Tensor::new(&logits, device)?)?.to_scalar()
            };
            let difference = (moved(1e-6)? - moved(-1e-6)?) / 2e-6;
            assert!(
                (g - difference).abs() < 1e-8,
                "[{i}] {g} against {difference}"
            );
        }
    }
    Ok(())
}

#[test]
fn minus_infinity_is_outside_the_distribution() -> Result<()> {
    for device in devices() {
        let inf = f32::NEG_INFINITY;
        let logits = Var::new(&[[1f32, inf, 2., inf]], device)?;
        let tokens = log_prob(
            &logits,
            &Tensor::new(&[0u32], device)?,
            1.,
            LogProbOptions::default(),
        )?;
        let kept = Var::new(&[[1f32, 2.]], device)?;
        let expected = log_prob(
            &kept,
            &Tensor::new(&[0u32], device)?,
            1.,
            LogProbOptions::default(),
        )?;
        assert_close(
            &numbers(&tokens.log_probs)?,
            &numbers(&expected.log_probs)?,
            1e-7,
        );
        assert_close(
            &numbers(&tokens.entropy)?,
            &numbers(&expected.entropy)?,
            1e-7,
        );
        let loss = (tokens.log_probs.sum_all()? + tokens.entropy.sum_all()?)?;
        let gradient = numbers(loss.backward()?.get(&logits).expect("a gradient"))?;
        let loss = (expected.log_probs.sum_all()? + expected.entropy.sum_all()?)?;
        let kept_gradient = numbers(loss.backward()?.get(&kept).expect("a gradient"))?;
        assert_close(
            &gradient,
            &[kept_gradient[0], 0., kept_gradient[1], 0.],
            1e-6,
        );
    }
    Ok(())
}

/// 49,152 equal logits: a sum in bf16 would stop at 256.
#[test]
fn wide_rows_in_bf16_are_summed_in_f32() -> Result<()> {
    for device in devices() {
        let logits = Tensor::zeros((1, 49_152), DType::BF16, device)?;
        let tokens = log_prob(
            &logits,
            &Tensor::new(&[7u32], device)?,
            1.,
            LogProbOptions::default(),
        )?;
        let expected = 49_152f64.ln();
        assert_eq!(tokens.log_probs.dtype(), DType::F32);
        assert_close(&numbers(&tokens.log_probs)?, &[-expected], 1e-6);
        assert_close(&numbers(&tokens.entropy)?, &[expected], 1e-6);
    }
    Ok(())
}

#[test]
fn log_prob_accepts_any_leading_dimensions_and_target_dtype() -> Result<()> {
    for device in devices() {
        let logits = Tensor::new(&LOGITS, device)?;
        let targets = Tensor::new(&[2u32, 0, 3], device)?;
        let flat = numbers(&log_prob(&logits, &targets, 1., LogProbOptions::default())?.log_probs)?;
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let tokens = log_prob(
                &logits.reshape((1, 3, 4))?,
                &targets.to_dtype(dtype)?.reshape((1, 3))?,
                1.,
                LogProbOptions::default(),
            )?;
            assert_eq!(tokens.log_probs.dims(), [1, 3]);
            assert_eq!(tokens.log_probs.dtype(), DType::F64);
            assert_close(&numbers(&tokens.log_probs)?, &flat, 0.);
        }
    }
    Ok(())
}
