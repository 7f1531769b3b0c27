//! Tests `DeltaStates` against whole sequences.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    DeltaHeads, DeltaStates, PrefixTree, SlotRows, StateBatch, causal_conv, gated_delta_rule,
};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::strategies::dtypes;
use crate::twin::{noisy, rounding};

const HEADS: DeltaHeads = DeltaHeads {
    key_heads: 2,
    value_heads: 4,
    key_dim: 3,
    value_dim: 5,
};
const WIDTH: usize = 32;

/// A sequence's rows.
struct Rows {
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    beta: Tensor,
}

impl Rows {
    fn new(rows: usize, taps: usize, dtype: DType, seed: u64, device: &Device) -> Result<Self> {
        let gate = |seed| noisy(&[rows, HEADS.value_heads], seed, DType::F32)?.to_device(device);
        let x = noisy(&[rows, WIDTH], seed, dtype)?.to_device(device)?;
        Ok(Self {
            x: (&x + (x.sign()? * 0.5)?)?,
            weight: noisy(&[WIDTH, taps], 7, dtype)?.to_device(device)?,
            g: (gate(seed ^ 1)?.sqr()? * -0.7)?,
            beta: ((gate(seed ^ 2)? + 1.0)? * 0.5)?,
        })
    }

    /// Returns the convolution and the delta rule's result for its inputs.
    fn whole(&self) -> Result<[Tensor; 2]> {
        let tree = PrefixTree::new(&[self.x.dim(0)?])?;
        Ok([
            causal_conv(&self.x, &self.weight, &tree)?,
            gated_delta_rule(&self.x, &self.g, &self.beta, HEADS, &tree)?,
        ])
    }

