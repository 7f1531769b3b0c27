//! Arithmetic on SIMD vectors with any width.

use pulp::Simd;

use super::element::Element;

/// Elements per row block, which fits in the L1 cache. A multiple of every vector width.
pub(crate) const BLOCK: usize = 1024;

/// Lanes in the widest vector. Padded blocks have a multiple of this length.
pub(crate) const MAX_LANES: usize = 16;

/// Returns `row` in f32, padded with zeros to a multiple of every vector width.
pub(crate) fn padded<T: Element>(row: &[T]) -> Vec<f32> {
    let mut padded = vec![0.0; row.len().next_multiple_of(MAX_LANES)];
    T::widen(row, &mut padded[..row.len()]);
    padded
}

/// Sums in [`MAX_LANES`] lanes, for any vector width. Entry i in a row is added to lane
/// `i % MAX_LANES`, and lanes are added in a fixed order, so the bits of the total do not depend on
/// the vector width.
#[derive(Clone, Copy)]
pub(crate) struct LaneSums<S: Simd> {
    /// The first [`PARTS`](Self::PARTS) are in use.
    pub(crate) parts: [S::f32s; MAX_LANES],
}

impl<S: Simd> LaneSums<S> {
    /// Vectors that hold all lanes. Rows are visited in chunks of that many vectors.
    pub(crate) const PARTS: usize = MAX_LANES / S::F32_LANES;

    #[inline(always)]
    pub(crate) fn zeros(simd: S) -> Self {
        Self {
            parts: [simd.splat_f32s(0.0); MAX_LANES],
        }
    }

    /// Returns the sum over all lanes: repeatedly adds the second half to the first.
    #[inline(always)]
    pub(crate) fn total(mut self, simd: S) -> f32 {
        let mut len = Self::PARTS;
        while len > 1 {
            len /= 2;
            for part in 0..len {
                self.parts[part] = simd.add_f32s(self.parts[part], self.parts[part + len]);
            }
        }
        simd.reduce_sum_f32s(self.parts[0])
    }
}

/// Splits a slice at its last multiple of [`MAX_LANES`].
#[inline(always)]
fn whole_lanes(x: &[f32]) -> (&[f32], &[f32]) {
    x.split_at(x.len() / MAX_LANES * MAX_LANES)
}

/// Returns vector `part` in a remainder with fewer than [`MAX_LANES`] entries, padded with zeros.
#[inline(always)]
fn part_of_rest<S: Simd>(simd: S, rest: &[f32], part: usize) -> S::f32s {
    let first = rest.len().min(part * S::F32_LANES);
    let last = rest.len().min((part + 1) * S::F32_LANES);
    simd.partial_load_f32s(&rest[first..last])
}

/// Hints for [`prefetch`]: the cache to load into.
pub(crate) const L1: i32 = 3;
pub(crate) const L2: i32 = 2;

