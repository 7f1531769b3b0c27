//! The OpenAI and Anthropic APIs.

use candle_grpo_train::FinishReason;
use candle_grpo_train::rollout::PromptRequest;
use rstest::rstest;
use serde_json::{Value, json};

use super::client::Client;
use super::drawer::{Draw, STOP, assert_rows_have_draws, decode, episode, rendered, says, spelled};

/// A call whose argument contains the mark that ends calls.
pub(crate) const CALL: &str = r#"Let me see.<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> b"}}</tool_call>"#;

fn schema() -> Value {
    json!({"type": "function", "function": {
        "name": "write",
        "description": "Writes.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    }})
}

/// The conversation for all dialects: a call, its result, and the last answer.
fn expected(call: &Value, content: &str) -> Value {
    let function = json!({"name": "write", "arguments": {"text": "a </tool_call> b"}});
    json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": content,
         "tool_calls": [{"id": call, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call, "content": "written"},
    ])
}

/// Checks that the second answer was sampled after the first one, in the same row.
fn assert_extends(draws: &[Draw], tools: &Value) {
    let start = [
        json!({"role": "system", "content": "be brief"}),
        json!({"role": "user", "content": "so?"}),
    ];
    assert_eq!(
        decode(&draws[0].before),
        rendered(&json!(start), Some(tools))
    );
    let turn = [&draws[0].before[..], &spelled(CALL)].concat();
    assert!(draws[1].before.starts_with(&turn));
    let tail = "\n<|im_start|>tool\nwritten<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(decode(&draws[1].before[turn.len()..]), tail);
}

#[rstest]
fn chat_completions_call_tools(#[values(false, true)] streams: bool) {
    let (rollout, draws) = episode(&says(&[CALL, "so"]), |agent| {
        let ask = |messages: &Value| -> Value {
            let body = json!({
                "model": "gpt", "messages": messages, "tools": [schema()], "stream": streams,
                "stream_options": {"include_usage": true},
            });
            let reply = agent.post("/v1/chat/completions", &body);
            if !streams {
                return reply.json()["choices"][0].clone();
            }
            assert!(reply.head.contains("text/event-stream"), "{}", reply.head);
            assert!(reply.text.ends_with("data: [DONE]\n\n"));
            joined_chunks(&reply.events())
        };
        let mut messages = json!([
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "so?"},
        ]);
        let choice = ask(&messages);
        assert_eq!(choice["finish_reason"], "tool_calls");
        let message = &choice["message"];
        assert_eq!(message["content"], "Let me see.");
        let call = &message["tool_calls"][0];
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"text": "a </tool_call> b"}));
        let all = messages.as_array_mut().unwrap();
        all.push(message.clone());
        all.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "written"}));
        let choice = ask(&messages);
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!("so"), &json!("stop"))
        );
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(rollout.rows().count(), 1);
    assert_extends(&draws, &json!([schema()]));
}

/// Joins a stream's chunks into a choice.
fn joined_chunks(chunks: &[Value]) -> Value {
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    let mut message = json!({"role": "assistant", "content": ""});
    let mut finish_reason = Value::Null;
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        let choice = &chunk["choices"][0];
        if let Some(text) = choice["delta"]["content"].as_str() {
            message["content"] = (message["content"].as_str().unwrap().to_owned() + text).into();
        }
        for call in choice["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let mut call = call.clone();
            assert_eq!(
                call.as_object_mut().unwrap().remove("index"),
                Some(json!(0))
            );
            message["tool_calls"] = json!([call]);
        }
        finish_reason = choice["finish_reason"].clone();
    }
    json!({"message": message, "finish_reason": finish_reason})
}

