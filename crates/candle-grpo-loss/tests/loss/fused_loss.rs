//! The fused path against the composed one, which a custom surrogate always takes.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::surrogate::{DetachedWeight, UnifiedMask};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, EmptySequences, KlLoss, OldPolicy, PolicyBatch, PolicyLoss,
    PolicyLossOutput, StepTotals, Surrogate,
};
use candle_grpo_test_support::{cases, devices, message, noise, numbers};
use proptest::prelude::*;
use proptest::sample::select;

use crate::fixture::{aggregations, assert_same_output, composed, kls};

/// Optional tensors in a batch, by bit.
const OLD: u32 = 1;
const IMPORTANCE_WEIGHTS: u32 = 2;
const ONE_WEIGHT_PER_SEQUENCE: u32 = 4;
const SAMPLE_WEIGHTS: u32 = 8;
const TOKEN_WEIGHTS: u32 = 16;
const POLICY_MASK: u32 = 32;
const ENTROPY_MASK: u32 = 64;
const TOKEN_ADVANTAGES: u32 = 128;

/// A batch with values that meet bounds exactly, others that overflow, and an empty sequence.
/// Values outside the mask are not finite.
struct Inputs {
    log_probs: Var,
    entropy: Var,
    batch: PolicyBatch,
    totals: StepTotals,
}

impl Inputs {
    fn new(rows: usize, tokens: usize, seed: u64, given: u32, device: &Device) -> Result<Self> {
        let n = rows * tokens;
        let has = |bit: u32| given & bit != 0;
        let mask: Vec<u8> = noise(n, seed)
            .iter()
            .enumerate()
            .map(|(i, x)| u8::from(i < tokens || (i / tokens != 1 && *x < 0.5)))
            .collect();
        let outside = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30];
        let table = |own: u64, values: &dyn Fn(usize, f32) -> f32| {
            let values: Vec<f32> = noise(n, seed + own)
                .into_iter()
                .enumerate()
                .map(|(i, x)| match mask[i] {
                    0 => outside[(i + own as usize) % 4],
                    _ => values(i, x as f32),
                })
                .collect();
            Tensor::from_vec(values, (rows, tokens), device)
        };
        // Eighths, so that differences meet bounds.
        let eighths = |x: f32| (x * 8.).round() / 8.;
        let old = |_: usize, x: f32| -2. + eighths(x);
        let moved = |own: u64| {
            let drift = noise(n, seed + own);
            move |i: usize, x: f32| match i % 7 {
                0 => old(i, x),
                5 => old(i, x) + 30. * drift[i].signum() as f32,
                6 => old(i, x) + drift[i] as f32,
                _ => old(i, x) + eighths(drift[i] as f32),
            }
        };
        let log_probs = Var::from_tensor(&table(1, &moved(2))?)?;
        let entropy = Var::from_tensor(&table(3, &|_, x| 1. + x)?)?;
        let advantages = if has(TOKEN_ADVANTAGES) {
            table(4, &|i, x| if i % 5 == 0 { 0. } else { x })?
        } else {
            let values: Vec<f32> = (0..rows)
                .map(|row| [0.8, f32::NAN, -1.2, 0.][row % 4])
                .collect();
            Tensor::from_vec(values, rows, &Device::Cpu)?
        };
        let response_mask = Tensor::from_slice(&mask, (rows, tokens), device)?;
        let mut totals = StepTotals::count(&response_mask)?.with_prompts(2.);
        let prompt_tokens: Vec<u32> = (0..rows).map(|row| 3 + 2 * row as u32).collect();
        let mut batch = PolicyBatch::new(&log_probs, &advantages, &response_mask)
            .entropy(&entropy)
            .ref_log_probs(&table(1, &moved(5))?)
            .prompt_tokens(&Tensor::from_vec(prompt_tokens, rows, device)?);
        if has(OLD) {
            batch = batch.old_policy(OldPolicy::Recomputed(table(1, &old)?));
        }
        if has(IMPORTANCE_WEIGHTS) {
            batch = batch.importance_weights(&if has(ONE_WEIGHT_PER_SEQUENCE) {
                Tensor::arange(1u32, rows as u32 + 1, device)?.unsqueeze(1)?
            } else {
                table(6, &|_, x| 1. + x)?
            });
        }
        if has(SAMPLE_WEIGHTS) {
            let weights: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
            batch = batch.sample_weights(&Tensor::from_vec(weights, rows, device)?);
        }
        if has(TOKEN_WEIGHTS) {
            batch = batch.token_weights(&table(7, &|_, x| 1. + x)?);
        }
        if has(POLICY_MASK) {
            batch = batch.policy_mask(&table(8, &|_, x| f32::from(u8::from(x < 0.)))?);
        }
        if has(ENTROPY_MASK) {
            let mask = table(9, &|_, x| f32::from(u8::from(x < 0.)))?;
            totals.entropy_tokens = Some(3.);
            batch = batch.entropy_mask(&mask);
        }
        Ok(Self {
            log_probs,
            entropy,
            batch,
            totals,
        })
    }

    /// Returns the output, and the gradients by log-probs and entropy of the loss times `scale`.
    fn compute(&self, loss: &PolicyLoss, scale: f64) -> Result<(PolicyLossOutput, [Vec<f64>; 2])> {
        let output = loss.compute(&self.batch, &self.totals)?;
        let gradients = (&output.loss * scale)?.backward()?;
        let of = |x: &Var| match gradients.get(x) {
            Some(gradient) => numbers(gradient),
            None => Ok(vec![0.; x.elem_count()]),
        };
        Ok((output, [of(&self.log_probs)?, of(&self.entropy)?]))
    }
}

