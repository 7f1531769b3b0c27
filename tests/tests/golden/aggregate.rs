//! `aggregate`: per-token losses to one number.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_loss::{Aggregation, Mask, StepTotals};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    let totals_are = match case.variant.as_str() {
        "verl" | "verl_nan_under_mask" | "verl_all_masked" | "openrlhf" => Rows::NonEmpty,
        "roll" | "roll_unmasked_token_mean" => Rows::All,

        variant => bail!("unknown variant {variant}"),
    };
    case.config.ignore(&["batch"]);
    ensure!(
        case.config.text_or("sequences_counted", "all_rows")? == "all_rows",
        "unknown sequences_counted"
    );
    case.config.flag("sum_includes_masked_positions")?;
    let losses = case.variable("losses")?;
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let mode = case.config.text("mode")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, totals_are)?;
    let mut weighted = losses.as_tensor().to_dtype(DType::F32)?;
    if let Some(weights) = case.optional("sample_weights") {
        weighted = weighted.broadcast_mul(&weights.unsqueeze(1)?)?;
    }
    let summed = if aggregation == Aggregation::TokenMean && totals_are == Rows::All {
        // ROLL's token mean sums all positions; its callers pass zeros outside the mask.
        Mask::new(&response_mask.ones_like()?)?
    } else {
        mask
    };
    let loss = aggregation.apply(&weighted, &summed, &totals)?;
    let loss = (loss * case.config.optional_number("dp_size")?.unwrap_or(1.))?;
    Ok(Ok(Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &[("losses", &losses)])?))
}

/// The sequences that a peer counts by default.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    NonEmpty,
    All,
}

/// The mode and denominators of verl, ROLL and OpenRLHF.
pub(crate) fn aggregation(
    case: &Case,
    mode: &str,
    mask: &Mask,
    rows: Rows,
) -> Result<(Aggregation, StepTotals)> {
    let (batch, width) = mask.dims()?;
    let count =
        |x: Tensor| -> Result<f64> { Ok(x.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?) };
    let tokens = count(mask.lengths(DType::F64)?)?;
    let nonempty = count(mask.lengths(DType::F64)?.gt(0.)?)?;
    let global_tokens = case.config.optional_number("global_tokens")?;
    let global_sequences = case.config.optional_number("global_sequences")?;
    let local = if rows == Rows::All {
        batch as f64
    } else {
        nonempty
    };
    // A micro-batch may be empty if another one of the step is not.
    let others = global_sequences.is_some_and(|sequences| sequences > 0.);
    let tokens = if others { tokens.max(1.) } else { tokens };
    let mut totals = StepTotals {
        tokens: global_tokens.unwrap_or(tokens),
        sequences: global_sequences.unwrap_or(local),
        rows: batch as f64,
        ..StepTotals::default()
    };
    let length = case
        .config
        .optional_number("scale_factor")?
        .unwrap_or(width as f64);
    let aggregation = match mode {
        "token_mean" => Aggregation::TokenMean,
        "token_sum" => Aggregation::TokenSum,
        "seq_mean_token_sum" => Aggregation::SeqMeanTokenSum,
        "seq_mean_token_mean" => Aggregation::SeqMeanTokenMean,
        "seq_mean_token_sum_norm" => {
            if rows == Rows::All {
                // ROLL does not divide by the number of sequences in this mode.
                totals.sequences = 1.;
            }
            Aggregation::SeqMeanTokenSumNorm { length }
        }
        other => bail!("unknown mode {other}"),
    };
    Ok((aggregation, totals))
}
