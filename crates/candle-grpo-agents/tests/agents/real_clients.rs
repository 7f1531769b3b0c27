//! Packages of others: clients, a framework, and verifiers.

use candle_grpo_train::environment::{AgentConfig, EpisodeEnd, SessionScope};
use candle_grpo_train::rollout::PromptRequest;
use candle_grpo_train::{FinishReason, Prompt, Rollout};
use serde_json::json;

use super::dialects::CALL;
use super::drawer::{
    Draw, agents, assert_rows_have_draws, decode, limits, play, prompt, sampling, spelled,
    tokenizer,
};
use super::verifiers::BRIDGE;

/// A call at the first turn of a chat, and then an answer.
fn calls_and_answers(request: &PromptRequest<'_>, _: &[String]) -> (Vec<u32>, FinishReason) {
    let before = decode(request.tokens);
    let text = if before.contains("written") || before == "ab" {
        "so"
    } else {
        CALL
    };
    (spelled(text), FinishReason::StopToken)
}

/// Plays an episode of the agent in this script, which must end well.
fn played(script: &str) -> (Rollout, Vec<Draw>) {
    let python = std::env::var("CANDLE_GRPO_AGENTS_PYTHON").unwrap();
    let script = format!("{}/tests/agents/{script}", env!("CARGO_MANIFEST_DIR"));
    let config = AgentConfig {
        command: vec![python, script],
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let (rollouts, draws) = play(&agents, &prompt("so?"), 1, &sampling(), &calls_and_answers);
    let rollout = rollouts.unwrap().remove(0);
    let episode = rollout.episode.as_ref().unwrap();
    assert_eq!(episode.end, EpisodeEnd::Done, "{episode:?}");
    assert_rows_have_draws(&rollout, &draws);
    (rollout, draws)
}

#[test]
#[ignore = "needs the Python packages openai and anthropic: make test-agents"]
fn the_packages_of_openai_and_anthropic_speak_with_the_server() {
    let (rollout, draws) = played("real_clients.py");
    // Each of the six conversations is one row, and so is the text.
    assert_eq!((draws.len(), rollout.rows().count()), (13, 7));
}

#[test]
#[ignore = "needs the Python package openai-agents: make test-agents"]
fn an_agent_of_a_framework_calls_its_tools() {
    let (rollout, draws) = played("real_framework.py");
    // Each conversation is one row, with a call and an answer.
    assert_eq!((draws.len(), rollout.rows().count()), (4, 2));
}

#[test]
#[ignore = "needs the Python package verifiers: make test-agents"]
fn a_taskset_of_verifiers_is_played_and_scored() {
    let python = std::env::var("CANDLE_GRPO_VERIFIERS_PYTHON").unwrap();
    let options = r#"{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}"#;
    let command = [
        &python,
        BRIDGE,
        "verifiers",
        "real_verifiers",
        "--config",
        options,
    ];
    let config = AgentConfig {
        command: command.map(str::to_owned).to_vec(),
        folder: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/agents").into()),
        session: SessionScope::Shared,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let question = prompt("What is 3 + 5?");
    let prompt = Prompt::new(3, &question.text, json!({"idx": 3}), &tokenizer()).unwrap();
    for (text, expected) in [("It is 8", Some(1.25)), ("crash", None)] {
        let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled(text), FinishReason::StopToken);
        let (rollouts, draws) = play(&agents, &prompt, 2, &sampling(), &policy);
        assert_eq!(draws.len(), 2);
        for rollout in rollouts.unwrap() {
            let episode = rollout.episode.as_ref().unwrap();
            assert_eq!(episode.end, EpisodeEnd::Done, "{episode:?}");
            assert_eq!(rollout.prompt_tokens, question.tokens);
            assert_eq!(rollout.completion.tokens, spelled(text));
            // A rubric that fails gives no reward.
            assert_eq!(episode.excluded, expected.is_none());
            if let Some(expected) = expected {
                assert_eq!(episode.reward(), expected);
                let metrics = ["reward/right", "reward/short", "metric/letters"];
                assert_eq!(metrics.map(|name| episode.metrics[name]), [1., 1., 7.]);
            }
        }
    }
}
