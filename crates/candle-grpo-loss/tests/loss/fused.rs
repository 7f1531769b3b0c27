//! The fused path in f32 against the composed product in f64: values, gradients, terms and metrics.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::{Kl, KlEstimator, KlGradient};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, ImportanceLevel, KlLoss, OldPolicy, PolicyBatch, PolicyLoss,
    PolicyLossOutput, StepTotals, Surrogate,
};
use candle_grpo_test_support::{assert_close, devices, numbers};
use proptest::prelude::*;

use crate::fixture::{aggregations, detached_surrogates, differentiable_surrogates, kl_losses};

pub(crate) fn surrogates() -> Vec<Surrogate> {
    let mut surrogates = differentiable_surrogates();
    surrogates.extend(detached_surrogates());
    surrogates
}

/// Those of the fixture, and every gradient that is not that of its value.
pub(crate) fn kls() -> Vec<Option<KlLoss>> {
    let mut kls = kl_losses();
    for (estimator, gradient, bias_correction) in [
        (
            KlEstimator::K1,
            KlGradient::StraightThrough,
            BiasCorrection::Off,
        ),
        (
            KlEstimator::K3,
            KlGradient::ImportanceWeighted { max: 1.1 },
            BiasCorrection::Off,
        ),
        (
            KlEstimator::K2,
            KlGradient::Direct,
            BiasCorrection::ImportanceLevel,
        ),
        (KlEstimator::Abs, KlGradient::Direct, BiasCorrection::Token),
    ] {
        let kl = Kl {
            gradient,
            ..Kl::new(estimator)
        };
        kls.push(Some(KlLoss {
            bias_correction,
            ..KlLoss::new(0.3, kl)
        }));
    }
    kls
}

pub(crate) const LEVELS: [ImportanceLevel; 5] = [
    ImportanceLevel::Token,
    ImportanceLevel::Sequence,
    ImportanceLevel::SequenceToken,
    ImportanceLevel::SequenceProduct,
    ImportanceLevel::Segment,
];

/// Which of the optional tensors a batch has.
#[derive(Debug, Clone, Copy)]
struct Given {
    old: bool,
    advantages_of_tokens: bool,
    importance_weights: Option<bool>,
    sample_weights: bool,
    policy_mask: bool,
    entropy: bool,
}

/// A batch on the host, in numbers that f32 holds; NaN where the mask is 0.
#[derive(Debug, Clone)]
struct Numbers {
    batch: usize,
    tokens: usize,
    mask: Vec<u8>,
    log_probs: Vec<f32>,
    old_log_probs: Vec<f32>,
    ref_log_probs: Vec<f32>,
    entropy: Vec<f32>,
    advantages: Vec<f32>,
    weights: Vec<f32>,
    policy_mask: Vec<u8>,
}

fn numbers_of(batch: usize, tokens: usize) -> impl Strategy<Value = Numbers> {
    let n = batch * tokens;
    let vector = move |range: std::ops::Range<f32>| prop::collection::vec(range, n);
    (
        prop::collection::vec(0u8..4, n),
        vector(-3.0..-0.1),
        vector(-0.9..0.9),
        vector(-0.9..0.9),
        vector(0.0..3.0),
        vector(-2.0..2.0),
        vector(0.5..1.5),
        prop::collection::vec(0u8..2, n),
    )
        .prop_map(
            move |(mask, old, drift, gap, entropy, advantages, weights, policy_mask)| {
                let mask: Vec<u8> = mask.into_iter().map(|x| x.min(1)).collect();
                let hidden = |x: Vec<f32>| -> Vec<f32> {
                    let visible = x.into_iter().zip(&mask);
                    visible
                        .map(|(x, &kept)| if kept == 0 { f32::NAN } else { x })
                        .collect()
                };
                let sum = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x + y).collect();
                Numbers {
                    batch,
                    tokens,
                    log_probs: hidden(sum(&old, &drift)),
                    ref_log_probs: hidden(sum(&old, &gap)),
                    old_log_probs: hidden(old),
                    entropy: hidden(entropy),
                    weights: hidden(weights),
                    advantages,
                    policy_mask,
                    mask,
                }
            },
        )
}

/// A loss with its gradients by log-probs and entropy.
struct Computed {
    output: PolicyLossOutput,
    gradients: Vec<Vec<f64>>,
}

