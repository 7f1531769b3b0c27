//! `policy_loss`: log-probs and advantages to a loss, its gradient and its metrics.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Tensor, Var};
use candle_grpo_core::{Mask, MetricValues};
use candle_grpo_loss::{
    Aggregation, Clip, EmptySequences, ImportanceLevel, Kl, KlEstimator, KlLoss, PolicyBatch,
    PolicyLoss, PolicyLossOutput, StepTotals, Surrogate,
};

use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    case.config.ignore(&["masked_positions"]);
    let (peer, name) = case
        .variant
        .split_once('_')
        .context("a variant without a peer")?;
    let setup = match (peer, name) {
        ("verl", "vanilla") => verl(case)?,
        ("roll", "ppo" | "agentic_ppo" | "pg_ppo" | "pg_vanilla") => roll(case)?,
        ("twinkle", "ppo" | "grpo" | "gspo" | "bnpo" | "dr_grpo") => twinkle(case)?,
        _ => return Ok(Err(format!("{} is not there yet", case.variant))),
    };
    let tensors = Tensors::read(case)?;
    let mut batch = PolicyBatch::new(&tensors.log_probs, &tensors.advantages, &tensors.mask);
    batch = match &tensors.old_log_probs {
        Some(old) => batch.old_log_probs(old),
        None => batch,
    };
    batch = match &tensors.ref_log_probs {
        Some(reference) => batch.ref_log_probs(reference),
        None => batch,
    };
    batch = match &tensors.entropies {
        Some(entropy) => batch.entropy(entropy),
        None => batch,
    };
    batch = match &setup.importance_weights {
        Some(weights) => batch.importance_weights(weights),
        None => batch,
    };
    batch = match &setup.sample_weights {
        Some(weights) => batch.sample_weights(weights),
        None => batch,
    };
    let output = setup.loss.compute(&batch, &setup.totals)?;
    let loss = (&output.loss * setup.factor)?;
    let mut variables = vec![("log_probs", &tensors.log_probs)];
    if let Some(entropies) = &tensors.entropies
        && case.expects("grad.entropies")
    {
        variables.push(("entropies", entropies));
    }
    let outputs = Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &variables)?;
    let metrics = output.metrics.to_host()?;
    let outputs = match peer {
        "verl" => verl_metrics(outputs, &metrics)?,
        "roll" => roll_metrics(case, outputs, &output, &setup, &tensors)?,
        "twinkle" => {
            // twinkle clamps the log-ratio in the loss and not in its metrics.
            let unclamped = PolicyLoss {
                log_ratio_clamp: None,
                ..setup.loss.clone()
            };
            let output = unclamped.compute(&batch, &setup.totals)?;
            twinkle_metrics(case, outputs, &output, &tensors)?
        }
        _ => outputs,
    };
    Ok(Ok(outputs))
}

/// The inputs of a case.
struct Tensors {
    log_probs: Var,
    old_log_probs: Option<Tensor>,
    ref_log_probs: Option<Tensor>,
    entropies: Option<Var>,
    advantages: Tensor,
    mask: Tensor,
}

impl Tensors {
    fn read(case: &Case) -> Result<Self> {
        let given = case
            .config
            .get("old_log_probs_given")
            .as_bool()
            .unwrap_or(true);

        Ok(Self {
            log_probs: case.variable("log_probs")?,
            old_log_probs: given.then(|| case.input("old_log_probs")).transpose()?,
            ref_log_probs: case.optional("ref_log_probs"),
            entropies: case
                .optional("entropies")
                .map(|e| Var::from_tensor(&e))
                .transpose()?,
            advantages: case.input("advantages")?,
            mask: case.input("mask")?,
        })
    }
}

/// What a peer's options come to.
struct Setup {
    loss: PolicyLoss,
    totals: StepTotals,
    /// Multiplies the loss at last.
    factor: f64,
    importance_weights: Option<Tensor>,
    sample_weights: Option<Tensor>,
}

fn clip(case: &Case) -> Result<Clip> {
    Ok(Clip {
        low: case.config.number("clip_low")?,
        high: case.config.number("clip_high")?,
        dual_clip: case.config.optional_number("dual_clip")?,
        delta: case.config.optional_number("delta")?,
    })
}

