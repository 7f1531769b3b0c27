//! Tools on MCP servers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_grpo_test_support::{ClosedPort, HttpServer, Reply, Request, cases};
use candle_grpo_train::environment::{EpisodeEnd, ToolsConfig};
use candle_grpo_train::{Interrupted, Progress, Rollout};
use proptest::collection::vec;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::templates::CHATML;
use super::tools::{outputs, play, play_until};

/// A server on stdin and stdout, with the fault in its argument.
const SERVER: &str = r#"
import json, os, sys, time
fault, count = sys.argv[1], 0
def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def tool(name):
    parameters = {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}}
    return {"name": name, "description": name + ".", "inputSchema": parameters}
def text(value, **more):
    return {"content": [{"type": "text", "text": str(value)}], **more}
if fault == "dies": sys.exit("no display")
if fault.startswith("starts once"):
    os.close(os.open(fault.split()[2], os.O_CREAT | os.O_EXCL))
for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params", {})
    if id is None or method is None: continue
    if method == "initialize":
        assert params["clientInfo"]["name"] == "candle-grpo" and params["capabilities"] == {}
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {"listChanged": True}}}
        if fault == "version": result["protocolVersion"] = "1999-01-01"
        if fault == "old version": result["protocolVersion"] = "2024-11-05"
        if fault == "no tools": result["capabilities"] = {}
        if fault == "refuses": send({"id": id, "error": {"code": -32600, "message": "not now"}}); continue
        if fault == "sleeps": time.sleep(600)
        send({"id": id, "result": result})
    elif method == "tools/list":
        pages = {"": (["second", "first"], "next"), "next": (["count"], None)}
        names, cursor = pages[params.get("cursor", "")]
        if fault == "same page": cursor = "next"
        result = {"tools": [tool(name) for name in names], "nextCursor": cursor}
        if fault == "no schema": del result["tools"][0]["inputSchema"]
        if fault == "no name": result["tools"][0]["name"] = ""
        if fault == "no list": result = {}
        send({"id": id, "result": result})
    elif method == "tools/call":
        count += 1
        name, arguments = params["name"], params["arguments"]
        fault = arguments.get("fault", "")
        if fault == "exits": os._exit(3)
        if fault == "hangs": time.sleep(600)
        if fault == "other id": send({"id": 999, "result": text(1)}); continue
        if fault == "huge line": print("x" * (5 << 20), flush=True); continue
        if fault == "no JSON": print("Listening on port 80", flush=True); continue
        if fault == "no version": print(json.dumps({"id": id, "result": text(1)}), flush=True); continue
        if fault == "neither": send({"id": id}); continue
        if fault == "result": send({"id": id, "result": "1"}); continue
        if fault == "content": send({"id": id, "result": {"content": "1"}}); continue
        if fault == "block": send({"id": id, "result": {"content": [{"type": "text"}]}}); continue
        if fault == "isError": send({"id": id, "result": text(1, isError="no")}); continue
        if fault == "needs input": send({"id": id, "result": {"resultType": "input_required"}}); continue
        if fault == "internal": send({"id": id, "error": {"code": -32603, "message": "disk full"}}); continue
        if fault == "parameters": send({"id": id, "error": {"code": -32602, "message": "alpha: absent"}}); continue
        if fault == "floods":
            for i in range(20000): send({"method": "notifications/progress"})
            continue
        if fault == "own": send({"id": id, "result": text("no such file", isError=True)}); continue
        if fault == "structured": send({"id": id, "result": {"content": [], "structuredContent": {"b": 1, "a": 2}}}); continue
        if fault == "blocks":
            image, link = {"type": "image", "data": "", "mimeType": "image/png"}, {"type": "resource_link", "uri": "file:///a"}
            file = {"type": "resource", "resource": {"uri": "file:///b", "text": "b"}}
            send({"id": id, "result": {"content": [image, link, file]}}); continue
        if name == "first": send({"id": id, "result": text(os.getpid())}); continue
        # The client answers what comes in between.
        send({"method": "notifications/tools/list_changed"})
        send({"id": "a", "method": "ping"})
        assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "a", "result": {}}
        send({"id": 7, "method": "roots/list"})
        assert json.loads(sys.stdin.readline())["error"]["code"] == -32601
        send({"id": id, "result": text(count)})
