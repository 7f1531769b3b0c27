//! Tests `experts` against its composed twin in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{ExpertWeights, composed, experts};
use candle_grpo_test_support::{
    CudaCalls, assert_close, cases, device, devices, message, noise, numbers, token_ids,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{bits, noisy, rounding};

/// The experts of a pass.
#[derive(Debug, Clone, Copy)]
enum Choice {
    /// Different ones in each row.
    Random,
    /// All rows choose the same ones, and some experts have no rows.
    Same,
    /// A row's experts are all the same one.
    One,
}

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    width: usize,
    choice: Choice,
    /// Elements before each weight in its memory.
    offset: usize,
    seed: u64,
}

/// The arguments, on the CPU in f64.
struct Arguments {
    x: Tensor,
    weights: Vec<[Tensor; 3]>,
    chosen: Tensor,
    gates: Tensor,
}

impl Case {
    fn arguments(&self, dtype: DType) -> Result<Arguments> {
        let &Self {
            rows,
            top_k,
            experts,
            hidden,
            width,
            ..
        } = self;
        // Results are near 1.
        let weight = |outputs: usize, inputs: usize, number: usize| -> Result<Tensor> {
            let weight = noisy(&[outputs, inputs], self.seed ^ number as u64, DType::F64)?;
            (weight * (3.0 / inputs as f64).sqrt())?.to_dtype(dtype)
        };
        let weights = (0..experts).map(|expert| {
            Ok([
                weight(width, hidden, 3 * expert + 1)?,
                weight(width, hidden, 3 * expert + 2)?,
                weight(hidden, width, 3 * expert + 3)?,
            ])
        });
        let start = token_ids(rows, experts, self.seed);
        let chosen = (0..rows * top_k).map(|pair| {
            let k = pair % top_k;
            let expert = match self.choice {
                Choice::Random => start[pair / top_k] as usize + k,
                Choice::Same => k,
                Choice::One => start[0] as usize,
            };
            (expert % experts) as u32
        });
        let gates = noise(rows * top_k, self.seed ^ 99)
            .into_iter()
            .map(|x| x as f32);
        Ok(Arguments {
            x: (noisy(&[rows, hidden], self.seed, DType::F64)? * 1.7)?.to_dtype(dtype)?,
            weights: weights.collect::<Result<_>>()?,
            chosen: Tensor::from_iter(chosen, &Device::Cpu)?.reshape((rows, top_k))?,
            gates: Tensor::from_iter(gates, &Device::Cpu)?.reshape((rows, top_k))?,
        })
    }
}

/// Returns the same weight after `offset` elements of its memory.
fn behind(weight: &Tensor, offset: usize, device: &Device) -> Result<Tensor> {
    let memory = weight
        .flatten_all()?
        .pad_with_zeros(0, offset, 0)?
        .to_device(device)?;
    memory
        .narrow(0, offset, weight.elem_count())?
        .reshape(weight.shape())
}

fn on(weights: &[[Tensor; 3]], offset: usize, device: &Device) -> Result<ExpertWeights> {
    let weights = weights.iter().map(|[gate, up, down]| {
        Ok([
            behind(gate, offset, device)?,
            behind(up, offset, device)?,
            behind(down, offset, device)?,
        ])
    });
    ExpertWeights::new(weights.collect::<Result<_>>()?)
}

fn check(case: &Case, dtype: DType, layout: Layout) -> Result<()> {
    let Arguments {
        x,
        weights,
        chosen,
        gates,
    } = case.arguments(dtype)?;
    let x = layout.apply(&x)?;
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64);
    let wide_weights = weights.iter().map(|maps| {
        let [gate, up, down] = maps.each_ref().map(wide);
        Ok([gate?, up?, down?])
    });
    let wide_weights = ExpertWeights::new(wide_weights.collect::<Result<_>>()?)?;
    let expected = composed::experts(&wide(&x)?, &wide_weights, &chosen, &wide(&gates)?)?;
    for device in devices() {
        let weights = on(&weights, case.offset, device)?;
        let arguments = [&x, &chosen, &gates].map(|tensor| tensor.to_device(device));
        let [x, chosen, gates] = arguments;
        let y = experts(&x?, &weights, &chosen?, &gates?)?;
        assert_eq!((y.dims(), y.dtype()), (expected.dims(), dtype));
        assert_close(&numbers(&y)?, &numbers(&expected)?, 3.0 * rounding(dtype));
    }
    Ok(())
}

