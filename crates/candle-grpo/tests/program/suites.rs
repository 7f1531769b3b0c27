//! `grpo eval` with suites, and comparisons.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo::config::SuiteConfig;
use candle_grpo::suite::{PromptResult, read_rows};
use candle_grpo::train::Dataset;
use candle_grpo::train::data::Question;
use candle_grpo::train::rewards::{CodeReward, MathReward, RewardFunction, RewardKind, Sample};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{grpo, lines, said, sample, succeeds, write_long_model};

const SUITE: &str = "
data: {held_out: letters.jsonl, prompt: '{word}'}
id: word
rewards: [{kind: exact, column: answer}]
evaluation: {samples_per_prompt: 4, sampler: {max_new_tokens: 1, temperature: 1}}
";

/// A folder with two models and a suite.
pub(crate) fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_long_model(&path.join("a"), "abcde", 24, 3);
    write_long_model(&path.join("b"), "abcde", 24, 4);
    let words = ["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"];
    let rows: String = words
        .iter()
        .map(|word| json!({"word": word, "answer": &word[..1]}).to_string() + "\n")
        .collect();
    fs::write(path.join("letters.jsonl"), rows).unwrap();
    fs::write(path.join("letters.yaml"), SUITE).unwrap();
    folder
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn near(found: &Value, expected: f64) {
    let found = found.as_f64().unwrap();
    assert!((found - expected).abs() < 1e-9, "{found} {expected}");
}

#[test]
fn a_suite_reports_the_metrics_of_its_completions() {
    let folder = folder();
    let path = folder.path();
    let suite = ["eval", "a", "--suite", "letters.yaml"];
    let printed = succeeds(
        path,
        &[&suite[..], &["--pass-at", "1,2", "--out", "results"]].concat(),
    );
    for words in [
        "pass@1 [95%]",
        "pass@2 [95%]",
        "maj@2 [95%]",
        "truncated",
        "letters",
    ] {
        assert!(printed.contains(words), "{printed}");
    }
    let results: Vec<PromptResult> = lines(&path.join("results/letters.jsonl"))
        .into_iter()
        .map(|line| serde_json::from_value(line).unwrap())
        .collect();
    assert_eq!(results.len(), 10);
    let summary = &json_of(&path.join("results/summary.json"))["suites"][0];
    let (mut first, mut second, mut majority, mut tokens) = (0., 0., 0., 0.);
    for result in &results {
        assert_eq!(result.columns["word"], result.id.as_str());
        assert_eq!(result.samples.len(), 4);
        let passes: Vec<f64> = result
            .samples
            .iter()
            .map(|sample| f64::from(u8::from(sample.passes)))
            .collect();
        first += passes.iter().sum::<f64>() / 4. / 10.;
        for i in 0..4 {
            let sample = &result.samples[i];
            assert_eq!(sample.passes, sample.completion == result.columns["answer"]);
            tokens += sample.response_length as f64 / 40.;
            for j in 0..i {
                second += passes[i].max(passes[j]) / 6. / 10.;
                // The answer of one of two completions is drawn, unless they agree.
                majority += (passes[i] + passes[j]) / 2. / 6. / 10.;
            }
        }
        // Empty completions are equal, too.
        for (i, sample) in result.samples.iter().enumerate() {
            let equal = |other: &usize| result.samples[*other].completion == sample.completion;
            assert_eq!(sample.vote, (0..=i).find(equal));
        }
    }
    let metrics = &summary["metrics"];
    near(&metrics["pass@1"]["value"], first);
    near(&metrics["pass@2"]["value"], second);
    near(&metrics["maj@2"]["value"], majority);
    near(&summary["response_length"], tokens);
    assert_eq!(metrics["pass@1"]["interval"], "student_t");
    assert!(first > 0. && first < 1.);

    // The same seed gives the same answers, and replaces the results of this command.
    let before = fs::read(path.join("results/letters.jsonl")).unwrap();
    succeeds(
        path,
        &[&suite[..], &["--pass-at", "1,2", "--out", "results"]].concat(),
    );
    assert_eq!(
        fs::read(path.join("results/letters.jsonl")).unwrap(),
        before
    );
    succeeds(
        path,
        &[&suite[..], &["--seed", "1", "--out", "other"]].concat(),
    );
    assert_ne!(fs::read(path.join("other/letters.jsonl")).unwrap(), before);
    // One answer without a distribution is the likeliest.
    let one = [
        "-n",
        "1",
        "--temperature",
        "0",
        "--out",
        "one",
        "--max-prompts",
        "3",
    ];
    succeeds(path, &[&suite[..], &one].concat());
    let summary = &json_of(&path.join("one/summary.json"))["suites"][0];
    assert_eq!(
        (&summary["prompts"], &summary["sampler"]["greedy"]),
        (&json!(3), &json!(true))
    );
    assert_eq!(summary["metrics"]["pass@1"]["interval"], "wilson");
}

