//! Tests `paged_attention` against `attention` in f64, and checks that rows are independent.

use std::ffi::CStr;

use candle_core::{DType, Device, Error, Result, Tensor, Var};
use candle_grpo_kernels::{
    HeadNorms, HeadTransform, KeyValuePages, PAGE, PageSlot, PageSpan, PagedBatch, PagedRow,
    RmsNormOptions, Scores, attention, composed, cuda_memory, paged_attention, rms_norm, rope,
};
use candle_grpo_test_support::{
    CudaCalls, assert_close, cases, cuda_peak_bytes, device, devices, message, noise_tensor,
    numbers, with_failing_calls,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{bits, noisy, rounding};

/// A sequence in pages, and its contiguous keys and values.
struct Sequence {
    spans: Vec<PageSpan>,
    /// `[T, kv_heads * head_dim]`
    key: Tensor,
    value: Tensor,
}

impl Sequence {
    /// Writes a sequence to the pages `first`, `first - 1`, ..., with `lens` positions in each.
    fn write(
        pages: &KeyValuePages,
        first: usize,
        lens: &[usize],
        key: &Tensor,
        value: &Tensor,
    ) -> Result<Self> {
        let spans: Vec<PageSpan> = lens
            .iter()
            .enumerate()
            .map(|(i, &len)| PageSpan {
                page: first - i,
                len,
            })
            .collect();
        let slots: Vec<PageSlot> = spans
            .iter()
            .flat_map(|span| {
                (0..span.len).map(|position| PageSlot {
                    page: span.page,
                    position,
                })
            })
            .collect();
        let rows = slots.len();
        let (key, value) = (key.narrow(0, 0, rows)?, value.narrow(0, 0, rows)?);
        let batch = PagedBatch::new(&slots, &[], true, key.device())?;
        pages.write(&key, &value, &batch)?;
        Ok(Self { spans, key, value })
    }
}

#[derive(Debug, Clone)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// Number of positions in each page, for each sequence.
    sequences: Vec<Vec<usize>>,
}

fn shapes() -> impl Strategy<Value = Shape> {
    // On CUDA, sequences with more than 16 pages are split.
    let pages = prop_oneof![3 => 1usize..5, 1 => 12usize..40];
    let sequence = pages.prop_flat_map(|pages| proptest::collection::vec(1usize..=PAGE, pages));
    // On CUDA, a block has four or eight heads from a group, and larger groups have several blocks.
    let group = prop_oneof![1usize..5, 5usize..9, 9usize..18];
    (
        1usize..4,
        group,
        prop_oneof![
            1usize..40,
            Just(64),
            Just(96),
            Just(128),
            Just(200),
            Just(300)
        ],
        proptest::collection::vec(sequence, 0..5),
    )
        .prop_map(|(kv_heads, group, head_dim, sequences)| Shape {
            kv_heads,
            group,
            head_dim,
            sequences,
        })
}

