//! The losses of TRL and Liger, which share their options.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, DetachedWeight, EmptySequences, ImportanceLevel, KlLoss,
    PolicyBatch, PolicyLoss, SoftGate, StepTotals, Surrogate, Vespo,
};

use super::{Results, Setup, Tensors, clip, k3, level, number};
use crate::case::{Case, Outputs};

pub(crate) fn setup(case: &Case, tensors: &Tensors) -> Result<Setup> {
    let options = &case.config;
    let loss_type = options.text("loss_type")?;
    let mut totals = StepTotals::to_host(&tensors.mask)?;
    let aggregation = match loss_type.as_str() {
        "grpo" | "sapo" | "rloo" => Aggregation::SeqMeanTokenMean,
        "bnpo" | "dapo" | "cispo" | "vespo" => Aggregation::TokenMean,
        "dr_grpo" => Aggregation::SeqMeanTokenSumNorm {
            length: options.number("max_completion_length")?,
        },
        "luspo" => Aggregation::SeqMeanTokenSum,
        other => bail!("unknown loss_type {other}"),
    };
    if let Some(tokens) = options.optional_number("global_tokens")? {
        totals.tokens = tokens;
    }
    let beta = options.optional_number("beta")?.unwrap_or(0.);
    let bias_correction = if options.flag("bias_corrected_kl")? {
        BiasCorrection::ImportanceLevel
    } else {
        BiasCorrection::Off
    };
    let level = level(case)?;
    let loss = PolicyLoss {
        importance_level: level,
        allow_length_weighting: true,
        log_ratio_clamp: None,
        surrogate: surrogate(case, &loss_type)?,
        off_policy_threshold: options.optional_number("off_policy_mask_threshold")?,
        kl: (beta > 0.).then(|| KlLoss {
            bias_correction,
            ..KlLoss::new(beta, k3(None))
        }),
        entropy_coef: options.optional_number("entropy_coef")?.unwrap_or(0.),
        // TRL averages the entropy over tokens whatever the loss.
        entropy_aggregation: Some(Aggregation::TokenMean),
        aggregation,
        empty_sequences: EmptySequences::Include,
        ..Default::default()
    };
    let mut setup = Setup {
        importance_weights: case.optional("rollout_weights"),
        ..Setup::new(loss, totals)
    };
    let accumulation = options
        .optional_number("gradient_accumulation_steps")?
        .unwrap_or(1.);
    let per_generation = options
        .optional_number("steps_per_generation")?
        .unwrap_or(1.);
    setup.factor = match loss_type.as_str() {
        // Their denominator is that of the generation batch.
        "dapo" | "cispo" | "vespo" => per_generation / accumulation,
        _ => 1. / accumulation,
    };
    let quantile = options
        .optional_number("top_entropy_quantile")?
        .unwrap_or(1.);
    if quantile < 1. {
        setup.policy_mask = Some(top_entropy(tensors, quantile)?);
    }
    if loss_type == "rloo" && totals.sequences < totals.rows {
        setup.defect = Some(
            "TRL's RLOO counts the advantage of a sequence without a token in the loss".to_owned(),
        );
    }
    if case.variant == "liger_luspo" && !(level == ImportanceLevel::Sequence && beta == 0.) {
        setup.defect = Some(
            "Liger's luspo gives a gradient to masked positions unless the loss is one number per sequence"
                .to_owned(),
        );
    }
    Ok(setup)
}

fn surrogate(case: &Case, loss_type: &str) -> Result<Surrogate> {
    let options = &case.config;
    let number = |key: &str| options.number(key);
    Ok(match loss_type {
        "sapo" => {
            options.ignore(&["clip_low", "clip_high", "delta"]);
            SoftGate {
                tau_pos: number("tau_pos")?,
                tau_neg: number("tau_neg")?,
            }
            .into()
        }
        "cispo" => {
            options.ignore(&["clip_low", "delta"]);
            let high = number("clip_high")?;
            let absolute = options.flag("clip_high_is_absolute")?;
            DetachedWeight::at_most(if absolute { high } else { 1. + high }).into()
        }
        "vespo" => {
            options.ignore(&["clip_low", "clip_high", "delta"]);
            Vespo {
                k_pos: number("k_pos")?,
                lambda_pos: number("lambda_pos")?,
                k_neg: number("k_neg")?,
                lambda_neg: number("lambda_neg")?,
            }
            .into()
        }
        _ => clip(case)?.into(),
    })
}

