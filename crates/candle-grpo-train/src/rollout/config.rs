//! Rollout settings: the engine that samples completions, and how far ahead it samples.

use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::validate::{Name, at_least_one, check, positive};
use serde::{Deserialize, Serialize};

use super::engine_kind::Engine;
use crate::one_or_more::one_or_more;
use candle_grpo_base::check_server_url;
use candle_grpo_nn::ComputeDType;

/// The way in which an engine receives the policy's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WeightSync {
    /// `adapter` if adapters train and the server does not sleep. Otherwise `ipc` or `nccl` where
    /// one works, and `disk` elsewhere.
    #[default]
    Auto,
    /// The adapters as a PEFT directory.
    Adapter,
    /// All weights as a Hugging Face directory, with adapters merged.
    Disk,
    /// All weights over NCCL, with adapters merged.
    Nccl,
    /// All weights from memory of the GPU that the server shares, with adapters merged.
    Ipc,
    /// Never: the engine is a fixed policy.
    None,
}

impl WeightSync {
    /// Returns true if the weights must come from a GPU.
    pub(crate) fn is_from_gpu(self) -> bool {
        matches!(self, Self::Nccl | Self::Ipc)
    }
}

/// Rollout settings.
///
/// Start with the local engine. Switch to a server if sampling takes most of a step, and set
/// `max_staleness` if the trainer then waits for it.
///
/// ```
/// use candle_grpo_train::rollout::{Engine, RolloutConfig};
///
/// let config = RolloutConfig {
///     engine: Engine::Vllm,
///     base_url: vec!["http://10.0.0.7:8000".to_owned()],
///     ..RolloutConfig::default()
/// };
/// config.validate()?;
///
/// let config = RolloutConfig { base_url: vec!["10.0.0.7:8000".to_owned()], ..config };
/// let error = config.validate().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "base_url[0]: \"10.0.0.7:8000\", must begin with http:// or https://"
/// );
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// Engine that samples completions: `local` (the policy in this process), `vllm`, `sglang`, or
    /// `openai` (any server with OpenAI's completions API that accepts and returns token ids).
    pub engine: Engine,
    /// Dtype in which the policy in this process samples, for training and evaluations. `bf16`
    /// reads half as many bytes as f32, and the recorded log-probs are then in bf16. Absent: the
    /// training dtype. Must be absent with a server. Unless the policy trains in f32, it must be
    /// absent or the training dtype.
    pub dtype: Option<ComputeDType>,
    /// If true, the policy in this process samples from weights into which its adapters are
    /// merged, for training and evaluations. Each token is then as fast as without adapters. After
    /// an update, the weights that adapters extend are computed again in f32 and rounded once: to
    /// `dtype`, or the training dtype. These copies take 2 bytes per parameter in bf16 and f16, 4
    /// in f32, also over weights in quantized blocks. Rounding to bf16 or f16 loses small changes,
    /// and in f32 log-probs are no longer bit-identical to those of training. Needs engine `local`
    /// and adapters.
    pub merge_adapters: bool,
    /// Server URL, without `/v1`: one, or a list. Completions are distributed over several
    /// servers; if one fails, the others take over.
    #[serde(deserialize_with = "one_or_more")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<crate::one_or_more::Texts<String>>")
    )]
    pub base_url: Vec<String>,
    /// Name under which the server serves the model. Absent: the first one that it lists.
    pub served_model_name: Option<String>,
    /// Environment variable with the server's API key. Absent: no key is sent.
    pub api_key_env: Option<String>,
    /// Maximum time for one request, in seconds.
    pub request_timeout: f64,
    /// Maximum wait for a server that does not answer, at the start and after a failure, in
    /// seconds. The run then ends with an error, and resumes from its last checkpoint.
    pub server_timeout: f64,
    /// Maximum retries for a failed request.
    pub max_retries: usize,
    /// Maximum concurrent requests, over all servers. A request is one completion.
    pub max_inflight: usize,
    /// Weight transfer to the engine: `adapter` (a PEFT directory), `disk` (a
    /// Hugging Face directory), `nccl` (from GPU to GPU, with adapters merged), `ipc` (on the GPU
    /// that the policy shares with the server, with adapters merged), `none` (never: the engine is
    /// a fixed policy), or `auto` (`adapter` if adapters train and `sleep_mode` is false;
    /// otherwise `ipc` or `nccl` if the policy is on a GPU, grpo has the feature `cuda` or
    /// `nccl`, and vLLM was started for it; otherwise `disk`).
    pub weight_sync: WeightSync,
    /// Directory for the weights, which the servers must see under the same path. Absent:
    /// `weights` in the run directory.
    pub weight_sync_folder: Option<PathBuf>,
    /// If true, the server sleeps while the policy trains, on the same GPU: it gives up the memory
    /// of its weights and its cache, and receives all weights again before it samples. Needs
    /// engine `vllm`, started with `--enable-sleep-mode`, and `max_staleness` 0.
    pub sleep_mode: bool,
    /// If true, the checksums of the server's weights are compared with the transferred ones after
    /// each transfer. This finds a single wrong weight after the first transfer, and reads all
    /// weights once more on both sides. Needs engine `vllm`, and whole weights.
    pub check_weights: bool,
    /// Number of policy updates between weight transfers to the engine. At most
    /// `max_staleness + 1`.
    pub weight_sync_steps: usize,
    /// Maximum number of updates between the weights that sample a completion and those that it
    /// trains, apart from what `partial` adds. With 0, sampling and training alternate. Above 0,
    /// completions for later steps are sampled while the policy trains, and the loss must have
    /// a rollout correction.
    pub max_staleness: usize,
    /// If true, the engine receives each update as soon as there is one, also while it samples.
    /// Completions that have begun keep their tokens, and continue with the new weights. Needs
    /// `max_staleness` above 0.
    pub in_flight_updates: bool,
    /// If true, a step ends its sampling as soon as enough groups are whole. The other completions
    /// continue in the next step, with its weights, and keep their tokens. Long completions then
    /// no longer leave the sampler with a few rows. Needs engine `local`, `vllm` or `sglang`, and
    /// a rollout correction in the loss.
    pub partial: bool,
    /// Number of groups that are sampled at once with `partial`. From `prompts_per_step` to twice
    /// as many. Absent: twice as many.
    pub prompts_in_flight: Option<usize>,
    /// With `partial`, maximum number of later steps that continue a group. The last of them
    /// samples it to its end, so a token is at most `max_staleness + max_continuations` updates
    /// old.
    pub max_continuations: usize,
    /// Maximum mean absolute difference between the engine's and the policy's log-probs, over the
    /// tokens in a probe. It is checked at the start and after each weight transfer.
    pub log_prob_tolerance: f64,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            engine: Engine::Local,
            dtype: None,
            merge_adapters: false,
            base_url: Vec::new(),
            served_model_name: None,
            api_key_env: None,
            request_timeout: 600.,
            server_timeout: 240.,
            max_retries: 8,
            max_inflight: 64,
            weight_sync: WeightSync::Auto,
            weight_sync_folder: None,
            sleep_mode: false,
            check_weights: false,
            weight_sync_steps: 1,
            max_staleness: 0,
            in_flight_updates: false,
            partial: false,
            prompts_in_flight: None,
            max_continuations: 4,
            log_prob_tolerance: 0.05,
        }
    }
}