"#;

pub(super) fn config(fault: &str, more: Value) -> ToolsConfig {
    let command = json!(["python3", "-S", "-c", SERVER, fault]);
    let mut server = json!({"name": "fake", "command": command});
    if let (Value::Object(server), Value::Object(more)) = (&mut server, more) {
        server.extend(more);
    }
    of_servers(json!([server]))
}

pub(super) fn of_servers(servers: Value) -> ToolsConfig {
    let config = json!({"mcp": servers, "output_before": "", "output_after": ";"});
    serde_json::from_value(config).unwrap()
}

pub(super) fn call(tool: &str, arguments: &Value) -> String {
    let call = json!({"name": tool, "arguments": arguments});
    format!("<tool_call>{call}</tool_call>")
}

/// Plays calls, and then an answer.
pub(super) fn run(config: &ToolsConfig, calls: &[String]) -> Rollout {
    let turns: Vec<&str> = calls.iter().map(String::as_str).chain(["so"]).collect();
    play(config.build().unwrap(), CHATML, "<|im_end|>", &turns, false)
}

/// Checks that a trajectory has failed with these words and has no reward.
#[track_caller]
fn assert_failed(rollout: &Rollout, words: &str) {
    let episode = rollout.episode.as_ref().unwrap();
    let EpisodeEnd::Failed(message) = &episode.end else {
        panic!("{words}: {:?}", episode.end);
    };
    assert!(message.contains(words), "{message}");
    assert!(episode.excluded, "{episode:?}");
}

fn names(config: &ToolsConfig) -> Vec<String> {
    let schemas = config.schemas(&Value::Null).unwrap().into_iter();
    let name = |schema: Value| schema["function"]["name"].as_str().map(str::to_owned);
    schemas.filter_map(name).collect()
}

#[test]
fn schemas_have_the_order_of_the_server() {
    let config = config("", json!({}));
    let schema = |name: &str| {
        format!(
            r#"{{"type":"function","function":{{"name":"{name}","description":"{name}.","parameters":{{"type":"object","properties":{{"zeta":{{"type":"string"}},"alpha":{{"type":"integer"}}}}}}}}}}"#
        )
    };
    let all = ["second", "first", "count"].map(schema).join(",");
    let schemas = config.schemas(&Value::Null).unwrap();
    assert_eq!(Value::from(schemas).to_string(), format!("[{all}]"));
}

#[test]
fn the_policy_reads_outputs_and_errors_of_tools() {
    let of = |fault: &str| call("second", &json!({ "fault": fault }));
    let calls = ["", "own", "parameters", "structured", "blocks"].map(of);
    let rollout = run(&config("old version", json!({})), &calls);
    let expected = "1;error: no such file;error: alpha: absent;{\"b\":1,\"a\":2};\
                    [image]\nfile:///a\nb;";
    assert_eq!(outputs(&rollout), expected);
    let episode = rollout.episode.unwrap();
    assert_eq!((episode.end, episode.excluded), (EpisodeEnd::Done, false));
    assert_eq!(episode.metrics["tool_failures"], 2.);
    assert_eq!(episode.metrics["tool_calls/second"], 5.);
}

