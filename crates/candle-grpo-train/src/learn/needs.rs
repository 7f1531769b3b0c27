//! The inputs that an algorithm needs, and the models that compute them.

use anyhow::{Result, ensure};
use candle_grpo_core::AdvantageEstimator;
use candle_grpo_core::advantage::{ComponentOrder, SingletonGroup};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::rewards::NormLevel;
use candle_grpo_core::validate::check;
use candle_grpo_loss::Recipe;

use super::TrainConfig;
use candle_grpo_base::within;

/// The source of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The completions and their scores.
    Rollouts,
    /// Greedy completions, sampled in addition to those of a step.
    GreedyRollouts,
    /// A pass of the policy before the update.
    Policy,
    /// A pass of the reference.
    Reference,
    /// A pass of the teacher, or requests to its servers.
    Teacher,
    /// A pass of the critic.
    Critic,
    /// Other inputs of the step.
    Inputs,
    /// The mini-batch of an update.
    MiniBatch,
}

impl Source {
    /// Returns the source of `input`: the table that the step, the validation and the memory plan
    /// read.
    pub(crate) fn of(input: Input) -> Self {
        match input {
            Input::RolloutLogProbs | Input::Scores => Self::Rollouts,
            Input::RewardBaselines => Self::GreedyRollouts,
            Input::OldLogProbs | Input::Entropy | Input::SumOfSquaredProbs => Self::Policy,
            Input::RefLogProbs => Self::Reference,
            Input::TeacherLogProbs | Input::TeacherMask => Self::Teacher,
            Input::Values => Self::Critic,
            Input::ImportanceWeights | Input::PolicyMask | Input::EntropyMask => Self::Inputs,
            _ => Self::MiniBatch,
        }
    }
}

/// The inputs that the advantages and the loss of a run need before an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The inputs of the advantages.
    pub advantage: Inputs,
    /// The inputs of the loss.
    pub loss: Inputs,
}

impl Needs {
    /// Returns the needs of the settings. An `estimator` in place of that of the recipe receives
    /// the inputs of the recipe and those that it declares.
    pub fn new(config: &TrainConfig, estimator: Option<&dyn AdvantageEstimator>) -> Self {
        let recipe = &config.recipe;
        let declared = estimator.map_or(Inputs::NONE, AdvantageEstimator::needs);
        let advantage = recipe.advantage.needs() | declared;
        let always = [Input::OldLogProbs, Input::RolloutLogProbs, Input::Scores];
        let by_entropy = Inputs::when(config.top_entropy.is_some(), Input::PolicyMask);
        let loss = recipe.policy_loss.needs() | Inputs::from(always) | by_entropy;
        let of_update = |input: &Input| match input {
            // Computed with its gradient.
            Input::Entropy => true,
            // A custom estimator may read them.
            Input::OldLogProbs => estimator.is_none() && config.updates_current_policy(advantage),
            _ => false,
        };
        let loss = loss.iter().filter(|input| !of_update(input)).collect();
        let loss = config.with_sources(loss);
        Self {
            // A custom estimator may also read what the loss has.
            advantage: match estimator {
                Some(_) => config.with_sources(advantage) | loss,
                None => config.with_sources(advantage),
            },
            loss,
        }
    }

    /// Returns the needs of both.
    pub fn all(self) -> Inputs {
        self.advantage | self.loss
    }

    /// Returns whether an input comes from `source`.
    pub(crate) fn reads(self, source: Source) -> bool {
        self.all().iter().any(|input| Source::of(input) == source)
    }
}

impl TrainConfig {
    /// Returns `inputs` with those that they are computed from.
    pub(super) fn with_sources(&self, inputs: Inputs) -> Inputs {
        let by_entropy = [Input::PolicyMask, Input::EntropyMask];
        let by_entropy = by_entropy.iter().any(|&input| inputs.contains(input));
        let corrects = self.recipe.policy_loss.rollout_correction.is_some()
            && inputs.contains(Input::OldLogProbs);
        inputs
            | Inputs::when(by_entropy && self.top_entropy.is_some(), Input::Entropy)
            | Inputs::when(inputs.contains(Input::TeacherLogProbs), Input::TeacherMask)
            | Inputs::when(corrects, [Input::RolloutLogProbs, Input::ImportanceWeights])
    }
}

/// Returns true if the advantage receives the reward components separately: nothing before it needs
/// their sum.
pub(crate) fn keeps_components(recipe: &Recipe) -> bool {
    recipe.reward_shaping.is_identity()
        && recipe.overlong.is_none()
        && recipe.length_penalty.is_none()
}

/// Checks `recipe` for groups of this size. Its advantage may be replaced by another.
///
/// # Errors
///
/// Returns an error if `recipe` is not valid, or contradicts itself or the group size.
pub(crate) fn ensure_consistent(
    recipe: &Recipe,
    num_generations: usize,
    has_other_advantage: bool,
) -> Result<()> {
    recipe
        .validate()
        .map_err(|error| within("recipe", error.into()))?;
    check(
        num_generations > 1 || recipe.reward_shaping.norm.std != NormLevel::Group,
        "num_generations",
        num_generations,
        "be at least 2 to divide rewards by the standard deviation of their group",
    )?;
    if has_other_advantage {
        return Ok(());
    }
    let pipeline = recipe.advantage.pipeline();
    if let Some(sequence) = &pipeline.sequence {
        let relative = sequence.baseline.is_group_relative();
        check(
            num_generations > 1 || !relative || sequence.single_sample != SingletonGroup::Error,
            "num_generations",
            num_generations,
            "be at least 2 for a relative advantage, unless its single_sample allows 1",
        )?;
        ensure!(
            sequence.components == ComponentOrder::SumThenNormalize || keeps_components(recipe),
            "recipe.advantage: takes the components of rewards one by one, but recipe.reward_shaping, recipe.overlong or recipe.length_penalty adds them up before; leave these out"
        );
    }
    ensure!(
        !recipe.advantage.needs().contains(Input::RewardBaselines) || keeps_components(recipe),
        "recipe.advantage: compares with the score of a greedy answer, which recipe.reward_shaping, recipe.overlong and recipe.length_penalty do not touch; leave these out"
    );
    Ok(())
}
