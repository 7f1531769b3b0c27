//! Routes, keys, limits and reports.

use std::io::Write;
use std::net::TcpStream;

use candle_grpo_train::environment::{AgentConfig, EnvironmentLimits, EpisodeEnd};
use rstest::rstest;
use serde_json::{Value, json};

use super::client::{Client, receive, send};
use super::drawer::{agents, episode, episode_with, limits, sampling, says};

fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "so?"}]})
}

#[rstest]
#[case("POST", "/", 404)]
#[case("GET", "/etc/passwd", 404)]
#[case("GET", "/s/x/v1/files", 404)]
#[case("POST", "/s/x/v1/chat/completions", 404)]
#[case("GET", "/episodes", 405)]
#[case("POST", "/episodes", 401)]
#[case("GET", "{path}/v1/chat/completions", 405)]
#[case("POST", "{path}/v1/chat/completions", 401)]
#[case("POST", "{path}/v1/messages", 401)]
#[case("GET", "{path}/v1/models", 401)]
#[case("POST", "{path}/reward", 401)]
#[case("POST", "{path}/../episodes", 404)]
fn other_routes_methods_and_keys_are_refused(
    #[case] method: &str,
    #[case] path: &str,
    #[case] status: u16,
) {
    episode(&says(&[]), |agent| {
        let path = path.replace("{path}", &agent.path);
        let wrong = format!("Bearer {}x", agent.key);
        for headers in [
            &[][..],
            &[("Authorization", wrong.as_str())],
            &[("x-api-key", "")],
        ] {
            let reply = receive(send(agent.address, method, &path, headers, b"{}"));
            assert_eq!(reply.status, status, "{reply:?}");
            assert!(reply.json()["error"]["message"].is_string());
        }
        agent.done(json!(1));
    });
}

#[test]
fn an_episode_has_a_key_of_its_own() {
    let agents = agents(AgentConfig::default(), limits());
    let prompt = super::drawer::prompt("so?");
    std::thread::scope(|scope| {
        let game = scope.spawn(|| {
            super::drawer::play(&agents, &prompt, 2, &sampling(), &says(&["so", "so"]))
                .0
                .unwrap()
        });
        let clients = [(); 2].map(|()| Client::new(agents.address(), agents.key()));
        assert_ne!(clients[0].key, clients[1].key);
        let mut mixed = clients[0].clone();
        mixed.key.clone_from(&clients[1].key);
        assert_eq!(mixed.post("/reward", &json!({"value": 9})).status, 401);
        for client in &clients {
            assert_eq!(client.row, json!({"question": "so?"}));
            client.chat(question());
            client.done(json!(1));
        }
        let rewards = game.join().unwrap().into_iter().map(|rollout| {
            rollout
                .episode
                .unwrap()
                .turns
                .iter()
                .map(|turn| turn.reward)
                .sum::<f64>()
        });
        assert_eq!(rewards.collect::<Vec<_>>(), [1., 1.]);
    });
}

#[test]
fn the_server_listens_on_loopback_by_default() {
    let agents = agents(AgentConfig::default(), limits());
    assert!(agents.address().ip().is_loopback());
}