impl RolloutConfig {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// Fails with an [`Invalid`](candle_grpo_core::Invalid) that names the field, if a field is
    /// invalid or contradicts another.
    pub fn validate(&self) -> Result<()> {
        for (name, seconds) in [
            ("request_timeout", self.request_timeout),
            ("server_timeout", self.server_timeout),
        ] {
            let valid = seconds > 0. && seconds <= MAX_SECONDS;
            check(valid, name, seconds, "be above 0 and at most 1e6 seconds")?;
        }
        positive("log_prob_tolerance", self.log_prob_tolerance)?;
        at_least_one("max_inflight", self.max_inflight)?;
        let threads = "be at most 4096: each takes a thread";
        let valid = self.max_inflight <= MAX_INFLIGHT;
        check(valid, "max_inflight", self.max_inflight, threads)?;
        let valid = self.max_staleness <= MAX_STALENESS;
        let must = "be at most 1024: the completions of as many steps wait in memory";
        check(valid, "max_staleness", self.max_staleness, must)?;
        let ages = self.max_staleness > 0 && self.weight_sync == WeightSync::None;
        let must = "be 0 with weight_sync none: a fixed policy is one update older after each step";
        check(!ages, "max_staleness", self.max_staleness, must)?;
        at_least_one("weight_sync_steps", self.weight_sync_steps)?;
        check(
            self.weight_sync_steps - 1 <= self.max_staleness,
            "weight_sync_steps",
            self.weight_sync_steps,
            "be at most max_staleness + 1",
        )?;
        let engine = Name(&self.engine);
        at_least_one("max_continuations", self.max_continuations)?;
        let is_late = self.in_flight_updates && self.max_staleness == 0;
        let must = "be false with max_staleness 0, which updates no weights while it samples";
        check(!is_late, "in_flight_updates", true, must)?;
        if self.partial {
            let must =
                format!("be false with engine {engine}, which samples completions to their end");
            let interrupts = self.engine.is_local() || self.engine.loads_weights();
            check(interrupts, "partial", true, &must)?;
        } else if let Some(prompts) = self.prompts_in_flight {
            let must = "be absent unless partial is true";
            check(false, "prompts_in_flight", prompts, must)?;
        }
        let sync = Name(&self.weight_sync);
        if self.check_weights {
            let must = format!("be false with engine {engine}, which names no checksums");
            check(self.engine == Engine::Vllm, "check_weights", true, &must)?;
            let must = format!("be false with weight_sync {sync}");
            let whole = matches!(
                self.weight_sync,
                WeightSync::Auto | WeightSync::Disk | WeightSync::Nccl | WeightSync::Ipc
            );
            check(whole, "check_weights", true, &must)?;
        }
        self.validate_sleep_mode()?;
        if self.engine.is_local() {
            let none = self.base_url.is_empty();
            let must = "be absent with engine local, which needs no server";
            check(none, "base_url", "given", must)?;
            let auto = self.weight_sync == WeightSync::Auto;
            let must = "be auto with engine local, which shares the weights";
            check(auto, "weight_sync", sync, must)?;
            return Ok(());
        }
        if let Some(dtype) = &self.dtype {
            let must = format!("be absent with engine {engine}, which has its own");
            check(false, "dtype", Name(dtype), &must)?;
        }
        let must = format!("be false with engine {engine}, which does not sample in this process");
        check(!self.merge_adapters, "merge_adapters", true, &must)?;
        let must = format!("be the URL of at least one server with engine {engine}");
        check(!self.base_url.is_empty(), "base_url", "absent", &must)?;
        for (i, url) in self.base_url.iter().enumerate() {
            let field = format!("base_url[{i}]");
            let value = format!("{url:?}");
            check_server_url(&field, url)?;
            let root = |url: &String| url.trim_end_matches('/').to_owned();
            let repeated = self.base_url[..i]
                .iter()
                .any(|other| root(other) == root(url));
            check(!repeated, &field, &value, "be given once")?;
            let must = "be the root of the server, without /v1";
            check(!root(url).ends_with("/v1"), &field, &value, must)?;
        }
        if self.weight_sync.is_from_gpu() && self.engine.loads_weights() {
            let must = format!("be auto, adapter or disk with engine {engine}: only vllm joins");
            let valid = self.engine == Engine::Vllm;
            check(valid, "weight_sync", Name(&self.weight_sync), &must)?;
        }
        if self.weight_sync == WeightSync::Ipc {
            let servers = format!("{} servers", self.base_url.len());
            let must = "be one with weight_sync ipc: it shares the GPU of the policy";
            check(self.base_url.len() == 1, "base_url", servers, must)?;
        }
        if !self.engine.loads_weights() {
            let takes = matches!(self.weight_sync, WeightSync::Auto | WeightSync::None);
            let must = format!("be none with engine {engine}, which takes no weights");
            check(takes, "weight_sync", sync, &must)?;
        }
        Ok(())
    }

