//! `distillation_loss` and `linear_distillation_loss`: a student against its teacher.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Device, Tensor, Var};
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::{
    Aggregation, Clip, DistillationLoss, EarlyWeight, LogProbOptions, Mask, OutputLayer,
    PolicyBatch, PolicyLoss, RolloutCorrection, StepTotals, Student, Support, Tail, TeacherLogits,
    TeacherTerm, TeacherTermForm, linear_distillation_loss, log_prob,
};

use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    Ok(Ok(match case.variant.as_str() {
        "trl_jsd" | "swift_jsd" | "twinkle_jsd" | "swift_topk_jsd" | "twinkle_topk_jsd"
        | "trl_topk_jsd" | "trl_top1" => divergence(case)?,
        "trl_sdpo_topk" => sdpo(case)?,
        "trl_sdpo_sampled" => sampled(case)?,
        "trl_iw_opd" => early_weight(case)?,
        "verl_forward_kl_topk" => forward_kl(case)?,
        "verl_reverse_kl" => reverse_kl(case)?,
        variant => bail!("unknown variant {variant}"),
    }))
}

/// The tensors of a teacher.
enum TeacherTensors {
    Logits(Tensor),
    TopK(Tensor, Tensor),
}

impl TeacherTensors {
    fn read(case: &Case) -> Result<Self> {
        Ok(match case.optional("teacher_logits") {
            Some(logits) => Self::Logits(logits),
            None => Self::TopK(
                case.input("teacher_topk_ids")?,
                case.input("teacher_topk_log_probs")?,
            ),
        })
    }

    fn teacher(&self) -> TeacherLogits<'_> {
        match self {
            Self::Logits(logits) => TeacherLogits::Logits(logits),
            Self::TopK(ids, log_probs) => TeacherLogits::TopK { ids, log_probs },
        }
    }
}

fn options(case: &Case) -> Result<DistillationLoss> {
    let options = &case.config;
    let beta = options.optional_number("beta")?.unwrap_or(0.);
    let k = options.optional_number("top_k")?.map(|k| k as usize);
    let name = options.get("support");
    let support = match (case.variant.as_str(), name.as_str(), k) {
        ("trl_top1", ..) => match options.text("student_token")?.as_str() {
            "argmax" if beta == 1. => Support::Student { k: 1 },
            "argmax" => Support::Union { k: 1 },
            "sampled" => Support::Sampled {
                teacher_best: beta != 1.,
            },
            other => bail!("unknown student_token {other}"),
        },
        (_, None, None) => Support::Vocabulary,
        (_, Some("teacher") | None, Some(k)) => Support::Teacher { k },
        (_, Some("student"), Some(k)) => Support::Student { k },
        (_, Some("union"), Some(k)) => Support::Union { k },
        (_, support, k) => bail!("unknown support {support:?} with {k:?}"),
    };
    let tail = match options.get("tail").as_str() {
        None => Tail::Drop,
        Some("bucket") => Tail::Bucket,
        Some("renormalize") => Tail::Renormalize,
        Some(other) => bail!("unknown tail {other}"),
    };
    Ok(DistillationLoss {
        coef: 1.,
        beta,
        temperature: options.optional_number("temperature")?.unwrap_or(1.),
        support,
        tail,
        // TRL bounds the logarithm of the mass of the other entries by -1e-7.
        tail_floor: (tail == Tail::Bucket && case.variant.starts_with("trl"))
            .then(|| -(-1e-7f64).exp_m1()),
        log_prob_floor: options.optional_number("log_prob_floor")?,
        value_clamp: options.optional_number("value_clamp")?,
        aggregation: Aggregation::TokenMean,
    })
}

/// The aggregation and the denominators of a case.
fn reduction(case: &Case, mask: &Mask) -> Result<(Aggregation, StepTotals)> {
    let mode = case.config.text("aggregation")?;
    aggregation(case, &mode, mask, Rows::NonEmpty)
}

fn divergence(case: &Case) -> Result<Outputs> {
    let response_mask = case.input("mask")?;
    let (aggregation, totals) = reduction(case, &Mask::new(&response_mask)?)?;
    let loss = DistillationLoss {
        aggregation,
        ..options(case)?
    };
    let student = case.variable("student_logits")?;
    let teacher = TeacherTensors::read(case)?;
    let (loss, _) = loss.compute(
        &student,
        &teacher.teacher(),
        case.optional("targets").as_ref(),
        &response_mask,
        &totals,
    )?;
    Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &[("student_logits", &student)])
}

