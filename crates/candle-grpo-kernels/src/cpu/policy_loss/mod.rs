//! The CPU path of [`policy_loss`](crate::policy_loss()): sequences shared out to all cores, each in two or three passes over
//! its tokens, which stay in the cache.

mod kl;
mod sums;
mod surrogate;

use std::ops::Deref;

use candle_core::{Device, Layout, Result, Storage, Tensor};
use rayon::prelude::*;

use self::kl::Estimated;
use self::sums::Sums;
use self::surrogate::{Token, within};
use super::slice::elements;
use crate::policy_loss::{Arguments, Parts, PolicyLossOptions, PolicySum, RatioLevel, RowDivisor};

/// Fewer tokens than this are not worth a core of their own.
const TOKENS_OF_A_CORE: usize = 1 << 12;

pub(crate) fn forward(arguments: &Arguments) -> Result<Parts> {
    let (batch, tokens) = arguments.log_probs.dims2()?;
    // Held for reading until the end.
    let old_log_probs = held(&arguments.old_log_probs);
    let ref_log_probs = held(&arguments.ref_log_probs);
    let weights = held(&arguments.weights);
    let entropy = held(&arguments.entropy);
    let row_divisors = held(&arguments.row_divisors);
    let log_probs = arguments.log_probs.storage_and_layout();
    let advantages = arguments.advantages.storage_and_layout();
    let mask = arguments.mask.storage_and_layout();
    let batch_of = Batch {
        tokens,
        options: arguments.options,
        log_probs: elements(&log_probs.0, log_probs.1)?,
        old_log_probs: slice_of(&old_log_probs)?,
        ref_log_probs: slice_of(&ref_log_probs)?,
        advantages: elements(&advantages.0, advantages.1)?,
        weights: slice_of(&weights)?,
        entropy: slice_of(&entropy)?,
        row_divisors: slice_of(&row_divisors)?,
        mask: elements(&mask.0, mask.1)?,
    };

    // Zeros from the system are not touched: a pass writes the positions that count, and only those.
    let zeros = || vec![0f32; batch * tokens];
    let (mut gradient, mut surrogate, mut policy) = (zeros(), zeros(), zeros());
    let (mut kl, mut log_ratio) = (zeros(), zeros());
    let mut clipped = vec![0u8; batch * tokens];
    let width = tokens.max(1);
    let rows: Vec<Row> = gradient
        .par_chunks_mut(width)
        .zip(surrogate.par_chunks_mut(width))
        .zip(policy.par_chunks_mut(width))
        .zip(kl.par_chunks_mut(width))
        .zip(log_ratio.par_chunks_mut(width))
        .zip(clipped.par_chunks_mut(width))
        .enumerate()
        .with_min_len(TOKENS_OF_A_CORE.div_ceil(width))
        .map(
            |(row, (((((gradient, surrogate), policy), kl), log_ratio), clipped))| {
                let written = Written {
                    gradient,
                    surrogate,
                    policy,
                    kl,
                    log_ratio,
                    clipped,
                };
                batch_of.row(row, written)
            },
        )
        .collect();
    // Added in order, whoever computed them.
    let loss: f64 = rows.iter().map(|row| row.loss).sum();
    let sums = rows
        .iter()
        .fold(Sums::new(), |sums, row| sums.merged(&row.sums));

    let tensor = |values: Vec<f32>| Tensor::from_vec(values, (batch, tokens), &Device::Cpu);
    Ok(Parts {
        loss: Tensor::new(loss as f32, &Device::Cpu)?,
        gradient: tensor(gradient)?,
        surrogate: tensor(surrogate)?,
        policy: tensor(policy)?,
        kl: arguments.options.kl.map(|_| tensor(kl)).transpose()?,
        log_ratio: tensor(log_ratio)?,
        clipped: Tensor::from_vec(clipped, (batch, tokens), &Device::Cpu)?,
        sums: Tensor::new(&sums.0, &Device::Cpu)?,
    })
}

type Held<'a, S> = Option<(S, &'a Layout)>;

fn held(tensor: &Option<Tensor>) -> Held<'_, impl Deref<Target = Storage>> {
    tensor.as_ref().map(Tensor::storage_and_layout)
}

fn slice_of<'a, S: Deref<Target = Storage>>(held: &'a Held<S>) -> Result<Option<&'a [f32]>> {
    held.as_ref()
        .map(|(storage, layout)| elements(storage, layout))
        .transpose()
}

/// The elements of all arguments.
struct Batch<'a> {
    tokens: usize,
    options: &'a PolicyLossOptions<'a>,
    log_probs: &'a [f32],
    old_log_probs: Option<&'a [f32]>,
    ref_log_probs: Option<&'a [f32]>,
    /// One for each sequence, or for each token.
    advantages: &'a [f32],
    /// One for each sequence, or for each token.
    weights: Option<&'a [f32]>,
    entropy: Option<&'a [f32]>,
    row_divisors: Option<&'a [f32]>,
    mask: &'a [u8],
}

/// What is written of one sequence.
struct Written<'a> {
    gradient: &'a mut [f32],
    surrogate: &'a mut [f32],
    policy: &'a mut [f32],
    kl: &'a mut [f32],
    log_ratio: &'a mut [f32],
    clipped: &'a mut [u8],
}

/// What one sequence adds.
struct Row {
    loss: f64,
    sums: Sums,
}

/// The log-ratio of one token, clamped.
#[derive(Clone, Copy)]
struct Clamped {
    value: f32,
    /// Its derivative by the log-prob: 1, or 0 beyond the clamp.
    slope: f32,
}

