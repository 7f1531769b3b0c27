//! Chat templates against what Hugging Face transformers renders.

use std::path::Path;

use anyhow::Result;
use candle_grpo_test_support::cases;
use candle_grpo_train::ChatTemplate;
use candle_grpo_train::model::{Chat, SpecialToken, SpecialTokens, character_tokenizer};
use proptest::prelude::*;
use rstest::rstest;
use serde::Deserialize;
use serde_json::{Value, json};

/// A golden case. What a template is given is read as a [`Chat`], for the order of its keys.
#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    expected: Option<String>,
    expected_error: Option<String>,
    now: Option<String>,
    #[serde(flatten)]
    chat: Chat,
}

#[test]
fn golden_models_chat_templates_render_as_in_transformers() -> Result<()> {
    let path = std::env::var_os("GRPO_GOLDEN_MODELS_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models"),
        Into::into,
    );
    let text = std::fs::read_to_string(path.join("chat_templates.json"))?;
    let cases: Vec<Case> = serde_json::from_str(&text)?;
    for case in &cases {
        let mut template = ChatTemplate::new(&case.template)?;
        if let Some(now) = &case.now {
            template = template.with_clock_at(now)?;
        }
        match (&case.expected, &case.expected_error) {
            (Some(expected), _) => {
                assert_eq!(template.render(&case.chat)?, *expected, "{}", case.name)
            }
            (None, Some(message)) => {
                let error = template.render(&case.chat).unwrap_err().to_string();
                assert!(error.ends_with(message), "{}: {error}", case.name);
            }
            (None, None) => panic!("{}: neither a text nor an error", case.name),
        }
    }
    assert_eq!(cases.len(), 10);
    Ok(())
}

fn render(template: &str, chat: &Chat) -> Result<String> {
    ChatTemplate::new(template)?.render(chat)
}

fn chat() -> Chat {
    Chat::new(json!([
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]))
}

/// Expected texts are those of Python 3.12's `str` and `json.dumps`.
#[rstest]
#[case("{{ x }}", json!(true), "True")]
#[case("{{ x }}", json!(null), "None")]
#[case("{{ x }}", json!([1e16, 1e15, 1e-4, 1e-5, 0.1, -2.0, 1.5e300, -0.0]), "[1e+16, 1000000000000000.0, 0.0001, 1e-05, 0.1, -2.0, 1.5e+300, -0.0]")]
#[case("{{ x }}", json!(["it's", "\"", "it's \"", "a\nb\\", "é🙂\u{1}"]), r#"["it's", '"', 'it\'s "', 'a\nb\\', 'é🙂\x01']"#)]
#[case("{{ x }}", json!({"a": {"b": []}}), "{'a': {'b': []}}")]
#[case("{{ x | string + '!' }}", json!(1.0), "1.0!")]
#[case("{{ missing }}{{ missing.x is defined }}", json!(0), "")]
#[case("{{ x | tojson }}", json!("\u{7f}\u{1f}\u{8}</script>é"), "\"\u{7f}\\u001f\\b</script>é\"")]
#[case("{{ x | tojson(ensure_ascii=true) }}", json!("é🙂"), r#""\u00e9\ud83d\ude42""#)]
#[case("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", json!({"b": 1, "a": [1, 2]}), r#"{"a":[1,2],"b":1}"#)]
#[case("{{ x | tojson(indent=1) }}", json!({"a": [], "b": {}, "c": [1]}), "{\n \"a\": [],\n \"b\": {},\n \"c\": [\n  1\n ]\n}")]
// Python and minijinja hold 1 and true for equal keys, minijinja for some seeds of its hashes only.
#[case("{{ {1: none, false: 2.0} | tojson }}", json!(0), r#"{"1": null, "false": 2.0}"#)]
#[case("{{ x is sequence }}{{ x is string }}{{ x is mapping }}", json!("a"), "TrueTrueFalse")]
#[case("{{ x is iterable }}{{ [] is iterable }}{{ 'a' is iterable }}{{ 1 is iterable }}", json!(null), "FalseTrueTrueFalse")]
#[case("{{ x | trim }}|{{ ' a ' | trim }}|{{ '-a-' | trim('-') }}", json!([" a", null]), "[' a', None]|a|a")]
#[case("{{ x.strip('- ').split(' ', 1)[1].title() }}", json!("- a bc de -"), "Bc De")]
#[case("{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}", json!({"b": 1}), "b1")]
fn values_are_printed_as_python_does(
    #[case] template: &str,
    #[case] x: Value,
    #[case] expected: &str,
) -> Result<()> {
    if expected.is_empty() {
        assert!(render(template, &chat().variable("x", x)).is_err());
    } else {
        assert_eq!(render(template, &chat().variable("x", x))?, expected);
    }
    Ok(())
}

