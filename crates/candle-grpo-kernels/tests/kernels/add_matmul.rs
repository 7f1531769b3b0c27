//! Tests `add_matmul` and `matmul` against their composed twin in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{add_matmul, arithmetic_dtype, composed, matmul};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::{noisy, rounding};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        m in 0usize..70,
        // Products are split along the inner dimension.
        k in prop_oneof![0usize..40, Just(64), 500usize..530, 760usize..800],
        n in 0usize..70,
        layouts in [layouts(), layouts()],
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        seed in any::<u64>(),
    ) {
        let a = layouts[0].apply(&noisy(&[m, k], seed, dtype)?)?;
        let b = layouts[1].apply(&noisy(&[k, n], seed ^ 1, dtype)?)?;
        let start = noisy(&[m, n], seed ^ 2, DType::F64)?;
        let expected = start.copy()?;
        composed::add_matmul(&expected, &a.to_dtype(DType::F64)?, &b.to_dtype(DType::F64)?)?;
        for device in devices() {
            let sum = start.to_dtype(arithmetic_dtype(dtype))?.copy()?.to_device(device)?;
            add_matmul(&sum, &a.to_device(device)?, &b.to_device(device)?)?;
            assert_close(&numbers(&sum)?, &numbers(&expected)?, 20.0 * rounding(dtype));
            let product = matmul(&a.to_device(device)?, &b.to_device(device)?)?;
            prop_assert_eq!(product.dtype(), dtype);
            let exact = (&expected - &start)?;
            assert_close(&numbers(&product)?, &numbers(&exact)?, 20.0 * rounding(dtype));
            // A sum in the dtype of the product is rounded once: as exact as the start in f32.
            let narrow = start.to_dtype(dtype)?;
            let [wide, narrow] = [narrow.to_dtype(arithmetic_dtype(dtype))?, narrow].map(|sum| {
                let sum = sum.copy()?.to_device(device)?;
                add_matmul(&sum, &a.to_device(device)?, &b.to_device(device)?)?;
                sum.to_device(&Device::Cpu)
            });
            let narrow = narrow?;
            prop_assert_eq!(narrow.dtype(), dtype);
            prop_assert_eq!(numbers(&narrow)?, numbers(&wide?.to_dtype(dtype)?)?);
        }
    }
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (sum, a, b) = (zeros((2, 4))?, zeros((2, 3))?, zeros((3, 4))?);
    assert!(
        message(add_matmul(&sum, &a, &a)).contains("shapes [2, 4], [2, 3] and [2, 3], must be")
    );
    assert!(message(matmul(&a, &a)).contains("shapes [2, 3] and [2, 3], must be"));
    let half = b.to_dtype(DType::F16)?;
    assert!(message(matmul(&a, &half)).contains("b: F16"));
    assert!(message(add_matmul(&sum, &a, &half)).contains("b: F16"));
    let halves = add_matmul(&sum.to_dtype(DType::BF16)?, &a.to_dtype(DType::F16)?, &half);
    assert!(message(halves).contains("sum: BF16, must be F32"));
    assert!(message(add_matmul(&zeros((4, 2))?.t()?, &a, &b)).contains("must be contiguous"));
    let square = zeros((3, 3))?;
    let shared = message(add_matmul(&square, &square, &square));
    assert!(shared.contains("shares its memory"), "{shared}");
    Ok(())
}