fn assert_near(found: &[f64], expected: &[f64], of: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        assert!(
            (x - y).abs() <= 2e-6 * (1. + y.abs()),
            "{of}[{i}]: {x}, expected {y}"
        );
    }
}

fn assert_equals_the_composed_path(loss: &PolicyLoss, inputs: &Inputs) -> Result<()> {
    let (found, gradients) = inputs.compute(loss, -0.5)?;
    let (expected, expected_gradients) = inputs.compute(&composed(loss), -0.5)?;
    assert_same_output(&found, &expected, 2e-6)?;
    assert_near(&gradients[0], &expected_gradients[0], "log_probs");
    assert_near(&gradients[1], &expected_gradients[1], "entropy");
    Ok(())
}

fn surrogates() -> Vec<Surrogate> {
    let clip = Clip::asymmetric(0.2, 0.28);
    vec![
        clip.into(),
        Clip::symmetric(0.).into(),
        Clip {
            dual_clip: Some(1.4),
            ..clip
        }
        .into(),
        Clip {
            delta: Some(0.9),
            ..clip
        }
        .into(),
        Clip {
            dual_clip: Some(3.),
            delta: Some(1.5),
            ..clip
        }
        .into(),
        DetachedWeight::at_most(1.2).into(),
        DetachedWeight {
            ratio_min: Some(0.9),
            ratio_max: None,
            allow_max_below_one: false,
            unified_mask: Some(UnifiedMask { low: 0.1, high: 0. }),
        }
        .into(),
        DetachedWeight {
            ratio_min: Some(0.5),
            ratio_max: Some(0.2),
            allow_max_below_one: true,
            unified_mask: None,
        }
        .into(),
        Surrogate::PolicyGradient,
    ]
}

