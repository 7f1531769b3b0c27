//! Runs with agents.

use std::fs;
use std::path::Path;

use candle_grpo_test_support::AGENT_START;
use serde_json::{Value, json};

use crate::support::{folder, grpo, lines, said, short_config, succeeds};
use crate::train::assert_same_run;

/// Continues its prompt, then the prompt and its first answer, and tries the prompt again. The
/// reward is that of the better attempt.
const AGENT: &str = r#"
def draw(prompt):
    body = {"prompt": prompt, "max_tokens": 2}
    return post(os.environ["OPENAI_BASE_URL"] + "/completions", body)["choices"][0]["text"]
first = draw(row["prompt"])
second = draw(row["prompt"] + first + "e")
third = draw(row["prompt"] + first + "d")
value = max(text.count("a") for text in (second, third))
report = {"value": value, "done": True, "metrics": {"letters": len(first)}}
post(os.environ["GRPO_EPISODE_URL"] + "/reward", report)
"#;

const ENVIRONMENT: &str =
    "environment: {kind: agent, command: [python3, -S, agent.py], limits: {max_turns: 3}}\n";

fn write_agent(folder: &Path, agent: &str) {
    fs::write(folder.join("agent.py"), format!("{AGENT_START}{agent}")).unwrap();
}

/// A short run whose only reward is that of the agents.
fn config(steps: usize) -> String {
    let rewards = "rewards: [{kind: regex, pattern: '^[ab]'}]";
    short_config(steps).replace(rewards, "rewards: []") + ENVIRONMENT
}

#[cfg(unix)]
#[test]
fn a_run_with_agents_trains_and_resumes_bit_identically() {
    let (whole, resumed) = (folder(&config(4)), folder(&config(2)));
    for folder in [&whole, &resumed] {
        write_agent(folder.path(), AGENT);
    }
    let plan = succeeds(whole.path(), &["check", "run.yaml"]);
    assert!(plan.contains("Rewards: environment.\n"), "{plan}");
    succeeds(whole.path(), &["train", "run.yaml"]);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics.len(), 4);
    assert!(
        metrics
            .iter()
            .any(|step| step["grad_norm"].as_f64() > Some(0.))
    );
    let last = &metrics[3]["environment"];
    let number = |name: &str| last[name].as_f64().unwrap();
    assert_eq!((number("answers"), number("failed")), (3., 0.));
    assert!(number("rows") > 1. && number("letters") > 0. && number("reward") >= 0.);
    // Each record has the branches, placed below the first answer.
    for record in lines(&whole.path().join("run/rollouts.jsonl")) {
        assert_eq!(record["end"], "done", "{record}");
        let rewards = record["rewards"].as_object().unwrap();
        assert_eq!(rewards["environment"], record["reward"], "{record}");
        let rows = 1 + record["branches"].as_array().map_or(0, Vec::len);
        let after = record["branches"].as_array().into_iter().flatten();
        let after = after.filter(|branch| branch["after"].is_object()).count();
        let own = usize::from(record["after"].is_object());
        assert!(
            after + own < rows,
            "one row at least has a prompt of its own: {record}"
        );
    }
    succeeds(resumed.path(), &["train", "run.yaml"]);
    fs::write(resumed.path().join("run.yaml"), config(4)).unwrap();
    succeeds(resumed.path(), &["train", "run.yaml", "--resume"]);
    assert_same_run(resumed.path(), whole.path(), 4);
    let answers = succeeds(whole.path(), &["eval", "run.yaml", "--quiet"]);
    assert!(answers.contains("reward_mean"), "{answers}");
    succeeds(whole.path(), &["report", "run"]);
    let page = fs::read_to_string(whole.path().join("report.html")).unwrap();
    assert!(page.contains("class=\"branch\""));
}

#[cfg(unix)]
#[test]
fn agents_without_a_report_are_scored_by_the_rewards_of_the_run() {
    let rewards = "rewards: [{kind: regex, pattern: '^[ab]'}]";
    let agent = AGENT.split("value =").next().unwrap();
    let config = config(1).replace("rewards: []", rewards);
    let folder = folder(&config.replace("limits:", "reports_rewards: false, limits:"));
    write_agent(folder.path(), agent);
    succeeds(folder.path(), &["train", "run.yaml"]);
    let metrics = &lines(&folder.path().join("run/metrics.jsonl"))[0];
    assert_eq!(metrics["environment"]["failed"], 0.);
    assert!(metrics["environment"].get("reward").is_none(), "{metrics}");
    for record in lines(&folder.path().join("run/rollouts.jsonl")) {
        let completion = record["completion"].as_str().unwrap();
        let expected = f64::from(u8::from(completion.starts_with(['a', 'b'])));
        assert_eq!(record["reward"], Value::from(expected), "{record}");
    }
}

