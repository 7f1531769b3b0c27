//! Tests `adamw` against its composed twin in f64: masters, memory and errors.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, Rounding, adamw, composed, moment_blocks, scale_gradients,
};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::layouts;
use crate::strategies::{dtypes, lengths};
use crate::twin::noisy;

fn assert_same(actual: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_close(&numbers(actual)?, &numbers(expected)?, tolerance);
    Ok(())
}

const STEP: AdamWStep = AdamWStep {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
    step: 1,
    gradient_factor: 1.0,
};

/// A parameter, its gradient and its optimizer state.
struct Held {
    parameter: Var,
    master: Option<Var>,
    average: Var,
    square: Var,
    gradient: Tensor,
    weight_decay: f64,
}

impl Held {
    /// Returns a random state. `state` is the dtype of the averages.
    fn new(
        len: usize,
        seed: u64,
        [dtype, state]: [DType; 2],
        master: bool,
        device: &Device,
    ) -> Result<Self> {
        // Converted on the CPU, because Candle cannot convert empty tensors on CUDA.
        let noise = |seed, dtype| noisy(&[len], seed, DType::F32)?.to_dtype(dtype);
        let variable = |x: Tensor| Var::from_tensor(&x.to_device(device)?);
        Ok(Self {
            parameter: variable(noise(seed, dtype)?)?,
            master: master.then(|| variable(noise(seed, state)?)).transpose()?,
            average: variable(noise(seed + 1, state)?)?,
            square: variable(noise(seed + 2, state)?.sqr()?)?,
            gradient: noise(seed + 3, state)?.to_device(device)?,
            weight_decay: 0.1 * (seed % 3) as f64,
        })
    }

    /// Returns the state before the first step, with moments in f32 or in blocks.
    fn fresh(parameter: &Tensor, gradient: Tensor, in_blocks: bool) -> Result<Self> {
        let (len, device) = (parameter.elem_count(), parameter.device());
        let moment = || {
            if in_blocks {
                Var::zeros(moment_blocks(len), DType::U8, device)
            } else {
                Var::zeros(len, DType::F32, device)
            }
        };
        Ok(Self {
            parameter: Var::from_tensor(parameter)?,
            master: None,
            average: moment()?,
            square: moment()?,
            gradient,
            weight_decay: 0.0,
        })
    }