fn level(case: &Case) -> Result<ImportanceLevel> {
    Ok(
        match case.config.text_or("importance_level", "token")?.as_str() {
            "token" => ImportanceLevel::Token,
            "sequence" => ImportanceLevel::Sequence,
            "sequence_sum" => ImportanceLevel::SequenceProduct,
            "segment" => ImportanceLevel::Segment,
            other => bail!("unknown importance level {other}"),
        },
    )
}

/// k3 without a clamp of its input.
fn k3(value_clamp: Option<f64>) -> Kl {
    Kl {
        log_ratio_clamp: None,
        value_clamp,
        ..Kl::new(KlEstimator::K3)
    }
}

fn verl(case: &Case) -> Result<Setup> {
    ensure!(case.config.text("loss")? == "ppo_clip", "unknown loss");
    let mask = Mask::new(&case.input("mask")?)?;
    let mode = case.config.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, Rows::NonEmpty)?;
    Ok(Setup {
        loss: PolicyLoss {
            surrogate: Surrogate::Clip(clip(case)?),
            aggregation,
            ..Default::default()
        },
        totals,
        factor: case.config.number("dp_size")?,
        importance_weights: case.optional("rollout_weights"),
        sample_weights: None,
    })
}

fn verl_metrics(outputs: Outputs, metrics: &MetricValues) -> Result<Outputs> {
    let get = |name: &str| metrics.get(name).unwrap_or_default();
    outputs
        .number("approx_kl", get("approx_kl"))?
        .number("clip_fraction", get("clip_fraction"))?
        .number("clip_fraction_lower", get("dual_clip_fraction"))
}

fn roll(case: &Case) -> Result<Setup> {
    let surrogate = match case.config.text("loss")?.as_str() {
        "ppo_clip" => Surrogate::Clip(clip(case)?),
        "vanilla" => Surrogate::PolicyGradient,
        other => bail!("unknown loss {other}"),
    };
    let mask = Mask::new(&case.input("mask")?)?;
    let mode = case.config.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, Rows::All)?;
    let use_kl = case.config.flag("use_kl_loss")?;
    let coef = case.config.optional_number("kl_coef")?;
    let lengths = mask.lengths(DType::F64)?.squeeze(1)?;
    let sample_weights = if case.config.flag("length_weight")? {
        Some(length_weights(&lengths)?)
    } else {
        None
    };
    Ok(Setup {
        loss: PolicyLoss {
            importance_level: level(case)?,
            log_ratio_clamp: None,
            surrogate,
            loss_coef: case.config.number("rl_coef")?,
            kl: use_kl.then(|| KlLoss {
                coef: coef.unwrap_or_default(),
                kl: k3(Some(10.)),
                bias_correction: false,
            }),
            entropy_coef: case.config.number("entropy_coef")?,
            aggregation,
            ..Default::default()
        },
        totals,
        factor: 1.,
        importance_weights: rollout_correction(case, &mask)?,
        sample_weights,
    })
}

/// `1.5 - (L - min L) / (max L - min L)`, scaled to the mean 1.
fn length_weights(lengths: &Tensor) -> Result<Tensor> {
    let (min, max) = (lengths.min(0)?, lengths.max(0)?);
    let range = ((max - &min)? + 1e-8)?;
    let weights = (lengths.broadcast_sub(&min)?.broadcast_div(&range)?.neg()? + 1.5)?;
    Ok(weights.broadcast_div(&weights.mean_keepdim(0)?)?)
}

/// `exp(old - rollout)` at a level, at most a maximum.
fn rollout_correction(case: &Case, mask: &Mask) -> Result<Option<Tensor>> {
    let level = case.config.text_or("rollout_correction", "off")?;
    let max = case.config.optional_number("rollout_correction_max")?;
    if level == "off" {
        return Ok(None);
    }
    let d = mask.select(&(case.input("old_log_probs")? - case.input("rollout_log_probs")?)?)?;
    let d = match level.as_str() {
        "token" => d,
        "sequence" => d.sum_keepdim(D::Minus1)?,
        "geometric" => (d.sum_keepdim(D::Minus1)? / mask.lengths(d.dtype())?)?,
        other => bail!("unknown rollout_correction {other}"),
    };
    let weight = d.exp()?;
    Ok(Some(match max {
        Some(max) => weight.minimum(max)?,
        None => weight,
    }))
}

