//! Runs whose reward is a judge behind a server.

use std::fs;
use std::path::Path;

use candle_grpo_test_support::{HttpServer, Reply, Request};
use serde_json::{Value, json};

use crate::support::{CONFIG, command, folder, grpo, lines, said, succeeds};

/// A judge that counts each "a".
fn server() -> HttpServer {
    HttpServer::start(|request: &Request| {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let text = body["messages"][0]["content"].as_str().unwrap();
        let count = text.matches('a').count();
        let answer = json!({
            "choices": [{"message": {"content": format!("Count: {count}")}}],
            "usage": {"total_tokens": 10},
        });
        Reply::new(200, answer.to_string())
    })
}

/// A configuration with a judge as its only reward.
fn with_judge(server: &HttpServer, more: Value) -> String {
    let mut judge = json!({
        "kind": "judge",
        "url": format!("{}/v1", server.url()),
        "model": "m",
        "prompt": "{completion}",
        "score": {"regex": r"Count: (\d+)"},
        "retry_pause": 0.001,
    });
    let more = more.as_object().unwrap().clone();
    judge.as_object_mut().unwrap().extend(more);
    let regex = "{kind: regex, pattern: '^[ab]'}";
    assert!(CONFIG.contains(regex));
    CONFIG.replace(regex, &judge.to_string())
}

fn metrics(folder: &Path) -> Vec<Value> {
    lines(&folder.join("run/metrics.jsonl"))
}

/// The metrics that do not depend on time and on the cache.
fn rewards(folder: &Path) -> Vec<Value> {
    let metrics = metrics(folder).into_iter();
    let of = |line: Value| {
        json!([
            line["step"],
            line["reward_mean"],
            line["reward_std"],
            line["kl"]
        ])
    };
    metrics.map(of).collect()
}

#[test]
fn check_sends_no_request_and_names_a_key_that_is_not_set() {
    let server = server();
    let variable = "GRPO_TEST_KEY_OF_A_JUDGE";
    let folder = folder(&with_judge(&server, json!({"api_key_env": variable})));
    for arguments in [["check", "run.yaml"], ["train", "run.yaml"]] {
        let output = grpo(folder.path(), &arguments);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        let must = "rewards[0].api_key_env: GRPO_TEST_KEY_OF_A_JUDGE, must be the name of an environment variable that is set";
        assert!(said(&output).contains(must), "{}", said(&output));
    }
    let mut check = command(folder.path(), &["check", "--all", "run.yaml"]);
    let output = check.env(variable, "sk-of-the-test").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &said(&output);
    assert!(
        printed.contains(variable) && !printed.contains("sk-of-the-test"),
        "{printed}"
    );
    assert!(server.requests().is_empty());
}

/// A program may run what the policy has written.
#[test]
fn programs_do_not_inherit_keys() {
    let server = server();
    let variable = "GRPO_TEST_KEY_OF_A_JUDGE";
    let judge = with_judge(&server, json!({"api_key_env": variable}));
    let of = |name: &str, answer: &str| {
        let script = format!("env > {name}; while read -r line; do echo '{answer}'; done");
        json!({"command": ["sh", "-c", script]})
    };
    let mut program = of("of_reward", "0");
    program["kind"] = json!("program");
    program["name"] = json!("p");
    // The program comes first, so that it starts before the judge reads its key.
    let (before, after) = judge.split_once("{\"").unwrap();
    let config = format!("{before}{program}, {{\"{after}");
    let mut environment = of("of_environment", "not an answer");
    environment["kind"] = json!("program");
    // Programs of tools start with the first call, which the policy does not write, and their
    // limits with the others.
    let tracker = of("of_tracker", "followed");
    let config = format!("{config}environment: {environment}\ntrackers: [{tracker}]\n");
    let folder = folder(&config);
    let mut train = command(folder.path(), &["train", "run.yaml"]);
    train
        .env(variable, "sk-of-the-test")
        .env("HF_TOKEN", "hf_of_the_test");
    train.env("HUGGING_FACE_HUB_TOKEN", "hf_of_the_test");
    train.env("GRPO_TEST_OTHER", "other");
    let output = train.output().unwrap();
    // The environment does not answer.
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    for name in ["of_reward", "of_environment", "of_tracker"] {
        let environment = fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(
            environment.contains("GRPO_TEST_OTHER=other"),
            "{name}: {environment}"
        );
        assert!(
            !environment.contains("of_the_test") && !environment.contains("of-the-test"),
            "{name}"
        );
    }
}