/// Writes random keys and values in `layout` to pages.
fn write_all(
    shape: &Shape,
    layout: Layout,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<(KeyValuePages, Vec<Sequence>)> {
    let width = shape.kv_heads * shape.head_dim;
    // NaN in other positions must not have an effect.
    let pages: usize = shape.sequences.iter().map(Vec::len).sum();
    let mut paged = KeyValuePages::new(1, shape.kv_heads, shape.head_dim, dtype, device)?;
    paged.grow(pages + 2)?;
    let nothing = (Tensor::ones((PAGE, width), dtype, device)? * f64::NAN)?;
    for page in 0..pages + 2 {
        let slots: Vec<PageSlot> = (0..PAGE)
            .map(|position| PageSlot { page, position })
            .collect();
        let batch = PagedBatch::new(&slots, &[], true, device)?;
        paged.write(&nothing, &nothing, &batch)?;
    }
    let mut first = 0;
    let mut sequences = Vec::new();
    for (index, lens) in shape.sequences.iter().enumerate() {
        first += lens.len();
        let rows: usize = lens.iter().sum();
        let noise = |salt: u64| {
            let rows = noisy(&[rows, width], seed ^ (salt + 2 * index as u64), dtype)?;
            layout.apply(&rows)?.to_device(device)
        };
        sequences.push(Sequence::write(
            &paged,
            first,
            lens,
            &noise(10)?,
            &noise(11)?,
        )?);
    }
    Ok((paged, sequences))
}

/// Returns a row per sequence. The last `hidden` positions are not visible.
fn rows(sequences: &[Sequence], hidden: usize) -> Result<Vec<PagedRow<'_>>> {
    let row = |s: &'_ Sequence| s.key.dim(0).map(|t| t.saturating_sub(hidden).max(1));
    sequences
        .iter()
        .map(|s| {
            Ok(PagedRow {
                spans: &s.spans,
                visible: row(s)?,
            })
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]

    #[test]
    fn the_result_equals_attention_to_the_same_positions(
        shape in shapes(),
        hidden in 0usize..20,
        window in prop::option::of(1usize..60),
        cap in prop::option::of(0.3f64..3.0),
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        // A score is rounded like a sum over head_dim products, so scores must be bounded.
        let scale = 0.7 / (shape.head_dim as f64).sqrt();
        let scores = Scores { scale, window, cap };
        for device in devices() {
            let (pages, sequences) = write_all(&shape, layouts[0], seed, dtype, device)?;
            let rows = rows(&sequences, hidden)?;
            let width = shape.kv_heads * shape.group * shape.head_dim;
            let query = layouts[1].apply(&noisy(&[rows.len(), width], seed, dtype)?)?.to_device(device)?;
            let batch = PagedBatch::new(&[], &rows, true, device)?;
            let fused = paged_attention(&query, &pages, &batch, scores)?;
            let composed = composed::paged_attention(&query, &pages, &batch, scores)?;
            prop_assert_eq!((fused.dims(), fused.dtype()), (query.dims(), dtype));
            prop_assert_eq!((composed.dims(), composed.dtype()), (query.dims(), dtype));
            for (index, (row, sequence)) in rows.iter().zip(&sequences).enumerate() {
                let wide = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64);
                let seen = |x: &Tensor| wide(&x.narrow(0, 0, row.visible)?);
                let mask = Tensor::ones((1, row.visible), DType::U8, &Device::Cpu)?;
                let query = wide(&query.narrow(0, index, 1)?)?;
                let expected = attention(&query, &seen(&sequence.key)?, &seen(&sequence.value)?, &mask, shape.head_dim, scores)?;
                for actual in [&fused, &composed] {
                    let actual = actual.narrow(0, index, 1)?;
                    assert_close(&numbers(&actual)?, &numbers(&expected)?, 4.0 * rounding(dtype));
                }
            }
        }
    }

    #[test]
    fn transformed_heads_are_those_of_the_operators(
        rows in 1usize..9,
        kv_heads in 1usize..4,
        group in 1usize..4,
        pairs in prop_oneof![1usize..40, Just(64)],
        // Elements in a head that do not rotate.
        rest in prop_oneof![2 => Just(0usize), 1 => 1usize..12],
        norms in prop::option::of(any::<bool>()),
        rotates in any::<bool>(),
        has_gates in any::<bool>(),
        dtype in dtypes(),
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let head_dim = 2 * pairs + rest;
        let options = norms.map(|is_offset| RmsNormOptions { epsilon: 1e-5, is_offset });
        for device in devices() {
            let noise = |shape: &[usize], salt: u64, dtype| noisy(shape, seed ^ salt, dtype)?.to_device(device);
            let input = |heads: usize, salt| layout.apply(&noise(&[rows, heads * head_dim], salt, dtype)?);
            let parts = if has_gates { 2 } else { 1 };
            let (query, key, value) = (input(parts * kv_heads * group, 1)?, input(kv_heads, 2)?, input(kv_heads, 3)?);
            let weights = [noise(&[head_dim], 4, dtype)?, noise(&[head_dim], 5, dtype)?];
            let variables = [Var::from_tensor(&weights[0])?, Var::from_tensor(&weights[1])?];
            let wide = candle_grpo_kernels::arithmetic_dtype(dtype);
            let angles = [noise(&[rows, pairs], 6, wide)?, noise(&[rows, pairs], 7, wide)?];
            let transform = HeadTransform {
                norms: options.map(|options| HeadNorms { weights: variables.each_ref().map(Var::as_tensor), options }),
                angles: rotates.then(|| angles.each_ref()),
                head_dim: Some(head_dim),
                has_gates,
            };
            let slots: Vec<PageSlot> = (0..rows).map(|row| PageSlot { page: rows - row, position: row % PAGE }).collect();
            let batch = PagedBatch::new(&slots, &[], true, device)?;
            let new = || -> Result<KeyValuePages> {
                let mut pages = KeyValuePages::new(0, kv_heads, head_dim, dtype, device)?;
                pages.grow(rows + 1)?;
                Ok(pages)
            };
            let (pages, expected_pages) = (new()?, new()?);
            let rotated = pages.write_transformed([&query, &key, &value], &batch, &transform)?;
            let apply = |heads: &Tensor, weight: &Tensor| -> Result<Tensor> {
                let mut heads = heads.contiguous()?;
                if let Some(options) = options {
                    heads = rms_norm(&heads, weight, options)?;
                }
                if rotates {
                    let first = heads.narrow(2, 0, 2 * pairs)?.contiguous()?.reshape((rows, ()))?;
                    let first = rope(&first, &angles[0], &angles[1])?.reshape((rows, (), 2 * pairs))?;
                    heads = Tensor::cat(&[&first, &heads.narrow(2, 2 * pairs, rest)?], 2)?;
                }
                heads.reshape((rows, ()))
            };
            let queries = query.reshape((rows, (), parts * head_dim))?.narrow(2, 0, head_dim)?;
            let expected = apply(&queries, &weights[0])?;
            let key_heads = key.reshape((rows, (), head_dim))?;
            expected_pages.write(&apply(&key_heads, &weights[1])?, &value, &batch)?;
            prop_assert_eq!((rotated.dims(), rotated.dtype()), (expected.dims(), dtype));
            prop_assert!(!rotated.track_op());
            assert_close(&numbers(&rotated)?, &numbers(&expected)?, rounding(dtype));
            // Attention to single positions returns the values; to pairs it depends on the keys.
            let spans: Vec<[PageSpan; 2]> = (0..rows)
                .map(|row| {
                    let span = |row: usize| PageSpan { page: rows - row, len: 1 + row % PAGE };
                    [span(row), span((row + 1) % rows)]
                })
                .collect();
            let seen: Vec<PagedRow> = spans
                .iter()
                .map(|spans| PagedRow { spans, visible: spans[0].len + spans[1].len })
                .collect();
            let seen = PagedBatch::new(&[], &seen, true, device)?;
            let mixed = |pages| paged_attention(&expected, pages, &seen, 0.3);
            assert_close(&numbers(&mixed(&pages)?)?, &numbers(&mixed(&expected_pages)?)?, 8.0 * rounding(dtype));
        }
    }

    /// Rows that begin with the same pages read them together.
    #[test]
    fn a_row_is_bit_identical_with_any_other_rows(
        shape in shapes(),
        dtype in dtypes(),
        seed in any::<u64>(),
        forks in proptest::collection::vec((0usize..4, 0usize..40, 0usize..4, 0usize..40), 1..60),
        is_sorted in any::<bool>(),
        window in proptest::option::of(1usize..60),
        cap in proptest::option::of(Just(2.0)),
    ) {
        let (pages, sequences) = write_all(&shape, Layout::Contiguous, seed, dtype, &Device::Cpu)?;
        if sequences.is_empty() {
            return Ok(());
        }
        let mut forks = forks;
        if is_sorted {
            forks.sort_unstable();
        }
        // The first pages of one sequence, then another sequence.
        let spans: Vec<Vec<PageSpan>> = forks
            .iter()
            .map(|&(prompt, shared, own, _)| {
                let [prompt, own] = [prompt, own].map(|at| &sequences[at % sequences.len()].spans);
                [&prompt[..shared.min(prompt.len())], own].concat()
            })
            .collect();
        let rows: Vec<PagedRow> = spans
            .iter()
            .zip(&forks)
            .map(|(spans, &(_, _, _, hidden))| {
                let all: usize = spans.iter().map(|span| span.len).sum();
                let visible = all.saturating_sub(hidden).max(1);
                PagedRow { spans, visible }
            })
            .collect();
        let width = shape.kv_heads * shape.group * shape.head_dim;
        let query = noisy(&[rows.len(), width], seed, dtype)?;
        let attend = |query: &Tensor, rows: &[PagedRow]| {
            let batch = PagedBatch::new(&[], rows, true, &Device::Cpu)?;
            paged_attention(query, &pages, &batch, Scores { scale: 0.3, window, cap })
        };
        let together = attend(&query, &rows)?;
        for (index, row) in rows.iter().enumerate() {
            let alone = attend(&query.narrow(0, index, 1)?, &[*row])?;
            prop_assert_eq!(bits(&alone)?, bits(&together.narrow(0, index, 1)?)?);
        }
    }
}

