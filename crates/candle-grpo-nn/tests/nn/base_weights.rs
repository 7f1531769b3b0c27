//! Frozen weights in quantized blocks, compared with their dequantized values.

use std::collections::HashMap;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{block_type, dequantize};
use candle_grpo_nn::{
    BaseWeights, Decoder, DecoderConfig, Gguf, GgufDType, Gradients, Lora, LoraConfig,
    PackedTokens, PagedCache, Parameters,
};
use candle_grpo_test_support::{device, message, noise_tensor};
use rstest::rstest;
use rstest_reuse::apply;

use crate::gguf::{file, statable, write};
use crate::small::{
    Family, each_family, left_padded, lively, max_difference, next_token_loss, recorded_gradients,
};

fn model(family: Family) -> DecoderConfig {
    wide(family.config(false))
}

/// Row length 64, and 256 in the down map.
pub(crate) fn wide(config: DecoderConfig) -> DecoderConfig {
    DecoderConfig {
        hidden_size: 64,
        intermediate_size: 256,
        moe_intermediate_size: match config.moe_intermediate_size {
            0 => 0,
            _ => 32,
        },
        head_dim: Some(32),
        query_pre_attn_scalar: config.query_pre_attn_scalar.map(|_| 32.0),
        linear_key_head_dim: config.linear_key_head_dim.map(|_| 16),
        linear_value_head_dim: config.linear_value_head_dim.map(|_| 8),
        ..config
    }
}

/// All weight values, in f32.
fn numbers(model: &DecoderConfig, base: &Parameters) -> Result<Parameters> {
    let numbers = base.iter().map(|(name, weight)| {
        let weight = match weight.dtype() {
            DType::U8 => dequantize(weight, DType::F32)?,
            _ => weight.to_dtype(DType::F32)?,
        };
        Ok((name.to_owned(), weight))
    });
    Parameters::from_tensors(model, numbers.collect::<Result<_>>()?, device())
}

/// Nonzero adapters for all maps.
pub(crate) fn adapters(model: &DecoderConfig) -> Result<Lora> {
    let lora = Lora::init(LoraConfig::all_linear(2, 4.0), model, 3, device())?;
    for (name, variable) in lora.parameters().iter() {
        if name.ends_with("lora_B.weight") {
            let noise = noise_tensor(variable.shape(), name.len() as u64, DType::F32, device())?;
            variable.set(&(noise * 0.3)?)?;
        }
    }
    Ok(lora)
}

/// Adapter gradients over `base`, without a graph.
fn recorded(
    model: &DecoderConfig,
    base: &Parameters,
    lora: &Lora,
    checkpointing: bool,
) -> Result<Gradients> {
    let (ids, mask) = left_padded()?;
    let decoder = Decoder::new(model, lora.detached_var_builder(base)?)?;
    recorded_gradients(&decoder, lora.parameters(), &ids, &mask, checkpointing)
}

fn assert_close(found: &Gradients, expected: &Gradients) -> Result<()> {
    let expected: HashMap<_, _> = expected.iter().collect();
    assert!(found.iter().count() == expected.len() && !expected.is_empty());
    for (name, gradient) in found.iter() {
        let difference = max_difference(gradient, expected[name])?;
        let largest = max_difference(gradient, &gradient.zeros_like()?)?;
        assert!(
            difference <= 1e-5 * largest,
            "{name}: {difference} of {largest}"
        );
    }
    Ok(())
}

#[apply(each_family)]
fn adapters_train_as_over_the_dequantized_numbers(
    family: Family,
    #[values(BaseWeights::Q4K, BaseWeights::Q8_0)] form: BaseWeights,
    #[values(false, true)] checkpointing: bool,
) -> Result<()> {
    let model = model(family);
    let base = lively(&model)?.frozen_as(&model, form, DType::F32)?;
    assert!(base.iter().any(|(_, weight)| weight.dtype() == DType::U8));
    let plain = numbers(&model, &base)?;
    let lora = adapters(&model)?;
    let (ids, mask) = left_padded()?;
    let gradients = |base: &Parameters| recorded(&model, base, &lora, checkpointing);
    let found = gradients(&base)?;
    assert_close(&found, &gradients(&plain)?)?;

    // A graph gives the same.
    let decoder = Decoder::new(&model, lora.var_builder(&base)?)?;
    let mut of_graph = Gradients::new();
    of_graph.accumulate(&next_token_loss(&decoder, &ids, &mask)?, lora.parameters())?;
    assert_eq!(of_graph.iter().count(), found.iter().count());
    for (name, gradient) in of_graph.iter() {
        let difference = max_difference(gradient, found.get(name).expect("a gradient"))?;
        assert!(difference < 1e-4, "{name}: {difference}");
    }
    Ok(())
}