fn sdpo(case: &Case) -> Result<Outputs> {
    let student = case.variable("student_logits")?;
    let teacher = TeacherTensors::read(case)?;
    let mut losses = options(case)?.per_token(&student, &teacher.teacher(), None)?;
    if let Some(max) = case.config.optional_number("ratio_max")? {
        let correction = RolloutCorrection {
            weight: Some(ImportanceWeight::truncated(max)),
            ..RolloutCorrection::default()
        };
        let log_probs = case.input("log_probs")?;
        let mask = log_probs.ones_like()?;
        let weights = correction.compute(&log_probs, &case.input("old_log_probs")?, &mask)?;
        losses = (losses * weights.weights.context("no weights")?)?;
    }
    let sum = (&losses * case.input("upstream")?)?.sum_all()?;
    Outputs::default()
        .out("losses", &losses)
        .gradients(&sum, &[("student_logits", &student)])
}

fn log_probs(logits: &Tensor, targets: &Tensor, temperature: f64) -> Result<Tensor> {
    Ok(log_prob(logits, targets, temperature, LogProbOptions::default())?.log_probs)
}

/// The advantage of the teacher on the sampled token, one token at a time for its loss.
fn sampled(case: &Case) -> Result<Outputs> {
    ensure!(case.config.number("beta")? == 1., "unknown beta");
    let student = case.variable("student_logits")?;
    let targets = case.input("targets")?;
    let current = log_probs(&student, &targets, 1.)?;
    let teacher = log_probs(&case.input("teacher_logits")?, &targets, 1.)?;
    let upstream = case.input("upstream")?;
    let loss = PolicyLoss {
        distillation: Some(TeacherTerm::new(1.)),
        aggregation: Aggregation::TokenSum,
        ..PolicyLoss::gpg()
    };
    let compute = |mask: &Tensor, weights: Option<&Tensor>| -> Result<Tensor> {
        let nothing = Tensor::zeros(mask.dim(0)?, DType::F32, mask.device())?;
        let batch = PolicyBatch {
            token_weights: weights.cloned(),
            ..PolicyBatch::new(&current, &nothing, mask)
        };
        let batch = batch.teacher_log_probs(&teacher);
        Ok(loss.compute(&batch, &StepTotals::count(mask)?)?.loss)
    };
    let (rows, width) = current.dims2()?;
    let mut losses = Vec::new();
    for place in 0..rows * width {
        let mut mask = vec![0u8; rows * width];
        mask[place] = 1;
        let mask = Tensor::from_vec(mask, (rows, width), &case.device)?;
        let loss = compute(&mask, None)?.to_dtype(DType::F64)?;
        losses.push(loss.to_scalar::<f64>()?);
    }
    let losses = Tensor::from_vec(losses, (rows, width), &Device::Cpu)?;
    let weighted = compute(&upstream.ones_like()?, Some(&upstream))?;
    Outputs::default()
        .out("losses", &losses)
        .gradients(&weighted, &[("student_logits", &student)])
}

fn early_weight(case: &Case) -> Result<Outputs> {
    let options = &case.config;
    let student = case.variable("student_logits")?;
    let current = log_probs(
        &student,
        &case.input("targets")?,
        options.number("temperature")?,
    )?;
    let response_mask = case.input("mask")?;
    let (aggregation, totals) = reduction(case, &Mask::new(&response_mask)?)?;
    let given = options.flag("rollout_log_probs_given")?;
    let loss = PolicyLoss {
        distillation: Some(TeacherTerm {
            form: TeacherTermForm::Advantage {
                early_weight: Some(EarlyWeight {
                    gamma: options.number("gamma")?,
                    epsilon: options.number("epsilon")?,
                }),
                student: if given {
                    Student::Rollout
                } else {
                    Student::Current
                },
            },
            ..TeacherTerm::new(1.)
        }),
        aggregation,
        ..PolicyLoss::gpg()
    };
    let nothing = Tensor::zeros(response_mask.dim(0)?, DType::F32, &case.device)?;
    let batch = PolicyBatch {
        rollout_log_probs: case.optional("rollout_log_probs"),
        ..PolicyBatch::new(&current, &nothing, &response_mask)
    };
    let batch = batch.teacher_log_probs(&case.input("teacher_log_probs")?);
    let output = loss.compute(&batch, &totals)?;
    let metrics = output.metrics.to_host()?;
    let get = |name: &str| {
        metrics
            .get(&format!("distillation_{name}"))
            .unwrap_or_default()
    };
    Outputs::default()
        .out("loss", &output.loss)
        .gradients(&output.loss, &[("student_logits", &student)])?
        .number("mean_advantage", get("advantage"))?
        .number("mean_abs_advantage", get("gap_abs"))?
        .number("mean_weight", get("weight_mean"))?
        .number("min_weight", get("weight_min"))?
        .number("max_weight", get("weight_max"))
}