/// Returns the spans of rows that share the pages of prompts, and the number of pages. Each prompt
/// has a number of rows and of pages; the last page of prompt i has 16 - i positions. The rows take
/// turns. Each has one or two pages of its own.
fn spans_of_prompts(prompts: &[[usize; 2]]) -> (Vec<Vec<PageSpan>>, usize) {
    let mut pages = 0;
    let mut take = |len| {
        pages += 1;
        PageSpan {
            page: pages - 1,
            len,
        }
    };
    let of_prompts = prompts.iter().enumerate().map(|(i, [_, count])| {
        let len = |at| if at + 1 == *count { PAGE - i } else { PAGE };
        (0..*count).map(|at| take(len(at))).collect()
    });
    let of_prompts: Vec<Vec<PageSpan>> = of_prompts.collect();
    let mut rows = Vec::new();
    for turn in 0..prompts.iter().map(|[rows, _]| *rows).max().unwrap_or(0) {
        for (spans, [count, _]) in of_prompts.iter().zip(prompts) {
            if turn < *count {
                let own = [take(PAGE), take(1 + turn % PAGE)];
                rows.push([&spans[..], &own[turn % 2..]].concat());
            }
        }
    }
    (rows, pages)
}

/// On CUDA, one block reads the pages of a prompt for all rows that share them, if the kernel can
/// and enough reads are saved. `kernel` is its head width, or 0 if it must not run.
#[rstest]
#[case::eight_rows(&[[8, 40]], [2, 2, 64], DType::BF16, None, 64)]
#[case::three_prompts(&[[8, 12], [5, 9], [17, 20]], [1, 3, 128], DType::BF16, None, 128)]
#[case::more_rows_than_a_unit(&[[40, 8]], [1, 1, 80], DType::F16, None, 128)]
#[case::all_heads_of_a_chunk(&[[17, 17], [3, 1]], [1, 7, 96], DType::F16, None, 128)]
#[case::large_group(&[[9, 35]], [2, 16, 64], DType::BF16, None, 64)]
#[case::in_f32(&[[16, 18], [2, 200]], [1, 5, 40], DType::F32, None, 64)]
#[case::wide_in_f32(&[[13, 33]], [2, 4, 128], DType::F32, None, 128)]
#[case::few_savings(&[[16, 17]], [1, 2, 64], DType::BF16, None, 0)]
#[case::single_rows(&[[1, 300], [1, 300]], [1, 2, 64], DType::BF16, None, 0)]
#[case::a_window(&[[20, 18]], [1, 2, 64], DType::BF16, Some(100), 0)]
#[case::odd_heads(&[[20, 18]], [1, 2, 68], DType::BF16, None, 0)]
#[case::wide_heads(&[[20, 18]], [1, 2, 136], DType::BF16, None, 0)]
fn rows_of_one_prompt_equal_rows_alone(
    #[case] prompts: &[[usize; 2]],
    #[case] heads: [usize; 3],
    #[case] dtype: DType,
    #[case] window: Option<usize>,
    #[case] kernel: usize,
) -> Result<()> {
    let device = device();
    let [kv_heads, group, head_dim] = heads;
    let (spans, count) = spans_of_prompts(prompts);
    let rows: Vec<PagedRow> = spans
        .iter()
        .map(|spans| PagedRow {
            spans,
            visible: spans.iter().map(|span| span.len).sum(),
        })
        .collect();
    let width = kv_heads * head_dim;
    let pages = KeyValuePages::new(count, kv_heads, head_dim, dtype, device)?;
    let write = |slots: &[PageSlot], x: &Tensor| {
        let batch = PagedBatch::new(slots, &[], true, device)?;
        pages.write(x, &x.affine(2.0, 0.5)?, &batch)
    };
    for page in 0..count {
        // NaN in positions that no row sees must not have an effect.
        let slots: Vec<PageSlot> = (0..PAGE)
            .map(|position| PageSlot { page, position })
            .collect();
        let len = spans.iter().flatten().find(|span| span.page == page);
        let len = len.map_or(0, |span| span.len);
        let x = noisy(&[PAGE, width], page as u64, dtype)?.to_device(device)?;
        write(&slots, &(x.ones_like()? * f64::NAN)?)?;
        if len > 0 {
            write(&slots[..len], &x.narrow(0, 0, len)?)?;
        }
    }
    let query = noisy(&[rows.len(), group * width], 7, dtype)?.to_device(device)?;
    let scale = 0.7 / (head_dim as f64).sqrt();
    let scores = Scores {
        scale,
        window,
        cap: None,
    };
    let suffix = match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        _ => "f16",
    };
    let launches = || {
        let of_width =
            |width| CudaCalls::launches_of(&format!("shared_paged_attention_{width}_{suffix}"));
        of_width(64).zip(of_width(128))
    };
    let before = launches();
    let batch = PagedBatch::new(&[], &rows, true, device)?;
    let together = paged_attention(&query, &pages, &batch, scores)?;
    if let Some((before, now)) = before.zip(launches()) {
        let expected = (u64::from(kernel == 64), u64::from(kernel == 128));
        assert_eq!((now.0 - before.0, now.1 - before.1), expected);
    }
    let composed = composed::paged_attention(&query, &pages, &batch, scores)?;
    assert_close(
        &numbers(&together)?,
        &numbers(&composed)?,
        4.0 * rounding(dtype),
    );
    for (index, row) in rows.iter().enumerate() {
        let batch = [*row];
        let batch = PagedBatch::new(&[], &batch, true, device)?;
        let alone = paged_attention(&query.narrow(0, index, 1)?, &pages, &batch, scores)?;
        let together = together.narrow(0, index, 1)?;
        assert_close(&numbers(&together)?, &numbers(&alone)?, rounding(dtype));
    }
    Ok(())
}