/// ROLL aggregates most metrics as it does the loss, and counts the ratios of masked positions too.
fn roll_metrics(
    case: &Case,
    outputs: Outputs,
    output: &PolicyLossOutput,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let mask = Mask::new(&tensors.mask)?;
    let aggregate = |x: &Tensor| {
        setup
            .loss
            .aggregation
            .apply(&x.to_dtype(DType::F32)?, &mask, &setup.totals)
    };
    let terms = &output.tokens;
    let d = &terms.log_ratio;
    let old = tensors.old_log_probs.as_ref().context("no old log-probs")?;
    let token_d = mask.select(&(tensors.log_probs.detach() - old)?)?;
    let (batch, width) = mask.dims()?;
    let sequences = case
        .config
        .optional_number("global_sequences")?
        .unwrap_or(batch as f64);
    let tokens = setup.totals.tokens;
    let unweighted = match &setup.importance_weights {
        Some(weights) => terms
            .surrogate
            .broadcast_mul(&weights.to_dtype(DType::F32)?)?,
        None => terms.surrogate.clone(),
    };
    let mut outputs = outputs
        .out("approx_kl_k2", &aggregate(&(token_d.sqr()? * 0.5)?)?)
        .out("log_ratio", &aggregate(&token_d)?)
        .out("pg_loss", &aggregate(&unweighted)?)
        .out("weighted_pg_loss", &aggregate(&terms.policy)?);
    if let Some(clipped) = &terms.clipped {
        outputs = outputs.out("clip_fraction", &aggregate(clipped)?);
    }
    let reference = case.input("ref_log_probs")?;
    let kl = k3(Some(10.)).per_token(
        &mask.select(&tensors.log_probs)?,
        &mask.select(&reference)?,
        None,
    )?;
    outputs = outputs.out("kl_loss", &aggregate(&kl)?);

    // A sequence ratio stands at every position of its row, a token ratio only at its own.
    let everywhere = if setup.loss.importance_level == ImportanceLevel::Sequence {
        let lengths = mask.lengths(DType::F32)?.maximum(1.)?;
        (d.sum_keepdim(D::Minus1)? / lengths)?.broadcast_as((batch, width))?
    } else {
        d.clone()
    };
    let ratio = everywhere.to_dtype(DType::F64)?.exp()?;
    if let Surrogate::Clip(clip) = &setup.loss.surrogate {
        let fraction = |flags: Tensor| -> Result<Tensor> {
            Ok((flags.to_dtype(DType::F64)?.sum_all()? / tokens)?)
        };
        let above = ratio.gt(1. + clip.high)?;
        let below = ratio.lt(1. - clip.low)?;
        outputs = outputs
            .out("ratio_above_fraction", &fraction(above.clone())?)
            .out("ratio_below_fraction", &fraction(below.clone())?)
            .out("ratio_outside_fraction", &fraction(above.maximum(&below)?)?);
    }
    let counts = StepTotals {
        sequences,
        ..setup.totals
    };
    let samples = if case.variant.starts_with("roll_pg") {
        batch as f64
    } else {
        sequences
    };
    let ratio_mean = Aggregation::SeqMeanTokenMean.apply(&ratio, &mask, &counts)?;
    let weights = match &setup.sample_weights {
        Some(weights) => weights.to_dtype(DType::F64)?,
        None => Tensor::ones(batch, DType::F64, d.device())?,
    };
    let valid = mask
        .lengths(DType::F64)?
        .gt(0.)?
        .to_dtype(DType::F64)?
        .sum_all()?;
    outputs = outputs
        .out("ratio_max", &ratio.max_all()?)
        .out("ratio_min", &ratio.min_all()?)
        .out("sample_weights_max", &weights.max_all()?)
        .out("sample_weights_mean", &weights.mean_all()?)
        .out("sample_weights_min", &weights.min_all()?)
        .out("valid_samples", &valid)
        .out("valid_sample_ratio", &(&valid / samples)?)
        .out("ratio_mean", &ratio_mean)
        .number("total_samples", batch as f64)?;
    if let Some(weights) = &setup.importance_weights
        && let Some(max) = case.config.optional_number("rollout_correction_max")?
    {
        let clipped = weights.ge(max)?;
        outputs = outputs.out("rollout_correction_clip_fraction", &aggregate(&clipped)?);
    }
    Ok(outputs)
}

