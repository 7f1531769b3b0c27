//! Tests of `HeadTransform` against the operators that it consists of.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_kernels::{HeadTransform, rope, rope_gradient};
use candle_grpo_test_support::{cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::noisy;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn queries_and_keys_are_rotated_as_each_alone(
        // More heads than a block of the kernel has.
        rows in prop_oneof![0usize..5, Just(90)],
        heads in [1usize..4, 1usize..4],
        // More pairs than the threads of a head load at a time.
        pairs in prop_oneof![1usize..20, Just(64), Just(264)],
        is_variable in any::<bool>(),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        for device in devices() {
            let angles = |salt| {
                layouts[0].apply(&noisy(&[rows, pairs], seed ^ salt, DType::F32)?)?.to_device(device)
            };
            let (cos, sin) = (angles(1)?, angles(2)?);
            let input = |i: usize| -> Result<Tensor> {
                let x = noisy(&[rows, heads[i] * 2 * pairs], seed ^ (3 + i as u64), dtype)?;
                layouts[1 + i].apply(&x)?.to_device(device)
            };
            let (query, key) = (input(0)?, input(1)?);
            let query = if is_variable { Var::from_tensor(&query)?.into_inner() } else { query };
            let transform = HeadTransform { norms: None, angles: Some([&cos, &sin]), head_dim: None };
            let rotated = transform.apply([&query, &key])?;
            let gradients = transform.rotate_back([&query, &key])?;
            for (i, x) in [&query, &key].into_iter().enumerate() {
                let expected = rope(x, &cos, &sin)?;
                prop_assert_eq!(rotated[i].track_op(), x.track_op());
                prop_assert_eq!((rotated[i].dims(), rotated[i].dtype()), (x.dims(), dtype));
                prop_assert_eq!(numbers(&rotated[i])?, numbers(&expected)?);
                let expected = rope_gradient(&cos, &sin, x)?;
                prop_assert!(!gradients[i].track_op());
                prop_assert_eq!((gradients[i].dims(), gradients[i].dtype()), (x.dims(), dtype));
                prop_assert_eq!(numbers(&gradients[i])?, numbers(&expected)?);
            }
        }
    }
}

/// A head has `2 * pairs + rest` elements, of which the first `2 * pairs` rotate.
#[test]
fn the_rest_of_a_head_does_not_rotate() -> Result<()> {
    let (rows, heads, pairs, rest) = (5, 3, 2, 3);
    let head_dim = 2 * pairs + rest;
    for device in devices() {
        let noise = |shape: &[usize], seed| noisy(shape, seed, DType::F32)?.to_device(device);
        let (cos, sin) = (noise(&[rows, pairs], 1)?, noise(&[rows, pairs], 2)?);
        let (query, key) = (
            noise(&[rows, heads * head_dim], 3)?,
            noise(&[rows, head_dim], 4)?,
        );
        let transform = HeadTransform {
            norms: None,
            angles: Some([&cos, &sin]),
            head_dim: Some(head_dim),
        };
        let rotated = transform.apply([&query, &key])?;
        let back = transform.rotate_back([&query, &key])?;
        for (i, x) in [&query, &key].into_iter().enumerate() {
            for (found, rotate) in [(&rotated[i], false), (&back[i], true)] {
                for head in 0..x.dim(1)? / head_dim {
                    let part = |x: &Tensor, from, len| x.narrow(1, head * head_dim + from, len);
                    let first = part(x, 0, 2 * pairs)?;
                    let expected = if rotate {
                        rope_gradient(&cos, &sin, &first)?
                    } else {
                        rope(&first, &cos, &sin)?
                    };
                    assert_eq!(numbers(&part(found, 0, 2 * pairs)?)?, numbers(&expected)?);
                    assert_eq!(
                        numbers(&part(found, 2 * pairs, rest)?)?,
                        numbers(&part(x, 2 * pairs, rest)?)?
                    );
                }
            }
        }
        let narrow = HeadTransform {
            head_dim: Some(3),
            ..transform
        };
        let error = message(narrow.apply([&query, &key]));
        assert!(error.contains("head_dim: 3, must be at least"), "{error}");
    }
    Ok(())
}
