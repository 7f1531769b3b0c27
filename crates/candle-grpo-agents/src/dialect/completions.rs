//! OpenAI's `/v1/completions`.

use serde_json::{Value, json};

use super::chat::{ONE_SAMPLE, SAMPLING, finish_reason, usage};
use super::fields::Fields;
use super::{Event, Form};
use crate::request::{Answer, Input, Refusal, Request};

pub(super) fn read(body: &Value) -> Result<(Request, Form), Refusal> {
    let fields = Fields::new(body, "")?;
    fields.refuse("n", &[json!(1)], ONE_SAMPLE)?;
    fields.refuse("best_of", &[json!(1)], ONE_SAMPLE)?;
    fields.refuse("echo", &[json!(false)], "be false")?;
    fields.refuse("suffix", &[json!("")], "be absent")?;
    fields.refuse("logit_bias", &[json!({})], "be absent")?;
    let log_probs = match fields.get("logprobs") {
        None => false,
        // 0 and 1 request the sampled token; higher numbers request alternatives at each position.
        Some(number) if *number == 0 || *number == 1 => true,
        Some(_) => return Err(fields.invalid("logprobs", "be 0, 1, or absent")),
    };
    let request = Request {
        role: None,
        input: input(&fields)?,
        parses_calls: false,
        max_tokens: fields.count("max_tokens")?,
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

fn input(fields: &Fields<'_>) -> Result<Input, Refusal> {
    let must = "be one text that is not empty, or the ids of its tokens";
    let prompt = match fields.get("prompt") {
        // A list with one prompt is that prompt.
        Some(Value::Array(prompts)) if prompts.len() == 1 && !prompts[0].is_u64() => &prompts[0],
        Some(prompt) => prompt,
        None => return Err(fields.invalid("prompt", must)),
    };
    let input = match prompt {
        Value::String(text) if !text.is_empty() => Some(Input::Text(text.clone())),
        Value::Array(ids) if !ids.is_empty() => {
            let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
            let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
            ids.map(Input::Tokens)
        }
        _ => None,
    };
    input.ok_or_else(|| fields.invalid("prompt", must))
}

fn choice(answer: &Answer, form: &Form) -> Value {
    let log_probs = form.log_probs.then(|| {
        let texts: Vec<&str> = answer.tokens.iter().map(|t| t.text.as_str()).collect();
        let log_probs: Vec<f32> = answer.tokens.iter().map(|t| t.log_prob).collect();
        let offsets = texts.iter().scan(0, |at, text| {
            let offset = *at;
            *at += text.chars().count();
            Some(offset)
        });
        json!({
            "text_offset": offsets.collect::<Vec<usize>>(),
            "tokens": texts,
            "token_logprobs": log_probs,
            "top_logprobs": null,
        })
    });
    json!({
        "index": 0,
        "text": answer.message.content,
        "logprobs": log_probs,
        "finish_reason": finish_reason(answer),
    })
}

pub(super) fn json(answer: &Answer, form: &Form) -> Value {
    json!({
        "id": format!("cmpl-{}", answer.id),
        "object": "text_completion",
        "created": answer.created,
        "model": form.model,
        "choices": [choice(answer, form)],
        "usage": usage(answer),
    })
}

pub(super) fn events(answer: &Answer, form: &Form) -> Vec<Event> {
    let mut whole = json(answer, form);
    if !form.streams_usage {
        whole["usage"] = Value::Null;
        return vec![Event::new(whole)];
    }
    let mut end = whole.clone();
    whole["usage"] = Value::Null;
    end["choices"] = json!([]);
    vec![Event::new(whole), Event::new(end)]
}
