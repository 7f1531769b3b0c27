//! `advantage`: rewards to advantages.

mod newer;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Tensor};
use candle_grpo_core::advantage::{
    Baseline, ComponentOrder, KlPenalty, MaskedTokens, OptimalTokenBaseline, SingletonGroup,
    TokenAlignment, TokenBaseline, Whitening, ZeroSignalScaling, reverse_recurrence,
};
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, Groups, Kl, KlEstimator,
    Mask, RewardShaping, Scale, TokenAdvantage,
};
use serde_json::Value;

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    // The option describes the rewards.
    case.config.ignore(&["rewards"]);
    Ok(Ok(match case.variant.as_str() {
        "prime_grpo"
        | "prime_length_penalty"
        | "prime_max_rl"
        | "prime_rae"
        | "prime_hierarchical_grpo"
        | "swift_grpo"
        | "swift_rloo"
        | "swift_reinforce_plus_plus"
        | "swift_gdpo"
        | "swift_rlsd"
        | "swift_teacher" => newer::run(case)?,
        "twinkle_grpo" | "twinkle_rloo" => twinkle(case)?,
        "trl_grpo" | "trl_grpo_multi" | "trl_rloo" | "trl_rloo_kl" => trl(case)?,
        "verl_grpo"
        | "verl_grpo_vectorized"
        | "verl_grpo_passk"
        | "verl_rloo"
        | "verl_rloo_vectorized"
        | "verl_opo"
        | "verl_gpg"
        | "verl_reinforce_plus_plus_baseline"
        | "verl_gdpo" => verl_outcome(case)?,
        "verl_reinforce_plus_plus" => verl_reinforce_plus_plus(case)?,
        "verl_remax" => verl_remax(case)?,
        "verl_gae" => verl_gae(case)?,
        "verl_optimal_token_baseline" | "verl_tir_optimal_token_baseline" => {
            optimal_token_baseline(case)?
        }
        "twinkle_gae" => twinkle_gae(case)?,
        "openrlhf_rloo"
        | "openrlhf_reinforce_baseline"
        | "openrlhf_dr_grpo"
        | "openrlhf_group_norm"
        | "openrlhf_flash_reinforce"
        | "openrlhf_reinforce"
        | "openrlhf_gae" => openrlhf(case)?,
        "roll_reinforce" | "roll_gae" => roll(case)?,
        variant => bail!("unknown variant {variant}"),
    }))
}

fn scale(case: &Case) -> Result<Scale> {
    Ok(match case.config.text("scale")?.as_str() {
        "group" => Scale::Group,
        "batch" => Scale::Batch,
        "none" => Scale::None,
        other => bail!("unknown scale {other}"),
    })
}

fn relative(case: &Case) -> Result<GroupAdvantage> {
    Ok(match case.config.text("estimator")?.as_str() {
        "grpo" => GroupAdvantage::grpo(),
        "rloo" => GroupAdvantage::rloo(),
        other => bail!("unknown estimator {other}"),
    })
}

/// Checks the estimator of the case.
fn check_estimator(case: &Case, expected: &str) -> Result<()> {
    let estimator = case.config.text("estimator")?;
    ensure!(estimator == expected, "unknown estimator {estimator}");
    Ok(())
}

fn numbers(case: &Case, key: &str) -> Result<Option<Vec<f64>>> {
    match case.config.get(key) {
        Value::Null => Ok(None),
        Value::Array(list) => list
            .iter()
            .map(Value::as_f64)
            .collect::<Option<Vec<f64>>>()
            .with_context(|| format!("option {key} is not a list of numbers"))
            .map(Some),
        other => bail!("option {key} is {other}, not a list"),
    }
}

pub(crate) fn required_numbers(case: &Case, key: &str) -> Result<Vec<f64>> {
    numbers(case, key)?.with_context(|| format!("no option {key}"))
}

fn range(case: &Case, key: &str) -> Result<Option<[f64; 2]>> {
    match numbers(case, key)? {
        None => Ok(None),
        Some(bounds) => Ok(Some(bounds.try_into().map_err(|bounds| {
            anyhow::anyhow!("option {key} is {bounds:?}, not two numbers")
        })?)),
    }
}