    fn validate_sleep_mode(&self) -> Result<()> {
        if !self.sleep_mode {
            return Ok(());
        }
        let (engine, sync) = (Name(&self.engine), Name(&self.weight_sync));
        let must = format!("be false with engine {engine}: only vllm sleeps");
        check(self.engine == Engine::Vllm, "sleep_mode", true, &must)?;
        let refused = match self.weight_sync {
            WeightSync::Auto | WeightSync::Disk | WeightSync::Ipc => None,
            WeightSync::Adapter => Some("which leaves out the weights that the server loses"),
            WeightSync::Nccl => Some("which needs a GPU of its own for the server"),
            WeightSync::None => Some("after which the server has no weights"),
        };
        if let Some(reason) = refused {
            let must = format!("be false with weight_sync {sync}, {reason}");
            check(false, "sleep_mode", true, &must)?;
        }
        let must =
            "be false with in_flight_updates, for which the server samples while the policy trains";
        check(!self.in_flight_updates, "sleep_mode", true, must)?;
        let must = "be false with max_staleness above 0, for which the server samples while the policy trains";
        let alternates = self.max_staleness == 0;
        Ok(check(alternates, "sleep_mode", true, must)?)
    }

    /// Returns true if a step may train on tokens from older weights than its own.
    pub(crate) fn trains_on_older_weights(&self) -> bool {
        self.max_staleness > 0 || self.partial
    }

