//! The learning-rate schedule.

use anyhow::Result;
use candle_grpo_core::schedule::Decay;
use candle_grpo_core::validate::{check, unit_interval};
use serde::{Deserialize, Serialize};

/// A linear warm-up, then a constant learning rate or a decay.
///
/// At step s after `w` warm-up steps, with the end `e` and the floor `f`, the factor is
/// `f + (1 - f) * (1 - p)` or `f + (1 - f) * (1 + cos(pi * p)) / 2`, with
/// `p = min(1, (s - w) / (e - w + 1))`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LearningRateSchedule {
    /// Number of steps until the optimizer's learning rate is reached.
    pub warmup_steps: usize,
    /// Last decay step; later steps have the lowest learning rate. Absent: no decay, so the
    /// learning rate is constant after the warm-up.
    pub decay_until: Option<usize>,
    /// Decay curve: `linear` or `cosine`. Without `decay_until`, it must be `linear`.
    pub decay: Decay,
    /// Lowest learning rate in the decay, as a fraction of the optimizer's: from 0 to 1.
    pub min_lr_ratio: f64,
}

impl LearningRateSchedule {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// Fails if the decay ends before the warm-up, the floor is not in [0, 1], or there is a curve
    /// or a floor without a decay.
    pub fn validate(&self) -> Result<()> {
        unit_interval("min_lr_ratio", self.min_lr_ratio)?;
        match self.decay_until {
            Some(end) => check(
                end >= self.warmup_steps && end > 0,
                "decay_until",
                end,
                &format!(
                    "be at least 1 and at least warmup_steps, {}",
                    self.warmup_steps
                ),
            )?,
            None => {
                let linear = self.decay == Decay::Linear;
                check(linear, "decay", "cosine", "be linear without decay_until")?;
                let must = "be 0 without decay_until";
                check(
                    self.min_lr_ratio == 0.,
                    "min_lr_ratio",
                    self.min_lr_ratio,
                    must,
                )?;
            }
        }
        Ok(())
    }

    /// Returns the learning rate factor for step `step`, counted from 1.
    pub fn factor(&self, step: usize) -> f64 {
        if step <= self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let Some(end) = self.decay_until else {
            return 1.;
        };
        let floor = self.min_lr_ratio;
        if step > end {
            return floor;
        }
        // In floats: `end` may be the greatest integer.
        let span = |from: usize| (end - from) as f64 + 1.;
        let left = span(step) / span(self.warmup_steps.min(end));
        floor + (1. - floor) * self.decay.share(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_linearly_and_falls_to_0() {
        let factors = |warmup_steps, decay_until| -> Vec<f64> {
            let schedule = LearningRateSchedule {
                warmup_steps,
                decay_until,
                ..LearningRateSchedule::default()
            };
            (1..=7).map(|step| schedule.factor(step)).collect()
        };
        assert_eq!(factors(0, None), [1.; 7]);
        assert_eq!(factors(2, None), [0.5, 1., 1., 1., 1., 1., 1.]);
        assert_eq!(factors(2, Some(5)), [0.5, 1., 0.75, 0.5, 0.25, 0., 0.]);
        assert_eq!(factors(0, Some(4)), [0.8, 0.6, 0.4, 0.2, 0., 0., 0.]);
    }

    #[test]
    fn the_last_step_may_be_the_last_number() {
        let schedule = LearningRateSchedule {
            warmup_steps: 1,
            decay_until: Some(usize::MAX),
            ..LearningRateSchedule::default()
        };
        assert_eq!(schedule.factor(2), 1.);
        assert!(schedule.factor(usize::MAX) < 1e-18);
    }

    #[test]
    fn a_fall_that_ends_before_the_rise_is_an_error() {
        let schedule = LearningRateSchedule {
            warmup_steps: 5,
            decay_until: Some(4),
            ..LearningRateSchedule::default()
        };
        assert!(
            schedule
                .validate()
                .unwrap_err()
                .to_string()
                .starts_with("decay_until: 4")
        );
    }

    #[test]
    fn a_cosine_falls_to_its_floor() {
        let schedule = LearningRateSchedule {
            warmup_steps: 2,
            decay_until: Some(5),
            decay: Decay::Cosine,
            min_lr_ratio: 0.1,
        };
        schedule.validate().unwrap();
        // p is 1/4, 1/2, 3/4 and 1; cos(pi / 4) is the square root of 1/2.
        let half = 0.5f64.sqrt();
        let expected = [
            0.5,
            1.,
            0.1 + 0.9 * (1. + half) / 2.,
            0.55,
            0.1 + 0.9 * (1. - half) / 2.,
            0.1,
            0.1,
        ];
        for (i, expected) in expected.into_iter().enumerate() {
            let factor = schedule.factor(i + 1);
            assert!((factor - expected).abs() < 1e-15, "{}: {factor}", i + 1);
        }
    }

    #[test]
    fn a_line_falls_to_its_floor() {
        let schedule = LearningRateSchedule {
            decay_until: Some(3),
            min_lr_ratio: 0.2,
            ..LearningRateSchedule::default()
        };
        let factors: Vec<f64> = (1..=5).map(|step| schedule.factor(step)).collect();
        for (factor, expected) in factors.into_iter().zip([0.8, 0.6, 0.4, 0.2, 0.2]) {
            assert!((factor - expected).abs() < 1e-15, "{factor}");
        }
    }

    #[test]
    fn a_curve_or_a_floor_without_an_end_is_an_error() {
        let constant = LearningRateSchedule::default();
        let cosine = LearningRateSchedule {
            decay: Decay::Cosine,
            ..constant
        };
        let floor = LearningRateSchedule {
            min_lr_ratio: 0.5,
            ..constant
        };
        let beyond = LearningRateSchedule {
            decay_until: Some(4),
            min_lr_ratio: 1.5,
            ..constant
        };
        for (schedule, expected) in [
            (cosine, "decay: cosine, must be linear without decay_until"),
            (floor, "min_lr_ratio: 0.5, must be 0 without decay_until"),
            (beyond, "min_lr_ratio: 1.5, must "),
        ] {
            let error = schedule.validate().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
