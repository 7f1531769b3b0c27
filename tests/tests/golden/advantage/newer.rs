//! The advantages of prime-rl and ms-swift.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::advantage::{
    KlPenalty, RoleBaselines, SingletonGroup, TeacherWeight, Whitening,
};
use candle_grpo_core::rewards::{CostPenalty, Costs};
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, Groups, Mask,
    RewardShaping, Scale, TokenAdvantage, experimental,
};
use serde_json::Value;

use super::{groups, k1_penalty, numbers, with_leftovers};
use crate::case::{Case, Outputs};

pub(super) fn run(case: &Case) -> Result<Outputs> {
    match case.variant.as_str() {
        "prime_rae" => role_baselines(case),
        "swift_rlsd" => rlsd(case),
        "swift_teacher" => teacher(case),
        variant if variant.starts_with("prime_") => prime(case),
        _ => swift(case),
    }
}

fn integers(case: &Case, name: &str) -> Result<Vec<i64>> {
    let ids = case.input(name)?.to_dtype(DType::I64)?;
    Ok(ids.to_vec1::<i64>()?)
}

fn prime(case: &Case) -> Result<Outputs> {
    let pipeline = match case.config.text("estimator")?.as_str() {
        "dr_grpo" | "hierarchical_grpo" => AdvantagePipeline::dr_grpo(),
        "max_rl" => {
            let epsilon = case.config.number("epsilon")?;
            experimental::max_rl().map_sequence(|group| group.epsilon = epsilon)
        }
        other => bail!("unknown estimator {other}"),
    };
    let pipeline = pipeline.map_sequence(|group| group.single_sample = SingletonGroup::Zero);
    let groups = match case.variant.as_str() {
        "prime_hierarchical_grpo" => {
            let within = case.config.get("agents_within_episode");
            let within = within.as_array().context("agents are not a list")?;
            let within: Option<Vec<i64>> = within.iter().map(Value::as_i64).collect();
            let within = within.context("an agent is not an integer")?;
            let (roles, episodes) = (integers(case, "agent_ids")?, integers(case, "episode_ids")?);
            Groups::of_roles(&roles, &episodes, &within)?
        }
        _ => groups(case)?,
    };
    let mut rewards = case.input("rewards")?;
    let penalty = case.config.get("length_penalty");
    if !penalty.is_null() {
        let penalty: CostPenalty = serde_json::from_value(penalty)?;
        let (output, input) = (case.input("output_tokens")?, case.input("input_tokens")?);
        let turns = case.input("turns")?;
        let costs = Costs {
            output_tokens: Some(&output),
            input_tokens: Some(&input),
            turns: Some(&turns),
        };
        rewards = penalty.apply(&rewards.to_dtype(DType::F64)?, &groups, &costs)?;
    }
    let advantages = pipeline.estimate(&AdvantageBatch::new(&rewards, groups))?;
    Ok(Outputs::default().out("advantages", &advantages.advantages))
}

fn role_baselines(case: &Case) -> Result<Outputs> {
    ensure!(case.config.text("estimator")? == "rae", "unknown estimator");
    let roles = integers(case, "agent_ids")?.into_iter();
    let roles: Vec<String> = roles.map(|role| role.to_string()).collect();
    let rewards = case
        .input("rewards")?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()?;
    let mut baselines = RoleBaselines::new(case.config.number("decay")?)?;
    let advantages = baselines.advantages(&rewards, &roles)?;
    let found = baselines.baselines();
    // A role without a sample has no entry, and starts at 0.
    let all = (0..case.config.size("agents")?).map(|role| found.get(&role.to_string()));
    let all: Vec<f64> = all
        .map(|baseline| baseline.copied().unwrap_or(0.))
        .collect();
    let tensor = |x: &[f64]| Tensor::new(x, &Device::Cpu);
    Ok(Outputs::default()
        .out("advantages", &tensor(&advantages)?)
        .out("baselines", &tensor(&all)?))
}

