//! An MCP server of the Python package fastmcp.

use std::env;
use std::process::{Child, Command, Stdio};

use candle_grpo_test_support::Lines;
use rstest::rstest;
use serde_json::{Value, json};

use super::mcp::{call, of_servers, run};
use super::tools::outputs;

const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/train/environment/real_mcp_server.py"
);

/// A server over HTTP, which ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[rstest]
#[case(false, "episode", ["1;2;", "1;2;"])]
#[case(false, "shared", ["1;2;", "3;4;"])]
#[case(true, "episode", ["1;2;", "1;2;"])]
#[case(true, "shared", ["1;2;", "3;4;"])]
#[ignore = "needs the Python package fastmcp: make test-agents"]
fn a_server_of_fastmcp_has_tools(
    #[case] over_http: bool,
    #[case] session: &str,
    #[case] counts: [&str; 2],
) {
    let python = env::var("CANDLE_GRPO_AGENTS_PYTHON").unwrap();
    let mut running = None;
    let server = if over_http {
        let mut child = Command::new(&python)
            .args([SCRIPT, "http"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = Lines::new(child.stdout.take().unwrap());
        running = Some(Server(child));
        let port = lines.find("");
        json!({"name": "a", "url": format!("http://127.0.0.1:{port}/mcp"), "session": session})
    } else {
        json!({"name": "a", "command": [python, SCRIPT], "session": session})
    };
    let config = of_servers(json!([server]));
    let schemas = config.schemas(&Value::Null).unwrap();
    let function = &schemas[0]["function"];
    assert_eq!((&function["name"], schemas.len()), (&json!("add"), 3));
    assert_eq!(function["description"], "Adds two numbers.");
    assert_eq!(function["parameters"]["required"], json!(["a", "b"]));
    let count = call("count", &json!({}));
    for expected in counts {
        let rollout = run(&config, &[count.clone(), count.clone()]);
        assert_eq!(outputs(&rollout), expected);
    }
    let calls = [
        call("add", &json!({"a": 1, "b": 2})),
        call("add", &json!({"a": "x", "b": 2})),
        call("divide", &json!({"a": 1, "b": 0})),
    ];
    let rollout = run(&config, &calls);
    let outputs = outputs(&rollout);
    assert!(outputs.starts_with("3;error: "), "{outputs}");
    assert!(outputs.contains("b: 0"), "{outputs}");
    assert_eq!(rollout.episode.unwrap().metrics["tool_failures"], 2.);
    drop(config);
    drop(running);
}