#[apply(each_family)]
fn a_sampler_draws_from_the_dequantized_numbers(family: Family) -> Result<()> {
    let model = model(family);
    let lora = adapters(&model)?;
    for dtype in [DType::F32, DType::BF16] {
        let base = lively(&model)?.frozen_as(&model, BaseWeights::Q5_0, dtype)?;
        let plain = numbers(&model, &base)?.frozen_as(&model, BaseWeights::Dense, dtype)?;
        let logits = |base: &Parameters| -> Result<Tensor> {
            let (vb, _) = lora.copied_var_builder(base, dtype)?;
            let decoder = Decoder::new(&model, vb)?;
            let mut cache = PagedCache::new(&model, dtype, device())?;
            let sequence = cache.add();
            let first = decoder.next_logits(&[(sequence, &[3, 1, 4])], &mut cache)?;
            let second = decoder.next_logits(&[(sequence, &[9])], &mut cache)?;
            Tensor::cat(&[first, second], 0)
        };
        let (found, expected) = (logits(&base)?, logits(&plain)?);
        let difference = max_difference(&found, &expected)?;
        let largest = max_difference(&expected, &expected.zeros_like()?)?;
        // On a GPU, sums have another order.
        let tolerance = match dtype {
            _ if device().is_cpu() => 0.0,
            DType::F32 => 1e-5,
            _ => 3e-2,
        };
        assert!(
            difference <= tolerance * largest,
            "{difference} of {largest}"
        );
    }
    Ok(())
}

/// Large enough for several tiles.
#[test]
fn a_weight_in_tiles_is_a_whole_weight() -> Result<()> {
    let model = DecoderConfig {
        hidden_size: 256,
        intermediate_size: 24_320,
        ..model(Family::Llama)
    };
    let base = Parameters::init(&model, 1, device())?;
    let base = base.frozen_as(&model, BaseWeights::Q4_0, DType::F32)?;
    let plain = numbers(&model, &base)?;
    let lora = adapters(&model)?;
    let gradients = |base: &Parameters| recorded(&model, base, &lora, false);
    assert_close(&gradients(&base)?, &gradients(&plain)?)
}

#[rstest]
#[case(BaseWeights::Q4_0, GgmlDType::Q4_0, GgmlDType::Q4_0)]
#[case(BaseWeights::Q5_0, GgmlDType::Q5_0, GgmlDType::Q5_0)]
#[case(BaseWeights::Q8_0, GgmlDType::Q8_0, GgmlDType::Q8_0)]
#[case(BaseWeights::Q4K, GgmlDType::Q5_0, GgmlDType::Q4K)]
#[case(BaseWeights::Q5K, GgmlDType::Q5_1, GgmlDType::Q5K)]
#[case(BaseWeights::Q6K, GgmlDType::Q8_0, GgmlDType::Q6K)]
fn the_type_of_blocks_depends_on_the_rows(
    #[case] form: BaseWeights,
    #[case] of_64: GgmlDType,
    #[case] of_256: GgmlDType,
) -> Result<()> {
    let model = model(Family::Qwen3Moe);
    let elements = lively(&model)?.num_elements();
    let base = lively(&model)?.frozen_as(&model, form, DType::BF16)?;
    let weight = |name: &str| base.get(name).expect("a weight");
    for (name, expected) in [
        ("model.layers.1.self_attn.q_proj.weight", of_64),
        ("model.layers.1.mlp.down_proj.weight", of_256),
    ] {
        assert_eq!(block_type(weight(name))?, expected, "{name}");
    }
    for name in [
        "model.layers.0.mlp.gate.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
    ] {
        assert_eq!(weight(name).dtype(), DType::BF16, "{name}");
    }
    assert_eq!(base.num_elements(), elements);
    assert_eq!(base.dtype(), DType::BF16);
    let bytes = base.iter().map(|(_, weight)| match weight.dtype() {
        DType::U8 => weight.elem_count(),
        _ => 2 * weight.elem_count(),
    });
    assert_eq!(base.num_bytes(), bytes.sum::<usize>());
    // Blocks stay as they are.
    let again = base
        .clone()
        .frozen_as(&model, BaseWeights::Q4_0, DType::BF16)?;
    for (name, weight) in again.iter() {
        assert_eq!(
            weight.dims(),
            base.get(name).expect("a weight").dims(),
            "{name}"
        );
    }
    Ok(())
}

#[apply(each_family)]
fn blocks_of_a_gguf_file_are_kept(family: Family) -> Result<()> {
    // This family has no GGUF files.
    if family == Family::Qwen3_5 {
        return Ok(());
    }
    let model = wide(statable(family));
    let file = file();
    write(&file, &model, &lively(&model)?, GgufDType::Q8_0)?;
    let gguf = Gguf::open(file.path())?;
    let expected = gguf.parameters(device())?;
    let base = gguf.frozen_parameters(BaseWeights::Stored, DType::F32, device())?;
    let planned = gguf.frozen_bytes(BaseWeights::Stored, DType::F32)?;
    assert_eq!(planned, base.num_bytes());
    let mut kept = 0;
    for (name, weight) in base.iter() {
        let expected = expected.get(name).expect("a weight");
        let found = match weight.dtype() {
            DType::U8 => {
                kept += 1;
                assert_eq!(block_type(weight)?, GgmlDType::Q8_0, "{name}");
                dequantize(weight, DType::F32)?
            }
            _ => weight.as_tensor().clone(),
        };
        assert_eq!(max_difference(&found, expected)?, 0.0, "{name}");
    }
    assert!(kept >= 8, "{kept}");
    Ok(())
}

