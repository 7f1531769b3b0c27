//! Tests `RowMap` against loops in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::RowMap;
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::noisy;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn rows_are_selected_and_summed(
        rows in prop::collection::vec(any::<u32>(), 1..40),
        count in 1u32..40,
        width in prop_oneof![1usize..40, Just(64)],
        dtype in prop_oneof![4 => dtypes(), 1 => Just(DType::F64)],
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let rows: Vec<u32> = rows.into_iter().map(|row| row % count).collect();
        for device in devices() {
            let map = RowMap::new(rows.clone(), count as usize, device)?;
            let x = noisy(&[count as usize, width], seed, dtype)?.to_device(device)?;
            let values = numbers(&x)?;
            let of_row = |row: u32| &values[row as usize * width..][..width];
            let expected: Vec<f64> = rows.iter().flat_map(|&row| of_row(row).to_vec()).collect();
            prop_assert_eq!(numbers(&map.select(&x)?)?, expected);

            let gradient = noisy(&[rows.len(), width], seed, dtype)?.to_device(device)?;
            let gradient = layout.apply(&gradient)?;
            let values = numbers(&gradient)?;
            let mut sums = vec![0.0; count as usize * width];
            for (at, &row) in rows.iter().enumerate() {
                for column in 0..width {
                    sums[row as usize * width + column] += values[at * width + column];
                }
            }
            let found = map.sum(&gradient)?;
            prop_assert_eq!((found.dims(), found.dtype()), (&[count as usize, width][..], dtype));
            let rounding = match dtype { DType::BF16 => 4e-3, DType::F16 => 6e-4, _ => 2e-6 };
            assert_close(&numbers(&found)?, &sums, rounding);
        }
    }
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let cpu = &Device::Cpu;
    assert!(message(RowMap::new(vec![0, 2], 2, cpu)).contains("rows[1]: 2, must be below 2"));
    let map = RowMap::new(vec![0, 1, 1], 2, cpu)?;
    let x = Tensor::zeros((4, 5), DType::F32, cpu)?;
    assert!(message(map.select(&x)).contains("x: shape [4, 5], must be [2, H]"));
    assert!(message(map.sum(&x)).contains("x: shape [4, 5], must be [3, H]"));
    Ok(())
}