impl Numbers {
    fn compute(
        &self,
        loss: &PolicyLoss,
        given: Given,
        dtype: DType,
        device: &Device,
    ) -> Result<Computed> {
        let (batch, tokens) = (self.batch, self.tokens);
        let per_token = |x: &[f32]| Tensor::from_slice(x, (batch, tokens), device)?.to_dtype(dtype);
        let per_row = |x: &[f32]| Tensor::from_slice(&x[..batch], batch, device)?.to_dtype(dtype);
        let flags = |x: &[u8]| Tensor::from_slice(x, (batch, tokens), device);
        let (log_probs, entropy) = (
            Var::from_tensor(&per_token(&self.log_probs)?)?,
            Var::from_tensor(&per_token(&self.entropy)?)?,
        );
        let (old, reference) = (
            per_token(&self.old_log_probs)?,
            per_token(&self.ref_log_probs)?,
        );
        let advantages = if given.advantages_of_tokens {
            per_token(&self.advantages)?
        } else {
            per_row(&self.advantages)?
        };
        let mask = flags(&self.mask)?;
        let policy_mask = flags(&self.policy_mask)?;
        let scores = per_row(&self.advantages)?;
        let weights = match given.importance_weights {
            Some(true) => per_token(&self.weights)?,
            _ => per_row(&self.advantages)?.abs()?.unsqueeze(1)?,
        };
        let sample_weights = per_row(&self.advantages)?.sqr()?;
        let prompt_tokens = Tensor::from_vec(
            (1..=batch).map(|n| n as f64).collect::<Vec<_>>(),
            batch,
            device,
        )?;
        let mut inputs = PolicyBatch::new(&log_probs, &advantages, &mask)
            .ref_log_probs(&reference)
            .selected_tokens(&policy_mask)
            .scores(&scores)
            .prompt_tokens(&prompt_tokens);
        if given.old {
            inputs = inputs.old_policy(OldPolicy::Recomputed(&old));
        }
        if given.importance_weights.is_some() {
            inputs = inputs.importance_weights(&weights);
        }
        if given.sample_weights {
            inputs = inputs.sample_weights(&sample_weights);
        }
        if given.policy_mask {
            inputs = inputs.policy_mask(&policy_mask);
        }
        if given.entropy {
            inputs = inputs.entropy(&entropy).entropy_mask(&policy_mask);
        }
        let totals = StepTotals {
            tokens: 7.,
            sequences: 3.,
            rows: 4.,
            prompts: 2.,
        };
        let output = loss.compute(&inputs, &totals)?;
        let store = output.loss.backward()?;
        let gradients = [&log_probs, &entropy]
            .into_iter()
            .map(|x| store.get(x).map_or(Ok(Vec::new()), numbers))
            .collect::<Result<_>>()?;
        Ok(Computed { output, gradients })
    }
}

fn assert_same(fused: &Computed, exact: &Computed, tolerance: f64) -> Result<()> {
    for (fused, exact) in fused.gradients.iter().zip(&exact.gradients) {
        assert_close(fused, exact, tolerance);
    }
    assert_same_output(&fused.output, &exact.output, tolerance)
}

