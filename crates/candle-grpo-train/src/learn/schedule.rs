//! How the learning rate changes over a run.

use anyhow::Result;
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};

/// How the learning rate changes over a run: it rises in a straight line, and may fall in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRateSchedule {
    /// The first steps, this many, lead up to the learning rate of the optimiser.
    pub warmup_steps: usize,
    /// The step after which nothing is left of it; absent: it never falls.
    pub decay_until: Option<usize>,
}

impl LearningRateSchedule {
    /// Errs if the fall would end before the rise.
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

    /// What the learning rate is multiplied by in step `step`, from 1.
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
                // As floats, since the last step may be the last number.
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
    fn up_and_down() {
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