#[rstest]
#[case("exits", "exit status: 3")]
#[case("hangs", "tools/call: no answer within 0.05 seconds, the limit")]
#[case("other id", "an answer to 999, must be to 1")]
#[case("huge line", "a line of more than 4 MiB")]
#[case("no JSON", "\"Listening on port 80\": must be a JSON object")]
#[case("no version", "jsonrpc: None, must be \"2.0\"")]
#[case("neither", "must have \"method\", \"result\" or \"error\"")]
#[case("result", "result: \"1\", must be an object")]
#[case("content", "content: \"1\", must be a list")]
#[case("block", "a text block has no text")]
#[case("isError", "isError: \"no\", must be true or false")]
#[case("needs input", "resultType: \"input_required\"")]
#[case("internal", "tools/call: error -32603: disk full")]
#[case("floods", "more than 10000 messages without an answer")]
fn a_server_that_fails_in_a_call_excludes_the_trajectory(#[case] fault: &str, #[case] words: &str) {
    let more = match fault {
        "hangs" => json!({"time_limit_seconds": 0.05}),
        _ => json!({}),
    };
    let config = config("", more);
    let rollout = run(&config, &[call("count", &json!({ "fault": fault }))]);
    assert_failed(&rollout, words);
    assert_failed(&rollout, "tool \"count\", server \"fake\"");
    // The next trajectory has a server that works.
    if fault != "hangs" {
        let rollout = run(&config, &[call("count", &json!({}))]);
        assert_eq!(outputs(&rollout), "1;");
    }
}

#[rstest]
#[case("dies", "its stderr ends with:\nno display")]
#[case(
    "version",
    "protocolVersion: \"1999-01-01\", must be one of 2025-11-25"
)]
#[case("no tools", "capabilities: must have \"tools\"")]
#[case("refuses", "initialize: error -32600: not now")]
#[case("sleeps", "initialize: no answer within 0.3 seconds, the limit")]
#[case("same page", "nextCursor: \"next\", must be a new text on each page")]
#[case("no schema", "tool \"second\": inputSchema: must be an object")]
#[case("no name", "name: must be a text")]
#[case("no list", "tools: must be a list")]
fn a_server_that_lists_no_tools_ends_the_run(#[case] fault: &str, #[case] words: &str) {
    let more = match fault {
        "sleeps" => json!({"start_limit_seconds": 0.3}),
        _ => json!({}),
    };
    let error = config(fault, more).schemas(&Value::Null).unwrap_err();
    let message = format!("{error:#}");
    assert!(message.contains(words), "{message}");
    assert!(
        message.starts_with("mcp[0]: server \"fake\": "),
        "{message}"
    );
}

#[test]
fn a_server_that_does_not_start_again_excludes_the_trajectory() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("started");
    let config = config(&format!("starts once {}", mark.display()), json!({}));
    let rollout = run(&config, &[call("count", &json!({}))]);
    assert_failed(&rollout, "FileExistsError");
    fs::remove_file(mark).unwrap();
    assert_eq!(outputs(&run(&config, &[call("count", &json!({}))])), "1;");
}

#[rstest]
#[case("episode", ["1;2;", "1;2;"])]
#[case("shared", ["1;2;", "3;4;"])]
fn a_session_is_one_trajectory_or_shared(#[case] session: &str, #[case] counts: [&str; 2]) {
    let config = config("", json!({ "session": session }));
    let calls = [call("count", &json!({})), call("second", &json!({}))];
    for expected in counts {
        assert_eq!(outputs(&run(&config, &calls)), expected);
    }
}

#[test]
fn the_process_of_a_trajectory_ends_with_it() {
    let config = config("", json!({}));
    let mut pids = BTreeSet::new();
    for _ in 0..2 {
        let output = outputs(&run(&config, &[call("first", &json!({}))]));
        let pid = output.trim_end_matches(';').to_owned();
        let found = Command::new("kill").args(["-0", &pid]).output().unwrap();
        assert!(!found.status.success(), "process {pid} is still there");
        pids.insert(pid);
    }
    assert_eq!(pids.len(), 2);
}

