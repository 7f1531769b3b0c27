//! Losses and filters against formulas in plain f64 Rust, over a grid of option values.

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutFilter};
use candle_grpo_loss::experimental::{self, Vespo};
use candle_grpo_loss::surrogate::{DetachedWeight, Divergence, DivergenceMask};
use candle_grpo_loss::{
    Aggregation, Clip, EntropyTokens, ImportanceLevel, PolicyBatch, PolicyLoss, RolloutCorrection,
    StepTotals, Surrogate,
};
use candle_grpo_test_support::{assert_close, devices, message, noise, numbers};
use rstest::rstest;

const B: usize = 4;
const T: usize = 5;
const LENGTHS: [usize; B] = [5, 3, 4, 1];
const TOKENS: f64 = 13.;

/// A batch with B sequences and one advantage each.
struct Batch {
    log_probs: Vec<f64>,
    old: Vec<f64>,
    rollout: Vec<f64>,
    entropy: Vec<f64>,
    advantages: [f64; B],
}

fn batch() -> Batch {
    let random = |seed| noise(B * T, seed);
    let sum = |a: &[f64], b: Vec<f64>, scale: f64| -> Vec<f64> {
        a.iter().zip(b).map(|(a, b)| a + scale * b).collect()
    };
    let old: Vec<f64> = random(1).into_iter().map(|x| -2.5 + x).collect();
    Batch {
        log_probs: sum(&old, random(2), 0.9),
        rollout: sum(&old, random(3), 0.5),
        entropy: random(4).into_iter().map(|x| 1.5 + x).collect(),
        old,
        advantages: [1.3, -0.7, -1.1, 0.4],
    }
}

fn counts(i: usize) -> bool {
    i % T < LENGTHS[i / T]
}

fn table(x: &[f64], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(x, (B, T), device)
}

fn mask(device: &Device) -> Result<Tensor> {
    let flags: Vec<u8> = (0..B * T).map(|i| u8::from(counts(i))).collect();
    Tensor::from_vec(flags, (B, T), device)
}

/// Computes the loss's token mean, and its gradient by the log-probs.
fn compute(
    surrogate: impl Into<Surrogate>,
    weights: Option<&Tensor>,
    device: &Device,
) -> Result<(f64, Vec<f64>, candle_grpo_core::MetricValues)> {
    let x = batch();
    let log_probs = Var::from_tensor(&table(&x.log_probs, device)?)?;
    let old = table(&x.old, device)?;
    let advantages = Tensor::new(&x.advantages, device)?;
    let mask = mask(device)?;
    let loss = PolicyLoss {
        surrogate: surrogate.into(),
        aggregation: Aggregation::TokenMean,
        ..Default::default()
    };
    let mut batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
    if let Some(weights) = weights {
        batch = batch.importance_weights(weights);
    }
    let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
    let gradients = output.loss.backward()?;
    let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
    let metrics = output.metrics.to_host()?;
    Ok((output.loss.to_scalar()?, gradient, metrics))
}

/// Averages `loss(i)` and the derivatives `slope(i)` over tokens.
fn expected(loss: impl Fn(usize) -> f64, slope: impl Fn(usize) -> f64) -> (f64, Vec<f64>) {
    let masked = |f: &dyn Fn(usize) -> f64, i| if counts(i) { f(i) / TOKENS } else { 0. };
    let total = (0..B * T).map(|i| masked(&loss, i)).sum();
    (total, (0..B * T).map(|i| masked(&slope, i)).collect())
}

/// Any finite constant above 1 bounds the loss for a negative advantage, whatever the upper clip
/// width.
#[rstest]
fn the_dual_clip_is_independent_of_the_upper_width(
    #[values(1.05, 1.4, 3.)] c: f64,
    #[values(0., 0.2, 0.5, 4.)] high: f64,
) -> Result<()> {
    let x = batch();
    let ratio = |i: usize| (x.log_probs[i] - x.old[i]).exp();
    let a = |i: usize| x.advantages[i / T];
    let clip = |i: usize| (-ratio(i) * a(i)).max(-ratio(i).clamp(0.8, 1. + high) * a(i));
    let loss = |i: usize| {
        if a(i) < 0. {
            clip(i).min(-c * a(i))
        } else {
            clip(i)
        }
    };
    let slope = |i: usize| {
        if loss(i) == -ratio(i) * a(i) {
            loss(i)
        } else {
            0.
        }
    };
    let (value, gradient) = expected(loss, slope);
    let above = (0..B * T).filter(|&i| counts(i) && a(i) < 0. && ratio(i) > c);
    let above = above.count() as f64 / TOKENS;
    for device in devices() {
        let clip = Clip {
            dual_clip: Some(c),
            ..Clip::asymmetric(0.2, high)
        };
        let (got, got_gradient, metrics) = compute(clip, None, device)?;
        assert_close(&[got], &[value], 1e-12);
        assert_close(&got_gradient, &gradient, 1e-12);
        assert_close(
            &[metrics.get("dual_clip_fraction").expect("a fraction")],
            &[above],
            1e-12,
        );
    }
    Ok(())
}

