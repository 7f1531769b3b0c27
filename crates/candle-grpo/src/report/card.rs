//! A trained policy's model card.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use candle_grpo_train::hub::HubName;

use super::Run;

/// The comment that marks a model card as generated rather than written by a person.
pub const CARD_MARK: &str = "<!-- Written by grpo convert. -->";

/// The setting with the model that the run started from.
const BASE: &str = "model.path";

impl Run {
    /// Returns the hub name, or otherwise the path, of the model that the run started from.
    pub fn base_model(&self) -> Option<String> {
        let path = self.settings.get(BASE)?;
        Some(match HubName::of(Path::new(path)) {
            Ok(Some(name)) => name.id().to_owned(),
            _ => path.clone(),
        })
    }
}

/// Returns a model card for the policy that `run` trained: Markdown with Hugging Face hub metadata.
/// `checkpoint` is the weight folder's name. `library` is the Python library that loads the folder:
/// `transformers`, or `peft` for adapters.
///
/// <https://huggingface.co/docs/hub/model-cards>
pub fn model_card(run: &Run, checkpoint: &str, library: &str) -> String {
    let setting = |key: &str| run.settings.get(key).map_or("", String::as_str);
    let base = setting(BASE);
    let mut card = String::from("---\n");
    // The hub links ids alone; a path would be an error there.
    if let Ok(Some(name)) = HubName::of(Path::new(base)) {
        line(&mut card, format_args!("base_model: {}", name.id()));
    }
    line(&mut card, format_args!("library_name: {library}"));
    let (tags, method) = if run.is_supervised() {
        (
            ["sft", "supervised-fine-tuning"],
            "supervised fine-tuning (SFT)",
        )
    } else {
        (["grpo", "reinforcement-learning"], "reinforcement learning")
    };
    for text in ["pipeline_tag: text-generation", "tags:"] {
        line(&mut card, format_args!("{text}"));
    }
    for tag in tags.into_iter().chain(["candle-grpo"]) {
        line(&mut card, format_args!("- {tag}"));
    }
    for text in ["---", CARD_MARK, ""] {
        line(&mut card, format_args!("{text}"));
    }
    let version = env!("CARGO_PKG_VERSION");
    line(&mut card, format_args!("# {}\n", run.name));
    line(
        &mut card,
        format_args!(
            "A language model trained by {method} from `{base}`, with candle-grpo {version}.\n"
        ),
    );
    table(
        &mut card,
        ["", ""],
        [
            ("base model", format!("`{base}`")),
            ("training data", format!("`{}`", setting("data.train"))),
            ("steps", run.steps.len().to_string()),
            (
                "steps without an update",
                if run.is_supervised() {
                    String::new()
                } else {
                    run.skipped.to_string()
                },
            ),
            ("prompts per step", setting("prompts_per_step").to_owned()),
            (
                "completions per prompt",
                setting("num_generations").to_owned(),
            ),
            ("rows per step", setting("sft.batch_size").to_owned()),
            ("weights", format!("checkpoint `{checkpoint}`")),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_empty() && value != "``"),
    );
    if !run.evaluations.is_empty() {
        line(&mut card, format_args!("\n## Evaluations\n"));
        evaluations(&mut card, &run.evaluations);
    }
    line(&mut card, format_args!("\n## Settings\n"));
    let settings = run.settings.iter();
    let settings = settings.map(|(key, value)| (key.as_str(), format!("`{value}`")));
    table(&mut card, ["key", "value"], settings);
    card
}