#[test]
fn tools_are_allowed_and_denied_by_name() {
    let names = |more: Value| names(&config("", more));
    assert_eq!(
        names(json!({"allow": ["count", "second"]})),
        ["second", "count"]
    );
    assert_eq!(names(json!({"deny": ["first", "count"]})), ["second"]);
    assert_eq!(
        names(json!({"allow": ["first"], "prefix": "a_"})),
        ["a_first"]
    );
    for (more, words) in [
        (
            json!({"allow": ["third"]}),
            "mcp[0].allow: \"third\", must name tools of the server: \"second\", \"first\", \"count\"",
        ),
        (
            json!({"deny": ["third"]}),
            "mcp[0].deny: \"third\", must name",
        ),
        (
            json!({"allow": ["first"], "deny": ["first"]}),
            "no tool is left of",
        ),
    ] {
        let error = config("", more).schemas(&Value::Null).unwrap_err();
        assert!(format!("{error:#}").contains(words), "{error:#}");
    }
}

#[test]
fn a_tool_that_is_not_allowed_cannot_be_called() {
    let config = config("", json!({"allow": ["count"], "prefix": "my_"}));
    let calls = ["first", "count", "my_count"].map(|name| call(name, &json!({})));
    let rollout = run(&config, &calls);
    let expected = "error: no tool \"first\", there are \"my_count\";\
                    error: no tool \"count\", there are \"my_count\";1;";
    assert_eq!(outputs(&rollout), expected);
}

#[test]
fn tools_of_two_servers_need_different_names() {
    let command = json!(["python3", "-S", "-c", SERVER, ""]);
    let servers = |prefix: &str| {
        json!([
            {"name": "a", "command": command, "allow": ["first"]},
            {"name": "b", "command": command, "allow": ["first"], "prefix": prefix},
        ])
    };
    let error = of_servers(servers("")).schemas(&Value::Null).unwrap_err();
    let words = "\"first\" of \"a\" and \"b\", must have a name of its own";
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(names(&of_servers(servers("b_"))), ["first", "b_first"]);
    let mut both = of_servers(servers("b_"));
    let program = json!({"name": "b_first", "command": ["cat"]});
    both.tools = vec![serde_json::from_value(program).unwrap()];
    let error = both.schemas(&Value::Null).unwrap_err().to_string();
    assert!(
        error.contains("tools: \"b_first\", must have another name"),
        "{error}"
    );
}

