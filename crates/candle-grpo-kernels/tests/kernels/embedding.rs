//! Tests `embedding` against its composed twin in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, arithmetic_dtype, composed, embedding};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, noisy};

fn check(ids: &Tensor, weight: &Tensor, layout: Layout) -> Result<()> {
    check_against_f64(
        &[(weight, layout)],
        1.0,
        |inputs| embedding(&ids.to_device(inputs[0].device())?, inputs[0]),
        |inputs| composed::embedding(&ids.to_device(inputs[0].device())?, inputs[0]),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        ids in prop::collection::vec(any::<u32>(), 1..40),
        vocab in prop_oneof![Just(1u32), 2u32..40],
        width in prop_oneof![1usize..40, Just(576)],
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let ids: Vec<u32> = ids.into_iter().map(|id| id % vocab).collect();
        let ids = layouts[0].apply(&Tensor::from_slice(&ids, ids.len(), &Device::Cpu)?)?;
        check(&ids, &noisy(&[vocab as usize, width], seed, dtype)?, layouts[1])?;
    }
}

#[test]
fn no_ids_give_no_rows() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let ids = Tensor::from_slice(&[0u32; 0], (2, 0), device)?;
            let rows = embedding(&ids, &noisy(&[4, 5], 1, dtype)?.to_device(device)?)?;
            assert_eq!((rows.dims(), rows.dtype()), (&[2, 0, 5][..], dtype));
        }
    }
    Ok(())
}

#[test]
fn ids_may_have_any_shape() -> Result<()> {
    let ids = Tensor::new(&[[0i64, 3, 1], [2, 3, 3]], &Device::Cpu)?.t()?;
    let weight = noisy(&[4, 5], 1, DType::F32)?;
    check(&ids, &weight, Layout::Contiguous)?;
    assert_eq!(embedding(&ids, &weight)?.dims(), [3, 2, 5]);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn gradients_are_added_to_a_sum(
        ids in prop::collection::vec(0u32..9, 0..30),
        width in 1usize..20,
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        for device in devices() {
            let gradient = layout.apply(&noisy(&[ids.len(), width], seed, dtype)?)?;
            let start = noisy(&[9, width], seed ^ 1, arithmetic_dtype(dtype))?;
            let sum = start.copy()?.to_device(device)?;
            let on_device = Tensor::from_vec(ids.clone(), ids.len(), device)?;
            add_embedding_gradient(&sum, &on_device, &gradient.to_device(device)?)?;
            let mut expected = numbers(&start)?;
            for (&id, row) in ids.iter().zip(numbers(&gradient)?.chunks(width)) {
                for (sum, x) in expected[id as usize * width..].iter_mut().zip(row) {
                    *sum += x;
                }
            }
            assert_close(&numbers(&sum)?, &expected, 1e-5);
        }
    }
}

#[test]
fn an_error_names_a_sum_that_does_not_fit() -> Result<()> {
    let ids = Tensor::new(&[0u32, 3], &Device::Cpu)?;
    let zeros = |shape: (usize, usize), dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let gradient = zeros((2, 3), DType::BF16)?;
    let call = |sum: &Tensor| message(add_embedding_gradient(sum, &ids, &gradient));
    assert!(call(&zeros((4, 3), DType::BF16)?).contains("sum: BF16, must be F32 to add BF16"));
    assert!(call(&zeros((3, 4), DType::F32)?.t()?).contains("must be contiguous"));
    assert!(call(&zeros((4, 2), DType::F32)?).contains("gradient: shape [2, 3], must be [2, 2]"));
    assert!(call(&zeros((3, 3), DType::F32)?).contains("ids: token id 3"));
    Ok(())
}

/// 1024 gradients with value 1/256 for one token. A bf16 sum would stop at 1.
#[test]
fn the_gradient_of_a_frequent_token_is_summed_in_f32() -> Result<()> {
    for device in devices() {
        let weight = Var::zeros((3, 2), DType::BF16, device)?;
        let ids = Tensor::ones(1024, DType::U32, device)?;
        let rows = (embedding(&ids, &weight)? * (1.0 / 256.0))?.to_dtype(DType::F32)?;
        let gradients = rows.sum_all()?.backward()?;
        let gradient = gradients.get(&weight).expect("a gradient");
        assert_eq!(numbers(gradient)?, [0., 0., 4., 4., 0., 0.]);
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let weight = Tensor::zeros((4, 3), DType::F32, &Device::Cpu)?;
    let ids = |ids: &[i64]| Tensor::new(ids, &Device::Cpu);
    assert!(message(embedding(&ids(&[0, 4])?, &weight)).contains("ids: token id 4"));
    assert!(message(embedding(&ids(&[-1])?, &weight)).contains("ids: token id -1"));
    assert!(message(embedding(&weight, &weight)).contains("ids: F32, must be of an integer"));
    assert!(message(embedding(&ids(&[0])?, &ids(&[0])?)).contains("weight: I64"));
    assert!(message(embedding(&ids(&[0])?, &weight.flatten_all()?)).contains("weight: shape [12]"));
    Ok(())
}
