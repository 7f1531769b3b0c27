//! The inputs of an algorithm other than completions and rewards.

use anyhow::{Result, ensure};
use candle_grpo_core::advantage::{Baseline, ComponentOrder, SingletonGroup, TokenBaseline};
use candle_grpo_core::rewards::NormLevel;
use candle_grpo_core::validate::check;
use candle_grpo_core::{GroupAdvantage, TokenAdvantage};
use candle_grpo_loss::Recipe;

use candle_grpo_base::within;

/// The inputs that the advantages and the loss of a recipe need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RecipeInputs {
    /// Log-probs of the policy before the update, for the advantages.
    pub(crate) old_log_probs: bool,
    /// Log-probs of a reference policy, for the advantages or the loss.
    pub(crate) reference: bool,
    /// Values of a critic.
    pub(crate) values: bool,
    /// Score of a greedy answer to each prompt.
    pub(crate) greedy_scores: bool,
    /// Sum of squared probabilities at each token.
    pub(crate) sum_of_squared_probs: bool,
}

impl RecipeInputs {
    pub(crate) fn new(recipe: &Recipe) -> Self {
        let pipeline = recipe.advantage.pipeline();
        let sequence_inputs = |sequence: &GroupAdvantage| Self {
            old_log_probs: sequence.kl_penalty.is_some(),
            reference: sequence.kl_penalty.is_some(),
            greedy_scores: sequence.baseline == Baseline::Given,
            ..Self::default()
        };
        let token_inputs = |tokens: &TokenAdvantage| {
            let optimal = matches!(tokens.baseline, TokenBaseline::OptimalToken(_));
            Self {
                old_log_probs: tokens.kl_penalty.is_some()
                    || tokens.distillation.is_some()
                    || tokens.teacher_weight.is_some()
                    || optimal,
                reference: tokens.kl_penalty.is_some(),
                values: tokens.lambda.is_some(),
                greedy_scores: tokens.baseline == TokenBaseline::Given,
                sum_of_squared_probs: optimal,
            }
        };
        let a = pipeline.sequence.as_ref().map(sequence_inputs);
        let b = pipeline.tokens.as_ref().map(token_inputs);
        let (a, b) = (a.unwrap_or_default(), b.unwrap_or_default());
        Self {
            old_log_probs: a.old_log_probs || b.old_log_probs,
            reference: a.reference || b.reference || recipe.policy_loss.kl.is_some(),
            values: a.values || b.values,
            greedy_scores: a.greedy_scores || b.greedy_scores,
            sum_of_squared_probs: a.sum_of_squared_probs || b.sum_of_squared_probs,
        }
    }
}

/// Returns true if the advantage receives the reward components separately: nothing before it needs
/// their sum.
pub(crate) fn keeps_components(recipe: &Recipe) -> bool {
    recipe.reward_shaping.is_identity()
        && recipe.overlong.is_none()
        && recipe.length_penalty.is_none()
}

/// Checks `recipe` for groups of this size.
///
/// # Errors
///
/// Returns an error if `recipe` is not valid, or contradicts itself or the group size.
pub(crate) fn ensure_consistent(recipe: &Recipe, num_generations: usize) -> Result<()> {
    recipe
        .validate()
        .map_err(|error| within("recipe", error.into()))?;
    check(
        num_generations > 1 || recipe.reward_shaping.norm.std != NormLevel::Group,
        "num_generations",
        num_generations,
        "be at least 2 to divide rewards by the standard deviation of their group",
    )?;
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
        !RecipeInputs::new(recipe).greedy_scores || keeps_components(recipe),
        "recipe.advantage: compares with the score of a greedy answer, which recipe.reward_shaping, recipe.overlong and recipe.length_penalty do not touch; leave these out"
    );
    Ok(())
}
