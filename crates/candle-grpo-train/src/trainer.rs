//! The training step.

use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_grpo_core::MetricValues;
use candle_grpo_loss::StepTotals;
use candle_grpo_nn::{DecoderConfig, Parameters};
use tokenizers::Tokenizer;

use crate::reward::{decode, score_rollouts};
use crate::{
    Actor, OldLogProbs, Prompt, Reference, RewardFunction, Rollout, Sampler, ShuffledOrder,
    StepMetrics, TokenBatch, TrainConfig, TrainingBatch, sampler_log_probs,
};

/// Trains a policy with rewards: sample, score, compare within groups, update.
pub struct Trainer {
    actor: Actor,
    sampler: Sampler,
    reference: Option<Reference>,
    tokenizer: Tokenizer,
    prompts: Vec<Prompt>,
    order: ShuffledOrder,
    reward: Box<dyn RewardFunction>,
    config: TrainConfig,
    steps: usize,
    skipped_steps: usize,
}

impl Trainer {
    /// A run that starts from `parameters`, of shape `model`.
    ///
    /// Errs if there are no prompts or `config` is not valid.
    pub fn new(
        model: DecoderConfig,
        parameters: Parameters,
        tokenizer: Tokenizer,
        prompts: Vec<Prompt>,
        reward: impl RewardFunction + 'static,
        config: TrainConfig,
    ) -> Result<Self> {
        config.validate()?;
        let actor = Actor::new(model, parameters, config.actor())?;
        let reference = match config.policy_loss.kl {
            Some(_) => Some(actor.reference()?),
            None => None,
        };
        Ok(Self {
            sampler: actor.sampler(config.sampling.clone())?,
            order: ShuffledOrder::new(prompts.len(), config.sampling.seed).context("prompts")?,
            reward: Box::new(reward),
            steps: 0,
            skipped_steps: 0,
            actor,
            reference,
            tokenizer,
            prompts,
            config,
        })
    }

    /// Makes one step.
    ///
    /// If no group has rewards that differ there is nothing to learn: the policy stays as it is, and the step is
    /// counted as skipped.
    pub fn step(&mut self) -> Result<StepMetrics> {
        self.steps += 1;
        self.make_step()
            .with_context(|| format!("step {}", self.steps))
    }

    fn make_step(&mut self) -> Result<StepMetrics> {
        let TrainConfig {
            prompts_per_step,
            num_generations,
            scale,
            ..
        } = self.config;
        let step = self.steps;

        let start = Instant::now();
        let rows = self
            .order
            .slice((step - 1) * prompts_per_step, prompts_per_step);
        let prompts: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
        let rollouts = self
            .sampler
            .sample(&prompts, num_generations, step as u64)?;
        let sampled = Instant::now();

        let texts = decode(&rollouts, &self.tokenizer)?;
        let rewards = score_rollouts(self.reward.as_ref(), &prompts, &rollouts, &texts)?;
        let advantages = self
            .config
            .advantage
            .compute(&rewards, num_generations, scale)?;
        let scored = Instant::now();

        let mut metrics = StepMetrics::of_rollouts(step, &rollouts, &rewards, num_generations);
        if advantages.to_vec1::<f32>()?.iter().all(|&a| a == 0.) {
            metrics.skipped = true;
            self.skipped_steps += 1;
        } else {
            self.train(&rollouts, advantages, &mut metrics)?;
        }
        metrics.seconds.sample = (sampled - start).as_secs_f64();
        metrics.seconds.score = (scored - sampled).as_secs_f64();
        metrics.seconds.train = scored.elapsed().as_secs_f64();
        Ok(metrics)
    }

    fn train(
        &mut self,
        rollouts: &[Rollout],
        advantages: Tensor,
        metrics: &mut StepMetrics,
    ) -> Result<()> {
        let batch = self.training_batch(rollouts, advantages)?;
        let mini_batch_size = self.config.mini_batch_size.unwrap_or(rollouts.len());
        let mini_batches = batch.split(mini_batch_size)?;
        let factor = self.config.schedule.factor(metrics.step);
        self.actor
            .set_learning_rate(self.config.optimizer.learning_rate * factor);
        // A step that failed may have left some.
        self.actor.zero_grad();
        let mut policy = MetricValues::default();
        let mut grad_norms = Vec::new();
        for _ in 0..self.config.epochs {
            for mini_batch in &mini_batches {
                let totals = StepTotals::to_host(&mini_batch.tokens.response_mask)?;
                for micro_batch in mini_batch.split(self.config.micro_batch_size)? {
                    policy.merge(&self.actor.forward_backward(&micro_batch, &totals)?)?;
                }
                let stats = self.actor.clip_grad_and_step(self.config.max_grad_norm)?;
                grad_norms.push(stats.grad_norm);
                metrics.learning_rate = Some(stats.learning_rate);
            }
        }
        metrics.grad_norm = Some(grad_norms.iter().sum::<f64>() / grad_norms.len() as f64);
        metrics.policy = policy
            .iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        Ok(())
    }

    fn training_batch(&self, rollouts: &[Rollout], advantages: Tensor) -> Result<TrainingBatch> {
        let device = self.actor.parameters().device();
        let tokens = TokenBatch::from_rollouts(rollouts, device)?;
        let in_pieces = |log_probs: &dyn Fn(&TokenBatch) -> Result<Tensor>| -> Result<Tensor> {
            let (total, _) = tokens.dims()?;
            let size = self.config.micro_batch_size;
            let pieces = (0..total)
                .step_by(size)
                .map(|start| log_probs(&tokens.narrow(start, size.min(total - start))?))
                .collect::<Result<Vec<_>>>()?;
            Ok(Tensor::cat(&pieces, 0)?)
        };
        let old_log_probs = match self.config.old_log_probs {
            OldLogProbs::Recompute => in_pieces(&|piece| self.actor.log_probs(piece))?,
            OldLogProbs::Sampler => sampler_log_probs(rollouts, device)?,
        };
        let temperature = self.config.sampling.temperature;
        let ref_log_probs = match &self.reference {
            Some(reference) => Some(in_pieces(&|piece| reference.log_probs(piece, temperature))?),
            None => None,
        };
        Ok(TrainingBatch {
            advantages: advantages.to_device(device)?,
            old_log_probs: Some(old_log_probs),
            ref_log_probs,
            tokens,
        })
    }

    /// The policy.
    pub fn actor(&self) -> &Actor {
        &self.actor
    }

    /// The policy, to load a state of its optimiser for example.
    ///
    /// A learning rate set here does not last: every step sets the one that [`TrainConfig::schedule`] says.
    pub fn actor_mut(&mut self) -> &mut Actor {
        &mut self.actor
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The reward function.
    pub fn reward(&self) -> &dyn RewardFunction {
        self.reward.as_ref()
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The number of steps made, the skipped ones included.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The number of steps that made no update.
    pub fn skipped_steps(&self) -> usize {
        self.skipped_steps
    }
}
