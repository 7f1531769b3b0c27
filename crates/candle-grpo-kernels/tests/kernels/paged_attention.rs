//! Tests of `paged_attention` against `attention` in f64, and of rows that are independent.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{
    KeyValuePages, PAGE, PageSlot, PageSpan, PagedRow, attention, composed, paged_attention,
};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

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
        pages.write(&key, &value, &slots)?;
        Ok(Self { spans, key, value })
    }
}

#[derive(Debug, Clone)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// The number of positions in each page of each sequence.
    sequences: Vec<Vec<usize>>,
}

fn shapes() -> impl Strategy<Value = Shape> {
    let sequence = proptest::collection::vec(1usize..=PAGE, 1..5);
    (
        1usize..4,
        1usize..4,
        prop_oneof![1usize..40, Just(64), Just(96)],
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
        paged.write(&nothing, &nothing, &slots)?;
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

/// Returns a row for each sequence. The last `hidden` positions are not visible.
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
    #![proptest_config(ProptestConfig::with_cases(cases(48)))]

    #[test]
    fn the_result_equals_attention_to_the_same_positions(
        shape in shapes(),
        hidden in 0usize..20,
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let scale = 0.7;
        for device in devices() {
            let (pages, sequences) = write_all(&shape, layouts[0], seed, dtype, device)?;
            let rows = rows(&sequences, hidden)?;
            let width = shape.kv_heads * shape.group * shape.head_dim;
            let query = layouts[1].apply(&noisy(&[rows.len(), width], seed, dtype)?)?.to_device(device)?;
            let fused = paged_attention(&query, &pages, &rows, scale)?;
            let composed = composed::paged_attention(&query, &pages, &rows, scale)?;
            prop_assert_eq!((fused.dims(), fused.dtype()), (query.dims(), dtype));
            prop_assert_eq!((composed.dims(), composed.dtype()), (query.dims(), dtype));
            for (index, (row, sequence)) in rows.iter().zip(&sequences).enumerate() {
                let wide = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64);
                let seen = |x: &Tensor| wide(&x.narrow(0, 0, row.visible)?);
                let mask = Tensor::ones((1, row.visible), DType::U8, &Device::Cpu)?;
                let query = wide(&query.narrow(0, index, 1)?)?;
                let expected = attention(&query, &seen(&sequence.key)?, &seen(&sequence.value)?, &mask, shape.head_dim, scale)?;
                for actual in [&fused, &composed] {
                    let actual = actual.narrow(0, index, 1)?;
                    assert_close(&numbers(&actual)?, &numbers(&expected)?, 4.0 * rounding(dtype));
                }
            }
        }
    }

    #[test]
    fn a_row_is_bit_identical_with_any_other_rows(
        shape in shapes(),
        dtype in dtypes(),
        seed in any::<u64>(),
        copies in 1usize..30,
    ) {
        let (pages, sequences) = write_all(&shape, Layout::Contiguous, seed, dtype, &Device::Cpu)?;
        // Many rows, to use several cores.
        let one = rows(&sequences, 0)?;
        let rows = one.repeat(copies);
        let width = shape.kv_heads * shape.group * shape.head_dim;
        let query = noisy(&[rows.len(), width], seed, dtype)?;
        let together = paged_attention(&query, &pages, &rows, 0.3)?;
        for (index, row) in rows.iter().enumerate() {
            let alone = paged_attention(&query.narrow(0, index, 1)?, &pages, &[*row], 0.3)?;
            prop_assert_eq!(bits(&alone)?, bits(&together.narrow(0, index, 1)?)?);
        }
    }
}

#[test]
fn growing_keeps_the_content_of_pages() -> Result<()> {
    let x = noisy(&[1, 6], 1, DType::F32)?;
    let mut pages = KeyValuePages::new(1, 2, 3, DType::F32, &Device::Cpu)?;
    pages.write(
        &x,
        &x,
        &[PageSlot {
            page: 0,
            position: 0,
        }],
    )?;
    pages.grow(5)?;
    assert_eq!(pages.len(), 5);
    let row = PagedRow {
        spans: &[PageSpan { page: 0, len: 1 }],
        visible: 1,
    };
    let y = paged_attention(&x, &pages, &[row], 1.0)?;
    assert_eq!(numbers(&y)?, numbers(&x)?);
    assert!(message(pages.grow(4)).contains("pages: 4, must be at least the current number, 5"));
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
    let error =
        |query: &Tensor, rows: &[PagedRow]| message(paged_attention(query, &pages, rows, 1.0));
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
    let spans = [PageSpan { page: 2, len: 1 }];
    assert!(
        error(
            &x,
            &[PagedRow {
                spans: &spans,
                visible: 1
            }]
        )
        .contains("rows[0]: 1 positions of page 2")
    );
    assert!(message(paged_attention(&x, &pages, &row(1), 0.0)).contains("scale: 0"));
    let y = zeros(&[1, 4])?;
    let slot = |page, position| [PageSlot { page, position }];
    assert!(message(pages.write(&y, &y, &slot(2, 0))).contains("slots[0]: position 0 of page 2"));
    assert!(message(pages.write(&y, &y, &slot(0, PAGE))).contains("slots[0]: position 16"));
    assert!(
        message(pages.write(&y, &x, &slot(0, 0))).contains("value: shape [1, 8], must be [1, 4]")
    );
    assert!(message(KeyValuePages::new(1, 1, 0, DType::F32, &Device::Cpu)).contains("head_dim: 0"));
    Ok(())
}
