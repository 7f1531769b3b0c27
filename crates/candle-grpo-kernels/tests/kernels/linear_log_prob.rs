//! Tests `linear_log_prob` against its composed twin in f64, and tests masks and frozen arguments.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, composed, embedding, linear_log_prob,
    linear_rows, log_prob,
};
use candle_grpo_test_support::{
    assert_close, cases, devices, is_long, message, noise_tensor, numbers,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::token_results::{derivatives, results, score, targets};
use crate::twin::{bits, check_views, has_no_twin, rounding};

/// Hidden states, weight and bias with small logits.
struct Layer {
    hidden: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Layer {
    /// Returns a random layer. The shape is `[rows, width, vocab]`.
    fn new(
        [rows, width, vocab]: [usize; 3],
        bias: bool,
        dtype: DType,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            hidden: noise_tensor((rows, width), seed, dtype, device)?,
            weight: noise_tensor((vocab, width), seed ^ 1, dtype, device)?,
            bias: bias
                .then(|| noise_tensor(vocab, seed ^ 2, dtype, device))
                .transpose()?,
        })
    }

    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            hidden: f(&self.hidden)?,
            weight: f(&self.weight)?,
            bias: self.bias.as_ref().map(&f).transpose()?,
        })
    }

    fn variables(&self) -> Result<Self> {
        self.map(|x| Ok(Var::from_tensor(x)?.into_inner()))
    }

    fn arguments(&self) -> Vec<&Tensor> {
        [Some(&self.hidden), Some(&self.weight), self.bias.as_ref()]
            .into_iter()
            .flatten()
            .collect()
    }

    fn log_probs(
        &self,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<TokenLogProbs> {
        linear_log_prob(
            &self.hidden,
            &self.weight,
            self.bias.as_ref(),
            targets,
            temperature,
            options,
        )
    }
}

