//! OpenAI's `/v1/chat/completions`.

use serde_json::{Map, Value, json};

use super::fields::{Fields, content_text};
use super::{Event, Form};
use crate::message::{ASSISTANT, Call, Message, TOOL, arguments, name_results};
use crate::request::{Answer, End, Input, Refusal, Request};

/// Requirement on the number of answers, as a refusal states it.
pub(super) const ONE_SAMPLE: &str = "be 1: an answer is one sample; send several requests";

/// Sampling settings that a request may have.
pub(super) const SAMPLING: [&str; 4] = [
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
];

/// Requirement on the answer format, as a refusal states it.
pub(super) const UNCONSTRAINED: &str = "be text, or absent: the policy draws without constraints";

/// Requirement on the tool choice, as a refusal states it.
pub(super) const UNFORCED: &str =
    "be auto or none: the policy draws without constraints, so no call can be forced";

pub(super) fn read(body: &Value) -> Result<(Request, Form), Refusal> {
    let fields = Fields::new(body, "")?;
    let tools = tools(&fields, Value::clone)?;
    let calls = parses_calls(&fields)?;
    fields.refuse("n", &[json!(1)], ONE_SAMPLE)?;
    fields.refuse("top_logprobs", &[json!(0)], "be 0")?;
    fields.refuse("logit_bias", &[json!({})], "be absent")?;
    fields.refuse("response_format", &[json!({"type": "text"})], UNCONSTRAINED)?;
    fields.refuse("functions", &[json!([])], "be absent; use tools")?;
    let log_probs = fields.flag("logprobs")?;
    let limit = fields.count("max_completion_tokens")?;
    let request = Request {
        role: None,
        input: Input::chat(messages(&fields)?, tools.filter(|_| calls)),
        parses_calls: calls,
        max_tokens: limit.or(fields.count("max_tokens")?),
        stop: fields.stop_strings("stop")?,
        log_probs,
        sampling: fields.numbers(&SAMPLING)?,
    };
    let form = Form {
        log_probs,
        ..Form::read(&fields)?
    };
    Ok((request, form))
}

/// Converts each entry in the request's tools to a schema. Returns `None` for an empty list.
pub(super) fn tools(
    fields: &Fields<'_>,
    schema: impl Fn(&Value) -> Value,
) -> Result<Option<Value>, Refusal> {
    let Some(tools) = fields.list("tools")?.filter(|tools| !tools.is_empty()) else {
        return Ok(None);
    };
    let mut schemas = Vec::new();
    for (at, tool) in tools.iter().enumerate() {
        let schema = schema(tool);
        if !schema["function"]["name"].is_string() {
            let must = "be a function with a name";
            return Err(Refusal::invalid(&format!("tools[{at}]"), tool, must));
        }
        schemas.push(schema);
    }
    Ok(Some(schemas.into()))
}

/// Function schema without absent fields.
pub(super) fn function(tool: &Value, parameters: &str) -> Value {
    let fields = [
        ("name", &tool["name"]),
        ("description", &tool["description"]),
        ("parameters", &tool[parameters]),
    ];
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    let function: Map<String, Value> = given
        .map(|(name, value)| (name.to_owned(), value.clone()))
        .collect();
    json!({"type": "function", "function": function})
}

/// Returns false if the tool choice is `none`.
pub(super) fn parses_calls(fields: &Fields<'_>) -> Result<bool, Refusal> {
    match fields.get("tool_choice") {
        None => Ok(true),
        Some(choice) if choice == "auto" => Ok(true),
        Some(choice) if choice == "none" => Ok(false),
        Some(_) => Err(fields.invalid("tool_choice", UNFORCED)),
    }
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, Refusal> {
    let must = "be a list of at least one message";
    let list = fields.list("messages")?.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| fields.invalid("messages", must))?;
    let mut messages = Vec::new();
    for (at, message) in list.iter().enumerate() {
        messages.push(read_message(message, &format!("messages[{at}]"))?);
    }
    name_results(&mut messages);
    Ok(messages)
}

