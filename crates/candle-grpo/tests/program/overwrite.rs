//! No command removes or replaces what it has not written.

use std::fs;
use std::path::Path;
use std::process::Output;

use candle_core::{DType, Device, safetensors};
use candle_grpo::nn::Lora;
use candle_grpo::train::{Pretrained, RunDir};
use rstest::rstest;
use serde_json::Value;

use crate::support::{CONFIG, folder, grpo, said, succeeds};

/// Every file below `folder` with its bytes, but for the lock.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if !path.ends_with(".lock") {
                let bytes = fs::read(&path).unwrap();
                found.push((path.display().to_string(), bytes));
            }
        }
    }
    found.sort();
    found
}

fn refused(output: &Output, code: i32, words: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    assert!(
        said(output).contains(words),
        "{words:?} in {}",
        said(output)
    );
}

/// A folder in which a short run has ended.
fn finished() -> tempfile::TempDir {
    let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 3"));
    succeeds(folder.path(), &["train", "run.yaml"]);
    folder
}

/// Writes `run.yaml` with another `run_dir`.
fn set_run_dir(folder: &Path, run_dir: &str) {
    let config = CONFIG.replace("max_steps: 12", "max_steps: 3");
    let config = config.replace("run_dir: run", &format!("run_dir: {run_dir}"));
    fs::write(folder.join("run.yaml"), config).unwrap();
}

const REPLACE: [&str; 3] = ["train", "run.yaml", "--replace"];

#[test]
fn replace_names_a_file_that_no_run_wrote_and_keeps_everything() {
    let folder = finished();
    let before = files(&folder.path().join("run"));
    for name in [
        "notes.txt",
        "checkpoints/step-000003/notes.txt",
        "checkpoints/notes.txt",
    ] {
        let notes = folder.path().join("run").join(name);
        fs::write(&notes, "mine").unwrap();
        refused(&grpo(folder.path(), &REPLACE), 1, name);
        assert_eq!(fs::read_to_string(&notes).unwrap(), "mine");
        fs::remove_file(&notes).unwrap();
    }
    assert_eq!(files(&folder.path().join("run")), before);
}

#[test]
fn replace_keeps_runs_below_a_run() {
    let folder = finished();
    set_run_dir(folder.path(), "run/inner");
    succeeds(folder.path(), &["train", "run.yaml"]);
    set_run_dir(folder.path(), "run");
    let before = files(&folder.path().join("run"));
    refused(
        &grpo(folder.path(), &REPLACE),
        1,
        "holds inner, which no run writes",
    );
    assert_eq!(files(&folder.path().join("run")), before);
}

/// The project has a `config.json` and a `metrics.jsonl`, as a run has.
#[test]
fn replace_refuses_the_working_directory_and_its_parents() {
    let (project, models) = (tempfile::tempdir().unwrap(), folder(CONFIG));
    let project = project.path();
    fs::write(project.join("config.json"), "{}").unwrap();
    fs::write(project.join("metrics.jsonl"), "{\"step\": 1}\n").unwrap();
    fs::create_dir(project.join("below")).unwrap();
    let elsewhere = |name: &str| models.path().join(name).display().to_string();
    let before = files(project);
    for (run_dir, here) in [(".", project), ("..", &project.join("below"))] {
        let config = CONFIG
            .replace("model: model", &format!("model: {}", elsewhere("model")))
            .replace("data.jsonl", &elsewhere("data.jsonl"))
            .replace("run_dir: run", &format!("run_dir: {run_dir}"));
        let file = models.path().join("other.yaml");
        fs::write(&file, config).unwrap();
        let output = grpo(here, &["train", &file.display().to_string(), "--replace"]);
        refused(&output, 1, "holds the working directory");
    }
    assert_eq!(files(project), before);
}