#[rstest]
fn messages_of_anthropic_call_tools(#[values(false, true)] streams: bool) {
    let (rollout, draws) = episode(&says(&[CALL, "so"]), |agent| {
        let ask = |messages: &Value| -> Value {
            let body = json!({
                "model": "claude", "max_tokens": 500, "system": [{"type": "text", "text": "be brief"}],
                "messages": messages, "stream": streams,
                "tools": [{
                    "name": "write", "description": "Writes.",
                    "input_schema": schema()["function"]["parameters"],
                }],
            });
            let headers = [
                ("x-api-key", agent.key.as_str()),
                ("anthropic-version", "2023-06-01"),
            ];
            let path = format!("{}/v1/messages", agent.path);
            let body = body.to_string();
            let sent = super::client::send(agent.address, "POST", &path, &headers, body.as_bytes());
            let reply = super::client::receive(sent);
            if streams {
                joined_events(&reply.events())
            } else {
                reply.json()
            }
        };
        let mut messages = json!([{"role": "user", "content": "so?"}]);
        let answer = ask(&messages);
        assert_eq!(answer["stop_reason"], "tool_use");
        assert_eq!(
            answer["content"][0],
            json!({"type": "text", "text": "Let me see."})
        );
        let call = &answer["content"][1];
        assert_eq!(call["input"], json!({"text": "a </tool_call> b"}));
        let all = messages.as_array_mut().unwrap();
        all.push(json!({"role": "assistant", "content": answer["content"]}));
        all.push(json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "written"}]},
        ]}));
        let answer = ask(&messages);
        assert_eq!(answer["stop_reason"], "end_turn");
        assert_eq!(answer["content"], json!([{"type": "text", "text": "so"}]));
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(rollout.rows().count(), 1);
    assert_extends(&draws, &json!([schema()]));
}

/// Joins Anthropic's events into a message.
fn joined_events(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut input = String::new();
    for event in events {
        let index = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), index);
                let blocks = message["content"].as_array_mut().unwrap();
                blocks.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => match event["delta"]["type"].as_str().unwrap() {
                "text_delta" => message["content"][index]["text"] = event["delta"]["text"].clone(),
                "input_json_delta" => input += event["delta"]["partial_json"].as_str().unwrap(),
                other => panic!("{other}"),
            },
            "content_block_stop" if !input.is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&input).unwrap();
            }
            "message_delta" => message["stop_reason"] = event["delta"]["stop_reason"].clone(),
            _ => {}
        }
    }
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    message
}