fn twinkle(case: &Case) -> Result<Outputs> {
    let scale = scale(case)?;
    let function = GroupAdvantage {
        epsilon: case.config.number("epsilon")?,
        single_sample: if scale == Scale::Group {
            SingletonGroup::Raw
        } else {
            SingletonGroup::BatchMean
        },
        ..relative(case)?
    };
    let advantages = function.compute(
        &case.input("rewards")?,
        case.config.size("group_size")?,
        scale,
    )?;
    Ok(Outputs::default().out("advantages", &advantages))
}

fn trl(case: &Case) -> Result<Outputs> {
    let epsilon = case.config.number("epsilon")?;
    let components = match case
        .config
        .text_or("aggregation", "sum_then_normalize")?
        .as_str()
    {
        "sum_then_normalize" => ComponentOrder::SumThenNormalize,
        "normalize_then_sum" => ComponentOrder::NormalizeThenSum,
        other => bail!("unknown aggregation {other}"),
    };
    let scale = match case.variant.as_str() {
        "trl_rloo" | "trl_rloo_kl" => Scale::None,
        _ => scale(case)?,
    };
    // TRL ignores the scale if it normalizes each component.
    let scale = if components == ComponentOrder::NormalizeThenSum {
        Scale::Group
    } else {
        scale
    };
    let group = GroupAdvantage {
        epsilon,
        single_sample: SingletonGroup::Zero,
        non_finite: if case.config.flag("missing_rewards")? {
            NonFinite::Exclude
        } else {
            NonFinite::Error
        },
        reward_weights: numbers(case, "component_weights")?,
        components,
        ..relative(case)?
    };
    let normalizes =
        case.config.flag("normalize_batch")? || components == ComponentOrder::NormalizeThenSum;
    let sequence = GroupAdvantage {
        scale,
        normalize: normalizes.then_some(Whitening {
            epsilon,
            ..Whitening::trl()
        }),
        ..group.clone()
    };

    let scores = case.input("rewards")?;
    let mut rewards = scores.clone();
    if let Some(bounds) = range(case, "reward_clip")? {
        let shaping = RewardShaping {
            clip_range: Some(bounds),
            ..RewardShaping::default()
        };
        rewards = shaping.apply(&rewards, 1, None)?.rewards;
    }
    let group_size = case.config.size("group_size")?;
    let (mask, old, reference) = (
        case.optional("mask"),
        case.optional("old_log_probs"),
        case.optional("ref_log_probs"),
    );
    let advantages = match (
        case.config.optional_number("beta")?,
        &mask,
        &old,
        &reference,
    ) {
        (Some(coef), Some(mask), Some(old), Some(reference)) => {
            let batch = AdvantageBatch::new(&rewards, group_size)
                .response_mask(mask)
                .old_log_probs(old)
                .ref_log_probs(reference);
            let penalized = GroupAdvantage {
                kl_penalty: Some(k1_penalty(coef)),
                ..sequence
            };
            penalized.estimate(&batch)?.advantages
        }
        (None, None, None, None) => {
            let batch = AdvantageBatch::new(&rewards, group_size);
            sequence.estimate(&batch)?.advantages
        }
        _ => bail!("a KL penalty needs beta, mask, old_log_probs and ref_log_probs together"),
    };

    let outputs = Outputs::default().out("advantages", &advantages);
    with_trl_metrics(outputs, &scores, group_size, &group, scale)
}

/// Adds TRL's metrics, which use the rewards before the clip and the KL penalty.
fn with_trl_metrics(
    outputs: Outputs,
    scores: &Tensor,
    group_size: usize,
    group: &GroupAdvantage,
    scale: Scale,
) -> Result<Outputs> {
    let batch_statistics = group.group_statistics(scores, scores.dim(0)?)?;
    let constant = match (group.components, scale) {
        (ComponentOrder::NormalizeThenSum, _) => {
            let sums = group.compute(scores, group_size, scale)?;
            GroupAdvantage::grpo()
                .group_statistics(&sums, scores.dim(0)?)?
                .zero_variance
        }
        (_, Scale::Batch) => batch_statistics.zero_variance,
        _ => group.group_statistics(scores, group_size)?.zero_variance,
    };
    let fraction = constant.to_dtype(DType::F64)?.mean_all()?;
    Ok(outputs
        .out("reward_std", &batch_statistics.std.mean_all()?)
        .out("fraction_zero_std", &fraction))
}

