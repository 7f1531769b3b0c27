//! Checkpoints with more parts than a text model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::{CheckpointForm, DecoderConfig, Export, Parameters};
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use candle_grpo_test_support::{device, message};

use crate::small::{Family, bits, lively, lively_tensors};

const MODEL: &str = "model.safetensors";
const SHARDS: [&str; 2] = ["model-00001.safetensors", "model-00002.safetensors"];

/// Checkpoint forms on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Two files and a nested configuration, as published.
    Multimodal,
    /// A checkpoint with vision names, next to a text model's configuration.
    TextConfig,
    /// Text model names, and tensors for multi-token prediction.
    TextNames,
}

fn model() -> DecoderConfig {
    Family::Qwen3_5.config(false)
}

/// Tensors that the text model does not use, in several dtypes.
fn others() -> Result<Vec<(String, Tensor)>> {
    let wave = |count: u32| {
        Tensor::arange(0u32, count, device())?
            .to_dtype(DType::F32)?
            .sin()
    };
    Ok([
        (
            "model.visual.patch_embed.weight",
            wave(24)?.reshape((4, 6))?.to_dtype(DType::BF16)?,
        ),
        (
            "model.visual.blocks.0.scale",
            wave(5)?.to_dtype(DType::F16)?,
        ),
        (
            "model.visual.positions",
            Tensor::new(&[3u8, 1, 4], device())?,
        ),
        ("mtp.fc.weight", wave(8)?.reshape((2, 4))?),
        (
            "mtp.layers.0.mlp.up_proj.weight",
            wave(6)?.reshape((3, 2))?.to_dtype(DType::BF16)?,
        ),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .into())
}

/// `config.json` as published, with keys that only a vision model reads.
fn config(form: Form) -> Result<Value> {
    let mut text = model().to_hugging_face(&[2])?;
    text["dtype"] = json!("bfloat16");
    text["rope_parameters"] =
        json!({"mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 100.0});
    Ok(match form {
        Form::Multimodal => json!({
            "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 7, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "text_config": text, "vision_config": {"depth": 1, "dtype": "bfloat16"},
        }),
        Form::TextConfig | Form::TextNames => text,
    })
}

/// Writes a checkpoint, and returns its text model's tensor names.
fn write(form: Form, folder: &Path) -> Result<BTreeSet<String>> {
    let text = lively_tensors(&model())?.into_iter().map(|(name, tensor)| {
        match name.strip_prefix("model.") {
            Some(rest) if form != Form::TextNames => {
                (format!("model.language_model.{rest}"), tensor)
            }
            _ => (name, tensor),
        }
    });
    let text: Vec<_> = text.collect();
    let names = text.iter().map(|(name, _)| name.clone()).collect();
    let all = text.into_iter().chain(others()?);
    let mut files: [BTreeMap<String, Tensor>; 2] = Default::default();
    for (at, (name, tensor)) in all.enumerate() {
        files[if form == Form::Multimodal { at % 2 } else { 0 }].insert(name, tensor);
    }
    let save = |tensors: &BTreeMap<String, Tensor>, name: &str| {
        let tensors: Vec<_> = tensors.iter().collect();
        safetensors::serialize_to_file(tensors, None, &folder.join(name)).unwrap();
    };
    if form == Form::Multimodal {
        let mut map = json!({});
        for (tensors, name) in files.iter().zip(SHARDS) {
            save(tensors, name);
            tensors.keys().for_each(|tensor| map[tensor] = json!(name));
        }
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(
            folder.join("model.safetensors.index.json"),
            index.to_string(),
        )?;
    } else {
        save(&files[0], MODEL);
    }
    fs::write(folder.join("config.json"), config(form)?.to_string())?;
    fs::write(
        folder.join("preprocessor_config.json"),
        r#"{"patch_size": 14}"#,
    )?;
    Ok(names)
}

fn read(folder: &Path) -> Result<(Parameters, CheckpointForm)> {
    let config = DecoderConfig::from_hugging_face(&fs::read(folder.join("config.json"))?)?;
    assert_eq!(
        config,
        DecoderConfig {
            head_dim: Some(6),
            ..model()
        }
    );
    let form = CheckpointForm::read(&config, folder)?.expect("other parts");
    Ok((Parameters::load_folder(&config, folder, device())?, form))
}

/// Writes a folder with everything.
fn save(parameters: &Parameters, form: &CheckpointForm, folder: &Path) -> Result<()> {
    form.save(&Export::new(parameters), &folder.join(MODEL))?;
    form.write_files(folder)?;
    let config = serde_json::to_vec(&form.config(&model())?).unwrap();
    Ok(fs::write(folder.join("config.json"), config)?)
}

#[rstest]
fn other_parts_are_saved_as_they_were_read(
    #[values(Form::Multimodal, Form::TextConfig, Form::TextNames)] form: Form,
) -> Result<()> {
    let source = tempfile::tempdir()?;
    let mut names = write(form, source.path())?;
    let (parameters, read_form) = read(source.path())?;
    assert_eq!(bits(&parameters)?, bits(&lively(&model())?)?);
    // The files are open, so their folder may be moved.
    #[cfg(unix)]
    source.close()?;
    let [first, second] = [tempfile::tempdir()?, tempfile::tempdir()?];
    save(&parameters, &read_form, first.path())?;

    let bytes = fs::read(first.path().join(MODEL))?;
    let saved = SafeTensors::deserialize(&bytes).unwrap();
    for (name, tensor) in others()? {
        let found = saved.tensor(&name).unwrap();
        let expected = safetensors::View::data(&tensor).into_owned();
        assert_eq!(found.data(), expected, "{name}");
        assert_eq!(found.dtype(), safetensors::View::dtype(&tensor), "{name}");
        assert_eq!(found.shape(), tensor.dims(), "{name}");
        names.insert(name);
    }
    assert_eq!(
        saved
            .names()
            .into_iter()
            .map(str::to_owned)
            .collect::<BTreeSet<_>>(),
        names
    );

    let mut expected = config(form)?;
    let text = if form == Form::Multimodal {
        &mut expected["text_config"]
    } else {
        &mut expected
    };
    text["dtype"] = json!("float32");
    text["torch_dtype"] = json!("float32");
    expected["torch_dtype"] = json!("float32");
    let saved: Value =
        serde_json::from_slice(&fs::read(first.path().join("config.json"))?).unwrap();
    assert_eq!(saved, expected);

    let (again, read_form) = read(first.path())?;
    assert_eq!(bits(&again)?, bits(&parameters)?);
    save(&again, &read_form, second.path())?;
    for file in [MODEL, "config.json", "preprocessor_config.json"] {
        let [first, second] = [&first, &second].map(|folder| fs::read(folder.path().join(file)));
        assert!(first? == second?, "{file}");
    }
    Ok(())
}

#[test]
fn an_engine_receives_the_text_model_alone() -> Result<()> {
    let source = tempfile::tempdir()?;
    let names = write(Form::Multimodal, source.path())?;
    let (parameters, form) = read(source.path())?;
    let path = source.path().join("text.safetensors");
    form.save_text(&Export::new(&parameters), &path)?;
    let saved = candle_core::safetensors::load(&path, device())?;
    assert_eq!(saved.into_keys().collect::<BTreeSet<_>>(), names);
    Ok(())
}

#[test]
fn a_source_that_changed_is_named_and_nothing_is_written() -> Result<()> {
    let source = tempfile::tempdir()?;
    write(Form::TextConfig, source.path())?;
    let (parameters, form) = read(source.path())?;
    let file = source.path().join(MODEL);
    let mut bytes = fs::read(&file)?;
    bytes.extend([0; 8]);
    fs::write(&file, bytes)?;
    let out = tempfile::tempdir()?;
    let error = message(form.save(&Export::new(&parameters), &out.path().join(MODEL)));
    let words = format!("{}: has changed since it was opened", file.display());
    assert!(error.contains(&words), "{error}");
    assert_eq!(fs::read_dir(out.path())?.count(), 0);
    Ok(())
}

#[test]
fn a_text_model_alone_has_no_form() -> Result<()> {
    for family in [Family::Qwen3_5, Family::Llama] {
        let (folder, config) = (tempfile::tempdir()?, family.config(true));
        lively(&config)?.save(&folder.path().join(MODEL))?;
        let text = config.to_hugging_face(&[2])?.to_string();
        fs::write(folder.path().join("config.json"), text)?;
        assert!(CheckpointForm::read(&config, folder.path())?.is_none());
    }
    Ok(())
}

#[test]
fn another_model_than_the_checkpoints_is_refused() -> Result<()> {
    let source = tempfile::tempdir()?;
    write(Form::Multimodal, source.path())?;
    let (_, form) = read(source.path())?;
    let other = DecoderConfig {
        max_position_embeddings: 17,
        ..model()
    };
    let error = message(form.config(&other));
    assert!(error.contains("must be that of the checkpoint"), "{error}");
    Ok(())
}