    /// Returns true if a completion may continue with other weights than those that began it.
    pub(crate) fn continues_completions(&self) -> bool {
        self.partial || self.in_flight_updates
    }

    /// Maximum number of updates between the weights that sample a token and those that it trains.
    pub(crate) fn max_token_staleness(&self) -> usize {
        let continuations = if self.partial {
            self.max_continuations
        } else {
            0
        };
        self.max_staleness.saturating_add(continuations)
    }

    /// Returns true if the engine is a server that never receives weights.
    pub fn is_fixed_policy(&self) -> bool {
        let receives = self.engine.loads_weights() && self.weight_sync != WeightSync::None;
        !self.engine.is_local() && !receives
    }

    /// Checks that the engine can sample completions for a training run.
    ///
    /// # Errors
    ///
    /// Fails if the engine loads no weights, unless [`Self::weight_sync`] states that this is
    /// intended.
    pub fn validate_training(&self) -> Result<()> {
        let receives = self.engine.is_local() || self.engine.loads_weights();
        let meant = receives || self.weight_sync == WeightSync::None;
        let must = format!(
            "be none to train with engine {}, which takes no weights and stays a fixed policy",
            Name(&self.engine)
        );
        Ok(check(meant, "weight_sync", Name(&self.weight_sync), &must)?)
    }

    /// Checks that these settings are for servers of a teacher that scores given tokens.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::validate_sampling_teacher`]. Also fails if the engine is
    /// neither `vllm` nor `sglang`.
    pub fn validate_teacher(&self) -> Result<()> {
        let scores = self.engine.scores_tokens();
        let must = "be vllm or sglang, which name the log-probs of given tokens";
        check(scores, "engine", Name(&self.engine), must)?;
        self.validate_sampling_teacher()
    }