/// Values of -1 and 1 cancel, so that a sum over some 640 weights is far below 1. Weights rounded
/// to bf16 would be wrong by up to 2^-9 of them, and such sums by up to 1e-4.
#[rstest]
#[case::bf16(DType::BF16, 2e-5)]
#[case::f16(DType::F16, 2e-6)]
fn the_weights_of_rows_of_one_prompt_are_not_rounded(
    #[case] dtype: DType,
    #[case] tolerance: f64,
) -> Result<()> {
    let device = device();
    let (spans, count) = spans_of_prompts(&[[8, 40]]);
    let rows: Vec<PagedRow> = spans
        .iter()
        .map(|spans| PagedRow {
            spans,
            visible: spans.iter().map(|span| span.len).sum(),
        })
        .collect();
    let slots: Vec<PageSlot> = (0..count * PAGE)
        .map(|at| PageSlot {
            page: at / PAGE,
            position: at % PAGE,
        })
        .collect();
    let key = noisy(&[count * PAGE, 64], 1, dtype)?;
    let value = noisy(&[count * PAGE, 64], 2, dtype)?.sign()?;
    let query = noisy(&[rows.len(), 2 * 64], 3, dtype)?;
    let attend = |dtype: DType, device: &Device| {
        let pages = KeyValuePages::new(count, 1, 64, dtype, device)?;
        let [query, key, value] =
            [&query, &key, &value].map(|x| x.to_dtype(dtype)?.to_device(device));
        pages.write(&key?, &value?, &PagedBatch::new(&slots, &[], true, device)?)?;
        let batch = PagedBatch::new(&[], &rows, true, device)?;
        paged_attention(&query?, &pages, &batch, 0.005)
    };
    let exact = numbers(&attend(DType::F64, &Device::Cpu)?)?;
    let found = numbers(&attend(dtype, device)?)?;
    for (found, exact) in found.iter().zip(&exact) {
        let most = tolerance + rounding(dtype) * exact.abs();
        assert!(
            (found - exact).abs() <= most,
            "{found}, must be {exact} within {most}"
        );
    }
    Ok(())
}

