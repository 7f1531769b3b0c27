//! The command line: checks, messages and exit codes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::said;

const CONFIG: &str = "\
model: model
data: {train: data.jsonl, held_out_rows: 1}
rewards: [{kind: numeric}]
algorithm: {preset: dapo, rollout_batch_size: 2, response_length: 8}
";

/// A folder with a configuration, data and a model.
fn folder(config: &str, data: &str) -> TempDir {
    let folder = crate::support::folder(config);
    fs::write(folder.path().join("data.jsonl"), data).unwrap();
    folder
}

const DATA: &str = "{\"prompt\": \"ab\", \"answer\": \"2\"}\n{\"prompt\": \"cd\", \"answer\": 3}\n";

fn grpo(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_grpo"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that the program fails with this code and these words.
fn fails(output: &Output, code: i32, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(words), "{said}");
}

#[test]
fn check_prints_a_configuration_that_it_accepts() {
    let folder = folder(CONFIG, DATA);
    let first = grpo(folder.path(), &["check", "--all", "run.yaml"]);
    assert_eq!(
        first.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&first.stderr)
    );
    assert!(out(&first).contains("1 training prompts, 1 held out"));
    let updates = "Updates per step: 1 (1 x 1 mini-batches of at most 16 completions).\n";
    assert!(out(&first).contains(updates), "{}", out(&first));
    fs::write(folder.path().join("again.yaml"), out(&first)).unwrap();
    let second = grpo(folder.path(), &["check", "--all", "again.yaml"]);
    let settings = |output: &Output| -> String {
        out(output)
            .lines()
            // The memory of the program itself differs from call to call.
            .filter(|line| !line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect()
    };
    assert_eq!(settings(&second), settings(&first));
    let quiet = grpo(folder.path(), &["check", "--quiet", "run.yaml"]);
    assert_eq!((quiet.status.code(), out(&quiet).as_str()), (Some(0), ""));
}

/// A page for a person to read, not a list with every setting.
#[test]
fn check_prints_what_a_run_does_in_a_few_lines() {
    let folder = folder(CONFIG, DATA);
    let check = |algorithm: &str| {
        let config = CONFIG.replace("preset: dapo", algorithm);
        fs::write(folder.path().join("run.yaml"), config).unwrap();
        let checked = grpo(folder.path(), &["check", "run.yaml"]);
        let said = String::from_utf8_lossy(&checked.stderr);
        assert_eq!(checked.status.code(), Some(0), "{said}");
        out(&checked)
    };
    let text = check("preset: dapo");
    assert!(text.lines().count() <= 25, "{text}");
    for words in [
        "run.yaml: valid.\n",
        "Model: model, ",
        "Rewards: numeric.\n",
        " 2 prompts x 8 = 16 completions of at most 8 tokens, at temperature 1.\n",
        "Algorithm: dapo, with learning rate 1e-6.\n",
        "Memory: at most about ",
    ] {
        assert!(text.contains(words), "{words:?} in\n{text}");
    }
    let text = check("preset: dapo, pg_clip: 0.1, kl_coef: 0.5");
    for words in [
        "Algorithm: dapo, with learning rate 1e-6. Changes to it:\n",
        "  policy_loss.surrogate.clip.high: 0.1\n",
        "  policy_loss.kl: {coef: 0.5, kl: {estimator: k3",
    ] {
        assert!(text.contains(words), "{words:?} in\n{text}");
    }
    // Every option of a recipe is another one.
    let text = check("recipe: {policy_loss: {surrogate: {soft_gate: {}}}}");
    assert!(text.contains("Algorithm: sapo"), "{text}");
    let text = check(
        "preset: grpo, pg_clip: 0.1, kl_coef: 0.5, advantage_scale: none, advantage_epsilon: 1.0, entropy_loss_coef: 0.5, rl_loss_coef: 0.5, importance_sampling: seq, reward_clip: 3",
    );
    assert!(text.lines().count() <= 25, "{text}");
    assert!(text.contains(" more (grpo check --all)\n"), "{text}");
}

#[test]
fn check_prints_the_speed_of_a_run_that_is_there() {
    let folder = folder(&format!("{CONFIG}run_dir: run\n"), DATA);
    let check = || out(&grpo(folder.path(), &["check", "run.yaml"]));
    assert!(!check().contains("Speed"), "{}", check());
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("config.json"), "{}").unwrap();
    let seconds = |sample: f64| format!("{{\"sample\": {sample}, \"score\": 0.5, \"train\": 3.5}}");
    let metrics =
        [1., 2.].map(|step| format!("{{\"step\": {step}, \"seconds\": {}}}\n", seconds(step)));
    fs::write(run.join("metrics.jsonl"), metrics.concat()).unwrap();
    let text = check();
    let speed = "Speed: 5.5 s per step, the mean over 2 steps in run.\n";
    assert!(text.contains(speed), "{text}");
}

/// Returns the part `name` in the memory plan, in MiB.
fn planned(printed: &str, name: &str) -> Option<usize> {
    let (_, rest) = printed.split_once(&format!(" {name} "))?;
    rest.split_once(" MiB")?.0.parse().ok()
}