#[cfg(unix)]
#[test]
fn replace_refuses_a_link() {
    let folder = finished();
    std::os::unix::fs::symlink("run", folder.path().join("link")).unwrap();
    set_run_dir(folder.path(), "link");
    refused(&grpo(folder.path(), &REPLACE), 1, "is a link");
    assert!(RunDir::is_run(&folder.path().join("run")));
}

#[test]
fn the_old_run_is_kept_until_the_new_one_has_a_checkpoint() {
    let folder = finished();
    let (run, aside) = (
        folder.path().join("run"),
        folder.path().join("run.replaced"),
    );
    let before = files(&run);

    // It fails before it has a checkpoint.
    let config = CONFIG.replace("recipe:", "preset: dr_grpo\nrecipe:");
    let config = config.replace("'^[ab]'", "'^[ab]', weight: 1e30");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let output = grpo(folder.path(), &REPLACE);
    refused(&output, 6, "The previous run is kept in ");
    assert!(said(&output).contains("run.replaced"), "{}", said(&output));
    let moved: Vec<Vec<u8>> = files(&aside).into_iter().map(|(_, bytes)| bytes).collect();
    let bytes: Vec<Vec<u8>> = before.into_iter().map(|(_, bytes)| bytes).collect();
    assert!(moved == bytes);

    // Only the run that this one replaces goes.
    set_run_dir(folder.path(), "run");
    succeeds(folder.path(), &REPLACE);
    let names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("run") && name != "run.yaml")
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(RunDir::is_run(&aside));
}

#[test]
fn a_run_that_lost_its_metrics_goes_on_from_its_checkpoint() {
    let folder = finished();
    let run = folder.path().join("run");
    for (name, substitute) in [("metrics.jsonl", ""), ("config.json", "{}")] {
        fs::remove_file(run.join(name)).unwrap();
        let words = format!("the run has lost {name}");
        for how in [
            &["train", "run.yaml"][..],
            &["train", "run.yaml", "--resume"],
            &REPLACE,
        ] {
            refused(&grpo(folder.path(), how), 1, &words);
        }
        for (how, code) in [
            (&["eval", "run.yaml", "--model", "run"][..], 5),
            (&["convert", "run", "converted"], 5),
            (&["sample", "run", "ab"], 5),
            (&["report", "run"], 4),
        ] {
            refused(&grpo(folder.path(), how), code, &format!("run: {words}"));
        }
        // As the message says.
        fs::write(run.join(name), substitute).unwrap();
        let more = CONFIG.replace("max_steps: 12", "max_steps: 4");
        fs::write(folder.path().join("run.yaml"), more).unwrap();
        succeeds(folder.path(), &["train", "run.yaml", "--resume"]);
    }
    assert!(run.join("checkpoints/step-000004").is_dir());
}

#[test]
fn a_run_that_lost_its_checkpoints_keeps_its_logs() {
    let folder = folder(CONFIG);
    succeeds(folder.path(), &["train", "run.yaml"]);
    let run = folder.path().join("run");
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    fs::rename(run.join("checkpoints"), folder.path().join("checkpoints")).unwrap();
    let resume = ["train", "run.yaml", "--resume"];
    refused(
        &grpo(folder.path(), &resume),
        1,
        "metrics for 12 steps and no checkpoint",
    );
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), metrics);

    // As the message says.
    fs::rename(folder.path().join("checkpoints"), run.join("checkpoints")).unwrap();
    succeeds(folder.path(), &resume);
}