/// [`kls`], and bounds that are absent or met.
fn kl_losses() -> Vec<Option<KlLoss>> {
    let mut all = kls();
    for (estimator, log_ratio_clamp, value_clamp) in [
        (KlEstimator::K1, Some(0.5), Some(0.25)),
        (KlEstimator::K2, None, Some(0.125)),
        (KlEstimator::K3, None, None),
        (KlEstimator::Abs, Some(0.5), None),
    ] {
        for gradient in [
            KlGradient::Direct,
            KlGradient::StraightThrough,
            KlGradient::ImportanceWeighted { max: 2. },
        ] {
            all.push(Some(KlLoss::new(
                0.3,
                Kl {
                    estimator,
                    gradient,
                    log_ratio_clamp,
                    value_clamp,
                },
            )));
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(150, 3000)))]

    #[test]
    fn the_fused_loss_equals_the_composed_one(
        (rows, tokens) in select(vec![(1, 1), (4, 1), (2, 9), (5, 6), (3, 40)]),
        seed in 0u64..1000,
        given in 0u32..256,
        surrogate in select(surrogates()),
        kl in select(kl_losses()),
        old_kl in select(kl_losses()),
        aggregation in select(aggregations()),
        entropy_aggregation in select(aggregations()),
        has_entropy_aggregation in any::<bool>(),
        entropy_coef in select(vec![0., 0.05]),
        loss_coef in select(vec![0., 0.7, 1.]),
        log_ratio_clamp in select(vec![None, Some(0.5), Some(20.)]),
        includes_empty in any::<bool>(),
    ) {
        let loss = PolicyLoss {
            surrogate,
            kl,
            old_kl,
            aggregation,
            entropy_aggregation: has_entropy_aggregation.then_some(entropy_aggregation),
            entropy_coef,
            loss_coef,
            log_ratio_clamp,
            empty_sequences: if includes_empty { EmptySequences::Include } else { EmptySequences::Exclude },
            ..Default::default()
        };
        for device in devices() {
            let inputs = Inputs::new(rows, tokens, seed, given, device).unwrap();
            assert_equals_the_composed_path(&loss, &inputs).unwrap();
        }
    }
}

/// Several blocks of the kernel share a sequence.
#[test]
fn long_sequences_equal_the_composed_ones() -> Result<()> {
    let loss = PolicyLoss {
        kl: Some(KlLoss {
            bias_correction: BiasCorrection::Token,
            ..KlLoss::k3(0.1)
        }),
        entropy_coef: 0.01,
        entropy_aggregation: Some(Aggregation::TokenMean),
        ..PolicyLoss::verl()
    };
    for device in devices() {
        for aggregation in aggregations() {
            let loss = PolicyLoss {
                aggregation,
                ..loss.clone()
            };
            let inputs = Inputs::new(2, 2100, 3, OLD | TOKEN_ADVANTAGES, device)?;
            assert_equals_the_composed_path(&loss, &inputs)?;
        }
    }
    Ok(())
}

#[test]
fn half_log_probs_equal_the_composed_ones() -> Result<()> {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            let inputs = Inputs::new(3, 9, 1, OLD | TOKEN_ADVANTAGES, device)?;
            let half = |x: &Tensor| x.to_dtype(dtype);
            let batch = inputs.batch.clone();
            let batch = batch.map(|x| {
                if x.dtype() == DType::F32 {
                    half(x)
                } else {
                    Ok(x.clone())
                }
            });
            let log_probs = Var::from_tensor(&half(&inputs.log_probs)?)?;
            let entropy = Var::from_tensor(&half(&inputs.entropy)?)?;
            let batch = batch?.log_probs(&log_probs).entropy(&entropy);
            let inputs = Inputs {
                log_probs,
                entropy,
                batch,
                totals: inputs.totals,
            };
            let loss = PolicyLoss {
                kl: Some(KlLoss::k3(0.1)),
                entropy_coef: 0.01,
                ..PolicyLoss::dapo()
            };
            assert_equals_the_composed_path(&loss, &inputs)?;
        }
    }
    Ok(())
}

/// Strided log-probs that a graph computes, in a loss that is used twice, and whose backward pass
/// runs twice.
#[test]
fn a_loss_in_a_larger_graph_has_the_composed_gradient() -> Result<()> {
    for device in devices() {
        let weight = Var::new(&[[-1f32, -0.5], [-2., -0.25], [-0.75, -1.5]], device)?;
        let old = Tensor::new(&[[-1.25f32, -2.25, -0.5], [-0.5, -0.5, -1.75]], device)?;
        let advantages = Tensor::new(&[1f32, -0.5], device)?;
        let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], device)?;
        let run = |loss: &PolicyLoss| -> Result<[Vec<f64>; 2]> {
            let log_probs = (weight.as_tensor() * 1.5)?.t()?;
            let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
            let loss = loss.compute(&batch, &StepTotals::count(&mask)?)?.loss;
            let twice = (loss.sqr()? + (loss * 3.)?)?;
            let gradient = || -> Result<Vec<f64>> {
                let gradients = twice.backward()?;
                numbers(gradients.get(&weight).expect("a gradient"))
            };
            Ok([gradient()?, gradient()?])
        };
        let loss = PolicyLoss::grpo();
        let [first, second] = run(&loss)?;
        assert_eq!(first, second);
        assert_near(&first, &run(&composed(&loss))?[0], "weight");
    }
    Ok(())
}

