//! Text files in a Hugging Face folder and in PEFT adapters, with valid weights.
#![no_main]

use std::fs;
use std::sync::Once;

use candle_core::Device;
use candle_grpo_fuzz::{decoder, folder, write, write_files};
use candle_grpo_nn::{Lora, LoraConfig, Parameters};
use candle_grpo_train::Pretrained;
use candle_grpo_train::model::character_tokenizer;
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "adapter_config.json",
    "tokenizer.json",
];

fn copy(from: &str, to: &str) {
    fs::copy(folder().join(from), folder().join(to)).expect("room for a copy");
}

fuzz_target!(|input: &[u8]| {
    static WEIGHTS: Once = Once::new();
    WEIGHTS.call_once(|| {
        let parameters = Parameters::init(&decoder(), 0, &Device::Cpu).expect("a decoder");
        let part = folder().join("part.safetensors");
        parameters.save(&part).expect("room for the weights");
        copy("part.safetensors", "other.safetensors");
        let adapters = LoraConfig::all_linear(1, 1.0);
        let adapters = Lora::init(adapters, &decoder(), 0, &Device::Cpu).expect("adapters");
        adapters.save(folder(), None).expect("room for adapters");
        let tokenizer = character_tokenizer("abc").expect("a tokenizer");
        let text = tokenizer.to_string(false).expect("a tokenizer is JSON");
        write("tokenizer", text.as_bytes());
    });
    write_files(input, &FILES);
    let _ = fs::remove_file(folder().join("model.safetensors"));
    if !folder().join("model.safetensors.index.json").exists() {
        copy("part.safetensors", "model.safetensors");
    }
    if !folder().join("tokenizer.json").exists() {
        copy("tokenizer", "tokenizer.json");
    }
    let _ = Pretrained::load(folder(), &Device::Cpu);
    if folder().join("adapter_config.json").exists() {
        let _ = Lora::load(folder(), &decoder(), &Device::Cpu);
    }
});