#[test]
fn convert_keeps_a_gguf_file_unless_the_new_one_is_complete() {
    let folder = finished();
    let convert = |to: &str, how: &[&str]| {
        grpo(
            folder.path(),
            &[&["convert", "model", to][..], how].concat(),
        )
    };
    let file = folder.path().join("other.gguf");
    fs::write(&file, "mine").unwrap();
    refused(&convert("other.gguf", &[]), 3, "pass --force");
    refused(&convert("model/other.gguf", &[]), 3, "is inside the source");
    fs::create_dir(folder.path().join("folder.gguf")).unwrap();
    refused(
        &convert("folder.gguf", &["--force"]),
        3,
        "folder.gguf: is not a file",
    );
    refused(
        &convert("other", &["--dtype", "q8_0"]),
        3,
        "--dtype: q8_0, must be f32, bf16 or f16 for a Hugging Face directory",
    );
    refused(
        &convert("another.gguf", &["--dtype", "bf16"]),
        3,
        "--dtype: bf16, must be f32, f16 or q8_0 for the GGUF file another.gguf",
    );
    refused(
        &convert("ANOTHER.GGUF", &["--dtype", "bf16"]),
        3,
        "--dtype: bf16, must be f32, f16 or q8_0 for the GGUF file ANOTHER.GGUF",
    );
    // The tokenizer of this model has a token for each character.
    refused(
        &convert("other.gguf", &["--force"]),
        1,
        "must be a byte-level BPE",
    );
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn convert_replaces_a_model_alone() {
    let folder = finished();
    let convert = |from: &str, to: &str, how: &[&str]| {
        grpo(folder.path(), &[&["convert", from, to][..], how].concat())
    };
    assert_eq!(convert("model", "other", &[]).status.code(), Some(0));
    refused(&convert("model", "other", &[]), 3, "pass --force");
    assert_eq!(
        convert("model", "other", &["--force"]).status.code(),
        Some(0)
    );

    fs::create_dir(folder.path().join("thesis")).unwrap();
    refused(
        &convert("model", "thesis", &["--force"]),
        3,
        "is not replaced",
    );
    fs::write(folder.path().join("other/notes.txt"), "mine").unwrap();
    refused(
        &convert("model", "other", &["--force"]),
        3,
        "contains notes.txt",
    );

    // The card of a run is replaced, that of a person is not.
    assert_eq!(convert("run", "policy", &[]).status.code(), Some(0));
    let card = folder.path().join("policy/README.md");
    let text = fs::read_to_string(&card).unwrap();
    assert!(text.contains("checkpoint `step-00000"), "{text}");
    let again = convert("run", "policy", &["--force"]);
    assert_eq!(again.status.code(), Some(0));
    fs::write(&card, "my model").unwrap();
    let refusal = convert("model", "policy", &["--force"]);
    refused(&refusal, 3, "README.md, which grpo did not write");
    assert_eq!(fs::read_to_string(&card).unwrap(), "my model");

    let before = files(&folder.path().join("run"));
    refused(
        &convert("model", "run", &["--force"]),
        3,
        "which is not a model file",
    );
    let checkpoint = "run/checkpoints/step-000003";
    refused(
        &convert("model", checkpoint, &["--force"]),
        3,
        "which is not a model file",
    );
    // The source itself, what holds it and what it holds.
    for to in [
        "run",
        "run/checkpoints",
        checkpoint,
        "run/checkpoints/step-000003/below",
    ] {
        refused(&convert("run", to, &["--force"]), 3, "the source");
    }
    refused(&convert("model", ".", &["--force"]), 3, "the source");
    assert_eq!(files(&folder.path().join("run")), before);
}

#[rstest]
#[case("bf16", DType::BF16, "bfloat16", 2)]
#[case("f16", DType::F16, "float16", 2)]
#[case("f32", DType::F32, "float32", 4)]
fn convert_writes_a_folder_in_a_dtype(
    #[case] dtype: &str,
    #[case] stored: DType,
    #[case] name: &str,
    #[case] bytes: u64,
) {
    let folder = finished();
    succeeds(
        folder.path(),
        &["convert", "model", "other", "--dtype", dtype],
    );
    let other = folder.path().join("other");
    let config: Value =
        serde_json::from_slice(&fs::read(other.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], name);
    let tensors = safetensors::load(other.join("model.safetensors"), &Device::Cpu).unwrap();
    for (tensor_name, tensor) in tensors {
        assert_eq!(tensor.dtype(), stored, "{tensor_name}");
    }
    let size = |path: &Path| fs::metadata(path.join("model.safetensors")).unwrap().len();
    let whole = size(&folder.path().join("model"));
    assert!(size(&other).abs_diff(whole * bytes / 4) < 4096);
    // What is written is read.
    succeeds(folder.path(), &["convert", "other", "again"]);
    assert!(folder.path().join("again/model.safetensors").exists());
}

#[test]
fn convert_takes_the_folder_of_a_run() {
    let folder = finished();
    succeeds(folder.path(), &["convert", "run", "converted"]);
    let best = RunDir::best_checkpoint(&folder.path().join("run"))
        .unwrap()
        .unwrap();
    let weights = |path: &Path| fs::read(path.join("model.safetensors")).unwrap();
    assert!(weights(&folder.path().join("converted")) == weights(&best.path));
}

#[test]
fn convert_writes_the_adapters_of_a_run_or_merges_them() {
    let config = CONFIG.replace("max_steps: 12", "max_steps: 3");
    let folder = folder(&format!("{config}adapters: {{rank: 2, alpha: 4}}\n"));
    let path = folder.path();
    succeeds(path, &["train", "run.yaml"]);
    let best = RunDir::best_checkpoint(&path.join("run")).unwrap().unwrap();
    let weights = |path: &Path| fs::read(path.join("model.safetensors")).unwrap();

    let printed = succeeds(path, &["convert", "run", "adapters"]);
    assert!(
        printed.starts_with("rank-2 adapters for down_proj, gate_proj,")
            && printed.contains("base model model;"),
        "{printed}"
    );
    let mut names: Vec<_> = fs::read_dir(path.join("adapters"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    let read = |name: &str| fs::read(path.join("adapters").join(name)).unwrap();
    let saved = fs::read(best.path.join("adapter/adapter_model.safetensors")).unwrap();
    assert!(read("adapter_model.safetensors") == saved);
    let config: Value = serde_json::from_slice(&read("adapter_config.json")).unwrap();
    assert_eq!(config["base_model_name_or_path"], "model");
    let card = String::from_utf8(read("README.md")).unwrap();
    assert!(card.contains("library_name: peft"), "{card}");
    // Base and adapters make the policy.
    let base = Pretrained::load(&path.join("model"), &Device::Cpu).unwrap();
    let adapters = Lora::load(&path.join("adapters"), &base.model, &Device::Cpu).unwrap();
    let merged = adapters.merged(&base.model, &base.parameters).unwrap();
    merged.save(&path.join("merged.safetensors")).unwrap();
    let merged = fs::read(path.join("merged.safetensors")).unwrap();
    assert!(merged == weights(&best.path));

    // The folder is replaced by either form.
    refused(
        &grpo(path, &["convert", "run", "adapters"]),
        3,
        "pass --force",
    );
    succeeds(path, &["convert", "run", "adapters", "--force"]);
    succeeds(path, &["convert", "run", "adapters", "--merge", "--force"]);
    assert!(weights(&path.join("adapters")) == weights(&best.path));
    assert!(!path.join("adapters/adapter_config.json").exists());

    // A checkpoint has adapters, too; another model has none to merge.
    let checkpoint = best.path.strip_prefix(path).unwrap().to_str().unwrap();
    let printed = succeeds(path, &["convert", checkpoint, "of-checkpoint"]);
    assert!(printed.contains("base model model;"), "{printed}");
    succeeds(path, &["convert", "model", "whole", "--merge"]);
    assert!(weights(&path.join("whole")) == weights(&path.join("model")));
    let bf16 = ["convert", "run", "bf16", "--dtype", "bf16"];
    refused(
        &grpo(path, &bf16),
        3,
        "--dtype: must be f32 or absent for adapters; to convert the whole model, pass --merge",
    );
    succeeds(path, &[&bf16[..], &["--merge"]].concat());
    // A GGUF file needs the merge; only the tokenizer of this model stops it.
    refused(
        &grpo(path, &["convert", "run", "a.gguf"]),
        1,
        "byte-level BPE",
    );
}

#[test]
fn report_replaces_its_own_pages_alone() {
    let folder = finished();
    let thesis = folder.path().join("thesis.html");
    fs::write(&thesis, "<!doctype html>\n<p>mine\n").unwrap();
    let report = |how: &[&str]| {
        grpo(
            folder.path(),
            &[&["report", "run", "-o", "thesis.html"][..], how].concat(),
        )
    };
    refused(&report(&[]), 3, "thesis.html: exists already");
    assert_eq!(
        fs::read_to_string(&thesis).unwrap(),
        "<!doctype html>\n<p>mine\n"
    );
    assert_eq!(report(&["--force"]).status.code(), Some(0));
    // Now it is a page.
    assert_eq!(report(&[]).status.code(), Some(0));
    let folders = grpo(folder.path(), &["report", "run", "-o", "run"]);
    refused(&folders, 3, "run: is a directory");
}

/// `--force` does not extend to what a command reads. A link is what it leads to.
#[test]
fn report_and_eval_never_replace_their_inputs() {
    let folder = finished();
    let path = folder.path();
    let one = serde_json::json!({"prompt": "ab", "completion": "c", "finish_reason": "stop"});
    let answers = format!("{one}\n{}\n", one.to_string().replace("ab", "cd"));
    fs::write(path.join("held_out.jsonl"), answers).unwrap();
    fs::write(path.join("run/evaluations.jsonl"), "").unwrap();
    let config = fs::read_to_string(path.join("run.yaml")).unwrap();
    let config = config.replace("held_out_rows: 4", "held_out: held_out.jsonl");
    fs::write(path.join("run.yaml"), config).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("run/metrics.jsonl", path.join("link")).unwrap();
    let before = files(path);
    for out in [
        "run/metrics.jsonl",
        "run/evaluations.jsonl",
        "run/../run/config.json",
        "run/checkpoints/step-000003/model.safetensors",
        #[cfg(unix)]
        "link",
    ] {
        let report = grpo(path, &["report", "run", "--force", "-o", out]);
        refused(&report, 3, "belongs to the input run;");
        let eval = grpo(path, &["eval", "run.yaml", "--force", "--out", out]);
        refused(&eval, 3, "belongs to the input run;");
    }
    for out in [
        "run.yaml",
        "data.jsonl",
        "held_out.jsonl",
        "model/config.json",
    ] {
        let eval = grpo(path, &["eval", "run.yaml", "--force", "--out", out]);
        refused(&eval, 3, "exists already and belongs to the input ");
    }
    assert_eq!(files(path), before);
    // A page of this command is no input, wherever it is.
    for _ in 0..2 {
        let report = grpo(path, &["report", "run", "-o", "run/report.html"]);
        assert_eq!(report.status.code(), Some(0), "{}", said(&report));
    }
}

#[test]
fn eval_replaces_its_own_answers_alone() {
    let folder = finished();
    let eval = |out: &str, how: &[&str]| {
        grpo(
            folder.path(),
            &[&["eval", "run.yaml", "--out", out][..], how].concat(),
        )
    };
    let before = files(&folder.path().join("run"));
    for out in ["data.jsonl", "run.yaml", "run/samples.jsonl"] {
        refused(&eval(out, &[]), 3, "exists already");
    }
    assert_eq!(files(&folder.path().join("run")), before);
    refused(&eval("/dev/null", &[]), 3, "is not a regular file");
    for _ in 0..2 {
        assert_eq!(eval("answers.jsonl", &[]).status.code(), Some(0));
    }
    fs::write(folder.path().join("answers.jsonl"), "mine\n").unwrap();
    refused(&eval("answers.jsonl", &[]), 3, "exists already");
    assert_eq!(eval("answers.jsonl", &["--force"]).status.code(), Some(0));
}