/// Compares the fused path, in a graph and without one, with the twin in f64.
fn check_against_f64(
    layer: &Layer,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<()> {
    // The gradients have their argument's dtype.
    let close = match layer.hidden.dtype() {
        DType::F32 => 1e-5,
        // Logit gradients are rounded too, on CUDA and by some processors.
        DType::BF16 => 1.2e-2,
        _ => 1e-3,
    };
    let exact = layer.map(|x| x.to_dtype(DType::F64))?.variables()?;
    let fused = layer.variables()?;
    let expected = composed::linear_log_prob(
        &exact.hidden,
        &exact.weight,
        exact.bias.as_ref(),
        targets,
        temperature,
        options,
    )?;
    let actual = fused.log_probs(targets, temperature, options)?;
    let alone = LinearLogProb::new(
        &fused.hidden,
        &fused.weight,
        fused.bias.as_ref(),
        targets,
        temperature,
        options,
    )?;
    let without_graph = alone.forward()?;
    for ((expected, actual), alone) in results(&expected)
        .iter()
        .zip(&results(&actual))
        .zip(&results(&without_graph))
    {
        assert_eq!(actual.dtype(), DType::F32);
        assert_eq!(actual.dims(), targets.dims());
        assert_close(&numbers(actual)?, &numbers(expected)?, 4e-6);
        assert_eq!(numbers(actual)?, numbers(alone)?);
        assert!(!alone.track_op());
    }
    let expected = score(&expected)?.backward()?;
    let store = score(&actual)?.backward()?;
    let gradients = alone.backward(&without_graph, &derivatives(&without_graph)?)?;
    let gradients = [gradients.hidden, gradients.weight, gradients.bias];
    for (i, ((exact, fused), alone)) in exact
        .arguments()
        .into_iter()
        .zip(fused.arguments())
        .zip(gradients)
        .enumerate()
    {
        let expected = expected.get(exact).expect("a gradient of the twin");
        let actual = store.get(fused).expect("a gradient");
        assert_eq!(actual.dtype(), fused.dtype());
        assert_close(&numbers(actual)?, &numbers(expected)?, close);
        let alone = alone.expect("a gradient without a graph");
        assert_eq!(alone.dims(), fused.dims());
        // The weight gradient is the sum before it is rounded.
        let is_weight = i == 1;
        assert_eq!(
            alone.dtype(),
            if is_weight { DType::F32 } else { fused.dtype() }
        );
        assert_eq!(numbers(&alone.to_dtype(fused.dtype())?)?, numbers(actual)?);
        if is_weight {
            assert_close(&numbers(&alone)?, &numbers(expected)?, close);
        }
    }
    check_weight_sum(&fused, alone, close)
}

/// Compares the weight gradient with what the same layer adds to a sum.
fn check_weight_sum(fused: &Layer, layer: LinearLogProb, close: f64) -> Result<()> {
    let tokens = layer.forward()?;
    let derivatives = derivatives(&tokens)?;
    let apart = layer.backward(&tokens, &derivatives)?;
    let gradient = apart.weight.expect("a gradient of the weight");
    let earlier = fused.weight.detach().to_dtype(gradient.dtype())?;
    let sum = earlier.force_contiguous()?;
    let layer = layer.with_weight_sum(&sum)?;
    let added = layer.backward(&layer.forward()?, &derivatives)?;
    assert!(added.weight.is_none());
    for (apart, added) in [(apart.hidden, added.hidden), (apart.bias, added.bias)] {
        let (apart, added) = (apart.as_ref().map(numbers), added.as_ref().map(numbers));
        assert_eq!(apart.transpose()?, added.transpose()?);
    }
    let expected = (earlier + gradient)?;
    assert_close(&numbers(&sum)?, &numbers(&expected)?, close);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        outer in prop::collection::vec(0usize..4, 1..3),
        width in prop_oneof![Just(1usize), 2usize..40],
        vocab in prop_oneof![Just(1usize), 2usize..40, 1000usize..1100],
        bias in any::<bool>(),
        temperature in 0.3f64..2.0,
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        masked in any::<bool>(),
        // Caps range from bending all logits to bending none.
        logit_cap in prop::option::of(0.3f64..50.0),
        seed in any::<u64>(),
    ) {
        let rows: usize = outer.iter().product();
        let mask: Vec<u8> = (0..rows).map(|row| (seed >> row & 1) as u8).collect();
        let layer = Layer::new([rows, width, vocab], bias, dtype, seed, &Device::Cpu)?;
        let hidden = layer.hidden.reshape([&outer[..], &[width]].concat())?;
        let layer = Layer { hidden, ..layer };
        for device in devices() {
            let targets = targets(rows, vocab, seed, device)?.reshape(&outer[..])?;
            let mask = Tensor::from_slice(&mask, &outer[..], device)?;
            let mask = masked.then_some(&mask);
            let options = LogProbOptions { mask, logit_cap, ..Default::default() };
            if has_no_twin(device, rows) {
                let tokens = layer.map(|x| x.to_device(device))?.log_probs(&targets, temperature, options)?;
                prop_assert_eq!(tokens.log_probs.dims(), targets.dims());
                continue;
            }
            // Contiguous, because with equal weight rows the hidden state gradient is a difference
            // of rounding errors.
            check_against_f64(&layer.map(|x| x.to_device(device))?, &targets, temperature, options)?;
            let inputs: Vec<_> = layer.arguments().into_iter().zip(layouts).collect();
            check_views(device, &inputs, |views| {
                let tokens = linear_log_prob(
                    views[0],
                    views[1],
                    views.get(2).copied(),
                    &targets,
                    temperature,
                    options,
                )?;
                Ok((results(&tokens).to_vec(), score(&tokens)?))
            })?;
        }
    }
}

/// More rows and columns than a tile. A wide weight's gradient has space for logit tiles.
#[rstest]
fn many_tiles_equal_the_composed_twin(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(5, 300)] width: usize,
) -> Result<()> {
    for device in devices() {
        // A GPU has one tile for each of these sizes, and the emulated one is slow.
        let (rows, vocab) = if device.is_cpu() {
            (1100, 2500)
        } else {
            (70, 300)
        };
        let mut layer = Layer::new([rows, width, vocab], true, dtype, 7, device)?;
        // Logits with the same scale at any width.
        layer.hidden = (layer.hidden * (5. / width as f64).sqrt())?;
        let mask: Vec<u8> = (0..rows).map(|row| (row % 41 != 3) as u8).collect();
        let mask = Tensor::from_vec(mask, rows, device)?;
        let targets = targets(rows, vocab, 3, device)?;
        let (mask, logit_cap) = (Some(&mask), Some(1.5));
        let combinations = [
            (None, None),
            (mask, logit_cap),
            (mask, None),
            (None, logit_cap),
        ];
        let few = if is_long() { 4 } else { 2 };
        for (mask, logit_cap) in combinations.into_iter().take(few) {
            let options = LogProbOptions {
                mask,
                logit_cap,
                ..Default::default()
            };
            check_against_f64(&layer, &targets, 0.8, options)?;
        }
    }
    Ok(())
}

/// A tile of whole blocks is narrower than the narrowest tile with few rows.
#[rstest]
fn few_rows_and_many_columns_equal_the_composed_twin(
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let vocab = if device.is_cpu() { 6500 } else { 300 };
        let mut layer = Layer::new([9, 300, vocab], true, dtype, 7, device)?;
        layer.hidden = (layer.hidden * 0.1)?;
        let targets = targets(9, vocab, 3, device)?;
        check_against_f64(&layer, &targets, 0.8, LogProbOptions::default())?;
    }
    Ok(())
}

