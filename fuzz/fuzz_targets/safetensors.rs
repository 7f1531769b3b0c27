//! Model weights in one safetensors file.
#![no_main]

use candle_core::Device;
use candle_grpo_fuzz::{decoder, folder, write};
use candle_grpo_nn::Parameters;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    write("model.safetensors", bytes);
    let path = folder().join("model.safetensors");
    if let Ok(parameters) = Parameters::load(&decoder(), &path, &Device::Cpu) {
        for (name, weight) in parameters.iter() {
            let numbers = weight.flatten_all().and_then(|flat| flat.to_vec1::<f32>());
            let numbers = numbers.expect("weights are f32");
            assert!(numbers.iter().all(|x| x.is_finite()), "{name}");
        }
    }
    let _ = Parameters::load_folder(&decoder(), folder(), &Device::Cpu);
});