#[test]
fn check_prints_the_memory_of_the_run() {
    let folder = folder(CONFIG, DATA);
    let check = |config: &str| {
        fs::write(folder.path().join("run.yaml"), config).unwrap();
        let checked = grpo(folder.path(), &["check", "run.yaml"]);
        let said = String::from_utf8_lossy(&checked.stderr);
        assert_eq!(checked.status.code(), Some(0), "{said}");
        out(&checked)
    };
    let whole = check(CONFIG);
    assert!(whole.contains("Memory: at most about "), "{whole}");
    assert!(whole.contains(" tokens and prompts of at most "), "{whole}");
    for part in ["weights", "optimizer", "gradients", "activations"] {
        assert!(planned(&whole, part).is_some(), "{part}: {whole}");
    }
    assert_eq!(planned(&whole, "critic"), None, "{whole}");
    if cfg!(target_os = "linux") {
        // The library of tokenizers alone takes more than a MiB.
        assert!(
            planned(&whole, "program and tokenizer") > Some(1),
            "{whole}"
        );
    }
    let gae = CONFIG.replace("preset: dapo", "adv_estimator: gae");
    let critic = check(&format!("{gae}training: {{critic: {{}}}}\n"));
    assert!(planned(&critic, "critic").is_some(), "{critic}");
}

