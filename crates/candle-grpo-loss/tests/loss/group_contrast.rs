//! Losses that compare sequences in a group, and teacher terms.

use candle_core::{Device, Result, Tensor, Var};

use candle_grpo_loss::experimental::{self, GroupContrast};
use candle_grpo_loss::{
    EarlyWeight, PolicyBatch, PolicyLoss, StepTotals, Student, TeacherTerm, TeacherTermForm,
};
use candle_grpo_test_support::{assert_close, devices, message, numbers};

/// Two groups: rows 0, 2 and 3, and row 1 with row 4, which has no token.
struct Groups {
    log_probs: Vec<f64>,
    advantages: [f64; 5],
    mask: [u8; 15],
    device: Device,
}

const TAU: f64 = 0.4;

impl Groups {
    fn new(device: &Device) -> Self {
        Self {
            log_probs: (0..15).map(|i| -0.1 * f64::from(i % 7)).collect(),
            advantages: [1., 0.5, -1., -0.5, 2.],
            mask: [1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0],
            device: device.clone(),
        }
    }

    /// Returns the loss and its gradient.
    fn compute(&self) -> Result<(f64, Vec<f64>)> {
        let log_probs = Var::from_slice(&self.log_probs, (5, 3), &self.device)?;
        let mask = Tensor::from_slice(&self.mask, (5, 3), &self.device)?;
        let tensor = |x: &[f64]| Tensor::new(x, &self.device);
        let loss = PolicyLoss {
            surrogate: GroupContrast { tau: TAU }.into(),
            ..experimental::policy_loss::real()
        };
        let batch = PolicyBatch::new(&log_probs, &tensor(&self.advantages)?, &mask)
            .old_log_probs(&Tensor::zeros((5, 3), log_probs.dtype(), &self.device)?)
            .groups(&tensor(&[0., 1., 0., 0., 1.])?)
            .prompt_tokens(&tensor(&[6., 2., 6., 6., 2.])?);
        let totals = StepTotals::count(&mask)?.with_prompts(2.);
        let loss = loss.compute(&batch, &totals)?.loss;
        let gradients = loss.backward()?;
        let gradient = gradients.get(&log_probs).expect("a gradient");
        Ok((numbers(&loss)?[0], numbers(gradient)?))
    }
}

#[test]
fn group_contrast_classifies_the_sequences_of_a_group() -> Result<()> {
    for device in devices() {
        let groups = Groups::new(device);
        let x = &groups.log_probs;
        let score = |tokens: &[usize]| {
            let sum: f64 = tokens.iter().map(|&i| x[i]).sum();
            sum / tokens.len() as f64 / TAU
        };
        let (positive, a, b) = (score(&[0, 1, 2]), score(&[6, 7]), score(&[9]));
        // The other group has no negative sequence: row 4 has no token.
        let expected = (a.exp() + b.exp()).ln_1p() + (-positive).exp().ln_1p();
        let (loss, gradient) = groups.compute()?;
        assert_close(&[loss], &[expected / 2.], 1e-12);
        for (i, slope) in gradient.iter().enumerate() {
            let step = 1e-6;
            let moved = |by: f64| -> Result<f64> {
                let mut moved = Groups::new(device);
                moved.log_probs[i] += by;
                Ok(moved.compute()?.0)
            };
            let difference = (moved(step)? - moved(-step)?) / (2. * step);
            assert_close(&[*slope], &[difference], 1e-8);
        }
        let positives: f64 = gradient[..3].iter().sum();
        assert!(positives < 0. && positives > -1. / TAU);
    }
    Ok(())
}

#[test]
fn ratios_that_overflow_keep_a_bounded_gradient() -> Result<()> {
    for device in devices() {
        for far in [1e4, -1e4] {
            let mut groups = Groups::new(device);
            groups.log_probs.iter_mut().for_each(|x| *x *= far);
            let (loss, gradient) = groups.compute()?;
            assert!(loss.is_finite());
            assert!(gradient.iter().all(|g| g.abs() <= 1. / TAU), "{gradient:?}");
        }
    }
    Ok(())
}

