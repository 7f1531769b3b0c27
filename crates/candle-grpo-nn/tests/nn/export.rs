//! Tests weights that are written tensor by tensor.

use std::fs;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_nn::{BaseWeights, Export, Lora, LoraConfig, Parameters};
use candle_grpo_test_support::{device, message, noise_tensor};
use rstest::rstest;

use crate::small::{config, lively, max_difference};

const NAME: &str = "model.layers.0.mlp.down_proj.weight";

fn adapters(rank: usize) -> Result<Lora> {
    let model = config(true);
    let lora = Lora::init(LoraConfig::all_linear(rank, 4.0), &model, 3, device())?;
    for (name, variable) in lora.parameters().iter() {
        variable.set(&noise_tensor(
            variable.shape(),
            name.len() as u64,
            DType::F32,
            device(),
        )?)?;
    }
    Ok(lora)
}

/// All tensors in a file, as stored.
fn read(path: &std::path::Path) -> Result<Vec<(String, Tensor)>> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu)?;
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(tensors)
}

#[rstest]
fn a_file_has_the_merged_weights_rounded_once(
    #[values(BaseWeights::Dense, BaseWeights::Q8_0)] form: BaseWeights,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let model = config(true);
    let base = lively(&model)?.frozen_as(&model, form, DType::BF16)?;
    let lora = adapters(3)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    lora.export(&base).in_dtype(dtype).save(&path)?;
    let merged = lora.merged(&model, &base)?;
    assert!(
        max_difference(
            merged.get(NAME).unwrap(),
            lively(&model)?.get(NAME).unwrap()
        )? > 0.1
    );
    let saved = read(&path)?;
    assert_eq!(saved.len(), merged.len());
    for ((name, weight), (expected, value)) in saved.iter().zip(merged.iter()) {
        assert_eq!((name.as_str(), weight.dtype()), (expected, dtype));
        let value = value.to_device(&Device::Cpu)?.to_dtype(dtype)?;
        let [weight, value] = [weight.to_dtype(DType::F32)?, value.to_dtype(DType::F32)?];
        assert_eq!(max_difference(&weight, &value)?, 0.0, "{name}");
    }
    Ok(())
}

#[test]
fn the_output_layer_of_a_tied_model_is_a_copy_of_the_embedding() -> Result<()> {
    let (tied, base) = (config(true), lively(&config(true))?);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let (untied, weights) = Export::new(&base).with_untied_output(&tied);
    assert_eq!(weights.len(), base.len() + 1);
    weights.save(&path)?;
    let read = Parameters::load(&untied, &path, device())?;
    let get = |name: &str| read.get(name).unwrap();
    let difference = max_difference(get("lm_head.weight"), get("model.embed_tokens.weight"))?;
    assert_eq!(difference, 0.0);
    let (same, unchanged) = Export::new(&read).with_untied_output(&untied);
    assert_eq!((same, unchanged.len()), (untied, read.len()));
    Ok(())
}

/// The previous file stays when a tensor in the middle cannot be written.
#[test]
fn a_number_beyond_f16_is_an_error_that_names_its_weight() -> Result<()> {
    let base = lively(&config(false))?;
    let weight = base.get(NAME).unwrap();
    weight.set(&(weight.ones_like()? * 7e4)?)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "before")?;
    let error = message(Export::new(&base).in_dtype(DType::F16).save(&path));
    assert!(error.contains(NAME) && error.contains("F16"), "{error}");
    assert_eq!(fs::read(&path)?, b"before");
    assert_eq!(fs::read_dir(folder.path())?.count(), 1);
    Ok(())
}

#[test]
fn adapters_of_another_base_are_an_error() -> Result<()> {
    let base = lively(&config(true))?;
    let wide = candle_grpo_nn::DecoderConfig {
        intermediate_size: 2 * config(true).intermediate_size,
        ..config(true)
    };
    let other = Lora::init(LoraConfig::all_linear(2, 4.0), &wide, 3, device())?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let error = message(other.export(&base).save(&path));
    assert!(error.contains("mlp."), "{error}");
    assert!(!path.exists());
    Ok(())
}