#[test]
fn each_kind_of_error_has_its_exit_code() {
    let there = folder(CONFIG, DATA);
    fails(&grpo(there.path(), &[]), 2, "Usage");
    fails(&grpo(there.path(), &["chekc", "run.yaml"]), 2, "check");
    fails(
        &grpo(there.path(), &["check", "none.yaml"]),
        3,
        "none.yaml: cannot be read",
    );
    let wrong = folder(&CONFIG.replace("preset: dapo", "preset: dppo"), DATA);
    fails(
        &grpo(wrong.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:4: algorithm.preset",
    );
    let wrong = folder(CONFIG, "{\"question\": 7}\n{}\n");
    fails(&grpo(wrong.path(), &["check", "run.yaml"]), 4, "data.jsonl");
    let wrong = folder(CONFIG, &DATA.replace("3", "\"three\""));
    fails(
        &grpo(wrong.path(), &["check", "run.yaml"]),
        4,
        "data.jsonl:2: reward \"numeric\": column \"answer\": \"three\"",
    );
    fs::remove_dir_all(there.path().join("model")).unwrap();
    fails(
        &grpo(there.path(), &["check", "run.yaml"]),
        5,
        "model: there is no such file",
    );
}

#[test]
fn help_lists_commands_and_exit_codes() {
    let folder = folder(CONFIG, DATA);
    let help = out(&grpo(folder.path(), &["--help"]));
    for words in [
        "check",
        "completions",
        "push",
        "Exit codes:",
        "3  invalid configuration",
    ] {
        assert!(help.contains(words), "{words:?} in\n{help}");
    }
    let help = out(&grpo(folder.path(), &["check", "--help"]));
    assert!(help.contains("docs/configuration.md"), "{help}");
}

#[test]
fn completions_prints_a_script_for_each_shell() {
    let folder = folder(CONFIG, DATA);
    for (shell, words) in [
        ("bash", "complete -F _grpo"),
        ("zsh", "#compdef grpo"),
        ("fish", "complete -c grpo"),
    ] {
        let script = grpo(folder.path(), &["completions", shell]);
        assert!(out(&script).contains(words), "{shell}");
    }
}

#[test]
fn check_explains_each_key_of_a_roll_file() {
    let config = "\
pretrain: model
rollout_batch_size: 2
response_length: 8
actor_train:
  strategy_args: {strategy_name: deepspeed}
  data_args: {file_name: data.jsonl}
rewards: [{kind: numeric}]
";
    let folder = folder(config, DATA);
    let output = grpo(folder.path(), &["check", "--all", "run.yaml"]);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = out(&output);
    assert!(text.contains("used: prompts_per_step"), "{text}");
    assert!(
        text.contains("no meaning here: there are no strategies"),
        "{text}"
    );
}

/// Asserts that `check` and `train` refuse a configuration with exit code 3 and these words.
fn both_refuse(folder: &Path, config: &str, words: &str) {
    fs::write(folder.join("run.yaml"), config).unwrap();
    for command in ["check", "train"] {
        fails(&grpo(folder, &[command, "run.yaml"]), 3, words);
    }
    assert!(!folder.join("runs").exists());
}

#[test]
fn check_refuses_what_train_refuses() {
    let folder = folder(CONFIG, DATA);
    let path = folder.path();
    let with = |from: &str, to: &str| {
        assert!(CONFIG.contains(from));
        CONFIG.replace(from, to)
    };
    let reward = |reward: &str| with("{kind: numeric}", reward);
    for (config, words) in [
        (
            reward("{kind: program, command: [no-such-program]}"),
            "run.yaml:3: rewards[0].command: \"no-such-program\", must be a program that exists in PATH",
        ),
        (
            reward("{kind: program, command: [python3, reward.py]}"),
            "run.yaml:3: rewards[0].command: reward.py, must be a file that exists",
        ),
        (
            reward("{kind: program, command: [sh, a.sh], folder: none}"),
            "run.yaml:3: rewards[0].folder: none, must be a directory that exists",
        ),
        (
            reward("{kind: reward_model, path: none}"),
            "run.yaml:3: rewards[0].path: none, must be a directory that exists",
        ),
        (
            reward(
                "{kind: ensemble, judges: [{kind: numeric}, {kind: reward_model, path: model}]}",
            ),
            "run.yaml:3: rewards[0].judges[1].path: model, must be a reward model directory: ",
        ),
        (
            with("response_length: 8", "response_length: 24"),
            "run.yaml:4: algorithm.response_length: 24, must be at most 22: the model has 24 positions",
        ),
        (
            format!("{CONFIG}evaluation: {{sampler: {{max_new_tokens: 99}}}}\n"),
            "run.yaml:5: evaluation.sampler.max_new_tokens: 99, must be at most 22",
        ),
        (
            format!(
                "{CONFIG}training: {{adapters: {{rank: 2, alpha: 4, target_modules: [nose]}}}}\n"
            ),
            "run.yaml:5: training.adapters.target_modules: \"nose\", must be the end of the name of a linear map",
        ),
        (
            format!("{CONFIG}training: {{router_aux_loss_coef: 0.1}}\n"),
            "run.yaml:5: training.router_aux_loss_coef: 0.1, must be 0 for a model without experts",
        ),
        (
            format!("{CONFIG}training: {{router_replay: true}}\n"),
            "run.yaml:5: training.router_replay: true, must be false for a model without experts",
        ),
        (
            format!(
                "{CONFIG}training: {{router_replay: true}}\nrollout: {{engine: vllm, base_url: http://127.0.0.1:9}}\n"
            ),
            "run.yaml:5: training.router_replay: true, must be false unless rollout.engine is local",
        ),
        (
            format!("{CONFIG}optimizer: {{learning_rate: -1}}\n"),
            "run.yaml:5: optimizer.learning_rate: -1, must be finite and at least 0",
        ),
        (
            format!("{CONFIG}optimizer: {{weight_decay: -0.1}}\n"),
            "run.yaml:5: optimizer.weight_decay: -0.1, must be finite and at least 0",
        ),
        (
            format!("{CONFIG}optimizer: {{epsilon: -1e-8}}\n"),
            "run.yaml:5: optimizer.epsilon: -0.00000001, must be ",
        ),
        (
            format!("{CONFIG}optimizer: {{beta1: -0.1}}\n"),
            "run.yaml:5: optimizer.beta1: -0.1, must be ",
        ),
        (
            format!("{CONFIG}optimizer: {{beta2: 1}}\n"),
            "run.yaml:5: optimizer.beta2: 1, must be ",
        ),
        (
            format!("{CONFIG}training: {{adapters: {{rank: 0, alpha: 4}}}}\n"),
            "run.yaml:5: training.adapters.rank: 0, must be from 1 to ",
        ),
        (
            with(
                "preset: dapo",
                "difficulty_mask: true, difficulty_low_threshold: 0.9, difficulty_high_threshold: 0.1",
            ),
            "run.yaml:4: algorithm.difficulty_",
        ),
        (
            reward("{kind: regex, pattern: 'a(b'}"),
            "run.yaml:3: rewards[0].pattern: \"a(b\", must be a regular expression; character 2: a parenthesis is not closed\n",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: json}, {kind: regex, pattern: '[z'}]}"),
            "run.yaml:3: rewards[0].judges[1].pattern: \"[z\", must be a regular expression; character 1: a square bracket is not closed\n",
        ),
        (
            format!("{CONFIG}run_dir: model\n"),
            "run.yaml:1: model: model, must lie outside of run_dir, model",
        ),
        (
            format!("{CONFIG}run_dir: ''\n"),
            "run.yaml:5: run_dir: \"\"",
        ),
        (
            format!("{CONFIG}run_dir: ~/run\n"),
            "run.yaml:5: run_dir: ~/run, must name the home directory in full",
        ),
        (
            reward("{kind: regex, weight: 7, pattern: 7}"),
            "run.yaml:3: rewards[0].pattern: 7, must be a text\n",
        ),
        (
            reward("{kind: regx, pattern: regx}"),
            "run.yaml:3: rewards[0].kind: \"regx\", must be one of numeric, ",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: numeric, find: nowhere}]}"),
            "run.yaml:3: rewards[0].judges[0].find: \"nowhere\", must be one of auto, ",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: tags, tags: [a, a]}]}"),
            "run.yaml:3: rewards[0].judges[0].tags: \"a\", must be given once\n",
        ),
        (
            format!("{CONFIG}training: {{adapters: {{rank: 2}}}}\n"),
            "run.yaml:5: training.adapters.alpha: absent, must be given\n",
        ),
        (
            format!("{CONFIG}training: {{adapters: {{lora_r: 2}}}}\n"),
            "run.yaml:5: training.adapters.lora_r: unknown key; here it is adapters.rank\n",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: json}, {pattern: a}]}"),
            "run.yaml:3: rewards[0].judges[1].kind: absent, must be given\n",
        ),
        (
            reward("{kind: ensemble, judges: [json]}"),
            "run.yaml:3: rewards[0].judges[0]: \"json\", must be a mapping of keys\n",
        ),
        (
            format!("{CONFIG}optimizer: {{learning_rate: .inf}}\n"),
            "run.yaml:5: optimizer.learning_rate: .inf, must be finite\n",
        ),
        (
            with(
                "preset: dapo",
                "recipe: {advantage: {name: dr_grpo, gamma: 1}}",
            ),
            "run.yaml:4: algorithm.recipe.advantage.gamma: given, must be absent for dr_grpo",
        ),
        (
            format!("{CONFIG}training: {{learning_rate: 1}}\n"),
            "run.yaml:5: training.learning_rate: unknown key; here it is optimizer.learning_rate\n",
        ),
        (
            reward("{kind: regex, pattern: [a]}"),
            "run.yaml:3: rewards[0].pattern: a list, must be a text\n",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: json}, {kind: tags, tags: [a, [b]]}]}"),
            "run.yaml:3: rewards[0].judges[1].tags[1]: a list, must be a text\n",
        ),
        (
            reward("{kind: ensemble, combine: {weighted: [one]}, judges: [{kind: json}]}"),
            "run.yaml:3: rewards[0].combine.weighted[0]: \"one\", must be a number\n",
        ),
        (
            reward("{kind: ensemble, judges: [{kind: program, command: [sh, a.sh]}]}"),
            "run.yaml:3: rewards[0].judges[0].command: a.sh, must be a file that exists\n",
        ),
        (
            with("held_out_rows: 1", "held_out_rows: 0"),
            "run.yaml:2: data.held_out_rows: 0, must be at least 1\n",
        ),
        (
            with("train: data.jsonl, ", ""),
            "run.yaml:2: data.train: absent, must be a file of rows or several\n",
        ),
        (
            with("held_out_rows: 1", "held_out_rows: 1, held_out: data.jsonl"),
            "run.yaml:2: data.held_out_rows: given, must be absent with held_out\n",
        ),
        (
            with("held_out_rows: 1", "held_out_rows: 1, prompt: '{a'"),
            "run.yaml:2: data.prompt: \"{a\", must close each brace (two are one brace of the text)\n",
        ),
        (
            with(
                "preset: dapo",
                "recipe: {advantage: {name: pipeline, sequence: {epsilon: 0, normalize: {epsilon: -1}}}}",
            ),
            "run.yaml:4: algorithm.recipe.advantage.sequence.normalize.epsilon: -1, must be positive",
        ),
        (
            format!("{CONFIG}evaluation: {{pass_at: [1, 0]}}\n"),
            "run.yaml:5: evaluation.pass_at[1]: 0, must be from 1 to samples_per_prompt, 1\n",
        ),
        (
            format!("{CONFIG}evaluation: {{samples_per_prompt: 0}}\n"),
            "run.yaml:5: evaluation.samples_per_prompt: 0, must be at least 1\n",
        ),
        (
            with("rollout_batch_size: 2", "rollout_batch_size: 1e9"),
            "run.yaml:4: algorithm.rollout_batch_size: 1000000000.0, must be a whole number",
        ),
        (
            format!("{CONFIG}training: {{critic: {{learning_rate: 1e-5}}}}\n"),
            "run.yaml:5: training.critic.learning_rate: unknown key; here it is critic.optimizer.learning_rate\n",
        ),
        (
            with(
                "preset: dapo",
                "recipe: {advantage: {name: pipeline, gamma: null, tokens: {gamma: -1}}}",
            ),
            "run.yaml:4: algorithm.recipe.advantage.tokens.gamma: -1, must be from 0 to 1\n",
        ),
        (
            with(
                "preset: dapo",
                "recipe: {advantage: {name: pipeline, reward_weights: null, sequence: {reward_weights: [1, 2]}}}",
            ),
            "run.yaml:4: algorithm.recipe.advantage.sequence.reward_weights: 2 weights, must be one for each of 1 rewards\n",
        ),
        (
            format!("{CONFIG}training: {{critic: {{}}}}\n"),
            "run.yaml:5: training.critic: given, must be absent, as ",
        ),
        (
            with(
                "preset: dapo",
                "pg_variant: cispo, cispo_epsilon_high: 0.2, cispo_epsilon_low: 3",
            ),
            "run.yaml:4: algorithm.cispo_epsilon_low: 3, makes ratio_min -2, which must be an absolute ratio from 0 to 1\n",
        ),
        (
            format!("{CONFIG}threads: 100000\n"),
            "run.yaml:5: threads: 100000, must be at most 1024; their stacks take 195 GiB",
        ),
        (
            format!("{CONFIG}training: {{adapters: {{rank: 17, alpha: 4}}}}\n"),
            "run.yaml:5: training.adapters.rank: 17, must be at most 16, the width of the model; the adapters take ",
        ),
        (
            format!("{CONFIG}evaluation: {{samples_per_prompt: 2000000}}\n"),
            "run.yaml:5: evaluation.samples_per_prompt: 2000000, must make at most 1048576 completions; 2000000 completions of up to 8 tokens for each of 1 prompts take 610 MiB",
        ),
        (
            format!("{CONFIG}max_steps: 2000000000000\n"),
            "run.yaml:5: max_steps: 2000000000000, must be at most 1099511627776; with one byte each they take 2 TiB",
        ),
        (
            format!("{CONFIG}training: {{max_sampling_batches: 1000000000}}\n"),
            "run.yaml:5: training.max_sampling_batches: 1000000000, must take at most 1 TiB a step",
        ),
        (
            with("held_out_rows: 1", "held_out_rows: 2"),
            "run.yaml:2: data.held_out_rows: 2, must be less than the 2 rows of train",
        ),
        (
            with("preset: dapo", "preset: dapo, prompt_length: 1"),
            "run.yaml:4: algorithm.prompt_length: 1, must be at least 2",
        ),
    ] {
        both_refuse(path, &config, words);
    }
}

