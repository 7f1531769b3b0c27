//! The losses of ms-swift.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor, Var};
use candle_grpo_core::schedule::{CoefSchedule, Decay};
use candle_grpo_core::{Kl, KlEstimator, MetricValues};
use candle_grpo_loss::correction::{
    FilterLevel, FilterStatistic, ImportanceWeight, OutOfBounds, RolloutFilter,
};
use candle_grpo_loss::experimental::{FutureKl, GroupContrast};
use candle_grpo_loss::surrogate::{DetachedWeight, Likelihood, SoftGate};
use candle_grpo_loss::{
    Aggregation, EmptySequences, ImportanceLevel, KlLoss, LogProbOptions, Mask, PolicyBatch,
    PolicyLoss, PolicyLossOutput, RolloutCorrection, StepTotals, Surrogate, TeacherTerm,
    TeacherTermForm, log_prob,
};

use super::numbers::{Numbers, flag};
use super::{Tensors, clip, level, metric, unbounded};
use crate::case::{Case, Outputs, Ran};
use crate::rollout_correction::on_tokens;

pub(super) fn run(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let loss_type = case.config.text("loss")?;
    let mask = kept_rows(case, tensors)?;
    let tensors = &Tensors {
        mask,
        ..tensors.clone()
    };
    if loss_type == "real" {
        return real(case, tensors);
    }
    let (loss, totals) = loss(case, &loss_type, tensors)?;
    let batch = PolicyBatch {
        token_weights: weights(case, tensors)?,
        ..batch(tensors, &tensors.advantages)
    };
    let output = loss.compute(&batch, &totals)?;
    let metrics = output.metrics.to_host()?;
    let mut outputs = Outputs::default().number("kl", metric(&metrics, "kl"))?;
    outputs = match loss_type.as_str() {
        "fipo" => outputs
            .number("future_kl_mean", metric(&metrics, "future_kl"))?
            .number(
                "influence_weight_mean",
                metric(&metrics, "influence_weight"),
            )?
            .number(
                "safety_keep_fraction",
                1. - metric(&metrics, "safety_fraction"),
            )?,
        _ => outputs,
    };
    if case.expects("out.clip_fraction") {
        outputs = clip_fractions(case, outputs, &loss, tensors)?;
    }
    let variables = [("log_probs", &tensors.log_probs)];
    Ok(Ok(match case.variant.as_str() {
        "swift_chord" => chord(case, outputs, output, tensors)?,
        "swift_sdar" => sdar(case, outputs, output, tensors)?,
        _ => outputs
            .out("loss", &output.loss)
            .gradients(&output.loss, &variables)?,
    }))
}

fn batch(tensors: &Tensors, advantages: &Tensor) -> PolicyBatch {
    let batch = PolicyBatch::new(&tensors.log_probs, advantages, &tensors.mask);
    PolicyBatch {
        ref_log_probs: tensors.ref_log_probs.clone(),
        teacher_log_probs: tensors.teacher_log_probs.clone(),
        ..batch.old_log_probs(tensors.old())
    }
}

/// The counts of the mask; a mask without a token gives a loss of 0.
fn counts(mask: &Tensor) -> Result<StepTotals> {
    let totals = StepTotals::count(mask)?;
    Ok(StepTotals {
        tokens: totals.tokens.max(1.),
        ..totals
    })
}

fn kl(case: &Case) -> Result<Option<KlLoss>> {
    let beta = case.config.optional_number("beta")?.unwrap_or(0.);
    let k3 = Kl {
        value_clamp: Some(10.),
        ..Kl::new(KlEstimator::K3)
    };
    Ok((beta != 0.).then(|| KlLoss::new(beta, k3)))
}

fn loss(case: &Case, loss_type: &str, tensors: &Tensors) -> Result<(PolicyLoss, StepTotals)> {
    let options = &case.config;
    let mut totals = counts(&tensors.mask)?;
    let surrogate: Surrogate = match loss_type {
        "cispo" => {
            if !options.flag("clip_high_is_absolute")? {
                bail!("a relative bound");
            }
            DetachedWeight {
                allow_max_below_one: true,
                ..DetachedWeight::at_most(options.number("clip_high")?)
            }
            .into()
        }
        "sapo" => SoftGate {
            tau_pos: options.number("tau_pos")?,
            tau_neg: options.number("tau_neg")?,
        }
        .into(),
        "fipo" => FutureKl {
            clip: clip(case)?,
            half_life: options.number("half_life")?,
            weight_clip: options.optional_number("weight_clip")?,
            high_only: options.flag("weight_clip_high_only")?,
            safety_threshold: options.optional_number("safety_threshold")?,
        }
        .into(),
        _ => clip(case)?.into(),
    };
    let aggregation = match loss_type {
        "grpo" | "sapo" => Aggregation::SeqMeanTokenMean,
        "bnpo" => Aggregation::TokenMean,
        "dapo" | "cispo" | "fipo" => {
            totals.tokens = options.number("global_tokens")?;
            Aggregation::TokenMean
        }
        "dr_grpo" => Aggregation::SeqMeanTokenSumNorm {
            length: options.number("max_completion_length")?,
        },
        other => bail!("unknown loss {other}"),
    };
    let loss = PolicyLoss {
        importance_level: level(case)?,
        kl: kl(case)?,
        aggregation,
        empty_sequences: EmptySequences::Include,
        ..unbounded(surrogate)
    };
    Ok((loss, totals))
}