fn k1_penalty(coef: f64) -> KlPenalty {
    let kl = Kl {
        log_ratio_clamp: None,
        ..Kl::new(KlEstimator::K1)
    };
    KlPenalty { coef, kl }
}

/// verl's estimators from the reward of a sequence.
fn verl_outcome(case: &Case) -> Result<Outputs> {
    let estimator = case.config.text("estimator")?;
    ensure!(
        case.variant == format!("verl_{estimator}"),
        "unknown estimator {estimator}"
    );
    let mut rewards = match case.optional("rewards") {
        Some(rewards) => rewards,
        None => case.input("token_level_rewards")?,
    };
    if estimator == "gdpo" {
        rewards = case.input("reward_components")?;
    }
    let response_mask = case.input("mask")?;
    let batch = AdvantageBatch::new(&rewards, groups(case)?).response_mask(&response_mask);
    let mask = batch.mask()?;
    let pipeline = verl_pipeline(case, &estimator)?;
    let tokens = pipeline.estimate(&batch)?.on_tokens(&mask)?;
    // All tokens of a sequence have the same advantage; a sequence without tokens has 0.
    let lengths = mask.lengths(tokens.dtype())?.squeeze(1)?.maximum(1.)?;
    let first = (tokens.sum(D::Minus1)? / lengths)?;
    Ok(Outputs::default()
        .out("sequence_advantages", &first)
        .out("advantages", &tokens)
        .out("returns", &tokens))
}

/// The stages of an estimator of verl.
fn verl_pipeline(case: &Case, estimator: &str) -> Result<AdvantagePipeline> {
    let group = GroupAdvantage {
        single_sample: SingletonGroup::Raw,
        scale: Scale::None,
        ..GroupAdvantage::default()
    };
    let epsilon =
        |key: &str| -> Result<f64> { Ok(case.config.optional_number(key)?.unwrap_or(0.)) };
    let by_std = || -> Result<Scale> {
        Ok(if case.config.flag("normalize_by_std")? {
            Scale::Group
        } else {
            Scale::None
        })
    };
    let whitened = |epsilon: f64| TokenAdvantage {
        whiten_advantages: true,
        whitening: Whitening {
            epsilon,
            ..Whitening::default()
        },
        ..TokenAdvantage::default()
    };
    Ok(match estimator {
        "grpo" | "grpo_vectorized" => {
            let group = GroupAdvantage {
                epsilon: epsilon("epsilon")?,
                scale: by_std()?,
                ..group
            };
            AdvantagePipeline::from(group)
        }
        "grpo_passk" => {
            let group = GroupAdvantage {
                baseline: Baseline::BestOfOthers,
                epsilon: epsilon("epsilon")?,
                single_sample: SingletonGroup::Error,
                scale: by_std()?,
                ..group
            };
            AdvantagePipeline::from(group)
        }
        "rloo" | "rloo_vectorized" => {
            let group = GroupAdvantage {
                baseline: Baseline::LeaveOneOut,
                single_sample: if estimator == "rloo" {
                    SingletonGroup::Raw
                } else {
                    SingletonGroup::Zero
                },
                ..group
            };
            AdvantagePipeline::from(group)
        }
        "opo" => {
            let group = GroupAdvantage {
                baseline: Baseline::LengthWeighted,
                ..group
            };
            AdvantagePipeline::from(group)
        }
        "gpg" => {
            let group = GroupAdvantage {
                compensation: ZeroSignalScaling::NonZeroRewards,
                factor: 1. / case.config.number("f_norm")?,
                ..group
            };
            AdvantagePipeline::from(group)
        }
        "reinforce_plus_plus_baseline" => {
            AdvantagePipeline::from(group).then(whitened(epsilon("epsilon")?))
        }
        "gdpo" => {
            case.config.ignore(&["group_size"]); // the groups are in `group_ids`
            let group = GroupAdvantage {
                components: ComponentOrder::NormalizeThenSum,
                epsilon: epsilon("epsilon")?,
                reward_weights: numbers(case, "component_weights")?,
                scale: Scale::Group,
                ..group
            };
            AdvantagePipeline::from(group).then(whitened(epsilon("whiten_epsilon")?))
        }
        other => bail!("unknown estimator {other}"),
    })
}