#[test]
fn any_model_is_there() {
    episode(&says(&[]), |agent| {
        let key = format!("Bearer {}", agent.key);
        for path in ["/v1/models", "/v1/models/org/any-model"] {
            let path = format!("{}{path}", agent.path);
            let headers = [("Authorization", key.as_str())];
            let reply = receive(send(agent.address, "GET", &path, &headers, b""));
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        agent.done(json!(1));
    });
}

#[test]
fn bodies_and_heads_have_bounds() {
    let config = AgentConfig {
        max_request_bytes: 1000,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let (rollout, _) = episode_with(&agents, &sampling(), &says(&["so"]), |agent| {
        let long = json!({"messages": [{"role": "user", "content": "a".repeat(1000)}]});
        let reply = agent.post("/v1/chat/completions", &long);
        assert_eq!(reply.status, 413, "{reply:?}");
        let head = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(1 << 20));
        let mut stream = TcpStream::connect(agent.address).unwrap();
        // The server closes while the head comes.
        let _ = stream.write_all(head.as_bytes());
        assert!([0, 414, 431].contains(&receive(stream).status));
        let mut stream = TcpStream::connect(agent.address).unwrap();
        stream.write_all(b"not http\r\n\r\n").unwrap();
        assert!([0, 400].contains(&receive(stream).status));
        let path = format!("{}/v1/chat/completions", agent.path);
        let key = [("x-api-key", agent.key.as_str())];
        let reply = receive(send(agent.address, "POST", &path, &key, b"{\"messages\": "));
        assert_eq!(reply.status, 400);
        assert!(reply.text.contains("must be JSON"), "{reply:?}");
        assert_eq!(
            agent.chat(question())["choices"][0]["message"]["content"],
            "so"
        );
        agent.done(json!(1));
    });
    assert_eq!(rollout.episode.unwrap().end, EpisodeEnd::Done);
}

#[rstest]
#[case(json!({"value": "one"}), "value: \"one\"")]
#[case(json!({"value": 1e300}), "value: 1e")]
#[case(json!({"done": 1}), "done: 1")]
#[case(json!({"reward": 1}), "reward: 1")]
#[case(json!({"metrics": {"a": "b"}}), "metrics.a")]
#[case(json!({"metrics": {"turns": 1}}), "metrics.turns")]
#[case(json!([1]), "body: [1]")]
fn a_report_that_is_not_valid_is_refused(#[case] body: Value, #[case] words: &str) {
    let (rollout, _) = episode(&says(&["so"]), |agent| {
        agent.chat(question());
        let reply = agent.post("/reward", &body);
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.text.replace('\\', "").contains(words), "{reply:?}");
        agent.done(json!(0.25));
    });
    assert_eq!(rollout.episode.unwrap().turns[0].reward, 0.25);
}

#[test]
fn the_last_report_counts() {
    let (rollout, _) = episode(&says(&["so"]), |agent| {
        agent.chat(question());
        agent.post("/reward", &json!({"value": null, "metrics": {"tries": 1}}));
        agent.post(
            "/reward",
            &json!({"value": 2, "metrics": {"tries": 3, "tests": 4}}),
        );
        agent.post("/reward", &json!({"done": true}));
        // The episode has ended.
        let late = agent.post("/reward", &json!({"value": 5}));
        assert!([404, 410].contains(&late.status), "{late:?}");
        let late = agent.post("/v1/chat/completions", &question());
        assert!([404, 410].contains(&late.status), "{late:?}");
    });
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.turns[0].reward, 2.);
    assert_eq!(
        (episode.metrics["tries"], episode.metrics["tests"]),
        (3., 4.)
    );
}

#[test]
fn a_flood_of_requests_fails_the_episode() {
    let config = AgentConfig {
        max_requests: 3,
        ..AgentConfig::default()
    };
    for failure_reward in [None, Some(-1.)] {
        let limits = EnvironmentLimits {
            failure_reward,
            ..limits()
        };
        let agents = agents(config.clone(), limits);
        let (rollout, draws) = episode_with(&agents, &sampling(), &says(&["so"]), |agent| {
            agent.chat(question());
            for _ in 0..2 {
                assert_eq!(agent.post("/reward", &json!({"value": 1})).status, 200);
            }
            let reply = agent.post("/v1/chat/completions", &question());
            assert!([404, 410].contains(&reply.status), "{reply:?}");
        });
        assert_eq!(draws.len(), 1);
        let episode = rollout.episode.unwrap();
        let EpisodeEnd::Failed(message) = &episode.end else {
            panic!("{episode:?}");
        };
        assert!(message.contains("3 requests"), "{message}");
        assert_eq!(episode.excluded, failure_reward.is_none());
        assert_eq!(episode.turns[0].reward, failure_reward.unwrap_or(0.));
    }
}

