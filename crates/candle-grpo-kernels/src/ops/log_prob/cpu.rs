//! The CPU path of [`log_prob`](crate::log_prob).

use std::mem::MaybeUninit;

use candle_core::Result;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{Backward, Rows};
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::output;
use crate::cpu::simd::{BLOCK, EXP_UNDERFLOW, LaneSums, MAX_LANES, at_least, exp};
use crate::cpu::slice;

/// Maps logits `[N, V]` to log-probs, entropy and log-sum-exp, `[3, N]`.
pub(crate) fn forward<T: Element>(logits: &[T], vocab: usize, rows: &Rows) -> Result<Vec<f32>> {
    let inverse_temperature = rows.inverse_temperature;
    let results: Vec<[f32; 3]> = rows.read(|targets, kept| {
        let row = |(row, logits): (usize, &[T])| {
            if !kept(row) {
                return [0.0; 3];
            }
            let sums = vectors().dispatch(ForwardRow {
                logits,
                inverse_temperature,
                sums: Sums::default(),
            });
            sums.finish(logits[targets[row] as usize].to_f64(), inverse_temperature)
        };
        logits
            .par_chunks_exact(vocab)
            .enumerate()
            .map(row)
            .collect()
    })?;
    Ok((0..3)
        .flat_map(|part| results.iter().map(move |result| result[part]))
        .collect())
}

/// Maps logits `[N, V]` to their gradient.
pub(crate) fn backward<T: Element>(logits: &[T], vocab: usize, pass: &Backward) -> Result<Vec<T>> {
    pass.read(|coefficients| {
        let fill = |gradient: &mut [MaybeUninit<T>]| {
            logits
                .par_chunks_exact(vocab)
                .zip(gradient.par_chunks_exact_mut(vocab))
                .enumerate()
                .for_each(|(row, (logits, gradient))| match coefficients(row) {
                    Some(coefficients) => {
                        vectors().dispatch(BackwardRow {
                            logits,
                            gradient,
                            coefficients,
                        });
                    }
                    None => gradient.fill(MaybeUninit::new(T::nearest(0.0))),
                });
        };
        // SAFETY: the rows cover the gradient, and each row is written completely, at once or block
        // by block.
        #[allow(unsafe_code)]
        unsafe {
            output::filled(logits.len(), fill)
        }
    })
}

/// Replaces logits `[N, V]` by their gradient.
pub(crate) fn backward_in_place<T: Element>(
    logits: &mut [T],
    vocab: usize,
    pass: &Backward,
) -> Result<()> {
    pass.read(|coefficients| {
        logits.par_chunks_exact_mut(vocab).enumerate().for_each(
            |(row, logits)| match coefficients(row) {
                Some(coefficients) => {
                    vectors().dispatch(BackwardRowInPlace {
                        logits,
                        coefficients,
                    });
                }
                None => logits.fill(T::nearest(0.0)),
            },
        );
    })
}

impl Rows {
    /// Calls `read` with the targets and a function that returns whether a row is unmasked.
    pub(crate) fn read<R>(
        &self,
        read: impl FnOnce(&[u32], &(dyn Fn(usize) -> bool + Sync)) -> R,
    ) -> Result<R> {
        slice::read::<u32, _>(&self.targets, |targets| match &self.mask {
            None => Ok(read(targets, &|_| true)),
            Some(mask) => {
                slice::read::<u8, _>(mask, |mask| Ok(read(targets, &|row| mask[row] != 0)))
            }
        })
    }
}

