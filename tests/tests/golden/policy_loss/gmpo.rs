//! The geometric mean of TRL.

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use candle_grpo_core::Mask;
use candle_grpo_core::selection::top_entropy_tokens;
use candle_grpo_loss::surrogate::GeometricMean;
use candle_grpo_loss::{Aggregation, EmptySequences, KlLoss, PolicyLoss, StepTotals};

use super::numbers::{Numbers, flag};
use super::{Setup, Tensors, k3, metric, unbounded};
use crate::case::{Case, Outputs, Ran};

pub(super) fn run(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let options = &case.config;
    ensure!(options.text("loss")? == "geometric_mean", "unknown loss");
    let surrogate = GeometricMean {
        low: options.number("clip_low")?,
        high: options.number("clip_high")?,
    };
    let beta = options.number("beta")?;
    let loss = PolicyLoss {
        kl: (beta != 0.).then(|| KlLoss::new(beta, k3(None))),
        aggregation: Aggregation::SeqMeanTokenMean,
        empty_sequences: EmptySequences::Include,
        ..unbounded(surrogate)
    };
    let totals = StepTotals::count(&tensors.mask)?;
    let mut setup = Setup {
        factor: 1. / options.number("gradient_accumulation_steps")?,
        ..Setup::new(loss, totals)
    };
    let quantile = options.number("top_entropy_quantile")?;
    if quantile < 1. {
        let entropies = tensors.entropies.as_ref().context("no entropies")?;
        let top = top_entropy_tokens(entropies, &Mask::new(&tensors.mask)?, quantile)?;
        setup.policy_mask = Some(top.selected().clone());
    }
    let output = setup.compute(&setup.loss, tensors)?;
    let x = Numbers::read(tensors)?;
    // TRL counts a sequence without a token with a ratio of 1, a constant.
    let lengths = x.row_sums(&vec![1.; x.rows * x.width]);
    let empty = (0..x.rows).filter(|&row| lengths[row] == 0.);
    let constant = -empty.map(|row| x.advantages[row * x.width]).sum::<f64>() / totals.rows;
    let loss = ((&output.loss.to_dtype(DType::F64)? + constant)? * setup.factor)?;
    let metrics = output.metrics.to_host()?;
    let low = x.map(|i| flag(x.log_ratio[i] < -surrogate.low && x.advantages[i] < 0.));
    let high = x.map(|i| flag(x.log_ratio[i] > surrogate.high && x.advantages[i] > 0.));
    let (low, high) = (x.mean(&low), x.mean(&high));
    Ok(Ok(Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &tensors.log_probs)])?
        .number("kl", metric(&metrics, "kl"))?
        .number("entropy", metric(&metrics, "entropy"))?
        .number("clip_fraction_low", low)?
        .number("clip_fraction_high", high)?
        .number("clip_fraction", low + high)?))
}
