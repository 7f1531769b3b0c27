//! Gradients: correctness, completeness, summation and clipping.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Error, IndexOp, Result, Tensor, Var};
use candle_grpo_nn::{Decoder, Gradients, Parameters};
use candle_nn::VarBuilder;
use rstest::rstest;

use candle_grpo_test_support::{device, message, noise_tensor};

use crate::small::{
    Family, config, exact_gradients, left_padded, lively, lively_tensors, max_difference,
    next_token_loss,
};

#[rstest]
fn every_variable_receives_a_gradient_that_is_not_zero(
    #[values(true, false)] tied: bool,
) -> Result<()> {
    let config = config(tied);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.var_builder())?;
    let (ids, mask) = left_padded()?;
    let mut gradients = Gradients::new();
    gradients.accumulate(&next_token_loss(&decoder, &ids, &mask)?, &parameters)?;
    assert_eq!(gradients.iter().count(), config.parameter_shapes().len());
    for (name, gradient) in gradients.iter() {
        assert_eq!(gradient.shape(), parameters.get(name).unwrap().shape());
        let size = max_difference(gradient, &gradient.zeros_like()?)?;
        assert!(size > 1e-4 && size.is_finite(), "{name}: {size}");
        assert!(!gradient.track_op(), "{name} keeps the graph");
    }
    Ok(())
}

/// In f64. Extrapolating two central differences has an error in the fourth power of the step.
#[rstest]
fn gradients_are_finite_differences_of_the_loss(
    #[values(Family::Llama, Family::LlamaWithBiases, Family::Qwen3_5)] family: Family,
    #[values(true, false)] tied: bool,
) -> Result<()> {
    let config = family.config(tied);
    let variables = lively_tensors(&config)?
        .into_iter()
        .map(|(name, tensor)| Ok((name, Var::from_tensor(&tensor.to_dtype(DType::F64)?)?)))
        .collect::<Result<BTreeMap<_, _>>>()?;
    let tensors: HashMap<_, _> = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()))
        .collect();
    let decoder = Decoder::new(
        &config,
        VarBuilder::from_tensors(tensors, DType::F64, device()),
    )?;
    let (ids, mask) = left_padded()?;
    let loss = || next_token_loss(&decoder, &ids, &mask);

    let store = loss()?.backward()?;
    let step = 1e-5;
    for (name, variable) in &variables {
        let gradient = store
            .get(variable)
            .unwrap_or_else(|| panic!("{name} has no gradient"))
            .detach();
        // A direction unrelated to any pattern in the model.
        let direction = noise_tensor(variable.shape(), 1, DType::F64, device())?;
        let slope = (gradient * &direction)?.sum_all()?.to_scalar::<f64>()?;

        let start = variable.as_detached_tensor().copy()?;
        let at = |distance: f64| -> Result<f64> {
            variable.set(&(&start + (&direction * distance)?)?)?;
            loss()?.to_scalar::<f64>()
        };
        let difference = |step: f64| Ok::<_, Error>((at(step)? - at(-step)?) / (2.0 * step));
        let measured = (4.0 * difference(step / 2.0)? - difference(step)?) / 3.0;
        variable.set(&start)?;
        let tolerance = 1e-7 * (1.0 + measured.abs());
        assert!(
            (slope - measured).abs() < tolerance,
            "{name}: {slope} against {measured}"
        );
        assert!(
            measured.abs() > 1e-6,
            "{name}: this direction tests nothing"
        );
    }
    Ok(())
}

#[test]
fn a_broken_graph_is_an_error_that_lists_the_variables() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let tensors = parameters
        .iter()
        .map(|(name, variable)| {
            let cut = name.ends_with("k_proj.weight");
            (
                name.to_owned(),
                if cut {
                    variable.as_detached_tensor()
                } else {
                    variable.as_tensor().clone()
                },
            )
        })
        .collect();
    let decoder = Decoder::new(
        &config,
        VarBuilder::from_tensors(tensors, DType::F32, device()),
    )?;
    let (ids, mask) = left_padded()?;
    let mut gradients = Gradients::new();
    let message =
        message(gradients.accumulate(&next_token_loss(&decoder, &ids, &mask)?, &parameters));
    let expected = "2 of 20 variables received no gradient from the loss: \
                    model.layers.0.self_attn.k_proj.weight, model.layers.1.self_attn.k_proj.weight";
    assert!(message.contains(expected), "{message}");
    assert!(gradients.is_empty());
    Ok(())
}