#[test]
fn special_tokens_are_known_by_their_names_and_variables_go_first() -> Result<()> {
    let token = |id, text: &str| {
        Some(SpecialToken {
            id,
            text: text.to_owned(),
        })
    };
    let tokens = SpecialTokens {
        bos: token(1, "<s>"),
        eos: token(2, "</s>"),
        ..SpecialTokens::default()
    };
    let template = ChatTemplate::new("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}")?
        .with_special_tokens(&tokens);
    assert_eq!(template.render(&chat())?, "<s></s>False");
    let own = chat().variable("eos_token", "!");
    assert_eq!(template.render(&own)?, "<s>!False");
    Ok(())
}

#[rstest]
#[case(json!({"role": "a", "reasoning": "r"}), "rr")]
#[case(json!({"role": "a", "thinking": "t", "reasoning": "r"}), "tt")]
#[case(json!({"role": "a", "reasoning_content": null, "thinking": "t"}), "tt")]
#[case(json!({"role": "a"}), "")]
fn reasoning_has_each_of_its_names(#[case] message: Value, #[case] expected: &str) -> Result<()> {
    let template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}";
    assert_eq!(render(template, &Chat::new(json!([message])))?, expected);
    Ok(())
}

const WITH_BLOCKS: &str = "\
{% for m in messages %}
[{{ m.role }}]
  {%- if m.role == 'assistant' %}
    {%- generation -%}
       {% set said = m.content %}
       {{ said }}</s>
    {%- endgeneration %}
  {%- else %}{{ m.content }}{% endif %}

{% endfor %}
{{ said is defined }}";

#[test]
fn what_the_assistant_says_is_marked() -> Result<()> {
    let rendered = ChatTemplate::new(WITH_BLOCKS)?.render_with_assistant(&chat())?;
    assert_eq!(
        rendered.text,
        "[user]one\n[assistant]       two</s>\n[user]three\n[assistant]       four</s>\nFalse"
    );
    let said: Vec<_> = rendered
        .assistant
        .iter()
        .map(|at| &rendered.text[at.clone()])
        .collect();
    assert_eq!(said, ["       two</s>", "       four</s>"]);

    let tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz[]</>\nF ")?;
    let encoded = ChatTemplate::new(WITH_BLOCKS)?.encode(&chat(), &tokenizer)?;
    let characters: String = rendered
        .text
        .chars()
        .zip(&encoded.assistant_mask)
        .filter_map(|(character, &said)| said.then_some(character))
        .collect();
    assert_eq!(characters, "       two</s>       four</s>");
    assert_eq!(encoded.tokens.len(), rendered.text.len());
    Ok(())
}

