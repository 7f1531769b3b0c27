//! Attention of a decoding step.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{
    KeyValuePages, PAGE, PageSpan, PagedBatch, PagedRow, Scores, paged_attention,
};

use crate::case::{Case, Direction, Pair, Run};
use crate::noise::noise;
use crate::region::region;

/// Prompts, completions of each, and pages of a prompt and of a completion.
const PROMPTS: usize = 64;
const COMPLETIONS: usize = 8;
const PROMPT_PAGES: usize = 16;
const COMPLETION_PAGES: usize = 16;
/// Visible positions of each row.
const POSITIONS: usize = (PROMPT_PAGES + COMPLETION_PAGES) * PAGE;

/// The heads of Qwen3-0.6B.
const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

/// Completions that share the pages of their prompt. A window that has all positions makes each
/// row read all its pages.
pub(super) fn large() -> Vec<Case> {
    vec![Case {
        op: "paged_attention",
        shape: format!(
            "{PROMPTS} prompts, {COMPLETIONS} completions of each at position {POSITIONS}, against pages read for each completion"
        ),
        dtype: DType::BF16,
        direction: Direction::Forward,
        prepare: Box::new(|device| {
            let rows = PROMPTS * COMPLETIONS;
            let pages = PROMPTS * PROMPT_PAGES + rows * COMPLETION_PAGES;
            let pages = KeyValuePages::new(pages, KV_HEADS, HEAD_DIM, DType::BF16, device)?;
            let query = noise((rows, HEADS * HEAD_DIM), 1.0, 1, DType::BF16, device)?;
            let inputs = Rc::new((query, pages));
            Ok(Pair {
                ours: run(inputs.clone(), None, device),
                composed: run(inputs, Some(POSITIONS), device),
            })
        }),
        bandwidth: None,
    }]
}

fn run(inputs: Rc<(Tensor, KeyValuePages)>, window: Option<usize>, device: &Device) -> Run {
    let device = device.clone();
    Box::new(move || {
        let spans: Vec<Vec<PageSpan>> = (0..PROMPTS * COMPLETIONS).map(spans).collect();
        let rows = spans.iter().map(|spans| PagedRow {
            spans,
            visible: POSITIONS,
        });
        let rows: Vec<PagedRow> = rows.collect();
        let batch = PagedBatch::new(&[], &rows, true, &device)?;
        let scores = Scores {
            scale: (HEAD_DIM as f64).powf(-0.5),
            window,
            cap: None,
        };
        let (query, pages) = &*inputs;
        region(&device, || -> Result<Tensor> {
            paged_attention(query, pages, &batch, scores)
        })
    })
}

/// The spans of a row: first those of its prompt.
fn spans(row: usize) -> Vec<PageSpan> {
    let prompt = row / COMPLETIONS * PROMPT_PAGES;
    let own = PROMPTS * PROMPT_PAGES + row * COMPLETION_PAGES;
    (prompt..prompt + PROMPT_PAGES)
        .chain(own..own + COMPLETION_PAGES)
        .map(|page| PageSpan { page, len: PAGE })
        .collect()
}
