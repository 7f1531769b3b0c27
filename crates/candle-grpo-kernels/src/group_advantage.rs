//! Advantages of samples relative to their group.

use std::collections::HashMap;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};

use crate::{check, composed, cpu, path};

/// Which samples answer the same prompt.
#[derive(Debug, Clone, Copy)]
pub enum SampleGroups<'a> {
    /// Consecutive blocks of this many samples.
    OfSize(usize),
    /// Samples of the same id, in any order and with groups of any size.
    Ids(&'a [i64]),
}

/// What is subtracted from a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupBaseline {
    /// The mean of the group (GRPO, <https://arxiv.org/abs/2402.03300>).
    #[default]
    Mean,
    /// The mean of the other samples of the group (RLOO, <https://arxiv.org/abs/2402.14740>).
    LeaveOneOut,
}

/// What the centred reward is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdvantageScale {
    /// The standard deviation of the group.
    #[default]
    Group,
    /// The standard deviation of the batch.
    Batch,
    /// Nothing (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    None,
}

/// The advantage of a sample that is alone in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoneSample {
    /// 0.
    #[default]
    Zero,
    /// The reward itself.
    Raw,
    /// The reward minus the mean of the batch; with [`AdvantageScale::Batch`] divided by the batch's standard deviation.
    BatchMean,
}

/// How [`group_advantage`](group_advantage()) computes; the default is GRPO.
#[derive(Debug, Clone, Copy)]
pub struct GroupAdvantageOptions<'a> {
    /// What is subtracted.
    pub baseline: GroupBaseline,
    /// What is divided by.
    pub scale: AdvantageScale,
    /// Added to the standard deviation.
    pub epsilon: f64,
    /// The denominator of a variance is the number of samples minus this, 0 or 1.
    pub ddof: usize,
    /// What a group of one gives.
    pub lone_sample: LoneSample,
    /// The samples `[B]` that have a reward, any dtype, 0 for one that has none: it takes no part in any statistic, and its
    /// advantage is 0. Absent: all have one.
    pub mask: Option<&'a Tensor>,
}

impl Default for GroupAdvantageOptions<'_> {
    fn default() -> Self {
        Self {
            baseline: GroupBaseline::Mean,
            scale: AdvantageScale::Group,
            epsilon: 1e-6,
            ddof: 1,
            lone_sample: LoneSample::Zero,
            mask: None,
        }
    }
}

/// Advantages `[B]` of `rewards` `[B]` of any float dtype: reward minus the baseline of its group, divided by a scale.
///
/// Statistics are in f64 (f32 on Metal, which has none) and relative to the smallest reward, in two passes: equal rewards give exactly
/// 0. The result is f32, or f64 for f64 rewards, without gradient. One pass.
///
/// Errs on other shapes and dtypes, groups that do not fit B, an epsilon that is negative and a ddof above 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{AdvantageScale, GroupAdvantageOptions, SampleGroups, group_advantage};
///
/// let rewards = Tensor::new(&[0f32, 1., 0., 0.5], &Device::Cpu)?;
/// let options = GroupAdvantageOptions { scale: AdvantageScale::None, ..Default::default() };
/// let advantages = group_advantage(&rewards, SampleGroups::Ids(&[7, 7, 2, 2]), options)?;
/// assert_eq!(advantages.to_vec1::<f32>()?, [-0.5, 0.5, -0.25, 0.25]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn group_advantage(
    rewards: &Tensor,
    groups: SampleGroups,
    options: GroupAdvantageOptions,
) -> Result<Tensor> {
    let arguments = Arguments::new(rewards, groups, options)?;
    let rewards = match rewards.device() {
        Device::Cpu => arguments.wide_rewards()?,
        _ if path::is_fused(rewards) => arguments.rewards.clone(),
        _ => return composed::group_advantage_of(&arguments),
    };
    let advantages = rewards.apply_op1_no_bwd(&&GroupAdvantage(&arguments))?;
    advantages.to_dtype(arguments.result)
}

/// The arguments of [`group_advantage`](group_advantage()), checked.
pub(crate) struct Arguments {
    /// `[B]`, contiguous.
    pub(crate) rewards: Tensor,
    /// `[B]` of u8.
    pub(crate) mask: Option<Tensor>,
    pub(crate) members: Members,
    pub(crate) statistic: Statistic,
    pub(crate) result: DType,
}

