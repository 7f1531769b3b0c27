//! The probe that compares a server's log-probs with the policy's.

use anyhow::{Result, ensure};
use candle_grpo_nn::{Decoder, LanguageModel};
use rand_chacha::rand_core::RngCore;

use super::protocol::Drawn;
use crate::random::generator;
use crate::rollout::PolicyWeights;
use crate::sequence::response_forward::response_log_probs;
use crate::{Completion, FinishReason, SamplingConfig, TokenBatch};

/// Number of prompts, and the maximum number of tokens sent from each prompt's end.
const PROMPTS: usize = 4;
const PROMPT_TOKENS: usize = 64;
/// Number of tokens to sample after each.
pub(super) const NEW_TOKENS: usize = 8;
/// The log-prob for the only token that a filter keeps, up to rounding.
const CERTAIN: f32 = -1e-3;

/// The distribution that a server's log-probs belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Distribution {
    /// `softmax(logits / temperature)`.
    Tempered,
    /// The distribution that tokens are sampled from, after temperature, top-k, top-p and min-p.
    Drawn,
}

/// Returns the prompts to send: the ends of `given`, or random tokens if there are none.
pub(super) fn prompts(given: &[Vec<u32>], vocab_size: usize) -> Vec<Vec<u32>> {
    if given.is_empty() {
        let random = |prompt| {
            let mut random = generator(0, 0, prompt, 0);
            let tokens = (0..NEW_TOKENS).map(|_| random.next_u32() % vocab_size as u32);
            tokens.collect()
        };
        return (0..PROMPTS as u64).map(random).collect();
    }
    let end = |prompt: &Vec<u32>| prompt[prompt.len().saturating_sub(PROMPT_TOKENS)..].to_vec();
    given.iter().take(PROMPTS).map(end).collect()
}

/// Returns a probe's distribution: at `temperature`, without filters (0), or with one that keeps
/// the most likely token (1).
pub(super) fn sampling(temperature: f64, top_k: usize) -> SamplingConfig {
    SamplingConfig {
        temperature,
        top_k,
        max_new_tokens: NEW_TOKENS,
        ..SamplingConfig::default()
    }
}

/// Returns whether a filter drops tokens.
pub(super) fn is_filtered(sampling: &SamplingConfig) -> bool {
    sampling.top_k > 0 || sampling.top_p < 1. || sampling.min_p > 0.
}

/// Returns whether all log-probs come from a distribution with a single token.
pub(super) fn are_certain(answers: &[Drawn]) -> bool {
    let log_probs = answers.iter().flat_map(|answer| &answer.log_probs);
    let mut named = log_probs.filter(|log_prob| !log_prob.is_nan());
    named.all(|&log_prob| log_prob > CERTAIN)
}

/// Returns whether the most likely tokens' log-probs at `temperature`, `answers`, equal those at
/// temperature 1, `at_one`.
pub(super) fn ignore_temperature(answers: &[Drawn], at_one: &[Drawn], temperature: f64) -> bool {
    let (mut change, mut least) = (0., 0.);
    for (answer, at_one) in answers.iter().zip(at_one) {
        let pairs = answer.tokens.iter().zip(&at_one.tokens);
        // After a different token, they belong to other prefixes.
        let same = pairs.take_while(|(a, b)| a == b).count();
        let log_probs = answer.log_probs.iter().zip(&at_one.log_probs);
        let named = |(a, b): &(&f32, &f32)| !a.is_nan() && !b.is_nan();
        for (&found, &at_one) in log_probs.take(same).filter(named) {
            let at_one = f64::from(at_one);
            change += (f64::from(found) - at_one).abs();
            least += (least_changed(at_one, temperature) - at_one).abs();
        }
    }
    change < least / 2.
}

/// Converts the most likely token's log-prob at temperature 1 to the closest possible one at
/// `temperature`: as many other tokens as possible are just as likely.
fn least_changed(log_prob: f64, temperature: f64) -> f64 {
    // A rounding error is not a token, and a root would enlarge it.
    const ROUNDING: f64 = 1e-6;
    let odds = (-log_prob).exp() - 1.;
    let alike = (odds + ROUNDING).floor().max(0.);
    let rest = match odds - alike {
        rest if rest > ROUNDING => rest.powf(1. / temperature),
        _ => 0.,
    };
    -(alike + rest).ln_1p()
}

/// Checks an answer from a model with `vocab_size` tokens.
pub(super) fn validate(answer: &Drawn, vocab_size: usize) -> Result<()> {
    let completion = Completion {
        tokens: answer.tokens.clone(),
        drawn_log_probs: answer.named_log_probs(),
        log_probs: None,
        written: None,
        weight_versions: vec![0; answer.tokens.len()],
        finish_reason: FinishReason::Length,
        experts: None,
    };
    completion.validate(vocab_size)
}

/// Returns the mean absolute difference between the log-probs in `answers` to `prompts` and the
/// policy's at `temperature`.
pub(super) fn difference(
    weights: &PolicyWeights<'_>,
    prompts: &[Vec<u32>],
    answers: &[Drawn],
    temperature: f64,
) -> Result<f64> {
    let builder = match weights.adapters {
        Some(adapters) => adapters.detached_var_builder(weights.parameters)?,
        None => weights.parameters.detached_var_builder(),
    };
    let decoder = Decoder::new(weights.model, builder)?.gathering(weights.parameters)?;
    let pairs: Vec<(&[u32], &[u32])> = prompts
        .iter()
        .zip(answers)
        .map(|(prompt, answer)| (prompt.as_slice(), answer.tokens.as_slice()))
        .collect();
    let batch = TokenBatch::new(&pairs, weights.parameters.device())?;
    let policy = response_log_probs(&decoder, &batch, temperature)?.log_probs;
    let policy = policy.to_vec2::<f32>()?;
    let differences: Vec<f64> = answers
        .iter()
        .zip(&policy)
        .flat_map(|(answer, policy)| answer.log_probs.iter().zip(policy))
        .map(|(&server, &policy)| (f64::from(server) - f64::from(policy)).abs())
        .collect();
    ensure!(
        !differences.is_empty(),
        "probe: no tokens, must be at least one"
    );
    Ok(differences.iter().sum::<f64>() / differences.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first weight's log-prob at `temperature`.
    fn log_prob(weights: &[f64], temperature: f64) -> f64 {
        let tempered = |x: &f64| x.powf(1. / temperature);
        let sum: f64 = weights.iter().map(tempered).sum();
        (tempered(&weights[0]) / sum).ln()
    }

    #[test]
    fn a_temperature_changes_the_most_likely_token_at_least_as_much_as_the_bound() {
        for temperature in [0.3, 0.9, 1., 1.4, 5.] {
            // The bound assumes as many tokens with its weight as possible, and one more.
            for weights in [&[1.][..], &[1., 1., 1.], &[1., 0.4], &[1., 1., 0.7]] {
                let bound = least_changed(log_prob(weights, 1.), temperature);
                let found = log_prob(weights, temperature);
                assert!((bound - found).abs() < 1e-12, "{bound} {found} {weights:?}");
            }
            for weights in [
                &[1., 0.5, 0.5][..],
                &[1., 0.9, 0.3, 0.2],
                &[1., 0.1, 0.01, 0.],
            ] {
                let start = log_prob(weights, 1.);
                let bound = least_changed(start, temperature) - start;
                let rounding = 1e-12;
                let found = log_prob(weights, temperature) - start;
                assert!(
                    found.abs() >= bound.abs() - rounding && found * bound >= 0.,
                    "{found} {bound} {weights:?}"
                );
            }
        }
    }
}