impl Clamped {
    #[inline(always)]
    fn new(x: f32, bound: f32) -> Self {
        Self {
            value: within(x, -bound, bound),
            slope: if x.abs() > bound { 0.0 } else { 1.0 },
        }
    }
}

impl Batch<'_> {
    fn row(&self, row: usize, written: Written) -> Row {
        let first = row * self.tokens;
        let counts = |column: &usize| self.mask[first + column] != 0;
        let mut sums = Sums::new();
        let length = (0..self.tokens).filter(counts).count();
        if length == 0 {
            return Row { loss: 0.0, sums };
        }
        let shared = self.shared_log_ratio(row, length);
        let scale = 1.0 / (self.options.denominator * self.divisor(row, length));
        let own_gradient = shared.is_none() || self.options.level == RatioLevel::SequenceToken;
        let mut loss = 0.0;
        // The derivative of the whole sequence by the log-ratio that its tokens share.
        let mut by_shared = 0.0;
        for column in (0..self.tokens).filter(counts) {
            let at = first + column;
            let own = self.log_ratio(at);
            let log_ratio = shared.map_or(own.value, |shared| shared.value);
            let own_ratio = own.value.exp();
            let token = Token {
                log_prob: self.log_probs[at],
                old_log_prob: self.old_log_prob(at),
                log_ratio,
                ratio: if shared.is_some() {
                    log_ratio.exp()
                } else {
                    own_ratio
                },
                advantage: self.of_row_or_token(self.advantages, row, at),
            };
            sums.add_token(token, own.value, own_ratio);
            let scored = self.options.surrogate.score(token);
            sums.add_flags(scored.flags);
            let (coef, kl) = match (&self.options.kl, self.ref_log_probs) {
                (Some(term), Some(reference)) => {
                    let kl = term.estimate(token, reference[at], own_ratio);
                    sums.add(PolicySum::Kl, kl.value);
                    (term.coef, kl)
                }
                _ => (0.0, Estimated::default()),
            };
            if let Some(entropy) = self.entropy {
                sums.add(PolicySum::Entropy, entropy[at]);
            }
            let weight = self
                .weights
                .map_or(1.0, |weights| self.of_row_or_token(weights, row, at));
            // A weight of 0 drops the token: what it scores may be infinite.
            let weighted = |x: f32| if weight == 0.0 { 0.0 } else { x * weight };
            let policy = weighted(scored.loss);
            let by_log_ratio = weighted(scored.by_log_ratio) + coef * kl.by_log_ratio;
            let by_log_prob = weighted(scored.by_log_prob)
                + coef * (kl.by_log_prob + kl.by_token_log_ratio * own.slope);
            loss += f64::from(policy) + f64::from(coef * kl.value);
            let own_part = if own_gradient {
                by_log_ratio * own.slope
            } else {
                by_shared += f64::from(by_log_ratio);
                0.0
            };
            written.gradient[column] = (f64::from(by_log_prob + own_part) * scale) as f32;
            written.surrogate[column] = scored.loss;
            written.policy[column] = policy;
            written.kl[column] = kl.value;
            written.log_ratio[column] = log_ratio;
            written.clipped[column] = u8::from(scored.flags.clipped);
        }
        if let Some(shared) = shared
            && !own_gradient
        {
            let by_shared = by_shared * f64::from(shared.slope) * scale;
            for column in (0..self.tokens).filter(counts) {
                let slope = self.log_ratio(first + column).slope;
                written.gradient[column] += (by_shared * f64::from(slope)) as f32;
            }
        }
        Row {
            loss: loss * scale,
            sums,
        }
    }

    /// The log-ratio that the tokens of a sequence share, with its derivative by that of each; nothing if each has its own.
    fn shared_log_ratio(&self, row: usize, length: usize) -> Option<Clamped> {
        let sum = || {
            (row * self.tokens..(row + 1) * self.tokens)
                .filter(|&at| self.mask[at] != 0)
                .map(|at| f64::from(self.log_ratio(at).value))
                .sum::<f64>()
        };
        match self.options.level {
            RatioLevel::Token => None,
            RatioLevel::Sequence | RatioLevel::SequenceToken => Some(Clamped {
                value: (sum() / length as f64) as f32,
                slope: 1.0 / length as f32,
            }),
            RatioLevel::SequenceProduct => {
                Some(Clamped::new(sum() as f32, self.options.log_ratio_clamp))
            }
        }
    }

    /// The log-ratio of the token itself.
    #[inline(always)]
    fn log_ratio(&self, at: usize) -> Clamped {
        let x = self.log_probs[at] - self.old_log_prob(at);
        Clamped::new(x, self.options.log_ratio_clamp)
    }

    #[inline(always)]
    fn old_log_prob(&self, at: usize) -> f32 {
        self.old_log_probs.map_or(self.log_probs[at], |old| old[at])
    }

    #[inline(always)]
    fn of_row_or_token(&self, values: &[f32], row: usize, at: usize) -> f32 {
        // As many as tokens: with one token to a sequence, both are the same.
        if values.len() == self.mask.len() {
            values[at]
        } else {
            values[row]
        }
    }

    fn divisor(&self, row: usize, length: usize) -> f64 {
        match (self.options.row_divisor, self.row_divisors) {
            (RowDivisor::Length, _) => length as f64,
            (RowDivisor::Given(_), Some(divisors)) => f64::from(divisors[row]),
            _ => 1.0,
        }
    }
}
