//! `policy_loss`: log-probs and advantages to a loss, its gradient and its metrics. One file
//! translates the options of each peer.

mod areal;
mod gmpo;
mod numbers;
mod openrlhf;
mod prime;
mod roll;
mod swift;
pub(crate) mod trl;
mod twinkle;
mod verl;

use anyhow::{Context, Result, bail};
use candle_core::{Tensor, Var};
use candle_grpo_core::MetricValues;
use candle_grpo_loss::{
    Aggregation, Clip, ImportanceLevel, Kl, KlEstimator, OldPolicy, PolicyBatch, PolicyLoss,
    PolicyLossOutput, StepTotals, Surrogate,
};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    let (peer, _) = case
        .variant
        .split_once('_')
        .context("a variant without a peer")?;
    let tensors = Tensors::read(case)?;
    match case.variant.as_str() {
        "verl_bypass" => return verl::bypass(case, &tensors),
        "trl_gmpo" => return gmpo::run(case, &tensors),
        _ => {}
    }
    let setup = match peer {
        "prime" => return prime::run(case, &tensors),
        "areal" => return areal::run(case, &tensors),
        "swift" => return swift::run(case, &tensors),
        "verl" => verl::setup(case, &tensors)?,
        "roll" => roll::setup(case, &tensors)?,
        "twinkle" => twinkle::setup(case)?,
        "trl" | "liger" => trl::setup(case, &tensors)?,
        "openrlhf" => openrlhf::setup(case, &tensors)?,
        other => bail!("unknown peer {other}"),
    };
    if let Some(reason) = &setup.defect {
        return Ok(Err(reason.clone()));
    }
    let output = setup.compute(&setup.loss, &tensors)?;
    let mut loss = (&output.loss * setup.factor)?;
    if let Some(bonus) = &setup.entropy_bonus {
        loss = (loss + bonus.compute(&tensors)?)?;
    }
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
        "verl" => verl::metrics(case, outputs, &metrics, &tensors)?,
        "roll" => roll::metrics(case, outputs, &setup, &tensors)?,
        "twinkle" => twinkle::metrics(case, outputs, &setup, &tensors)?,
        "trl" | "liger" => trl::metrics(case, outputs, &metrics, &setup, &tensors)?,
        _ => openrlhf::metrics(case, outputs, &metrics, &setup, &tensors)?,
    };
    Ok(Ok(outputs))
}

/// The inputs of a case.
#[derive(Clone)]
pub(crate) struct Tensors {
    pub(crate) log_probs: Var,
    pub(crate) old_log_probs: Option<Tensor>,
    pub(crate) ref_log_probs: Option<Tensor>,
    pub(crate) rollout_log_probs: Option<Tensor>,
    pub(crate) teacher_log_probs: Option<Tensor>,
    pub(crate) entropies: Option<Var>,
    pub(crate) scores: Option<Tensor>,
    pub(crate) advantages: Tensor,
    pub(crate) mask: Tensor,
}

impl Tensors {
    fn read(case: &Case) -> Result<Self> {
        Self::with_log_probs(case, case.variable("log_probs")?)
    }

    /// The inputs of a case whose log-probs are computed.
    pub(crate) fn with_log_probs(case: &Case, log_probs: Var) -> Result<Self> {
        let given = case
            .config
            .get("old_log_probs_given")
            .as_bool()
            .unwrap_or(true);
        Ok(Self {
            log_probs,
            old_log_probs: given.then(|| case.input("old_log_probs")).transpose()?,
            ref_log_probs: case.optional("ref_log_probs"),
            rollout_log_probs: case.optional("rollout_log_probs"),
            teacher_log_probs: case.optional("teacher_log_probs"),
            entropies: case
                .optional("entropies")
                .map(|e| Var::from_tensor(&e))
                .transpose()?,
            scores: case.optional("scores"),
            advantages: case.input("advantages")?,
            mask: case.input("mask")?,
        })
    }

    /// The old log-probs, or the current ones where they replace them.
    fn old(&self) -> &Tensor {
        self.old_log_probs.as_ref().unwrap_or(&self.log_probs)
    }
}

/// The translation of a peer's options.
pub(crate) struct Setup {
    pub(crate) loss: PolicyLoss,
    pub(crate) totals: StepTotals,
    /// The factor of the loss.
    pub(crate) factor: f64,
    /// An entropy bonus with denominators of its own.
    pub(crate) entropy_bonus: Option<EntropyBonus>,
    pub(crate) importance_weights: Option<Tensor>,
    pub(crate) sample_weights: Option<Tensor>,
    pub(crate) policy_mask: Option<Tensor>,
    /// True if the ratio is taken against the rollout policy.
    pub(crate) against_rollout: bool,
    /// The reason why the library does not reproduce the case.
    pub(crate) defect: Option<String>,
}

