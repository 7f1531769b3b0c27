//! Signs that a run is in trouble.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, check, unit_interval};
use serde::{Deserialize, Serialize};

use crate::StepMetrics;

/// Sets when a run warns that something is wrong. `None` turns an alarm off.
///
/// The run prints each alarm once when it begins. Every step with the alarm has it in
/// [`StepMetrics::alarms`].
///
/// ```
/// use candle_grpo_train::StepMetrics;
/// use candle_grpo_train::run::AlarmConfig;
///
/// let alarms = AlarmConfig { constant_rewards: Some(2), ..AlarmConfig::default() };
/// let step = |step| StepMetrics { step, constant_groups: 1., ..StepMetrics::default() };
/// assert!(alarms.check(&[], &step(1)).is_empty());
/// assert_eq!(alarms.check(&[step(1)], &step(2)), [("constant_rewards".to_owned(), 2.)].into());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AlarmConfig {
    /// A step takes more than this many times the median of the 20 steps before it, and a minute
    /// longer. The run prints it while the step still runs.
    pub slow_step: Option<f64>,
    /// In this many steps in a row, each group has equal rewards or none, so that the rewards
    /// teach nothing.
    pub constant_rewards: Option<usize>,
    /// `repetition` of a step is above this share: completions repeat themselves.
    pub repetition: Option<f64>,
    /// `rollout_kl_k3` in the last 5 steps (median) is above this many times that in the run's
    /// first 10 steps, and above 0.001: engine and policy drift apart. Only with a rollout
    /// correction.
    pub rollout_kl: Option<f64>,
}

impl Default for AlarmConfig {
    fn default() -> Self {
        Self {
            slow_step: Some(5.),
            constant_rewards: Some(10),
            repetition: Some(0.5),
            rollout_kl: Some(5.),
        }
    }
}

/// Steps that set the usual duration, at most.
const USUAL_STEPS: usize = 20;
/// Steps without which there is no usual duration. The first steps of a process may be slow.
const FEWEST_STEPS: usize = 5;
/// Time by which a slow step exceeds the median at least. Short steps vary by any factor.
const SLOWER_BY: Duration = Duration::from_secs(60);
/// Steps that set the first divergence between engine and policy, and those that set the last.
const KL_STEPS: (usize, usize) = (10, 5);
/// The divergence below which a growth has no meaning, in nats.
const SMALL_KL: f64 = 1e-3;

impl AlarmConfig {
    /// Checks the values.
    ///
    /// # Errors
    ///
    /// Fails if one is invalid; the error names it.
    pub fn validate(&self) -> Result<()> {
        for (name, factor) in [
            ("slow_step", self.slow_step),
            ("rollout_kl", self.rollout_kl),
        ] {
            let factor = factor.unwrap_or(1.);
            let valid = factor.is_finite() && factor >= 1.;
            check(valid, name, factor, "be finite and at least 1, or null")?;
        }
        unit_interval("repetition", self.repetition.unwrap_or(1.))?;
        Ok(at_least_one(
            "constant_rewards",
            self.constant_rewards.unwrap_or(1),
        )?)
    }

    /// Returns the alarms of `step` by name, each with what it measured: times the usual duration,
    /// number of steps, share, and times the first divergence. `before` has the steps before it, in
    /// order.
    pub fn check(&self, before: &[StepMetrics], step: &StepMetrics) -> BTreeMap<String, f64> {
        let found = [
            ("slow_step", self.slow_step(before, step)),
            ("constant_rewards", self.constant_rewards(before, step)),
            ("repetition", self.repetition(step)),
            ("rollout_kl", self.rollout_kl(before, step)),
        ];
        let found = found
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        found.collect()
    }

