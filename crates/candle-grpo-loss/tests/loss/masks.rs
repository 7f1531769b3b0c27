//! Values outside the mask change nothing.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::{
    EarlyWeight, Mask, MetricValues, PolicyBatch, PolicyLoss, StepTotals, Student, TeacherTerm,
    TeacherTermForm,
};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use proptest::prelude::*;

use crate::fixture::{B, Computed, Fixture, T, all_losses};

fn poison(values: &mut [f64], mask: &[u8], with: f64) {
    for (value, &m) in values.iter_mut().zip(mask) {
        if m == 0 {
            *value = with;
        }
    }
}

fn same(a: &Computed, b: &Computed) -> Result<bool> {
    let metrics = |c: &Computed| -> Result<MetricValues> { c.output.metrics.to_host() };
    Ok(a.loss == b.loss
        && a.log_probs == b.log_probs
        && a.entropy == b.entropy
        && metrics(a)? == metrics(b)?)
}

#[test]
fn nan_and_infinity_outside_the_mask_change_nothing() -> Result<()> {
    for device in devices() {
        let clean = Fixture::new(device);
        for with in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
            let mut dirty = Fixture::new(device);
            for values in [
                &mut dirty.log_probs,
                &mut dirty.old_log_probs,
                &mut dirty.ref_log_probs,
                &mut dirty.entropy,
                &mut dirty.importance_weights,
                &mut dirty.teacher_log_probs,
                &mut dirty.token_weights,
            ] {
                poison(values, &clean.mask, with);
            }
            // The row without any token.
            dirty.advantages[2] = with;
            dirty.sample_weights[2] = with;
            for loss in all_losses() {
                let (got, expected) = (dirty.compute(&loss)?, clean.compute(&loss)?);
                assert!(same(&got, &expected)?, "{with} shows in {loss:?}");
                let outside = got
                    .log_probs
                    .iter()
                    .zip(&clean.mask)
                    .filter(|(_, m)| **m == 0);
                assert!(outside.clone().count() > 0 && outside.into_iter().all(|(g, _)| *g == 0.));
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn finite_values_outside_the_mask_change_nothing(
        noise in prop::collection::vec(-50f64..50., B * T), pick in any::<prop::sample::Index>(),
    ) {
        for device in devices() {
            let losses = all_losses();
            let loss: &PolicyLoss = pick.get(&losses);
            let clean = Fixture::new(device);
            let mut dirty = Fixture::new(device);
            for (i, value) in noise.iter().enumerate().filter(|(i, _)| clean.mask[*i] == 0) {
                dirty.log_probs[i] = *value;
                dirty.old_log_probs[i] = -*value;
                dirty.ref_log_probs[i] = value * 2.;
                dirty.entropy[i] = value + 1.;
            }
            let (got, expected) = (dirty.compute(loss).unwrap(), clean.compute(loss).unwrap());
            prop_assert!(same(&got, &expected).unwrap());
        }
    }
}

#[test]
fn masks_of_any_dtype_are_the_same() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 1], [0, 1, 0]], device)?;
        let expected = Mask::new(&mask)?.selected().to_vec2::<u8>()?;
        for dtype in [
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            let mask = mask.to_dtype(dtype)?;
            assert_eq!(Mask::new(&mask)?.selected().to_vec2::<u8>()?, expected);
            assert_eq!(StepTotals::count(&mask)?.tokens, 3.);
        }
    }
    Ok(())
}

#[test]
fn the_last_token_of_each_sequence_is_selected() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], device)?;
        assert_eq!(
            Mask::new(&mask)?.last()?.to_vec2::<u8>()?,
            [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
        );
    }
    Ok(())
}

