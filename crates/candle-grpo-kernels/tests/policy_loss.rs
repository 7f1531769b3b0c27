//! What `policy_loss` promises by itself; `candle-grpo-loss` compares it with the composed product.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    KlEstimate, KlRatio, KlSlope, KlTerm, PolicyLossOptions, PolicyLossTensors, PolicySum,
    RatioLevel, RowDivisor, TokenSurrogate, policy_loss, policy_loss_is_fused,
};
use candle_grpo_test_support::{assert_close, message, numbers};

mod common;
use common::noisy;

const OPTIONS: PolicyLossOptions = PolicyLossOptions {
    level: RatioLevel::Token,
    log_ratio_clamp: f32::INFINITY,
    surrogate: TokenSurrogate::Clip {
        ratio_min: 0.8,
        ratio_max: 1.2,
        dual_clip: f32::INFINITY,
        delta: f32::INFINITY,
    },
    kl: None,
    row_divisor: RowDivisor::One,
    denominator: 2.0,
};

const K3: KlTerm = KlTerm {
    coef: 0.1,
    estimate: KlEstimate::K3,
    slope: KlSlope::Direct,
    log_ratio_clamp: 20.0,
    value_clamp: f32::INFINITY,
    ratio: KlRatio::One,
};

fn of<'a>(
    log_probs: &'a Tensor,
    advantages: &'a Tensor,
    mask: &'a Tensor,
) -> PolicyLossTensors<'a> {
    PolicyLossTensors {
        log_probs,
        old_log_probs: None,
        ref_log_probs: None,
        advantages,
        weights: None,
        entropy: None,
        mask,
    }
}

#[test]
fn any_layout_is_taken() -> Result<()> {
    let wide = noisy(&[7, 5, 2], 3, DType::F32)?;
    let strided = |x: &Tensor| x.narrow(0, 1, 4)?.narrow(2, 1, 1)?.squeeze(2)?.t();
    let log_probs = Var::from_tensor(&wide)?;
    let old = noisy(&[7, 5, 2], 4, DType::F32)?;
    let mask = noisy(&[7, 5, 2], 5, DType::F32)?.gt(-0.5)?;
    let advantages = noisy(&[5], 6, DType::F32)?
        .unsqueeze(1)?
        .broadcast_as((5, 4))?;
    let run = |is_contiguous: bool| -> Result<(Vec<f64>, Vec<f64>)> {
        let lay = |x: Tensor| if is_contiguous { x.contiguous() } else { Ok(x) };
        let (log_probs_of, old, mask) = (
            lay(strided(&log_probs)?)?,
            lay(strided(&old)?)?,
            lay(strided(&mask)?)?,
        );
        let advantages = lay(advantages.clone())?;
        let tensors = PolicyLossTensors {
            old_log_probs: Some(&old),
            ..of(&log_probs_of, &advantages, &mask)
        };
        let output = policy_loss(&tensors, &OPTIONS)?;
        let gradients = output.loss.backward()?;
        let gradient = gradients.get(&log_probs).expect("a gradient");
        Ok((numbers(&output.loss)?, numbers(gradient)?))
    };
    let (strided, contiguous) = (run(false)?, run(true)?);
    assert_eq!(strided, contiguous);
    assert!(strided.1.iter().any(|&g| g != 0.0));
    Ok(())
}

/// The ratio overflows, and so does what the token scores.
#[test]
fn a_weight_of_zero_drops_an_infinite_loss() -> Result<()> {
    let log_probs = Var::new(&[[-1f32, -1.]], &Device::Cpu)?;
    let old = Tensor::new(&[[-1f32, -200.]], &Device::Cpu)?;
    let (advantages, mask) = (
        Tensor::new(&[-1f32], &Device::Cpu)?,
        Tensor::ones((1, 2), DType::U8, &Device::Cpu)?,
    );
    let weights = Tensor::new(&[[1f32, 0.]], &Device::Cpu)?;
    let weighted = PolicyLossTensors {
        old_log_probs: Some(&old),
        weights: Some(&weights),
        ..of(&log_probs, &advantages, &mask)
    };
    let output = policy_loss(&weighted, &OPTIONS)?;
    assert_eq!(numbers(&output.surrogate)?, [1., f64::INFINITY]);
    assert_eq!(numbers(&output.policy)?, [1., 0.]);
    let gradients = output.loss.backward()?;
    let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
    assert_eq!(gradient, [0.5, 0.]);
    Ok(())
}

