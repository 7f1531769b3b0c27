//! Rewards from a model.

use std::fs;
use std::path::Path;

use candle_grpo_nn::{DecoderConfig, PackedTokens, SequenceClassifier, SequenceClassifierConfig};
use candle_grpo_test_support::device;
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::rewards::{RewardModel, RewardModelConfig, Score};
use candle_grpo_train::{
    ComputeDType, FinishReason, Interrupted, Progress, RewardConfig, RewardFunction, Sample,
};
use rstest::rstest;
use serde_json::{Value, json};
use std::sync::Arc;
use tempfile::TempDir;

use crate::common::model;

const ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz <>:!";
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}!{% endfor %}";

fn config(num_labels: usize) -> SequenceClassifierConfig {
    SequenceClassifierConfig {
        decoder: DecoderConfig {
            vocab_size: ALPHABET.len() + 1,
            max_position_embeddings: 64,
            ..model()
        },
        num_labels,
        pad_token_id: Some(0),
    }
}

/// Writes a model, with a chat template if it is given.
fn write(folder: &Path, config: &SequenceClassifierConfig, template: Option<&str>, seed: u64) {
    let parameters = config.init(seed, device()).unwrap();
    for (_, weight) in parameters.iter() {
        if weight.rank() > 1 {
            weight.set(&(weight.as_tensor() * 10.).unwrap()).unwrap();
        }
    }
    parameters.save(&folder.join("model.safetensors")).unwrap();
    let keys = config.to_hugging_face(&[]).unwrap();
    fs::write(folder.join("config.json"), keys.to_string()).unwrap();
    let tokenizer = character_tokenizer(ALPHABET).unwrap();
    tokenizer
        .save(folder.join("tokenizer.json"), false)
        .unwrap();
    if let Some(template) = template {
        let file = json!({"chat_template": template});
        fs::write(folder.join("tokenizer_config.json"), file.to_string()).unwrap();
    }
}

fn folder(num_labels: usize, template: Option<&str>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config(num_labels), template, 3);
    folder
}

fn values(scores: anyhow::Result<Vec<Score>>) -> Vec<f32> {
    let scores = scores.unwrap().into_iter();
    scores.map(|score| score.value().unwrap()).collect()
}

/// The scores `[labels]` of `text`, read alone.
fn expected(folder: &Path, text: &str) -> Vec<f32> {
    let keys = fs::read(folder.join("config.json")).unwrap();
    let config = SequenceClassifierConfig::from_hugging_face(&keys).unwrap();
    let parameters = config.load_folder(folder, device()).unwrap();
    let classifier = SequenceClassifier::new(&config, parameters.detached_var_builder()).unwrap();
    let tokenizer = character_tokenizer(ALPHABET).unwrap();
    let tokens = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let tokens = PackedTokens::new(&[tokens], device()).unwrap();
    let scores = classifier.scores(&tokens).unwrap();
    scores.flatten_all().unwrap().to_vec1().unwrap()
}

fn sample<'a>(prompt: &'a str, messages: &'a [Value], completion: &'a str) -> Sample<'a> {
    Sample {
        prompt,
        messages,
        completion,
        prompt_tokens: &[1],
        completion_tokens: &[2],
        finish_reason: FinishReason::StopToken,
        columns: &Value::Null,
        group: 0,
    }
}

fn assert_near(found: f32, expected: f32) {
    assert!(
        (found - expected).abs() < 1e-4,
        "{found}, must be {expected}"
    );
}

#[rstest]
fn a_conversation_is_rendered_by_the_template_of_the_reward_model(
    #[values(1, 40, 16_384)] batch_tokens: usize,
) {
    let folder = folder(1, Some(TEMPLATE));
    let path = folder.path();
    let reward = RewardModel::load(
        RewardModelConfig {
            batch_tokens,
            ..RewardModelConfig::new(path)
        },
        device(),
    );
    let reward = reward.unwrap();
    let question = [json!({"role": "user", "content": "add"})];
    let begun = [
        json!({"role": "user", "content": "add"}),
        json!({"role": "assistant", "content": "so "}),
    ];
    let samples = [
        sample("of another template", &question, "five"),
        sample("plain text ", &[], "more"),
        sample("of another template", &begun, "six"),
        sample("of another template", &question, "a much longer answer"),
    ];
    let scores = values(reward.score(&samples));
    let texts = [
        "<user>add!<assistant>five!",
        "plain text more",
        "<user>add!<assistant>so six!",
        "<user>add!<assistant>a much longer answer!",
    ];
    for (score, text) in scores.iter().zip(texts) {
        assert_near(*score, expected(path, text)[0]);
    }
    assert!(
        scores
            .windows(2)
            .all(|pair| (pair[0] - pair[1]).abs() > 1e-3),
        "{scores:?}"
    );
    assert!(reward.score(&[]).unwrap().is_empty());
}

