//! Pages about runs.

use std::fs;
use std::path::Path;
use std::process::Command;

use candle_grpo::report::{Run, report_html};
use serde_json::{Value, json};

/// Writes a run with that many steps, whose answers contain HTML.
fn run(folder: &Path, steps: usize, learning_rate: f64) {
    fs::create_dir_all(folder).unwrap();
    let config = json!({"optimizer": {"learning_rate": learning_rate}, "prompts_per_step": 8});
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut metrics = String::new();
    for step in 1..=steps {
        let share = step as f64 / steps as f64;
        let skipped = step % 7 == 0;
        let mut line = json!({
            "step": step, "skipped": skipped, "reward_mean": share, "reward_std": 0.4,
            "group_reward_quantiles": [0., 0.2, share, 0.9, 1.], "constant_groups": 0.1, "truncated": 0.2,
            "response_length": 12.5, "seconds": {"sample": 1.5, "score": 0.1, "train": 3.},
        });
        if !skipped {
            for (name, value) in [
                ("kl", 0.01),
                ("entropy", 0.5),
                ("clip_fraction", 0.1),
                ("clip_fraction_low", 0.04),
                ("clip_fraction_high", 0.06),
                ("ratio_mean", 1.),
                ("ratio_min", 0.8),
                ("ratio_max", 1.3),
                ("grad_norm", 2.),
                ("learning_rate", learning_rate),
            ] {
                line[name] = json!(value * (1. + share));
            }
        }
        metrics += &format!("{line}\n");
    }
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    let mut samples = String::new();
    for (step, completion, reward) in [(0, "<script>alert(1)</script>", 0.), (steps, " 42", 1.)] {
        for prompt in ["40 + 2 =", "<b>6 * 7</b> ="] {
            let line = json!({"step": step, "prompt": prompt, "completion": completion, "reward": reward, "response_length": 2, "finish_reason": "stop_token"});
            samples += &format!("{line}\n");
        }
    }
    fs::write(folder.join("samples.jsonl"), samples).unwrap();
    let evaluations = [0, steps]
        .map(|step| json!({"step": step, "reward_mean": 0.5, "pass_at_4": 0.7}).to_string());
    fs::write(folder.join("evaluations.jsonl"), evaluations.join("\n")).unwrap();
}

#[test]
fn the_page_shows_every_chart_and_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let folders = [("slow", 1e-6), ("fast", 1e-5)].map(|(name, rate)| {
        let path = folder.path().join(name);
        run(&path, 20, rate);
        path
    });
    let page = report_html(&folders.map(|path| Run::read(&path).unwrap()));
    for title in [
        "Reward",
        "Evaluation",
        "Reward over groups",
        "KL to the reference",
        "Entropy",
        "Clip fractions",
        "Ratio",
        "Gradient norm",
        "Length",
        "Constant groups and truncated completions",
        "Time",
        "Learning rate",
    ] {
        assert!(page.contains(&format!("<b>{title}</b>")), "{title}");
    }
    assert_eq!(page.matches("<svg ").count(), 12);
    assert_eq!(
        page.matches("<svg ").count(),
        page.matches("</svg>").count()
    );
    // Two runs, of which every chart draws both.
    for class in ["class=\"run0\"", "class=\"run1\""] {
        assert!(page.matches(class).count() >= 12, "{class}");
    }
    assert!(!page.contains("http") && !page.contains("<script") && !page.contains("<b>6"));
    assert!(page.contains("&lt;script&gt;alert(1)") && page.contains("&lt;b&gt;6 * 7"));
    // Settings in which they differ come before those that are the same.
    let different = page.find("optimizer.learning_rate").unwrap();
    assert!(different < page.find("prompts_per_step").unwrap());
    assert!(!page.contains("NaN") && !page.contains("inf,"));
}