/// Starts to load `len` elements into the cache `HINT`, if the processor has such an instruction.
/// The address may be invalid.
#[inline(always)]
pub(crate) fn prefetch<const HINT: i32, T>(first: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..len).step_by(64 / size_of::<T>()) {
        // SAFETY: a prefetch does not access memory, so any address is valid.
        #[allow(unsafe_code)]
        unsafe {
            std::arch::x86_64::_mm_prefetch::<HINT>(first.wrapping_add(line).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, len);
}

/// Below this, `exp` in f32 is subnormal, and 0 here.
pub(crate) const EXP_UNDERFLOW: f32 = -87.336;

/// Returns `exp(x)` for x up to 88, with a relative error around 1e-7; 0 below [`EXP_UNDERFLOW`],
/// NaN for NaN.
///
/// `exp(x) = 2^n exp(r)`, where n is the integer nearest to x / ln 2, and |r| is at most ln 2 / 2.
/// `exp(r)` is a degree 6 polynomial, interpolated at Chebyshev nodes (relative error 2.4e-8).
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5 * 2^23 leaves the rounded integer in the significand's lower bits.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 in two parts. n times the first part is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 5] = [
        1.484_662_9e-3,
        8.363_203e-3,
        4.165_272e-2,
        0.166_665_77,
        0.500_000_4,
    ];
    let constant = |value| simd.splat_f32s(value);

    let shifted = simd.mul_add_e_f32s(x, constant(std::f32::consts::LOG2_E), constant(SHIFT));
    let n = simd.sub_f32s(shifted, constant(SHIFT));
    let r = simd.mul_add_e_f32s(n, constant(-LN_2_HIGH), x);
    let r = simd.mul_add_e_f32s(n, constant(-LN_2_LOW), r);
    let mut polynomial = constant(COEFFICIENTS[0]);
    for &coefficient in &COEFFICIENTS[1..] {
        polynomial = simd.mul_add_e_f32s(polynomial, r, constant(coefficient));
    }
    let polynomial = simd.mul_add_e_f32s(polynomial, simd.mul_f32s(r, r), r);
    let polynomial = simd.add_f32s(polynomial, constant(1.0));
    // 2^n: shifts the integer into the exponent, whose bias is 127.
    let exponent =
        simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let power = simd.transmute_f32s_u32s(simd.add_u32s(exponent, simd.splat_u32s(127 << 23)));
    let underflow = simd.less_than_f32s(x, constant(EXP_UNDERFLOW));
    simd.select_f32s(underflow, constant(0.0), simd.mul_f32s(polynomial, power))
}

/// Returns the larger of `x` and `bound`; NaN for NaN.
#[inline(always)]
pub(crate) fn at_least<S: Simd>(simd: S, x: S::f32s, bound: f32) -> S::f32s {
    let bound = simd.splat_f32s(bound);
    simd.select_f32s(simd.less_than_f32s(x, bound), bound, x)
}

/// Returns `1 / (1 + exp(-x))`; NaN for NaN.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Below -88 the exact value is subnormal, and exp would overflow.
    let e = exp(simd, simd.neg_f32s(at_least(simd, x, -88.0)));
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, e))
}

/// Returns `x sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    simd.mul_f32s(x, sigmoid(simd, x))
}

/// Returns [`silu`] and its derivative.
#[inline(always)]
pub(crate) fn silu_and_slope<S: Simd>(simd: S, x: S::f32s) -> [S::f32s; 2] {
    let sigmoid = sigmoid(simd, x);
    let silu = simd.mul_f32s(x, sigmoid);
    // The derivative is s + x s (1 - s).
    let rest = simd.sub_f32s(simd.splat_f32s(1.0), sigmoid);
    [silu, simd.mul_add_e_f32s(silu, rest, sigmoid)]
}

/// Replaces each x by `f(x, y)`. The slices must have equal lengths. `f` is also called with zeros,
/// and those results are dropped. It must be a few instructions, because the compiler does not
/// inline larger closures and then calls a function for each instruction.
#[inline(always)]
pub(crate) fn map_pairs<S: Simd>(
    simd: S,
    x: &mut [f32],
    y: &[f32],
    f: impl Fn(S::f32s, S::f32s) -> S::f32s,
) {
    let (xs, x_rest) = S::as_mut_simd_f32s(x);
    let (ys, y_rest) = S::as_simd_f32s(y);
    for (x, &y) in xs.iter_mut().zip(ys) {
        *x = f(*x, y);
    }
    if !x_rest.is_empty() {
        let rest = f(
            simd.partial_load_f32s(x_rest),
            simd.partial_load_f32s(y_rest),
        );
        simd.partial_store_f32s(x_rest, rest);
    }
}

/// Replaces each x by `f(x)`, like [`map_pairs`].
#[inline(always)]
pub(crate) fn map<S: Simd>(simd: S, x: &mut [f32], f: impl Fn(S::f32s) -> S::f32s) {
    let (vectors, rest) = S::as_mut_simd_f32s(x);
    for x in vectors {
        *x = f(*x);
    }
    if !rest.is_empty() {
        let mapped = f(simd.partial_load_f32s(rest));
        simd.partial_store_f32s(rest, mapped);
    }
}

