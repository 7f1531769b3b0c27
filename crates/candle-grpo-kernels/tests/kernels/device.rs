//! Tests the device that `cuda_device` opens, and devices that operators reject.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::result::{device, mem_pool};
use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, DeltaHeads, DeltaStates, Divisor, Draw, DrawOptions, HeadNorms,
    HeadTransform, KeyValuePages, LogProbOptions, PolicyTerms, PrefixTree, RatioSurrogate,
    Rounding, RowMap, Sequences, SlotRows, StateBatch, TokenShare, add_bias, add_bias_gradient,
    add_embedding_gradient, add_matmul, add_rms_norm, arithmetic_dtype, attention,
    attention_gradient, causal_conv, causal_conv_gradient, cuda_device, cuda_device_count,
    cuda_memory, default_device, delta_gates, delta_gates_gradient, draw_tokens, embedding,
    gate_heads, gated_delta_rule, gated_delta_rule_gradient, linear_log_prob, linear_rows,
    log_prob, policy_loss, release_cuda_memory, rms_norm, rms_norm_gradient, rope, rope_angles,
    rope_gradient, scale_gradients, squared_gradient_norms, swiglu, swiglu_gradient,
};
use candle_grpo_test_support::{CudaCalls, devices, message, noise_tensor};

/// Returns the GPU, which no other test uses until this one ends: some count its free memory.
fn gpu() -> Option<&'static Device> {
    devices().find(|device| device.is_cuda())
}

