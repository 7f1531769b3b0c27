//! The losses of prime-rl: a sum of components, each over its own tokens.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::surrogate::{DivergenceMask, DropIf, Likelihood, MaskedValue};
use candle_grpo_loss::{Aggregation, KlLoss, PolicyBatch, PolicyLoss, StepTotals, TeacherTerm};
use serde_json::Value;

use super::numbers::{Numbers, flag};
use super::{Tensors, unbounded};
use crate::case::{Case, Outputs, Ran};

/// A component with its tokens and its denominator.
struct Component {
    loss: PolicyLoss,
    advantages: Tensor,
    mask: Tensor,
    weights: Option<Tensor>,
    scale: f64,
}

pub(super) fn run(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let options = &case.config;
    let given = options.get("weights_given");
    let given = given.as_array().context("weights_given is not a list")?;
    let names: Vec<&str> = given.iter().filter_map(Value::as_str).collect();
    let has = |component: &str| names.contains(&format!("{component}_weights").as_str());
    let kind = options.text("loss")?;
    // A component that the case does not have may have a denominator.
    options.ignore(&["scale_rl", "scale_ce", "scale_ref_kl"]);
    let mut components = Vec::new();
    if ["default", "ipo", "mixed"].contains(&kind.as_str()) {
        let tau = options.number("adv_tau")?;
        components.push(component(case, tensors, "rl", rl(case, &kind)?, tau)?);
    }
    if kind == "ce" || (kind == "mixed" && has("ce")) {
        components.push(component(
            case,
            tensors,
            "ce",
            unbounded(Likelihood::default()),
            0.,
        )?);
    }
    if kind == "ref_kl" || (kind == "mixed" && has("ref_kl")) {
        components.push(component(case, tensors, "ref_kl", reference(), 0.)?);
    }
    let losses: Result<Vec<Tensor>> = components.iter().map(|c| c.compute(tensors)).collect();
    let losses = losses?;
    let Some((first, others)) = losses.split_first() else {
        bail!("unknown loss {kind}");
    };
    let mut loss = first.clone();
    for other in others {
        loss = (loss + other)?;
    }
    let outputs = Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &tensors.log_probs)])?;
    Ok(Ok(match kind.as_str() {
        "default" | "ipo" => metrics(case, &kind, outputs, tensors)?,
        _ => outputs,
    }))
}

/// The tokens of a component: those with a weight, or the mask.
fn component(
    case: &Case,
    tensors: &Tensors,
    name: &str,
    loss: PolicyLoss,
    advantage_factor: f64,
) -> Result<Component> {
    let weights = case.optional(&format!("{name}_weights"));
    let mask = match &weights {
        Some(weights) => {
            let mask = weights.ne(0.)?;
            match name {
                "rl" => (mask * tensors.mask.ne(0.)?)?,
                _ => mask,
            }
        }
        None => tensors.mask.clone(),
    };
    Ok(Component {
        loss,
        advantages: (&tensors.advantages.to_dtype(DType::F32)? * advantage_factor)?,
        mask,
        weights,
        scale: case.config.number(&format!("scale_{name}"))?,
    })
}

impl Component {
    fn compute(&self, tensors: &Tensors) -> Result<Tensor> {
        let batch = PolicyBatch::new(&tensors.log_probs, &self.advantages, &self.mask)
            .old_log_probs(tensors.old());
        let batch = PolicyBatch {
            teacher_log_probs: tensors.teacher_log_probs.clone(),
            token_weights: self.weights.clone(),
            ..batch
        };
        let totals = StepTotals {
            tokens: self.scale,
            ..StepTotals::count(&self.mask)?
        };
        Ok(self.loss.compute(&batch, &totals)?.loss)
    }
}

/// `d^2` with a coefficient, as a KL to the sampler.
fn squared(coef: f64) -> KlLoss {
    let k2 = Kl {
        log_ratio_clamp: None,
        ..Kl::new(KlEstimator::K2)
    };
    KlLoss::new(2. * coef, k2)
}