#[rstest]
fn responses_call_tools(
    #[values(false, true)] streams: bool,
    #[values(false, true)] previous: bool,
) {
    let (rollout, draws) = episode(&says(&[CALL, "so"]), |agent| {
        let ask = |input: &Value, id: &Value| -> Value {
            let function = &schema()["function"];
            let body = json!({
                "model": "gpt", "instructions": "be brief", "input": input, "stream": streams,
                "previous_response_id": id,
                "tools": [{
                    "type": "function", "name": "write", "description": "Writes.",
                    "parameters": function["parameters"], "strict": true,
                }],
            });
            let reply = agent.post("/v1/responses", &body);
            if !streams {
                return reply.json();
            }
            let events = reply.events();
            for (at, event) in events.iter().enumerate() {
                assert_eq!(event["sequence_number"], at);
            }
            let last = events.last().unwrap();
            assert_eq!(last["type"], "response.completed");
            let items = events
                .iter()
                .filter(|event| event["type"] == "response.output_item.done");
            let items: Vec<&Value> = items.map(|event| &event["item"]).collect();
            assert_eq!(json!(items), last["response"]["output"]);
            last["response"].clone()
        };
        let mut input =
            json!([{"role": "user", "content": [{"type": "input_text", "text": "so?"}]}]);
        let answer = ask(&input, &Value::Null);
        assert_eq!(answer["status"], "completed");
        assert_eq!(answer["output"][0]["content"][0]["text"], "Let me see.");
        let call = &answer["output"][1];
        assert_eq!(
            (&call["type"], &call["name"]),
            (&json!("function_call"), &json!("write"))
        );
        let result = json!({
            "type": "function_call_output", "call_id": call["call_id"], "output": "written",
        });
        let answer = if previous {
            ask(&json!([result]), &answer["id"])
        } else {
            let all = input.as_array_mut().unwrap();
            all.extend(answer["output"].as_array().unwrap().clone());
            all.push(result);
            ask(&input, &Value::Null)
        };
        assert_eq!(answer["output"][0]["content"][0]["text"], "so");
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
    assert_eq!(rollout.rows().count(), 1);
    assert_extends(&draws, &json!([schema()]));
}

#[test]
fn a_call_in_an_edited_conversation_is_rendered_by_the_template() {
    let (_, draws) = episode(&says(&["so"]), |agent| {
        let id = "call00001";
        let mut messages = expected(&json!(id), "Hm.");
        let function = &mut messages[2]["tool_calls"][0]["function"];
        function["arguments"] = json!(r#"{"text": "a </tool_call> b"}"#);
        agent.chat(json!({"messages": messages, "tools": [schema()]}));
        agent.done(json!(1));
    });
    let messages = expected(&json!("call00001"), "Hm.");
    assert_eq!(
        decode(&draws[0].before),
        rendered(&messages, Some(&json!([schema()])))
    );
}

#[rstest]
#[case::not_json("<tool_call>write</tool_call>", json!("auto"))]
#[case::no_choice(CALL, json!("none"))]
fn a_call_that_is_not_read_stays_text(#[case] turn: &'static str, #[case] choice: Value) {
    episode(&says(&[turn]), |agent| {
        let message = json!({"role": "user", "content": "so?"});
        let answer = agent.chat(json!({
            "messages": [message], "tools": [schema()], "tool_choice": choice,
        }));
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], turn);
        assert_eq!(choice["finish_reason"], "stop");
        assert!(choice["message"].get("tool_calls").is_none());
        agent.done(json!(1));
    });
}

#[test]
fn log_probs_and_lengths_are_those_of_the_drawn_tokens() {
    let policy = |request: &PromptRequest<'_>, _: &[String]| {
        let tokens = spelled("abab")[..request.max_new_tokens.min(3)].to_vec();
        (tokens, FinishReason::Length)
    };
    let (_, draws) = episode(&policy, |agent| {
        let message = json!({"role": "user", "content": "so?"});
        let answer = agent.chat(json!({
            "messages": [message], "max_completion_tokens": 2, "logprobs": true,
        }));
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["message"]["content"], "ab");
        let content = choice["logprobs"]["content"].as_array().unwrap();
        let tokens: Vec<&Value> = content.iter().map(|token| &token["token"]).collect();
        assert_eq!(tokens, ["a", "b"]);
        let log_probs: Vec<f64> = content
            .iter()
            .map(|token| token["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(log_probs, [0., -1. / 64.]);
        assert_eq!(answer["usage"]["completion_tokens"], 2);
        agent.done(json!(1));
    });
    assert_eq!(draws[0].completion.tokens.len(), 2);
    assert!(!draws[0].completion.tokens.contains(&STOP));
}

/// The request's body in a dialect, with the path below `/v1/`.
fn body_of(dialect: &str) -> (&'static str, Value) {
    let messages = json!([{"role": "user", "content": "so?"}]);
    match dialect {
        "chat" => {
            let limit = json!({"messages": messages, "max_tokens": 20, "stop": ["us", "END"]});
            ("chat/completions", limit)
        }
        "text" => {
            let limit = json!({"prompt": "so?", "max_tokens": 20, "stop": ["us", "END"]});
            ("completions", limit)
        }
        "anthropic" => {
            let stop = json!(["us", "END"]);
            let limit = json!({"messages": messages, "max_tokens": 20, "stop_sequences": stop});
            ("messages", limit)
        }
        _ => {
            let limit = json!({"input": "so?", "max_output_tokens": 20});
            ("responses", limit)
        }
    }
}

/// An answer's text and end, which the last events of a stream repeat.
fn text_and_end(dialect: &str, reply: &super::client::Reply, streams: bool) -> (Value, Value) {
    let events = if streams { reply.events() } else { Vec::new() };
    match dialect {
        "chat" if streams => {
            let texts = events.iter();
            let texts = texts.filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
            let last = events.last().unwrap();
            let end = last["choices"][0]["finish_reason"].clone();
            (json!(texts.collect::<String>()), end)
        }
        "chat" => {
            let choice = &reply.json()["choices"][0];
            (
                choice["message"]["content"].clone(),
                choice["finish_reason"].clone(),
            )
        }
        "text" => {
            let events = if streams { events } else { vec![reply.json()] };
            let choice = &events[0]["choices"][0];
            (choice["text"].clone(), choice["finish_reason"].clone())
        }
        "anthropic" => {
            let message = if streams {
                let mut message = joined_events(&events);
                let mut deltas = events
                    .iter()
                    .filter(|event| event["type"] == "message_delta");
                message["stop_sequence"] = deltas.next().unwrap()["delta"]["stop_sequence"].clone();
                message
            } else {
                reply.json()
            };
            let end = json!([message["stop_reason"], message["stop_sequence"]]);
            (message["content"][0]["text"].clone(), end)
        }
        _ => {
            let response = match events.last() {
                Some(last) => last["response"].clone(),
                None => reply.json(),
            };
            let end = json!([response["status"], response["incomplete_details"]]);
            (response["output"][0]["content"][0]["text"].clone(), end)
        }
    }
}

/// The reason for an answer's end, also in a stream.
#[rstest]
#[case("chat", FinishReason::StopToken, json!("stop"))]
#[case("chat", FinishReason::StopString, json!("stop"))]
#[case("chat", FinishReason::Length, json!("length"))]
#[case("text", FinishReason::StopToken, json!("stop"))]
#[case("text", FinishReason::StopString, json!("stop"))]
#[case("text", FinishReason::Length, json!("length"))]
#[case("anthropic", FinishReason::StopToken, json!(["end_turn", null]))]
#[case("anthropic", FinishReason::StopString, json!(["stop_sequence", "END"]))]
#[case("anthropic", FinishReason::Length, json!(["max_tokens", null]))]
#[case("responses", FinishReason::StopToken, json!(["completed", null]))]
#[case("responses", FinishReason::Length, json!(["incomplete", {"reason": "max_output_tokens"}]))]
fn an_answer_has_the_reason_for_its_end(
    #[case] dialect: &str,
    #[case] reason: FinishReason,
    #[case] expected: Value,
    #[values(false, true)] streams: bool,
) {
    let policy = |request: &PromptRequest<'_>, stop: &[String]| {
        assert_eq!(request.max_new_tokens, 20);
        let text = match reason {
            FinishReason::StopString => "ab END",
            _ => "ab ",
        };
        assert!(dialect == "responses" || stop == ["us", "END"]);
        let mut tokens = spelled(text);
        if reason != FinishReason::StopToken {
            tokens.pop();
        }
        (tokens, reason)
    };
    let (rollout, draws) = episode(&policy, |agent| {
        let (path, mut body) = body_of(dialect);
        body["stream"] = streams.into();
        let reply = agent.post(&format!("/v1/{path}"), &body);
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(
            text_and_end(dialect, &reply, streams),
            (json!("ab "), expected),
            "{reply:?}"
        );
        agent.done(json!(1));
    });
    assert_rows_have_draws(&rollout, &draws);
}

