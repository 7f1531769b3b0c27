//! A reward model learns a preference from text pairs. Then a policy learns from the reward model
//! alone.
//!
//! The preference: of two texts, the one with more vowels. Neither model sees this rule.
//!
//! `cargo run --release -p candle-grpo-example-reward-model -- SEED` writes the reward model to
//! `target/reward-model-SEED` as a Hugging Face folder, a `LlamaForSequenceClassification`. It
//! writes the untrained policy to `target/reward-model-SEED-policy`.
//! `examples/reward-model/run.yaml` trains the policy with `grpo train`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use candle_grpo_kernels::default_device;
use candle_grpo_loss::PreferenceLoss;
use candle_grpo_nn::{
    AdamW, AdamWConfig, DecoderConfig, Gradients, PackedTokens, Parameters, SequenceClassifier,
    SequenceClassifierConfig,
};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::rewards::{RewardModel, RewardModelConfig};
use candle_grpo_train::{Pretrained, Prompt, SamplingConfig, TrainConfig, Trainer, TrainerParts};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

const ALPHABET: &str = "abcdefgh";
const LENGTH: usize = 8;
const PAIRS: usize = 64;

/// Fraction of vowels. Letter tokens are 1 to 8 in alphabetical order.
fn vowels(text: &[u32]) -> f64 {
    let (a, e) = (1, 5);
    let vowels = text.iter().filter(|&&letter| letter == a || letter == e);
    vowels.count() as f64 / text.len() as f64
}

fn main() -> Result<()> {
    let seed: u64 = match std::env::args().nth(1) {
        Some(seed) => seed.parse().context("SEED: must be a whole number")?,
        None => 0,
    };
    let device = default_device()?;
    let folder = format!("target/reward-model-{seed}");
    let accuracy = train_reward_model(Path::new(&folder), seed, &device)?;
    println!(
        "reward model: {:.1} % of unseen pairs, {folder}",
        100. * accuracy
    );
    let [before, after] = train_policy(Path::new(&folder), seed, &device)?;
    println!(
        "policy: {:.1} % vowels at first, {:.1} % after",
        100. * before,
        100. * after
    );
    ensure!(
        accuracy > 0.9,
        "the reward model did not learn the preference"
    );
    ensure!(
        after > before + 0.4,
        "the policy did not learn from the reward model"
    );
    Ok(())
}