#[test]
fn two_results_are_compared_by_the_ids_of_their_prompts() {
    let folder = folder();
    let path = folder.path();
    for model in ["a", "b"] {
        let out = format!("results-{model}");
        succeeds(
            path,
            &["eval", model, "--suite", "letters.yaml", "--out", &out],
        );
    }
    let of_results = [
        "eval",
        "--compare",
        "results-a",
        "results-b",
        "--out",
        "results",
    ];
    let printed = succeeds(path, &of_results);
    assert!(
        printed.contains("paired_t") && printed.contains("B - A"),
        "{printed}"
    );
    let of_models = [
        "eval",
        "--compare",
        "a",
        "b",
        "--suite",
        "letters.yaml",
        "--out",
        "models",
    ];
    succeeds(path, &of_models);
    let comparison = json_of(&path.join("results/comparison.json"));
    assert_eq!(
        comparison["suites"],
        json_of(&path.join("models/comparison.json"))["suites"]
    );
    assert_eq!(
        fs::read(path.join("models/b/letters.jsonl")).unwrap(),
        fs::read(path.join("results-b/letters.jsonl")).unwrap()
    );
    // In another order, and with a prompt less.
    let file = path.join("results-b/letters.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    let mut reversed: Vec<&str> = text.lines().rev().collect();
    fs::write(path.join("b.jsonl"), reversed.join("\n") + "\n").unwrap();
    succeeds(
        path,
        &[
            "eval",
            "--compare",
            "results-a",
            "b.jsonl",
            "--out",
            "results",
        ],
    );
    let again = json_of(&path.join("results/comparison.json"));
    assert_eq!(again["suites"], comparison["suites"]);
    reversed.pop();
    fs::write(path.join("b.jsonl"), reversed.join("\n") + "\n").unwrap();
    let output = grpo(path, &["eval", "--compare", "results-a", "b.jsonl"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(
        said(&output).contains("1 prompts in A and 0 in B have no pair"),
        "{}",
        said(&output)
    );
}

#[test]
fn results_of_other_prompts_and_settings_are_compared_with_a_warning() {
    let folder = folder();
    let path = folder.path();
    let evaluate = |more: &[&str], out: &str| {
        let arguments = ["eval", "a", "--suite", "letters.yaml", "--out", out];
        succeeds(path, &[&arguments[..], more].concat());
    };
    let warnings = |a: &str, b: &str| -> Vec<String> {
        let output = grpo(path, &["eval", "--compare", a, b]);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        let said = said(&output);
        let lines = said.lines().filter(|line| line.starts_with("warning: "));
        lines.map(str::to_owned).collect()
    };
    evaluate(&[], "plain");
    evaluate(&["--seed", "5"], "seed");
    assert_eq!(warnings("plain", "seed"), Vec::<String>::new());
    evaluate(&["--temperature", "0.5", "-n", "2"], "colder");
    assert_eq!(
        warnings("plain", "colder"),
        [
            "warning: suite letters: 10 of 10 pairs have different answer counts in A and B",
            "warning: suite letters: A and B have different settings: temperature 1.0 and 0.5",
        ]
    );
    let suite = fs::read_to_string(path.join("letters.yaml")).unwrap();
    fs::write(
        path.join("letters.yaml"),
        suite.replace("{word}", "ab{word}"),
    )
    .unwrap();
    evaluate(&[], "other");
    assert_eq!(
        warnings("plain", "other"),
        ["warning: suite letters: 10 of 10 pairs have different prompt texts in A and B"]
    );
    // Without an id, equal questions are counted.
    let rows = fs::read_to_string(path.join("letters.jsonl")).unwrap();
    let first = rows.lines().next().unwrap();
    fs::write(path.join("letters.jsonl"), format!("{rows}{first}\n")).unwrap();
    fs::write(path.join("letters.yaml"), suite.replace("id: word\n", "")).unwrap();
    let output = grpo(path, &["eval", "a", "--suite", "letters.yaml"]);
    let words = "suite letters: 1 of 11 rows repeat an earlier question, and each counts";
    assert!(said(&output).contains(words), "{}", said(&output));
}

#[test]
fn wrong_arguments_are_named_before_the_model_is_loaded() {
    let folder = folder();
    let path = folder.path();
    fs::write(path.join("mine.txt"), "mine\n").unwrap();
    fs::create_dir(path.join("kept")).unwrap();
    fs::write(path.join("kept/summary.json"), "{\"mine\": 1}\n").unwrap();
    fs::write(
        path.join("double.jsonl"),
        "{\"word\": \"a\", \"answer\": \"a\"}\n".repeat(2),
    )
    .unwrap();
    fs::write(path.join("double.yaml"), SUITE.replace("letters", "double")).unwrap();
    for (arguments, code, words) in [
        ("a --suite gsm8", 3, "did you mean `gsm8k`?"),
        ("a --suite none.yaml", 3, "none.yaml: cannot be read"),
        (
            "a --suite gsm8k --data .",
            4,
            "suite gsm8k: ./gsm8k/test.jsonl is not a file",
        ),
        (
            "a --suite svamp",
            4,
            "svamp/SVAMP.json is not a file; pass its data directory with --data",
        ),
        (
            "a --suite letters.yaml,letters.yaml",
            3,
            "letters is given twice",
        ),
        (
            "a --suite letters.yaml --pass-at 5",
            3,
            "--pass-at: 5, must be from 1 to the 4",
        ),
        (
            "a --suite letters.yaml --temperature 0",
            3,
            "--temperature: 0, must be above 0",
        ),
        (
            "a --suite letters.yaml --max-new-tokens 22",
            3,
            "--max-new-tokens: 22, must be at most 21",
        ),
        (
            "a --suite letters.yaml --out mine.txt",
            3,
            "mine.txt: is not a directory",
        ),
        (
            "a --suite letters.yaml --out kept",
            3,
            "summary.json: exists already",
        ),
        (
            "a --suite double.yaml",
            4,
            "double.jsonl:2: column \"word\": \"a\", which is also the id of double.jsonl:1",
        ),
        ("none --suite letters.yaml", 5, "none"),
        (
            "letters.yaml --temperature 1",
            3,
            "must be absent without --suite",
        ),
        ("letters.yaml --samples 3", 2, "--suite"),
        ("--compare a b", 3, "a model needs --suite"),
        (
            "--compare none.jsonl letters.jsonl",
            4,
            "none.jsonl: is missing",
        ),
        (
            "--compare letters.jsonl letters.jsonl",
            4,
            "letters.jsonl:1:",
        ),
        ("a --compare a b", 2, "cannot be used with"),
        ("", 2, "required"),
    ] {
        let all: Vec<&str> = ["eval"]
            .into_iter()
            .chain(arguments.split_whitespace())
            .collect();
        let output = grpo(path, &all);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments}: {}",
            said(&output)
        );
        assert!(
            said(&output).contains(words),
            "{arguments}: {}",
            said(&output)
        );
    }
    assert_eq!(
        fs::read_to_string(path.join("kept/summary.json")).unwrap(),
        "{\"mine\": 1}\n"
    );
}

/// The folder with GSM8K and SVAMP, if the environment names it.
fn published() -> Option<PathBuf> {
    let folder = std::env::var_os("CANDLE_GRPO_DATA").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: CANDLE_GRPO_DATA names no directory with gsm8k/ and svamp/");
    }
    folder
}

