//! Weights in one file or several.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::Parameters;
use rstest::rstest;
use serde_json::{Value, json};

use candle_grpo_test_support::{device, message};

use crate::small::{bits, config, lively, lively_tensors};

const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];
const INDEX: &str = "model.safetensors.index.json";

/// Writes the tensors into two files with an index, which is returned.
fn write_shards(folder: &Path, tensors: HashMap<String, Tensor>) -> Result<Value> {
    let mut names: Vec<_> = tensors.keys().cloned().collect();
    names.sort();
    let (mut files, mut map) = ([HashMap::new(), HashMap::new()], HashMap::new());
    for (at, name) in names.into_iter().enumerate() {
        files[at % 2].insert(name.clone(), tensors[&name].clone());
        map.insert(name, SHARDS[at % 2]);
    }
    for (file, tensors) in SHARDS.iter().zip(&files) {
        candle_core::safetensors::save(tensors, folder.join(file))?;
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join(INDEX), index.to_string())?;
    Ok(index)
}

#[test]
fn shards_hold_the_same_weights_as_one_file() -> Result<()> {
    let config = config(false);
    let folder = tempfile::tempdir()?;
    write_shards(folder.path(), lively_tensors(&config)?)?;
    let read = Parameters::load_folder(&config, folder.path(), device())?;
    assert_eq!(bits(&read)?, bits(&lively(&config)?)?);
    // One file takes precedence over an index.
    read.save(&folder.path().join("model.safetensors"))?;
    for file in SHARDS {
        fs::remove_file(folder.path().join(file))?;
    }
    let again = Parameters::load_folder(&config, folder.path(), device())?;
    assert_eq!(bits(&again)?, bits(&read)?);
    Ok(())
}

#[rstest]
fn half_types_become_f32(#[values(DType::BF16, DType::F16)] dtype: DType) -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    let mut tensors = lively_tensors(&config)?;
    for tensor in tensors.values_mut() {
        *tensor = tensor.to_dtype(dtype)?;
    }
    write_shards(folder.path(), tensors.clone())?;
    let read = Parameters::load_folder(&config, folder.path(), device())?;
    let rounded = Parameters::from_tensors(&config, tensors, device())?;
    assert_eq!(bits(&read)?, bits(&rounded)?);
    assert!(
        read.iter()
            .all(|(_, variable)| variable.dtype() == DType::F32)
    );
    Ok(())
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused_by_name() -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    let index = write_shards(folder.path(), lively_tensors(&config)?)?;
    let refused = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut index = index.clone();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(folder.path().join(INDEX), index.to_string()).unwrap();
        message(Parameters::load_folder(&config, folder.path(), device()))
    };
    let norm = "model.norm.weight";
    let file = index["weight_map"][norm].as_str().unwrap();
    let extra = refused(&|map| drop(map.insert("model.extra".to_owned(), json!(file))));
    assert!(
        extra.contains(&format!("{file}: no model.extra")),
        "{extra}"
    );
    let unplaced = refused(&|map| drop(map.remove(norm)));
    assert!(unplaced.contains(&format!("{file}: {norm}")), "{unplaced}");
    let outside = refused(&|map| drop(map.insert(norm.to_owned(), json!("../other.safetensors"))));
    assert!(outside.contains(r#""../other.safetensors""#), "{outside}");
    fs::write(folder.path().join(INDEX), "{").unwrap();
    let torn = message(Parameters::load_folder(&config, folder.path(), device()));
    assert!(torn.contains(INDEX), "{torn}");
    Ok(())
}

#[test]
fn a_shard_that_is_absent_or_truncated_is_named() -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    write_shards(folder.path(), lively_tensors(&config)?)?;
    let path = folder.path().join(SHARDS[1]);
    let whole = fs::read(&path)?;
    fs::write(&path, &whole[..whole.len() - 1])?;
    let torn = message(Parameters::load_folder(&config, folder.path(), device()));
    assert!(torn.contains(SHARDS[1]), "{torn}");
    fs::remove_file(&path)?;
    let absent = message(Parameters::load_folder(&config, folder.path(), device()));
    assert!(absent.contains(SHARDS[1]), "{absent}");
    Ok(())
}

#[rstest]
fn a_weight_that_is_not_finite_is_named(
    #[values(f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300)] value: f64,
    #[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    let mut tensors = lively_tensors(&config)?;
    let mut values = vec![1f64; config.hidden_size];
    values[3] = value;
    let norm = Tensor::from_vec(values, config.hidden_size, device())?.to_dtype(dtype)?;
    tensors.insert("model.norm.weight".to_owned(), norm);
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors"))?;
    let message = message(Parameters::load_folder(&config, folder.path(), device()));
    assert!(
        message.contains("model.safetensors: tensor model.norm.weight: a NaN or an infinity"),
        "{message}"
    );
    Ok(())
}

#[test]
fn redundant_tensors_are_ignored() -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    let mut tensors = lively_tensors(&config)?;
    let expected = bits(&lively(&config)?)?;
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), embedding.clone());
    let frequencies = Tensor::new(&[1f32, 0.2, 0.05], device())?;
    let name = "model.layers.1.self_attn.rotary_emb.inv_freq";
    tensors.insert(name.to_owned(), frequencies);
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    let read = Parameters::load_folder(&config, folder.path(), device())?;
    assert_eq!(bits(&read)?, expected);
    assert_eq!(
        bits(&Parameters::load(&config, &path, device())?)?,
        expected
    );

    // A separate output layer is refused for a tied model, even if it differs in one number.
    for other in [
        embedding.narrow(0, 0, 12)?,
        embedding.to_dtype(DType::F16)?,
        (&embedding
            + embedding
                .zeros_like()?
                .slice_assign(&[4..5, 7..8], &Tensor::new(&[[1e-3f32]], device())?)?)?,
    ] {
        tensors.insert("lm_head.weight".to_owned(), other);
        candle_core::safetensors::save(&tensors, &path)?;
        let message = message(Parameters::load(&config, &path, device()));
        assert!(
            message.contains(
                "lm_head.weight: differs from model.embed_tokens.weight, must be equal or absent"
            ),
            "{message}"
        );
    }
    Ok(())
}

#[test]
fn a_separate_output_layer_is_kept() -> Result<()> {
    let config = config(false);
    let folder = tempfile::tempdir()?;
    let mut tensors = lively_tensors(&config)?;
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), embedding);
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors"))?;
    let read = Parameters::load_folder(&config, folder.path(), device())?;
    assert!(read.get("lm_head.weight").is_some());
    Ok(())
}