#[test]
fn turns_and_tokens_are_limited() {
    let limits = EnvironmentLimits {
        max_turns: 2,
        max_turn_tokens: Some(3),
        missing_reward: Some(-0.5),
        ..limits()
    };
    let agents = agents(AgentConfig::default(), limits);
    let (rollout, draws) = episode_with(&agents, &sampling(), &says(&["so", "us"]), |agent| {
        for _ in 0..2 {
            agent.chat(question());
        }
        let refused = agent.chat(question());
        assert_eq!(refused["error"]["code"], "limit_reached");
        agent.post("/reward", &json!({"done": true}));
    });
    assert_eq!(draws.len(), 2);
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.end, EpisodeEnd::MaxTurns);
    assert!(episode.unrewarded && !episode.excluded);
    assert_eq!(episode.turns[0].reward, -0.5);
}

#[test]
fn time_is_limited() {
    let limits = EnvironmentLimits {
        max_seconds: Some(f64::MIN_POSITIVE),
        ..limits()
    };
    let agents = agents(AgentConfig::default(), limits);
    let (rollout, draws) = episode_with(&agents, &sampling(), &says(&[]), |agent| {
        let refused = agent.chat(question());
        assert_eq!(refused["error"]["code"], "limit_reached");
        assert!(refused.to_string().contains("max_seconds"), "{refused}");
        agent.done(json!(1));
    });
    assert!(draws.is_empty());
    // An episode without an answer has failed, whatever the reason.
    let episode = rollout.episode.unwrap();
    let failed =
        matches!(&episode.end, EpisodeEnd::Failed(message) if message.contains("MaxSeconds"));
    assert!(failed && episode.excluded, "{episode:?}");
}

#[test]
fn prompts_are_limited() {
    let length = super::drawer::prompt("so?").tokens.len();
    let config = AgentConfig {
        max_prompt_tokens: Some(length),
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let (rollout, draws) = episode_with(&agents, &sampling(), &says(&["so"]), |agent| {
        let long = json!({"messages": [{"role": "user", "content": "so??"}]});
        let refused = agent.chat(long);
        assert_eq!(refused["error"]["code"], "context_length_exceeded");
        assert_eq!(agent.say(&question()["messages"]), "so");
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 1);
    assert_eq!(rollout.episode.unwrap().end, EpisodeEnd::Done);
}

#[test]
fn a_row_that_is_full_is_refused_as_a_context_that_is() {
    let mut short = sampling();
    short.max_new_tokens = 30;
    let agents = agents(AgentConfig::default(), limits());
    let (rollout, draws) = episode_with(&agents, &short, &says(&["so", "us"]), |agent| {
        let first = agent.say(&question()["messages"]);
        let answer = json!({"role": "assistant", "content": first});
        let next = json!({"role": "user", "content": "a".repeat(40)});
        let messages = json!([question()["messages"][0], answer, next]);
        let refused = agent.chat(json!({"messages": messages}));
        assert_eq!(refused["error"]["code"], "context_length_exceeded");
        // A shorter message has room.
        let messages = json!([question()["messages"][0], answer, {"role": "user", "content": ""}]);
        assert_eq!(agent.say(&messages), "us");
        agent.done(json!(1));
    });
    assert_eq!(draws.len(), 2);
    assert!(rollout.branches.is_empty());
    assert_eq!(rollout.episode.unwrap().end, EpisodeEnd::Done);
}

#[test]
fn an_agent_without_a_report_has_failed() {
    let (rollout, _) = episode(&says(&["so"]), |agent| {
        agent.chat(question());
        agent.post("/reward", &json!({"done": true}));
    });
    let episode = rollout.episode.unwrap();
    assert!(matches!(&episode.end, EpisodeEnd::Failed(message) if message.contains("reward")));
    assert!(episode.excluded && episode.unrewarded);
}

#[test]
fn rewards_of_the_run_leave_no_place_for_those_of_agents() {
    let config = AgentConfig {
        reports_rewards: false,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let (rollout, _) = episode_with(&agents, &sampling(), &says(&["so"]), |agent| {
        agent.chat(question());
        assert_eq!(agent.post("/reward", &json!({"value": 1})).status, 400);
        assert_eq!(agent.post("/reward", &json!({"done": true})).status, 200);
    });
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.end, EpisodeEnd::Done);
    assert!(!episode.gives_rewards && !episode.excluded && !episode.unrewarded);
}