    fn tensors(&self) -> AdamWTensors<'_> {
        AdamWTensors {
            parameter: &self.parameter,
            master: self.master.as_deref(),
            rounding: Rounding::Nearest,
            average: &self.average,
            square: &self.square,
            gradient: &self.gradient,
            weight_decay: self.weight_decay,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        lengths in lengths(),
        dtype in dtypes(),
        master in any::<bool>(),
        steps in 1usize..4,
        seed in 0u64..1000,
    ) {
        let master = master && dtype != DType::F32;
        for device in devices() {
            let held = |dtypes, master| {
                lengths.iter().enumerate()
                    .map(|(at, &len)| Held::new(len, seed + 7 * at as u64, dtypes, master, device))
                    .collect::<Result<Vec<_>>>()
            };
            let (fused, exact) = (held([dtype, DType::F32], master)?, held([DType::F64; 2], false)?);
            for (fused, exact) in fused.iter().zip(&exact) {
                // Without a master, the exact parameter starts at the rounded one.
                if !master && fused.parameter.elem_count() > 0 {
                    exact.parameter.set(&fused.parameter.as_detached_tensor().to_dtype(DType::F64)?)?;
                }
            }
            for step in 1..=steps {
                let step = AdamWStep { step, ..STEP };
                adamw(&fused.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
                composed::adamw(&exact.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
            }
            // Without a master, each step rounds.
            let rounding = match dtype {
                DType::F32 => 2e-6,
                DType::BF16 => 4e-3 * steps as f64,
                _ => 6e-4 * steps as f64,
            };
            for (fused, exact) in fused.iter().zip(&exact) {
                assert_same(&fused.parameter, &exact.parameter, rounding)?;
                assert_same(&fused.average, &exact.average, 2e-6)?;
                assert_same(&fused.square, &exact.square, 2e-6)?;
                if let Some(master) = &fused.master {
                    assert_same(master, &exact.parameter, 2e-6)?;
                    let rounded = master.to_device(&Device::Cpu)?.to_dtype(dtype)?;
                    prop_assert_eq!(numbers(&rounded)?, numbers(&fused.parameter)?);
                }
            }
        }
    }
}

/// A parameter with moments in blocks.
fn quantized(len: usize, seed: u64, dtype: DType, master: bool, device: &Device) -> Result<Held> {
    let held = Held::new(len, seed, [dtype, DType::F32], master, device)?;
    // From the CPU, because Candle has no empty tensors of zeros on CUDA.
    let zeros = || {
        let zeros = Tensor::zeros(moment_blocks(len), DType::U8, &Device::Cpu)?;
        Var::from_tensor(&zeros.to_device(device)?)
    };
    Ok(Held {
        average: zeros()?,
        square: zeros()?,
        ..held
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn moments_in_blocks_follow_those_in_f32(
        lengths in lengths(),
        dtype in dtypes(),
        master in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let master = master && dtype != DType::F32;
        for device in devices() {
            let all = |held: &dyn Fn(usize, u64) -> Result<Held>| {
                let lengths = lengths.iter().enumerate();
                lengths.map(|(at, &len)| held(len, seed + 7 * at as u64)).collect::<Result<Vec<_>>>()
            };
            let blocks = |len, seed| quantized(len, seed, dtype, master, device);
            let (fused, twin) = (all(&blocks)?, all(&blocks)?);
            let exact = all(&|len, seed| {
                let mut held = Held::new(len, seed, [dtype, DType::F32], master, device)?;
                let zeros = || {
                    let zeros = Tensor::zeros(len, DType::F32, &Device::Cpu)?;
                    Var::from_tensor(&zeros.to_device(device)?)
                };
                (held.average, held.square) = (zeros()?, zeros()?);
                Ok(held)
            })?;
            for step in 1..=4 {
                let step = AdamWStep { step, ..STEP };
                adamw(&fused.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
                composed::adamw(&twin.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
                composed::adamw(&exact.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
            }
            for ((fused, twin), exact) in fused.iter().zip(&twin).zip(&exact) {
                // A moment near the middle between two codes may get either, which moves a step by
                // a fraction of the learning rate. This is rare.
                let rounding: f64 = if dtype == DType::F32 { 1e-3 } else { 0.02 };
                assert_same(&fused.parameter, &twin.parameter, rounding.max(STEP.learning_rate))?;
                let [a, b] = [numbers(&fused.parameter)?, numbers(&twin.parameter)?];
                let moved = a.iter().zip(&b).filter(|(a, b)| (**a - **b).abs() > rounding);
                let moved = moved.count();
                prop_assert!(moved <= 1 + a.len() / 1000, "{moved} of {}", a.len());
                // A step is about as long as the learning rate. Where the gradient is far below the
                // largest in its block, the moments keep only its magnitude.
                let [fused, exact] = [numbers(&fused.parameter)?, numbers(&exact.parameter)?];
                let rounding = if dtype == DType::F32 { 0.0 } else { 0.04 };
                let differences = fused.iter().zip(&exact).map(|(fused, exact)| (fused - exact).abs());
                let (count, sum) = (fused.len() as f64, differences.sum::<f64>());
                prop_assert!(sum <= (0.004 + rounding) * count + 0.04, "{sum} of {count}");
            }
        }
    }
}

/// Without a floor, the small number's squared average would be zero, and its step would be its
/// average divided by epsilon.
#[rstest]
#[case::fused(adamw)]
#[case::composed(composed::adamw)]
fn a_small_number_beside_a_large_one_never_takes_a_large_step(
    #[case] twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>,
) -> Result<()> {
    for device in devices() {
        let held = quantized(300, 1, DType::F32, false, device)?;
        let before = numbers(&held.parameter)?;
        for step in 1..=3 {
            let value = |i: usize| match (i, step) {
                (0, _) => 1f32,
                (1, 1) => 1e-4,
                _ => 0.0,
            };
            let gradient: Vec<f32> = (0..300).map(value).collect();
            let gradient = Tensor::from_vec(gradient, 300, &Device::Cpu)?.to_device(device)?;
            let tensors = AdamWTensors {
                gradient: &gradient,
                weight_decay: 0.0,
                ..held.tensors()
            };
            twin(&[tensors], &AdamWStep { step, ..STEP })?;
        }
        let moved = |i: usize| {
            Ok::<_, candle_core::Error>((numbers(&held.parameter)?[i] - before[i]).abs())
        };
        assert!((moved(0)? - 0.03).abs() < 1e-3, "{}", moved(0)?);
        assert!(moved(1)? < 0.03, "{}", moved(1)?);
        assert_eq!(moved(2)?, 0.0);
    }
    Ok(())
}

/// Decay alone has the same bits on all paths, so random rounding has, too. Moments in blocks
/// divide the elements in another way.
#[rstest]
#[case::numbers(false)]
#[case::blocks(true)]
fn random_rounding_is_that_of_the_composed_twin(#[case] in_blocks: bool) -> Result<()> {
    for device in devices() {
        for len in [1, 9, 300, 5000, 70_000] {
            let decayed = |twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>| {
                let parameter = noisy(&[len], 3, DType::BF16)?.to_device(device)?;
                let gradient = Tensor::zeros(len, DType::F32, device)?;
                let held = Held::fresh(&parameter, gradient, in_blocks)?;
                for step in 1..=2 {
                    let tensors = AdamWTensors {
                        rounding: Rounding::Stochastic { key: 11, first: 64 },
                        weight_decay: 0.1,
                        ..held.tensors()
                    };
                    twin(&[tensors], &AdamWStep { step, ..STEP })?;
                }
                numbers(&held.parameter)
            };
            assert_eq!(decayed(adamw)?, decayed(composed::adamw)?, "{len} elements");
        }
    }
    Ok(())
}

/// In bf16 the neighbors of 1 are 0.9961 and 1.0078, so each of these steps is lost to nearest.
#[test]
fn random_rounding_keeps_small_steps_on_average() -> Result<()> {
    const LEN: usize = 1 << 14;
    for device in devices() {
        let parameter = Tensor::ones(LEN, DType::BF16, device)?;
        let gradient = Tensor::ones(LEN, DType::F32, device)?;
        let held = Held::fresh(&parameter, gradient, false)?;
        for step in 1..=10 {
            let tensors = AdamWTensors {
                rounding: Rounding::Stochastic { key: 5, first: 0 },
                ..held.tensors()
            };
            let step = AdamWStep {
                step,
                learning_rate: 1e-3,
                ..STEP
            };
            adamw(&[tensors], &step)?;
        }
        let found = numbers(&held.parameter)?;
        let mean = found.iter().sum::<f64>() / LEN as f64;
        // The standard deviation of an element is at most 0.006, that of the mean 5e-5.
        assert!((mean - 0.99).abs() < 3e-4, "{mean}");
        assert!(found.contains(&1.0) && found.iter().any(|x| *x < 0.99));
    }
    Ok(())
}

/// A part with its place has the bits of the whole.
#[test]
fn parts_are_rounded_as_the_whole() -> Result<()> {
    for device in devices() {
        let whole = Held::new(2000, 5, [DType::BF16, DType::F32], false, device)?;
        let parts = Held::new(2000, 5, [DType::BF16, DType::F32], false, device)?;
        let rounding = |first| Rounding::Stochastic { key: 3, first };
        let tensors = AdamWTensors {
            rounding: rounding(0),
            ..whole.tensors()
        };
        adamw(&[tensors], &STEP)?;
        for (first, len) in [(0, 744), (744, 1256)] {
            let part = |tensor: &Tensor| tensor.detach().narrow(0, first, len);
            let (parameter, gradient) = (part(&parts.parameter)?, part(&parts.gradient)?);
            let (average, square) = (part(&parts.average)?, part(&parts.square)?);
            let tensors = AdamWTensors {
                parameter: &parameter,
                average: &average,
                square: &square,
                gradient: &gradient,
                rounding: rounding(first as u64),
                ..parts.tensors()
            };
            adamw(&[tensors], &STEP)?;
        }
        assert_eq!(numbers(&parts.parameter)?, numbers(&whole.parameter)?);
    }
    Ok(())
}

/// The lengths are below, at and beyond the number of elements that are copied together.
#[rstest]
#[case::f32(DType::F32, false, false)]
#[case::bf16(DType::BF16, false, false)]
#[case::master(DType::BF16, true, false)]
#[case::master_and_blocks(DType::F16, true, true)]
#[case::random(DType::BF16, false, true)]
fn a_state_on_the_cpu_has_the_bits_of_a_step_on_the_cpu(
    #[case] dtype: DType,
    #[case] master: bool,
    #[case] in_blocks: bool,
    #[values(adamw, composed::adamw)] twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>,
) -> Result<()> {
    let lengths = [1, 0, 300, 1 << 21, (2 << 21) + 4097, 70_001];
    for device in devices() {
        let held = |device: &Device| {
            let held = lengths.iter().enumerate().map(|(at, &len)| {
                let seed = 7 * at as u64;
                if in_blocks {
                    quantized(len, seed, dtype, master, &Device::Cpu)
                } else {
                    Held::new(len, seed, [dtype, DType::F32], master, &Device::Cpu)
                }
                .and_then(|held| {
                    let parameter = held.parameter.to_device(device)?;
                    Ok(Held {
                        parameter: Var::from_tensor(&parameter)?,
                        gradient: held.gradient.to_device(device)?,
                        ..held
                    })
                })
            });
            held.collect::<Result<Vec<_>>>()
        };
        let (apart, on_cpu) = (held(device)?, held(&Device::Cpu)?);
        let rounding = if in_blocks && !master {
            Rounding::Stochastic { key: 3, first: 512 }
        } else {
            Rounding::Nearest
        };
        for step in 1..=2 {
            let step = AdamWStep {
                step,
                gradient_factor: 0.5,
                ..STEP
            };
            let make = |all: &[Held], twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>| {
                let tensors = all.iter().map(|held| AdamWTensors {
                    rounding,
                    ..held.tensors()
                });
                twin(&tensors.collect::<Vec<_>>(), &step)
            };
            make(&apart, twin)?;
            make(&on_cpu, twin)?;
        }
        for (apart, on_cpu) in apart.iter().zip(&on_cpu) {
            let bits = |held: &Held| -> Result<Vec<Vec<f64>>> {
                let mut all = vec![numbers(&held.parameter)?];
                all.extend(
                    held.master
                        .as_ref()
                        .map(|master| numbers(master))
                        .transpose()?,
                );
                for moment in [&held.average, &held.square] {
                    all.push(numbers(moment)?);
                }
                Ok(all)
            };
            assert!(
                bits(apart)? == bits(on_cpu)?,
                "{:?}",
                apart.parameter.dims()
            );
        }
    }
    Ok(())
}

#[test]
fn a_state_on_another_device_is_an_error() -> Result<()> {
    for device in devices() {
        let held = Held::new(3, 1, [DType::F32; 2], false, device)?;
        let on_cpu = held.average.to_device(&Device::Cpu)?;
        let tensors = AdamWTensors {
            average: &on_cpu,
            ..held.tensors()
        };
        if !device.is_cpu() {
            let error = message(adamw(&[tensors], &STEP));
            let expected = "square: on Cuda { gpu_id: 0 }, must be on the device of average, Cpu";
            assert!(error.contains(expected), "{error}");
        }
        let gradient = held.gradient.to_device(&Device::Cpu)?;
        let tensors = AdamWTensors {
            gradient: &gradient,
            ..held.tensors()
        };
        if !device.is_cpu() {
            let error = message(adamw(&[tensors], &STEP));
            let expected =
                "gradient: on Cpu, must be on the device of parameter, Cuda { gpu_id: 0 }";
            assert!(error.contains(expected), "{error}");
        }
    }
    Ok(())
}

/// In bf16 the neighbor of 1 is 0.9961, so ten steps of 1e-3 are lost without a master.
#[rstest]
#[case::fused(adamw)]
#[case::composed(composed::adamw)]
fn a_master_keeps_steps_that_bf16_loses(
    #[case] twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>,
) -> Result<()> {
    for device in devices() {
        for (master, expected) in [(false, 1.0), (true, 0.9901)] {
            let one = |dtype| Var::ones(3, dtype, device);
            let zero = || Var::zeros(3, DType::F32, device);
            let held = Held {
                parameter: one(DType::BF16)?,
                master: master.then(|| one(DType::F32)).transpose()?,
                average: zero()?,
                square: zero()?,
                gradient: Tensor::ones(3, DType::BF16, device)?,
                weight_decay: 0.0,
            };
            for step in 1..=10 {
                let learning_rate = 1e-3;
                twin(
                    &[held.tensors()],
                    &AdamWStep {
                        step,
                        learning_rate,
                        ..STEP
                    },
                )?;
            }
            assert_close(&numbers(&held.parameter)?, &[expected; 3], 2e-3);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn a_gradient_may_have_any_layout(
        rows in 0usize..4,
        columns in 0usize..40,
        dtype in dtypes(),
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let shape = [rows, columns];
        for device in devices() {
            let gradient = layout.apply(&noisy(&shape, seed, dtype)?)?.to_device(device)?;
            // From the CPU, because Candle has no empty tensors of zeros on CUDA.
            let zeros = || Var::from_tensor(&Tensor::zeros(&shape, DType::F32, &Device::Cpu)?.to_device(device)?);
            let held = Held {
                parameter: zeros()?,
                master: None,
                average: zeros()?,
                square: zeros()?,
                gradient,
                weight_decay: 0.0,
            };
            adamw(&[held.tensors()], &STEP)?;
            let gradient = held.gradient.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            assert_same(&held.average, &(gradient * 0.1)?, 1e-7)?;
        }
    }
}

#[rstest]
#[case::fused(adamw)]
#[case::composed(composed::adamw)]
fn a_gradient_factor_equals_scaled_gradients(
    #[case] twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>,
) -> Result<()> {
    for device in devices() {
        // Together they have several blocks on a GPU, and several parameter dtypes.
        let held = || -> Result<Vec<Held>> {
            [
                (1, DType::F32, false),
                (10_000, DType::BF16, true),
                (5001, DType::F32, false),
                (4096, DType::F16, false),
                (3, DType::BF16, true),
            ]
            .into_iter()
            .map(|(len, dtype, master)| {
                Held::new(len, len as u64, [dtype, DType::F32], master, device)
            })
            .collect()
        };
        let (folded, scaled) = (held()?, held()?);
        let factor = 0.3;
        let step = AdamWStep {
            gradient_factor: factor,
            ..STEP
        };
        twin(&folded.iter().map(Held::tensors).collect::<Vec<_>>(), &step)?;
        let gradients: Vec<_> = scaled.iter().map(|held| &held.gradient).collect();
        scale_gradients(&gradients, factor)?;
        twin(&scaled.iter().map(Held::tensors).collect::<Vec<_>>(), &STEP)?;
        for (folded, scaled) in folded.iter().zip(&scaled) {
            assert_eq!(numbers(&folded.parameter)?, numbers(&scaled.parameter)?);
            assert_eq!(numbers(&folded.average)?, numbers(&scaled.average)?);
            assert_eq!(numbers(&folded.square)?, numbers(&scaled.square)?);
            assert_ne!(numbers(&folded.gradient)?, numbers(&scaled.gradient)?);
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument_and_changes_nothing() -> Result<()> {
    let good = Held::new(5, 1, [DType::F32, DType::F32], false, &Device::Cpu)?;
    let other = Held::new(5, 9, [DType::F32, DType::F32], false, &Device::Cpu)?;
    let half = Held::new(5, 1, [DType::BF16, DType::F32], true, &Device::Cpu)?;
    let longer = Var::zeros(6, DType::F32, &Device::Cpu)?;
    let before = numbers(&good.parameter)?;
    let refused = |tensors: AdamWTensors, step: AdamWStep, expected: &str| -> Result<()> {
        for twin in [adamw, composed::adamw] {
            let message = message(twin(&[good.tensors(), tensors], &step));
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(numbers(&good.parameter)?, before);
        Ok(())
    };
    let other = other.tensors();
    refused(other, AdamWStep { step: 0, ..STEP }, "step: 0")?;
    refused(other, AdamWStep { beta2: 1.0, ..STEP }, "beta2: 1")?;
    refused(
        other,
        AdamWStep {
            learning_rate: f64::NAN,
            ..STEP
        },
        "learning_rate: NaN",
    )?;
    refused(
        other,
        AdamWStep {
            gradient_factor: f64::INFINITY,
            ..STEP
        },
        "gradient_factor: inf",
    )?;
    refused(
        AdamWTensors {
            weight_decay: -1.0,
            ..other
        },
        STEP,
        "weight_decay: -1",
    )?;
    refused(
        AdamWTensors {
            average: &longer,
            ..other
        },
        STEP,
        "average: shape [6]",
    )?;
    refused(
        AdamWTensors {
            gradient: &longer,
            ..other
        },
        STEP,
        "gradient: shape [6]",
    )?;
    refused(
        AdamWTensors {
            square: &half.parameter,
            ..other
        },
        STEP,
        "square: BF16",
    )?;
    refused(
        AdamWTensors {
            master: Some(&half.average),
            ..other
        },
        STEP,
        "master: given",
    )?;
    let rounding = Rounding::Stochastic { key: 1, first: 0 };
    refused(
        AdamWTensors { rounding, ..other },
        STEP,
        "rounding: stochastic for a parameter of F32, must be nearest, unless it is bf16",
    )?;
    refused(
        AdamWTensors {
            master: Some(&good.average),
            rounding,
            ..half.tensors()
        },
        STEP,
        "rounding: stochastic for a parameter of BF16 with a master",
    )?;
    refused(
        AdamWTensors {
            master: None,
            rounding: Rounding::Stochastic { key: 1, first: 4 },
            ..half.tensors()
        },
        STEP,
        "rounding: first 4, must be a multiple of 8",
    )?;
    refused(
        AdamWTensors {
            master: None,
            rounding,
            ..half.tensors()
        },
        AdamWStep {
            step: 1 << 32,
            ..STEP
        },
        "step: 4294967296, must be below 2^32",
    )?;
    let blocks = Var::zeros(moment_blocks(5), DType::U8, &Device::Cpu)?;
    let longer_blocks = Var::zeros(moment_blocks(257), DType::U8, &Device::Cpu)?;
    for (average, square, expected) in [
        (&blocks, other.square, "square: F32, must be U8"),
        (
            &longer_blocks,
            &blocks,
            "average: shape [2, 260], must be [1, 260]",
        ),
    ] {
        let moments = AdamWTensors {
            average,
            square,
            ..other
        };
        refused(moments, STEP, expected)?;
    }
    let exact = other.gradient.to_dtype(DType::F64)?;
    refused(
        AdamWTensors {
            gradient: &exact,
            ..other
        },
        STEP,
        "gradient: F64",
    )?;
    refused(good.tensors(), STEP, "shares its memory")?;
    refused(
        AdamWTensors {
            square: other.average,
            ..other
        },
        STEP,
        "shares its memory",
    )?;
    refused(
        AdamWTensors {
            gradient: other.square,
            ..other
        },
        STEP,
        "shares its memory",
    )
}

#[test]
fn empty_tensors_are_valid() -> Result<()> {
    for device in devices() {
        for shape in [&[2, 0][..], &[0, 3], &[0]] {
            let empty = noisy(shape, 1, DType::F32)?.to_device(device)?;
            let held = Held {
                parameter: Var::from_tensor(&empty)?,
                master: None,
                average: Var::from_tensor(&empty)?,
                square: Var::from_tensor(&empty)?,
                gradient: empty,
                weight_decay: 0.0,
            };
            adamw(&[held.tensors()], &STEP)?;
            assert_eq!(held.parameter.dims(), shape);
        }
    }
    Ok(())
}
