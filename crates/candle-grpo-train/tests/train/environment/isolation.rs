//! Isolated programs of environments, tools and servers.

use candle_grpo_train::environment::EnvironmentConfig;
use rstest::rstest;
use serde_json::{Value, json};

use super::mcp;
use super::tools::outputs;

#[rstest]
#[case::program(json!({"kind": "program", "command": ["cat"]}), "", "isolation")]
#[case::tool(json!({"kind": "tools", "tools": [{"name": "a", "command": ["cat"]}]}), "/tools/0", "tools[0].isolation")]
#[case::server(json!({"kind": "tools", "mcp": [{"name": "a", "command": ["cat"]}]}), "/mcp/0", "mcp[0].isolation")]
#[case::agent(json!({"kind": "agent", "command": ["cat"]}), "", "isolation")]
fn a_program_can_be_isolated(#[case] environment: Value, #[case] place: &str, #[case] key: &str) {
    let with = |isolation: Value| {
        let mut environment = environment.clone();
        environment.pointer_mut(place).unwrap()["isolation"] = isolation;
        let config: EnvironmentConfig = serde_json::from_value(environment).unwrap();
        config.validate()
    };
    let error = with(json!({"processes": 0, "network": "host"})).unwrap_err();
    let start = format!("{key}.processes: 0, must be from 1");
    assert!(error.to_string().starts_with(&start), "{error}");
    with(json!({"network": "host"})).unwrap();
}

/// A tool that says where it may write.
const HOME: &str = "
import json, os, sys
for line in sys.stdin:
    id = json.loads(line)['id']
    home = os.environ['HOME']
    open(home + '/new', 'w').close()
    output = 'new' if home == '/work' or 'candle-grpo-' in home else home
    print(json.dumps({'id': id, 'output': output}), flush=True)
";

#[test]
fn an_isolated_tool_has_a_home_of_its_own() {
    let tool = json!({"name": "home", "command": ["python3", "-c", HOME], "isolation": {}});
    let config = json!({"tools": [tool], "output_before": "", "output_after": ";"});
    let config = serde_json::from_value(config).unwrap();
    let rollout = mcp::run(&config, &[mcp::call("home", &json!({}))]);
    assert_eq!(outputs(&rollout), "new;");
}

#[test]
fn an_isolated_server_answers_calls() {
    let config = mcp::config("", json!({"isolation": {}}));
    let call = mcp::call("count", &json!({}));
    assert_eq!(outputs(&mcp::run(&config, &[call.clone(), call])), "1;2;");
}