fn decoder() -> DecoderConfig {
    DecoderConfig {
        vocab_size: ALPHABET.len() + 1,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 2 * LENGTH,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}

/// Trains a reward model on random pairs and writes it to `folder`. Returns the fraction of unseen
/// pairs whose preferred text gets the higher score.
fn train_reward_model(folder: &Path, seed: u64, device: &Device) -> Result<f64> {
    let config = SequenceClassifierConfig {
        decoder: decoder(),
        num_labels: 1,
        pad_token_id: Some(0),
    };
    let parameters = config.init(seed, device)?;
    let classifier = SequenceClassifier::new(&config, parameters.var_builder())?;
    let options = AdamWConfig {
        learning_rate: 3e-3,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::new(options, &parameters)?;
    let mut random = StdRng::seed_from_u64(seed);
    for step in 0..150 {
        // The preferred texts first, then the others.
        let scores = classifier.scores(&PackedTokens::new(&pairs(&mut random), device)?)?;
        let (chosen, rejected) = (scores.narrow(0, 0, PAIRS)?, scores.narrow(0, PAIRS, PAIRS)?);
        let loss = PreferenceLoss::default().compute(&chosen.squeeze(1)?, &rejected.squeeze(1)?)?;
        if step % 50 == 0 {
            println!(
                "reward model, step {step:3}: loss {:.3}",
                loss.to_scalar::<f32>()?
            );
        }
        let mut gradients = Gradients::new();
        gradients.accumulate(&loss, &parameters)?;
        drop((scores, chosen, rejected, loss)); // the graph, before the variables change
        gradients.clip_by_global_norm(1.)?;
        optimizer.step(&parameters, &gradients)?;
    }
    let unseen = classifier.scores(&PackedTokens::new(&pairs(&mut random), device)?)?;
    let scores = unseen.flatten_all()?.to_vec1::<f32>()?;
    let right = (0..PAIRS)
        .filter(|&pair| scores[pair] > scores[PAIRS + pair])
        .count();

    fs::create_dir_all(folder)?;
    let keys = serde_json::to_vec_pretty(&config.to_hugging_face(&[])?)?;
    fs::write(folder.join("config.json"), keys)?;
    parameters.save(&folder.join("model.safetensors"))?;
    let saved = character_tokenizer(ALPHABET)?.save(folder.join("tokenizer.json"), true);
    saved.map_err(|error| anyhow::anyhow!("tokenizer.json: {error}"))?;
    Ok(right as f64 / PAIRS as f64)
}

/// Random texts: first the preferred one in each pair, then the others.
fn pairs(random: &mut StdRng) -> Vec<Vec<u32>> {
    let mut draw = || -> Vec<u32> {
        let letters = ALPHABET.len() as u32;
        (0..LENGTH)
            .map(|_| random.random_range(1..=letters))
            .collect()
    };
    let (mut chosen, mut rejected) = (Vec::new(), Vec::new());
    while chosen.len() < PAIRS {
        let (a, b) = (draw(), draw());
        if vowels(&a) != vowels(&b) {
            let (better, worse) = if vowels(&a) > vowels(&b) {
                (a, b)
            } else {
                (b, a)
            };
            chosen.push(better);
            rejected.push(worse);
        }
    }
    chosen.append(&mut rejected);
    chosen
}

/// Trains a policy from random weights, which it writes next to `folder`, with the reward model in
/// `folder` as the only reward. Returns the fraction of vowels in the first and last step.
fn train_policy(folder: &Path, seed: u64, device: &Device) -> Result<[f64; 2]> {
    let tokenizer = character_tokenizer(ALPHABET)?;
    let prompts = ALPHABET.chars().enumerate().map(|(index, letter)| {
        Prompt::new(index as u64, &letter.to_string(), Value::Null, &tokenizer)
    });
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let config = TrainConfig {
        prompts_per_step: ALPHABET.len(),
        num_generations: 16,
        sampling: SamplingConfig {
            max_new_tokens: LENGTH - 1,
            seed,
            ..SamplingConfig::default()
        },
        optimizer: AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        },
        ..TrainConfig::default()
    };
    let policy = Parameters::init(&decoder(), seed ^ 1, device)?;
    let pretrained = Pretrained::new(decoder(), policy.clone(), tokenizer.clone());
    pretrained.save(Path::new(&format!("{}-policy", folder.display())))?;
    let reward = RewardModel::load(RewardModelConfig::new(folder), device)?;
    let mut trainer = Trainer::new(TrainerParts::new(
        decoder(),
        policy,
        tokenizer,
        prompts.clone(),
        reward,
        config,
    ))?;
    let share = |trainer: &Trainer| -> Result<f64> {
        let sampler = trainer.actor().sampler(SamplingConfig {
            max_new_tokens: LENGTH - 1,
            ..SamplingConfig::default()
        })?;
        let rollouts = sampler.sample(&prompts.iter().collect::<Vec<_>>(), 16, 0)?;
        let shares = rollouts
            .iter()
            .map(|rollout| vowels(&rollout.completion.tokens));
        Ok(shares.sum::<f64>() / rollouts.len() as f64)
    };
    let before = share(&trainer)?;
    for step in 0..40 {
        let metrics = trainer.step()?;
        if step % 20 == 0 {
            println!("policy, step {step:3}: score {:.2}", metrics.reward_mean);
        }
    }
    Ok([before, share(&trainer)?])
}
