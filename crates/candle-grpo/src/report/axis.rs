//! Chart axes.

use super::html::short;

/// An axis with marks at round numbers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) marks: Vec<f64>,
}

impl Axis {
    /// Returns an axis around the finite `values` with about `count` marks; from 0 to 1 without
    /// values.
    pub(super) fn around(values: impl IntoIterator<Item = f64>, count: usize) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.into_iter().filter(|value| value.is_finite()) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (0., 1.);
        }
        if low == high {
            let room = 0.1 * low.abs();
            (low, high) = if low == 0. {
                (0., 1.)
            } else {
                (low - room, high + room)
            };
        }
        let room = 0.04 * (high - low);
        // Values that are not negative and come near 0 have an axis from 0.
        let low = if low >= 0. && low < 0.5 * high {
            0.
        } else {
            low - room
        };
        Self::between(low, high + room, count)
    }

    /// Returns an axis around the finite values in all `series`. Leaves out outliers: the largest
    /// 2% in a series, if they would take more than half of the axis.
    pub(super) fn around_usual(series: impl IntoIterator<Item = Vec<f64>>, count: usize) -> Self {
        let (mut all, mut usual) = (Vec::new(), f64::NEG_INFINITY);
        for mut values in series {
            values.retain(|value| value.is_finite());
            values.sort_by(f64::total_cmp);
            if let Some(last) = values.len().checked_sub(1) {
                usual = usual.max(values[last - values.len() / 50]);
            }
            all.append(&mut values);
        }
        all.sort_by(f64::total_cmp);
        if let (Some(&low), Some(&high)) = (all.first(), all.last())
            && low < usual
            && high - low > 2. * (usual - low)
        {
            all.retain(|&value| value <= usual);
        }
        Self::around(all, count)
    }

    /// Returns an axis with these ends.
    pub(super) fn between(low: f64, high: f64, count: usize) -> Self {
        let step = round_step((high - low) / count.max(1) as f64);
        let mut marks = Vec::new();
        if step > 0. && step.is_finite() {
            let first = (low / step).ceil();
            let mark = |i: usize| (first + i as f64) * step;
            marks = (0..2 * count + 2)
                .map(mark)
                .take_while(|&x| x <= high)
                .collect();
        }
        Self { low, high, marks }
    }

    /// Returns a label for each mark. They differ even if the marks have leading digits in common.
    pub(super) fn labels(&self) -> Vec<String> {
        let labels: Vec<String> = self.marks.iter().map(|&mark| short(mark)).collect();
        if labels.is_sorted_by(|a, b| a != b) {
            return labels;
        }
        let step = self.marks[1] - self.marks[0];
        let decimals = (-step.log10().floor()).clamp(0., 15.) as usize;
        let fixed = self.marks.iter().map(|mark| format!("{mark:.decimals$}"));
        fixed.collect()
    }

    /// Returns the position of `x`: 0 at the low end, 1 at the high end.
    pub(super) fn share(&self, x: f64) -> f64 {
        (x - self.low) / (self.high - self.low)
    }
}

/// Returns the smallest number at least `x` that is 1, 2 or 5 times a power of ten.
fn round_step(x: f64) -> f64 {
    let power = 10f64.powf(x.log10().floor());
    let factor = [1., 2., 5.].into_iter().find(|factor| factor * power >= x);
    factor.unwrap_or(10.) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_at_round_numbers() {
        let axis = Axis::between(0., 1., 5);
        assert_eq!(axis.marks.len(), 6);
        assert!((axis.marks[1] - 0.2).abs() < 1e-12);
        assert_eq!(Axis::between(-3., 42., 5).marks, [0., 10., 20., 30., 40.]);
    }

    #[test]
    fn an_axis_holds_all_finite_values() {
        assert_eq!(Axis::around([], 4).marks, [0., 0.5, 1.]);
        for values in [
            vec![3.],
            vec![0.],
            vec![-1e300, 1e300],
            vec![f64::NAN, 1., f64::INFINITY],
            vec![1e-9, 2e-9],
        ] {
            let axis = Axis::around(values.clone(), 4);
            assert!(
                axis.low < axis.high && axis.marks.len() < 12,
                "{values:?} {axis:?}"
            );
            for value in values.into_iter().filter(|value| value.is_finite()) {
                assert!((0. ..=1.).contains(&axis.share(value)));
            }
        }
        assert_eq!(Axis::around([0.1, 1.], 4).low, 0.);
        assert!(Axis::around([0.9, 1.], 4).low > 0.8);
        assert!(Axis::around([-0.1, 1.], 4).low < -0.1);
    }

    /// A clip fraction of 0 in all steps.
    #[test]
    fn an_axis_of_zeros_starts_at_0() {
        let axis = Axis::around([0., 0.], 4);
        assert_eq!(
            (axis.low, axis.marks.as_slice()),
            (0., [0., 0.5, 1.].as_slice())
        );
    }

    /// Ratios that differ by 1e-4.
    #[test]
    fn labels_differ() {
        let axis = Axis::between(0.99992, 1.00008, 4);
        assert_eq!(axis.labels(), ["0.99995", "1.00000", "1.00005"]);
        let axis = Axis::between(1_000_000., 1_000_002., 2);
        assert_eq!(axis.labels(), ["1000000", "1000001", "1000002"]);
        assert_eq!(Axis::between(0., 1., 2).labels(), ["0", "0.5", "1"]);
    }

    #[test]
    fn one_wild_value_does_not_flatten_the_others() {
        let flat: Vec<f64> = (0..100).map(|i| f64::from(i % 10)).collect();
        let mut wild = flat.clone();
        wild[50] = 1000.;
        let axis = Axis::around_usual([flat.clone()], 4);
        assert_eq!(Axis::around_usual([wild.clone()], 4), axis);
        // Few values, and values that are not far above the others, are no outliers.
        assert!(Axis::around_usual([wild[45..55].to_vec()], 4).high > 1000.);
        wild[50] = 12.;
        assert!(Axis::around_usual([wild.clone()], 4).high > 12.);
        // Each series counts for itself.
        assert!(Axis::around_usual([flat, vec![1000.; 2]], 4).high > 1000.);
        let mut spike = vec![0.; 100];
        spike[7] = 5.;
        assert!(Axis::around_usual([spike], 4).high > 5.);
        assert_eq!(Axis::around_usual([], 4), Axis::around([], 4));
    }
}
