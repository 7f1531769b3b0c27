use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Result, Tensor};
use candle_grpo_nn::{
    Gradients, ModelType, PackedTokens, Parameters, SequenceClassifier, SequenceClassifierConfig,
};
use candle_grpo_test_support::device;
use rstest::rstest;
use serde_json::{Value, json};

use crate::small::{config, max_difference};

fn classifier(num_labels: usize) -> SequenceClassifierConfig {
    SequenceClassifierConfig {
        decoder: config(false),
        num_labels,
        pad_token_id: Some(3),
    }
}

fn scores(
    config: &SequenceClassifierConfig,
    parameters: &Parameters,
    rows: &[Vec<u32>],
) -> Result<Tensor> {
    let tokens = PackedTokens::new(rows, parameters.device())?;
    SequenceClassifier::new(config, parameters.detached_var_builder())?.scores(&tokens)
}

/// Compares each case with its prefix that ends at the scored token.
#[rstest]
#[case::in_the_midst(&[1, 3, 2], 3)]
#[case::at_the_end(&[1, 2, 3, 3], 2)]
#[case::only_padding(&[3, 3], 1)]
fn the_last_token_that_is_not_padding_is_scored(
    #[case] row: &[u32],
    #[case] scored: usize,
) -> Result<()> {
    let padded = classifier(2);
    let parameters = padded.init(7, device())?;
    let unpadded = SequenceClassifierConfig {
        pad_token_id: None,
        ..padded.clone()
    };
    let rows = [vec![5, 6], row.to_vec()];
    let expected = [vec![5, 6], row[..scored].to_vec()];
    let expected = scores(&unpadded, &parameters, &expected)?;
    assert_eq!(expected.dims(), [2, 2]);
    let found = scores(&padded, &parameters, &rows)?;
    assert!(max_difference(&found, &expected)? < 1e-6);
    // Without a padding token the last token counts. Equal tokens have equal hidden states.
    let last = scores(&unpadded, &parameters, &rows)?;
    let is_same = scored == row.len() || row.iter().all(|&id| id == row[0]);
    assert_eq!(max_difference(&last, &expected)? < 1e-6, is_same);
    Ok(())
}

/// A transformers classifier uses the normed hidden states; only logits are scaled.
#[test]
fn the_scale_of_the_logits_has_no_effect() -> Result<()> {
    let mut granite = classifier(1);
    granite.decoder.model_type = ModelType::Granite;
    let parameters = granite.init(7, device())?;
    let plain = scores(&granite, &parameters, &[vec![1, 2]])?;
    granite.decoder.logits_scaling = 4.0;
    let scaled = scores(&granite, &parameters, &[vec![1, 2]])?;
    assert_eq!(max_difference(&plain, &scaled)?, 0.0);
    Ok(())
}

/// Writes `config` and `tensors` to a folder.
fn write(folder: &Path, config: &Value, tensors: &HashMap<String, Tensor>) -> Result<()> {
    std::fs::write(folder.join("config.json"), config.to_string())?;
    candle_core::safetensors::save(tensors, folder.join("model.safetensors"))
}

#[rstest]
fn a_folder_has_the_classifier_that_was_saved(#[values(true, false)] tied: bool) -> Result<()> {
    let mut saved = classifier(3);
    saved.decoder = config(tied);
    let parameters = saved.init(7, &Device::Cpu)?;
    let folder = tempfile::tempdir()?;
    let file = saved.to_hugging_face(&[2])?;
    assert_eq!(
        file["architectures"],
        json!(["LlamaForSequenceClassification"])
    );
    let mut tensors = parameters.frozen_copy()?;
    // Files of other programs may have an output layer.
    let output = Tensor::ones((13, 12), candle_core::DType::F32, &Device::Cpu)?;
    tensors.insert("lm_head.weight".to_owned(), output);
    write(folder.path(), &file, &tensors)?;
    let read = std::fs::read(folder.path().join("config.json"))?;
    let read = SequenceClassifierConfig::from_hugging_face(&read)?;
    assert_eq!(read, saved);
    read.check_folder(folder.path())?;
    let loaded = read.load_folder(folder.path(), &Device::Cpu)?;
    assert_eq!(loaded.len(), parameters.len());
    let rows = [vec![1, 2, 4]];
    let difference = max_difference(
        &scores(&read, &loaded, &rows)?,
        &scores(&saved, &parameters, &rows)?,
    )?;
    assert_eq!(difference, 0.0);
    Ok(())
}