#[test]
fn the_key_of_a_wrong_value_is_found_among_many() {
    let keys: String = (0..40_000).map(|i| format!(", z{i}: 7")).collect();
    let reward = format!("{{kind: regex, pattern: 7{keys}}}");
    let folder = folder(&CONFIG.replace("{kind: numeric}", &reward), DATA);
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:3: rewards[0].pattern: 7, must be a text\n",
    );
}

#[test]
fn the_column_of_sample_weights_has_positive_numbers() {
    let config = format!("{CONFIG}sample_weight_column: weight\n");
    let rows = |second: &str| {
        format!(
            "{{\"prompt\": \"ab\", \"answer\": 2, \"weight\": \"1.5\"}}\n{{\"prompt\": \"cd\", \"answer\": 3{second}}}\n"
        )
    };
    // Either row may be held out.
    let config = config.replace(", held_out_rows: 1", "");
    let check = |second: &str| {
        let folder = folder(&config, &rows(second));
        grpo(folder.path(), &["check", "run.yaml"])
    };
    let accepted = check(", \"weight\": 2");
    assert_eq!(accepted.status.code(), Some(0), "{}", said(&accepted));
    for (second, found) in [
        ("", "null"),
        (", \"weight\": -1", "-1"),
        (", \"weight\": \"x\"", "\"x\""),
    ] {
        let words = format!(
            "data.jsonl:2: column \"weight\": {found}, must be a positive number (sample_weight_column)"
        );
        fails(&check(second), 4, &words);
    }
}