/// Tokens without a teacher have the loss without the term, whatever is in place of its log-probs.
#[test]
fn a_teacher_changes_only_the_tokens_that_have_it() -> Result<()> {
    let early_weight = Some(EarlyWeight::default());
    let advantage = |early_weight, student| TeacherTermForm::Advantage {
        early_weight,
        student,
    };
    let kl = |estimator| TeacherTermForm::Loss {
        kl: Kl::new(estimator),
    };
    for device in devices() {
        let tensor = |rows: [[f64; 3]; 2]| Tensor::new(&rows, device);
        let mask = Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], device)?;
        let log_probs = Var::from_tensor(&tensor([[-1., -2., -0.5], [-100., -3., -1.]])?)?;
        let rollout = tensor([[-1.2, -1.9, -0.4], [-99., -3.1, -1.]])?;
        let teacher = [[-0.3, -2.5, -1.], [-2., -0.1, -4.]];
        let advantages = Tensor::new(&[0.7f64, -0.4], device)?;
        for form in [
            advantage(None, Student::Current),
            advantage(early_weight, Student::Current),
            advantage(None, Student::Rollout),
            kl(KlEstimator::K1),
            kl(KlEstimator::K3),
            TeacherTermForm::Gated { beta: 2. },
        ] {
            let term = TeacherTerm {
                form,
                ..TeacherTerm::new(0.5)
            };
            let compute = |term: Option<TeacherTerm>, teacher: &Tensor, taught: Option<&Tensor>| {
                let loss = PolicyLoss {
                    distillation: term,
                    ..PolicyLoss::gpg()
                };
                let mut batch = PolicyBatch::new(&log_probs, &advantages, &mask)
                    .rollout_log_probs(&rollout)
                    .teacher_log_probs(teacher);
                batch.teacher_mask = taught.cloned();
                let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
                let gradients = output.loss.backward()?;
                let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
                let metrics = output.metrics.to_host()?;
                Result::Ok((gradient, metrics.get("teacher_log_ratio")))
            };
            let (all, _) = compute(Some(term), &tensor(teacher)?, None)?;
            let (none, _) = compute(None, &tensor(teacher)?, None)?;
            assert_ne!(all[..3], none[..3]);
            let first = Tensor::new(&[[1u8, 1, 1], [0, 0, 0]], device)?;
            for other in [f64::NAN, f64::NEG_INFINITY, -1.] {
                let given = tensor([teacher[0], [other; 3]])?;
                let (found, ratio) = compute(Some(term), &given, Some(&first))?;
                assert_close(&found[..3], &all[..3], 1e-12);
                assert_close(&found[3..], &none[3..], 1e-12);
                // 0.7, -0.5 and -0.5.
                assert_close(&[ratio.unwrap()], &[-0.1], 1e-12);
            }
        }
    }
    Ok(())
}

/// The bonus averages over its own mask; the metric averages over all tokens.
#[test]
fn the_entropy_bonus_is_the_mean_over_its_own_mask() -> Result<()> {
    for device in devices() {
        let zeros = Var::zeros((2, 3), DType::F64, device)?;
        let mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], device)?;
        let advantages = Tensor::new(&[1f64, -1.], device)?;
        let entropy = Var::new(&[[0.5f64, 1., 2.], [4., f64::NAN, 8.]], device)?;
        let loss = PolicyLoss {
            entropy_coef: 0.1,
            ..PolicyLoss::gpg()
        };
        let compute = |bonus: &Tensor| -> Result<(f64, Vec<f64>)> {
            let batch = PolicyBatch::new(&zeros, &advantages, &mask)
                .policy_mask(&zeros)
                .entropy(&entropy)
                .entropy_mask(bonus);
            let totals = StepTotals::count(&mask)?;
            let error = message(loss.compute(&batch, &totals));
            assert!(
                error.starts_with("totals.entropy_tokens: absent"),
                "{error}"
            );
            // The second row's second entry is outside the response mask.
            let in_both = (bonus * mask.to_dtype(bonus.dtype())?)?;
            let output = loss.compute(&batch, &totals.with_entropy_mask(&in_both)?)?;
            let metrics = output.metrics.to_host()?;
            assert_eq!(metrics.get("entropy"), Some(7.5 / 4.));
            let gradients = output.loss.backward()?;
            let gradient = numbers(gradients.get(&entropy).expect("a gradient"))?;
            Ok((output.loss.to_scalar()?, gradient))
        };
        let (loss_of_two, gradient) =
            compute(&Tensor::new(&[[0f32, 1., 0.], [1., 1., 0.]], device)?)?;
        assert_close(&[loss_of_two], &[-0.1 * 5. / 2.], 1e-12);
        assert_close(&gradient, &[0., -0.05, 0., -0.05, 0., 0.], 1e-12);
        // Without one it is the response mask, whatever the policy mask is.
        let batch = PolicyBatch::new(&zeros, &advantages, &mask)
            .policy_mask(&zeros)
            .entropy(&entropy);
        let all = loss.compute(&batch, &StepTotals::count(&mask)?)?;
        assert_close(&numbers(&all.loss)?, &[-0.1 * 7.5 / 4.], 1e-12);
    }
    Ok(())
}