#[test]
fn the_right_answers_of_gsm8k_and_svamp_pass() {
    let Some(folder) = published() else { return };
    for (name, count) in [("gsm8k", 1319), ("svamp", 1000)] {
        let suite = SuiteConfig::find(name).unwrap();
        let rows = read_rows(&suite, Some(&folder), |path| Ok(path.to_path_buf())).unwrap();
        assert_eq!(rows.len(), count);
        let RewardKind::Math(reward) = &suite.rewards[0].kind else {
            panic!("{:?}", suite.rewards[0].kind);
        };
        for row in &rows {
            check_answer(reward, &row.columns);
        }
    }
}

/// Checks that the reward finds a GSM8K or SVAMP answer in each usual form.
fn check_answer(reward: &MathReward, row: &Value) {
    let answer = match (&row["Answer"], row["answer"].as_str()) {
        (Value::Number(number), _) => number.as_f64().unwrap(),
        (_, Some(text)) => {
            let (_, last) = text.rsplit_once("####").unwrap();
            last.trim().replace(',', "").parse().unwrap()
        }
        _ => panic!("{row}"),
    };
    for (written, expected) in [
        (format!("So it is $\\boxed{{{answer}}}$."), true),
        (format!("1 + 1 = 2.\nThe answer is {answer}."), true),
        (format!("#### {answer}"), true),
        (format!("\\boxed{{{}}}", answer + 1.), false),
        (String::new(), false),
    ] {
        assert_eq!(
            reward.matches(&written, row).unwrap(),
            expected,
            "{written} {row}"
        );
    }
}

