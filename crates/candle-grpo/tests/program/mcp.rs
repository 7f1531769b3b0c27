//! Runs with tools on MCP servers.

use std::fs;
use std::path::Path;

use candle_grpo_test_support::{HttpServer, Reply};
use serde_json::{Value, json};

use crate::support::{command, folder, grpo, lines, said, short_config, succeeds};
use crate::train::assert_same_run;

/// Returns a text backwards after a letter that counts the calls. Without `alive`, it ends in a
/// call with a text. It starts only without secrets.
const SERVER: &str = r#"
import json, os, sys
if "hidden" in str(os.environ): sys.exit("a secret")
count = 0
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message: continue
    if message["method"] == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
    elif message["method"] == "tools/list":
        properties = {"text": {"type": "string"}}
        result = {"tools": [{"name": "echo", "inputSchema": {"type": "object", "properties": properties}}]}
    else:
        count += 1
        text = message["params"]["arguments"]["text"]
        if sys.argv[1] != "alive" and text: sys.exit("broken pipe")
        result = {"content": [{"type": "text", "text": "abcde"[count % 5] + text[::-1]}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"#;

/// A short run whose policy calls `echo` with each text after an "a".
fn config(steps: usize, server: &Value) -> String {
    let marks = json!({"tool": "echo", "argument": "text", "before": "a", "after": "b"});
    let environment = json!({
        "kind": "tools", "format": {"marks": marks}, "mcp": [server],
        "output_before": "d", "output_after": "e",
        "limits": {"max_turns": 3, "max_turn_tokens": 3},
    });
    let config = short_config(steps).replace("max_new_tokens: 6", "max_new_tokens: 20");
    format!("{config}rollout_log: {{every_steps: 1}}\nenvironment: {environment}\n")
}

fn program(fault: &str) -> Value {
    json!({"name": "letters", "command": ["python3", "-S", "server.py", fault]})
}

fn write_server(folder: &Path) {
    fs::write(folder.join("server.py"), SERVER).unwrap();
}

#[cfg(unix)]
#[test]
fn a_run_with_a_server_trains_and_resumes_bit_identically() {
    let config = |steps| config(steps, &program("alive"));
    let (whole, resumed) = (folder(&config(4)), folder(&config(2)));
    for folder in [&whole, &resumed] {
        write_server(folder.path());
    }
    let train = |folder: &Path, more: &[&str]| {
        let mut train = command(folder, &[&["train", "run.yaml"], more].concat());
        let output = train.env("HF_TOKEN", "hidden").output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    };
    train(whole.path(), &[]);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    let sum = |name: &str| -> f64 {
        let of = |step: &Value| step["environment"][name].as_f64().unwrap();
        metrics.iter().map(of).sum()
    };
    assert!(sum("tool_calls") > 0. && sum("tool_calls") == sum("tool_calls/echo"));
    assert_eq!((sum("failed"), sum("tool_failures")), (0., 0.));
    // A server that trajectories share would count on, and the resumed run start again.
    train(resumed.path(), &[]);
    fs::write(resumed.path().join("run.yaml"), config(4)).unwrap();
    train(resumed.path(), &["--resume"]);
    assert_same_run(resumed.path(), whole.path(), 4);
}

#[cfg(unix)]
#[test]
fn a_trajectory_whose_server_ends_has_no_reward_or_that_of_the_limits() {
    for (limits, expected) in [("", Value::Null), ("\"failure_reward\":-2,", json!(-2.))] {
        let limits = format!("{limits}\"max_turns\"");
        let config = config(2, &program("mortal")).replace("\"max_turns\"", &limits);
        let folder = folder(&config);
        write_server(folder.path());
        succeeds(folder.path(), &["train", "run.yaml"]);
        let (mut failed, mut others) = (0, 0);
        for record in lines(&folder.path().join("run/rollouts.jsonl")) {
            match record["end"]["failed"].as_str() {
                Some(message) => {
                    assert!(message.contains("broken pipe"), "{message}");
                    assert_eq!(record["reward"], expected, "{record}");
                    failed += 1;
                }
                None => {
                    assert!(record["reward"].as_f64() >= Some(0.), "{record}");
                    others += 1;
                }
            }
        }
        assert!(failed > 0 && others > 0, "{failed} failed, {others} others");
    }
}

#[cfg(unix)]
#[test]
fn a_server_that_cannot_be_used_is_named_with_its_line() {
    for (server, words) in [
        (
            json!({"name": "x", "command": ["/no/such/server"]}),
            "environment.mcp[0].command",
        ),
        (
            json!({"name": "x", "command": ["sh", "-c", "echo no display >&2"]}),
            "no display",
        ),
        (json!({"name": "x", "comand": ["sh"]}), "comand"),
    ] {
        let folder = folder(&config(1, &server));
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert!(!output.status.success());
        let printed = said(&output);
        assert!(printed.contains(words), "{printed}");
        assert!(printed.contains("run.yaml"), "{printed}");
    }
}

#[test]
fn the_key_of_a_server_is_a_bearer_token() {
    let server = HttpServer::start(|_| Reply::new(401, r#"{"error": "bad key hidden-key"}"#));
    let variable = "GRPO_TEST_KEY_OF_AN_MCP_SERVER";
    let options = json!({"name": "x", "url": server.url(), "api_key_env": variable});
    let folder = folder(&config(1, &options));
    let mut check = command(folder.path(), &["check", "run.yaml"]);
    let output = check.env(variable, "hidden-key").output().unwrap();
    let printed = said(&output);
    assert!(
        printed.contains("initialize: status 401: bad key ***"),
        "{printed}"
    );
    let key = server.requests()[0]
        .header("authorization")
        .map(str::to_owned);
    assert_eq!(key.as_deref(), Some("Bearer hidden-key"));
}