fn a_case() -> impl Strategy<Value = Case> {
    let sizes = || prop_oneof![1usize..20, Just(32), Just(64), 70usize..140];
    let choice = prop_oneof![Just(Choice::Random), Just(Choice::Same), Just(Choice::One)];
    let counts = prop_oneof![1usize..9, 30usize..70];
    let experts = prop_oneof![1usize..6, Just(40)];
    let experts = experts.prop_flat_map(|experts| (Just(experts), 1..=experts.min(8)));
    (
        counts,
        experts,
        [sizes(), sizes()],
        choice,
        0usize..3,
        any::<u64>(),
    )
        .prop_map(
            |(rows, (experts, top_k), [hidden, width], choice, offset, seed)| Case {
                rows,
                top_k,
                experts,
                hidden,
                width,
                choice,
                offset,
                seed,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 192)))]
    #[test]
    fn the_kernels_equal_the_composed_twin_in_f64(
        case in a_case(),
        dtype in dtypes(),
        layout in layouts(),
    ) {
        check(&case, dtype, layout)?;
    }
}

const CASE: Case = Case {
    rows: 37,
    top_k: 3,
    experts: 5,
    hidden: 80,
    width: 48,
    choice: Choice::Random,
    offset: 0,
    seed: 5,
};

#[rstest]
#[case::aligned(CASE)]
// Neither the columns nor the depth are multiples of what a lane, a warp or a block has.
#[case::odd_sizes(Case { hidden: 51, width: 21, ..CASE })]
#[case::one_element(Case { hidden: 1, width: 1, ..CASE })]
// Each warp has several chunks of the depth, and the last one ends within a chunk.
#[case::long_rows(Case { rows: 3, hidden: 1096, width: 520, ..CASE })]
#[case::weights_that_are_not_aligned(Case { offset: 1, ..CASE })]
#[case::one_row(Case { rows: 1, ..CASE })]
#[case::all_experts(Case { top_k: 5, ..CASE })]
#[case::experts_without_rows(Case { choice: Choice::Same, ..CASE })]
#[case::all_rows_to_one_expert(Case { choice: Choice::One, ..CASE })]
#[case::more_experts_than_pairs(Case { rows: 4, experts: 20, ..CASE })]
// More than the kernel takes.
#[case::many_rows(Case { rows: 70, top_k: 1, experts: 1, ..CASE })]
fn each_kind_of_pass_equals_the_twin(
    #[case] case: Case,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    check(&case, dtype, Layout::Contiguous)?;
    check(&case, dtype, Layout::Offset)
}

/// A sequence's tokens do not depend on the other sequences in the step.
#[rstest]
fn a_row_has_the_same_bits_alone(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(37, 4)] rows: usize,
) -> Result<()> {
    for device in devices().filter(|device| device.is_cuda()) {
        let case = Case {
            rows,
            experts: 13,
            ..CASE
        };
        let arguments = case.arguments(dtype)?;
        let weights = on(&arguments.weights, 0, device)?;
        let [x, chosen, gates] = [&arguments.x, &arguments.chosen, &arguments.gates]
            .map(|tensor| tensor.to_device(device));
        let (x, chosen, gates) = (x?, chosen?, gates?);
        let all = experts(&x, &weights, &chosen, &gates)?;
        for row in 0..rows {
            let one = |tensor: &Tensor| tensor.narrow(0, row, 1);
            let alone = experts(&one(&x)?, &weights, &one(&chosen)?, &one(&gates)?)?;
            assert_eq!(bits(&alone)?, bits(&one(&all)?)?, "row {row}");
        }
    }
    Ok(())
}

#[test]
fn an_index_that_is_not_an_expert_makes_its_row_nan() -> Result<()> {
    // With more pairs than experts, and with fewer.
    for number in [2, 20] {
        let case = Case {
            rows: 3,
            top_k: 2,
            experts: number,
            ..CASE
        };
        let arguments = case.arguments(DType::F32)?;
        for device in devices() {
            let weights = on(&arguments.weights, 0, device)?;
            let (x, gates) = (
                arguments.x.to_device(device)?,
                arguments.gates.to_device(device)?,
            );
            let wrong = Tensor::new(&[[0u32, 1], [1, number as u32], [1, 0]], device)?;
            let result = experts(&x, &weights, &wrong, &gates);
            if device.is_cpu() {
                let error = message(result);
                let expected = format!("experts: {number}, must be below {number}");
                assert!(error.contains(&expected), "{error}");
                continue;
            }
            let right = Tensor::new(&[[0u32, 1], [1, 0], [1, 0]], device)?;
            let right = experts(&x, &weights, &right, &gates)?;
            for (row, (found, expected)) in result?
                .to_vec2::<f32>()?
                .into_iter()
                .zip(right.to_vec2::<f32>()?)
                .enumerate()
            {
                if row == 1 {
                    assert!(found.iter().all(|x| x.is_nan()), "{found:?}");
                } else {
                    assert_eq!(found, expected);
                }
            }
        }
    }
    Ok(())
}

