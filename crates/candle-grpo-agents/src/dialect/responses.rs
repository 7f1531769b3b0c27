//! OpenAI's `/v1/responses`.

use serde_json::{Value, json};

use super::chat::{UNCONSTRAINED, function, parses_calls, tools};
use super::fields::{Fields, content_text};
use super::{Event, Form};
use crate::message::{ASSISTANT, Call, Message, TOOL, arguments, name_results};
use crate::request::{Answer, End, Input, Refusal, Request};

/// Prefix for answer ids.
const ID: &str = "resp_";

pub(super) fn read(body: &Value) -> Result<(Request, Form), Refusal> {
    let fields = Fields::new(body, "")?;
    let tools = tools(&fields, |tool| {
        if tool["type"] == "function" {
            function(tool, "parameters")
        } else {
            Value::Null
        }
    })?;
    let calls = parses_calls(&fields)?;
    if let Some(text) = fields.get("text") {
        let text = Fields::new(text, "text")?;
        text.refuse("format", &[json!({"type": "text"})], UNCONSTRAINED)?;
    }
    fields.refuse("background", &[json!(false)], "be false")?;
    fields.refuse("conversation", &[], "be absent; use previous_response_id")?;
    fields.refuse("prompt", &[], "be absent")?;
    let instructions = fields.text("instructions")?;
    let mut messages: Vec<Message> = Vec::new();
    messages.extend(instructions.map(|text| Message::new("system", text)));
    messages.extend(input(&fields)?);
    name_results(&mut messages);
    let previous = fields.text("previous_response_id")?;
    let previous = previous.map(|id| id.strip_prefix(ID).unwrap_or(id).to_owned());
    let request = Request {
        role: None,
        input: Input::Chat {
            messages,
            tools: tools.filter(|_| calls),
            has_instructions: instructions.is_some(),
            previous,
        },
        parses_calls: calls,
        max_tokens: fields.count("max_output_tokens")?,
        stop: Vec::new(),
        log_probs: false,
        sampling: fields.numbers(&["temperature", "top_p"])?,
    };
    let or = |name: &str, default: Value| fields.get(name).cloned().unwrap_or(default);
    let form = Form {
        echo: json!({
            "instructions": instructions,
            "max_output_tokens": or("max_output_tokens", Value::Null),
            "metadata": or("metadata", json!({})),
            "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
            "previous_response_id": or("previous_response_id", Value::Null),
            "temperature": or("temperature", Value::Null),
            "tool_choice": or("tool_choice", json!("auto")),
            "tools": or("tools", json!([])),
            "top_p": or("top_p", Value::Null),
        }),
        ..Form::read(&fields)?
    };
    Ok((request, form))
}

/// Parses the input messages. Adjacent texts and calls from the assistant become one message.
fn input(fields: &Fields<'_>) -> Result<Vec<Message>, Refusal> {
    let must = "be a text or a list of at least one item";
    let items = match fields.get("input") {
        Some(Value::String(text)) => return Ok(vec![Message::new("user", text.as_str())]),
        Some(Value::Array(items)) if !items.is_empty() => items,
        _ => return Err(fields.invalid("input", must)),
    };
    let mut messages: Vec<Message> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let path = format!("input[{at}]");
        let item = Fields::new(item, &path)?;
        match item.text("type")?.unwrap_or("message") {
            "message" => {
                let role = match item.required_text("role")? {
                    "developer" => "system",
                    role @ ("system" | "user" | ASSISTANT) => role,
                    _ => {
                        let must = "be system, developer, user or assistant";
                        return Err(item.invalid("role", must));
                    }
                };
                let types = ["input_text", "output_text", "text", "refusal"];
                let content = item.get("content").unwrap_or(&Value::Null);
                let text = content_text(content, &types, &item.path("content"))?;
                messages.push(Message::new(role, text));
            }
            "function_call" => {
                let call = Call {
                    id: item.required_text("call_id")?.to_owned(),
                    name: item.required_text("name")?.to_owned(),
                    arguments: arguments(item.text("arguments")?.unwrap_or("{}")),
                };
                match messages.last_mut() {
                    Some(last) if last.role == ASSISTANT => last.calls.push(call),
                    _ => messages.push(Message {
                        calls: vec![call],
                        ..Message::new(ASSISTANT, "")
                    }),
                }
            }
            "function_call_output" => {
                let output = item.get("output").unwrap_or(&Value::Null);
                let types = ["input_text", "output_text", "text"];
                let text = content_text(output, &types, &item.path("output"))?;
                messages.push(Message {
                    call_id: Some(item.required_text("call_id")?.to_owned()),
                    ..Message::new(TOOL, text)
                });
            }
            "reasoning" => {}
            _ => {
                let must = "be message, function_call, function_call_output or reasoning";
                return Err(item.invalid("type", must));
            }
        }
    }
    Ok(messages)
}