#[test]
fn a_key_is_in_no_file_of_a_run() {
    let server = server();
    let variable = "GRPO_TEST_KEY_OF_A_JUDGE";
    let more = json!({"api_key_env": variable, "cache": "cache"});
    let folder = folder(&with_judge(&server, more));
    let mut train = command(folder.path(), &["train", "run.yaml"]);
    let output = train.env(variable, "sk-of-the-test").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(!said(&output).contains("sk-of-the-test"));
    let sent = server.requests();
    let key = |request: &Request| request.header("authorization") == Some("Bearer sk-of-the-test");
    assert!(!sent.is_empty() && sent.iter().all(key));
    let mut folders = vec![folder.path().to_path_buf()];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let bytes = fs::read(&path).unwrap();
            let key = b"sk-of-the-test";
            let has_key = bytes.windows(key.len()).any(|window| window == key);
            assert!(!has_key, "{}", path.display());
            files += 1;
        }
    }
    assert!(files > 20, "{files}");
}

#[test]
fn a_column_that_the_prompt_names_is_checked() {
    let server = server();
    let folder = folder(&with_judge(
        &server,
        json!({"prompt": "{completion} {rubric}"}),
    ));
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    let words = "column \"rubric\" of \"{completion} {rubric}\": absent";
    assert!(said(&output).contains(words), "{}", said(&output));
}

#[test]
fn a_cache_in_the_folder_of_the_run_is_refused() {
    let server = server();
    let folder = folder(&with_judge(&server, json!({"cache": "run/cache"})));
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let must = "rewards[0].cache: run/cache, must lie outside of run_dir";
    assert!(said(&output).contains(must), "{}", said(&output));
}

#[test]
fn metrics_count_requests_and_replies_from_the_cache() {
    let server = server();
    let folder = folder(&with_judge(&server, json!({"cache": "cache"})));
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    let first = metrics(folder.path());
    let requests = &first[0]["reward_requests"]["judge"];
    assert!(requests["requests"].as_u64().unwrap() > 0, "{requests}");
    assert_eq!(
        requests["tokens"].as_u64(),
        requests["requests"].as_u64().map(|n| 10 * n)
    );
    assert_eq!(requests["failures"], json!(0));
    assert!(requests["mean_latency"].as_f64().unwrap() > 0.);
    assert!(
        rewards(folder.path())
            .iter()
            .any(|line| line[1] != json!(0.0))
    );

    // The same run again sends no request.
    let sent = server.requests().len();
    let before = rewards(folder.path());
    succeeds(
        folder.path(),
        &["train", "run.yaml", "--quiet", "--replace"],
    );
    assert_eq!(server.requests().len(), sent);
    assert_eq!(rewards(folder.path()), before);
    let requests = &metrics(folder.path())[0]["reward_requests"]["judge"];
    assert_eq!(requests["requests"], json!(0));
    assert!(requests["cache_hits"].as_u64().unwrap() > 0);
}

#[test]
fn a_run_without_budget_saves_its_steps_and_resumes_with_the_replies_of_the_cache() {
    let server = server();
    let whole = folder(&with_judge(&server, json!({"max_inflight": 2})));
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    let all = server.requests().len();

    let more = json!({"max_inflight": 1, "cache": "cache", "max_requests": all / 3});
    let stopped = folder(&with_judge(&server, more));
    let output = grpo(stopped.path(), &["train", "run.yaml", "--quiet"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let words = "max_requests or max_tokens_total: reached";
    assert!(said(&output).contains(words), "{}", said(&output));
    assert_eq!(server.requests().len(), all + all / 3);
    let steps = metrics(stopped.path()).len();
    assert!((1..12).contains(&steps));
    let saved = format!("The run is saved up to step {steps} in");
    assert!(said(&output).contains(&saved), "{}", said(&output));
    for _ in 0..6 {
        let output = grpo(
            stopped.path(),
            &["train", "run.yaml", "--quiet", "--resume"],
        );
        if output.status.success() {
            break;
        }
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    assert_eq!(rewards(stopped.path()), rewards(whole.path()));
}