    /// Returns a warning for each alarm of `step` that the step before did not have.
    pub fn warnings(&self, before: &[StepMetrics], step: &StepMetrics) -> Vec<String> {
        let rang = |name: &str| {
            before
                .last()
                .is_some_and(|last| last.alarms.contains_key(name))
        };
        let alarms = step.alarms.iter().filter(|(name, _)| !rang(name));
        let warning = |(name, &value): (&String, &f64)| {
            let text = match name.as_str() {
                "slow_step" => return None, // Printed while it ran.
                "constant_rewards" if step.reward_std == 0. => format!(
                    "all rewards have been {} for {value} steps: no completion is better than another. Check the reward with `grpo sample`, or choose easier prompts",
                    step.reward_mean
                ),
                "constant_rewards" => format!(
                    "the rewards in each group have been equal for {value} steps, so the policy learns nothing from them. Raise num_generations or the temperature, or choose other prompts"
                ),
                "repetition" => format!(
                    "{:.0}% of the text repeats: the policy may be collapsing. Look at rollouts.jsonl; lower the learning rate, or add a KL term",
                    100. * value
                ),
                _ => format!(
                    "rollout_kl_k3 is {value:.1} times what it was in the first steps: the engine's log-probs drift from the policy's. Check that the engine receives the weights, and lower rollout.max_staleness"
                ),
            };
            Some(format!("step {}: {text} (alarms.{name})", step.step))
        };
        alarms.filter_map(warning).collect()
    }

    /// Calls `work`. If it takes longer than a step after `before` should, calls `warn` once with a
    /// warning meanwhile.
    pub fn watch<R>(
        &self,
        before: &[StepMetrics],
        warn: impl FnOnce(String) + Send,
        work: impl FnOnce() -> R,
    ) -> R {
        match self.slow_limit(before) {
            Some((limit, usual)) => {
                let step = before.last().map_or(1, |last| last.step + 1);
                let text = move || {
                    format!(
                        "step {step} has taken {:.0} s so far, and a step usually takes {usual:.1} s (alarms.slow_step)",
                        limit.as_secs_f64()
                    )
                };
                late(limit, move || warn(text()), work)
            }
            None => work(),
        }
    }

    /// The duration that is too long for a step after `before`, and the usual one in seconds.
    fn slow_limit(&self, before: &[StepMetrics]) -> Option<(Duration, f64)> {
        let factor = self.slow_step?;
        let last = &before[before.len().saturating_sub(USUAL_STEPS)..];
        if last.len() < FEWEST_STEPS {
            return None;
        }
        let usual = median(last.iter().map(|step| step.seconds.total()))?;
        let limit = (usual * factor).max(usual + SLOWER_BY.as_secs_f64());
        Some((Duration::try_from_secs_f64(limit).ok()?, usual))
    }

    fn slow_step(&self, before: &[StepMetrics], step: &StepMetrics) -> Option<f64> {
        let (limit, usual) = self.slow_limit(before)?;
        let seconds = step.seconds.total();
        (seconds > limit.as_secs_f64()).then(|| seconds / usual)
    }

    fn constant_rewards(&self, before: &[StepMetrics], step: &StepMetrics) -> Option<f64> {
        let steps = [step].into_iter().chain(before.iter().rev());
        let constant = steps.take_while(|step| step.constant_groups >= 1.).count();
        (constant >= self.constant_rewards?).then_some(constant as f64)
    }

    fn repetition(&self, step: &StepMetrics) -> Option<f64> {
        (step.repetition > self.repetition?).then_some(step.repetition)
    }

    fn rollout_kl(&self, before: &[StepMetrics], step: &StepMetrics) -> Option<f64> {
        let factor = self.rollout_kl?;
        let steps = before.iter().chain([step]);
        let values = steps.filter_map(|step| step.policy.get("rollout_kl_k3").copied());
        let values: Vec<f64> = values.collect();
        let (first, last) = KL_STEPS;
        if !step.policy.contains_key("rollout_kl_k3") || values.len() < first + last {
            return None;
        }
        let usual = median(values[..first].iter().copied())?;
        let now = median(values[values.len() - last..].iter().copied())?;
        let growth = now / usual.max(SMALL_KL);
        (growth > factor).then_some(growth)
    }
}

/// Calls `work`, and once `limit` has passed, `warn` meanwhile.
fn late<R>(limit: Duration, warn: impl FnOnce() + Send, work: impl FnOnce() -> R) -> R {
    thread::scope(|scope| {
        // Dropped when the work ends, also if it panics.
        let (working, done) = channel::<()>();
        scope.spawn(move || {
            if done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                warn();
            }
        });
        let result = work();
        drop(working);
        result
    })
}

