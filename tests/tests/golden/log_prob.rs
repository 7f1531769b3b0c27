//! `log_prob`: log-probs, entropies and log-sum-exps of logits.

use anyhow::{Result, ensure};
use candle_core::Var;
use candle_grpo_loss::{LogProbOptions, TokenLogProbs, log_prob, sum_of_squared_probs};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    case.config.ignore(&["batch", "logits_dtype"]);
    let logits = case.variable("logits")?;
    let temperature = case.config.number("temperature")?;
    if case.variant == "verl_sum_pi_squared" {
        let sums = sum_of_squared_probs(&logits, temperature)?;
        let loss = (&sums * case.input("upstream")?)?.sum_all()?;
        let outputs = Outputs::default().out("sum_pi_squared", &sums);
        return Ok(Ok(outputs.gradients(&loss, &[("logits", &logits)])?));
    }
    ensure!(
        ["torch", "verl", "twinkle", "openrlhf", "roll"].contains(&case.variant.as_str()),
        "unknown variant"
    );
    let tokens = log_prob(
        &logits,
        &case.input("targets")?,
        temperature,
        LogProbOptions::default(),
    )?;
    outputs(case, &tokens, &[("logits", &logits)])
}

/// The outputs, and the gradients of their sum weighted by the upstreams.
pub(crate) fn outputs(
    case: &Case,
    tokens: &TokenLogProbs,
    variables: &[(&str, &Var)],
) -> Result<Ran> {
    let mut loss = (&tokens.log_probs * case.input("upstream_log_prob")?)?.sum_all()?;
    if let Some(upstream) = case.optional("upstream_entropy") {
        loss = (loss + (&tokens.entropy * upstream)?.sum_all()?)?;
    }
    Ok(Ok(Outputs::default()
        .out("log_prob", &tokens.log_probs)
        .out("entropy", &tokens.entropy)
        .out("lse", &tokens.log_sum_exp)
        .gradients(&loss, variables)?))
}
