//! Training with the optimizer in host memory, `optimizer.memory: host`.

use std::collections::BTreeMap;
use std::fs;

use crate::common::{self, digest, model, parameters, pretrained, trainer, without_seconds};
use candle_core::{Device, Tensor};
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_loss::KlLoss;
use candle_grpo_nn::optim::{MasterWeights, Sharding, StateForm, StateMemory};
use candle_grpo_nn::{AdamWConfig, LoraConfig};
use candle_grpo_test_support::{cuda_peak_bytes, device};
use candle_grpo_train::learn::{MemoryPlan, ReferenceRefresh};
use candle_grpo_train::sft::SftConfig;
use candle_grpo_train::{ComputeDType, CriticConfig, TrainConfig, Trainer};
use rstest::rstest;

fn config(compute_dtype: ComputeDType) -> TrainConfig {
    let mut config = common::config();
    config.compute_dtype = compute_dtype;
    config.optimizer.weight_decay = 0.1;
    config.mini_batch_size = Some(8);
    config
}

fn rounded() -> TrainConfig {
    let mut config = config(ComputeDType::Bf16);
    config.optimizer.master_weights = MasterWeights::Bf16;
    config
}

fn in_blocks() -> TrainConfig {
    let mut config = config(ComputeDType::Bf16);
    config.optimizer.state = StateForm::Blocks8;
    config
}

/// A reference that follows the f32 weights.
fn moving_reference() -> TrainConfig {
    let mut config = config(ComputeDType::Bf16);
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 1,
        alpha: 0.5,
    });
    config
}

/// Its critic starts from the f32 weights of the policy.
fn critic() -> TrainConfig {
    let mut config = config(ComputeDType::Bf16);
    config.recipe.advantage = AdvantageName::Gae.into();
    config.critic = Some(CriticConfig::default());
    config
}

fn with_memory(config: &TrainConfig, memory: StateMemory) -> TrainConfig {
    let mut config = config.clone();
    config.optimizer.memory = memory;
    if let Some(critic) = &mut config.critic {
        critic.optimizer.memory = memory;
    }
    config
}

/// The files of a checkpoint.
type Files = BTreeMap<String, Vec<u8>>;

fn save(trainer: &Trainer) -> (tempfile::TempDir, Files) {
    let folder = tempfile::tempdir().unwrap();
    trainer
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    let names = common::file_names(folder.path());
    let files = names.into_iter().map(|name| {
        let bytes = fs::read(folder.path().join(&name)).unwrap();
        (name, bytes)
    });
    let files = files.collect();
    (folder, files)
}

/// Files that are equal on the CPU. On a GPU, tensors have the same names, shapes and dtypes, and
/// the weights have moved from `start` as the others have, up to the share `rounding`.
fn assert_files_match(found: &Files, expected: &Files, rounding: f64) {
    if device().is_cpu() {
        assert!(found == expected);
        return;
    }
    let names = |files: &Files| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    let (mut differences, mut moves) = (0., 0.);
    let start = parameters().copy_to(&Device::Cpu).unwrap();
    for (name, bytes) in found {
        if !name.ends_with(".safetensors") {
            continue;
        }
        let read =
            |bytes: &[u8]| candle_core::safetensors::load_buffer(bytes, &Device::Cpu).unwrap();
        let (found, expected) = (read(bytes), read(&expected[name]));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (tensor, found) in found {
            let expected = &expected[&tensor];
            assert_eq!(found.dtype(), expected.dtype(), "{name}: {tensor}");
            assert_eq!(found.dims(), expected.dims(), "{name}: {tensor}");
            if name == "model.safetensors" {
                let squares = |a: &Tensor, b: &Tensor| {
                    let squares = (a - b).unwrap().sqr().unwrap().sum_all().unwrap();
                    f64::from(squares.to_scalar::<f32>().unwrap())
                };
                differences += squares(&found, expected);
                moves += squares(expected, start.get(&tensor).unwrap());
            }
        }
    }
    let share = (differences / moves).sqrt();
    println!("{share} of the way");
    assert!(share <= rounding, "{share}");
}