#[test]
fn all_weights_receive_a_gradient() -> Result<()> {
    let config = classifier(1);
    let parameters = config.init(7, device())?;
    let model = SequenceClassifier::new(&config, parameters.var_builder())?;
    let tokens = PackedTokens::new(&[vec![1, 2, 5], vec![4, 6]], device())?;
    let mut gradients = Gradients::new();
    gradients.accumulate(&model.scores(&tokens)?.sum_all()?, &parameters)?;
    gradients.ensure_complete(&parameters)
}

#[rstest]
#[case(
    json!({"architectures": ["LlamaForCausalLM"]}),
    "architectures: [\"LlamaForCausalLM\"], must be [\"LlamaForSequenceClassification\"]"
)]
#[case(json!({"architectures": null}), "architectures: null, must be [\"Llama")]
#[case(json!({"model_type": "qwen2"}), "architectures: [\"LlamaForSequenceClassification\"], must be [\"Qwen2")]
#[case(json!({"id2label": {}}), "id2label: no labels, must have at least one")]
#[case(json!({"id2label": 3}), "id2label: 3, must be an object")]
#[case(json!({"id2label": null, "num_labels": -1}), "num_labels: -1, must be a whole number")]
#[case(json!({"pad_token_id": "a"}), "pad_token_id: \"a\", must be a token id")]
fn another_configuration_is_refused_by_its_key(#[case] extra: Value, #[case] words: &str) {
    let mut config = classifier(1).to_hugging_face(&[2]).unwrap();
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    let error = SequenceClassifierConfig::from_hugging_face(config.to_string().as_bytes());
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

#[rstest]
#[case(json!({"id2label": null}), 2, Some(3))]
#[case(json!({"id2label": null, "num_labels": 5}), 5, Some(3))]
#[case(json!({"pad_token_id": -1}), 1, None)]
#[case(json!({"pad_token_id": null}), 1, None)]
fn absent_keys_are_those_of_transformers(
    #[case] extra: Value,
    #[case] num_labels: usize,
    #[case] pad_token_id: Option<u32>,
) -> Result<()> {
    let mut config = classifier(1).to_hugging_face(&[2])?;
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    let read = SequenceClassifierConfig::from_hugging_face(config.to_string().as_bytes())?;
    assert_eq!(
        (read.num_labels, read.pad_token_id),
        (num_labels, pad_token_id)
    );
    Ok(())
}

#[rstest]
#[case::missing(None, "tensors: no score.weight, must have it, of shape [1, 12]")]
#[case::of_two_labels(Some((2, 12)), "tensor score.weight: shape [2, 12], must be [1, 12]")]
fn another_head_is_refused(
    #[case] score: Option<(usize, usize)>,
    #[case] words: &str,
) -> Result<()> {
    let config = classifier(1);
    let mut tensors = config.init(7, &Device::Cpu)?.frozen_copy()?;
    tensors.remove("score.weight");
    if let Some(shape) = score {
        let score = Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu)?;
        tensors.insert("score.weight".to_owned(), score);
    }
    let folder = tempfile::tempdir()?;
    write(folder.path(), &config.to_hugging_face(&[2])?, &tensors)?;
    let checked = config.check_folder(folder.path()).unwrap_err();
    let loaded = config.load_folder(folder.path(), &Device::Cpu);
    for error in [checked, loaded.unwrap_err()] {
        assert!(error.to_string().contains(words), "{error}");
    }
    Ok(())
}

#[test]
fn a_classifier_has_a_label() -> Result<()> {
    let config = classifier(0);
    let vb = classifier(1).init(7, device())?.detached_var_builder();
    let created = SequenceClassifier::new(&config, vb).map(drop);
    for error in [created, config.init(7, device()).map(drop)] {
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("num_labels: 0, must be at least 1"),
            "{error}"
        );
    }
    Ok(())
}
