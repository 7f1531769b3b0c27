//! Tests the stack of tensors, on devices and in main memory.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::TensorStack;
use candle_grpo_test_support::{
    CudaCalls, cuda_peak_bytes, device, devices, message, noise_tensor, with_failing_calls,
};
use rstest::rstest;

/// The number of tensors.
const TENSORS: u64 = 5;

/// A new stack on its device or in main memory.
fn stack(device: &Device, is_moved: bool) -> Result<TensorStack> {
    if is_moved {
        TensorStack::in_main_memory(device)
    } else {
        Ok(TensorStack::on_device())
    }
}

/// The result of a kernel, and its values.
fn tensor(elements: usize, seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
    noise_tensor(elements, seed, dtype, device)? + 1.
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

#[rstest]
fn tensors_come_back_in_reverse_order(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(false, true)] is_moved: bool,
) -> Result<()> {
    for device in devices() {
        let mut stack = stack(device, is_moved)?;
        assert!(stack.pop()?.is_none());
        // Memory of the first pass is reused, also for larger tensors.
        for size in [64, 64, 4096] {
            let sized = |seed: u64| tensor(size + seed as usize, seed, dtype, device);
            for seed in 0..TENSORS {
                stack.push(&sized(seed)?.reshape((1, ()))?)?;
            }
            for seed in (0..TENSORS).rev() {
                let found = stack.pop()?.expect("a tensor");
                assert_eq!(found.dims(), [1, size + seed as usize]);
                assert_eq!(found.dtype(), dtype);
                assert_eq!(values(&found)?, values(&sized(seed)?)?, "{seed}");
                // One that is pushed after others have been removed.
                if seed == 2 {
                    stack.push(&sized(7)?)?;
                    stack.push(&sized(8)?.narrow(0, 1, 9)?)?;
                    let found = [stack.pop()?, stack.pop()?].map(Option::unwrap);
                    assert_eq!(values(&found[0])?, values(&sized(8)?)?[1..10]);
                    assert_eq!(values(&found[1])?, values(&sized(7)?)?);
                }
            }
            assert!(stack.pop()?.is_none());
        }
        // Ranks may have no tokens.
        for _ in 0..3 {
            stack.push(&Tensor::zeros((0, 4), dtype, device)?)?;
        }
        for _ in 0..3 {
            assert_eq!(stack.pop()?.expect("a tensor").dims(), [0, 4]);
        }
    }
    Ok(())
}

/// Each tensor that comes back is freed before the next one is needed.
fn fill_and_empty(device: &Device, elements: usize) -> Result<Vec<Vec<f32>>> {
    let mut stack = TensorStack::in_main_memory(device)?;
    for seed in 0..TENSORS {
        stack.push(&tensor(elements, seed, DType::F32, device)?)?;
    }
    let mut found = Vec::new();
    while let Some(tensor) = stack.pop()? {
        // A kernel reads it.
        found.push((tensor + 1.)?);
    }
    device.synchronize()?;
    found.iter().map(values).collect()
}

#[test]
fn few_tensors_are_on_the_gpu_and_nothing_waits_for_copies() -> Result<()> {
    let device = device();
    let Some(_) = CudaCalls::now() else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let elements = 1 << 16;
    let bytes = 4 * elements as u64;
    // Locks the memory.
    fill_and_empty(device, elements)?;
    let inputs = (0..TENSORS).map(|seed| noise_tensor(elements, seed, DType::F32, device));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    device.synchronize()?;
    cuda_peak_bytes();
    let used = cuda_peak_bytes().unwrap_or_default();
    let before = CudaCalls::now();
    let mut stack = TensorStack::in_main_memory(device)?;
    for input in &inputs {
        stack.push(&(input * 2.)?)?;
    }
    let mut left = TENSORS;
    while let Some(tensor) = stack.pop()? {
        left -= 1;
        drop((tensor + 1.)?);
    }
    let (Some(after), Some(before)) = (CudaCalls::now(), before) else {
        return Ok(());
    };
    let calls = after - before;
    assert_eq!(left, 0);
    assert_eq!(calls.copies_to_host, TENSORS, "{calls:?}");
    // The last one is still there.
    assert_eq!(calls.copies_to_device, TENSORS - 1, "{calls:?}");
    assert_eq!(calls.waits, 0, "{calls:?}");
    device.synchronize()?;
    let peak = cuda_peak_bytes().unwrap_or_default() - used;
    // The result of a kernel is there as well.
    let most = (TensorStack::ON_DEVICE as u64 + 1) * bytes;
    assert!(peak <= most, "{peak} {most}");
    Ok(())
}

