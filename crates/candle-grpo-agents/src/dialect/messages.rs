//! Anthropic's `/v1/messages`.

use serde_json::{Value, json};

use super::chat::{UNFORCED, function, tools};
use super::fields::{Fields, content_text};
use super::{Event, Form};
use crate::message::{ASSISTANT, Call, Message, TOOL, name_results};
use crate::request::{Answer, End, Input, Refusal, Request};

pub(super) fn read(body: &Value) -> Result<(Request, Form), Refusal> {
    let fields = Fields::new(body, "")?;
    let tools = tools(&fields, |tool| function(tool, "input_schema"))?;
    let calls = match fields.get("tool_choice") {
        None => true,
        Some(choice) => match choice["type"].as_str() {
            Some("auto") => true,
            Some("none") => false,
            _ => return Err(fields.invalid("tool_choice", UNFORCED)),
        },
    };
    fields.refuse("thinking", &[json!({"type": "disabled"})], "be disabled")?;
    let limit = fields.count("max_tokens")?;
    let must = "be a whole number of at least 1";
    let request = Request {
        role: None,
        input: Input::chat(messages(&fields)?, tools.filter(|_| calls)),
        parses_calls: calls,
        max_tokens: Some(limit.ok_or_else(|| fields.invalid("max_tokens", must))?),
        stop: fields.stop_strings("stop_sequences")?,
        log_probs: false,
        sampling: fields.numbers(&["temperature", "top_p", "top_k"])?,
    };
    Ok((request, Form::read(&fields)?))
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, Refusal> {
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = content_text(system, &["text"], "system")?;
        messages.push(Message::new("system", text));
    }
    let must = "be a list of at least one message";
    let list = fields.list("messages")?.filter(|list| !list.is_empty());
    for (at, message) in list
        .ok_or_else(|| fields.invalid("messages", must))?
        .iter()
        .enumerate()
    {
        let path = format!("messages[{at}]");
        let message = Fields::new(message, &path)?;
        let content = message.get("content").unwrap_or(&Value::Null);
        let path = message.path("content");
        match message.required_text("role")? {
            "user" => messages.extend(user(content, &path)?),
            ASSISTANT => messages.push(assistant(content, &path)?),
            "system" => {
                let text = content_text(content, &["text"], &path)?;
                messages.push(Message::new("system", text));
            }
            _ => return Err(message.invalid("role", "be user or assistant")),
        }
    }
    if messages.last().is_some_and(|last| last.role == ASSISTANT) {
        let must = "end with a message of the user: the beginning of an answer is not supported";
        return Err(fields.invalid("messages", must));
    }
    name_results(&mut messages);
    Ok(messages)
}

/// User message: tool results, and texts between them.
fn user(content: &Value, path: &str) -> Result<Vec<Message>, Refusal> {
    let Value::Array(blocks) = content else {
        return Ok(vec![Message::new(
            "user",
            content_text(content, &["text"], path)?,
        )]);
    };
    let mut messages: Vec<Message> = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let fields = Fields::new(block, &path)?;
        match fields.required_text("type")? {
            "text" => {
                let text = fields.required_text("text")?;
                match messages.last_mut() {
                    Some(last) if last.role == "user" => last.content += text,
                    _ => messages.push(Message::new("user", text)),
                }
            }
            "tool_result" => {
                let result = fields.get("content").unwrap_or(&Value::Null);
                let text = content_text(result, &["text"], &fields.path("content"))?;
                messages.push(Message {
                    call_id: Some(fields.required_text("tool_use_id")?.to_owned()),
                    ..Message::new(TOOL, text)
                });
            }
            _ => {
                let must = "be text or tool_result: only text is supported";
                return Err(fields.invalid("type", must));
            }
        }
    }
    Ok(messages)
}

fn assistant(content: &Value, path: &str) -> Result<Message, Refusal> {
    let Value::Array(blocks) = content else {
        let text = content_text(content, &["text"], path)?;
        return Ok(Message::new(ASSISTANT, text));
    };
    let mut message = Message::new(ASSISTANT, "");
    for (at, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let fields = Fields::new(block, &path)?;
        match fields.required_text("type")? {
            "text" => message.content += fields.required_text("text")?,
            "tool_use" => message.calls.push(Call {
                id: fields.required_text("id")?.to_owned(),
                name: fields.required_text("name")?.to_owned(),
                arguments: fields.get("input").cloned().unwrap_or(json!({})),
            }),
            "thinking" | "redacted_thinking" => {}
            _ => return Err(fields.invalid("type", "be text, tool_use or thinking")),
        }
    }
    Ok(message)
}

fn blocks(answer: &Answer) -> Vec<Value> {
    let message = &answer.message;
    let mut blocks = Vec::new();
    if !message.content.is_empty() || message.calls.is_empty() {
        blocks.push(json!({"type": "text", "text": message.content}));
    }
    for call in &message.calls {
        blocks.push(json!({
            "type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments,
        }));
    }
    blocks
}

/// Returns the stop reason, and the string that ended the answer.
fn stop(answer: &Answer) -> (&'static str, Option<&str>) {
    match &answer.end {
        End::Stop => ("end_turn", None),
        End::StopString(text) => ("stop_sequence", Some(text)),
        End::Length => ("max_tokens", None),
        End::Calls => ("tool_use", None),
    }
}

pub(super) fn json(answer: &Answer, form: &Form) -> Value {
    let (reason, text) = stop(answer);
    json!({
        "id": format!("msg_{}", answer.id),
        "type": "message",
        "role": ASSISTANT,
        "model": form.model,
        "content": blocks(answer),
        "stop_reason": reason,
        "stop_sequence": text,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.drawn},
    })
}

pub(super) fn events(answer: &Answer, form: &Form) -> Vec<Event> {
    let mut message = json(answer, form);
    message["content"] = json!([]);
    message["stop_reason"] = Value::Null;
    message["stop_sequence"] = Value::Null;
    message["usage"]["output_tokens"] = 0.into();
    let mut events = vec![Event::typed("message_start", json!({"message": message}))];
    for (at, block) in blocks(answer).into_iter().enumerate() {
        let (mut start, delta) = (
            block.clone(),
            if block["type"] == "text" {
                json!({"type": "text_delta", "text": block["text"]})
            } else {
                let input = block["input"].to_string();
                json!({"type": "input_json_delta", "partial_json": input})
            },
        );
        if block["type"] == "text" {
            start["text"] = "".into()
        } else {
            start["input"] = json!({})
        }
        let start = json!({"index": at, "content_block": start});
        events.push(Event::typed("content_block_start", start));
        let delta = json!({"index": at, "delta": delta});
        events.push(Event::typed("content_block_delta", delta));
        events.push(Event::typed("content_block_stop", json!({"index": at})));
    }
    let (reason, text) = stop(answer);
    let delta = json!({
        "delta": {"stop_reason": reason, "stop_sequence": text},
        "usage": {"output_tokens": answer.drawn},
    });
    events.push(Event::typed("message_delta", delta));
    events.push(Event::typed("message_stop", json!({})));
    events
}
