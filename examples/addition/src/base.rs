//! Exports the warmed-up policy for other programs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_grpo_nn::{Parameters, atomic_file};
use candle_grpo_train::model::{SpecialToken, SpecialTokens};
use candle_grpo_train::{Pretrained, Prompt};
use serde_json::json;

use crate::settings::Settings;
use crate::task::{END, Task, answer};
use crate::warm_up;

/// Warms up a policy and writes everything to `folder` that another program needs to train it.
///
/// `model` is a folder that transformers can load; `train.jsonl` and `held_out.jsonl` contain the
/// problems with their answers.
pub(crate) fn make(folder: &Path, settings: &Settings) -> Result<()> {
    ensure!(
        !folder.exists(),
        "base {}: exists already, choose another or remove it",
        folder.display()
    );
    let task = Task::new(settings.seed)?;
    let parameters = warm_up::warm_up(settings, &task)?;
    write(folder, settings, &task, parameters).with_context(|| format!("base {}", folder.display()))
}

/// Writes the warmed-up policy with its tokenizer and configuration.
pub(crate) fn pretrained(settings: &Settings, task: &Task, parameters: Parameters) -> Pretrained {
    let end = task
        .tokenizer
        .id_to_token(END)
        .map(|text| SpecialToken { id: END, text });
    Pretrained {
        special_tokens: SpecialTokens {
            eos: end.clone(),
            // Other programs pad rows.
            pad: end,
            stop_token_ids: vec![END],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(settings.model.clone(), parameters, task.tokenizer.clone())
    }
}

fn write(folder: &Path, settings: &Settings, task: &Task, parameters: Parameters) -> Result<()> {
    fs::create_dir_all(folder)?;
    let pretrained = pretrained(settings, task, parameters);
    pretrained.save(&folder.join("model"))?;
    atomic_file::write(
        &folder.join("train.jsonl"),
        lines(&task.training).as_bytes(),
    )?;
    atomic_file::write(
        &folder.join("held_out.jsonl"),
        lines(&task.held_out).as_bytes(),
    )?;
    Ok(())
}

/// Writes one line of JSON per problem.
fn lines(prompts: &[Prompt]) -> String {
    let line = |prompt: &Prompt| json!({"prompt": prompt.text, "answer": answer(prompt)});
    prompts
        .iter()
        .map(|prompt| format!("{}\n", line(prompt)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Size;
    use candle_core::Device;
    use candle_grpo_nn::DecoderConfig;
    use candle_grpo_train::DatasetConfig;
    use candle_grpo_train::data::Question;

    #[test]
    fn what_is_left_is_read_again() {
        let size = Size {
            hidden_size: 16,
            num_hidden_layers: 3,
        };
        let settings = Settings::new(0, None, false, size);
        let task = Task::new(0).unwrap();
        let parameters = Parameters::init(&settings.model, 0, &Device::Cpu).unwrap();
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &settings, &task, parameters).unwrap();

        let model = Pretrained::load(&folder.path().join("model"), &Device::Cpu).unwrap();
        let head_dim = Some(settings.model.head_dim());
        let expected = DecoderConfig {
            head_dim,
            ..settings.model
        };
        assert_eq!(model.model, expected);
        assert_eq!(model.special_tokens.stop_token_ids, [END]);
        assert_eq!(model.special_tokens.pad.unwrap().id, END);
        let data = DatasetConfig {
            train: vec![folder.path().join("train.jsonl")],
            held_out: vec![folder.path().join("held_out.jsonl")],
            ..DatasetConfig::default()
        };
        let data = data.load(0).unwrap();
        assert_eq!((data.train.len(), data.held_out.len()), (7100, 1000));
        for (row, prompt) in data.held_out.iter().zip(&task.held_out) {
            let question = data.question(row).unwrap();
            assert_eq!(question, Question::Text(prompt.text.clone()));
            assert_eq!(row.columns["answer"], prompt.columns["answer"]);
        }
    }

    #[test]
    fn what_is_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings::new(0, None, false, Size::default());
        let error = make(folder.path(), &settings).unwrap_err().to_string();
        assert!(error.ends_with("exists already, choose another or remove it"));
    }
}