#[test]
fn without_a_template_the_completion_follows_the_prompt() {
    let folder = folder(1, None);
    let reward = RewardModel::load(RewardModelConfig::new(folder.path()), device()).unwrap();
    let question = [json!({"role": "user", "content": "add"})];
    let scores = values(reward.score(&[sample("add:", &question, "five")]));
    assert_near(scores[0], expected(folder.path(), "add:five")[0]);
}

#[test]
fn the_end_of_a_long_text_is_read() {
    let folder = folder(1, None);
    let long = "abcdefghij".repeat(9);
    let of_last = |count: usize| expected(folder.path(), &long[long.len() - count..])[0];
    for (max_length, count) in [(None, 64), (Some(7), 7), (Some(999), 64)] {
        let config = RewardModelConfig {
            max_length,
            ..RewardModelConfig::new(folder.path())
        };
        let reward = RewardModel::load(config, device()).unwrap();
        let scores = values(reward.score(&[sample("", &[], &long)]));
        assert_near(scores[0], of_last(count));
    }
}

#[test]
fn a_label_selects_the_score() {
    let folder = folder(3, None);
    let all = expected(folder.path(), "abc");
    let load = |label| {
        RewardModel::load(
            RewardModelConfig {
                label,
                ..RewardModelConfig::new(folder.path())
            },
            device(),
        )
    };
    for (label, expected) in all.iter().enumerate() {
        let scores = values(load(Some(label)).unwrap().score(&[sample("a", &[], "bc")]));
        assert_near(scores[0], *expected);
    }
    for (label, message) in [
        (
            None,
            "label: absent, must be given for a model with 3 labels",
        ),
        (Some(3), "label: 3, must be below 3, the number of labels"),
    ] {
        let error = format!("{:#}", load(label).err().unwrap());
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn half_precision_is_near_full_precision() {
    let folder = folder(1, None);
    let config = RewardModelConfig {
        dtype: ComputeDType::Bf16,
        ..RewardModelConfig::new(folder.path())
    };
    let scores = RewardModel::load(config, device())
        .unwrap()
        .score(&[sample("a", &[], "bc")])
        .unwrap();
    let expected = expected(folder.path(), "abc")[0];
    let difference = (scores[0].value().unwrap() - expected).abs();
    assert!(
        difference > 0. && difference < 0.1 * expected.abs().max(1.),
        "{difference}"
    );
}

#[test]
fn an_ensemble_combines_several_reward_models() {
    let [a, b] = [1, 2].map(|seed| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config(1), None, seed);
        folder
    });
    let [of_a, of_b] = [&a, &b].map(|folder| expected(folder.path(), "abc")[0]);
    assert!((of_a - of_b).abs() > 1e-2);
    let judges = [&a, &b].map(|folder| json!({"kind": "reward_model", "path": folder.path()}));
    let combined = |combine: Value| {
        let rewards = json!([{"kind": "ensemble", "judges": judges, "combine": combine}]);
        let rewards: Vec<RewardConfig> = serde_json::from_value(rewards).unwrap();
        rewards[0].check_files().unwrap();
        assert_eq!(rewards[0].files().len(), 6);
        let rewards = RewardConfig::build(&rewards, device()).unwrap();
        values(rewards.score(&[sample("a", &[], "bc")]))[0]
    };
    assert_near(combined(json!("min")), of_a.min(of_b));
    assert_near(combined(json!("mean")), (of_a + of_b) / 2.);
}

#[test]
fn a_file_that_is_missing_is_an_error_with_its_name() {
    let check = |folder: &Path| -> String {
        let reward = json!({"kind": "reward_model", "path": folder});
        let reward: RewardConfig = serde_json::from_value(reward).unwrap();
        let error = format!("{:#}", reward.check_files().unwrap_err());
        let loaded = RewardModel::load(RewardModelConfig::new(folder), device()).err();
        assert!(loaded.is_some(), "{error}");
        error
    };
    let error = check(Path::new("no/such/folder"));
    assert!(
        error.contains("path: no/such/folder, must be a directory that exists"),
        "{error}"
    );
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = folder(1, None);
        fs::remove_file(folder.path().join(name)).unwrap();
        let error = check(folder.path());
        assert!(error.contains(name), "{error}");
    }
    let folder = folder(1, None);
    let mut keys: Value =
        serde_json::from_slice(&fs::read(folder.path().join("config.json")).unwrap()).unwrap();
    keys["architectures"] = json!(["LlamaForCausalLM"]);
    fs::write(folder.path().join("config.json"), keys.to_string()).unwrap();
    let error = check(folder.path());
    assert!(
        error.contains("must be [\"LlamaForSequenceClassification\"]"),
        "{error}"
    );
}

