//! GRPO in a custom Candle training loop, with layers and an optimizer from candle-nn. Only the
//! advantages and the loss come from candle-grpo. This is the smallest loop: no attention,
//! single-token prompts, one update per batch, no reference policy.
//!
//! The task: after a digit, count on for four digits (7 -> 8 9 0 1). The only reward is the
//! fraction of correct digits.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_loss::{
    LogProbOptions, PolicyBatch, PolicyLoss, StepTotals, default_device, ensure_gradients, log_prob,
};
use candle_nn::{AdamW, Embedding, Linear, Module, Optimizer, VarBuilder, VarMap};
use rand::{Rng, SeedableRng, distr::weighted::WeightedIndex, rngs::StdRng};

const DIGITS: usize = 10;
const NUM_GENERATIONS: usize = 16;
const RESPONSE_LENGTH: usize = 4;
const TEMPERATURE: f64 = 1.0;

struct Policy {
    embedding: Embedding,
    output: Linear,
}

impl Policy {
    /// Logits `[.., DIGITS]` for the digit after each of `digits` `[..]`.
    fn logits(&self, digits: &Tensor) -> Result<Tensor> {
        let hidden = self.embedding.forward(digits)?.gelu()?;
        Ok(self.output.forward(&hidden)?)
    }
}

fn main() -> Result<()> {
    // The first GPU in a build with the feature `cuda`, otherwise the CPU.
    let device = default_device()?;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let policy = Policy {
        embedding: candle_nn::embedding(DIGITS, 32, vb.pp("embedding"))?,
        // Zeros: every digit is as likely as any other at first.
        output: Linear::new(
            vb.get_with_hints((DIGITS, 32), "output", candle_nn::init::ZERO)?,
            None,
        ),
    };
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.005)?;

    // What candle-grpo adds: an advantage function and a policy loss.
    let advantage = GroupAdvantage::grpo();
    let policy_loss = PolicyLoss {
        entropy_coef: 0.1, // keeps rare digits in play until they are rewarded
        ..PolicyLoss::dapo()
    };

    let mut rng = StdRng::seed_from_u64(1);
    let mut reward = 0.;
    for step in 0..300 {
        let (inputs, responses, rewards) = sample(&policy, &mut rng)?;
        let advantages = advantage.compute(&rewards, NUM_GENERATIONS, Scale::Group)?;
        let response_mask = responses.ones_like()?;
        let totals = StepTotals::count(&response_mask)?;

        let logits = policy.logits(&inputs)?;
        let tokens = log_prob(&logits, &responses, TEMPERATURE, LogProbOptions::default())?;
        let batch = PolicyBatch::new(&tokens.log_probs, &advantages, &response_mask)
            .entropy(&tokens.entropy);
        let output = policy_loss.compute(&batch, &totals)?;
        let gradients = output.loss.backward()?;
        // An operator without a backward pass would leave variables unchanged.
        ensure_gradients(
            &gradients,
            variables.data().lock().expect("no panic").iter(),
        )?;
        optimizer.step(&gradients)?;

        reward = rewards.iter().sum::<f32>() / rewards.len() as f32;
        if step % 50 == 0 {
            println!("step {step:3}: reward {reward:.2}");
        }
    }
    println!("after:    reward {reward:.2}");
    anyhow::ensure!(reward > 0.9, "the policy did not learn to count");
    Ok(())
}

/// Samples responses. Returns what the policy read and answered, each `[B, T]`, and each sample's
/// reward.
fn sample(policy: &Policy, rng: &mut StdRng) -> Result<(Tensor, Tensor, Vec<f32>)> {
    // The model only sees one digit, so its ten distributions describe it completely.
    let device = policy.output.weight().device();
    let logits = policy.logits(&Tensor::arange(0, DIGITS as u32, device)?)?;
    let probs = candle_nn::ops::softmax(&(logits.detach() / TEMPERATURE)?, 1)?.to_vec2::<f32>()?;
    let (mut inputs, mut responses, mut rewards) = (Vec::new(), Vec::new(), Vec::new());
    // Each digit is a prompt, and its samples are a group.
    for index in 0..DIGITS * NUM_GENERATIONS {
        let (mut digit, mut right) = (index / NUM_GENERATIONS, 0);
        for _ in 0..RESPONSE_LENGTH {
            let next = rng.sample(WeightedIndex::new(&probs[digit])?);
            right += usize::from(next == (digit + 1) % DIGITS);
            inputs.push(digit as u32);
            responses.push(next as u32);
            digit = next;
        }
        rewards.push(right as f32 / RESPONSE_LENGTH as f32);
    }
    let tensor = |digits| Tensor::from_vec(digits, (rewards.len(), RESPONSE_LENGTH), device);
    Ok((tensor(inputs)?, tensor(responses)?, rewards))
}
