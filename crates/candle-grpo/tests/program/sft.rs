//! `grpo sft`, from answer rows to a model that `grpo train` starts from.

use std::fs;
use std::path::Path;

use candle_grpo::config::{Document, SftRunConfig};
use candle_grpo::train::Pretrained;
use rstest::rstest;
use serde_json::{Value, json};

use super::models::chat_model;
use super::support::{grpo, lines, said, succeeds, write_model};

pub(crate) const CONFIG: &str = "
model: model
data: {train: rows.jsonl, held_out_rows: 4}
sft: {batch_size: 8, micro_batch_tokens: 16}
optimizer: {learning_rate: 1e-2}
schedule: {warmup_steps: 2, decay: cosine, min_lr_ratio: 0.1}
evaluation: {every_steps: 5}
checkpoint: {every_steps: 5, keep: 9}
max_steps: 12
run_dir: sft
threads: 1
";

/// A folder with a model, rows whose answer is always `bb`, and a configuration.
pub(crate) fn folder(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("model"), "abcde");
    let prompts = ["a", "b", "c", "d", "e"];
    let prompts = prompts
        .iter()
        .flat_map(|x| prompts.iter().map(move |y| format!("{x}{y}")));
    let rows: String = prompts
        .map(|prompt| json!({"prompt": prompt, "completion": "bb"}).to_string() + "\n")
        .collect();
    fs::write(folder.path().join("rows.jsonl"), rows).unwrap();
    fs::write(folder.path().join("sft.yaml"), config).unwrap();
    folder
}

/// Returns a file's lines without what depends on the machine's speed.
fn timeless(path: &Path) -> Vec<Value> {
    let mut lines = lines(path);
    for line in lines.iter_mut().filter_map(Value::as_object_mut) {
        line.remove("tokens_per_second");
    }
    lines
}

#[test]
fn reinforcement_learning_begins_with_the_weights_of_supervised_training() {
    let config = CONFIG
        .replace("1e-2", "3e-2")
        .replace("every_steps: 5", "every_steps: 20")
        .replace("max_steps: 12", "max_steps: 40");
    let folder = folder(&config);
    let path = folder.path();
    let printed = succeeds(path, &["sft", "sft.yaml"]);
    assert_eq!(printed.matches("step ").count(), 40, "{printed}");
    assert!(
        printed.contains("held out, after 0 steps:  loss "),
        "{printed}"
    );
    let metrics = timeless(&path.join("sft/metrics.jsonl"));
    assert_eq!(metrics.len(), 40);
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!(
        (loss(&metrics[0]) - 6f64.ln()).abs() < 0.2,
        "{}",
        metrics[0]
    );
    assert!(
        loss(&metrics[39]) < 0.5 * loss(&metrics[0]),
        "{}",
        metrics[39]
    );
    // Two letters and the end of each of 8 rows.
    assert_eq!(metrics[3]["trained_tokens"], 24);
    assert_eq!(metrics[3]["total_trained_tokens"], 4 * 24);
    let evaluations = lines(&path.join("sft/evaluations.jsonl"));
    let steps: Vec<_> = evaluations.iter().map(|line| &line["step"]).collect();
    assert_eq!(steps, [0, 20, 40]);
    let held_out = evaluations.iter().map(loss);
    let held_out: Vec<f64> = held_out.collect();
    assert!(held_out[2] < 0.5 * held_out[0], "{held_out:?}");
    let perplexity = evaluations[2]["perplexity"].as_f64().unwrap();
    assert!((perplexity - held_out[2].exp()).abs() < 1e-9);

    // Other commands take the run.
    let sample = [
        "sample",
        "sft",
        "cd",
        "-n",
        "8",
        "--max-new-tokens",
        "4",
        "--json",
    ];
    let answers = succeeds(path, &sample);
    assert!(answers.matches("bb").count() >= 4, "{answers}");
    succeeds(path, &["report", "sft"]);
    let page = fs::read_to_string(path.join("report.html")).unwrap();
    for title in ["Loss", "Token accuracy", "Held-out rows", "Learning rate"] {
        assert!(page.contains(&format!("<b>{title}</b>")), "{title}");
    }
    assert!(page.contains("<th>loss, first 5 steps</th>") && !page.contains("<b>Reward</b>"));
    succeeds(path, &["convert", "sft", "converted"]);
    let card = fs::read_to_string(path.join("converted/README.md")).unwrap();
    assert!(
        card.contains("supervised fine-tuning (SFT) from `model`"),
        "{card}"
    );

    // The first completions of reinforcement learning are those that were taught.
    let train = |model: &str| {
        let config = format!(
            "model: {model}\ndata: {{train: rows.jsonl}}\nrewards: [{{kind: regex, pattern: '^bb$'}}]\n\
             prompts_per_step: 8\nnum_generations: 4\nsampling: {{max_new_tokens: 4}}\n\
             max_steps: 1\nrun_dir: rl-{model}\nthreads: 1\n"
        );
        fs::write(path.join("rl.yaml"), config).unwrap();
        succeeds(path, &["train", "rl.yaml"]);
        let metrics = lines(&path.join(format!("rl-{model}/metrics.jsonl")));
        metrics[0]["reward_mean"].as_f64().unwrap()
    };
    let (before, after) = (train("model"), train("sft"));
    assert!(before < 0.3 && after > 0.6, "{before}, then {after}");
}

