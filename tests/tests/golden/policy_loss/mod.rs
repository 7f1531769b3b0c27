//! `policy_loss`: log-probs and advantages to a loss, its gradient and its metrics. Each peer's options are put into ours
//! in a file of its own.

mod openrlhf;
pub(crate) mod roll;
pub(crate) mod trl;
mod twinkle;
mod verl;

use anyhow::{Context, Result, bail};
use candle_core::{D, DType, Tensor, Var};
use candle_grpo_core::{Mask, MetricValues};
use candle_grpo_loss::{
    Clip, ImportanceLevel, Kl, KlEstimator, PolicyBatch, PolicyLoss, PolicyLossOutput, StepTotals,
};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    let (peer, _) = case
        .variant
        .split_once('_')
        .context("a variant without a peer")?;
    let tensors = Tensors::read(case)?;
    let setup = match peer {
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
    let results = Results {
        metrics: output.metrics.to_host()?,
        output,
        mask: Mask::new(&tensors.mask)?,
    };
    let outputs = match peer {
        "verl" => verl::metrics(case, outputs, &results, &tensors)?,
        "roll" => roll::metrics(case, outputs, &results, &setup, &tensors)?,
        "twinkle" => twinkle::metrics(case, outputs, &setup, &tensors)?,
        "trl" | "liger" => trl::metrics(case, outputs, &results, &setup, &tensors)?,
        _ => openrlhf::metrics(outputs, &results, &setup, &tensors)?,
    };
    Ok(Ok(outputs))
}

/// The inputs of a case.
pub(crate) struct Tensors {
    pub(crate) log_probs: Var,
    pub(crate) old_log_probs: Option<Tensor>,
    pub(crate) ref_log_probs: Option<Tensor>,
    pub(crate) rollout_log_probs: Option<Tensor>,
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
            entropies: case
                .optional("entropies")
                .map(|e| Var::from_tensor(&e))
                .transpose()?,
            scores: case.optional("scores"),
            advantages: case.input("advantages")?,
            mask: case.input("mask")?,
        })
    }

    /// The old log-probs, or the current ones where they stand for them.
    fn old(&self) -> &Tensor {
        self.old_log_probs.as_ref().unwrap_or(&self.log_probs)
    }

    /// `log_probs - old_log_probs`, 0 outside the mask, in f64.
    fn log_ratio(&self) -> Result<Tensor> {
        let f64 = |x: &Tensor| x.detach().to_dtype(DType::F64);
        let d = (f64(&self.log_probs)? - f64(self.old())?)?;
        Ok(Mask::new(&self.mask)?.select(&d)?)
    }

    /// Advantages `[B, T]` in f64.
    fn token_advantages(&self) -> Result<Tensor> {
        let advantages = self.advantages.to_dtype(DType::F64)?;
        let advantages = match advantages.rank() {
            1 => advantages.unsqueeze(1)?,
            _ => advantages,
        };
        Ok(advantages.broadcast_as(self.mask.shape())?.contiguous()?)
    }
}

/// What a peer's options come to.
pub(crate) struct Setup {
    pub(crate) loss: PolicyLoss,
    pub(crate) totals: StepTotals,
    /// Multiplies the loss at last.
    pub(crate) factor: f64,
    pub(crate) importance_weights: Option<Tensor>,
    pub(crate) sample_weights: Option<Tensor>,
    pub(crate) policy_mask: Option<Tensor>,
    /// Figures that the peer's own correction gives.
    pub(crate) extra: MetricValues,
    /// Why the case records what ours does not do.
    pub(crate) defect: Option<String>,
}

impl Setup {
    pub(crate) fn new(loss: PolicyLoss, totals: StepTotals) -> Self {
        Self {
            loss,
            totals,
            factor: 1.,
            importance_weights: None,
            sample_weights: None,
            policy_mask: None,
            extra: MetricValues::default(),
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
        let mut batch = self.fill(batch, tensors);
        let selected = loss.select_tokens_to_host(&batch, 0)?;
        if let Some(x) = &selected {
            batch = batch.selected_tokens(x);
        }
        Ok(loss.compute(&batch, &self.totals)?)
    }

    /// The batch with what the case gives besides log-probs, advantages and mask.
    pub(crate) fn fill<'a>(
        &'a self,
        mut batch: PolicyBatch<'a>,
        tensors: &'a Tensors,
    ) -> PolicyBatch<'a> {
        if let Some(x) = &tensors.old_log_probs {
            batch = batch.old_log_probs(x);
        }
        if let Some(x) = &tensors.ref_log_probs {
            batch = batch.ref_log_probs(x);
        }
        if let Some(x) = &tensors.rollout_log_probs {
            batch = batch.rollout_log_probs(x);
        }
        if let Some(x) = &tensors.entropies {
            batch = batch.entropy(x);
        }
        if let Some(x) = &tensors.scores {
            batch = batch.scores(x);
        }
        if let Some(x) = &self.importance_weights {
            batch = batch.importance_weights(x);
        }
        if let Some(x) = &self.sample_weights {
            batch = batch.sample_weights(x);
        }
        if let Some(x) = &self.policy_mask {
            batch = batch.policy_mask(x);
        }
        batch
    }
}

/// What ours gave.
pub(crate) struct Results {
    pub(crate) output: PolicyLossOutput,
    pub(crate) metrics: MetricValues,
    pub(crate) mask: Mask,
}

impl Results {
    fn metric(&self, name: &str) -> f64 {
        self.metrics.get(name).unwrap_or_default()
    }

    /// The mean of `x` over the mask.
    fn mean(&self, x: &Tensor) -> Result<f64> {
        let sum = self.mask.select(x)?.to_dtype(DType::F64)?.sum_all()?;
        Ok((sum / self.mask.count(DType::F64)?)?.to_scalar()?)
    }

    /// The mean of `x` over the tokens of each sequence, 0 where there are none.
    fn row_means(&self, x: &Tensor) -> Result<Tensor> {
        let sums = self
            .mask
            .select(x)?
            .to_dtype(DType::F64)?
            .sum_keepdim(D::Minus1)?;
        Ok((sums / self.mask.lengths(DType::F64)?.maximum(1.)?)?)
    }
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

/// A flag as numbers.
fn number(flag: &Tensor) -> Result<Tensor> {
    Ok(flag.to_dtype(DType::F64)?)
}
