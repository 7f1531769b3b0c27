//! The recorded backward pass, compared with Candle's graph.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_nn::optim::GradientDType;
use candle_grpo_nn::{
    ActivationCheckpointing, Decoder, DecoderConfig, Gradients, LanguageModel, Lora, LoraConfig,
    PackedTokens, Parameters,
};
use rstest::rstest;
use rstest_reuse::apply;

use candle_grpo_test_support::{device, message, noise_tensor};

use crate::small::{
    Family, add_recorded, config, each_family, left_padded, lively, max_difference,
    next_token_loss, recorded_gradients,
};

fn packed(sequences: &[&[u32]]) -> Result<PackedTokens> {
    let sequences: Vec<Vec<u32>> = sequences.iter().map(|tokens| tokens.to_vec()).collect();
    PackedTokens::new(&sequences, device())
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

/// Each gradient must be near that of one of the graphs.
fn check(recorded: &Gradients, graphs: &[&Gradients]) -> Result<()> {
    assert_eq!(recorded.iter().count(), graphs[0].iter().count());
    for (name, gradient) in graphs[0].iter() {
        let own = recorded.get(name).expect("a gradient of that name");
        assert_eq!(own.dtype(), DType::F32);
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        let mut distance = f64::INFINITY;
        for graph in graphs {
            let gradient = graph.get(name).expect("a gradient of that name");
            distance = distance.min(max_difference(own, gradient)?);
        }
        assert!(
            scale > 0.0 && distance < 1e-5 * scale.max(0.1),
            "{name}: {distance} of {scale}"
        );
    }
    Ok(())
}

#[apply(each_family)]
fn recorded_gradients_equal_those_of_the_graph(
    family: Family,
    #[values(true, false)] tied: bool,
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let model = family.config(tied);
    let parameters = lively(&model)?;
    let batch = left_padded()?;
    // Small heads have large derivatives, whose errors in f32 depend on the order of the sums.
    let [graph, exact] = [DType::F32, DType::F64].map(|dtype| {
        let decoder = Decoder::new(&model, parameters.var_builder().to_dtype(dtype))?;
        by_graph(&decoder, &parameters, &batch)
    });
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let recorded = recorded_gradients(&decoder, &parameters, &batch.0, &batch.1, checkpointing)?;
    check(&recorded, &[&graph?, &exact?])
}

/// A pass in one dtype may train variables in the other.
#[rstest]
fn gradients_are_summed_in_the_dtype_of_their_variables(
    #[values(DType::F32, DType::F64)] variables: DType,
    #[values(DType::F32, DType::F64)] pass: DType,
) -> Result<()> {
    let model = Family::LlamaWithBiases.config(true);
    let parameters = lively(&model)?.to_dtype(variables)?;
    let exact = parameters.to_dtype(DType::F64)?;
    let batch = left_padded()?;
    let graph = by_graph(&Decoder::new(&model, exact.var_builder())?, &exact, &batch)?;
    let vb = parameters.detached_var_builder().to_dtype(pass);
    let decoder = Decoder::new(&model, vb)?;
    let mut twice = Gradients::new();
    for _ in 0..2 {
        add_recorded(&decoder, &parameters, &batch.0, &batch.1, false, &mut twice)?;
    }
    let tolerance = match (variables, pass) {
        (DType::F64, DType::F64) => 1e-12,
        _ => 1e-5,
    };
    for (name, gradient) in graph.iter() {
        let sum = twice.get(name).expect("a gradient of that name");
        // The output layer has its own gradient's dtype.
        assert!(
            sum.dtype() == variables || name == decoder.output_name(),
            "{name}"
        );
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        let distance = max_difference(sum, &(gradient * 2.0)?)?;
        assert!(
            distance < tolerance * scale.max(0.1),
            "{name}: {distance} of {scale}"
        );
    }
    Ok(())
}

/// 12 tokens reach at most 24 of the first block's 40 experts.
#[test]
fn experts_without_tokens_have_gradients_of_zero() -> Result<()> {
    let model = DecoderConfig {
        num_experts: 40,
        ..Family::Qwen3Moe.config(true)
    };
    let parameters = lively(&model)?;
    let batch = left_padded()?;
    let decoder = Decoder::new(&model, parameters.var_builder())?;
    let graph = by_graph(&decoder, &parameters, &batch)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let recorded = recorded_gradients(&decoder, &parameters, &batch.0, &batch.1, false)?;
    assert_eq!(recorded.iter().count(), parameters.len());
    let mut unreached = 0;
    for (name, gradient) in graph.iter() {
        let own = recorded.get(name).expect("a gradient of that name");
        assert!(max_difference(own, gradient)? < 1e-6, "{name}");
        let largest = max_difference(own, &own.zeros_like()?)?;
        assert!(largest > 0.0 || name.contains(".experts."), "{name}");
        unreached += usize::from(largest == 0.0);
    }
    assert!(unreached >= 3 * 16, "{unreached}");
    Ok(())
}

#[rstest]
fn recorded_gradients_of_adapters_equal_those_of_the_graph(
    #[values(
        Family::LlamaWithBiases,
        Family::Gemma3,
        Family::Phi3,
        Family::Qwen3Moe
    )]
    family: Family,
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let model = family.config(true);
    let base = lively(&model)?;
    let lora = Lora::init(LoraConfig::all_linear(3, 5.0), &model, 1, device())?;
    for (_, variable) in lora.parameters().iter() {
        // The second matrix starts at zero, where the first has no gradient.
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
    check(&recorded, &[&graph])
}