    /// Checks that these settings are for servers of a teacher, which may only sample.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::validate`]. Also fails if the engine is `local`, or if
    /// there is a setting for weights or for the policy, which a teacher does not have.
    pub fn validate_sampling_teacher(&self) -> Result<()> {
        let must = "be vllm, sglang or openai: servers of the teacher";
        check(!self.engine.is_local(), "engine", "local", must)?;
        self.validate()?;
        let plain = Self::default();
        for (name, is_default) in [
            ("weight_sync", self.weight_sync == plain.weight_sync),
            ("weight_sync_folder", self.weight_sync_folder.is_none()),
            (
                "weight_sync_steps",
                self.weight_sync_steps == plain.weight_sync_steps,
            ),
            ("max_staleness", self.max_staleness == plain.max_staleness),
            ("partial", self.partial == plain.partial),
            ("check_weights", self.check_weights == plain.check_weights),
            ("sleep_mode", self.sleep_mode == plain.sleep_mode),
            (
                "max_continuations",
                self.max_continuations == plain.max_continuations,
            ),
            (
                "log_prob_tolerance",
                self.log_prob_tolerance == plain.log_prob_tolerance,
            ),
        ] {
            let must = "be absent for a teacher, which receives no weights";
            check(is_default, name, "given", must)?;
        }
        Ok(())
    }

    /// Checks that the policy can send its weights from a GPU or, with `on_gpu` false, from the
    /// CPU.
    ///
    /// # Errors
    ///
    /// Fails if [`Self::weight_sync`] is [`WeightSync::Nccl`] or [`WeightSync::Ipc`] on the CPU.
    pub fn validate_weight_sync(&self, on_gpu: bool) -> Result<()> {
        let must = "be auto, adapter or disk with a policy on the CPU";
        let can = on_gpu || !self.weight_sync.is_from_gpu();
        Ok(check(can, "weight_sync", Name(&self.weight_sync), must)?)
    }

    /// Checks that the policy in this process can sample ahead, for training on a GPU or, with
    /// `on_gpu` false, on the CPU.
    ///
    /// # Errors
    ///
    /// Fails if [`Self::max_staleness`] is above 0 on a GPU.
    pub fn validate_local(&self, on_gpu: bool) -> Result<()> {
        let must = "be 0 with engine local on a GPU, whose stream the training shares";
        let in_turn = !on_gpu || self.max_staleness == 0;
        Ok(check(in_turn, "max_staleness", self.max_staleness, must)?)
    }
}