#[test]
fn gsm8k_and_svamp_are_evaluated_from_their_files() {
    let Some(data) = published() else { return };
    let texts: String = ["gsm8k/test.jsonl", "svamp/SVAMP.json"]
        .map(|file| fs::read_to_string(data.join(file)).unwrap())
        .concat();
    let mut alphabet: BTreeSet<char> = texts.chars().collect();
    alphabet.extend(('!'..='~').chain(['\n', ' ', '\u{2019}', '\u{a3}', '\u{20ac}']));
    let alphabet: String = alphabet.into_iter().collect();
    let folder = tempfile::tempdir().unwrap();
    write_long_model(&folder.path().join("model"), &alphabet, 2048, 3);
    let data = data.to_str().unwrap();
    let printed = succeeds(
        folder.path(),
        &[
            "eval",
            "model",
            "--suite",
            "gsm8k,svamp",
            "--data",
            data,
            "--max-prompts",
            "6",
            "--max-new-tokens",
            "4",
            "-n",
            "2",
            "--out",
            "results",
        ],
    );
    assert!(
        printed.contains("gsm8k") && printed.contains("svamp"),
        "{printed}"
    );
    let results = lines(&folder.path().join("results/svamp.jsonl"));
    assert_eq!(results.len(), 6);
    assert_eq!(results[0]["id"], "chal-1");
    let summary = json_of(&folder.path().join("results/summary.json"));
    assert_eq!(summary["suites"][0]["truncated"], 1.);
    assert_eq!(summary["suites"][0]["metrics"]["maj@2"]["value"], 0.);
}

#[test]
fn multiple_choice_suites_list_their_choices() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let write = |name: &str, text: &str| {
        let file = path.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    let row = json!({"question_id": 70, "question": "Which?", "options": ["x", "y", "z"], "answer": "C", "answer_index": 2});
    write("mmlu_pro/test.jsonl", &row.to_string());
    let columns = "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3";
    write(
        "gpqa/gpqa_diamond.csv",
        &format!("{columns}\nrec1,\"What, and why?\",\"good\n\",bad,worse,worst\n"),
    );
    for (name, start, right) in [
        ("mmlu_pro", "Which?\nA) x\nB) y\nC) z\n", "z"),
        ("gpqa_diamond", "What, and why?\nA) ", "good"),
    ] {
        let suite = SuiteConfig::find(name).unwrap();
        let rows = read_rows(&suite, Some(path), |path| Ok(path.to_path_buf())).unwrap();
        let template = Dataset::without_rows(&suite.data).unwrap();
        let question = template.question(&rows[0]).unwrap();
        let Question::Messages(messages) = &question else {
            panic!("{question:?}");
        };
        let text = messages[0]["content"].as_str().unwrap();
        assert!(text.starts_with(start), "{text}");
        let RewardKind::MultipleChoice(reward) = &suite.rewards[0].kind else {
            panic!("{:?}", suite.rewards[0].kind);
        };
        let choices = rows[0].columns["choices"].as_array().unwrap();
        let place = choices.iter().position(|choice| choice == right).unwrap();
        for (at, letter) in ('A'..='Z').take(choices.len()).enumerate() {
            let answer = format!("So the answer is {letter}.");
            let is_right = reward.matches(&answer, &rows[0].columns).unwrap();
            assert_eq!(is_right, at == place, "{answer} {}", rows[0].columns);
        }
    }
}