#[test]
fn a_detached_decoder_records_nothing() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let (ids, mask) = left_padded()?;
    let loss = next_token_loss(&decoder, &ids, &mask)?;
    assert!(!loss.track_op());
    let message = message(Gradients::new().accumulate(&loss, &parameters));
    assert!(
        message.contains("20 of 20 variables received no gradient"),
        "{message}"
    );
    Ok(())
}

#[test]
fn micro_batches_sum_to_the_whole() -> Result<()> {
    let config = config(false);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.var_builder())?;
    let (ids, mask) = left_padded()?;
    let mut whole = Gradients::new();
    whole.accumulate(&next_token_loss(&decoder, &ids, &mask)?, &parameters)?;

    let mut parts = Gradients::new();
    // Real token pairs in each row, relative to the batch.
    for (row, share) in [(0, 2.0 / 9.0), (1, 3.0 / 9.0), (2, 4.0 / 9.0)] {
        let loss = next_token_loss(&decoder, &ids.i(row..row + 1)?, &mask.i(row..row + 1)?)?;
        parts.accumulate(&(loss * share)?, &parameters)?;
    }
    for (name, gradient) in whole.iter() {
        let distance = max_difference(gradient, parts.get(name).unwrap())?;
        assert!(distance < 2e-6, "{name}: {distance}");
    }
    parts.clear();
    assert!(parts.is_empty() && parts.iter().next().is_none());
    Ok(())
}

#[test]
fn an_error_in_a_later_micro_batch_leaves_the_sum_as_it_was() -> Result<()> {
    let (tied, untied) = (lively(&config(true))?, lively(&config(false))?);
    let mut gradients = exact_gradients(&tied, |_, variable| variable.ones_like())?;
    let before = gradients
        .get("model.norm.weight")
        .unwrap()
        .to_vec1::<f32>()?;

    let mut loss = Tensor::zeros((), DType::F32, device())?;
    for (_, variable) in untied.iter() {
        loss = (loss + variable.sum_all()?)?;
    }
    let surplus = message(gradients.accumulate(&loss, &untied));
    assert!(surplus.contains("parameters: lm_head.weight"), "{surplus}");

    let cut = tied.get("model.norm.weight").unwrap().sum_all()?;
    let missing = message(gradients.accumulate(&cut, &tied));
    assert!(missing.contains("19 of 20 variables"), "{missing}");
    assert_eq!(
        gradients
            .get("model.norm.weight")
            .unwrap()
            .to_vec1::<f32>()?,
        before
    );
    assert!(gradients.get("lm_head.weight").is_none());
    Ok(())
}

#[test]
fn gradients_do_not_keep_the_graph() -> Result<()> {
    let parameters = lively(&config(true))?;
    // A factor's gradient is computed from the other, a tracked variable.
    let mut loss = Tensor::zeros((), DType::F32, device())?;
    for (_, variable) in parameters.iter() {
        loss = (loss + (variable.as_tensor() * variable.as_tensor())?.sum_all()?)?;
    }
    let mut gradients = Gradients::new();
    for _ in 0..2 {
        gradients.accumulate(&loss, &parameters)?;
        assert!(gradients.iter().all(|(_, gradient)| !gradient.track_op()));
    }
    Ok(())
}

#[test]
fn a_loss_that_is_not_one_number_is_refused() -> Result<()> {
    let parameters = lively(&config(true))?;
    let norm = parameters.get("model.norm.weight").unwrap();
    let vector = message(Gradients::new().accumulate(norm, &parameters));
    assert!(
        vector.contains("loss: shape [12] and dtype F32"),
        "{vector}"
    );
    let integer = message(Gradients::new().accumulate(&Tensor::new(1u32, device())?, &parameters));
    assert!(
        integer.contains("loss: shape [] and dtype U32"),
        "{integer}"
    );
    Ok(())
}

