//! Random faults of clients.

use std::io::Write;
use std::net::TcpStream;

use candle_grpo_test_support::cases;
use candle_grpo_train::FinishReason;
use candle_grpo_train::environment::{AgentConfig, EpisodeEnd};
use candle_grpo_train::rollout::{PromptRequest, Rollout};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::client::{Client, receive, send};
use super::drawer::{agents, decode, limits, play, prompt, sampling, spelled};

const CHAT: &str = "/v1/chat/completions";

/// Maximum number of requests per episode, which only a flood reaches.
const MAX_REQUESTS: usize = 40;

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Closes the connection within the head.
    CutHead,
    /// Closes the connection within the body.
    CutBody,
    /// Closes the connection before the answer.
    Leaves,
    /// Leaves while a stream is sent.
    LeavesStream,
    NoHttp,
    NoJson,
    WrongFields,
    TooLarge,
    WrongKey,
    /// Reports the reward of another episode, with its own key.
    OtherEpisode,
    WrongRoute,
    WrongReward,
}

const FAULTS: [Fault; 12] = [
    Fault::CutHead,
    Fault::CutBody,
    Fault::Leaves,
    Fault::LeavesStream,
    Fault::NoHttp,
    Fault::NoJson,
    Fault::WrongFields,
    Fault::TooLarge,
    Fault::WrongKey,
    Fault::OtherEpisode,
    Fault::WrongRoute,
    Fault::WrongReward,
];

/// An agent's last action.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Last {
    Reward,
    Null,
    NoReward,
    Flood,
}

const LASTS: [Last; 4] = [Last::Reward, Last::Null, Last::NoReward, Last::Flood];

/// An agent with a letter that no other agent writes.
struct Agent<'a> {
    client: &'a Client,
    letter: char,
}

impl Agent<'_> {
    fn question(&self, text: &str) -> Value {
        json!({"messages": [{"role": "user", "content": format!("{text}{}", self.letter)}]})
    }

    fn fail(&self, fault: Fault, others: &[Client]) {
        let client = self.client;
        let connect = || TcpStream::connect(client.address).unwrap();
        let refused = |reply: super::client::Reply, statuses: &[u16]| {
            assert!(statuses.contains(&reply.status), "{fault:?}: {reply:?}");
        };
        let own_key = format!("Bearer {}", client.key);
        let own = [("Authorization", own_key.as_str())];
        let path = format!("{}{CHAT}", client.path);
        match fault {
            Fault::CutHead => connect().write_all(b"POST /s/").unwrap(),
            Fault::CutBody => {
                let head = format!(
                    "POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: {own_key}\r\nContent-Length: 100\r\n\r\n{{"
                );
                connect().write_all(head.as_bytes()).unwrap();
            }
            Fault::Leaves => drop(client.begin(CHAT, &[], &self.question("leaves"))),
            Fault::LeavesStream => {
                let mut question = self.question("streams");
                question["stream"] = json!(true);
                drop(client.begin(CHAT, &[], &question));
            }
            Fault::NoHttp => connect().write_all(b"hello\r\n\r\n").unwrap(),
            Fault::NoJson => refused(
                receive(send(client.address, "POST", &path, &own, b"{\"a")),
                &[400],
            ),
            Fault::WrongFields => refused(client.post(CHAT, &json!({"messages": 1})), &[400]),
            Fault::TooLarge => {
                refused(client.post(CHAT, &self.question(&"a".repeat(2000))), &[413])
            }
            Fault::WrongKey => {
                let wrong = [("x-api-key", "no")];
                refused(
                    receive(send(client.address, "POST", &path, &wrong, b"{}")),
                    &[401],
                );
            }
            Fault::OtherEpisode => {
                let others = others.iter().filter(|other| other.path != client.path);
                for other in others {
                    let path = format!("{}/reward", other.path);
                    let body = br#"{"value": 99, "done": true}"#;
                    // The other episode may have ended.
                    let reply = receive(send(client.address, "POST", &path, &own, body));
                    refused(reply, &[401, 404]);
                }
            }
            Fault::WrongRoute => refused(client.post("/v1/files", &json!({})), &[404]),
            Fault::WrongReward => {
                for value in [json!("1"), json!(true), json!({"a": 1})] {
                    refused(client.post("/reward", &json!({ "value": value })), &[400]);
                }
            }
        }
    }

    fn end(&self, last: Last, reward: f64) {
        match last {
            Last::Reward => self.client.done(json!(reward)),
            Last::Null => self.client.done(Value::Null),
            Last::NoReward => {
                let reply = self.client.post("/reward", &json!({"done": true}));
                assert_eq!(reply.status, 200, "{reply:?}");
            }
            Last::Flood => {
                let report = json!({ "value": reward });
                let mut replies = (0..=MAX_REQUESTS).map(|_| self.client.post("/reward", &report));
                assert!(replies.any(|reply| reply.status != 200));
            }
        }
    }
}