/// The lines of a published file, if the environment names a directory that has it.
fn published_lines(name: &str) -> Option<Vec<Value>> {
    let folder = std::env::var_os("CANDLE_GRPO_DATA").map(PathBuf::from);
    let file = folder.map(|folder| folder.join(name));
    match file.filter(|file| file.is_file()) {
        Some(file) => Some(lines(&file)),
        None => {
            eprintln!("skipped: CANDLE_GRPO_DATA names no directory with {name}");
            None
        }
    }
}

/// The responses of GPT-4 that IFEval publishes, and what its own program says of each instruction:
/// `eval_results_strict.jsonl`, which `evaluation_main.py` writes.
#[test]
fn instructions_are_followed_as_ifeval_says() {
    let (Some(rows), Some(results)) = (
        published_lines("ifeval/input_data.jsonl"),
        published_lines("ifeval/eval_results_strict.jsonl"),
    ) else {
        return;
    };
    let suite = SuiteConfig::find("ifeval").unwrap();
    let RewardKind::Instructions(reward) = &suite.rewards[0].kind else {
        panic!("{:?}", suite.rewards[0].kind);
    };
    let (mut differ, mut all, mut right, mut theirs) = (Vec::new(), 0, 0, 0);
    for result in &results {
        let row = rows
            .iter()
            .find(|row| row["prompt"] == result["prompt"])
            .unwrap();
        let response = result["response"].as_str().unwrap();
        let expected = result["follow_instruction_list"].as_array().unwrap();
        let found = reward.expected(row).unwrap();
        for ((instruction, expected), name) in found
            .iter()
            .zip(expected)
            .zip(row["instruction_id_list"].as_array().unwrap())
        {
            all += 1;
            if json!(instruction.is_followed(response)) != *expected {
                differ.push((row["key"].clone(), name.clone(), expected.clone()));
            }
        }
        right += usize::from(reward.compute(response, row).unwrap() == 1.);
        theirs += usize::from(result["follow_all_instructions"] == true);
    }
    eprintln!(
        "{right} and {theirs} of {} responses; {} of {all} instructions differ: {differ:?}",
        results.len(),
        differ.len()
    );
    // Sentences and languages are found by other rules than those of NLTK and langdetect.
    assert!(differ.len() * 50 <= all, "{differ:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn solutions_of_humaneval_pass_and_others_do_not() {
    let Some(rows) = published_lines("humaneval/HumanEval.jsonl") else {
        return;
    };
    let suite = SuiteConfig::find("humaneval").unwrap();
    let RewardKind::Code(config) = &suite.rewards[0].kind else {
        panic!("{:?}", suite.rewards[0].kind);
    };
    let reward = CodeReward::new(config.clone()).unwrap();
    let scores = |program: &dyn Fn(&Value) -> String| {
        let texts: Vec<String> = rows.iter().map(program).collect();
        let samples: Vec<Sample<'_>> = rows
            .iter()
            .zip(&texts)
            .enumerate()
            .map(|(group, (row, completion))| sample(row, completion, group))
            .collect();
        let scores = reward.score(&samples).unwrap();
        scores
            .iter()
            .map(|score| score.value().unwrap())
            .collect::<Vec<f32>>()
    };
    let text = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    let block = |program: String| format!("Here it is:\n```python\n{program}\n```\n");
    let right = scores(&|row| block(text(row, "prompt") + &text(row, "canonical_solution")));
    assert_eq!(right.iter().position(|score| *score != 1.), None);
    // A function without a result.
    let wrong = scores(&|row| block(text(row, "prompt") + "    return None\n"));
    assert_eq!(wrong.iter().position(|score| *score != 0.), None);
}
