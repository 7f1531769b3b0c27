//! Inputs that an advantage or a loss declares, so that a trainer computes only what is needed.

use std::fmt;
use std::ops::BitOr;

/// Declares [`Input`], with a list of all inputs and their names.
macro_rules! inputs {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// An advantage or loss input that a trainer computes on request.
        ///
        /// Displays as its field name in [`AdvantageBatch`](crate::AdvantageBatch) and in
        /// `PolicyBatch` from `candle-grpo-loss`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Input {
            $($(#[$doc])* $variant,)*
        }

        impl Input {
            /// Every input.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the field name in a batch.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

inputs! {
    /// Log-probs `[B, T]` under the policy before the update.
    OldLogProbs => "old_log_probs",
    /// Log-probs `[B, T]` from the sampling engine.
    RolloutLogProbs => "rollout_log_probs",
    /// Log-probs `[B, T]` under the reference policy.
    RefLogProbs => "ref_log_probs",
    /// Log-probs `[B, T]` under a teacher.
    TeacherLogProbs => "teacher_log_probs",
    /// Tokens `[B, T]` that have a teacher. Absent if all have one.
    TeacherMask => "teacher_mask",
    /// Critic values `[B, T]`.
    Values => "values",
    /// Entropies `[B, T]`. A loss reads the policy's own, with gradient; an advantage reads those
    /// from before the update.
    Entropy => "entropy",
    /// Squared probabilities before the update, summed over the vocabulary, `[B, T]`.
    SumOfSquaredProbs => "sum_of_squared_probs",
    /// Baselines `[B]` from another source, such as the rewards of greedy completions.
    RewardBaselines => "reward_baselines",
    /// Scores `[B]` before any shaping.
    Scores => "scores",
    /// Weights for samples from another engine. Absent unless a rollout correction has weights.
    ImportanceWeights => "importance_weights",
    /// Tokens `[B, T]` in the policy term. Absent if no filter drops tokens.
    PolicyMask => "policy_mask",
    /// Tokens `[B, T]` in the entropy bonus.
    EntropyMask => "entropy_mask",
    /// Tokens `[B, T]` that the loss selects from the whole step.
    SelectedTokens => "selected_tokens",
    /// Number of tokens in all samples for the sequence's prompt, `[B]`.
    PromptTokens => "prompt_tokens",
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of inputs.
///
/// ```
/// use candle_grpo_core::inputs::{Input, Inputs};
///
/// let advantage = Inputs::from([Input::Values, Input::OldLogProbs]);
/// let loss = Inputs::from(Input::RefLogProbs);
/// let all = advantage | loss | Inputs::when(false, Input::Entropy);
/// assert!(all.contains(Input::RefLogProbs) && !all.contains(Input::Entropy));
/// assert_eq!(all.to_string(), "old_log_probs, ref_log_probs, values");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inputs(u32);

impl Inputs {
    /// No input.
    pub const NONE: Self = Self(0);

    /// Returns whether `input` is in the set.
    pub fn contains(self, input: Input) -> bool {
        self.0 & (1 << input as u32) != 0
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Returns `inputs` if `needed`, and no input otherwise.
    pub fn when(needed: bool, inputs: impl Into<Self>) -> Self {
        if needed { inputs.into() } else { Self::NONE }
    }

    /// Returns the inputs in the order of [`Input::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Input> {
        let all = Input::ALL.iter().copied();
        all.filter(move |&input| self.contains(input))
    }
}

impl From<Input> for Inputs {
    fn from(input: Input) -> Self {
        Self(1 << input as u32)
    }
}

impl<const N: usize> From<[Input; N]> for Inputs {
    fn from(inputs: [Input; N]) -> Self {
        inputs.into_iter().collect()
    }
}

impl FromIterator<Input> for Inputs {
    fn from_iter<I: IntoIterator<Item = Input>>(inputs: I) -> Self {
        let sets = inputs.into_iter().map(Self::from);
        sets.fold(Self::NONE, Self::bitor)
    }
}

impl BitOr for Inputs {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Input::name).collect();
        f.write_str(&names.join(", "))
    }
}
