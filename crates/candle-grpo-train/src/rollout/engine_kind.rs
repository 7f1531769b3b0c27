//! The engines that a configuration can name, and their abilities.

use serde::{Deserialize, Serialize};

#[cfg(feature = "engines")]
use super::engine::{OpenAi, Protocol, Sglang, Vllm};

/// The engine that draws completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Engine {
    /// The policy in this process.
    #[default]
    Local,
    /// Servers of vLLM.
    Vllm,
    /// Servers of SGLang.
    Sglang,
    /// Servers with the completions API of OpenAI that take and return token ids, such as
    /// llama.cpp. They take no weights.
    Openai,
}

/// The abilities of the servers of an engine, which settings depend on, also in a program without
/// the feature `engines`.
struct Abilities {
    /// They take the weights of the policy.
    load_weights: bool,
    /// They name the log-probs of given tokens.
    score_tokens: bool,
    #[cfg(feature = "engines")]
    protocol: fn() -> Box<dyn Protocol>,
}

impl Engine {
    /// The servers of the engine; none for the policy in this process.
    fn servers(self) -> Option<Abilities> {
        Some(match self {
            Self::Local => return None,
            Self::Vllm => Abilities {
                load_weights: true,
                score_tokens: true,
                #[cfg(feature = "engines")]
                protocol: || Box::new(Vllm),
            },
            Self::Sglang => Abilities {
                load_weights: true,
                score_tokens: true,
                #[cfg(feature = "engines")]
                protocol: || Box::new(Sglang),
            },
            Self::Openai => Abilities {
                load_weights: false,
                score_tokens: false,
                #[cfg(feature = "engines")]
                protocol: || Box::new(OpenAi),
            },
        })
    }

    /// Returns true for the policy in this process.
    pub fn is_local(self) -> bool {
        self.servers().is_none()
    }

    /// Returns true for servers that take the weights of the policy.
    pub fn loads_weights(self) -> bool {
        self.servers().is_some_and(|servers| servers.load_weights)
    }

    /// Returns true for servers that name the log-probs of given tokens, as a teacher needs them.
    pub fn scores_tokens(self) -> bool {
        self.servers().is_some_and(|servers| servers.score_tokens)
    }

    /// The requests and answers of the servers.
    ///
    /// # Errors
    ///
    /// If the engine has no servers.
    #[cfg(feature = "engines")]
    pub(super) fn protocol(self) -> anyhow::Result<Box<dyn Protocol>> {
        let servers = self.servers();
        let protocol = servers.map(|servers| (servers.protocol)());
        anyhow::Context::context(protocol, "engine: local, must be vllm, sglang or openai")
    }
}