/// A variable in place of the log-probs may change between the passes.
#[test]
fn the_backward_pass_uses_the_values_of_the_forward_pass() -> Result<()> {
    for device in devices() {
        let inputs = Inputs::new(2, 9, 5, OLD | TOKEN_ADVANTAGES, device)?;
        let loss = PolicyLoss::dapo();
        let (_, [expected, _]) = inputs.compute(&loss, 1.)?;
        let output = loss.compute(&inputs.batch, &inputs.totals)?;
        let metrics = output.metrics.to_host()?;
        inputs.log_probs.set(&inputs.log_probs.zeros_like()?)?;
        let gradients = output.loss.backward()?;
        let found = numbers(gradients.get(&inputs.log_probs).expect("a gradient"))?;
        assert_eq!(found, expected);
        assert_eq!(output.metrics.to_host()?, metrics);
    }
    Ok(())
}

/// A token without a gradient has none, even if that of the loss is not finite.
#[test]
fn an_infinite_gradient_does_not_reach_masked_or_clipped_tokens() -> Result<()> {
    for device in devices() {
        let log_probs = Var::new(&[[-1f32, -1., f32::NAN]], device)?;
        let old = Tensor::new(&[[-1f32, -3., 0.]], device)?;
        let advantages = Tensor::new(&[1f32], device)?;
        let mask = Tensor::new(&[[1u8, 1, 0]], device)?;
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
        let output = PolicyLoss::dapo().compute(&batch, &StepTotals::count(&mask)?)?;
        let gradients = (output.loss * f64::INFINITY)?.backward()?;
        let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
        assert_eq!(gradient, [f64::NEG_INFINITY, 0., 0.]);
    }
    Ok(())
}

/// Bad input gives the same errors on both paths.
#[test]
fn errors_are_those_of_the_composed_path() -> Result<()> {
    for device in devices() {
        let inputs = || Inputs::new(2, 9, 1, OLD, device);
        let wrong = Tensor::zeros((9, 2), DType::F32, device)?;
        let loss = PolicyLoss {
            kl: Some(KlLoss::k3(0.1)),
            entropy_coef: 0.1,
            aggregation: Aggregation::PromptMeanTokenMean,
            ..PolicyLoss::dapo()
        };
        let mut errors = Vec::new();
        let mut check = |change: &dyn Fn(&mut Inputs)| -> Result<()> {
            let mut inputs = inputs()?;
            change(&mut inputs);
            let error = message(loss.compute(&inputs.batch, &inputs.totals));
            let expected = message(composed(&loss).compute(&inputs.batch, &inputs.totals));
            assert_eq!(error, expected);
            errors.push(error);
            Ok(())
        };
        check(&|x| x.batch.ref_log_probs = None)?;
        check(&|x| x.batch.entropy = None)?;
        check(&|x| x.batch.prompt_tokens = None)?;
        check(&|x| x.batch.prompt_tokens = Some(wrong.clone()))?;
        check(&|x| x.totals.prompts = None)?;
        check(&|x| x.totals.tokens = 0.)?;
        check(&|x| x.batch.entropy_mask = x.batch.entropy.clone())?;
        check(&|x| x.batch.token_weights = Some(wrong.clone()))?;
        check(&|x| x.batch.sample_weights = Some(wrong.clone()))?;
        check(&|x| x.batch.importance_weights = Some(wrong.clone()))?;
        check(&|x| x.batch.values = Some(wrong.clone()))?;
        check(&|x| x.batch.advantages = wrong.clone())?;
        check(&|x| x.batch.old = OldPolicy::Rollout(wrong.clone()))?;
        for error in errors {
            let names = ["absent", "must be", "must give", "must have"];
            assert!(names.iter().any(|name| error.contains(name)), "{error}");
        }
    }
    Ok(())
}