/// Compares loss, terms and metrics.
pub(crate) fn assert_same_output(
    fused: &PolicyLossOutput,
    exact: &PolicyLossOutput,
    tolerance: f64,
) -> Result<()> {
    assert_close(&numbers(&fused.loss)?, &numbers(&exact.loss)?, tolerance);
    let (terms, expected) = (&fused.tokens, &exact.tokens);
    assert_close(
        &numbers(&terms.surrogate)?,
        &numbers(&expected.surrogate)?,
        tolerance,
    );
    assert_close(
        &numbers(&terms.policy)?,
        &numbers(&expected.policy)?,
        tolerance,
    );
    assert_close(
        &numbers(&terms.log_ratio)?,
        &numbers(&expected.log_ratio)?,
        tolerance,
    );
    for (term, expected) in [
        (&terms.kl, &expected.kl),
        (&terms.clipped, &expected.clipped),
    ] {
        assert_eq!(term.is_some(), expected.is_some());
        if let (Some(term), Some(expected)) = (term, expected) {
            assert_close(&numbers(term)?, &numbers(expected)?, tolerance);
        }
    }
    let (metrics, expected) = (fused.metrics.to_host()?, exact.metrics.to_host()?);
    let names = |values: &candle_grpo_loss::MetricValues| -> Vec<String> {
        values.iter().map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(names(&metrics), names(&expected));
    for ((name, value), (_, expected)) in metrics.iter().zip(expected.iter()) {
        assert!(
            (value - expected).abs() <= tolerance * (1. + expected.abs()),
            "{name}: {value}, expected {expected}"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn f32_equals_the_composed_product_in_f64(
        numbers in (1usize..5, 1usize..7).prop_flat_map(|(batch, tokens)| numbers_of(batch, tokens)),
        surrogate in prop::sample::select(surrogates()),
        level in prop::sample::select(LEVELS.to_vec()),
        kl in prop::sample::select(kls()),
        aggregation in prop::sample::select(aggregations()),
        log_ratio_clamp in prop_oneof![Just(None), Just(Some(0.5)), Just(Some(20.))],
        given in (any::<bool>(), any::<bool>(), any::<Option<bool>>(), any::<bool>(), any::<bool>(), any::<bool>()),
        loss_coef in prop_oneof![Just(0.), Just(1.), Just(0.7)],
    ) {
        let own_level = matches!(surrogate, Surrogate::GeometricMean(_) | Surrogate::Vespo(_));
        let (old, advantages_of_tokens, importance_weights, sample_weights, policy_mask, entropy) = given;
        let given = Given { old, advantages_of_tokens, importance_weights, sample_weights, policy_mask, entropy };
        let loss = PolicyLoss {
            importance_level: if own_level { ImportanceLevel::Token } else { level },
            surrogate,
            kl,
            aggregation,
            log_ratio_clamp,
            loss_coef,
            entropy_coef: if entropy { 0.05 } else { 0. },
            allow_length_weighting: true,
            ..Default::default()
        };
        for device in devices() {
            let fused = numbers.compute(&loss, given, DType::F32, device)?;
            let exact = numbers.compute(&loss, given, DType::F64, device)?;
            assert_same(&fused, &exact, 2e-5)?;
        }
    }
}

#[test]
fn half_log_probs_give_a_loss_of_f32_and_a_gradient_of_their_own() -> Result<()> {
    for device in devices() {
        let log_probs = Tensor::new(&[[-1f32, -0.5, -2.], [-0.25, -1.5, -3.]], device)?;
        let old = (&log_probs + 0.125)?;
        let advantages = Tensor::new(&[1f32, -0.5], device)?;
        let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], device)?;
        let loss = PolicyLoss::default();
        let run = |dtype: DType| -> Result<(Tensor, Tensor)> {
            let log_probs = Var::from_tensor(&log_probs.to_dtype(dtype)?)?;
            let old = old.to_dtype(dtype)?;
            let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
            let output = loss.compute(&batch, &StepTotals::to_host(&mask)?)?;
            let gradients = output.loss.backward()?;
            let gradient = gradients.get(&log_probs).expect("a gradient").clone();
            Ok((output.loss, gradient))
        };
        let (expected, expected_gradient) = run(DType::F64)?;
        for dtype in [DType::BF16, DType::F16] {
            let (loss, gradient) = run(dtype)?;
            assert_eq!((loss.dtype(), gradient.dtype()), (DType::F32, dtype));
            assert_close(&numbers(&loss)?, &numbers(&expected)?, 1e-6);
            assert_close(&numbers(&gradient)?, &numbers(&expected_gradient)?, 1e-3);
        }
    }
    Ok(())
}

/// A caller may scale the loss: the gradient follows.
#[test]
fn the_gradient_of_a_scaled_loss_is_scaled() -> Result<()> {
    for device in devices() {
        let log_probs = Var::new(&[[-1f32, -0.5]], device)?;
        let advantages = Tensor::new(&[1f32], device)?;
        let mask = Tensor::new(&[[1u8, 1]], device)?;
        let loss = PolicyLoss {
            aggregation: Aggregation::TokenSum,
            ..Default::default()
        };
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask);
        let output = loss.compute(&batch, &StepTotals::to_host(&mask)?)?;
        let gradients = (output.loss * 0.25)?.backward()?;
        let gradient = gradients.get(&log_probs).expect("a gradient");
        assert_eq!(numbers(gradient)?, [-0.25, -0.25]);
    }
    Ok(())
}