#[test]
fn recorded_gradients_of_micro_batches_add_up() -> Result<()> {
    let model = Family::Qwen3.config(true);
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

/// Three equal micro-batches: each sum is rounded three times, to within 1/256 of itself.
#[rstest]
fn gradient_sums_in_bf16_are_near_those_in_f32(
    #[values(
        Family::Qwen3,
        Family::LlamaWithBiases,
        Family::Qwen3Moe,
        Family::Qwen3_5
    )]
    family: Family,
) -> Result<()> {
    let model = family.config(false);
    let parameters = lively(&model)?;
    let (ids, mask) = left_padded()?;
    let (vb, _copies) = parameters.copied_var_builder(DType::BF16)?;
    let decoder = Decoder::new(&model, vb)?;
    let sums = |dtype| {
        let mut sums = Gradients::with_dtype(dtype);
        for _ in 0..3 {
            add_recorded(&decoder, &parameters, &ids, &mask, false, &mut sums)?;
        }
        Ok::<_, candle_core::Error>(sums)
    };
    let (exact, rounded) = (sums(GradientDType::F32)?, sums(GradientDType::Bf16)?);
    assert_eq!(exact.iter().count(), rounded.iter().count());
    let mut differ = false;
    for ((name, exact), (_, rounded)) in exact.iter().zip(rounded.iter()) {
        // Weights of convolutions have three dimensions.
        let is_in_layers = name.starts_with("model.layers.") && exact.dims().len() == 2;
        let expected = if is_in_layers {
            DType::BF16
        } else {
            DType::F32
        };
        assert_eq!(rounded.dtype(), expected, "{name}");
        assert_eq!(exact.dtype(), DType::F32, "{name}");
        let largest = max_difference(exact, &exact.zeros_like()?)?;
        let distance = max_difference(&rounded.to_dtype(DType::F32)?, exact)?;
        assert!(
            distance <= largest / 128.0,
            "{name}: {distance} of {largest}"
        );
        differ |= distance > 0.0;
    }
    assert!(differ);
    Ok(())
}

/// With the inputs of the layers on their device, and in main memory.
#[rstest]
fn checkpointing_of_any_layers_gives_the_same_bits(
    #[values(false, true)] offloading: bool,
) -> Result<()> {
    let model = Family::Llama.config(false);
    let parameters = lively(&model)?;
    let (ids, mask) = left_padded()?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let decoder = decoder.with_activation_offloading(offloading);
    let gradients =
        |checkpointing| recorded_gradients(&decoder, &parameters, &ids, &mask, checkpointing);
    let kept = gradients(ActivationCheckpointing::All(false))?;
    for checkpointing in [
        ActivationCheckpointing::All(true),
        ActivationCheckpointing::Layers(1),
        ActivationCheckpointing::Layers(model.num_hidden_layers),
    ] {
        let again = gradients(checkpointing)?;
        for (name, gradient) in kept.iter() {
            let difference = max_difference(gradient, again.get(name).expect("a gradient"))?;
            assert_eq!(difference, 0.0, "{checkpointing}: {name}");
        }
    }
    Ok(())
}