impl Backward<'_> {
    /// Calls `read` with a function that returns a row's coefficients, or `None` for a masked row.
    pub(crate) fn read<R>(
        &self,
        read: impl FnOnce(&(dyn Fn(usize) -> Option<Coefficients> + Sync)) -> R,
    ) -> Result<R> {
        slice::read::<f32, _>(&self.packed, |packed| {
            slice::read::<f32, _>(&self.gradient, |gradient| {
                self.rows.read(|targets, kept| {
                    let n = targets.len();
                    read(&|row| {
                        kept(row).then(|| {
                            Coefficients::new(
                                self.rows.inverse_temperature,
                                targets[row] as usize,
                                [packed[n + row], packed[2 * n + row]],
                                [gradient[row], gradient[n + row], gradient[2 * n + row]],
                            )
                        })
                    })
                })
            })
        })
    }
}

/// Sums over a row, relative to its largest logit, with `d = (x - largest) / temperature`.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    largest: f32,
    /// Sum over exp(d).
    exp: f64,
    /// Sum over d exp(d).
    weighted: f64,
}

impl Default for Sums {
    /// The sums for an empty row.
    fn default() -> Self {
        Self {
            largest: f32::NEG_INFINITY,
            exp: 0.0,
            weighted: 0.0,
        }
    }
}

impl Sums {
    /// Returns the log-prob of the target, whose logit is `target`, the entropy and the
    /// log-sum-exp.
    pub(crate) fn finish(&self, target: f64, inverse_temperature: f32) -> [f32; 3] {
        let inverse_temperature = f64::from(inverse_temperature);
        let largest = f64::from(self.largest);
        let log_sum = self.exp.ln();
        [
            ((target - largest) * inverse_temperature - log_sum) as f32,
            (log_sum - self.weighted / self.exp) as f32,
            (largest * inverse_temperature + log_sum) as f32,
        ]
    }
}

/// Adds `logits` to the sums for their row.
pub(crate) struct ForwardRow<'a, T> {
    pub(crate) logits: &'a [T],
    pub(crate) inverse_temperature: f32,
    pub(crate) sums: Sums,
}

impl<T: Element> WithSimd for ForwardRow<'_, T> {
    type Output = Sums;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Sums {
        let mut sums = self.sums;
        let mut buffer = [f32::NEG_INFINITY; BLOCK];
        for block in self.logits.chunks(BLOCK) {
            let padded = block.len().next_multiple_of(MAX_LANES);
            let block = if padded == block.len() {
                T::widened(block, &mut buffer[..padded])
            } else {
                T::widen(block, &mut buffer[..block.len()]);
                buffer[block.len()..padded].fill(f32::NEG_INFINITY);
                &buffer[..padded]
            };
            self.add(simd, block, &mut sums);
        }
        sums
    }
}

impl<T> ForwardRow<'_, T> {
    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, block: &[f32], sums: &mut Sums) {
        let (vectors, _) = S::as_simd_f32s(block);
        let mut largest = simd.splat_f32s(f32::NEG_INFINITY);
        for &x in vectors {
            largest = simd.max_f32s(largest, x);
        }
        let largest = simd.reduce_max_f32s(largest);
        if largest > sums.largest {
            // Rescales the sums from the old largest logit to the new one.
            if sums.exp > 0.0 {
                let shift = (f64::from(sums.largest) - f64::from(largest))
                    * f64::from(self.inverse_temperature);
                let factor = shift.exp();
                sums.weighted = factor * (sums.weighted + shift * sums.exp);
                sums.exp *= factor;
            }
            sums.largest = largest;
        }
        if sums.largest == f32::NEG_INFINITY && !block.iter().any(|x| x.is_nan()) {
            return;
        }
        let largest = simd.splat_f32s(sums.largest);
        let scale = simd.splat_f32s(self.inverse_temperature);
        let (mut exps, mut weighted) = (LaneSums::<S>::zeros(simd), LaneSums::<S>::zeros(simd));
        for x in vectors.chunks_exact(LaneSums::<S>::PARTS) {
            for part in 0..LaneSums::<S>::PARTS {
                let d = simd.mul_f32s(simd.sub_f32s(x[part], largest), scale);
                // Minus infinity would give NaN in d exp(d).
                let d = at_least(simd, d, EXP_UNDERFLOW - 1.0);
                let e = exp(simd, d);
                exps.parts[part] = simd.add_f32s(exps.parts[part], e);
                weighted.parts[part] = simd.mul_add_e_f32s(e, d, weighted.parts[part]);
            }
        }
        sums.exp += f64::from(exps.total(simd));
        sums.weighted += f64::from(weighted.total(simd));
    }
}

