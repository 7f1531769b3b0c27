//! Engines that a configuration can name, and their abilities.

use anyhow::Result;
use candle_grpo_core::validate::{Name, check};
use serde::{Deserialize, Serialize};

#[cfg(feature = "engines")]
use super::engine::{OpenAi, Protocol, Sglang, Vllm};
use super::sampling_config::SamplingConfig;

/// The engine that samples completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Engine {
    /// The policy in this process.
    #[default]
    Local,
    /// vLLM servers.
    Vllm,
    /// SGLang servers.
    Sglang,
    /// Servers with OpenAI's completions API that accept and return token ids, such as llama.cpp.
    /// They do not load weights.
    Openai,
}

/// Abilities of an engine's servers. Settings depend on them, even in a program without the feature
/// `engines`.
struct Abilities {
    /// They load the policy's weights.
    load_weights: bool,
    /// They report log-probs for given tokens.
    score_tokens: bool,
    /// They mask the tokens that break the form of a completion.
    structure_outputs: bool,
    #[cfg(feature = "engines")]
    protocol: fn() -> Box<dyn Protocol>,
}

impl Engine {
    /// Returns the engine's servers, or `None` for the policy in this process.
    fn servers(self) -> Option<Abilities> {
        Some(match self {
            Self::Local => return None,
            Self::Vllm => Abilities {
                load_weights: true,
                score_tokens: true,
                structure_outputs: true,
                #[cfg(feature = "engines")]
                protocol: || Box::new(Vllm),
            },
            Self::Sglang => Abilities {
                load_weights: true,
                score_tokens: true,
                structure_outputs: true,
                #[cfg(feature = "engines")]
                protocol: || Box::new(Sglang),
            },
            Self::Openai => Abilities {
                load_weights: false,
                score_tokens: false,
                structure_outputs: false,
                #[cfg(feature = "engines")]
                protocol: || Box::new(OpenAi),
            },
        })
    }

    /// Returns true for the policy in this process.
    pub fn is_local(self) -> bool {
        self.servers().is_none()
    }

    /// Returns true for servers that load the policy's weights.
    pub fn loads_weights(self) -> bool {
        self.servers().is_some_and(|servers| servers.load_weights)
    }

    /// Returns true for servers that report log-probs for given tokens, as a teacher needs.
    pub fn scores_tokens(self) -> bool {
        self.servers().is_some_and(|servers| servers.score_tokens)
    }

    /// Returns true for servers that support
    /// [`SamplingConfig::structured_outputs`](super::SamplingConfig::structured_outputs).
    pub fn structures_outputs(self) -> bool {
        self.servers()
            .is_some_and(|servers| servers.structure_outputs)
    }

    /// Checks that the engine supports the settings in `sampling`.
    ///
    /// # Errors
    ///
    /// Fails with the name of a setting that it does not support.
    pub fn validate_sampling(self, sampling: &SamplingConfig) -> Result<()> {
        let supported = sampling.structured_outputs.is_none() || self.structures_outputs();
        let must = format!(
            "be absent with engine {}: only vllm and sglang mask tokens",
            Name(&self)
        );
        Ok(check(supported, "structured_outputs", "given", &must)?)
    }

    /// Returns the servers' protocol.
    ///
    /// # Errors
    ///
    /// Fails if the engine has no servers.
    #[cfg(feature = "engines")]
    pub(super) fn protocol(self) -> Result<Box<dyn Protocol>> {
        let servers = self.servers();
        let protocol = servers.map(|servers| (servers.protocol)());
        anyhow::Context::context(protocol, "engine: local, must be vllm, sglang or openai")
    }
}
