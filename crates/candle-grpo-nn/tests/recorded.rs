//! The backward pass without a graph, against that of Candle's graph.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_nn::{Decoder, DecoderConfig, Gradients, Lora, LoraConfig, ModelType, Parameters};
use rstest::rstest;

mod small;
use small::{
    add_recorded, config, left_padded, lively, max_difference, message, next_token_loss,
    recorded_gradients,
};

fn model(model_type: ModelType, tied: bool) -> DecoderConfig {
    DecoderConfig {
        model_type,
        // The last block of SmolLM3 would not rotate.
        no_rope_layers: match model_type {
            ModelType::SmolLm3 => vec![1, 0],
            _ => vec![],
        },
        ..config(tied)
    }
}

fn by_graph(
    decoder: &Decoder,
    trained: &Parameters,
    (ids, mask): &(Tensor, Tensor),
) -> Result<Gradients> {
    let mut gradients = Gradients::new();
    gradients.accumulate(&next_token_loss(decoder, ids, mask)?, trained)?;
    Ok(gradients)
}

fn check(recorded: &Gradients, graph: &Gradients) -> Result<()> {
    assert_eq!(recorded.iter().count(), graph.iter().count());
    for (name, gradient) in graph.iter() {
        let own = recorded.get(name).expect("a gradient of that name");
        assert_eq!(own.dtype(), DType::F32);
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        let distance = max_difference(own, gradient)?;
        assert!(
            scale > 0.0 && distance < 1e-5 * scale.max(0.1),
            "{name}: {distance} of {scale}"
        );
    }
    Ok(())
}

#[rstest]
fn gradients_are_those_of_the_graph(
    #[values(
        ModelType::Llama,
        ModelType::Qwen2,
        ModelType::Qwen3,
        ModelType::SmolLm3
    )]
    model_type: ModelType,
    #[values(true, false)] tied: bool,
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let model = model(model_type, tied);
    let parameters = lively(&model)?;
    let batch = left_padded()?;
    let graph = by_graph(
        &Decoder::new(&model, parameters.var_builder())?,
        &parameters,
        &batch,
    )?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let recorded = recorded_gradients(&decoder, &parameters, &batch.0, &batch.1, checkpointing)?;
    check(&recorded, &graph)
}

#[rstest]
fn adapters_train_alone(#[values(true, false)] checkpointing: bool) -> Result<()> {
    let model = model(ModelType::Qwen2, true);
    let base = lively(&model)?;
    let lora = Lora::init(LoraConfig::all_linear(3, 5.0), &model, 1, &Device::Cpu)?;
    for (_, variable) in lora.parameters().iter() {
        // The second matrix begins as zero, where the first has no gradient.
        variable.set(&(variable.as_detached_tensor() + 0.03)?)?;
    }
    let batch = left_padded()?;
    let decoder = Decoder::new(&model, lora.var_builder(&base)?)?;
    let graph = by_graph(&decoder, lora.parameters(), &batch)?;
    let decoder = Decoder::new(&model, lora.detached_var_builder(&base)?)?;
    let recorded = recorded_gradients(
        &decoder,
        lora.parameters(),
        &batch.0,
        &batch.1,
        checkpointing,
    )?;
    check(&recorded, &graph)
}

#[test]
fn micro_batches_add_up() -> Result<()> {
    let model = model(ModelType::Qwen3, true);
    let parameters = lively(&model)?;
    let (ids, mask) = left_padded()?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let mut sum = Gradients::new();
    for _ in 0..3 {
        add_recorded(&decoder, &parameters, &ids, &mask, false, &mut sum)?;
    }
    let once = recorded_gradients(&decoder, &parameters, &ids, &mask, false)?;
    for (name, gradient) in once.iter() {
        let distance = max_difference(sum.get(name).expect("a gradient"), &(gradient * 3.0)?)?;
        assert!(distance < 1e-5, "{name}: {distance}");
    }
    Ok(())
}