/// Returns each operator's result on `device`, with arguments in `dtype`.
fn run_each(device: &Device, dtype: DType) -> Result<Vec<(&'static str, Result<()>)>> {
    let noise = |shape: &[usize]| noise_tensor(shape, 1, dtype, device);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, arithmetic_dtype(dtype), device);
    let (square, vector) = (noise(&[4, 4])?, noise(&[4])?);
    let (sum, sums) = (zeros(&[4, 4])?, zeros(&[4])?);
    let angles = zeros(&[4, 2])?;
    let (ids, positions) = (
        Tensor::zeros(4, DType::U32, device)?,
        Tensor::zeros(4, DType::U32, device)?,
    );
    let lengths = || Sequences::Packed(&[4]);
    let step = AdamWStep {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.9,
        epsilon: 1e-8,
        step: 1,
        gradient_factor: 1.0,
    };
    let state = || Var::from_tensor(&zeros(&[4])?);
    let adamw = || {
        let (parameter, average, square) = (Var::from_tensor(&vector)?, state()?, state()?);
        candle_grpo_kernels::adamw(
            &[AdamWTensors {
                parameter: &parameter,
                master: None,
                rounding: Rounding::Nearest,
                average: &average,
                square: &square,
                gradient: &vector,
                weight_decay: 0.0,
            }],
            &step,
        )
    };
    let draw = Draw {
        row: 0,
        uniform: 0.5,
    };
    let options = LogProbOptions::default();
    let norms = HeadTransform {
        norms: Some(HeadNorms {
            weights: [&vector, &vector],
            options: 1e-6.into(),
        }),
        ..Default::default()
    };
    let rotation = HeadTransform {
        angles: Some([&angles, &angles]),
        ..Default::default()
    };
    let heads = DeltaHeads {
        key_heads: 1,
        value_heads: 1,
        key_dim: 1,
        value_dim: 2,
    };
    let (tree, gate) = (PrefixTree::new(&[4])?, zeros(&[4, 1])?);
    let delta = [&square, &gate, &gate];
    let gates = [&square, &square, &vector, &vector];
    let slots = [SlotRows { slot: 0, rows: 4 }];
    let slots = StateBatch::new(&slots, device)?;
    let states = || DeltaStates::new(1, heads, 4, dtype, device);
    // It has no path for f64.
    let log_probs = Tensor::zeros((4, 4), DType::F32, device)?;
    let mask = Tensor::zeros((4, 4), DType::U8, device)?;
    let share = TokenShare {
        scale: 1.0,
        divisor: Divisor::One,
    };
    let terms = PolicyTerms::new(&mask, &log_probs, RatioSurrogate::PolicyGradient, share);
    Ok(vec![
        ("adamw", adamw()),
        ("add_bias", add_bias(&[(&square, &vector)]).map(drop)),
        ("add_bias_gradient", add_bias_gradient(&sums, &square)),
        (
            "add_embedding_gradient",
            add_embedding_gradient(&sum, &ids, &square),
        ),
        ("add_matmul", add_matmul(&sum, &square, &square)),
        (
            "add_rms_norm",
            add_rms_norm(&square, &square, &vector, 1e-6).map(drop),
        ),
        (
            "attention",
            attention(&square, &square, &square, lengths(), 4, 1.0).map(drop),
        ),
        (
            "attention_gradient",
            attention_gradient(&square, &square, &square, lengths(), 4, 1.0, &square).map(drop),
        ),
        (
            "causal_conv",
            causal_conv(&square, &square, &tree).map(drop),
        ),
        (
            "causal_conv_gradient",
            causal_conv_gradient(&square, &square, &tree, &square).map(drop),
        ),
        (
            "delta_gates",
            delta_gates(gates[0], gates[1], gates[2], gates[3]).map(drop),
        ),
        (
            "delta_gates_gradient",
            delta_gates_gradient(gates, [&sum, &sum]).map(drop),
        ),
        (
            "delta_states of a convolution",
            states().and_then(|states| states.causal_conv(&square, &square, &slots).map(drop)),
        ),
        (
            "delta_states of the rule",
            states().and_then(|states| states.gated_delta_rule(delta, &slots).map(drop)),
        ),
        (
            "draw_tokens",
            draw_tokens(&square, &[draw], &DrawOptions::default()).map(drop),
        ),
        ("embedding", embedding(&ids, &square).map(drop)),
        (
            "gated_delta_rule",
            gated_delta_rule(&square, &gate, &gate, heads, &tree).map(drop),
        ),
        (
            "gated_delta_rule_gradient",
            gated_delta_rule_gradient(delta, heads, &tree, &square.narrow(1, 0, 2)?).map(drop),
        ),
        ("head norms", norms.apply([&square, &square]).map(drop)),
        ("rotation", rotation.apply([&square, &square]).map(drop)),
        (
            "rotation back",
            rotation.gradients(None, [&square, &square], None).map(drop),
        ),
        (
            "gate_heads",
            gate_heads(&square.narrow(1, 0, 2)?, &square, 2).map(drop),
        ),
        (
            "linear_log_prob",
            linear_log_prob(&square, &square, None, &ids, 1.0, options).map(drop),
        ),
        ("linear_rows", linear_rows(&square, &[&square]).map(drop)),
        ("log_prob", log_prob(&square, &ids, 1.0, options).map(drop)),
        (
            "pages",
            KeyValuePages::new(1, 1, 4, dtype, device).map(drop),
        ),
        ("policy_loss", policy_loss(&log_probs, &terms).map(drop)),
        ("rms_norm", rms_norm(&square, &vector, 1e-6).map(drop)),
        (
            "rms_norm_gradient",
            rms_norm_gradient(&square, &vector, 1e-6, &square).map(drop),
        ),
        ("rope", rope(&square, &angles, &angles).map(drop)),
        (
            "rope_angles",
            rope_angles(&positions, &zeros(&[1, 2])?, 1.0).map(drop),
        ),
        (
            "rope_gradient",
            rope_gradient(&angles, &angles, &square).map(drop),
        ),
        (
            "rows of a map",
            RowMap::new(vec![0, 0, 1, 3], 4, device)?
                .select(&square)
                .map(drop),
        ),
        (
            "sums of a map",
            RowMap::new(vec![0, 0, 1, 3], 4, device)?
                .sum(&square)
                .map(drop),
        ),
        ("scale_gradients", scale_gradients(&[&sum], 0.5)),
        (
            "squared_gradient_norms",
            squared_gradient_norms(&[&square]).map(drop),
        ),
        ("swiglu", swiglu(&square, &square).map(drop)),
        (
            "swiglu_gradient",
            swiglu_gradient(&square, &square, &square).map(drop),
        ),
    ])
}

