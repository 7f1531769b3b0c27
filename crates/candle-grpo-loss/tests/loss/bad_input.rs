//! Bad input gives an error that names the argument, what it is and what it must be.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_core::Kl;
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, KlLoss, Mask, PolicyBatch, PolicyLoss, StepTotals,
    Surrogate, token_log_probs,
};
use rstest::rstest;

use crate::message;

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("a tensor of zeros")
}

fn compute(loss: &PolicyLoss, log_probs: &Tensor, advantages: &Tensor, mask: &Tensor) -> String {
    let totals = StepTotals {
        tokens: 6.,
        sequences: 2.,
        rows: 2.,
        prompts: 0.,
    };
    message(loss.compute(&PolicyBatch::new(log_probs, advantages, mask), &totals))
}

#[test]
fn shapes() {
    let (x, mask) = (zeros(&[2, 3]), zeros(&[2, 3]).ones_like().expect("ones"));
    let loss = PolicyLoss::dapo();
    assert_eq!(
        compute(&loss, &zeros(&[2, 4]), &zeros(&[2]), &mask),
        "log_probs: shape [2, 4], must be that of response_mask, [2, 3]"
    );
    assert_eq!(
        compute(&loss, &x, &zeros(&[3]), &mask),
        "advantages: shape [3], must be [2] or [2, 3]"
    );
    assert_eq!(
        compute(&loss, &x, &zeros(&[2]), &zeros(&[6])),
        "response_mask: shape [6], must be [B, T]"
    );
    assert!(compute(&loss, &zeros(&[0, 3]), &zeros(&[0]), &zeros(&[0, 3])).contains("is empty"));
    let wrong = zeros(&[3, 2]);
    let advantages = zeros(&[2]);
    let batch = PolicyBatch::new(&x, &advantages, &mask);
    let totals = StepTotals {
        tokens: 6.,
        sequences: 2.,
        rows: 2.,
        prompts: 0.,
    };
    for (name, batch) in [
        ("old_log_probs", batch.old_log_probs(&wrong)),
        ("ref_log_probs", batch.ref_log_probs(&wrong)),
        ("entropy", batch.entropy(&wrong)),
        ("importance_weights", batch.importance_weights(&wrong)),
        ("sample_weights", batch.sample_weights(&wrong)),
    ] {
        let message = message(PolicyLoss::grpo().compute(&batch, &totals).and_then(|_| {
            // Only a loss without a KL gets here without a reference.
            loss.compute(&batch, &totals)
        }));
        assert!(
            message.starts_with(&format!("{name}: shape [3, 2], must be"))
                || (name != "ref_log_probs" && message.starts_with("ref_log_probs: absent")),
            "{message}"
        );
    }
}

#[test]
fn what_a_term_needs() {
    let (x, mask) = (zeros(&[2, 3]), zeros(&[2, 3]).ones_like().expect("ones"));
    assert_eq!(
        compute(&PolicyLoss::grpo(), &x, &zeros(&[2]), &mask),
        "ref_log_probs: absent, a KL loss needs the log-probs of the reference policy (or set kl to none)"
    );
    let bonus = PolicyLoss {
        entropy_coef: 0.1,
        ..PolicyLoss::dapo()
    };
    assert!(compute(&bonus, &x, &zeros(&[2]), &mask).starts_with("entropy: absent"));
}

#[test]
fn nothing_to_learn_from() -> Result<()> {
    let message_of_mask = message(StepTotals::to_host(&zeros(&[2, 3])));
    assert!(message_of_mask.starts_with("response_mask: all 2 sequences are masked"));
    let none = StepTotals {
        tokens: 0.,
        sequences: 0.,
        rows: 0.,
        prompts: 0.,
    };
    let mask = Mask::new(&zeros(&[2, 3]))?;
    for aggregation in [Aggregation::TokenMean, Aggregation::SeqMeanTokenMean] {
        assert!(message(aggregation.apply(&zeros(&[2, 3]), &mask, &none)).starts_with("totals: "));
    }
    Ok(())
}