#[test]
fn growing_keeps_the_content_of_pages() -> Result<()> {
    for device in devices() {
        let x = noisy(&[1, 6], 1, DType::F32)?.to_device(device)?;
        let mut pages = KeyValuePages::new(1, 2, 3, DType::F32, device)?;
        let slots = [PageSlot {
            page: 0,
            position: 0,
        }];
        let rows = [PagedRow {
            spans: &[PageSpan { page: 0, len: 1 }],
            visible: 1,
        }];
        let batch = PagedBatch::new(&slots, &rows, true, device)?;
        pages.write(&x, &x, &batch)?;
        pages.grow(5)?;
        assert_eq!(pages.len(), 5);
        let y = paged_attention(&x, &pages, &batch, 1.0)?;
        assert_eq!(numbers(&y)?, numbers(&x)?);
        let error = message(pages.grow(4));
        assert!(error.contains("pages: 4, must be at least the current number, 5"));
    }
    Ok(())
}

/// Returns whether the emulated GPU counts calls, and can fail them.
fn is_emulated() -> bool {
    let is_emulated = CudaCalls::now().is_some();
    if !is_emulated {
        println!("skipped: no emulated GPU");
    }
    is_emulated
}

/// Pages of 3,072 bytes for keys and as many for values.
fn small_pages(pages: usize, device: &Device) -> Result<KeyValuePages> {
    KeyValuePages::new(pages, 2, 24, DType::F32, device)
}