/// More than a week, and less than the longest duration for any clock.
const MAX_SECONDS: f64 = 1e6;
const MAX_INFLIGHT: usize = 4096;
const MAX_STALENESS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: impl FnOnce(&mut RolloutConfig)) -> String {
        let mut config = RolloutConfig {
            engine: Engine::Vllm,
            base_url: vec!["http://localhost:8000".to_owned()],
            ..RolloutConfig::default()
        };
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn each_contradiction_is_named() {
        for (found, must) in [
            (
                error(|c| c.base_url.clear()),
                "base_url: absent, must be the URL of at least one server with engine vllm",
            ),
            (
                error(|c| c.base_url.push("http://localhost:8000".to_owned())),
                "base_url[1]: \"http://localhost:8000\", must be given once",
            ),
            (
                error(|c| c.base_url = vec!["https://".to_owned()]),
                "base_url[0]: \"https://\", must begin with http:// or https://",
            ),
            (
                error(|c| c.base_url = vec!["http://a/v1/".to_owned()]),
                "base_url[0]: \"http://a/v1/\", must be the root of the server, without /v1",
            ),
            (
                error(|c| c.weight_sync_steps = 2),
                "weight_sync_steps: 2, must be at most max_staleness + 1",
            ),
            (
                error(|c| c.max_staleness = usize::MAX),
                "max_staleness: 18446744073709551615, must be at most 1024: the completions of as many steps wait in memory",
            ),
            (
                error(|c| (c.max_staleness, c.weight_sync) = (1, WeightSync::None)),
                "max_staleness: 1, must be 0 with weight_sync none: a fixed policy is one update older after each step",
            ),
            (
                error(|c| (c.engine, c.check_weights) = (Engine::Sglang, true)),
                "check_weights: true, must be false with engine sglang, which names no checksums",
            ),
            (
                error(|c| (c.weight_sync, c.check_weights) = (WeightSync::Adapter, true)),
                "check_weights: true, must be false with weight_sync adapter",
            ),
            (
                error(|c| (c.engine, c.weight_sync) = (Engine::Sglang, WeightSync::Nccl)),
                "weight_sync: nccl, must be auto, adapter or disk with engine sglang: only vllm joins",
            ),
            (
                error(|c| (c.engine, c.weight_sync) = (Engine::Sglang, WeightSync::Ipc)),
                "weight_sync: ipc, must be auto, adapter or disk with engine sglang: only vllm joins",
            ),
            (
                error(|c| {
                    c.weight_sync = WeightSync::Ipc;
                    c.base_url.push("http://localhost:8001".to_owned());
                }),
                "base_url: 2 servers, must be one with weight_sync ipc: it shares the GPU of the policy",
            ),
            (
                error(|c| (c.engine, c.sleep_mode) = (Engine::Sglang, true)),
                "sleep_mode: true, must be false with engine sglang: only vllm sleeps",
            ),
            (
                error(|c| (c.engine, c.sleep_mode) = (Engine::Local, true)),
                "sleep_mode: true, must be false with engine local: only vllm sleeps",
            ),
            (
                error(|c| (c.weight_sync, c.sleep_mode) = (WeightSync::Adapter, true)),
                "sleep_mode: true, must be false with weight_sync adapter, which leaves out the weights that the server loses",
            ),
            (
                error(|c| (c.weight_sync, c.sleep_mode) = (WeightSync::Nccl, true)),
                "sleep_mode: true, must be false with weight_sync nccl, which needs a GPU of its own for the server",
            ),
            (
                error(|c| (c.weight_sync, c.sleep_mode) = (WeightSync::None, true)),
                "sleep_mode: true, must be false with weight_sync none, after which the server has no weights",
            ),
            (
                error(|c| (c.max_staleness, c.sleep_mode) = (1, true)),
                "sleep_mode: true, must be false with max_staleness above 0, for which the server samples while the policy trains",
            ),
            (
                error(|c| {
                    (c.max_staleness, c.in_flight_updates) = (1, true);
                    c.sleep_mode = true;
                }),
                "sleep_mode: true, must be false with in_flight_updates, for which the server samples while the policy trains",
            ),
            (
                error(|c| c.engine = Engine::Local),
                "base_url: given, must be absent with engine local, which needs no server",
            ),
            (
                error(|c| (c.engine, c.weight_sync) = (Engine::Openai, WeightSync::Disk)),
                "weight_sync: disk, must be none with engine openai, which takes no weights",
            ),
            (
                error(|c| c.request_timeout = f64::INFINITY),
                "request_timeout: inf, must be above 0 and at most 1e6 seconds",
            ),
        ] {
            assert_eq!(found, must);
        }
    }

    #[test]
    fn a_local_policy_draws_ahead_on_the_cpu_only() {
        let ahead = RolloutConfig {
            max_staleness: 1,
            ..RolloutConfig::default()
        };
        ahead.validate_local(false).unwrap();
        RolloutConfig::default().validate_local(true).unwrap();
        assert_eq!(
            ahead.validate_local(true).unwrap_err().to_string(),
            "max_staleness: 1, must be 0 with engine local on a GPU, whose stream the training shares"
        );
    }

    #[test]
    fn a_url_may_stand_alone() {
        let read = |text: &str| serde_json::from_str::<RolloutConfig>(text);
        let one = read(r#"{"engine": "vllm", "base_url": "http://a"}"#).unwrap();
        assert_eq!(one.base_url, ["http://a"]);
        assert_eq!(read(r#"{"base_url": null}"#).unwrap().base_url.len(), 0);
        assert_eq!(
            read(r#"{"base_url": ["http://a", "http://b"]}"#)
                .unwrap()
                .base_url
                .len(),
            2
        );
        assert!(read(r#"{"base_url": 8}"#).is_err());
    }
}
