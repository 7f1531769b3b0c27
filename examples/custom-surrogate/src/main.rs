//! A custom surrogate loss: implement `TokenLoss` and use it in a `Trainer`'s `PolicyLoss`.
//!
//! The task: write vowels. The reward is the fraction of vowels in the completion.

use anyhow::{Result, ensure};
use candle_grpo_loss::surrogate::{SurrogateInputs, TokenLosses};
use candle_grpo_loss::{PolicyLoss, Recipe, Surrogate, TokenLoss};
use candle_grpo_nn::{AdamWConfig, DecoderConfig, Parameters};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::{
    Prompt, Sample, SamplingConfig, TrainConfig, Trainer, TrainerParts, default_device,
};
use serde_json::json;

/// A leaky clip, `-min(r A, c A)` with `c = clip(r) + leak (r - clip(r))`: a clipped token keeps a
/// fraction of its gradient.
#[derive(Debug)]
struct LeakyClip {
    width: f64,
    leak: f64,
}

impl TokenLoss for LeakyClip {
    fn validate(&self) -> candle_core::Result<()> {
        if !(0. ..=1.).contains(&self.leak) {
            candle_core::bail!("leaky_clip.leak: {}, must be from 0 to 1", self.leak);
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> candle_core::Result<TokenLosses> {
        let ratio = inputs.log_ratio.exp()?;
        let clipped = ratio.clamp(1. - self.width, 1. + self.width)?;
        let leaky = ((&clipped * (1. - self.leak))? + (&ratio * self.leak)?)?;
        let gain = (&ratio * inputs.advantages)?;
        let leaky_gain = (leaky * inputs.advantages)?;
        Ok(TokenLosses {
            loss: gain.minimum(&leaky_gain)?.neg()?,
            // A flag's mean over the tokens becomes a metric.
            flags: vec![("clip_fraction", leaky_gain.lt(&gain)?)],
        })
    }
}

fn vowels(sample: &Sample) -> f32 {
    let letters = sample.completion.chars().count().max(1);
    let vowels = sample.completion.chars().filter(|c| "aeiou".contains(*c));
    vowels.count() as f32 / letters as f32
}

fn main() -> Result<()> {
    let alphabet = "abcdefghijklmnopqrstuvwxyz";
    let tokenizer = character_tokenizer(alphabet)?;
    let prompts =
        (0..8).map(|i| Prompt::new(i, &alphabet[i as usize..=i as usize], json!({}), &tokenizer));
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let model: DecoderConfig = serde_json::from_value(json!({
        "vocab_size": tokenizer.get_vocab_size(true), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }))?;
    let parameters = Parameters::init(&model, 1, &default_device()?)?;

    let (width, leak) = (0.2, 0.05);
    let config = TrainConfig {
        prompts_per_step: 8,
        sampling: SamplingConfig {
            max_new_tokens: 8,
            ..SamplingConfig::default()
        },
        recipe: Recipe {
            policy_loss: PolicyLoss {
                surrogate: Surrogate::custom(LeakyClip { width, leak }),
                ..PolicyLoss::grpo()
            },
            ..Recipe::grpo()
        },
        epochs: 2, // the second update is off-policy: the clip takes effect
        optimizer: AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        },
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(TrainerParts::new(
        model, parameters, tokenizer, prompts, vowels, config,
    ))?;
    let mut reward = 0.;
    for step in 0..60 {
        let metrics = trainer.step()?;
        reward = metrics.reward_mean;
        if step % 10 == 0 {
            let clipped = metrics.policy.get("clip_fraction").copied().unwrap_or(0.);
            println!("step {step:2}: reward {reward:.2}, clipped {clipped:.3}");
        }
    }
    ensure!(reward > 0.8, "the policy did not learn to write vowels");
    Ok(())
}
