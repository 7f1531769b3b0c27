//! The OpenAI and Anthropic packages.

use candle_grpo_train::FinishReason;
use candle_grpo_train::environment::{AgentConfig, EpisodeEnd};
use candle_grpo_train::rollout::PromptRequest;

use super::dialects::CALL;
use super::drawer::{
    agents, assert_rows_have_draws, decode, limits, play, prompt, sampling, spelled,
};

#[test]
#[ignore = "needs the Python packages openai and anthropic: make test-agents"]
fn the_packages_of_openai_and_anthropic_speak_with_the_server() {
    let python = std::env::var("CANDLE_GRPO_AGENTS_PYTHON").unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/agents/real_clients.py");
    let config = AgentConfig {
        command: vec![python, script.to_owned()],
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    // A call at the first turn of a chat, and then an answer.
    let policy = |request: &PromptRequest<'_>, _: &[String]| {
        let before = decode(request.tokens);
        let text = if before.contains("written") || before == "ab" {
            "so"
        } else {
            CALL
        };
        (spelled(text), FinishReason::StopToken)
    };
    let (rollouts, draws) = play(&agents, &prompt("so?"), 1, &sampling(), &policy);
    let rollout = rollouts.unwrap().remove(0);
    let episode = rollout.episode.as_ref().unwrap();
    assert_eq!(episode.end, EpisodeEnd::Done, "{episode:?}");
    assert_rows_have_draws(&rollout, &draws);
    // Each of the six conversations is one row, and so is the text.
    assert_eq!((draws.len(), rollout.rows().count()), (13, 7));
}