fn items(answer: &Answer) -> Vec<Value> {
    let message = &answer.message;
    let mut items = Vec::new();
    if !message.content.is_empty() || message.calls.is_empty() {
        items.push(json!({
            "type": "message",
            "id": format!("msg_{}", answer.id),
            "status": "completed",
            "role": ASSISTANT,
            "content": [{
                "type": "output_text", "text": message.content, "annotations": [], "logprobs": [],
            }],
        }));
    }
    for (at, call) in message.calls.iter().enumerate() {
        items.push(json!({
            "type": "function_call",
            "id": format!("fc_{}{at}", answer.id),
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments_text(),
        }));
    }
    items
}

pub(super) fn json(answer: &Answer, form: &Form) -> Value {
    let is_cut = answer.end == End::Length;
    let details = json!({"reason": "max_output_tokens"});
    let mut response = json!({
        "id": format!("{ID}{}", answer.id),
        "object": "response",
        "created_at": answer.created,
        "status": if is_cut { "incomplete" } else { "completed" },
        "error": null,
        "incomplete_details": if is_cut { details } else { Value::Null },
        "model": form.model,
        "output": items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.drawn,
        },
    });
    if let (Value::Object(response), Value::Object(echo)) = (&mut response, &form.echo) {
        response.extend(echo.clone());
    }
    response
}

pub(super) fn events(answer: &Answer, form: &Form) -> Vec<Event> {
    let whole = json(answer, form);
    let mut begun = whole.clone();
    begun["status"] = "in_progress".into();
    begun["incomplete_details"] = Value::Null;
    begun["output"] = json!([]);
    begun["usage"] = Value::Null;
    let mut events = vec![
        Event::typed("response.created", json!({"response": begun})),
        Event::typed("response.in_progress", json!({"response": begun})),
    ];
    for (at, item) in items(answer).into_iter().enumerate() {
        let place = |fields: Value| {
            let mut fields = fields;
            fields["item_id"] = item["id"].clone();
            fields["output_index"] = at.into();
            fields
        };
        let mut start = item.clone();
        start["status"] = "in_progress".into();
        let is_text = item["type"] == "message";
        if is_text {
            start["content"] = json!([])
        } else {
            start["arguments"] = "".into()
        }
        let added = json!({"output_index": at, "item": start});
        events.push(Event::typed("response.output_item.added", added));
        if is_text {
            let part = &item["content"][0];
            let mut empty = part.clone();
            empty["text"] = "".into();
            let of = |name: &str, value: &Value| {
                let mut fields = place(json!({"content_index": 0}));
                fields[name] = value.clone();
                fields
            };
            let mut delta = of("delta", &part["text"]);
            delta["logprobs"] = json!([]);
            let mut done = of("text", &part["text"]);
            done["logprobs"] = json!([]);
            events.extend([
                Event::typed("response.content_part.added", of("part", &empty)),
                Event::typed("response.output_text.delta", delta),
                Event::typed("response.output_text.done", done),
                Event::typed("response.content_part.done", of("part", part)),
            ]);
        } else {
            let delta = place(json!({"delta": item["arguments"]}));
            let done = place(json!({"arguments": item["arguments"], "name": item["name"]}));
            events.extend([
                Event::typed("response.function_call_arguments.delta", delta),
                Event::typed("response.function_call_arguments.done", done),
            ]);
        }
        let done = json!({"output_index": at, "item": item});
        events.push(Event::typed("response.output_item.done", done));
    }
    let end = match answer.end {
        End::Length => "response.incomplete",
        _ => "response.completed",
    };
    events.push(Event::typed(end, json!({"response": whole})));
    for (at, event) in events.iter_mut().enumerate() {
        event.data["sequence_number"] = at.into();
    }
    events
}
