//! `group_advantage.cu` against the CPU path.
#![allow(unsafe_code, missing_docs)]

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS, noise};
use candle_grpo_kernels::{
    AdvantageScale, GroupAdvantageOptions, GroupBaseline, LoneSample, SampleGroups, group_advantage,
};
use candle_grpo_test_support::{assert_close, numbers};
use half::{bf16, f16};

/// The sizes of groups, whose samples take turns: sample i is in group i % groups until that group is full.
fn ids(sizes: &[usize]) -> Vec<i64> {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let turns = (0..largest).flat_map(|turn| {
        let groups = sizes.iter().enumerate();
        groups.filter_map(move |(group, &size)| (turn < size).then_some(group as i64))
    });
    turns.collect()
}

/// A number in the place of NaN, which is equal to nothing.
fn comparable(x: &[f64]) -> Vec<f64> {
    x.iter()
        .map(|x| if x.is_nan() { 1e9 } else { *x })
        .collect()
}

fn check<T: Kernels>(
    rewards: &[f64],
    ids: &[i64],
    options: GroupAdvantageOptions,
    masked: bool,
    blocks: u32,
) -> Result<()> {
    let n = rewards.len();
    let rewards: Vec<T> = rewards.iter().map(|x| T::from_f64(*x)).collect();
    let mask: Vec<u8> = (0..n).map(|i| u8::from(i % 7 != 2) * 5).collect();
    let mask_of = Tensor::from_slice(&mask, n, &Device::Cpu)?;
    let options = GroupAdvantageOptions {
        mask: masked.then_some(&mask_of),
        ..options
    };
    let table = Tensor::from_slice(&rewards, n, &Device::Cpu)?;
    let expected = numbers(&group_advantage(&table, SampleGroups::Ids(ids), options)?)?;

    // One group after the other, as the kernel wants them.
    let groups = ids.iter().max().map_or(0, |id| *id as u32 + 1);
    let (mut offsets, mut samples) = (vec![0u32], vec![]);
    for group in 0..groups {
        samples.extend((0..n as u32).filter(|i| ids[*i as usize] == i64::from(group)));
        offsets.push(samples.len() as u32);
    }
    let members = Buffer::of(&[offsets, samples].concat());
    let (rewards, mask) = (Buffer::of(&rewards), Buffer::of(&mask));
    for order in ORDERS {
        let mut advantages = Buffer::filled(7f32, n);
        // SAFETY: the buffers have n samples, and as many groups.
        unsafe {
            T::group_advantage(
                Grid::new(blocks, 256),
                order,
                rewards.as_ptr(),
                if masked {
                    mask.as_ptr()
                } else {
                    std::ptr::null()
                },
                members.as_ptr(),
                advantages.as_mut_ptr(),
                n as u32,
                groups,
                i32::from(options.baseline == GroupBaseline::LeaveOneOut),
                options.scale as i32,
                options.epsilon,
                options.ddof as i32,
                options.lone_sample as i32,
            )
        }
        .unwrap();
        let found: Vec<f64> = advantages.iter().map(|x| f64::from(*x)).collect();
        assert_close(&comparable(&found), &comparable(&expected), 2e-7);
    }
    Ok(())
}

fn check_all<T: Kernels>() -> Result<()> {
    let sizes: Vec<usize> = [1, 2, 40, 8, 8, 3, 70, 1, 5].to_vec();
    let ids = ids(&sizes);
    // Rounded, so that groups of equal rewards come up; far from 0.
    let rewards: Vec<f64> = noise(ids.len(), 1)
        .iter()
        .map(|x| (2.0 * x).round() / 4.0 + 3.0)
        .collect();
    for baseline in [GroupBaseline::Mean, GroupBaseline::LeaveOneOut] {
        for scale in [
            AdvantageScale::Group,
            AdvantageScale::Batch,
            AdvantageScale::None,
        ] {
            for lone_sample in [LoneSample::Zero, LoneSample::Raw, LoneSample::BatchMean] {
                for (ddof, epsilon, masked, blocks) in [(0, 0.0, false, 1), (1, 0.1, true, 2)] {
                    let options = GroupAdvantageOptions {
                        baseline,
                        scale,
                        epsilon,
                        ddof,
                        lone_sample,
                        mask: None,
                    };
                    check::<T>(&rewards, &ids, options, masked, blocks)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn f32_is_the_cpu_path() -> Result<()> {
    check_all::<f32>()
}

#[test]
fn bf16_is_the_cpu_path() -> Result<()> {
    check_all::<bf16>()
}

#[test]
fn f16_is_the_cpu_path() -> Result<()> {
    check_all::<f16>()
}

#[test]
fn equal_rewards_nan_and_lone_samples() -> Result<()> {
    let batch = GroupAdvantageOptions {
        scale: AdvantageScale::Batch,
        lone_sample: LoneSample::BatchMean,
        epsilon: 0.0,
        ..Default::default()
    };
    check::<f32>(
        &[0.1; 49],
        &ids(&[49]),
        GroupAdvantageOptions {
            epsilon: 0.0,
            ..batch
        },
        false,
        1,
    )?;
    check::<f32>(
        &[0.1; 49],
        &ids(&[49]),
        GroupAdvantageOptions {
            scale: AdvantageScale::Group,
            ..batch
        },
        false,
        1,
    )?;
    check::<f32>(&[0.1], &ids(&[1]), batch, false, 1)?;
    check::<f32>(
        &[1.0, f64::NAN, 0.5, 2.0],
        &[0, 0, 1, 1],
        GroupAdvantageOptions::default(),
        false,
        1,
    )?;
    // What has no reward may hold anything.
    let rewards = [1.0, 2.0, f64::NAN, 4.0];
    check::<f32>(
        &rewards,
        &[0, 0, 0, 0],
        GroupAdvantageOptions::default(),
        true,
        1,
    )
}