/// The letters in a trajectory's rows.
fn letters(rollout: &Rollout) -> Vec<char> {
    let rows = rollout.rows();
    let texts = rows.map(|(prompt, completion)| decode(&[prompt, &completion.tokens].concat()));
    let letters = texts.flat_map(|text| text.chars().collect::<Vec<_>>());
    let mut letters: Vec<char> = letters.filter(char::is_ascii_uppercase).collect();
    letters.sort_unstable();
    letters.dedup();
    letters
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 1000)))]

    #[test]
    fn a_fault_of_a_client_stays_in_its_episode(
        actions in prop::collection::vec(
            (prop::collection::vec(prop::option::weighted(0.7, select(&FAULTS[..])), 1..6), select(&LASTS[..])),
            1..4,
        ),
    ) {
        let config = AgentConfig {
            max_requests: MAX_REQUESTS,
            max_request_bytes: 1000,
            ..AgentConfig::default()
        };
        let agents = agents(config, limits());
        let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled("so"), FinishReason::StopToken);
        let rollouts = std::thread::scope(|scope| {
            let count = actions.len() as u64;
            let (agents, question) = (&agents, prompt("so?"));
            let played = scope.spawn(move || play(agents, &question, count, &sampling(), &policy).0);
            let clients: Vec<Client> =
                actions.iter().map(|_| Client::new(agents.address(), agents.key())).collect();
            let clients = &clients;
            std::thread::scope(|scope| for (number, (steps, last)) in actions.iter().enumerate() {
                scope.spawn(move || {
                    let letter = char::from(b'A' + number as u8);
                    let agent = Agent { client: &clients[number], letter };
                    let ask = || {
                        let answer = agent.client.chat(agent.question("so?"));
                        assert_eq!(answer["choices"][0]["message"]["content"], "so", "{answer}");
                    };
                    ask();
                    for step in steps {
                        match step {
                            Some(fault) => agent.fail(*fault, clients),
                            None => ask(),
                        }
                    }
                    agent.end(*last, number as f64 + 1.);
                });
            });
            played.join().unwrap().unwrap()
        });
        let mut seen = Vec::new();
        for rollout in &rollouts {
            let letters = letters(rollout);
            prop_assert_eq!(letters.len(), 1, "{:?}", letters);
            let number = usize::from(letters[0] as u8 - b'A');
            seen.push(number);
            let episode = rollout.episode.as_ref().unwrap();
            let (reward, excluded) = (episode.reward(), episode.excluded);
            match actions[number].1 {
                Last::Reward => {
                    prop_assert_eq!((&episode.end, reward, excluded), (&EpisodeEnd::Done, number as f64 + 1., false));
                }
                Last::Null => prop_assert!(excluded && reward == 0. && episode.end == EpisodeEnd::Done),
                Last::NoReward | Last::Flood => {
                    let words = match actions[number].1 {
                        Last::Flood => "max_requests",
                        _ => "without a reward",
                    };
                    let failed = matches!(&episode.end, EpisodeEnd::Failed(text) if text.contains(words));
                    prop_assert!(failed && excluded && reward == 0., "{:?}", episode);
                }
            }
        }
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..actions.len()));
    }
}