#[test]
fn checkpointing_gives_the_same_bits() -> Result<()> {
    let model = model(ModelType::Llama, false);
    let parameters = lively(&model)?;
    let (ids, mask) = left_padded()?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let gradients =
        |checkpointing| recorded_gradients(&decoder, &parameters, &ids, &mask, checkpointing);
    let (kept, again) = (gradients(false)?, gradients(true)?);
    for (name, gradient) in kept.iter() {
        assert_eq!(
            max_difference(gradient, again.get(name).expect("a gradient"))?,
            0.0
        );
    }
    Ok(())
}

#[test]
fn packed_hidden_states_are_those_of_padded_sequences() -> Result<()> {
    let model = model(ModelType::Llama, true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let (ids, mask) = left_padded()?;
    let padded = decoder.hidden_states(&ids, &mask, None)?;
    let packed = Tensor::new(&[3u32, 1, 4, 5, 9, 2, 6, 7, 0, 8, 12, 11], &Device::Cpu)?;
    let packed = decoder.packed_hidden_states(&packed, &[3, 4, 5])?;
    let real = Tensor::cat(
        &[
            padded.get(0)?.narrow(0, 2, 3)?,
            padded.get(1)?.narrow(0, 1, 4)?,
            padded.get(2)?,
        ],
        0,
    )?;
    assert!(max_difference(&packed, &real)? < 1e-5);
    Ok(())
}

#[test]
fn what_trains_is_chosen_by_name() -> Result<()> {
    let model = config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let one = Parameters::from_tensors(&model, parameters.frozen_copy()?, &Device::Cpu)?;
    let ids = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    let (hidden, recorded) = decoder.record(&ids, &[3], false)?;
    let lora = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, &Device::Cpu)?;
    let mut gradients = Gradients::new();
    recorded.backward(&hidden.ones_like()?, lora.parameters(), &mut gradients)?;
    assert!(gradients.is_empty(), "the decoder has no adapters");
    let missing = message(gradients.ensure_complete(lora.parameters()));
    assert!(
        missing.contains("28 of 28 variables received no gradient"),
        "{missing}"
    );
    let (_, recorded) = decoder.record(&ids, &[3], false)?;
    recorded.backward(&hidden.ones_like()?, &one, &mut gradients)?;
    gradients.ensure_complete(&one)
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let model = config(true);
    let parameters = lively(&model)?;
    let tracked = Decoder::new(&model, parameters.var_builder())?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let ids = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    let tracked = message(tracked.record(&ids, &[3], false));
    assert!(
        tracked.contains("it must be one of detached_var_builder"),
        "{tracked}"
    );
    for (lengths, words) in [
        (
            &[2usize, 2][..],
            "its sum must be the number of input_ids, 3",
        ),
        (&[], "lengths is []"),
        (&[3, 0], "lengths[1] is 0"),
        (
            &[17],
            "lengths[0] is 17, it must be at least 1 and at most max_position_embeddings, which is 16",
        ),
    ] {
        let error = message(decoder.packed_hidden_states(&ids, lengths));
        assert!(error.contains(words), "{error}");
    }
    let error = message(decoder.packed_hidden_states(&ids.reshape((1, 3))?, &[3]));
    assert!(
        error.contains("input_ids has shape [1, 3], it must be [N]"),
        "{error}"
    );
    let error =
        message(decoder.packed_hidden_states(&Tensor::new(&[1u32, 13], &Device::Cpu)?, &[2]));
    assert!(
        error.contains("input_ids[1] is 13, it must be below vocab_size, which is 13"),
        "{error}"
    );

    let (hidden, recorded) = decoder.record(&ids, &[3], false)?;
    let mut gradients = Gradients::new();
    let error = message(recorded.backward(&hidden.narrow(0, 0, 2)?, &parameters, &mut gradients));
    assert!(
        error.contains("hidden_gradient has shape [2, 12]"),
        "{error}"
    );
    assert!(gradients.is_empty());
    let wrong = Var::zeros((2, 2), DType::F32, &Device::Cpu)?;
    gradients.add("model.norm.weight", &wrong)?;
    let (hidden, recorded) = decoder.record(&ids, &[3], false)?;
    let error = message(recorded.backward(&hidden, &parameters, &mut gradients));
    assert!(
        error.contains("gradient of model.norm.weight has shape [12]"),
        "{error}"
    );
    assert!(gradients.is_empty(), "what was added in part is forgotten");
    Ok(())
}