fn swift(case: &Case) -> Result<Outputs> {
    let options = &case.config;
    let epsilon = options.number("epsilon")?;
    let scale = match options.text("scale")?.as_str() {
        "group" | "gdpo" => Scale::Group,
        "batch" => Scale::Batch,
        "none" => Scale::None,
        other => bail!("unknown scale {other}"),
    };
    let estimator = options.text("estimator")?;
    let is_gdpo = case.variant == "swift_gdpo";
    let pipeline = match estimator.as_str() {
        "grpo" if is_gdpo => AdvantagePipeline::gdpo(),
        "grpo" | "reinforce_plus_plus" => AdvantagePipeline::grpo(),
        "rloo" => AdvantagePipeline::rloo(),
        other => bail!("unknown estimator {other}"),
    };
    let weights = numbers(case, "component_weights")?;
    let mut penalty: Option<KlPenalty> = None;
    if let Some(coef) = options.optional_number("kl_coef")? {
        penalty = Some(k1_penalty(coef));
    }
    // The deviation of the centered rewards of the batch: their mean is 0.
    let of_centered = estimator == "reinforce_plus_plus" && scale == Scale::Batch;
    let change = |group: &mut GroupAdvantage| {
        group.epsilon = epsilon;
        group.scale = if of_centered { Scale::None } else { scale };
        group.single_sample = SingletonGroup::Zero;
        group.reward_weights.clone_from(&weights);
        group.kl_penalty = penalty;
        if of_centered || is_gdpo {
            group.normalize = Some(Whitening {
                epsilon,
                ..Whitening::trl()
            });
        }
    };
    let pipeline = pipeline.map_sequence(change);
    let rewards = case.input("rewards")?;
    // The divergence itself is k1 of it and 0, on one token.
    let rows = rewards.dim(0)?;
    let kl = match case.optional("sequence_kl") {
        Some(kl) => kl.reshape((rows, 1))?,
        None => Tensor::zeros((rows, 1), DType::F32, &case.device)?,
    };
    let zeros = kl.zeros_like()?;
    let batch = AdvantageBatch::new(&rewards, options.size("group_size")?)
        .response_mask(&kl.ones_like()?)
        .old_log_probs(&kl)
        .ref_log_probs(&zeros);
    let advantages = pipeline.estimate(&batch)?.advantages;
    let shaping = RewardShaping {
        reward_weights: weights.clone(),
        ..Default::default()
    };
    let mut sums = shaping.apply(&rewards, 1, None)?.rewards;
    if let Some(penalty) = &penalty {
        sums = penalty.penalize_sequence_rewards(&sums, &batch)?;
    }
    Ok(Outputs::default()
        .out("advantages", &advantages)
        .out("weighted_rewards", &sums))
}

/// The stage of tokens on advantages that exist already.
fn on_advantages(case: &Case, tokens: TokenAdvantage, step: Option<usize>) -> Result<Tensor> {
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let advantages = case.input("advantages")?;
    let spread = match advantages.rank() {
        1 => mask.spread(&advantages)?,
        _ => mask.select(&advantages)?,
    };
    let (old, teacher) = (
        case.input("old_log_probs")?,
        case.input("teacher_log_probs")?,
    );
    let mut batch = AdvantageBatch::from_token_rewards(&spread, &response_mask)
        .old_log_probs(&old)
        .teacher_log_probs(&teacher);
    batch.step = step;
    // With gamma 0, a return is the reward of the token itself.
    let tokens = TokenAdvantage {
        gamma: 0.,
        ..tokens
    };
    Ok(tokens.estimate(&batch)?.advantages)
}

fn rlsd(case: &Case) -> Result<Outputs> {
    let options = &case.config;
    let step = match options.get("step") {
        Value::Null => None,
        _ => Some(options.size("step")?),
    };
    let decay_steps = options.size("decay_steps")?;
    let weight = TeacherWeight {
        share: CoefSchedule {
            warmup_steps: options.size("warmup_steps")?,
            decay_steps: (decay_steps != 0).then_some(decay_steps),
            ..CoefSchedule::constant(options.number("lambda")?)
        },
        clip: options.number("weight_clip")?,
        negative_only: options.flag("negative_only")?,
    };
    let tokens = TokenAdvantage {
        teacher_weight: Some(weight),
        ..TokenAdvantage::default()
    };
    Outputs::default()
        .out("advantages", &on_advantages(case, tokens, step)?)
        .number("lambda", weight.share_at(step))
}

fn teacher(case: &Case) -> Result<Outputs> {
    let tokens = TokenAdvantage {
        distillation: Some(k1_penalty(case.config.number("distillation_coef")?)),
        ..TokenAdvantage::default()
    };
    let ours = on_advantages(case, tokens, None)?;
    // ms-swift leaves the advantage outside the mask.
    let mask = Mask::new(&case.input("mask")?)?;
    let advantages = case.input("advantages")?;
    let leftovers = match advantages.rank() {
        1 => advantages
            .unsqueeze(1)?
            .broadcast_as(mask.dims()?)?
            .contiguous()?,
        _ => advantages,
    };
    Ok(Outputs::default().out("advantages", &with_leftovers(&mask, &ours, &leftovers)?))
}