/// With either memory a run has the same steps and the same checkpoints, from which it continues
/// with the other. On a GPU, the output layer is rounded in bf16 and f16, and the CPU and the GPU
/// round steps and random numbers in other places.
#[rstest]
#[case::f32(config(ComputeDType::F32), 1e-4)]
#[case::bf16(config(ComputeDType::Bf16), 0.1)]
#[case::f16(config(ComputeDType::F16), 0.05)]
#[case::rounded(rounded(), 0.1)]
#[case::in_blocks(in_blocks(), 0.1)]
#[case::moving_reference(moving_reference(), 0.1)]
#[case::critic(critic(), 0.1)]
fn a_run_with_the_optimizer_in_host_memory_is_that_on_the_device(
    #[case] config: TrainConfig,
    #[case] rounding: f64,
) {
    let memories = [StateMemory::Device, StateMemory::Host];
    let configs = memories.map(|memory| with_memory(&config, memory));
    let mut whole = configs.clone().map(|config| trainer(digest, config));
    let step = |trainer: &mut Trainer| {
        let metrics = without_seconds(trainer.step().unwrap());
        assert!(!metrics.skipped);
        (metrics, save(trainer))
    };
    let [on_device, on_host] = &mut whole;
    let middle = [step(on_device), step(on_host)];
    assert_files_match(&middle[1].1.1, &middle[0].1.1, rounding);
    let last = [step(on_device), step(on_host)];
    assert_files_match(&last[1].1.1, &last[0].1.1, rounding);
    if device().is_cpu() {
        assert_eq!(last[1].0, last[0].0);
    }
    for (config, (_, (folder, _))) in configs.into_iter().zip(middle.iter().rev()) {
        let mut resumed = trainer(digest, config);
        resumed.load_state(folder.path()).unwrap();
        let (_, (_, files)) = step(&mut resumed);
        assert_files_match(&files, &last[0].1.1, rounding);
    }
}

/// The device then has, for a parameter, what the model computes with and the gradient.
#[rstest]
#[case::f32(ComputeDType::F32, MasterWeights::F32, 8)]
#[case::bf16(ComputeDType::Bf16, MasterWeights::F32, 12)]
#[case::rounded(ComputeDType::Bf16, MasterWeights::Bf16, 8)]
fn host_memory_is_not_memory_of_the_device(
    #[case] compute_dtype: ComputeDType,
    #[case] master_weights: MasterWeights,
    #[case] bytes_of_parameter: usize,
) {
    device();
    if cuda_peak_bytes().is_none() {
        println!("skipped: no emulated GPU counts the memory");
        return;
    }
    let mut config = config(compute_dtype);
    config.optimizer.master_weights = master_weights;
    // An update of a step is its peak, not the draws.
    config.sampling.max_cache_mib = Some(1);
    let model = model();
    let plan = |config: &TrainConfig| MemoryPlan::new(&model, config, 5, 0).unwrap();
    let [on_device, on_host] = [StateMemory::Device, StateMemory::Host].map(|memory| {
        let config = with_memory(&config, memory);
        // The first trainer also loads kernels.
        trainer(digest, config.clone()).step().unwrap();
        cuda_peak_bytes();
        let before = cuda_peak_bytes().unwrap() as usize;
        let mut trainer = trainer(digest, config.clone());
        trainer.step().unwrap();
        let peak = cuda_peak_bytes().unwrap() as usize - before;
        (plan(&config), peak)
    });
    let bytes = bytes_of_parameter * parameters().num_elements();
    assert_eq!(on_host.0.host, bytes);
    assert_eq!(on_device.0.host, 0);
    assert_eq!(on_device.0.peak() - on_host.0.peak(), bytes);
    let saved = on_device.1 - on_host.1;
    println!(
        "{saved} of {bytes} planned, peaks {} and {}",
        on_device.1, on_host.1
    );
    assert!(saved.abs_diff(bytes) * 20 < bytes, "{saved} {bytes}");
}

#[test]
fn host_memory_is_for_an_optimizer_of_all_weights() {
    let host = with_memory(&config(ComputeDType::Bf16), StateMemory::Host);
    for sharding in [Sharding::None, Sharding::Resident, Sharding::Full] {
        let config = TrainConfig {
            sharding,
            ..host.clone()
        };
        config.validate().unwrap();
    }
    let mut small = critic();
    small.sharding = Sharding::Optimizer;
    if let Some(critic) = &mut small.critic {
        critic.optimizer.memory = StateMemory::Host;
    }
    let adapters = Some(LoraConfig::all_linear(4, 8.));
    let sharding = Sharding::Optimizer;
    let supervised = SftConfig {
        optimizer: AdamWConfig {
            memory: StateMemory::Host,
            ..AdamWConfig::default()
        },
        sharding,
        ..SftConfig::default()
    };
    let divided = "optimizer.memory: host, must be device with sharding: optimizer";
    for (result, expected) in [
        (
            TrainConfig {
                adapters,
                ..host.clone()
            }
            .validate(),
            "optimizer.memory: host, must be device with adapters, whose state is small",
        ),
        (TrainConfig { sharding, ..host }.validate(), divided),
        (small.validate(), &format!("critic.{divided}")),
        (supervised.validate(), divided),
    ] {
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.starts_with(expected), "{error}");
    }
}