#[test]
fn answers_stand_beside_those_to_the_same_prompt() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 3, 1e-5);
    let run = Run::read(folder.path()).unwrap();
    let pairs = run.before_and_after();
    assert_eq!(pairs.len(), 2);
    for (before, after) in pairs {
        assert_eq!(before.prompt, after.prompt);
        assert_eq!((before.step, after.step), (0, 3));
        assert_eq!((before.reward, after.reward), (Some(0.), Some(1.)));
    }
}

#[test]
fn a_torn_last_line_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 3, 1e-5);
    let metrics = folder.path().join("metrics.jsonl");
    let whole = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, format!("{whole}{{\"step\": 4, \"rew")).unwrap();
    let run = Run::read(folder.path()).unwrap();
    assert_eq!((run.steps.len(), run.skipped), (3, 0));

    fs::write(&metrics, format!("{{\"step\": 1,\n{whole}")).unwrap();
    let error = Run::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("metrics.jsonl:1:"), "{error}");

    for name in ["metrics.jsonl", "samples.jsonl", "evaluations.jsonl"] {
        fs::remove_file(folder.path().join(name)).unwrap();
    }
    let page = report_html(&[Run::read(folder.path()).unwrap()]);
    assert!(page.contains("optimizer.learning_rate") && !page.contains("<svg "));
}

#[test]
fn the_program_writes_the_page() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder.path().join("a"), 5, 1e-5);
    let grpo = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_grpo"))
            .current_dir(folder.path())
            .args(arguments)
            .output()
            .unwrap()
    };
    assert_eq!(
        grpo(&["report", "a", "--out", "page.html"]).status.code(),
        Some(0)
    );
    let page = fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.starts_with("<!doctype html>"));
    let none = grpo(&["report", "b"]);
    assert_eq!(none.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&none.stderr).contains("is not a run directory"));
    assert_eq!(grpo(&["report"]).status.code(), Some(2));
}

/// Completions that are drawn ahead are sampled and scored during other steps' training.
#[test]
fn a_step_takes_its_phases_that_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 2, 1e-5);
    let seconds = |steps: &[Value]| {
        let steps = steps.iter().enumerate();
        let lines = steps.map(|(i, seconds)| json!({"step": i + 1, "seconds": seconds}));
        let lines: Vec<String> = lines.map(|line| line.to_string()).collect();
        fs::write(folder.path().join("metrics.jsonl"), lines.join("\n")).unwrap();
        Run::read(folder.path()).unwrap().step_seconds()
    };
    let phases = json!({"sample": 8.0, "score": 0.5, "train": 2.0});
    let ahead = json!({"sample": 8.0, "score": 0.5, "train": 2.0, "wait": 1.0, "idle": 4.0});
    let supervised = json!({"train": 3.0});
    assert_eq!(seconds(&[phases, ahead, supervised]), [10.5, 3., 3.]);
    assert_eq!(seconds(&[Value::Null]), [0.; 0]);
}