/// Updates of the weights in place are seen, as a policy's are.
#[test]
fn weights_are_not_copied() -> Result<()> {
    for device in devices() {
        let one = |x: f32| Var::new(&[[x]], device);
        let (gate, up, down) = (one(30.0)?, one(2.0)?, one(0.5)?);
        let maps = [&gate, &up, &down].map(|weight| weight.as_detached_tensor());
        let weights = ExpertWeights::new(vec![maps])?;
        let chosen = Tensor::new(&[[0u32]], device)?;
        let ones = Tensor::new(&[[1f32]], device)?;
        let y = |weights| experts(&ones, weights, &chosen, &ones)?.to_vec2::<f32>();
        assert_eq!(y(&weights)?, [[30.0]]);
        up.set(&Tensor::new(&[[3f32]], device)?)?;
        assert_eq!(y(&weights)?, [[45.0]]);
    }
    Ok(())
}

#[test]
fn three_launches_compute_all_experts() -> Result<()> {
    let arguments = CASE.arguments(DType::BF16)?;
    let weights = on(&arguments.weights, 0, device())?;
    let [x, chosen, gates] = [&arguments.x, &arguments.chosen, &arguments.gates]
        .map(|tensor| tensor.to_device(device()));
    let (x, chosen, gates) = (x?, chosen?, gates?);
    let before = CudaCalls::now();
    experts(&x, &weights, &chosen, &gates)?;
    let Some((after, before)) = CudaCalls::now().zip(before) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let calls = after - before;
    assert_eq!((calls.launches, calls.products), (3, 0));
    assert_eq!((calls.copies_to_device, calls.copies_to_host), (0, 0));
    assert_eq!(calls.waits, 0);
    Ok(())
}

#[test]
fn the_kernel_takes_few_rows() -> Result<()> {
    for device in devices() {
        let maps = || -> Result<_> {
            let one = || Tensor::ones((1, 1), DType::BF16, device);
            Ok([one()?, one()?, one()?])
        };
        let weights =
            |experts| ExpertWeights::new((0..experts).map(|_| maps()).collect::<Result<_>>()?);
        let takes = device.is_cuda();
        for (experts, rows, top_k, expected) in [
            (2, 64, 2, true),
            (2, 65, 2, false),
            (200, 1024, 8, true),
            (200, 1025, 8, false),
            (2, usize::MAX, 2, false),
        ] {
            assert_eq!(
                weights(experts)?.fuse(rows, top_k),
                takes && expected,
                "{rows}"
            );
        }
    }
    Ok(())
}

#[test]
fn wrong_arguments_are_errors() -> Result<()> {
    let cpu = &Device::Cpu;
    let zeros = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, cpu);
    let maps = || -> Result<_> { Ok([zeros((4, 3))?, zeros((4, 3))?, zeros((3, 4))?]) };
    assert!(message(ExpertWeights::new(Vec::new())).contains("no experts"));
    let mut wrong = maps()?;
    wrong[2] = zeros((4, 3))?;
    let error = message(ExpertWeights::new(vec![maps()?, wrong]));
    assert!(
        error.contains("weights[1][2]: shape [4, 3]") && error.contains("must be [3, 4]"),
        "{error}"
    );
    let mut wrong = maps()?;
    wrong[0] = zeros((3, 4))?.t()?;
    let error = message(ExpertWeights::new(vec![maps()?, wrong]));
    assert!(
        error.contains("weights[1][0]") && error.contains("contiguous"),
        "{error}"
    );
    let mut wrong = maps()?;
    wrong[1] = wrong[1].to_dtype(DType::F16)?;
    assert!(message(ExpertWeights::new(vec![wrong])).contains("weights[0][1]: F16"));
    let mut wrong = maps()?;
    wrong[1] = Var::from_tensor(&wrong[1])?.as_tensor().clone();
    assert!(message(ExpertWeights::new(vec![wrong])).contains("weights[0][1]: a variable"));

    let weights = ExpertWeights::new(vec![maps()?, maps()?])?;
    let (x, gates) = (zeros((2, 3))?, zeros((2, 1))?);
    let chosen = Tensor::zeros((2, 1), DType::U32, cpu)?;
    experts(&x, &weights, &chosen, &gates)?;
    let error =
        |x: &Tensor, chosen: &Tensor, gates: &Tensor| message(experts(x, &weights, chosen, gates));
    assert!(error(&zeros((2, 4))?, &chosen, &gates).contains("x: shape [2, 4], must be [N, 3]"));
    assert!(error(&x.to_dtype(DType::F16)?, &chosen, &gates).contains("x: F16"));
    assert!(error(&x, &gates, &gates).contains("chosen: [2, 1] of F32"));
    assert!(error(&x, &chosen.narrow(0, 0, 1)?, &gates).contains("chosen: [1, 1] of U32"));
    assert!(error(&x, &chosen, &zeros((2, 2))?).contains("gates: [2, 2] of F32"));
    assert!(error(&x, &chosen, &gates.to_dtype(DType::F64)?).contains("of F64, must be"));
    Ok(())
}
