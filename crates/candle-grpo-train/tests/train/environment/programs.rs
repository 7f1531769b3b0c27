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

#[test]
fn a_program_that_never_answers_ends_the_run_after_two_attempts() {
    let folder = tempfile::tempdir().unwrap();
    let starts = folder.path().join("starts");
    let script = format!("echo x >> {}; cat > /dev/null", starts.display());
    let error = play(json!({
        "command": ["sh", "-c", script],
        "time_limit_seconds": 0.3,
        "start_limit_seconds": 0,
    }));
    let error = format!("{:#}", error.unwrap_err());
    assert!(error.contains("no answer at all in 2 attempts"), "{error}");
    // A start may be over before it has written.
    let starts = std::fs::read_to_string(starts).unwrap_or_default();
    assert!(starts.lines().count() <= 2, "{starts:?}");
}

/// Answers the start, and each turn with these fields.
fn one_turn(fields: &str) -> Result<Vec<Rollout>> {
    let script = format!(
        "import json, sys\nfor line in sys.stdin:\n    request = json.loads(line)\n    start = request['turn'] is None\n    turn = request['turn']\n    answer = {{}} if start else {fields}\n    print(json.dumps({{'id': request['id'], **answer}}), flush=True)\n"
    );
    play(json!({"command": ["python3", "-c", script]}))
}

#[rstest]
#[case(
    "{'metrics': {'reward': 1}, 'done': True}",
    "metric \"reward\": must have another name"
)]
#[case(
    "{'metrics': {'turns': 1}, 'done': True}",
    "metric \"turns\": must have another name"
)]
#[case(
    "{'metrics': {'failed': 1}, 'done': True}",
    "metric \"failed\": must have another name"
)]
#[case(
    "{'metrics': {'x': 1e308}, 'text': 'd'}",
    "its sum over the turns must be finite"
)]
#[case(
    "{'reward': 3e38, 'text': 'd'}",
    "with the turns before: must be finite"
)]
#[case(
    "{'messages': [{'rolle': 'user', 'content': 'd'}]}",
    "messages[0]: {\"rolle\""
)]
#[case(
    "{'messages': [{'role': 'user', 'contents': 'd'}]}",
    "must be an object with the text"
)]
#[case(
    "{'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]}",
    "messages[0]: content: a part of type \"image\", must be text"
)]
#[case("{'messages': ['d']}", "messages[0]: \"d\", must be an object")]
fn a_wrong_answer_to_a_turn_fails_and_is_named(#[case] fields: &str, #[case] words: &str) {
    for rollout in one_turn(fields).unwrap() {
        let episode = rollout.episode.unwrap();
        let EpisodeEnd::Failed(message) = &episode.end else {
            // A trajectory of one turn has no sum.
            assert_eq!(episode.turns.len(), 1, "{:?}", episode.end);
            continue;
        };
        assert!(message.contains(words), "{message}");
        assert!(episode.excluded);
    }
}

#[rstest]
#[case("{'reward': None, 'done': True}", true)]
#[case("{'reward': 0, 'done': True}", false)]
#[case("{'done': True}", false)]
#[case(
    "{'reward': None if turn == 0 else 1, 'done': turn == 1, 'text': 'd'}",
    false
)]
#[case(
    "{'reward': 1 if turn == 0 else None, 'done': turn == 1, 'text': 'd'}",
    true
)]
fn a_trajectory_whose_last_reward_is_null_is_excluded(
    #[case] fields: &str,
    #[case] expected: bool,
) {
    let rollouts = one_turn(fields).unwrap();
    let turns = if fields.contains("turn ==") { 2 } else { 1 };
    let all = rollouts.into_iter().filter_map(|rollout| rollout.episode);
    let ended: Vec<_> = all.filter(|episode| episode.turns.len() == turns).collect();
    assert!(!ended.is_empty());
    assert!(ended.iter().all(|episode| episode.excluded == expected));
}

/// The second line may come before or after the next request.
#[test]
fn two_answers_to_a_request_end_the_run() {
    let script = "import json, sys\nfor line in sys.stdin:\n    request = json.loads(line)\n    for _ in range(1 if request['turn'] is None else 2):\n        print(json.dumps({'id': request['id'], 'text': 'd'}), flush=True)\n";
    let error = play(json!({"command": ["python3", "-c", script]})).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("the program cannot be used"), "{error}");
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

/// Writes an error for each second start and for each turn with an "a". Reports its process with
/// each end.
const REPORTS: &str = r#"
import json, os, sys
starts, episodes = 0, set()
for line in sys.stdin:
    request = json.loads(line)
    if "end" in request:
        episodes.remove(request["episode"])
        answer = {"reward": 10, "metrics": {request["end"]: 1, "ends": starts}}
    elif request["turn"] is None:
        starts += 1
        assert len(episodes) < 3
        answer = {"notify_end": True, "text": "d"} if starts % 2 else {"error": "no place"}
        if starts % 2: episodes.add(request["episode"])
    elif "a" in request["completion"]:
        episodes.remove(request["episode"])
        answer = {"error": "no disk", "reward": 5}
    else:
        answer = {"reward": 1, "text": "e"}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"#;

#[test]
fn a_program_reports_failures_and_learns_of_ends() {
    let command = json!(["python3", "-c", REPORTS]);
    let rollouts = play(json!({"command": command, "max_concurrent": 3})).unwrap();
    let (mut failed, mut no_place, mut ended) = (0, 0, 0);
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        match &episode.end {
            EpisodeEnd::Failed(message) => {
                assert!(episode.excluded && episode.reward() == 0.);
                let is_start = message.ends_with("no place");
                assert!(is_start || message.ends_with("no disk"), "{message}");
                let is_empty = rollout.completion.written == Some(vec![false]);
                assert_eq!(is_start, is_empty);
                no_place += usize::from(is_start);
                failed += usize::from(!is_start);
            }
            end => {
                let turns = episode.turns.len() as f64;
                assert_eq!(episode.reward(), turns + 10.);
                assert_eq!(episode.turns.last().unwrap().reward, 11.);
                let name = serde_json::to_value(end).unwrap();
                assert_eq!(episode.metrics[name.as_str().unwrap()], 1.);
                ended += 1;
            }
        }
    }
    assert_eq!((rollouts.len(), no_place), (8, 4));
    assert!(failed > 0 && ended > 0, "{failed} failed, {ended} ended");
}