/// TRL's default bound of 0.2 scales every weight down; it must be allowed explicitly.
#[test]
fn a_cispo_bound_below_one_must_be_allowed() -> Result<()> {
    let x = batch();
    let bound = DetachedWeight::at_most(0.2);
    let refused = PolicyLoss {
        surrogate: bound.into(),
        ..Default::default()
    };
    assert!(message(refused.validate()).contains("allow_max_below_one"));
    let a = |i: usize| x.advantages[i / T];
    let weight = |i: usize| (x.log_probs[i] - x.old[i]).exp().min(0.2);
    let (value, gradient) = expected(
        |i| -weight(i) * a(i) * x.log_probs[i],
        |i| -weight(i) * a(i),
    );
    for device in devices() {
        let allowed = DetachedWeight {
            allow_max_below_one: true,
            ..bound
        };
        let (got, got_gradient, _) = compute(allowed, None, device)?;
        assert_close(&[got], &[value], 1e-12);
        assert_close(&got_gradient, &gradient, 1e-12);
    }
    Ok(())
}

/// Computes `phi(W)` from log W.
fn phi(s: &Vespo, log_weight: f64, advantage: f64) -> f64 {
    let (k, lambda) = if advantage >= 0. {
        (s.k_pos, s.lambda_pos)
    } else {
        (s.k_neg, s.lambda_neg)
    };
    let log_weight = log_weight.clamp(1e-8f64.ln(), 20.);
    (lambda + k * log_weight - lambda * log_weight.exp()).exp()
}

/// A sequence weight is one factor in the product. A token weight is one factor for each token.
#[rstest]
fn vespo_uses_the_weight_of_a_sequence_once(
    #[values("none", "per token", "[B, 1]", "[B]")] shape: &str,
) -> Result<()> {
    let x = batch();
    let vespo = Vespo {
        k_pos: 1.5,
        ..Vespo::default()
    };
    let per_token: Vec<f64> = noise(B * T, 9).into_iter().map(|w| 1. + 0.4 * w).collect();
    let per_sequence = [0.8, 1.3, 0.6, 1.1];
    let log_weight = |row: usize| -> f64 {
        let tokens = || (row * T..(row + 1) * T).filter(|&i| counts(i));
        let ratio: f64 = tokens().map(|i| x.log_probs[i] - x.old[i]).sum();
        ratio
            + match shape {
                "none" => 0.,
                "per token" => tokens().map(|i| per_token[i].ln()).sum(),
                _ => f64::ln(per_sequence[row]),
            }
    };
    let a = |i: usize| x.advantages[i / T];
    let weight = |i: usize| phi(&vespo, log_weight(i / T), a(i));
    let (value, gradient) = expected(
        |i| -weight(i) * a(i) * x.log_probs[i],
        |i| -weight(i) * a(i),
    );
    for device in devices() {
        let column = Tensor::new(&per_sequence, device)?;
        let weights = match shape {
            "none" => None,
            "per token" => Some(table(&per_token, device)?),
            "[B, 1]" => Some(column.unsqueeze(1)?),
            _ => Some(column),
        };
        let (got, got_gradient, _) = compute(vespo, weights.as_ref(), device)?;
        assert_close(&[got], &[value], 1e-12);
        assert_close(&got_gradient, &gradient, 1e-12);
    }
    Ok(())
}

/// A sequence-level correction gives one weight per sequence, so VESPO uses it once.
#[rstest]
#[case(ImportanceLevel::Sequence)]
#[case(ImportanceLevel::SequenceProduct)]
fn a_sequence_level_correction_gives_one_weight_per_sequence(
    #[case] level: ImportanceLevel,
) -> Result<()> {
    let x = batch();
    let means = level == ImportanceLevel::Sequence;
    let log_weights: Vec<f64> = (0..B)
        .map(|row| {
            let tokens = (row * T..(row + 1) * T).filter(|&i| counts(i));
            let sum: f64 = tokens.map(|i| x.old[i] - x.rollout[i]).sum();
            if means {
                sum / LENGTHS[row] as f64
            } else {
                sum
            }
        })
        .collect();
    for device in devices() {
        let correction = RolloutCorrection {
            weight: Some(ImportanceWeight {
                level,
                max: None,
                ..Default::default()
            }),
            ..Default::default()
        };
        let (old, rollout) = (table(&x.old, device)?, table(&x.rollout, device)?);
        let corrected = correction.compute(&old, &rollout, &mask(device)?)?;
        let weights = corrected.weights.expect("weights");
        assert_eq!(weights.dims(), [B, 1]);
        let expected: Vec<f64> = log_weights.iter().map(|w| w.exp()).collect();
        assert_close(&numbers(&weights)?, &expected, 1e-12);
        let vespo = PolicyLoss {
            rollout_correction: Some(correction),
            ..experimental::policy_loss::vespo()
        };
        vespo.validate()?;
    }
    Ok(())
}