/// Files are checked before weights are read.
#[test]
fn an_error_of_a_model_in_an_ensemble_names_its_key() {
    let whole = folder(1, None);
    let broken = folder(1, None);
    fs::remove_file(broken.path().join("tokenizer.json")).unwrap();
    let weights = folder(1, None);
    fs::write(weights.path().join("model.safetensors"), "").unwrap();
    let labels = folder(2, None);
    let model = |folder: &Path| json!({"kind": "reward_model", "path": folder});
    for (judge, key, cause) in [
        (
            model(Path::new("nowhere")),
            "path: nowhere",
            "must be a directory that exists",
        ),
        (model(broken.path()), "path", "tokenizer.json"),
        (model(weights.path()), "path", "model.safetensors"),
        (
            model(labels.path()),
            "label: absent",
            "must be given for a model with 2 labels",
        ),
    ] {
        let ensemble = json!([{"kind": "exact", "column": "a"},
            {"kind": "ensemble", "judges": [model(whole.path()), judge]}]);
        let rewards: Vec<RewardConfig> = serde_json::from_value(ensemble).unwrap();
        let built = RewardConfig::build(&rewards, device())
            .err()
            .unwrap()
            .to_string();
        let expected = format!("rewards[1].judges[1].{key}");
        assert!(
            built.starts_with(&expected) && built.contains(cause),
            "{built}"
        );
        if cause != "model.safetensors" {
            let checked = rewards[1].check_files().unwrap_err().to_string();
            assert_eq!(format!("rewards[1].{checked}"), built);
        }
    }
}

#[test]
fn a_run_that_is_canceled_stops_between_passes() {
    struct Canceled;
    impl Progress for Canceled {
        fn is_canceled(&self) -> bool {
            true
        }
    }
    let folder = folder(1, None);
    let mut reward = RewardModel::load(RewardModelConfig::new(folder.path()), device()).unwrap();
    reward.set_progress(Arc::new(Canceled));
    let error = reward.score(&[sample("a", &[], "b")]).unwrap_err();
    assert!(error.is::<Interrupted>(), "{error}");
}

#[test]
fn the_template_prints_the_time_that_is_set_also_in_rewards_of_rewards() {
    let template = format!("{{{{ strftime_now('%A') | lower }}}}{TEMPLATE}");
    let folder = folder(1, Some(&template));
    let kind = json!({"kind": "reward_model", "path": folder.path()});
    let inside = json!({"kind": "ensemble", "judges": [kind], "combine": "mean"});
    let rewards: Vec<RewardConfig> = [kind, inside]
        .map(|reward| serde_json::from_value(reward).unwrap())
        .into();
    let mut reward = RewardConfig::build(&rewards, device()).unwrap();
    let asked = [json!({"role": "user", "content": "a"})];
    let sample = sample("a", &asked, "b");
    for (now, day) in [
        ("2025-03-05T14:07:09", "wednesday"),
        ("2025-03-06T00:00:00", "thursday"),
    ] {
        reward.set_clock(now).unwrap();
        let text = format!("{day}<user>a!<assistant>b!");
        let expected = expected(folder.path(), &text)[0];
        let scores = reward.components(std::slice::from_ref(&sample)).unwrap();
        assert_eq!(scores.len(), 2);
        for scores in scores {
            let score = scores.iter_scores().next().unwrap();
            assert_near(score.value().unwrap(), expected);
        }
    }
    let error = reward.set_clock("now").unwrap_err().to_string();
    assert!(error.starts_with("now: \"now\""), "{error}");
}

/// The library transformers ignores them too, unless it is asked to truncate.
#[test]
fn truncation_and_padding_of_the_tokenizer_file_have_no_effect() {
    let folder = folder(1, None);
    let plain = expected(folder.path(), "abcdefgh");
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["truncation"] = json!({
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    });
    tokenizer["padding"] = json!({
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "a",
    });
    fs::write(path, tokenizer.to_string()).unwrap();
    let reward = RewardModel::load(RewardModelConfig::new(folder.path()), device()).unwrap();
    let scores = values(reward.score(&[sample("abcd", &[], "efgh")]));
    assert_near(scores[0], plain[0]);
}

/// A group with equal completions has no variance.
#[test]
fn equal_texts_have_bit_identical_scores() {
    let folder = folder(1, None);
    let config = RewardModelConfig {
        batch_tokens: 7,
        ..RewardModelConfig::new(folder.path())
    };
    let reward = RewardModel::load(config, device()).unwrap();
    let samples = ["abcd", "ef", "abcd", "abce", "abcd"].map(|text| sample("", &[], text));
    let scores = values(reward.score(&samples));
    assert_eq!([scores[0]; 2], [scores[2], scores[4]]);
    assert!(
        scores[0] != scores[1] && scores[0] != scores[3],
        "{scores:?}"
    );
}

#[test]
fn a_text_that_ends_with_padding_is_scored_before_it() {
    let folder = folder(1, None);
    let reward = RewardModel::load(RewardModelConfig::new(folder.path()), device()).unwrap();
    // The first token is the padding token.
    let samples = ["abc", "abc<eos>"].map(|text| sample("", &[], text));
    let scores = values(reward.score(&samples));
    assert_near(scores[1], scores[0]);
}
