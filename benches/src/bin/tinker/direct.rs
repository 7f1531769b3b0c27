//! The loop without a server.

use anyhow::{Context, Result};
use candle_core::Device;
use candle_grpo_loss::surrogate::Clip;
use candle_grpo_loss::{Aggregation, PolicyLoss};
use candle_grpo_nn::optim::DecayRule;
use candle_grpo_nn::{
    ActivationCheckpointing, AdamWConfig, BaseWeights, ComputeDType, DecoderConfig, Lora,
    LoraConfig, Parameters,
};
use candle_grpo_train::learn::TargetRow;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{
    Completion, CompletionSeed, GenerationBatch, Generator, LocalGenerator, PolicyWeights,
    PromptRequest,
};
use candle_grpo_train::{Actor, ActorConfig, Pretrained, SamplingConfig};

use crate::{
    Drawn, GROUP, LEARNING_RATE, MICRO_BATCH_TOKENS, PROMPTS, RANK, SEED, TOKENS, prompts, rows,
    seed,
};

/// The policy and its optimizer.
pub(crate) struct Direct {
    model: DecoderConfig,
    base: Parameters,
    actor: Actor,
}

/// The loss `importance_sampling`.
fn policy_loss() -> PolicyLoss {
    PolicyLoss {
        surrogate: Clip::asymmetric(1., f64::MAX).into(),
        aggregation: Aggregation::TokenSum,
        log_ratio_clamp: None,
        ..PolicyLoss::default()
    }
}

impl Direct {
    pub(crate) fn new(pretrained: &Pretrained) -> Result<Self> {
        let (model, dtype) = (pretrained.model.clone(), ComputeDType::F32);
        let base = pretrained.parameters.clone();
        let base = base.frozen_as(&model, BaseWeights::Stored, dtype.into())?;
        let lora = LoraConfig::all_linear(RANK, 32.);
        let adapters = Lora::init(lora, &model, SEED, &Device::Cpu)?;
        let config = ActorConfig {
            policy_loss: policy_loss(),
            optimizer: AdamWConfig {
                learning_rate: LEARNING_RATE,
                beta2: 0.95,
                epsilon: 1e-12,
                weight_decay: 0.,
                decay: DecayRule::All,
                ..AdamWConfig::default()
            },
            temperature: 1.,
            activation_checkpointing: ActivationCheckpointing::default(),
            activation_offloading: false,
            compute_dtype: dtype,
            router_aux_loss_coef: 0.,
            distillation_loss: None,
        };
        Ok(Self {
            actor: Actor::with_adapters(model.clone(), base.clone(), adapters, config)?,
            model,
            base,
        })
    }

    /// Makes a step. Returns its samples.
    pub(crate) fn step(&mut self, step: u64) -> Result<Vec<Drawn>> {
        let prompts = prompts();
        let drawn = self.sample(&prompts, step)?;
        let groups = prompts.iter().zip(drawn.chunks(GROUP));
        let rows: Vec<TargetRow> = groups.flat_map(|(p, group)| rows(p, group)).collect();
        let loss = policy_loss();
        self.actor
            .forward_backward_targets(&rows, &loss, MICRO_BATCH_TOKENS)?;
        self.actor.clip_grad_and_step(f64::INFINITY)?;
        Ok(drawn)
    }

    fn sample(&self, prompts: &[Vec<u32>], step: u64) -> Result<Vec<Drawn>> {
        let weights = PolicyWeights {
            version: 0,
            model: &self.model,
            parameters: &self.base,
            adapters: self.actor.adapters(),
        };
        let generator = LocalGenerator::in_dtype(&weights, ComputeDType::F32)?;
        let requests = prompts
            .iter()
            .enumerate()
            .map(|(at, prompt)| PromptRequest {
                tokens: prompt,
                seeds: (0..GROUP as u64)
                    .map(|sample| CompletionSeed {
                        seed: seed(step, at),
                        stream: 0,
                        prompt: 0,
                        sample,
                        turn: 0,
                    })
                    .collect(),
                max_new_tokens: TOKENS,
            });
        let requests: Vec<PromptRequest<'_>> = requests.collect();
        let sampling = SamplingConfig {
            max_new_tokens: TOKENS,
            max_batch_size: PROMPTS * GROUP,
            ..SamplingConfig::default()
        };
        let batch = GenerationBatch {
            prompts: &requests,
            sampling: &sampling,
            decode: None,
            progress: &NoProgress,
            records_experts: false,
            partial: None,
        };
        let mut all = vec![Drawn::default(); PROMPTS * GROUP];
        let mut deliver = |place: usize, completion: Completion| {
            *all.get_mut(place).context("a place in the batch")? = Drawn {
                log_probs: completion.log_probs.unwrap_or(completion.drawn_log_probs),
                tokens: completion.tokens,
            };
            Ok(())
        };
        generator.generate(&batch, &mut deliver)?;
        Ok(all)
    }
}
