//! AdamW: values, weight decay, state and errors.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_nn::optim::{DecayRule, MasterWeights, Sharding, StateForm, StateMemory};
use candle_grpo_nn::{
    AdamW, AdamWConfig, BaseWeights, ComputeCopies, Decoder, DecoderConfig, Export, Gradients,
    Parameters,
};
use rstest::rstest;

use candle_grpo_test_support::{device, message, noise_tensor, on_ranks};

use crate::small::{bits, config, exact_gradients, left_padded, lively, next_token_loss};

/// Values with which two steps can be followed by hand.
fn by_hand(decay: DecayRule) -> AdamWConfig {
    AdamWConfig {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.5,
        decay,
        ..AdamWConfig::default()
    }
}

fn ones_of(config: &DecoderConfig) -> Result<Parameters> {
    let tensors = config
        .parameter_shapes()
        .into_iter()
        .map(|(name, shape)| Ok((name, Tensor::ones(shape, DType::F32, device())?)))
        .collect::<Result<_>>()?;
    Parameters::from_tensors(config, tensors, device())
}

fn ones() -> Result<Parameters> {
    ones_of(&config(false))
}

fn constant(parameters: &Parameters, value: f64) -> Result<Gradients> {
    exact_gradients(parameters, |_, variable| {
        variable.ones_like()?.affine(value, 0.0)
    })
}

fn assert_all(tensor: &Tensor, expected: f64, what: &str) -> Result<()> {
    for value in tensor
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?
    {
        assert!(
            (value - expected).abs() < 1.5e-7,
            "{what}: {value} is not {expected}"
        );
    }
    Ok(())
}

#[test]
fn two_steps_have_the_numbers_computed_by_hand() -> Result<()> {
    let parameters = ones()?;
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    // Step 1, gradient 0.5: m = 0.05, v = 0.0025; corrected 0.5 and 0.25; p = 0.95 - 0.1 * 0.5 /
    // 0.5. Step 2, gradient -1: m = -0.055, v = 0.012475; corrected by 0.19 and 0.0199.
    for (gradient, p, m, v) in [
        (0.5, 0.85, 0.05, 0.0025),
        (-1.0, 0.844_060_772_8, -0.055, 0.012_475),
    ] {
        optimizer.step(&parameters, &constant(&parameters, gradient)?)?;
        let state = optimizer.state()?;
        for (name, variable) in parameters.iter() {
            assert_all(variable, p, name)?;
            assert_all(&state[&format!("exp_avg.{name}")], m, name)?;
            assert_all(&state[&format!("exp_avg_sq.{name}")], v, name)?;
        }
    }
    assert_eq!(optimizer.steps(), 2);
    assert_eq!(optimizer.state()?["step"].to_scalar::<i64>()?, 2);
    Ok(())
}

#[test]
fn only_matrices_of_linear_layers_decay_unless_all_do() -> Result<()> {
    for (rule, decaying) in [
        (DecayRule::Matrices, vec!["_proj.weight", "lm_head.weight"]),
        (DecayRule::All, vec![""]),
    ] {
        let parameters = ones()?;
        let mut optimizer = AdamW::new(by_hand(rule), &parameters)?;
        optimizer.step(&parameters, &constant(&parameters, 0.0)?)?;
        for (name, variable) in parameters.iter() {
            let decays = decaying.iter().any(|end| name.ends_with(end));
            assert_all(variable, if decays { 0.95 } else { 1.0 }, name)?;
        }
    }
    assert_eq!(AdamWConfig::default().decay, DecayRule::Matrices);
    Ok(())
}

#[test]
fn the_learning_rate_of_a_schedule_is_that_of_the_next_step() -> Result<()> {
    let parameters = ones()?;
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    optimizer.set_learning_rate(0.0);
    let before = bits(&parameters)?;
    optimizer.step(&parameters, &constant(&parameters, 0.5)?)?;
    assert_eq!(bits(&parameters)?, before);
    optimizer.set_learning_rate(0.2);
    assert_eq!(optimizer.learning_rate(), 0.2);
    // The corrected moments for two equal gradients are that gradient and its square.
    optimizer.step(&parameters, &constant(&parameters, 0.5)?)?;
    for (name, variable) in parameters.iter() {
        assert_all(variable, 0.9 - 0.2, name)?;
    }
    Ok(())
}