#[rstest]
#[case::memory(c"allocation")]
#[case::event(c"cuEventCreate")]
#[case::record(c"cuEventRecord")]
#[case::wait(c"cuStreamWaitEvent")]
fn a_call_that_fails_is_an_error_and_never_a_wrong_value(
    #[case] name: &std::ffi::CStr,
) -> Result<()> {
    let device = device();
    let elements = 300;
    let free = fill_and_empty(device, elements)?;
    for before in 0.. {
        // Each time a larger size, so that main memory is allocated as well.
        let elements = elements << (before % 8);
        let run = || fill_and_empty(device, elements);
        let Some((result, failed)) = with_failing_calls(name, before, 1, run) else {
            println!("skipped: no emulated GPU fails calls");
            break;
        };
        match result {
            Ok(found) if elements == 300 => assert_eq!(found, free, "call {before}"),
            Ok(found) => assert_eq!(found, run()?, "call {before}"),
            Err(error) => assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}"),
        }
        assert_eq!(fill_and_empty(device, 300)?, free, "after call {before}");
        if failed == 0 {
            assert!(before > TENSORS, "{before}");
            break;
        }
    }
    Ok(())
}

/// The tensors' memory is free afterward, and their copies do not write it.
#[test]
fn a_stack_can_be_dropped_with_its_tensors() -> Result<()> {
    let device = device();
    let elements = 1 << 12;
    let free = fill_and_empty(device, elements)?;
    for removed in 0..TENSORS {
        let mut stack = TensorStack::in_main_memory(device)?;
        for seed in 0..TENSORS {
            stack.push(&tensor(elements, seed + 10, DType::F32, device)?)?;
        }
        for _ in 0..removed {
            stack.pop()?;
        }
        drop(stack);
        assert_eq!(fill_and_empty(device, elements)?, free, "{removed}");
    }
    Ok(())
}

#[test]
fn tensors_that_cannot_move_are_refused() -> Result<()> {
    for device in devices().filter(|device| device.is_cuda()) {
        let mut stack = TensorStack::in_main_memory(device)?;
        let error = message(stack.push(&Tensor::new(&[1f32], &Device::Cpu)?));
        assert!(
            error.starts_with("tensor: on Cpu, must be on the device of the stack"),
            "{error}"
        );
        for dtype in [DType::U8, DType::U32, DType::F64] {
            let error = message(stack.push(&Tensor::zeros(1, dtype, device)?));
            assert_eq!(
                error,
                format!("tensor: {dtype:?}, must be f32, bf16 or f16")
            );
        }
        assert!(stack.pop()?.is_none());
    }
    Ok(())
}

#[test]
fn main_memory_has_few_sizes() {
    let sizes: std::collections::BTreeSet<usize> =
        (1000..=2000).map(TensorStack::main_memory_bytes).collect();
    assert!(sizes.len() <= 10, "{sizes:?}");
    for bytes in [1, 7, 1000, 1025, 1 << 30] {
        let rounded = TensorStack::main_memory_bytes(bytes);
        assert!(
            rounded >= bytes && rounded <= bytes + bytes / 4 + 1,
            "{bytes}"
        );
    }
}