#[test]
fn weights_in_blocks_are_copied_merged_and_saved() -> Result<()> {
    let model = model(Family::Qwen3);
    let base = lively(&model)?.frozen_as(&model, BaseWeights::Q8_0, DType::BF16)?;
    let plain = numbers(&model, &base)?;
    let lora = adapters(&model)?;
    let same = |found: &Parameters, expected: &Parameters| -> Result<()> {
        for (name, weight) in expected.iter() {
            let found = found.get(name).expect("a weight");
            assert_eq!(max_difference(found, weight)?, 0.0, "{name}");
        }
        Ok(())
    };
    same(
        &numbers(&model, &base.copy_to(&Device::Cpu)?.copy_to(device())?)?,
        &plain,
    )?;
    same(&lora.merged(&model, &base)?, &lora.merged(&model, &plain)?)?;
    let folder = tempfile::tempdir()?;
    base.save(&folder.path().join("model.safetensors"))?;
    same(
        &Parameters::load_folder(&model, folder.path(), device())?,
        &plain,
    )
}

/// Maps without an adapter stay in blocks.
#[test]
fn adapters_are_merged_into_dense_copies_of_blocks() -> Result<()> {
    let model = model(Family::Qwen3);
    let base = lively(&model)?.frozen_as(&model, BaseWeights::Q8_0, DType::F32)?;
    let config = LoraConfig {
        target_modules: vec!["q_proj".to_owned(), "down_proj".to_owned()],
        ..LoraConfig::all_linear(2, 4.0)
    };
    let lora = Lora::init(config.clone(), &model, 3, device())?;
    for (name, matrix) in lora.parameters().iter() {
        let noise = noise_tensor(matrix.shape(), name.len() as u64, DType::F32, device())?;
        matrix.set(&(noise * 0.3)?)?;
    }
    let merged = lora.merged(&model, &base)?;
    let (vb, copies) = lora.merged_var_builder(&base, DType::F32)?;
    let mut bytes = 0;
    for (name, weight) in merged.iter() {
        let is_adapted = name.contains("q_proj") || name.contains("down_proj");
        match copies.get(name) {
            Some(copy) => {
                assert_eq!(max_difference(&copy, weight)?, 0.0, "{name}");
                bytes += 4 * copy.elem_count();
            }
            None => assert!(!is_adapted, "{name}"),
        }
        let is_block = vb.get_unchecked(name)?.dtype() == DType::U8;
        let was_block = base.get(name).expect("a weight").dtype() == DType::U8;
        assert_eq!(is_block, was_block && !is_adapted, "{name}");
    }
    let planned = model.merged_bytes(&config, (BaseWeights::Q8_0, DType::F32), DType::F32)?;
    assert_eq!(planned.copies, bytes);
    // The query map has 4 heads of 32 for a row length of 64.
    assert_eq!(planned.merging, 4 * 64 * 256);

    let (ids, mask) = left_padded()?;
    let states = |vb| Decoder::new(&model, vb)?.padded_hidden_states(&ids, &mask);
    let difference = max_difference(&states(vb)?, &states(lora.detached_var_builder(&base)?)?)?;
    assert!(difference < 1e-4, "{difference}");
    Ok(())
}

#[test]
fn blocks_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let model = model(Family::Llama);
    let base = lively(&model)?.frozen_as(&model, BaseWeights::Q8_0, DType::F32)?;
    let wider = DecoderConfig {
        intermediate_size: 288,
        ..model.clone()
    };
    let error = message(Decoder::new(&wider, base.detached_var_builder()).map(|_| ()));
    let name = "model.layers.0.mlp.gate_proj.weight: shape [256, 2, 34], must be [288, 64]";
    assert!(error.contains(name), "{error}");
    let error = message(lively(&model)?.frozen_as(&model, BaseWeights::Q8_0, DType::F64));
    assert!(
        error.contains("dtype: F64, must be F32, BF16 or F16"),
        "{error}"
    );
    // Without adapters there is nothing to train.
    let decoder = Decoder::new(&model, base.detached_var_builder())?;
    let (hidden, recorded) = {
        use candle_grpo_nn::LanguageModel;
        decoder.record(&PackedTokens::new(&[vec![1, 2]], device())?)?
    };
    let mut gradients = Gradients::new();
    recorded.backward(&hidden, &Parameters::empty(), &mut gradients)?;
    assert_eq!(gradients.iter().count(), 0);
    Ok(())
}
