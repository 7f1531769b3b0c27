//! The policy in several roles.

use candle_grpo_agents::Agents;
use candle_grpo_train::Rollout;
use candle_grpo_train::environment::{AgentConfig, EpisodeEnd};
use serde_json::{Value, json};

use super::client::{Client, receive, send};
use super::drawer::{
    Draw, agents, assert_rows_have_draws, decode, episode, episode_with, limits, rendered,
    sampling, says, spelled,
};

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn with_roles() -> Agents {
    let config = AgentConfig {
        roles: vec!["proposer".to_owned(), "solver".to_owned()],
        ..AgentConfig::default()
    };
    agents(config, limits())
}

fn play(texts: &[&str], agent: impl FnOnce(Client) + Send) -> (Rollout, Vec<Draw>) {
    episode_with(&with_roles(), &sampling(), &says(texts), agent)
}

/// The answer to messages in a role, or the error.
fn ask(agent: &Client, role: &str, messages: &Value) -> Value {
    let answer = agent.chat(json!({"model": role, "messages": messages}));
    match answer.get("choices") {
        Some(choices) => choices[0]["message"].clone(),
        None => answer["error"]["message"].clone(),
    }
}

fn reward(agent: &Client, role: &str, value: f64) {
    let reply = agent.post("/reward", &json!({"role": role, "value": value}));
    assert_eq!(reply.status, 200, "{reply:?}");
}

fn roles(rollout: &Rollout) -> Vec<&str> {
    let branches = rollout.branches.iter().map(|row| row.role.as_deref());
    let roles = branches.chain([rollout.role.as_deref()]);
    roles.map(Option::unwrap).collect()
}

#[test]
fn a_row_has_the_role_of_its_requests() {
    let (rollout, draws) = play(&["task", "answer", "next", "so"], |agent| {
        let task = ask(&agent, "proposer", &json!([user("so?")]));
        let answer = ask(&agent, "solver", &json!([user("solve"), user("task")]));
        let more = json!([user("so?"), task, user("another")]);
        ask(&agent, "proposer", &more);
        ask(
            &agent,
            "solver",
            &json!([user("solve"), user("task"), answer, user("sure?")]),
        );
        reward(&agent, "proposer", 0.25);
        reward(&agent, "solver", 1.);
        reward(&agent, "proposer", -0.5);
        agent.post("/reward", &json!({"done": true}));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(roles(&rollout), ["proposer", "solver"]);
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.end, EpisodeEnd::Done);
    let rewards: Vec<(&str, f64)> = episode
        .role_rewards
        .iter()
        .map(|(role, reward)| (role.as_str(), *reward))
        .collect();
    assert_eq!(rewards, [("proposer", -0.5), ("solver", 1.)]);
    // Without a reward of its own, the trajectory has the mean of the roles'.
    assert_eq!(episode.reward(), 0.25);
}

#[test]
fn another_role_branches_from_a_conversation() {
    let (rollout, draws) = play(&["plan", "first", "second"], |agent| {
        let plan = ask(&agent, "proposer", &json!([user("so?")]));
        let more = json!([user("so?"), plan, user("go")]);
        ask(&agent, "solver", &more);
        ask(&agent, "proposer", &more);
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(roles(&rollout), ["solver", "proposer"]);
    // The solver reads the sampled tokens, and trains on its own alone.
    let solver = &rollout.branches[0];
    assert_eq!(solver.completion.tokens, spelled("first"));
    let plan = [&draws[0].before[..], &spelled("plan")].concat();
    assert!(solver.prompt_tokens.starts_with(&plan));
    assert_eq!(decode(&draws[1].before), decode(&draws[2].before));
    // The same tokens have other random numbers in another role.
    assert_ne!(draws[1].seed, draws[2].seed);
}

#[test]
fn random_numbers_do_not_depend_on_the_order_of_roles() {
    let seeds = |first: &'static str, second: &'static str| {
        let (_, draws) = play(&["one", "two"], |agent| {
            for role in [first, second] {
                ask(&agent, role, &json!([user("so?")]));
            }
            agent.done(json!(1));
        });
        assert_eq!(
            decode(&draws[0].before),
            rendered(&json!([user("so?")]), None)
        );
        [draws[0].seed, draws[1].seed]
    };
    let [proposer, solver] = seeds("proposer", "solver");
    assert_ne!(proposer, solver);
    assert_eq!(seeds("solver", "proposer"), [solver, proposer]);
}

#[test]
fn unknown_roles_are_refused() {
    let (rollout, _) = play(&["one"], |agent| {
        let words = "model: \"gpt\", must be one of environment.roles: proposer, solver";
        assert_eq!(ask(&agent, "gpt", &json!([user("so?")])), json!(words));
        for (body, words) in [
            (
                json!({"role": "judge", "value": 1}),
                "role: \"judge\", must be one of environment.roles: proposer, solver",
            ),
            (json!({"role": 3, "value": 1}), "role: 3, must be a text"),
            (
                json!({"role": "solver", "value": null}),
                "value: null, must be a number with a role",
            ),
            (
                json!({"role": "solver", "done": true}),
                "value: null, must be a number with a role",
            ),
        ] {
            let reply = agent.post("/reward", &body);
            assert_eq!(reply.status, 400, "{reply:?}");
            assert_eq!(reply.json()["error"]["message"], json!(words));
        }
        let bearer = format!("Bearer {}", agent.key);
        let headers = [("Authorization", bearer.as_str())];
        let get = |path: &str| {
            let path = format!("{}/v1/{path}", agent.path);
            receive(send(agent.address, "GET", &path, &headers, b""))
        };
        let models = get("models").json();
        let ids: Vec<&Value> = models["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| &m["id"])
            .collect();
        assert_eq!(ids, ["proposer", "solver"]);
        assert_eq!(get("models/solver").status, 200);
        assert_eq!(get("models/gpt").status, 400);
        ask(&agent, "solver", &json!([user("so?")]));
        agent.done(json!(1));
    });
    let episode = rollout.episode.unwrap();
    assert_eq!((episode.reward(), episode.role_rewards.len()), (1., 0));
    // Without roles, any model is the policy.
    episode_without_roles();
}

fn episode_without_roles() {
    let (rollout, _) = episode(&says(&["one"]), |agent| {
        let reply = agent.post("/reward", &json!({"role": "solver", "value": 1}));
        let words = "role: \"solver\", must be absent: the run has no roles (environment.roles)";
        assert_eq!(reply.json()["error"]["message"], json!(words));
        ask(&agent, "gpt", &json!([user("so?")]));
        agent.done(json!(1));
    });
    assert_eq!(rollout.role, None);
}

#[test]
fn role_names_are_checked() {
    for (roles, words) in [
        (
            vec![""],
            "roles[0]: \"\", must be a name that no other role has",
        ),
        (
            vec!["a", "b", "a"],
            "roles[2]: \"a\", must be a name that no other role has",
        ),
    ] {
        let config = AgentConfig {
            roles: roles.into_iter().map(str::to_owned).collect(),
            ..AgentConfig::default()
        };
        assert_eq!(config.validate().unwrap_err().to_string(), words);
    }
}