/// Refusals name the argument.
#[rstest]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "n": 2}), "n: 2, must be 1")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "top_logprobs": 3}), "top_logprobs: 3")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "tool_choice": "required"}), "tool_choice")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "response_format": {"type": "json_object"}}), "response_format")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "max_tokens": 0}), "max_tokens: 0")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "stop": [""]}), "stop")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": "so"}], "temperature": "hot"}), "temperature: \"hot\"")]
#[case("chat/completions", json!({"messages": [{"role": "robot", "content": "so"}]}), "messages[0].role: \"robot\"")]
#[case("chat/completions", json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content[0].type")]
#[case("chat/completions", json!({"messages": []}), "messages: []")]
#[case("chat/completions", json!({"messages": [{"role": "user"}], "tools": [{"type": "web"}]}), "tools[0]")]
#[case("completions", json!({"prompt": ["a", "b"]}), "prompt")]
#[case("completions", json!({"prompt": [1, 300]}), "token 300, must be below 300")]
#[case("completions", json!({"prompt": "so", "echo": true}), "echo: true")]
#[case("completions", json!({"prompt": "so", "n": 2}), "n: 2, must be 1")]
#[case("completions", json!({"prompt": "so", "best_of": 2}), "best_of: 2, must be 1")]
#[case("completions", json!({"prompt": "so", "logprobs": 2}), "logprobs: 2, must be 0, 1")]
#[case("responses", json!({"input": "so", "previous_response_id": "resp_x"}), "previous_response_id: x")]
#[case("responses", json!({"input": [{"type": "image"}]}), "input[0].type")]
fn what_is_not_supported_is_named(#[case] path: &str, #[case] body: Value, #[case] words: &str) {
    let (rollout, draws) = episode(&says(&[]), |agent| {
        let reply = agent.post(&format!("/v1/{path}"), &body);
        assert_eq!(reply.status, 400, "{reply:?}");
        let message = reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(words), "{message}");
        agent.done(json!(1));
    });
    assert!(draws.is_empty());
    assert_eq!(rollout.completion.written, Some(vec![false]));
}

#[test]
fn refusals_of_anthropic_have_its_form() {
    episode(&says(&[]), |agent: Client| {
        let reply = agent.post("/v1/messages", &json!({"messages": [], "max_tokens": 5}));
        assert_eq!(reply.status, 400);
        assert_eq!(reply.json()["type"], "error");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
        agent.done(json!(1));
    });
}