#[cfg(unix)]
#[test]
fn rewards_of_agents_and_of_the_run_add_up() {
    let rewards = "rewards: [{kind: regex, pattern: '.'}]";
    let folder = folder(&config(1).replace("rewards: []", rewards));
    let draws = AGENT.split("value =").next().unwrap();
    let report = "post(os.environ['GRPO_EPISODE_URL'] + '/reward', {'value': 0.5, 'done': True})";
    write_agent(folder.path(), &format!("{draws}{report}"));
    succeeds(folder.path(), &["train", "run.yaml"]);
    let records = lines(&folder.path().join("run/rollouts.jsonl"));
    for record in &records {
        let has_text = record["completion"] != "";
        let scored = f64::from(u8::from(has_text));
        let expected = json!({"environment": 0.5, "regex": scored});
        assert_eq!(record["rewards"], expected, "{record}");
        assert_eq!(record["reward"], 0.5 + scored, "{record}");
    }
    assert!(records.iter().any(|record| record["reward"] == 1.5));
}

/// Two players continue the same prompt. The second has the reverse reward.
const PLAYERS: &str = r#"
def draw(role):
    body = {"model": role, "prompt": row["prompt"], "max_tokens": 2}
    return post(os.environ["OPENAI_BASE_URL"] + "/completions", body)["choices"][0]["text"]
value = draw("first").count("a") - draw("second").count("a")
for role, reward in (("first", value), ("second", -value)):
    post(os.environ["GRPO_EPISODE_URL"] + "/reward", {"role": role, "value": reward})
post(os.environ["GRPO_EPISODE_URL"] + "/reward", {"done": True})
"#;

#[cfg(unix)]
#[test]
fn roles_have_baselines_that_a_resumed_run_continues() {
    let keys = "role_baselines: {decay: 0.5}\n";
    let config = |steps| {
        let roles = "limits: {max_turns: 3}, roles: [first, second]";
        config(steps).replace("limits: {max_turns: 3}", roles) + keys
    };
    let (whole, resumed) = (folder(&config(4)), folder(&config(2)));
    for folder in [&whole, &resumed] {
        write_agent(folder.path(), PLAYERS);
        succeeds(folder.path(), &["train", "run.yaml"]);
    }
    // A skipped step has no metrics of the policy.
    let mut metrics = lines(&whole.path().join("run/metrics.jsonl"));
    metrics.retain(|step| step["skipped"] == false);
    let number = |step: &Value, name: &str| step[name].as_f64().unwrap();
    assert!(!metrics.is_empty());
    for step in &metrics {
        let (first, second) = (
            number(step, "role_reward/first"),
            number(step, "role_reward/second"),
        );
        assert_eq!(first, -second, "{step}");
        assert_eq!(step["reward_mean"], 0., "{step}");
    }
    let moved = |step: &Value| number(step, "role_baseline/first") != 0.;
    assert!(metrics.iter().any(moved));
    let grows = |step: &Value| step["grad_norm"].as_f64() > Some(0.);
    // Trajectories have equal rewards, so only the roles give a gradient.
    assert!(metrics.iter().any(grows));
    for record in lines(&whole.path().join("run/rollouts.jsonl")) {
        assert_eq!(record["role"], "second", "{record}");
        assert_eq!(record["branches"][0]["role"], "first", "{record}");
        let rewards = &record["role_rewards"];
        let sum = rewards["first"].as_f64().unwrap() + rewards["second"].as_f64().unwrap();
        assert_eq!(sum, 0., "{record}");
    }
    fs::write(resumed.path().join("run.yaml"), config(4)).unwrap();
    succeeds(resumed.path(), &["train", "run.yaml", "--resume"]);
    assert_same_run(resumed.path(), whole.path(), 4);
}

#[test]
fn a_run_whose_agents_all_fail_ends_with_the_reason() {
    let folder = folder(&config(1));
    fs::write(
        folder.path().join("agent.py"),
        "import sys\nsys.exit('no tools here')",
    )
    .unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert!(!output.status.success());
    assert!(said(&output).contains("no tools here"), "{}", said(&output));
}

#[test]
fn mistakes_are_named_with_their_lines() {
    for (environment, words) in [
        (
            "{kind: agent, command: [/no/such/agent]}",
            "environment.command",
        ),
        (
            "{kind: agent, max_requests: 0}",
            "environment.max_requests: 0",
        ),
        (
            "{kind: agent, listen: here}",
            "environment.listen: \"here\", must be an address with a port",
        ),
        (
            "{kind: agent, special_tokens_in_text: true}",
            "environment.special_tokens_in_text: true, must be false",
        ),
        (
            "{kind: agent, reports_rewards: false}",
            "rewards: none, must be at least one",
        ),
    ] {
        let config = config(1).replace(ENVIRONMENT, &format!("environment: {environment}\n"));
        let folder = folder(&config);
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert!(!output.status.success(), "{environment}");
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}