#[test]
fn checkpointing_of_more_layers_than_there_are_is_an_error() -> Result<()> {
    let model = Family::Llama.config(false);
    let decoder = Decoder::new(&model, lively(&model)?.detached_var_builder())?;
    let layers = model.num_hidden_layers + 1;
    let error = decoder.with_activation_checkpointing(ActivationCheckpointing::Layers(layers));
    assert_eq!(
        message(error),
        format!(
            "activation_checkpointing: {layers}, must be true, false or at most {}, the number of layers of the model",
            model.num_hidden_layers
        )
    );
    Ok(())
}

#[test]
fn packed_hidden_states_are_those_of_padded_sequences() -> Result<()> {
    let model = Family::Llama.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let (ids, mask) = left_padded()?;
    let padded = decoder.padded_hidden_states(&ids, &mask)?;
    let packed = packed(&[&[3, 1, 4], &[5, 9, 2, 6], &[7, 0, 8, 12, 11]])?;
    let packed = decoder.hidden_states(&packed)?;
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
fn only_the_trained_parameters_receive_gradients() -> Result<()> {
    let model = config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let one = Parameters::from_tensors(&model, parameters.frozen_copy()?, device())?;
    let tokens = packed(&[&[1, 2, 3]])?;
    let (hidden, recorded) = decoder.record(&tokens)?;
    let lora = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, device())?;
    let mut gradients = Gradients::new();
    recorded.backward(&hidden.ones_like()?, lora.parameters(), &mut gradients)?;
    assert!(gradients.is_empty(), "the decoder has no adapters");
    let missing = message(gradients.ensure_complete(lora.parameters()));
    assert!(
        missing.contains("28 of 28 variables received no gradient"),
        "{missing}"
    );
    let (_, recorded) = decoder.record(&tokens)?;
    recorded.backward(&hidden.ones_like()?, &one, &mut gradients)?;
    gradients.ensure_complete(&one)
}

#[test]
fn wrong_input_is_refused_by_name_and_clears_the_gradients() -> Result<()> {
    let model = config(true);
    let parameters = lively(&model)?;
    let tracked = Decoder::new(&model, parameters.var_builder())?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let tokens = packed(&[&[1, 2, 3]])?;
    let tracked = message(tracked.record(&tokens));
    assert!(
        tracked.contains("must be built from detached_var_builder"),
        "{tracked}"
    );
    for (sequences, words) in [
        (&[][..], "sequences: none"),
        (&[&[1u32][..], &[]], "sequences[1]: no tokens"),
    ] {
        let error = message(packed(sequences));
        assert!(error.contains(words), "{error}");
    }
    let error = message(decoder.hidden_states(&packed(&[&[1], &[1; 17]])?));
    assert!(
        error.contains(
            "17 positions in sequence 1, must be at most max_position_embeddings, which is 16"
        ),
        "{error}"
    );
    // Ids are checked on the CPU only.
    if !device().is_cpu() {
        return Ok(());
    }
    let error = message(decoder.hidden_states(&packed(&[&[1, 13]])?));
    assert!(
        error.contains("tokens[1]: 13, must be below vocab_size, which is 13"),
        "{error}"
    );

    let (hidden, recorded) = decoder.record(&tokens)?;
    let mut gradients = Gradients::new();
    let error = message(recorded.backward(&hidden.narrow(0, 0, 2)?, &parameters, &mut gradients));
    assert!(error.contains("hidden_gradient: [2, 12]"), "{error}");
    assert!(gradients.is_empty());
    let wrong = Var::zeros((2, 2), DType::F32, device())?;
    gradients.add("model.norm.weight", &wrong)?;
    let (hidden, recorded) = decoder.record(&tokens)?;
    let error = message(recorded.backward(&hidden, &parameters, &mut gradients));
    assert!(
        error.contains("gradient of model.norm.weight: shape [12]"),
        "{error}"
    );
    assert!(gradients.is_empty(), "what was added in part is forgotten");
    Ok(())
}

