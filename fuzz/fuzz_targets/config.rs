//! Configuration files in YAML and TOML, for this program or ROLL.
#![no_main]

use std::path::Path;

use candle_grpo::config::{Document, Import, RunConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let yaml = Document::from_yaml(Path::new("run.yaml"), text);
    let toml = Document::from_toml(Path::new("run.toml"), text);
    for document in [yaml, toml].into_iter().flatten() {
        let translated = Import::new(&document).map(|import| import.document);
        for document in translated.iter().chain([&document]) {
            let Ok(config) = RunConfig::new(document) else {
                continue;
            };
            // The output of `grpo check` is an equivalent configuration.
            let text = config.to_yaml().expect("a configuration can be written");
            let again =
                Document::from_yaml(Path::new("again.yaml"), &text).expect("it can be read");
            let again = RunConfig::new(&again).expect("it is as right as the first");
            assert_eq!(again.to_yaml().ok(), Some(text));
        }
    }
});