/// 1 where the entropy is at least the quantile of all valid positions.
fn top_entropy(tensors: &Tensors, share: f64) -> Result<Tensor> {
    let Some(entropies) = &tensors.entropies else {
        bail!("no entropies");
    };
    let flags = Mask::new(&tensors.mask)?
        .selected()
        .flatten_all()?
        .to_vec1::<u8>()?;
    let values = entropies
        .flatten_all()?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()?;
    let mut valid: Vec<f64> = values
        .iter()
        .zip(&flags)
        .filter(|(_, f)| **f != 0)
        .map(|(v, _)| *v)
        .collect();
    valid.sort_by(f64::total_cmp);
    let place = (1. - share) * (valid.len() - 1) as f64;
    let (below, above) = (valid[place.floor() as usize], valid[place.ceil() as usize]);
    let threshold = below + (above - below) * place.fract();
    Ok(entropies
        .detach()
        .to_dtype(DType::F64)?
        .ge(threshold - 1e-9)?)
}

pub(crate) fn metrics(
    case: &Case,
    outputs: Outputs,
    results: &Results,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let get = |name: &str| results.metric(name);
    let mut outputs = outputs
        .number("kl", get("kl"))?
        .number("entropy", get("entropy"))?;
    if case.expects("out.policy_loss") {
        let without = PolicyLoss {
            entropy_coef: 0.,
            ..setup.loss.clone()
        };
        let loss = setup.compute(&without, tensors)?.loss;
        outputs = outputs
            .out("policy_loss", &(loss * setup.factor)?)
            .number("entropy_coef", setup.loss.entropy_coef)?;
    }
    if case.expects("out.vespo_weight_mean") {
        // With an advantage of 1 or -1 the loss of a token is phi times its log-prob, but for the sign.
        let advantages = tensors.token_advantages()?;
        let signs = ((advantages.ge(0.)?.to_dtype(DType::F32)? * 2.)? - 1.)?;
        let batch = PolicyBatch::new(&tensors.log_probs, &signs, &tensors.mask);
        let batch = batch.old_log_probs(tensors.old());
        let batch = match &setup.importance_weights {
            Some(weights) => batch.importance_weights(weights),
            None => batch,
        };
        let without = PolicyLoss {
            kl: None,
            entropy_coef: 0.,
            ..setup.loss.clone()
        };
        let terms = without.compute(&batch, &setup.totals)?.tokens;
        let phi = (terms.surrogate.abs()? / tensors.log_probs.detach().abs()?)?;
        // The mean over sequences; the weight of one without a token is 1.
        let empty = number(&results.mask.lengths(DType::F64)?.eq(0.)?)?;
        let weights = (results.row_means(&phi)? + empty)?;
        outputs = outputs.out("vespo_weight_mean", &weights.mean_all()?);
    }
    let ratio = results
        .output
        .tokens
        .log_ratio
        .to_dtype(DType::F64)?
        .exp()?;
    let advantages = tensors.token_advantages()?;
    if let Surrogate::DetachedWeight(weight) = &setup.loss.surrogate {
        let above = number(&ratio.gt(weight.ratio_max.unwrap_or(f64::MAX))?)?;
        let clipped = results.mean(&(above * number(&advantages.gt(0.)?)?)?)?;
        return outputs
            .number("clip_fraction", clipped)?
            .number("clip_fraction_cispo", clipped);
    }
    let Surrogate::Clip(Clip { low, high, .. }) = setup.loss.surrogate else {
        return outputs.number("clip_fraction", 0.);
    };
    let ratio = match case.config.optional_number("delta")? {
        Some(delta) => ratio.minimum(delta)?,
        None => ratio,
    };
    let below = (number(&ratio.lt(1. - low)?)? * number(&advantages.lt(0.)?)?)?;
    let above = (number(&ratio.gt(1. + high)?)? * number(&advantages.gt(0.)?)?)?;
    let (lows, highs) = (results.row_means(&below)?, results.row_means(&above)?);
    if setup.loss.importance_level == ImportanceLevel::SequenceProduct {
        // One number for each sequence, those without a token included.
        return Ok(outputs
            .out("clip_fraction", &(&lows + &highs)?.mean_all()?)
            .out("clip_fraction_low", &lows.mean_all()?)
            .out("clip_fraction_high", &highs.mean_all()?)
            .out("clip_fraction_low_min", &lows.min_all()?)
            .out("clip_fraction_high_max", &highs.max_all()?));
    }
    Ok(outputs
        .number("clip_fraction", results.mean(&(&below + &above)?)?)?
        .number("clip_fraction_low", results.mean(&below)?)?
        .number("clip_fraction_high", results.mean(&above)?)?
        .out("clip_fraction_low_min", &lows.min_all()?)
        .out("clip_fraction_high_max", &highs.max_all()?))
}