/// Writes other numbers to each position of the pages from `first` on.
fn fill(pages: &KeyValuePages, first: usize, device: &Device) -> Result<()> {
    for page in first..pages.len() {
        let slots: Vec<PageSlot> = (0..PAGE)
            .map(|position| PageSlot { page, position })
            .collect();
        let x = noisy(&[PAGE, 48], page as u64, DType::F32)?.to_device(device)?;
        pages.write(
            &x,
            &(&x * 2.)?,
            &PagedBatch::new(&slots, &[], true, device)?,
        )?;
    }
    Ok(())
}

/// The result of attention to the pages from `first` on.
fn attended(pages: &KeyValuePages, first: usize, device: &Device) -> Result<Vec<f64>> {
    let spans: Vec<PageSpan> = (first..pages.len())
        .map(|page| PageSpan { page, len: PAGE })
        .collect();
    let rows = [PagedRow {
        spans: &spans,
        visible: spans.len() * PAGE,
    }];
    let query = noisy(&[1, 96], 7, DType::F32)?.to_device(device)?;
    let batch = PagedBatch::new(&[], &rows, true, device)?;
    numbers(&paged_attention(&query, pages, &batch, 0.5)?)
}

/// The calls of a growth to this number of pages.
fn calls_of_growth(pages: &mut KeyValuePages, to: usize) -> Result<CudaCalls> {
    let before = CudaCalls::now();
    pages.grow(to)?;
    let calls = CudaCalls::now()
        .zip(before)
        .map(|(now, before)| now - before);
    calls.ok_or_else(|| Error::msg("no emulated GPU"))
}

#[test]
fn pages_on_cuda_grow_in_place() -> Result<()> {
    let device = device();
    if !is_emulated() {
        return Ok(());
    }
    let mut pages = small_pages(3, device)?;
    if pages.pages_in_place().is_none() {
        println!("skipped: the GPU cannot map memory");
        return Ok(());
    }
    // The emulated GPU maps 4,096 bytes or more.
    assert_eq!(pages.pages_in_place(), Some(4));
    fill(&pages, 0, device)?;
    // The memory of three pages has room for a fourth.
    for (to, allocations) in [(4, 0), (50, 2)] {
        let first = pages.len();
        let calls = calls_of_growth(&mut pages, to)?;
        assert_eq!((calls.allocations, calls.memsets), (allocations, 2));
        assert_eq!((calls.launches, calls.copies_on_device), (0, 0));
        assert_eq!((calls.copies_to_device, calls.copies_to_host), (0, 0));
        assert_eq!(calls.waits, 0);
        let zeros = attended(&pages, first, device)?;
        assert!(zeros.iter().all(|x| *x == 0.), "{to}: {zeros:?}");
        fill(&pages, first, device)?;
    }
    let (whole, on_cpu) = (small_pages(50, device)?, small_pages(50, &Device::Cpu)?);
    fill(&whole, 0, device)?;
    fill(&on_cpu, 0, &Device::Cpu)?;
    let grown = attended(&pages, 0, device)?;
    assert_eq!(grown, attended(&whole, 0, device)?);
    let expected = attended(&on_cpu, 0, &Device::Cpu)?;
    assert_close(&grown, &expected, 4. * rounding(DType::F32));
    Ok(())
}