#[test]
fn new_options_are_those_of_the_next_step() -> Result<()> {
    let parameters = ones()?;
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    optimizer.step(&parameters, &constant(&parameters, 0.5)?)?;
    let without_decay = AdamWConfig {
        learning_rate: 0.2,
        weight_decay: 0.0,
        ..by_hand(DecayRule::All)
    };
    optimizer.set_config(without_decay.clone())?;
    optimizer.step(&parameters, &constant(&parameters, 0.5)?)?;
    for (name, variable) in parameters.iter() {
        assert_all(variable, 0.95 - 0.1 - 0.2, name)?;
    }
    for (other, words) in [
        (
            AdamWConfig {
                state: StateForm::Blocks8,
                ..without_decay.clone()
            },
            "state: Blocks8, must stay F32",
        ),
        (
            AdamWConfig {
                master_weights: MasterWeights::Bf16,
                ..without_decay.clone()
            },
            "master_weights: Bf16, must stay F32",
        ),
        (
            AdamWConfig {
                memory: StateMemory::Host,
                ..without_decay.clone()
            },
            "memory: Host, must stay Device",
        ),
    ] {
        assert_eq!(message(optimizer.set_config(other)), words);
        assert_eq!(optimizer.config(), &without_decay);
    }
    Ok(())
}

fn train(parameters: &Parameters, optimizer: &mut AdamW, steps: usize) -> Result<()> {
    let decoder = Decoder::new(&config(true), parameters.var_builder())?;
    let (ids, mask) = left_padded()?;
    for _ in 0..steps {
        let mut gradients = Gradients::new();
        gradients.accumulate(&next_token_loss(&decoder, &ids, &mask)?, parameters)?;
        optimizer.step(parameters, &gradients)?;
    }
    Ok(())
}

#[rstest]
fn a_restored_state_continues_bit_identically(
    #[values(DType::F32, DType::F64)] dtype: DType,
) -> Result<()> {
    let config = config(true);
    let settings = by_hand(DecayRule::Matrices);
    let parameters = lively(&config)?.to_dtype(dtype)?;
    let mut optimizer = AdamW::new(settings.clone(), &parameters)?;
    train(&parameters, &mut optimizer, 2)?;

    let folder = tempfile::tempdir()?;
    let (weights, state) = (
        folder.path().join("model.safetensors"),
        folder.path().join("state.safetensors"),
    );
    parameters.save(&weights)?;
    candle_core::safetensors::save(&optimizer.state()?, &state)?;
    train(&parameters, &mut optimizer, 3)?;

    let again = Parameters::load(&config, &weights, device())?.to_dtype(dtype)?;
    again.set_values(&candle_core::safetensors::load(&weights, device())?)?;
    let mut continued = AdamW::new(settings.clone(), &again)?;
    continued.load_state(candle_core::safetensors::load(&state, device())?)?;
    assert_eq!(continued.steps(), 2);
    train(&again, &mut continued, 3)?;
    assert_eq!(continued.steps(), 5);
    assert_eq!(bits(&again)?, bits(&parameters)?);

    // Without the state, the run differs.
    let without = again.to_dtype(dtype)?;
    without.set_values(&candle_core::safetensors::load(&weights, device())?)?;
    train(&without, &mut AdamW::new(settings, &without)?, 3)?;
    assert_ne!(bits(&without)?, bits(&parameters)?);
    Ok(())
}

#[test]
fn a_loaded_state_is_a_copy() -> Result<()> {
    let parameters = ones()?;
    let mut first = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    first.step(&parameters, &constant(&parameters, 0.5)?)?;
    let mut second = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    second.load_state(first.state()?)?;
    second.step(&parameters, &constant(&parameters, 0.5)?)?;
    assert_all(&first.state()?["exp_avg.model.norm.weight"], 0.05, "first")?;
    assert_all(
        &second.state()?["exp_avg.model.norm.weight"],
        0.095,
        "second",
    )
}

