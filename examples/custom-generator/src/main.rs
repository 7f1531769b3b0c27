//! A custom generator: one completion in each group is a demonstration, and the policy samples the
//! others. The task: continue a letter with the next six in the alphabet. Only a completely correct
//! answer gets a reward, and a random policy gives one in 531,441 completions.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator};
use candle_grpo_train::{
    Completion, FinishReason, Generator, Prompt, Sample, TrainConfig, Trainer, TrainerParts,
    default_device, evaluate,
};
use serde_json::Value;

const LETTERS: &str = "abcdefgh";
const LENGTH: usize = 6;

struct Demonstrations(LocalGenerator);

impl Generator for Demonstrations {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let mut prompts = batch.prompts.to_vec();
        let (mut place, mut drawn) = (0, Vec::new());
        for prompt in &mut prompts {
            deliver(place, demonstration(prompt.tokens[0]))?;
            prompt.seeds.remove(0);
            drawn.extend(place + 1..=place + prompt.seeds.len());
            place += 1 + prompt.seeds.len();
        }
        let batch = GenerationBatch {
            prompts: &prompts,
            ..*batch
        };
        self.0
            .generate(&batch, &mut |at, completion| deliver(drawn[at], completion))
    }
}

/// The letters after `letter`. Token 0 is the end token, 1 is "a".
fn demonstration(letter: u32) -> Completion {
    let letters = LETTERS.len() as u32;
    Completion {
        tokens: (letter..).map(|x| 1 + x % letters).take(LENGTH).collect(),
        // Sampled with certainty; the trainer computes the policy's log-probs.
        drawn_log_probs: vec![0.; LENGTH],
        log_probs: None,
        experts: None,
        written: None,
        weight_versions: vec![0; LENGTH],
        finish_reason: FinishReason::Length,
    }
}

fn reward(sample: &Sample) -> f32 {
    let expected = demonstration(sample.prompt_tokens[0]);
    f32::from(u8::from(expected.tokens == sample.completion_tokens))
}

/// Trains, and returns the fraction of correct greedy answers.
fn train(with_demonstrations: bool) -> Result<f64> {
    let model = DecoderConfig {
        vocab_size: 1 + LETTERS.len(),
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        ..DecoderConfig::default()
    };
    let parameters = Parameters::init(&model, 1, &default_device()?)?;
    let policy = LocalGenerator::new(&model, &parameters)?;
    let tokenizer = character_tokenizer(LETTERS)?;
    let prompts = (0..).zip(LETTERS.split_inclusive(|_| true));
    let prompts = prompts.map(|(i, letter)| Prompt::new(i, letter, Value::Null, &tokenizer));
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let mut config = TrainConfig::default();
    config.sampling.max_new_tokens = LENGTH;
    config.prompts_per_step = LETTERS.len();
    config.optimizer.learning_rate = 3e-3;
    let (letters, mut greedy) = (prompts.clone(), config.sampling.clone());
    greedy.greedy = true;
    let mut parts = TrainerParts::new(model, parameters, tokenizer, prompts, reward, config);
    if with_demonstrations {
        parts.generator = Some(Arc::new(Demonstrations(policy)));
    }
    let mut trainer = Trainer::new(parts)?;
    for _ in 0..150 {
        trainer.step()?;
    }
    let sampler = trainer.actor().sampler(greedy)?;
    Ok(evaluate(&sampler, &letters, 1, &reward, trainer.tokenizer(), 0)?.reward_mean())
}

fn main() -> Result<()> {
    let (without, with) = (train(false)?, train(true)?);
    println!("correct answers: {without} without demonstrations, {with} with one in each group");
    ensure!(with >= 0.9, "the policy did not learn from demonstrations");
    Ok(())
}
