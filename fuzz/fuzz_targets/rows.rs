//! Data files. The first line is a configuration's data section.
#![no_main]

use candle_grpo_fuzz::{folder, write};
use candle_grpo_train::DatasetConfig;
use candle_grpo_train::data::read_rows;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let at = input.iter().position(|&b| b == b'\n');
    let (first, rows) = input.split_at(at.map_or(0, |at| at + 1));
    write("rows.jsonl", rows);
    let path = folder().join("rows.jsonl");
    let read = read_rows(&path);
    let Ok(config) = serde_json::from_slice::<DatasetConfig>(first) else {
        return;
    };
    let config = DatasetConfig {
        train: vec![path.clone()],
        held_out: config.held_out.iter().map(|_| path.clone()).collect(),
        ..config
    };
    if let Ok(dataset) = config.load(7) {
        let read = read.expect("what can be loaded can be read");
        assert!(
            dataset.train.len() + dataset.held_out.len()
                <= read.len() * (1 + config.held_out.len())
        );
    }
});