#[test]
fn errors_have_no_backtrace() {
    let folder = folder(
        &CONFIG.replace("preset: dapo", "preset: dapo, pg_clip: 7"),
        DATA,
    );
    fs::write(folder.path().join("model/config.json"), "{}").unwrap();
    for command in [
        &["check", "run.yaml"][..],
        &["train", "run.yaml"],
        &["sample", "model", "hello"],
        &["convert", "model", "other"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_grpo"))
            .current_dir(folder.path())
            .args(command)
            .env("RUST_BACKTRACE", "full")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(
            said.lines().count() <= 3 && !said.contains("backtrace"),
            "{said}"
        );
        assert!(!said.contains(".rs"), "{said}");
    }
}

#[test]
fn a_flat_page_of_rolls_keys_is_recognized() {
    let config = "\
model: model
data: {train: data.jsonl}
rewards: [{kind: numeric}]
rollout_batch_size: 2
num_return_sequences_in_group: 4
response_length: 8
adv_estimator: grpo
";
    let folder = folder(config, DATA);
    let output = grpo(folder.path(), &["check", "--all", "run.yaml"]);
    let text = out(&output);
    assert!(text.contains("used: prompts_per_step"), "{text}");
    assert!(text.contains(" = 8 completions"), "{text}");
    // An error names the key as the file has it.
    let wrong = config.replace("rollout_batch_size: 2", "rollout_batch_size: 0");
    fs::write(folder.path().join("run.yaml"), wrong).unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:4: rollout_batch_size: 0, must be at least 1",
    );
    // A key or two of the section at the top are a slip.
    let config = CONFIG.replace(
        "algorithm: {preset: dapo, rollout_batch_size: 2, ",
        "algorithm: {",
    );
    let config = format!("{config}rollout_batch_size: 2\n");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:5: rollout_batch_size: unknown key; here it is prompts_per_step",
    );
}

#[test]
fn a_share_of_the_steps_is_answered_with_the_number_of_steps() {
    let config = format!("{CONFIG}max_steps: 50\nschedule: {{warmup_steps: 0.1}}\n");
    let folder = folder(&config, DATA);
    let text = "schedule.warmup_steps: 0.1, must be a whole number, at least 0 (a share of max_steps: 0.1 of 50 is 5)\n";
    fails(&grpo(folder.path(), &["check", "run.yaml"]), 3, text);
}

/// Writes another trainer's file, and runs `grpo import` on it.
fn imports(folder: &Path, name: &str, text: &str) -> Output {
    fs::write(folder.join(name), text).unwrap();
    grpo(folder, &["import", name])
}

const VERL: &str = "\
set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=data.jsonl data.train_batch_size=4 data.max_response_length=8 \\
    actor_rollout_ref.model.path=model actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.rollout.n=5 +actor_rollout_ref.model.use_liger=True \\
    trainer.total_training_steps=7 trainer.save_freq=-1 $@
";