#[test]
fn report_refuses_a_run_without_steps() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder.path().join("a"), 5, 1e-5);
    for name in ["metrics.jsonl", "evaluations.jsonl"] {
        fs::write(folder.path().join("a").join(name), "").unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_grpo"))
        .current_dir(folder.path())
        .args(["report", "a"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(
        said.contains("a: the run has no steps and no evaluations"),
        "{said}"
    );
    assert!(!folder.path().join("report.html").exists());
}

/// Returns lines for `rollouts.jsonl`: groups of completions whose texts contain HTML.
fn rollouts(steps: &[usize], groups: usize, completions: usize, text: &str) -> String {
    let mut lines = String::new();
    for step in steps {
        for i in 0..groups * completions {
            let line = json!({
                "step": step, "group": i / completions, "prompt_index": 3, "sample_index": i % completions,
                "prompt": format!("prompt of step {step} <i>{text}"), "completion": "last",
                "turns": [
                    {"role": "policy", "text": format!("call <script>{text}</script>"), "reward": 0.25},
                    {"role": "environment", "text": "<img src=x onerror=alert(1)>"},
                ],
                "reward": 0.75, "rewards": {"<b>name</b>": 0.75, "none": null}, "advantage": -1.5,
                "finish_reason": "stop_token", "response_length": 9,
            });
            lines += &format!("{line}\n");
        }
    }
    lines
}

#[test]
fn completions_of_training_are_shown_by_step_and_group() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 20, 1e-5);
    let lines = rollouts(&[1, 10, 20], 2, 3, "x");
    fs::write(folder.path().join("rollouts.jsonl"), lines).unwrap();
    let page = report_html(&[Run::read(folder.path()).unwrap()]);
    for step in [1, 10, 20] {
        assert!(page.contains(&format!(">{step}</label>")), "{step}");
    }
    // The last step is chosen at first.
    assert_eq!(page.matches(" checked>").count(), 1);
    let checked = page.find(" checked>").unwrap();
    assert!(page[checked..].starts_with(" checked><label for=\"step-0-2\">20<"));
    assert_eq!(page.matches("class=\"step\"").count(), 3);
    assert_eq!(
        page.matches("<div class=\"completion\">").count(),
        3 * 2 * 3
    );
    assert_eq!(
        page.matches("<pre class=\"policy\"><b>policy, reward 0.25</b> call ")
            .count(),
        18
    );
    assert!(page.contains("&lt;img src=x") && !page.contains("<img"));
    assert!(!page.contains("<script") && !page.contains("<i>x") && !page.contains("<b>name"));
    assert!(page.contains(
        "<b>0.75</b> advantage -1.5, 9 tokens, stop token, &lt;b&gt;name&lt;/b&gt; 0.75, none –"
    ));
}

/// The page of a completion with these rows: its turn, and its branches.
fn page_of_branches(after: &Value, branches: &Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 1, 1e-5);
    let mut line: Value = serde_json::from_str(&rollouts(&[1], 1, 1, "x")).unwrap();
    line["turns"] = json!([{"role": "policy", "text": "last"}]);
    line["after"] = after.clone();
    line["branches"] = branches.clone();
    fs::write(folder.path().join("rollouts.jsonl"), line.to_string()).unwrap();
    report_html(&[Run::read(folder.path()).unwrap()])
}

#[test]
fn branches_are_shown_below_the_turns_that_they_continue() {
    let policy = |text: &str| json!({"role": "policy", "text": text});
    let environment = |text: &str| json!({"role": "environment", "text": text});
    let branches = json!([
        {"turns": [environment("ask"), policy("plan"), environment("go on"), policy("first")]},
        {"after": {"row": 1, "turns": 2}, "turns": [policy("second")]},
        {"role": "<judge>", "after": {"row": 0, "turns": 1}, "turns": [policy("third")]},
    ]);
    let turn =
        |role: &str, text: &str| format!("<pre class=\"{role}\"><b>{role}</b> {text}</pre>\n");
    let branch = |rows: &[String]| format!("<div class=\"branch\">\n{}</div>\n", rows.concat());
    let judge = "<pre class=\"policy\"><b>&lt;judge&gt;</b> third</pre>\n";
    let third = branch(&[judge.to_owned()]);
    let expected = branch(&[
        turn("policy", "plan"),
        branch(&[turn("policy", "last"), third]),
        turn("environment", "go on"),
        turn("policy", "first"),
        branch(&[turn("policy", "second")]),
    ]);
    let page = page_of_branches(&json!({"row": 1, "turns": 1}), &branches);
    assert!(page.contains(&expected), "{page}");
    // The prompt is that of the first row, and is shown once.
    assert!(page.contains("<pre class=\"prompt\">ask</pre>") && !page.contains("prompt of step"));
    // The row of the last turn is not a branch if it has the prompt.
    let page = page_of_branches(&Value::Null, &json!([]));
    assert!(page.contains(&turn("policy", "last")) && !page.contains("<div class=\"branch\">"));
    // Rows that continue each other.
    let page = page_of_branches(&json!({"row": 0, "turns": 1}), &json!([]));
    assert!(page.contains("9 tokens") && !page.contains(&turn("policy", "last")));
}

