//! Environments from programs, well behaved and not.

use anyhow::Result;
use candle_grpo_train::environment::{
    EnvironmentConfig, EpisodeEnd, ProgramEnvironmentConfig, ProgramEnvironments,
};
use candle_grpo_train::{Rollout, SamplingConfig};
use rstest::rstest;
use serde_json::{Value, json};

use super::environments;
use crate::common::{prompts, sampler, sampling};

/// Three turns. The state counts them down, and "d" is written as often as there are turns left.
const GAME: &str = r#"
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["turn"] is None:
        assert "completion" not in request
        answer = {"text": "de", "state": 3}
    else:
        text, left = request["completion"], request["state"] - 1
        if HANGS in text: time.sleep(600)
        if CRASHES in text: os._exit(3)
        assert left == 2 - request["turn"] and request["columns"]["row"] in (0, 1)
        answer = {"reward": len(text), "done": left == 0, "state": left, "metrics": {"letters": len(text)}}
        if left: answer["text"] = "d" * left
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"#;

fn game(hangs: &str, crashes: &str, workers: usize) -> Value {
    let script = GAME.replace("HANGS", &format!("{hangs:?}"));
    let script = script.replace("CRASHES", &format!("{crashes:?}"));
    json!({
        "command": ["python3", "-c", script],
        "workers": workers,
        "time_limit_seconds": 1,
        "start_limit_seconds": 20,
    })
}

fn play(config: Value) -> Result<Vec<Rollout>> {
    let config: ProgramEnvironmentConfig = serde_json::from_value(config)?;
    let config = ProgramEnvironments::new(&config)?;
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let sampler = sampler(SamplingConfig {
        max_new_tokens: 20,
        ..sampling()
    });
    sampler
        .with_environments(environments(config))
        .sample(&prompts, 4, 0)
}

#[test]
fn a_program_answers_each_turn() {
    let one = play(game("?", "?", 1)).unwrap();
    assert_eq!(one, play(game("?", "?", 3)).unwrap());
    for rollout in one {
        assert!(rollout.prompt_tokens.ends_with(&[4, 5]));
        let episode = rollout.episode.unwrap();
        assert_eq!((episode.turns.len(), &episode.end), (3, &EpisodeEnd::Done));
        assert_eq!(episode.reward(), episode.metrics["letters"]);
        let between = |turn: usize| {
            let (end, next) = (episode.turns[turn].tokens.end, turn + 1);
            &rollout.completion.tokens[end..episode.turns[next].tokens.start]
        };
        assert_eq!((between(0), between(1)), (&[4, 4][..], &[4][..]));
    }
}

#[test]
fn a_turn_with_which_it_hangs_or_crashes_ends_its_trajectory_only() {
    let all = play(game("?", "?", 2)).unwrap();
    let hostile = play(game("ab", "c", 2)).unwrap();
    let (mut late, mut ended) = (0, 0);
    for (rollout, calm) in hostile.iter().zip(&all) {
        let episode = rollout.episode.as_ref().unwrap();
        match &episode.end {
            EpisodeEnd::Done => assert_eq!(rollout, calm),
            EpisodeEnd::Failed(message) if message.contains("within 1 seconds") => late += 1,
            EpisodeEnd::Failed(message) => {
                assert!(message.contains("exit status: 3"), "{message}");
                ended += 1;
            }
            end => panic!("{end:?}"),
        }
    }
    assert!(ended > 0 && ended + late < 8, "{late} late, {ended} ended");
    assert_eq!(hostile, play(game("ab", "c", 2)).unwrap());
}

#[rstest]
#[case("{}", "has no id")]
#[case("7", "must be a JSON object")]
#[case(r#"{"id": ID, "observation": "d"}"#, "unknown field `observation`")]
#[case(
    r#"{"id": ID, "text": "d", "messages": []}"#,
    "text and messages: both given"
)]
#[case(r#"{"id": ID, "done": true}"#, "done before the first turn")]
#[case(
    r#"{"id": ID, "messages": [{"role": "user", "content": "d"}]}"#,
    "plain text"
)]
#[case(r#"{"id": 99}"#, "must have the id of one of the requests")]
fn a_wrong_first_answer_is_an_error(#[case] answer: &str, #[case] words: &str) {
    let script = format!(
        "import json, sys\nfor line in sys.stdin:\n    print({answer:?}.replace('ID', str(json.loads(line)['id'])), flush=True)\n"
    );
    let error = play(json!({"command": ["python3", "-c", script]})).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains(words), "{error}");
    assert!(error.starts_with("environment of prompt "), "{error}");
}

#[rstest]
#[case(json!({"kind": "program", "command": []}), "command: []")]
#[case(json!({"kind": "program", "command": ["x"], "workers": 0}), "workers: 0")]
#[case(json!({"kind": "program", "command": ["x"], "time_limit_seconds": 0}), "time_limit_seconds: 0")]
#[case(json!({"kind": "program", "command": ["x"], "limits": {"max_turns": 0}}), "limits.max_turns: 0")]
#[case(json!({"kind": "tools", "tools": []}), "tools: none")]
#[case(json!({"kind": "tools", "tools": [{"name": "", "command": ["x"]}]}), "tools[0].name")]
#[case(json!({"kind": "tools", "tools": [{"name": "a", "command": ["x"], "parameters": 7}]}), "tools[0].parameters: 7")]
fn options_that_are_not_valid_are_named(#[case] config: Value, #[case] words: &str) {
    let config: EnvironmentConfig = serde_json::from_value(config).unwrap();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}