#[rstest]
#[case::missing(|s: &mut HashMap<String, Tensor>| { s.remove("exp_avg.model.norm.weight"); }, "exp_avg.model.norm.weight")]
#[case::no_step(|s: &mut HashMap<String, Tensor>| { s.remove("step"); }, "\"step\"")]
#[case::surplus(|s: &mut HashMap<String, Tensor>| { s.insert("exp_avg.extra".into(), s["step"].clone()); }, "exp_avg.extra")]
#[case::shape(
    |s: &mut HashMap<String, Tensor>| { s.insert("exp_avg_sq.model.norm.weight".into(), s["exp_avg_sq.model.embed_tokens.weight"].clone()); },
    "exp_avg_sq.model.norm.weight: shape [13, 12], must be [12]"
)]
#[case::dtype(
    |s: &mut HashMap<String, Tensor>| { let t = s["exp_avg.model.norm.weight"].to_dtype(DType::U32).unwrap(); s.insert("exp_avg.model.norm.weight".into(), t); },
    "exp_avg.model.norm.weight: dtype U32"
)]
#[case::negative(
    |s: &mut HashMap<String, Tensor>| { s.insert("step".into(), Tensor::new(-1i64, device()).unwrap()); },
    "step: -1"
)]
fn a_state_that_does_not_fit_is_refused(
    #[case] spoil: fn(&mut HashMap<String, Tensor>),
    #[case] expected: &str,
) -> Result<()> {
    let parameters = ones()?;
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &parameters)?;
    optimizer.step(&parameters, &constant(&parameters, 0.5)?)?;
    let mut other = AdamW::new(by_hand(DecayRule::All), &parameters)?.state()?;
    spoil(&mut other);
    let message = message(optimizer.load_state(other));
    assert!(message.contains(expected), "{message}");
    // The previous state is unchanged.
    assert_eq!(optimizer.steps(), 1);
    assert_all(
        &optimizer.state()?["exp_avg.model.norm.weight"],
        0.05,
        "exp_avg",
    )
}

/// The gradient 0.5 is exact in both dtypes.
#[rstest]
fn gradients_of_another_dtype_are_converted(
    #[values(DType::F32, DType::F64)] variables: DType,
) -> Result<()> {
    let stepped = |dtype| {
        let parameters = ones()?.to_dtype(variables)?;
        let mut gradients = Gradients::new();
        for (name, variable) in parameters.iter() {
            gradients.add(
                name,
                &variable.ones_like()?.to_dtype(dtype)?.affine(0.5, 0.0)?,
            )?;
        }
        AdamW::new(by_hand(DecayRule::All), &parameters)?.step(&parameters, &gradients)?;
        bits(&parameters)
    };
    assert_eq!(stepped(DType::F64)?, stepped(DType::F32)?);
    Ok(())
}

#[test]
fn parameters_of_another_dtype_are_refused() -> Result<()> {
    let (narrow, wide) = (ones()?, ones()?.to_dtype(DType::F64)?);
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &wide)?;
    refused(
        &narrow,
        &mut optimizer,
        |o| o.step(&narrow, &constant(&narrow, 0.5)?),
        "dtype F32, must be F64",
    )?;
    let error = message(AdamW::new(in_blocks(), &wide));
    assert!(error.contains("state: 8bit, must be f32 for "), "{error}");
    Ok(())
}

/// Checks that a rejected step changes neither the parameters nor the optimizer.
fn refused(
    parameters: &Parameters,
    optimizer: &mut AdamW,
    step: impl FnOnce(&mut AdamW) -> Result<()>,
    expected: &str,
) -> Result<()> {
    let before = bits(parameters)?;
    let message = message(step(optimizer));
    assert!(message.contains(expected), "{message}");
    assert_eq!(bits(parameters)?, before);
    assert_eq!(optimizer.steps(), 0);
    for (name, tensor) in optimizer.state()? {
        if name != "step" {
            assert_all(&tensor, 0.0, &name)?;
        }
    }
    Ok(())
}

#[test]
fn a_step_with_bad_input_is_refused_and_changes_nothing() -> Result<()> {
    let parameters = ones()?;
    let good = constant(&parameters, 0.5)?;
    let mut optimizer = AdamW::new(by_hand(DecayRule::All), &parameters)?;

    refused(
        &parameters,
        &mut optimizer,
        |o| o.step(&parameters, &Gradients::new()),
        "gradients: none for 21 of 21",
    )?;

    // A tied model has no lm_head.
    let tied = lively(&config(true))?;
    let tied_gradients = constant(&tied, 0.5)?;
    let lacks = "gradients: none for 1 of 21 parameters, must have lm_head.weight";
    refused(
        &parameters,
        &mut optimizer,
        |o| o.step(&parameters, &tied_gradients),
        lacks,
    )?;
    refused(
        &parameters,
        &mut optimizer,
        |o| o.step(&tied, &good),
        "parameters: no lm_head.weight",
    )?;
    let mut tied_optimizer = AdamW::new(by_hand(DecayRule::All), &tied)?;
    refused(
        &tied,
        &mut tied_optimizer,
        |o| o.step(&tied, &good),
        "gradients: lm_head.weight",
    )?;
    refused(
        &tied,
        &mut tied_optimizer,
        |o| o.step(&parameters, &tied_gradients),
        "parameters: lm_head.weight",
    )?;

    // The last name in sorted order, so that checking along the way would already have changed the
    // others.
    let mut wider = config(false);
    wider.hidden_size = 14;
    let wide = lively(&wider)?;
    let wide_gradients = constant(&wide, 0.5)?;
    let shape = "gradient of lm_head.weight: [13, 14]";
    refused(
        &parameters,
        &mut optimizer,
        |o| o.step(&parameters, &wide_gradients),
        shape,
    )?;
    let shape = "parameter lm_head.weight: shape [13, 14], must be [13, 12]";
    refused(&parameters, &mut optimizer, |o| o.step(&wide, &good), shape)?;

    for bad in [f64::NAN, f64::INFINITY, -1e-3] {
        optimizer.set_learning_rate(bad);
        refused(
            &parameters,
            &mut optimizer,
            |o| o.step(&parameters, &good),
            "learning_rate:",
        )?;
    }
    optimizer.set_learning_rate(0.1);
    optimizer.step(&parameters, &good)
}

