//! A custom model of Candle operations that implements `LanguageModel`, trained by the actor of
//! candle-grpo.
//!
//! The task: after three digits, name the largest. The only reward is 1 for that digit.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_core::{D, DType, Tensor, Var};
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_loss::{PolicyLoss, StepTotals};
use candle_grpo_nn::{AdamWConfig, LanguageModel, PackedTokens, Parameters};
use candle_grpo_train::{
    Actor, ActorConfig, ComputeDType, TokenBatch, TrainingBatch, default_device,
};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
use rand::{Rng, SeedableRng, distr::weighted::WeightedIndex, rngs::StdRng};

const DIGITS: usize = 10;
const PROMPT_LENGTH: usize = 3;
const WIDTH: usize = 32;
const PROMPTS: usize = 32;
const NUM_GENERATIONS: usize = 16;

/// One block of attention and one feed-forward layer.
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

impl Policy {
    fn new(vb: VarBuilder) -> Result<Self> {
        let noise = candle_nn::init::Init::Randn {
            mean: 0.,
            stdev: 0.3,
        };
        Ok(Self {
            embedding: vb.get_with_hints((DIGITS, WIDTH), "embedding", noise)?,
            positions: vb.get_with_hints((PROMPT_LENGTH, WIDTH), "positions", noise)?,
            query: linear(WIDTH, WIDTH, vb.pp("query"))?,
            key: linear(WIDTH, WIDTH, vb.pp("key"))?,
            value: linear(WIDTH, WIDTH, vb.pp("value"))?,
            inner: linear(WIDTH, 4 * WIDTH, vb.pp("inner"))?,
            back: linear(4 * WIDTH, WIDTH, vb.pp("back"))?,
            output: vb.get_with_hints((DIGITS, WIDTH), "output", candle_nn::init::ZERO)?,
        })
    }
}

impl LanguageModel for Policy {
    fn hidden_states(&self, tokens: &PackedTokens) -> candle_core::Result<Tensor> {
        let ids = tokens.right_padded()?;
        let (batch, length) = ids.dims2()?;
        let x = self
            .embedding
            .index_select(&ids.flatten_all()?, 0)?
            .reshape((batch, length, WIDTH))?
            .broadcast_add(&self.positions.narrow(0, 0, length)?)?;
        let places = Tensor::arange(0u32, length as u32, ids.device())?;
        let later = places
            .reshape((1, length))?
            .broadcast_gt(&places.reshape((length, 1))?)?;
        let scores = self
            .query
            .forward(&x)?
            .matmul(&self.key.forward(&x)?.transpose(1, 2)?)?;
        let hidden = (later.to_dtype(DType::F32)? * -1e9)?;
        let scores = (scores / (WIDTH as f64).sqrt())?.broadcast_add(&hidden)?;
        // candle_nn::ops::softmax_last_dim would break the graph, and the actor would name the
        // variables without a gradient.
        let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
        let x = (&x + weights.matmul(&self.value.forward(&x)?)?)?;
        let x = (&x + self.back.forward(&self.inner.forward(&x)?.gelu()?)?)?;
        tokens.rows_of(&x)
    }

    fn output_weight(&self) -> &Tensor {
        &self.output
    }

    fn output_name(&self) -> &str {
        "output"
    }
}

fn main() -> Result<()> {
    let device = default_device()?;
    let variables = VarMap::new();
    let policy = Policy::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let variables: BTreeMap<String, Var> = variables
        .data()
        .lock()
        .expect("no other thread has it")
        .clone()
        .into_iter()
        .collect();
    let mut rng = StdRng::seed_from_u64(1);
    for variable in variables.values() {
        init(variable, &mut rng)?;
    }
    let config = ActorConfig {
        policy_loss: PolicyLoss {
            entropy_coef: 0.02,
            ..PolicyLoss::dapo()
        },
        optimizer: AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        },
        temperature: 1.,
        activation_checkpointing: false,
        compute_dtype: ComputeDType::F32,
        router_aux_loss_coef: 0.,
        distillation_loss: None,
    };
    let mut actor = Actor::from_model(
        policy,
        Parameters::from_variables(variables, &device)?,
        config,
    )?;
    let advantage = GroupAdvantage::grpo();

    let mut reward = 0.;
    for step in 0..300 {
        let samples = sample(actor.policy(), &mut rng)?;
        let rewards: Vec<f32> = samples
            .iter()
            .map(|(prompt, answer)| f32::from(prompt.iter().max() == Some(&answer[0])))
            .collect();
        let advantages = advantage
            .compute(&rewards, NUM_GENERATIONS, Scale::Group)?
            .to_device(&device)?;

        let pairs: Vec<(&[u32], &[u32])> = samples
            .iter()
            .map(|(prompt, answer)| (prompt.as_slice(), answer.as_slice()))
            .collect();
        let tokens = TokenBatch::new(&pairs, &device)?;
        let totals = StepTotals::count(&tokens.response_mask)?;
        actor.forward_backward(&TrainingBatch::new(tokens, &advantages), &totals)?;
        let stats = actor.clip_grad_and_step(1.)?;

        let now = rewards.iter().sum::<f32>() / rewards.len() as f32;
        reward += (now - reward) / 10.; // of the last steps
        if step % 50 == 0 {
            println!(
                "step {step:3}: reward {reward:.2}, gradient norm {:.3}",
                stats.grad_norm
            );
        }
    }
    println!("after:    reward {reward:.2}");
    ensure!(
        reward > 0.7,
        "the policy did not learn to tell the largest digit"
    );
    Ok(())
}

/// Draws a variable from a seeded generator, which Candle's CPU device does not have.
fn init(variable: &Var, rng: &mut StdRng) -> Result<()> {
    let bound = (variable.dims().last().map_or(1., |&width| width as f32)).powf(-0.5);
    let values: Vec<f32> = (0..variable.elem_count())
        .map(|_| rng.random_range(-bound..bound))
        .collect();
    variable.set(&Tensor::from_vec(
        values,
        variable.shape(),
        variable.device(),
    )?)?;
    Ok(())
}

/// Prompts with their samples, those of a group side by side.
fn sample(policy: &Policy, rng: &mut StdRng) -> Result<Vec<(Vec<u32>, [u32; 1])>> {
    let prompts: Vec<Vec<u32>> = (0..PROMPTS)
        .map(|_| {
            (0..PROMPT_LENGTH)
                .map(|_| rng.random_range(0..DIGITS as u32))
                .collect()
        })
        .collect();
    let tokens = PackedTokens::new(&prompts, policy.output.device())?;
    let last: Vec<u32> = (1..=PROMPTS as u32)
        .map(|row| row * PROMPT_LENGTH as u32 - 1)
        .collect();
    let hidden = policy
        .hidden_states(&tokens)?
        .detach()
        .index_select(&Tensor::new(last, policy.output.device())?, 0)?;
    let logits = hidden.matmul(&policy.output.detach().t()?)?;
    let probs = candle_nn::ops::softmax(&logits, 1)?.to_vec2::<f32>()?;
    let mut samples = Vec::with_capacity(PROMPTS * NUM_GENERATIONS);
    for (prompt, probs) in prompts.into_iter().zip(probs) {
        let digits = WeightedIndex::new(probs)?;
        for _ in 0..NUM_GENERATIONS {
            samples.push((prompt.clone(), [rng.sample(&digits) as u32]));
        }
    }
    Ok(samples)
}