/// The driver calls that can fail: how many precede them, how many fail, and whether the growth
/// fails too.
#[rstest]
#[case::memory_of_keys(c"allocation", 0, 2, true)]
#[case::memory_of_values(c"allocation", 1, 2, true)]
// The pool of the driver may have the memory.
#[case::memory_in_the_pool(c"allocation", 1, 1, false)]
#[case::map(c"cuMemMap", 1, 1, true)]
#[case::access(c"cuMemSetAccess", 1, 1, true)]
fn pages_that_cannot_grow_stay_valid(
    #[case] name: &CStr,
    #[case] before: u64,
    #[case] count: u64,
    #[case] fails: bool,
) -> Result<()> {
    let device = device();
    if !is_emulated() {
        return Ok(());
    }
    let mut pages = small_pages(6, device)?;
    if pages.pages_in_place().is_none() {
        println!("skipped: the GPU cannot map memory");
        return Ok(());
    }
    fill(&pages, 0, device)?;
    let content = attended(&pages, 0, device)?;
    device.synchronize()?;
    let free = cuda_memory(device)?.free;
    let grown = with_failing_calls(name, before, count, || pages.grow(60));
    let (grown, failed) = grown.ok_or_else(|| Error::msg("no emulated GPU"))?;
    assert_eq!((failed, grown.is_err()), (count, fails), "{grown:?}");
    if fails {
        assert_eq!((pages.len(), cuda_memory(device)?.free), (6, free));
        assert_eq!(attended(&pages, 0, device)?, content);
        pages.grow(60)?;
    }
    assert_eq!(pages.len(), 60);
    fill(&pages, 6, device)?;
    let whole = small_pages(60, device)?;
    fill(&whole, 0, device)?;
    assert_eq!(attended(&pages, 0, device)?, attended(&whole, 0, device)?);
    Ok(())
}