#[test]
fn a_resumed_run_has_the_files_of_one_that_was_not_stopped() {
    let (whole, stopped) = (folder(CONFIG), folder(CONFIG));
    for folder in [&whole, &stopped] {
        succeeds(folder.path(), &["sft", "sft.yaml", "--quiet"]);
    }
    // As if it had been killed in step 11 or later.
    let last = stopped.path().join("sft/checkpoints/step-000012");
    fs::remove_dir_all(&last).unwrap();
    let printed = succeeds(stopped.path(), &["sft", "sft.yaml", "--resume"]);
    assert!(printed.starts_with("step 11/12  loss "), "{printed}");
    for name in ["metrics.jsonl", "evaluations.jsonl"] {
        let of = |folder: &Path| timeless(&folder.join("sft").join(name));
        assert_eq!(of(stopped.path()), of(whole.path()), "{name}");
    }
    for name in ["model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let file = Path::new("sft/checkpoints/step-000012").join(name);
        let of = |folder: &Path| fs::read(folder.join(&file)).unwrap();
        assert!(of(stopped.path()) == of(whole.path()), "{name}");
    }

    // Other steps would have other learning rates.
    let longer = CONFIG.replace("max_steps: 12", "max_steps: 20");
    fs::write(stopped.path().join("sft.yaml"), longer).unwrap();
    let output = grpo(stopped.path(), &["sft", "sft.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("max_steps: 12, now 20"),
        "{}",
        said(&output)
    );
    // Another file of the same name does not replace the run.
    let output = grpo(stopped.path(), &["sft", "sft.yaml"]);
    assert!(
        said(&output).contains("exists already"),
        "{}",
        said(&output)
    );
}

#[test]
fn adapters_are_a_model_and_a_folder_of_peft() {
    let config = CONFIG.replace(
        "batch_size: 8",
        "adapters: {rank: 2, alpha: 8}, batch_size: 8",
    );
    let folder = folder(&config);
    let path = folder.path();
    succeeds(path, &["sft", "sft.yaml"]);
    let metrics = lines(&path.join("sft/metrics.jsonl"));
    let loss = |i: usize| metrics[i]["loss"].as_f64().unwrap();
    assert!(loss(11) < loss(0), "{} and {}", loss(0), loss(11));
    succeeds(path, &["convert", "sft", "adapter"]);
    assert!(path.join("adapter/adapter_model.safetensors").is_file());
    let card = fs::read_to_string(path.join("adapter/README.md")).unwrap();
    assert!(
        card.contains("library_name: peft") && card.contains("(SFT)"),
        "{card}"
    );
    succeeds(path, &["convert", "sft", "merged", "--merge"]);
    assert!(Pretrained::load(&path.join("merged"), &candle_core::Device::Cpu).is_ok());
}

#[test]
fn check_shows_the_rows_and_what_trains() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    chat_model(&path.join("model"), 64);
    let row = |question: &str, answer: &str| {
        let messages = json!([
            {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        ]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    let rows = row("Hi?", "Hello.") + &row(&"x".repeat(60), "y") + &row("Bye?", "Bye.");
    fs::write(path.join("rows.jsonl"), rows).unwrap();
    let config = "model: model\ndata: {train: rows.jsonl, chat_template_kwargs: {enable_thinking: false}}\n\
         sft:\nepochs: 3\n";
    fs::write(path.join("sft.yaml"), config).unwrap();
    let printed = succeeds(path, &["check", "--all", "sft.yaml"]);
    for part in [
        "sft.yaml: valid.",
        "Data: 2 training rows, 0 held out. Steps: 1, each with 32 rows.",
        "; the longest row has 28. Rows dropped as too long: 1; truncated: 0",
        "  user: Hi?|assistant: ⟦Hello.|⟧",
        "Memory: at most about ",
        "train_on: answers",
    ] {
        assert!(printed.contains(part), "{part}\n{printed}");
    }
    // The printed settings are the same configuration.
    let settings = SftRunConfig::read(&path.join("sft.yaml")).unwrap();
    let printed = Document::from_yaml(Path::new("x.yaml"), &printed).unwrap();
    let again = SftRunConfig::new(&printed).unwrap();
    assert_eq!(again.to_value().unwrap(), settings.to_value().unwrap());
    assert_eq!(succeeds(path, &["check", "sft.yaml", "--quiet"]), "");
    let ranks = succeeds(path, &["check", "sft.yaml", "--ranks", "2"]);
    assert!(
        ranks.contains("On each rank, by sharding: none "),
        "{ranks}"
    );
    // Without the settings that exclude each other.
    let keys = "optimizer: {memory: host}\nsft: {sharding: resident}\n";
    let host = config.replace("sft:\n", keys);
    fs::write(path.join("host.yaml"), host).unwrap();
    let ranks = succeeds(path, &["check", "host.yaml", "--ranks", "2"]);
    let line = ranks.lines().find(|line| line.contains("by sharding: "));
    let line = line.unwrap_or_default();
    let has = |words: &str| line.contains(words);
    assert!(has("none ") && has(", resident "), "{ranks}");
    assert!(!has("optimizer"), "{ranks}");
    // A warning with the count.
    let output = grpo(path, &["check", "sft.yaml"]);
    assert!(
        said(&output).contains("data.train: 1 of 3 rows are too long and left out"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_malformed_row_ends_the_command_before_a_folder_is_made() {
    let folder = folder(CONFIG);
    let path = folder.path();
    let rows = fs::read_to_string(path.join("rows.jsonl")).unwrap();
    fs::write(path.join("rows.jsonl"), rows + "{\"prompt\": \"a\"}\n").unwrap();
    for command in ["sft", "check"] {
        let output = grpo(path, &[command, "sft.yaml"]);
        assert_eq!(output.status.code(), Some(4), "{}", said(&output));
        assert!(
            said(&output).contains("rows.jsonl:26: no column \"messages\", \"completion\""),
            "{}",
            said(&output)
        );
    }
    assert!(!path.join("sft").exists());
}

#[rstest]
#[case(
    "sft: {batch_size: 8, micro_batch_tokens: 16}",
    "",
    "sft: absent, must be given in a file of grpo sft"
)]
#[case(
    "batch_size: 8",
    "batch_size: 0",
    "sft.yaml:4: sft.batch_size: 0, must be at least 1"
)]
#[case(
    "max_steps: 12",
    "max_steps: 12\nepochs: 2",
    "sft.yaml:10: epochs: given, must be absent with max_steps"
)]
#[case(
    "warmup_steps: 2",
    "warmup_steps: 13",
    "schedule.warmup_steps: 13, must be at most 12"
)]
#[case(
    "min_lr_ratio: 0.1",
    "min_lr_ratio: 2",
    "sft.yaml:6: schedule.min_lr_ratio: 2, must be from 0 to 1"
)]
#[case(
    "micro_batch_tokens: 16",
    "micro_batch_token: 16",
    "sft.yaml:4: sft.micro_batch_token: unknown key, did you mean `micro_batch_tokens`?"
)]
#[case(
    "held_out_rows: 4",
    "held_out_rows: 4, train_on: answer",
    "sft.yaml:3: data.train_on: \"answer\", must be one of answers, last_answer, all; did you mean `answers`?"
)]
#[case(
    "held_out_rows: 4",
    "held_out_rows: 4, max_length: 99",
    "sft.yaml:3: data.max_length: 99, must be at most 24, the positions of the model"
)]
#[case(
    "held_out_rows: 4",
    "held_out_rows: 4, max_length: 1",
    "sft.yaml:3: data.max_length: 1, must leave a row: all 21 are longer, up to 5 tokens"
)]
#[case(
    "held_out_rows: 4",
    "held_out_rows: 25",
    "sft.yaml:3: data.held_out_rows: 25, must be less than the 25 rows of train"
)]
#[case(
    "batch_size: 8",
    "adapters: {rank: 99, alpha: 1}, batch_size: 8",
    "sft.yaml:4: sft.adapters.rank: 99, must be at most 16"
)]
#[case(
    "batch_size: 8",
    "router_aux_loss_coef: 1, batch_size: 8",
    "sft.yaml:4: sft.router_aux_loss_coef: 1, must be 0 for a model without experts"
)]
#[case(
    "batch_size: 8",
    "optimizer: {}, batch_size: 8",
    "sft.yaml:4: sft.optimizer: has its place at optimizer"
)]
#[case(
    "held_out_rows: 4",
    "chat: false",
    "sft.yaml:7: evaluation.every_steps: given, but nothing is held out"
)]
#[case(
    "run_dir: sft",
    "run_dir: .",
    "model: model, must lie outside of run_dir"
)]
fn a_wrong_key_is_an_error_with_its_line(
    #[case] key: &str,
    #[case] wrong: &str,
    #[case] expected: &str,
) {
    assert!(CONFIG.contains(key));
    let folder = folder(&CONFIG.replace(key, wrong));
    let output = grpo(folder.path(), &["sft", "sft.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains(expected), "{}", said(&output));
}

#[test]
fn each_kind_of_file_names_its_command() {
    let folder = folder(CONFIG);
    let output = grpo(folder.path(), &["train", "sft.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(
        said(&output).contains("sft: given: the file is one of grpo sft"),
        "{}",
        said(&output)
    );
}
