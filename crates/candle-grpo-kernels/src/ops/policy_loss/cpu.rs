//! The CPU path of [`policy_loss`](crate::policy_loss).

use std::ops::Deref;

use candle_core::{Device, Layout, Result, Storage, Tensor, WithDType};
use rayon::prelude::*;

use super::{Arguments, Kept, KlNumbers, PolicyStatistic};
use crate::cpu::slice;

type Statistics = [f64; PolicyStatistic::COUNT];

/// Returns the loss, the statistics and the derivatives.
pub(super) fn forward(log_probs: &[f32], arguments: &Arguments) -> Result<(f32, Kept)> {
    let (rows, tokens) = (arguments.rows, arguments.tokens);
    let mask = Some(arguments.mask.storage_and_layout());
    let advantages = Some(arguments.advantages.storage_and_layout());
    let old_log_probs = hold(&arguments.old_log_probs);
    let ref_log_probs = hold(&arguments.ref_log_probs);
    let entropy = hold(&arguments.entropy);
    let factors = arguments.factors.each_ref().map(hold);
    let token_weights = hold(&arguments.token_weights);
    let prompt_tokens = hold(&arguments.prompt_tokens);
    let policy_mask = hold(&arguments.policy_mask);
    let entropy_mask = hold(&arguments.entropy_mask);
    let inputs = Inputs {
        arguments,
        log_probs,
        mask: elements(&mask)?,
        old_log_probs: elements(&old_log_probs)?,
        ref_log_probs: elements(&ref_log_probs)?,
        entropy: elements(&entropy)?,
        advantages: Values::new(elements(&advantages)?, arguments),
        factors: [
            Values::new(elements(&factors[0])?, arguments),
            Values::new(elements(&factors[1])?, arguments),
        ],
        token_weights: Values::new(elements(&token_weights)?, arguments),
        prompt_tokens: elements(&prompt_tokens)?,
        policy_mask: elements(&policy_mask)?,
        entropy_mask: elements(&entropy_mask)?,
    };
    let mut of_log_probs = vec![0f32; rows * tokens];
    // Without a bonus, nothing is written, so the zeros take no memory.
    let mut of_entropy = vec![0f32; rows * tokens];
    let statistics: Vec<Statistics> = of_log_probs
        .par_chunks_mut(tokens)
        .zip(of_entropy.par_chunks_mut(tokens))
        .enumerate()
        .map(|(row, (of_log_probs, of_entropy))| inputs.row(row, of_log_probs, of_entropy))
        .collect();
    // In order, however rows are assigned to threads.
    let statistics = statistics.into_iter().fold(empty(), |mut all, row| {
        for (index, x) in row.into_iter().enumerate() {
            add(&mut all, index, x);
        }
        all
    });
    let has_bonus = arguments.numbers.entropy_scale != 0.0;
    let tensor = |x: Vec<f32>| Tensor::from_vec(x, (rows, tokens), &Device::Cpu);
    let kept = Kept {
        statistics: Tensor::new(&statistics, &Device::Cpu)?,
        of_log_probs: tensor(of_log_probs)?,
        of_entropy: has_bonus.then(|| tensor(of_entropy)).transpose()?,
    };
    Ok((statistics[PolicyStatistic::Loss as usize] as f32, kept))
}

/// Multiplies the derivatives by the loss's gradient.
pub(super) fn backward(kept: &Kept, gradient: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
    let gradient = gradient.to_scalar::<f32>()?;
    let times = |x: &Tensor| {
        slice::read::<f32, _>(x, |values| {
            // A token without a derivative has none, whatever the gradient is.
            let scaled = |&x: &f32| if x == 0.0 { 0.0 } else { x * gradient };
            let scaled: Vec<f32> = values.iter().map(scaled).collect();
            Tensor::from_vec(scaled, x.shape(), &Device::Cpu)
        })
    };
    let of_entropy = kept.of_entropy.as_ref().map(times).transpose()?;
    Ok((times(&kept.of_log_probs)?, of_entropy))
}

