//! Row soft caps on the CPU, for other operators' paths.

use pulp::{Simd, WithSimd};

use crate::cpu::simd::tanh;

/// Replaces each score x by `cap tanh(x / cap)`. The row consists of whole vectors.
pub(crate) struct CapRow<'a> {
    pub(crate) scores: &'a mut [f32],
    pub(crate) cap: f32,
}

impl WithSimd for CapRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (cap, inverse) = (simd.splat_f32s(self.cap), simd.splat_f32s(1.0 / self.cap));
        let (scores, _) = S::as_mut_simd_f32s(self.scores);
        for x in scores {
            *x = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(*x, inverse)));
        }
    }
}

/// Replaces the gradient with respect to capped scores by the one before [`CapRow`]. The row
/// consists of whole vectors.
pub(crate) struct CapBackwardRow<'a> {
    pub(crate) capped: &'a [f32],
    pub(crate) scores_gradient: &'a mut [f32],
    pub(crate) cap: f32,
}

impl WithSimd for CapBackwardRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (one, inverse) = (simd.splat_f32s(1.0), simd.splat_f32s(1.0 / self.cap));
        let (capped, _) = S::as_simd_f32s(self.capped);
        let (gradients, _) = S::as_mut_simd_f32s(self.scores_gradient);
        for (&capped, gradient) in capped.iter().zip(gradients) {
            let tanh = simd.mul_f32s(capped, inverse);
            let slope = simd.sub_f32s(one, simd.mul_f32s(tanh, tanh));
            *gradient = simd.mul_f32s(*gradient, slope);
        }
    }
}