#[test]
fn vespo_refuses_a_weight_per_segment() {
    let loss = PolicyLoss {
        rollout_correction: Some(RolloutCorrection {
            weight: Some(ImportanceWeight {
                level: ImportanceLevel::Segment,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..experimental::policy_loss::vespo()
    };
    let error = message(loss.validate());
    assert!(
        error.starts_with("rollout_correction.weight.level: segment, must be token"),
        "{error}"
    );
}

/// VESPO's log-ratio clamp is the option: a bound, or none.
#[rstest]
fn vespo_clamps_log_ratios_by_the_option(
    #[values(Some(0.2), Some(20.), None)] clamp: Option<f64>,
) -> Result<()> {
    let vespo = Vespo {
        lambda_pos: 1e-3,
        ..Vespo::default()
    };
    // Two tokens with log-ratios of 25 and -24.
    let ratios: [f64; 2] = [25., -24.];
    let sum: f64 = ratios
        .iter()
        .map(|d| clamp.map_or(*d, |c| d.clamp(-c, c)))
        .sum();
    for device in devices() {
        let log_probs = Var::new(&[[-1., -30.]], device)?;
        let old = Tensor::new(&[[-26., -6.]], device)?;
        let (advantages, mask) = (
            Tensor::new(&[1.], device)?,
            Tensor::new(&[[1u8, 1]], device)?,
        );
        let loss = PolicyLoss {
            log_ratio_clamp: clamp,
            ..PolicyLoss {
                surrogate: vespo.into(),
                ..experimental::policy_loss::vespo()
            }
        };
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
        let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
        let expected = phi(&vespo, sum, 1.) * 31. / 2.;
        assert_close(&[output.loss.to_scalar()?], &[expected], 1e-12);
    }
    Ok(())
}

fn clamped(log_prob: f64) -> f64 {
    log_prob.exp().clamp(1e-6, 1. - 1e-6)
}

fn binary_kl(p: f64, q: f64) -> f64 {
    p * (p / q).ln() + (1. - p) * ((1. - p) / (1. - q)).ln()
}

/// Sampled-token divergences per token and as a sequence mean, with probabilities clamped to [1e-6,
/// 1 - 1e-6].
#[rstest]
fn rollout_filters_bound_sampled_token_divergences(
    #[values(
        FilterStatistic::BinaryKl,
        FilterStatistic::AbsoluteProbabilityDifference
    )]
    statistic: FilterStatistic,
    #[values(FilterLevel::Token, FilterLevel::SequenceMean)] level: FilterLevel,
    #[values(1e-3, 0.01, 0.05, 0.2)] max: f64,
) -> Result<()> {
    let mut x = batch();
    // Probabilities beyond the clamps: p = 1 against q = 0 and q = 1.
    (x.rollout[0], x.old[0]) = (0., -40.);
    (x.rollout[T], x.old[T]) = (0., 0.);
    let value = |i: usize| {
        let (p, q) = (clamped(x.rollout[i]), clamped(x.old[i]));
        match statistic {
            FilterStatistic::BinaryKl => binary_kl(p, q),
            _ => (p - q).abs(),
        }
    };
    let statistic_at = |i: usize| match level {
        FilterLevel::Token => value(i),
        _ => {
            let row = i / T;
            let tokens = row * T..row * T + LENGTHS[row];
            tokens.map(value).sum::<f64>() / LENGTHS[row] as f64
        }
    };
    let kept: Vec<f64> = (0..B * T)
        .map(|i| f64::from(u8::from(counts(i) && statistic_at(i) <= max)))
        .collect();
    for device in devices() {
        let correction = RolloutCorrection {
            filters: vec![RolloutFilter {
                statistic,
                level,
                min: None,
                max: Some(max),
            }],
            ..Default::default()
        };
        let (old, rollout) = (table(&x.old, device)?, table(&x.rollout, device)?);
        let corrected = correction.compute(&old, &rollout, &mask(device)?)?;
        assert_eq!(numbers(&corrected.kept)?, kept);
    }
    Ok(())
}

/// DPPO: the fraction of bounded weights counts only kept tokens.
#[rstest]
fn dppo_counts_bounded_weights_among_kept_tokens(
    #[values(Divergence::TotalVariation, Divergence::BinaryKl)] divergence: Divergence,
    #[values(0.02, 0.1, 0.3)] bound: f64,
) -> Result<()> {
    let x = batch();
    let (ratio_max, a) = (1.2, |i: usize| x.advantages[i / T]);
    let ratio = |i: usize| (x.log_probs[i] - x.old[i]).exp();
    let dropped = |i: usize| {
        let (p, q) = (x.log_probs[i].exp(), x.old[i].exp());
        let distance = if divergence == Divergence::BinaryKl {
            binary_kl(q, p)
        } else {
            (p - q).abs()
        };
        distance > bound && (if a(i) > 0. { p > q } else { p < q })
    };
    let weight = |i: usize| {
        if dropped(i) {
            0.
        } else {
            ratio(i).min(ratio_max)
        }
    };
    let (value, gradient) = expected(
        |i| -weight(i) * a(i) * x.log_probs[i],
        |i| -weight(i) * a(i),
    );
    let fraction = |holds: &dyn Fn(usize) -> bool| {
        (0..B * T).filter(|&i| counts(i) && holds(i)).count() as f64 / TOKENS
    };
    for device in devices() {
        let surrogate = DivergenceMask {
            divergence,
            low: bound,
            high: bound,
            ratio_max: Some(ratio_max),
            ..DivergenceMask::default()
        };
        let (got, got_gradient, metrics) = compute(surrogate, None, device)?;
        assert_close(&[got], &[value], 1e-12);
        assert_close(&got_gradient, &gradient, 1e-12);
        let names = ["clip_fraction", "ratio_max_fraction"];
        assert_close(
            &names.map(|name| metrics.get(name).expect(name)),
            &[
                fraction(&dropped),
                fraction(&|i| !dropped(i) && ratio(i) > ratio_max),
            ],
            1e-12,
        );
    }
    Ok(())
}

/// The bonus on a subset is the mean over that subset in the whole step, even if the step is split
/// into micro-batches.
#[test]
fn the_entropy_bonus_on_a_subset_is_a_mean_over_that_subset_of_the_step() -> Result<()> {
    let x = batch();
    let kept = |i: usize| counts(i) && x.entropy[i] > 1.5;
    let subset: Vec<usize> = (0..B * T).filter(|&i| kept(i)).collect();
    let mean = subset.iter().map(|&i| x.entropy[i]).sum::<f64>() / subset.len() as f64;
    let gradient = |i: usize| {
        if kept(i) {
            -0.3 / subset.len() as f64
        } else {
            0.
        }
    };
    let gradient: Vec<f64> = (0..B * T).map(gradient).collect();
    let loss = PolicyLoss {
        loss_coef: 0.,
        entropy_coef: 0.3,
        entropy_tokens: EntropyTokens::TopEntropy,
        ..PolicyLoss::grpo()
    };
    for device in devices() {
        let flags: Vec<u8> = (0..B * T).map(|i| u8::from(kept(i))).collect();
        let top = Tensor::from_vec(flags, (B, T), device)?;
        let mask = mask(device)?;
        let totals = StepTotals::count(&mask)?.with_entropy_mask(&top)?;
        let log_probs = Var::from_tensor(&table(&x.log_probs, device)?)?;
        let advantages = Tensor::new(&x.advantages, device)?;
        let entropy = Var::from_tensor(&table(&x.entropy, device)?)?;
        let mut sum = 0.;
        let mut got = Vec::new();
        for (start, rows) in [(0, 1), (1, 3)] {
            let part = |x: &Tensor| x.narrow(0, start, rows);
            let (log_probs, advantages) = (part(&log_probs)?, part(&advantages)?);
            let (mask, top) = (part(&mask)?.contiguous()?, part(&top)?.contiguous()?);
            let entropy = Var::from_tensor(&part(&entropy)?.contiguous()?)?;
            let batch = PolicyBatch::new(&log_probs, &advantages, &mask).entropy(&entropy);
            let error = message(loss.compute(&batch, &totals));
            assert!(error.starts_with("entropy_mask: absent"), "{error}");
            let output = loss.compute(&batch.entropy_mask(&top), &totals)?;
            sum += output.loss.to_scalar::<f64>()?;
            let gradients = output.loss.backward()?;
            got.extend(numbers(gradients.get(&entropy).expect("a gradient"))?);
        }
        assert_close(&[sum], &[-0.3 * mean], 1e-12);
        assert_close(&got, &gradient, 1e-12);
    }
    Ok(())
}
