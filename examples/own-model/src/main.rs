//! A custom model made of Candle operations in the complete trainer: it trains, samples completions
//! with a cache, is evaluated, saved, and resumed.
//!
//! The task: after three digits, write the largest and then the smallest. The reward is the
//! fraction of correct digits.
//!
//!     own-model [FOLDER [STEPS [SAVE_STEPS]]]
//!
//! With a folder, the run saves a checkpoint there every SAVE_STEPS steps, and resumes from the
//! last one.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_grpo_nn::{
    Decoding, LanguageModel, ModelConfig, PackedTokens, Parameters, SequenceStates,
};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::run::Checkpoints;
use candle_grpo_train::{
    Prompt, Sample, SamplingConfig, TrainConfig, Trainer, TrainerParts, default_device, evaluate,
};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Everything except the weights. A checkpoint stores it as `config.json`.
#[derive(Clone, Serialize, Deserialize)]
struct PolicyConfig {
    vocabulary: usize,
    positions: usize,
    width: usize,
}

/// One attention block and one feed-forward layer. Clones share the weights.
#[derive(Clone)]
struct Policy {
    embedding: Tensor,
    positions: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    inner: Linear,
    back: Linear,
    output: Tensor,
}

/// The keys and values `[B, S, W]` of the tokens so far.
type Cache = Option<(Tensor, Tensor)>;

impl ModelConfig for PolicyConfig {
    type Model = Policy;

    fn build(&self, vb: VarBuilder) -> candle_core::Result<Policy> {
        let width = self.width;
        Ok(Policy {
            embedding: vb.get((self.vocabulary, width), "embedding")?,
            positions: vb.get((self.positions, width), "positions")?,
            query: linear(width, width, vb.pp("query"))?,
            key: linear(width, width, vb.pp("key"))?,
            value: linear(width, width, vb.pp("value"))?,
            inner: linear(width, 4 * width, vb.pp("inner"))?,
            back: linear(4 * width, width, vb.pp("back"))?,
            output: vb.get((self.vocabulary, width), "output")?,
        })
    }

    fn vocab_size(&self) -> usize {
        self.vocabulary
    }

    fn max_positions(&self) -> usize {
        self.positions
    }
}

impl Policy {
    /// Computes the hidden states `[B, S, W]` of `ids` `[B, S]`, which come after the tokens in
    /// `cache`, and adds their keys and values to it.
    fn forward(&self, ids: &Tensor, cache: &mut Cache) -> candle_core::Result<Tensor> {
        let ((batch, new), width) = (ids.dims2()?, self.positions.dim(1)?);
        let past = match cache {
            Some((keys, _)) => keys.dim(1)?,
            None => 0,
        };
        let x = self
            .embedding
            .index_select(&ids.flatten_all()?, 0)?
            .reshape((batch, new, width))?
            .broadcast_add(&self.positions.narrow(0, past, new)?)?;
        let (mut keys, mut values) = (self.key.forward(&x)?, self.value.forward(&x)?);
        if let Some((past_keys, past_values)) = cache {
            keys = Tensor::cat(&[past_keys, &keys], 1)?;
            values = Tensor::cat(&[past_values, &values], 1)?;
        }
        let places = Tensor::arange(0u32, (past + new) as u32, ids.device())?;
        let own = places.narrow(0, past, new)?.reshape((new, 1))?;
        let later = places.reshape((1, past + new))?.broadcast_gt(&own)?;
        let hidden = (later.to_dtype(DType::F32)? * -1e9)?;
        let scores = self.query.forward(&x)?.matmul(&keys.transpose(1, 2)?)?;
        let scores = (scores / (width as f64).sqrt())?.broadcast_add(&hidden)?;
        // candle_nn::ops::softmax_last_dim would break the graph, and the trainer would name the
        // variables without a gradient.
        let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
        let x = (&x + weights.matmul(&values)?)?;
        *cache = Some((keys, values));
        &x + self.back.forward(&self.inner.forward(&x)?.gelu()?)?
    }
}

impl LanguageModel for Policy {
    fn hidden_states(&self, tokens: &PackedTokens) -> candle_core::Result<Tensor> {
        tokens.rows_of(&self.forward(&tokens.right_padded()?, &mut None)?)
    }

    fn output_weight(&self) -> &Tensor {
        &self.output
    }

    fn output_name(&self) -> &str {
        "output"
    }