fn twinkle(case: &Case) -> Result<Setup> {
    let totals = StepTotals::to_host(&case.input("mask")?)?;

    let aggregation = match case.config.text("loss_type")?.as_str() {
        "grpo" | "gspo" => Aggregation::SeqMeanTokenMean,
        "bnpo" => Aggregation::TokenMean,
        "dr_grpo" => Aggregation::SeqMeanTokenSumNorm {
            length: case.config.number("max_completion_length")?,
        },
        "ppo" => match case.config.text("aggregation")?.as_str() {
            "token_mean" => Aggregation::TokenMean,
            "seq_mean_token_mean" => Aggregation::SeqMeanTokenMean,
            other => bail!("unknown aggregation {other}"),
        },
        other => bail!("unknown loss_type {other}"),
    };

    let beta = case.config.number("beta")?;
    Ok(Setup {
        loss: PolicyLoss {
            importance_level: level(case)?,
            log_ratio_clamp: case.config.optional_number("log_ratio_clamp")?,
            surrogate: Surrogate::Clip(clip(case)?),
            kl: (beta > 0.).then(|| KlLoss {
                coef: beta,
                kl: k3(None),
                bias_correction: false,
            }),
            entropy_coef: case.config.number("entropy_coef")?,
            aggregation,
            empty_sequences: EmptySequences::Include,
            ..Default::default()
        },
        totals,
        factor: 1.,
        importance_weights: None,
        sample_weights: None,
    })
}

fn twinkle_metrics(
    case: &Case,
    outputs: Outputs,
    output: &PolicyLossOutput,
    tensors: &Tensors,
) -> Result<Outputs> {
    let metrics = output.metrics.to_host()?;
    let get = |name: &str| metrics.get(name).unwrap_or_default();
    let mask = Mask::new(&tensors.mask)?;
    let mean = |x: &Tensor| -> Result<f64> {
        let sum = mask.select(x)?.to_dtype(DType::F64)?.sum_all()?;
        Ok((sum / mask.count(DType::F64)?)?.to_scalar()?)
    };
    // Of sequences for the sequence ratio, of tokens for the token ratio.
    let counted = if case.variant == "twinkle_gspo" {
        Aggregation::SeqMeanTokenMean
    } else {
        Aggregation::TokenMean
    };
    let totals = StepTotals::to_host(&tensors.mask)?;
    let fraction = |flags: &Tensor| counted.apply(&flags.to_dtype(DType::F64)?, &mask, &totals);
    let clipped = output.tokens.clipped.as_ref().context("no clip")?;
    let advantages = match tensors.advantages.rank() {
        1 => tensors.advantages.unsqueeze(1)?,
        _ => tensors.advantages.clone(),
    };
    let advantages = advantages.broadcast_as(mask.dims()?)?;
    let log_prob = mean(&tensors.log_probs)?;
    let old = mean(tensors.old_log_probs.as_ref().unwrap_or(&tensors.log_probs))?;
    outputs
        .number("approx_kl_k3", get("approx_kl_k3"))?
        .out("clip_fraction", &fraction(clipped)?)
        .out(
            "clip_fraction_low",
            &fraction(&(clipped * advantages.lt(0.)?)?)?,
        )
        .out(
            "clip_fraction_high",
            &fraction(&(clipped * advantages.gt(0.)?)?)?,
        )
        .number("max_ratio", get("token_ratio_max"))?
        .number("max_token_kl_k3", get("approx_kl_k3_max"))?
        .number("mean_log_prob", log_prob)?
        .number("mean_log_ratio", -get("approx_kl"))?
        .number("mean_old_log_prob", old)?
        .number("policy_confidence", log_prob.exp())
}