/// The mask without the rows that drifted: they leave the denominators too.
fn kept_rows(case: &Case, tensors: &Tensors) -> Result<Tensor> {
    let threshold = case.config.optional_number("off_policy_mask_threshold")?;
    let Some(threshold) = threshold else {
        return Ok(tensors.mask.clone());
    };
    let x = Numbers::read(tensors)?;
    let sampled = tensors.rollout_log_probs.as_ref();
    let sampled = super::numbers::numbers(sampled.unwrap_or(tensors.old()))?;
    let drift = x.row_means(&x.map(|i| sampled[i] - x.log_probs[i]));
    let rows = x.row_means(&x.advantages).into_iter().zip(drift);
    let kept: Vec<u8> = rows
        .map(|row| match row {
            (Some(advantage), Some(drift)) => u8::from(!(advantage < 0. && drift > threshold)),
            _ => 1,
        })
        .collect();
    let kept = Tensor::new(kept, tensors.mask.device())?;
    Ok(Mask::new(&tensors.mask)?
        .keep_samples(&kept)?
        .selected()
        .clone())
}

/// The weights of the sampler, which multiply the KL term too.
fn weights(case: &Case, tensors: &Tensors) -> Result<Option<Tensor>> {
    let options = &case.config;
    let kind = match options.get("rollout_correction").as_str() {
        None => return Ok(None),
        Some(kind) => kind.to_owned(),
    };
    let max = options.number("rollout_correction_max")?;
    let truncated = ImportanceWeight::truncated(max);
    let unfiltered = |weight| RolloutCorrection {
        weight: Some(weight),
        ..RolloutCorrection::default()
    };
    let correction = match kind.as_str() {
        "token_truncate" => unfiltered(truncated),
        "token_mask" => unfiltered(ImportanceWeight {
            out_of_bounds: OutOfBounds::Mask,
            ..truncated
        }),
        "sequence_truncate" => unfiltered(ImportanceWeight {
            level: ImportanceLevel::Sequence,
            ..truncated
        }),
        "sequence_mask" => RolloutCorrection {
            filters: vec![RolloutFilter {
                statistic: FilterStatistic::LogRatio,
                level: FilterLevel::SequenceMean,
                min: None,
                max: Some(max.ln()),
            }],
            ..unfiltered(ImportanceWeight {
                max: None,
                ..truncated
            })
        },
        other => bail!("unknown rollout_correction {other}"),
    };
    let rollout = tensors.rollout_log_probs.as_ref();
    let rollout = rollout.context("no log-probs of the rollout")?;
    let corrected = correction.compute(tensors.old(), rollout, &tensors.mask)?;
    let weights = on_tokens(&corrected, &Mask::new(&tensors.mask)?)?.context("no weights")?;
    let zeros = weights.zeros_like()?;
    Ok(Some(corrected.kept.where_cond(&weights, &zeros)?))
}

/// Fractions of the ratios that `delta` has bounded.
fn clip_fractions(
    case: &Case,
    outputs: Outputs,
    loss: &PolicyLoss,
    tensors: &Tensors,
) -> Result<Outputs> {
    let x = Numbers::read(tensors)?;
    let log_ratio = x.at_level(&x.log_ratio, loss.importance_level);
    let clip = clip(case)?;
    let ratio = |i: usize| log_ratio[i].exp().min(clip.delta.unwrap_or(f64::INFINITY));
    let low = x.map(|i| flag(ratio(i) < 1. - clip.low && x.advantages[i] < 0.));
    let high = x.map(|i| flag(ratio(i) > 1. + clip.high && x.advantages[i] > 0.));
    let (low, high) = (x.mean(&low), x.mean(&high));
    outputs
        .number("clip_fraction_low", low)?
        .number("clip_fraction_high", high)?
        .number("clip_fraction", low + high)
}

/// The mean of a term over all tokens, without the policy term.
fn term_alone(tensors: &Tensors, loss: PolicyLoss) -> Result<PolicyLossOutput> {
    let loss = PolicyLoss {
        log_ratio_clamp: None,
        ..loss
    };
    let nothing = tensors.advantages.zeros_like()?;
    Ok(loss.compute(&batch(tensors, &nothing), &counts(&tensors.mask)?)?)
}

fn sdar(
    case: &Case,
    outputs: Outputs,
    output: PolicyLossOutput,
    tensors: &Tensors,
) -> Result<Outputs> {
    let beta = case.config.number("sdar_gate_beta")?;
    let gated = PolicyLoss {
        distillation: Some(TeacherTerm {
            form: TeacherTermForm::Gated { beta },
            ..TeacherTerm::new(1.)
        }),
        ..PolicyLoss::gpg()
    };
    let gated = term_alone(tensors, gated)?;
    let loss = (output.loss + (&gated.loss * case.config.number("sdar_coef")?)?)?;
    let metrics = gated.metrics.to_host()?;
    sdar_metrics(outputs, &metrics)?
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &tensors.log_probs)])
}