fn groups(case: &Case) -> Result<Groups> {
    let ids = case.input("group_ids")?.to_dtype(DType::I64)?;
    Ok(ids.to_vec1::<i64>()?.into())
}

fn verl_reinforce_plus_plus(case: &Case) -> Result<Outputs> {
    check_estimator(case, "reinforce_plus_plus")?;
    let tokens = TokenAdvantage {
        gamma: case.config.number("gamma")?,
        whiten_advantages: true,
        whitening: Whitening {
            epsilon: case.config.number("whiten_epsilon")?,
            ..Whitening::default()
        },
        ..TokenAdvantage::default()
    };
    let (rewards, mask) = (case.input("token_level_rewards")?, case.input("mask")?);
    let out = tokens.estimate(&AdvantageBatch::from_token_rewards(&rewards, &mask))?;
    Ok(Outputs::default()
        .out("advantages", &out.advantages)
        .out("returns", &out.returns.context("no returns")?))
}

/// `ours` inside the mask, and outside it the values that the peer leaves there, which the case
/// contains too.
fn with_leftovers(mask: &Mask, ours: &Tensor, leftovers: &Tensor) -> Result<Tensor> {
    Ok(mask
        .selected()
        .where_cond(ours, &leftovers.to_dtype(ours.dtype())?)?)
}

/// `x` inside the mask, and outside it the value of the next token in the mask.
fn carried(mask: &Mask, x: &Tensor) -> Result<Tensor> {
    let outside = mask.selected().eq(0u8)?.to_dtype(x.dtype())?;
    Ok(reverse_recurrence(&mask.select(x)?, &outside)?)
}

fn verl_remax(case: &Case) -> Result<Outputs> {
    check_estimator(case, "remax")?;
    let (rewards, response_mask) = (case.input("token_level_rewards")?, case.input("mask")?);
    let baselines = case.input("reward_baselines")?;
    let batch =
        AdvantageBatch::from_token_rewards(&rewards, &response_mask).reward_baselines(&baselines);
    let mask = batch.mask()?;
    let out = AdvantagePipeline::remax().estimate(&batch)?;
    let returns = out.returns.context("no returns")?;
    // verl subtracts no baseline outside the mask.
    let leftovers = carried(&mask, &returns)?;
    Ok(Outputs::default()
        .out(
            "advantages",
            &with_leftovers(&mask, &out.advantages, &leftovers)?,
        )
        .out("returns", &with_leftovers(&mask, &returns, &leftovers)?))
}

/// Advantages before and after whitening, and returns.
fn gae(case: &Case, whitening: Option<Whitening>, response_mask: &Tensor) -> Result<[Tensor; 3]> {
    let (rewards, values) = (case.input("token_level_rewards")?, case.input("values")?);
    let batch = AdvantageBatch::from_token_rewards(&rewards, response_mask).values(&values);
    let plain = TokenAdvantage {
        gamma: case.config.number("gamma")?,
        lambda: Some(case.config.number("lambda")?),
        ..TokenAdvantage::default()
    };
    let whitened = TokenAdvantage {
        whiten_advantages: whitening.is_some(),
        whitening: whitening.unwrap_or_default(),
        ..plain
    };
    let out = whitened.estimate(&batch)?;
    Ok([
        plain.estimate(&batch)?.advantages,
        out.advantages,
        out.returns.context("no returns")?,
    ])
}