    /// The same for rows starting at `first`, with states.
    fn step(
        &self,
        states: &DeltaStates,
        slot: usize,
        first: usize,
        rows: usize,
    ) -> Result<[Tensor; 2]> {
        let batch = [SlotRows { slot, rows }];
        let batch = StateBatch::new(&batch, self.x.device())?;
        let own = |x: &Tensor| x.narrow(0, first, rows);
        let (x, g, beta) = (own(&self.x)?, own(&self.g)?, own(&self.beta)?);
        Ok([
            states.causal_conv(&x, &self.weight, &batch)?,
            states.gated_delta_rule([&x, &g, &beta], &batch)?,
        ])
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn passes_of_any_length_equal_the_whole_sequence(
        passes in prop::collection::vec(prop_oneof![Just(1usize), 1usize..70], 1..6),
        taps in 1usize..6,
        dtype in prop_oneof![4 => dtypes(), 1 => Just(DType::F64)],
        seed in any::<u64>(),
    ) {
        let length = passes.iter().sum();
        for device in devices() {
            let mut rows = Rows::new(length, taps, dtype, seed, device)?;
            if dtype == DType::F64 {
                rows.g = rows.g.to_dtype(dtype)?;
                rows.beta = rows.beta.to_dtype(dtype)?;
            }
            let states = DeltaStates::new(3, HEADS, taps, dtype, device)?;
            let mut found = [Vec::new(), Vec::new()];
            let mut first = 0;
            for &pass in &passes {
                for (found, x) in found.iter_mut().zip(rows.step(&states, 1, first, pass)?) {
                    assert_eq!(x.dtype(), dtype);
                    found.extend(numbers(&x)?);
                }
                first += pass;
            }
            let tolerance = if dtype == DType::F64 { 1e-9 } else { 5.0 * rounding(dtype) };
            for (found, whole) in found.iter().zip(rows.whole()?) {
                assert_close(found, &numbers(&whole)?, tolerance);
            }
        }
    }
}

/// Several sequences in one pass, two of them at the start, and different divisions into passes.
#[test]
fn a_row_depends_only_on_the_rows_of_its_sequence() -> Result<()> {
    for device in devices() {
        let rows = [1, 2, 3].map(|seed| Rows::new(6, 4, DType::F32, seed, device));
        let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
        let states = DeltaStates::new(5, HEADS, 4, DType::F32, device)?;
        rows[0].step(&states, 4, 0, 4)?;
        let batch = [(4, 2), (0, 6), (3, 1)].map(|(slot, rows)| SlotRows { slot, rows });
        let batch = StateBatch::new(&batch, device)?;
        let joined = |of: fn(&Rows) -> &Tensor| {
            let parts = [
                of(&rows[0]).narrow(0, 4, 2)?,
                of(&rows[1]).clone(),
                of(&rows[2]).narrow(0, 0, 1)?,
            ];
            Tensor::cat(&parts, 0)
        };
        let (x, g, beta) = (joined(|x| &x.x)?, joined(|x| &x.g)?, joined(|x| &x.beta)?);
        let found = [
            states.causal_conv(&x, &rows[0].weight, &batch)?,
            states.gated_delta_rule([&x, &g, &beta], &batch)?,
        ];
        let alone = DeltaStates::new(3, HEADS, 4, DType::F32, device)?;
        let first = rows[0].step(&alone, 0, 0, 6)?;
        let second = rows[1].step(&alone, 1, 0, 6)?;
        let third = rows[2].step(&alone, 2, 0, 1)?;
        for (found, ((first, second), third)) in
            found.iter().zip(first.iter().zip(&second).zip(&third))
        {
            let expected = Tensor::cat(&[&first.narrow(0, 4, 2)?, second, third], 0)?;
            assert_eq!(numbers(found)?, numbers(&expected)?);
        }
    }
    Ok(())
}

#[test]
fn a_copy_is_a_fork_and_a_cleared_slot_is_a_start() -> Result<()> {
    for device in devices() {
        let rows = Rows::new(9, 4, DType::F32, 1, device)?;
        let mut states = DeltaStates::new(2, HEADS, 4, DType::F32, device)?;
        let [_, whole] = rows.step(&states, 0, 0, 9)?;
        states.clear(0)?;
        rows.step(&states, 0, 0, 7)?;
        states.grow(4)?;
        assert_eq!(states.len(), 4);
        states.copy(0, 3)?;
        for slot in [0, 3] {
            let [_, o] = rows.step(&states, slot, 7, 2)?;
            assert_eq!(numbers(&o)?, numbers(&whole.narrow(0, 7, 2)?)?);
        }
        // The windows too.
        let [expected, _] = rows.step(&states, 1, 0, 1)?;
        states.clear(3)?;
        let [found, _] = rows.step(&states, 3, 0, 1)?;
        assert_eq!(numbers(&found)?, numbers(&expected)?);
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let new = |slots, heads, taps, dtype| DeltaStates::new(slots, heads, taps, dtype, &Device::Cpu);
    let no_keys = DeltaHeads {
        key_heads: 0,
        ..HEADS
    };
    assert!(message(new(1, no_keys, 4, DType::F32)).contains("heads.key_heads: 0"));
    assert!(message(new(1, HEADS, 0, DType::F32)).contains("taps: 0, must be at least 1"));
    assert!(message(new(1, HEADS, 4, DType::U8)).contains("dtype: U8"));

    let mut states = new(2, HEADS, 4, DType::F32)?;
    assert!(message(states.grow(1)).contains("slots: 1, must be at least the current number, 2"));
    assert!(message(states.copy(2, 0)).contains("from: 2, must be below the number of slots, 2"));
    assert!(message(states.copy(0, 5)).contains("to: 5"));
    assert!(message(states.clear(2)).contains("slot: 2"));

    let rows = Rows::new(3, 4, DType::F32, 1, &Device::Cpu)?;
    let call = |x: &Tensor, batch: &[(usize, usize)]| {
        let batch: Vec<_> = batch
            .iter()
            .map(|&(slot, rows)| SlotRows { slot, rows })
            .collect();
        let batch = StateBatch::new(&batch, &Device::Cpu).expect("a batch");
        message(states.gated_delta_rule([x, &rows.g, &rows.beta], &batch))
    };
    assert!(call(&rows.x, &[]).contains("batch: no sequences"));
    assert!(call(&rows.x, &[(0, 1), (2, 2)]).contains("batch[1].slot: 2, must be below"));
    assert!(call(&rows.x, &[(0, 1), (0, 2)]).contains("batch[1].slot: 0 twice"));
    assert!(call(&rows.x, &[(0, 3), (1, 0)]).contains("batch[1].rows: 0, must be at least 1"));
    let error = call(&rows.x, &[(0, 2)]);
    assert!(
        error.contains("qkv: 3 rows, must be the sum of those of batch, 2"),
        "{error}"
    );
    let variable = Var::from_tensor(&rows.x)?;
    assert!(call(&variable, &[(0, 3)]).contains("qkv: a variable"));
    let error = call(&rows.x.to_dtype(DType::BF16)?, &[(0, 3)]);
    assert!(
        error.contains("qkv: BF16, must be of the dtype of the states, F32"),
        "{error}"
    );
    let batch = [SlotRows { slot: 0, rows: 3 }];
    let batch = StateBatch::new(&batch, &Device::Cpu)?;
    let weight = Tensor::zeros((WIDTH, 3), DType::F32, &Device::Cpu)?;
    let error = message(states.causal_conv(&rows.x, &weight, &batch));
    assert!(
        error.contains("weight: shape [32, 3], must be [32, 4]"),
        "{error}"
    );
    Ok(())
}