/// An entropy bonus that a peer normalizes apart from the policy term.
pub(crate) struct EntropyBonus {
    /// A loss whose only term is the bonus.
    pub(crate) loss: PolicyLoss,
    pub(crate) totals: StepTotals,
    /// The response mask.
    pub(crate) mask: Tensor,
    pub(crate) entropy_mask: Option<Tensor>,
    pub(crate) factor: f64,
}

impl EntropyBonus {
    fn compute(&self, tensors: &Tensors) -> Result<Tensor> {
        let entropies = tensors.entropies.as_ref().context("no entropies")?;
        let mut batch = PolicyBatch::new(&tensors.log_probs, &tensors.advantages, &self.mask)
            .entropy(entropies);
        batch.entropy_mask = self.entropy_mask.clone();
        let output = self.loss.compute(&batch, &self.totals)?;
        Ok((output.loss * self.factor)?)
    }
}

impl Setup {
    pub(crate) fn new(loss: PolicyLoss, totals: StepTotals) -> Self {
        Self {
            loss,
            totals,
            factor: 1.,
            entropy_bonus: None,
            importance_weights: None,
            sample_weights: None,
            policy_mask: None,
            against_rollout: false,
            defect: None,
        }
    }

    pub(crate) fn compute(&self, loss: &PolicyLoss, tensors: &Tensors) -> Result<PolicyLossOutput> {
        self.compute_with(loss, tensors, &tensors.log_probs)
    }

    pub(crate) fn compute_with(
        &self,
        loss: &PolicyLoss,
        tensors: &Tensors,
        log_probs: &Tensor,
    ) -> Result<PolicyLossOutput> {
        let batch = PolicyBatch::new(log_probs, &tensors.advantages, &tensors.mask);
        let mut batch = self.fill(batch, tensors)?;
        batch.selected_tokens = loss.select_tokens(&batch, 0)?;
        Ok(loss.compute(&batch, &self.totals)?)
    }

    /// Adds the other inputs of the case to a batch of log-probs, advantages and mask.
    pub(crate) fn fill(&self, mut batch: PolicyBatch, tensors: &Tensors) -> Result<PolicyBatch> {
        if let Some(x) = &tensors.old_log_probs {
            batch = batch.old_log_probs(x);
        }
        if self.against_rollout {
            let rollout = tensors.rollout_log_probs.as_ref();
            let rollout = rollout.context("no log-probs of the rollout")?;
            batch = batch.old_policy(OldPolicy::Rollout(rollout.clone()));
        }
        Ok(PolicyBatch {
            ref_log_probs: tensors.ref_log_probs.clone(),
            rollout_log_probs: tensors.rollout_log_probs.clone(),
            entropy: tensors.entropies.as_deref().cloned(),
            scores: tensors.scores.clone(),
            importance_weights: self.importance_weights.clone(),
            sample_weights: self.sample_weights.clone(),
            policy_mask: self.policy_mask.clone(),
            ..batch
        })
    }
}

/// The metric, 0 where the loss has none of that name.
fn metric(metrics: &MetricValues, name: &str) -> f64 {
    metrics.get(name).unwrap_or_default()
}

/// The clip of a case. A width below 1 that exceeds 1 does not clip: ratios are positive.
fn clip(case: &Case) -> Result<Clip> {
    Ok(Clip {
        low: case.config.number("clip_low")?.min(1.),
        high: case.config.number("clip_high")?,
        dual_clip: case.config.optional_number("dual_clip")?,
        delta: case.config.optional_number("delta")?,
    })
}

/// A loss over tokens whose log-ratio is not bounded.
fn unbounded(surrogate: impl Into<Surrogate>) -> PolicyLoss {
    PolicyLoss {
        surrogate: surrogate.into(),
        log_ratio_clamp: None,
        aggregation: Aggregation::TokenMean,
        allow_length_weighting: true,
        ..PolicyLoss::default()
    }
}

/// The lower bound of a ratio at a distance from 1; ratios are positive.
fn ratio_min(distance: f64) -> f64 {
    (1. - distance).max(0.)
}

fn level(case: &Case) -> Result<ImportanceLevel> {
    Ok(
        match case.config.text_or("importance_level", "token")?.as_str() {
            "token" => ImportanceLevel::Token,
            "sequence" => ImportanceLevel::Sequence,
            "sequence_token" => ImportanceLevel::SequenceToken,
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