#[test]
fn an_imported_script_is_a_file_of_ours_once_it_has_rewards() {
    let folder = folder(CONFIG, DATA);
    let path = folder.path();
    let output = imports(path, "run_qwen.sh", VERL);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = out(&output);
    for words in [
        "# Imported from verl. Keys:\n",
        "  used: mini_batch_size = 10\n",
        "actor_rollout_ref.model.use_liger            no meaning here: it is about memory or speed\n",
        "# In verl: 20 completions per generation, at most 10 per update, updates per generation: 2; total: 7 generations, 14 updates.\n",
    ] {
        assert!(text.contains(words), "{words:?} in\n{text}");
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("not complete yet: run_qwen.sh"), "{said}");
    assert!(said.contains("rewards: none"), "{said}");
    fails(
        &grpo(path, &["check", "run_qwen.sh"]),
        3,
        "rewards: none, must be at least one",
    );

    let whole = format!("{text}rewards: [{{kind: numeric}}]\n");
    fs::write(path.join("run.yaml"), whole).unwrap();
    let checked = grpo(path, &["check", "run.yaml"]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    let steps = "Steps: 7, each with 4 prompts x 5 = 20 completions of at most 8 tokens";
    assert!(out(&checked).contains(steps), "{}", out(&checked));
    fails(
        &imports(path, "other.sh", "echo done\n"),
        3,
        "other.sh: a shell script without keys such as data.train_files=a.parquet or --train.batch_size 8, must be a file of YAML or TOML\n",
    );
    fails(
        &grpo(path, &["import", "run.yaml"]),
        3,
        "run.yaml: not a file of ROLL, TRL, verl, OpenRLHF or an earlier version",
    );
}

#[test]
fn a_file_of_an_earlier_version_is_printed_with_the_keys_of_this_one() {
    let folder = folder(CONFIG, DATA);
    let checked = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    let advice = "warning: the file has sections of an earlier version";
    assert!(said(&checked).contains(advice), "{}", said(&checked));

    let text = out(&grpo(folder.path(), &["import", "run.yaml"]));
    for line in ["preset: dapo", "prompts_per_step: 2", "  max_new_tokens: 8"] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    fs::write(folder.path().join("native.yaml"), text).unwrap();
    let again = grpo(folder.path(), &["check", "native.yaml"]);
    assert!(!said(&again).contains("warning"), "{}", said(&again));
    for start in ["Steps: ", "Algorithm: "] {
        let line = |output| {
            let text = out(output);
            let line = text.lines().find(|line| line.starts_with(start));
            line.expect(start).to_owned()
        };
        assert_eq!(line(&again), line(&checked));
    }
}

#[test]
fn check_prints_the_counts_of_an_imported_file_on_both_sides() {
    let config = "\
model_name_or_path: model
dataset_name: data.jsonl
num_generations: 4
max_completion_length: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 6
max_steps: 9
rewards: [{kind: numeric}]
";
    let folder = folder(config, DATA);
    let checked = grpo(folder.path(), &["check", "--all", "run.yaml"]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    let text = out(&checked);
    for side in ["In TRL", "Here"] {
        let counts = "24 completions per generation, at most 8 per update, updates per generation: 3; total: 3 generations, 9 updates";
        assert!(text.contains(&format!("# {side}: {counts}.\n")), "{text}");
    }
    let short = out(&grpo(folder.path(), &["check", "run.yaml"]));
    assert!(short.lines().count() <= 25, "{short}");
    assert!(
        short.contains("Imported from TRL. Keys used: 9; "),
        "{short}"
    );
}

#[test]
fn each_of_several_wrong_values_is_named_by_its_key() {
    let config = CONFIG.replace("preset: dapo", "pg_clip: 7");
    let config = format!("{config}optimizer: {{learning_rate: -1}}\n");
    let folder = folder(&config, DATA);
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:4: algorithm.pg_clip: 7, must be from 0 to 1\n",
    );
}

const ROLL: &str = "\
pretrain: model
response_length: 8
KEY
actor_train: {data_args: {file_name: data.jsonl}}
rewards: [{kind: numeric}]
";

/// A run without the key would learn something else.
#[test]
fn a_key_of_roll_that_changes_the_run_is_refused_unless_that_is_meant() {
    let folder = folder(CONFIG, DATA);
    let path = folder.path();
    for (key, reason) in [
        (
            "length_loss_weight: true",
            "samples are not weighted by length",
        ),
        ("is_pure_opd: true", "set teacher.model and recipe"),
        ("critic_warmup: 3", "it has no counterpart"),
        ("async_generation_ratio: 1", "set rollout.max_staleness"),
    ] {
        fs::write(path.join("run.yaml"), ROLL.replace("KEY", key)).unwrap();
        let name = key.split(':').next().unwrap();
        let words = format!("run.yaml:3: {name}: not supported: {reason}");
        for command in ["check", "train"] {
            fails(&grpo(path, &[command, "run.yaml"]), 3, &words);
        }
        let output = grpo(
            path,
            &["check", "--quiet", "--allow-unsupported", "run.yaml"],
        );
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let words = format!("warning: run.yaml:3: {name}: not supported and ignored: {reason}");
        assert!(said.contains(&words), "{said}");
    }
}

#[test]
fn a_key_that_roll_does_not_have_is_an_error() {
    let folder = folder(CONFIG, DATA);
    let path = folder.path();
    for (key, words) in [
        (
            "kl_loss_coeff: 0.1",
            "run.yaml:3: kl_loss_coeff: not supported: not a known key, did you mean `kl_loss_coef`?",
        ),
        (
            "actor_infer: {generating_args: {temprature: 0.5}}",
            "run.yaml:3: actor_infer.generating_args.temprature: not supported: not a known key, did you mean `temperature`?",
        ),
    ] {
        fs::write(path.join("run.yaml"), ROLL.replace("KEY", key)).unwrap();
        for options in [
            &["check", "run.yaml"][..],
            &["check", "--allow-unsupported", "run.yaml"],
        ] {
            fails(&grpo(path, options), 3, words);
        }
    }
}

/// One row out of two is held out, so the number of samples alone is within its bound.
#[test]
fn the_completions_of_an_evaluation_are_bounded() {
    let rows: String = (0..9)
        .map(|i| {
            format!(
                "{{\"prompt\": \"{}\", \"answer\": {i}}}\n",
                "a".repeat(i + 1)
            )
        })
        .collect();
    let config = CONFIG.replace("held_out_rows: 1", "held_out_rows: 4")
        + "evaluation: {samples_per_prompt: 300000}\n";
    let folder = folder(&config, &rows);
    for command in ["check", "train", "eval"] {
        fails(
            &grpo(folder.path(), &[command, "run.yaml"]),
            3,
            "run.yaml:5: evaluation.samples_per_prompt: 300000, must make at most 1048576 completions; 300000 completions of up to 8 tokens for each of 4 prompts take 366 MiB",
        );
    }
}

#[test]
fn check_refuses_a_model_without_whole_weights() {
    let folder = folder(CONFIG, DATA);
    let weights = folder.path().join("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for (bytes, words) in [
        (None, "model.safetensors"),
        (
            Some(&whole[..whole.len() - 4]),
            "bytes of tensors, must have",
        ),
        (Some(&whole[..99]), "a header of"),
    ] {
        match bytes {
            Some(bytes) => fs::write(&weights, bytes).unwrap(),
            None => fs::remove_file(&weights).unwrap(),
        }
        for command in ["check", "train"] {
            fails(&grpo(folder.path(), &[command, "run.yaml"]), 5, words);
        }
    }
    fs::write(&weights, &whole).unwrap();
    let config = folder.path().join("model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        text.replace("\"intermediate_size\": ", "\"intermediate_size\": 1"),
    )
    .unwrap();
    fails(&grpo(folder.path(), &["check", "run.yaml"]), 5, "mlp.");
}