/// The options that are numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Statistic {
    pub(crate) baseline: GroupBaseline,
    pub(crate) scale: AdvantageScale,
    pub(crate) epsilon: f64,
    pub(crate) ddof: usize,
    pub(crate) lone_sample: LoneSample,
}

/// The samples of each group, one group after the other in the order in which they first appear.
pub(crate) struct Members {
    /// `[B]`
    pub(crate) samples: Vec<u32>,
    /// `[P + 1]`: group p has the samples from `offsets[p]` to `offsets[p + 1]`.
    pub(crate) offsets: Vec<u32>,
}

impl Arguments {
    pub(crate) fn new(
        rewards: &Tensor,
        groups: SampleGroups,
        options: GroupAdvantageOptions,
    ) -> Result<Self> {
        check::float("rewards", rewards)?;
        let &[batch] = rewards.dims() else {
            bail!("rewards: shape {:?}, must be [B]", rewards.dims());
        };
        check::not_negative("epsilon", options.epsilon)?;
        if options.ddof > 1 {
            bail!("ddof: {}, must be 0 or 1", options.ddof);
        }
        if let Some(mask) = options.mask {
            check::same_device(&[("rewards", rewards), ("mask", mask)])?;
            if mask.dims() != [batch] {
                bail!(
                    "mask: shape {:?}, must be that of rewards, [{batch}]",
                    mask.dims()
                );
            }
        }
        Ok(Self {
            members: Members::new(groups, batch)?,
            mask: options
                .mask
                .map(|mask| check::mask(mask, &[batch]))
                .transpose()?,
            statistic: Statistic {
                baseline: options.baseline,
                scale: options.scale,
                epsilon: options.epsilon,
                ddof: options.ddof,
                lone_sample: options.lone_sample,
            },
            result: crate::arithmetic_dtype(rewards.dtype()),
            rewards: rewards.detach().contiguous()?,
        })
    }

    /// The rewards in the dtype of statistics.
    pub(crate) fn wide_rewards(&self) -> Result<Tensor> {
        self.rewards.to_dtype(if self.rewards.device().is_metal() {
            DType::F32
        } else {
            DType::F64
        })
    }
}

impl Members {
    fn new(groups: SampleGroups, batch: usize) -> Result<Self> {
        match groups {
            SampleGroups::OfSize(0) => bail!("groups: of size 0, a group has at least one sample"),
            SampleGroups::OfSize(size) if !batch.is_multiple_of(size) => {
                bail!("groups: of size {size}, which does not divide the {batch} rewards")
            }
            SampleGroups::OfSize(size) => Ok(Self {
                samples: (0..batch as u32).collect(),
                offsets: (0..=batch as u32).step_by(size).collect(),
            }),
            SampleGroups::Ids(ids) if ids.len() != batch => bail!(
                "groups: {} ids for {batch} rewards, there must be one for each",
                ids.len()
            ),
            SampleGroups::Ids(ids) => Ok(Self::from_ids(ids)),
        }
    }

    fn from_ids(ids: &[i64]) -> Self {
        let mut group_of_id = HashMap::new();
        let mut sizes = Vec::new();
        let groups: Vec<usize> = ids
            .iter()
            .map(|&id| {
                let group = *group_of_id.entry(id).or_insert_with(|| {
                    sizes.push(0);
                    sizes.len() - 1
                });
                sizes[group] += 1;
                group
            })
            .collect();
        let mut offsets = vec![0u32];
        for size in sizes {
            offsets.push(offsets[offsets.len() - 1] + size);
        }
        let mut next = offsets.clone();
        let mut samples = vec![0u32; ids.len()];
        for (sample, group) in groups.into_iter().enumerate() {
            samples[next[group] as usize] = sample as u32;
            next[group] += 1;
        }
        Self { samples, offsets }
    }

    /// The samples of each group.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &[u32]> {
        self.offsets
            .windows(2)
            .map(|ends| &self.samples[ends[0] as usize..ends[1] as usize])
    }
}

/// Rewards `[B]` to advantages `[B]`, of f64 on the CPU; on CUDA of f32, bf16 or f16 to f32.
struct GroupAdvantage<'a>(&'a Arguments);

impl CustomOp1 for &GroupAdvantage<'_> {
    fn name(&self) -> &'static str {
        "group_advantage"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let range = cpu::range(layout)?;
        let rewards = &storage.as_slice::<f64>()?[range];
        let advantages = cpu::group_advantage::forward(rewards, self.0)?;
        Ok((CpuStorage::F64(advantages), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::group_advantage::forward(storage, layout, self.0)
    }
}
