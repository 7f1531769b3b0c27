//! The tensors that the ranks of a job divide.

use serde::{Deserialize, Serialize};

/// The tensors that the ranks of a job divide, in place of keeping them whole on each rank. With
/// one rank nothing is divided.
///
/// The state of the optimizer takes 8 bytes for each parameter that trains, or 2 in 8 bits; with W
/// ranks, each of them keeps a share of 1 / W of what they divide. A checkpoint does not depend on
/// what the ranks divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The state of the optimizer (ZeRO, stage 1, <https://arxiv.org/abs/1910.02054>).
    Optimizer,
    /// The state of the optimizer, the gradients, and in bf16 and f16 the f32 weights: each rank
    /// keeps all weights in the compute dtype alone. In bf16 a parameter takes 2 + 16 / W bytes,
    /// and 4 + 12 / W in f32. The gradients are summed over the ranks in each backward pass, block
    /// by block. Buffers come on top: the whole gradients of about three blocks, at least 25 MiB
    /// each, and of one matrix of the vocabulary.
    Resident,
    /// All of these, and the weights in the compute dtype: a parameter takes 18 / W bytes in bf16,
    /// and 16 / W in f32. The weights of frozen models are divided, too. The ranks gather the
    /// weights of a block before it runs, forward and backward, and free them after it, so all
    /// ranks make as many passes. To sample in this process, they gather all weights until the
    /// completions are drawn.
    Full,
}
