//! Runs with environments.

use std::fs;

use serde_json::Value;

use crate::support::{CONFIG, folder, grpo, lines, said, succeeds};
use crate::train::assert_same_run;

/// Two turns: the second one's reward is 1 if it begins as the first one ended.
const GAME: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["turn"] is None: answer = {}
    elif request["turn"] == 0: answer = {"text": "b", "state": request["completion"][-1:]}
    else:
        reward = float(request["completion"][:1] == request["state"])
        answer = {"reward": reward, "done": True, "metrics": {"letters": len(request["completion"])}}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"#;

const ENVIRONMENT: &str = "environment: {kind: program, command: [python3, game.py], workers: 2, limits: {max_turn_tokens: 2}}\n";

#[cfg(unix)]
#[test]
fn a_run_with_a_program_trains_and_resumes_bit_identically() {
    let config = CONFIG.to_owned() + ENVIRONMENT;
    let half = config.replace("max_steps: 12", "max_steps: 8");
    let (whole, resumed) = (folder(&config), folder(&half));
    for folder in [&whole, &resumed] {
        fs::write(folder.path().join("game.py"), GAME).unwrap();
    }
    succeeds(whole.path(), &["train", "run.yaml"]);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    let last = &metrics[metrics.len() - 1]["environment"];
    assert_eq!(
        (&last["turns"], &last["failed"]),
        (&Value::from(2.), &Value::from(0.))
    );
    assert!(last["letters"].as_f64().unwrap() > 0. && last["reward"].is_number());
    succeeds(resumed.path(), &["train", "run.yaml"]);
    fs::write(resumed.path().join("run.yaml"), &config).unwrap();
    succeeds(resumed.path(), &["train", "run.yaml", "--resume"]);
    assert_same_run(resumed.path(), whole.path(), 12);
    let answers = succeeds(whole.path(), &["eval", "run.yaml", "--quiet"]);
    assert!(answers.contains("reward_mean"), "{answers}");
}

#[test]
fn mistakes_are_named_with_their_lines() {
    for (environment, words) in [
        ("environment: {kind: program}\n", "command"),
        (
            "environment: {kind: program, command: [/no/such/program]}\n",
            "environment.command",
        ),
        (
            "environment: {kind: game}\n",
            "must be one of program, tools, agent",
        ),
    ] {
        let folder = folder(&(CONFIG.to_owned() + environment));
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert!(!output.status.success());
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    let advantage = CONFIG.to_owned() + "turn_advantage: {gigpo: {}}\n";
    let partial = CONFIG.replace(
        "{coef: 0.01}",
        "{coef: 0.01}, rollout_correction: {weight: {max: 2.0}}",
    ) + "rollout: {partial: true}\nenvironment: {kind: program, command: [cat]}\n";
    for (config, words) in [
        (
            advantage,
            "turn_advantage: given, must be absent without an environment",
        ),
        (
            partial,
            "rollout.partial: true, must be false with an environment",
        ),
    ] {
        let folder = folder(&config);
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}