#[test]
fn operators_refuse_a_device_with_a_stream_for_each_thread() -> Result<()> {
    let Some(one_stream) = gpu() else {
        println!("skipped: no GPU");
        return Ok(());
    };
    let many_streams = Device::new_cuda(0)?;
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for (name, result) in run_each(one_stream, dtype)? {
            assert!(result.is_ok(), "{name} of {dtype:?}: {result:?}");
        }
        for (name, result) in run_each(&many_streams, dtype)? {
            let message = message(result.map_err(|error| format!("{name} of {dtype:?}: {error}")));
            let expected = "device: its stream differs between threads, must be one stream";
            assert!(message.contains(expected), "{message}");
        }
    }
    Ok(())
}

#[test]
fn a_device_is_opened_once() -> Result<()> {
    let Some(device) = gpu() else {
        println!("skipped: no GPU");
        return Ok(());
    };
    let from_thread = std::thread::spawn(|| cuda_device(0)).join().unwrap()?;
    for again in [cuda_device(0)?, default_device()?, from_thread] {
        assert!(again.same_device(device));
        let (stream, other) = (again.as_cuda_device()?, device.as_cuda_device()?);
        assert!(Arc::ptr_eq(&stream.cuda_stream(), &other.cuda_stream()));
        // Candle rejects operations on tensors from two devices.
        let (x, y) = (
            Tensor::ones(2, DType::F32, device)?,
            Tensor::ones(2, DType::F32, &again)?,
        );
        assert_eq!(x.add(&y)?.to_vec1::<f32>()?, [2., 2.]);
    }
    assert!(cuda_device_count()? > 0);
    Ok(())
}

#[test]
fn a_device_has_free_memory() -> Result<()> {
    assert!(cuda_memory(&Device::Cpu).is_err());
    let Some(device) = gpu() else {
        println!("skipped: no GPU");
        return Ok(());
    };
    let memory = cuda_memory(device)?;
    assert!(memory.free > 0 && memory.free <= memory.total, "{memory:?}");
    let _tensor = Tensor::zeros(1 << 20, DType::F32, device)?;
    assert_eq!(cuda_memory(device)?.total, memory.total);
    Ok(())
}

#[test]
fn tensors_stay_when_other_memory_is_released() -> Result<()> {
    release_cuda_memory(&Device::Cpu)?;
    let Some(device) = gpu() else {
        println!("skipped: no GPU");
        return Ok(());
    };
    let kept = Tensor::arange(0f32, 100., device)?;
    drop((&kept + 1.)?);
    release_cuda_memory(device)?;
    let expected: Vec<f32> = (0..100).map(|number| number as f32).collect();
    assert_eq!(kept.to_vec1::<f32>()?, expected);
    Ok(())
}

#[test]
fn a_device_that_is_missing_is_an_error_each_time() -> Result<()> {
    let missing = cuda_device_count()?;
    for _ in 0..2 {
        assert!(cuda_device(missing).is_err());
    }
    Ok(())
}

#[test]
fn the_device_has_no_events() -> Result<()> {
    if gpu().is_none() {
        println!("skipped: no GPU");
        return Ok(());
    }
    let device = cuda_device(0)?;
    assert!(!device.as_cuda_device()?.is_event_tracking());
    let before = CudaCalls::now();
    let x = noise_tensor((3, 4), 1, DType::F32, &device)?;
    add_matmul(&x, &x.copy()?.narrow(0, 0, 3)?.narrow(1, 0, 3)?, &x.copy()?)?;
    drop(swiglu(&x, &x)?);
    if let Some((after, before)) = CudaCalls::now().zip(before) {
        let calls = after - before;
        assert!(calls.launches > 0 && calls.products > 0, "{calls:?}");
        assert_eq!(calls.events, 0, "{calls:?}");
    }
    Ok(())
}

#[test]
#[allow(unsafe_code)]
fn the_device_keeps_freed_memory() -> Result<()> {
    if gpu().is_none() {
        println!("skipped: no GPU");
        return Ok(());
    }
    let context = cuda_device(0)?
        .as_cuda_device()?
        .cuda_stream()
        .context()
        .clone();
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is open, and the attribute has 64 bits.
    unsafe {
        let pool = device::get_default_mem_pool(context.cu_device()).map_err(Error::wrap)?;
        // 0 is the driver's default.
        let mut threshold = 0u64;
        mem_pool::get_attribute(pool, attribute, (&raw mut threshold).cast())
            .map_err(Error::wrap)?;
        assert_eq!(threshold, u64::MAX);
    }
    Ok(())
}