/// The lower median; `None` without values.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// A step without an alarm.
    fn step(number: usize) -> StepMetrics {
        let mut step = StepMetrics {
            step: number,
            reward_std: 0.5,
            ..StepMetrics::default()
        };
        step.seconds.train = 10.;
        step
    }

    /// Steps as `change` makes them, with their alarms, and the warnings of all.
    fn run(
        config: &AlarmConfig,
        steps: usize,
        change: impl Fn(&mut StepMetrics),
    ) -> (Vec<StepMetrics>, Vec<String>) {
        let (mut before, mut warnings) = (Vec::new(), Vec::new());
        for number in 1..=steps {
            let mut next = step(number);
            change(&mut next);
            next.alarms = config.check(&before, &next);
            warnings.extend(config.warnings(&before, &next));
            before.push(next);
        }
        (before, warnings)
    }

    /// The steps with this alarm, and what it measured.
    fn with(name: &str, steps: &[StepMetrics]) -> Vec<(usize, f64)> {
        let found = steps.iter();
        let found = found.filter_map(|step| Some((step.step, *step.alarms.get(name)?)));
        found.collect()
    }

    #[test]
    fn constant_rewards_are_counted_in_a_row() {
        let config = AlarmConfig {
            constant_rewards: Some(3),
            ..AlarmConfig::default()
        };
        let (steps, warnings) = run(&config, 9, |step| {
            let varies = matches!(step.step, 3 | 8);
            step.constant_groups = if varies { 0.99 } else { 1. };
            step.reward_std = 0.;
            step.reward_mean = 0.25;
        });
        assert_eq!(with("constant_rewards", &steps), [(6, 3.), (7, 4.)]);
        let [warning] = &warnings[..] else {
            panic!("{warnings:?}")
        };
        assert!(
            warning.starts_with("step 6: all rewards have been 0.25 for 3 steps"),
            "{warning}"
        );
        let (_, warnings) = run(&config, 3, |step| step.constant_groups = 1.);
        assert!(warnings[0].contains("the rewards in each group have been equal for 3 steps"));
    }

    #[test]
    fn text_that_repeats_is_named_once_until_it_stops() {
        let (steps, warnings) = run(&AlarmConfig::default(), 5, |step| {
            step.repetition = [0.5, 0.7, 0.8, 0.2, 0.9][step.step - 1];
        });
        assert_eq!(with("repetition", &steps), [(2, 0.7), (3, 0.8), (5, 0.9)]);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[0].starts_with("step 2: 70% of the text repeats"),
            "{warnings:?}"
        );
    }

    #[test]
    fn a_divergence_is_compared_with_that_of_the_first_steps() {
        let kl = |from: usize, low: f64, high: f64| {
            move |step: &mut StepMetrics| {
                let value = if step.step < from { low } else { high };
                step.policy.insert("rollout_kl_k3".to_owned(), value);
            }
        };
        // The median of 5 steps is high with the third of them.
        let (steps, warnings) = run(&AlarmConfig::default(), 20, kl(16, 0.01, 0.08));
        assert_eq!(with("rollout_kl", &steps), [(18, 8.), (19, 8.), (20, 8.)]);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        // Less than 5 times; too small to mean anything; and too early.
        for quiet in [kl(16, 0.01, 0.04), kl(16, 1e-6, 4e-3), kl(11, 0.01, 0.08)] {
            let steps = run(&AlarmConfig::default(), 12, quiet).0;
            assert_eq!(with("rollout_kl", &steps), []);
        }
        let steps = run(&AlarmConfig::default(), 20, kl(16, 1e-6, 4e-3)).0;
        assert_eq!(with("rollout_kl", &steps), []);
        // Steps without the metric do not count.
        let (steps, _) = run(&AlarmConfig::default(), 40, |step| {
            if step.step % 2 == 0 {
                kl(32, 0.01, 0.08)(step);
            }
        });
        assert_eq!(with("rollout_kl", &steps), [(36, 8.), (38, 8.), (40, 8.)]);
    }

    #[test]
    fn a_slow_step_takes_longer_than_the_steps_before_it() {
        let seconds = |slow: f64| {
            move |step: &mut StepMetrics| {
                step.seconds.train = if step.step == 6 { slow } else { 20. };
            }
        };
        let config = AlarmConfig::default();
        let (steps, warnings) = run(&config, 7, seconds(101.));
        assert_eq!(with("slow_step", &steps), [(6, 5.05)]);
        // It was printed while the step ran.
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(with("slow_step", &run(&config, 7, seconds(100.)).0), []);
        // Short steps must be slower by a minute, and a run needs steps to compare with.
        let short = |step: &mut StepMetrics| {
            step.seconds.train = if step.step == 6 { 60. } else { 0.5 };
        };
        assert_eq!(with("slow_step", &run(&config, 7, short).0), []);
        let early = |step: &mut StepMetrics| {
            step.seconds.train = if step.step == 5 { 1000. } else { 1. };
        };
        assert_eq!(with("slow_step", &run(&config, 7, early).0), []);
        // Only the time that passes between steps counts, and only the last 20 steps.
        let ahead = |step: &mut StepMetrics| {
            step.seconds.sample = 500.;
            step.seconds.wait = Some(0.);
        };
        assert_eq!(with("slow_step", &run(&config, 7, ahead).0), []);
        let (steps, _) = run(&config, 40, |step| {
            step.seconds.train = if step.step < 20 { 10. } else { 90. };
        });
        assert_eq!(
            with("slow_step", &steps),
            (20..=30).map(|step| (step, 9.)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn no_alarm_rings_that_is_off() {
        let off = AlarmConfig {
            slow_step: None,
            constant_rewards: None,
            repetition: None,
            rollout_kl: None,
        };
        let trouble = |step: &mut StepMetrics| {
            step.constant_groups = 1.;
            step.repetition = 1.;
            step.seconds.train = if step.step == 30 { 1e4 } else { 1. };
            let kl = if step.step < 20 { 0.01 } else { 1. };
            step.policy.insert("rollout_kl_k3".to_owned(), kl);
        };
        let (steps, _) = run(&off, 30, trouble);
        assert!(steps.iter().all(|step| step.alarms.is_empty()));
        let (steps, _) = run(&AlarmConfig::default(), 30, trouble);
        assert_eq!(steps[29].alarms.len(), 4, "{:?}", steps[29].alarms);
    }

    #[test]
    fn a_step_that_is_late_is_named_while_it_runs() {
        let (warned, warnings) = channel();
        // The work ends after the warning, which a limit of 0 calls for at once.
        let result = late(
            Duration::ZERO,
            || warned.send("late").unwrap(),
            || warnings.recv(),
        );
        assert_eq!(result, Ok("late"));
        // Work that ends first has no warning, and neither has work that panics.
        let hour = Duration::from_secs(3600);
        assert_eq!(late(hour, || panic!("not late"), || 7), 7);
        let panicked = std::panic::catch_unwind(|| late(hour, || (), || panic!("a step")));
        assert!(panicked.is_err());
        // Without steps to compare with, nothing is late.
        let config = AlarmConfig::default();
        assert_eq!(config.watch(&[step(1)], |text| panic!("{text}"), || 7), 7);
        let steps: Vec<StepMetrics> = (1..=5).map(step).collect();
        assert_eq!(config.watch(&steps, |text| panic!("{text}"), || 7), 7);
        assert_eq!(
            config.slow_limit(&steps),
            Some((Duration::from_secs(70), 10.))
        );
        assert_eq!(config.slow_limit(&steps[1..]), None);
    }

    #[test]
    fn invalid_values_are_named() {
        let error = |config: AlarmConfig| config.validate().unwrap_err().to_string();
        let default = AlarmConfig::default;
        assert!(default().validate().is_ok());
        let slow_step = Some(0.5);
        assert_eq!(
            error(AlarmConfig {
                slow_step,
                ..default()
            }),
            "slow_step: 0.5, must be finite and at least 1, or null"
        );
        let rollout_kl = Some(f64::INFINITY);
        assert!(
            error(AlarmConfig {
                rollout_kl,
                ..default()
            })
            .starts_with("rollout_kl: inf")
        );
        let repetition = Some(1.5);
        assert!(
            error(AlarmConfig {
                repetition,
                ..default()
            })
            .starts_with("repetition: 1.5")
        );
        let constant_rewards = Some(0);
        assert!(
            error(AlarmConfig {
                constant_rewards,
                ..default()
            })
            .starts_with("constant_rewards: 0")
        );
    }
}
