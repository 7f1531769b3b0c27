//! Tests `add` against the sum in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::add;
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::noisy;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn each_sum_is_the_nearest_number(
        rows in 0usize..300,
        columns in 0usize..300,
        layouts in [layouts(), layouts()],
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        seed in any::<u64>(),
    ) {
        let a = layouts[0].apply(&noisy(&[rows, columns], seed, dtype)?)?;
        let b = layouts[1].apply(&noisy(&[rows, columns], !seed, dtype)?)?;
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        let expected = (wide(&a)? + wide(&b)?)?.to_dtype(dtype)?;
        for device in devices() {
            let sum = add(&a.to_device(device)?, &b.to_device(device)?)?;
            prop_assert_eq!((sum.dims(), sum.dtype()), (a.dims(), dtype));
            prop_assert_eq!(numbers(&sum)?, numbers(&expected)?);
        }
    }
}

#[test]
fn both_inputs_have_the_gradient_of_the_sum() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let var = |x: f32| Var::from_tensor(&Tensor::new(&[x, 1.], &Device::Cpu)?.to_dtype(dtype)?);
        let (a, b) = (var(2.0)?, var(3.0)?);
        let gradients = (add(&a, &b)? * 4.0)?.sum_all()?.backward()?;
        for x in [a, b] {
            let gradient = gradients.get(&x).map(numbers).transpose()?;
            assert_close(&gradient.unwrap_or_default(), &[4.0, 4.0], 0.0);
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let x = Tensor::zeros((2, 3), DType::BF16, &Device::Cpu)?;
    assert!(message(add(&x, &x.t()?)).contains("b: shape [3, 2], must be that of a, [2, 3]"));
    assert!(message(add(&x, &x.to_dtype(DType::F16)?)).contains("b: F16"));
    let integers = x.to_dtype(DType::U32)?;
    assert!(message(add(&integers, &integers)).contains("a: U32, must be of a float dtype"));
    Ok(())
}