#[rstest]
#[case(json!({"name": "a"}), "mcp[0].command: [], must be given, or url")]
#[case(json!({"name": "", "command": ["cat"]}), "mcp[0].name: \"\"")]
#[case(json!({"name": "a", "command": ["cat"], "url": "http://a"}), "mcp[0].command: [\"cat\"], must be empty with url")]
#[case(json!({"name": "a", "url": "localhost:80"}), "mcp[0].url: \"localhost:80\", must begin with http://")]
#[case(json!({"name": "a", "command": ["cat"], "workers": 2}), "mcp[0].workers: 2, must be 1 without session: shared")]
#[case(json!({"name": "a", "command": ["cat"], "api_key_env": "KEY"}), "mcp[0].api_key_env: given, must be absent without url")]
#[case(json!({"name": "a", "url": "http://a", "isolation": {}}), "mcp[0].isolation: given, must be absent with url")]
#[case(json!({"name": "a", "command": ["cat"], "time_limit_seconds": 0}), "mcp[0].time_limit_seconds: 0, must be above 0")]
fn options_of_a_server_are_checked(#[case] server: Value, #[case] words: &str) {
    let error = of_servers(json!([server])).validate().unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn there_are_tools_and_each_server_has_its_name() {
    let server = json!({"name": "a", "command": ["cat"]});
    for (servers, words) in [
        (json!([]), "tools: none, must be at least one"),
        (
            json!([server, server]),
            "mcp[1].name: \"a\", must be the name of one server only",
        ),
    ] {
        let error = of_servers(servers).validate().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// A server over HTTP, which counts the calls in each session. A fault may replace an answer.
#[derive(Default)]
struct HttpFake {
    sessions: Mutex<usize>,
    counts: Mutex<BTreeMap<String, usize>>,
}

type Fault = dyn Fn(&Value, usize) -> Option<Reply> + Send + Sync;

fn http(fault: impl Fn(&Value, usize) -> Option<Reply> + Send + Sync + 'static) -> HttpServer {
    let fault: Arc<Fault> = Arc::new(fault);
    let fake = HttpFake::default();
    HttpServer::start(move |request| fake.answer(request, &*fault))
}

/// A response to a request.
fn response(id: &Value, result: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
}

fn stream(events: &[String]) -> Reply {
    let events = events
        .iter()
        .map(|event| format!("event: message\ndata: {event}\n\n"));
    let body: String = events.collect();
    let reply = Reply::new(200, format!(": start\n\nid: 0\ndata:\n\n{body}"));
    reply
        .with_header("content-type", "text/event-stream")
        .chunked()
}

fn text(value: impl ToString) -> Value {
    json!({"content": [{"type": "text", "text": value.to_string()}]})
}

fn body(request: &Request) -> Value {
    serde_json::from_slice(&request.body).unwrap_or_default()
}

impl HttpFake {
    fn answer(&self, request: &Request, fault: &Fault) -> Reply {
        let message = body(request);
        let mut sessions = self.sessions.lock().unwrap();
        if let Some(reply) = fault(&message, *sessions) {
            return reply;
        }
        let id = &message["id"];
        match message["method"].as_str() {
            Some("initialize") => {
                *sessions += 1;
                let version = &message["params"]["protocolVersion"];
                let result = json!({"protocolVersion": version, "capabilities": {"tools": {}}});
                let reply = Reply::new(200, response(id, &result));
                reply.with_header("mcp-session-id", format!("session-{sessions}"))
            }
            Some("tools/list") => {
                let tool = json!({"name": "count", "inputSchema": {"type": "object"}});
                Reply::new(200, response(id, &json!({"tools": [tool]})))
            }
            Some("tools/call") => {
                let session = request.header("mcp-session-id").unwrap_or_default();
                let mut counts = self.counts.lock().unwrap();
                let count = counts.entry(session.to_owned()).or_default();
                *count += 1;
                let ping = json!({"jsonrpc": "2.0", "id": "a", "method": "ping"}).to_string();
                stream(&[ping, response(id, &text(*count))])
            }
            _ => Reply::new(202, ""),
        }
    }
}

fn at(url: &str, more: Value) -> ToolsConfig {
    let mut server = json!({"name": "remote", "url": format!("{url}/mcp")});
    if let (Value::Object(server), Value::Object(more)) = (&mut server, more) {
        server.extend(more);
    }
    of_servers(json!([server]))
}

#[test]
fn requests_over_http_have_their_session_and_version() {
    let server = http(|_, _| None);
    let config = at(&server.url(), json!({}));
    let count = call("count", &json!({}));
    assert_eq!(outputs(&run(&config, &[count.clone(), count])), "1;2;");
    drop(config);
    let seen = |request: &Request| {
        let message = body(request);
        let what = match message["method"].as_str() {
            Some(method) => method.to_owned(),
            None if request.method == "DELETE" => "DELETE".to_owned(),
            None => message["result"].to_string(),
        };
        let session = request.header("mcp-session-id").unwrap_or("-").to_owned();
        assert_eq!(request.path(), "/mcp");
        assert_eq!(
            request.header("accept"),
            Some("application/json, text/event-stream")
        );
        let has_version = request.header("mcp-protocol-version") == Some("2025-11-25");
        assert_eq!(has_version, what != "initialize", "{request:?}");
        format!("{session} {what}")
    };
    let seen: Vec<String> = server.requests().iter().map(seen).collect();
    let expected = [
        "- initialize",
        "session-1 notifications/initialized",
        "session-1 tools/list",
        "session-1 DELETE",
        "- initialize",
        "session-2 notifications/initialized",
        "session-2 tools/call",
        "session-2 {}",
        "session-2 tools/call",
        "session-2 {}",
        "session-2 DELETE",
    ];
    assert_eq!(seen, expected);
}

/// A wrong answer to the message, by the name of its fault.
fn wrong(fault: &str, message: &Value) -> Reply {
    let id = &message["id"];
    let answer = response(id, &text(1));
    let stream = |body: String| {
        let reply = Reply::new(200, body);
        reply.with_header("content-type", "text/event-stream; charset=utf-8")
    };
    match fault {
        "status" => Reply::new(503, r#"{"error": "too many"}"#),
        "closed" => Reply::closed(),
        "cut" => Reply::new(200, answer).cut(),
        "cut stream" => stream(format!("data: {answer}\n")),
        "cut body of a stream" => stream(format!("data: {answer}\n\n")).cut(),
        "empty" => Reply::new(202, ""),
        "moved" => Reply::new(307, "").with_header("location", "/mcp/"),
        "page" => Reply::new(200, "<html>").with_header("content-type", "text/html"),
        "other id" => Reply::new(200, response(&json!(999), &text(1))),
        "expired" => Reply::new(404, "no such session"),
        "error" => {
            let error = json!({"code": -32603, "message": "no disk"});
            let error = json!({"jsonrpc": "2.0", "id": id, "error": error});
            Reply::new(500, error.to_string())
        }
        other => panic!("{other}"),
    }
}

const FAULTS: [(&str, &str); 11] = [
    ("status", "tools/call: status 503: too many"),
    ("closed", "tools/call: "),
    ("cut", "tools/call: "),
    (
        "cut stream",
        "tools/call: the response ended without an answer",
    ),
    ("cut body of a stream", "tools/call: "),
    ("empty", "tools/call: the response ended without an answer"),
    ("moved", "status 307: url must be the address \"/mcp/\""),
    ("page", "must be a JSON object"),
    ("other id", "an answer to 999, must be to "),
    ("expired", "the server has ended the session"),
    ("error", "tools/call: error -32603: no disk"),
];

/// A server with the fault that is the argument of a call.
fn faulty() -> HttpServer {
    http(|message, _| {
        let fault = message["params"]["arguments"]["fault"].as_str()?;
        Some(wrong(fault, message))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(8, 1000)))]

    #[test]
    fn a_fault_over_http_fails_its_trajectory_only(
        is_shared in any::<bool>(),
        // Numbers without a fault are calls that count.
        trajectories in vec(vec(0..2 * FAULTS.len(), 0..4), 1..6),
    ) {
        let server = faulty();
        let session = if is_shared { "shared" } else { "episode" };
        let config = at(&server.url(), json!({ "session": session }));
        let mut count = 0;
        for numbers in trajectories {
            if !is_shared {
                count = 0;
            }
            let arguments = |number: &usize| match FAULTS.get(*number) {
                Some((fault, _)) => json!({ "fault": fault }),
                None => json!({}),
            };
            let calls: Vec<String> = numbers.iter().map(|n| call("count", &arguments(n))).collect();
            let rollout = run(&config, &calls);
            let mut expected = String::new();
            let mut words = None;
            for number in &numbers {
                if let Some((_, of_fault)) = FAULTS.get(*number) {
                    words = Some(of_fault);
                    count = 0;
                    break;
                }
                count += 1;
                expected += &format!("{count};");
            }
            prop_assert_eq!(outputs(&rollout), expected);
            match words {
                Some(words) => assert_failed(&rollout, words),
                None => {
                    let episode = rollout.episode.unwrap();
                    prop_assert_eq!((episode.end, episode.excluded), (EpisodeEnd::Done, false));
                }
            }
        }
    }
}

#[test]
fn a_server_over_http_has_a_time_limit() {
    let server = http(|message, _| {
        let answer = response(&message["id"], &text(1));
        (message["method"] == "tools/call").then(|| Reply::new(200, answer).held())
    });
    let config = at(&server.url(), json!({"time_limit_seconds": 0.05}));
    let rollout = run(&config, &[call("count", &json!({}))]);
    assert_failed(&rollout, "no answer within 0.05 s");
    server.release();
    let closed = ClosedPort::new();
    let error = at(&closed.url(), json!({})).schemas(&Value::Null);
    let message = format!("{:#}", error.unwrap_err());
    assert!(
        message.starts_with("mcp[0]: server \"remote\": initialize: "),
        "{message}"
    );
}

/// Cancels once the server has a call.
struct Called(AtomicBool);

impl Progress for Called {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_call_can_be_canceled() {
    let called = Arc::new(Called(AtomicBool::new(false)));
    let seen = Arc::clone(&called);
    let server = http(move |message, _| {
        let is_call = message["method"] == "tools/call";
        seen.0.fetch_or(is_call, Ordering::SeqCst);
        is_call.then(|| Reply::new(200, "").held())
    });
    let tools = at(&server.url(), json!({"time_limit_seconds": 86400}));
    let turns = [&*call("count", &json!({})), "so"];
    let place = (CHATML, "<|im_end|>");
    let error = play_until(tools.build().unwrap(), place, &turns, false, called).unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
    server.release();
}

/// Answers a call in the session with this number with 404, from its second call on.
fn expiring() -> HttpServer {
    let calls = Mutex::new(0);
    http(move |message, session| {
        let is_call = message["method"] == "tools/call";
        let mut calls = calls.lock().unwrap();
        *calls += usize::from(is_call);
        // The first session with a call ends after it.
        (is_call && *calls == 2 && session > 0).then(|| Reply::new(404, "no such session"))
    })
}

#[test]
fn a_shared_session_that_expires_is_replaced() {
    let server = expiring();
    let config = at(&server.url(), json!({"session": "shared"}));
    let count = call("count", &json!({}));
    assert_eq!(outputs(&run(&config, &[count.clone(), count])), "1;1;");
    let sessions = server.requests();
    let sessions = sessions
        .iter()
        .filter(|request| body(request)["method"] == "initialize");
    assert_eq!(sessions.count(), 2);
}

#[test]
fn a_trajectory_whose_session_expires_has_failed() {
    let server = expiring();
    let count = call("count", &json!({}));
    let rollout = run(&at(&server.url(), json!({})), &[count.clone(), count]);
    assert_failed(&rollout, "the server has ended the session");
}

#[test]
fn a_session_that_has_failed_gets_no_further_request() {
    let server = faulty();
    let config = at(&server.url(), json!({}));
    let rollout = run(&config, &[call("count", &json!({"fault": "status"}))]);
    assert_failed(&rollout, "status 503");
    drop(config);
    let requests = server.requests();
    let ended = requests.iter().filter(|request| request.method == "DELETE");
    let ended: Vec<_> = ended
        .map(|request| request.header("mcp-session-id"))
        .collect();
    assert_eq!(ended, [Some("session-1")], "that of the list");
}

#[rstest]
#[case(json!({"code": -32022, "message": "unsupported", "data": {"supported": ["2026-07-28"], "requested": "2025-11-25"}}))]
#[case(json!({"code": -32601, "message": "unknown method"}))]
fn a_server_without_sessions_gets_the_version_in_each_request(#[case] refusal: Value) {
    let server = http(move |message, _| {
        let id = &message["id"];
        let meta = &message["params"]["_meta"];
        if message["method"] == "initialize" {
            let error = &refusal;
            let error = json!({"jsonrpc": "2.0", "id": id, "error": error});
            return Some(Reply::new(400, error.to_string()));
        }
        let version = &meta["io.modelcontextprotocol/protocolVersion"];
        assert_eq!(version, "2026-07-28", "{message}");
        assert!(meta["io.modelcontextprotocol/clientCapabilities"].is_object());
        let result = json!({"resultType": "complete", "content": text(5)["content"]});
        (message["method"] == "tools/call").then(|| Reply::new(200, response(id, &result)))
    });
    let rollout = run(&at(&server.url(), json!({})), &[call("count", &json!({}))]);
    assert_eq!(outputs(&rollout), "5;");
    let requests = server.requests();
    let last = requests.last().unwrap();
    let header = |name: &str| last.header(name).unwrap_or_default();
    let routing = ["mcp-protocol-version", "mcp-method", "mcp-name"].map(header);
    assert_eq!(routing, ["2026-07-28", "tools/call", "count"]);
    assert!(requests.iter().all(|request| request.method == "POST"));
}