/// Returns the statistics of no tokens.
fn empty() -> Statistics {
    let mut statistics = [0.0; PolicyStatistic::COUNT];
    statistics[PolicyStatistic::RatioMax as usize] = f64::NEG_INFINITY;
    statistics[PolicyStatistic::K3Max as usize] = f64::NEG_INFINITY;
    statistics[PolicyStatistic::RatioMin as usize] = f64::INFINITY;
    statistics
}

/// Adds `x` to a statistic.
#[inline(always)]
fn add(statistics: &mut Statistics, index: usize, x: f64) {
    const RATIO_MAX: usize = PolicyStatistic::RatioMax as usize;
    const K3_MAX: usize = PolicyStatistic::K3Max as usize;
    const RATIO_MIN: usize = PolicyStatistic::RatioMin as usize;
    let sum = &mut statistics[index];
    *sum = match index {
        RATIO_MAX | K3_MAX => sum.max(x),
        RATIO_MIN => sum.min(x),
        _ => *sum + x,
    };
}

/// Returns a tensor's storage and layout, if there is one.
fn hold(x: &Option<Tensor>) -> Option<(impl Deref<Target = Storage>, &Layout)> {
    x.as_ref().map(Tensor::storage_and_layout)
}

/// Returns a tensor's elements, given its `storage_and_layout()`, or none if it is absent.
fn elements<'a, T: WithDType>(
    held: &'a Option<(impl Deref<Target = Storage>, &Layout)>,
) -> Result<&'a [T]> {
    match held {
        Some((storage, layout)) => slice::elements(storage, layout),
        None => Ok(&[]),
    }
}

/// Values of all tokens, or one per sequence. Without any, all are 1.
struct Values<'a> {
    values: &'a [f32],
    /// Steps between sequences and between tokens.
    steps: [usize; 2],
}

impl<'a> Values<'a> {
    fn new(values: &'a [f32], arguments: &Arguments) -> Self {
        let steps = if values.len() == arguments.rows * arguments.tokens {
            [arguments.tokens, 1]
        } else {
            [1, 0]
        };
        Self { values, steps }
    }

    #[inline(always)]
    fn at(&self, row: usize, token: usize) -> f32 {
        let index = row * self.steps[0] + token * self.steps[1];
        *self.values.get(index).unwrap_or(&1.0)
    }
}

/// All tensors as slices. One that is absent is empty.
struct Inputs<'a> {
    arguments: &'a Arguments,
    log_probs: &'a [f32],
    mask: &'a [u8],
    old_log_probs: &'a [f32],
    ref_log_probs: &'a [f32],
    entropy: &'a [f32],
    advantages: Values<'a>,
    factors: [Values<'a>; 2],
    token_weights: Values<'a>,
    prompt_tokens: &'a [f32],
    policy_mask: &'a [u8],
    entropy_mask: &'a [u8],
}

