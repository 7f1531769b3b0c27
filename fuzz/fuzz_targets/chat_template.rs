//! Chat templates. The first line is the rendered chat, as JSON.
#![no_main]

use candle_grpo_train::ChatTemplate;
use candle_grpo_train::model::Chat;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let Some((chat, source)) = input.split_once('\n') else {
        return;
    };
    let (Ok(chat), Ok(template)) = (
        serde_json::from_str::<Chat>(chat),
        ChatTemplate::new(source),
    ) else {
        return;
    };
    if let Ok(rendered) = template.render_with_assistant(&chat) {
        for said in &rendered.assistant {
            assert!(rendered.text.get(said.clone()).is_some());
        }
    }
});