#[test]
fn a_masked_token_does_not_reach_the_group() -> Result<()> {
    for device in devices() {
        let expected = Groups::new(device).compute()?;
        let mut dirty = Groups::new(device);
        for i in (0..15).filter(|&i| dirty.mask[i] == 0) {
            dirty.log_probs[i] = f64::NAN;
        }
        dirty.advantages[4] = f64::NAN;
        assert_eq!(dirty.compute()?, expected);
    }
    Ok(())
}

/// A policy with two tokens, a teacher and no reward.
fn distilled(form: TeacherTermForm, teacher: [f64; 2]) -> Result<(f64, Vec<f64>)> {
    let device = Device::Cpu;
    let log_probs = Var::new(&[[-1f64, -2.]], &device)?;
    let mask = Tensor::new(&[[1u8, 1]], &device)?;
    let nothing = Tensor::new(&[0f64], &device)?;
    let loss = PolicyLoss {
        distillation: Some(TeacherTerm {
            form,
            ..TeacherTerm::new(0.5)
        }),
        ..PolicyLoss::gpg()
    };
    let batch = PolicyBatch::new(&log_probs, &nothing, &mask)
        .rollout_log_probs(&Tensor::new(&[[-1.5f64, -2.5]], &device)?)
        .teacher_log_probs(&Tensor::new(&[teacher], &device)?);
    let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
    let gradients = output.loss.backward()?;
    let gradient = gradients.get(&log_probs).expect("a gradient");
    Ok((numbers(&output.loss)?[0], numbers(gradient)?))
}

#[test]
fn the_default_distillation_is_the_policy_gradient_of_the_reverse_kl() -> Result<()> {
    // Advantages 0.5 (teach - lp), which are -1 and 1.
    let (loss, gradient) = distilled(TeacherTermForm::default(), [-3., 0.])?;
    assert_close(&[loss], &[(-1. + 2.) / 2.], 1e-12);
    assert_close(&gradient, &[0.5, -0.5], 1e-12);
    let early = TeacherTermForm::Advantage {
        early_weight: Some(EarlyWeight {
            gamma: 2.,
            ..EarlyWeight::default()
        }),
        student: Student::Rollout,
    };
    // The gaps to the sampler are -1.5 and 2.5; the weights are 3 and 1 + 2 (1 - 1.5 / 4).
    let (_, gradient) = distilled(early, [-3., 0.])?;
    assert_close(&gradient, &[0.25 * 4.5, -0.25 * 2.5 * 2.25], 1e-12);
    Ok(())
}

#[test]
fn a_gate_closes_where_the_policy_is_far_above_the_teacher() -> Result<()> {
    let (_, gradient) = distilled(TeacherTermForm::Gated { beta: 10. }, [-6., -1.])?;
    assert!(gradient[0] <= 0. && gradient[0] > -1e-12, "{gradient:?}");
    assert_close(&gradient[1..], &[-0.25], 1e-4);
    Ok(())
}

#[test]
fn missing_inputs_are_named() -> Result<()> {
    let device = Device::Cpu;
    let x = Var::new(&[[-1f32, -2.]], &device)?;
    let mask = Tensor::new(&[[1u8, 1]], &device)?;
    let batch = PolicyBatch::new(&x, &Tensor::new(&[1f32], &device)?, &mask);
    let totals = StepTotals::count(&mask)?;
    let distilled = PolicyLoss::on_policy_distillation();
    let error = message(distilled.compute(&batch, &totals));
    assert!(error.starts_with("teacher_log_probs: absent"), "{error}");
    let error = message(experimental::policy_loss::real().compute(&batch, &totals));
    assert!(error.starts_with("groups: absent"), "{error}");
    Ok(())
}
