//! The learning-rate schedule.

use anyhow::Result;
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};

/// A linear warm-up, and optionally a linear decay to 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRateSchedule {
    /// Number of steps until the learning rate of the optimizer is reached.
    pub warmup_steps: usize,
    /// Step after which the learning rate is 0. Absent: no decay.
    pub decay_until: Option<usize>,
}

impl LearningRateSchedule {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// If the decay ends before the warm-up.
    pub fn validate(&self) -> Result<()> {
        if let Some(end) = self.decay_until {
            check(
                end >= self.warmup_steps && end > 0,
                "decay_until",
                end,
                &format!(
                    "be at least 1 and at least warmup_steps, {}",
                    self.warmup_steps
                ),
            )?;
        }
        Ok(())
    }

    /// Returns the factor of the learning rate in step `step`, from 1.
    pub fn factor(&self, step: usize) -> f64 {
        if step <= self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        match self.decay_until {
            None => 1.,
            Some(end) => {
                if step > end {
                    return 0.;
                }
                // In floats: `end` may be the greatest integer.
                let span = |from: usize| (end - from) as f64 + 1.;
                span(step) / span(self.warmup_steps.min(end))
            }
        }
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
        };
        assert_eq!(schedule.factor(2), 1.);
        assert!(schedule.factor(usize::MAX) < 1e-18);
    }

    #[test]
    fn a_fall_that_ends_before_the_rise_is_an_error() {
        let schedule = LearningRateSchedule {
            warmup_steps: 5,
            decay_until: Some(4),
        };
        assert!(
            schedule
                .validate()
                .unwrap_err()
                .to_string()
                .starts_with("decay_until: 4")
        );
    }
}