/// The divergence as a loss, or its negative as the advantage of verl's loss.
fn as_loss_or_advantage(
    case: &Case,
    losses: &Tensor,
    variable: (&str, &Var),
    outputs: Outputs,
) -> Result<Outputs> {
    let options = &case.config;
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let (aggregation, totals) = reduction(case, &mask)?;
    let factor = options.number("dp_size")?;
    if !options.flag("policy_gradient")? {
        let loss = (aggregation.apply(losses, &mask, &totals)? * factor)?;
        return outputs.out("loss", &loss).gradients(&loss, &[variable]);
    }
    let log_probs = case.variable("log_probs")?;
    let loss = PolicyLoss {
        surrogate: Clip {
            low: options.number("clip_low")?,
            high: options.number("clip_high")?,
            dual_clip: options.optional_number("dual_clip")?,
            delta: None,
        }
        .into(),
        aggregation,
        ..PolicyLoss::default()
    };
    let advantages = losses.detach().neg()?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &response_mask)
        .old_log_probs(&case.input("old_log_probs")?);
    let output = loss.compute(&batch, &totals)?;
    let metrics = output.metrics.to_host()?;
    let get = |name: &str| metrics.get(name).unwrap_or_default();
    let loss = (output.loss * factor)?;
    outputs
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &log_probs)])?
        .number("approx_kl", get("approx_kl"))?
        .number("clip_fraction", get("clip_fraction"))?
        .number("clip_fraction_lower", get("dual_clip_fraction"))
}

/// Numbers at the positions of the mask.
fn valid(case: &Case, x: &Tensor) -> Result<Vec<f64>> {
    let numbers = |x: &Tensor| -> Result<Vec<f64>> {
        let x = x.detach().to_device(&Device::Cpu)?.flatten_all()?;
        Ok(x.to_dtype(DType::F64)?.to_vec1()?)
    };
    let mask = numbers(&case.input("mask")?)?;
    let values = numbers(x)?.into_iter().zip(mask);
    Ok(values.filter(|(_, m)| *m != 0.).map(|(x, _)| x).collect())
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len().max(1) as f64
}

fn largest(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn smallest(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::INFINITY, f64::min)
}

fn forward_kl(case: &Case) -> Result<Outputs> {
    ensure!(
        case.config.text("estimator")? == "forward_kl_topk",
        "unknown estimator"
    );
    let loss = options(case)?;
    let student = case.variable("student_logits")?;
    let teacher = TeacherTensors::read(case)?;
    let TeacherTensors::TopK(ids, log_probs) = &teacher else {
        bail!("logits of the teacher");
    };
    let losses = loss.per_token(&student, &teacher.teacher(), None)?;
    let unclamped = DistillationLoss {
        value_clamp: None,
        ..loss
    };
    let unclamped = unclamped.per_token(&student, &teacher.teacher(), None)?;
    let unclamped = valid(case, &unclamped)?;
    let mut outputs = Outputs::default()
        .number("kl_max", largest(&unclamped))?
        .number("kl_min", smallest(&unclamped))?;

    let student_logs = student.detach().to_dtype(DType::F64)?;
    let total = student_logs.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let student_logs = student_logs.broadcast_sub(&total)?;
    let at = ids.to_dtype(DType::U32)?.contiguous()?;
    let s = student_logs.contiguous()?.gather(&at, D::Minus1)?;
    let t = log_probs.to_dtype(DType::F64)?;
    let student_mass = valid(case, &s.exp()?.sum(D::Minus1)?)?;
    let teacher_mass = valid(case, &t.exp()?.sum(D::Minus1)?)?;
    outputs = outputs
        .number("student_mass", mean(&student_mass))?
        .number("student_mass_min", smallest(&student_mass))?
        .number("student_mass_max", largest(&student_mass))?
        .number("teacher_mass", mean(&teacher_mass))?;
    let (share, advantage) = overlap(case, &loss, &student_logs, ids, [&s, &t])?;
    let outputs = outputs
        .number("overlap_fraction", share)?
        .number("overlap_advantage", advantage)?;
    as_loss_or_advantage(case, &losses, ("student_logits", &student), outputs)
}