/// Writes a table with the metrics for all evaluations, one row each.
fn evaluations(card: &mut String, rows: &[BTreeMap<String, f64>]) {
    let mut names: Vec<&str> = Vec::new();
    for name in rows.iter().flat_map(BTreeMap::keys) {
        if name != "step" && !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    line(card, format_args!("| step | {} |", names.join(" | ")));
    line(
        card,
        format_args!("| ---: |{}", " ---: |".repeat(names.len())),
    );
    for row in rows {
        let number = |name: &&str| row.get(*name).map_or(String::new(), |x| format!("{x:.3}"));
        let step = row.get("step").copied().unwrap_or_default();
        let numbers: Vec<String> = names.iter().map(number).collect();
        line(card, format_args!("| {step} | {} |", numbers.join(" | ")));
    }
}

fn table<'a>(
    card: &mut String,
    [key, value]: [&str; 2],
    rows: impl Iterator<Item = (&'a str, String)>,
) {
    line(card, format_args!("| {key} | {value} |\n| --- | --- |"));
    for (key, value) in rows {
        // A cell is one line.
        let value = value.replace('|', "\\|").replace(['\n', '\r'], " ");
        line(card, format_args!("| {key} | {value} |"));
    }
}

fn line(card: &mut String, text: std::fmt::Arguments) {
    // A text in memory has room.
    let _ = writeln!(card, "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(base: &str) -> Run {
        let settings = [
            ("model.path", base),
            ("data.train", "train.jsonl"),
            ("sampling.stop", "a|b\nc"),
        ];
        let row = |step: f64, reward: f64| {
            BTreeMap::from([
                ("step".to_owned(), step),
                ("reward_mean".to_owned(), reward),
            ])
        };
        Run {
            name: "run".to_owned(),
            settings: settings
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            steps: vec![row(1.0, 0.5); 7],
            skipped: 2,
            evaluations: vec![row(0.0, 0.1), row(7.0, 0.75)],
            samples: Vec::new(),
            rollouts: Vec::new(),
        }
    }

    #[test]
    fn a_card_has_base_data_steps_evaluations_and_settings() {
        let card = model_card(&run("Qwen/Qwen2.5-0.5B"), "step-000007", "transformers");
        for part in [
            "---\nbase_model: Qwen/Qwen2.5-0.5B\nlibrary_name: transformers\n",
            CARD_MARK,
            "| training data | `train.jsonl` |",
            "| steps | 7 |\n| steps without an update | 2 |\n",
            "| step | reward_mean |\n| ---: | ---: |\n| 0 | 0.100 |\n| 7 | 0.750 |",
            "| sampling.stop | `a\\|b c` |",
            "checkpoint `step-000007`",
        ] {
            assert!(card.contains(part), "{part}\n{card}");
        }
    }

    #[test]
    fn the_card_of_a_supervised_run_has_its_method() {
        let mut run = run("a/b");
        run.settings
            .insert("sft.batch_size".to_owned(), "32".to_owned());
        let card = model_card(&run, "step-000007", "transformers");
        for part in [
            "- sft\n- supervised-fine-tuning\n- candle-grpo\n",
            "trained by supervised fine-tuning (SFT) from `a/b`",
            "| rows per step | 32 |",
        ] {
            assert!(card.contains(part), "{part}\n{card}");
        }
        assert!(!card.contains("reinforcement") && !card.contains("without an update"));
    }

    #[test]
    fn the_base_model_of_a_name_is_its_repository() {
        for name in ["a/b@v1", "hf://a/b", "a/b/c-Q8_0.gguf"] {
            let card = model_card(&run(name), "step-1", "peft");
            assert!(
                card.contains("\nbase_model: a/b\nlibrary_name: peft\n"),
                "{card}"
            );
            assert_eq!(run(name).base_model().unwrap(), "a/b");
            assert!(card.contains(&format!("from `{name}`")), "{card}");
        }
    }

    #[test]
    fn a_path_is_no_base_model_of_the_hub() {
        for path in [
            "models/a/b",
            "model.gguf",
            "./model",
            "../model",
            "org/model.gguf",
        ] {
            let card = model_card(&run(path), "step-1", "peft");
            assert!(!card.contains("base_model:"), "{path}");
            assert_eq!(run(path).base_model().unwrap(), path);
            assert!(card.contains(&format!("from `{path}`")));
        }
    }
}
