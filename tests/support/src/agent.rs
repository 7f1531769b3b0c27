//! Agents in Python.

/// The start of an agent: it reads its row, and `post` sends JSON with the episode's key.
pub const AGENT_START: &str = r#"
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
"#;