fn read_message(message: &Value, path: &str) -> Result<Message, Refusal> {
    let fields = Fields::new(message, path)?;
    let role = match fields.required_text("role")? {
        "developer" => "system",
        role @ ("system" | "user" | ASSISTANT | TOOL) => role,
        _ => {
            let must = "be system, developer, user, assistant or tool";
            return Err(fields.invalid("role", must));
        }
    };
    let content = fields.get("content").unwrap_or(&Value::Null);
    let mut calls = Vec::new();
    for (at, call) in fields.list("tool_calls")?.into_iter().flatten().enumerate() {
        let path = format!("{path}.tool_calls[{at}]");
        let call = Fields::new(call, &path)?;
        let function = call.get("function").unwrap_or(&Value::Null);
        let path = format!("{path}.function");
        let function = Fields::new(function, &path)?;
        calls.push(Call {
            id: call.text("id")?.unwrap_or_default().to_owned(),
            name: function.required_text("name")?.to_owned(),
            arguments: arguments(function.text("arguments")?.unwrap_or("{}")),
        });
    }
    let owned = |text: Option<&str>| text.map(str::to_owned);
    Ok(Message {
        content: content_text(content, &["text", "refusal"], &fields.path("content"))?,
        calls,
        call_id: owned(fields.text("tool_call_id")?),
        name: owned(fields.text("name")?),
        reasoning: owned(fields.text("reasoning_content")?),
        ..Message::new(role, "")
    })
}

fn calls(answer: &Answer) -> Vec<Value> {
    let call = |call: &Call| {
        let function = json!({"name": call.name, "arguments": call.arguments_text()});
        json!({"id": call.id, "type": "function", "function": function})
    };
    answer.message.calls.iter().map(call).collect()
}

/// Message content: null if the message only calls tools.
fn content(answer: &Answer) -> Value {
    let message = &answer.message;
    if message.content.is_empty() && !message.calls.is_empty() {
        Value::Null
    } else {
        message.content.as_str().into()
    }
}

pub(super) fn finish_reason(answer: &Answer) -> &'static str {
    match answer.end {
        End::Stop | End::StopString(_) => "stop",
        End::Length => "length",
        End::Calls => "tool_calls",
    }
}

pub(super) fn usage(answer: &Answer) -> Value {
    json!({
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.drawn,
        "total_tokens": answer.prompt_tokens + answer.drawn,
    })
}

fn log_probs(answer: &Answer, form: &Form) -> Value {
    if !form.log_probs {
        return Value::Null;
    }
    let tokens = answer.tokens.iter().map(|token| {
        json!({
            "token": token.text,
            "logprob": token.log_prob,
            "bytes": token.text.as_bytes(),
            "top_logprobs": [],
        })
    });
    json!({"content": tokens.collect::<Vec<_>>(), "refusal": null})
}

pub(super) fn json(answer: &Answer, form: &Form) -> Value {
    let mut message = json!({"role": ASSISTANT, "content": content(answer), "refusal": null});
    if !answer.message.calls.is_empty() {
        message["tool_calls"] = calls(answer).into();
    }
    json!({
        "id": format!("chatcmpl-{}", answer.id),
        "object": "chat.completion",
        "created": answer.created,
        "model": form.model,
        "choices": [{
            "index": 0,
            "message": message,
            "logprobs": log_probs(answer, form),
            "finish_reason": finish_reason(answer),
        }],
        "usage": usage(answer),
    })
}

pub(super) fn events(answer: &Answer, form: &Form) -> Vec<Event> {
    let event = |choices: Value, usage: Value| {
        let mut data = json!({
            "id": format!("chatcmpl-{}", answer.id),
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": form.model,
            "choices": choices,
        });
        if form.streams_usage {
            data["usage"] = usage;
        }
        Event::new(data)
    };
    let chunk = |delta: Value, finish_reason: Value, log_probs: Value| {
        let choice = json!({
            "index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason,
        });
        event(json!([choice]), Value::Null)
    };
    let start = json!({"role": ASSISTANT, "content": ""});
    let mut events = vec![chunk(start, Value::Null, Value::Null)];
    if !answer.message.content.is_empty() || form.log_probs {
        let delta = json!({"content": answer.message.content});
        events.push(chunk(delta, Value::Null, log_probs(answer, form)));
    }
    for (at, mut call) in calls(answer).into_iter().enumerate() {
        call["index"] = at.into();
        events.push(chunk(
            json!({"tool_calls": [call]}),
            Value::Null,
            Value::Null,
        ));
    }
    events.push(chunk(json!({}), finish_reason(answer).into(), Value::Null));
    if form.streams_usage {
        events.push(event(json!([]), usage(answer)));
    }
    events
}