#[rstest]
#[case(PolicyLoss { surrogate: Surrogate::Clip(Clip::symmetric(1.5)), ..Default::default() }, "clip.low: 1.5, must be from 0 to 1")]
#[case(PolicyLoss { surrogate: Surrogate::Clip(Clip::asymmetric(0.2, f64::NAN)), ..Default::default() }, "clip.high: NaN, must be")]
#[case(
    PolicyLoss { surrogate: Surrogate::Clip(Clip { dual_clip: Some(1.1), ..Clip::symmetric(0.2) }), ..Default::default() },
    "clip.dual_clip: 1.1, is an absolute ratio and must be above 1 + high = 1.2"
)]
#[case(
    PolicyLoss { surrogate: Surrogate::Clip(Clip { delta: Some(0.), ..Clip::symmetric(0.2) }), ..Default::default() },
    "clip.delta: 0, must be positive"
)]
#[case(PolicyLoss { log_ratio_clamp: Some(-1.), ..Default::default() }, "log_ratio_clamp: -1, must be positive")]
#[case(PolicyLoss { entropy_coef: -0.1, ..Default::default() }, "entropy_coef: -0.1, must be at least 0")]
#[case(PolicyLoss { loss_coef: f64::INFINITY, ..Default::default() }, "loss_coef: inf, must be at least 0 and finite")]
#[case(PolicyLoss { kl: Some(KlLoss::k3(-1.)), ..Default::default() }, "kl.coef: -1, must be at least 0")]
#[case(
    PolicyLoss { kl: Some(KlLoss { coef: 1., kl: Kl { value_clamp: Some(0.), ..Default::default() }, bias_correction: BiasCorrection::Off }), ..Default::default() },
    "kl.value_clamp: 0, must be positive"
)]
#[case(PolicyLoss::dr_grpo(0.), "aggregation.length: 0, must be positive")]
fn options(#[case] loss: PolicyLoss, #[case] expected: &str) {
    let got = message(loss.validate());
    assert!(got.starts_with(expected), "{got}");
    let (x, mask) = (zeros(&[2, 3]), zeros(&[2, 3]).ones_like().expect("ones"));
    assert_eq!(
        compute(&loss, &x, &zeros(&[2]), &mask),
        got,
        "compute validates"
    );
}

#[test]
fn logits_and_targets() -> Result<()> {
    let device = Device::Cpu;
    let (logits, targets) = (zeros(&[2, 5]), Tensor::new(&[0u32, 4], &device)?);
    for temperature in [0., -1., f64::NAN, f64::INFINITY] {
        let message = message(token_log_probs(&logits, &targets, temperature));
        assert_eq!(
            message,
            format!("temperature: {temperature}, must be positive and finite")
        );
    }
    let of = |logits: &Tensor, targets: &Tensor| message(token_log_probs(logits, targets, 1.));
    assert_eq!(
        of(&logits, &Tensor::new(&[0u32, 5], &device)?),
        "targets: token id 5 is out of range for logits of 5 tokens"
    );
    assert!(
        of(&logits, &Tensor::new(&[0i64, -1], &device)?).contains("token id -1 is out of range")
    );
    assert!(of(&logits, &Tensor::new(&[0u32, u32::MAX], &device)?).contains("token id 4294967295"));
    assert_eq!(
        of(&logits, &Tensor::new(&[0f32, 1.], &device)?),
        "targets: F32, must be of an integer dtype"
    );
    assert_eq!(
        of(&logits, &Tensor::new(&[0u32], &device)?),
        "targets: shape [1], must be that of logits without the last dimension, [2]"
    );
    assert_eq!(
        of(&logits.to_dtype(DType::U32)?, &targets),
        "logits: U32, must be of a float dtype"
    );
    assert!(of(&zeros(&[0, 5]), &targets.narrow(0, 0, 0)?).contains("is empty"));
    assert!(of(&Tensor::new(1f32, &device)?, &targets).contains("a scalar"));
    Ok(())
}