/// Gradients whose first element is 3 and 4 in two variables, and all others zero, so their norm is
/// 5.
fn three_four_five(parameters: &Parameters) -> Result<Gradients> {
    spiked(
        parameters,
        &[
            ("model.embed_tokens.weight", 3.0),
            ("model.norm.weight", 4.0),
        ],
    )
}

fn spiked(parameters: &Parameters, spikes: &[(&str, f32)]) -> Result<Gradients> {
    exact_gradients(parameters, |name, variable| {
        let mut values = vec![0f32; variable.elem_count()];
        if let Some((_, value)) = spikes.iter().find(|(spike, _)| *spike == name) {
            values[0] = *value;
        }
        Tensor::from_vec(values, variable.shape(), device())
    })
}

#[test]
fn the_norm_is_over_all_gradients_together() -> Result<()> {
    let parameters = lively(&config(true))?;
    assert_eq!(three_four_five(&parameters)?.global_norm()?, 5.0);
    let ones = exact_gradients(&parameters, |_, variable| variable.ones_like())?;
    assert!((ones.global_norm()? - (parameters.num_elements() as f64).sqrt()).abs() < 1e-9);
    assert_eq!(Gradients::new().global_norm()?, 0.0);
    Ok(())
}

#[test]
fn clipping_scales_as_torch_does_and_returns_the_norm_before() -> Result<()> {
    let parameters = lively(&config(true))?;
    let mut gradients = three_four_five(&parameters)?;
    assert_eq!(gradients.clip_by_global_norm(0.5)?, 5.0);
    let first = |gradients: &Gradients, name: &str| {
        gradients
            .get(name)
            .unwrap()
            .flatten_all()?
            .i(0)?
            .to_scalar::<f32>()
    };
    let scale = 0.5 / (5.0 + 1e-6);
    assert_eq!(
        first(&gradients, "model.embed_tokens.weight")?,
        (3.0 * scale) as f32
    );
    assert_eq!(
        first(&gradients, "model.norm.weight")?,
        (4.0 * scale) as f32
    );

    // So small that the 1e-6 counts: a sixth, not a fifth.
    let mut small = exact_gradients(&parameters, |name, variable| {
        variable.zeros_like()?.affine(
            0.0,
            if name == "model.norm.weight" {
                5e-6 / 12f64.sqrt()
            } else {
                0.0
            },
        )
    })?;
    let before = first(&small, "model.norm.weight")?;
    small.clip_by_global_norm(1e-6)?;
    let ratio = first(&small, "model.norm.weight")? / before;
    assert!((ratio - 1.0 / 6.0).abs() < 1e-5, "{ratio}");

    for loose in [5.1, f64::INFINITY] {
        let mut gradients = three_four_five(&parameters)?;
        assert_eq!(gradients.clip_by_global_norm(loose)?, 5.0);
        assert_eq!(first(&gradients, "model.embed_tokens.weight")?, 3.0);
        assert_eq!(first(&gradients, "model.norm.weight")?, 4.0);
    }
    for bad in [0.0, -1.0, f64::NAN] {
        let message = message(gradients.clip_by_global_norm(bad));
        assert!(message.contains("max_norm:"), "{message}");
    }
    Ok(())
}

#[rstest]
fn a_gradient_that_is_not_finite_is_named(
    #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30)] bad: f32,
) -> Result<()> {
    let parameters = lively(&config(true))?;
    let mut gradients = spiked(
        &parameters,
        &[
            ("model.layers.1.mlp.up_proj.weight", bad),
            ("model.norm.weight", f32::NAN),
        ],
    )?;
    for message in [
        message(gradients.global_norm()),
        message(gradients.clip_by_global_norm(1.0)),
    ] {
        assert!(
            message.contains("gradient of model.layers.1.mlp.up_proj.weight: not finite"),
            "{message}"
        );
    }
    Ok(())
}