/// Decoding's logits, from `linear_rows`, give training's log-probs.
#[rstest]
fn on_the_cpu_the_result_is_bit_identical_to_that_of_the_logits(
    #[values(1, 9, 1100)] rows: usize,
    #[values(5, 300)] width: usize,
) -> Result<()> {
    let vocab = 2500;
    let device = Device::Cpu;
    let hidden = noise_tensor((rows, width), 1, DType::F32, &device)?;
    let weight = noise_tensor((vocab, width), 2, DType::F32, &device)?;
    let targets = targets(rows, vocab, 3, &device)?;
    let options = LogProbOptions::default();
    let fused = linear_log_prob(&hidden, &weight, None, &targets, 0.8, options)?;
    let logits = linear_rows(&hidden, &[&weight])?.swap_remove(0);
    let plain = log_prob(&logits, &targets, 0.8, options)?;
    for (fused, plain) in results(&fused).into_iter().zip(results(&plain)) {
        assert_eq!(bits(&fused)?, bits(&plain)?);
    }
    Ok(())
}

#[test]
fn nan_in_a_masked_row_has_no_effect() -> Result<()> {
    for device in devices() {
        let hidden = Var::new(&[[1f32, 2.], [f32::NAN, f32::INFINITY], [0.5, -1.]], device)?;
        let weight = Var::from_tensor(&noise_tensor((5, 2), 4, DType::F32, device)?)?;
        let bias = Var::from_tensor(&noise_tensor(5, 8, DType::F32, device)?)?;
        // In range on a GPU, because the composed twin reads the target's row.
        let targets = Tensor::new(&[1i64, if device.is_cpu() { -100 } else { 0 }, 4], device)?;
        let mask = Tensor::new(&[1f32, 0., 1.], device)?;
        let options = LogProbOptions {
            mask: Some(&mask),
            ..Default::default()
        };
        for twin in [linear_log_prob, composed::linear_log_prob] {
            let tokens = twin(&hidden, &weight, Some(&bias), &targets, 1.0, options)?;
            for result in results(&tokens) {
                let result = result.to_vec1::<f32>()?;
                assert!(result[0].is_finite() && result[2].is_finite());
                assert_eq!(result[1], 0.0);
            }
            let store = score(&tokens)?.backward()?;
            let gradient = store.get(&hidden).expect("a gradient").to_vec2::<f32>()?;
            assert!(
                gradient[0]
                    .iter()
                    .chain(&gradient[2])
                    .all(|g| g.is_finite() && *g != 0.0)
            );
            assert_eq!(gradient[1], [0.0; 2]);
            for variable in [&weight, &bias] {
                let gradient = numbers(store.get(variable).expect("a gradient"))?;
                assert!(gradient.iter().all(|g| g.is_finite() && *g != 0.0));
            }
        }
    }
    Ok(())
}

/// On the CPU only: in the composed twin, Candle also computes gradients for constants.
#[test]
fn frozen_arguments_get_no_gradient() -> Result<()> {
    let layer = Layer::new([5, 6, 70], true, DType::F32, 11, &Device::Cpu)?;
    let targets = targets(5, 70, 2, &Device::Cpu)?;
    let all = layer.variables()?;
    let gradients = |layer: &Layer| -> Result<_> {
        let tokens = layer.log_probs(&targets, 1.0, LogProbOptions::default())?;
        let store = score(&tokens)?.backward()?;
        layer
            .arguments()
            .into_iter()
            .map(|x| store.get(x).map(numbers).transpose())
            .collect::<Result<Vec<_>>>()
    };
    let expected = gradients(&all)?;
    for frozen in 1..7 {
        let is_frozen = |at: usize| frozen >> at & 1 == 1;
        let part = |at, variable: &Tensor| {
            if is_frozen(at) {
                variable.detach()
            } else {
                variable.clone()
            }
        };
        let some = Layer {
            hidden: part(0, &all.hidden),
            weight: part(1, &all.weight),
            bias: all.bias.as_ref().map(|bias| part(2, bias)),
        };
        for (at, (found, expected)) in gradients(&some)?.iter().zip(&expected).enumerate() {
            assert_eq!(found, if is_frozen(at) { &None } else { expected });
        }
    }
    Ok(())
}