fn rl(case: &Case, kind: &str) -> Result<PolicyLoss> {
    let options = &case.config;
    let (drop_if, low, high) = match kind {
        "ipo" => {
            let threshold = options.number("threshold")?;
            (DropIf::Outside, threshold, threshold)
        }
        _ => (
            DropIf::WithAdvantage,
            options.number("mask_low")?,
            options.number("mask_high")?,
        ),
    };
    Ok(PolicyLoss {
        old_kl: Some(squared(options.number("kl_tau")?)),
        ..unbounded(DivergenceMask {
            drop_if,
            low,
            high,
            value: MaskedValue::Ratio,
            ratio_max: None,
            ..Default::default()
        })
    })
}

fn reference() -> PolicyLoss {
    PolicyLoss {
        distillation: Some(TeacherTerm::new(1.)),
        old_kl: Some(squared(0.001)),
        aggregation: Aggregation::TokenMean,
        ..unbounded(DivergenceMask {
            drop_if: DropIf::Below,
            low: 0.2,
            value: MaskedValue::Ratio,
            ratio_max: None,
            ..Default::default()
        })
    }
}

/// One number for each row.
fn metrics(case: &Case, kind: &str, outputs: Outputs, tensors: &Tensors) -> Result<Outputs> {
    let x = Numbers::read(tensors)?;
    let number = |key: &str| case.config.optional_number(key);
    let threshold = number("threshold")?;
    let (low, high) = (
        number("mask_low")?.or(threshold).unwrap_or_default(),
        number("mask_high")?.or(threshold).unwrap_or_default(),
    );
    let moved = |i: usize| x.log_probs[i].exp() - x.old_log_probs[i].exp();
    let (above, below) = (|i: usize| moved(i) > high, |i: usize| moved(i) < -low);
    let dropped = x.map(|i| {
        let is_dropped = match kind {
            "ipo" => above(i) || below(i),
            _ if x.advantages[i] > 0. => above(i),
            _ => below(i),
        };
        flag(is_dropped)
    });
    let means = |values: Vec<f64>| -> Vec<f64> {
        let means = x.row_means(&values).into_iter();
        means.map(Option::unwrap_or_default).collect()
    };
    // The mean over some of the tokens of each row, 0 if there are none.
    let mean_where = |values: &dyn Fn(usize) -> f64, selected: &dyn Fn(usize) -> bool| {
        let sums = x.row_sums(&x.map(|i| if selected(i) { values(i) } else { 0. }));
        let counts = x.row_sums(&x.map(|i| flag(selected(i))));
        let means = sums.iter().zip(counts);
        means.map(|(sum, n)| sum / n.max(1.)).collect::<Vec<f64>>()
    };
    let kl = |i: usize| x.log_ratio[i].exp() - 1. - x.log_ratio[i];
    let is_dropped = |i: usize| dropped[i] != 0.;
    let mut outputs = outputs;
    for (name, values) in [
        ("dropped_fraction", means(dropped.clone())),
        (
            "dropped_high_fraction",
            means(x.map(|i| flag(x.advantages[i] > 0. && above(i)))),
        ),
        (
            "dropped_low_fraction",
            means(x.map(|i| flag(x.advantages[i] < 0. && below(i)))),
        ),
        ("dropped_kl", mean_where(&kl, &is_dropped)),
        ("kept_kl", mean_where(&kl, &|i| !is_dropped(i))),
        (
            "dropped_positive_fraction",
            mean_where(&|i| flag(x.advantages[i] > 0.), &is_dropped),
        ),
        (
            "dropped_negative_fraction",
            mean_where(&|i| flag(x.advantages[i] < 0.), &is_dropped),
        ),
    ] {
        outputs = outputs.out(name, &Tensor::new(values, &candle_core::Device::Cpu)?);
    }
    Ok(outputs)
}
