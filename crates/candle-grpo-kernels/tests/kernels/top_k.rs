//! Tests `top_k` against a sort.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::top_k;
use candle_grpo_test_support::{cases, devices, message};
use proptest::prelude::*;

/// Entries with many ties, some infinite or NaN.
fn entries() -> impl Strategy<Value = Vec<f32>> {
    let entry = prop_oneof![
        8 => (-4i8..4).prop_map(f32::from),
        4 => -10f32..10.,
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::NAN),
    ];
    proptest::collection::vec(entry, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 256)))]
    #[test]
    fn the_entries_are_the_first_of_a_stable_sort(row in entries(), rows in 1usize..4, k in 1usize..150) {
        let width = row.len();
        // Each row starts at another entry.
        let turned: Vec<Vec<f32>> = (0..rows)
            .map(|by| {
                let mut row = row.clone();
                row.rotate_left(by % width);
                row
            })
            .collect();
        let expected: Vec<Vec<u32>> = turned
            .iter()
            .map(|row| {
                let mut order: Vec<u32> = (0..width as u32).collect();
                let key = |place: u32| match row[place as usize] {
                    x if x.is_nan() => (0, 0.),
                    x => (1, x),
                };
                order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap());
                order.truncate(k);
                order
            })
            .collect();
        for device in devices() {
            let x = Tensor::new(turned.concat(), device).unwrap();
            let x = x.reshape((1, rows, width)).unwrap();
            let wide = x.to_dtype(DType::F64).unwrap();
            let strided = x.transpose(1, 2).unwrap().contiguous().unwrap();
            let strided = strided.transpose(1, 2).unwrap();
            for x in [x, wide, strided] {
                let found = top_k(&x, k).unwrap();
                prop_assert_eq!(found.dims(), [1, rows, k.min(width)]);
                let found = found.squeeze(0).unwrap().to_vec2::<u32>().unwrap();
                prop_assert_eq!(&found, &expected);
            }
        }
    }
}

#[test]
fn entries_that_f32_cannot_tell_apart_are_in_order() -> Result<()> {
    for device in devices() {
        let x = Tensor::new(&[[1., 1. + 1e-12, 1. - 1e-12]], device)?;
        assert_eq!(top_k(&x, 3)?.to_vec2::<u32>()?, [[1, 0, 2]]);
    }
    Ok(())
}

#[test]
fn nothing_to_choose_from_is_an_error() -> Result<()> {
    let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let error = message(top_k(&x, 0));
    assert_eq!(
        error,
        "top_k: k 0 of shape [2, 3], must be at least 1 of [.., V]"
    );
    let empty = x.narrow(1, 0, 0)?;
    let scalar = Tensor::new(1f32, &Device::Cpu)?;
    for x in [empty, scalar] {
        assert!(message(top_k(&x, 1)).starts_with("top_k: k 1 of shape"));
    }
    let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu)?;
    assert_eq!(top_k(&none, 2)?.dims(), [0, 2]);
    Ok(())
}