/// One variable with two uses gets the sum of both gradients.
#[rstest]
fn the_weight_may_be_the_embedding(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let ids = Tensor::new(&[3u32, 0, 7, 3], device)?;
        let targets = Tensor::new(&[0u32, 7, 3, 11], device)?;
        let values = noise_tensor((12, 4), 21, dtype, device)?;
        let gradient = |dtype| -> Result<_> {
            let weight = Var::from_tensor(&values.to_dtype(dtype)?)?;
            let layer = Layer {
                hidden: embedding(&ids, &weight)?,
                weight: weight.as_tensor().clone(),
                bias: None,
            };
            let tokens = layer.log_probs(&targets, 1.0, LogProbOptions::default())?;
            let store = score(&tokens)?.backward()?;
            numbers(store.get(&weight).expect("a gradient"))
        };
        // Both gradients and their sum are rounded.
        let tolerance = 2.0 * rounding(dtype);
        assert_close(&gradient(dtype)?, &gradient(DType::F64)?, tolerance);
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let (hidden, weight) = (zeros(&[2, 4], DType::F32)?, zeros(&[5, 4], DType::F32)?);
    let targets = Tensor::new(&[0u32, 4], &Device::Cpu)?;
    let call =
        |hidden: &Tensor, weight: &Tensor, bias: Option<&Tensor>, targets: &Tensor, temperature| {
            message(linear_log_prob(
                hidden,
                weight,
                bias,
                targets,
                temperature,
                LogProbOptions::default(),
            ))
        };
    let with_layer = |hidden: &Tensor, weight: &Tensor| call(hidden, weight, None, &targets, 1.0);
    assert_eq!(
        with_layer(&hidden, &zeros(&[5], DType::F32)?),
        "weight: shape [5], must be [V, H]"
    );
    assert_eq!(
        with_layer(&hidden, &zeros(&[0, 4], DType::F32)?),
        "weight: shape [0, 4], must not be empty"
    );
    assert_eq!(
        with_layer(&hidden, &zeros(&[5, 4], DType::U32)?),
        "weight: U32, must be of a float dtype"
    );
    assert_eq!(
        with_layer(&zeros(&[2, 3], DType::F32)?, &weight),
        "hidden: shape [2, 3], the last dimension must be that of weight, 4"
    );
    assert_eq!(
        with_layer(&zeros(&[], DType::F32)?, &weight),
        "hidden: a scalar, must be [.., 4]"
    );
    assert_eq!(
        with_layer(&zeros(&[2, 4], DType::I64)?, &weight),
        "hidden: I64, must be of a float dtype"
    );
    let bias = |shape: &[usize], dtype| -> Result<_> {
        Ok(call(
            &hidden,
            &weight,
            Some(&zeros(shape, dtype)?),
            &targets,
            1.0,
        ))
    };
    assert_eq!(bias(&[4], DType::F32)?, "bias: shape [4], must be [5]");
    assert_eq!(bias(&[5], DType::U8)?, "bias: U8, must be of a float dtype");
    assert_eq!(
        call(&hidden, &weight, None, &targets.narrow(0, 0, 1)?, 1.0),
        "targets: shape [1], must be that of hidden without the last dimension, [2]"
    );
    let far = Tensor::new(&[0u32, 5], &Device::Cpu)?;
    assert!(call(&hidden, &weight, None, &far, 1.0).contains("token id 5"));
    assert_eq!(
        call(&hidden, &weight, None, &targets, -1.0),
        "temperature: -1.0, must be from 1e-6 to 1e6"
    );
    let layer = LinearLogProb::new(
        &hidden,
        &weight,
        None,
        &targets,
        1.0,
        LogProbOptions::default(),
    )?;
    let tokens = layer.forward()?;
    let short = TokenLogProbs {
        entropy: tokens.entropy.narrow(0, 0, 1)?,
        ..tokens.clone()
    };
    assert_eq!(
        message(layer.backward(&tokens, &short)),
        "derivatives: shape [1], must be that of targets, [2]"
    );
    let sum = |weight: &Tensor, shape: &[usize], dtype| -> Result<_> {
        let layer = LinearLogProb::new(&hidden, weight, None, &targets, 1.0, Default::default())?;
        Ok(message(layer.with_weight_sum(&zeros(shape, dtype)?)))
    };
    assert_eq!(
        sum(&weight, &[5, 4], DType::F32)?,
        "sum: given for a constant weight, must be absent"
    );
    let variable = Var::from_tensor(&weight)?;
    assert_eq!(
        sum(&variable, &[4, 5], DType::F32)?,
        "sum: shape [4, 5], must be that of weight, [5, 4]"
    );
    assert_eq!(
        sum(&variable, &[5, 4], DType::BF16)?,
        "sum: BF16, must be F32 to add F32 to it"
    );
    let layer = LinearLogProb::new(&hidden, &variable, None, &targets, 1.0, Default::default())?;
    assert!(message(layer.with_weight_sum(&variable)).contains("shares its memory"));
    Ok(())
}