fn verl_gae(case: &Case) -> Result<Outputs> {
    check_estimator(case, "gae")?;
    let whitening = Whitening {
        epsilon: case.config.number("whiten_epsilon")?,
        ..Whitening::default()
    };
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let [plain, whitened, returns] = gae(case, Some(whitening), &response_mask)?;
    // Outside the mask, verl's advantage is that of the next token, whitened, and its return is
    // that plus the value.
    let carried = carried(&mask, &plain)?;
    let advantages = with_leftovers(&mask, &whitened, &whitening.apply(&carried, &mask)?)?;
    let returns = with_leftovers(&mask, &returns, &(carried + case.input("values")?)?)?;
    Ok(Outputs::default()
        .out("advantages", &advantages)
        .out("returns", &returns))
}

fn twinkle_gae(case: &Case) -> Result<Outputs> {
    check_estimator(case, "gae")?;
    let epsilon = case.config.number("epsilon")?;
    let whitening = case.config.flag("normalize")?.then_some(Whitening {
        epsilon,
        ..Whitening::twinkle()
    });
    let [_, advantages, returns] = gae(case, whitening, &case.input("mask")?)?;
    Ok(Outputs::default()
        .out("advantages", &advantages)
        .out("returns", &returns))
}

fn optimal_token_baseline(case: &Case) -> Result<Outputs> {
    let estimator = case.config.text("estimator")?;
    let alignment = match estimator.as_str() {
        "optimal_token_baseline" => TokenAlignment::Position,
        "tir_optimal_token_baseline" => TokenAlignment::Generated,
        other => bail!("unknown estimator {other}"),
    };
    let baseline = OptimalTokenBaseline {
        alignment,
        handle_zero_tail: case.config.flag("handle_zero_tail")?,
        epsilon: case.config.number("epsilon")?,
    };
    let tokens = TokenAdvantage {
        baseline: TokenBaseline::OptimalToken(baseline),
        ..TokenAdvantage::default()
    };
    let (rewards, response_mask) = (case.input("token_level_rewards")?, case.input("mask")?);
    let (old, squares) = (case.input("old_log_probs")?, case.input("sum_pi_squared")?);
    let weights = case.optional("rollout_weights");
    let mut batch = AdvantageBatch::from_token_rewards(&rewards, &response_mask)
        .groups(groups(case)?)
        .old_log_probs(&old)
        .sum_of_squared_probs(&squares);
    if let Some(weights) = &weights {
        batch = batch.importance_weights(weights);
    }
    let mask = batch.mask()?;
    let out = tokens.estimate(&batch)?;
    let returns = out.returns.context("no returns")?;
    Ok(Outputs::default().out("advantages", &out.advantages).out(
        "returns",
        &with_leftovers(&mask, &returns, &carried(&mask, &returns)?)?,
    ))
}

