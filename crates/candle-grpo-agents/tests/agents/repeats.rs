//! Repeated requests, and clients that leave.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use candle_grpo_train::rollout::PromptRequest;
use candle_grpo_train::{FinishReason, Rollout};
use rstest::rstest;
use serde_json::{Value, json};

use super::client::{Client, receive};
use super::drawer::{Draw, assert_rows_have_draws, episode, says, spelled};

const CHAT: &str = "/v1/chat/completions";

fn question(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

#[rstest]
#[case::key(&[("Idempotency-Key", "one")], &[("Idempotency-Key", "one")])]
#[case::retry(&[("x-stainless-retry-count", "0")], &[("x-stainless-retry-count", "1")])]
fn a_repeated_request_has_the_recorded_answer(
    #[case] first: &'static [(&'static str, &'static str)],
    #[case] second: &'static [(&'static str, &'static str)],
) {
    let (rollout, draws) = episode(&says(&["so", "us"]), |agent| {
        let ask =
            |headers: &[(&str, &str)]| receive(agent.begin(CHAT, headers, &question("so?"))).json();
        let answer = ask(first);
        assert_eq!(ask(second), answer);
        // Without a mark it is another sample.
        assert_ne!(ask(&[]), answer);
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 2);
    assert_rows_have_draws(&rollout, &draws);
}

#[test]
fn an_idempotency_key_belongs_to_one_request() {
    let (_, draws) = episode(&says(&["so"]), |agent| {
        let headers = [("Idempotency-Key", "one")];
        let ask = |text: &str| receive(agent.begin(CHAT, &headers, &question(text)));
        assert_eq!(ask("so?").status, 200);
        let reply = ask("us?");
        assert_eq!(reply.status, 409, "{reply:?}");
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 1);
}

/// Plays an episode in which the policy says "so". It announces each answer to the receiver, and
/// gives it after the sender is dropped.
fn held_episode(
    agent: impl FnOnce(Client, Receiver<()>, Sender<()>) + Send,
) -> (Rollout, Vec<Draw>) {
    let (begun, begins) = channel();
    let (hold, held) = channel();
    let held = Mutex::new(held);
    let policy = |_: &PromptRequest<'_>, _: &[String]| {
        begun.send(()).unwrap();
        held.lock().unwrap().recv().unwrap_err();
        (spelled("so"), FinishReason::StopToken)
    };
    episode(&policy, move |client| agent(client, begins, hold))
}

#[test]
fn requests_with_one_key_at_the_same_time_share_an_answer() {
    let (rollout, draws) = held_episode(|agent, begins, hold| {
        let ask = || agent.begin(CHAT, &[("Idempotency-Key", "one")], &question("so?"));
        let first = ask();
        begins.recv().unwrap();
        let second = ask();
        agent.wait_for_server();
        drop(hold);
        assert_eq!(receive(first).json(), receive(second).json());
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 1);
    assert_rows_have_draws(&rollout, &draws);
}

#[test]
fn an_answer_that_could_not_be_delivered_is_kept() {
    let (rollout, draws) = held_episode(|agent, begins, hold| {
        // The client leaves while its answer is drawn, and asks again.
        let stream = agent.begin(CHAT, &[], &question("so?"));
        begins.recv().unwrap();
        drop(stream);
        let retry = [("x-stainless-retry-count", "1")];
        let again = agent.begin(CHAT, &retry, &question("so?"));
        agent.wait_for_server();
        drop(hold);
        let answer = receive(again).json();
        assert_eq!(answer["choices"][0]["message"]["content"], "so");
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 1);
    assert_rows_have_draws(&rollout, &draws);
}

#[test]
fn parallel_requests_are_drawn_together_whatever_their_order() {
    let policy = |request: &PromptRequest<'_>, _: &[String]| {
        // An answer is a function of its seed, as random numbers are.
        let text = format!("{:x}", request.seeds[0].turn);
        (spelled(&text), FinishReason::StopToken)
    };
    let played = [[0, 1, 2, 3], [3, 2, 0, 1]].map(|order| {
        let answers = Mutex::new(Vec::new());
        let (rollout, draws) = episode(&policy, |agent| {
            let ask = |number: &i32| agent.begin(CHAT, &[], &question(&format!("q{number}")));
            let streams: Vec<_> = order.iter().map(ask).collect();
            for (number, stream) in order.iter().zip(streams) {
                let answer = receive(stream).json();
                let text = answer["choices"][0]["message"]["content"].to_string();
                answers.lock().unwrap().push((*number, text));
            }
            agent.done(json!(1));
        });
        assert_rows_have_draws(&rollout, &draws);
        assert_eq!(rollout.branches.len(), 3);
        let mut answers = answers.into_inner().unwrap();
        answers.sort();
        answers
    });
    assert_eq!(played[0], played[1]);
}
