//! Files in a run directory, and the `grpo report` page.
#![no_main]

use candle_grpo::report::{Run, report_html};
use candle_grpo_fuzz::{folder, write_files};
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 4] = [
    "config.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
];

fuzz_target!(|input: &[u8]| {
    write_files(input, &FILES);
    if let Ok(run) = Run::read(folder()) {
        let page = report_html(&[run.clone(), run]);
        assert!(page.ends_with("</html>\n"));
    }
});