/// Coefficients for a logit's gradient: `p (constant + slope d)` with
/// `d = log p = x / temperature - lse` for logit x, plus `at_target` at the target.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients {
    inverse_temperature: f32,
    log_sum_exp: f32,
    constant: f32,
    slope: f32,
    target: usize,
    at_target: f32,
}

impl Coefficients {
    fn new(
        inverse_temperature: f32,
        target: usize,
        [entropy, log_sum_exp]: [f32; 2],
        [log_prob_gradient, entropy_gradient, log_sum_exp_gradient]: [f32; 3],
    ) -> Self {
        // Derivatives with respect to z = x / temperature: 1[target] - p for the log-prob, p for
        // the log-sum-exp, and -p (log p + entropy) for the entropy.
        Self {
            inverse_temperature,
            log_sum_exp,
            constant: inverse_temperature
                * (log_sum_exp_gradient - log_prob_gradient - entropy_gradient * entropy),
            slope: -inverse_temperature * entropy_gradient,
            target,
            at_target: inverse_temperature * log_prob_gradient,
        }
    }

    /// Replaces the logits in `block` by their gradient. The block is padded and starts at column
    /// `start`.
    #[inline(always)]
    pub(crate) fn apply<S: Simd>(&self, simd: S, block: &mut [f32], start: usize) {
        let scale = simd.splat_f32s(self.inverse_temperature);
        let shift = simd.splat_f32s(-self.log_sum_exp);
        let constant = simd.splat_f32s(self.constant);
        let slope = simd.splat_f32s(self.slope);
        let (vectors, _) = S::as_mut_simd_f32s(block);
        for x in vectors {
            let d = at_least(
                simd,
                simd.mul_add_e_f32s(*x, scale, shift),
                EXP_UNDERFLOW - 1.0,
            );
            *x = simd.mul_f32s(exp(simd, d), simd.mul_add_e_f32s(d, slope, constant));
        }
        if let Some(x) = self
            .target
            .checked_sub(start)
            .and_then(|at| block.get_mut(at))
        {
            *x += self.at_target;
        }
    }
}

struct BackwardRow<'a, T> {
    logits: &'a [T],
    gradient: &'a mut [MaybeUninit<T>],
    coefficients: Coefficients,
}

impl<T: Element> WithSimd for BackwardRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut buffer = [0.0; BLOCK];
        let blocks = self
            .logits
            .chunks(BLOCK)
            .zip(self.gradient.chunks_mut(BLOCK));
        for (index, (logits, gradient)) in blocks.enumerate() {
            let (len, padded) = (logits.len(), logits.len().next_multiple_of(MAX_LANES));
            T::widen(logits, &mut buffer[..len]);
            self.coefficients
                .apply(simd, &mut buffer[..padded], index * BLOCK);
            T::write(&buffer[..len], gradient);
        }
    }
}

struct BackwardRowInPlace<'a, T> {
    logits: &'a mut [T],
    coefficients: Coefficients,
}

impl<T: Element> WithSimd for BackwardRowInPlace<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut buffer = [0.0; BLOCK];
        for (index, logits) in self.logits.chunks_mut(BLOCK).enumerate() {
            let (len, padded) = (logits.len(), logits.len().next_multiple_of(MAX_LANES));
            T::widen(logits, &mut buffer[..len]);
            self.coefficients
                .apply(simd, &mut buffer[..padded], index * BLOCK);
            for (logit, &gradient) in logits.iter_mut().zip(&buffer[..len]) {
                *logit = T::nearest(gradient);
            }
        }
    }
}
