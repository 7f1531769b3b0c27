//! The CUDA path of [`group_advantage`](crate::group_advantage()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Layout, Result, Shape, Tensor, bail};

use super::{In, Out, alloc, grid, kernels, with_cuda_floats};
use crate::group_advantage::{Arguments, GroupBaseline};

/// Threads of a block, as in the kernel: 8 warps, each with a group.
const THREADS: u32 = 256;
const GROUPS: usize = 8;
/// The warps go on to further groups, since each block may have to read all rewards.
const MAX_BLOCKS: usize = 128;

/// Rewards `[B]` of f32, bf16 or f16, contiguous, to f32.
pub(crate) fn forward(
    rewards: &CudaStorage,
    layout: &Layout,
    arguments: &Arguments,
) -> Result<(CudaStorage, Shape)> {
    let device = rewards.device();
    let stream = device.cuda_stream();
    let n = layout.shape().elem_count();
    let groups = arguments.members.offsets.len() - 1;
    if n > i32::MAX as usize {
        bail!("rewards: {n} samples, must be below 2^31 on CUDA");
    }
    // SAFETY: the kernel writes all of it, as each sample is in a group.
    #[allow(unsafe_code)]
    let mut advantages = unsafe { alloc::<f32>(device, n)? };
    if n > 0 {
        let mask = arguments.mask.as_ref().map(Tensor::storage_and_layout);
        let members = [
            arguments.members.offsets.as_slice(),
            &arguments.members.samples,
        ]
        .concat();
        let of_members = Layout::contiguous(members.len());
        let members = CudaStorage::wrap_cuda_slice(device.clone_htod(&members)?, device.clone());
        let blocks = grid(groups.div_ceil(GROUPS).min(MAX_BLOCKS), THREADS)?;
        let statistic = &arguments.statistic;
        with_cuda_floats!(rewards, "rewards", T => {
            // SAFETY: rewards, mask and advantages have n elements, members groups + 1 offsets and n samples.
            #[allow(unsafe_code)]
            unsafe {
                kernels::group_advantage::<T> {
                    rewards: In::new(rewards, layout, &stream)?,
                    mask: In::optional(mask.as_ref(), &stream)?,
                    members: In::new(&members, &of_members, &stream)?,
                    advantages: Out::new(&mut advantages, &stream),
                    samples: n as u32,
                    groups: groups as u32,
                    leave_one_out: i32::from(statistic.baseline == GroupBaseline::LeaveOneOut),
                    scale: statistic.scale as i32,
                    epsilon: statistic.epsilon,
                    ddof: statistic.ddof as i32,
                    lone_sample: statistic.lone_sample as i32,
                }
                .launch(device, blocks)?;
            }
        });
    }
    let advantages = CudaStorage::wrap_cuda_slice(advantages, device.clone());
    Ok((advantages, layout.shape().clone()))
}