#[test]
fn pages_in_place_return_their_memory() -> Result<()> {
    let on_cpu = small_pages(3, &Device::Cpu)?.shrink(1);
    assert!(message(on_cpu).contains("pages: do not grow in place, must do so to be removed"));
    let device = device();
    if !is_emulated() {
        return Ok(());
    }
    let free = || {
        device.synchronize()?;
        Ok::<_, Error>(cuda_memory(device)?.free)
    };
    let before = free()?;
    let mut pages = small_pages(4, device)?;
    if pages.pages_in_place().is_none() {
        println!("skipped: the GPU cannot map memory");
        return Ok(());
    }
    fill(&pages, 0, device)?;
    let content = attended(&pages, 0, device)?;
    let with_four = free()?;
    assert_eq!(before - with_four, 2 * 4 * 3072);
    pages.grow(40)?;
    fill(&pages, 4, device)?;
    assert!(
        message(pages.shrink(41)).contains("pages: 41, must be at most the current number, 40")
    );
    // The work on the pages may not have begun.
    pages.shrink(4)?;
    assert_eq!((pages.len(), free()?), (4, with_four));
    assert_eq!(attended(&pages, 0, device)?, content);
    pages.grow(40)?;
    let zeros = attended(&pages, 4, device)?;
    assert!(zeros.iter().all(|x| *x == 0.), "{zeros:?}");
    fill(&pages, 4, device)?;
    drop(pages);
    assert_eq!(free()?, before);
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let pages = KeyValuePages::new(2, 1, 4, DType::F32, &Device::Cpu)?;
    let spans = [PageSpan { page: 1, len: 3 }];
    let row = |visible| {
        [PagedRow {
            spans: &spans,
            visible,
        }]
    };
    let x = zeros(&[1, 8])?;
    let error = |query: &Tensor, rows: &[PagedRow]| {
        let attended = PagedBatch::new(&[], rows, true, &Device::Cpu)
            .and_then(|batch| paged_attention(query, &pages, &batch, 1.0));
        message(attended)
    };
    assert!(error(&x, &row(0)).contains("rows[0]: 0 visible positions"));
    assert!(
        error(&x, &row(4))
            .contains("rows[0]: 4 visible positions, must be at least 1 and at most the 3")
    );
    assert!(
        error(&zeros(&[1, 6])?, &row(1))
            .contains("query: shape [1, 6], must be [1, a multiple of 4]")
    );
    assert!(error(&zeros(&[2, 8])?, &row(1)).contains("query: shape [2, 8]"));
    assert!(error(&x.to_dtype(DType::BF16)?, &row(1)).contains("query: BF16"));
    let wrong = |page, len| {
        let spans = [PageSpan { page, len }];
        let rows = [PagedRow {
            spans: &spans,
            visible: 1,
        }];
        error(&x, &rows)
    };
    assert!(wrong(2, 1).contains("batch: page 2, must be below the number of pages, 2"));
    assert!(wrong(0, PAGE + 1).contains("rows[0]: 17 positions of page 0, must be at most 16"));
    let row = row(1);
    let batch = PagedBatch::new(&[], &row, true, &Device::Cpu)?;
    assert!(message(paged_attention(&x, &pages, &batch, 0.0)).contains("scale: 0"));
    let y = zeros(&[1, 4])?;
    let write = |key: &Tensor, value: &Tensor, page, position| {
        let slots = [PageSlot { page, position }];
        let written = PagedBatch::new(&slots, &[], true, &Device::Cpu)
            .and_then(|batch| pages.write(key, value, &batch));
        message(written)
    };
    assert!(write(&y, &y, 2, 0).contains("batch: page 2, must be below the number of pages, 2"));
    assert!(write(&y, &y, 0, PAGE).contains("slots[0]: position 16, must be below 16"));
    assert!(write(&y, &x, 0, 0).contains("value: shape [1, 8], must be [1, 4]"));
    assert!(message(KeyValuePages::new(1, 1, 0, DType::F32, &Device::Cpu)).contains("head_dim: 0"));
    Ok(())
}

/// Rows of a prompt with 32 pages and of 20 pages of their own: two parts that they share, and two
/// of their own, or alone four parts, of which the last one is short.
#[rstest]
#[case::shared(true)]
#[case::alone(false)]
fn partial_results_take_the_counted_bytes(#[case] shares_reads: bool) -> Result<()> {
    let Some(_) = cuda_peak_bytes().filter(|_| device().is_cuda()) else {
        return Ok(());
    };
    let (rows, heads, head_dim) = (20, 4, 64);
    let (prompt, own) = (32 * PAGE, 20 * PAGE);
    let pages = KeyValuePages::new(32 + 20 * rows, 2, head_dim, DType::F32, device())?;
    let span = |page| PageSpan { page, len: PAGE };
    let spans = (0..rows).map(|row| {
        let own = 32 + 20 * row..32 + 20 * (row + 1);
        (0..32).chain(own).map(span).collect::<Vec<_>>()
    });
    let spans: Vec<_> = spans.collect();
    let all: Vec<_> = spans
        .iter()
        .map(|spans| PagedRow {
            spans,
            visible: prompt + own,
        })
        .collect();
    let batch = PagedBatch::new(&[], &all, shares_reads, device())?;
    let query = noise_tensor((rows, heads * head_dim), 1, DType::F32, device())?;
    let attend = || paged_attention(&query, &pages, &batch, 0.125);
    attend()?;
    cuda_peak_bytes();
    let used = cuda_peak_bytes();
    let y = attend()?;
    let bytes = cuda_peak_bytes().zip(used).map(|(peak, used)| peak - used);
    let result = (y.elem_count() * size_of::<f32>()) as u64;
    let partial = PagedBatch::partial_bytes((rows, heads), head_dim, (prompt, own)) as u64;
    assert_eq!(partial, (rows * heads * 4 * (head_dim + 2) * 4) as u64);
    assert_eq!(bytes, Some(partial + result));
    Ok(())
}