/// Applies [`silu`] to each x.
#[inline(always)]
pub(crate) fn silu_in_place<S: Simd>(simd: S, x: &mut [f32]) {
    let (vectors, rest) = S::as_mut_simd_f32s(x);
    for x in vectors {
        *x = silu(simd, *x);
    }
    if !rest.is_empty() {
        let x = simd.partial_load_f32s(rest);
        simd.partial_store_f32s(rest, silu(simd, x));
    }
}

/// Multiplies each gradient by the [`silu`] derivative at x.
#[inline(always)]
pub(crate) fn multiply_by_silu_slope<S: Simd>(simd: S, gradient: &mut [f32], x: &[f32]) {
    let (gradients, gradient_rest) = S::as_mut_simd_f32s(gradient);
    let (xs, x_rest) = S::as_simd_f32s(x);
    for (gradient, &x) in gradients.iter_mut().zip(xs) {
        *gradient = simd.mul_f32s(*gradient, silu_and_slope(simd, x)[1]);
    }
    if !gradient_rest.is_empty() {
        let [gradient, x] = [&*gradient_rest, x_rest].map(|rest| simd.partial_load_f32s(rest));
        let gradient = simd.mul_f32s(gradient, silu_and_slope(simd, x)[1]);
        simd.partial_store_f32s(gradient_rest, gradient);
    }
}

/// Sets each x to `exp(minuend - y)`.
#[inline(always)]
pub(crate) fn exp_differences<S: Simd>(simd: S, x: &mut [f32], minuend: f32, y: &[f32]) {
    let minuend = simd.splat_f32s(minuend);
    let (xs, x_rest) = S::as_mut_simd_f32s(x);
    let (ys, y_rest) = S::as_simd_f32s(y);
    for (x, &y) in xs.iter_mut().zip(ys) {
        *x = exp(simd, simd.sub_f32s(minuend, y));
    }
    if !x_rest.is_empty() {
        let difference = simd.sub_f32s(minuend, simd.partial_load_f32s(y_rest));
        simd.partial_store_f32s(x_rest, exp(simd, difference));
    }
}

/// Computes `sum += x * y` element by element, for slices with equal lengths.
#[inline(always)]
pub(crate) fn add_products<S: Simd>(simd: S, sum: &mut [f32], x: &[f32], y: &[f32]) {
    let (sums, sum_rest) = S::as_mut_simd_f32s(sum);
    let (xs, x_rest) = S::as_simd_f32s(x);
    let (ys, y_rest) = S::as_simd_f32s(y);
    for ((sum, &x), &y) in sums.iter_mut().zip(xs).zip(ys) {
        *sum = simd.mul_add_e_f32s(x, y, *sum);
    }
    if !sum_rest.is_empty() {
        let (x, y) = (
            simd.partial_load_f32s(x_rest),
            simd.partial_load_f32s(y_rest),
        );
        let total = simd.mul_add_e_f32s(x, y, simd.partial_load_f32s(sum_rest));
        simd.partial_store_f32s(sum_rest, total);
    }
}

/// Computes `x += factor * y`, for slices with equal lengths.
#[inline(always)]
pub(crate) fn add_scaled<S: Simd>(simd: S, x: &mut [f32], factor: f32, y: &[f32]) {
    let factor = simd.splat_f32s(factor);
    map_pairs(simd, x, y, |x, y| simd.mul_add_e_f32s(factor, y, x));
}

/// Multiplies `x` by `factor`.
#[inline(always)]
pub(crate) fn scale<S: Simd>(simd: S, factor: f32, x: &mut [f32]) {
    let factor = simd.splat_f32s(factor);
    map(simd, x, |x| simd.mul_f32s(x, factor));
}

/// Returns the dot product of two slices with equal lengths.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let ((x, x_rest), (y, y_rest)) = (whole_lanes(x), whole_lanes(y));
    let ((xs, _), (ys, _)) = (S::as_simd_f32s(x), S::as_simd_f32s(y));
    let mut sums = LaneSums::<S>::zeros(simd);
    for part in 0..LaneSums::<S>::PARTS {
        let [x, y] = [x_rest, y_rest].map(|rest| part_of_rest(simd, rest, part));
        sums.parts[part] = simd.mul_f32s(x, y);
    }
    let chunks = |vectors| <[S::f32s]>::chunks_exact(vectors, LaneSums::<S>::PARTS);
    for (xs, ys) in chunks(xs).zip(chunks(ys)) {
        for part in 0..LaneSums::<S>::PARTS {
            sums.parts[part] = simd.mul_add_e_f32s(xs[part], ys[part], sums.parts[part]);
        }
    }
    sums.total(simd)
}