fn sdar_metrics(outputs: Outputs, metrics: &MetricValues) -> Result<Outputs> {
    outputs
        .number("sdar_loss", metric(metrics, "distillation_loss"))?
        .number("gate_mean", metric(metrics, "distillation_gate"))?
        .number(
            "gate_active_fraction",
            metric(metrics, "distillation_gate_open"),
        )?
        .number("teacher_log_ratio", metric(metrics, "teacher_log_ratio"))
}

fn chord(
    case: &Case,
    outputs: Outputs,
    output: PolicyLossOutput,
    tensors: &Tensors,
) -> Result<Outputs> {
    let options = &case.config;
    let schedule = CoefSchedule {
        warmup_steps: options.size("mu_warmup_steps")?,
        decay_steps: Some(options.size("mu_decay_steps")?),
        end: options.number("mu_valley")?,
        decay: Decay::Cosine,
        ..CoefSchedule::constant(options.number("mu_peak")?)
    };
    let mu = schedule.at(options.size("step")?);
    let logits = case.variable("sft_logits")?;
    let sft = demonstrations(case, &logits)?;
    let loss = ((output.loss * (1. - mu))? + (sft * mu)?)?;
    // A share of 0 leaves the graph of a term out.
    let (policy, demonstrations) = (("log_probs", &tensors.log_probs), ("sft_logits", &logits));
    let zero = |(name, variable): (&str, &Var), outputs: Outputs| -> Result<Outputs> {
        Ok(outputs.gradient(name, &variable.zeros_like()?))
    };
    let (variables, outputs) = match mu {
        0. => (vec![policy], zero(demonstrations, outputs)?),
        1. => (vec![demonstrations], zero(policy, outputs)?),
        _ => (vec![policy, demonstrations], outputs),
    };
    outputs
        .number("mu", mu)?
        .out("loss", &loss)
        .gradients(&loss, &variables)
}

/// The likelihood of labels that are not -100, each by the logits one place before.
fn demonstrations(case: &Case, logits: &Var) -> Result<Tensor> {
    let labels = case.input("sft_labels")?.to_dtype(DType::I64)?;
    let tokens = labels.dim(1)? - 1;
    let labels = labels.narrow(1, 1, tokens)?.contiguous()?;
    let mask = labels.ne(-100i64)?;
    let targets = mask.where_cond(&labels, &labels.zeros_like()?)?;
    let options = LogProbOptions {
        mask: Some(&mask),
        ..Default::default()
    };
    let logits = logits.narrow(1, 0, tokens)?.contiguous()?;
    let log_probs = log_prob(&logits, &targets, 1., options)?.log_probs;
    let nothing = Tensor::zeros(labels.dim(0)?, DType::F32, &case.device)?;
    let mut batch = PolicyBatch::new(&log_probs, &nothing, &mask);
    if let Some(scale) = case.optional("sft_loss_scale") {
        batch = batch.token_weights(&scale.narrow(1, 1, tokens)?.contiguous()?);
    }
    let loss = unbounded(Likelihood {
        uncertainty_weight: case.config.flag("phi")?,
    });
    Ok(loss.compute(&batch, &StepTotals::count(&mask)?)?.loss)
}

fn real(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let options = &case.config;
    level(case)?;
    let size = options.size("group_size")?;
    let x = Numbers::read(tensors)?;
    let lengths = x.row_sums(&vec![1.; x.rows * x.width]);
    if lengths.contains(&0.) {
        return Ok(Err(
            "ms-swift's REAL counts a sequence without a token as a negative one".to_owned(),
        ));
    }
    let sums: Vec<f64> = lengths
        .chunks(size)
        .map(|group| group.iter().sum())
        .collect();
    let of_rows = |f: &dyn Fn(usize) -> f64| -> Result<Tensor> {
        let values: Vec<f64> = (0..x.rows).map(f).collect();
        Ok(Tensor::new(values, tensors.mask.device())?)
    };
    let loss = PolicyLoss {
        aggregation: Aggregation::PromptMeanTokenMean,
        ..unbounded(GroupContrast {
            tau: options.number("tau")?,
        })
    };
    let batch = batch(tensors, &tensors.advantages)
        .groups(&of_rows(&|row| (row / size) as f64)?)
        .prompt_tokens(&of_rows(&|row| sums[row / size])?);
    let totals = counts(&tensors.mask)?.with_prompts(sums.len() as f64);
    let mut loss = loss.compute(&batch, &totals)?.loss;
    let mut outputs = Outputs::default();
    if let Some(kl) = kl(case)? {
        let kl = PolicyLoss {
            kl: Some(kl),
            ..PolicyLoss::gpg()
        };
        let kl = term_alone(tensors, kl)?;
        outputs = outputs.number("kl", metric(&kl.metrics.to_host()?, "kl"))?;
        loss = (loss + kl.loss)?;
    }
    Ok(Ok(outputs
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &tensors.log_probs)])?))
}