#[test]
fn check_warns_of_prompts_that_are_left_out() {
    let data = format!("{DATA}{{\"prompt\": \"abcde\", \"answer\": 1}}\n");
    let config = CONFIG.replace("held_out_rows: 1}", "}");
    let folder = folder(
        &config.replace("preset: dapo", "preset: dapo, prompt_length: 3"),
        &data,
    );
    let output = grpo(folder.path(), &["check", "--quiet", "run.yaml"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("1 of 3 prompts are dropped: they have more than 3 tokens, up to 5"),
        "{said}"
    );
}

#[test]
fn a_wrong_option_of_sample_is_named() {
    let folder = crate::support::folder(CONFIG);
    for (option, value, words) in [
        (
            "--temperature",
            "-1",
            "--temperature: -1, must be finite and at least 0",
        ),
        ("--temperature", "nan", "--temperature: NaN, must "),
        ("--top-p", "0", "--top-p: 0, must "),
        ("--min-p", "-0.5", "--min-p: -0.5, must "),
        ("--max-new-tokens", "0", "--max-new-tokens: 0, must "),
        (
            "--max-new-tokens",
            "23",
            "--max-new-tokens: 23, must be at most 22: the model has 24 positions, and the prompt 2 tokens",
        ),
        ("--stop", "", "--stop: "),
    ] {
        fails(
            &grpo(folder.path(), &["sample", "model", "ab", option, value]),
            3,
            words,
        );
    }
}

/// Only the evaluation's completions are too long.
#[test]
fn eval_refuses_completions_longer_than_the_model() {
    let folder = folder(
        &format!("{CONFIG}evaluation: {{sampler: {{max_new_tokens: 99}}}}\n"),
        DATA,
    );
    fails(
        &grpo(folder.path(), &["eval", "run.yaml"]),
        3,
        "run.yaml:5: evaluation.sampler.max_new_tokens: 99, must be at most 22",
    );
}

#[test]
fn messages_about_syntax_have_no_words_of_libraries() {
    let folder = folder(CONFIG, DATA);
    for (text, words) in [
        ("model: [a\n", ":1: not valid YAML: a bracket is not closed"),
        (
            "a: b: c\n",
            ":1: not valid YAML: a second colon on a line, or a wrong indentation",
        ),
        (
            "a: 1\n---\nb: 2\n",
            ":3: not valid YAML: a second document begins, must be one",
        ),
        (
            "? [a]\n: b\n",
            ":1: not valid YAML: a key is a list or a mapping, must be a text",
        ),
        (
            "null: 3\n",
            ":1: not valid YAML: a key is null, must be a text",
        ),
        (
            "a: &x [*x]\n",
            ":1: not valid YAML: an alias is part of its own value",
        ),
        ("a: *x\n", ":1: not valid YAML: an alias has no anchor"),
        (
            "a: !!int x\n",
            ":1: not valid YAML: a value must be of the type of its tag",
        ),
        ("a: .nan\n", ":1: a: .nan, must be finite"),
        ("a: {b: [1, -.inf]}\n", ":1: a.b[1]: -.inf, must be finite"),
        (
            "a.b: 1\n",
            ":1: key \"a.b\", must have no dots and brackets in it, as in a: {b: ...}\n",
        ),
        (
            "a.b.c: 1\n",
            ":1: key \"a.b.c\", must have no dots and brackets in it, as in a: {b: {c: ...}}\n",
        ),
        (
            "a[0].b: 1\n",
            ":1: key \"a[0].b\", must have no dots and brackets in it\n",
        ),
    ] {
        fs::write(folder.path().join("run.yaml"), text).unwrap();
        fails(&grpo(folder.path(), &["check", "run.yaml"]), 3, words);
    }
    fs::write(folder.path().join("run.yaml"), b"a: \xff\n").unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml: must be a text in UTF-8\n",
    );
    for (text, words) in [
        (
            "a = [1\n",
            ":1: not valid TOML: column 7: a bracket is not closed\n",
        ),
        ("a = 1\na = 2\n", ":2: a: given twice, must be given once\n"),
        (
            "run_dir = runs/a\n",
            ":1: not valid TOML: column 11: there must be a value: true, false, a number, or a text in quotes\n",
        ),
        (
            "x =\n",
            ":1: not valid TOML: column 4: there must be a value",
        ),
        (
            "x\n",
            ":1: not valid TOML: column 2: a key must be followed by = and a value\n",
        ),
        (
            "é 1\n",
            ":1: not valid TOML: column 3: a key must be followed by = and a value\n",
        ),
        (
            "x = ['a' 'b']\n",
            ":1: not valid TOML: column 10: a comma is missing\n",
        ),
        (
            "x = {a = 1,, b = 2}\n",
            ":1: not valid TOML: column 12: a comma too many\n",
        ),
        (
            "x = 'a\n",
            ":1: not valid TOML: column 7: a text in quotes that is not closed",
        ),
        (
            "x = \"\\q\"\n",
            ":1: not valid TOML: column 7: a wrong escape in a text\n",
        ),
        (
            "[a]]\n",
            ":1: not valid TOML: column 4: a key and its value must be on one line",
        ),
        ("x = 1_\n", ":1: not valid TOML: column 6: a wrong number\n"),
        (
            "x = 99999999999999999999\n",
            ":1: 99999999999999999999, must be a whole number below 2^63\n",
        ),
        (
            "x = 2020-13-01\n",
            ":1: not valid TOML: column 5: a wrong date\n",
        ),
    ] {
        fs::write(folder.path().join("run.toml"), text).unwrap();
        fails(&grpo(folder.path(), &["check", "run.toml"]), 3, words);
    }
    fs::write(folder.path().join("run.yaml"), CONFIG).unwrap();
    fs::write(folder.path().join("data.jsonl"), "{\"prompt\" \"a\"}\n").unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        4,
        "data.jsonl:1: must be a JSON object: there must be a colon at column 11",
    );
}