/// Returns the sum of `x`.
#[inline(always)]
pub(crate) fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let (x, rest) = whole_lanes(x);
    let mut sums = LaneSums::<S>::zeros(simd);
    for part in 0..LaneSums::<S>::PARTS {
        sums.parts[part] = part_of_rest(simd, rest, part);
    }
    for xs in S::as_simd_f32s(x).0.chunks_exact(LaneSums::<S>::PARTS) {
        for part in 0..LaneSums::<S>::PARTS {
            sums.parts[part] = simd.add_f32s(sums.parts[part], xs[part]);
        }
    }
    sums.total(simd)
}

/// Returns `tanh(x)`, with a relative error around 1e-7; NaN for NaN.
///
/// Near 0 it is an odd degree 11 polynomial, interpolated at Chebyshev nodes (relative error
/// 1.7e-8). Elsewhere it is `1 - 2 / (exp(2 |x|) + 1)` with the sign of x.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const NEAR: f32 = 0.625;
    // From here on, the result rounds to 1.
    const FAR: f32 = 10.0;
    const COEFFICIENTS: [f32; 5] = [
        -6.096_714e-3,
        2.099_718e-2,
        -5.385_091e-2,
        0.133_327_7,
        -0.333_333_28,
    ];
    let constant = |value| simd.splat_f32s(value);

    let square = simd.mul_f32s(x, x);
    let mut polynomial = constant(COEFFICIENTS[0]);
    for &coefficient in &COEFFICIENTS[1..] {
        polynomial = simd.mul_add_e_f32s(polynomial, square, constant(coefficient));
    }
    let near = simd.mul_add_e_f32s(simd.mul_f32s(x, square), polynomial, x);

    let magnitude = simd.abs_f32s(x);
    let is_far = simd.less_than_f32s(constant(FAR), magnitude);
    let bounded = simd.select_f32s(is_far, constant(FAR), magnitude);
    let e = exp(simd, simd.add_f32s(bounded, bounded));
    let rest = simd.div_f32s(constant(2.0), simd.add_f32s(e, constant(1.0)));
    let positive = simd.sub_f32s(constant(1.0), rest);
    let is_negative = simd.less_than_f32s(x, constant(0.0));
    let elsewhere = simd.select_f32s(is_negative, simd.neg_f32s(positive), positive);
    let is_near = simd.less_than_f32s(magnitude, constant(NEAR));
    simd.select_f32s(is_near, near, elsewhere)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    use super::super::instructions::vectors;

    struct Tanh<'a>(&'a mut [f32]);

    impl WithSimd for Tanh<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (vectors, _) = S::as_mut_simd_f32s(self.0);
            for x in vectors {
                *x = tanh(simd, *x);
            }
        }
    }

    #[test]
    fn tanh_is_that_of_f64() {
        let x: Vec<f32> = (-6000..6000).map(|i| i as f32 * 2e-3).collect();
        let special = [
            0.0,
            -0.0,
            1e-30,
            f32::INFINITY,
            f32::NEG_INFINITY,
            88.0,
            -1e9,
            0.625,
        ];
        let x: Vec<f32> = x.into_iter().chain(special.repeat(2)).collect();
        let mut y = x.clone();
        vectors().dispatch(Tanh(&mut y));
        for (x, y) in x.iter().zip(y) {
            let expected = f64::from(*x).tanh();
            let distance = (f64::from(y) - expected).abs();
            assert!(distance <= 2e-7 * expected.abs(), "tanh({x}): {y}");
        }
        let mut nan = [f32::NAN; MAX_LANES];
        vectors().dispatch(Tanh(&mut nan));
        assert!(nan.iter().all(|x| x.is_nan()));
    }
}
