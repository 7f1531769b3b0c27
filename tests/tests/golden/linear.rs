//! `linear_log_prob` and `linear_grpo_loss`: from hidden states and the output weight.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Tensor, Var};
use candle_grpo_kernels::soft_cap;
use candle_grpo_loss::{
    LinearLogProb, LogProbOptions, PolicyBatch, PolicyLossOutput, TokenLogProbs,
    distribution_statistics, linear_log_prob, linear_policy_loss,
};

use crate::case::{Case, Outputs, Ran};
use crate::log_prob;
use crate::policy_loss::{Setup, Tensors, trl};

/// The output layer of a case.
struct Layer {
    hidden: Var,
    weight: Var,
    bias: Option<Var>,
}

impl Layer {
    fn read(case: &Case) -> Result<Self> {
        Ok(Self {
            hidden: case.variable("hidden")?,
            weight: case.variable("weight")?,
            bias: case
                .optional("bias")
                .map(|b| Var::from_tensor(&b))
                .transpose()?,
        })
    }

    fn log_probs(&self, case: &Case) -> Result<TokenLogProbs> {
        Ok(linear_log_prob(
            &self.hidden,
            &self.weight,
            self.bias.as_deref(),
            &case.input("targets")?,
            case.config.number("temperature")?,
            LogProbOptions::default(),
        )?)
    }

    fn variables(&self) -> Vec<(&'static str, &Var)> {
        let mut variables = vec![("hidden", &self.hidden), ("weight", &self.weight)];
        if let Some(bias) = &self.bias {
            variables.push(("bias", bias));
        }
        variables
    }
}

/// Log-probs and statistics of capped logits.
fn chunked(case: &Case) -> Result<Ran> {
    case.config.ignore(&["chunk_size"]);
    let layer = Layer::read(case)?;
    let scale = case.config.number("logit_scale")?;
    let cap = case.config.optional_number("softcap")?;
    let temperature = case.config.number("temperature")?;
    let targets = case.input("targets")?;
    // A factor of the logits is one of hidden states and bias.
    let hidden = (layer.hidden.as_tensor() * scale)?;
    let bias = layer.bias.as_ref().map(|b| b.as_tensor() * scale);
    let bias = bias.transpose()?;
    let options = LogProbOptions {
        logit_cap: cap,
        ..Default::default()
    };
    let tokens = linear_log_prob(
        &hidden,
        &layer.weight,
        bias.as_ref(),
        &targets,
        temperature,
        options,
    )?;
    let mut logits = hidden.detach().matmul(&layer.weight.detach().t()?)?;
    if let Some(bias) = &bias {
        logits = logits.broadcast_add(&bias.detach())?;
    }
    let statistics = distribution_statistics(&soft_cap(&logits, cap)?, &targets, temperature)?;
    let outputs = log_prob::outputs(case, &tokens, &layer.variables())?;
    Ok(outputs.map(|outputs| {
        outputs
            .out("log_sum_squared_probs", &statistics.log_sum_squared_probs)
            .out("mean_logit", &statistics.mean_logit)
            .out("is_top1", &statistics.is_top1)
    }))
}

pub(crate) fn log_prob(case: &Case) -> Result<Ran> {
    if case.variant == "trl_chunked" {
        return chunked(case);
    }
    ensure!(
        ["torch", "verl_fused", "liger_chunked"].contains(&case.variant.as_str()),
        "unknown variant"
    );
    case.config
        .ignore(&["batch", "bias", "dtype", "chunk_size"]);
    let layer = Layer::read(case)?;
    let tokens = layer.log_probs(case)?;
    log_prob::outputs(case, &tokens, &layer.variables())
}

/// In a graph, and in one call.
pub(crate) fn grpo_loss(case: &Case) -> Result<Ran> {
    ensure!(case.variant.starts_with("liger_"), "unknown variant");
    case.config.ignore(&["bias", "dtype", "chunk_size"]);
    let layer = Layer::read(case)?;
    let log_probs = layer.log_probs(case)?.log_probs;
    let mut tensors = Tensors::with_log_probs(case, Var::from_tensor(&log_probs)?)?;
    tensors.ref_log_probs = reference(case)?;
    let setup = trl::setup(case, &tensors)?;
    if let Some(reason) = &setup.defect {
        return Ok(Err(reason.clone()));
    }
    let output = setup.compute_with(&setup.loss, &tensors, &log_probs)?;
    let gradients = Outputs::default().gradients(&output.loss, &layer.variables())?;
    case.compare(&outputs(case, gradients, output, &setup, &tensors)?)
        .context("in a graph")?;

    let (output, gradients) = one_call(case, &layer, &setup, &tensors)?;
    Ok(Ok(outputs(case, gradients, output, &setup, &tensors)?))
}

/// The loss and its gradients from [`linear_policy_loss`].
fn one_call(
    case: &Case,
    layer: &Layer,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<(PolicyLossOutput, Outputs)> {
    let options = LogProbOptions {
        mask: Some(&tensors.mask),
        ..Default::default()
    };
    let prepared = LinearLogProb::new(
        &layer.hidden,
        &layer.weight,
        layer.bias.as_deref(),
        &case.input("targets")?,
        case.config.number("temperature")?,
        options,
    )?;
    let batch = PolicyBatch::without_log_probs(&tensors.advantages, &tensors.mask);
    let batch = setup.fill(batch, tensors)?;
    let result = linear_policy_loss(&setup.loss, &prepared, &batch, &setup.totals)?;
    let mut outputs = Outputs::default();
    let gradients = result.gradients;
    // The peers round the gradient of the weight to its dtype.
    let of_weight = gradients.weight.map(|x| x.to_dtype(layer.weight.dtype()));
    for (name, gradient) in [
        ("hidden", gradients.hidden),
        ("weight", of_weight.transpose()?),
        ("bias", gradients.bias),
    ] {
        if let Some(gradient) = gradient {
            outputs = outputs.gradient(name, &gradient);
        }
    }
    Ok((result.output, outputs))
}

/// The gradients with the loss and its metrics.
fn outputs(
    case: &Case,
    gradients: Outputs,
    output: PolicyLossOutput,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let metrics = output.metrics.to_host()?;
    let gradients = gradients.out("loss", &output.loss);
    trl::metrics(case, gradients, &metrics, setup, tensors)
}

/// The log-probs of the reference policy, given or from its hidden states.
fn reference(case: &Case) -> Result<Option<Tensor>> {
    Ok(match case.config.get("reference").as_str() {
        None => None,
        Some("log_probs") => Some(case.input("ref_log_probs")?),
        Some("hidden") => {
            let tokens = linear_log_prob(
                &case.input("ref_hidden")?,
                &case.input("ref_weight")?,
                case.optional("ref_bias").as_ref(),
                &case.input("targets")?,
                case.config.number("temperature")?,
                LogProbOptions::default(),
            )?;
            Some(tokens.log_probs)
        }
        Some(other) => bail!("unknown reference {other}"),
    })
}