fn openrlhf(case: &Case) -> Result<Outputs> {
    let estimator = case.config.text("estimator")?;
    ensure!(
        case.variant == format!("openrlhf_{estimator}"),
        "unknown estimator {estimator}"
    );
    let (baseline, scale) = match estimator.as_str() {
        "rloo" => (Baseline::LeaveOneOut, Scale::None),
        "reinforce_baseline" | "dr_grpo" => (Baseline::GroupMean, Scale::None),
        "group_norm" => (Baseline::GroupMean, Scale::Group),
        "flash_reinforce" => (Baseline::BatchMean, Scale::None),
        "reinforce" | "gae" => (Baseline::None, Scale::None),
        other => bail!("unknown estimator {other}"),
    };
    let sequence = GroupAdvantage {
        baseline,
        scale,
        epsilon: case.config.optional_number("epsilon")?.unwrap_or(0.),
        clip: range(case, "reward_clip")?,
        ..GroupAdvantage::default()
    };
    let normalizes = matches!(
        estimator.as_str(),
        "reinforce" | "reinforce_baseline" | "gae"
    );
    let whitening = Whitening {
        epsilon: case.config.number("min_variance")?,
        divide: case.config.flag("normalize_std")?,
        ..Whitening::openrlhf()
    };
    let lambda = case.config.number("lambda")?;
    let plain = TokenAdvantage {
        kl_penalty: Some(k1_penalty(case.config.number("kl_coef")?)),
        gamma: case.config.number("gamma")?,
        lambda: (estimator == "gae").then_some(lambda),
        masked_tokens: MaskedTokens::Counted,
        whitening,
        ..TokenAdvantage::default()
    };
    let tokens = TokenAdvantage {
        whiten_advantages: normalizes,
        ..plain
    };

    let (rewards, response_mask) = (case.input("rewards")?, case.input("mask")?);
    // The case contains the divergence itself, which is k1 of it and 0.
    let kl = case.input("kl")?;
    let (zeros, values) = (kl.zeros_like()?, case.optional("values"));
    let mut batch = AdvantageBatch::new(&rewards, case.config.size("group_size")?)
        .response_mask(&response_mask)
        .old_log_probs(&kl)
        .ref_log_probs(&zeros);
    if let Some(values) = &values {
        batch = batch.values(values);
    }
    let estimate = |tokens: TokenAdvantage| {
        let pipeline = AdvantagePipeline::from(sequence.clone()).then(tokens);
        pipeline.estimate(&batch)
    };
    let out = estimate(tokens)?;
    let mut advantages = out.advantages;
    if normalizes {
        // OpenRLHF also normalizes the positions outside the mask.
        let leftovers = whitening.apply(&estimate(plain)?.advantages, &batch.mask()?)?;
        advantages = with_leftovers(&batch.mask()?, &advantages, &leftovers)?;
    }
    Ok(Outputs::default()
        .out("advantages", &advantages)
        .out("returns", &out.returns.context("no returns")?))
}

/// ROLL accumulates rewards and values over all positions, and masks only the rewards before and
/// the advantages after. So the first stage here has a mask of ones, and the second only whitens
/// and clips.
fn roll(case: &Case) -> Result<Outputs> {
    let estimator = case.config.text("estimator")?;
    ensure!(
        case.variant == format!("roll_{estimator}"),
        "unknown estimator {estimator}"
    );
    let lambda = case.config.number("lambda")?;
    let whitening = Whitening {
        epsilon: case.config.number("whiten_epsilon")?,
        ..Whitening::default()
    };
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let mut rewards = case.input("token_level_rewards")?;
    if case.config.flag("whiten_rewards")? {
        rewards = whitening.apply(&rewards, &mask)?;
    }
    let rewards = mask.select(&rewards)?;

    let everywhere = response_mask.ones_like()?;
    let values = case.optional("values");
    let mut batch = AdvantageBatch::from_token_rewards(&rewards, &everywhere);
    if let Some(values) = &values {
        batch = batch.values(values);
    }
    let sums = TokenAdvantage {
        gamma: case.config.number("gamma")?,
        lambda: match estimator.as_str() {
            "reinforce" => None,
            "gae" => Some(lambda),
            other => bail!("unknown estimator {other}"),
        },
        ..TokenAdvantage::default()
    };
    let sums = sums.estimate(&batch)?;

    // With gamma 0, a return is the reward of the token itself.
    let finish = TokenAdvantage {
        gamma: 0.,
        whiten_advantages: case.config.flag("whiten_advantages")?,
        whitening,
        advantage_clip: case.config.optional_number("advantage_clip")?,
        ..TokenAdvantage::default()
    };
    let batch = AdvantageBatch::from_token_rewards(&sums.advantages, &response_mask);
    let finished = finish.estimate(&batch)?;
    let outputs = Outputs::default()
        .out("advantages", &finished.advantages)
        .out("returns", &sums.returns.context("no returns")?);
    match finished.metrics.to_host()?.get("advantage_clip_fraction") {
        None => Ok(outputs),
        Some(fraction) => {
            // ROLL divides by the number of all positions, including masked ones.
            let valid = mask.count(DType::F64)?.to_scalar::<f64>()?;
            let all = response_mask.elem_count() as f64;
            outputs.number("clip_fraction", fraction * valid / all)
        }
    }
}