/// More tokens than one core works on at a time.
#[test]
fn long_batches_add_up() -> Result<()> {
    let (batch, tokens) = (37, 1001);
    let log_probs = noisy(&[batch, tokens], 1, DType::F32)?;
    let old = noisy(&[batch, tokens], 2, DType::F32)?;
    let advantages = noisy(&[batch], 3, DType::F32)?;
    let mask = noisy(&[batch, tokens], 4, DType::F32)?.gt(-0.9)?;
    let run = |row: usize, rows: usize| -> Result<Vec<f64>> {
        let part = |x: &Tensor| x.narrow(0, row, rows);
        let (log_probs, old, advantages, mask) = (
            part(&log_probs)?,
            part(&old)?,
            part(&advantages)?,
            part(&mask)?,
        );
        let tensors = PolicyLossTensors {
            old_log_probs: Some(&old),
            ..of(&log_probs, &advantages, &mask)
        };
        let output = policy_loss(&tensors, &OPTIONS)?;
        let count = output.sum(PolicySum::Count)?.to_scalar::<f64>()?;
        let ratio = output.sum(PolicySum::Ratio)?.to_scalar::<f64>()?;
        let clipped = output.sum(PolicySum::Clipped)?.to_scalar::<f64>()?;
        Ok(vec![numbers(&output.loss)?[0], count, ratio, clipped])
    };
    let mut sum = vec![0.0; 4];
    for row in 0..batch {
        for (sum, x) in sum.iter_mut().zip(run(row, 1)?) {
            *sum += x;
        }
    }
    assert_close(&run(0, batch)?, &sum, 1e-6);
    Ok(())
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let two = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let three = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    let good = of(&x, &two, &x);
    let refused = |tensors: PolicyLossTensors, options: PolicyLossOptions, expected: &str| {
        let message = message(policy_loss(&tensors, &options));
        assert!(message.contains(expected), "{message}");
    };
    refused(
        PolicyLossTensors {
            advantages: &three,
            ..good
        },
        OPTIONS,
        "advantages: shape [3]",
    );
    refused(
        PolicyLossTensors {
            weights: Some(&three),
            ..good
        },
        OPTIONS,
        "weights: shape [3]",
    );
    refused(
        PolicyLossTensors {
            old_log_probs: Some(&two),
            ..good
        },
        OPTIONS,
        "old_log_probs: shape [2]",
    );
    refused(
        PolicyLossTensors { mask: &two, ..good },
        OPTIONS,
        "mask: shape [2]",
    );
    refused(of(&two, &two, &two), OPTIONS, "log_probs: shape [2]");
    let ids = x.to_dtype(DType::U32)?;
    refused(of(&ids, &two, &x), OPTIONS, "log_probs: U32");
    let exact = x.to_dtype(DType::F64)?;
    assert!(policy_loss_is_fused(&x) && !policy_loss_is_fused(&exact));
    refused(of(&exact, &two, &x), OPTIONS, "log_probs: F64");
    refused(
        good,
        PolicyLossOptions {
            kl: Some(K3),
            ..OPTIONS
        },
        "ref_log_probs: absent",
    );
    refused(
        good,
        PolicyLossOptions {
            denominator: 0.0,
            ..OPTIONS
        },
        "denominator: 0",
    );
    refused(
        good,
        PolicyLossOptions {
            log_ratio_clamp: -1.0,
            ..OPTIONS
        },
        "log_ratio_clamp: -1",
    );
    let row_divisor = RowDivisor::Given(&three);
    refused(
        good,
        PolicyLossOptions {
            row_divisor,
            ..OPTIONS
        },
        "row_divisor: shape [3]",
    );
    Ok(())
}