impl Inputs<'_> {
    /// Writes the derivatives in a sequence, which are 0, and returns its statistics.
    fn row(&self, row: usize, of_log_probs: &mut [f32], of_entropy: &mut [f32]) -> Statistics {
        let numbers = &self.arguments.numbers;
        let first = row * self.arguments.tokens;
        let mask = &self.mask[first..first + self.arguments.tokens];
        let share = |scale: f64, divisor: u32| match divisor {
            1 => scale / (mask.iter().filter(|&&m| m != 0).count() as f64).max(1.0),
            2 => scale / f64::from(self.prompt_tokens[row]).max(1.0),
            _ => scale,
        };
        let share_of_token = share(numbers.scale, numbers.divisor);
        let share_of_entropy = share(numbers.entropy_scale, numbers.entropy_divisor);
        let mut statistics = empty();
        for (token, _) in mask.iter().enumerate().filter(|&(_, &m)| m != 0) {
            let index = first + token;
            let mut count = |statistic: PolicyStatistic, x: f64| {
                add(&mut statistics, statistic as usize, x);
            };
            count(PolicyStatistic::Tokens, 1.0);

            let log_prob = self.log_probs[index];
            let old_log_prob = *self.old_log_probs.get(index).unwrap_or(&log_prob);
            let drift = Drift::new(log_prob - old_log_prob, numbers.log_ratio_clamp);
            let (ratio, d) = (drift.ratio, drift.clamped);
            let k3 = (ratio - 1.0) - d;
            count(PolicyStatistic::Ratio, ratio.into());
            count(PolicyStatistic::RatioMax, ratio.into());
            count(PolicyStatistic::RatioMin, ratio.into());
            count(PolicyStatistic::K1, (-d).into());
            count(PolicyStatistic::Abs, d.abs().into());
            count(PolicyStatistic::K2, (d * d * 0.5).into());
            count(PolicyStatistic::K3, k3.into());
            count(PolicyStatistic::K3Max, k3.into());
            count(PolicyStatistic::LogProb, log_prob.into());
            count(PolicyStatistic::OldLogProb, old_log_prob.into());

            let advantage = self.advantages.at(row, token);
            let surrogate = self.surrogate(log_prob, advantage, drift);
            let flag = |holds: bool| f64::from(u8::from(holds));
            count(PolicyStatistic::ClippedLow, flag(surrogate.is_low));
            count(PolicyStatistic::ClippedHigh, flag(surrogate.is_high));
            let is_clipped = surrogate.is_low || surrogate.is_high;
            count(PolicyStatistic::Clipped, flag(is_clipped));
            count(
                PolicyStatistic::DualClipped,
                flag(surrogate.is_dual_clipped),
            );
            count(PolicyStatistic::Dropped, flag(surrogate.is_dropped));

            let is_kept = self.policy_mask.get(index).is_none_or(|&kept| kept != 0);
            let [mut loss, mut slope] = if is_kept {
                [surrogate.loss, surrogate.slope]
            } else {
                [0.0; 2]
            };
            for factors in &self.factors {
                let factor = factors.at(row, token);
                loss *= factor;
                slope *= factor;
            }
            let weight = self.token_weights.at(row, token);
            let mut total = f64::from(loss * weight);
            let mut of_log_prob = slope * weight;
            let kl_terms = [
                (
                    &numbers.kl,
                    self.ref_log_probs.get(index),
                    PolicyStatistic::Kl,
                ),
                (&numbers.old_kl, Some(&old_log_prob), PolicyStatistic::OldKl),
            ];
            for (kl, reference, statistic) in kl_terms {
                let Some(reference) = reference.filter(|_| kl.estimate != 0) else {
                    continue;
                };
                let [value, slope] = kl.at(log_prob - reference, drift);
                count(statistic, value.into());
                total += f64::from(value * weight) * f64::from(kl.coef);
                of_log_prob += slope * weight * kl.coef;
            }
            count(PolicyStatistic::Loss, total * share_of_token);
            of_log_probs[token] = of_log_prob * share_of_token as f32;

            if let Some(&entropy) = self.entropy.get(index) {
                count(PolicyStatistic::Entropy, entropy.into());
                let is_in_bonus = self.entropy_mask.get(index).is_none_or(|&m| m != 0);
                if numbers.entropy_scale != 0.0 && is_in_bonus {
                    count(
                        PolicyStatistic::Loss,
                        -f64::from(entropy) * share_of_entropy,
                    );
                    of_entropy[token] = -share_of_entropy as f32;
                }
            }
        }
        statistics
    }

    fn surrogate(&self, log_prob: f32, advantage: f32, drift: Drift) -> Surrogate {
        let numbers = &self.arguments.numbers;
        let ratio = drift.ratio;
        match numbers.surrogate {
            0 => {
                let limited = if ratio > numbers.delta {
                    numbers.delta
                } else {
                    ratio
                };
                let limited_loss = -(limited * advantage);
                let bounded = clamped(ratio, numbers.low, numbers.high);
                let clipped_loss = -(bounded * advantage);
                let takes_clipped = clipped_loss > limited_loss;
                let is_outside = ratio < numbers.low || ratio > numbers.high;
                let is_clipped = takes_clipped && is_outside;
                let mut constant = if takes_clipped {
                    clipped_loss
                } else {
                    limited_loss
                };
                let mut is_constant = if takes_clipped {
                    is_outside
                } else {
                    ratio != limited
                };
                let ceiling = advantage * -numbers.dual_clip;
                let is_dual_clipped = advantage < 0.0 && constant > ceiling;
                if is_dual_clipped {
                    constant = ceiling;
                    is_constant = true;
                }
                let unclipped = -(ratio * advantage);
                Surrogate {
                    loss: if is_constant { constant } else { unclipped },
                    slope: if is_constant {
                        0.0
                    } else {
                        drift.slope_of(unclipped)
                    },
                    is_low: is_clipped && advantage < 0.0,
                    is_high: is_clipped && advantage > 0.0,
                    is_dual_clipped,
                    is_dropped: false,
                }
            }
            1 => {
                let is_dropped = (ratio > numbers.drop_high && advantage > 0.0)
                    || (ratio < numbers.drop_low && advantage < 0.0);
                let slope = -(clamped(ratio, numbers.low, numbers.high) * advantage);
                Surrogate {
                    loss: if is_dropped { 0.0 } else { slope * log_prob },
                    slope: if is_dropped { 0.0 } else { slope },
                    is_low: ratio < numbers.low,
                    is_high: ratio > numbers.high,
                    is_dual_clipped: false,
                    is_dropped,
                }
            }
            _ => Surrogate {
                loss: -advantage * log_prob,
                slope: -advantage,
                is_low: false,
                is_high: false,
                is_dual_clipped: false,
                is_dropped: false,
            },
        }
    }
}