#[test]
fn messages_about_a_model_have_no_words_of_libraries() {
    let folder = folder(CONFIG, DATA);
    for (file, from, to, words) in [
        ("config.json", "16,", "", "config.json: there must be "),
        (
            "config.json",
            "\"hidden_size\": 16",
            "\"hidden_size\": -4",
            "config.json: hidden_size: -4, must be a whole number, at least 0\n",
        ),
        (
            "config.json",
            "vocab_size",
            "vocabulary",
            // An absent key has the value of transformers.
            "tensor lm_head.weight: shape [6, 16], must be [32000, 16]\n",
        ),
        (
            "tokenizer.json",
            ":",
            "",
            "tokenizer.json: there must be a colon at line ",
        ),
        (
            "tokenizer.json",
            "WordLevel",
            "Words",
            "tokenizer.json: must be a file of Hugging Face tokenizers; its model has the type \"Words\"\n",
        ),
    ] {
        let path = folder.path().join("model").join(file);
        let whole = fs::read_to_string(&path).unwrap();
        let changed = whole.replacen(from, to, 1);
        assert_ne!(whole, changed);
        fs::write(&path, changed).unwrap();
        fails(&grpo(folder.path(), &["check", "run.yaml"]), 5, words);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn sample_refuses_an_empty_prompt() {
    let folder = crate::support::folder(CONFIG);
    for prompt in ["", "  \n"] {
        fails(
            &grpo(folder.path(), &["sample", "model", prompt]),
            3,
            "the prompt is empty",
        );
    }
}

#[test]
fn check_refuses_content_that_is_not_text() {
    let content =
        r#"[{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": "a.png"}]"#;
    let row = format!(r#"{{"messages": [{{"role": "user", "content": {content}}}], "answer": 1}}"#);
    let beside = r#"{"prompt": "ab", "images": ["a.png"], "answer": 1}"#;
    for (row, words) in [
        (
            row.as_str(),
            ": column \"messages\": message 0: content: a part of type \"image_url\", must be text",
        ),
        (beside, ": content: column \"images\", must be absent"),
    ] {
        let folder = folder(CONFIG, &format!("{row}\n{row}\n"));
        for command in ["check", "train"] {
            fails(&grpo(folder.path(), &[command, "run.yaml"]), 3, words);
        }
    }
}

#[test]
fn a_model_that_is_not_there_has_a_hint() {
    let folder = folder(CONFIG, DATA);
    for (model, words) in [
        (
            "Qwen2.5-0.5B",
            "there is no such file; a model of the hub must be named ORG/NAME",
        ),
        (
            "~/m",
            "there is no such file; the home directory must be named in full, ~ is not replaced",
        ),
        ("x/y/z", "there is no such file\n"),
        (
            "adapters",
            "loading adapters: has adapters and no model; merge them",
        ),
    ] {
        fs::create_dir_all(folder.path().join("adapters")).unwrap();
        fs::write(folder.path().join("adapters/adapter_config.json"), "{}").unwrap();
        let output = grpo(folder.path(), &["sample", model, "a"]);
        assert_eq!(output.status.code(), Some(5), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}

#[test]
fn more_threads_than_cores_and_settings_without_an_effect_are_warnings() {
    let config = CONFIG.replace("threads: 1\n", "");
    let config = format!("{config}threads: 1024\noptimizer: {{learning_rate: 0}}\n");
    let folder = folder(&config, DATA);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    for words in [
        "WARN threads: 1024, and this process has ",
        "WARN optimizer.learning_rate: 0, so the policy does not change",
    ] {
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}