#[rstest]
#[case("{% if %}", "chat template, line 1: ")]
#[case("a\n{% endfor %}", "chat template, line 2: ")]
#[case("{% generation %}", "chat template, line 1: ")]
fn a_template_that_is_none_is_refused_with_its_line(#[case] source: &str, #[case] words: &str) {
    let error = ChatTemplate::new(source).unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

#[rstest]
#[case(
    "{{ raise_exception('no ' ~ messages[0].role) }}",
    "chat template, line 1: no user"
)]
#[case("\n{{ missing.attribute }}", "chat template, line 2: ")]
#[case("{{ namespace() | tojson(shade=1) }}", "shade")]
#[case("{{ missing | tojson }}", "tojson: a value that is undefined")]
#[case("{{ strftime_now('%!') }}", "strftime_now")]
#[case(
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "fuel"
)]
#[case("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion")]
#[case("{{ range(9999999999999) | list }}", "range")]
#[case(
    "{% set n = namespace(x=[]) %}{% for i in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "nested more than 200 times"
)]
#[case(
    "{% set n = namespace(x='ab') %}{% for i in range(90) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "more than 16 MiB of text"
)]
#[case(
    "{% for i in range(30000) %}{{ 'ab' * 500 }}{% endfor %}",
    "more than 16 MiB of text"
)]
#[case(
    "{% set n = namespace() %}{% set n.a = n %}{% set n.b = n %}{{ n | tojson }}",
    "nested more than 200 times"
)]
#[case(
    "{% set n = namespace(x='ab') %}{% for i in range(90) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "more than 16 MiB of text"
)]
fn what_a_template_cannot_do_is_an_error(#[case] source: &str, #[case] words: &str) {
    let error = render(source, &chat()).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn the_time_of_a_template_can_be_fixed() -> Result<()> {
    let template = ChatTemplate::new("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")?;
    assert!(template.render(&chat())?.starts_with("2"));
    let stopped = template.with_clock_at("2025-03-05T14:07:09")?;
    assert_eq!(stopped.render(&chat())?, "2025-03-05 14:07:09");
    let error = stopped.with_clock_at("yesterday").unwrap_err().to_string();
    assert!(error.starts_with("now: \"yesterday\""), "{error}");
    Ok(())
}

#[test]
fn a_message_with_a_mark_is_an_error_only_where_there_are_marks() {
    let chat = Chat::new(json!([{"role": "assistant", "content": "\u{FDD1}"}]));
    let error = render(WITH_BLOCKS, &chat).unwrap_err().to_string();
    assert!(error.contains("U+FDD0"), "{error}");
    assert_eq!(
        render("{{ messages[0].content }}", &chat).unwrap(),
        "\u{FDD1}"
    );
}

/// Pieces that templates are made of, to be put together in any order.
fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~\n]{0,6}".prop_map(|text| text),
        prop::sample::select(vec![
            "{% for m in messages %}",
            "{% endfor %}",
            "{% if messages[0] %}",
            "{% endif %}",
            "{% else %}",
            "{{ messages }}",
            "{{ messages[-1]['content'] | trim }}",
            "{% generation %}",
            "{%- endgeneration -%}",
            "{% set x = messages %}",
            "{{ x | tojson(indent=2) }}",
            "{{ loop.index }}",
            "{% break %}",
            "{% continue %}",
            "{# ",
            " #}",
            "{{ ",
            " }}",
            "{% raw %}",
            "{% endraw %}",
            "{% macro f(a) %}",
            "{% endmacro %}",
            "{{ f(1) }}",
            "{{ messages[::-1] }}",
            "{{ 'a' ~ none }}",
            "{% set ns = namespace(a=1) %}",
            "{% set ns.a = ns.a + 1 %}",
            "{{ raise_exception('x') }}",
            "{{ messages | map(attribute='role') | join(',') }}",
            "{{ strftime_now('%d %b') }}",
            "-%}",
            "{%-",
        ])
        .prop_map(str::to_owned),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(500, 10_000)))]

    #[test]
    fn no_template_panics_or_runs_forever(pieces in prop::collection::vec(piece(), 0..12)) {
        let source = pieces.concat();
        if let Ok(template) = ChatTemplate::new(&source)
            && let Ok(rendered) = template.render_with_assistant(&chat())
        {
            for block in rendered.assistant {
                prop_assert!(rendered.text.get(block).is_some());
            }
        }
    }

    /// Whatever a message holds comes out as it is.
    #[test]
    fn a_message_is_never_taken_for_a_template(content in "\\PC{0,20}|[{}%#' \"\\\\\n]{0,12}") {
        let chat = Chat::new(json!([{"role": "user", "content": &content}]));
        let rendered = render("<{{ messages[0].content }}>", &chat).unwrap();
        prop_assert_eq!(rendered, format!("<{content}>"));
        let again: String = serde_json::from_str(&render("{{ messages[0].content | tojson }}", &chat).unwrap()).unwrap();
        prop_assert_eq!(again, content);
    }
}