#[test]
fn a_trajectory_shows_its_prompt_if_others_in_its_group_have_another() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 1, 1e-5);
    let mut lines = rollouts(&[1], 1, 2, "x");
    let mut other: Value = serde_json::from_str(&rollouts(&[1], 1, 1, "x")).unwrap();
    other["prompt"] = json!("another");
    lines += &other.to_string();
    fs::write(folder.path().join("rollouts.jsonl"), lines).unwrap();
    let page = report_html(&[Run::read(folder.path()).unwrap()]);
    assert_eq!(page.matches("<pre class=\"prompt\">prompt of").count(), 1);
    assert_eq!(
        page.matches("<pre class=\"prompt\">another</pre>").count(),
        1
    );
}

#[test]
fn the_section_of_completions_has_a_bounded_size() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 20, 1e-5);
    let size = |steps: usize, groups: usize, completions: usize, text: &str| {
        let steps: Vec<usize> = (1..=steps).collect();
        let lines = rollouts(&steps, groups, completions, text);
        fs::write(folder.path().join("rollouts.jsonl"), lines).unwrap();
        report_html(&[Run::read(folder.path()).unwrap()])
    };
    let bounded = size(12, 4, 8, &"&".repeat(3000));
    let large = size(40, 5, 9, &"&".repeat(9000));
    assert!(
        large.len() < bounded.len() + 20_000,
        "{} {}",
        large.len(),
        bounded.len()
    );
    for words in [
        "12 of 40 steps",
        "1 more groups.",
        "1 more completions.",
        ">1</label>",
        ">40</label>",
    ] {
        assert!(large.contains(words), "{words}");
    }
}

#[test]
fn components_and_turns_have_charts() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let line = |step: usize| {
        json!({
            "step": step, "skipped": false, "reward_mean": 0.5,
            "rewards": {"right": {"mean": 0.5, "std": 0.1}, "<short>": {"mean": 0.2, "std": 0.1}},
            "environment": {"turns": 2.5, "tool_calls": 1.5, "tool_failures": 0.5, "limit_reached": 0.1, "failed": 0},
        })
        .to_string()
    };
    let lines = [line(1), line(2)].join("\n");
    fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    let page = report_html(&[Run::read(folder.path()).unwrap()]);
    for title in ["Reward components", "Turns", "Ended trajectories"] {
        assert!(page.contains(&format!("<b>{title}</b>")), "{title}");
    }
    assert!(
        page.contains("means; solid: &lt;short&gt;, dashed: right"),
        "{page}"
    );
}

#[test]
fn a_line_that_has_no_step_is_named() {
    for (name, line) in [
        ("metrics.jsonl", "{}"),
        ("metrics.jsonl", "[]"),
        ("metrics.jsonl", "{\"step\": null}"),
        ("evaluations.jsonl", "{\"reward_mean\": 1}"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        run(folder.path(), 3, 1e-5);
        let path = folder.path().join(name);
        fs::write(&path, format!("{{\"step\": 1}}\n{line}\n")).unwrap();
        let error = Run::read(folder.path()).unwrap_err().to_string();
        let words = format!("{name}:2: has no number at \"step\"");
        assert!(error.contains(&words), "{error}");
    }
}

#[test]
fn numbers_that_were_not_finite_are_left_out_of_the_page() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 3, 1e-5);
    let lines = "{\"step\": 1, \"reward_mean\": null, \"environment\": {\"x\": null}}\n{\"step\": 2, \"reward_mean\": 0.5}\n";
    fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    let read = Run::read(folder.path()).unwrap();
    assert!(!read.steps[0].contains_key("reward_mean"));
    assert!(!report_html(&[read]).contains("NaN"));
}