    // Optional: without it, each new token takes a pass over all tokens before it.
    fn decoding(&self) -> candle_core::Result<Box<dyn Decoding + '_>> {
        let step = |new: &mut [(Cache, &[u32])]| {
            let mut logits = Vec::with_capacity(new.len());
            for (cache, tokens) in new {
                let ids = Tensor::new(*tokens, self.output.device())?.unsqueeze(0)?;
                let hidden = self.forward(&ids, cache)?.narrow(1, tokens.len() - 1, 1)?;
                logits.push(hidden.squeeze(1)?.matmul(&self.output.t()?)?);
            }
            Tensor::cat(&logits, 0)
        };
        Ok(Box::new(SequenceStates::new(step)))
    }
}

/// Random weights from a seed, because Candle's CPU device cannot be seeded.
fn random_parameters(config: &PolicyConfig, seed: u64, device: &Device) -> Result<Parameters> {
    let variables = VarMap::new();
    config.build(VarBuilder::from_varmap(&variables, DType::F32, device))?;
    let variables = variables.data().lock().expect("no other thread").clone();
    let parameters = Parameters::from_variables(variables, device)?;
    let mut rng = StdRng::seed_from_u64(seed);
    for (_, variable) in parameters.iter() {
        let width = variable.dims().last().copied().unwrap_or(1);
        let bound = (width as f32).powf(-0.5);
        let values: Vec<f32> = (0..variable.elem_count())
            .map(|_| rng.random_range(-bound..bound))
            .collect();
        variable.set(&Tensor::from_vec(values, variable.shape(), device)?)?;
    }
    Ok(parameters)
}

fn reward(sample: &Sample) -> f32 {
    let (mut digits, answer): (Vec<char>, _) = (sample.prompt.chars().collect(), sample.completion);
    digits.sort_unstable();
    let expected = [digits[2], digits[0]].into_iter().zip(answer.chars());
    expected.filter(|(a, b)| a == b).count() as f32 / 2.
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let checkpoints = args
        .next()
        .map(|folder| Checkpoints::new(Path::new(&folder)));
    let mut number = |default: usize| args.next().map_or(Ok(default), |text| text.parse());
    let (steps, save_steps) = (number(150)?, number(50)?);

    let tokenizer = character_tokenizer("0123456789")?;
    let config = PolicyConfig {
        vocabulary: tokenizer.get_vocab_size(true),
        positions: 5,
        width: 32,
    };
    let prompts = (0..1000u64)
        .map(|i| Prompt::new(i, &format!("{i:03}"), Value::Null, &tokenizer))
        .collect::<Result<Vec<_>>>()?;
    let (held_out, prompts): (Vec<_>, Vec<_>) = prompts.into_iter().partition(|p| p.index % 9 == 4);

    let mut settings = TrainConfig {
        prompts_per_step: 32,
        num_generations: 8,
        micro_batch_size: 256,
        sampling: SamplingConfig {
            max_new_tokens: 2,
            seed: 1,
            ..SamplingConfig::default()
        },
        ..TrainConfig::default()
    };
    settings.optimizer.learning_rate = 5e-3;
    let greedy = SamplingConfig {
        greedy: true,
        ..settings.sampling.clone()
    };
    let parameters = random_parameters(&config, 1, &default_device()?)?;
    let mut trainer = Trainer::new(TrainerParts::new(
        config, parameters, tokenizer, prompts, reward, settings,
    ))?;
    let latest = match &checkpoints {
        Some(checkpoints) => checkpoints.latest()?.checkpoint,
        None => None,
    };
    if let Some(checkpoint) = latest {
        trainer.load_state(&checkpoint.path)?;
        println!("resumed after step {}", trainer.steps());
    }
    while trainer.steps() < steps {
        let metrics = trainer.step()?;
        let step = metrics.step;
        if step % 25 == 0 {
            println!("step {step:3}: reward {:.2}", metrics.reward_mean);
        }
        if let Some(checkpoints) = &checkpoints
            && (step % save_steps == 0 || step == steps)
        {
            checkpoints.write(step, |folder| trainer.write_custom_checkpoint(folder))?;
            println!("saved step {step}");
        }
    }
    let sampler = trainer.sampler(greedy)?;
    let (reward, tokenizer) = (trainer.reward(), trainer.tokenizer());
    let reward = evaluate(&sampler, &held_out, 1, reward, tokenizer, 0)?.reward_mean();
    println!("held-out prompts: reward {reward:.2}");
    // Random digits have 0.09.
    ensure!(steps < 150 || reward > 0.4, "the policy did not learn");
    trainer.finish().context("the end of the run")
}