/// The part of the teacher's entries that the student has too, and the mean of `-exp(t) (t - s)`
/// over them.
fn overlap(
    case: &Case,
    loss: &DistillationLoss,
    student_logs: &Tensor,
    ids: &Tensor,
    [s, t]: [&Tensor; 2],
) -> Result<(f64, f64)> {
    let k = ids.dim(D::Minus1)?;
    let floor = loss.log_prob_floor.unwrap_or(f64::NEG_INFINITY);
    let rows = |x: &Tensor| -> Result<Vec<Vec<f64>>> {
        Ok(x.to_dtype(DType::F64)?.flatten_to(1)?.to_vec2()?)
    };
    let (all, ids, s, t) = (rows(student_logs)?, rows(ids)?, rows(s)?, rows(t)?);
    let mask = case.input("mask")?.flatten_all()?.to_dtype(DType::F64)?;
    let mask = mask.to_vec1::<f64>()?;
    let (mut shares, mut advantages) = (Vec::new(), Vec::new());
    for row in (0..mask.len()).filter(|&row| mask[row] != 0.) {
        let mut order: Vec<usize> = (0..all[row].len()).collect();
        order.sort_by(|&a, &b| all[row][b].total_cmp(&all[row][a]));
        let common: Vec<f64> = (0..k)
            .filter(|&j| order[..k].contains(&(ids[row][j] as usize)))
            .map(|j| {
                let (s, t) = (s[row][j].max(floor), t[row][j].max(floor));
                -t.exp() * (t - s)
            })
            .collect();
        shares.push(common.len() as f64 / k as f64);
        if !common.is_empty() {
            advantages.push(mean(&common));
        }
    }
    Ok((mean(&shares), mean(&advantages)))
}

fn reverse_kl(case: &Case) -> Result<Outputs> {
    let options = &case.config;
    let (estimator, is_k3) = match options.text("estimator")?.as_str() {
        "k1" => (KlEstimator::K1, false),
        "abs" => (KlEstimator::Abs, false),
        "k2" => (KlEstimator::K2, false),
        "k3" => (KlEstimator::K3, true),
        other => bail!("unknown estimator {other}"),
    };
    let kl = Kl {
        log_ratio_clamp: is_k3.then_some(20.),
        value_clamp: is_k3.then_some(10.),
        ..Kl::new(estimator)
    };
    let clamped = Kl {
        value_clamp: match (kl.value_clamp, options.optional_number("value_clamp")?) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        },
        ..kl
    };
    let log_probs = case.variable("log_probs")?;
    let teacher = case.input("teacher_log_probs")?;
    let unclamped = valid(case, &kl.per_token(&log_probs, &teacher, None)?)?;
    let losses = clamped.per_token(&log_probs, &teacher, None)?;
    let size: Vec<f64> = unclamped.iter().map(|x| x.abs()).collect();
    let outputs = Outputs::default()
        .number("kl_max", largest(&unclamped))?
        .number("kl_min", smallest(&unclamped))?
        .number("abs_kl", mean(&size))?;
    as_loss_or_advantage(case, &losses, ("log_probs", &log_probs), outputs)
}

pub(crate) fn linear(case: &Case) -> Result<Ran> {
    ensure!(case.variant == "trl_jsd", "unknown variant");
    let response_mask = case.input("mask")?;
    let (aggregation, totals) = reduction(case, &Mask::new(&response_mask)?)?;
    let loss = DistillationLoss {
        aggregation,
        ..options(case)?
    };
    let (hidden, weight) = (
        case.variable("student_hidden")?,
        case.variable("student_weight")?,
    );
    let bias = case.optional("student_bias");
    let bias = bias.map(|b| Var::from_tensor(&b)).transpose()?;
    let (teacher_hidden, teacher_weight) =
        (case.input("teacher_hidden")?, case.input("teacher_weight")?);
    let teacher_bias = case.optional("teacher_bias");
    let number = |key: &str| case.config.number(key);
    let cap = |key: &str| case.config.optional_number(key);
    let student = OutputLayer {
        bias: bias.as_deref(),
        logit_scale: number("student_logit_scale")?,
        logit_cap: cap("student_softcap")?,
        ..OutputLayer::new(&hidden, &weight)
    };
    let teacher = OutputLayer {
        bias: teacher_bias.as_ref(),
        logit_scale: number("teacher_logit_scale")?,
        logit_cap: cap("teacher_softcap")?,
        ..OutputLayer::new(&teacher_hidden, &teacher_weight)
    };
    let result = linear_distillation_loss(
        &loss,
        &student,
        &TeacherLogits::Hidden(teacher),
        &response_mask,
        &totals,
    )?;
    let tokens = StepTotals::count(&response_mask)?.tokens;
    let metrics = result.metrics.to_host()?;
    let entropy = metrics.get("student_entropy").unwrap_or_default();
    let mut outputs = Outputs::default()
        .out("loss", &result.loss)
        .number("entropy_sum", entropy * tokens)?
        .number("tokens", tokens)?;
    for (name, gradient) in [
        ("student_hidden", result.gradients.hidden),
        ("student_weight", result.gradients.weight),
        ("student_bias", result.gradients.bias),
    ] {
        if let Some(gradient) = gradient {
            outputs = outputs.gradient(name, &gradient);
        }
    }
    Ok(Ok(outputs))
}
