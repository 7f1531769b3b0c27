//! `policy_loss` and `group_advantage` on a step of 64 completions of 512 tokens.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{GroupAdvantageOptions, SampleGroups, composed, group_advantage};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, PolicyLossOutput, StepTotals};

use crate::case::{Case, Direction, Pair};
use crate::noise::noise;

const SEQUENCES: usize = 64;
const TOKENS: usize = 512;
const SAMPLES: usize = 4096;
const GROUP_SIZE: usize = 8;

pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Direction::ALL
        .map(|direction| Case {
            op: "policy_loss",
            shape: format!("[{SEQUENCES}, {TOKENS}]"),
            dtype: DType::F32,
            direction,
            prepare: Box::new(move |device| policy_loss(direction, device)),
            bandwidth: None,
        })
        .into();
    cases.push(Case {
        op: "group_advantage",
        shape: format!("[{SAMPLES}] in groups of {GROUP_SIZE}"),
        dtype: DType::F32,
        direction: Direction::Forward,
        prepare: Box::new(|device| {
            let rewards = noise(SAMPLES, 1.0, 1, DType::F32, device)?;
            let run = |operator: fn(&Tensor, SampleGroups, GroupAdvantageOptions) -> _| {
                let rewards = rewards.clone();
                Direction::Forward.run(device, move || {
                    operator(
                        &rewards,
                        SampleGroups::OfSize(GROUP_SIZE),
                        GroupAdvantageOptions::default(),
                    )
                })
            };
            Ok(Pair {
                ours: run(group_advantage),
                composed: run(composed::group_advantage),
            })
        }),
        bandwidth: None,
    });
    cases
}

type Operator = fn(&PolicyLoss, &PolicyBatch, &StepTotals) -> Result<PolicyLossOutput>;

/// GRPO with a KL loss, off policy.
fn policy_loss(direction: Direction, device: &Device) -> Result<Pair> {
    let random = |scale, seed| noise((SEQUENCES, TOKENS), scale, seed, DType::F32, device);
    let log_probs = Rc::new(Var::from_tensor(&(random(1.0, 1)? - 1.5)?)?);
    let old = (log_probs.as_detached_tensor() + random(0.2, 2)?)?;
    let reference = (log_probs.as_detached_tensor() + random(0.2, 3)?)?;
    let mask = random(1.0, 4)?.ge(-0.8)?;
    let advantages = noise(SEQUENCES, 1.0, 5, DType::F32, device)?;
    let totals = StepTotals::to_host(&mask)?;
    let inputs = Rc::new((old, reference, mask, advantages, totals));
    let run = |operator: Operator| {
        let (log_probs, inputs) = (log_probs.clone(), inputs.clone());
        direction.run(device, move || {
            let (old, reference, mask, advantages, totals) = &*inputs;
            let batch = PolicyBatch::new(&log_probs, advantages, mask)
                .old_log_probs(old)
                .ref_log_probs(reference);
            Ok(operator(&PolicyLoss::grpo(), &batch, totals)?.loss)
        })
    };
    Ok(Pair {
        ours: run(PolicyLoss::compute),
        composed: run(PolicyLoss::compute_composed),
    })
}
