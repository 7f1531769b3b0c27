//! GGUF files: header, shapes, weights, tokenizer and chat template.
#![no_main]

use candle_core::Device;
use candle_grpo_fuzz::{folder, write};
use candle_grpo_nn::Gguf;
use candle_grpo_train::Pretrained;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    write("model.gguf", bytes);
    let path = folder().join("model.gguf");
    let Ok(gguf) = Gguf::open(&path) else {
        return;
    };
    for value in gguf.metadata().values() {
        let _ = value.to_string();
    }
    // Also for files without a tokenizer.
    let _ = gguf.parameters(&Device::Cpu);
    if let Ok(pretrained) = Pretrained::load(&path, &Device::Cpu) {
        if let Ok(encoding) = pretrained
            .tokenizer
            .encode("he said: 12 \u{e9}\n<|im_end|>", true)
        {
            let _ = pretrained.tokenizer.decode(encoding.get_ids(), false);
        }
    }
});
