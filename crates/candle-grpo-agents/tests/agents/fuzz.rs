//! Random conversations.

use std::sync::Mutex;

use candle_grpo_test_support::cases;
use candle_grpo_train::FinishReason;
use candle_grpo_train::rollout::PromptRequest;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::client::{Client, receive};
use super::drawer::{STOP, assert_rows_have_draws, decode, episode, rendered, spelled};

/// An agent's action. Numbers select a conversation, a place in it, and words.
#[derive(Debug, Clone)]
enum Action {
    /// Adds a message to a conversation.
    Extend(usize, usize),
    /// Goes back to an earlier answer, and says something else.
    Branch(usize, usize, usize),
    /// Changes a message.
    Edit(usize, usize, usize),
    /// Leaves out the first messages.
    Truncate(usize, usize),
    /// Sends a conversation again.
    Repeat(usize),
    /// Extends a conversation in several ways at the same time.
    Parallel(usize, usize),
    /// Closes the connection without the answer.
    Abort(usize),
    /// Sends an invalid request.
    Wrong(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let n = || 0..1000_usize;
    prop_oneof![
        4 => (n(), n()).prop_map(|(a, b)| Action::Extend(a, b)),
        2 => (n(), n(), n()).prop_map(|(a, b, c)| Action::Branch(a, b, c)),
        1 => (n(), n(), n()).prop_map(|(a, b, c)| Action::Edit(a, b, c)),
        1 => (n(), n()).prop_map(|(a, b)| Action::Truncate(a, b)),
        1 => n().prop_map(Action::Repeat),
        1 => (n(), n()).prop_map(|(a, b)| Action::Parallel(a, b)),
        1 => n().prop_map(Action::Abort),
        1 => n().prop_map(Action::Wrong),
    ]
}

const WORDS: [&str; 8] = [
    "so",
    "abab",
    "€",
    "é ü",
    "",
    "<|im_end|>",
    "us a b",
    "\u{1f600}!",
];

fn user(word: usize) -> Value {
    json!({"role": "user", "content": WORDS[word % WORDS.len()]})
}

/// An agent with the conversations that it has had, each ending with an answer.
struct Agent {
    client: Client,
    conversations: Vec<Vec<Value>>,
    /// The texts that the policy was asked to continue.
    asked: Vec<String>,
}

impl Agent {
    fn pick(&self, number: usize) -> Vec<Value> {
        match self.conversations.len() {
            0 => Vec::new(),
            count => self.conversations[number % count].clone(),
        }
    }

    fn ask_all(&mut self, questions: Vec<Vec<Value>>) {
        let send = |messages: &Vec<Value>| {
            let body = json!({"messages": messages});
            self.client.begin("/v1/chat/completions", &[], &body)
        };
        let streams: Vec<_> = questions.iter().map(send).collect();
        for (mut messages, stream) in questions.into_iter().zip(streams) {
            self.asked.push(rendered(&json!(messages), None));
            let answer = receive(stream).json();
            let content = answer["choices"][0]["message"]["content"].clone();
            assert!(content.is_string(), "{answer}");
            messages.push(json!({"role": "assistant", "content": content}));
            self.conversations.push(messages);
        }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Extend(which, word) => {
                let mut messages = self.pick(which);
                messages.push(user(word));
                self.ask_all(vec![messages]);
            }
            Action::Branch(which, place, word) => {
                let mut messages = self.pick(which);
                messages.truncate(place % (messages.len() / 2 + 1) * 2);
                messages.push(user(word));
                self.ask_all(vec![messages]);
            }
            Action::Edit(which, place, word) => {
                let mut messages = self.pick(which);
                if let Some(place) = place.checked_rem(messages.len()) {
                    messages[place]["content"] = WORDS[word % WORDS.len()].into();
                }
                messages.push(user(word));
                self.ask_all(vec![messages]);
            }
            Action::Truncate(which, count) => {
                let mut messages = self.pick(which);
                messages.drain(..count % (messages.len() + 1));
                messages.push(user(count));
                self.ask_all(vec![messages]);
            }
            Action::Repeat(which) => {
                let mut messages = self.pick(which);
                messages.pop();
                if !messages.is_empty() {
                    self.ask_all(vec![messages]);
                }
            }
            Action::Parallel(which, word) => {
                let extended = |word| {
                    let mut messages = self.pick(which);
                    messages.push(user(word));
                    messages
                };
                self.ask_all(vec![extended(word), extended(word + 1), extended(word)]);
            }
            Action::Abort(word) => {
                // It may be drawn, or not: its text is in no other question.
                let messages = [json!({"role": "user", "content": format!("abort {word}")})];
                let body = json!({"messages": messages});
                drop(self.client.begin("/v1/chat/completions", &[], &body));
            }
            Action::Wrong(which) => {
                let bodies = [
                    json!({}),
                    json!({"messages": []}),
                    json!({"messages": [{"role": "robot", "content": "so"}]}),
                    json!({"messages": [user(0)], "n": 2}),
                    json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                    json!([1]),
                ];
                let body = &bodies[which % bodies.len()];
                let reply = self.client.post("/v1/chat/completions", body);
                assert_eq!(reply.status, 400, "{reply:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 1000)))]

    #[test]
    fn any_conversation_trains_exactly_what_was_drawn(
        actions in prop::collection::vec(action(), 1..14),
        lengths in prop::collection::vec((0..40_usize, any::<bool>()), 1..9),
    ) {
        let number = Mutex::new(0);
        // The tokens of a turn are cut anywhere, also within characters.
        let policy = |_: &PromptRequest<'_>, _: &[String]| {
            let mut number = number.lock().unwrap();
            let (length, ends) = lengths[*number % lengths.len()];
            *number += 1;
            let text = "ab\u{20ac}a so \u{1f600}ab us\u{e9}abab \u{fb03} so us ab";
            let mut tokens: Vec<u32> = spelled(text).into_iter().skip(*number % 5).collect();
            tokens.truncate(length + 1);
            if ends {
                tokens.push(STOP);
                (tokens, FinishReason::StopToken)
            } else {
                (tokens, FinishReason::Length)
            }
        };
        let asked = Mutex::new(Vec::new());
        let (rollout, draws) = episode(&policy, |client| {
            let mut agent = Agent {
                client,
                conversations: Vec::new(),
                asked: Vec::new(),
            };
            agent.ask_all(vec![vec![json!({"role": "user", "content": "so?"})]]);
            for action in &actions {
                agent.act(action);
            }
            agent.client.done(json!(1));
            *asked.lock().unwrap() = agent.asked;
        });
        assert_rows_have_draws(&rollout, &draws);
        let mut asked = asked.into_inner().unwrap();
        let before = draws.iter().map(|draw| decode(&draw.before));
        let mut before: Vec<String> = before.filter(|text| !text.contains("abort")).collect();
        asked.sort();
        before.sort();
        prop_assert_eq!(before, asked);
    }
}