/// One token's surrogate, and its derivative by the log-prob.
struct Surrogate {
    loss: f32,
    slope: f32,
    is_low: bool,
    is_high: bool,
    is_dual_clipped: bool,
    is_dropped: bool,
}

/// A token's log-ratio to the old policy.
#[derive(Clone, Copy)]
struct Drift {
    /// Not clamped.
    log_ratio: f32,
    clamped: f32,
    ratio: f32,
    /// Derivative of the clamp.
    slope: f32,
}

impl Drift {
    #[inline(always)]
    fn new(log_ratio: f32, bound: f32) -> Self {
        let clamped = clamped(log_ratio, -bound, bound);
        Self {
            log_ratio,
            clamped,
            ratio: clamped.exp(),
            slope: slope_of_clamp(log_ratio, bound),
        }
    }

    /// Returns the derivative by the log-prob, given that by the clamped log-ratio.
    #[inline(always)]
    fn slope_of(self, by_clamped: f32) -> f32 {
        if self.slope == 0.0 {
            0.0
        } else {
            by_clamped * self.slope
        }
    }
}

impl KlNumbers {
    /// Returns the estimate and its derivative, given the log-ratio to the reference.
    #[inline(always)]
    fn at(&self, log_ratio: f32, drift: Drift) -> [f32; 2] {
        let bound = self.log_ratio_clamp;
        let d = clamped(log_ratio, -bound, bound);
        let [estimate, own] = match self.estimate {
            1 => [d, 1.0],
            2 => [d * d * 0.5, d],
            3 => {
                let inverse_ratio = (-d).exp();
                [(inverse_ratio - 1.0) + d, 1.0 - inverse_ratio]
            }
            _ => {
                let sign = f32::from(i8::from(d > 0.0) - i8::from(d < 0.0));
                [d * sign, sign]
            }
        };
        let value = clamped(estimate, -self.value_clamp, self.value_clamp);
        let slope = match self.slope {
            0 => {
                let kept =
                    slope_of_clamp(log_ratio, bound) * slope_of_clamp(estimate, self.value_clamp);
                if kept == 0.0 { 0.0 } else { kept * own }
            }
            // The clamp does not apply, except to values that are not finite.
            _ if bound < f32::INFINITY && !log_ratio.is_finite() => 0.0,
            1 => log_ratio,
            _ => log_ratio * drift.log_ratio.min(self.max_log_weight).exp(),
        };
        if self.times_ratio == 0 {
            return [value, slope];
        }
        let product = value * drift.ratio;
        [product, slope * drift.ratio + drift.slope_of(product)]
    }
}

/// Bounds `x` from below, then from above. NaN stays NaN.
#[inline(always)]
fn clamped(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// Returns the derivative of a clamp to `[-bound, bound]`: a half at a bound, as Candle has it.
#[inline(always)]
fn slope_of_clamp(x: f32, bound: f32) -> f32 {
    if x.abs() < bound || bound == f32::INFINITY {
        1.0
    } else if x.abs() == bound {
        0.5
    } else {
        0.0
    }
}