#[rstest]
#[case("learning_rate", |c: &mut AdamWConfig| c.learning_rate = -1.0)]
#[case("beta1", |c: &mut AdamWConfig| c.beta1 = 1.0)]
#[case("beta2", |c: &mut AdamWConfig| c.beta2 = f64::NAN)]
#[case("epsilon", |c: &mut AdamWConfig| c.epsilon = -1e-8)]
#[case("weight_decay", |c: &mut AdamWConfig| c.weight_decay = f64::INFINITY)]
fn options_out_of_range_are_refused_by_name(
    #[case] name: &str,
    #[case] spoil: fn(&mut AdamWConfig),
) -> Result<()> {
    let mut settings = AdamWConfig::default();
    spoil(&mut settings);
    let message = message(AdamW::new(settings, &ones()?));
    assert!(message.contains(&format!("{name}: ")), "{message}");
    Ok(())
}

#[test]
fn options_have_defaults_and_unknown_options_are_refused() {
    let settings: AdamWConfig =
        serde_json::from_str(r#"{"learning_rate": 2e-6, "decay": "all"}"#).unwrap();
    assert_eq!(
        settings,
        AdamWConfig {
            learning_rate: 2e-6,
            decay: DecayRule::All,
            ..AdamWConfig::default()
        }
    );
    let error = serde_json::from_str::<AdamWConfig>(r#"{"lr": 2e-6}"#).unwrap_err();
    assert!(error.to_string().contains("lr"), "{error}");
}

#[rstest]
fn a_scaled_step_equals_clipping_and_refreshing_after_it(
    #[values(DType::F32, DType::F64)] variables: DType,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let config = config(false);
    let run = |is_scaled: bool| -> Result<_> {
        let parameters = lively(&config)?.to_dtype(variables)?;
        let (vb, copies) = parameters.copied_var_builder(dtype)?;
        let decoder = Decoder::new(&config, vb)?;
        let mut optimizer = AdamW::new(by_hand(DecayRule::Matrices), &parameters)?;
        let mut gradients =
            exact_gradients(&parameters, |_, variable| variable.affine(0.37, 0.01))?;
        if is_scaled {
            let (_, factor) = gradients.clip_factor(0.5)?;
            optimizer.scaled_step(&parameters, &gradients, factor, &copies)?;
        } else {
            gradients.clip_by_global_norm(0.5)?;
            optimizer.step(&parameters, &gradients)?;
            copies.refresh()?;
        }
        let copy = decoder.output_weight().to_dtype(DType::F32)?;
        Ok((copy.to_vec2::<f32>()?, bits(&parameters)?))
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

/// A model whose embedding is in blocks, and whose norms are not.
fn wide() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 600,
        ..config(true)
    }
}

fn in_blocks() -> AdamWConfig {
    AdamWConfig {
        state: StateForm::Blocks8,
        ..by_hand(DecayRule::Matrices)
    }
}

/// Steps with gradients at several magnitudes.
fn step(parameters: &Parameters, optimizer: &mut AdamW, steps: std::ops::Range<u64>) -> Result<()> {
    for seed in steps {
        let mut gradients = Gradients::new();
        for (name, variable) in parameters.iter() {
            let seed = seed + name.len() as u64;
            let noise = noise_tensor(variable.shape(), seed, DType::F32, device())?;
            gradients.add(name, &(noise * 1e-3)?)?;
        }
        optimizer.step(parameters, &gradients)?;
    }
    Ok(())
}

#[test]
fn a_state_in_blocks_is_a_quarter_and_continues_bit_identically_from_a_file() -> Result<()> {
    let parameters = lively(&wide())?;
    let mut optimizer = AdamW::new(in_blocks(), &parameters)?;
    step(&parameters, &mut optimizer, 0..3)?;
    let state = optimizer.state()?;
    let embedding = "model.embed_tokens.weight";
    let elements = parameters.get(embedding).unwrap().elem_count();
    assert_eq!(
        state[&format!("exp_avg.{embedding}")].dims(),
        [elements.div_ceil(256), 260]
    );
    assert_eq!(state["exp_avg_sq.model.norm.weight"].dtype(), DType::F32);
    let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    let stored: usize = state.values().map(bytes).sum();
    let shapes = parameters.iter().map(|(_, variable)| variable.shape());
    let planned: usize = shapes
        .map(|shape| StateForm::Blocks8.num_bytes(shape))
        .sum();
    assert_eq!(stored, planned + 8);

    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state.safetensors");
    optimizer.save_state(&path)?;
    let again = parameters.copy_to(device())?;
    let mut continued = AdamW::new(in_blocks(), &again)?;
    continued.load_state(candle_core::safetensors::load(
        &path,
        &candle_core::Device::Cpu,
    )?)?;
    step(&parameters, &mut optimizer, 3..6)?;
    step(&again, &mut continued, 3..6)?;
    assert_eq!(bits(&again)?, bits(&parameters)?);
    Ok(())
}

/// The steps in both forms differ by a few percent of their length.
#[test]
fn steps_with_a_state_in_blocks_follow_those_in_f32() -> Result<()> {
    let [start, exact, blocks] = [lively(&wide())?, lively(&wide())?, lively(&wide())?];
    let plain = by_hand(DecayRule::Matrices);
    step(&exact, &mut AdamW::new(plain, &exact)?, 0..8)?;
    step(&blocks, &mut AdamW::new(in_blocks(), &blocks)?, 0..8)?;
    let embedding = "model.embed_tokens.weight";
    let [start, exact, blocks] = [start, exact, blocks]
        .map(|parameters| parameters.get(embedding).unwrap().as_detached_tensor());
    let norm = |tensor: Tensor| tensor.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    let ratio = norm((&blocks - &exact)?)? / norm((exact - start)?)?;
    assert!((1e-6..0.05).contains(&ratio), "{ratio}");
    Ok(())
}

#[test]
fn a_state_of_another_form_is_an_error() -> Result<()> {
    let parameters = lively(&wide())?;
    for (own, other, expected) in [
        (
            by_hand(DecayRule::All),
            in_blocks(),
            "8bit, must be f32 as optimizer.state",
        ),
        (
            in_blocks(),
            by_hand(DecayRule::All),
            "f32, must be 8bit as optimizer.state",
        ),
    ] {
        let state = AdamW::new(other, &parameters)?.state()?;
        let error = message(AdamW::new(own, &parameters)?.load_state(state));
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

fn in_bf16(state: StateForm) -> AdamWConfig {
    AdamWConfig {
        learning_rate: 1e-3,
        master_weights: MasterWeights::Bf16,
        state,
        ..by_hand(DecayRule::Matrices)
    }
}

/// Returns the mean error of the embedding in `found`, and its mean distance from `start`. Both are
/// relative to the mean distance between `expected` and `start`.
fn error_and_distance(
    found: &Parameters,
    expected: &Parameters,
    start: &Parameters,
) -> Result<[f64; 2]> {
    let embedding = |parameters: &Parameters| -> Result<Tensor> {
        let embedding = parameters.get("model.embed_tokens.weight").unwrap();
        embedding.to_dtype(DType::F64)
    };
    let (found, expected, start) = (embedding(found)?, embedding(expected)?, embedding(start)?);
    let mean = |difference: Tensor| difference.mean_all()?.to_scalar::<f64>();
    let way = mean((expected.clone() - &start)?.abs()?)?;
    let error = mean((&found - expected)?)?.abs();
    Ok([error / way, mean((found - start)?.abs()?)? / way])
}

/// Weights near 1 have neighbors at a distance of 0.4 to 0.8 %, and a step is 0.1 % long.
#[rstest]
#[case(StateForm::F32)]
#[case(StateForm::Blocks8)]
fn steps_of_bf16_weights_are_those_of_f32_on_average(#[case] state: StateForm) -> Result<()> {
    let [start, exact, half] = [(); 3].map(|()| ones_of(&wide()));
    let (start, exact, half) = (start?, exact?, half?.to_dtype(DType::BF16)?);
    let full = AdamWConfig {
        master_weights: MasterWeights::F32,
        ..in_bf16(StateForm::F32)
    };
    let decoder = Decoder::new(&wide(), half.detached_var_builder())?;
    let (mut exact_optimizer, mut optimizer) = (
        AdamW::new(full, &exact)?,
        AdamW::new(in_bf16(state), &half)?,
    );
    for _ in 0..10 {
        exact_optimizer.step(&exact, &constant(&exact, 0.5)?)?;
        optimizer.step(&half, &constant(&exact, 0.5)?)?;
    }
    let [error, moved] = error_and_distance(&half, &exact, &start)?;
    assert!(error < 0.02, "{error}");
    assert!((0.9..2.0).contains(&moved), "{moved}");
    // Parameters with equal values and gradients round apart.
    let layer = |name: &str| half.get(&format!("model.layers.0.mlp.{name}_proj.weight"));
    let [gate, up] = ["gate", "up"].map(|name| layer(name).unwrap().to_dtype(DType::F32));
    assert_ne!(gate?.to_vec2::<f32>()?, up?.to_vec2::<f32>()?);
    // The decoder computes in the variables themselves.
    let read = decoder
        .output_weight()
        .to_dtype(DType::F32)?
        .to_vec2::<f32>()?;
    let now = half.get("model.embed_tokens.weight").unwrap();
    assert_eq!(read, now.to_dtype(DType::F32)?.to_vec2::<f32>()?);
    Ok(())
}

#[test]
fn steps_of_bf16_weights_continue_bit_identically_from_a_file() -> Result<()> {
    let parameters = lively(&wide())?.to_dtype(DType::BF16)?;
    let mut optimizer = AdamW::new(in_bf16(StateForm::Blocks8), &parameters)?;
    step(&parameters, &mut optimizer, 0..3)?;
    let folder = tempfile::tempdir()?;
    let (weights, state) = (folder.path().join("weights"), folder.path().join("state"));
    parameters.save(&weights)?;
    optimizer.save_state(&state)?;

    let cpu = &candle_core::Device::Cpu;
    let again = Parameters::load(&wide(), &weights, device())?.to_dtype(DType::BF16)?;
    assert_eq!(bits(&again)?, bits(&parameters)?);
    let mut continued = AdamW::new(in_bf16(StateForm::Blocks8), &again)?;
    continued.load_state(candle_core::safetensors::load(&state, cpu)?)?;
    step(&parameters, &mut optimizer, 3..6)?;
    step(&again, &mut continued, 3..6)?;
    assert_eq!(bits(&again)?, bits(&parameters)?);
    // Another step draws other numbers.
    let mut late = AdamW::new(in_bf16(StateForm::Blocks8), &again)?;
    step(&again, &mut late, 3..6)?;
    assert_ne!(bits(&again)?, bits(&parameters)?);
    Ok(())
}

#[test]
fn bf16_weights_need_their_option() -> Result<()> {
    let parameters = lively(&wide())?.to_dtype(DType::BF16)?;
    let error = message(AdamW::new(by_hand(DecayRule::All), &parameters));
    let expected = "is BF16, must be F32 to train, F64, or BF16 with master_weights bf16";
    assert!(error.contains(expected), "{error}");
    Ok(())
}

/// Adds 0.5 to every gradient.
fn add_halves(gradients: &mut Gradients, parameters: &Parameters) -> Result<()> {
    for (name, variable) in parameters.iter() {
        gradients.add(name, &(variable.ones_like()? * 0.5)?)?;
    }
    Ok(())
}

#[test]
fn a_pass_whose_gradients_ranks_do_not_divide_as_those_before_is_refused() -> Result<()> {
    let errors = on_ranks(2, |collective| -> Result<_> {
        let parameters = ones()?;
        let options = by_hand(DecayRule::All);
        let sharding = Sharding::Resident;
        let mut optimizer = AdamW::sharded(options, &parameters, &collective, sharding)?;
        let mut gradients = Gradients::new();
        optimizer.begin_reduction(&mut gradients, &collective)?;
        add_halves(&mut gradients, &parameters)?;
        gradients.finish_reduction()?;
        add_halves(&mut gradients, &parameters)?;
        let clipped = message(gradients.clip_factor(1.));
        let stepped = message(optimizer.step(&parameters, &gradients));
        // The number of steps is that before.
        assert_eq!(optimizer.steps(), 0);
        Ok([clipped, stepped])
    });
    for error in errors.into_iter().collect::<Result<Vec<_>>>()?.concat() {
        assert!(
            error.contains("of one rank alone, must be summed"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn weights_that_were_divided_for_another_state_are_refused() {
    let errors = on_ranks(2, |collective| -> Result<_> {
        let divided = by_hand(DecayRule::All).divide(
            ones()?,
            DType::BF16,
            (&collective, Sharding::Resident),
        )?;
        // Whole blocks can have a state in f32.
        let blocks = in_blocks().divide(ones()?, DType::BF16, (&collective, Sharding::Resident))?;
        AdamW::new(by_hand(DecayRule::All), &blocks)?;
        Ok(message(AdamW::new(in_blocks(), &divided)))
    });
    for error in errors {
        let expected = "state: 8bit with master_weights f32, must be the options that the weights were divided with";
        assert_eq!(error.unwrap(), expected);
    }
}

#[test]
fn divided_weights_stay_as_they_are() {
    on_ranks(2, |collective| -> Result<()> {
        let options = by_hand(DecayRule::All);
        let divided = || options.divide(ones()?, DType::BF16, (&collective, Sharding::Resident));
        let again = options.divide(divided()?, DType::BF16, (&collective, Sharding::Resident))?;
        assert!(again.is_divided());
        let error =
            message(options.divide(divided()?, DType::F16, (&collective, Sharding::Resident)));
        assert_eq!(error, "weights: divided in BF16, must be in F16");
        let rounded = ones()?.to_dtype(DType::BF16)?;
        let error =
            message(options.divide(rounded, DType::BF16, (&collective, Sharding::Resident)));
        assert!(
            error.ends_with(": BF16, must be F32 to be divided"),
            "{error}"
        );
        let frozen = divided()?.frozen_as(&config(true), BaseWeights::Dense, DType::F32);
        let expected = "weights: divided between ranks, must be whole to be frozen";
        assert_eq!(message(frozen), expected);
        Ok(())
    })
    .into_iter()
    .collect::<Result<()>>()
    .unwrap();
}

/// A model that trains with its optimizer in host memory, or on the CPU.
struct Trained {
    parameters: Parameters,
    copies: ComputeCopies,
    optimizer: AdamW,
}

impl Trained {
    fn new(options: AdamWConfig, parameters: Parameters, dtype: DType) -> Result<Self> {
        let alone: Arc<dyn Collective> = Arc::new(Alone);
        let parameters = match options.master_weights {
            MasterWeights::F32 => options.divide(parameters, dtype, (&alone, Sharding::None))?,
            MasterWeights::Bf16 => parameters.to_dtype(DType::BF16)?,
        };
        let copies = match dtype {
            DType::F32 => ComputeCopies::default(),
            dtype => parameters.copied_var_builder(dtype)?.1,
        };
        Ok(Self {
            optimizer: AdamW::new(options, &parameters)?,
            copies,
            parameters,
        })
    }

    /// Makes steps with gradients at several magnitudes.
    fn step(&mut self, steps: Range<u64>) -> Result<()> {
        for seed in steps {
            let mut gradients = Gradients::new();
            for (name, variable) in self.parameters.iter() {
                let (shape, seed) = (variable.shape(), seed + name.len() as u64);
                let noise = noise_tensor(shape, seed, DType::F32, &Device::Cpu)? * 1e-3;
                gradients.add(name, &noise?.to_device(variable.device())?)?;
            }
            let (parameters, copies) = (&self.parameters, &self.copies);
            let optimizer = &mut self.optimizer;
            optimizer.scaled_step(parameters, &gradients, 0.5, copies)?;
        }
        Ok(())
    }

    /// The files of a checkpoint, and the weights in `dtype`.
    fn files(&self, dtype: DType) -> Result<[Vec<u8>; 3]> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        self.optimizer.save_state(&path("optimizer"))?;
        self.parameters.save(&path("weights"))?;
        let rounded = Export::new(&self.parameters).in_dtype(dtype);
        rounded.save(&path("rounded"))?;
        Ok([
            fs::read(path("optimizer"))?,
            fs::read(path("weights"))?,
            fs::read(path("rounded"))?,
        ])
    }

    /// Restores what [`Self::files`] returned.
    fn load(&mut self, [state, weights, _]: &[Vec<u8>; 3]) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        fs::write(path("optimizer"), state)?;
        fs::write(path("weights"), weights)?;
        self.optimizer.load_state_from(&path("optimizer"))?;
        self.parameters.set_values_from(&path("weights"), None)?;
        self.copies.refresh()
    }
}

/// In the dtype of the computation, and after a checkpoint of either.
#[rstest]
#[case::f32(DType::F32, MasterWeights::F32)]
#[case::bf16(DType::BF16, MasterWeights::F32)]
#[case::f16(DType::F16, MasterWeights::F32)]
#[case::rounded(DType::BF16, MasterWeights::Bf16)]
fn an_optimizer_in_host_memory_has_the_bits_of_the_cpu(
    #[case] dtype: DType,
    #[case] master_weights: MasterWeights,
    #[values(StateForm::F32, StateForm::Blocks8)] state: StateForm,
) -> Result<()> {
    let plain = AdamWConfig {
        master_weights,
        state,
        ..by_hand(DecayRule::Matrices)
    };
    let options = AdamWConfig {
        memory: StateMemory::Host,
        ..plain.clone()
    };
    let on_host = || Trained::new(options.clone(), lively(&wide())?, dtype);
    let on_cpu = || {
        Trained::new(
            plain.clone(),
            lively(&wide())?.copy_to(&Device::Cpu)?,
            dtype,
        )
    };
    let (mut host, mut cpu) = (on_host()?, on_cpu()?);
    assert!(host.files(dtype)? == cpu.files(dtype)?);
    host.step(0..2)?;
    cpu.step(0..2)?;
    let middle = cpu.files(dtype)?;
    assert!(host.files(dtype)? == middle);
    let on_gpu = host.parameters.iter().filter(|_| !device().is_cpu());
    for (name, variable) in on_gpu {
        let weight = cpu.parameters.get(name).unwrap();
        let expected = weight
            .to_dtype(dtype)?
            .to_dtype(DType::F32)?
            .flatten_all()?;
        let found = variable.to_dtype(DType::F32)?.flatten_all()?;
        assert_eq!(variable.dtype(), dtype, "{name}");
        assert!(variable.device().same_device(device()), "{name}");
        let exported = Export::new(&host.parameters).tensor(name)?;
        assert_eq!(exported.dtype(), weight.dtype(), "{name}");
        assert!(exported.device().same_device(device()), "{name}");
        assert_eq!(
            found.to_vec1::<f32>()?,
            expected.to_vec1::<f32>()?,
            "{name}"
        );
    }
    for (name, moment) in host.optimizer.state()? {
        assert!(moment.device().is_cpu(), "{name}");
    }
    let (mut host_again, mut cpu_again) = (on_host()?, on_cpu()?);
    host_again.load(&middle)?;
    cpu_again.load(&host.files(dtype)?)?;
    for trained in [&mut host, &mut cpu, &mut host_again, &mut cpu_again] {
        trained.step(2..4)?;
    }
    let last = cpu.files(dtype)?;
    assert!(last != middle);
    for trained in [&host, &host_again, &cpu_again] {
        assert!(trained.files(dtype)? == last);
    }
    Ok(())
}

#[test]
fn an_optimizer_in_host_memory_is_not_divided_alone() {
    let errors = on_ranks(2, |collective| -> Result<_> {
        let options = AdamWConfig {
            memory: StateMemory::Host,
            ..by_hand(DecayRule::All)
        };
        let sharding = Sharding::Optimizer;
        Ok(message(AdamW::sharded(
            options,
            &ones()?,
            &collective,
            sharding,
        )))
    });
    for error in errors {
        let expected = "sharding: optimizer, must be none, resident or full with memory: host";
        assert_eq!(error.unwrap(), expected);
    }
}

/// The random numbers of an element do not depend on the rank that has it.
#[test]
fn ranks_round_bf16_master_weights_as_one_rank() -> Result<()> {
    let options = AdamWConfig {
        master_weights: MasterWeights::Bf16,
        ..by_hand(DecayRule::All)
    };
    let start = || lively(&config(true))?.to_dtype(DType::BF16);
    let whole = start()?;
    let mut gradients = Gradients::new();
    add_halves(&mut gradients, &whole)?;
    add_halves(&mut gradients, &whole)?;
    AdamW::new(options.clone(), &whole)?.step(&whole, &gradients)?;
    let expected = bits(&whole.to_dtype(DType::F32)?)?;
    let ranks = on_ranks(2, |collective| -> Result<()> {
        let parameters = start()?;
        let sharding = Sharding::Optimizer;
        let mut optimizer = AdamW::sharded(options.clone(), &parameters, &collective, sharding)?;
        let mut gradients = Gradients::new();
        optimizer.begin_reduction(&mut gradients, &collective)?;
        add_halves(&mut gradients, &parameters)?;
        gradients.finish_reduction()?;
        optimizer.step(&parameters, &gradients)?;
        assert_eq!(bits(&parameters.to_dtype(DType::F32)?)?, expected);
        Ok(())
    });
    ranks.into_iter().collect()
}