/// A model made of Candle's own operations: the mean embedding of the tokens so far, through a
/// linear map.
struct Bag {
    embedding: Tensor,
    map: Tensor,
    /// Uses an operation that breaks the graph.
    cuts: bool,
}

impl LanguageModel for Bag {
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        let ids = tokens.right_padded()?;
        let (batch, width) = ids.dims2()?;
        let x = self
            .embedding
            .index_select(&ids.flatten_all()?, 0)?
            .reshape((batch, width, ()))?;
        let counts = Tensor::arange(1u32, width as u32 + 1, ids.device())?
            .to_dtype(DType::F32)?
            .reshape((1, width, 1))?;
        let means = x.cumsum(1)?.broadcast_div(&counts)?;
        let map = if self.cuts {
            self.map.detach()
        } else {
            self.map.clone()
        };
        tokens.rows_of(&means.broadcast_matmul(&map)?)
    }

    fn output_weight(&self) -> &Tensor {
        &self.embedding
    }

    fn output_name(&self) -> &str {
        "embedding"
    }
}

#[test]
fn models_of_candle_operations_train_by_their_graph() -> Result<()> {
    let noise = |rows: usize| noise_tensor((rows, 4), rows as u64, DType::F32, device());
    let variables = [("embedding", noise(9)?), ("map", noise(4)?)]
        .into_iter()
        .map(|(name, values)| Ok((name.to_owned(), Var::from_tensor(&values)?)))
        .collect::<Result<Vec<_>>>()?;
    let variables = Parameters::from_variables(variables, device())?;
    let get = |name: &str| variables.get(name).expect("a variable").as_tensor().clone();
    let model = |cuts| Bag {
        embedding: get("embedding"),
        map: get("map"),
        cuts,
    };
    let tokens = packed(&[&[1, 2, 3], &[4], &[5, 6]])?;
    let slope = noise(6)?;
    let run = |model: &Bag| -> Result<Gradients> {
        let (hidden, recorded) = model.record(&tokens)?;
        assert_eq!(hidden.dims(), [6, 4]);
        assert!(!hidden.track_op());
        let mut gradients = Gradients::new();
        // An output layer whose gradient is one everywhere.
        gradients.add("embedding", &get("embedding").ones_like()?)?;
        recorded.backward(&slope, &variables, &mut gradients)?;
        gradients.ensure_complete(&variables)?;
        Ok(gradients)
    };
    let gradients = run(&model(false))?;
    let value = |shift: f32, name: &str, at: (usize, usize)| -> Result<f64> {
        let mut moved = get(name).to_vec2::<f32>()?;
        moved[at.0][at.1] += shift;
        let mut model = model(false);
        let moved = Tensor::new(moved, device())?;
        match name {
            "map" => model.map = moved,
            _ => model.embedding = moved,
        }
        let sum = (model.hidden_states(&tokens)? * &slope)?.sum_all()?;
        Ok(f64::from(sum.to_scalar::<f32>()?))
    };
    for (name, at, from_output) in [
        ("map", (2, 3), 0.0),
        ("embedding", (4, 1), 1.0),
        ("embedding", (8, 1), 1.0),
    ] {
        let expected = (value(0.01, name, at)? - value(-0.01, name, at)?) / 0.02 + from_output;
        let found = gradients.get(name).expect("a gradient").to_vec2::<f32>()?[at.0][at.1];
        assert!(
            (f64::from(found) - expected).abs() < 1e-3,
            "{name}: {found}, expected {expected}"
        );
    }
    let whole = model(false);
    let (_, recorded) = whole.record(&tokens)?;
    let mut gradients = Gradients::new();
    gradients.add("map", &get("map"))?;
    let error = message(recorded.backward(&slope.narrow(0, 0, 5)?, &variables, &mut gradients));
    assert!(
        error.contains("hidden_gradient: [5, 4] of F32, must be [6, 4] of F32"),
        "{error}"
    );
    assert!(gradients.is_empty());
    let error = message(run(&model(true)));
    assert!(
        error.contains("1 of 2 variables received no gradient from the loss: map"),
        "{error}"
    );
    Ok(())
}
